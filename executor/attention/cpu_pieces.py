"""Rows cut into pieces of about as many edges, for the threads of attention on CPUs."""

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from executor.attention.graph import EdgeGraph, Transpose

# Edges of a piece, about; longer rows are cut. A piece takes 0.1 to 0.5 ms, a call of a kernel 0.02 ms.
PIECE_EDGES = 2048
# What a row costs beside its edges, in edges.
_ROW_EDGES = 4

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Rows cut into pieces of about as many edges.

    Attributes:
        table: int64 [pieces, 5]: first row, last row, first edge, last edge, and the partial result that is left
            where a row was cut, else -1.
        split_rows: int64 [rows that were cut, 3]: row, first and last partial result.
    """

    table: Array
    split_rows: Array

    @property
    def num_partials(self) -> int:
        """Partial results."""
        return int(self.table[:, 4].max(initial=-1)) + 1


def cut_rows(indptr_N1: Array, piece_edges: int = PIECE_EDGES) -> Pieces:
    """Return the pieces of rows with these pointers, in order."""
    num_rows, degree_N = len(indptr_N1) - 1, np.diff(indptr_N1)
    if num_rows == 0:
        return Pieces(table=np.zeros((0, 5), np.int64), split_rows=np.zeros((0, 3), np.int64))
    is_long_N = degree_N > piece_edges
    share_N = np.cumsum(np.where(is_long_N, 0, degree_N + _ROW_EDGES)) // piece_edges
    starts_N = np.ones(num_rows, np.bool_)
    starts_N[1:] = is_long_N[1:] | is_long_N[:-1] | (share_N[1:] != share_N[:-1])
    first_row_R = np.flatnonzero(starts_N)  # of runs of rows: a long row is a run of its own
    last_row_R = np.append(first_row_R[1:], num_rows)
    parts_R = np.where(is_long_N[first_row_R], -(-degree_N[first_row_R] // piece_edges), 1)
    run_P = np.repeat(np.arange(len(first_row_R)), parts_R)
    part_P, parts_P = np.arange(len(run_P)) - (np.cumsum(parts_R) - parts_R)[run_P], parts_R[run_P]
    first_edge_P, last_edge_P = indptr_N1[first_row_R][run_P], indptr_N1[last_row_R][run_P]
    edges_P = last_edge_P - first_edge_P
    partial_P = np.where(parts_P > 1, np.cumsum(parts_P > 1) - 1, -1)
    bounds = (first_edge_P + edges_P * part_P // parts_P, first_edge_P + edges_P * (part_P + 1) // parts_P)
    table = np.stack([first_row_R[run_P], last_row_R[run_P], *bounds, partial_P], axis=1)
    parts_S = parts_R[parts_R > 1]
    last_S = np.cumsum(parts_S)
    split_rows = np.stack([first_row_R[parts_R > 1], last_S - parts_S, last_S], axis=1)
    return Pieces(table=table.astype(np.int64), split_rows=split_rows.astype(np.int64))


_PIECES: weakref.WeakKeyDictionary[EdgeGraph | Transpose, Pieces] = weakref.WeakKeyDictionary()


def pieces_of(graph: EdgeGraph | Transpose) -> Pieces:
    """Return the pieces of a graph, made once."""
    if graph not in _PIECES:
        indptr = graph.indptr_N1 if isinstance(graph, EdgeGraph) else graph.indptr_M1
        _PIECES[graph] = cut_rows(indptr.numpy())
    return _PIECES[graph]
