"""Serves parts with more work than others by several ranks: how many each gets, and what each then owns."""

from collections.abc import Sequence

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from simulator.readers.graphs import Graph, sources_into
from simulator.shares import rank_of_nodes
from simulator.specs.plan import PartSpec
from simulator.specs.shares import PartShares


def ranks_by_load(loads: Sequence[float], num_ranks: int) -> tuple[int, ...]:
    """Return ranks for each part in proportion to its load, at least one, by the largest remainder.

    Args:
        loads: of each part.
        num_ranks: no fewer than parts.
    """
    assert num_ranks >= len(loads), (num_ranks, len(loads))
    found = [1] * len(loads)
    total = sum(loads)
    if total == 0:
        found[0] += num_ranks - len(loads)
        return tuple(found)
    # Parts that would get less than one rank have one, and the others share what is left.
    served = dict(enumerate(loads))
    left, rest = num_ranks, float(total)
    while small := [part for part, load in served.items() if load * left < rest]:
        for part in small:
            rest -= served.pop(part)
            left -= 1
    shares = {part: load * left / rest for part, load in served.items()}
    for part, share in shares.items():
        found[part] = int(share)
    missing = num_ranks - sum(found)
    for part in sorted(shares, key=lambda part: (found[part] - shares[part], part))[:missing]:
        found[part] += 1
    return tuple(found)


def part_loads(parts: Sequence[PartSpec]) -> tuple[int, ...]:
    """Return the work of each part, counted as `planner/partition.py` does for its cuts: its edges and its rows."""
    return tuple(part.num_edges + part.num_nodes for part in parts)


def part_shares(graph: Graph, part_N: NDArray[np.integer], part_ranks: Sequence[int]) -> PartShares:
    """Return what each rank owns of a cut, counted exactly.

    Args:
        part_N: part of each node.
        part_ranks: ranks that serve each part.
    """
    rank_N, num_ranks = rank_of_nodes(part_N, part_ranks), sum(part_ranks)
    entries_N = np.zeros(graph.num_nodes, np.int64)
    if isinstance(graph.features, scipy.sparse.csr_array):
        entries_N = np.diff(graph.features.indptr)
    rows_to_parts = np.zeros((num_ranks, len(part_ranks)), np.int64)
    for part in range(len(part_ranks)):
        is_needed_N = np.zeros(graph.num_nodes, dtype=np.bool_)
        is_needed_N[sources_into(graph, np.flatnonzero(part_N == part))] = True
        rows_to_parts[:, part] = np.bincount(rank_N[is_needed_N & (part_N != part)], minlength=num_ranks)

    def by_rank(count_N: NDArray[np.generic]) -> tuple[int, ...]:
        return tuple(np.bincount(rank_N, weights=count_N, minlength=num_ranks).astype(np.int64).tolist())

    return PartShares(
        part_ranks=tuple(part_ranks),
        num_nodes=by_rank(np.ones(graph.num_nodes)),
        num_train_nodes=by_rank(graph.train_mask_N),
        num_feature_entries=by_rank(entries_N),
        rows_to_parts=tuple(tuple(row) for row in rows_to_parts.tolist()),
    )
