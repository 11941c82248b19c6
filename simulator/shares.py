"""Which rank owns a node, and who has which heads, where a part is served by several. Planner and executor ask here."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from simulator.exchanges import head_counts


def rank_of_nodes(part_N: NDArray[np.integer], part_ranks: Sequence[int]) -> NDArray[np.int64]:
    """Return the rank that owns each node: a part's nodes, by ascending id, go to its ranks in equal runs.

    Args:
        part_N: part of each node.
        part_ranks: ranks that serve each part.
    """
    first_rank = np.cumsum(part_ranks) - np.asarray(part_ranks)
    rank_N: NDArray[np.int64] = first_rank[part_N]
    for part, count in enumerate(part_ranks):
        if count > 1:
            nodes = np.flatnonzero(part_N == part)
            rank_N[nodes] += np.arange(len(nodes)) * count // max(len(nodes), 1)
    return rank_N


def mates_of(part_ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """Return the ranks of a graph group that serve a rank's part, with itself, in order."""
    first = 0
    for count in part_ranks:
        if rank < first + count:
            return tuple(range(first, first + count))
        first += count
    raise AssertionError(f"rank {rank} serves no part of {part_ranks}")


def heads_by_rank(num_heads: int, part_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return how many heads each rank of a graph group attends with; those of a part have all of them together."""
    return tuple(heads for count in part_ranks for heads in head_counts(num_heads, count))


def first_heads(num_heads: int, part_ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the first head of each rank of a graph group."""
    return tuple(
        sum(counts[:place])
        for counts in (head_counts(num_heads, count) for count in part_ranks)
        for place in range(len(counts))
    )
