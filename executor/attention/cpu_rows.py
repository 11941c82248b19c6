"""What joins attention over parts of the edges on CPUs: merges of outputs, statistics of rows, sums of rows."""

from collections.abc import Sequence

import torch
from torch import Tensor


def merge_into(
    out: Tensor, lse: Tensor, rest: Tensor, part_out: Tensor, part_lse: Tensor, part_rest: Tensor, first_row: int
) -> None:
    """Join rows from `first_row` on with a part's; `rest` is the unrounded output, fp32, unless the output is fp32."""
    has_rest = out.dtype != torch.float32
    exact, part = (rest, part_rest) if has_rest else (out, part_out)
    own, own_lse = exact[first_row:], lse[first_row:]
    both_lse = torch.logaddexp(own_lse, part_lse)
    # A row without any edge has minus infinity everywhere: weights of zero.
    finite_lse = both_lse.masked_fill(torch.isinf(both_lse), 0.0)
    weight, part_weight = (torch.exp(x - finite_lse).unsqueeze(-1) for x in (own_lse, part_lse))
    own.mul_(weight).addcmul_(part_weight, part)
    own_lse.copy_(both_lse)
    if has_rest:
        out[first_row:].copy_(own)


def row_stats(grad_out: Tensor, out: Tensor, lse: Tensor, rest: Tensor) -> Tensor:
    """Return log-sum-exp and product of output and its gradient, fp32 [N, H, 2]."""
    exact = out if out.dtype == torch.float32 else rest
    return torch.stack([lse, (grad_out.float() * exact).sum(-1)], -1)


def add_rows_(rows: Tensor, index: Tensor, added: Tensor, counts: Sequence[int]) -> None:
    """Add rows, in their order."""
    del counts
    rows.index_add_(0, index, added.to(rows.dtype))
