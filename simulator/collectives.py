"""Flows and seconds of one collective on a group.

Measured curves come first: of the calibration, for the kind, the number of ranks and of hosts, interpolated in log
space over bytes. Where they do not reach, on GPUs the constants that come with the project tell (`nccl_price.py`), in
the ratio of what they say of both shapes where a likely curve was measured; on CPUs (gloo) it is a latency and the
bytes that cross the busiest port, by the formulas of ring algorithms. What lies beyond measurements is marked, and its
interval is wider. Either way the bytes are flows, so collectives that run at once share ports.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from simulator.curves import Curve, Curves, full_bytes, interpolate, spread_at, wire_ratio
from simulator.group_shape import GroupShape, group_shape
from simulator.nccl_price import SPREAD_PER_DOUBLING, pairwise_card_ratio, published_price
from simulator.specs.calibration import Calibration, CollectiveSample
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.communication import Operation
from simulator.specs.cost import CollectiveCost, Flow, Port
from simulator.specs.program import Program, Task, TaskKind

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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Estimate:
    """What a collective takes alone.

    Attributes:
        is_whole: whether the network between hosts is part of it; else its flows come on top.
    """

    host_seconds: float
    latency_seconds: float
    moving_seconds: float
    log_spread: float
    is_whole: bool
    extrapolated: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Latency and moving bytes."""
        return self.latency_seconds + self.moving_seconds


