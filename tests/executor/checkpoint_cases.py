"""Runs on a small awkward graph that are saved halfway, for tests that go on from them."""

from dataclasses import replace
from pathlib import Path

from executor.run import PlanRun
from simulator.readers.graphs import Graph, read_graph, write_store
from simulator.specs.files import read_manifest
from simulator.specs.graph import GraphFile, GraphSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.train import TrainSpec
from tests.executor.made_graphs import awkward_graph
from tests.made import made_cluster
from tests.plans import Choices, plan_file_of, plan_of

NUM_STEPS, NUM_SAVED_STEPS = 14, 6
MODEL = ModelSpec(
    width=16, num_heads=4, num_layers=2, feed_forward_width=24, dropout_ratio=0.3, edge_bias=EdgeBias.DEGREE
)
# Saved once, after six steps: a second time would be after twelve, which is no more than what the cases go on from.
SAVED = TrainSpec(
    num_steps=NUM_STEPS,
    learning_rate=0.01,
    weight_decay=0.01,
    warmup_steps=3,
    evaluate_every_steps=4,
    trace_steps=2,
    seed=5,
    checkpoint_every_steps=NUM_SAVED_STEPS,
    num_checkpoints_kept=2,
)
UNSAVED = replace(SAVED, checkpoint_every_steps=0)


def graph_in(folder: Path) -> tuple[GraphSpec, Graph]:
    """Return the graph, stored in a folder."""
    path = folder / "graph"
    if not path.exists():
        write_store(awkward_graph(), path)
    return read_graph(GraphFile(path=str(path)), base=folder)


def planned(
    folder: Path, name: str, choices: Choices | None = None, train: TrainSpec = SAVED, model: ModelSpec = MODEL
) -> PlanRun:
    """Write a plan; its run goes to a folder of its own."""
    spec, graph = graph_in(folder)
    place = folder / name
    place.mkdir()
    plan = plan_of(choices or Choices(), graph, model, place)
    cluster = replace(made_cluster(), devices_per_host=4)
    plan_file_of(plan, spec, model, cluster, train, place / "plan.json")
    return PlanRun(plan_path=place / "plan.json", out=place / "run", quiet=True)


def saved(run: PlanRun, num_steps_done: int = NUM_SAVED_STEPS) -> Path:
    """Return the checkpoint that a run of `SAVED` made after so many steps."""
    path = run.out / "checkpoints" / f"step{num_steps_done:08d}"
    assert read_manifest(path / "manifest.json").num_steps_done == num_steps_done
    return path
