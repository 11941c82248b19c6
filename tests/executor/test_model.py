"""The graph transformer: its parameters, its symmetry, and what its settings change."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from executor.data import RankData, build_rank_data
from executor.keyed import key_word
from executor.model import ForwardSettings, GraphTransformer
from executor.record import Recorder
from simulator.readers.graphs import Graph, rows_by_target
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, Recompute
from simulator.workload import num_parameters, parameter_shapes
from tests.executor.made_graphs import awkward_graph, sparse_graph, spec_of

MODEL = ModelSpec(width=12, num_heads=3, num_layers=2, feed_forward_width=20)
SETTINGS = ForwardSettings(exchange=(Exchange.NONE,) * 2, recompute=(Recompute.NONE,) * 2)


def data_of(graph: Graph, *, encodings: np.ndarray | None = None, dtype: torch.dtype = torch.float32) -> RankData:
    """Return the whole graph as the data of the only rank."""
    return build_rank_data(
        graph,
        encodings,
        np.zeros(graph.num_nodes, np.int64),
        graph_rank=0,
        exchanges=frozenset({Exchange.NONE}),
        degree_buckets=True,
        group=None,
        num_ranks=1,
        num_train_rows_of_step=int(graph.train_mask_N.sum()),
        dtype=dtype,
        device=torch.device("cpu"),
    )


def model_of(graph: Graph, model: ModelSpec) -> GraphTransformer:
    """Return a model with parameters none of which is zero or one throughout."""
    torch.manual_seed(0)
    found = GraphTransformer(spec_of(graph), model, Recorder())
    with torch.no_grad():
        for value in found.parameters():
            value.add_(0.1 * torch.randn(value.shape))
    return found


def word_of(seed: int, step: int) -> Tensor:
    """Return what keys dropout."""
    return key_word(torch.tensor([seed, step]))


def loss_and_gradients(
    model: GraphTransformer, data: RankData, settings: ForwardSettings
) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = model.loss(model(data, settings), data)
    loss.backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    return loss.item(), gradients


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("bias", EdgeBias)
@pytest.mark.parametrize(("laplacian", "walks"), [*itertools.product([0, 3], [0, 2])])
@pytest.mark.parametrize("num_layers", [1, 3])
def test_parameters_are_those_that_the_simulator_lists_in_its_order(is_sparse, bias, laplacian, walks, num_layers):
    graph = spec_of(sparse_graph() if is_sparse else awkward_graph(), num_classes=7)
    model = replace(
        MODEL, edge_bias=bias, laplacian_encodings=laplacian, random_walk_encodings=walks, num_layers=num_layers
    )
    built = GraphTransformer(graph, model, Recorder())
    assert [(name, tuple(value.shape)) for name, value in built.named_parameters()] == [*parameter_shapes(graph, model)]
    assert sum(value.numel() for value in built.parameters()) == num_parameters(graph, model)
    assert dict(built.named_buffers()) == {}


def permuted(graph: Graph, new_N: np.ndarray) -> Graph:
    """Return the graph with node n renamed to `new_N[n]`."""
    old_N = np.argsort(new_N)
    indptr_N, source_E = rows_by_target(new_N[graph.source_E], new_N[graph.target_E], num_nodes=graph.num_nodes)
    return replace(
        graph,
        indptr_N=indptr_N,
        source_E=source_E,
        features=graph.features[old_N],
        labels_N=graph.labels_N[old_N],
        train_mask_N=graph.train_mask_N[old_N],
        val_mask_N=graph.val_mask_N[old_N],
        test_mask_N=graph.test_mask_N[old_N],
    )


@pytest.mark.parametrize("graph", [awkward_graph(), sparse_graph()], ids=["dense", "sparse"])
@pytest.mark.parametrize("bias", EdgeBias)
def test_permuting_nodes_permutes_logits_and_leaves_the_loss(graph, bias):
    model = model_of(graph, replace(MODEL, edge_bias=bias, random_walk_encodings=2))
    encodings = np.random.default_rng(0).normal(size=(graph.num_nodes, 2)).astype(np.float32)
    new_N = np.random.default_rng(1).permutation(graph.num_nodes)
    data = data_of(graph, encodings=encodings)
    moved = data_of(permuted(graph, new_N), encodings=encodings[np.argsort(new_N)])
    with torch.no_grad():
        logits, moved_logits = model(data, SETTINGS), model(moved, SETTINGS)
    torch.testing.assert_close(moved_logits[new_N], logits, rtol=1e-4, atol=1e-5)
    assert model.loss(moved_logits, moved).item() == pytest.approx(model.loss(logits, data).item(), rel=1e-5)


def test_a_node_hears_of_nodes_as_many_edges_away_as_there_are_layers():
    # In the directed tail node 57 hears from 56 and 55 in two layers, and not from 54; edges of the hub aside.
    graph = awkward_graph()
    keep_E = (graph.source_E != 0) & (graph.target_E != 0)
    indptr_N, source_E = rows_by_target(graph.source_E[keep_E], graph.target_E[keep_E], num_nodes=graph.num_nodes)
    graph = replace(graph, indptr_N=indptr_N, source_E=source_E)
    model = model_of(graph, MODEL)
    data = data_of(graph)
    assert data.dense_NF is not None
    changed = {}
    for node in (54, 55, 56, 57, 58):
        features_NF = data.dense_NF.clone()
        features_NF[node] += 1
        with torch.no_grad():
            difference = model(replace(data, dense_NF=features_NF), SETTINGS) - model(data, SETTINGS)
        changed[node] = bool(difference[57].abs().max() > 0)
    assert changed == {54: False, 55: True, 56: True, 57: True, 58: False}


def test_recomputing_layers_changes_neither_loss_nor_gradients():
    graph = awkward_graph()
    model = model_of(graph, replace(MODEL, dropout_ratio=0.4, edge_bias=EdgeBias.DEGREE))
    data = data_of(graph)
    kept = loss_and_gradients(model, data, replace(SETTINGS, dropout_word=word_of(0, 3)))
    for recompute in itertools.product(Recompute, repeat=2):
        settings = replace(SETTINGS, dropout_word=word_of(0, 3), recompute=recompute)
        loss, gradients = loss_and_gradients(model, data, settings)
        assert loss == kept[0]
        for name, gradient in gradients.items():
            assert torch.equal(gradient, kept[1][name]), name


def test_dropout_is_drawn_from_its_seed_and_off_without_one():
    graph = awkward_graph()
    data = data_of(graph)
    model = model_of(graph, replace(MODEL, dropout_ratio=0.4))
    without = GraphTransformer(spec_of(graph), MODEL, Recorder())
    without.load_state_dict(model.state_dict())
    with torch.no_grad():
        words = [word_of(0, step) for step in (1, 1, 2)]
        first, again, other = (model(data, replace(SETTINGS, dropout_word=word)) for word in words)
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        assert torch.equal(model(data, SETTINGS), without(data, SETTINGS))
        assert not torch.equal(first, model(data, SETTINGS))


def test_every_parameter_gets_a_gradient():
    graph = sparse_graph()
    model = model_of(graph, replace(MODEL, edge_bias=EdgeBias.DEGREE, laplacian_encodings=2))
    encodings = np.random.default_rng(0).normal(size=(graph.num_nodes, 2)).astype(np.float32)
    _, gradients = loss_and_gradients(model, data_of(graph, encodings=encodings), SETTINGS)
    assert [name for name, _ in model.named_parameters()] == [*gradients]
    assert {name for name, gradient in gradients.items() if not gradient.abs().max() > 0} == set()


def test_bf16_data_gives_bf16_logits_from_fp32_parameters():
    graph = awkward_graph()
    model = model_of(graph, MODEL)
    logits = model(data_of(graph, dtype=torch.bfloat16), SETTINGS)
    assert logits.dtype == torch.bfloat16
    assert {value.dtype for value in model.parameters()} == {torch.float32}
    exact = model(data_of(graph), SETTINGS)
    torch.testing.assert_close(logits.float(), exact, rtol=0.05, atol=0.05)
