"""Windows: runs of 16 rows that share neighbours, whose attention gathers each neighbour once for all of them."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.attention.launch import Compiled
from executor.attention.work import WorkList, build_work_list

WINDOW_ROWS = 16
COLUMN_STEP = 16  # neighbours that a program takes at a time; windows are padded to multiples
# Windows run side by side, each in one program, so a few long ones or a handful of them at all would leave a GPU idle.
MAX_COLUMNS, MIN_WINDOWS = 1 << 15, 264
# Whether windows pay is looked up on some of them first, and on all only if they have this share of the edges.
SAMPLED_WINDOWS, MIN_EDGES_RATIO = 1024, 0.2
_EDGES_AT_ONCE = 1 << 24  # sorted together, 400 MB


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Which windows are taken: those that are faster than their rows by themselves.

    Attributes:
        min_reuse: edges for each distinct neighbour that a window must have.
        sure_reuse, spare_columns: it may have at most `edges / sure_reuse + spare_columns` distinct neighbours. Rows by
            themselves are slower the shorter they are, so that windows of few edges pay earlier.
    """

    min_reuse: float
    sure_reuse: float
    spare_columns: int


# From kernel times on eleven graphs on an H200: traces/attention-windows_h200x1_202611/notes.md.
RULE_OF_TARGETS = Rule(min_reuse=1.4, sure_reuse=2.0, spare_columns=60)
RULE_OF_SOURCES = Rule(min_reuse=2.8, sure_reuse=2.8, spare_columns=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class Windows:
    """Windows that are worth it, and the rows outside them.

    Attributes:
        window_K: int32, index of each window; it has the rows `WINDOW_ROWS * window_K` and after.
        first_K1: int64 [windows + 1], where the neighbours of each begin.
        column_C: int32, distinct neighbours of a window's rows, ascending; padded with the last one. Behind the last
            window there is one step more, which kernels load ahead and do not use.
        bits_C: int16, bit w says that row w of the window has an edge from the neighbour; zero for padding.
        num_edges: edges of all windows.
        rest: pieces of the rows outside windows.
        compiled: kernels that ran on these windows (`executor/attention/launch.py`).
    """

    window_K: Tensor
    first_K1: Tensor
    column_C: Tensor
    bits_C: Tensor
    num_edges: int
    rest: WorkList
    compiled: Compiled = field(default_factory=dict, repr=False)

    @property
    def num_windows(self) -> int:
        """Windows."""
        return self.window_K.numel()


def build_windows(
    indptr_N1: Tensor,
    source_E: Tensor,
    num_sources: int,
    *,
    rule: Rule,
    min_windows: int = MIN_WINDOWS,
) -> Windows | None:
    """Return the windows of rows that are worth it, built on their device; None if there are too few.

    A window in which an edge comes twice is not taken.

    Args:
        indptr_N1: int64 [rows + 1].
        source_E: int32, neighbours by row.
        rule: which windows are taken.
        min_windows: fewer than so many are not worth it.
    """
    num_windows = -(-(indptr_N1.numel() - 1) // WINDOW_ROWS)
    if num_windows < min_windows:
        return None
    finder = _Finder(indptr_N1, source_E, num_sources, rule)
    stride = -(-num_windows // SAMPLED_WINDOWS)
    if stride > 1:
        sampled_K = torch.arange(0, num_windows, stride, device=source_E.device)
        found = finder.find(sampled_K)
        if found.num_edges < MIN_EDGES_RATIO * max(int(finder.edges_of(sampled_K).sum()), 1):
            return None
    found = _joined([finder.find(some_K) for some_K in finder.batches(num_windows)])
    if found.window_K.numel() < min_windows:
        return None
    first_K1 = torch.zeros(found.window_K.numel() + 1, dtype=torch.int64, device=source_E.device)
    torch.cumsum(found.count_K, 0, out=first_K1[1:])
    is_taken_W = torch.zeros(num_windows, dtype=torch.bool, device=source_E.device)
    is_taken_W[found.window_K] = True
    is_taken_N = is_taken_W.repeat_interleave(WINDOW_ROWS)[: indptr_N1.numel() - 1]
    return Windows(
        window_K=found.window_K.to(torch.int32),
        first_K1=first_K1,
        column_C=F.pad(found.column_C, (0, COLUMN_STEP)),
        bits_C=F.pad(found.bits_C, (0, COLUMN_STEP)),
        num_edges=found.num_edges,
        rest=build_work_list(indptr_N1, without_N=is_taken_N),
    )


@dataclass(frozen=True, kw_only=True)
class _Found:
    """Windows that are worth it: index, padded columns of each, and all columns."""

    window_K: Tensor
    count_K: Tensor
    column_C: Tensor
    bits_C: Tensor
    num_edges: int


def _joined(parts: list[_Found]) -> _Found:
    return _Found(
        window_K=torch.cat([part.window_K for part in parts]),
        count_K=torch.cat([part.count_K for part in parts]),
        column_C=torch.cat([part.column_C for part in parts]),
        bits_C=torch.cat([part.bits_C for part in parts]),
        num_edges=sum(part.num_edges for part in parts),
    )


class _Finder:
    """Finds the distinct neighbours of windows by sorting pairs of window and neighbour."""

    def __init__(self, indptr_N1: Tensor, source_E: Tensor, num_sources: int, rule: Rule) -> None:
        self._indptr_N1, self._source_E = indptr_N1, source_E
        self._num_sources, self._rule = max(num_sources, 1), rule
        starts = torch.arange(0, indptr_N1.numel() - 1 + WINDOW_ROWS, WINDOW_ROWS, device=indptr_N1.device)
        self._edges_W = indptr_N1[starts.clamp(max=indptr_N1.numel() - 1)].diff()

    def edges_of(self, window_K: Tensor) -> Tensor:
        """Return the edges of windows."""
        return self._edges_W[window_K]

    def batches(self, num_windows: int) -> list[Tensor]:
        """Return all windows in order, cut so that each batch but one of a single window has a bounded size."""
        ends_W = self._edges_W.cumsum(0)
        batch_W = (ends_W - 1).clamp(min=0) // _EDGES_AT_ONCE
        sizes = torch.bincount(batch_W)
        windows = torch.arange(num_windows, device=ends_W.device)
        return [part for part in torch.split(windows, sizes.tolist()) if part.numel() > 0]

    def find(self, window_K: Tensor) -> _Found:
        """Return those of some windows, given in ascending order, that are worth it."""
        pair_C, bits_C, is_multiple_K = self._distinct(window_K)
        owner_C = pair_C // self._num_sources
        count_K = torch.bincount(owner_C, minlength=window_K.numel())
        edges_K = self.edges_of(window_K)
        rule = self._rule
        is_worth_it_K = count_K <= edges_K / rule.sure_reuse + rule.spare_columns
        is_worth_it_K &= (count_K <= edges_K / rule.min_reuse) & (count_K > 0) & (count_K <= MAX_COLUMNS)
        is_worth_it_K &= ~is_multiple_K
        begin_K = (count_K.cumsum(0) - count_K)[is_worth_it_K]
        count_K = count_K[is_worth_it_K]
        padded_K = (count_K + COLUMN_STEP - 1) // COLUMN_STEP * COLUMN_STEP
        owner_P = torch.arange(count_K.numel(), device=count_K.device).repeat_interleave(padded_K)
        place_P = torch.arange(owner_P.numel(), device=count_K.device) - (padded_K.cumsum(0) - padded_K)[owner_P]
        last_P = count_K[owner_P] - 1
        at_P = begin_K[owner_P] + torch.minimum(place_P, last_P)
        return _Found(
            window_K=window_K[is_worth_it_K],
            count_K=padded_K,
            column_C=(pair_C[at_P] % self._num_sources).to(torch.int32),
            bits_C=torch.where(place_P <= last_P, bits_C[at_P], 0).to(torch.int16),
            num_edges=int(edges_K[is_worth_it_K].sum()),
        )

    def _distinct(self, window_K: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return distinct pairs of (index among the windows, neighbour), rows' bits, windows with an edge twice."""
        device, num_rows = window_K.device, self._indptr_N1.numel() - 1
        row_R = (window_K[:, None] * WINDOW_ROWS + torch.arange(WINDOW_ROWS, device=device)).flatten()
        first_R = self._indptr_N1[row_R.clamp(max=num_rows)]
        degree_R = self._indptr_N1[(row_R + 1).clamp(max=num_rows)] - first_R
        slot_E = torch.arange(row_R.numel(), device=device).repeat_interleave(degree_R)
        edge_E = torch.arange(slot_E.numel(), device=device) + (first_R - (degree_R.cumsum(0) - degree_R))[slot_E]
        pair_E = slot_E // WINDOW_ROWS * self._num_sources + self._source_E[edge_E]
        key_E = torch.sort(pair_E * WINDOW_ROWS + slot_E % WINDOW_ROWS).values
        pair_E = key_E // WINDOW_ROWS
        is_new_E = torch.ones_like(pair_E, dtype=torch.bool)
        is_new_E[1:] = pair_E[1:] != pair_E[:-1]
        pair_C = pair_E[is_new_E]
        bits_C = torch.zeros_like(pair_C, dtype=torch.int32)
        bits_C.index_add_(0, is_new_E.cumsum(0) - 1, (1 << key_E % WINDOW_ROWS).to(torch.int32))
        is_multiple_K = torch.zeros(window_K.numel(), dtype=torch.bool, device=device)
        is_multiple_K[pair_E[1:][key_E[1:] == key_E[:-1]] // self._num_sources] = True
        return pair_C, bits_C, is_multiple_K
