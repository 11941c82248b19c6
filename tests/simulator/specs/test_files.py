import itertools
import json
import os
import re
import stat
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.errors import SpecError
from simulator.specs import files
from simulator.specs.cluster import BUILT_IN_CLUSTERS, H200, ClusterSpec, LinkSpec
from simulator.specs.convert import to_plain
from simulator.specs.document import content_sha256, document_text
from simulator.specs.files import (
    cluster_toml,
    read_calibration,
    read_cluster,
    read_fanout,
    read_manifest,
    read_plan,
    read_run,
    read_trace,
    read_traces,
    run_toml,
    write_calibration,
    write_cluster,
    write_fanout,
    write_manifest,
    write_plan,
    write_text_atomic,
    write_trace,
    write_traces,
)
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.graph import CommunityGraph, FeatureNorm, GraphFile
from simulator.specs.model import ModelSpec
from simulator.specs.order import OrderSpec
from simulator.specs.plan import Exchange
from simulator.specs.program import Phase, Stream, TaskKind
from simulator.specs.search import BatchKind, SearchSpec
from simulator.specs.topology import LinkFault, NetworkSpec, Straggler
from simulator.specs.trace import Span, Trace, TraceOrigin
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dimension, exact_quantity
from tests.strategies import (
    calibrations,
    checkpoint_manifests,
    clusters,
    fanout_comparisons,
    plan_files,
    runs,
    traces,
)

# Each example writes to the same folder anew.
same_folder = settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])

GRAPH = '[graph]\npath = "cora.npz"\n'
MODEL = "[model]\nwidth = 64\nnum_heads = 8\nnum_layers = 2\nfeed_forward_width = 128\n"
CLUSTER = '[cluster]\nname = "h200x8"\n'
TRAIN = "[train]\nnum_steps = 10\nlearning_rate = 0.01\n"


def documented(name: str) -> str:
    """Return the first indented block after a file's name in the docstring of `files.py`."""
    assert files.__doc__ is not None
    after = files.__doc__.split(f"`{name}`, for", 1)[1]
    lines = itertools.dropwhile(lambda line: not line.startswith("    "), after.splitlines())
    return textwrap.dedent("\n".join(itertools.takewhile(lambda line: not line or line.startswith("    "), lines)))


