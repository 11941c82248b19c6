"""Calibrations measure all that programs hold, once for each phase, and can be moved to today's speed of the host."""

from dataclasses import replace
from pathlib import Path

import pytest

from executor.environment import environment, local_cluster
from executor.measure.effort import (
    FULL_CPU,
    FULL_CUDA,
    QUICK_CPU,
    QUICK_CUDA,
    AttentionCase,
    Effort,
    GraphKind,
    case_shapes,
)
from executor.measure.session import Session, effort_of, expected_seconds, run_host_session, run_session
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.files import read_calibration
from simulator.specs.program import (
    ATTENTION_PASSES,
    COLLECTIVES,
    GROUP_COLLECTIVES,
    HOST_COPIES,
    SHAPE_FIELDS,
    UPDATES,
    Phase,
    TaskKind,
)
from simulator.specs.units import Dtype
from tests.made import phases_of

TINY = Effort(
    rows=(64,),
    widths=(32,),
    edges=(256,),
    attention=(AttentionCase(graph=GraphKind.UNIFORM, edges=256, degree=4, heads=8, head_size=4),),
    collective_bytes=(4096, 65536),
    case_seconds=1e-4,
    repetitions=3,
)
COMPUTES = set(TaskKind) - COLLECTIVES - UPDATES - ATTENTION_PASSES

pytestmark = pytest.mark.alone


def two_cores() -> ClusterSpec:
    """Return this machine with two ranks, whatever cores it has."""
    return replace(local_cluster(DeviceKind.CPU), devices_per_host=2)


@pytest.fixture(scope="module")
def session(tmp_path_factory) -> Session:
    out = tmp_path_factory.mktemp("calibration") / "calibration.json"
    session = Session(cluster=two_cores(), effort=TINY, precisions=tuple(Dtype), out=out, quiet=True)
    run_session(session)
    return session


@pytest.fixture(scope="module")
def calibration(session) -> Calibration:
    return read_calibration(session.out)


@pytest.mark.dist
def test_every_kind_is_measured_in_every_phase_format_and_number_of_busy_devices(calibration):
    found = {(s.kind, s.phase, s.dtype, s.busy_devices) for s in calibration.computes}
    packing = {TaskKind.HALO_PACK, TaskKind.PAD_ROWS}  # only where there is another rank
    expected = {
        (kind, phase, dtype, busy)
        for kind in COMPUTES
        for phase in phases_of(kind)
        for dtype in ((Dtype.FLOAT32,) if kind in HOST_COPIES else Dtype)  # bytes are bytes
        for busy in ((2,) if kind in packing else (1, 2))
    } | {(kind, Phase.UPDATE, Dtype.FLOAT32, busy) for kind in UPDATES for busy in (1, 2)}
    assert found == expected


@pytest.mark.dist
def test_every_collective_is_measured_at_every_size(calibration):
    found = {(s.kind, s.num_ranks, s.num_bytes) for s in calibration.collectives}
    assert found == {(kind, 2, num_bytes) for kind in GROUP_COLLECTIVES for num_bytes in TINY.collective_bytes}


@pytest.mark.dist
def test_samples_have_origin_and_spread_and_no_launching_time_on_cores(calibration):
    for sample in (*calibration.computes, *calibration.collectives):
        assert sample.origin == "microbenchmark"
        assert 0 < sample.low_seconds <= sample.seconds <= sample.high_seconds < 1
        assert sample.host_seconds == 0
    assert 0 < calibration.task_overhead_seconds < 1e-3
    here = dict(environment(DeviceKind.CPU))
    assert {key: value for key, value in calibration.environment if key != "date"} == {
        key: value for key, value in here.items() if key != "date"
    }


@pytest.mark.dist
def test_a_host_only_calibration_scales_all_tasks_by_one_factor(session, calibration, tmp_path):
    # As if the machine had been a hundred times slower when it was calibrated, and slower yet with both cores busy.
    slow = replace(
        calibration,
        computes=tuple(
            replace(
                sample,
                seconds=100 * sample.seconds,
                low_seconds=100 * sample.low_seconds,
                high_seconds=100 * sample.high_seconds,
            )
            for sample in calibration.computes
            if sample.busy_devices == 1
        )
        + tuple(
            replace(
                sample,
                seconds=10**6 * sample.seconds,
                low_seconds=10**6 * sample.low_seconds,
                high_seconds=10**6 * sample.high_seconds,
            )
            for sample in calibration.computes
            if sample.busy_devices == 2
        ),
    )
    out = tmp_path / "today.json"
    factor = run_host_session(replace(session, out=out), slow)
    assert 0.001 < factor < 0.1
    today = read_calibration(out)
    for before, after in zip(slow.computes, today.computes, strict=True):
        assert after.seconds == pytest.approx(factor * before.seconds)
        assert (after.kind, after.shape, after.origin) == (before.kind, before.shape, before.origin)
    assert today.collectives == slow.collectives


@pytest.mark.parametrize("effort", [TINY, QUICK_CPU, FULL_CPU, QUICK_CUDA, FULL_CUDA])
def test_every_effort_has_shapes_of_every_kind(effort):
    shapes = list(case_shapes(effort))
    assert {kind for kind, _ in shapes} == (COMPUTES | UPDATES) - {TaskKind.ATTENTION}
    assert all(len(shape) == len(SHAPE_FIELDS[kind]) for kind, shape in shapes)
    assert all(count >= 1 for _, shape in shapes for count in shape)


def test_a_larger_calibration_is_expected_to_take_longer():
    quick, full = (
        Session(
            cluster=two_cores(),
            effort=effort_of(DeviceKind.CPU, quick=is_quick),
            precisions=(Dtype.FLOAT32,),
            out=Path("calibration.json"),
        )
        for is_quick in (True, False)
    )
    # Measured: 36 s on two cores of an AMD EPYC, the limit that was asked for being 40 s.
    assert 30 < expected_seconds(quick) < 40 < expected_seconds(full)
