"""Readers of traces: every sample is parsed or refused in a sentence, and every event is kept or accounted for."""

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from simulator.errors import SpecError
from simulator.readers.chakra import host_trace
from simulator.readers.kineto_names import call_kind, collective_operation, element_bytes, kernel_kind, operator_kind
from simulator.readers.traces import load_json, read_recordings
from simulator.specs.files import write_trace
from simulator.specs.program import Phase, Stream, TaskKind
from simulator.specs.recording import CallKind, KernelKind, Recording
from simulator.specs.trace import Span, Trace, TraceOrigin
from tests.conftest import SHARED
from tests.made_kineto import MadeTrace

# Each file with what its refusal says; None where it is read.
KINETO = {
    "a100_80gb_16ranks_a2a_rs_ag_rank0.json.gz": None,
    "a100_alexnet_single_gpu.json.gz": None,
    "a100_ddp_2ranks_nccl_meta_rank0.json.gz": None,
    "gloo_300ranks_cpu_only_rank34.json.gz": None,
    "linear_kineto.json.gz": None,
    "memory_timeline.raw.json.gz": "is a memory timeline",
    "mi250_single_gpu.json.gz": None,
    "no_distributed_info.json.gz": "names no rank",
    "sampled_128ranks_rank0.json.gz": None,
    **{f"dlrm_8ranks/rank{rank}.json.gz": None for rank in range(8)},
}
FILES = {f"samples/kineto/{name}": refusal for name, refusal in KINETO.items()} | {
    "measured/h200x2/kineto_ddp_rank0.json.gz": None,
    "samples/chakra_host_et/linear_et.json.gz": "a host trace has no times of the device",
    "samples/chakra_host_et/resnet_2gpu_et.json.gz": "a host trace has no times of the device",
    **{
        f"samples/chakra_host_et/dlrm_8ranks/rank{rank}.json.gz": "a host trace has no times of the device"
        for rank in range(8)
    },
    "samples/chakra_et/chakra.0.et.gz": "is a converted execution trace (Chakra protobuf)",
    "samples/chakra_et/small_chakra.0.json.gz": "is a converted execution trace (Chakra JSON)",
    "samples/astra_sim/HGX-H100-validated.network.yml": "describes a network of ASTRA-sim",
    "samples/astra_sim/HGX-H100-validated.system.json": "describes a system of ASTRA-sim",
    "samples/astra_sim/dgx_v100_8gpu.system.json": "describes a system of ASTRA-sim",
    **{
        f"samples/astra_sim/all_reduce_4npus_1MB.{rank}.et": "is a converted execution trace (Chakra protobuf)"
        for rank in range(4)
    },
}


@cache
def recording_of(path: Path) -> Recording:
    """Return the recording of a file that is large to parse."""
    (recording,) = read_recordings([path])
    return recording


@pytest.mark.parametrize("name", FILES)
def test_every_sample_is_parsed_or_refused_with_one_sentence(name, shared_samples):
    path = shared_samples.parent / name
    refusal = FILES[name]
    if refusal is None:
        assert recording_of(path).num_kept > 0
        return
    with pytest.raises(SpecError) as caught:
        read_recordings([path])
    message = str(caught.value)
    assert message.startswith(str(path))
    assert refusal in message
    assert "\n" not in message


def test_no_sample_of_a_trace_is_forgotten(shared_samples):
    folders = ("kineto", "chakra_host_et", "chakra_et", "astra_sim")
    found = {path for folder in folders for path in (shared_samples / folder).rglob("*") if path.is_file()}
    assert found == {SHARED / name for name in FILES if name.startswith("samples/")}


