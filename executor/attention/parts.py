"""Attention over some of the edges of a graph, merged in place, and its backward pass in two passes of their own.

A plain version in torch's operators: it makes tensors of edges times width.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph
from executor.attention.operators import attend


@dataclass(kw_only=True)
class Attended:
    """What attention over a set of edges gives.

    Attributes:
        out: [N, H, K].
        lse: log-sum-exp, fp32 [N, H], minus infinity without edges.
        rest: what makes an output of 16 bits exact; empty where there is nothing.
    """

    out: Tensor
    lse: Tensor
    rest: Tensor


def attend_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, graph: EdgeGraph, *, scale: float | None = None
) -> Attended:
    """Return attention over the edges of a graph; arguments as of `edge_attention`."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    out, lse = attend(q, k, v, bias, None, None, graph, scale, 0.0, keep_rest=False)
    return Attended(out=out, lse=lse, rest=q.new_empty(0, dtype=torch.int8))


def merge_into(whole: Attended, part: Attended, first_row: int) -> None:
    """Merge attention over other edges of the rows from `first_row` on into that over some, in place."""
    out, lse = whole.out[first_row:], whole.lse[first_row:]
    both = torch.logaddexp(lse, part.lse)
    shift = both.masked_fill(torch.isinf(both), 0.0)
    weight, part_weight = (torch.exp(x - shift).unsqueeze(-1) for x in (lse, part.lse))
    out.copy_(out.float() * weight + part.out.float() * part_weight)
    lse.copy_(both)


def row_stats(grad_out: Tensor, whole: Attended) -> Tensor:
    """Return what both passes need of each row and head beside its log-sum-exp."""
    return (grad_out.float() * whole.out.float()).sum(-1)


def backward_sources(
    grad_out: Tensor,
    stats: Tensor,
    whole: Attended,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    graph: EdgeGraph,
    *,
    scale: float | None = None,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of keys, of values and, where this pass gives it, of the bias."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    source, target, weight, of_score = _edges(grad_out, stats, whole, q, k, v, bias, graph, scale)
    grad_k, grad_v = torch.zeros(k.shape), torch.zeros(v.shape)
    grad_k.index_add_(0, source, of_score.unsqueeze(-1) * q.float().index_select(0, target) * scale)
    grad_v.index_add_(0, source, weight.unsqueeze(-1) * grad_out.float().index_select(0, target))
    of_bias = of_score.to(bias.dtype) if bias is not None and bias_gradient else None
    return grad_k.to(k.dtype), grad_v.to(v.dtype), of_bias


def backward_targets(
    grad_out: Tensor,
    stats: Tensor,
    whole: Attended,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    graph: EdgeGraph,
    *,
    scale: float | None = None,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of queries and, where this pass gives it, of the bias."""
    del bias_gradient
    scale = q.shape[2] ** -0.5 if scale is None else scale
    source, target, _, of_score = _edges(grad_out, stats, whole, q, k, v, bias, graph, scale)
    grad_q = torch.zeros(q.shape)
    grad_q.index_add_(0, target, of_score.unsqueeze(-1) * k.float().index_select(0, source) * scale)
    return grad_q.to(q.dtype), None


def add_rows_(rows: Tensor, index: Tensor, added: Tensor, counts: Sequence[int]) -> None:
    """Add rows to some of others in place, in a fixed order.

    Args:
        index: int64 [S], where each is added; no place twice among those of one peer.
        counts: rows of each peer, one behind another.
    """
    for places, values in zip(index.split(list(counts)), added.split(list(counts)), strict=True):
        rows.index_add_(0, places, values)


def _edges(
    grad_out: Tensor,
    stats: Tensor,
    whole: Attended,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    graph: EdgeGraph,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return source, target, weight and the score's gradient of each edge."""
    source, target = graph.source_E.long(), graph.target_E.long()
    score = scale * (q.float().index_select(0, target) * k.float().index_select(0, source)).sum(-1)
    if bias is not None:
        score = score + bias.float()
    weight = torch.exp(score - whole.lse.index_select(0, target))
    product = (grad_out.float().index_select(0, target) * v.float().index_select(0, source)).sum(-1)
    return source, target, weight, weight * (product - stats.index_select(0, target))
