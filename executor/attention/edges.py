"""Attention over the edges of a graph: each node attends to the sources of its incoming edges."""

from typing import Any

import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph
from executor.attention.operators import attend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def edge_attention(
    q_NHK: Tensor,
    k_MHK: Tensor,
    v_MHK: Tensor,
    graph: EdgeGraph,
    *,
    edge_bias: Tensor | None = None,
    edge_features: Tensor | None = None,
    dropout: float = 0.0,
    dropout_key: Tensor | None = None,
    scale: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Return the attention of each target over the sources of its incoming edges, [N, H, K].

    Scores, softmax and sums are fp32 whatever the inputs are. A target without edges gets zeros. Gradients flow to
    queries, keys, values, bias, features and, from the log-sum-exp, to all that made it. Nothing of edges times width
    is allocated; kept for the backward pass are the inputs, the output, the log-sum-exp and, on GPUs, what rounding
    took from an output of 16 bits.

    Args:
        q_NHK: queries of the targets.
        k_MHK: keys of the sources, [M, H_kv, K]; H_kv divides H, and queries of a group share a key. M may exceed N
            where a part has a halo.
        v_MHK: values of the sources, as the keys.
        graph: the edges, on the same device.
        edge_bias: [E, H], added to the scores of each edge and head, in the order of the graph's edges.
        edge_features: [E, H_kv, K], added to the key and to the value of each edge.
        dropout: share of the weights (edge, head) that are dropped, the others scaled up.
        dropout_key: int64 [2] on the same device, seed and step: with the edge's global id they decide what is dropped.
        scale: factor of the products of queries and keys; by default 1 / sqrt(K).
        return_lse: also return the natural log-sum-exp of each target's scores, fp32 [N, H], minus infinity without
            edges, with which `merge_attention` joins results over disjoint edges.

    Raises:
        ValueError: if shapes, formats or devices do not fit each other.
    """
    require_fitting(q_NHK, k_MHK, v_MHK, graph, edge_bias, edge_features, dropout, dropout_key)
    scale = scale_of(q_NHK, scale)
    key = dropout_key if dropout > 0 else None
    inputs = (q_NHK, k_MHK, v_MHK, edge_bias, edge_features)
    keep_rest = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    out_NHK, lse_NH = attend(*inputs, key, graph, scale, dropout, keep_rest=keep_rest)
    return (out_NHK, lse_NH) if return_lse else out_NHK


def merge_attention(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return the attention over all edges, and its log-sum-exp, from those over disjoint sets of edges.

    Args:
        parts: outputs [N, H, K] and log-sum-exps [N, H] of `edge_attention` for the same targets.
    """
    lse_PNH = torch.stack([lse_NH for _, lse_NH in parts])
    largest_NH = lse_PNH.detach().amax(0)
    shift_NH = torch.where(torch.isinf(largest_NH), torch.zeros_like(largest_NH), largest_NH)
    weights_PNH = torch.exp(lse_PNH - shift_NH)
    sums_NH = weights_PNH.sum(0)
    is_empty_NH = sums_NH == 0
    # Empty rows divide by one, so that their gradient is zero and not a NaN.
    sums_NH = torch.where(is_empty_NH, torch.ones_like(sums_NH), sums_NH)
    out_NHK = sum(
        (weights / sums_NH).unsqueeze(-1) * out.float() for weights, (out, _) in zip(weights_PNH, parts, strict=True)
    )
    lse_NH = torch.where(is_empty_NH, torch.full_like(sums_NH, -torch.inf), sums_NH.log() + shift_NH)
    assert isinstance(out_NHK, Tensor), "at least one part"
    return out_NHK.to(parts[0][0].dtype), lse_NH


def scale_of(q_NHK: Tensor, scale: float | None) -> float:
    """Return the factor of the products of queries and keys, which by default is 1 / sqrt(K)."""
    return float(q_NHK.shape[2] ** -0.5) if scale is None else scale


def require_fitting(
    q_NHK: Tensor,
    k_MHK: Tensor,
    v_MHK: Tensor,
    graph: EdgeGraph,
    edge_bias: Tensor | None,
    edge_features: Tensor | None = None,
    dropout: float = 0.0,
    dropout_key: Tensor | None = None,
) -> None:
    """Raise ValueError if the arguments of `edge_attention` do not fit each other."""
    _, num_heads, head_size = q_NHK.shape
    num_kv_heads = k_MHK.shape[1]
    wanted = {
        "q": (q_NHK, (graph.num_targets, num_heads, head_size)),
        "k": (k_MHK, (graph.num_sources, num_kv_heads, head_size)),
        "v": (v_MHK, (graph.num_sources, num_kv_heads, head_size)),
        "edge_bias": (edge_bias, (graph.num_edges, num_heads)),
        "edge_features": (edge_features, (graph.num_edges, num_kv_heads, head_size)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {tuple(tensor.shape)}")
        if tensor.device != graph.device:
            raise ValueError(f"{name} must be on {graph.device} as the graph is, got {tensor.device}")
        if name == "edge_bias" and tensor.dtype not in DTYPES:
            raise ValueError(f"edge_bias must be fp32, bf16 or fp16, got {tensor.dtype}")
        if name != "edge_bias" and tensor.dtype != q_NHK.dtype:
            raise ValueError(f"{name} must have the format of q, {q_NHK.dtype}, got {tensor.dtype}")
    if q_NHK.dtype not in DTYPES:
        raise ValueError(f"q must be fp32, bf16 or fp16, got {q_NHK.dtype}")
    if num_heads % num_kv_heads:
        raise ValueError(f"the {num_kv_heads} heads of k must divide the {num_heads} heads of q")
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")
    if dropout > 0 and dropout_key is None:
        raise ValueError("dropout needs dropout_key, an int64 tensor of seed and step")
