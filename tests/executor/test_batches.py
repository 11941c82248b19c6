"""Sampled batches over whole epochs: equal steps on all ranks, every seed once, losses of the right weight.

Batches of parts are in `test_train.py`; the losses and gradients of both in `test_parity.py`.
"""

import contextlib
import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from executor.batches import Batches, sampled_works
from executor.data import Inputs
from executor.mesh import Place
from executor.run import PlanRun, _work
from planner.neighbourhoods import expected_batches
from planner.partition import partition_graph
from simulator.readers.graphs import Graph, read_graph, write_store
from simulator.specs.decision import PlanFile
from simulator.specs.files import read_trace
from simulator.specs.graph import GraphFile
from simulator.specs.plan import Exchange, Plan, Recompute, SampledBatches, SampledLayer, seed_ranges
from simulator.specs.program import BATCH_KINDS, Stream, TaskKind
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from simulator.workload import rank_work
from tests.executor.made_graphs import awkward_graph, labelled_graph, partition_of
from tests.made import made_cluster, made_model
from tests.plans import plan_file_of
from tests.small_graphs import graph_of

MODEL = made_model()


def sampled_plan(graph: Graph, *, replicas: int, seeds_per_batch: int, fan_outs: tuple[int, ...] = (2, 3)) -> Plan:
    """Return a plan of sampled batches on a graph that is one part."""
    return Plan(
        data_parallel_degree=replicas,
        graph_parallel_degree=1,
        partition=partition_of(graph, np.zeros(graph.num_nodes), 1),
        parts_per_batch=1,
        exchange=(Exchange.NONE,) * len(fan_outs),
        recompute=(Recompute.NONE,) * len(fan_outs),
        precision=Dtype.FLOAT32,
        sampled=expected_batches(graph, fan_outs, seeds_per_batch=seeds_per_batch, data_parallel_degree=replicas),
    )


def batches_of(plan: Plan, graph: Graph, *, seed: int = 3, part_N: np.ndarray | None = None) -> list[Batches]:
    """Return the batches of each rank; the graph is one part unless `part_N` tells others."""
    part_N = np.zeros(graph.num_nodes, np.int64) if part_N is None else part_N
    inputs = Inputs(graph=graph, part_N=part_N, encodings=None)
    found = []
    for rank in range(plan.num_ranks):
        place = Place(
            rank=rank,
            num_ranks=plan.num_ranks,
            replica=rank,
            row_rank=rank,
            graph_rank=0,
            graph_group=None,
            world=None,
            device=torch.device("cpu"),
        )
        found.append(Batches(plan, inputs, place, MODEL, dtype=torch.float32, seed=seed))
    return found


def graph_with_seeds(num_seeds: int) -> Graph:
    """Return a ring with so many nodes to train on, every third node one of them."""
    num_nodes = 3 * num_seeds + 1
    edges = [(node, (node + 1) % num_nodes) for node in range(num_nodes)]
    labels_N = np.arange(num_nodes) % 2
    return graph_of(edges, num_nodes, labels_N=labels_N, train_mask_N=np.arange(num_nodes) % 3 == 1)


@given(
    num_seeds=st.integers(1, 40),
    replicas=st.integers(1, 5),
    seeds_per_batch=st.integers(1, 50),
    epoch=st.integers(0, 2),
)
def test_an_epoch_trains_on_every_seed_once_in_batches_of_equal_size(num_seeds, replicas, seeds_per_batch, epoch):
    graph = graph_with_seeds(num_seeds)
    plan = sampled_plan(graph, replicas=replicas, seeds_per_batch=seeds_per_batch, fan_outs=(1,))
    ranks = batches_of(plan, graph)
    trained: list[int] = []
    sizes: list[int] = []
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        batches = [rank.of_step(step) for rank in ranks]
        labelled = [len(data.train_row_T) for data in batches]
        # Weights: each seed counts as much on every rank, and the weights of a step sum to one.
        assert {data.num_train_rows_of_step for data in batches} == {max(sum(labelled), 1)}
        trained += [node for data in batches for node in data.node_N[data.train_row_T].tolist()]
        sizes += labelled
        for data in batches:
            nodes = data.node_N[data.train_row_T].numpy()
            assert data.train_label_T.tolist() == graph.labels_N[nodes].tolist()
    assert sorted(trained) == np.flatnonzero(graph.train_mask_N).tolist()
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= seeds_per_batch
    # No fewer steps would do.
    assert (plan.steps_per_epoch - 1) * seeds_per_batch * replicas < num_seeds


