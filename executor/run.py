"""run_plan(): the story of one run, from plan file to measured trace."""

import contextlib
import json
import logging
import os
import pickle
import resource
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in __all__

from executor.encodings import cache_folder, positional_encodings
from executor.environment import environment
from executor.launch import is_under_torchrun, launch, meet, run_as_rank
from executor.mesh import Place, joined_mesh
from executor.progress import CountProgress
from executor.record import Recorder, StepTracer, with_waiting
from executor.train import Evaluation, Inputs, StepClock, Trainer, require_finite
from simulator.constraints import training_violations, violations
from simulator.errors import PlanError
from simulator.readers.graphs import open_graph
from simulator.readers.orders import read_order
from simulator.readers.partitions import read_partition
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.convert import to_plain
from simulator.specs.decision import PlanFile
from simulator.specs.document import content_sha256
from simulator.specs.files import read_plan, remove_unfinished, write_atomic, write_text_atomic, write_trace
from simulator.specs.plan import Plan
from simulator.specs.program import Phase, TaskKind, stream_of
from simulator.specs.trace import Span, Trace, TraceOrigin
from simulator.workload import beyond_cache_ratio_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PlanRun:
    """A plan file to run, and the folder that gets the results.

    Attributes:
        plan_path: `plan.json`; partition, order and relative graph paths start at its folder.
        out: gets `measured.json` (the trace), `result.json` (losses, accuracies) and `weights.pt` (best by validation).
        quiet: print no progress.
    """

    plan_path: Path
    out: Path
    quiet: bool = False


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to.

    Attributes:
        losses: of every step.
        evaluations: pairs of a step and its accuracies.
        best_step: step with the best validation accuracy, whose weights were kept.
        data_seconds: time that rank 0 spent on making batches or waiting for them; outside the steps where batches are
            made once, else inside.
    """

    losses: tuple[float, ...]
    evaluations: tuple[tuple[int, Evaluation], ...]
    best_step: int
    best: Evaluation
    data_seconds: float
    trace: Trace


def run_plan(run: PlanRun) -> None:
    """Train as a plan says and write the results into `run.out`; see `run_plans`."""
    run_plans([run])


def run_plans(runs: Sequence[PlanRun]) -> None:
    """Train plans one after another; on this host's own processes, or as a rank when torchrun started this process.

    Ranks beyond a plan's number wait for the next plan.

    Raises:
        PlanError: if a plan cannot run here.
        RunError: if a run fails, with the rank and the reason.
    """
    plans = [(run, read_plan(run.plan_path)) for run in runs]
    for _, file in plans:
        found = violations(file.plan, file.graph, file.model, file.cluster)
        if found := [*found, *training_violations(file.plan, file.train, file.cluster)]:
            raise PlanError("; ".join(found))
        if file.graph.num_train_nodes == 0:
            path = file.graph.source.path
            raise PlanError(f"{path}: train_mask must hold a node to train on, got none; save y and train_mask too")
    for run in runs:
        run.out.mkdir(parents=True, exist_ok=True)
    most_ranks = max(file.plan.num_ranks for _, file in plans)
    if is_under_torchrun():
        world_size = int(os.environ["WORLD_SIZE"])
        if world_size < most_ranks:
            raise PlanError(
                f"the plan has num_ranks = {most_ranks}, but torchrun started {world_size}: raise --nproc-per-node or "
                "--nnodes, or plan for fewer ranks"
            )
        run_as_rank(_work, list(runs))
        return
    _check_devices(plans, most_ranks)
    try:
        launch(_work, list(runs), num_ranks=most_ranks, folder=runs[0].out)
    finally:
        for run in runs[1:]:
            remove_unfinished(run.out)


def _check_devices(plans: list[tuple[PlanRun, PlanFile]], most_ranks: int) -> None:
    """Refuse before processes start what this host cannot hold."""
    kinds = {file.cluster.device.kind for _, file in plans}
    if DeviceKind.CUDA in kinds and torch.cuda.device_count() < most_ranks:
        raise PlanError(
            f"the plan has num_ranks = {most_ranks}, but this host has {torch.cuda.device_count()} GPUs: start it "
            "under torchrun on enough hosts, or plan for this one"
        )
    if any(file.plan.num_ranks > file.cluster.devices_per_host for _, file in plans):
        raise PlanError("the plan spans several hosts: start `graphpilot train` under torchrun on each of them")


def _work(runs: list[PlanRun], store: Store, rank: int) -> None:
    """Run every plan as one rank of the launch."""
    for index, run in enumerate(runs):
        file = read_plan(run.plan_path)
        plan_store = PrefixStore(f"plan{index}", store)
        takes_part = rank < file.plan.num_ranks
        if takes_part:
            _work_on_plan(run, file, plan_store, rank)
        # The next plan's ranks meet only once this plan's are free, so no meeting outlasts its time-out.
        meet(plan_store, "done", file.plan.num_ranks, arrive=takes_part)


def _work_on_plan(run: PlanRun, file: PlanFile, store: Store, rank: int) -> None:
    base = run.plan_path.parent
    graph = open_graph(file.graph, base=base)
    inputs = Inputs(
        graph=graph,
        part_N=read_partition(file.plan.partition, folder=base, num_nodes=file.graph.num_nodes),
        encodings=positional_encodings(graph, file.graph, file.model, cache_folder()),
        order_N=read_order(file.plan.order, folder=base, num_nodes=file.graph.num_nodes),
    )
    require_same_plan(file, store, rank)
    kind = file.cluster.device.kind
    with joined_mesh(
        kind,
        store,
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        data_parallel_degree=file.plan.data_parallel_degree,
        graph_parallel_degree=file.plan.graph_parallel_degree,
    ) as place:
        if kind is DeviceKind.CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(place.device)
        recorder = Recorder(annotate=kind is DeviceKind.CUDA, precision=file.plan.precision)
        trainer = Trainer(file.plan, file.graph, file.model, file.train, inputs, place, recorder)
        progress = CountProgress("training", "step", file.train.num_steps, quiet=run.quiet or rank > 0)
        with contextlib.closing(trainer):
            result, best_weights = train_loop(trainer, store, progress)
    if rank == 0:
        trace = with_cache_ratios(result.trace, file.plan, file.cluster)
        _write_result(run.out, file.plan, replace(result, trace=trace), best_weights)


def require_same_plan(file: PlanFile, store: Store, rank: int) -> None:
    """Stop every rank before any collective where one read another plan: their steps would not meet.

    Args:
        store: through which the ranks of this plan meet; rank 0 compares.

    Raises:
        PlanError: if the plans differ.
    """
    mine = f"{content_sha256(file)[:12]}, {file.plan.steps_per_epoch} steps an epoch"
    store.set(f"plan_of_rank{rank}", mine)
    if rank == 0:
        others = ((other, store.get(f"plan_of_rank{other}").decode()) for other in range(file.plan.num_ranks))
        differing = next(((other, found) for other, found in others if found != mine), None)
        fix = "start all ranks with the same plan.json"
        told = differing and f"rank {differing[0]} read another plan ({differing[1]}) than rank 0 ({mine}): {fix}"
        store.set("differing_plans", told or "")
    if message := store.get("differing_plans").decode():
        raise PlanError(message)


def train_loop(trainer: Trainer, store: Store, progress: CountProgress) -> tuple[RunResult, dict[str, Tensor]]:
    """Train to the end; return the result and the weights of the best evaluation, on the CPU.

    The first steps, `warmup_steps_of`, are slower and left out of the trace's durations; the last
    `TrainSpec.trace_steps` are recorded task by task and left out too.

    Args:
        store: through which the ranks of this plan hand their spans to rank 0.
    """
    train, place = trainer.train_spec, trainer.place
    clock = StepClock(place.device)
    losses: list[Tensor] = []
    evaluations: list[tuple[int, Evaluation]] = []
    best_weights: dict[str, Tensor] = {}
    best: Evaluation | None = None
    best_step, data_seconds = 0, 0.0
    tracer = StepTracer(trainer.recorder, place)
    with progress:
        for step in range(train.num_steps):
            started = time.perf_counter()
            if not trainer.plan.loads_batches:
                trainer.batch(step)  # made once, and not for this step alone
            data_seconds += time.perf_counter() - started
            is_traced = step >= train.num_steps - train.trace_steps
            with tracer.step(step) if is_traced else contextlib.nullcontext():
                clock.start()
                started = time.perf_counter()
                data = trainer.batch(step)
                data_seconds += time.perf_counter() - started
                losses.append(trainer.step(step, data))
                clock.stop()
            is_last = step == train.num_steps - 1
            if (step + 1) % train.evaluate_every_steps == 0 or is_last:
                unchecked = evaluations[-1][0] + 1 if evaluations else 0
                for earlier, loss in enumerate(losses[unchecked:], start=unchecked):
                    require_finite(float(loss), earlier)
                evaluation = trainer.evaluate()
                evaluations.append((step, evaluation))
                if is_better(evaluation, best, has_val_nodes=trainer.graph.num_val_nodes > 0):
                    best, best_step = evaluation, step
                    best_weights = {name: value.cpu().clone() for name, value in trainer.model.state_dict().items()}
                accuracy = f"validation accuracy {evaluation.val_accuracy_ratio:.3f}"
                progress.show(step + 1, f"loss {float(losses[-1]):.4f}, {accuracy}")
    seconds = clock.seconds()
    first_traced = train.num_steps - train.trace_steps
    first_warm = min(warmup_steps_of(train.num_steps), first_traced)
    spans = [*tracer.spans(), *batch_spans(trainer, tracer.spans())]
    gathered = _gather(store, place, (spans, peak_memory_bytes(place.device)))
    trace = Trace(
        origin=TraceOrigin.MEASURED,
        num_ranks=trainer.plan.num_ranks,
        spans=with_waiting(span for rank_spans, _ in gathered for span in rank_spans),
        step_seconds=tuple(seconds[first_warm:first_traced]) or tuple(seconds[first_warm:]),
        traced_step_seconds=tuple(seconds[first_traced:]),
        peak_memory_bytes=tuple(peak for _, peak in gathered),
        environment=environment(DeviceKind(place.device.type)),
    )
    result = RunResult(
        losses=tuple(float(loss) for loss in losses),
        evaluations=tuple(evaluations),
        best_step=best_step,
        best=dict(evaluations)[best_step],
        data_seconds=data_seconds,
        trace=trace,
    )
    return result, best_weights


def batch_spans(trainer: Trainer, spans: Sequence[Span]) -> list[Span]:
    """Return a span for each traced step of this rank in which a thread made a batch for a later step."""
    starts: dict[int, float] = {}
    for span in spans:
        starts[span.step] = min(starts.get(span.step, span.start_seconds), span.start_seconds)
    found = []
    for step, start_seconds in starts.items():
        making = trainer.batches.making(step)
        if making is not None:
            found.append(
                Span(
                    rank=trainer.place.rank,
                    step=step,
                    stream=stream_of(trainer.batch_kind),
                    name="batch",
                    kind=trainer.batch_kind,
                    phase=Phase.FORWARD,
                    shape=making.shape,
                    start_seconds=start_seconds + making.start_seconds,
                    duration_seconds=making.duration_seconds,
                    dtype=trainer.plan.precision,
                )
            )
    return found


def with_cache_ratios(trace: Trace, plan: Plan, cluster: ClusterSpec) -> Trace:
    """Return a trace whose attentions say, as the plan does, how many gathered rows come from beyond the cache."""
    spans = tuple(
        replace(span, beyond_cache_ratio=beyond_cache_ratio_of(plan, span.shape, cluster))
        if span.kind is TaskKind.ATTENTION
        else span
        for span in trace.spans
    )
    return replace(trace, spans=spans)


def is_better(evaluation: Evaluation, best: Evaluation | None, *, has_val_nodes: bool) -> bool:
    """Return whether an evaluation's weights are to be kept instead of the best ones so far.

    The first of equals is kept; without nodes to validate on, the last.
    """
    return best is None or not has_val_nodes or evaluation.val_accuracy_ratio > best.val_accuracy_ratio


def warmup_steps_of(num_steps: int) -> int:
    """Return how many first steps of a run are left out of its durations: allocators and caches fill in them."""
    return min(5, num_steps // 3)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has held: by torch's allocator on GPUs, by the process on CPUs."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _gather(store: Store, place: Place, mine: Any) -> list[Any]:
    """Return what each rank of the plan gave, on rank 0; an empty list elsewhere."""
    store.set(f"gathered{place.rank}", pickle.dumps(mine))  # type: ignore[arg-type]  # bytes are taken too
    if place.rank > 0:
        return []
    return [pickle.loads(store.get(f"gathered{rank}")) for rank in range(place.num_ranks)]


def _write_result(out: Path, plan: Plan, result: RunResult, best_weights: dict[str, Tensor]) -> None:
    write_trace(out / "measured.json", result.trace)
    write_atomic(out / "weights.pt", lambda file: torch.save(best_weights, file))
    content = {
        "losses": result.losses,
        "evaluations": [{"step": step, **asdict(evaluation)} for step, evaluation in result.evaluations],
        "best_step": result.best_step,
        "best": asdict(result.best),
        "median_step_seconds": result.trace.median_step_seconds,
        "data_seconds": result.data_seconds,
        "gradients": {
            "bucket_bytes": plan.gradient_bucket_bytes,
            "overlap": plan.overlap_gradients,
            "compression": to_plain(plan.gradient_compression),
        },
        "environment": dict(result.trace.environment),
    }
    write_text_atomic(out / "result.json", json.dumps(content, indent=1))
