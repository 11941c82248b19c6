"""FanOutPlan: what a sample of at most so many edges a row looks like before it is drawn.

How many edges a row keeps depends on its degree alone. So the rows' places in a sample, and which rows are so alike
that they fit in one matrix, are found once; in a step the host never waits for the device.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from executor.sampling.neighbours import row_pointers

# Entries of a batch of matrices, which bounds the memory of a step: ten times 16 MB or 64 MB. glibc maps blocks above
# 32 MB anew each time, which costs more than a batch; a GPU is asked for fewer, larger operations.
BATCH_ENTRIES = {"cpu": 2**21, "cuda": 2**23}


@dataclass(frozen=True, kw_only=True, eq=False)
class LongRows:
    """Rows that have more edges than they keep, by degree.

    Attributes:
        row_R: int64.
        first_R: position of the row's first edge, int64.
        degree_R: int64.
        kept_first_R: position of its first edge in the sample, int64.
    """

    row_R: Tensor
    first_R: Tensor
    degree_R: Tensor
    kept_first_R: Tensor

    def part(self, first: int, end: int) -> "LongRows":
        """Return the rows from one place to before another."""
        rows = slice(first, end)
        return LongRows(
            row_R=self.row_R[rows],
            first_R=self.first_R[rows],
            degree_R=self.degree_R[rows],
            kept_first_R=self.kept_first_R[rows],
        )

    def put_chosen(self, position_K: Tensor, column_RF: Tensor) -> None:
        """Write the positions of chosen edges, given by their places in their rows, to their places in a sample."""
        slot_F = torch.arange(column_RF.shape[1], device=column_RF.device)
        slot_RF = self.kept_first_R.unsqueeze(1) + slot_F
        position_K.scatter_(0, slot_RF.flatten(), (self.first_R.unsqueeze(1) + column_RF).flatten())


@dataclass(frozen=True, kw_only=True, eq=False)
class RowBatch:
    """Long rows as those of one matrix after another, in which the ends of shorter rows are padding.

    Attributes:
        shapes: rows and width of each matrix; a width is the largest degree among its rows.
        width_R: width of the row's matrix, int64.
        entry_R: place of its first entry among those of all matrices, int64.
    """

    rows: LongRows
    shapes: tuple[tuple[int, int], ...]
    width_R: Tensor
    entry_R: Tensor

    @property
    def num_entries(self) -> int:
        """Entries of all matrices."""
        return sum(rows * width for rows, width in self.shapes)

    @property
    def width(self) -> int:
        """The largest width."""
        return self.shapes[-1][1]


@dataclass(frozen=True, kw_only=True, eq=False)
class FanOutPlan:
    """The places of a sample's edges.

    Attributes:
        fan_out: edges that a row keeps at most.
        indptr_N1: of the sample.
        position_K: int64 [edges of the sample], positions of the first edges of each row: right where a row keeps all.
        long: the other rows.
    """

    fan_out: int
    indptr_N1: Tensor
    position_K: Tensor
    long: LongRows

    @cached_property
    def batches(self) -> tuple[RowBatch, ...]:
        """The long rows as matrices."""
        return _row_batches(self.long)

    @property
    def num_kept(self) -> int:
        """Edges of the sample."""
        return self.position_K.numel()


def plan_fan_out(first_N: Tensor, degree_N: Tensor, fan_out: int) -> FanOutPlan:
    """Return the plan of samples of at most `fan_out` edges a row, on the rows' device.

    Args:
        first_N, degree_N: position of each row's first edge, and the row's edges, int64.
    """
    kept_N = degree_N.clamp(max=fan_out)
    kept_indptr_N1 = row_pointers(kept_N)
    num_kept = int(kept_indptr_N1[-1])
    shift_K = (first_N - kept_indptr_N1[:-1]).repeat_interleave(kept_N, output_size=num_kept)
    row_L = (degree_N > fan_out).nonzero().squeeze(1)
    row_L = row_L[torch.sort(degree_N[row_L], stable=True).indices]
    long = LongRows(row_R=row_L, first_R=first_N[row_L], degree_R=degree_N[row_L], kept_first_R=kept_indptr_N1[row_L])
    return FanOutPlan(
        fan_out=fan_out,
        indptr_N1=kept_indptr_N1,
        position_K=torch.arange(num_kept, device=first_N.device) + shift_K,
        long=long,
    )


def _row_batches(long: LongRows) -> tuple[RowBatch, ...]:
    device = long.row_R.device
    batches, first = [], 0
    for shapes in _batches(_matrices(long.degree_R), BATCH_ENTRIES[device.type]):
        end = first + sum(rows for rows, _ in shapes)
        width_R = torch.cat([torch.full((rows,), width, device=device) for rows, width in shapes])
        entry_R = width_R.cumsum(0) - width_R
        batches.append(RowBatch(rows=long.part(first, end), shapes=shapes, width_R=width_R, entry_R=entry_R))
        first = end
    return tuple(batches)


def _matrices(degree_L: Tensor) -> list[tuple[int, int]]:
    """Return rows and width of matrices for rows of ascending degrees: the largest is at most 1.5 times the least."""
    num_rows = len(degree_L)
    matrices, first = [], 0
    while first < num_rows:
        bound = 3 * int(degree_L[first]) // 2
        end = int(torch.searchsorted(degree_L, bound, right=True))
        matrices.append((end - first, int(degree_L[end - 1])))
        first = end
    return matrices


def _batches(matrices: list[tuple[int, int]], max_entries: int) -> list[tuple[tuple[int, int], ...]]:
    """Return matrices, split by rows, in batches of at most so many entries, or of a single row."""
    batches: list[tuple[tuple[int, int], ...]] = []
    batch: list[tuple[int, int]] = []
    free = max_entries
    for rows, width in matrices:
        while rows > 0:
            taken = min(rows, free // width if batch else max(1, free // width))
            if taken > 0:
                batch.append((taken, width))
                rows -= taken
                free -= taken * width
            if rows > 0:
                batches.append(tuple(batch))
                batch, free = [], max_entries
    return [*batches, tuple(batch)] if batch else batches
