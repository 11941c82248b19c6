"""A whole training step on one device, against the same model built on PyG's TransformerConv.

    python -m tests.bench.training --json figures.json            # one GPU, under four minutes
    python -m tests.bench.training --device cpu                   # tiny: checks the logic

The model has 4 layers, 128 columns, 8 heads of 16, a feed-forward network of 256 and no dropout, in bf16. A step is
forward, loss over the training nodes, backward, clipping of the gradient's norm, AdamW (fused). Both models start from
the same parameters, and their first losses are compared.
"""

import argparse
import gc
import itertools
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from executor.environment import environment
from executor.mesh import Place, device_of
from executor.model import GraphTransformer
from executor.record import Recorder
from executor.train import Inputs, Trainer
from simulator.readers.graphs import Graph
from simulator.specs.cluster import DeviceKind
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, Recompute, StepMode
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from tests.bench.device_graphs import DeviceGraph, community_graph, rmat_graph
from tests.bench.pyg_transformer import PygTransformer
from tests.bench.result import Better, Figure, print_figures, write_figures
from tests.executor.made_graphs import plan_of, spec_of

MODEL = ModelSpec(width=128, num_heads=8, num_layers=4, feed_forward_width=256)
NUM_FEATURES, NUM_CLASSES = 128, 40
TRAIN = TrainSpec(num_steps=1000, learning_rate=1e-3, weight_decay=0.01)
# A CUDA graph is captured in the third step; torch.compile compiles in the first, forward and backward.
NUM_WARM_UPS, NUM_STEPS = 4, 12
# Seconds that must be left for a baseline that is compiled first.
COMPILE_SECONDS = 45
# Of the first losses, which are about log(40): bf16 has 8 bits, and sums are formed in different orders.
LOSS_TOLERANCE = 0.02
EAGER_BAR, COMPILED_BAR, MEMORY_BAR = 10.0, 5.0, 0.2

GIB = 2**30


class OutOfTimeError(BaseException):
    """The budget is spent; what was measured is reported."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A graph on the device and in NumPy, with features and labels at random."""

    on_device: DeviceGraph
    graph: Graph
    device: torch.device

    @property
    def name(self) -> str:
        """What the table calls the graph."""
        return self.on_device.name


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Steps of one candidate on one graph.

    Attributes:
        peak_bytes: most memory in use in the steps, beyond the graph, features and labels.
        why: the reason if it could not be measured; the rest says nothing then.
    """

    graph: str
    candidate: str
    first_loss: float = float("nan")
    seconds: tuple[float, ...] = ()
    peak_bytes: int = 0
    why: str = ""

    @property
    def median_seconds(self) -> float:
        """Median of the steps."""
        return statistics.median(self.seconds)


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A step that is ready to run.

    Attributes:
        resident_bytes: memory of what a step takes as given.
    """

    step: Callable[[int], Tensor]
    resident_bytes: int


def problem_of(on_device: DeviceGraph) -> Problem:
    """Return the problem of a graph: 60 % of the nodes are for training."""
    generator, num_nodes = np.random.default_rng(0), on_device.num_nodes
    split_N = generator.choice(3, num_nodes, p=[0.6, 0.2, 0.2])
    graph = Graph(
        indptr_N=on_device.indptr_N1.cpu().numpy(),
        source_E=on_device.source_E.to(torch.int32).cpu().numpy(),
        features=generator.standard_normal((num_nodes, NUM_FEATURES), dtype=np.float32),
        labels_N=generator.integers(0, NUM_CLASSES, num_nodes),
        train_mask_N=split_N == 0,
        val_mask_N=split_N == 1,
        test_mask_N=split_N == 2,
    )
    return Problem(on_device=on_device, graph=graph, device=on_device.source_E.device)


