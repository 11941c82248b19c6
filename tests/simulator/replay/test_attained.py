"""What a recording tells of its device and of other shapes, by hand."""

from typing import Any

import pytest

from simulator.replay.apply import apply_change
from simulator.replay.attained import attained_memory_ratio
from simulator.replay.changes import parse_change
from simulator.specs.cluster import BUILT_IN_CLUSTERS
from tests.made_kineto import MadeTrace
from tests.simulator.replay.test_run import US, run_of

H200 = BUILT_IN_CLUSTERS["h200x8"].device  # 4.8 TB/s, 60 MiB of cache


def trace_of(*kernels: tuple[str, str, list[list[int]], float]) -> MadeTrace:
    """Return kernels one after another: operator, name, shapes, microseconds."""
    trace = MadeTrace()
    at = 10.0
    for name, kernel, shapes, length in kernels:
        inputs: dict[str, Any] = {"Input Dims": shapes, "Input type": ["float"] * len(shapes)}
        trace.operator(name, at, 9, **inputs)
        trace.kernel(kernel, launch=at + 1, ts=at + 8, dur=length)
        at += length + 20
    trace.step(0, 0, at)
    return trace


def seconds_of(run, change: str) -> list[float]:
    pieces = apply_change(run, parse_change(change)).run.ranks[0].pieces
    return [piece.duration_seconds / US for piece in pieces if piece.operation is not None]


def test_the_best_large_kernel_of_elements_tells_what_the_memory_attains(tmp_path):
    # 480 MB at 4.8 TB/s are 100 us: 0.8 and 0.5 attained. What fits the cache and what does more does not count.
    run = run_of(
        tmp_path,
        trace_of(
            ("aten::gelu", "elementwise_kernel", [[600_000, 100]], 125),
            ("aten::gelu", "elementwise_kernel", [[600_000, 100]], 200),
            ("aten::gelu", "elementwise_kernel", [[6_000, 100]], 1),
            ("aten::sum", "reduce_kernel", [[600_000, 100]], 100),
        ),
    )
    assert attained_memory_ratio(run.ranks, H200) == pytest.approx(0.8)
    assert attained_memory_ratio(run.ranks, None) == 1.0
    small = run_of(tmp_path, trace_of(("aten::gelu", "elementwise_kernel", [[6_000, 100]], 1)))
    assert attained_memory_ratio(small.ranks, H200) == 1.0


def test_a_kernel_takes_what_its_operator_took_in_those_shapes(tmp_path):
    kernels = [("aten::sum", "reduce_kernel", [[9000, width]], length) for width, length in ((128, 70), (256, 50))]
    run = run_of(tmp_path, trace_of(*kernels))
    changed = seconds_of(run, "size:128=256, size:256=512")
    assert changed[0] == pytest.approx(50)  # as measured, though it is faster
    assert changed[1] > 50  # never measured: by what it moves


def test_times_that_differ_in_one_shape_tell_nothing_of_another(tmp_path):
    # Sums over rows and over columns, which a recording does not tell apart.
    kernels = [("aten::sum", "reduce_kernel", [[9000, width]], n) for width, n in ((128, 70), (256, 50), (256, 200))]
    run = run_of(tmp_path, trace_of(*kernels))
    assert seconds_of(run, "size:128=256")[0] > 70


def test_other_formats_do_not_take_what_was_measured_in_theirs(tmp_path):
    kernels = [("aten::sum", "reduce_kernel", [[9000, width]], length) for width, length in ((128, 70), (256, 50))]
    run = run_of(tmp_path, trace_of(*kernels))
    assert seconds_of(run, "size:128=256, precision=bf16")[0] != pytest.approx(50)
