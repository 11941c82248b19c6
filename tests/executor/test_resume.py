"""Which checkpoint a run goes on from, and which are refused: corrupt ones, and those of another training."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from executor.resume import (
    changes_of_losses,
    checkpoint_paths,
    checkpoint_to_resume,
    remove_unfinished_checkpoints,
    require_no_checkpoints,
    resume_hint,
    whole_manifest,
)
from executor.run import PlanRun, _work, run_plans
from simulator.errors import SpecError
from simulator.specs.decision import PlanFile
from simulator.specs.files import read_plan, write_plan
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.plan import Exchange
from simulator.specs.units import Dtype
from tests.executor.checkpoint_cases import SAVED, planned
from tests.plans import Choices

EVERY_4 = replace(SAVED, checkpoint_every_steps=4)  # leaves checkpoints after 8 and 12 steps


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> PlanRun:
    """A run with two checkpoints, not to be changed."""
    run = planned(tmp_path_factory.mktemp("trained"), "a", train=EVERY_4)
    run.out.mkdir()
    _work([run], HashStore(), 0)
    return run


@pytest.fixture
def run(trained: PlanRun, tmp_path: Path) -> PlanRun:
    """A copy of that run."""
    shutil.copytree(trained.out, tmp_path / "run")
    return replace(trained, out=tmp_path / "run")


def path_of(run: PlanRun, num_steps_done: int) -> Path:
    return run.out / f"checkpoints/step{num_steps_done:08d}"


def file_of(run: PlanRun) -> PlanFile:
    return read_plan(run.plan_path)


def refusal(run: PlanRun, resume: str = "auto", file: PlanFile | None = None) -> str:
    with pytest.raises(SpecError) as caught:
        checkpoint_to_resume(resume, run.out, file or file_of(run))
    return str(caught.value)


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# --- Finding it.


def test_auto_takes_the_newest_and_starts_afresh_where_there_is_none(run, tmp_path):
    found = checkpoint_to_resume("auto", run.out, file_of(run))
    assert found is not None
    assert (found.path, found.manifest.num_steps_done) == (path_of(run, 12), 12)
    assert checkpoint_to_resume("auto", tmp_path / "other", file_of(run)) is None


def test_a_path_names_any_checkpoint(run, tmp_path):
    found = checkpoint_to_resume(str(path_of(run, 8)), tmp_path / "other", file_of(run))
    assert found is not None
    assert found.manifest.num_steps_done == 8


def test_a_path_that_is_no_checkpoint_is_refused_with_the_one_that_may_be_meant(run):
    rule = "--resume must name auto or a checkpoint, a folder with manifest.json, got"
    meant = f"did you mean {path_of(run, 12)}?"
    assert refusal(run, "gone") == f"gone: {rule} nothing there"
    assert refusal(run, str(run.out)) == f"{run.out}: {rule} a folder without; {meant}"
    assert refusal(run, str(run.out / "checkpoints")) == f"{run.out / 'checkpoints'}: {rule} a folder without; {meant}"


def test_checkpoints_are_in_the_order_of_their_steps_also_beyond_eight_digits(tmp_path):
    for steps in (5, 100_000_000, 99_999_999):
        (tmp_path / f"checkpoints/step{steps:08d}").mkdir(parents=True)
    for other in (".step00000007.tmp", "step7", "steps"):
        (tmp_path / "checkpoints" / other).mkdir()
    names = [path.name for path in checkpoint_paths(tmp_path)]
    assert names == ["step00000005", "step99999999", "step100000000"]


def test_an_older_checkpoint_is_not_gone_on_from_beside_newer_ones(run):
    sentence = refusal(run, str(path_of(run, 8)))
    assert sentence == (
        f"{path_of(run, 12)} is of more steps than {path_of(run, 8)}, from which the run is to go on: remove it, or "
        "write elsewhere with --out"
    )


def test_a_run_that_starts_afresh_is_not_mixed_with_an_earlier_one(run, tmp_path):
    require_no_checkpoints(tmp_path / "other")
    with pytest.raises(
        SpecError, match=r"step00000012 is of an earlier run: go on from it with --resume auto, remove "
    ):
        run_plans([run])


def test_a_failed_run_is_told_where_to_go_on(run, tmp_path):
    assert resume_hint(run.out) == f"go on from {path_of(run, 12)} with --resume auto"
    assert resume_hint(tmp_path / "other") == ""


def test_only_what_was_left_unfinished_is_removed(run):
    before = sorted(run.out.rglob("*"))
    for name in (".step00000016.tmp", ".step00000008.old.tmp"):
        (run.out / "checkpoints" / name).mkdir()
        (run.out / "checkpoints" / name / "__0_0.distcp").touch()
    remove_unfinished_checkpoints(run.out)
    assert sorted(run.out.rglob("*")) == before


# --- Whole or corrupt.


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "manifest.json"])
@pytest.mark.parametrize("harm", ["flipped bit", "cut short", "gone"])
def test_a_file_that_is_missing_or_changed_is_named_and_the_one_before_is_not_taken_in_silence(run, name, harm):
    path = path_of(run, 12) / name
    match harm:
        case "flipped bit":
            flip(path)
        case "cut short":
            path.write_bytes(path.read_bytes()[:-2])
        case "gone":
            path.unlink()
    sentence = refusal(run)
    assert sentence.startswith(f"{path}: ")
    assert sentence.endswith(
        f"; to go on from the one before, {path_of(run, 8)}, remove {path_of(run, 12)} and use --resume auto"
    )
    if name != "manifest.json":
        digests = {entry.name: entry.sha256 for entry in whole_manifest(path_of(run, 8)).files}
        assert digests.keys() == {".metadata", "__0_0.distcp"}
        assert "sha256 must be " in sentence
        assert "the checkpoint is corrupt" in sentence
    shutil.rmtree(path_of(run, 12))  # as the sentence says
    found = checkpoint_to_resume("auto", run.out, file_of(run))
    assert found is not None
    assert found.path == path_of(run, 8)


def test_a_corrupt_one_is_told_with_both_checksums(run):
    path = path_of(run, 12) / "__0_0.distcp"
    (good,) = [entry for entry in whole_manifest(path_of(run, 12)).files if entry.name == path.name]
    flip(path)
    assert f"sha256 must be {good.sha256}, as manifest.json says, got " in refusal(run)
    assert f" in {good.num_bytes:,} bytes: the checkpoint is corrupt" in refusal(run)


def test_the_only_one_that_is_corrupt_is_to_be_removed(run):
    flip(path_of(run, 12) / ".metadata")
    flip(path_of(run, 8) / ".metadata")
    assert refusal(run).endswith("; there is none before it: remove it to start afresh")
    assert refusal(run, str(path_of(run, 8))).endswith("; give another one")


# --- Of the same training or of another.


@pytest.mark.parametrize(
    ("part", "changes", "told"),
    [
        ("graph", {"sha256": "f" * 64}, f"graph.sha256 must be .* as in the checkpoint, got {'f' * 64}"),
        ("graph", {"num_nodes": 72}, "graph.num_nodes must be 71 as in the checkpoint, got 72"),
        ("model", {"width": 20}, "model.width must be 16 as in the checkpoint, got 20"),
        ("model", {"dropout_ratio": 0.5}, "model.dropout_ratio must be 0.3 as in the checkpoint, got 0.5"),
        ("train", {"seed": 6}, "train.seed must be 5 as in the checkpoint, got 6"),
        ("train", {"num_steps": 12}, "train.num_steps must exceed the 12 steps that were done, got 12; raise it"),
    ],
)
def test_a_checkpoint_of_another_training_is_refused_with_the_field_and_both_values(run, part, changes, told):
    file = file_of(run)
    other = replace(file, **{part: replace(getattr(file, part), **changes)})
    with pytest.raises(SpecError, match=f"step00000012: {told}"):
        checkpoint_to_resume("auto", run.out, other)


def test_how_a_graph_was_prepared_is_part_of_it_and_where_it_lies_is_not(run):
    file = file_of(run)
    moved = replace(file, graph=replace(file.graph, source=replace(file.graph.source, path="/elsewhere")))
    assert checkpoint_to_resume("auto", run.out, moved) is not None
    other = replace(file, graph=replace(file.graph, source=replace(file.graph.source, add_self_loops=False)))
    assert "graph.source.add_self_loops must be True as in the checkpoint, got False" in refusal(run, file=other)


def test_of_many_differences_the_first_are_told(run):
    file = file_of(run)
    graph = replace(file.graph, num_nodes=1, num_edges=2, num_train_nodes=3, num_val_nodes=4, num_test_nodes=5)
    sentence = refusal(run, file=replace(file, graph=graph))
    assert sentence.count("must be") == 3
    assert "and 2 fields more; plan for the checkpoint's" in sentence


def test_settings_that_change_the_losses_are_told_and_others_are_not(run, caplog, monkeypatch):
    file = file_of(run)
    train = replace(
        file.train,
        learning_rate=0.5,
        evaluate_every_steps=1,
        trace_steps=0,
        checkpoint_every_steps=7,
        num_checkpoints_kept=9,
        asynchronous_checkpoints=False,
        collective_timeout_seconds=600.0,
        cpu_affinity=False,
    )
    found = checkpoint_to_resume("auto", run.out, file)
    assert found is not None
    assert changes_of_losses(found, replace(file, train=train)) == ["train.learning_rate was 0.01 and is 0.5"]
    # The command says so before the ranks start.
    changed = run.plan_path.with_name("changed.json")
    write_plan(changed, replace(file, train=train))
    monkeypatch.setattr("executor.run._start", lambda plans: None)
    with caplog.at_level(logging.WARNING):
        run_plans([replace(run, plan_path=changed, resume="auto")])
    assert [record.getMessage() for record in caplog.records if record.name == "executor.run"] == [
        f"{path_of(run, 12)}: train.learning_rate was 0.01 and is 0.5, so losses go on otherwise than in the run before"
    ]


def test_other_batches_are_told_and_another_cut_of_the_full_graph_is_not(run, tmp_path):
    found = checkpoint_to_resume("auto", run.out, file_of(run))
    assert found is not None
    cut = planned(tmp_path, "cut", Choices(graph_parallel_degree=2, exchange=Exchange.ALL_GATHER))
    assert changes_of_losses(found, file_of(cut)) == []
    clusters = planned(tmp_path, "clusters", Choices(num_parts=3))
    assert changes_of_losses(found, file_of(clusters)) == ["the plans put other nodes together in a batch"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"precision": Dtype.BFLOAT16}, "plan.precision was fp32 and is bf16"),
        ({"exchange_precision": Dtype.BFLOAT16}, "plan.exchange_precision was None and is bf16"),
        (
            {"gradient_compression": GradientCompression(kind=CompressionKind.BF16)},
            "plan.gradient_compression was none and is bf16",
        ),
    ],
)
def test_choices_of_a_plan_that_change_what_is_learned_are_told(run, changes, told):
    file = file_of(run)
    found = checkpoint_to_resume("auto", run.out, file)
    assert found is not None
    assert changes_of_losses(found, replace(file, plan=replace(file.plan, **changes))) == [told]