@pytest.mark.parametrize("name", [name for name, refusal in FILES.items() if refusal is None])
def test_p11_operation_counts_are_conserved_and_what_was_dropped_is_reported(name, shared_samples):
    path = shared_samples.parent / name
    raw = Counter(
        event.get("cat", "")
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        if event.get("ph") == "X"
    )
    recording = recording_of(path)
    assert dict(recording.read_counts) == raw
    assert recording.num_kept + recording.num_dropped == raw.total()
    assert all(reason for _, reason, _ in recording.dropped)
    # Kernels, copies and fills are never dropped; gloo's ranges become operations on top.
    kept = Counter(
        operation.kind is KernelKind.COLLECTIVE and operation.correlation is None for operation in recording.operations
    )
    assert kept[False] == raw["kernel"] + raw["gpu_memcpy"] + raw["gpu_memset"]


def test_p11_plain_kineto_json_is_enough_and_a_host_trace_adds_shapes(shared_samples):
    plain = recording_of(shared_samples / "kineto/linear_kineto.json.gz")
    host = shared_samples / "chakra_host_et/linear_et.json.gz"
    (both,) = read_recordings([shared_samples / "kineto/linear_kineto.json.gz", host])
    assert not any(any(operator.shapes) for operator in plain.operators)
    products = [one for one in both.operators if one.name == "aten::addmm" and any(one.shapes)]
    assert len(products) == 39 * 21  # linear layers of all steps but the first, which has no gradients to zero
    product = products[0]
    node = next(n for n in load_json(host)["nodes"] if n["name"] == "aten::addmm")
    assert product.shapes[1] == tuple(node["input_shapes"][1])
    assert "928 of 928 operators joined by the order of names, 3 frames" in both.notes[-1]


def test_host_traces_of_eight_ranks_join_their_kineto_traces_by_rank(shared_samples):
    folders = [shared_samples / "kineto/dlrm_8ranks", shared_samples / "chakra_host_et/dlrm_8ranks"]
    recordings = read_recordings(folders)
    assert [recording.rank for recording in recordings] == list(range(8))
    for recording in recordings:
        joined, total = (int(number.replace(",", "")) for number in recording.notes[-1].split(": ")[1].split()[:3:2])
        assert joined >= 0.997 * total == 0.997 * 1672


def test_a_host_trace_of_another_run_is_refused(shared_samples):
    with pytest.raises(SpecError, match="belongs to another run"):
        read_recordings(
            [shared_samples / "kineto/mi250_single_gpu.json.gz", shared_samples / "chakra_host_et/linear_et.json.gz"]
        )


def test_newer_host_traces_are_joined_by_record_function_id(tmp_path):
    trace = MadeTrace()
    trace.operator("aten::mm", 0, 10, **{"Record function id": 5})
    trace.kernel("gemm", launch=2, ts=8, dur=20)
    node = {
        "id": 7,
        "name": "aten::mm",
        "ctrl_deps": 1,
        "inputs": {"values": [], "shapes": [[64, 32], [32, 16]], "types": ["Tensor(float)", "Tensor(float)"]},
        "outputs": {},
        "attrs": [{"name": "rf_id", "type": "uint64", "value": 5}, {"name": "tid", "type": "uint64", "value": 1}],
    }
    host = tmp_path / "host_et.json"
    host.write_text(json.dumps({"schema": "1.1.1-chakra.0.0.4", "nodes": [node]}))
    (recording,) = read_recordings([trace.write(tmp_path / "kineto.json"), host])
    assert recording.operators[0].shapes == ((64, 32), (32, 16))
    assert "1 of 1 operators joined by record ids" in recording.notes[-1]


def test_schema_variants_of_host_traces_are_told_apart(shared_samples):
    old = host_trace(load_json(path := shared_samples / "chakra_host_et/linear_et.json.gz"), path)
    new = host_trace(load_json(path := shared_samples / "chakra_host_et/resnet_2gpu_et.json.gz"), path)
    assert (old.schema, len(old.nodes)) == ("1.0.1", 931 - old.num_frames)
    assert (new.schema, len(new.nodes)) == ("1.1.0-chakra.0.0.4", 14_392 - new.num_frames)
    with pytest.raises(SpecError, match=r'schema must be 1.0.x, 1.1.x or 1.1.x-chakra.y, got "2.0"'):
        host_trace({"schema": "2.0", "nodes": []}, Path("x.json"))


