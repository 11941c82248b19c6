"""BatchLoader: batches in the order of their steps, made ahead of them in a thread, or when they are asked for."""

import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from simulator.errors import RunError

T = TypeVar("T")
# How long a step waits for its batch; making one takes seconds on the largest graphs.
PATIENCE_SECONDS = 600.0
# Of so many latest steps it is known when their batches were made: more than a run traces, whose spans take more room.
KEPT_STEPS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Making:
    """When the batch of a step was made.

    Attributes:
        start_seconds: since the step during which it was made took its own batch.
        shape: of the task that made it.
    """

    start_seconds: float
    duration_seconds: float
    shape: tuple[int, ...]


class BatchLoader(Generic[T]):
    """Gives the batch of one step after the other; at most `depth` of later steps are there or under way.

    A thread makes them, on a stream of its own on GPUs, and is done with a batch once the device is. It begins one when
    a step takes its own batch, so in a run each step sees one being made: that of the step `depth` later. An error in
    the thread reaches whoever takes the batch. With depth 0 there is no thread, and batches are made by the taker.

    A batch that was taken is kept until the next one is: steps may take it again.

    Args:
        make: returns the batch of a step; called by one thread at a time.
        shape_of: returns the shape of the task that made a batch.
        depth: batches made ahead.
    """

    def __init__(
        self,
        make: Callable[[int], T],
        shape_of: Callable[[T], tuple[int, ...]],
        *,
        depth: int,
        device: torch.device,
    ) -> None:
        self._make, self._shape_of, self._depth, self._device = make, shape_of, depth, device
        # Without a thread batches are made in the stream of the steps, which then wait for nothing.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" and depth > 0 else None
        self._taken: tuple[int, T] | None = None
        self._ahead: _Ahead[T] | None = None

    def take(self, step: int) -> T:
        """Return the batch of a step, which waits for it if it is not there yet.

        Raises:
            RunError: if the thread does not get done with it.
            Exception: what making it raised.
        """
        if self._taken is not None and self._taken[0] == step:
            return self._taken[1]
        self._let_go()
        if self._depth == 0:
            self._taken = step, self._made(step)
            return self._taken[1]
        if self._ahead is None or self._ahead.next_step != step:
            self.close()
            self._ahead = _Ahead(self._made, self._shape_of, depth=self._depth, first_step=step)
        self._taken = step, self._ahead.take()
        return self._taken[1]

    def making(self, step: int) -> Making | None:
        """Return when, during a step that took its batch, another batch was made, once that is done; None without."""
        return self._ahead.making(step) if self._ahead is not None else None

    def close(self) -> None:
        """End the thread, which finishes the batch that it is making, and forget all batches."""
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        self._taken = None

    def _let_go(self) -> None:
        """Let the memory of the batch that was taken be written to again, once the steps so far are done with it."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._taken = None

    def _made(self, step: int) -> T:
        if self._stream is None:
            return self._make(step)
        # Also in the thread, since both are the thread's own.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            batch = self._make(step)
            self._stream.synchronize()
        return batch


class _Ahead(Generic[T]):
    """A thread that makes the batches of consecutive steps, and those that wait to be taken.

    Args:
        first_step: of the first batch.
    """

    def __init__(
        self, make: Callable[[int], T], shape_of: Callable[[T], tuple[int, ...]], *, depth: int, first_step: int
    ) -> None:
        self.next_step = first_step
        self._make, self._shape_of, self._depth = make, shape_of, depth
        self._changed = threading.Condition()
        self._batches: dict[int, T] = {}
        self._error: BaseException | None = None
        self._is_closed = False
        self._taken_at: dict[int, float] = {}
        self._spans: dict[int, tuple[float, float, tuple[int, ...]]] = {}  # begin, end by perf_counter; shape
        # A daemon: a process whose other threads have ended does not wait for it.
        self._thread = threading.Thread(target=self._run, args=(first_step,), name="batch loader", daemon=True)
        self._thread.start()

    def take(self) -> T:
        """Return the next batch."""
        step = self.next_step
        with self._changed:
            found = self._changed.wait_for(
                lambda: step in self._batches or self._error is not None, timeout=PATIENCE_SECONDS
            )
            if not found:
                raise RunError(
                    f"the batch of step {step + 1} was not made within {PATIENCE_SECONDS:.0f} s: its thread hangs, or "
                    "the graph's files are too slow to read; copy them to a local disk"
                )
            if step not in self._batches:
                assert self._error is not None, step
                raise self._error
            batch = self._batches.pop(step)
            self.next_step += 1
            self._taken_at[step] = time.perf_counter()
            self._taken_at.pop(step - KEPT_STEPS, None)
            self._changed.notify_all()
        return batch

    def making(self, step: int) -> Making | None:
        """Return when the batch was made that a step's taking made room for, once that is done."""
        made = step + self._depth
        with self._changed:
            if step not in self._taken_at:
                return None
            self._changed.wait_for(lambda: made in self._spans or self._error is not None, timeout=PATIENCE_SECONDS)
            if made not in self._spans:
                return None
            begin, end, shape = self._spans[made]
            since_taken = max(begin - self._taken_at[step], 0.0)
            return Making(start_seconds=since_taken, duration_seconds=end - begin, shape=shape)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self, first_step: int) -> None:
        for step in itertools.count(first_step):
            if not self._may_make(step):
                return
            begin = time.perf_counter()
            try:
                batch = self._make(step)
            except BaseException as error:  # whatever it is, the taker must not wait for ever
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
                return
            with self._changed:
                self._batches[step] = batch
                self._spans[step] = begin, time.perf_counter(), self._shape_of(batch)
                self._spans.pop(step - KEPT_STEPS - self._depth, None)
                self._changed.notify_all()
            del batch

    def _may_make(self, step: int) -> bool:
        """Wait for room for a batch, which counts as one of those ahead while it is made; return False at the end."""
        with self._changed:
            self._changed.wait_for(lambda: step < self.next_step + self._depth or self._is_closed)
            return not self._is_closed
