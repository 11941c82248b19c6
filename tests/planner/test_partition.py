import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import psutil
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import metis, partition
from planner.partition import part_specs, partition_graph
from simulator.errors import SpecError
from simulator.readers.graphs import read_graph
from simulator.readers.partitions import read_partition
from simulator.specs.graph import GraphFile
from simulator.specs.plan import PartitionMethod
from tests.small_graphs import edges_of, graph_of, multigraphs

NUM_RING_NODES = 60
MAX_SHORT_EDGES = 2


def ring():
    """A graph whose nodes have a neighbour on each side."""
    edges = [(node, (node + step) % NUM_RING_NODES) for node in range(NUM_RING_NODES) for step in (-1, 1)]
    return graph_of(edges, NUM_RING_NODES)


def read(spec, folder, graph):
    return read_partition(spec, folder=folder, num_nodes=graph.num_nodes)


def assert_counts_are_exact(parts, graph, part_N):
    """Compare the numbers of parts with sets made edge by edge."""
    edges, owner = edges_of(graph), part_N.tolist()
    pairs = Counter((owner[target], owner[source]) for source, target in edges)
    halo = {(owner[target], source) for source, target in edges if owner[target] != owner[source]}
    halo_pairs = Counter((part, owner[source]) for part, source in halo)
    for index, part in enumerate(parts):
        assert part.num_nodes == owner.count(index)
        assert part.edges_from == tuple(pairs[index, other] for other in range(len(parts)))
        assert part.halo_rows_from == tuple(halo_pairs[index, other] for other in range(len(parts)))
    into = Counter(target for _, target in edges)
    inner = Counter(target for source, target in edges if owner[source] == owner[target])
    out_of = Counter((owner[target], source) for source, target in edges)
    of_long_targets = Counter((owner[t], owner[s]) for s, t in edges if into[t] > MAX_SHORT_EDGES)
    of_long_sources = Counter((owner[t], owner[s]) for s, t in edges if out_of[owner[t], s] > MAX_SHORT_EDGES)
    for index, part in enumerate(parts):
        others = range(len(parts))
        assert part.edges_of_long_targets_from == tuple(of_long_targets[index, other] for other in others)
        assert part.edges_of_long_sources_from == tuple(of_long_sources[index, other] for other in others)
        assert part.inner_edges_of_long_targets == sum(
            count for node, count in inner.items() if owner[node] == index and count > MAX_SHORT_EDGES
        )
    outer = Counter(target for source, target in edges if owner[source] != owner[target])
    outer_pairs = {(target, owner[source]) for source, target in edges if owner[source] != owner[target]}
    boundary = Counter((owner[target], other) for target, other in outer_pairs)
    leaving = Counter(source for source, _ in edges)
    for index, part in enumerate(parts):
        assert part.outer_edges_of_long_targets == sum(
            count for node, count in outer.items() if owner[node] == index and count > MAX_SHORT_EDGES
        )
        assert part.edges_out_of_long_sources == sum(
            count for node, count in leaving.items() if owner[node] == index and count > MAX_SHORT_EDGES
        )
        assert part.num_boundary_nodes == sum(owner[node] == index for node in outer)
        assert part.boundary_nodes_from == tuple(boundary[index, other] for other in range(len(parts)))
    assert sum(part.num_edges for part in parts) == len(edges)
    assert sum(part.num_nodes for part in parts) == graph.num_nodes


@settings(max_examples=20)
@given(multigraphs(min_nodes=6, max_nodes=30, min_edges=12, max_edges=90), st.integers(2, 5))
def test_each_node_is_owned_once_and_counts_equal_brute_force(multigraph, num_parts):
    graph = graph_of(*multigraph)
    with tempfile.TemporaryDirectory() as name:
        spec = partition_graph(graph, num_parts, seed=3, folder=Path(name))
        part_N = read(spec, Path(name), graph)
    assert part_N.shape == (graph.num_nodes,)
    assert part_N.dtype == np.int32
    assert 0 <= part_N.min() <= part_N.max() < num_parts == spec.num_parts
    assert_counts_are_exact(spec.parts, graph, part_N)


@pytest.fixture(autouse=True, scope="module")
def few_edges_are_many():
    """Let rows of three edges be long, as small graphs have them."""
    with patch.object(partition, "MAX_SHORT_EDGES", MAX_SHORT_EDGES):
        yield


