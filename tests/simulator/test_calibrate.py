import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.calibrate import Correction, MeasuredRun, recalibrate
from simulator.costs import ComputeCosts
from simulator.errors import CalibrationError
from simulator.simulation import simulate
from simulator.specs.calibration import Calibration, ComputeSample
from simulator.specs.plan import Plan
from simulator.specs.program import ATTENTION_PASSES, COLLECTIVES, Phase, TaskKind
from simulator.specs.trace import Span, Trace, TraceOrigin
from tests.made import (
    equal_parts,
    graph_of,
    made_calibration,
    made_cluster,
    made_model,
    made_plan,
    made_task,
    phases_of,
)

CLUSTER = made_cluster(devices_per_host=2)
CALIBRATION = made_calibration()
ALONE = made_plan(equal_parts(1, num_nodes=3000, num_edges=20_000))
TWO = made_plan(equal_parts(2, num_nodes=3000, num_edges=20_000, halo_rows=300), gradient_bucket_bytes=2048)


def predicted(plan: Plan, calibration: Calibration = CALIBRATION) -> Trace:
    return simulate(plan, graph_of(plan.partition), made_model(), CLUSTER, calibration)


def measured(plan: Plan, factor: Callable[[Span], float], *, steps: int = 3) -> Trace:
    """Return a trace of some steps in which each span takes `factor(span)` times what is predicted.

    A collective's wait is no cost, so it stays.
    """
    trace = predicted(plan)
    spans: list[Span] = []
    for step in range(steps):
        for predicted_span in trace.spans:
            span = dataclasses.replace(predicted_span, step=step)
            seconds = span.waiting_seconds + span.busy_seconds * factor(span)
            spans.append(dataclasses.replace(span, duration_seconds=seconds))
    return dataclasses.replace(trace, origin=TraceOrigin.MEASURED, spans=tuple(spans))


def run(trace: Trace, name: str = "measured.json") -> MeasuredRun:
    return MeasuredRun(name=name, trace=trace)


def factors(corrections: tuple[Correction, ...]) -> dict[str, float]:
    return {correction.label: correction.factor for correction in corrections}


def label(span: Span, num_ranks: int = 2) -> str:
    """Return the label under which the correction of a span of a run on one host's devices is told."""
    if span.kind.is_collective:
        return f"{span.kind} on {len(span.group)} ranks"
    phase = Phase.FORWARD if span.phase is Phase.RECOMPUTE else span.phase
    busy = ", 2 devices busy" if num_ranks == 2 else ""
    return f"{span.kind} {phase} {span.dtype}{busy}"


def drawn_factor(name: str) -> float:
    """Return a factor from 0.5 to 2 that depends on the name alone."""
    return 0.5 + sum(map(ord, name)) % 16 / 10


# --- Known factors are found.


def test_known_factors_of_every_kind_are_found():
    trace = measured(TWO, lambda span: drawn_factor(label(span)))
    _, corrections = recalibrate(CALIBRATION, CLUSTER, [run(trace)])
    labels = {label(span) for span in trace.spans}
    assert factors(corrections) == pytest.approx({name: drawn_factor(name) for name in labels})
    # The most first, whether costs rose or fell.
    moved = [max(correction.factor, 1 / correction.factor) for correction in corrections]
    assert moved == sorted(moved, reverse=True)


