"""Lowers a layer's attention with its exchange: from the normed rows to what attention made of them.

`executor/exchange.py`, `executor/apart.py`, `executor/overlap.py` and `executor/heads.py` run these tasks under the
same names.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from simulator.exchanges import (
    head_counts,
    message_name,
    num_messages,
    payload_columns,
    rank_columns,
    rank_heads,
    rows_in_message,
    rows_per_message,
    wire_dtype,
)
from simulator.shares import heads_by_rank
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import HALO_EXCHANGES, Exchange, ExchangePayload, Plan
from simulator.specs.program import TaskKind
from simulator.specs.units import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeCounts:
    """A set of edges in numbers.

    Attributes:
        num_of_long_targets: edges of targets with more than `MAX_SHORT_EDGES` edges of the set.
        num_of_long_sources: edges of sources with more than so many.
    """

    num_edges: int = 0
    num_of_long_targets: int = 0
    num_of_long_sources: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """What one rank moves in a halo exchange through which each row of another host enters a host once.

    Attributes:
        ranks: of its host, which pass rows on among them.
        rows_to, rows_from: rows that it sends to each rank of its graph group, and receives from each.
        passed_to, passed_from: rows that it passes on to each rank of its host, and gets from each.
    """

    ranks: tuple[int, ...]
    rows_to: tuple[int, ...]
    rows_from: tuple[int, ...]
    passed_to: tuple[int, ...]
    passed_from: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedPart:
    """The part that one rank serves, alone or with others, in a graph group where some parts have several ranks.

    Attributes:
        ranks: that serve it, in order.
        part_ranks: ranks that serve each part of the group's batch.
        num_rows: nodes of the part, all of which the rank attends for, with its own heads.
    """

    ranks: tuple[int, ...]
    part_ranks: tuple[int, ...]
    num_rows: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWork:
    """What one rank and the others of its graph group hold in a step, as its exchanges need it.

    Attributes:
        graph_rank: of the group.
        rows_by_rank: nodes that each rank of the group owns; of a layer of a sampled batch, the rows that it gets.
        rows_to, rows_from: rows that this rank sends to each, and receives from each, in a halo exchange.
        max_pair_rows: the most rows that one rank of the group sends to another one in it.
        num_boundary_rows: own nodes with edges from nodes of others.
        edges: into own nodes.
        inner_edges, outer_edges: of them, from own nodes and from nodes of others.
        group_edges: of the whole batch.
        num_sampled_targets: of a layer of a sampled batch, the rows that it returns; None for all.
        host: for a hierarchical exchange; None without one.
        served: where parts may have several ranks; then `edges` are those into all rows of the part, and `rows_to` and
            `rows_from` hold the rows of ranks that serve it too. None for one rank a part.
    """

    graph_rank: int = 0
    rows_by_rank: tuple[int, ...] = (0,)
    rows_to: tuple[int, ...] = (0,)
    rows_from: tuple[int, ...] = (0,)
    max_pair_rows: int = 0
    num_boundary_rows: int = 0
    edges: EdgeCounts = field(default_factory=EdgeCounts)
    inner_edges: EdgeCounts = field(default_factory=EdgeCounts)
    outer_edges: EdgeCounts = field(default_factory=EdgeCounts)
    group_edges: EdgeCounts = field(default_factory=EdgeCounts)
    num_sampled_targets: int | None = None
    host: HostWork | None = None
    served: ServedPart | None = None

    @property
    def num_rows(self) -> int:
        """Own nodes."""
        return self.rows_by_rank[self.graph_rank]

    @property
    def num_group_rows(self) -> int:
        """Nodes of all ranks."""
        return sum(self.rows_by_rank)

    def num_remote_rows(self, exchange: Exchange) -> int:
        """Return the rows that an exchange of rows brings; an all-gather's hold the own ones too, all padded."""
        if exchange in HALO_EXCHANGES:
            return sum(self.rows_from)
        return max(self.rows_by_rank) * len(self.rows_by_rank)

    def halo_splits(self, exchange: Exchange) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the rows to and from each rank of the group; in a hierarchical exchange, before any are passed on."""
        if exchange is Exchange.HIERARCHICAL_HALO:
            assert self.host is not None, "such a plan's partition counts the rows of hosts"
            return self.host.rows_to, self.host.rows_from
        return self.rows_to, self.rows_from

    def num_passed_rows(self, exchange: Exchange) -> int:
        """Return how many of the rows that an exchange brings are passed on by ranks of the own host."""
        return sum(self.host.passed_from) if self.host and exchange is Exchange.HIERARCHICAL_HALO else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A forward task and what its backward pass is.

    Attributes:
        kind, backward_kind: None where nothing runs.
        dtype: None for the plan's precision.
        is_in_flight: forward, nothing waits for this collective until an operation that joins.
        backward_is_in_flight: the same of the backward pass.
        joins, backward_joins: the task waits for all collectives that are in flight.
        ranks: of a collective; empty for those of the graph group.
        receives, backward_receives: of an all-to-all, bytes from each rank, forward and back.
        gradients_of: names of the operations whose gradients of parameters are there once the backward pass of this one
            is over; None for its own.
    """

    name: str
    kind: TaskKind | None
    shape: tuple[int, ...]
    backward_kind: TaskKind | None
    backward_shape: tuple[int, ...]
    dtype: Dtype | None = None
    is_in_flight: bool = False
    backward_is_in_flight: bool = False
    joins: bool = False
    backward_joins: bool = False
    ranks: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    backward_receives: tuple[int, ...] = ()
    gradients_of: tuple[str, ...] | None = None


