"""Attention over all edges of a rank in pieces between which an exchange can begin and end; without autograd.

Forward, attention over some edges is joined in place with that over others. Backward, one attention over all edges is
taken in two passes: that over sources gives the gradients of keys and values, that over targets those of queries. What
both need of a row is its log-sum-exp over all of its edges and delta, the product of its output and the gradient of
that; so either pass can come first, and a pass over some of the edges gives their share of the gradients.

Each piece is an operator of torch, so that the profiler sees its operands.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.attention.edges import require_fitting, scale_of
from executor.attention.graph import EdgeGraph, graph_of_handle
from executor.attention.operators import passes_on, rows_on


@dataclass(frozen=True, kw_only=True, eq=False)
class Attended:
    """Attention of targets over some edges; `merge_into` writes into its tensors.

    Attributes:
        out: [N, H, K], zeros without edges.
        lse: natural log-sum-exp of the scores, fp32 [N, H], minus infinity without edges.
        rest: of outputs of 16 bits, what makes them exact: on GPUs what rounding took, int8, on CPUs the unrounded
            output, fp32; of fp32 empty.
    """

    out: Tensor
    lse: Tensor
    rest: Tensor


def attend_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, graph: EdgeGraph, *, scale: float | None = None
) -> Attended:
    """Return attention over a graph's edges; the arguments are those of `edge_attention`.

    Raises:
        ValueError: if shapes, formats or devices do not fit each other.
    """
    require_fitting(q, k, v, graph, bias)
    out, lse, rest = _OPS.attend_part(q, k, v, bias, graph.handle, scale_of(q, scale))
    return Attended(out=out, lse=lse, rest=rest)


def merge_into(whole: Attended, part: Attended, first_row: int) -> None:
    """Join the rows of `whole` from `first_row` on with those of `part`, which is over other edges, in place.

    Raises:
        ValueError: if `part` does not hold as many rows as there are, or others.
    """
    num_rows = len(whole.out)
    if not 0 <= first_row <= num_rows or part.out.shape != (num_rows - first_row, *whole.out.shape[1:]):
        raise ValueError(
            f"part must hold the rows from first_row to the last of whole, which are {tuple(whole.out.shape)}, "
            f"got {first_row=} and {tuple(part.out.shape)}"
        )
    if part.out.dtype != whole.out.dtype:
        raise ValueError(f"part must have the format of whole, {whole.out.dtype}, got {part.out.dtype}")
    _OPS.merge_parts_(whole.out, whole.lse, whole.rest, part.out, part.lse, part.rest, first_row)


def row_stats(grad_out: Tensor, whole: Attended) -> Tensor:
    """Return what both backward passes need of each row and head, fp32 [N, H, 2]; only they know how it is laid out."""
    if grad_out.shape != whole.out.shape:
        raise ValueError(f"grad_out must have the shape {tuple(whole.out.shape)}, got {tuple(grad_out.shape)}")
    stats: Tensor = _OPS.row_stats(grad_out, whole.out, whole.lse, whole.rest)
    return stats


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
    """Return the gradients of keys, values and bias that a graph's edges give.

    Args:
        stats: `row_stats` of `whole`.
        whole: attention over all edges of the rows, which may be more than the graph's.
        bias_gradient: whether that of the bias is wanted. Where `backward_targets` gives it, this gives None.
    """
    require_fitting(q, k, v, graph, bias)
    grad_k, grad_v, grad_bias = _OPS.attention_sources(
        grad_out, stats, q, k, v, bias, graph.handle, scale_of(q, scale), bias_gradient
    )
    return grad_k, grad_v, _of_edges(grad_bias)


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
    """Return the gradients of queries and bias that a graph's edges give; arguments as of `backward_sources`."""
    require_fitting(q, k, v, graph, bias)
    grad_q, grad_bias = _OPS.attention_targets(
        grad_out,
        stats,
        whole.out,
        whole.lse,
        whole.rest,
        q,
        k,
        v,
        bias,
        graph.handle,
        scale_of(q, scale),
        bias_gradient,
    )
    return grad_q, _of_edges(grad_bias)


