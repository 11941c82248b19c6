"""Reads traces of PyTorch's profiler (Kineto's Chrome JSON, plain or gzipped), of all its versions and vendors."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulator.errors import SpecError
from simulator.readers.kineto_names import call_kind, collective_operation, element_bytes, kernel_kind
from simulator.readers.nesting import Nesting
from simulator.specs.convert import shown
from simulator.specs.recording import DeviceOperation, HostCall, KernelKind, Message, Operator, Recording

_DEVICE = {"kernel": None, "gpu_memcpy": KernelKind.COPY, "gpu_memset": KernelKind.FILL}
_CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver")
_OPERATORS = ("cpu_op", "user_annotation")
# Why events of a category are not kept.
_LEFT_OUT = {
    "gpu_user_annotation": "shadow of a range on the host",
    "cuda_sync": "detail of a call, kept with it",
    "overhead": "the profiler's own work, part of the call that it delays",
    "Trace": "frame of the whole recording",
    "python_function": "Python frame, no work of its own",
    "cpu_instant_event": "no duration",
}
_RANK_IN_NAME = re.compile(r"(?:rank|worker)[-_]?(\d+)", re.IGNORECASE)


def is_kineto(document: object) -> bool:
    """Return whether JSON is a Chrome trace: a table with `traceEvents`, or a list of events."""
    if isinstance(document, dict):
        return isinstance(document.get("traceEvents"), list)
    return isinstance(document, list) and bool(document) and isinstance(document[0], dict) and "ph" in document[0]


def rank_in_name(path: Path) -> int | None:
    """Return the rank in a file's name, such as "rank-34.pt.trace.json" or "worker2.json"; None without one."""
    match = _RANK_IN_NAME.search(path.name)
    return int(match[1]) if match else None


def kineto_recording(document: Any, path: Path) -> Recording:
    """Return what a Kineto trace says of its rank.

    Args:
        document: the parsed JSON.
        path: of the file: its name is that of the recording, and may tell the rank.

    Raises:
        SpecError: if an event is malformed, or there is no complete event.
    """
    header = document if isinstance(document, dict) else {}
    events = header.get("traceEvents", document)
    reading = _Reading(path)
    for index, event in enumerate(events):
        reading.take(index, event)
    return reading.finish(header)


