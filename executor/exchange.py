"""Exchanges of keys and values between the ranks of a graph group, with their backward passes."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.compat import all_gather_single, reduce_scatter_single
from executor.record import Recorder
from simulator.specs.plan import Exchange
from simulator.specs.program import Phase, TaskKind


@dataclass(frozen=True, kw_only=True)
class ExchangeLayout:
    """Which rows this rank sends and receives; the same on every layer.

    Attributes:
        send_row_S: own rows to send, those for the first rank of the group first.
        rows_to: how many rows go to each rank of the group.
        rows_from: how many come from each; received rows follow the own ones in this order.
        max_rows: own rows of the largest rank of the group.
        group: the graph group's process group.
    """

    send_row_S: Tensor
    rows_to: tuple[int, ...]
    rows_from: tuple[int, ...]
    max_rows: int
    group: dist.ProcessGroup | None

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the group, in order."""
        return tuple(dist.get_process_group_ranks(self.group)) if self.group is not None else ()


def exchange_rows(
    rows_NC: Tensor, exchange: Exchange, layout: ExchangeLayout, *, recorder: Recorder, layer: str
) -> Tensor:
    """Return the rows that this rank attends to; every rank of the group must call it, also one without rows.

    HALO gives [N + halo, C], own rows first. ALL_GATHER gives [ranks * max_rows, C], rank by rank, with zeros
    behind the rows of a smaller rank.
    """
    match exchange:
        case Exchange.NONE:
            return rows_NC
        case Exchange.HALO:
            function: type[torch.autograd.Function] = _HaloExchange
        case Exchange.ALL_GATHER:
            function = _AllGather
    out: Tensor = function.apply(rows_NC, layout, recorder, layer)
    return out


class _HaloExchange(torch.autograd.Function):
    """Boundary rows forward, their gradients back to the owner."""

    @staticmethod
    def forward(ctx: Any, rows_NC: Tensor, layout: ExchangeLayout, recorder: Recorder, layer: str) -> Tensor:
        ctx.layout, ctx.recorder, ctx.layer = layout, recorder, layer
        num_rows, columns = rows_NC.shape
        shape = (num_rows, sum(layout.rows_to), columns)
        with recorder.task(f"{layer}.pack", TaskKind.HALO_PACK, recorder.phase, shape):
            message_SC = rows_NC.index_select(0, layout.send_row_S)
            all_rows = rows_NC.new_empty(num_rows + sum(layout.rows_from), columns)
            all_rows[:num_rows] = rows_NC
        sent_bytes = _message_bytes(message_SC, layout.rows_to)
        with recorder.task(f"{layer}.exchange", TaskKind.ALL_TO_ALL, recorder.phase, sent_bytes, layout.ranks):
            _all_to_all(all_rows[num_rows:], message_SC, layout.rows_from, layout.rows_to, layout.group)
        return all_rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (grad_MC,) = gradients
        layout, recorder = ctx.layout, ctx.recorder
        num_rows = grad_MC.shape[0] - sum(layout.rows_from)
        message = grad_MC[num_rows:].contiguous()
        sent_bytes = _message_bytes(message, layout.rows_from)
        with recorder.task(f"{ctx.layer}.exchange", TaskKind.ALL_TO_ALL, Phase.BACKWARD, sent_bytes, layout.ranks):
            received_SC = grad_MC.new_empty(sum(layout.rows_to), grad_MC.shape[1])
            _all_to_all(received_SC, message, layout.rows_to, layout.rows_from, layout.group)
        shape = (num_rows, received_SC.shape[0], received_SC.shape[1])
        with recorder.task(f"{ctx.layer}.pack", TaskKind.HALO_PACK, Phase.BACKWARD, shape):
            grad_NC = grad_MC[:num_rows].index_add(0, layout.send_row_S, received_SC)
        return grad_NC, None, None, None


class _AllGather(torch.autograd.Function):
    """All rows to all ranks, the sum of their gradients back to the owner."""

    @staticmethod
    def forward(ctx: Any, rows_NC: Tensor, layout: ExchangeLayout, recorder: Recorder, layer: str) -> Tensor:
        ctx.layout, ctx.recorder, ctx.layer = layout, recorder, layer
        num_rows, columns = ctx.shape = rows_NC.shape
        shape = (num_rows, layout.max_rows, columns)
        with recorder.task(f"{layer}.pack", TaskKind.PAD_ROWS, recorder.phase, shape):
            padded = rows_NC.new_empty(layout.max_rows, columns)
            padded[:num_rows] = rows_NC
            padded[num_rows:] = 0
        with recorder.task(
            f"{layer}.exchange", TaskKind.ALL_GATHER, recorder.phase, (_num_bytes(padded),), layout.ranks
        ):
            gathered = padded.new_empty(len(layout.rows_to) * layout.max_rows, columns)
            all_gather_single(gathered, padded, group=layout.group)
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        layout, recorder = ctx.layout, ctx.recorder
        gathered = gradients[0].contiguous()
        given_bytes = (_num_bytes(gathered),)
        with recorder.task(f"{ctx.layer}.exchange", TaskKind.REDUCE_SCATTER, Phase.BACKWARD, given_bytes, layout.ranks):
            summed = gathered.new_empty(layout.max_rows, gathered.shape[1])
            reduce_scatter_single(summed, gathered, group=layout.group)
        num_rows, columns = ctx.shape
        with recorder.task(
            f"{ctx.layer}.pack", TaskKind.PAD_ROWS, Phase.BACKWARD, (num_rows, layout.max_rows, columns)
        ):
            grad_NC = summed[:num_rows]
        return grad_NC, None, None, None


def _all_to_all(
    received: Tensor,
    sent: Tensor,
    rows_from: tuple[int, ...],
    rows_to: tuple[int, ...],
    group: dist.ProcessGroup | None,
) -> None:
    dist.all_to_all_single(received, sent, list(rows_from), list(rows_to), group=group)


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _message_bytes(message: Tensor, rows: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(count * message.shape[1] * message.element_size() for count in rows)
