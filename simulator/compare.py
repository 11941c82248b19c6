"""Comparison: a predicted trace against a measured one, task kind by task kind.

Counts and seconds of a row are means over the traced steps and the ranks, so the rows of one trace add up: the
kinds, the waiting and the time between tasks, less what streams overlap, are its traced step.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import fmean, median

import pandas as pd

from simulator.errors import SpecError
from simulator.specs.program import Phase, TaskKind
from simulator.specs.trace import Span, Trace, counted_ranks, counted_spans

# A choice, not a measurement: errors that cancel and are each below this share of the step are left unreported.
CANCELLING_LIMIT_RATIO = 0.05
SCHEMA_VERSION = 1


class Rest(StrEnum):
    """What a step's time holds besides tasks."""

    WAITING = "waiting"  # of collectives, for their last rank
    BETWEEN_TASKS = "between tasks"  # no stream of the rank runs a task
    OVERLAPPED = "overlapped"  # counted twice above, since several streams run at once; to be subtracted


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Predicted and measured time of one part of a step; means over traced steps and ranks.

    Attributes:
        kind: of the tasks, or what else the time went to.
        phase: of the tasks; None for time that is not a task's.
        predicted_count, measured_count: tasks of a rank in a step; waiting counts the tasks that waited.
        predicted_seconds, measured_seconds: of a rank in a step; of tasks, duration less waiting.
        share_ratio: measured seconds over the measured traced step; shares exceed one together where streams overlap.
    """

    kind: TaskKind | Rest
    phase: Phase | None
    predicted_count: float
    measured_count: float
    predicted_seconds: float
    measured_seconds: float
    share_ratio: float

    @property
    def label(self) -> str:
        """The row's name, such as "attention, backward"."""
        return self.kind.value if self.phase is None else f"{self.kind.value}, {self.phase.value}"

    @property
    def error_seconds(self) -> float:
        """Predicted less measured seconds."""
        return self.predicted_seconds - self.measured_seconds

    @property
    def error_ratio(self) -> float | None:
        """Predicted over measured seconds, less one; None where nothing was measured."""
        return self.error_seconds / self.measured_seconds if self.measured_seconds > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResidual:
    """Predicted and measured duration of a whole step.

    Attributes:
        predicted_low_seconds, predicted_seconds, predicted_high_seconds: p10, median and p90 of the predicted trials.
        measured_seconds: median of the steps that were not traced.
        traced_seconds: median of the measured steps that were traced.
    """

    predicted_low_seconds: float
    predicted_seconds: float
    predicted_high_seconds: float
    measured_seconds: float
    traced_seconds: float

    @property
    def error_ratio(self) -> float:
        """Predicted over measured median, less one."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def tracing_overhead_ratio(self) -> float:
        """Traced over untraced median, less one."""
        return self.traced_seconds / self.measured_seconds - 1

    @property
    def is_within_interval(self) -> bool:
        """Whether the measured median lies within the predicted p10 and p90."""
        return self.predicted_low_seconds <= self.measured_seconds <= self.predicted_high_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """A task name that only one of the traces has.

    Attributes:
        side: "predicted" or "measured", the trace that has it.
        count: mean over traced steps and ranks.
    """

    name: str
    side: str
    count: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How far a prediction is from a measurement.

    Attributes:
        kinds: a row for each kind and phase that either trace has, the longest measured first.
        waiting, between_tasks, overlapped: the rest of the step.
        step: the whole step.
        unmatched: task names that only one trace has.
        too_long_ratio, too_short_ratio: errors of all rows predicted too long, and too short, over the measured
            traced step; the tracing overhead is first taken from the measured time between tasks.
        cancelling: a sentence if both are large, so that the step agrees better than its parts; else empty.
    """

    kinds: tuple[Residual, ...]
    waiting: Residual
    between_tasks: Residual
    overlapped: Residual
    step: StepResidual
    unmatched: tuple[Unmatched, ...]
    too_long_ratio: float
    too_short_ratio: float
    cancelling: str

    @property
    def rows(self) -> tuple[Residual, ...]:
        """All rows, the kinds first."""
        return (*self.kinds, self.waiting, self.between_tasks, self.overlapped)

    @property
    def component_error_ratio(self) -> float:
        """Mean over kinds of the absolute error ratio, weighted by measured seconds.

        Kinds that were predicted and never measured add their whole predicted time.
        """
        measured_seconds = sum(row.measured_seconds for row in self.kinds)
        return sum(abs(row.error_seconds) for row in self.kinds) / measured_seconds


