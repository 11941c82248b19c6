"""What changes do to a replay: by hand, and laws that hold for any run."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import SpecError
from simulator.readers.kineto import kineto_recording
from simulator.readers.traces import read_recordings
from simulator.replay.apply import apply_change
from simulator.replay.changes import Change, Overlap, parse_change
from simulator.replay.devices import device_called
from simulator.replay.messages import message_seconds
from simulator.replay.run import Run, rebuild, replay
from simulator.replay.scaling import Setting, scaled_seconds, work_of
from simulator.replay.whatif import usual_changes, what_if
from simulator.specs.cluster import BUILT_IN_CLUSTERS, NVLINK4
from simulator.specs.recording import DeviceOperation, KernelKind, Message, Operator
from simulator.specs.units import GB, MIB, Dtype
from tests.made_kineto import MadeTrace
from tests.simulator.replay.test_run import US, run_of, two_ranks, waiting_host

H200, H100 = BUILT_IN_CLUSTERS["h200x8"], BUILT_IN_CLUSTERS["h100x8-ndr"]


def seconds_with(run: Run, change: str) -> float:
    return replay(apply_change(run, parse_change(change), H200).run).step_seconds


def ddp() -> MadeTrace:
    """Backward kernels, an all-reduce beside the last of them, an optimizer that waits for both."""
    trace = MadeTrace(num_ranks=2)
    trace.step(0, 0, 100)
    trace.kernel("gemm_0", launch=0, ts=6, dur=100)
    trace.call("cudaStreamWaitEvent", 7, 1)
    trace.collective(launch=10, ts=107, dur=80)
    trace.kernel("gemm_1", launch=20, ts=107, dur=100)
    trace.call("cudaStreamWaitEvent", 27, 1)
    trace.kernel("multi_tensor_apply_kernel", launch=30, ts=208, dur=20)
    return trace


def test_without_overlap_what_was_launched_later_waits(tmp_path):
    run = run_of(tmp_path, ddp())
    assert replay(run).step_seconds == pytest.approx(228 * US)
    # gemm_1 starts only at 187: 80 us later; 1 us stays between it and the optimizer.
    assert seconds_with(run, "overlap=off") == pytest.approx(308 * US)


def test_with_full_overlap_nothing_waits_for_a_collective(tmp_path):
    trace = ddp()
    slow = next(event for event in trace.events if "AllReduce" in event["name"])
    slow["dur"] = 150
    last = trace.events[-1]
    last["ts"] = 258
    run = run_of(tmp_path, trace)
    assert replay(run).step_seconds == pytest.approx(278 * US)
    # The optimizer follows gemm_1, 1 us later; the collective itself ends last.
    assert seconds_with(run, "overlap=on") == pytest.approx(257 * US)


def test_an_all_reduce_of_gradients_is_put_before_the_optimizer(tmp_path):
    trace = MadeTrace()
    trace.step(0, 0, 60)
    trace.kernel("gemm", launch=0, ts=6, dur=100)
    trace.kernel("multi_tensor_apply_kernel", launch=10, ts=107, dur=20)
    run = run_of(tmp_path, trace)
    # Two H200s took 139 us for 33.5 MB (../shared/measured/h200x2/comm.csv), here from 106 us on.
    assert seconds_with(run, "all_reduce=33.5 MB, ranks=2") == pytest.approx((106 + 139 + 20) * US, abs=5 * US)
    with pytest.raises(SpecError, match="has none: record whole steps"):
        seconds_with(run_of(tmp_path, waiting_host()), "all_reduce=33 MB, ranks=2")


def test_without_its_straggler_a_run_takes_what_the_median_rank_takes(tmp_path):
    run = run_of(tmp_path, *two_ranks())
    found = what_if(run, [parse_change("straggler=none")])
    assert found.straggler_rank == 1
    # Rank 1 takes 90 us to the first collective, rank 0 50: with two ranks the median is 70, so 20 us are saved.
    assert found.outcomes[0].saved_seconds == pytest.approx(20 * US, abs=2 * US)


def test_collectives_follow_the_ratio_of_two_networks(tmp_path):
    run = run_of(tmp_path, ddp())
    half = replace(H200, device_link=replace(NVLINK4, bandwidth_bytes_per_second=165 * GB))
    large, message = (
        Message(operation="all_reduce", num_bytes=size, num_ranks=2, group=(0, 1)) for size in (2**30, 4_000_000)
    )
    # Two H200s took 3.25 ms for 1 GiB (../shared/measured/h200x2/comm.csv); over half of the links it is twice that.
    assert message_seconds(large, H200, 2) == pytest.approx(3.25e-3, rel=0.06)
    assert message_seconds(large, half, 2) == pytest.approx(2 * message_seconds(large, H200, 2), rel=0.02)
    ratio = message_seconds(message, half, 2) / message_seconds(message, H200, 2)
    assert 1.3 < ratio < 2  # a smaller one also takes its start
    changed = apply_change(run, parse_change("device_link=165 GB/s"), H200).run
    (piece,) = (one for one in changed.ranks[0].pieces if one.operation and one.operation.message)
    assert piece.duration_seconds == pytest.approx(80 * US * ratio)
    # On as many ranks as two hosts hold, the slower link between hosts counts.
    assert message_seconds(message, H100, 16) > message_seconds(message, H100, 8) > message_seconds(message, H100, 2)
    alone = apply_change(run, parse_change("ranks=1"), H200).run
    (piece,) = (one for one in alone.ranks[0].pieces if one.operation and one.operation.message)
    assert piece.duration_seconds == 0


def test_a_message_between_two_ranks_takes_the_way_between_them():
    near, far = (
        Message(operation="send_recv", num_bytes=512 * MIB, num_ranks=2, group=group) for group in ((0, 1), (0, 8))
    )
    # H200s of ../shared/measured/h200x2/comm.csv moved 512 MiB one way in 1.46 ms; an NDR card carries 49 GB/s.
    assert message_seconds(near, H200, 2) == pytest.approx(1.46e-3, rel=0.25)
    assert 1 < message_seconds(far, H100, 2) / (512 * MIB / (49 * GB)) < 1.35


def test_a_collective_costs_more_over_a_narrower_topology():
    message = Message(operation="all_gather", num_bytes=64 * MIB, num_ranks=16, group=tuple(range(16)))
    seconds = [
        message_seconds(message, BUILT_IN_CLUSTERS[name], 16)
        for name in ("h100x8-ndr", "h100x8-roce", "h100x8-ethernet")
    ]
    assert seconds == sorted(seconds)
    assert seconds[2] > 5 * seconds[0]


def test_a_kernel_follows_its_roofline_on_another_device():
    product = DeviceOperation(
        name="sgemm", kind=KernelKind.MATRIX_PRODUCT, stream="s", start_seconds=0, duration_seconds=1e-3
    )
    operator = Operator(
        name="aten::mm",
        thread="t",
        start_seconds=0,
        duration_seconds=0,
        shapes=((4096, 4096), (4096, 4096)),
        dtypes=("float", "float"),
    )
    work = work_of(product.kind, operator, Setting())
    assert work is not None
    assert work.flops == 2 * 4096**3
    assert work.num_bytes == 3 * 4 * 4096**2
    a100, h200 = device_called("A100-SXM4-80GB"), device_called("H200")
    found = scaled_seconds(product, operator, 1e-3, old=Setting(device=a100), new=Setting(device=h200))
    # Products at the peaks in fp32, and 201 MB at the rates of memory: 7.048 and 0.0987 ms, 2.051 and 0.0419 ms.
    ratio = (137.439e9 / 67e12 + 201.327e6 / 4.8e12) / (137.439e9 / 19.5e12 + 201.327e6 / 2.039e12)
    assert found == pytest.approx(1.5e-6 + (1e-3 - 1.5e-6) * ratio, rel=1e-5)
    adding = replace(product, kind=KernelKind.ELEMENTWISE, name="add")
    found = scaled_seconds(adding, operator, 1e-3, old=Setting(device=a100), new=Setting(device=h200))
    assert found == pytest.approx(1.5e-6 + (1e-3 - 1.5e-6) * 2039 / 4800)  # rates of memory


def test_sizes_and_precision_follow_the_shapes():
    operator = Operator(
        name="aten::mm", thread="t", start_seconds=0, duration_seconds=0, shapes=((1000, 128), (128, 128)),
        dtypes=("float", "float"),
    )  # fmt: skip
    product = DeviceOperation(
        name="gemm", kind=KernelKind.MATRIX_PRODUCT, stream="s", start_seconds=0, duration_seconds=1e-3
    )
    double = Setting(sizes=((128, 256),))
    found = scaled_seconds(product, operator, 1e-3, old=Setting(), new=double)
    assert found == pytest.approx(1.5e-6 + 4 * (1e-3 - 1.5e-6))  # both widths double
    norm = replace(product, kind=KernelKind.NORMALISATION)
    found = scaled_seconds(norm, operator, 1e-3, old=Setting(), new=Setting(dtype=Dtype.BFLOAT16))
    assert found == pytest.approx(1.5e-6 + (1e-3 - 1.5e-6) / 2)
    update = replace(product, kind=KernelKind.OPTIMIZER)  # masters stay fp32
    assert scaled_seconds(update, operator, 1e-3, old=Setting(), new=Setting(dtype=Dtype.BFLOAT16)) == 1e-3
    assert scaled_seconds(product, None, 1e-3, old=Setting(), new=double) is None


def test_attention_follows_its_edges_which_operators_may_not_show():
    operator = Operator(
        name="graphpilot::edge_attention", thread="t", start_seconds=0, duration_seconds=0,
        shapes=((1000, 8, 16),) * 3, dtypes=("float",) * 3,
    )  # fmt: skip
    kernel = DeviceOperation(
        name="forward_kernel", kind=KernelKind.ATTENTION, stream="s", start_seconds=0, duration_seconds=1e-3
    )
    rows = 4 * 1000 * 128 * 4  # three read, one written
    old, new = Setting(num_edges=20_000), Setting(num_edges=40_000)
    gathered = 2 * 128 * 4  # a key and a value
    ratio = (rows + 40_000 * gathered) / (rows + 20_000 * gathered)
    found = scaled_seconds(kernel, operator, 1e-3, old=old, new=new)
    assert found == pytest.approx(1.5e-6 + (1e-3 - 1.5e-6) * ratio)


def test_kernels_without_shapes_are_reported(tmp_path):
    changed = apply_change(run_of(tmp_path, waiting_host()), parse_change("size:128=256"))
    assert changed.notes == ("1 of 1 kernels have no shapes and stay as they were; record with record_shapes=True",)


def test_unknown_devices_and_networks_are_asked_for(tmp_path):
    trace = ddp()
    trace.header["deviceProperties"][0]["name"] = "AMD Radeon Graphics"
    run = run_of(tmp_path, trace)
    with pytest.raises(SpecError, match='"AMD Radeon Graphics", which are not known: name its cluster with --cluster'):
        apply_change(run, parse_change("device=H100"))
    with pytest.raises(SpecError, match=r"needs the network on which the run was recorded.* name it with --cluster"):
        apply_change(run, parse_change("ranks=8"))


REFUSED = {
    "device_link=900": "device_link must be a number and one of",  # P14: no unit
    "device_link=900 Gb": "device_link must be a number and one of",
    "host_link=0 GB/s": "host_link must be above 0",
    "all_reduce=100, ranks=2": "all_reduce must be a number and one of",
    "all_reduce=1 MB": "among how many ranks",
    "kernel:gemm=2x": "kernel:KIND must be one of",
    "kernel:attention=2": "must be a factor above 0 such as 2x",
    "host=0x": "must be a factor above 0 such as 2x",
    "overlap=maybe": "overlap must be one of on, off",
    "straggler=1": "straggler must be none",
    "ranks=0": "ranks must be a whole number >= 1",
    "device=H900": "device must be one of",
    "network=nowhere": "a cluster must be one of",
    "netwerk=h200x8": "did you mean network",
    "faster": "must be KEY=VALUE",
    "host=2x, host=3x": "must be given once",
    "size:=4": "size:OLD must be a whole number",
    "precision=fp8": "precision must be one of fp32, bf16",
}


@pytest.mark.parametrize("text", REFUSED)
def test_p14_a_change_that_is_none_is_refused(text):
    with pytest.raises(SpecError, match=REFUSED[text]) as caught:
        parse_change(text)
    assert "--change" in str(caught.value) or "cluster" in str(caught.value) or "device" in str(caught.value)


def test_p14_gigabits_and_gigabytes_are_told_apart():
    assert parse_change("host_link=400 Gb/s").host_link_rate == 50 * GB
    assert parse_change("host_link=400 GB/s").host_link_rate == 400 * GB
    assert parse_change("all_reduce=25 MiB, ranks=2").all_reduce_bytes == 25 * MIB


@st.composite
def made_traces(draw: st.DrawFn) -> MadeTrace:
    """Return a trace of kernels on three streams, with waits, blocking calls and collectives."""
    trace = MadeTrace(num_ranks=2)
    host, free, ended = 0.0, {7: 0.0, 8: 0.0, 20: 0.0}, 0.0
    for _ in range(draw(st.integers(1, 12))):
        host += draw(st.integers(1, 30))
        stream = draw(st.sampled_from(sorted(free)))
        after = 0.0
        if draw(st.booleans()):
            trace.call("cudaStreamWaitEvent", host, 1)
            host += 1
            after = ended
        start = max(host + 6, free[stream], after) + draw(st.integers(0, 3))
        length = draw(st.integers(1, 60))
        if stream == 20:
            trace.collective(launch=host, ts=start, dur=length, num_elements=length * 1000)
        else:
            trace.kernel(
                draw(st.sampled_from(["gemm", "elementwise"])), launch=host, ts=start, dur=length, stream=stream
            )
        host += 5
        free[stream] = start + length
        ended = max(ended, free[stream])
        if draw(st.integers(0, 4)) == 0:
            trace.call("cudaDeviceSynchronize", host, max(ended - host, 0) + 2)
            host = max(ended, host) + 2
    trace.step(0, 0, host + 5)
    return trace


def made_run(trace: MadeTrace) -> Run:
    return rebuild([kineto_recording(trace.document(), Path("rank0.json"))])


@given(trace=made_traces())
def test_any_run_replayed_as_recorded_takes_what_was_recorded(trace):
    run = made_run(trace)
    assert replay(run).step_seconds == pytest.approx(run.recorded_step_seconds, rel=1e-9)


@given(
    trace=made_traces(), factor=st.sampled_from([1.5, 2, 10]), kind=st.sampled_from(["matrix_product", "collective"])
)
def test_faster_parts_never_make_a_step_longer(trace, factor, kind):
    run = made_run(trace)
    as_recorded = replay(run).step_seconds
    assert seconds_with(run, f"kernel:{kind}={factor}x") <= as_recorded * (1 + 1e-9)
    assert seconds_with(run, f"host={factor}x") <= as_recorded * (1 + 1e-9)
    assert seconds_with(run, f"kernel:{kind}={1 / factor:.3f}x") >= as_recorded * (1 - 1e-9)


@given(trace=made_traces())
def test_overlap_only_helps_and_its_absence_only_hurts(trace):
    run = made_run(trace)
    as_recorded = replay(run).step_seconds
    assert seconds_with(run, f"overlap={Overlap.ON}") <= as_recorded * (1 + 1e-9)
    assert seconds_with(run, f"overlap={Overlap.OFF}") >= as_recorded * (1 - 1e-9)


@given(trace=made_traces())
def test_no_change_changes_nothing_and_replays_repeat(trace):
    run = made_run(trace)
    assert apply_change(run, Change(text="nothing")).run == run
    assert replay(run) == replay(run)


@given(trace=made_traces(), rate=st.integers(1, 900))
def test_p1_every_input_has_an_effect_on_a_run_bound_by_it(trace, rate):
    run = made_run(trace)
    slow, fast = (seconds_with(run, f"device_link={rate * times} GB/s") for times in (1, 2))
    assert slow >= fast * (1 - 1e-9)


def test_usual_changes_are_those_that_concern_the_run(shared_samples):
    run = rebuild(read_recordings([shared_samples / "kineto/linear_kineto.json.gz"]))
    texts = [change.text for change in usual_changes(run)]
    assert texts[0] == "kernel:matrix_product=2x"
    assert "host=2x" in texts
    assert not any(text.startswith(("overlap", "straggler")) for text in texts)  # one GPU, no collectives
