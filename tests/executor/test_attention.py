"""Attention over edges against a reference in fp64, its invariants, and what it refuses."""

import functools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor.attention.edges import edge_attention, merge_attention
from executor.attention.graph import EdgeGraph
from tests.executor.attention_reference import (
    HEADS,
    Case,
    Heads,
    Layout,
    case_of,
    cases,
    relative_errors,
    run_attention,
    run_reference,
)

FP32_ERROR, BF16_ERROR = 1e-5, 2e-2  # of the largest value of the reference
LOW_PRECISION_HEADS = (Heads(3, 1, 5, True), Heads(4, 4, 7, True))
BIPARTITE = case_of([(11, 0), (11, 0), (2, 1)], 2, 12, num_heads=8, num_kv_heads=8, has_bias=True)
NO_EDGES = case_of([], 3, num_heads=8, num_kv_heads=8, has_bias=True)
ONE_NODE = case_of([(0, 0)], 1, num_heads=8, num_kv_heads=8)
ISOLATED = case_of([(0, 0), (0, 0), (1, 0), (3, 3)], 5, num_heads=8, num_kv_heads=8)


def require_below(errors: dict[str, float], bound: float) -> None:
    assert max(errors.values()) <= bound, errors


# --- Against the reference.


@given(cases())
@example(BIPARTITE)
@example(NO_EDGES)
@example(ONE_NODE)
@example(ISOLATED)
@settings(max_examples=150)
def test_results_and_gradients_are_those_of_fp64(case):
    require_below(relative_errors(case), FP32_ERROR)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@given(case=cases(LOW_PRECISION_HEADS))
@settings(max_examples=30)
def test_16_bit_inputs_give_results_near_those_of_fp64(dtype, case):
    require_below(relative_errors(case, dtype), BF16_ERROR)
    assert run_attention(case, dtype)["out"].dtype == dtype


