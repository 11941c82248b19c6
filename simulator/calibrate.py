"""Fits costs to measurements: recalibrates a calibration from measured traces."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from simulator.collectives import CollectiveCosts
from simulator.costs import ComputeCosts, phase_of_samples
from simulator.errors import CalibrationError
from simulator.specs.calibration import Calibration, CollectiveSample, ComputeSample
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.program import GROUP_COLLECTIVES, Phase, Stream, Task, TaskKind
from simulator.specs.trace import Span, Trace
from simulator.specs.units import Dtype

# A correction is the median over spans of log(measured / predicted), so up to half of them may be outliers; it needs
# at least this many spans.
_MIN_SPANS = 3
# Durations below the resolution of the clocks say nothing.
_SHORTEST_SECONDS = 1e-7

Sample = TypeVar("Sample", ComputeSample, CollectiveSample)
_ComputeKey = tuple[TaskKind, Phase, Dtype, int]
_Point = tuple[tuple[int, ...], float | None]  # shape and share of rows from beyond the cache


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A measured trace, and a name for the origin of what is learned from it."""

    name: str
    trace: Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """How much a cost moved.

    Attributes:
        label: kind, phase, number format and busy devices, or kind and number of ranks of a collective.
        num_spans: that it was learned from.
        factor: new cost over old, the median over the spans.
    """

    label: str
    num_spans: int
    factor: float


def recalibrate(
    calibration: Calibration, cluster: ClusterSpec, runs: Sequence[MeasuredRun]
) -> tuple[Calibration, tuple[Correction, ...]]:
    """Return a calibration whose costs agree with measured traces, and what moved, the most first.

    The medians of the measured shapes become samples of their own, which `ComputeCosts` lets correct what the others
    say; they take the place of older ones of the same shape. Samples of collectives are scaled by the median ratio of
    measured to predicted and keep the origin that they had, with the factor.

    Args:
        cluster: on which the runs were made.
        runs: traces with spans; at least one.

    Raises:
        CalibrationError: if no run has spans.
    """
    if not any(run.trace.spans for run in runs):
        raise CalibrationError("the measured traces hold no spans: train with trace_steps above 0 in [train]")
    computes, compute_corrections = _recalibrated_computes(calibration, cluster, runs)
    collectives, collective_corrections = _recalibrated_collectives(calibration, cluster, runs)
    corrections = sorted(
        [*compute_corrections, *collective_corrections], key=lambda found: -abs(math.log(found.factor))
    )
    return replace(calibration, computes=computes, collectives=collectives), tuple(corrections)


def _recalibrated_computes(
    calibration: Calibration, cluster: ClusterSpec, runs: Sequence[MeasuredRun]
) -> tuple[tuple[ComputeSample, ...], list[Correction]]:
    spans: dict[_ComputeKey, dict[_Point, list[Span]]] = defaultdict(lambda: defaultdict(list))
    names: dict[tuple[_ComputeKey, _Point], str] = {}
    for run in runs:
        # GPUs share nothing that compute tasks need, so every run says the same of them.
        is_shared = cluster.device.kind is DeviceKind.CPU
        busy = min(run.trace.num_ranks, cluster.devices_per_host) if is_shared else 1
        for span in run.trace.spans:
            if not span.kind.is_collective and span.busy_seconds > _SHORTEST_SECONDS:
                key = (span.kind, phase_of_samples(span.kind, span.phase), span.dtype, busy)
                point = (span.shape, span.beyond_cache_ratio)
                spans[key][point].append(span)
                names[key, point] = run.name
    samples = list(calibration.computes)
    corrections = []
    for key, by_point in sorted(spans.items(), key=lambda pair: pair[0]):
        num_spans = sum(map(len, by_point.values()))
        if num_spans < _MIN_SPANS:
            continue
        kind, phase, dtype, busy = key
        label = f"{kind} {phase} {dtype}" + (f", {busy} devices busy" if busy > 1 else "")
        factor = statistics.median(_ratios(calibration, key, by_point))
        corrections.append(Correction(label=label, num_spans=num_spans, factor=factor))
        measured = [_sample_of_spans(key, point, found, names[key, point]) for point, found in by_point.items()]
        samples = [
            sample
            for sample in samples
            if not (
                sample.is_from_trace
                and _key_of(sample) == key
                and (sample.shape, sample.beyond_cache_ratio) in by_point
            )
        ]
        samples.extend(measured)
    return tuple(samples), corrections


