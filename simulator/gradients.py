"""How gradients are summed over ranks: which share a bucket, and the tasks of each bucket, in order.

A bucket's reduction is a sequence of tasks with one collective or two. Without overlap the buckets are reduced one
after another behind the backward pass. With overlap a bucket begins as soon as its last gradient is there and all
buckets before it have begun; what follows its last collective waits until the backward pass is over. Where a bucket has
two collectives, the second one begins when the next bucket does. `executor/parallel.py` follows the same order.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.program import TaskKind
from simulator.specs.units import Dtype

PARAMETER_BYTES = 4  # parameters, gradients and optimizer state are fp32
# Of an entry that top-k sends: an fp32 value and an int32 index into its bucket.
ENTRY_BYTES = 8
MAX_TOP_K_ELEMENTS = 2**31 - 1
LOSS_TASK = "gradients.loss"

Shape = tuple[int, ...]


def gradient_buckets(sizes: Sequence[int], bucket_bytes: int) -> tuple[int, ...]:
    """Return how many of the parameters each gradient bucket takes, in the order given.

    A bucket is closed when the next parameter would take it past `bucket_bytes`.

    Args:
        sizes: elements of each parameter, in the order in which the buckets are filled.
        bucket_bytes: about how large a bucket may grow; a larger parameter has a bucket of its own.
    """
    counts: list[int] = []
    filled = 0
    for size in sizes:
        if counts and filled + size * PARAMETER_BYTES <= bucket_bytes:
            counts[-1] += 1
            filled += size * PARAMETER_BYTES
        else:
            counts.append(1)
            filled = size * PARAMETER_BYTES
    return tuple(counts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients that are reduced together.

    Attributes:
        index: of the bucket, in order of reduction.
        parameters: names and shapes, in the order in which their gradients lie.
        is_last: the loss travels with it.
    """

    index: int
    parameters: tuple[tuple[str, Shape], ...]
    is_last: bool

    @property
    def name(self) -> str:
        """What its tasks are called."""
        return f"gradients.bucket{self.index}"

    @property
    def num_elements(self) -> int:
        """Numbers in its gradients."""
        return sum(math.prod(shape) for _, shape in self.parameters)


def buckets_of(parameters: Iterable[tuple[str, Shape]], bucket_bytes: int) -> tuple[Bucket, ...]:
    """Return the buckets of a model, the last parameters first, since the backward pass reaches them first.

    Args:
        parameters: names and shapes in the order in which the model registers them.
        bucket_bytes: as in `gradient_buckets`.
    """
    ordered = list(reversed(list(parameters)))
    counts = gradient_buckets([math.prod(shape) for _, shape in ordered], bucket_bytes)
    buckets, first = [], 0
    for index, count in enumerate(counts):
        is_last = index == len(counts) - 1
        buckets.append(Bucket(index=index, parameters=tuple(ordered[first : first + count]), is_last=is_last))
        first += count
    return tuple(buckets)


def num_kept(num_elements: int, kept_ratio: float) -> int:
    """Return how many entries of a bucket top-k sends: at least one of any."""
    return math.ceil(num_elements * kept_ratio)


