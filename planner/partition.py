"""Cuts a graph into parts of equal work, and counts what each part owns and what it needs of the others.

Work is edges: METIS gives each part about the same sum of `incoming edges + 1` over its nodes and cuts few edges. On
skewed graphs that leaves the numbers of nodes unequal, and the cut is larger than with equal nodes: balance is paid in
halo, which the planner prices. Nodes without neighbours go last, to where owned plus halo rows are fewest.
"""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from planner.hosts import host_rows
from planner.metis import metis_parts
from simulator.errors import SpecError
from simulator.readers.graphs import Graph, sources_into, undirected_adjacency
from simulator.readers.partitions import load_parts, parts_sha256
from simulator.readers.stores import arrays_sha256, save_npy
from simulator.specs.checks import require_at_least
from simulator.specs.plan import PartitionMethod, PartitionSpec, PartSpec
from simulator.specs.program import MAX_SHORT_EDGES

logger = logging.getLogger(__name__)

# METIS takes its seed as a C int.
MAX_SEED = 2**31 - 1


def partition_graph(
    graph: Graph, num_parts: int, *, seed: int, folder: Path, ranks_per_host: int | None = None
) -> PartitionSpec:
    """Return a cut of a graph, the node-to-part array of which is written to `folder` for `read_partition`.

    The file's name holds the number of parts, the seed, the method and a hash of the edges. METIS's result for them
    is used again if the file is there. If METIS fails, crashes, stalls or would not fit into memory, a warning is
    logged and the parts are stripes. One part needs no file: its path is empty, its hash that of zeros.

    Args:
        graph: the prepared graph.
        num_parts: parts, some of which stay empty if there are fewer nodes.
        seed: of the partitioner; the same one gives the same parts.
        folder: the plan's.
        ranks_per_host: count what hosts of so many ranks, one a part, need of each other; None where none of the plans
            to be made exchanges hierarchically.

    Raises:
        SpecError: if `num_parts` or `seed` is out of range.
    """
    require_at_least(1, num_parts=num_parts)
    require_at_least(0, seed=seed)
    if seed > MAX_SEED:
        raise SpecError(f"seed must be <= {MAX_SEED}, got {seed}")
    if num_parts == 1:
        part_N = np.zeros(graph.num_nodes, dtype=np.int32)
        return _spec(graph, part_N, num_parts=1, method=PartitionMethod.SINGLE, seed=seed, path="")
    folder.mkdir(parents=True, exist_ok=True)
    edges_sha256 = arrays_sha256({"indptr": graph.indptr_N, "source": graph.source_E})
    name = f"partition-{num_parts}-{seed}-{{}}-{edges_sha256[:12]}.npy"
    path = name.format(PartitionMethod.METIS)
    try:
        part_N = load_parts(folder / path, num_nodes=graph.num_nodes, num_parts=num_parts)
        method = PartitionMethod.METIS
    except SpecError:  # not there, or damaged
        method, part_N = _cut(graph, num_parts, seed=seed, folder=folder)
        path = name.format(method)
        save_npy(part_N, folder / path)
    found = _spec(graph, part_N, num_parts=num_parts, method=method, seed=seed, path=path)
    if ranks_per_host is None:
        return found
    return replace(found, hosts=host_rows(graph, part_N, num_parts, ranks_per_host=ranks_per_host))


def part_specs(graph: Graph, part_N: NDArray[np.int32], num_parts: int) -> tuple[PartSpec, ...]:
    """Return the parts in numbers, counted exactly.

    Args:
        graph: the prepared graph.
        part_N: part of each node.
        num_parts: parts, some of which may be empty.
    """
    num_entries_N = np.zeros(graph.num_nodes, dtype=np.int64)
    if isinstance(graph.features, scipy.sparse.csr_array):
        num_entries_N = np.diff(graph.features.indptr)
    by_part_N = np.argsort(part_N, kind="stable")
    borders = np.searchsorted(part_N[by_part_N], np.arange(num_parts + 1))
    is_halo_N = np.zeros(graph.num_nodes, dtype=np.bool_)
    degree_N = graph.in_degree_N
    out_degree_N = np.bincount(graph.source_E, minlength=graph.num_nodes)
    parts = []
    for part in range(num_parts):
        owned = by_part_N[borders[part] : borders[part + 1]]
        source_E = sources_into(graph, owned)
        owner_E = part_N[source_E]
        # Flags find the distinct ones faster than np.unique, which hashes: 0.03 s against 7 s for 9 million edges.
        is_halo_N[source_E[owner_E != part]] = True
        halo = np.flatnonzero(is_halo_N)
        is_halo_N[halo] = False
        of_long_target_E = np.repeat(degree_N[owned] > MAX_SHORT_EDGES, degree_N[owned])
        edges_from_N = np.bincount(source_E, minlength=graph.num_nodes)
        of_long_source_E = edges_from_N[source_E] > MAX_SHORT_EDGES
        parts.append(
            PartSpec(
                num_nodes=len(owned),
                num_train_nodes=int(np.count_nonzero(graph.train_mask_N[owned])),
                num_feature_entries=int(num_entries_N[owned].sum()),
                edges_from=tuple(np.bincount(owner_E, minlength=num_parts).tolist()),
                halo_rows_from=tuple(np.bincount(part_N[halo], minlength=num_parts).tolist()),
                edges_of_long_targets_from=tuple(np.bincount(owner_E[of_long_target_E], minlength=num_parts).tolist()),
                edges_of_long_sources_from=tuple(np.bincount(owner_E[of_long_source_E], minlength=num_parts).tolist()),
                inner_edges_of_long_targets=_edges_of_long_rows(owner_E == part, degree_N[owned]),
                outer_edges_of_long_targets=_edges_of_long_rows(owner_E != part, degree_N[owned]),
                edges_out_of_long_sources=_sum_above(out_degree_N[owned], MAX_SHORT_EDGES),
                num_boundary_nodes=_rows_with_edges(owner_E != part, degree_N[owned]),
                boundary_nodes_from=tuple(_boundary_rows(owner_E, degree_N[owned], part, num_parts)),
            )
        )
    return tuple(parts)


