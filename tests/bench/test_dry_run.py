"""The benchmark of the dry run on few ranks: what it runs, counts and holds against its bars."""

import pytest

from simulator.constraints import violations
from tests.bench import dry_run
from tests.bench.dry_run import NUM_RANKS, cluster_of, dry_run_of, figures_of, halo_plan, sampled_plan
from tests.bench.engine import MODEL
from tests.made import graph_of


@pytest.mark.parametrize("plan", [halo_plan(4, 3), sampled_plan(12, 50)])
def test_its_plans_can_be_trained_on_its_clusters(plan):
    assert plan.num_ranks == 12
    assert violations(plan, graph_of(plan.partition), MODEL, cluster_of(plan.num_ranks)) == []


def test_its_plans_are_for_as_many_ranks_as_it_says():
    assert sampled_plan().num_ranks == NUM_RANKS == 64 * 16


def test_a_dry_run_is_timed_and_counted(tmp_path):
    ran = dry_run_of(halo_plan(2, 2), tmp_path)
    assert ran.found["num_ranks"] == len(ran.found["ranks_run"]) == 4
    assert ran.core_seconds > 0
    figures = {figure.name: figure for figure in figures_of("four", ran)}
    assert figures["four: seconds"].bar == dry_run.MOST_SECONDS
    assert figures["four: peak of the process"].holds
    assert figures["four: ranks that differ"].value == 4
