import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.engine import play
from simulator.errors import CalibrationError, PlanError
from simulator.memory import peak_memory, total_bytes
from simulator.simulation import fold_priced, pricing, simulate, simulate_with
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec, DeviceKind, LinkSpec
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.model import EdgeBias
from simulator.specs.plan import Exchange, Plan, Recompute, StepMode
from simulator.specs.program import Phase, Program, Stream, TaskKind
from simulator.specs.trace import Trace, TraceOrigin, counted_ranks
from simulator.specs.units import GB, Dtype
from simulator.workload import lower
from tests.made import (
    equal_parts,
    graph_of,
    made_calibration,
    made_cluster,
    made_collective_seconds,
    made_model,
    made_part,
    made_partition,
    made_plan,
    made_sampled,
    made_sampled_plan,
    made_seconds,
)

CPU, GPU = (made_cluster(devices_per_host=4, kind=kind) for kind in DeviceKind)
ALONE = made_plan(equal_parts(1, num_nodes=4000, num_edges=32_000))
TWO = made_plan(equal_parts(2, num_nodes=4000, num_edges=32_000, halo_rows=500))


def trace_of(
    plan: Plan,
    *,
    cluster: ClusterSpec = CPU,
    calibration: Calibration | None = None,
    model: dict[str, Any] | None = None,
    graph: dict[str, Any] | None = None,
    **settings_of_simulation: Any,
) -> Trace:
    """Return a simulated step on made specs, of which some fields are others."""
    return simulate(
        plan,
        graph_of(plan.partition, **graph or {}),
        made_model(**model or {}),
        cluster,
        calibration or made_calibration(),
        **settings_of_simulation,
    )


def seconds_of(plan: Plan, **fields: Any) -> float:
    return trace_of(plan, **fields).median_step_seconds


def constant_calibration(
    *, device_seconds: float, host_seconds: float = 0.0, collective_seconds: float = 1.0, overhead_seconds: float = 0.0
) -> Calibration:
    """Return costs that do not depend on shapes."""
    return made_calibration(
        compute_seconds=lambda *_: device_seconds,
        collective_seconds=lambda *_: collective_seconds,
        host_seconds=host_seconds,
        task_overhead_seconds=overhead_seconds,
        spread=1.0,
    )


def counts_of(plan: Plan) -> tuple[int, int]:
    """Return a rank's numbers of compute tasks and of collectives."""
    tasks = lower(plan, graph_of(plan.partition), made_model(), CPU).tasks[0]
    collectives = sum(task.kind.is_collective for task in tasks)
    return len(tasks) - collectives, collectives


# --- A step by hand.


def test_on_a_cpu_a_step_takes_the_sum_of_its_tasks():
    computes, collectives = counts_of(TWO)
    calibration = constant_calibration(device_seconds=1e-3, collective_seconds=7e-3, overhead_seconds=1e-4)
    trace = trace_of(TWO, calibration=calibration)
    assert trace.median_step_seconds == pytest.approx(computes * 1.1e-3 + collectives * 7.1e-3)
    assert len(trace.spans) == 2 * (computes + collectives)
    assert (trace.origin, trace.num_ranks) == (TraceOrigin.SIMULATED, 2)
    assert trace.traced_step_seconds == trace.step_seconds
    assert trace.environment == calibration.environment


@pytest.mark.parametrize(
    ("device_seconds", "host_seconds", "overhead_seconds"),
    [
        # Device-bound: the host runs ahead, into the next step too, and what it does beside is hidden.
        (1e-3, 1e-4, 0.0),
        (1e-3, 1e-4, 2e-4),
        # Host-bound: the device waits for each launch, and the next step begins when the host gets there.
        (1e-4, 1e-3, 0.0),
        (1e-4, 7e-4, 3e-4),
    ],
)
def test_on_a_gpu_a_step_takes_the_period_of_a_long_run(device_seconds, host_seconds, overhead_seconds):
    computes, _ = counts_of(ALONE)
    calibration = constant_calibration(
        device_seconds=device_seconds, host_seconds=host_seconds, overhead_seconds=overhead_seconds
    )
    trace = trace_of(ALONE, cluster=GPU, calibration=calibration)
    # The slower of device and host takes a millisecond for each task.
    assert trace.median_step_seconds == pytest.approx(computes * 1e-3)
    # The spans are those of one step.
    assert len(trace.spans) == computes
    assert min(span.start_seconds for span in trace.spans) == 0
    assert [span.name for span in trace.spans] == [
        task.name for task in lower(ALONE, graph_of(ALONE.partition), made_model(), GPU).tasks[0]
    ]


