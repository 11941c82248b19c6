"""Attention over windows of rows on GPUs: when it can run, and what its kernels write."""

import math
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor

from executor.attention import window_kernels
from executor.attention.graph import MAX_INT32
from executor.attention.launch import launch, specialisation
from executor.attention.windows import COLUMN_STEP, WINDOW_ROWS, Windows

# Numbers of a gathered row that a program takes: more leave a warp too few registers, fewer are no whole transfers.
MIN_BLOCK_NUMBERS, MAX_BLOCK_NUMBERS = 64, 128
# Warps, and steps of neighbours under way; fastest of those tried on an H200 (traces/attention-windows_h200x1_202611).
FORWARD, TARGETS, SOURCES = (2, 2), (4, 2), (4, 2)
# Factors of scores with which the scores of no edge get weights of zero.
_FACTORS = (1e-6, 1e6)


def precision_of(dtype: torch.dtype) -> str | None:
    """Return in what tensor cores take rows of a format; None where they would lose what fp32 promises."""
    if dtype != torch.float32:
        return "ieee"  # of no effect
    return "tf32" if torch.get_float32_matmul_precision() != "highest" else None


def can_run(q: Tensor, k: Tensor, extras: tuple[Tensor | None, ...], score_factor: float) -> bool:
    """Return whether windows can serve an attention: their products take whole heads, and edges have no more to say.

    Args:
        extras: bias, features and key of dropout, which windows know nothing of.
    """
    head_size = q.shape[2]
    return (
        all(x is None for x in extras)
        and q.shape[1] == k.shape[1]
        and head_size in (16, 32, 64, 128)
        and block_heads(q.shape[1], head_size) * head_size >= MIN_BLOCK_NUMBERS
        and _FACTORS[0] < score_factor < _FACTORS[1]
        and precision_of(q.dtype) is not None
    )


def block_heads(num_heads: int, head_size: int) -> int:
    """Return how many heads a program takes: a power of two."""
    return math.gcd(num_heads, max(MAX_BLOCK_NUMBERS // head_size, 1))


def forward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, rest: Tensor, lse: Tensor, windows: Windows, score_factor: float
) -> None:
    """Write output, what rounding took from it if there is room, and log-sum-exp of all rows of windows."""
    tensors = (q, k, v, out, rest, lse)
    flags = {"HAS_REST": rest.numel() > 0}
    _launch(window_kernels.window_forward_kernel, FORWARD, tensors, (q, k, v), (score_factor,), windows, flags)


def backward_targets(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    out: Tensor,
    rest: Tensor,
    grad_lse: Tensor | None,
    lse: Tensor,
    stats: Tensor,
    grad_q: Tensor,
    windows: Windows,
    numbers: tuple[float, float],
) -> None:
    """Write statistics and gradients of queries of all rows of windows.

    Args:
        numbers: factor of scores, scale.
    """
    tensors = (q, k, v, grad_out, out, rest, lse if grad_lse is None else grad_lse.contiguous(), lse, stats, grad_q)
    flags = {"HAS_REST": rest.numel() > 0, "HAS_GRAD_LSE": grad_lse is not None}
    kernel = window_kernels.window_backward_targets_kernel
    _launch(kernel, TARGETS, tensors, (q, k, v, grad_out), numbers, windows, flags)


def backward_sources(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad_out: Tensor,
    stats: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    windows: Windows,
    numbers: tuple[float, float],
) -> None:
    """Write gradients of keys and values of all rows of windows; `stats` are words of log-sum-exp and delta."""
    tensors = (q, k, v, grad_out, stats, grad_k, grad_v)
    kernel = window_kernels.window_backward_sources_kernel
    _launch(kernel, SOURCES, tensors, (q, k, v, grad_out), numbers, windows, {})


def _launch(
    kernel: Any,
    warps_and_stages: tuple[int, int],
    tensors: tuple[Tensor, ...],
    rows: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    windows: Windows,
    flags: dict[str, bool],
) -> None:
    """Run a kernel on all windows; `rows` are those of its tensors whose strides it takes."""
    q, own = rows[0], tensors[-1]
    num_heads, head_size = q.shape[1:]
    # Gradients of keys and values have their rows, outputs and gradients of queries those of the queries.
    heads = block_heads(num_heads, head_size)
    constants: dict[str, Any] = {
        "W": WINDOW_ROWS,
        "BC": COLUMN_STEP,
        "BLOCK_H": heads,
        "BLOCK_D": head_size,
        "WIDE": any(x.shape[0] * x.stride(0) > MAX_INT32 for x in rows),
        "PRECISION": precision_of(q.dtype),
    }
    key: Hashable = (*specialisation(*tensors), head_size, *constants.values(), *flags.values())
    lists = (windows.window_K, windows.first_K1, windows.column_C, windows.bits_C)
    strides = [stride for x in rows for stride in x.stride()[:2]]
    launch(
        windows.compiled,
        key,
        kernel,
        (windows.num_windows, num_heads // heads, 1),
        (*tensors, *lists, own.shape[0], num_heads, *strides, *numbers),
        constants | flags,
        num_warps=warps_and_stages[0],
        num_stages=warps_and_stages[1],
    )
