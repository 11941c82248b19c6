"""Batches come in order, ahead of their steps and never too many; errors and ends reach whoever waits."""

import threading
import time
from collections.abc import Callable

import pytest
import torch

import executor.loader
from executor.loader import BatchLoader
from simulator.errors import RunError

CPU = torch.device("cpu")


def loader_of(make: Callable[[int], int], *, depth: int) -> BatchLoader[int]:
    return BatchLoader(make, lambda batch: (batch,), depth=depth, device=CPU)


def eventually(holds: Callable[[], bool]) -> bool:
    """Return whether something holds within some seconds."""
    until = time.monotonic() + 10
    while not holds() and time.monotonic() < until:
        time.sleep(0.001)
    return holds()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_each_step_gets_its_batch_and_gets_it_again_until_the_next_is_taken(depth):
    made: list[int] = []

    def make(step: int) -> int:
        made.append(step)
        return 10 * step

    loader = loader_of(make, depth=depth)
    assert [loader.take(step) for step in (4, 4, 5, 6, 6)] == [40, 40, 50, 60, 60]
    assert made[:3] == [4, 5, 6]
    # A step that does not follow, as after a resumed run or a test that goes back, begins anew.
    assert [loader.take(step) for step in (1, 2, 9)] == [10, 20, 90]
    loader.close()


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_so_many_batches_are_made_ahead_and_no_more(depth):
    made: list[int] = []
    loader = loader_of(lambda step: made.append(step) or step, depth=depth)  # type: ignore[func-returns-value]
    for step in range(4):
        loader.take(step)
        assert eventually(lambda step=step: len(made) == step + 1 + depth)  # type: ignore[misc]
        time.sleep(0.01)
        assert made == [*range(step + 1 + depth)]
    loader.close()


def test_without_depth_batches_are_made_by_the_taker_and_none_ahead():
    threads = []
    loader = loader_of(lambda step: threads.append(threading.current_thread()) or step, depth=0)  # type: ignore[func-returns-value]
    loader.take(0)
    assert threads == [threading.current_thread()]
    assert loader.making(0) is None


def test_a_batch_is_made_while_its_taker_works():
    may_end = threading.Event()

    def make(step: int) -> int:
        if step == 1:
            assert may_end.wait(10)
        return step

    loader = loader_of(make, depth=1)
    assert loader.take(0) == 0  # and step 1 is under way
    may_end.set()
    assert loader.take(1) == 1
    loader.close()


@pytest.mark.parametrize("depth", [0, 2])
def test_an_error_reaches_whoever_takes_its_batch_with_the_place_where_it_was_raised(depth):
    def broken_make(step: int) -> int:
        if step == 2:
            raise RunError("the features end early")
        return step

    loader = loader_of(broken_make, depth=depth)
    assert [loader.take(0), loader.take(1)] == [0, 1]
    for _ in range(2):
        with pytest.raises(RunError, match="the features end early") as caught:
            loader.take(2)
        assert "broken_make" in [entry.name for entry in caught.traceback]
    loader.close()


def test_a_thread_that_does_not_get_done_is_named_instead_of_waited_for(monkeypatch):
    # Case R4.
    monkeypatch.setattr(executor.loader, "PATIENCE_SECONDS", 0.05)
    may_end = threading.Event()
    loader = loader_of(lambda step: may_end.wait(10) and step, depth=1)
    with pytest.raises(RunError, match="the batch of step 8 was not made within 0 s: its thread hangs"):
        loader.take(7)
    may_end.set()
    loader.close()


def test_closing_ends_the_thread_also_where_it_waits_for_room_or_has_failed():
    before = threading.active_count()
    full = loader_of(lambda step: step, depth=2)
    full.take(0)
    failed = loader_of(lambda step: 1 // 0, depth=2)
    with pytest.raises(ZeroDivisionError):
        failed.take(0)
    full.close()
    failed.close()
    full.close()  # again
    assert threading.active_count() == before
    assert full.take(3) == 3  # a closed loader begins anew
    full.close()


def test_it_tells_which_batch_was_made_during_a_step_and_for_how_long():
    def make(step: int) -> int:
        time.sleep(0.02)
        return step

    loader = loader_of(make, depth=2)
    for step in range(3):
        loader.take(step)
    making = loader.making(1)
    assert making is not None
    assert making.shape == (3,)  # room for the batch of step 3 was made when step 1 took its own
    assert 0.02 <= making.duration_seconds < 1
    assert 0 <= making.start_seconds < 1
    assert loader.making(7) is None
    loader.close()
