"""A connected piece of a graph, drawn by a seed, small enough for what is too dear on the whole."""

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
from numpy.typing import NDArray

from simulator.readers.graphs import Graph, undirected_adjacency

# Neighbours that a node brings into the region when it is reached: a hub does not fill the region by itself.
_BRANCHES = 8


def connected_region(graph: Graph, max_nodes: int, *, seed: int) -> NDArray[np.int64]:
    """Return nodes that edges of either direction connect, ascending: `max_nodes`, or a whole component with fewer.

    The region grows in the largest component around a node drawn there, level by level. A node brings at most
    `_BRANCHES` drawn neighbours at a time.

    Args:
        max_nodes: at least one.
    """
    assert max_nodes >= 1, max_nodes
    generator = np.random.default_rng(seed)
    adjacency = undirected_adjacency(graph)
    _, component_N = scipy.sparse.csgraph.connected_components(adjacency, directed=False)
    in_largest = np.flatnonzero(component_N == np.argmax(np.bincount(component_N)))
    is_found_N = np.zeros(graph.num_nodes, dtype=np.bool_)
    reached = generator.choice(in_largest, 1)
    is_found_N[reached] = True
    num_found = 1
    while num_found < min(max_nodes, len(in_largest)):
        new = _drawn_neighbours(adjacency, reached, is_found_N, generator)
        if len(new) == 0:
            # All that the last level led to is there: go on from what earlier levels left out.
            reached = np.flatnonzero(is_found_N)
            continue
        reached = generator.permutation(new)[: max_nodes - num_found]
        is_found_N[reached] = True
        num_found += len(reached)
    return np.flatnonzero(is_found_N)


def _drawn_neighbours(
    adjacency: scipy.sparse.csr_array,
    nodes: NDArray[np.int64],
    is_found_N: NDArray[np.bool_],
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """Return the distinct neighbours not found yet of some nodes, of each node at most `_BRANCHES`, ascending."""
    rows = adjacency[nodes]
    row_E = np.repeat(np.arange(len(nodes)), np.diff(rows.indptr))
    is_new_E = ~is_found_N[rows.indices]
    row_E, neighbour_E = row_E[is_new_E], rows.indices[is_new_E].astype(np.int64)
    order_E = np.lexsort((generator.random(len(row_E)), row_E))
    row_E, neighbour_E = row_E[order_E], neighbour_E[order_E]
    # Place of each neighbour in its row: its position less that where its row begins.
    place_E = np.arange(len(row_E)) - np.searchsorted(row_E, row_E)
    return np.unique(neighbour_E[place_E < _BRANCHES])