def written(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> str:
    """Return what `read_run` says of a text, without the file's name before it."""
    path = written(folder, text)
    with pytest.raises(SpecError) as caught:
        read_run(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


# --- run.toml and cluster.toml.


def test_the_documented_run_is_read_as_documented(tmp_path):
    run = read_run(written(tmp_path, documented("run.toml")))
    h200x8 = BUILT_IN_CLUSTERS["h200x8"]
    assert run.graph == GraphFile(path=str(tmp_path / "data/cora.npz"), normalize_features=FeatureNorm.ROW)
    assert run.model == ModelSpec(width=64, num_heads=8, num_layers=2, feed_forward_width=128, dropout_ratio=0.5)
    assert run.train == TrainSpec(num_steps=200, learning_rate=0.01)
    batches = (BatchKind.FULL_GRAPH, BatchKind.SAMPLED)
    sampled = {"fan_outs": (15, 10), "seeds_per_batch": 1024}
    assert run.search == SearchSpec(exchanges=(Exchange.HALO,), batches=batches, **sampled)  # type: ignore[arg-type]
    assert run.cluster == replace(
        h200x8, devices_per_host=4, device_link=replace(h200x8.device_link, bandwidth_bytes_per_second=300e9)
    )


def test_the_documented_cluster_is_read_as_documented(tmp_path):
    cluster = read_cluster(written(tmp_path, documented("cluster.toml")))
    assert (cluster.name, cluster.num_devices) == ("office", 2)
    assert cluster.device == BUILT_IN_CLUSTERS["h100x8-ndr"].device
    assert cluster.host_link == LinkSpec(latency_seconds=25 * 1e-6, bandwidth_bytes_per_second=5e10)


def test_the_documented_topology_is_read_as_documented(tmp_path):
    text = documented("topology")
    keys, tables = text.split("[host]", 1)
    cluster = read_cluster(written(tmp_path, f"{keys}\n{documented('cluster.toml')}\n[host]{tables}"))
    assert cluster.stragglers == (Straggler(device=1, slowdown=1.3),)
    assert cluster.link_faults == (LinkFault(ends=("nic1", "network"), host=0, bandwidth_ratio=0.0),)
    assert cluster.jitter == 0.05
    assert cluster.host is not None
    assert (cluster.host.num_nics, cluster.host.gpu_direct) == (2, False)
    assert cluster.network == NetworkSpec(hosts_per_leaf=32, oversubscription=2.0, rails=True)


@given(run=runs)
@same_folder
def test_a_run_comes_back_equal(tmp_path, run):
    if isinstance(run.graph, GraphFile):
        run = replace(run, graph=replace(run.graph, path=f"/{run.graph.path}"))
    assert read_run(written(tmp_path, run_toml(run))) == run


@given(cluster=clusters)
@same_folder
def test_a_cluster_comes_back_equal(tmp_path, cluster):
    write_cluster(tmp_path / "cluster.toml", cluster)
    assert read_cluster(tmp_path / "cluster.toml") == cluster


@pytest.mark.parametrize("name", BUILT_IN_CLUSTERS)
def test_a_built_in_cluster_can_be_printed_edited_and_read_back(tmp_path, name):
    cluster = BUILT_IN_CLUSTERS[name]
    text = cluster_toml(cluster)
    assert read_cluster(written(tmp_path, text)) == cluster
    rate = exact_quantity(cluster.device_link.bandwidth_bytes_per_second, Dimension.BYTES_PER_SECOND)
    edited = text.replace("num_hosts = ", "num_hosts = 1").replace(f'"{rate}"', '"123 GB/s"')
    link = replace(cluster.device_link, bandwidth_bytes_per_second=123e9)
    expected = replace(cluster, num_hosts=10 + cluster.num_hosts, device_link=link)
    assert read_cluster(written(tmp_path, edited)) == expected


def test_a_cluster_is_printed_in_units_that_people_read():
    assert cluster_toml(BUILT_IN_CLUSTERS["h200x8"]) == textwrap.dedent("""\
        name = "h200x8"
        num_hosts = 1
        devices_per_host = 8

        [device]
        kind = "cuda"
        name = "NVIDIA H200"
        memory_bytes = "143771 MiB"
        memory_bandwidth_bytes_per_second = "4.8 TB/s"
        fp32_flops_per_second = "67 TFLOP/s"
        bf16_flops_per_second = "989 TFLOP/s"
        cache_bytes = "60 MiB"

        [device_link]
        latency_seconds = "13 us"
        bandwidth_bytes_per_second = "330 GB/s"

        [host_link]
        latency_seconds = "25 us"
        bandwidth_bytes_per_second = "49 GB/s"
        """)


def test_the_machine_at_hand_is_left_for_later(tmp_path):
    assert read_run(written(tmp_path, GRAPH + MODEL + '[cluster]\nname = "local"\n' + TRAIN)).cluster is None


def test_a_made_up_graph_is_chosen_by_its_generator(tmp_path):
    graph = '[graph]\ngenerator = "community"\nnum_nodes = 100\nnum_edges = 300\n'
    run = read_run(written(tmp_path, graph + MODEL + CLUSTER + TRAIN))
    assert run.graph == CommunityGraph(num_nodes=100, num_edges=300)


def test_an_absolute_path_of_a_graph_is_kept(tmp_path):
    graph = '[graph]\npath = "/data/../cora.npz"\n'
    run = read_run(written(tmp_path, graph + MODEL + CLUSTER + TRAIN))
    assert isinstance(run.graph, GraphFile)
    assert run.graph.path == "/data/../cora.npz"


def test_a_cluster_of_ones_own_is_found_beside_the_run_and_can_be_changed(tmp_path):
    mine = replace(BUILT_IN_CLUSTERS["h100x8-ndr"], name="mine")
    (tmp_path / "clusters").mkdir()
    write_cluster(tmp_path / "clusters/mine.toml", mine)
    cluster = '[cluster]\nfile = "clusters/mine.toml"\nnum_hosts = 9\ndevice = {memory_bytes = "94 GiB"}\n'
    run = read_run(written(tmp_path, GRAPH + MODEL + cluster + TRAIN))
    assert run.cluster == replace(mine, num_hosts=9, device=replace(mine.device, memory_bytes=94 * 2**30))


def test_a_cluster_file_may_change_a_built_in_cluster(tmp_path):
    path = written(tmp_path, 'name = "h200x8"\nnum_hosts = 3\n', "c.toml")
    assert read_cluster(path) == replace(BUILT_IN_CLUSTERS["h200x8"], num_hosts=3)


def test_a_cluster_may_be_described_within_the_run(tmp_path):
    inner = re.sub(r"^\[", "[cluster.", cluster_toml(BUILT_IN_CLUSTERS["h200x8"]), flags=re.MULTILINE)
    run = read_run(written(tmp_path, GRAPH + MODEL + "[cluster]\n" + inner.replace('"h200x8"', '"mine"') + TRAIN))
    assert run.cluster == replace(BUILT_IN_CLUSTERS["h200x8"], name="mine")


def test_a_byte_order_mark_and_other_line_ends_do_no_harm(tmp_path):
    text = (GRAPH + MODEL + CLUSTER + TRAIN).replace("\n", "\r\n")
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_run(tmp_path / "run.toml").cluster == BUILT_IN_CLUSTERS["h200x8"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MODEL + CLUSTER + TRAIN, "graph is missing"),
        (GRAPH + MODEL + TRAIN, "cluster is missing"),
        (GRAPH + MODEL + CLUSTER + TRAIN + "[serach]\n", "serach is unknown; did you mean search?"),
        (GRAPH + MODEL + "num_head = 4\n" + CLUSTER + TRAIN, "model.num_head is unknown; did you mean num_heads?"),
        (GRAPH + MODEL.replace("= 8", "= 5") + CLUSTER + TRAIN, "model.num_heads must divide width = 64 (one of 1, 2,"),
        (GRAPH + MODEL.replace("= 64", "= 64.0") + CLUSTER + TRAIN, "model.width must be a whole number, got 64.0"),
        (GRAPH + MODEL + CLUSTER + "num_hosts = true\n" + TRAIN, "cluster.num_hosts must be a whole number, got true"),
        (
            GRAPH + MODEL + CLUSTER + 'num_hosts = "2 GB"\n' + TRAIN,
            'cluster.num_hosts must be a whole number without quotes or unit, got "2 GB"',
        ),
        (
            GRAPH + MODEL + CLUSTER + "device = {memory_bytes = 80}\n" + TRAIN,
            'cluster.device.memory_bytes must be a text with a unit, such as "141 GiB", got 80; if it counts bytes, '
            'write "80 B"',
        ),
        (
            GRAPH + MODEL + CLUSTER + 'host_link = {bandwidth_bytes_per_second = "400 Gbit"}\n' + TRAIN,
            "cluster.host_link.bandwidth_bytes_per_second must be a number and one of B/s,",
        ),
        (GRAPH + MODEL + CLUSTER + "host_link = 3\n" + TRAIN, "cluster.host_link must be a table, got 3"),
        (
            GRAPH + MODEL + CLUSTER + 'nme = "x"\n' + TRAIN,
            "cluster.nme is unknown; did you mean name?",
        ),
        (
            GRAPH + MODEL + '[cluster]\nname = "h200"\n' + TRAIN,
            f"cluster.name must be one of {', '.join([*sorted(BUILT_IN_CLUSTERS), 'local'])}, "
            'got "h200"; did you mean h200x8?',
        ),
        (
            GRAPH + MODEL + '[cluster]\nname = "local"\nnum_hosts = 2\n' + TRAIN,
            'cluster.name = "local" is the machine as it is and takes no other keys, got num_hosts; name another',
        ),
        (
            GRAPH + MODEL + CLUSTER + 'file = "c.toml"\n' + TRAIN,
            'cluster.file must be a text and exclude cluster.name, got "c.toml" and "h200x8"',
        ),
        (
            GRAPH + MODEL + "[cluster]\nfile = 3\n" + TRAIN,
            "cluster.file must be a text and exclude cluster.name, got 3",
        ),
        ("cluster = 'h200x8'\n" + GRAPH + MODEL + TRAIN, 'cluster must be a table, got "h200x8"'),
        (
            GRAPH + "normalize_features = 'rows'\n" + MODEL + CLUSTER + TRAIN,
            'graph.normalize_features must be one of none, row, standard, got "rows"; did you mean row?',
        ),
        ("[graph]\ngenerator = 'rmat'\n" + MODEL + CLUSTER + TRAIN, "graph.num_nodes is missing"),
        (
            GRAPH + MODEL + CLUSTER + TRAIN + "[search]\nexchanges = ['halo', 'none']\n",
            "search.exchanges must not hold none: a single rank has nothing to exchange",
        ),
        (GRAPH + MODEL + CLUSTER + TRAIN + "[search]\nnum_ranks = 4\n", "search.num_ranks must be a list, got 4"),
        (
            GRAPH + MODEL + CLUSTER + TRAIN + "[search]\ngradient_bucket_bytes = ['5 MiB', 1048576]\n",
            'search.gradient_bucket_bytes[1] must be a text with a unit, such as "141 GiB", got 1048576',
        ),
        (
            GRAPH + MODEL + CLUSTER + TRAIN + "[search]\ngradient_bucket_bytes = '5 MiB'\n",
            'search.gradient_bucket_bytes must be a list, got "5 MiB"',
        ),
        (
            GRAPH + MODEL + CLUSTER + TRAIN + "[search]\ngradient_compressions = [{kind = 'top_k'}]\n",
            "search.gradient_compressions[0].kept_ratio must be > 0 and <= 1 for top_k, got 0.0",
        ),
        (
            GRAPH + MODEL + CLUSTER + TRAIN + "seed = 1979-05-27\n",
            "train.seed must be a whole number, got datetime.date(",
        ),
        (GRAPH + "[model\n", "is not TOML: Expected ']' at the end of a table declaration (at line 3, column 7)"),
    ],
)
def test_a_wrong_run_is_refused_by_file_and_key(tmp_path, text, message):
    assert refusal(tmp_path, text).startswith(message)