def add_rows_(rows: Tensor, index: Tensor, added: Tensor, counts: Sequence[int]) -> None:
    """Add each row of `added` to the row of `rows` that `index` names, in place, with the same bits in every run.

    Runs are added one behind another. Sums are fp32; GPUs round after each run, CPUs as `index_add_` does.

    Args:
        rows: [N, C].
        index: int64 [S], rows; no row comes twice in a run.
        added: [S, C].
        counts: rows in each run, as each peer sends one.

    Raises:
        ValueError: if shapes do not fit each other.
    """
    if added.shape != (len(index), rows.shape[1]) or sum(counts) != len(index) or rows.stride(1) != 1:
        raise ValueError(
            f"rows, index, added and counts must fit each other, and rows be contiguous along columns, got "
            f"{tuple(rows.shape)}, {tuple(index.shape)}, {tuple(added.shape)} and {tuple(counts)}"
        )
    _OPS.add_rows_(rows, index, added, list(counts))


def _of_edges(gradient: Tensor) -> Tensor | None:
    """Return a gradient [E, H], or None for the tensor that stands for none."""
    return gradient if gradient.ndim == 2 else None


_OPS = torch.ops.graphpilot
_LIBRARY = torch.library.Library("graphpilot", "FRAGMENT")


def _operator(schema: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Make a function an operator of torch, on CPUs and GPUs."""

    def register(function: Callable[..., object]) -> Callable[..., object]:
        name = _LIBRARY.define(schema)
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, function, device)
        return function

    return register


@_operator(
    "attend_part(Tensor q, Tensor k, Tensor v, Tensor? bias, int graph, float scale) -> (Tensor, Tensor, Tensor)"
)
def _attend_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, graph: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    results: tuple[Tensor, Tensor, Tensor] = passes_on(q.device).forward_part(
        q, k, v, bias, graph_of_handle(graph), scale
    )
    return results


@_operator(
    "merge_parts_(Tensor(a!) out, Tensor(b!) lse, Tensor(c!) rest, Tensor part_out, Tensor part_lse, Tensor part_rest, "
    "int first_row) -> ()"
)
def _merge_parts(out: Tensor, *arguments: object) -> None:
    rows_on(out.device).merge_into(out, *arguments)


@_operator("row_stats(Tensor grad_out, Tensor out, Tensor lse, Tensor rest) -> Tensor")
def _row_stats(grad_out: Tensor, *whole: Tensor) -> Tensor:
    stats: Tensor = rows_on(grad_out.device).row_stats(grad_out, *whole)
    return stats


@_operator(
    "attention_sources(Tensor grad_out, Tensor stats, Tensor q, Tensor k, Tensor v, Tensor? bias, int graph, "
    "float scale, bool bias_gradient) -> (Tensor, Tensor, Tensor)"
)
def _sources(
    grad_out: Tensor,
    stats: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    graph: int,
    scale: float,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor, Tensor] = passes_on(q.device).backward_sources(
        grad_out, stats, q, k, v, bias, graph_of_handle(graph), scale, bias_gradient=bias_gradient
    )
    return gradients


@_operator(
    "attention_targets(Tensor grad_out, Tensor stats, Tensor out, Tensor lse, Tensor rest, Tensor q, Tensor k, "
    "Tensor v, Tensor? bias, int graph, float scale, bool bias_gradient) -> (Tensor, Tensor)"
)
def _targets(
    grad_out: Tensor,
    stats: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    graph: int,
    scale: float,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor]:
    gradients: tuple[Tensor, Tensor] = passes_on(q.device).backward_targets(
        grad_out, stats, out, lse, rest, q, k, v, bias, graph_of_handle(graph), scale, bias_gradient=bias_gradient
    )
    return gradients


@_operator("add_rows_(Tensor(a!) rows, Tensor index, Tensor added, int[] counts) -> ()")
def _add_rows(rows: Tensor, index: Tensor, added: Tensor, counts: list[int]) -> None:
    rows_on(rows.device).add_rows_(rows, index, added, counts)
