"""Which weights a run keeps, in which order; what it writes is tested by the commands and the conformance tests."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from executor.history import is_better
from executor.launch import launch
from executor.run import PlanRun, _work, warmup_steps_of, with_cache_ratios
from executor.train import Evaluation
from planner.order import order_graph
from simulator.errors import PlanError, RunError, SpecError
from simulator.readers.graphs import read_graph, write_store
from simulator.simulation import simulate
from simulator.specs.files import read_trace
from simulator.specs.graph import GraphFile
from simulator.specs.order import NodeOrder
from simulator.specs.program import TaskKind
from simulator.specs.train import TrainSpec
from tests.executor import run_ranks
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


# --- Two ranks of which one is held up, or has other files.


def two_ranks(folder: Path, name: str, **train: Any) -> PlanRun:
    """Write a plan that splits the graph between two ranks."""
    if not (folder / "graph").exists():
        write_store(awkward_graph(), folder / "graph")
    spec, graph = read_graph(GraphFile(path="graph"), base=folder)
    model = made_model()
    plan = plan_of(Choices(graph_parallel_degree=2), graph, model, folder)
    path = folder / f"{name}.json"
    known = {"num_steps": 6, "learning_rate": 0.01}
    plan_file_of(plan, spec, model, made_cluster(devices_per_host=2), TrainSpec(**(known | train)), path)
    (folder / name).mkdir()
    return PlanRun(plan_path=path, out=folder / name, quiet=True)


@pytest.mark.dist
def test_a_training_names_the_rank_that_is_held_up_and_its_task(tmp_path):
    run = two_ranks(tmp_path, "run", collective_timeout_seconds=3.0)
    sentence = (
        r"^rank 1 has not come to layer1\.exchange\.backward of step 4 within 3 s; it was last seen in "
        r"layer1\.attention of step 4, \d s ago, and is still there; if it is only slow, "
        r"raise train\.collective_timeout_seconds$"
    )
    with pytest.raises(RunError, match=sentence):
        launch(run_ranks.run_and_hold_one_rank, run, num_ranks=2, folder=run.out)
    assert list(run.out.iterdir()) == []


@pytest.mark.dist
def test_ranks_with_other_files_are_refused_before_they_meet_in_a_collective(tmp_path):
    runs = [two_ranks(tmp_path, "first"), two_ranks(tmp_path, "second", num_steps=7)]
    sentence = "^rank 1 has train.num_steps = 7, but rank 0 has 6: give all ranks the same plan, partition, graph and"
    with pytest.raises(PlanError, match=sentence):
        launch(run_ranks.run_each_its_own, runs, num_ranks=2, folder=tmp_path / "first")


@pytest.mark.dist
@pytest.mark.parametrize(("cpu_affinity", "cores"), [(True, r"\d+ \| \d+|[\d,-]+ \| [\d,-]+"), (False, r"any \| any")])
def test_a_trace_tells_on_which_cores_the_ranks_ran(tmp_path, cpu_affinity, cores):
    run = two_ranks(tmp_path, "run", cpu_affinity=cpu_affinity)
    launch(_work, [run], num_ranks=2, folder=run.out)
    environment = dict(read_trace(run.out / "measured.json").environment)
    assert re.fullmatch(cores, environment["cores"])
