"""Full attention over batches of graphs against a loop over graphs in fp64, and what is refused."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from executor.attention.edges import edge_attention
from executor.attention.full import GraphBatch, full_attention

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 8
# Relative to the norm of what is right; of the issue for fp32 and bf16.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def batch_of(sizes: list[int]) -> GraphBatch:
    return GraphBatch(graph_indptr_B1=torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int64))


def inputs_of(num_nodes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """Return random q, k, v and bias that ask for gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(HEADS, HEAD_SIZE), (KV_HEADS, HEAD_SIZE), (KV_HEADS, HEAD_SIZE)]
    tensors = [torch.randn(num_nodes, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    bias_NH = torch.randn(num_nodes, HEADS, generator=generator, dtype=torch.float64)
    bias_NH = bias_NH if dtype == torch.float64 else bias_NH.float()
    return tuple(tensor.requires_grad_() for tensor in (*tensors, bias_NH))


def attend_densely(inputs: tuple[Tensor, ...], sizes: list[int], scale: float) -> Tensor:
    """Return full attention, graph after graph, head after head, in fp64."""
    q, k, v, bias = inputs
    rows, first = [], 0
    for size in sizes:
        nodes = slice(first, first + size)
        heads = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = scale * q[nodes, head] @ k[nodes, shared].T + bias[nodes, head]
            heads.append(torch.softmax(scores, dim=1) @ v[nodes, shared])
        rows.append(torch.stack(heads, dim=1))
        first += size
    return torch.cat(rows)


def error_ratio(found: Tensor, right: Tensor) -> float:
    with torch.no_grad():
        return float((found.double() - right).norm() / right.norm().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", TOLERANCES)
@example(sizes=[1])
@example(sizes=[1, 1, 1])
@example(sizes=[0, 3, 0, 0, 40, 41, 8])
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) > 0))
def test_outputs_and_gradients_are_those_of_each_graph_by_itself(dtype, sizes):
    inputs = inputs_of(sum(sizes), dtype)
    right_inputs = tuple(tensor.detach().double().requires_grad_() for tensor in inputs)
    q, k, v, bias = inputs
    out = full_attention(q, k, v, batch_of(sizes), key_bias_NH=bias, scale=0.4)
    right = attend_densely(right_inputs, sizes, 0.4)
    assert out.dtype == dtype
    assert error_ratio(out, right) < TOLERANCES[dtype]
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    gradients = torch.autograd.grad(out, inputs, grad)
    right_gradients = torch.autograd.grad(right, right_inputs, grad.double())
    # Gradients that cancel, as of graphs of one node, are measured by the size of all.
    size = max(float(gradient.norm()) for gradient in right_gradients)
    for gradient, right_gradient in zip(gradients, right_gradients, strict=True):
        assert float((gradient.double() - right_gradient).norm()) < 2 * TOLERANCES[dtype] * size


def test_without_a_scale_it_is_one_over_the_root_of_the_head_size_and_without_a_bias_there_is_none():
    q, k, v, bias = inputs_of(30)
    found = full_attention(q, k, v, batch_of([30]))
    assert error_ratio(found, attend_densely((q, k, v, 0 * bias), [30], HEAD_SIZE**-0.5).double()) < 1e-5


def test_scores_around_a_thousand_stay_finite_and_right():
    q, k, v, _ = inputs_of(50, torch.float64)
    bias = torch.zeros(50, HEADS, dtype=torch.float64)
    sizes = [20, 30]
    rounded_q, rounded_k, rounded_v = (x.detach().float() for x in (q, k, v))
    found = full_attention(rounded_q, rounded_k, rounded_v, batch_of(sizes), scale=300.0)
    right = attend_densely((rounded_q.double(), rounded_k.double(), rounded_v.double(), bias), sizes, 300.0)
    assert torch.isfinite(found).all()
    assert error_ratio(found, right) < 1e-3


@pytest.mark.parametrize("indptr", [[0], [0, 0, 0]])
def test_a_batch_without_nodes_gives_an_empty_output_and_gradients(indptr):
    q, k, v, bias = inputs_of(0)
    k, v = (torch.zeros(0, HEADS, HEAD_SIZE, requires_grad=True) for _ in range(2))
    out = full_attention(q, k, v, GraphBatch(graph_indptr_B1=torch.tensor(indptr)), key_bias_NH=bias)
    assert out.shape == (0, HEADS, HEAD_SIZE)
    out.sum().backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))