@given(multigraphs(), st.integers(1, 6), st.randoms(use_true_random=False))
def test_any_cut_is_counted_exactly(multigraph, num_parts, random):
    graph = graph_of(*multigraph)
    part_N = np.array([random.randrange(num_parts) for _ in range(graph.num_nodes)], dtype=np.int32)
    assert_counts_are_exact(part_specs(graph, part_N, num_parts), graph, part_N)


def test_entries_of_sparse_features_and_train_nodes_are_counted_by_part():
    features = scipy.sparse.csr_array(np.array([[1, 1, 1], [0, 0, 0], [1, 0, 1], [0, 1, 0]], dtype=np.float32))
    train_mask_N = np.array([True, True, False, True])
    graph = graph_of([], 4, features=features, labels_N=np.zeros(4, np.int64), train_mask_N=train_mask_N)
    parts = part_specs(graph, np.array([0, 2, 2, 0], dtype=np.int32), 3)
    assert [part.num_feature_entries for part in parts] == [3 + 1, 0, 0 + 2]
    assert [part.num_train_nodes for part in parts] == [2, 0, 1]


def test_metis_cuts_a_ring_into_runs_of_neighbours(tmp_path):
    spec = partition_graph(ring(), 4, seed=0, folder=tmp_path)
    assert spec.method is PartitionMethod.METIS
    assert spec.edge_imbalance < 1.15
    # The best cut has four runs and so eight cut edges, one of each direction at each border.
    assert 8 <= spec.num_cut_edges <= 16


def test_a_real_graph_is_cut_with_equal_edges_and_far_fewer_cut_than_by_stripes(shared_data, tmp_path, monkeypatch):
    _, graph = read_graph(GraphFile(path="coauthor-physics.npz"), base=shared_data)
    spec = partition_graph(graph, 4, seed=0, folder=tmp_path)
    assert spec.method is PartitionMethod.METIS
    assert spec.edge_imbalance < 1.15
    assert sum(part.num_edges for part in spec.parts) == 495_924 + 34_493
    assert sum(part.num_train_nodes for part in spec.parts) == 20_696
    monkeypatch.setattr(partition, "metis_parts", lambda *args, **kwargs: "not asked")
    stripes = partition_graph(graph, 4, seed=1, folder=tmp_path)
    assert stripes.edge_imbalance < 1.01
    assert spec.num_cut_edges < stripes.num_cut_edges / 3


def test_a_real_directed_graph_is_cut_with_equal_incoming_edges(shared_data, tmp_path):
    _, graph = read_graph(GraphFile(path="debian-depends.npz"), base=shared_data)
    spec = partition_graph(graph, 4, seed=0, folder=tmp_path)
    assert spec.method is PartitionMethod.METIS
    assert spec.edge_imbalance < 1.15
    assert_halo_is_within_owned(spec)


def assert_halo_is_within_owned(spec):
    """No part can need more rows of another than that one owns, nor more than there are edges between them."""
    for part in spec.parts:
        for owner, rows, edges in zip(spec.parts, part.halo_rows_from, part.edges_from, strict=True):
            assert rows <= min(owner.num_nodes, edges)


def test_isolated_nodes_level_owned_and_halo_rows(tmp_path):
    # A clique of 8 weighs as much as a long path; 60 further nodes have self loops only.
    clique = [(one, other) for one in range(8) for other in range(8) if one != other]
    path = [(node + step, node + 1 - step) for node in range(8, 40) for step in (0, 1)]
    loops = [(node, node) for node in range(41, 101)]
    graph = graph_of(clique + path + loops, 101)
    spec = partition_graph(graph, 2, seed=0, folder=tmp_path)
    assert spec.method is PartitionMethod.METIS
    rows = [part.num_nodes + part.num_halo_rows for part in spec.parts]
    assert abs(rows[0] - rows[1]) <= 1


@given(st.lists(st.integers(0, 20), min_size=1, max_size=6), st.integers(0, 40))
def test_levelling_equals_adding_one_by_one_to_the_smallest(rows, count):
    added = partition._levelling(np.array(rows), count)
    slow = list(rows)
    for _ in range(count):
        slow[slow.index(min(slow))] += 1
    assert sorted(np.array(rows) + added) == sorted(slow)
    assert (added >= 0).all()


