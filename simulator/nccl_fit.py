"""Fits the constants of `nccl.py` to logs of collective times."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from simulator.nccl import Bools, Calls, Floats, seconds_of
from simulator.nccl_constants import PRIOR, NcclConstants, flat, unflat
from simulator.readers.collective_log import CollectiveLog, LogRow
from simulator.specs.communication import Operation
from simulator.specs.machines import FABRICS, NVLINK3, NVLINK4, NVLINK5

# How much it counts when a constant is a factor of e from what was known, beside an error of a whole log by as much.
_PRIOR_WEIGHT = 0.05
# Errors beyond this count linearly: a log's outliers are not the fit's concern.
_OUTLIER = 0.05
# How far constants may move from what is known, as a factor; cards do not go beyond their rate.
_REACH = 12.0
# Not of operations that the logs hold.
_FIXED = ("reference_link_rate", "pair_across_us", "pair_across_rank_us", "pair_card_loss")
_MOST_STEPS = 40

# Share of a card's line rate that is sustained over InfiniBand, as `FABRICS` states it of NDR.
CARD_SUSTAINED = FABRICS["ndr"].card_bytes_per_second / 50e9
_LINKS = {"A100": NVLINK3, "B200": NVLINK5}  # of other devices NVLINK4
_CARD_RATE = 50e9  # of logs that do not say; NDR


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Rows of logs that can be priced, an array entry each.

    Attributes:
        calls: `cards_rate` as on InfiniBand; on Ethernet it is less by a constant that is fitted.
        weights: rows of a log's number of ranks count as much together as any other's.
    """

    logs: tuple[str, ...]
    rows: tuple[LogRow, ...]
    calls: Calls
    seconds: Floats
    is_roce: Bools
    weights: Floats

    def subset(self, keep: Sequence[bool] | Bools) -> "Measured":
        """Return some of the rows."""
        kept = [index for index, is_kept in enumerate(keep) if is_kept]
        return _measured(
            [(self.logs[i], bool(self.is_roce[i]), self.rows[i]) for i in kept], _calls_at(self.calls, kept)
        )


def measured_of(logs: Sequence[CollectiveLog]) -> Measured:
    """Return all rows of some logs but broadcasts and those of no bytes, which the model does not price."""
    found, rates = [], []
    for log in logs:
        for row in log.rows:
            if row.num_bytes > 0 and row.operation is not Operation.BROADCAST:
                found.append((log.name, log.is_roce, row))
                rates.append((_link_rate(log), _cards_rate(log, row), log.has_nvls, log.device == "A100"))
    return _measured(found, _calls([row for _, _, row in found], rates))


def predicted_seconds(measured: Measured, constants: NcclConstants) -> Floats:
    """Return what the model says of each row."""
    ratio = np.where(measured.is_roce, constants.roce_card_ratio, 1.0)
    calls = measured.calls
    slower = Calls(**{name: getattr(calls, name) for name in _FIELDS} | {"cards_rate": calls.cards_rate * ratio})
    return seconds_of(slower, constants)


def fit_constants(measured: Measured, *, max_steps: int = _MOST_STEPS) -> NcclConstants:
    """Return the constants that are nearest to measurements, and to what is known where these are silent."""
    known = flat(PRIOR)
    names = [name for name in known if name not in _FIXED]
    prior = np.log([known[name] for name in names])
    log_seconds = np.log(measured.seconds)
    high = np.array(
        [0.0 if name.endswith(".card_ratio") else math.log(_REACH) + at for name, at in zip(names, prior, strict=True)]
    )
    low = prior - math.log(_REACH)

    def constants_at(point: Floats) -> NcclConstants:
        return unflat(known | dict(zip(names, np.exp(point).tolist(), strict=True)))

    def misfit(point: Floats) -> Floats:
        errors = np.log(predicted_seconds(measured, constants_at(point))) - log_seconds
        return np.concatenate([errors * measured.weights, _PRIOR_WEIGHT * (point - prior)])

    found = least_squares(
        misfit, prior, bounds=(low, high), loss="soft_l1", f_scale=_OUTLIER, max_nfev=max_steps, ftol=1e-4, xtol=1e-4
    )
    return constants_at(found.x)


_FIELDS = tuple(Calls.__dataclass_fields__)


def _calls_at(calls: Calls, indices: Sequence[int]) -> Calls:
    return Calls(**{name: getattr(calls, name)[list(indices)] for name in _FIELDS})


def _measured(found: Sequence[tuple[str, bool, LogRow]], calls: Calls) -> Measured:
    counts = Counter((name, row.shape.num_ranks) for name, _, row in found)
    return Measured(
        logs=tuple(name for name, _, _ in found),
        rows=tuple(row for _, _, row in found),
        calls=calls,
        seconds=np.array([row.seconds for _, _, row in found]),
        is_roce=np.array([is_roce for _, is_roce, _ in found], bool),
        weights=np.array([counts[name, row.shape.num_ranks] ** -0.5 for name, _, row in found]),
    )


def _calls(rows: Sequence[LogRow], rates: Sequence[tuple[float, float, bool, bool]]) -> Calls:
    return Calls(
        operation=np.array([row.operation.value for row in rows]),
        num_bytes=np.array([row.num_bytes for row in rows], float),
        num_ranks=np.array([row.shape.num_ranks for row in rows], float),
        num_hosts=np.array([row.shape.num_hosts for row in rows], float),
        ranks_per_host=np.array([row.shape.ranks_per_host for row in rows], float),
        link_rate=np.array([link for link, _, _, _ in rates]),
        cards_rate=np.array([cards for _, cards, _, _ in rates]),
        has_nvls=np.array([has for _, _, has, _ in rates], bool),
        is_older=np.array([older for _, _, _, older in rates], bool),
        algorithm=np.array([row.algorithm.value if row.algorithm else "" for row in rows]),
        protocol=np.array([row.protocol.value if row.protocol else "" for row in rows]),
    )


def _link_rate(log: CollectiveLog) -> float:
    return _LINKS.get(log.device, NVLINK4).bandwidth_bytes_per_second


def _cards_rate(log: CollectiveLog, row: LogRow) -> float:
    if not row.shape.spans_hosts:
        return math.inf
    return row.shape.cards_per_host * (log.card_bytes_per_second or _CARD_RATE) * CARD_SUSTAINED
