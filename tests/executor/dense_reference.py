"""Training as plainly as it can be written: one process, fp64, attention as a matrix of N x N with edge counts.

It shares nothing with the executor but the names of parameters, the keys of dropout and torch's AdamW.
"""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from executor import operations
from executor.keyed import key_word
from simulator.readers.graphs import Graph
from simulator.specs.model import NUM_DEGREE_BUCKETS, EdgeBias, ModelSpec
from simulator.specs.train import TrainSpec

Parameters = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """What is trained: the whole graph, the model, the settings."""

    graph: Graph
    encodings: np.ndarray | None
    model: ModelSpec
    train: TrainSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class SampledStep:
    """What one step trains on where neighbourhoods are sampled.

    Attributes:
        edges_by_layer: targets and sources of the edges that any node attends along in each layer.
        seeds: nodes that the loss uses.
    """

    edges_by_layer: tuple[tuple[np.ndarray, np.ndarray], ...]
    seeds: np.ndarray


# Of each node its block, [N], -1 outside of the step, where no edge joins two blocks; or what was sampled.
Step = np.ndarray | SampledStep


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceRun:
    """What training came to.

    Attributes:
        losses: of every step.
        first_gradient: of the first step, before it is clipped.
    """

    losses: list[float]
    first_gradient: Parameters


def train_reference(problem: Problem, initial: Parameters, steps: Sequence[Step]) -> ReferenceRun:
    """Train in fp64.

    Args:
        initial: parameters to start from.
    """
    parameters = {name: value.double().requires_grad_() for name, value in initial.items()}
    train = problem.train
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=train.learning_rate, weight_decay=train.weight_decay, foreach=False
    )
    losses: list[float] = []
    first_gradient: Parameters = {}
    for step, batch in enumerate(steps):
        optimizer.zero_grad()
        loss = _loss(problem, logits_of(problem, parameters, batch, step=step), batch)
        loss.backward()
        losses.append(loss.item())
        gradients = [value.grad for value in parameters.values() if value.grad is not None]
        assert len(gradients) == len(parameters)
        if step == 0:
            first_gradient = {name: value.clone() for name, value in zip(parameters, gradients, strict=True)}
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        if norm > train.max_gradient_norm:
            for gradient in gradients:
                gradient *= train.max_gradient_norm / norm
        optimizer.param_groups[0]["lr"] = train.learning_rate * _rate_factor(train, step)
        optimizer.step()
    return ReferenceRun(losses=losses, first_gradient=first_gradient)


def accuracy_ratios(problem: Problem, parameters: Parameters) -> tuple[float, float, float]:
    """Return the shares of train, val and test nodes that the parameters classify right on the whole graph."""
    graph = problem.graph
    with torch.no_grad():
        parameters = {name: value.double() for name, value in parameters.items()}
        logits_NC = logits_of(problem, parameters, np.zeros(graph.num_nodes, np.int64), step=None)
    right_N = logits_NC.argmax(1).numpy() == graph.labels_N
    train, val, test = (
        float(right_N[mask_N].sum() / max(mask_N.sum(), 1))
        for mask_N in (graph.train_mask_N, graph.val_mask_N, graph.test_mask_N)
    )
    return train, val, test


