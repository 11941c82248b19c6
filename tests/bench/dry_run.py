"""How long `graphpilot train --dry-run` takes for 1,024 ranks, and how much memory, as a process of its own.

    python -m tests.bench.dry_run --json figures.json

A step of 12 layers. The first plan has 16 replicas, each with a batch of 64 parts of 1,024, no two of which are alike,
and exchanges halo rows irregularly: all 1,024 ranks differ, of which some go through a step. The second one has 1,024
replicas that sample their batches, most of which are alike. Graphs are counts alone. Seconds are those that passed, and
beside them those in which the process had a core; both contain the start of Python and the reading of the plan.
"""

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from executor.environment import environment
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.plan import Plan
from simulator.specs.train import TrainSpec
from simulator.specs.units import GIB, MIB
from tests.bench.engine import MODEL, costs_of, different_plan
from tests.bench.result import Better, Figure, print_figures, write_figures
from tests.made import equal_parts, graph_of, made_sampled, made_sampled_plan
from tests.plans import plan_file_of

NUM_RANKS = 1024
MOST_SECONDS, MOST_BYTES = 60.0, 8 * GIB
DEVICE_BYTES = 80 * GIB
TRAIN = TrainSpec(num_steps=100, learning_rate=0.01)


def halo_plan(num_parts: int = 64, num_replicas: int = 16) -> Plan:
    """Return a plan of irregular halo exchanges, no two ranks of which are alike."""
    return different_plan(num_parts, num_replicas)


def sampled_plan(num_replicas: int = NUM_RANKS, num_seeds: int = 1000) -> Plan:
    """Return a plan of replicas with so many seeds each."""
    rows = [60 * num_seeds, *(20 * num_seeds,) * (MODEL.num_layers - 1), num_seeds]
    sampled = made_sampled(
        *((sources, targets, 4 * targets) for sources, targets in itertools.pairwise(rows)),
        seeds_per_batch=num_seeds,
    )
    cut = equal_parts(2, num_nodes=2 * num_replicas * num_seeds, num_edges=40 * num_replicas * num_seeds)
    plan = made_sampled_plan(cut, sampled, data_parallel_degree=num_replicas)
    return replace(plan, overlap_gradients=True, gradient_bucket_bytes=2 * MIB)


def cluster_of(num_ranks: int) -> ClusterSpec:
    """Return hosts of eight devices with memory for these plans."""
    cluster = costs_of(num_ranks).cluster
    return replace(cluster, device=replace(cluster.device, memory_bytes=DEVICE_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """A dry run as a process.

    Attributes:
        found: what it printed.
    """

    passed_seconds: float
    core_seconds: float
    peak_bytes: int
    found: dict[str, Any]


def dry_run_of(plan: Plan, folder: Path) -> Ran:
    """Dry-run a plan in a process of its own; its peak is that of all such processes so far."""
    path = folder / "plan.json"
    plan_file_of(plan, graph_of(plan.partition), MODEL, cluster_of(plan.num_ranks), TRAIN, path)
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, "-m", "executor", "train", "--dry-run", str(path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    passed, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0, done.stderr
    core = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Ran(
        passed_seconds=passed, core_seconds=core, peak_bytes=after.ru_maxrss * 1024, found=json.loads(done.stdout)
    )


def figures_of(name: str, ran: Ran) -> list[Figure]:
    """Return time, memory and what was looked at."""
    assert ran.found["findings"] == [], ran.found["findings"]
    told = {
        "seconds of the core": (ran.core_seconds, "s"),
        "ranks that differ": (ran.found["num_rank_classes"], ""),
        "ranks that went through a step": (len(ran.found["ranks_run"]), ""),
        "tasks in a step": (ran.found["num_tasks"], ""),
    }
    return [
        _figure(f"{name}: seconds", ran.passed_seconds, "s", MOST_SECONDS),
        _figure(f"{name}: peak of the process", ran.peak_bytes / GIB, "GiB", MOST_BYTES / GIB),
        *(_figure(f"{name}: {what}", value, unit, None) for what, (value, unit) in told.items()),
    ]


def _figure(name: str, value: float, unit: str, bar: float | None) -> Figure:
    return Figure(name=name, value=value, unit=unit, bar=bar, better=Better.LOWER)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    before, figures = os.getloadavg()[0], []
    # The peak of processes only grows, so the plan that takes less comes first.
    plans = {"1,024 replicas, sampled": sampled_plan(), "16 replicas x 64 parts, halo": halo_plan()}
    for name, plan in plans.items():
        with tempfile.TemporaryDirectory() as folder:
            figures += figures_of(name, dry_run_of(plan, Path(folder)))
    load = f"{before:.2f} before, {os.getloadavg()[0]:.2f} after"
    print_figures(figures, title=f"dry runs of 1,024 ranks; load over a minute {load}")
    if chosen.json:
        write_figures(chosen.json, figures, {**dict(environment(DeviceKind.CPU)), "load over a minute": load})


if __name__ == "__main__":
    main()
