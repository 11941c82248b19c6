"""Times the host in a tiny model: between two tasks, and in each task, where its code is no longer in the caches."""

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from executor.data import build_rank_data
from executor.measure.computes import synchronize
from executor.mesh import Place
from executor.model import ForwardSettings, GraphTransformer
from executor.record import Recorder
from simulator.readers.graphs import Graph
from simulator.specs.calibration import ComputeSample
from simulator.specs.graph import DEGREE_QUANTILES, GraphFile, GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, Recompute
from simulator.specs.program import Phase, TaskKind
from simulator.specs.units import Dtype

_REPETITIONS = 20
_WARM_UPS = 5
_NUM_NODES = 64
_MODEL = ModelSpec(width=32, num_heads=4, num_layers=2, feed_forward_width=64, dropout_ratio=0.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimes:
    """Seconds of the host thread in a model so small that nothing else takes time.

    Attributes:
        between_tasks_seconds: from the end of a task to the begin of the next, the median over passes of the mean.
        task_seconds: of each kind and phase that the model has, the median.
    """

    between_tasks_seconds: float
    task_seconds: dict[tuple[TaskKind, Phase], float]


def host_times(place: Place) -> HostTimes:
    """Return how long the host takes in and between the tasks of a tiny model.

    Passes with the recorder on tell the tasks apart; passes with it off tell how much less time they take without.
    """
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
    settings = ForwardSettings(
        exchange=(Exchange.NONE,) * layers,
        recompute=(Recompute.NONE,) * layers,
        dropout_word=torch.zeros((), dtype=torch.int32, device=place.device),
    )
    gaps, marked, unmarked = [], [], []
    tasks: dict[tuple[TaskKind, Phase], list[float]] = defaultdict(list)
    for repetition in range(_REPETITIONS):
        synchronize(place.device)
        started = time.perf_counter()
        model.loss(model(data, settings), data).backward()
        unmarked.append(time.perf_counter() - started)
        synchronize(place.device)
        recorder.start()
        model.loss(model(data, settings), data).backward()
        marks = recorder.stop()
        if repetition < _WARM_UPS:
            continue
        marked.append(marks[-1].end_seconds - marks[0].start_seconds)
        inside = sum(mark.end_seconds - mark.start_seconds for mark in marks)
        gaps.append((marked[-1] - inside) / len(marks))
        for mark in marks:
            tasks[mark.kind, mark.phase].append(mark.end_seconds - mark.start_seconds)
    ratio = statistics.median(unmarked[_WARM_UPS:]) / statistics.median(marked)
    return HostTimes(
        between_tasks_seconds=ratio * statistics.median(gaps),
        task_seconds={key: ratio * statistics.median(found) for key, found in tasks.items()},
    )


def with_host_times(samples: Sequence[ComputeSample], times: HostTimes) -> list[ComputeSample]:
    """Return samples whose launching times are those in a model.

    A task that is launched again and again finds its code in the caches. All kinds are scaled by the median ratio over
    those that the tiny model has, in fp32.
    """
    alone: dict[tuple[TaskKind, Phase], list[float]] = defaultdict(list)
    for sample in samples:
        if sample.dtype is Dtype.FLOAT32:
            alone[sample.kind, sample.phase].append(sample.host_seconds)
    ratios = [
        seconds / statistics.median(alone[key])
        for key, seconds in times.task_seconds.items()
        if any(alone.get(key, ()))
    ]
    factor = statistics.median(ratios) if ratios else 1.0
    return [replace(sample, host_seconds=sample.host_seconds * factor) for sample in samples]


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