def test_sizes_and_groups_of_collectives_are_read_where_the_file_has_them(shared_samples):
    recording = recording_of(shared_samples / "kineto/a100_ddp_2ranks_nccl_meta_rank0.json.gz")
    messages = [operation.message for operation in recording.operations if operation.message]
    counts = Counter(message.operation for message in messages)
    assert counts == {"all_reduce": 15, "broadcast": 6}
    # Gradient buckets of the README beside the samples, in MB.
    sizes = {round((message.num_bytes or 0) / 1e6, 1) for message in messages if message.operation == "all_reduce"}
    assert sizes == {8.2, 9.7, 26.3, 26.6, 31.5}
    assert {message.group for message in messages} == {(0, 1)}


def test_sizes_come_from_the_operators_around_a_launch_where_the_kernel_has_none(shared_samples):
    recording = recording_of(shared_samples / "kineto/a100_80gb_16ranks_a2a_rs_ag_rank0.json.gz")
    messages = [operation.message for operation in recording.operations if operation.message]
    scattered = {message.num_bytes for message in messages if message.operation == "reduce_scatter"}
    assert 65536 * 384 * 4 in scattered  # [65536, 384] of float: c10d::_reduce_scatter_base_
    assert Counter(message.operation for message in messages)["all_to_all"] == 45


def test_a_run_on_cpus_alone_and_one_on_amd_are_read(shared_samples):
    gloo = recording_of(shared_samples / "kineto/gloo_300ranks_cpu_only_rank34.json.gz")
    assert (gloo.rank, gloo.num_ranks, gloo.device_name) == (34, 300, "")
    assert {one.message.num_bytes for one in gloo.operations if one.message} == {4 * 321_271, 4 * 2_082_411}
    amd = recording_of(shared_samples / "kineto/mi250_single_gpu.json.gz")
    assert amd.device_name == "AMD Radeon Graphics"
    assert Counter(call.kind for call in amd.calls)[CallKind.LAUNCH] == 12 + 2 + 2  # hip...Launch..., hipMemcpy...
    assert Counter(operation.kind for operation in amd.operations)[KernelKind.MATRIX_PRODUCT] == 2  # Tensile's


def test_a_rank_comes_from_the_header_the_file_name_or_the_flag(tmp_path):
    named = MadeTrace(rank=None)
    named.collective(launch=0, ts=9, dur=5)
    assert read_recordings([named.write(tmp_path / "trace_rank-3.json.gz")])[0].rank == 3
    path = named.write(tmp_path / "trace.json")
    with pytest.raises(SpecError, match="names no rank, neither in distributedInfo nor in its file name; say it with"):
        read_recordings([path])
    assert read_recordings([path], ranks=[5])[0].rank == 5
    alone = MadeTrace(rank=None)
    alone.kernel("gemm", launch=0, ts=9, dur=5)
    assert read_recordings([alone.write(tmp_path / "alone.json")])[0].rank == 0
    with pytest.raises(SpecError, match="both of rank 3"):
        read_recordings([tmp_path / "trace_rank-3.json.gz", named.write(tmp_path / "rank3.json")])


def test_our_own_measured_trace_is_read(tmp_path):
    span = Span(
        rank=0,
        step=4,
        stream=Stream.COMMUNICATION,
        name="layer0.exchange",
        kind=TaskKind.ALL_TO_ALL,
        phase=Phase.FORWARD,
        shape=(0, 4096),
        start_seconds=1e-3,
        duration_seconds=3e-3,
        waiting_seconds=1e-3,
        group=(0, 1),
    )
    trace = Trace(
        origin=TraceOrigin.MEASURED,
        num_ranks=1,
        spans=(span,),
        step_seconds=(5e-3,),
        traced_step_seconds=(5e-3,),
        peak_memory_bytes=(1,),
    )
    write_trace(tmp_path / "measured.json", trace)
    (recording,) = read_recordings([tmp_path / "measured.json"])
    (operation,) = recording.operations
    assert operation.message is not None
    assert operation.message.num_bytes == 4096
    assert operation.waiting_seconds == 1e-3
    assert recording.num_kept == 2  # the span and its step


