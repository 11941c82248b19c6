"""Attention of a part that several ranks serve: from own rows of all heads to all its rows of own heads, and back.

The ranks of a part own shares of its rows, and each attends with its own heads over all edges of the part. Every row
travels straight from its owner to every rank that attends to it, with the heads of the latter alone; so nothing is
passed on, and nothing travels that is not used. `AttentionLowering` lowers these tasks under the same names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from executor.exchange import SPEC_DTYPES, ExchangeLayout, all_to_all, message_bytes
from executor.record import Recorder
from simulator.shares import first_heads, heads_by_rank
from simulator.specs.program import Phase, TaskKind


@dataclass(frozen=True, kw_only=True)
class PartLayout:
    """The part that this rank serves.

    Attributes:
        part_ranks: ranks that serve each part of the graph group's batch.
        ranks: of the graph group, those that serve this part, in order.
        group: their process group; None where it is this rank alone.
    """

    part_ranks: tuple[int, ...]
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None

    @cached_property
    def global_ranks(self) -> tuple[int, ...]:
        """Ranks of the process group, in order."""
        return tuple(dist.get_process_group_ranks(self.group)) if self.group is not None else ()


@dataclass(frozen=True, kw_only=True)
class HeadBlock:
    """Keys and values of some heads of own rows.

    Attributes:
        rows: [rows, 2, heads, K].
        heads: which they are.
        row_S: own rows that they are of; None for all in order, as ranks of the part have them.
    """

    rows: Tensor
    heads: slice
    row_S: Tensor | None


def pack_heads(kv_N2HK: Tensor, blocks: Sequence[HeadBlock]) -> None:
    """Write keys and values of own rows to blocks."""
    for block in blocks:
        own = kv_N2HK[:, :, block.heads]
        if block.row_S is None:
            block.rows.copy_(own)
        else:
            torch.index_select(own, 0, block.row_S, out=block.rows)


def unpack_heads_(grad_N2HK: Tensor, blocks: Sequence[HeadBlock]) -> None:
    """Write the gradients in blocks of all rows to own rows, and add those in blocks of some, in place.

    The former have every head once together, unless the gradients are there already. Sums have the same bits in every
    run: no row comes twice in a block, and blocks follow one another.
    """
    for block in blocks:
        if block.row_S is None:
            grad_N2HK[:, :, block.heads].copy_(block.rows)
    for block in blocks:
        if block.row_S is not None:
            grad_N2HK[:, :, block.heads].index_add_(0, block.row_S, block.rows)


@dataclass(frozen=True, kw_only=True)
class ServedExchange:
    """One layer's exchanges for such a part.

    Attributes:
        layout: of the graph group; what it sends to ranks of the own part, and receives from them, are all their rows.
        graph_rank: of the group.
        num_heads, head_size: of the model.
    """

    layout: ExchangeLayout
    part: PartLayout
    recorder: Recorder
    layer: str
    graph_rank: int
    num_heads: int
    head_size: int
    dtype: torch.dtype

    @cached_property
    def heads(self) -> tuple[slice, ...]:
        """Heads of each rank of the graph group."""
        counts = heads_by_rank(self.num_heads, self.part.part_ranks)
        firsts = first_heads(self.num_heads, self.part.part_ranks)
        return tuple(slice(first, first + count) for first, count in zip(firsts, counts, strict=True))

    @property
    def own_heads(self) -> slice:
        """Heads of this rank."""
        return self.heads[self.graph_rank]

    @property
    def num_own_heads(self) -> int:
        """How many they are."""
        return _length(self.own_heads)

    @property
    def has_all_heads(self) -> bool:
        """Whether this rank serves its part alone."""
        return self.num_own_heads == self.num_heads

    @property
    def num_rows(self) -> int:
        """Own rows."""
        return self.layout.rows_by_rank[self.graph_rank]

    # --- Queries and outputs, between the ranks of the part.

    def to_heads(self, pack: str, task: str, rows_ND: Tensor, phase: Phase) -> Tensor:
        """Return own heads of all rows of the part, [own rows, then those of each other rank, h K]."""
        num_rows, columns = len(rows_ND), self.num_own_heads * self.head_size
        found = rows_ND.new_empty(sum(self.layout.rows_by_rank[mate] for mate in self.part.ranks), columns)
        rows_NHK = rows_ND.unflatten(1, (self.num_heads, self.head_size))
        with self._copying(pack, rows_ND, phase):
            self._by_own_head(found[:num_rows]).copy_(rows_NHK[:, self.own_heads])
            message = rows_ND.new_empty(sum(self._by_head))
            for block, heads in self._blocks_of_mates(message):
                block.copy_(rows_NHK[:, heads])
        self._between_mates(task, message, self._by_head, found[num_rows:].view(-1), self._by_row, phase)
        return found

    def to_rows(self, pack: str, task: str, heads_PD: Tensor, phase: Phase) -> Tensor:
        """Return own rows of all heads, the reverse of `to_heads`."""
        num_rows, received = self.num_rows, heads_PD.new_empty(sum(self._by_head))
        self._between_mates(task, heads_PD[num_rows:].view(-1), self._by_row, received, self._by_head, phase)
        rows_ND = heads_PD.new_empty(num_rows, self.num_heads * self.head_size)
        with self._copying(pack, rows_ND, phase):
            rows_NHK = rows_ND.unflatten(1, (self.num_heads, self.head_size))
            rows_NHK[:, self.own_heads].copy_(self._by_own_head(heads_PD[:num_rows]))
            for block, heads in self._blocks_of_mates(received):
                rows_NHK[:, heads].copy_(block)
        return rows_ND

    def note(self, task: str) -> None:
        """Note an exchange between the ranks of a part that this rank, alone, has no part in: all note as many."""
        with self.recorder.position.waiting(f"{self.layer}.{task}"):
            pass

    # --- Keys and values, between all ranks.

    def spread(self, kv_N2D: Tensor) -> Tensor:
        """Return keys and values of own heads, [M, 2 h K]: of own rows, then of those that arrive, by owner."""
        phase, num_rows, own_shape = self.recorder.phase, len(kv_N2D), (2, self.num_own_heads, self.head_size)
        kv_N2HK = kv_N2D.unflatten(1, (2, self.num_heads, self.head_size))
        found = kv_N2D.new_empty(num_rows + sum(self.layout.rows_from), 2 * self.num_own_heads * self.head_size)
        with self._packing(phase, num_copied=num_rows * self.num_heads):
            message = kv_N2D.new_empty(sum(self._numbers_to))
            own = HeadBlock(rows=found[:num_rows].unflatten(1, own_shape), heads=self.own_heads, row_S=None)
            pack_heads(kv_N2HK, [own, *self._blocks(message)])
        self._between_all(message, self._numbers_to, found[num_rows:].view(-1), self._numbers_from, phase)
        return found

    def collect(self, grad_M: Tensor) -> Tensor:
        """Return the gradients of own rows' keys and values, [N, 2 D], from those of what ranks attended to."""
        num_rows, received = self.num_rows, grad_M.new_empty(sum(self._numbers_to))
        message = grad_M[num_rows:].view(-1)
        self._between_all(message, self._numbers_from, received, self._numbers_to, Phase.BACKWARD)
        num_copied = 0 if self.has_all_heads else num_rows * self.num_heads
        with self._packing(Phase.BACKWARD, num_copied=num_copied):
            own, width = grad_M[:num_rows], self.num_heads * self.head_size
            grad_N = own if self.has_all_heads else grad_M.new_empty(num_rows, 2 * width)
            blocks = self._blocks(received)
            if not self.has_all_heads:
                own_rows = own.unflatten(1, (2, self.num_own_heads, self.head_size))
                blocks = [HeadBlock(rows=own_rows, heads=self.own_heads, row_S=None), *blocks]
            unpack_heads_(grad_N.unflatten(1, (2, self.num_heads, self.head_size)), blocks)
        return grad_N

    # --- Sizes and places.

    @cached_property
    def _by_head(self) -> tuple[int, ...]:
        """Numbers of own rows that each rank of the part has the heads of; 0 for this one."""
        me = self.graph_rank
        return tuple(
            self.num_rows * _length(self.heads[mate]) * self.head_size * (mate != me) for mate in self.part.ranks
        )

    @cached_property
    def _by_row(self) -> tuple[int, ...]:
        """Numbers of own heads that each rank of the part has the rows of; 0 for this one."""
        size, rows = self.num_own_heads * self.head_size, self.layout.rows_by_rank
        return tuple(rows[mate] * size * (mate != self.graph_rank) for mate in self.part.ranks)

    @cached_property
    def _numbers_to(self) -> tuple[int, ...]:
        """Numbers of keys and values that go to each rank of the graph group."""
        size = 2 * self.head_size
        return tuple(rows * _length(heads) * size for rows, heads in zip(self.layout.rows_to, self.heads, strict=True))

    @cached_property
    def _numbers_from(self) -> tuple[int, ...]:
        """Numbers of keys and values that come from each rank of the graph group."""
        return tuple(rows * 2 * self.num_own_heads * self.head_size for rows in self.layout.rows_from)

    def _blocks_of_mates(self, message: Tensor) -> Iterator[tuple[Tensor, slice]]:
        """Yield what of a message is of each other rank of the part, [N, h K by head], and its heads."""
        for mate, block in zip(self.part.ranks, message.split(self._by_head), strict=True):
            if mate != self.graph_rank:
                heads = self.heads[mate]
                yield block.view(self.num_rows, _length(heads), self.head_size), heads

    def _blocks(self, message: Tensor) -> list[HeadBlock]:
        """Return what of a message is of each rank with rows."""
        rows_of_rank = self.layout.send_row_S.split(self.layout.rows_to)
        found = []
        for rank, (block, row_S) in enumerate(zip(message.split(self._numbers_to), rows_of_rank, strict=True)):
            heads, is_mate = self.heads[rank], rank in self.part.ranks
            if len(row_S) > 0:
                rows = block.view(len(row_S), 2, _length(heads), self.head_size)
                found.append(HeadBlock(rows=rows, heads=heads, row_S=None if is_mate else row_S))
        return found

    def _by_own_head(self, rows_NC: Tensor) -> Tensor:
        rows_NHK: Tensor = rows_NC.unflatten(1, (self.num_own_heads, self.head_size))
        return rows_NHK

    # --- Tasks.

    def _copying(self, task: str, rows_ND: Tensor, phase: Phase) -> Any:
        return self.recorder.task(f"{self.layer}.{task}", TaskKind.COPY_ROWS, phase, tuple(rows_ND.shape))

    def _packing(self, phase: Phase, *, num_copied: int) -> Any:
        """Return the task of packing, counted in heads of rows."""
        num_sent = sum(
            rows * _length(heads)
            for rank, (rows, heads) in enumerate(zip(self.layout.rows_to, self.heads, strict=True))
            if rank not in self.part.ranks
        )
        shape = (num_copied, num_sent, 2 * self.head_size)
        return self.recorder.task(f"{self.layer}.pack", TaskKind.HALO_PACK, phase, shape)

    def _between_mates(
        self,
        task: str,
        message: Tensor,
        sent_splits: tuple[int, ...],
        received: Tensor,
        received_splits: tuple[int, ...],
        phase: Phase,
    ) -> None:
        shape, ranks, dtype = message_bytes(message, sent_splits), self.part.global_ranks, SPEC_DTYPES[self.dtype]
        with self.recorder.task(f"{self.layer}.{task}", TaskKind.ALL_TO_ALL, phase, shape, ranks, dtype):
            all_to_all(received, message, received_splits, sent_splits, self.part.group)

    def _between_all(
        self,
        message: Tensor,
        sent_splits: tuple[int, ...],
        received: Tensor,
        received_splits: tuple[int, ...],
        phase: Phase,
    ) -> None:
        shape, ranks, dtype = message_bytes(message, sent_splits), self.layout.ranks, SPEC_DTYPES[self.dtype]
        with self.recorder.task(f"{self.layer}.exchange", TaskKind.ALL_TO_ALL, phase, shape, ranks, dtype):
            all_to_all(received, message, received_splits, sent_splits, self.layout.group)


