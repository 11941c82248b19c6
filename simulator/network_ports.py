"""The network cards and leaf switches of a cluster as faults leave them, and which of them serve which rank."""

from collections.abc import Collection, Sequence
from functools import cache

from simulator.host_ports import HostPorts, left_rate
from simulator.specs.cluster import ClusterSpec
from simulator.specs.topology import LEAF, SPINE


class NetworkPorts:
    """What lies between hosts.

    Args:
        hosts: of the cluster, in order.

    Attributes:
        leaf_rates: bytes per second of each leaf's links to the spines, each way; empty where no network is described.
    """

    def __init__(self, cluster: ClusterSpec, hosts: Sequence[HostPorts]) -> None:
        self._cluster = cluster
        self._hosts = hosts
        self._num_nics, self._hosts_per_leaf = cluster.num_nics, cluster.hosts_per_leaf
        self._has_rails = cluster.network is not None and cluster.network.rails
        self.leaf_rates = self._rates_of_leaves()
        self.nics = cache(self._nics)
        self._usable = cache(self._usable_nics)

    def leaf(self, host: int, nic: int) -> int:
        """Return the leaf switch above a network card."""
        unit = host // self._hosts_per_leaf
        return unit * self._num_nics + nic if self._has_rails else unit

    def crosses(self, hosts: Collection[int]) -> bool:
        """Return whether some hosts lie below different leaves."""
        return bool(self.leaf_rates) and len({host // self._hosts_per_leaf for host in hosts}) > 1

    def goes_by_rail(self, hosts: Collection[int]) -> bool:
        """Return whether messages change rails over NVLink, before they leave (PXN): all cards must be there.

        What that adds to NVLinks is left out.
        """
        if not self._has_rails:
            return False
        found = {self._hosts[host] for host in hosts}
        are_whole = all(host.is_joined_by_nvlink and min(host.nic_rates) > 0 for host in found)
        return are_whole and (not self.crosses(hosts) or min(self.leaf_rates) > 0)

    def _nics(self, rank: int, crosses: bool) -> tuple[int, ...]:
        """Return the cards that serve a rank.

        Args:
            crosses: whether they must reach a spine.
        """
        host = self._cluster.host_of(rank)
        return self._hosts[host].nics_of(rank % self._cluster.devices_per_host, self._usable(host, crosses))

    def _usable_nics(self, host: int, crosses: bool) -> frozenset[int]:
        return frozenset(
            nic
            for nic, rate in enumerate(self._hosts[host].nic_rates)
            if rate > 0 and not (crosses and self.leaf_rates[self.leaf(host, nic)] == 0)
        )

    def _rates_of_leaves(self) -> list[float]:
        cluster, network = self._cluster, self._cluster.network
        if network is None:
            return []
        nics_below = cluster.hosts_per_leaf * (1 if network.rails else cluster.num_nics)
        rate = cluster.nic_bytes_per_second * nics_below / network.oversubscription
        return [left_rate(rate, (f"{LEAF}{leaf}", SPINE), cluster.link_faults) for leaf in range(cluster.num_leaves)]
