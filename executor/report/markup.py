"""Pieces of HTML; every text from outside is escaped here."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

import plotly.graph_objects as go
import plotly.io

# Only these buttons: plotly.js 4 would add one that uploads the chart to Plotly's servers.
_CHART_CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "modeBarButtons": [["zoom2d", "pan2d", "resetScale2d", "toImage"]],
    "plotlyServerURL": "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A row of a table: cells as plain text, and what sets the row apart ("chosen", "total" or nothing)."""

    cells: Sequence[str]
    role: str = ""


def table(caption: str, columns: Sequence[tuple[str, bool]], rows: Iterable[Row]) -> str:
    """Return a table whose first column heads its rows.

    Args:
        caption: what the table shows.
        columns: title of each column, and whether it holds numbers.
        rows: with a cell for each column.
    """
    head = "".join(f'<th scope="col"{_number_class(is_number)}>{escape(title)}</th>' for title, is_number in columns)
    body = "\n".join(_table_row(row, [is_number for _, is_number in columns]) for row in rows)
    return (
        f'<div class="scroll"><table><caption>{escape(caption)}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>"
    )


def _table_row(row: Row, are_numbers: Sequence[bool]) -> str:
    """Return one row of a table."""
    first, *others = row.cells
    cells = [f'<th scope="row">{escape(first)}</th>']
    for text, is_number in zip(others, are_numbers[1:], strict=True):
        cells.append(f"<td{_number_class(is_number)}>{escape(text)}</td>")
    role = f' class="{row.role}"' if row.role else ""
    return f"<tr{role}>{''.join(cells)}</tr>"


def _number_class(is_number: bool) -> str:
    """Return the attribute of cells that align to the right."""
    return ' class="number"' if is_number else ""


def paragraph(text: str, *, is_note: bool = False) -> str:
    """Return a paragraph of plain text."""
    note = ' class="note"' if is_note else ""
    return f"<p{note}>{escape(text)}</p>"


def findings(sentences: Sequence[str]) -> str:
    """Return a set-off list of sentences; nothing if there are none."""
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f'<ul class="findings">{items}</ul>' if sentences else ""


def numbers(cards: Iterable[tuple[str, str]]) -> str:
    """Return large numbers, each over its label."""
    items = (f"<li><strong>{escape(number)}</strong><span>{escape(label)}</span></li>" for number, label in cards)
    return f'<ul class="numbers">{"".join(items)}</ul>'


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """Return names and their texts."""
    items = (f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
    return f'<dl class="facts">{"".join(items)}</dl>'


def details(summary: str, content: str) -> str:
    """Return content that is folded until asked for."""
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"


def section(identifier: str, title: str, *contents: str) -> str:
    """Return a section under a heading; an identifier for links is a fixed word."""
    body = "\n".join(contents)
    heading = f'<h2 id="{identifier}-title">{escape(title)}</h2>'
    return f'<section id="{identifier}" aria-labelledby="{identifier}-title">\n{heading}\n{body}\n</section>'


def chart(identifier: str, figure: go.Figure, description: str) -> str:
    """Return a figure, with a description for those who cannot see it."""
    drawn = plotly.io.to_html(
        figure,
        config=_CHART_CONFIG,
        full_html=False,
        include_plotlyjs=False,
        div_id=f"{identifier}-chart",
    )
    return f'<figure role="group" aria-label="{escape(description, quote=True)}">{drawn}</figure>'
