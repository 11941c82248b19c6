"""What `graphpilot train --dry-run` prints, and the exit status that it ends with."""

from dataclasses import asdict
from typing import Any

from rich.table import Table

from executor.cli_output import Output, seconds_text
from executor.dry_run import DryRun, dry_run
from executor.launch import is_under_torchrun
from executor.run import PlanRun
from simulator.errors import NoFeasiblePlanError, RunError, SpecError
from simulator.meetings import ranks_text
from simulator.specs.units import Dimension, format_quantity

# Of ranks by memory, so many rows are shown: the fullest ones and, last, the emptiest.
MAX_CLASSES_SHOWN = 6
# Categories of memory that a row names.
_LARGEST = 2


def print_dry_run(run: PlanRun, output: Output) -> None:
    """Go through a plan without training; print what was found.

    Raises:
        RunError: if ranks would not match, or would run otherwise than planned.
        NoFeasiblePlanError: if the plan does not fit.
        SpecError, PlanError: as `dry_run` says, and if other choices of the command do not go with it.
    """
    if is_under_torchrun():
        raise SpecError("--dry-run must be started alone, got torchrun: one process checks all ranks")
    if run.kineto is not None:
        raise SpecError("--kineto must be left out with --dry-run, which traces no step")
    with output.working("dry run") as progress:
        found = dry_run(run, on_progress=progress)
    output.result(_as_json(found), *_lines(found))
    if found.findings:
        more = f"; and {len(found.findings) - 1} findings more" if len(found.findings) > 1 else ""
        raise RunError(f"{run.plan_path}: a run would fail: {found.findings[0]}{more}")
    if found.misfit:
        raise NoFeasiblePlanError(f"{run.plan_path}: the plan does not fit: {found.misfit}")


def _as_json(found: DryRun) -> dict[str, Any]:
    plain = asdict(found)
    plain["mesh"] = dict(found.mesh)
    plain["memory"] = [
        {"ranks": each.ranks, "peak_bytes": each.peak_bytes, "fits": each.fits, "bytes": dict(each.peak)}
        for each in found.memory
    ]
    return plain


def _lines(found: DryRun) -> list[Table | str]:
    """Return the result in words."""
    mesh = " x ".join(f"{size} {axis}" for axis, size in found.mesh)
    steps = f"{found.num_steps} steps" if found.num_steps > 1 else "a step"
    alike = f", {found.num_rank_classes:,} of which differ" if found.num_rank_classes < found.num_ranks else ""
    return [
        f"{found.num_ranks:,} ranks ({mesh}){alike}; {found.num_tasks:,} tasks in a step, {found.num_collectives:,} of "
        f"them collectives; {steps} looked at",
        "",
        _memory_table(found),
        "fits every device" if not found.misfit else f"does not fit: {found.misfit}",
        "",
        f"ran a step on fake tensors: {ranks_text(found.ranks_run) if found.ranks_run else 'no rank'}",
        *(f"checked: {sentence}" for sentence in found.checked),
        *(f"not checked: {sentence}" for sentence in found.unchecked),
        *(f"WRONG: {sentence}" for sentence in found.findings),
        f"{'nothing wrong' if not found.findings else f'{len(found.findings)} findings'}; took "
        f"{seconds_text(found.seconds)} and {_bytes(found.peak_rss_bytes)}",
    ]


def _memory_table(found: DryRun) -> Table:
    """Return a row for ranks that need the same, the fullest first; of many, the fullest and the emptiest."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ranks")
    for title in ("number", "peak", "fits"):
        table.add_column(title, justify="right")
    table.add_column("most of it")
    shown = list(found.memory)
    if len(shown) > MAX_CLASSES_SHOWN:
        shown = [*shown[: MAX_CLASSES_SHOWN - 1], shown[-1]]
    for each in shown:
        largest = sorted(each.peak, key=lambda pair: -pair[1])[:_LARGEST]
        told = ", ".join(f"{category} {_bytes(num_bytes)}" for category, num_bytes in largest)
        first = f"{each.ranks[0]}" if len(each.ranks) == 1 else f"{each.ranks[0]} ..."
        table.add_row(first, f"{len(each.ranks):,}", _bytes(each.peak_bytes), "yes" if each.fits else "NO", told)
    if len(shown) < len(found.memory):
        num_shown = sum(len(each.ranks) for each in shown)
        table.add_row("...", f"{sum(len(each.ranks) for each in found.memory) - num_shown:,}", "", "", "between them")
    return table


def _bytes(num_bytes: int) -> str:
    return format_quantity(num_bytes, Dimension.BYTES)
