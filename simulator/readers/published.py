"""Reads tables of collective times that are not nccl-tests' own: one line a row, columns named by a comment."""

from collections.abc import Callable, Mapping, Sequence

from simulator.errors import SpecError
from simulator.group_shape import even_shape
from simulator.readers.collective_log import Estimate, LogRow
from simulator.readers.log_meta import OPERATIONS, Meta, algorithm_of, protocol_of
from simulator.specs.communication import Operation, bus_factor

Table = tuple[list[LogRow], list[Estimate], list[str]]
Row = Mapping[str, str]
_US, _GB = 1e-6, 1e9


def published_table(lines: Sequence[str], meta: Meta) -> Table | None:
    """Return rows, estimates and what was left out; None if the columns are none of those known.

    Raises:
        SpecError: if a row does not fit its columns.
    """
    for number, line in enumerate(lines):
        columns = line.lstrip("# ").split() if line.startswith("#") else []
        for needed, reader in _READERS.items():
            if columns[:1] == [needed[0]] and set(needed) <= set(columns):
                return reader(_rows(lines[number + 1 :], columns, number + 2), meta)
    return None


def _rows(lines: Sequence[str], columns: Sequence[str], first: int) -> list[Row]:
    rows: list[Row] = []
    for number, line in enumerate(lines, first):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        if len(words) != len(columns):
            raise SpecError(f"line {number}: must have {len(columns)} columns, {' '.join(columns)}, got {len(words)}")
        rows.append(dict(zip(columns, words, strict=True)))
    return rows


def _times(rows: Sequence[Row], meta: Meta) -> Table:
    """Return aiconfigurator's times: of nccl-tests, out of place."""
    return [_timed(row, meta, row["time_us"], row["time_us"]) for row in rows], [], []


def _repeated(rows: Sequence[Row], meta: Meta) -> Table:
    """Return the least and the most of some measurements; their mean by logarithms in the middle."""
    return [_timed(row, meta, row["min_us"], row["max_us"]) for row in rows], [], []


def _timed(row: Row, meta: Meta, low_us: str, high_us: str) -> LogRow:
    low, high = float(low_us) * _US, float(high_us) * _US
    return LogRow(
        operation=_operation(row["op"]),
        shape=meta.shape_of(int(row["ngpus"])),
        num_bytes=int(row["bytes"]),
        seconds=min(max((low * high) ** 0.5, low), high),
        low_seconds=low,
        high_seconds=high,
    )


def _peaks(rows: Sequence[Row], meta: Meta) -> Table:
    """Return bus bandwidths of one size, a column for each set of settings."""
    found, left_out = [], []
    for row in rows:
        algorithm = algorithm_of(row["algo"])
        if algorithm is None:
            left_out.append(f"{row['collective']} by {row['algo']} was left out, an algorithm that is not modelled")
            continue
        operation = _operation(row["collective"])
        for variant in (key for key in row if key not in ("collective", "algo")):
            seconds = meta.num_bytes * bus_factor(operation, meta.num_ranks) / (float(row[variant]) * _GB)
            found.append(
                LogRow(
                    operation=operation,
                    shape=meta.shape,
                    num_bytes=meta.num_bytes,
                    seconds=seconds,
                    low_seconds=seconds,
                    high_seconds=seconds,
                    algorithm=algorithm,
                    variant=variant,
                )
            )
    return found, [], left_out


def _tuning_model(rows: Sequence[Row], meta: Meta) -> Table:
    """Return what NCCL prints of its own model."""
    del meta
    estimates = []
    for row in rows:
        algorithm, protocol = algorithm_of(row["algo"]), protocol_of(row["proto"])
        assert algorithm is not None, row
        assert protocol is not None, row
        is_both = row["coll"] == "ag_rs"
        operations = (Operation.ALL_GATHER, Operation.REDUCE_SCATTER) if is_both else (_operation(row["coll"]),)
        hosts = int(row["nodes"])
        estimates.append(
            Estimate(
                operations=operations,
                shape=even_shape(hosts * int(row["ppn"]), hosts),
                algorithm=algorithm,
                protocol=protocol,
                latency_seconds=float(row["lat_us"]) * _US,
                bytes_per_second=float(row["algbw_GBps"]) * _GB,
            )
        )
    return [], estimates, ["numbers of NCCL's own model, no measurements"]


def _operation(text: str) -> Operation:
    if text.lower() not in OPERATIONS:
        raise SpecError(f"the operation must be one of {', '.join(OPERATIONS)}, got {text!r}")
    return OPERATIONS[text.lower()]


# By the columns that tell a table; the first one comes first in it.
_READERS: dict[tuple[str, ...], Callable[[Sequence[Row], Meta], Table]] = {
    ("op", "ngpus", "bytes", "time_us"): _times,
    ("op", "ngpus", "bytes", "min_us", "max_us"): _repeated,
    ("collective", "algo"): _peaks,
    ("coll", "algo", "nodes", "ppn", "proto", "lat_us", "algbw_GBps"): _tuning_model,
}
