"""Attention over edges beside PyG's: seconds of forward and backward, and memory.

    python -m tests.bench.attention --device cpu --json figures.json

Both run on the same inputs in one process, one after the other in every round. PyG's is the core of its
TransformerConv: rows gathered by `index_select`, products, `torch_geometric.utils.softmax`, a scattered sum; torch's
huge pages, which a user of PyG would have to know of, make it two to four times as fast. Memory is the highest resident
size of a process of its own beyond that before the first call, so results and gradients count.
"""

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as executor does, but before PyG's modules allocate

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch_geometric.utils import scatter, softmax

from executor.attention.edges import edge_attention
from executor.attention.graph import EdgeGraph
from executor.environment import environment
from simulator.readers.graphs import read_graph
from simulator.specs.cluster import DeviceKind
from simulator.specs.graph import GraphFile
from simulator.specs.units import MIB
from tests.bench.result import Better, Figure, print_figures, write_figures

DATA = Path(os.environ.get("GRAPHPILOT_DATA", Path(__file__).parents[2] / "../shared/data"))
GRAPHS = ("tolokers", "coauthor-physics")
HEADS = ((8, 16), (8, 32))
MIN_SPEEDUP, MAX_MEMORY_RATIO = 3.0, 1 / 3
MAX_COMPILE_SECONDS = 10.0
# The two differ by the order of sums in fp32.
MAX_RELATIVE_DIFFERENCE = 1e-4

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Attention of some heads over a graph."""

    graph: str
    num_heads: int
    head_size: int

    @property
    def name(self) -> str:
        """The case as tables name it."""
        return f"{self.graph}, {self.num_heads} x {self.head_size}"


@cache
def edges_of(name: str) -> tuple[Tensor, Tensor]:
    """Return row pointers and sources of a graph's edges by target."""
    _, graph = read_graph(GraphFile(path=f"{name}.npz"), base=DATA)
    indptr_N1 = torch.from_numpy(np.asarray(graph.indptr_N, dtype=np.int64))
    return indptr_N1, torch.from_numpy(np.asarray(graph.source_E, dtype=np.int32))


def ours(case: Case) -> Attend:
    """Return this project's attention over the case's prepared graph."""
    indptr_N1, source_E = edges_of(case.graph)
    graph = EdgeGraph(indptr_N1=indptr_N1, source_E=source_E, num_sources=len(indptr_N1) - 1)
    _ = graph.transpose

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = edge_attention(q, k, v, graph)
        return out

    return attend


def pyg(case: Case) -> Attend:
    """Return the core of PyG's TransformerConv over the case's graph."""
    indptr_N1, source_E = edges_of(case.graph)
    num_nodes = len(indptr_N1) - 1
    source, target = source_E.long(), torch.arange(num_nodes).repeat_interleave(indptr_N1.diff())

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q.index_select(0, target) * k.index_select(0, source)).sum(-1) / q.shape[-1] ** 0.5
        weights = softmax(scores, target, num_nodes=num_nodes)
        messages = v.index_select(0, source) * weights.unsqueeze(-1)
        out: Tensor = scatter(messages, target, dim=0, dim_size=num_nodes, reduce="sum")
        return out

    return attend


IMPLEMENTATIONS: dict[str, Callable[[Case], Attend]] = {"graphpilot": ours, "PyG": pyg}


def inputs_of(case: Case) -> tuple[list[Tensor], Tensor]:
    """Return queries, keys and values, the latter two in one buffer as in the model, and the output's gradient."""
    num_nodes = len(edges_of(case.graph)[0]) - 1
    generator = torch.Generator().manual_seed(0)
    q, k_v, grad_out = (
        torch.randn(num_nodes, *parts, case.num_heads, case.head_size, generator=generator) for parts in ((), (2,), ())
    )
    return [rows.requires_grad_() for rows in (q, *k_v.unbind(1))], grad_out


def timed(attend: Attend, inputs: list[Tensor], grad_out: Tensor) -> tuple[list[Tensor], float, float]:
    """Return output and gradients, seconds of the forward and of the backward pass."""
    started = time.perf_counter()
    out = attend(*inputs)
    between = time.perf_counter()
    gradients = torch.autograd.grad(out, inputs, grad_out)
    return [out.detach(), *gradients], between - started, time.perf_counter() - between


def times(case: Case, num_rounds: int) -> dict[str, np.ndarray]:
    """Return seconds of forward, backward and both of each implementation, [rounds, 3], from alternating runs.

    Raises:
        AssertionError: if the results differ.
    """
    inputs, grad_out = inputs_of(case)
    attends = {name: make(case) for name, make in IMPLEMENTATIONS.items()}
    first = {name: timed(attend, inputs, grad_out)[0] for name, attend in attends.items()}
    for found, wanted in zip(first["graphpilot"], first["PyG"], strict=True):
        difference = ((found - wanted).abs().max() / wanted.abs().max()).item()
        assert difference < MAX_RELATIVE_DIFFERENCE, (case, difference)
    rows: dict[str, list[tuple[float, float, float]]] = {name: [] for name in attends}
    for _ in range(num_rounds):
        for name, attend in attends.items():
            _, forward, backward = timed(attend, inputs, grad_out)
            rows[name].append((forward, backward, forward + backward))
    return {name: np.array(found) for name, found in rows.items()}


