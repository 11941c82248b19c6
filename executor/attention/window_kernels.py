"""Triton kernels of attention over edges for windows of rows that share neighbours, on tensor cores.

A program takes 16 rows side by side and the distinct neighbours of all of them, a few at a time: each neighbour's rows
are gathered once for the window, scores of all pairs are products of small matrices, head by head, and a mask of 16
bits a neighbour says which pairs are edges. Pairs that are none start their product at a score so low that their weight
is zero, which costs one choice a pair for all heads. Scores stay as the products give them; their factor is folded into
the exponent.

Letters: W rows of the window, C neighbours of a step, H heads of a block, D columns of a head, F all of them side by
side.
"""

# mypy: ignore-errors

import triton
import triton.language as tl

from executor.attention.kernels import LN2, LOG2E, gather, rounded_away, unrounded

# Both are finite, so that differences are no NaN, and far apart, so that a row without an edge yet has weights of zero.
MASKED = tl.constexpr(-1.0e30)  # score of a pair that is no edge
UNSEEN = tl.constexpr(-1.0e20)  # largest score of a row without an edge yet


@triton.jit
def _by_head(x_TF, T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return rows head by head, [H, T, D]."""
    return tl.permute(tl.reshape(x_TF, [T, BLOCK_H, BLOCK_D]), [1, 0, 2])


@triton.jit
def _by_head_transposed(x_TF, T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return rows head by head as columns, [H, D, T]."""
    return tl.permute(tl.reshape(x_TF, [T, BLOCK_H, BLOCK_D]), [1, 2, 0])


@triton.jit
def _window(window_ptr, first_ptr, num_rows, W: tl.constexpr, BC: tl.constexpr):
    """Return the rows of this program's window, which are there, its first neighbour and its number of steps."""
    row_W = tl.load(window_ptr + tl.program_id(0)) * W + tl.arange(0, W)
    first = tl.load(first_ptr + tl.program_id(0))
    end = tl.load(first_ptr + tl.program_id(0) + 1)
    return row_W, row_W < num_rows, first, ((end - first) // BC).to(tl.int32)


@triton.jit
def _columns(BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return the heads of this block, and for the columns of all of them side by side: head, column."""
    index_F = tl.arange(0, BLOCK_H * BLOCK_D)
    first_head = tl.program_id(1) * BLOCK_H
    return first_head + tl.arange(0, BLOCK_H), first_head + index_F // BLOCK_D, index_F % BLOCK_D


@triton.jit
def _start_of_scores(bits_C, W: tl.constexpr, BC: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return what the products of all pairs are added to, [H, W, C]: zero for edges."""
    is_edge_WC = (bits_C[None, :] & (1 << tl.arange(0, W))[:, None]) != 0
    return tl.broadcast_to(tl.where(is_edge_WC, 0.0, MASKED)[None, :, :], [BLOCK_H, W, BC])


@triton.jit
def _offsets_by_head(row_W, head_H, row_size, BLOCK_D: tl.constexpr):
    """Return the offsets of rows head by head, [H, W, D].

    Bytes are read and written so: a layout that suits bytes of whole rows would reach from there into the loop.
    """
    at_HW = row_W.to(tl.int64)[None, :] * row_size + head_H[:, None] * BLOCK_D
    return at_HW[:, :, None] + tl.arange(0, BLOCK_D)[None, None, :]


@triton.jit
def _store_rows(ptr, row_W, is_row_W, row_size, at_F, x_HWD, W: tl.constexpr, F: tl.constexpr):
    """Write rows that are given head by head."""
    at_WF = row_W.to(tl.int64)[:, None] * row_size + at_F[None, :]
    tl.store(ptr + at_WF, tl.reshape(tl.permute(x_HWD, [1, 0, 2]), [W, F]), mask=is_row_W[:, None])


@triton.jit
def window_forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    rest_ptr,
    lse_ptr,
    window_ptr,
    first_ptr,
    column_ptr,
    bits_ptr,
    num_rows,
    num_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    score_factor,
    W: tl.constexpr,
    BC: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_REST: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Give outputs and log-sum-exps of windows, as `kernels.forward_kernel` does of rows."""
    F: tl.constexpr = BLOCK_H * BLOCK_D
    row_W, is_row_W, first, num_steps = _window(window_ptr, first_ptr, num_rows, W, BC)
    head_H, head_F, column_F = _columns(BLOCK_H, BLOCK_D)
    own_W = tl.minimum(row_W, num_rows - 1)
    q_WF = gather(q_ptr, own_W, q_row, head_F * q_head + column_F, column_F, False, WIDE)
    q_HWD = _by_head(q_WF, W, BLOCK_H, BLOCK_D)
    largest_HW = tl.full([BLOCK_H, W], UNSEEN, tl.float32)
    sum_HW = tl.zeros([BLOCK_H, W], tl.float32)
    acc_HWD = tl.zeros([BLOCK_H, W, BLOCK_D], tl.float32)
    at_C = first + tl.arange(0, BC)
    next_C, next_bits_C = tl.load(column_ptr + at_C), tl.load(bits_ptr + at_C)
    for _ in range(num_steps):
        source_C, bits_C = next_C, next_bits_C.to(tl.int32)
        # Past the end of the last window there are entries that nobody uses.
        next_C, next_bits_C = tl.load(column_ptr + at_C + BC), tl.load(bits_ptr + at_C + BC)
        k_CF = gather(k_ptr, source_C, k_row, head_F * k_head + column_F, column_F, False, WIDE)
        v_CF = gather(v_ptr, source_C, v_row, head_F * v_head + column_F, column_F, False, WIDE)
        k_HDC = _by_head_transposed(k_CF, BC, BLOCK_H, BLOCK_D)
        start_HWC = _start_of_scores(bits_C, W, BC, BLOCK_H)
        score_HWC = tl.dot(q_HWD, k_HDC, start_HWC, input_precision=PRECISION)
        new_HW = tl.maximum(largest_HW, tl.max(score_HWC, axis=2))
        shrink_HW = tl.exp2((largest_HW - new_HW) * score_factor)
        weight_HWC = tl.exp2(score_HWC * score_factor - (new_HW * score_factor)[:, :, None])
        largest_HW = new_HW
        sum_HW = sum_HW * shrink_HW + tl.sum(weight_HWC, axis=2)
        v_HCD = _by_head(v_CF, BC, BLOCK_H, BLOCK_D)
        acc_HWD = acc_HWD * shrink_HW[:, :, None]
        acc_HWD = tl.dot(weight_HWC.to(v_CF.dtype), v_HCD, acc_HWD, input_precision=PRECISION)
        at_C += BC
    # A row without edges has a sum of zero: its output is zeros, its log-sum-exp minus infinity.
    is_empty_HW = sum_HW == 0.0
    out_HWD = acc_HWD * (1.0 / tl.where(is_empty_HW, 1.0, sum_HW))[:, :, None]
    row_size, at_F = num_heads * BLOCK_D, head_F * BLOCK_D + column_F
    rounded_HWD = out_HWD.to(out_ptr.dtype.element_ty)
    _store_rows(out_ptr, row_W, is_row_W, row_size, at_F, rounded_HWD, W, F)
    if HAS_REST:
        at_HWD = _offsets_by_head(row_W, head_H, row_size, BLOCK_D)
        tl.store(rest_ptr + at_HWD, rounded_away(out_HWD, rounded_HWD), mask=is_row_W[None, :, None])
    lse_HW = tl.where(is_empty_HW, float("-inf"), (largest_HW * score_factor + tl.log2(sum_HW)) * LN2)
    at_HW = row_W.to(tl.int64)[None, :] * num_heads + head_H[:, None]
    tl.store(lse_ptr + at_HW, lse_HW, mask=is_row_W[None, :])


@triton.jit
def window_backward_targets_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    out_ptr,
    rest_ptr,
    grad_lse_ptr,
    lse_ptr,
    stats_ptr,
    grad_q_ptr,
    window_ptr,
    first_ptr,
    column_ptr,
    bits_ptr,
    num_rows,
    num_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    grad_row,
    grad_head,
    score_factor,
    scale,
    W: tl.constexpr,
    BC: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_REST: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Give the gradients of windows' queries and each row's statistics, as `kernels.backward_targets_kernel` does."""
    F: tl.constexpr = BLOCK_H * BLOCK_D
    row_W, is_row_W, first, num_steps = _window(window_ptr, first_ptr, num_rows, W, BC)
    head_H, head_F, column_F = _columns(BLOCK_H, BLOCK_D)
    own_W = tl.minimum(row_W, num_rows - 1)
    row_size, at_F = num_heads * BLOCK_D, head_F * BLOCK_D + column_F
    q_WF = gather(q_ptr, own_W, q_row, head_F * q_head + column_F, column_F, False, WIDE)
    q_HWD = _by_head(q_WF, W, BLOCK_H, BLOCK_D)
    grad_WF = gather(grad_out_ptr, own_W, grad_row, head_F * grad_head + column_F, column_F, False, WIDE)
    grad_HWD = _by_head(grad_WF, W, BLOCK_H, BLOCK_D)
    out_HWD = _by_head(gather(out_ptr, own_W, row_size, at_F, column_F, False, True), W, BLOCK_H, BLOCK_D)
    if HAS_REST:
        out_HWD = unrounded(out_HWD, tl.load(rest_ptr + _offsets_by_head(own_W, head_H, row_size, BLOCK_D)))
    delta_HW = tl.sum(grad_HWD.to(tl.float32) * out_HWD, axis=2)
    at_HW = own_W.to(tl.int64)[None, :] * num_heads + head_H[:, None]
    if HAS_GRAD_LSE:
        delta_HW -= tl.load(grad_lse_ptr + at_HW)
    lse_HW = tl.load(lse_ptr + at_HW) * LOG2E
    tl.store(stats_ptr + 2 * at_HW, lse_HW, mask=is_row_W[None, :])
    tl.store(stats_ptr + 2 * at_HW + 1, delta_HW, mask=is_row_W[None, :])
    lse_HW = tl.maximum(lse_HW, UNSEEN)  # minus infinity without an edge
    acc_HWD = tl.zeros([BLOCK_H, W, BLOCK_D], tl.float32)
    at_C = first + tl.arange(0, BC)
    next_C, next_bits_C = tl.load(column_ptr + at_C), tl.load(bits_ptr + at_C)
    for _ in range(num_steps):
        source_C, bits_C = next_C, next_bits_C.to(tl.int32)
        # Past the end of the last window there are entries that nobody uses.
        next_C, next_bits_C = tl.load(column_ptr + at_C + BC), tl.load(bits_ptr + at_C + BC)
        k_CF = gather(k_ptr, source_C, k_row, head_F * k_head + column_F, column_F, False, WIDE)
        v_CF = gather(v_ptr, source_C, v_row, head_F * v_head + column_F, column_F, False, WIDE)
        k_HDC = _by_head_transposed(k_CF, BC, BLOCK_H, BLOCK_D)
        v_HDC = _by_head_transposed(v_CF, BC, BLOCK_H, BLOCK_D)
        start_HWC = _start_of_scores(bits_C, W, BC, BLOCK_H)
        score_HWC = tl.dot(q_HWD, k_HDC, start_HWC, input_precision=PRECISION)
        start_HWC = tl.broadcast_to(-delta_HW[:, :, None], [BLOCK_H, W, BC])
        slope_HWC = tl.dot(grad_HWD, v_HDC, start_HWC, input_precision=PRECISION)
        weight_HWC = tl.exp2(score_HWC * score_factor - lse_HW[:, :, None])
        grad_score_HWC = (weight_HWC * slope_HWC).to(k_CF.dtype)
        acc_HWD = tl.dot(grad_score_HWC, _by_head(k_CF, BC, BLOCK_H, BLOCK_D), acc_HWD, input_precision=PRECISION)
        at_C += BC
    _store_rows(grad_q_ptr, row_W, is_row_W, row_size, at_F, acc_HWD * scale, W, F)


@triton.jit
def window_backward_sources_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    grad_out_ptr,
    stats_ptr,
    grad_k_ptr,
    grad_v_ptr,
    window_ptr,
    first_ptr,
    column_ptr,
    bits_ptr,
    num_rows,
    num_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    grad_row,
    grad_head,
    score_factor,
    scale,
    W: tl.constexpr,
    BC: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Give the gradients of windows' keys and values, one behind the other, as `kernels.backward_sources_kernel` does.

    Neighbours are targets. Each has an edge into the window, padding repeats one that has: its log-sum-exp is finite.
    """
    F: tl.constexpr = BLOCK_H * BLOCK_D
    row_W, is_row_W, first, num_steps = _window(window_ptr, first_ptr, num_rows, W, BC)
    head_H, head_F, column_F = _columns(BLOCK_H, BLOCK_D)
    own_W = tl.minimum(row_W, num_rows - 1)
    k_WF = gather(k_ptr, own_W, k_row, head_F * k_head + column_F, column_F, False, WIDE)
    k_HWD = _by_head(k_WF, W, BLOCK_H, BLOCK_D)
    v_WF = gather(v_ptr, own_W, v_row, head_F * v_head + column_F, column_F, False, WIDE)
    v_HWD = _by_head(v_WF, W, BLOCK_H, BLOCK_D)
    grad_k_HWD = tl.zeros([BLOCK_H, W, BLOCK_D], tl.float32)
    grad_v_HWD = tl.zeros([BLOCK_H, W, BLOCK_D], tl.float32)
    at_C = first + tl.arange(0, BC)
    next_C, next_bits_C = tl.load(column_ptr + at_C), tl.load(bits_ptr + at_C)
    for _ in range(num_steps):
        target_C, bits_C = next_C, next_bits_C.to(tl.int32)
        # Past the end of the last window there are entries that nobody uses.
        next_C, next_bits_C = tl.load(column_ptr + at_C + BC), tl.load(bits_ptr + at_C + BC)
        q_CF = gather(q_ptr, target_C, q_row, head_F * q_head + column_F, column_F, False, WIDE)
        grad_CF = gather(grad_out_ptr, target_C, grad_row, head_F * grad_head + column_F, column_F, False, WIDE)
        at_HC = target_C.to(tl.int64)[None, :] * num_heads + head_H[:, None]
        stats_HC = tl.load(stats_ptr + at_HC)
        lse_HC = stats_HC.to(tl.int32).to(tl.float32, bitcast=True)
        delta_HC = (stats_HC >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        q_HDC = _by_head_transposed(q_CF, BC, BLOCK_H, BLOCK_D)
        grad_HDC = _by_head_transposed(grad_CF, BC, BLOCK_H, BLOCK_D)
        start_HWC = _start_of_scores(bits_C, W, BC, BLOCK_H)
        score_HWC = tl.dot(k_HWD, q_HDC, start_HWC, input_precision=PRECISION)
        slope_HWC = tl.dot(v_HWD, grad_HDC, input_precision=PRECISION) - delta_HC[:, None, :]
        weight_HWC = tl.exp2(score_HWC * score_factor - lse_HC[:, None, :])
        grad_score_HWC = (weight_HWC * slope_HWC).to(q_CF.dtype)
        q_HCD = _by_head(q_CF, BC, BLOCK_H, BLOCK_D)
        grad_HCD = _by_head(grad_CF, BC, BLOCK_H, BLOCK_D)
        grad_k_HWD = tl.dot(grad_score_HWC, q_HCD, grad_k_HWD, input_precision=PRECISION)
        grad_v_HWD = tl.dot(weight_HWC.to(q_CF.dtype), grad_HCD, grad_v_HWD, input_precision=PRECISION)
        at_C += BC
    row_size, at_F = 2 * num_heads * BLOCK_D, head_F * BLOCK_D + column_F
    _store_rows(grad_k_ptr, row_W, is_row_W, row_size, at_F, grad_k_HWD * scale, W, F)
    _store_rows(grad_v_ptr, row_W, is_row_W, row_size, at_F, grad_v_HWD, W, F)