class CollectiveCosts:
    """Prices collectives of a cluster.

    Args:
        calibration: measured curves; None for published constants and formulas alone.
    """

    def __init__(self, cluster: ClusterSpec, calibration: Calibration | None) -> None:
        self._cluster = cluster
        self._curves = Curves(calibration, cluster)
        self._has_nccl = cluster.device.kind is DeviceKind.CUDA
        self._measured_host_seconds = _median_host_seconds(calibration)

    def price(self, tasks: tuple[Task, ...]) -> CollectiveCost:
        """Return what a collective costs once all have arrived.

        Args:
            tasks: of the group's ranks, in the group's order; all the same but for their bytes.
        """
        group = tasks[0].group
        if len(group) == 1:
            return CollectiveCost(host_seconds=0.0, latency_seconds=0.0, flows=())
        shape = group_shape(group, self._cluster)
        found = self._estimate(tasks[0].kind, shape, _priced_bytes(tasks))
        latency, moving = found.latency_seconds, found.moving_seconds
        if found.is_whole and tasks[0].kind is TaskKind.ALL_TO_ALL and shape.spans_hosts:
            moving = max(moving, self._uneven_seconds(tasks, shape))
        if shape.spans_hosts and not found.is_whole:
            latency = max(latency, self._cluster.host_link.latency_seconds)
        flows = self._flows(tasks, moving, spans_hosts=shape.spans_hosts)
        if found.is_whole and moving > 0:
            flows = tuple(_lasting(flow, moving) for flow in flows)
        return CollectiveCost(
            host_seconds=found.host_seconds, latency_seconds=latency, flows=flows, extrapolated=found.extrapolated
        )

    def message(self, num_bytes: int, *, source: int, target: int) -> CollectiveCost:
        """Return what a send and its receive cost once both have been called."""
        shape = group_shape((source, target), self._cluster)
        link = self._cluster.host_link if shape.spans_hosts else self._cluster.device_link
        latency, moving = link.latency_seconds, num_bytes / link.bandwidth_bytes_per_second
        extrapolated: tuple[str, ...] = ()
        if self._has_nccl:
            price = published_price(Operation.SEND_RECEIVE, shape, num_bytes, self._cluster)
            latency, extrapolated = price.latency_seconds, price.extrapolated
            moving = max(moving if shape.spans_hosts else 0.0, price.seconds - latency)
        ports: tuple[Port, ...] = ((DEVICE_OUT, source), (DEVICE_IN, target))
        if shape.spans_hosts:
            ports += ((HOST_OUT, self._cluster.host_of(source)), (HOST_IN, self._cluster.host_of(target)))
        flow = Flow(num_bytes=float(num_bytes), ports=ports, max_bytes_per_second=link.bandwidth_bytes_per_second)
        flows = (_lasting(flow, moving),) if num_bytes else ()
        return CollectiveCost(host_seconds=0.0, latency_seconds=latency, flows=flows, extrapolated=extrapolated)

    def log_spread(self, task: Task) -> float:
        """Return the half-width of the cost's deciles, as a logarithm; 0 where links are taken at their word."""
        if len(task.group) == 1:
            return 0.0
        return self._estimate(task.kind, group_shape(task.group, self._cluster), float(task.num_bytes)).log_spread

    def curve(self, kind: TaskKind, num_ranks: int) -> Curve:
        """Return samples of one host by bytes, of so many ranks or of the nearest number; empty without any."""
        return self._curves.inside_host(kind, num_ranks)

    def _estimate(self, kind: TaskKind, shape: GroupShape, given_bytes: float) -> _Estimate:
        """Return what a collective takes: measured if it was, else by what was measured of others."""
        if exact := self._curves.exact(kind, shape):
            return _on_curve(exact, given_bytes)
        if self._has_nccl:
            return self._nccl_estimate(kind, shape, given_bytes)
        inside = self._inside_host(kind, shape, given_bytes)
        if not shape.spans_hosts:
            return inside
        # What it would take in one host is the least that it takes across hosts.
        beyond = SPREAD_PER_DOUBLING * math.log2(shape.num_hosts) if inside.log_spread else 0.0
        missing = (f"{shape.num_hosts} hosts, measured inside one",)
        return replace(
            inside,
            log_spread=inside.log_spread + beyond,
            is_whole=False,
            extrapolated=(*inside.extrapolated, *missing) if inside.log_spread else (),
        )

    def _nccl_estimate(self, kind: TaskKind, shape: GroupShape, given_bytes: float) -> _Estimate:
        """Return what the constants say, in the ratio to a curve of a like shape where one was measured."""
        operation, size = Operation(kind.value), full_bytes(kind, shape.num_ranks, given_bytes)
        if (found := self._curves.nearest(kind, shape)) is None:
            # What of an all-to-all crosses hosts, its sizes tell (`_uneven_seconds`).
            price = published_price(
                operation, shape, size, self._cluster, has_cards=operation is not Operation.ALL_TO_ALL
            )
            return _Estimate(
                host_seconds=self._measured_host_seconds,
                latency_seconds=price.latency_seconds,
                moving_seconds=price.seconds - price.latency_seconds,
                log_spread=price.log_spread,
                is_whole=True,
                extrapolated=price.extrapolated,
            )
        curve, like = found
        at = _on_curve(curve, _given_bytes(kind, like.num_ranks, size))
        price = published_price(operation, shape, size, self._cluster)
        then = published_price(operation, like, size, self._cluster)
        doublings = abs(math.log2(shape.num_hosts / like.num_hosts)) + abs(
            math.log2(shape.ranks_per_host / like.ranks_per_host)
        )
        # A likely curve says how these machines differ from the published ones, in both parts alike.
        seconds, latency = at.seconds * price.seconds / then.seconds, at.latency_seconds
        latency = min(latency * price.latency_seconds / then.latency_seconds, seconds)
        return replace(
            at,
            latency_seconds=latency,
            moving_seconds=seconds - latency,
            log_spread=at.log_spread + SPREAD_PER_DOUBLING * doublings,
            extrapolated=(*at.extrapolated, f"{shape}, measured on {like}"),
        )

    def _inside_host(self, kind: TaskKind, shape: GroupShape, given_bytes: float) -> _Estimate:
        """Return what it takes as if one host held all ranks: by curves of other numbers of ranks, or the link."""
        curve, link = self._curves.inside_host(kind, shape.num_ranks), self._cluster.device_link
        if not curve:
            moving = given_bytes * wire_ratio(kind, shape.num_ranks) / link.bandwidth_bytes_per_second
            return _Estimate(
                host_seconds=0.0,
                latency_seconds=link.latency_seconds,
                moving_seconds=moving,
                log_spread=0.0,
                is_whole=True,
            )
        at = _on_curve(curve, given_bytes)
        if self._curves.has_inside(kind, shape.num_ranks):
            return at
        return replace(at, extrapolated=(*at.extrapolated, f"{shape.num_ranks} ranks, which were not measured"))

    def _uneven_seconds(self, tasks: tuple[Task, ...], shape: GroupShape) -> float:
        """Return what an all-to-all's bytes between hosts take: of the busiest host, and of the busiest card."""
        hosts = np.array([self._cluster.host_of(rank) for rank in tasks[0].group])
        crossing = np.array([task.shape for task in tasks], float) * (hosts[:, None] != hosts[None, :])
        card_rate = self._cluster.host_link.bandwidth_bytes_per_second * pairwise_card_ratio(shape.num_hosts)
        of_ranks = np.maximum(crossing.sum(0), crossing.sum(1))
        return float(of_ranks.max() / card_rate)

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
        for host in sorted({self._cluster.host_of(rank) for rank in group}):
            members = [index for index, rank in enumerate(group) if self._cluster.host_of(rank) == host]
            sent = _bytes_leaving(tasks, members)
            if sent > 0:
                ports = ((HOST_OUT, host), (HOST_IN, host))
                # A rank reaches only its own network card's rate.
                rate = min(host_rate, self._cluster.host_link.bandwidth_bytes_per_second * len(members))
                flows.append(Flow(num_bytes=sent, ports=ports, max_bytes_per_second=rate))
        return flows


