"""What the commands print: tables for people, JSON for programs."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from planner.explain import ORDER_WORDS, PER_EPOCH, description, order_reason
from simulator.calibrate import Correction
from simulator.compare import Comparison, Residual, as_json, diagnosis
from simulator.readers.inspect import GraphStatistics
from simulator.readers.locality import Locality
from simulator.specs.convert import to_plain
from simulator.specs.decision import PlanFile
from simulator.specs.fanout import FanoutComparison, neighbours_text
from simulator.specs.graph import DEGREE_QUANTILES, GraphSpec
from simulator.specs.order import NodeOrder
from simulator.specs.plan import PartitionSpec
from simulator.specs.units import Dimension, format_quantity
from simulator.timeout import collective_timeout_seconds

# Rows of keys and values in the caches for which a graph is inspected. At width 128 in fp32, 1 KiB a row, those of a
# core's L2 of 1 MiB and of its share of L3, 16 MiB; in bf16, 512 bytes a row, those of 64 MiB, about an H200's L2.
INSPECTED_CACHE_ROWS = (1024, 16 * 1024, 128 * 1024)
# Ranks that a table of memory shows one by one; of more it shows the fullest and the mean.
MAX_RANKS_SHOWN = 4


@dataclass(frozen=True)
class Output:
    """Where a command's words go: results to standard output, progress to standard error.

    Attributes:
        as_json: print one JSON object instead of tables, and no progress.
        quiet: print nothing but errors.
    """

    as_json: bool
    quiet: bool
    console: Console = field(default_factory=lambda: _console(stderr=False))
    messages: Console = field(default_factory=lambda: _console(stderr=True))

    def result(self, content: dict[str, Any], *shown: Table | Text | str) -> None:
        """Print a result: `content` for programs, or what is shown to people."""
        if self.as_json:
            print(json.dumps(content))
        elif not self.quiet:
            for item in shown:
                self.console.print(item)

    def progress(self, message: str) -> None:
        """Say what is being done."""
        if not (self.quiet or self.as_json):
            self.messages.print(message, style="dim")

    @contextmanager
    def working(self, message: str) -> Iterator[Callable[[str], None]]:
        """Yield a function that says what is being done: on a terminal in a line that changes, else line by line."""
        if self.quiet or self.as_json or not self.messages.is_terminal:
            yield self.progress
            return
        with self.messages.status(Text(message, style="dim")) as status:
            yield lambda current: status.update(Text(current, style="dim"))


def _console(*, stderr: bool) -> Console:
    """Return a console that wraps sentences on a terminal alone: in a file each stays a line."""
    console = Console(stderr=stderr, highlight=False, markup=False)
    console.soft_wrap = not console.is_terminal
    return console


def statistics_tables(
    statistics: GraphStatistics, cuts: Sequence[PartitionSpec], orders: Mapping[NodeOrder, Locality]
) -> list[Table | str]:
    """Return a graph in numbers, its cuts and its orders, measured for `INSPECTED_CACHE_ROWS`."""
    facts = Table(box=None, show_header=False, pad_edge=False)
    homophily = statistics.edge_homophily_ratio
    ratios = "/".join(f"{100 * ratio:g}" for ratio in DEGREE_QUANTILES)
    rows = {
        "nodes": f"{statistics.num_nodes:,}",
        "edges": f"{statistics.num_edges:,}",
        f"incoming edges at {ratios} %": "/".join(f"{degree:g}" for degree in statistics.in_degree_quantiles),
        "most incoming edges over their mean": f"{statistics.max_over_mean_in_degree:.1f}",
        "edges into the top 1 % of nodes": f"{100 * statistics.hub_edges_ratio:.1f} %",
        "isolated nodes": f"{statistics.num_isolated_nodes:,}",
        "self loops": f"{statistics.num_self_loops:,}",
        "multi-edges": f"{statistics.num_multi_edges:,}",
        "components": f"{statistics.num_components:,} (largest {statistics.largest_component_nodes:,} nodes)",
        "symmetric": "yes" if statistics.is_symmetric else "no",
        "edge homophily": "-" if homophily is None else f"{homophily:.2f}",
        "features": f"{statistics.num_features:,} ({100 * statistics.feature_density_ratio:.3g} % not zero)",
    }
    for name, value in rows.items():
        facts.add_row(name, value)
    table = _table("parts", "method", "edges cut", "halo / owned", "nodes", "edges", "rows")
    for cut in cuts:
        table.add_row(
            str(cut.num_parts),
            cut.method.value,
            f"{100 * cut.num_cut_edges / max(statistics.num_edges, 1):.1f} %",
            f"{cut.halo_ratio:.2f}",
            f"{cut.node_imbalance:.2f}",
            f"{cut.edge_imbalance:.2f}",
            f"{cut.row_imbalance:.2f}",
        )
    return [
        facts,
        "",
        table,
        "nodes, edges, rows (owned and halo): of the largest part over the mean",
        "",
        _orders_table(orders),
        "E/U: edges over distinct pairs of a source and a window of 16 or 64 targets",
        "beyond 1k, 16k, 128k: edges whose row is not among so many that were read last",
    ]


def _orders_table(orders: Mapping[NodeOrder, Locality]) -> Table:
    """Return what each order of the nodes spares the gathers of attention."""
    beyond = (f"beyond {rows // 1024}k" for rows in INSPECTED_CACHE_ROWS)
    table = _table("order of the nodes", "E/U of 16", "of 64", *beyond)
    for kind, found in orders.items():
        table.add_row(
            kind.value,
            f"{found.window_16_reuse:.2f}",
            f"{found.window_64_reuse:.2f}",
            *(f"{100 * ratio:.1f} %" for ratio in found.beyond_cache_ratios),
        )
    return table


def statistics_json(
    statistics: GraphStatistics, cuts: Sequence[PartitionSpec], orders: Mapping[NodeOrder, Locality]
) -> dict[str, Any]:
    """Return the same for programs."""
    return {
        **asdict(statistics),
        "cuts": [
            {
                "num_parts": cut.num_parts,
                "method": cut.method.value,
                "num_cut_edges": cut.num_cut_edges,
                "halo_ratio": cut.halo_ratio,
                "node_imbalance": cut.node_imbalance,
                "edge_imbalance": cut.edge_imbalance,
                "row_imbalance": cut.row_imbalance,
            }
            for cut in cuts
        ],
        "cache_rows": INSPECTED_CACHE_ROWS,
        "orders": [{"kind": kind.value, **asdict(found)} for kind, found in orders.items()],
    }


def plan_tables(file: PlanFile) -> list[Table | Text | str]:
    """Return the choice, its interval and memory, the runners-up, and why others were out."""
    found = file.prediction
    interval = " / ".join(
        seconds_text(seconds) for seconds in (found.p10_step_seconds, found.p50_step_seconds, found.p90_step_seconds)
    )
    lines: list[Table | Text | str] = [
        Text(description(file.plan), style="bold"),
        f"predicted step (p10 / p50 / p90): {interval}; epoch {seconds_text(found.epoch_seconds)}",
    ]
    if file.plan.partition.num_parts > 1:
        cut = file.plan.partition
        lines.append(
            f"{cut.num_parts} parts by {cut.method}: halo {cut.halo_ratio:.2f} of owned rows, "
            f"edge imbalance {cut.edge_imbalance:.2f}"
        )
    if file.plan.num_ranks > 1:
        timeout = seconds_text(collective_timeout_seconds(file))
        lines.append(f"time-out for a rank that gets no further: {timeout}")
    lines.append(f"order {ORDER_WORDS[file.plan.order.kind]}: {order_reason(file)}")
    lines += ["", _memory_table(found.peak_memory_bytes)]
    if file.ranking:
        lines += ["", _ranking_table(file)]
    if file.rejected:
        lines += ["", *(f"rejected {count}: {reason}" for reason, count in file.rejected)]
    return lines


def _memory_table(ranks: Sequence[Sequence[tuple[str, int]]]) -> Table:
    """Return bytes by category, of each rank where ranks are few."""
    columns = [dict(rank) for rank in ranks]
    titles = [f"rank {index}" for index in range(len(columns))]
    if len(columns) > MAX_RANKS_SHOWN:
        totals = [sum(column.values()) for column in columns]
        fullest = totals.index(max(totals))
        mean = {name: sum(column[name] for column in columns) // len(columns) for name in columns[0]}
        columns, titles = [columns[fullest], mean], [f"fullest, rank {fullest}", f"mean of {len(totals)} ranks"]
    table = _table("memory", *titles)
    for name in columns[0]:
        table.add_row(name, *(_bytes(column[name]) for column in columns))
    table.add_row("all", *(_bytes(sum(column.values())) for column in columns))
    return table


def _ranking_table(file: PlanFile) -> Table:
    """Return the runners-up, each with the reason why it lost below its name."""
    table = _table("runner-up and why it lost (mean rank, epoch)", "step", "epoch", "memory")
    for row in file.ranking:
        name = Group(row.description, Padding(Text(row.reason.removesuffix(PER_EPOCH), style="dim"), (0, 0, 0, 2)))
        table.add_row(
            name, seconds_text(row.p50_step_seconds), seconds_text(row.epoch_seconds), _bytes(row.peak_memory_bytes)
        )
    return table


def accuracy_text(result: dict[str, Any], graph: GraphSpec) -> str:
    """Return how well a run's model does.

    Args:
        result: content of `result.json`.
    """
    best, step = result["best"], result["best_step"] + 1
    if graph.num_val_nodes == 0:
        return f"loss {result['losses'][-1]:.4f} after step {len(result['losses'])}, no nodes to validate on"
    test = f" (test {best['test_accuracy_ratio']:.3f})" if graph.num_test_nodes else ""
    return f"best validation accuracy {best['val_accuracy_ratio']:.3f}{test} at step {step}"


def comparison_tables(comparison: Comparison) -> list[Table | str]:
    """Return residuals by task kind, then what they mean."""
    table = _table("kind", "phase", "tasks", "predicted ms", "measured ms", "error", "of step")
    for row in comparison.rows:
        phase = "" if row.phase is None else row.phase.value
        seconds = [row.predicted_seconds, row.measured_seconds]
        table.add_row(
            row.kind.value, phase, _counts(row), *map(_ms, seconds), percent_text(row.error_ratio), _share(row)
        )
    step = comparison.step
    table.add_row(
        Text("untraced step", style="bold"),
        "",
        "",
        _ms(step.predicted_seconds),
        _ms(step.measured_seconds),
        percent_text(step.error_ratio),
        "",
    )
    return [table, "", *diagnosis(comparison)]


def _counts(row: Residual) -> str:
    """Return tasks of a rank in a step, predicted and measured where they differ; nothing where a row counts none."""
    if row.predicted_count == row.measured_count:
        return f"{row.measured_count:.4g}" if row.measured_count else ""
    return f"{row.predicted_count:.4g} / {row.measured_count:.4g}"


def _share(row: Residual) -> str:
    return f"{100 * row.share_ratio:.1f} %"


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return the same for programs."""
    return dict(as_json(comparison))


