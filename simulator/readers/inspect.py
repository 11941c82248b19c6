"""Statistics of a prepared graph, for `graphpilot inspect`."""

from dataclasses import dataclass

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
from numpy.typing import NDArray

from simulator.readers.graphs import Graph, simple_adjacency
from simulator.specs.graph import GraphSpec

# Share of nodes, those with the most incoming edges, whose edges measure the skew.
HUB_NODES_RATIO = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphStatistics:
    """What decides how hard a graph is to train on; edges as prepared, added self loops included.

    Attributes:
        num_nodes, num_edges: of the graph.
        in_degree_quantiles: of incoming edges, at `DEGREE_QUANTILES`.
        mean_in_degree, max_in_degree: of incoming edges.
        max_over_mean_in_degree: skew by the largest hub; one if all nodes are alike, 0 without edges.
        hub_edges_ratio: skew by all hubs; share of edges into the 1 % of nodes (at least one) with the most.
        num_isolated_nodes: nodes without an edge to or from another node.
        num_self_loops: edges from a node to itself.
        num_multi_edges: edges that repeat another one of the same source and target.
        num_components, largest_component_nodes: of connected nodes, by edges of either direction.
        is_symmetric: whether each edge has its reverse.
        edge_homophily_ratio: share of edges between different nodes with labels that join equal labels; None without
            such edges.
        num_features: width of the features.
        feature_density_ratio: share of features that are not zero.
    """

    num_nodes: int
    num_edges: int
    in_degree_quantiles: tuple[float, ...]
    mean_in_degree: float
    max_in_degree: int
    max_over_mean_in_degree: float
    hub_edges_ratio: float
    num_isolated_nodes: int
    num_self_loops: int
    num_multi_edges: int
    num_components: int
    largest_component_nodes: int
    is_symmetric: bool
    edge_homophily_ratio: float | None
    num_features: int
    feature_density_ratio: float


def graph_statistics(spec: GraphSpec, graph: Graph) -> GraphStatistics:
    """Return the statistics of a graph that `read_graph` gave."""
    adjacency = simple_adjacency(graph)
    in_degree_N, target_E = graph.in_degree_N, graph.target_E
    loops_N = np.bincount(target_E[graph.source_E == target_E], minlength=spec.num_nodes)
    num_components, component_N = scipy.sparse.csgraph.connected_components(adjacency, directed=True, connection="weak")
    mean_in_degree = spec.num_edges / spec.num_nodes
    return GraphStatistics(
        num_nodes=spec.num_nodes,
        num_edges=spec.num_edges,
        in_degree_quantiles=spec.in_degree_quantiles,
        mean_in_degree=mean_in_degree,
        max_in_degree=int(in_degree_N.max()),
        max_over_mean_in_degree=int(in_degree_N.max()) / mean_in_degree if mean_in_degree else 0.0,
        hub_edges_ratio=_hub_edges_ratio(in_degree_N),
        num_isolated_nodes=_num_isolated_nodes(adjacency),
        num_self_loops=int(loops_N.sum()),
        num_multi_edges=spec.num_edges - adjacency.nnz - int(np.count_nonzero(loops_N)),
        num_components=int(num_components),
        largest_component_nodes=int(np.bincount(component_N).max()),
        is_symmetric=_is_symmetric(adjacency),
        edge_homophily_ratio=_edge_homophily_ratio(graph, target_E),
        num_features=spec.num_features,
        feature_density_ratio=_feature_density_ratio(spec, graph),
    )


def _hub_edges_ratio(in_degree_N: NDArray[np.int64]) -> float:
    """Return the share of edges into the nodes with the most."""
    num_hubs = max(round(len(in_degree_N) * HUB_NODES_RATIO), 1)
    hub_degrees = np.partition(in_degree_N, len(in_degree_N) - num_hubs)[-num_hubs:]
    return float(hub_degrees.sum() / max(in_degree_N.sum(), 1))


def _num_isolated_nodes(adjacency: scipy.sparse.csr_array) -> int:
    """Return the nodes that no edge joins to another node."""
    joined_N = np.diff(adjacency.indptr) > 0
    joined_N[adjacency.indices] = True
    return int(np.count_nonzero(~joined_N))


def _is_symmetric(adjacency: scipy.sparse.csr_array) -> bool:
    """Return whether a matrix with sorted rows equals its transpose."""
    reverse = adjacency.T.tocsr()
    return np.array_equal(adjacency.indptr, reverse.indptr) and np.array_equal(adjacency.indices, reverse.indices)


def _edge_homophily_ratio(graph: Graph, target_E: NDArray[np.int32]) -> float | None:
    """Return the share of edges between different, labelled nodes that join equal labels."""
    target_label_E, source_label_E = graph.labels_N[target_E], graph.labels_N[graph.source_E]
    counted_E = (target_label_E >= 0) & (source_label_E >= 0) & (graph.source_E != target_E)
    num_counted = int(np.count_nonzero(counted_E))
    if num_counted == 0:
        return None
    return int(np.count_nonzero(counted_E & (target_label_E == source_label_E))) / num_counted


def _feature_density_ratio(spec: GraphSpec, graph: Graph) -> float:
    """Return the share of features that are not zero."""
    if isinstance(graph.features, scipy.sparse.csr_array):
        num_nonzero = graph.features.count_nonzero()
    else:
        num_nonzero = np.count_nonzero(graph.features)
    return int(num_nonzero) / (spec.num_nodes * spec.num_features)