def _priced_bytes(tasks: Sequence[Task]) -> float:
    """Return the bytes that a collective's time follows: of an all-to-all, the busiest rank's, sent or received."""
    if tasks[0].kind is not TaskKind.ALL_TO_ALL:
        return float(max(task.num_bytes for task in tasks))
    sent = [task.num_bytes for task in tasks]
    received = [sum(task.shape[index] for task in tasks) for index in range(len(tasks))]
    return float(max(*sent, *received))


def _bytes_leaving(tasks: Sequence[Task], members: Sequence[int]) -> float:
    """Return the bytes that go from some ranks of a group to the others, the larger of out and in."""
    kind = tasks[0].kind
    if kind is TaskKind.ALL_TO_ALL:
        others = [index for index in range(len(tasks)) if index not in set(members)]
        out = sum(tasks[member].shape[other] for member in members for other in others)
        back = sum(tasks[other].shape[member] for member in members for other in others)
        return float(max(out, back))
    if len(members) == len(tasks):
        return 0.0
    # One ring through all ranks enters and leaves each host once a channel: what a single rank's port carries.
    return max(task.num_bytes for task in tasks) * wire_ratio(kind, len(tasks))


def _on_curve(curve: Sequence[CollectiveSample], given_bytes: float) -> _Estimate:
    """Return what was measured; beyond the least and the largest size it is extrapolated."""
    seconds = interpolate(curve, given_bytes)
    latency = min(curve[0].seconds, seconds)
    largest = max(curve[-1].num_bytes, 1)
    doublings = max(0.0, math.log2(max(given_bytes, 1) / largest))
    return _Estimate(
        host_seconds=float(np.median([sample.host_seconds for sample in curve])),
        latency_seconds=latency,
        moving_seconds=seconds - latency,
        log_spread=spread_at(curve, given_bytes) + SPREAD_PER_DOUBLING * doublings,
        is_whole=True,
        extrapolated=(f"{given_bytes:,.0f} bytes, measured up to {largest:,}",) if given_bytes > largest else (),
    )


def _lasting(flow: Flow, seconds: float) -> Flow:
    """Return a flow that alone takes so long.

    One that would take longer carries less than a ring's bytes: trees of two hosts send each byte once.
    """
    if seconds <= 0 or flow.num_bytes <= 0:
        return flow
    if flow.num_bytes > flow.max_bytes_per_second * seconds:
        return replace(flow, num_bytes=flow.max_bytes_per_second * seconds)
    return replace(flow, max_bytes_per_second=flow.num_bytes / seconds)


def _given_bytes(kind: TaskKind, num_ranks: int, size: float) -> float:
    """Return what each rank gives to a collective whose full buffer has a size."""
    return size / full_bytes(kind, num_ranks, 1.0)


def _median_host_seconds(calibration: Calibration | None) -> float:
    """Return for how long a host thread issues a collective, where any was measured."""
    samples = calibration.collectives if calibration else ()
    return float(np.median([sample.host_seconds for sample in samples])) if samples else 0.0


def extrapolations(costs: CollectiveCosts, program: Program) -> tuple[str, ...]:
    """Return which collectives of a program were priced beyond measurements, a sentence for each kind and group."""
    by_call: dict[tuple[str, tuple[int, ...]], list[Task]] = {}
    for tasks in program.tasks:
        for task in tasks:
            if task.kind.is_collective:
                by_call.setdefault((task.name, task.group), []).append(task)
    found: dict[str, None] = {}
    for calls in by_call.values():
        for text in costs.price(tuple(calls)).extrapolated:
            found[f"{calls[0].kind} on {len(calls)} ranks: {text}"] = None
    return tuple(found)
