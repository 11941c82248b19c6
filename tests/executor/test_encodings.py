"""Positional encodings: what they are, that every rank gets the same ones, and that they are kept."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from executor import pyg
from executor.encodings import cache_folder, positional_encodings
from simulator.errors import SpecError
from simulator.readers.graphs import Graph
from simulator.specs.model import ModelSpec
from tests.executor.made_graphs import awkward_graph, spec_of
from tests.small_graphs import Edges, graph_of


def model_with(*, laplacian: int = 0, walks: int = 0) -> ModelSpec:
    return ModelSpec(
        width=8,
        num_heads=1,
        num_layers=1,
        feed_forward_width=8,
        laplacian_encodings=laplacian,
        random_walk_encodings=walks,
    )


def encoded(graph: Graph, folder, *, laplacian: int = 0, walks: int = 0) -> np.ndarray:
    found = positional_encodings(graph, spec_of(graph), model_with(laplacian=laplacian, walks=walks), folder)
    assert found is not None
    return found


def both_ways(edges: Edges) -> Edges:
    return [*edges, *((target, source) for source, target in edges)]


def random_edges(num_nodes: int, num_edges: int) -> Edges:
    drawn = np.random.default_rng(5).integers(0, num_nodes, (num_edges, 2))
    return [(int(source), int(target)) for source, target in drawn if source != target]


def ring(num_nodes: int) -> Graph:
    return graph_of(both_ways([(node, (node + 1) % num_nodes) for node in range(num_nodes)]), num_nodes)


GRAPHS = {
    "small": graph_of(both_ways(random_edges(40, 90)), 40),
    "large": graph_of(both_ways(random_edges(150, 500)), 150),  # by ARPACK, as all of 100 nodes or more
    "directed": graph_of(random_edges(150, 500), 150),
    "ring": ring(150),
    "pairs": graph_of(both_ways([(node, node + 1) for node in range(0, 150, 2)]), 150),
    "no edges": graph_of([], 150),
    "star": graph_of(both_ways([(0, node) for node in range(1, 150)]), 150),
    "awkward": awkward_graph(),
}


@pytest.mark.parametrize("graph", GRAPHS.values(), ids=GRAPHS)
def test_every_rank_gets_the_same_numbers_whatever_it_drew_before(graph, tmp_path):
    torch.manual_seed(1)
    first = encoded(graph, tmp_path / "one rank", laplacian=4, walks=3)
    torch.manual_seed(2)
    np.random.seed(3)
    state = torch.get_rng_state()
    second = encoded(graph, tmp_path / "another", laplacian=4, walks=3)
    assert np.array_equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)
    assert first.shape == (graph.num_nodes, 7)
    assert first.dtype == np.float32
    assert np.isfinite(first).all()


@pytest.mark.parametrize("name", ["small", "large"])
def test_laplacian_encodings_are_the_smoothest_eigenvectors_of_unit_deviation(name, tmp_path):
    graph = GRAPHS[name]
    adjacency = np.zeros((graph.num_nodes, graph.num_nodes))
    adjacency[graph.source_E, graph.target_E] = 1
    root_degree = np.sqrt(np.maximum(adjacency.sum(1), 1))
    laplacian = np.diag((adjacency.sum(1) > 0) * 1.0) - adjacency / np.outer(root_degree, root_degree)
    vectors = encoded(graph, tmp_path, laplacian=3).astype(np.float64)
    assert vectors.std(0) == pytest.approx(np.ones(3), rel=1e-4)
    values = [vector @ laplacian @ vector / (vector @ vector) for vector in vectors.T]
    for value, vector in zip(values, vectors.T, strict=True):
        assert laplacian @ vector == pytest.approx(value * vector, abs=1e-3 * np.abs(vector).max())
    assert values == pytest.approx(np.linalg.eigvalsh(laplacian)[1:4], abs=1e-4)


@pytest.mark.parametrize("graph", [GRAPHS["small"], GRAPHS["directed"], awkward_graph()])
def test_random_walk_encodings_are_the_chances_to_be_back(graph, tmp_path):
    chances = np.zeros((graph.num_nodes, graph.num_nodes))
    chances[graph.source_E, graph.target_E] = 1  # an edge that is there twice counts once
    chances /= np.maximum(chances.sum(1, keepdims=True), 1)
    found = encoded(graph, tmp_path, walks=4)
    power = np.eye(graph.num_nodes)
    for step in range(4):
        power = power @ chances
        assert found[:, step] == pytest.approx(np.diag(power), abs=1e-6)


@pytest.mark.parametrize("num_nodes", [11, 2001])  # PyG multiplies dense matrices up to 2,000 nodes
def test_a_walk_on_a_ring_is_back_by_hand_whatever_its_length(num_nodes, tmp_path):
    # Back after two steps in one of two ways, after four in six of sixteen; an edge that is there twice counts once.
    edges = both_ways([(node, (node + 1) % num_nodes) for node in range(num_nodes)])
    graph = graph_of([*edges, edges[0], edges[3]], num_nodes)
    found = encoded(graph, tmp_path, walks=4)
    assert found == pytest.approx(np.tile([0, 1 / 2, 0, 6 / 16], (num_nodes, 1)), abs=1e-6)


def test_laplacian_encodings_come_before_random_walks(tmp_path):
    graph = GRAPHS["small"]
    both = encoded(graph, tmp_path, laplacian=2, walks=3)
    assert np.array_equal(both[:, :2], encoded(graph, tmp_path, laplacian=2))
    assert np.array_equal(both[:, 2:], encoded(graph, tmp_path, walks=3))


def test_a_model_without_encodings_has_none(tmp_path):
    graph = awkward_graph()
    assert positional_encodings(graph, spec_of(graph), model_with(), tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_encodings_are_computed_once_for_each_graph_preparation_and_kind(tmp_path, monkeypatch):
    computed = []

    def count(graph: Graph, model: ModelSpec) -> np.ndarray:
        computed.append(model)
        return np.zeros((graph.num_nodes, model.num_encodings), np.float32)

    monkeypatch.setattr(pyg, "encode", count)
    graph = awkward_graph()
    spec = spec_of(graph)
    others = [
        (spec, model_with(walks=3)),
        (spec, model_with(laplacian=3)),
        (replace(spec, sha256="another"), model_with(walks=2)),
        (replace(spec, source=replace(spec.source, symmetrise=True)), model_with(walks=2)),
    ]
    for seen_spec, model in [(spec, model_with(walks=2)), *others]:
        first = positional_encodings(graph, seen_spec, model, tmp_path)
        again = positional_encodings(graph, seen_spec, replace(model, width=16), tmp_path)
        assert first is not None
        assert again is not None
        assert np.array_equal(first, again)
    assert len(computed) == 1 + len(others)
    assert not list(tmp_path.rglob("*.tmp"))


def test_more_eigenvectors_than_the_graph_has_are_refused(tmp_path):
    graph = graph_of(both_ways([(0, 1), (1, 2), (2, 3)]), 4)
    with pytest.raises(SpecError, match=r"model.laplacian_encodings must be below num_nodes - 1 = 3, got 3"):
        encoded(graph, tmp_path, laplacian=3)
    assert encoded(graph, tmp_path, laplacian=2).shape == (4, 2)


def test_random_walks_work_on_a_single_node(tmp_path):
    assert encoded(graph_of([(0, 0)], 1), tmp_path, walks=2).tolist() == [[1.0, 1.0]]


def test_the_cache_is_where_the_environment_says(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHPILOT_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