def ours(problem: Problem, mode: StepMode, *, compile_dense: bool) -> Prepared:
    """Return the project's step, through its trainer."""
    graph, part_N = problem.graph, np.zeros(problem.graph.num_nodes, np.int64)
    plan = plan_of(graph, part_N, 1, recompute=(Recompute.NONE,) * MODEL.num_layers)
    precision = Dtype.BFLOAT16 if problem.device.type == "cuda" else Dtype.FLOAT32
    plan = replace(plan, step_mode=mode, precision=precision)
    place = Place(rank=0, num_ranks=1, replica=0, graph_rank=0, graph_group=None, world=None, device=problem.device)
    train = replace(TRAIN, compile_dense=compile_dense)
    before = allocated(problem.device)
    trainer = Trainer(
        plan,
        spec_of(graph, num_classes=NUM_CLASSES),
        MODEL,
        train,
        Inputs(graph=graph, part_N=part_N, encodings=None),
        place,
        Recorder(precision=precision),
    )
    of_model = allocated(problem.device) - before
    edges = trainer.batch(0).edges[Exchange.NONE]
    if problem.device.type == "cuda":
        _ = edges.work, edges.transpose.work
    return Prepared(
        step=lambda step: trainer.step(step, trainer.batch(step)),
        resident_bytes=allocated(problem.device) - of_model,
    )


def pyg(problem: Problem, *, autocast: bool, compiled: bool) -> Prepared:
    """Return PyG's step: fp32 parameters under autocast to bf16, or bf16 parameters."""
    graph, device = problem.graph, problem.device
    dtype = torch.bfloat16 if device.type == "cuda" and not autocast else torch.float32
    x_NF = torch.from_numpy(graph.features).to(device, dtype)
    row_T = torch.from_numpy(np.flatnonzero(graph.train_mask_N)).to(device)
    label_T = torch.from_numpy(graph.labels_N).to(device)[row_T]
    edge_index = problem.on_device.edge_index
    resident_bytes = allocated(device)
    spec = spec_of(graph, num_classes=NUM_CLASSES)
    torch.manual_seed(TRAIN.seed)
    weights = GraphTransformer(spec, MODEL, Recorder()).state_dict()
    model = PygTransformer(spec, MODEL)
    model.load(weights)
    model = model.to(device, dtype)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=TRAIN.learning_rate, weight_decay=TRAIN.weight_decay, fused=True
    )
    forward: Any = model
    if compiled:
        torch.compiler.reset()
        forward = torch.compile(model, dynamic=False)

    def step(_: int) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=autocast):
            logits_NC = forward(x_NF, edge_index)
        loss = F.cross_entropy(logits_NC.index_select(0, row_T).float(), label_T)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), TRAIN.max_gradient_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Prepared(step=step, resident_bytes=resident_bytes)


Candidate = Callable[[Problem], Prepared]
OURS: dict[str, Candidate] = {
    "ours": lambda problem: ours(problem, StepMode.CUDA_GRAPH, compile_dense=False),
    "ours, dense parts compiled": lambda problem: ours(problem, StepMode.CUDA_GRAPH, compile_dense=True),
}
OURS_EAGER: dict[str, Candidate] = {
    "ours, eager": lambda problem: ours(problem, StepMode.EAGER, compile_dense=False),
}
PYG_EAGER: dict[str, Candidate] = {
    "PyG eager, bf16": lambda problem: pyg(problem, autocast=False, compiled=False),
    "PyG eager, autocast": lambda problem: pyg(problem, autocast=True, compiled=False),
}
PYG_COMPILED: dict[str, Candidate] = {
    "PyG compiled, bf16": lambda problem: pyg(problem, autocast=False, compiled=True),
    "PyG compiled, autocast": lambda problem: pyg(problem, autocast=True, compiled=True),
}


