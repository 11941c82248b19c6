"""Seconds of one compute task on one device, from measured samples.

For each kind, phase and number format, and for each number of busy devices that was measured, the cost is a line
plus a correction. The line is `a + b * flops + c * bytes`, for attention one in the counts that decide its time
(`attention_features`), with coefficients that are not negative, fitted to the relative error of the microbenchmarks.
The correction is the logarithm of measured over line, interpolated between samples in the space of log shapes, so a
task of a measured shape costs what was measured, and far from all samples the line alone counts, scaled like the
nearest of them. Where traces of real steps tell otherwise, that cost is multiplied
by what they say of shapes like the task's, and far from all their shapes by their median. One pass of attention's
backward pass costs its share of the law of both.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import scipy.optimize
from numpy.typing import NDArray

from simulator.errors import CalibrationError
from simulator.specs.calibration import Calibration, ComputeSample
from simulator.specs.cost import TaskCost
from simulator.specs.program import ATTENTION_PASSES, ATTENTIONS, HOST_COPIES, UPDATES, Phase, Task, TaskKind
from simulator.specs.units import Dtype

_Key = tuple[TaskKind, Phase, Dtype]
_Point = tuple[tuple[int, ...], float | None]  # shape and share of rows from beyond the cache
_Work = Task | ComputeSample
# Distances in log shape, where a factor of e in one count is a distance of one: a trace nearer than the first has its
# own way, and one farther than the second says less of a shape than the median of all.
_NEAR_DISTANCE = 0.02
_DOUBT_DISTANCE = 1.5
# Distance between attentions that differ in a share of edges or rows as much as they can.
_SHARE_DISTANCE = 2.0


def task_flops(kind: TaskKind, phase: Phase, shape: tuple[int, ...]) -> float:
    """Return the multiplications and additions of a task; a backward pass of a product does two products."""
    factor = 2.0 if phase is Phase.BACKWARD else 1.0
    match kind:
        case TaskKind.LINEAR | TaskKind.PROJECTION:
            return factor * 2 * math.prod(shape)
        case TaskKind.INPUT_LINEAR:
            return 2.0 * math.prod(shape)
        case TaskKind.SPARSE_LINEAR:
            _, entries, _, columns_out = shape
            return 2.0 * entries * columns_out
        case TaskKind.ATTENTION:
            _, _, edges, _, _, heads, head_size = shape
            return factor * 4 * edges * heads * head_size
        case TaskKind.ATTENTION_SOURCES | TaskKind.ATTENTION_TARGETS:
            return 0.5 * task_flops(TaskKind.ATTENTION, phase, shape)
        case TaskKind.LOW_RANK_PROJECT | TaskKind.LOW_RANK_RESTORE:
            elements, _, matrix_rank = shape
            return 2.0 * elements * matrix_rank
        case TaskKind.LOW_RANK_ORTHOGONALISE:
            elements, _, matrix_rank = shape
            return 4.0 * elements * matrix_rank
        case _:
            return 0.0


def task_bytes(kind: TaskKind, phase: Phase, shape: tuple[int, ...], dtype: Dtype) -> float:
    """Return about how many bytes a task reads and writes; only the shape of the law matters, not its factor."""
    size = dtype.num_bytes
    match kind:
        case TaskKind.LINEAR | TaskKind.PROJECTION | TaskKind.INPUT_LINEAR:
            rows, columns_in, columns_out = shape
            return size * (rows * (columns_in + columns_out) + columns_in * columns_out)
        case TaskKind.SPARSE_LINEAR:
            rows, entries, columns_in, columns_out = shape
            # Forward writes rows, backward writes weights; each entry reads a row of the other.
            written = columns_in if phase is Phase.BACKWARD else rows
            return 4.0 * columns_out * (entries + written) + 12.0 * entries
        case TaskKind.ATTENTION | TaskKind.ATTENTION_SOURCES | TaskKind.ATTENTION_TARGETS:
            targets, sources, edges, _, _, heads, head_size = shape
            return size * heads * head_size * (2 * targets + 2 * sources + 2 * edges) + 8.0 * edges
        case TaskKind.LOSS:
            rows, labelled, columns = shape
            # Backward writes a gradient for every row.
            return size * columns * (labelled + (rows if phase is Phase.BACKWARD else 0))
        case TaskKind.HALO_PACK | TaskKind.PAD_ROWS | TaskKind.TARGET_ROWS:
            rows, others, columns = shape
            return 2.0 * size * columns * (rows + others)
        case TaskKind.CLUSTER_BATCH | TaskKind.SAMPLED_BATCH:
            # Ids and marks of 8 bytes: of an edge about ten, of a row four, of a node of the whole graph one.
            first, rows, edges, features = shape
            return 8.0 * first + 32.0 * rows + 80.0 * edges + 8.0 * features
        case TaskKind.MERGE:
            _, merged, heads, head_size = shape
            # Merged rows are read twice and written once; the others stay as they are.
            return 3.0 * size * merged * heads * head_size
        case TaskKind.TOP_K_SUM:
            elements, kept, ranks = shape
            return 4.0 * elements + 12.0 * kept * ranks
        case TaskKind.SHARD_COPY:
            shares, elements = shape
            return 8.0 * shares * elements
        case _ if kind in UPDATES:
            return 4.0 * shape[0]
        case TaskKind.COPY_TO_HOST | TaskKind.COPY_FROM_HOST:
            return float(shape[0])
        case _:
            return float(size * math.prod(shape))


@dataclass(frozen=True)
class _Law:
    """One kind's cost under one number of busy devices."""

    coefficients: NDArray[np.float64]  # seconds a feature
    places: NDArray[np.float64]  # [samples, logarithms of counts and what else tells tasks apart]
    log_ratios: NDArray[np.float64]  # measured over line
    log_spreads: NDArray[np.float64]  # half of log(high / low)
    host_seconds: float
    traced_places: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 1)))
    traced_log_ratios: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # traced over the law's cost


