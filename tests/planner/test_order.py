"""Orders of nodes: what they are, what they spare, and when one is chosen."""

import dataclasses
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import metis, order
from planner.order import CELL_NODES, choose_order, order_graph, order_localities
from planner.partition import partition_graph
from simulator.readers.graphs import Graph, read_graph
from simulator.readers.locality import locality, window_reuse
from simulator.readers.orders import read_order
from simulator.readers.partitions import read_partition
from simulator.specs.cluster import H200, DeviceKind, DeviceSpec
from simulator.specs.graph import GraphFile
from simulator.specs.order import NodeOrder, OrderSpec, RankedOrder
from simulator.specs.plan import Plan
from simulator.specs.search import SearchSpec
from simulator.specs.units import Dtype
from tests.made import made_cluster, made_model, made_plan
from tests.small_graphs import Edges, edges_of, graph_of, multigraphs, shuffled_communities

NATURAL, DEGREE, REVERSE_CUTHILL_MCKEE, METIS = NodeOrder
MODEL = made_model()
ROW_BYTES = 2 * 16 * 4  # keys and values, width 16, fp32
DEVICE = dataclasses.replace(made_cluster(kind=DeviceKind.CUDA).device, cache_bytes=200 * ROW_BYTES)


def ordered(graph: Graph, kind: NodeOrder, folder: Path, *, seed: int = 0) -> np.ndarray:
    """Return the nodes in an order, read from its file as a run does."""
    spec = order_graph(graph, kind, seed=seed, folder=folder)
    assert spec.kind is kind
    order_N = read_order(spec, folder=folder, num_nodes=graph.num_nodes)
    return np.arange(graph.num_nodes) if order_N is None else order_N


def undirected(edges: Edges, num_nodes: int) -> Graph:
    return graph_of([*edges, *((target, source) for source, target in edges)], num_nodes)


def bandwidth(graph: Graph, order_N: np.ndarray) -> int:
    """Return the largest distance between the ends of an edge in an order."""
    place_N = np.argsort(order_N)
    return int(np.abs(place_N[graph.source_E] - place_N[graph.target_E]).max())


# --- The orders.


@settings(max_examples=25)
@given(multigraphs(), st.sampled_from(NodeOrder))
def test_an_order_holds_each_node_once_and_is_the_same_again(multigraph, kind):
    graph = graph_of(*multigraph)
    with tempfile.TemporaryDirectory() as name:
        found = ordered(graph, kind, Path(name))
        again = ordered(graph, kind, Path(name) / "again")
    assert sorted(found.tolist()) == [*range(graph.num_nodes)]
    assert found.tolist() == again.tolist()


@given(multigraphs())
def test_the_most_attending_nodes_come_first_and_equal_ones_stay_in_order(multigraph):
    edges, num_nodes = multigraph
    in_degrees = [sum(target == node for _, target in edges) for node in range(num_nodes)]
    with tempfile.TemporaryDirectory() as name:
        found = ordered(graph_of(edges, num_nodes), DEGREE, Path(name))
    assert found.tolist() == sorted(range(num_nodes), key=lambda node: (-in_degrees[node], node))


@pytest.mark.parametrize("seed", range(3))
def test_reverse_cuthill_mckee_lays_a_shuffled_path_straight(tmp_path, seed):
    node_N = np.random.default_rng(seed).permutation(50)
    graph = undirected([(int(node_N[place]), int(node_N[place + 1])) for place in range(49)], 50)
    assert bandwidth(graph, np.arange(50)) > 10
    assert bandwidth(graph, ordered(graph, REVERSE_CUTHILL_MCKEE, tmp_path)) == 1


@pytest.mark.parametrize("seed", range(3))
def test_reverse_cuthill_mckee_finds_the_bands_of_a_shuffled_grid(tmp_path, seed):
    side = 12
    node_N = np.random.default_rng(seed).permutation(side * side).reshape(side, side)
    across = zip(node_N[:, :-1].flat, node_N[:, 1:].flat, strict=True)
    down = zip(node_N[:-1].flat, node_N[1:].flat, strict=True)
    graph = undirected([(int(one), int(other)) for one, other in [*across, *down]], side * side)
    # No order of a square grid has a smaller bandwidth than its side; breadth first from a corner takes diagonals.
    assert side <= bandwidth(graph, ordered(graph, REVERSE_CUTHILL_MCKEE, tmp_path)) <= side + 1
    assert bandwidth(graph, np.arange(side * side)) > 5 * side


