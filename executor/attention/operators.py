"""Attention over edges as operators of torch, so that compilers, CUDA graphs, checkpoints and the profiler know it."""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from executor.attention import cpu, cpu_rows
from executor.attention.graph import EdgeGraph, graph_of_handle

try:
    from executor.attention import gpu, gpu_rows
except ModuleNotFoundError as error:
    if error.name != "triton":
        raise
    # A build of torch for CPUs comes without Triton.
    gpu = gpu_rows = None  # type: ignore[assignment]


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    features: Tensor | None,
    key: Tensor | None,
    graph: EdgeGraph,
    scale: float,
    dropout: float,
    *,
    keep_rest: bool,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of `edge_attention`, whose arguments these are.

    Args:
        keep_rest: whether a backward pass may follow, which wants what rounding took from the output.
    """
    out, lse, _ = torch.ops.graphpilot.edge_attention(
        q, k, v, bias, features, key, graph.handle, scale, dropout, keep_rest
    )
    return out, lse


def passes_on(device: torch.device) -> ModuleType:
    """Return the module with the passes over edges on a device.

    Raises:
        RuntimeError: on a GPU without Triton.
    """
    return cpu if device.type == "cpu" else _with_triton(gpu)


def rows_on(device: torch.device) -> ModuleType:
    """Return the module with what joins parts of an attention on a device.

    Raises:
        RuntimeError: on a GPU without Triton.
    """
    return cpu_rows if device.type == "cpu" else _with_triton(gpu_rows)


def _with_triton(module: ModuleType | None) -> ModuleType:
    if module is None:
        raise RuntimeError("attention on a GPU needs Triton, which this build of torch lacks: pip install triton")
    return module


_LIBRARY = torch.library.Library("graphpilot", "DEF")
_LIBRARY.define(
    "edge_attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? features, Tensor? key, SymInt graph, "
    "float scale, float dropout, bool keep_rest) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.define(
    "edge_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor? bias, "
    "Tensor? features, Tensor? key, Tensor out, Tensor lse, Tensor rest, SymInt graph, float scale, float dropout, "
    "bool bias_gradient, bool features_gradient) -> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    features: Tensor | None,
    key: Tensor | None,
    graph: int,
    scale: float,
    dropout: float,
    keep_rest: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    edge_graph = graph_of_handle(graph)
    if q.device.type == "cpu":
        return *cpu.forward(q, k, v, bias, features, key, edge_graph, scale, dropout), q.new_empty(0, dtype=torch.int8)
    results: tuple[Tensor, Tensor, Tensor] = passes_on(q.device).forward(
        q, k, v, bias, features, key, edge_graph, scale, dropout, keep_rest=keep_rest
    )
    return results


def _backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    features: Tensor | None,
    key: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    graph: int,
    scale: float,
    dropout: float,
    bias_gradient: bool,
    features_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    edge_graph = graph_of_handle(graph)
    if q.device.type == "cpu":
        return cpu.backward(
            grad_out,
            grad_lse,
            q,
            k,
            v,
            bias,
            features,
            key,
            lse,
            edge_graph,
            scale,
            dropout,
            bias_gradient=bias_gradient,
            features_gradient=features_gradient,
        )
    gradients: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = passes_on(q.device).backward(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        bias,
        features,
        key,
        out,
        lse,
        rest,
        edge_graph,
        scale,
        dropout,
        bias_gradient=bias_gradient,
        features_gradient=features_gradient,
    )
    return gradients


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    features: Tensor | None,
    key: Tensor | None,
    graph: int,
    scale: float,
    dropout: float,
    keep_rest: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    has_rest = keep_rest and q.device.type != "cpu" and q.dtype != torch.float32
    rest = q.new_empty(q.shape if has_rest else 0, dtype=torch.int8)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32), rest


def _fake_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    features: Tensor | None,
    key: Tensor | None,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    graph: int,
    scale: float,
    dropout: float,
    bias_gradient: bool,
    features_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    grad_bias = bias.new_empty(bias.shape) if bias_gradient and bias is not None else q.new_empty(0)
    grad_features = features.new_empty(features.shape) if features_gradient and features is not None else q.new_empty(0)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), grad_bias, grad_features


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, bias, features, key, graph, scale, dropout, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[2])
    ctx.save_for_backward(q, k, v, bias, features, key, *output)
    ctx.handle, ctx.scale, ctx.dropout = graph, scale, dropout
    # Alive until the backward pass has run; while a compiler traces, the handle is a symbol and the caller keeps it.
    ctx.graph = graph_of_handle(graph) if isinstance(graph, int) else None


def _backward_of(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None, _: Tensor | None) -> tuple[Any, ...]:
    q, k, v, bias, features, key, out, lse, rest = ctx.saved_tensors
    if grad_out is None:
        grad_out = torch.zeros_like(q)
    grad_q, grad_k, grad_v, grad_bias, grad_features = torch.ops.graphpilot.edge_attention_backward(
        grad_out,
        grad_lse,
        q,
        k,
        v,
        bias,
        features,
        key,
        out,
        lse,
        rest,
        ctx.handle,
        ctx.scale,
        ctx.dropout,
        bias is not None and ctx.needs_input_grad[3],
        features is not None and ctx.needs_input_grad[4],
    )
    return (
        grad_q,
        grad_k,
        grad_v,
        grad_bias if bias is not None else None,
        grad_features if features is not None else None,
        None,
        None,
        None,
        None,
        None,
    )


for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("edge_attention", _forward, _device)
    _LIBRARY.impl("edge_attention_backward", _backward, _device)
torch.library.register_fake("graphpilot::edge_attention", _fake_forward, lib=_LIBRARY)
torch.library.register_fake("graphpilot::edge_attention_backward", _fake_backward, lib=_LIBRARY)
torch.library.register_autograd("graphpilot::edge_attention", _backward_of, setup_context=_save, lib=_LIBRARY)
