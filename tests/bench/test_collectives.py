"""The benchmark of collectives names every log, and the constants that come with the project are its own."""

import dataclasses
import json

import numpy as np
import pytest

from simulator.nccl_constants import FITTED, PRIOR, fitted_constants, flat, unflat
from simulator.nccl_fit import fit_constants, predicted_seconds
from tests.bench.collectives import (
    COUNTED,
    DOUBTFUL,
    LEFT_OUT,
    Errors,
    counted_rows,
    errors_of,
    figures_of,
    within_site_errors,
)


def test_every_log_is_counted_or_has_a_reason_not_to_be(shared_logs):
    named = {log.name for log in COUNTED} | set(DOUBTFUL) | set(LEFT_OUT)
    assert named == {path.name for path in shared_logs.glob("*.txt")} - {"00_INDEX.txt"} | {"comm.csv"}
    assert not {log.name for log in COUNTED} & (set(DOUBTFUL) | set(LEFT_OUT))
    assert all(log.reason for log in COUNTED if log.least_bytes)


def test_the_constants_of_the_project_are_fitted_to_the_counted_logs(shared_logs):
    assert shared_logs.is_dir()
    assert json.loads(FITTED.read_text())["origin"]["logs"] == [log.name for log in COUNTED]
    measured = counted_rows()
    errors = np.abs(predicted_seconds(measured, fitted_constants()) / measured.seconds - 1)
    assert errors.mean() < 0.08  # of logs that were fitted to; those of held-out ones are the benchmark's


def test_constants_come_back_equal():
    assert unflat(flat(PRIOR)) == PRIOR
    assert fitted_constants() != PRIOR


def test_a_fit_finds_the_constants_that_made_the_times(shared_logs):
    assert shared_logs.is_dir()
    measured = counted_rows()
    made = predicted_seconds(measured, fitted_constants())
    again = fit_constants(dataclasses.replace(measured, seconds=made))
    # Constants trade with each other; what they say of the calls does not.
    errors = np.abs(predicted_seconds(measured, again) / made - 1)
    assert errors.mean() < 0.03


def test_errors_by_hand(shared_logs):
    assert shared_logs.is_dir()
    measured = counted_rows()
    names = np.array(measured.logs)
    mine = measured.subset(names == "h200_oci_allreduce_2n16g.txt")
    found = errors_of(mine, mine.seconds * np.array([1.1, 0.9, 1.0, 1.0, 1.0]), held_out="log")
    assert len(found) == 1
    assert found[0].shares == pytest.approx((0.1, -0.1, 0, 0, 0))
    assert found[0].mean == pytest.approx(0.04)
    figures = {figure.name: figure for figure in figures_of([*found, *_others(), *within_site_errors(measured)])}
    assert figures["at least 64 MB, log held out"].value == pytest.approx(4.0)
    assert figures["below 64 MB, within a site"].value < 6


def _others() -> list[Errors]:
    return [
        Errors(log="made", held_out=out, is_forced=forced, is_large=large, sizes=(1,), shares=(0.5,))
        for out, forced, large in (("log", True, True), ("site", False, True), ("site", False, False))
    ]
