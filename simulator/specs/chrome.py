"""Traces as events of the Chrome trace format, which Perfetto opens, and back.

A rank is a process, a stream a thread, a span a complete event ("ph": "X"). `ts` and `dur` are microseconds,
rounded to the nanosecond and with the steps one after another, for the eye; the exact seconds are in `args`. Of ranks
that are alike (`SharedSpans`) the first is written, and the header says which stand behind it.

Source: Trace Event Format, Google, 2016 (docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

from simulator.errors import SpecError
from simulator.specs.convert import from_plain, shown, to_plain
from simulator.specs.program import Stream
from simulator.specs.trace import SharedSpans, Span, Trace, counted_ranks, counted_spans

_STREAMS = tuple(Stream)
_MAX_RANKS = 2**20  # that a group may reach to; a file of ours has fewer by far
# Of `SharedSpans`, in the header.
_SHARED = ("list_of_rank", "shift_of_rank")


def chrome_events(trace: Trace, pid_offset: int = 0, prefix: str = "") -> list[dict[str, Any]]:
    """Return the events of a trace: names of processes and threads first, then a complete event for each span.

    Args:
        pid_offset: process number of rank 0, to put several traces side by side.
        prefix: put before "rank 0" and so on, such as "predicted ".
    """
    events = []
    written = [span for span, _ in counted_spans(trace.spans)]
    streams = sorted({(span.rank, _STREAMS.index(span.stream)) for span in written})
    for rank, num_alike in counted_ranks(trace):
        name = f"{prefix}rank {rank}" + (f" and {num_alike - 1} alike" if num_alike > 1 else "")
        events += _names("process", pid_offset + rank, 0, name=name, order=pid_offset + rank)
    for rank, tid in streams:
        events += _names("thread", pid_offset + rank, tid, name=_STREAMS[tid], order=tid)
    offsets = _step_offsets(trace, written)
    return events + [_event(span, pid_offset, offsets[span.step]) for span in written]


def chrome_headers(traces: Mapping[str, Trace]) -> list[dict[str, Any]]:
    """Return all of each trace but its spans, with its name, the process number of its rank 0 and who is alike."""
    headers, first_pid = [], 0
    for name, trace in traces.items():
        header = to_plain(replace(trace, spans=()))
        del header["spans"]
        if isinstance(trace.spans, SharedSpans):
            header |= {name: list(getattr(trace.spans, name)) for name in _SHARED}
        headers.append({"name": name, "first_pid": first_pid, **header})
        first_pid += trace.num_ranks
    return headers


def traces_from_chrome(headers: Sequence[object], events: Sequence[object], *, where: str) -> dict[str, Trace]:
    """Return the traces that headers and events describe, by name; events of other types are passed over.

    Raises:
        SpecError: if a header or a complete event is not as written here.
    """
    traces: dict[str, tuple[int, Trace]] = {}
    alike: dict[str, tuple[tuple[int, ...], tuple[int, ...]] | None] = {}
    for index, header in enumerate(headers):
        name, first_pid, trace = _trace_without_spans(header, where=f"{where}: traces[{index}]")
        if name in traces:
            raise SpecError(f"{where}: traces[{index}].name must differ from the others, got {shown(name)}")
        traces[name] = (first_pid, trace)
        alike[name] = _ranks_alike(header, trace, where=f"{where}: traces[{index}]")
    spans: dict[str, list[Span]] = {name: [] for name in traces}
    for index, event in enumerate(events):
        if isinstance(event, dict) and event.get("ph") == "X":
            name, span = _span(event, traces, where=f"{where}: traceEvents[{index}]")
            spans[name].append(span)
    return {
        name: replace(trace, spans=_with_alike(spans[name], alike[name], where)) for name, (_, trace) in traces.items()
    }


def _ranks_alike(header: Any, trace: Trace, *, where: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return what a header says of ranks that are alike; None if it says nothing."""
    if not any(name in header for name in _SHARED):
        return None
    lists, shifts = (header.get(name) for name in _SHARED)
    for name, values in zip(_SHARED, (lists, shifts), strict=True):
        is_list = isinstance(values, list) and all(type(value) is int for value in values)
        if not is_list or len(values) != trace.num_ranks:
            raise SpecError(f"{where}: {name} must be {trace.num_ranks} whole numbers, got {shown(values)}")
    if list(dict.fromkeys(lists)) != list(range(len(set(lists)))):
        raise SpecError(f"{where}: list_of_rank must number lists in order of their first ranks, got {shown(lists)}")
    return tuple(lists), tuple(shifts)


def _with_alike(spans: list[Span], alike: tuple[tuple[int, ...], tuple[int, ...]] | None, where: str) -> Sequence[Span]:
    """Return spans with those of ranks that are alike behind them."""
    if alike is None:
        return tuple(spans)
    list_of_rank, shift_of_rank = alike
    lists: list[list[Span]] = [[] for _ in set(list_of_rank)]
    for span in spans:
        first = list_of_rank.index(list_of_rank[span.rank])
        if span.rank != first:
            raise SpecError(
                f"{where}: {span.name} must be of rank {first}, which the header says is alike, got {span.rank}"
            )
        lists[list_of_rank[span.rank]].append(span)
    return SharedSpans(lists=tuple(map(tuple, lists)), list_of_rank=list_of_rank, shift_of_rank=shift_of_rank)


def _names(kind: str, pid: int, tid: int, *, name: str, order: int) -> list[dict[str, Any]]:
    """Return the metadata events that name a process or a thread and say where it is shown."""
    return [
        {"name": f"{kind}_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}},
        {"name": f"{kind}_sort_index", "ph": "M", "pid": pid, "tid": tid, "args": {"sort_index": order}},
    ]


def _step_offsets(trace: Trace, spans: Sequence[Span]) -> dict[int, float]:
    """Return the seconds after which each traced step is shown, so that steps follow one another."""
    ends: dict[int, float] = {}
    for span in spans:
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
    args["group"] = _runs(span.group)
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
    rest = {key: value for key, value in header.items() if key not in ("name", "first_pid", *_SHARED)}
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
            if "group" in args:
                plain["group"] = _from_runs(args["group"], where=where)
            return name, from_plain(Span, plain, where=where)
    raise SpecError(f"{where}: pid must be a rank of a trace in this file, got {pid}")


def _runs(group: Sequence[int]) -> list[list[int]]:
    """Return ranks as first and last of rising runs, in their order: of all ranks one."""
    found: list[list[int]] = []
    for rank in group:
        if found and rank == found[-1][1] + 1:
            found[-1][1] = rank
        else:
            found.append([rank, rank])
    return found


def _from_runs(runs: object, *, where: str) -> list[int]:
    """Return the ranks of runs."""
    if not isinstance(runs, list) or not all(
        isinstance(run, list) and len(run) == 2 and all(map(_is_index, run)) and run[0] <= run[1] < _MAX_RANKS
        for run in runs
    ):
        raise SpecError(f"{where}: group must be runs of ranks such as [[0, 7]], got {shown(runs)}")
    return [rank for first, last in runs for rank in range(first, last + 1)]
