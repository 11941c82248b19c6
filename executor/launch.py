"""Starts the ranks of this host through torchrun's API, and brings their errors back."""

import _thread
import contextlib
import logging
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from executor.cli_errors import OWN_ERRORS, told_status
from executor.resume import resume_hint
from simulator.errors import RunError, SpecError
from simulator.specs.files import remove_unfinished

# Work of one rank: an argument that can be pickled, a store through which all ranks meet, the rank.
Work = Callable[[Any, Store, int], None]
# Ranks notice a lost peer at once, and wait so long for the peer to say why, or for the launcher to see that it died.
_NOTICE_SECONDS = 1.0
# Environment variable of a rank that `launch` started: the folder in which it leaves why it ended, and where it is.
_CAUSES = "GRAPHPILOT_CAUSES"
# A signal to all processes of a terminal may end a rank before this process has handled it.
_SIGNAL_SECONDS = 0.3
# Ranks begin after their imports, in 2 to 4 s on two busy cores; a signal waits no longer than this for them.
_START_SECONDS = 15.0
# What the launcher takes itself and passes on to its ranks.
_TAKEN_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_HANDLED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Positions are padded to this, and so overwritten as a whole.
_POSITION_BYTES = 256
_at_work = threading.Event()
# What gloo, NCCL and the store say when a peer has gone; they raise plain RuntimeErrors at times.
_LOST_PEER_TEXTS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "gloo/transport")


class Interrupted(BaseException):
    """A signal ended the run; `signal_number` says which."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"ended by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


class LostPeerError(RunError):
    """Another rank left in the middle; why, only that rank or its launcher knows."""


def is_under_torchrun() -> bool:
    """Return whether torchrun started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(work: Work, argument: Any, *, num_ranks: int, folder: Path) -> None:
    """Run `work(argument, store, rank)` in a process for each rank of this host and wait for all to end.

    Args:
        work: a function of a module, so that it can be found again in another process.
        folder: into which the ranks write; what they leave unfinished there is removed at the end.

    Raises:
        RunError: if a rank fails; an error of ours is raised again as it is.
        Interrupted: after SIGINT or SIGTERM to the launcher or a rank, when all ranks have ended.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=f"graphpilot{os.getpid()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        rdzv_configs={"is_host": True},
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
    )
    _silence_the_agent()
    with (
        tempfile.TemporaryDirectory(prefix="graphpilot-") as folder_name,
        _signals_of_the_launcher(causes := Path(folder_name), num_ranks) as taken,
    ):
        try:
            _launch(config, work, argument, causes, taken)
        except SignalException as error:
            raise Interrupted(error.sigval) from error
        finally:
            remove_unfinished(folder)


def _launch(config: LaunchConfig, work: Work, argument: Any, causes: Path, taken: list[int]) -> None:
    try:
        elastic_launch(config, _run_as_child)(work, argument, causes)
    except ChildFailedError as error:
        code = error.get_first_failure()[1].exitcode
        if code in (-signal.SIGINT, -signal.SIGTERM):
            time.sleep(_SIGNAL_SECONDS)
        ending = [*taken, *(number for number in _TAKEN_SIGNALS if code == 128 + number)]
        if ending and all(is_lost for is_lost, _, _ in _left_causes(causes)):
            raise Interrupted(ending[0]) from error
        raise _cause(causes, error) from error


def _silence_the_agent() -> None:
    """Keep torchrun's warnings and tracebacks about ranks that end from the user, who gets a sentence of ours."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.multiprocessing")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _signals_of_the_launcher(causes: Path, num_ranks: int) -> Iterator[list[int]]:
    """Pass signals on to the ranks, and give them back their handlers afterwards; yields the numbers of those taken.

    A terminal sends SIGINT to every process of the command. The ranks inherit it blocked, else it would end them in
    the middle of an import, with a traceback; a thread takes it here, and passes it on once all have begun: a rank that
    loses its launcher while it is being started ends with a traceback too. SIGTERM goes the same way: a rank ends at
    once or, with checkpoints, once the run is saved, for which torchrun's own handler would leave it 30 seconds.
    """
    taken: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield taken
        return
    resource_tracker.ensure_running()  # it starts with the ranks and would unblock the signals
    handlers = {number: signal.getsignal(number) for number in _HANDLED_SIGNALS}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _TAKEN_SIGNALS)
    done = threading.Event()

    def take() -> None:
        while not done.is_set():
            found = signal.sigtimedwait(_TAKEN_SIGNALS, 0.1)
            if found is None:
                continue
            taken.append(found.si_signo)
            latest = time.monotonic() + _START_SECONDS
            while not done.is_set() and len(list(causes.glob("*.begun"))) < num_ranks and time.monotonic() < latest:
                time.sleep(0.02)
            if not done.is_set() and not _pass_on(found.si_signo, causes, num_ranks):
                _thread.interrupt_main(signal.Signals(found.si_signo))

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    try:
        yield taken
    finally:
        done.set()
        thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _pass_on(number: int, causes: Path, num_ranks: int) -> bool:
    """Send a signal to all ranks; return whether all had begun to work."""
    begun = list(causes.glob("*.begun"))
    for path in begun:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(path.read_text()), number)
    return len(begun) == num_ranks


