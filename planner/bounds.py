"""What a candidate cannot beat."""

from collections import defaultdict

from simulator.simulation import Pricing
from simulator.specs.cost import CollectiveCost
from simulator.specs.program import Program, Stream, Task


def lower_bound_seconds(costs: Pricing, program: Program) -> float:
    """Return seconds that a step of a program needs at least: the busiest rank's own work.

    On each rank the tasks of a stream run one after another, collectives for at least their fixed time, and so do the
    compute tasks that the host waits for: on CPUs all of them, on GPUs at most the batch's, which is made while the
    device is at the step before. Waiting for others, sharing of links and the order between the streams are left out.
    """
    computes = costs.of(min(program.num_ranks, costs.cluster.devices_per_host))
    known: dict[tuple[str, tuple[int, ...]], CollectiveCost] = {}
    by_key: dict[tuple[str, tuple[int, ...]], list[Task]] = {}
    for tasks in program.tasks:
        for task in tasks:
            if task.kind.is_collective:
                by_key.setdefault((task.name, task.group), []).append(task)
    for key, tasks_of_group in by_key.items():
        known[key] = costs.collectives.price(tuple(tasks_of_group))
    busiest = 0.0
    for tasks in program.tasks:
        blocking_seconds = 0.0
        busy_seconds: dict[Stream, float] = defaultdict(float)
        for task in tasks:
            if task.kind.is_collective:
                busy_seconds[task.stream] += known[task.name, task.group].latency_seconds
            else:
                seconds = computes.price(task).device_seconds
                busy_seconds[task.stream] += seconds
                blocking_seconds += seconds * task.blocks_host
        busiest = max(busiest, blocking_seconds, *busy_seconds.values())
    return busiest
