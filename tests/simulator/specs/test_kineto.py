"""Our traces in Kineto's shape: read again, and analysed by HolisticTraceAnalysis in an environment of its own."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given

from simulator.readers.traces import read_recordings
from simulator.specs.kineto import kineto_events, write_kineto
from simulator.specs.program import Phase, Stream, TaskKind
from simulator.specs.recording import KernelKind
from simulator.specs.trace import Span, Trace, TraceOrigin
from tests.strategies import traces

# A Python that has HolisticTraceAnalysis, which wants a notebook and much else: pip install HolisticTraceAnalysis
HTA_PYTHON = os.environ.get("GRAPHPILOT_HTA_PYTHON", sys.executable)
ANALYSIS = """
import json, sys
from hta.trace_analysis import TraceAnalysis
analysis = TraceAnalysis(trace_dir=sys.argv[1])
breakdown = analysis.get_temporal_breakdown(visualize=False).to_dict("records")
overlap = analysis.get_comm_comp_overlap(visualize=False).to_dict("records")
kinds = analysis.get_gpu_kernel_breakdown(visualize=False)[0].to_dict("records")
print("RESULT " + json.dumps([breakdown, overlap, kinds], default=float))
"""


def span(rank: int, name: str, kind: TaskKind, start_ms: float, ms: float) -> Span:
    is_collective = kind.is_collective
    return Span(
        rank=rank,
        step=0,
        stream=Stream.COMMUNICATION if is_collective else Stream.COMPUTE,
        name=name,
        kind=kind,
        phase=Phase.FORWARD,
        shape=(8, 8),
        start_seconds=start_ms * 1e-3,
        duration_seconds=ms * 1e-3,
        host_seconds=1e-5,
        group=(0, 1) if is_collective else (),
    )


TRACE = Trace(
    origin=TraceOrigin.MEASURED,
    num_ranks=2,
    spans=tuple(
        made
        for rank in (0, 1)
        for made in (
            span(rank, "layer0.linear", TaskKind.LINEAR, 1, 4),
            span(rank, "layer0.exchange", TaskKind.ALL_TO_ALL, 3, 4),  # half of it beside the linear map
            span(rank, "layer0.attention", TaskKind.ATTENTION, 8, 2),
        )
    ),
    step_seconds=(10e-3,),
    traced_step_seconds=(10e-3,),
    peak_memory_bytes=(1, 1),
    environment=(("device", "NVIDIA H200"),),
)


def test_the_head_names_the_rank_with_a_space_near_its_beginning(tmp_path):
    paths = write_kineto(tmp_path, TRACE)
    assert [path.name for path in paths] == ["rank0.json", "rank1.json"]
    assert '"rank": 1' in paths[1].read_text()[:200]


def test_concurrent_streams_are_threads_of_their_own():
    kernels = [event for event in kineto_events(TRACE, 0) if event["cat"] == "kernel"]
    assert len(kernels) == 3
    tids = {event["name"]: event["tid"] for event in kernels}
    assert tids["layer0.linear"] != tids["ncclDevKernel_SendRecv layer0.exchange"]
    assert all(event["args"]["stream"] == event["tid"] for event in kernels)


def test_an_exported_trace_can_be_replayed(tmp_path):
    write_kineto(tmp_path, TRACE)
    recordings = read_recordings([tmp_path])
    assert [recording.rank for recording in recordings] == [0, 1]
    assert recordings[0].device_name == "NVIDIA H200"
    kinds = [operation.kind for operation in recordings[0].operations]
    assert kinds == [KernelKind.OTHER, KernelKind.COLLECTIVE, KernelKind.ATTENTION]
    message = recordings[0].operations[1].message
    assert message is not None
    assert message.operation == "send_recv"


@given(trace=traces)
def test_every_span_of_any_trace_becomes_one_kernel_of_its_length(trace):
    for rank in range(trace.num_ranks):
        spans = [one for one in trace.spans if one.rank == rank]
        kernels = [event for event in kineto_events(trace, rank) if event["cat"] in ("kernel", "gpu_memcpy")]
        assert len(kernels) == len(spans)
        assert sum(event["dur"] for event in kernels) == pytest.approx(
            sum(one.duration_seconds for one in spans) * 1e6, abs=2e-3 * len(spans)
        )


def test_holistic_trace_analysis_breaks_an_exported_trace_down(tmp_path):
    if sys.executable == HTA_PYTHON and find_spec("hta") is None:
        pytest.skip("HolisticTraceAnalysis is not installed; GRAPHPILOT_HTA_PYTHON names a Python that has it")
    write_kineto(tmp_path, TRACE)
    done = subprocess.run(
        [HTA_PYTHON, "-c", ANALYSIS, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    breakdown, overlap, kinds = json.loads(line.removeprefix("RESULT "))
    # From the first kernel, at 1 ms, to the last's end at 10 ms: 6 ms of compute, 2 of communication alone, 1 idle.
    assert [row["rank"] for row in breakdown] == [0, 1]
    for row in breakdown:
        assert row["compute_time_pctg"] == pytest.approx(100 * 6 / 9, abs=0.01)
        assert row["non_compute_time_pctg"] == pytest.approx(100 * 2 / 9, abs=0.01)
        assert row["idle_time(us)"] == pytest.approx(1000)
    assert [row["comp_comm_overlap_pctg"] for row in overlap] == [50, 50]
    assert {row["kernel_type"]: row["sum"] for row in kinds} == {
        "COMPUTATION": 8000,
        "COMMUNICATION": 4000,
        "COMPUTATION overlapping COMMUNICATION": 4000,
    }


def test_a_copy_is_named_as_one():
    copy = replace(TRACE.spans[0], stream=Stream.HOST_TO_DEVICE, kind=TaskKind.COPY_ROWS)
    (event,) = (e for e in kineto_events(replace(TRACE, spans=(copy,)), 0) if e["cat"] == "gpu_memcpy")
    assert event["name"] == "Memcpy layer0.linear"
    assert Path(event["name"]).name == event["name"]
