"""What the bench of hierarchical exchanges counts from edges is what the plan counts from rows."""

import numpy as np
import pytest

from planner.hosts import host_rows
from planner.partition import part_specs
from simulator.specs.plan import Exchange
from tests.bench.hierarchical import rows_between_hosts
from tests.small_graphs import shuffled_communities


@pytest.mark.parametrize("ranks_per_host", [2, 4])
def test_rows_between_hosts_are_counted_alike_from_edges_and_from_parts(ranks_per_host):
    graph, _ = shuffled_communities(512, size=64, degree=6)
    num_parts = 2 * ranks_per_host
    part_N = np.random.default_rng(0).integers(0, num_parts, graph.num_nodes).astype(np.int32)
    counted = host_rows(graph, part_N, num_parts, ranks_per_host=ranks_per_host)
    assert (
        rows_between_hosts(graph, part_N, Exchange.HIERARCHICAL_HALO, ranks_per_host) == counted.num_rows_between_hosts
    )
    flat = sum(
        rows
        for target, part in enumerate(part_specs(graph, part_N, num_parts))
        for owner, rows in enumerate(part.halo_rows_from)
        if owner // ranks_per_host != target // ranks_per_host
    )
    assert rows_between_hosts(graph, part_N, Exchange.HALO, ranks_per_host) == flat > counted.num_rows_between_hosts
