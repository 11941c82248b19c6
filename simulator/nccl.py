"""Seconds of NCCL's collectives from few constants: algorithms, protocols, links, network cards.

Each algorithm under each protocol costs a start, hops inside hosts and between them, bytes over the slower of the links
and the cards, and a ramp, for pipelines that fill: a power of the bytes. It is the shape of NCCL's own tuning model
(src/graph/tuning.cc) with the ramp added; the constants are fitted to published logs (`nccl_constants.py`). What NCCL
takes by itself is the least of those that it considers: across hosts with NVLink SHARP, all-reduces go by trees under
LL and LL128, by NVLS trees and by rings under Simple. (Its own model ranks the others behind these:
h100_400g_nccl_tuning_model_autoparallel.txt of ../shared/nccl_logs.)

Works on arrays of calls, since fits price thousands at once; times are in seconds, sizes those of the full buffer.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.nccl_constants import NcclConstants, ProtocolConstants
from simulator.specs.communication import Algorithm, Operation, Protocol

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Way = tuple[Algorithm, Protocol]

# Where curves cross, the sum is softer than the least of both: a twenty-fifth of a factor of e.
_SOFTNESS = 0.04
_US, _MB, _GB = 1e-6, 1e6, 1e9
_NEVER = np.inf


@dataclass(frozen=True, kw_only=True)
class Calls:
    """Collectives to price, an array entry each.

    Attributes:
        operation: one of `Operation`.
        num_bytes: of the full buffer; of an all-to-all with a rank's own share.
        num_ranks, num_hosts, ranks_per_host: of the group.
        link_rate: of a device's port inside its host, `LinkSpec.bandwidth_bytes_per_second`.
        cards_rate: of all network cards that a host's ranks use; infinite inside one host.
        has_nvls: whether the switches inside hosts reduce (NVLink SHARP, from Hopper on).
        is_older: whether the devices are of a generation before Hopper, which takes longer for a hop.
        algorithm, protocol: the only ones to take; an empty text for NCCL's own choice.
    """

    operation: NDArray[np.str_]
    num_bytes: Floats
    num_ranks: Floats
    num_hosts: Floats
    ranks_per_host: Floats
    link_rate: Floats
    cards_rate: Floats
    has_nvls: Bools
    is_older: Bools
    algorithm: NDArray[np.str_]
    protocol: NDArray[np.str_]

    @property
    def spans_hosts(self) -> Bools:
        """Whether each call crosses hosts."""
        return np.asarray(self.num_hosts > 1)

    @property
    def is_all_reduce(self) -> Bools:
        """Whether each call is an all-reduce."""
        return np.asarray(self.operation == Operation.ALL_REDUCE.value)


def seconds_of_ways(calls: Calls, constants: NcclConstants) -> dict[Way, Floats]:
    """Return what each algorithm under each protocol would take; infinite where it does not exist."""
    ways: dict[Way, Floats] = {}
    is_pairwise = np.isin(calls.operation, (Operation.ALL_TO_ALL.value, Operation.SEND_RECEIVE.value))
    if is_pairwise.all():  # which has no other way
        return {(Algorithm.PAIRWISE, Protocol.SIMPLE): _pairwise_seconds(calls, constants)}
    for protocol, of_protocol in constants.protocols().items():
        ring = _ring_seconds(calls, constants, of_protocol, protocol)
        ways[Algorithm.RING, protocol] = np.where(is_pairwise, _NEVER, ring)
        tree = _tree_seconds(calls, constants, of_protocol, protocol)
        ways[Algorithm.TREE, protocol] = np.where(calls.is_all_reduce, tree, _NEVER)
    reduces = calls.is_all_reduce & calls.has_nvls
    inside, across = reduces & ~calls.spans_hosts & (calls.num_ranks > 2), reduces & calls.spans_hosts
    ways[Algorithm.NVLS, Protocol.SIMPLE] = np.where(inside, _nvls_seconds(calls, constants), _NEVER)
    tree_exists = across & (calls.ranks_per_host > 2)
    ways[Algorithm.NVLS_TREE, Protocol.SIMPLE] = np.where(tree_exists, _nvls_tree_seconds(calls, constants), _NEVER)
    ways[Algorithm.PAIRWISE, Protocol.SIMPLE] = np.where(is_pairwise, _pairwise_seconds(calls, constants), _NEVER)
    return ways


def seconds_of(calls: Calls, constants: NcclConstants) -> Floats:
    """Return what each call takes by the way that is asked for, or by NCCL's own choice.

    Where what is asked for does not exist, such as NVLS without the switches for it, the choice is NCCL's own. (NCCL
    itself may refuse instead, from release 2.24 on.)
    """
    ways = seconds_of_ways(calls, constants)
    stacked = np.stack(list(ways.values()))
    asked = np.stack([_is_asked(calls, way) for way in ways]) & np.isfinite(stacked)
    free = np.stack([_is_considered(calls, way) for way in ways])
    taken = np.where(np.where(asked.any(axis=0), asked, free), stacked, _NEVER)
    logs = np.log(taken)
    least = logs.min(axis=0)
    seconds: Floats = np.exp(least - _SOFTNESS * np.log(np.exp(-(logs - least) / _SOFTNESS).sum(axis=0)))
    return seconds


def _is_asked(calls: Calls, way: Way) -> Bools:
    algorithm, protocol = way
    is_any = (calls.algorithm == "") & (calls.protocol == "")
    asked: Bools = np.isin(calls.algorithm, ("", algorithm.value)) & np.isin(calls.protocol, ("", protocol.value))
    return np.asarray(asked & ~is_any)


def _is_considered(calls: Calls, way: Way) -> Bools:
    """Return which calls NCCL may send a way by itself: across hosts with NVLS trees, not all of those that exist."""
    algorithm, protocol = way
    considered = np.ones(calls.num_bytes.shape, bool)
    is_behind = (algorithm is Algorithm.TREE) == (protocol is Protocol.SIMPLE)
    if algorithm in (Algorithm.RING, Algorithm.TREE) and is_behind:
        considered &= ~(calls.is_all_reduce & calls.has_nvls & calls.spans_hosts & (calls.ranks_per_host > 2))
    return considered


def _ring_seconds(calls: Calls, constants: NcclConstants, of: ProtocolConstants, protocol: Protocol) -> Floats:
    n, hosts, is_all_reduce = calls.num_ranks, calls.num_hosts, calls.is_all_reduce
    rounds = np.where(is_all_reduce, 2.0, 1.0)
    crossings = np.where(calls.spans_hosts, rounds * hosts, 0.0)
    hops = np.maximum(rounds * (n - 1) - crossings, 0.0)
    start = of.start_us * _age(calls, constants.older_start_ratio) + of.hop_us * hops * _age(
        calls, constants.older_hop_ratio
    )
    port_bytes = rounds * (n - 1) / n * calls.num_bytes
    copy_ratio = constants.copy_ratio if protocol is Protocol.SIMPLE else constants.fast_copy_ratio
    # An all-gather and a reduce-scatter copy a rank's own share; an all-reduce adds it.
    of_reduce = constants.add_ratio if protocol is Protocol.SIMPLE else _NEVER
    copied = calls.num_bytes / n / (calls.link_rate * np.where(is_all_reduce, of_reduce, copy_ratio))
    over_links = port_bytes / (calls.link_rate * of.link_ratio) + copied
    moving = np.maximum(over_links, port_bytes / (calls.cards_rate * of.card_ratio))
    seconds = (start + of.crossing_us * crossings) * _US + moving
    if protocol is Protocol.SIMPLE:
        height = np.where(calls.operation == Operation.REDUCE_SCATTER.value, constants.scatter_ramp_ratio, 1.0)
        across = np.where(calls.spans_hosts, constants.ring_ramp_across_us, 0.0)
        height = height * (constants.ring_ramp_us + across)
        seconds = seconds + _ramp_seconds(calls, constants, height, port_bytes)
    return seconds


def _tree_seconds(calls: Calls, constants: NcclConstants, of: ProtocolConstants, protocol: Protocol) -> Floats:
    """Return what a double binary tree takes: up and down a chain in each host, and the levels of hosts."""
    levels = np.log2(calls.num_hosts)
    hop = of.hop_us * constants.tree_hop_ratio * _age(calls, constants.older_hop_ratio)
    start = of.start_us * _age(calls, constants.older_start_ratio)
    start = start + 2 * (calls.ranks_per_host - 1) * hop + 2 * levels * of.crossing_us
    over_links = 2 * calls.num_bytes / (calls.link_rate * of.tree_link_ratio)
    moving = np.maximum(over_links, _tree_card_bytes(calls) / (calls.cards_rate * of.card_ratio))
    seconds = start * _US + moving
    if protocol is Protocol.SIMPLE:
        height = np.where(calls.spans_hosts, constants.ring_ramp_across_us, 0.0) + constants.ring_ramp_us
        seconds = seconds + _ramp_seconds(calls, constants, height, 2 * calls.num_bytes)
    return seconds


def _nvls_seconds(calls: Calls, constants: NcclConstants) -> Floats:
    """Return what an all-reduce by the switches of one host takes: each rank sends and receives its bytes once."""
    ramp = constants.nvls_ramp_us * (calls.num_bytes / _MB) ** constants.ramp_exponent
    moving = calls.num_bytes / (calls.link_rate * constants.nvls_ratio)
    return (constants.nvls_start_us + ramp) * _US + moving


def _nvls_tree_seconds(calls: Calls, constants: NcclConstants) -> Floats:
    """Return what switches in hosts and a tree of hosts take; the ramp grows with the hosts, as logs of 2, 4, 8 say."""
    start = constants.nvls_tree_start_us + constants.nvls_tree_level_us * np.log2(calls.num_hosts)
    ramp = constants.nvls_tree_ramp_us + constants.nvls_tree_ramp_host_us * (calls.num_hosts - 2) / 2
    ramp = ramp * (calls.num_bytes / _MB) ** constants.nvls_tree_ramp_exponent
    over_links = calls.num_bytes / (calls.link_rate * constants.nvls_tree_ratio)
    over_cards = _tree_card_bytes(calls) / (calls.cards_rate * constants.simple.card_ratio)
    return (start + ramp) * _US + np.maximum(over_links, over_cards)


def _tree_card_bytes(calls: Calls) -> Floats:
    """Return what leaves a host: of two hosts all bytes once; of more a host passes them on in one of the trees."""
    return np.where(calls.num_hosts > 2, 2.0, 1.0) * calls.num_bytes


def _pairwise_seconds(calls: Calls, constants: NcclConstants) -> Floats:
    """Return what messages between all pairs take, or one message of each rank to another."""
    n, hosts = calls.num_ranks, calls.num_hosts
    is_one = calls.operation == Operation.SEND_RECEIVE.value
    start = constants.pair_start_us * _age(calls, constants.older_start_ratio)
    start = start + constants.pair_hop_us * np.where(is_one, 1.0, n - 1)
    across = constants.pair_across_us + constants.pair_across_rank_us * np.where(is_one, 2.0, n)
    start = start + np.where(calls.spans_hosts, across, 0.0)
    sent = np.where(is_one, 1.0, (n - 1) / n) * calls.num_bytes
    leaving = np.where(is_one, 1.0, (1 - calls.ranks_per_host / n)) * calls.num_bytes * calls.ranks_per_host
    card_ratio = 1 - constants.pair_card_loss / hosts
    over_links = sent / (calls.link_rate * constants.pair_link_ratio)
    over_links = over_links + np.where(is_one, 0.0, calls.num_bytes / n) / (calls.link_rate * constants.pair_copy_ratio)
    over_cards = np.where(calls.spans_hosts, leaving, 0.0) / (calls.cards_rate * card_ratio)
    ramp = _ramp_seconds(calls, constants, np.full(n.shape, constants.pair_ramp_us), calls.num_bytes)
    return start * _US + np.maximum(over_links, over_cards) + ramp


def _ramp_seconds(calls: Calls, constants: NcclConstants, height_us: Floats, num_bytes: Floats) -> Floats:
    """Return what pipelines lose while they fill: more over slower links."""
    slower = constants.reference_link_rate / calls.link_rate
    return height_us * (num_bytes / _MB) ** constants.ramp_exponent * slower * _US


def _age(calls: Calls, ratio: float) -> Floats:
    return np.where(calls.is_older, ratio, 1.0)
