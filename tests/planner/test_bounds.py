import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.bounds import lower_bound_seconds
from simulator.simulation import Pricing, pricing, simulate_with
from simulator.specs.cluster import DeviceKind
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, Plan, Recompute
from simulator.specs.units import Dtype
from simulator.workload import lower
from tests.made import (
    equal_parts,
    graph_of,
    made_calibration,
    made_cluster,
    made_model,
    made_part,
    made_partition,
    made_plan,
)
from tests.strategies import compressions, models, partitions, sampled_plans

CLUSTERS = {kind: made_cluster(devices_per_host=8, kind=kind) for kind in DeviceKind}
PRICES = {
    kind: pricing(cluster, made_calibration(host_seconds=2e-6 if kind is DeviceKind.CUDA else 0.0))
    for kind, cluster in CLUSTERS.items()
}


def bound_of(plan: Plan, model: ModelSpec, costs: Pricing) -> float:
    return lower_bound_seconds(costs, lower(plan, graph_of(plan.partition), model, costs.cluster))


@st.composite
def plans_and_models(draw: st.DrawFn) -> tuple[Plan, ModelSpec]:
    """Draw a plan for the full graph or for one part a replica, and a model."""
    if draw(st.booleans()):
        plan = draw(sampled_plans())
        return plan, dataclasses.replace(draw(models), num_layers=2)
    partition = draw(partitions())
    model = dataclasses.replace(draw(models), num_layers=draw(st.integers(1, 2)))
    layers = model.num_layers
    recompute = draw(st.tuples(*[st.sampled_from(Recompute)] * layers))
    if draw(st.booleans()):
        replicas = {"data_parallel_degree": partition.num_parts, "graph_parallel_degree": 1}
        return made_plan(partition, num_layers=layers, recompute=recompute, **replicas), model
    exchanges = [Exchange.HALO, Exchange.ALL_GATHER] if partition.num_parts > 1 else [Exchange.NONE]
    exchange = draw(st.tuples(*[st.sampled_from(exchanges)] * layers))
    precision = draw(st.sampled_from(Dtype))
    return made_plan(
        partition,
        num_layers=layers,
        recompute=recompute,
        exchange=exchange,
        precision=precision,
        gradient_bucket_bytes=draw(st.sampled_from([64, 4096, 2**20])),
        overlap_gradients=draw(st.booleans()),
        gradient_compression=draw(compressions),
    ), model


@given(drawn=plans_and_models(), kind=st.sampled_from(DeviceKind))
@settings(max_examples=40)
def test_no_simulated_step_is_faster_than_its_bound(drawn, kind):
    plan, model = drawn
    costs = PRICES[kind]
    trace = simulate_with(costs, plan, graph_of(plan.partition), model)
    assert 0 < bound_of(plan, model, costs) <= (1 + 1e-9) * trace.median_step_seconds


def test_on_one_rank_the_bound_is_the_step():
    plan = made_plan(equal_parts(1, num_nodes=3000, num_edges=20_000))
    costs = PRICES[DeviceKind.CPU]
    trace = simulate_with(costs, plan, graph_of(plan.partition), made_model())
    assert bound_of(plan, made_model(), costs) == pytest.approx(trace.median_step_seconds)


def test_the_bound_is_that_of_the_busiest_rank():
    parts = [made_part(5000, [20_000, 100], [0, 100]), made_part(10, [100, 10], [100, 0])]
    plan = made_plan(made_partition(parts))
    costs = PRICES[DeviceKind.CPU]
    spans = simulate_with(costs, plan, graph_of(plan.partition), made_model()).spans
    computing = [
        sum(span.duration_seconds for span in spans if span.rank == rank and not span.kind.is_collective)
        for rank in range(2)
    ]
    assert computing[0] > 2 * computing[1]
    assert bound_of(plan, made_model(), costs) == pytest.approx(computing[0])


def test_replicas_bound_a_step_as_one_rank_after_another_does():
    plan = made_plan(equal_parts(2, num_nodes=400, num_edges=4000, halo_rows=20), data_parallel_degree=3)
    costs = PRICES[DeviceKind.CPU]
    program = lower(plan, graph_of(plan.partition), made_model(), costs.cluster)
    alone = dataclasses.replace(program, tasks=tuple(program.tasks))
    assert lower_bound_seconds(costs, program) == lower_bound_seconds(costs, alone) > 0


def test_where_latency_rules_the_bound_is_that_of_the_collectives():
    slow = made_calibration(collective_seconds=lambda *_: 1.0)
    costs = pricing(CLUSTERS[DeviceKind.CPU], slow)
    plan = made_plan(equal_parts(2, num_nodes=100, num_edges=400, halo_rows=10))
    # Two exchanges forward, two backward, and one all-reduce of a second each.
    assert bound_of(plan, made_model(), costs) == pytest.approx(5.0)
