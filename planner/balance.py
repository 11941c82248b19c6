"""How many layers each stage of a pipeline gets, so that the slowest stage is as fast as can be."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from simulator.simulation import Pricing
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import PipelineSchedule, Plan
from simulator.specs.program import BATCH_KINDS, Phase
from simulator.workload import lower


def balanced_stages(
    layers: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[int, ...]:
    """Return the layers of each stage, one at least, such that the most costly stage costs the least.

    Args:
        layers: cost of each layer, in order; as many as stages at least.
        first: cost of what the first stage has beside layers, the input projection.
        last: that of the last one, head and loss.
    """
    assert 1 <= num_stages <= len(layers), (num_stages, len(layers))
    costs = [*layers]
    costs[0] += first
    costs[-1] += last
    # Of the layers before each place, cut into so many stages: the cost of the most costly one, and where it begins.
    best = [(sum(costs[:end]), 0) for end in range(len(costs) + 1)]
    begins = []
    for stage in range(1, num_stages):
        found = [(float("inf"), 0)] * (stage + 1)
        for end in range(stage + 1, len(costs) + 1):
            found.append(min((max(best[cut][0], sum(costs[cut:end])), cut) for cut in range(stage, end)))
        begins.append([cut for _, cut in found])
        best = found
    ends = [len(costs)]
    for cuts in reversed(begins):
        ends.append(cuts[ends[-1]])
    bounds = [0, *reversed(ends)]
    return tuple(end - begin for begin, end in itertools.pairwise(bounds))


def stages_by_cost(costs: Pricing, plan: Plan, graph: GraphSpec, model: ModelSpec, num_stages: int) -> tuple[int, ...]:
    """Return balanced stages of a plan, by the seconds that its tasks take on one device without stages.

    Args:
        plan: without stages.
    """
    whole = replace(plan, pipeline_parallel_degree=1, stages=(), pipeline_schedule=PipelineSchedule.ONE_F_ONE_B)
    computes = costs.of(min(plan.num_ranks, costs.cluster.devices_per_host))
    seconds: dict[str, float] = defaultdict(float)
    for task in lower(whole, graph, model, costs.cluster).tasks[0]:
        if task.phase is not Phase.UPDATE and not task.kind.is_collective and task.kind not in BATCH_KINDS:
            name = task.name.partition(".")[2] if plan.num_micro_batches > 1 else task.name
            seconds[name.partition(".")[0]] += computes.price(task).device_seconds
    layers = [seconds[f"layer{index}"] for index in range(model.num_layers)]
    last = seconds["head"] + seconds["loss"]
    return balanced_stages(layers, num_stages, first=seconds["input"], last=last)
