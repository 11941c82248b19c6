"""Times collectives over sizes."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from executor.compat import all_gather_single, reduce_scatter_single
from executor.measure.computes import ORIGIN, deciles, synchronize
from executor.measure.effort import Effort
from executor.mesh import Place
from executor.record import kernel_times, profiled_events
from simulator.specs.calibration import CollectiveSample
from simulator.specs.program import TaskKind

_RANGE = "collective"


def measure_collectives(effort: Effort, place: Place, kinds: Sequence[TaskKind]) -> list[CollectiveSample]:
    """Return samples of collectives over all ranks of the place's world, the same on every rank."""
    assert place.world is not None
    samples = []
    for kind in kinds:
        for num_bytes in effort.collective_bytes:
            call, given_bytes = _collective(kind, num_bytes, place)
            device_seconds, host_seconds = _time_collective(call, effort, place)
            low, middle, high = deciles(device_seconds)
            samples.append(
                CollectiveSample(
                    kind=kind,
                    num_ranks=place.num_ranks,
                    num_bytes=given_bytes,
                    seconds=middle,
                    low_seconds=low,
                    high_seconds=high,
                    host_seconds=host_seconds,
                    origin=ORIGIN,
                )
            )
    return samples


def _collective(kind: TaskKind, num_bytes: int, place: Place) -> tuple[Callable[[], object], int]:
    """Return a call in which each rank gives about `num_bytes`, and how many it gives exactly."""
    p, group = place.num_ranks, place.world
    elements = max(num_bytes // 4, p)
    given = torch.randn(elements - elements % p, device=place.device)
    match kind:
        case TaskKind.ALL_REDUCE:
            return lambda: dist.all_reduce(given, group=group), given.numel() * 4
        case TaskKind.ALL_GATHER:
            gathered = given.new_empty(given.numel() * p)
            return lambda: all_gather_single(gathered, given, group=group), given.numel() * 4
        case TaskKind.REDUCE_SCATTER:
            scattered = given.new_empty(given.numel() // p)
            return lambda: reduce_scatter_single(scattered, given, group=group), given.numel() * 4
        case TaskKind.ALL_TO_ALL:
            splits = [0 if other == place.rank else elements // (p - 1) for other in range(p)]
            sent, received = given.new_zeros(sum(splits)), given.new_empty(sum(splits))
            call = lambda: dist.all_to_all_single(received, sent, splits, splits, group=group)  # noqa: E731
            return call, sent.numel() * 4
        case _:
            raise AssertionError(kind)


def _time_collective(call: Callable[[], object], effort: Effort, place: Place) -> tuple[list[float], float]:
    """Return seconds from the last rank's arrival to the end of each repetition, and the host's seconds."""
    for _ in range(3):
        call()
    synchronize(place.device)
    repetitions = max(effort.repetitions, 9)
    if place.device.type == "cuda":
        return time_on_gpu(call, repetitions, place)
    starts, ends = [], []
    for _ in range(repetitions):
        dist.barrier(place.world)
        starts.append(time.perf_counter())
        call()
        ends.append(time.perf_counter())
    instants = torch.tensor([starts, ends], dtype=torch.float64)
    by_rank = [torch.empty_like(instants) for _ in range(place.num_ranks)]
    dist.all_gather(by_rank, instants, group=place.world)
    stacked = torch.stack(by_rank)
    return (stacked[:, 1].mean(0) - stacked[:, 0].max(0).values).clamp(min=1e-7).tolist(), 0.0


def time_on_gpu(call: Callable[[], object], repetitions: int, place: Place) -> tuple[list[float], float]:
    """Return the seconds of the kernels of each repetition, the least over the ranks, and the host's seconds."""
    host_seconds = []
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for repetition in range(repetitions):
            dist.barrier(place.world)
            torch.cuda.synchronize()
            with torch.profiler.record_function(f"{_RANGE}{repetition}"):
                started = time.perf_counter()
                call()
                host_seconds.append(time.perf_counter() - started)
            torch.cuda.synchronize()
    times, _ = kernel_times(profiled_events(profiler))
    durations = [times[f"{_RANGE}{repetition}"].busy_seconds for repetition in range(repetitions)]
    mine = torch.tensor(durations, device=place.device, dtype=torch.float64)
    # A kernel's duration includes the wait for the slowest rank, so the shortest over ranks is the cost.
    dist.all_reduce(mine, dist.ReduceOp.MIN, group=place.world)
    return mine.tolist(), statistics.median(host_seconds)
