"""EdgeGraph: edges prepared for attention."""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class EdgeGraph:
    """Edges from source rows to target rows, prepared for attention.

    Attributes:
        indptr_N1: int64 [num_targets + 1]; the edges into target i are `indptr_N1[i] : indptr_N1[i + 1]`.
        source_E: int64 [num_edges], rows of the keys and values.
        num_sources: rows of the keys and values.
    """

    indptr_N1: Tensor
    source_E: Tensor
    num_sources: int

    @property
    def num_targets(self) -> int:
        """Rows of the queries."""
        return self.indptr_N1.numel() - 1

    @property
    def num_edges(self) -> int:
        """Edges."""
        return self.source_E.numel()

    def chunks(self, max_edges: int) -> list[tuple[slice, slice]]:
        """Return runs of rows with at most so many edges together, or one row with more, and their edges."""
        if max_edges not in self._chunks:
            self._chunks[max_edges] = list(_chunks(self.indptr_N1.tolist(), max_edges))
        return self._chunks[max_edges]

    @cached_property
    def _chunks(self) -> dict[int, list[tuple[slice, slice]]]:
        return {}

    @cached_property
    def target_E(self) -> Tensor:
        """Row of the query of each edge, int64 [num_edges], ascending."""
        rows_N = torch.arange(self.num_targets, device=self.indptr_N1.device)
        return rows_N.repeat_interleave(self.indptr_N1.diff(), output_size=self.num_edges)


def _chunks(indptr: list[int], max_edges: int) -> Iterator[tuple[slice, slice]]:
    first, num_rows = 0, len(indptr) - 1
    while first < num_rows:
        # The last row that still ends within the bound; at least one row.
        last = max(bisect.bisect_right(indptr, indptr[first] + max_edges) - 1, first + 1)
        yield slice(first, last), slice(indptr[first], indptr[last])
        first = last
