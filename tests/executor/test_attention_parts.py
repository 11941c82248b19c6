"""Attention in parts against fp64 and against attention over all edges, and rows that are added in place."""

import contextlib
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from executor.attention import parts
from executor.attention.graph import EdgeGraph
from executor.attention.parts import Attended
from executor.attention.windows import Rule, build_windows
from executor.attention.work import build_work_list
from tests.executor.attention_in_parts import Cut, attend_in_parts, cut_cases, in_pieces
from tests.executor.attention_reference import Case, Heads, Layout, Named, case_of, run_attention, run_reference

# The interpreter computes with NumPy also what a mask or a choice leaves out, such as the logarithm of an empty sum.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Whole vectors and others, grouped keys, sizes and heads that are no powers of two, heads in fours and the rest.
HEADS = (Heads(4, 4, 16, False), Heads(6, 2, 8, False), Heads(3, 1, 20, False), Heads(5, 5, 1, False))
BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", BOUNDS, ids=str)


def by_kernels() -> Any:
    """Return a context in which the GPU's code computes, on CPUs in Triton's interpreter."""
    pytest.importorskip("triton", reason="this build of torch comes without Triton")
    return pytest.importorskip("tests.executor.on_kernels").by_kernels()


@pytest.fixture(params=["cpu", "kernels"])
def code(request: pytest.FixtureRequest) -> Any:
    """Return a context in which the CPU's code or, in Triton's interpreter, the GPU's computes."""
    if request.param == "cpu":
        return contextlib.nullcontext
    return by_kernels


def largest_errors(found: Named, wanted: Named) -> dict[str, float]:
    """Return the largest error of each result over its largest value, or over one if that is less."""
    errors = {}
    for name, should_be in wanted.items():
        should_be, result = should_be.cpu().double(), found[name].cpu().double()
        is_there = torch.isfinite(should_be)
        if not torch.equal(result[~is_there], should_be[~is_there]):
            errors[name] = float("inf")
        elif is_there.any():
            error = (result - should_be)[is_there].abs().amax()
            errors[name] = float(error / should_be[is_there].abs().amax().clamp(min=1.0))
    return errors


def assert_right(case: Case, cut: Cut, dtype: torch.dtype, device: str = "cpu", bound: float | None = None) -> Named:
    """Compare attention in parts with the reference and with attention over all edges; return what it gave."""
    found = run_attention(case, dtype, device, functools.partial(attend_in_parts, cut=cut))
    for wanted in (run_reference(case, dtype), run_attention(case, dtype, device)):
        errors = largest_errors(found, wanted)
        assert max(errors.values(), default=0.0) <= (bound or BOUNDS[dtype]), errors
    return found


@DTYPES
@settings(max_examples=12)
@given(drawn=cut_cases(HEADS))
def test_parts_on_cores_equal_the_reference_and_attention_over_all_edges(dtype, drawn):
    case, cut = drawn
    assert_right(case, cut, dtype)


# Of bf16 the interpreter cuts digits off where GPUs round, so `rest` has not room for what it takes; on a GPU bf16 is
# among the formats of the tests below.
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@settings(max_examples=6)
@given(drawn=cut_cases(HEADS, prepare=in_pieces))
def test_parts_by_kernels_equal_the_reference_and_attention_over_all_edges(dtype, drawn):
    case, cut = drawn
    with by_kernels():
        assert_right(case, cut, dtype)


# Own nodes 0 to 9, of which 8 and 9 have no edges among themselves; rows 5 to 9 have edges from others, 10 to 14.
INNER = [(node, 0) for node in range(8)] + [(0, node) for node in range(8)] + [(3, 3), (3, 3), (7, 6)]
OUTER = [(10 + node % 5, 5 + node % 4) for node in range(12)] + [(node, 5) for node in range(10, 15)]


def hubs(**options: Any) -> Case:
    return case_of(INNER + OUTER, 10, 15, has_lse_gradient=False, **options)


CUT = Cut(num_own=10, first_row=5)


@pytest.mark.parametrize("by_part", [False, True], ids=["at once", "part by part"])
@pytest.mark.parametrize("layout", Layout)
def test_hubs_and_rows_without_edges(code, by_part, layout):
    case = hubs(has_bias=True, num_heads=6, num_kv_heads=2, layout=layout)
    with code():
        assert_right(case, Cut(num_own=10, first_row=5, by_part=by_part, prepare=in_pieces), torch.float32)


