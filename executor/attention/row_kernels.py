"""Triton kernels over whole rows: joins of attention over parts of the edges, statistics of rows, sums of rows.

They do nothing but move rows, so what counts is that loads are of 16 bytes a thread and many are under way: a program
takes a tile of rows whose columns lie side by side, and what says where columns lie is known when it is compiled.

Letters: R rows of a tile, H heads, D columns of a head, padded to a power of two, F all of them side by side, C columns
of rows without heads.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108  (a condition on a constant chooses what is compiled, which an expression does not)

import triton
import triton.language as tl

from executor.attention.kernels import LN2, LOG2E, rounded_away, unrounded


@triton.jit
def _tile(
    num_rows,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return rows, which are there, and heads; head and column of the columns side by side, and which are there."""
    row_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    head_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    index_F = tl.arange(0, BLOCK_H * BLOCK_D)
    head_F, column_F = tl.program_id(1) * BLOCK_H + index_F // BLOCK_D, index_F % BLOCK_D
    is_row_R = row_R < num_rows
    mask_RF = is_row_R[:, None] & ((head_F < NUM_HEADS) & (column_F < HEAD_SIZE))[None, :]
    mask_RH = is_row_R[:, None] & (head_H < NUM_HEADS)[None, :]
    return row_R, head_H, head_F, column_F, mask_RF, mask_RH


@triton.jit
def _exact(out_ptr, rest_ptr, at_RF, mask_RF, HAS_REST: tl.constexpr):
    """Return outputs with what rounding took from them, fp32 [R, F]."""
    out_RF = tl.load(out_ptr + at_RF, mask=mask_RF, other=0.0)
    if HAS_REST:
        exact_RF = unrounded(out_RF, tl.load(rest_ptr + at_RF, mask=mask_RF, other=0))
    else:
        exact_RF = out_RF
    return exact_RF


@triton.jit(do_not_specialize=["num_rows"])
def merge_kernel(
    out_ptr,
    rest_ptr,
    lse_ptr,
    part_out_ptr,
    part_rest_ptr,
    part_lse_ptr,
    num_rows,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_REST: tl.constexpr,
):
    """Join outputs and log-sum-exps with those over other edges, in place."""
    row_R, head_H, head_F, column_F, mask_RF, mask_RH = _tile(num_rows, NUM_HEADS, HEAD_SIZE, R, BLOCK_H, BLOCK_D)
    at_RF = row_R[:, None] * (NUM_HEADS * HEAD_SIZE) + (head_F * HEAD_SIZE + column_F)[None, :]
    at_RH = row_R[:, None] * NUM_HEADS + head_H[None, :]
    lse_RH = tl.load(lse_ptr + at_RH, mask=mask_RH, other=float("-inf"))
    part_lse_RH = tl.load(part_lse_ptr + at_RH, mask=mask_RH, other=float("-inf"))
    own_RF = _exact(out_ptr, rest_ptr, at_RF, mask_RF, HAS_REST)
    part_RF = _exact(part_out_ptr, part_rest_ptr, at_RF, mask_RF, HAS_REST)
    # Several threads may have read the same numbers; none may write before all have read.
    tl.debug_barrier()
    largest_RH = tl.maximum(lse_RH, part_lse_RH)
    # Without an edge in either, both weights are 0 and their sum is taken as 1.
    is_empty_RH = largest_RH == float("-inf")
    shift_RH = tl.where(is_empty_RH, 0.0, largest_RH)
    weight_RH = tl.exp2((lse_RH - shift_RH) * LOG2E)
    part_weight_RH = tl.exp2((part_lse_RH - shift_RH) * LOG2E)
    sum_RH = tl.where(is_empty_RH, 1.0, weight_RH + part_weight_RH)
    inverse_RH = 1.0 / sum_RH
    weight_RH, part_weight_RH = weight_RH * inverse_RH, part_weight_RH * inverse_RH
    own_RHD, part_RHD = tl.reshape(own_RF, [R, BLOCK_H, BLOCK_D]), tl.reshape(part_RF, [R, BLOCK_H, BLOCK_D])
    joint_RHD = own_RHD * weight_RH[:, :, None] + part_RHD * part_weight_RH[:, :, None]
    joint_RF = tl.reshape(joint_RHD, [R, BLOCK_H * BLOCK_D])
    rounded_RF = joint_RF.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at_RF, rounded_RF, mask=mask_RF)
    if HAS_REST:
        tl.store(rest_ptr + at_RF, rounded_away(joint_RF, rounded_RF), mask=mask_RF)
    both_RH = tl.where(is_empty_RH, float("-inf"), shift_RH + tl.log2(sum_RH) * LN2)
    tl.store(lse_ptr + at_RH, both_RH, mask=mask_RH)


