"""Exchange of heads: nodes to heads and back, so that each rank attends with its heads over the group's whole topology.

A rank sends to each other one the queries, keys and values of its own rows for the heads of that rank, as one
message, and gets its heads' for the rows of all; the outputs travel the other way. Heads need not divide by ranks; a
rank without heads sends its rows' and receives nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.exchange import SPEC_DTYPES, ExchangeLayout, all_to_all, message_bytes
from executor.record import Recorder
from simulator.exchanges import first_head, head_counts, message_name, rows_in_message
from simulator.specs.plan import Exchange
from simulator.specs.program import Phase, TaskKind


@dataclass(frozen=True, kw_only=True)
class HeadExchange:
    """One layer's exchange of heads.

    Attributes:
        graph_rank: of the group.
        num_heads, head_size: of the model.
        dtype: number format of the rows.
        wire: number format of what travels.
    """

    layout: ExchangeLayout
    recorder: Recorder
    layer: str
    graph_rank: int
    num_heads: int
    head_size: int
    dtype: torch.dtype
    wire: torch.dtype

    @property
    def heads(self) -> tuple[int, ...]:
        """Heads of each rank."""
        return head_counts(self.num_heads, len(self.layout.rows_by_rank))

    @property
    def own_heads(self) -> slice:
        """Heads of this rank."""
        first = first_head(self.num_heads, len(self.layout.rows_by_rank), self.graph_rank)
        return slice(first, first + self.heads[self.graph_rank])

    @property
    def num_own_heads(self) -> int:
        """How many they are."""
        return self.heads[self.graph_rank]

    @property
    def num_group_rows(self) -> int:
        """Rows of all ranks."""
        return sum(self.layout.rows_by_rank)

    @property
    def num_messages(self) -> int:
        """Collectives each way."""
        return self.layout.num_messages(Exchange.HEAD_ALL_TO_ALL)

    def rows_of(self, index: int) -> tuple[int, ...]:
        """Return the rows of each rank that a message carries."""
        each = self.layout.head_rows_per_message
        return tuple(rows_in_message(rows, index, each) for rows in self.layout.rows_by_rank)

    def own_rows(self, index: int) -> slice:
        """Return the own rows that a message carries."""
        counts = [self.rows_of(other)[self.graph_rank] for other in range(index + 1)]
        return slice(sum(counts[:-1]), sum(counts))

    def group_rows(self, index: int) -> slice:
        """Return where the rows of all ranks lie that a message carries."""
        counts = [sum(self.rows_of(other)) for other in range(index + 1)]
        return slice(sum(counts[:-1]), sum(counts))

    def pack(self, task: str, index: int, parts: Sequence[Tensor], phase: Phase) -> Tensor:
        """Return the message of own rows to all ranks, [numbers]: for each rank its heads, row by row.

        Args:
            parts: of all own rows, [N, kinds of numbers x H x K]; they stand one behind another in a row.
        """
        num_rows, columns = self._own_shape(index, parts)
        with self.recorder.task(self._name(task, index), TaskKind.COPY_ROWS, phase, (num_rows, columns)):
            message = parts[0].new_empty(num_rows * columns, dtype=self.wire)
            for block, own in self._blocks(message, index, parts):
                block.copy_(own)
        return message

    def unpack(self, task: str, index: int, message: Tensor, parts: Sequence[Tensor], phase: Phase) -> None:
        """Write the message of all ranks to own rows, the reverse of `pack`."""
        with self.recorder.task(self._name(task, index), TaskKind.COPY_ROWS, phase, self._own_shape(index, parts)):
            for block, own in self._blocks(message, index, parts):
                own.copy_(block)

    def to_heads(self, task: str, index: int, phase: Phase, message: Tensor, received_GC: Tensor, kinds: int) -> None:
        """Send own rows of all heads; receive own heads of all rows.

        Args:
            message: of `pack`.
            received_GC: of all messages, [rows of all ranks, kinds of numbers x own heads x K].
        """
        by_head, by_row = self._splits(index, kinds)
        self._send(task, index, phase, message, by_head, received_GC[self.group_rows(index)].view(-1), by_row)

    def to_nodes(self, task: str, index: int, phase: Phase, sent_GC: Tensor, kinds: int) -> Tensor:
        """Send own heads of all rows; return own rows of all heads, [numbers], for `unpack`."""
        by_head, by_row = self._splits(index, kinds)
        received = sent_GC.new_empty(sum(by_head))
        self._send(task, index, phase, sent_GC[self.group_rows(index)].view(-1), by_row, received, by_head)
        return received

    def new_heads(self, rows_NC: Tensor, kinds: int) -> Tensor:
        """Return room for own heads of all rows, in the number format of messages."""
        return rows_NC.new_empty(self.num_group_rows, kinds * self.num_own_heads * self.head_size, dtype=self.wire)

    def converted(self, task: str, rows_GC: Tensor, dtype: torch.dtype, phase: Phase) -> Tensor:
        """Return rows in another number format, as a task of its own."""
        with self.recorder.task(f"{self.layer}.{task}", TaskKind.COPY_ROWS, phase, tuple(rows_GC.shape)):
            return rows_GC.to(dtype)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """Return gradients of own heads side by side, in the number format of messages."""
        shape = (self.num_group_rows, sum(part.shape[1] for part in parts))
        with self.recorder.task(f"{self.layer}.heads", TaskKind.COPY_ROWS, Phase.BACKWARD, shape):
            joined_GC = parts[0].new_empty(shape, dtype=self.wire)
            for target, part in zip(joined_GC.split([part.shape[1] for part in parts], dim=1), parts, strict=True):
                target.copy_(part)
        return joined_GC

    @property
    def converts(self) -> bool:
        """Whether what travels has another number format than the rows."""
        return self.wire != self.dtype

    def _send(
        self,
        task: str,
        index: int,
        phase: Phase,
        message: Tensor,
        sent_splits: tuple[int, ...],
        received: Tensor,
        received_splits: tuple[int, ...],
    ) -> None:
        shape, dtype = message_bytes(message, sent_splits), SPEC_DTYPES[self.wire]
        with self.recorder.task(self._name(task, index), TaskKind.ALL_TO_ALL, phase, shape, self.layout.ranks, dtype):
            all_to_all(received, message, received_splits, sent_splits, self.layout.group)

    def _splits(self, index: int, kinds: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return how many numbers go to or come from each rank by its heads, and by its rows."""
        row_numbers, rows = kinds * self.head_size, self.rows_of(index)
        by_head = tuple(rows[self.graph_rank] * heads * row_numbers for heads in self.heads)
        return by_head, tuple(count * self.num_own_heads * row_numbers for count in rows)

    def _own_shape(self, index: int, parts: Sequence[Tensor]) -> tuple[int, int]:
        return self.rows_of(index)[self.graph_rank], sum(part.shape[1] for part in parts)

    def _blocks(self, message: Tensor, index: int, parts: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for each rank and each part of rows what lies in the message, and the same of own rows."""
        num_rows, columns = self._own_shape(index, parts)
        kinds = columns // (self.num_heads * self.head_size)
        own = [part[self.own_rows(index)].unflatten(1, (-1, self.num_heads, self.head_size)) for part in parts]
        blocks = message.split([num_rows * heads * kinds * self.head_size for heads in self.heads])
        for rank, (block, heads) in enumerate(zip(blocks, self.heads, strict=True)):
            if heads == 0:
                continue
            first = first_head(self.num_heads, len(self.heads), rank)
            in_parts = block.view(num_rows, kinds, heads, self.head_size).split([part.shape[1] for part in own], dim=1)
            for place, part in zip(in_parts, own, strict=True):
                yield place, part[:, :, first : first + heads]

    def _name(self, task: str, index: int) -> str:
        return message_name(f"{self.layer}.{task}", index, self.num_messages)


def nodes_to_heads(q_ND: Tensor, kv_N2D: Tensor, exchange: HeadExchange) -> tuple[Tensor, Tensor]:
    """Return queries [G, h K], and keys and values side by side [G, 2 h K], of own heads h and the rows of all ranks G.

    Rows are sorted by message, then by rank. Every rank of the group must call it, also one without rows or heads.
    """
    q_GD, kv_G2D = _ToHeads.apply(q_ND, kv_N2D, exchange)  # type: ignore[no-untyped-call]
    return q_GD, kv_G2D


def heads_to_nodes(out_GD: Tensor, exchange: HeadExchange) -> Tensor:
    """Return own rows of all heads, [N, D], from own heads of all rows."""
    out_ND: Tensor = _ToNodes.apply(out_GD, exchange)  # type: ignore[no-untyped-call]
    return out_ND


class _ToHeads(torch.autograd.Function):
    """Queries, keys and values to the ranks of their heads, gradients back."""

    @staticmethod
    def forward(ctx: Any, q_ND: Tensor, kv_N2D: Tensor, exchange: HeadExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange, ctx.num_rows = exchange, len(q_ND)
        phase = exchange.recorder.phase
        received = exchange.new_heads(q_ND, 3)
        for index in range(exchange.num_messages):
            message = exchange.pack("pack", index, (q_ND, kv_N2D), phase)
            exchange.to_heads("exchange", index, phase, message, received, 3)
        if exchange.converts:
            received = exchange.converted("heads", received, exchange.dtype, phase)
        columns = received.shape[1] // 3
        return received[:, :columns], received[:, columns:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        exchange: HeadExchange = ctx.exchange
        joined = exchange.joined(gradients)
        width = exchange.num_heads * exchange.head_size
        grads = tuple(joined.new_empty(ctx.num_rows, kinds * width, dtype=exchange.dtype) for kinds in (1, 2))
        for index in reversed(range(exchange.num_messages)):
            message = exchange.to_nodes("exchange", index, Phase.BACKWARD, joined, 3)
            exchange.unpack("pack", index, message, grads, Phase.BACKWARD)
        return grads[0], grads[1], None


class _ToNodes(torch.autograd.Function):
    """Outputs of own heads to the ranks of their rows, gradients back."""

    @staticmethod
    def forward(ctx: Any, out_GD: Tensor, exchange: HeadExchange) -> Tensor:
        ctx.exchange = exchange
        phase = exchange.recorder.phase
        sent = exchange.converted("narrow", out_GD, exchange.wire, phase) if exchange.converts else out_GD.contiguous()
        num_rows = exchange.layout.rows_by_rank[exchange.graph_rank]
        out_ND = out_GD.new_empty(num_rows, exchange.num_heads * exchange.head_size)
        for index in range(exchange.num_messages):
            message = exchange.to_nodes("exchange_back", index, phase, sent, 1)
            exchange.unpack("unpack", index, message, (out_ND,), phase)
        return out_ND

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (grad_ND,) = gradients
        exchange: HeadExchange = ctx.exchange
        grad_GD = exchange.new_heads(grad_ND, 1)
        for index in reversed(range(exchange.num_messages)):
            message = exchange.pack("unpack", index, (grad_ND,), Phase.BACKWARD)
            exchange.to_heads("exchange_back", index, Phase.BACKWARD, message, grad_GD, 1)
        if exchange.converts:
            grad_GD = exchange.converted("narrow", grad_GD, exchange.dtype, Phase.BACKWARD)
        return grad_GD, None
