"""How far predicted steps are from measured ones, from microbenchmarks alone and after recalibration.

    python -m tests.bench.prediction --device cpu --json figures.json --out raw/

Calibrates, predicts every run, only then measures, compares task kind by task kind. Then recalibrates on every other
run of each graph and compares the prediction of the others. Raw data: `calibration.json`, `recalibrated.json`,
`runs.csv` (a row a run), `kinds.csv.gz` (a row a run, kind and phase), `spans.csv.gz` (a row a measured task).
"""

import argparse
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pandas as pd

from executor.environment import environment, local_cluster
from executor.measure.session import Session, effort_of, run_session
from executor.run import PlanRun, run_plans
from planner.explain import description
from simulator.calibrate import MeasuredRun, recalibrate
from simulator.compare import compare
from simulator.readers.generators import materialise
from simulator.readers.graphs import read_graph
from simulator.simulation import simulate
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.decision import PlanFile
from simulator.specs.files import read_calibration, read_trace, write_calibration
from simulator.specs.graph import CommunityGraph, FeatureNorm, GraphFile, GraphSource, RmatGraph
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, Recompute
from simulator.specs.trace import Trace
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from tests.bench.result import Better, Figure, print_figures, write_figures
from tests.plans import Choices, plan_file_of, plan_of