def compare(predicted: Trace, measured: Trace) -> Comparison:
    """Return the residuals of a prediction, kind by kind and for the step.

    Raises:
        SpecError: if the traces differ in ranks, or one has no traced steps or no untraced ones.
    """
    if predicted.num_ranks != measured.num_ranks:
        raise SpecError(
            f"num_ranks must be equal in both traces, got {predicted.num_ranks} predicted and "
            f"{measured.num_ranks} measured; compare traces of one plan"
        )
    predicted_parts, measured_parts = _Parts.of(predicted, "predicted"), _Parts.of(measured, "measured")
    keys = predicted_parts.seconds.keys() | measured_parts.seconds.keys()
    rows = {key: _residual(key, predicted_parts, measured_parts) for key in keys}
    waiting, between_tasks, overlapped = (rows.pop((rest, None)) for rest in Rest)
    kinds = tuple(sorted(rows.values(), key=lambda row: (-row.measured_seconds, row.label)))
    step = _step_residual(predicted, measured)
    contributions = _contributions([*kinds, waiting], between_tasks, overlapped, step)
    too_long_seconds = sum(seconds for _, seconds in contributions if seconds > 0)
    too_short_seconds = -sum(seconds for _, seconds in contributions if seconds < 0)
    return Comparison(
        kinds=kinds,
        waiting=waiting,
        between_tasks=between_tasks,
        overlapped=overlapped,
        step=step,
        unmatched=_unmatched(predicted_parts, measured_parts),
        too_long_ratio=too_long_seconds / measured_parts.step_seconds,
        too_short_ratio=too_short_seconds / measured_parts.step_seconds,
        cancelling=_cancelling(contributions, measured_parts.step_seconds, step),
    )


def diagnosis(comparison: Comparison) -> list[str]:
    """Return what a reader should know of a comparison, one sentence each, the gravest first."""
    step = comparison.step
    found = [comparison.cancelling] if comparison.cancelling else []
    for side, other in (("predicted", "measured"), ("measured", "predicted")):
        names = [item.name for item in comparison.unmatched if item.side == side]
        if names:
            listed = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            found.append(f"{len(names)} task names are {side} but never {other}: {listed}.")
    has_interval = step.predicted_low_seconds < step.predicted_high_seconds  # a single trial has none
    if has_interval and not step.is_within_interval:
        found.append(f"The measured median step lies outside the predicted p10 to p90 ({step.error_ratio:+.1%}).")
    worst = max(comparison.rows, key=lambda row: abs(row.error_seconds))
    if worst.error_seconds:
        ratio = abs(worst.error_seconds) / step.traced_seconds
        direction = "long" if worst.error_seconds > 0 else "short"
        found.append(f"The largest error is {worst.label}: predicted too {direction} by {ratio:.1%} of the step.")
    if step.tracing_overhead_ratio >= CANCELLING_LIMIT_RATIO:
        found.append(f"Tracing made the measured steps {step.tracing_overhead_ratio:.1%} longer; rows include it.")
    return found


def numbered_steps(trace: Trace, side: str) -> dict[int, float]:
    """Return the duration in seconds of each traced step, by its number.

    Args:
        trace: with at least one traced and one untraced step.
        side: what an error calls the trace, such as "measured".

    Raises:
        SpecError: if the trace has too little or contradicts itself.
    """
    spans = [span for span, _ in counted_spans(trace.spans)]
    steps = sorted({span.step for span in spans})
    if not steps:
        raise SpecError(f"spans of the {side} trace must not be empty, got none; set trace_steps in [train]")
    if len(steps) != len(trace.traced_step_seconds):
        raise SpecError(
            f"traced_step_seconds of the {side} trace must have an entry for each traced step, "
            f"got {len(trace.traced_step_seconds)} for {len(steps)} steps"
        )
    if not trace.step_seconds:
        raise SpecError(f"step_seconds of the {side} trace must not be empty, got none; run steps that are not traced")
    if min(*trace.step_seconds, *trace.traced_step_seconds) <= 0 or not any(span.busy_seconds for span in spans):
        raise SpecError(f"durations of the {side} trace must be > 0, got 0 for a step or for every span")
    ranks = {span.rank for span in spans}
    if not ranks <= set(range(trace.num_ranks)):
        raise SpecError(f"rank of a span of the {side} trace must be < num_ranks = {trace.num_ranks}, got {max(ranks)}")
    return dict(zip(steps, trace.traced_step_seconds, strict=True))


