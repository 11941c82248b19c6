"""What rings through the devices of a host put on its links."""

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import scipy.optimize
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# Up to here all rings are looked at: 5,040 through eight devices.
MAX_DEVICES_SEARCHED = 8


def ring_loads(route_loads: Floats, capacities: Floats) -> Floats:
    """Return what crosses each port for each byte that a rank passes on to the next, over the best mix of rings.

    Communication libraries run several rings side by side, so that all links are used; the mix is the one whose busiest
    port is done first. NCCL finds its rings by a search in steps of link rate, which can do no better.

    Args:
        route_loads: [source, target, port], what a byte from one device to another puts on each port.
        capacities: [port], bytes per second.
    """
    num_devices = len(route_loads)
    if num_devices < 2:
        return np.zeros(len(capacities))
    if _is_same_for_all_rings(route_loads):
        single: Floats = _loads_of(route_loads, np.arange(num_devices)[None])[0]
        return single
    rings = np.array(list(_rings(route_loads, capacities)))
    loads = np.unique(_loads_of(route_loads, rings).round(12), axis=0)
    times = loads / capacities
    # Least t with sum of shares = 1 and sum of shares * time <= t on each port.
    num_rings, scale = len(loads), times.max()
    cost = np.append(np.zeros(num_rings), 1.0)
    used = np.flatnonzero(loads.any(axis=0))
    upper = np.hstack([times[:, used].T / scale, -np.ones((len(used), 1))])
    equal = np.append(np.ones(num_rings), 0.0)[None]
    found = scipy.optimize.linprog(cost, upper, np.zeros(len(used)), equal, [1.0], method="highs")
    assert found.success, found.message
    shares = np.asarray(found.x)[:num_rings]
    return np.asarray(shares @ loads, dtype=np.float64)


def _is_same_for_all_rings(route_loads: Floats) -> bool:
    """Return whether loads are those of leaving the source and of entering the target, whoever the other is.

    All rings, which leave and enter each device once, then load all ports alike.
    """
    num_devices = len(route_loads)
    if num_devices < 3:
        return True
    between = ~np.eye(num_devices, dtype=bool)
    # With leaving[0] = 0, those of 0 to others are of entering them, and a third device tells that of entering 0.
    entering = route_loads[0].copy()
    entering[0] = route_loads[1, 0] - route_loads[1, 2] + route_loads[0, 2]
    leaving = route_loads[:, 0] - entering[0]
    leaving[0] = 0.0
    return bool(np.allclose((leaving[:, None] + entering[None, :])[between], route_loads[between]))


def _loads_of(route_loads: Floats, rings: NDArray[np.int64]) -> Floats:
    """Return [ring, port]: what each ring puts on each port when every device passes on a byte."""
    return np.asarray(
        sum(route_loads[here, there] for here, there in zip(rings.T, np.roll(rings, -1, axis=1).T, strict=True))
    )


def _rings(route_loads: Floats, capacities: Floats) -> Iterator[Sequence[int]]:
    """Yield rings to choose from: all of few devices; of many, that to the nearest next, and its way back."""
    num_devices = len(route_loads)
    if num_devices <= MAX_DEVICES_SEARCHED:
        yield from ((0, *rest) for rest in itertools.permutations(range(1, num_devices)))
        return
    distances = (route_loads / capacities).sum(axis=2)
    ring = [0]
    while len(ring) < num_devices:
        left = [device for device in range(num_devices) if device not in ring]
        ring.append(min(left, key=lambda device: (distances[ring[-1], device], device)))
    yield ring
    yield ring[:1] + ring[:0:-1]
