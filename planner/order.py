"""Orders the nodes that a rank holds, so that attention finds the rows that it gathers close by.

Targets that share sources then follow on one another. `choose_order` measures on the arrays how many gathered rows an
order leaves to come from beyond the cache (`simulator/readers/locality.py`), predicts the time of gathering from it,
and leaves the natural order only for a gain that is worth having.
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

import numpy as np
import scipy.sparse
import scipy.sparse.csgraph
from numpy.typing import NDArray

from planner.metis import metis_parts
from simulator.errors import SpecError
from simulator.exchanges import rank_columns
from simulator.readers.graphs import Graph, undirected_adjacency
from simulator.readers.locality import Locality, beyond_cache_ratio, first_read_ratio, locality
from simulator.readers.orders import load_order, order_sha256, read_order
from simulator.readers.partitions import read_partition
from simulator.readers.stores import arrays_sha256, save_npy
from simulator.specs.cluster import DeviceKind, DeviceSpec
from simulator.specs.model import ModelSpec
from simulator.specs.order import NodeOrder, OrderSpec, RankedOrder
from simulator.specs.plan import Plan
from simulator.specs.search import SearchSpec

logger = logging.getLogger(__name__)

# Nodes of a METIS cell. Of 32 to 1024, 64 is best or near it both in shared sources of windows of 16 and in rows from
# beyond a cache of 1,024, on five real graphs: python -m tests.bench.order --cells.
CELL_NODES = 64
# Predicted gain below which the natural order stays.
MIN_GAIN_RATIO = 0.05
# How much faster an edge is whose row comes out of the cache. GPU, bound by its gathers: rows of 512 bytes at random on
# an H200, 8.7 TB/s from L2 and 4.0 TB/s from memory (../shared/measured/h200_attention/log.txt). CPU, with arithmetic
# beside them: from attention, forward and backward, on two cores of an AMD EPYC (python -m tests.bench.order). How near
# predictions came is told in README.md beside this file.
CACHE_SPEEDUP = {DeviceKind.CUDA: 8.7 / 4.0, DeviceKind.CPU: 1.4}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gathers:
    """What the ranks of a plan read in attention, and from where.

    Attributes:
        graph: with the edges that a rank keeps.
        part_N: part of each node; a rank holds one part, or one part after the other.
        row_bytes: of a node's keys and values.
        cache_rows: of them in a device's cache.
        cache_speedup: of rows out of the cache.
    """

    graph: Graph
    part_N: NDArray[np.int32]
    row_bytes: int
    cache_rows: int
    cache_speedup: float

    def seconds(self, ratio: float) -> float:
        """Return the time of an edge in units of one whose row comes from beyond the cache.

        No kernel reads a row once for all targets of a window; with one, it would read `1 / reuse` rows an edge.
        """
        return ratio + (1 - ratio) / self.cache_speedup

    def rows(self, order_N: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return the nodes as ranks hold them: part by part, each in the order."""
        return order_N[np.argsort(self.part_N[order_N], kind="stable")]

    def ranked(self, kind: NodeOrder, order_N: NDArray[np.integer], natural: RankedOrder | None) -> RankedOrder:
        """Return what an order spares, compared with the natural one."""
        found = locality(self.graph, self.rows(order_N), cache_rows=(self.cache_rows,))
        (ratio,) = found.beyond_cache_ratios
        return RankedOrder(
            kind=kind,
            row_bytes=self.row_bytes,
            window_16_reuse=found.window_16_reuse,
            window_64_reuse=found.window_64_reuse,
            beyond_cache_ratio=ratio,
            relative_seconds=self.seconds(ratio) / self.seconds(natural.beyond_cache_ratio) if natural else 1.0,
        )

    def may_gain(self, natural: RankedOrder) -> bool:
        """Return whether a cache that holds everything, and so perhaps some order, would gain enough."""
        least_seconds = self.seconds(first_read_ratio(self.graph)) / self.seconds(natural.beyond_cache_ratio)
        return self.cache_rows > 0 and least_seconds <= 1 - MIN_GAIN_RATIO


