"""How far the predicted time of attention is from the measured one on graphs that the costs were not fitted to.

    python -m tests.bench.attention_cost --device cpu --json figures.json

Calibrates attention as `graphpilot calibrate --quick` does, then times it forward and backward on other graphs, with
other sizes, heads and widths. Three predictions are held against the measured medians: that of `simulator/costs.py`;
that of the features it had before (flops, bytes, and the five counts without long rows and cache) from the same
samples; and that of those features from uniform random graphs alone, as it was then. Last, each kind of graph of the
calibration is predicted from the other kinds. Raw data: `cases.csv` (a row a case and phase), `calibration.json`.
"""

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.optimize
import torch

from executor.attention.graph import EdgeGraph
from executor.environment import environment, local_cluster
from executor.measure.case import Case
from executor.measure.cases import build_attention_case
from executor.measure.computes import compute_samples, measure_case
from executor.measure.effort import Effort, GraphKind
from executor.measure.session import attention_cases_on, effort_of
from executor.mesh import device_of
from simulator.costs import ComputeCosts
from simulator.readers.graphs import read_graph
from simulator.specs.calibration import Calibration, ComputeSample
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.files import write_calibration
from simulator.specs.graph import GraphFile
from simulator.specs.program import Phase, Task, TaskKind
from simulator.specs.units import Dtype
from tests.bench.device_graphs import DeviceGraph, community_graph, rmat_graph
from tests.bench.prediction import DATA
from tests.bench.result import Better, Figure, print_figures, write_figures

Heads = tuple[int, int]  # how many, and their size
STANDARD: Heads = (8, 16)
FILES: dict[str, tuple[Heads, ...]] = {
    "tolokers": (STANDARD, (4, 16)),
    "coauthor-physics": (STANDARD, (8, 32)),
    "amazon-photo": (STANDARD, (2, 32)),
    "wordnet-synsets": (STANDARD, (8, 4)),
}
PRECISION = {DeviceKind.CPU: Dtype.FLOAT32, DeviceKind.CUDA: Dtype.BFLOAT16}
SERIES = ("features of costs.py", "former features", "former features, uniform graphs")


@dataclass(frozen=True, kw_only=True)
class Unseen:
    """A graph that no cost was fitted to, and the heads to time on it.

    Attributes:
        make: gives the edges, on the device of the generator.
    """

    name: str
    make: Callable[[torch.Generator], EdgeGraph]
    heads: tuple[Heads, ...]


def unseen_graphs(kind: DeviceKind) -> list[Unseen]:
    """Return the graphs to predict."""
    if kind is DeviceKind.CPU:
        return [
            *(Unseen(name=name, make=partial(_stored, name), heads=heads) for name, heads in FILES.items()),
            _rmat("rmat 60k", 60_000, 500_000, STANDARD, (4, 32)),
            _community("community 40k", 40_000, 600_000, 40, STANDARD, (4, 8)),
        ]
    return [
        _rmat("rmat 170k", 169_000, 2_300_000, STANDARD, (4, 32), (8, 32)),
        _rmat("rmat 600k", 600_000, 24_000_000, STANDARD),
        _rmat("rmat 2.45M", 2_449_000, 120_000_000, STANDARD),
        _community("community 500k", 500_000, 10_000_000, 500, STANDARD, (8, 32)),
        _community("community 233k", 233_000, 60_000_000, 64, STANDARD, (4, 16)),
    ]


def _rmat(name: str, num_nodes: int, num_edges: int, *heads: Heads) -> Unseen:
    return Unseen(name=name, make=lambda g: _edges(rmat_graph(name, num_nodes, num_edges, g)), heads=heads)


def _community(name: str, num_nodes: int, num_edges: int, num_communities: int, *heads: Heads) -> Unseen:
    def make(generator: torch.Generator) -> EdgeGraph:
        return _edges(community_graph(name, num_nodes, num_edges, generator, num_communities=num_communities))

    return Unseen(name=name, make=make, heads=heads)


def _edges(graph: DeviceGraph) -> EdgeGraph:
    source_E = graph.source_E.to(torch.int32)
    return EdgeGraph(indptr_N1=graph.indptr_N1, source_E=source_E, num_sources=graph.num_nodes)