@pytest.mark.parametrize(
    ("edges", "first_row"), [(INNER, 5), (INNER, 10), (INNER, 0), (OUTER, 5), (OUTER, 0), ([], 0), ([], 10)]
)
def test_either_part_may_be_empty(code, edges, first_row):
    case = case_of(edges, 10, 15, has_lse_gradient=False)
    with code():
        assert_right(case, Cut(num_own=10, first_row=first_row), torch.float16)


def test_ranks_without_rows_or_halo_take_part(code):
    with code():
        found = assert_right(case_of([], 1, 1, has_lse_gradient=False), Cut(num_own=1, first_row=1), torch.float32)
        assert found["lse"].tolist() == [[-torch.inf] * 2]
        rows = torch.zeros(0, 2, 16, dtype=torch.float16)
        graph = EdgeGraph(indptr_N1=torch.zeros(1, dtype=torch.int64), source_E=torch.zeros(0).int(), num_sources=0)
        whole = parts.attend_part(rows, rows, rows, None, graph)
        parts.merge_into(whole, parts.attend_part(rows, rows, rows, None, graph), 0)
        arguments: tuple[Any, ...] = (rows, parts.row_stats(rows, whole), whole, rows, rows, rows, None, graph)
        gradients = (
            *parts.backward_sources(*arguments, bias_gradient=False),
            *parts.backward_targets(*arguments, bias_gradient=False),
        )
        assert [None if x is None else len(x) for x in gradients] == [0, 0, None, 0, None]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_around_a_thousand_stay_finite_and_right(code, sign):
    with code():
        # A score of a thousand has an error of 6e-5 in fp32, which is that of its weight.
        assert_right(hubs(spread=300.0 * sign), CUT, torch.float32, bound=1e-3)


def test_sharp_weights_in_bf16_leave_gradients_right(code):
    # Where one weight is near one, gradients are small differences that a rounded output would drown.
    with code():
        assert_right(hubs(spread=12.0), CUT, torch.bfloat16)


def test_a_long_row_that_cores_cut_is_joined_with_the_means_of_all_its_edges():
    generator = torch.Generator().manual_seed(0)
    sources = torch.randint(0, 60, (6000,), generator=generator).tolist()
    edges = [(source, 29 if source >= 30 or index % 2 else index % 29) for index, source in enumerate(sources)]
    case = case_of(edges, 30, 60, has_lse_gradient=False)
    for by_part in (False, True):
        assert_right(case, Cut(num_own=30, first_row=29, by_part=by_part), torch.float32)


