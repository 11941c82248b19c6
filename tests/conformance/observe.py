"""Runs one training step under torch's profiler and tells what it did: tasks, their operators, calls of collectives.

Nothing here asks the recorder for shapes: operands come from the profiler's `record_shapes`, bytes from the tensors
that are handed to torch.distributed, and what the profiler does not tell (entries of sparse operands, long lists of
tensors) from the operands at the call. Names are those of the ranges in the profile.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import executor.attention.cpu
import executor.batches
import executor.clipping
import executor.compression
import executor.exchange
import executor.operations
import executor.overlap
import executor.reduction
import executor.served
import executor.shared_out
from executor.attention.graph import EdgeGraph
from executor.attention.parts import Attended
from executor.compression import Factors
from executor.record import kernel_times, profiled_events
from executor.sampling.neighbourhood import Neighbourhood
from executor.served import HeadBlock
from executor.train import Trainer
from simulator.readers.graphs import Graph
from simulator.specs.plan import Exchange
from simulator.specs.program import MAX_SHORT_EDGES

TASK_PREFIX = "task/"
_PROBE_PREFIX = "probe/"
_OF_FACTORS = ("project", "orthogonalise", "restore")

# Sizes of an operator's arguments: a tuple of counts for a tensor, of such tuples for a list of tensors.
Dims: TypeAlias = tuple[Any, ...]
Event: TypeAlias = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator that ran inside a task.

    Attributes:
        dims: sizes of each argument; empty for what is no tensor.
        types: number format of each argument, such as "float"; empty for what is no tensor.
        numbers: each argument as text; empty for tensors.
    """

    name: str
    dims: Dims
    types: tuple[str, ...]
    numbers: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call into torch.distributed.

    Attributes:
        function: its name.
        sent_bytes: of this rank's input, to each rank of the group in an all-to-all, else in all.
        ranks: of the group.
    """

    function: str
    sent_bytes: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Operands:
    """What the profiler does not tell of an operator's operands.

    Attributes:
        function: "mm" with a sparse operand, "_fused_adamw_", "edge_attention", "attention_forward" and
            "attention_backward" for its kernels, a function of `executor/attention/parts.py`, "batch" or what
            compresses a bucket or takes all gradients.
        counts: entries of the sparse operand; elements and tensors of the parameters; edges of long targets and edges
            of long sources; targets, sources and edges, since kernels are no operators of torch; of attention over
            some edges and of its passes back, all that their shape counts; of a merge too; rows, heads and head size;
            rows that are copied (none), rows that are added and their columns; nodes or seeds, rows, edges and numbers
            of features that a batch is made of; the shape of a compression.
    """

    function: str
    counts: tuple[int, ...]


Probe: TypeAlias = Call | Operands


@dataclass(frozen=True, kw_only=True)
class ObservedTask:
    """A named range of the step and what ran inside."""

    name: str
    operators: tuple[Operator, ...]
    calls: tuple[Call, ...]
    operands: tuple[Operands, ...]


@dataclass(frozen=True, kw_only=True)
class ObservedStep:
    """What one rank did in a step.

    Attributes:
        tasks: in the order in which they began.
        num_calls: of torch.distributed, also outside of tasks.
        num_collective_operators: of the library below it; more than `num_calls` if something was not seen at the call.
        busy_seconds: of operators without operators inside, or of kernels on GPUs.
        named_seconds: of them, those inside tasks.
        made_ahead: shape of the task in which a thread made a batch for a later step; empty without.
    """

    tasks: tuple[ObservedTask, ...]
    num_calls: int
    num_collective_operators: int
    busy_seconds: float
    named_seconds: float
    made_ahead: tuple[int, ...] = ()


def observe_step(trainer: Trainer, step: int) -> ObservedStep:
    """Train one step on this rank and return what it did; all ranks of the plan call this together.

    The trainer's recorder must annotate. A step or more before it should have warmed everything up.
    """
    on_gpu = trainer.place.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * on_gpu]
    if on_gpu:
        torch.cuda.synchronize()
    with _probes() as probes, torch.profiler.profile(activities=activities, record_shapes=True) as profiler:
        trainer.recorder.start(prefix=TASK_PREFIX)
        trainer.step(step, *trainer.micro_batches(step))
        trainer.recorder.stop()
        if on_gpu:
            torch.cuda.synchronize()
    observed = observed_step(profiled_events(profiler), probes, on_gpu=on_gpu)
    making = trainer.batches.making(step)
    return observed if making is None else dataclasses.replace(observed, made_ahead=making.shape)


def observed_step(events: Sequence[Event], probes: Sequence[Probe], *, on_gpu: bool) -> ObservedStep:
    """Return what the profile of a step holds.

    Args:
        events: `traceEvents` of the Chrome trace.
        probes: what was seen at calls; the profile has a range for each, named by its index.
        on_gpu: count the time of kernels instead of operators.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    annotations = [event for event in complete if event.get("cat") == "user_annotation"]
    operators = [event for event in complete if event.get("cat") == "cpu_op"]
    ranges = _Ranges([event for event in annotations if event["name"].startswith(TASK_PREFIX)])
    inside: dict[int | None, list[Event]] = defaultdict(list)
    for event in sorted(
        [*operators, *(event for event in annotations if event["name"].startswith(_PROBE_PREFIX))],
        key=lambda event: event["ts"],
    ):
        inside[ranges.at(event)].append(event)
    seconds = _kernel_seconds(events) if on_gpu else _operator_seconds(operators, ranges)
    return ObservedStep(
        tasks=tuple(_tasks(ranges, inside, probes)),
        num_calls=sum(isinstance(probe, Call) for probe in probes),
        num_collective_operators=sum(operator["name"].startswith("c10d::") for operator in operators),
        busy_seconds=seconds["busy_seconds"],
        named_seconds=seconds["named_seconds"],
    )


