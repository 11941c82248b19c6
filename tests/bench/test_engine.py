"""The benchmark of the engine on a small size: what it runs, counts and compares."""

import pytest

from simulator.simulation import simulate_with
from simulator.workload import lower
from tests.bench import engine
from tests.bench.engine import MODEL, costs_of, difference_of_unfolded, irregular_partition, plan_of, seconds_to_predict
from tests.made import graph_of


def test_parts_differ_and_exchange_irregularly():
    cut = irregular_partition(16)
    assert len({part.num_nodes for part in cut.parts}) == 16
    rows = [rows for part in cut.parts for rows in part.halo_rows_from]
    # Four in ten pairs, the diagonal left out.
    assert 0.25 < sum(row > 0 for row in rows) / len(rows) < 0.55
    assert all(part.halo_rows_from[index] == 0 for index, part in enumerate(cut.parts))
    assert irregular_partition(16) == cut


def test_tasks_of_all_ranks_are_counted_and_replicas_are_one_class_a_part():
    seconds, num_tasks, num_classes = seconds_to_predict(8, 3)
    plan = plan_of(8, 3)
    program = lower(plan, graph_of(plan.partition), MODEL, costs_of(24).cluster)
    assert (num_tasks, num_classes) == (program.num_tasks, 8)
    assert seconds.core > 0
    assert seconds.passed > 0


def test_folding_changes_nothing_within_a_percent():
    of_step, of_tasks = difference_of_unfolded(8, 2)
    assert of_step <= engine.MOST_DIFFERENCE
    assert of_tasks <= engine.MOST_DIFFERENCE


def test_a_step_holds_exchanges_and_reductions_that_overlap():
    plan = plan_of(8, 2)
    trace = simulate_with(costs_of(16), plan, graph_of(plan.partition), MODEL)
    exchanges = [span for span in trace.spans if span.name.endswith("exchange.backward")]
    reductions = [span for span in trace.spans if span.name.startswith("gradients")]
    assert len(exchanges) == 12 * 16
    assert any(
        span.start_seconds < other.end_seconds and other.start_seconds < span.end_seconds
        for span in exchanges[:12]
        for other in reductions
    )
    # Uneven messages: some rank waits for another in every exchange.
    assert all(
        any(span.waiting_seconds > 0 for span in exchanges if span.name == f"layer{layer}.exchange.backward")
        for layer in range(12)
    )


def test_figures_have_the_bars_of_the_issue(monkeypatch):
    monkeypatch.setattr(engine, "NUM_PARTS", 4)
    monkeypatch.setattr(engine, "BARS", {2: 10.0, 3: 20.0})
    monkeypatch.setattr(engine, "REPETITIONS", 2)
    monkeypatch.setattr(engine, "TRIALS", 3)
    monkeypatch.setattr(engine, "DIFFERENT", ((3, 2), (1, 6)))
    figures = {figure.name: figure for figure in engine.measure()}
    assert figures["8 ranks: from plan to trace (goal 2 s)"].bar == 10.0
    assert figures["12 ranks: from plan to trace"].bar == 20.0
    assert all(figure.holds for figure in figures.values())
    assert {figures[f"{name} different parts: from plan to trace"].bar for name in ("2 x 3", "6 x 1")} == {10.0}
    assert figures["6 x 1 different parts: ranks that then differ"].value <= 6
    speed = figures["8 ranks: tasks per second"]
    assert speed.value == pytest.approx(
        figures["8 ranks: tasks in a step"].value / figures["8 ranks: from plan to trace (goal 2 s)"].value
    )
