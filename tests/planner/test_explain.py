import dataclasses
from pathlib import Path

import pytest

from planner.explain import Breakdown, breakdown, description, order_reason, reason_lost
from simulator.simulation import pricing, simulate_with
from simulator.specs.decision import PlanFile
from simulator.specs.order import NodeOrder, OrderSpec, RankedOrder
from simulator.specs.plan import Exchange, ExchangePayload, Recompute
from simulator.specs.program import Phase, Stream, TaskKind
from simulator.specs.trace import SharedSpans, Span, Trace, TraceOrigin
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from tests.made import (
    equal_parts,
    graph_of,
    made_calibration,
    made_cluster,
    made_model,
    made_plan,
    made_sampled,
    made_sampled_plan,
)
from tests.plans import plan_file_of


def parts(num_parts: int):
    return equal_parts(num_parts, num_nodes=1200, num_edges=14_400)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (made_plan(parts(1)), "1 rank: full graph, fp32"),
        (made_plan(parts(4)), "4 ranks: full graph on 4 (halo), fp32"),
        (
            made_plan(parts(2), exchange=(Exchange.ALL_GATHER,) * 2, precision=Dtype.BFLOAT16),
            "2 ranks: full graph on 2 (all_gather), bf16",
        ),
        (
            made_plan(parts(2), num_layers=3, exchange=(Exchange.HALO, Exchange.ALL_GATHER, Exchange.HALO)),
            "2 ranks: full graph on 2 (halo/all_gather), fp32",
        ),
        (
            made_plan(
                parts(2),
                overlap_exchange=True,
                exchange_payload=ExchangePayload.ROWS,
                exchange_precision=Dtype.BFLOAT16,
                exchange_chunk_bytes=3 * 2**20,
            ),
            "2 ranks: full graph on 2 (halo of rows, overlapped, in bf16, at most 3 MiB a message), fp32",
        ),
        (
            made_plan(parts(1), recompute=(Recompute.LAYER, Recompute.NONE)),
            "1 rank: full graph, fp32, 1 of 2 layers recomputed",
        ),
        (
            made_plan(parts(8), data_parallel_degree=2, graph_parallel_degree=1),
            "2 ranks: 2 x 1 of 8 clusters, fp32",
        ),
        (
            made_plan(parts(8), data_parallel_degree=2, graph_parallel_degree=2),
            "4 ranks: 2 x 2 of 8 clusters on 2 (halo), fp32",
        ),
        (
            made_plan(parts(8), graph_parallel_degree=1, parts_per_batch=2, between_edges=False),
            "1 rank: 1 x 2 of 8 isolated clusters, fp32",
        ),
        (
            made_plan(parts(8), graph_parallel_degree=1, keep_batches=True),
            "1 rank: 1 x 1 of 8 clusters, kept on the device, fp32",
        ),
        (
            made_sampled_plan(
                parts(2), made_sampled((3, 2, 4), (2, 1, 3), seeds_per_batch=1024), data_parallel_degree=2
            ),
            "2 ranks: 2 x 1,024 nodes with 4-4 neighbours, fp32",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "plan",
)
def test_a_plan_in_words(plan, words):
    assert description(plan) == words


def span(rank: int, kind: TaskKind, start_seconds: float, seconds: float, *, waiting_seconds: float = 0.0) -> Span:
    return Span(
        rank=rank,
        step=0,
        stream=Stream.COMMUNICATION if kind.is_collective else Stream.COMPUTE,
        name="task",
        kind=kind,
        phase=Phase.FORWARD,
        shape=(),
        start_seconds=start_seconds,
        duration_seconds=seconds,
        waiting_seconds=waiting_seconds,
    )


