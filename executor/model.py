"""The graph transformer; every task of its forward pass has a name, which `simulator/workload.py` lowers too."""

import contextlib
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from executor import operations
from executor.data import RankData
from executor.dense import (
    CompiledDense,
    Dropout,
    Run,
    Weights,
    after_attention,
    before_attention,
    before_attention_apart,
    normed,
)
from executor.keyed import signed
from executor.layer_attention import LayerAttention
from executor.offload import HostMemory, LayerOffload
from executor.recompute import Here, Recomputation
from executor.record import Recorder
from executor.tensor_sums import TensorSums
from simulator.recompute import RECOMPUTED
from simulator.specs.graph import GraphSpec
from simulator.specs.model import NUM_DEGREE_BUCKETS, EdgeBias, ModelSpec
from simulator.specs.plan import QUERIES_APART, ROW_EXCHANGES, Exchange, ExchangePayload, Recompute
from simulator.workload import num_input_columns


@dataclass(frozen=True, kw_only=True)
class ForwardSettings:
    """How one forward pass is run.

    Attributes:
        exchange, recompute: of each layer.
        overlaps, payload: how rows travel, as in the plan.
        wire: number format of what travels; None for that of the data.
        dropout_word: int32 [] on the device, `keyed.key_number` of seed and step; None turns dropout off.
        weights: used instead of the model's parameters, by name; None for the parameters.
        compiled: the dense parts of a layer, compiled; None runs them task by task, as a recorder that is on does too.
        tensor_group: ranks that hold the same rows, each with the weights of its own heads and columns; None for one
            rank.
        offloads: of each layer, whether what it keeps for its backward pass lies on the host meanwhile.
        offload_min_bytes: smaller tensors stay.
        host_memory: for them; None without any.
        attend: returns a layer's attention from its weights, q [N, D] and keys and values [N, 2D], on a single rank, in
            place of attention over the batch's edges (`executor/attend.py`); it is not recorded, and never captured.
    """

    exchange: tuple[Exchange, ...]
    recompute: tuple[Recompute, ...]
    overlaps: bool = False
    payload: ExchangePayload = ExchangePayload.KEYS_AND_VALUES
    wire: torch.dtype | None = None
    dropout_word: Tensor | None = None
    weights: Mapping[str, Tensor] | None = None
    compiled: CompiledDense | None = None
    tensor_group: dist.ProcessGroup | None = None
    offloads: tuple[bool, ...] = ()
    offload_min_bytes: int = 0
    host_memory: HostMemory | None = None
    attend: Callable[[Mapping[str, Tensor], Tensor, Tensor], Tensor] | None = None


@dataclass(frozen=True, kw_only=True)
class StageLayers:
    """What a stage of a pipeline runs: its layers, the input before the first one and the head behind the last one."""

    layers: range
    is_first: bool
    is_last: bool


