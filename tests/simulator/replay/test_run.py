"""A recording becomes tasks, streams and dependencies, and the engine makes the recorded step of them; by hand."""

from pathlib import Path

import pytest

from simulator.errors import SpecError
from simulator.readers.traces import read_recordings
from simulator.replay.apply import apply_change
from simulator.replay.changes import parse_change
from simulator.replay.run import errors_as_recorded, rebuild, replay
from simulator.replay.whatif import shares_of
from simulator.specs.cluster import BUILT_IN_CLUSTERS
from tests.bench.replay import BAR_PERCENT, SAMPLES
from tests.made_kineto import AUTOGRAD, MadeTrace

US = 1e-6
H200 = BUILT_IN_CLUSTERS["h200x8"]


def run_of(tmp_path: Path, *traces: MadeTrace):
    paths = [trace.write(tmp_path / f"rank{rank}.json") for rank, trace in enumerate(traces)]
    return rebuild(read_recordings(paths))


def seconds_with(run, change: str) -> float:
    return replay(apply_change(run, parse_change(change), H200).run).step_seconds


def waiting_host() -> MadeTrace:
    """A kernel of 100 us that the host waits for, then 10 us of its own."""
    trace = MadeTrace()
    trace.step(0, 0, 130)
    trace.kernel("gemm", launch=10, ts=17, dur=100)
    trace.call("cudaDeviceSynchronize", 20, 100)  # returns 3 us after the kernel
    return trace


@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_replayed_as_recorded_keeps_its_step(name, shared_samples):
    path, ranks = SAMPLES[name]
    run = rebuild(read_recordings([shared_samples.parent / path], ranks=ranks))
    step_error, single_error = errors_as_recorded(run, replay(run))
    assert abs(step_error) < BAR_PERCENT / 100
    assert single_error < BAR_PERCENT / 100


def test_device_work_follows_its_launch_and_the_host_what_it_waits_for(tmp_path):
    run = run_of(tmp_path, waiting_host())
    assert run.recorded_step_seconds == pytest.approx(130 * US)
    assert replay(run).step_seconds == pytest.approx(130 * US)
    # 10 us of host, launch 5 us, 2 us to the start, 50 us of kernel, 3 us back, 10 us of host.
    assert seconds_with(run, "kernel:matrix_product=2x") == pytest.approx(80 * US)
    # 5 us before the launch, whose 5 us halve too; 2, 100 and 3 us stay; the last 10 us halve.
    assert seconds_with(run, "host=2x") == pytest.approx((5 + 2.5 + 2 + 100 + 3 + 5) * US)


def test_a_queue_of_kernels_is_bound_by_the_device_until_the_host_is_slower(tmp_path):
    trace = MadeTrace()
    trace.step(0, 0, 40)
    for number in range(3):  # launched every 10 us, 50 us each
        trace.kernel("gemm", launch=10 * number, ts=8 + 50 * number, dur=50)
    run = run_of(tmp_path, trace)
    assert replay(run).step_seconds == pytest.approx(158 * US)
    assert seconds_with(run, "kernel:matrix_product=2x") == pytest.approx(83 * US)
    # Kernels of 1 us: the last is launched at 25 us and starts at once; the host ends at 40 us.
    assert seconds_with(run, "kernel:matrix_product=50x") == pytest.approx(40 * US)


def test_a_stream_waits_for_the_event_that_the_trace_names(tmp_path):
    trace = MadeTrace()
    trace.step(0, 0, 60)
    trace.kernel("gemm", launch=0, ts=6, dur=100, stream=7)
    record = trace.call("cudaEventRecord", 6, 1)
    trace.kernel(
        "softmax", launch=8, ts=106, dur=30, stream=7
    )  # after the event: the other stream does not wait for it
    wait = trace.call("cudaStreamWaitEvent", 14, 1)
    trace.event(
        "cuda_sync",
        "Stream Wait Event",
        9,
        14,
        1,
        pid=0,
        device=0,
        stream=9,
        correlation=wait,
        wait_on_stream=7,
        wait_on_cuda_event_record_corr_id=record,
    )
    trace.kernel("elementwise", launch=16, ts=107, dur=20, stream=9)
    run = run_of(tmp_path, trace)
    assert run.ranks[0].num_inferred == 0
    # The first kernel halves, the stream that waits for it goes on 1 us later, not after the softmax.
    changed = apply_change(run, parse_change("kernel:matrix_product=2x")).run
    pieces, played = changed.ranks[0].pieces, replay(changed)
    starts = {piece.name: start for piece, start in zip(pieces, played.start_seconds[0], strict=True)}
    assert starts["elementwise"] == pytest.approx(57 * US)