def same(name: str, kind: TaskKind, shape: tuple[int, ...]) -> Operation:
    """Return an operation whose backward pass has the same kind and shape."""
    return Operation(name=name, kind=kind, shape=shape, backward_kind=kind, backward_shape=shape)


def backward_only(name: str, kind: TaskKind, shape: tuple[int, ...]) -> Operation:
    """Return an operation that forward gives a view and costs nothing."""
    return Operation(name=name, kind=None, shape=(), backward_kind=kind, backward_shape=shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLowering:
    """Lowers the attention of one layer on one rank.

    Attributes:
        layer: name of the layer.
        exchange: of the layer.
    """

    plan: Plan
    model: ModelSpec
    work: GroupWork
    layer: str
    exchange: Exchange

    @property
    def heads(self) -> int:
        """Heads that this rank, or its graph group where heads travel, attends with."""
        return rank_heads(self.plan, self.model)

    @property
    def columns(self) -> int:
        """Numbers of a row's queries in these heads."""
        return rank_columns(self.plan, self.model)

    def operations(self) -> list[Operation]:
        """Return what follows the layer's first norm, up to the output of attention."""
        index = int(self.layer.removeprefix("layer"))
        sends_rows = self.plan.exchange_payload is ExchangePayload.ROWS
        match self.exchange:
            case Exchange.NONE:
                return self._alone()
            case Exchange.HEAD_ALL_TO_ALL:
                return self._by_heads()
            case Exchange.HALO if self.work.served is not None:
                return self._of_served_part(self.work.served)
            case Exchange.HALO | Exchange.HIERARCHICAL_HALO | Exchange.ALL_GATHER if self.plan.overlaps(index):
                return self._overlapped(sends_rows=sends_rows)
            case Exchange.HALO | Exchange.HIERARCHICAL_HALO | Exchange.ALL_GATHER:
                return self._in_turn(sends_rows=sends_rows)

    def _alone(self) -> list[Operation]:
        """Return attention without an exchange; of a sampled batch, of the first rows alone."""
        work, targets = self.work, self.work.num_sampled_targets
        attention = self._attend("", work.edges, work.num_rows, targets=targets)
        if targets is None:
            return [self._project(), *attention]
        shape = (work.num_rows, targets, self.model.width)
        return [self._project(), same(f"{self.layer}.targets", TaskKind.TARGET_ROWS, shape), *attention]

    # --- Exchanges of rows.

    def _in_turn(self, *, sends_rows: bool) -> list[Operation]:
        """Return the exchange, and then attention over all edges."""
        work, width = self.work, self.model.width
        own_rows = work.num_rows if self.exchange in HALO_EXCHANGES else 0
        sources = own_rows + work.num_remote_rows(self.exchange)
        exchange = [*self._messages(own_rows=own_rows), *self._widen(), *self._pass_on(copies_held=True)]
        attention = self._attend("", self.work.edges, sources)
        if not sends_rows:
            return [*self._projections(), *exchange, *attention]
        return [
            *exchange,
            same(f"{self.layer}.query", TaskKind.PROJECTION, (work.num_rows, width, self.columns)),
            same(f"{self.layer}.key_value", TaskKind.PROJECTION, (sources, width, 2 * self.columns)),
            *attention,
        ]

    def _overlapped(self, *, sends_rows: bool) -> list[Operation]:
        """Return attention over inner edges while rows of others are on their way, then over outer edges, and a merge.

        Backward the pass over sources comes first, and that over targets runs while the gradients of these rows travel.
        """
        forward = self._overlapped_forward(sends_rows=sends_rows)
        backward = self._overlapped_backward(sends_rows=sends_rows)
        # One node of autograd does all of it, so all gradients are there when it is done.
        names = tuple(operation.name for operation in backward)
        backward = [replace(operation, gradients_of=()) for operation in backward]
        backward[-1] = replace(backward[-1], gradients_of=names)
        # Backward passes run in the reverse order.
        return [*reversed(backward), *forward]

    def _overlapped_forward(self, *, sends_rows: bool) -> list[Operation]:
        work, model, layer = self.work, self.model, self.layer
        remote, width = work.num_remote_rows(self.exchange), model.width
        start = [
            replace(operation, is_in_flight=_is_collective(operation))
            for operation in self._messages(own_rows=0, in_place=not sends_rows)
        ]
        key_value = same(f"{layer}.key_value", TaskKind.PROJECTION, (work.num_rows, width, 2 * self.columns))
        start = [*start, key_value] if sends_rows else [key_value, *start]
        start.append(same(f"{layer}.query", TaskKind.PROJECTION, (work.num_rows, width, self.columns)))
        arrived = [*self._widen(), *self._pass_on(copies_held=False)]
        if sends_rows:
            arrived.append(same(f"{layer}.key_value_halo", TaskKind.PROJECTION, (remote, width, 2 * self.columns)))
        if wire_dtype(self.plan) is not self.plan.precision and self.exchange not in HALO_EXCHANGES:
            columns = payload_columns(self.plan, model)
            arrived.insert(1, same(f"{layer}.own_rows", TaskKind.COPY_ROWS, (work.num_rows, columns)))
        arrived.append(self._attention("_halo", work.outer_edges, remote, targets=work.num_boundary_rows))
        arrived[0] = replace(arrived[0], joins=True)
        merge_shape = (work.num_rows, work.num_boundary_rows, self.heads, model.head_size)
        operations = [
            *start,
            *self._attend("_interior", work.inner_edges, work.num_rows),
            *self._bias("", work.edges),
            *self._bias("_halo", work.outer_edges),
            *arrived,
            same(f"{layer}.merge", TaskKind.MERGE, merge_shape),
        ]
        return [replace(operation, backward_kind=None, backward_shape=()) for operation in operations]

    def _overlapped_backward(self, *, sends_rows: bool) -> list[Operation]:
        """Return what runs backward, in this order."""
        work, width, columns, layer = self.work, self.model.width, self.columns, self.layer
        is_halo, remote = self.exchange in HALO_EXCHANGES, work.num_remote_rows(self.exchange)
        sent = list(self._messages(own_rows=0, adds_own=sends_rows or is_halo))
        exchanges = [replace(each, backward_is_in_flight=True) for each in sent if _is_collective(each)]
        taken = [each for each in reversed(sent) if not _is_collective(each)]
        taken[0] = replace(taken[0], backward_joins=True)
        shape = self._attention("", work.edges, remote + is_halo * work.num_rows).shape
        first: list[Operation] = []
        query = same(f"{layer}.query", TaskKind.PROJECTION, (work.num_rows, width, columns))
        key_value = same(f"{layer}.key_value", TaskKind.PROJECTION, (work.num_rows, width, 2 * columns))
        meanwhile = [*self._bias("", work.edges), query]
        if sends_rows:
            first.append(same(f"{layer}.key_value_halo", TaskKind.PROJECTION, (remote, width, 2 * columns)))
            meanwhile += [key_value] * is_halo
        else:
            taken.append(key_value)
        operations = [
            same(f"{layer}.attention_sources", TaskKind.ATTENTION_SOURCES, shape),
            *first,
            *reversed([*self._widen(), *self._pass_on(copies_held=False)]),
            *reversed(exchanges),
            same(f"{layer}.attention_targets", TaskKind.ATTENTION_TARGETS, shape),
            *meanwhile,
            *taken,
        ]
        return [replace(operation, kind=None, shape=()) for operation in operations]

    def _messages(self, *, own_rows: int, adds_own: bool = False, in_place: bool = False) -> Iterator[Operation]:
        """Yield packing and sending of each message, and between them the change of number format.

        Args:
            own_rows: that packing also copies to the front of the exchange buffer.
            in_place: own rows were made where an all-gather in one message takes them from.
            adds_own: backward, this rank has gradients of own rows too, to which those of the message are added.
        """
        plan, work, layer = self.plan, self.work, self.layer
        columns, wire = payload_columns(plan, self.model), wire_dtype(plan)
        row_bytes = columns * wire.num_bytes
        each = rows_per_message(plan, self.model, self.exchange)
        most_rows = work.max_pair_rows if self.exchange in HALO_EXCHANGES else max(work.rows_by_rank)
        count = num_messages(most_rows, each)
        for index in range(count):
            if self.exchange in HALO_EXCHANGES:
                rows_to, rows_from = (
                    tuple(rows_in_message(rows, index, each) for rows in split)
                    for split in work.halo_splits(self.exchange)
                )
                message_rows, kind, backward_kind = sum(rows_to), TaskKind.ALL_TO_ALL, TaskKind.ALL_TO_ALL
                sent = tuple(rows * row_bytes for rows in rows_to)
                sent_back = tuple(rows * row_bytes for rows in rows_from)
                # Gradients are added to those of own rows in place.
                pack = Operation(
                    name=message_name(f"{layer}.pack", index, count),
                    kind=TaskKind.HALO_PACK,
                    shape=(own_rows if index == 0 else 0, message_rows, columns),
                    backward_kind=TaskKind.HALO_PACK,
                    backward_shape=(0, message_rows, columns),
                )
            else:
                message_rows = rows_in_message(most_rows, index, each)
                kind, backward_kind = TaskKind.ALL_GATHER, TaskKind.REDUCE_SCATTER
                sent = (message_rows * row_bytes,)
                sent_back = (message_rows * row_bytes * len(work.rows_by_rank),)
                own = rows_in_message(work.num_rows, index, each)
                pack = same(
                    message_name(f"{layer}.pack", index, count), TaskKind.PAD_ROWS, (own, message_rows, columns)
                )
                if in_place and count == 1 and wire is plan.precision:
                    pack = replace(pack, shape=(0, message_rows - own, columns))
                if adds_own or count > 1:
                    # Added to the gradients of own rows, or one of several pieces: no view of what was summed.
                    pack = replace(pack, backward_kind=TaskKind.COPY_ROWS, backward_shape=(own, columns))
            yield pack
            if wire is not plan.precision:
                yield same(message_name(f"{layer}.narrow", index, count), TaskKind.COPY_ROWS, (message_rows, columns))
            yield Operation(
                name=message_name(f"{layer}.exchange", index, count),
                kind=kind,
                shape=sent,
                backward_kind=backward_kind,
                backward_shape=sent_back,
                dtype=wire,
                receives=sent_back if kind is TaskKind.ALL_TO_ALL else (),
                backward_receives=sent if kind is TaskKind.ALL_TO_ALL else (),
            )

    def _widen(self) -> Iterator[Operation]:
        """Yield the way back to the plan's number format, of all rows that were received."""
        if wire_dtype(self.plan) is not self.plan.precision:
            work = self.work
            rows = work.num_remote_rows(self.exchange) - work.num_passed_rows(self.exchange)
            shape = (rows, payload_columns(self.plan, self.model))
            yield same(f"{self.layer}.widen", TaskKind.COPY_ROWS, shape)

    def _pass_on(self, *, copies_held: bool) -> Iterator[Operation]:
        """Yield the exchange inside the own host that follows one between hosts; none where the host has one rank.

        Args:
            copies_held: packing also copies own rows and those that came, unless these came to where they stay.
        """
        host = self.work.host
        if self.exchange is not Exchange.HIERARCHICAL_HALO or host is None or len(host.ranks) == 1:
            return
        columns, wire = payload_columns(self.plan, self.model), wire_dtype(self.plan)
        changes_format = wire is not self.plan.precision
        row_bytes = columns * wire.num_bytes
        held_rows, name = copies_held * (self.work.num_rows + sum(host.rows_from)), f"{self.layer}.host"
        yield Operation(
            name=f"{name}_pack",
            kind=TaskKind.HALO_PACK,
            shape=(held_rows, sum(host.passed_to), columns),
            backward_kind=TaskKind.HALO_PACK,
            backward_shape=(0, sum(host.passed_to), columns),
        )
        if changes_format:
            yield same(f"{name}_narrow", TaskKind.COPY_ROWS, (sum(host.passed_to), columns))
        passed_to, passed_from = (
            tuple(rows * row_bytes for rows in split) for split in (host.passed_to, host.passed_from)
        )
        yield Operation(
            name=f"{name}_exchange",
            kind=TaskKind.ALL_TO_ALL,
            shape=passed_to,
            backward_kind=TaskKind.ALL_TO_ALL,
            backward_shape=passed_from,
            dtype=wire,
            ranks=host.ranks,
            receives=passed_from,
            backward_receives=passed_to,
        )
        if changes_format:
            yield same(f"{name}_widen", TaskKind.COPY_ROWS, (sum(host.passed_from), columns))

    # --- Exchange of heads.

    def _by_heads(self) -> list[Operation]:
        """Return nodes to heads, attention of the own heads over all edges, and the way back."""
        model, work, layer = self.model, self.work, self.layer
        heads = head_counts(self.heads, len(work.rows_by_rank))
        own_heads, rows = heads[work.graph_rank], work.num_group_rows
        wire, columns = wire_dtype(self.plan), own_heads * model.head_size
        found = [self._project(), *self._head_messages(heads, to_heads=True)]
        joined = same(f"{layer}.heads", TaskKind.COPY_ROWS, (rows, 3 * columns))
        changes_format = wire is not self.plan.precision
        found.append(joined if changes_format else backward_only(joined.name, TaskKind.COPY_ROWS, joined.shape))
        if own_heads > 0:
            found += self._attend("", work.group_edges, rows, targets=rows, heads=own_heads)
        if changes_format:
            found.append(same(f"{layer}.narrow", TaskKind.COPY_ROWS, (rows, columns)))
        return [*found, *self._head_messages(heads, to_heads=False)]

    def _head_messages(self, heads: tuple[int, ...], *, to_heads: bool) -> Iterator[Operation]:
        """Yield the messages of one way.

        Args:
            heads: of each rank.
            to_heads: queries, keys and values of own rows go to the ranks of their heads; else outputs come back.
        """
        plan, model, work, layer = self.plan, self.model, self.work, self.layer
        wire = wire_dtype(plan)
        head_bytes = (3 if to_heads else 1) * model.head_size * wire.num_bytes
        each = rows_per_message(plan, model, Exchange.HEAD_ALL_TO_ALL)
        count = num_messages(max(work.rows_by_rank), each)
        for index in range(count):
            own = rows_in_message(work.num_rows, index, each)
            by_head = tuple(own * other * head_bytes for other in heads)
            by_row = tuple(
                rows_in_message(rows, index, each) * heads[work.graph_rank] * head_bytes for rows in work.rows_by_rank
            )
            # Own rows of all heads, in the layout of messages.
            copied = same(
                message_name(f"{layer}.{'pack' if to_heads else 'unpack'}", index, count),
                TaskKind.COPY_ROWS,
                (own, (3 if to_heads else 1) * self.columns),
            )
            sent = Operation(
                name=message_name(f"{layer}.{'exchange' if to_heads else 'exchange_back'}", index, count),
                kind=TaskKind.ALL_TO_ALL,
                shape=by_head if to_heads else by_row,
                backward_kind=TaskKind.ALL_TO_ALL,
                backward_shape=by_row if to_heads else by_head,
                dtype=wire,
                receives=by_row if to_heads else by_head,
                backward_receives=by_head if to_heads else by_row,
            )
            yield from (copied, sent) if to_heads else (sent, copied)

    # --- Parts that several ranks serve.

    def _of_served_part(self, served: ServedPart) -> list[Operation]:
        """Return attention of a part with this rank's heads: to them from rows, over all edges, and back."""
        model, work, layer = self.model, self.work, self.layer
        heads = heads_by_rank(model.num_heads, served.part_ranks)
        own_heads, rows, key_value_size = heads[work.graph_rank], work.num_rows, 2 * model.head_size
        is_mate = [rank in served.ranks for rank in range(len(heads))]
        other_rows = sum(
            count * other for count, other, mate in zip(work.rows_to, heads, is_mate, strict=True) if not mate
        )
        row_bytes = key_value_size * self.plan.precision.num_bytes
        sent = tuple(count * other * row_bytes for count, other in zip(work.rows_to, heads, strict=True))
        received = tuple(count * own_heads * row_bytes for count in work.rows_from)
        # Counted in heads of rows: own rows go to the part's ranks by head, and some of them to others. Backward the
        # gradients of own rows stay where they are if this rank has all heads.
        pack = same(f"{layer}.pack", TaskKind.HALO_PACK, (rows * model.num_heads, other_rows, key_value_size))
        if own_heads == model.num_heads:
            pack = replace(pack, backward_shape=(0, other_rows, key_value_size))
        exchange = Operation(
            name=f"{layer}.exchange",
            kind=TaskKind.ALL_TO_ALL,
            shape=sent,
            backward_kind=TaskKind.ALL_TO_ALL,
            backward_shape=received,
            receives=received,
            backward_receives=sent,
        )
        sources = rows + work.num_remote_rows(Exchange.HALO)
        return [
            self._project(),
            *self._between_mates(served, heads, to_heads=True),
            pack,
            exchange,
            *self._attend("", work.edges, sources, targets=served.num_rows, heads=own_heads),
            *self._between_mates(served, heads, to_heads=False),
        ]

    def _between_mates(self, served: ServedPart, heads: tuple[int, ...], *, to_heads: bool) -> list[Operation]:
        """Return one way of queries or outputs between the ranks of a part; nothing where there is one.

        Args:
            heads: of each rank of the graph group.
            to_heads: queries of own rows go to the ranks of their heads; else outputs come back.
        """
        if len(served.ranks) == 1:
            return []
        work, me = self.work, self.work.graph_rank
        head_bytes = self.model.head_size * self.plan.precision.num_bytes
        by_head = tuple(work.num_rows * heads[mate] * head_bytes * (mate != me) for mate in served.ranks)
        by_row = tuple(work.rows_by_rank[mate] * heads[me] * head_bytes * (mate != me) for mate in served.ranks)
        sent, received = (by_head, by_row) if to_heads else (by_row, by_head)
        task, name = ("query_pack", "query_exchange") if to_heads else ("unpack", "exchange_back")
        copied = same(f"{self.layer}.{task}", TaskKind.COPY_ROWS, (work.num_rows, self.columns))
        travels = Operation(
            name=f"{self.layer}.{name}",
            kind=TaskKind.ALL_TO_ALL,
            shape=sent,
            backward_kind=TaskKind.ALL_TO_ALL,
            backward_shape=received,
            ranks=served.ranks,
            receives=received,
            backward_receives=sent,
        )
        return [copied, travels] if to_heads else [travels, copied]

    # --- What all of them do.

    def _project(self) -> Operation:
        shape = (self.work.num_rows, self.model.width, 3 * self.columns)
        return same(f"{self.layer}.query_key_value", TaskKind.PROJECTION, shape)

    def _projections(self) -> list[Operation]:
        """Return what makes queries, keys and values: at once, or queries apart where they are computed again."""
        if not self.plan.splits_projection(int(self.layer.removeprefix("layer"))):
            return [self._project()]
        rows, width = self.work.num_rows, self.model.width
        return [
            same(f"{self.layer}.query", TaskKind.PROJECTION, (rows, width, self.columns)),
            same(f"{self.layer}.key_value", TaskKind.PROJECTION, (rows, width, 2 * self.columns)),
        ]

    def _attend(
        self, suffix: str, edges: EdgeCounts, sources: int, *, targets: int | None = None, heads: int | None = None
    ) -> list[Operation]:
        """Return bias and attention over a set of edges."""
        return [
            *self._bias(suffix, edges, heads=heads),
            self._attention(suffix, edges, sources, targets=targets, heads=heads),
        ]

    def _bias(self, suffix: str, edges: EdgeCounts, *, heads: int | None = None) -> list[Operation]:
        if self.model.edge_bias is EdgeBias.NONE:
            return []
        shape = (edges.num_edges, self.heads if heads is None else heads)
        return [same(f"{self.layer}.edge_bias{suffix}", TaskKind.EDGE_BIAS, shape)]

    def _attention(
        self, suffix: str, edges: EdgeCounts, sources: int, *, targets: int | None = None, heads: int | None = None
    ) -> Operation:
        shape = (
            self.work.num_rows if targets is None else targets,
            sources,
            edges.num_edges,
            edges.num_of_long_targets,
            edges.num_of_long_sources,
            self.heads if heads is None else heads,
            self.model.head_size,
        )
        return same(f"{self.layer}.attention{suffix}", TaskKind.ATTENTION, shape)


def _is_collective(operation: Operation) -> bool:
    return operation.kind is not None and operation.kind.is_collective
