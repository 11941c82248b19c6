"""Reads host execution traces of PyTorch (ExecutionTraceObserver, Chakra's schemas) and joins them to Kineto traces.

A host trace has operators with shapes and types, but no times. Its `rf_id` is Kineto's "Record function id"; where
Kineto's trace is older and has none, operators are matched by the order of their names on each thread.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from simulator.errors import SpecError
from simulator.readers.kineto import flat_shapes, rank_in_name
from simulator.readers.kineto_names import collective_operation, element_bytes
from simulator.specs.convert import shown
from simulator.specs.recording import Message, Operator, Recording

_SCHEMAS = re.compile(r"1\.(0|1)\.\d+(-chakra\.\d+\.\d+\.\d+)?")
# Nodes that the observer makes for its own frame; the profiler has none of them.
_FRAME = "[pytorch|profiler|"
_TENSOR = re.compile(r"Tensor\(([^)]*)\)")
# A join of fewer operators than this is a pair of files that do not belong together.
_MIN_JOINED_RATIO = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class HostNode:
    """One operator of a host trace.

    Attributes:
        record_id: `rf_id`; counts operators in the order in which they began.
        thread: number that the observer gave to its thread.
    """

    name: str
    record_id: int
    thread: int
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTrace:
    """A host trace: its nodes, and how many of its own frame were left out."""

    path: Path
    schema: str
    rank: int | None
    nodes: tuple[HostNode, ...]
    num_frames: int


def is_host_trace(document: object) -> bool:
    """Return whether JSON is a host trace: a schema and nodes."""
    return isinstance(document, dict) and isinstance(document.get("nodes"), list) and "schema" in document


def host_trace(document: Mapping[str, Any], path: Path) -> HostTrace:
    """Return a host trace's operators.

    Raises:
        SpecError: if its schema is unknown or a node is malformed.
    """
    schema = document["schema"]
    if not isinstance(schema, str) or not _SCHEMAS.fullmatch(schema):
        raise SpecError(f"{path}: schema must be 1.0.x, 1.1.x or 1.1.x-chakra.y, got {shown(schema)}; record it again")
    nodes, num_frames = [], 0
    for index, node in enumerate(document["nodes"]):
        found = _node(node, f"{path}: nodes[{index}]")
        if found.name.startswith(_FRAME):
            num_frames += 1
        else:
            nodes.append(found)
    if not nodes:
        raise SpecError(f"{path}: must hold operators, got none; start the observer before the step")
    return HostTrace(path=path, schema=schema, rank=rank_in_name(path), nodes=tuple(nodes), num_frames=num_frames)


def _node(node: object, where: str) -> HostNode:
    """Return a node of either layout: fields beside the name, or a list of attributes."""
    if not isinstance(node, dict) or not isinstance(node.get("name"), str):
        raise SpecError(f"{where} must be a table with a name, got {shown(node)}")
    attributes = {
        entry["name"]: entry.get("value")
        for entry in node.get("attrs") or []
        if isinstance(entry, dict) and "name" in entry
    }
    inputs = node.get("inputs")
    nested = inputs if isinstance(inputs, dict) else {}
    record_id, thread = (attributes.get(key, node.get(key)) for key in ("rf_id", "tid"))
    if not isinstance(record_id, int) or not isinstance(thread, int):
        raise SpecError(f"{where} must have whole numbers rf_id and tid, got {shown(record_id)} and {shown(thread)}")
    return HostNode(
        name=node["name"],
        record_id=record_id,
        thread=thread,
        shapes=flat_shapes(nested.get("shapes", node.get("input_shapes")) or []),
        dtypes=tuple(map(str, nested.get("types", node.get("input_types")) or ())),
    )


def joined(recording: Recording, host: HostTrace) -> Recording:
    """Return a recording whose operators have the shapes of a host trace, and whose collectives have sizes.

    Raises:
        SpecError: if fewer than nine tenths of the host trace's operators are in the recording.
    """
    node_of = _by_record_id(recording, host)
    way = "record ids"
    if _num_nodes(node_of) < _MIN_JOINED_RATIO * len(host.nodes):
        node_of, way = _by_names(recording, host), "the order of names"
    num_joined = _num_nodes(node_of)
    if num_joined < _MIN_JOINED_RATIO * len(host.nodes):
        raise SpecError(
            f"{host.path}: belongs to another run than {recording.name}: {num_joined:,} of its {len(host.nodes):,} "
            "operators are in it; give files of the same steps and rank"
        )
    operators = tuple(
        replace(
            operator, shapes=node_of[index].shapes or operator.shapes, dtypes=node_of[index].dtypes or operator.dtypes
        )
        if index in node_of
        else operator
        for index, operator in enumerate(recording.operators)
    )
    note = (
        f"{host.path}: {num_joined:,} of {len(host.nodes):,} operators joined by {way}, "
        f"{host.num_frames} frames of the observer left out"
    )
    return replace(_with_sizes(recording, operators, node_of), notes=(*recording.notes, note))


def _num_nodes(node_of: Mapping[int, HostNode]) -> int:
    return len({id(node) for node in node_of.values()})


def _by_record_id(recording: Recording, host: HostTrace) -> dict[int, HostNode]:
    of_id = {node.record_id: node for node in host.nodes}
    found = {}
    for index, operator in enumerate(recording.operators):
        node = of_id.get(operator.record_id) if operator.record_id is not None else None
        if node is not None and node.name == operator.name:
            found[index] = node
    return found


def _by_names(recording: Recording, host: HostTrace) -> dict[int, HostNode]:
    """Return the node of each operator, for threads whose sequences of names agree best."""
    threads: dict[str, list[int]] = defaultdict(list)
    for index, operator in enumerate(recording.operators):
        threads[operator.thread].append(index)
    nodes_of: dict[int, list[HostNode]] = defaultdict(list)
    for node in sorted(host.nodes, key=lambda node: node.record_id):
        nodes_of[node.thread].append(node)
    found: dict[int, HostNode] = {}
    for nodes in sorted(nodes_of.values(), key=len, reverse=True):
        best: dict[int, HostNode] = {}
        for indices in threads.values():
            match = _aligned(nodes, indices, recording.operators)
            best = match if len(match) > len(best) and not match.keys() & found.keys() else best
        found |= best
    return found


def _aligned(nodes: Sequence[HostNode], indices: Sequence[int], operators: Sequence[Operator]) -> dict[int, HostNode]:
    """Return nodes of one thread beside operators of another: all runs of equal names, else what a diff finds equal.

    A host trace is often of one step, and a profiler's of several that are alike: all of them get its shapes.
    """
    names = [node.name for node in nodes]
    others = [operators[index].name for index in indices]
    found: dict[int, HostNode] = {}
    start = 0
    while start <= len(others) - len(names):
        if others[start] == names[0] and others[start : start + len(names)] == names:
            found |= zip(indices[start : start + len(names)], nodes, strict=True)
            start += len(names)
        else:
            start += 1
    if found:
        return found
    if len(others) > 4 * len(names) or not (Counter(names) & Counter(others)):
        return {}  # a diff is quadratic, and would match bits of many steps
    blocks = SequenceMatcher(None, names, others, autojunk=False).get_matching_blocks()
    return {indices[block.b + i]: nodes[block.a + i] for block in blocks for i in range(block.size)}


def _with_sizes(recording: Recording, operators: tuple[Operator, ...], node_of: Mapping[int, HostNode]) -> Recording:
    """Return a recording whose collectives without sizes have those of the calls of c10d around their launch."""
    calls = [
        (operators[index], bytes_)
        for index, node in sorted(node_of.items())
        if collective_operation(node.name) and (bytes_ := _sent_bytes(node))
    ]
    launches = {call.correlation: call for call in recording.calls if call.correlation is not None}
    operations = []
    for operation in recording.operations:
        launch = None if operation.correlation is None else launches.get(operation.correlation)
        if operation.message and operation.message.num_bytes is None and launch is not None:
            sizes = [
                size
                for call, size in calls
                if call.thread == launch.thread and call.start_seconds <= launch.start_seconds <= call.end_seconds
            ]
            if sizes:
                message: Message = replace(operation.message, num_bytes=sizes[-1])
                operation = replace(operation, message=message)
        operations.append(operation)
    return replace(recording, operations=tuple(operations), operators=operators)


def _sent_bytes(node: HostNode) -> int | None:
    """Return the bytes of the last tensor of a collective's inputs, which is what it sends."""
    sizes = []
    for shape, dtype in zip(node.shapes, node.dtypes, strict=False):
        match = _TENSOR.search(dtype)
        width = element_bytes(match[1]) if match else None
        if width and shape:
            for length in shape:
                width *= length
            sizes.append(width)
    return sizes[-1] if sizes else None
