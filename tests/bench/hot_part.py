"""Steps on four ranks when one part has three times the mean edges: one rank a part, against several for that part.

    graphpilot calibrate --out calibration.json
    python -m tests.bench.hot_part --calibration calibration.json --json figures.json     # four processes on CPUs
    python -m tests.bench.hot_part --tiny                                                 # checks the logic

The graph is R-MAT of arXiv's size. METIS cuts it into twelve parts of about equal edges; nine of them are the hot part,
so that it has three quarters of all edges, three times the mean of four parts. The same nodes are hot in every plan. On
one rank a part, three ranks have a twelfth each; where the hot part has more ranks, the others' parts are joined.

A step's seconds are those of the clock. Where there are fewer cores than ranks, all work of a step shares them, however
it is spread: then the clock has no bar. Beside it stand the processor seconds of the thread that computes, of the rank
that needs most, and what the simulator predicts for a core a rank.
"""

import argparse
import dataclasses
import os
import pickle
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in __all__

from executor.environment import environment, local_cluster
from executor.launch import launch, meet
from executor.mesh import joined_mesh, mesh_choices
from executor.record import Recorder
from executor.train import Inputs, Trainer
from planner.partition import part_specs, partition_graph
from planner.shares import part_loads, part_shares, ranks_by_load
from simulator.readers.graphs import Graph, read_graph, write_store
from simulator.readers.partitions import load_parts, parts_sha256
from simulator.simulation import simulate
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import DeviceKind
from simulator.specs.files import read_calibration
from simulator.specs.graph import GraphFile, GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, PartitionMethod, PartitionSpec, Plan, Recompute
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from tests.bench.device_graphs import rmat_graph
from tests.bench.result import Better, Figure, print_figures, write_figures

NUM_RANKS = 4
NUM_CUTS, NUM_HOT = 12, 9
NUM_WARM, NUM_STEPS, NUM_ROUNDS = 2, 5, 2
MODEL = ModelSpec(width=64, num_heads=8, num_layers=2, feed_forward_width=128)
TRAIN = TrainSpec(num_steps=1000, learning_rate=0.003)
MIN_SPEEDUP = 1.3


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan with the part of each node."""

    name: str
    plan: Plan
    part_N: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every process gets."""

    spec: GraphSpec
    folder: Path
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps of one rank: seconds by the clock, of the computing thread, and of all threads of the process."""

    clock: tuple[float, ...]
    thread: tuple[float, ...]
    process: tuple[float, ...]
    last_loss: float


def made_graph(folder: Path, *, tiny: bool) -> tuple[GraphSpec, Graph]:
    """Return an R-MAT graph of arXiv's size with random labels, from a store in a folder."""
    num_nodes, num_edges = (600, 9_000) if tiny else (170_000, 2_300_000)
    device_graph = rmat_graph("rmat_s", num_nodes, num_edges, torch.Generator().manual_seed(0))
    generator = np.random.default_rng(0)
    is_train_N = np.ones(num_nodes, dtype=np.bool_)
    graph = Graph(
        indptr_N=device_graph.indptr_N1.numpy().astype(np.int64),
        source_E=device_graph.source_E.numpy().astype(np.int32),
        features=generator.standard_normal((num_nodes, 64), dtype=np.float32),
        labels_N=generator.integers(0, 40, num_nodes),
        train_mask_N=is_train_N,
        val_mask_N=~is_train_N,
        test_mask_N=~is_train_N,
    )
    write_store(graph, folder / "graph")
    return read_graph(GraphFile(path=str(folder / "graph"), add_self_loops=True), base=folder)


def candidates_of(graph: Graph, folder: Path) -> tuple[Candidate, ...]:
    """Return one rank a part, and plans that give the hot part more of the ranks."""
    cut = partition_graph(graph, NUM_CUTS, seed=0, folder=folder)
    cut_N = load_parts(folder / cut.path, num_nodes=graph.num_nodes, num_parts=NUM_CUTS)
    cold_N = np.maximum(cut_N - NUM_HOT + 1, 0).astype(np.int32)  # 0 for the hot part, 1 to 3 for the others
    found = [Candidate(name="1+1+1+1", plan=_plan(graph, cold_N, (1, 1, 1, 1)), part_N=cold_N)]
    for num_cold in (2, 1):
        part_N = np.minimum(cold_N, num_cold)
        parts = part_specs(graph, part_N, num_cold + 1)
        part_ranks = ranks_by_load(part_loads(parts), NUM_RANKS)
        name = "+".join(map(str, part_ranks))
        found.append(Candidate(name=name, plan=_plan(graph, part_N, part_ranks), part_N=part_N))
    return tuple(found)


def _plan(graph: Graph, part_N: np.ndarray, part_ranks: tuple[int, ...]) -> Plan:
    partition = PartitionSpec(
        method=PartitionMethod.METIS,
        seed=0,
        path="",
        sha256=parts_sha256(part_N),
        parts=part_specs(graph, part_N, len(part_ranks)),
        shares=part_shares(graph, part_N, part_ranks) if max(part_ranks) > 1 else None,
    )
    return Plan(
        data_parallel_degree=1,
        graph_parallel_degree=NUM_RANKS,
        partition=partition,
        parts_per_batch=len(part_ranks),
        exchange=(Exchange.HALO,) * MODEL.num_layers,
        recompute=(Recompute.NONE,) * MODEL.num_layers,
        precision=Dtype.FLOAT32,
    )


