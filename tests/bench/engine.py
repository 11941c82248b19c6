"""How long a prediction takes, from a plan for many ranks to its trace.

    python -m tests.bench.engine --json figures.json

A step of 12 layers on 64 distinct parts, which exchange halo rows irregularly (an uneven all-to-all of 64 ranks in each
layer and direction), in 16 and in 256 replicas, with buckets of gradients beside the backward pass; on one core. The
same step of 64 ranks, 16 parts in 4 replicas, is also played rank by rank, and must take as long.
"""

import argparse
import os
import statistics
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from executor.environment import environment
from simulator.engine import play
from simulator.simulation import Pricing, fold_priced, pricing, simulate_with
from simulator.specs.cluster import INFINIBAND_NDR, NVLINK4, DeviceKind
from simulator.specs.plan import PartitionSpec, Plan
from simulator.specs.program import Phase, Program, TaskKind
from simulator.specs.trace import counted_ranks
from simulator.specs.units import GB, MIB
from simulator.workload import lower
from tests.bench.result import Better, Figure, print_figures, write_figures
from tests.made import (
    graph_of,
    made_calibration,
    made_cluster,
    made_items,
    made_model,
    made_part,
    made_partition,
    made_plan,
)

MODEL = made_model(width=256, num_heads=8, num_layers=12, feed_forward_width=512)
DEVICES_PER_HOST = 8
NUM_PARTS = 64
# Replicas, and the most seconds that a prediction may take.
BARS = {16: 10.0, 256: 20.0}
GOAL_SECONDS = 2.0  # of 1,024 ranks
REPETITIONS = 10
TRIALS = 20
MOST_DIFFERENCE = 0.01


