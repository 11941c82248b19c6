"""The loss term of structure against its definition in dense fp64, and what training with it does to attention."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from executor.attention.edges import edge_attention
from executor.attention.full import GraphBatch
from executor.attention.graph import EdgeGraph
from executor.attention.structure import StructureTarget, add_loss, degree_target, structure_loss

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8


def graph_of(is_edge_TS: Tensor) -> EdgeGraph:
    """Return the edges of a bool matrix [targets, sources]."""
    ends = is_edge_TS.sum(1).cumsum(0)
    return EdgeGraph(
        indptr_N1=torch.cat([ends.new_zeros(1), ends]),
        source_E=is_edge_TS.nonzero()[:, 1].to(torch.int32),
        num_sources=is_edge_TS.shape[1],
    )


def weights_of(q: Tensor, k: Tensor, bias_TSH: Tensor | None, is_edge_TS: Tensor) -> Tensor:
    """Return the weights of attention, [T, S, H]; NaN in rows without edges."""
    scores_TSH = torch.einsum("thk,shk->tsh", q, k.repeat_interleave(HEADS // KV_HEADS, 1)) / math.sqrt(HEAD_SIZE)
    if bias_TSH is not None:
        scores_TSH = scores_TSH + bias_TSH
    return scores_TSH.masked_fill(~is_edge_TS.unsqueeze(2), -torch.inf).softmax(1)


def divergence(weights_TSH: Tensor, target_TS: Tensor) -> Tensor:
    """Return the mean of KL(target | weights) over heads and rows that have a target, term by term."""
    terms = [
        target_TS[row, source] * (target_TS[row, source].log() - weights_TSH[row, source, head].log())
        for row, source in target_TS.nonzero().tolist()
        for head in range(HEADS)
    ]
    num_rows = int((target_TS > 0).any(1).sum())
    return torch.stack(terms).sum() / (num_rows * HEADS)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Tensor, Tensor, int]:
    """Draw edges, intended edges among them, at least one, and a seed; targets and sources may differ in number."""
    num_targets, num_sources = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    seed = draw(st.integers(0, 1000))
    generator = torch.Generator().manual_seed(seed)
    is_edge = torch.rand(num_targets, num_sources, generator=generator) < draw(st.floats(0.2, 1))
    is_intended = is_edge & (torch.rand(num_targets, num_sources, generator=generator) < draw(st.floats(0.3, 1)))
    is_edge[0, 0] = is_intended[0, 0] = True
    return is_edge, is_intended, seed


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_weighted", [False, True])
@given(case=cases())
def test_the_loss_and_its_gradients_are_those_of_the_definition(has_bias, is_weighted, case):
    is_edge, is_intended, seed = case
    generator = torch.Generator().manual_seed(seed)
    shape = is_edge.shape
    q = torch.randn(shape[0], HEADS, HEAD_SIZE, generator=generator, requires_grad=True)
    k = torch.randn(shape[1], KV_HEADS, HEAD_SIZE, generator=generator, requires_grad=True)
    bias = torch.randn(*shape, HEADS, generator=generator, requires_grad=True)
    log_weight = torch.randn(shape, generator=generator)

    _, lse = edge_attention(
        q, k, k.detach(), graph_of(is_edge), edge_bias=bias[is_edge] if has_bias else None, return_lse=True
    )
    target = StructureTarget(graph=graph_of(is_intended), log_weight_E=log_weight[is_intended] if is_weighted else None)
    found = structure_loss(q, k, lse, target, edge_bias=bias[is_intended] if has_bias else None)

    exact = [x.detach().double().requires_grad_() for x in (q, k, bias)]
    weights = weights_of(exact[0], exact[1], exact[2] if has_bias else None, is_edge)
    target_TS = (log_weight.double() * is_weighted).exp() * is_intended
    right = divergence(weights, target_TS / target_TS.sum(1, keepdim=True).clamp(min=1e-30))
    assert float(found.detach()) == pytest.approx(float(right.detach()), rel=1e-5, abs=1e-5)
    inputs, exact = ([q, k, bias], exact) if has_bias else ([q, k], exact[:2])
    gradients, right_gradients = torch.autograd.grad(found, inputs), torch.autograd.grad(right, exact)
    for gradient, right_gradient in zip(gradients, right_gradients, strict=True):
        torch.testing.assert_close(gradient.double(), right_gradient, rtol=1e-4, atol=1e-5)


def test_attention_that_is_its_target_has_no_loss_and_no_gradient():
    q = torch.zeros(5, HEADS, HEAD_SIZE, requires_grad=True)
    k = torch.randn(5, KV_HEADS, HEAD_SIZE, generator=torch.Generator().manual_seed(0))
    graph = graph_of(torch.rand(5, 5, generator=torch.Generator().manual_seed(1)) < 0.6)
    _, lse = edge_attention(q, k, k, graph, return_lse=True)
    loss = structure_loss(q, k, lse, StructureTarget(graph=graph))
    (gradient,) = torch.autograd.grad(loss, [q])
    assert abs(float(loss.detach())) < 1e-6
    assert float(gradient.abs().max()) < 1e-6


def test_without_any_intended_edge_the_loss_is_zero_and_gradients_are_finite():
    q = torch.randn(3, HEADS, HEAD_SIZE, requires_grad=True)
    k = torch.randn(3, KV_HEADS, HEAD_SIZE, requires_grad=True)
    graph = graph_of(torch.zeros(3, 3, dtype=torch.bool))
    _, lse = edge_attention(q, k, k, graph, return_lse=True)
    loss = structure_loss(q, k, lse, StructureTarget(graph=graph))
    loss.backward()
    assert float(loss.detach()) == 0
    assert q.grad is not None
    assert torch.equal(q.grad, torch.zeros_like(q))


def test_a_degree_target_weighs_edges_by_the_power_of_the_sources_degree():
    graph = graph_of(torch.tensor([[True, True, True]]))
    target = degree_target(graph, torch.tensor([1, 4, 0]), exponent=0.5)
    assert target.log_weight_E is not None
    assert target.log_weight_E.exp().tolist() == pytest.approx([1.0, 2.0, 1.0])
    # Weights of 1/4, 1/2, 1/4: two quarters of 2 bits, a half of one.
    assert float(target.entropy_N[0]) == pytest.approx(1.5 * math.log(2))


@pytest.mark.parametrize("kind", ["uniform", "weighted"])
def test_training_with_the_term_moves_the_attention_of_all_nodes_onto_the_intended_edges(kind):
    num_nodes = 24
    generator = torch.Generator().manual_seed(0)
    # A ring: nodes attend to all nodes, and are meant to attend to the two beside them.
    gap_TS = (torch.arange(num_nodes)[:, None] - torch.arange(num_nodes)) % num_nodes
    is_intended = (gap_TS == 1) | (gap_TS == num_nodes - 1)
    log_weight_TS = torch.where(gap_TS == 1, math.log(3.0), 0.0) if kind == "weighted" else torch.zeros(gap_TS.shape)
    pairs = GraphBatch(graph_indptr_B1=torch.tensor([0, num_nodes])).all_pairs
    target = StructureTarget(graph=graph_of(is_intended), log_weight_E=log_weight_TS[is_intended])
    x = torch.randn(num_nodes, 32, generator=generator)
    q_weight, k_weight = (
        (0.2 * torch.randn(32, heads * HEAD_SIZE, generator=generator)).requires_grad_() for heads in (HEADS, KV_HEADS)
    )
    optimizer = torch.optim.Adam([q_weight, k_weight], lr=0.05)

    def projected() -> tuple[Tensor, Tensor]:
        return (x @ q_weight).unflatten(1, (HEADS, -1)), (x @ k_weight).unflatten(1, (KV_HEADS, -1))

    def mass_TS() -> Tensor:
        weights_TSH = weights_of(*projected(), None, torch.ones_like(is_intended))
        return weights_TSH.mean(2).detach()

    before = float(mass_TS()[is_intended].sum() / num_nodes)
    for _ in range(150):
        optimizer.zero_grad()
        q, k = projected()
        out, lse = edge_attention(q, k, k, pairs, return_lse=True)
        # The task itself wants nothing: only the term moves weights.
        (0 * add_loss(out, structure_loss(q, k, lse, target)).sum()).backward()
        optimizer.step()
    after_TS = mass_TS()
    assert before < 0.2
    assert float(after_TS[is_intended].sum() / num_nodes) > 0.9
    forward_share = 0.75 if kind == "weighted" else 0.5
    assert float(after_TS[gap_TS == 1].mean()) == pytest.approx(forward_share, abs=0.06)


def test_a_loss_is_added_without_changing_what_passes():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    weight = torch.tensor(3.0, requires_grad=True)
    out = add_loss(x, weight**2)
    assert torch.equal(out, x)
    (2 * out.sum()).backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.tolist() == [2.0, 2.0]
    assert float(weight.grad) == 6.0


def test_what_does_not_fit_is_refused_in_a_sentence():
    graph = graph_of(torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"log_weight must have the shape \[4\] of the edges, got \[3\]"):
        StructureTarget(graph=graph, log_weight_E=torch.zeros(3))
    q, k = torch.zeros(2, HEADS, HEAD_SIZE), torch.zeros(2, KV_HEADS, HEAD_SIZE)
    with pytest.raises(ValueError, match=r"lse must have the shape \(2, 4\) of q's heads, got \(2, 2\)"):
        structure_loss(q, k, torch.zeros(2, 2), StructureTarget(graph=graph))
