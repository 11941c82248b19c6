"""Predicted against measured peak memory: twenty settings on one GPU and on two.

    python -m tests.bench.memory --json figures.json      # two GPUs, about three minutes
    python -m tests.bench.memory --device cpu             # tiny: checks that all settings run

Every setting is a training of two steps by `run_plans` on a community graph with a million nodes, of four layers. The
fullest rank's prediction is compared with the most that a rank's allocator held: in use, and reserved. All settings run
in one launch; when one fails, those behind it run in another.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from executor.environment import environment, local_cluster
from executor.run import PlanRun, run_plans
from simulator.errors import PlanError, RunError
from simulator.memory import allocated_bytes, peak_memory, reserved_bytes
from simulator.readers.graphs import read_graph, write_store
from simulator.specs.cluster import DeviceKind
from simulator.specs.files import read_plan, read_trace
from simulator.specs.graph import GraphFile
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, ExchangePayload, Offload, Recompute
from simulator.specs.train import TrainSpec
from simulator.specs.units import GIB, Dtype
from tests.bench.device_graphs import community_graph
from tests.bench.result import Better, Figure, print_figures, write_figures
from tests.bench.scaling import Problem, labelled, striped
from tests.plans import Choices, plan_file_of, plan_of

NUM_NODES, NUM_EDGES, NUM_COMMUNITIES = 1_000_000, 10_000_000, 500
TINY_NODES, TINY_EDGES, TINY_COMMUNITIES = 400, 3_000, 4
NUM_LAYERS, NUM_HEADS = 4, 8
MIN_BYTES = 4 * GIB
MAX_MEAN_ERROR, MAX_ERROR = 0.06, 0.12
ROW_WEIGHT = 100

HALF, FULL = Dtype.BFLOAT16, Dtype.FLOAT32


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A plan and a model to train it with.

    Attributes:
        extras: dropout and edge biases.
    """

    choices: Choices
    width: int = 256
    extras: bool = False

    @property
    def model(self) -> ModelSpec:
        """The model."""
        return ModelSpec(
            width=self.width,
            num_heads=NUM_HEADS,
            num_layers=NUM_LAYERS,
            feed_forward_width=2 * self.width,
            dropout_ratio=0.1 if self.extras else 0.0,
            edge_bias=EdgeBias.DEGREE if self.extras else EdgeBias.NONE,
        )


