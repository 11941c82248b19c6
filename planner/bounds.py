"""What a candidate cannot beat."""

from simulator.simulation import Pricing
from simulator.specs.cost import CollectiveCost
from simulator.specs.program import Program, Stream, Task


def lower_bound_seconds(costs: Pricing, program: Program) -> float:
    """Return seconds that a step of a program needs at least: the busiest rank's own work.

    On each rank the compute tasks run one after another, and so do its collectives, which take at least their fixed
    time. Waiting for others, sharing of links and the order between the streams are left out.
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
        compute = sum(computes.price(task).device_seconds for task in tasks if not _is_beside(task))
        beside = sum(computes.price(task).device_seconds for task in tasks if task.stream is Stream.LOADER)
        fixed = sum(known[task.name, task.group].latency_seconds for task in tasks if task.kind.is_collective)
        busiest = max(busiest, compute, beside, fixed)
    return busiest


def _is_beside(task: Task) -> bool:
    """Return whether a task runs beside the device's compute tasks."""
    return task.kind.is_collective or (task.stream is Stream.LOADER and not task.blocks_host)