class Layer(nn.Module):
    """Parameters of one pre-norm layer; keys have no bias, since its true gradient is zero."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        width = model.width
        if model.edge_bias is EdgeBias.DEGREE:
            self.edge_bias = nn.Parameter(torch.zeros(NUM_DEGREE_BUCKETS, model.num_heads))
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.attention_output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward_up = nn.Linear(width, model.feed_forward_width)
        self.feed_forward_down = nn.Linear(model.feed_forward_width, width)

    def forward(self, h_ND: Tensor, body: Callable[[Tensor], Tensor]) -> Tensor:
        """Return what `body` makes of rows; it takes the parameters from here, which are whole meanwhile."""
        return body(h_ND)


class Input(nn.Module):
    """Parameters of the input projection: sparse features, and dense features with encodings."""

    def __init__(self, graph: GraphSpec, model: ModelSpec) -> None:
        super().__init__()
        if graph.has_sparse_features:
            bound = graph.num_features**-0.5
            self.features = nn.Parameter(torch.empty(graph.num_features, model.width).uniform_(-bound, bound))
        if columns := num_input_columns(graph, model):
            self.linear = nn.Linear(columns, model.width)


class Head(nn.Module):
    """Parameters of the node classifier."""

    def __init__(self, graph: GraphSpec, model: ModelSpec) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(model.width)
        self.linear = nn.Linear(model.width, graph.num_classes)


class GraphTransformer(nn.Module):
    """Input projection, layers of attention over edges and feed-forward, node-classification head.

    Args:
        recorder: marks the tasks of each pass.
    """

    def __init__(self, graph: GraphSpec, model: ModelSpec, recorder: Recorder) -> None:
        super().__init__()
        self.graph, self.model, self.recorder = graph, model, recorder
        self.input = Input(graph, model)
        for index in range(model.num_layers):
            self.add_module(f"layer{index}", Layer(model))
        self.head = Head(graph, model)

    def keep(self, stages: Sequence["StageLayers"]) -> None:
        """Forget the parameters of all but some stages."""
        kept = {f"layer{index}" for stage in stages for index in stage.layers}
        kept |= {"input"} if any(stage.is_first for stage in stages) else set()
        kept |= {"head"} if any(stage.is_last for stage in stages) else set()
        for name, _ in list(self.named_children()):
            if name not in kept:
                delattr(self, name)

    def forward(self, data: RankData, settings: ForwardSettings) -> Tensor:
        """Return the logits of this rank's nodes, of samples the seeds, [N, classes], in the precision of `data`."""
        whole = StageLayers(layers=range(self.model.num_layers), is_first=True, is_last=True)
        return self.run_stage(whole, None, data, settings)

    def run_stage(self, stage: "StageLayers", h_ND: Tensor | None, data: RankData, settings: ForwardSettings) -> Tensor:
        """Return the rows that a stage makes of those that it gets, or logits if it is the last one.

        Args:
            h_ND: rows that the stage before gave; None for the first one.
        """
        if stage.is_first:
            h_ND = self._input(data, settings)
        assert h_ND is not None, "a stage behind another gets its rows"
        before = None
        for index in stage.layers:
            away = self._offload_of(index, settings)
            body = partial(self._layer_with_memory, index, data=data, settings=settings, away=away)
            h_ND = self.get_submodule(f"layer{index}")(h_ND, body)
            _settle(before, h_ND)
            before = away
        if not stage.is_last:
            return h_ND
        run, head = self.recorder.run, self._weights_of(settings, "head")
        h_ND = run("head.norm", operations.LAYER_NORM, h_ND, head["norm.weight"], head["norm.bias"])
        logits_NC: Tensor = run("head.linear", operations.LINEAR, h_ND, head["linear.weight"], head["linear.bias"])
        _settle(before, logits_NC)
        return logits_NC

    def loss(self, logits_NC: Tensor, data: RankData) -> Tensor:
        """Return this rank's share of the mean cross entropy over the labelled nodes of all ranks."""
        loss: Tensor = self.recorder.run(
            "loss", operations.LOSS, logits_NC, data.train_row_T, data.train_label_T, data.num_train_rows_of_step
        )
        return loss

    def _input(self, data: RankData, settings: ForwardSettings) -> Tensor:
        run, weights = self.recorder.run, self._weights_of(settings, "input")
        h_ND = None
        if data.dense_NF is not None:
            weight, bias = weights["linear.weight"], weights["linear.bias"]
            h_ND = run("input.linear", operations.INPUT_LINEAR, data.dense_NF, weight, bias)
        if data.sparse is not None:
            embedded_ND = run("input.features", operations.SPARSE_LINEAR, data.sparse, weights["features"], data.dtype)
            h_ND = embedded_ND if h_ND is None else run("input.sum", operations.RESIDUAL, h_ND, embedded_ND)
        assert h_ND is not None, "a graph has features, at least its degrees"
        dropout = self._dropout(data.node_N, settings, "input.dropout")
        return h_ND if dropout is None else dropout.of(h_ND, run, "input.dropout", 0)

    def _offload_of(self, index: int, settings: ForwardSettings) -> LayerOffload | None:
        """Return what takes a layer's tensors to the host; None if they stay."""
        if settings.host_memory is None or not settings.offloads[index] or not torch.is_grad_enabled():
            return None
        min_bytes = settings.offload_min_bytes
        return LayerOffload(settings.host_memory, self.recorder, f"layer{index}", min_bytes=min_bytes)

    def _layer_with_memory(
        self, index: int, h_ND: Tensor, *, data: RankData, settings: ForwardSettings, away: LayerOffload | None
    ) -> Tensor:
        """Return a layer's rows; what it keeps for its backward pass, and where, is as the settings say."""
        layer = partial(self._layer, index, data=data, settings=settings)
        if not torch.is_grad_enabled():
            return layer(h_ND)
        if settings.recompute[index] is Recompute.LAYER:
            layer_ND: Tensor = checkpoint(
                layer,
                h_ND,
                use_reentrant=False,
                preserve_rng_state=False,  # dropout is keyed, not drawn
                early_stop=False,  # recompute every task of the layer, as the program says
                context_fn=lambda: (contextlib.nullcontext(), self.recorder.recomputing()),
            )
            return layer_ND
        names = RECOMPUTED[settings.recompute[index]]
        if not names and away is None:
            return layer(h_ND)
        keep = Here if away is None else away.keep
        weights = self._weights_of(settings, f"layer{index}").values()
        with Recomputation(self.recorder, f"layer{index}", names, keep, weights=weights).forward():
            layer_ND = layer(h_ND)
        if away is not None:
            away.copy_out()
        return layer_ND

    def _layer(self, index: int, h_ND: Tensor, *, data: RankData, settings: ForwardSettings) -> Tensor:
        name = f"layer{index}"
        weights = self._weights_of(settings, name)
        dropout_names = (f"{name}.attention_dropout", f"{name}.feed_forward_dropout")
        dropout = self._dropout(data.target_node_N(index), settings, *dropout_names)
        compiled = None if self.recorder.is_on else settings.compiled
        run = self._run_in(name)
        h_ND, x_ND = self._attention(index, h_ND, weights, data, settings, compiled)
        if compiled is None:
            return after_attention(run, weights, h_ND, x_ND, dropout, self._sums(name, settings))
        return compiled.after(weights, h_ND, x_ND, dropout)

    def _attention(
        self,
        index: int,
        h_ND: Tensor,
        weights: Weights,
        data: RankData,
        settings: ForwardSettings,
        compiled: CompiledDense | None,
    ) -> tuple[Tensor, Tensor]:
        """Return the rows that a layer goes on with, as it got them, and what its attention makes of them.

        Of samples these are the targets, else all. Norm, projections and exchange are part of it.
        """
        name, exchange = f"layer{index}", settings.exchange[index]
        run = self._run_in(name)
        attention = LayerAttention(
            data=data,
            weights=weights,
            recorder=self.recorder,
            index=index,
            exchange=exchange,
            num_heads=self.model.num_heads // _size(settings.tensor_group),
            wire=settings.wire or data.dtype,
        )
        overlaps, sums = settings.overlaps and exchange in ROW_EXCHANGES, self._sums(name, settings)
        sends_rows = settings.payload is ExchangePayload.ROWS and exchange in ROW_EXCHANGES
        if overlaps or sends_rows:
            # What travels lies between norm and projection, or an exchange begins between two projections.
            x_ND = normed(run, weights, h_ND, sums) if compiled is None else compiled.norm(weights, h_ND)
            return h_ND, attention.overlapped(x_ND, sends_rows=sends_rows) if overlaps else attention.of_rows(x_ND)
        if settings.recompute[index] in QUERIES_APART and exchange in ROW_EXCHANGES:
            q_ND, kv_N2D = before_attention_apart(run, weights, h_ND, sums)
        elif compiled is None:
            q_ND, kv_N2D = before_attention(run, weights, h_ND, sums)
        else:
            q_ND, kv_N2D = compiled.before(weights, h_ND)
        if data.layers:
            q_ND, h_ND = run("targets", operations.TARGET_ROWS, q_ND, h_ND, len(data.target_node_N(index)))
        if settings.attend is not None:
            return h_ND, settings.attend(weights, q_ND, kv_N2D)
        if exchange is Exchange.HEAD_ALL_TO_ALL:
            return h_ND, attention.by_heads(q_ND, kv_N2D)
        if data.part is not None:
            return h_ND, attention.of_served_part(q_ND, kv_N2D, data.part)
        return h_ND, attention.in_turn(q_ND, kv_N2D)

    def _weights_of(self, settings: ForwardSettings, module: str) -> Weights:
        """Return the weights of one module by their names in it, as this rank holds them now."""
        if settings.weights is None:
            return {name: _local(value) for name, value in self.get_submodule(module).named_parameters()}
        prefix = f"{module}."
        return {name.removeprefix(prefix): value for name, value in settings.weights.items() if name.startswith(prefix)}

    def _sums(self, layer: str, settings: ForwardSettings) -> TensorSums | None:
        group = settings.tensor_group
        return None if group is None else TensorSums(recorder=self.recorder, group=group, layer=layer)

    def _run_in(self, layer: str) -> Run:
        return lambda task, operation, *arguments: self.recorder.run(f"{layer}.{task}", operation, *arguments)

    def _dropout(self, node_N: Tensor, settings: ForwardSettings, *names: str) -> Dropout | None:
        """Return the dropout of some tasks, each with a seed of its own; None when it is off."""
        if settings.dropout_word is None or self.model.dropout_ratio == 0:
            return None
        seeds = tuple(settings.dropout_word ^ signed(zlib.crc32(name.encode())) for name in names)
        return Dropout(ratio=self.model.dropout_ratio, node_N=node_N, seeds=seeds)


def _size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _settle(before: LayerOffload | None, rows_NC: Tensor) -> None:
    """Free on the device what the layer before keeps on the host, until the backward pass reaches `rows_NC`."""
    if before is not None:
        before.settle()
        rows_NC.register_hook(before.copy_in)
