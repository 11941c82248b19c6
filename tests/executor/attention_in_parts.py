"""Attention in parts as one function with gradients: over inner edges, over outer ones, and back in two passes."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from executor.attention import parts
from executor.attention.graph import EdgeGraph
from executor.attention.parts import Attended
from executor.attention.work import build_work_list
from tests.executor.attention_reference import Case, Heads, Layout, case_of

Prepare = Callable[[EdgeGraph], EdgeGraph]


def in_pieces(graph: EdgeGraph) -> EdgeGraph:
    """Return a graph in which rows of four edges are long already, and rows of six in pieces."""
    cut = functools.partial(build_work_list, max_short_edges=3, max_piece_edges=5)
    # Where cached properties keep what they made.
    graph.__dict__.update(work=cut(graph.indptr_N1))
    graph.transpose.__dict__.update(work=cut(graph.transpose.indptr_M1))
    return graph


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Cut:
    """Edges cut in two: sources below `num_own` are there at once, the others lead into rows from `first_row` on.

    Attributes:
        by_part: whether the backward passes take the two parts one after the other.
        prepare: what is done to each graph before it is used.
    """

    num_own: int
    first_row: int
    by_part: bool = False
    prepare: Prepare = lambda graph: graph

    def graphs(self, graph: EdgeGraph) -> tuple[EdgeGraph, EdgeGraph, Tensor]:
        """Return the inner edges, the outer ones of the last rows, and which edges are inner."""
        is_inner_E = graph.source_E < self.num_own
        inner = self._part(graph, is_inner_E, 0, graph.num_targets, 0, self.num_own)
        rows, sources = graph.num_targets - self.first_row, graph.num_sources - self.num_own
        return inner, self._part(graph, ~is_inner_E, self.first_row, rows, self.num_own, sources), is_inner_E

    def _part(
        self, graph: EdgeGraph, is_kept_E: Tensor, first_row: int, num_rows: int, first_source: int, num_sources: int
    ) -> EdgeGraph:
        target_E = graph.target_E[is_kept_E].long() - first_row
        assert (target_E >= 0).all()
        counts = torch.bincount(target_E, minlength=num_rows)
        return self.prepare(
            EdgeGraph(
                indptr_N1=F.pad(counts.cumsum(0), (1, 0)),
                source_E=graph.source_E[is_kept_E] - first_source,
                num_sources=num_sources,
            )
        )


def attend_in_parts(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    graph: EdgeGraph,
    *,
    cut: Cut,
    edge_bias: Tensor | None,
    scale: float | None,
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp, with gradients from the output."""
    found: tuple[Tensor, Tensor] = _InParts.apply(q, k, v, edge_bias, graph, cut, scale)
    return found


class _InParts(torch.autograd.Function):
    """Forward in two parts, backward in two passes."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, graph: EdgeGraph, cut: Cut, scale: float | None
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        inner, outer, is_inner_E = cut.graphs(graph)
        own, first = slice(cut.num_own), slice(cut.first_row, None)
        others = slice(cut.num_own, None)
        biases = (None, None) if bias is None else (bias[is_inner_E], bias[~is_inner_E])
        whole = parts.attend_part(q, k[own], v[own], biases[0], inner, scale=scale)
        part = parts.attend_part(q[first], k[others], v[others], biases[1], outer, scale=scale)
        before = [x[own].clone() for x in (whole.out, whole.lse, whole.rest)]
        parts.merge_into(whole, part, cut.first_row)
        for x, then in zip((whole.out, whole.lse, whole.rest), before, strict=True):
            assert torch.equal(x[: cut.first_row], then[: cut.first_row]), "rows before the first are left alone"
        ctx.save_for_backward(q, k, v, bias)
        ctx.whole, ctx.graphs, ctx.cut, ctx.scale = whole, (cut.prepare(graph), inner, outer, is_inner_E), cut, scale
        return whole.out.clone(), whole.lse.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias = ctx.saved_tensors
        grad_out, grad_lse = gradients
        assert grad_lse is None, "what is left of the log-sum-exp is in `whole`"
        stats = parts.row_stats(grad_out, ctx.whole)
        if ctx.cut.by_part:
            return *_by_part(ctx, grad_out, stats, q, k, v, bias), None, None, None
        arguments = (grad_out, stats, ctx.whole, q, k, v, bias, ctx.graphs[0])
        return *_passes(arguments, ctx.scale), None, None, None


def _passes(arguments: tuple[Any, ...], scale: float | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return gradients of queries, keys, values and bias by both passes, sources first."""
    wanted = arguments[6] is not None
    grad_k, grad_v, of_sources = parts.backward_sources(*arguments, scale=scale, bias_gradient=wanted)
    grad_q, of_targets = parts.backward_targets(*arguments, scale=scale, bias_gradient=wanted)
    assert (of_sources is not None) + (of_targets is not None) == wanted, "one of both gives the bias's gradient"
    return grad_q, grad_k, grad_v, of_targets if of_sources is None else of_sources