def test_the_cells_of_metis_are_runs_of_near_neighbours_and_lonely_nodes_come_last(tmp_path, monkeypatch):
    cells_seen: list[Any] = []

    def kept_cells(*args, **kwargs):
        cells_seen.append(metis.metis_parts(*args, **kwargs))
        return cells_seen[-1]

    monkeypatch.setattr(order, "metis_parts", kept_cells)
    graph, _ = shuffled_communities(num_nodes=1024)
    edges = list(zip(graph.source_E.tolist(), graph.target_E.tolist(), strict=True))
    found = ordered(graph_of(edges, 1030), METIS, tmp_path)  # and six nodes without edges
    (cell_N,) = cells_seen
    assert len(set(cell_N.tolist())) == 1024 // CELL_NODES
    assert sorted(found[1024:].tolist()) == [*range(1024, 1030)]
    runs = cell_N[found[:1024]]
    assert np.count_nonzero(np.diff(runs)) == 1024 // CELL_NODES - 1
    assert runs.tolist() == sorted(runs)


def test_a_graph_too_small_for_cells_is_in_the_order_of_its_bands(tmp_path):
    graph = undirected([(node, node + 1) for node in range(40)], 45)
    found = ordered(graph, METIS, tmp_path)
    assert found[:41].tolist() in ([*range(41)], [*range(40, -1, -1)])
    assert sorted(found[41:].tolist()) == [41, 42, 43, 44]


@pytest.mark.parametrize("num_rows", [16, 64])
def test_metis_regains_most_of_the_sources_that_windows_of_a_shuffled_community_graph_share(tmp_path, num_rows):
    # Windows of 16 and 64: 2.15 and 3.72 community by community, 1.19 and 1.64 shuffled, 2.17 and 3.73 by METIS.
    graph, by_community_N = shuffled_communities(degree=32)
    best = window_reuse(graph, by_community_N, num_rows=num_rows)
    shuffled = window_reuse(graph, np.arange(graph.num_nodes), num_rows=num_rows)
    found = window_reuse(graph, ordered(graph, METIS, tmp_path), num_rows=num_rows)
    assert best > 1.5 * shuffled
    assert found - shuffled > 0.9 * (best - shuffled)


def test_a_real_graph_in_metis_order_shares_more_and_leaves_less_to_come_from_beyond_a_cache(shared_data, tmp_path):
    _, graph = read_graph(GraphFile(path="coauthor-physics.npz"), base=shared_data)
    found = order_localities(graph, seed=0, folder=tmp_path, cache_rows=(1024,))
    assert list(found) == list(NodeOrder)
    # Of an LRU cache that was simulated read by read: 0.940, 0.919, 0.550 and 0.27 come from beyond it.
    beyond = {kind: measured.beyond_cache_ratios[0] for kind, measured in found.items()}
    assert beyond[NATURAL] == pytest.approx(0.940, abs=0.03)
    assert beyond[DEGREE] == pytest.approx(0.919, abs=0.03)
    assert beyond[REVERSE_CUTHILL_MCKEE] == pytest.approx(0.550, abs=0.03)
    assert beyond[METIS] == pytest.approx(0.27, abs=0.05)
    assert found[NATURAL].window_16_reuse < 1.02
    assert found[METIS].window_16_reuse > 1.6


# --- Files.


