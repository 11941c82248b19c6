"""What a candidate cannot beat."""

from collections import defaultdict

from simulator.meetings import find_meetings
from simulator.simulation import Pricing
from simulator.specs.program import Program, Stream


def lower_bound_seconds(costs: Pricing, program: Program) -> float:
    """Return seconds that a step of a program needs at least: the busiest rank's own work.

    On each rank the tasks of a stream run one after another, collectives for at least their fixed time, and so do the
    compute tasks that the host waits for: on CPUs all of them, on GPUs at most the batch's, which is made while the
    device is at the step before. Waiting for others, sharing of links and the order between the streams are left out.
    """
    computes = costs.of(min(program.num_ranks, costs.cluster.devices_per_host))
    shared = program.shared
    known: dict[tuple[str, tuple[int, ...]], float] = {}
    # The first rank of each list stands for those with equal tasks: a bound by some ranks is a bound.
    first_ranks = {number: rank for rank, number in reversed(list(enumerate(shared.list_of_rank)))}
    for meeting in find_meetings(shared):
        if not set(first_ranks.values()).isdisjoint(meeting.ranks):
            known[meeting.name, meeting.ranks] = costs.collectives.price(meeting.tasks(shared)).latency_seconds
    busiest = 0.0
    for tasks in (shared[rank] for rank in first_ranks.values()):
        blocking_seconds = 0.0
        busy_seconds: dict[Stream, float] = defaultdict(float)
        for task in tasks:
            if task.kind.is_collective:
                busy_seconds[task.stream] += known[task.name, task.group]
            else:
                seconds = computes.price(task).device_seconds
                busy_seconds[task.stream] += seconds
                blocking_seconds += seconds * task.blocks_host
        busiest = max(busiest, blocking_seconds, *busy_seconds.values())
    return busiest