def is_factorised(shape: Shape, matrix_rank: int) -> bool:
    """Return whether PowerSGD sends a gradient as two factors, which it does where they are smaller."""
    return len(shape) == 2 and sum(shape) * matrix_rank < math.prod(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionTask:
    """A task of a bucket's reduction.

    Attributes:
        waits_for: name of a collective whose result it takes; empty if none.
    """

    name: str
    kind: TaskKind
    shape: Shape
    dtype: Dtype = Dtype.FLOAT32
    waits_for: str = ""


def loss_tasks(compression: GradientCompression) -> tuple[ReductionTask, ...]:
    """Return what sums the loss where it cannot travel with a bucket: in bf16 it would be rounded."""
    if compression.kind is not CompressionKind.BF16:
        return ()
    return (ReductionTask(name=LOSS_TASK, kind=TaskKind.ALL_REDUCE, shape=(PARAMETER_BYTES,)),)


def bucket_tasks(bucket: Bucket, compression: GradientCompression, num_ranks: int) -> tuple[ReductionTask, ...]:
    """Return the tasks that sum one bucket over the ranks, in order."""
    name, elements = bucket.name, bucket.num_elements
    match compression.kind:
        case CompressionKind.NONE:
            return (_plain_all_reduce(bucket),)
        case CompressionKind.BF16:
            half, shape = Dtype.BFLOAT16, (elements,)
            return (
                ReductionTask(name=f"{name}.compress", kind=TaskKind.GRADIENT_CAST, shape=shape),
                ReductionTask(name=name, kind=TaskKind.ALL_REDUCE, shape=(elements * half.num_bytes,), dtype=half),
                ReductionTask(name=f"{name}.decompress", kind=TaskKind.GRADIENT_CAST, shape=shape, waits_for=name),
            )
        case CompressionKind.TOP_K:
            kept = num_kept(elements, compression.kept_ratio)
            num_bytes = kept * ENTRY_BYTES + bucket.is_last * PARAMETER_BYTES
            sum_shape = (elements, kept, num_ranks)
            return (
                ReductionTask(name=f"{name}.compress", kind=TaskKind.TOP_K_SELECT, shape=(elements, kept)),
                ReductionTask(name=name, kind=TaskKind.ALL_GATHER, shape=(num_bytes,)),
                ReductionTask(name=f"{name}.decompress", kind=TaskKind.TOP_K_SUM, shape=sum_shape, waits_for=name),
            )
        case CompressionKind.POWER_SGD:
            return _power_sgd_tasks(bucket, compression.matrix_rank)


def _plain_all_reduce(bucket: Bucket) -> ReductionTask:
    num_bytes = (bucket.num_elements + bucket.is_last) * PARAMETER_BYTES
    return ReductionTask(name=bucket.name, kind=TaskKind.ALL_REDUCE, shape=(num_bytes,))


def _power_sgd_tasks(bucket: Bucket, matrix_rank: int) -> tuple[ReductionTask, ...]:
    """Return the tasks of PowerSGD; what is not factorised travels as it is with the left factors."""
    name, matrices = bucket.name, [shape for _, shape in bucket.parameters if is_factorised(shape, matrix_rank)]
    if not matrices:
        return (_plain_all_reduce(bucket),)
    elements = sum(map(math.prod, matrices))
    rows, columns = (sum(sizes) for sizes in zip(*matrices, strict=True))
    shape = (elements, len(matrices), matrix_rank)
    left_elements = bucket.num_elements - elements + rows * matrix_rank + bucket.is_last
    return (
        ReductionTask(name=f"{name}.compress", kind=TaskKind.LOW_RANK_PROJECT, shape=shape),
        ReductionTask(name=name, kind=TaskKind.ALL_REDUCE, shape=(left_elements * PARAMETER_BYTES,)),
        ReductionTask(name=f"{name}.orthogonalise", kind=TaskKind.LOW_RANK_ORTHOGONALISE, shape=shape, waits_for=name),
        ReductionTask(name=f"{name}.right", kind=TaskKind.ALL_REDUCE, shape=(columns * matrix_rank * PARAMETER_BYTES,)),
        ReductionTask(
            name=f"{name}.decompress", kind=TaskKind.LOW_RANK_RESTORE, shape=shape, waits_for=f"{name}.right"
        ),
    )


@dataclass(slots=True, kw_only=True)
class ReductionSchedule:
    """In which order one step issues the tasks of its reductions.

    Attributes:
        tasks_of_bucket: of each bucket, in order; empty on a single rank.
        operations_of_bucket: the operations whose backward passes give the bucket's gradients; None where one of them
            never comes.
        loss: what sums the loss apart from the buckets.
        overlaps: whether buckets begin within the backward pass.
    """

    tasks_of_bucket: tuple[tuple[ReductionTask, ...], ...]
    operations_of_bucket: tuple[frozenset[str] | None, ...]
    loss: tuple[ReductionTask, ...]
    overlaps: bool
    _missing: list[set[str] | None] = field(init=False)
    _segments: list[list[list[ReductionTask]]] = field(init=False)
    _num_begun: int = 0

    def __post_init__(self) -> None:
        self._missing = [None if found is None else set(found) for found in self.operations_of_bucket]
        self._segments = [_segments(tasks) for tasks in self.tasks_of_bucket]

    def before_backward(self) -> list[ReductionTask]:
        """Return what is issued between the forward and the backward pass."""
        return list(self.loss) if self.overlaps else []

    def after_backward_of(self, operation: str) -> list[ReductionTask]:
        """Return what is issued once an operation's backward pass has given its gradients."""
        if not self.overlaps:
            return []
        for missing in self._missing:
            if missing is not None:
                missing.discard(operation)
        found: list[ReductionTask] = []
        while self._num_begun < len(self._segments) and self._missing[self._num_begun] == set():
            found += self._begin_next()
        return found

    def rest(self) -> list[ReductionTask]:
        """Return what is issued behind the backward pass."""
        if not self.overlaps:
            return [*self.loss, *(task for tasks in self.tasks_of_bucket for task in tasks)]
        found: list[ReductionTask] = []
        while self._num_begun < len(self._segments):
            found += self._begin_next()
        if self._segments:
            found += self._go_on(self._num_begun - 1)
        return found + [task for segments in self._segments for segment in segments for task in segment]

    def _begin_next(self) -> list[ReductionTask]:
        """Return the tasks up to the first collective of the next bucket, behind those of the one before it."""
        index = self._num_begun
        self._num_begun += 1
        earlier = self._go_on(index - 1) if index > 0 else []
        return earlier + self._segments[index].pop(0)

    def _go_on(self, index: int) -> list[ReductionTask]:
        """Return the tasks of a bucket up to its last collective."""
        segments = self._segments[index]
        found = []
        while len(segments) > 1:
            found += segments.pop(0)
        return found


def _segments(tasks: Sequence[ReductionTask]) -> list[list[ReductionTask]]:
    """Return tasks cut behind each collective; the last run holds none and may be empty."""
    found: list[list[ReductionTask]] = [[]]
    for task in tasks:
        found[-1].append(task)
        if task.kind.is_collective:
            found.append([])
    return found


# A weight that several operations may share, each of which uses a part of it.
_SHARED_WEIGHTS = {"query_key_value": ("query_key_value", "query", "key_value")}
# Ends of operations that do for the rows of others what others do for own ones.
_PARTIAL = ("", "_halo")


def gradient_operations(parameter: str, operations: Collection[str]) -> frozenset[str]:
    """Return the operations of a step that use a parameter: its gradient is there once all have run backward.

    Args:
        parameter: such as "layer0.query_key_value.weight".
        operations: names of all operations with a backward pass, such as "layer0.query_key_value".
    """
    base = parameter.removesuffix(".weight").removesuffix(".bias")
    if parameter == f"{base}.bias" and f"{base}_bias" in operations:
        return frozenset({f"{base}_bias"})  # it is no part of the product
    name = base.rpartition(".")[2]
    module = base.removesuffix(name)
    names = {f"{module}{each}{end}" for each in _SHARED_WEIGHTS.get(name, (name,)) for end in _PARTIAL}
    return frozenset(names & set(operations))


def reduction_schedule(
    parameters: Iterable[tuple[str, Shape]],
    operations: Collection[str],
    *,
    bucket_bytes: int,
    compression: GradientCompression,
    overlaps: bool,
    num_ranks: int,
) -> ReductionSchedule:
    """Return the schedule of one step's reductions over all ranks.

    Args:
        parameters: names and shapes in the order in which the model registers them.
        operations: as in `gradient_operations`.
    """
    buckets = buckets_of(parameters, bucket_bytes) if num_ranks > 1 else ()
    by_parameter = [
        [gradient_operations(parameter, operations) for parameter, _ in bucket.parameters] for bucket in buckets
    ]
    return ReductionSchedule(
        tasks_of_bucket=tuple(bucket_tasks(bucket, compression, num_ranks) for bucket in buckets),
        operations_of_bucket=tuple(frozenset().union(*found) if all(found) else None for found in by_parameter),
        loss=loss_tasks(compression) if buckets else (),
        overlaps=overlaps,
    )


def kept_bytes(buckets: Sequence[Bucket], compression: GradientCompression) -> int:
    """Return what a rank keeps from step to step: what was not sent, and the right factors of PowerSGD."""
    match compression.kind:
        case CompressionKind.NONE | CompressionKind.BF16:
            return 0
        case CompressionKind.TOP_K:
            return sum(bucket.num_elements for bucket in buckets) * PARAMETER_BYTES
        case CompressionKind.POWER_SGD:
            factors = sum(
                shape[1] * compression.matrix_rank for bucket in buckets for shape in _matrices(bucket, compression)
            )
            return (sum(bucket.num_elements for bucket in buckets) + factors) * PARAMETER_BYTES


def passing_bytes(
    buckets: Sequence[Bucket], compression: GradientCompression, *, num_ranks: int, overlaps: bool
) -> int:
    """Return the most that the messages of a step take: of all buckets with overlap, else of the largest."""
    of_bucket = [_message_bytes(bucket, compression, num_ranks) for bucket in buckets]
    if not of_bucket:
        return 0
    most = sum(of_bucket) if overlaps else max(of_bucket)
    workspace = 0
    if compression.kind is CompressionKind.TOP_K:
        # Magnitudes of the bucket under way.
        workspace = max(bucket.num_elements for bucket in buckets) * PARAMETER_BYTES
    return most + workspace


def _message_bytes(bucket: Bucket, compression: GradientCompression, num_ranks: int) -> int:
    elements = bucket.num_elements
    match compression.kind:
        case CompressionKind.NONE:
            return 0  # reduced in place
        case CompressionKind.BF16:
            return elements * Dtype.BFLOAT16.num_bytes
        case CompressionKind.TOP_K:
            # Own entries, their indices in int64 while they are chosen, and those of all ranks.
            return num_kept(elements, compression.kept_ratio) * (ENTRY_BYTES * (1 + num_ranks) + 8)
        case CompressionKind.POWER_SGD:
            matrices = _matrices(bucket, compression)
            vectors = elements - sum(map(math.prod, matrices)) if matrices else 0
            # Left factors as they were summed, and orthogonal; right ones are kept.
            factors = sum(2 * shape[0] * compression.matrix_rank for shape in matrices)
            return (vectors + factors) * PARAMETER_BYTES


def _matrices(bucket: Bucket, compression: GradientCompression) -> list[Shape]:
    return [shape for _, shape in bucket.parameters if is_factorised(shape, compression.matrix_rank)]
