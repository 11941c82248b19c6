"""What an order of nodes is worth to attention, predicted and measured side by side.

    python -m tests.bench.order --device cpu --json figures.json
    python -m tests.bench.order --cells

The first form times attention of 8 heads of 16 numbers, forward and backward, with the nodes of each graph in each
order, one order after another in every repetition, and gives medians of the ratios to the natural order. Graphs whose
name ends in "shuffled" have lost what order they had; so have generated ones. `--cells` shows what METIS cells of other
sizes spare.
"""

import argparse
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from executor.attention.edges import edge_attention
from executor.attention.graph import EdgeGraph
from executor.data import build_rank_data
from executor.environment import environment, local_cluster
from executor.measure.computes import synchronize
from planner import order
from planner.order import choose_order, order_graph
from planner.partition import partition_graph
from simulator.readers.generators import materialise
from simulator.readers.graphs import Graph, read_graph, rows_by_target
from simulator.readers.locality import locality
from simulator.readers.orders import read_order
from simulator.specs.cluster import DeviceKind
from simulator.specs.graph import CommunityGraph, GraphFile, GraphSource, RmatGraph
from simulator.specs.model import ModelSpec
from simulator.specs.order import NodeOrder
from simulator.specs.plan import Exchange, Plan, Recompute
from simulator.specs.search import SearchSpec
from simulator.specs.units import Dtype
from tests.bench.prediction import DATA
from tests.bench.result import Better, Figure, print_figures, write_figures

HEADS, HEAD_SIZE = 8, 16
MODEL = ModelSpec(width=HEADS * HEAD_SIZE, num_heads=HEADS, num_layers=1, feed_forward_width=128)
REPETITIONS = 10
SHUFFLED = " shuffled"
FILES = ("tolokers", "amazon-photo", "coauthor-physics", "wordnet-synsets", "cnr-2000")
GRAPHS: dict[DeviceKind, dict[str, GraphSource]] = {
    DeviceKind.CPU: {
        **{f"{name}{end}": GraphFile(path=str(DATA / f"{name}.npz")) for name in FILES for end in ("", SHUFFLED)},
        "rmat-170k": RmatGraph(num_nodes=170_000, num_edges=1_200_000),
        "community-200k": CommunityGraph(num_nodes=200_000, num_edges=2_000_000, num_classes=200),
    },
    DeviceKind.CUDA: {
        "rmat-170k": RmatGraph(num_nodes=170_000, num_edges=1_200_000),
        "community-500k": CommunityGraph(num_nodes=500_000, num_edges=5_000_000, num_classes=500),
        "community-230k dense": CommunityGraph(num_nodes=230_000, num_edges=25_000_000, num_classes=64),
    },
}


def shuffled(graph: Graph) -> Graph:
    """Return the graph with its nodes in an arbitrary order; only its edges are of use then."""
    name_N = np.random.default_rng(0).permutation(graph.num_nodes)
    indptr_N, source_E = rows_by_target(name_N[graph.source_E], name_N[graph.target_E], num_nodes=graph.num_nodes)
    return dataclasses.replace(graph, indptr_N=indptr_N, source_E=source_E)


def graph_of(name: str, source: GraphSource, folder: Path) -> Graph:
    """Return a graph, made in `folder` if it is generated."""
    file = source if isinstance(source, GraphFile) else materialise(source, folder)
    graph = read_graph(file, base=folder)[1]
    return shuffled(graph) if name.endswith(SHUFFLED) else graph


def edges_in(graph: Graph, order_N: np.ndarray | None, device: torch.device) -> EdgeGraph:
    """Return the edges as a rank that holds the whole graph lays them out."""
    data = build_rank_data(
        dataclasses.replace(graph, features=np.zeros((graph.num_nodes, 1), dtype=np.float32)),
        None,
        np.zeros(graph.num_nodes, dtype=np.int64),
        order_N=order_N,
        graph_rank=0,
        exchanges=frozenset({Exchange.NONE}),
        degree_buckets=False,
        group=None,
        num_ranks=1,
        num_train_rows_of_step=1,
        dtype=torch.float32,
        device=device,
    )
    return data.edges[Exchange.NONE]