def irregular_partition(num_parts: int, *, seed: int = 0) -> PartitionSpec:
    """Return parts of unequal sizes, each of which needs rows of four in ten others, of some ten times as many."""
    generator = np.random.default_rng(seed)
    nodes = (40_000 * np.exp(0.2 * generator.standard_normal(num_parts))).astype(int)
    parts = []
    for part in range(num_parts):
        is_neighbour = generator.random(num_parts) < 0.4
        is_neighbour[part] = False
        rows = 1 + (800 * np.exp(generator.standard_normal(num_parts))).astype(int)
        halo = np.where(is_neighbour, rows, 0)
        edges = 4 * halo
        edges[part] = 12 * nodes[part]
        parts.append(
            made_part(
                int(nodes[part]),
                edges.tolist(),
                halo.tolist(),
                boundary_nodes_from=np.minimum(2 * halo, nodes[part] // 2).tolist(),
                num_boundary_nodes=int(nodes[part]) // 2,
            )
        )
    return made_partition(parts)


def plan_of(num_parts: int, num_replicas: int) -> Plan:
    """Return a plan that trains the full graph, a part a rank, in some replicas."""
    plan = made_plan(irregular_partition(num_parts), num_layers=MODEL.num_layers)
    return replace(plan, data_parallel_degree=num_replicas, overlap_gradients=True, gradient_bucket_bytes=2 * MIB)


def costs_of(num_ranks: int) -> Pricing:
    """Return made costs of about the size of an H100's, on hosts of 8 with NVLink and a network card each."""
    cluster = made_cluster(
        num_hosts=-(-num_ranks // DEVICES_PER_HOST),
        devices_per_host=DEVICES_PER_HOST,
        kind=DeviceKind.CUDA,
        device_link=NVLINK4,
        host_link=INFINIBAND_NDR,
    )

    def compute_seconds(kind: TaskKind, phase: Phase, shape: tuple[int, ...]) -> float:
        return 5e-6 + 1e-12 * made_items(kind, shape) * (1 + (phase is Phase.BACKWARD))

    calibration = made_calibration(
        compute_seconds=compute_seconds,
        collective_seconds=lambda _, num_ranks, num_bytes: 20e-6 + num_bytes / (330 * GB),
        host_seconds=6e-6,
    )
    return pricing(cluster, calibration)


def seconds_to_predict(num_parts: int, num_replicas: int, *, trials: int = 1) -> tuple[float, int, int]:
    """Return the seconds from a plan and a calibration to a trace, and how many tasks and different ranks it has."""
    plan = plan_of(num_parts, num_replicas)
    graph, costs = graph_of(plan.partition), costs_of(plan.num_ranks)
    began = time.perf_counter()
    trace = simulate_with(costs, plan, graph, MODEL, trials=trials)
    seconds = time.perf_counter() - began
    return seconds, len(trace.spans), len(counted_ranks(trace))


def difference_of_unfolded(num_parts: int, num_replicas: int) -> tuple[float, float]:
    """Return by how much folding changes a step, and the end of any of its tasks, over the step's seconds."""
    plan = plan_of(num_parts, num_replicas)
    costs = costs_of(plan.num_ranks)
    program = lower(plan, graph_of(plan.partition), MODEL, costs.cluster)
    each = [
        play(fold_priced(costs, plan, found), num_steps=2) for found in (program, Program(tasks=tuple(program.tasks)))
    ]
    folded, unfolded = (tuple(played.spans(1)) for played in each)
    assert [(span.rank, span.name) for span in folded] == [(span.rank, span.name) for span in unfolded]
    step_seconds = each[1].end_seconds(1)
    ends = max(abs(mine.end_seconds - other.end_seconds) for mine, other in zip(folded, unfolded, strict=True))
    return abs(each[0].end_seconds(1) / step_seconds - 1), ends / step_seconds


def measure() -> list[Figure]:
    """Return all figures."""
    found = []
    for num_replicas, bar in BARS.items():
        runs = [seconds_to_predict(NUM_PARTS, num_replicas) for _ in range(REPETITIONS)]
        seconds = statistics.median(run[0] for run in runs)
        _, num_tasks, num_classes = runs[0]
        name = f"{NUM_PARTS * num_replicas:,} ranks"
        goal = f" (goal {GOAL_SECONDS:g} s)" if num_replicas == min(BARS) else ""
        found += [
            Figure(name=f"{name}: from plan to trace{goal}", value=seconds, unit="s", bar=bar, better=Better.LOWER),
            _told(f"{name}: of {REPETITIONS} repetitions the slowest", max(run[0] for run in runs), "s"),
            _told(f"{name}: tasks in a step", num_tasks, ""),
            _told(f"{name}: ranks that differ", num_classes, ""),
            _told(f"{name}: tasks per second", num_tasks / seconds, "1/s", better=Better.HIGHER),
        ]
    seconds, _, _ = seconds_to_predict(NUM_PARTS, min(BARS), trials=TRIALS)
    found.append(_told(f"{NUM_PARTS * min(BARS):,} ranks: with an interval from {TRIALS} trials", seconds, "s"))
    of_step, of_tasks = difference_of_unfolded(16, 4)
    for name, value in (("the step", of_step), ("the end of any task", of_tasks)):
        found.append(
            Figure(
                name=f"64 ranks: folded against rank by rank, {name}",
                value=value,
                unit="",
                bar=MOST_DIFFERENCE,
                better=Better.LOWER,
            )
        )
    return found


def _told(name: str, value: float, unit: str, *, better: Better = Better.LOWER) -> Figure:
    return Figure(name=name, value=value, unit=unit, bar=None, better=better)


def main() -> None:
    """Measure on one core, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    before = os.getloadavg()[0]
    figures = measure()
    load = f"{before:.2f} before, {os.getloadavg()[0]:.2f} after"
    print_figures(figures, title=f"the engine on one core; load over a minute {load}")
    if chosen.json:
        write_figures(chosen.json, figures, {**dict(environment(DeviceKind.CPU)), "load over a minute": load})


if __name__ == "__main__":
    main()
