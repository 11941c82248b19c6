"""Triton kernels of attention over edges: forward, backward over targets, backward over sources, and merges.

A program has T lanes. A lane walks over edges: the lanes of a long row's program take every T-th edge of one piece of
the row and are joined at its end; short rows have a lane each, several rows a program. Per step a lane gathers one row
of keys and one of values for all heads of the block, so nothing crosses lanes before the end, and every sum has one
order: results are the same bits in every run. Arithmetic is fp32; scores are in units of log 2.

Letters: T lanes, H heads of a block, D columns of a head, padded to a power of two, F all of them side by side, C those
of the key heads. What begins with `own` belongs to the row whose edges a lane walks over.
"""

# mypy: ignore-errors
# ruff: noqa: SIM108  (a condition on a constant chooses what is compiled, which an expression does not)

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1.0e30)  # below every score and finite, so that differences of it are no NaN


@triton.jit
def _mix(bits):
    """`executor.keyed.mix`."""
    bits = bits * 0x85EBCA6B
    bits = bits ^ (bits >> 13)
    bits = bits * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def kept_edges(edge_id_T, head_H, key_ptr, lowest_kept):
    """Return what dropout keeps, [T, H]: `executor.keyed.edge_head_bits` at or above a threshold."""
    seed = tl.load(key_ptr).to(tl.uint32)
    step = tl.load(key_ptr + 1).to(tl.uint32)
    key = _mix(_mix(seed ^ 0x9E3779B1) ^ step)
    bits_T = _mix(_mix(edge_id_T.to(tl.uint32) ^ key) ^ (edge_id_T >> 32).to(tl.uint32))
    head_bits_H = (head_H + 1).to(tl.uint32) * 0x9E3779B1
    bits_TH = _mix(bits_T[:, None] ^ head_bits_H[None, :])
    return bits_TH.to(tl.int32, bitcast=True) >= lowest_kept


