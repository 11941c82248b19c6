import dataclasses

import pytest

from simulator.constraints import step_mode_of, training_violations, violations
from simulator.specs.cluster import DeviceKind
from simulator.specs.plan import Exchange, Plan, Recompute, StepMode
from simulator.specs.train import TrainSpec
from tests.made import equal_parts, graph_of, made_cluster, made_model, made_plan

FOUR = equal_parts(4, num_nodes=400, num_edges=1600, halo_rows=10)
GRAPH = graph_of(FOUR)
MODEL = made_model()
CLUSTER = made_cluster(devices_per_host=4)
NONE = (Exchange.NONE,) * 2


def reasons(plan: Plan, **fields: object) -> list[str]:
    """Return why a plan cannot run, on the made graph and cluster unless fields name others."""
    found = {"graph": GRAPH, "model": MODEL, "cluster": CLUSTER} | fields
    return violations(plan, **found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plan",
    [
        made_plan(FOUR),
        made_plan(FOUR, exchange=(Exchange.ALL_GATHER, Exchange.HALO), recompute=(Recompute.LAYER, Recompute.NONE)),
        made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=4),
        made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=1),
        made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=3),
        made_plan(FOUR, data_parallel_degree=4, graph_parallel_degree=1),
        made_plan(FOUR, data_parallel_degree=2, graph_parallel_degree=2),
    ],
)
def test_a_plan_that_can_run_has_no_violations(plan):
    assert reasons(plan) == []


def test_a_plan_has_no_more_ranks_than_the_cluster_has_devices():
    assert reasons(made_plan(FOUR), cluster=made_cluster(devices_per_host=3)) == [
        "plan.num_ranks=4 must not exceed cluster.num_devices=3: lower data_parallel_degree or graph_parallel_degree"
    ]
    assert reasons(made_plan(FOUR), cluster=made_cluster(num_hosts=2, devices_per_host=2)) == []


def test_parts_are_of_this_graph():
    graph = dataclasses.replace(GRAPH, num_nodes=401, num_edges=1599)
    assert reasons(made_plan(FOUR), graph=graph) == [
        "the parts of the plan own 400 nodes, but graph.num_nodes=401: partition this graph again",
        "the parts of the plan hold 1600 edges, but graph.num_edges=1599: partition this graph again",
    ]


@pytest.mark.parametrize("parts_per_batch", [1, 3, 4])
def test_each_rank_of_a_graph_group_trains_on_one_part(parts_per_batch):
    plan = made_plan(FOUR, graph_parallel_degree=2, parts_per_batch=parts_per_batch)
    assert reasons(plan) == [
        f"plan.parts_per_batch={parts_per_batch} must equal plan.graph_parallel_degree=2: each rank of a graph group "
        "trains on one part"
    ]


def test_replicas_do_not_repeat_the_full_graph():
    plan = made_plan(FOUR, data_parallel_degree=2, graph_parallel_degree=1, parts_per_batch=4)
    assert reasons(plan)[0] == (
        "plan.data_parallel_degree=2 must be 1 when parts_per_batch takes all 4 parts: replicas would repeat the same "
        "work; use graph_parallel_degree or more parts"
    )


def test_a_step_has_no_more_parts_than_there_are():
    plan = made_plan(FOUR, data_parallel_degree=2, graph_parallel_degree=1, parts_per_batch=3)
    assert reasons(plan) == [
        "data_parallel_degree * parts_per_batch = 6 must not exceed plan.partition.num_parts=4: cut the graph into "
        "more parts"
    ]


def test_every_layer_has_its_exchange():
    plan = made_plan(FOUR, num_layers=3)
    assert reasons(plan) == ["exchange has 3 entries, but model.num_layers=2: give one for each layer"]


def test_several_ranks_exchange_and_one_does_not():
    assert reasons(made_plan(FOUR, exchange=(Exchange.HALO, Exchange.NONE))) == [
        "exchange[1] must not be none when plan.graph_parallel_degree=4: use halo or all_gather"
    ]
    alone = made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=4, exchange=(Exchange.ALL_GATHER, Exchange.NONE))
    assert reasons(alone) == ["exchange[0] must be none when plan.graph_parallel_degree=1, got all_gather"]


def test_only_full_graph_steps_of_one_gpu_are_replayed():
    gpus = made_cluster(devices_per_host=4, kind=DeviceKind.CUDA)
    whole = made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=4, step_mode=StepMode.CUDA_GRAPH)
    assert reasons(whole, cluster=gpus) == []
    assert reasons(whole) == ["step_mode must be eager on devices of kind cpu, got cuda_graph"]
    assert reasons(made_plan(FOUR, step_mode=StepMode.CUDA_GRAPH), cluster=gpus) == [
        "step_mode must be eager when plan.num_ranks=4, got cuda_graph"
    ]
    assert reasons(dataclasses.replace(whole, parts_per_batch=3), cluster=gpus) == [
        "step_mode must be eager when plan.parts_per_batch=3 of plan.partition.num_parts=4, got cuda_graph: the shapes "
        "of batches differ"
    ]


@pytest.mark.parametrize("kind", DeviceKind)
@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("is_full_graph", [True, False])
def test_steps_are_replayed_wherever_they_may_be(kind, num_ranks, is_full_graph):
    mode = step_mode_of(num_ranks=num_ranks, is_full_graph=is_full_graph, cluster=made_cluster(kind=kind))
    assert (mode is StepMode.CUDA_GRAPH) == (kind is DeviceKind.CUDA and num_ranks == 1 and is_full_graph)


def test_dense_parts_are_compiled_for_full_graphs_on_gpus():
    gpus = made_cluster(devices_per_host=4, kind=DeviceKind.CUDA)
    train = TrainSpec(num_steps=10, learning_rate=0.1, compile_dense=True)
    whole = made_plan(FOUR)
    clusters = made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=1)
    assert training_violations(whole, train, gpus) == []
    assert training_violations(clusters, dataclasses.replace(train, compile_dense=False), CLUSTER) == []
    assert training_violations(whole, train, CLUSTER) == [
        "train.compile_dense must be false on devices of kind cpu: it is for cuda"
    ]
    assert training_violations(clusters, train, gpus) == [
        "train.compile_dense must be false when batches are clusters or sampled: their shapes differ, and each would "
        "be compiled for itself"
    ]


def test_all_reasons_are_told():
    plan = made_plan(FOUR, data_parallel_degree=3, graph_parallel_degree=2, parts_per_batch=1, exchange=NONE)
    found = reasons(plan)
    assert len(found) == 4
    assert "plan.num_ranks=6" in found[0]
    assert "plan.parts_per_batch=1" in found[1]
    assert found[2].startswith("exchange[0]")
    assert found[3].startswith("exchange[1]")
