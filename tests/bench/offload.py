"""Activations on the host against kept ones on one GPU: step, memory, and how much of the copies hides.

    python -m tests.bench.offload --json figures.json     # one GPU, under a minute
    python -m tests.bench.offload --device cpu            # tiny: checks the logic

The graph has 400 neighbours a node, as Reddit's does. Norms, activations and biases are computed again in both
trainings, as one would before copying anything; all layers but the last are on the host. What hides is the share of the
copies' time in which the device computes.
"""

import argparse
import json
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from executor.environment import environment, local_cluster
from executor.run import PlanRun, run_plans
from simulator.readers.graphs import read_graph, write_store
from simulator.specs.cluster import DeviceKind
from simulator.specs.files import read_trace
from simulator.specs.graph import GraphFile
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Offload, Recompute
from simulator.specs.program import HOST_COPIES
from simulator.specs.trace import Span, Trace
from simulator.specs.train import TrainSpec
from simulator.specs.units import GIB, Dtype
from tests.bench.device_graphs import community_graph
from tests.bench.result import Better, Figure, print_figures, write_figures
from tests.bench.scaling import covered_seconds, labelled
from tests.plans import Choices, plan_file_of, plan_of

NUM_NODES, NUM_EDGES, NUM_COMMUNITIES, WIDTH = 150_000, 60_000_000, 64, 256
TINY_NODES, TINY_EDGES, TINY_COMMUNITIES, TINY_WIDTH = 300, 6_000, 4, 16
NUM_LAYERS, NUM_HEADS = 4, 8
NUM_STEPS, NUM_TRACED = 12, 2
MIN_HIDDEN_RATIO = 0.6
MAX_LOSS_DIFFERENCE = 1e-3  # copies change no bit; attention on GPUs does not depend on what ran before


@dataclass(frozen=True, kw_only=True)
class Found:
    """A training."""

    seconds: float
    peak_bytes: int
    hidden_ratio: float
    copy_seconds: float
    last_loss: float


def copies_of(trace: Trace) -> tuple[float, float]:
    """Return the seconds of copies in which the same rank computes, and all of them."""
    of_rank: dict[tuple[int, int], list[Span]] = defaultdict(list)
    for span in trace.spans:
        of_rank[span.rank, span.step].append(span)
    hidden = whole = 0.0
    for spans in of_rank.values():
        compute = sorted((s.start_seconds, s.end_seconds) for s in spans if s.kind not in HOST_COPIES)
        for span in spans:
            if span.kind in HOST_COPIES and span.name.startswith("layer"):
                whole += span.duration_seconds
                hidden += covered_seconds(compute, span.start_seconds, span.end_seconds)
    return hidden, whole


def trained(kind: DeviceKind, folder: Path) -> dict[str, Found]:
    """Train with activations kept and with activations on the host, in one launch."""
    on_gpu = kind is DeviceKind.CUDA
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(0)
    nodes, edges, communities, width = (
        (NUM_NODES, NUM_EDGES, NUM_COMMUNITIES, WIDTH)
        if on_gpu
        else (TINY_NODES, TINY_EDGES, TINY_COMMUNITIES, TINY_WIDTH)
    )
    model = ModelSpec(width=width, num_heads=NUM_HEADS, num_layers=NUM_LAYERS, feed_forward_width=2 * width)
    train = TrainSpec(num_steps=NUM_STEPS, learning_rate=1e-3, trace_steps=NUM_TRACED, evaluate_every_steps=NUM_STEPS)
    kept = Choices(recompute=Recompute.SELECTIVE, precision=Dtype.BFLOAT16 if on_gpu else Dtype.FLOAT32)
    away = (Offload.ACTIVATIONS,) * (NUM_LAYERS - 1) + (Offload.NONE,)
    choices = {"kept": kept, "on the host": replace(kept, offload=away, offload_min_bytes=2**20 if on_gpu else 1)}
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        base = Path(inside)
        write_store(labelled(community_graph("comm", nodes, edges, generator, num_communities=communities)), base / "g")
        if on_gpu:
            torch.cuda.empty_cache()  # the rank is another process
        spec, graph = read_graph(GraphFile(path=str(base / "g")), base=base)
        runs = {}
        for index, (name, some) in enumerate(choices.items()):
            out = base / str(index)
            out.mkdir()
            plan = plan_of(some, graph, model, out)
            plan_file_of(plan, spec, model, local_cluster(kind), train, out / "plan.json")
            runs[name] = PlanRun(plan_path=out / "plan.json", out=out, quiet=True)
        run_plans(list(runs.values()))
        return {name: _found(run.out) for name, run in runs.items()}


def _found(out: Path) -> Found:
    trace = read_trace(out / "measured.json")
    hidden, whole = copies_of(trace)
    return Found(
        seconds=trace.median_step_seconds,
        peak_bytes=max(trace.peak_memory_bytes),
        hidden_ratio=hidden / whole if whole else 0.0,
        copy_seconds=whole / max(len(trace.traced_step_seconds), 1),
        last_loss=json.loads((out / "result.json").read_text())["losses"][-1],
    )


def figures_of(found: dict[str, Found]) -> list[Figure]:
    """Return step, memory, copies and what of them hides."""
    kept, away = found["kept"], found["on the host"]

    def figure(name: str, value: float, unit: str, bar: float | None = None, better: Better = Better.LOWER) -> Figure:
        return Figure(name=name, value=value, unit=unit, bar=bar, better=better)

    return [
        *(figure(f"{name}: step", 1e3 * each.seconds, "ms") for name, each in found.items()),
        *(figure(f"{name}: peak memory", each.peak_bytes / GIB, "GiB") for name, each in found.items()),
        figure("memory saved", (kept.peak_bytes - away.peak_bytes) / GIB, "GiB", better=Better.HIGHER),
        figure("copies of a step", 1e3 * away.copy_seconds, "ms"),
        figure("share of the copies that hides", away.hidden_ratio, "", MIN_HIDDEN_RATIO, Better.HIGHER),
        figure("last losses differ by", abs(away.last_loss / kept.last_loss - 1), "", MAX_LOSS_DIFFERENCE),
    ]


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; return the exit status, 1 if a bar is missed. Tiny graphs have no bars."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DeviceKind), default=DeviceKind.CUDA, type=DeviceKind)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="has room for the graph, 0.5 GB")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args(arguments)
    if chosen.device is DeviceKind.CUDA and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU, and this machine has none: use --device cpu")
    figures = figures_of(trained(chosen.device, chosen.folder))
    if chosen.device is DeviceKind.CPU:
        figures = [replace(figure, bar=None) for figure in figures]
    print_figures(figures, title=f"activations on the host, {chosen.device}")
    if chosen.json:
        write_figures(chosen.json, figures, dict(environment(chosen.device)))
    return 0 if all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
