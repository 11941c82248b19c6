"""dry_run(): a plan at full size on one core, before a machine is reserved for it.

What `graphpilot train` would refuse is refused here, with the same words. Then the program of every rank is held
against those of its peers, memory is added up, and of ranks that do the same one goes through a step without numbers.
"""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from executor.batches import sampled_work
from executor.data import Inputs
from executor.rehearsal import STEP, Rehearsal, rehearse
from executor.run import PlanRun, checkpoint_of, require_legal
from simulator.errors import SpecError
from simulator.matching import mismatches
from simulator.memory import RankMemory, misfit, peak_memory, total_bytes
from simulator.readers.cuts import MAX_PARTS, cut_mismatches
from simulator.readers.graphs import Graph, open_graph
from simulator.readers.orders import read_order
from simulator.readers.partitions import read_partition
from simulator.specs.cluster import DeviceKind
from simulator.specs.decision import PlanFile
from simulator.specs.files import read_plan
from simulator.specs.mesh import AXES
from simulator.specs.plan import Offload, StepMode
from simulator.specs.program import Program, Task
from simulator.workload import RankWork, lower, rank_work, works_of_rank

# Batches differ from step to step; so many of an epoch's steps are lowered, matched and counted in memory.
MOST_STEPS = 4
# Ranks that differ go through a step each, as many as have so many tasks in all, but no fewer than `LEAST_RANKS`. A
# task takes a millisecond of a core (traces/dry-run_epyc2_202611).
MOST_TASKS = 12_000
LEAST_RANKS = 8
_ALWAYS_UNCHECKED = "numbers, speed, evaluations and the writing of checkpoints"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryClass:
    """Ranks that need the same memory.

    Attributes:
        ranks: in order.
        peak: bytes by category.
        fits: whether a device holds them.
    """

    ranks: tuple[int, ...]
    peak: RankMemory
    fits: bool

    @property
    def peak_bytes(self) -> int:
        """Bytes in all."""
        return total_bytes(self.peak)


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """What a dry run came to.

    Attributes:
        mesh: sizes of the axes.
        num_rank_classes: ranks that differ in their tasks of the first step; the others do what one of these does.
        num_tasks, num_collectives: of all ranks in the first step; collectives count once for each rank.
        num_steps: that were lowered, matched and counted in memory.
        memory: of all ranks, the fullest first.
        misfit: why the plan does not fit, in a sentence; empty if it does.
        ranks_run: that went through a step.
        findings: what is wrong, in sentences; empty if a run would go through.
        checked, unchecked: what was looked at, and what was not.
        seconds, peak_rss_bytes: that the dry run took.
    """

    num_ranks: int
    mesh: tuple[tuple[str, int], ...]
    num_rank_classes: int
    num_tasks: int
    num_collectives: int
    num_steps: int
    memory: tuple[MemoryClass, ...]
    misfit: str
    ranks_run: tuple[int, ...]
    findings: tuple[str, ...]
    checked: tuple[str, ...]
    unchecked: tuple[str, ...]
    seconds: float
    peak_rss_bytes: int


