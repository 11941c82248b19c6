"""Calibration: measured seconds of tasks and collectives on one kind of device, each with its origin."""

from dataclasses import dataclass

from simulator.specs.checks import require, require_at_least, require_length, require_positive, require_share
from simulator.specs.communication import Algorithm, Protocol
from simulator.specs.program import GROUP_COLLECTIVES, SHAPE_FIELDS, Phase, TaskKind
from simulator.specs.units import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSample:
    """Measured seconds of one compute task.

    Attributes:
        shape: counts as `SHAPE_FIELDS` says.
        busy_devices: devices of the host that ran the same task meanwhile; cores share caches and memory.
        seconds: median on the device.
        low_seconds, high_seconds: first and last decile.
        host_seconds: for which the host thread is busy issuing it; 0 on CPUs, which run it at once.
        origin: where the number comes from, such as "microbenchmark" or "trace measured.json".
        is_from_trace: whether it is of a real step; such samples correct what the others say of shapes like theirs.
        beyond_cache_ratio: as in `Task`.
    """

    kind: TaskKind
    phase: Phase
    dtype: Dtype
    shape: tuple[int, ...]
    busy_devices: int
    seconds: float
    low_seconds: float
    high_seconds: float
    host_seconds: float
    origin: str
    is_from_trace: bool = False
    beyond_cache_ratio: float | None = None

    def __post_init__(self) -> None:
        require_positive(seconds=self.seconds, low_seconds=self.low_seconds, high_seconds=self.high_seconds)
        require_positive(busy_devices=self.busy_devices)
        require_at_least(0, host_seconds=self.host_seconds)
        require(not self.kind.is_collective, "kind", "must be a compute task", self.kind.value)
        require_length(len(SHAPE_FIELDS[self.kind]), shape=self.shape)
        require_share(beyond_cache_ratio=self.beyond_cache_ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSample:
    """Measured seconds of one collective, from the arrival of its last rank.

    Attributes:
        num_ranks: ranks of the group.
        num_bytes: that each rank gives to the call, the mean over ranks for an all-to-all.
        num_hosts: on which the ranks lie, evenly.
        algorithm, protocol: that NCCL was told to take (NCCL_ALGO, NCCL_PROTO); None for its own choice.
    """

    kind: TaskKind
    num_ranks: int
    num_bytes: int
    seconds: float
    low_seconds: float
    high_seconds: float
    host_seconds: float
    origin: str
    num_hosts: int = 1
    algorithm: Algorithm | None = None
    protocol: Protocol | None = None

    def __post_init__(self) -> None:
        require_positive(seconds=self.seconds, low_seconds=self.low_seconds, high_seconds=self.high_seconds)
        require(1 <= self.num_hosts <= self.num_ranks, "num_hosts", "must be within 1 and num_ranks", self.num_hosts)
        require_at_least(2, num_ranks=self.num_ranks)
        require_at_least(0, num_bytes=self.num_bytes, host_seconds=self.host_seconds)
        require(self.kind in GROUP_COLLECTIVES, "kind", "must be a collective", self.kind.value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Costs of one kind of device with one set of software.

    Attributes:
        device_name: must equal the cluster's.
        environment: what must be the same for the numbers to hold: versions, backend, threads; and the date.
        task_overhead_seconds: of the host's work between two tasks of a step.
    """

    device_name: str
    environment: tuple[tuple[str, str], ...]
    computes: tuple[ComputeSample, ...]
    collectives: tuple[CollectiveSample, ...]
    task_overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        require_at_least(0, task_overhead_seconds=self.task_overhead_seconds)
