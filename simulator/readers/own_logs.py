"""Reads and writes what our own microbenchmarks measured: `comm.csv` of two GPUs, JSON of `executor.measure.fabric`."""

import csv
from collections.abc import Sequence

from simulator.errors import SpecError
from simulator.group_shape import even_shape
from simulator.readers.collective_log import CollectiveLog, LogRow
from simulator.readers.log_meta import OPERATIONS
from simulator.specs.convert import from_plain, to_plain
from simulator.specs.document import document_content, document_text

_KIND = "collective log"


def is_own_json(text: str) -> bool:
    """Return whether a JSON text is one of ours."""
    return f'"graphpilot {_KIND}"' in text[:1000]


def own_json(text: str, name: str) -> CollectiveLog:
    """Return what `log_text` wrote."""
    return from_plain(CollectiveLog, document_content(text, _KIND, where=name), where=name)


def log_text(log: CollectiveLog) -> str:
    """Return a log as JSON."""
    return document_text(_KIND, to_plain(log))


def own_csv(lines: Sequence[str], name: str) -> CollectiveLog:
    """Return the measurements of `comm.csv`, whose columns are op, bytes, ranks, seconds, min and max.

    An `exchange` is a send and a receive at once on each rank, a `send_recv` one message.
    """
    rows, left_out = [], 0
    for number, row in enumerate(csv.DictReader(lines), 2):
        operation = OPERATIONS.get(row.get("op") or "")
        if operation is None:
            left_out += 1
            continue
        try:
            low, middle, high = (float(row[key]) for key in ("min", "seconds", "max"))
            rows.append(
                LogRow(
                    operation=operation,
                    shape=even_shape(int(row["ranks"]), 1),
                    num_bytes=int(row["bytes"]),
                    seconds=middle,
                    low_seconds=low,
                    high_seconds=high,
                )
            )
        except (KeyError, ValueError, TypeError) as error:
            raise SpecError(f"line {number}: must hold op, bytes, ranks, seconds, min and max, got {error!r}") from None
    return CollectiveLog(
        name=name,
        source="two H200s of one host, NVLink multicast off (README.md beside the file)",
        device="H200",
        cards_per_host=0,
        card_bytes_per_second=0.0,
        fabric="NVLink4",
        is_degraded=False,
        environment=(("NVLS", "off"),),
        cautions=(f"{left_out} rows of exchanges both ways were left out",) if left_out else (),
        rows=tuple(rows),
    )
