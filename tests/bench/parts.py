"""Pieces of attention that let an exchange overlap, against what torch ships, on one device.

    python -m tests.bench.parts --device cuda --json figures.json     # one GPU, about a minute
    python -m tests.bench.parts --device cpu --nodes 2000 --edges 40000     # whether it runs

Merges, statistics of rows and added rows do nothing but move rows: their rate counts every byte once that must be read
or written. Beside them stand the operators of torch that did the same: those of a merge and of its backward pass, which
statistics of rows replace, and `index_add_`, whose atomics have no fixed order. The two backward passes by themselves
stand beside the one that they are made of. Times are medians; on GPUs between CUDA events, behind work that hides the
launch.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from executor.attention import parts
from executor.attention.edges import scale_of
from executor.attention.graph import EdgeGraph
from executor.attention.parts import Attended
from executor.environment import environment
from simulator.specs.cluster import DeviceKind
from simulator.specs.units import GB
from tests.bench.device_graphs import community_graph
from tests.bench.result import Better, Figure, print_figures, write_figures

NUM_HEADS, HEAD_SIZE = 8, 32
NODES_PER_COMMUNITY = 1000
NUM_ROUNDS = 11
MIN_RATE = 2000  # GB/s: a copy on an H200 moves 4300 (KINDS.md of the machines, 2026-10-28)
MAX_SPLIT_RATIO = 1.05  # of two passes to one, which are the same kernels


def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the median of the seconds that a call takes."""
    found = []
    function()
    for _ in range(NUM_ROUNDS):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(4_000_000)
            start.record()
            function()
            end.record()
            end.synchronize()
            found.append(float(start.elapsed_time(end)) / 1e3)
        else:
            started = time.perf_counter()
            function()
            found.append(time.perf_counter() - started)
    return statistics.median(found)


def merged_by_torch(own: Attended, part: Attended) -> tuple[Tensor, Tensor, Tensor]:
    """Return a merge of outputs and both weights by torch, as `executor/overlap.py` made it of two attentions."""
    both_lse = torch.logaddexp(own.lse, part.lse)
    finite_lse = both_lse.masked_fill(torch.isinf(both_lse), 0.0)
    weight, part_weight = (torch.exp(x.lse - finite_lse).unsqueeze(-1) for x in (own, part))
    return torch.addcmul(weight * own.out, part_weight, part.out).to(own.out.dtype), weight, part_weight


def merge_gradients_by_torch(
    grad: Tensor, own: Attended, part: Attended, merged: Tensor, weight: Tensor, part_weight: Tensor
) -> tuple[Tensor, ...]:
    """Return the gradients of both outputs and log-sum-exps by torch, likewise."""
    product = (grad * merged).sum(-1, dtype=torch.float32)
    found = []
    for x, share in ((own, weight), (part, part_weight)):
        found.append((share * grad).to(grad.dtype))
        found.append(share.squeeze(-1) * ((grad * x.out).sum(-1, dtype=torch.float32) - product))
    return tuple(found)


def num_bytes(*tensors: Tensor) -> int:
    """Return the bytes of tensors."""
    return sum(x.numel() * x.element_size() for x in tensors)


def compared(
    name: str,
    ours: Callable[[], object],
    theirs: dict[str, Callable[[], object]],
    moved_bytes: int,
    device: torch.device,
) -> list[Figure]:
    """Return time and rate of one of ours, and the times of what it stands beside."""
    our_seconds = seconds(ours, device)
    bar = MIN_RATE if device.type == "cuda" else None
    rate = Figure(
        name=f"{name}: rate", value=moved_bytes / our_seconds / GB, unit="GB/s", bar=bar, better=Better.HIGHER
    )
    found = [_milliseconds(name, our_seconds), rate]
    return found + [_milliseconds(f"{name}: {other}", seconds(function, device)) for other, function in theirs.items()]


def _milliseconds(name: str, value: float) -> Figure:
    return Figure(name=name, value=1e3 * value, unit="ms", bar=None, better=Better.LOWER)


