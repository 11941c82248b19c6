from dataclasses import replace

import pytest
from hypothesis import given

from simulator.errors import SpecError
from simulator.specs.chrome import chrome_events, chrome_headers, traces_from_chrome
from simulator.specs.program import Phase, Stream, TaskKind
from simulator.specs.trace import SharedSpans, Span, Trace, TraceOrigin
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


SHARED = replace(
    TRACE,
    num_ranks=4,
    peak_memory_bytes=(0,) * 4,
    spans=SharedSpans(
        lists=((replace(SPAN, rank=0, group=(0, 1)),), (replace(SPAN, group=(0, 1)),)),
        list_of_rank=(0, 1, 0, 1),
        shift_of_rank=(0, 0, 2, 2),
    ),
    traced_step_seconds=(30e-6,),
)


def test_of_ranks_that_are_alike_the_first_is_written_and_all_come_back():
    headers, events = chrome_headers({"simulated": SHARED}), chrome_events(SHARED)
    assert [event["pid"] for event in complete(events)] == [0, 1]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["rank 0 and 1 alike", "rank 1 and 1 alike"]
    back = traces_from_chrome(headers, events, where="t.json")["simulated"]
    assert back == SHARED
    assert [(span.rank, span.group) for span in back.spans] == [(0, (0, 1)), (1, (0, 1)), (2, (2, 3)), (3, (2, 3))]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"list_of_rank": [0, 1]}, "t.json: traces[0]: list_of_rank must be 4 whole numbers, got a list"),
        ({"shift_of_rank": None}, "t.json: traces[0]: shift_of_rank must be 4 whole numbers, got None"),
        (
            {"list_of_rank": [1, 0, 0, 0]},
            "t.json: traces[0]: list_of_rank must number lists in order of their first ranks, got a list",
        ),
        (
            {"list_of_rank": [0, 0, 1, 2]},
            "t.json: layer0.exchange must be of rank 0, which the header says is alike, got 1",
        ),
    ],
)
def test_a_header_that_is_wrong_about_who_is_alike_is_refused(change, message):
    header = chrome_headers({"simulated": SHARED})[0]
    assert refusal([{**header, **change}], chrome_events(SHARED)) == message


@pytest.mark.parametrize("group", [3, [0, 1], [[0]], [[1, 0]], [[0, 2**40]], [[-1, 3]]])
def test_a_group_that_is_no_runs_of_ranks_is_refused(group):
    event = complete(chrome_events(TRACE))[0]
    event["args"]["group"] = group
    found = refusal(chrome_headers({"measured": TRACE}), [event])
    assert found.startswith("t.json: traceEvents[0]: group must be runs of ranks such as [[0, 7]], got ")


@pytest.mark.parametrize(
    ("group", "runs"), [((), []), ((0, 1, 2), [[0, 2]]), ((4, 5, 2, 3), [[4, 5], [2, 3]]), ((3, 2), [[3, 3], [2, 2]])]
)
def test_a_group_is_written_as_runs(group, runs):
    event = complete(chrome_events(replace(TRACE, spans=(replace(SPAN, group=group),))))[0]
    assert event["args"]["group"] == runs


def test_events_of_other_types_are_passed_over():
    counter = {"ph": "C", "pid": 99, "name": "memory"}
    headers = chrome_headers({"measured": TRACE})
    assert traces_from_chrome(headers, [counter, "note", *chrome_events(TRACE)], where="t.json") == {"measured": TRACE}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pid": 2}, "t.json: traceEvents[0]: pid must be a rank of a trace in this file, got 2"),
        ({"pid": "0"}, 't.json: traceEvents[0]: must have pid, tid < 10 and args, got "0", 1'),
        ({"tid": 10}, "t.json: traceEvents[0]: must have pid, tid < 10 and args, got 1, 10"),
        ({"tid": True}, "t.json: traceEvents[0]: must have pid, tid < 10 and args, got 1, true"),
        ({"args": None}, "t.json: traceEvents[0]: must have pid, tid < 10 and args, got 1, 1"),
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
