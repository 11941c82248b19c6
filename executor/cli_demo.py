"""The whole loop on a made-up graph, told step by step: what `graphpilot demo` does."""

import json
import shlex
import tempfile
from pathlib import Path
from typing import Any

from rich.text import Text

from executor.cli_output import Output, accuracy_text, percent_text, seconds_text
from executor.encodings import cache_folder
from executor.environment import local_cluster
from executor.measure.session import Session, effort_of, expected_seconds, run_session
from executor.report.page import write_report
from executor.run import PlanRun, run_plan
from planner.explain import description
from planner.partition import partition_graph
from planner.search import find_plan
from simulator.calibrate import MeasuredRun, recalibrate
from simulator.compare import Comparison, compare, diagnosis
from simulator.errors import SpecError
from simulator.readers.generators import materialise
from simulator.readers.graphs import Graph, read_graph
from simulator.readers.inspect import graph_statistics
from simulator.simulation import simulate
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec
from simulator.specs.decision import PlanFile
from simulator.specs.files import (
    read_calibration,
    read_run,
    read_trace,
    write_calibration,
    write_plan,
    write_text_atomic,
    write_trace,
)
from simulator.specs.graph import GraphFile, GraphSpec
from simulator.specs.run import RunSpec
from simulator.specs.trace import Trace
from simulator.specs.units import Dtype

RUN_TOML = """\
# Written by `graphpilot demo`. Edit it and start the demo again, or go on with the commands that it printed.

[graph]  # a made-up graph whose labels can be learned; for your own write path = "graph.npz" instead
generator = "community"
num_nodes = 20_000
num_edges = 150_000
feature_noise = 6.0  # a node's own features tell little of its class, those of its neighbours more

[model]
width = 64
num_heads = 8
num_layers = 2
feed_forward_width = 128
dropout_ratio = 0.1

[cluster]
name = "local"  # this machine; others: graphpilot cluster --help

[train]
num_steps = 120
learning_rate = 0.002
evaluate_every_steps = 20
trace_steps = 10  # the last steps, recorded task by task
"""
# Steps drawn for the interval of a prediction, as `graphpilot simulate` does.
TRIALS = 20


class Story:
    """Tells what is done, step by step, each with the command that does the same.

    Args:
        folder: of the demo; file names in commands start there.
    """

    def __init__(self, output: Output, folder: Path) -> None:
        self.output = output
        self._folder = folder
        self._count = 0

    def path(self, name: str) -> Path:
        """Return where a file of the demo lies."""
        return self._folder / name

    def step(self, title: str, command: str) -> None:
        """Begin a step.

        Args:
            command: its arguments; a word that starts with "@" is a file of the demo.
        """
        self._count += 1
        words = (shlex.quote(str(self.path(word[1:]))) if word[0] == "@" else word for word in command.split())
        self.say("", Text(f"{self._count}. {title}", style="bold"), Text(f"   graphpilot {' '.join(words)}", "cyan"))

    def say(self, *lines: Text | str) -> None:
        """Say what came out."""
        if not (self.output.as_json or self.output.quiet):
            for line in lines:
                self.output.console.print(Text("   ") + line if isinstance(line, str) and line else line)


def run_demo(folder: Path, output: Output) -> dict[str, Any]:
    """Go once through the loop in a folder, and return its most important numbers.

    Raises:
        SpecError: if a run.toml that lies in the folder is wrong, or is of another machine.
    """
    story = Story(output, folder)
    run = _run_of(story)
    cluster = local_cluster()
    spec, graph = _inspect(story, run)
    calibration = _calibrate(story, cluster)
    file = _plan(story, run, cluster, spec, graph, calibration)
    predicted = _simulate(story, file, calibration, "predicted.json", "Predict a step of the plan, task by task")
    best = _train(story, spec)
    comparison = _compare(story, predicted)
    updated = _recalibrate(story, cluster, calibration)
    again = _simulate(story, file, updated, "predicted-again.json", "Predict the same step with the corrected costs")
    recalibrated = compare(again, read_trace(story.path("measured.json")))
    story.say(
        f"error of the step: {percent_text(comparison.step.error_ratio)} before, "
        f"{percent_text(recalibrated.step.error_ratio)} now; mean error of task kinds: "
        f"{100 * comparison.component_error_ratio:.0f} % before, {100 * recalibrated.component_error_ratio:.0f} % now"
    )
    _report(story, file, predicted, recalibrated)
    return {
        "out": str(folder),
        "report": str(story.path("report.html").resolve()),
        "plan": description(file.plan),
        **best,
        "predicted_step_seconds": comparison.step.predicted_seconds,
        "measured_step_seconds": comparison.step.measured_seconds,
        "error_ratio": comparison.step.error_ratio,
        "recalibrated_error_ratio": recalibrated.step.error_ratio,
    }


def _run_of(story: Story) -> RunSpec:
    """Return what run.toml in the demo's folder says, written there unless it exists."""
    path = story.path("run.toml")
    if path.exists():
        story.say(Text(f"Using {path} as it is."))
    else:
        write_text_atomic(path, RUN_TOML)
        story.say(Text(f"Wrote {path}: a made-up graph, a small model, this machine."))
    run = read_run(path)
    if run.cluster is not None:
        fix = "plan for another cluster with graphpilot plan"
        raise SpecError(f'{path}: cluster.name must be "local" in a demo, got "{run.cluster.name}"; {fix}')
    if not 0 < run.train.trace_steps < run.train.num_steps:
        rule = f"must be within 1 and {run.train.num_steps - 1} in a demo, which compares"
        raise SpecError(f"{path}: train.trace_steps {rule}, got {run.train.trace_steps}; set it in [train]")
    return run