def logits_of(problem: Problem, parameters: Parameters, batch: Step, *, step: int | None) -> Tensor:
    """Return the logits of all nodes; dropout is off without a step."""
    model = problem.model

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ parameters[f"{name}.weight"].T + parameters[f"{name}.bias"]

    def norm(name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        scaled = centred / torch.sqrt((centred**2).mean(1, keepdim=True) + 1e-5)
        return scaled * parameters[f"{name}.weight"] + parameters[f"{name}.bias"]

    def dropped(name: str, x: Tensor) -> Tensor:
        return x if step is None else x * _dropout_mask(problem, name, x, step)

    h_ND = dropped("input.dropout", _input(problem, parameters))
    for index in range(model.num_layers):
        layer = f"layer{index}"
        x_ND = norm(f"{layer}.attention_norm", h_ND)
        x_ND = _attention(problem, parameters, layer, x_ND, _edge_counts(problem.graph, batch, index))
        h_ND = h_ND + dropped(f"{layer}.attention_dropout", linear(f"{layer}.attention_output", x_ND))
        x_NF = linear(f"{layer}.feed_forward_up", norm(f"{layer}.feed_forward_norm", h_ND))
        x_NF = 0.5 * x_NF * (1 + torch.erf(x_NF / math.sqrt(2)))
        h_ND = h_ND + dropped(f"{layer}.feed_forward_dropout", linear(f"{layer}.feed_forward_down", x_NF))
    return linear("head.linear", norm("head.norm", h_ND))


def _input(problem: Problem, parameters: Parameters) -> Tensor:
    features = problem.graph.features
    terms, columns = [], []
    if isinstance(features, scipy.sparse.csr_array):
        terms.append(torch.from_numpy(features.toarray()).double() @ parameters["input.features"])
    else:
        columns.append(torch.from_numpy(features).double())
    if problem.encodings is not None:
        columns.append(torch.from_numpy(problem.encodings).double())
    if columns:
        terms.append(torch.cat(columns, dim=1) @ parameters["input.linear.weight"].T + parameters["input.linear.bias"])
    return torch.stack(terms).sum(0)


def _attention(problem: Problem, parameters: Parameters, layer: str, x_ND: Tensor, counts_TS: Tensor) -> Tensor:
    model = problem.model
    query, key, value = (x_ND @ weight.T for weight in parameters[f"{layer}.query_key_value.weight"].chunk(3))
    outputs = []
    for head in range(model.num_heads):
        columns = slice(head * model.head_size, (head + 1) * model.head_size)
        scores_TS = query[:, columns] @ key[:, columns].T / math.sqrt(model.head_size)
        if model.edge_bias is EdgeBias.DEGREE:
            scores_TS = scores_TS + parameters[f"{layer}.edge_bias"][_degree_buckets(problem.graph), head]
        outputs.append(counted_attention(scores_TS, counts_TS, value[:, columns]))
    return torch.cat(outputs, dim=1)


def counted_attention(scores_TS: Tensor, counts_TS: Tensor, value_SK: Tensor) -> Tensor:
    """Return the softmax of scores, each as often as its edge is there, times the values; zeros without edges."""
    linked_TS = counts_TS > 0
    shift_T = scores_TS.detach().masked_fill(~linked_TS, -torch.inf).amax(1, keepdim=True)
    weights_TS = counts_TS * torch.exp((scores_TS - shift_T).masked_fill(~linked_TS, -torch.inf))
    return weights_TS @ value_SK / weights_TS.sum(1, keepdim=True).clamp(min=1e-300)


def _edge_counts(graph: Graph, batch: Step, layer: int) -> Tensor:
    """Return how many edges of the batch lead to each target (rows) from each source (columns) in a layer."""
    if isinstance(batch, SampledStep):
        target_E, source_E = batch.edges_by_layer[layer]
    else:
        kept_E = (batch[graph.target_E] == batch[graph.source_E]) & (batch[graph.target_E] >= 0)
        target_E, source_E = graph.target_E[kept_E], graph.source_E[kept_E]
    counts_TS = np.zeros((graph.num_nodes, graph.num_nodes))
    np.add.at(counts_TS, (target_E, source_E), 1)
    return torch.from_numpy(counts_TS)


def _degree_buckets(graph: Graph) -> list[int]:
    """Return for each node the power of two below its degree."""
    return [min(max(int(degree), 1).bit_length() - 1, NUM_DEGREE_BUCKETS - 1) for degree in np.diff(graph.indptr_N)]


def _dropout_mask(problem: Problem, name: str, x_ND: Tensor, step: int) -> Tensor:
    """Return zeros and 1 / (1 - ratio), from the keys that the executor uses; ones without dropout."""
    ratio = problem.model.dropout_ratio
    if ratio == 0:
        return torch.ones_like(x_ND)
    seed = int(key_word(torch.tensor([problem.train.seed, step]))) ^ zlib.crc32(name.encode())
    with torch.no_grad():
        mask: Tensor = operations.DROPOUT.function(torch.ones_like(x_ND), torch.arange(len(x_ND)), ratio, seed)
    return mask


def _loss(problem: Problem, logits_NC: Tensor, batch: Step) -> Tensor:
    """Return the mean cross entropy of the labelled training nodes in the batch; zero if there are none."""
    is_in_N = problem.graph.train_mask_N
    rows = batch.seeds if isinstance(batch, SampledStep) else np.flatnonzero(is_in_N & (batch >= 0))
    if len(rows) == 0:
        return logits_NC.sum() * 0
    labels = torch.from_numpy(problem.graph.labels_N[rows])
    chosen = torch.log_softmax(logits_NC[rows], dim=1)[torch.arange(len(rows)), labels]
    return -chosen.sum() / len(rows)


def _rate_factor(train: TrainSpec, step: int) -> float:
    """Return a linear rise over the warm-up, then half a cosine down."""
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    share = (step - train.warmup_steps) / (train.num_steps - train.warmup_steps)
    return (1 + math.cos(math.pi * share)) / 2