def test_a_breakdown_by_hand():
    # Two ranks: one computes 3 s and waits for nobody, one computes 1 s and waits 2 s; the collective takes 1 s, and
    # half a second of the step has no task.
    spans = (
        span(0, TaskKind.LINEAR, 0.0, 2.0),
        span(0, TaskKind.GELU, 2.0, 1.0),
        span(0, TaskKind.ALL_REDUCE, 3.0, 1.0),
        span(1, TaskKind.LINEAR, 0.0, 1.0),
        span(1, TaskKind.ALL_REDUCE, 1.0, 3.0, waiting_seconds=2.0),
    )
    trace = Trace(
        origin=TraceOrigin.SIMULATED,
        num_ranks=2,
        spans=spans,
        step_seconds=(4.5,),
        traced_step_seconds=(4.5,),
        peak_memory_bytes=(0, 0),
    )
    whole = breakdown(made_plan(parts(2)), trace)
    assert whole == Breakdown(compute_seconds=2.0, communication_seconds=1.0, waiting_seconds=1.0, idle_seconds=0.5)
    # 8 parts, two a step: four steps an epoch.
    clusters = breakdown(made_plan(parts(8), data_parallel_degree=2, graph_parallel_degree=1), trace)
    assert clusters == Breakdown(compute_seconds=8.0, communication_seconds=4.0, waiting_seconds=4.0, idle_seconds=2.0)


@pytest.mark.parametrize(
    ("start", "seconds", "alone"),
    [
        (-1.0, 1.0, 1.0),  # the device waits for its batch
        (0.0, 3.0, 0.0),  # beside the step
        (0.5, 5.5, 3.0),  # longer than the step
    ],
)
def test_a_batch_takes_the_time_in_which_the_device_runs_nothing(start, seconds, alone):
    batch = dataclasses.replace(span(0, TaskKind.SAMPLED_BATCH, start, seconds), stream=Stream.LOADER, name="batch")
    step = max(start + seconds, 3.0) - min(start, 0.0)
    trace = Trace(
        origin=TraceOrigin.SIMULATED,
        num_ranks=1,
        spans=(batch, span(0, TaskKind.LINEAR, 0.0, 3.0)),
        step_seconds=(step,),
        traced_step_seconds=(step,),
        peak_memory_bytes=(0,),
    )
    plan = made_sampled_plan(parts(1), made_sampled((3, 2, 4), (2, 1, 3), seeds_per_batch=10**6))
    assert breakdown(plan, trace) == Breakdown(
        compute_seconds=3.0, communication_seconds=0.0, waiting_seconds=0.0, idle_seconds=0.0, batch_seconds=alone
    )


def test_a_breakdown_counts_ranks_that_are_alike_each():
    plan = made_plan(equal_parts(2, num_nodes=4000, num_edges=32_000, halo_rows=500), data_parallel_degree=3)
    costs = pricing(made_cluster(devices_per_host=6), made_calibration())
    shared = simulate_with(costs, plan, graph_of(plan.partition), made_model())
    assert isinstance(shared.spans, SharedSpans)
    found = breakdown(plan, shared)
    expected = breakdown(plan, dataclasses.replace(shared, spans=tuple(shared.spans)))
    assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(expected))


def test_a_breakdown_leaves_out_what_is_hidden_behind_computing():
    # Of a collective from 1 s to 4 s that waits one second, the last half second is not beside computing; nor is half
    # a second of waiting in another one.
    spans = (
        span(0, TaskKind.LINEAR, 0.0, 3.5),
        span(0, TaskKind.ALL_REDUCE, 1.0, 3.0, waiting_seconds=1.0),
        span(0, TaskKind.CLIP, 4.5, 0.5),
        span(0, TaskKind.ALL_TO_ALL, 4.75, 1.0, waiting_seconds=0.75),
    )
    trace = Trace(
        origin=TraceOrigin.SIMULATED,
        num_ranks=1,
        spans=spans,
        step_seconds=(6.0,),
        traced_step_seconds=(6.0,),
        peak_memory_bytes=(0,),
    )
    assert breakdown(made_plan(parts(1)), trace) == Breakdown(
        compute_seconds=4.0, communication_seconds=0.75, waiting_seconds=0.5, idle_seconds=0.75
    )


