"""Which replicas stand for others, by hand, and how far a step is then off."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.likeness import replicas_that_stand_for_others
from simulator.simulation import pricing, simulate_with
from simulator.specs.cluster import DeviceKind
from simulator.specs.trace import counted_ranks
from simulator.workload import lower, rank_work
from tests.made import graph_of, made_calibration, made_cluster, made_model, made_part, made_partition, made_plan


@pytest.mark.parametrize(
    ("held", "ratio", "firsts"),
    [
        ([[100], [100], [101]], 0.0, [0, 1, 2]),
        ([[100], [100], [130]], 0.05, [0, 0, 2]),
        ([[0], [1], [0]], 0.5, [0, 1, 0]),
        ([[1000, (5, None)], [1000, (5, None)], [1000, (5, 7)], [1000, (5, None), 0]], 0.1, [0, 0, 2, 3]),
        ([[(1, 2), 3], [1, (2, 3)]], 0.1, [0, 1]),
        ([], 0.1, []),
    ],
)
def test_replicas_stand_for_others_by_hand(held, ratio, firsts):
    assert replicas_that_stand_for_others(held, ratio) == firsts


@given(st.lists(st.lists(st.integers(0, 10**6), min_size=2, max_size=2), max_size=20), st.floats(0.001, 0.5))
def test_counts_of_replicas_that_are_alike_differ_by_no_more_than_the_share(held, ratio):
    firsts = replicas_that_stand_for_others(held, ratio)
    for replica, first in enumerate(firsts):
        assert first <= replica
        assert firsts[first] == first
        for count, other in zip(held[replica], held[first], strict=True):
            assert max(count, other) <= (1 + ratio) * min(count, other) * (1 + 1e-9)


sizes = st.lists(st.integers(10_000, 30_000), min_size=4, max_size=12)


def plan_of(nodes: list[int]):
    """Return a plan of a rank a part, of these sizes, each a replica of its own."""
    count = len(nodes)
    parts = [made_part(n, [8 * n * (p == q) for q in range(count)], [0] * count) for p, n in enumerate(nodes)]
    return made_plan(made_partition(parts), data_parallel_degree=count, graph_parallel_degree=1, overlap_gradients=True)


@given(sizes, st.sampled_from([0.01, 0.1, 0.5]), st.sampled_from(DeviceKind))
@settings(max_examples=25)
def test_a_step_of_parts_taken_for_alike_is_off_by_no_more_than_their_counts(nodes, ratio, kind):
    plan, model = plan_of(nodes), made_model()
    costs = pricing(made_cluster(num_hosts=len(nodes), devices_per_host=1, kind=kind), made_calibration())
    exact, alike = (
        simulate_with(costs, plan, graph_of(plan.partition), model, alike_ratio=each) for each in (0.0, ratio)
    )
    assert len(counted_ranks(alike)) <= len(counted_ranks(exact))
    # Made costs grow with their counts; between the sizes that were calibrated they are off their law by a little.
    assert alike.median_step_seconds == pytest.approx(exact.median_step_seconds, rel=ratio + 0.02)
    assert len(alike.spans) == len(exact.spans)


def test_parts_within_a_share_of_each_other_are_one_class_of_ranks():
    plan = plan_of([20_000, 20_020, 30_100, 20_010, 30_110, 25_000])
    work = rank_work(plan, step=0, seed=0)
    program, exact = (
        lower(plan, graph_of(plan.partition), made_model(), made_cluster(devices_per_host=6), alike_ratio=ratio)
        for ratio in (0.01, 0.0)
    )
    assert (len(program.shared.lists), len(exact.shared.lists)) == (3, 6)
    for rank, tasks in enumerate(program.tasks):
        attention = next(task for task in tasks if task.name == "layer0.attention")
        assert attention.shape[0] == pytest.approx(work[rank].num_rows, rel=0.01)
