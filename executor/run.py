"""run_plan(): the story of one run, from plan file to measured trace."""

import contextlib
import json
import logging
import math
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

from executor.agreement import Sizes, require_agreement, rows_of
from executor.checkpoint import restore
from executor.checkpointing import Checkpointing
from executor.encodings import cache_folder, positional_encodings
from executor.environment import environment
from executor.heartbeat import Heartbeat, backstop_seconds
from executor.history import History
from executor.launch import is_under_torchrun, launch, meet, run_as_rank
from executor.mesh import Place, joined_mesh, mesh_choices
from executor.nccl_settings import told_nccl
from executor.position import Position
from executor.progress import CountProgress
from executor.record import Recorder, StepTracer, with_waiting
from executor.resume import (
    Checkpoint,
    changes_of_losses,
    checkpoint_to_resume,
    remove_unfinished_checkpoints,
    require_no_checkpoints,
    resume_hint,
    unchecked,
)
from executor.train import Evaluation, Inputs, StepClock, Trainer
from simulator.constraints import training_violations, violations
from simulator.errors import PlanError, RunError, SpecError
from simulator.readers.graphs import open_graph
from simulator.readers.orders import read_order
from simulator.readers.partitions import read_partition
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.convert import to_plain
from simulator.specs.decision import PlanFile
from simulator.specs.document import content_sha256
from simulator.specs.files import (
    read_calibration,
    read_plan,
    remove_unfinished,
    write_atomic,
    write_text_atomic,
    write_trace,
)
from simulator.specs.plan import Plan
from simulator.specs.program import ATTENTIONS, Phase, stream_of
from simulator.specs.trace import Span, Trace, TraceOrigin
from simulator.timeout import collective_timeout_seconds
from simulator.workload import beyond_cache_ratio_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PlanRun:
    """A plan file to run, and the folder that gets the results.

    Attributes:
        plan_path: `plan.json`; partition, order and relative graph paths start at its folder.
        out: gets `measured.json` (the trace), `result.json` (losses, accuracies) and `weights.pt` (best by validation).
        quiet: print no progress.
        resume: "auto" for the newest checkpoint in `out`, if there is any, or the path of one; None starts afresh.
        kineto: folder for the profiler's own file of each traced step and rank, which `graphpilot replay` reads.
    """

    plan_path: Path
    out: Path
    quiet: bool = False
    resume: str | None = None
    kineto: Path | None = None


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What a run came to.

    Attributes:
        losses: of every step, also of those before a resume.
        evaluations: pairs of a step and its accuracies.
        best_step: step with the best validation accuracy, whose weights were kept.
        first_step: from which this process trained; 0 unless it went on from a checkpoint.
        data_seconds: time that rank 0 spent on making batches or waiting for them; outside the steps where batches are
            made once, else inside.
        checkpoint_seconds: time for which its training stood still for checkpoints, outside the steps.
        reserved_memory_bytes: the most that each rank's allocator held, in use or not.
    """

    losses: tuple[float, ...]
    evaluations: tuple[tuple[int, Evaluation], ...]
    best_step: int
    best: Evaluation
    first_step: int
    data_seconds: float
    checkpoint_seconds: float
    reserved_memory_bytes: tuple[int, ...]
    trace: Trace


def run_plan(run: PlanRun) -> None:
    """Train as a plan says and write the results into `run.out`; see `run_plans`."""
    run_plans([run])


def run_plans(runs: Sequence[PlanRun]) -> None:
    """Train plans one after another; on this host's own processes, or as a rank when torchrun started this process.

    Ranks beyond a plan's number wait for the next plan.

    Raises:
        PlanError: if a plan cannot run here.
        SpecError: if a checkpoint is corrupt, or of another training.
        RunError: if a run fails, with the rank, the reason, and the checkpoint to go on from.
    """
    plans = [(run, read_plan(run.plan_path)) for run in runs]
    for _, file in plans:
        require_legal(file)
    runs = [replace(run, resume=_checked_resume(run, file)) for run, file in plans]
    for run in runs:
        run.out.mkdir(parents=True, exist_ok=True)
    try:
        _start([(run, file) for run, (_, file) in zip(runs, plans, strict=True)])
    except RunError as error:
        hints = [hint for run in runs if (hint := resume_hint(run.out))]
        raise type(error)("; ".join([str(error), *hints])) from error


def require_legal(file: PlanFile) -> None:
    """Return if a plan can be trained on its cluster.

    Raises:
        PlanError: if it cannot.
    """
    found = violations(file.plan, file.graph, file.model, file.cluster)
    if found := [*found, *training_violations(file.plan, file.train, file.cluster)]:
        raise PlanError("; ".join(found))
    if file.graph.num_train_nodes == 0:
        path = file.graph.source.path
        raise PlanError(f"{path}: train_mask must hold a node to train on, got none; save y and train_mask too")


def checkpoint_of(run: PlanRun, file: PlanFile) -> Checkpoint | None:
    """Return the checkpoint that a run goes on from, after looking at all of it; None to start afresh.

    Raises:
        SpecError: if there is none, or one that does not fit, or one that a run that starts afresh would be mixed with.
    """
    if run.resume is not None:
        return checkpoint_to_resume(run.resume, run.out, file)
    if file.train.checkpoint_every_steps:
        require_no_checkpoints(run.out)
    return None


def _checked_resume(run: PlanRun, file: PlanFile) -> str | None:
    """Return the path of the checkpoint that a run goes on from; None to start afresh."""
    is_first = os.environ.get("RANK", "0") == "0"
    if is_first:
        remove_unfinished_checkpoints(run.out)
    found = checkpoint_of(run, file)
    if found is None:
        return None
    for change in changes_of_losses(found, file) if is_first else ():
        logger.warning("%s: %s, so losses go on otherwise than in the run before", found.path, change)
    return str(found.path)


def _start(plans: list[tuple[PlanRun, PlanFile]]) -> None:
    """Run every plan as a rank of torchrun's, or on ranks of this host."""
    runs = [run for run, _ in plans]
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
        for run in runs:
            remove_unfinished(run.out)
            remove_unfinished_checkpoints(run.out)


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
    position = Position()
    heartbeat = Heartbeat(store, position, rank=rank, num_ranks=file.plan.num_ranks, folder=run.out)
    with heartbeat, heartbeat.failures_told():
        _train_as_rank(run, file, store, rank, heartbeat, position)


