"""The demo on a small graph and with few measurements; its commands do what it did."""

import json
import re
import shlex

import pytest

from executor.cli_demo import RUN_TOML
from executor.measure.effort import AttentionCase, Effort, GraphKind
from simulator.specs.files import read_plan, read_run
from simulator.specs.graph import CommunityGraph
from tests.executor.commands import run_here, write_graph, write_run

TINY = Effort(
    rows=(64, 256),
    widths=(16, 32),
    edges=(256, 1024),
    attention=(AttentionCase(graph=GraphKind.UNIFORM, edges=256, degree=4, heads=8, head_size=4),),
    collective_bytes=(1024, 65536),
    case_seconds=0.001,
    repetitions=3,
)


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    """Runs commands in this process, in a fresh folder; calibrations are tiny."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("executor.cli_demo.effort_of", lambda kind, quick: TINY)
    return lambda *arguments: run_here(monkeypatch, capfd, *arguments)


@pytest.mark.dist
def test_the_demo_goes_round_the_loop_and_its_commands_do_the_same(command, tmp_path):
    folder = tmp_path / "my demo"
    folder.mkdir()
    write_graph(folder)
    run = write_run(folder).read_text()
    done = command("demo", "--out", "my demo")
    assert done.status == 0, done.err
    assert (folder / "run.toml").read_text() == run
    assert f"The report: {folder / 'report.html'}" in done.out
    made = ("plan.json", "predicted.json", "recalibrated.json", "predicted-again.json", "report.html")
    before = {name: (folder / name).read_bytes() for name in made}
    commands = [shlex.split(line) for line in re.findall(r"^   graphpilot (.*)$", done.out, re.MULTILINE)]
    steps = ["inspect", "calibrate", "plan", "simulate", "train", "compare", "recalibrate", "simulate", "report"]
    assert [words[0] for words in commands] == steps
    for words in commands:
        if words[0] not in ("calibrate", "train"):  # which measure anew
            again = command(*words, "--json")
            assert (again.status, again.err) == (0, "")
            json.loads(again.out)
    assert {name: (folder / name).read_bytes() for name in made} == before
    assert read_plan(folder / "plan.json").train.num_steps == 6


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({'name = "local"': 'name = "h200x8"'}, 'cluster.name must be "local" in a demo, got "h200x8"'),
        ({"trace_steps = 2": "trace_steps = 0"}, "train.trace_steps must be within 1 and 5 in a demo"),
        ({"trace_steps = 2": "trace_steps = 6"}, "train.trace_steps must be within 1 and 5 in a demo"),
    ],
)
def test_a_run_that_cannot_be_shown_is_refused_at_once(command, tmp_path, changes, words):
    write_graph(tmp_path)
    write_run(tmp_path, changes)
    done = command("demo", "--out", ".", "--quiet")
    assert (done.status, done.out) == (2, "")
    assert f"run.toml: {words}" in done.err


def test_the_run_that_the_demo_writes_is_of_a_community_graph_on_this_machine(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(RUN_TOML)
    run = read_run(path)
    assert run.cluster is None
    assert isinstance(run.graph, CommunityGraph)
    assert 0 < run.train.trace_steps < run.train.num_steps
