"""Exchanges of rows between the ranks of a graph group, message by message, with their backward passes.

`simulator/exchange_tasks.py` lowers these tasks under the same names.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.attention.parts import add_rows_
from executor.compat import all_gather_single, reduce_scatter_single
from executor.record import Mark, Recorder
from simulator.exchanges import message_name, num_messages, rows_in_message
from simulator.specs.plan import Exchange
from simulator.specs.program import Phase, TaskKind
from simulator.specs.units import Dtype

SPEC_DTYPES = {torch.float32: Dtype.FLOAT32, torch.bfloat16: Dtype.BFLOAT16}


@dataclass(frozen=True, kw_only=True)
class ExchangeLayout:
    """Which rows this rank sends and receives; the same on every layer.

    Rows travel in as many messages as the largest pair of ranks needs. Those of one message lie together: in
    `send_row_S` and in the halo they are sorted by message, then by rank, and what an all-gather brings is too.

    Attributes:
        send_row_S: own rows to send in a halo exchange.
        rows_to: how many of them go to each rank of the group.
        rows_from: how many halo rows come from each.
        max_rows: own rows of the largest rank of the group.
        group: the graph group's process group.
        max_pair_rows: the most halo rows that any rank of the group sends to another one.
        rows_per_message: the most rows that a rank sends to another one in one message; None for all.
        rows_by_rank: own rows of each rank of the group.
        head_rows_per_message: as `rows_per_message`, of an exchange of heads.
    """

    send_row_S: Tensor
    rows_to: tuple[int, ...]
    rows_from: tuple[int, ...]
    max_rows: int
    group: dist.ProcessGroup | None
    max_pair_rows: int = 0
    rows_per_message: int | None = None
    rows_by_rank: tuple[int, ...] = ()
    head_rows_per_message: int | None = None

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks of the group, in order."""
        return tuple(dist.get_process_group_ranks(self.group)) if self.group is not None else ()

    def num_messages(self, exchange: Exchange) -> int:
        """Return how many collectives an exchange takes."""
        if exchange is Exchange.HEAD_ALL_TO_ALL:
            return num_messages(self.max_rows, self.head_rows_per_message)
        most_rows = self.max_pair_rows if exchange is Exchange.HALO else self.max_rows
        return num_messages(most_rows, self.rows_per_message)

    def in_message(self, rows: Sequence[int], index: int) -> tuple[int, ...]:
        """Return how many of the rows to or from each rank one message carries."""
        return tuple(rows_in_message(count, index, self.rows_per_message) for count in rows)


@dataclass(kw_only=True)
class Sent:
    """A message that may still be on its way; all tensors that it needs live until it has been waited for.

    Attributes:
        name: of the exchange.
        work: None once the message has arrived.
        output: what it brings.
        message: what was sent.
    """

    name: str
    work: dist.Work | None
    mark: Mark | None
    output: Tensor
    message: Tensor | None

    def wait(self, recorder: Recorder) -> Tensor:
        """Return what the message brings: for the host to read on CPUs, for later kernels of this stream on GPUs."""
        if self.work is not None:
            with recorder.position.waiting(self.name):
                self.work.wait()
            recorder.waited(self.mark)
        self.work = self.message = None
        return self.output