def test_a_step_that_is_replayed_does_not_wait_for_its_launches():
    computes, _ = counts_of(ALONE)
    calibration = constant_calibration(device_seconds=1e-4, host_seconds=1e-3, overhead_seconds=1e-3)
    replayed = dataclasses.replace(ALONE, step_mode=StepMode.CUDA_GRAPH)
    assert seconds_of(replayed, cluster=GPU, calibration=calibration) == pytest.approx(computes * 1e-4)


def test_on_gpus_collectives_and_computing_alternate():
    computes, collectives = counts_of(TWO)
    calibration = constant_calibration(device_seconds=1e-3, host_seconds=1e-5, collective_seconds=2e-3)
    seconds = seconds_of(TWO, cluster=GPU, calibration=calibration)
    assert seconds == pytest.approx(computes * 1e-3 + collectives * 2e-3)


def test_the_fuller_rank_is_waited_for():
    parts = [made_part(3000, [20_000, 100], [0, 100]), made_part(1000, [100, 2000], [100, 0])]
    trace = trace_of(made_plan(made_partition(parts)))
    waiting = [sum(span.waiting_seconds for span in trace.spans if span.rank == rank) for rank in range(2)]
    computing = [
        sum(span.duration_seconds for span in trace.spans if span.rank == rank and not span.kind.is_collective)
        for rank in range(2)
    ]
    # What rank 1 computes less, it waits longer; both end together but for the update.
    assert computing[0] > 2 * computing[1]
    assert waiting[1] - waiting[0] == pytest.approx(computing[0] - computing[1])
    ends = [max(span.end_seconds for span in trace.spans if span.rank == rank) for rank in range(2)]
    assert ends[0] == pytest.approx(ends[1])


# --- Replicas, which are folded. (Those of a full graph are no plan that one would run, and none that is refused here.)


def unfolded_seconds(plan: Plan, cluster: ClusterSpec, *, num_steps: int) -> tuple[float, dict[tuple[int, str], float]]:
    """Return when a step ends, and each of its tasks, if every rank is played for itself."""
    costs = pricing(cluster, made_calibration(host_seconds=1e-5))
    program = lower(plan, graph_of(plan.partition), made_model(), cluster)
    played = play(fold_priced(costs, plan, Program(tasks=tuple(program.tasks))), num_steps=num_steps)
    last = num_steps - 1
    origin = played.start_seconds(last) if last else 0.0
    spans = played.spans(last, origin_seconds=origin)
    before = played.end_seconds(last - 1) if last else 0.0
    return played.end_seconds(last) - before, {(span.rank, span.name): span.end_seconds for span in spans}


UNEVEN = made_partition(
    [
        made_part(3000, [20_000, 100, 40], [0, 100, 20]),
        made_part(1000, [100, 2000, 0], [90, 0, 0]),
        made_part(2000, [10, 0, 9000], [10, 0, 0]),
    ]
)


