import numpy as np
import pytest
import scipy.sparse
from hypothesis import given

from simulator.readers.graphs import read_graph, write_store
from simulator.readers.inspect import graph_statistics
from simulator.specs.graph import GraphFile, GraphSpec
from tests.small_graphs import graph_of, multigraphs


def statistics_of(graph):
    """Statistics of a graph in memory; the spec's counts are what `read_graph` would give."""
    spec = GraphSpec(
        source=GraphFile(path="memory"),
        sha256="",
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        num_features=graph.features.shape[1],
        num_feature_entries=getattr(graph.features, "nnz", 0),
        num_classes=2,
        num_train_nodes=0,
        num_val_nodes=0,
        num_test_nodes=0,
        in_degree_quantiles=(0.0,) * 7,
    )
    return graph_statistics(spec, graph)


def test_statistics_by_hand(tmp_path):
    # A pair in both directions, an edge that is repeated, a double self loop, an isolated node with a self loop.
    edges = [(0, 1), (1, 0), (2, 3), (2, 3), (2, 3), (1, 1), (1, 1), (4, 4)]
    labels_N = np.array([1, 1, 0, 1, 0])
    x = np.array([[1, 0], [0, 0], [2, 0], [0, 3], [0, 0]], dtype=np.float32)
    write_store(graph_of(edges, 5, labels_N=labels_N, features=x), tmp_path / "g")
    found = graph_statistics(*read_graph(GraphFile(path="g", add_self_loops=False), base=tmp_path))
    assert (found.num_nodes, found.num_edges, found.num_features) == (5, 8, 2)
    # In-degrees 1, 3, 0, 3, 1.
    assert found.in_degree_quantiles[0] == 0
    assert found.in_degree_quantiles[2] == 1
    assert (found.mean_in_degree, found.max_in_degree) == (1.6, 3)
    assert found.max_over_mean_in_degree == pytest.approx(3 / 1.6)
    assert found.hub_edges_ratio == pytest.approx(3 / 8)
    assert (found.num_isolated_nodes, found.num_self_loops, found.num_multi_edges) == (1, 3, 3)
    assert (found.num_components, found.largest_component_nodes) == (3, 2)
    assert not found.is_symmetric
    # Two edges between nodes 0 and 1 join equal labels, three from node 2 to node 3 do not.
    assert found.edge_homophily_ratio == pytest.approx(2 / 5)
    assert found.feature_density_ratio == pytest.approx(3 / 10)


def test_hubs_are_one_percent_of_the_nodes():
    # Of 200 nodes the two with the most incoming edges take 50 + 30 of 100; the rest go to twenty others.
    edges = [(0, 1)] * 50 + [(0, 2)] * 30 + [(0, node) for node in range(3, 23)]
    assert statistics_of(graph_of(edges, 200)).hub_edges_ratio == pytest.approx(0.8)


def test_a_graph_without_edges_has_no_skew_and_no_homophily():
    found = statistics_of(graph_of([], 3, labels_N=np.array([0, 1, 1])))
    assert (found.max_over_mean_in_degree, found.hub_edges_ratio, found.edge_homophily_ratio) == (0, 0, None)
    assert (found.num_isolated_nodes, found.num_components, found.is_symmetric) == (3, 3, True)


def test_unlabelled_ends_do_not_count_for_homophily():
    found = statistics_of(graph_of([(0, 1), (0, 2), (2, 0)], 3, labels_N=np.array([1, 1, -1])))
    assert found.edge_homophily_ratio == 1


def test_stored_zeros_of_sparse_features_do_not_count_as_dense():
    features = scipy.sparse.csr_array(np.array([[1, 2], [0, 4]], dtype=np.float32))
    features.data[0] = 0
    assert statistics_of(graph_of([], 2, features=features)).feature_density_ratio == 0.5


@given(multigraphs())
def test_counts_equal_those_of_a_slow_walk(multigraph):
    edges, num_nodes = multigraph
    found = statistics_of(graph_of(edges, num_nodes))
    group = list(range(num_nodes))
    for source, target in edges:
        old, new = group[source], group[target]
        group = [new if one == old else one for one in group]
    joined = {node for edge in edges for node in edge if edge[0] != edge[1]}
    assert found.num_components == len(set(group))
    assert found.largest_component_nodes == max(group.count(one) for one in group)
    assert found.num_isolated_nodes == num_nodes - len(joined)
    assert found.num_self_loops == sum(source == target for source, target in edges)
    assert found.num_multi_edges == len(edges) - len(set(edges))
    assert found.is_symmetric == all((target, source) in edges for source, target in edges)


# Isolated nodes, components and homophily: ../shared/data/README.md.
@pytest.mark.parametrize(
    ("name", "num_isolated", "num_components", "homophily"),
    [
        ("cora", 0, 78, 0.81),
        ("citeseer", 48, 438, 0.74),
        ("minesweeper", 0, 1, 0.68),
        ("wordnet-synsets", 1009, 1377, 0.71),
        ("debian-depends", 4392, 4673, 0.47),
        ("cnr-2000", 0, 1, None),
    ],
)
def test_real_graphs_have_the_statistics_of_their_table(shared_data, name, num_isolated, num_components, homophily):
    source = GraphFile(path=f"{name}.npz", add_self_loops=False)
    found = graph_statistics(*read_graph(source, base=shared_data))
    assert (found.num_isolated_nodes, found.num_components) == (num_isolated, num_components)
    assert found.edge_homophily_ratio == (homophily and pytest.approx(homophily, abs=0.005))
    assert found.is_symmetric == (name not in ("debian-depends", "cnr-2000"))
    assert (found.num_self_loops > 0) == (name == "cnr-2000")
    assert found.num_multi_edges == 0
