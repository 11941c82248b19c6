"""Where a rank is in its run, noted so cheaply that every step of production does it."""

import contextlib
from collections.abc import Iterator


class Position:
    """Where the main thread of a rank is; the thread of `executor/heartbeat.py` reads it.

    All ranks of a plan note the same moments and collectives in the same order, so the rank that has reached the fewest
    is the one that the others wait for. Ranks of a pipeline have other layers and another order, so of a step they note
    the passes instead, of which all have as many.

    Attributes:
        moment: part of the run, such as "step 7" or "the batch of step 7".
        task: task of the moment that was begun last; empty where none was, as in a step that a CUDA graph replays.
        num_reached: moments and collectives that were begun.
        is_waiting: whether this rank waits for others, as far as the host knows.
    """

    __slots__ = ("_is_in_pass", "is_waiting", "moment", "num_reached", "task")

    def __init__(self) -> None:
        self.moment = "the start of the run"
        self.task = ""
        self.num_reached = 0
        self.is_waiting = False
        self._is_in_pass = False

    def __str__(self) -> str:
        task = self.task
        return f"{task} of {self.moment}" if task else self.moment

    def reach(self, moment: str) -> None:
        """Note that a part of the run begins."""
        self.moment = moment
        self.task = ""
        self.num_reached += 1
        self.is_waiting = False

    def enter(self, collective: str) -> None:
        """Note that a collective begins, or another wait for the other ranks."""
        self.task = collective
        self.num_reached += not self._is_in_pass
        self.is_waiting = True

    def leave(self) -> None:
        """Note that the collective is over for this rank's host."""
        self.is_waiting = False
        self.task = f"what follows {self.task}"

    @contextlib.contextmanager
    def passing(self) -> Iterator[None]:
        """Note that what runs inside is one pass of a stage; its collectives are not counted."""
        self.num_reached += 1
        self._is_in_pass = True
        yield
        self._is_in_pass = False

    @contextlib.contextmanager
    def waiting(self, name: str) -> Iterator[None]:
        """Note that what runs inside waits for the other ranks; an error leaves it as it is."""
        self.enter(name)
        yield
        self.leave()
