"""Our traces in the shape of Kineto's files, one for each rank, which HolisticTraceAnalysis loads.

Its reader wants `"rank": 3` with the space, near the head of the file; device work as kernels with a stream, each
stream a thread of its own; and it tells kinds apart by names: collectives are those called nccl..., copies those
called Mem... Every kernel has the call that launched it, since its correlation and queue analyses look for one.
"""

import json
from pathlib import Path
from typing import Any

from simulator.specs.files import write_text_atomic
from simulator.specs.program import Stream, TaskKind
from simulator.specs.trace import Span, Trace

_STREAMS = tuple(Stream)
_COPIES = (Stream.HOST_TO_DEVICE, Stream.DEVICE_TO_HOST)
# NCCL's names of what our collectives are.
_NCCL = {
    TaskKind.ALL_TO_ALL: "SendRecv",
    TaskKind.ALL_GATHER: "AllGather",
    TaskKind.REDUCE_SCATTER: "ReduceScatter",
    TaskKind.ALL_REDUCE: "AllReduce",
    TaskKind.SEND: "SendRecv",
    TaskKind.RECEIVE: "SendRecv",
}
# A thread of its own for the host, which has no stream's number.
_HOST_TID = 1000
_US = 1e6


def write_kineto(folder: Path, trace: Trace) -> list[Path]:
    """Write a trace as rank0.json, rank1.json and so on; return their paths.

    Raises:
        SpecError: if a file cannot be written.
    """
    paths = []
    for rank in range(trace.num_ranks):
        head = {
            "schemaVersion": 1,
            "distributedInfo": {"backend": "nccl", "rank": rank, "world_size": trace.num_ranks},
            "deviceProperties": [{"id": rank, "name": dict(trace.environment).get("device", "")}],
        }
        text = json.dumps({**head, "traceEvents": kineto_events(trace, rank)})
        write_text_atomic(folder / f"rank{rank}.json", text + "\n")
        paths.append(folder / f"rank{rank}.json")
    return paths


def kineto_events(trace: Trace, rank: int) -> list[dict[str, Any]]:
    """Return the events of one rank: ranges of its steps, calls of its host, kernels of its device."""
    spans = [span for span in trace.spans if span.rank == rank]
    offsets, ends = _steps(trace)
    events = [
        _event(f"ProfilerStep#{step}", "user_annotation", rank, _HOST_TID, offset, ends[step] - offset, {})
        for step, offset in offsets.items()
    ]
    host_free = dict(offsets)
    for number, span in enumerate(sorted(spans, key=lambda span: (span.step, span.start_seconds)), start=1):
        start = offsets[span.step] + span.start_seconds
        issue = min(start, host_free[span.step])
        args = {"External id": number, "correlation": number}
        events.append(_event("cudaLaunchKernel", "cuda_runtime", rank, _HOST_TID, issue, 0.0, args))
        host_free[span.step] = min(issue + span.host_seconds, ends[span.step])
        events.append(_kernel(span, start, args))
    return events


def _kernel(span: Span, start_seconds: float, args: dict[str, Any]) -> dict[str, Any]:
    stream = _STREAMS.index(span.stream)
    name, category = span.name, "kernel"
    if span.kind in _NCCL:
        name = f"ncclDevKernel_{_NCCL[span.kind]} {span.name}"
    elif span.stream in _COPIES:
        name, category = f"Memcpy {span.name}", "gpu_memcpy"
    args = {**args, "device": span.rank, "stream": stream, "waiting (us)": span.waiting_seconds * _US}
    return _event(name, category, span.rank, stream, start_seconds, span.duration_seconds, args)


def _steps(trace: Trace) -> tuple[dict[int, float], dict[int, float]]:
    """Return when each traced step begins and ends, one after another."""
    offsets: dict[int, float] = {}
    ends: dict[int, float] = {}
    clock = 0.0
    for index, step in enumerate(sorted({span.step for span in trace.spans})):
        offsets[step] = clock
        last = max(span.end_seconds for span in trace.spans if span.step == step)
        clock += max([last, *trace.traced_step_seconds[index : index + 1]])
        ends[step] = clock
    return offsets, ends


def _event(
    name: str, category: str, pid: int, tid: int, start: float, duration: float, args: dict[str, Any]
) -> dict[str, Any]:
    start_ns, end_ns = round(start * 1e9), round((start + duration) * 1e9)
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
        "args": args,
    }
