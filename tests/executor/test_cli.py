"""The commands as a user meets them: what they print, and what they say to bad input."""

import json
import re
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
from typer.main import get_command

from executor.cli import app
from executor.cli_output import accuracy_text
from executor.environment import environment, local_cluster
from simulator.specs.cluster import DeviceKind
from simulator.specs.files import cluster_toml, read_calibration, read_plan, read_trace, write_calibration, write_trace
from simulator.specs.order import NodeOrder
from simulator.specs.trace import TraceOrigin
from tests.executor.commands import (
    RUN_TOML,
    Done,
    graph_arrays,
    run_here,
    write_graph,
    write_made_calibration,
    write_run,
)
from tests.executor.made_graphs import spec_of, two_node_graph

COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    """Runs commands in a fresh folder, 80 columns wide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("GRAPHPILOT_CACHE", str(tmp_path / "cache"))
    return lambda *arguments: run_here(monkeypatch, capfd, *arguments)


@pytest.fixture
def planned(command, tmp_path):
    """A folder with a graph, a run, a calibration and a plan on one rank."""
    write_graph(tmp_path)
    write_run(tmp_path, extra="[search]\nnum_ranks = [1]\n")
    write_made_calibration(tmp_path)
    assert command("plan", "run.toml", "--calibration", "calibration.json").status == 0
    return tmp_path


def refusal(done: Done, status: int) -> str:
    """Return the one sentence of a command that refused, printed alone."""
    assert done.status == status, done.err
    assert done.out == ""
    assert "Traceback" not in done.err
    assert done.err.count("\n") == 1, done.err
    assert done.err.startswith("graphpilot: ")
    return done.err.removeprefix("graphpilot: ").strip()


# --- What they print.


def test_the_version_is_the_package_s(command):
    done = command("--version")
    assert (done.status, done.out) == (0, f"graphpilot {version('graphpilot')}\n")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_with_an_example_that_fits_a_line(command, name):
    done = command(name, "--help")
    assert done.status == 0
    assert re.search(rf"^ Example: graphpilot {name}\b.*\n +\n", done.out, re.MULTILINE), done.out
    assert "--json" in done.out
    assert "--quiet" in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines())
    assert "  and maybe " not in done.out  # as when brackets are taken for markup


def test_the_overview_names_every_command_and_the_exit_codes(command):
    done = command("--help")
    assert all(re.search(rf"│ {name} ", done.out) for name in COMMANDS)
    assert "3 no plan fits" in " ".join(done.out.split())


def test_a_graph_in_numbers_fits_eighty_columns(command, tmp_path):
    write_graph(tmp_path)
    done = command("inspect", "graph.npz")
    assert done.status == 0
    assert "nodes" in done.out
    assert all(len(line) <= 80 for line in done.out.splitlines())
    assert "cutting into 16 parts" in done.err
    assert [line.split()[0] for line in done.out.splitlines() if line.endswith(" %")][-4:] == list(NodeOrder)


def test_quiet_prints_nothing_and_json_one_object(command, tmp_path):
    write_graph(tmp_path)
    quiet = command("inspect", "graph.npz", "--quiet")
    assert (quiet.status, quiet.out, quiet.err) == (0, "", "")
    printed = command("inspect", "graph.npz", "--json")
    assert printed.err == ""
    assert json.loads(printed.out)["num_nodes"] == 60
    assert [cut["num_parts"] for cut in json.loads(printed.out)["cuts"]] == [2, 4, 8, 16]
    assert [order["kind"] for order in json.loads(printed.out)["orders"]] == list(NodeOrder)
    assert all(order["window_16_reuse"] >= 1 for order in json.loads(printed.out)["orders"])


def test_a_graph_without_edges_is_inspected(command, tmp_path):
    write_graph(tmp_path, graph_arrays(num_edges=0))
    assert command("inspect", "graph.npz").status == 0


def test_a_cluster_is_printed_as_it_is_written(command, tmp_path):
    done = command("cluster", "h200x8", "--out", "mine.toml")
    assert done.out == (tmp_path / "mine.toml").read_text()
    assert "[device]" in done.out


def test_a_plan_is_told_in_eighty_columns_with_what_lost(command, tmp_path):
    write_graph(tmp_path)
    write_run(tmp_path, extra='[search]\nbatches = ["full_graph", "clusters"]\n')
    write_made_calibration(tmp_path)
    done = command("plan", "run.toml", "--calibration", "calibration.json")
    assert done.status == 0, done.err
    file = read_plan(tmp_path / "plan.json")
    assert len(file.ranking) >= 3
    assert all(len(line) <= 80 for line in done.out.splitlines() if not line.startswith("rejected")), done.out
    assert all(row.reason.split(" on the")[0] in " ".join(done.out.split()) for row in file.ranking[:1])


def test_a_plan_tells_why_it_has_its_order(command, planned):
    done = command("plan", "run.toml", "--calibration", "calibration.json")
    # Keys and values of sixty nodes fit any cache.
    assert "order natural: no other could shorten the gathers enough" in done.out.splitlines()
    run = planned / "run.toml"
    run.write_text(run.read_text() + 'orders = ["reverse_cuthill_mckee"]\n')
    done = command("plan", "run.toml", "--calibration", "calibration.json")
    assert "order Cuthill-McKee: the only one that [search] allows" in done.out.splitlines()
    order = read_plan(planned / "plan.json").plan.order
    assert sorted(np.load(planned / order.path).tolist()) == [*range(60)]


def test_errors_of_a_prediction_are_told_a_row_a_kind_and_phase(command, planned):
    assert command("simulate", "plan.json", "--calibration", "calibration.json", "--out", "one.json").status == 0
    write_trace(planned / "other.json", replace(read_trace(planned / "one.json"), origin=TraceOrigin.MEASURED))
    done = command("compare", "one.json", "other.json")
    rows = [line.split() for line in done.out.splitlines()]
    assert rows[0] == ["kind", "phase", "tasks", "predicted", "ms", "measured", "ms", "error", "of", "step"]
    kinds = {(span.kind.value, span.phase.value) for span in read_trace(planned / "one.json").spans}
    assert {tuple(row[:2]) for row in rows[1:]} >= kinds
    attention = next(row for row in rows if row[:2] == ["attention", "forward"])
    assert attention[2] == "2"
    assert attention[3] == attention[4]
    assert attention[5:7] == ["+0.0", "%"]
    assert all(len(line) <= 80 for line in done.out.splitlines() if "%." not in line)


def test_case_p4_a_simulation_says_how_many_tasks_a_second_it_does(command, planned):
    arguments = ("simulate", "plan.json", "--calibration", "calibration.json")
    done = command(*arguments)
    assert re.search(r"^[\d,]+ tasks of 1 ranks x 20 trials in .*s: [\d,]+ tasks per second$", done.out, re.MULTILINE)
    told = json.loads(command(*arguments, "--json").out)
    assert told["num_spans"] == len(read_trace(planned / "predicted.json").spans)
    assert told["tasks_per_second"] == pytest.approx(20 * told["num_spans"] / told["simulation_seconds"])


def test_cases_p2_and_p9_a_simulation_tells_compute_from_communication_and_who_is_idle(command, planned):
    told = json.loads(command("simulate", "plan.json", "--calibration", "calibration.json", "--json").out)
    mean = told["mean_rank"]
    assert set(mean) == {f"{name}_seconds" for name in ("compute", "communication", "waiting", "idle", "batch")}
    assert sum(mean.values()) == pytest.approx(read_trace(planned / "predicted.json").traced_step_seconds[0], rel=0.05)
    plan = read_plan(planned / "plan.json")
    assert told["num_idle_devices"] == plan.cluster.num_devices - plan.plan.num_ranks
    done = command("simulate", "plan.json", "--calibration", "calibration.json")
    assert "mean rank: compute " in done.out
    assert ("devices of the cluster are idle" in done.out) is (told["num_idle_devices"] > 0)


def test_case_p2_a_simulation_always_leaves_a_trace_that_tells_compute_from_communication(command, tmp_path):
    write_graph(tmp_path)
    write_run(tmp_path, extra="[search]\nnum_ranks = [2]\n")
    path = write_made_calibration(tmp_path)
    assert command("plan", "run.toml", "--calibration", path).status == 0
    for flag in ("--quiet", "--json"):
        assert command("simulate", "plan.json", "--calibration", path, "--out", f"{flag}.json", flag).status == 0
        spans = read_trace(tmp_path / f"{flag}.json").spans
        assert {span.kind.is_collective for span in spans} == {True, False}
    told = json.loads(command("simulate", "plan.json", "--calibration", path, "--json").out)
    assert told["mean_rank"]["compute_seconds"] > 0
    assert told["mean_rank"]["communication_seconds"] > 0


def test_case_p6_every_key_of_a_simulation_is_documented_and_numbers_name_their_unit(command, planned):
    told = json.loads(command("simulate", "plan.json", "--calibration", "calibration.json", "--json").out)
    text = (Path(__file__).parents[2] / "executor" / "README.md").read_text()
    assert all(f"`{key}`" in text for key in (*told, *told["mean_rank"]))
    numbers = {key for table in (told, told["mean_rank"]) for key, value in table.items() if isinstance(value, float)}
    assert numbers
    assert all(key.endswith(("_seconds", "_per_second", "_bytes", "_ratio")) for key in numbers)
    # Counts are whole.
    assert all(isinstance(told[key], int) for key in told if key.startswith("num_"))


@pytest.mark.parametrize(
    ("val", "test", "words"),
    [
        (3, 4, "best validation accuracy 0.250 (test 0.750) at step 2"),
        (3, 0, "best validation accuracy 0.250 at step 2"),
        (0, 4, "loss 0.5000 after step 2, no nodes to validate on"),
    ],
)
def test_a_run_is_told_by_the_nodes_that_it_was_judged_on(val, test, words):
    best = {"val_accuracy_ratio": 0.25, "test_accuracy_ratio": 0.75}
    graph = replace(spec_of(two_node_graph()), num_val_nodes=val, num_test_nodes=test)
    assert accuracy_text({"best": best, "best_step": 1, "losses": [0.7, 0.5]}, graph) == words


def test_a_file_in_a_path_with_brackets_is_named_as_it_is(command, planned):
    done = command("simulate", "plan.json", "--calibration", "calibration.json", "--out", "[red]x/p.json")
    assert "written to [red]x/p.json" in done.out


# --- Bad input: files.


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["inspect", "gone.npz"], 2),
        (["inspect", "gone.toml"], 2),
        (["plan", "gone.toml", "--calibration", "calibration.json"], 2),
        (["plan", "run.toml", "--calibration", "gone.json"], 4),
        (["simulate", "gone.json", "--calibration", "calibration.json"], 2),
        (["simulate", "plan.json", "--calibration", "gone.json"], 4),
        (["train", "gone.json"], 2),
        (["compare", "gone.json", "gone.json"], 2),
        (["recalibrate", "gone.json", "measured.json", "--out", "new.json"], 4),
        (["recalibrate", "calibration.json", "gone.json", "--out", "new.json"], 2),
        (["report", "gone.json", "--predicted", "predicted.json"], 2),
        (["report", "plan.json", "--predicted", "gone.json"], 2),
    ],
)
def test_a_missing_file_is_named(command, planned, arguments, status):
    before = sorted(planned.iterdir())
    sentence = refusal(command(*arguments), status)
    assert "gone" in sentence
    assert re.search(r"; \w+", sentence), sentence  # the fix
    assert sorted(planned.iterdir()) == before


def spoilt(arrays: dict[str, np.ndarray], **changes: np.ndarray | None) -> dict[str, np.ndarray]:
    return {name: array for name, array in (arrays | changes).items() if array is not None}


GOOD = graph_arrays()
BAD_GRAPHS = {
    "an edge to no node": (
        spoilt(GOOD, edge_index=np.array([[0, 1], [2, 60]])),
        ["edge_index[1, 1]", "within 0 and 59", "60"],
    ),
    "a negative index": (spoilt(GOOD, edge_index=np.array([[0, -1], [2, 3]])), ["edge_index[0, 1]", "-1"]),
    "indices in floats": (
        spoilt(GOOD, edge_index=GOOD["edge_index"].astype(float)),
        ["edge_index", "must hold integers", "float64"],
    ),
    "a mask of another length": (
        spoilt(GOOD, val_mask=np.zeros(59, bool)),
        ["val_mask", "shape [60]", "59"],
    ),
    "a mask in integers": (spoilt(GOOD, val_mask=np.zeros(60, int)), ["val_mask", "booleans", "int64"]),
    "masks that overlap": (spoilt(GOOD, val_mask=GOOD["train_mask"]), ["train_mask", "must not overlap val_mask"]),
    "a feature that is no number": (
        spoilt(GOOD, x=np.where(np.arange(60)[:, None] == 7, np.nan, GOOD["x"])),
        ["x[7, 0]", "finite", "nan"],
    ),
    "no nodes": (
        {"edge_index": np.zeros((2, 0), int), "x": np.zeros((0, 8), np.float32), "y": np.zeros(0, int)},
        ["num_nodes", "within 1 and", "0"],
    ),
    "a label below -1": (spoilt(GOOD, y=GOOD["y"] - 2), ["y[", "within -1", "-2"]),
    "no edges array": (spoilt(GOOD, edge_index=None), ["edge_index", "must be in the store"]),
}


@pytest.mark.parametrize("name", BAD_GRAPHS)
@pytest.mark.parametrize("how", ["inspect", "plan"])
def test_a_bad_array_of_a_graph_is_named_with_rule_and_value(command, tmp_path, name, how):
    arrays, parts = BAD_GRAPHS[name]
    path = write_graph(tmp_path, arrays)
    write_run(tmp_path)
    write_made_calibration(tmp_path)
    arguments = (
        ["inspect", "graph.npz"] if how == "inspect" else ["plan", "run.toml", "--calibration", "calibration.json"]
    )
    sentence = refusal(command(*arguments), 2)
    assert sentence.startswith(f"{path}: ")
    assert all(part in sentence for part in parts), sentence
    assert "; " in sentence
    assert not (tmp_path / "plan.json").exists()


def test_a_graph_that_was_cut_short_is_refused(command, tmp_path):
    path = write_graph(tmp_path)
    path.write_bytes(path.read_bytes()[:2000])
    assert "graph.npz must be whole" in refusal(command("inspect", "graph.npz"), 2)


def test_a_graph_with_pickled_objects_is_refused_without_loading_them(command, tmp_path):
    np.savez(tmp_path / "graph.npz", edge_index=np.array([[0], [1]]), x=np.array([{"a": 1}, None], dtype=object))
    assert "without objects" in refusal(command("inspect", "graph.npz"), 2)


def test_a_file_that_is_no_graph_is_refused_without_talk_of_pickles(command, tmp_path):
    (tmp_path / "graph.npz").write_text("source,target\n0,1\n")
    assert "graph.npz must be whole in an .npz file" in (said := refusal(command("inspect", "graph.npz"), 2))
    assert "got a file of another kind; save it again" in said


@pytest.mark.parametrize("name", ["plan.json", "calibration.json"])
def test_a_file_that_was_cut_short_or_edited_is_refused(command, planned, name):
    path = planned / name
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    arguments = ("simulate", "plan.json", "--calibration", "calibration.json")
    assert f"{name}: is not JSON" in refusal(command(*arguments), 2)
    path.write_text(whole.replace("made" if name == "calibration.json" else "16", "17", 1))
    assert "was changed after it was written" in refusal(command(*arguments), 2)
    assert not (planned / "predicted.json").exists()


def test_a_graph_without_nodes_to_train_on_is_planned_with_a_note_and_not_trained(command, tmp_path):
    path = write_graph(tmp_path, spoilt(GOOD, y=None, train_mask=None, val_mask=None, test_mask=None))
    write_run(tmp_path)
    write_made_calibration(tmp_path)
    done = command("plan", "run.toml", "--calibration", "calibration.json")
    assert done.status == 0
    assert f"{path} has no nodes to train on" in done.err
    sentence = refusal(command("train", "plan.json", "--out", "run"), 2)
    assert sentence == f"{path}: train_mask must hold a node to train on, got none; save y and train_mask too"
    assert not (tmp_path / "run").exists()


# --- Bad input: descriptions.

BAD_RUNS = {
    "heads that do not divide": (
        {"num_heads = 4": "num_heads = 5"},
        "",
        ["model.num_heads", "must divide width = 16", "got 5", "one of 1, 2, 4, 8, 16"],
    ),
    "an unknown key": (
        {"num_steps = 6": "nun_steps = 6"},
        "",
        ["train.nun_steps", "unknown", "did you mean num_steps"],
    ),
    "an unknown table": ({}, "[serach]\nseed = 1\n", ["serach", "unknown", "did you mean search"]),
    "a text for a number": ({"width = 16": 'width = "16"'}, "", ["model.width", "whole number", '"16"']),
    "a cluster that nobody knows": ({'name = "local"': 'name = "h200x9"'}, "", ["cluster.name", "h200x8"]),
    "a bare bandwidth": (
        {'name = "local"': 'name = "h200x8"\ndevice_link = {bandwidth_bytes_per_second = 300}'},
        "",
        ["cluster.device_link.bandwidth_bytes_per_second", "text with a unit", "got 300", '"300 B/s"'],
    ),
    "no graph": ({'path = "graph.npz"': ""}, "", ["graph", 'path = "..."']),
    "no steps": ({"num_steps = 6": "num_steps = 0"}, "", ["train.num_steps", "> 0", "got 0"]),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_a_bad_entry_of_a_run_is_named_with_rule_and_value(command, tmp_path, name):
    changes, extra, parts = BAD_RUNS[name]
    write_graph(tmp_path)
    write_run(tmp_path, changes, extra=extra)
    write_made_calibration(tmp_path)
    sentence = refusal(command("plan", "run.toml", "--calibration", "calibration.json"), 2)
    assert sentence.startswith("run.toml: ")
    assert all(part in sentence for part in parts), sentence


def test_a_run_that_is_no_toml_is_refused_with_its_line(command, tmp_path):
    (tmp_path / "run.toml").write_text(RUN_TOML.replace("width = 16", "width = "))
    write_made_calibration(tmp_path)
    assert "line 4" in refusal(command("plan", "run.toml", "--calibration", "calibration.json"), 2)


def test_more_ranks_than_devices_is_no_plan_that_fits(command, tmp_path):
    write_graph(tmp_path)
    write_run(tmp_path, extra=f"[search]\nnum_ranks = [{2 * local_cluster().num_devices}]\n")
    write_made_calibration(tmp_path)
    sentence = " ".join(command("plan", "run.toml", "--calibration", "calibration.json", "--quiet").err.split())
    assert "must not exceed cluster.num_devices" in sentence
    assert not (tmp_path / "plan.json").exists()


def test_a_cluster_that_is_too_small_for_every_plan_names_what_it_lacks(command, tmp_path):
    write_graph(tmp_path)
    tiny = replace(local_cluster(), name="tiny", device=replace(local_cluster().device, memory_bytes=2**20))
    (tmp_path / "tiny.toml").write_text(cluster_toml(tiny))
    write_run(tmp_path, {'name = "local"': 'file = "tiny.toml"'})
    write_made_calibration(tmp_path)
    sentence = refusal(command("plan", "run.toml", "--calibration", "calibration.json", "--quiet"), 3)
    assert "tiny" in sentence
    assert "1 MiB" in sentence, sentence


def test_a_calibration_of_another_device_is_refused_unless_forced(command, planned):
    write_made_calibration(planned, device_name="abacus")
    arguments = ("simulate", "plan.json", "--calibration", "calibration.json")
    sentence = refusal(command(*arguments), 4)
    assert '"abacus"' in sentence
    assert local_cluster().device.name in sentence
    assert "--force" in sentence
    assert command(*arguments, "--force").status == 0


def test_a_calibration_of_other_software_is_refused_unless_forced(command, planned):
    older = tuple((key, "1.0" if key == "torch" else value) for key, value in environment(DeviceKind.CPU))
    write_made_calibration(planned, environment=older)
    arguments = ("plan", "run.toml", "--calibration", "calibration.json", "--out", "again.json")
    sentence = refusal(command(*arguments), 4)
    assert "torch was 1.0 and is 2" in sentence
    assert not (planned / "again.json").exists()
    assert command(*arguments, "--force").status == 0


def test_a_run_on_another_machine_does_not_correct_a_calibration(command, planned):
    assert command("simulate", "plan.json", "--calibration", "calibration.json").status == 0
    write_trace(planned / "run.json", replace(read_trace(planned / "predicted.json"), origin=TraceOrigin.MEASURED))
    write_made_calibration(planned, environment=(("device", "abacus"),))
    arguments = ("recalibrate", "calibration.json", "run.json", "--out", "new.json")
    assert "abacus" in refusal(command(*arguments), 4)
    assert command(*arguments, "--force").status == 0
    assert read_calibration(planned / "new.json").device_name == local_cluster().device.name


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["compare", "run.json", "predicted.json"], "simulated"),
        (["compare", "predicted.json", "predicted.json"], "measured"),
        (["recalibrate", "calibration.json", "predicted.json", "--out", "new.json"], "measured"),
        (["report", "plan.json", "--predicted", "run.json"], "simulated"),
        (["report", "plan.json", "--predicted", "predicted.json", "--measured", "predicted.json"], "measured"),
    ],
)
def test_predictions_and_measurements_are_not_taken_for_each_other(command, planned, arguments, wanted):
    assert command("simulate", "plan.json", "--calibration", "calibration.json").status == 0
    write_trace(planned / "run.json", replace(read_trace(planned / "predicted.json"), origin=TraceOrigin.MEASURED))
    before = sorted(planned.iterdir())
    assert f"origin of the trace must be {wanted}, got" in refusal(command(*arguments), 2)
    assert sorted(planned.iterdir()) == before


# --- Bad input: places to write to, and ways to ask.


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "run.toml", "--calibration", "calibration.json", "--out"],
        ["simulate", "plan.json", "--calibration", "calibration.json", "--out"],
        ["recalibrate", "calibration.json", "plan.json", "--out"],
        ["calibrate", "--quick", "--out"],
        ["report", "plan.json", "--predicted", "plan.json", "--out"],
        ["cluster", "h200x8", "--out"],
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(command, planned, arguments):
    before = sorted(planned.iterdir())
    sentence = refusal(command(*arguments, "plan.json/below/file.json"), 2)
    assert "plan.json is a file" in sentence
    assert "got a folder" in refusal(command(*arguments, "."), 2)
    assert sorted(planned.iterdir()) == before


def test_a_training_that_could_not_write_is_refused_before_it_starts(command, planned):
    assert "plan.json is a file" in refusal(command("train", "plan.json", "--out", "plan.json/run"), 2)


def test_a_full_disk_is_told(command, planned):
    sentence = refusal(command("simulate", "plan.json", "--calibration", "calibration.json", "--out", "/dev/full"), 2)
    assert sentence.startswith("/dev/full: cannot be written: No space left on device")


@pytest.mark.parametrize(
    "arguments", [["trian"], ["plan"], ["plan", "run.toml", "--fast"], ["simulate", "p", "--trials", "0"]]
)
def test_a_mistyped_command_shows_how_to_ask(command, arguments):
    done = command(*arguments)
    assert done.status == 2
    assert "--help" in done.err
    assert done.out == ""


def test_a_cluster_that_nobody_knows_is_answered_with_the_known_ones(command):
    sentence = refusal(command("cluster", "h300"), 2)
    assert "local, a100x8, a100x8-hdr" in sentence
    assert "h100x8-ndr" in sentence


def test_an_unknown_precision_is_answered_with_the_known_ones(command):
    assert "--precisions must name some of fp32, bf16" in refusal(command("calibrate", "--precisions", "fp31"), 2)


def test_our_own_fault_shows_a_traceback_only_on_demand(command, planned, monkeypatch):
    def fail(*_, **__):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr("executor.cli.simulate", fail)
    arguments = ("simulate", "plan.json", "--calibration", "calibration.json")
    assert "our own fault: ZeroDivisionError: on purpose" in refusal(command(*arguments), 1)
    done = command(*arguments, "--debug")
    assert done.status == 1
    assert "Traceback" in done.err


# --- Logs of collectives.


def test_a_log_is_added_to_a_calibration_and_its_fabric_judged(command, tmp_path, shared_logs):
    path = write_made_calibration(tmp_path, device_name="NVIDIA H100 80GB HBM3")
    log = shared_logs / "h100_ndr_allreduce_2n16g_default_nccltests309_siteA.txt"
    done = command("calibrate", "--from", f"nccl-tests:{log}", "--out", path)
    assert done.status == 0
    assert "the fabric is healthy; 32 samples added" in " ".join(done.out.split())
    assert sum(sample.num_hosts == 2 for sample in read_calibration(path).collectives) == 32


def test_a_degraded_log_is_refused_with_what_is_suspected(command, tmp_path, shared_logs):
    path = write_made_calibration(tmp_path, device_name="NVIDIA H100 80GB HBM3")
    before = path.read_text()
    log = shared_logs / "h100_ndr_allreduce_2n16g_RING_DEGRADED_nccltests290.txt"
    done = command("calibrate", "--from", f"nccl-tests:{log}", "--out", path)
    assert done.status == 4
    assert "2 of 8 network cards" in " ".join(done.err.split())
    assert path.read_text() == before
    forced = command("calibrate", "--from", f"nccl-tests:{log}", "--out", path, "--force", "--json")
    assert json.loads(forced.out)["logs"][0]["is_healthy"] is False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--from", "log.txt"], "must be nccl-tests:FILE"),
        (["--from", "nccl-tests:nowhere.txt"], "nowhere.txt: must be a readable text file"),
        (["--from", "nccl-tests:log.txt", "--quick"], "takes no --host-only, --quick"),
        (["--force"], "--force is for logs"),
    ],
)
def test_logs_that_cannot_be_added_are_named(command, tmp_path, arguments, words):
    path = write_made_calibration(tmp_path)
    done = command("calibrate", *arguments, "--out", path)
    assert done.status == 2
    assert words in " ".join(done.err.split())


def test_a_prediction_says_what_is_extrapolated(command, tmp_path):
    write_graph(tmp_path)
    write_run(tmp_path, extra="[search]\nnum_ranks = [2]\n")
    path = write_made_calibration(tmp_path)
    assert command("plan", "run.toml", "--calibration", path).status == 0
    known = command("simulate", "plan.json", "--calibration", path, "--json")
    assert json.loads(known.out)["extrapolated"] == []
    calibration = read_calibration(path)
    # As if nothing beyond eight bytes had been measured.
    tiny = tuple(replace(sample, num_bytes=min(sample.num_bytes, 8)) for sample in calibration.collectives)
    write_calibration(path, replace(calibration, collectives=tiny))
    done = command("simulate", "plan.json", "--calibration", path, "--json")
    assert done.status == 0
    told = json.loads(done.out)["extrapolated"]
    assert told
    assert all("measured up to 8" in text for text in told)
    for words in (("simulate", "plan.json"), ("plan", "run.toml")):
        assert "extrapolated: all_" in command(*words, "--calibration", path).out
    new = json.loads(command("plan", "run.toml", "--calibration", path, "--json").out)
    again = json.loads(command("simulate", "plan.json", "--calibration", path, "--json").out)
    assert new["extrapolated"] == again["extrapolated"] != []
