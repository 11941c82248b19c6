"""This rank's part of the graph, with its halo, as tensors; encodings; PyG graphs to a store."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import scipy.sparse
import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph
from executor.compat import making_sparse_csr
from executor.exchange import ExchangeLayout
from executor.hosts import HostLayouts, host_halo, host_layouts
from executor.operations import SparseFeatures
from executor.sampling.neighbourhood import Neighbourhood
from executor.served import PartLayout
from executor.topology import EdgeHalves, Topology, by_message, on_device
from simulator.readers.graphs import Graph
from simulator.shares import mates_of
from simulator.specs.model import NUM_DEGREE_BUCKETS
from simulator.specs.plan import ROW_EXCHANGES, Exchange

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
        edges: the edges as each exchange of the plan numbers the sources; those of all ranks for an exchange of heads.
        degree_bucket_E: bucket of each edge's source by its degree in the whole graph; None where no bias needs it.
        halves: for exchanges that overlap with attention, the edges in two sets too, over which attention runs forward.
        group_degree_bucket_E: as `degree_bucket_E`, of the edges of all ranks.
        graph_rank: this rank in its group.
        layout: what is sent and received.
        label_N: classes, -1 without a label.
        train_row_T, train_label_T: own rows that the loss uses, and their labels.
        num_train_rows_of_step: rows that the loss uses on all ranks of the step.
        mask_rows: own labelled rows by split, "train", "val" and "test".
        layers: of sampled neighbourhoods, what each layer attends to; then `edges` and `degree_bucket_E` are empty,
            `node_N` and features those of the first layer's rows, labels those of the last one's. Else empty.
        hosts: what a hierarchical exchange sends and receives; None without one.
        part: where parts may have several ranks, that of this rank; then `edges` are those into all rows of the part,
            own ones first. None for one rank a part.
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
    halves: Mapping[Exchange, EdgeHalves] = field(default_factory=dict)
    group_degree_bucket_E: Tensor | None = None
    graph_rank: int = 0
    hosts: HostLayouts | None = None
    part: PartLayout | None = None

    def attended(self, layer: int, exchange: Exchange) -> tuple[EdgeGraph, Tensor | None]:
        """Return the edges into own rows that a layer attends along under an exchange, and their degree buckets."""
        if self.layers:
            return self.layers[layer].edges, self.layers[layer].degree_bucket_E
        return self.edges[exchange], self.degree_bucket_E

    def target_node_N(self, layer: int) -> Tensor:
        """Return the global ids of the rows that a layer returns."""
        return self.node_N[: self.layers[layer].edges.num_targets] if self.layers else self.node_N

    def num_input_rows(self, layer: int) -> int:
        """Return how many rows a layer gets."""
        return self.layers[layer].edges.num_sources if self.layers else len(self.node_N)

    @property
    def all_edges(self) -> list[EdgeGraph]:
        """All edges as layers attend along them: of each layer, or of each exchange and both its halves."""
        halves = [half for both in self.halves.values() for half in (both.inner, both.outer)]
        return [*self.whole_edges, *halves]

    @property
    def whole_edges(self) -> list[EdgeGraph]:
        """The edges along which gradients flow: of each layer, or of each exchange, whole."""
        return [*self.edges.values(), *(layer.edges for layer in self.layers)]

    def batch_shape(self, num_graph_nodes: int) -> tuple[int, ...]:
        """Return the shape of the task that made this batch, counted."""
        num_features = 0 if self.dense_NF is None else self.dense_NF.numel()
        num_features += 0 if self.sparse is None else self.sparse.num_entries
        first = self.layers[-1].edges.num_targets if self.layers else num_graph_nodes
        return first, len(self.node_N), self._num_made_edges(), num_features

    def _num_made_edges(self) -> int:
        """Return the edges of all layers of samples, else those into own rows, and of all ranks where heads travel."""
        own = [graph for exchange, graph in self.edges.items() if exchange is not Exchange.HEAD_ALL_TO_ALL][:1]
        group = [graph for exchange, graph in self.edges.items() if exchange is Exchange.HEAD_ALL_TO_ALL]
        graphs = [layer.edges for layer in self.layers] or [*own, *group]
        return sum(graph.num_edges for graph in graphs)


@dataclass(frozen=True, kw_only=True)
class LocalEdges:
    """One rank's rows of a batch in NumPy: global ids, edges, halo and messages.

    Attributes:
        node_N: global ids of the own rows, in the plan's order.
        indptr_N1, source_global_E: edges into the own rows from nodes of the batch, those of a row as in the graph;
            where several ranks serve a part, into its rows: own ones, then those of each other rank.
        halo_M: global ids of the halo, by message, then by owner, then in the plan's order.
        rows_from: halo rows by owner.
        send_row_S: own rows that the others need, by message, then by receiver, then ascending.
        rows_to: of them, by receiver.
        max_rows: own rows of the largest rank.
        max_pair_rows: the most halo rows that any rank needs of another one.
    """

    node_N: np.ndarray
    indptr_N1: np.ndarray
    source_global_E: np.ndarray
    halo_M: np.ndarray
    rows_from: tuple[int, ...]
    send_row_S: np.ndarray
    rows_to: tuple[int, ...]
    max_rows: int
    max_pair_rows: int


def local_edges(
    graph: Graph,
    owner_N: np.ndarray,
    *,
    graph_rank: int,
    num_ranks: int,
    order_N: np.ndarray | None = None,
    inside_N: np.ndarray | None = None,
    rows_per_message: int | None = None,
    part_ranks: tuple[int, ...] | None = None,
) -> LocalEdges:
    """Return what one rank of a graph group holds of a batch.

    Args:
        owner_N: rank of the group that owns each node of the graph; -1 for nodes outside the batch.
        order_N: all nodes in the plan's order; None for the natural one.
        inside_N: part of each node, for a lone rank, where edges between parts are dropped; None where they are kept.
        rows_per_message: the most halo rows from one rank to another in one message; None for all.
        part_ranks: ranks that serve each part, to whose halo belong the rows of the part that others own; None for one
            each.
    """
    assert inside_N is None or num_ranks == 1, num_ranks
    place_N = _places(order_N, graph.num_nodes)
    rows_by_rank = _nodes_by_rank(owner_N, num_ranks, order_N)
    node_N = rows_by_rank[graph_rank]
    target_N = served_rows(rows_by_rank, part_ranks, graph_rank)
    indptr_N1, source_E = _edges_into(graph, target_N, owner_N, inside_N)
    attended = source_E if part_ranks is None else np.concatenate([source_E, target_N])
    halo = _distinct(attended[owner_N[attended] != graph_rank], graph.num_nodes)
    halo_M = halo[np.lexsort((place_N[halo], owner_N[halo]))]
    rows_from = np.bincount(owner_N[halo_M], minlength=num_ranks)
    send_rows, max_pair_rows = [np.zeros(0, np.int64)] * num_ranks, int(rows_from.max())
    for rank in range(num_ranks):
        if rank != graph_rank:
            needed = _nodes_needed_by(graph, served_rows(rows_by_rank, part_ranks, rank), owner_N, rank)
            if part_ranks is not None:
                needed = _distinct(
                    np.concatenate([needed, *_of_mates(rows_by_rank, part_ranks, rank)]), graph.num_nodes
                )
            max_pair_rows = max(max_pair_rows, *np.bincount(owner_N[needed], minlength=num_ranks).tolist())
            mine = needed[owner_N[needed] == graph_rank]
            send_rows[rank] = np.searchsorted(place_N[node_N], np.sort(place_N[mine]))
    rows_to = [len(rows) for rows in send_rows]
    return LocalEdges(
        node_N=node_N,
        indptr_N1=indptr_N1,
        source_global_E=source_E,
        halo_M=halo_M[by_message(rows_from, rows_per_message)],
        rows_from=tuple(rows_from.tolist()),
        send_row_S=np.concatenate(send_rows)[by_message(rows_to, rows_per_message)],
        rows_to=tuple(rows_to),
        max_rows=max(len(rows) for rows in rows_by_rank),
        max_pair_rows=max_pair_rows,
    )


def served_rows(rows_by_rank: list[np.ndarray], part_ranks: tuple[int, ...] | None, rank: int) -> np.ndarray:
    """Return the nodes for which a rank attends: its own, then those of each other rank that serves its part."""
    if part_ranks is None:
        return rows_by_rank[rank]
    return np.concatenate([rows_by_rank[rank], *_of_mates(rows_by_rank, part_ranks, rank)])


def _of_mates(rows_by_rank: list[np.ndarray], part_ranks: tuple[int, ...], rank: int) -> list[np.ndarray]:
    """Return the nodes of each other rank that serves a rank's part."""
    return [rows_by_rank[mate] for mate in mates_of(part_ranks, rank) if mate != rank]


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


