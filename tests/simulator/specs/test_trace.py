import itertools
import statistics
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.specs.program import Stream
from tests.strategies import traces


@given(trace=traces)
def test_a_step_lies_between_its_shortest_and_its_longest(trace):
    assert trace.step_seconds_quantile(0) == min(trace.step_seconds)
    assert trace.step_seconds_quantile(1) == max(trace.step_seconds)
    assert trace.step_seconds_quantile(0.5) == pytest.approx(statistics.median(trace.step_seconds))


@given(trace=traces, ratios=st.tuples(st.floats(0, 1), st.floats(0, 1)).map(sorted))
def test_quantiles_rise(trace, ratios):
    low, high = (trace.step_seconds_quantile(ratio) for ratio in ratios)
    assert low <= high * (1 + 1e-12)


@given(trace=traces)
def test_a_quantile_between_two_steps_by_hand(trace):
    four_steps = replace(trace, step_seconds=(4.0, 1.0, 3.0, 2.0))
    assert four_steps.step_seconds_quantile(0.25) == 1.75
    assert four_steps.step_seconds_quantile(0.9) == pytest.approx(3.7)


@given(trace=traces)
def test_drawn_spans_do_not_overlap_on_a_stream(trace):
    for rank in range(trace.num_ranks):
        for stream in Stream:
            for step in {span.step for span in trace.spans}:
                own = [s for s in trace.spans if (s.rank, s.stream, s.step) == (rank, stream, step)]
                assert all(first.end_seconds <= second.start_seconds for first, second in itertools.pairwise(own))


@given(trace=traces)
def test_busy_and_waiting_seconds_add_up(trace):
    for span in trace.spans:
        assert span.busy_seconds + span.waiting_seconds == pytest.approx(span.duration_seconds)
        assert span.busy_seconds >= 0
