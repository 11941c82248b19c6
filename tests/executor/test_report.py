"""The report page, from made traces of a small model; rendered in Chromium where it is installed."""

import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from plotly.offline import get_plotlyjs

from executor.report import charts, words
from executor.report.page import write_report
from executor.report.style import KIND_COLOURS
from executor.report.timeline import MAX_SPANS, timeline
from simulator.compare import compare
from simulator.errors import SpecError
from simulator.specs.cluster import BUILT_IN_CLUSTERS
from simulator.specs.decision import PlanFile, Prediction, RankedPlan
from simulator.specs.graph import GraphFile, GraphSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, ExchangePayload, PartitionMethod, PartitionSpec, PartSpec, Plan, Recompute
from simulator.specs.program import SHAPE_FIELDS, Phase, Stream, TaskKind, task_name
from simulator.specs.topology import LinkFault, Straggler
from simulator.specs.trace import Span, Trace, TraceOrigin
from simulator.specs.train import TrainSpec
from simulator.specs.units import GIB, MIB, Dtype

SECTIONS = ("summary", "timeline", "residuals", "memory", "ranking", "provenance")
CHARTS = ("timeline", "residuals", "memory", "ranking")

# A layer's tasks and their seconds on an even rank; kinds that exchange are collectives.
LAYER = (
    ("attention_norm", TaskKind.LAYER_NORM, 60e-6),
    ("query_key_value", TaskKind.PROJECTION, 400e-6),
    ("halo_pack", TaskKind.HALO_PACK, 90e-6),
    ("exchange", TaskKind.ALL_TO_ALL, 350e-6),
    ("edge_bias", TaskKind.EDGE_BIAS, 110e-6),
    ("attention", TaskKind.ATTENTION, 1500e-6),
    ("attention_output", TaskKind.LINEAR, 210e-6),
    ("attention_dropout", TaskKind.DROPOUT, 50e-6),
    ("attention_residual", TaskKind.RESIDUAL, 40e-6),
    ("feed_forward_norm", TaskKind.LAYER_NORM, 60e-6),
    ("feed_forward_up", TaskKind.LINEAR, 500e-6),
    ("gelu", TaskKind.GELU, 120e-6),
    ("feed_forward_down", TaskKind.LINEAR, 480e-6),
)
UPDATE = (
    ("gradients", TaskKind.ALL_REDUCE, Phase.BACKWARD, 300e-6),
    ("clip", TaskKind.CLIP, Phase.UPDATE, 120e-6),
    ("optimizer", TaskKind.OPTIMIZER, Phase.UPDATE, 400e-6),
)


def step_tasks(num_layers):
    """Return name, kind, phase and seconds of a step's tasks in order."""
    named = [(f"layer{index}.{name}", kind, seconds) for index in range(num_layers) for name, kind, seconds in LAYER]
    named = [("input.linear", TaskKind.INPUT_LINEAR, 200e-6), *named, ("head.linear", TaskKind.LINEAR, 150e-6)]
    named.append(("loss", TaskKind.LOSS, 80e-6))
    forward = [(name, kind, Phase.FORWARD, seconds) for name, kind, seconds in named]
    backward = [
        (task_name(name, Phase.BACKWARD), kind, Phase.BACKWARD, (1 if kind.is_collective else 2) * seconds)
        for name, kind, seconds in reversed(named)
    ]
    return [*forward, *backward, *UPDATE]


