"""Cases of attention over edges, a reference in fp64 that takes target by target, and how far others are from it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from executor.attention.edges import edge_attention
from executor.attention.graph import EdgeGraph
from executor.keyed import edge_head_bits, threshold

KEY = (2**40 + 11, 3)  # seed and step
Named = dict[str, Tensor]


class Layout(StrEnum):
    """How the rows of queries, keys, values and of the output's gradient lie in memory."""

    DENSE = "dense"
    VIEWS = "views"  # keys and values in one buffer as the model has them, queries and gradient among other columns
    SCATTERED = "scattered"  # heads before rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """Edges, by target, and what attention does over them; inputs are drawn from N(0, 1) by the seed.

    Attributes:
        edge_ids: global ids of the edges; None for their positions.
        spread: factor of the queries.
        has_lse_gradient: whether the log-sum-exp has a gradient too.
    """

    source_E: Tensor
    target_E: Tensor
    num_targets: int
    num_sources: int
    num_heads: int = 2
    num_kv_heads: int = 2
    head_size: int = 16
    has_bias: bool = False
    has_features: bool = False
    has_lse_gradient: bool = True
    edge_ids: Tensor | None = None
    dropout: float = 0.0
    scale: float | None = None
    spread: float = 1.0
    layout: Layout = Layout.DENSE
    seed: int = 0

    def graph(self, device: str = "cpu") -> EdgeGraph:
        """Return the edges as attention takes them."""
        counts_N = torch.bincount(self.target_E, minlength=self.num_targets)
        return EdgeGraph(
            indptr_N1=F.pad(counts_N.cumsum(0), (1, 0)).to(device),
            source_E=self.source_E.to(torch.int32).to(device),
            num_sources=self.num_sources,
            edge_id_E=None if self.edge_ids is None else self.edge_ids.to(device),
        )

    def inputs(self, dtype: torch.dtype = torch.float32) -> Named:
        """Return queries, keys, values and what else there is of edges, rounded to a format."""
        num_edges = self.source_E.numel()
        keys: tuple[int, ...] = (self.num_sources, self.num_kv_heads, self.head_size)
        shapes: dict[str, tuple[int, ...]] = {
            "q": (self.num_targets, self.num_heads, self.head_size),
            "k": keys,
            "v": keys,
        }
        if self.has_bias:
            shapes["bias"] = (num_edges, self.num_heads)
        if self.has_features:
            shapes["features"] = (num_edges, *keys[1:])
        drawn = self._drawn(shapes, dtype)
        drawn["q"] = (drawn["q"].float() * self.spread).to(dtype)
        return drawn

    def gradients(self, dtype: torch.dtype = torch.float32) -> Named:
        """Return the gradients of output and log-sum-exp."""
        rows = (self.num_targets, self.num_heads)
        return self._drawn({"out": (*rows, self.head_size)}, dtype, 1) | self._drawn({"lse": rows}, torch.float32, 2)

    def _drawn(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype, stream: int = 0) -> Named:
        generator = torch.Generator().manual_seed(4 * self.seed + stream)
        return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def case_of(edges: list[tuple[int, int]], num_targets: int, num_sources: int | None = None, **options: Any) -> Case:
    """Return a case of edges (source, target) in any order; as many sources as targets unless said."""
    ordered = sorted(edges, key=lambda edge: edge[1])
    source_E, target_E = torch.tensor(ordered, dtype=torch.int64).reshape(-1, 2).unbind(1)
    num_sources = num_targets if num_sources is None else num_sources
    return Case(source_E=source_E, target_E=target_E, num_targets=num_targets, num_sources=num_sources, **options)


@dataclass(frozen=True)
class Heads:
    """Heads of queries, of keys, and their size; with edge features or without."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    has_features: bool


# Whole vectors of 16 and of 8, others, grouped keys, more than one vector, heads in fours and the rest.
HEADS = (
    Heads(8, 8, 16, False),
    Heads(6, 2, 32, True),
    Heads(1, 1, 128, False),
    Heads(4, 2, 24, False),
    Heads(3, 3, 8, False),
    Heads(3, 1, 5, True),
    Heads(5, 5, 1, True),
    Heads(9, 3, 33, True),
)


@st.composite
def cases(draw: st.DrawFn, heads: tuple[Heads, ...] = HEADS, max_edges: int = 60) -> Case:
    """Draw edges, repeats, self loops and targets without edges among them; more sources than targets, or fewer."""
    num_targets, num_sources = draw(st.integers(1, 9)), draw(st.integers(1, 12))
    edge = st.tuples(st.integers(0, num_sources - 1), st.integers(0, num_targets - 1))
    edges = draw(st.lists(edge, max_size=max_edges))
    chosen = draw(st.sampled_from(heads))
    ids = draw(st.one_of(st.none(), st.integers(0, 2**61)))
    return case_of(
        edges,
        num_targets,
        num_sources,
        num_heads=chosen.num_heads,
        num_kv_heads=chosen.num_kv_heads,
        head_size=chosen.head_size,
        has_features=chosen.has_features,
        has_bias=draw(st.booleans()),
        edge_ids=None if ids is None else ids + 7919 * torch.arange(len(edges)),
        dropout=draw(st.sampled_from([0.0, 0.0, 0.3, 0.9])),
        scale=draw(st.sampled_from([None, 1.0, 0.1])),
        layout=draw(st.sampled_from(Layout)),
        seed=draw(st.integers(0, 3)),
    )


