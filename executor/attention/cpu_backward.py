"""Kernels of the backward pass of attention on CPUs, first over targets, then over sources; pieces as forward."""

# mypy: ignore-errors

from executor.attention.cpu_arithmetic import add, multiply, multiply_add, subtract
from executor.attention.cpu_blocks import (
    ONE,
    ZERO,
    accumulate,
    backward_block,
    edges_of,
    fill,
    fill_block,
    keep,
    load_sums,
    sizes,
    store_row,
    store_sums,
)
from executor.attention.cpu_layout import BLOCK, Kernel, block_of, helper, pointed, pointed_edges, pointed_inputs
from executor.attention.cpu_vectors import LANES8, address, count_of, load, num_lanes, shifted, splat, store


@helper
def _add_partials(partials, first, last, state):
    for at in range(partials.shape[1]):
        state[at] = ZERO
        for part in range(first, last):
            state[at] += partials[part, at]


# --- Over targets. A weight p with the gradient g gives its score p (g - mean); the mean of g over the row is known at
# the row's end, unless it is given, as it is where the row has other edges too. So the state of a row: sums of p g k
# [H, C], of p k [H, C], of p g [P], of p [P].


@helper
def _multiply_by_weights(block, count, shape, product_P, weight_P):
    """Multiply gradients by the weights that are kept; add up the products and the weights."""
    num_heads, num_padded, _, _ = sizes(shape)
    for head in range(0, num_heads, 8):
        product_sum, weight_sum = load(product_P, head, LANES8), load(weight_P, head, LANES8)
        for b in range(count):
            at = b * num_padded + head
            product = multiply(load(block.grads, at, LANES8), load(block.kept, at, LANES8))
            store(block.grads, at, product, LANES8)
            product_sum, weight_sum = add(product_sum, product), add(weight_sum, load(block.weights, at, LANES8))
        store(product_P, head, product_sum, LANES8)
        store(weight_P, head, weight_sum, LANES8)


@helper
def _finish_target(row, shape, scale, state, has_mean, grad_lse, mean, grad_q):
    num_heads, num_padded, size, width = sizes(shape)
    products_HC, weighted_HC = state, shifted(state, num_heads * width)
    product_P = shifted(state, 2 * num_heads * width)
    weight_P = shifted(product_P, num_padded)
    for head in range(num_heads):
        if not has_mean:
            # The weights add up to one but for the rounding of the log-sum-exp, which the quotient undoes.
            row_mean = product_P[head] / weight_P[head] if weight_P[head] != 0 else ZERO
            mean[row * num_heads + head] = row_mean - grad_lse[row * num_heads + head]
        minus_mean = splat(-mean[row * num_heads + head], count_of(shape.lanes, 8))
        for at in range(head * width, (head + 1) * width, num_lanes(shape.lanes)):
            value = multiply_add(minus_mean, load_sums(weighted_HC, at, shape), load_sums(products_HC, at, shape))
            store_sums(products_HC, at, value, shape)
        store_row(grad_q, row, head * size, products_HC, head * width, scale, shape)


@Kernel
def target_pieces(
    pieces, first, last, scratch, inputs, edges, shape, lse, grad_out, has_mean, grad_lse, mean, grad_q, partials
):
    """Write gradients of queries and, unless they are given, means [N, H] for `source_pieces`, or partial results."""
    num_heads, num_padded, _, width = sizes(shape)
    inputs, edges, grad_out, grad_q = pointed_inputs(inputs), pointed_edges(edges), pointed(grad_out), pointed(grad_q)
    lse, grad_lse, mean = address(lse), address(grad_lse), address(mean)
    k, v, features = inputs.k, inputs.v, inputs.features
    block = block_of(scratch, shape, inputs.lowest_kept)
    state, weighted = block.state, shifted(block.state, num_heads * width)
    product_P = shifted(state, 2 * num_heads * width)
    weight_P = shifted(product_P, num_padded)
    for piece in range(first, last):
        for row in range(pieces[piece, 0], pieces[piece, 1]):
            fill(state, 0, 2 * num_heads * width + 2 * num_padded, ZERO)
            begin, end = edges_of(pieces, piece, edges.indptr, row)
            for at in range(begin, end, BLOCK):
                count = min(BLOCK, end - at)
                fill_block(block, edges, row, at, count)
                backward_block(inputs, grad_out, block.near, block.far, lse, block, count, shape, k, v)
                _multiply_by_weights(block, count, shape, product_P, weight_P)
                accumulate(block.grads, k, block.far, block.at_kv, features, block, count, shape, state, None)
                accumulate(block.weights, k, block.far, block.at_kv, features, block, count, shape, weighted, None)
            if pieces[piece, 4] < 0:
                _finish_target(row, shape, inputs.scale, state, has_mean, grad_lse, mean, grad_q)
            else:
                keep(partials, pieces[piece, 4], state)


@Kernel
def join_target(split_rows, shape, scratch, partials, scale, has_mean, grad_lse, mean, grad_q):
    """Write what `target_pieces` does of rows that were cut."""
    state, grad_lse, mean, grad_q = address(scratch.numbers), address(grad_lse), address(mean), pointed(grad_q)
    for split in range(len(split_rows)):
        _add_partials(partials, split_rows[split, 1], split_rows[split, 2], state)
        _finish_target(split_rows[split, 0], shape, scale, state, has_mean, grad_lse, mean, grad_q)


# --- Over sources. The state of a row: sums for the key [H, C] and for the value [H, C], of each head of queries.


