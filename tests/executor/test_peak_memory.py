"""Predicted against measured peak of a step, on a CPU, where torch's profiler tells every allocation."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from executor.mesh import joined_mesh
from executor.record import Recorder
from executor.train import Inputs, Trainer
from simulator.memory import peak_memory
from simulator.readers.generators import materialise
from simulator.readers.graphs import read_graph
from simulator.specs.cluster import DeviceKind
from simulator.specs.graph import CommunityGraph
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Recompute
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from tests.conformance.cases import cluster_of
from tests.plans import Choices, plan_of

MODEL = ModelSpec(width=64, num_heads=4, num_layers=3, feed_forward_width=128)
GRAPH = CommunityGraph(num_nodes=8000, num_edges=80_000, num_classes=7, num_features=11)
TRAIN = TrainSpec(num_steps=3, learning_rate=0.01, seed=1)
# A twentieth of the bars on GPUs would hide nothing here: no allocator, no libraries with workspaces.
TOLERANCE = 0.04


def peak_of(events: list[dict[str, Any]]) -> int:
    """Return the most bytes that were allocated at a time, over those of the beginning."""
    held = peak = 0
    for event in sorted((event for event in events if event.get("name") == "[memory]"), key=lambda each: each["ts"]):
        held += event["args"]["Bytes"]
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("fields", [{}, {"dropout_ratio": 0.3, "edge_bias": EdgeBias.DEGREE}], ids=["plain", "extras"])
@pytest.mark.parametrize("precision", Dtype)
@pytest.mark.parametrize("recompute", Recompute)
def test_a_step_takes_the_memory_that_was_predicted(recompute, precision, fields, tmp_path: Path):
    spec, graph = read_graph(materialise(GRAPH, tmp_path), base=tmp_path)
    model = replace(MODEL, **fields)
    plan = plan_of(Choices(recompute=recompute, precision=precision), graph, model, tmp_path)
    memory = dict(peak_memory(plan, spec, model, cluster_of(DeviceKind.CPU))[0])
    inputs = Inputs(graph=graph, part_N=np.zeros(graph.num_nodes, np.int32), encodings=None)
    with joined_mesh(DeviceKind.CPU, HashStore(), rank=0, local_rank=0) as place:
        trainer = Trainer(plan, spec, model, TRAIN, inputs, place, Recorder(precision=precision))
        trainer.step(0, trainer.batch(0))
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
            trainer.step(1, trainer.batch(1))
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    measured = peak_of(json.loads(path.read_text())["traceEvents"])
    predicted = memory["activations"] + memory["workspace"] + memory["messages"]
    assert predicted == pytest.approx(measured, rel=TOLERANCE)
