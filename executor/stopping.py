"""SIGINT and SIGTERM during a training: the ranks agree on a step to stop at, so that all can save it and end.

A signal may reach all ranks or one, at any time, and the ranks' hosts are at different steps, on GPUs by many. A rank
that knows of a signal says through the store before which step it stands, at its next one, and waits until all have
said so; all go on to the furthest of these steps. Nobody waits in vain: a rank that waits has issued all its
collectives of the steps before, and the others can reach their next step. Ranks learn of each other's signals by
looking into the store now and then, so no step costs a collective, or a wait for the device.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from simulator.errors import RunError

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# A look into the store takes some 0.1 ms.
POLL_SECONDS = 0.5
# Ctrl-C comes from the terminal and, passed on, from the launcher; what comes within this time is one and the same.
SAME_SIGNAL_SECONDS = 1.0
# A rank that needs longer to its next step has been given up by the collectives of the others.
_STEP_SECONDS = 300.0
_NUMBER, _STEP = "stopping/number", "stopping/step"


class Stopping:
    """Takes SIGINT and SIGTERM while it is open, and finds the step at which all ranks stop.

    The second signal ends the process at once, also in the middle of a collective.

    Args:
        store: through which the ranks of the plan meet.
    """

    def __init__(self, store: Store, *, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._number = 0
        self._agreed: int | None = None
        self._next_poll = 0.0
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> "Stopping":
        # Signals can be handled in the main thread alone; elsewhere they stay as they are.
        if threading.current_thread() is threading.main_thread():
            self._take_signals()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def is_due(self, step: int) -> bool:
        """Return whether all ranks stop before a step; each asks before every step of its own, in order."""
        if self._agreed is None and self._is_wanted():
            self._agreed = self._furthest(step) if self._num_ranks > 1 else step
        return self._agreed == step

    def close_at(self, num_steps: int) -> None:
        """Say that this rank has done all steps, so that no other waits for it to stop."""
        if self._num_ranks > 1 and self._agreed is None:
            self._store.set(f"{_STEP}{self._rank}", str(num_steps))

    @property
    def signal_number(self) -> int:
        """The signal that came first on any rank, once a stop was due."""
        if self._num_ranks > 1:
            return int(self._store.get(_NUMBER))
        return self._number

    def _is_wanted(self) -> bool:
        """Return whether a signal has come, here or, as far as is known, elsewhere."""
        if self._num_ranks == 1:
            return self._number > 0
        if self._number:
            self._store.compare_set(_NUMBER, "", str(self._number))
            return True
        now = time.monotonic()
        if now < self._next_poll:
            return False
        self._next_poll = now + POLL_SECONDS
        return self._store.check([_NUMBER])

    def _furthest(self, step: int) -> int:
        """Say before which step this rank stands; return the furthest of all, once all have said theirs."""
        self._store.set(f"{_STEP}{self._rank}", str(step))
        keys = [f"{_STEP}{rank}" for rank in range(self._num_ranks)]
        latest = time.monotonic() + _STEP_SECONDS
        while not self._store.check(keys):
            if time.monotonic() > latest:
                missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
                raise RunError(
                    f"a signal was to end the run, but rank {', '.join(missing)} came to no further step within "
                    f"{_STEP_SECONDS:.0f} s"
                )
            time.sleep(0.02)
        return max(int(self._store.get(key)) for key in keys)

    def _take_signals(self) -> None:
        """Let signals be noticed by a thread: inside a collective no handler of Python's runs."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        handlers: dict[int, Any] = {number: signal.signal(number, _do_nothing) for number in SIGNALS}
        for number in SIGNALS:
            signal.siginterrupt(number, False)
        earlier = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        thread = threading.Thread(target=self._notice, args=(reading,), daemon=True)
        thread.start()

        def give_back() -> None:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(earlier)
            os.close(writing)  # which ends the thread
            thread.join()
            os.close(reading)

        self._cleanup.callback(give_back)

    def _notice(self, reading: int) -> None:
        """Note the first signal; end the process at the second."""
        first_seconds = 0.0
        for number in iter(_reader(reading), 0):
            if number not in SIGNALS:
                continue
            now = time.monotonic()
            if not self._number:
                self._number, first_seconds = number, now
            elif now > first_seconds + SAME_SIGNAL_SECONDS:
                os._exit(128 + number)


def _reader(reading: int) -> Callable[[], int]:
    """Return a function that waits for the number of the next signal; it gives 0 at the end."""
    return lambda: int.from_bytes(os.read(reading, 1), "little")


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """Stand in for a handler: the number went through the pipe already."""
