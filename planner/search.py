"""find_plan(): walk the space, simulate, keep the best."""

import logging
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from planner.balance import stages_by_cost
from planner.bounds import lower_bound_seconds
from planner.explain import Breakdown, breakdown, description, reason_lost
from planner.neighbourhoods import expected_batches
from planner.objective import epoch_seconds
from planner.order import beyond_cache_ratio_of_plan, choose_order
from planner.partition import partition_graph
from planner.shares import part_shares
from planner.space import candidates, keeping_all
from simulator.constraints import violations
from simulator.errors import NoFeasiblePlanError
from simulator.memory import RankMemory, largest_category, misfit, peak_memory, total_bytes
from simulator.readers.graphs import Graph
from simulator.readers.partitions import read_partition
from simulator.simulation import Pricing, pricing, simulate_with
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec
from simulator.specs.decision import PlanFile, Prediction, RankedPlan
from simulator.specs.document import content_sha256
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.order import NodeOrder, OrderSpec
from simulator.specs.plan import Exchange, PartitionSpec, Plan, SampledBatches, StepMode
from simulator.specs.search import SearchSpec
from simulator.specs.shares import PartShares
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from simulator.timeout import longest_collective_seconds
from simulator.workload import lower

logger = logging.getLogger(__name__)
# Steps of an epoch that are simulated to tell its length; cluster batches differ from step to step.
_STEPS_LOOKED_AT = 8
# Trials that give the interval of the chosen plan.
_TRIALS = 40
# Runners-up that are told about.
_RANKED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Priced:
    """A legal candidate that fits, with its simulated steps."""

    plan: Plan
    step_seconds: tuple[float, ...]
    epoch_seconds: float
    breakdown: Breakdown
    memory: tuple[RankMemory, ...]


def find_plan(
    spec: GraphSpec,
    graph: Graph,
    model: ModelSpec,
    cluster: ClusterSpec,
    train: TrainSpec,
    search: SearchSpec,
    calibration: Calibration,
    *,
    folder: Path,
    on_progress: Callable[[str], None] = logger.info,
) -> PlanFile:
    """Return the plan with the shortest predicted epoch, what it was compared with, and why the others lost.

    Args:
        graph: arrays of `spec`, to be cut into parts.
        calibration: of the cluster's device.
        folder: where the plan file will lie; partition files are written into it.
        on_progress: told what is being done.

    Raises:
        NoFeasiblePlanError: if no candidate is legal and fits into memory.
        CalibrationError: if the calibration cannot price the candidates.
    """
    cuts: dict[int, PartitionSpec] = {}

    def cut(num_parts: int) -> PartitionSpec:
        if num_parts not in cuts:
            if num_parts > 1:
                on_progress(f"cutting the graph into {num_parts} parts")
            spans_hosts = cluster.devices_per_host < num_parts <= cluster.num_devices
            counts_hosts = spans_hosts and Exchange.HIERARCHICAL_HALO in search.exchanges
            ranks_per_host = cluster.devices_per_host if counts_hosts else None
            cuts[num_parts] = partition_graph(
                graph, num_parts, seed=search.seed, folder=folder, ranks_per_host=ranks_per_host
            )
        return cuts[num_parts]

    neighbourhoods: dict[int, SampledBatches] = {}

    def sampled(batches_per_step: int) -> SampledBatches:
        if batches_per_step not in neighbourhoods:
            neighbourhoods[batches_per_step] = expected_batches(
                graph,
                search.fan_outs,
                seeds_per_batch=search.seeds_per_batch,
                data_parallel_degree=batches_per_step,
                seed=search.seed,
            )
        return neighbourhoods[batches_per_step]

    def shared(spec_of_cut: PartitionSpec, part_ranks: tuple[int, ...]) -> PartShares:
        part_N = read_partition(spec_of_cut, folder=folder, num_nodes=graph.num_nodes)
        return part_shares(graph, part_N, part_ranks)

    cache_ratios: dict[tuple[int, bool, Dtype, int, OrderSpec], float] = {}

    def with_cache_ratio(plan: Plan) -> Plan:
        if cluster.device.cache_bytes == 0 or plan.sampled is not None:
            return plan  # nobody knows
        parts, heads_on = plan.partition.num_parts, plan.tensor_parallel_degree
        key = (parts, plan.is_full_graph, plan.precision, heads_on, plan.order)
        if key not in cache_ratios:
            cache_ratios[key] = beyond_cache_ratio_of_plan(graph, plan, model, cluster.device, folder=folder)
        return replace(plan, beyond_cache_ratio=cache_ratios[key])

    costs = pricing(cluster, calibration)
    stages: dict[tuple[object, ...], tuple[int, ...]] = {}

    def balance(plan: Plan, num_stages: int) -> tuple[int, ...]:
        # What does not change what a layer costs against others, of plans with one cut: how gradients are reduced.
        key = (
            (num_stages, plan.partition.num_parts, plan.parts_per_batch, plan.between_edges, plan.sampled),
            (plan.data_parallel_degree, plan.graph_parallel_degree, plan.tensor_parallel_degree),
            (plan.exchange, plan.exchange_payload, plan.exchange_precision, plan.overlap_exchange),
            (plan.recompute, plan.precision),
        )
        if key not in stages:
            stages[key] = stages_by_cost(costs, plan, spec, model, num_stages)
        return stages[key]

    rejected: Counter[str] = Counter()
    misfits: list[tuple[int, str]] = []
    plans = map(
        with_cache_ratio, candidates(spec, model, cluster, search, cut, sampled, shared=shared, balance=balance)
    )
    priced = list(_price_all(costs, spec, model, train, plans, rejected, misfits, on_progress))
    if not priced:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in rejected.most_common(3))
        nearest = f"; the nearest to fitting: {min(misfits)[1]}" if misfits else ""
        raise NoFeasiblePlanError(f"no plan is legal and fits on {cluster.name}: {reasons}{nearest}")
    # Equal predictions go to the plan on fewer ranks, which came first.
    priced.sort(key=lambda found: found.epoch_seconds)
    best, others = priced[0], priced[1:]
    if best.plan.sampled is not None:  # what samples gather is not known beforehand
        is_natural = NodeOrder.NATURAL in search.orders
        search = replace(search, orders=(NodeOrder.NATURAL,) if is_natural else search.orders[:1])
    order, orders = choose_order(
        graph, best.plan, model, cluster.device, search, folder=folder, on_progress=on_progress
    )
    chosen = best
    if order != best.plan.order:
        ordered = with_cache_ratio(replace(best.plan, order=order))
        chosen = _simulated(costs, ordered, spec, model, train, best.memory)
    return PlanFile(
        graph=spec,
        model=model,
        cluster=cluster,
        train=train,
        plan=chosen.plan,
        prediction=_prediction(costs, spec, model, train, chosen),
        ranking=tuple(_ranked(best, other) for other in others[:_RANKED]),
        rejected=tuple(rejected.most_common()),
        calibration_sha256=content_sha256(calibration),
        orders=orders,
    )


