"""Attention over own rows while rows of others are on their way, and the merge of both parts.

Two autograd functions start and await an exchange. Autograd runs nodes in the reverse order of their making, so
backward the node that awaited starts the way of the gradients, and the node that started awaits them: what was made
between the two runs meanwhile, forward and back. On GPUs a collective runs on a stream of its own, waits for what was
launched before its call, and `Work.wait` lets later kernels wait for it, not the host; until then a `Sent` keeps its
tensors alive, so none of their memory is given away while the other stream uses it.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from executor.exchange import RowExchange, Sent
from executor.operations import Operation
from executor.record import Recorder
from simulator.specs.program import Phase, TaskKind


@dataclass(kw_only=True)
class Flight:
    """An exchange between its start and its end.

    Attributes:
        sent: messages of the pass under way, in order of sending.
    """

    exchange: RowExchange
    sent: list[Sent] = field(default_factory=list)

    def wait(self) -> list[Tensor]:
        """Return what the messages bring."""
        sent, self.sent = self.sent, []
        return [message.wait(self.exchange.recorder) for message in sent]


def start_exchange(rows_NC: Tensor, exchange: RowExchange) -> tuple[Tensor, Tensor, Flight]:
    """Return own rows to go on with, room for those of others, and the flight.

    What stands in the room is undefined before `await_exchange`. Every rank of the group must call this, also one
    without rows.
    """
    flight = Flight(exchange=exchange)
    own_NC, received_MC = _Started.apply(rows_NC, flight)  # type: ignore[no-untyped-call]
    return own_NC, received_MC, flight


def await_exchange(received_MC: Tensor, flight: Flight) -> Tensor:
    """Return the rows that an exchange brings."""
    out: Tensor = _Arrived.apply(received_MC, flight)  # type: ignore[no-untyped-call]
    return out


class _Started(torch.autograd.Function):
    """Sends rows; backward, awaits the gradients of those that others got."""

    @staticmethod
    def forward(ctx: Any, rows_NC: Tensor, flight: Flight) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.flight = flight
        exchange = flight.exchange
        received = rows_NC.new_empty(exchange.num_received, rows_NC.shape[1], dtype=exchange.wire)
        flight.sent = [exchange.send(rows_NC, received, index, async_op=True) for index in range(exchange.num_messages)]
        return rows_NC.view_as(rows_NC), received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None]:
        own_NC = gradients[0]
        flight: Flight = ctx.flight
        assert own_NC is not None, "attention over own rows gives them gradients"
        exchange, num_rows = flight.exchange, len(own_NC)
        exchange.recorder.pause()
        grad_NC = None
        for index, summed in zip(reversed(range(exchange.num_messages)), flight.wait(), strict=True):
            grad_NC = exchange.take_back(own_NC, summed, index, out=grad_NC, num_rows=num_rows)
        assert grad_NC is not None, "every exchange has a message"
        return grad_NC, None


class _Arrived(torch.autograd.Function):
    """Awaits rows; backward, sends their gradients to the owners."""

    @staticmethod
    def forward(ctx: Any, received_MC: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.wait()
        exchange = flight.exchange
        if exchange.converts:
            return exchange.widen(received_MC, exchange.recorder.phase)
        return received_MC.view_as(received_MC)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        (grad_MC,) = gradients
        flight: Flight = ctx.flight
        exchange = flight.exchange
        grad_MC = exchange.widen(grad_MC, Phase.BACKWARD) if exchange.converts else grad_MC.contiguous()
        flight.sent = [
            exchange.send_back(grad_MC, index, async_op=True) for index in reversed(range(exchange.num_messages))
        ]
        # The gradients travel; `_Started` takes them from the flight.
        return None, None


def boundary_queries(q_ND: Tensor, num_boundary: int, recorder: Recorder, layer: str) -> tuple[Tensor, Tensor]:
    """Return all queries and those of the last rows, whose gradients are added in one pass."""
    all_ND, last_BD = _Tail.apply(q_ND, num_boundary, recorder, layer)  # type: ignore[no-untyped-call]
    return all_ND, last_BD


class _Tail(torch.autograd.Function):
    """All rows, and the last of them."""

    @staticmethod
    def forward(ctx: Any, rows_ND: Tensor, num_last: int, recorder: Recorder, layer: str) -> tuple[Tensor, Tensor]:
        ctx.first_last, ctx.recorder, ctx.layer = len(rows_ND) - num_last, recorder, layer
        return rows_ND.view_as(rows_ND), rows_ND[len(rows_ND) - num_last :]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        grad_ND, grad_last = gradients
        first = ctx.first_last
        shape = tuple(grad_ND.shape)
        with ctx.recorder.task(f"{ctx.layer}.boundary_queries", TaskKind.COPY_ROWS, Phase.BACKWARD, shape):
            out_ND = torch.empty_like(grad_ND, memory_format=torch.contiguous_format)
            out_ND[:first] = grad_ND[:first]
            torch.add(grad_ND[first:], grad_last, out=out_ND[first:])
        return out_ND, None, None, None


class _Merge(torch.autograd.Function):
    """`merge_attention` for the last rows, beside the others as they are, without a pass over rows for each step of it.

    With weights w = exp(lse - lse of both), the output is the sum of w times the outputs; the gradient of an output is
    w times that of the sum, that of a log-sum-exp w times its product with (output - sum).
    """

    @staticmethod
    def forward(ctx: Any, inner_NHK: Tensor, inner_lse_NH: Tensor, outer_BHK: Tensor, outer_lse_BH: Tensor) -> Tensor:
        first = len(inner_NHK) - len(outer_BHK)
        inner_lse_BH = inner_lse_NH[first:]
        both_lse_BH = torch.logaddexp(inner_lse_BH, outer_lse_BH)
        # A row without any edge has minus infinity everywhere: weights of zero.
        finite_BH = both_lse_BH.masked_fill(torch.isinf(both_lse_BH), 0.0)
        inner_weight = torch.exp(inner_lse_BH - finite_BH).unsqueeze(-1)
        outer_weight = torch.exp(outer_lse_BH - finite_BH).unsqueeze(-1)
        out_NHK = torch.empty_like(inner_NHK)
        out_NHK[:first] = inner_NHK[:first]
        merged_BHK = torch.addcmul(inner_weight * inner_NHK[first:], outer_weight, outer_BHK)
        out_NHK[first:] = merged_BHK
        ctx.save_for_backward(inner_NHK, outer_BHK, inner_weight, outer_weight, out_NHK)
        ctx.first = first
        return out_NHK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        (grad_NHK,) = gradients
        inner_NHK, outer_BHK, inner_weight, outer_weight, out_NHK = ctx.saved_tensors
        first = ctx.first
        grad_BHK = grad_NHK[first:]
        grad_inner_NHK = torch.empty_like(grad_NHK)
        grad_inner_NHK[:first] = grad_NHK[:first]
        grad_inner_NHK[first:] = inner_weight * grad_BHK
        grad_outer_BHK = (outer_weight * grad_BHK).to(grad_NHK.dtype)
        product_BH = (grad_BHK * out_NHK[first:]).sum(-1, dtype=torch.float32)
        grad_inner_lse_NH = grad_NHK.new_zeros(grad_NHK.shape[:2], dtype=torch.float32)
        inner_product_BH = (grad_BHK * inner_NHK[first:]).sum(-1, dtype=torch.float32)
        grad_inner_lse_NH[first:] = inner_weight.squeeze(-1) * (inner_product_BH - product_BH)
        outer_product_BH = (grad_BHK * outer_BHK).sum(-1, dtype=torch.float32)
        grad_outer_lse_BH = outer_weight.squeeze(-1) * (outer_product_BH - product_BH)
        return grad_inner_NHK, grad_inner_lse_NH, grad_outer_BHK, grad_outer_lse_BH


def merge_last_rows(inner: tuple[Tensor, Tensor], outer: tuple[Tensor, Tensor]) -> Tensor:
    """Return attention over both sets of edges of a rank, [N, H, K].

    Args:
        inner: output and log-sum-exp over edges between own rows, of all rows.
        outer: the same over edges from rows of others, of the last rows, which alone have such edges.
    """
    out: Tensor = _Merge.apply(*inner, *outer)  # type: ignore[no-untyped-call]
    return out


MERGE = Operation(
    kind=TaskKind.MERGE,
    function=merge_last_rows,
    shape=lambda inner, outer: (len(inner[0]), len(outer[0]), *inner[0].shape[1:]),
)
