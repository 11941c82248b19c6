"""Seconds of one collective alone, by its kind, its group's shape, its bytes and what is left of the links' rates.

Measured curves come first: of the calibration, for the kind, the number of ranks and of hosts, interpolated in log
space over bytes. Where they do not reach, on GPUs the constants that come with the project tell (`nccl_price.py`), in
the ratio of what they say of both shapes where a likely curve was measured; on CPUs (gloo) it is a latency and the
bytes that cross the busiest port, by the formulas of ring algorithms. What lies beyond measurements is marked, and its
interval is wider.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from simulator.curves import Curves, full_bytes, interpolate, spread_at, wire_ratio
from simulator.group_shape import GroupShape
from simulator.nccl_price import SPREAD_PER_DOUBLING, Price, published_price
from simulator.nominal import FULL_REACH, NominalFabric, Reach, reach
from simulator.specs.calibration import Calibration, CollectiveSample
from simulator.specs.cluster import DeviceKind
from simulator.specs.communication import Operation
from simulator.specs.program import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What a collective takes alone.

    Attributes:
        log_spread: half-width of the deciles, as a logarithm.
        is_whole: whether the network between hosts is part of it; else its bytes there come on top.
        extrapolated: what lies beyond the measurements, such as "16 hosts, measured up to 8".
    """

    host_seconds: float
    latency_seconds: float
    moving_seconds: float
    log_spread: float
    is_whole: bool = True
    extrapolated: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """Latency and moving bytes."""
        return self.latency_seconds + self.moving_seconds


