"""Sustained rates of built-in clusters against the logs that they are from."""

import pytest

from simulator.specs.cluster import BUILT_IN_CLUSTERS
from simulator.specs.units import GB
from tests.conftest import SHARED

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


def test_nvlink_of_a100_carries_what_its_log_says():
    rate = BUILT_IN_CLUSTERS["a100x8"].device_link.bandwidth_bytes_per_second / GB
    assert rate == pytest.approx(largest_bus_bandwidth("a100_nvlink_allreduce_1n8g_superbench.txt"), rel=0.01)
