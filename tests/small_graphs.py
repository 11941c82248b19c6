"""Small graphs for tests: from lists of edges, and drawn at random."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from simulator.readers.graphs import Graph, rows_by_target

Edges = list[tuple[int, int]]


def edge_index_of(edges: Edges) -> np.ndarray[Any, np.dtype[np.int32]]:
    """Return edges [2, E], sources then targets."""
    return np.array(edges, dtype=np.int32).reshape(-1, 2).T


def graph_of(edges: Edges, num_nodes: int, **arrays: Any) -> Graph:
    """Return a graph with these edges (source, target), unlabelled and with one feature unless `arrays` has others."""
    source_E, target_E = edge_index_of(edges)
    indptr_N, sorted_E = rows_by_target(source_E, target_E, num_nodes=num_nodes)
    none_N = np.zeros(num_nodes, dtype=np.bool_)
    defaults: dict[str, Any] = {
        "features": np.ones((num_nodes, 1), dtype=np.float32),
        "labels_N": np.full(num_nodes, -1, dtype=np.int64),
        "train_mask_N": none_N,
        "val_mask_N": none_N,
        "test_mask_N": none_N,
    }
    return Graph(indptr_N=indptr_N, source_E=sorted_E, **(defaults | arrays))


def edges_of(graph: Graph) -> Edges:
    """Return the edges (source, target) of a graph in its order."""
    return list(zip(graph.source_E.tolist(), graph.target_E.tolist(), strict=True))


def shuffled_communities(
    num_nodes: int = 2048, *, size: int = 128, degree: int = 24, seed: int = 0
) -> tuple[Graph, np.ndarray[Any, np.dtype[np.int64]]]:
    """Return a graph of communities whose nodes were shuffled, and its nodes community by community.

    Args:
        size: nodes of a community.
        degree: sources that each node has, three quarters of them drawn from its community and the rest from all nodes.
    """
    generator = np.random.default_rng(seed)
    target_E = np.repeat(np.arange(num_nodes), degree)
    inside_E = target_E // size * size + generator.integers(0, size, len(target_E))
    anywhere_E = generator.integers(0, num_nodes, len(target_E))
    source_E = np.where(generator.random(len(target_E)) < 0.75, inside_E, anywhere_E)
    node_N = generator.permutation(num_nodes)
    edges = zip(node_N[source_E].tolist(), node_N[target_E].tolist(), strict=True)
    return graph_of(list(edges), num_nodes), node_N


@st.composite
def multigraphs(
    draw: st.DrawFn, *, min_nodes: int = 1, max_nodes: int = 12, min_edges: int = 0, max_edges: int = 40
) -> tuple[Edges, int]:
    """Draw edges (source, target), self loops and repeats among them, and the number of nodes."""
    num_nodes = draw(st.integers(min_nodes, max_nodes))
    node = st.integers(0, num_nodes - 1)
    return draw(st.lists(st.tuples(node, node), min_size=min_edges, max_size=max_edges)), num_nodes
