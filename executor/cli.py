"""The one command. Each subcommand parses, calls one public function and prints; torch is imported only where used."""

import logging
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.logging import RichHandler

from executor.cli_output import (
    Output,
    comparison_json,
    comparison_tables,
    corrections_table,
    plan_tables,
    statistics_json,
    statistics_tables,
)
from planner.explain import description
from planner.partition import partition_graph
from planner.search import find_plan
from simulator.calibrate import MeasuredRun, recalibrate
from simulator.compare import compare
from simulator.errors import CalibrationError, NoFeasiblePlanError, PlanError, RunError, SpecError
from simulator.readers.generators import materialise
from simulator.readers.graphs import Graph, read_graph
from simulator.readers.inspect import graph_statistics
from simulator.simulation import simulate
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import BUILT_IN_CLUSTERS, ClusterSpec
from simulator.specs.convert import to_plain
from simulator.specs.files import (
    cluster_toml,
    read_calibration,
    read_plan,
    read_run,
    read_trace,
    write_calibration,
    write_plan,
    write_text_atomic,
    write_trace,
)
from simulator.specs.graph import GraphFile, GraphSource, GraphSpec
from simulator.specs.units import Dimension, Dtype, format_quantity

OWN_ERRORS = (SpecError, PlanError, NoFeasiblePlanError, CalibrationError, RunError)
INTERRUPTED_STATUS = 130

app = typer.Typer(
    help="Plan, simulate and run the training of graph transformers on large graphs over many GPUs.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
CalibrationOption = Annotated[Path, typer.Option("--calibration", help="calibration.json of the cluster's device.")]
ForceFlag = Annotated[bool, typer.Option("--force", help="Use a calibration of other software or hardware.")]


@app.callback()
def _settings(debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False) -> None:
    logging.basicConfig(
        level=logging.WARNING, format="%(message)s", handlers=[RichHandler(show_time=False, show_path=False)]
    )
    del debug  # `main` has seen it


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A graph store (.npz or folder), or a run.toml with a [graph].")],
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Print a graph in numbers, and what cutting it into 2, 4, 8 and 16 parts costs.

    Example: graphpilot inspect ../shared/data/cora.npz
    """
    output = Output(json, quiet)
    source: GraphSource = read_run(path).graph if path.suffix == ".toml" else GraphFile(path=str(path))
    spec, graph = _open(source, Path())
    statistics = graph_statistics(spec, graph)
    cuts = []
    with tempfile.TemporaryDirectory() as folder:
        for num_parts in (2, 4, 8, 16):
            output.progress(f"cutting into {num_parts} parts")
            cuts.append(partition_graph(graph, num_parts, seed=0, folder=Path(folder)))
    output.result(statistics_json(statistics, cuts), *statistics_tables(statistics, cuts))


@app.command()
def cluster(
    name: Annotated[str, typer.Argument(help="local, h200x8 or h100x8-ndr.")],
    out: Annotated[Path | None, typer.Option(help="Write it to this TOML file, to be edited.")] = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Print a cluster by name, in the form that `[cluster] file = ...` of a run.toml reads.

    Example: graphpilot cluster h100x8-ndr --out my-cluster.toml
    """
    if name != "local" and name not in BUILT_IN_CLUSTERS:
        raise SpecError(f"name must be one of local, {', '.join(BUILT_IN_CLUSTERS)}, got {name!r}")
    found = _cluster(None if name == "local" else BUILT_IN_CLUSTERS[name])
    if out is not None:
        write_text_atomic(out, cluster_toml(found))
    Output(json, quiet).result(dict(_plain(found)), cluster_toml(found).replace("[", "\\["))


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="Where the calibration goes.")] = Path("calibration.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes: under 40 s on two cores.")] = False,
    precisions: Annotated[str, typer.Option(help="Number formats to measure, such as fp32,bf16.")] = "fp32",
    host_only: Annotated[
        Path | None, typer.Option(help="Take this calibration and measure only how fast the host is today.")
    ] = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure every task kind and collective on this machine.

    Example: graphpilot calibrate --quick --out calibration.json
    """
    from executor.environment import local_cluster
    from executor.measure.session import Session, effort_of, expected_seconds, run_host_session, run_session

    output = Output(json, quiet)
    found = local_cluster()
    session = Session(
        cluster=found,
        effort=effort_of(found.device.kind, quick=quick),
        precisions=_precisions(precisions),
        out=out,
    )
    if host_only is not None:
        factor = run_host_session(session, _usable(host_only, found, force=False))
        output.result({"out": str(out), "host_factor": factor}, f"host costs x {factor:.3f}, written to {out}")
        return
    expected = expected_seconds(session)
    devices = f"{found.devices_per_host} x {found.device.name} ({found.device.kind})"
    output.progress(f"calibrating {devices}: about {format_quantity(expected, Dimension.SECONDS)}")
    run_session(session)
    calibration = read_calibration(out)
    counts = {"computes": len(calibration.computes), "collectives": len(calibration.collectives)}
    output.result(
        {"out": str(out), "device": calibration.device_name, **counts},
        f"{counts['computes']} samples of tasks and {counts['collectives']} of collectives on {devices}: {out}",
    )


@app.command()
def plan(
    run: Annotated[Path, typer.Argument(help="run.toml with [graph] [model] [cluster] [train] and maybe [search].")],
    calibration: CalibrationOption,
    out: Annotated[Path, typer.Option(help="Where the plan goes; its partition goes beside it.")] = Path("plan.json"),
    force: ForceFlag = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Choose the plan with the shortest predicted epoch, and say why the others lost.

    Example: graphpilot plan run.toml --calibration calibration.json --out plan.json
    """
    output = Output(json, quiet)
    spec_of_run = read_run(run)
    found_cluster = _cluster(spec_of_run.cluster)
    usable = _usable(calibration, found_cluster, force=force, is_here=spec_of_run.cluster is None)
    spec, graph = _open(spec_of_run.graph, run.parent)
    file = find_plan(
        spec,
        graph,
        spec_of_run.model,
        found_cluster,
        spec_of_run.train,
        spec_of_run.search,
        usable,
        folder=out.parent,
        on_progress=output.progress,
    )
    write_plan(out, file)
    content = {"out": str(out), "description": description(file.plan), **dict(_plain(file.prediction))}
    output.result(
        {**content, "ranking": _plain(file.ranking), "rejected": file.rejected},
        *plan_tables(file),
        f"written to {out}",
    )