DATA = Path(os.environ.get("GRAPHPILOT_DATA", Path(__file__).parents[2] / "../shared/data"))
SMALL = ModelSpec(width=64, num_heads=8, num_layers=2, feed_forward_width=128)
DROPPING = ModelSpec(width=64, num_heads=8, num_layers=3, feed_forward_width=128, dropout_ratio=0.3)
WIDE = ModelSpec(width=128, num_heads=8, num_layers=4, feed_forward_width=256, dropout_ratio=0.1)
BF16 = Dtype.BFLOAT16


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run to predict and to measure."""

    graph: str
    model: ModelSpec
    choices: Choices


@dataclass(frozen=True, kw_only=True)
class Run:
    """A case with its plan on disk."""

    case: Case
    file: PlanFile
    plan_run: PlanRun


def graph_sources(kind: DeviceKind) -> dict[str, GraphSource]:
    """Return the graphs by name; those from files lie in `GRAPHPILOT_DATA`."""
    files = {
        "amazon-photo": GraphFile(path=str(DATA / "amazon-photo.npz"), normalize_features=FeatureNorm.ROW),
        "coauthor-cs": GraphFile(path=str(DATA / "coauthor-cs.npz"), normalize_features=FeatureNorm.ROW),
    }
    if kind is DeviceKind.CPU:
        return dict(files)
    return {
        "coauthor-physics": GraphFile(path=str(DATA / "coauthor-physics.npz"), normalize_features=FeatureNorm.ROW),
        "tolokers": GraphFile(path=str(DATA / "tolokers.npz")),
        "rmat-170k": RmatGraph(num_nodes=170_000, num_edges=1_200_000, num_features=64),
        "community-500k": CommunityGraph(num_nodes=500_000, num_edges=5_000_000),
    }


def cases(kind: DeviceKind, num_devices: int) -> Iterator[Case]:
    """Yield the runs: every plan kind on every graph, a different model every time round."""
    models = (SMALL, DROPPING) if kind is DeviceKind.CPU else (DROPPING, WIDE)
    for graph in graph_sources(kind):
        for model in models:
            yield Case(graph=graph, model=model, choices=Choices())
            if num_devices > 1:
                yield Case(graph=graph, model=model, choices=Choices(graph_parallel_degree=2))
        yield Case(graph=graph, model=SMALL, choices=Choices(recompute=Recompute.LAYER))
        yield Case(graph=graph, model=DROPPING, choices=Choices(num_parts=4))
        if kind is DeviceKind.CUDA:
            yield Case(graph=graph, model=WIDE, choices=Choices(precision=BF16))
        if num_devices > 1:
            gather = Choices(graph_parallel_degree=2, exchange=Exchange.ALL_GATHER)
            yield Case(graph=graph, model=SMALL, choices=gather)
            yield Case(graph=graph, model=SMALL, choices=Choices(data_parallel_degree=2, num_parts=4))
            yield Case(graph=graph, model=DROPPING, choices=Choices(graph_parallel_degree=2, recompute=Recompute.LAYER))
            if kind is DeviceKind.CUDA:
                yield Case(graph=graph, model=WIDE, choices=Choices(graph_parallel_degree=2, precision=BF16))


def prepare(kind: DeviceKind, cluster: ClusterSpec, folder: Path) -> list[Run]:
    """Return all runs with their plan files written."""
    train = TrainSpec(num_steps=28, learning_rate=0.003, evaluate_every_steps=28, trace_steps=4)
    graphs = {}
    for name, source in graph_sources(kind).items():
        stored = source if isinstance(source, GraphFile) else materialise(source, folder / "graphs")
        graphs[name] = read_graph(stored, base=folder)
    runs = []
    for index, case in enumerate(cases(kind, cluster.num_devices)):
        spec, graph = graphs[case.graph]
        plan = plan_of(case.choices, graph, case.model, folder)
        path = folder / f"plan{index}.json"
        file = plan_file_of(plan, spec, case.model, cluster, train, path)
        runs.append(Run(case=case, file=file, plan_run=PlanRun(plan_path=path, out=folder / f"run{index}", quiet=True)))
    return runs


def predict(runs: Sequence[Run], calibration: Calibration) -> list[Trace]:
    """Return a predicted trace of each run; of cluster batches, all steps of an epoch give the median."""
    traces = []
    for run in runs:
        file = run.file
        steps = [
            simulate(file.plan, file.graph, file.model, file.cluster, calibration, step=step, seed=file.train.seed)
            for step in range(min(file.plan.steps_per_epoch, 8))
        ]
        median = sorted(trace.median_step_seconds for trace in steps)[len(steps) // 2]
        traces.append(replace(steps[0], step_seconds=(median,)))
    return traces


def residuals(runs: Sequence[Run], predicted: Sequence[Trace], measured: Sequence[Trace], label: str) -> pd.DataFrame:
    """Return a row for each run: predicted and measured step, error, and the error by component."""
    rows = []
    for run, guess, trace in zip(runs, predicted, measured, strict=True):
        comparison = compare(guess, trace)
        rows.append(
            {
                "predicted_from": label,
                "graph": run.case.graph,
                "layers": run.case.model.num_layers,
                "width": run.case.model.width,
                "plan": description(run.file.plan),
                "predicted_seconds": guess.median_step_seconds,
                "measured_seconds": trace.median_step_seconds,
                "measured_p10": trace.step_seconds_quantile(0.1),
                "measured_p90": trace.step_seconds_quantile(0.9),
                "error_ratio": guess.median_step_seconds / trace.median_step_seconds - 1,
                "component_error_ratio": comparison.component_error_ratio,
                "predicted_bytes": max(guess.peak_memory_bytes),
                "measured_bytes": max(trace.peak_memory_bytes),
            }
        )
    return pd.DataFrame(rows)


def kind_residuals(
    runs: Sequence[Run], predicted: Sequence[Trace], measured: Sequence[Trace], label: str
) -> pd.DataFrame:
    """Return a row for each run, task kind and phase."""
    rows = []
    for run, guess, trace in zip(runs, predicted, measured, strict=True):
        for row in compare(guess, trace).rows:
            rows.append(
                {"predicted_from": label, "graph": run.case.graph, "plan": description(run.file.plan), **asdict(row)}
            )
    return pd.DataFrame(rows)


def span_table(measured: Sequence[Trace]) -> pd.DataFrame:
    """Return every measured span of every run."""
    rows = [
        {
            "run": index,
            "step": span.step,
            "rank": span.rank,
            "name": span.name,
            "kind": span.kind.value,
            "phase": span.phase.value,
            "dtype": span.dtype.value,
            "shape": " ".join(map(str, span.shape)),
            "start_us": round(1e6 * span.start_seconds, 2),
            "duration_us": round(1e6 * span.duration_seconds, 2),
            "waiting_us": round(1e6 * span.waiting_seconds, 2),
        }
        for index, trace in enumerate(measured)
        for span in trace.spans
    ]
    return pd.DataFrame(rows)


def summary(frame: pd.DataFrame, label: str, bars: tuple[float | None, float | None]) -> list[Figure]:
    """Return mean and worst absolute error of a table of residuals."""
    errors = 100 * frame["error_ratio"].abs()
    mean_bar, worst_bar = bars
    return [
        Figure(
            name=f"step error, {label}: mean", value=float(errors.mean()), unit="%", bar=mean_bar, better=Better.LOWER
        ),
        Figure(
            name=f"step error, {label}: worst", value=float(errors.max()), unit="%", bar=worst_bar, better=Better.LOWER
        ),
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(DeviceKind), default=DeviceKind.CPU, type=DeviceKind)
    parser.add_argument("--full", action="store_true", help="a calibration of more shapes, for minutes longer")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--out", type=Path, help="folder for the raw data")
    arguments = parser.parse_args()
    kind = arguments.device
    cluster = local_cluster(kind)
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        out = arguments.out or folder
        out.mkdir(parents=True, exist_ok=True)
        started = time.perf_counter()
        precisions = (Dtype.FLOAT32,) if kind is DeviceKind.CPU else (Dtype.FLOAT32, BF16)
        effort = effort_of(kind, quick=not arguments.full)
        run_session(Session(cluster=cluster, effort=effort, precisions=precisions, out=out / "calibration.json"))
        calibration = read_calibration(out / "calibration.json")
        print(f"calibrated in {time.perf_counter() - started:.0f} s", flush=True)
        runs = prepare(kind, cluster, folder)
        before = predict(runs, calibration)
        print(f"predicted {len(runs)} runs at {time.perf_counter() - started:.0f} s", flush=True)
        run_plans([run.plan_run for run in runs])
        print(f"measured at {time.perf_counter() - started:.0f} s", flush=True)
        measured = [read_trace(run.plan_run.out / "measured.json") for run in runs]
        known = [MeasuredRun(name=f"run{index}", trace=measured[index]) for index in range(0, len(runs), 2)]
        updated, corrections = recalibrate(calibration, cluster, known)
        write_calibration(out / "recalibrated.json", updated)
        after = predict(runs, updated)
        first, again = "microbenchmarks", "recalibrated, on other runs"
        tables = [residuals(runs, before, measured, first), residuals(runs[1::2], after[1::2], measured[1::2], again)]
        kinds = [kind_residuals(runs, before, measured, first), kind_residuals(runs, after, measured, again)]
        pd.concat(tables).to_csv(out / "runs.csv", index=False)
        pd.concat(kinds).to_csv(out / "kinds.csv.gz", index=False)
        span_table(measured).to_csv(out / "spans.csv.gz", index=False)
        on_cpu = kind is DeviceKind.CPU
        figures = [
            *summary(tables[0], first, (15.0, 35.0) if on_cpu else (None, None)),
            *summary(tables[1], again, (8.0, None) if on_cpu else (None, None)),
            *kind_figures(kinds[0], first),
        ]
        print(
            pd.concat(tables).to_string(
                columns=["graph", "layers", "width", "plan", "predicted_seconds", "measured_seconds", "error_ratio"],
                float_format="%.4f",
            )
        )
        print(*(f"{found.label}: x {found.factor:.3f} over {found.num_spans} spans" for found in corrections), sep="\n")
        print_figures(figures, title=f"prediction on {cluster.num_devices} x {cluster.device.name}")
        if arguments.json:
            write_figures(arguments.json, figures, {**dict(environment(kind)), "devices": str(cluster.num_devices)})


def kind_figures(frame: pd.DataFrame, label: str) -> list[Figure]:
    """Return the mean error of each task kind that holds over 2 % of the measured time, all runs together."""
    total = frame.groupby(["kind", "phase"], as_index=False)[["predicted_seconds", "measured_seconds"]].sum()
    total = total[total["measured_seconds"] > 0.02 * total["measured_seconds"].sum()]
    total = total.sort_values("measured_seconds", ascending=False)
    names = [f"{kind} {phase}, {label}" for kind, phase in zip(total["kind"], total["phase"], strict=True)]
    errors = (100 * (total["predicted_seconds"] / total["measured_seconds"] - 1)).abs()
    return [
        Figure(name=name, value=float(error), unit="%", bar=None, better=Better.LOWER)
        for name, error in zip(names, errors, strict=True)
    ]


if __name__ == "__main__":
    main()
