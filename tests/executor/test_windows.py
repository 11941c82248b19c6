"""Windows of rows: what they hold against brute force, and their kernels against fp64."""

import dataclasses
import functools
import unittest.mock
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor.attention.graph import EdgeGraph, Transpose
from executor.attention.windows import COLUMN_STEP, WINDOW_ROWS, Rule, Windows, build_windows
from executor.attention.work import build_work_list
from tests.executor.attention_reference import Case, case_of, relative_errors

pytest.importorskip("triton", reason="this build of torch comes without Triton")
gpu_windows = pytest.importorskip("executor.attention.gpu_windows")
on_kernels = pytest.importorskip("tests.executor.on_kernels")

# The interpreter computes with NumPy also what a mask or a choice leaves out, such as the logarithm of an empty sum.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# The interpreter multiplies bf16 as if its bits were integers (triton issue 11584), and knows no tf32.
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3}
# A window of its own whose rows share nothing, another whose rows share all, one without edges, and a short last one.
EDGES = [(row + 3, row) for row in range(16)]
EDGES += [(source, row) for row in range(16, 32) for source in range(7) if (row + source) % 5]
EDGES += [(source, row) for row in range(48, 51) for source in range(20)]


@st.composite
def edge_lists(draw: st.DrawFn) -> tuple[int, list[tuple[int, int]]]:
    """Draw rows, and edges (source of up to 12, row)."""
    num_rows = draw(st.integers(1, 70))
    edge = st.tuples(st.integers(0, 11), st.integers(0, num_rows - 1))
    return num_rows, sorted(draw(st.lists(edge, max_size=150)), key=lambda pair: pair[1])


def at_least(min_reuse: float) -> Rule:
    return Rule(min_reuse=min_reuse, sure_reuse=min_reuse, spare_columns=0)