BEST = Breakdown(compute_seconds=10.0, communication_seconds=2.0, waiting_seconds=1.0, idle_seconds=0.5)


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ((13.0, 2.0, 1.0, 0.5), "3 s more computing on the mean rank in an epoch"),
        ((5.0, 2.5, 1.0, 0.5), "500 ms more communicating on the mean rank in an epoch"),
        ((11.0, 2.0, 2.5, 0.5), "1.5 s more waiting for other ranks on the mean rank in an epoch"),
        ((10.0, 2.0, 1.0, 4.5), "4 s more idle while the host launches on the mean rank in an epoch"),
        ((10.0, 2.0, 1.0, 0.5), "no slower on the mean rank, but its slowest rank is"),
        ((1.0, 1.0, 0.0, 0.0), "no slower on the mean rank, but its slowest rank is"),
        ((10.0, 2.0, 1.0, 0.5, 7.0), "7 s more making batches on the mean rank in an epoch"),
    ],
)
def test_why_a_plan_lost(other, reason):
    compute, communication, waiting, idle, *batch = other
    lost = Breakdown(
        compute_seconds=compute,
        communication_seconds=communication,
        waiting_seconds=waiting,
        idle_seconds=idle,
        batch_seconds=sum(batch),
    )
    assert reason_lost(BEST, lost) == reason


NATURAL = RankedOrder(
    kind=NodeOrder.NATURAL,
    row_bytes=1000,
    window_16_reuse=1.0,
    window_64_reuse=1.0,
    beyond_cache_ratio=0.8,
    relative_seconds=1.0,
)
DEGREE = dataclasses.replace(NATURAL, kind=NodeOrder.DEGREE, beyond_cache_ratio=0.79, relative_seconds=0.985)
METIS = dataclasses.replace(NATURAL, kind=NodeOrder.METIS, beyond_cache_ratio=0.3, relative_seconds=0.6)


@pytest.mark.parametrize(
    ("chosen", "tried", "cache_bytes", "words"),
    [
        (NodeOrder.METIS, (NATURAL, DEGREE, METIS), 10**6, "gathers -40 %; 300 B an edge miss the cache, not 800 B"),
        (NodeOrder.NATURAL, (NATURAL, DEGREE), 10**6, "the best other, by degree, changes gathers by -1.5 %"),
        (NodeOrder.NATURAL, (NATURAL,), 10**6, "no other could shorten the gathers enough"),
        (NodeOrder.NATURAL, (NATURAL,), 0, "cache_bytes of the device is unknown"),
        (NodeOrder.METIS, (), 10**6, "the only one that [search] allows"),
        (NodeOrder.NATURAL, (), 0, "the only one that [search] allows"),
    ],
)
def test_the_choice_of_an_order_in_words(tmp_path: Path, chosen, tried, cache_bytes, words):
    file = plan_file(tmp_path, chosen, tried, cache_bytes)
    assert order_reason(file) == words


def test_the_order_of_samples_in_words(tmp_path: Path):
    plan = made_sampled_plan(parts(1), made_sampled((3, 2, 4), (2, 1, 3)))
    train = TrainSpec(num_steps=1, learning_rate=0.1)
    file = plan_file_of(plan, graph_of(plan.partition), made_model(), made_cluster(), train, tmp_path / "plan.json")
    assert order_reason(file) == "what samples gather is not known beforehand"


def plan_file(folder: Path, kind: NodeOrder, tried: tuple[RankedOrder, ...], cache_bytes: int) -> PlanFile:
    order = OrderSpec() if kind is NodeOrder.NATURAL else OrderSpec(kind=kind, path="order.npy", sha256="0" * 64)
    plan, model, cluster = made_plan(parts(1), order=order), made_model(), made_cluster()
    cluster = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, cache_bytes=cache_bytes))
    train = TrainSpec(num_steps=1, learning_rate=0.1)
    file = plan_file_of(plan, graph_of(plan.partition), model, cluster, train, folder / "plan.json")
    return dataclasses.replace(file, orders=tried)