def dry_run(run: PlanRun, *, on_progress: Callable[[str], None] = lambda _: None) -> DryRun:
    """Return what is wrong with a plan, what it needs, and what of it was looked at.

    Raises:
        SpecError: if the plan, its partition, its order, its graph or its checkpoint is not what it should be.
        PlanError: if the plan cannot run on its cluster.
    """
    began = time.perf_counter()
    file = read_plan(run.plan_path)
    require_legal(file)
    checkpoint = checkpoint_of(run, file)
    on_progress("reading partition and graph")
    inputs, checked, unchecked = _inputs(file, run.plan_path.parent)
    if checkpoint is not None:
        checked.append(f"{checkpoint.path} fits the plan")
    on_progress("matching sends and receives")
    programs, findings = _matched(file)
    checked.append(f"sends and receives of all {file.plan.num_ranks:,} ranks, and one order of their collectives")
    memory, why_not = _memory(file, len(programs))
    classes = _class_firsts(programs[0])
    most_tasks = max(map(len, programs[0].shared.lists))
    chosen = _spread(classes, memory, max(MOST_TASKS // most_tasks, LEAST_RANKS))
    rehearsals = _rehearsals(*_on_cores(file, programs[0]), inputs, chosen, on_progress)
    findings += [f"rank {done.rank}, {sentence}" for done in rehearsals for sentence in done.findings]
    run_whole = [done.rank for done in rehearsals if not done.unchecked]
    if run_whole:
        checked.append(f"tasks, shapes, groups and bytes of a step of {len(run_whole)} ranks on fake tensors")
    unchecked += _not_run(file, classes, rehearsals, has_graph=inputs is not None)
    shared = programs[0].shared
    collectives = [sum(task.kind.is_collective for task in tasks) for tasks in shared.lists]
    return DryRun(
        num_ranks=file.plan.num_ranks,
        mesh=tuple(zip(AXES, file.plan.mesh.sizes, strict=True)),
        num_rank_classes=len(classes),
        num_tasks=shared.num_tasks,
        num_collectives=sum(collectives[number] for number in shared.list_of_rank),
        num_steps=len(programs),
        memory=memory,
        misfit=why_not,
        ranks_run=tuple(run_whole),
        findings=tuple(findings),
        checked=tuple(checked),
        unchecked=(*unchecked, _ALWAYS_UNCHECKED),
        seconds=time.perf_counter() - began,
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def _inputs(file: PlanFile, folder: Path) -> tuple[Inputs | None, list[str], list[str]]:
    """Return the run's arrays, None where the graph is not here; what was looked at, and what could not be."""
    plan, spec = file.plan, file.graph
    partition_path = folder / plan.partition.path
    graph_path = folder / Path(spec.source.path).expanduser()
    graph: Graph | None = None
    if graph_path.exists():
        graph = open_graph(spec, base=folder)
    elif plan.partition.path == "" or not partition_path.exists():
        return None, [], [f"{graph_path} is not here: rows and edges are those that the plan counts"]
    part_N = read_partition(plan.partition, folder=folder, num_nodes=spec.num_nodes)
    if found := cut_mismatches(plan.partition, part_N, graph):
        where = partition_path if plan.partition.path else graph_path
        raise SpecError(f"{where}: {'; '.join(found)}: plan again for this graph and partition")
    if graph is None:
        told = f"{graph_path} is not here: rows and edges are those that the plan counts"
        return None, ["nodes of all parts, counted in the partition file"], [told]
    order_N = read_order(plan.order, folder=folder, num_nodes=spec.num_nodes)
    encodings = None
    if file.model.num_encodings:
        # Their numbers do not matter, and to compute them would take long.
        encodings = np.broadcast_to(np.float32(0), (spec.num_nodes, file.model.num_encodings))
    unchecked = []
    if plan.partition.num_parts > MAX_PARTS:
        unchecked.append(f"edges and halo rows of all parts, which are more than {MAX_PARTS:,}")
    inputs = Inputs(graph=graph, part_N=part_N, encodings=encodings, order_N=order_N)
    return inputs, ["nodes, edges and halo rows of all parts, counted in the graph"], unchecked


def _matched(file: PlanFile) -> tuple[list[Program], list[str]]:
    """Return the programs of some steps, and in sentences where their ranks do not match."""
    plan, programs, found = file.plan, [], []
    for step in range(min(plan.steps_per_epoch, MOST_STEPS)):
        program = lower(plan, file.graph, file.model, file.cluster, step=step, seed=file.train.seed)
        found += [f"step {step + 1}: {sentence}" for sentence in mismatches(program)]
        programs.append(program)
    return programs, found


def _memory(file: PlanFile, num_steps: int) -> tuple[tuple[MemoryClass, ...], str]:
    """Return ranks by the memory that they need, the fullest first, and why they do not fit, if so."""
    peaks = peak_memory(file.plan, file.graph, file.model, file.cluster, steps=range(num_steps), seed=file.train.seed)
    ranks_of: dict[RankMemory, list[int]] = {}
    for rank, peak in enumerate(peaks):
        ranks_of.setdefault(peak, []).append(rank)
    capacity = file.cluster.device.memory_bytes
    found = [
        MemoryClass(ranks=tuple(ranks), peak=peak, fits=total_bytes(peak) <= capacity)
        for peak, ranks in ranks_of.items()
    ]
    return tuple(sorted(found, key=lambda each: (-each.peak_bytes, each.ranks))), misfit(peaks, file.cluster)


def _class_firsts(program: Program) -> list[int]:
    """Return the first rank of each list of tasks."""
    firsts: dict[int, int] = {}
    for rank, number in enumerate(program.shared.list_of_rank):
        firsts.setdefault(number, rank)
    return list(firsts.values())


def _spread(firsts: Sequence[int], memory: Sequence[MemoryClass], most_ranks: int) -> list[int]:
    """Return the ranks that go through a step: all that differ, or some from the fullest to the emptiest."""
    if len(firsts) <= most_ranks:
        return list(firsts)
    bytes_of = {rank: each.peak_bytes for each in memory for rank in each.ranks}
    ordered = sorted(firsts, key=lambda rank: (-bytes_of[rank], rank))
    places = np.linspace(0, len(ordered) - 1, most_ranks).round().astype(int)
    return sorted(ordered[place] for place in places)


def _on_cores(file: PlanFile, program: Program) -> tuple[PlanFile, Program]:
    """Return plan and program of the first step for a cluster of cores, as which a step runs here.

    They differ from those of GPUs only in what attention and norms keep, where that is copied to the host.
    """
    if Offload.ACTIVATIONS not in file.plan.offload or file.cluster.device.kind is DeviceKind.CPU:
        return file, program
    cluster = replace(file.cluster, device=replace(file.cluster.device, kind=DeviceKind.CPU))
    lowered = lower(file.plan, file.graph, file.model, cluster, step=STEP, seed=file.train.seed)
    return replace(file, cluster=cluster), lowered


def _rehearsals(
    file: PlanFile, program: Program, inputs: Inputs | None, ranks: Sequence[int], on_progress: Callable[[str], None]
) -> list[Rehearsal]:
    works = rank_work(file.plan, step=STEP, seed=file.train.seed)
    found = []
    for number, rank in enumerate(ranks):
        on_progress(f"step of rank {rank}, {number + 1} of {len(ranks)}")
        tasks: Sequence[Task] = program.tasks[rank]
        own = works_of_rank(file.plan, works, rank)
        if inputs is not None and file.plan.sampled is not None:
            tasks, own = _as_drawn(file, works, inputs, rank)
        found.append(rehearse(file, rank, tasks, works=own, inputs=inputs))
    return found


def _as_drawn(
    file: PlanFile, works: Sequence[RankWork], inputs: Inputs, rank: int
) -> tuple[Sequence[Task], tuple[RankWork, ...]]:
    """Return tasks and counts of a rank for the very sample that it draws; the plan counts what is to be expected."""
    plan, known = file.plan, list(works)
    for micro_batch in range(plan.num_micro_batches):
        known[micro_batch * plan.num_ranks + rank] = sampled_work(
            *(plan, file.model, inputs), rank=rank, step=STEP, seed=file.train.seed, micro_batch=micro_batch
        )
    program = lower(file.plan, file.graph, file.model, file.cluster, step=STEP, seed=file.train.seed, works=known)
    return program.tasks[rank], works_of_rank(plan, known, rank)


def _not_run(file: PlanFile, classes: Sequence[int], rehearsals: Sequence[Rehearsal], *, has_graph: bool) -> list[str]:
    """Say what of the steps was not looked at."""
    plan = file.plan
    found = [f"rank {done.rank}, {sentence}" for done in rehearsals for sentence in done.unchecked]
    if left := len(classes) - len(rehearsals):
        found.append(f"{left:,} of {len(classes):,} ranks that differ went through no step: their counts alone match")
    if plan.loads_batches and not has_graph:
        found.append("the making of batches")
    if file.cluster.device.kind is DeviceKind.CUDA:
        found.append("kernels and streams of GPUs: the step ran as on CPUs")
    if file.train.compile_dense:
        found.append("train.compile_dense: the step ran task by task")
    if plan.step_mode is StepMode.CUDA_GRAPH:
        found.append("step_mode cuda_graph: the step was launched task by task, and none was captured")
    return found
