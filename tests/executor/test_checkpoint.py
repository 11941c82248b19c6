"""Runs that were saved halfway go on as if they had not stopped, on any number of ranks and under any exchange."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from executor.checkpoint import CheckpointWriter, checkpoint_state, restore
from executor.history import History
from executor.mesh import Place
from executor.record import Recorder
from executor.resume import unchecked
from executor.run import PlanRun, _work, run_plans
from executor.train import Inputs, Trainer
from simulator.errors import RunError
from simulator.readers.graphs import open_graph
from simulator.readers.partitions import read_partition
from simulator.specs.calibration import Calibration
from simulator.specs.checkpoint import CheckpointManifest
from simulator.specs.document import content_sha256
from simulator.specs.files import read_calibration, read_manifest, read_plan, read_trace, write_calibration, write_plan
from simulator.specs.plan import Exchange, ParameterSharding, PipelineSchedule
from simulator.specs.units import Dtype
from tests.executor.checkpoint_cases import NUM_SAVED_STEPS, NUM_STEPS, SAVED, UNSAVED, planned, saved
from tests.executor.test_train import one_rank_trainer
from tests.made import made_calibration
from tests.plans import Choices

EXACT, ROUNDED = 1e-5, 2e-2
FULL_GRAPH = {"1 rank": Choices()} | {
    f"{ranks} ranks, {exchange}": Choices(graph_parallel_degree=ranks, exchange=exchange)
    for ranks in (2, 4)
    for exchange in Exchange
    if exchange not in (Exchange.NONE, Exchange.HIERARCHICAL_HALO)  # the latter wants hosts
}
CLUSTERS = {
    "clusters on 1 rank": Choices(num_parts=5, parts_per_batch=2),
    "clusters on 2 ranks": Choices(num_parts=5, graph_parallel_degree=2),
}
ZERO2, ZERO3 = ParameterSharding.ZERO2, ParameterSharding.ZERO3
# Ranks that hold shares of heads, columns, parameters and parts.
SHARED = {
    "2 tensor ranks": Choices(tensor_parallel_degree=2),
    "4 tensor ranks": Choices(tensor_parallel_degree=4),
    "2 graph ranks of 2 tensor ranks": Choices(graph_parallel_degree=2, tensor_parallel_degree=2),
    "4 ranks, shared out": Choices(graph_parallel_degree=4, shard_parameters=ZERO3),
    "2 ranks, shared out": Choices(graph_parallel_degree=2, shard_parameters=ZERO2),
    "2 graph ranks of 2 tensor ranks, shared out": Choices(
        graph_parallel_degree=2, tensor_parallel_degree=2, shard_parameters=ZERO3
    ),
    "parts on 2, 1 and 1 ranks": Choices(graph_parallel_degree=4, part_ranks=(2, 1, 1)),
}
# Ranks that hold other layers.
STAGES = {
    "2 stages": Choices(pipeline_parallel_degree=2, stages=(1, 1)),
    "2 stages of 2 graph ranks": Choices(
        pipeline_parallel_degree=2, stages=(1, 1), graph_parallel_degree=2, pipeline_schedule=PipelineSchedule.GPIPE
    ),
    "2 stages of 2 tensor ranks": Choices(pipeline_parallel_degree=2, stages=(1, 1), tensor_parallel_degree=2),
}
PAIRS = [
    *((old, new) for group in (FULL_GRAPH, CLUSTERS) for old in group for new in group),
    *((old, "1 rank") for old in SHARED),
    *(("2 ranks, halo", new) for new in SHARED),
    # Each to the next one, and the last to the first.
    *zip(SHARED, [*SHARED][1:] + [*SHARED][:1], strict=True),
    ("2 graph ranks of 2 tensor ranks, shared out", "4 ranks, shared out"),
    *((old, "1 rank") for old in STAGES),
    *zip(["2 ranks, halo", "2 stages", "4 ranks, shared out"], STAGES, strict=True),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with each plan's whole run, saved halfway, and each run that went on from another one's checkpoint."""
    folder: Path = tmp_path_factory.mktemp("matrix")
    whole = {
        name: planned(folder, name, choices) for name, choices in (FULL_GRAPH | CLUSTERS | SHARED | STAGES).items()
    }
    run_plans(list(whole.values()))
    runs = [going_on(whole[new], folder / f"pair{index}", saved(whole[old])) for index, (old, new) in enumerate(PAIRS)]
    half = planned(folder, "in bf16", Choices(precision=Dtype.BFLOAT16))
    runs.append(going_on(half, folder / "in bf16", saved(whole["2 ranks, halo"])))
    run_plans(runs)
    return folder


