"""Which links of a host traffic takes from one of its parts to another."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from simulator.specs.topology import DEVICE, NIC, SOCKET, HostTopology, LinkKind, number_of, stem_of

# Shares of what is sent, by directed link; those of routes side by side sum to one at each step.
Route = Mapping[str, float]


def port_name(source: str, target: str) -> str:
    """Return the name of a link in one direction."""
    return f"{source}>{target}"


@dataclass(frozen=True)
class _Found:
    """Shortest routes over links of kinds up to one."""

    rank: int
    num_links: int
    route: Route


class HostRoutes:
    """Routes within a host.

    Traffic takes links of the first kinds of `LinkKind` that suffice, then the fewest links, and all routes that are
    equal in that share it alike, whatever their rates: so a wider link never draws traffic away from where it was. A
    route passes no device and no network card, except that NVLink may pass one device where no other NVLink leads on.

    Args:
        topology: of the host.
        lost: pairs of ends whose link is gone.

    Source: the order is that of NCCL's path types (NVL, NVB, PIX, PXB, PHB, SYS; src/graph/topo.h of NVIDIA/nccl).
    """

    def __init__(self, topology: HostTopology, lost: Iterable[frozenset[str]] = ()) -> None:
        self._topology = topology
        gone = set(lost)
        self._neighbours: dict[int, dict[str, list[str]]] = {kind.rank: {} for kind in LinkKind}
        for link in topology.links:
            for a, b in link.pairs():
                if frozenset((a, b)) in gone:
                    continue
                for rank in range(link.kind.rank, len(LinkKind)):
                    self._neighbours[rank].setdefault(a, []).append(b)
                    self._neighbours[rank].setdefault(b, []).append(a)
        self._parts = sorted(self._neighbours[len(LinkKind) - 1])
        self._best = cache(self._search)

    def between_devices(self, source: int, target: int) -> Route | None:
        """Return the route from one device to another; None if none is left."""
        first, second = f"{DEVICE}{source}", f"{DEVICE}{target}"
        return self._direct(first, second) if self._topology.peer_access else self._through_memory(first, second)

    def to_nic(self, device: int, nic: int) -> Route | None:
        """Return the route from a device to a network card."""
        first, second = f"{DEVICE}{device}", f"{NIC}{nic}"
        return self._direct(first, second) if self._topology.gpu_direct else self._through_memory(first, second)

    def from_nic(self, nic: int, device: int) -> Route | None:
        """Return the route from a network card to a device: that to it, the other way."""
        route = self.to_nic(device, nic)
        return None if route is None else {_reversed(port): share for port, share in route.items()}

    def is_joined_by_nvlink(self) -> bool:
        """Return whether NVLink leads from every device to every other."""
        devices = [f"{DEVICE}{number}" for number in range(self._topology.num_devices)]
        found = [self._best(a, b) for a in devices for b in devices if a != b]
        return self._topology.peer_access and all(each is not None and each.rank == 0 for each in found)

    def distance(self, device: int, nic: int) -> tuple[int, int] | None:
        """Return how far a card is from a device: the worst kind of link, and their number; None if nothing leads."""
        found = self._best(f"{DEVICE}{device}", f"{NIC}{nic}")
        return None if found is None else (found.rank, found.num_links)

    def _direct(self, source: str, target: str) -> Route | None:
        found = self._best(source, target)
        return None if found is None else found.route

    def _through_memory(self, source: str, target: str) -> Route | None:
        """Return the route by the memory of the socket that is nearest to the source."""
        sockets = [part for part in self._parts if stem_of(part) == SOCKET]
        found = [(self._best(source, socket), socket) for socket in sockets]
        near = [(each.rank, each.num_links, number_of(socket), each) for each, socket in found if each is not None]
        if not near:
            return None
        *_, number, first = min(near, key=lambda each: each[:3])
        second = self._best(f"{SOCKET}{number}", target)
        return None if second is None else _joined(first.route, second.route)

    def _search(self, source: str, target: str) -> _Found | None:
        for rank in range(len(LinkKind)):
            neighbours = self._neighbours[rank]
            if (found := _shortest(neighbours, source, target)) is not None:
                return _Found(rank, *found)
            if rank == 0 and (found := _by_one_device(neighbours, source, target)) is not None:
                return _Found(rank, *found)
        return None


def _shortest(neighbours: Mapping[str, Sequence[str]], source: str, target: str) -> tuple[int, dict[str, float]] | None:
    """Return the number of links of the shortest routes, and what part of them crosses each link."""
    down, up = _layers(neighbours, source, target), _layers(neighbours, target, source)
    if target not in down:
        return None
    length, num_routes = down[target]
    route = {}
    for part, (distance, count) in down.items():
        for other in neighbours.get(part, ()):
            if other in up and distance + 1 + up[other][0] == length and (other == target or _passes(other)):
                route[port_name(part, other)] = count * up[other][1] / num_routes
    return length, route


def _layers(neighbours: Mapping[str, Sequence[str]], source: str, target: str) -> dict[str, tuple[int, int]]:
    """Return the distance of parts from a source, and the number of shortest routes to them, passing switches alone."""
    found = {source: (0, 1)}
    layer = [source]
    while layer and target not in found:
        counts: dict[str, int] = {}
        for part in layer:
            for other in neighbours.get(part, ()):
                if other not in found and (other == target or _passes(other)):
                    counts[other] = counts.get(other, 0) + found[part][1]
        distance = found[layer[0]][0] + 1
        found.update({part: (distance, count) for part, count in counts.items()})
        layer = list(counts)
    return found


def _by_one_device(
    neighbours: Mapping[str, Sequence[str]], source: str, target: str
) -> tuple[int, dict[str, float]] | None:
    """Return the shortest routes that one device passes on."""
    if stem_of(source) != DEVICE or stem_of(target) != DEVICE:
        return None
    found: list[tuple[int, dict[str, float]]] = []
    for relay in neighbours:
        if stem_of(relay) == DEVICE and relay not in (source, target):
            first, second = _shortest(neighbours, source, relay), _shortest(neighbours, relay, target)
            if first is not None and second is not None:
                found.append((first[0] + second[0], dict(_joined(first[1], second[1]))))
    if not found:
        return None
    least = min(length for length, _ in found)
    routes = [route for length, route in found if length == least]
    total: dict[str, float] = {}
    for route in routes:
        for port, share in route.items():
            total[port] = total.get(port, 0.0) + share / len(routes)
    return least, total


def _passes(part: str) -> bool:
    """Return whether a part of a host passes on what is not its own."""
    return stem_of(part) not in (DEVICE, NIC)


def _joined(first: Route, second: Route) -> Route:
    """Return a route that follows one after another."""
    return {port: first.get(port, 0.0) + second.get(port, 0.0) for port in (*first, *second)}


def _reversed(port: str) -> str:
    source, target = port.split(">")
    return port_name(target, source)
