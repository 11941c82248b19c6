"""Candidates: a graph prepared for sampling, each row in the order of edge ids, whatever the order in memory is."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph
from executor.sampling.neighbours import Neighbours, pick
from executor.sampling.plan import FanOutPlan, plan_fan_out


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """Edges to choose among.

    Attributes:
        graph: the edges, each row by edge id.
        position_E: int64 [num_edges], their places in the graph that was prepared; None if they are the same.
        target_id_N: int64, global ids of the targets.
        source_id_M: int64, global ids of the sources.
        row_of_source_M: int64, row of each source among the targets; -1 for none.
    """

    graph: EdgeGraph
    position_E: Tensor | None
    target_id_N: Tensor
    source_id_M: Tensor
    row_of_source_M: Tensor
    _plans: dict[int, FanOutPlan] = field(default_factory=dict)
    _first_samples: dict[int, EdgeGraph] = field(default_factory=dict)  # by the identity of a plan's row pointers

    @cached_property
    def degree_N(self) -> Tensor:
        """Edges of each row, int64."""
        return self.graph.indptr_N1.diff()

    @cached_property
    def walk_row_M(self) -> Tensor:
        """Row of each source among the targets, where walks go on; -1 for none, or one without edges."""
        has_edges_M = (self.row_of_source_M >= 0) & (self.degree_N[self.row_of_source_M] > 0)
        return self.row_of_source_M.masked_fill(~has_edges_M, -1)

    @cached_property
    def source_row_N(self) -> Tensor:
        """Row of each target among the sources, int64; -1 for none."""
        row_N = torch.full_like(self.target_id_N, -1)
        has_row_M = self.row_of_source_M >= 0
        row_N[self.row_of_source_M[has_row_M]] = has_row_M.nonzero().squeeze(1)
        return row_N

    @cached_property
    def pairs(self) -> tuple[Tensor, Tensor]:
        """The edges' pairs (target << 32 | source), int64 ascending, and their positions, of equals the first first."""
        pair_E, position_E = torch.sort((self.graph.target_E.long() << 32) | self.graph.source_E, stable=True)
        return pair_E, position_E

    def edge_ids(self, position: Tensor) -> Tensor:
        """Return the ids of the edges at some positions."""
        return position if self.graph.edge_id_E is None else pick(self.graph.edge_id_E, position)

    def given_positions(self, position: Tensor) -> Tensor:
        """Return the places in the graph that was prepared of the edges at some positions."""
        return position if self.position_E is None else pick(self.position_E, position)

    def plan(self, fan_out: int) -> FanOutPlan:
        """Return the plan for a fan-out, made once."""
        if fan_out not in self._plans:
            self._plans[fan_out] = plan_fan_out(self.graph.indptr_N1[:-1], self.degree_N, fan_out)
        return self._plans[fan_out]

    def neighbours(self, indptr_N1: Tensor, position_K: Tensor, log_weight_K: Tensor | None = None) -> Neighbours:
        """Return the edges at some positions, by target, as neighbours.

        All samples of a plan have its row pointers, and share what attention prepares for them.
        """
        is_planned = any(plan.indptr_N1 is indptr_N1 for plan in self._plans.values())
        graph = EdgeGraph(
            indptr_N1=indptr_N1,
            source_E=self.graph.source_E.index_select(0, position_K),
            num_sources=self.graph.num_sources,
            edge_id_E=self.edge_ids(position_K),
            same_rows_as=self._first_samples.get(id(indptr_N1)) if is_planned else None,
            is_sampled=True,
        )
        if is_planned:
            self._first_samples.setdefault(id(indptr_N1), graph)
        return Neighbours(graph=graph, position_E=self.given_positions(position_K), log_weight_E=log_weight_K)


def prepare_candidates(
    graph: EdgeGraph,
    *,
    target_id_N: Tensor | None = None,
    source_id_M: Tensor | None = None,
    row_of_source_M: Tensor | None = None,
) -> Candidates:
    """Return a graph prepared for sampling, on its device.

    Args:
        graph: the edges; those of a row must have different ids.
        target_id_N: int64, global ids of the targets; by default their rows.
        source_id_M: int64, global ids of the sources; by default their rows.
        row_of_source_M: int64, row of each source among the targets, -1 for none; by default source i is target i and
            sources beyond the targets (a halo) are none.
    """
    position_E = _order_by_id(graph)
    if position_E is not None:
        assert graph.edge_id_E is not None, "edges without ids are in their order"
        graph = EdgeGraph(
            indptr_N1=graph.indptr_N1,
            source_E=graph.source_E[position_E],
            num_sources=graph.num_sources,
            edge_id_E=graph.edge_id_E[position_E],
        )
    rows_N = torch.arange(graph.num_targets, device=graph.device)
    rows_M = torch.arange(graph.num_sources, device=graph.device)
    if row_of_source_M is None:
        row_of_source_M = rows_M.masked_fill(rows_M >= graph.num_targets, -1)
    return Candidates(
        graph=graph,
        position_E=position_E,
        target_id_N=rows_N if target_id_N is None else target_id_N,
        source_id_M=rows_M if source_id_M is None else source_id_M,
        row_of_source_M=row_of_source_M,
    )


def _order_by_id(graph: EdgeGraph) -> Tensor | None:
    """Return the order that has each row by edge id; None if it is there."""
    if graph.edge_id_E is None:
        return None
    target_E = graph.target_E
    if bool(((graph.edge_id_E.diff() > 0) | (target_E.diff() > 0)).all()):
        return None
    order_E = torch.argsort(graph.edge_id_E)
    return order_E[torch.argsort(target_E[order_E], stable=True)]
