"""One launch of all cases for every test of this folder."""

import pytest

from simulator.specs.cluster import DeviceKind
from tests.conformance.cases import Observed, prepare, run_cases


@pytest.fixture(scope="session")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Observed:
    """Return every case with what its ranks did."""
    folder = tmp_path_factory.mktemp("conformance")
    return run_cases(prepare(folder, DeviceKind.CPU), folder)
