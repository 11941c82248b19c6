"""A calibration from beginning to end: ranks, cases, collectives, one file."""

import logging
import os
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in __all__

from executor.environment import environment
from executor.launch import launch, meet
from executor.measure.case import Case
from executor.measure.cases import build_attention_case, build_case
from executor.measure.collectives import measure_collectives
from executor.measure.computes import compute_samples, measure_case
from executor.measure.effort import FULL_CPU, FULL_CUDA, QUICK_CPU, QUICK_CUDA, Effort, case_shapes
from executor.measure.graphs import attention_graph
from executor.measure.overhead import host_times, with_host_times
from executor.mesh import Place, joined_mesh
from executor.progress import CountProgress
from simulator.specs.calibration import Calibration, CollectiveSample, ComputeSample
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.files import read_calibration, write_calibration
from simulator.specs.program import BATCH_KINDS, GROUP_COLLECTIVES, HOST_COPIES, UPDATES, TaskKind
from simulator.specs.units import Dtype

logger = logging.getLogger(__name__)

# Beside the time of the effort: repetitions of large cases on CPUs, the profiler on GPUs. Quick calibrations took 36 s
# for 206 cases on two cores of an AMD EPYC, and 40 s for 198 on an H200 (traces/prediction_h200x1_202611).
_CASE_SECONDS = {DeviceKind.CPU: 0.015, DeviceKind.CUDA: 0.12}
_PACKING = (TaskKind.HALO_PACK, TaskKind.PAD_ROWS)


@dataclass(frozen=True, kw_only=True)
class Session:
    """What to measure.

    Attributes:
        cluster: whose devices to measure; of this host, one rank a device.
        precisions: number formats of activations.
        out: gets the calibration.
        quiet: print no progress.
    """

    cluster: ClusterSpec
    effort: Effort
    precisions: tuple[Dtype, ...]
    out: Path
    quiet: bool = False


def effort_of(kind: DeviceKind, *, quick: bool) -> Effort:
    """Return how much to measure on a kind of device."""
    if kind is DeviceKind.CPU:
        return QUICK_CPU if quick else FULL_CPU
    return QUICK_CUDA if quick else FULL_CUDA


def expected_seconds(session: Session) -> float:
    """Return about how long a calibration takes on an idle machine, start of the processes included.

    A case takes its share of time in the effort and as long again to build and to warm up, and `_CASE_SECONDS` beside.
    """
    cases = _num_cases(session.effort)
    levels = len(_busy_levels(session.cluster))
    collectives = len(GROUP_COLLECTIVES) * len(session.effort.collective_bytes) * (session.cluster.devices_per_host > 1)
    of_case = 2 * session.effort.case_seconds + _CASE_SECONDS[session.cluster.device.kind]
    return 8 + cases * levels * len(session.precisions) * of_case + collectives * session.effort.case_seconds


def run_session(session: Session) -> None:
    """Measure on every device of this host and write the calibration."""
    launch(_work, session, num_ranks=session.cluster.devices_per_host, folder=session.out.parent)


def _busy_levels(cluster: ClusterSpec) -> tuple[int, ...]:
    """Return how many devices of the host are to work at once; GPUs share nothing that compute tasks need."""
    if cluster.device.kind is DeviceKind.CUDA or cluster.devices_per_host == 1:
        return (1,)
    return (1, cluster.devices_per_host)


def _work(session: Session, store: Store, rank: int) -> None:
    """Measure as one rank: alone on rank 0, then with all others, then the collectives."""
    kind, num_ranks = session.cluster.device.kind, session.cluster.devices_per_host
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    computes: list[ComputeSample] = []
    collectives: list[CollectiveSample] = []
    overhead_seconds = 0.0
    if rank == 0:
        alone = PrefixStore("alone", store)
        with joined_mesh(kind, alone, rank=0, local_rank=local_rank) as place, _progress(session, 1, rank) as progress:
            computes.extend(_compute_samples(session, place, progress, busy_devices=1))
            times = host_times(place)
            computes = with_host_times(computes, times)
            overhead_seconds = times.between_tasks_seconds
    meet(store, "alone", 1, arrive=rank == 0)
    if num_ranks > 1:
        together = PrefixStore("together", store)
        with (
            joined_mesh(kind, together, rank=rank, local_rank=local_rank, graph_parallel_degree=num_ranks) as place,
            _progress(session, num_ranks, rank) as progress,
        ):
            computes.extend(_compute_samples(session, place, progress, busy_devices=num_ranks))
        collectives.extend(_collective_samples(session, store, rank, local_rank))
    if rank == 0:
        calibration = Calibration(
            device_name=session.cluster.device.name,
            environment=environment(kind),
            computes=tuple(computes),
            collectives=tuple(collectives),
            task_overhead_seconds=overhead_seconds,
        )
        write_calibration(session.out, calibration)
    meet(store, "written", 1, arrive=rank == 0)


def _progress(session: Session, busy_devices: int, rank: int) -> CountProgress:
    """Return the progress of the tasks that are measured while so many devices are busy."""
    total = len(session.precisions) * _num_cases(session.effort)
    title = f"tasks on {busy_devices} of {session.cluster.devices_per_host} devices"
    return CountProgress(title, title, total, lines=4, quiet=session.quiet or rank > 0)