def _run_as_child(work: Work, argument: Any, causes: Path) -> None:
    """Run the work as a rank that `launch` started; leave the reason in `causes` if it fails."""
    os.environ[_CAUSES] = str(causes)
    beginning = causes / f"rank{os.environ['RANK']}.pid"
    beginning.write_text(str(os.getpid()))
    beginning.replace(beginning.with_suffix(".begun"))
    try:
        run_as_rank(work, argument)
    except Interrupted as error:
        sys.exit(128 + error.signal_number)
    except Exception as error:
        _leave_cause(error)
        raise


def _leave_cause(error: Exception) -> None:
    """Leave for the launcher why this rank ends; the first reason is kept."""
    mine = Path(os.environ[_CAUSES]) / f"rank{os.environ['RANK']}.pickle"
    if mine.exists():
        return
    partial = mine.with_suffix(f".{threading.get_ident()}.tmp")
    partial.write_bytes(pickle.dumps((isinstance(error, LostPeerError), time.time(), error)))
    partial.replace(mine)


def is_launched() -> bool:
    """Return whether `launch` started this process as a rank, and not torchrun."""
    return _CAUSES in os.environ


def note_position(position: str) -> None:
    """Note for the launcher where this rank is, should it be killed; nothing under torchrun."""
    if is_launched():
        os.pwrite(_position_file(), position.encode()[:_POSITION_BYTES].ljust(_POSITION_BYTES), 0)


@cache
def _position_file() -> int:
    return os.open(Path(os.environ[_CAUSES]) / f"rank{os.environ['RANK']}.at", os.O_WRONLY | os.O_CREAT, 0o600)


def end_rank(error: RunError, *, folder: Path, before_exit: Callable[[], None] | None = None) -> NoReturn:
    """End this rank with the error's exit status from any thread, since the main thread may be stuck for ever.

    Args:
        folder: whose unfinished files are removed.
        before_exit: is called once the reason is told or left for the launcher; None where the store does not answer,
            which is why this rank tells without asking whether it is the first.
    """
    remove_unfinished(folder)
    if is_launched():
        _leave_cause(error)  # the launcher adds the checkpoint to go on from
    else:
        if hint := resume_hint(folder):
            error = type(error)(f"{error}; {hint}")
        told_status(error, debug=False, may_tell=is_first_to_tell if before_exit else lambda: True)
    sys.stdout.flush()
    sys.stderr.flush()
    if before_exit is not None:
        before_exit()
    os._exit(error.exit_status)


def run_as_rank(work: Work, argument: Any) -> None:
    """Run the work as the rank that torchrun's environment says.

    Raises:
        LostPeerError: if another rank failed first.
        RunError: if this rank fails; an error of ours is raised as it is.
        Interrupted: if a signal ended the work in good order.
    """
    # A signal ends a rank also inside a collective, where no handler of Python's would run; see `stopping.py`.
    for number in _TAKEN_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _TAKEN_SIGNALS)
    rank = int(os.environ["RANK"])
    try:
        _telling_store()
        _at_work.set()
        work(argument, _meeting_store(), rank)
    except Exception as error:
        told = _told(error, rank)
        if isinstance(told, LostPeerError):
            time.sleep(_NOTICE_SECONDS)
        raise told from error


