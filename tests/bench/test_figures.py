"""Figures of benchmarks: to a file, back, and against their bars."""

import json

import pytest

from simulator.errors import SpecError
from tests.bench.figures import main
from tests.bench.result import Better, Figure, print_figures, read_figures, write_figures

ERROR = Figure(name="median error of a step", value=0.08, unit="ratio", bar=0.1, better=Better.LOWER)
SPEED = Figure(name="events simulated", value=90_000.0, unit="1/s", bar=100_000.0, better=Better.HIGHER)
REPORTED = Figure(name="runs", value=12.0, unit="", bar=None, better=Better.HIGHER)


@pytest.mark.parametrize(
    ("better", "value", "holds"),
    [
        (Better.LOWER, 1.9, True),
        (Better.LOWER, 2.0, True),
        (Better.LOWER, 2.1, False),
        (Better.HIGHER, 1.9, False),
        (Better.HIGHER, 2.0, True),
        (Better.HIGHER, 2.1, True),
        (Better.LOWER, float("nan"), False),
    ],
)
def test_a_bar_is_reached_from_its_side(better, value, holds):
    assert Figure(name="x", value=value, unit="s", bar=2.0, better=better).holds is holds


def test_a_figure_without_a_bar_is_only_reported():
    assert REPORTED.holds


def test_figures_come_back_equal_and_the_file_says_which_hold(tmp_path):
    path = tmp_path / "new" / "figures.json"
    write_figures(path, [ERROR, SPEED, REPORTED], {"device": "a core"})
    assert read_figures(path) == [ERROR, SPEED, REPORTED]
    document = json.loads(path.read_text())
    assert document["environment"] == {"device": "a core"}
    assert document["figures"][1] == {
        "name": "events simulated",
        "value": 90_000.0,
        "unit": "1/s",
        "bar": 100_000.0,
        "better": "higher",
        "holds": False,
    }


def test_the_table_shows_value_bar_and_verdict(capsys):
    print_figures([ERROR, SPEED, REPORTED], title="mine")
    title, header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert title == ["mine"]
    assert header == ["figure", "value", "unit", "bar"]
    assert rows[0] == ["median", "error", "of", "a", "step", "0.08", "ratio", "<=", "0.1", "holds"]
    assert rows[1] == ["events", "simulated", "9e+04", "1/s", ">=", "100000", "MISSED"]
    assert rows[2] == ["runs", "12", "-"]


def test_all_folders_are_shown_and_a_missed_bar_is_the_exit_status(tmp_path, capsys):
    write_figures(tmp_path / "one/figures.json", [ERROR, REPORTED], {})
    assert main(tmp_path) == 0
    assert "every bar is reached" in capsys.readouterr().out
    write_figures(tmp_path / "two/figures.json", [SPEED], {})
    assert main(tmp_path) == 1
    shown = capsys.readouterr().out
    assert shown.index("one") < shown.index("two") < shown.index("bars that are missed: 1")


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"figures": [{"name": "x"}]}', '{"figures": 3}'],
)
def test_another_file_is_refused(tmp_path, capsys, text):
    path = tmp_path / "one/figures.json"
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(SpecError, match=r"figures\.json: must hold figures"):
        read_figures(path)
    assert main(tmp_path) == 2
    assert "measure again" in capsys.readouterr().err


def test_a_verdict_that_contradicts_its_numbers_is_refused(tmp_path):
    path = tmp_path / "figures.json"
    write_figures(path, [ERROR], {})
    path.write_text(path.read_text().replace('"holds": true', '"holds": false'))
    with pytest.raises(SpecError, match="holds = False"):
        read_figures(path)


def test_a_folder_without_figures_is_told(tmp_path, capsys):
    assert main(tmp_path) == 2
    assert "nothing was measured yet" in capsys.readouterr().err
