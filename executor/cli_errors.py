"""What goes wrong in a command: an exit status and one sentence; and what is refused before any work is done."""

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import typer

from simulator.errors import CalibrationError, NoFeasiblePlanError, PlanError, RunError, SpecError
from simulator.specs.calibration import Calibration
from simulator.specs.files import read_calibration, read_trace
from simulator.specs.trace import Trace, TraceOrigin

OWN_ERRORS = (SpecError, PlanError, NoFeasiblePlanError, CalibrationError, RunError)
FAULT_STATUS = 1
INTERRUPTED_STATUS = 130


@contextlib.contextmanager
def threads_without_ctrl_c() -> Iterator[None]:
    """Let threads that libraries start meanwhile take no SIGINT or SIGTERM: `executor/launch.py` waits for them."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def told_status(error: BaseException, *, debug: bool, may_tell: Callable[[], bool]) -> int:
    """Return the exit status for an error, which is told in one sentence on standard error.

    Args:
        debug: also print the traceback.
        may_tell: whether this process is to tell; asked only if there is something to tell.
    """
    if isinstance(error, SystemExit):
        return int(error.code or 0)
    if isinstance(error, typer.Abort | KeyboardInterrupt):
        return INTERRUPTED_STATUS
    number = getattr(error, "signal_number", getattr(error, "sigval", None))  # of a launcher of ranks
    if number is not None:
        return 128 + int(number)
    is_usage = hasattr(error, "exit_code") and hasattr(error, "show")  # of click, which typer may hide
    if may_tell():
        if debug:
            traceback.print_exception(error)
        if is_usage:
            error.show()  # type: ignore[attr-defined]
        else:
            print(f"graphpilot: {_sentence(error)}", file=sys.stderr)
    if is_usage:
        return int(error.exit_code)  # type: ignore[attr-defined]
    if isinstance(error, OWN_ERRORS):
        return error.exit_status
    return SpecError.exit_status if isinstance(error, OSError) else FAULT_STATUS


def _sentence(error: BaseException) -> str:
    if isinstance(error, OWN_ERRORS):
        return str(error)
    if isinstance(error, OSError):
        return f"{error.filename or 'standard output'}: {error.strerror or error}"
    return f"our own fault: {type(error).__name__}: {error}; add --debug for the traceback"


def require_writable(path: Path) -> None:
    """Refuse to start work whose result could not be written.

    Args:
        path: of a file that is to be written; its folder may be missing.

    Raises:
        SpecError: if a folder is in its place, or a file or a folder without the right to write in its folder's.
    """
    if path.is_dir():
        raise SpecError(f"{path}: must be a file to write, got a folder; name a file in it")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise SpecError(f"{path}: must lie in a folder, but {folder} is a file; write elsewhere")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SpecError(f"{path}: must lie where files can be written, and {folder} allows none; write elsewhere")


def trace_from(path: Path, origin: TraceOrigin) -> Trace:
    """Return a trace that must be a prediction, or a measurement.

    Raises:
        SpecError: if it is the other one, or cannot be read.
    """
    trace = read_trace(path)
    if trace.origin is not origin:
        command = {TraceOrigin.SIMULATED: "simulate", TraceOrigin.MEASURED: "train"}[origin]
        fix = f"give a file of graphpilot {command}"
        raise SpecError(f"{path}: origin of the trace must be {origin}, got {trace.origin}; {fix}")
    return trace


def existing_calibration(path: Path) -> Calibration:
    """Return a calibration that must have been made before.

    Raises:
        CalibrationError: if there is none.
        SpecError: if the file is none of ours, or was changed.
    """
    if not path.exists():
        raise CalibrationError(
            f"{path}: must be a calibration, got nothing there; make it: graphpilot calibrate --out {path}"
        )
    return read_calibration(path)
