"""HostTopology, NetworkSpec and what can be wrong with them: how devices hang together in a host and between hosts."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from simulator.errors import SpecError
from simulator.specs.checks import require, require_at_least, require_positive

# Names that mean something; all others are switches and bridges, which pass traffic on.
DEVICE, NIC, SOCKET = "device", "nic", "socket"
# Ends of links that no host lists: a device's port into its host, a NIC's into the network, a leaf switch's to the
# spine.
HOST, NETWORK, LEAF, SPINE = "host", "network", "leaf", "spine"

_NAME = re.compile(r"(?P<stem>[a-z][a-z_]*)(?:(?P<index>\d+)|\[(?P<first>\d+)-(?P<last>\d+)\])?")


class LinkKind(StrEnum):
    """What joins two parts of a host; traffic takes links of the first kinds where they suffice."""

    NVLINK = "nvlink"  # NVLink or xGMI, from device to device or to a switch of them
    PCIE = "pcie"  # to and between PCIe switches
    HOST_BRIDGE = "host_bridge"  # from PCIe to a processor, and between its host bridges
    SOCKET = "socket"  # between processors: QPI, UPI, Infinity Fabric

    @property
    def rank(self) -> int:
        """Place in the order in which traffic prefers kinds."""
        return list(LinkKind).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLink:
    """A link of a host, as wide in one direction as in the other.

    Attributes:
        ends: what it joins. `device0` and so on are the devices, `nic0` the network cards, `socket0` the processors
            with their memory; any other name is a switch or a bridge. `device[0-3]` stands for four links, to the four
            of `pcie[0-3]` one by one, or all to `nvswitch`.
        bandwidth_bytes_per_second: sustained rate of each direction.
    """

    ends: tuple[str, str]
    kind: LinkKind
    bandwidth_bytes_per_second: float

    def __post_init__(self) -> None:
        require_positive(bandwidth_bytes_per_second=self.bandwidth_bytes_per_second)
        pairs = list(self.pairs())
        require(all(a != b for a, b in pairs), "ends", "must be two parts of the host", self.ends)

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield the two ends of each link that this stands for."""
        first, second = (_names(end) for end in self.ends)
        if len(first) != len(second) and 1 not in (len(first), len(second)):
            raise SpecError(f"ends must be ranges of one length, or one of them a single name, got {self.ends!r}")
        count = max(len(first), len(second))
        yield from zip(
            first if len(first) == count else first * count,
            second if len(second) == count else second * count,
            strict=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTopology:
    """What joins the devices and network cards of a host; every host of a cluster is alike.

    Attributes:
        links: all of them.
        gpu_direct: whether network cards read devices' memory; else traffic to other hosts goes through the memory of
            the socket that is next to the device.
        peer_access: whether devices read each other's memory; else traffic between them goes through that of the
            sender's socket.
    """

    links: tuple[HostLink, ...]
    gpu_direct: bool = True
    peer_access: bool = True

    def __post_init__(self) -> None:
        pairs = [frozenset(pair) for link in self.links for pair in link.pairs()]
        twice = next((pair for pair in pairs if pairs.count(pair) > 1), None)
        require(twice is None, "links", "must name each pair of ends once", twice and sorted(twice))
        for stem in (DEVICE, NIC, SOCKET):
            require(
                self._numbers(stem) == set(range(len(self._numbers(stem)))),
                "links",
                f"must number each {stem} from 0 without gaps",
                sorted(self._numbers(stem)),
            )
        require(self.num_devices > 0, "links", "must lead to device0 and all others of the host", list(pairs))
        apart = _apart(tuple(tuple(pair) for pair in pairs))
        require(apart is None, "links", "must join all parts of the host, so also these two", apart)
        if not (self.gpu_direct and self.peer_access):
            field = "peer_access" if self.gpu_direct else "gpu_direct"
            require(bool(self._numbers(SOCKET)), field, "must be true unless links lead to socket0, a memory", False)
        require(self.gpu_direct or self.num_nics > 0, "gpu_direct", "must be true unless links lead to nic0", False)

    @property
    def num_devices(self) -> int:
        """Devices of a host."""
        return len(self._numbers(DEVICE))

    @property
    def num_nics(self) -> int:
        """Network cards of a host; 0 where no link leads to one."""
        return len(self._numbers(NIC))

    def _numbers(self, stem: str) -> set[int]:
        return {number_of(end) for link in self.links for pair in link.pairs() for end in pair if stem_of(end) == stem}


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkSpec:
    """Switches between hosts: each host below a leaf, leaves joined by spines.

    Attributes:
        hosts_per_leaf: whose cards one leaf joins; None for all hosts of the cluster.
        oversubscription: rate of a leaf's links to hosts over that of its links to the spines.
        rails: whether card `i` of all hosts has leaves of its own, so that traffic between cards of other numbers
            crosses a spine, or NVLink first.
        nics_per_host: network cards, where the topology of the host does not say; None for one a device.
    """

    hosts_per_leaf: int | None = None
    oversubscription: float = 1.0
    rails: bool = False
    nics_per_host: int | None = None

    def __post_init__(self) -> None:
        require_at_least(1, oversubscription=self.oversubscription)
        if self.hosts_per_leaf is not None:
            require_positive(hosts_per_leaf=self.hosts_per_leaf)
        if self.nics_per_host is not None:
            require_positive(nics_per_host=self.nics_per_host)
        if self.hosts_per_leaf is None and not self.rails:
            rule = "must be 1 unless hosts_per_leaf or rails says that there are several leaves"
            require(self.oversubscription == 1, "oversubscription", rule, self.oversubscription)


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A device that computes more slowly than its likes.

    Attributes:
        device: of the cluster, counted over all hosts; rank r runs on device r.
        slowdown: factor of the time of its compute tasks, at least 1.
    """

    device: int
    slowdown: float

    def __post_init__(self) -> None:
        require_at_least(0, device=self.device)
        require_at_least(1, slowdown=self.slowdown)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFault:
    """A link that is slower than its likes, or lost; both directions are.

    Attributes:
        ends: of a link of the host, or ("device3", "host") for all that a device sends to its host, ("nic0", "network")
            for a network card, ("leaf0", "spine") for a leaf switch.
        host: which one; None for a leaf, and for all hosts.
        bandwidth_ratio: of its rate, 0 for a lost link; None where the rate is given.
        bandwidth_bytes_per_second: rate that it has left; None where the ratio is given.
    """

    ends: tuple[str, str]
    host: int | None = None
    bandwidth_ratio: float | None = None
    bandwidth_bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        if self.host is not None:
            require_at_least(0, host=self.host)
            require(
                stem_of(self.ends[0]) != LEAF, "host", "must be left out for a leaf, which is of no host", self.host
            )
        if self.bandwidth_ratio is not None:
            require(0 <= self.bandwidth_ratio <= 1, "bandwidth_ratio", "must be within [0, 1]", self.bandwidth_ratio)
        if self.bandwidth_bytes_per_second is not None:
            require_positive(bandwidth_bytes_per_second=self.bandwidth_bytes_per_second)
        given = [value for value in (self.bandwidth_ratio, self.bandwidth_bytes_per_second) if value is not None]
        require(len(given) == 1, "bandwidth_ratio", "or bandwidth_bytes_per_second must be given, not both", given)

    def rate(self, healthy_bytes_per_second: float) -> float:
        """Return what is left of a rate."""
        if self.bandwidth_bytes_per_second is not None:
            return min(healthy_bytes_per_second, self.bandwidth_bytes_per_second)
        assert self.bandwidth_ratio is not None
        return healthy_bytes_per_second * self.bandwidth_ratio


def stem_of(end: str) -> str:
    """Return the name of a part of a host without its number."""
    return end.rstrip("0123456789")


def number_of(end: str) -> int:
    """Return the number at the end of a name; 0 without one."""
    return int(end[len(stem_of(end)) :] or 0)


@cache
def _names(end: str) -> list[str]:
    """Return the names that an end of a link stands for."""
    match = _NAME.fullmatch(end)
    if match is None:
        raise SpecError(f'ends must be names such as "device0", "device[0-7]" or "nvswitch", got "{end}"')
    stem, index, first, last = match.group("stem", "index", "first", "last")
    if first is None:
        return [stem + (index or "")] if index is None else [f"{stem}{int(index)}"]
    if int(first) > int(last):
        raise SpecError(f'ends must be a range that goes up, such as "device[0-7]", got "{end}"')
    return [f"{stem}{number}" for number in range(int(first), int(last) + 1)]


@cache
def _apart(pairs: Iterable[tuple[str, ...]]) -> tuple[str, str] | None:
    """Return two names that no chain of pairs joins; None if there are none."""
    reached_from: dict[str, set[str]] = {}
    for pair in pairs:
        joined = set().union(*(reached_from.get(end, {end}) for end in pair))
        reached_from.update(dict.fromkeys(joined, joined))
    first = min(reached_from)
    return next(((first, other) for other in sorted(reached_from) if other not in reached_from[first]), None)
