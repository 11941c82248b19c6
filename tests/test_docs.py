"""What the documents show is true: commands parse, files exist, exit codes are those of the errors, snippets run."""

import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.main import get_command

from executor.cli import app
from simulator.errors import CalibrationError, NoFeasiblePlanError, PlanError, RunError, SpecError
from simulator.readers.graphs import read_graph
from simulator.specs.files import read_run
from simulator.specs.graph import GraphFile
from simulator.specs.plan import Recompute
from simulator.specs.search import BatchKind

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "simulator/README.md", "planner/README.md", "executor/README.md", "traces/README.md")
COMMANDS: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]


def fenced(language: str) -> list[str]:
    """Return the blocks of a language in README.md."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def command_lines() -> list[str]:
    """Return all commands that README.md shows, those of several lines joined, and the examples of `--help`."""
    shell = "\n".join(fenced("sh")).replace("\\\n", " ")
    printed = re.sub(r"\n {5}", " ", "\n".join(fenced("text")))
    examples = "\n".join(command.help for command in COMMANDS.values())
    return re.findall(r"^ *(?:Example: )?graphpilot (\w+ .*)$", "\n".join([shell, printed, examples]), re.MULTILINE)


def test_commands_are_found():
    assert {line.split()[0] for line in command_lines()} == set(COMMANDS)
    assert len(command_lines()) >= 8 + 9 + len(COMMANDS)


@pytest.mark.parametrize("line", sorted(set(command_lines())))
def test_a_command_in_the_documents_parses(line):
    name, *arguments = shlex.split(line)
    COMMANDS[name].make_context(name, arguments)


def test_the_torchrun_line_ends_in_a_command_that_parses():
    (line,) = re.findall(r"^torchrun .*$", "\n".join(fenced("sh")).replace("\\\n", " "), re.MULTILINE)
    name, *arguments = shlex.split(line.partition("-m executor ")[2])
    assert COMMANDS[name].make_context(name, arguments).params["out"] == Path("run")


def test_the_run_in_the_readme_is_valid(tmp_path):
    text, *_ = fenced("toml")
    (tmp_path / "run.toml").write_text(text)
    run = read_run(tmp_path / "run.toml")
    assert run.graph == GraphFile(path=str(tmp_path / "graph.npz"), symmetrise=True)
    assert run.cluster is None


def test_the_search_of_sampled_batches_in_the_readme_fits_the_run(tmp_path):
    text, search, _ = fenced("toml")
    (tmp_path / "run.toml").write_text(text.partition("[search]")[0] + search)
    run = read_run(tmp_path / "run.toml")
    assert BatchKind.SAMPLED in run.search.batches
    assert len(run.search.fan_outs) == run.model.num_layers


def test_the_search_of_other_axes_in_the_readme_fits_the_run(tmp_path):
    text, _, search = fenced("toml")
    (tmp_path / "run.toml").write_text(text.partition("[search]")[0] + search)
    run = read_run(tmp_path / "run.toml")
    assert (run.search.tensor_parallel_degrees, run.search.pipeline_parallel_degrees) == ((1, 2), (1, 2))
    assert run.search.shared_part_counts == (3,)
    assert set(run.search.recomputes) == set(Recompute)


def test_the_snippet_saves_a_graph_that_can_be_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = fenced("python")
    flags = np.array([True, False, False])
    masks = {f"{name}_mask": np.roll(flags, shift) for shift, name in enumerate(("train", "val", "test"))}
    arrays = {"edge_index": np.array([[0, 1], [1, 2]]), "x": np.eye(3), "y": np.array([0, 1, 1]), **masks}
    exec(code, arrays)
    spec, _ = read_graph(GraphFile(path="graph.npz", add_self_loops=False), base=tmp_path)
    assert (spec.num_nodes, spec.num_edges, spec.num_classes) == (3, 2, 2)
    assert (spec.num_train_nodes, spec.num_val_nodes, spec.num_test_nodes) == (1, 1, 1)


def test_the_exit_codes_are_those_of_the_errors():
    rows = dict(re.findall(r"^\| (\d[\d, ]*) \| (.+) \|$", README, re.MULTILINE))
    assert list(rows) == ["0", "2", "3", "4", "5", "130, 143", "1"]
    assert {SpecError.exit_status, PlanError.exit_status} == {2}
    assert "bad input" in rows["2"]
    assert "no plan fits" in rows[str(NoFeasiblePlanError.exit_status)]
    assert "calibration" in rows[str(CalibrationError.exit_status)]
    assert "a run failed" in rows[str(RunError.exit_status)]


@pytest.mark.parametrize("name", DOCUMENTS)
def test_files_that_a_document_names_exist(name):
    document = ROOT / name
    named = re.findall(
        r"`((?:[\w-]+/)*[\w-]+\.(?:py|md|toml)|(?:simulator|planner|executor|tests)/[\w/]*)`", document.read_text()
    )
    ours = [path for path in named if not path.startswith(("run.toml", "cluster.toml", "runs/"))]
    missing = [path for path in ours if not ((ROOT / path).exists() or (document.parent / path).exists())]
    assert missing == []
