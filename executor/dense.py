"""The dense parts of a layer, before and after its attention: task by task, or compiled into few kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch import config as partitioning

from executor import operations
from executor.operations import Operation
from executor.tensor_sums import TensorSums

# Of what a compiled part would keep for its backward pass, this share at most is kept: at one half the outputs of
# LayerNorm and GELU are computed again, inside kernels that read their inputs anyway; from a third on also the products
# that come out of attention, and only a part's inputs are kept (counted on a layer of 128 and 256 columns). Attention
# over a graph takes so much longer than they do that their time hardly counts (traces/training_h200x1_202611).
ACTIVATION_MEMORY_BUDGET = 0.25
# Name of a task in its layer, operation, arguments: returns what the operation makes of them.
Run = Callable[..., Any]
# The weights of a layer by their names in it.
Weights = dict[str, Tensor]


class Dropout(NamedTuple):
    """The dropout of several tasks; a plain tuple, which `torch.compile` takes as an argument.

    Attributes:
        node_N: global ids of the rows.
        seeds: int32 [] of each task.
    """

    ratio: float
    node_N: Tensor
    seeds: tuple[Tensor, ...]

    def of(self, x_ND: Tensor, run: Run, name: str, index: int) -> Tensor:
        """Return rows with entries dropped for the task at an index."""
        return run(name, operations.DROPOUT, x_ND, self.node_N, self.ratio, self.seeds[index])  # type: ignore[no-any-return]


def before_attention(run: Run, weights: Weights, h_ND: Tensor, sums: TensorSums | None = None) -> tuple[Tensor, Tensor]:
    """Return queries, [N, D], and keys and values side by side, [N, 2 D]; of own heads, as the weights are.

    Args:
        sums: over the ranks that have the other heads; None where there are none.
    """
    x_ND = normed(run, weights, h_ND, sums)
    return run("query_key_value", operations.PROJECTION, x_ND, weights["query_key_value.weight"])  # type: ignore[no-any-return]


def before_attention_apart(
    run: Run, weights: Weights, h_ND: Tensor, sums: TensorSums | None = None
) -> tuple[Tensor, Tensor]:
    """Return the same by two products, so that queries can be made again without keys and values."""
    x_ND, weight = normed(run, weights, h_ND, sums), weights["query_key_value.weight"]
    return run("query", operations.QUERY, x_ND, weight), run("key_value", operations.KEY_VALUE, x_ND, weight)


def normed(run: Run, weights: Weights, h_ND: Tensor, sums: TensorSums | None = None) -> Tensor:
    """Return the rows that a layer makes queries, keys and values of, [N, D]."""
    norm_weight, norm_bias = weights["attention_norm.weight"], weights["attention_norm.bias"]
    x_ND: Tensor = run("attention_norm", operations.LAYER_NORM, h_ND, norm_weight, norm_bias)
    return x_ND if sums is None else sums.before_columns("query_key_value", x_ND)


def after_attention(
    run: Run,
    weights: Weights,
    h_ND: Tensor,
    x_ND: Tensor,
    dropout: Dropout | None,
    sums: TensorSums | None = None,
) -> Tensor:
    """Return the layer's rows, [N, D], from those it got and what attention made of them, of own heads."""

    def linear(name: str, x_ND: Tensor) -> Tensor:
        return run(name, operations.LINEAR, x_ND, weights[f"{name}.weight"], weights[f"{name}.bias"])  # type: ignore[no-any-return]

    def from_columns(name: str, x_NC: Tensor) -> Tensor:
        if sums is None:
            return linear(name, x_NC)
        x_ND = sums.of_terms(name, run(name, operations.PRODUCT, x_NC, weights[f"{name}.weight"]))
        return run(f"{name}_bias", operations.BIAS, x_ND, weights[f"{name}.bias"])  # type: ignore[no-any-return]

    x_ND = from_columns("attention_output", x_ND)
    if dropout is not None:
        x_ND = dropout.of(x_ND, run, "attention_dropout", 0)
    h_ND = run("attention_residual", operations.RESIDUAL, h_ND, x_ND)
    norm_weight, norm_bias = weights["feed_forward_norm.weight"], weights["feed_forward_norm.bias"]
    x_ND = run("feed_forward_norm", operations.LAYER_NORM, h_ND, norm_weight, norm_bias)
    x_ND = x_ND if sums is None else sums.before_columns("feed_forward_up", x_ND)
    x_NF = run("feed_forward_activation", operations.GELU, linear("feed_forward_up", x_ND))
    x_ND = from_columns("feed_forward_down", x_NF)
    if dropout is not None:
        x_ND = dropout.of(x_ND, run, "feed_forward_dropout", 1)
    return run("feed_forward_residual", operations.RESIDUAL, h_ND, x_ND)  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True)
class CompiledDense:
    """Both parts, and the norm that the first begins with, compiled; all layers share them: their shapes are alike."""

    norm: Callable[[Weights, Tensor], Tensor]
    before: Callable[[Weights, Tensor], tuple[Tensor, Tensor]]
    after: Callable[[Weights, Tensor, Tensor, Dropout | None], Tensor]


def compiled_dense(backend: str = "inductor") -> CompiledDense:
    """Return the parts compiled for the shapes of their first calls, and again for others.

    Code that was compiled before is forgotten, since torch keeps only a few versions of a function.

    Args:
        backend: of `torch.compile`.
    """
    torch.compiler.reset()
    return CompiledDense(
        norm=_compiled(_normed, backend), before=_compiled(_before, backend), after=_compiled(_after, backend)
    )


def _compiled(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    compiled = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)

    def call(*arguments: Any) -> Any:
        # The first call compiles.
        with partitioning.patch(activation_memory_budget=ACTIVATION_MEMORY_BUDGET):
            return compiled(*arguments)

    return call


def _normed(weights: Weights, h_ND: Tensor) -> Tensor:
    return normed(_run_plainly, weights, h_ND)


def _before(weights: Weights, h_ND: Tensor) -> tuple[Tensor, Tensor]:
    return before_attention(_run_plainly, weights, h_ND)


def _after(weights: Weights, h_ND: Tensor, x_ND: Tensor, dropout: Dropout | None) -> Tensor:
    return after_attention(_run_plainly, weights, h_ND, x_ND, dropout)


def _run_plainly(_: str, operation: Operation, *arguments: Any) -> Any:
    return operation.function(*arguments)
