"""Span, Trace: what each rank did, or would do, and when."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain
from typing import overload

from simulator.specs.program import Phase, Stream, TaskKind, shifted_group
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedSpans(Sequence[Span]):
    """The spans of many ranks by rank, those of equal ranks held once; another rank's are made when asked for.

    Attributes:
        lists: of each class of equal ranks the spans of its first rank.
        list_of_rank: index of each rank's list.
        shift_of_rank: what is added to the ranks of its groups, but for that of all ranks; of first ranks nothing.
    """

    lists: tuple[tuple[Span, ...], ...]
    list_of_rank: tuple[int, ...]
    shift_of_rank: tuple[int, ...]

    def __len__(self) -> int:
        sizes = [len(spans) for spans in self.lists]
        return sum(sizes[number] for number in self.list_of_rank)

    @overload
    def __getitem__(self, index: int) -> Span: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Span, ...]: ...

    def __getitem__(self, index: int | slice) -> Span | tuple[Span, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        left = index + len(self) if index < 0 else index
        for rank, number in enumerate(self.list_of_rank):
            if 0 <= left < len(self.lists[number]):
                return self._moved(self.lists[number][left], rank)
            left -= len(self.lists[number])
        raise IndexError(f"index must be within the {len(self)} spans, got {index}")

    def __iter__(self) -> Iterator[Span]:
        return chain.from_iterable(self.of_rank(rank) for rank in range(len(self.list_of_rank)))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, SharedSpans) and self.lists == other.lists:
            return (self.list_of_rank, self.shift_of_rank) == (other.list_of_rank, other.shift_of_rank)
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """Return the spans of one rank."""
        spans = self.lists[self.list_of_rank[rank]]
        is_first = not spans or spans[0].rank == rank
        return spans if is_first else tuple(self._moved(span, rank) for span in spans)

    def _moved(self, span: Span, rank: int) -> Span:
        group = shifted_group(span.group, self.shift_of_rank[rank], len(self.list_of_rank))
        return replace(span, rank=rank, group=group)


def counted_spans(spans: Sequence[Span]) -> Iterator[tuple[Span, int]]:
    """Yield spans with the number of ranks that each stands for: one, but for those of ranks with equal ones."""
    if not isinstance(spans, SharedSpans):
        yield from ((span, 1) for span in spans)
        return
    num_ranks = Counter(spans.list_of_rank)
    for number, own in enumerate(spans.lists):
        yield from ((span, num_ranks[number]) for span in own)


def counted_ranks(trace: "Trace") -> list[tuple[int, int]]:
    """Return the ranks whose spans `counted_spans` yields, with the number of ranks that each stands for."""
    if not isinstance(trace.spans, SharedSpans):
        return [(rank, 1) for rank in range(trace.num_ranks)]
    num_ranks = Counter(trace.spans.list_of_rank)
    first_ranks: dict[int, int] = {}
    for rank, number in enumerate(trace.spans.list_of_rank):
        first_ranks.setdefault(number, rank)
    return [(rank, num_ranks[number]) for number, rank in first_ranks.items()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """All spans of the traced steps, and the durations of steps without tracing.

    Attributes:
        spans: of all ranks and traced steps; `SharedSpans` where ranks are alike, for `counted_spans` to look at.
        step_seconds: durations of whole steps, tracing off: measured ones after warm-up, or simulated trials.
        traced_step_seconds: durations of the steps that `spans` describe, tracing on.
        peak_memory_bytes: of each rank: by torch's allocator on GPUs (no CUDA context), of the process on CPUs.
        environment: versions, device, date, as pairs.
    """

    origin: TraceOrigin
    num_ranks: int
    spans: Sequence[Span]
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