def test_a_model_in_bf16_may_add_a_bias_in_fp32():
    case = case_of([(s, t) for s in range(6) for t in range(5)], 5, 6, num_heads=4, num_kv_heads=4, head_size=7)
    inputs = case.inputs(torch.bfloat16)
    bias_EH = torch.randn(30, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    out = edge_attention(inputs["q"], inputs["k"], inputs["v"], case.graph(), edge_bias=bias_EH)
    wide = {name: value.double() for name, value in inputs.items()}
    scores_NSH = torch.einsum("nhk,shk->nsh", wide["q"], wide["k"]) * 7**-0.5
    weights_NSH = torch.softmax(scores_NSH + bias_EH.detach().double().view(5, 6, 4), 1)
    torch.testing.assert_close(out.double(), torch.einsum("nsh,shk->nhk", weights_NSH, wide["v"]), rtol=0.02, atol=0.02)
    (gradient,) = torch.autograd.grad(out.float().sum(), [bias_EH])
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("head_size", [1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 40, 64, 72, 100, 127, 128])
def test_every_head_size_works(head_size):
    edges = [(s, t) for s in range(7) for t in range(5) if (s + 2 * t) % 3]
    case = case_of(edges, 5, 7, num_heads=6, num_kv_heads=3, head_size=head_size, layout=Layout.VIEWS)
    require_below(relative_errors(case), FP32_ERROR)


@functools.cache
def hub_case(*, is_target: bool) -> Case:
    """Return a node with 10^5 edges, to it or from it, beside nodes with few."""
    generator = torch.Generator().manual_seed(0)
    many, few = torch.randint(0, 40, (100_000,), generator=generator), torch.randint(0, 40, (200,), generator=generator)
    hub = torch.full_like(many, 7)
    source_E, target_E = (many, hub) if is_target else (hub, many)
    source_E, target_E = torch.cat([source_E, few]), torch.cat([target_E, few.flip(0)])
    order = torch.sort(target_E, stable=True).indices
    return Case(
        source_E=source_E[order],
        target_E=target_E[order],
        num_targets=41,
        num_sources=43,
        num_heads=8,
        num_kv_heads=8,
        head_size=16,
        has_bias=True,
    )


@pytest.mark.parametrize("is_target", [True, False])
def test_a_hub_of_100000_edges_loses_no_precision(is_target):
    require_below(relative_errors(hub_case(is_target=is_target)), FP32_ERROR)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_around_a_thousand_stay_finite_and_right(sign):
    edges = [(s, t) for s in range(6) for t in range(6)]
    case = case_of(edges, 6, num_heads=8, num_kv_heads=8, spread=sign * 300.0, scale=1.0)
    wanted = run_reference(case, torch.float32)
    assert wanted["lse"].abs().max() > 1000
    # An error of 2^-24 of the score is one of 1e-4 of the weight.
    require_below(relative_errors(case), 1e-3)


def test_scores_far_apart_leave_only_the_largest():
    # Scores 2000 and -2000: exp of either is infinite or zero in fp32.
    graph = case_of([(0, 0), (1, 0)], 1, 2).graph()
    q, ones = torch.full((1, 2, 16), 500.0), torch.ones(2, 16)
    k, v = torch.stack([ones, -ones]), torch.stack([5 * ones, -7 * ones])
    torch.testing.assert_close(edge_attention(q, k, v, graph), torch.full((1, 2, 16), 5.0))


def test_edges_between_all_pairs_give_dense_attention():
    case = case_of([(s, t) for s in range(9) for t in range(6)], 6, 9)
    inputs = case.inputs()
    q, k, v = (inputs[name].transpose(0, 1) for name in ("q", "k", "v"))
    dense = F.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(
        edge_attention(inputs["q"], inputs["k"], inputs["v"], case.graph()), dense.transpose(0, 1)
    )


# --- Invariants.


@given(cases(HEADS[:1]))
def test_equal_values_are_what_every_target_with_edges_gets_in_bf16(case):
    inputs = case.inputs(torch.bfloat16)
    value_HK = torch.linspace(-3, 3, 128).view(8, 16).bfloat16()
    v = value_HK.expand(case.num_sources, 8, 16)
    out = edge_attention(inputs["q"], inputs["k"], v, case.graph())
    linked = case.target_E.unique()
    assert torch.equal(out[linked], value_HK.expand(len(linked), 8, 16))


def test_an_edge_that_is_there_twice_counts_twice():
    # Target 0 has two edges from source 0 and one from source 1, all with the same score.
    graph = case_of([(0, 0), (0, 0), (1, 0)], 1, 2).graph()
    values = torch.tensor([3.0, 9.0]).view(2, 1, 1).expand(2, 2, 16)
    out = edge_attention(torch.ones(1, 2, 16), torch.ones(2, 2, 16), values, graph)
    torch.testing.assert_close(out, torch.full((1, 2, 16), (3.0 + 3.0 + 9.0) / 3))


@given(cases(HEADS[:1]), st.randoms(use_true_random=False))
def test_permuting_nodes_permutes_outputs(case, shuffle):
    new_target = shuffle.sample(range(case.num_targets), case.num_targets)
    new_source = shuffle.sample(range(case.num_sources), case.num_sources)
    pairs = zip(case.source_E.tolist(), case.target_E.tolist(), strict=True)
    moved = case_of([(new_source[s], new_target[t]) for s, t in pairs], case.num_targets, case.num_sources)
    inputs = case.inputs()
    out = edge_attention(inputs["q"], inputs["k"], inputs["v"], case.graph())
    q, k, v = (torch.empty_like(inputs[name]) for name in ("q", "k", "v"))
    q[new_target], k[new_source], v[new_source] = inputs["q"], inputs["k"], inputs["v"]
    torch.testing.assert_close(edge_attention(q, k, v, moved.graph())[new_target], out)


@pytest.mark.parametrize("num_nodes", [0, 1, 5])
def test_targets_without_edges_give_zeros_and_zero_gradients(num_nodes):
    case = case_of([], num_nodes, num_heads=8, num_kv_heads=8)
    q, k, v = (value.requires_grad_() for value in case.inputs().values())
    out, lse = edge_attention(q, k, v, case.graph(), return_lse=True)
    assert torch.equal(out, torch.zeros(num_nodes, 8, 16))
    assert torch.equal(lse, torch.full((num_nodes, 8), -torch.inf))
    for gradient in torch.autograd.grad(out.sum(), [q, k, v]):
        assert torch.equal(gradient, torch.zeros(num_nodes, 8, 16))


def test_a_gradient_of_the_log_sum_exp_alone_is_that_of_scores():
    case = case_of([(0, 0), (1, 0), (1, 1)], 2, num_heads=8, num_kv_heads=8)
    q, k, v = (value.requires_grad_() for value in case.inputs().values())
    _, lse = edge_attention(q, k, v, case.graph(), return_lse=True)
    gradients = torch.autograd.grad(lse.sum(), [q, k, v])
    # Row 1 has one edge: its log-sum-exp is the score.
    torch.testing.assert_close(gradients[0][1], k[1] / 4)
    assert torch.equal(gradients[2], torch.zeros_like(v))


# --- Merging.


@given(cases(HEADS[:1]), st.integers(1, 4), st.integers(0, 100))
def test_parts_of_the_edges_merge_to_the_whole_gradients_included(case, num_parts, seed):
    part_E = torch.randint(0, num_parts, case.source_E.shape, generator=torch.Generator().manual_seed(seed))
    gradients = case.gradients()

    def run(masks: list[Tensor]) -> list[Tensor]:
        q, k, v = (case.inputs()[name].requires_grad_() for name in "qkv")
        parts = [edge_attention(q, k, v, _part(case, mask_E), return_lse=True, scale=case.scale) for mask_E in masks]
        out, lse = merge_attention(parts) if len(parts) > 1 else parts[0]
        finite = torch.isfinite(lse)
        loss = (out * gradients["out"]).sum() + (torch.where(finite, lse, 0) * gradients["lse"]).sum()
        return [out, lse, *torch.autograd.grad(loss, [q, k, v])]

    whole = run([torch.ones_like(part_E, dtype=torch.bool)])
    merged = run([part_E == part for part in range(num_parts)])
    for found, wanted in zip(merged, whole, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def _part(case: Case, mask_E: Tensor) -> EdgeGraph:
    source_E, target_E = case.source_E[mask_E], case.target_E[mask_E]
    return Case(
        source_E=source_E, target_E=target_E, num_targets=case.num_targets, num_sources=case.num_sources
    ).graph()


# --- What does not fit.


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"q": torch.zeros(4, 8, 16)}, r"q must have the shape \(3, 8, 16\), got \(4, 8, 16\)"),
        ({"k": torch.zeros(3, 8, 8)}, r"k must have the shape \(3, 8, 16\), got \(3, 8, 8\)"),
        ({"v": torch.zeros(3, 4, 16)}, r"v must have the shape \(3, 8, 16\), got \(3, 4, 16\)"),
        ({"v": torch.zeros(3, 8, 16).bfloat16()}, r"v must have the format of q, torch.float32, got torch.bfloat16"),
        ({"edge_bias": torch.zeros(1, 8)}, r"edge_bias must have the shape \(2, 8\), got \(1, 8\)"),
        ({"edge_features": torch.zeros(2, 8)}, r"edge_features must have the shape \(2, 8, 16\), got \(2, 8\)"),
        ({"dropout": 1.0}, r"dropout must be at least 0 and below 1, got 1.0"),
        ({"dropout": 0.1}, r"dropout needs dropout_key, an int64 tensor of seed and step"),
    ],
)
def test_what_does_not_fit_is_told_in_a_sentence(change, sentence):
    case = case_of([(0, 0), (1, 2)], 3, num_heads=8, num_kv_heads=8)
    arguments = case.inputs() | change
    q, k, v = (arguments.pop(name) for name in ("q", "k", "v"))
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        edge_attention(q, k, v, case.graph(), **arguments)


