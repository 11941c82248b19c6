"""Ranks with little to do, and a launcher of them that is a process of its own.

    python -m tests.executor.launch_ranks NAME FOLDER

starts two ranks that do what the function called NAME does. It ends with the exit status of `graphpilot`.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

# Threads of libraries must not take what is the launcher's, as in `executor/__main__.py`.
_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})

from torch.distributed import Store  # type: ignore[attr-defined]  # noqa: E402  # not in __all__

from executor.cli_errors import told_status  # noqa: E402
from executor.launch import Interrupted, launch, meet  # noqa: E402
from executor.stopping import Stopping  # noqa: E402
from simulator.errors import RunError, SpecError  # noqa: E402
from simulator.specs.files import write_atomic  # noqa: E402

signal.pthread_sigmask(signal.SIG_SETMASK, _mask)


def wait_for_ever(folder: Path, store: Store, rank: int) -> None:
    """Say that the rank is there, and stay."""
    (folder / f"here{rank}").touch()
    meet(store, "never", 3)


def write_for_ever(folder: Path, store: Store, rank: int) -> None:
    """Stay in the middle of writing a file."""

    def write(file) -> None:
        file.write(b"half")
        (folder / f"here{rank}").touch()
        meet(store, "never", 3)

    write_atomic(folder / f"result{rank}.json", write)


def die_on_rank_1(folder: Path, store: Store, rank: int) -> None:
    """Lose rank 1; the other one notices at once, as gloo does."""
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:33201")


def lose_each_other(folder: Path, store: Store, rank: int) -> None:
    """Fail as when the network breaks."""
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:33201")


def find_fault_in_a_file(folder: Path, store: Store, rank: int) -> None:
    """Fail with bad input, the same on all ranks."""
    raise SpecError("graph.npz: must be whole")


def stay_in_a_collective(folder: Path, store: Store, rank: int) -> None:
    """Wait in C++, as in a collective that another rank does not enter, with signals that are to save the run first."""
    with Stopping(store, rank=rank, num_ranks=2, patience_seconds=300.0):
        (folder / f"here{rank}").touch()
        store.wait(["never"], timedelta(seconds=60))


def stop_at_a_step(folder: Path, store: Store, rank: int) -> None:
    """End in good order at the step that both ranks agree on, and leave its number."""
    with Stopping(store, rank=rank, num_ranks=2, patience_seconds=300.0) as stopping:
        (folder / f"here{rank}").touch()
        for step in range(100_000):
            if stopping.is_due(step):
                (folder / f"stopped{rank}").write_text(str(step))
                meet(store, "stopped", 2)
                raise Interrupted(stopping.signal_number)
            meet(store, f"step{step}", 2)


def run_badly_on_rank_1(folder: Path, store: Store, rank: int) -> None:
    """Fail on one rank while the other one waits."""
    if rank == 1:
        raise RunError("the loss of step 3 is nan")
    meet(store, "never", 3)


def divide_by_zero_on_rank_1(folder: Path, store: Store, rank: int) -> None:
    """Fail on one rank by a fault of ours."""
    if rank == 1:
        print(1 // (rank - 1))
    meet(store, "never", 3)


def want_a_missing_file(folder: Path, store: Store, rank: int) -> None:
    """Fail with an error of the system."""
    (folder / "gone.npy").read_bytes()


def write_rank(folder: Path, store: Store, rank: int) -> None:
    """Do the work of a good rank: meet the other one, and write."""
    meet(store, "start", 2)
    (folder / f"rank{rank}").write_text(os.environ["WORLD_SIZE"])


if __name__ == "__main__":
    try:
        launch(globals()[sys.argv[1]], Path(sys.argv[2]), num_ranks=2, folder=Path(sys.argv[2]))
    except BaseException as error:
        sys.exit(told_status(error, debug="debug" in sys.argv, may_tell=lambda: True))