def test_a_wrong_cluster_file_is_named_itself(tmp_path):
    written(tmp_path, cluster_toml(BUILT_IN_CLUSTERS["h200x8"]).replace('"49 GB/s"', "49"), "c.toml")
    run = written(tmp_path, GRAPH + MODEL + '[cluster]\nfile = "c.toml"\n' + TRAIN)
    with pytest.raises(SpecError, match=r"c\.toml: host_link\.bandwidth_bytes_per_second must be a text with a unit"):
        read_run(run)


def test_the_machine_at_hand_is_no_cluster_file(tmp_path):
    path = written(tmp_path, 'name = "local"\n', "c.toml")
    with pytest.raises(SpecError, match=r'c\.toml: name = "local" describes no cluster; write it in \[cluster\]'):
        read_cluster(path)


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(SpecError, match=r"none\.toml: cannot be read: No such file or directory"):
        read_run(tmp_path / "none.toml")
    with pytest.raises(SpecError, match="cannot be read: Is a directory"):
        read_run(tmp_path)
    (tmp_path / "latin.toml").write_bytes("name = 'Zürich'".encode("latin-1"))
    with pytest.raises(SpecError, match=r"latin\.toml: is not text in UTF-8: invalid start byte at byte 9"):
        read_run(tmp_path / "latin.toml")
    run = written(tmp_path, GRAPH + MODEL + '[cluster]\nfile = "\\u0000"\n' + TRAIN)
    with pytest.raises(SpecError, match="cannot be read: embedded null byte"):
        read_run(run)


