import dataclasses

import numpy as np
import pytest

from simulator.errors import SpecError
from simulator.readers import generators
from simulator.readers.generators import materialise
from simulator.readers.graphs import read_graph, write_store
from simulator.specs.graph import CommunityGraph, RmatGraph

RMAT = RmatGraph(num_nodes=3000, num_edges=20_000, num_features=16, num_classes=4, add_self_loops=False)
COMMUNITY = CommunityGraph(num_nodes=3000, num_edges=20_000, num_classes=6, num_features=12, add_self_loops=False)
BOTH = pytest.mark.parametrize("source", [RMAT, COMMUNITY], ids=["rmat", "community"])


def make(source, folder):
    return read_graph(materialise(source, folder), base=folder)


@BOTH
def test_edges_go_both_ways_once_and_never_to_their_own_node(tmp_path, source):
    _, graph = make(source, tmp_path)
    edges = set(zip(graph.source_E.tolist(), graph.target_E.tolist(), strict=True))
    assert len(edges) == graph.num_edges
    assert edges == {(target, source) for source, target in edges}
    assert all(source != target for source, target in edges)
    # Some of those drawn are repeats.
    assert source.num_edges < graph.num_edges < 2 * source.num_edges


@BOTH
def test_the_same_fields_give_the_same_bytes_and_another_seed_others(tmp_path, source):
    hashes = [make(source, tmp_path / name)[0].sha256 for name in ("one", "two")]
    other, _ = make(dataclasses.replace(source, seed=1), tmp_path / "one")
    assert hashes[0] == hashes[1] != other.sha256


@BOTH
def test_a_store_is_made_once_and_shared_by_graphs_with_and_without_self_loops(tmp_path, source, monkeypatch):
    first = materialise(source, tmp_path)
    monkeypatch.setattr(generators, "write_store", None)
    second = materialise(dataclasses.replace(source, add_self_loops=True), tmp_path)
    assert (first.path, first.add_self_loops, second.add_self_loops) == (second.path, False, True)
    with pytest.raises(TypeError):
        materialise(dataclasses.replace(source, num_edges=1), tmp_path)


def test_a_store_that_another_process_wrote_meanwhile_is_used(tmp_path, monkeypatch):
    def write_twice(graph, folder):
        write_store(graph, folder)
        write_store(graph, folder)

    monkeypatch.setattr(generators, "write_store", write_twice)
    spec, _ = make(RMAT, tmp_path)
    assert spec.num_nodes == 3000
    assert len(list(tmp_path.iterdir())) == 1


@BOTH
def test_every_node_is_in_one_mask_at_60_20_20(tmp_path, source):
    spec, graph = make(source, tmp_path)
    assert (spec.num_train_nodes, spec.num_val_nodes, spec.num_test_nodes) == (1800, 600, 600)
    assert (graph.train_mask_N.astype(int) + graph.val_mask_N + graph.test_mask_N == 1).all()


@BOTH
def test_edges_drawn_in_chunks_keep_the_distribution(tmp_path, source, monkeypatch):
    whole, _ = make(source, tmp_path / "whole")
    monkeypatch.setattr(generators, "_CHUNK_EDGES", 999)
    pieces, _ = make(source, tmp_path / "pieces")
    assert pieces.num_edges == pytest.approx(whole.num_edges, rel=0.05)
    assert pieces.in_degree_quantiles[1:5] == pytest.approx(whole.in_degree_quantiles[1:5], rel=0.2, abs=1)


@BOTH
def test_graphs_of_one_node_and_without_edges_are_legal(tmp_path, source):
    assert make(dataclasses.replace(source, num_nodes=1), tmp_path)[0].num_edges == 0
    empty = make(dataclasses.replace(source, num_edges=0), tmp_path)[0]
    assert (empty.num_nodes, empty.num_edges) == (3000, 0)


@BOTH
def test_too_many_nodes_for_an_index_are_refused_before_any_work(tmp_path, source):
    with pytest.raises(SpecError, match="num_nodes must not exceed 2147483647, got 2147483648"):
        materialise(dataclasses.replace(source, num_nodes=2**31), tmp_path)


# Half of the draws fall into each of two quadrants side by side, so that one end of every edge is the same node.
@pytest.mark.parametrize(("a", "b", "c"), [(0.5, 0.5, 0), (0.5, 0, 0.5)])
def test_rmat_quadrants_side_by_side_make_a_star(tmp_path, a, b, c):
    spec, _ = make(dataclasses.replace(RMAT, num_nodes=64, num_edges=2000, a=a, b=b, c=c), tmp_path)
    # The other end is uniform, so all of the other 63 nodes are found.
    assert spec.num_edges == 2 * 63
    assert spec.in_degree_quantiles[-1] == 63