class CollectiveTimes:
    """Estimates collectives.

    Args:
        nominal: ports of the cluster.
        calibration: measured curves; None for published constants and formulas alone.
    """

    def __init__(self, nominal: NominalFabric, calibration: Calibration | None) -> None:
        self._nominal, self._cluster = nominal, nominal.cluster
        self.curves = Curves(calibration, self._cluster)
        self.has_nccl = self._cluster.device.kind is DeviceKind.CUDA
        samples = calibration.collectives if calibration else ()
        self._host_seconds = float(np.median([sample.host_seconds for sample in samples])) if samples else 0.0
        self.estimate = lru_cache(maxsize=65536)(self._estimate)
        self.message = lru_cache(maxsize=4096)(self._message)

    def _estimate(self, kind: TaskKind, shape: GroupShape, given_bytes: float, left: Reach = FULL_REACH) -> Estimate:
        """Return what a collective takes: measured if it was, else by what was measured of others.

        Args:
            given_bytes: that each rank gives; of an all-to-all those of the busiest rank.
            left: of the nominal rates of links and cards.
        """
        if self.has_nccl:
            return self._nccl_estimate(kind, shape, given_bytes, left)
        if exact := self.curves.exact(kind, shape):
            return self._slowed(_on_curve(exact, given_bytes), kind, (shape.num_ranks, shape.num_hosts), left)
        inside = self._inside_host(kind, shape, given_bytes, left)
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

    def _message(self, shape: GroupShape, num_bytes: float, left: Reach = FULL_REACH) -> Estimate:
        """Return what a send and its receive take by the constants of NCCL; no microbenchmark measures them."""
        price = published_price(Operation.SEND_RECEIVE, shape, num_bytes, self._cluster, reach=left)
        return self._published(price)

    def _published(self, price: Price) -> Estimate:
        return Estimate(
            host_seconds=self._host_seconds,
            latency_seconds=price.latency_seconds,
            moving_seconds=price.seconds - price.latency_seconds,
            log_spread=price.log_spread,
            extrapolated=price.extrapolated,
        )

    def _nccl_estimate(self, kind: TaskKind, shape: GroupShape, given_bytes: float, left: Reach) -> Estimate:
        """Return what the constants say, in the ratio to a curve of this or a like shape where one was measured."""
        operation, size = Operation(kind.value), full_bytes(kind, shape.num_ranks, given_bytes)
        if (found := self.curves.nearest(kind, shape)) is None:
            # What of an all-to-all crosses hosts, its sizes tell (`collectives.py`).
            has_cards = operation is not Operation.ALL_TO_ALL
            return self._published(
                published_price(operation, shape, size, self._cluster, has_cards=has_cards, reach=left)
            )
        curve, like = found
        at = _on_curve(curve, size / full_bytes(kind, like.num_ranks, 1.0))
        known = reach(*self._nominal.topology_seconds(like.num_ranks, like.num_hosts, _is_pairs(kind)))
        is_exact = (like.num_ranks, like.num_hosts) == (shape.num_ranks, shape.num_hosts)
        if is_exact and known == left:
            return at
        price = published_price(operation, shape, size, self._cluster, reach=left)
        then = published_price(operation, shape if is_exact else like, size, self._cluster, reach=known)
        # A likely curve says how these machines differ from the published ones, in both parts alike.
        seconds, latency = at.seconds * price.seconds / then.seconds, at.latency_seconds
        latency = min(latency * price.latency_seconds / then.latency_seconds, seconds)
        slowed = replace(at, latency_seconds=latency, moving_seconds=seconds - latency)
        if is_exact:
            return slowed
        doublings = abs(math.log2(shape.num_hosts / like.num_hosts)) + abs(
            math.log2(shape.ranks_per_host / like.ranks_per_host)
        )
        return replace(
            slowed,
            log_spread=at.log_spread + SPREAD_PER_DOUBLING * doublings,
            extrapolated=(*at.extrapolated, f"{shape}, measured on {like}"),
        )

    def _inside_host(self, kind: TaskKind, shape: GroupShape, given_bytes: float, left: Reach) -> Estimate:
        """Return what it takes as if one host held all ranks: by curves of other numbers of ranks, or the link."""
        curve, link = self.curves.inside_host(kind, shape.num_ranks), self._cluster.device_link
        if not curve:
            wire_bytes = given_bytes * wire_ratio(kind, shape.num_ranks)
            moving = wire_bytes / (link.bandwidth_bytes_per_second * left.links)
            return Estimate(
                host_seconds=0.0, latency_seconds=link.latency_seconds, moving_seconds=moving, log_spread=0.0
            )
        at = self._slowed(_on_curve(curve, given_bytes), kind, (shape.num_ranks, 1), replace(left, cards=1.0))
        if self.curves.has_inside(kind, shape.num_ranks):
            return at
        return replace(at, extrapolated=(*at.extrapolated, f"{shape.num_ranks} ranks, which were not measured"))

    def _slowed(self, at: Estimate, kind: TaskKind, measured_on: tuple[int, int], left: Reach) -> Estimate:
        """Return what was measured on so many ranks and hosts, longer by what slows the bytes since."""
        nominal, then = self._nominal.topology_seconds(*measured_on, _is_pairs(kind))
        now = max(nominal.of_links / left.links, nominal.of_cards / left.cards)
        return replace(at, moving_seconds=at.moving_seconds * max(1.0, now / max(then.longest, nominal.longest)))


def _is_pairs(kind: TaskKind) -> bool:
    return kind is TaskKind.ALL_TO_ALL


def _on_curve(curve: Sequence[CollectiveSample], given_bytes: float) -> Estimate:
    """Return what was measured; beyond the largest size it is extrapolated."""
    seconds = interpolate(curve, given_bytes)
    latency = min(curve[0].seconds, seconds)
    largest = max(curve[-1].num_bytes, 1)
    doublings = max(0.0, math.log2(max(given_bytes, 1) / largest))
    return Estimate(
        host_seconds=float(np.median([sample.host_seconds for sample in curve])),
        latency_seconds=latency,
        moving_seconds=seconds - latency,
        log_spread=spread_at(curve, given_bytes) + SPREAD_PER_DOUBLING * doublings,
        extrapolated=(f"{given_bytes:,.0f} bytes, measured up to {largest:,}",) if given_bytes > largest else (),
    )
