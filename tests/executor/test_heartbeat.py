"""Ranks of which one never comes, is stopped, is killed or fails: all end, and say who is missing in which task."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from executor import heartbeat as heartbeat_module
from executor.heartbeat import Heartbeat
from executor.launch import launch
from executor.position import Position
from simulator.errors import RunError
from simulator.specs.cluster import DeviceKind
from tests.executor.missing_ranks import NUM_RANKS, TIMEOUT_SECONDS, Scene, ended_ranks, misbehave_while_writing

pytestmark = [pytest.mark.dist, pytest.mark.alone]

# From the start of the processes to the end of the last one, on two cores that others use too.
SECONDS_TO_END = 20.0
SEEN = r"it was last seen in layer1\.attention of step 2, \d s ago"
NOT_COME = rf"rank 2 has not come to layer1\.exchange of step 2 within 2 s; {SEEN}"
FIX = "; if it is only slow, raise train.collective_timeout_seconds"


@pytest.mark.parametrize(
    ("name", "last_status", "sentence"),
    [
        ("sleep", 5, f"{NOT_COME}, and is still there{FIX}"),
        ("stop", -9, f"{NOT_COME}, and gives no sign of life"),
        ("kill", -9, rf"({NOT_COME}|rank 2 has gone; {SEEN}), and gives no sign of life(, so all ranks ended)?"),
        ("raise", 5, "rank 2: the loss of step 2 is nan"),
        ("stuck inside", 5, rf"rank 2 has not got through layer1\.exchange of step 2 within 2 s; .*{FIX}"),
    ],
)
def test_all_ranks_end_and_one_tells_who_is_missing_in_which_task(tmp_path, name, last_status, sentence):
    ended = ended_ranks(Scene(name=name, folder=tmp_path))
    assert ended.statuses == (5, 5, last_status)
    (told,) = [line for error in ended.errors for line in error.splitlines()]
    assert re.fullmatch(f"graphpilot: {sentence}", told), told
    assert ended.seconds < SECONDS_TO_END
    assert {path.suffix for path in tmp_path.iterdir()} == {".err"}  # no half-written file stays


def test_a_rank_that_is_slow_in_every_task_is_waited_for(tmp_path):
    ended = ended_ranks(Scene(name="slow", folder=tmp_path))
    assert (ended.statuses, ended.errors) == ((0, 0, 0), ("", "", ""))
    assert ended.seconds > 2 * TIMEOUT_SECONDS


@pytest.mark.parametrize(("name", "status"), [("kill", -9), ("stop", None)])
def test_ranks_end_without_the_store_too(tmp_path, name, status):
    ended = ended_ranks(Scene(name=name, folder=tmp_path, bad_rank=0), store_on_rank_0=True, wait_for=(1, 2))
    assert ended.statuses == (status, 5, 5)
    for rank in (1, 2):
        assert re.search(
            rf"^graphpilot: rank {rank} .*layer1\.exchange of step 2.*that of rank 0, is gone",
            ended.errors[rank],
            re.MULTILINE,
        )


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("stop", f"{NOT_COME}, and gives no sign of life"),
        (
            "kill",
            r"rank 2 was ended by SIGKILL \(exit code -9\), last seen in layer1\.attention of step 2, so all ranks",
        ),
    ],
)
def test_the_launcher_tells_who_is_missing(tmp_path, name, sentence):
    with pytest.raises(RunError, match=f"^{sentence}"):
        launch(misbehave_while_writing, Scene(name=name, folder=tmp_path), num_ranks=NUM_RANKS, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_under_torchrun_all_ranks_end_with_the_same_status(tmp_path):
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "tests.executor.missing_ranks"]
    done = subprocess.run(
        [sys.executable, *command, "sleep", str(tmp_path)],
        cwd=Path(__file__).parents[2],
        text=True,
        capture_output=True,
        timeout=90,
    )
    assert set(re.findall(r"exitcode\s*: (-?\d+)", done.stderr)) == {"5"}
    (told,) = [line for line in done.stderr.splitlines() if line.startswith("graphpilot: ")]
    assert re.fullmatch(f"graphpilot: {NOT_COME}, and is still there{FIX}", told), told
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sleep", "stop", "kill"])
def test_ranks_on_gpus_end_too_though_the_host_runs_ahead_of_the_device(tmp_path, name):
    scene = Scene(name=name, folder=tmp_path, num_ranks=2, bad_rank=1, kind=DeviceKind.CUDA)
    with pytest.raises(RunError, match=r"^rank 1 .* last seen in layer1\.attention of step 2"):
        launch(misbehave_while_writing, scene, num_ranks=2, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


# --- Without processes.


def test_one_rank_alone_starts_no_threads(tmp_path):
    before = threading.active_count()
    with Heartbeat(HashStore(), Position(), rank=0, num_ranks=1, folder=tmp_path) as heartbeat:
        assert threading.active_count() == before
        with pytest.raises(ZeroDivisionError), heartbeat.failures_told():
            print(1 // 0)


def test_a_beat_costs_little(tmp_path, monkeypatch):
    """On two cores of an AMD EPYC a beat takes 0.05 ms, four times a second."""
    monkeypatch.setattr(heartbeat_module, "own_connection", lambda store: store)
    heartbeat = Heartbeat(HashStore(), Position(), rank=0, num_ranks=2, folder=tmp_path)
    started = time.thread_time()
    for _ in range(100):
        heartbeat._beat()
    assert (time.thread_time() - started) / 100 < 5e-3


def test_a_rank_notes_where_it_is():
    position = Position()
    assert str(position) == "the start of the run"
    position.reach("step 7")
    assert str(position) == "step 7"
    position.task = "layer0.attention"
    with position.waiting("layer0.exchange"):
        assert (str(position), position.is_waiting, position.num_reached) == ("layer0.exchange of step 7", True, 2)
    assert (str(position), position.is_waiting) == ("what follows layer0.exchange of step 7", False)
    with pytest.raises(OSError, match="gone"), position.waiting("layer1.exchange"):
        raise OSError("gone")
    assert (str(position), position.is_waiting, position.num_reached) == ("layer1.exchange of step 7", True, 3)
