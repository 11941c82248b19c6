"""Comparing fan-outs on a small graph: what must hold for any, and what the command prints."""

import json
from pathlib import Path

import pytest

from executor.fanout import compare_fan_outs
from planner.partition import partition_graph
from simulator.errors import PlanError
from simulator.readers.graphs import read_graph
from simulator.specs.fanout import FanoutComparison, FanoutSpec, neighbours_text
from simulator.specs.files import read_fanout
from simulator.specs.graph import GraphFile
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.run import RunSpec
from simulator.specs.sampling import NeighbourKind
from simulator.specs.train import TrainSpec
from tests.executor.commands import graph_arrays, run_here, write_graph, write_run

MODEL = ModelSpec(
    width=16, num_heads=4, num_layers=2, feed_forward_width=32, dropout_ratio=0.2, edge_bias=EdgeBias.DEGREE
)
TRAIN = TrainSpec(num_steps=50, learning_rate=0.01, warmup_steps=20, evaluate_every_steps=2)
KINDS = (
    NeighbourKind.UNIFORM,
    NeighbourKind.DEGREE,
    NeighbourKind.RANDOM_WALK,
    NeighbourKind.PROJECTION_TOP_K,
    NeighbourKind.PROJECTION_DRAWN,
)


def compared(folder: Path, **fields) -> FanoutComparison:
    """Compare fan-outs on a random graph of 60 nodes with 300 edges and self loops."""
    path = write_graph(folder)
    spec, graph = read_graph(GraphFile(path=str(path)), base=folder)
    fanout = FanoutSpec(**{"num_steps": 4, "fan_outs": (2, 100), **fields})
    run = RunSpec(graph=spec.source, model=MODEL, cluster=None, train=TRAIN, fanout=fanout)
    return compare_fan_outs(run, spec, graph, partition_graph(graph, 1, seed=0, folder=folder))


def test_every_choice_is_compared_and_fan_outs_above_all_degrees_are_all_edges(tmp_path):
    found = compared(tmp_path, samplers=KINDS, visits_per_neighbour=1)
    names = [neighbours_text(row.neighbours) for row in found.rows]
    assert names == ["all nodes", "all edges", *(f"{kind} {fan_out}" for kind in KINDS for fan_out in (2, 100))]
    rows = dict(zip(names, found.rows, strict=True))
    every, nodes = rows["all edges"], rows["all nodes"]
    assert nodes.full_error_ratio == every.edges_error_ratio == 0
    assert nodes.edges_error_ratio > 0.01
    source_E, target_E = graph_arrays()["edge_index"]
    num_edges = int((source_E != target_E).sum()) + 60
    assert (nodes.num_edges_per_step, every.num_edges_per_step) == (2 * 60**2, 2 * num_edges)
    assert (found.region_nodes, found.region_edges) == (60, num_edges)
    for kind in KINDS:
        few, wide = rows[f"{kind} 2"], rows[f"{kind} 100"]
        assert few.num_edges_per_step <= 2 * 60 * 2
        assert few.edges_error_ratio > 0.05
        if kind is not NeighbourKind.RANDOM_WALK:
            assert wide.edges_error_ratio < 1e-5
            assert wide.num_edges_per_step == every.num_edges_per_step
            assert wide.val_accuracy_ratio == pytest.approx(every.val_accuracy_ratio)


def test_the_same_seed_gives_the_same_comparison(tmp_path):
    fields = {"fan_outs": (2,), "samplers": (NeighbourKind.UNIFORM,), "num_seeds": 2, "subgraph_nodes": 20}
    first = compared(tmp_path, **fields)
    assert first == compared(tmp_path, **fields)
    assert first.region_nodes == 20


def test_a_graph_above_the_bound_is_compared_with_all_edges_alone(tmp_path):
    found = compared(tmp_path, max_full_nodes=59, samplers=(NeighbourKind.UNIFORM,))
    assert [neighbours_text(row.neighbours) for row in found.rows] == ["all edges", "uniform 2", "uniform 100"]
    assert found.reference == found.rows[0]
    assert found.rows[0].full_error_ratio > 0.01


