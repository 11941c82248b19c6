"""Counts the rows that ranks get and pass on when each row of another host enters a host once."""

import numpy as np
from numpy.typing import NDArray

from simulator.hosts import host_needs, takers
from simulator.readers.graphs import Graph, sources_into
from simulator.specs.hosts import HostRows


def host_rows(graph: Graph, part_N: NDArray[np.integer], num_parts: int, *, ranks_per_host: int) -> HostRows:
    """Return the rows that travel between ranks, of which rank r owns part r, counted exactly.

    Args:
        part_N: part of each node.
        ranks_per_host: ranks 0 to `ranks_per_host` - 1 sit on the first host, and so on.
    """
    needed = [_needed_by(graph, part_N, part) for part in range(num_parts)]
    rows_from = np.zeros((num_parts, num_parts), np.int64)
    passed_from = np.zeros_like(rows_from)
    for first in range(0, num_parts, ranks_per_host):
        host = first // ranks_per_host
        needs_RN = host_needs(needed, part_N, host=host, ranks_per_host=ranks_per_host)
        taker_N = takers(needs_RN, part_N)
        for place, needs_N in enumerate(needs_RN):
            rank = first + place
            own_host = needed[rank][part_N[needed[rank]] // ranks_per_host == host]
            got = np.concatenate([own_host, np.flatnonzero(taker_N == place)])
            rows_from[rank] = np.bincount(part_N[got], minlength=num_parts)
            passers = taker_N[needs_N & (taker_N != place)]
            passed_from[rank, first : first + len(needs_RN)] = np.bincount(passers, minlength=len(needs_RN))
    return HostRows(
        ranks_per_host=ranks_per_host,
        rows_from=tuple(tuple(row) for row in rows_from.tolist()),
        passed_rows_from=tuple(tuple(row) for row in passed_from.tolist()),
    )


def _needed_by(graph: Graph, part_N: NDArray[np.integer], part: int) -> NDArray[np.int64]:
    """Return the nodes of other parts that a part's nodes attend to, ascending."""
    is_needed_N = np.zeros(graph.num_nodes, dtype=np.bool_)
    is_needed_N[sources_into(graph, np.flatnonzero(part_N == part))] = True
    return np.flatnonzero(is_needed_N & (part_N != part))