def _edges_of_long_rows(is_kept_E: NDArray[np.bool_], degree_N: NDArray[np.int64]) -> int:
    """Return how many of the edges that are kept are of rows that keep many.

    Args:
        is_kept_E: of each edge, by row.
        degree_N: edges of each row before.
    """
    return _sum_above(_kept_by_row(is_kept_E, degree_N), MAX_SHORT_EDGES)


def _rows_with_edges(is_kept_E: NDArray[np.bool_], degree_N: NDArray[np.int64]) -> int:
    """Return how many rows keep an edge; arguments as above."""
    return int(np.count_nonzero(_kept_by_row(is_kept_E, degree_N)))


def _boundary_rows(owner_E: NDArray[np.int32], degree_N: NDArray[np.int64], part: int, num_parts: int) -> list[int]:
    """Return how many rows have an edge from each other part.

    Args:
        owner_E: part of each edge's source, by row.
        degree_N: edges of each row.
    """
    outer_E = owner_E != part
    row_E = np.repeat(np.arange(len(degree_N)), degree_N)[outer_E]
    is_there = np.zeros((num_parts, len(degree_N)), dtype=np.bool_)
    is_there[owner_E[outer_E], row_E] = True
    return [int(count) for count in is_there.sum(axis=1)]


def _kept_by_row(is_kept_E: NDArray[np.bool_], degree_N: NDArray[np.int64]) -> NDArray[np.int64]:
    kept_before = np.concatenate(([0], np.cumsum(is_kept_E)))
    return np.asarray(np.diff(kept_before[np.concatenate(([0], np.cumsum(degree_N)))]))


def _sum_above(counts: NDArray[np.int64], bound: int) -> int:
    return int(counts[counts > bound].sum())


def _spec(
    graph: Graph, part_N: NDArray[np.int32], *, num_parts: int, method: PartitionMethod, seed: int, path: str
) -> PartitionSpec:
    """Return the cut in numbers."""
    return PartitionSpec(
        method=method,
        seed=seed,
        path=path,
        sha256=parts_sha256(part_N),
        parts=part_specs(graph, part_N, num_parts),
    )


def _cut(graph: Graph, num_parts: int, *, seed: int, folder: Path) -> tuple[PartitionMethod, NDArray[np.int32]]:
    """Return who cut the graph and the part of each node."""
    adjacency = undirected_adjacency(graph)
    weight_N = graph.in_degree_N + 1
    joined_N = np.diff(adjacency.indptr) > 0
    joined = np.flatnonzero(joined_N)
    if len(joined) <= num_parts:
        return PartitionMethod.STRIPES, _stripes(weight_N, num_parts)
    new_index_N = np.cumsum(joined_N, dtype=adjacency.indices.dtype) - 1
    parts = metis_parts(
        np.concatenate(([0], adjacency.indptr[joined + 1])),
        new_index_N[adjacency.indices],
        weight_N[joined],
        num_parts=num_parts,
        seed=seed,
        folder=folder,
    )
    if isinstance(parts, str):
        logger.warning("METIS could not cut the graph into %d parts: %s; stripes are used instead", num_parts, parts)
        return PartitionMethod.STRIPES, _stripes(weight_N, num_parts)
    part_N = np.zeros(graph.num_nodes, dtype=np.int32)
    part_N[joined] = parts
    num_isolated = graph.num_nodes - len(joined)
    if num_isolated > 0:
        halo_rows = [part.num_halo_rows for part in part_specs(graph, part_N, num_parts)]
        rows = np.bincount(parts, minlength=num_parts) + halo_rows
        part_N[~joined_N] = np.repeat(np.arange(num_parts, dtype=np.int32), _levelling(rows, num_isolated))
    return PartitionMethod.METIS, part_N


def _stripes(weight_N: NDArray[np.int64], num_parts: int) -> NDArray[np.int32]:
    """Return parts that are runs of nodes with about equal sums of weights: each node goes where its middle lies."""
    end_N = np.cumsum(weight_N)
    part_N = (2 * end_N - weight_N) * num_parts // (2 * end_N[-1])
    return np.asarray(part_N, dtype=np.int32)


def _levelling(rows: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Return how many of `count` nodes each part gets so that the parts with the fewest rows catch up."""
    order = np.argsort(rows, kind="stable")
    ordered, sums = rows[order], np.cumsum(rows[order])
    # The k parts with the fewest rows can all reach the k-th one's rows.
    k = int(np.count_nonzero(np.arange(1, len(rows) + 1) * ordered - sums <= count))
    level, rest = divmod(int(sums[k - 1]) + count, k)
    added = np.zeros_like(rows)
    added[order[:k]] = level - ordered[:k]
    added[order[:rest]] += 1
    return added