def _compute_samples(
    session: Session, place: Place, progress: CountProgress, *, busy_devices: int
) -> list[ComputeSample]:
    """Return samples of this place's ranks working side by side, the same on each."""
    samples: list[ComputeSample] = []
    on_gpu = place.device.type == "cuda"

    def measure(case: Case) -> None:
        timings = measure_case(case, session.effort, place.device, place.world)
        samples.extend(compute_samples(case, timings, busy_devices=1 if on_gpu else busy_devices))

    for precision in session.precisions:
        for kind, shape in case_shapes(session.effort):
            progress.advance(kind.value)
            is_packing = kind in _PACKING
            if (on_gpu and busy_devices > 1 and not is_packing) or (is_packing and place.world is None):
                continue
            if kind in UPDATES | HOST_COPIES and precision is not Dtype.FLOAT32:
                continue  # parameters are fp32 whatever the activations are, and bytes are bytes
            measure(build_case(kind, shape, precision, place.device, place.world))
        if not (on_gpu and busy_devices > 1):
            cache_bytes = session.cluster.device.cache_bytes
            for case in attention_cases_on(place.device, session.effort, precision, cache_bytes=cache_bytes):
                progress.advance(TaskKind.ATTENTION.value)
                measure(case)
    return samples


def attention_cases_on(device: torch.device, effort: Effort, precision: Dtype, *, cache_bytes: int) -> Iterator[Case]:
    """Yield the attentions to measure, the same on each rank."""
    generator = torch.Generator(device).manual_seed(0)
    for case in effort.attention:
        graph = attention_graph(case, generator)
        yield build_attention_case(graph, case.heads, case.head_size, precision, device, cache_bytes=cache_bytes)


def _num_cases(effort: Effort) -> int:
    return len(list(case_shapes(effort))) + len(effort.attention)


def _collective_samples(session: Session, store: Store, rank: int, local_rank: int) -> list[CollectiveSample]:
    """Return samples over 2, 4, 8 ... and all ranks of this host; each number in a mesh of its own."""
    num_ranks = session.cluster.devices_per_host
    sizes = sorted({2**power for power in range(1, num_ranks.bit_length()) if 2**power <= num_ranks} | {num_ranks})
    samples = []
    for size in sizes:
        group_store = PrefixStore(f"collectives{size}", store)
        if rank < size:
            with joined_mesh(
                session.cluster.device.kind,
                group_store,
                rank=rank,
                local_rank=local_rank,
                graph_parallel_degree=size,
            ) as place:
                samples.extend(measure_collectives(session.effort, place, sorted(GROUP_COLLECTIVES)))
        meet(group_store, "done", size, arrive=rank < size)
    return samples


def run_host_session(session: Session, calibration: Calibration) -> float:
    """Write a calibration for how fast the host is today, from the smallest shape of each kind; return the factor.

    On GPUs the seconds that the host needs to launch tasks are scaled, on CPUs all seconds of tasks, by the median
    ratio of today's to the calibration's over the kinds.
    """
    launch(_work_on_host, (session, calibration), num_ranks=1, folder=session.out.parent)
    return _host_factor(calibration, read_calibration(session.out))


def _work_on_host(argument: tuple[Session, Calibration], store: Store, rank: int) -> None:
    session, calibration = argument
    kind = session.cluster.device.kind
    smallest: dict[TaskKind, ComputeSample] = {}
    for sample in calibration.computes:
        # The graphs of attention and of batches cannot be made again from their counts.
        if sample.is_from_trace or sample.kind in (*_PACKING, TaskKind.ATTENTION, *BATCH_KINDS):
            continue
        if sample.busy_devices == 1 and sample.dtype is Dtype.FLOAT32:
            known = smallest.get(sample.kind)
            if known is None or sample.seconds < known.seconds:
                smallest[sample.kind] = sample
    with joined_mesh(kind, store, rank=rank, local_rank=0) as place:
        measured = []
        for sample in smallest.values():
            case = build_case(sample.kind, sample.shape, sample.dtype, place.device, None)
            timings = measure_case(case, session.effort, place.device, None)
            measured.extend(compute_samples(case, timings, busy_devices=1))
    then = {
        (sample.kind, sample.phase, sample.shape): sample
        for sample in calibration.computes
        if sample.busy_devices == 1 and sample.dtype is Dtype.FLOAT32 and not sample.is_from_trace
    }
    ratios = [
        _host_cost(sample, kind) / _host_cost(then[sample.kind, sample.phase, sample.shape], kind)
        for sample in measured
        if (sample.kind, sample.phase, sample.shape) in then
    ]
    factor = statistics.median(ratios)
    write_calibration(session.out, _with_host_factor(calibration, factor, kind))


def _host_cost(sample: ComputeSample, kind: DeviceKind) -> float:
    return sample.seconds if kind is DeviceKind.CPU else sample.host_seconds


def _with_host_factor(calibration: Calibration, factor: float, kind: DeviceKind) -> Calibration:
    if kind is DeviceKind.CUDA:
        computes = tuple(replace(sample, host_seconds=sample.host_seconds * factor) for sample in calibration.computes)
    else:
        computes = tuple(
            replace(
                sample,
                seconds=sample.seconds * factor,
                low_seconds=sample.low_seconds * factor,
                high_seconds=sample.high_seconds * factor,
            )
            for sample in calibration.computes
        )
    return replace(calibration, computes=computes)


def _host_factor(before: Calibration, after: Calibration) -> float:
    """Return the factor between two calibrations that differ by it alone."""
    pairs = zip(before.computes, after.computes, strict=True)
    return next(
        (new.host_seconds / old.host_seconds for old, new in pairs if old.host_seconds > 0),
        after.computes[0].seconds / before.computes[0].seconds,
    )
