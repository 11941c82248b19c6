"""What the system says of this machine, from files as Linux has them."""

from pathlib import Path

import pytest

from executor.environment import core_cache_bytes, local_cluster
from simulator.specs.cluster import DeviceKind

FIRST = ("1", "Data", "48K", "1")
SECOND = ("2", "Unified", "1024K", "1")
THIRD = ("3", "Unified", "32768K", "00000000,00000003")


def written(folder: Path, *caches: tuple[str, str, str, str]) -> Path:
    for index, values in enumerate(caches):
        cache = folder / f"index{index}"
        cache.mkdir()
        for name, value in zip(("level", "type", "size", "shared_cpu_map"), values, strict=True):
            (cache / name).write_text(f"{value}\n")
    return folder


@pytest.mark.parametrize(
    ("caches", "expected"),
    [
        ((FIRST, ("1", "Instruction", "32K", "1"), SECOND, THIRD), 16 * 2**20),  # two cores share it
        ((THIRD, SECOND, FIRST), 16 * 2**20),
        ((FIRST, SECOND), 2**20),
        ((("3", "Unified", "65536K", "ffff0000"), FIRST), 4 * 2**20),  # sixteen cores
        ((("3", "Unified", "unknown", "3"), FIRST), 48 * 2**10),
        ((("1", "Instruction", "32K", "1"),), 0),
        ((), 0),
    ],
)
def test_a_core_has_its_share_of_the_last_cache(tmp_path, caches, expected):
    assert core_cache_bytes(written(tmp_path, *caches)) == expected


def test_a_system_that_does_not_say_has_a_cache_of_unknown_size(tmp_path):
    assert core_cache_bytes(tmp_path / "none") == 0


def test_this_machine_is_described_with_its_cache():
    assert local_cluster(DeviceKind.CPU).device.cache_bytes == core_cache_bytes()