def _stored(name: str, generator: torch.Generator) -> EdgeGraph:
    graph = read_graph(GraphFile(path=str(DATA / f"{name}.npz")), base=Path())[1]
    indptr_N1, source_E = (
        torch.from_numpy(array).to(generator.device)
        for array in (np.array(graph.indptr_N, dtype=np.int64), np.array(graph.source_E, dtype=np.int32))
    )
    return EdgeGraph(indptr_N1=indptr_N1, source_E=source_E, num_sources=graph.num_nodes)


def measured(case: Case, effort: Effort, device: torch.device) -> list[ComputeSample]:
    """Return a sample of each phase."""
    return compute_samples(case, measure_case(case, effort, device, None), busy_devices=1)


def measure_unseen(
    kind: DeviceKind, cluster: ClusterSpec, effort: Effort, device: torch.device
) -> Iterator[tuple[str, ComputeSample]]:
    """Yield the samples to be predicted, each with the name of its graph and its heads."""
    generator = torch.Generator(device).manual_seed(1)
    for unseen in unseen_graphs(kind):
        graph = unseen.make(generator)
        for heads, head_size in unseen.heads:
            case = build_attention_case(
                graph, heads, head_size, PRECISION[kind], device, cache_bytes=cluster.device.cache_bytes
            )
            for sample in measured(case, effort, device):
                yield f"{unseen.name} {heads} x {head_size}", sample


# --- Predictions.


def calibration_of(samples: Sequence[ComputeSample], cluster: ClusterSpec) -> Calibration:
    """Return a calibration of attention alone."""
    environment_pairs = environment(cluster.device.kind)
    return Calibration(
        device_name=cluster.device.name, environment=environment_pairs, computes=tuple(samples), collectives=()
    )


def predicted(costs: ComputeCosts, sample: ComputeSample) -> float:
    """Return the seconds that a sample's task is predicted to take."""
    task = Task(
        name="",
        kind=TaskKind.ATTENTION,
        phase=sample.phase,
        shape=sample.shape,
        dtype=sample.dtype,
        beyond_cache_ratio=sample.beyond_cache_ratio,
    )
    return costs.price(task).device_seconds