def _inspect(story: Story, run: RunSpec) -> tuple[GraphSpec, Graph]:
    story.step("Look at the graph", "inspect @run.toml")
    source = run.graph
    if not isinstance(source, GraphFile):
        source = materialise(source, cache_folder() / "graphs")
    spec, graph = read_graph(source, base=story.path(""))
    found = graph_statistics(spec, graph)
    with tempfile.TemporaryDirectory() as folder:
        cut = partition_graph(graph, 2, seed=run.search.seed, folder=Path(folder))
    story.say(
        f"{spec.num_nodes:,} nodes in {spec.num_classes} classes, {spec.num_edges:,} edges; the largest hub has "
        f"{found.max_over_mean_in_degree:.0f} times the mean",
        f"cut into two parts, {cut.num_cut_edges / max(spec.num_edges, 1):.0%} of the edges cross, and a part needs "
        f"{cut.halo_ratio:.2f} copies for each node of its own",
    )
    return spec, graph


def _calibrate(story: Story, cluster: ClusterSpec) -> Calibration:
    story.step("Measure what tasks and messages cost on this machine", "calibrate --quick --out @calibration.json")
    out = story.path("calibration.json")
    session = Session(
        cluster=cluster,
        effort=effort_of(cluster.device.kind, quick=True),
        precisions=(Dtype.FLOAT32,),
        out=out,
        quiet=story.output.quiet or story.output.as_json,
    )
    story.say(f"{cluster.num_devices} x {cluster.device.name}; about {expected_seconds(session):.0f} s if it is idle")
    run_session(session)
    calibration = read_calibration(out)
    story.say(f"{len(calibration.computes)} samples of tasks, {len(calibration.collectives)} of collectives")
    return calibration


def _plan(
    story: Story, run: RunSpec, cluster: ClusterSpec, spec: GraphSpec, graph: Graph, calibration: Calibration
) -> PlanFile:
    story.step(
        "Choose the fastest plan from predictions alone",
        "plan @run.toml --calibration @calibration.json --out @plan.json",
    )
    with story.output.working("searching") as progress:
        file = find_plan(
            spec,
            graph,
            run.model,
            cluster,
            run.train,
            run.search,
            calibration,
            folder=story.path(""),
            on_progress=progress,
        )
    write_plan(story.path("plan.json"), file)
    story.say(f"chosen: {description(file.plan)}; predicted epoch {seconds_text(file.prediction.epoch_seconds)}")
    for row in file.ranking[:2]:
        story.say(f"next: {row.description}; {seconds_text(row.epoch_seconds)}: {row.reason}")
    return file


def _simulate(story: Story, file: PlanFile, calibration: Calibration, name: str, title: str) -> Trace:
    costs = "@calibration.json" if name == "predicted.json" else "@recalibrated.json"
    story.step(title, f"simulate @plan.json --calibration {costs} --out @{name}")
    trace = simulate(file.plan, file.graph, file.model, file.cluster, calibration, seed=file.train.seed, trials=TRIALS)
    write_trace(story.path(name), trace)
    low, middle, high = (seconds_text(trace.step_seconds_quantile(ratio)) for ratio in (0.1, 0.5, 0.9))
    story.say(f"a step takes {middle} ({low} to {high}) in {len(trace.spans)} tasks of {trace.num_ranks} ranks")
    return trace


def _train(story: Story, graph: GraphSpec) -> dict[str, Any]:
    story.step("Train as the plan says", "train @plan.json")
    run_plan(
        PlanRun(plan_path=story.path("plan.json"), out=story.path(""), quiet=story.output.quiet or story.output.as_json)
    )
    result = json.loads(story.path("result.json").read_text())
    first = result["evaluations"][0]
    story.say(
        f"loss {result['losses'][0]:.2f} to {result['losses'][-1]:.2f}",
        f"{accuracy_text(result, graph)}; {first['val_accuracy_ratio']:.3f} at step {first['step'] + 1}",
    )
    return {"best_step": result["best_step"], "best": result["best"]}


def _compare(story: Story, predicted: Trace) -> Comparison:
    story.step("See how far the prediction was off", "compare @predicted.json @measured.json")
    comparison = compare(predicted, read_trace(story.path("measured.json")))
    step = comparison.step
    story.say(
        f"a step took {seconds_text(step.measured_seconds)}, predicted {seconds_text(step.predicted_seconds)}: "
        f"{percent_text(step.error_ratio)}",
        *diagnosis(comparison),
    )
    return comparison


def _recalibrate(story: Story, cluster: ClusterSpec, calibration: Calibration) -> Calibration:
    story.step(
        "Correct the costs from this run", "recalibrate @calibration.json @measured.json --out @recalibrated.json"
    )
    path = story.path("measured.json")
    updated, corrections = recalibrate(calibration, cluster, [MeasuredRun(name=str(path), trace=read_trace(path))])
    write_calibration(story.path("recalibrated.json"), updated)
    for correction in corrections[:3]:
        story.say(f"{correction.label}: x {correction.factor:.2f}, from {correction.num_spans} spans")
    return updated


def _report(story: Story, file: PlanFile, predicted: Trace, recalibrated: Comparison) -> None:
    story.step(
        "Put it all on one page",
        "report @plan.json --predicted @predicted.json --measured @measured.json --recalibrated @predicted-again.json "
        "--out @report.html",
    )
    path = story.path("report.html")
    measured = read_trace(story.path("measured.json"))
    write_report(path, plan_file=file, predicted=predicted, measured=measured, recalibrated=recalibrated)
    story.say(
        "",
        Text(f"The report: {path.resolve()}", style="bold"),
        Text(f"Timelines for https://ui.perfetto.dev: {story.path('predicted.json')}, {story.path('measured.json')}"),
        Text(f"To go on: edit {story.path('run.toml')}, then the commands above, or graphpilot demo again."),
    )
