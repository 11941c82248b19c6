"""Attention in place of that over a batch's edges: in the model it is what it says; neighbours are keyed by step."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from executor.attend import Rows, attention_of
from executor.attention.full import GraphBatch
from executor.data import RankData, build_rank_data, degree_buckets_of
from executor.model import ForwardSettings, GraphTransformer
from executor.record import Recorder
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, Recompute
from simulator.specs.sampling import NeighbourKind, NeighbourSpec
from tests.executor.made_graphs import NUM_AWKWARD_NODES, awkward_graph, spec_of

GRAPH = awkward_graph()
ALL = NeighbourSpec(kind=NeighbourKind.ALL)
UNIFORM = NeighbourSpec(kind=NeighbourKind.UNIFORM, fan_out=3)
WALKS = NeighbourSpec(kind=NeighbourKind.RANDOM_WALK, fan_out=4, num_walks=10, walk_length=2)
TOP_K = NeighbourSpec(kind=NeighbourKind.PROJECTION_TOP_K, fan_out=3, projection_width=4)
SETTINGS = ForwardSettings(exchange=(Exchange.NONE,) * 2, recompute=(Recompute.NONE,) * 2)


def model_of(edge_bias: EdgeBias) -> GraphTransformer:
    """Return a model of two layers; a bias by degree is drawn, since it begins with zeros."""
    torch.manual_seed(0)
    spec = ModelSpec(width=16, num_heads=4, num_layers=2, feed_forward_width=16, edge_bias=edge_bias)
    model = GraphTransformer(spec_of(GRAPH), spec, Recorder())
    for name, parameter in model.named_parameters():
        if name.endswith("edge_bias"):
            torch.nn.init.normal_(parameter)
    return model


def data_of(edge_bias: EdgeBias) -> RankData:
    return build_rank_data(
        GRAPH,
        None,
        np.zeros(GRAPH.num_nodes, np.int64),
        graph_rank=0,
        num_ranks=1,
        exchanges=frozenset({Exchange.NONE}),
        group=None,
        num_train_rows_of_step=1,
        degree_buckets=edge_bias is EdgeBias.DEGREE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def rows_of(data: RankData, edge_bias: EdgeBias, structure_weight: float = 0.0) -> Rows:
    bucket_N = torch.from_numpy(degree_buckets_of(GRAPH)) if edge_bias is EdgeBias.DEGREE else None
    return Rows(
        edges=data.edges[Exchange.NONE],
        node_N=data.node_N,
        degree_N=torch.from_numpy(GRAPH.in_degree_N),
        degree_bucket_N=bucket_N,
        num_heads=4,
        seed=3,
        num_graph_nodes=GRAPH.num_nodes,
        structure_weight=structure_weight,
    )


def logits_of(
    edge_bias: EdgeBias, choice: NeighbourSpec | None, *, step: int = 0, structure_weight: float = 0.0
) -> tuple[Tensor, int]:
    """Return the logits under an attention, and the pairs attended to."""
    data = data_of(edge_bias)
    attention = attention_of(rows_of(data, edge_bias, structure_weight), choice)
    attention.begin(step)
    logits = model_of(edge_bias)(data, replace(SETTINGS, attend=attention))
    return logits.detach(), attention.num_edges


@pytest.mark.parametrize("edge_bias", EdgeBias)
def test_all_edges_as_neighbours_are_the_models_own_attention(edge_bias):
    found, num_edges = logits_of(edge_bias, ALL)
    with torch.no_grad():
        right = model_of(edge_bias)(data_of(edge_bias), SETTINGS)
    torch.testing.assert_close(found, right)
    assert num_edges == 2 * GRAPH.num_edges


@pytest.mark.parametrize("edge_bias", EdgeBias)
@pytest.mark.parametrize("structure_weight", [0.0, 1.0])
def test_full_attention_is_the_models_attention_over_all_pairs_as_edges(edge_bias, structure_weight):
    found, num_edges = logits_of(edge_bias, None, structure_weight=structure_weight)
    data = data_of(edge_bias)
    pairs = GraphBatch(graph_indptr_B1=torch.tensor([0, NUM_AWKWARD_NODES])).all_pairs
    bucket_E = torch.from_numpy(degree_buckets_of(GRAPH)).repeat(NUM_AWKWARD_NODES)
    data = replace(
        data,
        edges={Exchange.NONE: pairs},
        degree_bucket_E=bucket_E if edge_bias is EdgeBias.DEGREE else None,
    )
    with torch.no_grad():
        right = model_of(edge_bias)(data, SETTINGS)
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
    assert num_edges == 2 * NUM_AWKWARD_NODES**2


@pytest.mark.parametrize("choice", [UNIFORM, WALKS, TOP_K])
def test_neighbours_are_the_same_for_a_step_and_others_in_another(choice):
    first, again, other = (logits_of(EdgeBias.DEGREE, choice, step=step)[0] for step in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_fan_out_above_all_degrees_is_all_edges():
    wide = NeighbourSpec(kind=NeighbourKind.UNIFORM, fan_out=10**6)
    torch.testing.assert_close(logits_of(EdgeBias.DEGREE, wide)[0], logits_of(EdgeBias.DEGREE, ALL)[0])


@pytest.mark.parametrize("choice", [None, ALL, UNIFORM, WALKS, TOP_K])
def test_the_loss_term_changes_gradients_of_projections_but_not_the_output(choice):
    gradients: dict[float, list[Tensor]] = {}
    for structure_weight in (0.0, 1.0):
        data, model = data_of(EdgeBias.DEGREE), model_of(EdgeBias.DEGREE)
        attention = attention_of(rows_of(data, EdgeBias.DEGREE, structure_weight), choice)
        attention.begin(0)
        model(data, replace(SETTINGS, attend=attention)).square().sum().backward()
        weights = [weight for name, weight in model.named_parameters() if "query_key_value" in name]
        gradients[structure_weight] = [weight.grad for weight in weights if weight.grad is not None]
        assert len(gradients[structure_weight]) == 2
    for without, with_term in zip(gradients[0.0], gradients[1.0], strict=True):
        assert torch.isfinite(with_term).all()
        width = 16
        assert not torch.allclose(without[: 2 * width], with_term[: 2 * width], rtol=1e-3, atol=1e-6)
    # In the last layer the term is of queries and keys alone: values get the gradient of the output.
    torch.testing.assert_close(gradients[0.0][-1][2 * 16 :], gradients[1.0][-1][2 * 16 :], rtol=1e-3, atol=1e-4)