def csr(num_rows: int, edges: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    counts_N = torch.bincount(torch.tensor([row for _, row in edges], dtype=torch.int64), minlength=num_rows)
    indptr_N1 = torch.nn.functional.pad(counts_N.cumsum(0), (1, 0))
    return indptr_N1, torch.tensor([source for source, _ in edges], dtype=torch.int32)


def window_case(
    edges: list[tuple[int, int]],
    num_rows: int,
    num_sources: int | None = None,
    *,
    num_heads: int = 4,
    head_size: int = 16,
    **options: Any,
) -> Case:
    """Return a case whose heads windows can serve."""
    heads = {"num_heads": num_heads, "num_kv_heads": num_heads, "head_size": head_size}
    return case_of(edges, num_rows, num_sources, **heads, **options)


def edges_in(windows: Windows) -> list[tuple[int, int]]:
    """Return the edges that the masks name."""
    found = []
    for index, window in enumerate(windows.window_K.tolist()):
        first, end = windows.first_K1[index : index + 2].tolist()
        assert (end - first) % COLUMN_STEP == 0
        for column, bits in zip(windows.column_C[first:end].tolist(), windows.bits_C[first:end].tolist(), strict=True):
            found += [(column, window * WINDOW_ROWS + row) for row in range(WINDOW_ROWS) if bits >> row & 1]
    return sorted(found)


@given(drawn=edge_lists(), min_reuse=st.sampled_from([1.0, 1.5, 3.0]))
def test_windows_and_the_rest_hold_each_edge_once(drawn, min_reuse):
    num_rows, edges = drawn
    windows = build_windows(*csr(num_rows, edges), 12, rule=at_least(min_reuse), min_windows=0)
    assert windows is not None
    taken = set(windows.window_K.tolist())
    for window in range(-(-num_rows // WINDOW_ROWS)):
        own = [edge for edge in edges if edge[1] // WINDOW_ROWS == window]
        distinct = len({source for source, _ in own})
        is_worth_it = bool(own) and len(set(own)) == len(own) and len(own) >= min_reuse * distinct
        assert (window in taken) == is_worth_it
    assert edges_in(windows) == sorted(edge for edge in edges if edge[1] // WINDOW_ROWS in taken)
    rest = windows.rest
    assert sorted(rest.row_I.tolist()) == [row for row in range(num_rows) if row // WINDOW_ROWS not in taken]
    assert windows.num_edges + int(rest.count_I.sum()) == len(edges)


def test_padding_repeats_a_neighbour_of_the_window():
    windows = build_windows(*csr(51, EDGES), 30, rule=at_least(2.0), min_windows=0)
    assert windows is not None
    assert windows.window_K.tolist() == [1, 3]
    assert windows.column_C.tolist() == [*range(7), *[6] * 9, *range(20), *[19] * 12, *[0] * 16]
    assert windows.bits_C.tolist()[7:16] == [0] * 9


def test_windows_of_few_edges_may_share_less():
    rule = Rule(min_reuse=1.0, sure_reuse=3.0, spare_columns=2)
    taken = {0: (6, 4), 1: (6, 5), 2: (3, 3), 3: (0, 0)}  # edges and distinct neighbours of each window
    edges = [
        (column, 16 * window + row)
        for window, (count, distinct) in taken.items()
        for column, row in zip(
            [*range(distinct), *range(count - distinct)], [0] * distinct + [1] * (count - distinct), strict=True
        )
    ]
    windows = build_windows(*csr(64, edges), 12, rule=rule, min_windows=0)
    assert windows is not None
    assert windows.window_K.tolist() == [0, 2]  # 4 <= 6 / 3 + 2 and 3 <= 3 / 3 + 2, but 5 > 6 / 3 + 2


def test_edges_found_in_batches_are_the_same(monkeypatch):
    whole = build_windows(*csr(51, EDGES), 30, rule=at_least(1.0), min_windows=0)
    monkeypatch.setattr("executor.attention.windows._EDGES_AT_ONCE", 20)
    parts = build_windows(*csr(51, EDGES), 30, rule=at_least(1.0), min_windows=0)
    assert whole is not None
    assert parts is not None
    assert edges_in(whole) == edges_in(parts) == sorted(EDGES)


def test_a_look_at_some_windows_saves_the_others(monkeypatch):
    monkeypatch.setattr("executor.attention.windows.SAMPLED_WINDOWS", 2)  # windows 0 and 2: nothing shared
    assert build_windows(*csr(51, EDGES), 30, rule=at_least(2.0), min_windows=0) is None


def test_few_windows_are_not_worth_it():
    assert build_windows(*csr(51, EDGES), 30, rule=at_least(2.0), min_windows=3) is None


def test_a_graph_of_one_step_has_no_windows():
    graph = dataclasses.replace(window_case(EDGES, 51).graph("cpu"), is_sampled=True)
    assert graph.windows is None
    assert graph.transpose.windows is None


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    graph: EdgeGraph,
    *,
    scale: float | None,
    min_reuse: float = 1.0,
    wide: bool = False,
    **_: Any,
) -> Any:
    """Attend by the kernels, over windows of both directions and the rows outside them."""
    lists: list[tuple[EdgeGraph | Transpose, Tensor, Tensor, int]] = [
        (graph, graph.indptr_N1, graph.source_E, graph.num_sources),
        (graph.transpose, graph.transpose.indptr_M1, graph.transpose.target_E, graph.num_targets),
    ]
    for holder, indptr, neighbours, count in lists:
        windows = build_windows(indptr, neighbours, count, rule=at_least(min_reuse), min_windows=0)
        # Where cached properties keep what they made.
        holder.__dict__.update(windows=windows, work=build_work_list(indptr))
    scale = q.shape[2] ** -0.5 if scale is None else scale
    assert gpu_windows.can_run(q, k, (None, None, None), scale)
    return on_kernels.OnKernels.apply(q, k, v, None, None, (None, graph, scale, 0.0))


# Windows take fp32 rows where tf32 will do.
tf32 = unittest.mock.patch("torch.get_float32_matmul_precision", return_value="high")


def assert_right(case: Case, dtype: torch.dtype, **options: Any) -> None:
    with tf32:
        errors = relative_errors(case, dtype, attend=functools.partial(attend, **options))
    assert max(errors.values()) <= BOUNDS[dtype], errors


@pytest.mark.parametrize("dtype", BOUNDS)
@settings(max_examples=5)
@given(drawn=edge_lists(), min_reuse=st.sampled_from([1.0, 2.0]), seed=st.integers(0, 3))
def test_kernels_equal_the_reference(dtype, drawn, min_reuse, seed):
    case = window_case(drawn[1], drawn[0], 12, seed=seed)
    assert_right(case, dtype, min_reuse=min_reuse)


@pytest.mark.parametrize(("num_heads", "head_size"), [(8, 16), (16, 16), (6, 32), (1, 64), (2, 128)])
def test_heads_of_every_size_equal_the_reference(num_heads, head_size):
    assert_right(window_case(EDGES, 51, num_heads=num_heads, head_size=head_size), torch.float16)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_around_a_thousand_stay_finite_and_right(sign):
    case = window_case(EDGES, 51, spread=300.0 * sign)
    with tf32:
        errors = relative_errors(case, torch.float32, attend=attend)
    # A score of a thousand has an error of 6e-5 in fp32, which is that of its weight.
    assert max(errors.values()) <= 1e-3, errors


def test_offsets_beyond_32_bits_take_the_wide_path(monkeypatch):
    monkeypatch.setattr(gpu_windows, "MAX_INT32", 0)
    assert_right(window_case(EDGES, 51), torch.float16)


def test_same_values_give_the_same_output():
    case = window_case(EDGES, 51)
    q, k, v = (case.inputs(torch.float16)[name] for name in "qkv")
    v = torch.full_like(v, 1.7)
    out, _ = attend(q, k, v, case.graph("cpu"), scale=None)
    has_edges_N = case.graph("cpu").indptr_N1.diff() > 0
    assert torch.equal(out[has_edges_N], v[: out.shape[0]][has_edges_N])


@pytest.mark.parametrize(
    ("heads", "dtype", "extras", "factor"),
    [
        ((4, 2, 16), torch.float16, (None, None, None), 1.0),  # grouped keys
        ((4, 4, 20), torch.float16, (None, None, None), 1.0),  # padded columns
        ((3, 3, 16), torch.float16, (None, None, None), 1.0),  # a head a program
        ((4, 4, 16), torch.float32, (None, None, None), 1.0),  # fp32, and tf32 not allowed
        ((4, 4, 16), torch.float16, (torch.zeros(1), None, None), 1.0),  # bias
        ((4, 4, 16), torch.float16, (None, None, None), -1.0),  # the largest score is the smallest product
    ],
)
def test_what_windows_cannot_serve_goes_without(heads, dtype, extras, factor):
    num_heads, num_kv_heads, head_size = heads
    q, k = torch.zeros(2, num_heads, head_size, dtype=dtype), torch.zeros(2, num_kv_heads, head_size, dtype=dtype)
    assert not gpu_windows.can_run(q, k, extras, factor)


def communities() -> list[tuple[int, int]]:
    """Return distinct edges among 330 nodes, up to 20 a node, most of them within thirties."""
    generator = torch.Generator().manual_seed(0)
    row_E = torch.arange(330).repeat_interleave(20)
    near_E = row_E // 30 * 30 + torch.randint(0, 30, row_E.shape, generator=generator)
    far_E = torch.randint(0, 330, row_E.shape, generator=generator)
    source_E = torch.where(torch.rand(row_E.shape, generator=generator) < 0.9, near_E, far_E)
    return sorted(set(zip(source_E.tolist(), row_E.tolist(), strict=True)), key=lambda edge: edge[1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3), (torch.float32, 5e-3)], ids=str
)
@pytest.mark.parametrize(("num_heads", "head_size"), [(8, 16), (8, 32), (2, 128)])
def test_windows_on_a_gpu_equal_the_reference(dtype, bound, num_heads, head_size):
    case = window_case(communities(), 330, num_heads=num_heads, head_size=head_size)
    with tf32:
        errors = relative_errors(case, dtype, "cuda", attend=functools.partial(attend, min_reuse=2.0))
    assert max(errors.values()) <= bound, errors
