"""What the kernels of attention on CPUs do with one block of edges: products, weights, weighted sums.

All edges of a block have one row in common, which is called near; the other ends are called far. Products, weights and
gradients of a block are [BLOCK, P], P being the heads padded to whole vectors; what lies in padding is never used.
Sums are [H, C], C being the head size padded to whole vectors. Heads are taken in fours, since the sums over lanes of
four vectors cost as much as those of two, and four accumulators share a row's address.
"""

# mypy: ignore-errors

import numpy as np

from executor.attention.cpu_arithmetic import (
    add,
    drop,
    exp,
    multiply,
    multiply_add,
    store_totals,
    subtract,
    total,
    zero_if_infinite,
)
from executor.attention.cpu_layout import NO_DROPOUT, helper, padded
from executor.attention.cpu_vectors import LANES8, count_of, load, num_lanes, prefetch, splat, store

# Edges whose rows are asked for before they are needed. Of 4, 8 and 16 and of blocks of 32, 64 and 128 edges this pair
# was the fastest or within 5 % of it on tolokers and coauthor-physics, 8 x 8, 8 x 16 and 8 x 32 (EPYC of family 26).
AHEAD = 8
ZERO, ONE, LOWEST = np.float32(0), np.float32(1), np.float32(-np.inf)


@helper
def sizes(shape):
    """Return heads, padded heads, head size, padded head size."""
    num_heads, size = shape.num_kv_heads * shape.group, shape.head_size
    return num_heads, padded(num_heads, 8), size, padded(size, num_lanes(shape.lanes))


@helper
def _position(positions, at):
    if positions is None:
        return at
    return np.int64(positions[at])


@helper
def fill_block(block, edges, row, first, count):
    """Take edges of a row."""
    for b in range(count):
        block.near[b] = row
        block.far[b] = edges.far[first + b]
        block.upcoming[b] = edges.far[min(first + b + AHEAD, edges.count - 1)]
        block.edge[b] = _position(edges.position, first + b)
        block.upcoming_edge[b] = _position(edges.position, min(first + b + AHEAD, edges.count - 1))


@helper
def _prefetch_row(rows, row):
    if rows is not None:
        for column in range(0, rows.width, 16):
            prefetch(rows.flat, row * rows.stride + column)


@helper
def _load_row(rows, at, features, at_features, column, lanes):
    """Return a vector of a row plus features."""
    if features is None:
        return load(rows.flat, at + column, lanes)
    return add(load(rows.flat, at + column, lanes), load(features.flat, at_features + column, lanes))


@helper
def _product(x, at_x, y, at_y, features, at_features, shape):
    """Return, before its lanes are added up, the product of x with y plus features."""
    sums = splat(ZERO, count_of(shape.lanes, 8))
    for column in range(0, shape.head_size, num_lanes(shape.lanes)):
        lanes = count_of(shape.lanes, shape.head_size - column)
        other = _load_row(y, at_y, features, at_features, column, lanes)
        sums = multiply_add(load(x.flat, at_x + column, lanes), other, sums)
    return sums


@helper
def _stride(features):
    if features is None:
        return 0
    return features.stride


