from dataclasses import replace

import pytest
from hypothesis import given

from simulator.errors import SpecError
from simulator.specs.chrome import chrome_events, chrome_headers, traces_from_chrome
from simulator.specs.program import Phase, Stream, TaskKind
from simulator.specs.trace import Span, Trace, TraceOrigin
from tests.strategies import traces

SPAN = Span(
    rank=1,
    step=3,
    stream=Stream.COMMUNICATION,
    name="layer0.exchange",
    kind=TaskKind.ALL_TO_ALL,
    phase=Phase.FORWARD,
    shape=(0, 4096),
    start_seconds=12.5e-6,
    duration_seconds=3.25e-6,
    waiting_seconds=1e-6,
    host_seconds=2e-6,
)
TRACE = Trace(
    origin=TraceOrigin.MEASURED,
    num_ranks=2,
    spans=(SPAN, replace(SPAN, step=4), replace(SPAN, step=5)),
    step_seconds=(20e-6,),
    traced_step_seconds=(30e-6, 10e-6, 30e-6),
    peak_memory_bytes=(1, 2),
)


def complete(events):
    return [event for event in events if event["ph"] == "X"]


def refusal(headers, events):
    with pytest.raises(SpecError) as caught:
        traces_from_chrome(headers, events, where="t.json")
    return str(caught.value)


def test_an_event_by_hand():
    assert complete(chrome_events(TRACE, pid_offset=10))[0] == {
        "name": "layer0.exchange",
        "cat": "all_to_all",
        "ph": "X",
        "pid": 11,
        "tid": 1,
        "ts": 12.5,
        "dur": 3.25,
        "args": {
            "step": 3,
            "kind": "all_to_all",
            "phase": "forward",
            "shape": [0, 4096],
            "start_seconds": 12.5e-6,
            "duration_seconds": 3.25e-6,
            "waiting_seconds": 1e-6,
            "host_seconds": 2e-6,
            "dtype": "fp32",
            "group": [],
        },
    }


def test_steps_follow_one_another():
    # The first step took 30 us; the second 10 us, but its span ends after 15.75 us.
    assert [event["ts"] for event in complete(chrome_events(TRACE))] == [12.5, 42.5, 58.25]


def test_processes_are_ranks_and_threads_are_streams():
    events = chrome_events(TRACE, pid_offset=10, prefix="measured ")
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"].endswith("_name")}
    assert names == {
        ("process_name", 10, 0): "measured rank 0",
        ("process_name", 11, 0): "measured rank 1",
        ("thread_name", 11, 1): "communication",
    }
    orders = [e["args"]["sort_index"] for e in events if e["name"] == "process_sort_index"]
    assert orders == [10, 11]


@given(trace=traces)
def test_events_of_a_thread_do_not_overlap_and_keep_their_lengths(trace):
    free_us: dict[tuple[int, int], float] = {}
    events = complete(chrome_events(trace))
    for event, span in zip(events, trace.spans, strict=True):
        thread = event["pid"], event["tid"]
        assert event["ts"] >= free_us.get(thread, 0) - 1e-6  # a nanosecond is 1e-3, a float's grain at 30 s 4e-9
        assert event["dur"] == pytest.approx(span.duration_seconds * 1e6, abs=1.1e-3)
        free_us[thread] = event["ts"] + event["dur"]


def test_traces_lie_side_by_side():
    headers = chrome_headers({"predicted": TRACE, "measured": TRACE})
    assert [(header["name"], header["first_pid"]) for header in headers] == [("predicted", 0), ("measured", 2)]


@given(first=traces, second=traces)
def test_traces_come_back_equal(first, second):
    named = {"predicted": first, "measured": second}
    headers = chrome_headers(named)
    events = [
        event for header in headers for event in chrome_events(named[header["name"]], pid_offset=header["first_pid"])
    ]
    assert traces_from_chrome(headers, events, where="t.json") == named


def test_events_of_other_types_are_passed_over():
    counter = {"ph": "C", "pid": 99, "name": "memory"}
    headers = chrome_headers({"measured": TRACE})
    assert traces_from_chrome(headers, [counter, "note", *chrome_events(TRACE)], where="t.json") == {"measured": TRACE}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pid": 2}, "t.json: traceEvents[0]: pid must be a rank of a trace in this file, got 2"),
        ({"pid": "0"}, 't.json: traceEvents[0]: must have pid, tid < 6 and args, got "0", 1'),
        ({"tid": 6}, "t.json: traceEvents[0]: must have pid, tid < 6 and args, got 1, 6"),
        ({"tid": True}, "t.json: traceEvents[0]: must have pid, tid < 6 and args, got 1, true"),
        ({"args": None}, "t.json: traceEvents[0]: must have pid, tid < 6 and args, got 1, 1"),
        ({"name": None}, "t.json: traceEvents[0]: name must be a text in quotes, got None"),
        ({"args": {"step": 0}}, "t.json: traceEvents[0]: kind is missing"),
    ],
)
def test_a_broken_event_is_refused(change, message):
    event = complete(chrome_events(TRACE))[0]
    assert refusal(chrome_headers({"measured": TRACE}), [{**event, **change}]) == message


def test_an_unknown_kind_of_task_is_refused():
    event = complete(chrome_events(TRACE))[0]
    event["args"]["kind"] = "all_too_all"
    found = refusal(chrome_headers({"measured": TRACE}), [event])
    assert found.startswith("t.json: traceEvents[0]: kind must be one of cluster_batch, sampled_batch, linear, ")
    assert found.endswith('got "all_too_all"; did you mean all_to_all?')


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": 3}, "t.json: traces[0]: name must be a text, got 3"),
        ({"first_pid": -1}, "t.json: traces[0]: first_pid must be a whole number >= 0, got -1"),
        ({"origin": "guessed"}, 't.json: traces[0]: origin must be one of simulated, measured, got "guessed"'),
        ({"step_second": []}, "t.json: traces[0]: step_second is unknown; did you mean step_seconds?"),
    ],
)
def test_a_broken_header_is_refused(change, message):
    header = chrome_headers({"measured": TRACE})[0]
    assert refusal([{**header, **change}], []) == message


def test_headers_must_be_tables_of_different_names():
    header = chrome_headers({"measured": TRACE})[0]
    assert refusal([3], []) == "t.json: traces[0]: must be a table, got 3"
    assert refusal([header, header], []) == 't.json: traces[1].name must differ from the others, got "measured"'
