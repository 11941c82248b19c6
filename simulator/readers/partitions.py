"""Reads partition files: the part of each node, as a plan has it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulator.errors import SpecError
from simulator.readers.stores import arrays_sha256, load_npy
from simulator.specs.plan import PartitionSpec


def read_partition(spec: PartitionSpec, *, folder: Path, num_nodes: int) -> NDArray[np.int32]:
    """Return the part of each node, as the plan has it.

    Args:
        spec: the plan's.
        folder: the plan's.
        num_nodes: of the graph.

    Raises:
        SpecError: if the file is missing, damaged, of another graph or of another cut.
    """
    if spec.path:
        part_N = load_parts(folder / spec.path, num_nodes=num_nodes, num_parts=spec.num_parts)
    else:
        part_N = np.zeros(num_nodes, dtype=np.int32)
    sha256 = parts_sha256(part_N)
    if sha256 != spec.sha256:
        where = folder / spec.path if spec.path else f"one part of {num_nodes} nodes"
        raise SpecError(f"{where}: sha256 must be {spec.sha256} as in the plan, got {sha256}; plan again")
    return part_N


def parts_sha256(part_N: NDArray[np.int32]) -> str:
    """Return the hash that `PartitionSpec.sha256` holds."""
    return arrays_sha256({"part_N": part_N})


def load_parts(path: Path, *, num_nodes: int, num_parts: int) -> NDArray[np.int32]:
    """Return a node-to-part array, checked against the numbers of nodes and parts."""
    part_N = load_npy(path)
    if part_N.dtype != np.int32 or part_N.shape != (num_nodes,):
        found = f"{part_N.dtype} of shape {list(part_N.shape)}"
        raise SpecError(f"{path}: part_N must be int32 of shape [{num_nodes}], got {found}; plan again for this graph")
    if part_N.min() < 0 or part_N.max() >= num_parts:
        found = f"{part_N.min()} to {part_N.max()}"
        raise SpecError(f"{path}: part_N must be within 0 and {num_parts - 1}, got {found}; plan again")
    return np.array(part_N, dtype=np.int32)