def made_trace(
    origin=TraceOrigin.SIMULATED,
    *,
    factors=None,
    gap_seconds=4e-6,
    num_layers=2,
    num_ranks=2,
    steps=(3,),
    stream=Stream.COMPUTE,
    num_untraced=20,
):
    """Return a trace in which odd ranks are 15 % slower, so that even ones wait in collectives.

    Args:
        factors: by which tasks of a kind take longer.
        gap_seconds: of the host before each task.
        stream: of collectives.
    """
    factors = factors or {}
    spans = []
    ends = []
    for number, step in enumerate(steps):
        clocks = [50e-6] * num_ranks
        for name, kind, phase, seconds in step_tasks(num_layers):
            seconds = seconds * factors.get(kind, 1.0) * (1 + 0.02 * number)
            lengths = [seconds * (1 + 0.15 * (rank % 2) * (not kind.is_collective)) for rank in range(num_ranks)]
            clocks = [clock + gap_seconds for clock in clocks]
            latest = max(clocks)
            for rank, clock in enumerate(clocks):
                waiting = latest - clock if kind.is_collective else 0.0
                shape = (600_000,) * num_ranks if kind.is_collective else (25_000,) * len(SHAPE_FIELDS[kind])
                spans.append(
                    Span(
                        rank=rank,
                        step=step,
                        stream=stream if kind.is_collective else Stream.COMPUTE,
                        name=name,
                        kind=kind,
                        phase=phase,
                        shape=shape,
                        start_seconds=clock,
                        duration_seconds=waiting + lengths[rank],
                        waiting_seconds=waiting,
                    )
                )
                clocks[rank] = clock + waiting + lengths[rank]
        ends.append(max(clocks))
    whole = ends[0] - len(step_tasks(num_layers)) * 1e-6
    return Trace(
        origin=origin,
        num_ranks=num_ranks,
        spans=tuple(spans),
        step_seconds=tuple(whole * (0.97 + 0.003 * trial) for trial in range(num_untraced)),
        traced_step_seconds=tuple(ends),
        peak_memory_bytes=tuple(int((1.35 + 0.1 * (rank % 2)) * GIB) for rank in range(num_ranks)),
        environment=(("torch", "2.13.0"), ("device", "NVIDIA H200"), ("date", "2025-11-29")),
    )


def made_measurement(**options):
    """Return a trace whose attention is slower, whose products are faster and whose host leaves gaps."""
    factors = {TaskKind.ATTENTION: 1.12, TaskKind.LINEAR: 0.9, TaskKind.ALL_TO_ALL: 1.4, TaskKind.GELU: 1.05}
    return made_trace(TraceOrigin.MEASURED, factors=factors, gap_seconds=9e-6, steps=(3, 4, 5), **options)


def made_plan(num_ranks=2, num_layers=2):
    own = 80_000
    part = PartSpec(
        num_nodes=84_671,
        num_train_nodes=45_470,
        num_feature_entries=0,
        edges_from=(583_000, *(own,) * (num_ranks - 1)),
        halo_rows_from=(0, *(16_000,) * (num_ranks - 1)),
        edges_of_long_targets_from=(0,) * num_ranks,
        edges_of_long_sources_from=(0,) * num_ranks,
        inner_edges_of_long_targets=0,
        outer_edges_of_long_targets=0,
        edges_out_of_long_sources=0,
        num_boundary_nodes=30_000,
        boundary_nodes_from=(0, *(20_000,) * (num_ranks - 1)),
    )
    partition = PartitionSpec(
        method=PartitionMethod.METIS, seed=0, path="partition.npy", sha256="ab" * 32, parts=(part,) * num_ranks
    )
    return Plan(
        data_parallel_degree=1,
        graph_parallel_degree=num_ranks,
        partition=partition,
        parts_per_batch=num_ranks,
        exchange=(Exchange.HALO,) * num_layers,
        recompute=(Recompute.NONE,) * num_layers,
        precision=Dtype.BFLOAT16,
    )


