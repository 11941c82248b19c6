"""A few edges of each row, drawn without replacement: alike, or by weight."""

from collections.abc import Callable

import torch
from torch import Tensor

from executor.keyed import Stream, numbered_bits, numbers_below, stream_bits, unit_doubles
from executor.sampling.candidates import Candidates
from executor.sampling.neighbours import Neighbours, pick
from executor.sampling.plan import BATCH_ENTRIES, FanOutPlan, plan_fan_out
from executor.sampling.ranking import keep_smallest

# Up to this fan-out places are drawn (work of rows x fan-out^2), above it edges are ranked (work of edges). On an R-MAT
# graph of 2.8M edges one core took 19 against 120 ms for a fan-out of 16, 46 against 87 ms for 64.
MAX_DRAWN_PLACES = 64


@torch.no_grad()
def sample_uniform(candidates: Candidates, fan_out: int, key: Tensor) -> Neighbours:
    """Return `fan_out` edges of each row, all subsets alike; rows with fewer edges keep all.

    The log weight is that of the inverse share kept, log(degree / fan_out): the same for a row's edges, so it matters
    only where a softmax runs over other edges too, or results are merged.

    Args:
        key: int64 [2] on the candidates' device, seed and step.
    """
    if fan_out > MAX_DRAWN_PLACES:
        plan, position_K, _ = keep_smallest(candidates, fan_out, lambda _, position: _hashes(candidates, position, key))
    else:
        plan = candidates.plan(fan_out)
        position_K = _drawn_places(candidates.edge_ids, plan, key)
    degree_N = candidates.degree_N
    log_weight_N = (degree_N.clamp(min=1) / degree_N.clamp(min=1, max=fan_out)).log()
    log_weight_K = log_weight_N.repeat_interleave(plan.indptr_N1.diff(), output_size=len(position_K))
    return candidates.neighbours(plan.indptr_N1, position_K, log_weight_K)


@torch.no_grad()
def sample_rows(first_R: Tensor, degree_R: Tensor, fan_out: int, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return row pointers [R + 1] and positions [K] of the edges that `sample_uniform` gives rows of a whole graph.

    Only what is drawn is looked at, not all edges of the rows. The graph's edge ids are its positions.

    Args:
        first_R, degree_R: position of each row's first edge, and the row's edges, int64.
        fan_out: at most `MAX_DRAWN_PLACES`.
        key: int64 [2] on the rows' device, seed and step.
    """
    assert fan_out <= MAX_DRAWN_PLACES, fan_out
    plan = plan_fan_out(first_R, degree_R, fan_out)
    return plan.indptr_N1, _drawn_places(lambda position: position, plan, key)


def _hashes(candidates: Candidates, position: Tensor, key: Tensor) -> Tensor:
    return stream_bits(candidates.edge_ids(position), key, Stream.UNIFORM).double()


def _drawn_places(edge_ids: Callable[[Tensor], Tensor], plan: FanOutPlan, key: Tensor) -> Tensor:
    """Return positions of edges, each row's drawn by Floyd's method; the row's first edge id stands for the row.

    Source: Bentley and Floyd, "A sample of brilliance", CACM 30(9), 1987.
    """
    position_K = plan.position_K.clone()
    num_rows = len(plan.long.row_R)
    piece_rows = max(1, BATCH_ENTRIES[position_K.device.type] // plan.fan_out)
    for first in range(0, num_rows, piece_rows):
        rows = plan.long.part(first, first + piece_rows)
        bits_R = stream_bits(edge_ids(rows.first_R), key, Stream.UNIFORM)
        rows.put_chosen(position_K, _distinct_places(bits_R, rows.degree_R, plan.fan_out))
    return position_K


def _distinct_places(bits_R: Tensor, degree_R: Tensor, count: int) -> Tensor:
    """Return `count` different places of each row from 0 to below its degree, ascending, [R, count]."""
    number_F1 = torch.arange(count, device=bits_R.device).unsqueeze(1)
    last_FR = degree_R - count + number_F1
    place_FR = numbers_below(numbered_bits(bits_R, number_F1), last_FR + 1)
    for number in range(1, count):
        is_taken_R = (place_FR[:number] == place_FR[number]).any(0)
        place_FR[number] = torch.where(is_taken_R, last_FR[number], place_FR[number])
    return place_FR.T.sort(dim=1).values


@torch.no_grad()
def sample_by_degree(
    candidates: Candidates, fan_out: int, exponent: float, source_degree_M: Tensor, key: Tensor
) -> Neighbours:
    """Return `fan_out` edges of each row, drawn one by one with the weight degree(source)^exponent of those left.

    Args:
        source_degree_M: degree of each source in the whole graph; 0 counts as 1.
        key: int64 [2] on the candidates' device, seed and step.
    """
    log_weight_M = exponent * source_degree_M.clamp(min=1).double().log()
    source_E = candidates.graph.source_E
    return sample_weighted(candidates, fan_out, lambda _, position: pick(log_weight_M, pick(source_E, position)), key)


@torch.no_grad()
def sample_weighted(
    candidates: Candidates, fan_out: int, log_weight_of: Callable[[Tensor, Tensor], Tensor], key: Tensor
) -> Neighbours:
    """Return `fan_out` edges of each row, drawn one by one by the weights of those left; short rows keep all.

    The log weight is minus the log of the probability that the edge is among those drawn, given the random numbers of
    the others: weighted so, sums over those drawn are unbiased for sums over the row, and a softmax, a ratio of two
    such sums, is consistent.

    Args:
        log_weight_of: returns the fp64 logs of the weights of edges, given their rows and positions, which broadcast.
        key: int64 [2] on the candidates' device, seed and step.

    Source: Efraimidis and Spirakis, IPL 97(5), 2006, with the logs of their keys (Gumbel top-k); Cohen and Kaplan,
        "Summarizing data using bottom-k sketches", PODC 2007, and Kool et al., ICML 2019, for the probabilities.
    """

    def log_keys(row: Tensor, position: Tensor) -> Tensor:
        uniform = unit_doubles(stream_bits(candidates.edge_ids(position), key, Stream.WEIGHTED))
        return torch.log(-torch.log(uniform)) - log_weight_of(row, position)

    plan, position_K, left_out_N = keep_smallest(candidates, fan_out, log_keys)
    rows_N = torch.arange(len(left_out_N), device=left_out_N.device)
    row_K = rows_N.repeat_interleave(plan.indptr_N1.diff(), output_size=len(position_K))
    rate_K = torch.exp(log_weight_of(row_K, position_K) + pick(left_out_N, row_K))
    log_weight_K = -torch.log(-torch.expm1(-rate_K))
    return candidates.neighbours(plan.indptr_N1, position_K, log_weight_K.float())