def print_peak_bytes(case: Case, name: str) -> None:
    """Print by how much forward and backward raise this process's resident size at most."""
    attend = IMPLEMENTATIONS[name](case)
    inputs, grad_out = inputs_of(case)
    q, k, v = (rows[:0].detach().requires_grad_() for rows in inputs)
    # Libraries, kernels from the cache on disk, and threads, but none of the case's memory.
    warm_up = EdgeGraph(
        indptr_N1=torch.zeros(1, dtype=torch.int64), source_E=torch.zeros(0, dtype=torch.int32), num_sources=0
    )
    torch.autograd.grad(edge_attention(q, k, v, warm_up), [q, k, v], grad_out[:0])
    before = psutil.Process().memory_info().rss
    Path("/proc/self/clear_refs").write_text("5")  # forget the highest resident size
    timed(attend, inputs, grad_out)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) * 1024 - before)


def print_first_seconds(case: Case) -> None:
    """Print the seconds of a first forward and backward pass; the caller says where compiled kernels are kept."""
    attend = ours(case)
    inputs, grad_out = inputs_of(case)
    _, forward, backward = timed(attend, inputs, grad_out)
    print(forward + backward)


def of_child(case: Case, what: str, num_threads: int, **variables: str) -> float:
    """Return what a new process prints."""
    command = [sys.executable, "-m", "tests.bench.attention", "--threads", str(num_threads), "--child", what]
    command += [case.graph, str(case.num_heads), str(case.head_size)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | variables)
    return float(done.stdout)


def figures_of(case: Case, found: dict[str, np.ndarray], peak_bytes: dict[str, float]) -> list[Figure]:
    """Return the figures of a case from medians; a speed-up is the median over rounds."""
    speedup = np.median(found["PyG"][:, 2] / found["graphpilot"][:, 2])
    figures = [
        Figure(
            name=f"{case.name}: PyG's time over ours, forward+backward",
            value=float(speedup),
            unit="x",
            bar=MIN_SPEEDUP,
            better=Better.HIGHER,
        ),
        Figure(
            name=f"{case.name}: our memory over PyG's, forward+backward",
            value=peak_bytes["graphpilot"] / peak_bytes["PyG"],
            unit="",
            bar=MAX_MEMORY_RATIO,
            better=Better.LOWER,
        ),
    ]
    for name, seconds in found.items():
        for column, phase in enumerate(("forward", "backward")):
            value = 1e3 * float(np.median(seconds[:, column]))
            figures.append(
                Figure(name=f"{case.name}: {name}, {phase}", value=value, unit="ms", bar=None, better=Better.LOWER)
            )
    return figures


def row_of(case: Case, name: str, seconds: np.ndarray, peak_bytes: float) -> list[str]:
    """Return medians with the 10 % and 90 % quantiles, and memory, as cells."""
    cells = [case.name, name]
    for column in range(3):
        low, middle, high = 1e3 * np.quantile(seconds[:, column], (0.1, 0.5, 0.9))
        cells.append(f"{middle:.1f} ({low:.1f} to {high:.1f})")
    return [*cells, f"{peak_bytes / MIB:.0f}"]


def run_on_cpu(num_threads: int, num_rounds: int) -> list[Figure]:
    """Measure and print all cases; return their figures."""
    table = Table("case", "", box=None, title=f"{num_threads} threads", title_justify="left", header_style="bold")
    for column in ("forward, ms", "backward, ms", "both, ms (p10 to p90)", "memory, MiB"):
        table.add_column(column, justify="right")
    figures = []
    cases = [Case(graph=graph, num_heads=heads, head_size=size) for graph in GRAPHS for heads, size in HEADS]
    for case in cases:
        found = times(case, num_rounds)
        peak_bytes = {name: of_child(case, name, num_threads) for name in IMPLEMENTATIONS}
        figures += figures_of(case, found, peak_bytes)
        for name, seconds in found.items():
            table.add_row(*row_of(case, name, seconds, peak_bytes[name]))
    with tempfile.TemporaryDirectory() as folder:
        first_seconds = of_child(cases[0], "first", num_threads, NUMBA_CACHE_DIR=folder)
    figures.append(
        Figure(
            name="first forward+backward, with kernels to compile",
            value=first_seconds,
            unit="s",
            bar=MAX_COMPILE_SECONDS,
            better=Better.LOWER,
        )
    )
    Console(highlight=False, width=150).print(table)
    return figures


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=[DeviceKind.CPU], default=DeviceKind.CPU, type=DeviceKind)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15, help="of runs of both, one after the other")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.child:
        what, graph, num_heads, head_size = arguments.child
        case = Case(graph=graph, num_heads=int(num_heads), head_size=int(head_size))
        if what == "first":
            print_first_seconds(case)
        else:
            print_peak_bytes(case, what)
        return
    figures = run_on_cpu(arguments.threads, arguments.rounds)
    print_figures(figures, title="attention on CPU")
    if arguments.json:
        threads = {"threads": str(arguments.threads)}
        write_figures(arguments.json, figures, {**dict(environment(arguments.device)), **threads})


if __name__ == "__main__":
    main()
