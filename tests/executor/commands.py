"""Small inputs of the commands, and the commands themselves run in this process or in one of their own."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from executor.cli import main
from executor.environment import environment, local_cluster
from simulator.specs.cluster import DeviceKind
from simulator.specs.files import write_calibration
from simulator.specs.units import Dtype
from tests.made import made_calibration

RUN_TOML = """\
[graph]
path = "graph.npz"
[model]
width = 16
num_heads = 4
num_layers = 2
feed_forward_width = 32
[cluster]
name = "local"
[train]
num_steps = 6
learning_rate = 0.01
trace_steps = 2
evaluate_every_steps = 3
"""


@dataclass(frozen=True, kw_only=True)
class Done:
    """What a command came to."""

    status: int
    out: str
    err: str


def graph_arrays(num_nodes: int = 60, num_edges: int = 300) -> dict[str, np.ndarray]:
    """Return a random graph as PyG users have it: edge_index, x, y and masks."""
    generator = np.random.default_rng(0)
    split_N = np.arange(num_nodes) % 5
    return {
        "edge_index": generator.integers(0, num_nodes, (2, num_edges)),
        "x": generator.standard_normal((num_nodes, 8)).astype(np.float32),
        "y": generator.integers(0, 3, num_nodes),
        "train_mask": split_N < 3,
        "val_mask": split_N == 3,
        "test_mask": split_N == 4,
    }


def write_graph(folder: Path, arrays: Mapping[str, np.ndarray] | None = None) -> Path:
    """Write `graph.npz`."""
    path = folder / "graph.npz"
    np.savez(path, **(arrays or graph_arrays()))  # type: ignore[arg-type]
    return path


def write_run(folder: Path, changes: Mapping[str, str] | None = None, *, extra: str = "") -> Path:
    """Write `run.toml`, with some of its lines changed and others behind them."""
    text = RUN_TOML
    for line, other in (changes or {}).items():
        assert line in text, line
        text = text.replace(line, other)
    path = folder / "run.toml"
    path.write_text(text + extra)
    return path


def write_made_calibration(folder: Path, **fields: Any) -> Path:
    """Write a made-up `calibration.json` that passes for one of this machine, unless fields say otherwise."""
    path = folder / "calibration.json"
    known = {"device_name": local_cluster().device.name, "environment": environment(DeviceKind.CPU)}
    write_calibration(path, replace(made_calibration(precisions=(Dtype.FLOAT32,)), **(known | fields)))
    return path


def run_here(monkeypatch: Any, capfd: Any, *arguments: str | Path) -> Done:
    """Run a command in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(sys, "argv", ["graphpilot", *map(str, arguments)])
    capfd.readouterr()
    try:
        main()
    except SystemExit as ended:
        status = ended.code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    out, err = capfd.readouterr()
    assert isinstance(status, int)
    return Done(status=status, out=out, err=err)


def start(*arguments: str | Path, cwd: Path) -> subprocess.Popen[str]:
    """Start a command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "executor", *map(str, arguments)],
        cwd=cwd,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "COLUMNS": "80"},
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str], *, timeout_seconds: float = 60.0) -> Done:
    """Return what a command came to when it has ended."""
    out, err = process.communicate(timeout=timeout_seconds)
    return Done(status=process.returncode, out=out, err=err)


def wait_for_ranks(process: subprocess.Popen[str], count: int) -> list[psutil.Process]:
    """Return the ranks when so many processes have been started."""
    until = time.monotonic() + 30
    while len(found := ranks_of(process)) < count:
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def assert_all_gone(processes: Sequence[psutil.Process], *, timeout_seconds: float = 5.0) -> None:
    """Fail unless all processes end soon."""
    _, alive = psutil.wait_procs(processes, timeout=timeout_seconds)
    assert alive == []


def ranks_of(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the processes that a command started, but for Python's tracker of resources."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "--multiprocessing-fork" in child.cmdline():
                found.append(child)
    return found