# --- plan.json and calibration.json.


@same_folder
@given(manifest=checkpoint_manifests)
def test_the_manifest_of_a_checkpoint_is_read_back(tmp_path, manifest):
    write_manifest(tmp_path / "manifest.json", manifest)
    assert read_manifest(tmp_path / "manifest.json") == manifest


@given(plan_file=plan_files)
@same_folder
def test_a_plan_comes_back_equal(tmp_path, plan_file):
    write_plan(tmp_path / "plan.json", plan_file)
    assert read_plan(tmp_path / "plan.json") == plan_file


@given(plan_file=plan_files)
@same_folder
def test_a_plan_from_before_there_were_orders_has_the_natural_one_and_an_unknown_cache(tmp_path, plan_file):
    path = tmp_path / "plan.json"
    content = to_plain(plan_file)
    del content["orders"], content["plan"]["order"], content["cluster"]["device"]["cache_bytes"]
    path.write_text(document_text("plan", content))
    found = read_plan(path)
    assert found.plan == replace(plan_file.plan, order=OrderSpec())
    assert found.orders == ()
    assert found.cluster.device == replace(plan_file.cluster.device, cache_bytes=0)


@given(comparison=fanout_comparisons)
@same_folder
def test_a_comparison_of_fan_outs_comes_back_equal(tmp_path, comparison):
    write_fanout(tmp_path / "fanout.json", comparison)
    assert read_fanout(tmp_path / "fanout.json") == comparison