@cache
def _meeting_store() -> Store:
    """Return the store of torchrun's environment; a process can join it once."""
    store: Store = next(rendezvous("env://"))[0]
    return store


@cache
def _telling_store() -> Store:
    """Return a connection for errors; a rank makes it before there are any, since nobody connects to a store gone."""
    return own_connection(_meeting_store())


def own_connection(store: Store) -> Store:
    """Return another connection to a store: while one waits for a key, it takes no other request."""
    found: Store = store.clone()  # type: ignore[attr-defined]  # missing in torch's stubs
    return found


def is_first_to_tell() -> bool:
    """Return whether this rank, which torchrun started, is the first of all to tell an error."""
    try:
        store = _telling_store()
        store.set_timeout(timedelta(seconds=10))
        return store.add("graphpilot/errors", 1) == 1
    except RuntimeError:
        # The rank that held the store has gone: before the work it has told why, in the middle it may have been killed.
        return os.environ["RANK"] == "0" or _at_work.is_set()


def meet(store: Store, name: str, num_ranks: int, *, arrive: bool = True) -> None:
    """Return when so many ranks have arrived at a point of this name; waiting costs no processor time."""
    if arrive:
        store.add(name, 1)
    while store.add(name, 0) < num_ranks:
        time.sleep(0.02)


def _cause(causes: Path, error: ChildFailedError) -> Exception:
    """Return what the first failing rank left behind; a rank that was killed left nothing but its exit code."""
    is_lost, _, cause = min(_left_causes(causes), key=lambda entry: entry[:2], default=(True, 0.0, None))
    rank, failure = error.get_first_failure()
    if cause is not None and not (is_lost and failure.exitcode < 0):
        assert isinstance(cause, Exception)
        return cause
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = "; the system kills processes when memory runs out" if name == "SIGKILL" else ""
        at = causes / f"rank{rank}.at"
        seen = f", last seen in {at.read_text(errors='replace').strip()}" if at.exists() else ""
        return RunError(
            f"rank {rank} was ended by {name} (exit code {failure.exitcode}){seen}, so all ranks ended{hint}"
        )
    return RunError(f"rank {rank} ended with exit code {failure.exitcode} before it could say why, so all ranks ended")


def _left_causes(causes: Path) -> list[tuple[bool, float, Exception]]:
    """Return what ranks left behind that failed: whether a peer was lost, when, and the error."""
    return [pickle.loads(path.read_bytes()) for path in causes.glob("*.pickle")]


def _told(error: Exception, rank: int) -> Exception:
    """Return an error as the user is to read it; one that is our own fault carries its traceback as a note."""
    if isinstance(error, LostPeerError):
        return error  # it names the other rank
    if isinstance(error, RunError):
        return type(error)(f"rank {rank}: {error}")
    if isinstance(error, OWN_ERRORS):
        return error  # of files and descriptions, which are the same on every rank
    if isinstance(error, OSError) and error.filename:
        return SpecError(f"{error.filename}: {error.strerror or error}")
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return RunError(f"rank {rank} ran out of memory: {first_line(error)}; recompute layers or use more ranks")
    if is_lost_peer(error):
        return LostPeerError(f"rank {rank} lost contact with another rank: {first_line(error)}")
    fault = RuntimeError(f"rank {rank}: {type(error).__name__}: {error}")
    fault.add_note("".join(traceback.format_exception(error)))
    return fault


def is_lost_peer(error: BaseException) -> bool:
    """Return whether an error is what torch says when another rank has gone, or did not come in time."""
    return isinstance(error, dist.DistError) or any(text in str(error) for text in _LOST_PEER_TEXTS)


def first_line(error: Exception) -> str:
    """Return what an error says, without the traces of C++ that torch puts below."""
    return (str(error) or type(error).__name__).splitlines()[0]
