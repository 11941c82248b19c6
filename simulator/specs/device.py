"""DeviceSpec, LinkSpec: what a rank computes on, and one direction of a link."""

from dataclasses import dataclass
from enum import StrEnum

from simulator.specs.checks import require_at_least, require_positive
from simulator.specs.units import Dtype


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
