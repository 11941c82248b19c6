"""The edges of a batch as each exchange numbers the rows that it brings."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph
from simulator.specs.plan import Exchange


@dataclass(frozen=True, kw_only=True)
class EdgeHalves:
    """The edges into own rows by where their sources are.

    Attributes:
        inner: from own rows, into all own rows.
        outer: from what an exchange brings, into the last own rows, which alone have such edges.
        inner_bucket_E, outer_bucket_E: buckets of their sources by degree; None where no bias needs them.
    """

    inner: EdgeGraph
    outer: EdgeGraph
    inner_bucket_E: Tensor | None
    outer_bucket_E: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Topology:
    """One rank's edges in global ids, and how the rows of its group are laid out.

    Attributes:
        graph_rank: of the group.
        rows_by_rank: global ids of the nodes that each rank owns, in their order there.
        halo_M: global ids of the halo, in order of arrival.
        indptr_N1, source_E: edges into own rows.
        bucket_N: of each node's degree; None where no bias needs it.
        rows_per_message, head_rows_per_message: as in `ExchangeLayout`.
        for_one_step: as in `build_rank_data`.
    """

    graph_rank: int
    rows_by_rank: list[np.ndarray]
    halo_M: np.ndarray
    indptr_N1: np.ndarray
    source_E: np.ndarray
    bucket_N: np.ndarray | None
    rows_per_message: int | None
    head_rows_per_message: int | None
    for_one_step: bool
    device: torch.device

    @cached_property
    def group_nodes(self) -> np.ndarray:
        """Nodes of all ranks as an exchange of heads brings them: message by message, and rank by rank."""
        order = by_message([len(rows) for rows in self.rows_by_rank], self.head_rows_per_message)
        nodes: np.ndarray = np.concatenate(self.rows_by_rank)[order]
        return nodes

    @property
    def own_nodes(self) -> np.ndarray:
        """Own nodes."""
        return self.rows_by_rank[self.graph_rank]

    def edge_graph(self, exchange: Exchange, group_edges: tuple[np.ndarray, np.ndarray] | None = None) -> EdgeGraph:
        """Return the edges that attention looks at with sources numbered as an exchange lays the rows out.

        Args:
            group_edges: row pointers and sources (global ids) of the edges into `group_nodes`, for an exchange of
                heads.
        """
        if group_edges is not None:
            assert exchange is Exchange.HEAD_ALL_TO_ALL, exchange
            indptr_N1, source_E = group_edges
            return self._graph(indptr_N1, source_E, [self.group_nodes], len(self.group_nodes))
        if exchange is Exchange.ALL_GATHER:
            return self._graph_of_gathered(self.indptr_N1, self.source_E)
        held = [self.own_nodes, self.halo_M]
        return self._graph(self.indptr_N1, self.source_E, held, len(self.own_nodes) + len(self.halo_M))

    def edge_halves(self, exchange: Exchange) -> EdgeHalves:
        """Return the edges into own rows by the owners of their sources.

        Own rows with edges from others must come last.
        """
        is_own_N = np.zeros(self._num_ids, dtype=np.bool_)
        is_own_N[self.own_nodes] = True
        is_outer_E = ~is_own_N[self.source_E]
        outer_indptr_N1 = np.concatenate([[0], np.cumsum(is_outer_E)])[self.indptr_N1]
        first = len(self.own_nodes) - int(np.count_nonzero(np.diff(outer_indptr_N1)))
        assert outer_indptr_N1[first] == 0, "rows with edges from others come last"
        inner_E, outer_E = self.source_E[~is_outer_E], self.source_E[is_outer_E]
        inner_indptr_N1 = self.indptr_N1 - outer_indptr_N1
        if exchange is Exchange.ALL_GATHER:
            outer = self._graph_of_gathered(outer_indptr_N1[first:], outer_E)
        else:
            outer = self._graph(outer_indptr_N1[first:], outer_E, [self.halo_M], len(self.halo_M))
        return EdgeHalves(
            inner=self._graph(inner_indptr_N1, inner_E, [self.own_nodes], len(self.own_nodes)),
            outer=outer,
            inner_bucket_E=self.buckets(inner_E),
            outer_bucket_E=self.buckets(outer_E),
        )

    def buckets(self, source_E: np.ndarray) -> Tensor | None:
        """Return the buckets of sources; None where no bias needs them."""
        return None if self.bucket_N is None else on_device(self.bucket_N[source_E], self.device)

    @property
    def _num_ids(self) -> int:
        """A bound of all global ids."""
        return 1 + max((int(nodes.max()) for nodes in [*self.rows_by_rank, self.source_E] if len(nodes)), default=0)

    def _graph_of_gathered(self, indptr_N1: np.ndarray, source_E: np.ndarray) -> EdgeGraph:
        """Return edges from what an all-gather brings: message by message, and as many rows of each rank."""
        num_ranks, max_rows = len(self.rows_by_rank), max(len(rows) for rows in self.rows_by_rank)
        each = max(self.rows_per_message or max_rows, 1)
        row_N = np.full(self._num_ids, -1, np.int64)
        for rank, nodes in enumerate(self.rows_by_rank):
            message, place = np.divmod(np.arange(len(nodes)), each)
            row_N[nodes] = message * each * num_ranks + rank * np.minimum(max_rows - message * each, each) + place
        return self._edge_graph(indptr_N1, row_N[source_E], num_ranks * max_rows)

    def _graph(
        self, indptr_N1: np.ndarray, source_E: np.ndarray, held: Sequence[np.ndarray], num_sources: int
    ) -> EdgeGraph:
        """Return edges from rows that hold some nodes one behind another."""
        row_N = np.full(self._num_ids, -1, np.int64)
        nodes = np.concatenate(held)
        row_N[nodes] = np.arange(len(nodes))
        return self._edge_graph(indptr_N1, row_N[source_E], num_sources)

    def _edge_graph(self, indptr_N1: np.ndarray, source_E: np.ndarray, num_sources: int) -> EdgeGraph:
        edges = EdgeGraph(
            indptr_N1=on_device(indptr_N1.astype(np.int64), self.device),
            source_E=on_device(source_E.astype(np.int32), self.device),
            num_sources=num_sources,
            is_sampled=self.for_one_step,
        )
        _ = edges.num_edges_of_long_rows  # counted here, and not in the first step that is traced
        return edges


def by_message(counts: Sequence[int] | np.ndarray, rows_per_message: int | None) -> np.ndarray:
    """Return the order that sorts rows, which lie rank by rank, by message and within it by rank.

    Args:
        counts: rows of each rank.
        rows_per_message: of each rank; None for all.
    """
    total = int(np.sum(counts))
    if rows_per_message is None:
        return np.arange(total)
    first = np.cumsum(counts) - np.asarray(counts)
    place = np.arange(total) - np.repeat(first, counts)
    return np.argsort(place // rows_per_message, kind="stable")


def on_device(array: np.ndarray, device: torch.device) -> Tensor:
    """Return a tensor of an array on a device."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    # From pinned memory a copy runs beside the host, in the order of the stream; torch frees the memory after it.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