def test_an_order_is_found_again_and_a_damaged_file_is_not_used(tmp_path, monkeypatch):
    graph, _ = shuffled_communities(num_nodes=512)
    spec = order_graph(graph, METIS, seed=0, folder=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(order, "metis_parts", None)
        assert order_graph(graph, METIS, seed=0, folder=tmp_path) == spec
    (tmp_path / spec.path).write_bytes(b"half")
    assert order_graph(graph, METIS, seed=0, folder=tmp_path) == spec


def test_orders_of_two_graphs_and_seeds_share_a_folder(tmp_path):
    graphs = [graph_of([(0, 1), (1, 2)], 3), graph_of([(0, 1), (0, 2)], 3)]
    paths = {order_graph(graph, DEGREE, seed=seed, folder=tmp_path).path for graph in graphs for seed in (0, 1)}
    assert len(paths) == 4


def test_without_metis_the_order_stays_natural_with_a_warning_that_says_why(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(order, "metis_parts", lambda *args, **kwargs: "it was stopped after 9 s")
    graph, _ = shuffled_communities(num_nodes=512)
    with caplog.at_level(logging.WARNING):
        assert order_graph(graph, METIS, seed=0, folder=tmp_path) == OrderSpec()
    [record] = caplog.records
    assert record.getMessage() == (
        "METIS could not order the nodes: it was stopped after 9 s; the natural order is used instead"
    )
    assert METIS not in order_localities(graph, seed=0, folder=tmp_path, cache_rows=(9,))
    assert not list(tmp_path.glob("order-metis*"))


# --- The choice.


def chosen(
    graph: Graph,
    folder: Path,
    *,
    device: DeviceSpec = DEVICE,
    search: SearchSpec | None = None,
    num_parts: int = 1,
    **fields: Any,
) -> tuple[OrderSpec, dict[NodeOrder, RankedOrder]]:
    """Return the order that a plan of a full graph, unless fields say otherwise, is given, and what was tried."""
    partition = partition_graph(graph, num_parts, seed=0, folder=folder)
    plan: Plan = made_plan(partition, **fields)
    spec, tried = choose_order(graph, plan, MODEL, device, search or SearchSpec(), folder=folder)
    return spec, {found.kind: found for found in tried}


def test_the_order_that_spares_most_is_chosen_and_all_that_were_tried_are_told(tmp_path):
    graph, _ = shuffled_communities()
    spec, tried = chosen(graph, tmp_path)
    assert spec.kind is METIS
    assert set(tried) == set(NodeOrder)
    assert tried[NATURAL].relative_seconds == 1
    assert min(tried.values(), key=lambda found: found.relative_seconds).kind is METIS
    order_N = read_order(spec, folder=tmp_path, num_nodes=graph.num_nodes)
    assert order_N is not None
    measured = locality(graph, order_N, cache_rows=(200,))
    assert tried[METIS].window_16_reuse == measured.window_16_reuse
    assert (tried[METIS].beyond_cache_ratio,) == measured.beyond_cache_ratios
    assert tried[METIS].row_bytes == ROW_BYTES


def test_predicted_seconds_by_hand(tmp_path):
    graph, _ = shuffled_communities()
    _, tried = chosen(graph, tmp_path)
    # A row from beyond an H200's cache takes 8.7 / 4.0 times as long as one out of it.
    natural, found = tried[NATURAL].beyond_cache_ratio, tried[METIS].beyond_cache_ratio
    expected = (found / 4.0 + (1 - found) / 8.7) / (natural / 4.0 + (1 - natural) / 8.7)
    assert tried[METIS].relative_seconds == pytest.approx(expected)
    assert expected < 0.8


def test_half_the_bytes_of_a_number_leave_twice_the_rows_in_the_cache(tmp_path):
    graph, _ = shuffled_communities()
    _, tried = chosen(graph, tmp_path, precision=Dtype.BFLOAT16)
    assert tried[NATURAL].row_bytes == ROW_BYTES // 2
    expected = locality(graph, np.arange(graph.num_nodes), cache_rows=(400,)).beyond_cache_ratios
    assert (tried[NATURAL].beyond_cache_ratio,) == expected


def test_a_graph_whose_order_is_good_keeps_it(tmp_path):
    # Each node attends to those within eight places, and no order is better than that.
    edges = [(node + step, node) for node in range(8, 992) for step in range(-8, 9)]
    spec, tried = chosen(graph_of(edges, 1000), tmp_path)
    assert spec == OrderSpec()
    assert set(tried) == {NATURAL}  # every row is read once already
    assert list(tmp_path.glob("order-*")) == []


def test_a_gain_below_the_threshold_leaves_the_natural_order(tmp_path, monkeypatch):
    graph, _ = shuffled_communities()
    only_degree = SearchSpec(orders=(NATURAL, DEGREE))
    spec, tried = chosen(graph, tmp_path, search=only_degree)
    assert tried[DEGREE].relative_seconds == pytest.approx(1, abs=0.05)  # all nodes have the same degree
    assert spec == OrderSpec()
    monkeypatch.setattr(order, "MIN_GAIN_RATIO", -1.0)
    assert chosen(graph, tmp_path, search=only_degree)[0].kind is DEGREE


def test_a_graph_that_fits_the_cache_is_left_alone(tmp_path):
    graph, _ = shuffled_communities()
    spec, tried = chosen(graph, tmp_path, device=H200)
    assert (spec, set(tried)) == (OrderSpec(), {NATURAL})
    assert tried[NATURAL].beyond_cache_ratio == pytest.approx(2048 / (2048 * 24))


def test_a_cache_of_unknown_size_lets_no_order_gain(tmp_path):
    graph, _ = shuffled_communities()
    spec, tried = chosen(graph, tmp_path, device=dataclasses.replace(DEVICE, cache_bytes=0))
    assert (spec, set(tried)) == (OrderSpec(), {NATURAL})


@pytest.mark.parametrize("kind", NodeOrder)
def test_the_only_order_that_is_allowed_is_taken_without_a_question(tmp_path, kind):
    graph, _ = shuffled_communities(num_nodes=512)
    spec, tried = chosen(graph, tmp_path, search=SearchSpec(orders=(kind,)), device=H200)
    assert (spec.kind, tried) == (kind, {})


def test_without_the_natural_order_the_best_of_the_others_is_taken_whatever_it_gains(tmp_path):
    graph, _ = shuffled_communities()
    search = SearchSpec(orders=(DEGREE, REVERSE_CUTHILL_MCKEE))
    spec, tried = chosen(graph, tmp_path, search=search, device=dataclasses.replace(DEVICE, cache_bytes=0))
    assert spec.kind in search.orders
    assert set(tried) == {NATURAL, DEGREE, REVERSE_CUTHILL_MCKEE}


def test_without_metis_the_best_of_the_others_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(order, "metis_parts", lambda *args, **kwargs: "it needs more memory")
    graph, _ = shuffled_communities()
    spec, tried = chosen(graph, tmp_path)
    assert METIS not in tried
    best = min(tried.values(), key=lambda found: found.relative_seconds)
    assert spec.kind is (best.kind if best.relative_seconds <= 0.95 else NATURAL)


def test_the_nodes_of_a_part_are_near_one_another_already(tmp_path):
    # In sixteen parts of a community each, what comes from beyond the cache falls from 86 to a third, as by METIS.
    graph, _ = shuffled_communities()
    _, whole = chosen(graph, tmp_path)
    spec, cut = chosen(graph, tmp_path, num_parts=16)
    assert spec == OrderSpec()
    assert cut[NATURAL].beyond_cache_ratio == pytest.approx(whole[METIS].beyond_cache_ratio, abs=0.03)
    assert cut[NATURAL].beyond_cache_ratio < 0.5 * whole[NATURAL].beyond_cache_ratio


def test_of_cluster_batches_only_the_edges_inside_parts_count(tmp_path):
    graph, _ = shuffled_communities()
    _, batches = chosen(graph, tmp_path, num_parts=16, graph_parallel_degree=1, parts_per_batch=1)
    # A community fits the cache, so that each of the 2,048 rows is read from beyond it once.
    part_N = read_partition(
        partition_graph(graph, 16, seed=0, folder=tmp_path), folder=tmp_path, num_nodes=graph.num_nodes
    )
    num_inside = sum(part_N[source] == part_N[target] for source, target in edges_of(graph))
    assert batches[NATURAL].beyond_cache_ratio == pytest.approx(2048 / num_inside, abs=0.01)
