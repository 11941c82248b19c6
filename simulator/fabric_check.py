"""Tells a healthy fabric from a degraded one by a log of its collectives, and says what may be wrong.

A log is compared with the constants that come with the project. They miss whole logs of healthy sites by 6 % in the
mean at 64 MB and more, the worst by a quarter, so that half as long again is no accident; small sizes tell of
launches as much as of the fabric and give notes alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from simulator.nccl_constants import fitted_constants
from simulator.nccl_fit import CARD_SUSTAINED, Measured, measured_of, predicted_seconds
from simulator.readers.collective_log import CollectiveLog
from simulator.specs.communication import bus_factor
from simulator.specs.units import KIB, MIB

_LARGE_BYTES = 64 * MIB
_SMALL_BYTES = 16 * KIB
_DEGRADED_RATIO = 1.5  # of measured over expected seconds, the median over large sizes
_LATE_RATIO = 3.0
_UNSTABLE_RATIO = 1.4  # of measured over what the sizes around it say
_SLOWER_THAN_MORE_RATIO = 1.2  # of a size over a larger one
_REPEATED_RATIO = 2.0  # of the slowest over the fastest time of a size
_SLOW_RAIL_RATIO = 1.25  # of a rail over the median rail
_NO_GAIN_RATIO = 1.05  # of GPUDirect off over on
# Variants in logs of our own microbenchmark.
RAIL, GPUDIRECT_OFF, UNEVEN = "rail", "gpudirect_off", "uneven"


class FindingKind(StrEnum):
    """What a log shows; the first three are degraded, the others notes."""

    SLOW = "slow"
    RAIL = "rail"
    GPUDIRECT = "gpudirect"
    STATED = "stated"
    LATENCY = "latency"
    UNSTABLE = "unstable"
    UNCERTAIN = "uncertain"


_NOTES = (FindingKind.LATENCY, FindingKind.UNSTABLE, FindingKind.UNCERTAIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that a log shows.

    Attributes:
        text: a sentence, with what is suspected.
    """

    kind: FindingKind
    text: str

    @property
    def is_note(self) -> bool:
        """Whether it leaves the fabric healthy."""
        return self.kind in _NOTES


def check_fabric(log: CollectiveLog) -> tuple[Finding, ...]:
    """Return what a log shows, faults first; empty if all is as expected, and for gloo, whose fabric nobody judges."""
    measured = measured_of([log])
    if not measured.rows or ("device_kind", "cpu") in log.environment:
        return ()
    findings = [*_stated(log), *_slow(log, measured), *_rails(measured), *_gpudirect(measured)]
    findings += [*_late(measured), *_unstable(measured)]
    return tuple(sorted(findings, key=lambda finding: finding.is_note))


def is_degraded(findings: Sequence[Finding]) -> bool:
    """Return whether any finding is more than a note."""
    return any(not finding.is_note for finding in findings)


def _stated(log: CollectiveLog) -> list[Finding]:
    text = "the log itself calls its fabric degraded"
    return [Finding(kind=FindingKind.STATED, text=text)] if log.is_degraded else []


def _slow(log: CollectiveLog, measured: Measured) -> list[Finding]:
    """Compare large sizes with what links and cards should give, each operation, shape and variant for itself."""
    ratios = measured.seconds / predicted_seconds(measured, fitted_constants())
    curves: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(measured.rows):
        is_plain = not row.variant.startswith((RAIL, GPUDIRECT_OFF, UNEVEN))
        if row.num_bytes >= _LARGE_BYTES and is_plain:
            curves.setdefault((row.operation, row.shape, row.algorithm, row.variant), []).append(index)
    findings = []
    for indices in curves.values():
        ratio = float(np.median(ratios[indices]))
        if ratio <= _DEGRADED_RATIO:
            continue
        worst = max(indices, key=lambda index: ratios[index])
        text, is_sure = _slow_text(log, measured, worst, ratio)
        findings.append(Finding(kind=FindingKind.SLOW if is_sure else FindingKind.UNCERTAIN, text=text))
    return findings


def _slow_text(log: CollectiveLog, measured: Measured, index: int, ratio: float) -> tuple[str, bool]:
    """Return a sentence on a slow curve, and whether what the log says of the machine is certain."""
    row = measured.rows[index]
    bus_rate = row.num_bytes * bus_factor(row.operation, row.shape.num_ranks) / row.seconds / 1e9
    variant = f" ({row.variant})" if row.variant else ""
    head = (
        f"{row.operation} on {row.shape}{variant} reaches {bus_rate:.0f} GB/s of bus bandwidth at {row.num_bytes:,} "
        f"bytes; large sizes take {ratio:.1f} times what is expected"
    )
    if not row.shape.spans_hosts:
        return (
            f"{head}; NVLink may be down or PCIe in its place: look at nvidia-smi topo -m and nvidia-smi nvlink -s",
            True,
        )
    card_rate = (log.card_bytes_per_second or 50e9) * CARD_SUSTAINED
    cards = row.shape.cards_per_host
    worth = max(round(bus_rate * 1e9 / card_rate), 1)
    is_sure = not any(
        word in text for text in log.cautions for word in ("nics_per_node", "nic_gbps", "ngpus", "nnodes")
    )
    doubt = "" if is_sure else "; but the log is not sure of its ranks or cards"
    cause = (
        f"this is what {worth} of {cards} network cards carry: cards may be missing in NCCL_IB_HCA, slow or down, "
        "GPUDirect RDMA may be off (NCCL_NET_GDR_LEVEL, nvidia_peermem), or PCIe access control (ACS) on"
    )
    return f"{head}; {cause}{doubt}", is_sure