@DTYPES
def test_runs_give_the_same_bits(code, dtype):
    attend = functools.partial(attend_in_parts, cut=CUT)
    with code():
        first, second = (run_attention(hubs(has_bias=True), dtype, attend=attend) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def window_graph(graph: EdgeGraph) -> EdgeGraph:
    """Return a graph whose windows are taken wherever there is one."""
    rule = Rule(min_reuse=1.0, sure_reuse=1.0, spare_columns=0)
    for holder, indptr, neighbours, count in (
        (graph, graph.indptr_N1, graph.source_E, graph.num_sources),
        (graph.transpose, graph.transpose.indptr_M1, graph.transpose.target_E, graph.num_targets),
    ):
        windows = build_windows(indptr, neighbours, count, rule=rule, min_windows=0) if count else None
        holder.__dict__.update(windows=windows, work=build_work_list(indptr))
    return graph


def test_windows_serve_parts_and_passes():
    edges = [(source, row) for row in range(20) for source in range(0, 34, 2) if (row + source) % 5]
    edges += [(source, row) for row in range(16, 40) for source in range(40, 52) if (row + source) % 3]
    case = case_of(edges, 40, 52, num_heads=4, num_kv_heads=4, head_size=16, has_lse_gradient=False)
    graph = window_graph(case.graph())
    assert graph.windows is not None
    assert graph.transpose.windows is not None
    for by_part in (False, True):
        with by_kernels():
            cut = Cut(num_own=40, first_row=16, by_part=by_part, prepare=window_graph)
            assert_right(case, cut, torch.float16)


# --- Merges by themselves.


def attended(case: Case, dtype: torch.dtype, rows: slice = slice(None)) -> Attended:
    inputs = case.inputs(dtype)
    found = parts.attend_part(inputs["q"], inputs["k"], inputs["v"], None, case.graph())
    return Attended(out=found.out[rows], lse=found.lse[rows], rest=found.rest[rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_part_without_edges_changes_nothing_and_one_joined_with_nothing_is_taken_as_it_is(code, dtype):
    with code():
        wanted, nothing = attended(hubs(), dtype), attended(case_of([], 10, 15), dtype)
        for whole, part in (
            (attended(hubs(), dtype), nothing),
            (attended(case_of([], 10, 15), dtype), wanted),
        ):
            parts.merge_into(whole, part, 0)
            assert torch.equal(whole.out, wanted.out)
            assert torch.equal(whole.lse, wanted.lse)


def test_sixteen_bits_lose_nothing_over_many_merges(code):
    # Each edge is a part of its own. The last rounding takes half a spacing, the eight bits of kernels a little more;
    # rounded after each merge, small outputs would be off by dozens.
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 64, 2, 16, generator=generator).to(torch.float16)
    q = torch.randn(1, 2, 16, generator=generator).to(torch.float16)

    def over(first: int, last: int) -> Attended:
        indptr_N1, source_E = torch.tensor([0, last - first]), torch.arange(last - first, dtype=torch.int32)
        graph = EdgeGraph(indptr_N1=indptr_N1, source_E=source_E, num_sources=last - first)
        return parts.attend_part(q, k[first:last], v[first:last], None, graph)

    with code():
        at_once, joined = over(0, 64), over(0, 1)
        for edge in range(1, 64):
            parts.merge_into(joined, over(edge, edge + 1), 0)
    weights = torch.softmax(torch.einsum("hk,ehk->eh", q[0].double(), k.double()) / 4, 0)
    exact = torch.einsum("eh,ehk->hk", weights, v.double())[None]
    spacing = 2.0 ** (exact.abs().log2().floor() - 10)
    for found in (at_once, joined):
        assert ((found.out.double() - exact).abs() <= 0.6 * spacing).all()


def test_what_does_not_fit_is_refused_in_a_sentence():
    whole, part = attended(hubs(), torch.float32), attended(hubs(), torch.float32, slice(3, None))
    for first_row in (2, -1, 11):
        with pytest.raises(ValueError, match=f"rows from first_row to the last .* got first_row={first_row} and"):
            parts.merge_into(whole, part, first_row)
    with pytest.raises(ValueError, match=r"must have the format of whole, torch\.float32, got torch\.float16"):
        parts.merge_into(whole, attended(hubs(), torch.float16, slice(3, None)), 3)
    with pytest.raises(ValueError, match=r"grad_out must have the shape \(10, 2, 16\)"):
        parts.row_stats(torch.zeros(9, 2, 16), whole)
    with pytest.raises(ValueError, match="k must have the shape"):
        parts.attend_part(whole.out, whole.out, whole.out, None, hubs().graph())
    rows, index = torch.zeros(4, 3), torch.tensor([0, 1])
    for added, counts in ((torch.zeros(2, 2), [2]), (torch.zeros(2, 3), [1])):
        with pytest.raises(ValueError, match="must fit each other"):
            parts.add_rows_(rows, index, added, counts)


def test_the_profiler_sees_every_pass_with_its_operands():
    with torch.profiler.profile(record_shapes=True) as profiler:
        run_attention(hubs(), torch.float32, attend=functools.partial(attend_in_parts, cut=CUT))
    seen = {event.name: event.input_shapes for event in profiler.events() if event.name.startswith("graphpilot::")}
    assert seen["graphpilot::attend_part"][:3] == [[5, 2, 16], [5, 2, 16], [5, 2, 16]]  # the outer part, the last one
    assert seen["graphpilot::merge_parts_"][0] == [10, 2, 16]
    assert seen["graphpilot::row_stats"][0] == [10, 2, 16]
    assert seen["graphpilot::attention_sources"][2:5] == [[10, 2, 16], [15, 2, 16], [15, 2, 16]]
    assert seen["graphpilot::attention_targets"][5:8] == [[10, 2, 16], [15, 2, 16], [15, 2, 16]]


# --- Rows that are added.


@st.composite
def additions(draw: st.DrawFn) -> tuple[list[list[int]], int, int, int]:
    """Draw the rows that each peer adds to, distinct for a peer; rows, columns, and columns beside them in memory."""
    num_rows = draw(st.integers(0, 40))
    row = st.integers(0, max(num_rows - 1, 0))
    runs = draw(st.lists(st.lists(row, unique=True, max_size=num_rows), max_size=4))
    return runs, num_rows, draw(st.sampled_from([1, 3, 8, 60, 128, 1025])), draw(st.sampled_from([0, 5]))


def added_one_by_one(rows: Tensor, runs: list[list[int]], added: Tensor) -> Tensor:
    """Return sums that are fp32 and rounded once for each peer."""
    out, at = rows.clone(), 0
    for run in runs:
        for row in run:
            out[row] = (out[row].float() + added[at].float()).to(rows.dtype)
            at += 1
    return out


def assert_added(
    runs: list[list[int]],
    num_rows: int,
    columns: int,
    beside: int,
    *,
    dtype: torch.dtype,
    device: str = "cpu",
    spacings: float = 0.0,
) -> None:
    """Compare sums of runs; they may be off by so many spacings of bf16 or fp16, those of fp32 by nothing."""
    generator = torch.Generator().manual_seed(len(runs))
    index = torch.tensor([row for run in runs for row in run], dtype=torch.int64)
    whole = torch.randn(num_rows, columns + beside, generator=generator).to(dtype)
    added = torch.randn(len(index), columns, generator=generator).to(dtype)
    wanted = torch.cat([added_one_by_one(whole[:, :columns], runs, added), whole[:, columns:]], 1)
    found = whole.to(device)
    parts.add_rows_(found[:, :columns], index.to(device), added.to(device), [len(run) for run in runs])
    # Numbers on the way to a sum are below 16.
    bound = 0.0 if dtype == torch.float32 else spacings * 8 * torch.finfo(dtype).eps
    assert ((found.cpu().double() - wanted.double()).abs() <= bound).all()


@DTYPES
@settings(max_examples=15)
@given(drawn=additions())
def test_rows_are_added_once_each_on_cores(dtype, drawn):
    # Of 16 bits torch rounds one column after the last run, several after each.
    assert_added(*drawn, dtype=dtype, spacings=2)


@DTYPES
@settings(max_examples=15)
@given(drawn=additions())
def test_rows_are_added_once_each_by_kernels(dtype, drawn):
    # The interpreter cuts digits of bf16 off where GPUs round: once a run.
    with by_kernels():
        assert_added(*drawn, dtype=dtype, spacings=4 if dtype == torch.bfloat16 else 0)


def test_rows_in_the_format_of_messages_are_added_to_wider_ones(code):
    rows, added = torch.full((3, 4), 2.0**-12), torch.full((1, 4), 3.0, dtype=torch.bfloat16)
    with code():
        parts.add_rows_(rows, torch.tensor([1]), added, [1])
    assert torch.equal(rows[:, 0], torch.tensor([2.0**-12, 3.0 + 2.0**-12, 2.0**-12]))


# --- On a GPU.


def random_case(**options: Any) -> tuple[Case, int]:
    """Return edges of 300 own nodes and 100 of others, with hubs of both, and the first row with edges from others."""
    generator = torch.Generator().manual_seed(1)
    source_E, target_E = torch.randint(0, 300, (2, 6000), generator=generator)
    target_E[:2000], source_E[-2000:] = 299, 2
    others_E, last_E = (torch.randint(*bounds, (3000,), generator=generator) for bounds in ((300, 400), (201, 300)))
    last_E[:1500] = 299
    edges = list(zip([*source_E.tolist(), *others_E.tolist()], [*target_E.tolist(), *last_E.tolist()], strict=True))
    return case_of(edges, 300, 400, has_lse_gradient=False, **options), 201


# Kernels are compiled anew for each pair, so not for all pairs.
GPU_HEADS = (*HEADS, Heads(8, 8, 32, False), Heads(2, 2, 128, False), Heads(9, 3, 33, False), Heads(12, 12, 64, False))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "dtype"), [(heads, list(BOUNDS)[index % 3]) for index, heads in enumerate(GPU_HEADS)], ids=str
)
def test_parts_on_a_gpu_equal_the_reference_and_attention_over_all_edges(heads, dtype):
    case, first_row = random_case(
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        has_bias=True,
        layout=Layout.VIEWS,
    )
    for by_part in (False, True):
        assert_right(case, Cut(num_own=300, first_row=first_row, by_part=by_part), dtype, "cuda")


