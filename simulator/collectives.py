"""Flows and seconds of one collective on a group.

With a calibration, a collective's time inside one host is what was measured for its kind and number of ranks,
interpolated in log space over bytes; without one it is a latency and the bytes that cross the busiest port, by the
formulas of ring algorithms. Across hosts, the bytes that leave each host come on top. Either way the bytes are flows,
so collectives that run at once share ports.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from simulator.specs.calibration import Calibration, CollectiveSample
from simulator.specs.cluster import ClusterSpec
from simulator.specs.cost import CollectiveCost, Flow, Port
from simulator.specs.program import Task, TaskKind

DEVICE_OUT, DEVICE_IN, HOST_OUT, HOST_IN = "device_out", "device_in", "host_out", "host_in"


def port_capacities(cluster: ClusterSpec) -> dict[Port, float]:
    """Return the rate of each port: every device's to its host, every host's network cards taken together."""
    device_rate = cluster.device_link.bandwidth_bytes_per_second
    host_rate = cluster.host_link.bandwidth_bytes_per_second * cluster.devices_per_host
    ports: dict[Port, float] = {}
    for device in range(cluster.num_devices):
        ports[DEVICE_OUT, device] = ports[DEVICE_IN, device] = device_rate
    for host in range(cluster.num_hosts):
        ports[HOST_OUT, host] = ports[HOST_IN, host] = host_rate
    return ports


class CollectiveCosts:
    """Prices collectives of a cluster.

    Args:
        calibration: measured curves; None for formulas alone.
    """

    def __init__(self, cluster: ClusterSpec, calibration: Calibration | None) -> None:
        self._cluster = cluster
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
        """Return one flow a device, in and out together, that alone takes `seconds`, and one a host."""
        rate = self._cluster.device_link.bandwidth_bytes_per_second
        flows = [
            Flow(num_bytes=seconds * rate, ports=((DEVICE_OUT, rank), (DEVICE_IN, rank)), max_bytes_per_second=rate)
            for rank in tasks[0].group
            if seconds > 0
        ]
        return (*flows, *self._host_flows(tasks)) if spans_hosts else tuple(flows)

    def _host_flows(self, tasks: tuple[Task, ...]) -> list[Flow]:
        """Return the bytes that leave and enter each host; rings cross a host's boundary once for all its ranks."""
        group = tasks[0].group
        host_rate = self._cluster.host_link.bandwidth_bytes_per_second * self._cluster.devices_per_host
        flows = []
        host_of_member = np.array([self._cluster.host_of(rank) for rank in group])
        hosts, number, num_members = np.unique(host_of_member, return_inverse=True, return_counts=True)
        all_sent = _bytes_leaving(tasks, number)
        for host, count, sent in zip(hosts.tolist(), num_members.tolist(), all_sent, strict=True):
            if sent > 0:
                ports = ((HOST_OUT, host), (HOST_IN, host))
                # A rank reaches only its own network card's rate.
                rate = min(host_rate, self._cluster.host_link.bandwidth_bytes_per_second * count)
                flows.append(Flow(num_bytes=sent, ports=ports, max_bytes_per_second=rate))
        return flows


def _priced_bytes(tasks: Sequence[Task]) -> float:
    """Return the bytes that a collective's time follows: of an all-to-all, the busiest rank's, sent or received."""
    if tasks[0].kind is not TaskKind.ALL_TO_ALL:
        return float(max(task.num_bytes for task in tasks))
    sent = _traffic(tuple(task.shape for task in tasks))
    return float(max(sent.sum(axis=0).max(), sent.sum(axis=1).max()))


@lru_cache(maxsize=256)  # replicas have equal ones
def _traffic(shapes: tuple[tuple[int, ...], ...]) -> NDArray[np.int64]:
    """Return the bytes of an all-to-all, a row for each sender and a column for each receiver."""
    return np.array(shapes, dtype=np.int64)


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


def _bytes_leaving(tasks: Sequence[Task], host_of_member: NDArray[np.intp]) -> list[float]:
    """Return the bytes that go from the ranks of each host of a group to the others, the larger of out and in.

    Args:
        host_of_member: number of each rank's host, from 0.
    """
    kind, num_hosts = tasks[0].kind, int(host_of_member.max()) + 1
    if kind is TaskKind.ALL_TO_ALL:
        between = np.zeros((num_hosts, num_hosts), dtype=np.int64)
        np.add.at(between, (host_of_member[:, None], host_of_member[None, :]), _traffic(tuple(t.shape for t in tasks)))
        np.fill_diagonal(between, 0)
        return [float(sent) for sent in np.maximum(between.sum(axis=0), between.sum(axis=1))]
    # One ring through all ranks enters and leaves each host once a channel: what a single rank's port carries.
    return [max(task.num_bytes for task in tasks) * _wire_ratio(kind, len(tasks))] * num_hosts


def _interpolate(curve: Sequence[CollectiveSample], num_bytes: float) -> float:
    """Return seconds, piecewise linear in log bytes and log seconds; beyond the last point time follows bytes."""
    sizes = [max(sample.num_bytes, 1) for sample in curve]  # none has no logarithm
    seconds = np.maximum.accumulate([sample.seconds for sample in curve])  # more bytes never take less time
    if num_bytes <= sizes[0]:
        return float(seconds[0])
    if num_bytes >= sizes[-1]:
        return float(seconds[-1] * num_bytes / sizes[-1])
    return math.exp(float(np.interp(math.log(num_bytes), np.log(sizes), np.log(seconds))))
