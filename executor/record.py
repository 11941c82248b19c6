"""Marks the tasks of a step under the program's names, and turns device timings into a Trace.

The backward pass is named by hooks: when autograd reaches the node that made a task's result, the backward task of
that name begins, and whatever named task ran before it ends. Autograd runs nodes in the reverse of the order in
which they were made, so these spans tile the backward pass. While recording is off, nothing is marked, but the position
of the rank is noted: tasks of the forward pass and the update, and every collective.
"""

import bisect
import contextlib
import gzip
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from executor.mesh import Place
from executor.operations import Operation
from executor.position import Position
from simulator.specs.program import HOST_COPIES, Phase, Stream, TaskKind, stream_of, task_name
from simulator.specs.trace import Span
from simulator.specs.units import Dtype

# Ranges that torch opens by itself: around steps of the profiler, and inside tasks around NCCL's calls (seen in
# ../shared/measured/h200x2/kineto_ddp_rank0.json.gz) and an optimizer's step.
_FOREIGN_RANGES = ("ProfilerStep", "nccl:", "Optimizer.")


@dataclass(slots=True, kw_only=True)
class Mark:
    """A task under way or done; instants by the host's monotonic clock.

    Attributes:
        is_followed: a collective that goes on after its call: it ends with its work, not with the call.
        done_seconds: when that work told its end; 0 before, and where it tells none.
        stream: None for that of its kind.
        paused_seconds: in which other tasks ran in its midst.
    """

    name: str
    kind: TaskKind
    phase: Phase
    shape: tuple[int, ...]
    dtype: Dtype
    group: tuple[int, ...] = ()
    start_seconds: float = 0.0
    end_seconds: float = 0.0
    annotation: Any = None
    is_followed: bool = False
    done_seconds: float = 0.0
    stream: Stream | None = None
    paused_seconds: float = 0.0