@dataclass(slots=True)
class _Reading:
    """Events of one file, sorted into operators, calls and device work."""

    path: Path
    counts: Counter[str] = field(default_factory=Counter)
    dropped: Counter[tuple[str, str]] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)
    host: list[dict[str, Any]] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    device: list[dict[str, Any]] = field(default_factory=list)
    syncs: dict[int, dict[str, Any]] = field(default_factory=dict)

    def take(self, index: int, event: object) -> None:
        """Put a complete event where it belongs; arrows, names and instants say nothing that these do not."""
        if not isinstance(event, dict):
            raise SpecError(f"{self.path}: traceEvents[{index}] must be a table, got {shown(event)}; export it again")
        if event.get("ph") != "X":
            return
        category = str(event.get("cat", ""))
        self.counts[category] += 1
        if category not in _DEVICE and category not in _CALLS and category not in _OPERATORS:
            if category == "cuda_sync" and isinstance(_args(event).get("correlation"), int):
                self.syncs[event["args"]["correlation"]] = event["args"]
            self.dropped[category, _LEFT_OUT.get(category, "category unknown")] += 1
            return
        if (
            not _is_number(event.get("ts"))
            or not _is_number(event.get("dur", 0))
            or not isinstance(event.get("name"), str)
        ):
            found = ", ".join(shown(event.get(key)) for key in ("name", "ts", "dur"))
            raise SpecError(
                f"{self.path}: traceEvents[{index}] must have a name, ts and dur in microseconds, got {found}; "
                "export the trace again"
            )
        if event.get("dur", 0) < 0:
            self.dropped[category, "ends before it begins"] += 1
        elif category in _DEVICE:
            self.device.append(event)
        elif category in _CALLS:
            self.calls.append(event)
        else:
            self.host.append(event)

    def finish(self, header: Mapping[str, Any]) -> Recording:
        """Return the recording of all events taken."""
        kept = [*self.host, *self.calls, *self.device]
        if not kept:
            raise SpecError(
                f"{self.path}: must hold complete events of operators, runtime calls or kernels, got none; record "
                "with torch.profiler and export_chrome_trace"
            )
        origin = min(event["ts"] for event in kept)
        base_nanoseconds = header.get("baseTimeNanoseconds", 0)
        operators = sorted((_operator(event, origin) for event in self.host), key=_outer_first)
        calls = sorted((self._call(event, origin) for event in self.calls), key=lambda call: call.start_seconds)
        distributed = header.get("distributedInfo") or {}
        groups = _groups(distributed)
        nesting = Nesting(operators, calls)
        operations = [self._operation(event, origin, nesting, groups) for event in self.device]
        operations += self._gloo(operators, groups)
        operations.sort(key=lambda operation: operation.start_seconds)
        return Recording(
            name=str(self.path),
            rank=self._rank(distributed),
            num_ranks=_count(distributed.get("world_size")),
            device_name=self._device_name(header),
            origin_nanoseconds=int(base_nanoseconds) + round(origin * 1000),
            operations=tuple(operations),
            calls=tuple(calls),
            operators=tuple(operator for operator in operators if not _is_gloo(operator)),
            read_counts=tuple(sorted(self.counts.items())),
            dropped=tuple((category, reason, count) for (category, reason), count in sorted(self.dropped.items())),
            notes=tuple(self.notes),
        )

    def _rank(self, distributed: Mapping[str, Any]) -> int | None:
        rank = distributed.get("rank")
        if isinstance(rank, int) and not isinstance(rank, bool):
            return rank
        named = rank_in_name(self.path)
        if named is not None:
            self.notes.append(f"the rank, {named}, is taken from the file's name")
        return named

    def _device_name(self, header: Mapping[str, Any]) -> str:
        devices = {
            int(entry["id"]): str(entry.get("name", ""))
            for entry in header.get("deviceProperties") or []
            if isinstance(entry, dict) and isinstance(entry.get("id"), int)
        }
        used = Counter(_args(event).get("device") for event in self.device)
        number = used.most_common(1)[0][0] if used else None
        return devices.get(number, "") if number is not None else ""

    def _call(self, event: dict[str, Any], origin: float) -> HostCall:
        args = _args(event)
        correlation = args.get("correlation")
        sync = self.syncs.get(correlation, {}) if isinstance(correlation, int) else {}
        stream = sync.get("stream")
        device = sync.get("device", "")
        return HostCall(
            name=event["name"],
            kind=call_kind(event["name"]),
            thread=_thread(event),
            start_seconds=(event["ts"] - origin) / 1e6,
            duration_seconds=event.get("dur", 0) / 1e6,
            correlation=correlation if isinstance(correlation, int) else None,
            stream=_stream(device, stream) if isinstance(stream, int) and 0 <= stream < 2**31 else None,
            awaits_stream=_stream(device, sync["wait_on_stream"]) if "wait_on_stream" in sync else None,
            awaits_record=sync.get("wait_on_cuda_event_record_corr_id"),
        )

    def _operation(
        self, event: dict[str, Any], origin: float, nesting: Nesting, groups: Mapping[str, tuple[int, ...]]
    ) -> DeviceOperation:
        args, name = _args(event), event["name"]
        correlation = args.get("correlation")
        correlation = correlation if isinstance(correlation, int) else None
        operator = nesting.operator_of(correlation)
        kind = _DEVICE[event["cat"]] or kernel_kind(name, "" if operator is None else nesting.name_of(operator))
        message = None
        if kind is KernelKind.COLLECTIVE:
            message = _message(name, args, nesting.enclosing(correlation), groups)
        return DeviceOperation(
            name=name,
            kind=kind,
            stream=_stream(args.get("device", event.get("pid")), args.get("stream", event.get("tid"))),
            start_seconds=(event["ts"] - origin) / 1e6,
            duration_seconds=event.get("dur", 0) / 1e6,
            correlation=correlation,
            operator=operator,
            num_bytes=_count(args.get("bytes")),
            is_pageable_copy=kind is KernelKind.COPY and "Pageable" in name,
            message=message,
        )

    def _gloo(self, operators: Sequence[Operator], groups: Mapping[str, tuple[int, ...]]) -> list[DeviceOperation]:
        """Return gloo's collectives, which run on threads of their own, as work on a stream each."""
        found = []
        for operator in operators:
            if _is_gloo(operator):
                num_bytes = _shape_bytes(operator.shapes, operator.dtypes)
                world = max(groups.values(), key=len, default=())
                message = Message(
                    operation=collective_operation(operator.name) or "send_recv",
                    num_bytes=num_bytes,
                    num_ranks=len(world) or None,
                    group=world,
                )
                found.append(
                    DeviceOperation(
                        name=operator.name,
                        kind=KernelKind.COLLECTIVE,
                        stream=f"gloo {operator.thread}",
                        start_seconds=operator.start_seconds,
                        duration_seconds=operator.duration_seconds,
                        num_bytes=num_bytes,
                        message=message,
                    )
                )
        return found


