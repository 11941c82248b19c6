"""What the layers of a model attend to instead of the batch's edges: sampled neighbours, or all nodes.

`ForwardSettings.attend` takes one of these. They serve a single rank that holds all nodes of a batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from executor.attention.edges import edge_attention
from executor.attention.full import GraphBatch, full_attention
from executor.attention.graph import EdgeGraph
from executor.attention.structure import StructureTarget, add_loss, structure_loss
from executor.sampling.candidates import prepare_candidates
from executor.sampling.neighbours import Neighbours, invented_neighbours, row_pointers
from executor.sampling.sampler import NeighbourSampler, SamplerInputs
from simulator.specs.sampling import NeighbourSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The rows of a batch, as attention of any kind needs them.

    Attributes:
        edges: the batch's edges, sources and targets the same rows.
        node_N: global ids, int64.
        degree_N: edges into each node in the whole graph, int64.
        degree_bucket_N: of the model's bias by degree; None for models without.
        structure_weight: of the loss term that ties attention to the edges, uniformly; 0 for none.
    """

    edges: EdgeGraph
    node_N: Tensor
    degree_N: Tensor
    degree_bucket_N: Tensor | None
    num_heads: int
    seed: int
    num_graph_nodes: int
    structure_weight: float = 0.0

    def heads_of(self, q_ND: Tensor, kv_N2D: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values by head, [N, H, K]."""
        q_NHK = q_ND.unflatten(1, (self.num_heads, -1))
        k_NHK, v_NHK = kv_N2D.unflatten(1, (2, self.num_heads, -1)).unbind(1)
        return q_NHK, k_NHK, v_NHK

    def key_bias_NH(self, weights: Mapping[str, Tensor]) -> Tensor | None:
        """Return what a layer adds to the scores of each node as a source."""
        return None if self.degree_bucket_N is None else weights["edge_bias"].index_select(0, self.degree_bucket_N)

    def edge_bias_EH(self, weights: Mapping[str, Tensor], neighbours: Neighbours) -> Tensor | None:
        """Return what is added to the scores of neighbours: a layer's bias, and their log weights."""
        bias_NH, log_weight_E = self.key_bias_NH(weights), neighbours.log_weight_E
        bias_EH = None if bias_NH is None else bias_NH.index_select(0, neighbours.graph.source_E)
        if log_weight_E is None:
            return bias_EH
        log_weight_EH = log_weight_E.unsqueeze(1).expand(-1, self.num_heads)
        return log_weight_EH if bias_EH is None else bias_EH + log_weight_EH

    def attend_over(
        self,
        neighbours: Neighbours,
        own: Neighbours | None,
        weights: Mapping[str, Tensor],
        q_ND: Tensor,
        kv_N2D: Tensor,
    ) -> Tensor:
        """Return a layer's attention over neighbours, [N, D], with the loss term if there is one.

        Args:
            own: those of the neighbours that are edges of the graph, for the loss term; None without it.
        """
        q_NHK, k_NHK, v_NHK = self.heads_of(q_ND, kv_N2D)
        bias_EH = self.edge_bias_EH(weights, neighbours)
        out_NHK, lse_NH = edge_attention(q_NHK, k_NHK, v_NHK, neighbours.graph, edge_bias=bias_EH, return_lse=True)
        if own is not None and torch.is_grad_enabled():
            target, own_bias_EH = StructureTarget(graph=own.graph), self.edge_bias_EH(weights, own)
            loss = structure_loss(q_NHK, k_NHK, lse_NH, target, edge_bias=own_bias_EH)
            out_NHK = add_loss(out_NHK, self.structure_weight * loss)
        flat_ND: Tensor = out_NHK.flatten(1)
        return flat_ND


class Attention(Protocol):
    """Attention of a kind, one step after another."""

    num_edges: int

    def begin(self, step: int) -> None:
        """Begin a forward pass; `num_edges`, the pairs attended to in it, is 0 again."""

    def __call__(self, weights: Mapping[str, Tensor], q_ND: Tensor, kv_N2D: Tensor) -> Tensor:
        """Return the attention of the next layer, [N, D]."""


class SampledAttention:
    """Attends to neighbours that are drawn anew in each step, by (seed, step), and alike on all layers.

    Kinds that look at queries and keys choose on each layer.
    """

    def __init__(self, rows: Rows, spec: NeighbourSpec) -> None:
        self.num_edges = 0
        self._rows, self._spec = rows, spec
        candidates = prepare_candidates(rows.edges, target_id_N=rows.node_N, source_id_M=rows.node_N)
        inputs = SamplerInputs(seed=rows.seed, num_nodes=rows.num_graph_nodes, source_degree_M=rows.degree_N)
        self._sampler = NeighbourSampler([spec], candidates, inputs)
        self._step = 0
        self._chosen: tuple[Neighbours, Neighbours | None] | None = None

    def begin(self, step: int) -> None:
        """Begin a forward pass with new neighbours."""
        self.num_edges, self._step, self._chosen = 0, step, None

    def __call__(self, weights: Mapping[str, Tensor], q_ND: Tensor, kv_N2D: Tensor) -> Tensor:
        """Return the attention of the next layer, [N, D]."""
        if self._chosen is None or self._spec.needs_scores:
            key = torch.tensor([self._rows.seed, self._step], device=q_ND.device)
            q_NHK, k_NHK, _ = self._rows.heads_of(q_ND.detach(), kv_N2D.detach())
            neighbours = self._sampler.sample(key, q_NHK, k_NHK)
            self._chosen = neighbours, _own_edges(neighbours) if self._rows.structure_weight > 0 else None
        neighbours, own = self._chosen
        self.num_edges += neighbours.graph.num_edges
        return self._rows.attend_over(neighbours, own, weights, q_ND, kv_N2D)


class FullAttention:
    """Attends to all nodes of the batch, by torch's own attention; over pairs as edges where a loss term needs them."""

    def __init__(self, rows: Rows) -> None:
        self.num_edges = 0
        self._rows = rows
        num_nodes = len(rows.node_N)
        self._graphs = GraphBatch(graph_indptr_B1=torch.tensor([0, num_nodes], device=rows.node_N.device))
        position_E = torch.arange(rows.edges.num_edges, device=rows.node_N.device)
        self._own = Neighbours(graph=rows.edges, position_E=position_E)

    @cached_property
    def _pairs(self) -> Neighbours:
        return invented_neighbours(self._graphs.all_pairs)

    def begin(self, _: int) -> None:
        """Begin a forward pass."""
        self.num_edges = 0

    def __call__(self, weights: Mapping[str, Tensor], q_ND: Tensor, kv_N2D: Tensor) -> Tensor:
        """Return the attention of the next layer, [N, D]."""
        rows = self._rows
        self.num_edges += self._graphs.num_pairs
        if rows.structure_weight > 0 and torch.is_grad_enabled():
            return rows.attend_over(self._pairs, self._own, weights, q_ND, kv_N2D)
        bias_NH = rows.key_bias_NH(weights)
        return full_attention(*rows.heads_of(q_ND, kv_N2D), self._graphs, key_bias_NH=bias_NH).flatten(1)


def attention_of(rows: Rows, spec: NeighbourSpec | None) -> Attention:
    """Return attention over neighbours of a kind, or full attention for None."""
    return FullAttention(rows) if spec is None else SampledAttention(rows, spec)


def _own_edges(neighbours: Neighbours) -> Neighbours:
    """Return those neighbours that are edges of the graph."""
    is_own_E = neighbours.position_E >= 0
    if bool(is_own_E.all()):
        return neighbours
    graph, log_weight_E = neighbours.graph, neighbours.log_weight_E
    own_graph = EdgeGraph(
        indptr_N1=row_pointers(is_own_E)[graph.indptr_N1],
        source_E=graph.source_E[is_own_E],
        num_sources=graph.num_sources,
        edge_id_E=neighbours.edge_id_E[is_own_E],
    )
    return Neighbours(
        graph=own_graph,
        position_E=neighbours.position_E[is_own_E],
        log_weight_E=None if log_weight_E is None else log_weight_E[is_own_E],
    )
