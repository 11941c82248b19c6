"""Which weights a run keeps, in which order; what it writes is tested by the commands and the conformance tests."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from executor.history import is_better
from executor.run import PlanRun, _work, warmup_steps_of, with_cache_ratios
from executor.train import Evaluation
from planner.order import order_graph
from simulator.errors import SpecError
from simulator.readers.graphs import read_graph, write_store
from simulator.simulation import simulate
from simulator.specs.graph import GraphFile
from simulator.specs.order import NodeOrder
from simulator.specs.program import TaskKind
from simulator.specs.train import TrainSpec
from tests.executor.made_graphs import awkward_graph
from tests.made import equal_parts, graph_of, made_calibration, made_cluster, made_model, made_plan
from tests.plans import Choices, plan_file_of, plan_of


def evaluation(val_accuracy_ratio: float) -> Evaluation:
    return Evaluation(train_accuracy_ratio=0.9, val_accuracy_ratio=val_accuracy_ratio, test_accuracy_ratio=0.1)


@pytest.mark.parametrize(
    ("val", "best", "has_val_nodes", "kept"),
    [
        (0.5, None, True, True),
        (0.6, 0.5, True, True),
        (0.5, 0.5, True, False),  # the first of equals
        (0.4, 0.5, True, False),
        (0.0, 0.0, False, True),  # nothing to judge by: the last
    ],
)
def test_the_weights_of_the_best_validation_are_kept(val, best, has_val_nodes, kept):
    found = is_better(evaluation(val), None if best is None else evaluation(best), has_val_nodes=has_val_nodes)
    assert found is kept


def test_a_short_run_leaves_steps_to_be_timed():
    assert [warmup_steps_of(steps) for steps in (1, 3, 6, 15, 1000)] == [0, 1, 2, 5, 5]


def test_a_trace_tells_as_the_plan_does_which_rows_attention_found_in_the_cache():
    partition = equal_parts(1, num_nodes=100, num_edges=1000)
    graph, model, cluster = graph_of(partition), made_model(), made_cluster()
    plan = made_plan(partition, beyond_cache_ratio=0.4)
    trace = simulate(plan, graph, model, cluster, made_calibration())
    # As the recorder gives them, spans know nothing of it.
    bare = replace(trace, spans=tuple(replace(span, beyond_cache_ratio=None) for span in trace.spans))
    assert with_cache_ratios(bare, plan, cluster) == trace
    assert {span.beyond_cache_ratio for span in trace.spans if span.kind is TaskKind.ATTENTION} == {0.4}


# --- The order of the nodes, read from its file.


def planned(folder: Path, kind: NodeOrder) -> PlanRun:
    """Write a graph, an order of its nodes, and a plan on one rank."""
    if not (folder / "graph").exists():
        write_store(awkward_graph(), folder / "graph")
    spec, graph = read_graph(GraphFile(path="graph"), base=folder)
    model = made_model(dropout_ratio=0.2)
    order = order_graph(graph, kind, seed=0, folder=folder)
    plan = replace(plan_of(Choices(), graph, model, folder), order=order)
    path = folder / f"{kind}.json"
    plan_file_of(plan, spec, model, made_cluster(), TrainSpec(num_steps=6, learning_rate=0.01, seed=1), path)
    (folder / kind).mkdir()
    return PlanRun(plan_path=path, out=folder / kind, quiet=True)


def test_every_order_trains_to_the_same_losses_and_accuracies(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHPILOT_CACHE", str(tmp_path / "cache"))
    results = {}
    for kind in NodeOrder:
        run = planned(tmp_path, kind)
        _work([run], HashStore(), 0)
        results[kind] = json.loads((run.out / "result.json").read_text())
    natural = results.pop(NodeOrder.NATURAL)
    assert natural["losses"][-1] < natural["losses"][0]
    for other in results.values():
        assert other["losses"] == pytest.approx(natural["losses"], rel=1e-5)
        assert other["best"] == natural["best"]


def test_an_order_file_that_is_gone_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHPILOT_CACHE", str(tmp_path / "cache"))
    run = planned(tmp_path, NodeOrder.DEGREE)
    [path] = tmp_path.glob("order-degree-*.npy")
    path.unlink()
    with pytest.raises(SpecError, match=f"{path} must be whole in an .npy file"):
        _work([run], HashStore(), 0)
