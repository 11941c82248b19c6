"""Settings and fixtures that all tests share."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

# Without a GPU the Triton kernels run in Triton's interpreter; the variable counts when they are imported.
if not Path("/dev/nvidia0").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

settings.register_profile("graphpilot", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("graphpilot")

SHARED = Path(os.environ.get("GRAPHPILOT_SHARED", Path(__file__).parents[2] / "shared"))


@pytest.fixture(scope="session")
def shared_logs() -> Path:
    """Folder of public logs of collectives."""
    folder = SHARED / "nccl_logs"
    if not folder.is_dir():
        pytest.skip(f"the team's logs {folder} are not on this machine")
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of the team's real graphs."""
    folder = Path(os.environ.get("GRAPHPILOT_DATA", SHARED / "data"))
    if not folder.is_dir():
        pytest.skip(f"the team's data folder {folder} is not on this machine")
    return folder


@pytest.fixture(scope="session")
def shared_samples() -> Path:
    """Folder of other people's traces, topologies and logs."""
    return _shared_folder("samples")


@pytest.fixture(scope="session")
def shared_measured() -> Path:
    """Folder of the team's measurements."""
    return _shared_folder("measured")


def _shared_folder(name: str) -> Path:
    folder = SHARED / name
    if not folder.is_dir():
        pytest.skip(f"the team's folder {folder} is not on this machine; GRAPHPILOT_SHARED names its parent")
    return folder