def allocated(device: torch.device) -> int:
    """Return the memory that tensors hold now; 0 on CPUs, which do not count it."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def measure(problem: Problem, name: str, candidate: Candidate) -> Measured:
    """Return the steps of a candidate, or why it has none."""
    free_memory(problem.device)
    try:
        found = _measured(problem, name, candidate(problem))
    except Exception as error:  # compilers raise errors of many kinds, and a baseline's failure is a result
        text = " ".join(str(error).split())[:300]
        why = "out of memory" if "out of memory" in text else f"{type(error).__name__}: {text}"
        found = Measured(graph=problem.name, candidate=name, why=why)
    free_memory(problem.device)
    return found


def _measured(problem: Problem, name: str, prepared: Prepared) -> Measured:
    on_gpu = problem.device.type == "cuda"
    free_memory(problem.device)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(problem.device)
    first_loss = float(prepared.step(0))
    for index in range(1, NUM_WARM_UPS):
        prepared.step(index)
    steps = range(NUM_WARM_UPS, NUM_WARM_UPS + NUM_STEPS)
    if on_gpu:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_STEPS + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for index, event in zip(steps, events[1:], strict=True):
            prepared.step(index)
            event.record()
        torch.cuda.synchronize()
        seconds = [first.elapsed_time(second) / 1e3 for first, second in itertools.pairwise(events)]
    else:
        instants = [time.perf_counter()]
        for index in steps:
            prepared.step(index)
            instants.append(time.perf_counter())
        seconds = [end - start for start, end in itertools.pairwise(instants)]
    peak = torch.cuda.max_memory_allocated(problem.device) - prepared.resident_bytes if on_gpu else 0
    return Measured(graph=problem.name, candidate=name, first_loss=first_loss, seconds=tuple(seconds), peak_bytes=peak)


def free_memory(device: torch.device) -> None:
    """Give back what nothing refers to."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def problems(device: torch.device, *, tiny: bool) -> Iterator[Problem]:
    """Yield the graphs: R-MAT of arXiv's size, R-MAT and communities of half a million nodes."""
    small, large = ((300, 3_000), (400, 6_000)) if tiny else ((170_000, 2_300_000), (500_000, 10_000_000))
    generator = torch.Generator(device).manual_seed(0)
    yield problem_of(rmat_graph("rmat_s", *small, generator))
    yield problem_of(rmat_graph("rmat_m", *large, generator))
    yield problem_of(community_graph("comm_m", *large, generator, num_communities=5 if tiny else 1000))


@contextmanager
def deadline(seconds: int) -> Iterator[None]:
    """Raise `OutOfTimeError` inside after so many seconds."""

    def end(*_: object) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(device: torch.device, *, budget_seconds: int, tiny: bool) -> list[Measured]:
    """Measure everything, what is compiled last, until the time is up; each result is shown as it comes."""
    started = time.perf_counter()
    found: list[Measured] = []
    on_gpu = device.type == "cuda"

    def add(problem: Problem, candidates: dict[str, Candidate]) -> None:
        for name, candidate in candidates.items():
            left = budget_seconds - (time.perf_counter() - started)
            if "compiled" in name and left < COMPILE_SECONDS:
                found.append(Measured(graph=problem.name, candidate=name, why=f"{left:.0f} s left of the budget"))
            else:
                found.append(measure(problem, name, candidate))
            print(f"{time.perf_counter() - started:5.0f} s  {row_of(found[-1])}", flush=True)

    try:
        with deadline(budget_seconds):
            every = []
            for problem in problems(device, tiny=tiny):
                print(
                    f"{problem.name}: {problem.graph.num_nodes:,} nodes, {problem.graph.num_edges:,} edges", flush=True
                )
                every.append(problem)
                add(problem, (OURS | OURS_EAGER if on_gpu else OURS_EAGER) | PYG_EAGER)
            if on_gpu:
                for problem in every:
                    add(problem, _faster(PYG_COMPILED, found, problem.name))
    except OutOfTimeError:
        print(f"the budget of {budget_seconds} s is spent: what follows is what was measured", flush=True)
    except RuntimeError as error:
        print(f"the device is lost, what follows is what was measured: {error}", flush=True)
    return found


def _faster(compiled: dict[str, Candidate], found: list[Measured], graph: str) -> dict[str, Candidate]:
    """Return the compiled baseline in the format that was faster eager, and before it none."""
    eager = [m for m in found if m.graph == graph and m.candidate in PYG_EAGER and not m.why]
    if not eager:
        return compiled
    best = min(eager, key=lambda m: m.median_seconds)
    return {name: make for name, make in compiled.items() if name.split(", ")[1] == best.candidate.split(", ")[1]}


