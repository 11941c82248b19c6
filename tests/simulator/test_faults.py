"""Stragglers, jitter, slow and lost links: what a simulated step and a plan make of them."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.constraints import violations
from simulator.errors import PlanError, SpecError
from simulator.simulation import simulate
from simulator.specs.cluster import ClusterSpec
from simulator.specs.program import COLLECTIVES
from simulator.specs.topology import LinkFault, Straggler
from simulator.specs.trace import Trace
from tests.made import (
    equal_parts,
    graph_of,
    made_calibration,
    made_cluster,
    made_model,
    made_plan,
)

PLAN = made_plan(equal_parts(4, num_nodes=4000, num_edges=32_000, halo_rows=500))
CLUSTER = made_cluster(devices_per_host=4)
TWO_HOSTS = made_cluster(num_hosts=2, devices_per_host=2)


def trace_of(cluster: ClusterSpec, **fields: Any) -> Trace:
    return simulate(PLAN, graph_of(PLAN.partition), made_model(), cluster, made_calibration(), **fields)


def seconds_of(cluster: ClusterSpec) -> float:
    return trace_of(cluster).median_step_seconds


def compute_seconds(trace: Trace, rank: int) -> float:
    return sum(span.duration_seconds for span in trace.spans if span.rank == rank and span.kind not in COLLECTIVES)


def test_a_straggler_computes_as_much_more_slowly_as_is_said():
    plain, slow = trace_of(CLUSTER), trace_of(replace(CLUSTER, stragglers=(Straggler(device=2, slowdown=1.5),)))
    for rank, factor in enumerate((1, 1, 1.5, 1)):
        assert compute_seconds(slow, rank) == pytest.approx(factor * compute_seconds(plain, rank))
    assert slow.median_step_seconds > plain.median_step_seconds


def test_a_straggler_without_a_rank_changes_nothing():
    larger = replace(CLUSTER, num_hosts=2)
    assert seconds_of(replace(larger, stragglers=(Straggler(device=7, slowdown=9),))) == seconds_of(larger)


def test_others_wait_for_a_straggler():
    slow = trace_of(replace(CLUSTER, stragglers=(Straggler(device=2, slowdown=3),)))
    waits = [sum(span.waiting_seconds for span in slow.spans if span.rank == rank) for rank in range(4)]
    assert min(waits) == waits[2]
    assert waits[0] > 2 * waits[2]


@given(slowdown=st.floats(1, 10), more=st.floats(0, 10))
def test_a_slower_straggler_is_never_faster(slowdown, more):
    seconds = [
        seconds_of(replace(CLUSTER, stragglers=(Straggler(device=1, slowdown=each),)))
        for each in (slowdown, slowdown + more)
    ]
    assert seconds[1] >= (1 - 1e-9) * seconds[0]


def test_jitter_delays_and_is_drawn_from_the_seed():
    jittery = replace(CLUSTER, jitter=0.3)
    first, again, other = (trace_of(jittery, seed=seed).median_step_seconds for seed in (0, 0, 1))
    assert first == again != other
    assert first > seconds_of(CLUSTER)
    assert trace_of(jittery, trials=5).step_seconds[:1] == (first,)
    assert len(set(trace_of(jittery, trials=5).step_seconds)) == 5


def test_jitter_delays_by_a_folded_normal():
    # exp(0.1 * |z|) has the median exp(0.1 * 0.6745).
    plain, jittery = trace_of(CLUSTER), trace_of(replace(CLUSTER, jitter=0.1))
    factors = sorted(
        after.duration_seconds / before.duration_seconds
        for before, after in zip(plain.spans, jittery.spans, strict=True)
        if before.kind not in COLLECTIVES
    )
    assert factors[0] >= 1
    assert factors[len(factors) // 2] == pytest.approx(1.0698, rel=0.02)


@pytest.mark.parametrize(
    ("cluster", "ends"), [(CLUSTER, ("device1", "host")), (TWO_HOSTS, ("nic0", "network"))], ids=["device", "card"]
)
def test_a_slow_link_makes_a_step_longer(cluster, ends):
    fault = LinkFault(ends=ends, bandwidth_ratio=0.01)
    assert seconds_of(replace(cluster, link_faults=(fault,))) > seconds_of(cluster)
    rate = LinkFault(ends=ends, bandwidth_bytes_per_second=1e6)
    assert seconds_of(replace(cluster, link_faults=(rate,))) > seconds_of(cluster)


def test_a_lost_card_makes_a_step_longer():
    lost = replace(TWO_HOSTS, link_faults=(LinkFault(ends=("nic0", "network"), host=1, bandwidth_ratio=0),))
    assert seconds_of(lost) > seconds_of(TWO_HOSTS)


def test_a_plan_over_a_lost_link_is_refused_and_names_the_pair():
    cut = replace(CLUSTER, link_faults=(LinkFault(ends=("device3", "host"), bandwidth_ratio=0),))
    with pytest.raises(PlanError, match="link_faults leave no way from rank 0 to rank 3: train on fewer ranks"):
        trace_of(cut)
    cards = tuple(LinkFault(ends=(f"nic{nic}", "network"), host=1, bandwidth_ratio=0) for nic in range(2))
    with pytest.raises(PlanError, match="link_faults leave no way from rank 2 to rank 0"):
        trace_of(replace(TWO_HOSTS, link_faults=cards))


def test_a_plan_on_the_ranks_that_are_joined_is_legal():
    larger = made_cluster(devices_per_host=8)
    cut = replace(larger, link_faults=(LinkFault(ends=("device7", "host"), bandwidth_ratio=0),))
    assert violations(PLAN, graph_of(PLAN.partition), made_model(), cut) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stragglers": (Straggler(device=4, slowdown=2),)}, "stragglers must name devices below 4"),
        ({"stragglers": (Straggler(device=1, slowdown=2),) * 2}, "stragglers must name each device once"),
        ({"jitter": -0.1}, "jitter must be finite and >= 0"),
    ],
)
def test_faults_of_what_is_not_there_are_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        replace(CLUSTER, **changes)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ends": ("nic0", "network")}, "bandwidth_ratio or bandwidth_bytes_per_second must be given"),
        ({"ends": ("nic0", "network"), "bandwidth_ratio": 1.5}, r"bandwidth_ratio must be within \[0, 1\]"),
        (
            {"ends": ("nic0", "network"), "bandwidth_ratio": 0.5, "bandwidth_bytes_per_second": 1e9},
            "must be given, not both",
        ),
        ({"ends": ("leaf0", "spine"), "host": 1, "bandwidth_ratio": 0.5}, "host must be left out for a leaf"),
    ],
)
def test_a_fault_that_says_too_little_or_too_much_is_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        LinkFault(**fields)


def test_a_straggler_faster_than_its_likes_is_refused():
    with pytest.raises(SpecError, match=r"slowdown must be finite and >= 1, got 0\.5"):
        Straggler(device=0, slowdown=0.5)
