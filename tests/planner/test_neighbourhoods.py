"""Expected counts of sampled batches: by hand where nothing is left to chance, else against samples that were drawn."""

from dataclasses import astuple
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
from numpy.typing import NDArray

from executor.sampling.neighbourhood import NeighbourhoodSampler
from planner.neighbourhoods import expected_batches
from simulator.readers.generators import materialise
from simulator.readers.graphs import Graph, read_graph
from simulator.specs.graph import CommunityGraph, RmatGraph
from simulator.specs.plan import SampledLayer
from tests.small_graphs import graph_of

# Of rows and edges: of their mean over other batches, and of a single batch, which a few hubs decide. Edges of long
# rows are so few in some layers that their errors are told as parts of all edges.
MEAN_ERROR, SINGLE_ERROR = 0.02, 0.15
LONG_MEAN_ERROR, LONG_SINGLE_ERROR = 0.02, 0.2


def test_counts_where_nothing_is_left_to_chance_by_hand():
    # A star: five leaves attend to the hub alone, and the hub to all of them. All nodes are seeds of one batch.
    edges = [edge for leaf in range(1, 6) for edge in ((0, leaf), (leaf, 0))]
    graph = graph_of(edges, 6, labels_N=np.zeros(6, dtype=np.int64), train_mask_N=np.ones(6, dtype=np.bool_))
    found = expected_batches(graph, (9, 2), seeds_per_batch=6, data_parallel_degree=1)
    everything = {"num_sources": 6, "num_targets": 6, "num_edges_of_long_targets": 0, "num_edges_of_long_sources": 0}
    assert found.layers == (SampledLayer(num_edges=10, **everything), SampledLayer(num_edges=7, **everything))
    # The hub alone: its leaves join it, then nobody new.
    alone = graph_of(edges, 6, labels_N=np.zeros(6, dtype=np.int64), train_mask_N=np.arange(6) == 0)
    first, last = expected_batches(alone, (9, 9), seeds_per_batch=1, data_parallel_degree=1).layers
    assert (last.num_targets, last.num_edges, last.num_sources) == (1, 5, 6)
    assert (first.num_targets, first.num_edges, first.num_sources) == (6, 10, 6)


def test_batches_of_an_epoch_have_equal_numbers_of_seeds():
    graph = graph_of([(0, 1)], 100, labels_N=np.zeros(100, np.int64), train_mask_N=np.arange(100) < 90)
    # 90 seeds in three steps of two replicas.
    (layer,) = expected_batches(graph, (1,), seeds_per_batch=20, data_parallel_degree=2).layers
    assert layer.num_targets == 15
    # None to train on.
    none = graph_of([(0, 1)], 3, labels_N=np.zeros(3, np.int64))
    (layer,) = expected_batches(none, (1,), seeds_per_batch=20, data_parallel_degree=2).layers
    assert astuple(layer) == (0, 0, 0, 0, 0)


GRAPHS: dict[str, tuple[CommunityGraph | RmatGraph, tuple[int, ...], int]] = {
    "communities": (CommunityGraph(num_nodes=20_000, num_edges=150_000), (10, 5), 400),
    "skewed": (RmatGraph(num_nodes=20_000, num_edges=200_000), (5, 10, 15), 200),
    "skewed, long rows": (RmatGraph(num_nodes=20_000, num_edges=400_000), (50, 40), 500),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_expected_counts_are_near_those_of_batches_that_the_executor_draws(name, tmp_path: Path):
    source, fan_outs, seeds_per_batch = GRAPHS[name]
    _, graph = read_graph(materialise(source, tmp_path), base=tmp_path)
    batches = expected_batches(graph, fan_outs, seeds_per_batch=seeds_per_batch, data_parallel_degree=1)
    expected = np.array([astuple(layer) for layer in batches.layers])
    drawn = drawn_counts(graph, fan_outs, batches.layers[-1].num_targets)
    counts, of_long_rows = expected[:, :3], expected[:, 3:]
    edges = expected[:, 2:3]
    assert np.all(np.abs(drawn.mean(0)[:, :3] - counts) <= MEAN_ERROR * counts)
    assert np.all(np.abs(drawn[:, :, :3] - counts) <= SINGLE_ERROR * counts)
    assert np.all(np.abs(drawn.mean(0)[:, 3:] - of_long_rows) <= LONG_MEAN_ERROR * edges)
    assert np.all(np.abs(drawn[:, :, 3:] - of_long_rows) <= LONG_SINGLE_ERROR * edges)


def drawn_counts(graph: Graph, fan_outs: tuple[int, ...], num_seeds: int) -> NDArray[np.int64]:
    """Return each layer's counts in drawn batches, [batches, layers, counts]."""
    sampler = NeighbourhoodSampler(graph, fan_outs, seed=0)
    generator, nodes = np.random.default_rng(7), np.flatnonzero(graph.train_mask_N)
    counts = []
    for step in range(12):
        sample = sampler.sample(generator.choice(nodes, num_seeds, replace=False), step)
        counts.append([astuple(layer.counts()) for layer in sample.layers])
    return np.array(counts)


def test_expected_feature_entries_are_those_of_the_rows():
    # Two nodes with 3 and 1 entries, both in every batch.
    features = scipy.sparse.csr_array(np.array([[1.0, 2.0, 3.0], [0.0, 4.0, 0.0]], dtype=np.float32))
    graph = graph_of(
        [(0, 1), (1, 0)], 2, features=features, labels_N=np.zeros(2, np.int64), train_mask_N=np.ones(2, np.bool_)
    )
    assert expected_batches(graph, (1,), seeds_per_batch=2, data_parallel_degree=1).num_feature_entries == 4
