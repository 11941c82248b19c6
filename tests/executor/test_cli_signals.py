"""Commands that start ranks: when a run ends badly, when someone ends it, and under torchrun."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from executor.cli import main
from simulator.specs.files import read_trace
from tests.executor.commands import (
    Done,
    ended,
    graph_arrays,
    ranks_of,
    start,
    write_graph,
    write_made_calibration,
    write_run,
)

pytestmark = pytest.mark.dist

ENDLESS = {"num_steps = 6": "num_steps = 1_000_000", "evaluate_every_steps = 3": "evaluate_every_steps = 50"}
# Within which everything must be over once a signal was sent or a rank was lost.
SECONDS_TO_END = 10.0


def plan_in(folder: Path, changes: dict[str, str] | None = None, *, num_ranks: int = 2, arrays=None) -> Path:
    """Write a graph, a run, a calibration and a plan on so many ranks; return the plan's path."""
    write_graph(folder, arrays)
    write_run(folder, changes, extra=f"[search]\nnum_ranks = [{num_ranks}]\nexchanges = ['halo']\n")
    write_made_calibration(folder)
    arguments = ["plan", folder / "run.toml", "--calibration", folder / "calibration.json", "--quiet"]
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as done:
        patch.setattr(sys, "argv", [*map(str, ["graphpilot", *arguments, "--out", folder / "plan.json"])])
        main()
    assert done.value.code == 0
    return folder / "plan.json"


@pytest.fixture(autouse=True)
def _handlers_come_back() -> Iterator[None]:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def wait_for_line(process: subprocess.Popen[str], text: str) -> None:
    """Return when a line with this text has come on standard error."""
    assert process.stderr is not None
    lines = []
    for line in process.stderr:
        lines.append(line)
        if text in line:
            return
    raise AssertionError(f"the command ended and said {lines}")


