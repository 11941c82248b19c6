"""Comparison of small traces whose residuals are worked out by hand."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.compare import Rest, as_json, as_table, compare, diagnosis
from simulator.errors import SpecError
from simulator.specs.program import COLLECTIVES, Phase, Stream, TaskKind
from simulator.specs.trace import SharedSpans, Span, Trace, TraceOrigin


def span(rank, name, kind, start, duration, *, phase=Phase.FORWARD, stream=Stream.COMPUTE, waiting=0.0, step=0):
    return Span(
        rank=rank,
        step=step,
        stream=stream,
        name=name,
        kind=kind,
        phase=phase,
        shape=(),
        start_seconds=start,
        duration_seconds=duration,
        waiting_seconds=waiting,
    )


def trace(spans, *, steps=(9.0,), traced=(10.0,), num_ranks=2, origin=TraceOrigin.MEASURED):
    return Trace(
        origin=origin,
        num_ranks=num_ranks,
        spans=tuple(spans),
        step_seconds=steps,
        traced_step_seconds=traced,
        peak_memory_bytes=(0,) * num_ranks,
    )


# Two ranks, one stream each, a step of 10 s. Means: linear 2.5, attention 3, all_to_all 1, waiting 0.5, nothing 3.
MEASURED = trace(
    [
        span(0, "in", TaskKind.LINEAR, 0, 2),
        span(0, "attention", TaskKind.ATTENTION, 2, 3),
        span(0, "exchange", TaskKind.ALL_TO_ALL, 5, 2, waiting=1),
        span(1, "in", TaskKind.LINEAR, 0, 3),
        span(1, "attention", TaskKind.ATTENTION, 3, 3),
        span(1, "exchange", TaskKind.ALL_TO_ALL, 6, 1),
    ],
)
# Means: linear 2, attention 4.5, all_to_all 1, waiting 0.5, nothing 1 of a step of 9 s.
PREDICTED = trace(
    [
        span(0, "in", TaskKind.LINEAR, 0, 2),
        span(0, "attention", TaskKind.ATTENTION, 2, 4),
        span(0, "exchange", TaskKind.ALL_TO_ALL, 6, 2, waiting=1),
        span(1, "in", TaskKind.LINEAR, 0, 2),
        span(1, "attention", TaskKind.ATTENTION, 2, 5),
        span(1, "exchange", TaskKind.ALL_TO_ALL, 7, 1),
    ],
    steps=(8.0, 9.0, 10.0),
    traced=(9.0,),
    origin=TraceOrigin.SIMULATED,
)


def row(comparison, kind, phase=None):
    return next(row for row in comparison.rows if (row.kind, row.phase) == (kind, phase))


def test_rows_are_means_over_ranks_worked_out_by_hand():
    comparison = compare(PREDICTED, MEASURED)
    by_hand = {  # predicted and measured seconds, error ratio, share of the measured traced step of 10 s
        (TaskKind.LINEAR, Phase.FORWARD): (2.0, 2.5, -0.2, 0.25),
        (TaskKind.ATTENTION, Phase.FORWARD): (4.5, 3.0, 0.5, 0.3),
        (TaskKind.ALL_TO_ALL, Phase.FORWARD): (1.0, 1.0, 0.0, 0.1),
        (Rest.WAITING, None): (0.5, 0.5, 0.0, 0.05),
        (Rest.BETWEEN_TASKS, None): (1.0, 3.0, -2 / 3, 0.3),
        (Rest.OVERLAPPED, None): (0.0, 0.0, None, 0.0),
    }
    assert len(comparison.rows) == len(by_hand)
    for (kind, phase), (predicted, measured, error, share) in by_hand.items():
        found = row(comparison, kind, phase)
        assert found.predicted_seconds == pytest.approx(predicted)
        assert found.measured_seconds == pytest.approx(measured)
        assert found.error_ratio == (error if error is None else pytest.approx(error))
        assert found.share_ratio == pytest.approx(share)


def test_kinds_come_longest_measured_first():
    kinds = [row.kind for row in compare(PREDICTED, MEASURED).kinds]
    assert kinds == [TaskKind.ATTENTION, TaskKind.LINEAR, TaskKind.ALL_TO_ALL]


def test_the_step_compares_medians_of_untraced_steps():
    step = compare(PREDICTED, replace(MEASURED, step_seconds=(7.0, 8.0, 12.0))).step
    assert (step.predicted_seconds, step.measured_seconds) == (9.0, 8.0)
    assert step.error_ratio == pytest.approx(1 / 8)
    assert step.tracing_overhead_ratio == pytest.approx(10 / 8 - 1)
    # p10 and p90 of 8, 9, 10 lie a fifth of the way in: 8.2 and 9.8.
    assert (step.predicted_low_seconds, step.predicted_high_seconds) == pytest.approx((8.2, 9.8))
    assert not step.is_within_interval


def test_a_measurement_outside_the_interval_is_told_if_there_is_an_interval():
    sentence = "The measured median step lies outside the predicted p10 to p90 (+12.5%)."
    measured = replace(MEASURED, step_seconds=(8.0,))
    assert sentence in diagnosis(compare(PREDICTED, measured))
    single_trial = replace(PREDICTED, step_seconds=(9.0,))
    assert sentence not in diagnosis(compare(single_trial, measured))


def test_counts_are_of_a_rank_in_a_step():
    again = [replace(item, step=4) for item in MEASURED.spans]
    two_steps = trace([*MEASURED.spans, *again], traced=(10.0, 12.0))
    comparison = compare(PREDICTED, two_steps)
    assert row(comparison, TaskKind.ATTENTION, Phase.FORWARD).measured_count == 1
    assert row(comparison, Rest.WAITING).measured_count == 0.5
    # The second step has two more seconds in which nothing runs: (3 + 5) / 2.
    assert row(comparison, Rest.BETWEEN_TASKS).measured_seconds == pytest.approx(4.0)
    assert row(comparison, TaskKind.ATTENTION, Phase.FORWARD).share_ratio == pytest.approx(3 / 11)


def test_component_error_is_weighted_by_measured_time():
    # Errors 0.5, 1.5 and 0 s over 2.5 + 3 + 1 s.
    assert compare(PREDICTED, MEASURED).component_error_ratio == pytest.approx(2 / 6.5)


def test_ranks_that_are_alike_count_each():
    # Ranks 0, 2 and 3 did what rank 0 of MEASURED did, rank 1 what its rank 1 did.
    lists = tuple(tuple(s for s in MEASURED.spans if s.rank == rank) for rank in (0, 1))
    shared = replace(
        MEASURED,
        num_ranks=4,
        peak_memory_bytes=(0,) * 4,
        spans=SharedSpans(lists=lists, list_of_rank=(0, 1, 0, 0), shift_of_rank=(0, 0, 2, 3)),
    )
    expanded = replace(shared, spans=tuple(shared.spans))
    for predicted in (shared, expanded):
        found = compare(predicted, expanded)
        assert found == compare(expanded, expanded)
        assert row(found, TaskKind.LINEAR, Phase.FORWARD).predicted_seconds == (2 + 3 + 2 + 2) / 4


def test_errors_that_cancel_are_reported_though_the_step_is_exact():
    comparison = compare(PREDICTED, MEASURED)
    assert comparison.step.error_ratio == 0
    # Too long: attention 1.5 s of 10. Too short: linear 0.5 s, and between tasks 2 s less 1 s of tracing.
    assert comparison.too_long_ratio == pytest.approx(0.15)
    assert comparison.too_short_ratio == pytest.approx(0.15)
    assert "15.0% of the step too long (attention, forward 15.0%)" in comparison.cancelling
    assert "15.0% too short (between tasks 10.0%; linear, forward 5.0%)" in comparison.cancelling
    assert diagnosis(comparison)[0] == comparison.cancelling


def test_errors_of_one_sign_do_not_cancel():
    slower = [
        replace(
            item,
            start_seconds=item.start_seconds * 1.2,
            duration_seconds=item.duration_seconds * 1.2,
            waiting_seconds=item.waiting_seconds * 1.2,
        )
        for item in MEASURED.spans
    ]
    comparison = compare(trace(slower, steps=(11.0,), traced=(12.0,)), MEASURED)
    assert comparison.too_long_ratio > 0.05
    assert comparison.cancelling == ""


def test_the_overhead_of_tracing_is_no_error_of_the_prediction():
    # Untraced, the same step takes 7 s: the 3 s between tasks are all due to tracing.
    untraced = trace(MEASURED.spans, steps=(7.0,), traced=(7.0,))
    comparison = compare(untraced, replace(MEASURED, step_seconds=(7.0,)))
    assert comparison.too_long_ratio == comparison.too_short_ratio == 0
    assert any("Tracing made the measured steps 42.9% longer" in sentence for sentence in diagnosis(comparison))


def test_a_trace_equals_itself():
    comparison = compare(MEASURED, MEASURED)
    assert all(row.error_seconds == 0 for row in comparison.rows)
    assert comparison.component_error_ratio == 0
    assert comparison.unmatched == ()
    assert comparison.cancelling == ""


def test_streams_that_run_at_once_are_counted_as_overlapped():
    spans = [
        span(0, "attention", TaskKind.ATTENTION, 0, 6),
        span(0, "exchange", TaskKind.ALL_TO_ALL, 2, 3, stream=Stream.COMMUNICATION),
        span(0, "reduce", TaskKind.ALL_REDUCE, 5, 3, stream=Stream.COMMUNICATION),
    ]
    # 12 s of tasks cover 0 to 8 s: 4 s are hidden, and 2 s of the 10 are empty.
    comparison = compare(trace(spans, num_ranks=1), trace(spans, num_ranks=1))
    assert row(comparison, Rest.OVERLAPPED).measured_seconds == pytest.approx(4.0)
    assert row(comparison, Rest.BETWEEN_TASKS).measured_seconds == pytest.approx(2.0)


def test_names_of_one_side_are_listed_with_their_counts():
    renamed = [replace(item, name="attn") if item.name == "attention" else item for item in MEASURED.spans]
    only_rank_0 = [item for item in renamed if not (item.rank == 1 and item.name == "attn")]
    comparison = compare(PREDICTED, trace(only_rank_0))
    found = [(item.name, item.side, item.count) for item in comparison.unmatched]
    assert found == [("attention", "predicted", 1.0), ("attn", "measured", 0.5)]
    assert any("1 task names are predicted but never measured: attention." in item for item in diagnosis(comparison))


def test_a_kind_that_was_never_predicted_has_a_row():
    extra = span(0, "clip", TaskKind.CLIP, 8, 1, phase=Phase.UPDATE)
    found = row(compare(PREDICTED, trace([*MEASURED.spans, extra])), TaskKind.CLIP, Phase.UPDATE)
    assert (found.predicted_count, found.measured_count, found.error_ratio) == (0, 0.5, -1.0)


def test_a_kind_that_was_never_measured_has_no_error_ratio():
    extra = span(0, "clip", TaskKind.CLIP, 8, 1, phase=Phase.UPDATE)
    comparison = compare(replace(PREDICTED, spans=(*PREDICTED.spans, extra)), MEASURED)
    found = row(comparison, TaskKind.CLIP, Phase.UPDATE)
    assert (found.predicted_seconds, found.error_ratio) == (0.5, None)
    table = as_table(comparison)
    assert table[table["kind"] == "clip"]["error_ratio"].isna().all()


def test_the_table_holds_every_row_and_the_step():
    comparison = compare(PREDICTED, MEASURED)
    table = as_table(comparison)
    assert list(table["kind"]) == [row.kind.value for row in comparison.rows] + ["step"]
    assert list(table.columns) == [
        "kind",
        "phase",
        "predicted_count",
        "measured_count",
        "predicted_seconds",
        "measured_seconds",
        "share_ratio",
        "error_ratio",
    ]
    assert table.iloc[-1]["measured_seconds"] == 9.0


def test_the_json_holds_standard_values_only():
    comparison = compare(PREDICTED, MEASURED)
    values = json.loads(json.dumps(as_json(comparison), allow_nan=False))
    assert values["schema_version"] == 1
    assert values["step"]["error_ratio"] == 0
    assert values["rows"][0] | {"share_ratio": 0} == {
        "kind": "attention",
        "phase": "forward",
        "predicted_count": 1.0,
        "measured_count": 1.0,
        "predicted_seconds": 4.5,
        "measured_seconds": 3.0,
        "share_ratio": 0,
        "error_ratio": 0.5,
    }
    assert values["cancelling"] == comparison.cancelling


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(MEASURED, num_ranks=3), "num_ranks must be equal in both traces, got 2 predicted and 3 measured"),
        (replace(MEASURED, spans=()), "spans of the measured trace must not be empty"),
        (replace(MEASURED, step_seconds=()), "step_seconds of the measured trace must not be empty"),
        (replace(MEASURED, step_seconds=(0.0,)), "durations of the measured trace must be > 0"),
        (replace(MEASURED, traced_step_seconds=()), "got 0 for 1 steps"),
        (trace([*MEASURED.spans, span(2, "in", TaskKind.LINEAR, 0, 1)]), "must be < num_ranks = 2, got 2"),
    ],
)
def test_traces_that_cannot_be_compared_are_refused(broken, message):
    with pytest.raises(SpecError, match=message):
        compare(PREDICTED, broken)


@st.composite
def traces(draw):
    spans = []
    for rank in range(2):
        for index in range(draw(st.integers(1, 6))):
            kind = draw(st.sampled_from(list(TaskKind)))
            duration = draw(st.floats(0.001, 5))
            waiting = duration * draw(st.floats(0, 1)) * 0.9 if kind in COLLECTIVES else 0.0
            stream = draw(st.sampled_from([Stream.COMPUTE, Stream.COMMUNICATION]))
            start = draw(st.floats(0, 15))
            spans.append(span(rank, f"task{index}", kind, start, duration, stream=stream, waiting=waiting))
    return trace(spans, steps=(20.0,), traced=(20.0,))


@given(traces(), traces())
def test_the_rows_of_each_trace_add_up_to_its_step(predicted, measured):
    comparison = compare(predicted, measured)
    for side in ("predicted_seconds", "measured_seconds"):
        total = sum(getattr(row, side) for row in comparison.rows) - 2 * getattr(comparison.overlapped, side)
        assert total == pytest.approx(20.0)
    assert comparison.too_long_ratio == pytest.approx(comparison.too_short_ratio, abs=1e-9)
