"""What each operation computes, by hand or against the dense form; dropout whose masks depend on keys alone."""

import inspect
import math

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from executor import operations
from executor.attention.graph import EdgeGraph
from executor.compat import making_sparse_csr
from executor.operations import DROPOUT, Operation, SparseFeatures
from simulator.specs.program import ATTENTION_PASSES, BATCH_KINDS, HOST_COPIES, SHAPE_FIELDS, UPDATES, TaskKind

PIECES = (operations.QUERY, operations.KEY_VALUE, operations.PRODUCT)  # of the operations of their kinds
ALL_OPERATIONS = [
    value for _, value in inspect.getmembers(operations) if isinstance(value, Operation) and value not in PIECES
]


def kept(nodes: Tensor, num_columns: int, *, ratio: float = 0.5, seed: int = 0) -> Tensor:
    """Return which entries a mask keeps."""
    ones = torch.ones(len(nodes), num_columns)
    return DROPOUT.function(ones, nodes, ratio, seed) > 0  # type: ignore[no-any-return]


def largest_correlation(flags: Tensor) -> float:
    """Return the largest correlation of two columns, in standard deviations of what independent columns have."""
    scaled = flags.double() - flags.double().mean(0)
    scaled = scaled / scaled.square().mean(0).sqrt()
    correlations = scaled.T @ scaled / len(flags)
    return float(correlations.fill_diagonal_(0).abs().max()) * math.sqrt(len(flags))


# --- Dropout.


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=30, unique=True), st.randoms(use_true_random=False))
def test_a_node_has_the_same_mask_in_any_order_and_in_any_part(nodes, random):
    whole = kept(torch.tensor(nodes), 12)
    order = random.sample(range(len(nodes)), len(nodes))
    assert torch.equal(kept(torch.tensor(nodes)[order], 12), whole[order])
    cut = random.randrange(len(nodes) + 1)
    parts = [kept(torch.tensor(part, dtype=torch.int64), 12) for part in (nodes[:cut], nodes[cut:])]
    assert torch.equal(torch.cat(parts), whole)


def test_a_column_has_the_same_mask_in_a_wider_tensor():
    nodes = torch.arange(50)
    assert torch.equal(kept(nodes, 64)[:, :16], kept(nodes, 16))


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.5, 0.9])
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1])
def test_the_share_dropped_is_within_five_deviations_of_the_ratio(ratio, seed):
    flags = kept(torch.arange(2000), 64, ratio=ratio, seed=seed)
    deviation = math.sqrt(ratio * (1 - ratio) / flags.numel())
    assert 1 - flags.double().mean().item() == pytest.approx(ratio, abs=5 * deviation)


def test_kept_entries_are_scaled_so_that_the_mean_stays():
    x = torch.full((3, 8), 2.0)
    out = DROPOUT.function(x, torch.arange(3), 0.2, 9)
    assert set(out.flatten().tolist()) <= {0.0, 2.5}


def test_masks_of_columns_rows_and_seeds_are_uncorrelated():
    # Of some 2,000 pairs the largest lies near 3.6 deviations; 6 would come once in a million times.
    flags = kept(torch.arange(1 << 14), 64)
    assert largest_correlation(flags) < 6
    assert largest_correlation(kept(torch.arange(64), 1 << 14).T) < 6
    by_seed = torch.stack([kept(torch.arange(512), 32, seed=seed).flatten() for seed in range(64)], dim=1)
    assert largest_correlation(by_seed) < 6


def test_backward_uses_the_mask_of_forward():
    x = torch.randn(20, 16).requires_grad_()
    out = DROPOUT.function(x, torch.arange(20), 0.3, 3)
    (gradient,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(gradient * x, out)
    assert torch.equal(gradient == 0, ~kept(torch.arange(20), 16, ratio=0.3, seed=3))


def test_autograd_holds_the_mask_so_that_a_recomputed_layer_can_let_go_of_it():
    packed: list[torch.dtype] = []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.dtype)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = DROPOUT.function(torch.ones(2, 2, requires_grad=True), torch.arange(2), 0.5, 0)
    assert packed == [torch.bool]
    assert not [name for name in vars(out.grad_fn) if isinstance(getattr(out.grad_fn, name), Tensor)]


def test_bf16_stays_bf16_in_dropout():
    out = DROPOUT.function(torch.ones(4, 4, dtype=torch.bfloat16), torch.arange(4), 0.5, 0)
    assert out.dtype == torch.bfloat16


# --- Sparse features.


def sparse_features(matrix: np.ndarray) -> SparseFeatures:
    def csr(array: scipy.sparse.csr_array) -> Tensor:
        with making_sparse_csr():
            return torch.sparse_csr_tensor(
                torch.from_numpy(array.indptr.astype(np.int64)),
                torch.from_numpy(array.indices.astype(np.int64)),
                torch.from_numpy(array.data),
                size=array.shape,
            )

    rows = scipy.sparse.csr_array(matrix.astype(np.float32))
    return SparseFeatures(rows=csr(rows), columns=csr(rows.T.tocsr()))


