"""What a recorded collective would cost on another network, or with another number of ranks.

Its recorded cost, without waiting, is scaled by the ratio of what `simulator/collectives.py` says of both networks.
"""

import math
from dataclasses import replace
from functools import cache

from simulator.collectives import CollectiveCosts, port_capacities
from simulator.replay.ranks import PAIRWISE
from simulator.specs.cluster import ClusterSpec
from simulator.specs.program import Phase, Stream, Task, TaskKind
from simulator.specs.recording import Message
from simulator.specs.units import GB, Dtype

_KINDS = {
    "all_reduce": TaskKind.ALL_REDUCE,
    "all_gather": TaskKind.ALL_GATHER,
    "reduce_scatter": TaskKind.REDUCE_SCATTER,
    "all_to_all": TaskKind.ALL_TO_ALL,
}


@cache
def message_seconds(message: Message, cluster: ClusterSpec, num_ranks: int) -> float:
    """Return the seconds of a collective alone on a cluster, enlarged by hosts until it holds all ranks.

    What has no formula of its own (a broadcast) moves its bytes through one port. A message of unknown size is priced
    as a gigabyte, by which rates alone count.
    """
    num_bytes = message.num_bytes if message.num_bytes is not None else GB
    group = message.group if len(message.group) == num_ranks else tuple(range(num_ranks))
    num_hosts = max(cluster.num_hosts, math.ceil((max(group) + 1) / cluster.devices_per_host))
    enlarged = replace(cluster, num_hosts=num_hosts)
    costs = CollectiveCosts(enlarged, None)
    if message.operation in PAIRWISE and num_ranks == 2:
        cost = costs.message(num_bytes, source=group[0], target=group[1])
    else:
        cost = costs.price(_tasks(message.operation, num_bytes, group))
    capacities = port_capacities(enlarged)
    moving = [
        flow.num_bytes / min([flow.max_bytes_per_second, *(capacities[port] for port in flow.ports)])
        for flow in cost.flows
    ]
    return cost.latency_seconds + max(moving, default=0.0)


def _tasks(operation: str, num_bytes: int, group: tuple[int, ...]) -> tuple[Task, ...]:
    """Return a collective to which each rank gives so many bytes."""
    kind, num_ranks = _KINDS.get(operation, TaskKind.ALL_TO_ALL), len(group)
    shape: tuple[int, ...] = (num_bytes,)
    tasks = []
    for place in range(num_ranks):
        if kind is TaskKind.ALL_TO_ALL:
            others = max(num_ranks - 1, 1)
            shape = tuple(0 if other == place else math.ceil(num_bytes / others) for other in range(num_ranks))
        tasks.append(
            Task(
                name="message",
                kind=kind,
                phase=Phase.FORWARD,
                shape=shape,
                dtype=Dtype.FLOAT32,
                stream=Stream.COMMUNICATION,
                group=group,
            )
        )
    return tuple(tasks)


def rescaled_seconds(
    message: Message,
    cost_seconds: float,
    *,
    old: ClusterSpec,
    new: ClusterSpec,
    num_ranks: int | None,
) -> float:
    """Return what a recorded collective would cost on another cluster.

    Args:
        cost_seconds: as recorded, without waiting.
        num_ranks: of its group after the change; None for as many as recorded.
    """
    recorded_ranks = message.num_ranks or 2
    ranks = num_ranks if num_ranks is not None else recorded_ranks
    before = message_seconds(message, old, recorded_ranks)
    after = message_seconds(message, new, ranks)
    if ranks == 1:
        return 0.0
    return after if recorded_ranks == 1 else cost_seconds * after / before
