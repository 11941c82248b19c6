"""Ranks that end well, fail, are killed or are told to end."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from executor.launch import Interrupted, LostPeerError, launch
from executor.stopping import SAME_SIGNAL_SECONDS
from simulator.errors import RunError, SpecError
from tests.executor import launch_ranks
from tests.executor.commands import Done, assert_all_gone, ended, wait_for_ranks

pytestmark = [pytest.mark.dist, pytest.mark.alone]

# Within which all must be over; far below the time-outs of collectives.
SECONDS_TO_END = 10.0


def start(name: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.executor.launch_ranks", name, str(folder), *more],
        cwd=Path(__file__).parents[2],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def wait_until_here(folder: Path) -> None:
    """Return when both ranks have said that they are there."""
    until = time.monotonic() + 30
    while not all((folder / f"here{rank}").exists() for rank in range(2)):
        assert time.monotonic() < until
        time.sleep(0.01)


def run(name: str, folder: Path) -> None:
    launch(getattr(launch_ranks, name), folder, num_ranks=2, folder=folder)


def test_every_rank_does_its_work_and_afterwards_signals_are_handled_as_before(tmp_path):
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(number) for number in numbers], signal.pthread_sigmask(signal.SIG_BLOCK, [])
    run("write_rank", tmp_path)
    assert ([signal.getsignal(number) for number in numbers], signal.pthread_sigmask(signal.SIG_BLOCK, [])) == before
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"rank0": "2", "rank1": "2"}


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        ("find_fault_in_a_file", SpecError, "graph.npz: must be whole"),
        ("run_badly_on_rank_1", RunError, "rank 1: the loss of step 3 is nan"),
        ("die_on_rank_1", RunError, "rank 1 was ended by SIGKILL .exit code -9.*memory runs out"),
        ("lose_each_other", LostPeerError, "rank [01] lost contact with another rank: .*closed by peer"),
        ("want_a_missing_file", SpecError, "/gone.npy: No such file or directory"),
        ("divide_by_zero_on_rank_1", RuntimeError, "rank 1: ZeroDivisionError: integer division or modulo by zero"),
    ],
)
def test_what_failed_first_is_raised_in_a_sentence(tmp_path, caplog, capfd, name, kind, sentence):
    with pytest.raises(kind, match=sentence) as raised:
        run(name, tmp_path)
    assert type(raised.value) is kind
    assert "Traceback" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert capfd.readouterr().err == ""


def test_a_fault_of_ours_carries_its_traceback_for_those_who_want_it(tmp_path):
    done = ended(start("divide_by_zero_on_rank_1", tmp_path, "debug"))
    assert done.status == 1
    assert "in divide_by_zero_on_rank_1\n    print(1 // (rank - 1))" in done.err


@pytest.mark.parametrize(
    ("number", "to_all", "is_early"),
    [
        (signal.SIGINT, True, True),  # Ctrl-C reaches every process of the terminal
        (signal.SIGINT, True, False),
        (signal.SIGTERM, False, False),  # a job scheduler may send it to the first process alone
    ],
)
def test_a_signal_ends_all_ranks_silently_and_leaves_no_half_written_file(tmp_path, number, to_all, is_early):
    (tmp_path / "mine.tmp").touch()
    process = start("write_for_ever", tmp_path)
    ranks = wait_for_ranks(process, 2)
    if not is_early:
        wait_until_here(tmp_path)
    if to_all:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    assert ended(process, timeout_seconds=SECONDS_TO_END) == Done(status=128 + number, out="", err="")
    assert_all_gone(ranks)
    assert {path.name for path in tmp_path.iterdir()} <= {"mine.tmp", "here0", "here1"}
    assert (tmp_path / "mine.tmp").exists()


@pytest.mark.parametrize("to_all", [True, False])
def test_a_second_ctrl_c_ends_ranks_at_once_that_were_to_save_the_run_first(tmp_path, to_all):
    process = start("stay_in_a_collective", tmp_path)
    ranks = wait_for_ranks(process, 2)
    wait_until_here(tmp_path)
    for seconds in (SAME_SIGNAL_SECONDS + 2.0, 0.0):
        if to_all:
            os.killpg(process.pid, signal.SIGINT)
        else:
            process.send_signal(signal.SIGINT)
        time.sleep(seconds)
        assert seconds == 0.0 or process.poll() is None
    assert ended(process, timeout_seconds=SECONDS_TO_END) == Done(status=130, out="", err="")
    assert_all_gone(ranks)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_end_in_good_order_after_a_signal_have_its_exit_status(tmp_path, number):
    process = start("stop_at_a_step", tmp_path)
    ranks = wait_for_ranks(process, 2)
    wait_until_here(tmp_path)
    ranks[1].send_signal(number)
    assert ended(process, timeout_seconds=SECONDS_TO_END) == Done(status=128 + number, out="", err="")
    assert_all_gone(ranks)
    steps = [(tmp_path / f"stopped{rank}").read_text() for rank in range(2)]
    assert steps[0] == steps[1]


def test_a_signal_is_known_by_its_number():
    assert Interrupted(signal.SIGTERM).signal_number == 15
    assert str(Interrupted(signal.SIGINT)) == "ended by SIGINT"


def test_ranks_do_not_outlive_a_launcher_that_is_killed(tmp_path):
    process = start("wait_for_ever", tmp_path)
    ranks = wait_for_ranks(process, 2)
    wait_until_here(tmp_path)
    process.kill()
    process.communicate(timeout=SECONDS_TO_END)
    assert_all_gone(ranks)
    assert not any(psutil.pid_exists(rank.pid) for rank in ranks)
