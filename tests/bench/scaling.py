"""Full-graph training steps on two ranks against one, and how much of the exchange hides behind attention.

    python -m tests.bench.scaling --json figures.json     # two GPUs, about ten minutes
    python -m tests.bench.scaling --compile-dense         # half a minute more for each of some twenty runs
    python -m tests.bench.scaling --device cpu            # tiny: checks the logic

Every run is a training by `run_plans`, as `graphpilot train` does it: four layers, eight heads, bf16 on GPUs, on graphs
of Reddit's and ogbn-products' size and one of a million nodes. The cut is into stripes of equal edges and nodes, since
METIS takes minutes on the largest: on the community graphs, whose nodes lie in order, it is close to the best one. A
step is the median of those that are not traced; what hides is taken from the traced ones, as the share of the
exchanges' seconds, without waiting, in which the same rank computes.
"""

import argparse
import gzip
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from executor.environment import environment, local_cluster
from executor.run import PlanRun, run_plans
from planner.partition import part_specs
from simulator.readers.graphs import Graph, read_graph, write_store
from simulator.readers.partitions import parts_sha256
from simulator.readers.stores import save_npy
from simulator.specs.cluster import DeviceKind
from simulator.specs.files import read_trace
from simulator.specs.graph import GraphFile, GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, ExchangePayload, PartitionMethod, PartitionSpec
from simulator.specs.trace import Span, Trace
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from tests.bench.device_graphs import DeviceGraph, community_graph, rmat_graph
from tests.bench.result import Better, Figure, print_figures, write_figures
from tests.plans import Choices, plan_file_of, plan_of

GRAPHS = ("comm", "rmat_l", "comm_1m")
WIDTHS = (256, 128)
MIN_SPEEDUP = {256: 1.85, 128: 1.8}
MIN_HIDDEN_RATIO = 0.8
NUM_FEATURES, NUM_CLASSES = 64, 40
NUM_STEPS, NUM_TRACED = 14, 2
# Two ranks and one learn the same, up to the order of sums in bf16.
MAX_LOSS_DIFFERENCE = 2e-2
# A row's share of a step beside an edge's: dense parts of 12 widths squared against some 14 widths an edge.
ROW_WEIGHT = {256: 200, 128: 100}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph in a store, and whether its nodes lie in communities."""

    name: str
    folder: Path
    spec: GraphSpec
    graph: Graph
    has_communities: bool


@dataclass(frozen=True, kw_only=True)
class Found:
    """A training of one plan."""

    seconds: float
    last_loss: float
    hidden_ratio: float
    exchange_seconds: float


ON_TWO = {
    "halo": Choices(graph_parallel_degree=2),
    "halo, overlapped": Choices(graph_parallel_degree=2, overlap_exchange=True, overlap_gradients=True),
    "all rows, overlapped": Choices(
        graph_parallel_degree=2, overlap_exchange=True, overlap_gradients=True, exchange=Exchange.ALL_GATHER
    ),
    "halo of rows, overlapped": Choices(
        graph_parallel_degree=2,
        overlap_exchange=True,
        overlap_gradients=True,
        exchange_payload=ExchangePayload.ROWS,
    ),
    "heads": Choices(graph_parallel_degree=2, exchange=Exchange.HEAD_ALL_TO_ALL),
}


def problems(device: torch.device, folder: Path, names: Sequence[str], *, tiny: bool) -> Iterator[Problem]:
    """Yield graphs by name, each in a store that is there until the next one is asked for."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = (
        [(300, 6_000), (400, 3_000), (500, 4_000)] if tiny else [(233_000, 115e6), (2_449_000, 124e6), (10**6, 40e6)]
    )
    (small, dense), (large, skewed), (middle, sparse) = [(nodes, int(edges)) for nodes, edges in sizes]
    makes = {
        "comm": lambda: community_graph("comm", small, dense, generator, num_communities=4 if tiny else 64),
        "rmat_l": lambda: rmat_graph("rmat_l", large, skewed, generator),
        "comm_1m": lambda: community_graph("comm_1m", middle, sparse, generator, num_communities=4 if tiny else 1000),
    }
    for name in names:
        with tempfile.TemporaryDirectory(dir=folder) as store:
            path = Path(store) / "graph"
            write_store(labelled(makes[name]()), path)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the ranks are other processes
            spec, graph = read_graph(GraphFile(path=str(path)), base=folder)
            yield Problem(
                name=name, folder=Path(store), spec=spec, graph=graph, has_communities=name.startswith("comm")
            )


