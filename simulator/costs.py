"""Seconds of one compute task on one device, from measured samples.

For each kind, phase and number format, and for each number of busy devices that was measured, the cost is a line
plus a correction. The line is `a + b * flops + c * bytes` with coefficients that are not negative, fitted to the
relative error of the microbenchmarks. The correction is the logarithm of measured over line, interpolated between
samples in the space of log shapes, so a task of a measured shape costs what was measured, and far from all samples the
line alone counts, scaled like the nearest of them. Where traces of real steps tell otherwise, that cost is multiplied
by what they say of shapes like the task's, and far from all their shapes by their median.
"""

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
from simulator.specs.program import Phase, Task, TaskKind
from simulator.specs.units import Dtype

_Key = tuple[TaskKind, Phase, Dtype]
# Distances in log shape, where a factor of e in one count is a distance of one: a trace nearer than the first has its
# own way, and one farther than the second says less of a shape than the median of all.
_NEAR_DISTANCE = 0.02
_DOUBT_DISTANCE = 1.5


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
            _, _, edges, heads, head_size = shape
            return factor * 4 * edges * heads * head_size
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
        case TaskKind.ATTENTION:
            targets, sources, edges, heads, head_size = shape
            return size * heads * head_size * (2 * targets + 2 * sources + 2 * edges) + 8.0 * edges
        case TaskKind.LOSS:
            rows, labelled, columns = shape
            # Backward writes a gradient for every row.
            return size * columns * (labelled + (rows if phase is Phase.BACKWARD else 0))
        case TaskKind.HALO_PACK | TaskKind.PAD_ROWS:
            rows, others, columns = shape
            return 2.0 * size * columns * (rows + others)
        case TaskKind.CLIP | TaskKind.OPTIMIZER:
            return 4.0 * shape[0]
        case _:
            return float(size * math.prod(shape))


@dataclass(frozen=True)
class _Law:
    """One kind's cost under one number of busy devices."""

    coefficients: NDArray[np.float64]  # seconds, per flop, per byte
    log_shapes: NDArray[np.float64]  # [samples, counts]
    log_ratios: NDArray[np.float64]  # measured over line
    log_spreads: NDArray[np.float64]  # half of log(high / low)
    host_seconds: float
    traced_log_shapes: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 1)))
    traced_log_ratios: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # traced over the law's cost


class ComputeCosts:
    """Prices compute tasks from a calibration.

    Args:
        busy_devices: devices of a host that work at the same time; the nearest measured number is used.
    """

    def __init__(self, calibration: Calibration, *, busy_devices: int) -> None:
        groups: dict[_Key, dict[int, list[ComputeSample]]] = defaultdict(lambda: defaultdict(list))
        for sample in calibration.computes:
            groups[sample.kind, sample.phase, sample.dtype][sample.busy_devices].append(sample)
        self._device_name = calibration.device_name
        self._laws: dict[_Key, _Law] = {}
        for key, by_busy in groups.items():
            self._laws[key] = _law(by_busy, busy_devices)
        self._priced: dict[tuple[_Key, tuple[int, ...]], tuple[TaskCost, float]] = {}

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
        # A layer computed again costs what it cost forward.
        phase = Phase.FORWARD if task.phase is Phase.RECOMPUTE else task.phase
        key = (task.kind, phase, task.dtype)
        if (key, task.shape) not in self._priced:
            if key not in self._laws:
                raise CalibrationError(
                    f"the calibration of {self._device_name} has no samples of {task.kind} {phase} in {task.dtype}: "
                    "calibrate again with `graphpilot calibrate`"
                )
            self._priced[key, task.shape] = _evaluate(self._laws[key], task.kind, phase, task.shape, task.dtype)
        return self._priced[key, task.shape]


