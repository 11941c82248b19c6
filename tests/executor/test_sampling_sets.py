"""Edges invented, stored and joined; samplers as specs describe them."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.sparse.csgraph
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.attention.graph import EdgeGraph
from executor.keyed import Stream
from executor.sampling.candidates import prepare_candidates
from executor.sampling.draws import sample_uniform
from executor.sampling.join import fan_out_graph, join_neighbours
from executor.sampling.neighbours import INVENTED_BASE, Invented, Neighbours, invented_ids
from executor.sampling.sampler import NeighbourSampler, SamplerInputs
from executor.sampling.stored import edges_of_ids, edges_sha256, read_edge_ids, save_edge_ids, top_edges
from executor.sampling.structures import append_rows, expander_neighbours, expander_sources, with_virtual_nodes
from simulator.errors import PlanError, SpecError
from simulator.specs.sampling import NeighbourKind, NeighbourSpec
from tests.executor.sampling_cases import (
    DRAWS,
    KEY,
    case_of,
    id_rows,
    log_weights,
    plain_bits,
    plain_numbered,
    sorted_edges,
    source_rows,
)
from tests.small_graphs import multigraphs

CPU = torch.device("cpu")


def everything(candidates):
    return sampler_of([NeighbourSpec(kind=NeighbourKind.ALL)], candidates).sample(KEY)


def sampler_of(specs, candidates, *, drop_repeats=False, **inputs):
    defaults = {"seed": 1, "num_nodes": candidates.graph.num_sources}
    return NeighbourSampler(specs, candidates, SamplerInputs(**(defaults | inputs)), drop_repeats=drop_repeats)


# --- Expanders.


def adjacency(num_nodes, degree, seed):
    source_ND = expander_sources(num_nodes, degree, seed=seed, device=CPU).numpy()
    matrix = np.zeros((num_nodes, num_nodes))
    np.add.at(matrix, (np.arange(num_nodes)[:, None], source_ND), 1)
    return matrix


@given(num_nodes=st.integers(3, 40), degree=st.sampled_from([2, 4, 6]), seed=st.integers(0, 2**40))
def test_expanders_are_regular_symmetric_connected_and_without_self_loops(num_nodes, degree, seed):
    matrix = adjacency(num_nodes, degree, seed)
    assert (matrix.sum(0) == degree).all()
    assert (matrix.sum(1) == degree).all()
    assert (matrix == matrix.T).all()
    assert (np.diag(matrix) == 0).all()
    assert scipy.sparse.csgraph.connected_components(matrix)[0] == 1


@pytest.mark.parametrize("degree", [4, 6, 10])
@pytest.mark.parametrize("seed", range(3))
def test_the_second_eigenvalue_of_an_expander_is_near_the_least_possible(degree, seed):
    values = np.sort(np.abs(np.linalg.eigvalsh(adjacency(200, degree, seed))))
    assert values[-1] == pytest.approx(degree)
    assert values[-2] < 2 * math.sqrt(degree - 1) * 1.03
    assert values[-2] > 2 * math.sqrt(degree - 1) * 0.95  # no large regular graph is far below (Alon, Boppana)


def test_expanders_of_other_seeds_differ():
    assert (adjacency(50, 4, 1) != adjacency(50, 4, 2)).any()
    assert (adjacency(50, 4, 1) == adjacency(50, 4, 1)).all()


def test_an_expander_holds_the_cycles_of_plain_hashes():
    found = expander_sources(9, 4, seed=7, device=CPU)
    for cycle in range(2):
        key = torch.tensor([7, 0])
        hashes = [plain_numbered(plain_bits(node, key, Stream.EXPANDER), cycle) for node in range(9)]
        signed_hashes = [(number + 2**31) % 2**32 for number in hashes]
        order = sorted(range(9), key=signed_hashes.__getitem__)
        for place, node in enumerate(order):
            assert found[node, 2 * cycle : 2 * cycle + 2].tolist() == [order[place - 1], order[(place + 1) % 9]]


def test_expanders_of_one_and_two_nodes():
    assert expander_sources(0, 4, seed=0, device=CPU).shape == (0, 0)
    assert expander_sources(1, 4, seed=0, device=CPU).shape == (1, 0)
    assert expander_sources(2, 4, seed=0, device=CPU).tolist() == [[1] * 4, [0] * 4]


@given(order=st.permutations(range(12)), border=st.integers(0, 12))
def test_expander_edges_of_a_part_are_those_of_the_whole(order, border):
    whole_sources = expander_sources(12, 4, seed=1, device=CPU)
    edges = sorted_edges([(int(source), node) for node in range(12) for source in whole_sources[node]])
    whole = expander_neighbours(case_of(edges, 12).candidates, 4, num_nodes=12, seed=1)
    for targets in (list(order[:border]), list(order[border:])):
        candidates = case_of(edges, 12, targets=targets).candidates
        part = expander_neighbours(candidates, 4, num_nodes=12, seed=1)
        assert id_rows(part) == [id_rows(whole)[node] for node in targets]
        sources = [candidates.source_id_M[rows].tolist() for rows in source_rows(part)]
        assert sources == whole_sources[targets].tolist()
        assert (part.position_E == -1).all()


def test_an_expander_of_a_part_whose_halo_lacks_its_sources_is_refused():
    candidates = case_of([(1, 0)], 30, targets=[0]).candidates
    with pytest.raises(PlanError, match=r"^\d of 4 sources of the expander must be rows of this part; add its edges"):
        expander_neighbours(candidates, 4, num_nodes=30, seed=1)


# --- Virtual nodes.


@given(graph=multigraphs(max_nodes=6, max_edges=15), num_virtual=st.integers(1, 3))
def test_virtual_nodes_attend_to_all_and_all_attend_to_them(graph, num_virtual):
    edges, num_nodes = sorted_edges(graph[0]), graph[1]
    candidates = case_of(edges, num_nodes).candidates
    found = with_virtual_nodes(everything(candidates), candidates, num_virtual)
    virtual = list(range(num_nodes, num_nodes + num_virtual))
    rows = [[source for source, target in edges if target == node] + virtual for node in range(num_nodes)]
    assert source_rows(found) == rows + [list(range(num_nodes))] * num_virtual
    assert found.graph.num_sources == num_nodes + num_virtual
    ids = found.edge_id_E.tolist()
    assert len(set(ids)) == len(ids)
    assert found.position_E.tolist() == [edge_id if edge_id < INVENTED_BASE else -1 for edge_id in ids]


def test_virtual_rows_of_a_part_come_after_its_halo_and_keep_their_ids():
    edges = sorted_edges([(0, 1), (2, 1), (1, 2), (3, 0)])
    whole_case, part_case = case_of(edges, 4), case_of(edges, 4, targets=[2, 0])
    whole = with_virtual_nodes(everything(whole_case.candidates), whole_case.candidates, 2)
    part = with_virtual_nodes(everything(part_case.candidates), part_case.candidates, 2)
    # Sources: nodes 2 and 0, the halo 1 and 3, then the virtual nodes.
    assert source_rows(part) == [[2, 4, 5], [3, 4, 5], [0, 1], [0, 1]]
    assert id_rows(part)[:2] == [id_rows(whole)[2], id_rows(whole)[0]]
    assert id_rows(part)[2:] == [[row[2], row[0]] for row in id_rows(whole)[4:]]


def test_rows_of_virtual_nodes_are_appended_in_the_format_of_the_others():
    rows = append_rows(torch.ones(3, 2, dtype=torch.bfloat16), torch.tensor([[2.0, 3.0]]))
    assert rows.dtype == torch.bfloat16
    assert rows.tolist() == [[1, 1], [1, 1], [1, 1], [2, 3]]


def test_targets_that_are_no_sources_cannot_be_attended_to_by_virtual_nodes():
    graph = EdgeGraph(indptr_N1=torch.tensor([0, 1, 1]), source_E=torch.zeros(1, dtype=torch.int32), num_sources=1)
    candidates = prepare_candidates(graph)
    with pytest.raises(AssertionError, match="must be sources too"):
        with_virtual_nodes(everything(candidates), candidates, 1)


# --- Sets joined.


def set_of(rows, num_sources=9, ids=None, weights=None):
    flat = [source for row in rows for source in row]
    ids = list(range(len(flat))) if ids is None else ids
    graph = EdgeGraph(
        indptr_N1=torch.tensor([0, *np.cumsum([len(row) for row in rows])]),
        source_E=torch.tensor(flat, dtype=torch.int32),
        num_sources=num_sources,
        edge_id_E=torch.tensor(ids, dtype=torch.int64),
    )
    return Neighbours(
        graph=graph,
        position_E=torch.tensor([-1 if edge_id >= INVENTED_BASE else edge_id for edge_id in ids], dtype=torch.int64),
        log_weight_E=None if weights is None else torch.tensor(weights),
    )


row_lists = st.lists(st.lists(st.integers(0, 8), max_size=4), min_size=5, max_size=5)


@given(parts=st.lists(row_lists, min_size=1, max_size=4))
def test_rows_of_joined_sets_are_the_sets_rows_one_after_another(parts):
    sets, first = [], 0
    for rows in parts:
        size = sum(map(len, rows))
        sets.append(set_of(rows, ids=list(range(first, first + size))))
        first += size
    joined = join_neighbours(sets)
    for row in range(5):
        assert source_rows(joined)[row] == [source for rows in parts for source in rows[row]]
        assert id_rows(joined)[row] == [edge_id for one in sets for edge_id in id_rows(one)[row]]
    assert joined.position_E.tolist() == joined.edge_id_E.tolist()
    assert joined.log_weight_E is None


def test_a_set_without_weights_joins_with_weights_of_zero():
    joined = join_neighbours([set_of([[1], [2]], weights=[0.5, 0.25]), set_of([[3], []])])
    assert log_weights(joined) == [0.5, 0.0, 0.25]


def test_sets_over_different_rows_cannot_be_joined():
    with pytest.raises(AssertionError, match="the same targets and sources"):
        join_neighbours([set_of([[1]]), set_of([[1], []])])


def plain_without_repeats(edges):
    """Return the edges (target, source, id) that remain: each is compared with all before it."""
    kept = []
    for place, (target, source, edge_id) in enumerate(edges):
        before, after = edges[:place], edges[place + 1 :]
        same = [other for other in before if other[2] == edge_id]
        if edge_id >= INVENTED_BASE:
            pair = (target, source)
            same += [other for other in before if other[:2] == pair]
            same += [other for other in after if other[:2] == pair and other[2] < INVENTED_BASE]
        if not same:
            kept.append((target, source, edge_id))
    return kept


@given(data=st.data())
def test_repeats_are_dropped_as_plain_comparison_does(data):
    # Ids 0 to 11 are real edges, each of one pair; the others are invented.
    pairs = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=12, max_size=12))
    sets = []
    for _ in range(3):
        real = data.draw(st.lists(st.integers(0, 11), max_size=4, unique=True))
        invented = data.draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 30)), max_size=4))
        edges = [(*pairs[edge_id], edge_id) for edge_id in real]
        # An id of an invented edge tells its pair, as those of the package do.
        edges += [
            (target, source, INVENTED_BASE + 9 * number + 3 * target + source) for target, source, number in invented
        ]
        edges.sort(key=lambda edge: edge[0])
        rows = [[source for target, source, _ in edges if target == row] for row in range(3)]
        sets.append(set_of(rows, ids=[edge_id for _, _, edge_id in edges]))
    whole = join_neighbours(sets)
    edges = list(
        zip(whole.graph.target_E.tolist(), whole.graph.source_E.tolist(), whole.edge_id_E.tolist(), strict=True)
    )
    kept = join_neighbours(sets, drop_repeats=True)
    wanted = plain_without_repeats(edges)
    assert [(t, s) for t, row in enumerate(source_rows(kept)) for s in row] == [edge[:2] for edge in wanted]
    assert kept.edge_id_E.tolist() == [edge[2] for edge in wanted]


@given(rows=row_lists)
def test_a_graph_of_an_array_of_neighbours_has_its_rows(rows):
    neighbour_ND = torch.full((5, 4), -1)
    for row, sources in enumerate(rows):
        neighbour_ND[row, : len(sources)] = torch.tensor(sources, dtype=torch.int64)
    edge_id_ND = torch.arange(20).reshape(5, 4)
    graph = fan_out_graph(neighbour_ND, neighbour_ND >= 0, num_sources=9, edge_id_ND=edge_id_ND)
    neighbours = Neighbours(graph=graph, position_E=edge_id_ND[:0, 0])
    assert source_rows(neighbours) == rows
    assert id_rows(neighbours) == [list(range(4 * row, 4 * row + len(sources))) for row, sources in enumerate(rows)]


def test_a_full_array_of_neighbours_needs_no_mask():
    neighbour_ND = torch.tensor([[3, 1], [0, 0], [2, 4]])
    full = fan_out_graph(neighbour_ND, num_sources=5)
    masked = fan_out_graph(neighbour_ND, neighbour_ND >= 0, num_sources=5)
    for graph in (full, masked):
        assert graph.indptr_N1.tolist() == [0, 2, 4, 6]
        assert graph.source_E.tolist() == [3, 1, 0, 0, 2, 4]
        assert graph.edge_id_E is None
        assert graph.num_sources == 5


def test_ids_of_invented_edges_are_apart_for_the_largest_graphs():
    last = torch.tensor([2**31 - 1])
    ids = [
        invented_ids(kind, node, torch.tensor(number), 2**16)
        for kind in Invented
        for node, number in ((last * 0, 0), (last, 2**16 - 1))
    ]
    numbers = [int(edge_id) for edge_id in ids]
    assert numbers == sorted(set(numbers))
    assert numbers[0] == INVENTED_BASE
    assert numbers[-1] < 2**62


# --- Stored choices.


def made_case():
    rng = np.random.default_rng(0)
    edges = sorted_edges([(int(s), int(t)) for s, t in rng.integers(0, 12, (80, 2))])
    return edges, torch.from_numpy(rng.integers(0, 5, 80)).float()


def test_the_edges_of_the_largest_scores_are_chosen_in_the_order_that_was_given():
    edges, score_E = made_case()
    shuffled = case_of(edges, 12, shuffle_seed=3).candidates
    kept = top_edges(shuffled, 3, score_E[shuffled_ids(edges)])
    for node, ids in enumerate(id_rows(kept)):
        own = [edge_id for edge_id, edge in enumerate(edges) if edge[1] == node]
        assert ids == sorted(sorted(own, key=lambda edge_id: (-score_E[edge_id].item(), edge_id))[:3])


def shuffled_ids(edges):
    """Return the ids of edges in the order in memory of the shuffled case."""
    position_E = case_of(edges, 12, shuffle_seed=3).candidates.given_positions(torch.arange(len(edges)))
    ids = torch.empty_like(position_E)
    ids[position_E] = torch.arange(len(edges))
    return ids


@given(order=st.permutations(range(12)), border=st.integers(0, 12))
def test_a_stored_choice_is_the_same_in_any_cut(order, border):
    edges, score_E = made_case()
    whole = top_edges(case_of(edges, 12).candidates, 3, score_E)
    for targets in (list(order[:border]), list(order[border:])):
        part = edges_of_ids(case_of(edges, 12, targets=targets, shuffle_seed=1).candidates, whole.edge_id_E)
        assert id_rows(part) == [id_rows(whole)[node] for node in targets]


def test_no_stored_edges_leave_rows_empty():
    edges, _ = made_case()
    none = edges_of_ids(case_of(edges, 12).candidates, torch.zeros(0, dtype=torch.int64))
    assert id_rows(none) == [[]] * 12


SHA256 = edges_sha256(np.array([0, 2, 3]), np.array([1, 0, 1], dtype=np.int32))


def test_stored_ids_come_back_sorted(tmp_path):
    path = tmp_path / "kept.npz"
    save_edge_ids(path, torch.tensor([5, 0, 3]), fan_out=4, num_edges=6, edges_sha256=SHA256)
    found = read_edge_ids(path, fan_out=4, num_edges=6, edges_sha256=SHA256)
    assert found.tolist() == [0, 3, 5]
    assert found.dtype == torch.int64
    assert [file.name for file in tmp_path.iterdir()] == ["kept.npz"]


def test_the_hash_of_edges_depends_on_their_order():
    assert edges_sha256(np.array([0, 2, 3]), np.array([0, 1, 1], dtype=np.int32)) != SHA256


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"edges_sha256": np.array("abc")},
            f"edges_sha256 must be {SHA256} as the graph's, got abc; choose neighbours",
        ),
        ({"edges_sha256": np.array(3)}, "edges_sha256 must be a text in the file, got none; choose neighbours again"),
        ({"num_edges": np.array(7)}, "num_edges must be 6, got 7; choose neighbours again for this graph"),
        ({"fan_out": np.array(3)}, "fan_out must be 4, got 3; choose neighbours again for this graph"),
        ({"fan_out": np.array([4])}, "fan_out must have shape [], got [1]; reshape it before saving"),
        ({"edge_id": np.array([[0, 1]])}, "edge_id must have shape [kept], got [1, 2]; reshape it before saving"),
        ({"edge_id": np.array([0.5])}, "edge_id must hold integers, got float64; convert it before saving"),
        (
            {"edge_id": np.array([0, 6])},
            "edge_id[1] must be within 0 and 5, got 6; choose neighbours again for this graph",
        ),
        ({"edge_id": np.array([2, 1])}, "edge_id[1] must exceed the one before it, got 1; choose neighbours again"),
        ({"edge_id": None}, "edge_id must be in the store, got only fan_out, num_edges, edges_sha256; save it too"),
    ],
)
def test_a_stored_choice_of_another_graph_is_refused(tmp_path, changes, message):
    path = tmp_path / "kept.npz"
    arrays = {
        "edge_id": np.arange(6),
        "fan_out": np.array(4),
        "num_edges": np.array(6),
        "edges_sha256": np.array(SHA256),
    }
    np.savez(path, **{name: array for name, array in (arrays | changes).items() if array is not None})
    with pytest.raises(SpecError) as caught:
        read_edge_ids(path, fan_out=4, num_edges=6, edges_sha256=SHA256)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_missing_or_damaged_file_is_refused(tmp_path):
    path = tmp_path / "kept.npz"
    with pytest.raises(SpecError, match=r"kept\.npz: path must be an \.npz file"):
        read_edge_ids(path, fan_out=4, num_edges=6, edges_sha256=SHA256)
    path.write_text("no zip")
    with pytest.raises(SpecError, match=r"kept\.npz must be whole in an \.npz file"):
        read_edge_ids(path, fan_out=4, num_edges=6, edges_sha256=SHA256)


# --- Samplers of specs.

SPECS = {
    "uniform": NeighbourSpec(kind=NeighbourKind.UNIFORM, fan_out=3),
    "degree": NeighbourSpec(kind=NeighbourKind.DEGREE, fan_out=3, degree_exponent=0.5),
    "projection_top_k": NeighbourSpec(kind=NeighbourKind.PROJECTION_TOP_K, fan_out=3, projection_width=2),
    "projection_drawn": NeighbourSpec(kind=NeighbourKind.PROJECTION_DRAWN, fan_out=3, projection_width=2),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_sampler_draws_what_the_function_of_its_kind_draws(draw):
    edges, _ = made_case()
    case = case_of(edges, 12)
    sampler = sampler_of([SPECS[draw]], case.candidates, source_degree_M=case.degree)
    for step in range(3):
        key = torch.tensor([3, step])
        assert id_rows(sampler.sample(key, case.q, case.k)) == id_rows(DRAWS[draw](case, 3, key))


def test_a_sampler_joins_all_kinds_with_virtual_nodes_last():
    edges, score_E = made_case()
    case = case_of(edges, 12)
    stored = top_edges(case.candidates, 2, score_E)
    specs = [
        NeighbourSpec(kind=NeighbourKind.VIRTUAL, num_virtual_nodes=1),
        NeighbourSpec(kind=NeighbourKind.EXPANDER, fan_out=4),
        NeighbourSpec(kind=NeighbourKind.STORED, fan_out=2, path="kept.npz"),
        SPECS["uniform"],
        NeighbourSpec(kind=NeighbourKind.RANDOM_WALK, fan_out=3, num_walks=4, walk_length=2),
    ]
    inputs = {"stored_id_K": stored.edge_id_E, "seed": 9}
    found = sampler_of(specs, case.candidates, **inputs).sample(KEY)
    walks = sampler_of(specs[4:], case.candidates).sample(KEY)
    expander = expander_neighbours(case.candidates, 4, num_nodes=12, seed=9)
    parts = [expander, stored, sample_uniform(case.candidates, 3, KEY), walks]
    for node in range(12):
        assert id_rows(found)[node][:-1] == [edge_id for part in parts for edge_id in id_rows(part)[node]]
        assert source_rows(found)[node][-1] == 12
    assert source_rows(found)[12] == list(range(12))
    lean = sampler_of(specs, case.candidates, drop_repeats=True, **inputs).sample(KEY)
    for row, sources in enumerate(source_rows(lean)):
        ids = id_rows(lean)[row]
        assert len(set(ids)) == len(ids)
        invented = [source for source, edge_id in zip(sources, ids, strict=True) if edge_id >= INVENTED_BASE]
        own = {source for source, edge_id in zip(sources, ids, strict=True) if edge_id < INVENTED_BASE}
        assert len(set(invented)) == len(invented)
        assert not own & set(invented)
        assert set(sources) == set(source_rows(found)[row])


def test_neighbours_that_never_change_are_made_once():
    edges, _ = made_case()
    sampler = sampler_of([NeighbourSpec(kind=NeighbourKind.ALL)], case_of(edges, 12).candidates)
    assert sampler.sample(KEY) is sampler.sample(KEY + 1)
    assert id_rows(sampler.sample(KEY)) == [
        [edge_id for edge_id, edge in enumerate(edges) if edge[1] == node] for node in range(12)
    ]


def test_a_learned_projection_is_taken_as_it_is():
    edges, _ = made_case()
    case = case_of(edges, 12)
    spec = dataclasses.replace(SPECS["projection_top_k"], projection_width=6)
    learned = torch.eye(case.k[0].numel())
    sampler = sampler_of([spec], case.candidates, projection_DR=learned)
    assert id_rows(sampler.sample(KEY, case.q, case.k)) == id_rows(sampler.sample(KEY + 1, case.q, case.k))