@pytest.mark.gpu
@DTYPES
def test_runs_on_a_gpu_give_the_same_bits(dtype):
    case, first_row = random_case(num_heads=8, num_kv_heads=8, head_size=32)
    attend = functools.partial(attend_in_parts, cut=Cut(num_own=300, first_row=first_row))
    first, second = (run_attention(case, dtype, "cuda", attend) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_windows_on_a_gpu_serve_parts_and_passes(dtype):
    case, first_row = random_case()
    # A window takes no edge twice.
    pairs = list(dict.fromkeys(zip(case.source_E.tolist(), case.target_E.tolist(), strict=True)))
    heads = {"num_heads": 8, "num_kv_heads": 8, "head_size": 32}
    case = case_of(pairs, 300, 400, has_lse_gradient=False, **heads)
    assert window_graph(case.graph("cuda")).windows is not None
    assert_right(case, Cut(num_own=300, first_row=first_row, prepare=window_graph), dtype, "cuda")


@pytest.mark.gpu
@DTYPES
@settings(max_examples=25)
@given(drawn=additions())
def test_rows_are_added_once_each_on_a_gpu(dtype, drawn):
    assert_added(*drawn, dtype=dtype, device="cuda")


@pytest.mark.gpu
def test_rows_beyond_32_bits_are_merged_weighed_and_added_on_a_gpu():
    num_rows = 2**31 // 256 + 33
    rows = torch.zeros(num_rows, 8, 32, dtype=torch.bfloat16, device="cuda")
    last = torch.tensor([0, num_rows - 1], device="cuda")
    parts.add_rows_(rows.view(num_rows, 256), last, torch.ones(2, 256, dtype=torch.bfloat16, device="cuda"), [2])
    assert rows[[0, 1, num_rows - 2, num_rows - 1], 7, 31].tolist() == [1.0, 0.0, 0.0, 1.0]
    lse = torch.zeros(num_rows, 8, device="cuda")
    whole = Attended(out=rows, lse=lse, rest=torch.zeros_like(rows, dtype=torch.int8))
    stats = parts.row_stats(rows, whole)
    assert stats[[0, 1, num_rows - 1], 7, 1].tolist() == [32.0, 0.0, 32.0]
    parts.merge_into(whole, Attended(out=whole.out.clone(), lse=lse.clone(), rest=whole.rest.clone()), 0)
    assert rows[[0, 1, num_rows - 2, num_rows - 1], 7, 31].tolist() == [1.0, 0.0, 0.0, 1.0]
    assert torch.equal(lse[-1], torch.full((8,), 2.0, device="cuda").log())


@pytest.mark.gpu
def test_pieces_are_replayed_in_a_cuda_graph():
    case, _ = random_case(num_heads=8, num_kv_heads=8, head_size=32)
    inputs = {name: value.cuda() for name, value in case.inputs(torch.bfloat16).items()}
    graph = case.graph("cuda")
    grad_out = case.gradients(torch.bfloat16)["out"].cuda()
    _ = graph.work, graph.transpose.work, graph.windows, graph.transpose.windows

    def step() -> tuple[Tensor, ...]:
        whole = parts.attend_part(inputs["q"], inputs["k"], inputs["v"], None, graph)
        parts.merge_into(whole, Attended(out=whole.out.clone(), lse=whole.lse.clone(), rest=whole.rest.clone()), 0)
        stats = parts.row_stats(grad_out, whole)
        arguments: tuple[Any, ...] = (grad_out, stats, whole, *(inputs[name] for name in "qkv"), None, graph)
        grad_k, grad_v, _ = parts.backward_sources(*arguments, bias_gradient=False)
        grad_q, _ = parts.backward_targets(*arguments, bias_gradient=False)
        return grad_q, grad_k, grad_v

    wanted = step()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        found = step()
    captured.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