def row_of(measured: Measured) -> str:
    """Return a line for the screen."""
    name = f"{measured.graph:8} {measured.candidate:28}"
    if measured.why:
        return f"{name} not measured: {measured.why}"
    milliseconds = sorted(1e3 * seconds for seconds in measured.seconds)
    return (
        f"{name} {1e3 * measured.median_seconds:9.3f} ms ({milliseconds[0]:.3f} to {milliseconds[-1]:.3f}), peak "
        f"{measured.peak_bytes / GIB:7.3f} GiB, first loss {measured.first_loss:.4f}"
    )


def figures_of(found: list[Measured], *, with_bars: bool) -> list[Figure]:
    """Return every median, spread and peak, and the ratios, with their bars or without."""
    figures = []
    for m in found:
        if not m.why:
            name = f"{m.graph}, {m.candidate}"
            spread = (max(m.seconds) - min(m.seconds)) / m.median_seconds
            figures += [
                _reported(f"{name}: step", 1e3 * m.median_seconds, "ms"),
                _reported(f"{name}: largest less smallest step", 100 * spread, "%"),
                _reported(f"{name}: peak memory", m.peak_bytes / GIB, "GiB"),
            ]
    for graph in dict.fromkeys(m.graph for m in found):
        figures += _ratios(graph, [m for m in found if m.graph == graph and not m.why])
    return figures if with_bars else [replace(figure, bar=None) for figure in figures]


def _reported(name: str, value: float, unit: str) -> Figure:
    return Figure(name=name, value=value, unit=unit, bar=None, better=Better.LOWER)


def _ratios(graph: str, found: list[Measured]) -> list[Figure]:
    mine = [m for m in found if m.candidate in OURS] or [m for m in found if m.candidate in OURS_EAGER]
    if not mine:
        return []
    best = min(mine, key=lambda m: m.median_seconds)
    figures = []
    for candidates, label, bar in ((PYG_EAGER, "eager", EAGER_BAR), (PYG_COMPILED, "compiled", COMPILED_BAR)):
        theirs = [m for m in found if m.candidate in candidates]
        if theirs:
            ratio = min(m.median_seconds for m in theirs) / best.median_seconds
            figures.append(
                Figure(name=f"{graph}: PyG {label} over ours", value=ratio, unit="x", bar=bar, better=Better.HIGHER)
            )
    theirs = [m for m in found if m.candidate in PYG_EAGER | PYG_COMPILED and m.peak_bytes > 0]
    if theirs:
        share = best.peak_bytes / min(m.peak_bytes for m in theirs)
        name = f"{graph}: peak memory over the least of PyG"
        figures.append(Figure(name=name, value=share, unit="", bar=MEMORY_BAR, better=Better.LOWER))
    losses = [m.first_loss for m in found]
    error = max(abs(loss - best.first_loss) for loss in losses)
    name = f"{graph}: first losses differ by"
    figures.append(Figure(name=name, value=error, unit="", bar=LOSS_TOLERANCE, better=Better.LOWER))
    return figures


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; return the exit status, 1 if a bar is missed. Tiny graphs have no bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=[kind.value for kind in DeviceKind], default="cuda")
    parser.add_argument("--budget", type=int, default=235, help="seconds until what is left is skipped")
    parser.add_argument("--tiny", action="store_true", help="graphs of some hundred nodes, as always on CPUs")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args(arguments)
    kind = DeviceKind(chosen.device)
    if kind is DeviceKind.CUDA and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and this machine has none: use --device cpu")
    device = device_of(kind, 0)
    tiny = chosen.tiny or kind is DeviceKind.CPU
    found = run(device, budget_seconds=chosen.budget, tiny=tiny)
    figures = figures_of(found, with_bars=not tiny)
    print_figures(figures, title=f"training step, {kind}")
    failures = {f"{m.graph}, {m.candidate}": m.why for m in found if m.why}
    for name, why in failures.items():
        print(f"{name}: {why}")
    if chosen.json:
        write_figures(chosen.json, figures, dict(environment(kind)) | failures)
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