def made_plan_file(path="../shared/data/ogbn-arxiv", num_ranks=2, num_layers=2, peak_bytes=int(0.2 * GIB)):
    categories = ("parameters", "gradients", "optimizer_state", "activations", "exchange_buffers", "workspace")
    ranks = tuple(
        tuple((category, (index + 1 + rank % 2) * peak_bytes // 3) for index, category in enumerate(categories))
        for rank in range(num_ranks)
    )
    return PlanFile(
        graph=GraphSpec(
            source=GraphFile(path=path),
            sha256="cd" * 32,
            num_nodes=169_343,
            num_edges=2_484_941,
            num_features=128,
            num_feature_entries=0,
            num_classes=40,
            num_train_nodes=90_941,
            num_val_nodes=29_799,
            num_test_nodes=48_603,
            in_degree_quantiles=(1.0, 4.0, 7.0, 14.0, 28.0, 97.0, 13_162.0),
        ),
        model=ModelSpec(
            width=256,
            num_heads=8,
            num_layers=num_layers,
            feed_forward_width=1024,
            dropout_ratio=0.1,
            edge_bias=EdgeBias.DEGREE,
        ),
        cluster=BUILT_IN_CLUSTERS["h200x8"],
        train=TrainSpec(num_steps=200, learning_rate=1e-3, warmup_steps=20, trace_steps=3),
        plan=made_plan(num_ranks, num_layers),
        prediction=Prediction(
            p10_step_seconds=28.3e-3,
            p50_step_seconds=29.0e-3,
            p90_step_seconds=30.5e-3,
            epoch_seconds=29.0e-3,
            peak_memory_bytes=ranks,
        ),
        ranking=(
            RankedPlan(
                description="4 ranks, halo exchange, no recompute, bf16",
                p50_step_seconds=31.9e-3,
                epoch_seconds=31.9e-3,
                peak_memory_bytes=int(1.1 * GIB),
                reason="exchange of 41 MB a layer outweighs the shorter attention: 10 % slower",
            ),
            RankedPlan(
                description="2 ranks, all-gather exchange in every layer, no recompute, bf16, gradients in one bucket",
                p50_step_seconds=36.0e-3,
                epoch_seconds=36.0e-3,
                peak_memory_bytes=int(2.3 * GIB),
                reason="moves 2.9 x the rows of the halo exchange: 24 % slower",
            ),
            RankedPlan(
                description="1 rank",
                p50_step_seconds=50.8e-3,
                epoch_seconds=50.8e-3,
                peak_memory_bytes=int(3.9 * GIB),
                reason="one device computes everything: 75 % slower",
            ),
        ),
        rejected=(("num_heads = 8 must be divisible by 3", 4), ("lower bound above the best plan found", 31)),
        calibration_sha256="ef" * 32,
    )


def written(tmp_path, **options):
    path = tmp_path / "report.html"
    arguments = {"plan_file": made_plan_file(), "predicted": made_trace(), "measured": made_measurement()} | options
    write_report(path, **arguments)
    return path.read_text(encoding="utf-8")


class PageReader(HTMLParser):
    """Collects what a browser would fetch, the ids and the visible text."""

    def __init__(self):
        super().__init__()
        self.fetched = []
        self.ids = []
        self.tags = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "data", "action", "poster"):
                self.fetched.append((tag, value))
            if name == "id":
                self.ids.append(value)

    def handle_data(self, data):
        self.text += data


def read(page):
    reader = PageReader()
    reader.feed(page.replace(get_plotlyjs(), ""))
    return reader


def test_the_page_fetches_nothing(tmp_path):
    page = written(tmp_path)
    assert page.count(get_plotlyjs()) == 1
    reader = read(page)
    assert reader.fetched == []
    assert not re.search(r"url\(|@import|https?://", page.replace(get_plotlyjs(), ""))
    assert "default-src 'none'" in page


def test_the_page_has_every_section_and_chart(tmp_path):
    ids = read(written(tmp_path)).ids
    assert set(SECTIONS) <= set(ids)
    assert {f"{chart}-chart" for chart in CHARTS} <= set(ids)
    assert len(ids) == len(set(ids))


def test_the_page_tells_prediction_measurement_and_error(tmp_path):
    predicted, measured = made_trace(), made_measurement()
    text = read(written(tmp_path)).text
    step = compare(predicted, measured).step
    for shown in (
        words.seconds_text(predicted.median_step_seconds),
        words.seconds_text(predicted.step_seconds_quantile(0.1)),
        words.seconds_text(predicted.step_seconds_quantile(0.9)),
        words.seconds_text(measured.median_step_seconds),
        f"{step.error_ratio:+.1%}",
        "one device computes everything: 75 % slower",
        "num_heads = 8 must be divisible by 3",
        "attention, backward",
        "ef" * 32,
    ):
        assert shown in text


def test_a_prediction_alone_makes_a_page(tmp_path):
    reader = read(written(tmp_path, measured=None))
    assert "residuals" not in reader.ids
    assert {"timeline", "memory", "ranking"} <= set(reader.ids)
    assert "not measured" in reader.text


def test_a_recalibrated_prediction_has_its_own_column(tmp_path):
    better = compare(made_trace(factors={TaskKind.ATTENTION: 1.1}), made_measurement())
    reader = read(written(tmp_path, recalibrated=better))
    assert "recalibrated error" in reader.text
    assert f"{better.step.error_ratio:+.1%}" in reader.text


def test_a_prediction_that_has_moved_since_the_plan_was_made_is_told(tmp_path):
    plan_file = made_plan_file()
    stale = replace(plan_file, prediction=replace(plan_file.prediction, p10_step_seconds=20e-3, p50_step_seconds=20e-3))
    sentence = "The plan was chosen on a predicted step of 20 ms"
    assert sentence in read(written(tmp_path, plan_file=stale)).text
    assert sentence not in read(written(tmp_path)).text


def test_cancelling_errors_are_told_in_the_summary(tmp_path):
    predicted = made_trace(factors={TaskKind.ATTENTION: 1.5, TaskKind.LINEAR: 0.3})
    reader = read(written(tmp_path, predicted=predicted))
    assert "Errors cancel" in reader.text


def test_texts_of_specs_are_escaped(tmp_path):
    attack = "<script>alert(1)</script>"
    plan_file = replace(made_plan_file(path=f"graphs/{attack}"), rejected=((f"<img src=x>{attack}", 1),))
    renamed = tuple(replace(span, name=f"{attack}{span.name}") for span in made_trace().spans)
    page = written(tmp_path, plan_file=plan_file, predicted=replace(made_trace(), spans=renamed))
    tags = read(page).tags
    assert attack not in page.replace(get_plotlyjs(), "")
    assert "img" not in tags
    assert tags.count("script") == read(written(tmp_path)).tags.count("script")
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in page


def test_the_same_input_writes_the_same_page(tmp_path):
    assert written(tmp_path) == written(tmp_path)


def test_traces_of_another_plan_are_refused(tmp_path):
    with pytest.raises(SpecError, match="num_ranks of the measured trace must equal the plan's, 2, got 4"):
        written(tmp_path, measured=made_measurement(num_ranks=4))


def test_a_trace_without_spans_is_refused(tmp_path):
    with pytest.raises(SpecError, match="spans of the predicted trace must not be empty"):
        written(tmp_path, predicted=replace(made_trace(), spans=()), measured=None)


def test_a_page_that_cannot_be_written_is_an_error_with_its_path(tmp_path):
    path = tmp_path / "missing" / "report.html"
    with pytest.raises(SpecError, match="report cannot be written"):
        write_report(path, plan_file=made_plan_file(), predicted=made_trace())


def test_every_kind_has_a_colour_of_its_own():
    assert set(KIND_COLOURS) == set(TaskKind)
    assert len(set(KIND_COLOURS.values())) == len(TaskKind)


def test_the_timeline_draws_each_busy_and_each_waiting_time_once():
    predicted, measured = made_trace(), made_measurement(stream=Stream.COMMUNICATION)
    figure = timeline(predicted, measured).figure
    for axis, trace, step in (("x", predicted, 3), ("x2", measured, 3)):
        bars = [bar for bar in figure.data if (bar.xaxis or "x") == axis]
        spans = [span for span in trace.spans if span.step == step]
        waits = [span.waiting_seconds for span in spans if span.waiting_seconds > 0]
        by_name = {bar.name: sum(bar.x) / 1e3 for bar in bars}
        assert by_name.pop("waiting") == pytest.approx(sum(waits))
        assert sum(by_name.values()) == pytest.approx(sum(span.busy_seconds for span in spans))
        assert sum(len(bar.x) for bar in bars) == len(spans) + len(waits)


def test_the_timeline_shows_the_median_step_of_those_that_both_have():
    caption = timeline(made_trace(steps=(4, 5)), made_measurement()).caption
    assert "predicted step 4" in caption
    assert "measured step 4" in caption
    assert "all ranks" in caption


def test_the_timeline_shows_the_median_steps_if_none_is_common():
    caption = timeline(made_trace(steps=(0,)), made_measurement()).caption
    assert "predicted step 0" in caption
    assert "measured step 4" in caption


def test_a_large_trace_shows_some_ranks_only():
    wide = made_trace(num_ranks=64, num_layers=8)
    num_tasks = len(step_tasks(8))
    shown = timeline(wide, None)
    drawn = {bar.name: len(bar.x) for bar in shown.figure.data if bar.name != "waiting"}
    num_shown = MAX_SPANS // num_tasks
    assert sum(drawn.values()) == num_shown * num_tasks
    assert f"{num_shown} of 64 ranks" in shown.caption


def test_memory_bars_add_up_to_the_prediction_of_each_rank():
    plan_file = made_plan_file()
    figure = charts.memory_chart(plan_file.prediction, (int(1.4 * GIB), int(1.5 * GIB)), 80 * GIB)
    bars = [trace for trace in figure.data if trace.type == "bar"]
    for rank, pairs in enumerate(plan_file.prediction.peak_memory_bytes):
        assert sum(bar.y[rank] for bar in bars) * MIB == pytest.approx(sum(num_bytes for _, num_bytes in pairs))


def test_a_near_device_limit_is_drawn_and_a_far_one_is_named():
    prediction = made_plan_file().prediction
    near = charts.memory_chart(prediction, (), 2 * prediction.largest_peak_memory_bytes)
    far = charts.memory_chart(prediction, (), 50 * prediction.largest_peak_memory_bytes)
    assert len(near.layout.shapes) == 1
    assert len(far.layout.shapes) == 0
    assert "above this axis" in far.layout.annotations[0].text


def test_the_interval_of_the_chosen_plan_is_scaled_to_an_epoch():
    # Four steps an epoch: p50 of 29 ms is 116 ms, p10 2.8 ms and p90 6 ms away.
    prediction = replace(made_plan_file().prediction, epoch_seconds=4 * 29.0e-3)
    bar = charts.ranking_chart(prediction, "chosen plan", ()).data[0]
    assert bar.x[0] == pytest.approx(116.0)
    assert (bar.error_x.arrayminus[0], bar.error_x.array[0]) == pytest.approx((2.8, 6.0))


def test_a_plan_is_told_in_words():
    plan = replace(made_plan(), exchange=(Exchange.HALO, Exchange.ALL_GATHER))
    told = words.plan_words(plan)
    # 16,000 halo rows of 84,671 nodes in each part; both parts have equal numbers of edges, one fifth cut in all.
    assert told.startswith("2 ranks: 1 replica of 2 ranks; the full graph in each step; 2 parts by metis")
    assert "halo 19% of the nodes, largest part 1.00 x the mean in edges" in told
    assert "exchange halo in 1 layer, all-gather in 1 layer; recompute none in every layer; bf16" in told
    assert told.endswith("gradients in buckets of 25 MiB")


def test_how_rows_travel_is_told_in_words():
    plan = replace(
        made_plan(),
        precision=Dtype.FLOAT32,
        overlap_exchange=True,
        exchange_payload=ExchangePayload.ROWS,
        exchange_precision=Dtype.BFLOAT16,
        exchange_chunk_bytes=2**20,
    )
    assert (
        "exchange halo in every layer, normed rows travel, overlapped with attention over own rows, in bf16, "
        "at most 1 MiB a message;"
    ) in words.plan_words(plan)


def chromium():
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    return found


def rendered(tmp_path, page):
    """Return the document after its scripts ran, and what the browser logged."""
    command = [
        chromium(),
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
        *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
        f"--user-data-dir={tmp_path / 'profile'}",
        *("--window-size=1400,3200", "--virtual-time-budget=20000", "--dump-dom"),
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    return done.stdout, done.stderr


@pytest.mark.slow
def test_chromium_draws_every_chart_without_an_error(tmp_path):
    attack = "<b onclick=alert(1)>graph</b>"
    written(tmp_path, plan_file=made_plan_file(path=attack))
    document, log = rendered(tmp_path, tmp_path / "report.html")
    assert document.count("js-plotly-plot") >= len(CHARTS)
    for name in CHARTS:
        drawn = document.split(f'id="{name}-chart"')[1].split("</figure>")[0]
        assert "<svg" in drawn
        assert "<path" in drawn
    buttons = set(re.findall('data-title="([^"]*)"', document.replace(get_plotlyjs(), "")))
    assert buttons == {"Zoom", "Pan", "Reset axes", "Download plot as a PNG"}  # none that uploads
    assert "CONSOLE" not in log, log


@pytest.mark.slow
def test_chromium_draws_ten_thousand_tasks(tmp_path):
    predicted = made_trace(num_ranks=36, num_layers=5)
    measured = made_measurement(num_ranks=36, num_layers=5)
    plan_file = made_plan_file(num_ranks=36, num_layers=5)
    written(tmp_path, plan_file=plan_file, predicted=predicted, measured=measured)
    document, log = rendered(tmp_path, tmp_path / "report.html")
    drawn = document.split('id="timeline-chart"')[1].split("</figure>")[0]
    assert drawn.count('class="point"') >= 2 * 36 * len(step_tasks(5))
    assert "CONSOLE" not in log, log


def test_what_of_a_cluster_is_slow_or_lost_is_told():
    faults = (
        LinkFault(ends=("nic1", "network"), host=2, bandwidth_ratio=0),
        LinkFault(ends=("device0", "nvswitch"), bandwidth_bytes_per_second=1e9),
    )
    cluster = replace(
        BUILT_IN_CLUSTERS["h100x8-ndr"],
        stragglers=(Straggler(device=3, slowdown=1.5),),
        link_faults=faults,
        jitter=0.1,
    )
    assert words.cluster_words(cluster).endswith(
        "; leaf switches: 8, oversubscribed 1 to 1, by rail; device 3 takes 1.5 times as long; "
        "link from nic1 to network of host 2: 0 of its rate; link from device0 to nvswitch: 1 GB/s; jitter 0.1"
    )