class _Ranges:
    """Named ranges, which on each thread follow one another.

    Attributes:
        events: in the order in which they began.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = sorted(events, key=lambda event: event["ts"])
        self._by_thread: dict[int, list[int]] = defaultdict(list)
        for index, event in enumerate(self.events):
            self._by_thread[event["tid"]].append(index)

    def at(self, event: Event) -> int | None:
        """Return the index of the range in which an event begins.

        The range is of the same thread; on a thread without ranges, which works for a call that another one waits
        for, it is of any.
        """
        indices = self._by_thread.get(event["tid"], range(len(self.events)))
        position = bisect_right(indices, event["ts"], key=lambda index: self.events[index]["ts"]) - 1
        if position < 0:
            return None
        found = self.events[indices[position]]
        return indices[position] if event["ts"] <= found["ts"] + found["dur"] else None


def _tasks(ranges: _Ranges, inside: dict[int | None, list[Event]], probes: Sequence[Probe]) -> Iterator[ObservedTask]:
    """Yield the tasks; a backward task that was interrupted, by a recomputation or a reduction, is one task."""
    for name, indices in _whole_tasks([event["name"].removeprefix(TASK_PREFIX) for event in ranges.events]):
        found = list(itertools.chain.from_iterable(inside[index] for index in indices))
        seen = [
            probes[int(event["name"].removeprefix(_PROBE_PREFIX))]
            for event in found
            if event["name"].startswith(_PROBE_PREFIX)
        ]
        yield ObservedTask(
            name=name,
            operators=tuple(_operators([event for event in found if event["cat"] == "cpu_op"])),
            calls=tuple(probe for probe in seen if isinstance(probe, Call)),
            operands=tuple(probe for probe in seen if isinstance(probe, Operands)),
        )


def _whole_tasks(names: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return the name of each task and the indices of its ranges, several if others came in between."""
    found: list[tuple[str, list[int]]] = []
    current: list[int] | None = None
    was_interrupted = False
    for index, name in enumerate(names):
        if _interrupts(name):
            found.append((name, [index]))
            was_interrupted = True
        elif was_interrupted and current is not None and names[current[0]] == name:
            current.append(index)
            was_interrupted = False
        else:
            current = [index]
            found.append((name, current))
            was_interrupted = False
    return found


def _interrupts(name: str) -> bool:
    """Return whether a task may run in the midst of another one."""
    return name.endswith((".recompute", ".copy_in.backward")) or name.startswith("gradients.")