@helper
def _score_gradients(block, mean, target, count, shape):
    """Turn gradients of weights into those of scores."""
    num_heads, num_padded, _, _ = sizes(shape)
    for b in range(count):
        for head in range(0, num_heads, 8):
            at, lanes = b * num_padded + head, num_heads - head
            row_mean = load(mean, target[b] * num_heads + head, lanes)
            product = multiply(load(block.kept, at, LANES8), load(block.grads, at, LANES8))
            value = subtract(product, multiply(load(block.weights, at, LANES8), row_mean))
            store(block.grads, at, value, LANES8)


@helper
def _write_bias_gradients(block, count, shape, grad_bias):
    num_heads, num_padded, _, _ = sizes(shape)
    for b in range(count):
        for head in range(0, num_heads, 8):
            value = load(block.grads, b * num_padded + head, LANES8)
            at, lanes = block.edge[b] * num_heads + head, num_heads - head
            store(grad_bias, at, value, lanes)


@helper
def _write_feature_gradients(features, block, q, grad_out, count, shape, scale, grad_features):
    """Write gradients of edge features: what each edge adds to those of its key and of its value."""
    if features is None:
        return
    _, num_padded, size, _ = sizes(shape)
    for b in range(count):
        at_q, at_out = block.far[b] * q.stride, block.far[b] * grad_out.stride
        for kv_head in range(shape.num_kv_heads):
            for column in range(0, size, num_lanes(shape.lanes)):
                lanes = count_of(shape.lanes, size - column)
                acc = splat(ZERO, lanes)
                for head in range(kv_head * shape.group, (kv_head + 1) * shape.group):
                    at, weight = head * size + column, splat(block.grads[b * num_padded + head] * scale, lanes)
                    acc = multiply_add(weight, load(q.flat, at_q + at, lanes), acc)
                    weight = splat(block.kept[b * num_padded + head], lanes)
                    acc = multiply_add(weight, load(grad_out.flat, at_out + at, lanes), acc)
                at = block.edge[b] * grad_features.stride + kv_head * size + column
                store(grad_features.flat, at, acc, lanes)


@helper
def _finish_source(row, shape, scale, state, grad_k, grad_v):
    num_heads, _, size, width = sizes(shape)
    for kv_head in range(shape.num_kv_heads):
        for sums in (state, shifted(state, num_heads * width)):
            first = kv_head * shape.group * width
            for head in range(1, shape.group):
                for at in range(first, first + width, num_lanes(shape.lanes)):
                    value = add(load_sums(sums, at, shape), load_sums(sums, at + head * width, shape))
                    store_sums(sums, at, value, shape)
        at_sum = kv_head * shape.group * width
        store_row(grad_k, row, kv_head * size, state, at_sum, scale, shape)
        store_row(grad_v, row, kv_head * size, state, num_heads * width + at_sum, ONE, shape)


@Kernel
def source_pieces(
    pieces,
    first,
    last,
    scratch,
    inputs,
    edges,
    shape,
    lse,
    grad_out,
    mean,
    grad_k,
    grad_v,
    grad_bias,
    grad_features,
    partials,
):
    """Write gradients of keys and values, or partial results; of bias and features unless these arrays are empty."""
    num_heads, _, _, width = sizes(shape)
    has_grad_bias, has_grad_features = len(grad_bias) > 0, len(grad_features.flat) > 0
    inputs, edges, grad_out = pointed_inputs(inputs), pointed_edges(edges), pointed(grad_out)
    lse, mean, grad_bias = address(lse), address(mean), address(grad_bias)
    grad_k, grad_v, grad_features = pointed(grad_k), pointed(grad_v), pointed(grad_features)
    q, features, scale = inputs.q, inputs.features, inputs.scale
    block = block_of(scratch, shape, inputs.lowest_kept)
    state, value_sums = block.state, shifted(block.state, num_heads * width)
    for piece in range(first, last):
        for row in range(pieces[piece, 0], pieces[piece, 1]):
            fill(state, 0, 2 * num_heads * width, ZERO)
            begin, end = edges_of(pieces, piece, edges.indptr, row)
            for at in range(begin, end, BLOCK):
                count = min(BLOCK, end - at)
                fill_block(block, edges, row, at, count)
                backward_block(inputs, grad_out, block.far, block.near, lse, block, count, shape, q, grad_out)
                _score_gradients(block, mean, block.far, count, shape)
                accumulate(block.grads, q, block.far, block.at_head, None, block, count, shape, state, None)
                accumulate(block.kept, grad_out, block.far, block.at_head, None, block, count, shape, value_sums, None)
                if has_grad_bias:
                    _write_bias_gradients(block, count, shape, grad_bias)
                if has_grad_features:
                    _write_feature_gradients(features, block, q, grad_out, count, shape, scale, grad_features)
            if pieces[piece, 4] < 0:
                _finish_source(row, shape, scale, state, grad_k, grad_v)
            else:
                keep(partials, pieces[piece, 4], state)


@Kernel
def join_source(split_rows, shape, scratch, partials, scale, grad_k, grad_v):
    """Write the gradients of keys and values of rows that were cut."""
    state, grad_k, grad_v = address(scratch.numbers), pointed(grad_k), pointed(grad_v)
    for split in range(len(split_rows)):
        _add_partials(partials, split_rows[split, 1], split_rows[split, 2], state)
        _finish_source(split_rows[split, 0], shape, scale, state, grad_k, grad_v)