def corrections_table(corrections: Sequence[Correction]) -> Table:
    """Return which costs moved and by how much."""
    table = _table("cost", "spans", "new / old")
    for correction in corrections:
        table.add_row(correction.label, str(correction.num_spans), f"{correction.factor:.3f}")
    return table


def fanout_tables(comparison: FanoutComparison) -> list[Table | Text | str]:
    """Return what each choice of neighbours came to, and the smallest fan-out that suffices."""
    table = _table("attention over", "off all nodes", "off all edges", "validation", "edges a step")
    for row in comparison.rows:
        spread = f" (+-{row.val_accuracy_range_ratio / 2:.3f})" if comparison.spec.num_seeds > 1 else ""
        table.add_row(
            neighbours_text(row.neighbours),
            f"{100 * row.full_error_ratio:.1f} %",
            f"{100 * row.edges_error_ratio:.1f} %",
            f"{row.val_accuracy_ratio:.3f}{spread}",
            f"{row.num_edges_per_step:,.0f}",
        )
    return [
        table,
        f"off: error of an attention layer's output on {comparison.region_nodes:,} connected nodes, "
        f"{comparison.region_edges:,} edges",
        "",
        Text(fanout_text(comparison), style="bold"),
    ]


def fanout_text(comparison: FanoutComparison) -> str:
    """Return the smallest fan-out that suffices, in a sentence."""
    reference, smallest = comparison.reference, comparison.smallest
    tolerance = f"{comparison.spec.tolerance_ratio:g}"
    against = f"{neighbours_text(reference.neighbours)} ({reference.val_accuracy_ratio:.3f})"
    if smallest is None:
        return f"no fan-out is within {tolerance} of {against}: try larger ones, or more steps"
    share = smallest.num_edges_per_step / max(reference.num_edges_per_step, 1)
    return (
        f"smallest fan-out within {tolerance} of {against}: {neighbours_text(smallest.neighbours)} "
        f"({smallest.val_accuracy_ratio:.3f}), {100 * share:.3g} % of its edges"
    )


def fanout_json(comparison: FanoutComparison) -> dict[str, Any]:
    """Return the same for programs."""
    smallest = None if comparison.smallest is None else to_plain(comparison.smallest)
    return {**to_plain(comparison), "reference": to_plain(comparison.reference), "smallest": smallest}


def _table(first: str, *columns: str) -> Table:
    """Return an empty table whose first column holds words and the others numbers; phase and method are words too."""
    table = Table(first, box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("phase", "method") else "right", no_wrap=True)
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3f}"


def percent_text(ratio: float | None) -> str:
    """Return a signed error in percent; a dash where there is none."""
    return "-" if ratio is None else f"{100 * ratio:+.1f} %"


def seconds_text(value: float) -> str:
    """Return a duration with a unit that suits it."""
    return format_quantity(value, Dimension.SECONDS)


def _bytes(value: float) -> str:
    return format_quantity(value, Dimension.BYTES)
