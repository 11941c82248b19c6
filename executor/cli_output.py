"""What the commands print: tables for people, JSON for programs."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from planner.explain import description
from simulator.calibrate import Correction
from simulator.compare import Comparison, as_json, as_table, diagnosis
from simulator.readers.inspect import GraphStatistics
from simulator.specs.decision import PlanFile
from simulator.specs.graph import DEGREE_QUANTILES
from simulator.specs.plan import PartitionSpec
from simulator.specs.units import Dimension, format_quantity


@dataclass(frozen=True)
class Output:
    """Where a command's words go: results to standard output, progress to standard error.

    Attributes:
        as_json: print one JSON object instead of tables, and no progress.
        quiet: print nothing but errors.
    """

    as_json: bool
    quiet: bool
    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    messages: Console = field(default_factory=lambda: Console(stderr=True, highlight=False, soft_wrap=True))

    def result(self, content: dict[str, Any], *shown: Table | str) -> None:
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


def statistics_tables(statistics: GraphStatistics, cuts: Sequence[PartitionSpec]) -> list[Table]:
    """Return a graph in numbers, and its cuts."""
    facts = _table("graph", "value")
    quantiles = ", ".join(
        f"{100 * ratio:g} %: {degree:g}"
        for ratio, degree in zip(DEGREE_QUANTILES, statistics.in_degree_quantiles, strict=True)
    )
    homophily = statistics.edge_homophily_ratio
    rows = {
        "nodes": f"{statistics.num_nodes:,}",
        "edges": f"{statistics.num_edges:,}",
        "incoming edges, quantiles": quantiles,
        "largest over mean": f"{statistics.max_over_mean_in_degree:.1f}",
        "edges into the top 1 % of nodes": f"{100 * statistics.hub_edges_ratio:.1f} %",
        "isolated nodes": f"{statistics.num_isolated_nodes:,}",
        "self loops": f"{statistics.num_self_loops:,}",
        "multi-edges": f"{statistics.num_multi_edges:,}",
        "components": f"{statistics.num_components:,} (largest {statistics.largest_component_nodes:,} nodes)",
        "symmetric": "yes" if statistics.is_symmetric else "no",
        "edge homophily": "-" if homophily is None else f"{homophily:.2f}",
        "features": f"{statistics.num_features:,} ({100 * statistics.feature_density_ratio:.2g} % not zero)",
    }
    for name, value in rows.items():
        facts.add_row(name, value)
    table = _table("parts", "method", "edges cut", "halo / owned", "node", "edge", "row imbalance")
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
    return [facts, table]


def statistics_json(statistics: GraphStatistics, cuts: Sequence[PartitionSpec]) -> dict[str, Any]:
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
    }


def plan_tables(file: PlanFile) -> list[Table | str]:
    """Return the choice, its interval and memory, the runners-up, and why others were out."""
    found = file.prediction
    interval = " / ".join(
        format_quantity(seconds, Dimension.SECONDS)
        for seconds in (found.p10_step_seconds, found.p50_step_seconds, found.p90_step_seconds)
    )
    lines: list[Table | str] = [
        f"[bold]{description(file.plan)}[/bold]",
        f"predicted step (p10 / p50 / p90): {interval}; epoch {_seconds(found.epoch_seconds)}",
    ]
    if file.plan.partition.num_parts > 1:
        cut = file.plan.partition
        lines.append(
            f"{cut.num_parts} parts by {cut.method}: halo {cut.halo_ratio:.2f} of owned rows, "
            f"edge imbalance {cut.edge_imbalance:.2f}"
        )
    memory = _table("memory", *(f"rank {rank}" for rank in range(min(len(found.peak_memory_bytes), 8))))
    for index, (category, _) in enumerate(found.peak_memory_bytes[0]):
        memory.add_row(category, *(_bytes(rank[index][1]) for rank in found.peak_memory_bytes[:8]))
    memory.add_row("all", *(_bytes(sum(size for _, size in rank)) for rank in found.peak_memory_bytes[:8]))
    ranking = _table("runner-up", "step", "epoch", "memory", "lost by")
    for row in file.ranking:
        ranking.add_row(
            row.description,
            _seconds(row.p50_step_seconds),
            _seconds(row.epoch_seconds),
            _bytes(row.peak_memory_bytes),
            row.reason,
        )
    lines += [memory, ranking] if file.ranking else [memory]
    lines += [f"rejected {count}: {reason}" for reason, count in file.rejected]
    return lines


def comparison_tables(comparison: Comparison) -> list[Table | str]:
    """Return residuals by task kind, then what they mean."""
    frame = as_table(comparison)
    table = _table(*map(str, frame.columns))
    for row in frame.itertuples(index=False):
        table.add_row(*(_cell(value) for value in row))
    return [table, *diagnosis(comparison)]


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return the same for programs."""
    return dict(as_json(comparison))


def corrections_table(corrections: Sequence[Correction]) -> Table:
    """Return which costs moved and by how much."""
    table = _table("cost", "spans", "new / old")
    for correction in corrections:
        table.add_row(correction.label, str(correction.num_spans), f"{correction.factor:.3f}")
    return table


def _table(*columns: str) -> Table:
    table = Table(*columns[:1], box=None, header_style="bold", pad_edge=False)
    for column in columns[1:]:
        table.add_column(column, justify="right" if len(column) < 16 else "left")
    return table


def _cell(value: object) -> str:
    if isinstance(value, float):
        return "-" if value != value else f"{value:.4g}"
    return str(value)


def _seconds(value: float) -> str:
    return format_quantity(value, Dimension.SECONDS)


def _bytes(value: float) -> str:
    return format_quantity(value, Dimension.BYTES)
