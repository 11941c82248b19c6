"""The attention of one layer under each exchange, from queries, keys and values (or normed rows) to its output.

`simulator/exchange_tasks.py` lowers these tasks in this order.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from executor import operations
from executor.apart import ApartExchange
from executor.data import RankData
from executor.dense import Weights
from executor.exchange import ExchangeLayout, RowExchange, exchange_rows
from executor.heads import HeadExchange, heads_to_nodes, nodes_to_heads
from executor.overlap import Overlap, attend_overlapped
from executor.position import Position
from executor.record import Recorder
from executor.served import PartLayout, ServedExchange, heads_to_rows, rows_to_heads
from simulator.specs.plan import Exchange


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """A layer's attention.

    Attributes:
        data: this rank's rows and edges.
        weights: of the layer.
        index: of the layer.
        exchange: of the layer.
        wire: number format of what travels.
    """

    data: RankData
    weights: Weights
    recorder: Recorder
    index: int
    exchange: Exchange
    num_heads: int
    wire: torch.dtype

    @property
    def layer(self) -> str:
        """Name of the layer."""
        return f"layer{self.index}"

    def in_turn(self, q_ND: Tensor, kv_N2D: Tensor) -> Tensor:
        """Return attention over all edges, once all keys and values are there."""
        kv_M2D = kv_N2D if self.exchange is Exchange.NONE else self._exchanged(kv_N2D)
        return self._attend(q_ND, kv_M2D)

    def of_rows(self, x_ND: Tensor) -> Tensor:
        """Return the same, where normed rows travel and make keys and values wherever they are needed."""
        x_MD = self._exchanged(x_ND)
        weight = self.weights["query_key_value.weight"]
        q_ND = self.recorder.run(f"{self.layer}.query", operations.QUERY, x_ND, weight)
        kv_M2D = self.recorder.run(f"{self.layer}.key_value", operations.KEY_VALUE, x_MD, weight)
        return self._attend(q_ND, kv_M2D)

    def overlapped(self, x_ND: Tensor, *, sends_rows: bool) -> Tensor:
        """Return attention of normed rows: over edges between own ones while others travel, then over the rest.

        Args:
            sends_rows: normed rows travel in place of keys and values.
        """
        weight, table_BH = self.weights["query_key_value.weight"], self.weights.get("edge_bias")
        return attend_overlapped(x_ND, weight, table_BH, self._overlap(sends_rows=sends_rows))

    def by_heads(self, q_ND: Tensor, kv_N2D: Tensor) -> Tensor:
        """Return attention of own heads over the edges of all ranks, brought back to own rows."""
        exchange = HeadExchange(
            layout=self.data.layout,
            recorder=self.recorder,
            layer=self.layer,
            graph_rank=self.data.graph_rank,
            num_heads=self.num_heads,
            head_size=q_ND.shape[1] // self.num_heads,
            dtype=q_ND.dtype,
            wire=self.wire,
        )
        q_GD, kv_G2D = nodes_to_heads(q_ND, kv_N2D, exchange)
        table_BH = self.weights.get("edge_bias")
        if exchange.num_own_heads > 0:
            own_table = None if table_BH is None else table_BH[:, exchange.own_heads]
            bias_EH = self._bias("", own_table, self.data.group_degree_bucket_E)
            graph = self.data.edges[self.exchange]
            out_GD = self.recorder.run(
                f"{self.layer}.attention", operations.ATTENTION, q_GD, kv_G2D, bias_EH, graph, exchange.num_own_heads
            )
        else:
            # Nothing to attend with: the exchange back sends nothing. All parameters still get a gradient, of zeros.
            out_GD = q_GD if table_BH is None else q_GD + table_BH[:, :0].sum()
        return heads_to_nodes(out_GD, exchange)

    def of_served_part(self, q_ND: Tensor, kv_N2D: Tensor, part: PartLayout) -> Tensor:
        """Return attention of own heads over the edges of the part that this rank serves, brought back to own rows."""
        exchange = ServedExchange(
            layout=self.data.layout,
            part=part,
            recorder=self.recorder,
            layer=self.layer,
            graph_rank=self.data.graph_rank,
            num_heads=self.num_heads,
            head_size=q_ND.shape[1] // self.num_heads,
            dtype=q_ND.dtype,
        )
        q_PD, kv_M2D = rows_to_heads(q_ND, kv_N2D, exchange)
        edges, bucket_E = self.data.attended(self.index, self.exchange)
        table_BH = self.weights.get("edge_bias")
        bias_EH = self._bias("", None if table_BH is None else table_BH[:, exchange.own_heads], bucket_E)
        out_PD = self.recorder.run(
            f"{self.layer}.attention", operations.ATTENTION, q_PD, kv_M2D, bias_EH, edges, exchange.num_own_heads
        )
        return heads_to_rows(out_PD, exchange)

    def _attend(self, q_ND: Tensor, kv_M2D: Tensor) -> Tensor:
        edges, bucket_E = self.data.attended(self.index, self.exchange)
        bias_EH = self._bias("", self.weights.get("edge_bias"), bucket_E)
        return self.recorder.run(  # type: ignore[no-any-return]
            f"{self.layer}.attention", operations.ATTENTION, q_ND, kv_M2D, bias_EH, edges, self.num_heads
        )

    def _bias(self, suffix: str, table_BH: Tensor | None, bucket_E: Tensor | None) -> Tensor | None:
        if table_BH is None:
            return None
        return self.recorder.run(  # type: ignore[no-any-return]
            f"{self.layer}.edge_bias{suffix}", operations.EDGE_BIAS, table_BH, bucket_E
        )

    def _overlap(self, *, sends_rows: bool) -> Overlap:
        hosts = self.data.hosts if self.exchange is Exchange.HIERARCHICAL_HALO else None
        is_alone = hosts is not None and len(hosts.inside.ranks) == 1
        return Overlap(
            exchange=ApartExchange(
                exchange=self._row_exchange(),
                inside=None if hosts is None or is_alone else self._host_exchange(hosts.inside),
                is_alone=is_alone,
                graph_rank=self.data.graph_rank,
            ),
            edges=self.data.edges[self.exchange],
            bucket_E=self.data.degree_bucket_E,
            halves=self.data.halves[self.exchange],
            sends_rows=sends_rows,
            recorder=self.recorder,
            layer=self.layer,
            num_heads=self.num_heads,
            keeps=torch.is_grad_enabled(),
        )

    def _exchanged(self, rows_NC: Tensor) -> Tensor:
        return self._passed_on(exchange_rows(rows_NC, self._row_exchange()))

    def _passed_on(self, rows_MC: Tensor) -> Tensor:
        """Return rows with those behind them that other ranks of the host took for this one too, if there are any.

        Backward, the gradients of a row are summed inside the host before they go to its owner.
        """
        hosts = self.data.hosts
        if self.exchange is not Exchange.HIERARCHICAL_HALO or hosts is None:
            return rows_MC
        if len(hosts.inside.ranks) == 1:
            note_without_peers(rows_MC, self.recorder.position, f"{self.layer}.host_exchange")
            return rows_MC
        return exchange_rows(rows_MC, self._host_exchange(hosts.inside))

    def _host_exchange(self, inside: ExchangeLayout) -> RowExchange:
        """Return the exchange inside the host."""
        return replace(self._row_exchange(), layout=inside, prefix="host_")

    def _row_exchange(self) -> RowExchange:
        exchange, layout = self.exchange, self.data.layout
        if exchange is Exchange.HIERARCHICAL_HALO:
            assert self.data.hosts is not None, "a batch of a plan with this exchange has layouts for it"
            exchange, layout = Exchange.HALO, self.data.hosts.between
        return RowExchange(
            exchange=exchange,
            layout=layout,
            recorder=self.recorder,
            layer=self.layer,
            dtype=self.data.dtype,
            wire=self.wire,
        )


def note_without_peers(x: Tensor, position: Position, name: str) -> None:
    """Note an exchange that this rank, alone on its host, has no part in: all ranks note as many, in one order.

    Forward it is noted at once, backward when the gradient of `x` is there.
    """

    def note(_: object = None) -> None:
        with position.waiting(name):
            pass

    note()
    if x.requires_grad:
        x.register_hook(note)
