"""Attention over edges on CPUs: the operators' forward and backward passes in Numba.

Backward takes two passes that compute the weights again, over targets and over sources, so no two threads ever write
the same row. Beyond outputs and gradients a pass holds a number of each target and head, and sums of rows that are cut.
"""

import functools
import itertools
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from executor import keyed
from executor.attention import cpu_backward, cpu_forward
from executor.attention.cpu_layout import NO_DROPOUT, Edges, Inputs, Kernel, Rows, Scratch, Shape, new_scratch
from executor.attention.cpu_pieces import Array, pieces_of
from executor.attention.cpu_vectors import LANES8, LANES16
from executor.attention.graph import EdgeGraph, Transpose

# A thread takes this many times some pieces, so that the last threads end at about the same time.
_SHARES_PER_THREAD = 8
# Numba knows no 16-bit floats.
_VIEWS = {torch.float32: torch.float32, torch.float16: torch.int16, torch.bfloat16: torch.uint16}


def forward(
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
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the output, by default in the format of q, and the log-sum-exp, fp32 [N, H]."""
    inputs, shape = _inputs(q, k, v, bias, features, key, graph, scale, dropout), _shape(q, k)
    out_NHK, lse_NH = torch.empty(q.shape, dtype=out_dtype or q.dtype), torch.empty(q.shape[:2])
    _, num_heads, head_size = q.shape
    state_size = num_heads * _padded(head_size) + 2 * _padded(num_heads)
    call = _Pass(graph, inputs, shape, state_size, out_NHK.dtype)
    results = (_rows(out_NHK), _flat(lse_NH))
    call.run(cpu_forward.forward_pieces, *results)
    call.join(cpu_forward.join_forward, *results)
    return out_NHK, lse_NH


def forward_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, graph: EdgeGraph, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the log-sum-exp and, of 16 bits, the output before it was rounded, for a merge."""
    exact, lse = forward(q, k, v, bias, None, None, graph, scale, 0.0, out_dtype=torch.float32)
    if q.dtype == torch.float32:
        return exact, lse, q.new_empty(0)
    return exact.to(q.dtype), lse, exact


def backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    features: Tensor | None,
    key: Tensor | None,
    lse: Tensor,
    graph: EdgeGraph,
    scale: float,
    dropout: float,
    *,
    bias_gradient: bool,
    features_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, bias and features in their formats; an empty tensor for one not asked for."""
    call = _backward_call(grad_out, q, k, v, bias, features, key, lse, graph, scale, dropout)
    none = q.new_empty(0)
    grad_bias = bias.new_empty(bias.shape) if bias is not None and bias_gradient else none
    grad_features = features.new_empty(features.shape) if features is not None and features_gradient else none
    grad_lse = torch.zeros(lse.shape) if grad_lse is None else grad_lse.contiguous()
    mean = np.empty(lse.numel(), np.float32)
    grad_q = _over_targets(call, mean, _flat(grad_lse))
    grad_k, grad_v = _over_sources(call, mean, grad_bias, grad_features)
    return grad_q, grad_k, grad_v, grad_bias, grad_features


def backward_sources(
    grad_out: Tensor,
    stats: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    graph: EdgeGraph,
    scale: float,
    *,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of k and v, and of bias or an empty tensor, of rows with these `cpu_rows.row_stats`."""
    lse, mean = stats.unbind(-1)
    call = _backward_call(grad_out, q, k, v, bias, None, None, lse, graph, scale, 0.0)
    none = q.new_empty(0)
    grad_bias = bias.new_empty(bias.shape) if bias is not None and bias_gradient else none
    grad_k, grad_v = _over_sources(call, _flat(mean.contiguous()), grad_bias, none)
    return grad_k, grad_v, grad_bias


def backward_targets(
    grad_out: Tensor,
    stats: Tensor,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    graph: EdgeGraph,
    scale: float,
    *,
    bias_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of q of rows with these `cpu_rows.row_stats`; that of bias comes from the sources."""
    del out, rest, bias_gradient
    call = _backward_call(grad_out, q, k, v, bias, None, None, lse, graph, scale, 0.0)
    return _over_targets(call, _flat(stats[..., 1].contiguous()), None), q.new_empty(0)


@dataclass(frozen=True, kw_only=True)
class _BackwardCall:
    """What both passes of a backward pass take."""

    q: Tensor
    k: Tensor
    v: Tensor
    graph: EdgeGraph
    inputs: Inputs
    shape: Shape
    lse: Array
    grad_out: Rows

    @property
    def sums_size(self) -> int:
        """Numbers of two sums of a row."""
        return 2 * self.q.shape[1] * _padded(self.q.shape[2])


def _backward_call(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    features: Tensor | None,
    key: Tensor | None,
    lse: Tensor,
    graph: EdgeGraph,
    scale: float,
    dropout: float,
) -> _BackwardCall:
    return _BackwardCall(
        q=q,
        k=k,
        v=v,
        graph=graph,
        inputs=_inputs(q, k, v, bias, features, key, graph, scale, dropout),
        shape=_shape(q, k),
        lse=_flat(lse.contiguous()),
        grad_out=_rows(grad_out),
    )


def _over_targets(call: _BackwardCall, mean: Array, grad_lse: Array | None) -> Tensor:
    """Return the gradient of q.

    Args:
        mean: of the gradients of each row's weights, less the gradient of its log-sum-exp.
        grad_lse: with it means are those of the graph's edges, and written; without it they are given.
    """
    grad_q = torch.empty(call.q.shape, dtype=call.q.dtype)
    run = _Pass(call.graph, call.inputs, call.shape, call.sums_size + 2 * _padded(call.q.shape[1]), call.q.dtype)
    results = (grad_lse is None, mean if grad_lse is None else grad_lse, mean, _rows(grad_q))
    run.run(cpu_backward.target_pieces, call.lse, call.grad_out, *results)
    run.join(cpu_backward.join_target, call.inputs.scale, *results)
    return grad_q


def _over_sources(call: _BackwardCall, mean: Array, grad_bias: Tensor, grad_features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of k and v; write those of bias and features unless these tensors are empty."""
    grad_k, grad_v = (torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in (call.k, call.v))
    run = _Pass(call.graph.transpose, call.inputs, call.shape, call.sums_size, call.q.dtype)
    grad_rows = (_rows(grad_k), _rows(grad_v))
    per_edge = (_flat(grad_bias) if grad_bias.ndim == 2 else call.inputs.bias[:0], _rows(grad_features))
    run.run(cpu_backward.source_pieces, call.lse, call.grad_out, mean, *grad_rows, *per_edge)
    run.join(cpu_backward.join_source, call.inputs.scale, *grad_rows)
    return grad_k, grad_v


class _Pass:
    """One pass over a graph: its pieces, and the partial results of rows that are cut.

    Args:
        state_size: numbers of a row that a kernel holds, and leaves as a partial result.
        result: number format of the rows that it writes.
    """

    def __init__(
        self, graph: EdgeGraph | Transpose, inputs: Inputs, shape: Shape, state_size: int, result: torch.dtype
    ) -> None:
        self.pieces, self.edges, self.inputs, self.shape = pieces_of(graph), _edges_of(graph), inputs, shape
        self.kind = _kind(inputs, self.edges, shape, result)
        self.state_size = state_size
        self.partials = np.empty((self.pieces.num_partials, state_size), np.float32)

    def run(self, kernel: Kernel, *arguments: Any) -> None:
        """Run a kernel over all pieces on as many threads as torch uses."""
        num_pieces = len(self.pieces.table)
        num_threads = min(torch.get_num_threads(), num_pieces)
        num_shares = min(num_threads * _SHARES_PER_THREAD, num_pieces) if num_threads > 1 else 1
        shares = itertools.count()
        common, run = (self.inputs, self.edges, self.shape), kernel.of_kind(self.kind)

        def work() -> None:
            scratch = self._new_scratch()
            while (share := next(shares)) < num_shares:
                first, last = num_pieces * share // num_shares, num_pieces * (share + 1) // num_shares
                run(self.pieces.table, first, last, scratch, *common, *arguments, self.partials)

        run_in_threads(work, num_threads)

    def join(self, kernel: Kernel, *arguments: Any) -> None:
        """Join the partial results by a kernel, if there are any."""
        if self.pieces.num_partials:
            join = kernel.of_kind(self.kind)
            join(self.pieces.split_rows, self.shape, self._new_scratch(), self.partials, *arguments)

    def _new_scratch(self) -> Scratch:
        return new_scratch(self.shape.num_kv_heads * self.shape.group, self.state_size)


def _inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    features: Tensor | None,
    key: Tensor | None,
    graph: EdgeGraph,
    scale: float,
    dropout: float,
) -> Inputs:
    """Return the inputs as the kernels take them."""
    return Inputs(
        q=_rows(q),
        k=_rows(k),
        v=_rows(v),
        features=None if features is None else _rows(features),
        bias=_flat(q.new_empty(0) if bias is None else bias.contiguous()),
        edge_id=np.empty(0, np.int64) if graph.edge_id_E is None else graph.edge_id_E.contiguous().numpy(),
        has_bias=bias is not None,
        has_edge_id=graph.edge_id_E is not None,
        scale=np.float32(scale),
        key_word=np.uint32(0 if key is None else int(keyed.key_word(key)) % 2**32),
        lowest_kept=NO_DROPOUT if key is None else keyed.threshold(dropout),
        kept_factor=np.float32(1 / (1 - dropout)),
    )


def _shape(q: Tensor, k: Tensor) -> Shape:
    _, num_heads, head_size = q.shape
    lanes = LANES16 if head_size % 16 == 0 else LANES8 if head_size % 8 == 0 else None
    return Shape(num_kv_heads=k.shape[1], group=num_heads // k.shape[1], head_size=head_size, lanes=lanes)


def _padded(size: int) -> int:
    """Return a number of heads or of columns padded to whole vectors of 8, which those of 16 need no more than."""
    return -(-size // 8) * 8


def _flat(tensor: Tensor) -> Array:
    """Return the numbers of a contiguous tensor as a flat array over the same memory."""
    array: Array = tensor.detach().view(-1).view(_VIEWS[tensor.dtype]).numpy()
    return array


def _rows(tensor: Tensor) -> Rows:
    """Return the rows of a tensor [rows, heads, head size] over the same memory, or of a copy if a row is scattered."""
    if tensor.ndim == 1:  # of no elements
        return Rows(flat=_flat(tensor), stride=0, width=0)
    num_rows, num_heads, head_size = tensor.shape
    is_dense = (head_size == 1 or tensor.stride(2) == 1) and (num_heads == 1 or tensor.stride(1) == head_size)
    tensor = tensor.detach() if is_dense else tensor.detach().contiguous()
    width = num_heads * head_size
    size = (num_rows - 1) * tensor.stride(0) + width if num_rows else 0
    return Rows(flat=_flat(tensor.as_strided((size,), (1,))), stride=tensor.stride(0), width=width)


def _kind(inputs: Inputs, edges: Edges, shape: Shape, result: torch.dtype) -> str:
    """Return a name for all that decides the types of a kernel's arguments."""
    formats = f"{inputs.q.flat.dtype}_{inputs.bias.dtype}_{'features' if inputs.features else 'plain'}"
    formats += f"_{result}".replace("torch.", "")
    positions = "none" if edges.position is None else edges.position.dtype
    return f"{formats}_{8 * len(shape.lanes or ())}_{positions}"


def _edges_of(graph: EdgeGraph | Transpose) -> Edges:
    if isinstance(graph, EdgeGraph):
        return Edges(indptr=graph.indptr_N1.numpy(), far=graph.source_E.numpy(), position=None, count=graph.num_edges)
    return Edges(
        indptr=graph.indptr_M1.numpy(),
        far=graph.target_E.numpy(),
        position=graph.position_E.numpy(),
        count=graph.target_E.numel(),
    )


def run_in_threads(work: Callable[[], None], num_threads: int) -> None:
    """Run a function in so many threads at once, this one among them.

    The others are born with SIGINT blocked: `executor/launch.py` waits for it elsewhere. One that has not begun when
    this thread is done has nothing left to do.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        others = [_threads().submit(work) for _ in range(num_threads - 1)]
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    work()
    for other in others:
        if not other.cancel():
            other.result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Return the threads, which start when first needed."""
    return ThreadPoolExecutor(os.cpu_count() or 1, thread_name_prefix="attention")


os.register_at_fork(after_in_child=_threads.cache_clear)  # threads do not live in a forked process
