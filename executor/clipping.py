"""Clips gradients to a norm, also where ranks hold other numbers of them; without a device sync."""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from executor.record import Recorder
from simulator.specs.program import Phase, TaskKind


def clip_flat_gradient_(flat: Tensor, max_norm: float) -> None:
    """Scale a gradient down to a norm, in place and without a device sync; a smaller one stays."""
    flat.mul_(_factor(torch.linalg.vector_norm(flat), max_norm))


def sum_of_squares(gradients: list[Tensor], weight_T: Tensor) -> Tensor:
    """Return the sum of the squares of all numbers, [], those of each tensor weighted."""
    norms = torch._foreach_norm(gradients)
    return torch.dot(torch.stack(norms).square(), weight_T)


def scale_(gradients: list[Tensor], factor: Tensor) -> None:
    """Multiply gradients in place."""
    torch._foreach_mul_(gradients, factor)


@dataclass(frozen=True, kw_only=True)
class SharedClip:
    """Clips gradients of which the ranks of a group hold shares.

    Attributes:
        weight_T: of each tensor: one over the number of ranks of the group that hold the same numbers.
    """

    recorder: Recorder
    group: dist.ProcessGroup
    weight_T: Tensor

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the group, in order."""
        return tuple(dist.get_process_group_ranks(self.group))

    def clip_(self, gradients: list[Tensor], max_norm: float) -> None:
        """Scale gradients down to a norm over all ranks, in place; smaller ones stay."""
        shape = (sum(gradient.numel() for gradient in gradients), len(gradients))
        task = self.recorder.task
        with task("clip.norm", TaskKind.GRADIENT_NORM, Phase.UPDATE, shape):
            squares = sum_of_squares(gradients, self.weight_T)
        with task("clip.reduce", TaskKind.ALL_REDUCE, Phase.UPDATE, (squares.nbytes,), self.ranks):
            dist.all_reduce(squares, group=self.group)
        with task("clip", TaskKind.GRADIENT_SCALE, Phase.UPDATE, shape):
            scale_(gradients, _factor(squares.sqrt(), max_norm))


def _factor(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / norm.clamp(min=1e-12)).clamp(max=1.0)
