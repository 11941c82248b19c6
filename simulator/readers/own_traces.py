"""Our own traces (`simulator/specs/files.py`) as recordings, so that a measured run can be replayed as well."""

from collections.abc import Mapping
from pathlib import Path

from simulator.errors import SpecError
from simulator.specs.program import BATCH_KINDS, TaskKind
from simulator.specs.recording import DeviceOperation, KernelKind, Message, Operator, Recording
from simulator.specs.trace import Span, Trace, TraceOrigin

_KINDS = {
    TaskKind.LINEAR: KernelKind.MATRIX_PRODUCT,
    TaskKind.INPUT_LINEAR: KernelKind.MATRIX_PRODUCT,
    TaskKind.PROJECTION: KernelKind.MATRIX_PRODUCT,
    TaskKind.SPARSE_LINEAR: KernelKind.GATHER_SCATTER,
    TaskKind.LAYER_NORM: KernelKind.NORMALISATION,
    TaskKind.ATTENTION: KernelKind.ATTENTION,
    TaskKind.HALO_PACK: KernelKind.GATHER_SCATTER,
    TaskKind.COPY_ROWS: KernelKind.COPY,
    TaskKind.PAD_ROWS: KernelKind.COPY,
    TaskKind.SHARD_COPY: KernelKind.COPY,
    TaskKind.OPTIMIZER: KernelKind.OPTIMIZER,
    TaskKind.CLIP: KernelKind.REDUCTION,
    TaskKind.GRADIENT_NORM: KernelKind.REDUCTION,
    TaskKind.LOSS: KernelKind.REDUCTION,
}


def own_recordings(traces: Mapping[str, Trace], path: Path) -> list[Recording]:
    """Return a recording of each rank of a file's measured trace.

    A span becomes a piece of device work on its stream, a step a range: what a span waits for, the file does not say.

    Raises:
        SpecError: if the file holds no measured trace, or several.
    """
    measured = [trace for trace in traces.values() if trace.origin is TraceOrigin.MEASURED]
    if len(measured) != 1:
        raise SpecError(f"{path}: must hold one measured trace to replay, got {len(measured)}; give measured.json")
    if not measured[0].spans:
        raise SpecError(f"{path}: must hold traced steps, got none; set train.trace_steps and run again")
    return [_recording(measured[0], rank, path) for rank in range(measured[0].num_ranks)]


def _recording(trace: Trace, rank: int, path: Path) -> Recording:
    steps = sorted({span.step for span in trace.spans})
    offsets, clock = {}, 0.0
    for index, step in enumerate(steps):
        offsets[step] = clock
        last = max(span.end_seconds for span in trace.spans if span.step == step)
        clock += max([last, *trace.traced_step_seconds[index : index + 1]])
    ends = [*list(offsets.values())[1:], clock]
    spans = [span for span in trace.spans if span.rank == rank]
    operations = sorted((_operation(span, offsets[span.step]) for span in spans), key=lambda one: one.start_seconds)
    ranges = [
        Operator(
            name=f"ProfilerStep#{step}",
            thread="host",
            start_seconds=offsets[step],
            duration_seconds=end - offsets[step],
            is_annotation=True,
        )
        for step, end in zip(steps, ends, strict=True)
    ]
    return Recording(
        name=str(path),
        rank=rank,
        num_ranks=trace.num_ranks,
        device_name=dict(trace.environment).get("device", ""),
        origin_nanoseconds=0,
        operations=tuple(operations),
        calls=(),
        operators=tuple(ranges),
        read_counts=(("span", len(spans)), ("step", len(steps))),
    )


def _operation(span: Span, offset_seconds: float) -> DeviceOperation:
    message = None
    if span.kind.is_collective:
        message = Message(
            operation=span.kind.value, num_bytes=sum(span.shape), num_ranks=len(span.group), group=span.group
        )
    kind = KernelKind.COLLECTIVE if message else _KINDS.get(span.kind, KernelKind.ELEMENTWISE)
    return DeviceOperation(
        name=span.name,
        kind=KernelKind.OTHER if span.kind in BATCH_KINDS else kind,
        stream=span.stream.value,
        start_seconds=offset_seconds + span.start_seconds,
        duration_seconds=span.duration_seconds,
        message=message,
        waiting_seconds=span.waiting_seconds,
    )
