"""ClusterSpec: the machines, and some of them by name."""

from dataclasses import dataclass, replace

from simulator.specs.checks import require, require_at_least, require_positive
from simulator.specs.communication import CHOOSABLE, Algorithm, Protocol
from simulator.specs.device import DeviceKind, DeviceSpec, LinkSpec
from simulator.specs.machines import FABRICS, H100, H200, HOSTS, NVLINK4, PCIE_BYTES_PER_SECOND
from simulator.specs.topology import (
    DEVICE,
    HOST,
    LEAF,
    NETWORK,
    NIC,
    SPINE,
    HostTopology,
    LinkFault,
    LinkKind,
    NetworkSpec,
    Straggler,
    number_of,
    stem_of,
)

__all__ = [
    "BUILT_IN_CLUSTERS",
    "H100",
    "H200",
    "NVLINK4",
    "ClusterSpec",
    "DeviceKind",
    "DeviceSpec",
    "LinkSpec",
    "host_bytes_per_second",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Equal hosts of equal devices; rank r sits on device `r % devices_per_host` of host `r // devices_per_host`.

    Without `host` and `network`, the devices of a host share nothing but their own ports, nor do hosts.

    Attributes:
        device: what each rank computes on.
        device_link: a device's port to the other devices of its host.
        host_link: a device's share of its host's network cards, to devices of other hosts.
        host: what joins the devices of a host.
        network: what joins the hosts.
        stragglers: devices that are slow.
        link_faults: links that are slow or lost; what is left carries the traffic.
        jitter: of each task a random delay: its time is multiplied by exp(jitter * |z|), z standard normal, drawn anew
            for each rank and task.
        nccl_algorithm, nccl_protocol: that NCCL is told to take (NCCL_ALGO, NCCL_PROTO); None for its own choice.
    """

    name: str
    num_hosts: int
    devices_per_host: int
    device: DeviceSpec
    device_link: LinkSpec
    host_link: LinkSpec
    host: HostTopology | None = None
    network: NetworkSpec | None = None
    stragglers: tuple[Straggler, ...] = ()
    link_faults: tuple[LinkFault, ...] = ()
    jitter: float = 0.0
    nccl_algorithm: Algorithm | None = None
    nccl_protocol: Protocol | None = None

    def __post_init__(self) -> None:
        require_positive(num_hosts=self.num_hosts, devices_per_host=self.devices_per_host)
        require_at_least(0, jitter=self.jitter)
        if self.host is not None:
            rule = f"must lead to devices_per_host = {self.devices_per_host} devices"
            require(self.host.num_devices == self.devices_per_host, "host.links", rule, self.host.num_devices)
        if self.network is not None and self.host is not None and self.host.num_nics > 0:
            count, rule = self.network.nics_per_host, f"must be left out, as host.links lead to {self.host.num_nics}"
            require(count is None, "network.nics_per_host", rule, count)
        slow = [straggler.device for straggler in self.stragglers]
        require(len(set(slow)) == len(slow), "stragglers", "must name each device once", slow)
        rule = f"must name devices below {self.num_devices}"
        require(all(device < self.num_devices for device in slow), "stragglers", rule, slow)
        for fault in self.link_faults:
            self._check_fault(fault)
        asked = self.nccl_algorithm or self.nccl_protocol
        is_set_on_cpu = asked is not None and self.device.kind is DeviceKind.CPU
        require(not is_set_on_cpu, "nccl_algorithm", "must be left out where devices are CPUs, which use gloo", asked)
        is_choice = self.nccl_algorithm in (None, *CHOOSABLE)
        require(is_choice, "nccl_algorithm", f"must be one of {', '.join(CHOOSABLE)}", self.nccl_algorithm)

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    @property
    def num_nics(self) -> int:
        """Network cards of a host."""
        if self.host is not None and self.host.num_nics > 0:
            return self.host.num_nics
        given = None if self.network is None else self.network.nics_per_host
        return self.devices_per_host if given is None else given

    @property
    def num_leaves(self) -> int:
        """Leaf switches of the network; 0 where there is no description of it."""
        if self.network is None:
            return 0
        return -(-self.num_hosts // self.hosts_per_leaf) * (self.num_nics if self.network.rails else 1)

    @property
    def hosts_per_leaf(self) -> int:
        """Hosts that one leaf switch joins."""
        given = None if self.network is None else self.network.hosts_per_leaf
        return self.num_hosts if given is None else given

    @property
    def nic_bytes_per_second(self) -> float:
        """Rate of one network card."""
        return self.host_link.bandwidth_bytes_per_second * self.devices_per_host / self.num_nics

    def host_of(self, rank: int) -> int:
        """Return the host on which a rank's device sits."""
        return rank // self.devices_per_host

    def slowdown(self, rank: int) -> float:
        """Return the factor of the time of a rank's compute tasks."""
        return next((each.slowdown for each in self.stragglers if each.device == rank), 1.0)

    def _check_fault(self, fault: LinkFault) -> None:
        """Refuse a fault of a link that the cluster does not have."""
        known = set() if self.host is None else {frozenset(pair) for link in self.host.links for pair in link.pairs()}
        first, second = fault.ends
        implied = {
            (DEVICE, HOST): self.devices_per_host,
            (NIC, NETWORK): self.num_nics,
            (LEAF, SPINE): self.num_leaves,
        }
        is_implied = number_of(first) < implied.get((stem_of(first), second), 0)
        rule = 'must be the ends of a link, such as ["device0", "host"], ["nic0", "network"] or one of host.links'
        require(is_implied or frozenset(fault.ends) in known, "link_faults.ends", rule, fault.ends)
        if fault.host is not None:
            require(fault.host < self.num_hosts, "link_faults.host", f"must be below {self.num_hosts=}", fault.host)


def host_bytes_per_second(cluster: ClusterSpec) -> float:
    """Return the rate of copies between a device and its host's memory, each way.

    It is that of the device's narrowest link of PCIe where the topology is known, else of PCIe 4; a CPU's memory is its
    host's. Devices that share a link to the processor are taken for alone.
    """
    if cluster.device.kind is DeviceKind.CPU:
        return cluster.device.memory_bandwidth_bytes_per_second / 2  # read and written
    links = () if cluster.host is None else cluster.host.links
    rates = [
        link.bandwidth_bytes_per_second
        for link in links
        if link.kind in (LinkKind.PCIE, LinkKind.HOST_BRIDGE) and any("device0" in pair for pair in link.pairs())
    ]
    return min(rates, default=PCIE_BYTES_PER_SECOND[4])


def _built_in_clusters() -> dict[str, ClusterSpec]:
    """Return hosts by themselves, and some of each kind joined by the fabrics that are built with them."""
    found: dict[str, ClusterSpec] = {}
    for host in HOSTS:
        found[host.name] = ClusterSpec(
            name=host.name,
            num_hosts=1,
            devices_per_host=host.num_devices,
            device=host.device,
            device_link=host.device_link,
            host_link=host.host_link(FABRICS[host.fabrics[0]]),
            host=host.alone,
        )
        for name in host.fabrics:
            fabric = FABRICS[name]
            found[f"{host.name}-{name}"] = replace(
                found[host.name],
                name=f"{host.name}-{name}",
                num_hosts=4,
                host_link=host.host_link(fabric),
                host=host.joined(fabric),
                network=fabric.network,
            )
    return found


BUILT_IN_CLUSTERS = _built_in_clusters()