def _train_as_rank(
    run: PlanRun, file: PlanFile, store: Store, rank: int, heartbeat: Heartbeat, position: Position
) -> None:
    base = run.plan_path.parent
    graph = open_graph(file.graph, base=base)
    inputs = Inputs(
        graph=graph,
        part_N=read_partition(file.plan.partition, folder=base, num_nodes=file.graph.num_nodes),
        encodings=positional_encodings(graph, file.graph, file.model, cache_folder()),
        order_N=read_order(file.plan.order, folder=base, num_nodes=file.graph.num_nodes),
    )
    kind = file.cluster.device.kind
    timeout_seconds = collective_timeout_seconds(file)
    position.enter("the meeting of all ranks")
    num_ranks = file.plan.num_ranks
    require_agreement(store, _contents(run, file), about="contents", rank=rank, num_ranks=num_ranks)
    mesh = joined_mesh(
        kind,
        store,
        rank=rank,
        local_rank=int(os.environ.get("LOCAL_RANK", rank)),
        timeout_seconds=backstop_seconds(timeout_seconds),
        cpu_affinity=file.train.cpu_affinity,
        **mesh_choices(file.plan),
    )
    with told_nccl(file.cluster), mesh as place, heartbeat.failures_told():
        heartbeat.timeout_seconds = timeout_seconds
        position.reach("the making of the model")
        if kind is DeviceKind.CUDA:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(place.device)
        recorder = Recorder(
            annotate=kind is DeviceKind.CUDA or run.kineto is not None,
            precision=file.plan.precision,
            position=position,
            kineto=run.kineto,
        )
        trainer = Trainer(file.plan, file.graph, file.model, file.train, inputs, place, recorder)
        history = History(has_val_nodes=file.graph.num_val_nodes > 0)
        if run.resume is not None:
            restore(trainer, history, unchecked(Path(run.resume)))
        started = time.perf_counter()
        position.reach("the first batch")
        sizes = _sizes(trainer, first_step=len(history.losses))
        made_seconds = time.perf_counter() - started
        with position.waiting("the comparison of sizes"):
            require_agreement(store, sizes, about="sizes", rank=rank, num_ranks=num_ranks)
        progress = CountProgress("training", "step", file.train.num_steps, quiet=run.quiet or rank > 0)
        checkpointing = Checkpointing(
            trainer,
            history,
            store,
            progress,
            out=run.out,
            plan_file=file,
            first_step=len(history.losses),
            calibration=_calibration_of(file, base) if rank == 0 else None,
            patience_seconds=backstop_seconds(timeout_seconds),
        )
        with contextlib.closing(trainer):
            result = train_loop(trainer, history, checkpointing, store, progress)
        position.reach("the end of the run")
    if rank == 0:
        trace = with_cache_ratios(result.trace, file.plan, file.cluster)
        result = replace(result, trace=trace, data_seconds=made_seconds + result.data_seconds)
        _write_result(run.out, file.plan, result, history.best_weights)


