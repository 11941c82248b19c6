"""One rank of a plan, alone under a fake process group: its state is made, and a step runs on fake tensors.

The step is the executor's own, with the recorder on: mesh and groups of the full size, model, buckets of gradients and
optimizer are made, the forward and the backward pass run with shapes and without numbers, and every collective is
called on a process group that brings nothing. What was marked and called is then held against the rank's program.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import executor.attention.fakes  # noqa: F401  # what attention gives on fake tensors
from executor.collective_calls import CollectiveCalls, call_discrepancies
from executor.compat import FAKE_BACKEND
from executor.counted import counted_data, counted_features
from executor.data import Inputs, RankData
from executor.marks import mark_discrepancies
from executor.mesh import Place, joined_mesh, mesh_choices
from executor.record import Mark, Recorder
from executor.train import TORCH_DTYPES, Trainer
from simulator.readers.graphs import Graph
from simulator.specs.cluster import DeviceKind
from simulator.specs.decision import PlanFile
from simulator.specs.program import BATCH_KINDS, Phase, Task
from simulator.workload import RankWork

# What torch raises where an operator cannot run without numbers.
_UNABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
STEP = 0


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What came of one rank's step.

    Attributes:
        findings: what ran otherwise than lowered, or failed, in sentences.
        unchecked: what could not be run without numbers, in sentences.
    """

    rank: int
    findings: tuple[str, ...]
    unchecked: tuple[str, ...]


def rehearse(
    file: PlanFile, rank: int, tasks: Sequence[Task], *, works: Sequence[RankWork], inputs: Inputs | None
) -> Rehearsal:
    """Run a step of one rank without numbers and without its peers; hold it against its program.

    Args:
        tasks: of the rank in step `STEP`, as lowered.
        works: what it holds then of each micro-batch.
        inputs: of the run; None where the graph is not here, and counts must do.
    """
    plan = file.plan
    tasks = [task for task in tasks if inputs is not None or task.kind not in BATCH_KINDS]
    mesh = joined_mesh(
        DeviceKind.CPU,
        FakeStore(),
        rank=rank,
        local_rank=0,
        cpu_affinity=False,
        backend=FAKE_BACKEND,
        **mesh_choices(plan),
    )
    recorder = Recorder(precision=plan.precision)
    with mesh as place:
        try:
            marks, calls = _run_step(file, place, recorder, works, inputs)
        except _UNABLE as error:
            return Rehearsal(rank=rank, findings=(), unchecked=(f"{recorder.position}: {_first_line(error)}",))
        # Any error of a step would be one of the run: what it says of shapes is what is wanted.
        except Exception as error:
            text = f"{recorder.position}: {type(error).__name__}: {_first_line(error)}"
            return Rehearsal(rank=rank, findings=(text,), unchecked=())
    exact = plan.parts_per_batch in (1, plan.partition.num_parts) or not plan.between_edges or inputs is None
    found = mark_discrepancies(tasks, marks, counts_long_rows=exact)
    return Rehearsal(rank=rank, findings=(*found, *call_discrepancies(tasks, calls.calls)), unchecked=())


@contextlib.contextmanager
def _real_meshes() -> Iterator[None]:
    """Let meshes that are made inside keep real tensors of ranks: which one this is, they look up by number."""
    make = DeviceMesh.__init__

    @functools.wraps(make)
    def made(*arguments: Any, **named: Any) -> None:
        with unset_fake_temporarily():
            make(*arguments, **named)

    setattr(DeviceMesh, "__init__", made)  # noqa: B010  (mypy lets no method be assigned)
    try:
        yield
    finally:
        setattr(DeviceMesh, "__init__", make)  # noqa: B010


def _run_step(
    file: PlanFile, place: Place, recorder: Recorder, works: Sequence[RankWork], inputs: Inputs | None
) -> tuple[list[Mark], CollectiveCalls]:
    """Make a rank's state and run a step; return what was marked and which collectives were called."""
    plan, calls = file.plan, CollectiveCalls()
    train = replace(file.train, compile_dense=False)  # a step that is recorded runs task by task
    # Batches come from real arrays, which become fake where they are used.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _real_meshes():
        trainer = Trainer(plan, file.graph, file.model, train, inputs or _no_inputs(), place, recorder)
    with contextlib.closing(trainer):
        recorder.start()
        batches = _batches(file, place, trainer, mode, works, from_graph=inputs is not None)
        with mode, calls:
            trainer.step(STEP, *batches)
        marks = recorder.stop()
        if inputs is not None and plan.prefetch_batches > 0:
            marks.insert(0, _made_ahead(trainer))
    return marks, calls


def _batches(
    file: PlanFile,
    place: Place,
    trainer: Trainer,
    mode: FakeTensorMode,
    works: Sequence[RankWork],
    *,
    from_graph: bool,
) -> Sequence[RankData]:
    if from_graph:
        batches = trainer.micro_batches(STEP)
        for data in batches:
            _ = data.sparse and data.sparse.num_entries  # counted while there are numbers
        return batches
    dtype, found = TORCH_DTYPES[file.plan.precision], []
    for work in works:
        sparse = counted_features(file.graph, work)
        with mode:
            found.append(counted_data(file.plan, file.graph, file.model, work, place, dtype=dtype, sparse=sparse))
    return found


def _made_ahead(trainer: Trainer) -> Mark:
    """Return the task in which a thread made a later batch meanwhile, which no recorder marks."""
    making, plan = trainer.batches.making(STEP), trainer.plan
    assert making is not None, "a batch was made ahead"
    return Mark(
        name="batch",
        kind=trainer.batch_kind,
        phase=Phase.FORWARD,
        shape=making.shape,
        dtype=plan.precision,
    )


def _no_inputs() -> Inputs:
    """Return inputs of a graph without nodes, for a trainer that is given its batches."""
    none = np.zeros(0, np.int64)
    no_mask = np.zeros(0, np.bool_)
    graph = Graph(
        indptr_N=np.zeros(1, np.int64),
        source_E=np.zeros(0, np.int32),
        features=np.zeros((0, 0), np.float32),
        labels_N=none,
        train_mask_N=no_mask,
        val_mask_N=no_mask,
        test_mask_N=no_mask,
    )
    return Inputs(graph=graph, part_N=none, encodings=None)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["without a word"])[0]