def as_table(comparison: Comparison) -> pd.DataFrame:
    """Return a row for each kind and phase, then the rest of the step, then the median step.

    Columns are those of `Residual`, `error_ratio` added; a count or ratio that is not defined is NaN.
    """
    step = comparison.step
    step_row = {
        "kind": "step",
        "phase": "",
        "predicted_seconds": step.predicted_seconds,
        "measured_seconds": step.measured_seconds,
        "error_ratio": step.error_ratio,
    }
    table = pd.DataFrame([*(_row_as_json(row) for row in comparison.rows), step_row])
    return table.astype(dict.fromkeys([column for column in table if column not in ("kind", "phase")], float))


def as_json(comparison: Comparison) -> dict[str, object]:
    """Return all of a comparison as JSON values; a ratio that is not defined is null."""
    step = comparison.step
    return {
        "schema_version": SCHEMA_VERSION,
        "step": asdict(step)
        | {
            "error_ratio": step.error_ratio,
            "tracing_overhead_ratio": step.tracing_overhead_ratio,
            "is_within_interval": step.is_within_interval,
        },
        "rows": [_row_as_json(row) for row in comparison.rows],
        "component_error_ratio": comparison.component_error_ratio,
        "too_long_ratio": comparison.too_long_ratio,
        "too_short_ratio": comparison.too_short_ratio,
        "cancelling": comparison.cancelling,
        "unmatched": [asdict(item) for item in comparison.unmatched],
        "diagnosis": diagnosis(comparison),
    }


def _row_as_json(row: Residual) -> dict[str, object]:
    """Return one row as JSON values."""
    phase = "" if row.phase is None else row.phase.value
    return asdict(row) | {"kind": row.kind.value, "phase": phase, "error_ratio": row.error_ratio}


_Key = tuple[TaskKind | Rest, Phase | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Where the traced steps of one trace went; means over steps and ranks."""

    step_seconds: float
    counts: dict[_Key, float]
    seconds: dict[_Key, float]
    names: dict[str, float]

    @staticmethod
    def of(trace: Trace, side: str) -> "_Parts":
        """Return the parts of a trace's steps, all three kinds of rest included."""
        steps = numbered_steps(trace, side)
        names: Counter[str] = Counter()
        counts: Counter[_Key] = Counter()
        seconds: dict[_Key, float] = dict.fromkeys([(rest, None) for rest in Rest], 0.0)
        # One rank stands for all that are alike.
        of_rank: dict[tuple[int, int, int], list[Span]] = {
            (rank, step, num_alike): [] for rank, num_alike in counted_ranks(trace) for step in steps
        }
        for span, num_alike in counted_spans(trace.spans):
            key = (span.kind, span.phase)
            names[span.name] += num_alike
            counts[key] += num_alike
            counts[Rest.WAITING, None] += num_alike * (span.waiting_seconds > 0)
            seconds[key] = seconds.get(key, 0.0) + num_alike * span.busy_seconds
            seconds[Rest.WAITING, None] += num_alike * span.waiting_seconds
            of_rank[span.rank, span.step, num_alike].append(span)
        for (_, step, num_alike), spans in of_rank.items():
            covered_seconds = _covered_seconds(spans)
            task_seconds = sum(span.duration_seconds for span in spans)
            seconds[Rest.BETWEEN_TASKS, None] += num_alike * _excess_seconds(steps[step], covered_seconds)
            seconds[Rest.OVERLAPPED, None] += num_alike * _excess_seconds(task_seconds, covered_seconds)
        total = trace.num_ranks * len(steps)
        return _Parts(
            step_seconds=fmean(steps.values()),
            counts={key: count / total for key, count in counts.items()},
            seconds={key: spent / total for key, spent in seconds.items()},
            names={name: count / total for name, count in names.items()},
        )


def _covered_seconds(spans: Iterable[Span]) -> float:
    """Return the seconds during which at least one of the spans is under way."""
    covered_seconds, until_seconds = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_seconds):
        covered_seconds += max(span.end_seconds - max(span.start_seconds, until_seconds), 0.0)
        until_seconds = max(until_seconds, span.end_seconds)
    return covered_seconds


