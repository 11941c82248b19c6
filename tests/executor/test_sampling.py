"""Few edges of each row: which are kept, by brute force and by the laws of chance; by keys alone, in any cut."""

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from executor.attention.graph import EdgeGraph
from executor.keyed import Stream, numbered_bits, stream_bits, unit_doubles
from executor.sampling import draws, plan
from executor.sampling.candidates import prepare_candidates
from executor.sampling.draws import sample_by_degree, sample_uniform
from executor.sampling.neighbours import INVENTED_BASE
from executor.sampling.projection import random_projection, sample_by_projection
from executor.sampling.ranking import keep_smallest
from executor.sampling.structures import expander_neighbours
from executor.sampling.walks import sample_by_walks
from tests.executor.sampling_cases import (
    DRAWS,
    KEY,
    NUM_HEADS,
    NUM_KV_HEADS,
    Case,
    alike_rows,
    case_of,
    id_rows,
    log_weights,
    plain_bits,
    plain_mix,
    plain_numbered,
    sorted_edges,
    source_rows,
    walked,
)
from tests.small_graphs import multigraphs

fan_outs = st.integers(1, 6)
# Of a chi-square test with the keys below: nothing is left to chance, the keys were not chosen to pass.
LEAST_P = 1e-3


def drawn(draw, case, fan_out, key=KEY):
    return DRAWS[draw](case, fan_out, key)


def flat(rows):
    return list(itertools.chain.from_iterable(rows))


def p_value(observed, expected):
    return scipy.stats.chisquare(observed, expected).pvalue


def chosen_sets(neighbours):
    """Return how often each set of sources was kept."""
    return Counter(frozenset(row) for row in source_rows(neighbours))


# --- Keyed bits.


@given(
    node=st.integers(0, 2**62 - 1), seed=st.integers(0, 2**40), step=st.integers(0, 2**40), number=st.integers(0, 99)
)
def test_bits_are_those_of_plain_whole_numbers(node, seed, step, number):
    key = torch.tensor([seed, step])
    bits = stream_bits(torch.tensor([node]), key, Stream.WALK)
    plain = plain_bits(node, key, Stream.WALK)
    assert bits.item() % 2**32 == plain
    assert numbered_bits(bits, torch.tensor(number)).item() % 2**32 == plain_numbered(plain, number)


def test_unit_numbers_are_never_zero_or_one():
    ends = unit_doubles(torch.tensor([0, -1, -(2**31)], dtype=torch.int32))
    assert ends.tolist() == [2.0**-33, 1 - 2.0**-33, 0.5 + 2.0**-33]


# --- What is kept, and that keys alone decide it.


@pytest.mark.parametrize("draw", DRAWS)
@given(graph=multigraphs(max_edges=60), fan_out=fan_outs)
def test_rows_keep_as_many_of_their_edges_as_the_fan_out_or_all(draw, graph, fan_out):
    edges, num_nodes = sorted_edges(graph[0]), graph[1]
    neighbours = drawn(draw, case_of(edges, num_nodes), fan_out)
    for node, (ids, sources) in enumerate(zip(id_rows(neighbours), source_rows(neighbours), strict=True)):
        own = [edge_id for edge_id, edge in enumerate(edges) if edge[1] == node]
        assert set(ids) <= set(own)
        assert ids == sorted(set(ids))
        assert len(ids) == min(len(own), fan_out)
        assert sources == [edges[edge_id][0] for edge_id in ids]
    assert neighbours.position_E.tolist() == flat(id_rows(neighbours))


@pytest.mark.parametrize("draw", DRAWS)
@given(graph=multigraphs(max_edges=60), fan_out=fan_outs, seed=st.integers(0, 99))
def test_the_order_of_edges_in_memory_does_not_matter(draw, graph, fan_out, seed):
    edges, num_nodes = sorted_edges(graph[0]), graph[1]
    shuffled_case = case_of(edges, num_nodes, shuffle_seed=seed)
    whole, shuffled = drawn(draw, case_of(edges, num_nodes), fan_out), drawn(draw, shuffled_case, fan_out)
    assert id_rows(shuffled) == id_rows(whole)
    # The places are in the graph that was given, whose order is the shuffled one.
    given_order = case_of(edges, num_nodes, shuffle_seed=seed).candidates.position_E
    if given_order is not None:
        own_places = {int(place): edge_id for edge_id, place in enumerate(given_order.tolist())}
        assert [own_places[place] for place in shuffled.position_E.tolist()] == flat(id_rows(shuffled))


