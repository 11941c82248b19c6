"""Small graphs with all that makes real ones awkward, and cuts of them that tests choose."""

from collections.abc import Callable

import numpy as np
import scipy.sparse

from planner.hosts import host_rows
from planner.partition import part_specs
from planner.shares import part_shares
from simulator.readers.features import Features
from simulator.readers.graphs import Graph
from simulator.readers.partitions import parts_sha256
from simulator.specs.graph import DEGREE_QUANTILES, GraphFile, GraphSpec
from simulator.specs.plan import Exchange, PartitionMethod, PartitionSpec, Plan, Recompute
from simulator.specs.units import Dtype
from tests.small_graphs import Edges, graph_of

NUM_CLASSES = 5
NUM_AWKWARD_NODES = 71  # divisible by neither 2 nor 3
FIRST_LONELY_NODE = 60  # this node and all after it have no edges


def awkward_graph() -> Graph:
    """Return a graph with a hub, multi-edges, self loops on some nodes, a directed tail and nodes without edges.

    Node 0 attends to nearly all nodes with edges and is attended by them. A fifth of the nodes has no label.
    """
    return labelled_graph(_awkward_edges(), NUM_AWKWARD_NODES)


def sparse_graph() -> Graph:
    """Return the awkward graph with sparse features; some nodes have no entry."""
    generator = np.random.default_rng(7)
    dense = generator.normal(size=(NUM_AWKWARD_NODES, 23)) * (generator.random((NUM_AWKWARD_NODES, 23)) < 0.15)
    dense[[3, 64]] = 0
    features = scipy.sparse.csr_array(dense.astype(np.float32))
    return labelled_graph(_awkward_edges(), NUM_AWKWARD_NODES, features=features)


def two_node_graph() -> Graph:
    """Return two nodes and one edge; more than two parts of it must include empty ones."""
    return labelled_graph([(0, 1)], 2, unlabelled_ratio=0.0)


def edgeless_graph() -> Graph:
    """Return nodes without any edge."""
    return labelled_graph([], 13)


def labelled_graph(
    edges: Edges, num_nodes: int, *, features: Features | None = None, unlabelled_ratio: float = 0.2
) -> Graph:
    """Return a graph with random labels and masks, and random dense features unless others are given."""
    generator = np.random.default_rng(num_nodes)
    labels_N = generator.integers(0, NUM_CLASSES, num_nodes)
    labels_N[generator.random(num_nodes) < unlabelled_ratio] = -1
    labels_N[0] = 1
    split_N = generator.choice(3, num_nodes, p=[0.6, 0.2, 0.2])
    split_N[0] = 0
    if features is None:
        features = generator.normal(size=(num_nodes, 7)).astype(np.float32)
    return graph_of(
        edges,
        num_nodes,
        features=features,
        labels_N=labels_N,
        train_mask_N=(split_N == 0) & (labels_N >= 0),
        val_mask_N=(split_N == 1) & (labels_N >= 0),
        test_mask_N=(split_N == 2) & (labels_N >= 0),
    )


def _awkward_edges() -> Edges:
    generator = np.random.default_rng(1)
    hub = [edge for node in range(1, 58) for edge in ((0, node), (node, 0))]
    pairs = [(int(source), int(target)) for source, target in generator.integers(0, 50, (150, 2))]
    repeated = [*pairs[:40], *pairs[:10]]
    loops = [(node, node) for node in range(0, 50, 5)]
    tail = [(node, node + 1) for node in range(49, FIRST_LONELY_NODE - 1)]
    return [*hub, *pairs, *repeated, *loops, *tail]


GRAPHS: dict[str, Callable[[], Graph]] = {
    "awkward": awkward_graph,
    "sparse": sparse_graph,
    "two nodes": two_node_graph,
    "edgeless": edgeless_graph,
}