def test_4097_seeds_on_4_ranks():
    # Case R1: 1,024 seeds a batch divide 4,096, and one seed more must not leave three ranks without a last step.
    graph = graph_with_seeds(4097)
    plan = sampled_plan(graph, replicas=4, seeds_per_batch=1024, fan_outs=(1,))
    assert plan.steps_per_epoch == 2
    ranges = [seed_ranges(plan, step=step) for step in range(2)]
    assert [end - first for replicas in ranges for first, end in replicas] == [512] * 7 + [513]
    assert (ranges[0][0][0], ranges[1][3][1]) == (0, 4097)
    # The simulator knows of each rank's seeds too: case R2, work of each rank is told.
    assert [work.num_train_rows for work in rank_work(plan, step=1, seed=0)] == [512, 512, 512, 513]


def test_replicas_without_a_seed_take_part():
    graph = graph_with_seeds(2)
    plan = sampled_plan(graph, replicas=4, seeds_per_batch=8)
    sizes = [len(rank.of_step(0).train_row_T) for rank in batches_of(plan, graph)]
    assert sorted(sizes) == [0, 0, 1, 1]
    idle = rank_work(plan, step=0, seed=0)[sizes.index(0)]
    assert (idle.num_rows, idle.num_edges, idle.num_train_rows) == (0, 0, 0)


