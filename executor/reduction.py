"""The reduction of one bucket of gradients, collective by collective, and how its messages travel."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from executor import compression
from executor.compat import all_gather_single
from executor.compression import Factors
from executor.record import Mark, Recorder
from simulator.gradients import num_kept
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.program import Phase, Stream, TaskKind
from simulator.specs.units import Dtype

# Bits of fp32 values and their indices travel as int32.
_FORMATS = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16, torch.int32: Dtype.FLOAT32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """A collective that goes on beside what follows.

    Attributes:
        mark: its task, None while nothing is recorded.
    """

    work: dist.Work
    mark: Mark | None
    recorder: Recorder

    def wait(self) -> None:
        """Let what follows use the collective's result: on GPUs the stream waits, on CPUs the host does."""
        self.work.wait()
        self.recorder.waited(self.mark)


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Sums and gathers over the ranks of a world, marked as tasks.

    Attributes:
        goes_beside: collectives go on beside what follows, until they are waited for.
    """

    recorder: Recorder
    world: dist.ProcessGroup
    goes_beside: bool

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the world, in order."""
        return tuple(dist.get_process_group_ranks(self.world))

    def all_reduce(self, name: str, tensor: Tensor) -> Launched | None:
        """Sum a tensor in place; return what to wait for, None if it is done."""

        def call(async_op: bool) -> dist.Work | None:
            work: dist.Work | None = dist.all_reduce(tensor, group=self.world, async_op=async_op)
            return work

        return self._run(call, name, TaskKind.ALL_REDUCE, tensor)

    def all_gather(self, name: str, gathered: Tensor, given: Tensor) -> Launched | None:
        """Write the ranks' tensors one behind the other; return what to wait for, None if it is done."""

        def call(async_op: bool) -> dist.Work | None:
            work: dist.Work | None = all_gather_single(gathered, given, group=self.world, async_op=async_op)
            return work

        return self._run(call, name, TaskKind.ALL_GATHER, given)

    def task(self, name: str, kind: TaskKind, shape: tuple[int, ...]) -> contextlib.AbstractContextManager[Mark | None]:
        """Mark a compute task."""
        return self.recorder.task(name, kind, Phase.UPDATE, shape)

    def _run(
        self, call: Callable[[bool], dist.Work | None], name: str, kind: TaskKind, given: Tensor
    ) -> Launched | None:
        shape, dtype = (given.numel() * given.element_size(),), _FORMATS[given.dtype]
        if not self.goes_beside:
            with self.recorder.task(name, kind, Phase.UPDATE, shape, self.ranks, dtype):
                call(False)
            return None

        with self.recorder.task(name, kind, Phase.UPDATE, shape, self.ranks, dtype) as mark:
            work = call(True)
        assert work is not None, f"this rank is not in the world of {name}"
        if mark is not None:
            mark.stream = Stream.GRADIENTS
        self.recorder.follow(mark, work)
        return Launched(work=work, mark=mark, recorder=self.recorder)


@dataclass(frozen=True, kw_only=True, eq=False)
class BucketGradients:
    """The gradients of one bucket on this rank.

    Attributes:
        name: what its tasks are called.
        flat: gradients, [elements].
        loss: [1] behind them in the last bucket, else [0].
        whole: both.
        residual: what earlier steps did not send, [elements]; [0] where everything is sent.
        factors: of PowerSGD; None where no matrix of the bucket is factorised.
    """

    name: str
    flat: Tensor
    loss: Tensor
    whole: Tensor
    residual: Tensor
    factors: Factors | None

    @property
    def num_collectives(self) -> int:
        """Collectives that its reduction takes."""
        return 1 if self.factors is None else 2


# Goes on to the next collective each time and gives what to wait for; None where nothing is on its way.
Reduction = Iterator[Launched | None]


def reduction(bucket: BucketGradients, how: GradientCompression, wire: Wire) -> Reduction:
    """Sum a bucket over the ranks, in place; the tasks are those of `simulator.gradients.bucket_tasks`."""
    match how.kind:
        case CompressionKind.NONE:
            return _sum(bucket, wire)
        case CompressionKind.BF16:
            return _sum_in_bf16(bucket, wire)
        case CompressionKind.TOP_K:
            return _sum_of_largest(bucket, wire, num_kept(bucket.flat.numel(), how.kept_ratio))
        case CompressionKind.POWER_SGD:
            return _sum(bucket, wire) if bucket.factors is None else _sum_of_factors(bucket, bucket.factors, wire)


def _sum(bucket: BucketGradients, wire: Wire) -> Reduction:
    yield wire.all_reduce(bucket.name, bucket.whole)


def _sum_in_bf16(bucket: BucketGradients, wire: Wire) -> Reduction:
    shape = (bucket.flat.numel(),)
    with wire.task(f"{bucket.name}.compress", TaskKind.GRADIENT_CAST, shape):
        message = torch.empty_like(bucket.flat, dtype=torch.bfloat16)
        compression.cast(message, bucket.flat)
    yield wire.all_reduce(bucket.name, message)
    with wire.task(f"{bucket.name}.decompress", TaskKind.GRADIENT_CAST, shape):
        compression.cast(bucket.flat, message)


def _sum_of_largest(bucket: BucketGradients, wire: Wire, kept: int) -> Reduction:
    shape, num_ranks = (bucket.flat.numel(), kept), len(wire.ranks)
    with wire.task(f"{bucket.name}.compress", TaskKind.TOP_K_SELECT, shape):
        message = torch.empty(2 * kept + bucket.loss.numel(), dtype=torch.int32, device=bucket.flat.device)
        compression.select_entries(bucket.flat, bucket.residual, message, kept)
        message[2 * kept :] = bucket.loss.view(torch.int32)
    gathered = message.new_empty(num_ranks * message.numel())
    yield wire.all_gather(bucket.name, gathered, message)
    messages = gathered.chunk(num_ranks)
    with wire.task(f"{bucket.name}.decompress", TaskKind.TOP_K_SUM, (*shape, num_ranks)):
        compression.sum_entries(bucket.flat, messages, kept)
        bucket.loss.copy_(torch.stack([other[2 * kept :].view(torch.float32) for other in messages]).sum(0))


def _sum_of_factors(bucket: BucketGradients, factors: Factors, wire: Wire) -> Reduction:
    with wire.task(f"{bucket.name}.compress", TaskKind.LOW_RANK_PROJECT, factors.shape):
        message = compression.project(factors, bucket.loss)
    yield wire.all_reduce(bucket.name, message)
    with wire.task(f"{bucket.name}.orthogonalise", TaskKind.LOW_RANK_ORTHOGONALISE, factors.shape):
        bases = compression.orthogonalise(factors, message)
    yield wire.all_reduce(f"{bucket.name}.right", factors.right)
    with wire.task(f"{bucket.name}.decompress", TaskKind.LOW_RANK_RESTORE, factors.shape):
        compression.restore(factors, bases, message, bucket.loss)
