"""Sustained rates of built-in clusters against the logs that they are from."""

from dataclasses import replace

import pytest

from simulator.collectives import CollectiveCosts
from simulator.group_shape import even_shape
from simulator.readers.nccl_tests import read_collective_log
from simulator.specs.cluster import BUILT_IN_CLUSTERS
from simulator.specs.communication import Operation
from simulator.specs.cost import CollectiveCost
from simulator.specs.program import TaskKind
from simulator.specs.units import GB
from tests.conftest import SHARED
from tests.made import made_collective

LOGS = SHARED / "nccl_logs"


def largest_bus_bandwidth(name: str) -> float:
    """Return the in-place bus bandwidth of the last row of an nccl-tests table, in GB/s."""
    path = LOGS / name
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    row = [line.split() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")][-1]
    return float(row[-2])


@pytest.mark.parametrize(
    ("cluster", "log", "num_cards"),
    [
        ("a100x8-hdr", "a100_cx6_allreduce_2n16g_nccltests152_PARTIAL.txt", 4),
        ("h100x8-ndr", "h100_ndr_allreduce_2n16g_RING_minctas24_qps2_nccltests309_siteC.txt", 8),
        ("h200x8-roce", "h200_roce400_allgather_2n16g_gcp_skypilot.txt", 8),
    ],
)
def test_a_card_carries_what_its_log_says(cluster, log, num_cards):
    rate = BUILT_IN_CLUSTERS[cluster].nic_bytes_per_second / GB
    assert rate == pytest.approx(largest_bus_bandwidth(log) / num_cards, rel=0.02)


@pytest.mark.parametrize(
    ("cluster", "operation", "num_hosts", "log"),
    [
        ("a100x8", Operation.ALL_REDUCE, 1, "a100_nvlink_allreduce_1n8g_superbench.txt"),
        ("h100x8", Operation.ALL_REDUCE, 1, "h100_nvlink_allreduce_1n8g_dgxc.txt"),
        ("h100x8-ndr", Operation.ALL_REDUCE, 2, "h100_ndr_allreduce_2n16g_default_nccltests309_siteC.txt"),
        ("h200x8-roce", Operation.ALL_GATHER, 2, "h200_roce400_allgather_2n16g_gcp_skypilot.txt"),
    ],
)
def test_a_built_in_cluster_takes_what_its_log_says(cluster, operation, num_hosts, log):
    # The constants know a cluster by its links: those that clusters state must be those that logs were fitted with.
    largest_bus_bandwidth(log)
    row = max(read_collective_log(LOGS / log).rows, key=lambda row: row.num_bytes)
    tasks = made_collective(
        TaskKind(operation.value),
        row.num_bytes // (8 * num_hosts if operation is Operation.ALL_GATHER else 1),
        8 * num_hosts,
    )
    cost = CollectiveCosts(replace(BUILT_IN_CLUSTERS[cluster], num_hosts=num_hosts), None).price(tasks)
    assert row.shape == even_shape(8 * num_hosts, num_hosts)
    assert seconds_alone(cost) == pytest.approx(row.seconds, rel=0.06)


def seconds_alone(cost: CollectiveCost) -> float:
    return cost.latency_seconds + max(flow.num_bytes / flow.max_bytes_per_second for flow in cost.flows)
