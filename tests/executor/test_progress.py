"""Progress away from a terminal, in plain lines, and on one."""

import pytest

from executor.progress import CountProgress


def test_every_call_is_a_line_away_from_a_terminal(capfd):
    with CountProgress("training", "step", 6) as progress:
        progress.show(3, "loss 1.0")
        progress.show(6, "loss 0.5 [red]")
    assert capfd.readouterr() == ("", "step 3 of 6: loss 1.0\nstep 6 of 6: loss 0.5 [red]\n")


@pytest.mark.parametrize(("total", "shown"), [(8, [2, 4, 6, 8]), (7, [2, 4, 6, 7]), (3, [1, 2, 3])])
def test_many_calls_are_a_line_for_every_quarter(capfd, total, shown):
    with CountProgress("tasks", "task", total, lines=4) as progress:
        for done in range(1, total + 1):
            progress.advance(f"number {done}")
    expected = [f"task {done} of {total}: number {done}" for done in shown]
    assert capfd.readouterr().err.splitlines() == expected


def test_quiet_progress_says_nothing(capfd):
    with CountProgress("training", "step", 2, quiet=True) as progress:
        progress.advance("one")
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_bar_and_keeps_its_cursor(capfd, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with CountProgress("training", "step", 6) as progress:
        progress.show(3, "loss 1.0 [red]")
        err = capfd.readouterr().err
    assert "3/6" in err
    assert "loss 1.0 [red]" in err
    # A rank that is ended from outside gets no chance to bring the cursor back.
    assert err.rindex("\x1b[?25h") > err.rindex("\x1b[?25l")
