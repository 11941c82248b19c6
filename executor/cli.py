"""The one command. Each subcommand parses, calls one public function and prints; torch is imported only where used."""

import json as json_module
import logging
import os
import signal
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.logging import RichHandler

from executor.cli_cluster import cluster_app
from executor.cli_errors import (
    existing_calibration,
    require_writable,
    threads_without_ctrl_c,
    told_status,
    trace_from,
)
from executor.cli_output import (
    INSPECTED_CACHE_ROWS,
    Output,
    accuracy_text,
    comparison_json,
    comparison_tables,
    corrections_table,
    fanout_json,
    fanout_tables,
    plan_tables,
    seconds_text,
    statistics_json,
    statistics_tables,
)
from executor.cli_prediction import extrapolated_prices, summary_of
from executor.cli_replay import add_replay_commands
from planner.explain import description
from planner.order import order_localities
from planner.partition import partition_graph
from planner.search import find_plan
from simulator.calibrate import MeasuredRun, recalibrate
from simulator.compare import compare
from simulator.errors import CalibrationError, SpecError
from simulator.log_samples import log_path, with_logs
from simulator.readers.generators import materialise
from simulator.readers.graphs import Graph, read_graph
from simulator.readers.inspect import graph_statistics
from simulator.simulation import simulate
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec
from simulator.specs.convert import to_plain
from simulator.specs.files import (
    read_calibration,
    read_plan,
    read_run,
    write_calibration,
    write_fanout,
    write_plan,
    write_trace,
)
from simulator.specs.graph import GraphFile, GraphSource, GraphSpec
from simulator.specs.toml import LOCAL
from simulator.specs.trace import TraceOrigin
from simulator.specs.units import Dtype