def test_a_wait_without_names_concerns_the_next_launch_and_the_work_before_it(tmp_path):
    trace = MadeTrace()
    trace.step(0, 0, 60)
    trace.kernel("gemm", launch=0, ts=6, dur=100)
    trace.call("cudaStreamWaitEvent", 6, 1)
    trace.collective(launch=8, ts=107, dur=40)
    run = run_of(tmp_path, trace)
    assert run.ranks[0].num_inferred == 1
    assert seconds_with(run, "kernel:matrix_product=2x") == pytest.approx((6 + 50 + 1 + 40) * US)


def test_a_copy_of_pageable_memory_blocks_the_host(tmp_path):
    trace = MadeTrace()
    trace.step(0, 0, 120)
    trace.kernel("gemm", launch=0, ts=6, dur=80)
    name = "Memcpy DtoH (Device -> Pageable)"
    trace.kernel(name, launch=10, launch_dur=95, launch_name="cudaMemcpyAsync", ts=87, dur=10, category="gpu_memcpy")
    run = run_of(tmp_path, trace)
    # Kernel 6 to 46, copy 47 to 57, back on the host 8 us later, 15 us of host.
    assert seconds_with(run, "kernel:matrix_product=2x") == pytest.approx(80 * US)


def test_autograds_thread_goes_on_after_the_one_that_called_it_and_back(tmp_path):
    trace = MadeTrace()
    trace.step(0, 0, 1000)
    trace.operator("forward", 0, 100)
    trace.operator("backward of a layer", 110, 390, AUTOGRAD)
    trace.operator("optimizer", 520, 480)
    run = run_of(tmp_path, trace)
    assert run.ranks[0].num_inferred == 2
    # All of it is work of the host, one thread after the other: twice as fast.
    assert seconds_with(run, "kernel:other=2x, host=2x") == pytest.approx(
        (50 + 10 + 195 + 20 + 240) * US
    )  # hand-overs keep their 10 and 20 us


def test_a_thread_that_wakes_late_still_follows_the_one_that_waits_for_it(tmp_path):
    # Autograd's thread begins 3 ms after the call: longer than a hand-over, but the caller goes on right after it.
    trace = MadeTrace()
    trace.step(0, 0, 6000)
    trace.operator("forward", 0, 1000)
    trace.operator("backward of a layer", 4000, 1000, AUTOGRAD)
    trace.operator("optimizer", 5020, 980)
    run = run_of(tmp_path, trace)
    assert run.ranks[0].num_inferred == 2
    # 500 us forward, 3 ms as they were, 500 backward, 20 as they were, 490 for the optimizer.
    assert seconds_with(run, "kernel:other=2x, host=2x") == pytest.approx(4510 * US)


def test_a_thread_of_its_own_that_begins_late_follows_nobody(tmp_path):
    trace = MadeTrace()
    trace.step(0, 0, 6000)
    trace.operator("forward", 0, 1000)
    trace.operator("another thread's work", 4000, 1000, AUTOGRAD)
    trace.operator("optimizer", 5600, 400)
    assert run_of(tmp_path, trace).ranks[0].num_inferred == 0


def two_ranks() -> tuple[MadeTrace, MadeTrace]:
    """Two all-reduces of 10 us; rank 1 arrives 40 us late at the first, rank 0 5 us late at the second."""
    ranks = []
    for rank, (first, second) in enumerate(((50, 205), (90, 200))):
        trace = MadeTrace(rank=rank, num_ranks=2)
        trace.step(0, 0, 240)
        trace.kernel("gemm", launch=1, ts=6, dur=first - 16)
        trace.collective(launch=first - 5, ts=first, dur=100 - first)
        trace.call("cudaDeviceSynchronize", first + 2, 102 - first - 2)
        trace.kernel("gemm", launch=103, ts=108, dur=second - 118)
        trace.collective(launch=second - 5, ts=second, dur=215 - second)
        trace.call("cudaDeviceSynchronize", second + 2, 217 - second - 2)
        ranks.append(trace)
    return ranks[0], ranks[1]


