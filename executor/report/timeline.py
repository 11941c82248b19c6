"""The timeline: one step of each rank and stream, predicted above measured, on one axis of time."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from statistics import median

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from executor.report.style import GRID_COLOUR, KIND_COLOURS, TEXT_COLOUR, WAITING_COLOUR, base_layout
from simulator.compare import numbered_steps
from simulator.specs.program import SHAPE_FIELDS, Stream, TaskKind
from simulator.specs.trace import Span, Trace
from simulator.specs.units import Dimension, format_quantity

# Bars of one panel that Chromium still draws and hovers at ease; more ranks than fit are left out.
MAX_SPANS = 10_000
ROW_PIXELS, MANY_ROWS_PIXELS, MANY_ROWS = 26, 16, 24
BAR_WIDTH = 0.8  # of a row
PANEL_PIXELS = 64  # title and gap of a panel

_HOVER = "<b>%{customdata[0]}</b><br>%{customdata[1]}<br>%{customdata[2]}<extra></extra>"
_AXIS_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """A figure of one step, and what it shows in a sentence."""

    figure: go.Figure
    caption: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    """One step of one trace.

    Attributes:
        title: "predicted" or "measured".
        step: its number.
        step_seconds: its duration.
        spans: of the ranks shown.
    """

    title: str
    step: int
    step_seconds: float
    spans: tuple[Span, ...]

    @property
    def end_seconds(self) -> float:
        """Instant at which the step, or a span that outlasts it, ended."""
        return max([self.step_seconds, *(span.end_seconds for span in self.spans)])


def timeline(predicted: Trace, measured: Trace | None) -> Timeline:
    """Return the timeline of one step; the median measured step that both traces have, else each one's own."""
    traces = [("predicted", predicted)] + ([("measured", measured)] if measured is not None else [])
    steps = _steps_shown(traces)
    ranks = _ranks_shown([trace for _, trace in traces], steps)
    panels = [_panel(title, trace, step, ranks) for (title, trace), step in zip(traces, steps, strict=True)]
    rows = sorted({(span.rank, list(Stream).index(span.stream)) for panel in panels for span in panel.spans})
    longest_seconds = max(panel.end_seconds for panel in panels)
    unit = next((unit for unit, size in _AXIS_UNITS.items() if longest_seconds >= 2 * size), "us")
    figure = make_subplots(
        rows=len(panels),
        shared_xaxes=True,
        vertical_spacing=PANEL_PIXELS / (len(panels) * _panel_pixels(rows)),
        subplot_titles=[f"{panel.title}, step {panel.step}" for panel in panels],
    )
    for index, panel in enumerate(panels, start=1):
        for bar in _bars(panel, rows, unit):
            figure.add_trace(bar, row=index, col=1)
        _mark_step_end(figure, panel, unit, row=index)
    figure.update_annotations(font_size=13)
    figure.for_each_annotation(lambda title: title.update(x=0, xanchor="left") if "step" in title.text else None)
    _show_each_legend_entry_once(figure)
    _lay_out(figure, rows, num_panels=len(panels), unit=unit, longest_seconds=longest_seconds)
    return Timeline(figure=figure, caption=_caption(panels, ranks, predicted.num_ranks))


def _steps_shown(traces: Sequence[tuple[str, Trace]]) -> list[int]:
    """Return the step to show of each trace."""
    numbered = [numbered_steps(trace, title) for title, trace in traces]
    common = set.intersection(*(set(steps) for steps in numbered))
    chosen = []
    for steps in numbered:
        candidates = {step: seconds for step, seconds in numbered[-1].items() if step in common} or steps
        middle_seconds = median(candidates.values())
        chosen.append(min(candidates, key=lambda step: (abs(candidates[step] - middle_seconds), step)))
    return chosen


