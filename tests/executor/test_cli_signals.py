"""Commands that start ranks: when a run ends badly, when someone ends it, and under torchrun."""

import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from executor.run import PlanRun, run_plans
from simulator.specs.files import read_trace
from tests.executor.commands import (
    Done,
    assert_all_gone,
    ended,
    graph_arrays,
    run_here,
    start,
    wait_for_ranks,
    write_graph,
    write_made_calibration,
    write_run,
)

pytestmark = [pytest.mark.dist, pytest.mark.alone]

ENDLESS = {"num_steps = 6": "num_steps = 1_000_000", "evaluate_every_steps = 3": "evaluate_every_steps = 50"}
# Within which everything must be over once a signal was sent or a rank was lost.
SECONDS_TO_END = 10.0


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    """Runs commands in this process, in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_here(monkeypatch, capfd, *arguments)


@pytest.fixture
def planned(command):
    """Makes a graph, a run, a calibration and a plan on two ranks in a folder; gives the plan's path."""

    def plan(folder: Path, changes=None, arrays=None) -> Path:
        folder.mkdir(exist_ok=True)
        write_graph(folder, arrays)
        run = write_run(folder, changes, extra="[search]\nnum_ranks = [2]\nexchanges = ['halo']\n")
        calibration = write_made_calibration(folder)
        done = command("plan", run, "--calibration", calibration, "--out", folder / "plan.json", "--quiet")
        assert done == Done(status=0, out="", err="")
        return folder / "plan.json"

    return plan


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Return when a line with this text has come on standard error."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return
    raise AssertionError(f"the command ended and said {lines}")


def sentences(done: Done) -> list[str]:
    """Return what a command said on standard error beside its progress."""
    return [line for line in done.err.splitlines() if not re.match(r"step \d|tasks on|calibrating|cutting|simu", line)]