def _operators(events: Sequence[Event]) -> Iterator[Operator]:
    """Yield operators in order, but none that a product runs inside, which differ by device and by layout."""
    product_end = -math.inf
    for event in events:
        if event["ts"] < product_end:
            continue
        if event["name"] in ("aten::mm", "aten::addmm"):
            product_end = event["ts"] + event["dur"]
        arguments = event.get("args", {})
        yield Operator(
            name=event["name"],
            dims=_tuples(arguments.get("Input Dims", [])),
            types=tuple(map(str, arguments.get("Input type", []))),
            numbers=tuple(map(str, arguments.get("Concrete Inputs", []))),
        )


def _tuples(nested: list[Any]) -> Dims:
    return tuple(_tuples(item) if isinstance(item, list) else item for item in nested)


def _operator_seconds(operators: Sequence[Event], ranges: _Ranges) -> dict[str, float]:
    """Return the time of our own operators and of torch's that call no other, in all and inside tasks."""
    leaves: list[Event] = []
    by_thread: dict[int, list[Event]] = defaultdict(list)
    for event in operators:
        by_thread[event["tid"]].append(event)
    for found in by_thread.values():
        found.sort(key=lambda event: (event["ts"], -event["dur"]))
        counted_until = 0.0  # what our own operators call is in their time
        for event, following in itertools.zip_longest(found, found[1:]):
            end, is_own = event["ts"] + event["dur"], event["name"].startswith("graphpilot::")
            is_leaf = following is None or following["ts"] >= end
            if event["ts"] >= counted_until and (is_own or (is_leaf and event["name"].startswith("aten::"))):
                leaves.append(event)
                counted_until = end
    return {
        "busy_seconds": sum(event["dur"] for event in leaves) / 1e6,
        "named_seconds": sum(event["dur"] for event in leaves if ranges.at(event) is not None) / 1e6,
    }


def _kernel_seconds(events: Sequence[Event]) -> dict[str, float]:
    """Return the time of kernels, in all and inside tasks."""
    own = [event for event in events if not str(event.get("name")).startswith(_PROBE_PREFIX)]
    times, outside_seconds = kernel_times(own)
    return {
        "busy_seconds": outside_seconds + sum(kernel.busy_seconds for kernel in times.values()),
        "named_seconds": sum(kernel.busy_seconds for name, kernel in times.items() if name.startswith(TASK_PREFIX)),
    }


# --- What is seen at a call, with a range in the profile that tells when.


@contextlib.contextmanager
def _probes() -> Iterator[list[Probe]]:
    """Look at each call of a collective and of what the profiler does not tell all; give the list that they fill."""
    seen = _Seen()
    with contextlib.ExitStack() as stack:
        looks: tuple[tuple[Any, str, Callable[..., Probe | None]], ...] = (
            (executor.exchange, "add_rows_", _added_rows),
            (executor.served, "pack_heads", functools.partial(_packed, "pack_heads")),
            (executor.served, "unpack_heads_", functools.partial(_packed, "unpack_heads_")),
            (executor.overlap, "merge_into", _merged),
            (executor.overlap, "row_stats", _stats),
            *(
                (executor.overlap, name, functools.partial(_part, name))
                for name in ("attend_part", "backward_sources", "backward_targets")
            ),
            (dist, "all_to_all_single", _all_to_all_call),
            (dist, "all_reduce", _all_reduce_call),
            (dist, "isend", _send_call),
            (dist, "irecv", _receive_call),
            (executor.exchange, "all_gather_single", functools.partial(_call_with_output, "all_gather")),
            (executor.exchange, "reduce_scatter_single", functools.partial(_call_with_output, "reduce_scatter")),
            (executor.shared_out, "all_gather_single", functools.partial(_call_with_output, "all_gather")),
            (executor.shared_out, "reduce_scatter_single", functools.partial(_call_with_output, "reduce_scatter")),
            (executor.reduction, "all_gather_single", functools.partial(_call_with_output, "all_gather")),
            (executor.compression, "select_entries", _selection),
            (executor.compression, "sum_entries", _entries),
            *((executor.compression, name, functools.partial(_factors, name)) for name in _OF_FACTORS),
            *((executor.clipping, name, functools.partial(_gradients, name)) for name in ("sum_of_squares", "scale_")),
            (torch, "mm", _sparse_operand),
            (torch, "_fused_adamw_", _parameters),
            (executor.operations, "edge_attention", _edges_of_long_rows),
            *(
                (kernels, name, functools.partial(_attended, f"attention_{name}"))
                for kernels in (executor.attention.cpu, sys.modules.get("executor.attention.gpu"))
                for name in ("forward", "backward")
                if kernels is not None
            ),
            (executor.batches, "build_rank_data", _batch_of_parts),
            (executor.batches, "build_sampled_data", _batch_of_samples),
        )
        for module, name, look in looks:
            # What attention over some edges calls is no attention of its own.
            hides = module is executor.overlap
            stack.enter_context(
                mock.patch.object(module, name, _probed(getattr(module, name), look, seen, hides=hides))
            )
        yield seen.probes