def phase_of_samples(kind: TaskKind, phase: Phase) -> Phase:
    """Return the phase whose samples price a task: copies take the same whenever they are made.

    A layer computed again costs what it cost forward.
    """
    if kind is TaskKind.SHARD_COPY:
        return Phase.UPDATE
    return Phase.FORWARD if phase is Phase.RECOMPUTE or kind in HOST_COPIES else phase


class ComputeCosts:
    """Prices compute tasks from a calibration.

    Args:
        busy_devices: devices of a host that work at the same time; the nearest measured number is used.
        host_bytes_per_second: between a device and its host, for calibrations without such copies; 0 where unknown.
    """

    def __init__(self, calibration: Calibration, *, busy_devices: int, host_bytes_per_second: float = 0.0) -> None:
        self._host_bytes_per_second = host_bytes_per_second
        groups: dict[_Key, dict[int, list[ComputeSample]]] = defaultdict(lambda: defaultdict(list))
        for sample in calibration.computes:
            groups[sample.kind, sample.phase, sample.dtype][sample.busy_devices].append(sample)
        self._device_name = calibration.device_name
        self._laws: dict[_Key, _Law] = {}
        for key, by_busy in groups.items():
            if key[0] not in ATTENTION_PASSES:
                self._laws[key] = _law(by_busy, busy_devices)
        for kind, dtype in itertools.product(sorted(ATTENTION_PASSES), Dtype):
            whole = groups.get((TaskKind.ATTENTION, Phase.BACKWARD, dtype))
            if whole is not None:
                key = (kind, Phase.BACKWARD, dtype)
                self._laws[key] = _law_of_pass(whole, groups.get(key, {}), busy_devices)
        self._priced: dict[tuple[_Key, _Point], tuple[TaskCost, float]] = {}

    def price(self, task: Task) -> TaskCost:
        """Return what a task costs.

        Raises:
            CalibrationError: if its kind was not measured in its number format.
        """
        return self._price(task)[0]

    def log_spread(self, task: Task) -> float:
        """Return the half-width of the cost's deciles, as a logarithm."""
        return self._price(task)[1]

    def _price(self, task: Task) -> tuple[TaskCost, float]:
        phase = phase_of_samples(task.kind, task.phase)
        key = (task.kind, phase, task.dtype)
        point = _point(task)
        if (key, point) not in self._priced:
            if key not in self._laws and task.kind in HOST_COPIES and self._host_bytes_per_second > 0:
                seconds = task.shape[0] / self._host_bytes_per_second
                return TaskCost(host_seconds=0.0, device_seconds=seconds), 0.0
            if key not in self._laws:
                raise CalibrationError(
                    f"the calibration of {self._device_name} has no samples of {task.kind} {phase} in {task.dtype}: "
                    "calibrate again with `graphpilot calibrate`"
                )
            self._priced[key, point] = _evaluate(self._laws[key], task)
        return self._priced[key, point]