def test_the_loss_term_of_structure_brings_full_attention_closer_to_the_edges(tmp_path):
    fields = {"samplers": (NeighbourKind.RANDOM_WALK,), "fan_outs": (4,), "num_steps": 10}
    without, with_term = compared(tmp_path, **fields), compared(tmp_path, **fields, structure_weight=10.0)
    for before, after in zip(without.rows, with_term.rows, strict=True):
        assert before.num_edges_per_step == after.num_edges_per_step
    # Tied to the edges, attention over all nodes is closer to attention over all edges.
    assert with_term.rows[0].edges_error_ratio < 0.9 * without.rows[0].edges_error_ratio


@pytest.mark.parametrize("mask", ["train_mask", "val_mask"])
def test_a_graph_without_nodes_to_train_on_or_to_validate_on_is_refused(tmp_path, mask):
    arrays = graph_arrays()
    arrays[mask] = arrays[mask] & False
    path = write_graph(tmp_path, arrays)
    spec, graph = read_graph(GraphFile(path=str(path)), base=tmp_path)
    run = RunSpec(graph=spec.source, model=MODEL, cluster=None, train=TRAIN)
    with pytest.raises(PlanError, match=f"graph.npz: {mask} must hold a node to compare fan-outs, got none; save y"):
        compare_fan_outs(run, spec, graph, partition_graph(graph, 1, seed=0, folder=tmp_path))


# --- The command.

FANOUT = '[fanout]\nfan_outs = [2, 100]\nsamplers = ["uniform"]\nnum_steps = 3\n'


def test_the_command_prints_a_table_and_the_smallest_fan_out_and_writes_a_file(tmp_path, monkeypatch, capfd):
    write_graph(tmp_path)
    done = run_here(
        monkeypatch, capfd, "fanout", write_run(tmp_path, extra=FANOUT), "--out", tmp_path / "out" / "fanout.json"
    )
    assert done.status == 0
    lines = done.out.splitlines()
    assert lines[0].split() == [
        *("attention", "over", "off", "all", "nodes", "off", "all", "edges", "validation", "edges", "a", "step")
    ]
    assert [" ".join(line.split()[:2]) for line in lines[1:5]] == ["all nodes", "all edges", "uniform 2", "uniform 100"]
    assert any("fan-out" in line and "within 0.01 of all" in line for line in lines)
    assert "all nodes, choice 1 of 4: seed 0, step 3 of 3, validation accuracy" in done.err
    found = read_fanout(tmp_path / "out" / "fanout.json")
    assert found.spec == FanoutSpec(fan_outs=(2, 100), samplers=(NeighbourKind.UNIFORM,), num_steps=3)
    assert len(found.rows) == 4


def test_the_command_prints_one_object_for_programs_and_nothing_when_quiet(tmp_path, monkeypatch, capfd):
    write_graph(tmp_path)
    arguments = ("fanout", write_run(tmp_path, extra=FANOUT), "--out", tmp_path / "fanout.json")
    done = run_here(monkeypatch, capfd, *arguments, "--json")
    content = json.loads(done.out)
    assert (done.status, done.err) == (0, "")
    assert content["reference"] in content["rows"]
    assert content["smallest"] is None or content["smallest"] in content["rows"]
    assert run_here(monkeypatch, capfd, *arguments, "--quiet").out == ""


def test_a_sampler_without_a_fan_out_is_refused_in_a_sentence(tmp_path, monkeypatch, capfd):
    write_graph(tmp_path)
    path = write_run(tmp_path, extra='[fanout]\nsamplers = ["virtual"]\n')
    done = run_here(monkeypatch, capfd, "fanout", path, "--out", tmp_path / "fanout.json")
    assert done.status == 2
    assert done.err.startswith(f"graphpilot: {path}: fanout.samplers must name some of uniform, degree, random_walk,")
