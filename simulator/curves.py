"""Measured curves of collectives: seconds over bytes, interpolated by logarithms, for each kind and group shape."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from simulator.group_shape import GroupShape
from simulator.specs.calibration import Calibration, CollectiveSample
from simulator.specs.cluster import ClusterSpec
from simulator.specs.communication import Operation
from simulator.specs.program import TaskKind

Curve = list[CollectiveSample]


class Curves:
    """The collectives of a calibration that a cluster takes by the algorithm that it asks for."""

    def __init__(self, calibration: Calibration | None, cluster: ClusterSpec) -> None:
        self._curves: dict[tuple[TaskKind, int, int], Curve] = defaultdict(list)
        for sample in calibration.collectives if calibration else ():
            if (sample.algorithm, sample.protocol) == (cluster.nccl_algorithm, cluster.nccl_protocol):
                self._curves[sample.kind, sample.num_ranks, sample.num_hosts].append(sample)
        for curve in self._curves.values():
            curve.sort(key=lambda sample: sample.num_bytes)
        self._served: dict[tuple[TaskKind, int], Curve] = {}

    def exact(self, kind: TaskKind, shape: GroupShape) -> Curve:
        """Return samples of a kind and a shape by bytes; empty without any."""
        return self._curves.get((kind, shape.num_ranks, shape.num_hosts), [])

    def nearest(self, kind: TaskKind, shape: GroupShape) -> tuple[Curve, GroupShape] | None:
        """Return the samples of the likest shape: first of as many hosts, then of as many ranks; None without any.

        Inside one host only samples of one host serve, and across hosts only those of several.
        """
        shapes = [
            (num_ranks, num_hosts)
            for found, num_ranks, num_hosts in self._curves
            if found is kind and (num_hosts > 1) == shape.spans_hosts
        ]
        if not shapes:
            return None
        ranks, hosts = min(
            shapes,
            key=lambda at: (abs(math.log(at[1] / shape.num_hosts)), abs(math.log(at[0] / shape.num_ranks)), at),
        )
        ranks_per_host = -(-ranks // hosts)
        cards = 0 if hosts == 1 else ranks_per_host
        found = GroupShape(num_ranks=ranks, num_hosts=hosts, ranks_per_host=ranks_per_host, cards_per_host=cards)
        return self._curves[kind, ranks, hosts], found

    def inside_host(self, kind: TaskKind, num_ranks: int) -> Curve:
        """Return samples of one host by bytes, of so many ranks or the nearest number; empty without any.

        Samples of another number of ranks serve for the bytes that each rank's port carries.
        """
        if (kind, num_ranks) not in self._served:
            self._served[kind, num_ranks] = self._nearest_inside(kind, num_ranks)
        return self._served[kind, num_ranks]

    def _nearest_inside(self, kind: TaskKind, num_ranks: int) -> Curve:
        measured = [ranks for (found, ranks, hosts) in self._curves if found is kind and hosts == 1]
        if not measured:
            return []
        nearest = min(measured, key=lambda ranks: (abs(math.log(ranks / num_ranks)), ranks))
        factor = wire_ratio(kind, nearest) / wire_ratio(kind, num_ranks)
        return [
            replace(sample, num_ranks=num_ranks, num_bytes=round(sample.num_bytes * factor))
            for sample in self._curves[kind, nearest, 1]
        ]

    def has_inside(self, kind: TaskKind, num_ranks: int) -> bool:
        """Return whether so many ranks of one host were measured themselves."""
        return (kind, num_ranks, 1) in self._curves


def wire_ratio(kind: TaskKind, num_ranks: int) -> float:
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


def full_bytes(kind: TaskKind, num_ranks: int, given_bytes: float) -> float:
    """Return the bytes of the full buffer, as nccl-tests counts, of a collective to which each rank gives so many."""
    match kind:
        case TaskKind.ALL_GATHER:
            return given_bytes * num_ranks
        case TaskKind.ALL_TO_ALL:
            return given_bytes * num_ranks / (num_ranks - 1)
        case _:
            return given_bytes


def given_bytes(operation: Operation, num_ranks: int, num_bytes: float) -> float:
    """Return what each rank gives to a collective of a full buffer: the inverse of `full_bytes`."""
    match operation:
        case Operation.ALL_GATHER:
            return num_bytes / num_ranks
        case Operation.ALL_TO_ALL:
            return num_bytes * (num_ranks - 1) / num_ranks
        case _:
            return num_bytes


def interpolate(curve: Sequence[CollectiveSample], num_bytes: float) -> float:
    """Return seconds, piecewise linear in log bytes and log seconds; beyond the last point time follows bytes."""
    sizes = [max(sample.num_bytes, 1) for sample in curve]  # none has no logarithm
    seconds = np.maximum.accumulate([sample.seconds for sample in curve])  # more bytes never take less time
    if num_bytes <= sizes[0]:
        return float(seconds[0])
    if num_bytes >= sizes[-1]:
        return float(seconds[-1] * num_bytes / sizes[-1])
    return math.exp(float(np.interp(math.log(num_bytes), np.log(sizes), np.log(seconds))))


def spread_of(curve: Sequence[CollectiveSample]) -> float:
    """Return the half-width of a curve's deciles, as a logarithm, the median over its sizes."""
    return float(np.median([0.5 * math.log(sample.high_seconds / sample.low_seconds) for sample in curve]))


def spread_at(curve: Sequence[CollectiveSample], num_bytes: float) -> float:
    """Return the half-width of the deciles at a size: of the sizes around it the larger, which an unstable size has."""
    sizes = [sample.num_bytes for sample in curve]
    after = int(np.searchsorted(sizes, num_bytes))
    near = curve[max(after - 1, 0) : after + 1]
    return max(0.5 * math.log(sample.high_seconds / sample.low_seconds) for sample in near)
