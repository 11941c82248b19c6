"""Casts of mixed precision: parameters stay in fp32 and are cast where they are used; their gradients are cast back.

A recording in fp32 has none of these kernels, and the host's time for them can be most of what lower precision costs
where launches bound the step. Which parameters there are is told by autograd, which names each gradient that it
accumulates with its shape; the host's time of a cast is that of as many operators of the same thread. Left out: casts
of activations, as of logits for a loss in fp32, and what libraries launch beside products in 16 bits.
"""

import bisect
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from simulator.replay.links import RankPieces
from simulator.replay.nodes import Piece, PieceKind
from simulator.replay.order import Addition, with_added
from simulator.replay.scaling import FLOOR_SECONDS, Setting
from simulator.specs.recording import DeviceOperation, KernelKind, Operator
from simulator.specs.units import Dtype

_GRADIENT = "torch::autograd::AccumulateGrad"
_CASTS = "aten::copy_"
# aten::to, _to_copy, empty_strided, copy_: what torch runs, and a profiler records, for `tensor.to(dtype)`.
_OPERATORS_OF_A_CAST = 4
_NARROW = ("half", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launched:
    """A kernel, the host's piece that launched it, and the operator that it belongs to, by index."""

    kernel: int
    host: int | None
    operator: Operator


def with_precision(rank: RankPieces, setting: Setting) -> tuple[RankPieces, list[int]]:
    """Return a rank with the casts that a number format needs, and the new index of each old piece.

    Without a format, or with casts that are there already, nothing changes. In fp32 recorded casts take no time.
    """
    same = list(range(len(rank.pieces)))
    if setting.dtype is None:
        return rank, same
    launched = list(_launched(rank))
    casts = [one for one in launched if _is_cast(one.operator)]
    if setting.dtype is Dtype.FLOAT32:
        gone = {index for one in casts for index in (one.kernel, one.host) if index is not None}
        pieces = [replace(one, duration_seconds=0.0) if i in gone else one for i, one in enumerate(rank.pieces)]
        return replace(rank, pieces=tuple(pieces)), same
    if casts:
        return rank, same
    additions: list[Addition] = []
    host_seconds = _host_seconds(rank, launched)
    for anchor, num_elements in _cast_before(rank.operators, launched):
        moving = 0.0
        if setting.memory_bytes_per_second is not None:
            moving = num_elements * (4 + setting.dtype.num_bytes) / setting.memory_bytes_per_second
        additions += _cast(rank.pieces, anchor, FLOOR_SECONDS + moving, host_seconds, first=len(additions))
    pieces_with, new_index = with_added(rank.pieces, additions)
    boundaries = tuple(new_index[index] for index in rank.boundaries)
    return replace(rank, pieces=pieces_with, boundaries=boundaries), new_index


def gradients(operators: Sequence[Operator]) -> list[Operator]:
    """Return what autograd accumulates in fp32, with the shape of each parameter."""
    return [one for one in operators if one.name == _GRADIENT and one.shapes and not any(map(_is_narrow, one.dtypes))]


def _launched(rank: RankPieces) -> Iterator[_Launched]:
    for index, piece in enumerate(rank.pieces):
        if piece.operation is None or piece.operation.operator is None or piece.operation.message is not None:
            continue
        operator = rank.operators[piece.operation.operator]
        yield _Launched(kernel=index, host=_launch_of(rank.pieces, index), operator=operator)


def _launch_of(pieces: Sequence[Piece], index: int) -> int | None:
    """Return the host's piece that launched a kernel, at once or after a latency."""
    for before in pieces[index].waits_for:
        if pieces[before].kind is PieceKind.HOST:
            return before
        if pieces[before].kind is PieceKind.LATENCY:
            found = [one for one in pieces[before].waits_for if pieces[one].kind is PieceKind.HOST]
            if found:
                return found[0]
    return None


def _is_cast(operator: Operator) -> bool:
    """Return whether an operator copies from one floating-point format into another."""
    formats = [dtype for dtype in operator.dtypes if dtype == "float" or _is_narrow(dtype)]
    return operator.name == _CASTS and len({_is_narrow(dtype) for dtype in formats}) == 2


def _is_narrow(dtype: str) -> bool:
    return dtype.lower().removeprefix("c10::") in _NARROW


def _cast_before(operators: Sequence[Operator], launched: Sequence[_Launched]) -> Iterator[tuple[_Launched, int]]:
    """Yield the kernels that a cast comes before, with the numbers it casts: of each parameter and each gradient."""
    found = gradients(operators)
    backward = {one.thread for one in found}
    forward_uses = _uses([one for one in launched if one.operator.thread not in backward] or launched)
    on_thread: dict[str, list[_Launched]] = defaultdict(list)
    for one in sorted(launched, key=lambda one: one.operator.start_seconds):
        on_thread[one.operator.thread].append(one)
    for gradient in found:
        shape = gradient.shapes[0]
        waiting = forward_uses.get(_either_way(shape), [])
        if waiting and waiting[0].operator.start_seconds < gradient.start_seconds:
            yield waiting.pop(0), prod(shape)
        later = (one for one in on_thread[gradient.thread] if one.operator.start_seconds >= gradient.start_seconds)
        if (anchor := next(later, None)) is not None:
            yield anchor, prod(shape)


def _uses(launched: Sequence[_Launched]) -> dict[tuple[int, ...], list[_Launched]]:
    """Return, for each shape, the first kernels of the operators that read it, in order of time."""
    found: dict[tuple[int, ...], list[_Launched]] = defaultdict(list)
    seen: set[int] = set()
    for one in sorted(launched, key=lambda one: (one.operator.start_seconds, one.kernel)):
        if id(one.operator) not in seen:
            seen.add(id(one.operator))
            for shape in one.operator.shapes:
                if shape:
                    found[_either_way(shape)].append(one)
    return found


def _either_way(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return one shape for a matrix and its transpose."""
    return tuple(sorted(shape))


def _host_seconds(rank: RankPieces, launched: Sequence[_Launched]) -> dict[str, float]:
    """Return the time of the host for a cast, by thread: of its operators, each as long as usual on the thread.

    What is usual is the median, over launches, of the host's time since the one before it by the operators begun in it:
    where a thread does something else in between, as to make a batch, that is no part of an operator.
    """
    starts: dict[str, list[float]] = defaultdict(list)
    for operator in rank.operators:
        if not operator.is_annotation:
            starts[operator.thread].append(operator.start_seconds)
    by_host = {one.host: one.operator for one in launched if one.host is not None}
    found: dict[str, list[float]] = defaultdict(list)
    previous: dict[str, int] = {}
    for index in sorted(by_host):  # in the order of each thread
        stream, operator = rank.pieces[index].stream, by_host[index]
        begun = bisect.bisect_right(starts[operator.thread], operator.start_seconds)
        if stream in previous and begun > previous[stream]:
            found[stream].append(rank.pieces[index].duration_seconds / (begun - previous[stream]))
        previous[stream] = begun
    return {stream: _OPERATORS_OF_A_CAST * statistics.median(seconds) for stream, seconds in found.items()}


def _cast(
    pieces: Sequence[Piece], anchor: _Launched, seconds: float, host_seconds: Mapping[str, float], *, first: int
) -> list[Addition]:
    """Return a cast right before another kernel, launched right before it.

    Args:
        first: number of the first addition.
    """
    kernel = pieces[anchor.kernel]
    instant = kernel.recorded_start_seconds
    additions = []
    if anchor.host is not None:
        host = pieces[anchor.host]
        launch = replace(
            host,
            name="launch of a cast",
            duration_seconds=host_seconds.get(host.stream, 0.0),
            recorded_end_seconds=host.recorded_start_seconds,
            waits_for=(),
        )
        additions.append(Addition(at=anchor.host, piece=launch))
    operation = DeviceOperation(
        name="cast",
        kind=KernelKind.ELEMENTWISE,
        stream=kernel.stream,
        start_seconds=instant,
        duration_seconds=seconds,
    )
    cast = Piece(
        name="cast",
        kind=PieceKind.DEVICE,
        stream=kernel.stream,
        duration_seconds=seconds,
        recorded_start_seconds=instant,
        recorded_end_seconds=instant,
        operation=operation,
        order=kernel.order,
        thread=kernel.thread,
    )
    additions.append(Addition(at=anchor.kernel, piece=cast, after=(first,) if additions else ()))
    return additions
