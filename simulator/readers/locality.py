"""How close by attention finds the rows that it gathers, when targets are worked on in an order of nodes.

Each edge reads its source's row of keys and values. A row is spared where several targets of a window of 16 or 64 share
it, and comes out of the cache where few other rows were read since it was last.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from simulator.readers.graphs import Graph, sources_into

# Edges that a measure may look at; on more it looks at windows that are evenly spread over them.
MAX_EDGES = 4_000_000
_MIN_PROBES, _MAX_PROBES = 16, 256
# Its multiples, without their whole parts, spread evenly over [0, 1) wherever one stops.
_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Locality:
    """What an order of nodes spares the gathers of attention.

    Attributes:
        window_16_reuse, window_64_reuse: edges over distinct pairs of a source and a window of so many targets.
        beyond_cache_ratios: shares of edges whose row comes from beyond a cache, one a cache.
    """

    window_16_reuse: float
    window_64_reuse: float
    beyond_cache_ratios: tuple[float, ...]


def locality(
    graph: Graph, order_N: NDArray[np.integer], *, cache_rows: Sequence[int], max_edges: int = MAX_EDGES
) -> Locality:
    """Return what an order spares.

    Args:
        order_N: the nodes in order.
        cache_rows: rows of keys and values that each cache holds.
        max_edges: on a graph with more, about so many edges are looked at for each number.
    """
    return Locality(
        window_16_reuse=window_reuse(graph, order_N, num_rows=16, max_edges=max_edges),
        window_64_reuse=window_reuse(graph, order_N, num_rows=64, max_edges=max_edges),
        beyond_cache_ratios=tuple(
            beyond_cache_ratio(graph, order_N, cache_rows=rows, max_edges=max_edges) for rows in cache_rows
        ),
    )


def window_reuse(graph: Graph, order_N: NDArray[np.integer], *, num_rows: int, max_edges: int = MAX_EDGES) -> float:
    """Return edges over distinct pairs of a source and a window of targets: 1 if no target shares a source.

    Args:
        order_N: the nodes in order.
        num_rows: targets of a window.
        max_edges: on a graph with more, about so many edges are looked at.
    """
    num_windows = -(-graph.num_nodes // num_rows)
    num_looked_at = -(-num_windows * min(max_edges, graph.num_edges) // max(graph.num_edges, 1))
    windows = np.arange(num_looked_at) * num_windows // max(num_looked_at, 1)
    row_R = (windows[:, None] * num_rows + np.arange(num_rows)).reshape(-1)
    row_R = row_R[row_R < graph.num_nodes]
    node_R = order_N[row_R]
    window_E = np.repeat(row_R // num_rows, graph.indptr_N[node_R + 1] - graph.indptr_N[node_R])
    pair_E = window_E * graph.num_nodes + sources_into(graph, node_R)
    pair_E.sort()
    num_pairs = int(np.count_nonzero(np.diff(pair_E, prepend=-1)))
    return len(pair_E) / num_pairs if num_pairs else 1.0


def beyond_cache_ratio(
    graph: Graph, order_N: NDArray[np.integer], *, cache_rows: int, max_edges: int = MAX_EDGES
) -> float:
    """Return the share of edges whose row comes from beyond a cache that holds the rows read last.

    A pass begins with none of its rows in the cache, so each row comes from beyond it once at least. Otherwise passes
    follow on one another, and the cache evicts the row that was not read for longest. What it holds is looked at
    where edges that are evenly spread begin; they and the next ones, a sixteenth of those that filled it, tell how many
    reads miss it.

    Args:
        order_N: the nodes in order.
        cache_rows: rows that the cache holds.
        max_edges: about so many edges are looked at.
    """
    num_read, num_edges = _num_read(graph), graph.num_edges
    if num_read <= cache_rows:
        return first_read_ratio(graph)
    if cache_rows == 0:
        return 1.0
    end_N = np.cumsum(graph.indptr_N[order_N + 1] - graph.indptr_N[order_N])
    ratios: list[float] = []
    num_looked_at = 0
    while len(ratios) < _MIN_PROBES or (len(ratios) < _MAX_PROBES and num_looked_at < max_edges):
        edge = int(num_edges * ((len(ratios) + 0.5) * _GOLDEN_RATIO % 1))
        ratio, filled = _ratio_of_misses(graph, order_N, end_N, edge, cache_rows)
        ratios.append(ratio)
        num_looked_at += filled
    return max(float(np.mean(ratios)), num_read / num_edges)


def first_read_ratio(graph: Graph) -> float:
    """Return the share of edges that read a row for the first time in a pass, which no order can change."""
    return _num_read(graph) / max(graph.num_edges, 1)


def _num_read(graph: Graph) -> int:
    """Return the rows that edges read."""
    is_read_N = np.zeros(graph.num_nodes, dtype=np.bool_)
    is_read_N[graph.source_E] = True
    return int(np.count_nonzero(is_read_N))


def _ratio_of_misses(
    graph: Graph, order_N: NDArray[np.integer], end_N: NDArray[np.integer], edge: int, cache_rows: int
) -> tuple[float, int]:
    """Return the share of rows that a cache does not hold, of those read from an edge on.

    Behind it come the edges that filled the cache.
    """
    num_before = 2 * cache_rows
    while True:
        before_E = _sources_between(graph, order_N, end_N, edge - num_before, edge)[::-1]
        _, last_read_R = np.unique(before_E, return_index=True)
        if len(last_read_R) >= cache_rows:
            break
        num_before *= 2
    filled = int(np.partition(last_read_R, cache_rows - 1)[cache_rows - 1]) + 1
    is_held_N = np.zeros(graph.num_nodes, dtype=np.bool_)
    is_held_N[before_E[:filled]] = True
    num_after = max(filled // 16, 1)
    after_E = _sources_between(graph, order_N, end_N, edge, edge + num_after)
    return int(np.count_nonzero(~is_held_N[np.unique(after_E)])) / num_after, filled


def _sources_between(
    graph: Graph, order_N: NDArray[np.integer], end_N: NDArray[np.integer], first: int, last: int
) -> NDArray[np.int32]:
    """Return the sources of edges from `first` to before `last`, counted in an order that goes round and round.

    Args:
        end_N: edges until and with each target of the order.
    """
    (first_turn, first_edge), (last_turn, last_edge) = (divmod(edge, int(end_N[-1])) for edge in (first, last - 1))
    first_row, last_row = np.searchsorted(end_N, (first_edge, last_edge), side="right").tolist()
    rows = np.arange(first_turn * len(order_N) + first_row, last_turn * len(order_N) + last_row + 1)
    skipped = first_edge - int(end_N[first_row - 1]) if first_row else first_edge
    return sources_into(graph, order_N.take(rows, mode="wrap"))[skipped : skipped + last - first]