def spec_of(graph: Graph, *, num_classes: int = NUM_CLASSES) -> GraphSpec:
    """Return the graph in numbers; it lies in no file."""
    num_entries = graph.features.nnz if isinstance(graph.features, scipy.sparse.csr_array) else 0
    return GraphSpec(
        source=GraphFile(path="nowhere"),
        sha256="",
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        num_features=graph.features.shape[1],
        num_feature_entries=num_entries,
        num_classes=num_classes,
        num_train_nodes=int(graph.train_mask_N.sum()),
        num_val_nodes=int(graph.val_mask_N.sum()),
        num_test_nodes=int(graph.test_mask_N.sum()),
        in_degree_quantiles=tuple(np.quantile(graph.in_degree_N, DEGREE_QUANTILES).tolist()),
    )


def uneven_parts(graph: Graph, num_parts: int) -> np.ndarray:
    """Return a part for each node, drawn so that later parts are smaller; scattered, so that halos are large."""
    shares = 1 / np.arange(1, num_parts + 1)
    return np.random.default_rng(num_parts).choice(num_parts, graph.num_nodes, p=shares / shares.sum())


def lonely_last_part(graph: Graph, num_parts: int) -> np.ndarray:
    """Return uneven parts, the last of which holds the nodes without edges of the awkward graph and no others."""
    part_N = uneven_parts(graph, num_parts - 1)
    part_N[FIRST_LONELY_NODE:] = num_parts - 1
    return part_N


def unlabelled_last_part(graph: Graph, num_parts: int) -> np.ndarray:
    """Return uneven parts, the last of which holds no node that the loss uses."""
    part_N = uneven_parts(graph, num_parts - 1)
    part_N[~graph.train_mask_N & (np.arange(graph.num_nodes) % 2 == 0)] = num_parts - 1
    return part_N


def node_parts(graph: Graph, num_parts: int) -> np.ndarray:
    """Return a part of its own for each node; parts beyond the nodes are empty."""
    return np.arange(graph.num_nodes) % num_parts


CUTS: dict[str, Callable[[Graph, int], np.ndarray]] = {
    "uneven": uneven_parts,
    "lonely last": lonely_last_part,
    "unlabelled last": unlabelled_last_part,
    "by node": node_parts,
}


def partition_of(
    graph: Graph,
    part_N: np.ndarray,
    num_parts: int,
    *,
    ranks_per_host: int | None = None,
    part_ranks: tuple[int, ...] = (),
) -> PartitionSpec:
    """Return a cut in numbers; its array lies in no file."""
    part_N = part_N.astype(np.int32)
    hosts = None if ranks_per_host is None else host_rows(graph, part_N, num_parts, ranks_per_host=ranks_per_host)
    return PartitionSpec(
        method=PartitionMethod.SINGLE if num_parts == 1 else PartitionMethod.METIS,
        seed=0,
        path="",
        sha256=parts_sha256(part_N),
        parts=part_specs(graph, part_N, num_parts),
        hosts=hosts,
        shares=part_shares(graph, part_N, part_ranks) if part_ranks else None,
    )


def plan_of(
    graph: Graph,
    part_N: np.ndarray,
    num_parts: int,
    *,
    data_parallel_degree: int = 1,
    graph_parallel_degree: int = 1,
    parts_per_batch: int = 0,
    recompute: tuple[Recompute, ...] = (Recompute.NONE,),
) -> Plan:
    """Return a plan with as many layers as `recompute` has entries, halo exchanges, and fp32.

    Args:
        parts_per_batch: 0 for one part a rank of the graph group.
    """
    exchange = Exchange.HALO if graph_parallel_degree > 1 else Exchange.NONE
    return Plan(
        data_parallel_degree=data_parallel_degree,
        graph_parallel_degree=graph_parallel_degree,
        partition=partition_of(graph, part_N, num_parts),
        parts_per_batch=parts_per_batch or graph_parallel_degree,
        exchange=(exchange,) * len(recompute),
        recompute=recompute,
        precision=Dtype.FLOAT32,
    )
