"""The graph transformer; every task of its forward pass has a name, which `simulator/workload.py` lowers too."""

import contextlib
import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from executor import operations
from executor.data import RankData
from executor.exchange import exchange_rows
from executor.record import Recorder
from simulator.specs.graph import GraphSpec
from simulator.specs.model import NUM_DEGREE_BUCKETS, EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, Recompute
from simulator.workload import num_input_columns


@dataclass(frozen=True, kw_only=True)
class ForwardSettings:
    """How one forward pass is run.

    Attributes:
        exchange, recompute: of each layer.
        dropout_seed: text that keys the dropout masks, such as seed and step; None turns dropout off.
    """

    exchange: tuple[Exchange, ...]
    recompute: tuple[Recompute, ...]
    dropout_seed: str | None = None


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

    def forward(self, data: RankData, settings: ForwardSettings) -> Tensor:
        """Return the logits of this rank's nodes, [N, classes], in the precision of `data`."""
        h_ND = self._input(data, settings)
        for index in range(self.model.num_layers):
            if settings.recompute[index] is Recompute.LAYER and torch.is_grad_enabled():
                h_ND = checkpoint(
                    self._layer,
                    index,
                    h_ND,
                    data,
                    settings,
                    use_reentrant=False,
                    preserve_rng_state=False,  # dropout is keyed, not drawn
                    early_stop=False,  # recompute every task of the layer, as the program says
                    context_fn=lambda: (contextlib.nullcontext(), self.recorder.recomputing()),
                )
            else:
                h_ND = self._layer(index, h_ND, data, settings)
        run, head = self.recorder.run, self.head
        h_ND = run("head.norm", operations.LAYER_NORM, h_ND, head.norm.weight, head.norm.bias)
        logits_NC: Tensor = run("head.linear", operations.LINEAR, h_ND, head.linear.weight, head.linear.bias)
        return logits_NC

    def loss(self, logits_NC: Tensor, data: RankData) -> Tensor:
        """Return this rank's share of the mean cross entropy over the labelled nodes of all ranks."""
        loss: Tensor = self.recorder.run(
            "loss", operations.LOSS, logits_NC, data.train_row_T, data.train_label_T, data.num_train_rows_of_step
        )
        return loss

    def _input(self, data: RankData, settings: ForwardSettings) -> Tensor:
        run = self.recorder.run
        h_ND = None
        if data.dense_NF is not None:
            linear = self.input.linear
            h_ND = run("input.linear", operations.INPUT_LINEAR, data.dense_NF, linear.weight, linear.bias)
        if data.sparse is not None:
            embedded_ND = run("input.features", operations.SPARSE_LINEAR, data.sparse, self.input.features, data.dtype)
            h_ND = embedded_ND if h_ND is None else run("input.sum", operations.RESIDUAL, h_ND, embedded_ND)
        assert h_ND is not None, "a graph has features, at least its degrees"
        return self._dropout("input.dropout", h_ND, data, settings)

    def _layer(self, index: int, h_ND: Tensor, data: RankData, settings: ForwardSettings) -> Tensor:
        h_ND = self._attention(index, h_ND, data, settings)
        return self._feed_forward(index, h_ND, data, settings)

    def _attention(self, index: int, h_ND: Tensor, data: RankData, settings: ForwardSettings) -> Tensor:
        run, name = self.recorder.run, f"layer{index}"
        layer = self._parameters_of(name)
        exchange = settings.exchange[index]
        x_ND = run(
            f"{name}.attention_norm",
            operations.LAYER_NORM,
            h_ND,
            layer.attention_norm.weight,
            layer.attention_norm.bias,
        )
        q_ND, kv_N2D = run(f"{name}.query_key_value", operations.PROJECTION, x_ND, layer.query_key_value.weight)
        kv_M2D = exchange_rows(kv_N2D, exchange, data.layout, recorder=self.recorder, layer=name)
        edges = data.edges[exchange]
        bias_EH = None
        if self.model.edge_bias is EdgeBias.DEGREE:
            bias_EH = run(f"{name}.edge_bias", operations.EDGE_BIAS, layer.edge_bias, data.degree_bucket_E)
        x_ND = run(f"{name}.attention", operations.ATTENTION, q_ND, kv_M2D, bias_EH, edges, self.model.num_heads)
        output = layer.attention_output
        x_ND = run(f"{name}.attention_output", operations.LINEAR, x_ND, output.weight, output.bias)
        x_ND = self._dropout(f"{name}.attention_dropout", x_ND, data, settings)
        return run(f"{name}.attention_residual", operations.RESIDUAL, h_ND, x_ND)  # type: ignore[no-any-return]

    def _feed_forward(self, index: int, h_ND: Tensor, data: RankData, settings: ForwardSettings) -> Tensor:
        run, name = self.recorder.run, f"layer{index}"
        layer = self._parameters_of(name)
        norm, up, down = layer.feed_forward_norm, layer.feed_forward_up, layer.feed_forward_down
        x_ND = run(f"{name}.feed_forward_norm", operations.LAYER_NORM, h_ND, norm.weight, norm.bias)
        x_NF = run(f"{name}.feed_forward_up", operations.LINEAR, x_ND, up.weight, up.bias)
        x_NF = run(f"{name}.feed_forward_activation", operations.GELU, x_NF)
        x_ND = run(f"{name}.feed_forward_down", operations.LINEAR, x_NF, down.weight, down.bias)
        x_ND = self._dropout(f"{name}.feed_forward_dropout", x_ND, data, settings)
        return run(f"{name}.feed_forward_residual", operations.RESIDUAL, h_ND, x_ND)  # type: ignore[no-any-return]

    def _parameters_of(self, layer: str) -> Layer:
        parameters = self.get_submodule(layer)
        assert isinstance(parameters, Layer), layer
        return parameters

    def _dropout(self, name: str, x_ND: Tensor, data: RankData, settings: ForwardSettings) -> Tensor:
        if settings.dropout_seed is None or self.model.dropout_ratio == 0:
            return x_ND
        seed = zlib.crc32(f"{settings.dropout_seed}/{name}".encode())
        return self.recorder.run(  # type: ignore[no-any-return]
            name, operations.DROPOUT, x_ND, data.node_N, self.model.dropout_ratio, seed
        )