def test_the_same_seed_gives_the_same_parts(tmp_path):
    specs = [partition_graph(ring(), 3, seed=7, folder=tmp_path / name) for name in ("one", "two")]
    assert specs[0] == specs[1]


def test_one_part_needs_no_file(tmp_path):
    graph = ring()
    spec = partition_graph(graph, 1, seed=0, folder=tmp_path / "plan")
    assert (spec.method, spec.path) == (PartitionMethod.SINGLE, "")
    assert not (tmp_path / "plan").exists()
    assert read(spec, tmp_path, graph).tolist() == [0] * NUM_RING_NODES
    with pytest.raises(SpecError, match="one part of 59 nodes: sha256 must be"):
        read_partition(spec, folder=tmp_path, num_nodes=59)


@pytest.mark.parametrize(
    ("edges", "num_nodes", "num_parts"),
    [
        ([], 1, 2),
        ([], 5, 3),
        ([(0, 0)], 1, 8),
        ([(0, 1)], 2, 8),
        ([(0, 1), (1, 2)], 9, 2),
        ([(0, node) for node in range(1, 10)], 10, 8),
        ([(node, 0) for node in range(1, 10)] * 3, 12, 9),
    ],
)
def test_odd_graphs_and_more_parts_than_nodes_are_legal(tmp_path, caplog, edges, num_nodes, num_parts):
    graph = graph_of(edges, num_nodes)
    spec = partition_graph(graph, num_parts, seed=0, folder=tmp_path)
    assert_counts_are_exact(spec.parts, graph, read(spec, tmp_path, graph))
    assert caplog.records == []


def test_nodes_without_edges_are_spread_evenly(tmp_path):
    spec = partition_graph(graph_of([], 10), 4, seed=0, folder=tmp_path)
    assert sorted(part.num_nodes for part in spec.parts) == [2, 2, 3, 3]


def test_metis_is_not_asked_twice_for_the_same_edges(tmp_path, monkeypatch):
    spec = partition_graph(ring(), 3, seed=0, folder=tmp_path)
    monkeypatch.setattr(partition, "metis_parts", None)
    assert partition_graph(ring(), 3, seed=0, folder=tmp_path) == spec


def test_a_damaged_file_is_not_used_again(tmp_path):
    spec = partition_graph(ring(), 3, seed=0, folder=tmp_path)
    (tmp_path / spec.path).write_bytes(b"half")
    assert partition_graph(ring(), 3, seed=0, folder=tmp_path) == spec
    assert read(spec, tmp_path, ring()).shape == (NUM_RING_NODES,)


def test_cuts_of_two_graphs_share_a_folder(tmp_path):
    graphs = [ring(), graph_of(edges_of(ring())[1:], NUM_RING_NODES)]
    specs = [partition_graph(graph, 3, seed=0, folder=tmp_path) for graph in graphs]
    for spec, graph in zip(specs, graphs, strict=True):
        assert_counts_are_exact(spec.parts, graph, read(spec, tmp_path, graph))


WRITE_NONSENSE = "import sys, numpy; numpy.save(sys.argv[1] + '/part.npy', numpy.full(60, 9))"
FAILURES = {
    "crash": (["-c", "import os; os.abort()"], "it was ended by signal 6 (Aborted)"),
    "error": (["-c", "raise MemoryError('too large')"], "it failed with status 1: MemoryError: too large"),
    "silence": (["-c", "pass"], "it left no parts"),
    "nonsense": (["-c", WRITE_NONSENSE], "its parts are not 60 numbers below 3"),
}


def assert_stripes(tmp_path, caplog, reason):
    """A cut falls back to stripes, with a warning that says why."""
    with caplog.at_level(logging.WARNING):
        spec = partition_graph(ring(), 3, seed=0, folder=tmp_path)
    assert spec.method is PartitionMethod.STRIPES
    assert read(spec, tmp_path, ring()).tolist() == [0] * 20 + [1] * 20 + [2] * 20
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert f"METIS could not cut the graph into 3 parts: {reason}" in record.getMessage()
    assert [path.name for path in tmp_path.iterdir()] == [spec.path]
    return spec


