import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.shares import part_shares, ranks_by_load
from simulator.specs.shares import PartShares
from tests.small_graphs import graph_of


@pytest.mark.parametrize(
    ("loads", "num_ranks", "expected"),
    [
        ((9, 1, 1, 1), 4, (1, 1, 1, 1)),
        ((9, 3), 4, (3, 1)),
        ((9, 1, 2), 4, (2, 1, 1)),
        ((10, 10, 10), 4, (2, 1, 1)),
        # 8 * 5 / 12 = 3.33 and 4 * 5 / 12 = 1.67: the larger remainder gets the fifth.
        ((8, 4), 5, (3, 2)),
        ((0, 0), 3, (2, 1)),
        ((5, 0), 3, (2, 1)),
        # The small ones have a rank each, and the rest is shared out by the rest of the load.
        ((100, 50, 1, 1), 8, (4, 2, 1, 1)),
    ],
)
def test_parts_get_ranks_in_proportion_to_their_load(loads, num_ranks, expected):
    assert ranks_by_load(loads, num_ranks) == expected


@given(loads=st.lists(st.integers(0, 1000), min_size=1, max_size=4), more=st.integers(0, 5))
def test_no_part_is_left_out_and_the_busiest_rank_has_little_more_than_it_must(loads, more):
    num_ranks = len(loads) + more
    found = ranks_by_load(loads, num_ranks)
    assert sum(found) == num_ranks
    assert min(found) >= 1
    ways = [ways for ways in itertools.product(range(1, more + 2), repeat=len(loads)) if sum(ways) == num_ranks]
    best = min(max(load / count for load, count in zip(loads, way, strict=True)) for way in ways)
    # By remainders a part has at least the whole number of ranks that its share comes to, so at least half of it.
    assert max(load / count for load, count in zip(loads, found, strict=True)) <= 2 * best + 1e-9


def test_what_ranks_own_is_counted_in_the_graph():
    # Nodes 0 to 2 are part 0, on one rank; 3 to 6 part 1, on two: 3 and 4, 5 and 6.
    edges = [(3, 0), (4, 0), (5, 1), (0, 3), (0, 6), (2, 6), (3, 6), (4, 5)]
    graph = graph_of(edges, 7, train_mask_N=np.array([1, 0, 0, 1, 1, 0, 1], dtype=np.bool_))
    part_N = np.array([0, 0, 0, 1, 1, 1, 1], dtype=np.int32)
    sources: list[set[int]] = [set(), set()]
    for source, target in zip(graph.source_E.tolist(), graph.target_E.tolist(), strict=True):
        sources[part_N[target]].add(source)
    assert part_shares(graph, part_N, (1, 2)) == PartShares(
        part_ranks=(1, 2),
        num_nodes=(3, 2, 2),
        num_train_nodes=(1, 2, 1),
        num_feature_entries=(0, 0, 0),
        rows_to_parts=(
            (0, len(sources[1] & {0, 1, 2})),
            (len(sources[0] & {3, 4}), 0),
            (len(sources[0] & {5, 6}), 0),
        ),
    )