def test_spans_are_counted():
    trace = measured(TWO, lambda _: 1.5, steps=4)
    _, corrections = recalibrate(CALIBRATION, CLUSTER, [run(trace)])
    # Of a collective, the spans of its two ranks are one measurement.
    expected = Counter(label(span) for span in trace.spans)
    expected = Counter({name: count // (1 + name.endswith("ranks")) for name, count in expected.items()})
    assert {correction.label: correction.num_spans for correction in corrections} == expected


@given(share=st.integers(3, 9), outlier=st.sampled_from([0.01, 50.0]))
@settings(max_examples=10)
def test_outliers_do_not_move_the_factors(share, outlier):
    # One in three to one in nine spans of each kind is far off, by hiccups of the machine.
    trace = measured(ALONE, lambda span: 1.5 * (outlier if (span.step + len(span.name)) % share == 0 else 1), steps=9)
    _, corrections = recalibrate(CALIBRATION, CLUSTER, [run(trace)])
    assert list(factors(corrections).values()) == pytest.approx([1.5] * len(corrections))


def test_after_recalibration_the_measured_run_is_predicted():
    truth = measured(TWO, lambda span: drawn_factor(label(span)))
    calibration, _ = recalibrate(CALIBRATION, CLUSTER, [run(truth)])
    again = {(span.rank, span.name): span for span in predicted(TWO, calibration).spans}
    for span in truth.spans:
        assert again[span.rank, span.name].busy_seconds == pytest.approx(span.busy_seconds, rel=0.01)


def test_after_recalibration_other_shapes_are_scaled_too():
    truth = measured(ALONE, lambda _: 2.0)
    calibration, _ = recalibrate(CALIBRATION, CLUSTER, [run(truth)])
    task = made_task(TaskKind.LINEAR, (123_456, 16, 64))
    before, after = (
        ComputeCosts(found, busy_devices=1).price(task).device_seconds for found in (CALIBRATION, calibration)
    )
    assert after == pytest.approx(2 * before, rel=0.01)


def test_what_was_right_stays_as_it_was():
    calibration, corrections = recalibrate(CALIBRATION, CLUSTER, [run(measured(ALONE, lambda _: 1.0))])
    assert list(factors(corrections).values()) == pytest.approx([1.0] * len(corrections))
    before, after = (predicted(ALONE, found).median_step_seconds for found in (CALIBRATION, calibration))
    assert after == pytest.approx(before)


# --- What is kept.


def test_origins_are_kept():
    truth = measured(ALONE, lambda span: 2.0 if span.kind is TaskKind.GELU else 1.0)
    calibration, _ = recalibrate(CALIBRATION, CLUSTER, [run(truth, "monday.json")])
    twice, _ = recalibrate(calibration, CLUSTER, [run(truth, "tuesday.json")])
    origins = [
        {
            sample.origin
            for sample in found.computes
            if (sample.kind, sample.phase, sample.dtype) == (TaskKind.GELU, Phase.FORWARD, "fp32")
        }
        for found in (calibration, twice)
    ]
    assert origins == [{"made", "trace monday.json"}, {"made", "trace tuesday.json"}]
    # Microbenchmarks stay as they were measured.
    assert set(CALIBRATION.computes) <= set(twice.computes)


def test_a_trace_says_most_of_shapes_like_its_own():
    def seconds(calibration: Calibration, rows: int) -> float:
        return ComputeCosts(calibration, busy_devices=1).price(made_task(TaskKind.GELU, (rows, 64))).device_seconds

    def traced(rows: int, factor: float) -> ComputeSample:
        base = next(s for s in CALIBRATION.computes if (s.kind, s.phase) == (TaskKind.GELU, Phase.FORWARD))
        measured_seconds = factor * seconds(CALIBRATION, rows)
        return dataclasses.replace(
            base,
            shape=(rows, 64),
            seconds=measured_seconds,
            low_seconds=measured_seconds,
            high_seconds=measured_seconds,
            is_from_trace=True,
        )

    # Shapes of a thousand rows took twice as long as predicted, those of ten million and more as long.
    traces = (traced(1000, 2.0), traced(10**7, 1.0), traced(3 * 10**7, 1.0))
    calibration = dataclasses.replace(CALIBRATION, computes=CALIBRATION.computes + traces)
    factors_by_rows = {rows: seconds(calibration, rows) / seconds(CALIBRATION, rows) for rows in (1000, 1020, 10**7)}
    assert factors_by_rows[1000] == pytest.approx(2.0, rel=0.01)
    assert 1.9 < factors_by_rows[1020] < 2.0
    assert factors_by_rows[10**7] == pytest.approx(1.0, rel=0.01)
    # Between and beyond, the nearer ones count for more; the median of all is one.
    assert 1.0 < seconds(calibration, 10**5) / seconds(CALIBRATION, 10**5) < 1.9


def test_a_measured_shape_is_a_sample_with_its_deciles():
    # Eleven steps: the forward GELU of layer 0 takes 1.0 to 2.0 times as long in steps of a tenth.
    trace = measured(ALONE, lambda _: 1.0, steps=11)
    spans = tuple(
        dataclasses.replace(span, duration_seconds=span.duration_seconds * (1 + span.step / 10))
        for span in trace.spans
        if span.name == "layer0.feed_forward_activation"
    )
    base = spans[0].duration_seconds
    calibration, _ = recalibrate(CALIBRATION, CLUSTER, [run(dataclasses.replace(trace, spans=spans))])
    (sample,) = [sample for sample in calibration.computes if sample.origin == "trace measured.json"]
    assert (sample.kind, sample.phase, sample.shape) == (TaskKind.GELU, Phase.FORWARD, spans[0].shape)
    assert (sample.low_seconds, sample.seconds, sample.high_seconds) == pytest.approx(
        (1.1 * base, 1.5 * base, 1.9 * base)
    )


def test_attentions_that_differ_in_the_cache_alone_are_samples_of_their_own():
    plans = [dataclasses.replace(ALONE, beyond_cache_ratio=ratio) for ratio in (0.2, 0.7)]

    def slower_attention(factor: float) -> Callable[[Span], float]:
        return lambda span: factor if span.kind is TaskKind.ATTENTION else 1.0

    runs = [run(measured(plan, slower_attention(factor))) for plan, factor in zip(plans, (1.5, 3.0), strict=True)]
    updated, _ = recalibrate(CALIBRATION, CLUSTER, runs)
    found = {s.beyond_cache_ratio for s in updated.computes if s.is_from_trace and s.kind is TaskKind.ATTENTION}
    assert found == {0.2, 0.7}
    for plan, factor in zip(plans, (1.5, 3.0), strict=True):
        before, after = (
            sum(span.busy_seconds for span in predicted(plan, calibration).spans if span.kind is TaskKind.ATTENTION)
            for calibration in (CALIBRATION, updated)
        )
        assert after / before == pytest.approx(factor, rel=0.02)


def test_kinds_that_were_not_measured_stay_as_they_were():
    calibration, corrections = recalibrate(CALIBRATION, CLUSTER, [run(measured(ALONE, lambda _: 2.0))])
    kinds = {label.split()[0] for label in factors(corrections)}
    untouched = {TaskKind.HALO_PACK, TaskKind.PAD_ROWS, TaskKind.EDGE_BIAS, TaskKind.DROPOUT, TaskKind.SPARSE_LINEAR}
    assert kinds.isdisjoint(kind.value for kind in untouched)
    for kind in untouched:
        assert [s for s in calibration.computes if s.kind is kind] == [
            s for s in CALIBRATION.computes if s.kind is kind
        ]
    assert calibration.collectives == CALIBRATION.collectives
    assert calibration.device_name == CALIBRATION.device_name
    assert calibration.environment == CALIBRATION.environment


def test_a_run_on_two_devices_says_nothing_of_one_alone():
    calibration, _ = recalibrate(CALIBRATION, CLUSTER, [run(measured(TWO, lambda _: 3.0))])
    alone, together = (
        ComputeCosts(calibration, busy_devices=busy).price(made_task(TaskKind.GELU, (1024, 64))).device_seconds
        for busy in (1, 2)
    )
    before = ComputeCosts(CALIBRATION, busy_devices=1).price(made_task(TaskKind.GELU, (1024, 64))).device_seconds
    assert (alone, together) == pytest.approx((before, 3 * before))


def test_several_runs_are_learned_from_together():
    once, twice = measured(ALONE, lambda _: 1.2), measured(ALONE, lambda _: 1.4)
    _, corrections = recalibrate(CALIBRATION, CLUSTER, [run(once, "a"), run(twice, "b")])
    # The median of three ratios of 1.2 and as many of 1.4.
    assert list(factors(corrections).values()) == pytest.approx([1.3] * len(corrections))


def test_collectives_on_a_number_of_ranks_that_was_not_measured_get_samples_of_their_own():
    cluster = made_cluster(devices_per_host=3)
    plan = made_plan(equal_parts(3, num_nodes=3000, num_edges=20_000, halo_rows=300))
    pair_only = made_calibration(num_ranks=(2,))
    graph, model = graph_of(plan.partition), made_model()
    trace = simulate(plan, graph, model, cluster, pair_only)
    spans = tuple(
        dataclasses.replace(span, step=step, duration_seconds=span.duration_seconds + span.busy_seconds)
        for step in range(3)
        for span in trace.spans
        if span.kind.is_collective
    )
    calibration, corrections = recalibrate(pair_only, cluster, [run(dataclasses.replace(trace, spans=spans))])
    assert factors(corrections) == pytest.approx({"all_to_all on 3 ranks": 2.0, "all_reduce on 3 ranks": 2.0})
    again = {(span.rank, span.name): span for span in simulate(plan, graph, model, cluster, calibration).spans}
    for span in trace.spans:
        if span.kind.is_collective:
            assert again[span.rank, span.name].busy_seconds == pytest.approx(2 * span.busy_seconds, rel=0.01)
    # What was measured on two ranks stays.
    assert [sample for sample in calibration.collectives if sample.num_ranks == 2] == list(pair_only.collectives)


def test_collectives_across_hosts_say_nothing_of_one_host():
    apart = made_cluster(num_hosts=2, devices_per_host=1)
    trace = simulate(TWO, graph_of(TWO.partition), made_model(), apart, CALIBRATION)
    spans = tuple(
        dataclasses.replace(span, step=step, duration_seconds=2 * span.duration_seconds)
        for step in range(3)
        for span in trace.spans
    )
    calibration, _ = recalibrate(CALIBRATION, apart, [run(dataclasses.replace(trace, spans=spans))])
    assert calibration.collectives == CALIBRATION.collectives


def test_collectives_beside_other_tasks_say_nothing_of_one_alone():
    plan = dataclasses.replace(TWO, overlap_gradients=True)
    trace = simulate(plan, graph_of(plan.partition), made_model(), CLUSTER, CALIBRATION)
    spans = tuple(
        dataclasses.replace(span, step=step, duration_seconds=2 * span.duration_seconds)
        for step in range(3)
        for span in trace.spans
    )
    assert any(span.kind is TaskKind.ALL_REDUCE for span in spans)
    calibration, _ = recalibrate(CALIBRATION, CLUSTER, [run(dataclasses.replace(trace, spans=spans))])
    reduced = [sample for sample in calibration.collectives if sample.kind is TaskKind.ALL_REDUCE]
    assert reduced == [sample for sample in CALIBRATION.collectives if sample.kind is TaskKind.ALL_REDUCE]


# --- What cannot be learned from.


def test_a_trace_without_spans_is_an_error_that_says_what_to_do():
    empty = dataclasses.replace(predicted(ALONE), spans=())
    for runs in ([run(empty)], []):
        with pytest.raises(CalibrationError) as error:
            recalibrate(CALIBRATION, CLUSTER, runs)
        assert str(error.value) == ("the measured traces hold no spans: train with trace_steps above 0 in [train]")


def test_fewer_than_three_spans_of_a_kind_are_not_enough():
    trace = measured(ALONE, lambda _: 2.0, steps=1)
    calibration, corrections = recalibrate(CALIBRATION, CLUSTER, [run(trace)])
    # A step has one loss, one head and two of each task of its two layers; norms and linear maps are more.
    assert set(factors(corrections)) == {
        "layer_norm forward fp32",
        "layer_norm backward fp32",
        "linear forward fp32",
        "linear backward fp32",
        "residual forward fp32",
        "residual backward fp32",
    }
    losses = [sample for sample in calibration.computes if sample.kind is TaskKind.LOSS]
    assert losses == [sample for sample in CALIBRATION.computes if sample.kind is TaskKind.LOSS]


def test_a_kind_without_samples_is_an_error():
    computes = tuple(sample for sample in CALIBRATION.computes if sample.kind is not TaskKind.GELU)
    trace = measured(ALONE, lambda _: 1.0)
    with pytest.raises(CalibrationError, match="has no samples of gelu"):
        recalibrate(dataclasses.replace(CALIBRATION, computes=computes), CLUSTER, [run(trace)])


@pytest.mark.parametrize("kind", sorted(set(TaskKind) - COLLECTIVES - ATTENTION_PASSES))
def test_the_made_calibration_has_every_kind(kind):
    phases = {sample.phase for sample in CALIBRATION.computes if sample.kind is kind}
    assert phases == set(phases_of(kind))