def _length(heads: slice) -> int:
    return int(heads.stop - heads.start)


def rows_to_heads(q_ND: Tensor, kv_N2D: Tensor, exchange: ServedExchange) -> tuple[Tensor, Tensor]:
    """Return queries of the part's rows, [P, h K], and keys and values of all that they attend to, [M, 2 h K].

    Both are of own heads h, and begin with own rows. Every rank of the graph group must call it, also one without rows.
    """
    q_PD, kv_M2D = _ToHeads.apply(q_ND, kv_N2D, exchange)  # type: ignore[no-untyped-call]
    return q_PD, kv_M2D


def heads_to_rows(out_PD: Tensor, exchange: ServedExchange) -> Tensor:
    """Return own rows of all heads, [N, D], from own heads of all rows of the part."""
    out_ND: Tensor = _ToRows.apply(out_PD, exchange)  # type: ignore[no-untyped-call]
    return out_ND


class _ToHeads(torch.autograd.Function):
    """Queries, keys and values to those who attend with them; gradients back."""

    @staticmethod
    def forward(ctx: Any, q_ND: Tensor, kv_N2D: Tensor, exchange: ServedExchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        if exchange.has_all_heads:
            exchange.note("query_exchange")
            q_PD = q_ND.view_as(q_ND)
        else:
            q_PD = exchange.to_heads("query_pack", "query_exchange", q_ND, exchange.recorder.phase)
        return q_PD, exchange.spread(kv_N2D)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        exchange: ServedExchange = ctx.exchange
        grad_q, grad_kv = (gradient.contiguous() for gradient in gradients)
        grad_kv = exchange.collect(grad_kv)
        if exchange.has_all_heads:
            exchange.note("query_exchange")
            return grad_q, grad_kv, None
        return exchange.to_rows("query_pack", "query_exchange", grad_q, Phase.BACKWARD), grad_kv, None


class _ToRows(torch.autograd.Function):
    """Outputs of own heads to the owners of their rows, gradients back."""

    @staticmethod
    def forward(ctx: Any, out_PD: Tensor, exchange: ServedExchange) -> Tensor:
        ctx.exchange = exchange
        if exchange.has_all_heads:
            exchange.note("exchange_back")
            return out_PD.view_as(out_PD)
        return exchange.to_rows("unpack", "exchange_back", out_PD.contiguous(), exchange.recorder.phase)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        exchange: ServedExchange = ctx.exchange
        (grad_ND,) = gradients
        if exchange.has_all_heads:
            exchange.note("exchange_back")
            return grad_ND, None
        return exchange.to_heads("unpack", "exchange_back", grad_ND.contiguous(), Phase.BACKWARD), None
