"""The edges of a batch as exchanges number their rows, against the edges themselves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.attention.graph import EdgeGraph
from executor.data import RankData, build_rank_data
from executor.topology import by_message
from simulator.specs.plan import Exchange
from simulator.workload import rank_work
from tests.executor.made_graphs import awkward_graph, plan_of, uneven_parts

NUM_RANKS = 3
GRAPH = awkward_graph()
PART_N = uneven_parts(GRAPH, NUM_RANKS)
EDGES = sorted(zip(GRAPH.source_E.tolist(), GRAPH.target_E.tolist(), strict=True))


def data_of(rank, exchange, *, overlaps=False, each=None, head_each=None):
    return build_rank_data(
        GRAPH,
        None,
        PART_N,
        graph_rank=rank,
        num_ranks=NUM_RANKS,
        exchanges=frozenset({exchange}),
        degree_buckets=True,
        group=None,
        num_train_rows_of_step=1,
        dtype=torch.float32,
        device=torch.device("cpu"),
        overlaps=overlaps,
        rows_per_message=each,
        head_rows_per_message=head_each,
    )


def pairs(graph: EdgeGraph, sources: Sequence[Any], targets: Sequence[int]) -> list[tuple[Any, int]]:
    """Return the edges of a graph by the nodes that its rows hold."""
    return [(sources[s], targets[t]) for s, t in zip(graph.source_E.tolist(), graph.target_E.tolist(), strict=True)]


def gathered(all_data: Sequence[RankData], each: int | None) -> list[Any]:
    """Return the node of each row that an all-gather brings: by message, then by rank."""
    rows = [data.node_N.tolist() for data in all_data]
    most = max(map(len, rows))
    padded = [[*nodes, *[None] * (most - len(nodes))] for nodes in rows]
    each = each or most
    return [node for first in range(0, most, each) for nodes in padded for node in nodes[first : first + each]]


@pytest.mark.parametrize("each", [None, 1, 7])
@pytest.mark.parametrize("exchange", [Exchange.HALO, Exchange.ALL_GATHER])
def test_both_parts_hold_every_edge_once_and_the_last_rows_alone_have_outer_ones(exchange, each):
    all_data = [data_of(rank, exchange, overlaps=True, each=each) for rank in range(NUM_RANKS)]
    found = []
    for rank, data in enumerate(all_data):
        halves, own = data.halves[exchange], data.node_N.tolist()
        if exchange is Exchange.HALO:
            # What rank r sends in its message m to this rank, rank by rank.
            sent = [
                np.split(
                    other.node_N.numpy()[other.layout.send_row_S.numpy()],
                    np.cumsum(
                        [
                            n
                            for m in range(other.layout.num_messages(exchange))
                            for n in other.layout.in_message(other.layout.rows_to, m)
                        ]
                    )[:-1],
                )
                for other in all_data
            ]
            remote = [
                int(node)
                for message in range(data.layout.num_messages(exchange))
                for other in range(NUM_RANKS)
                for node in sent[other][message * NUM_RANKS + rank]
            ]
        else:
            remote = gathered(all_data, each)
        inner = pairs(halves.inner, own, own)
        outer = pairs(halves.outer, remote, own[len(own) - halves.outer.num_targets :])
        assert all(PART_N[source] == rank for source, _ in inner)
        assert all(PART_N[source] != rank for source, _ in outer)
        with_outer = {target for _, target in outer}
        assert with_outer == set(own[len(own) - halves.outer.num_targets :])
        buckets = [(halves.inner_bucket_E, inner), (halves.outer_bucket_E, outer)]
        for bucket_E, edges in buckets:
            degrees = np.maximum(np.diff(GRAPH.indptr_N)[[source for source, _ in edges]], 1)
            assert bucket_E.tolist() == [int(degree).bit_length() - 1 for degree in degrees]
        found += inner + outer
    assert sorted(found) == EDGES


@pytest.mark.parametrize("each", [None, 1, 7])
def test_every_rank_has_the_edges_of_all_in_an_exchange_of_heads(each):
    all_data = [data_of(rank, Exchange.HEAD_ALL_TO_ALL, head_each=each) for rank in range(NUM_RANKS)]
    rows = [data.node_N.tolist() for data in all_data]
    most = each or max(map(len, rows))
    held = [node for first in range(0, len(rows[0]), most) for nodes in rows for node in nodes[first : first + most]]
    for data in all_data:
        graph = data.edges[Exchange.HEAD_ALL_TO_ALL]
        assert sorted(pairs(graph, held, held)) == EDGES
        assert data.group_degree_bucket_E.numel() == len(EDGES)


def test_the_simulator_counts_the_edges_of_both_parts_and_of_the_group():
    plan = plan_of(GRAPH, PART_N, NUM_RANKS, graph_parallel_degree=NUM_RANKS)
    for rank, work in enumerate(rank_work(plan, step=0, seed=0)):
        halves = data_of(rank, Exchange.HALO, overlaps=True).halves[Exchange.HALO]
        group = data_of(rank, Exchange.HEAD_ALL_TO_ALL).edges[Exchange.HEAD_ALL_TO_ALL]
        for counts, graph in (
            (work.group.inner_edges, halves.inner),
            (work.group.outer_edges, halves.outer),
            (work.group.group_edges, group),
        ):
            assert counts.num_edges == graph.num_edges
            assert (counts.num_of_long_targets, counts.num_of_long_sources) == graph.num_edges_of_long_rows
        assert work.group.num_boundary_rows == halves.outer.num_targets
        assert work.group.num_group_rows == group.num_targets


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.none() | st.integers(1, 5))
def test_rows_are_sorted_by_message_then_by_rank(counts, each):
    rows = [(rank, place) for rank, count in enumerate(counts) for place in range(count)]
    expected = sorted(rows, key=lambda row: (row[1] // (each or 10), row[0], row[1]))
    assert [rows[index] for index in by_message(counts, each)] == expected
