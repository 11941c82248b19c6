"""This rank's part of the graph, with its halo, as tensors; encodings; PyG graphs to a store."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph
from executor.compat import making_sparse_csr
from executor.exchange import ExchangeLayout
from executor.operations import SparseFeatures
from executor.sampling.neighbourhood import Neighbourhood
from simulator.readers.graphs import Graph
from simulator.specs.model import NUM_DEGREE_BUCKETS
from simulator.specs.plan import Exchange

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A run's arrays, the same on every rank.

    Attributes:
        part_N: part of each node.
        encodings: positional encodings, [N, columns], or None.
        order_N: the nodes in the plan's order; None for the natural one.
    """

    graph: Graph
    part_N: np.ndarray
    encodings: np.ndarray | None
    order_N: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class LayerData:
    """What one layer attends to in a batch of sampled neighbourhoods.

    Attributes:
        edges: from the layer's rows to the first of them.
        degree_bucket_E: as in `RankData`.
    """

    edges: EdgeGraph
    degree_bucket_E: Tensor | None


@dataclass(frozen=True, kw_only=True)
class RankData:
    """What one rank trains or evaluates on: its rows of a batch and the edges into them.

    Attributes:
        node_N: global ids of the own rows, int64.
        dense_NF: dense features and encodings in the precision of the run; None without any.
        sparse: sparse features, fp32; None when features are dense.
        edges: the edges as each exchange of the plan numbers the sources.
        degree_bucket_E: bucket of each edge's source by its degree in the whole graph; None where no bias needs it.
        layout: what is sent and received.
        label_N: classes, -1 without a label.
        train_row_T, train_label_T: own rows that the loss uses, and their labels.
        num_train_rows_of_step: rows that the loss uses on all ranks of the step.
        mask_rows: own labelled rows by split, "train", "val" and "test".
        layers: of sampled neighbourhoods, what each layer attends to; then `edges` and `degree_bucket_E` are empty,
            `node_N` and features those of the first layer's rows, labels those of the last one's. Else empty.
    """

    dtype: torch.dtype
    node_N: Tensor
    dense_NF: Tensor | None
    sparse: SparseFeatures | None
    edges: Mapping[Exchange, EdgeGraph]
    degree_bucket_E: Tensor | None
    layout: ExchangeLayout
    label_N: Tensor
    train_row_T: Tensor
    train_label_T: Tensor
    num_train_rows_of_step: int
    mask_rows: Mapping[str, Tensor]
    layers: tuple[LayerData, ...] = ()

    def attended(self, layer: int, exchange: Exchange) -> tuple[EdgeGraph, Tensor | None]:
        """Return the edges that a layer attends along under an exchange, and their degree buckets."""
        if self.layers:
            return self.layers[layer].edges, self.layers[layer].degree_bucket_E
        return self.edges[exchange], self.degree_bucket_E

    def target_node_N(self, layer: int) -> Tensor:
        """Return the global ids of the rows that a layer returns."""
        return self.node_N[: self.layers[layer].edges.num_targets] if self.layers else self.node_N

    def batch_shape(self, num_graph_nodes: int) -> tuple[int, ...]:
        """Return the shape of the task that made this batch, counted."""
        graphs = [layer.edges for layer in self.layers] or list(self.edges.values())[:1]
        num_features = 0 if self.dense_NF is None else self.dense_NF.numel()
        num_features += 0 if self.sparse is None else self.sparse.num_entries
        first = graphs[-1].num_targets if self.layers else num_graph_nodes
        return first, len(self.node_N), sum(graph.num_edges for graph in graphs), num_features


@dataclass(frozen=True, kw_only=True)
class LocalEdges:
    """One rank's rows of a batch in NumPy: global ids, edges, halo and messages.

    Attributes:
        node_N: global ids of the own rows, in the plan's order.
        indptr_N1, source_global_E: edges into the own rows from nodes of the batch, those of a row as in the graph.
        owner_E: rank of the group that owns each edge's source.
        halo_M: global ids of the halo, by owner, then in the plan's order.
        rows_from: halo rows by owner.
        send_row_S: own rows that the others need, by receiver, then ascending.
        rows_to: of them, by receiver.
        max_rows: own rows of the largest rank.
    """

    node_N: np.ndarray
    indptr_N1: np.ndarray
    source_global_E: np.ndarray
    owner_E: np.ndarray
    halo_M: np.ndarray
    rows_from: tuple[int, ...]
    send_row_S: np.ndarray
    rows_to: tuple[int, ...]
    max_rows: int


