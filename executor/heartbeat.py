"""Every rank tells the others where it is, and all end when one of them is missing.

A thread writes a beat into the store four times a second. Neither it nor the main thread syncs with the device. While
this rank gets no further, the thread reads the beats of the others, and judges (`executor/missing.py`). The first
verdict in the store is everybody's: each rank leaves it as its error and ends its process, since its main thread may
be stuck in a collective, where no exception reaches it.
"""

import contextlib
import json
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import psutil
from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from executor.launch import (
    LostPeerError,
    end_rank,
    first_line,
    is_launched,
    is_lost_peer,
    note_position,
    own_connection,
)
from executor.mesh import COLLECTIVE_TIMEOUT_SECONDS, MEETING_TIMEOUT_SECONDS
from executor.missing import NO_BEAT, SILENT_SECONDS, Beat, Seen, beat_from_json, lost_sentence, verdict
from executor.position import Position
from simulator.errors import RunError
from simulator.specs.files import remove_unfinished

# A beat takes 0.05 ms of a thread on an AMD EPYC, and two requests of the store.
_PERIOD_SECONDS = 0.25
# Ranks that end for one reason wait so long for one another, so that each says it before a launcher ends it.
_LEAVING_SECONDS = 3.0
# Ranks that a failure ends wait so long for the rank that failed, or for its launcher, to say it first and better.
_NOTICE_SECONDS = 1.0
# A rank that failed may not get out of its process groups, whose other ranks have gone.
_FAILED_SECONDS = 10.0
_TORCH_DISTRIBUTED = f"{os.sep}torch{os.sep}distributed{os.sep}"


