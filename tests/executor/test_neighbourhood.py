"""Neighbourhoods of seeds are what the sampler of whole graphs draws for their nodes, laid out as layers need them."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.attention.graph import EdgeGraph
from executor.sampling.candidates import prepare_candidates
from executor.sampling.neighbourhood import Neighbourhood, NeighbourhoodSampler, layer_key
from executor.sampling.sampler import NeighbourSampler, SamplerInputs
from simulator.readers.graphs import Graph
from simulator.specs.sampling import NeighbourKind, NeighbourSpec
from tests.executor.made_graphs import FIRST_LONELY_NODE, NUM_AWKWARD_NODES, awkward_graph

GRAPH = awkward_graph()


def drawn_by_whole_graph(graph: Graph, fan_out: int, key: torch.Tensor) -> list[list[int]]:
    """Return the positions of the edges that each node of a graph draws."""
    edges = EdgeGraph(
        indptr_N1=torch.from_numpy(graph.indptr_N.copy()),
        source_E=torch.from_numpy(graph.source_E.copy()),
        num_sources=graph.num_nodes,
    )
    inputs = SamplerInputs(seed=0, num_nodes=graph.num_nodes)
    spec = NeighbourSpec(kind=NeighbourKind.UNIFORM, fan_out=fan_out)
    drawn = NeighbourSampler([spec], prepare_candidates(edges), inputs).sample(key)
    return [part.tolist() for part in torch.tensor_split(drawn.edge_id_E, drawn.graph.indptr_N1[1:-1])]


def check(sample: Neighbourhood, seeds: np.ndarray, fan_outs: tuple[int, ...], *, seed: int, step: int) -> None:
    """Check all of a sample against what each node draws by itself."""
    targets = sorted(seeds.tolist())
    for layer in reversed(range(len(fan_outs))):
        found = sample.layers[layer]
        rows = (
            [part.tolist() for part in np.split(found.position_E, found.indptr_N1[1:-1])]
            if len(found.indptr_N1) > 1
            else []
        )
        assert sample.node_N[: len(rows)].tolist() == targets
        drawn = drawn_by_whole_graph(GRAPH, fan_outs[layer], layer_key(seed, step, layer, num_layers=len(fan_outs)))
        assert rows == [drawn[node] for node in targets]
        assert sample.node_N[found.source_E].tolist() == GRAPH.source_E[found.position_E].tolist()
        # Targets in front, then what they drew besides, each once and in order.
        others = sorted(set(GRAPH.source_E[found.position_E].tolist()) - set(targets))
        targets = [*targets, *others]
        assert found.num_sources == len(targets)
    assert sample.node_N.tolist() == targets


@given(
    seeds=st.sets(st.integers(0, NUM_AWKWARD_NODES - 1), max_size=12),
    # Few, as many as places are drawn for, and more, for which all edges are ranked.
    fan_outs=st.lists(st.sampled_from([1, 2, 5, 64, 65, 500]), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 5),
    step=st.integers(0, 5),
)
def test_a_node_attends_to_what_it_draws_by_itself(seeds, fan_outs, seed, step):
    nodes = np.array(sorted(seeds), dtype=np.int64)
    sample = NeighbourhoodSampler(GRAPH, fan_outs, seed=seed).sample(nodes, step)
    check(sample, nodes, fan_outs, seed=seed, step=step)


def test_one_sampler_gives_the_same_whatever_it_gave_before():
    sampler = NeighbourhoodSampler(GRAPH, (3, 2), seed=1)
    nodes = np.array([5, 0, 33], dtype=np.int64)
    for step in (0, 1, 0):
        check(sampler.sample(nodes, step), nodes, (3, 2), seed=1, step=step)


def test_steps_and_layers_draw_anew():
    sample = [NeighbourhoodSampler(GRAPH, (3, 3), seed=0).sample(np.array([0]), step) for step in (0, 1)]
    draws = [tuple(found.layers[1].position_E.tolist()) for found in sample]
    # The hub is a target of the layer before too.
    draws += [tuple(found.layers[0].position_E[:3].tolist()) for found in sample]
    assert len(set(draws)) == 4


def test_rows_lie_in_the_order_of_the_plan_behind_the_targets():
    place_N = np.random.default_rng(0).permutation(NUM_AWKWARD_NODES)
    nodes = np.array([0, 7, 20, 41], dtype=np.int64)
    sample = NeighbourhoodSampler(GRAPH, (4, 4), seed=0, place_N=place_N).sample(nodes, 0)
    bounds = [0, *(layer.indptr_N1.size - 1 for layer in reversed(sample.layers)), len(sample.node_N)]
    for first, end in itertools.pairwise(bounds):
        assert np.all(np.diff(place_N[sample.node_N[first:end]]) > 0)
    natural = NeighbourhoodSampler(GRAPH, (4, 4), seed=0).sample(nodes, 0)
    assert set(natural.node_N.tolist()) == set(sample.node_N.tolist())


@pytest.mark.parametrize("seeds", [[], [FIRST_LONELY_NODE], [FIRST_LONELY_NODE, FIRST_LONELY_NODE + 3]])
def test_seeds_without_edges_are_alone(seeds):
    # Case R14; and a rank without seeds.
    sample = NeighbourhoodSampler(GRAPH, (3, 2), seed=0).sample(np.array(seeds, dtype=np.int64), 0)
    assert sample.node_N.tolist() == seeds
    assert [layer.position_E.size for layer in sample.layers] == [0, 0]
    assert [layer.counts().num_sources for layer in sample.layers] == [len(seeds)] * 2
