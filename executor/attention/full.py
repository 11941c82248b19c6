"""Attention over all pairs of nodes inside each graph of a batch, for graphs that are small, or small enough.

Graphs of about the same size are padded to one width and attended to in one call of torch's
`scaled_dot_product_attention`, whose fused kernels hold no matrix of scores; where all graphs of a call fill its width
there is no mask either, so a single large graph runs in flash attention. Nested (jagged) tensors would need no padding,
but torch has fused kernels for them on GPUs alone; on CPUs it pads all graphs to the largest.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from executor.attention.graph import EdgeGraph

# Widths of the classes grow by a quarter at most, so pairs are padded by (5/4)^2 at most above `MIN_WIDTH`. The
# multiple is that of the tiles of fused kernels.
WIDTH_GROWTH = 1.25
MIN_WIDTH = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphBatch:
    """Graphs of a batch, prepared for full attention once; the nodes of a graph are consecutive rows.

    Attributes:
        graph_indptr_B1: int64 [B + 1]; the nodes of graph i are rows `graph_indptr_B1[i] : graph_indptr_B1[i + 1]`.
            Graphs may be empty, and so may the batch.

    Raises:
        ValueError: if these are no row pointers.
    """

    graph_indptr_B1: Tensor

    def __post_init__(self) -> None:
        indptr_B1 = self.graph_indptr_B1
        if indptr_B1.dtype != torch.int64 or indptr_B1.ndim != 1 or indptr_B1.numel() == 0:
            found = f"{indptr_B1.dtype} of shape {list(indptr_B1.shape)}"
            raise ValueError(f"graph_indptr must be int64 of shape [graphs + 1], got {found}; give [0] for no graphs")
        if self._indptr[0] != 0:
            raise ValueError(f"graph_indptr[0] must be 0, got {self._indptr[0]}")
        for graph, size in enumerate(self._sizes):
            if size < 0:
                first, end = self._indptr[graph : graph + 2]
                rule = f"graph_indptr[{graph + 1}] must not be below graph_indptr[{graph}] = {first}"
                raise ValueError(f"{rule}, got {end}; give where each graph's rows begin, and where the last ends")

    @property
    def num_graphs(self) -> int:
        """Graphs, B."""
        return self.graph_indptr_B1.numel() - 1

    @property
    def num_nodes(self) -> int:
        """Rows of all graphs, N."""
        return self._indptr[-1]

    @property
    def num_pairs(self) -> int:
        """Pairs of nodes that attend to each other, each node and itself among them."""
        return sum(size * size for size in self._sizes)

    @property
    def num_padded_pairs(self) -> int:
        """Pairs that are computed, those with padding among them."""
        return sum(size_class.num_graphs * size_class.width**2 for size_class in self.classes)

    @cached_property
    def _indptr(self) -> list[int]:
        indptr: list[int] = self.graph_indptr_B1.tolist()
        return indptr

    @cached_property
    def _sizes(self) -> list[int]:
        return [end - first for first, end in zip(self._indptr, self._indptr[1:], strict=False)]

    @cached_property
    def classes(self) -> tuple["SizeClass", ...]:
        """The graphs by width, the smallest first; those without nodes are in none."""
        size_B = self.graph_indptr_B1.diff()
        classes, widest = [], 0
        for size in sorted({size for size in self._sizes if size > 0}):
            if size <= widest:
                continue
            widest = _width(size)
            classes.append(_size_class(self.graph_indptr_B1, (size_B >= size) & (size_B <= widest)))
        return tuple(classes)

    @cached_property
    def row_of_output_N(self) -> Tensor:
        """Place of each node among the nodes of all classes, one class after another."""
        order_N = torch.cat([size_class.row_C for size_class in self.classes] or [self.graph_indptr_B1[:0]])
        row_N = torch.empty_like(order_N)
        row_N[order_N] = torch.arange(len(order_N), device=order_N.device)
        return row_N

    @cached_property
    def all_pairs(self) -> EdgeGraph:
        """The same pairs as edges, for what needs each: biases of pairs, the log-sum-exp, the loss of structure."""
        size_B = self.graph_indptr_B1.diff()
        size_N = size_B.repeat_interleave(size_B, output_size=self.num_nodes)
        first_N = self.graph_indptr_B1[:-1].repeat_interleave(size_B, output_size=self.num_nodes)
        indptr_N1 = F.pad(size_N.cumsum(0), (1, 0))
        shift_E = (first_N - indptr_N1[:-1]).repeat_interleave(size_N, output_size=self.num_pairs)
        source_E = torch.arange(self.num_pairs, device=shift_E.device) + shift_E
        return EdgeGraph(indptr_N1=indptr_N1, source_E=source_E.to(torch.int32), num_sources=self.num_nodes)


@dataclass(frozen=True, kw_only=True, eq=False)
class SizeClass:
    """Graphs that are padded to one width.

    Attributes:
        num_graphs, width: of the padded rows, B and S.
        row_C: rows of the class's nodes in the batch, int64 [C], graph by graph.
        slot_C: places of these nodes among the padded rows [B x S].
        is_node_BS: which padded rows are nodes; None if all are.
    """

    num_graphs: int
    width: int
    row_C: Tensor
    slot_C: Tensor
    is_node_BS: Tensor | None

    def padded(self, x_NHK: Tensor) -> Tensor:
        """Return the class's rows with zeros between them, [B, H, S, K]."""
        rows_CHK = x_NHK.index_select(0, self.row_C)
        if self.is_node_BS is not None:
            # Places are different, so the gradient is a gather: no sums, whose order could change.
            flat = rows_CHK.new_zeros(self.num_graphs * self.width, *rows_CHK.shape[1:])
            rows_CHK = flat.index_copy(0, self.slot_C, rows_CHK)
        padded_BHSK: Tensor = rows_CHK.unflatten(0, (self.num_graphs, self.width)).transpose(1, 2)
        return padded_BHSK

    def unpadded(self, x_BHSK: Tensor) -> Tensor:
        """Return the class's nodes, [C, H, K]."""
        rows = x_BHSK.transpose(1, 2).flatten(0, 1)
        return rows if self.is_node_BS is None else rows.index_select(0, self.slot_C)