def local_edges(
    graph: Graph,
    owner_N: np.ndarray,
    *,
    graph_rank: int,
    num_ranks: int,
    order_N: np.ndarray | None = None,
    inside_N: np.ndarray | None = None,
) -> LocalEdges:
    """Return what one rank of a graph group holds of a batch.

    Args:
        owner_N: rank of the group that owns each node of the graph; -1 for nodes outside the batch.
        order_N: all nodes in the plan's order; None for the natural one.
        inside_N: part of each node, for a lone rank, where edges between parts are dropped; None where they are kept.
    """
    assert inside_N is None or num_ranks == 1, num_ranks
    place_N = _places(order_N, graph.num_nodes)
    rows_by_rank = _nodes_by_rank(owner_N, num_ranks, order_N)
    node_N = rows_by_rank[graph_rank]
    indptr_N1, source_E = _edges_into(graph, node_N, owner_N, inside_N)
    owner_E = owner_N[source_E]
    halo = _distinct(source_E[owner_E != graph_rank], graph.num_nodes)
    halo_M = halo[np.lexsort((place_N[halo], owner_N[halo]))]
    send_rows = [
        np.zeros(0, np.int64)
        if rank == graph_rank
        else _rows_needed_by(graph, rows_by_rank[rank], owner_N, node_N, place_N, graph_rank=graph_rank)
        for rank in range(num_ranks)
    ]
    return LocalEdges(
        node_N=node_N,
        indptr_N1=indptr_N1,
        source_global_E=source_E,
        owner_E=owner_E,
        halo_M=halo_M,
        rows_from=tuple(np.bincount(owner_N[halo_M], minlength=num_ranks).tolist()),
        send_row_S=np.concatenate(send_rows),
        rows_to=tuple(len(rows) for rows in send_rows),
        max_rows=max(len(rows) for rows in rows_by_rank),
    )


def _nodes_by_rank(owner_N: np.ndarray, num_ranks: int, order_N: np.ndarray | None) -> list[np.ndarray]:
    """Return the nodes that each rank owns, in the plan's order."""
    if order_N is None:
        return [np.flatnonzero(owner_N == rank) for rank in range(num_ranks)]
    return [order_N[owner_N[order_N] == rank].astype(np.int64) for rank in range(num_ranks)]


def _places(order_N: np.ndarray | None, num_nodes: int) -> np.ndarray:
    """Return the place of each node in the plan's order."""
    place_N = np.arange(num_nodes)
    if order_N is not None:
        place_N[order_N] = np.arange(num_nodes)
    return place_N


