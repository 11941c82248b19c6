"""Time-outs by hand from made laws of links and collectives."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.collectives import CollectiveCosts
from simulator.specs.decision import PlanFile, Prediction
from simulator.specs.train import TrainSpec
from simulator.timeout import LEAST_TIMEOUT_SECONDS, collective_timeout_seconds, longest_collective_seconds
from tests.made import equal_parts, graph_of, made_calibration, made_cluster, made_model, made_plan

MODEL = made_model()  # two layers, 16 wide: a row of keys and values in fp32 has 128 bytes
CLUSTER = made_cluster(devices_per_host=2)  # 5 us and a nanosecond a byte


def plan_file(plan, cluster=CLUSTER, **prediction) -> PlanFile:
    known = {"p10_step_seconds": 1.0, "p50_step_seconds": 1.0, "p90_step_seconds": 1.0, "epoch_seconds": 1.0}
    return PlanFile(
        graph=graph_of(plan.partition),
        model=MODEL,
        cluster=cluster,
        train=TrainSpec(num_steps=10, learning_rate=0.1),
        plan=plan,
        prediction=Prediction(**(known | prediction), peak_memory_bytes=((),) * plan.num_ranks),
        ranking=(),
        rejected=(),
        calibration_sha256="",
    )


def longest(plan, calibration=None, cluster=CLUSTER) -> float:
    costs = CollectiveCosts(cluster, calibration)
    return longest_collective_seconds(costs, plan, graph_of(plan.partition), MODEL, cluster)


def test_the_longest_collective_follows_from_its_bytes_and_the_stated_link():
    # A million rows of 128 bytes each way at a byte in a nanosecond; the gradients are far smaller.
    plan = made_plan(equal_parts(2, num_nodes=4_000_000, num_edges=8_000_000, halo_rows=1_000_000))
    assert longest(plan) == pytest.approx(128e-3 + 5e-6)


def test_it_follows_from_the_measured_curve_where_there_is_one():
    plan = made_plan(equal_parts(2, num_nodes=400_000, num_edges=800_000, halo_rows=2**18))
    calibration = made_calibration(
        collective_seconds=lambda kind, ranks, num_bytes: num_bytes * 7e-9 + 1e-9, num_ranks=(2,)
    )
    assert longest(plan, calibration) == pytest.approx(7e-9 * 2**25, rel=1e-3)


def test_an_evaluation_of_the_whole_graph_counts_when_batches_are_small():
    # Two replicas train on a part each and exchange nothing but gradients. An evaluation deals parts 0 and 2 to rank 0
    # and 1 and 3 to rank 1: 4 pairs of parts cross each way, a million rows each.
    partition = equal_parts(4, num_nodes=8_000_000, num_edges=8_000_000, halo_rows=1_000_000)
    plan = made_plan(partition, data_parallel_degree=2, graph_parallel_degree=1, parts_per_batch=1)
    assert longest(plan) == pytest.approx(4 * 128e-3 + 5e-6)


def test_one_rank_waits_for_nobody():
    assert longest(made_plan(equal_parts(1, num_nodes=10, num_edges=10))) == 0.0


SMALL = made_plan(equal_parts(2, num_nodes=100, num_edges=100, halo_rows=10))


def test_short_steps_have_five_minutes():
    assert collective_timeout_seconds(plan_file(SMALL)) == LEAST_TIMEOUT_SECONDS == 300


def test_long_steps_and_long_transfers_have_twenty_times_what_was_predicted():
    file = plan_file(SMALL, p90_step_seconds=40.0, epoch_seconds=39.0, longest_collective_seconds=5.0)
    assert collective_timeout_seconds(file) == 20 * (40 + 5)
    # Without a prediction of the transfer, by the stated links: some microseconds here.
    assert collective_timeout_seconds(plan_file(SMALL, p90_step_seconds=40.0)) == pytest.approx(800, rel=1e-4)


def test_an_evaluation_may_be_late_by_a_layer_of_an_epoch():
    file = plan_file(SMALL, epoch_seconds=100.0, longest_collective_seconds=0.0)
    assert collective_timeout_seconds(file) == 20 * 100 / 2


def test_what_the_train_table_says_holds():
    file = plan_file(SMALL, p90_step_seconds=1000.0)
    assert collective_timeout_seconds(replace(file, train=replace(file.train, collective_timeout_seconds=7.0))) == 7


@given(rows=st.integers(0, 10**6), more=st.integers(0, 10**6))
def test_more_rows_never_have_less_time(rows, more):
    def seconds(halo_rows: int) -> float:
        partition = equal_parts(2, num_nodes=4_000_000, num_edges=8_000_000, halo_rows=halo_rows)
        return longest(made_plan(partition))

    assert seconds(rows + more) >= seconds(rows)