def _law(by_busy: dict[int, list[ComputeSample]], busy_devices: int) -> _Law:
    """Return the cost of one kind: microbenchmarks of the nearest number of busy devices, traces of that number."""
    return _as_traced(_law_alone(by_busy, busy_devices), by_busy, busy_devices)


def _law_alone(by_busy: dict[int, list[ComputeSample]], busy_devices: int) -> _Law:
    """Return the cost of one kind by microbenchmarks of the nearest number of busy devices."""
    alone = {
        busy: found
        for busy, samples in by_busy.items()
        if (found := [sample for sample in samples if not sample.is_from_trace])
    }
    alone = alone or by_busy  # traces alone must serve for both
    nearest = min(alone, key=lambda busy: (abs(math.log(busy / busy_devices)), busy))
    return _fit(alone[nearest])


def _law_of_pass(
    whole: dict[int, list[ComputeSample]], by_busy: dict[int, list[ComputeSample]], busy_devices: int
) -> _Law:
    """Return the cost of one of the two passes of attention's backward pass: its share of the law of the whole.

    Args:
        whole: samples of the whole backward pass.
        by_busy: samples of the pass alone, from traces; without any, what traces say of the whole counts.
    """
    law = _law_alone(whole, busy_devices)
    traced = by_busy if busy_devices in by_busy else whole
    return _as_traced(replace(law, host_seconds=law.host_seconds / 2), traced, busy_devices)


def _as_traced(law: _Law, by_busy: dict[int, list[ComputeSample]], busy_devices: int) -> _Law:
    """Return a law with what traces of a number of busy devices say."""
    traced = list(_merge(sample for sample in by_busy.get(busy_devices, ()) if sample.is_from_trace))
    if not traced:
        return law
    priced = [_evaluate(law, sample)[0].device_seconds for sample in traced]
    return replace(
        law,
        traced_places=np.array([_place(sample) for sample in traced]),
        traced_log_ratios=np.log([s.seconds / seconds for s, seconds in zip(traced, priced, strict=True)]),
    )


def _fit(samples: list[ComputeSample]) -> _Law:
    """Fit line and corrections to the samples of one kind; samples of one shape are merged by their median."""
    merged = list(_merge(samples))
    features = np.array([_features(sample) for sample in merged])
    seconds = np.array([s.seconds for s in merged])
    # Relative error: each row divided by what was measured. Columns are scaled, since nnls is not scale free.
    scale = features.max(axis=0, initial=1e-30)
    coefficients, _ = scipy.optimize.nnls(features / scale / seconds[:, None], np.ones(len(merged)))
    coefficients = coefficients / scale
    line = features @ coefficients
    return _Law(
        coefficients=coefficients,
        places=np.array([_place(sample) for sample in merged]),
        log_ratios=np.log(seconds / line),
        log_spreads=np.array([0.5 * math.log(s.high_seconds / s.low_seconds) for s in merged]),
        host_seconds=float(np.median([s.host_seconds for s in merged])),
    )


