"""The ranks agree on the step at which they stop, whoever got the signal and when; a second signal ends at once."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from executor import stopping
from executor.stopping import Stopping
from simulator.errors import RunError

NUM_STEPS = 30


class Steps:
    """Steps of several ranks with a collective in each: none is ahead of another by more than `lead` steps."""

    def __init__(self, num_ranks: int, lead: int) -> None:
        self._done, self._lead = [0] * num_ranks, lead
        self._changed = threading.Condition()

    def do(self, rank: int) -> None:
        """Do a step once the others have come close enough."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._done[rank] - min(self._done) < self._lead, timeout=20)
            self._done[rank] += 1
            self._changed.notify_all()


def stops(signals: dict[int, int], num_ranks: int, lead: int) -> list[int]:
    """Return the step before which each rank stopped.

    Args:
        signals: of ranks, before which step a signal comes to them.
        lead: how many steps a rank may be ahead, as hosts of GPUs are.
    """
    store, steps = HashStore(), Steps(num_ranks, lead)
    found = [-1] * num_ranks

    def train(rank: int) -> None:
        asked = Stopping(store, rank=rank, num_ranks=num_ranks, patience_seconds=300.0)
        for step in range(NUM_STEPS):
            if signals.get(rank) == step:
                asked._number = signal.SIGTERM
            if asked.is_due(step):
                assert asked.signal_number == signal.SIGTERM
                found[rank] = step
                return
            steps.do(rank)
        found[rank] = NUM_STEPS

    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads)
    return found


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_ranks=st.integers(1, 4),
    lead=st.integers(1, 6),
    signals=st.dictionaries(st.integers(0, 3), st.integers(0, NUM_STEPS - 1), min_size=1, max_size=4),
    seconds=st.sampled_from([1e-9, 1e-4, 1.0]),
)
def test_all_ranks_stop_at_one_step_that_none_has_passed(monkeypatch, num_ranks, lead, signals, seconds):
    monkeypatch.setattr(stopping, "DECISION_SECONDS", seconds)
    signals = {rank % num_ranks: step for rank, step in signals.items()}
    found = stops(signals, num_ranks, lead)
    assert len(set(found)) == 1
    assert min(signals.values()) <= found[0] <= NUM_STEPS
    if seconds == 1e-9 and 0 in signals:  # rank 0 decides at every step
        assert found[0] <= signals[0]


def test_a_rank_alone_stops_where_it_stands():
    assert stops({0: 7}, 1, 1) == [7]


def test_without_a_signal_nobody_stops():
    assert stops({}, 3, 2) == [NUM_STEPS] * 3


def test_the_store_is_used_now_and_then_and_not_at_every_step(monkeypatch):
    monkeypatch.setattr(stopping, "DECISION_SECONDS", 0.02)
    written = []

    class WatchedStore(HashStore):
        def set(self, key, value):
            written.append(time.monotonic())
            super().set(key, value)

    asked = Stopping(WatchedStore(), rank=0, num_ranks=2, patience_seconds=300.0)
    started, step = time.monotonic(), 0
    while time.monotonic() < started + 0.5:
        assert not asked.is_due(step)
        step += 1
    # Doubling from one step on, it has taken some steps to find its pace.
    assert 0.5 / 0.02 / 4 < len(written) < 0.5 / 0.01 + 25
    assert step > 10 * len(written)


def test_steps_longer_than_the_pace_are_each_decided(monkeypatch):
    monkeypatch.setattr(stopping, "DECISION_SECONDS", 0.01)
    asked = Stopping(HashStore(), rank=0, num_ranks=2, patience_seconds=300.0)
    for step in range(5):
        assert not asked.is_due(step)
        time.sleep(0.02)
    asked._number = signal.SIGINT
    assert asked.is_due(5)


def test_without_rank_0_no_rank_waits_for_ever():
    asked = Stopping(HashStore(), rank=1, num_ranks=3, patience_seconds=0.1)
    with pytest.raises(RunError, match="rank 0 did not come to step 5 within 0 s of this rank"):
        asked.is_due(4)


# --- Signals, to processes of their own.

PROGRAM = """
import sys, time
from datetime import timedelta
from torch.distributed import HashStore
from executor.stopping import Stopping

with Stopping(HashStore(), rank=0, num_ranks=1, patience_seconds=300.0) as stopping:
    print("here", flush=True)
    {first}
    while not stopping.is_due(0):
        time.sleep(0.01)
    print("stopped", stopping.signal_number, flush=True)
    time.sleep(0.5)
"""


def started(*, first: str = "pass") -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", PROGRAM.format(first=first)], text=True, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    return process


@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_a_signal_is_noticed_and_what_follows_within_a_second_is_the_same_one(number):
    process = started()
    for _ in range(3):
        process.send_signal(number)
        time.sleep(0.05)
    out, _ = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, f"stopped {int(number)}\n")


# In C++, as in a collective, no handler of Python's runs.
@pytest.mark.parametrize("first", ["time.sleep(60)", "HashStore().wait(['never'], timedelta(seconds=60))"])
def test_a_second_signal_ends_the_process_at_once_whatever_it_is_in(first):
    process = started(first=first)
    process.send_signal(signal.SIGINT)
    time.sleep(stopping.SAME_SIGNAL_SECONDS + 2.0)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=10)
    assert (process.returncode, out) == (130, "")


def test_afterwards_signals_are_handled_as_before():
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    with Stopping(HashStore(), rank=0, num_ranks=1, patience_seconds=300.0) as asked:
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + 10
        while not asked.is_due(0):
            assert time.monotonic() < until
    assert [signal.getsignal(number) for number in stopping.SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


def test_in_another_thread_signals_stay_as_they_are():
    before = [signal.getsignal(number) for number in stopping.SIGNALS]
    found: list[object] = []

    def look() -> None:
        with Stopping(HashStore(), rank=0, num_ranks=1, patience_seconds=300.0) as asked:
            found.append([signal.getsignal(number) for number in stopping.SIGNALS])
            found.append(asked.is_due(0))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before, False]