class FormerCosts:
    """What `ComputeCosts` did before it knew of long rows and of the cache, for the gain to be seen."""

    def __init__(self, samples: Sequence[ComputeSample]) -> None:
        self._laws = {phase: self._fit([s for s in samples if s.phase is phase]) for phase in _phases(samples)}

    def seconds(self, sample: ComputeSample) -> float:
        """Return the seconds that a sample's task is predicted to take."""
        coefficients, log_shapes, log_ratios = self._laws[sample.phase]
        distances = np.linalg.norm(log_shapes - self._log_shape(sample), axis=1)
        weights = 1 / (distances + 1e-6) ** 4
        line = float(self._features(sample) @ coefficients)
        return line * math.exp(float(weights @ log_ratios / weights.sum()))

    def _fit(self, samples: Sequence[ComputeSample]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        features = np.array([self._features(sample) for sample in samples])
        seconds = np.array([sample.seconds for sample in samples])
        scale = features.max(axis=0)
        coefficients, _ = scipy.optimize.nnls(features / scale / seconds[:, None], np.ones(len(samples)))
        line = features @ (coefficients / scale)
        return coefficients / scale, np.array([self._log_shape(s) for s in samples]), np.log(seconds / line)

    @staticmethod
    def _log_shape(sample: ComputeSample) -> np.ndarray:
        targets, sources, edges, _, _, heads, head_size = sample.shape
        return np.log1p([targets, sources, edges, heads, head_size])

    @staticmethod
    def _features(sample: ComputeSample) -> np.ndarray:
        targets, sources, edges, _, _, heads, head_size = sample.shape
        width = heads * head_size
        num_bytes = 2 * sample.dtype.num_bytes * width * (targets + sources + edges) + 8 * edges
        return np.array([1.0, 4 * edges * width, num_bytes])


def _phases(samples: Sequence[ComputeSample]) -> list[Phase]:
    return sorted({sample.phase for sample in samples})


def comparison(
    named: Sequence[tuple[str, ComputeSample]],
    samples: Sequence[ComputeSample],
    uniform: Sequence[ComputeSample],
    cluster: ClusterSpec,
) -> pd.DataFrame:
    """Return a row for each case and phase: measured seconds, and predicted over measured of each series."""
    costs = ComputeCosts(calibration_of(samples, cluster), busy_devices=1)
    former, former_uniform = FormerCosts(samples), FormerCosts(uniform)
    return pd.DataFrame(
        {
            "case": name,
            "phase": sample.phase.value,
            "edges": sample.shape[2],
            "of long rows %": 100 * sample.shape[3] / sample.shape[2],
            "beyond cache %": 100 * (sample.beyond_cache_ratio or 0.0),
            "measured ms": 1e3 * sample.seconds,
            "p10 ms": 1e3 * sample.low_seconds,
            "p90 ms": 1e3 * sample.high_seconds,
            SERIES[0]: predicted(costs, sample) / sample.seconds,
            SERIES[1]: former.seconds(sample) / sample.seconds,
            SERIES[2]: former_uniform.seconds(sample) / sample.seconds,
        }
        for name, sample in named
    )


def without_each_kind(
    samples: Sequence[ComputeSample], kinds: Sequence[GraphKind], cluster: ClusterSpec
) -> dict[GraphKind, float]:
    """Return the mean error, in per cent, on each kind of graph by costs that were fitted to the other kinds.

    Args:
        kinds: of the graph of each sample.
    """
    found = {}
    for kind in GraphKind:
        others = [sample for sample, other in zip(samples, kinds, strict=True) if other is not kind]
        costs = ComputeCosts(calibration_of(others, cluster), busy_devices=1)
        own = [sample for sample, other in zip(samples, kinds, strict=True) if other is kind]
        found[kind] = 100 * float(np.mean([abs(predicted(costs, sample) / sample.seconds - 1) for sample in own]))
    return found


def figures_of(table: pd.DataFrame, left_out: dict[GraphKind, float]) -> list[Figure]:
    """Return the errors in total, by phase, and of each case."""

    def error(name: str, value: float) -> Figure:
        return Figure(name=name, value=value, unit="%", bar=None, better=Better.LOWER)

    found = []
    for series in SERIES:
        errors = 100 * (table[series] - 1).abs()
        found += [
            error(f"{series}: mean error", float(errors.mean())),
            error(f"{series}: median error", float(errors.median())),
            error(f"{series}: worst error", float(errors.max())),
        ]
    found += [error(f"{kind} graphs, from the other kinds: mean error", value) for kind, value in left_out.items()]
    errors = 100 * (table[SERIES[0]] - 1).abs()
    names = table["case"] + ", " + table["phase"]
    return found + [error(f"{name}: error", float(value)) for name, value in zip(names, errors, strict=True)]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DeviceKind), default=DeviceKind.CPU, type=DeviceKind)
    parser.add_argument("--full", action="store_true", help="calibrate more cases, for a minute longer")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--out", type=Path, help="folder for the raw data")
    arguments = parser.parse_args()
    kind = arguments.device
    cluster, effort, device = local_cluster(kind), effort_of(kind, quick=not arguments.full), device_of(kind, 0)
    started = time.perf_counter()
    cases = attention_cases_on(device, effort, PRECISION[kind], cache_bytes=cluster.device.cache_bytes)
    groups = [measured(case, effort, device) for case in cases]
    samples = [sample for group in groups for sample in group]
    kinds = [case.graph for case, group in zip(effort.attention, groups, strict=True) for _ in group]
    print(f"calibrated {len(groups)} cases in {time.perf_counter() - started:.0f} s", flush=True)
    named = list(measure_unseen(kind, cluster, effort, device))
    print(f"measured at {time.perf_counter() - started:.0f} s", flush=True)
    uniform = [sample for sample, graph in zip(samples, kinds, strict=True) if graph is GraphKind.UNIFORM]
    table = comparison(named, samples, uniform, cluster)
    figures = figures_of(table, without_each_kind(samples, kinds, cluster))
    print(table.to_string(float_format="%.3f", index=False))
    print_figures(figures, title=f"cost of attention on {cluster.device.name}, graphs that were not fitted")
    with tempfile.TemporaryDirectory() as folder:
        out = arguments.out or Path(folder)
        out.mkdir(parents=True, exist_ok=True)
        table.to_csv(out / "cases.csv", index=False)
        write_calibration(out / "calibration.json", calibration_of(samples, cluster))
    if arguments.json:
        write_figures(arguments.json, figures, dict(environment(kind)))


if __name__ == "__main__":
    main()
