"""Graphs that attention is timed on differ in what decides its time."""

import numpy as np
import pytest
import torch

from executor.attention.graph import EdgeGraph
from executor.measure.effort import FULL_CPU, FULL_CUDA, QUICK_CPU, QUICK_CUDA, AttentionCase, Effort, GraphKind
from executor.measure.graphs import attention_graph, beyond_cache_ratio_of_edges
from executor.measure.session import attention_cases_on
from simulator.specs.program import TaskKind
from simulator.specs.units import Dtype


def graph_of(kind: GraphKind, *, edges: int = 200_000, degree: int = 10, seed: int = 0) -> EdgeGraph:
    case = AttentionCase(graph=kind, edges=edges, degree=degree, heads=2, head_size=4)
    return attention_graph(case, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", GraphKind)
@pytest.mark.parametrize(("edges", "degree"), [(200_000, 10), (5, 9), (1, 1)])
def test_a_graph_has_the_counts_of_its_case_and_sorted_sources(kind, edges, degree):
    graph = graph_of(kind, edges=edges, degree=degree)
    targets = max(edges // degree, 1)
    assert (graph.num_targets, graph.num_sources, graph.num_edges) == (targets, targets + targets // 4, edges)
    assert int(graph.indptr_N1[-1]) == edges
    assert 0 <= int(graph.source_E.min()) <= int(graph.source_E.max()) < graph.num_sources
    rows = np.split(graph.source_E.numpy(), graph.indptr_N1[1:-1].numpy())
    assert all((np.diff(row) >= 0).all() for row in rows)


@pytest.mark.parametrize("kind", GraphKind)
def test_a_seed_gives_the_same_graph_again(kind):
    first, again, other = (graph_of(kind, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.source_E, again.source_E)
    assert not torch.equal(first.source_E, other.source_E)


def test_only_skewed_graphs_have_many_edges_of_long_rows_at_a_low_degree():
    shares = {kind: np.array(graph_of(kind).num_edges_of_long_rows) / 200_000 for kind in GraphKind}
    assert (shares[GraphKind.UNIFORM] < 0.001).all()
    assert (shares[GraphKind.LOCAL] < 0.001).all()
    assert (shares[GraphKind.SKEWED] > 0.4).all()


def test_local_and_skewed_graphs_find_more_rows_in_a_cache_than_uniform_ones():
    # A cache of a fifth of the 25,000 rows: at random, four fifths of the reads miss it.
    ratios = {
        kind: beyond_cache_ratio_of_edges(graph_of(kind), row_bytes=64, cache_bytes=5000 * 64) for kind in GraphKind
    }
    assert ratios[GraphKind.UNIFORM] == pytest.approx(0.8, abs=0.02)
    assert ratios[GraphKind.SKEWED] < 0.7
    assert ratios[GraphKind.LOCAL] < 0.5


def test_rows_from_beyond_the_cache_by_hand():
    # Three targets read rows 4, 4 and 1 of five: two of three reads are first ones, whatever the cache.
    graph = EdgeGraph(
        indptr_N1=torch.tensor([0, 1, 1, 3]), source_E=torch.tensor([4, 1, 4], dtype=torch.int32), num_sources=5
    )
    assert beyond_cache_ratio_of_edges(graph, row_bytes=8, cache_bytes=80) == pytest.approx(2 / 3)
    assert beyond_cache_ratio_of_edges(graph, row_bytes=8, cache_bytes=0) == 1


@pytest.mark.parametrize("effort", [QUICK_CPU, FULL_CPU, QUICK_CUDA, FULL_CUDA])
def test_every_effort_times_all_kinds_of_graphs_sizes_and_widths(effort):
    assert {case.graph for case in effort.attention} == set(GraphKind)
    for values in (
        {case.edges for case in effort.attention},
        {case.degree for case in effort.attention},
        {case.heads * case.head_size for case in effort.attention},
    ):
        assert len(values) >= 3
    # As many as before there were kinds of graphs, or a few more.
    assert len(effort.attention) <= (18 if effort in (QUICK_CPU, QUICK_CUDA) else 60)


def test_a_case_tells_its_counts_and_its_share_of_rows_from_beyond_the_cache():
    effort = Effort(
        rows=(1,),
        widths=(8,),
        edges=(1,),
        attention=(AttentionCase(graph=GraphKind.UNIFORM, edges=4000, degree=100, heads=2, head_size=4),),
        collective_bytes=(),
        case_seconds=0.001,
        repetitions=1,
    )
    (case,) = attention_cases_on(torch.device("cpu"), effort, Dtype.FLOAT32, cache_bytes=10**6)
    assert case.kind is TaskKind.ATTENTION
    # Rows of 100 edges and of 80 are all long; each of the 50 sources is read first once.
    assert case.shape == (40, 50, 4000, 4000, 4000, 2, 4)
    assert case.beyond_cache_ratio == pytest.approx(50 / 4000)
