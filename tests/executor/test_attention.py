"""Attention over edges, in every form, against a loop over targets in fp64, and its invariants."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from executor.attention import chunked
from executor.attention.edges import edge_attention
from executor.attention.graph import EdgeGraph
from executor.attention.plain import plain_attention
from tests.small_graphs import Edges

HEADS, HEAD_SIZE = 2, 4
CHUNKS_OF_EDGES = {"whole": 10**6, "chunks of one edge": 1, "chunks of five edges": 5}


@pytest.fixture(params=[*CHUNKS_OF_EDGES, "plain"], scope="module")
def attention(request: pytest.FixtureRequest) -> Iterator[Callable[..., Tensor]]:
    """A form of `edge_attention` that runs on CPUs: what GPUs do without kernels, or chunks of a few edges."""
    if request.param == "plain":
        yield attend_plainly
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunked, "CHUNK_ELEMENTS", CHUNKS_OF_EDGES[request.param] * HEADS * HEAD_SIZE)
        yield edge_attention


def attend_plainly(
    q: Tensor, k: Tensor, v: Tensor, graph: EdgeGraph, *, edge_bias_EH: Tensor | None = None, scale: float | None = None
) -> Tensor:
    return plain_attention(q, k, v, graph, edge_bias_EH, q.shape[2] ** -0.5 if scale is None else scale)


@dataclass(frozen=True, kw_only=True)
class Bipartite:
    """Edges (source, target) from source rows to target rows, by target."""

    edges: tuple[tuple[int, int], ...]
    num_targets: int
    num_sources: int

    @property
    def graph(self) -> EdgeGraph:
        ordered = sorted(self.edges, key=lambda edge: edge[1])
        counts = torch.bincount(torch.tensor([t for _, t in ordered], dtype=torch.int64), minlength=self.num_targets)
        return EdgeGraph(
            indptr_N1=F.pad(counts.cumsum(0), (1, 0)),
            source_E=torch.tensor([source for source, _ in ordered], dtype=torch.int64),
            num_sources=self.num_sources,
        )


def square(edges: Edges, num_nodes: int) -> Bipartite:
    return Bipartite(edges=tuple(edges), num_targets=num_nodes, num_sources=num_nodes)


@st.composite
def bipartites(draw: st.DrawFn) -> Bipartite:
    """Draw edges, multi-edges and targets without edges among them; as many sources as targets, more, or fewer."""
    num_targets, num_sources = draw(st.integers(1, 8)), draw(st.integers(1, 12))
    edge = st.tuples(st.integers(0, num_sources - 1), st.integers(0, num_targets - 1))
    return Bipartite(edges=tuple(draw(st.lists(edge, max_size=40))), num_targets=num_targets, num_sources=num_sources)


def rows(num_rows: int, seed: int, scale: float = 1.0, head_size: int = HEAD_SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, HEADS, head_size, generator=generator) * scale


def tensors(case: Bipartite, *, scale: float = 1.0) -> dict[str, Tensor]:
    """Return queries, keys, values and a bias of each edge that are drawn at random."""
    generator = torch.Generator().manual_seed(4)
    return {
        "q": rows(case.num_targets, 1, scale),
        "k": rows(case.num_sources, 2, scale),
        "v": rows(case.num_sources, 3),
        "bias": torch.randn(len(case.edges), HEADS, generator=generator),
    }


def loop_attention(case: Bipartite, *, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    """Attend target by target and head by head."""
    graph = case.graph
    outputs = []
    for target in range(case.num_targets):
        first, last = graph.indptr_N1[target : target + 2].tolist()
        if first == last:
            outputs.append(torch.zeros_like(q[target]) + 0 * q[target])
            continue
        sources = graph.source_E[first:last]
        heads = []
        for head in range(HEADS):
            scores = (k[sources, head] @ q[target, head]) * scale
            scores = scores if bias is None else scores + bias[first:last, head]
            heads.append(torch.softmax(scores, 0) @ v[sources, head])
        outputs.append(torch.stack(heads))
    return torch.stack(outputs)


HUB = square([(0, n) for n in range(40)] + [(n, 0) for n in range(40)] + [(3, 3), (3, 3), (5, 5)], 50)


@given(bipartites(), st.booleans(), st.sampled_from([None, 1.0, 0.1]))
@example(HUB, True, None)
@example(square([], 1), False, None)
@example(square([(0, 0)], 1), True, None)
@example(square([(0, 0), (0, 0), (1, 0)], 3), True, None)
@example(Bipartite(edges=((11, 0), (11, 0), (2, 1)), num_targets=2, num_sources=12), True, 1.0)
def test_attention_and_its_gradients_equal_a_loop_over_targets(attention, case, with_bias, scale):
    given_tensors = tensors(case)
    wanted_gradient = rows(case.num_targets, 5)

    def run(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
        leaves = {name: value.to(dtype).requires_grad_() for name, value in given_tensors.items()}
        bias = leaves["bias"] if with_bias else None
        q, k, v = leaves["q"], leaves["k"], leaves["v"]
        if dtype == torch.float64:
            used_scale = HEAD_SIZE**-0.5 if scale is None else scale
            out = loop_attention(case, q=q, k=k, v=v, bias=bias, scale=used_scale)
        else:
            out = attention(q, k, v, case.graph, edge_bias_EH=bias, scale=scale)
        used = [q, k, v, bias] if bias is not None else [q, k, v]
        gradients = torch.autograd.grad(out, used, wanted_gradient.to(dtype), allow_unused=True)
        return out, [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(used, gradients, strict=True)]

    out, gradients = run(torch.float32)
    expected, expected_gradients = run(torch.float64)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    for found, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


@given(bipartites(), st.randoms(use_true_random=False))
def test_permuting_nodes_permutes_outputs(attention, case, random):
    new_target = random.sample(range(case.num_targets), case.num_targets)
    new_source = random.sample(range(case.num_sources), case.num_sources)
    moved = Bipartite(
        edges=tuple((new_source[source], new_target[target]) for source, target in case.edges),
        num_targets=case.num_targets,
        num_sources=case.num_sources,
    )
    drawn = tensors(case)
    out = attention(drawn["q"], drawn["k"], drawn["v"], case.graph)
    q, k, v = torch.empty_like(drawn["q"]), torch.empty_like(drawn["k"]), torch.empty_like(drawn["v"])
    q[new_target], k[new_source], v[new_source] = drawn["q"], drawn["k"], drawn["v"]
    torch.testing.assert_close(attention(q, k, v, moved.graph)[new_target], out)


def test_edges_between_all_pairs_give_dense_attention(attention):
    case = Bipartite(edges=tuple((s, t) for s in range(9) for t in range(6)), num_targets=6, num_sources=9)
    drawn = tensors(case)
    q, k, v = (drawn[name].transpose(0, 1) for name in ("q", "k", "v"))
    expected = F.scaled_dot_product_attention(q, k, v).transpose(0, 1)
    torch.testing.assert_close(attention(drawn["q"], drawn["k"], drawn["v"], case.graph), expected)


@given(bipartites())
def test_equal_values_are_what_every_target_with_edges_gets(attention, case):
    drawn = tensors(case)
    value = torch.arange(HEADS * HEAD_SIZE, dtype=torch.float32).view(1, HEADS, HEAD_SIZE)
    out = attention(drawn["q"], drawn["k"], value.expand(case.num_sources, -1, -1), case.graph)
    linked = sorted({target for _, target in case.edges})
    torch.testing.assert_close(out[linked], value.expand(len(linked), -1, -1))


def test_an_edge_that_is_there_twice_counts_twice(attention):
    # Target 0 has two edges from source 0 and one from source 1, all with the same score.
    case = Bipartite(edges=((0, 0), (0, 0), (1, 0)), num_targets=1, num_sources=2)
    values = torch.tensor([3.0, 9.0]).view(2, 1, 1).expand(2, HEADS, HEAD_SIZE)
    keys = torch.ones(2, HEADS, HEAD_SIZE)
    out = attention(torch.ones(1, HEADS, HEAD_SIZE), keys, values, case.graph)
    torch.testing.assert_close(out, torch.full((1, HEADS, HEAD_SIZE), (3.0 + 3.0 + 9.0) / 3))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_around_a_thousand_stay_finite_and_right(attention, sign):
    case = square([(s, t) for s in range(6) for t in range(6)], 6)
    drawn = tensors(case, scale=45.0)
    q, k, v = sign * drawn["q"].requires_grad_(), drawn["k"].requires_grad_(), drawn["v"].requires_grad_()
    scores = torch.einsum("nhk,mhk->nmh", q, k) * HEAD_SIZE**-0.5
    assert scores.abs().max() > 1000
    out = attention(q, k, v, case.graph)
    expected = loop_attention(case, q=q.double(), k=k.double(), v=v.double(), bias=None, scale=HEAD_SIZE**-0.5)
    torch.testing.assert_close(out.double(), expected, rtol=1e-3, atol=1e-3)
    for gradient in torch.autograd.grad(out.sum(), [q, k, v]):
        assert torch.isfinite(gradient).all()


def test_scores_far_apart_leave_only_the_largest(attention):
    # Scores 2000 and -2000: exp of either is infinite or zero in fp32.
    case = Bipartite(edges=((0, 0), (1, 0)), num_targets=1, num_sources=2)
    q = torch.full((1, HEADS, HEAD_SIZE), 1000.0)
    k = torch.stack([torch.ones(HEADS, HEAD_SIZE), -torch.ones(HEADS, HEAD_SIZE)])
    v = torch.stack([torch.full((HEADS, HEAD_SIZE), 5.0), torch.full((HEADS, HEAD_SIZE), -7.0)])
    torch.testing.assert_close(attention(q, k, v, case.graph), torch.full((1, HEADS, HEAD_SIZE), 5.0))


@pytest.mark.parametrize("num_nodes", [0, 1, 5])
def test_targets_without_edges_give_zeros_and_finite_gradients(attention, num_nodes):
    case = square([], num_nodes)
    drawn = tensors(case)
    q, k, v = (drawn[name].requires_grad_() for name in ("q", "k", "v"))
    out = attention(q, k, v, case.graph, edge_bias_EH=drawn["bias"])
    assert torch.equal(out, torch.zeros(num_nodes, HEADS, HEAD_SIZE))
    for gradient in torch.autograd.grad(out.sum(), [q, k, v]):
        assert torch.equal(gradient, torch.zeros(num_nodes, HEADS, HEAD_SIZE))


def test_a_target_without_edges_beside_others_gets_zeros_and_a_zero_gradient(attention):
    case = square([(0, 0), (2, 0), (1, 2)], 3)  # nothing leads to node 1
    drawn = tensors(case)
    q, k, v = (drawn[name].requires_grad_() for name in ("q", "k", "v"))
    out = attention(q, k, v, case.graph)
    assert torch.equal(out[1], torch.zeros(HEADS, HEAD_SIZE))
    (gradient,) = torch.autograd.grad(out.square().sum(), [q])
    assert torch.equal(gradient[1], torch.zeros(HEADS, HEAD_SIZE))
    assert gradient[0].abs().max() > 0


@given(bipartites())
@example(HUB)
def test_bf16_inputs_give_bf16_outputs_near_those_of_fp32(attention, case):
    drawn = {name: value.bfloat16() for name, value in tensors(case).items()}
    out = attention(drawn["q"], drawn["k"], drawn["v"], case.graph, edge_bias_EH=drawn["bias"])
    exact = attention(
        drawn["q"].float(), drawn["k"].float(), drawn["v"].float(), case.graph, edge_bias_EH=drawn["bias"].float()
    )
    assert out.dtype == torch.bfloat16
    # Products of four entries are rounded to 8 bits before their sum; a softmax passes errors of scores on.
    torch.testing.assert_close(out.float(), exact, rtol=0.05, atol=0.05)


def test_the_row_of_each_edge_follows_from_the_pointers():
    graph = square([(4, 0), (1, 2), (2, 2), (0, 4)], 5).graph
    assert graph.target_E.tolist() == [0, 2, 2, 4]
    assert (graph.num_targets, graph.num_edges, graph.num_sources) == (5, 4, 5)


@given(bipartites(), st.integers(1, 12))
def test_chunks_are_runs_of_rows_with_few_edges_or_one_row_with_more(case, max_edges):
    graph = case.graph
    chunks = graph.chunks(max_edges)
    assert [row for rows, _ in chunks for row in range(rows.start, rows.stop)] == [*range(case.num_targets)]
    for rows, edges in chunks:
        assert (edges.start, edges.stop) == tuple(graph.indptr_N1[[rows.start, rows.stop]].tolist())
        assert edges.stop - edges.start <= max_edges or rows.stop - rows.start == 1