@dataclass(kw_only=True)
class _Seen:
    """What was seen, and whether calls are inside one that hides what it calls."""

    probes: list[Probe] = dataclasses.field(default_factory=list)
    is_hidden: bool = False


def _probed(
    function: Callable[..., Any], look: Callable[..., Probe | None], seen: _Seen, *, hides: bool
) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        probe = None if seen.is_hidden else look(*arguments, **named)
        if probe is None:
            return function(*arguments, **named)
        seen.probes.append(probe)
        seen.is_hidden = hides
        with torch.profiler.record_function(f"{_PROBE_PREFIX}{len(seen.probes) - 1}"):
            result = function(*arguments, **named)
        seen.is_hidden = False
        return result

    return call


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return tuple(dist.get_process_group_ranks(group or dist.group.WORLD))


def _all_to_all_call(
    output: torch.Tensor,
    given: torch.Tensor,
    output_splits: list[int],
    input_splits: list[int],
    group: dist.ProcessGroup | None = None,
    **_: Any,
) -> Call:
    row_bytes = math.prod(given.shape[1:]) * given.element_size()
    assert (sum(input_splits), sum(output_splits)) == (len(given), len(output)), "splits must cover the tensors"
    return Call(function="all_to_all", sent_bytes=tuple(rows * row_bytes for rows in input_splits), ranks=_ranks(group))


def _all_reduce_call(tensor: torch.Tensor, *_: Any, group: dist.ProcessGroup | None = None, **__: Any) -> Call:
    return Call(function="all_reduce", sent_bytes=(tensor.nbytes,), ranks=_ranks(group))


def _send_call(tensor: torch.Tensor, *, dst: int, **_: Any) -> Call:
    return Call(function="send", sent_bytes=(tensor.nbytes,), ranks=(dist.get_rank(), dst))


def _receive_call(tensor: torch.Tensor, *, src: int, **_: Any) -> Call:
    return Call(function="receive", sent_bytes=(tensor.nbytes,), ranks=(src, dist.get_rank()))


def _call_with_output(
    function: str, output: torch.Tensor, given: torch.Tensor, *_: Any, group: dist.ProcessGroup | None = None, **__: Any
) -> Call:
    del output
    return Call(function=function, sent_bytes=(given.nbytes,), ranks=_ranks(group))


def _sparse_operand(left: torch.Tensor, *_: Any, **__: Any) -> Operands | None:
    return None if left.layout is torch.strided else Operands(function="mm", counts=(left.values().numel(),))


def _parameters(parameters: Sequence[torch.Tensor], *_: Any, **__: Any) -> Operands:
    elements = sum(parameter.numel() for parameter in parameters)
    return Operands(function="_fused_adamw_", counts=(elements, len(parameters)))


def _gradients(function: str, gradients: Sequence[torch.Tensor], *_: Any) -> Operands:
    return Operands(function=function, counts=(sum(gradient.numel() for gradient in gradients), len(gradients)))


def _selection(gradient: torch.Tensor, residual: torch.Tensor, message: torch.Tensor, num_kept: int) -> Operands:
    del residual, message
    return Operands(function="select_entries", counts=(gradient.numel(), num_kept))


def _entries(gradient: torch.Tensor, messages: Sequence[torch.Tensor], num_kept: int) -> Operands:
    return Operands(function="sum_entries", counts=(gradient.numel(), num_kept, len(messages)))


def _factors(name: str, factors: Factors, *_: Any) -> Operands:
    elements = sum(matrix.numel() for matrix in factors.matrices)
    (matrix_rank,) = {right.shape[1] for right in factors.rights}
    return Operands(function=name, counts=(elements, len(factors.rights), matrix_rank))


