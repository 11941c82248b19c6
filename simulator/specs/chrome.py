"""Traces as events of the Chrome trace format, which Perfetto opens, and back.

A rank is a process, a stream a thread, a span a complete event ("ph": "X"). `ts` and `dur` are microseconds,
rounded to the nanosecond and with the steps one after another, for the eye; the exact seconds are in `args`.

Source: Trace Event Format, Google, 2016 (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from simulator.errors import SpecError
from simulator.specs.convert import from_plain, shown, to_plain
from simulator.specs.program import Stream
from simulator.specs.trace import Span, Trace

_STREAMS = tuple(Stream)


def chrome_events(trace: Trace, pid_offset: int = 0, prefix: str = "") -> list[dict[str, Any]]:
    """Return the events of a trace: names of processes and threads first, then a complete event for each span.

    Args:
        pid_offset: process number of rank 0, to put several traces side by side.
        prefix: put before "rank 0" and so on, such as "predicted ".
    """
    events = []
    streams = sorted({(span.rank, _STREAMS.index(span.stream)) for span in trace.spans})
    for rank in range(trace.num_ranks):
        events += _names("process", pid_offset + rank, 0, name=f"{prefix}rank {rank}", order=pid_offset + rank)
    for rank, tid in streams:
        events += _names("thread", pid_offset + rank, tid, name=_STREAMS[tid], order=tid)
    offsets = _step_offsets(trace)
    return events + [_event(span, pid_offset, offsets[span.step]) for span in trace.spans]


def chrome_headers(traces: Mapping[str, Trace]) -> list[dict[str, Any]]:
    """Return all of each trace but its spans, with its name and the process number of its rank 0."""
    headers, first_pid = [], 0
    for name, trace in traces.items():
        header = to_plain(replace(trace, spans=()))
        del header["spans"]
        headers.append({"name": name, "first_pid": first_pid, **header})
        first_pid += trace.num_ranks
    return headers


def traces_from_chrome(headers: Sequence[object], events: Sequence[object], *, where: str) -> dict[str, Trace]:
    """Return the traces that headers and events describe, by name; events of other types are passed over.

    Raises:
        SpecError: if a header or a complete event is not as written here.
    """
    traces: dict[str, tuple[int, Trace]] = {}
    for index, header in enumerate(headers):
        name, first_pid, trace = _trace_without_spans(header, where=f"{where}: traces[{index}]")
        if name in traces:
            raise SpecError(f"{where}: traces[{index}].name must differ from the others, got {shown(name)}")
        traces[name] = (first_pid, trace)
    spans: dict[str, list[Span]] = {name: [] for name in traces}
    for index, event in enumerate(events):
        if isinstance(event, dict) and event.get("ph") == "X":
            name, span = _span(event, traces, where=f"{where}: traceEvents[{index}]")
            spans[name].append(span)
    return {name: replace(trace, spans=tuple(spans[name])) for name, (_, trace) in traces.items()}


def _names(kind: str, pid: int, tid: int, *, name: str, order: int) -> list[dict[str, Any]]:
    """Return the metadata events that name a process or a thread and say where it is shown."""
    return [
        {"name": f"{kind}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}},
        {"name": f"{kind}_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": order}},
    ]


def _step_offsets(trace: Trace) -> dict[int, float]:
    """Return the seconds after which each traced step is shown, so that steps follow one another."""
    ends: dict[int, float] = {}
    for span in trace.spans:
        ends[span.step] = max(ends.get(span.step, 0.0), span.end_seconds)
    offsets, clock = {}, 0.0
    for index, step in enumerate(sorted(ends)):
        offsets[step] = clock
        durations = trace.traced_step_seconds[index : index + 1]
        clock += max((ends[step], *durations))
    return offsets


def _event(span: Span, pid_offset: int, step_offset_seconds: float) -> dict[str, Any]:
    """Return the complete event of a span; both ends are rounded alike, so that neighbours do not overlap."""
    args = to_plain(span)
    del args["rank"], args["stream"], args["name"]
    if span.beyond_cache_ratio is None:  # as of all kinds of tasks but one
        del args["beyond_cache_ratio"]
    start_ns = round((step_offset_seconds + span.start_seconds) * 1e9)
    end_ns = round((step_offset_seconds + span.end_seconds) * 1e9)
    return {
        "name": span.name,
        "cat": span.kind.value,
        "ph": "X",
        "pid": pid_offset + span.rank,
        "tid": _STREAMS.index(span.stream),
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": args,
    }


def _trace_without_spans(header: object, *, where: str) -> tuple[str, int, Trace]:
    """Return a trace's name, the process number of its rank 0, and all of it but its spans."""
    if not isinstance(header, dict):
        raise SpecError(f"{where}: must be a table, got {shown(header)}")
    name, first_pid = header.get("name"), header.get("first_pid")
    if not isinstance(name, str):
        raise SpecError(f"{where}: name must be a text, got {shown(name)}")
    if not _is_index(first_pid):
        raise SpecError(f"{where}: first_pid must be a whole number >= 0, got {shown(first_pid)}")
    rest = {key: value for key, value in header.items() if key not in ("name", "first_pid")}
    return name, first_pid, from_plain(Trace, {**rest, "spans": []}, where=where)


def _is_index(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _span(event: dict[str, Any], traces: Mapping[str, tuple[int, Trace]], *, where: str) -> tuple[str, Span]:
    """Return the span of a complete event, and the name of the trace whose process it belongs to."""
    pid, tid, args = event.get("pid"), event.get("tid"), event.get("args")
    if not _is_index(pid) or not _is_index(tid) or tid >= len(_STREAMS) or not isinstance(args, dict):
        raise SpecError(f"{where}: must have pid, tid < {len(_STREAMS)} and args, got {shown(pid)}, {shown(tid)}")
    for name, (first_pid, trace) in traces.items():
        if first_pid <= pid < first_pid + trace.num_ranks:
            plain = {**args, "name": event.get("name"), "rank": pid - first_pid, "stream": _STREAMS[tid].value}
            return name, from_plain(Span, plain, where=where)
    raise SpecError(f"{where}: pid must be a rank of a trace in this file, got {pid}")
