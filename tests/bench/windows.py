"""Attention with windows of rows against rows by themselves, and its memory, on one GPU.

    python -m tests.bench.windows --json figures.json     # one GPU, about a minute

Both run on the same inputs in one process; times are medians between CUDA events. Graphs have communities in the order
of their nodes, from few to many shared neighbours, and one has none. Rows by themselves are what a graph of one step
gets, so that is how they are asked for. Memory is the highest of forward and backward beyond inputs, results and the
prepared graph.
"""

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from executor.attention.edges import edge_attention
from executor.attention.graph import EdgeGraph
from executor.environment import environment
from simulator.specs.cluster import DeviceKind
from simulator.specs.units import MIB
from tests.bench.device_graphs import DeviceGraph, community_graph, rmat_graph
from tests.bench.result import Better, Figure, print_figures, write_figures

HEADS = ((8, 16), (8, 32))
# Nodes, edges, communities (0: R-MAT).
GRAPHS = {
    "rmat": (170_000, 2_300_000, 0),
    "degree 5": (1_000_000, 4_000_000, 60_000),
    "degree 21, 500 a community": (500_000, 10_000_000, 1_000),
    "degree 21, 100 a community": (500_000, 10_000_000, 5_000),
    "degree 21, 40 a community": (500_000, 10_000_000, 12_500),
    "degree 200": (200_000, 40_000_000, 500),
}
# Memory may be that of four outputs and 64 MiB.
SPARE_BYTES = 64 * MIB
MIN_SPEEDUP = 0.97  # windows may not be slower than rows by themselves, beyond what times vary by
NUM_ROUNDS = 9


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Queries, keys, values and the output's gradient, bf16."""

    rows: tuple[Tensor, Tensor, Tensor]
    grad_out: Tensor


def edge_graph(graph: DeviceGraph, *, is_sampled: bool) -> EdgeGraph:
    """Return a prepared graph; as of one step it has no windows."""
    edges = EdgeGraph(
        indptr_N1=graph.indptr_N1,
        source_E=graph.source_E.to(torch.int32),
        num_sources=graph.num_nodes,
        is_sampled=is_sampled,
    )
    _ = edges.work, edges.transpose.work, edges.windows, edges.transpose.windows
    return edges


def inputs_of(num_nodes: int, num_heads: int, head_size: int, generator: torch.Generator) -> Inputs:
    """Return random rows."""

    def rows() -> Tensor:
        shape = (num_nodes, num_heads, head_size)
        return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)

    q, k, v = (rows().requires_grad_() for _ in range(3))
    return Inputs(rows=(q, k, v), grad_out=rows())


def seconds(graph: EdgeGraph, inputs: Inputs) -> tuple[float, float]:
    """Return the seconds of one forward pass, and of forward and backward, behind work that hides their launch."""
    start, between, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    torch.cuda._sleep(4_000_000)
    start.record()
    out = edge_attention(*inputs.rows, graph)
    between.record()
    torch.autograd.grad(out, inputs.rows, inputs.grad_out)
    end.record()
    end.synchronize()
    return start.elapsed_time(between) / 1e3, start.elapsed_time(end) / 1e3


def peak_bytes(graph: EdgeGraph, inputs: Inputs) -> int:
    """Return the most memory of forward and backward beyond inputs, output, gradients and the graph."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before: int = torch.cuda.memory_allocated()
    out = edge_attention(*inputs.rows, graph)
    gradients = torch.autograd.grad(out, inputs.rows, inputs.grad_out)
    torch.cuda.synchronize()
    results: int = sum(result.numel() * result.element_size() for result in (out, *gradients))
    peak: int = torch.cuda.max_memory_allocated()
    return peak - before - results


def figures_of(name: str, graph: DeviceGraph, num_heads: int, head_size: int) -> list[Figure]:
    """Measure one graph; return its figures."""
    generator = torch.Generator("cuda").manual_seed(0)
    by_rows = edge_graph(graph, is_sampled=True)
    torch.cuda.synchronize()
    started = time.perf_counter()
    by_windows = edge_graph(graph, is_sampled=False)
    torch.cuda.synchronize()
    build_seconds = time.perf_counter() - started
    inputs = inputs_of(graph.num_nodes, num_heads, head_size, generator)
    graphs = {"rows": by_rows, "windows": by_windows}
    for edges in graphs.values():
        seconds(edges, inputs)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in graphs}
    for _ in range(NUM_ROUNDS):
        for kind, edges in graphs.items():
            found[kind].append(seconds(edges, inputs))
    medians = {kind: [statistics.median(column) for column in zip(*rows, strict=True)] for kind, rows in found.items()}
    title = f"{name}, {num_heads} x {head_size}"
    row_bytes = inputs.grad_out.numel() * inputs.grad_out.element_size()
    windows = [edges.windows for edges in (by_windows, by_windows.transpose)]
    shares = [0.0 if some is None else some.num_edges / by_rows.num_edges for some in windows]
    return [
        _figure(f"{title}: edges in windows of targets", shares[0], ""),
        _figure(f"{title}: edges in windows of sources", shares[1], ""),
        _figure(f"{title}: windows found in", 1e3 * build_seconds, "ms"),
        *(_figure(f"{title}: {kind}, forward", 1e3 * values[0], "ms") for kind, values in medians.items()),
        *(_figure(f"{title}: {kind}, forward+backward", 1e3 * values[1], "ms") for kind, values in medians.items()),
        Figure(
            name=f"{title}: time of rows over that with windows, forward+backward",
            value=medians["rows"][1] / medians["windows"][1],
            unit="x",
            bar=MIN_SPEEDUP,
            better=Better.HIGHER,
        ),
        Figure(
            name=f"{title}: memory over its bar",
            value=peak_bytes(by_windows, inputs) / (4 * row_bytes + SPARE_BYTES),
            unit="",
            bar=1.0,
            better=Better.LOWER,
        ),
    ]


def _figure(name: str, value: float, unit: str) -> Figure:
    return Figure(name=name, value=value, unit=unit, bar=None, better=Better.LOWER)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("windows are for GPUs, and this machine has none")
    figures = []
    for name, (num_nodes, num_edges, num_communities) in GRAPHS.items():
        generator = torch.Generator("cuda").manual_seed(0)
        if num_communities == 0:
            graph = rmat_graph(name, num_nodes, num_edges, generator)
        else:
            graph = community_graph(name, num_nodes, num_edges, generator, num_communities=num_communities)
        for num_heads, head_size in HEADS:
            figures += figures_of(name, graph, num_heads, head_size)
    print_figures(figures, title="attention with windows, cuda")
    if chosen.json:
        write_figures(chosen.json, figures, dict(environment(DeviceKind.CUDA)))


if __name__ == "__main__":
    main()
