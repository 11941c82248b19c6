"""Runs with checkpoints that are ended, killed or fail, and what the command says and leaves; going on from there."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from executor.resume import checkpoint_paths, whole_manifest
from executor.run import PlanRun
from simulator.specs.files import read_plan, write_plan
from simulator.specs.plan import Exchange
from simulator.specs.train import TrainSpec
from tests.executor.checkpoint_cases import SAVED, planned
from tests.executor.commands import Done, assert_all_gone, ended, run_here, start, wait_for_ranks
from tests.plans import Choices

pytestmark = pytest.mark.dist

# Steps take some 4 ms on an idle machine; a signal is noticed within half a second.
ENDLESS = replace(SAVED, num_steps=1_000_000, evaluate_every_steps=20, trace_steps=0, checkpoint_every_steps=40)
SECONDS_TO_END = 20.0


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    """Runs commands in this process, in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_here(monkeypatch, capfd, *arguments)


def two_ranks(folder: Path, train: TrainSpec = ENDLESS) -> PlanRun:
    return planned(folder, "a", Choices(graph_parallel_degree=2, exchange=Exchange.HALO), train)


def training(run: PlanRun, *more: str) -> subprocess.Popen[str]:
    """Return a training that has come some way, as a process with a group of its own."""
    process = start("train", run.plan_path, "--out", run.out, *more, cwd=run.plan_path.parent)
    wait_for_checkpoint(run, process)
    return process


def wait_for_checkpoint(run: PlanRun, process: subprocess.Popen[str]) -> None:
    until = time.monotonic() + 60
    while not checkpoint_paths(run.out):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.01)


def sentences(done: Done) -> list[str]:
    return [line for line in done.err.splitlines() if not re.match(r"step \d+ of \d+: (loss|ended by a signal)", line)]


def assert_saved(run: PlanRun, done: Done) -> None:
    """Fail unless the newest checkpoint is whole, is told, and nothing unfinished was left."""
    newest = checkpoint_paths(run.out)[-1]
    steps = whole_manifest(newest).num_steps_done
    told = f"step {steps} of {ENDLESS.num_steps}: ended by a signal; to go on from {newest}, add --resume auto"
    assert done.err.splitlines().count(told) == 1, done.err
    assert {path.name for path in run.out.iterdir()} == {"checkpoints"}
    assert all(path.name.startswith("step") for path in (run.out / "checkpoints").iterdir())


# --- Someone ends it.


