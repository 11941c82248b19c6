"""One rank's rows, edges, halo and messages against brute force; its tensors against the graph."""

import itertools
from collections.abc import Iterable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.data import LocalEdges, RankData, build_rank_data, local_edges
from planner.shares import part_shares
from simulator.readers.graphs import Graph
from simulator.shares import rank_of_nodes
from simulator.specs.model import NUM_DEGREE_BUCKETS
from simulator.specs.plan import Exchange
from simulator.workload import rank_work
from tests.executor.made_graphs import awkward_graph, plan_of, sparse_graph, uneven_parts
from tests.small_graphs import Edges, graph_of, multigraphs

OUTSIDE = -1


Case = tuple[Edges, np.ndarray, int, np.ndarray | None]


@st.composite
def owned_graphs(draw: st.DrawFn) -> Case:
    """Draw edges, the rank that owns each node (or none), the number of ranks, of which some may own nothing, an order.

    The order is None for the natural one.
    """
    edges, num_nodes = draw(multigraphs())
    num_ranks = draw(st.integers(1, 4))
    owners = draw(st.lists(st.integers(OUTSIDE, num_ranks - 1), min_size=num_nodes, max_size=num_nodes))
    order = draw(st.none() | st.permutations(range(num_nodes)))
    return edges, np.array(owners), num_ranks, None if order is None else np.array(order, dtype=np.int32)


def all_local_edges(case: Case) -> list[LocalEdges]:
    edges, owner_N, num_ranks, order_N = case
    graph = graph_of(edges, len(owner_N))
    return [
        local_edges(graph, owner_N, graph_rank=rank, num_ranks=num_ranks, order_N=order_N) for rank in range(num_ranks)
    ]


def in_order(nodes: Iterable[int], order_N: np.ndarray | None) -> list[int]:
    """Return nodes as an order has them."""
    return sorted(nodes) if order_N is None else sorted(nodes, key=order_N.tolist().index)


def brute_halo(case: Case, rank: int, other: int) -> list[int]:
    """Return the nodes of another rank that a rank attends to, in order."""
    edges, owner_N, _, order_N = case
    return in_order(
        {source for source, target in edges if owner_N[target] == rank and owner_N[source] == other}, order_N
    )


@given(owned_graphs())
def test_a_rank_holds_its_nodes_and_the_edges_into_them_from_its_batch(case):
    edges, owner_N, _, order_N = case
    for rank, local in enumerate(all_local_edges(case)):
        assert local.node_N.tolist() == in_order(np.flatnonzero(owner_N == rank).tolist(), order_N)
        targets = np.repeat(local.node_N, np.diff(local.indptr_N1))
        held = sorted(zip(local.source_global_E.tolist(), targets.tolist(), strict=True))
        inside = [(s, t) for s, t in edges if owner_N[t] == rank and owner_N[s] != OUTSIDE]
        assert held == sorted(inside)
        for first, last in itertools.pairwise(local.indptr_N1.tolist()):
            sources = local.source_global_E[first:last].tolist()
            assert sources == sorted(sources)


@given(owned_graphs())
def test_the_halo_is_the_distinct_remote_sources_by_owner(case):
    _, _, num_ranks, _ = case
    for rank, local in enumerate(all_local_edges(case)):
        others = [[] if other == rank else brute_halo(case, rank, other) for other in range(num_ranks)]
        assert local.halo_M.tolist() == [node for nodes in others for node in nodes]
        assert local.rows_from == tuple(len(nodes) for nodes in others)


@given(owned_graphs())
def test_what_a_rank_sends_is_what_the_receiver_has_as_halo_in_the_same_order(case):
    _, owner_N, _, _ = case
    locals_by_rank = all_local_edges(case)
    for sender, sending in enumerate(locals_by_rank):
        messages = np.split(sending.node_N[sending.send_row_S], np.cumsum(sending.rows_to)[:-1])
        for receiver, receiving in enumerate(locals_by_rank):
            assert messages[receiver].tolist() == receiving.halo_M[owner_N[receiving.halo_M] == sender].tolist()
            assert sending.rows_to[receiver] == receiving.rows_from[sender]


