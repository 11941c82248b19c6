"""A loss term that ties attention to the graph's structure: how far it is from a given distribution over edges.

With p_ij the weights of row i's attention, s_ij = scale q_i . k_j + b_ij its scores and t_ij the target's weights,

    KL(t_i | p_i) = sum_j t_ij log t_ij - sum_j t_ij log p_ij        and  log p_ij = s_ij - lse_i, so
                  = -entropy(t_i) + lse_i - scale q_i . (sum_j t_ij k_j) - sum_j t_ij b_ij.

So a row needs its log-sum-exp, which `edge_attention` returns with gradients, and the mean key of its target. That is
itself an attention: queries of zero, the logs of the target's weights as bias, the keys as values. Nothing of edges
times width is allocated, on no device, forward or backward.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from executor.attention.edges import edge_attention
from executor.attention.graph import EdgeGraph


@dataclass(frozen=True, kw_only=True, eq=False)
class StructureTarget:
    """A distribution over the intended edges of each row, which are to be among those that attention runs over.

    Neighbours that random walks visit are one as they come: their graph, and the logs of their visits.

    Attributes:
        graph: the intended edges; rows without any are left out of the loss.
        log_weight_E: fp32 [num_edges], finite: logs of the edges' weights, which need not sum to one in a row; None for
            equal weights.
    """

    graph: EdgeGraph
    log_weight_E: Tensor | None = None

    def __post_init__(self) -> None:
        if self.log_weight_E is not None and self.log_weight_E.shape != (self.graph.num_edges,):
            found = list(self.log_weight_E.shape)
            raise ValueError(f"log_weight must have the shape [{self.graph.num_edges}] of the edges, got {found}")

    @cached_property
    def has_edges_N(self) -> Tensor:
        """Which rows count."""
        return self.graph.indptr_N1.diff() > 0

    @cached_property
    def num_rows(self) -> int:
        """Rows that count."""
        return int(self.has_edges_N.sum())

    @cached_property
    def entropy_N(self) -> Tensor:
        """Entropy of each row's weights in nats, fp32; 0 for rows without edges."""
        degree_N = self.graph.indptr_N1.diff()
        if self.log_weight_E is None:
            return degree_N.clamp(min=1).log()
        log_weight_E = self.log_weight_E.double()
        weight_E = log_weight_E.exp()
        sum_N, moment_N = (
            torch.segment_reduce(x_E, "sum", offsets=self.graph.indptr_N1)
            for x_E in (weight_E, weight_E * log_weight_E)
        )
        sum_N = torch.where(degree_N > 0, sum_N, torch.ones_like(sum_N))
        return (sum_N.log() - moment_N / sum_N).float()


def degree_target(graph: EdgeGraph, source_degree_M: Tensor, *, exponent: float) -> StructureTarget:
    """Return the target that weighs edges by a power of their source's degree.

    Args:
        source_degree_M: degree of each source; 0 counts as 1.
        exponent: negative prefers small degrees; 0 is a target of equal weights.
    """
    log_degree_M = source_degree_M.clamp(min=1).float().log()
    return StructureTarget(graph=graph, log_weight_E=exponent * log_degree_M.index_select(0, graph.source_E))


def structure_loss(
    q_NHK: Tensor,
    k_MHK: Tensor,
    lse_NH: Tensor,
    target: StructureTarget,
    *,
    edge_bias: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the mean over rows and heads of KL(target | attention) in nats, an fp32 number of at least 0.

    It is 0 where attention is the target, and then has no gradient. Gradients flow to queries, keys and bias, directly
    and through the log-sum-exp.

    Args:
        q_NHK: queries of the targets, as they were given to `edge_attention`.
        k_MHK: keys of the sources, likewise, [M, H_kv, K].
        lse_NH: log-sum-exp that it returned, over edges among which are all of the target.
        target: the intended edges.
        edge_bias: [edges of the target, H], what was added to the scores of these edges.
        scale: as it was given to `edge_attention`.

    Raises:
        ValueError: if shapes, formats or devices do not fit each other.
    """
    num_heads, num_kv_heads, head_size = q_NHK.shape[1], k_MHK.shape[1], q_NHK.shape[2]
    if lse_NH.shape != q_NHK.shape[:2]:
        raise ValueError(f"lse must have the shape {tuple(q_NHK.shape[:2])} of q's heads, got {tuple(lse_NH.shape)}")
    mean_k_NHK = _mean_of_edges(k_MHK, target).repeat_interleave(num_heads // num_kv_heads, dim=1)
    scale = head_size**-0.5 if scale is None else scale
    mean_score_NH = scale * (q_NHK.float() * mean_k_NHK.float()).sum(2)
    if edge_bias is not None:
        mean_score_NH = mean_score_NH + _mean_of_bias(edge_bias, target)
    # Rows without edges have a log-sum-exp of minus infinity, whose gradient must be zero and not a NaN.
    counted_NH = target.has_edges_N.unsqueeze(1)
    lse_NH = torch.where(counted_NH, lse_NH, torch.zeros_like(lse_NH))
    divergence_NH = lse_NH - mean_score_NH - target.entropy_N.unsqueeze(1)
    return (divergence_NH * counted_NH).sum() / max(target.num_rows * num_heads, 1)


def add_loss(x: Tensor, loss: Tensor) -> Tensor:
    """Return `x` as it is; where a gradient reaches it, `loss` is minimised too, as if it were added to the final loss.

    So a layer adds a term of its own, and neither the model nor its training has to know of it.
    """
    out: Tensor = _AddLoss.apply(x, loss)  # type: ignore[no-untyped-call]
    return out


class _AddLoss(torch.autograd.Function):
    """The identity of its first argument; the second gets a gradient of one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(torch.ones_like(loss))
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (one,) = ctx.saved_tensors
        return gradients[0], one


def _mean_of_edges(x_MHK: Tensor, target: StructureTarget) -> Tensor:
    """Return the mean of the sources' rows by the target's weights, [N, H, K]; zeros without edges."""
    num_heads, head_size = x_MHK.shape[1:]
    zeros_NHK = x_MHK.new_zeros(target.graph.num_targets, num_heads, head_size)
    bias_EH = None if target.log_weight_E is None else target.log_weight_E.unsqueeze(1).expand(-1, num_heads)
    # As keys serve the rows themselves, read once for both uses: the queries are zero, so they do not matter.
    mean_NHK: Tensor = edge_attention(zeros_NHK, x_MHK.detach(), x_MHK, target.graph, edge_bias=bias_EH)
    return mean_NHK


def _mean_of_bias(bias_EH: Tensor, target: StructureTarget) -> Tensor:
    """Return the mean of the edges' bias by the target's weights, [N, H]: what edges have is a value's feature."""
    num_heads = bias_EH.shape[1]
    weight_EH = None if target.log_weight_E is None else target.log_weight_E.unsqueeze(1).expand(-1, num_heads)
    zeros_NH1 = bias_EH.new_zeros(target.graph.num_targets, num_heads, 1, dtype=torch.float32)
    zeros_MH1 = zeros_NH1.new_zeros(target.graph.num_sources, num_heads, 1)
    mean_NH1: Tensor = edge_attention(
        zeros_NH1,
        zeros_MH1,
        zeros_MH1,
        target.graph,
        edge_bias=weight_EH,
        edge_features=bias_EH.float().unsqueeze(2),
    )
    return mean_NH1.squeeze(2)
