"""The commands `replay` and `export`: what they print and write, and what they refuse."""

import json
from dataclasses import replace
from functools import partial

import pytest

from simulator.specs.files import read_traces, write_trace
from simulator.specs.trace import TraceOrigin
from tests.executor.commands import run_here
from tests.made_kineto import MadeTrace
from tests.simulator.replay.test_run import two_ranks, waiting_host
from tests.simulator.specs.test_kineto import TRACE


@pytest.fixture
def graphpilot(monkeypatch, capfd):
    """The command, run in this process."""
    return partial(run_here, monkeypatch, capfd)


@pytest.fixture
def ranks(tmp_path):
    return [str(trace.write(tmp_path / f"rank{rank}.json.gz")) for rank, trace in enumerate(two_ranks())]


def test_replay_prints_how_well_it_fits_and_what_each_change_is_worth(ranks, graphpilot):
    done = graphpilot("replay", *ranks, "--change", "host=2x", "--change", "kernel:matrix_product=2x")
    assert done.status == 0, done.err
    assert "2 of 2 ranks on NVIDIA H200, 1 step" in done.out
    assert "recorded step 240 us, replayed as recorded 240 us: +0.0 %" in done.out
    assert "the others waited longest for rank 1" in done.out
    rows = [line for line in done.out.splitlines() if line.startswith(("host=2x", "kernel:"))]
    assert len(rows) == 2
    saved = [float(row.split()[-4]) for row in rows]
    assert saved == sorted(saved, reverse=True)  # the most valuable first


def test_p6_replay_prints_one_object_whose_keys_name_their_units(ranks, graphpilot):
    done = graphpilot("replay", *ranks, "--json", "--change", "straggler=none")
    found = json.loads(done.out)
    assert found["recorded_step_seconds"] == pytest.approx(240e-6)
    assert found["outcomes"][0]["change"] == "straggler=none"
    assert [share["rank"] for share in found["shares"]] == [0, 1]
    assert found["shares"][0]["waiting_seconds"] == pytest.approx(40e-6)
    assert [(file["rank"], file["kept"], file["dropped"]) for file in found["files"]] == [(0, 11, []), (1, 11, [])]
    numbers = {key for key, value in found.items() if isinstance(value, float)}
    numbers |= {key for share in found["shares"] for key, value in share.items() if isinstance(value, float)}
    assert all(key.endswith(("_seconds", "_ratio")) for key in numbers)


def test_replay_writes_recording_and_replay_side_by_side(ranks, tmp_path, graphpilot):
    out = tmp_path / "both.json"
    assert graphpilot("replay", *ranks, "--change", "host=2x", "--out", str(out), "--quiet").out == ""
    events = json.loads(out.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [
        "recorded rank 0",
        "recorded rank 1",
        "replayed with host=2x, rank 0",
        "replayed with host=2x, rank 1",
    ]
    on_thread: dict[tuple[int, int], float] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda event: event["ts"]):
        key = (event["pid"], event["tid"])
        assert event["ts"] >= on_thread.get(key, 0) - 1e-6  # nothing overlaps on a thread
        on_thread[key] = event["ts"] + event["dur"]


def test_a_rank_that_no_file_tells_is_given_as_a_flag(tmp_path, graphpilot):
    trace = MadeTrace(rank=None)
    trace.collective(launch=0, ts=9, dur=5)
    path = str(trace.write(tmp_path / "trace.json"))
    refused = graphpilot("replay", path)
    assert refused.status == 2
    assert refused.err.strip().endswith("say it with --rank")
    assert graphpilot("replay", path, "--rank", "7").status == 0


def test_what_cannot_be_replayed_ends_in_a_sentence_and_status_2(tmp_path, graphpilot):
    path = str(waiting_host().write(tmp_path / "rank0.json"))
    for arguments, wanted in (
        ((str(tmp_path / "none.json"),), "cannot be read"),
        ((path, "--change", "device_link=900"), "must be a number and one of"),
        ((path, "--cluster", "nowhere"), "a cluster must be one of"),
        ((path, "--out", str(tmp_path)), "must be a file to write"),
    ):
        done = graphpilot("replay", *arguments)
        assert done.status == 2
        assert wanted in done.err
        assert done.out == ""
        assert "Traceback" not in done.err


def test_export_puts_predicted_and_measured_into_one_file_as_processes_of_their_own(tmp_path, graphpilot):
    write_trace(tmp_path / "measured.json", TRACE)
    write_trace(tmp_path / "predicted.json", replace(TRACE, origin=TraceOrigin.SIMULATED))
    both = tmp_path / "both.json"
    done = graphpilot(
        "export", str(tmp_path / "predicted.json"), str(tmp_path / "measured.json"), "--out", str(both), "--json"
    )
    assert json.loads(done.out) == {"out": [str(both)], "traces": ["simulated", "measured"]}
    assert read_traces(both)["measured"] == TRACE
    events = json.loads(both.read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "simulated rank 0", 1: "simulated rank 1", 2: "measured rank 0", 3: "measured rank 1"}


def test_export_writes_a_file_a_rank_for_holistic_trace_analysis(tmp_path, graphpilot):
    write_trace(tmp_path / "measured.json", TRACE)
    assert graphpilot("export", str(tmp_path / "measured.json"), "--hta", str(tmp_path / "hta")).status == 0
    assert sorted(path.name for path in (tmp_path / "hta").iterdir()) == ["rank0.json", "rank1.json"]


def test_export_must_be_told_where_to_and_takes_each_trace_once(tmp_path, graphpilot):
    write_trace(tmp_path / "measured.json", TRACE)
    measured = str(tmp_path / "measured.json")
    assert "must be told where to write" in graphpilot("export", measured).err
    assert 'a trace called "measured"' in graphpilot("export", measured, measured, "--out", measured).err


def test_our_own_measured_trace_is_replayed(tmp_path, graphpilot):
    write_trace(tmp_path / "measured.json", TRACE)
    done = graphpilot("replay", str(tmp_path / "measured.json"), "--change", "kernel:attention=2x", "--json")
    found = json.loads(done.out)
    assert found["step_error_ratio"] == 0
    assert found["recorded_step_seconds"] == pytest.approx(10e-3)
    assert found["outcomes"][0]["saved_seconds"] == pytest.approx(1e-3)  # attention is the last 2 ms of 10
    assert found["shares"][0]["communicating_seconds"] == pytest.approx(4e-3)