@triton.jit(do_not_specialize=["num_rows"])
def row_stats_kernel(
    grad_out_ptr,
    out_ptr,
    rest_ptr,
    lse_ptr,
    words_ptr,
    num_rows,
    NUM_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    GRAD_ROW: tl.constexpr,
    GRAD_HEAD: tl.constexpr,
    R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_REST: tl.constexpr,
):
    """Give for each row and head a word of 64 bits: log-sum-exp of base 2, and delta = grad_out . out."""
    row_R, head_H, head_F, column_F, mask_RF, mask_RH = _tile(num_rows, NUM_HEADS, HEAD_SIZE, R, BLOCK_H, BLOCK_D)
    at_RF = row_R[:, None] * (NUM_HEADS * HEAD_SIZE) + (head_F * HEAD_SIZE + column_F)[None, :]
    at_grad_RF = row_R[:, None] * GRAD_ROW + (head_F * GRAD_HEAD + column_F)[None, :]
    grad_RF = tl.load(grad_out_ptr + at_grad_RF, mask=mask_RF, other=0.0).to(tl.float32)
    product_RF = grad_RF * _exact(out_ptr, rest_ptr, at_RF, mask_RF, HAS_REST)
    delta_RH = tl.sum(tl.reshape(product_RF, [R, BLOCK_H, BLOCK_D]), axis=2)
    at_RH = row_R[:, None] * NUM_HEADS + head_H[None, :]
    lse_RH = tl.load(lse_ptr + at_RH, mask=mask_RH, other=0.0) * LOG2E
    low_RH = lse_RH.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF
    high_RH = delta_RH.to(tl.int32, bitcast=True).to(tl.int64) << 32
    tl.store(words_ptr + at_RH, high_RH | low_RH, mask=mask_RH)


@triton.jit(do_not_specialize=["num_added"])
def add_rows_kernel(
    rows_ptr,
    index_ptr,
    added_ptr,
    num_added,
    COLUMNS: tl.constexpr,
    ROW_STRIDE: tl.constexpr,
    ADDED_STRIDE: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Add rows to those of distinct indices, in place; sums are fp32."""
    place_R = tl.program_id(0).to(tl.int64) * R + tl.arange(0, R)
    column_C = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    is_there_R = place_R < num_added
    row_R = tl.load(index_ptr + place_R, mask=is_there_R, other=0)
    mask_RC = is_there_R[:, None] & (column_C < COLUMNS)[None, :]
    added_RC = tl.load(added_ptr + place_R[:, None] * ADDED_STRIDE + column_C[None, :], mask=mask_RC, other=0.0)
    at_RC = row_R[:, None] * ROW_STRIDE + column_C[None, :]
    rows_RC = tl.load(rows_ptr + at_RC, mask=mask_RC, other=0.0)
    sum_RC = rows_RC.to(tl.float32) + added_RC.to(tl.float32)
    tl.store(rows_ptr + at_RC, sum_RC.to(rows_ptr.dtype.element_ty), mask=mask_RC)
