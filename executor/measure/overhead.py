"""Times what the host does between two tasks: the executor's own Python, which no kernel's benchmark contains."""

import statistics

import numpy as np

from executor.data import build_rank_data
from executor.measure.computes import synchronize
from executor.mesh import Place
from executor.model import ForwardSettings, GraphTransformer
from executor.record import Recorder
from simulator.readers.graphs import Graph
from simulator.specs.graph import DEGREE_QUANTILES, GraphFile, GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, Recompute

_REPETITIONS = 15
_NUM_NODES = 64
_MODEL = ModelSpec(width=32, num_heads=4, num_layers=2, feed_forward_width=64)


def task_overhead_seconds(place: Place) -> float:
    """Return the median over passes of the time outside tasks, a task; of a model so small that tasks are short."""
    spec, graph = _ring()
    recorder = Recorder()
    model = GraphTransformer(spec, _MODEL, recorder).to(place.device)
    data = build_rank_data(
        graph,
        None,
        np.zeros(_NUM_NODES, dtype=np.int64),
        graph_rank=0,
        exchanges=frozenset({Exchange.NONE}),
        degree_buckets=False,
        group=None,
        num_ranks=1,
        num_train_rows_of_step=_NUM_NODES,
        dtype=next(model.parameters()).dtype,
        device=place.device,
    )
    layers = _MODEL.num_layers
    settings = ForwardSettings(exchange=(Exchange.NONE,) * layers, recompute=(Recompute.NONE,) * layers)
    gaps = []
    for _ in range(_REPETITIONS):
        synchronize(place.device)
        recorder.start()
        model.loss(model(data, settings), data).backward()
        marks = recorder.stop()
        inside = sum(mark.end_seconds - mark.start_seconds for mark in marks)
        gaps.append((marks[-1].end_seconds - marks[0].start_seconds - inside) / len(marks))
    return statistics.median(gaps)


def _ring() -> tuple[GraphSpec, Graph]:
    """Return a graph in which each node attends to the one before it."""
    features = np.ones((_NUM_NODES, 16), dtype=np.float32)
    everything, nothing = np.ones(_NUM_NODES, dtype=np.bool_), np.zeros(_NUM_NODES, dtype=np.bool_)
    graph = Graph(
        indptr_N=np.arange(_NUM_NODES + 1, dtype=np.int64),
        source_E=np.roll(np.arange(_NUM_NODES, dtype=np.int32), 1),
        features=features,
        labels_N=np.arange(_NUM_NODES, dtype=np.int64) % 2,
        train_mask_N=everything,
        val_mask_N=nothing,
        test_mask_N=nothing,
    )
    spec = GraphSpec(
        source=GraphFile(path="ring"),
        sha256="",
        num_nodes=_NUM_NODES,
        num_edges=_NUM_NODES,
        num_features=features.shape[1],
        num_feature_entries=0,
        num_classes=2,
        num_train_nodes=_NUM_NODES,
        num_val_nodes=0,
        num_test_nodes=0,
        in_degree_quantiles=(1.0,) * len(DEGREE_QUANTILES),
    )
    return spec, graph