@given(owned_graphs(), st.integers(1, 4))
def test_rows_of_one_message_lie_together_and_are_received_in_the_order_of_sending(case, each):
    edges, owner_N, num_ranks, order_N = case
    graph = graph_of(edges, len(owner_N))
    whole = all_local_edges(case)
    cut = [
        local_edges(graph, owner_N, graph_rank=rank, num_ranks=num_ranks, order_N=order_N, rows_per_message=each)
        for rank in range(num_ranks)
    ]
    for rank, local in enumerate(cut):
        # Message by message, and owner by owner: `each` rows of each owner's halo at a time.
        by_owner = [[n for n in whole[rank].halo_M.tolist() if owner_N[n] == other] for other in range(num_ranks)]
        most = max(map(len, by_owner))
        assert local.halo_M.tolist() == [
            node for first in range(0, most, each) for nodes in by_owner for node in nodes[first : first + each]
        ]
        for other, receiving in enumerate(cut):
            sent = [
                node
                for node in local.node_N[local.send_row_S].tolist()
                if node in set(receiving.halo_M.tolist()) and owner_N[node] == rank
            ]
            if num_ranks == 2 and other != rank:
                assert sent == receiving.halo_M.tolist()


@given(owned_graphs())
def test_every_rank_knows_the_rows_of_the_largest(case):
    _, owner_N, num_ranks, _ = case
    found = {local.max_rows for local in all_local_edges(case)}
    assert found == {max(int((owner_N == rank).sum()) for rank in range(num_ranks))}


@given(owned_graphs())
def test_rows_and_edges_of_a_full_graph_are_those_that_the_simulator_counts(case):
    edges, owner_N, num_ranks, order_N = case
    part_N = np.maximum(owner_N, 0)  # a full graph leaves no node out
    graph = graph_of(edges, len(part_N), train_mask_N=np.arange(len(part_N)) % 2 == 0)
    plan = plan_of(graph, part_N, num_ranks, graph_parallel_degree=num_ranks)
    locals_by_rank = all_local_edges((edges, part_N, num_ranks, order_N))
    for local, work in zip(locals_by_rank, rank_work(plan, step=0, seed=0), strict=True):
        assert work.num_rows == len(local.node_N)
        assert work.num_edges == len(local.source_global_E)
        assert work.num_train_rows == int(graph.train_mask_N[local.node_N].sum())
        assert work.rows_to == local.rows_to
        assert work.rows_from == local.rows_from
        assert work.max_rows == local.max_rows
        assert work.group.max_pair_rows == local.max_pair_rows
        assert work.group.rows_by_rank == tuple(len(other.node_N) for other in locals_by_rank)


# --- Tensors.