@given(st.integers(0, 7), st.integers(1, 9), st.floats(0, 1), st.integers(0, 10**6))
def test_a_sparse_linear_map_and_its_gradient_equal_the_dense_ones(num_rows, num_columns, density, seed):
    generator = np.random.default_rng(seed)
    matrix = generator.normal(size=(num_rows, num_columns)) * (generator.random((num_rows, num_columns)) < density)
    features = sparse_features(matrix)
    weight = torch.from_numpy(generator.normal(size=(num_columns, 3)).astype(np.float32)).requires_grad_()
    out = operations.SPARSE_LINEAR.function(features, weight, torch.float32)
    dense = torch.from_numpy(matrix)
    torch.testing.assert_close(out.double(), dense @ weight.double(), atol=1e-5, rtol=1e-5)
    wanted = torch.from_numpy(generator.normal(size=(num_rows, 3)))
    (gradient,) = torch.autograd.grad(out, weight, wanted.float())
    torch.testing.assert_close(gradient.double(), dense.T @ wanted, atol=1e-5, rtol=1e-5)
    assert features.num_entries == np.count_nonzero(matrix)


def test_a_sparse_linear_map_gives_the_precision_of_the_run():
    features = sparse_features(np.eye(3))
    out = operations.SPARSE_LINEAR.function(features, torch.randn(3, 4), torch.bfloat16)
    assert out.dtype == torch.bfloat16


# --- The loss.


def test_the_loss_by_hand():
    # Probabilities of the labels: 1/2 and 3/4; five labelled rows on all ranks.
    logits = torch.tensor([[7.0, 7.0], [0.0, 100.0], [0.0, math.log(3)]])
    loss = operations.LOSS.function(logits, torch.tensor([0, 2]), torch.tensor([1, 1]), 5)
    assert loss.item() == pytest.approx((math.log(2) + math.log(4 / 3)) / 5)


def test_the_loss_of_a_rank_without_labels_is_zero_with_zero_gradients():
    logits = torch.randn(3, 2).requires_grad_()
    none = torch.zeros(0, dtype=torch.int64)
    loss = operations.LOSS.function(logits, none, none, 5)
    loss.backward()
    assert loss.item() == 0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(3, 2))


def test_the_loss_of_bf16_logits_is_fp32():
    logits = torch.zeros(1, 3, dtype=torch.bfloat16)
    loss = operations.LOSS.function(logits, torch.tensor([0]), torch.tensor([2]), 1)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(3))


# --- The table.


def test_a_projection_is_a_linear_map_in_two_pieces():
    x, weight = torch.randn(5, 4), torch.randn(12, 4)
    q, kv = operations.PROJECTION.function(x, weight)
    torch.testing.assert_close(torch.cat([q, kv], dim=1), x @ weight.T)
    assert (q.shape, kv.shape) == ((5, 4), (5, 8))


def test_a_layer_norm_by_hand():
    # Mean 2, variance 1 (and 1e-5 beside it).
    out = operations.LAYER_NORM.function(torch.tensor([[1.0, 3.0]]), torch.tensor([2.0, 2.0]), torch.tensor([0.0, 1.0]))
    torch.testing.assert_close(out, torch.tensor([[-2.0, 3.0]]), atol=1e-4, rtol=0)


def test_attention_splits_the_columns_into_heads():
    # One edge from row 1 to row 0: the output is the value of row 1; values are the second half of the columns.
    graph = EdgeGraph(indptr_N1=torch.tensor([0, 1]), source_E=torch.tensor([1], dtype=torch.int32), num_sources=2)
    kv = torch.arange(16.0).view(2, 8)
    out = operations.ATTENTION.function(torch.ones(1, 4), kv, None, graph, 2)
    assert out.tolist() == [[12.0, 13.0, 14.0, 15.0]]


@pytest.mark.parametrize("num_targets", [0, 2, 3])
def test_of_target_rows_the_others_get_gradients_of_zero(num_targets):
    q, h = torch.randn(3, 2, requires_grad=True), torch.randn(3, 2, requires_grad=True)
    kept_q, kept_h = operations.TARGET_ROWS.function(q, h, num_targets)
    assert torch.equal(kept_q, q[:num_targets])
    assert torch.equal(kept_h, h[:num_targets])
    grad_q, grad_h = torch.autograd.grad(2 * kept_q.sum() + 3 * kept_h.sum(), [q, h])
    of_rows = torch.arange(3).unsqueeze(1).expand(3, 2) < num_targets
    assert torch.equal(grad_q, 2.0 * of_rows)
    assert torch.equal(grad_h, 3.0 * of_rows)


