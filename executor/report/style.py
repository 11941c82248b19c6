"""Looks of the report: colours, the frame that all figures share, and the style sheet."""

from simulator.specs.program import TaskKind

# Families: batches brown, attention warm, products blue, row-wise work green, halo teal, update grey, collectives
# violet and pink.
KIND_COLOURS: dict[TaskKind, str] = {
    TaskKind.CLUSTER_BATCH: "#8c5a3c",
    TaskKind.SAMPLED_BATCH: "#c69c7b",
    TaskKind.LINEAR: "#2b6cb0",
    TaskKind.INPUT_LINEAR: "#63b3ed",
    TaskKind.SPARSE_LINEAR: "#a3d5f7",
    TaskKind.PROJECTION: "#1a365d",
    TaskKind.LAYER_NORM: "#2f855a",
    TaskKind.GELU: "#68d391",
    TaskKind.DROPOUT: "#b7d8a4",
    TaskKind.RESIDUAL: "#8a9a3b",
    TaskKind.BIAS: "#a3b350",
    TaskKind.HALO_PACK: "#0f9b8e",
    TaskKind.PAD_ROWS: "#76d7c4",
    TaskKind.TARGET_ROWS: "#b2f5ea",
    TaskKind.COPY_ROWS: "#2c7a7b",
    TaskKind.EDGE_BIAS: "#f6ad55",
    TaskKind.ATTENTION: "#dd6b20",
    TaskKind.ATTENTION_SOURCES: "#ed8936",
    TaskKind.ATTENTION_TARGETS: "#c05621",
    TaskKind.MERGE: "#9c4221",
    TaskKind.LOSS: "#c53030",
    TaskKind.SHARD_COPY: "#b9c3d0",
    TaskKind.CLIP: "#a0aec0",
    TaskKind.GRADIENT_NORM: "#cbd5e0",
    TaskKind.GRADIENT_SCALE: "#8795a8",
    TaskKind.OPTIMIZER: "#52606d",
    TaskKind.GRADIENT_CAST: "#d69e2e",
    TaskKind.TOP_K_SELECT: "#b7791f",
    TaskKind.TOP_K_SUM: "#ecc94b",
    TaskKind.LOW_RANK_PROJECT: "#975a16",
    TaskKind.LOW_RANK_ORTHOGONALISE: "#744210",
    TaskKind.LOW_RANK_RESTORE: "#f6e05e",
    TaskKind.COPY_TO_HOST: "#4a5568",
    TaskKind.COPY_FROM_HOST: "#718096",
    TaskKind.HOST_OPTIMIZER: "#2d3748",
    TaskKind.ALL_TO_ALL: "#6b46c1",
    TaskKind.ALL_GATHER: "#b794f4",
    TaskKind.REDUCE_SCATTER: "#ed64a6",
    TaskKind.ALL_REDUCE: "#97266d",
    TaskKind.SEND: "#d53f8c",
    TaskKind.RECEIVE: "#fbb6ce",
}
WAITING_COLOUR = "#edf0f3"
PREDICTED_COLOUR = "#2b6cb0"
MEASURED_COLOUR = "#dd6b20"
CHOSEN_COLOUR = "#2f855a"
OTHER_COLOUR = "#a0aec0"
TEXT_COLOUR = "#1f2933"
GRID_COLOUR = "#e4e7eb"
# Colours of categories that have no meaning of their own, such as the parts of memory.
CATEGORY_COLOURS = (
    "#2b6cb0",
    "#90cdf4",
    "#2f855a",
    "#9ae6b4",
    "#dd6b20",
    "#fbd38d",
    "#6b46c1",
    "#d6bcfa",
    "#c53030",
    "#feb2b2",
    "#52606d",
    "#cbd2d9",
)
FONT_FAMILY = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"


def base_layout(*, height: int) -> dict[str, object]:
    """Return the layout that all figures share.

    Args:
        height: in pixels.
    """
    return {
        "template": "none",
        "height": height,
        "margin": {"l": 10, "r": 20, "t": 44, "b": 10},
        "font": {"family": FONT_FAMILY, "size": 13, "color": TEXT_COLOUR},
        "modebar": {"color": OTHER_COLOUR, "activecolor": TEXT_COLOUR, "bgcolor": "white"},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hoverlabel": {
            "bgcolor": "white",
            "bordercolor": OTHER_COLOUR,
            "font": {"color": TEXT_COLOUR},
            "align": "left",
        },
    }


STYLE_SHEET = f"""
:root {{ color-scheme: light; }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: #f5f7fa; color: {TEXT_COLOUR}; font: 15px/1.5 {FONT_FAMILY}; }}
main {{ max-width: 1240px; margin: 0 auto; padding: 24px 20px 60px; }}
header h1 {{ font-size: 26px; margin: 0 0 2px; overflow-wrap: anywhere; }}
header p {{ margin: 0 0 14px; color: #52606d; }}
section {{ background: white; border: 1px solid {GRID_COLOUR}; border-radius: 8px; }}
section {{ margin: 18px 0; padding: 18px 20px; }}
h2 {{ font-size: 19px; margin: 0 0 6px; }}
p {{ margin: 6px 0 10px; max-width: 95ch; }}
.note {{ color: #52606d; }}
.facts {{ display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; }}
.facts dt {{ color: #52606d; }}
.facts dd {{ margin: 0; overflow-wrap: anywhere; }}
.numbers {{ display: flex; flex-wrap: wrap; gap: 12px; margin: 0 0 14px; padding: 0; list-style: none; }}
.numbers li {{ flex: 1 1 180px; background: #f5f7fa; border-radius: 6px; padding: 10px 14px; }}
.numbers strong {{ display: block; font-size: 23px; line-height: 1.25; font-variant-numeric: tabular-nums; }}
.numbers span {{ color: #52606d; font-size: 13px; }}
.findings {{ margin: 6px 0 12px; padding: 10px 14px 10px 32px; background: #fffaf0; border-left: 4px solid #dd6b20; }}
.scroll {{ overflow-x: auto; margin-top: 10px; }}
table {{ border-collapse: collapse; width: 100%; font-size: 14px; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; color: #52606d; padding: 4px 0 6px; }}
th, td {{ text-align: left; padding: 4px 10px; border-bottom: 1px solid {GRID_COLOUR}; vertical-align: top; }}
thead th {{ border-bottom: 2px solid #cbd2d9; vertical-align: bottom; }}
tbody th {{ font-weight: normal; }}
td.number, th.number {{ text-align: right; }}
td.number {{ white-space: nowrap; }}
td:not(.number) {{ min-width: 26ch; }}
tr.chosen {{ background: #f0fff4; }}
tr.total > * {{ font-weight: 600; }}
summary {{ cursor: pointer; color: #2b6cb0; padding: 4px 0; }}
figure {{ margin: 0; }}
@media print {{
  body {{ background: white; font-size: 12px; }}
  main {{ max-width: none; padding: 0; }}
  section {{ border: none; padding: 8px 0; }}
  h2, p, figure, tr {{ break-inside: avoid; }}
  h2, .note {{ break-after: avoid; }}
  table {{ font-size: 10px; }}
  td:not(.number) {{ min-width: 0; }}
  th, td {{ padding: 3px 6px; }}
  .scroll {{ overflow: visible; }}
  .modebar-container {{ display: none !important; }}
}}
"""
