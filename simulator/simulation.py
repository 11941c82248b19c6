"""simulate(): check, lower, price, run."""

import gc
import math
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from simulator.aggregation import aggregated
from simulator.collectives import CollectiveCosts, port_capacities
from simulator.constraints import violations
from simulator.costs import ComputeCosts
from simulator.engine import Played, play
from simulator.errors import CalibrationError, PlanError
from simulator.folding import FoldedProgram, fold
from simulator.memory import allocated_bytes, peak_memory, total_bytes
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec, DeviceKind, host_bytes_per_second
from simulator.specs.cost import CollectiveCost, TaskCost
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Plan, StepMode
from simulator.specs.program import Phase, Program, Task, TaskKind
from simulator.specs.trace import Span, Trace, TraceOrigin
from simulator.workload import lower

# Deciles of a normal distribution lie this many deviations from its median.
_DECILE_DEVIATIONS = 1.2816
_NORMAL = statistics.NormalDist()
# Steps of a chain on a GPU, whose host runs ahead: the last one's period is that of a long run.
_STEPS_IN_A_CHAIN = 3
_PROGRESS_SECONDS = 2.0  # between two words on how far trials are
# Of one operation in a CUDA graph: 0.95 us on an H200 (../shared/DESIGN.md section 7).
_REPLAYED_LAUNCH_SECONDS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Pricing:
    """A cluster's costs, ready to price programs.

    Args:
        calibration: of the cluster's device.
    """

    cluster: ClusterSpec
    calibration: Calibration
    collectives: CollectiveCosts
    computes: dict[int, ComputeCosts]

    def of(self, busy_devices: int) -> ComputeCosts:
        """Return compute costs while so many devices of a host are busy."""
        if busy_devices not in self.computes:
            self.computes[busy_devices] = ComputeCosts(
                self.calibration,
                busy_devices=busy_devices,
                host_bytes_per_second=host_bytes_per_second(self.cluster),
            )
        return self.computes[busy_devices]


def pricing(cluster: ClusterSpec, calibration: Calibration) -> Pricing:
    """Return the costs of a cluster.

    Raises:
        CalibrationError: if the calibration is of another device.
    """
    if calibration.device_name != cluster.device.name:
        raise CalibrationError(
            f'the calibration is of "{calibration.device_name}", but the cluster\'s device.name is '
            f'"{cluster.device.name}": calibrate on that device'
        )
    return Pricing(
        cluster=cluster, calibration=calibration, collectives=CollectiveCosts(cluster, calibration), computes={}
    )


def simulate(
    plan: Plan,
    graph: GraphSpec,
    model: ModelSpec,
    cluster: ClusterSpec,
    calibration: Calibration,
    *,
    step: int = 0,
    seed: int = 0,
    trials: int = 1,
    alike_ratio: float = 0.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Trace:
    """Return what a training step would do, and when.

    Args:
        calibration: of the cluster's device.
        step: which step; cluster batches differ.
        seed: `TrainSpec.seed`, and of the trials.
        trials: how many steps to draw; the first has every cost at its median and gives the spans, the others draw
            each cost from its spread, which gives the interval of `step_seconds`. The cluster's jitter is drawn in all.
        alike_ratio: replicas whose counts of rows and edges differ by no more than this share are taken for alike.
        on_progress: told every few seconds how many trials are done, and about when all will be.

    Raises:
        PlanError: if the plan cannot run on the cluster.
        CalibrationError: if the calibration is of another device or lacks a task's kind.
    """
    if found := violations(plan, graph, model, cluster):
        raise PlanError("; ".join(found))
    return simulate_with(
        *(pricing(cluster, calibration), plan, graph, model),
        step=step,
        seed=seed,
        trials=trials,
        alike_ratio=alike_ratio,
        on_progress=on_progress,
    )


def simulate_with(
    costs: Pricing,
    plan: Plan,
    graph: GraphSpec,
    model: ModelSpec,
    *,
    step: int = 0,
    seed: int = 0,
    trials: int = 1,
    alike_ratio: float = 0.0,
    on_progress: Callable[[str], None] = lambda _: None,
) -> Trace:
    """Return what `simulate` does for a plan that is known to be legal, with costs prepared once for many plans."""
    with _collector_paused():
        program = lower(plan, graph, model, costs.cluster, step=step, seed=seed, alike_ratio=alike_ratio)
        spans, durations = _trials(costs, plan, program, seed=seed, trials=trials, on_progress=on_progress)
        return Trace(
            origin=TraceOrigin.SIMULATED,
            num_ranks=plan.num_ranks,
            spans=spans,
            step_seconds=durations,
            traced_step_seconds=durations[:1],
            peak_memory_bytes=_measurable_bytes(plan, graph, model, costs.cluster, seed=seed),
            environment=costs.calibration.environment,
        )


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Leave garbage to reference counts: tasks and spans form no cycles, but the collector would walk all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _trials(
    costs: Pricing, plan: Plan, program: Program, *, seed: int, trials: int, on_progress: Callable[[str], None]
) -> tuple[Sequence[Span], tuple[float, ...]]:
    """Return the spans of a step with costs at their medians, and the seconds of that one and of the others drawn."""
    began = told = time.monotonic()
    folded = fold_priced(costs, plan, program, seed=seed)
    num_steps = _STEPS_IN_A_CHAIN if costs.cluster.device.kind is DeviceKind.CUDA else 1
    spans, seconds = _last_step(play(folded, num_steps=num_steps), num_steps)
    durations = [seconds]
    generator = np.random.default_rng(seed)
    for trial in range(1, trials):
        if (now := time.monotonic()) - told > _PROGRESS_SECONDS:
            left_seconds = (now - began) / trial * (trials - trial)
            on_progress(f"trial {trial} of {trials} done, about {left_seconds:.0f} s left")
            told = now
        if costs.cluster.jitter > 0:
            folded = fold_priced(costs, plan, program, seed=seed, trial=trial)
        draws = _Draws(costs, plan, generator)
        durations.append(_period_seconds(play(folded, num_steps=num_steps, factor=draws.factor), num_steps))
    return spans, tuple(durations)


def _measurable_bytes(
    plan: Plan, graph: GraphSpec, model: ModelSpec, cluster: ClusterSpec, *, seed: int
) -> tuple[int, ...]:
    """Return each rank's peak as a run measures it: by torch's allocator on GPUs, by the process on CPUs."""
    peak = total_bytes if cluster.device.kind is DeviceKind.CPU else allocated_bytes
    return tuple(peak(memory) for memory in peak_memory(plan, graph, model, cluster, seed=seed))


def fold_priced(costs: Pricing, plan: Plan, program: Program, *, seed: int = 0, trial: int = 0) -> FoldedProgram:
    """Return a plan's step with its median costs, folded: equal tasks cost the same on ranks that are equally slow.

    Args:
        seed, trial: draw the cluster's jitter, with which every rank has costs of its own.
    """
    cluster = costs.cluster
    computes = costs.of(min(plan.num_ranks, cluster.devices_per_host))
    overhead_seconds = costs.calibration.task_overhead_seconds
    is_replayed = plan.step_mode is StepMode.CUDA_GRAPH
    slowdowns = tuple(cluster.slowdown(rank) for rank in range(plan.num_ranks))

    def compute_cost(rank: int, task: Task) -> TaskCost:
        cost = computes.price(task)
        delay = slowdowns[rank] * _jitter(cluster, seed, trial, rank, task.name)
        host_seconds = _REPLAYED_LAUNCH_SECONDS if is_replayed else cost.host_seconds + overhead_seconds
        return replace(cost, host_seconds=host_seconds, device_seconds=cost.device_seconds * delay)

    def collective_cost(tasks: tuple[Task, ...]) -> CollectiveCost:
        cost = costs.collectives.price(tasks)
        cost = replace(cost, host_seconds=cost.host_seconds + overhead_seconds, flows=aggregated(cost.flows))
        if cluster.jitter == 0:
            return cost
        delay = _jitter(cluster, seed, trial, tasks[0].group, tasks[0].name)
        flows = tuple(replace(flow, num_bytes=flow.num_bytes * delay) for flow in cost.flows)
        return replace(cost, latency_seconds=cost.latency_seconds * delay, flows=flows)

    return fold(
        program,
        compute_cost=compute_cost,
        collective_cost=collective_cost,
        port_capacities=port_capacities(cluster),
        kind_of_rank=None if cluster.jitter > 0 else slowdowns,
    )


def _jitter(cluster: ClusterSpec, *key: object) -> float:
    """Return the factor by which a cluster's jitter lengthens one task; the same key draws the same."""
    if cluster.jitter == 0:
        return 1.0
    share = (zlib.crc32("/".join(map(str, key)).encode()) + 0.5) / 2**32
    return math.exp(cluster.jitter * abs(_NORMAL.inv_cdf(share)))


class _Draws:
    """Costs of one trial: a factor for each kind and phase, since what makes one task slow makes its likes slow."""

    def __init__(self, costs: Pricing, plan: Plan, generator: np.random.Generator) -> None:
        self._computes = costs.of(min(plan.num_ranks, costs.cluster.devices_per_host))
        self._collectives, self._generator = costs.collectives, generator
        self._deviations: dict[tuple[TaskKind, Phase], float] = {}

    def factor(self, task: Task) -> float:
        """Return the factor of a task's cost."""
        key = (task.kind, task.phase)
        if key not in self._deviations:
            self._deviations[key] = self._generator.standard_normal()
        spread_of = self._collectives if task.kind.is_collective else self._computes
        return math.exp(self._deviations[key] * spread_of.log_spread(task) / _DECILE_DEVIATIONS)


def _last_step(played: Played, num_steps: int) -> tuple[Sequence[Span], float]:
    """Return the spans of the last of some steps, and the time from the end of the step before to its end."""
    last = num_steps - 1
    origin_seconds = played.start_seconds(last) if last else 0.0
    return played.spans(last, origin_seconds=origin_seconds), _period_seconds(played, num_steps)


def _period_seconds(played: Played, num_steps: int) -> float:
    before = played.end_seconds(num_steps - 2) if num_steps > 1 else 0.0
    return played.end_seconds(num_steps - 1) - before