@app.command(name="simulate")
def simulate_command(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    calibration: CalibrationOption,
    out: Annotated[Path, typer.Option(help="Where the predicted trace goes; it opens in Perfetto.")] = Path(
        "predicted.json"
    ),
    step: Annotated[int, typer.Option(help="Which training step; cluster batches differ.", min=0)] = 0,
    trials: Annotated[int, typer.Option(help="Steps to draw for the interval.", min=1)] = 20,
    force: ForceFlag = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Predict a step of a plan, task by task.

    Example: graphpilot simulate plan.json --calibration calibration.json --out predicted.json
    """
    file = read_plan(plan)
    usable = _usable(calibration, file.cluster, force=force)
    trace = simulate(
        file.plan, file.graph, file.model, file.cluster, usable, step=step, seed=file.train.seed, trials=trials
    )
    write_trace(out, trace)
    quantiles = {f"p{ratio}": trace.step_seconds_quantile(ratio / 100) for ratio in (10, 50, 90)}
    shown = " / ".join(format_quantity(seconds, Dimension.SECONDS) for seconds in quantiles.values())
    Output(json, quiet).result(
        {"out": str(out), "step_seconds": quantiles, "num_spans": len(trace.spans)},
        f"step (p10 / p50 / p90): {shown}; {len(trace.spans)} spans written to {out}",
    )


@app.command()
def train(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for measured.json, result.json and weights.pt; else the plan's.")
    ] = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Train as a plan says: alone, starting the ranks of this host, or unchanged under torchrun on many hosts.

    Example: graphpilot train plan.json --out run, or torchrun --nproc-per-node 8 -m executor train plan.json
    """
    import json as json_module

    from executor.launch import is_under_torchrun
    from executor.run import PlanRun, run_plan

    folder = plan.parent if out is None else out
    run_plan(PlanRun(plan_path=plan, out=folder, quiet=quiet or json))
    if is_under_torchrun():
        return
    result: dict[str, Any] = json_module.loads((folder / "result.json").read_text())
    best = result["best"]
    Output(json, quiet).result(
        {"out": str(folder), **{key: result[key] for key in ("best_step", "best", "median_step_seconds")}},
        f"best validation accuracy {best['val_accuracy_ratio']:.3f} (test {best['test_accuracy_ratio']:.3f}) at step "
        f"{result['best_step'] + 1}; median step {format_quantity(result['median_step_seconds'], Dimension.SECONDS)}; "
        f"results in {folder}",
    )


@app.command(name="compare")
def compare_command(
    predicted: Annotated[Path, typer.Argument(help="predicted.json")],
    measured: Annotated[Path, typer.Argument(help="measured.json")],
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Show where a prediction is off, task kind by task kind.

    Example: graphpilot compare predicted.json measured.json
    """
    comparison = compare(read_trace(predicted), read_trace(measured))
    Output(json, quiet).result(comparison_json(comparison), *comparison_tables(comparison))


@app.command(name="recalibrate")
def recalibrate_command(
    calibration: Annotated[Path, typer.Argument(help="calibration.json that predicted the runs.")],
    measured: Annotated[list[Path], typer.Argument(help="measured.json of one or more runs.")],
    out: Annotated[Path, typer.Option(help="Where the new calibration goes.")],
    devices_per_host: Annotated[int | None, typer.Option(help="Of the cluster that ran; else of this host.")] = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Move costs to where measured traces put them, and say which moved by how much.

    Example: graphpilot recalibrate calibration.json run/measured.json --out calibration.json
    """
    from dataclasses import replace

    found = _cluster(None)
    if devices_per_host is not None:
        found = replace(found, devices_per_host=devices_per_host)
    runs = [MeasuredRun(name=str(path), trace=read_trace(path)) for path in measured]
    updated, corrections = recalibrate(read_calibration(calibration), found, runs)
    write_calibration(out, updated)
    Output(json, quiet).result(
        {"out": str(out), "corrections": _plain(corrections)}, corrections_table(corrections), f"written to {out}"
    )


@app.command()
def report(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    predicted: Annotated[Path, typer.Option(help="predicted.json")],
    measured: Annotated[Path | None, typer.Option(help="measured.json")] = None,
    recalibrated: Annotated[Path | None, typer.Option(help="predicted.json after recalibration")] = None,
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("report.html"),
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Write one self-contained HTML page about a plan, its prediction and its run.

    Example: graphpilot report plan.json --predicted predicted.json --measured run/measured.json
    """
    from executor.report.page import write_report

    trace = read_trace(measured) if measured else None
    again = compare(read_trace(recalibrated), trace) if recalibrated and trace else None
    write_report(out, plan_file=read_plan(plan), predicted=read_trace(predicted), measured=trace, recalibrated=again)
    Output(json, quiet).result({"out": str(out)}, f"report: {out.resolve()}")


def _open(source: GraphSource, base: Path) -> tuple[GraphSpec, Graph]:
    """Return a graph; a generated one is made in the cache first."""
    if not isinstance(source, GraphFile):
        from executor.encodings import cache_folder

        source = materialise(source, cache_folder() / "graphs")
    return read_graph(source, base=base)


def _cluster(found: ClusterSpec | None) -> ClusterSpec:
    """Return a cluster; None is this machine."""
    if found is not None:
        return found
    from executor.environment import local_cluster

    return local_cluster()


def _usable(path: Path, found: ClusterSpec, *, force: bool, is_here: bool | None = None) -> Calibration:
    """Return a calibration that fits a cluster, and this machine's software where the cluster is this machine."""
    calibration = read_calibration(path)
    if is_here is None:
        is_here = found.name == "local"
    if is_here and not force:
        from executor.environment import environment, environment_differences

        differences = environment_differences(calibration.environment, environment(found.device.kind))
        if differences:
            raise CalibrationError(
                f"{path} was measured elsewhere: {'; '.join(differences)}; calibrate again, or go on with --force"
            )
    return calibration


def _precisions(text: str) -> tuple[Dtype, ...]:
    try:
        return tuple(Dtype(name.strip()) for name in text.split(","))
    except ValueError:
        raise SpecError(f"--precisions must name some of {', '.join(Dtype)}, got {text!r}") from None


def _plain(value: object) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple) else to_plain(value)


def main() -> None:
    """Run the command and turn errors into one sentence and an exit status."""
    debug = "--debug" in sys.argv
    try:
        status = app(standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        status = INTERRUPTED_STATUS
    except OWN_ERRORS as error:
        _say(str(error), debug)
        status = error.exit_status
    except OSError as error:
        _say(f"{error.filename or 'a file'}: {error.strerror or error}", debug)
        status = SpecError.exit_status
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "show"):  # a usage error of click, which typer may hide
            error.show()
            sys.exit(error.exit_code)
        if debug:
            raise
        _say(f"our own fault: {type(error).__name__}: {error}; run with --debug for the traceback", debug)
        status = 1
    except BaseException as error:
        number = getattr(error, "signal_number", None)
        if number is None:
            raise
        status = 128 + number
    sys.exit(status if isinstance(status, int) else 0)


def _say(sentence: str, debug: bool) -> None:
    if debug:
        logging.exception(sentence)
    print(f"graphpilot: {sentence}", file=sys.stderr)
