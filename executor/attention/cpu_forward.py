"""Kernels of the forward pass of attention on CPUs.

A kernel takes pieces, rows of a table: first row, last row, first edge, last edge, partial result. A piece is a run of
rows, or a part of a long row, which leaves the row's state as a partial result; these are joined in their order. So the
order of every sum follows from the graph alone. Of a row a kernel takes blocks of edges: first the products of all
heads, edge by edge, then the weights, then weighted sums, whose accumulators stay in registers.

The state of a row: sums [H, C], largest score [P], sum of exponentials [P].
"""

# mypy: ignore-errors

import numpy as np

from executor.attention.cpu_arithmetic import add, exp, larger, multiply, subtract, zero_if_infinite
from executor.attention.cpu_blocks import (
    LOWEST,
    ONE,
    ZERO,
    accumulate,
    add_bias,
    edges_of,
    fill,
    fill_block,
    keep,
    keep_some,
    products,
    sizes,
    store_row,
)
from executor.attention.cpu_layout import BLOCK, Kernel, block_of, helper, pointed, pointed_edges, pointed_inputs
from executor.attention.cpu_vectors import LANES8, address, load, shifted, store


@helper
def _online_softmax(scores, count, shape, largest_P, sum_P, moved_P):
    """Turn scores into exponentials of their distance from the row's largest score so far.

    Write the factor by which this moves what was there before.
    """
    num_heads, num_padded, _, _ = sizes(shape)
    for head in range(0, num_heads, 8):
        before = load(largest_P, head, LANES8)
        most = before
        for b in range(count):
            most = larger(load(scores, b * num_padded + head, LANES8), most)
        shift = zero_if_infinite(most)
        moved = exp(subtract(before, shift))
        exp_sum = multiply(load(sum_P, head, LANES8), moved)
        for b in range(count):
            weights = exp(subtract(load(scores, b * num_padded + head, LANES8), shift))
            store(scores, b * num_padded + head, weights, LANES8)
            exp_sum = add(exp_sum, weights)
        store(largest_P, head, most, LANES8)
        store(sum_P, head, exp_sum, LANES8)
        store(moved_P, head, moved, LANES8)


@helper
def _finish_forward(row, shape, state, out, lse):
    num_heads, num_padded, size, width = sizes(shape)
    largest_P, sum_P = shifted(state, num_heads * width), shifted(state, num_heads * width + num_padded)
    for head in range(num_heads):
        factor = ONE / sum_P[head] if sum_P[head] != 0 else ZERO
        store_row(out, row, head * size, state, head * width, factor, shape)
        lse[row * num_heads + head] = largest_P[head] + np.log(sum_P[head])


@Kernel
def forward_pieces(pieces, first, last, scratch, inputs, edges, shape, out, lse, partials):
    """Write outputs and log-sum-exps of targets, or partial results."""
    num_heads, num_padded, _, width = sizes(shape)
    inputs, edges, out, lse = pointed_inputs(inputs), pointed_edges(edges), pointed(out), address(lse)
    q, k, v, features = inputs.q, inputs.k, inputs.v, inputs.features
    block = block_of(scratch, shape, inputs.lowest_kept)
    weights, state = block.weights, block.state
    largest_P, sum_P = shifted(state, num_heads * width), shifted(state, num_heads * width + num_padded)
    for piece in range(first, last):
        for row in range(pieces[piece, 0], pieces[piece, 1]):
            fill(state, 0, num_heads * width + 2 * num_padded, ZERO)
            fill(largest_P, 0, num_heads, LOWEST)
            begin, end = edges_of(pieces, piece, edges.indptr, row)
            for at in range(begin, end, BLOCK):
                count = min(BLOCK, end - at)
                fill_block(block, edges, row, at, count)
                products(q, block.near, k, block.far, features, block, count, shape, inputs.scale, weights, k, v)
                add_bias(weights, inputs, block, count, shape)
                _online_softmax(weights, count, shape, largest_P, sum_P, block.grads)
                keep_some(inputs, block, count, shape)
                accumulate(block.kept, v, block.far, block.at_kv, features, block, count, shape, state, block.grads)
            if pieces[piece, 4] < 0:
                _finish_forward(row, shape, state, out, lse)
            else:
                keep(partials, pieces[piece, 4], state)


@Kernel
def join_forward(split_rows, shape, scratch, partials, out, lse):
    """Write outputs and log-sum-exps of rows that were cut.

    Args:
        split_rows: row, first and last partial result.
    """
    num_heads, num_padded, _, width = sizes(shape)
    state, out, lse = address(scratch.numbers), pointed(out), address(lse)
    for split in range(len(split_rows)):
        row, first, last = split_rows[split, 0], split_rows[split, 1], split_rows[split, 2]
        fill(state, 0, num_heads * width + 2 * num_padded, ZERO)
        for head in range(num_heads):
            at_largest, at_sum = num_heads * width + head, num_heads * width + num_padded + head
            most = LOWEST
            for part in range(first, last):
                most = max(most, partials[part, at_largest])
            state[at_largest] = most
            for part in range(first, last):
                moved = np.exp(partials[part, at_largest] - most) if most > LOWEST else ZERO
                state[at_sum] += moved * partials[part, at_sum]
                for at in range(head * width, (head + 1) * width):
                    state[at] += moved * partials[part, at]
        _finish_forward(row, shape, state, out, lse)