app = typer.Typer(
    help="Plan, simulate and run the training of graph transformers on large graphs over many GPUs.",
    epilog="Start with `graphpilot demo`. Exit codes: 0 done, 2 bad input, 3 no plan fits, 4 calibration missing or of "
    "other hardware or software, 5 a run failed, 130 and 143 interrupted, 1 our own fault.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)

app.add_typer(cluster_app, name="cluster")

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
CalibrationOption = Annotated[Path, typer.Option("--calibration", help="calibration.json of the cluster's device.")]
ForceFlag = Annotated[bool, typer.Option("--force", help="Use a calibration of other software or hardware.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"graphpilot {version('graphpilot')}")
        raise typer.Exit


@app.callback()
def _settings(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    handler = RichHandler(console=Console(stderr=True), show_time=False, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    del debug, version  # seen by `main` and by the callback


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything that the demo makes.")] = Path("runs/demo"),
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Go through the whole loop on a made-up graph and this machine, step by step, in one to three minutes.

    A run.toml that lies in the folder is used as it is, so edit it and start again.

    Example: graphpilot demo --out runs/demo
    """
    with threads_without_ctrl_c():
        from executor.cli_demo import run_demo

    require_writable(out / "run.toml")
    output = Output(json, quiet)
    result = run_demo(out, output)
    output.result(result)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A graph store (.npz or folder), or a run.toml.")],
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Print a graph in numbers, what orders of its nodes spare, and what cutting it into 2, 4, 8 and 16 parts costs.

    Example: graphpilot inspect graph.npz
    """
    output = Output(json, quiet)
    source: GraphSource = read_run(path).graph if path.suffix == ".toml" else GraphFile(path=str(path))
    spec, graph = _open(source, Path())
    statistics = graph_statistics(spec, graph)
    cuts = []
    with tempfile.TemporaryDirectory() as folder, output.working("cutting") as progress:
        for num_parts in (2, 4, 8, 16):
            progress(f"cutting into {num_parts} parts")
            cuts.append(partition_graph(graph, num_parts, seed=0, folder=Path(folder)))
        orders = order_localities(
            graph, seed=0, folder=Path(folder), cache_rows=INSPECTED_CACHE_ROWS, on_progress=progress
        )
    output.result(statistics_json(statistics, cuts, orders), *statistics_tables(statistics, cuts, orders))


@app.command()
def calibrate(
    out: Annotated[Path, typer.Option(help="Where the calibration goes.")] = Path("calibration.json"),
    quick: Annotated[bool, typer.Option("--quick", help="Fewer shapes: under 40 s on two cores.")] = False,
    precisions: Annotated[str, typer.Option(help="Number formats to measure, such as fp32,bf16.")] = "fp32",
    host_only: Annotated[
        Path | None, typer.Option(help="Take this calibration and measure only how fast the host is today.")
    ] = None,
    from_logs: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="nccl-tests:FILE",
            help="Measure nothing, but add a log of nccl-tests (text or JSON) to the calibration at --out; several are "
            "allowed. Says whether the fabric is healthy.",
        ),
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Measure every task kind and collective on this machine, or add measured collectives of another.

    Example: graphpilot calibrate --quick --out calibration.json

    With logs: graphpilot calibrate --from nccl-tests:all_reduce.txt --out calibration.json
    """
    if from_logs:
        if host_only is not None or quick or precisions != "fp32":
            raise SpecError(
                "--from measures nothing, so it takes no --host-only, --quick or --precisions; leave them out"
            )
        _add_logs(out, from_logs, Output(json, quiet), force=force)
        return
    if force:
        raise SpecError("--force is for logs that --from names; leave it out")
    with threads_without_ctrl_c():
        from executor.environment import local_cluster
        from executor.measure.session import Session, effort_of, expected_seconds, run_host_session, run_session

    require_writable(out)
    output = Output(json, quiet)
    found = local_cluster()
    session = Session(
        cluster=found,
        effort=effort_of(found.device.kind, quick=quick),
        precisions=_precisions(precisions),
        out=out,
        quiet=quiet or json,
    )
    if host_only is not None:
        factor = run_host_session(session, _usable(host_only, found, force=False))
        output.result({"out": str(out), "host_factor": factor}, f"host costs x {factor:.3f}, written to {out}")
        return
    expected = expected_seconds(session)
    devices = f"{found.devices_per_host} x {found.device.name} ({found.device.kind})"
    output.progress(f"calibrating {devices}: about {expected:.0f} s on an idle machine")
    run_session(session)
    calibration = read_calibration(out)
    counts = {"computes": len(calibration.computes), "collectives": len(calibration.collectives)}
    output.result(
        {"out": str(out), "device": calibration.device_name, **counts},
        f"{counts['computes']} samples of tasks and {counts['collectives']} of collectives on {devices}: {out}",
    )


def _add_logs(out: Path, named: list[str], output: Output, *, force: bool) -> None:
    """Add logs of collectives to the calibration at `out`, and say what they show."""
    paths = [log_path(text) for text in named]
    calibration, added = with_logs(existing_calibration(out), paths, force=force)
    require_writable(out)
    write_calibration(out, calibration)
    shown = []
    for log in added:
        state = "healthy" if log.is_healthy else "degraded"
        shown.append(f"{log.name}: the fabric is {state}; {log.num_samples} samples added to {out}")
        shown += [f"  {finding.text}" for finding in log.findings] + [f"  {text}" for text in log.left_out]
    logs = [{**dict(_plain(log)), "is_healthy": log.is_healthy} for log in added]
    output.result({"out": str(out), "logs": logs}, *shown)


@app.command()
def plan(
    run: Annotated[
        Path, typer.Argument(help="run.toml: tables graph, model, cluster and train, and search if bounds are wanted.")
    ],
    calibration: CalibrationOption,
    out: Annotated[Path, typer.Option(help="Where the plan goes; its partition goes beside it.")] = Path("plan.json"),
    force: ForceFlag = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Choose the plan with the shortest predicted epoch, and say why the others lost.

    Example: graphpilot plan run.toml --calibration calibration.json
    """
    output = Output(json, quiet)
    spec_of_run = read_run(run)
    require_writable(out)
    found_cluster = _cluster(spec_of_run.cluster)
    usable = _usable(calibration, found_cluster, force=force, is_here=spec_of_run.cluster is None)
    spec, graph = _open(spec_of_run.graph, run.parent)
    if spec.num_train_nodes == 0:
        output.progress(f"{spec.source.path} has no nodes to train on: its plan can be simulated, but not trained")
    with output.working("searching") as progress:
        file = find_plan(
            spec,
            graph,
            spec_of_run.model,
            found_cluster,
            spec_of_run.train,
            spec_of_run.search,
            usable,
            folder=out.parent,
            on_progress=progress,
        )
    write_plan(out, file)
    content = {"out": str(out), "description": description(file.plan), **dict(_plain(file.prediction))}
    beyond = extrapolated_prices(file, usable)
    output.result(
        {**content, "ranking": _plain(file.ranking), "rejected": file.rejected, "extrapolated": list(beyond)},
        *plan_tables(file),
        *(f"extrapolated: {text}" for text in beyond),
        "",
        f"written to {out}",
    )


@app.command(name="simulate")
def simulate_command(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    calibration: CalibrationOption,
    out: Annotated[Path, typer.Option(help="Where the predicted trace goes; it opens in Perfetto.")] = Path(
        "predicted.json"
    ),
    step: Annotated[int, typer.Option(help="Which training step; batches of clusters differ.", min=0)] = 0,
    trials: Annotated[int, typer.Option(help="Steps to draw for the interval.", min=1)] = 20,
    alike: Annotated[
        float, typer.Option(help="Take replicas for alike whose rows and edges differ by this share.", min=0, max=0.5)
    ] = 0.0,
    force: ForceFlag = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Predict a step of a plan, task by task.

    Ranks that do the same are simulated once; with --alike 0.01 also those that do about the same.

    Example: graphpilot simulate plan.json --calibration calibration.json
    """
    file = read_plan(plan)
    require_writable(out)
    usable = _usable(calibration, file.cluster, force=force)
    output, began = Output(json, quiet), time.perf_counter()
    with output.working("simulating") as progress:
        trace = simulate(
            *(file.plan, file.graph, file.model, file.cluster, usable),
            step=step,
            seed=file.train.seed,
            trials=trials,
            alike_ratio=alike,
            on_progress=progress,
        )
    summary = summary_of(file.plan, file.cluster, trace, simulation_seconds=time.perf_counter() - began)
    write_trace(out, trace)
    quantiles = {f"p{ratio}": trace.step_seconds_quantile(ratio / 100) for ratio in (10, 50, 90)}
    beyond = extrapolated_prices(file, usable, step=step, alike_ratio=alike)
    output.result(
        {"out": str(out), "step_seconds": quantiles, **summary.as_json(), "extrapolated": list(beyond)},
        f"step (p10 / p50 / p90): {' / '.join(map(seconds_text, quantiles.values()))}; written to {out}",
        *summary.lines(),
        *(f"extrapolated: {text}" for text in beyond),
    )


@app.command()
def train(
    plan: Annotated[Path, typer.Argument(help="plan.json")],
    out: Annotated[
        Path | None, typer.Option(help="Folder for measured.json, result.json and weights.pt; else the plan's.")
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|PATH",
            help="Go on from a checkpoint: auto for the newest in the folder, if there is any, or the path of one; "
            "also on another number of ranks or with another plan. [train] sets checkpoint_every_steps.",
        ),
    ] = None,
    kineto: Annotated[
        Path | None,
        typer.Option(help="Folder for the profiler's own file of each traced step, for graphpilot replay."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Train nothing: check all ranks on one core, and print their memory."),
    ] = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Train as a plan says: alone, starting the ranks of this host, or unchanged under torchrun on many hosts.

    Steps of plans with cluster or sampled batches include the making of their batch, or the wait for one that a thread
    makes ahead, as the plan says; result.json sums it up as data_seconds. Accuracies are of the whole graph.

    With train.checkpoint_every_steps, SIGTERM and Ctrl-C save the run and end it; a second one ends it at once.

    Example: graphpilot train plan.json --out run

    Again after it was ended: graphpilot train plan.json --out run --resume auto

    Before it is begun: graphpilot train --dry-run plan.json

    On many hosts: torchrun --nproc-per-node 8 -m executor train plan.json
    """
    with threads_without_ctrl_c():
        from executor.launch import is_under_torchrun
        from executor.run import PlanRun, run_plan

    folder = plan.parent if out is None else out
    require_writable(folder / "result.json")
    planned = PlanRun(plan_path=plan, out=folder, quiet=quiet or json, resume=resume, kineto=kineto)
    if dry_run:
        from executor.cli_dry_run import print_dry_run

        print_dry_run(planned, Output(json, quiet))
        return
    run_plan(planned)
    if is_under_torchrun():
        return
    result: dict[str, Any] = json_module.loads((folder / "result.json").read_text())
    Output(json, quiet).result(
        {"out": str(folder), **{key: result[key] for key in ("best_step", "best", "median_step_seconds")}},
        f"{accuracy_text(result, read_plan(plan).graph)}; median step {seconds_text(result['median_step_seconds'])}; "
        f"results in {folder}",
    )


@app.command()
def fanout(
    run: Annotated[
        Path, typer.Argument(help="run.toml: tables graph, model, cluster and train, and fanout if defaults do not do.")
    ],
    out: Annotated[Path, typer.Option(help="Where the comparison goes.")] = Path("fanout.json"),
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Train with few neighbours, with all edges and, on small graphs, with full attention; say how few suffice.

    Example: graphpilot fanout run.toml --out fanout.json
    """
    with threads_without_ctrl_c():
        from executor.fanout import compare_fan_outs

    output = Output(json, quiet)
    spec_of_run = read_run(run)
    require_writable(out)
    spec, graph = _open(spec_of_run.graph, run.parent)
    whole = partition_graph(graph, 1, seed=0, folder=out.parent)
    with output.working("training") as progress:
        comparison = compare_fan_outs(spec_of_run, spec, graph, whole, on_progress=progress)
    write_fanout(out, comparison)
    output.result({"out": str(out), **fanout_json(comparison)}, *fanout_tables(comparison), "", f"written to {out}")


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
    comparison = compare(trace_from(predicted, TraceOrigin.SIMULATED), trace_from(measured, TraceOrigin.MEASURED))
    Output(json, quiet).result(comparison_json(comparison), *comparison_tables(comparison))


@app.command(name="recalibrate")
def recalibrate_command(
    calibration: Annotated[Path, typer.Argument(help="calibration.json that predicted the runs.")],
    measured: Annotated[list[Path], typer.Argument(help="measured.json of one or more runs.")],
    out: Annotated[Path, typer.Option(help="Where the new calibration goes.")],
    devices_per_host: Annotated[
        int | None, typer.Option(help="Of the cluster that ran; else of this host.", min=1)
    ] = None,
    force: ForceFlag = False,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Move costs to where measured traces put them, and say which moved by how much.

    Example: graphpilot recalibrate calibration.json measured.json --out new.json
    """
    from executor.environment import environment_differences

    require_writable(out)
    found = _cluster(None)
    if devices_per_host is not None:
        found = replace(found, devices_per_host=devices_per_host)
    known = existing_calibration(calibration)
    runs = [MeasuredRun(name=str(path), trace=trace_from(path, TraceOrigin.MEASURED)) for path in measured]
    for run in runs:
        if (differences := environment_differences(known.environment, run.trace.environment)) and not force:
            raise CalibrationError(
                f"{run.name} was measured elsewhere than {calibration}: {'; '.join(differences)}; use a calibration of "
                "that machine, or go on with --force"
            )
    updated, corrections = recalibrate(known, found, runs)
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

    Example: graphpilot report plan.json --predicted predicted.json

    With a run: add --measured run/measured.json
    """
    from executor.report.page import write_report

    require_writable(out)
    file, first = read_plan(plan), trace_from(predicted, TraceOrigin.SIMULATED)
    trace = trace_from(measured, TraceOrigin.MEASURED) if measured else None
    again = compare(trace_from(recalibrated, TraceOrigin.SIMULATED), trace) if recalibrated and trace else None
    write_report(out, plan_file=file, predicted=first, measured=trace, recalibrated=again)
    Output(json, quiet).result({"out": str(out)}, f"report: {out.resolve()}")


add_replay_commands(app)


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
    calibration = existing_calibration(path)
    if force:
        return replace(calibration, device_name=found.device.name)
    if calibration.device_name != found.device.name:
        raise CalibrationError(
            f'{path}: device_name must be the cluster\'s, "{found.device.name}", got "{calibration.device_name}"; '
            "calibrate on that device, or go on with --force"
        )
    if is_here is None:
        is_here = found.name == LOCAL
    if is_here:
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
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    if not debug:
        os.environ.setdefault(
            "TORCH_CPP_LOG_LEVEL", "ERROR"
        )  # its warnings of lost ranks come with stack traces of C++
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, _end)
    try:
        status = app(arguments, prog_name="graphpilot", standalone_mode=False)
        sys.stdout.flush()
    except BaseException as error:
        status = told_status(error, debug=debug, may_tell=_may_tell)
    sys.exit(status if isinstance(status, int) else 0)


def _end(number: int, _: FrameType | None) -> None:
    """End the command after a signal, with all clean-up on the way."""
    sys.exit(128 + number)


def _may_tell() -> bool:
    """Return whether this process is to tell an error: of many that torchrun started, only the first to fail."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return True
    from executor.launch import is_first_to_tell

    return is_first_to_tell()
