"""Gradients of all parameters in one buffer, reduced over ranks in buckets, behind the backward pass or beside it."""

import itertools
import weakref
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from executor.compression import Factors
from executor.record import Recorder
from executor.reduction import BucketGradients, Launched, Reduction, Wire, reduction
from simulator.errors import RunError
from simulator.gradients import LOSS_TASK, Bucket, buckets_of, is_factorised, loss_tasks
from simulator.specs.gradients import CompressionKind, GradientCompression

# Of the first right factors of PowerSGD, which all ranks draw alike.
_RIGHT_SEED = 0


class FlatGradients:
    """The gradients of a model as views of one fp32 buffer, the last parameter's first, and the loss behind them.

    The backward pass fills the buffer from its front, since it reaches the last parameters first. A step calls `begin`,
    runs one backward pass and calls `reduce`; `simulator/gradients.py` says which collectives that takes, in one order
    on all ranks.

    Args:
        parameters: leaves by name, as this rank holds them.
        world: ranks to sum over; None for one rank.
        bucket_bytes: about how much one reduction takes.
        overlap: a bucket's reduction begins within the backward pass, in order, once its gradients are there; those
            that a rank never gets, or that are written past autograd as `step.cast_weights` does, behind it.
        compression: what travels in place of gradients; None for the gradients.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        recorder: Recorder,
        world: dist.ProcessGroup | None,
        *,
        bucket_bytes: int,
        overlap: bool = False,
        compression: GradientCompression | None = None,
    ) -> None:
        self._recorder = recorder
        self._compression = compression or GradientCompression()
        self._wire = Wire(recorder=recorder, world=world, goes_beside=overlap) if world is not None else None
        shapes = [(name, tuple(parameter.shape)) for name, parameter in parameters.items()]
        leaves = list(parameters.values())[::-1]
        sizes = [parameter.numel() for parameter in leaves]
        device = leaves[0].device
        self._buffer = torch.zeros(sum(sizes) + 1, device=device)
        for parameter, view in zip(leaves, torch.split(self._buffer[:-1], sizes), strict=True):
            parameter.grad = view.view_as(parameter)
        keeps = self._compression.kind in (CompressionKind.TOP_K, CompressionKind.POWER_SGD)
        self._residual = torch.zeros(sum(sizes) if keeps else 0, device=device)
        buckets = buckets_of(shapes, bucket_bytes)
        generator = torch.Generator().manual_seed(_RIGHT_SEED)
        num_right = sum(self._right_elements(bucket) for bucket in buckets)
        self._right = torch.randn(num_right, generator=generator).to(device)
        self._buckets = self._bucket_gradients(buckets)
        self._num_parameters = [len(bucket.parameters) for bucket in buckets]
        # Of the step under way: how many gradients each bucket misses, the loss, what is on its way.
        self._missing: list[int] = []
        self._loss: Tensor | None = None
        self._loss_on_its_way: Launched | None = None
        self._running: list[_Running] = []
        if overlap and self._wire is not None:
            self._watch(leaves)

    @property
    def flat(self) -> Tensor:
        """All gradients, [parameters]."""
        return self._buffer[:-1]

    def begin(self, loss: Tensor) -> None:
        """Get ready for the backward pass of a loss, this rank's share."""
        self._loss = loss.detach()
        self._missing, self._running = list(self._num_parameters), []
        if self._wire is not None and self._wire.goes_beside:
            self._take_loss()

    def reduce(self) -> Tensor:
        """Sum gradients and loss over the ranks to the end; return the step's loss, without a device sync."""
        assert self._loss is not None, "begin was not called"
        if self._wire is None:
            self._buffer[-1] = self._loss
        elif self._wire.goes_beside:
            while len(self._running) < len(self._buckets):
                self._begin_next(self._wire)
            for running in self._running:
                running.go_on_to_last()
            if self._loss_on_its_way is not None:
                self._loss_on_its_way.wait()
            for running in self._running:
                running.end()
        else:
            self._take_loss()
            for bucket in self._buckets:
                _Running(bucket, reduction(bucket, self._compression, self._wire)).end()
        self._loss, self._loss_on_its_way, self._running = None, None, []
        return self._buffer[-1].clone()

    def zero(self) -> None:
        """Forget the gradients."""
        self._buffer.zero_()

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that a later step depends on: none, or what this rank did not send and the right factors.

        They are those in use, and stay where they are. Their layout follows the parameters, whatever the buckets. Right
        factors are alike on all ranks. Of "residual" only the sum over the ranks counts, so another number of ranks may
        share it out in any way.
        """
        return {"residual": self._residual, "right": self._right} if self._residual.numel() else {}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from the state of gradients with the same parameters and compression.

        Raises:
            RunError: if it is of others.
        """
        must, have = _shapes_text(self.state_dict()), _shapes_text(state)
        if must != have:
            raise RunError(
                f"the state of the gradients must hold {must}, got {have}: resume with the model and the "
                "gradient_compression that it was saved with"
            )
        for name, buffer in (("residual", self._residual), ("right", self._right)):
            if name in state:
                buffer.copy_(state[name])

    def _right_elements(self, bucket: Bucket) -> int:
        """Return how many numbers the right factors of a bucket hold."""
        matrix_rank = self._compression.matrix_rank
        if matrix_rank == 0:
            return 0
        return sum(shape[1] * matrix_rank for _, shape in bucket.parameters if is_factorised(shape, matrix_rank))

    def _bucket_gradients(self, buckets: tuple[Bucket, ...]) -> list[BucketGradients]:
        """Return the buckets as views of the buffers."""
        ends = list(itertools.accumulate(bucket.num_elements for bucket in buckets))
        right_ends = list(itertools.accumulate(self._right_elements(bucket) for bucket in buckets))
        found = []
        for bucket, end, right_end in zip(buckets, ends, right_ends, strict=True):
            inside = slice(end - bucket.num_elements, end)
            residual = self._residual[inside]
            factors = None
            if num_right := self._right_elements(bucket):
                factors = Factors(
                    _views(self._buffer[inside], bucket),
                    _views(residual, bucket),
                    self._right[right_end - num_right : right_end],
                    matrix_rank=self._compression.matrix_rank,
                )
            found.append(
                BucketGradients(
                    name=bucket.name,
                    flat=self._buffer[inside],
                    loss=self._buffer[end : end + bucket.is_last],
                    whole=self._buffer[inside.start : end + bucket.is_last],
                    residual=residual,
                    factors=factors,
                )
            )
        return found

    def _watch(self, parameters: list[Tensor]) -> None:
        """Ask autograd to tell when it has added up the gradient of a parameter."""
        me = weakref.ref(self)  # the parameters would keep this object and its buffers alive

        def told(bucket: int) -> Callable[[Tensor], None]:
            def tell(_: Tensor) -> None:
                if (gradients := me()) is not None:
                    gradients._has_come(bucket)

            return tell

        bucket_of = [index for index, count in enumerate(self._num_parameters) for _ in range(count)]
        for parameter, bucket in zip(parameters, bucket_of, strict=True):
            parameter.register_post_accumulate_grad_hook(told(bucket))

    def _has_come(self, bucket: int) -> None:
        """Take note of a gradient; begin what need not wait any more."""
        if self._loss is None or self._wire is None:
            return  # a backward pass of somebody else
        self._missing[bucket] -= 1
        assert self._missing[bucket] >= 0, "one backward pass a step: a gradient came twice"
        if self._is_next_complete():
            with self._recorder.interrupting():
                while self._is_next_complete():
                    self._begin_next(self._wire)

    def _is_next_complete(self) -> bool:
        next_bucket = len(self._running)
        return next_bucket < len(self._buckets) and self._missing[next_bucket] == 0

    def _begin_next(self, wire: Wire) -> None:
        """Begin the next bucket; the one before it goes on to its last collective."""
        if self._running:
            self._running[-1].go_on_to_last()
        bucket = self._buckets[len(self._running)]
        self._running.append(_Running(bucket, reduction(bucket, self._compression, wire)))

    def _take_loss(self) -> None:
        """Put the loss behind the gradients; sum it now where it cannot travel with them."""
        assert self._loss is not None
        self._buffer[-1] = self._loss
        if self._wire is not None and loss_tasks(self._compression):
            self._loss_on_its_way = self._wire.all_reduce(LOSS_TASK, self._buffer[-1:])


class _Running:
    """A reduction that has begun: its first collective was started."""

    def __init__(self, bucket: BucketGradients, steps: Reduction) -> None:
        self._steps = steps
        self._num_left = bucket.num_collectives - 1
        self._on_its_way = next(steps)

    def go_on_to_last(self) -> None:
        """Go on until the last collective was started."""
        while self._num_left > 0:
            self._wait()
            self._on_its_way = next(self._steps)
            self._num_left -= 1

    def end(self) -> None:
        """Go on to the end."""
        self.go_on_to_last()
        self._wait()
        assert next(self._steps, self) is self, "a reduction took more collectives than it said"

    def _wait(self) -> None:
        if self._on_its_way is not None:
            self._on_its_way.wait()


def _views(flat: Tensor, bucket: Bucket) -> list[Tensor]:
    """Return numbers in a row as gradients in the shapes of a bucket's parameters."""
    shapes = [shape for _, shape in bucket.parameters]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def _shapes_text(state: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(value.shape)}" for name, value in state.items()) or "nothing"