@triton.jit
def _heads(num_kv_heads, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_H: tl.constexpr):
    """Return the query heads of this block, and which are there."""
    index_H = tl.arange(0, BLOCK_H)
    kv_H = tl.program_id(1) * (BLOCK_H // BLOCK_G) + index_H // BLOCK_G
    within_H = index_H % BLOCK_G
    return kv_H * GROUP + within_H, (kv_H < num_kv_heads) & (within_H < GROUP)


@triton.jit
def _pieces(row_ptr, first_ptr, count_ptr, num_long, num_items, T: tl.constexpr, UNROLL: tl.constexpr):
    """Return for each lane its row, whether it has one, its first edge and end; and the stride and number of steps.

    The lanes of one of the first `num_long` programs share a long piece; those of the others have a short row each.
    """
    program = tl.program_id(0)
    is_long = program < num_long
    lane_T = tl.arange(0, T)
    item_T = tl.where(is_long, program, num_long + (program - num_long) * T + lane_T)
    there_T = item_T < num_items
    row_T = tl.load(row_ptr + item_T, mask=there_T, other=0)
    first_T = tl.load(first_ptr + item_T, mask=there_T, other=0)
    count_T = tl.load(count_ptr + item_T, mask=there_T, other=0)
    stride = tl.where(is_long, T, 1)
    num_steps = (tl.max(count_T, axis=0) + UNROLL * stride - 1) // (UNROLL * stride)
    return row_T, there_T, first_T + tl.where(is_long, lane_T, 0), first_T + count_T, stride, num_steps, is_long


@triton.jit
def gather(ptr, row_T, row_stride, at_F, is_F, PADDED: tl.constexpr, WIDE: tl.constexpr):
    """Return rows, [T, F]; WIDE if an offset may pass 2^31.

    Rows are read in two dimensions: in three, Triton lays neighbouring threads over rows instead of along one.
    """
    if WIDE:
        at_TF = row_T.to(tl.int64)[:, None] * row_stride + at_F[None, :]
    else:
        at_TF = row_T[:, None] * row_stride + at_F[None, :]
    if PADDED:
        rows_TF = tl.load(ptr + at_TF, mask=is_F[None, :], other=0.0)
    else:
        rows_TF = tl.load(ptr + at_TF)
    return rows_TF


@triton.jit
def _columns(
    num_kv_heads,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
):
    """Return for the columns of this block's heads side by side: query head, key head, column, whether it is there."""
    index_F = tl.arange(0, BLOCK_H * BLOCK_D)
    index_H = index_F // BLOCK_D
    kv_F = tl.program_id(1) * (BLOCK_H // BLOCK_G) + index_H // BLOCK_G
    within_F = index_H % BLOCK_G
    column_F = index_F % BLOCK_D
    return kv_F * GROUP + within_F, kv_F, column_F, (kv_F < num_kv_heads) & (within_F < GROUP) & (column_F < HEAD_SIZE)


@triton.jit
def _kv_columns(num_kv_heads, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, HEAD_SIZE: tl.constexpr):
    """Return the offsets of the columns of this block's key heads in a row, and which are there."""
    index_C = tl.arange(0, BLOCK_K * BLOCK_D)
    kv_C = tl.program_id(1) * BLOCK_K + index_C // BLOCK_D
    return kv_C * HEAD_SIZE + index_C % BLOCK_D, (kv_C < num_kv_heads) & (index_C % BLOCK_D < HEAD_SIZE)


@triton.jit
def _per_head(products_TF, T: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return sums over the columns of each head, [T, H]."""
    return tl.sum(tl.reshape(products_TF, [T, BLOCK_H, BLOCK_D]), axis=2)


@triton.jit
def rounded_away(out, rounded):
    """Return the eight bits of fp32 numbers behind those that they were rounded to, int8.

    Patterns of fp32 are in the order of their numbers, so a difference of patterns is what rounding took.
    """
    SHIFT: tl.constexpr = 8 if rounded.dtype == tl.bfloat16 else 5
    taken = out.to(tl.int32, bitcast=True) - rounded.to(tl.float32).to(tl.int32, bitcast=True)
    taken = (taken + (1 << (SHIFT - 1))) >> SHIFT
    return tl.minimum(tl.maximum(taken, -128), 127).to(tl.int8)


@triton.jit
def unrounded(rounded, taken):
    """Return numbers with what `rounded_away` kept of their rounding, fp32, within 2^-15 of what they were."""
    SHIFT: tl.constexpr = 8 if rounded.dtype == tl.bfloat16 else 5
    return (rounded.to(tl.float32).to(tl.int32, bitcast=True) + (taken.to(tl.int32) << SHIFT)).to(
        tl.float32, bitcast=True
    )


@triton.jit
def _store_output(out_ptr, rest_ptr, at, out, mask, HAS_REST: tl.constexpr):
    """Write the output, and what its rounding took away."""
    rounded = out.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, rounded, mask=mask)
    if HAS_REST:
        tl.store(rest_ptr + at, rounded_away(out, rounded), mask=mask)


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    features_ptr,
    key_ptr,
    out_ptr,
    rest_ptr,
    lse_ptr,
    partial_out_ptr,
    partial_stat_ptr,
    source_ptr,
    edge_id_ptr,
    row_ptr,
    first_ptr,
    count_ptr,
    partial_ptr,
    num_long,
    num_items,
    num_kv_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    score_factor,
    keep_factor,
    lowest_kept,
    T: tl.constexpr,
    UNROLL: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PADDED: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FEATURES: tl.constexpr,
    HAS_EDGE_ID: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HAS_REST: tl.constexpr,
):
    """Give outputs and log-sum-exps, and what rounding took from the outputs if the backward pass will want it."""
    head_H, is_head_H = _heads(num_kv_heads, GROUP, BLOCK_G, BLOCK_H)
    head_F, kv_F, column_F, is_F = _columns(num_kv_heads, GROUP, BLOCK_G, BLOCK_H, BLOCK_D, HEAD_SIZE)
    at_F = head_F * HEAD_SIZE + column_F
    num_heads = num_kv_heads * GROUP
    row_T, there_T, edge_T, end_T, stride, num_steps, is_long = _pieces(
        row_ptr, first_ptr, count_ptr, num_long, num_items, T, UNROLL
    )
    own_q_TF = gather(q_ptr, row_T, q_row, head_F * q_head + column_F, is_F, PADDED, WIDE).to(tl.float32) * score_factor
    largest_TH = tl.full([T, BLOCK_H], LOWEST, tl.float32)
    sum_TH = tl.zeros([T, BLOCK_H], tl.float32)
    acc_THD = tl.zeros([T, BLOCK_H, BLOCK_D], tl.float32)
    # A lane that has come to its end takes its last edge again, with a weight of zero.
    last_T = tl.maximum(end_T - 1, 0)
    next_T = tl.load(source_ptr + tl.minimum(edge_T, last_T), mask=end_T > 0, other=0)
    second_T = tl.load(source_ptr + tl.minimum(edge_T + stride, last_T), mask=end_T > 0, other=0)
    for _ in range(num_steps):
        for _ in tl.static_range(UNROLL):
            valid_T = edge_T < end_T
            at_T = tl.minimum(edge_T, last_T)
            source_T = next_T
            next_T = second_T
            second_T = tl.load(source_ptr + tl.minimum(edge_T + 2 * stride, last_T))
            k_TF = gather(k_ptr, source_T, k_row, kv_F * k_head + column_F, is_F, PADDED, WIDE).to(tl.float32)
            v_TF = gather(v_ptr, source_T, v_row, kv_F * v_head + column_F, is_F, PADDED, WIDE).to(tl.float32)
            if HAS_FEATURES:
                at_features_F = kv_F * HEAD_SIZE + column_F
                features_TF = gather(
                    features_ptr, at_T, num_kv_heads * HEAD_SIZE, at_features_F, is_F, PADDED, True
                ).to(tl.float32)
                k_TF += features_TF
                v_TF += features_TF
            score_TH = _per_head(own_q_TF * k_TF, T, BLOCK_H, BLOCK_D)
            if HAS_BIAS:
                at_TH = edge_T.to(tl.int64)[:, None] * num_heads + head_H[None, :]
                score_TH += LOG2E * tl.load(bias_ptr + at_TH, mask=valid_T[:, None] & is_head_H[None, :], other=0.0).to(
                    tl.float32
                )
            score_TH = tl.where(valid_T[:, None], score_TH, LOWEST)
            new_TH = tl.maximum(largest_TH, score_TH)
            shrink_TH = tl.exp2(largest_TH - new_TH)
            weight_TH = tl.where(valid_T[:, None], tl.exp2(score_TH - new_TH), 0.0)
            largest_TH = new_TH
            sum_TH = sum_TH * shrink_TH + weight_TH
            if HAS_DROPOUT:
                edge_id_T = at_T.to(tl.int64)
                if HAS_EDGE_ID:
                    edge_id_T = tl.load(edge_id_ptr + at_T)
                weight_TH = tl.where(kept_edges(edge_id_T, head_H, key_ptr, lowest_kept), weight_TH * keep_factor, 0.0)
            acc_THD = acc_THD * shrink_TH[:, :, None] + weight_TH[:, :, None] * tl.reshape(v_TF, [T, BLOCK_H, BLOCK_D])
            edge_T += stride

    if is_long:
        joint_H = tl.max(largest_TH, axis=0)
        factor_TH = tl.exp2(largest_TH - joint_H[None, :])
        sum_H = tl.sum(sum_TH * factor_TH, axis=0)
        acc_HD = tl.sum(acc_THD * factor_TH[:, :, None], axis=0)
        row = tl.load(row_ptr + tl.program_id(0)).to(tl.int64)
        partial = tl.load(partial_ptr + tl.program_id(0)).to(tl.int64)
        if partial < 0:
            out_F = tl.reshape(acc_HD / tl.where(is_head_H, sum_H, 1.0)[:, None], [BLOCK_H * BLOCK_D])
            _store_output(out_ptr, rest_ptr, row * num_heads * HEAD_SIZE + at_F, out_F, is_F, HAS_REST)
            tl.store(lse_ptr + row * num_heads + head_H, (joint_H + tl.log2(sum_H)) * LN2, mask=is_head_H)
        else:
            acc_F = tl.reshape(acc_HD, [BLOCK_H * BLOCK_D])
            tl.store(partial_out_ptr + partial * num_heads * HEAD_SIZE + at_F, acc_F, mask=is_F)
            at_H = (partial * num_heads + head_H) * 2
            tl.store(partial_stat_ptr + at_H, joint_H, mask=is_head_H)
            tl.store(partial_stat_ptr + at_H + 1, sum_H, mask=is_head_H)
    else:
        # A row without edges has a sum of zero: its output is zeros, its log-sum-exp minus infinity.
        is_empty_TH = sum_TH == 0.0
        inverse_TH = 1.0 / tl.where(is_empty_TH, 1.0, sum_TH)
        out_THD = tl.where(is_empty_TH[:, :, None], 0.0, acc_THD * inverse_TH[:, :, None])
        at_TF = row_T.to(tl.int64)[:, None] * num_heads * HEAD_SIZE + at_F[None, :]
        out_TF = tl.reshape(out_THD, [T, BLOCK_H * BLOCK_D])
        _store_output(out_ptr, rest_ptr, at_TF, out_TF, there_T[:, None] & is_F[None, :], HAS_REST)
        lse_TH = tl.where(is_empty_TH, float("-inf"), (largest_TH + tl.log2(sum_TH)) * LN2)
        mask_TH = there_T[:, None] & is_head_H[None, :]
        tl.store(lse_ptr + row_T.to(tl.int64)[:, None] * num_heads + head_H[None, :], lse_TH, mask=mask_TH)


@triton.jit
def merge_forward_kernel(
    partial_out_ptr,
    partial_stat_ptr,
    out_ptr,
    rest_ptr,
    lse_ptr,
    split_row_ptr,
    split_first_ptr,
    split_count_ptr,
    num_heads,
    T: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_REST: tl.constexpr,
):
    """Join the pieces of one split row."""
    row = tl.load(split_row_ptr + tl.program_id(0)).to(tl.int64)
    first = tl.load(split_first_ptr + tl.program_id(0)).to(tl.int64)
    count = tl.load(split_count_ptr + tl.program_id(0))
    head_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column_D = tl.arange(0, BLOCK_D)
    is_head_H = head_H < num_heads
    is_column_HD = is_head_H[:, None] & (column_D < HEAD_SIZE)[None, :]
    largest_TH = tl.full([T, BLOCK_H], LOWEST, tl.float32)
    sum_TH = tl.zeros([T, BLOCK_H], tl.float32)
    acc_THD = tl.zeros([T, BLOCK_H, BLOCK_D], tl.float32)
    piece_T = tl.arange(0, T)
    for _ in range((count + T - 1) // T):
        valid_T = piece_T < count
        at_TH = (first + piece_T)[:, None] * num_heads + head_H[None, :]
        mask_TH = valid_T[:, None] & is_head_H[None, :]
        piece_largest_TH = tl.load(partial_stat_ptr + 2 * at_TH, mask=mask_TH, other=LOWEST)
        piece_sum_TH = tl.load(partial_stat_ptr + 2 * at_TH + 1, mask=mask_TH, other=0.0)
        mask_THD = valid_T[:, None, None] & is_column_HD[None, :, :]
        at_THD = at_TH[:, :, None] * HEAD_SIZE + column_D[None, None, :]
        piece_THD = tl.load(partial_out_ptr + at_THD, mask=mask_THD, other=0.0)
        new_TH = tl.maximum(largest_TH, piece_largest_TH)
        shrink_TH, factor_TH = tl.exp2(largest_TH - new_TH), tl.exp2(piece_largest_TH - new_TH)
        largest_TH = new_TH
        sum_TH = sum_TH * shrink_TH + piece_sum_TH * factor_TH
        acc_THD = acc_THD * shrink_TH[:, :, None] + piece_THD * factor_TH[:, :, None]
        piece_T += T
    joint_H = tl.max(largest_TH, axis=0)
    factor_TH = tl.exp2(largest_TH - joint_H[None, :])
    sum_H = tl.sum(sum_TH * factor_TH, axis=0)
    acc_HD = tl.sum(acc_THD * factor_TH[:, :, None], axis=0)
    at_HD = row * num_heads * HEAD_SIZE + head_H[:, None] * HEAD_SIZE + column_D[None, :]
    _store_output(out_ptr, rest_ptr, at_HD, acc_HD / sum_H[:, None], is_column_HD, HAS_REST)
    tl.store(lse_ptr + row * num_heads + head_H, (joint_H + tl.log2(sum_H)) * LN2, mask=is_head_H)


@triton.jit
def backward_targets_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    features_ptr,
    key_ptr,
    grad_out_ptr,
    out_ptr,
    rest_ptr,
    grad_lse_ptr,
    lse_ptr,
    stats_ptr,
    grad_q_ptr,
    grad_bias_ptr,
    grad_features_ptr,
    partial_sums_ptr,
    source_ptr,
    edge_id_ptr,
    row_ptr,
    first_ptr,
    count_ptr,
    partial_ptr,
    num_long,
    num_items,
    num_kv_heads,
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
    keep_factor,
    lowest_kept,
    T: tl.constexpr,
    UNROLL: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PADDED: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FEATURES: tl.constexpr,
    HAS_EDGE_ID: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
    HAS_REST: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    BIAS_GRADIENT: tl.constexpr,
    FEATURES_GRADIENT: tl.constexpr,
):
    """Gather keys and values again; give the gradients of queries, bias and features, and each row's statistics.

    With weights p, slopes g = grad_out . v and delta = grad_out . out, the gradient of a score is p (g - delta). Delta
    is taken from the output and what its rounding took away: where one weight is near one, the difference is small.
    """
    head_H, is_head_H = _heads(num_kv_heads, GROUP, BLOCK_G, BLOCK_H)
    head_F, kv_F, column_F, is_F = _columns(num_kv_heads, GROUP, BLOCK_G, BLOCK_H, BLOCK_D, HEAD_SIZE)
    at_F = head_F * HEAD_SIZE + column_F
    num_heads = num_kv_heads * GROUP
    BLOCK_K: tl.constexpr = BLOCK_H // BLOCK_G
    at_C, is_C = _kv_columns(num_kv_heads, BLOCK_K, BLOCK_D, HEAD_SIZE)
    row_T, there_T, edge_T, end_T, stride, num_steps, is_long = _pieces(
        row_ptr, first_ptr, count_ptr, num_long, num_items, T, UNROLL
    )
    own_q_TF = gather(q_ptr, row_T, q_row, head_F * q_head + column_F, is_F, PADDED, WIDE).to(tl.float32) * score_factor
    own_grad_TF = gather(grad_out_ptr, row_T, grad_row, head_F * grad_head + column_F, is_F, PADDED, WIDE).to(
        tl.float32
    )
    own_out_TF = gather(out_ptr, row_T, num_heads * HEAD_SIZE, at_F, is_F, PADDED, WIDE)
    if HAS_REST:
        own_out_TF = unrounded(own_out_TF, gather(rest_ptr, row_T, num_heads * HEAD_SIZE, at_F, is_F, PADDED, WIDE))
    own_delta_TH = _per_head(own_grad_TF * own_out_TF, T, BLOCK_H, BLOCK_D)
    at_row_TH = row_T.to(tl.int64)[:, None] * num_heads + head_H[None, :]
    mask_row_TH = there_T[:, None] & is_head_H[None, :]
    own_lse_TH = tl.load(lse_ptr + at_row_TH, mask=mask_row_TH, other=0.0) * LOG2E
    if HAS_GRAD_LSE:
        own_delta_TH -= tl.load(grad_lse_ptr + at_row_TH, mask=mask_row_TH, other=0.0)
    tl.store(stats_ptr + 2 * at_row_TH, own_lse_TH, mask=mask_row_TH)
    tl.store(stats_ptr + 2 * at_row_TH + 1, own_delta_TH, mask=mask_row_TH)
    grad_q_THD = tl.zeros([T, BLOCK_H, BLOCK_D], tl.float32)
    # A lane that has come to its end takes its last edge again, with a weight of zero.
    last_T = tl.maximum(end_T - 1, 0)
    next_T = tl.load(source_ptr + tl.minimum(edge_T, last_T), mask=end_T > 0, other=0)
    second_T = tl.load(source_ptr + tl.minimum(edge_T + stride, last_T), mask=end_T > 0, other=0)
    for _ in range(num_steps):
        for _ in tl.static_range(UNROLL):
            valid_T = edge_T < end_T
            at_T = tl.minimum(edge_T, last_T)
            source_T = next_T
            next_T = second_T
            second_T = tl.load(source_ptr + tl.minimum(edge_T + 2 * stride, last_T))
            k_TF = gather(k_ptr, source_T, k_row, kv_F * k_head + column_F, is_F, PADDED, WIDE).to(tl.float32)
            v_TF = gather(v_ptr, source_T, v_row, kv_F * v_head + column_F, is_F, PADDED, WIDE).to(tl.float32)
            if HAS_FEATURES:
                at_features_F = kv_F * HEAD_SIZE + column_F
                features_TF = gather(
                    features_ptr, at_T, num_kv_heads * HEAD_SIZE, at_features_F, is_F, PADDED, True
                ).to(tl.float32)
                k_TF += features_TF
                v_TF += features_TF
            score_TH = _per_head(own_q_TF * k_TF, T, BLOCK_H, BLOCK_D)
            slope_TH = _per_head(own_grad_TF * v_TF, T, BLOCK_H, BLOCK_D)
            mask_TH = valid_T[:, None] & is_head_H[None, :]
            at_TH = edge_T.to(tl.int64)[:, None] * num_heads + head_H[None, :]
            if HAS_BIAS:
                score_TH += LOG2E * tl.load(bias_ptr + at_TH, mask=mask_TH, other=0.0).to(tl.float32)
            weight_TH = tl.where(valid_T[:, None], tl.exp2(score_TH - own_lse_TH), 0.0)
            kept_TH = weight_TH
            if HAS_DROPOUT:
                edge_id_T = at_T.to(tl.int64)
                if HAS_EDGE_ID:
                    edge_id_T = tl.load(edge_id_ptr + at_T)
                is_kept_TH = kept_edges(edge_id_T, head_H, key_ptr, lowest_kept)
                slope_TH = tl.where(is_kept_TH, slope_TH * keep_factor, 0.0)
                kept_TH = tl.where(is_kept_TH, weight_TH * keep_factor, 0.0)
            grad_score_TH = weight_TH * (slope_TH - own_delta_TH)
            if BIAS_GRADIENT:
                tl.store(grad_bias_ptr + at_TH, grad_score_TH, mask=mask_TH)
            if FEATURES_GRADIENT:
                # The queries are in units of log 2 and scaled already.
                from_key_THD = (grad_score_TH * LN2)[:, :, None] * tl.reshape(own_q_TF, [T, BLOCK_H, BLOCK_D])
                from_value_THD = kept_TH[:, :, None] * tl.reshape(own_grad_TF, [T, BLOCK_H, BLOCK_D])
                grad_features_TC = _sum_groups(from_key_THD + from_value_THD, T, BLOCK_K, BLOCK_G, BLOCK_D)
                at_TC = edge_T.to(tl.int64)[:, None] * (num_kv_heads * HEAD_SIZE) + at_C[None, :]
                tl.store(grad_features_ptr + at_TC, grad_features_TC, mask=valid_T[:, None] & is_C[None, :])
            grad_q_THD += grad_score_TH[:, :, None] * tl.reshape(k_TF, [T, BLOCK_H, BLOCK_D])
            edge_T += stride

    if is_long:
        grad_q_F = tl.reshape(tl.sum(grad_q_THD, axis=0), [BLOCK_H * BLOCK_D])
        row = tl.load(row_ptr + tl.program_id(0)).to(tl.int64)
        partial = tl.load(partial_ptr + tl.program_id(0)).to(tl.int64)
        if partial < 0:
            tl.store(grad_q_ptr + row * num_heads * HEAD_SIZE + at_F, grad_q_F * scale, mask=is_F)
        else:
            tl.store(partial_sums_ptr + partial * num_heads * HEAD_SIZE + at_F, grad_q_F, mask=is_F)
    else:
        grad_q_TF = tl.reshape(grad_q_THD * scale, [T, BLOCK_H * BLOCK_D])
        at_TF = row_T.to(tl.int64)[:, None] * num_heads * HEAD_SIZE + at_F[None, :]
        tl.store(grad_q_ptr + at_TF, grad_q_TF, mask=there_T[:, None] & is_F[None, :])


@triton.jit
def _sum_groups(x_THD, T: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr):
    """Return sums over the query heads of each key head, [T, key heads x D]."""
    if BLOCK_G > 1:
        x_TKD = tl.sum(tl.reshape(x_THD, [T, BLOCK_K, BLOCK_G, BLOCK_D]), axis=2)
    else:
        x_TKD = x_THD
    return tl.reshape(x_TKD, [T, BLOCK_K * BLOCK_D])


@triton.jit
def backward_sources_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    bias_ptr,
    features_ptr,
    key_ptr,
    grad_out_ptr,
    stats_ptr,
    grad_k_ptr,
    grad_v_ptr,
    partial_sums_ptr,
    target_ptr,
    position_ptr,
    edge_id_ptr,
    row_ptr,
    first_ptr,
    count_ptr,
    partial_ptr,
    num_long,
    num_items,
    num_kv_heads,
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
    keep_factor,
    lowest_kept,
    T: tl.constexpr,
    UNROLL: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PADDED: tl.constexpr,
    WIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_FEATURES: tl.constexpr,
    HAS_EDGE_ID: tl.constexpr,
    HAS_DROPOUT: tl.constexpr,
):
    """Gather queries and output gradients of each source's targets; give the gradients of keys and values.

    Those of a row lie one behind the other.
    """
    head_H, is_head_H = _heads(num_kv_heads, GROUP, BLOCK_G, BLOCK_H)
    head_F, kv_F, column_F, is_F = _columns(num_kv_heads, GROUP, BLOCK_G, BLOCK_H, BLOCK_D, HEAD_SIZE)
    num_heads = num_kv_heads * GROUP
    BLOCK_K: tl.constexpr = BLOCK_H // BLOCK_G
    at_C, is_C = _kv_columns(num_kv_heads, BLOCK_K, BLOCK_D, HEAD_SIZE)
    row_T, there_T, edge_T, end_T, stride, num_steps, is_long = _pieces(
        row_ptr, first_ptr, count_ptr, num_long, num_items, T, UNROLL
    )
    own_k_TF = gather(k_ptr, row_T, k_row, kv_F * k_head + column_F, is_F, PADDED, WIDE).to(tl.float32)
    own_v_TF = gather(v_ptr, row_T, v_row, kv_F * v_head + column_F, is_F, PADDED, WIDE).to(tl.float32)
    grad_k_THD = tl.zeros([T, BLOCK_H, BLOCK_D], tl.float32)
    grad_v_THD = tl.zeros([T, BLOCK_H, BLOCK_D], tl.float32)
    # A lane that has come to its end takes its last edge again, with a weight of zero.
    last_T = tl.maximum(end_T - 1, 0)
    next_T = tl.load(target_ptr + tl.minimum(edge_T, last_T), mask=end_T > 0, other=0)
    second_T = tl.load(target_ptr + tl.minimum(edge_T + stride, last_T), mask=end_T > 0, other=0)
    for _ in range(num_steps):
        for _ in tl.static_range(UNROLL):
            valid_T = edge_T < end_T
            at_T = tl.minimum(edge_T, last_T)
            target_T = next_T
            next_T = second_T
            second_T = tl.load(target_ptr + tl.minimum(edge_T + 2 * stride, last_T))
            q_TF = gather(q_ptr, target_T, q_row, head_F * q_head + column_F, is_F, PADDED, WIDE).to(tl.float32)
            grad_TF = gather(grad_out_ptr, target_T, grad_row, head_F * grad_head + column_F, is_F, PADDED, WIDE).to(
                tl.float32
            )
            mask_TH = valid_T[:, None] & is_head_H[None, :]
            if WIDE:
                at_TH = target_T.to(tl.int64)[:, None] * num_heads + head_H[None, :]
            else:
                at_TH = target_T[:, None] * num_heads + head_H[None, :]
            # Log-sum-exp and delta in one word of 64 bits.
            stats_TH = tl.load(stats_ptr + at_TH, mask=is_head_H[None, :], other=0)
            lse_TH = stats_TH.to(tl.int32).to(tl.float32, bitcast=True)
            delta_TH = (stats_TH >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            if HAS_BIAS or HAS_FEATURES or HAS_DROPOUT:
                position_T = tl.load(position_ptr + at_T).to(tl.int64)
            if HAS_FEATURES:
                at_features_F = kv_F * HEAD_SIZE + column_F
                features_TF = gather(
                    features_ptr, position_T, num_kv_heads * HEAD_SIZE, at_features_F, is_F, PADDED, True
                ).to(tl.float32)
                score_TH = _per_head(q_TF * (own_k_TF + features_TF), T, BLOCK_H, BLOCK_D) * score_factor
                slope_TH = _per_head(grad_TF * (own_v_TF + features_TF), T, BLOCK_H, BLOCK_D)
            else:
                score_TH = _per_head(q_TF * own_k_TF, T, BLOCK_H, BLOCK_D) * score_factor
                slope_TH = _per_head(grad_TF * own_v_TF, T, BLOCK_H, BLOCK_D)
            if HAS_BIAS:
                at_bias_TH = position_T[:, None] * num_heads + head_H[None, :]
                score_TH += LOG2E * tl.load(bias_ptr + at_bias_TH, mask=mask_TH, other=0.0).to(tl.float32)
            weight_TH = tl.where(valid_T[:, None], tl.exp2(score_TH - lse_TH), 0.0)
            kept_TH = weight_TH
            if HAS_DROPOUT:
                edge_id_T = position_T
                if HAS_EDGE_ID:
                    edge_id_T = tl.load(edge_id_ptr + position_T)
                is_kept_TH = kept_edges(edge_id_T, head_H, key_ptr, lowest_kept)
                slope_TH = tl.where(is_kept_TH, slope_TH * keep_factor, 0.0)
                kept_TH = tl.where(is_kept_TH, weight_TH * keep_factor, 0.0)
            grad_score_TH = weight_TH * (slope_TH - delta_TH)
            grad_k_THD += grad_score_TH[:, :, None] * tl.reshape(q_TF, [T, BLOCK_H, BLOCK_D])
            grad_v_THD += kept_TH[:, :, None] * tl.reshape(grad_TF, [T, BLOCK_H, BLOCK_D])
            edge_T += stride

    if is_long:
        grad_k_1C = _sum_groups(tl.sum(grad_k_THD, axis=0)[None, :, :], 1, BLOCK_K, BLOCK_G, BLOCK_D)
        grad_v_1C = _sum_groups(tl.sum(grad_v_THD, axis=0)[None, :, :], 1, BLOCK_K, BLOCK_G, BLOCK_D)
        row = tl.load(row_ptr + tl.program_id(0)).to(tl.int64)
        partial = tl.load(partial_ptr + tl.program_id(0)).to(tl.int64)
        if partial < 0:
            at_row_C = row * 2 * num_kv_heads * HEAD_SIZE + at_C
            tl.store(grad_k_ptr + at_row_C[None, :], grad_k_1C * scale, mask=is_C[None, :])
            tl.store(grad_v_ptr + at_row_C[None, :], grad_v_1C, mask=is_C[None, :])
        else:
            at_partial_C = partial * 2 * num_kv_heads * HEAD_SIZE + at_C
            tl.store(partial_sums_ptr + at_partial_C[None, :], grad_k_1C, mask=is_C[None, :])
            at_partial_C += num_kv_heads * HEAD_SIZE
            tl.store(partial_sums_ptr + at_partial_C[None, :], grad_v_1C, mask=is_C[None, :])
    else:
        at_TC = row_T.to(tl.int64)[:, None] * 2 * num_kv_heads * HEAD_SIZE + at_C[None, :]
        mask_TC = there_T[:, None] & is_C[None, :]
        grad_k_TC = _sum_groups(grad_k_THD, T, BLOCK_K, BLOCK_G, BLOCK_D)
        tl.store(grad_k_ptr + at_TC, grad_k_TC * scale, mask=mask_TC)
        grad_v_TC = _sum_groups(grad_v_THD, T, BLOCK_K, BLOCK_G, BLOCK_D)
        tl.store(grad_v_ptr + at_TC, grad_v_TC, mask=mask_TC)


@triton.jit
def merge_sums_kernel(
    partial_sums_ptr,
    first_out_ptr,
    second_out_ptr,
    split_row_ptr,
    split_first_ptr,
    split_count_ptr,
    width,
    scale,
    T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    HAS_SECOND: tl.constexpr,
):
    """Add the pieces of one split row: of one tensor, scaled, or of a scaled one and another, whose rows alternate."""
    row = tl.load(split_row_ptr + tl.program_id(0)).to(tl.int64)
    first = tl.load(split_first_ptr + tl.program_id(0)).to(tl.int64)
    count = tl.load(split_count_ptr + tl.program_id(0))
    column_W = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    is_column_W = column_W < width
    stride = width * 2 if HAS_SECOND else width
    sums_TW = tl.zeros([T, BLOCK_W], tl.float32)
    second_TW = tl.zeros([T, BLOCK_W], tl.float32)
    piece_T = tl.arange(0, T)
    for _ in range((count + T - 1) // T):
        mask_TW = (piece_T < count)[:, None] & is_column_W[None, :]
        at_TW = (first + piece_T)[:, None] * stride + column_W[None, :]
        sums_TW += tl.load(partial_sums_ptr + at_TW, mask=mask_TW, other=0.0)
        if HAS_SECOND:
            second_TW += tl.load(partial_sums_ptr + at_TW + width, mask=mask_TW, other=0.0)
        piece_T += T
    tl.store(first_out_ptr + row * stride + column_W, tl.sum(sums_TW, axis=0) * scale, mask=is_column_W)
    if HAS_SECOND:
        tl.store(second_out_ptr + row * stride + column_W, tl.sum(second_TW, axis=0), mask=is_column_W)