class Recorder:
    """Marks tasks of this rank while it is switched on.

    Args:
        annotate: also open a `torch.profiler.record_function` range for each task. A profiler then ties kernels to
            tasks, which is how times on GPUs are taken; on CPUs the host's clock is enough.
        precision: number format of activations.
        position: is told which task this rank is in, also while nothing is marked.
        kineto: folder for the profiler's own file of each recorded step; None keeps none.
    """

    def __init__(
        self,
        *,
        annotate: bool = False,
        precision: Dtype = Dtype.FLOAT32,
        position: Position | None = None,
        kineto: Path | None = None,
    ) -> None:
        self.is_on = False
        self.kineto = kineto
        self.position = Position() if position is None else position
        self.annotate = annotate
        self.precision = precision
        self.phase = Phase.FORWARD
        # What runs an operation, and is told what else made results: a layer that computes some of them again looks on
        # (`executor/recompute.py`).
        self.compute: Callable[[str, Operation, tuple[Any, ...]], Any] = _compute
        self.remember: Callable[
            [str, Callable[..., Sequence[torch.Tensor]], Sequence[Any], Sequence[torch.Tensor]], None
        ]
        self.remember = _forget
        self._prefix = self._scope = ""
        self._marks: list[Mark] = []
        self._open: Mark | None = None

    def start(self, prefix: str = "") -> None:
        """Begin to mark, with no marks; every name begins with `prefix`."""
        self._prefix = prefix
        self._marks = []
        self._open = None
        self.phase = Phase.FORWARD
        self.is_on = True

    def stop(self) -> list[Mark]:
        """End to mark; return the marks."""
        self._close()
        self.is_on = False
        return self._marks

    @contextlib.contextmanager
    def inside(self, scope: str) -> Iterator[None]:
        """Begin the names of tasks inside with the name of a pass, but for those of updates."""
        self._scope = scope
        yield
        self._scope = ""

    def run(self, name: str, operation: Operation, *arguments: Any) -> Any:
        """Return what the operation makes of the arguments, marked as a task forward and backward."""
        self.position.task = self._scope + name
        if not self.is_on:
            return self.compute(name, operation, arguments)
        shape = operation.shape(*arguments)
        with self.task(name, operation.kind, self.phase, shape):
            result = self.compute(name, operation, arguments)
        if self.phase is Phase.FORWARD:
            self._name_backward(name, operation.kind, shape, result)
        return result

    @contextlib.contextmanager
    def task(
        self,
        name: str,
        kind: TaskKind,
        phase: Phase,
        shape: tuple[int, ...],
        group: tuple[int, ...] = (),
        dtype: Dtype | None = None,
    ) -> Iterator[Mark | None]:
        """Mark what runs inside as a task; inside the backward pass the task lasts until the next one begins.

        Args:
            group: ranks of a collective.
            dtype: number format of what it works on, if not that of activations.

        Yields:
            The mark, for `follow`; None while nothing is marked.
        """
        if group:
            self.position.enter(self._full_name(name, phase))
        else:
            self.position.task = self._full_name(name, Phase.FORWARD)
        mark = self._begin(name, kind, phase, shape, group, dtype) if self.is_on else None
        yield mark
        if group:
            self.position.leave()
        if mark is not None and phase is not Phase.BACKWARD:
            self._close()

    def open(self, name: str, kind: TaskKind, phase: Phase, shape: tuple[int, ...], *, again: bool = True) -> None:
        """Begin a task that lasts until the next one begins, for what runs between calls that others make of us.

        Args:
            again: begin it also where it is the one that is open.
        """
        self.position.task = name
        if self.is_on and (
            again or self._open is None or self._open.name != self._prefix + self._full_name(name, phase)
        ):
            self._begin(name, kind, phase, shape, dtype=Dtype.FLOAT32)

    def shaped(self, shape: tuple[int, ...]) -> None:
        """Give the task that is under way its shape, where that is known only once it is done."""
        if self._open is not None:
            self._open.shape = shape

    def pause(self) -> None:
        """End the task under way; what runs until the next one begins, such as waiting for others, has no name."""
        if self.is_on:
            self._close()

    def follow(self, mark: Mark | None, work: dist.Work) -> None:
        """Let a collective's mark last until its work is done, as far as the work tells, else until `waited`."""
        if mark is None:
            return
        mark.is_followed = True

        def note(_: object) -> None:
            mark.done_seconds = time.perf_counter()

        # gloo tells the end of all but a reduce-scatter.
        with contextlib.suppress(RuntimeError):
            work.get_future().then(note)

    def waited(self, mark: Mark | None) -> None:
        """End the mark of a collective whose work is done."""
        if mark is not None and mark.is_followed:
            mark.end_seconds = max(mark.done_seconds or time.perf_counter(), mark.start_seconds)

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Mark forward tasks inside as computed again; the backward task that asked for them begins after them."""
        if not self.is_on:
            yield
            return
        interrupted, self._open = self._open, None
        if interrupted is not None:
            self._exit_annotation(interrupted)
        self.phase = Phase.RECOMPUTE
        yield
        self.phase = Phase.FORWARD
        if interrupted is not None:
            self._enter(interrupted)

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Mark tasks inside in the midst of the one that is open, which goes on after them."""
        if not self.is_on:
            yield
            return
        interrupted, self._open = self._open, None
        started = time.perf_counter()
        if interrupted is not None:
            self._exit_annotation(interrupted)
        yield
        self._close()
        if interrupted is not None:
            interrupted.paused_seconds += time.perf_counter() - started
            self._open = interrupted
            self._enter_annotation(interrupted)

    def _name_backward(self, name: str, kind: TaskKind, shape: tuple[int, ...], result: Any) -> None:
        tensor = result[0] if isinstance(result, tuple) else result
        if tensor.grad_fn is None:
            return

        def begin(_: object) -> None:
            if self.is_on:
                self.position.task = self._full_name(name, Phase.BACKWARD)
                self._begin(name, kind, Phase.BACKWARD, shape)

        tensor.grad_fn.register_prehook(begin)

    def _begin(
        self,
        name: str,
        kind: TaskKind,
        phase: Phase,
        shape: tuple[int, ...],
        group: tuple[int, ...] = (),
        dtype: Dtype | None = None,
    ) -> Mark:
        self._close()
        is_single = phase is Phase.UPDATE or kind in HOST_COPIES
        dtype = dtype or (Dtype.FLOAT32 if is_single else self.precision)
        full_name = self._prefix + self._full_name(name, phase)
        mark = Mark(name=full_name, kind=kind, phase=phase, shape=shape, dtype=dtype, group=group)
        self._enter(mark)
        return mark

    def _full_name(self, name: str, phase: Phase) -> str:
        return ("" if phase is Phase.UPDATE else self._scope) + task_name(name, phase)

    def _enter(self, mark: Mark) -> None:
        self._open = mark
        self._enter_annotation(mark)
        mark.start_seconds, mark.paused_seconds = time.perf_counter(), 0.0

    def _enter_annotation(self, mark: Mark) -> None:
        if self.annotate:
            mark.annotation = torch.profiler.record_function(mark.name)
            mark.annotation.__enter__()

    def _close(self) -> None:
        mark, self._open = self._open, None
        if mark is not None:
            mark.end_seconds = time.perf_counter() - mark.paused_seconds
            self._exit_annotation(mark)
            self._marks.append(mark)

    def _exit_annotation(self, mark: Mark) -> None:
        if mark.annotation is not None:
            mark.annotation.__exit__(None, None, None)
            mark.annotation = None