def _law(by_busy: dict[int, list[ComputeSample]], busy_devices: int) -> _Law:
    """Return the cost of one kind: microbenchmarks of the nearest number of busy devices, traces of that number."""
    alone = {
        busy: found
        for busy, samples in by_busy.items()
        if (found := [sample for sample in samples if not sample.is_from_trace])
    }
    alone = alone or by_busy  # traces alone must serve for both
    nearest = min(alone, key=lambda busy: (abs(math.log(busy / busy_devices)), busy))
    law = _fit(alone[nearest])
    traced = list(_merge(sample for sample in by_busy.get(busy_devices, ()) if sample.is_from_trace))
    if not traced:
        return law
    priced = [_evaluate(law, s.kind, s.phase, s.shape, s.dtype)[0].device_seconds for s in traced]
    return replace(
        law,
        traced_log_shapes=np.array([_log_shape(s.shape) for s in traced]),
        traced_log_ratios=np.log([s.seconds / seconds for s, seconds in zip(traced, priced, strict=True)]),
    )


def _fit(samples: list[ComputeSample]) -> _Law:
    """Fit line and corrections to the samples of one kind; samples of one shape are merged by their median."""
    merged = list(_merge(samples))
    features = np.array([_features(s.kind, s.phase, s.shape, s.dtype) for s in merged])
    seconds = np.array([s.seconds for s in merged])
    # Relative error: each row divided by what was measured. Columns are scaled, since nnls is not scale free.
    scale = features.max(axis=0, initial=1e-30)
    coefficients, _ = scipy.optimize.nnls(features / scale / seconds[:, None], np.ones(len(merged)))
    coefficients = coefficients / scale
    line = features @ coefficients
    return _Law(
        coefficients=coefficients,
        log_shapes=np.array([_log_shape(s.shape) for s in merged]),
        log_ratios=np.log(seconds / line),
        log_spreads=np.array([0.5 * math.log(s.high_seconds / s.low_seconds) for s in merged]),
        host_seconds=float(np.median([s.host_seconds for s in merged])),
    )


def _merge(samples: Iterable[ComputeSample]) -> Iterable[ComputeSample]:
    by_shape: dict[tuple[int, ...], list[ComputeSample]] = defaultdict(list)
    for sample in samples:
        by_shape[sample.shape].append(sample)
    for found in by_shape.values():
        found.sort(key=lambda sample: sample.seconds)
        yield found[len(found) // 2]


def _evaluate(law: _Law, kind: TaskKind, phase: Phase, shape: tuple[int, ...], dtype: Dtype) -> tuple[TaskCost, float]:
    line = float(np.dot(_features(kind, phase, shape, dtype), law.coefficients))
    distances = np.linalg.norm(law.log_shapes - _log_shape(shape), axis=1)
    # Inverse-distance weights (Shepard, 1968) of the fourth power: exact at the samples, local between them.
    weights = 1 / (distances + 1e-6) ** 4
    weights /= weights.sum()
    device_seconds = line * math.exp(float(weights @ law.log_ratios) + _traced_log_ratio(law, shape))
    return TaskCost(host_seconds=law.host_seconds, device_seconds=device_seconds), float(weights @ law.log_spreads)


def _traced_log_ratio(law: _Law, shape: tuple[int, ...]) -> float:
    """Return what traces say of shapes like this one: their mean by inverse squared distance in log shape.

    Their median counts as if it had been measured at the distance `_DOUBT_DISTANCE`.
    """
    if law.traced_log_ratios.size == 0:
        return 0.0
    distances = np.linalg.norm(law.traced_log_shapes - _log_shape(shape), axis=1)
    weights = 1 / (distances + _NEAR_DISTANCE) ** 2
    doubt = 1 / _DOUBT_DISTANCE**2
    total = float(weights @ law.traced_log_ratios) + doubt * float(np.median(law.traced_log_ratios))
    return total / (float(weights.sum()) + doubt)


def _features(kind: TaskKind, phase: Phase, shape: tuple[int, ...], dtype: Dtype) -> tuple[float, float, float]:
    return 1.0, task_flops(kind, phase, shape), task_bytes(kind, phase, shape, dtype)


def _log_shape(shape: tuple[int, ...]) -> NDArray[np.float64]:
    return np.log1p(np.array(shape, dtype=np.float64))