def _rails(measured: Measured) -> list[Finding]:
    """Compare rails with each other, at the largest size of each."""
    largest: dict[str, int] = {}
    for index, row in enumerate(measured.rows):
        if row.variant.startswith(RAIL) and GPUDIRECT_OFF not in row.variant:
            known = largest.setdefault(row.variant, index)
            largest[row.variant] = max(known, index, key=lambda each: measured.rows[each].num_bytes)
    if len(largest) < 2:
        return []
    seconds = {rail: measured.seconds[index] for rail, index in largest.items()}
    middle = float(np.median(list(seconds.values())))
    return [
        Finding(
            kind=FindingKind.RAIL,
            text=f"{rail} takes {each / middle:.1f} times what the median rail takes: look at its card, cable and port",
        )
        for rail, each in seconds.items()
        if each > _SLOW_RAIL_RATIO * middle
    ]


def _gpudirect(measured: Measured) -> list[Finding]:
    """Compare large messages with GPUDirect RDMA on and off, where both were measured on InfiniBand or RoCE."""
    on: dict[tuple[object, ...], float] = {}
    off: dict[tuple[object, ...], float] = {}
    for index, row in enumerate(measured.rows):
        if row.shape.spans_hosts and row.num_bytes >= _LARGE_BYTES:
            key = (row.operation, row.shape, row.num_bytes)
            if row.variant == GPUDIRECT_OFF:
                off[key] = float(measured.seconds[index])
            elif not row.variant:
                on[key] = float(measured.seconds[index])
    gains = [off[key] / on[key] for key in on if key in off]
    if not gains or float(np.median(gains)) > _NO_GAIN_RATIO:
        return []
    text = "GPUDirect RDMA makes no difference: it may not be in use (nvidia_peermem or DMA-BUF missing)"
    return [Finding(kind=FindingKind.GPUDIRECT, text=text)]


def _late(measured: Measured) -> list[Finding]:
    expected = predicted_seconds(measured, fitted_constants())
    small = [index for index, row in enumerate(measured.rows) if row.num_bytes <= _SMALL_BYTES and not row.variant]
    if not small:
        return []
    ratio = float(np.median(measured.seconds[small] / expected[small]))
    if ratio <= _LATE_RATIO:
        return []
    text = (
        f"small calls take {ratio:.1f} times what is expected: launches of a busy or virtual host are part of them, or "
        "messages take a longer way"
    )
    return [Finding(kind=FindingKind.LATENCY, text=text)]


def _unstable(measured: Measured) -> list[Finding]:
    """Find sizes that take longer than the sizes around them say, by logarithms."""
    curves: dict[tuple[object, ...], list[int]] = {}
    for index, row in enumerate(measured.rows):
        curves.setdefault((row.operation, row.shape, row.algorithm, row.variant), []).append(index)
    findings = []
    for (operation, shape, *_), indices in curves.items():
        ordered = sorted(indices, key=lambda index: measured.rows[index].num_bytes)
        for before, index, after in zip(ordered, ordered[1:], ordered[2:], strict=False):
            ratio = measured.seconds[index] / _between(measured, before, index, after)
            # A size that takes longer than a larger one is no step from one algorithm to the next.
            row = measured.rows[index]
            repeated = row.high_seconds / row.low_seconds
            is_slower_than_more = measured.seconds[index] > _SLOWER_THAN_MORE_RATIO * measured.seconds[after]
            if ratio > _UNSTABLE_RATIO or is_slower_than_more or repeated > _REPEATED_RATIO:
                text = (
                    f"{operation} on {shape} is unstable at {row.num_bytes:,} bytes: {ratio:.1f} times what the sizes "
                    f"around it say, its slowest {repeated:.1f} times its fastest; another job or a congested switch?"
                )
                findings.append(Finding(kind=FindingKind.UNSTABLE, text=text))
    return findings


def _between(measured: Measured, before: int, index: int, after: int) -> float:
    sizes = [math.log(measured.rows[each].num_bytes) for each in (before, index, after)]
    if sizes[0] == sizes[2]:
        return float(measured.seconds[before])
    logs = [math.log(measured.seconds[each]) for each in (before, after)]
    return math.exp(float(np.interp(sizes[1], (sizes[0], sizes[2]), logs)))