def _compute(_: str, operation: Operation, arguments: tuple[Any, ...]) -> Any:
    return operation.function(*arguments)


def _forget(*_: object) -> None:
    pass


class StepTracer:
    """Records whole steps of one rank as spans.

    On CPUs the marks are the spans. On GPUs a profiler runs over the steps, and a span covers the kernels that
    were launched inside a task's range. Where the recorder keeps the profiler's files, it runs on CPUs too.
    """

    def __init__(self, recorder: Recorder, place: Place) -> None:
        self._recorder, self._place = recorder, place
        self._spans: list[Span] = []

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Record what runs inside as a step; the ranks begin it together."""
        if self._place.device.type == "cuda":
            with self._kernels_of(step):
                yield
            return
        with self._profile_kept(step):
            self._meet()
            with _range_of(step):
                self._recorder.start()
                yield
                marks = self._recorder.stop()
        self._spans.extend(_span_of_mark(mark, step, self._place.rank) for mark in marks)

    @contextlib.contextmanager
    def _kernels_of(self, step: int) -> Iterator[None]:
        kept = self._kept_file(step)
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities, record_shapes=kept is not None) as profiler:
            self._meet()
            torch.cuda.synchronize()
            with _range_of(step):
                self._recorder.start()
                yield
                marks = self._recorder.stop()
                torch.cuda.synchronize()
        events = profiled_events(profiler, kept)
        self._spans.extend(spans_of_kernels(events, marks, step=step, rank=self._place.rank))

    @contextlib.contextmanager
    def _profile_kept(self, step: int) -> Iterator[None]:
        """Let the profiler run on a CPU, if its file is to be kept."""
        kept = self._kept_file(step)
        if kept is None:
            yield
            return
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
            yield
        profiler.export_chrome_trace(str(kept))

    def _kept_file(self, step: int) -> Path | None:
        """Return where the profiler's file is to be kept: a folder for each step, in it a file for each rank."""
        if self._recorder.kineto is None:
            return None
        folder = self._recorder.kineto / f"step{step}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"rank{self._place.rank}.json.gz"

    def _meet(self) -> None:
        if self._place.world is not None:
            with self._recorder.position.waiting("the beginning of a traced step"):
                dist.barrier(self._place.world)

    def spans(self) -> list[Span]:
        """Return the spans of all recorded steps; starts are by a clock that the ranks of a host share."""
        return self._spans


def _range_of(step: int) -> torch.profiler.record_function:
    """Return the range of a step, as torch's profiler names it when it is told of steps."""
    return torch.profiler.record_function(f"ProfilerStep#{step}")


def _span_of_mark(mark: Mark, step: int, rank: int) -> Span:
    return Span(
        rank=rank,
        step=step,
        stream=mark.stream or stream_of(mark.kind),
        name=mark.name,
        kind=mark.kind,
        phase=mark.phase,
        shape=mark.shape,
        start_seconds=mark.start_seconds,
        duration_seconds=mark.end_seconds - mark.start_seconds,
        dtype=mark.dtype,
        group=mark.group,
    )