@dataclass(frozen=True, kw_only=True)
class RowExchange:
    """One layer's exchange of rows, forward and back, one message after another.

    Attributes:
        exchange: HALO or ALL_GATHER.
        dtype: number format of the rows.
        wire: number format of what travels.
        prefix: of its tasks' names within the layer.
    """

    exchange: Exchange
    layout: ExchangeLayout
    recorder: Recorder
    layer: str
    dtype: torch.dtype
    wire: torch.dtype
    prefix: str = ""

    @property
    def num_messages(self) -> int:
        """Collectives each way."""
        return self.layout.num_messages(self.exchange)

    @property
    def num_received(self) -> int:
        """Rows that arrive."""
        layout = self.layout
        if self.exchange is Exchange.HALO:
            return sum(layout.rows_from)
        return len(layout.rows_to) * layout.max_rows

    @property
    def converts(self) -> bool:
        """Whether what travels has another number format than the rows."""
        return self.wire != self.dtype

    @property
    def sends_in_place(self) -> bool:
        """Whether own rows can lie where they would arrive: an all-gather in one message of their number format."""
        return self.exchange is Exchange.ALL_GATHER and self.num_messages == 1 and not self.converts

    def own_slot(self, graph_rank: int) -> slice:
        """Return the place of a rank's own rows, with padding, among what an all-gather in one message brings."""
        return slice(graph_rank * self.layout.max_rows, (graph_rank + 1) * self.layout.max_rows)

    def send(
        self,
        rows_NC: Tensor,
        received: Tensor,
        index: int,
        *,
        front: Tensor | None = None,
        slot: Tensor | None = None,
        async_op: bool = False,
    ) -> Sent:
        """Pack and send one message.

        Args:
            received: buffer of all messages, in the number format of messages.
            front: gets the own rows too.
            slot: of `received`, with padding, where own rows lie that are sent in place; None for a copy of them.
        """
        layout, phase = self.layout, self.recorder.phase
        message = self._pack(rows_NC, index, front) if slot is None else self._padded(slot, len(rows_NC))
        if self.converts:
            message = self._cast("narrow", index, message, self.wire, phase)
        output = received[self._received(index)]
        if self.exchange is Exchange.HALO:
            rows_to, rows_from = layout.in_message(layout.rows_to, index), layout.in_message(layout.rows_from, index)
            shape = message_bytes(message, rows_to)
            with self._collective(TaskKind.ALL_TO_ALL, phase, index, shape) as mark:
                work = all_to_all(output, message, rows_from, rows_to, layout.group, async_op=async_op)
        else:
            with self._collective(TaskKind.ALL_GATHER, phase, index, (message.nbytes,)) as mark:
                work = all_gather_single(output, message, group=layout.group, async_op=async_op)
        return self._sent(work, mark, output, message, async_op=async_op)

    def send_back(self, grad_received: Tensor, index: int, *, async_op: bool = False) -> Sent:
        """Send the gradients of what one message brought to the owners of its rows.

        Args:
            grad_received: of all messages, contiguous, in the number format of messages.
        """
        layout, columns = self.layout, grad_received.shape[1]
        message = grad_received[self._received(index)]
        if self.exchange is Exchange.HALO:
            rows_to, rows_from = layout.in_message(layout.rows_to, index), layout.in_message(layout.rows_from, index)
            shape = message_bytes(message, rows_from)
            with self._collective(TaskKind.ALL_TO_ALL, Phase.BACKWARD, index, shape) as mark:
                output = message.new_empty(sum(rows_to), columns)
                work = all_to_all(output, message, rows_to, rows_from, layout.group, async_op=async_op)
        else:
            with self._collective(TaskKind.REDUCE_SCATTER, Phase.BACKWARD, index, (message.nbytes,)) as mark:
                output = message.new_empty(len(message) // len(layout.rows_to), columns)
                work = reduce_scatter_single(output, message, group=layout.group, async_op=async_op)
        return self._sent(work, mark, output, message, async_op=async_op)

    def take_back(
        self, grad_NC: Tensor | None, summed: Tensor, index: int, *, out: Tensor | None, num_rows: int
    ) -> Tensor:
        """Return the gradients of own rows with those that one message brought; messages come last first.

        Args:
            grad_NC: gradients from this rank itself, contiguous, which are added to in place; None without any.
            summed: what the message brought.
            out: what this function returned for the message before; None for the first.
        """
        layout = self.layout
        if self.converts:
            summed = self._cast("narrow", index, summed, self.dtype, Phase.BACKWARD)
        name, columns = self._name("pack", index), summed.shape[1]
        if self.exchange is Exchange.HALO:
            assert grad_NC is not None, "a halo's own rows have gradients of their own"
            row_S = layout.send_row_S[self._sent_rows(index)]
            with self.recorder.task(name, TaskKind.HALO_PACK, Phase.BACKWARD, (0, len(row_S), columns)):
                add_rows_(grad_NC, row_S, summed, layout.in_message(layout.rows_to, index))
            return grad_NC
        own = self._own_rows(index, num_rows)
        num_own = own.stop - own.start
        if grad_NC is None and self.num_messages == 1:
            with self.recorder.task(name, TaskKind.PAD_ROWS, Phase.BACKWARD, (num_own, *summed.shape)):
                return summed[:num_own]
        with self.recorder.task(name, TaskKind.COPY_ROWS, Phase.BACKWARD, (num_own, columns)):
            if grad_NC is not None:
                grad_NC[own].add_(summed[:num_own])
                return grad_NC
            out = summed.new_empty(num_rows, columns) if out is None else out
            out[own].copy_(summed[:num_own])
        return out

    def restore_own(self, rows_NC: Tensor, arrival_MC: Tensor, graph_rank: int) -> None:
        """Write own rows over what an all-gather brought of them in a number format with fewer digits."""
        layout, phase = self.layout, self.recorder.phase
        with self.recorder.task(f"{self.layer}.own_rows", TaskKind.COPY_ROWS, phase, tuple(rows_NC.shape)):
            for index in range(self.num_messages):
                own = self._own_rows(index, len(rows_NC))
                first = self._received(index).start + graph_rank * layout.in_message([layout.max_rows], index)[0]
                arrival_MC[first : first + own.stop - own.start].copy_(rows_NC[own])

    def widen(self, received: Tensor, phase: Phase, *, out: Tensor | None = None) -> Tensor:
        """Return what arrived in the number format of rows; backward, gradients in that of messages."""
        with self.recorder.task(f"{self.layer}.{self.prefix}widen", TaskKind.COPY_ROWS, phase, tuple(received.shape)):
            if out is not None:
                return out.copy_(received)
            return received.to(self.wire if phase is Phase.BACKWARD else self.dtype)

    def _pack(self, rows_NC: Tensor, index: int, front: Tensor | None) -> Tensor:
        layout, columns = self.layout, rows_NC.shape[1]
        name, phase = self._name("pack", index), self.recorder.phase
        if self.exchange is Exchange.HALO:
            row_S = layout.send_row_S[self._sent_rows(index)]
            shape = (0 if front is None else len(rows_NC), len(row_S), columns)
            with self.recorder.task(name, TaskKind.HALO_PACK, phase, shape):
                message = rows_NC.index_select(0, row_S)
                if front is not None:
                    front.copy_(rows_NC)
            return message
        own = rows_NC[self._own_rows(index, len(rows_NC))]
        padded_rows = rows_in_message(layout.max_rows, index, layout.rows_per_message)
        with self.recorder.task(name, TaskKind.PAD_ROWS, phase, (len(own), padded_rows, columns)):
            message = rows_NC.new_empty(padded_rows, columns)
            message[: len(own)] = own
            message[len(own) :] = 0
        return message

    def _padded(self, slot: Tensor, num_rows: int) -> Tensor:
        padding, phase = slot[num_rows:], self.recorder.phase
        with self.recorder.task(self._name("pack", 0), TaskKind.PAD_ROWS, phase, (0, *padding.shape)):
            padding.fill_(0)
        return slot

    def _cast(self, task: str, index: int, rows: Tensor, dtype: torch.dtype, phase: Phase) -> Tensor:
        with self.recorder.task(self._name(task, index), TaskKind.COPY_ROWS, phase, tuple(rows.shape)):
            return rows.to(dtype)

    def _collective(
        self, kind: TaskKind, phase: Phase, index: int, shape: tuple[int, ...]
    ) -> contextlib.AbstractContextManager[Mark | None]:
        name = self._name("exchange", index)
        return self.recorder.task(name, kind, phase, shape, self.layout.ranks, SPEC_DTYPES[self.wire])

    def _sent(
        self, work: dist.Work | None, mark: Mark | None, output: Tensor, message: Tensor, *, async_op: bool
    ) -> Sent:
        name = f"{self.layer}.{self.prefix}exchange"
        if not async_op:
            return Sent(name=name, work=None, mark=None, output=output, message=None)
        assert work is not None, "a call that returns before it has ended gives its work"
        self.recorder.pause()
        if not output.is_cuda:  # on GPUs the kernel tells how long it took
            self.recorder.follow(mark, work)
        return Sent(name=name, work=work, mark=mark, output=output, message=message)

    def _name(self, task: str, index: int) -> str:
        return message_name(f"{self.layer}.{self.prefix}{task}", index, self.num_messages)

    def _sent_rows(self, index: int) -> slice:
        """Return where the rows of one message lie among those to send."""
        return _slice_of([sum(self.layout.in_message(self.layout.rows_to, other)) for other in range(index + 1)])

    def _received(self, index: int) -> slice:
        """Return where the rows of one message lie among those that arrive."""
        layout = self.layout
        if self.exchange is Exchange.HALO:
            return _slice_of([sum(layout.in_message(layout.rows_from, other)) for other in range(index + 1)])
        return _slice_of([sum(layout.in_message([layout.max_rows] * len(layout.rows_to), i)) for i in range(index + 1)])

    def _own_rows(self, index: int, num_rows: int) -> slice:
        """Return which of the own rows an all-gather's message carries."""
        return _slice_of([self.layout.in_message([num_rows], other)[0] for other in range(index + 1)])


def _slice_of(counts: Sequence[int]) -> slice:
    """Return the place of the last of some runs that lie one behind another."""
    return slice(sum(counts[:-1]), sum(counts))


def exchange_rows(rows_NC: Tensor, exchange: RowExchange) -> Tensor:
    """Return the rows that this rank attends to; every rank of the group must call it, also one without rows.

    HALO gives [N + halo, C], own rows first. ALL_GATHER gives [ranks * max_rows, C], message by message and rank by
    rank, with zeros behind the rows of a smaller rank.
    """
    out: Tensor = _Exchanged.apply(rows_NC, exchange)  # type: ignore[no-untyped-call]
    return out


class _Exchanged(torch.autograd.Function):
    """Rows forward, the sum of their gradients back to the owner."""

    @staticmethod
    def forward(ctx: Any, rows_NC: Tensor, exchange: RowExchange) -> Tensor:
        num_rows, columns = rows_NC.shape
        ctx.exchange, ctx.num_rows = exchange, num_rows
        # Own rows come first in what a halo exchange gives; an all-gather brings them too.
        num_own = num_rows if exchange.exchange is Exchange.HALO else 0
        all_rows = rows_NC.new_empty(num_own + exchange.num_received, columns)
        front = all_rows[:num_own] if exchange.exchange is Exchange.HALO else None
        bring_rows(rows_NC, all_rows[num_own:], exchange, front=front)
        return all_rows

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # Nobody else has them: they come from attention, or from the second exchange of a hierarchical one.
        grad_MC = gradients[0].contiguous()
        exchange, num_rows = ctx.exchange, ctx.num_rows
        if exchange.exchange is Exchange.HALO:
            return return_gradients(grad_MC[:num_rows], grad_MC[num_rows:], exchange, num_rows), None
        return return_gradients(None, grad_MC, exchange, num_rows), None


def bring_rows(rows_NC: Tensor, arrival_MC: Tensor, exchange: RowExchange, *, front: Tensor | None = None) -> None:
    """Write the rows that an exchange brings.

    Args:
        arrival_MC: contiguous room for what arrives, in the number format of rows.
        front: gets the own rows too.
    """
    received = arrival_MC.new_empty(arrival_MC.shape, dtype=exchange.wire) if exchange.converts else arrival_MC
    for index in range(exchange.num_messages):
        exchange.send(rows_NC, received, index, front=front if index == 0 else None)
    if exchange.converts:
        exchange.widen(received, exchange.recorder.phase, out=arrival_MC)


def return_gradients(own_NC: Tensor | None, grad_MC: Tensor, exchange: RowExchange, num_rows: int) -> Tensor:
    """Return the gradients of own rows with those of the rows that an exchange brought, which their ranks send back.

    Args:
        own_NC: gradients from this rank itself, contiguous, which are added to in place; None without any.
        grad_MC: gradients of what arrived, contiguous.
    """
    grad_MC = exchange.widen(grad_MC, Phase.BACKWARD) if exchange.converts else grad_MC
    grad_NC = None
    for index in reversed(range(exchange.num_messages)):
        sent = exchange.send_back(grad_MC, index)
        grad_NC = exchange.take_back(own_NC, sent.output, index, out=grad_NC, num_rows=num_rows)
    assert grad_NC is not None, "every exchange has a message"
    return grad_NC


def all_to_all(
    received: Tensor,
    sent: Tensor,
    received_splits: Sequence[int],
    sent_splits: Sequence[int],
    group: dist.ProcessGroup | None,
    *,
    async_op: bool = False,
) -> dist.Work | None:
    """Send rows to each rank of a group and receive some from each; return the work of a call that goes on."""
    work: dist.Work | None = dist.all_to_all_single(
        received, sent, list(received_splits), list(sent_splits), group=group, async_op=async_op
    )
    return work


def message_bytes(message: Tensor, rows: Sequence[int]) -> tuple[int, ...]:
    """Return the bytes of the rows of a message that go to each rank."""
    row_bytes = message.element_size() * (message.shape[1] if message.ndim > 1 else 1)
    return tuple(count * row_bytes for count in rows)
