"""Edges whose queries and keys fit each other, judged by a few projected columns.

The candidates are the edges of the static graph, so exchange and program stay as they are. A score is the mean of the
heads' scaled products, estimated from the columns of a random or learned projection. Scores are summed column by
column in a fixed order and projections in fp64, so that neither the partition nor the shapes round them differently.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from executor.keyed import Stream, numbered_bits, stream_bits
from executor.sampling.candidates import Candidates
from executor.sampling.draws import sample_weighted
from executor.sampling.neighbours import Neighbours, pick
from executor.sampling.ranking import keep_smallest

# Entries of a block of rows that is projected at a time: 32 MB of fp64.
_BLOCK_ENTRIES = 2**22


def random_projection(num_columns: int, width: int, key: Tensor) -> Tensor:
    """Return a matrix of signs over sqrt(width), fp32 [num_columns, width]: it keeps products in expectation.

    Args:
        key: int64 [2], seed and step, on the device of the matrix.

    Source: Achlioptas, JCSS 66(4), 2003.
    """
    column_D = torch.arange(num_columns, device=key.device)
    number_R = torch.arange(width, device=key.device)
    bits_DR = numbered_bits(stream_bits(column_D, key, Stream.PROJECTION).unsqueeze(1), number_R)
    signs_DR = torch.where(bits_DR < 0, -1.0, 1.0)
    return signs_DR / math.sqrt(width)


@torch.no_grad()
def sample_by_projection(
    candidates: Candidates,
    fan_out: int,
    q_NHK: Tensor,
    k_MHK: Tensor,
    projection_DR: Tensor,
    *,
    key: Tensor | None,
    scale: float | None = None,
) -> Neighbours:
    """Return the `fan_out` edges of each row of the largest scores, or drawn by the softmax of the scores.

    Args:
        q_NHK: queries of the targets.
        k_MHK: keys of the sources, [M, H_kv, K]; H_kv divides H. Node features [N, 1, D] do for both.
        projection_DR: [H_kv x K, columns], from `random_projection` or learned.
        key: int64 [2], seed and step, to draw `fan_out` edges without replacement, with the log weights of
            `sample_weighted`; None for those of the largest scores, ties by the smaller edge id.
        scale: factor of the products of a query and a key; by default 1 / sqrt(K).
    """
    score_of = _scores(candidates, q_NHK, k_MHK, projection_DR, scale)
    if key is not None:
        return sample_weighted(candidates, fan_out, score_of, key)
    plan, position_K, _ = keep_smallest(candidates, fan_out, lambda row, position: -score_of(row, position))
    return candidates.neighbours(plan.indptr_N1, position_K)


def _scores(
    candidates: Candidates, q_NHK: Tensor, k_MHK: Tensor, projection_DR: Tensor, scale: float | None
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function that gives the fp64 scores of edges from their rows and positions."""
    num_heads, head_size = q_NHK.shape[1:]
    factor = (head_size**-0.5 if scale is None else scale) / num_heads
    # Heads that share a key share its rows of the projection.
    per_head_HKR = projection_DR.double().unflatten(0, (k_MHK.shape[1], head_size))
    q_projection = per_head_HKR.repeat_interleave(num_heads // k_MHK.shape[1], 0).flatten(0, 1) * factor
    q_RN = _projected(q_NHK.flatten(1), q_projection)
    k_RM = _projected(k_MHK.flatten(1), projection_DR.double())
    source_E = candidates.graph.source_E

    def score(row: Tensor, position: Tensor) -> Tensor:
        source = pick(source_E, position)
        total = torch.zeros(source.shape, dtype=torch.float32, device=source.device)
        for q_N, k_M in zip(q_RN, k_RM, strict=True):
            total += pick(q_N, row) * pick(k_M, source)
        return total.double()

    return score


def _projected(x_ND: Tensor, projection_DR: Tensor) -> Tensor:
    """Return rows times an fp64 projection, fp32 [columns, N], each column contiguous."""
    num_rows = max(1, _BLOCK_ENTRIES // max(1, x_ND.shape[1]))
    return torch.cat([(x.double() @ projection_DR).float() for x in x_ND.split(num_rows)]).T.contiguous()
