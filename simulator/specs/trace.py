"""Span, Trace: what each rank did, or would do, and when."""

import statistics
from dataclasses import dataclass
from enum import StrEnum

from simulator.specs.program import Phase, Stream, TaskKind
from simulator.specs.units import Dtype


class TraceOrigin(StrEnum):
    """Where a trace comes from."""

    SIMULATED = "simulated"
    MEASURED = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """One task of one rank on one stream.

    Attributes:
        step: training step, from 0.
        start_seconds: since the step began on the earliest rank.
        duration_seconds: from start to end, waiting included.
        waiting_seconds: of it, a collective's wait for its last rank.
        host_seconds: time for which the host thread was busy issuing it.
        shape, dtype, group, beyond_cache_ratio: as in `Task`.
    """

    rank: int
    step: int
    stream: Stream
    name: str
    kind: TaskKind
    phase: Phase
    shape: tuple[int, ...]
    start_seconds: float
    duration_seconds: float
    waiting_seconds: float = 0.0
    host_seconds: float = 0.0
    dtype: Dtype = Dtype.FLOAT32
    group: tuple[int, ...] = ()
    beyond_cache_ratio: float | None = None

    @property
    def end_seconds(self) -> float:
        """Instant at which the task ended."""
        return self.start_seconds + self.duration_seconds

    @property
    def busy_seconds(self) -> float:
        """Duration less waiting: the cost of the task."""
        return self.duration_seconds - self.waiting_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All spans of the traced steps, and the durations of steps without tracing.

    Attributes:
        spans: of all ranks and traced steps.
        step_seconds: durations of whole steps, tracing off: measured ones after warm-up, or simulated trials.
        traced_step_seconds: durations of the steps that `spans` describe, tracing on.
        peak_memory_bytes: of each rank: by torch's allocator on GPUs (no CUDA context), of the process on CPUs.
        environment: versions, device, date, as pairs.
    """

    origin: TraceOrigin
    num_ranks: int
    spans: tuple[Span, ...]
    step_seconds: tuple[float, ...]
    traced_step_seconds: tuple[float, ...]
    peak_memory_bytes: tuple[int, ...]
    environment: tuple[tuple[str, str], ...] = ()

    def step_seconds_quantile(self, ratio: float) -> float:
        """Return a quantile of the step's duration, interpolated between neighbours."""
        ordered = sorted(self.step_seconds)
        position = ratio * (len(ordered) - 1)
        low = int(position)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (position - low) * (ordered[high] - ordered[low])

    @property
    def median_step_seconds(self) -> float:
        """Median duration of a step."""
        return statistics.median(self.step_seconds)
