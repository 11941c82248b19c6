"""Launches of cases for every test of this folder."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from simulator.specs.cluster import DeviceKind
from tests.conformance.cases import Observed, ObservedCase, Prepared, prepare, run_cases

CASES_PER_LAUNCH = 30  # half a minute to a minute on two cores


class LaunchedCases(Mapping[str, ObservedCase]):
    """Every case with what its ranks did, by name; cases run in launches of some, when one of them is asked for.

    A launch has to be over within the time that a test may take, also on a machine that has other things to do.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._found = folder, Observed()
        self._launches: dict[str, list[Prepared]] = {}
        by_ranks: dict[int, list[Prepared]] = defaultdict(list)
        for case in prepare(folder, DeviceKind.CPU):
            by_ranks[case.plan.num_ranks].append(case)
        for cases in by_ranks.values():
            for first in range(0, len(cases), CASES_PER_LAUNCH):
                together = cases[first : first + CASES_PER_LAUNCH]
                self._launches |= dict.fromkeys((case.name for case in together), together)

    def __getitem__(self, name: str) -> ObservedCase:
        if name not in self._found:
            folder = self._folder / f"launch{len(self._found)}"
            folder.mkdir()
            self._found |= run_cases(self._launches[name], folder)
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._launches)

    def __len__(self) -> int:
        return len(self._launches)


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> LaunchedCases:
    """Return every case with what its ranks did."""
    return LaunchedCases(tmp_path_factory.mktemp("conformance"))
