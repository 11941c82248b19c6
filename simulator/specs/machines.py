"""Devices, links, hosts and fabrics by name, each number with its source; `cluster.py` joins them to clusters."""

from dataclasses import dataclass, replace

from simulator.specs.device import DeviceKind, DeviceSpec, LinkSpec
from simulator.specs.topology import HostLink, HostTopology, LinkKind, NetworkSpec
from simulator.specs.units import GB, GIB, MIB, MICROSECOND, TERA

# --- Devices.

# NVIDIA H200 data sheet (2024): 141 GB HBM3e at 4.8 TB/s, 989 TFLOP/s bf16 and 67 TFLOP/s fp32 dense; 143,771 MiB
# are reported by nvidia-smi. Copies reach 4.3 TB/s and products 788 TFLOP/s on the machine at hand, whose L2 holds
# 60 MiB (../shared/measured/h200_attention/log.txt).
H200 = DeviceSpec(
    kind=DeviceKind.CUDA,
    name="NVIDIA H200",
    memory_bytes=143_771 * 2**20,
    memory_bandwidth_bytes_per_second=4800 * GB,
    fp32_flops_per_second=67 * TERA,
    bf16_flops_per_second=989 * TERA,
    cache_bytes=60 * MIB,
)
# NVIDIA H100 SXM5 data sheet (2023): 80 GB HBM3 at 3.35 TB/s, same rates as the H200; NVIDIA H100 architecture paper
# (2022): 50 MB of L2.
H100 = DeviceSpec(
    kind=DeviceKind.CUDA,
    name="NVIDIA H100 80GB HBM3",
    memory_bytes=80 * GIB,
    memory_bandwidth_bytes_per_second=3350 * GB,
    fp32_flops_per_second=67 * TERA,
    bf16_flops_per_second=989 * TERA,
    cache_bytes=50 * MIB,
)
# NVIDIA A100 80GB data sheet (2021) and A100 architecture paper (2020): HBM2e at 2,039 GB/s (PCIe: 1,935), 312 TFLOP/s
# bf16 and 19.5 TFLOP/s fp32 dense, 40 MB of L2.
A100 = DeviceSpec(
    kind=DeviceKind.CUDA,
    name="NVIDIA A100-SXM4-80GB",
    memory_bytes=80 * GIB,
    memory_bandwidth_bytes_per_second=2039 * GB,
    fp32_flops_per_second=19.5 * TERA,
    bf16_flops_per_second=312 * TERA,
    cache_bytes=40 * MIB,
)
A100_PCIE = replace(A100, name="NVIDIA A100 80GB PCIe", memory_bandwidth_bytes_per_second=1935 * GB)
# NVIDIA HGX B200 data sheet (2024), an eighth of its board: 180 GB HBM3e at 7.7 TB/s, 2.25 PFLOP/s bf16 dense and 75
# TFLOP/s fp32; NVIDIA's CUDA tuning guide for Blackwell: 126 MB of L2.
B200 = DeviceSpec(
    kind=DeviceKind.CUDA,
    name="NVIDIA B200",
    memory_bytes=180 * GB,
    memory_bandwidth_bytes_per_second=7700 * GB,
    fp32_flops_per_second=75 * TERA,
    bf16_flops_per_second=2250 * TERA,
    cache_bytes=126 * MIB,
)
# NVIDIA L40S data sheet (2023): 48 GB GDDR6 at 864 GB/s, 362 TFLOP/s bf16 dense and 91.6 TFLOP/s fp32; Ada architecture
# paper (2022): 96 MB of L2 of the whole AD102.
L40S = DeviceSpec(
    kind=DeviceKind.CUDA,
    name="NVIDIA L40S",
    memory_bytes=48 * GB,
    memory_bandwidth_bytes_per_second=864 * GB,
    fp32_flops_per_second=91.6 * TERA,
    bf16_flops_per_second=362 * TERA,
    cache_bytes=96 * MIB,
)

# Of recorded traces, in no built-in cluster.