def _ranks_shown(traces: Sequence[Trace], steps: Sequence[int]) -> tuple[int, ...]:
    """Return all ranks, or an even choice from the busiest to the least busy where all would be too many bars."""
    busy_seconds = dict.fromkeys(range(traces[-1].num_ranks), 0.0)
    num_spans = 0
    for trace, step in zip(traces, steps, strict=True):
        of_step = [span for span in trace.spans if span.step == step]
        num_spans = max(num_spans, len(of_step))
    for span in of_step:
        busy_seconds[span.rank] += span.busy_seconds
    by_load = sorted(busy_seconds, key=lambda rank: (-busy_seconds[rank], rank))
    num_shown = len(by_load) if num_spans <= MAX_SPANS else max(2, len(by_load) * MAX_SPANS // num_spans)
    num_shown = min(num_shown, len(by_load))
    places = [round(index * (len(by_load) - 1) / max(num_shown - 1, 1)) for index in range(num_shown)]
    return tuple(sorted(by_load[place] for place in places))


def _panel(title: str, trace: Trace, step: int, ranks: tuple[int, ...]) -> _Panel:
    """Return one step of some ranks of a trace."""
    shown = set(ranks)
    return _Panel(
        title=title,
        step=step,
        step_seconds=numbered_steps(trace, title)[step],
        spans=tuple(span for span in trace.spans if span.step == step and span.rank in shown),
    )


def _bars(panel: _Panel, rows: list[tuple[int, int]], unit: str) -> list[go.Bar]:
    """Return a set of bars for each kind, and one for waiting: few traces draw fast."""
    row_of = {(rank, list(Stream)[stream]): row for row, (rank, stream) in enumerate(rows)}
    bars = []
    for kind in TaskKind:
        spans = [span for span in panel.spans if span.kind is kind]
        if spans:
            starts = [span.start_seconds + span.waiting_seconds for span in spans]
            lengths = [span.busy_seconds for span in spans]
            bars.append(
                _bar(spans, starts, lengths, row_of, unit, name=kind.value, marker={"color": KIND_COLOURS[kind]})
            )
    waits = [span for span in panel.spans if span.waiting_seconds > 0]
    if waits:
        starts = [span.start_seconds for span in waits]
        lengths = [span.waiting_seconds for span in waits]
        pattern = {"shape": "/", "size": 5, "solidity": 0.25, "fgcolor": "#7b8794", "bgcolor": WAITING_COLOUR}
        bars.append(_bar(waits, starts, lengths, row_of, unit, name="waiting", marker={"pattern": pattern}))
    return bars


def _bar(
    spans: Sequence[Span],
    starts: Sequence[float],
    lengths: Sequence[float],
    row_of: dict[tuple[int, Stream], int],
    unit: str,
    *,
    name: str,
    marker: dict[str, object],
) -> go.Bar:
    """Return horizontal bars from starts over lengths, both in seconds."""
    size = _AXIS_UNITS[unit]
    return go.Bar(
        orientation="h",
        width=BAR_WIDTH,
        y=[row_of[span.rank, span.stream] for span in spans],
        base=[start / size for start in starts],
        x=[length / size for length in lengths],
        name=name,
        legendgroup=name,
        marker={"line": {"width": 0}, **marker},
        customdata=[_hover_text(span) for span in spans],
        hovertemplate=_HOVER,
    )


def _hover_text(span: Span) -> list[str]:
    """Return the lines that hovering over a span shows."""
    duration = format_quantity(span.duration_seconds, Dimension.SECONDS)
    waiting = format_quantity(span.waiting_seconds, Dimension.SECONDS)
    times = f"{duration}, of it waiting {waiting}" if span.waiting_seconds > 0 else duration
    return [escape(span.name), f"{span.kind}, {span.phase}; {_shape_text(span)}", times]


def _shape_text(span: Span) -> str:
    """Return a span's shape in words."""
    if span.kind.is_collective:
        return f"{format_quantity(sum(span.shape), Dimension.BYTES)} from rank {span.rank}"
    fields = SHAPE_FIELDS[span.kind]
    if len(fields) != len(span.shape):
        return "shape " + " x ".join(map(str, span.shape))
    return ", ".join(f"{count:,} {field.replace('_', ' ')}" for field, count in zip(fields, span.shape, strict=True))


def _mark_step_end(figure: go.Figure, panel: _Panel, unit: str, *, row: int) -> None:
    """Draw a line where the step ends."""
    figure.add_vline(
        x=panel.step_seconds / _AXIS_UNITS[unit],
        line={"color": TEXT_COLOUR, "width": 1, "dash": "dot"},
        annotation={
            "text": f"{format_quantity(panel.step_seconds, Dimension.SECONDS)}",
            "yref": f"y{row if row > 1 else ''} domain",
            "y": 1,
            "yanchor": "bottom",
            "xanchor": "right",
            "showarrow": False,
        },
        row=row,
        col=1,
    )


def _show_each_legend_entry_once(figure: go.Figure) -> None:
    """Leave the legend one entry for a kind that both panels have."""
    seen: set[str] = set()
    for bar in figure.data:
        bar.showlegend = bar.name not in seen
        seen.add(bar.name)


def _panel_pixels(rows: list[tuple[int, int]]) -> int:
    """Return the height of one panel with its title."""
    return PANEL_PIXELS + len(rows) * (ROW_PIXELS if len(rows) <= MANY_ROWS else MANY_ROWS_PIXELS)


def _lay_out(
    figure: go.Figure, rows: list[tuple[int, int]], *, num_panels: int, unit: str, longest_seconds: float
) -> None:
    """Set sizes, axes and legend."""
    labels = [f"rank {rank}, {list(Stream)[stream].value.replace('_', ' ')}" for rank, stream in rows]
    figure.update_layout(
        **base_layout(height=num_panels * _panel_pixels(rows) + 110),
        barmode="overlay",
        dragmode="zoom",
        hovermode="closest",
        legend={"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0},
    )
    end = longest_seconds / _AXIS_UNITS[unit]
    figure.update_xaxes(range=[-0.005 * end, 1.03 * end], gridcolor=GRID_COLOUR, zeroline=False, automargin=True)
    figure.update_xaxes(title_text=f"time since the step began ({unit})", row=num_panels, col=1)
    figure.update_yaxes(
        tickvals=list(range(len(rows))),
        ticktext=labels,
        range=[len(rows) - 0.5, -0.5],
        automargin=True,
        ticksuffix="  ",
        fixedrange=True,
        showgrid=False,
        zeroline=False,
    )


def _caption(panels: Sequence[_Panel], ranks: tuple[int, ...], num_ranks: int) -> str:
    """Return what the figure shows in words, for those who do not see it."""
    steps = " and ".join(
        f"{panel.title} step {panel.step} of {format_quantity(panel.step_seconds, Dimension.SECONDS)}"
        for panel in panels
    )
    shown = "all ranks" if len(ranks) == num_ranks else f"{len(ranks)} of {num_ranks} ranks, from busiest to idlest"
    return f"Tasks of {shown}: {steps}. Hatched: waiting for the last rank. Drag to zoom, double-click to go back."