def _nodes_needed_by(graph: Graph, other_N: np.ndarray, owner_N: np.ndarray, other: int) -> np.ndarray:
    """Return the nodes of others that another rank's nodes attend to, ascending."""
    _, source_E = _edges_into(graph, other_N, owner_N)
    return _distinct(source_E[owner_N[source_E] != other], graph.num_nodes)


def _boundary_last(graph: Graph, owner_N: np.ndarray, order_N: np.ndarray | None) -> np.ndarray:
    """Return all nodes in an order in which those of the batch with edges from other ranks come after its others.

    Nodes outside the batch follow; else the order stays.
    """
    order_N = np.arange(graph.num_nodes) if order_N is None else order_N
    is_there_N = owner_N[order_N] >= 0
    node_B = order_N[is_there_N]
    indptr_B1, source_E = _edges_into(graph, node_B, owner_N)
    is_outer_E = owner_N[source_E] != np.repeat(owner_N[node_B], np.diff(indptr_B1))
    before = np.concatenate([[0], np.cumsum(is_outer_E)])
    is_boundary_B = np.diff(before[indptr_B1]) > 0
    return np.concatenate([node_B[np.argsort(is_boundary_B, kind="stable")], order_N[~is_there_N]])


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
    overlaps: bool = False,
    rows_per_message: int | None = None,
    head_rows_per_message: int | None = None,
    for_one_step: bool = False,
    ranks_per_host: int | None = None,
    host_group: torch.distributed.ProcessGroup | None = None,
    part_ranks: tuple[int, ...] | None = None,
    part_group: torch.distributed.ProcessGroup | None = None,
    has_features: bool = True,
) -> RankData:
    """Return one rank's tensors of a batch on its device.

    Args:
        encodings: positional encodings of all nodes, [N, columns], or None.
        owner_N: rank of the graph group that owns each node; -1 outside the batch.
        order_N: all nodes in the plan's order; None for the natural one.
        degree_buckets: whether the model biases scores by degree.
        num_train_rows_of_step: labelled training rows on all ranks, replicas included.
        inside_N: part of each node, for a lone rank, where edges between parts are dropped; None where they are kept.
        overlaps: whether attention over own rows runs while rows of others are on their way.
        rows_per_message, head_rows_per_message: as in `ExchangeLayout`.
        for_one_step: whether the batch is made for one step: then nothing is made that only many steps pay for.
        ranks_per_host: for a hierarchical exchange, on the full graph; None without one.
        host_group: ranks of the own host.
        part_ranks: ranks that serve each part, where some have several; None for one each.
        part_group: ranks that serve the own part; None where it is this rank alone.
        has_features: whether the rank has the first stage of the model, which alone needs features and encodings.
    """
    if overlaps:
        order_N = _boundary_last(graph, owner_N, order_N)
    local = local_edges(
        graph,
        owner_N,
        graph_rank=graph_rank,
        num_ranks=num_ranks,
        order_N=order_N,
        inside_N=inside_N,
        rows_per_message=rows_per_message,
        part_ranks=part_ranks,
    )
    rows_by_rank = _nodes_by_rank(owner_N, num_ranks, order_N)
    halved = ROW_EXCHANGES & exchanges if overlaps else frozenset[Exchange]()
    topology = Topology(
        graph_rank=graph_rank,
        rows_by_rank=rows_by_rank,
        halo_M=local.halo_M,
        indptr_N1=local.indptr_N1,
        source_E=local.source_global_E,
        bucket_N=degree_buckets_of(graph) if degree_buckets else None,
        rows_per_message=rows_per_message,
        head_rows_per_message=head_rows_per_message,
        for_one_step=for_one_step,
        device=device,
    )
    hosts = None
    if ranks_per_host is not None:
        needed = [_nodes_needed_by(graph, rows, owner_N, rank) for rank, rows in enumerate(rows_by_rank)]
        place_N = _places(order_N, graph.num_nodes)
        hosts = host_halo(needed, owner_N, place_N, rank=graph_rank, ranks_per_host=ranks_per_host)
    topologies = dict.fromkeys(exchanges, topology)
    if hosts is not None:
        topologies[Exchange.HIERARCHICAL_HALO] = replace(topology, halo_M=hosts.halo_M)
    group_edges = _edges_into(graph, topology.group_nodes, owner_N) if Exchange.HEAD_ALL_TO_ALL in exchanges else None
    train_row_T = np.flatnonzero(graph.train_mask_N[local.node_N])
    labels_N = np.asarray(graph.labels_N[local.node_N])
    masks = {"train": graph.train_mask_N, "val": graph.val_mask_N, "test": graph.test_mask_N}
    return RankData(
        dtype=dtype,
        node_N=on_device(local.node_N, device),
        dense_NF=_dense_input(graph, encodings, local.node_N, dtype, device) if has_features else None,
        sparse=_sparse_input(graph, local.node_N, device) if has_features else None,
        edges={
            exchange: topologies[exchange].edge_graph(
                exchange, group_edges if exchange is Exchange.HEAD_ALL_TO_ALL else None
            )
            for exchange in exchanges
        },
        degree_bucket_E=topology.buckets(local.source_global_E),
        halves={exchange: topologies[exchange].edge_halves(exchange) for exchange in halved},
        group_degree_bucket_E=None if group_edges is None else topology.buckets(group_edges[1]),
        graph_rank=graph_rank,
        layout=ExchangeLayout(
            send_row_S=on_device(local.send_row_S, device),
            rows_to=local.rows_to,
            rows_from=local.rows_from,
            max_rows=local.max_rows,
            group=group,
            max_pair_rows=local.max_pair_rows,
            rows_per_message=rows_per_message,
            rows_by_rank=tuple(len(rows) for rows in rows_by_rank),
            head_rows_per_message=head_rows_per_message,
        ),
        label_N=on_device(labels_N, device),
        train_row_T=on_device(train_row_T, device),
        train_label_T=on_device(labels_N[train_row_T], device),
        num_train_rows_of_step=num_train_rows_of_step,
        mask_rows={name: on_device(np.flatnonzero(mask[local.node_N]), device) for name, mask in masks.items()},
        part=None
        if part_ranks is None
        else PartLayout(part_ranks=part_ranks, ranks=mates_of(part_ranks, graph_rank), group=part_group),
        hosts=None
        if hosts is None
        else host_layouts(
            hosts,
            # Where nothing overlaps, own rows lie before those that are passed on.
            first_row=0 if overlaps else len(local.node_N),
            max_rows=local.max_rows,
            group=group,
            host_group=host_group,
            device=device,
        ),
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
    has_features: bool = True,
) -> RankData:
    """Return the tensors of sampled neighbourhoods on a device; every seed is a node to train on.

    Args:
        encodings, degree_buckets, num_train_rows_of_step, has_features: as in `build_rank_data`.
    """
    num_seeds = len(sample.layers[-1].indptr_N1) - 1
    labels_N = np.asarray(graph.labels_N[sample.node_N[:num_seeds]])
    buckets_N = degree_buckets_of_nodes(graph, sample.node_N) if degree_buckets else None
    layers = [
        LayerData(
            edges=EdgeGraph(
                indptr_N1=on_device(layer.indptr_N1, device),
                source_E=on_device(layer.source_E, device),
                num_sources=layer.num_sources,
                is_sampled=True,
            ),
            degree_bucket_E=None if buckets_N is None else on_device(buckets_N[layer.source_E], device),
        )
        for layer in sample.layers
    ]
    no_rows = torch.zeros(0, dtype=torch.int64, device=device)
    label_N = on_device(labels_N, device)
    return RankData(
        dtype=dtype,
        node_N=on_device(sample.node_N, device),
        dense_NF=_dense_input(graph, encodings, sample.node_N, dtype, device) if has_features else None,
        sparse=_sparse_input(graph, sample.node_N, device) if has_features else None,
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
    for graph in data.all_edges:
        _ = graph.num_edges_of_long_rows
        if graph.device.type == "cuda":
            _ = graph.work
    for graph in data.whole_edges:
        _ = graph.transpose
        if graph.device.type == "cuda":
            _ = graph.transpose.work
    return data


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
    return on_device(np.concatenate(columns, axis=1), device).to(dtype)


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
