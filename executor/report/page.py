"""write_report(): one self-contained page on a plan, its prediction and its measurement."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from executor.report import charts, markup, words
from executor.report.markup import Row
from executor.report.style import STYLE_SHEET
from executor.report.timeline import timeline
from simulator.compare import Comparison, Residual, compare, diagnosis
from simulator.errors import SpecError
from simulator.specs.decision import PlanFile
from simulator.specs.trace import Trace

# Forbids every request: the page opens from a file, on a machine without a network.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
# Charts have the width of the screen; paper is narrower.
_PRINT_SCRIPT = """
const redraw = () => document.querySelectorAll(".js-plotly-plot").forEach((chart) => Plotly.Plots.resize(chart));
window.matchMedia("print").addEventListener("change", redraw);
"""
# Predictions of one plan with the same costs differ by nothing; this leaves room for files that were rounded.
MAX_DRIFT_RATIO = 0.005
MAX_OPEN_RANKS = 8
MAX_UNMATCHED = 50


def write_report(
    path: Path,
    *,
    plan_file: PlanFile,
    predicted: Trace,
    measured: Trace | None = None,
    comparison: Comparison | None = None,
    recalibrated: Comparison | None = None,
) -> None:
    """Write one HTML page that needs no other file and no network.

    Args:
        path: of the page.
        plan_file: what was decided, and why.
        predicted: what `simulate` says of the plan.
        measured: what a run of it did; without it the page shows the prediction alone.
        comparison: of the two; made here if left out.
        recalibrated: of a prediction with costs fitted to this run, against the same measurement.

    Raises:
        SpecError: if the traces are not of this plan or are empty, or the page cannot be written.
    """
    _check_ranks(plan_file, predicted, measured)
    if measured is not None and comparison is None:
        comparison = compare(predicted, measured)
    sections = [
        _summary(plan_file, predicted, comparison),
        _timeline(predicted, measured),
        _residuals(comparison, recalibrated) if comparison is not None else "",
        _memory(plan_file, measured),
        _ranking(plan_file),
        _provenance(plan_file, predicted, measured),
    ]
    try:
        path.write_text(_page(plan_file, sections), encoding="utf-8")
    except OSError as error:
        raise SpecError(f"{path}: the report cannot be written: {error.strerror}") from error


def _check_ranks(plan_file: PlanFile, predicted: Trace, measured: Trace | None) -> None:
    """Refuse traces of another number of ranks than the plan's."""
    if measured is not None and len(measured.peak_memory_bytes) not in (0, measured.num_ranks):
        raise SpecError(
            f"peak_memory_bytes of the measured trace must have an entry for each of {measured.num_ranks} ranks, "
            f"got {len(measured.peak_memory_bytes)}"
        )
    for side, trace in (("predicted", predicted), ("measured", measured)):
        if trace is not None and trace.num_ranks != plan_file.plan.num_ranks:
            raise SpecError(
                f"num_ranks of the {side} trace must equal the plan's, {plan_file.plan.num_ranks}, "
                f"got {trace.num_ranks}; give the trace of this plan"
            )


def _page(plan_file: PlanFile, sections: Sequence[str]) -> str:
    """Return the whole document."""
    title = escape(f"{words.graph_name(plan_file.graph)} on {plan_file.cluster.name}")
    body = "\n".join(sections)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>graphpilot: {title}</title>
