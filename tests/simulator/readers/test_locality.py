"""Reuse in windows and of a cache: by hand, against sets, and against a cache that is simulated read by read."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.readers.graphs import Graph, read_graph
from simulator.readers.locality import Locality, beyond_cache_ratio, first_read_ratio, locality, window_reuse
from simulator.specs.graph import GraphFile
from tests.small_graphs import Edges, graph_of, multigraphs, shuffled_communities

# Of shares of edges: how far a sample may be from the whole graph.
SAMPLED = 0.03


@st.composite
def ordered_graphs(draw: st.DrawFn) -> tuple[Edges, int, np.ndarray]:
    """Draw edges, the number of nodes, and an order of them."""
    edges, num_nodes = draw(multigraphs(max_nodes=40, max_edges=120))
    return edges, num_nodes, np.array(draw(st.permutations(range(num_nodes))))


def sources_in_order(graph: Graph, order_N: np.ndarray) -> list[int]:
    """Return the rows that edges read, one by one."""
    return [
        source
        for node in order_N
        for source in graph.source_E[graph.indptr_N[node] : graph.indptr_N[node + 1]].tolist()
    ]


def least_recently_used_misses(rows: list[int], cache_rows: int) -> float:
    """Return the share of reads that a cache misses in the second of two passes."""
    cache: OrderedDict[int, None] = OrderedDict()
    for _ in range(2):
        misses = 0
        for row in rows:
            misses += row not in cache
            cache[row] = None
            cache.move_to_end(row)
            if len(cache) > cache_rows:
                cache.popitem(last=False)
    return misses / len(rows)


# --- Windows.


def test_reuse_of_windows_by_hand():
    # Targets 0 and 1 share source 4, 2 and 3 share none.
    graph = graph_of([(4, 0), (5, 0), (4, 1), (4, 2), (5, 3)], 6)
    natural_N = np.arange(6)
    assert window_reuse(graph, natural_N, num_rows=1) == 1
    assert window_reuse(graph, natural_N, num_rows=2) == 5 / 4
    assert window_reuse(graph, natural_N, num_rows=6) == 5 / 2
    # Now 0 and 3 share source 5, 1 and 2 share source 4.
    assert window_reuse(graph, np.array([0, 3, 1, 2, 4, 5]), num_rows=2) == 5 / 3


@given(ordered_graphs(), st.integers(1, 9))
def test_reuse_of_windows_is_counted_exactly(case, num_rows):
    edges, num_nodes, order_N = case
    place = {int(node): place for place, node in enumerate(order_N)}
    pairs = {(place[target] // num_rows, source) for source, target in edges}
    expected = len(edges) / len(pairs) if edges else 1.0
    assert window_reuse(graph_of(edges, num_nodes), order_N, num_rows=num_rows) == pytest.approx(expected)


@given(ordered_graphs())
def test_larger_windows_share_no_less(case):
    edges, num_nodes, order_N = case
    graph = graph_of(edges, num_nodes)
    reuses = [window_reuse(graph, order_N, num_rows=2**power) for power in range(6)]
    assert reuses == sorted(reuses)
    assert reuses[0] == (len(edges) / len(set(edges)) if edges else 1.0)  # multi-edges alone share


def test_reuse_of_a_sample_of_windows_is_near_that_of_all(shared_data):
    _, graph = read_graph(GraphFile(path="tolokers.npz"), base=shared_data)
    natural_N = np.arange(graph.num_nodes)
    for num_rows in (16, 64):
        whole = window_reuse(graph, natural_N, num_rows=num_rows)
        sampled = window_reuse(graph, natural_N, num_rows=num_rows, max_edges=graph.num_edges // 5)
        assert sampled == pytest.approx(whole, rel=SAMPLED)


# --- Caches.


def test_a_cache_that_holds_every_row_is_missed_once_a_row():
    graph = graph_of([(0, 1), (0, 2), (3, 2), (0, 3)], 4)
    for cache_rows in (2, 3, 100):
        assert beyond_cache_ratio(graph, np.arange(4), cache_rows=cache_rows) == 2 / 4
    assert first_read_ratio(graph) == 2 / 4


def test_a_cache_of_no_rows_is_always_missed():
    assert beyond_cache_ratio(graph_of([(0, 1)] * 5, 2), np.arange(2), cache_rows=0) == 1


@given(num_nodes=st.integers(2, 40), cache_rows=st.integers(1, 50))
def test_rows_read_round_and_round_are_all_missed_or_all_found(num_nodes, cache_rows):
    # Each node reads the one before it, so a pass reads all rows once, in a ring.
    graph = graph_of([(node, (node + 1) % num_nodes) for node in range(num_nodes)], num_nodes)
    assert beyond_cache_ratio(graph, np.arange(num_nodes), cache_rows=cache_rows) == 1
    # With each edge three times over, two of three find the row where it was just read.
    tripled = graph_of([(node, (node + 1) % num_nodes) for node in range(num_nodes)] * 3, num_nodes)
    assert beyond_cache_ratio(tripled, np.arange(num_nodes), cache_rows=num_nodes) == pytest.approx(1 / 3)


@given(ordered_graphs(), st.integers(0, 45))
def test_a_share_of_misses_is_within_first_reads_and_all(case, cache_rows):
    edges, num_nodes, order_N = case
    graph = graph_of(edges, num_nodes)
    found = beyond_cache_ratio(graph, order_N, cache_rows=cache_rows)
    distinct = len({source for source, _ in edges})
    assert found >= distinct / max(len(edges), 1) == first_read_ratio(graph)
    assert found <= 1


@pytest.mark.parametrize("cache_rows", [40, 150, 500, 1200])
@pytest.mark.parametrize("seed", range(3))
def test_misses_are_near_those_of_a_cache_simulated_read_by_read(cache_rows, seed):
    graph, by_community_N = shuffled_communities(seed=seed)
    for order_N in (np.arange(graph.num_nodes), by_community_N):
        expected = least_recently_used_misses(sources_in_order(graph, order_N), cache_rows)
        found = beyond_cache_ratio(graph, order_N, cache_rows=cache_rows)
        assert found == pytest.approx(max(expected, first_read_ratio(graph)), abs=SAMPLED)


@pytest.mark.parametrize("name", ["amazon-photo", "coauthor-physics"])
@pytest.mark.parametrize("cache_rows", [1024, 4096])
def test_misses_on_real_graphs_are_near_those_of_a_simulated_cache(shared_data, name, cache_rows):
    _, graph = read_graph(GraphFile(path=f"{name}.npz"), base=shared_data)
    degree_order_N = np.argsort(-graph.in_degree_N, kind="stable")
    expected = least_recently_used_misses(sources_in_order(graph, degree_order_N), cache_rows)
    assert 0.1 < expected < 0.95
    found = beyond_cache_ratio(graph, degree_order_N, cache_rows=cache_rows)
    assert found == pytest.approx(expected, abs=SAMPLED)


def test_a_graph_without_edges_reads_nothing():
    found = locality(graph_of([], 3), np.arange(3), cache_rows=(0, 5))
    assert found == Locality(window_16_reuse=1.0, window_64_reuse=1.0, beyond_cache_ratios=(0.0, 0.0))


def test_the_measures_of_an_order_are_those_of_its_windows_and_caches():
    graph, order_N = shuffled_communities()
    assert locality(graph, order_N, cache_rows=(100, 300)) == Locality(
        window_16_reuse=window_reuse(graph, order_N, num_rows=16),
        window_64_reuse=window_reuse(graph, order_N, num_rows=64),
        beyond_cache_ratios=tuple(beyond_cache_ratio(graph, order_N, cache_rows=rows) for rows in (100, 300)),
    )
