"""read_recordings(): any files of a run's traces in, one Recording a rank out, or a sentence why not."""

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simulator.errors import SpecError
from simulator.readers.chakra import HostTrace, host_trace, is_host_trace, joined
from simulator.readers.kineto import is_kineto, kineto_recording
from simulator.readers.own_traces import own_recordings
from simulator.specs.files import read_traces
from simulator.specs.recording import Recording

_KINETO = "give the trace that torch.profiler's export_chrome_trace wrote"


def read_recordings(paths: Sequence[Path], *, ranks: Sequence[int] = ()) -> list[Recording]:
    """Return what the files of one run say, a recording a rank, by rank.

    Host traces (Chakra) among the files are joined to the Kineto trace of their rank, or, where they name none, to the
    one that stands at their place among the Kineto traces.

    Args:
        paths: files, or folders of files, in any order.
        ranks: of the files that do not name theirs, in order.

    Raises:
        SpecError: if a file is none that can be replayed, if ranks are missing, or two files are of one rank.
    """
    recordings: list[Recording] = []
    hosts: list[HostTrace] = []
    for path in files_of(paths):
        document = load_json(path)
        if is_host_trace(document):
            hosts.append(host_trace(document, path))
        elif isinstance(document, dict) and "graphpilot" in document:
            recordings += own_recordings(read_traces(path), path)
        elif is_kineto(document):
            recordings.append(kineto_recording(document, path))
        else:
            raise SpecError(refusal(document, path))
    if not recordings:
        named = ", ".join(str(host.path) for host in hosts)
        raise SpecError(f"{named}: a host trace has no times of the device: give the Kineto trace of the same run too")
    return _with_host_traces(_ranked(recordings, ranks), hosts)


def files_of(paths: Sequence[Path]) -> list[Path]:
    """Return files, those of folders by name.

    Raises:
        SpecError: if a folder holds no trace, or nothing is named.
    """
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
            if not inside:
                raise SpecError(f"{path}: must hold files that end in .json or .json.gz, got none; name the files")
            found += sorted(inside, key=_by_numbers)
        else:
            found.append(path)
    if not found:
        raise SpecError("a replay needs at least one trace; name a file or a folder")
    return found


def load_json(path: Path) -> Any:
    """Return the JSON of a file, plain or gzipped.

    Raises:
        SpecError: if it cannot be read, or is none; says what it seems to be instead.
    """
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise SpecError(f"{path}: is gzip that breaks off or is damaged ({error}); copy it again") from error
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}; correct the path") from error
    if not raw.strip():
        raise SpecError(f"{path}: is empty; {_KINETO}")
    if b"\x00" in raw[:4096] or path.name.removesuffix(".gz").endswith(".et"):
        raise SpecError(
            f"{path}: is a converted execution trace (Chakra protobuf), which has lost the streams and launches that a "
            f"replay rebuilds; {_KINETO}, or the host trace of ExecutionTraceObserver with it"
        )
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        if re.match(rb"\s*(topology|npus_count)\s*:", raw):
            raise SpecError(f"{path}: describes a network of ASTRA-sim, not a run; {_KINETO}") from error
        raise SpecError(f"{path}: is not JSON, or breaks off: {error}; {_KINETO}") from error


def refusal(document: object, path: Path) -> str:
    """Return why a JSON document is no trace that can be replayed."""
    if isinstance(document, dict) and "workload_graph" in document:
        kind = "is a converted execution trace (Chakra JSON), which has lost streams and launches"
    elif isinstance(document, dict) and "all-reduce-implementation" in document:
        kind = "describes a system of ASTRA-sim, not a run"
    elif isinstance(document, list) and document and isinstance(document[0], list):
        kind = "is a memory timeline (export_memory_timeline), which has no operations"
    else:
        kind = "has no traceEvents, so it is no trace of PyTorch's profiler"
    return f"{path}: {kind}; {_KINETO}"


def _ranked(recordings: Sequence[Recording], ranks: Sequence[int]) -> list[Recording]:
    """Return recordings by rank, with the ranks that the caller names for those that do not say theirs."""
    unnamed = [recording for recording in recordings if recording.rank is None]
    if len(ranks) > len(unnamed):
        raise SpecError(f"--rank must be given once for each file that names no rank, {len(unnamed)}, got {len(ranks)}")
    given = iter(ranks)
    found = []
    for recording in recordings:
        rank = recording.rank
        if rank is None:
            rank = next(given, None)
        if rank is None and len(recordings) == 1 and recording.num_ranks in (None, 1) and not _messages(recording):
            rank = 0
            recording = replace(recording, notes=(*recording.notes, "no rank is named, and none is needed: it is 0"))
        if rank is None:
            raise SpecError(
                f"{recording.name}: names no rank, neither in distributedInfo nor in its file name; say it with --rank"
            )
        found.append(replace(recording, rank=rank))
    found.sort(key=lambda recording: recording.rank or 0)
    for one, other in itertools.pairwise(found):
        if one.rank == other.rank:
            raise SpecError(f"{one.name} and {other.name} are both of rank {one.rank}; give one file of each rank")
    return found


def _messages(recording: Recording) -> bool:
    return any(operation.message for operation in recording.operations) or any(
        operator.name.startswith(("nccl:", "rccl:", "c10d::")) for operator in recording.operators
    )


def _with_host_traces(recordings: list[Recording], hosts: Sequence[HostTrace]) -> list[Recording]:
    by_rank = {recording.rank: index for index, recording in enumerate(recordings)}
    for place, host in enumerate(hosts):
        index = by_rank.get(host.rank) if host.rank is not None else place
        if index is None or index >= len(recordings):
            raise SpecError(f"{host.path}: is the host trace of a rank without a Kineto trace; give that too")
        recordings[index] = joined(recordings[index], host)
    return recordings


def _by_numbers(path: Path) -> tuple[tuple[int, str], ...]:
    """Return a key by which rank10 comes after rank9."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", path.name))
