"""Figures of a benchmark: printed as a table, written as JSON, compared with their bars."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from simulator.errors import SpecError
from simulator.specs.files import write_text_atomic


class Better(StrEnum):
    """In which direction a figure improves."""

    LOWER = "lower"
    HIGHER = "higher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number that a benchmark measured.

    Attributes:
        bar: that it should reach; None where it is only reported.
    """

    name: str
    value: float
    unit: str
    bar: float | None
    better: Better

    @property
    def holds(self) -> bool:
        """Whether the bar is reached."""
        if self.bar is None:
            return True
        return self.value <= self.bar if self.better is Better.LOWER else self.value >= self.bar


def write_figures(path: Path, figures: Sequence[Figure], environment: dict[str, str]) -> None:
    """Write figures with the environment they were measured in."""
    rows = [{**asdict(figure), "holds": figure.holds} for figure in figures]
    write_text_atomic(path, json.dumps({"figures": rows, "environment": environment}, indent=1) + "\n")


def read_figures(path: Path) -> list[Figure]:
    """Return the figures that `write_figures` wrote.

    Raises:
        SpecError: if the file is another one, or its verdicts are not those of its numbers.
    """
    try:
        return [_figure(**row) for row in json.loads(path.read_text())["figures"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        message = f"{path}: must hold figures as write_figures writes them, got {error!r}; measure again"
        raise SpecError(message) from error


def _figure(*, holds: bool, better: str, **fields: Any) -> Figure:
    figure = Figure(better=Better(better), **fields)
    if figure.holds is not holds:
        raise ValueError(f"holds = {holds} for {figure}")
    return figure


def print_figures(figures: Sequence[Figure], *, title: str = "") -> None:
    """Print figures and bars as a table."""
    table = Table("figure", box=None, title=title, title_justify="left", header_style="bold")
    for column in ("value", "unit", "bar", ""):
        table.add_column(column, justify="right")
    for figure in figures:
        sign = "<=" if figure.better is Better.LOWER else ">="
        bar = "-" if figure.bar is None else f"{sign} {figure.bar:g}"
        verdict = "" if figure.bar is None else "holds" if figure.holds else "MISSED"
        table.add_row(figure.name, f"{figure.value:.4g}", figure.unit, bar, verdict)
    Console(highlight=False, width=120).print(table)
