"""How long ranks wait for one that gets no further before they give a run up."""

import numpy as np

from simulator.collectives import CollectiveCosts
from simulator.exchanges import rank_columns
from simulator.meetings import find_meetings
from simulator.specs.cluster import ClusterSpec
from simulator.specs.decision import PlanFile
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Plan
from simulator.specs.program import Phase, Task, TaskKind
from simulator.workload import lower

# The demo beside other jobs took twice its prediction (README.md); ten times that is no longer a slow machine.
_PATIENCE = 20.0
# What no cost prices: kernels and dense parts are compiled in the first step, in tens of seconds that ranks need not
# spend together, and batches of large graphs are read and laid out. Five minutes is what runs have had so far.
LEAST_TIMEOUT_SECONDS = 300.0


def collective_timeout_seconds(file: PlanFile) -> float:
    """Return how long the ranks of a plan wait for one that gets no further.

    A rank comes to a collective later than others by a step's work at most; in an evaluation, which passes over the
    whole graph as an epoch does and has a collective in each layer, by a layer's. Then the bytes take their time.
    """
    if file.train.collective_timeout_seconds > 0:
        return file.train.collective_timeout_seconds
    found = file.prediction
    transfer_seconds = found.longest_collective_seconds
    if transfer_seconds is None:
        costs = CollectiveCosts(file.cluster, calibration=None)
        transfer_seconds = longest_collective_seconds(costs, file.plan, file.graph, file.model, file.cluster)
    late_seconds = max(found.p90_step_seconds, found.epoch_seconds / file.model.num_layers)
    return max(LEAST_TIMEOUT_SECONDS, _PATIENCE * (late_seconds + transfer_seconds))


def longest_collective_seconds(
    costs: CollectiveCosts, plan: Plan, graph: GraphSpec, model: ModelSpec, cluster: ClusterSpec, *, seed: int = 0
) -> float:
    """Return the seconds of the longest collective of the first step and of an evaluation, alone on the network.

    Args:
        costs: by measured curves, or by the links that the cluster states.
        seed: `TrainSpec.seed`, which orders cluster batches.
    """
    if plan.num_ranks == 1:
        return 0.0
    shared = lower(plan, graph, model, cluster, seed=seed).shared
    found = [meeting.tasks(shared) for meeting in find_meetings(shared)]
    if not plan.is_full_graph and plan.num_row_ranks > 1:
        found.append(_evaluation_exchange(plan, model))
    return max(_seconds_alone(costs, tasks) for tasks in found)


def _seconds_alone(costs: CollectiveCosts, tasks: tuple[Task, ...]) -> float:
    cost = costs.price(tasks)
    moving = max((flow.num_bytes / flow.max_bytes_per_second for flow in cost.flows), default=0.0)
    return cost.host_seconds + cost.latency_seconds + moving


def _evaluation_exchange(plan: Plan, model: ModelSpec) -> tuple[Task, ...]:
    """Return the exchange of a layer when all parts are dealt out to all ranks; rows that parts share count twice.

    Where several ranks hold the same rows, it is that of the first ones.
    """
    num_ranks, num_parts, group = plan.num_row_ranks, plan.partition.num_parts, plan.gradient_group(0)
    rank_of_part = np.arange(num_parts) % num_ranks
    rows = np.array([part.halo_rows_from for part in plan.partition.parts])  # [target part, source part]
    sent = np.zeros((num_ranks, num_ranks), np.int64)
    np.add.at(sent, (rank_of_part[None, :], rank_of_part[:, None]), rows)
    np.fill_diagonal(sent, 0)
    row_bytes = 2 * rank_columns(plan, model) * plan.precision.num_bytes
    return tuple(
        Task(
            name="exchange",
            kind=TaskKind.ALL_TO_ALL,
            phase=Phase.FORWARD,
            shape=tuple((row_bytes * sent[rank]).tolist()),
            dtype=plan.precision,
            group=group,
        )
        for rank in range(num_ranks)
    )