def _edges_into(
    graph: Graph, node_N: np.ndarray, owner_N: np.ndarray, inside_N: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return row pointers and sources of the edges into some nodes from nodes of the batch, or of their own parts."""
    starts_N, counts_N = graph.indptr_N[node_N], np.diff(graph.indptr_N)[node_N]
    offsets_N = np.concatenate([[0], np.cumsum(counts_N)])
    position_E = np.arange(offsets_N[-1]) + np.repeat(starts_N - offsets_N[:-1], counts_N)
    source_E = graph.source_E[position_E].astype(np.int64)
    keep_E = owner_N[source_E] >= 0
    if inside_N is not None:
        keep_E &= inside_N[source_E] == np.repeat(inside_N[node_N], counts_N)
    kept_before = np.concatenate([[0], np.cumsum(keep_E)])
    return kept_before[offsets_N], source_E[keep_E]


def _rows_needed_by(
    graph: Graph, other_N: np.ndarray, owner_N: np.ndarray, node_N: np.ndarray, place_N: np.ndarray, *, graph_rank: int
) -> np.ndarray:
    """Return the own rows that another rank's nodes attend to, ascending."""
    _, source_E = _edges_into(graph, other_N, owner_N)
    needed = _distinct(source_E[owner_N[source_E] == graph_rank], graph.num_nodes)
    return np.searchsorted(place_N[node_N], np.sort(place_N[needed]))


def _distinct(nodes: np.ndarray, num_nodes: int) -> np.ndarray:
    """Return the distinct nodes, ascending; flags are faster than np.unique, which sorts or hashes."""
    is_there_N = np.zeros(num_nodes, dtype=np.bool_)
    is_there_N[nodes] = True
    return np.flatnonzero(is_there_N)


def build_rank_data(
    graph: Graph,
    encodings: np.ndarray | None,
    owner_N: np.ndarray,
    *,
    order_N: np.ndarray | None = None,
    graph_rank: int,
    exchanges: frozenset[Exchange],
    degree_buckets: bool,
    group: torch.distributed.ProcessGroup | None,
    num_ranks: int,
    num_train_rows_of_step: int,
    dtype: torch.dtype,
    device: torch.device,
    inside_N: np.ndarray | None = None,
) -> RankData:
    """Return one rank's tensors of a batch on its device.

    Args:
        encodings: positional encodings of all nodes, [N, columns], or None.
        owner_N: rank of the graph group that owns each node; -1 outside the batch.
        order_N: all nodes in the plan's order; None for the natural one.
        degree_buckets: whether the model biases scores by degree.
        num_train_rows_of_step: labelled training rows on all ranks, replicas included.
        inside_N: part of each node where edges between parts are dropped; None where they are kept.
    """
    local = local_edges(graph, owner_N, graph_rank=graph_rank, num_ranks=num_ranks, order_N=order_N, inside_N=inside_N)
    rows_by_rank = _nodes_by_rank(owner_N, num_ranks, order_N)
    train_row_T = np.flatnonzero(graph.train_mask_N[local.node_N])
    labels_N = np.asarray(graph.labels_N[local.node_N])
    masks = {"train": graph.train_mask_N, "val": graph.val_mask_N, "test": graph.test_mask_N}
    return RankData(
        dtype=dtype,
        node_N=_tensor(local.node_N, device),
        dense_NF=_dense_input(graph, encodings, local.node_N, dtype, device),
        sparse=_sparse_input(graph, local.node_N, device),
        edges={exchange: _edge_graph(local, rows_by_rank, len(owner_N), exchange, device) for exchange in exchanges},
        degree_bucket_E=_tensor(degree_buckets_of(graph)[local.source_global_E], device) if degree_buckets else None,
        layout=ExchangeLayout(
            send_row_S=_tensor(local.send_row_S, device),
            rows_to=local.rows_to,
            rows_from=local.rows_from,
            max_rows=local.max_rows,
            group=group,
        ),
        label_N=_tensor(labels_N, device),
        train_row_T=_tensor(train_row_T, device),
        train_label_T=_tensor(labels_N[train_row_T], device),
        num_train_rows_of_step=num_train_rows_of_step,
        mask_rows={name: _tensor(np.flatnonzero(mask[local.node_N]), device) for name, mask in masks.items()},
    )


def build_sampled_data(
    graph: Graph,
    encodings: np.ndarray | None,
    sample: Neighbourhood,
    *,
    degree_buckets: bool,
    num_train_rows_of_step: int,
    dtype: torch.dtype,
    device: torch.device,
) -> RankData:
    """Return the tensors of sampled neighbourhoods on a device; every seed is a node to train on.

    Args:
        encodings, degree_buckets, num_train_rows_of_step: as in `build_rank_data`.
    """
    num_seeds = len(sample.layers[-1].indptr_N1) - 1
    labels_N = np.asarray(graph.labels_N[sample.node_N[:num_seeds]])
    buckets_N = degree_buckets_of_nodes(graph, sample.node_N) if degree_buckets else None
    layers = [
        LayerData(
            edges=EdgeGraph(
                indptr_N1=_tensor(layer.indptr_N1, device),
                source_E=_tensor(layer.source_E, device),
                num_sources=layer.num_sources,
            ),
            degree_bucket_E=None if buckets_N is None else _tensor(buckets_N[layer.source_E], device),
        )
        for layer in sample.layers
    ]
    no_rows = torch.zeros(0, dtype=torch.int64, device=device)
    label_N = _tensor(labels_N, device)
    return RankData(
        dtype=dtype,
        node_N=_tensor(sample.node_N, device),
        dense_NF=_dense_input(graph, encodings, sample.node_N, dtype, device),
        sparse=_sparse_input(graph, sample.node_N, device),
        edges={},
        degree_bucket_E=None,
        layout=ExchangeLayout(
            send_row_S=no_rows, rows_to=(0,), rows_from=(0,), max_rows=len(sample.node_N), group=None
        ),
        label_N=label_N,
        train_row_T=torch.arange(num_seeds, device=device),
        train_label_T=label_N,
        num_train_rows_of_step=num_train_rows_of_step,
        mask_rows={},
        layers=tuple(layers),
    )


def prepare_attention(data: RankData) -> RankData:
    """Return a batch after making what attention needs of its edges, which would else be made inside the step."""
    for graph in (*data.edges.values(), *(layer.edges for layer in data.layers)):
        _ = graph.num_edges_of_long_rows, graph.transpose
        if graph.device.type == "cuda":
            _ = graph.work, graph.transpose.work
    return data


def _edge_graph(
    local: LocalEdges, rows_by_rank: list[np.ndarray], num_nodes: int, exchange: Exchange, device: torch.device
) -> EdgeGraph:
    """Return the edges with sources numbered as an exchange lays the rows out."""
    num_rows = len(local.node_N)
    row_of_node = np.full(num_nodes, -1, np.int64)
    match exchange:
        case Exchange.NONE | Exchange.HALO:
            row_of_node[local.node_N] = np.arange(num_rows)
            row_of_node[local.halo_M] = num_rows + np.arange(len(local.halo_M))
            num_sources = num_rows + len(local.halo_M)
        case Exchange.ALL_GATHER:
            for rank, nodes in enumerate(rows_by_rank):
                row_of_node[nodes] = rank * local.max_rows + np.arange(len(nodes))
            num_sources = len(rows_by_rank) * local.max_rows
    edges = EdgeGraph(
        indptr_N1=_tensor(local.indptr_N1, device),
        source_E=_tensor(row_of_node[local.source_global_E].astype(np.int32), device),
        num_sources=num_sources,
    )
    _ = edges.num_edges_of_long_rows  # counted here, and not in the first step that is traced
    return edges


def degree_buckets_of(graph: Graph) -> np.ndarray:
    """Return the bucket of each node's degree: powers of two, the last takes all that is larger."""
    return degree_buckets_of_nodes(graph, np.arange(graph.num_nodes))


def degree_buckets_of_nodes(graph: Graph, node_N: np.ndarray) -> np.ndarray:
    """Return the bucket of the degree in the graph of each of some nodes."""
    degree_N = np.maximum(graph.indptr_N[node_N + 1] - graph.indptr_N[node_N], 1)
    buckets_N: np.ndarray = np.minimum(np.log2(degree_N).astype(np.int64), NUM_DEGREE_BUCKETS - 1)
    return buckets_N


def _dense_input(
    graph: Graph, encodings: np.ndarray | None, node_N: np.ndarray, dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    columns = []
    if isinstance(graph.features, np.ndarray):
        columns.append(graph.features[node_N])
    if encodings is not None:
        columns.append(encodings[node_N])
    if not columns:
        return None
    return _tensor(np.concatenate(columns, axis=1), device).to(dtype)


def _sparse_input(graph: Graph, node_N: np.ndarray, device: torch.device) -> SparseFeatures | None:
    if isinstance(graph.features, np.ndarray):
        return None
    rows = scipy.sparse.csr_array(graph.features)[node_N]
    return SparseFeatures(rows=_csr_tensor(rows, device), columns=_csr_tensor(rows.T.tocsr(), device))


def _csr_tensor(matrix: scipy.sparse.csr_array, device: torch.device) -> Tensor:
    with making_sparse_csr():
        return torch.sparse_csr_tensor(
            torch.from_numpy(matrix.indptr.astype(np.int64)),
            torch.from_numpy(matrix.indices.astype(np.int64)),
            torch.from_numpy(matrix.data.astype(np.float32)),
            size=matrix.shape,
            device=device,
        )


def _tensor(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    # From pinned memory a copy runs beside the host, in the order of the stream; torch frees the memory after it.
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor
