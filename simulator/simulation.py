"""simulate(): check, lower, price, run."""

import math
import statistics
import zlib
from dataclasses import dataclass, field, replace

import numpy as np

from simulator.collectives import CollectiveCosts, port_capacities
from simulator.constraints import violations
from simulator.costs import ComputeCosts
from simulator.engine import run_program, step_seconds
from simulator.errors import CalibrationError, PlanError
from simulator.memory import allocated_bytes, peak_memory, total_bytes
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec, DeviceKind
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
            self.computes[busy_devices] = ComputeCosts(self.calibration, busy_devices=busy_devices)
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
) -> Trace:
    """Return what a training step would do, and when.

    Args:
        calibration: of the cluster's device.
        step: which step; cluster batches differ.
        seed: `TrainSpec.seed`, and of the trials.
        trials: how many steps to draw; the first has every cost at its median and gives the spans, the others draw
            each cost from its spread, which gives the interval of `step_seconds`. The cluster's jitter is drawn in all.

    Raises:
        PlanError: if the plan cannot run on the cluster.
        CalibrationError: if the calibration is of another device or lacks a task's kind.
    """
    if found := violations(plan, graph, model, cluster):
        raise PlanError("; ".join(found))
    return simulate_with(pricing(cluster, calibration), plan, graph, model, step=step, seed=seed, trials=trials)


def simulate_with(
    costs: Pricing, plan: Plan, graph: GraphSpec, model: ModelSpec, *, step: int = 0, seed: int = 0, trials: int = 1
) -> Trace:
    """Return what `simulate` does for a plan that is known to be legal, with costs prepared once for many plans."""
    cluster = costs.cluster
    program = lower(plan, graph, model, cluster, step=step, seed=seed)
    generator = np.random.default_rng(seed)
    spans, seconds = _run(costs, plan, program, _Medians(), seed=seed)
    durations = [seconds]
    for trial in range(1, trials):
        draws = _Draws(generator=generator, trial=trial)
        durations.append(_run(costs, plan, program, draws, seed=seed)[1])
    return Trace(
        origin=TraceOrigin.SIMULATED,
        num_ranks=plan.num_ranks,
        spans=spans,
        step_seconds=tuple(durations),
        traced_step_seconds=(seconds,),
        peak_memory_bytes=_measurable_bytes(plan, graph, model, cluster, seed=seed),
        environment=costs.calibration.environment,
    )


def _measurable_bytes(
    plan: Plan, graph: GraphSpec, model: ModelSpec, cluster: ClusterSpec, *, seed: int
) -> tuple[int, ...]:
    """Return each rank's peak as a run measures it: by torch's allocator on GPUs, by the process on CPUs."""
    peak = total_bytes if cluster.device.kind is DeviceKind.CPU else allocated_bytes
    return tuple(peak(memory) for memory in peak_memory(plan, graph, model, cluster, seed=seed))


class _Medians:
    """Every cost at its median."""

    trial = 0

    def factor(self, task: Task, log_spread: float) -> float:
        """Return one."""
        del task, log_spread
        return 1.0


@dataclass(slots=True)
class _Draws:
    """Costs of one trial: a factor for each kind and phase, since what makes one task slow makes its likes slow."""

    generator: np.random.Generator
    trial: int
    deviations: dict[tuple[TaskKind, Phase], float] = field(default_factory=dict)

    def factor(self, task: Task, log_spread: float) -> float:
        """Return the factor of a task's cost."""
        key = (task.kind, task.phase)
        if key not in self.deviations:
            self.deviations[key] = self.generator.standard_normal()
        return math.exp(self.deviations[key] * log_spread / _DECILE_DEVIATIONS)


def _jitter(cluster: ClusterSpec, *key: object) -> float:
    """Return the factor by which a cluster's jitter lengthens one task; the same key draws the same."""
    if cluster.jitter == 0:
        return 1.0
    share = (zlib.crc32("/".join(map(str, key)).encode()) + 0.5) / 2**32
    return math.exp(cluster.jitter * abs(_NORMAL.inv_cdf(share)))


def _run(
    costs: Pricing, plan: Plan, program: Program, draws: _Medians | _Draws, *, seed: int
) -> tuple[tuple[Span, ...], float]:
    cluster = costs.cluster
    computes = costs.of(min(plan.num_ranks, cluster.devices_per_host))

    chain = _STEPS_IN_A_CHAIN if cluster.device.kind is DeviceKind.CUDA else 1
    overhead_seconds = costs.calibration.task_overhead_seconds
    is_replayed = plan.step_mode is StepMode.CUDA_GRAPH

    def compute_cost(rank: int, task: Task) -> TaskCost:
        cost = computes.price(task)
        delay = cluster.slowdown(rank) * _jitter(cluster, seed, draws.trial, rank, task.name)
        return TaskCost(
            host_seconds=_REPLAYED_LAUNCH_SECONDS if is_replayed else cost.host_seconds + overhead_seconds,
            device_seconds=cost.device_seconds * draws.factor(task, computes.log_spread(task)) * delay,
        )

    def collective_cost(tasks: tuple[Task, ...]) -> CollectiveCost:
        cost = costs.collectives.price(tasks)
        factor = draws.factor(tasks[0], costs.collectives.log_spread(tasks[0]))
        factor *= _jitter(cluster, seed, draws.trial, tasks[0].group, tasks[0].name)
        flows = tuple(replace(flow, num_bytes=flow.num_bytes * factor) for flow in cost.flows)
        return CollectiveCost(
            host_seconds=cost.host_seconds + overhead_seconds,
            latency_seconds=cost.latency_seconds * factor,
            flows=flows,
        )

    spans = run_program(
        _chained(program, chain),
        compute_cost=compute_cost,
        collective_cost=collective_cost,
        port_capacities=port_capacities(cluster),
    )
    return _last_step(spans, program, chain)


def _chained(program: Program, num_steps: int) -> Program:
    """Return a program that runs a step several times; names are told apart by a suffix."""
    if num_steps == 1:
        return program
    return Program(
        tasks=tuple(
            tuple(
                replace(
                    task,
                    name=f"{task.name}#{step}",
                    waits_for=tuple(index + step * len(tasks) for index in task.waits_for),
                )
                for step in range(num_steps)
                for task in tasks
            )
            for tasks in program.tasks
        )
    )


def _last_step(spans: tuple[Span, ...], program: Program, num_steps: int) -> tuple[tuple[Span, ...], float]:
    """Return the spans of the last step of a chain, and the time from the end of the step before to its end."""
    if num_steps == 1:
        return spans, step_seconds(spans)
    suffix = f"#{num_steps - 1}"
    before = max(span.end_seconds for span in spans if span.name.endswith(f"#{num_steps - 2}"))
    last = [span for span in spans if span.name.endswith(suffix)]
    origin = min(span.start_seconds for span in last)
    shifted = (
        replace(span, name=span.name.removesuffix(suffix), start_seconds=span.start_seconds - origin) for span in last
    )
    assert len(last) == sum(len(tasks) for tasks in program.tasks), len(last)
    return tuple(shifted), max(span.end_seconds for span in last) - before
