"""Reads logs of collective times.

`read_collective_log` takes tables of nccl-tests as text (of old releases too, with lines of other programs around
them) and its JSON (`-J`), the tables of aiconfigurator, of NCCL's tuning model and of peaks (`published.py`), and CSV
and JSON of our own microbenchmarks (`own_logs.py`). In a text, `# META key=value ...` says what the table does not: op,
gpu, ngpus, nnodes, nics_per_node, nic_gbps, fabric, algo, proto, env, quality.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.errors import SpecError
from simulator.readers.collective_log import CollectiveLog, Estimate, LogRow
from simulator.readers.log_meta import OPERATIONS, Meta, device_of, meta_of
from simulator.readers.own_logs import is_own_json, own_csv, own_json
from simulator.readers.published import published_table
from simulator.specs.communication import Operation, bus_factor

# What mpirun and srun put before each line of a rank.
_PREFIX = re.compile(r"^(?:\[\d+,\d+\]<std(?:out|err)>:|\d+: )\s?")
_TIMES = ("time", "cputime")
_MOST_RATIO_ERROR = 0.02


def read_collective_log(path: Path) -> CollectiveLog:
    """Return what a log of collective times says.

    Raises:
        SpecError: if the file cannot be read, or holds no times that can be told.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: must be a readable text file, got {error}") from None
    try:
        log = _log_of(text, path.name)
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None
    if not log.rows and not log.estimates:
        raise SpecError(
            f"{path}: must hold times of collectives, as nccl-tests prints them, got none; run "
            "all_reduce_perf and pass on what it prints"
        )
    return log


def _log_of(text: str, name: str) -> CollectiveLog:
    if text.lstrip().startswith("{"):
        return own_json(text, name) if is_own_json(text) else _json_log(text, name)
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    if lines and lines[0].startswith("op,"):
        return own_csv(lines, name)
    meta = meta_of(lines)
    if found := published_table(lines, meta):
        rows, estimates, cautions = found
        return _log(name, meta, rows, cautions, estimates)
    rows, cautions, meta = _text_rows(lines, meta)
    return _log(name, meta, rows, cautions)


def _log(
    name: str,
    meta: Meta,
    rows: Sequence[LogRow],
    cautions: Sequence[str],
    estimates: Sequence[Estimate] = (),
) -> CollectiveLog:
    doubts = [f"{key} is uncertain" for key in meta.uncertain if key != "nccl"]
    return CollectiveLog(
        name=name,
        source=meta.source,
        device=meta.device,
        cards_per_host=meta.cards_per_host,
        card_bytes_per_second=meta.card_bytes_per_second,
        fabric=meta.fabric,
        is_degraded=meta.is_degraded,
        environment=meta.environment,
        cautions=(*doubts, *cautions),
        rows=tuple(rows),
        estimates=tuple(estimates),
    )


def _text_rows(lines: Sequence[str], meta: Meta) -> tuple[list[LogRow], list[str], Meta]:
    """Return the rows of nccl-tests' tables, what was left out, and what the tables add to what is known."""
    columns: list[str] = []
    found: list[tuple[int, list[float], float | None]] = []
    num_unread = 0
    for line in lines:
        words = line.replace("#wrong", "wrong").lstrip("# ").split()
        if line.startswith("#") and "size" in words and "algbw" in words:
            columns = words
        elif columns and words and words[0].isdigit() and not line.startswith("#"):
            row = _text_row(words, columns)
            num_unread += row is None
            found += [row] if row else []
    if not found:
        return [], [], meta
    meta = _completed(meta, [ratio for _, _, ratio in found if ratio])
    rows = [_row(meta, num_bytes, times) for num_bytes, times, _ in found]
    return rows, [f"{num_unread} rows without a time were left out"] * (num_unread > 0), meta


def _text_row(words: Sequence[str], columns: Sequence[str]) -> tuple[int, list[float], float | None] | None:
    """Return a row's bytes, its times in microseconds and its ratio of bus to algorithm bandwidth."""
    times: list[float] = []
    ratio: float | None = None
    for index, column in enumerate(columns):
        if column in _TIMES and index + 2 < len(words):
            time, rate, bus_rate = (_float(word) for word in words[index : index + 3])
            if time is not None and time > 0:
                times.append(time)
            if rate and bus_rate and rate >= 10:  # printed with two decimals
                ratio = bus_rate / rate
    return (int(words[0]), times, ratio) if times else None