def test_seeds_come_in_another_order_in_each_epoch_and_under_each_seed():
    graph = graph_with_seeds(30)
    plan = sampled_plan(graph, replicas=1, seeds_per_batch=5)

    def first_seeds(seed: int, epoch: int) -> list[int]:
        (rank,) = batches_of(plan, graph, seed=seed)
        data = rank.of_step(epoch * plan.steps_per_epoch)
        return data.node_N[data.train_row_T].tolist()

    assert len({tuple(first_seeds(seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert first_seeds(1, 1) == first_seeds(1, 1)


@pytest.mark.parametrize(
    ("fields", "is_for_one_step"),
    [({"keep_batches": True}, False), ({}, True), ({"parts_per_batch": 2, "prefetch_batches": 1}, True)],
)
def test_edges_of_clusters_are_for_one_step_unless_they_are_kept(fields, is_for_one_step):
    graph = awkward_graph()
    part_N = np.arange(graph.num_nodes) % 4
    plan = sampled_plan(graph, replicas=1, seeds_per_batch=1)
    clusters = replace(plan, sampled=None, partition=partition_of(graph, part_N, 4), **fields)
    (rank,) = batches_of(clusters, graph, part_N=part_N)
    with contextlib.closing(rank):
        edges = rank.of_step(1).all_edges
        assert {each.is_sampled for each in edges} == {is_for_one_step}
        assert {each.transpose.is_sampled for each in edges} == {is_for_one_step}
        # The whole graph is evaluated many times.
        assert {each.is_sampled for each in rank.whole_graph().all_edges} == {False}


def test_edges_of_samples_are_for_one_step():
    graph = awkward_graph()
    (rank,) = batches_of(sampled_plan(graph, replicas=1, seeds_per_batch=5), graph)
    edges = rank.of_step(0).all_edges
    assert [each.is_sampled for each in edges] == [True, True]


@pytest.mark.parametrize("replicas", [1, 3])
def test_exact_works_count_what_the_ranks_batches_hold(replicas):
    graph = awkward_graph()
    plan = sampled_plan(graph, replicas=replicas, seeds_per_batch=9, fan_outs=(40, 2))
    works = sampled_works(plan, MODEL, batches_of(plan, graph)[0]._inputs, step=2, seed=3)
    for rank, work in zip(batches_of(plan, graph), works, strict=True):
        data = rank.of_step(2)
        assert (work.num_rows, work.num_train_rows) == (len(data.node_N), len(data.train_row_T))
        for layer, counts in zip(data.layers, work.sampled, strict=True):
            graph_of_layer = layer.edges
            assert counts == SampledLayer(
                num_sources=graph_of_layer.num_sources,
                num_targets=graph_of_layer.num_targets,
                num_edges=graph_of_layer.num_edges,
                num_edges_of_long_targets=graph_of_layer.num_edges_of_long_rows[0],
                num_edges_of_long_sources=graph_of_layer.num_edges_of_long_rows[1],
            )


# --- Whole runs.


def planned(folder: Path, **fields: object) -> tuple[PlanRun, PlanFile]:
    """Write a graph and a plan of batches on one rank."""
    write_store(awkward_graph(), folder / "graph")
    spec, graph = read_graph(GraphFile(path="graph"), base=folder)
    model = made_model(dropout_ratio=0.2)
    partition = partition_graph(graph, 3, seed=0, folder=folder)
    plan = Plan(
        data_parallel_degree=1,
        graph_parallel_degree=1,
        partition=partition,
        exchange=(Exchange.NONE,) * 2,
        recompute=(Recompute.NONE,) * 2,
        precision=Dtype.FLOAT32,
        **fields,  # type: ignore[arg-type]
    )
    train = TrainSpec(num_steps=9, learning_rate=0.01, seed=1, trace_steps=4)
    file = plan_file_of(plan, spec, model, made_cluster(), train, folder / "plan.json")
    return PlanRun(plan_path=folder / "plan.json", out=folder / "out", quiet=True), file


def sampled_of(graph: Graph) -> SampledBatches:
    return expected_batches(graph, (3, 2), seeds_per_batch=8, data_parallel_degree=1)


@pytest.mark.parametrize("prefetch_batches", [0, 1, 3])
@pytest.mark.parametrize("kind", sorted(BATCH_KINDS))
def test_a_run_shows_the_making_of_a_batch_in_each_traced_step(tmp_path, monkeypatch, kind, prefetch_batches):
    monkeypatch.setenv("GRAPHPILOT_CACHE", str(tmp_path / "cache"))
    fields: dict[str, object] = {"parts_per_batch": 2, "between_edges": False}
    if kind is TaskKind.SAMPLED_BATCH:
        fields = {"parts_per_batch": 3, "sampled": sampled_of(awkward_graph())}
    run, file = planned(tmp_path, prefetch_batches=prefetch_batches, **fields)
    before = threading.active_count()
    (run.out).mkdir()
    _work([run], HashStore(), 0)
    assert threading.active_count() == before
    trace = read_trace(run.out / "measured.json")
    spans = [span for span in trace.spans if span.name == "batch"]
    assert [(span.step, span.kind, span.stream) for span in spans] == [
        (step, kind, Stream.LOADER) for step in (5, 6, 7, 8)
    ]
    assert all(span.duration_seconds > 0 and span.start_seconds >= 0 for span in spans)
    if kind is TaskKind.CLUSTER_BATCH:
        # The batch that was made is that of a later step.
        shapes = [rank_work(file.plan, step=step + prefetch_batches, seed=1)[0].num_rows for step in (5, 6, 7, 8)]
        assert [span.shape[1] for span in spans] == shapes
    result = json.loads((run.out / "result.json").read_text())
    assert len(result["losses"]) == 9
    assert result["data_seconds"] > 0


def test_batches_made_ahead_train_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("GRAPHPILOT_CACHE", str(tmp_path / "cache"))
    losses = []
    for depth in (0, 2):
        folder = tmp_path / str(depth)
        folder.mkdir()
        run, _ = planned(folder, prefetch_batches=depth, parts_per_batch=3, sampled=sampled_of(awkward_graph()))
        run.out.mkdir()
        _work([run], HashStore(), 0)
        losses.append(json.loads((run.out / "result.json").read_text())["losses"])
    assert losses[0] == losses[1]


def test_labels_of_seeds_are_those_of_the_graph():
    graph = labelled_graph([(0, 1), (1, 2), (2, 0)], 12)
    plan = sampled_plan(graph, replicas=1, seeds_per_batch=12)
    (rank,) = batches_of(plan, graph)
    data = rank.of_step(0)
    nodes = data.node_N[: len(data.label_N)]
    assert graph.train_mask_N[nodes].all()
    assert data.label_N.tolist() == graph.labels_N[nodes].tolist()