def test_heads_that_cannot_be_grouped_and_fp64_are_refused():
    graph, wide = case_of([(0, 0)], 1).graph(), torch.zeros(1, 2, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^the 2 heads of k must divide the 3 heads of q$"):
        edge_attention(torch.zeros(1, 3, 4), torch.zeros(1, 2, 4), torch.zeros(1, 2, 4), graph)
    with pytest.raises(ValueError, match=r"^q must be fp32, bf16 or fp16, got torch.float64$"):
        edge_attention(wide, wide, wide, graph)
    narrow = wide.float()
    with pytest.raises(ValueError, match=r"^edge_bias must be fp32, bf16 or fp16, got torch.float64$"):
        edge_attention(narrow, narrow, narrow, graph, edge_bias=wide[:, :, 0])


def test_a_backward_pass_after_its_graph_is_gone_still_works():
    q, k, v = (value.requires_grad_() for value in ONE_NODE.inputs().values())
    out = edge_attention(q, k, v, ONE_NODE.graph())  # nobody else keeps the graph
    assert torch.autograd.grad(out.sum(), [v])[0].eq(1).all()


def test_the_row_of_each_edge_and_the_transpose_follow_from_the_pointers():
    graph = case_of([(4, 0), (1, 2), (2, 2), (1, 4)], 5).graph()
    assert graph.target_E.tolist() == [0, 2, 2, 4]
    assert (graph.num_targets, graph.num_edges, graph.num_sources) == (5, 4, 5)
    transpose = graph.transpose
    assert transpose.indptr_M1.tolist() == [0, 0, 2, 3, 3, 4]
    assert transpose.target_E.tolist() == [2, 4, 2, 0]
    assert transpose.position_E.tolist() == [1, 3, 2, 0]
