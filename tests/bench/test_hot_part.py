"""The benchmark of the hot part on a small graph: what it compares, and that all plans learn alike."""

import os

import pytest

from simulator.constraints import violations
from tests.bench import hot_part
from tests.bench.hot_part import MODEL, NUM_RANKS, candidates_of, made_graph
from tests.made import made_cluster


def test_one_part_has_three_times_the_mean_edges_and_gets_more_ranks(tmp_path):
    spec, graph = made_graph(tmp_path, tiny=True)
    found = candidates_of(graph, tmp_path)
    assert [candidate.name for candidate in found] == ["1+1+1+1", "2+1+1", "3+1"]
    assert found[0].plan.partition.edge_imbalance == pytest.approx(3, rel=0.05)
    for candidate in found:
        hot = candidate.plan.partition.parts[0]
        assert (hot.num_nodes, hot.num_edges) == (
            found[0].plan.partition.parts[0].num_nodes,
            found[0].plan.partition.parts[0].num_edges,
        )
        assert violations(candidate.plan, spec, MODEL, made_cluster(devices_per_host=NUM_RANKS)) == []


@pytest.mark.dist
@pytest.mark.parametrize("num_cores", [2, 4])
def test_all_plans_learn_alike_and_the_clock_has_a_bar_where_ranks_share_no_cores(num_cores, monkeypatch, capsys):
    monkeypatch.setattr(os, "cpu_count", lambda: num_cores)
    monkeypatch.setattr(hot_part, "NUM_ROUNDS", 1)
    monkeypatch.setattr(hot_part, "NUM_STEPS", 2)
    figures = {figure.name: figure for figure in hot_part.main(["--tiny"])}
    losses = [figure.value for name, figure in figures.items() if name.endswith("last loss")]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert {name for name, figure in figures.items() if figure.bar is not None} == {
        f"{plan} over 1+1+1+1: {what}"
        for plan in ("2+1+1", "3+1")
        for what in ("busiest rank, computing thread", "step by the clock")[: 1 + (num_cores >= NUM_RANKS)]
    }
    assert "hot part on 4 processes" in capsys.readouterr().out
