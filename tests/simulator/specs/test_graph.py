from dataclasses import replace

import pytest
from hypothesis import given

from simulator.errors import SpecError
from simulator.specs.graph import CommunityGraph, GraphFile, RmatGraph
from tests.strategies import graphs


@given(graph=graphs)
def test_features_are_sparse_when_entries_are_stored(graph):
    assert replace(graph, num_feature_entries=0).has_sparse_features is False
    assert replace(graph, num_feature_entries=7).has_sparse_features is True


@given(graph=graphs)
def test_a_graph_without_nodes_or_with_too_few_quantiles_is_refused(graph):
    with pytest.raises(SpecError, match="num_nodes must be finite and > 0, got 0"):
        replace(graph, num_nodes=0)
    with pytest.raises(SpecError, match="in_degree_quantiles must have 7 entries, got 2"):
        replace(graph, in_degree_quantiles=(0.0, 1.0))


def test_quadrants_of_an_rmat_graph_share_one_probability():
    assert RmatGraph(num_nodes=4, num_edges=4, a=0.5, b=0.25, c=0.25).a == 0.5
    with pytest.raises(SpecError, match=r"a \+ b \+ c must not exceed 1, got 1.25"):
        RmatGraph(num_nodes=4, num_edges=4, a=0.5, b=0.5, c=0.25)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("within_ratio", 1.5, r"within_ratio must be within \[0, 1\], got 1.5"),
        ("degree_exponent", 1.0, "degree_exponent must be > 1, got 1.0"),
        ("feature_noise", -1.0, "feature_noise must be finite and >= 0, got -1.0"),
        ("num_classes", 0, "num_classes must be finite and > 0, got 0"),
    ],
)
def test_a_community_graph_out_of_range_is_refused(field, value, rule):
    graph = CommunityGraph(num_nodes=10, num_edges=20)
    with pytest.raises(SpecError, match=rule):
        replace(graph, **{field: value})


def test_a_negative_split_is_refused():
    with pytest.raises(SpecError, match="split must be finite and >= 0, got -1"):
        GraphFile(path="cora.npz", split=-1)
