"""Logs become curves of a calibration, or are refused with what is wrong."""

from dataclasses import replace

import pytest

from simulator.collectives import CollectiveCosts
from simulator.errors import CalibrationError, SpecError
from simulator.log_samples import log_path, with_logs
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import BUILT_IN_CLUSTERS
from simulator.specs.communication import Algorithm
from simulator.specs.program import TaskKind
from tests.made import made_collective, made_collective_sample

CLUSTER = BUILT_IN_CLUSTERS["h100x8-ndr"]
EMPTY = Calibration(device_name=CLUSTER.device.name, environment=(), computes=(), collectives=())
SITE_A = "h100_ndr_allreduce_2n16g_default_nccltests309_siteA.txt"


def test_a_log_across_hosts_is_what_a_collective_then_costs(shared_logs):
    calibration, added = with_logs(EMPTY, [shared_logs / SITE_A])
    assert (added[0].num_samples, added[0].is_healthy, added[0].left_out) == (32, True, ())
    tasks = made_collective(TaskKind.ALL_REDUCE, 2**30, 16)
    cost = CollectiveCosts(CLUSTER, calibration).price(tasks)
    moving = max(flow.num_bytes / flow.max_bytes_per_second for flow in cost.flows)
    # 4470.2 us in place, by the file.
    assert cost.latency_seconds + moving == pytest.approx(4470.2e-6)
    assert cost.extrapolated == ()
    assert {sample.origin for sample in calibration.collectives} == {f"nccl-tests {SITE_A}"}


def test_bytes_are_those_that_each_rank_gives(shared_logs):
    calibration, _ = with_logs(
        replace(EMPTY, device_name="NVIDIA H200"), [shared_logs / "h200_sxm_nvlink_nccl_aiconfigurator.txt"]
    )
    largest = {sample.kind: sample.num_bytes for sample in calibration.collectives if sample.num_ranks == 8}
    # 512 MiB in all: of an all-gather an eighth each, of an all-to-all all but a rank's own eighth.
    assert largest == {
        TaskKind.ALL_REDUCE: 2**29,
        TaskKind.REDUCE_SCATTER: 2**29,
        TaskKind.ALL_GATHER: 2**26,
        TaskKind.ALL_TO_ALL: 7 * 2**26,
    }


def test_several_logs_stand_side_by_side_and_the_same_shape_is_replaced(shared_logs):
    old = replace(made_collective_sample(TaskKind.ALL_REDUCE, 16, 1, 1.0), num_hosts=2)
    other = made_collective_sample(TaskKind.ALL_REDUCE, 16, 1, 2.0)
    names = (SITE_A, "h100_ndr_allreduce_4n32g_default_nccltests309_siteA.txt")
    calibration, added = with_logs(replace(EMPTY, collectives=(old, other)), [shared_logs / name for name in names])
    assert [log.num_samples for log in added] == [32, 32]
    assert old not in calibration.collectives
    assert other in calibration.collectives
    assert {(s.num_ranks, s.num_hosts) for s in calibration.collectives} == {(16, 1), (16, 2), (32, 4)}


def test_a_forced_algorithm_is_a_curve_of_its_own(shared_logs):
    ring = "h100_ndr_allreduce_2n16g_RING_minctas24_qps2_nccltests309_siteC.txt"
    calibration, _ = with_logs(EMPTY, [shared_logs / SITE_A, shared_logs / ring])
    assert {sample.algorithm for sample in calibration.collectives} == {None, Algorithm.RING}


def test_a_degraded_log_is_refused_with_what_is_suspected_unless_forced(shared_logs):
    path = shared_logs / "h100_ndr_allreduce_2n16g_RING_DEGRADED_nccltests290.txt"
    with pytest.raises(CalibrationError, match=r"degraded.*2 of 8 network cards.*--force"):
        with_logs(EMPTY, [path])
    _, added = with_logs(EMPTY, [path], force=True)
    assert not added[0].is_healthy


def test_a_log_of_another_device_is_refused(shared_logs):
    with pytest.raises(CalibrationError, match='device, "NVIDIA H100 80GB HBM3", got "H200"'):
        with_logs(EMPTY, [shared_logs / "h200_oci_allreduce_2n16g.txt"])


def test_rows_that_no_plan_does_are_counted(shared_logs):
    calibration, added = with_logs(
        replace(EMPTY, device_name="NVIDIA H200"), [shared_logs.parent / "measured/h200x2/comm.csv"]
    )
    assert "21 rows were left out: send_receive is not among what plans do" in added[0].left_out
    assert len(calibration.collectives) == 4 * 21


def test_a_log_without_rows_for_a_calibration_is_refused(shared_logs):
    a100 = replace(EMPTY, device_name="NVIDIA A100-SXM4-80GB")
    with pytest.raises(SpecError, match="must hold rows that a calibration takes, got none"):
        with_logs(a100, [shared_logs / "a100_nvlink_sendrecv_1n8g_liplus.txt"])


@pytest.mark.parametrize("text", ["log.txt", "nccl-tests:", "kineto:log.txt"])
def test_a_source_of_another_form_is_refused(text):
    with pytest.raises(SpecError, match="--from must be nccl-tests:FILE"):
        log_path(text)
    assert str(log_path("nccl-tests:a:b.txt")) == "a:b.txt"
