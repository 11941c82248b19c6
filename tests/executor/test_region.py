"""Regions of graphs: connected, no larger than asked for, the same for a seed."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from executor.region import connected_region
from tests.small_graphs import graph_of, multigraphs, shuffled_communities


def components(edges, num_nodes) -> list[set[int]]:
    """Return the connected components, found by merging sets."""
    found = [{node} for node in range(num_nodes)]
    for ends in edges:
        joined = [component for component in found if component & set(ends)]
        found = [component for component in found if not component & set(ends)] + [set().union(*joined)]
    return found


@given(case=multigraphs(max_nodes=20, max_edges=40), max_nodes=st.integers(1, 25), seed=st.integers(0, 5))
def test_a_region_is_connected_and_as_large_as_asked_for_or_a_largest_component(case, max_nodes, seed):
    edges, num_nodes = case
    region = connected_region(graph_of(edges, num_nodes), max_nodes, seed=seed).tolist()
    assert region == sorted(set(region))
    largest = max(map(len, components(edges, num_nodes)))
    assert len(region) == min(max_nodes, largest)
    inside = [edge for edge in edges if set(edge) <= set(region)]
    assert max(map(len, components(inside, num_nodes))) == len(region)


def test_a_seed_gives_the_same_region_again_and_another_one_does_not():
    graph, _ = shuffled_communities(512)
    first, again, other = (connected_region(graph, 60, seed=seed) for seed in (1, 1, 2))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_hub_does_not_fill_a_region_by_itself():
    # A hub of 300 leaves at the head of a path of 100 nodes: leaves come 8 at a time, so the path is walked too.
    hub = [(0, leaf) for leaf in range(1, 301)]
    path = [(0, 301)] + [(node, node + 1) for node in range(301, 400)]
    region = connected_region(graph_of(hub + path, 401), 200, seed=0)
    assert 0 in region
    assert np.count_nonzero(region > 300) > 5