def _excess_seconds(longer_seconds: float, shorter_seconds: float) -> float:
    """Return by how much one duration exceeds another; 0 where that is only rounding."""
    excess_seconds = longer_seconds - shorter_seconds
    return excess_seconds if excess_seconds > 1e-9 * longer_seconds else 0.0


def _residual(key: _Key, predicted: _Parts, measured: _Parts) -> Residual:
    """Return the row of one kind and phase."""
    measured_seconds = measured.seconds.get(key, 0.0)
    return Residual(
        kind=key[0],
        phase=key[1],
        predicted_count=predicted.counts.get(key, 0.0),
        measured_count=measured.counts.get(key, 0.0),
        predicted_seconds=predicted.seconds.get(key, 0.0),
        measured_seconds=measured_seconds,
        share_ratio=measured_seconds / measured.step_seconds,
    )


def _step_residual(predicted: Trace, measured: Trace) -> StepResidual:
    """Return the row of the whole step."""
    return StepResidual(
        predicted_low_seconds=predicted.step_seconds_quantile(0.1),
        predicted_seconds=predicted.median_step_seconds,
        predicted_high_seconds=predicted.step_seconds_quantile(0.9),
        measured_seconds=measured.median_step_seconds,
        traced_seconds=median(measured.traced_step_seconds),
    )


def _unmatched(predicted: _Parts, measured: _Parts) -> tuple[Unmatched, ...]:
    """Return the task names that only one side has, by side and name."""
    sides = (("predicted", predicted, measured), ("measured", measured, predicted))
    return tuple(
        Unmatched(name=name, side=side, count=own.names[name])
        for side, own, other in sides
        for name in sorted(own.names.keys() - other.names.keys())
    )


def _contributions(
    rows: Sequence[Residual], between_tasks: Residual, overlapped: Residual, step: StepResidual
) -> list[tuple[str, float]]:
    """Return what each row adds to the step's error in seconds, with its name.

    Tracing lengthens mostly the time between tasks, and no prediction holds it: it is subtracted there.
    """
    tracing_seconds = max(step.traced_seconds - step.measured_seconds, 0.0)
    gap_seconds = max(between_tasks.measured_seconds - tracing_seconds, 0.0)
    return [
        *((row.label, row.error_seconds) for row in rows),
        (between_tasks.label, between_tasks.predicted_seconds - gap_seconds),
        (overlapped.label, -overlapped.error_seconds),
    ]


def _cancelling(contributions: list[tuple[str, float]], step_seconds: float, step: StepResidual) -> str:
    """Return a sentence if errors of opposite sign both exceed the limit; else an empty text."""
    ordered = sorted(contributions, key=lambda item: item[1])
    too_long = [(label, seconds / step_seconds) for label, seconds in reversed(ordered) if seconds > 0]
    too_short = [(label, -seconds / step_seconds) for label, seconds in ordered if seconds < 0]
    long_ratio, short_ratio = (sum(ratio for _, ratio in side) for side in (too_long, too_short))
    if min(long_ratio, short_ratio) < CANCELLING_LIMIT_RATIO:
        return ""
    return (
        f"Errors cancel: parts predicted {long_ratio:.1%} of the step too long ({_listed(too_long)}) and "
        f"{short_ratio:.1%} too short ({_listed(too_short)}) leave {step.error_ratio:+.1%} on the step, "
        "which hides them."
    )


def _listed(parts: list[tuple[str, float]]) -> str:
    """Return the largest parts of an error as text."""
    return "; ".join(f"{label} {ratio:.1%}" for label, ratio in parts[:3])
