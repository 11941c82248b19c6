"""The edges of smallest priority of each row.

Rows lie in matrices of similar rows (`plan.py`), so `torch.topk` finds the smallest of each, which spares sorting all
edges by target and priority.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from executor.sampling.candidates import Candidates
from executor.sampling.neighbours import pick
from executor.sampling.plan import FanOutPlan

# Of the 64 bits of a priority; fp32 numbers keep all of theirs. At least the bits that number the entries of a batch.
_COLUMN_BITS = 24


def keep_smallest(
    candidates: Candidates, fan_out: int, priority_of: Callable[[Tensor, Tensor], Tensor]
) -> tuple[FanOutPlan, Tensor, Tensor]:
    """Choose the edges of smallest priority of each row, ties by the smaller edge id.

    Args:
        priority_of: returns the fp64 priorities of edges, given their rows and positions. Of the 52 bits of mantissa
            28 count: those of fp32 numbers do.

    Returns:
        The plan, the positions [K] of the edges chosen, and fp64 [N] the smallest priority that a row left out,
        infinite where it kept all.
    """
    plan = candidates.plan(fan_out)
    position_K = plan.position_K.clone()
    left_out_N = torch.full(candidates.degree_N.shape, torch.inf, dtype=torch.float64, device=position_K.device)
    for batch in plan.batches:
        row_P = torch.arange(len(batch.rows.row_R), device=position_K.device)
        row_P = row_P.repeat_interleave(batch.width_R, output_size=batch.num_entries)
        column_P = torch.arange(batch.num_entries, device=position_K.device) - pick(batch.entry_R, row_P)
        is_padding_P = column_P >= pick(batch.rows.degree_R, row_P)
        position_P = pick(batch.rows.first_R, row_P) + column_P.masked_fill(is_padding_P, 0)
        # The column replaces the last bits of the priority: it breaks ties, and tells which edges are the smallest. A
        # row of more columns has a batch to itself, so the bits do not depend on which rows share a batch.
        column_mask = 2 ** max(_COLUMN_BITS, (batch.width - 1).bit_length()) - 1
        key_P = (_sortable(priority_of(pick(batch.rows.row_R, row_P), position_P)) & ~column_mask) | column_P
        smallest_RF = _smallest(key_P.masked_fill_(is_padding_P, 2**63 - 1), batch.shapes, fan_out + 1)
        left_out_N[batch.rows.row_R] = _from_sortable(smallest_RF[:, fan_out] & ~column_mask)
        column_RF = (smallest_RF[:, :fan_out] & column_mask).sort(dim=1).values
        batch.rows.put_chosen(position_K, column_RF)
    return plan, position_K, left_out_N


def _smallest(key_P: Tensor, shapes: tuple[tuple[int, int], ...], count: int) -> Tensor:
    """Return the smallest entries of each row of several matrices, ascending, [R, count]."""
    matrices = key_P.split([rows * width for rows, width in shapes])
    found = [
        torch.topk(matrix.view(shape), count, dim=1, largest=False).values
        for matrix, shape in zip(matrices, shapes, strict=True)
    ]
    return torch.cat(found)


def _sortable(numbers: Tensor) -> Tensor:
    """Return int64 numbers in the order of fp64 numbers, of which zero and minus zero are one."""
    bits = (numbers + 0.0).view(torch.int64)
    return bits ^ ((bits >> 63) & (2**63 - 1))


def _from_sortable(bits: Tensor) -> Tensor:
    """Return the fp64 numbers that `_sortable` made int64 numbers of."""
    return (bits ^ ((bits >> 63) & (2**63 - 1))).view(torch.float64)