@pytest.mark.parametrize("failure", FAILURES)
def test_a_child_that_fails_leaves_stripes(tmp_path, caplog, monkeypatch, failure):
    arguments, reason = FAILURES[failure]
    monkeypatch.setattr(metis, "child_command", lambda work, *rest: [sys.executable, *arguments, str(work)])
    assert_stripes(tmp_path, caplog, reason)


def test_a_child_that_stalls_is_stopped(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(metis, "child_command", lambda *args: [sys.executable, "-c", "import time; time.sleep(60)"])
    monkeypatch.setattr(metis, "time_limit_seconds", lambda num_edges: 0.2)
    assert_stripes(tmp_path, caplog, "it was stopped after 0.2 s")


def test_a_child_that_cannot_start_leaves_stripes(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(metis, "child_command", lambda *args: [str(tmp_path / "none")])
    assert_stripes(tmp_path, caplog, "it could not be started")


def test_metis_is_not_started_without_the_memory_that_it_needs(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100))
    assert_stripes(tmp_path, caplog, "it needs about 0.0 GB of memory and 0.0 GB are free")


def test_after_a_failure_metis_is_tried_again_and_the_older_plan_stays_readable(tmp_path, caplog, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(metis, "child_command", lambda *args: [sys.executable, "-c", "raise SystemExit(1)"])
        older = assert_stripes(tmp_path, caplog, "it failed with status 1: it said nothing")
    newer = partition_graph(ring(), 3, seed=0, folder=tmp_path)
    assert newer.method is PartitionMethod.METIS
    assert read(older, tmp_path, ring()).tolist() == [0] * 20 + [1] * 20 + [2] * 20


def test_the_time_limit_grows_with_the_edges():
    assert metis.time_limit_seconds(0) == 60
    # Twenty times 24 s per 19.1 million entries.
    assert metis.time_limit_seconds(19_100_000) == pytest.approx(60 + 480)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 8))
def test_stripes_are_runs_whose_weights_differ_by_less_than_two_nodes(weights, num_parts):
    part_N = partition._stripes(np.array(weights), num_parts)
    assert (np.diff(part_N) >= 0).all()
    assert 0 <= part_N[0] <= part_N[-1] < num_parts
    sums = np.bincount(part_N, weights=weights, minlength=num_parts)
    # A node lies where its middle does, so a stripe exceeds or misses its share by half a node at each end.
    assert np.abs(sums - sum(weights) / num_parts).max() <= max(weights)


def bad_file(tmp_path, array):
    """A cut of the ring whose file was replaced."""
    spec = partition_graph(ring(), 3, seed=0, folder=tmp_path)
    np.save(tmp_path / spec.path, array)
    return spec


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros(59, np.int32), r"part_N must be int32 of shape \[60\], got int32 of shape \[59\]; plan again"),
        (np.zeros(60, np.int64), r"part_N must be int32 of shape \[60\], got int64"),
        (np.full(60, 3, np.int32), "part_N must be within 0 and 2, got 3 to 3"),
        (np.full(60, -1, np.int32), "part_N must be within 0 and 2, got -1 to -1"),
        (np.zeros(60, np.int32), "sha256 must be [0-9a-f]{64} as in the plan, got [0-9a-f]{64}; plan again"),
    ],
)
def test_another_array_in_place_of_the_plans_is_refused(tmp_path, array, message):
    spec = bad_file(tmp_path, array)
    with pytest.raises(SpecError, match=f"{spec.path}: {message}"):
        read(spec, tmp_path, ring())


def test_a_missing_partition_file_is_named(tmp_path):
    spec = partition_graph(ring(), 3, seed=0, folder=tmp_path)
    with pytest.raises(SpecError, match=f"elsewhere/{spec.path} must be whole in an .npy file"):
        read(spec, tmp_path / "elsewhere", ring())


@pytest.mark.parametrize(
    ("num_parts", "seed", "message"),
    [(0, 0, "num_parts must be"), (2, -1, "seed must be"), (2, 2**31, "seed must be <= 2147483647, got 2147483648")],
)
def test_numbers_out_of_range_are_refused(tmp_path, num_parts, seed, message):
    with pytest.raises(SpecError, match=message):
        partition_graph(ring(), num_parts, seed=seed, folder=tmp_path)