@pytest.mark.parametrize("draw", DRAWS)
@given(graph=multigraphs(max_edges=60), fan_out=fan_outs, data=st.data())
def test_a_node_keeps_the_same_edges_in_any_cut(draw, graph, fan_out, data):
    edges, num_nodes = sorted_edges(graph[0]), graph[1]
    order = data.draw(st.permutations(range(num_nodes)))
    border = data.draw(st.integers(0, num_nodes))
    whole = drawn(draw, case_of(edges, num_nodes), fan_out)
    for targets in (order[:border], order[border:]):
        part = drawn(draw, case_of(edges, num_nodes, targets=list(targets), shuffle_seed=1), fan_out)
        assert id_rows(part) == [id_rows(whole)[node] for node in targets]
        if whole.log_weight_E is not None:
            weight_of = dict(zip(flat(id_rows(whole)), log_weights(whole), strict=True))
            assert log_weights(part) == [weight_of[edge_id] for edge_id in flat(id_rows(part))]


@pytest.mark.parametrize("draw", DRAWS)
def test_batches_of_rows_do_not_matter(draw, monkeypatch):
    rng = np.random.default_rng(0)
    edges = sorted_edges([(int(s), int(t * t // 60)) for s, t in rng.integers(0, 60, (900, 2))])
    whole = drawn(draw, case_of(edges, 60), 5)
    monkeypatch.setitem(plan.BATCH_ENTRIES, "cpu", 64)
    case = case_of(edges, 60)
    assert id_rows(drawn(draw, case, 5)) == id_rows(whole)
    assert len(case.candidates.plan(5).batches) > 10


@pytest.mark.parametrize("draw", [name for name in DRAWS if name != "projection_top_k"])
def test_a_draw_is_the_same_when_repeated_and_another_in_the_next_step_and_for_another_seed(draw):
    rng = np.random.default_rng(0)
    case = case_of(sorted_edges([(int(s), int(t)) for s, t in rng.integers(0, 20, (400, 2))]), 20)
    first = id_rows(drawn(draw, case, 4))
    assert id_rows(drawn(draw, case, 4, KEY.clone())) == first
    assert id_rows(drawn(draw, case, 4, KEY + torch.tensor([0, 1]))) != first
    assert id_rows(drawn(draw, case, 4, KEY + torch.tensor([1, 0]))) != first


def test_the_smallest_priorities_are_kept_and_the_next_is_told_with_negative_and_equal_ones():
    candidates = alike_rows(2, 6)
    priority = torch.tensor([[3.0, -1.0, 0.0, -0.0, torch.inf, -7.5], [2.0, 2.0, 2.0, 1.0, 2.0, 2.0]]).double()
    _, position_K, left_out_N = keep_smallest(candidates, 3, lambda row, position: priority[row, position % 6])
    assert position_K.tolist() == [1, 2, 5, 6, 7, 9]
    assert left_out_N.tolist() == [0.0, 2.0]


def test_a_part_without_rows_or_edges_samples_nothing():
    for case in (case_of([], 0), case_of([], 3), case_of([(0, 1)], 3, targets=[])):
        for draw in DRAWS:
            assert drawn(draw, case, 2).graph.num_edges == 0
        walks = walked(case, fan_out=2, num_walks=2, walk_length=2)
        assert walks.graph.num_edges == 0
        assert walks.graph.num_targets == case.candidates.graph.num_targets


# --- Chances.


@pytest.mark.parametrize("places", [0, draws.MAX_DRAWN_PLACES])
@pytest.mark.parametrize(("num_columns", "fan_out"), [(6, 2), (5, 1), (5, 4)])
def test_a_uniform_sample_is_any_subset_alike(places, num_columns, fan_out, monkeypatch):
    monkeypatch.setattr(draws, "MAX_DRAWN_PLACES", places)  # 0: by ranking
    counts = chosen_sets(sample_uniform(alike_rows(6000, num_columns), fan_out, KEY))
    subsets = [frozenset(subset) for subset in itertools.combinations(range(num_columns), fan_out)]
    assert set(counts) <= set(subsets)
    assert p_value([counts[subset] for subset in subsets], 6000 / len(subsets)) > LEAST_P


@pytest.mark.parametrize("fan_out", [16, 80])
def test_edges_of_a_hub_are_sampled_alike(fan_out):
    neighbours = sample_uniform(alike_rows(400, 1000), fan_out, KEY)
    counts = np.bincount(neighbours.graph.source_E, minlength=1000)
    # Without replacement counts vary by the share left out less.
    assert p_value(counts, 400 * fan_out / 1000) > LEAST_P
    assert p_value(counts, 400 * fan_out / 1000) < 1 - LEAST_P


@pytest.mark.parametrize("other", [torch.tensor([0, 1]), torch.tensor([1, 0])], ids=["step", "seed"])
@pytest.mark.parametrize("draw", ["uniform", "degree"])
def test_draws_of_other_steps_and_seeds_are_independent(draw, other):
    candidates = alike_rows(8000, 4)
    degree_M = torch.ones(candidates.graph.num_sources, dtype=torch.int64)

    def choices(key):
        if draw == "uniform":
            return sample_uniform(candidates, 1, key).graph.source_E.numpy()
        return sample_by_degree(candidates, 1, 1.0, degree_M, key).graph.source_E.numpy()

    first, second = choices(KEY), choices(KEY + other)
    assert p_value(np.bincount(first * 4 + second, minlength=16), 500) > LEAST_P
    # And of neighbouring rows in one step.
    assert p_value(np.bincount(first[::2] * 4 + first[1::2], minlength=16), 250) > LEAST_P


def pair_chances(weights):
    """Return the chance of each pair when two are drawn one after the other by the weights of those left."""
    total = sum(weights)
    return {
        frozenset((i, j)): weights[i] / total * weights[j] / (total - weights[i])
        + weights[j] / total * weights[i] / (total - weights[j])
        for i, j in itertools.combinations(range(len(weights)), 2)
    }


@pytest.mark.parametrize("exponent", [0.5, 1.0, -0.5])
def test_draws_by_degree_have_the_chances_of_successive_draws(exponent):
    candidates = alike_rows(8000, 5)
    degrees = [0, 2, 4, 8, 16]  # 0 counts as 1
    degree_M = torch.ones(candidates.graph.num_sources, dtype=torch.int64)
    degree_M[:5] = torch.tensor(degrees)
    counts = chosen_sets(sample_by_degree(candidates, 2, exponent, degree_M, KEY))
    chances = pair_chances([max(degree, 1) ** exponent for degree in degrees])
    assert p_value([counts[pair] for pair in chances], [8000 * chance for chance in chances.values()]) > LEAST_P


def test_draws_by_projection_have_the_chances_of_successive_draws_by_the_softmax():
    candidates = alike_rows(8000, 5)
    scores = [-1.0, 0.0, 0.5, 1.5, 2.0]
    k_MHK = torch.zeros(candidates.graph.num_sources, 1, 1)
    k_MHK[:5, 0, 0] = torch.tensor(scores)
    q_NHK = torch.ones(8000, 1, 1)
    counts = chosen_sets(sample_by_projection(candidates, 2, q_NHK, k_MHK, torch.ones(1, 1), key=KEY))
    chances = pair_chances([math.exp(score) for score in scores])
    assert p_value([counts[pair] for pair in chances], [8000 * chance for chance in chances.values()]) > LEAST_P


@pytest.mark.parametrize("draw", ["uniform", "degree", "projection"])
@pytest.mark.parametrize("fan_out", [1, 2, 4])
def test_weighted_sums_over_a_sample_are_unbiased(draw, fan_out):
    num_rows, values = 20000, np.array([1.0, -2.0, 3.0, 5.0, 0.5])
    candidates = alike_rows(num_rows, 5)
    if draw == "uniform":
        neighbours = sample_uniform(candidates, fan_out, KEY)
    elif draw == "degree":
        neighbours = sample_by_degree(candidates, fan_out, 1.0, torch.arange(num_rows) % 5 + 1, KEY)
    else:
        k_MHK = (torch.arange(num_rows) % 5 / 4.0).reshape(-1, 1, 1)
        q_NHK = torch.ones(num_rows, 1, 1)
        neighbours = sample_by_projection(candidates, fan_out, q_NHK, k_MHK, torch.ones(1, 1), key=KEY)
    weighted = np.exp(log_weights(neighbours)) * values[neighbours.graph.source_E]
    sums = weighted.reshape(num_rows, fan_out).sum(1)
    assert abs(sums.mean() - values.sum()) < 4 * sums.std() / math.sqrt(num_rows)


def test_a_softmax_with_log_weights_comes_near_that_over_all_edges():
    # Sources of high degree, which are drawn more often, have larger values than the rest: 0 to 5.
    num_columns, rng = 5000, np.random.default_rng(6)
    degree_M = torch.from_numpy(rng.integers(1, 100, num_columns))
    score_M, value_M = torch.from_numpy(rng.normal(size=num_columns)), degree_M / 20
    whole = float(score_M.softmax(0) @ value_M.double())
    candidates = alike_rows(1, num_columns)
    errors = []
    for step in range(20):
        neighbours = sample_by_degree(candidates, 1000, 1.0, degree_M, torch.tensor([3, step]))
        score_K, value_K = score_M[neighbours.graph.source_E], value_M[neighbours.graph.source_E].double()
        weighted_K = score_K + torch.tensor(log_weights(neighbours))
        errors.append([float(scores.softmax(0) @ value_K) - whole for scores in (weighted_K, score_K)])
    with_weights, without = np.mean(errors, axis=0)
    assert abs(with_weights) < 0.05
    assert without > 0.5


@pytest.mark.parametrize("draw", DRAWS)
def test_rows_that_keep_all_have_no_weights(draw):
    edges = sorted_edges([(source, target) for source in range(4) for target in range(3)])
    log_weight_E = drawn(draw, case_of(edges, 5), 4).log_weight_E
    assert log_weight_E is None or (log_weight_E == 0).all()


# --- Projections.


def test_the_largest_products_are_kept_when_the_projection_loses_nothing():
    rng = np.random.default_rng(1)
    edges = sorted_edges([(int(s), int(t)) for s, t in rng.integers(0, 30, (500, 2))])
    case = case_of(edges, 30)
    identity = torch.eye(case.k[0].numel())
    kept = id_rows(sample_by_projection(case.candidates, 3, case.q, case.k, identity, key=None))
    group = NUM_HEADS // NUM_KV_HEADS
    for node in range(30):
        own = [edge_id for edge_id, edge in enumerate(edges) if edge[1] == node]
        products = {
            edge_id: sum(
                float(case.q[node, head] @ case.k[edges[edge_id][0], head // group]) for head in range(NUM_HEADS)
            )
            for edge_id in own
        }
        assert kept[node] == sorted(sorted(own, key=lambda edge_id: (-products[edge_id], edge_id))[:3])


def test_random_projections_keep_products_on_average():
    x_ND = torch.from_numpy(np.random.default_rng(2).normal(size=(2, 40)))
    products = []
    for step in range(2000):
        projection_DR = random_projection(40, 4, torch.tensor([0, step])).double()
        assert projection_DR.abs().unique().tolist() == [0.5]
        products.append(float((x_ND[0] @ projection_DR) @ (x_ND[1] @ projection_DR)))
    assert abs(np.mean(products) - float(x_ND[0] @ x_ND[1])) < 4 * np.std(products) / math.sqrt(2000)


class LargestTensor(TorchDispatchMode):
    """Remembers the entries of the largest tensor that an operator returned."""

    entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.entries = max(self.entries, result.numel())
        return result


def test_scores_never_fill_edges_times_columns(monkeypatch):
    monkeypatch.setitem(plan.BATCH_ENTRIES, "cpu", 4096)
    num_edges, width = 200 * 100, 16
    candidates = alike_rows(200, 100)
    x_NHK = torch.ones(200, 2, 8)
    projection_DR = random_projection(16, width, KEY)
    with LargestTensor() as largest:
        sample_by_projection(candidates, 4, x_NHK, x_NHK, projection_DR, key=KEY)
    assert largest.entries <= max(4096, 200 * width)
    assert largest.entries < num_edges * width


# --- Walks.


def plain_walks(edges, num_nodes, start, num_walks, walk_length, key):
    """Return how often each node is visited, walk by walk and hop by hop."""
    into = {node: [edge for edge in edges if edge[1] == node] for node in range(num_nodes)}
    bits = plain_bits(start, key, Stream.WALK)
    visits: Counter[int] = Counter()
    for walk in range(num_walks if into[start] else 0):
        node = start
        for hop in range(walk_length):
            edges_in = into[node] or into[start]
            choice = plain_numbered(bits, hop * num_walks + walk) * len(edges_in) >> 32
            node = edges_in[choice][0]
            visits[node] += 1
    return visits


def plain_tie(start, node, key):
    return plain_mix(plain_bits(start, key, Stream.VISIT) ^ plain_mix(node)) % 2**31


@given(graph=multigraphs(max_edges=50), fan_out=st.integers(1, 8), walks=st.integers(1, 6), hops=st.integers(1, 4))
def test_the_most_visited_nodes_of_plain_walks_are_kept(graph, fan_out, walks, hops):
    edges, num_nodes = sorted_edges(graph[0]), graph[1]
    case = case_of(edges, num_nodes, shuffle_seed=2)
    neighbours = walked(case, fan_out=fan_out, num_walks=walks, walk_length=hops)
    ids, weights = id_rows(neighbours), log_weights(neighbours)
    for node, sources in enumerate(source_rows(neighbours)):
        visits = plain_walks(edges, num_nodes, node, walks, hops, KEY)
        ranks = {other: (-count, plain_tie(node, other, KEY)) for other, count in visits.items()}
        ranked = sorted(ranks, key=ranks.__getitem__)
        assert sources == ranked[:fan_out]
        assert [weights.pop(0) for _ in sources] == pytest.approx([math.log(visits[other]) for other in sources])
        for source, edge_id in zip(sources, ids[node], strict=True):
            own = [known for known, edge in enumerate(edges) if edge == (source, node)]
            assert edge_id == min(own) if own else edge_id >= INVENTED_BASE
    all_ids = flat(ids)
    assert len(set(all_ids)) == len(all_ids)


@given(graph=multigraphs(max_edges=50), fan_out=st.integers(1, 8), data=st.data())
def test_walks_on_the_whole_graph_from_some_nodes_are_those_from_all(graph, fan_out, data):
    edges, num_nodes = sorted_edges(graph[0]), graph[1]
    rows = data.draw(st.lists(st.integers(0, num_nodes - 1), unique=True))
    settings: dict[str, Any] = {"fan_out": fan_out, "num_walks": 5, "walk_length": 3}
    case = case_of(edges, num_nodes)
    whole = walked(case, **settings)
    some = walked(case, row_T=torch.tensor(rows, dtype=torch.int64), **settings)
    assert source_rows(some) == [source_rows(whole)[row] for row in rows]
    assert id_rows(some) == [id_rows(whole)[row] for row in rows]


@given(graph=multigraphs(max_edges=50), data=st.data())
def test_walks_of_one_hop_need_no_more_than_a_part(graph, data):
    edges, num_nodes = sorted_edges(graph[0]), graph[1]
    order = data.draw(st.permutations(range(num_nodes)))
    border = data.draw(st.integers(0, num_nodes))
    settings: dict[str, Any] = {"fan_out": 3, "num_walks": 6, "walk_length": 1}
    whole = walked(case_of(edges, num_nodes), **settings)
    for targets in (list(order[:border]), list(order[border:])):
        part = walked(case_of(edges, num_nodes, targets=targets), **settings)
        assert id_rows(part) == [id_rows(whole)[node] for node in targets]


def test_blocks_of_walks_do_not_matter(monkeypatch):
    rng = np.random.default_rng(3)
    case = case_of(sorted_edges([(int(s), int(t)) for s, t in rng.integers(0, 40, (200, 2))]), 40)
    settings: dict[str, Any] = {"fan_out": 4, "num_walks": 5, "walk_length": 3}
    whole = walked(case, **settings)
    monkeypatch.setattr("executor.sampling.walks._BLOCK_ENTRIES", 50)
    assert id_rows(walked(case, **settings)) == id_rows(whole)


# --- Devices.


def on_gpu(case):
    """Return the case on the GPU, prepared anew."""
    graph = case.candidates.graph
    moved = EdgeGraph(
        indptr_N1=graph.indptr_N1.cuda(),
        source_E=graph.source_E.cuda(),
        num_sources=graph.num_sources,
        edge_id_E=None if graph.edge_id_E is None else graph.edge_id_E.cuda(),
    )
    return Case(candidates=prepare_candidates(moved), degree=case.degree.cuda(), q=case.q.cuda(), k=case.k.cuda())


def skewed_case():
    edges = [(int(s), int(t * t // 300)) for s, t in np.random.default_rng(4).integers(0, 300, (6000, 2))]
    return case_of(sorted_edges(edges), 300)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("fan_out", [5, 70])
@pytest.mark.parametrize("draw", DRAWS)
def test_a_gpu_keeps_the_same_edges_and_the_host_does_not_wait(draw, fan_out):
    here = skewed_case()
    there, key = on_gpu(here), KEY.cuda()
    drawn(draw, there, fan_out, key)  # makes the plan
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = drawn(draw, there, fan_out, key)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found.edge_id_E.tolist() == drawn(draw, here, fan_out).edge_id_E.tolist()


@pytest.mark.gpu
def test_walks_and_expanders_on_a_gpu_are_those_on_a_cpu():
    here = skewed_case()
    there = on_gpu(here)
    walks = [
        sample_by_walks(case.candidates, fan_out=4, num_walks=6, walk_length=3, key=KEY.to(case.degree.device))
        for case in (here, there)
    ]
    expanders = [expander_neighbours(case.candidates, 4, num_nodes=300, seed=1) for case in (here, there)]
    for cpu, gpu in (walks, expanders):
        assert gpu.edge_id_E.tolist() == cpu.edge_id_E.tolist()
        assert gpu.graph.source_E.tolist() == cpu.graph.source_E.tolist()