def test_queries_and_keys_with_values_are_the_projection_in_two_products():
    x, weight = torch.randn(5, 4), torch.randn(12, 4)
    q, kv = operations.PROJECTION.function(x, weight)
    torch.testing.assert_close(operations.QUERY.function(x, weight), q)
    torch.testing.assert_close(operations.KEY_VALUE.function(x, weight), kv)
    assert operations.QUERY.shape(x, weight) == (5, 4, 4)
    assert operations.KEY_VALUE.shape(x, weight) == (5, 4, 8)


def test_a_product_with_a_bias_behind_it_is_a_linear_map():
    x, weight, bias = torch.randn(5, 4), torch.randn(6, 4), torch.randn(6)
    product = operations.PRODUCT.function(x, weight)
    torch.testing.assert_close(operations.BIAS.function(product, bias), torch.nn.functional.linear(x, weight, bias))
    assert operations.PRODUCT.shape(x, weight) == (5, 4, 6)


def arguments_of(kind: TaskKind) -> tuple[tuple[object, ...], tuple[int, ...]]:
    """Return arguments for an operation, and the shape of their task by hand."""
    x = torch.zeros(5, 4)
    source_E = torch.tensor([6, 0, 1], dtype=torch.int32)
    graph = EdgeGraph(indptr_N1=torch.tensor([0, 2, 2, 2, 2, 3]), source_E=source_E, num_sources=7)
    features = sparse_features(np.array([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]]))
    found: dict[TaskKind, tuple[tuple[object, ...], tuple[int, ...]]] = {
        TaskKind.LINEAR: ((x, torch.zeros(6, 4), torch.zeros(6)), (5, 4, 6)),
        TaskKind.INPUT_LINEAR: ((x, torch.zeros(6, 4), torch.zeros(6)), (5, 4, 6)),
        TaskKind.SPARSE_LINEAR: ((features, torch.zeros(3, 8), torch.float32), (2, 3, 3, 8)),
        TaskKind.PROJECTION: ((x, torch.zeros(12, 4)), (5, 4, 12)),
        TaskKind.LAYER_NORM: ((x, torch.ones(4), torch.zeros(4)), (5, 4)),
        TaskKind.GELU: ((x,), (5, 4)),
        TaskKind.DROPOUT: ((x, torch.arange(5), 0.5, 0), (5, 4)),
        TaskKind.RESIDUAL: ((x, x), (5, 4)),
        TaskKind.BIAS: ((x, torch.zeros(4)), (5, 4)),
        TaskKind.TARGET_ROWS: ((x, x, 3), (5, 3, 4)),
        TaskKind.EDGE_BIAS: ((torch.zeros(16, 2), torch.tensor([0, 3, 3])), (3, 2)),
        TaskKind.ATTENTION: ((x, torch.zeros(7, 8), None, graph, 2), (5, 7, 3, 0, 0, 2, 2)),
        TaskKind.COPY_ROWS: ((x,), (5, 4)),
        TaskKind.LOSS: ((x, torch.tensor([0, 1]), torch.tensor([3, 3]), 9), (5, 2, 4)),
    }
    return found[kind]


def test_the_shape_of_attention_counts_edges_of_rows_with_more_than_32():
    # 33 edges from row 0 into row 0, 32 from row 1 into row 1, and one from row 1 into row 2.
    source_E = torch.tensor([0] * 33 + [1] * 33, dtype=torch.int32)
    graph = EdgeGraph(indptr_N1=torch.tensor([0, 33, 65, 66]), source_E=source_E, num_sources=2)
    shape = operations.ATTENTION.shape(torch.zeros(3, 4), torch.zeros(2, 8), None, graph, 2)
    assert shape == (3, 2, 66, 33, 33 + 33, 2, 2)


@pytest.mark.parametrize("operation", ALL_OPERATIONS, ids=lambda operation: operation.kind.value)
def test_the_shape_of_a_task_counts_what_its_kind_says(operation):
    arguments, expected = arguments_of(operation.kind)
    operation.function(*arguments)
    assert operation.shape(*arguments) == expected
    assert len(expected) == len(SHAPE_FIELDS[operation.kind])


def test_every_compute_task_of_the_model_has_one_operation():
    # Packing, padding, merging and passes of attention belong to the exchanges; batches, clipping, the update, what
    # compresses gradients and copies to the host and back to the trainer.
    of_exchanges = {TaskKind.HALO_PACK, TaskKind.PAD_ROWS, TaskKind.MERGE} | ATTENTION_PASSES
    elsewhere = of_exchanges | UPDATES | BATCH_KINDS | HOST_COPIES
    expected = {kind for kind in TaskKind if not kind.is_collective} - elsewhere
    assert sorted(operation.kind for operation in ALL_OPERATIONS) == sorted(expected)