def _completed(meta: Meta, ratios: Sequence[float]) -> Meta:
    """Return what is known with the number of ranks from bandwidths where it was not certain.

    Raises:
        SpecError: if operation, ranks or hosts cannot be told.
    """
    hint = 'put a line "# META op=all_reduce ngpus=16 nnodes=2" before the table'
    if meta.operation is None:
        raise SpecError(f"the operation must be known, got a table without its name; {hint}")
    if ratios and (not meta.num_ranks or "ngpus" in meta.uncertain):
        ratio = sorted(ratios)[len(ratios) // 2]
        told = _ranks_of(meta.operation, ratio)
        if told and (not meta.num_ranks or told < 200):  # beyond, the last printed digit decides
            meta = replace(meta, num_ranks=told)
    if not meta.num_ranks or not meta.num_hosts:
        what = "ranks" if not meta.num_ranks else "hosts"
        raise SpecError(f"the number of {what} must be known, got a table without lines of ranks; {hint}")
    assert meta.operation is not None  # checked above
    expected = bus_factor(meta.operation, meta.num_ranks)
    if ratios and meta.num_ranks < 200 and abs(sorted(ratios)[len(ratios) // 2] / expected - 1) > _MOST_RATIO_ERROR:
        raise SpecError(
            f"busbw over algbw must be {expected:.3f} for {meta.operation} on {meta.num_ranks} ranks, got "
            f"{sorted(ratios)[len(ratios) // 2]:.3f}; correct op or ngpus"
        )
    return meta


def _ranks_of(operation: Operation, ratio: float) -> int:
    """Return the ranks for which bus bandwidth over algorithm bandwidth is a ratio; 0 if it does not tell."""
    share = ratio / 2 if operation is Operation.ALL_REDUCE else ratio
    return round(1 / (1 - share)) if 0 < share < 1 else 0


def _row(meta: Meta, num_bytes: int, times_us: Sequence[float]) -> LogRow:
    assert meta.operation is not None
    return LogRow(
        operation=meta.operation,
        shape=meta.shape,
        num_bytes=num_bytes,
        seconds=min(times_us) * 1e-6,
        low_seconds=min(times_us) * 1e-6,
        high_seconds=max(times_us) * 1e-6,
        algorithm=meta.algorithm,
        protocol=meta.protocol,
    )


def _json_log(text: str, name: str) -> CollectiveLog:
    """Return what `-J` of nccl-tests wrote."""
    try:
        content: dict[str, Any] = json.loads(text)
    except json.JSONDecodeError as error:
        raise SpecError(f"must be JSON, got {error}; nccl-tests writes the end of its JSON when it ends") from None
    results = content.get("results")
    if not isinstance(results, list):
        raise SpecError('must have "results", a list, as nccl-tests writes it, got none')
    meta = _json_meta(content)
    rows, num_unread = [], 0
    for result in results:
        times = _json_times(result)
        num_unread += not times
        if times:
            rows.append(_row(meta, int(result["size"]), times))
    return _log(name, meta, rows, [f"{num_unread} rows without a time were left out"] * (num_unread > 0))


def _json_meta(content: Mapping[str, Any]) -> Meta:
    arguments = [str(word) for word in content.get("args", [])]
    meta = meta_of([f"# {arguments[0] if arguments else ''}"])
    if meta.operation is None:
        names = {str(row.get("experiment_name", "")).lower() for row in content["results"] if isinstance(row, dict)}
        meta = replace(meta, operation=next((OPERATIONS[name] for name in names if name in OPERATIONS), None))
    config = content.get("config", {})
    devices = content.get("devices") or (config.get("devices") if isinstance(config, dict) else None)
    if not isinstance(devices, list) or not devices:
        raise SpecError('must have "devices", a list with an entry a rank, got none')
    settings = dict(str(item).split("=", 1) for item in content.get("env", []) if "=" in str(item))
    nccl = {key: value for key, value in settings.items() if key.startswith("NCCL_")}
    pairs = f"# META algo={nccl.get('NCCL_ALGO', '')} proto={nccl.get('NCCL_PROTO', '')}"
    if meta.operation is None:
        raise SpecError('the operation must be known, got no name of a program in "args"')
    return replace(
        meta_of([pairs]),
        operation=meta.operation,
        device=device_of(str(devices[0].get("device_info", ""))),
        num_ranks=len(devices),
        num_hosts=len({str(device.get("hostname")) for device in devices}),
        environment=(("nccl", str(content.get("nccl_version", ""))), *sorted(nccl.items())),
        uncertain=(),
    )


def _json_times(result: object) -> list[float]:
    times: list[float] = []
    if isinstance(result, dict) and isinstance(result.get("size"), int):
        for place in ("out_of_place", "in_place"):
            found = result.get(place)
            time = _float(found.get("time", found.get("cpu_time"))) if isinstance(found, dict) else None
            times += [time] if time else []
    return times


def _float(word: object) -> float | None:
    try:
        number = float(str(word))
    except ValueError:
        return None
    return number if 0 <= number < float("inf") else None