def rank_data(
    graph: Graph,
    owner_N: np.ndarray,
    rank: int,
    num_ranks: int,
    *,
    encodings: np.ndarray | None = None,
    order_N: np.ndarray | None = None,
) -> RankData:
    return build_rank_data(
        graph,
        encodings,
        owner_N,
        order_N=order_N,
        graph_rank=rank,
        exchanges=frozenset({Exchange.HALO, Exchange.ALL_GATHER} if num_ranks > 1 else {Exchange.NONE}),
        degree_buckets=True,
        group=None,
        num_ranks=num_ranks,
        num_train_rows_of_step=9,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


@given(owned_graphs())
def test_edges_lead_from_the_rows_that_an_exchange_lays_out(case):
    edges, owner_N, num_ranks, order_N = case
    graph = graph_of(edges, len(owner_N))
    locals_by_rank = all_local_edges(case)
    largest = max(len(local.node_N) for local in locals_by_rank)
    padded = [
        node for local in locals_by_rank for node in [*local.node_N.tolist(), *[None] * (largest - len(local.node_N))]
    ]
    for rank, local in enumerate(locals_by_rank):
        data = rank_data(graph, owner_N, rank, num_ranks, order_N=order_N)
        halo = [*local.node_N.tolist(), *local.halo_M.tolist()]
        layouts = {Exchange.NONE: halo, Exchange.HALO: halo, Exchange.ALL_GATHER: padded}
        for exchange, edge_graph in data.edges.items():
            nodes = layouts[exchange]
            assert edge_graph.num_sources == len(nodes)
            assert [nodes[row] for row in edge_graph.source_E.tolist()] == local.source_global_E.tolist()
            assert edge_graph.indptr_N1.tolist() == local.indptr_N1.tolist()


@pytest.mark.parametrize("is_ordered", [False, True], ids=["natural", "ordered"])
@pytest.mark.parametrize("rank", range(3))
def test_a_rank_has_the_features_labels_and_masks_of_its_nodes(rank, is_ordered):
    graph = awkward_graph()
    order_N = np.random.default_rng(2).permutation(graph.num_nodes) if is_ordered else None
    owner_N = uneven_parts(graph, 3)
    encodings = np.arange(2.0 * graph.num_nodes, dtype=np.float32).reshape(-1, 2)
    data = rank_data(graph, owner_N, rank, 3, encodings=encodings, order_N=order_N)
    nodes = np.array(in_order(np.flatnonzero(owner_N == rank).tolist(), order_N))
    assert data.node_N.tolist() == nodes.tolist()
    assert data.sparse is None
    assert data.dense_NF is not None
    assert data.dense_NF[:, :-2].tolist() == np.asarray(graph.features)[nodes].tolist()
    assert data.dense_NF[:, -2:].tolist() == encodings[nodes].tolist()
    assert data.label_N.tolist() == graph.labels_N[nodes].tolist()
    for name, mask_N in {"train": graph.train_mask_N, "val": graph.val_mask_N, "test": graph.test_mask_N}.items():
        assert nodes[data.mask_rows[name].numpy()].tolist() == [node for node in nodes if mask_N[node]]
    assert nodes[data.train_row_T.numpy()].tolist() == [node for node in nodes if graph.train_mask_N[node]]
    assert data.train_label_T.tolist() == graph.labels_N[nodes[data.train_row_T.numpy()]].tolist()
    assert data.num_train_rows_of_step == 9


def test_sparse_features_of_a_rank_are_rows_of_the_graphs_and_their_transpose():
    graph = sparse_graph()
    owner_N = uneven_parts(graph, 2)
    data = rank_data(graph, owner_N, 1, 2)
    assert data.dense_NF is None
    assert data.sparse is not None
    expected = graph.features.toarray()[owner_N == 1]  # type: ignore[union-attr]
    assert data.sparse.rows.to_dense().tolist() == expected.tolist()
    assert data.sparse.columns.to_dense().tolist() == expected.T.tolist()
    assert data.sparse.num_entries == np.count_nonzero(expected)


def test_encodings_beside_sparse_features_are_the_dense_input():
    graph = sparse_graph()
    encodings = np.ones((graph.num_nodes, 3), dtype=np.float32)
    data = rank_data(graph, np.zeros(graph.num_nodes, np.int64), 0, 1, encodings=encodings)
    assert data.dense_NF is not None
    assert data.dense_NF.shape == (graph.num_nodes, 3)


def test_degree_buckets_are_powers_of_two_of_the_sources_edges_in_the_whole_graph():
    # Node 0 has 1 edge, node 1 none, node 2 two, node 3 three, node 4 four, node 5 seven, node 6 eight.
    degrees = [1, 0, 2, 3, 4, 7, 8]
    edges = [(0, node) for node, degree in enumerate(degrees) for _ in range(degree)]
    asking = [(source, 7) for source in range(7)]
    graph = graph_of([*edges, *asking], 8)
    owner_N = np.array([0] * 7 + [1])
    data = rank_data(graph, owner_N, 1, 2)  # owns node 7 alone, and none of the edges into its sources
    assert data.degree_bucket_E is not None
    assert data.degree_bucket_E.tolist() == [0, 0, 1, 1, 2, 2, 3]


def test_the_last_degree_bucket_takes_all_that_is_larger():
    num_edges = 2 ** (NUM_DEGREE_BUCKETS + 1)
    graph = graph_of([(0, 0)] * num_edges + [(0, 1)], 2)
    data = rank_data(graph, np.array([0, 1]), 1, 2)
    assert data.degree_bucket_E is not None
    assert data.degree_bucket_E.tolist() == [NUM_DEGREE_BUCKETS - 1]


@pytest.mark.parametrize("graph", [awkward_graph(), sparse_graph()], ids=["dense", "sparse"])
def test_a_rank_without_nodes_has_tensors_without_rows(graph):
    data = rank_data(graph, np.zeros(graph.num_nodes, np.int64), 2, 3)
    assert data.node_N.shape == (0,)
    assert {edges.num_targets for edges in data.edges.values()} == {0}
    assert data.edges[Exchange.ALL_GATHER].num_sources == 3 * graph.num_nodes
    assert data.edges[Exchange.HALO].num_sources == 0
    assert data.layout.rows_to == data.layout.rows_from == (0, 0, 0)
    assert data.train_row_T.shape == (0,)


@given(owned_graphs(), st.data())
def test_edges_between_parts_are_dropped_where_they_are_not_wanted(case, data):
    edges, owner_N, _, order_N = case
    owner_N = np.minimum(owner_N, 0)  # one rank, or nobody
    part_N = np.array(data.draw(st.lists(st.integers(0, 2), min_size=len(owner_N), max_size=len(owner_N))))
    graph = graph_of(edges, len(owner_N))
    found = local_edges(graph, owner_N, graph_rank=0, num_ranks=1, order_N=order_N, inside_N=part_N)
    target_E = found.node_N[np.repeat(np.arange(len(found.node_N)), np.diff(found.indptr_N1))]
    pairs = sorted(zip(found.source_global_E.tolist(), target_E.tolist(), strict=True))
    assert pairs == sorted((s, t) for s, t in edges if owner_N[s] == owner_N[t] == 0 and part_N[s] == part_N[t])


# --- Parts that several ranks serve.


@given(multigraphs(), st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple), st.data())
def test_ranks_of_a_part_attend_for_all_its_rows_to_all_that_it_needs(drawn, part_ranks, data):
    edges, num_nodes = drawn
    nodes = st.integers(0, len(part_ranks) - 1)
    part_N = np.array(data.draw(st.lists(nodes, min_size=num_nodes, max_size=num_nodes)), dtype=np.int32)
    order = data.draw(st.none() | st.permutations(range(num_nodes)))
    order_N = None if order is None else np.array(order, dtype=np.int32)
    graph, owner_N, num_ranks = graph_of(edges, num_nodes), rank_of_nodes(part_N, part_ranks), sum(part_ranks)
    shares = part_shares(graph, part_N, part_ranks)
    found = [
        local_edges(graph, owner_N, graph_rank=rank, num_ranks=num_ranks, order_N=order_N, part_ranks=part_ranks)
        for rank in range(num_ranks)
    ]
    for rank, local in enumerate(found):
        part, own = shares.part_by_rank[rank], local.node_N.tolist()
        mates = [mate for mate in shares.ranks_of(part) if mate != rank]
        targets = [*own, *(node for mate in mates for node in found[mate].node_N.tolist())]
        assert own == in_order(np.flatnonzero(owner_N == rank).tolist(), order_N)
        assert set(targets) == set(np.flatnonzero(part_N == part).tolist())
        held = zip(local.source_global_E.tolist(), np.repeat(targets, np.diff(local.indptr_N1)).tolist(), strict=True)
        assert sorted(held) == sorted((source, target) for source, target in edges if part_N[target] == part)
        needed = {*targets, *(source for source, target in edges if part_N[target] == part)} - set(own)
        assert sorted(local.halo_M.tolist()) == sorted(needed)
        assert local.rows_to == tuple(shares.rows_between(rank, other) for other in range(num_ranks))
        messages = np.split(local.node_N[local.send_row_S], np.cumsum(local.rows_to)[:-1])
        for receiver, receiving in enumerate(found):
            assert messages[receiver].tolist() == receiving.halo_M[owner_N[receiving.halo_M] == rank].tolist()
            assert local.rows_to[receiver] == receiving.rows_from[rank]
