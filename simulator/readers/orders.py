"""Reads order files: the nodes in the order in which ranks hold them, as a plan has it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulator.errors import SpecError
from simulator.readers.stores import arrays_sha256, load_npy
from simulator.specs.order import NodeOrder, OrderSpec


def read_order(spec: OrderSpec, *, folder: Path, num_nodes: int) -> NDArray[np.int32] | None:
    """Return the nodes in order, as the plan has it; None for the natural order.

    Args:
        spec: the plan's.
        folder: the plan's.
        num_nodes: of the graph.

    Raises:
        SpecError: if the file is missing, damaged, of another graph or of another order.
    """
    if spec.kind is NodeOrder.NATURAL:
        return None
    order_N = load_order(folder / spec.path, num_nodes=num_nodes)
    sha256 = order_sha256(order_N)
    if sha256 != spec.sha256:
        rule = f"sha256 must be {spec.sha256} as in the plan"
        raise SpecError(f"{folder / spec.path}: {rule}, got {sha256}; plan again")
    return order_N


def order_sha256(order_N: NDArray[np.int32]) -> str:
    """Return the hash that `OrderSpec.sha256` holds."""
    return arrays_sha256({"order_N": order_N})


def load_order(path: Path, *, num_nodes: int) -> NDArray[np.int32]:
    """Return an array that must hold each node once."""
    order_N = load_npy(path)
    if order_N.dtype != np.int32 or order_N.shape != (num_nodes,):
        found = f"{order_N.dtype} of shape {list(order_N.shape)}"
        raise SpecError(f"{path}: order_N must be int32 of shape [{num_nodes}], got {found}; plan again for this graph")
    is_there_N = np.zeros(num_nodes, dtype=np.bool_)
    is_there_N[order_N[(order_N >= 0) & (order_N < num_nodes)]] = True
    if not is_there_N.all():
        missing = int(np.argmin(is_there_N))
        raise SpecError(f"{path}: order_N must hold each node once, got none that is {missing}; plan again")
    return np.array(order_N, dtype=np.int32)
