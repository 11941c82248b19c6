"""Sums over ranks that hold the same rows with other heads and feed-forward columns, as named tasks.

A product that gives own columns takes rows that all these ranks have: forward nothing is to be done, backward the
gradients of the rows are summed. A product that takes own columns gives a term of the rows: forward the terms are
summed, backward nothing is to be done. (Shoeybi et al., Megatron-LM, 2019: their f and g.)
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.exchange import SPEC_DTYPES
from executor.record import Recorder
from simulator.specs.program import Phase, TaskKind


@dataclass(frozen=True, kw_only=True)
class TensorSums:
    """The sums of one layer over a tensor-parallel group.

    Attributes:
        layer: its name.
    """

    recorder: Recorder
    group: dist.ProcessGroup
    layer: str

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the group, in order."""
        return tuple(dist.get_process_group_ranks(self.group))

    def before_columns(self, task: str, x_ND: Tensor) -> Tensor:
        """Return rows for a product that gives own columns."""
        out_ND: Tensor = _SumOfGradients.apply(x_ND, self, task)  # type: ignore[no-untyped-call]
        return out_ND

    def of_terms(self, task: str, x_ND: Tensor) -> Tensor:
        """Return the sum of what products that take own columns give; it takes the place of `x_ND`."""
        out_ND: Tensor = _SumOfTerms.apply(x_ND, self, task)  # type: ignore[no-untyped-call]
        return out_ND

    def add_up_(self, task: str, x_ND: Tensor, phase: Phase) -> Tensor:
        """Sum rows in place."""
        name = f"{self.layer}.{task}.reduce"
        with self.recorder.task(name, TaskKind.ALL_REDUCE, phase, (x_ND.nbytes,), self.ranks, SPEC_DTYPES[x_ND.dtype]):
            dist.all_reduce(x_ND, group=self.group)
        return x_ND


class _SumOfGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, sums: TensorSums, task: str) -> Tensor:
        ctx.sums, ctx.task = sums, task
        return x_ND.view_as(x_ND)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        # Nobody else has them: they come from products.
        return ctx.sums.add_up_(ctx.task, gradients[0].contiguous(), Phase.BACKWARD), None, None


class _SumOfTerms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, sums: TensorSums, task: str) -> Tensor:
        ctx.mark_dirty(x_ND)
        return sums.add_up_(task, x_ND, sums.recorder.phase)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return gradients[0], None, None