def test_rmat_quadrants_on_the_diagonal_make_self_loops_only(tmp_path):
    assert make(dataclasses.replace(RMAT, a=0.5, b=0, c=0), tmp_path)[0].num_edges == 0


def test_rmat_with_equal_quadrants_is_uniform_and_with_graph500s_skewed(tmp_path):
    even, _ = make(dataclasses.replace(RMAT, num_nodes=4096, a=0.25, b=0.25, c=0.25), tmp_path)
    skewed, _ = make(dataclasses.replace(RMAT, num_nodes=4096), tmp_path)
    mean = 2 * 20_000 / 4096
    # A Poisson variable's greatest of 4096 stays within six deviations.
    assert even.in_degree_quantiles[-1] < mean + 6 * mean**0.5
    assert skewed.in_degree_quantiles[-1] > 20 * mean


def best_linear_accuracy(inputs_NF, graph):
    """Return the share of test nodes that a least-squares classifier gets right."""
    bias_N1 = np.ones((graph.num_nodes, 1))
    inputs_NF = np.hstack([inputs_NF, bias_N1])
    target_NC = np.eye(graph.labels_N.max() + 1)[graph.labels_N]
    train, test = graph.train_mask_N, graph.test_mask_N
    weights_FC = np.linalg.lstsq(inputs_NF[train], target_NC[train], rcond=None)[0]
    return ((inputs_NF[test] @ weights_FC).argmax(1) == graph.labels_N[test]).mean()


def mean_over_neighbours(graph):
    sum_NF = graph.features.astype(np.float64)
    np.add.at(sum_NF, graph.target_E, graph.features[graph.source_E])
    return sum_NF / (graph.in_degree_N + 1)[:, None]


@BOTH
def test_labels_are_learned_better_with_neighbours_than_without(tmp_path, source):
    _, graph = make(source, tmp_path)
    alone = best_linear_accuracy(graph.features, graph)
    with_neighbours = best_linear_accuracy(mean_over_neighbours(graph), graph)
    chance = np.bincount(graph.labels_N).max() / graph.num_nodes
    assert with_neighbours > alone + 0.1 > chance + 0.1
    assert with_neighbours > 0.7


def test_blocks_are_of_equal_size_and_labels_are_blocks(tmp_path):
    _, graph = make(dataclasses.replace(COMMUNITY, num_nodes=1000, num_classes=7), tmp_path)
    sizes = np.bincount(graph.labels_N)
    assert set(sizes.tolist()) == {1000 // 7, 1000 // 7 + 1}


@pytest.mark.parametrize("within_ratio", [0.0, 0.3, 0.8, 1.0])
def test_edges_stay_inside_a_block_as_often_as_asked(tmp_path, within_ratio):
    # A steep power law draws few repeats, which would be removed and weigh more inside a block.
    source = dataclasses.replace(COMMUNITY, num_nodes=20_000, within_ratio=within_ratio, degree_exponent=8.0)
    _, graph = make(source, tmp_path)
    inside = (graph.labels_N[graph.source_E] == graph.labels_N[graph.target_E]).mean()
    # 20,000 draws have a deviation of at most 0.0035.
    assert inside == pytest.approx(within_ratio, abs=0.0 if within_ratio in (0, 1) else 0.015)


def test_a_single_block_takes_all_edges(tmp_path):
    spec, _ = make(dataclasses.replace(COMMUNITY, num_classes=1, within_ratio=0.0), tmp_path)
    assert spec.num_edges > 20_000
    assert spec.num_classes == 1


def test_a_smaller_exponent_makes_larger_hubs(tmp_path):
    largest = [
        make(dataclasses.replace(COMMUNITY, degree_exponent=exponent), tmp_path)[0].in_degree_quantiles[-1]
        for exponent in (2.1, 2.5, 3.0, 8.0)
    ]
    assert largest == sorted(largest, reverse=True)


def test_an_exponent_near_one_is_bounded(tmp_path):
    # Almost every node's expected degree reaches the bound, so that they are alike: no hub takes more than others.
    spec, _ = make(dataclasses.replace(COMMUNITY, degree_exponent=1.001), tmp_path)
    assert spec.in_degree_quantiles[-1] < 4 * 2 * 20_000 / 3000


def test_community_features_are_a_centre_and_noise_of_the_given_deviation(tmp_path):
    quiet = make(dataclasses.replace(COMMUNITY, feature_noise=0.0), tmp_path)[1]
    for block in range(6):
        rows = quiet.features[quiet.labels_N == block]
        assert (rows == rows[0]).all()
    noisy = make(dataclasses.replace(COMMUNITY, feature_noise=3.0), tmp_path)[1]
    # 3000 nodes of 12 features: the deviation of the estimate is 3 / sqrt(2 * 36,000) = 0.01.
    assert (noisy.features - quiet.features).std() == pytest.approx(3.0, abs=0.05)