_ONE = Choices(precision=HALF)
_TWO = Choices(precision=HALF, graph_parallel_degree=2)
_AWAY = (Offload.ACTIVATIONS,) * (NUM_LAYERS - 1) + (Offload.NONE,)
_OVERLAPPED = replace(_TWO, overlap_exchange=True)
SETTINGS = {
    "bf16": Setting(choices=_ONE),
    "fp32": Setting(choices=replace(_ONE, precision=FULL)),
    "bf16, dropout and biases": Setting(choices=_ONE, extras=True),
    "fp32, dropout and biases": Setting(choices=replace(_ONE, precision=FULL), width=128, extras=True),
    "bf16, 128 wide": Setting(choices=_ONE, width=128),
    **{f"bf16, {kind}": Setting(choices=replace(_ONE, recompute=kind)) for kind in Recompute if kind != "none"},
    "fp32, layer": Setting(choices=replace(_ONE, precision=FULL, recompute=Recompute.LAYER), width=128),
    "fp32, selective, dropout and biases": Setting(
        choices=replace(_ONE, precision=FULL, recompute=Recompute.SELECTIVE), width=128, extras=True
    ),
    "bf16, on the host": Setting(choices=replace(_ONE, offload=_AWAY)),
    "bf16, selective, on the host with the optimizer": Setting(
        choices=replace(_ONE, offload=_AWAY, recompute=Recompute.SELECTIVE, offload_optimizer=True)
    ),
    "halo": Setting(choices=_TWO),
    "halo, overlapped": Setting(choices=_OVERLAPPED),
    "halo of rows, overlapped": Setting(choices=replace(_OVERLAPPED, exchange_payload=ExchangePayload.ROWS)),
    "all rows": Setting(choices=replace(_TWO, exchange=Exchange.ALL_GATHER)),
    "heads": Setting(choices=replace(_TWO, exchange=Exchange.HEAD_ALL_TO_ALL)),
    "halo, overlapped, attention": Setting(choices=replace(_OVERLAPPED, recompute=Recompute.ATTENTION, precision=FULL)),
    "halo, fp32, dense": Setting(choices=replace(_TWO, recompute=Recompute.DENSE, precision=FULL)),
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """Bytes of the fullest rank."""

    predicted: int
    allocated: int
    predicted_reserved: int
    reserved: int


def measure(kind: DeviceKind, folder: Path, names: Sequence[str]) -> dict[str, Found]:
    """Return what each setting predicted and took, without those that failed; print each as it comes."""
    on_gpu = kind is DeviceKind.CUDA
    nodes, edges, communities = (
        (NUM_NODES, NUM_EDGES, NUM_COMMUNITIES) if on_gpu else (TINY_NODES, TINY_EDGES, TINY_COMMUNITIES)
    )
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    generator = torch.Generator(device).manual_seed(0)
    with tempfile.TemporaryDirectory(dir=folder) as inside:
        store = Path(inside) / "graph"
        write_store(labelled(community_graph("comm", nodes, edges, generator, num_communities=communities)), store)
        if on_gpu:
            torch.cuda.empty_cache()  # the ranks are other processes
        spec, graph = read_graph(GraphFile(path=str(store)), base=Path(inside))
        problem = Problem(name="comm", folder=Path(inside), spec=spec, graph=graph, has_communities=True)
        runs = {name: _run_of(problem, SETTINGS[name], index, kind) for index, name in enumerate(names)}
        _train(runs)
        return {name: _found(problem, SETTINGS[name], runs[name], kind) for name in names if _is_done(runs[name])}


def _run_of(problem: Problem, setting: Setting, index: int, kind: DeviceKind) -> PlanRun:
    out = problem.folder / str(index)
    out.mkdir()
    choices = setting.choices if kind is DeviceKind.CUDA else replace(setting.choices, offload_min_bytes=1)
    num_ranks = choices.graph_parallel_degree
    cut = striped(problem.graph, num_ranks, problem.folder, row_weight=ROW_WEIGHT)
    if cut.path:
        (out / cut.path).write_bytes((problem.folder / cut.path).read_bytes())
    plan = plan_of(choices, problem.graph, setting.model, out, partition=cut)
    train = TrainSpec(num_steps=2, learning_rate=1e-3, evaluate_every_steps=2)
    plan_file_of(plan, problem.spec, setting.model, local_cluster(kind), train, out / "plan.json")
    return PlanRun(plan_path=out / "plan.json", out=out, quiet=True)


def _is_done(run: PlanRun) -> bool:
    return (run.out / "result.json").exists()


def _train(runs: dict[str, PlanRun]) -> None:
    """Train all settings; one that fails ends its launch, and those behind it have another."""
    left = dict(runs)
    while left:
        try:
            run_plans(list(left.values()))
            return
        except (PlanError, RunError) as error:
            failed = next((name for name, run in left.items() if not _is_done(run)), "")
            print(f"{failed or 'the end of the launch'} failed: {error}", flush=True)
        names = list(left)
        left = {name: left[name] for name in names[names.index(failed) + 1 :]} if failed else {}


def _found(problem: Problem, setting: Setting, run: PlanRun, kind: DeviceKind) -> Found:
    plan = read_plan(run.plan_path).plan
    memory = peak_memory(plan, problem.spec, setting.model, local_cluster(kind))
    result = json.loads((run.out / "result.json").read_text())
    return Found(
        predicted=max(map(allocated_bytes, memory)),
        allocated=max(read_trace(run.out / "measured.json").peak_memory_bytes),
        predicted_reserved=max(map(reserved_bytes, memory)),
        reserved=max(result["reserved_memory_bytes"]),
    )


def figures_of(found: dict[str, Found]) -> list[Figure]:
    """Return predictions, measurements and errors of each setting, and the mean and the largest error."""
    figures = []
    for title, of in (
        ("allocated", {name: (each.predicted, each.allocated) for name, each in found.items()}),
        ("reserved", {name: (each.predicted_reserved, each.reserved) for name, each in found.items()}),
    ):
        errors = {name: predicted / measured - 1 for name, (predicted, measured) in of.items()}
        for name, (predicted, measured) in of.items():
            figures.append(_reported(f"{name}: {title}, measured", measured / GIB, "GiB"))
            figures.append(_reported(f"{name}: {title}, predicted", predicted / GIB, "GiB"))
            figures.append(_reported(f"{name}: {title}, error", errors[name], ""))
        sizes = [abs(error) for error in errors.values()]
        for word, value, bar in (("mean", np.mean(sizes), MAX_MEAN_ERROR), ("largest", max(sizes), MAX_ERROR)):
            name = f"{title}: {word} error of {len(sizes)} settings"
            figures.append(Figure(name=name, value=float(value), unit="", bar=bar, better=Better.LOWER))
    smallest = min(each.allocated for each in found.values()) / GIB
    figures.append(
        Figure(name="smallest setting", value=smallest, unit="GiB", bar=MIN_BYTES / GIB, better=Better.HIGHER)
    )
    return figures


def _reported(name: str, value: float, unit: str) -> Figure:
    return Figure(name=name, value=value, unit=unit, bar=None, better=Better.LOWER)


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; return the exit status, 1 if a bar is missed or a setting failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DeviceKind), default=DeviceKind.CUDA, type=DeviceKind)
    parser.add_argument("--folder", type=Path, default=Path("/dev/shm"), help="has room for the graph, 0.5 GB")
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args(arguments)
    names = list(SETTINGS)
    if chosen.device is DeviceKind.CUDA and torch.cuda.device_count() < 2:
        names = [name for name in names if SETTINGS[name].choices.num_ranks == 1]
        print("one GPU: settings of two ranks are left out", flush=True)
    started = time.perf_counter()
    found = measure(chosen.device, chosen.folder, names)
    print(f"{len(found)} of {len(names)} settings in {time.perf_counter() - started:.0f} s", flush=True)
    figures = figures_of(found)
    if chosen.device is DeviceKind.CPU:
        figures = [replace(figure, bar=None) for figure in figures]
    print_figures(figures, title=f"predicted against measured memory, {chosen.device}")
    if chosen.json:
        write_figures(chosen.json, figures, dict(environment(chosen.device)))
    return 0 if len(found) == len(names) and all(figure.holds for figure in figures) else 1


if __name__ == "__main__":
    raise SystemExit(main())