# --- Someone ends it.


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_training_ends_with_all_its_ranks_on_a_signal(tmp_path, planned, number, status):
    plan = planned(tmp_path, ENDLESS)
    before = sorted(path.name for path in tmp_path.iterdir())
    process = start("train", plan, cwd=tmp_path)
    ranks = wait_for_ranks(process, 2)
    wait_for_line(process, "step 50 of")
    os.killpg(process.pid, number)
    done = ended(process, timeout_seconds=SECONDS_TO_END)
    assert_all_gone(ranks)
    assert (done.status, done.out, sentences(done)) == (status, "", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_calibration_ends_with_all_its_ranks_on_a_signal(tmp_path, number, status):
    process = start("calibrate", "--quick", cwd=tmp_path)
    wait_for_line(process, "calibrating")
    ranks = wait_for_ranks(process, 1)
    if number is signal.SIGTERM:  # else the ranks are at their imports
        wait_for_line(process, "tasks on 1 of")
    os.killpg(process.pid, number)
    done = ended(process, timeout_seconds=SECONDS_TO_END)
    assert_all_gone(ranks)
    assert (done.status, done.out, sentences(done)) == (status, "", [])
    assert list(tmp_path.iterdir()) == []


def test_a_search_ends_without_leftovers_on_a_signal(tmp_path, planned):
    planned(tmp_path)
    graph = 'generator = "rmat"\nnum_nodes = 100_000\nnum_edges = 1_000_000'
    write_run(tmp_path, {'path = "graph.npz"': graph}, extra="[search]\nnum_ranks = [2]\n")
    before = sorted(path.name for path in tmp_path.iterdir())
    process = start("plan", "run.toml", "--calibration", "calibration.json", "--out", "other.json", cwd=tmp_path)
    wait_for_line(process, "cutting the graph into 2")
    process.send_signal(signal.SIGTERM)
    done = ended(process, timeout_seconds=SECONDS_TO_END)
    assert (done.status, done.out, sentences(done)) == (143, "", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == before


# --- It ends badly.


def test_a_rank_that_is_killed_is_named_and_the_others_end(tmp_path, planned):
    process = start("train", planned(tmp_path, ENDLESS), "--out", "run", cwd=tmp_path)
    ranks = wait_for_ranks(process, 2)
    wait_for_line(process, "step 50 of")
    ranks[1].kill()
    done = ended(process, timeout_seconds=SECONDS_TO_END)
    assert_all_gone(ranks)
    assert (done.status, done.out) == (5, "")
    (sentence,) = sentences(done)
    assert sentence.startswith("graphpilot: rank 1 was ended by SIGKILL (exit code -9)")
    assert list((tmp_path / "run").iterdir()) == []


def test_a_loss_that_is_not_finite_is_told_with_its_step(tmp_path, planned, command):
    plan = planned(tmp_path, {"learning_rate = 0.01": "learning_rate = 1e30", "num_steps = 6": "num_steps = 40"})
    done = command("train", plan, "--out", "run")
    assert (done.status, done.out) == (5, "")
    (sentence,) = sentences(done)
    assert re.search(r"rank [01]: the loss of step [23] is (nan|inf): lower train.learning_rate", sentence), sentence
    assert list((tmp_path / "run").iterdir()) == []


def test_a_plan_for_another_graph_is_refused(tmp_path, planned, command):
    plan = planned(tmp_path)
    write_graph(tmp_path, {**graph_arrays(), "y": np.zeros(60, int)})
    done = command("train", plan, "--out", "run")
    assert (done.status, done.out) == (2, "")
    (sentence,) = sentences(done)
    assert f"{tmp_path / 'graph.npz'}: sha256 must be" in sentence
    assert "plan again" in sentence


def test_a_disk_that_fills_up_is_told_and_no_half_written_file_stays(tmp_path, planned, command):
    plan = planned(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # the traces of two steps take some 60 kB
    try:
        done = command("train", plan, "--out", "run", "--quiet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert done == Done(status=2, out="", err="graphpilot: run/measured.json: cannot be written: File too large\n")
    assert list((tmp_path / "run").iterdir()) == []


# --- It ends well.


def test_the_smallest_graphs_and_sparse_features_are_trained_on_two_ranks(tmp_path, planned, capfd):
    arrays = graph_arrays()
    del arrays["x"]
    sparse = {"x_indptr": np.arange(61), "x_indices": np.arange(60) % 8, "x_data": np.ones(1), "x_shape": [60, 8]}
    graphs = {
        "edgeless": graph_arrays(num_edges=0),
        "one node": graph_arrays(num_nodes=1, num_edges=0),
        "sparse": {**arrays, **{name: np.array(value) for name, value in sparse.items()}},
    }
    folders = [tmp_path / name for name in graphs]
    for folder, found in zip(folders, graphs.values(), strict=True):
        planned(folder, arrays=found)
    run_plans([PlanRun(plan_path=folder / "plan.json", out=folder / "run") for folder in folders])
    progress = capfd.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in progress] == ["step 3 of 6", "step 6 of 6"] * 3  # torch says nothing
    for folder in folders:
        losses = json.loads((folder / "run/result.json").read_text())["losses"]
        assert len(losses) == 6
        assert np.isfinite(losses).all()


# --- Under torchrun.


def torchrun(folder: Path, *arguments: str | Path, num_ranks: int = 2, options: tuple[str, ...] = ()) -> Done:
    command = ["-m", "torch.distributed.run", *options, "--nproc-per-node", str(num_ranks), "-m", "executor"]
    process = subprocess.run(
        [sys.executable, *command, *map(str, arguments)], cwd=folder, text=True, capture_output=True, timeout=90
    )
    return Done(status=process.returncode, out=process.stdout, err=process.stderr)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port: int = found.getsockname()[1]
        return port


def exit_codes(done: Done) -> list[int]:
    """Return the exit codes in torchrun's report of failed ranks."""
    return [int(code) for code in re.findall(r"exitcode\s*: (-?\d+)", done.err)]


def ours(done: Done) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("graphpilot: ")]


def test_torchrun_trains_a_plan_unchanged(tmp_path, planned, command):
    plan = planned(tmp_path)
    done = torchrun(tmp_path, "train", plan, "--out", "run")
    assert done.status == 0, done.err
    assert done.err.count("step 6 of 6") == 1
    assert read_trace(tmp_path / "run/measured.json").num_ranks == 2
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"measured.json", "result.json", "weights.pt"}
    assert command("train", plan, "--out", "alone").status == 0
    losses = [json.loads((tmp_path / name / "result.json").read_text())["losses"] for name in ("run", "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_too_few_ranks_are_refused_once_and_every_rank_fails(tmp_path, planned):
    done = torchrun(tmp_path, "train", planned(tmp_path), num_ranks=1)
    assert done.status != 0
    assert set(exit_codes(done)) == {2}
    (sentence,) = ours(done)
    assert "the plan has num_ranks = 2, but torchrun started 1: raise --nproc-per-node" in sentence


# torchrun keeps the store in its own process, or in that of rank 0 when it is given an address.
@pytest.mark.parametrize("options", [(), ("--master-addr", "localhost")])
def test_bad_input_is_told_once_by_many_ranks(tmp_path, options):
    if options:
        options = (*options, "--master-port", str(free_port()))
    done = torchrun(tmp_path, "train", "gone.json", options=options)
    assert done.status != 0
    assert 2 in exit_codes(done)
    assert set(exit_codes(done)) <= {2, -signal.SIGTERM}  # torchrun ends the others when it has seen the first
    assert ours(done) == ["graphpilot: gone.json: cannot be read: No such file or directory; correct the path"]
