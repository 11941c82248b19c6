"""A cluster as ports, and what the traffic of a group of ranks puts on them.

Ports are directed: `device_out` and `device_in` of every device, by its number in the cluster; in hosts with a topology
each link both ways, such as `device0>nvswitch` and `nvswitch>device0`, by host; in hosts with network cards or in a
network `nic0>network` and `network>nic0`, by host, and `leaf_up` and `leaf_down`, by leaf. Without either, `host_out`
and `host_in` are all cards of a host taken together.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import inf

import numpy as np
from numpy.typing import NDArray

from simulator.errors import PlanError
from simulator.host_ports import HostPorts, nic_ports
from simulator.network_ports import NetworkPorts
from simulator.specs.cluster import ClusterSpec
from simulator.specs.cost import Flow, Port
from simulator.specs.topology import NIC, stem_of

DEVICE_OUT, DEVICE_IN, HOST_OUT, HOST_IN = "device_out", "device_in", "host_out", "host_in"
LEAF_UP, LEAF_DOWN = "leaf_up", "leaf_down"
_LEAF_PORTS = (LEAF_UP, LEAF_DOWN)

Floats = NDArray[np.float64]
Loads = dict[Port, float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic:
    """What the ranks of a group send.

    Attributes:
        group: ranks, in the group's order.
        ring_bytes: that each rank passes on to the next one of a ring through all.
        pair_bytes: [source, target] bytes from one rank of the group to another, instead of a ring.
    """

    group: tuple[int, ...]
    ring_bytes: float = 0.0
    pair_bytes: Floats | None = None


@lru_cache(maxsize=16)
def fabric_of(cluster: ClusterSpec) -> "Fabric":
    """Return the ports of a cluster, made once."""
    return Fabric(cluster)


class Fabric:
    """The ports of a cluster, slow and lost links taken into account.

    Attributes:
        capacities: bytes per second of each port; lost ones have none.
        hosts: ports of each host.
        has_nics: whether each card has a port of its own.
    """

    def __init__(self, cluster: ClusterSpec) -> None:
        self._cluster = cluster
        by_faults: dict[object, HostPorts] = {}
        self.hosts: list[HostPorts] = []
        for host in range(cluster.num_hosts):
            faults = tuple(fault for fault in cluster.link_faults if fault.host in (None, host))
            if faults not in by_faults:
                by_faults[faults] = HostPorts(cluster, faults)
            self.hosts.append(by_faults[faults])
        has_nics = cluster.host is not None and cluster.host.num_nics > 0
        has_faulty_nics = any(stem_of(fault.ends[0]) == NIC for fault in cluster.link_faults)
        self.has_nics = has_nics or has_faulty_nics or cluster.network is not None
        self._network = NetworkPorts(cluster, self.hosts)
        self._num_nics = cluster.num_nics
        self.capacities: Mapping[Port, float] = dict(self._all_capacities())
        self._ring_loads: dict[tuple[int, ...], tuple[Loads, Loads]] = {}
        self._ring_seconds: dict[tuple[tuple[int, ...], bool], tuple[float, float]] = {}
        self._slowest: dict[tuple[int, ...], float] = {}  # port of a device of a group

    # --- Flows.

    def device_flows(self, group: tuple[int, ...], seconds: float, *, lasting_seconds: float = 0.0) -> list[Flow]:
        """Return one flow a device, in and out together, that takes so long alone while no port is slow.

        Args:
            lasting_seconds: for which the flows last alone, if that is longer.
        """
        if seconds <= 0:
            return []
        healthy = self._cluster.device_link.bandwidth_bytes_per_second
        num_bytes = seconds * healthy
        longest = min(healthy, num_bytes / lasting_seconds) if lasting_seconds > 0 else healthy
        return [
            Flow(
                num_bytes=num_bytes,
                ports=((DEVICE_OUT, rank), (DEVICE_IN, rank)),
                max_bytes_per_second=min(longest, self._rate((DEVICE_OUT, rank))),
            )
            for rank in group
        ]

    def device_seconds(self, group: tuple[int, ...], seconds: float) -> float:
        """Return how long the longest of `device_flows` takes alone."""
        if seconds <= 0:
            return 0.0
        if group not in self._slowest:
            self._slowest[group] = min(self._rate((DEVICE_OUT, rank)) for rank in group)
        healthy = self._cluster.device_link.bandwidth_bytes_per_second
        return seconds * max(1.0, healthy / self._slowest[group])

    def link_flows(self, traffic: Traffic) -> list[Flow]:
        """Return what crosses the links inside hosts on the way from device to device."""
        return self.flows(self.link_loads(traffic))

    def host_flows(self, traffic: Traffic) -> list[Flow]:
        """Return what leaves and enters each host, and crosses the network's switches."""
        if not self.has_nics:
            return self.undivided_host_flows(traffic)
        return self.flows(self.card_loads(traffic))

    def link_loads(self, traffic: Traffic) -> Loads:
        """Return the bytes of `link_flows` by port."""
        if self._cluster.host is None:
            return {}
        if traffic.pair_bytes is None:
            inside, _ = self._ring(traffic.group)
            return {port: share * traffic.ring_bytes for port, share in inside.items()}
        loads: Loads = {}
        for host, members in self._members(traffic.group).items():
            devices = [self._device(traffic.group[index]) for index in members]
            between = traffic.pair_bytes[np.ix_(members, members)] * ~np.eye(len(members), dtype=bool)
            found = self.hosts[host].pairs(devices, between)
            loads |= {(port, host): load for port, load in found.items()}
        return loads

    def card_loads(self, traffic: Traffic) -> Loads:
        """Return the bytes of `host_flows` by port, where hosts have network cards."""
        if traffic.pair_bytes is not None:
            return self._pair_loads(traffic.group, traffic.pair_bytes)
        _, outside = self._ring(traffic.group)
        return {port: share * traffic.ring_bytes for port, share in outside.items()}

    def flows(self, loads: Loads, *, factor: float = 1.0) -> list[Flow]:
        """Return a flow for each load: ports of a host that carry the same go together, at the rate of the slowest.

        Args:
            factor: by how much longer they last alone. Those that last less carry less than the loads.
        """
        together: dict[tuple[bool, int, float], list[Port]] = {}
        rates: dict[tuple[bool, int, float], float] = {}
        for port, load in loads.items():
            if load > 0:
                key = port[0] in _LEAF_PORTS, port[1], load
                together.setdefault(key, []).append(port)
                rates[key] = min(rates.get(key, inf), self._rate(port))
        less, slower = min(factor, 1.0), max(factor, 1.0)
        return [
            Flow(num_bytes=key[2] * less, ports=tuple(ports), max_bytes_per_second=rates[key] / slower)
            for key, ports in together.items()
        ]

    def load_seconds(self, traffic: Traffic, links: Loads, cards: Loads) -> tuple[float, float]:
        """Return when the busiest port of either loads is done, which also carries its part of the other's."""
        if traffic.pair_bytes is not None or traffic.ring_bytes == 0:
            return self._busiest(links, cards), self._busiest(cards, links)
        key = traffic.group, bool(cards)
        if key not in self._ring_seconds:  # of a byte
            found = self._busiest(links, cards), self._busiest(cards, links)
            self._ring_seconds[key] = found[0] / traffic.ring_bytes, found[1] / traffic.ring_bytes
        of_links, of_cards = self._ring_seconds[key]
        return of_links * traffic.ring_bytes, of_cards * traffic.ring_bytes

    def _busiest(self, loads: Loads, beside: Loads) -> float:
        return max(
            ((load + beside.get(port, 0.0)) / self._rate(port) for port, load in loads.items() if load > 0), default=0.0
        )

    def missing_pair(self, group: tuple[int, ...]) -> tuple[int, int] | None:
        """Return two ranks of a group that nothing joins any more; None if all are joined."""
        if not self._cluster.link_faults:
            return None
        members = self._members(group)
        for host, indices in members.items():
            ranks = [group[index] for index in indices]
            for source in ranks:
                for target in ranks:
                    joined = self.hosts[host].are_joined(self._device(source), self._device(target))
                    if source != target and not joined:
                        return source, target
        if len(members) > 1:
            crosses = self._network.crosses(members)
            for rank in group:
                other = next(each for each in group if self._cluster.host_of(each) != self._cluster.host_of(rank))
                if not self._network.nics(rank, crosses):
                    return rank, other
        return None

    def undivided_host_flows(self, traffic: Traffic) -> list[Flow]:
        """Return one flow a host through all its cards; rings cross a host's boundary once for all its ranks."""
        nic_rate = self._cluster.host_link.bandwidth_bytes_per_second
        between = None if traffic.pair_bytes is None else self._between_hosts(traffic.group, traffic.pair_bytes)
        flows = []
        for row, (host, members) in enumerate(self._members(traffic.group).items()):
            if between is not None:
                sent = float(max(between[row].sum(), between[:, row].sum()))
            else:
                sent = 0.0 if len(members) == len(traffic.group) else traffic.ring_bytes
            if sent > 0:
                # A rank reaches only its own network card's rate.
                rate = min(self.capacities[HOST_OUT, host], nic_rate * len(members))
                flows.append(Flow(num_bytes=sent, ports=((HOST_OUT, host), (HOST_IN, host)), max_bytes_per_second=rate))
        return flows

    def _between_hosts(self, group: tuple[int, ...], pair_bytes: Floats) -> Floats:
        """Return [source, target] bytes between the hosts of a group, in order."""
        _, rows = np.unique(self._host_of(group), return_inverse=True)
        found = np.zeros((rows.max() + 1, rows.max() + 1))
        np.add.at(found, (rows[:, None], rows[None, :]), pair_bytes)
        np.fill_diagonal(found, 0.0)
        return found

    # --- Loads of a ring, for each byte that a rank passes on.

    def _ring(self, group: tuple[int, ...]) -> tuple[Loads, Loads]:
        """Return what a ring puts on links between devices, and on those to cards and beyond."""
        if group not in self._ring_loads:
            members = self._members(group)
            self._ring_loads[group] = self._ring_inside(group, members), self._ring_outside(group, members)
        return self._ring_loads[group]

    def _ring_inside(self, group: tuple[int, ...], members: Mapping[int, list[int]]) -> Loads:
        loads: Loads = {}
        for host, indices in members.items():
            devices = tuple(sorted(self._device(group[index]) for index in indices))
            # Rings through other hosts leave out one step in each; which one differs from ring to ring.
            share = 1.0 if len(members) == 1 else (len(devices) - 1) / len(devices)
            if self._cluster.host is not None and share > 0:
                loads |= {(port, host): share * load for port, load in self.hosts[host].ring(devices).items()}
        return loads

    def _ring_outside(self, group: tuple[int, ...], members: Mapping[int, list[int]]) -> Loads:
        """Return loads of cards, of the way to them, and of leaves; a ring goes through hosts leaf by leaf."""
        loads: Loads = defaultdict(float)
        if len(members) == 1 or not self.has_nics:
            return loads
        crosses = self._network.crosses(members)
        shares: dict[int, dict[int, float]] = {}  # of what leaves and enters each host, by leaf
        for host, indices in members.items():
            users: dict[int, int] = {}
            for rank in sorted(group[index] for index in indices):
                for nic in self._network.nics(rank, crosses):
                    users.setdefault(nic, self._device(rank))
            shares[host] = defaultdict(float)
            for nic, device in users.items():
                self._add_nic(loads, host, nic, device, out=1 / len(users), back=1 / len(users))
                shares[host][self._network.leaf(host, nic)] += 1 / len(users)
        hosts = sorted(members)
        for host, following in zip(hosts, hosts[1:] + hosts[:1], strict=True):
            for leaf in {*shares[host], *shares[following]}:
                surplus = shares[host][leaf] - shares[following][leaf]
                self._add_leaf(loads, leaf, up=max(0.0, surplus), down=max(0.0, -surplus))
        return loads

    # --- Loads of pairs.

    def _pair_loads(self, group: tuple[int, ...], pair_bytes: Floats) -> Loads:
        """Return what messages between hosts put on cards, on the way to them, and on leaves."""
        members, hosts = self._members(group), self._host_of(group)
        loads: Loads = defaultdict(float)
        if len(members) == 1:
            return loads
        sent = pair_bytes * (hosts[:, None] != hosts[None, :])
        shares = self.nic_shares(group, crosses=self._network.crosses(members))
        by_rail = self._network.goes_by_rail(members)
        out = sent.sum(axis=1, keepdims=True) * shares * (not by_rail)
        back = sent.sum(axis=0)[:, None] * shares
        for index, nic in np.argwhere(shares).tolist():
            host, device = int(hosts[index]), self._device(group[index])
            self._add_nic(loads, host, nic, device, out=float(out[index, nic]), back=float(back[index, nic]))
        if by_rail:  # NVLink first, to the device beside the card of the receiver's rail
            by_host = {host: (sent[indices].sum(axis=0) @ shares).tolist() for host, indices in members.items()}
            for host, row in by_host.items():
                for nic, load in enumerate(row):
                    self._add_nic(loads, host, nic, self.hosts[host].nearest_device(nic), out=load, back=0.0)
        self._add_pairs_of_leaves(loads, members, hosts, sent, shares)
        return loads

    def _add_pairs_of_leaves(
        self, loads: Loads, members: Mapping[int, list[int]], hosts: NDArray[np.int64], sent: Floats, shares: Floats
    ) -> None:
        """Add what crosses the spines between the leaves of senders and receivers."""
        if not self._network.leaf_rates:
            return
        num_ranks, num_nics = shares.shape
        leaf_of = np.array([[self._network.leaf(int(host), nic) for nic in range(num_nics)] for host in hosts])
        receivers = np.zeros((num_ranks, len(self._network.leaf_rates)))
        np.add.at(receivers, (np.arange(num_ranks)[:, None], leaf_of), shares)
        if self._network.goes_by_rail(members):
            unit = hosts // self._cluster.hosts_per_leaf
            far = sent * (unit[:, None] != unit[None, :])
            up, down = np.zeros(len(self._network.leaf_rates)), far.sum(axis=0) @ receivers
            np.add.at(up, leaf_of, far @ shares)
        else:
            between = receivers.T @ sent @ receivers
            np.fill_diagonal(between, 0.0)
            up, down = between.sum(axis=1), between.sum(axis=0)
        for leaf in np.flatnonzero(up + down).tolist():
            self._add_leaf(loads, leaf, up=float(up[leaf]), down=float(down[leaf]))

    def nic_shares(self, group: tuple[int, ...], *, crosses: bool = False) -> Floats:
        """Return [rank, card], which part of a rank's messages goes through which card of its host.

        Args:
            crosses: whether cards must reach a spine.
        """
        shares = np.zeros((len(group), self._num_nics))
        for index, rank in enumerate(group):
            nics = self._network.nics(rank, crosses)
            shares[index, list(nics)] = 1 / max(len(nics), 1)
        return shares

    # --- Ports.

    def _all_capacities(self) -> Iterator[tuple[Port, float]]:
        per_host = self._cluster.devices_per_host
        for host, ports in enumerate(self.hosts):
            for device, rate in enumerate(ports.device_rates):
                for kind in (DEVICE_OUT, DEVICE_IN):
                    yield (kind, host * per_host + device), rate
            yield from (((port, host), rate) for port, rate in ports.link_rates.items())
            if self.has_nics:
                yield from (((port, host), rate) for nic, rate in enumerate(ports.nic_rates) for port in nic_ports(nic))
            else:
                rate = self._cluster.host_link.bandwidth_bytes_per_second * per_host
                yield from (((kind, host), rate) for kind in (HOST_OUT, HOST_IN))
        yield from (
            ((kind, leaf), rate) for leaf, rate in enumerate(self._network.leaf_rates) for kind in (LEAF_UP, LEAF_DOWN)
        )

    def _add_nic(self, loads: Loads, host: int, nic: int, device: int, *, out: float, back: float) -> None:
        """Add bytes between a device and the network through a card."""
        ports, (leaving, entering) = self.hosts[host], nic_ports(nic)
        for way, num_bytes, route in (
            (leaving, out, ports.to_nic(device, nic)),
            (entering, back, ports.from_nic(nic, device)),
        ):
            if num_bytes > 0:
                loads[way, host] += num_bytes
                for port, share in route.items():
                    loads[port, host] += share * num_bytes

    def _add_leaf(self, loads: Loads, leaf: int, *, up: float, down: float) -> None:
        if self._network.leaf_rates:
            loads[LEAF_UP, leaf] += up
            loads[LEAF_DOWN, leaf] += down

    def _rate(self, port: Port) -> float:
        """Return the rate of a port that traffic needs."""
        rate = self.capacities.get(port, 0.0)
        if rate == 0:
            raise PlanError(f"link_faults leave nothing of {port[0]} {port[1]}, which a collective of the plan needs")
        return rate

    def _members(self, group: tuple[int, ...]) -> dict[int, list[int]]:
        """Return the places in a group of the ranks of each host, by host."""
        members: dict[int, list[int]] = defaultdict(list)
        for index, host in enumerate(self._host_of(group).tolist()):
            members[host].append(index)
        return dict(sorted(members.items()))

    def _host_of(self, group: tuple[int, ...]) -> NDArray[np.int64]:
        return np.array(group) // self._cluster.devices_per_host

    def _device(self, rank: int) -> int:
        """Return the number of a rank's device in its host."""
        return rank % self._cluster.devices_per_host