@given(calibration=calibrations)
@same_folder
def test_a_calibration_comes_back_equal_and_with_its_hash(tmp_path, calibration):
    path = tmp_path / "calibration.json"
    write_calibration(path, calibration)
    assert read_calibration(path) == calibration
    assert json.loads(path.read_text())["content_sha256"] == content_sha256(calibration)
    assert content_sha256(read_calibration(path)) == content_sha256(calibration)


@given(plan_file=plan_files, data=st.data())
@same_folder
def test_a_plan_cut_short_anywhere_is_refused(tmp_path, plan_file, data):
    path = tmp_path / "plan.json"
    write_plan(path, plan_file)
    text = path.read_text()
    path.write_text(text[: data.draw(st.integers(0, len(text) - 3))])
    with pytest.raises(SpecError, match=r"is not JSON: .*; the file was cut short, or is none of ours"):
        read_plan(path)


@given(calibration=calibrations)
@same_folder
def test_a_calibration_changed_by_hand_is_refused(tmp_path, calibration):
    path = tmp_path / "calibration.json"
    write_calibration(path, calibration)
    document = json.loads(path.read_text())
    document["content"]["task_overhead_seconds"] += 1
    path.write_text(json.dumps(document))
    with pytest.raises(SpecError, match="was changed after it was written; write it again with graphpilot calibrate"):
        read_calibration(path)


@given(calibration=calibrations)
@same_folder
def test_a_calibration_is_no_plan(tmp_path, calibration):
    write_calibration(tmp_path / "c.json", calibration)
    with pytest.raises(SpecError, match=r'c\.json: format must be "graphpilot plan", got "graphpilot calibration"'):
        read_plan(tmp_path / "c.json")
    with pytest.raises(SpecError, match=r'c\.json: format must be "graphpilot trace", got None'):
        read_trace(tmp_path / "c.json")


# --- Traces.


@given(trace=traces)
@same_folder
def test_a_trace_comes_back_equal(tmp_path, trace):
    write_trace(tmp_path / "trace.json", trace)
    assert read_trace(tmp_path / "trace.json") == trace


@given(predicted=traces, measured=traces)
@same_folder
def test_two_traces_of_one_file_come_back_by_name(tmp_path, predicted, measured):
    path = tmp_path / "both.json"
    write_traces(path, {"predicted": predicted, "measured": measured})
    assert read_traces(path) == {"predicted": predicted, "measured": measured}
    with pytest.raises(SpecError, match=r"both\.json: must hold one trace, got 2 \(predicted, measured\)"):
        read_trace(path)


@given(trace=traces)
@same_folder
def test_a_trace_file_is_what_perfetto_reads(tmp_path, trace):
    write_trace(tmp_path / "trace.json", trace)
    document = json.loads((tmp_path / "trace.json").read_text())
    assert document["displayTimeUnit"] == "ms"
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["ts"] >= 0
            assert event["dur"] >= 0
    names = [e["args"]["name"] for e in document["traceEvents"] if e["name"] == "process_name" and e["ph"] == "M"]
    assert names == [f"{trace.origin} rank {rank}" for rank in range(trace.num_ranks)]


@pytest.mark.parametrize(
    "text",
    ["[]", "{}", '{"traceEvents": []}', '{"schemaVersion": 1, "traceEvents": [{"ph": "X", "name": "aten::mm"}]}'],
)
def test_a_trace_of_another_program_is_refused(tmp_path, text):
    path = written(tmp_path, text, "kineto.json")
    with pytest.raises(SpecError, match=r'kineto\.json: format must be "graphpilot trace", got None; write it again'):
        read_trace(path)