def test_waiting_is_told_from_communication_by_the_last_arrival(tmp_path):
    run = run_of(tmp_path, *two_ranks())
    assert [meeting.cost_seconds for meeting in run.meetings] == pytest.approx([10 * US, 10 * US])
    waits = [
        [round(piece.recorded_wait_seconds / US, 6) for piece in rank.pieces if piece.meeting is not None]
        for rank in run.ranks
    ]
    assert waits == [[40, 0], [0, 5]]
    played = replay(run)
    assert shares_of(run, played, 0).waiting_seconds == pytest.approx(40 * US)
    assert shares_of(run, played, 1).communicating_seconds == pytest.approx(20 * US)


def test_clocks_of_hosts_that_differ_are_brought_together_by_ends_of_collectives(tmp_path):
    first, second = two_ranks()
    for event in second.events:
        event["ts"] += 1e6  # this host's clock is a second ahead
    run = run_of(tmp_path, first, second)
    assert [meeting.cost_seconds for meeting in run.meetings] == pytest.approx([10 * US, 10 * US])
    assert run.clock_spread_seconds == pytest.approx(0, abs=1e-9)


def test_dlrm_on_eight_ranks_waits_as_its_readme_says(shared_samples):
    # "own compute 1.03-1.25 ms"; the same collectives take 1.7 ms on rank 7 and 11.3 ms on rank 1.
    run = rebuild(read_recordings([shared_samples / "kineto/dlrm_8ranks"]))
    played = replay(run)
    shares = [shares_of(run, played, place) for place in range(8)]
    whole = [share.communicating_seconds + share.waiting_seconds for share in shares]
    assert whole[7] == pytest.approx(1.7e-3, abs=0.1e-3)
    assert whole[1] == pytest.approx(11.3e-3, abs=0.1e-3)
    assert max(whole) == whole[1]
    assert min(whole) == whole[7]
    costs = {share.communicating_seconds for share in shares}
    assert len({round(cost, 9) for cost in costs}) == 1  # a cost is that of all ranks
    assert costs.pop() < 0.3e-3
    assert all(1.03e-3 < sum(seconds for _, seconds in share.kernels) < 1.30e-3 for share in shares)


def test_ranks_with_other_numbers_of_steps_are_refused(tmp_path):
    first, second = two_ranks()
    second.step(1, 240, 10)
    with pytest.raises(SpecError, match=r"same number of steps, got .*rank0.json 1, .*rank1.json 2"):
        run_of(tmp_path, first, second)


def test_a_collective_of_ranks_that_were_not_recorded_stays_as_it_was_and_that_is_said(tmp_path):
    first, _ = two_ranks()
    run = run_of(tmp_path, first)
    assert run.meetings == ()
    assert any("2 times all_reduce of ranks that were not all recorded" in note for note in run.notes)
    # The faster of two alike stands for the cost: 10 us, so that 40 us of the other were waiting.
    assert shares_of(run, replay(run), 0).waiting_seconds == pytest.approx(40 * US)
    assert seconds_with(run, "straggler=none") == pytest.approx(200 * US)


def test_steps_are_told_by_the_optimizer_where_the_profiler_was_not(tmp_path):
    trace = MadeTrace()
    for step in range(3):
        trace.kernel("gemm", launch=100 * step, ts=100 * step + 6, dur=50)
        trace.event("user_annotation", "Optimizer.step#SGD.step", 100, 100 * step + 60, 30)
    run = run_of(tmp_path, trace)
    assert run.num_steps == 2
    assert run.recorded_step_seconds == pytest.approx(100 * US)
    assert run.ranks[0].left_out == (("before the first step", 1),)
    assert run.notes[0] == "steps are told by ends of Optimizer.step#SGD.step"