def choose_order(
    graph: Graph,
    plan: Plan,
    model: ModelSpec,
    device: DeviceSpec,
    search: SearchSpec,
    *,
    folder: Path,
    on_progress: Callable[[str], None] = logger.info,
) -> tuple[OrderSpec, tuple[RankedOrder, ...]]:
    """Return the order that a plan is to have, and what each one that was tried spares, the natural one first.

    The natural order stays unless another one is predicted to save 5 % of the gathers' time. None is tried where even
    a cache that holds every row would not, and no question is asked where only one may be chosen. If METIS fails, a
    warning is logged and its order is left out.

    Args:
        graph: the prepared graph.
        plan: its partition lies in `folder`, and a rank's rows are ordered inside its parts.
        search: which orders may be chosen, and the seed of METIS.
        folder: the plan's; order files are written into it.
    """
    if len(search.orders) == 1:
        return order_graph(graph, search.orders[0], seed=search.seed, folder=folder), ()
    gathers = _gathers_of(graph, plan, model, device, folder)
    natural = gathers.ranked(NodeOrder.NATURAL, np.arange(graph.num_nodes), None)
    others: dict[OrderSpec, RankedOrder] = {}
    if NodeOrder.NATURAL not in search.orders or gathers.may_gain(natural):
        for kind in search.orders:
            if kind is not NodeOrder.NATURAL:
                on_progress(f"ordering the nodes: {kind}")
                spec = order_graph(graph, kind, seed=search.seed, folder=folder)
                order_N = read_order(spec, folder=folder, num_nodes=graph.num_nodes)
                if order_N is not None:
                    others[spec] = gathers.ranked(kind, order_N, natural)
    best = min(others, key=lambda spec: others[spec].relative_seconds, default=OrderSpec())
    if NodeOrder.NATURAL in search.orders and others and others[best].relative_seconds > 1 - MIN_GAIN_RATIO:
        best = OrderSpec()
    return best, (natural, *others.values())


def beyond_cache_ratio_of_plan(
    graph: Graph, plan: Plan, model: ModelSpec, device: DeviceSpec, *, folder: Path
) -> float:
    """Return the share of the rows that attention gathers which come from beyond a device's cache, as a plan runs it.

    Args:
        graph: the prepared graph.
        plan: its partition, and its order if it has one, lie in `folder`.
    """
    gathers = _gathers_of(graph, plan, model, device, folder)
    order_N = read_order(plan.order, folder=folder, num_nodes=graph.num_nodes)
    rows_N = gathers.rows(np.arange(graph.num_nodes) if order_N is None else order_N)
    return beyond_cache_ratio(gathers.graph, rows_N, cache_rows=gathers.cache_rows)


def _gathers_of(graph: Graph, plan: Plan, model: ModelSpec, device: DeviceSpec, folder: Path) -> _Gathers:
    """Return what the ranks of a plan, whose partition lies in `folder`, read in attention."""
    part_N = read_partition(plan.partition, folder=folder, num_nodes=graph.num_nodes)
    row_bytes = 2 * rank_columns(plan, model) * plan.precision.num_bytes
    return _Gathers(
        graph=graph if plan.is_full_graph else _inside_parts(graph, part_N),
        part_N=part_N,
        row_bytes=row_bytes,
        cache_rows=device.cache_bytes // row_bytes,
        cache_speedup=CACHE_SPEEDUP[device.kind],
    )


def order_localities(
    graph: Graph,
    *,
    seed: int,
    folder: Path,
    cache_rows: Sequence[int],
    on_progress: Callable[[str], None] = logger.info,
) -> dict[NodeOrder, Locality]:
    """Return what each order of a graph spares; that of METIS is left out, with a warning, if METIS fails.

    Args:
        seed: of METIS.
        folder: order files are written into it.
        cache_rows: rows of keys and values that each cache holds.
    """
    found = {}
    for kind in NodeOrder:
        on_progress(f"ordering the nodes: {kind}")
        spec = order_graph(graph, kind, seed=seed, folder=folder)
        order_N = read_order(spec, folder=folder, num_nodes=graph.num_nodes)
        if spec.kind is kind:
            nodes_N = np.arange(graph.num_nodes) if order_N is None else order_N
            found[kind] = locality(graph, nodes_N, cache_rows=cache_rows)
    return found


