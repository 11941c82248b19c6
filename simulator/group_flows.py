"""Flows of one group's traffic, which last as long as one says."""

from dataclasses import dataclass

from simulator.fabric import Fabric, Traffic
from simulator.specs.cost import Flow


@dataclass(frozen=True, slots=True)
class WireSeconds:
    """What bytes take at the full rate of ports.

    Attributes:
        of_links: of the busiest device's port, or of the busiest link inside a host.
        of_cards: of the busiest host's network cards or, of pairs, of the busiest card; 0 inside one host. Beside
            actual cards also of the links to them, and of leaf switches.
    """

    of_links: float
    of_cards: float

    @property
    def longest(self) -> float:
        """Of all ports."""
        return max(self.of_links, self.of_cards)


class GroupFlows:
    """Flows of one collective or message.

    Args:
        nominal: seconds that the bytes take on the nominal ports.

    Attributes:
        actual: seconds that they take on those that there are; links and cards may share some.
        is_pairs: whether they are messages of pairs, no ring.
    """

    def __init__(self, fabric: Fabric, nominal: WireSeconds, traffic: Traffic, *, spans_hosts: bool) -> None:
        self.nominal, self._fabric = nominal, fabric
        self._group = traffic.group
        self.is_pairs = traffic.pair_bytes is not None
        self._links = fabric.link_loads(traffic)
        self._cards = fabric.card_loads(traffic) if spans_hosts and fabric.has_nics else {}
        self._hosts = fabric.undivided_host_flows(traffic) if spans_hosts and not fabric.has_nics else []
        of_links, of_cards = fabric.load_seconds(traffic, self._links, self._cards)
        own = fabric.device_seconds(self._group, nominal.of_links)
        self.actual = WireSeconds(max(own, of_links), max(of_cards, _longest(self._hosts)))

    def lasting(self, seconds: float, *, with_cards: bool) -> tuple[Flow, ...]:
        """Return flows of which the longest alone last so many seconds.

        A device's port is busy for what its bytes take as long, also while pipelines fill and bytes are copied.

        Args:
            with_cards: whether this is said of the network between hosts too; else its flows take what they take.
        """
        longest = self.actual.longest if with_cards else self.actual.of_links
        factor = seconds / longest if longest > 0 else 0.0
        of_cards = factor if with_cards else 1.0
        found: list[Flow] = []
        if factor > 0:
            busy = self.nominal.of_links * factor
            found += self._fabric.device_flows(self._group, busy, lasting_seconds=seconds)
            found += self._fabric.flows(self._links, factor=factor)
        if of_cards > 0:
            found += self._fabric.flows(self._cards, factor=of_cards)
            found += (_scaled(flow, of_cards) for flow in self._hosts)
        return tuple(found)


def _longest(flows: list[Flow]) -> float:
    return max((flow.num_bytes / flow.max_bytes_per_second for flow in flows), default=0.0)


def _scaled(flow: Flow, factor: float) -> Flow:
    """Return a flow that alone lasts a factor longer; one that lasts less carries less."""
    return Flow(
        num_bytes=flow.num_bytes * min(factor, 1.0),
        ports=flow.ports,
        max_bytes_per_second=flow.max_bytes_per_second / max(factor, 1.0),
    )