def figures_of_rows(num_nodes: int, dtype: torch.dtype, device: torch.device) -> list[Figure]:
    """Measure what moves rows."""
    generator = torch.Generator(device).manual_seed(0)

    def rows() -> Tensor:
        return torch.randn(num_nodes, NUM_HEADS, HEAD_SIZE, device=device, generator=generator).to(dtype)

    alone = EdgeGraph(
        indptr_N1=torch.arange(num_nodes + 1, device=device),
        source_E=torch.arange(num_nodes, dtype=torch.int32, device=device),
        num_sources=num_nodes,
    )
    whole, part = (parts.attend_part(rows(), rows(), rows(), None, alone) for _ in range(2))
    grad = rows()
    merged, weight, part_weight = merged_by_torch(whole, part)
    found = compared(
        f"merge_into, {dtype}",
        lambda: parts.merge_into(whole, part, 0),
        {"a merge by torch": lambda: merged_by_torch(whole, part)},
        2 * num_bytes(whole.out, whole.lse, whole.rest) + num_bytes(part.out, part.lse, part.rest),
        device,
    )
    stats = parts.row_stats(grad, whole)
    found += compared(
        f"row_stats, {dtype}",
        lambda: parts.row_stats(grad, whole),
        {
            "the product by torch": lambda: (grad * whole.out).sum(-1, dtype=torch.float32),
            "a merge's gradients by torch": lambda: merge_gradients_by_torch(
                grad, whole, part, merged, weight, part_weight
            ),
        },
        num_bytes(grad, whole.out, whole.lse, whole.rest, stats),
        device,
    )
    into = rows().view(num_nodes, -1)
    for num_peers in (1, 3):
        index = torch.cat(
            [
                torch.randperm(num_nodes, device=device, generator=generator)[: num_nodes // (2 * num_peers)]
                .sort()
                .values
                for _ in range(num_peers)
            ]
        )
        added = torch.randn(len(index), into.shape[1], device=device, generator=generator).to(dtype)
        counts = [len(index) // num_peers] * num_peers
        found += compared(
            f"add_rows_, peers: {num_peers}, {dtype}",
            functools.partial(parts.add_rows_, into, index, added, counts),
            {"index_add_": functools.partial(into.index_add_, 0, index, added)},
            num_bytes(index, added) + 2 * num_bytes(added),
            device,
        )
    return found


def figures_of_passes(num_nodes: int, num_edges: int, dtype: torch.dtype, device: torch.device) -> list[Figure]:
    """Measure the backward passes over a graph of communities in the order of their nodes."""
    generator = torch.Generator(device).manual_seed(0)
    communities = max(num_nodes // NODES_PER_COMMUNITY, 1)
    made = community_graph("communities", num_nodes, num_edges, generator, num_communities=communities)
    graph = EdgeGraph(indptr_N1=made.indptr_N1, source_E=made.source_E.to(torch.int32), num_sources=num_nodes)
    q, k, v, grad = (
        torch.randn(num_nodes, NUM_HEADS, HEAD_SIZE, device=device, generator=generator).to(dtype) for _ in range(4)
    )
    whole = parts.attend_part(q, k, v, None, graph)
    scale = scale_of(q, None)
    kept = torch.ops.graphpilot.edge_attention(q, k, v, None, None, None, graph.handle, scale, 0.0, True)
    stats = parts.row_stats(grad, whole)

    def at_once() -> object:
        return torch.ops.graphpilot.edge_attention_backward(
            grad, None, q, k, v, None, None, None, *kept, graph.handle, scale, 0.0, False, False
        )

    times = {
        "one backward pass": seconds(at_once, device),
        "row_stats": seconds(lambda: parts.row_stats(grad, whole), device),
        "backward_sources": seconds(
            lambda: parts.backward_sources(grad, stats, whole, q, k, v, None, graph, bias_gradient=False), device
        ),
        "backward_targets": seconds(
            lambda: parts.backward_targets(grad, stats, whole, q, k, v, None, graph, bias_gradient=False), device
        ),
    }
    title = f"{num_nodes} nodes, {graph.num_edges} edges, {dtype}"
    one, *others = times.values()
    ratio = Figure(
        name=f"{title}: all three over one backward pass",
        value=sum(others) / one,
        unit="x",
        bar=MAX_SPLIT_RATIO if device.type == "cuda" else None,
        better=Better.LOWER,
    )
    return [*(_milliseconds(f"{title}: {name}", value) for name, value in times.items()), ratio]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DeviceKind), default=DeviceKind.CUDA, type=DeviceKind)
    parser.add_argument("--nodes", type=int, default=500_000, help="rows, 256 wide")
    parser.add_argument("--edges", type=int, default=20_000_000)
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    if chosen.device is DeviceKind.CUDA and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and this machine has none: use --device cpu")
    device = torch.device("cuda" if chosen.device is DeviceKind.CUDA else "cpu")
    figures = []
    for dtype in (torch.bfloat16, torch.float32):
        figures += figures_of_rows(chosen.nodes, dtype, device)
    figures += figures_of_passes(chosen.nodes, chosen.edges, torch.bfloat16, device)
    print_figures(figures, title=f"attention in parts, {chosen.device.value}")
    if chosen.json:
        write_figures(chosen.json, figures, dict(environment(chosen.device)))


if __name__ == "__main__":
    main()
