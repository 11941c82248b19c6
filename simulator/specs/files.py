"""Our own files in and out; alone, with the modules that it uses, knows their formats.

People write TOML. Every key is a field of a spec, and a quantity carries its unit. `run.toml`, for `read_run`:

    [graph]                         # a graph store, relative to this file; for a made-up graph
    path = "data/cora.npz"          # write generator = "rmat" or "community" with its fields instead
    normalize_features = "row"

    [model]
    width = 64
    num_heads = 8
    num_layers = 2
    feed_forward_width = 128
    dropout_ratio = 0.5

    [cluster]                       # a built-in cluster, here with changes; "local" is the machine at hand;
    name = "h200x8"                 # file = "cluster.toml" names a file of one's own instead
    devices_per_host = 4
    device_link = {bandwidth_bytes_per_second = "300 GB/s"}

    [train]
    num_steps = 200
    learning_rate = 0.01

    [search]                        # may be left out, as may every field that has a default
    exchanges = ["halo"]
    batches = ["full_graph", "sampled"]
    fan_outs = [15, 10]             # for sampled batches: one a layer
    seeds_per_batch = 1024

    [fanout]                        # for graphpilot fanout; all of it may be left out
    fan_outs = [8, 16]

`cluster.toml`, for `read_cluster`, as `write_cluster` prints any cluster:

    name = "office"
    num_hosts = 1
    devices_per_host = 2

    [device]
    kind = "cuda"
    name = "NVIDIA H100 80GB HBM3"
    memory_bytes = "80 GiB"
    memory_bandwidth_bytes_per_second = "3.35 TB/s"
    fp32_flops_per_second = "67 TFLOP/s"
    bf16_flops_per_second = "989 TFLOP/s"
    cache_bytes = "50 MiB"         # 0 B where unknown: no order of nodes is predicted to gain then

    [device_link]
    latency_seconds = "13 us"
    bandwidth_bytes_per_second = "330 GB/s"

    [host_link]
    latency_seconds = "25 us"
    bandwidth_bytes_per_second = "400 Gb/s"

It may also say what joins the devices of a host and the hosts, and what is slow or lost; keys like these are those of
`topology`, for a cluster of two devices a host:

    stragglers = [{device = 1, slowdown = 1.3}]
    link_faults = [{host = 0, ends = ["nic1", "network"], bandwidth_ratio = 0}]   # lost
    jitter = 0.05

    [host]                          # device0 and so on, nic0, socket0; other names are switches
    links = [
      {ends = ["device[0-1]", "nvswitch"], kind = "nvlink", bandwidth_bytes_per_second = "450 GB/s"},
      {ends = ["device[0-1]", "pcie[0-1]"], kind = "pcie", bandwidth_bytes_per_second = "57 GB/s"},
      {ends = ["nic[0-1]", "pcie[0-1]"], kind = "pcie", bandwidth_bytes_per_second = "57 GB/s"},
      {ends = ["pcie[0-1]", "socket0"], kind = "host_bridge", bandwidth_bytes_per_second = "57 GB/s"},
    ]
    gpu_direct = false              # cards read the memory of sockets alone

    [network]
    hosts_per_leaf = 32
    oversubscription = 2.0
    rails = true

On GPUs nccl_algorithm = "Ring" (or "Tree", "NVLS", "NVLSTree") and nccl_protocol = "Simple" (or "LL", "LL128") tell
NCCL what to take; without them the choice is its own.

Programs write JSON in base units. `plan.json` (a `PlanFile`), `calibration.json` (a `Calibration`), `fanout.json`
(a `FanoutComparison`) and `manifest.json` of a checkpoint (a `CheckpointManifest`):

    {
      "format": "graphpilot plan",
      "schema_version": 4,
      "content_sha256": "6f0c...",  # of the content without white space, keys sorted: shows any later change
      "content": {"graph": {"source": {"path": "/data/cora.npz", ...}, "num_nodes": 2708, ...}, "plan": {...}, ...}
    }

Traces are Chrome trace JSON (`chrome.py`), one event a line; a group is runs of ranks, `[[0, 7]]` for 0 to 7. Where
ranks are alike the header numbers each rank's list of spans (`list_of_rank`, `shift_of_rank`), written for its first:

    {
    "displayTimeUnit": "ms",
    "graphpilot": {
      "format": "graphpilot trace",
      "schema_version": 4,
      "traces": [{"name": "measured", "first_pid": 0, "origin": "measured", "num_ranks": 2, "step_seconds": [...], ...}]
    },
    "traceEvents": [
    {"name": "process_name", "ph": "M", "pid": 0, "tid": 0, "args": {"name": "measured rank 0"}},
    {"name": "layer0.attention", "cat": "attention", "ph": "X", "pid": 0, "tid": 0, "ts": 12.5, "dur": 3.25,
     "args": {"kind": "attention", "phase": "forward", "shape": [...], "step": 3, "start_seconds": 1.25e-05, ...}}
    ]}
"""

