"""Attention over edges in plain torch, for GPUs; it holds a few tensors of edges times width while it runs."""

import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph


def plain_attention(
    q_NHK: Tensor,
    k_MHK: Tensor,
    v_MHK: Tensor,
    graph: EdgeGraph,
    edge_bias_EH: Tensor | None,
    scale: float,
) -> Tensor:
    """Return what `edge_attention` does, by torch operations over all edges at once."""
    num_targets, num_heads, head_size = q_NHK.shape
    source_E, target_E = graph.source_E, graph.target_E
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
