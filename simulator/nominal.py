"""What curves know of a cluster: healthy ports of devices and network cards, and nothing of what lies between them.

Published curves are of hosts whose devices have full NVLink and a card each, and of networks that carry whatever the
cards do. How far a topology, a slow link or over-subscription lengthens a collective is told by the seconds that its
bytes take on the ports that are there, over those that the same bytes take here.
"""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from simulator.fabric import Traffic, fabric_of
from simulator.group_flows import GroupFlows, WireSeconds
from simulator.group_shape import GroupShape, group_shape
from simulator.specs.cluster import ClusterSpec

Floats = NDArray[np.float64]

_GROUPS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Reach:
    """Share of the nominal rates of links inside hosts and of cards that is left to a group's traffic, at most 1."""

    links: float = 1.0
    cards: float = 1.0


FULL_REACH = Reach()


def reach(nominal: WireSeconds, actual: WireSeconds) -> Reach:
    """Return what is left of the nominal rates; rounding is no loss."""
    return Reach(_left(nominal.of_links, actual.of_links), _left(nominal.of_cards, actual.of_cards))


def _left(nominal_seconds: float, actual_seconds: float) -> float:
    return 1.0 if actual_seconds <= nominal_seconds * (1 + 1e-9) else nominal_seconds / actual_seconds


@dataclass(frozen=True, eq=False)
class _Cards:
    """The network cards of a group.

    Attributes:
        host_of: each rank's, numbered among the group's.
        shares: [rank, card] of what a rank sends, through each card of its host.
    """

    shape: GroupShape
    host_of: NDArray[np.int64]
    shares: Floats


class NominalFabric:
    """The ports of a cluster without faults, topology or switches.

    Attributes:
        cluster: without all that curves know nothing of.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self.cluster = replace(cluster, host=None, network=None, link_faults=(), stragglers=(), jitter=0.0)
        self._healthy = replace(cluster, link_faults=())
        self._nic_rate = cluster.nic_bytes_per_second
        self._cards: dict[tuple[int, ...], _Cards] = {}
        self.topology_seconds = cache(self._topology_seconds)

    def shape(self, group: tuple[int, ...]) -> GroupShape:
        """Return the shape of a group, with the cards that serve its ranks."""
        return self._cards_of(group).shape

    def wire_seconds(self, traffic: Traffic) -> WireSeconds:
        """Return what the traffic of a group takes."""
        cards = self._cards_of(traffic.group)
        device_rate = self.cluster.device_link.bandwidth_bytes_per_second
        share_rate = self.cluster.host_link.bandwidth_bytes_per_second
        if traffic.pair_bytes is None:
            card_rate = share_rate * cards.shape.cards_per_host
            across = traffic.ring_bytes / card_rate if cards.shape.spans_hosts else 0.0
            return WireSeconds(traffic.ring_bytes / device_rate, across)
        sent = traffic.pair_bytes
        busiest = float(max(sent.sum(axis=0).max(), sent.sum(axis=1).max()))
        if not cards.shape.spans_hosts:
            return WireSeconds(busiest / device_rate, 0.0)
        crossing = sent * (cards.host_of[:, None] != cards.host_of[None, :])
        through = max(_by_host(crossing.sum(axis=axis)[:, None] * cards.shares, cards.host_of).max() for axis in (0, 1))
        return WireSeconds(busiest / device_rate, float(through) / self._nic_rate)

    def _topology_seconds(self, num_ranks: int, num_hosts: int, is_pairs: bool) -> tuple[WireSeconds, WireSeconds]:
        """Return what a byte takes on the first ranks of the first hosts, nominally and by the healthy topology.

        The latter is part of what was measured there. What the cluster cannot hold was measured elsewhere.
        """
        per_host, most = -(-num_ranks // num_hosts), self._healthy.devices_per_host
        if per_host > most or num_hosts > self._healthy.num_hosts or num_ranks < 2:
            return WireSeconds(1.0, 1.0), WireSeconds(1.0, 1.0)
        group = tuple(host * most + device for host in range(num_hosts) for device in range(per_host))[:num_ranks]
        pair_bytes = 1.0 - np.eye(num_ranks) if is_pairs else None
        traffic = Traffic(group=group, ring_bytes=1.0, pair_bytes=pair_bytes)
        wire = self.wire_seconds(traffic)
        return wire, GroupFlows(fabric_of(self._healthy), wire, traffic, spans_hosts=num_hosts > 1).actual

    def _cards_of(self, group: tuple[int, ...]) -> _Cards:
        if group not in self._cards:
            if len(self._cards) >= _GROUPS_KEPT:
                self._cards.clear()
            self._cards[group] = self._found_cards(group)
        return self._cards[group]

    def _found_cards(self, group: tuple[int, ...]) -> _Cards:
        per_host, num_nics = self._healthy.devices_per_host, self._healthy.num_nics
        _, host_of = np.unique(np.array(group) // per_host, return_inverse=True)
        fabric, shape = fabric_of(self._healthy), group_shape(group, self.cluster)
        if not shape.spans_hosts:
            return _Cards(shape, host_of, np.zeros((len(group), 0)))
        shares = fabric.nic_shares(group)
        num_used = int((_by_host(shares, host_of) > 0).sum(axis=1).min())
        return _Cards(replace(shape, cards_per_host=num_used * per_host / num_nics), host_of, shares)


def _by_host(shares: Floats, host_of: NDArray[np.int64]) -> Floats:
    """Return [host, card] sums of shares of ranks."""
    found = np.zeros((int(host_of.max()) + 1, shares.shape[1]))
    np.add.at(found, host_of, shares)
    return found
