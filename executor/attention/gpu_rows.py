"""What joins attention over parts of the edges on GPUs: merges of outputs, statistics of rows, sums of rows."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from executor.attention import row_kernels
from executor.attention.gpu import blocks_of
from executor.attention.launch import Compiled, launch, specialisation

# Of a tile: so many loads of 16 bytes are under way that few programs fill the memory's pipe.
TILE_NUMBERS, NUM_WARPS = 4096, 4
MAX_TILE_ROWS = 128  # more would each have numbers of their own in too many registers
MAX_BLOCK_COLUMNS = 1024
_COMPILED: Compiled = {}


def merge_into(
    out: Tensor, lse: Tensor, rest: Tensor, part_out: Tensor, part_lse: Tensor, part_rest: Tensor, first_row: int
) -> None:
    """Join rows from `first_row` on with a part's; `rest` is what `kernels.rounded_away` gives, or empty."""
    rest, part_rest = (rest[first_row:], part_rest) if rest.numel() else (lse, part_lse)
    tensors = (out[first_row:], rest, lse[first_row:], part_out, part_rest, part_lse)
    _launch_by_heads(row_kernels.merge_kernel, tensors, part_out, {"HAS_REST": rest.dtype == torch.int8})


def row_stats(grad_out: Tensor, out: Tensor, lse: Tensor, rest: Tensor) -> Tensor:
    """Return log-sum-exp of base 2 and product of output and its gradient, fp32 [N, H, 2]."""
    grad_out = grad_out if grad_out.stride(-1) == 1 else grad_out.contiguous()
    stats = torch.empty((*lse.shape, 2), dtype=torch.float32, device=lse.device)
    has_rest = rest.numel() > 0
    tensors = (grad_out, out, rest if has_rest else lse, lse, stats.view(torch.int64))
    constants = {"GRAD_ROW": grad_out.stride(0), "GRAD_HEAD": grad_out.stride(1), "HAS_REST": has_rest}
    _launch_by_heads(row_kernels.row_stats_kernel, tensors, out, constants)
    return stats


def add_rows_(rows: Tensor, index: Tensor, added: Tensor, counts: Sequence[int]) -> None:
    """Add rows, run by run."""
    columns = rows.shape[1]
    added = added if added.stride(1) == 1 else added.contiguous()
    block = min(1 << max(columns - 1, 0).bit_length(), MAX_BLOCK_COLUMNS)
    constants = {
        "COLUMNS": columns,
        "ROW_STRIDE": rows.stride(0),
        "ADDED_STRIDE": added.stride(0),
        "R": min(TILE_NUMBERS // block, MAX_TILE_ROWS),
        "BLOCK_C": block,
    }
    for end, count in zip(accumulate(counts), counts, strict=True):
        run = slice(end - count, end)
        grid = (-(-count // constants["R"]), -(-columns // block))
        _launch(row_kernels.add_rows_kernel, grid, (rows, index[run], added[run]), count, constants)


def _launch_by_heads(kernel: Any, tensors: tuple[Tensor, ...], like: Tensor, constants: dict[str, Any]) -> None:
    """Run a kernel on all rows and heads of a tensor [rows, H, K]."""
    num_rows, num_heads, head_size = like.shape
    blocks = blocks_of(num_heads, num_heads, head_size)
    tile_rows = min(max(TILE_NUMBERS // (blocks.block_h * blocks.block_d), 1), MAX_TILE_ROWS)
    shape = {
        "NUM_HEADS": num_heads,
        "HEAD_SIZE": head_size,
        "R": tile_rows,
        "BLOCK_H": blocks.block_h,
        "BLOCK_D": blocks.block_d,
    }
    _launch(kernel, (-(-num_rows // tile_rows), blocks.num_blocks), tensors, num_rows, shape | constants)


def _launch(
    kernel: Any, grid: tuple[int, int], tensors: tuple[Tensor, ...], num_rows: int, constants: dict[str, Any]
) -> None:
    if 0 in grid:
        return
    key = (*specialisation(*tensors), *constants.values())
    launch(_COMPILED, key, kernel, (*grid, 1), (*tensors, num_rows), constants, num_warps=NUM_WARPS)
