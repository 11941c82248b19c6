"""Work lists: the rows of a CSR structure cut into pieces that programs of a GPU kernel take."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from executor.attention.launch import Compiled
from simulator.specs.program import MAX_SHORT_EDGES

# Rows with more than MAX_SHORT_EDGES edges are gathered by programs of their own, several edges at a time; the others
# share a program, one edge of each row at a time.
# A longer row is cut, so that its pieces run side by side. The bounds and the number of pieces that a GPU should get:
# traces/attention_h200x1_202611/notes.md.
MIN_PIECE_EDGES, MAX_PIECE_EDGES = 128, 512
WANTED_PIECES = 10_560  # 132 multiprocessors x 20 resident programs x 4 rounds


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkList:
    """Pieces of rows: first the long rows' in the order of the rows, then the short rows, longest first.

    Attributes:
        row_I: int32, row of each piece.
        first_I: position of its first edge, int32, or int64 above 2^31 edges.
        count_I: int32, its edges.
        partial_I: int32 [num_long], place of a long piece's result among those to be merged; -1 for a whole row.
        num_long: pieces of long rows.
        split_row_S, split_first_S, split_count_S: int32, rows of several pieces: row, first partial result, how many.
        num_partials: partial results.
        compiled: kernels that ran on this list (`executor/attention/launch.py`).
    """

    row_I: Tensor
    first_I: Tensor
    count_I: Tensor
    partial_I: Tensor
    num_long: int
    split_row_S: Tensor
    split_first_S: Tensor
    split_count_S: Tensor
    num_partials: int
    compiled: Compiled = field(default_factory=dict, repr=False)

    @property
    def num_items(self) -> int:
        """Pieces."""
        return self.row_I.numel()


def build_work_list(
    indptr_N1: Tensor,
    *,
    max_short_edges: int = MAX_SHORT_EDGES,
    max_piece_edges: int | None = None,
    without_N: Tensor | None = None,
) -> WorkList:
    """Return the work list of rows, built on their device.

    Args:
        indptr_N1: int64 [rows + 1].
        max_piece_edges: edges of the longest piece; by default so many that the device gets enough pieces.
        without_N: bool, rows that are left out.
    """
    num_edges = int(indptr_N1[-1])
    if max_piece_edges is None:
        max_piece_edges = piece_edges(num_edges)
    first_N, count_N = indptr_N1[:-1], indptr_N1.diff()
    index_dtype = torch.int32 if num_edges < 2**31 else torch.int64
    is_long_N = count_N > max_short_edges
    is_short_N = ~is_long_N
    if without_N is not None:
        is_long_N, is_short_N = is_long_N & ~without_N, is_short_N & ~without_N
    long_L, short_K = is_long_N.nonzero().squeeze(1), is_short_N.nonzero().squeeze(1)
    order_K = torch.sort(count_N[short_K].to(torch.int16), descending=True, stable=True).indices
    short_K = short_K[order_K]

    pieces_L = (count_N[long_L] + max_piece_edges - 1) // max_piece_edges
    num_long = int(pieces_L.sum())
    begin_L = pieces_L.cumsum(0) - pieces_L
    owner_P = torch.arange(long_L.numel(), device=long_L.device).repeat_interleave(pieces_L, output_size=num_long)
    piece_P = torch.arange(num_long, device=long_L.device) - begin_L[owner_P]
    # Pieces of a row differ by at most one edge.
    edges_P, of_P = count_N[long_L][owner_P], pieces_L[owner_P]
    begin_P, end_P = edges_P * piece_P // of_P, edges_P * (piece_P + 1) // of_P

    is_split_L = pieces_L > 1
    split_count_S = pieces_L[is_split_L]
    partial_P = is_split_L[owner_P].cumsum(0) - 1
    return WorkList(
        row_I=torch.cat([long_L[owner_P], short_K]).to(torch.int32),
        first_I=torch.cat([first_N[long_L][owner_P] + begin_P, first_N[short_K]]).to(index_dtype),
        count_I=torch.cat([end_P - begin_P, count_N[short_K]]).to(torch.int32),
        partial_I=torch.where(is_split_L[owner_P], partial_P, -1).to(torch.int32),
        num_long=num_long,
        split_row_S=long_L[is_split_L].to(torch.int32),
        split_first_S=(split_count_S.cumsum(0) - split_count_S).to(torch.int32),
        split_count_S=split_count_S.to(torch.int32),
        num_partials=int(split_count_S.sum()),
    )


def even_work_list(num_rows: int, degree: int, device: torch.device) -> WorkList:
    """Return the work list of short rows with as many edges each, without a look at them."""
    rows_I = torch.arange(num_rows, dtype=torch.int32, device=device)
    none = rows_I[:0]
    return WorkList(
        row_I=rows_I,
        first_I=rows_I * degree if num_rows * degree < 2**31 else rows_I.long() * degree,
        count_I=torch.full_like(rows_I, degree),
        partial_I=none,
        num_long=0,
        split_row_S=none,
        split_first_S=none,
        split_count_S=none,
        num_partials=0,
    )


def piece_edges(num_edges: int) -> int:
    """Return how many edges a piece may have: a power of two."""
    wanted = max(num_edges // WANTED_PIECES, 1)
    return min(max(1 << (wanted - 1).bit_length(), MIN_PIECE_EDGES), MAX_PIECE_EDGES)