def labelled(on_device: DeviceGraph) -> Graph:
    """Return a graph with random features, labels and masks."""
    generator, num_nodes = np.random.default_rng(0), on_device.num_nodes
    split_N = generator.choice(3, num_nodes, p=[0.6, 0.2, 0.2])
    return Graph(
        indptr_N=on_device.indptr_N1.cpu().numpy(),
        source_E=on_device.source_E.to(torch.int32).cpu().numpy(),
        features=generator.standard_normal((num_nodes, NUM_FEATURES), dtype=np.float32),
        labels_N=generator.integers(0, NUM_CLASSES, num_nodes),
        train_mask_N=split_N == 0,
        val_mask_N=split_N == 1,
        test_mask_N=split_N == 2,
    )


def striped(graph: Graph, num_parts: int, folder: Path, *, row_weight: int) -> PartitionSpec:
    """Return the cut into runs of nodes with equal sums of edges and weighted nodes; its file goes to a folder."""
    if num_parts == 1:
        part_N, path, method = np.zeros(graph.num_nodes, np.int32), "", PartitionMethod.SINGLE
    else:
        ends_N = np.cumsum(np.diff(graph.indptr_N) + row_weight)
        part_N = ((ends_N - 1) * num_parts // ends_N[-1]).astype(np.int32)
        path, method = "parts.npy", PartitionMethod.STRIPES
        save_npy(part_N, folder / path)
    parts = part_specs(graph, part_N, num_parts)
    return PartitionSpec(method=method, seed=0, path=path, sha256=parts_sha256(part_N), parts=parts)


def trained(
    problem: Problem, width: int, choices: dict[str, Choices], kind: DeviceKind, *, compile_dense: bool
) -> dict[str, Found]:
    """Train plans one after another in one launch; return what each came to."""
    on_gpu = kind is DeviceKind.CUDA
    model = ModelSpec(width=width, num_heads=8, num_layers=4, feed_forward_width=2 * width)
    train = TrainSpec(
        num_steps=NUM_STEPS,
        learning_rate=1e-3,
        trace_steps=NUM_TRACED,
        evaluate_every_steps=NUM_STEPS,
        compile_dense=compile_dense,
    )
    cuts: dict[int, PartitionSpec] = {}
    runs = {}
    for index, (name, some) in enumerate(choices.items()):
        out = problem.folder / f"{width}-{index}"
        out.mkdir()
        num_parts = some.graph_parallel_degree
        if num_parts not in cuts:
            cuts[num_parts] = striped(problem.graph, num_parts, problem.folder, row_weight=ROW_WEIGHT[width])
        # Partition files lie beside the plan.
        if path := cuts[num_parts].path:
            (out / path).hardlink_to(problem.folder / path)
        some = replace(some, precision=Dtype.BFLOAT16 if on_gpu else Dtype.FLOAT32)
        plan = plan_of(some, problem.graph, model, out, partition=cuts[num_parts])
        plan_file_of(plan, problem.spec, model, local_cluster(kind), train, out / "plan.json")
        runs[name] = PlanRun(plan_path=out / "plan.json", out=out, quiet=True)
    run_plans(list(runs.values()))
    return {name: _found(run.out) for name, run in runs.items()}


def _found(out: Path) -> Found:
    trace = read_trace(out / "measured.json")
    result = json.loads((out / "result.json").read_text())
    hidden, exchanging = exchange_seconds(trace)
    steps = max(len(trace.traced_step_seconds), 1) * trace.num_ranks
    return Found(
        seconds=trace.median_step_seconds,
        last_loss=result["losses"][-1],
        hidden_ratio=hidden / exchanging if exchanging else 0.0,
        exchange_seconds=exchanging / steps,
    )


def exchange_seconds(trace: Trace) -> tuple[float, float]:
    """Return the seconds of the exchanges of layers, without waiting: beside compute of the same rank, and all."""
    of_rank: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in trace.spans:
        of_rank[span.rank, span.step].append(span)
    hidden = whole = 0.0
    for spans in of_rank.values():
        compute = sorted((s.start_seconds, s.end_seconds) for s in spans if not s.kind.is_collective)
        for span in spans:
            if span.kind.is_collective and span.name.startswith("layer"):
                start = span.start_seconds + span.waiting_seconds
                whole += span.end_seconds - start
                hidden += covered_seconds(compute, start, span.end_seconds)
    return hidden, whole


def covered_seconds(intervals: list[tuple[float, float]], start: float, end: float) -> float:
    """Return the seconds between two instants that lie in at least one of some sorted intervals."""
    covered, until = 0.0, start
    for first, last in intervals:
        covered += max(min(last, end) - max(first, until), 0.0)
        until = max(until, last)
    return covered


def figures_of(problem: Problem, width: int, found: dict[str, Found]) -> list[Figure]:
    """Return the figures of one graph and width."""
    title = f"{problem.name}, {width} wide"
    one, on_two = found["one rank"], {name: some for name, some in found.items() if name != "one rank"}
    best = min(on_two, key=lambda name: on_two[name].seconds)
    figures = [_reported(f"{title}, {name}: step", 1e3 * some.seconds, "ms") for name, some in found.items()]
    for name, some in on_two.items():
        figures.append(_reported(f"{title}, {name}: exchanges a step and rank", 1e3 * some.exchange_seconds, "ms"))
        if "overlapped" in name:
            figures.append(
                Figure(
                    name=f"{title}, {name}: share of the exchange that hides",
                    value=some.hidden_ratio,
                    unit="",
                    bar=MIN_HIDDEN_RATIO if problem.has_communities and name == "halo, overlapped" else None,
                    better=Better.HIGHER,
                )
            )
    figures.append(
        Figure(
            name=f"{title}: one rank over two, {best}",
            value=one.seconds / on_two[best].seconds,
            unit="x",
            bar=MIN_SPEEDUP[width],
            better=Better.HIGHER,
        )
    )
    difference = max(abs(some.last_loss / one.last_loss - 1) for some in on_two.values())
    name = f"{title}: last losses differ by"
    figures.append(Figure(name=name, value=difference, unit="", bar=MAX_LOSS_DIFFERENCE, better=Better.LOWER))
    return figures


def _reported(name: str, value: float, unit: str) -> Figure:
    return Figure(name=name, value=value, unit=unit, bar=None, better=Better.LOWER)


def measure(
    kind: DeviceKind,
    folder: Path,
    budget_seconds: float,
    graphs: Sequence[str] = GRAPHS,
    *,
    widths: Sequence[int] = WIDTHS,
    plans: Sequence[str] = tuple(ON_TWO),
    compile_dense: bool = False,
    traces: Path | None = None,
) -> list[Figure]:
    """Measure as much as fits into a time; print each result as it comes.

    Args:
        plans: names of those on two ranks.
        traces: folder that gets the traces of the runs; None to drop them.
    """
    device = torch.device("cuda", 0) if kind is DeviceKind.CUDA else torch.device("cpu")
    started, figures, longest = time.perf_counter(), [], 0.0
    for problem in problems(device, folder, graphs, tiny=kind is DeviceKind.CPU):
        for width in widths:
            begun = time.perf_counter()
            if begun - started + 1.2 * longest > budget_seconds:
                print(
                    f"{problem.name}, {width} wide: left out, the budget of {budget_seconds:.0f} s is spent", flush=True
                )
                continue
            choices = {"one rank": Choices()} | {name: ON_TWO[name] for name in plans}
            found = trained(problem, width, choices, kind, compile_dense=compile_dense)
            if traces is not None:
                _keep_traces(problem, width, choices, traces)
            new = figures_of(problem, width, found)
            longest = max(longest, time.perf_counter() - begun)
            print(
                f"{time.perf_counter() - started:5.0f} s  " + "; ".join(f"{f.name} {f.value:.3g}" for f in new),
                flush=True,
            )
            figures += new
    return figures


def _keep_traces(problem: Problem, width: int, choices: dict[str, Choices], folder: Path) -> None:
    """Copy the traces of the runs, packed; the order of choices names their folders."""
    folder.mkdir(parents=True, exist_ok=True)
    for index, name in enumerate(choices):
        packed = gzip.compress((problem.folder / f"{width}-{index}" / "measured.json").read_bytes())
        (folder / f"{problem.name}-{width}-{name.replace(', ', '-').replace(' ', '-')}.json.gz").write_bytes(packed)


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; return the exit status, 1 if a bar is missed. Tiny graphs have no bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DeviceKind), default=DeviceKind.CUDA, type=DeviceKind)
    parser.add_argument("--budget", type=float, default=540, help="seconds until what is left is skipped")
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="has room for the graphs, 1.5 GB")
    parser.add_argument("--graphs", nargs="+", choices=GRAPHS, default=GRAPHS)
    parser.add_argument("--widths", nargs="+", choices=WIDTHS, default=WIDTHS, type=int)
    parser.add_argument("--plans", nargs="+", choices=ON_TWO, default=list(ON_TWO), help="on two ranks")
    parser.add_argument("--compile-dense", action="store_true", help="compile the dense parts, as `[train]` may ask")
    parser.add_argument("--traces", type=Path, help="keep the traces of the runs in this folder")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args(arguments)
    if chosen.device is DeviceKind.CUDA and torch.cuda.device_count() < 2:
        parser.error(
            f"--device cuda needs two GPUs, and this machine has {torch.cuda.device_count()}: use --device cpu"
        )
    figures = measure(
        chosen.device,
        chosen.folder,
        chosen.budget,
        chosen.graphs,
        widths=chosen.widths,
        plans=chosen.plans,
        compile_dense=chosen.compile_dense,
        traces=chosen.traces,
    )
    if chosen.device is DeviceKind.CPU:
        figures = [replace(figure, bar=None) for figure in figures]
    print_figures(figures, title=f"two ranks against one, {chosen.device}")
    if chosen.json:
        write_figures(chosen.json, figures, dict(environment(chosen.device)))
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
