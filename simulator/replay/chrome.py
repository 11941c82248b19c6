"""A replay beside its recording, as events of one Chrome trace that Perfetto opens."""

from pathlib import Path
from typing import Any

from simulator.replay.nodes import PieceKind
from simulator.replay.run import Replayed, Run
from simulator.specs.document import json_text
from simulator.specs.files import write_text_atomic


def replay_events(run: Run, replayed: Replayed, *, name: str = "replayed") -> list[dict[str, Any]]:
    """Return events of the recorded ranks, then of the replayed ones: a process each, a thread for each stream."""
    events: list[dict[str, Any]] = []
    for offset, title in ((0, "recorded"), (len(run.ranks), name)):
        for place, rank in enumerate(run.ranks):
            pid = offset + place
            events.append(_name("process_name", pid, 0, f"{title} rank {rank.rank}"))
            events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "args": {"sort_index": pid}})
            tids = {stream: tid for tid, stream in enumerate(sorted({piece.stream for piece in rank.pieces}))}
            events += [_name("thread_name", pid, tid, stream) for stream, tid in tids.items()]
            for index, piece in enumerate(rank.pieces):
                start, end = piece.recorded_start_seconds, piece.recorded_end_seconds
                if offset:
                    start, end = replayed.start_seconds[place][index], replayed.end_seconds[place][index]
                if piece.kind is not PieceKind.LATENCY and end > start:
                    kind = piece.kind.value if piece.operation is None else piece.operation.kind.value
                    events.append(_event(piece.name, kind, pid, tids[piece.stream], start, end))
    return events


def write_replay(path: Path, run: Run, replayed: Replayed, *, name: str = "replayed") -> None:
    """Write a replay beside its recording.

    Raises:
        SpecError: if the file cannot be written.
    """
    lines = ",\n".join(json_text(event) for event in replay_events(run, replayed, name=name))
    write_text_atomic(path, f'{{\n"displayTimeUnit": "ms",\n"traceEvents": [\n{lines}\n]}}\n')


def _name(kind: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}


def _event(name: str, kind: str, pid: int, tid: int, start: float, end: float) -> dict[str, Any]:
    """Return a complete event; both ends are rounded alike, so that neighbours do not overlap."""
    start_ns, end_ns = round(start * 1e9), round(end * 1e9)
    return {
        "name": name,
        "cat": kind,
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "ts": start_ns / 1e3,
        "dur": (end_ns - start_ns) / 1e3,
    }
