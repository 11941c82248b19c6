"""Figures of residuals, memory and ranking."""

from collections.abc import Sequence
from html import escape

import plotly.graph_objects as go

from executor.report.style import (
    CATEGORY_COLOURS,
    CHOSEN_COLOUR,
    GRID_COLOUR,
    MEASURED_COLOUR,
    OTHER_COLOUR,
    PREDICTED_COLOUR,
    TEXT_COLOUR,
    base_layout,
)
from executor.report.words import bytes_text, error_text, seconds_text
from simulator.compare import Comparison, Residual
from simulator.specs.decision import Prediction, RankedPlan
from simulator.specs.units import GIB, KIB, MIB

# Rows that are smaller than this share of the largest row are left to the table.
MIN_SHOWN_RATIO = 0.03
MAX_RANKED_BARS = 15
MAX_LABEL_LENGTH = 64
# A limit further above the bars than this would press them flat; it is then named instead of drawn.
MAX_LIMIT_OVER_PEAK = 3.0

_SECONDS_UNITS = {"h": 3600.0, "min": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_BYTES_UNITS = {"GiB": float(GIB), "MiB": float(MIB), "KiB": float(KIB)}


def residual_chart(comparison: Comparison, recalibrated: Comparison | None) -> go.Figure:
    """Return paired bars of predicted and measured seconds of all but the smallest rows, the longest on top."""
    longest_seconds = max(max(row.predicted_seconds, row.measured_seconds) for row in comparison.rows)
    least_seconds = MIN_SHOWN_RATIO * longest_seconds
    rows = [row for row in comparison.rows if max(row.predicted_seconds, row.measured_seconds) >= least_seconds]
    unit = _unit(longest_seconds, _SECONDS_UNITS)
    size = _SECONDS_UNITS[unit]
    labels = [row.label for row in rows]
    sides = [("predicted", PREDICTED_COLOUR, [(row.predicted_seconds, error_text(row.error_ratio)) for row in rows])]
    if recalibrated is not None:
        sides.append(("recalibrated", CHOSEN_COLOUR, _recalibrated_bars(rows, recalibrated)))
    sides.append(("measured", MEASURED_COLOUR, [(row.measured_seconds, "") for row in rows]))
    figure = go.Figure(
        [
            go.Bar(
                orientation="h",
                name=name,
                y=labels,
                x=[seconds / size for seconds, _ in bars],
                text=[text for _, text in bars],
                textposition="outside",
                cliponaxis=False,
                marker={"color": colour},
                customdata=[seconds_text(seconds) for seconds, _ in bars],
                hovertemplate="%{y}<br>" + name + " %{customdata} %{text}<extra></extra>",
            )
            for name, colour, bars in sides
        ]
    )
    figure.update_layout(
        **base_layout(height=120 + len(rows) * (8 + 12 * len(sides))),
        barmode="group",
        bargap=0.25,
        legend={"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"},
    )
    figure.update_xaxes(
        title_text=f"mean of a rank in a step ({unit})", gridcolor=GRID_COLOUR, rangemode="tozero", automargin=True
    )
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ", fixedrange=True)
    return figure


def _recalibrated_bars(rows: Sequence[Residual], recalibrated: Comparison) -> list[tuple[float, str]]:
    """Return seconds and error text after recalibration, for the same rows."""
    after = {(row.kind, row.phase): row for row in recalibrated.rows}
    found = [after.get((row.kind, row.phase)) for row in rows]
    return [(0.0, "") if row is None else (row.predicted_seconds, error_text(row.error_ratio)) for row in found]


def memory_categories(prediction: Prediction) -> list[str]:
    """Return the categories of all ranks, in the order in which they are first named."""
    return list(dict.fromkeys(category for rank in prediction.peak_memory_bytes for category, _ in rank))


def memory_chart(
    prediction: Prediction, measured_peak_bytes: Sequence[int], limit_bytes: int, *, width: int = 1100
) -> go.Figure:
    """Return each rank's predicted memory stacked by category, the measured peak and the device's limit.

    Args:
        prediction: of the plan.
        measured_peak_bytes: of each rank; empty if nothing was measured.
        limit_bytes: memory of one device.
        width: of the page in pixels, from which bars get a width that suits few ranks too.
    """
    ranks = [str(rank) for rank in range(len(prediction.peak_memory_bytes))]
    peak_bytes = max(prediction.largest_peak_memory_bytes, max(measured_peak_bytes, default=0), 1)
    unit = _unit(peak_bytes, _BYTES_UNITS)
    size = _BYTES_UNITS[unit]
    figure = go.Figure()
    for index, category in enumerate(memory_categories(prediction)):
        bytes_of_rank = [dict(rank).get(category, 0) for rank in prediction.peak_memory_bytes]
        figure.add_bar(
            name=escape(category.replace("_", " ")),
            x=ranks,
            y=[num_bytes / size for num_bytes in bytes_of_rank],
            width=min(0.7, 90 * len(ranks) / width),
            marker={"color": CATEGORY_COLOURS[index % len(CATEGORY_COLOURS)]},
            customdata=[bytes_text(num_bytes) for num_bytes in bytes_of_rank],
            hovertemplate="rank %{x}<br>%{fullData.name}: %{customdata}<extra></extra>",
        )
    if measured_peak_bytes:
        figure.add_scatter(
            name="measured peak",
            x=ranks,
            y=[num_bytes / size for num_bytes in measured_peak_bytes],
            mode="markers",
            marker={"symbol": "diamond", "size": 11, "color": "white", "line": {"color": TEXT_COLOUR, "width": 2}},
            customdata=[bytes_text(num_bytes) for num_bytes in measured_peak_bytes],
            hovertemplate="rank %{x}<br>measured peak: %{customdata}<extra></extra>",
        )
    _mark_limit(figure, limit_bytes, peak_bytes, size)
    figure.update_layout(**base_layout(height=400), barmode="stack", legend={"x": 1.01, "y": 1})
    figure.update_xaxes(title_text="rank", type="category", showgrid=False, automargin=True)
    figure.update_yaxes(title_text=unit, gridcolor=GRID_COLOUR, automargin=True)
    return figure


def _mark_limit(figure: go.Figure, limit_bytes: int, peak_bytes: int, size: float) -> None:
    """Draw the device's limit as a line, or name it where it lies far above the bars."""
    text = f"device limit {bytes_text(limit_bytes)}"
    if limit_bytes <= MAX_LIMIT_OVER_PEAK * peak_bytes:
        figure.add_hline(
            y=limit_bytes / size,
            line={"color": "#c53030", "width": 2, "dash": "dash"},
            annotation={"text": text, "font": {"color": "#c53030"}},
            annotation_position="top left",
        )
        figure.update_yaxes(range=[0, 1.12 * max(limit_bytes, peak_bytes) / size])
        return
    figure.add_annotation(
        text=f"{text}, above this axis",
        font={"color": "#c53030"},
        showarrow=False,
        **{"xref": "paper", "yref": "paper", "x": 0, "y": 1, "xanchor": "left", "yanchor": "bottom"},
    )
    figure.update_yaxes(range=[0, 1.12 * peak_bytes / size])


def ranking_chart(prediction: Prediction, chosen: str, ranking: Sequence[RankedPlan]) -> go.Figure:
    """Return bars of predicted seconds of an epoch: the chosen plan with p10 to p90, then the first runners-up."""
    shown = ranking[:MAX_RANKED_BARS]
    bars = [(chosen, prediction.epoch_seconds), *((ranked.description, ranked.epoch_seconds) for ranked in shown)]
    unit = _unit(max(seconds for _, seconds in bars), _SECONDS_UNITS)
    size = _SECONDS_UNITS[unit]
    epoch_steps = prediction.epoch_seconds / prediction.p50_step_seconds
    figure = go.Figure()
    groups = ((1, bars[:1], CHOSEN_COLOUR, "white"), (2, bars[1:], OTHER_COLOUR, TEXT_COLOUR))
    for first, group, colour, text_colour in groups:
        figure.add_bar(
            orientation="h",
            y=[f"{place}. {escape(_shortened(name))}" for place, (name, _) in enumerate(group, start=first)],
            x=[seconds / size for _, seconds in group],
            text=[seconds_text(seconds) for _, seconds in group],
            textposition="auto",
            textangle=0,
            insidetextanchor="start",
            insidetextfont={"color": text_colour},
            marker={"color": colour},
            customdata=[escape(name) for name, _ in group],
            hovertemplate="%{customdata}<br>%{text} an epoch<extra></extra>",
        )
    figure.data[0].error_x = {
        "symmetric": False,
        "array": [(prediction.p90_step_seconds - prediction.p50_step_seconds) * epoch_steps / size],
        "arrayminus": [(prediction.p50_step_seconds - prediction.p10_step_seconds) * epoch_steps / size],
        "color": TEXT_COLOUR,
    }
    figure.update_layout(barmode="overlay", showlegend=False)
    figure.update_layout(**base_layout(height=100 + 32 * len(bars)), bargap=0.25)
    figure.update_xaxes(
        title_text=f"predicted epoch ({unit})", gridcolor=GRID_COLOUR, rangemode="tozero", automargin=True
    )
    figure.update_yaxes(autorange="reversed", automargin=True, ticksuffix="  ", fixedrange=True)
    return figure


def _shortened(text: str) -> str:
    """Return a text that is cut where a label would grow too long."""
    return text if len(text) <= MAX_LABEL_LENGTH else text[: MAX_LABEL_LENGTH - 3] + "..."


def _unit(largest: float, units: dict[str, float]) -> str:
    """Return the largest unit of which there are two or more, else the smallest."""
    return next((unit for unit, size in units.items() if largest >= 2 * size), list(units)[-1])
