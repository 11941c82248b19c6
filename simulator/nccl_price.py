"""Seconds of one of NCCL's collectives on a cluster, by the constants that come with the project.

Whatever the fit says, an operation costs no less than one that it contains, and no less across hosts than in one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from simulator.group_shape import GroupShape
from simulator.nccl import Calls, Floats, seconds_of
from simulator.nccl_constants import fitted_constants
from simulator.nominal import FULL_REACH, Reach
from simulator.specs.cluster import ClusterSpec
from simulator.specs.communication import Operation
from simulator.specs.units import GIB, MIB

# Devices in whose hosts switches reduce (NVLink SHARP, from Hopper on), and those of the generation before, by names.
_WITH_NVLS = ("H100", "H200", "H800", "H20", "GH200", "B200", "B100", "B300", "GB200", "GB300")
_OLDER = ("A100", "A800", "V100")
_FITTED_DEVICES = ("A100", "H100", "H200")
# What the logs hold that the constants were fitted to (`nccl_fitted.json` names them): hosts of each operation, the
# ranks of a host, bytes.
_FITTED_HOSTS = {Operation.ALL_REDUCE: 8, Operation.ALL_GATHER: 2, Operation.REDUCE_SCATTER: 1}
_FITTED_RANKS_PER_HOST = 8
_FITTED_BYTES = 16 * GIB
# Half-widths of the deciles, as logarithms: 1.6 times the mean errors of logs that were held out
# (traces/collectives_public_202611), for errors whose distribution is normal.
_LARGE_BYTES, _LARGE_SPREAD, _SMALL_SPREAD = 64 * MIB, 0.10, 0.24
SPREAD_PER_DOUBLING = 0.1  # what each doubling beyond what was measured adds
_UNKNOWN_DEVICE_SPREAD = 0.2
# What as many ranks cost in one host is the least across hosts; hosts of more devices are not in the logs.
_RANKS_OF_A_HOST = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    """What a collective takes alone.

    Attributes:
        latency_seconds: of it, what no bytes would take.
        log_spread: half-width of the deciles, as a logarithm.
        extrapolated: what lies beyond the measurements, such as "16 hosts, measured up to 8".
    """

    seconds: float
    latency_seconds: float
    log_spread: float
    extrapolated: tuple[str, ...] = ()


@lru_cache(maxsize=65536)
def published_price(
    operation: Operation,
    shape: GroupShape,
    num_bytes: float,
    cluster: ClusterSpec,
    *,
    has_cards: bool = True,
    reach: Reach = FULL_REACH,
) -> Price:
    """Return what the constants say.

    Args:
        num_bytes: of the full buffer.
        cluster: whose links and cards count, and no topology.
        has_cards: whether bytes over network cards count, as many as of equal messages; their latency does anyway.
        reach: what topology and faults leave of the rates of links and cards.
    """
    operations = [operation]
    if operation is Operation.ALL_REDUCE:
        operations += [Operation.REDUCE_SCATTER, Operation.ALL_GATHER]  # which it contains
    sizes = (max(num_bytes, 1.0), 1.0)
    seconds = _seconds(operations, shape, sizes, cluster, has_cards=has_cards, reach=reach).max(axis=0)
    if shape.spans_hosts and shape.num_ranks <= _RANKS_OF_A_HOST:
        together = published_price(operation, _together(shape), num_bytes, cluster, reach=replace(reach, cards=1.0))
        seconds = np.maximum(seconds, (together.seconds, together.latency_seconds))
    doublings, beyond = _beyond(operation, shape, num_bytes, cluster)
    spread = _LARGE_SPREAD if num_bytes >= _LARGE_BYTES else _SMALL_SPREAD
    return Price(
        seconds=float(max(seconds)),
        latency_seconds=float(min(seconds)),
        log_spread=spread + SPREAD_PER_DOUBLING * doublings,
        extrapolated=beyond,
    )


def pairwise_card_ratio(num_hosts: int) -> float:
    """Return the share of the cards' rate that an all-to-all between so many hosts reaches."""
    return 1 - fitted_constants().pair_card_loss / num_hosts


def _together(shape: GroupShape) -> GroupShape:
    return GroupShape(num_ranks=shape.num_ranks, num_hosts=1, ranks_per_host=shape.num_ranks, cards_per_host=0)


def _seconds(
    operations: Sequence[Operation],
    shape: GroupShape,
    sizes: Sequence[float],
    cluster: ClusterSpec,
    *,
    has_cards: bool,
    reach: Reach,
) -> Floats:
    """Return [operation, size] seconds."""
    count = len(operations) * len(sizes)
    name = cluster.device.name
    cards = shape.cards_per_host * cluster.host_link.bandwidth_bytes_per_second * reach.cards
    calls = Calls(
        operation=np.repeat([operation.value for operation in operations], len(sizes)),
        num_bytes=np.tile(sizes, len(operations)),
        num_ranks=np.full(count, float(shape.num_ranks)),
        num_hosts=np.full(count, float(shape.num_hosts)),
        ranks_per_host=np.full(count, float(shape.ranks_per_host)),
        link_rate=np.full(count, cluster.device_link.bandwidth_bytes_per_second * reach.links),
        cards_rate=np.full(count, cards if shape.spans_hosts and has_cards else math.inf),
        has_nvls=np.full(count, any(known in name for known in _WITH_NVLS)),
        is_older=np.full(count, any(known in name for known in _OLDER)),
        algorithm=np.full(count, cluster.nccl_algorithm.value if cluster.nccl_algorithm else ""),
        protocol=np.full(count, cluster.nccl_protocol.value if cluster.nccl_protocol else ""),
    )
    return seconds_of(calls, fitted_constants()).reshape(len(operations), len(sizes))


def _beyond(
    operation: Operation, shape: GroupShape, num_bytes: float, cluster: ClusterSpec
) -> tuple[float, tuple[str, ...]]:
    """Return how many doublings a collective lies beyond the logs, and in what."""
    hosts = _FITTED_HOSTS.get(operation, 1)
    limits = (
        (shape.num_hosts, hosts, "hosts"),
        (shape.ranks_per_host, _FITTED_RANKS_PER_HOST, "ranks a host"),
        (num_bytes, _FITTED_BYTES, "bytes"),
    )
    found = [
        (math.log2(value / most), f"{value:,.0f} {what}, measured up to {most:,}")
        for value, most, what in limits
        if value > most
    ]
    if not any(known in cluster.device.name for known in _FITTED_DEVICES):
        doublings = _UNKNOWN_DEVICE_SPREAD / SPREAD_PER_DOUBLING
        found.append((doublings, f"{cluster.device.name}, measured on {', '.join(_FITTED_DEVICES)}"))
    return sum(doublings for doublings, _ in found), tuple(text for _, text in found)
