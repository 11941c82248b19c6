"""The project's model built on PyG's TransformerConv: the same parameters, norms, residuals and feed-forward."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import TransformerConv

from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec


class PygLayer(nn.Module):
    """One pre-norm layer; TransformerConv without its skip connection and biases, which the project's model lacks."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        width = model.width
        self.attention_norm = nn.LayerNorm(width)
        self.attention = TransformerConv(width, model.head_size, heads=model.num_heads, root_weight=False, bias=False)
        self.attention.lin_skip = None
        for linear in (self.attention.lin_query, self.attention.lin_key, self.attention.lin_value):
            linear.bias = None
        self.attention_output = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward_up = nn.Linear(width, model.feed_forward_width)
        self.feed_forward_down = nn.Linear(model.feed_forward_width, width)

    def forward(self, h_ND: Tensor, edge_index: Tensor) -> Tensor:
        """Return the layer's rows, [N, D]."""
        h_ND = h_ND + self.attention_output(self.attention(self.attention_norm(h_ND), edge_index))
        x_NF = F.gelu(self.feed_forward_up(self.feed_forward_norm(h_ND)))
        out_ND: Tensor = h_ND + self.feed_forward_down(x_NF)
        return out_ND


class PygTransformer(nn.Module):
    """Input projection, layers, head; no dropout and no edge bias."""

    def __init__(self, graph: GraphSpec, model: ModelSpec) -> None:
        super().__init__()
        self.input = nn.Linear(graph.num_features, model.width)
        self.layers = nn.ModuleList(PygLayer(model) for _ in range(model.num_layers))
        self.norm = nn.LayerNorm(model.width)
        self.head = nn.Linear(model.width, graph.num_classes)

    def forward(self, x_NF: Tensor, edge_index: Tensor) -> Tensor:
        """Return the logits, [N, classes]."""
        h_ND = self.input(x_NF)
        for layer in self.layers:
            h_ND = layer(h_ND, edge_index)
        logits_NC: Tensor = self.head(self.norm(h_ND))
        return logits_NC

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over the parameters of a `GraphTransformer`."""
        found: dict[str, Tensor] = {}
        for name, value in weights.items():
            owner, _, rest = name.partition(".")
            if rest == "query_key_value.weight":
                for part, rows in zip(("query", "key", "value"), torch.chunk(value, 3), strict=True):
                    found[f"layers.{owner.removeprefix('layer')}.attention.lin_{part}.weight"] = rows
            elif owner.startswith("layer"):
                found[f"layers.{owner.removeprefix('layer')}.{rest}"] = value
            else:
                found[rest.replace("linear", owner)] = value
        self.load_state_dict(found)