@pytest.mark.parametrize(
    ("plan", "num_classes"),
    [
        (made_plan(UNEVEN, data_parallel_degree=4), 3),
        (made_plan(UNEVEN, data_parallel_degree=4, overlap_gradients=True, gradient_bucket_bytes=4096), 3),
        (made_plan(UNEVEN, data_parallel_degree=4, exchange=(Exchange.ALL_GATHER, Exchange.HEAD_ALL_TO_ALL)), 3),
        (made_plan(UNEVEN, data_parallel_degree=3, overlap_exchange=True, gradient_bucket_bytes=4096), 3),
        # Of ten batches of one part, the last two of an epoch's second step are empty, and so are those replicas.
        (made_plan(UNEVEN, data_parallel_degree=5, graph_parallel_degree=1), 4),
        (
            made_sampled_plan(
                equal_parts(1, num_nodes=4000, num_edges=40_000),
                made_sampled((300, 150, 900), (150, 40, 400), seeds_per_batch=40),
                data_parallel_degree=7,
            ),
            2,
        ),
    ],
)
@pytest.mark.parametrize("kind", DeviceKind)
@pytest.mark.parametrize("devices_per_host", [2, 3, 16])
def test_replicas_that_are_alike_are_played_once_and_nothing_else_changes(plan, num_classes, kind, devices_per_host):
    cluster = made_cluster(num_hosts=8, devices_per_host=devices_per_host, kind=kind)
    costs = pricing(cluster, made_calibration(host_seconds=1e-5))
    trace = simulate_with(costs, plan, graph_of(plan.partition), made_model())
    expected, ends = unfolded_seconds(plan, cluster, num_steps=3 if kind is DeviceKind.CUDA else 1)
    assert trace.median_step_seconds == pytest.approx(expected, rel=1e-12)
    assert {(span.rank, span.name): span.end_seconds for span in trace.spans} == pytest.approx(ends, rel=1e-9)
    # Hosts that are not whole replicas tell some of them apart by what their network cards carry.
    if plan.num_ranks <= devices_per_host:
        assert len(counted_ranks(trace)) == num_classes
    assert len(counted_ranks(trace)) <= plan.num_ranks
    assert len(trace.spans) == lower(plan, graph_of(plan.partition), made_model(), cluster).num_tasks


def test_a_step_of_a_thousand_ranks_is_predicted_as_that_of_eight_is():
    plan = made_plan(UNEVEN, data_parallel_degree=1)
    few, many = (
        simulate_with(
            pricing(made_cluster(num_hosts=512, devices_per_host=3, kind=DeviceKind.CUDA), made_calibration()),
            dataclasses.replace(plan, data_parallel_degree=replicas),
            graph_of(UNEVEN),
            made_model(),
        )
        for replicas in (2, 342)
    )
    assert many.num_ranks == 1026
    assert len(counted_ranks(many)) == 3
    assert len(many.spans) == 171 * len(few.spans)
    # The ring of the gradients is longer, and that is all.
    assert few.median_step_seconds < many.median_step_seconds < 1.1 * few.median_step_seconds


def test_case_p3_trials_say_how_far_they_are_and_when_all_will_be_done(monkeypatch):
    monkeypatch.setattr("simulator.simulation._PROGRESS_SECONDS", 0.0)
    told: list[str] = []
    trace_of(TWO, trials=4, on_progress=told.append)
    assert [text.split(",")[0] for text in told][-1] == "trial 3 of 4 done"
    assert all(text.endswith(" s left") for text in told)


# --- Case P5: repeatability, and the interval, which is modelled and no noise.


_SIMULATED = """
from tests.simulator.test_simulation import CPU, GPU, TWO, replace_jitter, trace_of
for cluster in (CPU, GPU, replace_jitter(GPU)):
    trace = trace_of(TWO, cluster=cluster, trials=4, seed=3)
    print(trace.step_seconds, [(span.name, span.start_seconds, span.end_seconds) for span in trace.spans])
"""


def replace_jitter(cluster: ClusterSpec) -> ClusterSpec:
    return dataclasses.replace(cluster, jitter=0.1)


