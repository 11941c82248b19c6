"""METIS in a child process: its crash, its hunger for memory or a stall is a reason here, not the end.

The child runs this very file, which therefore imports nothing of the project.
"""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import psutil
import pymetis
from numpy.typing import NDArray

# 19.1 million entries (R-MAT, a million nodes, 4 parts) took 24 s and 2.5 GB on an AMD EPYC, pymetis 2025.2.2.
SECONDS_PER_EDGE = 24 / 19.1e6
BYTES_PER_EDGE = 2.5e9 / 19.1e6
# A loaded or slower machine may take this many times as long before METIS counts as stuck.
PATIENCE = 20
LEAST_LIMIT_SECONDS = 60.0


def metis_parts(
    indptr_N: NDArray[np.integer],
    neighbour_E: NDArray[np.integer],
    weight_N: NDArray[np.int64],
    *,
    num_parts: int,
    seed: int,
    folder: Path,
) -> NDArray[np.int32] | str:
    """Return the part of each node by multilevel k-way partitioning, or why METIS gave none.

    Args:
        indptr_N, neighbour_E: rows of a symmetric adjacency without self loops or repeated neighbours; no row is
            empty.
        weight_N: of each node; parts get about equal sums.
        num_parts: at least 2.
        seed: of METIS; the same one gives the same parts.
        folder: where arrays for the child may be put meanwhile.

    Source: Karypis and Kumar, SIAM J. Sci. Comput. 20(1), 1998.
    """
    needed_bytes, free_bytes = BYTES_PER_EDGE * len(neighbour_E), psutil.virtual_memory().available
    if needed_bytes > free_bytes:
        return f"it needs about {needed_bytes / 1e9:.1f} GB of memory and {free_bytes / 1e9:.1f} GB are free"
    with tempfile.TemporaryDirectory(prefix=".metis-", dir=folder) as name:
        work = Path(name)
        np.save(work / "indptr.npy", indptr_N)
        np.save(work / "neighbour.npy", neighbour_E)
        np.save(work / "weight.npy", weight_N)
        reason = _run(child_command(work, num_parts, seed), time_limit_seconds(len(neighbour_E)))
        if reason:
            return reason
        return _checked_parts(work / "part.npy", num_nodes=len(weight_N), num_parts=num_parts)


def child_command(work: Path, num_parts: int, seed: int) -> list[str]:
    """Return the command line of the child; -P keeps this package's modules from shadowing others."""
    return [sys.executable, "-P", __file__, str(work), str(num_parts), str(seed)]


def time_limit_seconds(num_edges: int) -> float:
    """Return how long METIS may take for an adjacency with `num_edges` entries."""
    return LEAST_LIMIT_SECONDS + PATIENCE * SECONDS_PER_EDGE * num_edges


def _run(command: list[str], limit_seconds: float) -> str:
    """Run a command; return why it failed, or an empty text."""
    try:
        child = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_seconds,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"it was stopped after {limit_seconds:.3g} s"
    except OSError as error:
        return f"it could not be started: {error}"
    if child.returncode < 0:
        return f"it was ended by signal {-child.returncode} ({signal.strsignal(-child.returncode)})"
    if child.returncode > 0:
        lines = child.stdout.strip().splitlines() or ["it said nothing"]
        return f"it failed with status {child.returncode}: {lines[-1]}"
    return ""


def _checked_parts(path: Path, *, num_nodes: int, num_parts: int) -> NDArray[np.int32] | str:
    """Return the array that the child wrote, or what is wrong with it."""
    try:
        part_N: NDArray[np.int32] = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        return f"it left no parts: {error}"
    if part_N.shape != (num_nodes,) or part_N.min() < 0 or part_N.max() >= num_parts:
        return f"its parts are not {num_nodes} numbers below {num_parts}"
    return part_N


def _child(work: Path, num_parts: int, seed: int) -> None:
    """Partition the arrays in a folder and write the result beside them."""
    dtype = pymetis.zero_copy_dtype()
    indptr_N, neighbour_E, weight_N = (
        np.load(work / f"{name}.npy", mmap_mode="r").astype(dtype) for name in ("indptr", "neighbour", "weight")
    )
    _, part_N = pymetis.part_graph(
        num_parts,
        pymetis.CSRAdjacency(indptr_N, neighbour_E),
        vweights=weight_N,
        recursive=False,
        options=pymetis.Options(seed=seed),
    )
    np.save(work / "part.npy", np.asarray(part_N, dtype=np.int32))


if __name__ == "__main__":
    _child(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