def order_graph(graph: Graph, kind: NodeOrder, *, seed: int, folder: Path) -> OrderSpec:
    """Return an order of a graph's nodes, the array of which is written to `folder` for `read_order`.

    The file's name holds the kind, the seed and a hash of the edges; a file that is there is used again. If METIS
    fails, a warning is logged and the order is the natural one.

    Args:
        seed: of METIS; the same one gives the same order.
        folder: the plan's.
    """
    if kind is NodeOrder.NATURAL:
        return OrderSpec()
    edges_sha256 = arrays_sha256({"indptr": graph.indptr_N, "source": graph.source_E})
    path = f"order-{kind}-{seed}-{edges_sha256[:12]}.npy"
    try:
        order_N = load_order(folder / path, num_nodes=graph.num_nodes)
    except SpecError:  # not there, or damaged
        folder.mkdir(parents=True, exist_ok=True)
        found = _nodes_in_order(graph, kind, seed, folder)
        if isinstance(found, str):
            logger.warning("METIS could not order the nodes: %s; the natural order is used instead", found)
            return OrderSpec()
        order_N = found
        save_npy(order_N, folder / path)
    return OrderSpec(kind=kind, path=path, sha256=order_sha256(order_N))


def _nodes_in_order(graph: Graph, kind: NodeOrder, seed: int, folder: Path) -> NDArray[np.int32] | str:
    """Return all nodes in an order, or why METIS gave none."""
    match kind:
        case NodeOrder.NATURAL:
            return np.arange(graph.num_nodes, dtype=np.int32)
        case NodeOrder.DEGREE:
            return np.argsort(-graph.in_degree_N, kind="stable").astype(np.int32)
        case NodeOrder.REVERSE_CUTHILL_MCKEE:
            return _reverse_cuthill_mckee(undirected_adjacency(graph))
        case NodeOrder.METIS:
            adjacency = undirected_adjacency(graph)
            cell_N = _cells(adjacency, seed, folder)
            if isinstance(cell_N, str):
                return cell_N
            order_N = _reverse_cuthill_mckee(adjacency)
            return order_N[np.argsort(cell_N[order_N], kind="stable")]
        case _:
            assert_never(kind)


def _reverse_cuthill_mckee(adjacency: scipy.sparse.csr_array) -> NDArray[np.int32]:
    """Return the nodes in an order in which neighbours are near one another.

    Source: Cuthill and McKee, ACM 1969; George, 1971.
    """
    order_N = scipy.sparse.csgraph.reverse_cuthill_mckee(adjacency, symmetric_mode=True)
    return np.asarray(order_N, dtype=np.int32)


def _cells(adjacency: scipy.sparse.csr_array, seed: int, folder: Path) -> NDArray[np.int32] | str:
    """Return a small cell of METIS for each node, nodes without neighbours in the last one, or why METIS gave none.

    METIS numbers its parts by bisection, so that cells with near numbers are near in the graph too.
    """
    joined_N = np.diff(adjacency.indptr) > 0
    joined = np.flatnonzero(joined_N)
    num_cells = len(joined) // CELL_NODES
    cell_N = np.where(joined_N, 0, max(num_cells, 1)).astype(np.int32)
    if num_cells < 2:
        return cell_N
    new_index_N = np.cumsum(joined_N, dtype=adjacency.indices.dtype) - 1
    cells = metis_parts(
        np.concatenate(([0], adjacency.indptr[joined + 1])),
        new_index_N[adjacency.indices],
        np.ones(len(joined), dtype=np.int64),
        num_parts=num_cells,
        seed=seed,
        folder=folder,
    )
    if isinstance(cells, str):
        return cells
    cell_N[joined] = cells
    return cell_N


def _inside_parts(graph: Graph, part_N: NDArray[np.int32]) -> Graph:
    """Return a graph without the edges that leave a part, of which batches of a few parts keep few."""
    is_kept_E = part_N[graph.source_E] == part_N[graph.target_E]
    indptr_N = np.concatenate(([0], np.cumsum(is_kept_E)))[graph.indptr_N]
    return dataclasses.replace(graph, indptr_N=indptr_N, source_E=graph.source_E[is_kept_E])
