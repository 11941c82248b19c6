"""Flows and seconds of one collective on a group.

With a calibration, a collective's time inside one host is what was measured for its kind and number of ranks,
interpolated in log space over bytes; without one it is a latency and the bytes that cross the busiest port, by the
formulas of ring algorithms. Across hosts, the bytes that leave each host come on top. Either way the bytes are flows,
so collectives that run at once share ports.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulator.fabric import Traffic, fabric_of
from simulator.specs.calibration import Calibration, CollectiveSample
from simulator.specs.cluster import ClusterSpec
from simulator.specs.cost import CollectiveCost, Flow, Port
from simulator.specs.program import Task, TaskKind


def port_capacities(cluster: ClusterSpec) -> Mapping[Port, float]:
    """Return the rate of each port of a cluster, in bytes per second."""
    return fabric_of(cluster).capacities


class CollectiveCosts:
    """Prices collectives of a cluster.

    Args:
        calibration: measured curves; None for formulas alone.
    """

    def __init__(self, cluster: ClusterSpec, calibration: Calibration | None) -> None:
        self._cluster = cluster
        self._fabric = fabric_of(cluster)
        self._curves: dict[tuple[TaskKind, int], list[CollectiveSample]] = defaultdict(list)
        for sample in calibration.collectives if calibration else ():
            self._curves[sample.kind, sample.num_ranks].append(sample)
        for curve in self._curves.values():
            curve.sort(key=lambda sample: sample.num_bytes)
        self._served: dict[tuple[TaskKind, int], list[CollectiveSample]] = {}

    def price(self, tasks: tuple[Task, ...]) -> CollectiveCost:
        """Return what a collective costs once all have arrived.

        Args:
            tasks: of the group's ranks, in the group's order; all the same but for their bytes.
        """
        group = tasks[0].group
        if len(group) == 1:
            return CollectiveCost(host_seconds=0.0, latency_seconds=0.0, flows=())
        spans_hosts = len({self._cluster.host_of(rank) for rank in group}) > 1
        # What it would take in one host is the least that it takes across hosts.
        host_seconds, latency, seconds = self._inside_host(tasks)
        if spans_hosts:
            latency = max(latency, self._cluster.host_link.latency_seconds)
        return CollectiveCost(
            host_seconds=host_seconds,
            latency_seconds=latency,
            flows=self._flows(tasks, seconds, spans_hosts=spans_hosts),
        )

    def log_spread(self, task: Task) -> float:
        """Return the half-width of the cost's deciles, as a logarithm; 0 where nothing was measured."""
        curve = self.curve(task.kind, len(task.group))
        if not curve:
            return 0.0
        return float(np.median([0.5 * math.log(sample.high_seconds / sample.low_seconds) for sample in curve]))

    def curve(self, kind: TaskKind, num_ranks: int) -> list[CollectiveSample]:
        """Return samples of a kind by bytes, measured on so many ranks or on the nearest number; empty without any.

        Samples of another number of ranks serve for the bytes that each rank's port carries.
        """
        if (kind, num_ranks) not in self._served:
            self._served[kind, num_ranks] = self._nearest_curve(kind, num_ranks)
        return self._served[kind, num_ranks]

    def _nearest_curve(self, kind: TaskKind, num_ranks: int) -> list[CollectiveSample]:
        measured = [ranks for (found, ranks) in self._curves if found is kind]
        if not measured:
            return []
        nearest = min(measured, key=lambda ranks: (abs(math.log(ranks / num_ranks)), ranks))
        factor = _wire_ratio(kind, nearest) / _wire_ratio(kind, num_ranks)
        return [
            replace(sample, num_ranks=num_ranks, num_bytes=round(sample.num_bytes * factor))
            for sample in self._curves[kind, nearest]
        ]

    def _inside_host(self, tasks: tuple[Task, ...]) -> tuple[float, float, float]:
        """Return seconds of issuing, of latency and of moving bytes, as if one host held all ranks."""
        kind, link = tasks[0].kind, self._cluster.device_link
        curve = self.curve(kind, len(tasks))
        num_bytes = _priced_bytes(tasks)
        if not curve:
            wire_bytes = num_bytes * _wire_ratio(kind, len(tasks))
            return 0.0, link.latency_seconds, wire_bytes / link.bandwidth_bytes_per_second
        seconds = _interpolate(curve, num_bytes)
        latency = min(curve[0].seconds, seconds)
        return float(np.median([sample.host_seconds for sample in curve])), latency, seconds - latency

    def _flows(self, tasks: tuple[Task, ...], seconds: float, *, spans_hosts: bool) -> tuple[Flow, ...]:
        """Return flows that alone take `seconds` or, where links between the devices or hosts need longer, as long."""
        traffic = _traffic(tasks)
        flows = [*self._fabric.device_flows(traffic.group, seconds), *self._fabric.link_flows(traffic)]
        return (*flows, *self._host_flows(traffic)) if spans_hosts else tuple(flows)

    def _host_flows(self, traffic: Traffic) -> list[Flow]:
        """Return the bytes that leave and enter each host."""
        return self._fabric.host_flows(traffic)


def _traffic(tasks: Sequence[Task]) -> Traffic:
    """Return what the ranks of a collective send."""
    kind, group = tasks[0].kind, tasks[0].group
    if kind is TaskKind.ALL_TO_ALL:
        return Traffic(group=group, pair_bytes=_pair_bytes(tuple(task.shape for task in tasks)))
    return Traffic(group=group, ring_bytes=max(task.num_bytes for task in tasks) * _wire_ratio(kind, len(tasks)))


def _priced_bytes(tasks: Sequence[Task]) -> float:
    """Return the bytes that a collective's time follows: of an all-to-all, the busiest rank's, sent or received."""
    if tasks[0].kind is not TaskKind.ALL_TO_ALL:
        return float(max(task.num_bytes for task in tasks))
    sent = _pair_bytes(tuple(task.shape for task in tasks))
    return float(max(sent.sum(axis=0).max(), sent.sum(axis=1).max()))


@lru_cache(maxsize=256)  # replicas have equal ones
def _pair_bytes(shapes: tuple[tuple[int, ...], ...]) -> NDArray[np.float64]:
    """Return the bytes of an all-to-all, a row for each sender and a column for each receiver."""
    return np.array(shapes, dtype=np.float64)


def _wire_ratio(kind: TaskKind, num_ranks: int) -> float:
    """Return the bytes through a rank's port over the bytes that it gives to the call.

    Source: bus bandwidth factors of NVIDIA's nccl-tests (doc/PERFORMANCE.md), for ring algorithms.
    """
    p = num_ranks
    match kind:
        case TaskKind.ALL_REDUCE:
            return 2 * (p - 1) / p
        case TaskKind.ALL_GATHER:
            return p - 1.0
        case TaskKind.REDUCE_SCATTER:
            return (p - 1) / p
        case _:
            return 1.0  # an all-to-all's bytes are counted without a rank's own share


def _interpolate(curve: Sequence[CollectiveSample], num_bytes: float) -> float:
    """Return seconds, piecewise linear in log bytes and log seconds; beyond the last point time follows bytes."""
    sizes = [max(sample.num_bytes, 1) for sample in curve]  # none has no logarithm
    seconds = np.maximum.accumulate([sample.seconds for sample in curve])  # more bytes never take less time
    if num_bytes <= sizes[0]:
        return float(seconds[0])
    if num_bytes >= sizes[-1]:
        return float(seconds[-1] * num_bytes / sizes[-1])
    return math.exp(float(np.interp(math.log(num_bytes), np.log(sizes), np.log(seconds))))