def profiled_events(profiler: torch.profiler.profile, kept: Path | None = None) -> list[dict[str, Any]]:
    """Return the events of a finished profile, as its Chrome trace holds them; torch writes that once.

    Args:
        kept: gets the trace too, packed; None for no file.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kineto.json"
        profiler.export_chrome_trace(str(path))
        content = path.read_bytes()
    if kept is not None:
        kept.write_bytes(gzip.compress(content))
    events: list[dict[str, Any]] = json.loads(content)["traceEvents"]
    return events


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTime:
    """Kernels that one task launched, on the device's clock.

    Attributes:
        start_seconds: of the first.
        busy_seconds: sum of their durations.
    """

    start_seconds: float
    busy_seconds: float


def kernel_times(events: Sequence[dict[str, Any]]) -> tuple[dict[str, KernelTime], float]:
    """Return the kernels of each named range of a Kineto trace, and the seconds of kernels outside all ranges.

    A kernel belongs to the range that was open on the thread that launched it, found by correlation id.

    Args:
        events: `traceEvents` of a Chrome trace that `torch.profiler` wrote.
    """
    ranges: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    launches: dict[int, tuple[int, float]] = {}
    kernels = []
    for event in events:
        category = event.get("cat")
        if category == "user_annotation":
            ranges[event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif category in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {}):
            launches[event["args"]["correlation"]] = (event["tid"], event["ts"])
        elif category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kernels.append(event)
    for found in ranges.values():
        found.sort()
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for kernel in kernels:
        name = _range_at(ranges, launches.get(kernel["args"].get("correlation")))
        spans[name].append((kernel["ts"] / 1e6, kernel["dur"] / 1e6))
    unnamed = sum(seconds for _, seconds in spans.pop("", []))
    times = {
        name: KernelTime(start_seconds=min(found)[0], busy_seconds=sum(seconds for _, seconds in found))
        for name, found in spans.items()
    }
    return times, unnamed


def _range_at(ranges: dict[int, list[tuple[float, float, str]]], launch: tuple[int, float] | None) -> str:
    if launch is None:
        return ""
    thread, instant = launch
    found = ranges.get(thread, [])
    # Ranges of tasks follow one another; one around several tasks started earlier.
    for start, end, name in reversed(found[: bisect.bisect_right(found, (instant, float("inf"), ""))]):
        if start <= instant <= end and not name.startswith(_FOREIGN_RANGES):
            return name
    return ""


def spans_of_kernels(events: Sequence[dict[str, Any]], marks: Iterable[Mark], *, step: int, rank: int) -> list[Span]:
    """Return a span for each marked task with the time of its kernels; a task without kernels takes none."""
    times, _ = kernel_times(events)
    spans = []
    latest = 0.0
    for mark in marks:
        # What the host computes itself launches nothing that counts.
        host_seconds = mark.end_seconds - mark.start_seconds if mark.kind is TaskKind.HOST_OPTIMIZER else 0.0
        kernel = KernelTime(start_seconds=latest, busy_seconds=host_seconds)
        if mark.kind is not TaskKind.HOST_OPTIMIZER:
            kernel = times.get(mark.name, kernel)
        latest = max(latest, kernel.start_seconds + kernel.busy_seconds)
        spans.append(
            replace(
                _span_of_mark(mark, step, rank),
                start_seconds=kernel.start_seconds,
                duration_seconds=kernel.busy_seconds,
                host_seconds=mark.end_seconds - mark.start_seconds,
            )
        )
    return spans


def with_waiting(spans: Iterable[Span]) -> tuple[Span, ...]:
    """Return spans of all ranks with starts since their step began, and collectives' waits told apart.

    The ranks of a host share a clock. A rank waits from its own arrival at a collective to the last one's.
    """
    spans = list(spans)
    origins: dict[int, float] = {}
    arrivals: dict[tuple[int, str, tuple[int, ...]], float] = {}
    for span in spans:
        origins[span.step] = min(origins.get(span.step, span.start_seconds), span.start_seconds)
        if span.group:
            key = (span.step, span.name, span.group)
            arrivals[key] = max(arrivals.get(key, 0.0), span.start_seconds)
    found = []
    for span in spans:
        arrival = arrivals.get((span.step, span.name, span.group), span.start_seconds)
        found.append(
            replace(
                span,
                start_seconds=span.start_seconds - origins[span.step],
                waiting_seconds=min(arrival - span.start_seconds, span.duration_seconds),
            )
        )
    return tuple(sorted(found, key=lambda span: (span.step, span.rank, span.start_seconds)))
