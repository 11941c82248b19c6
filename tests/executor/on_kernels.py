"""Attention by the GPU's code wherever the tensors are; the operators would take the CPU's for tensors on a CPU."""

import unittest.mock
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from executor.attention import gpu, gpu_rows, kernels, parts
from executor.attention.graph import EdgeGraph


class OnKernels(torch.autograd.Function):
    """Attention by the GPU's code, with its gradients."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        features: Tensor | None,
        call: tuple[Tensor | None, EdgeGraph, float, float],
    ) -> tuple[Tensor, Tensor]:
        out, lse, rest = gpu.forward(q, k, v, bias, features, *call, keep_rest=True)
        ctx.save_for_backward(q, k, v, bias, features, out, lse, rest)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, features, out, lse, rest = ctx.saved_tensors
        key, graph, scale, dropout = ctx.call
        grad_out, grad_lse = gradients
        found = gpu.backward(
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
            graph,
            scale,
            dropout,
            bias_gradient=bias is not None,
            features_gradient=features is not None,
        )
        return *found[:3], found[3] if bias is not None else None, found[4] if features is not None else None, None


def by_kernels() -> AbstractContextManager[object]:
    """Return a context in which the GPU's code takes attention in parts; on CPUs Triton interprets its kernels."""
    return unittest.mock.patch.multiple(parts, passes_on=lambda _: gpu, rows_on=lambda _: gpu_rows)


@triton.jit  # type: ignore[untyped-decorator]
def there_and_back(numbers_ptr, rounded_ptr, found_ptr, COUNT: tl.constexpr) -> None:
    """Write what is known of fp32 numbers from their rounded ones and what rounding took."""
    at = tl.arange(0, COUNT)
    rounded = tl.load(rounded_ptr + at)
    taken = kernels.rounded_away(tl.load(numbers_ptr + at), rounded)
    tl.store(found_ptr + at, kernels.unrounded(rounded, taken))