def _ratios(calibration: Calibration, key: _ComputeKey, by_point: Mapping[_Point, Sequence[Span]]) -> list[float]:
    """Return measured over predicted of each span."""
    kind, phase, dtype, busy = key
    costs = ComputeCosts(calibration, busy_devices=busy)
    return [
        span.busy_seconds / costs.price(_task(kind, phase, dtype, shape, beyond_cache_ratio=ratio)).device_seconds
        for (shape, ratio), found in by_point.items()
        for span in found
    ]


def _key_of(sample: ComputeSample) -> _ComputeKey:
    return sample.kind, sample.phase, sample.dtype, sample.busy_devices


def _sample_of_spans(key: _ComputeKey, point: _Point, spans: Sequence[Span], name: str) -> ComputeSample:
    kind, phase, dtype, busy = key
    shape, beyond_cache_ratio = point
    ordered = sorted(span.busy_seconds for span in spans)
    return ComputeSample(
        kind=kind,
        phase=phase,
        dtype=dtype,
        shape=shape,
        busy_devices=busy,
        seconds=statistics.median(ordered),
        low_seconds=ordered[len(ordered) // 10],
        high_seconds=ordered[-1 - len(ordered) // 10],
        host_seconds=0.0,  # a profiler slows the host down, so launching is left to microbenchmarks
        origin=f"trace {name}",
        is_from_trace=True,
        beyond_cache_ratio=beyond_cache_ratio,
    )


def _recalibrated_collectives(
    calibration: Calibration, cluster: ClusterSpec, runs: Sequence[MeasuredRun]
) -> tuple[tuple[CollectiveSample, ...], list[Correction]]:
    costs = CollectiveCosts(cluster, calibration)
    ratios: dict[tuple[TaskKind, int], list[float]] = defaultdict(list)
    for run in runs:
        for tasks, seconds in _measured_collectives(run, cluster):
            predicted = costs.price(tasks)
            flow_seconds = max((flow.num_bytes / flow.max_bytes_per_second for flow in predicted.flows), default=0.0)
            ratios[tasks[0].kind, len(tasks)].append(seconds / (predicted.latency_seconds + flow_seconds))
    samples = list(calibration.collectives)
    corrections = []
    for (kind, num_ranks), found in sorted(ratios.items()):
        if len(found) < _MIN_SPANS:
            continue
        factor = statistics.median(found)
        corrections.append(Correction(label=f"{kind} on {num_ranks} ranks", num_spans=len(found), factor=factor))
        # Where this number of ranks was not measured before, the samples that served for it become its own.
        scaled = [_scaled(sample, factor) for sample in costs.curve(kind, num_ranks)]
        key = (kind, num_ranks, 1)
        samples = [sample for sample in samples if (sample.kind, sample.num_ranks, sample.num_hosts) != key] + scaled
    return tuple(samples), corrections


def _measured_collectives(run: MeasuredRun, cluster: ClusterSpec) -> list[tuple[tuple[Task, ...], float]]:
    """Return the tasks of each measured collective and the seconds from its last arrival to its end.

    Those across hosts are left out: samples are of one host, and what the network adds is priced by its link. So are
    those that went on beside other tasks, which shared the device with them.
    """
    meetings: dict[tuple[int, str, tuple[int, ...]], list[Span]] = defaultdict(list)
    for span in run.trace.spans:
        if span.kind in GROUP_COLLECTIVES and span.stream is not Stream.GRADIENTS:
            meetings[span.step, span.name, span.group].append(span)
    found = []
    for (_, _, group), spans in meetings.items():
        seconds = statistics.median(span.busy_seconds for span in spans)
        spans_hosts = len({cluster.host_of(rank) for rank in group}) > 1
        if len(spans) == len(group) and seconds > _SHORTEST_SECONDS and not spans_hosts:
            tasks = tuple(
                _task(span.kind, span.phase, span.dtype, span.shape, group=group)
                for span in sorted(spans, key=lambda span: span.rank)
            )
            found.append((tasks, seconds))
    return found


def _scaled(sample: Sample, factor: float) -> Sample:
    return replace(
        sample,
        seconds=sample.seconds * factor,
        low_seconds=sample.low_seconds * factor,
        high_seconds=sample.high_seconds * factor,
        origin=f"{sample.origin} x {factor:.3f}",
    )


def _task(
    kind: TaskKind,
    phase: Phase,
    dtype: Dtype,
    shape: tuple[int, ...],
    *,
    group: tuple[int, ...] = (),
    beyond_cache_ratio: float | None = None,
) -> Task:
    return Task(
        name="",
        kind=kind,
        phase=phase,
        shape=shape,
        dtype=dtype,
        stream=Stream.COMPUTE,
        group=group,
        beyond_cache_ratio=beyond_cache_ratio,
    )