# NVIDIA A100 data sheet (2021): 1,555 GB/s (40 GB), 19.5 TFLOP/s fp32, 312 TFLOP/s bf16; 40 MB of L2.
A100_40GB = DeviceSpec(
    kind=DeviceKind.CUDA,
    name="NVIDIA A100-SXM4-40GB",
    memory_bytes=40 * GIB,
    memory_bandwidth_bytes_per_second=1555 * GB,
    fp32_flops_per_second=19.5 * TERA,
    bf16_flops_per_second=312 * TERA,
    cache_bytes=40 * MIB,
)
# NVIDIA V100 data sheet (2020): SXM2 32 GB, 900 GB/s, 15.7 TFLOP/s fp32, 125 TFLOP/s in tensor cores (fp16; it has no
# bf16); 6 MB of L2.
V100 = DeviceSpec(
    kind=DeviceKind.CUDA,
    name="Tesla V100-SXM2-32GB",
    memory_bytes=32 * GIB,
    memory_bandwidth_bytes_per_second=900 * GB,
    fp32_flops_per_second=15.7 * TERA,
    bf16_flops_per_second=125 * TERA,
    cache_bytes=6 * MIB,
)
# Turing architecture paper (2018), RTX 2080 Ti, founders edition: 11 GB, 616 GB/s, 14.2 TFLOP/s fp32, 56.9 TFLOP/s in
# tensor cores with fp32 sums; 5.5 MB of L2.
RTX_2080_TI = DeviceSpec(
    kind=DeviceKind.CUDA,
    name="NVIDIA GeForce RTX 2080 Ti",
    memory_bytes=11 * GIB,
    memory_bandwidth_bytes_per_second=616 * GB,
    fp32_flops_per_second=14.2 * TERA,
    bf16_flops_per_second=56.9 * TERA,
    cache_bytes=5 * MIB,
)

# --- Links of a device to the others of its host: what collectives sustain.

# Fourth-generation NVLink: 450 GB/s each way by the data sheet. Sustained 330 GB/s: all_to_all and all_reduce of 1 GiB
# between two H200s, bus bandwidth (../shared/measured/h200x2/comm.csv). 13 us: all_reduce of 8 bytes on 8 H100s
# (../shared/nccl_logs/h100_nvlink_allreduce_1n8g_dgxc.txt).
NVLINK4 = LinkSpec(latency_seconds=13 * MICROSECOND, bandwidth_bytes_per_second=330 * GB)
# Third-generation NVLink: 300 GB/s each way by the data sheet. As much of it as NVLINK4 sustains of its 450 GB/s: rings
# reach 1.07 of it as of NVLINK4 (235 GB/s, all_reduce of 8 GiB on 8 A100s, bus bandwidth,
# a100_nvlink_allreduce_1n8g_superbench.txt in ../shared/nccl_logs). 22 us: all_reduce of 2 KiB there with a newer NCCL
# (a100_sxm_nvlink_nccl_aiconfigurator.txt).
NVLINK3 = LinkSpec(latency_seconds=22 * MICROSECOND, bandwidth_bytes_per_second=220 * GB)
# Fifth-generation NVLink: 900 GB/s each way by the data sheet. No log of one host is at hand: as much of it as NVLINK4
# sustains of its 450 GB/s, and its latency.
NVLINK5 = LinkSpec(latency_seconds=13 * MICROSECOND, bandwidth_bytes_per_second=660 * GB)
# PCIe 4.0 with 16 lanes: 24 GB/s by NCCL, twice PCI_BW of generation 3 (src/graph/topo.h of NVIDIA/nccl 5067397). No
# log is at hand: latency as of NVLINK4, which is mostly that of launch and rendezvous.
PCIE4 = LinkSpec(latency_seconds=13 * MICROSECOND, bandwidth_bytes_per_second=24 * GB)

# --- Links of a host's inside, each way.

# 16 lanes of PCIe 3, 4 and 5: 8, 16 and 32 GT/s a lane, coded 128b/130b, in packets of 256 bytes with 24 bytes around
# them (PCI Express base specification 5.0): what is left for payload.
PCIE_BYTES_PER_SECOND = {3: 14.4 * GB, 4: 28.8 * GB, 5: 57.6 * GB}
# Between two sockets, as NCCL counts them (SRP_QPI_BW and AMD_BW, same file as above).
SAPPHIRE_RAPIDS_UPI = 22 * GB
AMD_FABRIC = 16 * GB


