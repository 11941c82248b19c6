"""A layer's attention over own rows while rows of others are on their way, in one node of autograd.

Forward, attention over edges between own rows runs meanwhile; that over the other edges follows once rows have arrived,
and is merged into the first. Backward, the gradients of keys and values come first, from one pass over the sources of
all edges; those of the rows of others travel while the pass over targets gives the gradients of queries. On GPUs a
collective runs on a stream of its own, waits for what was launched before its call, and `Work.wait` lets later kernels
wait for it, not the host; until then a `Sent` keeps its tensors alive, so none of their memory is given away while the
other stream uses it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from executor.apart import ApartExchange
from executor.attention.graph import EdgeGraph
from executor.attention.parts import (
    Attended,
    attend_part,
    backward_sources,
    backward_targets,
    merge_into,
    row_stats,
)
from executor.operations import EDGE_BIAS, query_columns, side_by_side
from executor.record import Recorder
from executor.topology import EdgeHalves
from simulator.specs.program import Phase, TaskKind


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """What an overlapped attention needs beside its tensors.

    Attributes:
        exchange: which overlaps.
        edges: all edges into own rows; sources are own rows and behind them those of others, or what an all-gather
            brings.
        bucket_E: buckets of their sources by degree; None where no bias needs them.
        halves: the same edges in two sets.
        sends_rows: normed rows travel, and make keys and values where they arrive; else keys and values travel.
        keeps: whether a backward pass may follow.
    """

    exchange: ApartExchange
    edges: EdgeGraph
    bucket_E: Tensor | None
    halves: EdgeHalves
    sends_rows: bool
    recorder: Recorder
    layer: str
    num_heads: int
    keeps: bool

    def inner(self, q_NHK: Tensor, own_N2D: Tensor, table_BH: Tensor | None) -> tuple[Attended, Tensor | None]:
        """Return attention over edges between own rows, and the bias of all edges where a backward pass may follow."""
        bias_EH = self._bias("_interior", table_BH, self.halves.inner_bucket_E)
        whole = self._part("_interior", q_NHK, own_N2D, bias_EH, self.halves.inner)
        del bias_EH
        return whole, self._bias("", table_BH, self.bucket_E) if self.keeps else None

    def outer_bias(self, table_BH: Tensor | None) -> Tensor | None:
        """Return the bias of edges from rows of others."""
        return self._bias("_halo", table_BH, self.halves.outer_bucket_E)

    def merge_outer(self, whole: Attended, q_NHK: Tensor, arrival_M2D: Tensor, bias_EH: Tensor | None) -> None:
        """Attend over edges from rows of others too, which the last rows alone have."""
        first_row = len(q_NHK) - self.halves.outer.num_targets
        part = self._part("_halo", q_NHK[first_row:], arrival_M2D, bias_EH, self.halves.outer)
        shape = (len(q_NHK), *part.out.shape)
        with self.recorder.task(f"{self.layer}.merge", TaskKind.MERGE, self.recorder.phase, shape):
            merge_into(whole, part, first_row)

    def remember(self, whole: Attended, q_ND: Tensor, kv_M2D: Tensor, bias_EH: Tensor | None) -> None:
        """Tell how attention over all edges is made again, in one run, should it not be kept."""

        def again(q_ND: Tensor, kv_M2D: Tensor, bias_EH: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            found = self._part("_whole", self.heads_of(q_ND), kv_M2D, bias_EH, self.edges)
            return found.out, found.lse, found.rest

        results = (whole.out, whole.lse, whole.rest)
        self.recorder.remember(f"{self.layer}.attention", again, (q_ND, kv_M2D, bias_EH), results)

    def over_sources(
        self, grad_NHK: Tensor, whole: Attended, q_NHK: Tensor, kv_M2D: Tensor, bias_EH: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of keys and values side by side, what `over_targets` needs, and the bias's if here."""
        k_MHK, v_MHK = self._keys_and_values(kv_M2D)
        shape = self._shape(self.edges, q_NHK, kv_M2D)
        name = f"{self.layer}.attention_sources"
        with self.recorder.task(name, TaskKind.ATTENTION_SOURCES, Phase.BACKWARD, shape):
            stats = row_stats(grad_NHK, whole)
            grad_k, grad_v, grad_bias_EH = backward_sources(
                grad_NHK, stats, whole, q_NHK, k_MHK, v_MHK, bias_EH, self.edges, bias_gradient=bias_EH is not None
            )
            grad_kv_M2D = side_by_side(grad_k, grad_v)
        return grad_kv_M2D, stats, grad_bias_EH

    def over_targets(
        self,
        grad_NHK: Tensor,
        stats: Tensor,
        whole: Attended,
        q_NHK: Tensor,
        kv_M2D: Tensor,
        bias_EH: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the gradients of queries, [N, D], and the bias's if here."""
        k_MHK, v_MHK = self._keys_and_values(kv_M2D)
        shape = self._shape(self.edges, q_NHK, kv_M2D)
        name = f"{self.layer}.attention_targets"
        with self.recorder.task(name, TaskKind.ATTENTION_TARGETS, Phase.BACKWARD, shape):
            grad_q, grad_bias_EH = backward_targets(
                grad_NHK, stats, whole, q_NHK, k_MHK, v_MHK, bias_EH, self.edges, bias_gradient=bias_EH is not None
            )
        return grad_q.flatten(1), grad_bias_EH

    def of_table(self, table_BH: Tensor | None, *of_passes: Tensor | None) -> Tensor | None:
        """Return the gradient of the table of biases from that of each edge, which one of both passes gave."""
        if table_BH is None or self.bucket_E is None:
            return None
        (grad_bias_EH,) = (grad for grad in of_passes if grad is not None)
        with self.recorder.task(
            f"{self.layer}.edge_bias", TaskKind.EDGE_BIAS, Phase.BACKWARD, tuple(grad_bias_EH.shape)
        ):
            grad_BH: Tensor = torch.ops.aten.index_select_backward(grad_bias_EH, list(table_BH.shape), 0, self.bucket_E)
        return grad_BH

    def heads_of(self, x_ND: Tensor) -> Tensor:
        """Return rows by head, [N, H, K]."""
        x_NHK: Tensor = x_ND.unflatten(1, (self.num_heads, -1))
        return x_NHK

    def _part(self, suffix: str, q_NHK: Tensor, kv_M2D: Tensor, bias_EH: Tensor | None, edges: EdgeGraph) -> Attended:
        k_MHK, v_MHK = self._keys_and_values(kv_M2D)
        shape = self._shape(edges, q_NHK, kv_M2D)
        name = f"{self.layer}.attention{suffix}"
        with self.recorder.task(name, TaskKind.ATTENTION, self.recorder.phase, shape):
            return attend_part(q_NHK, k_MHK, v_MHK, bias_EH, edges)

    def _bias(self, suffix: str, table_BH: Tensor | None, bucket_E: Tensor | None) -> Tensor | None:
        if table_BH is None:
            return None
        return self.recorder.run(f"{self.layer}.edge_bias{suffix}", EDGE_BIAS, table_BH, bucket_E)  # type: ignore[no-any-return]

    def _keys_and_values(self, kv_M2D: Tensor) -> tuple[Tensor, Tensor]:
        k_MHK, v_MHK = kv_M2D.unflatten(1, (2, self.num_heads, -1)).unbind(1)
        return k_MHK, v_MHK

    def _shape(self, edges: EdgeGraph, q_NHK: Tensor, kv_M2D: Tensor) -> tuple[int, ...]:
        of_targets, of_sources = edges.num_edges_of_long_rows
        return len(q_NHK), len(kv_M2D), edges.num_edges, of_targets, of_sources, *q_NHK.shape[1:]


def attend_overlapped(x_ND: Tensor, weight: Tensor, table_BH: Tensor | None, overlap: Overlap) -> Tensor:
    """Return attention of normed rows over all edges into them, [N, D], with the projections of all rows.

    Every rank of the group must call this, also one without rows.

    Args:
        weight: of queries, keys and values, [3 D, D].
        table_BH: bias of each bucket and head; None without.
    """
    out_ND: Tensor = _Attention.apply(x_ND, weight, table_BH, overlap)  # type: ignore[no-untyped-call]
    return out_ND


class _Attention(torch.autograd.Function):
    """Attention of normed rows, with the projections to queries, keys and values.

    Keys and values are written where attention reads them: those of own rows beside those that arrive.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, weight: Tensor, table_BH: Tensor | None, overlap: Overlap) -> Tensor:
        exchange, projected, (num_rows, width) = overlap.exchange, _Projection(overlap, weight), x_ND.shape
        columns = query_columns(weight)
        kv_M2D, arrival_M2D = exchange.new_sources(x_ND, 2 * columns, own=True)
        own_N2D = exchange.own_rows_of(kv_M2D, num_rows)
        sent_NC, came_MC = own_N2D, arrival_M2D
        if overlap.sends_rows:
            sent_NC, (_, came_MC) = x_ND, exchange.new_sources(x_ND, width, own=False)
            flight = exchange.start(sent_NC, came_MC, are_placed=False)
            projected.forward("key_value", x_ND, slice(columns, None), own_N2D)
        else:
            projected.forward("key_value", x_ND, slice(columns, None), own_N2D)
            flight = exchange.start(sent_NC, came_MC, are_placed=True)
        q_ND = projected.forward("query", x_ND, slice(0, columns), x_ND.new_empty(num_rows, columns))
        q_NHK = overlap.heads_of(q_ND)
        whole, bias_EH = overlap.inner(q_NHK, own_N2D, table_BH)
        outer_bias_EH = overlap.outer_bias(table_BH)
        exchange.finish(flight, sent_NC, came_MC)
        if overlap.sends_rows:
            projected.forward("key_value_halo", came_MC, slice(columns, None), arrival_M2D)
        overlap.merge_outer(whole, q_NHK, arrival_M2D, outer_bias_EH)
        overlap.remember(whole, q_ND, kv_M2D, bias_EH)
        x_MD = came_MC if overlap.sends_rows else None
        ctx.overlap = overlap
        ctx.save_for_backward(x_ND, x_MD, weight, q_ND, kv_M2D, table_BH, bias_EH, whole.out, whole.lse, whole.rest)
        return whole.out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        overlap: Overlap = ctx.overlap
        overlap.recorder.pause()  # what is saved may have to be made again, which is no part of the task before
        x_ND, x_MD, weight, q_ND, kv_M2D, table_BH, bias_EH, out, lse, rest = ctx.saved_tensors
        exchange, projected = overlap.exchange, _Projection(overlap, weight)
        num_rows, columns = len(x_ND), query_columns(weight)
        whole, q_NHK = Attended(out=out, lse=lse, rest=rest), overlap.heads_of(q_ND)
        grad_NHK, grad_weight = overlap.heads_of(gradients[0]), torch.zeros_like(weight)
        grad_kv_M2D, stats, of_sources = overlap.over_sources(grad_NHK, whole, q_NHK, kv_M2D, bias_EH)
        num_own = num_rows if exchange.has_own_rows else 0
        grad_came = grad_kv_M2D[num_own:]
        if overlap.sends_rows:
            grad_came = projected.backward("key_value_halo", grad_came, x_MD, slice(columns, None), grad_weight)
        flight = exchange.start_back(grad_came)
        grad_q_ND, of_targets = overlap.over_targets(grad_NHK, stats, whole, q_NHK, kv_M2D, bias_EH)
        grad_table_BH = overlap.of_table(table_BH, of_sources, of_targets)
        grad_x_ND = projected.backward("query", grad_q_ND, x_ND, slice(0, columns), grad_weight)
        grad_own = grad_kv_M2D[:num_own] if exchange.has_own_rows else None
        if not overlap.sends_rows:
            grad_own = exchange.finish_back(flight, grad_own, num_rows)
        if grad_own is not None:
            projected.backward("key_value", grad_own, x_ND, slice(columns, None), grad_weight, onto=grad_x_ND)
        if overlap.sends_rows:
            grad_x_ND = exchange.finish_back(flight, grad_x_ND, num_rows)
        return grad_x_ND, grad_weight, grad_table_BH, None


@dataclass(frozen=True)
class _Projection:
    """Products with some rows of the weight of queries, keys and values."""

    overlap: Overlap
    weight: Tensor

    def forward(self, task: str, x_ND: Tensor, part: slice, out: Tensor) -> Tensor:
        """Return `out`, which gets the product."""
        shape = (*x_ND.shape, out.shape[1])
        with self._task(task, self.overlap.recorder.phase, shape):
            torch.mm(x_ND, self.weight[part].to(x_ND.dtype).t(), out=out)
        return out

    def backward(
        self, task: str, grad: Tensor, x_ND: Tensor, part: slice, grad_weight: Tensor, *, onto: Tensor | None = None
    ) -> Tensor:
        """Return the gradient of `x_ND`, added to `onto` in place if given; that of the weight is added."""
        with self._task(task, Phase.BACKWARD, (*x_ND.shape, grad.shape[1])):
            grad_weight[part].add_(torch.mm(grad.t(), x_ND))
            weight = self.weight[part].to(x_ND.dtype)
            return torch.mm(grad, weight) if onto is None else onto.addmm_(grad, weight)

    def _task(self, task: str, phase: Phase, shape: tuple[int, ...]) -> Any:
        overlap = self.overlap
        return overlap.recorder.task(f"{overlap.layer}.{task}", TaskKind.PROJECTION, phase, shape)