def _contents(run: PlanRun, file: PlanFile) -> Sizes:
    """Return what must fit on all ranks before they meet."""
    manifest = None if run.resume is None else unchecked(Path(run.resume)).manifest
    return Sizes(
        counts={
            "steps done": 0 if manifest is None else manifest.num_steps_done,
            "checkpoint": "" if manifest is None else content_sha256(manifest),
            "train.num_steps": file.train.num_steps,
            "steps of an epoch": file.plan.steps_per_epoch,
            "train": content_sha256(file.train),
            "plan": content_sha256(file.plan),
            "model": content_sha256(file.model),
            "graph": file.graph.sha256,
        },
        # torchrun numbers hosts in the order of their ranks.
        host=int(os.environ.get("GROUP_RANK", 0)),
        ranks_per_host=file.plan.ranks_per_host,
    )


def _sizes(trainer: Trainer, *, first_step: int) -> Sizes:
    """Return what this rank brings to the collectives."""
    return Sizes(
        counts={"parameters": sum(map(math.prod, trainer.parameters.shapes.values()))},
        layouts={name: rows_of(layout) for name, layout in trainer.layouts(first_step).items()},
    )


def _calibration_of(file: PlanFile, base: Path) -> Path | None:
    """Return the calibration that priced a plan, if it lies beside it under its usual name."""
    path = base / "calibration.json"
    try:
        is_it = path.exists() and content_sha256(read_calibration(path)) == file.calibration_sha256
    except SpecError:
        return None
    return path if is_it else None