BROKEN = {
    "nothing": (b"", "is empty"),
    "text": (b"hello", "is not JSON"),
    "cut": (b'{"traceEvents": [{"ph": "X", ', "is not JSON, or breaks off"),
    "gzip": (gzip.compress(b"{}" * 99)[:-9], "is gzip that breaks off or is damaged"),
    "other": (b'{"a": 1}', "has no traceEvents"),
    "no events": (b'{"traceEvents": []}', "must hold complete events"),
    "only names": (b'{"traceEvents": [{"ph": "M", "name": "x"}]}', "must hold complete events"),
    "a number": (b'{"traceEvents": [7]}', r"traceEvents\[0\] must be a table, got 7"),
    "no ts": (
        b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "a", "dur": 1}]}',
        "must have a name, ts and dur",
    ),
    "text ts": (b'{"traceEvents": [{"ph":"X","cat":"cpu_op","name":"a","ts":"1 ms"}]}', "must have a name, ts and dur"),
    "nan": (b'{"traceEvents": [{"ph":"X","cat":"cpu_op","name":"a","ts":NaN}]}', "must have a name, ts and dur"),
    "list": (b"[1, 2]", "has no traceEvents"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_refused_with_its_name_and_what_to_do(name, tmp_path):
    content, wanted = BROKEN[name]
    path = tmp_path / "trace.json"
    path.write_bytes(content)
    with pytest.raises(SpecError, match=wanted) as caught:
        read_recordings([path])
    assert str(caught.value).startswith(str(path))
    assert ";" in str(caught.value)


def test_missing_files_and_empty_folders_are_refused(tmp_path):
    with pytest.raises(SpecError, match=r"none.json: cannot be read: No such file"):
        read_recordings([tmp_path / "none.json"])
    with pytest.raises(SpecError, match=r"must hold files that end in \.json"):
        read_recordings([tmp_path])
    with pytest.raises(SpecError, match="at least one trace"):
        read_recordings([])


def test_names_tell_kinds():
    # Names seen in the samples.
    assert kernel_kind("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8") is KernelKind.MATRIX_PRODUCT
    assert kernel_kind("Cijk_Alik_Bljk_SB_Bias_AS_SAV_UserArgs_MT64x16x32") is KernelKind.MATRIX_PRODUCT
    assert kernel_kind("void cudnn::bn_bw_1C11_kernel_new<float, float>") is KernelKind.NORMALISATION
    assert kernel_kind("ncclKernel_AllReduce_RING_LL_Sum_float(ncclDevComm*)") is KernelKind.COLLECTIVE
    lambdas = "void at::native::vectorized_elementwise_kernel<4, at::native::addcmul(...)::{lambda()#2}>"
    assert kernel_kind(lambdas) is KernelKind.ELEMENTWISE
    assert kernel_kind("backward_sources_kernel", "graphpilot::edge_attention_backward") is KernelKind.ATTENTION
    assert operator_kind("aten::gelu") is KernelKind.ELEMENTWISE
    assert call_kind("hipDeviceSynchronize") is CallKind.DEVICE_SYNC
    assert call_kind("cuLaunchKernelEx") is CallKind.LAUNCH
    assert call_kind("cudaEventRecordWithFlags") is CallKind.RECORD_EVENT
    assert call_kind("cudaEventQuery") is CallKind.OTHER
    assert collective_operation("nccl:_all_gather_base") == "all_gather"
    assert collective_operation("ncclKernel_ReduceScatter_RING_SIMPLE") == "reduce_scatter"
    assert collective_operation("record_param_comms") is None
    assert [element_bytes(name) for name in ("Float", "c10::BFloat16", "long int", "wibble")] == [4, 2, 8, None]
