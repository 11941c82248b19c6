"""Flows and seconds of one collective or message on a group of ranks.

How long it takes alone, `collective_time.py` says, by the rates that its bytes reach: those of the nominal ports
(`nominal.py`) less what slow links, other topologies and over-subscription take of them, told by its flows over the
ports of the cluster as it is (`fabric.py`). The flows then last just that long, and share ports with others' that run
at once.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulator.collective_time import CollectiveTimes, Estimate
from simulator.curves import Curve, wire_ratio
from simulator.fabric import Traffic, fabric_of
from simulator.group_flows import GroupFlows
from simulator.group_shape import GroupShape
from simulator.meetings import find_meetings
from simulator.nccl_price import pairwise_card_ratio
from simulator.nominal import NominalFabric, reach
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec
from simulator.specs.cost import CollectiveCost, Flow, Port
from simulator.specs.program import MESSAGES, Program, Task, TaskKind


def port_capacities(cluster: ClusterSpec) -> Mapping[Port, float]:
    """Return the rate of each port of a cluster, in bytes per second."""
    return fabric_of(cluster).capacities


class CollectiveCosts:
    """Prices collectives of a cluster.

    Args:
        calibration: measured curves; None for published constants and formulas alone.
    """

    def __init__(self, cluster: ClusterSpec, calibration: Calibration | None) -> None:
        self._cluster = cluster
        self._fabric = fabric_of(cluster)
        self._nominal = NominalFabric(cluster)
        self._times = CollectiveTimes(self._nominal, calibration)
        self._price = lru_cache(maxsize=64)(self._priced)  # layers have equal ones
        self._message = lru_cache(maxsize=4096)(self._priced_message)  # as have micro-batches

    def price(self, tasks: tuple[Task, ...]) -> CollectiveCost:
        """Return what a collective costs once all have arrived.

        Args:
            tasks: of the group's ranks, in the group's order; all the same but for their bytes.
        """
        kind, group = tasks[0].kind, tasks[0].group
        if len(group) == 1:
            return CollectiveCost(host_seconds=0.0, latency_seconds=0.0, flows=())
        if kind in MESSAGES:
            return self.message(tasks[0].num_bytes, source=group[0], target=group[1])
        if kind is TaskKind.ALL_TO_ALL:
            return self._price(kind, group, 0, tuple(task.shape for task in tasks))
        return self._price(kind, group, max(task.num_bytes for task in tasks), ())

    def _priced(
        self, kind: TaskKind, group: tuple[int, ...], num_bytes: int, pairs: tuple[tuple[int, ...], ...]
    ) -> CollectiveCost:
        """Return what `price` does, for the bytes of each rank or of each pair."""
        shape, traffic = self._nominal.shape(group), _traffic(kind, group, num_bytes, pairs)
        flows = GroupFlows(self._fabric, self._nominal.wire_seconds(traffic), traffic, spans_hosts=shape.spans_hosts)
        left = reach(flows.nominal, flows.actual)
        found = self._times.estimate(kind, shape, _busiest_bytes(pairs) if pairs else float(num_bytes), left)
        latency = found.latency_seconds
        if shape.spans_hosts and not found.is_whole:
            latency = max(latency, self._cluster.host_link.latency_seconds)
        return CollectiveCost(
            host_seconds=found.host_seconds,
            latency_seconds=latency,
            flows=_lasting(flows, found, shape),
            extrapolated=found.extrapolated,
        )

    def message(self, num_bytes: int, *, source: int, target: int) -> CollectiveCost:
        """Return what a send and its receive cost once both have been called."""
        return self._message(num_bytes, source, target)

    def _priced_message(self, num_bytes: int, source: int, target: int) -> CollectiveCost:
        group = (source, target)
        shape = self._nominal.shape(group)
        traffic = Traffic(group=group, pair_bytes=np.array([[0.0, num_bytes], [0.0, 0.0]]))
        flows = GroupFlows(self._fabric, self._nominal.wire_seconds(traffic), traffic, spans_hosts=shape.spans_hosts)
        link = self._cluster.host_link if shape.spans_hosts else self._cluster.device_link
        found = Estimate(
            host_seconds=0.0,
            latency_seconds=link.latency_seconds,
            moving_seconds=flows.actual.longest,
            log_spread=0.0,
        )
        if self._times.has_nccl:
            found = self._times.message(shape, float(num_bytes), reach(flows.nominal, flows.actual))
            found = replace(found, moving_seconds=max(flows.actual.of_cards, found.moving_seconds))
        return CollectiveCost(
            host_seconds=found.host_seconds,
            latency_seconds=found.latency_seconds,
            flows=_lasting(flows, found, shape),
            extrapolated=found.extrapolated,
        )

    def log_spread(self, task: Task) -> float:
        """Return the half-width of the cost's deciles, as a logarithm; 0 where links are taken at their word."""
        if len(task.group) == 1:
            return 0.0
        if task.kind in MESSAGES:
            shape = self._nominal.shape(task.group)
            return self._times.message(shape, float(task.num_bytes)).log_spread if self._times.has_nccl else 0.0
        return self._times.estimate(task.kind, self._nominal.shape(task.group), float(task.num_bytes)).log_spread

    def extrapolated(self, tasks: tuple[Task, ...]) -> tuple[str, ...]:
        """Return what of a collective's price lies beyond measurements."""
        return self.price(tasks).extrapolated

    def curve(self, kind: TaskKind, num_ranks: int) -> Curve:
        """Return samples of one host by bytes, of so many ranks or of the nearest number; empty without any."""
        return self._times.curves.inside_host(kind, num_ranks)


def _lasting(flows: GroupFlows, found: Estimate, shape: GroupShape) -> tuple[Flow, ...]:
    """Return flows that last as estimated; an all-to-all at least what its cards need."""
    moving = found.moving_seconds
    if flows.is_pairs and shape.spans_hosts and found.is_whole:
        of_cards = max(flows.nominal.of_cards, flows.actual.of_cards)
        moving = max(moving, of_cards / pairwise_card_ratio(shape.num_hosts))
    return flows.lasting(moving, with_cards=found.is_whole)


def _traffic(kind: TaskKind, group: tuple[int, ...], num_bytes: int, pairs: tuple[tuple[int, ...], ...]) -> Traffic:
    """Return what the ranks of a collective send."""
    if kind is TaskKind.ALL_TO_ALL:
        return Traffic(group=group, pair_bytes=_pair_bytes(pairs))
    return Traffic(group=group, ring_bytes=num_bytes * wire_ratio(kind, len(group)))


def _busiest_bytes(pairs: tuple[tuple[int, ...], ...]) -> float:
    """Return the bytes that an all-to-all's time follows: the busiest rank's, sent or received."""
    sent = _pair_bytes(pairs)
    return float(max(sent.sum(axis=0).max(), sent.sum(axis=1).max()))


@lru_cache(maxsize=256)  # replicas have equal ones
def _pair_bytes(shapes: tuple[tuple[int, ...], ...]) -> NDArray[np.float64]:
    """Return the bytes of an all-to-all, a row for each sender and a column for each receiver."""
    return np.array(shapes, dtype=np.float64)


def extrapolations(costs: CollectiveCosts, program: Program) -> tuple[str, ...]:
    """Return which collectives of a program were priced beyond measurements, a sentence for each kind and group."""
    shared = program.shared
    found: dict[str, None] = {}
    for meeting in find_meetings(shared):
        for text in costs.extrapolated(meeting.tasks(shared)):
            found[f"{meeting.kind} on {len(meeting.ranks)} ranks: {text}"] = None
    return tuple(found)