def _price_all(
    costs: Pricing,
    spec: GraphSpec,
    model: ModelSpec,
    train: TrainSpec,
    plans: Iterable[Plan],
    rejected: Counter[str],
    misfits: list[tuple[int, str]],
    on_progress: Callable[[str], None],
) -> Iterator[_Priced]:
    """Yield the candidates that could win, and count the others by reason."""
    best_seconds = float("inf")
    fitting: set[Plan] = set()  # those that keep all on the device
    for plan in plans:
        if keeping_all(plan) in fitting:
            continue
        if found := violations(plan, spec, model, costs.cluster):
            rejected.update(found[:1])
            continue
        steps = range(min(plan.steps_per_epoch, _STEPS_LOOKED_AT))
        memory = peak_memory(plan, spec, model, costs.cluster, steps=steps, seed=train.seed)
        if reason := misfit(memory, costs.cluster):
            rejected[f"does not fit into a device's memory, most of which {largest_category(memory)} would take"] += 1
            misfits.append((max(map(total_bytes, memory)), reason))
            continue
        fitting.add(replace(plan, step_mode=StepMode.EAGER))
        programs = [lower(plan, spec, model, costs.cluster, step=step, seed=train.seed) for step in steps]
        bound = epoch_seconds(plan, [lower_bound_seconds(costs, program) for program in programs])
        if bound > 2 * best_seconds:
            rejected["cannot come within twice the best epoch: its busiest rank alone computes longer"] += 1
            continue
        on_progress(f"simulating {description(plan)}")
        priced = _simulated(costs, plan, spec, model, train, memory)
        best_seconds = min(best_seconds, priced.epoch_seconds)
        yield priced


def _simulated(
    costs: Pricing, plan: Plan, spec: GraphSpec, model: ModelSpec, train: TrainSpec, memory: tuple[RankMemory, ...]
) -> _Priced:
    """Return a plan with its steps simulated."""
    steps = range(min(plan.steps_per_epoch, _STEPS_LOOKED_AT))
    traces = [simulate_with(costs, plan, spec, model, step=step, seed=train.seed) for step in steps]
    seconds = tuple(trace.median_step_seconds for trace in traces)
    return _Priced(
        plan=plan,
        step_seconds=seconds,
        epoch_seconds=epoch_seconds(plan, seconds),
        breakdown=breakdown(plan, traces[0]),
        memory=memory,
    )


def _prediction(costs: Pricing, spec: GraphSpec, model: ModelSpec, train: TrainSpec, best: _Priced) -> Prediction:
    trace = simulate_with(costs, best.plan, spec, model, seed=train.seed, trials=_TRIALS)
    # The trials are of the first step; an epoch's other steps are longer or shorter by their medians.
    scale = statistics.mean(best.step_seconds) / best.step_seconds[0]
    p10, p50, p90 = (scale * trace.step_seconds_quantile(ratio) for ratio in (0.1, 0.5, 0.9))
    return Prediction(
        p10_step_seconds=p10,
        p50_step_seconds=p50,
        p90_step_seconds=p90,
        epoch_seconds=best.epoch_seconds,
        peak_memory_bytes=best.memory,
        longest_collective_seconds=longest_collective_seconds(
            costs.collectives, best.plan, spec, model, costs.cluster, seed=train.seed
        ),
    )


def _ranked(best: _Priced, other: _Priced) -> RankedPlan:
    return RankedPlan(
        description=description(other.plan),
        p50_step_seconds=statistics.mean(other.step_seconds),
        epoch_seconds=other.epoch_seconds,
        peak_memory_bytes=max(total_bytes(memory) for memory in other.memory),
        reason=reason_lost(best.breakdown, other.breakdown),
    )