@pytest.mark.parametrize(
    ("number", "receiver"),
    [
        pytest.param(signal.SIGINT, "all", marks=pytest.mark.slow),  # Ctrl-C
        (signal.SIGTERM, "parent"),  # as job schedulers do
        pytest.param(signal.SIGTERM, "rank 1", marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_the_run_and_ends_it(tmp_path, number, receiver):
    run = two_ranks(tmp_path)
    process = training(run)
    ranks = wait_for_ranks(process, 2)
    match receiver:
        case "all":
            os.killpg(process.pid, number)
        case "parent":
            process.send_signal(number)
        case "rank 1":
            ranks[1].send_signal(number)
    done = ended(process, timeout_seconds=SECONDS_TO_END)
    assert_all_gone(ranks)
    assert (done.status, done.out, sentences(done)) == (128 + number, "", [])
    assert_saved(run, done)


@pytest.mark.slow
def test_a_run_that_was_ended_goes_on_to_the_losses_of_one_that_was_not(tmp_path, command):
    train = replace(ENDLESS, num_steps=800, evaluate_every_steps=100, trace_steps=5)
    run = two_ranks(tmp_path, train)
    process = training(run)
    os.killpg(process.pid, signal.SIGINT)
    assert ended(process, timeout_seconds=SECONDS_TO_END).status == 130
    steps = whole_manifest(checkpoint_paths(run.out)[-1]).num_steps_done
    assert 40 <= steps < 800
    done = command("train", run.plan_path, "--out", run.out, "--resume", "auto", "--json")
    assert (done.status, sentences(done)) == (0, [])
    assert done.err == ""
    whole = replace(run, out=tmp_path / "whole")
    assert command("train", whole.plan_path, "--out", whole.out, "--quiet").status == 0
    found, expected = (json.loads((each.out / "result.json").read_text()) for each in (run, whole))
    assert found["first_step"] == steps
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert found["evaluations"] == expected["evaluations"]


def torchrun(run: PlanRun, *more: str) -> subprocess.Popen[str]:
    """Start two ranks under torchrun, in a process group of their own."""
    options = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "executor", "train"]
    return subprocess.Popen(
        [sys.executable, *options, str(run.plan_path), "--out", str(run.out), *more],
        cwd=run.plan_path.parent,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize(("number", "to_all"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_under_torchrun_a_signal_saves_the_run_too(tmp_path, number, to_all):
    run = two_ranks(tmp_path)
    process = torchrun(run)
    wait_for_checkpoint(run, process)
    if to_all:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    done = ended(process, timeout_seconds=SECONDS_TO_END)
    assert done.status != 0
    assert "graphpilot: " not in done.err
    assert_saved(run, done)


@pytest.mark.slow
def test_under_torchrun_bad_input_is_told_once_and_by_all_ranks_before_they_meet(tmp_path):
    run = two_ranks(tmp_path, replace(SAVED, trace_steps=0))
    file = read_plan(run.plan_path)
    done = ended(torchrun(run))
    assert done.status == 0, done.err
    write_plan(run.plan_path, replace(file, train=replace(file.train, seed=6)))
    done = ended(torchrun(run, "--resume", "auto"))
    assert done.status != 0
    assert 2 in (codes := {int(code) for code in re.findall(r"exitcode\s*: (-?\d+)", done.err)})
    assert codes <= {2, -signal.SIGTERM}
    told = [line for line in done.err.splitlines() if line.startswith("graphpilot: ")]
    assert len(told) == 1
    assert "step00000012: train.seed must be 5 as in the checkpoint, got 6; plan for the checkpoint's" in told[0]


# --- It ends badly.


@pytest.mark.slow
def test_a_run_that_is_killed_while_it_writes_leaves_whole_checkpoints(tmp_path, command):
    run = two_ranks(tmp_path, replace(ENDLESS, checkpoint_every_steps=1))
    process = training(run)
    ranks = wait_for_ranks(process, 2)
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert_all_gone(ranks)
    for path in checkpoint_paths(run.out):
        whole_manifest(path)
    newest = whole_manifest(checkpoint_paths(run.out)[-1]).num_steps_done
    file = read_plan(run.plan_path)
    write_plan(run.plan_path, replace(file, train=replace(file.train, num_steps=newest + 3)))
    done = command("train", run.plan_path, "--out", run.out, "--resume", "auto", "--quiet")
    assert (done.status, done.out) == (0, "")
    assert len(json.loads((run.out / "result.json").read_text())["losses"]) == newest + 3
    assert all(path.name.startswith("step") for path in (run.out / "checkpoints").iterdir())


@pytest.mark.slow
def test_when_a_rank_is_lost_the_checkpoint_to_go_on_from_is_named(tmp_path):
    run = two_ranks(tmp_path)
    process = training(run)
    ranks = wait_for_ranks(process, 2)
    ranks[1].kill()
    done = ended(process, timeout_seconds=SECONDS_TO_END)
    assert_all_gone(ranks)
    assert done.status == 5
    (sentence,) = sentences(done)
    assert sentence.startswith("graphpilot: rank 1 was ended by SIGKILL")
    newest = checkpoint_paths(run.out)[-1]
    assert sentence.endswith(f"; go on from {newest} with --resume auto")
    whole_manifest(newest)


@pytest.mark.slow
def test_a_loss_that_is_not_finite_names_the_checkpoint_before_it(tmp_path, command):
    # The rate rises from nothing over a million steps of its warm-up, and is too high from some step on.
    train = replace(ENDLESS, learning_rate=1e38, warmup_steps=1_000_000, max_gradient_norm=1e30)
    run = two_ranks(tmp_path, replace(train, checkpoint_every_steps=1, evaluate_every_steps=1))
    done = command("train", run.plan_path, "--out", run.out, "--quiet")
    assert (done.status, done.out) == (5, "")
    sentence = done.err.strip()
    assert re.search(r"rank \d: (the loss of step \d+ is|parameters are infinite or not a number after step)", sentence)
    if paths := checkpoint_paths(run.out):
        assert sentence.endswith(f"; go on from {paths[-1]} with --resume auto")
        whole_manifest(paths[-1])


def test_a_disk_that_fills_up_is_told_and_what_was_whole_stays(tmp_path, command):
    run = two_ranks(tmp_path, replace(SAVED, checkpoint_every_steps=3))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # each rank's part takes some 60 kB
    try:
        done = command("train", run.plan_path, "--out", run.out, "--quiet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (done.status, done.out) == (5, "")
    assert re.fullmatch(
        rf"graphpilot: rank \d: {run.out}/checkpoints: rank \d cannot write its part of a checkpoint: .*\n", done.err
    ), done.err
    assert list((run.out / "checkpoints").iterdir()) == []


def test_a_run_is_not_started_afresh_over_an_earlier_one(tmp_path, command):
    run = planned(tmp_path, "a", train=replace(SAVED, trace_steps=0))
    assert command("train", run.plan_path, "--out", run.out, "--quiet").status == 0
    done = command("train", run.plan_path, "--out", run.out)
    assert (done.status, done.out) == (2, "")
    assert "step00000012 is of an earlier run: go on from it with --resume auto" in done.err