class Heartbeat:
    """The heartbeat of one rank; nothing where there is only one.

    Args:
        store: through which the ranks of the plan meet.
        position: of this rank's main thread.
        folder: whose unfinished files are removed when the rank has to end.

    Attributes:
        timeout_seconds: how long a rank may get no further while others wait for it; at first until all have met.
    """

    def __init__(self, store: Store, position: Position, *, rank: int, num_ranks: int, folder: Path) -> None:
        self.timeout_seconds = MEETING_TIMEOUT_SECONDS
        self._position, self._rank, self._num_ranks, self._folder = position, rank, num_ranks, folder
        self._store = own_connection(store) if num_ranks > 1 else store
        self._process = {
            "host": f"{platform.node()}/{_boot_id()}",
            "pid": os.getpid(),
            "created_seconds": psutil.Process().create_time(),
        }
        self._lock = threading.Lock()
        self._number = 0
        self._place, self._since = (-1, ""), time.monotonic()
        self._seen: dict[int, tuple[Beat, float]] = {}
        self._last_contact = time.monotonic()
        self._failed_at = 0.0
        self._failure: Exception | None = None
        self._done = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._beat_on, self._guard)]

    def __enter__(self) -> "Heartbeat":
        if self._num_ranks > 1:
            self._send()
            for thread in self._threads:
                thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._num_ranks == 1:
            return
        self._done.set()
        self._threads[0].join(_LEAVING_SECONDS)
        if not isinstance(error, Exception) and not self._threads[0].is_alive():  # else the store does not answer
            with contextlib.suppress(RuntimeError):
                self._send(has_ended=True)

    @contextlib.contextmanager
    def failures_told(self) -> Iterator[None]:
        """Tell the other ranks of what fails inside, and say who is missing when another rank is.

        A rank that was killed cannot remove what it left unfinished.

        Raises:
            LostPeerError: instead of what torch says of a rank that has gone.
        """
        try:
            yield
        except Exception as error:
            if self._num_ranks == 1 or self._failure is not None:
                raise
            self._failed_at, self._failure = time.monotonic(), error
            if not is_lost_peer(error):
                reason = f"rank {self._rank} failed in {self._position}: {first_line(error)}"
                self._tell(f"{reason}, so all ranks ended", is_lost=True)
                raise
            self._failure = LostPeerError(self._reason_of_loss(error))
            remove_unfinished(self._folder)
            raise self._failure from error

    # --- The thread that beats.

    def _beat_on(self) -> None:
        while not self._done.wait(_PERIOD_SECONDS):
            # The store may be gone, or not answer for a while; `_guard` judges that.
            with contextlib.suppress(RuntimeError):
                self._beat()

    def _beat(self) -> None:
        with self._lock:
            still_seconds = self._send()
            if self._failure is None and self._store.check(["verdict"]):
                self._obey(json.loads(self._store.get("verdict")))
            if self._failure is None and still_seconds > _PERIOD_SECONDS:
                ranks = self._look()
                if found := verdict(ranks, self._rank, self.timeout_seconds):
                    self._obey(self._tell(found, is_lost=False))
            self._last_contact = time.monotonic()

    def _send(self, *, has_ended: bool = False) -> float:
        """Write a beat; return for how long this rank got no further."""
        position, now = self._position, time.monotonic()
        place = (position.num_reached, str(position))
        if place != self._place:
            self._place, self._since = place, now
            note_position(place[1])
        self._number += 1
        beat = Beat(
            number=self._number,
            num_reached=place[0],
            is_waiting=position.is_waiting,
            place=place[1],
            still_seconds=now - self._since,
            is_in_call=now - self._since > _PERIOD_SECONDS and _is_in_call(),
            has_ended=has_ended,
            **self._process,
        )
        self._store.set(f"beat{self._rank}", beat.to_json())
        return now - self._since

    def _look(self) -> list[Seen]:
        """Return what each rank said last, and how long ago."""
        keys = [f"beat{rank}" for rank in range(self._num_ranks)]
        if self._store.check(keys):
            beats = [beat_from_json(text) for text in self._store.multi_get(keys)]
        else:
            beats = [beat_from_json(self._store.get(key)) if self._store.check([key]) else NO_BEAT for key in keys]
        now = time.monotonic()
        for rank, beat in enumerate(beats):
            if rank not in self._seen or self._seen[rank][0].number != beat.number:
                self._seen[rank] = (beat, now)
        return [Seen(beat=self._seen[rank][0], silent_seconds=now - self._seen[rank][1]) for rank in range(len(keys))]

    def _tell(self, sentence: str, *, is_lost: bool) -> dict[str, object]:
        """Tell all ranks why they end; return the first reason that was told.

        Args:
            is_lost: a rank failed or has gone, of which it, or its launcher, knows more.
        """
        mine = json.dumps({"sentence": sentence, "is_lost": is_lost})
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it those who could be told
            mine = self._store.compare_set("verdict", "", mine).decode()
        found: dict[str, object] = json.loads(mine)
        return found

    def _obey(self, told: dict[str, object]) -> None:
        """End this rank for a reason that all know, together with the others."""
        sentence = str(told["sentence"])
        if told["is_lost"]:
            time.sleep(_NOTICE_SECONDS)
        if self._failure is None:
            error = LostPeerError(sentence) if told["is_lost"] else RunError(sentence)
            end_rank(error, folder=self._folder, before_exit=self._leave_together)

    def _leave_together(self) -> None:
        """Wait for the other ranks to know too, and end those of this host that give no sign."""
        keys = [f"left{rank}" for rank in range(self._num_ranks)]
        until = time.monotonic() + _LEAVING_SECONDS
        with contextlib.suppress(RuntimeError):
            self._store.set(keys[self._rank], "1")
            while time.monotonic() < until and not self._store.check(keys):
                time.sleep(0.02)
            for rank, seen in enumerate(self._look()):
                if seen.beat.host == self._process["host"] and not self._store.check([keys[rank]]):
                    _kill(seen.beat)

    # --- The thread that guards.

    def _guard(self) -> None:
        """End this rank if the store does not answer while it is stuck, or if it cannot end after a failure."""
        place, since = "", time.monotonic()
        while not self._done.wait(_PERIOD_SECONDS):
            now = time.monotonic()
            if str(self._position) != place:
                place, since = str(self._position), now
            if self._failure is not None:
                if now - self._failed_at > _FAILED_SECONDS:
                    end_rank(self._failure_told(), folder=self._folder)
                continue
            limit = self.timeout_seconds + SILENT_SECONDS
            if now - max(self._last_contact, since) > limit:
                error = LostPeerError(
                    f"rank {self._rank} has heard nothing from the store of the run for {limit:.0f} s, and is stuck in "
                    f"{place}: the host of the store, that of rank 0, is gone or cut off"
                )
                end_rank(error, folder=self._folder)

    def _failure_told(self) -> RunError:
        if isinstance(self._failure, RunError):
            return self._failure
        return RunError(f"rank {self._rank} failed in {self._position}: {self._failure}")

    # --- The main thread, when something has failed.

    def _reason_of_loss(self, error: Exception) -> str:
        """Return who has gone, as soon as that is known; until then torchrun must not end this rank."""
        if not is_launched() and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        until = time.monotonic() + SILENT_SECONDS + 2 * _PERIOD_SECONDS
        try:
            while time.monotonic() < until and not self._store.check(["verdict"]):
                with self._lock:
                    found = lost_sentence(self._look(), self._rank)
                if found:
                    self._tell(f"{found}, so all ranks ended", is_lost=True)
                time.sleep(0.1)
            if self._store.check(["verdict"]):
                return str(json.loads(self._store.get("verdict"))["sentence"])
        except RuntimeError:
            return (
                f"rank {self._rank} lost the store of the run in {self._position}: the host of the store, that of rank "
                "0, is gone, so all ranks ended"
            )
        return f"rank {self._rank} lost contact with another rank in {self._position}: {first_line(error)}"


def backstop_seconds(timeout_seconds: float) -> float:
    """Return after which time torch itself is to give a collective up: later, since it names no rank that is missing.

    A rank that is slow in one task after the other may keep the others waiting for longer than it takes to judge it.
    """
    return max(4 * timeout_seconds, COLLECTIVE_TIMEOUT_SECONDS)


def _kill(beat: Beat) -> None:
    """End a rank of this host that does not end by itself, such as one that was stopped."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(beat.pid)
        if abs(process.create_time() - beat.created_seconds) < 1:  # else another process has its number by now
            process.kill()


def _is_in_call() -> bool:
    """Return whether the main thread is inside torch.distributed; one may also be held up just before."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and _TORCH_DISTRIBUTED in frame.f_code.co_filename


def _boot_id() -> str:
    """Return what tells this host from others of its name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