@dataclass(frozen=True, slots=True, kw_only=True)
class Fabric:
    """What joins hosts.

    Attributes:
        card_bytes_per_second: that one card sustains.
        latency_seconds: of a small collective across hosts.
        is_rdma: whether cards read devices' memory, and hosts have one for each device or PCIe switch; else hosts have
            one card, and traffic goes through their memory.
        network: switches.
    """

    card_bytes_per_second: float
    latency_seconds: float
    is_rdma: bool
    network: NetworkSpec | None


# 32 hosts a unit, rails, full rate between leaves and spines: NVIDIA DGX SuperPOD reference architecture, H100 (2023).
_RAILS = NetworkSpec(hosts_per_leaf=32, rails=True)
FABRICS = {
    # InfiniBand HDR, 200 Gb/s a card: 22.4 GB/s, all_reduce of 1 GiB on 16 A100s (bus bandwidth over 4 cards,
    # a100_cx6_allreduce_2n16g_nccltests152_PARTIAL.txt). Its log has no small sizes: latency as of NDR. 20 hosts a
    # unit: NVIDIA DGX SuperPOD for A100 (2021).
    "hdr": Fabric(
        card_bytes_per_second=22.4 * GB,
        latency_seconds=25 * MICROSECOND,
        is_rdma=True,
        network=NetworkSpec(hosts_per_leaf=20, rails=True),
    ),
    # InfiniBand NDR, 400 Gb/s a card: 49 GB/s, ring all_reduce of 16 H100s (bus bandwidth over 8 cards,
    # h100_ndr_allreduce_2n16g_RING_minctas24_qps2_nccltests309_siteC.txt); 25 us: all_reduce of 8 bytes there (siteA).
    "ndr": Fabric(card_bytes_per_second=49 * GB, latency_seconds=25 * MICROSECOND, is_rdma=True, network=_RAILS),
    # RoCE, 400 Gb/s a card: 41.4 GB/s, all_gather of 8 GiB on 16 H200s (bus bandwidth over 8 cards,
    # h200_roce400_allgather_2n16g_gcp_skypilot.txt); 28 us: 1 KiB there.
    "roce": Fabric(card_bytes_per_second=41.4 * GB, latency_seconds=28 * MICROSECOND, is_rdma=True, network=_RAILS),
    # Ethernet with TCP, one card of 100 Gb/s a host: 12 GB/s as NCCL counts it (NET_BW, same file as above). No log is
    # at hand: latency assumed to be twice that of RDMA.
    "ethernet": Fabric(card_bytes_per_second=12 * GB, latency_seconds=50 * MICROSECOND, is_rdma=False, network=None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A host of eight devices on two sockets.

    Attributes:
        devices_per_switch, nics_per_switch: that share a PCIe switch; without RDMA one card serves the host.
        nvswitch_bytes_per_second: of a device's NVLinks to the switch, each way; 0 where there are none.
        fabrics: that join such hosts, in `FABRICS`.
    """

    name: str
    device: DeviceSpec
    device_link: LinkSpec
    devices_per_switch: int
    nics_per_switch: int
    nvswitch_bytes_per_second: float
    pcie_generation: int
    socket_bytes_per_second: float
    fabrics: tuple[str, ...]
    num_devices: int = 8

    @property
    def alone(self) -> HostTopology | None:
        """Topology without network cards; None where devices share nothing but the switch between their ports."""
        return None if self.nvswitch_bytes_per_second else HostTopology(links=self._links(0))

    def num_nics(self, fabric: Fabric) -> int:
        """Return the network cards of a host."""
        return self._num_switches * self.nics_per_switch if fabric.is_rdma else 1

    def host_link(self, fabric: Fabric) -> LinkSpec:
        """Return a device's share of the cards."""
        return LinkSpec(
            latency_seconds=fabric.latency_seconds,
            bandwidth_bytes_per_second=fabric.card_bytes_per_second * self.num_nics(fabric) / self.num_devices,
        )

    def joined(self, fabric: Fabric) -> HostTopology:
        """Return the topology with network cards."""
        return HostTopology(links=self._links(self.num_nics(fabric)), gpu_direct=fabric.is_rdma)

    @property
    def _num_switches(self) -> int:
        return self.num_devices // self.devices_per_switch

    def _links(self, num_nics: int) -> tuple[HostLink, ...]:
        pcie, half = PCIE_BYTES_PER_SECOND[self.pcie_generation], self._num_switches // 2
        last = self.num_devices - 1
        joins: list[tuple[str, str, LinkKind, float]] = []
        if self.nvswitch_bytes_per_second:
            joins.append((f"device[0-{last}]", "nvswitch", LinkKind.NVLINK, self.nvswitch_bytes_per_second))
        joins += _below_switches("device", self.num_devices, self.devices_per_switch, pcie)
        joins += _below_switches("nic", num_nics, max(1, num_nics // self._num_switches), pcie)
        joins += [
            (f"pcie[0-{half - 1}]", "socket0", LinkKind.HOST_BRIDGE, pcie),
            (f"pcie[{half}-{2 * half - 1}]", "socket1", LinkKind.HOST_BRIDGE, pcie),
            ("socket0", "socket1", LinkKind.SOCKET, self.socket_bytes_per_second),
        ]
        return tuple(HostLink(ends=(a, b), kind=kind, bandwidth_bytes_per_second=rate) for a, b, kind, rate in joins)


def _below_switches(stem: str, count: int, per_switch: int, rate: float) -> list[tuple[str, str, LinkKind, float]]:
    """Return links of devices or cards to PCIe switches, so many to each."""
    if per_switch == 1:
        names = (f"{stem}[0-{count - 1}]", f"pcie[0-{count - 1}]") if count > 1 else (f"{stem}0", "pcie0")
        return [(*names, LinkKind.PCIE, rate)] if count else []
    return [
        (f"{stem}[{first}-{first + per_switch - 1}]", f"pcie{first // per_switch}", LinkKind.PCIE, rate)
        for first in range(0, count, per_switch)
    ]


_RDMA_SXM = ("ndr", "roce", "ethernet")
HOSTS = (
    # DGX A100: two devices and two cards a PCIe 4 switch, EPYC (NVIDIA DGX A100 user guide); 300 GB/s by data sheet.
    Host(
        name="a100x8",
        device=A100,
        device_link=NVLINK3,
        devices_per_switch=2,
        nics_per_switch=2,
        nvswitch_bytes_per_second=300 * GB,
        pcie_generation=4,
        socket_bytes_per_second=AMD_FABRIC,
        fabrics=("hdr", "ethernet"),
    ),
    # A device and a card a PCIe 5 switch, Sapphire Rapids (../shared/samples/nccl_topo/azure_ndv5_h100.xml); 450 GB/s
    # by data sheet.
    Host(
        name="h100x8",
        device=H100,
        device_link=NVLINK4,
        devices_per_switch=1,
        nics_per_switch=1,
        nvswitch_bytes_per_second=450 * GB,
        pcie_generation=5,
        socket_bytes_per_second=SAPPHIRE_RAPIDS_UPI,
        fabrics=_RDMA_SXM,
    ),
    # The same board and host with H200s (NVIDIA HGX H200 data sheet).
    Host(
        name="h200x8",
        device=H200,
        device_link=NVLINK4,
        devices_per_switch=1,
        nics_per_switch=1,
        nvswitch_bytes_per_second=450 * GB,
        pcie_generation=5,
        socket_bytes_per_second=SAPPHIRE_RAPIDS_UPI,
        fabrics=_RDMA_SXM,
    ),
    # 900 GB/s by data sheet; the rest as with H100s.
    Host(
        name="b200x8",
        device=B200,
        device_link=NVLINK5,
        devices_per_switch=1,
        nics_per_switch=1,
        nvswitch_bytes_per_second=900 * GB,
        pcie_generation=5,
        socket_bytes_per_second=SAPPHIRE_RAPIDS_UPI,
        fabrics=_RDMA_SXM,
    ),
    # PCIe boxes without NVLink: two devices and one card a PCIe 4 switch, as the host of
    # ../shared/samples/nccl_topo/aws_p4d_a100.xml has them.
    Host(
        name="a100pciex8",
        device=A100_PCIE,
        device_link=PCIE4,
        devices_per_switch=2,
        nics_per_switch=1,
        nvswitch_bytes_per_second=0,
        pcie_generation=4,
        socket_bytes_per_second=AMD_FABRIC,
        fabrics=("hdr", "ethernet"),
    ),
    Host(
        name="l40sx8",
        device=L40S,
        device_link=PCIE4,
        devices_per_switch=2,
        nics_per_switch=1,
        nvswitch_bytes_per_second=0,
        pcie_generation=4,
        socket_bytes_per_second=AMD_FABRIC,
        fabrics=("roce", "ethernet"),
    ),
)