def train_loop(
    trainer: Trainer, history: History, checkpointing: Checkpointing, store: Store, progress: CountProgress
) -> RunResult:
    """Train from where `history` is to the end; return the result, and leave the best weights in `history`.

    The first steps, `warmup_steps_of`, are slower and left out of the trace's durations, as are those beside which a
    checkpoint was written, unless there are no others; the last `TrainSpec.trace_steps` are recorded task by task and
    left out too.

    Args:
        store: through which the ranks of this plan hand their spans to rank 0.
    """
    train, place, position = trainer.train_spec, trainer.place, trainer.recorder.position
    clock = StepClock(place.device)
    first_step, data_seconds = len(history.losses), 0.0
    was_shared: list[bool] = []  # of each step, whether a checkpoint was written beside it
    tracer = StepTracer(trainer.recorder, place)
    with progress, checkpointing:
        for step in range(first_step, train.num_steps):
            is_traced = step >= train.num_steps - train.trace_steps
            checkpointing.before_step(step, is_traced=is_traced)
            started = time.perf_counter()
            position.reach(f"the batch of step {step + 1}")
            if not trainer.plan.loads_batches:
                trainer.batch(step)  # made once, and not for this step alone
            data_seconds += time.perf_counter() - started
            was_shared.append(checkpointing.is_writing)
            with tracer.step(step) if is_traced else contextlib.nullcontext():
                clock.start()
                started = time.perf_counter()
                batches = trainer.micro_batches(step)
                data_seconds += time.perf_counter() - started
                history.add_loss(trainer.step(step, *batches))
                clock.stop()
            is_last = step == train.num_steps - 1
            if (step + 1) % train.evaluate_every_steps == 0 or is_last:
                position.reach(f"the evaluation after step {step + 1}")
                with position.waiting("losses"):
                    history.read_losses()
                evaluation = trainer.evaluate()
                history.add_evaluation(step, evaluation, trainer.whole_weights)
                accuracy = f"validation accuracy {evaluation.val_accuracy_ratio:.3f}"
                progress.show(step + 1, f"loss {history.losses[-1]:.4f}, {accuracy}")
            checkpointing.after_step(step)
    position.reach("the gathering of traces")
    with position.waiting("the last step"):
        seconds = clock.seconds()
    num_steps = train.num_steps - first_step
    first_traced = max(num_steps - train.trace_steps, 0)
    first_warm = min(warmup_steps_of(num_steps), first_traced)
    alone = [seconds[index] for index in range(first_warm, first_traced) if not was_shared[index]]
    spans = [*tracer.spans(), *batch_spans(trainer, tracer.spans())]
    with position.waiting("the traces of all ranks"):
        memory = (peak_memory_bytes(place.device), reserved_memory_bytes(place.device))
        gathered = _gather(store, place, (spans, memory, place.cores))
    trace = Trace(
        origin=TraceOrigin.MEASURED,
        num_ranks=trainer.plan.num_ranks,
        spans=with_waiting(span for rank_spans, _, _ in gathered for span in rank_spans),
        step_seconds=tuple(alone or seconds[first_warm:first_traced] or seconds[first_warm:]),
        traced_step_seconds=tuple(seconds[first_traced:]),
        peak_memory_bytes=tuple(peak for _, (peak, _), _ in gathered),
        environment=environment(DeviceKind(place.device.type), cores=[cores for _, _, cores in gathered]),
    )
    assert history.best is not None  # the last step is evaluated
    return RunResult(
        losses=tuple(history.losses),
        evaluations=tuple(history.evaluations),
        best_step=history.best[0],
        best=history.best[1],
        first_step=first_step,
        data_seconds=data_seconds,
        checkpoint_seconds=checkpointing.seconds,
        reserved_memory_bytes=tuple(reserved for _, (_, reserved), _ in gathered),
        trace=trace,
    )


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
        if span.kind in ATTENTIONS
        else span
        for span in trace.spans
    )
    return replace(trace, spans=spans)


def warmup_steps_of(num_steps: int) -> int:
    """Return how many first steps of a run are left out of its durations: allocators and caches fill in them."""
    return min(5, num_steps // 3)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this rank has held: by torch's allocator on GPUs, by the process on CPUs."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reserved_memory_bytes(device: torch.device) -> int:
    """Return the most memory that torch's allocator has held on a GPU, used or not; on CPUs that of the process."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else peak_memory_bytes(device)


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
        "first_step": result.first_step,
        "median_step_seconds": result.trace.median_step_seconds,
        "data_seconds": result.data_seconds,
        "gradients": {
            "bucket_bytes": plan.gradient_bucket_bytes,
            "overlap": plan.overlap_gradients,
            "compression": to_plain(plan.gradient_compression),
        },
        "checkpoint_seconds": result.checkpoint_seconds,
        "reserved_memory_bytes": result.reserved_memory_bytes,
        "environment": dict(result.trace.environment),
    }
    write_text_atomic(out / "result.json", json.dumps(content, indent=1))
