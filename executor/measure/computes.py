"""Times compute tasks.

A task is timed as it runs in a step: through the recorder, forward, and backward between two other nodes of
autograd. On CPUs the host's clock is enough, and ranks run the same task at once, since cores share caches and
memory. On GPUs a profiler gives the kernels' time and the host's clock the launching time.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from executor.measure.case import TASK_NAME, Case
from executor.measure.effort import Effort
from executor.record import Mark, Recorder, kernel_times, profiled_events
from simulator.specs.calibration import ComputeSample
from simulator.specs.program import BATCH_KINDS, Phase, TaskKind

ORIGIN = "microbenchmark"
# The host does them, and waits for the device.
_OF_HOST = BATCH_KINDS | {TaskKind.HOST_OPTIMIZER}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of one mark in one repetition."""

    phase: Phase
    device_seconds: float
    host_seconds: float


def measure_case(case: Case, effort: Effort, device: torch.device, world: dist.ProcessGroup | None) -> list[Timing]:
    """Return timings of every repetition; ranks of `world` start each repetition together."""
    repetitions = _repetitions(case, effort, device, world)
    if device.type == "cuda" and case.kind not in _OF_HOST:
        return _measure_on_gpu(case, repetitions)
    recorder = Recorder()
    timings: list[Timing] = []
    for _ in range(repetitions):
        if world is not None:
            dist.barrier(world)
        recorder.start()
        case.run(recorder)
        timings.extend(
            Timing(phase=mark.phase, device_seconds=_duration(mark), host_seconds=0.0)
            for mark in _marks_of_case(recorder.stop(), case.kind)
        )
    return timings


def _repetitions(case: Case, effort: Effort, device: torch.device, world: dist.ProcessGroup | None) -> int:
    """Return how often to repeat, the same on all ranks, after two runs that warm up and show the duration."""
    recorder = Recorder()
    case.run(recorder)
    synchronize(device)
    started = time.perf_counter()
    case.run(recorder)
    synchronize(device)
    count = int(effort.case_seconds / max(time.perf_counter() - started, 1e-6))
    agreed = torch.tensor(min(max(count, effort.repetitions), 100), device=device)
    if world is not None:
        dist.all_reduce(agreed, dist.ReduceOp.MIN, group=world)
    return int(agreed)


def _measure_on_gpu(case: Case, repetitions: int) -> list[Timing]:
    host_recorder = Recorder()
    host: dict[Phase, list[float]] = defaultdict(list)
    for _ in range(repetitions):
        torch.cuda.synchronize()
        host_recorder.start()
        case.run(host_recorder)
        for mark in _marks_of_case(host_recorder.stop(), case.kind):
            host[mark.phase].append(_duration(mark))
    timings = []
    recorder = Recorder(annotate=True)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    runs = []
    with torch.profiler.profile(activities=activities) as profiler:
        for repetition in range(repetitions):
            torch.cuda.synchronize()
            recorder.start(prefix=f"{repetition}/")
            case.run(recorder)
            runs.append(_marks_of_case(recorder.stop(), case.kind))
        torch.cuda.synchronize()
    times, _ = kernel_times(profiled_events(profiler))
    for marks in runs:
        for mark in marks:
            seconds = times[mark.name].busy_seconds if mark.name in times else 0.0
            timings.append(
                Timing(phase=mark.phase, device_seconds=seconds, host_seconds=statistics.median(host[mark.phase]))
            )
    return timings


def _marks_of_case(marks: Iterable[Mark], kind: TaskKind) -> list[Mark]:
    return [mark for mark in marks if mark.kind is kind and TASK_NAME in mark.name]


def _duration(mark: Mark) -> float:
    return mark.end_seconds - mark.start_seconds


def synchronize(device: torch.device) -> None:
    """Wait for the device's work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def compute_samples(case: Case, timings: Sequence[Timing], *, busy_devices: int) -> list[ComputeSample]:
    """Return a sample for each phase of a case."""
    samples = []
    for phase in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE):
        found = [timing for timing in timings if timing.phase is phase]
        if not found:
            continue
        shape = case.backward_shape if phase is Phase.BACKWARD and case.backward_shape is not None else case.shape
        low, middle, high = deciles([timing.device_seconds for timing in found])
        samples.append(
            ComputeSample(
                kind=case.kind,
                phase=phase,
                dtype=case.dtype,
                shape=shape,
                busy_devices=busy_devices,
                seconds=middle,
                low_seconds=low,
                high_seconds=high,
                host_seconds=statistics.median(timing.host_seconds for timing in found),
                origin=ORIGIN,
                beyond_cache_ratio=case.beyond_cache_ratio,
            )
        )
    return samples


def deciles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return first decile, median and last decile, none below a nanosecond (a task without kernels)."""
    ordered = torch.tensor(sorted(values), dtype=torch.float64).clamp(min=1e-9)
    low, middle, high = torch.quantile(ordered, torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)).tolist()
    return low, middle, high
