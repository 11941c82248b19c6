"""One rank's rows in a hierarchical exchange: what all ranks send is what they expect, and what the plan counts."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from executor.hosts import HostHalo, host_halo
from planner.hosts import host_rows
from simulator.readers.graphs import Graph
from tests.small_graphs import Edges, edges_of, graph_of, multigraphs

Case = tuple[Edges, np.ndarray, int, int, np.ndarray]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw edges, the rank that owns each node, ranks, ranks of a host, and each node's place in the plan's order."""
    edges, num_nodes = draw(multigraphs(max_nodes=14, max_edges=60))
    num_ranks = draw(st.integers(1, 6))
    owners = draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_nodes, max_size=num_nodes))
    place_N = draw(st.permutations(range(num_nodes)))
    return edges, np.array(owners), num_ranks, draw(st.integers(1, 4)), np.array(place_N)


def needed_by(graph: Graph, owner_N: np.ndarray, rank: int) -> np.ndarray:
    """Return the nodes of others that a rank's nodes attend to, ascending."""
    found = {s for s, t in edges_of(graph) if owner_N[t] == rank and owner_N[s] != rank}
    return np.array(sorted(found), dtype=np.int64)


def halos(case: Case) -> list[HostHalo]:
    edges, owner_N, num_ranks, ranks_per_host, place_N = case
    graph = graph_of(edges, len(owner_N))
    needed = [needed_by(graph, owner_N, rank) for rank in range(num_ranks)]
    return [host_halo(needed, owner_N, place_N, rank=rank, ranks_per_host=ranks_per_host) for rank in range(num_ranks)]


@given(cases())
def test_both_exchanges_bring_each_rank_its_halo(case):
    edges, owner_N, num_ranks, ranks_per_host, place_N = case
    graph, found = graph_of(edges, len(owner_N)), halos(case)
    own = [np.flatnonzero(owner_N == rank) for rank in range(num_ranks)]
    own = [nodes[np.argsort(place_N[nodes])] for nodes in own]
    sent = [np.split(own[rank][halo.send_row_S], np.cumsum(halo.rows_to)[:-1]) for rank, halo in enumerate(found)]
    got = [np.concatenate([sent[other][rank] for other in range(num_ranks)]) for rank in range(num_ranks)]
    passed = [np.split(got[rank][halo.passed_row_S], np.cumsum(halo.passed_to)[:-1]) for rank, halo in enumerate(found)]
    for rank, halo in enumerate(found):
        first = rank - rank % ranks_per_host
        from_host = [passed[first + place][rank - first] for place in range(len(halo.passed_to))]
        assert halo.halo_M.tolist() == np.concatenate([got[rank], *from_host]).tolist()
        assert sorted(halo.halo_M.tolist()) == needed_by(graph, owner_N, rank).tolist()
        assert halo.rows_from == tuple(len(sent[other][rank]) for other in range(num_ranks))
        assert halo.passed_from == tuple(map(len, from_host))


@given(cases())
def test_a_rank_moves_what_the_plan_counts(case):
    edges, owner_N, num_ranks, ranks_per_host, _ = case
    counted = host_rows(graph_of(edges, len(owner_N)), owner_N, num_ranks, ranks_per_host=ranks_per_host)
    for rank, halo in enumerate(halos(case)):
        assert halo.rows_from == counted.rows_from[rank]
        assert halo.rows_to == tuple(rows[rank] for rows in counted.rows_from)
        members = counted.ranks_of_host(rank)
        assert halo.passed_from == tuple(counted.passed_rows_from[rank][other] for other in members)
        assert halo.passed_to == tuple(counted.passed_rows_from[other][rank] for other in members)


@given(cases())
def test_no_row_enters_a_host_twice(case):
    _, owner_N, _, ranks_per_host, _ = case
    for first in range(0, case[2], ranks_per_host):
        entered = [
            node
            for halo in halos(case)[first : first + ranks_per_host]
            for node in halo.halo_M[: sum(halo.rows_from)].tolist()
            if owner_N[node] // ranks_per_host != first // ranks_per_host
        ]
        assert len(set(entered)) == len(entered)