def full_attention(
    q_NHK: Tensor,
    k_NHK: Tensor,
    v_NHK: Tensor,
    graphs: GraphBatch,
    *,
    key_bias_NH: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Return the attention of each node over all nodes of its own graph, itself among them, [N, H, K].

    Memory is a few times that of the padded inputs: no matrix over the batch, and with torch's fused kernels none over
    a graph. Gradients flow to queries, keys, values and bias.

    Args:
        q_NHK: queries of the nodes of all graphs.
        k_NHK: keys, [N, H_kv, K]; H_kv divides H, and queries of a group share a key.
        v_NHK: values, as the keys.
        graphs: the batch, on the same device.
        key_bias_NH: added to the scores of each key, such as a bias by its degree. It is carried by one more column of
            queries and keys, so that fused kernels, which give no gradient to a mask, serve.
        scale: factor of the products of queries and keys; by default 1 / sqrt(K).

    Raises:
        ValueError: if shapes, formats or devices do not fit each other.
    """
    _require_fitting(q_NHK, k_NHK, v_NHK, graphs, key_bias_NH)
    num_heads, head_size = q_NHK.shape[1:]
    scale = head_size**-0.5 if scale is None else scale
    num_shared = num_heads // k_NHK.shape[1]
    if num_shared > 1:
        k_NHK, v_NHK = (x.repeat_interleave(num_shared, dim=1) for x in (k_NHK, v_NHK))
    if key_bias_NH is not None:
        q_NHK, k_NHK, v_NHK = _with_bias_column(q_NHK, k_NHK, v_NHK, key_bias_NH, scale)
    outputs = []
    for size_class in graphs.classes:
        mask = None if size_class.is_node_BS is None else size_class.is_node_BS[:, None, None, :]
        q, k, v = (size_class.padded(x) for x in (q_NHK, k_NHK, v_NHK))
        outputs.append(size_class.unpadded(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)))
    if not outputs:
        # Still a function of the inputs, so that a backward pass over an empty batch finds its way.
        return (q_NHK + k_NHK + v_NHK)[..., :head_size]
    return torch.cat(outputs).index_select(0, graphs.row_of_output_N)[..., :head_size]


def _with_bias_column(
    q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, key_bias_NH: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with columns whose scaled product is the bias.

    In 16 bits the bias is split into a sum of three numbers of that format, so that it is as exact as in fp32.
    """
    rest_NH = key_bias_NH.double() if q_NHK.dtype == torch.float64 else key_bias_NH.float()
    rest_NH = rest_NH / scale
    columns = []
    for _ in range(1 if q_NHK.dtype in (torch.float32, torch.float64) else 3):
        columns.append(rest_NH.to(q_NHK.dtype))
        rest_NH = rest_NH - columns[-1].detach()
    # Each column holds the gradient's full path: the first alone passes it on, the others correct its rounding.
    columns = [columns[0], *(column.detach() for column in columns[1:])]
    ones_NHC = q_NHK.new_ones(*q_NHK.shape[:2], len(columns))
    return (
        torch.cat([q_NHK, ones_NHC], dim=2),
        torch.cat([k_NHK, torch.stack(columns, dim=2)], dim=2),
        F.pad(v_NHK, (0, len(columns))),
    )


def _width(size: int) -> int:
    """Return the width of the class whose smallest graph has this size."""
    return max(MIN_WIDTH, size, int(size * WIDTH_GROWTH) // 8 * 8)


def _size_class(indptr_B1: Tensor, is_in_B: Tensor) -> SizeClass:
    """Return the class of some graphs, as wide as the largest of them."""
    graph_G = is_in_B.nonzero().squeeze(1)
    first_G, size_G = indptr_B1[graph_G], indptr_B1.diff()[graph_G]
    width, num_nodes = int(size_G.max()), int(size_G.sum())
    place_S = torch.arange(width, device=indptr_B1.device)
    is_node_GS = place_S < size_G.unsqueeze(1)
    slot_C = is_node_GS.flatten().nonzero().squeeze(1)
    return SizeClass(
        num_graphs=len(graph_G),
        width=width,
        row_C=(first_G.unsqueeze(1) + place_S).flatten()[slot_C],
        slot_C=slot_C,
        is_node_BS=None if num_nodes == len(graph_G) * width else is_node_GS,
    )


def _require_fitting(
    q_NHK: Tensor, k_NHK: Tensor, v_NHK: Tensor, graphs: GraphBatch, key_bias_NH: Tensor | None
) -> None:
    """Raise ValueError if the arguments of `full_attention` do not fit each other."""
    if q_NHK.ndim != 3 or k_NHK.ndim != 3:
        raise ValueError(f"q and k must have 3 dims: nodes, heads, head size; got {q_NHK.ndim} and {k_NHK.ndim}")
    num_heads, head_size = q_NHK.shape[1:]
    num_kv_heads = k_NHK.shape[1]
    wanted = {
        "q": (q_NHK, (graphs.num_nodes, num_heads, head_size)),
        "k": (k_NHK, (graphs.num_nodes, num_kv_heads, head_size)),
        "v": (v_NHK, (graphs.num_nodes, num_kv_heads, head_size)),
        "key_bias": (key_bias_NH, (graphs.num_nodes, num_heads)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have the shape {shape}, got {tuple(tensor.shape)}")
        if tensor.device != graphs.graph_indptr_B1.device:
            where = graphs.graph_indptr_B1.device
            raise ValueError(f"{name} must be on {where} as the graphs are, got {tensor.device}")
        if name != "key_bias" and tensor.dtype != q_NHK.dtype:
            raise ValueError(f"{name} must have the format of q, {q_NHK.dtype}, got {tensor.dtype}")
    if q_NHK.dtype not in DTYPES:
        raise ValueError(f"q must be fp32, bf16, fp16 or fp64, got {q_NHK.dtype}")
    if num_kv_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"the {num_kv_heads} heads of k must divide the {num_heads} heads of q")