def test_a_trace_without_events_or_headers_is_refused(tmp_path):
    head = {"format": "graphpilot trace", "schema_version": 4}
    path = written(tmp_path, json.dumps({"graphpilot": head, "traceEvents": 3}), "t.json")
    with pytest.raises(SpecError, match=r"t\.json: traces and traceEvents must be lists, got None and 3"):
        read_trace(path)
    newer = {**head, "schema_version": 5}
    with pytest.raises(SpecError, match=r"t\.json: schema_version must be 4, got 5; update graphpilot"):
        read_trace(written(tmp_path, json.dumps({"graphpilot": newer}), "t.json"))


def test_twenty_thousand_spans_are_written_and_read_in_seconds(tmp_path):
    span = Span(
        rank=0,
        step=0,
        stream=Stream.COMPUTE,
        name="layer0.linear",
        kind=TaskKind.LINEAR,
        phase=Phase.FORWARD,
        shape=(1000, 64, 64),
        start_seconds=0.0,
        duration_seconds=1e-5,
    )
    spans = tuple(replace(span, rank=index % 8, start_seconds=index * 1e-5 / 3) for index in range(20_000))
    trace = Trace(
        origin=TraceOrigin.SIMULATED,
        num_ranks=8,
        spans=spans,
        step_seconds=(0.4,),
        traced_step_seconds=(0.4,),
        peak_memory_bytes=(0,) * 8,
    )
    began = time.process_time()
    write_trace(tmp_path / "trace.json", trace)
    back = read_trace(tmp_path / "trace.json")
    assert time.process_time() - began < 5  # half a second on an idle core
    assert back == trace


# --- Writing.


def test_writing_makes_missing_folders_and_leaves_nothing_beside_the_file(tmp_path):
    path = tmp_path / "a/b/out.txt"
    write_text_atomic(path, "first")
    write_text_atomic(path, "second é")
    assert path.read_text(encoding="utf-8") == "second é"
    assert list(path.parent.iterdir()) == [path]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_write_that_fails_leaves_the_old_content(tmp_path, monkeypatch):
    path = tmp_path / "out.txt"
    write_text_atomic(path, "old")

    def full(_descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SpecError, match=r"out\.txt: cannot be written: No space left on device"):
        write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_the_old_content_or_the_new_while_a_file_is_written_over(tmp_path):
    path = tmp_path / "out.txt"
    contents = {letter * 200_000 for letter in "ab"}
    write_text_atomic(path, "a" * 200_000)
    stop = threading.Event()

    def write():
        for content in itertools.cycle(sorted(contents)):
            if stop.is_set():
                return
            write_text_atomic(path, content)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        seen = {path.read_text() for _ in range(300)}
    finally:
        stop.set()
        writer.join()
    assert seen <= contents


def test_a_folder_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be written: Is a directory"):
        write_text_atomic(tmp_path, "text")
    with pytest.raises(SpecError, match="cannot be written: Not a directory"):
        write_text_atomic(tmp_path / "file/inner", "text")


def test_a_link_is_followed_and_a_pipe_is_written_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "target")
    write_text_atomic(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").read_text() == "text"
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    write_text_atomic(tmp_path / "pipe", "text")
    assert os.read(descriptor, 100) == b"text"
    os.close(descriptor)
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)


def test_a_device_named_in_full_needs_no_built_in_name(tmp_path):
    cluster = ClusterSpec(
        name="local",
        num_hosts=1,
        devices_per_host=1,
        device=H200,
        device_link=LinkSpec(latency_seconds=0, bandwidth_bytes_per_second=1e9),
        host_link=LinkSpec(latency_seconds=0, bandwidth_bytes_per_second=1e9),
    )
    write_cluster(tmp_path / "c.toml", cluster)
    assert read_cluster(tmp_path / "c.toml") == cluster


def test_how_gradients_may_be_reduced_is_written_with_units(tmp_path):
    search = """[search]
gradient_bucket_bytes = ["512 KiB", "25 MiB"]
overlap_gradients = [true]
gradient_compressions = [{kind = "none"}, {kind = "power_sgd", matrix_rank = 4}]
"""
    run = read_run(written(tmp_path, GRAPH + MODEL + CLUSTER + TRAIN + search, "run.toml"))
    assert run.search == SearchSpec(
        gradient_bucket_bytes=(512 * 1024, 25 * 1024**2),
        overlap_gradients=(True,),
        gradient_compressions=(
            GradientCompression(),
            GradientCompression(kind=CompressionKind.POWER_SGD, matrix_rank=4),
        ),
    )
