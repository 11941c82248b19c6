"""Counts of rows between hosts against sets made edge by edge."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.hosts import host_rows
from planner.partition import part_specs, partition_graph
from simulator.specs.hosts import HostRows
from tests.small_graphs import edges_of, graph_of, multigraphs


@given(multigraphs(max_nodes=14, max_edges=60), st.integers(1, 6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_each_host_gets_each_row_that_it_needs_once_and_each_rank_its_halo(
    multigraph, num_parts, ranks_per_host, random
):
    graph = graph_of(*multigraph)
    part_N = np.array([random.randrange(num_parts) for _ in range(graph.num_nodes)], dtype=np.int32)
    found = host_rows(graph, part_N, num_parts, ranks_per_host=ranks_per_host)
    owner = part_N.tolist()
    pairs = {(owner[target], source) for source, target in edges_of(graph) if owner[target] != owner[source]}
    into_hosts = {
        (rank // ranks_per_host, source)
        for rank, source in pairs
        if rank // ranks_per_host != owner[source] // ranks_per_host
    }
    assert found.num_rows_between_hosts == len(into_hosts)
    for rank, part in enumerate(part_specs(graph, part_N, num_parts)):
        assert sum(found.rows_from[rank]) + sum(found.passed_rows_from[rank]) == part.num_halo_rows
        for other in found.ranks_of_host(rank):
            assert found.rows_from[rank][other] == part.halo_rows_from[other]


def test_two_hosts_of_two_by_hand():
    # Node 4 of rank 2 is needed by both ranks of the first host, nodes 5 and 6 of rank 3 by rank 0 and both.
    part_N = np.array([0, 0, 1, 1, 2, 3, 3], dtype=np.int32)
    graph = graph_of([(4, 0), (4, 2), (5, 1), (6, 0), (6, 3), (0, 2)], 7)
    # Rank 0 takes node 4, the first of rank 2, and 5, that it needs alone; the next turn, node 6, is that of rank 1.
    assert host_rows(graph, part_N, 4, ranks_per_host=2) == HostRows(
        ranks_per_host=2,
        rows_from=((0, 0, 1, 1), (1, 0, 0, 1), (0, 0, 0, 0), (0, 0, 0, 0)),
        passed_rows_from=((0, 1, 0, 0), (1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0)),
    )


def test_a_cut_counts_the_rows_of_hosts_when_asked(tmp_path):
    graph = graph_of([(node, (node + step) % 60) for node in range(60) for step in (1, 7)], 60)
    plain = partition_graph(graph, 4, seed=0, folder=tmp_path)
    assert plain.hosts is None
    counted = partition_graph(graph, 4, seed=0, folder=tmp_path, ranks_per_host=2)
    assert counted.hosts is not None
    assert counted.hosts.ranks_per_host == 2
    assert (counted.sha256, counted.parts) == (plain.sha256, plain.parts)
