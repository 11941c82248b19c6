"""Gradients of all parameters in one buffer, reduced over ranks in buckets."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from executor.record import Recorder
from simulator.specs.program import Phase, TaskKind
from simulator.workload import PARAMETER_BYTES, gradient_buckets


class FlatGradients:
    """The gradients of a model as views of one fp32 buffer, the last parameter's first, and the loss behind them.

    The backward pass fills the buffer from its front, since it reaches the last parameters first.

    Args:
        world: ranks to sum over; None for one rank.
        bucket_bytes: about how much one all-reduce takes.
    """

    def __init__(
        self, model: nn.Module, recorder: Recorder, world: dist.ProcessGroup | None, *, bucket_bytes: int
    ) -> None:
        parameters = list(reversed(list(model.parameters())))
        sizes = [parameter.numel() for parameter in parameters]
        self._recorder, self._world = recorder, world
        self._ranks = tuple(dist.get_process_group_ranks(world)) if world is not None else ()
        self._buffer = torch.zeros(sum(sizes) + 1, device=parameters[0].device)
        views = torch.split(self._buffer[:-1], sizes)
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = view.view_as(parameter)
        counts = gradient_buckets(sizes, bucket_bytes)
        bucket_sizes, first = [], 0
        for count in counts:
            bucket_sizes.append(sum(sizes[first : first + count]))
            first += count
        bucket_sizes[-1] += 1
        self._buckets = torch.split(self._buffer, bucket_sizes)

    @property
    def flat(self) -> Tensor:
        """All gradients, [parameters]."""
        return self._buffer[:-1]

    def reduce(self, loss: Tensor) -> Tensor:
        """Sum gradients and loss over the ranks; return the loss of the whole step, without a device sync."""
        self._buffer[-1] = loss.detach()
        if self._world is not None:
            for index, bucket in enumerate(self._buckets):
                shape = (bucket.numel() * PARAMETER_BYTES,)
                with self._recorder.task(
                    f"gradients.bucket{index}", TaskKind.ALL_REDUCE, Phase.UPDATE, shape, self._ranks
                ):
                    dist.all_reduce(bucket, group=self._world)
        return self._buffer[-1].clone()

    def zero(self) -> None:
        """Forget the gradients."""
        self._buffer.zero_()