def _edges_of_long_rows(*arguments: Any, **_: Any) -> Operands:
    graph: EdgeGraph = arguments[3]
    degrees = (np.diff(graph.indptr_N1.cpu().numpy()), np.unique(graph.source_E.cpu().numpy(), return_counts=True)[1])
    counts = tuple(sum(degree for degree in row.tolist() if degree > MAX_SHORT_EDGES) for row in degrees)
    return Operands(function="edge_attention", counts=counts)


def _attended(function: str, *arguments: Any, **_: Any) -> Operands:
    (graph,) = (argument for argument in arguments if isinstance(argument, EdgeGraph))
    counts = (graph.indptr_N1.numel() - 1, graph.num_sources, graph.source_E.numel())
    return Operands(function=function, counts=counts)


def _part(function: str, *arguments: Any, **_: Any) -> Operands:
    """Return the shape of attention over some edges or of a pass back; its last arguments are q, k, v, bias, graph."""
    q, k, v, _, graph = arguments[-5:]
    assert v.shape == k.shape == (graph.num_sources, *q.shape[1:]), "keys and values are of the graph's sources"
    assert graph.num_targets == len(q), "queries are of the graph's targets"
    long_rows = _edges_of_long_rows(q, k, v, graph).counts
    return Operands(function=function, counts=(len(q), len(k), graph.source_E.numel(), *long_rows, *q.shape[1:]))


def _stats(grad_out: torch.Tensor, whole: Attended) -> Operands:
    assert whole.out.shape == grad_out.shape, "the gradient is of the output"
    return Operands(function="row_stats", counts=tuple(grad_out.shape))


def _merged(whole: Attended, part: Attended, first_row: int) -> Operands:
    assert len(whole.out) - first_row == len(part.out), "the last rows are merged"
    return Operands(function="merge_into", counts=(len(whole.out), *part.out.shape))


def _added_rows(rows: torch.Tensor, index: torch.Tensor, added: torch.Tensor, counts: Sequence[int]) -> Operands:
    assert rows.shape[1] == added.shape[1], "rows have as many columns as what is added"
    assert sum(counts) == len(index) == len(added), "each row that came is added"
    return Operands(function="add_rows_", counts=(0, *added.shape))


def _packed(function: str, rows_N2HK: torch.Tensor, blocks: Sequence[HeadBlock]) -> Operands:
    counts = [block.rows.shape[0] * block.rows.shape[2] for block in blocks]
    copied = sum(count for count, block in zip(counts, blocks, strict=True) if block.row_S is None)
    return Operands(function=function, counts=(copied, sum(counts) - copied, 2 * rows_N2HK.shape[3]))


def _batch_of_parts(
    graph: Graph, encodings: np.ndarray | None, owner_N: np.ndarray, *, graph_rank: int, **named: Any
) -> Operands:
    mine_N, inside_N, exchanges = owner_N == graph_rank, named.get("inside_N"), named["exchanges"]
    is_kept_E = owner_N[graph.source_E] >= 0
    if inside_N is not None:
        is_kept_E &= inside_N[graph.target_E] == inside_N[graph.source_E]
    edges = 0
    if exchanges != {Exchange.HEAD_ALL_TO_ALL}:
        edges += int((is_kept_E & mine_N[graph.target_E]).sum())
    if Exchange.HEAD_ALL_TO_ALL in exchanges:
        edges += int((is_kept_E & (owner_N[graph.target_E] >= 0)).sum())
    counts = (len(owner_N), int(mine_N.sum()), edges, _num_features(graph, encodings, mine_N))
    return Operands(function="batch", counts=counts if named["has_features"] else (*counts[:3], 0))


def _batch_of_samples(graph: Graph, encodings: np.ndarray | None, sample: Neighbourhood, **named: Any) -> Operands:
    edges = sum(int(layer.indptr_N1[-1]) for layer in sample.layers)
    seeds = len(sample.layers[-1].indptr_N1) - 1
    num_features = _num_features(graph, encodings, sample.node_N) if named["has_features"] else 0
    counts = (seeds, len(sample.node_N), edges, num_features)
    return Operands(function="batch", counts=counts)


def _num_features(graph: Graph, encodings: np.ndarray | None, rows: np.ndarray) -> int:
    """Return the numbers in the features and encodings of some rows, stored ones only where features are sparse."""
    features = graph.features[rows]
    return int(features.size) + (0 if encodings is None else encodings[rows].size)
