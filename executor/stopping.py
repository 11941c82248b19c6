"""SIGINT and SIGTERM during a training: the ranks agree on a step to stop at, so that all can save it and end.

A signal may reach all ranks or one, at any time, and the ranks' hosts are at different steps, on GPUs by many. So rank
0 decides, about twice a second: before a step it writes into the store whether all stop there, or at which step it
decides again; the others read it before the same step. A rank that looked on its own might wait for others that have
entered the step's collectives already. No step costs a collective or a wait for the device.
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
DECISION_SECONDS = 0.5
# Ctrl-C comes from the terminal and, passed on, from the launcher; what comes within this time is one and the same.
SAME_SIGNAL_SECONDS = 1.0
_NUMBER, _DECISION = "stopping/number", "stopping/decision"


class Stopping:
    """Takes SIGINT and SIGTERM while it is open, and finds the step at which all ranks stop.

    The second signal ends the process at once, also in the middle of a collective.

    Args:
        store: through which the ranks of the plan meet.
        patience_seconds: longest wait for rank 0 to come to a step; longer than what the heartbeat allows it.
    """

    def __init__(self, store: Store, *, rank: int, num_ranks: int, patience_seconds: float) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._patience_seconds = patience_seconds
        self._number = 0
        self._is_posted = False
        self._next = 0  # step before which rank 0 decides
        self._steps_between = 1
        self._decided_seconds = 0.0
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
        """Return whether all ranks stop before a step; each asks before every step, from the same one on."""
        if self._num_ranks == 1:
            return self._number > 0
        if self._number and not self._is_posted:
            self._store.compare_set(_NUMBER, "", str(self._number))
            self._is_posted = True
        if step < self._next:
            return False
        return self._decide(step) if self._rank == 0 else self._follow(step)

    @property
    def signal_number(self) -> int:
        """The signal that came first on any rank, once a stop was due."""
        if self._num_ranks > 1:
            return int(self._store.get(_NUMBER))
        return self._number

    def _decide(self, step: int) -> bool:
        """Tell all ranks whether they stop before a step, or before which one they ask again."""
        stops = self._is_posted or self._store.check([_NUMBER])
        now = time.monotonic()
        if now - self._decided_seconds < DECISION_SECONDS / 2:
            self._steps_between *= 2
        elif now - self._decided_seconds > DECISION_SECONDS:
            self._steps_between = max(self._steps_between // 2, 1)
        self._decided_seconds = now
        self._next = step if stops else step + self._steps_between
        self._store.set(_DECISION, f"{step} {self._next}")
        return stops

    def _follow(self, step: int) -> bool:
        """Do as rank 0 decided; where it has decided for a later step already, it did not stop before this one."""
        latest = time.monotonic() + self._patience_seconds
        decided = following = -1
        while decided < step:
            if self._store.check([_DECISION]):
                decided, following = map(int, self._store.get(_DECISION).split())
            if decided < step:
                if time.monotonic() > latest:
                    within = f"within {self._patience_seconds:.0f} s of this rank"
                    raise RunError(f"rank 0 did not come to step {step + 1} {within}")
                time.sleep(0.0005)
        self._next = following if decided == step else decided
        return decided == following == step

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