def run_as_rank(job: Job, store: Store, rank: int) -> None:
    """Train every plan in turn, several times, and write what each step took."""
    _, graph = read_graph(job.spec.source, base=job.folder)
    for number in range(NUM_ROUNDS):
        for candidate in job.candidates:
            name = f"{candidate.name} round {number}"
            own_store = PrefixStore(name, store)
            local_rank = int(os.environ.get("LOCAL_RANK", rank))
            inputs = Inputs(graph=graph, part_N=candidate.part_N, encodings=None)
            with joined_mesh(
                DeviceKind.CPU,
                own_store,
                rank=rank,
                local_rank=local_rank,
                cpu_affinity=False,
                **mesh_choices(candidate.plan),
            ) as place:
                trainer = Trainer(candidate.plan, job.spec, MODEL, TRAIN, inputs, place, Recorder())
                _path(job.folder, name, rank).write_bytes(pickle.dumps(_timed_steps(trainer)))
                trainer.close()
            meet(own_store, "done", NUM_RANKS, arrive=True)


def _timed_steps(trainer: Trainer) -> Steps:
    rows = []
    for step in range(NUM_WARM + NUM_STEPS):
        data = trainer.batch(step)
        before = (time.perf_counter(), time.thread_time(), time.process_time())
        loss = float(trainer.step(step, data))
        after = (time.perf_counter(), time.thread_time(), time.process_time())
        rows.append(tuple(end - start for start, end in zip(before, after, strict=True)))
    clock, thread, process = zip(*rows[NUM_WARM:], strict=True)
    return Steps(clock=clock, thread=thread, process=process, last_loss=loss)


def _path(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.rank{rank}.pickle"


def steps_of(folder: Path, name: str) -> list[Steps]:
    """Return each rank's steps of a plan, all rounds together."""
    found = []
    for rank in range(NUM_RANKS):
        rounds = [
            pickle.loads(_path(folder, f"{name} round {number}", rank).read_bytes()) for number in range(NUM_ROUNDS)
        ]
        joined = {
            field: tuple(value for each in rounds for value in getattr(each, field))
            for field in ("clock", "thread", "process")
        }
        found.append(Steps(**joined, last_loss=rounds[-1].last_loss))
    return found


def busiest(seconds_by_rank: Sequence[Sequence[float]]) -> float:
    """Return the median seconds of the rank whose median is largest."""
    return max(statistics.median(seconds) for seconds in seconds_by_rank)


def predicted_seconds(plan: Plan, spec: GraphSpec, calibration: Calibration | None) -> float | None:
    """Return the predicted step on a core for each rank; None without a calibration of this device."""
    if calibration is None:
        return None
    cluster = dataclasses.replace(local_cluster(DeviceKind.CPU), devices_per_host=NUM_RANKS)
    return simulate(plan, spec, MODEL, cluster, calibration).median_step_seconds


def figures_of(job: Job, calibration: Calibration | None) -> list[Figure]:
    """Return for each plan its seconds, and how much faster it is than one rank a part."""
    found, first = [], job.candidates[0].name
    with_bar = {"busiest rank, computing thread"}
    if (os.cpu_count() or 1) >= NUM_RANKS:
        with_bar.add("step by the clock")
    values: dict[str, dict[str, float]] = {}
    for candidate in job.candidates:
        steps = steps_of(job.folder, candidate.name)
        mine = {
            "step by the clock": busiest([rank.clock for rank in steps]),
            "busiest rank, computing thread": busiest([rank.thread for rank in steps]),
            "busiest rank, all threads": busiest([rank.process for rank in steps]),
        }
        seconds = predicted_seconds(candidate.plan, job.spec, calibration)
        values[candidate.name] = mine if seconds is None else {**mine, "step predicted, a core a rank": seconds}
        found += [
            Figure(name=f"{candidate.name}: {what}", value=value, unit="s", bar=None, better=Better.LOWER)
            for what, value in values[candidate.name].items()
        ]
        clock = steps[0].clock  # ranks meet in each step, so that their clocks agree
        found += [
            Figure(
                name=f"{candidate.name}: {word} step by the clock", value=value, unit="s", bar=None, better=Better.LOWER
            )
            for word, value in (("fastest", min(clock)), ("slowest", max(clock)))
        ]
        found.append(
            Figure(
                name=f"{candidate.name}: last loss", value=steps[0].last_loss, unit="", bar=None, better=Better.LOWER
            )
        )
    for name in list(values)[1:]:
        for what, value in values[name].items():
            bar = MIN_SPEEDUP if what in with_bar else None
            found.append(
                Figure(
                    name=f"{name} over {first}: {what}",
                    value=values[first][what] / value,
                    unit="x",
                    bar=bar,
                    better=Better.HIGHER,
                )
            )
    return found


def main(arguments: Sequence[str] | None = None) -> list[Figure]:
    """Measure, print, write; return the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a graph of 600 nodes")
    parser.add_argument("--calibration", type=Path, help="of this device, for the predictions")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        spec, graph = made_graph(folder, tiny=options.tiny)
        job = Job(spec=spec, folder=folder, candidates=candidates_of(graph, folder))
        for candidate in job.candidates:
            parts = candidate.plan.partition.parts
            print(f"{candidate.name}: edges {[part.num_edges for part in parts]}, nodes", end=" ")
            print(f"{[part.num_nodes for part in parts]}, halo rows {[part.num_halo_rows for part in parts]}")
        launch(run_as_rank, job, num_ranks=NUM_RANKS, folder=folder)
        calibration = None if options.calibration is None else read_calibration(options.calibration)
        figures = figures_of(job, calibration)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    print_figures(figures, title=f"hot part on {NUM_RANKS} processes and {os.cpu_count()} cores, load {load}")
    if options.json:
        write_figures(options.json, figures, {**dict(environment(DeviceKind.CPU)), "load": load})
    return figures


if __name__ == "__main__":
    main()