def wait_for_ranks(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Return the ranks when so many processes have been started."""
    until = time.monotonic() + 30
    while len(found := ranks_of(process)) < count:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def assert_all_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=SECONDS_TO_END)
    assert alive == []


def sentences(done: Done) -> list[str]:
    """Return what a command said on standard error beside its progress."""
    assert "Traceback" not in done.err, done.err
    return [line for line in done.err.splitlines() if not re.match(r"step \d|tasks on|calibrating", line)]


# --- Someone ends it.


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_training_ends_with_all_its_ranks_on_a_signal(tmp_path, number, status, is_early):
    plan = plan_in(tmp_path, ENDLESS)
    before = sorted(path.name for path in tmp_path.iterdir())
    process = start("train", plan, cwd=tmp_path)
    ranks = wait_for_ranks(process, 2)
    if not is_early:  # else the ranks are at their imports
        wait_for_line(process, "step 50 of")
    if number is signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    done = ended(process, timeout_seconds=SECONDS_TO_END)
    assert_all_gone(ranks)
    assert (done.status, done.out, sentences(done)) == (status, "", [])
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_calibration_ends_with_all_its_ranks_on_a_signal(tmp_path, number, status):
    process = start("calibrate", "--quick", cwd=tmp_path)
    ranks = wait_for_ranks(process, 2)
    wait_for_line(process, "tasks on 1 of 2 devices 25")
    os.killpg(process.pid, number)
    done = ended(process, timeout_seconds=SECONDS_TO_END)
    assert_all_gone(ranks)
    assert (done.status, done.out, sentences(done)) == (status, "", [])
    assert list(tmp_path.iterdir()) == []


def test_ranks_do_not_outlive_a_launcher_that_was_killed(tmp_path):
    process = start("train", plan_in(tmp_path, ENDLESS), cwd=tmp_path)
    ranks = wait_for_ranks(process, 2)
    wait_for_line(process, "step 50 of")
    process.kill()
    process.communicate(timeout=SECONDS_TO_END)
    assert_all_gone(ranks)


def test_a_search_ends_without_leftovers_on_a_signal(tmp_path):
    plan_in(tmp_path)
    generated = 'generator = "rmat"\nnum_nodes = 200_000\nnum_edges = 2_000_000'
    write_run(tmp_path, {'path = "graph.npz"': generated})
    before = sorted(path.name for path in tmp_path.iterdir())
    process = start("plan", "run.toml", "--calibration", "calibration.json", cwd=tmp_path)
    wait_for_line(process, "cutting the graph into 2")
    process.send_signal(signal.SIGTERM)
    done = ended(process, timeout_seconds=SECONDS_TO_END)
    assert (done.status, done.out) == (143, "")
    assert "Traceback" not in done.err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


# --- It ends badly.


def test_a_rank_that_is_killed_is_named_and_the_others_end(tmp_path):
    process = start("train", plan_in(tmp_path, ENDLESS), cwd=tmp_path)
    ranks = wait_for_ranks(process, 2)
    wait_for_line(process, "step 50 of")
    ranks[1].kill()
    done = ended(process, timeout_seconds=SECONDS_TO_END)
    assert_all_gone(ranks)
    assert done.status == 5
    (sentence,) = sentences(done)
    assert sentence.startswith("graphpilot: rank 1 was ended by SIGKILL (exit code -9)")
    assert not (tmp_path / "result.json").exists()


def test_a_loss_that_is_not_finite_is_told_with_its_step(tmp_path):
    changes = {"learning_rate = 0.01": "learning_rate = 1e30", "num_steps = 6": "num_steps = 40"}
    plan = plan_in(tmp_path, changes)
    done = ended(start("train", plan, "--out", "run", cwd=tmp_path))
    assert done.status == 5
    (sentence,) = sentences(done)
    assert re.search(r"rank [01]: the loss of step [23] is (nan|inf): lower train.learning_rate", sentence), sentence
    assert list((tmp_path / "run").iterdir()) == []


def test_a_plan_for_another_graph_is_refused(tmp_path):
    plan = plan_in(tmp_path)
    write_graph(tmp_path, {**graph_arrays(), "y": np.zeros(60, int)})
    done = ended(start("train", plan, cwd=tmp_path))
    assert (done.status, done.out) == (2, "")
    (sentence,) = sentences(done)
    assert "graph.npz: sha256 must be" in sentence
    assert "plan again" in sentence


def test_a_partition_that_is_gone_is_named(tmp_path):
    plan = plan_in(tmp_path)
    for path in tmp_path.glob("partition-*"):
        path.unlink()
    done = ended(start("train", plan, cwd=tmp_path))
    assert done.status == 2
    (sentence,) = sentences(done)
    assert "partition-2-0-metis" in sentence


# --- It ends well.


@pytest.mark.parametrize(
    "arrays", [graph_arrays(num_edges=0), graph_arrays(num_nodes=1, num_edges=0)], ids=["no edges", "one node"]
)
def test_the_smallest_graphs_are_trained_on_two_ranks(tmp_path, arrays):
    plan = plan_in(tmp_path, arrays=arrays)
    done = ended(start("train", plan, "--json", cwd=tmp_path))
    assert (done.status, done.err) == (0, "")
    assert json.loads(done.out)["best_step"] in range(6)
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result["losses"]) == 6
    assert np.isfinite(result["losses"]).all()


def test_sparse_features_are_trained_without_words_of_torch(tmp_path):
    arrays = graph_arrays()
    del arrays["x"]
    sparse = {"x_indptr": np.arange(61), "x_indices": np.arange(60) % 8, "x_data": np.ones(1), "x_shape": [60, 8]}
    plan = plan_in(tmp_path, arrays={**arrays, **{name: np.array(value) for name, value in sparse.items()}})
    done = ended(start("train", plan, cwd=tmp_path))
    assert (done.status, sentences(done)) == (0, [])
    assert done.err.splitlines()[-1].startswith("step 6 of 6: loss ")
    assert "best validation accuracy" in done.out


# --- Under torchrun.


def torchrun(folder: Path, *arguments: str | Path, num_ranks: int = 2, options: tuple[str, ...] = ()) -> Done:
    command = ["-m", "torch.distributed.run", *options, "--nproc-per-node", str(num_ranks), "-m", "executor"]
    process = subprocess.run(
        [sys.executable, *command, *map(str, arguments)], cwd=folder, text=True, capture_output=True, timeout=90
    )
    return Done(status=process.returncode, out=process.stdout, err=process.stderr)


def exit_codes(done: Done) -> list[int]:
    """Return the exit codes in torchrun's report of failed ranks."""
    return [int(code) for code in re.findall(r"exitcode\s*: (-?\d+)", done.err)]


def ours(done: Done) -> list[str]:
    return [line for line in done.err.splitlines() if line.startswith("graphpilot: ")]


def test_torchrun_trains_a_plan_unchanged(tmp_path):
    plan = plan_in(tmp_path)
    done = torchrun(tmp_path, "train", plan, "--out", "run")
    assert done.status == 0, done.err
    assert done.err.count("step 6 of 6") == 1
    assert read_trace(tmp_path / "run/measured.json").num_ranks == 2
    assert {path.name for path in (tmp_path / "run").iterdir()} == {"measured.json", "result.json", "weights.pt"}
    ended(start("train", plan, "--out", "alone", cwd=tmp_path))
    losses = [json.loads((tmp_path / name / "result.json").read_text())["losses"] for name in ("run", "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("options", [(), ("--master-addr", "localhost", "--master-port", "29517")])
def test_too_few_ranks_are_refused_once_and_every_rank_fails(tmp_path, options):
    plan = plan_in(tmp_path, num_ranks=2)
    text = plan.read_text()
    assert '"graph_parallel_degree": 2' in text
    done = torchrun(tmp_path, "train", plan, num_ranks=1, options=options)
    assert done.status != 0
    assert exit_codes(done) == [2]
    (sentence,) = ours(done)
    assert "the plan has num_ranks = 2, but torchrun started 1" in sentence


@pytest.mark.parametrize("options", [(), ("--master-addr", "localhost", "--master-port", "29518")])
def test_bad_input_is_told_once_by_many_ranks(tmp_path, options):
    done = torchrun(tmp_path, "train", "gone.json", options=options)
    assert done.status != 0
    assert set(exit_codes(done)) <= {2, -signal.SIGTERM}
    assert 2 in exit_codes(done)
    assert ours(done) == ["graphpilot: gone.json: cannot be read: No such file or directory; correct the path"]


def test_what_is_wrong_with_a_graph_is_told_once_by_many_ranks(tmp_path):
    plan = plan_in(tmp_path)
    (tmp_path / "graph.npz").unlink()
    done = torchrun(tmp_path, "train", plan)
    assert set(exit_codes(done)) <= {2, -signal.SIGTERM}
    (sentence,) = ours(done)
    assert "graph.npz: path must be" in sentence
