"""How long a prediction takes, from a plan for many ranks to its trace.

    python -m tests.bench.engine --json figures.json

A step of 12 layers on 64 distinct parts, which exchange halo rows irregularly (an uneven all-to-all of 64 ranks in each
layer and direction), in 16 and in 256 replicas, with buckets of gradients beside the backward pass; on one core. Hosts
are `h100x8-ndr` (NVSwitch, PCIe, eight cards, rails and leaves) with a made-up device. The
same step of 64 ranks, 16 parts in 4 replicas, is also played rank by rank, and must take as long. Where nothing is
alike: 16 replicas of 64 parts each, all different, and 1,024 replicas of a part each, of which those within 1 % of
each other are also taken for alike.

Seconds are those that the process had a core, which on a busy machine are fewer than those that passed; both are told.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from executor.environment import environment
from simulator.engine import play
from simulator.simulation import Pricing, fold_priced, pricing, simulate_with
from simulator.specs.cluster import BUILT_IN_CLUSTERS, DeviceKind
from simulator.specs.plan import Exchange, PartitionSpec, Plan
from simulator.specs.program import Phase, Program, TaskKind
from simulator.specs.trace import Trace, counted_ranks
from simulator.specs.units import GB, MIB
from simulator.workload import lower
from tests.bench.result import Better, Figure, print_figures, write_figures
from tests.made import (
    DEVICE_NAME,
    graph_of,
    made_calibration,
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
MOST_SECONDS = 10.0
BARS = {16: MOST_SECONDS, 256: 20.0}
GOAL_SECONDS = 2.0  # of 1,024 ranks
REPETITIONS = 10
TRIALS = 20
MOST_DIFFERENCE = 0.01
ALIKE_RATIO = 0.01
# Parts of a replica, and replicas.
DIFFERENT = ((64, 16), (1, 1024))


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
    """Return made costs of about the size of an H100's, on hosts of 8 with NVLink, PCIe, cards, rails and leaves."""
    hosts = BUILT_IN_CLUSTERS["h100x8-ndr"]
    # A name that no calibration and no table of devices knows.
    device = replace(hosts.device, name=DEVICE_NAME)
    cluster = replace(hosts, name="made up", num_hosts=-(-num_ranks // DEVICES_PER_HOST), device=device)
    assert cluster.devices_per_host == DEVICES_PER_HOST

    def compute_seconds(kind: TaskKind, phase: Phase, shape: tuple[int, ...]) -> float:
        return 5e-6 + 1e-12 * made_items(kind, shape) * (1 + (phase is Phase.BACKWARD))

    calibration = made_calibration(
        compute_seconds=compute_seconds,
        collective_seconds=lambda _, num_ranks, num_bytes: 20e-6 + num_bytes / (330 * GB),
        host_seconds=6e-6,
    )
    return pricing(cluster, calibration)


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long something took: in which the process had a core, and that passed."""

    core: float
    passed: float


def seconds_to_predict(num_parts: int, num_replicas: int, *, trials: int = 1) -> tuple[Seconds, int, int]:
    """Return what `timed` does, and the number of tasks and of different ranks, for replicas that are alike."""
    seconds, trace = timed(plan_of(num_parts, num_replicas), trials=trials)
    return seconds, len(trace.spans), len(counted_ranks(trace))


def timed(plan: Plan, *, trials: int = 1, alike_ratio: float = 0.0) -> tuple[Seconds, Trace]:
    """Return the seconds from a plan and a calibration to a trace, and the trace."""
    graph, costs = graph_of(plan.partition), costs_of(plan.num_ranks)
    began_core, began = time.process_time(), time.perf_counter()
    trace = simulate_with(costs, plan, graph, MODEL, trials=trials, alike_ratio=alike_ratio)
    return Seconds(time.process_time() - began_core, time.perf_counter() - began), trace


def different_plan(num_parts: int, num_replicas: int) -> Plan:
    """Return a plan of batches of some parts, none of which two replicas have."""
    plan = plan_of(num_parts * num_replicas, num_replicas)
    return replace(plan, graph_parallel_degree=num_parts, parts_per_batch=num_parts, exchange=exchanges(num_parts))


def exchanges(num_parts: int) -> tuple[Exchange, ...]:
    """Return the exchange of each layer."""
    return (Exchange.HALO if num_parts > 1 else Exchange.NONE,) * MODEL.num_layers


def figures_of_different_parts() -> list[Figure]:
    """Return how long a prediction takes whose ranks all differ, and with those taken for alike that differ little."""
    found = []
    for num_parts, num_replicas in DIFFERENT:
        plan, name = different_plan(num_parts, num_replicas), f"{num_replicas:,} x {num_parts} different parts"
        seconds, exact = timed(plan)
        found += [
            *_speed(name, [seconds], len(exact.spans), bar=MOST_SECONDS),
        ]
        if num_parts > 1:
            continue  # hardly two exchanges of many ranks are within a percent
        seconds, alike = timed(plan, alike_ratio=ALIKE_RATIO)
        found += [
            _told(f"{name}: the same with those within {ALIKE_RATIO:.0%} taken for alike", seconds.core, "s"),
            _told(f"{name}: ranks that then differ", len(counted_ranks(alike)), ""),
            Figure(
                name=f"{name}: by which the step then differs",
                value=abs(alike.median_step_seconds / exact.median_step_seconds - 1),
                unit="",
                bar=MOST_DIFFERENCE,
                better=Better.LOWER,
            ),
        ]
    return found


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
        _, num_tasks, num_classes = runs[0]
        name = f"{NUM_PARTS * num_replicas:,} ranks"
        goal = f" (goal {GOAL_SECONDS:g} s)" if num_replicas == min(BARS) else ""
        found += [
            *_speed(name, [run[0] for run in runs], num_tasks, bar=bar, note=goal),
            _told(f"{name}: tasks in a step", num_tasks, ""),
            _told(f"{name}: ranks that differ", num_classes, ""),
        ]
    seconds, _, _ = seconds_to_predict(NUM_PARTS, min(BARS), trials=TRIALS)
    found.append(_told(f"{NUM_PARTS * min(BARS):,} ranks: with an interval from {TRIALS} trials", seconds.core, "s"))
    of_step, of_tasks = difference_of_unfolded(16, 4)
    found += figures_of_different_parts()
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


def _speed(name: str, runs: Sequence[Seconds], num_tasks: int, *, bar: float, note: str = "") -> list[Figure]:
    """Return how long a prediction took at the median, and how many tasks a second that is."""
    core, passed = (statistics.median(values) for values in ([r.core for r in runs], [r.passed for r in runs]))
    found = [
        Figure(name=f"{name}: from plan to trace{note}", value=core, unit="s", bar=bar, better=Better.LOWER),
        _told(f"{name}: by the clock", passed, "s"),
        _told(f"{name}: tasks per second", num_tasks / core, "1/s", better=Better.HIGHER),
    ]
    if len(runs) > 1:
        found.append(_told(f"{name}: of {len(runs)} repetitions the slowest", max(run.core for run in runs), "s"))
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