def reference_attention(case: Case, inputs: Named) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp in the format of the inputs, target by target."""
    q, group = inputs["q"], case.num_heads // case.num_kv_heads
    scale = case.head_size**-0.5 if case.scale is None else case.scale
    factor_EH = kept_factors(case).to(q.dtype)
    outs, lses = [], []
    for target in range(case.num_targets):
        edge_T = (case.target_E == target).nonzero().squeeze(1)
        keys, values = inputs["k"][case.source_E[edge_T]], inputs["v"][case.source_E[edge_T]]
        if case.has_features:
            keys, values = keys + inputs["features"][edge_T], values + inputs["features"][edge_T]
        keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
        scores_TH = torch.einsum("hk,thk->th", q[target], keys) * scale
        if case.has_bias:
            scores_TH = scores_TH + inputs["bias"][edge_T]
        weights_TH = torch.softmax(scores_TH, 0) * factor_EH[edge_T]
        outs.append(torch.einsum("th,thk->hk", weights_TH, values))
        lses.append(torch.logsumexp(scores_TH, 0))
    return torch.stack(outs), torch.stack(lses)


def kept_factors(case: Case) -> Tensor:
    """Return what dropout multiplies the weight of each edge and head by, [E, H]."""
    ids_E = torch.arange(case.source_E.numel()) if case.edge_ids is None else case.edge_ids
    is_kept_EH = edge_head_bits(ids_E, torch.tensor(KEY), case.num_heads) >= threshold(case.dropout)
    return torch.ones(is_kept_EH.shape) if case.dropout == 0 else is_kept_EH / (1 - case.dropout)


def laid_out(case: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows in the case's layout, as functions of the given ones."""
    match case.layout:
        case Layout.DENSE:
            return q, k, v
        case Layout.VIEWS:
            k, v = torch.stack([k, v], 1).unbind(1)
            return torch.stack([q, q.detach(), q.detach()], 1)[:, 0], k, v
        case Layout.SCATTERED:
            q, k, v = (rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in (q, k, v))
            return q, k, v


def run_attention(
    case: Case, dtype: torch.dtype, device: str = "cpu", attend: Callable[..., Any] = edge_attention
) -> Named:
    """Return output, log-sum-exp and gradients of an attention, by name."""
    leaves = {name: value.to(device).requires_grad_() for name, value in case.inputs(dtype).items()}
    q, k, v = laid_out(case, leaves["q"], leaves["k"], leaves["v"])
    out, lse = attend(
        q,
        k,
        v,
        case.graph(device),
        edge_bias=leaves.get("bias"),
        edge_features=leaves.get("features"),
        dropout=case.dropout,
        dropout_key=torch.tensor(KEY, device=device),
        scale=case.scale,
        return_lse=True,
    )
    gradients = {name: value.to(device) for name, value in case.gradients(dtype).items()}
    grad_out, _, _ = laid_out(case, gradients["out"], gradients["out"], gradients["out"])
    return _results(case, leaves, out, lse, grad_out, gradients["lse"])


def run_reference(case: Case, dtype: torch.dtype) -> Named:
    """Return what `run_attention` does, in fp64 from inputs that were rounded to a format."""
    leaves = {name: value.double().requires_grad_() for name, value in case.inputs(dtype).items()}
    out, lse = reference_attention(case, leaves)
    gradients = case.gradients(dtype)
    return _results(case, leaves, out, lse, gradients["out"].double(), gradients["lse"].double())


def _results(case: Case, leaves: Named, out: Tensor, lse: Tensor, grad_out: Tensor, grad_lse: Tensor) -> Named:
    """Return the results and the leaves' gradients; of the log-sum-exp only where it is finite."""
    has_edges_NH = torch.isfinite(lse)
    loss = (out * grad_out).sum()
    if case.has_lse_gradient:
        loss = loss + (torch.where(has_edges_NH, lse, 0) * grad_lse).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    found = {"out": out.detach(), "lse": lse.detach()}
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        found[f"gradient of {name}"] = torch.zeros_like(leaf) if gradient is None else gradient
    return found


def relative_errors(
    case: Case,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    attend: Callable[..., Any] = edge_attention,
) -> dict[str, float]:
    """Return the largest error of each result over the largest value of the reference, by name.

    A result that is zero in the reference must be zero; a log-sum-exp without edges must be minus infinity.
    """
    found, wanted = run_attention(case, dtype, device, attend), run_reference(case, dtype)
    return {name: _relative_error(found[name].cpu().double(), wanted[name]) for name in wanted}


def _relative_error(found: Tensor, wanted: Tensor) -> float:
    is_finite = torch.isfinite(wanted)
    if not torch.equal(found[~is_finite], wanted[~is_finite]) or not torch.isfinite(found[is_finite]).all():
        return float("inf")
    error, largest = (x[is_finite].abs().amax().item() if is_finite.any() else 0.0 for x in (found - wanted, wanted))
    return error / largest if largest else error * float("inf") if error else 0.0