<style>{STYLE_SHEET}</style>
<script>window.PlotlyConfig = {{MathJaxConfig: "local"}};</script>
<script>{get_plotlyjs()}</script>
</head>
<body>
<main>
<header>
<h1>{title}</h1>
<p>How this training was planned, what was predicted and what was measured; by graphpilot.</p>
</header>
<noscript><p>The charts need JavaScript; the tables hold the same numbers.</p></noscript>
{body}
</main>
<script>{_PRINT_SCRIPT}</script>
</body>
</html>
"""


def _summary(plan_file: PlanFile, predicted: Trace, comparison: Comparison | None) -> str:
    """Return the section with the most important numbers and the inputs in words."""
    low, middle, high = (predicted.step_seconds_quantile(ratio) for ratio in (0.1, 0.5, 0.9))
    interval = f"predicted median step; p10 to p90 {words.seconds_text(low)} to {words.seconds_text(high)}"
    cards = [(words.seconds_text(middle), interval)]
    if comparison is not None:
        cards.append((words.seconds_text(comparison.step.measured_seconds), "measured median step, not traced"))
        cards.append((words.error_text(comparison.step.error_ratio), "error of the predicted median step"))
        cards.append((f"{comparison.component_error_ratio:.1%}", "mean error of task kinds, weighted by time"))
    else:
        cards.append(("not measured", "run the plan to see how far the prediction is off"))
    peak_bytes = plan_file.prediction.largest_peak_memory_bytes
    share = f"{peak_bytes / plan_file.cluster.device.memory_bytes:.0%} of the device"
    cards.append((words.bytes_text(peak_bytes), f"predicted peak memory of the fullest rank, {share}"))
    inputs = [
        ("Graph", words.graph_words(plan_file.graph)),
        ("Model", words.model_words(plan_file.model)),
        ("Cluster", words.cluster_words(plan_file.cluster)),
        ("Training", words.train_words(plan_file.train)),
        ("Plan", words.plan_words(plan_file.plan)),
        ("Epoch", f"{words.plural(plan_file.plan.steps_per_epoch, 'step')}, predicted "
         f"{words.seconds_text(plan_file.prediction.epoch_seconds)}"),
    ]  # fmt: skip
    sentences = diagnosis(comparison) if comparison is not None else []
    planned_seconds = plan_file.prediction.p50_step_seconds
    if abs(middle / planned_seconds - 1) >= MAX_DRIFT_RATIO:
        sentences.append(
            f"The plan was chosen on a predicted step of {words.seconds_text(planned_seconds)}; this prediction "
            f"says {words.seconds_text(middle)}, so costs or cluster have changed since: plan again."
        )
    return markup.section("summary", "Summary", markup.numbers(cards), markup.findings(sentences), markup.facts(inputs))


def _timeline(predicted: Trace, measured: Trace | None) -> str:
    """Return the section with the timeline of one step."""
    shown = timeline(predicted, measured)
    return markup.section(
        "timeline",
        "Timeline of one step",
        markup.paragraph(shown.caption, is_note=True),
        markup.chart("timeline", shown.figure, shown.caption),
    )


def _residuals(comparison: Comparison, recalibrated: Comparison | None) -> str:
    """Return the section with errors of each task kind."""
    note = (
        "Seconds of tasks are their duration less waiting, the mean of a rank in a traced step. Errors are predicted "
        "over measured, less one. Rows add up to the traced step once the overlapped time is subtracted. The chart "
        "leaves out the smallest rows, the table none."
    )
    description = "Predicted and measured seconds of each task kind; the table below holds the numbers."
    contents = [
        markup.paragraph(note, is_note=True),
        markup.chart("residuals", charts.residual_chart(comparison, recalibrated), description),
        _residual_table(comparison, recalibrated),
    ]
    if comparison.unmatched:
        contents.append(_unmatched_table(comparison))
    return markup.section("residuals", "Residuals by task kind", *contents)


def _residual_table(comparison: Comparison, recalibrated: Comparison | None) -> str:
    """Return the table of residuals, the median step last."""
    after = {} if recalibrated is None else {(row.kind, row.phase): row.error_ratio for row in recalibrated.rows}
    titles = ["tasks predicted", "tasks measured", "predicted", "measured", "error", "share of step"]
    if recalibrated is not None:
        titles.insert(5, "recalibrated error")
    rows = []
    for row in comparison.rows:
        cells = [row.label, *_count_texts(row)]
        cells += [words.seconds_text(row.predicted_seconds), words.seconds_text(row.measured_seconds)]
        cells.append(words.error_text(row.error_ratio))
        if recalibrated is not None:
            cells.append(words.error_text(after.get((row.kind, row.phase))))
        rows.append(Row(cells=[*cells, f"{row.share_ratio:.1%}"]))
    step = comparison.step
    total = ["median step, not traced", "", "", words.seconds_text(step.predicted_seconds)]
    total += [words.seconds_text(step.measured_seconds), words.error_text(step.error_ratio)]
    if recalibrated is not None:
        total.append(words.error_text(recalibrated.step.error_ratio))
    rows.append(Row(cells=[*total, ""], role="total"))
    columns = [("task kind and phase", False), *((title, True) for title in titles)]
    caption = (
        f"Mean of a rank in a traced step; traced steps took {words.seconds_text(step.traced_seconds)}, "
        f"{step.tracing_overhead_ratio:+.1%} against those that were not traced."
    )
    return markup.table(caption, columns, rows)


def _count_texts(row: Residual) -> list[str]:
    """Return the predicted and measured counts of tasks; nothing where a row counts none."""
    if row.predicted_count == row.measured_count == 0:
        return ["", ""]
    return [f"{count:.4g}" for count in (row.predicted_count, row.measured_count)]


def _unmatched_table(comparison: Comparison) -> str:
    """Return the folded table of task names that only one trace has."""
    shown = comparison.unmatched[:MAX_UNMATCHED]
    rows = [Row(cells=[item.name, item.side, f"{item.count:.4g}"]) for item in shown]
    columns = [("task", False), ("only", False), ("of a rank in a step", True)]
    caption = f"The first {len(shown)} of {len(comparison.unmatched)}"
    summary = f"{words.plural(len(comparison.unmatched), 'task name')} that only one trace has"
    return markup.details(summary, markup.table(caption, columns, rows))


def _memory(plan_file: PlanFile, measured: Trace | None) -> str:
    """Return the section with each rank's memory."""
    measured_bytes = measured.peak_memory_bytes if measured is not None and all(measured.peak_memory_bytes) else ()
    limit_bytes = plan_file.cluster.device.memory_bytes
    figure = charts.memory_chart(plan_file.prediction, measured_bytes, limit_bytes)
    return markup.section(
        "memory",
        "Memory of each rank",
        markup.paragraph("Predicted at the peak of a step, stacked by what holds it.", is_note=True),
        markup.chart("memory", figure, "Predicted memory of each rank by category; the table holds the numbers."),
        _memory_table(plan_file, measured_bytes),
    )