def going_on(run: PlanRun, folder: Path, checkpoint: Path) -> PlanRun:
    """Return a run of the same plan from a checkpoint, which saves nothing itself; its results go to a folder."""
    path = run.plan_path.with_name("unsaved.json")
    write_plan(path, replace(read_plan(run.plan_path), train=UNSAVED))
    return replace(run, plan_path=path, out=folder / "run", resume=str(checkpoint))


def result_in(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run/result.json").read_text())
    return found


@pytest.mark.dist
@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_a_run_goes_on_under_another_plan_with_the_same_losses(matrix, old, new):
    reference = result_in(matrix / ("clusters on 1 rank" if old in CLUSTERS else "1 rank"))
    found = result_in(matrix / f"pair{PAIRS.index((old, new))}")
    assert len(found["losses"]) == NUM_STEPS
    assert found["losses"] == pytest.approx(reference["losses"], rel=EXACT)
    assert found["losses"][:NUM_SAVED_STEPS] == result_in(matrix / old)["losses"][:NUM_SAVED_STEPS]
    assert (found["first_step"], reference["first_step"]) == (NUM_SAVED_STEPS, 0)
    # Of the 43 training nodes and some 14 of each other kind; all as in the run that was not stopped.
    assert [evaluation["step"] for evaluation in found["evaluations"]] == [3, 7, 11, 13]
    for mine, other in zip(found["evaluations"], reference["evaluations"], strict=True):
        assert mine == pytest.approx(other, abs=1e-6)
    assert (found["best_step"], found["best"]) == (reference["best_step"], pytest.approx(reference["best"], abs=1e-6))


@pytest.mark.dist
def test_a_run_goes_on_in_another_precision(matrix):
    reference, found = result_in(matrix / "1 rank"), result_in(matrix / "in bf16")
    assert found["losses"] == pytest.approx(reference["losses"], rel=ROUNDED)
    assert found["losses"] != reference["losses"]


@pytest.mark.dist
def test_without_a_stop_checkpoints_change_no_loss_and_stand_apart_from_the_steps(matrix):
    with_checkpoints, trace = (
        result_in(matrix / "4 ranks, halo"),
        read_trace(matrix / "4 ranks, halo/run/measured.json"),
    )
    assert with_checkpoints["losses"] == pytest.approx(result_in(matrix / "1 rank")["losses"], rel=EXACT)
    assert with_checkpoints["checkpoint_seconds"] > 0
    assert {span.step for span in trace.spans} == {NUM_STEPS - 2, NUM_STEPS - 1}
    assert {span.name for span in trace.spans} == {
        span.name for span in read_trace(matrix / "pair0/run/measured.json").spans
    } | {span.name for span in trace.spans if span.kind.is_collective or "pack" in span.name}


@pytest.mark.dist
def test_all_ranks_write_their_share_of_a_checkpoint(matrix):
    path = saved(PlanRun(plan_path=Path(), out=matrix / "4 ranks, all_gather/run"))
    names = {entry.name for entry in read_manifest(path / "manifest.json").files}
    assert names == {".metadata", *(f"__{rank}_0.distcp" for rank in range(4))}
    assert {file.name for file in path.iterdir()} == names | {"manifest.json"}


# --- On one rank, in this process.


def run_here(run: PlanRun) -> dict[str, Any]:
    """Run a plan on one rank in this process."""
    run.out.mkdir(exist_ok=True)
    _work([run], HashStore(), 0)
    return result_in(run.out.parent)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_newest_checkpoints_are_kept_and_nothing_else_stays(tmp_path, asynchronous):
    train = replace(SAVED, checkpoint_every_steps=3, asynchronous_checkpoints=asynchronous)
    run = planned(tmp_path, "a", train=train)
    run_here(run)
    assert sorted(path.name for path in (run.out / "checkpoints").iterdir()) == ["step00000009", "step00000012"]


def test_the_losses_of_a_run_that_goes_on_are_the_same_to_the_last_bit(tmp_path):
    whole = planned(tmp_path, "whole")
    losses = run_here(whole)["losses"]
    again = replace(planned(tmp_path, "again", train=UNSAVED), resume=str(saved(whole)))
    torch.manual_seed(99)  # as another process would have drawn other numbers so far
    assert run_here(again)["losses"] == losses
    weights = [torch.load(run.out / "weights.pt") for run in (whole, again)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_the_best_weights_of_before_the_stop_are_kept(tmp_path):
    whole = planned(tmp_path, "whole", train=replace(SAVED, evaluate_every_steps=2))
    best = run_here(whole)
    history = History(has_val_nodes=True)
    trainer = trainer_of(whole)
    restore(trainer, history, unchecked(saved(whole)))
    evaluated = {entry["step"]: entry["val_accuracy_ratio"] for entry in best["evaluations"] if entry["step"] < 6}
    first_best = max(evaluated, key=lambda step: (evaluated[step], -step))
    assert history.best is not None
    assert (history.best[0], history.best[1].val_accuracy_ratio) == (first_best, evaluated[first_best])
    trainer.model.load_state_dict(history.best_weights)
    assert trainer.evaluate() == history.best[1]


def test_a_checkpoint_holds_plan_data_versions_and_the_calibration_beside_the_plan(tmp_path):
    run = planned(tmp_path, "a")
    calibration: Calibration = made_calibration()
    file = replace(read_plan(run.plan_path), calibration_sha256=content_sha256(calibration))
    write_plan(run.plan_path, file)
    write_calibration(run.plan_path.parent / "calibration.json", calibration)
    run_here(run)
    manifest = read_manifest(saved(run) / "manifest.json")
    assert manifest.plan_file == file
    assert dict(manifest.environment)["torch"] == torch.__version__
    assert read_calibration(saved(run) / "calibration.json") == calibration


def test_a_calibration_that_did_not_price_the_plan_is_not_kept(tmp_path):
    run = planned(tmp_path, "a")
    write_calibration(run.plan_path.parent / "calibration.json", made_calibration())
    run_here(run)
    assert not (saved(run) / "calibration.json").exists()


# --- The trainer's state.


def trainer_of(run: PlanRun) -> Trainer:
    """Return the trainer of a plan on one rank."""
    file, base = read_plan(run.plan_path), run.plan_path.parent
    place = Place(
        rank=0, num_ranks=1, replica=0, graph_rank=0, graph_group=None, world=None, device=torch.device("cpu")
    )
    inputs = Inputs(
        graph=open_graph(file.graph, base=base),
        part_N=read_partition(file.plan.partition, folder=base, num_nodes=file.graph.num_nodes),
        encodings=None,
    )
    return Trainer(file.plan, file.graph, file.model, file.train, inputs, place, Recorder())


def test_a_state_is_restored_where_the_tensors_lie_so_that_captured_steps_go_on_from_it():
    trained, other = one_rank_trainer(), one_rank_trainer()
    for step in range(3):
        trained.step(step, trained.batch(step))
    other.step(0, other.batch(0))
    places = pointers(other)
    other.load_state_dict(trained.state_dict())
    assert pointers(other) == places
    assert [float(other.step(step, other.batch(step))) for step in (3, 4)] == [
        float(trained.step(step, trained.batch(step))) for step in (3, 4)
    ]


def pointers(trainer: Trainer) -> list[int]:
    state = trainer.state_dict()
    moments = [value for table in state["optimizer"].values() for value in table.values()]
    return [value.data_ptr() for value in [*state["model"].values(), *moments]]


def test_asking_for_the_state_before_the_first_step_changes_nothing():
    asked, other = one_rank_trainer(), one_rank_trainer()
    state = asked.state_dict()
    assert all(not value.any() for table in state["optimizer"].values() for value in table.values())
    for step in range(3):
        assert float(asked.step(step, asked.batch(step))) == float(other.step(step, other.batch(step)))


def test_torchs_generators_are_restored():
    trainer = one_rank_trainer()
    state = trainer.state_dict()
    drawn = torch.rand(4)
    trainer.load_state_dict(state)
    assert torch.equal(torch.rand(4), drawn)


def test_parameters_that_are_no_numbers_are_not_kept():
    trainer, history = one_rank_trainer(), History(has_val_nodes=True)
    with torch.no_grad():
        next(trainer.model.parameters()).view(-1)[0] = float("nan")
    with pytest.raises(
        RunError, match=r"parameters are infinite or not a number after step 0: lower train\.learning_rate"
    ):
        checkpoint_state(trainer, history)


class Residual:
    """State of one rank, as error feedback has it."""

    def __init__(self, size: int = 3) -> None:
        self.left = torch.zeros(size)

    def state_dict(self):
        return {"left": self.left}

    def load_state_dict(self, state):
        self.left.copy_(state["left"])


def saved_with_residual(folder: Path) -> Path:
    """Write a checkpoint that holds the residual 1, 2, 3 of the only rank."""
    run = planned(folder, "a")
    trainer, history = trainer_of(run), History(has_val_nodes=True)
    history.add_loss(trainer.step(0, trainer.batch(0)))
    history.read_losses()
    residual = Residual()
    residual.left += torch.tensor([1.0, 2.0, 3.0])
    trainer.rank_states["gradients"] = residual
    manifest = CheckpointManifest(
        num_steps_done=1, plan_file=read_plan(run.plan_path), evaluations=(), environment=(), files=()
    )
    with CheckpointWriter(run.out, trainer.place, num_kept=1, asynchronous=True) as writer:
        writer.write(checkpoint_state(trainer, history), manifest)
        residual.left.zero_()  # training goes on at once; what is written is a copy
        writer.wait()
    return saved(run, 1)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_state_of_a_rank_is_restored_on_as_many_ranks(tmp_path, caplog):
    path = saved_with_residual(tmp_path)
    trainer = trainer_of(planned(tmp_path, "b"))
    trainer.rank_states["gradients"] = residual = Residual()
    restore(trainer, History(has_val_nodes=True), unchecked(path))
    assert residual.left.tolist() == [1, 2, 3]
    assert warnings_of(caplog) == []


def test_a_holder_of_nothing_is_no_part_of_a_checkpoint(tmp_path, caplog):
    path = saved_with_residual(tmp_path)
    trainer = trainer_of(planned(tmp_path, "b"))
    trainer.rank_states["idle"] = torch.nn.ReLU()
    assert "rank0" not in checkpoint_state(trainer, History(has_val_nodes=True))
    restore(trainer, History(has_val_nodes=True), unchecked(path))
    assert warnings_of(caplog) == []


@pytest.mark.parametrize("case", ["other ranks", "other shape", "other name"])
def test_the_state_of_a_rank_starts_afresh_with_a_warning_where_it_does_not_fit(tmp_path, caplog, case):
    path = saved_with_residual(tmp_path)
    trainer = trainer_of(planned(tmp_path, "b"))
    if case == "other ranks":
        trainer.place = replace(trainer.place, num_ranks=2)
    residual = Residual(4 if case == "other shape" else 3)
    trainer.rank_states["momenta" if case == "other name" else "gradients"] = residual
    with caplog.at_level(logging.WARNING):
        restore(trainer, History(has_val_nodes=True), unchecked(path))
    assert not residual.left.any()
    (sentence,) = warnings_of(caplog)
    assert "starts afresh" in sentence
