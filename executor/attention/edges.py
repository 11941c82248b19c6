"""Attention over the edges of a graph: each node attends to the sources of its incoming edges.

This is the plain torch form; it holds a few tensors of edges times width while it runs.
"""

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

    @cached_property
    def target_E(self) -> Tensor:
        """Row of the query of each edge, int64 [num_edges], ascending."""
        rows_N = torch.arange(self.num_targets, device=self.indptr_N1.device)
        return rows_N.repeat_interleave(self.indptr_N1.diff(), output_size=self.num_edges)


def edge_attention(
    q_NHK: Tensor,
    k_MHK: Tensor,
    v_MHK: Tensor,
    graph: EdgeGraph,
    *,
    edge_bias_EH: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the attention of each target over the sources of its incoming edges, [N, H, K].

    Scores, softmax and sums are fp32 whatever the inputs are. A target without edges gets zeros.

    Args:
        q_NHK: queries of the targets.
        k_MHK: keys of the sources; M may exceed N where a part has a halo.
        v_MHK: values of the sources.
        graph: the edges.
        edge_bias_EH: added to the scores of each edge and head.
        scale: factor of the products of queries and keys; by default 1 / sqrt(K).
    """
    num_targets, num_heads, head_size = q_NHK.shape
    source_E, target_E = graph.source_E, graph.target_E
    scale = head_size**-0.5 if scale is None else scale
    products_EHK = q_NHK.index_select(0, target_E) * k_MHK.index_select(0, source_E)
    scores_EH = products_EHK.sum(-1, dtype=torch.float32) * scale
    if edge_bias_EH is not None:
        scores_EH = scores_EH + edge_bias_EH
    weights_EH = _exponentials(scores_EH, target_E, num_targets)
    sums_NH = weights_EH.new_zeros(num_targets, num_heads).index_add(0, target_E, weights_EH)
    messages_EHK = weights_EH.unsqueeze(-1) * v_MHK.index_select(0, source_E)
    messages_ED = messages_EHK.reshape(-1, num_heads * head_size)
    totals_ND = messages_ED.new_zeros(num_targets, num_heads * head_size).index_add(0, target_E, messages_ED)
    # Every target with an edge has a weight of one at its largest score, so the bound changes only empty sums.
    out_NHK = totals_ND.view(num_targets, num_heads, head_size) / sums_NH.clamp(min=0.5).unsqueeze(-1)
    return out_NHK.to(q_NHK.dtype)


def _exponentials(scores_EH: Tensor, target_E: Tensor, num_targets: int) -> Tensor:
    """Return exp(score - largest score of the same target); the shift cancels in the softmax."""
    with torch.no_grad():
        index_EH = target_E.unsqueeze(1).expand_as(scores_EH)
        largest_NH = scores_EH.new_full((num_targets, scores_EH.shape[1]), -torch.inf)
        largest_NH.scatter_reduce_(0, index_EH, scores_EH, "amax")
        shift_EH = largest_NH.index_select(0, target_E)
    return torch.exp(scores_EH - shift_EH)