def _merge(samples: Iterable[ComputeSample]) -> Iterable[ComputeSample]:
    by_point: dict[_Point, list[ComputeSample]] = defaultdict(list)
    for sample in samples:
        by_point[_point(sample)].append(sample)
    for found in by_point.values():
        found.sort(key=lambda sample: sample.seconds)
        yield found[len(found) // 2]


def _evaluate(law: _Law, work: _Work) -> tuple[TaskCost, float]:
    line = float(np.dot(_features(work), law.coefficients))
    place = _place(work)
    distances = np.linalg.norm(law.places - place, axis=1)
    # Inverse-distance weights (Shepard, 1968) of the fourth power: exact at the samples, local between them.
    weights = 1 / (distances + 1e-6) ** 4
    weights /= weights.sum()
    device_seconds = line * math.exp(float(weights @ law.log_ratios) + _traced_log_ratio(law, place))
    return TaskCost(host_seconds=law.host_seconds, device_seconds=device_seconds), float(weights @ law.log_spreads)


def _traced_log_ratio(law: _Law, place: NDArray[np.float64]) -> float:
    """Return what traces say of tasks near this place: their mean by inverse squared distance.

    Their median counts as if it had been measured at the distance `_DOUBT_DISTANCE`.
    """
    if law.traced_log_ratios.size == 0:
        return 0.0
    distances = np.linalg.norm(law.traced_places - place, axis=1)
    weights = 1 / (distances + _NEAR_DISTANCE) ** 2
    doubt = 1 / _DOUBT_DISTANCE**2
    total = float(weights @ law.traced_log_ratios) + doubt * float(np.median(law.traced_log_ratios))
    return total / (float(weights.sum()) + doubt)


def _features(work: _Work) -> tuple[float, ...]:
    """Return what a line is fitted to."""
    kind, phase, shape, dtype = work.kind, work.phase, work.shape, work.dtype
    if kind is TaskKind.ATTENTION:
        return attention_features(phase, shape, dtype, _beyond_cache_ratio(work))
    if kind in ATTENTION_PASSES:
        return pass_features(kind, shape, dtype, _beyond_cache_ratio(work))
    return 1.0, task_flops(kind, phase, shape), task_bytes(kind, phase, shape, dtype)


def attention_features(
    phase: Phase, shape: tuple[int, ...], dtype: Dtype, beyond_cache_ratio: float
) -> tuple[float, ...]:
    """Return the counts that decide the time of attention.

    Forward passes over the edges of each target, which gathers rows of keys and values; backward also over those of
    each source, which gathers rows of queries and gradients with two fp32 numbers a head. Rows cost for themselves, and
    so do edges; gathered bytes cost otherwise in long rows than in short ones, and more where they come from beyond the
    cache.

    Returns:
        One; rows, rows times heads and their bytes; edges, edges times heads and their bytes in short rows, in long
        rows and from beyond the cache.
    """
    if phase is Phase.BACKWARD:
        passes = (pass_features(kind, shape, dtype, beyond_cache_ratio) for kind in sorted(ATTENTION_PASSES))
        return tuple(map(sum, zip(*passes, strict=True)))
    targets, _, edges, long_edges, _, heads, head_size = shape
    row_bytes = heads * head_size * dtype.num_bytes
    rows = (targets, targets * heads, 2 * targets * row_bytes)
    return 1.0, *rows, *_edge_features(edges, heads, beyond_cache_ratio, long=long_edges, gathered_bytes=2 * row_bytes)


def pass_features(kind: TaskKind, shape: tuple[int, ...], dtype: Dtype, beyond_cache_ratio: float) -> tuple[float, ...]:
    """Return the share of `attention_features` of one pass of the backward pass."""
    targets, sources, edges, of_long_targets, of_long_sources, heads, head_size = shape
    row_bytes = heads * head_size * dtype.num_bytes
    if kind is TaskKind.ATTENTION_TARGETS:
        rows, long_edges, gathered_bytes = targets, of_long_targets, 2 * row_bytes
    else:
        rows, long_edges, gathered_bytes = sources, of_long_sources, 2 * row_bytes + 8 * heads
    of_edges = _edge_features(edges, heads, beyond_cache_ratio, long=long_edges, gathered_bytes=gathered_bytes)
    return 0.5, rows, rows * heads, 4 * rows * row_bytes, *of_edges


def _edge_features(
    edges: int, heads: int, beyond_cache_ratio: float, *, long: int, gathered_bytes: int
) -> tuple[float, ...]:
    """Return what `attention_features` says of the edges of one pass.

    Args:
        long: edges in long rows.
        gathered_bytes: at each edge.
    """
    short_bytes, long_bytes = (edges - long) * gathered_bytes, long * gathered_bytes
    return edges, edges * heads, short_bytes, long_bytes, beyond_cache_ratio * (short_bytes + long_bytes)


def _beyond_cache_ratio(work: _Work) -> float:
    """Return the share of rows from beyond the cache; all where nothing is known of it."""
    return 1.0 if work.beyond_cache_ratio is None else work.beyond_cache_ratio


def _point(work: _Work) -> _Point:
    return work.shape, work.beyond_cache_ratio


def _place(work: _Work) -> NDArray[np.float64]:
    """Return where a task lies among its likes; shares lie near one another where counts of none and few do not."""
    if work.kind not in ATTENTIONS:
        return np.log1p(np.array(work.shape, dtype=np.float64))
    targets, sources, edges, edges_of_long_targets, edges_of_long_sources, heads, head_size = work.shape
    long_ratios = [long_edges / max(edges, 1) for long_edges in (edges_of_long_targets, edges_of_long_sources)]
    counts = np.log1p(np.array([targets, sources, edges, heads, head_size], dtype=np.float64))
    return np.concatenate([counts, _SHARE_DISTANCE * np.array([*long_ratios, _beyond_cache_ratio(work)])])