def _memory_table(plan_file: PlanFile, measured_bytes: Sequence[int]) -> str:
    """Return the table of each rank's memory, folded when there are many ranks."""
    categories = charts.memory_categories(plan_file.prediction)
    limit_bytes = plan_file.cluster.device.memory_bytes
    rows = []
    for rank, pairs in enumerate(plan_file.prediction.peak_memory_bytes):
        total_bytes = sum(num_bytes for _, num_bytes in pairs)
        cells = [str(rank), *(words.bytes_text(dict(pairs).get(category, 0)) for category in categories)]
        cells += [words.bytes_text(total_bytes), f"{total_bytes / limit_bytes:.1%}"]
        if measured_bytes:
            cells += [words.bytes_text(measured_bytes[rank]), words.error_text(total_bytes / measured_bytes[rank] - 1)]
        rows.append(Row(cells=cells))
    titles = [*(category.replace("_", " ") for category in categories), "predicted", "of the limit"]
    titles += ["measured peak", "error"] if measured_bytes else []
    caption = f"Bytes at the peak; a device has {words.bytes_text(limit_bytes)}."
    content = markup.table(caption, [("rank", False), *((title, True) for title in titles)], rows)
    return content if len(rows) <= MAX_OPEN_RANKS else markup.details(f"All {len(rows)} ranks", content)


def _ranking(plan_file: PlanFile) -> str:
    """Return the section with the runners-up and why they lost."""
    prediction = plan_file.prediction
    best = [
        "1",
        words.plan_words(plan_file.plan),
        words.seconds_text(prediction.p50_step_seconds),
        words.seconds_text(prediction.epoch_seconds),
        words.bytes_text(prediction.largest_peak_memory_bytes),
        "chosen",
    ]
    rows = [Row(cells=best, role="chosen")]
    for place, ranked in enumerate(plan_file.ranking, start=2):
        cells = [str(place), ranked.description, words.seconds_text(ranked.p50_step_seconds)]
        cells += [words.seconds_text(ranked.epoch_seconds), words.bytes_text(ranked.peak_memory_bytes), ranked.reason]
        rows.append(Row(cells=cells))
    columns = [("", True), ("plan", False), ("step", True), ("epoch", True), ("peak memory", True), ("why", False)]
    contents = [
        markup.paragraph(
            "By predicted time of an epoch; the line on the chosen plan runs from p10 to p90.", is_note=True
        ),
        markup.chart(
            "ranking", charts.ranking_chart(prediction, "chosen plan", plan_file.ranking), "Predicted epochs."
        ),
        markup.table("The chosen plan and the runners-up, the best first.", columns, rows),
    ]
    if plan_file.rejected:
        dropped = [Row(cells=[reason, f"{count:,}"]) for reason, count in plan_file.rejected]
        contents.append(
            markup.table("Candidates that were dropped", [("reason", False), ("candidates", True)], dropped)
        )
    return markup.section("ranking", "Ranking of plans", *contents)


def _provenance(plan_file: PlanFile, predicted: Trace, measured: Trace | None) -> str:
    """Return the section with hashes, versions and dates."""
    pairs = [
        ("Graph sha256", plan_file.graph.sha256),
        ("Partition sha256", plan_file.plan.partition.sha256),
        ("Calibration sha256", plan_file.calibration_sha256),
        *((f"Prediction: {name}", text) for name, text in predicted.environment),
    ]
    if measured is not None:
        pairs += [(f"Measurement: {name}", text) for name, text in measured.environment]
    return markup.section("provenance", "Where the numbers come from", markup.facts(pairs))