@helper
def products(x, x_row, y, y_row, features, block, count, shape, factor, result, fetched, also_fetched):
    """Write the products of x of each head with y plus features of its key head, times a factor."""
    num_heads, num_padded, size, _ = sizes(shape)
    for b in range(count):
        _prefetch_row(fetched, block.upcoming[b])
        _prefetch_row(also_fetched, block.upcoming[b])
        _prefetch_row(features, block.upcoming_edge[b])
        at_x, at_y, at_f = x_row[b] * x.stride, y_row[b] * y.stride, block.edge[b] * _stride(features)
        for head in range(0, num_heads - 3, 4):
            h0, h1, h2, h3 = block.at_kv[head], block.at_kv[head + 1], block.at_kv[head + 2], block.at_kv[head + 3]
            s0 = _product(x, at_x + head * size, y, at_y + h0, features, at_f + h0, shape)
            s1 = _product(x, at_x + (head + 1) * size, y, at_y + h1, features, at_f + h1, shape)
            s2 = _product(x, at_x + (head + 2) * size, y, at_y + h2, features, at_f + h2, shape)
            s3 = _product(x, at_x + (head + 3) * size, y, at_y + h3, features, at_f + h3, shape)
            store_totals(result, b * num_padded + head, factor, s0, s1, s2, s3)
        for head in range(num_heads // 4 * 4, num_heads):
            h0 = block.at_kv[head]
            sums = _product(x, at_x + head * size, y, at_y + h0, features, at_f + h0, shape)
            result[b * num_padded + head] = total(sums) * factor


@helper
def add_bias(scores, inputs, block, count, shape):
    """Add the bias of each edge and head."""
    num_heads, num_padded, _, _ = sizes(shape)
    if inputs.has_bias:
        for b in range(count):
            for head in range(0, num_heads, 8):
                at, lanes = b * num_padded + head, num_heads - head
                bias = load(inputs.bias, block.edge[b] * num_heads + head, lanes)
                store(scores, at, add(load(scores, at, LANES8), bias), LANES8)


@helper
def weigh(weights, lse, target, count, shape):
    """Turn scores into weights by the log-sum-exp of their targets."""
    num_heads, num_padded, _, _ = sizes(shape)
    for b in range(count):
        for head in range(0, num_heads, 8):
            at, lanes = b * num_padded + head, num_heads - head
            shift = zero_if_infinite(load(lse, target[b] * num_heads + head, lanes))
            store(weights, at, exp(subtract(load(weights, at, LANES8), shift)), LANES8)


@helper
def _mix(bits):
    """`executor.keyed.mix` of uint32."""
    bits = np.uint32(bits * np.uint32(0x85EBCA6B))
    bits = np.uint32(bits ^ (bits >> np.uint32(13)))
    bits = np.uint32(bits * np.uint32(0xC2B2AE35))
    return np.uint32(bits ^ (bits >> np.uint32(16)))


@helper
def keep_some(inputs, block, count, shape):
    """Write the weights that dropout keeps, scaled up, and zeros."""
    num_heads, num_padded, _, _ = sizes(shape)
    if inputs.lowest_kept == NO_DROPOUT:
        return
    for b in range(count):
        edge_id = np.uint64(inputs.edge_id[block.edge[b]] if inputs.has_edge_id else block.edge[b])
        low, high = np.uint32(edge_id), np.uint32(edge_id >> np.uint64(32))
        word = _mix(_mix(low ^ inputs.key_word) ^ high)
        for head in range(0, num_heads, 8):
            at = b * num_padded + head
            weights = load(block.weights, at, LANES8)
            store(block.kept, at, drop(weights, word, head, inputs.lowest_kept, inputs.kept_factor), LANES8)


@helper
def load_sums(sums, at, shape):
    """Return a whole vector of padded sums."""
    return load(sums, at, count_of(shape.lanes, 8))


@helper
def store_sums(sums, at, vector, shape):
    """Store a whole vector of padded sums."""
    store(sums, at, vector, count_of(shape.lanes, 8))


@helper
def _first_sums(sums, at, factors, head, shape):
    if factors is None:
        return load_sums(sums, at, shape)
    return multiply(load_sums(sums, at, shape), splat(factors[head], count_of(shape.lanes, 8)))


@helper
def _add_weighed(acc, weight, rows, at, features, at_features, column, lanes):
    row = _load_row(rows, at, features, at_features, column, lanes)
    return multiply_add(splat(weight, lanes), row, acc)


@helper
def accumulate(weights, rows, row, at_head, features, block, count, shape, sums, factors):
    """Add to the sums of each head, times its factor, the rows plus features weighed by its weights.

    Args:
        at_head: columns at which each head's part of rows and features begins.
        factors: of each head, or None.
    """
    num_heads, num_padded, size, width = sizes(shape)
    for head in range(0, num_heads - 3, 4):
        h0, h1, h2, h3 = at_head[head], at_head[head + 1], at_head[head + 2], at_head[head + 3]
        for column in range(0, size, num_lanes(shape.lanes)):
            lanes, at = count_of(shape.lanes, size - column), head * width + column
            s0, s1 = (
                _first_sums(sums, at, factors, head, shape),
                _first_sums(sums, at + width, factors, head + 1, shape),
            )
            s2 = _first_sums(sums, at + 2 * width, factors, head + 2, shape)
            s3 = _first_sums(sums, at + 3 * width, factors, head + 3, shape)
            for b in range(count):
                at_r, at_f, at_w = row[b] * rows.stride, block.edge[b] * _stride(features), b * num_padded + head
                s0 = _add_weighed(s0, weights[at_w], rows, at_r + h0, features, at_f + h0, column, lanes)
                s1 = _add_weighed(s1, weights[at_w + 1], rows, at_r + h1, features, at_f + h1, column, lanes)
                s2 = _add_weighed(s2, weights[at_w + 2], rows, at_r + h2, features, at_f + h2, column, lanes)
                s3 = _add_weighed(s3, weights[at_w + 3], rows, at_r + h3, features, at_f + h3, column, lanes)
            store_sums(sums, at, s0, shape)
            store_sums(sums, at + width, s1, shape)
            store_sums(sums, at + 2 * width, s2, shape)
            store_sums(sums, at + 3 * width, s3, shape)
    for head in range(num_heads // 4 * 4, num_heads):
        h0 = at_head[head]
        for column in range(0, size, num_lanes(shape.lanes)):
            lanes, at = count_of(shape.lanes, size - column), head * width + column
            s0 = _first_sums(sums, at, factors, head, shape)
            for b in range(count):
                at_r, at_f, at_w = row[b] * rows.stride, block.edge[b] * _stride(features), b * num_padded + head
                s0 = _add_weighed(s0, weights[at_w], rows, at_r + h0, features, at_f + h0, column, lanes)
            store_sums(sums, at, s0, shape)


@helper
def backward_block(inputs, grad_out, target, source, lse, block, count, shape, fetched, also_fetched):
    """Fill a block with weights and their gradients.

    Args:
        target, source: rows of its edges; one of them is `block.near`.
        fetched, also_fetched: the rows that lie at the far ends.
    """
    q, k, v, features = inputs.q, inputs.k, inputs.v, inputs.features
    products(q, target, k, source, features, block, count, shape, inputs.scale, block.weights, fetched, None)
    products(grad_out, target, v, source, features, block, count, shape, ONE, block.grads, also_fetched, None)
    add_bias(block.weights, inputs, block, count, shape)
    weigh(block.weights, lse, target, count, shape)
    keep_some(inputs, block, count, shape)


@helper
def fill(numbers, first, last, number):
    """Fill a range."""
    for at in range(first, last):
        numbers[at] = number


@helper
def edges_of(pieces, piece, indptr, row):
    """Return the first and last edge of a row within a piece."""
    return max(indptr[row], pieces[piece, 2]), min(indptr[row + 1], pieces[piece, 3])


@helper
def store_row(rows, row, at_row, sums, at_sums, factor, shape):
    """Write the sums of a head, times a factor, into a row."""
    size = shape.head_size
    for column in range(0, size, num_lanes(shape.lanes)):
        lanes = count_of(shape.lanes, size - column)
        value = multiply(load_sums(sums, at_sums + column, shape), splat(factor, lanes))
        store(rows.flat, row * rows.stride + at_row + column, value, lanes)


@helper
def keep(partials, partial, state):
    """Keep a row's state as a partial result."""
    for at in range(partials.shape[1]):
        partials[partial, at] = state[at]