def test_case_p5_two_processes_print_the_same_digits():
    printed = {
        subprocess.run(
            [sys.executable, "-c", _SIMULATED],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(printed) == 1
    assert printed.pop().count("layer0.attention") > 3


def test_case_p5_what_varies_is_what_is_modelled():
    def steps(spread: float, jitter: float) -> tuple[float, ...]:
        cluster = dataclasses.replace(GPU, jitter=jitter)
        return trace_of(TWO, cluster=cluster, calibration=made_calibration(spread=spread), trials=5).step_seconds

    assert len(set(steps(1.0, 0.0))) == 1  # nothing else does
    assert len(set(steps(1.3, 0.0))) == 5
    assert len(set(steps(1.0, 0.1))) == 5
    assert steps(1.3, 0.0)[0] == steps(1.0, 0.0)[0]  # medians first
    assert steps(1.0, 0.1)[0] > steps(1.0, 0.0)[0]  # jitter is part of every step


@pytest.mark.parametrize("cluster", [CPU, GPU])
def test_a_simulation_is_repeatable(cluster):
    first, second, other = (trace_of(TWO, cluster=cluster, trials=5, seed=seed) for seed in (3, 3, 4))
    assert first == second
    assert first.step_seconds[1:] != other.step_seconds[1:]
    # The first trial has every cost at its median, whatever the seed.
    assert first.step_seconds[0] == other.step_seconds[0]


@given(spread=st.floats(1, 3), seed=st.integers(0, 1000))
@settings(max_examples=10)
def test_trials_give_an_interval_in_order(spread, seed):
    trace = trace_of(TWO, calibration=made_calibration(spread=spread), trials=20, seed=seed)
    assert len(trace.step_seconds) == 20
    low, middle, high = (trace.step_seconds_quantile(ratio) for ratio in (0.1, 0.5, 0.9))
    assert 0 < low <= middle <= high
    assert trace.traced_step_seconds == trace.step_seconds[:1]


def test_without_spread_all_trials_are_alike():
    trace = trace_of(TWO, calibration=made_calibration(spread=1.0), trials=5)
    assert trace.step_seconds == pytest.approx([trace.step_seconds[0]] * 5)


def test_the_deciles_of_a_step_are_those_of_the_task_that_it_consists_of():
    # All but one task take next to no time, and its deciles lie at half and twice its median.
    calibration = made_calibration(
        compute_seconds=lambda kind, phase, shape: 1.0 if (kind, phase) == (TaskKind.LOSS, Phase.FORWARD) else 1e-9,
        spread=2.0,
    )
    trace = trace_of(ALONE, calibration=calibration, trials=1000)
    low, middle, high = (trace.step_seconds_quantile(ratio) for ratio in (0.1, 0.5, 0.9))
    assert (low, middle, high) == pytest.approx((0.5, 1.0, 2.0), rel=0.1)


# --- What a simulation says beside.


def test_a_trace_tells_the_peak_of_every_rank():
    parts = [made_part(3000, [20_000, 100], [0, 100]), made_part(1000, [100, 2000], [100, 0])]
    plan = made_plan(made_partition(parts))
    memory = peak_memory(plan, graph_of(plan.partition), made_model(), CPU)
    assert trace_of(plan).peak_memory_bytes == tuple(total_bytes(rank) for rank in memory)


def test_costs_prepared_once_give_the_same():
    costs = pricing(CPU, made_calibration())
    for plan in (ALONE, TWO):
        assert simulate_with(costs, plan, graph_of(plan.partition), made_model()) == trace_of(plan)


def test_a_plan_that_cannot_run_is_refused_with_all_reasons():
    plan = dataclasses.replace(TWO, exchange=(Exchange.NONE, Exchange.HALO))
    with pytest.raises(PlanError) as error:
        trace_of(plan, cluster=made_cluster(devices_per_host=1))
    assert str(error.value) == (
        "plan.num_ranks=2 must not exceed cluster.num_devices=1: lower data_parallel_degree, graph_parallel_degree, "
        "tensor_parallel_degree or pipeline_parallel_degree; "
        "exchange[0] must not be none when plan.graph_parallel_degree=2: use halo, all_gather or "
        "head_all_to_all"
    )


def test_a_calibration_of_another_device_is_refused():
    calibration = dataclasses.replace(made_calibration(), device_name="other")
    with pytest.raises(CalibrationError) as error:
        trace_of(ALONE, calibration=calibration)
    assert str(error.value) == (
        'the calibration is of "other", but the cluster\'s device.name is "made device": calibrate on that device'
    )


def test_a_kind_that_was_not_measured_is_told():
    computes = tuple(sample for sample in made_calibration().computes if sample.kind is not TaskKind.GELU)
    with pytest.raises(CalibrationError, match="has no samples of gelu forward in fp32"):
        trace_of(ALONE, calibration=dataclasses.replace(made_calibration(), computes=computes))


# --- Case P1: every input has an effect.


@pytest.mark.parametrize(
    "more",
    [
        {"width": 32},
        {"feed_forward_width": 64},
        {"dropout_ratio": 0.5},
        {"edge_bias": EdgeBias.DEGREE},
        {"laplacian_encodings": 4},
        {"random_walk_encodings": 4},
    ],
    ids=str,
)
def test_a_larger_model_takes_longer(more):
    assert seconds_of(ALONE, model=more) > seconds_of(ALONE)


def test_more_heads_of_the_same_width_change_attention_alone():
    # The law of the made attention depends on heads times head size; an edge bias has a number for each head.
    few, many = (seconds_of(ALONE, model={"num_heads": heads, "edge_bias": EdgeBias.DEGREE}) for heads in (4, 8))
    assert many > few


def test_more_layers_take_longer():
    deep = made_plan(ALONE.partition, num_layers=3)
    assert seconds_of(deep, model={"num_layers": 3}) > seconds_of(ALONE)


@pytest.mark.parametrize("more", [{"num_features": 40}, {"num_classes": 50}], ids=str)
def test_a_wider_graph_takes_longer(more):
    assert seconds_of(ALONE, graph=more) > seconds_of(ALONE)


@pytest.mark.parametrize(
    "larger",
    [
        equal_parts(2, num_nodes=6000, num_edges=32_000, halo_rows=500),
        equal_parts(2, num_nodes=4000, num_edges=64_000, halo_rows=500),
        equal_parts(2, num_nodes=4000, num_edges=32_000, halo_rows=1500),
    ],
)
def test_more_nodes_edges_or_halo_take_longer(larger):
    assert seconds_of(made_plan(larger)) > seconds_of(TWO)


def test_sparse_entries_count():
    few, many = (
        seconds_of(made_plan(equal_parts(1, num_nodes=4000, num_edges=100, num_feature_entries=entries)))
        for entries in (10_000, 100_000)
    )
    assert many > few


@pytest.mark.parametrize(
    "other",
    [
        {"exchange": (Exchange.ALL_GATHER,) * 2},
        {"recompute": (Recompute.LAYER, Recompute.NONE)},
        {"gradient_bucket_bytes": 1024},
    ],
    ids=str,
)
def test_every_choice_of_a_plan_counts(other):
    assert seconds_of(dataclasses.replace(TWO, **other)) > seconds_of(TWO)


@pytest.mark.parametrize("kind", list(CompressionKind))
def test_a_reduction_beside_the_backward_pass_hides_behind_it(kind):
    settings: dict[CompressionKind, dict[str, Any]] = {
        CompressionKind.TOP_K: {"kept_ratio": 0.05},
        CompressionKind.POWER_SGD: {"matrix_rank": 1},
    }
    how = GradientCompression(kind=kind, **settings.get(kind, {}))
    plan = dataclasses.replace(TWO, gradient_bucket_bytes=4096, gradient_compression=how)
    beside = dataclasses.replace(plan, overlap_gradients=True)
    for cluster in (CPU, GPU):
        # Of the collectives some lie wholly beside the backward pass; what is computed stays.
        traces = [trace_of(each, cluster=cluster) for each in (plan, beside)]
        assert traces[1].median_step_seconds < traces[0].median_step_seconds
        computed = [sum(s.busy_seconds for s in t.spans if not s.kind.is_collective) for t in traces]
        assert computed[0] == pytest.approx(computed[1])
        end = max(span.end_seconds for span in traces[1].spans if span.phase is Phase.BACKWARD)
        assert any(span.stream is Stream.GRADIENTS and span.end_seconds < end for span in traces[1].spans)
        # No update begins before all of it is there.
        (clip,) = {span.start_seconds for span in traces[1].spans if span.name == "clip" and span.rank == 0}
        assert clip >= max(s.end_seconds for s in traces[1].spans if s.rank == 0 and s.stream is Stream.GRADIENTS)


def test_fewer_bytes_take_less_time_where_links_are_slow():
    slow = made_calibration(collective_seconds=lambda *law: 100 * made_collective_seconds(*law))
    whole, half = (
        dataclasses.replace(TWO, gradient_compression=GradientCompression(kind=kind))
        for kind in (CompressionKind.NONE, CompressionKind.BF16)
    )
    model = {"width": 256, "feed_forward_width": 512}
    assert seconds_of(half, calibration=slow, model=model) < seconds_of(whole, calibration=slow, model=model)


def test_the_number_format_decides_which_costs_count():
    fp32, bf16 = (
        made_calibration(precisions=(precision,), compute_seconds=lambda *law, f=factor: f * made_seconds(*law))
        for precision, factor in ((Dtype.FLOAT32, 1.0), (Dtype.BFLOAT16, 0.5))
    )
    # Parameters are updated in fp32 whatever the activations are.
    both = dataclasses.replace(fp32, computes=fp32.computes + bf16.computes)
    half = seconds_of(dataclasses.replace(ALONE, precision=Dtype.BFLOAT16), calibration=both)
    assert half < 0.7 * seconds_of(ALONE, calibration=both)


@pytest.mark.parametrize("link", ["device_link", "host_link"])
@pytest.mark.parametrize("field", ["latency_seconds", "bandwidth_bytes_per_second"])
def test_every_number_of_a_link_counts_where_nothing_was_measured(link, field):
    computes_only = dataclasses.replace(made_calibration(), collectives=())
    num_hosts = 2 if link == "host_link" else 1
    cluster = made_cluster(num_hosts=num_hosts, devices_per_host=2 // num_hosts)
    plain = LinkSpec(latency_seconds=1e-4, bandwidth_bytes_per_second=1 * GB)
    slower = dataclasses.replace(plain, **{field: 2e-4 if field == "latency_seconds" else 0.5 * GB})
    links: list[dict[str, Any]] = [{link: plain}, {link: slower}]
    fast, slow = (
        seconds_of(TWO, cluster=dataclasses.replace(cluster, **linked), calibration=computes_only) for linked in links
    )
    assert slow > fast


def test_measured_collectives_count():
    slow = made_calibration(collective_seconds=lambda *law: 3 * made_collective_seconds(*law))
    assert seconds_of(TWO, calibration=slow) > seconds_of(TWO)


def test_hosts_count():
    apart = made_cluster(num_hosts=2, devices_per_host=1)
    assert seconds_of(TWO, cluster=apart) > seconds_of(TWO)


def test_the_step_and_the_seed_decide_on_the_batch():
    parts = [made_part(nodes, [10 * nodes] * 3, [0] * 3) for nodes in (100, 5000, 20_000)]
    plan = made_plan(made_partition(parts), graph_parallel_degree=1)
    assert len({seconds_of(plan, step=step) for step in range(3)}) == 3
    assert len({seconds_of(plan, seed=seed) for seed in range(20)}) == 3


# --- Batches that are made for a step.


@pytest.mark.parametrize("kind", DeviceKind)
@pytest.mark.parametrize("batch_seconds", [1e-3, 10.0])
def test_a_step_waits_for_its_batch_or_runs_beside_the_making_of_a_later_one(kind, batch_seconds):
    def seconds(task_kind: TaskKind, phase: Phase, shape: tuple[int, ...]) -> float:
        return batch_seconds if task_kind is TaskKind.SAMPLED_BATCH else made_seconds(task_kind, phase, shape)

    partition = equal_parts(1, num_nodes=4000, num_edges=40_000)
    plan = made_sampled_plan(partition, made_sampled((3000, 1500, 9000), (1500, 400, 4000), seeds_per_batch=400))
    cluster, calibration = made_cluster(kind=kind), made_calibration(compute_seconds=seconds)

    def step_of(found: Plan) -> float:
        return simulate(found, graph_of(partition), made_model(), cluster, calibration).median_step_seconds

    waiting, beside = step_of(plan), step_of(dataclasses.replace(plan, prefetch_batches=2))
    program = lower(plan, graph_of(partition), made_model(), cluster).tasks[0]
    of_tasks = sum(made_seconds(task.kind, task.phase, task.shape) for task in program[1:])
    # A thread that makes batches hides their making as far as steps last.
    assert beside == pytest.approx(max(of_tasks, batch_seconds), rel=0.01)
    # Without one a core makes them in turn, and the host of a GPU while the device is at the step before.
    in_turn = of_tasks + batch_seconds if kind is DeviceKind.CPU else max(of_tasks, batch_seconds)
    assert waiting == pytest.approx(in_turn, rel=0.01)


def test_batches_that_are_kept_cost_a_step_nothing():
    plan = made_plan(equal_parts(4, num_nodes=4000, num_edges=40_000), graph_parallel_degree=1)
    graph, cluster = graph_of(plan.partition), made_cluster()
    made, kept = (
        simulate(found, graph, made_model(), cluster, made_calibration())
        for found in (plan, dataclasses.replace(plan, keep_batches=True))
    )
    batch = [span.duration_seconds for span in made.spans if span.kind is TaskKind.CLUSTER_BATCH]
    assert made.median_step_seconds - kept.median_step_seconds == pytest.approx(sum(batch))
    assert len(batch) == 1
