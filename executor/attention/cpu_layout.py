"""How the kernels of attention on CPUs are handed tensors, edges and memory; how they are compiled.

Python hands over arrays; kernels turn them into pointers, which, unlike arrays, are not counted: counting took a fifth
of the time. The arrays live as long as the call.
"""

# mypy: ignore-errors

import hashlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
from numba import njit

from executor.attention.cpu_vectors import address, shifted

BLOCK = 32  # edges at hand at once, whole vectors
NO_DROPOUT = -(2**31)

# Numba's cache on disk knows changes of a function's own file alone.
_SOURCES = b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("cpu_*.py")))
_SOURCES_HASH = hashlib.sha256(_SOURCES).hexdigest()[:12]

# A function that kernels call.
helper = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)


class Kernel:
    """A function that is compiled when first called with arguments of some kind, and kept on disk if it can be.

    Each kind has a cache of its own: two processes that compile different kinds at once would confuse them in one.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._function, self._compiled = function, {}

    def of_kind(self, kind: str) -> Callable[..., None]:
        """Return the function for arguments whose types this name stands for."""
        if kind not in self._compiled:
            self._compiled[kind] = _compiled(self._function, f"{self._function.__name__}_{kind}_{_SOURCES_HASH}")
        return self._compiled[kind]


def _compiled(function, name):
    options = {"nogil": True, "error_model": "numpy", "no_cfunc_wrapper": True}
    function = FunctionType(function.__code__, function.__globals__)
    function.__qualname__ = name  # of the cache's files
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # there is no folder that can be written to
        return njit(**options)(function)


class Rows(NamedTuple):
    """Rows of a tensor [rows, heads, head size] that begin a stride apart.

    Attributes:
        flat: a flat array; within kernels a pointer to its numbers.
        width: heads times head size.
    """

    flat: Any
    stride: int
    width: int


class Shape(NamedTuple):
    """Heads: those of keys, queries of each, their size, and the lanes of vectors along it.

    Attributes:
        lanes: `LANES16` or `LANES8` where they divide the head size, else None, for 8 lanes under a mask. Numba
            compiles other code for each.
    """

    num_kv_heads: int
    group: int
    head_size: int
    lanes: Any


class Edges(NamedTuple):
    """Edges by near row; arrays, within kernels pointers.

    Attributes:
        indptr: pointers of the near rows.
        far: the other ends.
        position: positions among the edges by target; None where the edges are in that order.
        count: of edges.
    """

    indptr: Any
    far: Any
    position: Any
    count: int


class Inputs(NamedTuple):
    """What attention is over, and what makes its weights.

    Attributes:
        q, k, v, features: `Rows`; no features are None.
        bias: [E, H].
        edge_id: int64 [E].
        has_bias, has_edge_id: whether these are there; where not, nothing is added, and positions are ids.
        scale: of products of queries and keys.
        key_word: of dropout, uint32.
        lowest_kept: bits of a weight below it say that it is dropped; none are below `NO_DROPOUT`.
        kept_factor: of the weights that are kept.
    """

    q: Any
    k: Any
    v: Any
    features: Any
    bias: Any
    edge_id: Any
    has_bias: bool
    has_edge_id: bool
    scale: Any
    key_word: Any
    lowest_kept: int
    kept_factor: Any


class Block(NamedTuple):
    """Pointers to the edges at hand: rows at both ends, positions by target, what is needed later, numbers per head.

    Attributes:
        upcoming, upcoming_edge: far rows and positions that are needed `cpu_blocks.AHEAD` edges later.
        at_head, at_kv: columns at which a head begins, and its key head.
        weights: scores, then weights.
        kept: weights after dropout; without dropout the same as `weights`.
        grads: gradients of the weights, then of what they were made of.
        state: sums of the row at hand.
    """

    near: Any
    far: Any
    upcoming: Any
    edge: Any
    upcoming_edge: Any
    at_head: Any
    at_kv: Any
    weights: Any
    kept: Any
    grads: Any
    state: Any


class Scratch(NamedTuple):
    """Memory of a thread: int64 [5 * BLOCK + 2 * H], fp32 [3 * BLOCK * P and a row's state]."""

    rows: Any
    numbers: Any


def new_scratch(num_heads: int, state_size: int) -> Scratch:
    """Return memory for a thread."""
    size = 3 * BLOCK * (-(-num_heads // 8) * 8) + state_size
    return Scratch(rows=np.zeros(5 * BLOCK + 2 * num_heads, np.int64), numbers=np.zeros(size, np.float32))


@helper
def padded(size, count):
    """Return a size rounded up to whole vectors."""
    return (size + count - 1) // count * count


@helper
def pointed(rows):
    """Return rows with a pointer in place of their array."""
    if rows is None:
        return None
    return Rows(address(rows.flat), rows.stride, rows.width)


@helper
def _pointed_position(positions):
    if positions is None:
        return None
    return address(positions)


@helper
def pointed_edges(edges):
    """Return edges with pointers in place of their arrays."""
    return Edges(address(edges.indptr), address(edges.far), _pointed_position(edges.position), edges.count)


@helper
def pointed_inputs(inputs):
    """Return inputs with pointers in place of their arrays."""
    return Inputs(
        pointed(inputs.q),
        pointed(inputs.k),
        pointed(inputs.v),
        pointed(inputs.features),
        address(inputs.bias),
        address(inputs.edge_id),
        inputs.has_bias,
        inputs.has_edge_id,
        inputs.scale,
        inputs.key_word,
        inputs.lowest_kept,
        inputs.kept_factor,
    )


@helper
def block_of(scratch, shape, lowest_kept):
    """Return the block that lies in a thread's memory."""
    num_heads = shape.num_kv_heads * shape.group
    rows, numbers, size = address(scratch.rows), address(scratch.numbers), BLOCK * padded(num_heads, 8)
    at_head, at_kv = shifted(rows, 5 * BLOCK), shifted(rows, 5 * BLOCK + num_heads)
    for head in range(num_heads):
        at_head[head], at_kv[head] = head * shape.head_size, head // shape.group * shape.head_size
    return Block(
        rows,
        shifted(rows, BLOCK),
        shifted(rows, 2 * BLOCK),
        shifted(rows, 3 * BLOCK),
        shifted(rows, 4 * BLOCK),
        at_head,
        at_kv,
        numbers,
        shifted(numbers, size if lowest_kept > NO_DROPOUT else 0),
        shifted(numbers, 2 * size),
        shifted(numbers, 3 * size),
    )