def seconds_by_order(edges: dict[NodeOrder, EdgeGraph], dtype: torch.dtype) -> dict[NodeOrder, list[float]]:
    """Return seconds of attention, forward and backward, in every repetition; the first one warms up."""
    device = edges[NodeOrder.NATURAL].device
    shape = (edges[NodeOrder.NATURAL].num_targets, HEADS, HEAD_SIZE)
    q, k, v, grad = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    found: dict[NodeOrder, list[float]] = {kind: [] for kind in edges}
    for repetition in range(REPETITIONS + 1):
        for kind, graph in edges.items():
            synchronize(device)
            started = time.perf_counter()
            torch.autograd.grad(edge_attention(q, k, v, graph), leaves, grad)
            synchronize(device)
            if repetition:
                found[kind].append(time.perf_counter() - started)
    return found


def compared(name: str, graph: Graph, kind: DeviceKind, folder: Path) -> Iterator[Figure]:
    """Yield what orders of a graph are worth."""
    dtype = Dtype.BFLOAT16 if kind is DeviceKind.CUDA else Dtype.FLOAT32
    plan = Plan(
        data_parallel_degree=1,
        graph_parallel_degree=1,
        partition=partition_graph(graph, 1, seed=0, folder=folder),
        parts_per_batch=1,
        exchange=(Exchange.NONE,),
        recompute=(Recompute.NONE,),
        precision=dtype,
    )
    # So that no order is left out, nor the natural one kept.
    search = SearchSpec(orders=tuple(each for each in NodeOrder if each is not NodeOrder.NATURAL))
    _, tried = choose_order(graph, plan, MODEL, local_cluster(kind).device, search, folder=folder)
    edges = {}
    for found in tried:
        spec = order_graph(graph, found.kind, seed=0, folder=folder)
        order_N = read_order(spec, folder=folder, num_nodes=graph.num_nodes)
        edges[found.kind] = edges_in(graph, order_N, torch.device(kind))
    seconds = seconds_by_order(edges, torch.bfloat16 if dtype is Dtype.BFLOAT16 else torch.float32)
    natural = seconds[NodeOrder.NATURAL]
    yield reported(f"{name}: natural", statistics.median(natural) * 1e3, "ms")
    for found in tried[1:]:
        ratios = [mine / other for mine, other in zip(seconds[found.kind], natural, strict=True)]
        shown = f"{name}: {found.kind}"
        yield reported(f"{shown}, measured over natural", statistics.median(ratios), "ratio")
        yield reported(f"{shown}, predicted over natural", found.relative_seconds, "ratio")


def reported(name: str, value: float, unit: str) -> Figure:
    return Figure(name=name, value=value, unit=unit, bar=None, better=Better.LOWER)


def cells(folder: Path) -> Iterator[Figure]:
    """Yield what METIS cells of several sizes spare."""
    for name in FILES:
        graph = graph_of(name + SHUFFLED, GRAPHS[DeviceKind.CPU][name], folder)
        for num_nodes in (32, 64, 128, 256, 1024):
            with patch.object(order, "CELL_NODES", num_nodes), tempfile.TemporaryDirectory() as fresh:
                spec = order_graph(graph, NodeOrder.METIS, seed=0, folder=Path(fresh))
                order_N = read_order(spec, folder=Path(fresh), num_nodes=graph.num_nodes)
            assert order_N is not None
            found = locality(graph, order_N, cache_rows=(1024,))
            yield reported(f"{name}, cells of {num_nodes}: edges over pairs, windows of 16", found.window_16_reuse, "")
            yield reported(f"{name}, cells of {num_nodes}: beyond 1,024 rows", found.beyond_cache_ratios[0], "")


def main(kind: DeviceKind, *, show_cells: bool, json: Path | None) -> None:
    """Measure and print, and write a file if one is named."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures = list(cells(folder)) if show_cells else []
        for graph_name, source in {} if show_cells else GRAPHS[kind].items():
            figures += compared(graph_name, graph_of(graph_name, source, folder), kind, folder)
            print_figures(figures[-7:])
    if show_cells:
        print_figures(figures)
    if json is not None:
        write_figures(json, figures, dict(environment(kind)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=DeviceKind, choices=list(DeviceKind), default=DeviceKind.CPU)
    parser.add_argument("--cells", action="store_true", help="sizes of METIS cells instead")
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    main(arguments.device, show_cells=arguments.cells, json=arguments.json)
