"""What attention in parts gives on fake tensors: shapes and formats without numbers, as on CPUs."""

from collections.abc import Callable

import torch
from torch import Tensor

import executor.attention.parts  # noqa: F401  # defines the operators

_LIBRARY = torch.library.Library("graphpilot", "FRAGMENT")


def _attend_part(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, graph: int, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    is_exact = q.dtype == torch.float32
    rest = q.new_empty(0) if is_exact else q.new_empty(q.shape, dtype=torch.float32)
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32), rest


def _merge_parts(out: Tensor, *arguments: object) -> None:
    return None


def _row_stats(grad_out: Tensor, *whole: Tensor) -> Tensor:
    return grad_out.new_empty((*grad_out.shape[:2], 2), dtype=torch.float32)


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
    grad_bias = bias.new_empty(bias.shape) if bias is not None and bias_gradient else q.new_empty(0)
    return k.new_empty(k.shape), v.new_empty(v.shape), grad_bias


def _targets(
    grad_out: Tensor, stats: Tensor, out: Tensor, lse: Tensor, rest: Tensor, q: Tensor, *arguments: object
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(0)  # the bias's comes from the sources


def _add_rows(rows: Tensor, index: Tensor, added: Tensor, counts: list[int]) -> None:
    return None


_FAKES: dict[str, Callable[..., object]] = {
    "attend_part": _attend_part,
    "merge_parts_": _merge_parts,
    "row_stats": _row_stats,
    "attention_sources": _sources,
    "attention_targets": _targets,
    "add_rows_": _add_rows,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"graphpilot::{_name}", _fake, lib=_LIBRARY)
