"""Starts the ranks of this host through torchrun's API, and brings their errors back."""

import logging
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.rendezvous import rendezvous

from simulator.errors import CalibrationError, NoFeasiblePlanError, PlanError, RunError, SpecError

OWN_ERRORS = (SpecError, PlanError, RunError, CalibrationError, NoFeasiblePlanError)
# Work of one rank: an argument that can be pickled, a store through which all ranks meet, the rank.
Work = Callable[[Any, Store, int], None]


class Interrupted(BaseException):
    """A signal ended the run; `signal_number` says which."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(f"ended by {signal.Signals(signal_number).name}")
        self.signal_number = signal_number


def is_under_torchrun() -> bool:
    """Return whether torchrun started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def launch(work: Work, argument: Any, *, num_ranks: int, folder: Path) -> None:
    """Run `work(argument, store, rank)` in a process for each rank of this host and wait for all to end.

    Args:
        work: a function of a module, so that it can be found again in another process.
        folder: where failing ranks leave their reason; unfinished files (`*.tmp`) in it are removed at the end.

    Raises:
        RunError: if a rank fails; an error of ours is raised again as it is.
        Interrupted: after SIGINT or SIGTERM, when all ranks have ended.
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
    # The agent's own report of a failed rank is a traceback; ours is a sentence.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        elastic_launch(config, run_as_rank)(work, argument, folder)
    except ChildFailedError as error:
        raise _cause(folder, error) from error
    except SignalException as error:
        raise Interrupted(error.sigval) from error
    finally:
        for leftover in folder.glob("**/*.tmp"):
            leftover.unlink(missing_ok=True)


def run_as_rank(work: Work, argument: Any, folder: Path) -> None:
    """Run the work as the rank that torchrun's environment says; leave the reason in `folder` if it fails."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the launcher ends its ranks; they need not say goodbye
    store, rank, _ = next(rendezvous("env://"))
    try:
        work(argument, store, rank)
    except Exception as error:
        _leave_cause(folder, rank, error)
        raise


def meet(store: Store, name: str, num_ranks: int, *, arrive: bool = True) -> None:
    """Return when so many ranks have arrived at a point of this name; waiting costs no processor time."""
    if arrive:
        store.add(name, 1)
    while store.add(name, 0) < num_ranks:
        time.sleep(0.02)


def _cause(folder: Path, error: ChildFailedError) -> Exception:
    """Return what the first failing rank left behind; a rank that was killed left nothing but its exit code."""
    found = sorted(folder.glob("error-rank*.pickle"))
    causes = [pickle.loads(path.read_bytes()) for path in found]
    for path in found:
        path.unlink()
    if causes:
        _, cause = min(causes, key=lambda pair: pair[0])
        assert isinstance(cause, Exception)
        return cause
    rank, failure = error.get_first_failure()
    return RunError(f"rank {rank} ended with exit code {failure.exitcode} before it could say why")


def _leave_cause(folder: Path, rank: int, error: Exception) -> None:
    """Write the reason where the launcher finds it; the loss of a peer is not a reason."""
    if isinstance(error, OWN_ERRORS):
        cause: Exception = type(error)(f"rank {rank}: {error}")
    elif isinstance(error, torch.OutOfMemoryError):
        cause = RunError(f"rank {rank} ran out of device memory: {error}; recompute layers or use more ranks")
    elif isinstance(error, dist.DistError) or "Connection closed by peer" in str(error):
        return
    else:
        cause = RuntimeError(f"rank {rank}: {''.join(traceback.format_exception(error))}")
    partial = folder / f"error-rank{rank}.tmp"
    partial.write_bytes(pickle.dumps((time.time(), cause)))
    partial.replace(partial.with_suffix(".pickle"))