import dataclasses
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from simulator.errors import SpecError
from simulator.specs.calibration import Calibration
from simulator.specs.checkpoint import CheckpointManifest
from simulator.specs.chrome import chrome_events, chrome_headers, traces_from_chrome
from simulator.specs.cluster import ClusterSpec
from simulator.specs.convert import from_plain, shown, to_plain
from simulator.specs.decision import PlanFile
from simulator.specs.document import check_head, document_content, document_head, document_text, json_text, parse_json
from simulator.specs.fanout import FanoutComparison
from simulator.specs.graph import GraphFile
from simulator.specs.run import RunSpec
from simulator.specs.toml import LOCAL, full_cluster, merged, parse_toml, toml_text
from simulator.specs.trace import Trace


def read_run(path: Path) -> RunSpec:
    """Return what a `run.toml` describes; a relative path of a graph is resolved against the file's folder.

    Raises:
        SpecError: if the file cannot be read, or anything in it is wrong.
    """
    tables = parse_toml(_read_text(path), where=str(path))
    if isinstance(tables.get("cluster"), dict):
        tables["cluster"] = _cluster_of_run(tables["cluster"], path)
    run = from_plain(RunSpec, tables, where=str(path), units=True)
    if not isinstance(run.graph, GraphFile):
        return run
    return replace(run, graph=replace(run.graph, path=os.path.join(path.parent.absolute(), run.graph.path)))


def run_toml(run: RunSpec) -> str:
    """Return the text of a `run.toml` that `read_run` turns into an equal value."""
    tables = to_plain(run, units=True)
    cluster = {"name": LOCAL} if run.cluster is None else _cluster_table(run.cluster)
    return toml_text({**tables, "cluster": cluster})


def read_cluster(path: Path) -> ClusterSpec:
    """Return what a `cluster.toml` describes: a cluster in full, or a built-in one with changes.

    Raises:
        SpecError: if the file cannot be read, or anything in it is wrong.
    """
    cluster = full_cluster(parse_toml(_read_text(path), where=str(path)), where=str(path))
    if cluster is None:
        raise SpecError(f'{path}: name = "{LOCAL}" describes no cluster; write it in [cluster] of the run instead')
    return from_plain(ClusterSpec, cluster, where=str(path), units=True)


def cluster_toml(cluster: ClusterSpec) -> str:
    """Return the text of a `cluster.toml` that `read_cluster` turns into an equal value."""
    return toml_text(_cluster_table(cluster))


def write_cluster(path: Path, cluster: ClusterSpec) -> None:
    """Write a cluster as TOML, to be edited and read back."""
    write_text_atomic(path, cluster_toml(cluster))


def write_plan(path: Path, plan_file: PlanFile) -> None:
    """Write a plan with its inputs as JSON."""
    write_text_atomic(path, document_text("plan", to_plain(plan_file)))


