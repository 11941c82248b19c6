"""Attention over edges on CPUs: rows in chunks whose edges fit into the cache, nothing kept of edges times width.

Forward keeps the output and the log-sum-exp of each row; backward computes the scores of a chunk again.
"""

from typing import Any

import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph

# Edges times heads times head size of a chunk, fp32: 1 MiB, about a core's second-level cache. Of 0.25 to 8 MiB it was
# the fastest forward and backward on tolokers and coauthor-cs, 64 wide (AMD EPYC 9004 class, 1 MiB of L2 a core).
CHUNK_ELEMENTS = 2**18


class ChunkedAttention(torch.autograd.Function):
    """Attention of `edge_attention`, with the same arguments in order; the last two are not tensors."""

    @staticmethod
    def forward(
        ctx: Any, q_NHK: Tensor, k_MHK: Tensor, v_MHK: Tensor, bias_EH: Tensor | None, graph: EdgeGraph, scale: float
    ) -> Tensor:
        """Return the output, [N, H, K]."""
        num_targets, num_heads, head_size = q_NHK.shape
        out_NHK = torch.zeros(num_targets, num_heads, head_size, dtype=torch.float32)
        lse_NH = torch.full((num_targets, num_heads), -torch.inf)
        for rows, edges in graph.chunks(max(CHUNK_ELEMENTS // (num_heads * head_size), 1)):
            source_E, row_E = graph.source_E[edges], graph.target_E[edges] - rows.start
            queries_EHK, keys_EHK = q_NHK[rows].index_select(0, row_E), k_MHK.index_select(0, source_E)
            scores_EH = _scores(queries_EHK, keys_EHK, bias_EH, edges, scale)
            num_rows = rows.stop - rows.start
            largest_NH = scores_EH.new_full((num_rows, num_heads), -torch.inf)
            largest_NH.scatter_reduce_(0, row_E.unsqueeze(1).expand_as(scores_EH), scores_EH, "amax")
            weights_EH = scores_EH.sub_(largest_NH.index_select(0, row_E)).exp_()
            sums_NH = weights_EH.new_zeros(num_rows, num_heads).index_add_(0, row_E, weights_EH)
            messages_EHK = v_MHK.index_select(0, source_E) * weights_EH.unsqueeze(-1)
            out_NHK[rows].index_add_(0, row_E, messages_EHK)
            # A row without edges has a sum of zero and keeps an output of zeros.
            out_NHK[rows].div_(sums_NH.clamp(min=0.5).unsqueeze(-1))
            lse_NH[rows] = largest_NH + sums_NH.log()
        ctx.save_for_backward(q_NHK, k_MHK, v_MHK, bias_EH, out_NHK, lse_NH)
        ctx.graph, ctx.scale = graph, scale
        return out_NHK.to(q_NHK.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        """Return the gradients of queries, keys, values and bias."""
        q_NHK, k_MHK, v_MHK, bias_EH, out_NHK, lse_NH = ctx.saved_tensors
        graph, scale = ctx.graph, ctx.scale
        grad_NHK = gradients[0].float()
        _, num_heads, head_size = q_NHK.shape
        delta_NH = (grad_NHK * out_NHK).sum(-1)
        grad_q = torch.zeros(q_NHK.shape, dtype=torch.float32)
        grad_k, grad_v = (torch.zeros(k_MHK.shape, dtype=torch.float32) for _ in range(2))
        grad_bias = None if bias_EH is None else torch.empty_like(bias_EH, dtype=torch.float32)
        for rows, edges in graph.chunks(max(CHUNK_ELEMENTS // (num_heads * head_size), 1)):
            source_E, row_E = graph.source_E[edges], graph.target_E[edges] - rows.start
            queries_EHK, keys_EHK = q_NHK[rows].index_select(0, row_E), k_MHK.index_select(0, source_E)
            scores_EH = _scores(queries_EHK, keys_EHK, bias_EH, edges, scale)
            weights_EH = scores_EH.sub_(lse_NH[rows].index_select(0, row_E)).exp_()
            grads_EHK = grad_NHK[rows].index_select(0, row_E)
            grad_scores_EH = (grads_EHK * v_MHK.index_select(0, source_E)).sum(-1)
            grad_scores_EH.sub_(delta_NH[rows].index_select(0, row_E)).mul_(weights_EH)
            if grad_bias is not None:
                grad_bias[edges] = grad_scores_EH
            grad_v.index_add_(0, source_E, grads_EHK.mul_(weights_EH.unsqueeze(-1)))
            factor_EH1 = grad_scores_EH.mul_(scale).unsqueeze(-1)
            grad_q[rows].index_add_(0, row_E, keys_EHK * factor_EH1)
            grad_k.index_add_(0, source_E, queries_EHK * factor_EH1)
        dtype = q_NHK.dtype
        return grad_q.to(dtype), grad_k.to(dtype), grad_v.to(dtype), grad_bias, None, None


def _scores(queries_EHK: Tensor, keys_EHK: Tensor, bias_EH: Tensor | None, edges: slice, scale: float) -> Tensor:
    """Return the fp32 scores of a chunk's edges."""
    scores_EH = (queries_EHK * keys_EHK).sum(-1, dtype=torch.float32).mul_(scale)
    return scores_EH if bias_EH is None else scores_EH.add_(bias_EH[edges])
