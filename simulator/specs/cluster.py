"""DeviceSpec, LinkSpec, ClusterSpec: the machines, and three of them by name."""

from dataclasses import dataclass
from enum import StrEnum

from simulator.specs.checks import require, require_at_least, require_positive
from simulator.specs.communication import CHOOSABLE, Algorithm, Protocol
from simulator.specs.units import GB, GIB, MIB, MICROSECOND, TERA, Dtype


class DeviceKind(StrEnum):
    """What a rank computes on; it decides the communication library too."""

    CPU = "cpu"  # one core, gloo
    CUDA = "cuda"  # one GPU, NCCL

    @property
    def backend(self) -> str:
        """The torch.distributed backend."""
        return {DeviceKind.CPU: "gloo", DeviceKind.CUDA: "nccl"}[self]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """What one rank computes on.

    Attributes:
        kind: CPU core or GPU.
        name: as the system reports it; a calibration is tied to it.
        memory_bytes: memory that one rank may fill.
        memory_bandwidth_bytes_per_second: of that memory, reading plus writing.
        fp32_flops_per_second, bf16_flops_per_second: dense matrix products, without sparsity.
        cache_bytes: of the last cache before the memory: a GPU's L2, a core's share of L3; 0 where unknown.
    """

    kind: DeviceKind
    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_second: float
    fp32_flops_per_second: float
    bf16_flops_per_second: float
    cache_bytes: int = 0

    def __post_init__(self) -> None:
        require_positive(
            memory_bytes=self.memory_bytes,
            memory_bandwidth_bytes_per_second=self.memory_bandwidth_bytes_per_second,
            fp32_flops_per_second=self.fp32_flops_per_second,
            bf16_flops_per_second=self.bf16_flops_per_second,
        )
        require_at_least(0, cache_bytes=self.cache_bytes)

    def flops_per_second(self, dtype: Dtype) -> float:
        """Return the peak rate of matrix products in a number format."""
        return {Dtype.FLOAT32: self.fp32_flops_per_second, Dtype.BFLOAT16: self.bf16_flops_per_second}[dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """One direction of a link, under the alpha-beta cost model.

    Attributes:
        latency_seconds: fixed cost of one message or collective (alpha).
        bandwidth_bytes_per_second: sustained rate, not line rate (1 / beta).
    """

    latency_seconds: float
    bandwidth_bytes_per_second: float

    def __post_init__(self) -> None:
        require_at_least(0, latency_seconds=self.latency_seconds)
        require_positive(bandwidth_bytes_per_second=self.bandwidth_bytes_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Equal hosts of equal devices; rank r sits on device `r % devices_per_host` of host `r // devices_per_host`.

    Attributes:
        device: what each rank computes on.
        device_link: a device's port to the other devices of its host.
        host_link: a device's share of its host's network card, to devices of other hosts.
        nccl_algorithm, nccl_protocol: that NCCL is told to take (NCCL_ALGO, NCCL_PROTO); None for its own choice.
    """

    name: str
    num_hosts: int
    devices_per_host: int
    device: DeviceSpec
    device_link: LinkSpec
    host_link: LinkSpec
    nccl_algorithm: Algorithm | None = None
    nccl_protocol: Protocol | None = None

    def __post_init__(self) -> None:
        require_positive(num_hosts=self.num_hosts, devices_per_host=self.devices_per_host)
        asked = self.nccl_algorithm or self.nccl_protocol
        is_set_on_cpu = asked is not None and self.device.kind is DeviceKind.CPU
        require(not is_set_on_cpu, "nccl_algorithm", "must be left out where devices are CPUs, which use gloo", asked)
        is_choice = self.nccl_algorithm in (None, *CHOOSABLE)
        require(is_choice, "nccl_algorithm", f"must be one of {', '.join(CHOOSABLE)}", self.nccl_algorithm)

    @property
    def num_devices(self) -> int:
        """Devices of all hosts."""
        return self.num_hosts * self.devices_per_host

    def host_of(self, rank: int) -> int:
        """Return the host on which a rank's device sits."""
        return rank // self.devices_per_host


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
# Fourth-generation NVLink: 450 GB/s each way by the data sheet. Sustained 330 GB/s: all_to_all and all_reduce of 1 GiB
# between two H200s, bus bandwidth (../shared/measured/h200x2/comm.csv). 13 us: all_reduce of 8 bytes on 8 H100s
# (../shared/nccl_logs/h100_nvlink_allreduce_1n8g_dgxc.txt).
NVLINK4 = LinkSpec(latency_seconds=13 * MICROSECOND, bandwidth_bytes_per_second=330 * GB)
# InfiniBand NDR, a card for each GPU: 400 Gb/s by the data sheet. Sustained 49 GB/s a card: ring all_reduce of 16
# H100s (bus bandwidth over 8 cards, h100_ndr_allreduce_2n16g_RING_minctas24_qps2_nccltests309_siteC.txt in
# ../shared/nccl_logs); 25 us: all_reduce of 8 bytes there (siteA).
INFINIBAND_NDR = LinkSpec(latency_seconds=25 * MICROSECOND, bandwidth_bytes_per_second=49 * GB)

BUILT_IN_CLUSTERS = {
    "h200x8": ClusterSpec(
        name="h200x8",
        num_hosts=1,
        devices_per_host=8,
        device=H200,
        device_link=NVLINK4,
        host_link=INFINIBAND_NDR,
    ),
    "h100x8-ndr": ClusterSpec(
        name="h100x8-ndr",
        num_hosts=4,
        devices_per_host=8,
        device=H100,
        device_link=NVLINK4,
        host_link=INFINIBAND_NDR,
    ),
}