def _by_part(
    ctx: Any, grad_out: Tensor, stats: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the sums of what the passes give over each part."""
    cut, whole = ctx.cut, ctx.whole
    _, inner, outer, is_inner_E = ctx.graphs
    found = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    grad_bias = None if bias is None else torch.empty_like(bias)
    for graph, is_own_E, rows, sources in (
        (inner, is_inner_E, slice(None), slice(cut.num_own)),
        (outer, ~is_inner_E, slice(cut.first_row, None), slice(cut.num_own, None)),
    ):
        last = Attended(out=whole.out[rows], lse=whole.lse[rows], rest=whole.rest[rows])
        own_bias = None if bias is None else bias[is_own_E]
        arguments = (grad_out[rows], stats[rows], last, q[rows], k[sources], v[sources], own_bias, graph)
        *gradients, own_grad_bias = _passes(arguments, ctx.scale)
        for x, place, gradient in zip(found, (rows, sources, sources), gradients, strict=True):
            assert gradient is not None
            x[place] += gradient
        if grad_bias is not None and own_grad_bias is not None:
            grad_bias[is_own_E] = own_grad_bias
    return *(x.to(q.dtype) for x in found), grad_bias


@st.composite
def cut_cases(draw: st.DrawFn, heads: tuple[Heads, ...], prepare: Prepare = lambda graph: graph) -> tuple[Case, Cut]:
    """Draw edges cut in two; rows may be isolated or hubs, either part empty, and the last rows all or none."""
    num_targets, num_halo = draw(st.integers(1, 9)), draw(st.integers(0, 6))
    first_row = draw(st.one_of(st.sampled_from([0, num_targets]), st.integers(0, num_targets)))
    edges = draw(st.lists(st.tuples(st.integers(0, num_targets - 1), st.integers(0, num_targets - 1)), max_size=40))
    if num_halo and first_row < num_targets:
        row = st.one_of(st.just(num_targets - 1), st.integers(first_row, num_targets - 1))
        source = st.one_of(st.just(num_targets), st.integers(num_targets, num_targets + num_halo - 1))
        edges += draw(st.lists(st.tuples(source, row), max_size=40))
    chosen = draw(st.sampled_from(heads))
    case = case_of(
        edges,
        num_targets,
        num_targets + num_halo,
        num_heads=chosen.num_heads,
        num_kv_heads=chosen.num_kv_heads,
        head_size=chosen.head_size,
        has_bias=draw(st.booleans()),
        has_lse_gradient=False,
        scale=draw(st.sampled_from([None, 1.0, 0.1])),
        layout=draw(st.sampled_from(Layout)),
        seed=draw(st.integers(0, 3)),
    )
    return case, Cut(num_own=num_targets, first_row=first_row, by_part=draw(st.booleans()), prepare=prepare)
