"""What each kind of compute task does, once: the model, the microbenchmarks and the traces all use this table."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.attention.edges import edge_attention
from executor.attention.graph import EdgeGraph
from executor.keyed import mix, signed, threshold
from simulator.specs.program import TaskKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A function with one autograd-tracked result that is the task's, and the shape of the task.

    Attributes:
        function: computes the result.
        shape: counts of the task, as `SHAPE_FIELDS` says, from the arguments of `function`.
    """

    kind: TaskKind
    function: Callable[..., Any]
    shape: Callable[..., tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class SparseFeatures:
    """Node features in CSR, with the transpose that the gradient of the weights needs.

    Attributes:
        rows: CSR [N, F], fp32.
        columns: CSR of the transpose, [F, N].
    """

    rows: Tensor
    columns: Tensor

    @cached_property
    def num_entries(self) -> int:
        """Stored entries."""
        return int(self.rows.values().numel())


class _SparseLinear(torch.autograd.Function):
    """Features times weights; only the weights get a gradient."""

    @staticmethod
    def forward(ctx: Any, features: SparseFeatures, weight_FD: Tensor) -> Tensor:
        ctx.features = features
        return torch.mm(features.rows, weight_FD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor]:
        (grad_ND,) = gradients
        return None, torch.mm(ctx.features.columns, grad_ND)


def _sparse_linear(features: SparseFeatures, weight_FD: Tensor, dtype: torch.dtype) -> Tensor:
    # Sparse products are fp32: CPUs offer no other.
    out_ND: Tensor = _SparseLinear.apply(features, weight_FD)  # type: ignore[no-untyped-call]
    return out_ND.to(dtype)


def _linear(x_ND: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x_ND, weight.to(x_ND.dtype), bias.to(x_ND.dtype))


def _product(x_ND: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x_ND, weight.to(x_ND.dtype))


def _bias(x_ND: Tensor, bias: Tensor) -> Tensor:
    return x_ND + bias.to(x_ND.dtype)


def _projection(x_ND: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    columns = query_columns(weight)
    q_ND, kv_N2D = torch.split(F.linear(x_ND, weight.to(x_ND.dtype)), [columns, 2 * columns], dim=1)
    return q_ND, kv_N2D


def query_columns(weight: Tensor) -> int:
    """Return the columns of queries that the weight of queries, keys and values gives: a third of all."""
    return weight.shape[0] // 3


def _query(x_ND: Tensor, weight: Tensor) -> Tensor:
    """Return queries alone, by the first third of the weights of queries, keys and values."""
    return F.linear(x_ND, weight[: query_columns(weight)].to(x_ND.dtype))


def _key_value(x_MD: Tensor, weight: Tensor) -> Tensor:
    """Return keys and values alone, side by side."""
    return F.linear(x_MD, weight[query_columns(weight) :].to(x_MD.dtype))


def _layer_norm(x_ND: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x_ND, (x_ND.shape[1],), weight.to(x_ND.dtype), bias.to(x_ND.dtype))


class _KeyedDropout(torch.autograd.Function):
    """Dropout whose mask depends on a seed, the node's global id and the column, so on no partition.

    `executor.keyed.mix` of the node's and the column's keys is compared with a threshold. The seed is a number, or an
    int32 tensor that may change between replays of a CUDA graph.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, node_N: Tensor, ratio: float, seed: int | Tensor) -> Tensor:
        column_D = torch.arange(x_ND.shape[1], dtype=torch.int32, device=x_ND.device)
        node_bits_N = mix(node_N.to(torch.int32) ^ (seed if isinstance(seed, Tensor) else signed(seed)))
        # An odd number for each column; with `* 2 + 1` torch's compiler would fold factors past 32 bits.
        bits_ND = mix(node_bits_N.unsqueeze(1) ^ mix((column_D << 1) | 1))
        keep_ND = bits_ND >= threshold(ratio)
        ctx.save_for_backward(keep_ND)  # so that a layer computed again does not keep it
        ctx.factor = 1 / (1 - ratio)
        out_ND: Tensor = x_ND * keep_ND * ctx.factor
        return out_ND

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (grad_ND,) = gradients
        (keep_ND,) = ctx.saved_tensors
        return grad_ND * keep_ND * ctx.factor, None, None, None


def _dropout(x_ND: Tensor, node_N: Tensor, ratio: float, seed: int | Tensor) -> Tensor:
    out_ND: Tensor = _KeyedDropout.apply(x_ND, node_N, ratio, seed)  # type: ignore[no-untyped-call]
    return out_ND


class _TargetRows(torch.autograd.Function):
    """The first rows of two tensors; the gradients of the others are zero."""

    @staticmethod
    def forward(ctx: Any, q_ND: Tensor, h_ND: Tensor, num_targets: int) -> tuple[Tensor, Tensor]:
        ctx.num_rows = len(q_ND)
        return q_ND[:num_targets], h_ND[:num_targets]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_q, grad_h = (F.pad(gradient, (0, 0, 0, ctx.num_rows - len(gradient))) for gradient in gradients)
        return grad_q, grad_h, None


def _target_rows(q_ND: Tensor, h_ND: Tensor, num_targets: int) -> tuple[Tensor, Tensor]:
    rows: tuple[Tensor, Tensor] = _TargetRows.apply(q_ND, h_ND, num_targets)  # type: ignore[no-untyped-call]
    return rows


def _edge_bias(table_BH: Tensor, bucket_E: Tensor) -> Tensor:
    return table_BH.index_select(0, bucket_E)


class _KeysAndValues(torch.autograd.Function):
    """Rows of both, [M, 2 D], as keys and as values by head; where their gradients lie so too, they are not copied."""

    @staticmethod
    def forward(ctx: Any, kv_M2D: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
        k_MHK, v_MHK = kv_M2D.unflatten(1, (2, num_heads, -1)).unbind(1)
        return k_MHK, v_MHK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return side_by_side(*gradients), None


def side_by_side(grad_k: Tensor, grad_v: Tensor) -> Tensor:
    """Return the gradients of keys and values as rows of both, [M, 2 D]: without a copy where they lie so already."""
    num_rows, width = len(grad_k), grad_k.shape[1] * grad_k.shape[2]
    strides = (2 * width, grad_k.shape[2], 1)
    lie_so = grad_k.stride() == strides == grad_v.stride() and (
        grad_v.data_ptr() - grad_k.data_ptr() == width * grad_k.element_size()
    )
    if lie_so and num_rows > 0:
        return grad_k.as_strided((num_rows, 2 * width), (2 * width, 1))
    return torch.stack([grad_k, grad_v], dim=1).view(num_rows, 2 * width)


def _attention(q_ND: Tensor, kv_M2D: Tensor, edge_bias_EH: Tensor | None, graph: EdgeGraph, num_heads: int) -> Tensor:
    width = q_ND.shape[1]
    head_size = width // num_heads
    q_NHK = q_ND.view(-1, num_heads, head_size)
    k_MHK, v_MHK = _KeysAndValues.apply(kv_M2D, num_heads)  # type: ignore[no-untyped-call]
    out_NHK: Tensor = edge_attention(q_NHK, k_MHK, v_MHK, graph, edge_bias=edge_bias_EH)
    return out_NHK.view(-1, width)


def _loss(logits_NC: Tensor, row_T: Tensor, label_T: Tensor, num_labelled: int) -> Tensor:
    """Return the sum of cross entropies over this rank's labelled rows, over the labelled rows of all ranks."""
    logits_TC = logits_NC.index_select(0, row_T).float()
    return F.cross_entropy(logits_TC, label_T, reduction="sum") / num_labelled


def _rows_and_columns(x_ND: Tensor, *_: object) -> tuple[int, ...]:
    return tuple(x_ND.shape)


def _linear_shape(x_ND: Tensor, weight: Tensor, *_: object) -> tuple[int, ...]:
    return (*x_ND.shape, weight.shape[0])


LINEAR = Operation(kind=TaskKind.LINEAR, function=_linear, shape=_linear_shape)
INPUT_LINEAR = Operation(kind=TaskKind.INPUT_LINEAR, function=_linear, shape=_linear_shape)
SPARSE_LINEAR = Operation(
    kind=TaskKind.SPARSE_LINEAR,
    function=_sparse_linear,
    shape=lambda features, weight_FD, _: (features.rows.shape[0], features.num_entries, *weight_FD.shape),
)
PROJECTION = Operation(kind=TaskKind.PROJECTION, function=_projection, shape=_linear_shape)
PRODUCT = Operation(kind=TaskKind.PROJECTION, function=_product, shape=_linear_shape)
QUERY = Operation(
    kind=TaskKind.PROJECTION, function=_query, shape=lambda x_ND, weight: (*x_ND.shape, query_columns(weight))
)
KEY_VALUE = Operation(
    kind=TaskKind.PROJECTION, function=_key_value, shape=lambda x_MD, weight: (*x_MD.shape, 2 * query_columns(weight))
)
BIAS = Operation(kind=TaskKind.BIAS, function=_bias, shape=_rows_and_columns)
LAYER_NORM = Operation(kind=TaskKind.LAYER_NORM, function=_layer_norm, shape=_rows_and_columns)
GELU = Operation(kind=TaskKind.GELU, function=F.gelu, shape=_rows_and_columns)
DROPOUT = Operation(kind=TaskKind.DROPOUT, function=_dropout, shape=_rows_and_columns)
RESIDUAL = Operation(kind=TaskKind.RESIDUAL, function=torch.add, shape=_rows_and_columns)
TARGET_ROWS = Operation(
    kind=TaskKind.TARGET_ROWS,
    function=_target_rows,
    shape=lambda q_ND, h_ND, num_targets: (len(q_ND), num_targets, h_ND.shape[1]),
)
EDGE_BIAS = Operation(
    kind=TaskKind.EDGE_BIAS,
    function=_edge_bias,
    shape=lambda table_BH, bucket_E: (bucket_E.numel(), table_BH.shape[1]),
)


CAST = Operation(
    kind=TaskKind.COPY_ROWS,
    function=lambda x_ND: x_ND.to(torch.bfloat16 if x_ND.dtype == torch.float32 else torch.float32),
    shape=_rows_and_columns,
)


def _attention_shape(
    q_ND: Tensor, kv_M2D: Tensor, _: Tensor | None, graph: EdgeGraph, num_heads: int
) -> tuple[int, ...]:
    return (
        *(q_ND.shape[0], kv_M2D.shape[0], graph.num_edges),
        *graph.num_edges_of_long_rows,
        *(num_heads, q_ND.shape[1] // num_heads),
    )


ATTENTION = Operation(kind=TaskKind.ATTENTION, function=_attention, shape=_attention_shape)
LOSS = Operation(
    kind=TaskKind.LOSS,
    function=_loss,
    shape=lambda logits_NC, row_T, *_: (logits_NC.shape[0], row_T.numel(), logits_NC.shape[1]),
)