def _outer_first(operator: Operator) -> tuple[float, float]:
    return operator.start_seconds, -operator.duration_seconds


def _operator(event: dict[str, Any], origin: float) -> Operator:
    args = _args(event)
    record_id = args.get("Record function id")
    return Operator(
        name=event["name"],
        thread=_thread(event),
        start_seconds=(event["ts"] - origin) / 1e6,
        duration_seconds=event.get("dur", 0) / 1e6,
        shapes=flat_shapes(args.get("Input Dims") or args.get("Input dims") or []),
        dtypes=tuple(map(str, args.get("Input type") or ())),
        is_annotation=event["cat"] == "user_annotation",
        record_id=record_id if isinstance(record_id, int) and record_id > 0 else None,
    )


def flat_shapes(shapes: Any) -> tuple[tuple[int, ...], ...]:
    """Return shapes of inputs, those of lists of tensors one after another; numbers have the shape ()."""
    found: list[tuple[int, ...]] = []
    for shape in shapes if isinstance(shapes, list) else []:
        if isinstance(shape, list) and shape and all(isinstance(inner, list) for inner in shape):
            found += flat_shapes(shape)
        elif isinstance(shape, list) and all(_is_number(size) for size in shape):
            found.append(tuple(int(size) for size in shape))
        else:
            found.append(())
    return tuple(found)


def _message(
    name: str, args: Mapping[str, Any], around: Sequence[Operator], groups: Mapping[str, tuple[int, ...]]
) -> Message:
    """Return what a kernel of NCCL or RCCL sends: by its own arguments, else by the operators around its launch."""
    named = [
        operator
        for operator in around
        if operator.name.startswith(("nccl:", "rccl:", "c10d::")) or "param_comms" in operator.name
    ]
    words = [str(args.get("Collective name", "")), *(operator.name for operator in named), name]
    operation = next((found for word in words if (found := collective_operation(word))), "send_recv")
    num_bytes = None
    if _is_number(args.get("In msg nelems")):
        size = element_bytes(str(args.get("dtype", "")))
        num_bytes = int(args["In msg nelems"]) * size if size else None
    if num_bytes is None:
        annotated = (operator for operator in named if operator.is_annotation)
        num_bytes = next((size for one in annotated if (size := _shape_bytes(one.shapes, one.dtypes))), None)
    group_name = str(args.get("Process Group Name", ""))
    group = _ranks(args.get("Process Group Ranks")) or groups.get(group_name, ())
    return Message(
        operation=operation,
        num_bytes=num_bytes,
        num_ranks=_count(args.get("Group size")) or len(group) or None,
        group=group,
        group_name=group_name,
    )


def _shape_bytes(shapes: Sequence[tuple[int, ...]], dtypes: Sequence[str]) -> int | None:
    """Return the bytes of the first tensor; None where its shape or format is unknown."""
    size = element_bytes(dtypes[0]) if dtypes else None
    if not shapes or not shapes[0] or size is None:
        return None
    for length in shapes[0]:
        size *= length
    return size


def _groups(distributed: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the ranks of each process group that the header names."""
    found = {}
    for entry in distributed.get("pg_config") or []:
        if isinstance(entry, dict) and isinstance(entry.get("ranks"), list):
            found[str(entry.get("pg_name", ""))] = tuple(int(rank) for rank in entry["ranks"])
    return found


def _ranks(value: object) -> tuple[int, ...]:
    """Return the ranks in a text such as "[0, 1]"; none where it was cut short, as in "[0, 1, ...]"."""
    if not isinstance(value, str):
        return ()
    try:
        found = json.loads(value)
    except json.JSONDecodeError:
        return ()
    return tuple(found) if isinstance(found, list) and all(isinstance(rank, int) for rank in found) else ()


def _is_gloo(operator: Operator) -> bool:
    return operator.is_annotation and operator.name.startswith("gloo:")


def _args(event: Mapping[str, Any]) -> dict[str, Any]:
    args = event.get("args")
    return args if isinstance(args, dict) else {}


def _thread(event: Mapping[str, Any]) -> str:
    return f"thread {event.get('tid', 0)}"


def _stream(device: object, stream: object) -> str:
    return f"device {device} stream {stream}"


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value == value and abs(value) < 1e300
