"""Attention over edges on GPUs: which kernels run on which rows, and what they write."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.attention import gpu_windows, kernels
from executor.attention.graph import MAX_INT32, EdgeGraph, Transpose
from executor.attention.launch import launch, specialisation
from executor.attention.windows import Windows
from executor.attention.work import WorkList
from executor.keyed import threshold

LOG2E = 1.4426950408889634
MAX_BLOCK_NUMBERS = 256  # heads x columns that a program takes together
# Of a tile (lanes x heads x columns). A warp holds 256, the fewest that a load of 16 bytes a thread fills: with two
# edges at a time in a tile the accumulators leave registers for most warps. UNROLL edges of each lane are in flight.
# Fastest of those tried on an H200: traces/attention_h200x1_202611/notes.md.
TILE_NUMBERS = 256
UNROLL = 2
MAX_LANES = 32
NUMBERS_PER_WARP = 1024
MERGE_LANES = 8
MERGE_WIDTH = 128


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How heads and columns are cut over programs.

    Attributes:
        group: query heads of a key head; block_g: the same, padded to a power of two.
        block_k: key heads of a program.
        block_d: columns of a head, padded to a power of two.
        num_blocks: programs side by side.
    """

    num_heads: int
    head_size: int
    group: int
    block_g: int
    block_k: int
    block_d: int
    num_blocks: int

    @property
    def block_h(self) -> int:
        """Query heads of a program."""
        return self.block_g * self.block_k

    @property
    def is_padded(self) -> bool:
        """Whether some heads or columns of a program are not there."""
        heads = self.num_blocks * self.block_k * self.group
        return self.block_d != self.head_size or self.block_g != self.group or heads != self.num_heads

    def lanes(self, numbers: int) -> int:
        """Return the lanes of a tile of so many numbers."""
        return max(1, min(numbers // (self.block_h * self.block_d), MAX_LANES))


def blocks_of(num_heads: int, num_kv_heads: int, head_size: int) -> Blocks:
    """Return the blocks of heads and columns."""
    group = num_heads // num_kv_heads
    block_d, block_g = _power_of_two(head_size), _power_of_two(group)
    block_k = min(_power_of_two(num_kv_heads), max(MAX_BLOCK_NUMBERS // (block_g * block_d), 1))
    return Blocks(
        num_heads=num_heads,
        head_size=head_size,
        group=group,
        block_g=block_g,
        block_k=block_k,
        block_d=block_d,
        num_blocks=-(-num_kv_heads // block_k),
    )


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
    keep_rest: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, [N, H, K], the log-sum-exp, fp32 [N, H], and what rounding took from the output or nothing.

    The last is int8, as `kernels.rounded_away` gives it.
    """
    q, k, v = (_rows(x) for x in (q, k, v))
    num_targets, num_heads, head_size = q.shape
    windows, work = _windows_and_work(graph, gpu_windows.can_run(q, k, (bias, features, key), scale * LOG2E))
    has_rest = keep_rest and q.dtype != torch.float32
    out = _empty(q, q.dtype, num_targets, num_heads, head_size)
    rest = _empty(q, torch.int8, *(out.shape if has_rest else (0,)))
    lse = _empty(q, torch.float32, num_targets, num_heads)
    partial_out = _empty(q, torch.float32, work.num_partials, num_heads, head_size)
    partial_stat = _empty(q, torch.float32, work.num_partials, num_heads, 2)
    blocks = blocks_of(num_heads, k.shape[1], head_size)
    extras = _Extras(bias, features, key, graph, (q, k, v))
    flags = extras.flags | {"HAS_REST": has_rest}
    call = (*extras.specialisation, has_rest)
    if windows is not None:
        gpu_windows.forward(q, k, v, out, rest, lse, windows, scale * LOG2E)
    _launch(
        kernels.forward_kernel,
        (q, k, v, *extras.tensors, out, rest, lse, partial_out, partial_stat, graph.source_E, extras.edge_id),
        work,
        (k.shape[1], *q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        (scale * LOG2E, 1 / (1 - dropout), threshold(dropout)),
        blocks,
        flags,
        call,
    )
    if work.num_partials:
        launch(
            work.compiled,
            call,
            kernels.merge_forward_kernel,
            (work.split_row_S.numel(), -(-num_heads // blocks.block_h), 1),
            (partial_out, partial_stat, out, rest, lse, *_split(work), num_heads),
            {
                "T": min(MERGE_LANES, blocks.lanes(NUMBERS_PER_WARP)),
                "HEAD_SIZE": head_size,
                "BLOCK_H": blocks.block_h,
                "BLOCK_D": blocks.block_d,
                "HAS_REST": has_rest,
            },
            num_warps=1,
        )
    return out, lse, rest


def forward_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, graph: EdgeGraph, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, the log-sum-exp and, of 16 bits, what rounding took, for a merge."""
    return forward(q, k, v, bias, None, None, graph, scale, 0.0, keep_rest=True)


def backward(
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
    graph: EdgeGraph,
    scale: float,
    dropout: float,
    *,
    bias_gradient: bool,
    features_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values, bias and features; empty where there is none."""
    call = _BackwardCall(grad_out, q, k, v, bias, features, key, graph, scale, dropout)
    edge_gradients = (_edge_gradient(q, bias, bias_gradient), _edge_gradient(q, features, features_gradient))
    grad_q, stats = _over_targets(call, out, lse, rest, grad_lse, edge_gradients)
    grad_k, grad_v = _over_sources(call, stats)
    return grad_q, grad_k, grad_v, *edge_gradients


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
    """Return the gradients of k and v of rows with these `gpu_rows.row_stats`; that of bias comes from the targets."""
    del bias_gradient
    call = _BackwardCall(grad_out, q, k, v, bias, None, None, graph, scale, 0.0)
    return *_over_sources(call, _aligned(stats)), _empty(q, q.dtype, 0)


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
    """Return the gradient of q, and of bias or an empty tensor; each row's statistics are taken anew."""
    del stats
    call = _BackwardCall(grad_out, q, k, v, bias, None, None, graph, scale, 0.0)
    edge_gradients = (_edge_gradient(q, bias, bias_gradient), _empty(q, q.dtype, 0))
    grad_q, _ = _over_targets(call, _aligned(out), _aligned(lse), _aligned(rest), None, edge_gradients)
    return grad_q, edge_gradients[0]


class _BackwardCall:
    """What both passes of a backward pass take."""

    def __init__(
        self,
        grad_out: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        features: Tensor | None,
        key: Tensor | None,
        graph: EdgeGraph,
        scale: float,
        dropout: float,
    ) -> None:
        self.q, self.k, self.v, self.grad_out = (_rows(x) for x in (q, k, v, grad_out))
        self.graph = graph
        rows = (self.q, self.k, self.v, self.grad_out)
        self.extras = _Extras(bias, features, key, graph, rows)
        self.inputs = (*rows[:3], *self.extras.tensors, self.grad_out)
        self.blocks = blocks_of(q.shape[1], k.shape[1], q.shape[2])
        self.strides = (k.shape[1], *(stride for x in rows for stride in x.stride()[:2]))
        self.factors = (scale * LOG2E, scale)
        self.numbers = (*self.factors, 1 / (1 - dropout), threshold(dropout))
        self.has_windows = gpu_windows.can_run(q, k, (bias, features, key), scale * LOG2E)


def _edge_gradient(q: Tensor, per_edge: Tensor | None, is_wanted: bool) -> Tensor:
    """Return room for the gradient of bias or features; empty if none is wanted."""
    return _empty(q, per_edge.dtype, *per_edge.shape) if is_wanted and per_edge is not None else _empty(q, q.dtype, 0)


def _over_targets(
    call: _BackwardCall,
    out: Tensor,
    lse: Tensor,
    rest: Tensor,
    grad_lse: Tensor | None,
    edge_gradients: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the queries, and log-sum-exp (of base 2) and delta of each row, [N, H, 2].

    Args:
        edge_gradients: room for those of bias and features; empty if they are not wanted.
    """
    q, graph, extras = call.q, call.graph, call.extras
    windows, work = _windows_and_work(graph, call.has_windows)
    grad_q = _empty(q, q.dtype, *q.shape)
    stats = _empty(q, torch.float32, *q.shape[:2], 2)
    sums = _empty(q, torch.float32, work.num_partials, *q.shape[1:])
    of_lse = (lse if grad_lse is None else grad_lse.contiguous(), lse)
    flags = extras.flags | {
        "BIAS_GRADIENT": edge_gradients[0].ndim > 1,
        "FEATURES_GRADIENT": edge_gradients[1].ndim > 1,
        "HAS_GRAD_LSE": grad_lse is not None,
        "HAS_REST": rest.numel() > 0,
    }
    key = (*extras.specialisation, *specialisation(grad_lse), *flags.values())
    if windows is not None:
        gpu_windows.backward_targets(
            q, call.k, call.v, call.grad_out, out, rest, grad_lse, lse, stats, grad_q, windows, call.factors
        )
    _launch(
        kernels.backward_targets_kernel,
        (*call.inputs, out, rest, *of_lse, stats, grad_q, *edge_gradients, sums, graph.source_E, extras.edge_id),
        work,
        call.strides,
        call.numbers,
        call.blocks,
        flags,
        key,
    )
    _merge_sums(sums, grad_q, None, work, call.factors[1], key)
    return grad_q, stats


def _over_sources(call: _BackwardCall, stats: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of keys and values, each row's one behind the other in one tensor.

    Args:
        stats: log-sum-exp (of base 2) and delta of each row, [N, H, 2].
    """
    k, extras = call.k, call.extras
    transpose = call.graph.transpose
    windows, work = _windows_and_work(transpose, call.has_windows)
    grad_k, grad_v = _empty(k, k.dtype, len(k), 2, *k.shape[1:]).unbind(1)
    sums = _empty(k, torch.float32, work.num_partials, 2, *k.shape[1:])
    words = stats.view(torch.int64)  # of each row and head: log-sum-exp and delta
    if windows is not None:
        gpu_windows.backward_sources(call.q, k, call.v, call.grad_out, words, grad_k, grad_v, windows, call.factors)
    edges = (transpose.target_E, transpose.position_E, extras.edge_id)
    _launch(
        kernels.backward_sources_kernel,
        (*call.inputs, words, grad_k, grad_v, sums, *edges),
        work,
        call.strides,
        call.numbers,
        call.blocks,
        extras.flags,
        extras.specialisation,
    )
    _merge_sums(sums, grad_k, grad_v, work, call.factors[1], extras.specialisation)
    return grad_k, grad_v


def _launch(
    kernel: Any,
    tensors: tuple[Tensor, ...],
    work: WorkList,
    strides: tuple[int, ...],
    numbers: tuple[float, ...],
    blocks: Blocks,
    flags: dict[str, bool],
    call: Hashable,
) -> None:
    """Run a kernel over the long pieces and over the short rows."""
    if work.num_items == 0:
        return
    lanes = blocks.lanes(TILE_NUMBERS)
    constants = {
        "T": lanes,
        "UNROLL": UNROLL,
        "HEAD_SIZE": blocks.head_size,
        "GROUP": blocks.group,
        "BLOCK_G": blocks.block_g,
        "BLOCK_H": blocks.block_h,
        "BLOCK_D": blocks.block_d,
        "PADDED": blocks.is_padded,
    }
    items = (work.row_I, work.first_I, work.count_I, work.partial_I, work.num_long, work.num_items)
    launch(
        work.compiled,
        (call, numbers[-1]),  # the last of them is an integer
        kernel,
        (work.num_long + -(-(work.num_items - work.num_long) // lanes), blocks.num_blocks, 1),
        (*tensors, *items, *strides, *numbers),
        constants | flags,
        num_warps=max(1, min(8, lanes * blocks.block_h * blocks.block_d // NUMBERS_PER_WARP)),
    )


def _windows_and_work(edges: EdgeGraph | Transpose, has_windows: bool) -> tuple[Windows | None, WorkList]:
    """Return the windows that an attention takes, if any, and the pieces of all other rows."""
    windows = edges.windows if has_windows else None
    return windows, edges.work if windows is None else windows.rest


def _merge_sums(
    sums: Tensor, first: Tensor, second: Tensor | None, work: WorkList, scale: float, call: Hashable
) -> None:
    """Add the pieces of split rows into one tensor, or into two whose sums lie side by side."""
    if work.num_partials:
        width = first.shape[1] * first.shape[2]
        launch(
            work.compiled,
            call,
            kernels.merge_sums_kernel,
            (work.split_row_S.numel(), -(-width // MERGE_WIDTH), 1),
            (sums, first, first if second is None else second, *_split(work), width, scale),
            {"T": MERGE_LANES, "BLOCK_W": MERGE_WIDTH, "HAS_SECOND": second is not None},
            num_warps=1,
        )


class _Extras:
    """Bias, features, key and edge ids; where there is none, a tensor that the kernels do not read."""

    def __init__(
        self,
        bias: Tensor | None,
        features: Tensor | None,
        key: Tensor | None,
        graph: EdgeGraph,
        rows: tuple[Tensor, ...],
    ) -> None:
        unread = graph.source_E
        self.tensors = (
            unread if bias is None else bias.contiguous(),
            unread if features is None else features.contiguous(),
            unread if key is None else key,
        )
        self.edge_id = unread if graph.edge_id_E is None else graph.edge_id_E
        self.flags = {
            "WIDE": any(x.shape[0] * x.stride(0) > MAX_INT32 for x in rows),
            "HAS_BIAS": bias is not None,
            "HAS_FEATURES": features is not None,
            "HAS_EDGE_ID": key is not None and graph.edge_id_E is not None,
            "HAS_DROPOUT": key is not None,
        }
        # Graphs that share their rows share a work list, and so its kernels, but not sources and ids.
        tensors = specialisation(*rows, bias, features, key, graph.source_E, graph.edge_id_E)
        self.specialisation = (*tensors, rows[0].shape[1:], rows[1].shape[1], *self.flags.values())


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def _rows(x: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _aligned(x: Tensor) -> Tensor:
    """Return a tensor that begins at a multiple of 16 bytes, as the passes expect of what a pass has made."""
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _empty(like: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=like.device)


def _split(work: WorkList) -> tuple[Tensor, Tensor, Tensor]:
    return work.split_row_S, work.split_first_S, work.split_count_S