def read_plan(path: Path) -> PlanFile:
    """Return what `write_plan` wrote.

    Raises:
        SpecError: if the file cannot be read, is of another kind or version, or was changed.
    """
    return from_plain(PlanFile, document_content(_read_text(path), "plan", where=str(path)), where=str(path))


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write a calibration as JSON."""
    write_text_atomic(path, document_text("calibration", to_plain(calibration)))


def read_calibration(path: Path) -> Calibration:
    """Return what `write_calibration` wrote.

    Raises:
        SpecError: if the file cannot be read, is of another kind or version, or was changed.
    """
    return from_plain(Calibration, document_content(_read_text(path), "calibration", where=str(path)), where=str(path))


def write_fanout(path: Path, comparison: FanoutComparison) -> None:
    """Write a comparison of fan-outs as JSON."""
    write_text_atomic(path, document_text("fanout", to_plain(comparison)))


def read_fanout(path: Path) -> FanoutComparison:
    """Return what `write_fanout` wrote.

    Raises:
        SpecError: if the file cannot be read, is of another kind or version, or was changed.
    """
    return from_plain(FanoutComparison, document_content(_read_text(path), "fanout", where=str(path)), where=str(path))


def write_manifest(path: Path, manifest: CheckpointManifest) -> None:
    """Write what a checkpoint holds as JSON."""
    write_text_atomic(path, document_text("checkpoint", to_plain(manifest)))


def read_manifest(path: Path) -> CheckpointManifest:
    """Return what `write_manifest` wrote.

    Raises:
        SpecError: if the file cannot be read, is of another kind or version, or was changed.
    """
    content = document_content(_read_text(path), "checkpoint", where=str(path))
    return from_plain(CheckpointManifest, content, where=str(path))


def write_trace(path: Path, trace: Trace) -> None:
    """Write one trace as Chrome trace JSON, under the name of its origin."""
    write_traces(path, {trace.origin.value: trace})


def write_traces(path: Path, traces: Mapping[str, Trace]) -> None:
    """Write traces side by side in one Chrome trace JSON, each a group of processes called by its name."""
    headers = chrome_headers(traces)
    head = json_text({**document_head("trace"), "traces": headers})
    events = []
    for header in headers:
        name = header["name"]
        events += chrome_events(traces[name], pid_offset=header["first_pid"], prefix=f"{name} ")
    lines = ",\n".join(map(json.dumps, events))
    write_text_atomic(path, f'{{\n"displayTimeUnit": "ms",\n"graphpilot": {head},\n"traceEvents": [\n{lines}\n]}}\n')


def read_trace(path: Path) -> Trace:
    """Return the one trace of a file that `write_trace` wrote.

    Raises:
        SpecError: if the file cannot be read, is not such a trace, or holds several.
    """
    traces = read_traces(path)
    if len(traces) != 1:
        raise SpecError(f"{path}: must hold one trace, got {len(traces)} ({', '.join(traces)}); write each to its file")
    return next(iter(traces.values()))


def read_traces(path: Path) -> dict[str, Trace]:
    """Return the traces of a file that `write_traces` wrote, by name.

    Raises:
        SpecError: if the file cannot be read, or is not such a trace.
    """
    document = parse_json(_read_text(path), where=str(path))
    table = document if isinstance(document, dict) else {}
    head = check_head(table.get("graphpilot"), "trace", where=str(path))
    headers, events = head.get("traces"), table.get("traceEvents")
    if not isinstance(headers, list) or not isinstance(events, list):
        raise SpecError(f"{path}: traces and traceEvents must be lists, got {shown(headers)} and {shown(events)}")
    return traces_from_chrome(headers, events, where=str(path))


def write_text_atomic(path: Path, text: str) -> None:
    """Write a text file so that, whatever happens, its path holds the old content or the new; makes missing folders.

    Raises:
        SpecError: if the file cannot be written.
    """
    write_atomic(path, lambda file: file.write(text.encode()))


def write_atomic(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file so that, whatever happens, its path holds the old content or the new; makes missing folders.

    Args:
        write: puts the whole content into the opened file.

    Raises:
        SpecError: if the file cannot be written.
    """
    target = path.resolve()
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        if target.exists() and not target.is_file():  # such as /dev/stdout, which must not be replaced
            with target.open("wb") as file:
                write(file)
            return
        if not target.parent.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("xb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SpecError(f"{path}: cannot be written: {error.strerror or error}") from error


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files of `write_atomic` in a folder, which stay behind when a process is killed."""
    for path in folder.glob(".*.tmp"):
        if re.fullmatch(r"\..+\.[0-9a-f]{8}\.tmp", path.name):
            path.unlink(missing_ok=True)


def _cluster_of_run(table: dict[str, Any], path: Path) -> dict[str, Any] | None:
    """Return all fields of the cluster that `[cluster]` of a run names, or None for the machine at hand."""
    if "file" not in table:
        return full_cluster(table, where=str(path), key="cluster.")
    file = table["file"]
    if "name" in table or not isinstance(file, str):
        rule = "cluster.file must be a text and exclude cluster.name"
        raise SpecError(f"{path}: {rule}, got {shown(file)} and {shown(table.get('name'))}")
    changes = {key: value for key, value in table.items() if key != "file"}
    return merged(to_plain(read_cluster(path.parent / file), units=True), changes)


def _cluster_table(cluster: ClusterSpec) -> dict[str, Any]:
    """Return what must be said of a cluster: all but what it has by default."""
    defaults = {field.name: field.default for field in dataclasses.fields(ClusterSpec)}
    table = to_plain(cluster, units=True)
    return {key: value for key, value in table.items() if getattr(cluster, key) != defaults[key]}


def _read_text(path: Path) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise SpecError(f"{path}: is not text in UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}; correct the path") from error
    except ValueError as error:  # a path that no file can have
        raise SpecError(f"{path!r}: cannot be read: {error}") from error