def test_a_constant_value_comes_out_constant_in_bf16():
    q, k, _, _ = inputs_of(90, torch.bfloat16)
    v = torch.full((90, KV_HEADS, HEAD_SIZE), 0.7, dtype=torch.bfloat16)
    assert torch.equal(full_attention(q, k, v, batch_of([3, 80, 7])), v.repeat_interleave(2, dim=1))


# --- Size classes.


@given(sizes=st.lists(st.integers(0, 200), max_size=30))
def test_every_node_is_in_one_class_once_and_padding_is_bounded(sizes):
    batch = batch_of(sizes)
    rows = [row for size_class in batch.classes for row in size_class.row_C.tolist()]
    assert sorted(rows) == [*range(sum(sizes))]
    assert (batch.num_graphs, batch.num_nodes) == (len(sizes), sum(sizes))
    assert batch.num_pairs == sum(size**2 for size in sizes)
    # Widths are up to 8, or at most a quarter above the smallest graph of their class.
    bound = sum(max(8, 1.25 * size) ** 2 for size in sizes if size > 0)
    assert batch.num_padded_pairs <= bound


def test_graphs_of_one_size_are_one_class_without_a_mask():
    (size_class,) = batch_of([33] * 5).classes
    assert (size_class.num_graphs, size_class.width, size_class.is_node_BS) == (5, 33, None)


@given(sizes=st.lists(st.integers(0, 6), max_size=6))
def test_all_pairs_as_edges_are_the_pairs_inside_each_graph(sizes):
    graph = batch_of(sizes).all_pairs
    found = list(zip(graph.target_E.tolist(), graph.source_E.tolist(), strict=True))
    starts = list(itertools.accumulate([0, *sizes]))
    ranges = [range(first, end) for first, end in itertools.pairwise(starts)]
    assert found == [pair for nodes in ranges for pair in itertools.product(nodes, nodes)]


# --- Real batches.


@pytest.mark.parametrize("name", ["imdb-binary-graphs", "proteins-graphs"])
def test_a_real_set_of_graphs_gives_what_attention_over_its_pairs_as_edges_gives(shared_data, name):
    indptr = torch.from_numpy(np.load(shared_data / f"{name}.npz")["node_ptr"].astype(np.int64))[:301]
    batch = GraphBatch(graph_indptr_B1=indptr)
    assert len(batch.classes) < 25
    assert batch.num_padded_pairs < 1.3 * batch.num_pairs
    q, k, v, _ = (x.detach() for x in inputs_of(batch.num_nodes))
    found = full_attention(q, k, v, batch)
    assert error_ratio(found, edge_attention(q, k, v, batch.all_pairs).double()) < 1e-5
    assert bool((found != 0).any(2).any(1).all())


# --- What is refused.


@pytest.mark.parametrize(
    ("indptr", "message"),
    [
        ([1, 3], r"graph_indptr\[0\] must be 0, got 1"),
        ([0, 4, 3], r"graph_indptr\[2\] must not be below graph_indptr\[1\] = 4, got 3; give where"),
        ([], r"graph_indptr must be int64 of shape \[graphs \+ 1\], got torch.int64 of shape \[0\]; give \[0\]"),
    ],
)
def test_row_pointers_that_are_none_are_refused(indptr, message):
    with pytest.raises(ValueError, match=message):
        GraphBatch(graph_indptr_B1=torch.tensor(indptr, dtype=torch.int64))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": torch.zeros(3, 4, 8)}, r"q must have the shape \(5, 4, 8\), got \(3, 4, 8\)"),
        ({"v": torch.zeros(5, 2, 7)}, r"v must have the shape \(5, 2, 8\), got \(5, 2, 7\)"),
        ({"k": torch.zeros(5, 3, 8), "v": torch.zeros(5, 3, 8)}, "the 3 heads of k must divide the 4 heads of q"),
        ({"k": torch.zeros(5, 2, 8).bfloat16()}, "k must have the format of q, torch.float32, got torch.bfloat16"),
        ({"bias": torch.zeros(5, 2)}, r"key_bias must have the shape \(5, 4\), got \(5, 2\)"),
        ({"q": torch.zeros(5, 32)}, "q and k must have 3 dims: nodes, heads, head size; got 2 and 3"),
    ],
)
def test_arguments_that_do_not_fit_are_refused_in_a_sentence(changes, message):
    q, k, v, bias = inputs_of(5)
    given_inputs = {"q": q, "k": k, "v": v, "bias": bias, **changes}
    with pytest.raises(ValueError, match=message):
        full_attention(
            given_inputs["q"], given_inputs["k"], given_inputs["v"], batch_of([2, 3]), key_bias_NH=given_inputs["bias"]
        )
