"""The Triton kernels against fp64; without a GPU in Triton's interpreter, with work lists that use every form."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from executor.attention.edges import edge_attention
from executor.attention.graph import EdgeGraph
from executor.attention.work import WorkList, build_work_list
from simulator.specs.program import MAX_SHORT_EDGES
from tests.executor.attention_reference import Case, Heads, Layout, case_of, cases, relative_errors, run_attention

pytest.importorskip("triton", reason="this build of torch comes without Triton")
gpu = pytest.importorskip("executor.attention.gpu")
on_kernels = pytest.importorskip("tests.executor.on_kernels")

# The interpreter computes with NumPy also what a mask or a choice leaves out, such as the logarithm of an empty sum.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

# Whole blocks; padded columns; grouped and padded heads; more heads than a block holds; columns of a whole block.
HEADS = (
    Heads(4, 4, 16, False),
    Heads(3, 3, 20, True),
    Heads(6, 2, 8, True),
    Heads(5, 1, 12, False),
    Heads(9, 9, 32, False),
    Heads(2, 2, 128, True),
)
BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    graph: EdgeGraph,
    *,
    edge_bias: Tensor | None,
    edge_features: Tensor | None,
    dropout: float,
    dropout_key: Tensor,
    scale: float | None,
    return_lse: bool,
    max_short_edges: int = 3,
    max_piece_edges: int = 5,
    wide: bool = False,
) -> Any:
    """Attend by the kernels, with rows of four edges long already and rows of six in pieces."""
    assert return_lse
    transpose = graph.transpose
    work, transpose_work = (
        build_work_list(indptr, max_short_edges=max_short_edges, max_piece_edges=max_piece_edges)
        for indptr in (graph.indptr_N1, transpose.indptr_M1)
    )
    if wide:
        work, transpose_work = (dataclasses.replace(w, first_I=w.first_I.long()) for w in (work, transpose_work))
        transpose = dataclasses.replace(transpose, position_E=transpose.position_E.long())
    # Where cached properties keep what they made.
    graph.__dict__.update(work=work, transpose=transpose)
    transpose.__dict__["work"] = transpose_work
    scale = q.shape[2] ** -0.5 if scale is None else scale
    call = (dropout_key if dropout > 0 else None, graph, scale, dropout)
    return on_kernels.OnKernels.apply(q, k, v, edge_bias, edge_features, call)


def assert_right(case: Case, dtype: torch.dtype, **options: Any) -> None:
    errors = relative_errors(case, dtype, attend=functools.partial(attend, **options))
    assert max(errors.values()) <= BOUNDS[dtype], errors


@pytest.mark.parametrize("dtype", BOUNDS)
@settings(max_examples=6)
@given(case=cases(HEADS, max_edges=40))
def test_kernels_equal_the_reference(dtype, case):
    assert_right(case, dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-15), (torch.float16, 2**-18)], ids=str)
def test_eight_bits_hold_what_rounding_takes(dtype, bound):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    numbers = torch.randn(1024, generator=torch.Generator().manual_seed(0)).to(device)
    numbers[:3] = torch.tensor([0.0, 1.0, -1.99999])  # the last is rounded into the next power of two
    rounded, found = numbers.to(dtype), torch.empty_like(numbers)
    on_kernels.there_and_back[(1,)](numbers, rounded, found, 1024)
    assert found[0] == 0.0
    assert ((found - numbers).abs() <= bound * numbers.abs()).all()


# A hub of both kinds, self loops, multi-edges and nodes without edges.
HUBS = [(0, node) for node in range(12)] + [(node, 0) for node in range(12)] + [(3, 3), (3, 3), (14, 15)]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_pieces_of_long_rows_are_joined(heads):
    case = case_of(
        HUBS,
        17,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        has_features=heads.has_features,
        has_bias=True,
        dropout=0.3,
        layout=Layout.VIEWS,
    )
    assert_right(case, torch.float32)


def test_offsets_beyond_32_bits_take_the_wide_path(monkeypatch):
    monkeypatch.setattr(gpu, "MAX_INT32", 0)
    assert_right(case_of(HUBS, 17, has_bias=True, has_features=True, dropout=0.3), torch.float32, wide=True)


@pytest.mark.parametrize("edges", [[], [(0, 0)]])
def test_one_node_with_and_without_an_edge(edges):
    assert_right(case_of(edges, 1), torch.float32)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_scores_around_a_thousand_stay_finite_and_right(sign):
    case = case_of(HUBS, 17, spread=300.0 * sign, head_size=16)
    errors = relative_errors(case, torch.float32, attend=attend)
    # A score of a thousand has an error of 6e-5 in fp32, which is that of its weight.
    assert max(errors.values()) <= 1e-3, errors


def test_sharp_weights_in_bf16_leave_gradients_right():
    case = case_of(HUBS, 17, spread=12.0, head_size=16)
    assert_right(case, torch.bfloat16)


def constant_outputs(case: Case, dtype: torch.dtype, device: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the outputs of targets with edges, and what they should be: the value that all sources have."""
    inputs = {name: value.to(device) for name, value in case.inputs(dtype).items()}
    values = torch.full_like(inputs["v"], 0.3)
    extras = {"edge_bias": None, "edge_features": None, "dropout": 0.0, "scale": None, "return_lse": True}
    out, _ = options["attend"](
        inputs["q"],
        inputs["k"],
        values,
        case.graph(device),
        dropout_key=torch.tensor([0, 0], device=device),
        **extras,
    )
    has_edges_N = torch.bincount(case.target_E, minlength=case.num_targets) > 0
    return out[has_edges_N.to(device)], values[:1].expand(int(has_edges_N.sum()), -1, -1)


def test_constant_values_stay_constant_in_fp16():
    # Of bf16 the interpreter cuts digits off where GPUs round.
    out, wanted = constant_outputs(case_of(HUBS, 17), torch.float16, "cpu", attend=attend)
    assert torch.equal(out, wanted)


def test_runs_give_the_same_bits():
    case = case_of(HUBS, 17, has_bias=True, has_features=True, dropout=0.3)
    first, second = (run_attention(case, torch.bfloat16, attend=attend) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_graphs_that_share_a_work_list_share_no_kernel_that_is_compiled_for_one(monkeypatch):
    case = case_of(HUBS, 17)
    q, k, v = case.inputs().values()
    key = torch.tensor([1, 2])
    first = case.graph()
    shifted_E = torch.cat([first.source_E[:1], first.source_E])[1:]  # begins off 16 bytes
    others = (
        dataclasses.replace(first, same_rows_as=first, edge_id_E=torch.arange(len(HUBS))),
        dataclasses.replace(first, same_rows_as=first, source_E=shifted_E),
    )

    def specialisation(graph: EdgeGraph) -> object:
        return gpu._Extras(None, None, key, graph, (q, k, v)).specialisation

    assert specialisation(first) == specialisation(dataclasses.replace(first, same_rows_as=first))
    for other in others:
        assert other.work is first.work
        assert specialisation(other) != specialisation(first)
    narrow = specialisation(first)
    monkeypatch.setattr(gpu, "MAX_INT32", 0)  # as if there were more sources
    assert specialisation(first) != narrow


def pieces(work: WorkList) -> list[tuple[int, int]]:
    """Return row and edge of every edge of a work list, sorted."""
    found = []
    for row, first, count in zip(work.row_I.tolist(), work.first_I.tolist(), work.count_I.tolist(), strict=True):
        found += [(row, edge) for edge in range(first, first + count)]
    return sorted(found)


@given(case=cases(max_edges=60))
def test_a_work_list_has_every_row_and_every_edge_once(case):
    graph = case.graph()
    for max_short, max_piece in ((MAX_SHORT_EDGES, None), (2, 4), (0, 1)):
        work = build_work_list(graph.indptr_N1, max_short_edges=max_short, max_piece_edges=max_piece)
        assert pieces(work) == [(int(row), edge) for edge, row in enumerate(case.target_E)]
        assert set(work.row_I.tolist()) == set(range(case.num_targets))
        is_split = work.partial_I >= 0
        assert work.partial_I[is_split].tolist() == list(range(work.num_partials))
        owners = [
            row
            for row, count in zip(work.split_row_S.tolist(), work.split_count_S.tolist(), strict=True)
            for _ in range(count)
        ]
        assert work.row_I[: work.num_long][is_split].tolist() == owners


def test_rows_of_one_degree_have_the_same_work_without_a_look_at_them():
    indptr_N1 = torch.arange(8) * 5
    source_E = torch.arange(35, dtype=torch.int32) % 9
    even = EdgeGraph(indptr_N1=indptr_N1, source_E=source_E, num_sources=9, row_degree=5).work
    assert pieces(even) == pieces(build_work_list(indptr_N1))
    assert even.num_long == even.num_partials == 0


def random_case(num_nodes: int, num_edges: int, **options: Any) -> Case:
    """Return edges of which a third lead into one node and a third out of another."""
    generator = torch.Generator().manual_seed(1)
    source_E, target_E = torch.randint(0, num_nodes, (2, num_edges), generator=generator)
    target_E[: num_edges // 3], source_E[-num_edges // 3 :] = 1, 2
    order_E = torch.sort(target_E, stable=True).indices
    return Case(
        source_E=source_E[order_E],
        target_E=target_E[order_E],
        num_targets=num_nodes,
        num_sources=num_nodes,
        **options,
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dtype"), list(zip(HEADS, 2 * list(BOUNDS), strict=True)), ids=str)
def test_operators_on_a_gpu_equal_the_reference(heads, dtype):
    case = random_case(
        300,
        6000,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_size=heads.head_size,
        has_features=heads.has_features,
        has_bias=True,
        dropout=0.3,
        layout=Layout.VIEWS,
    )
    errors = relative_errors(case, dtype, "cuda")
    assert max(errors.values()) <= BOUNDS[dtype], errors


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS)
def test_hubs_of_a_hundred_thousand_edges_on_a_gpu(dtype):
    errors = relative_errors(random_case(50, 300_000, num_heads=8, num_kv_heads=8), dtype, "cuda")
    assert max(errors.values()) <= BOUNDS[dtype], errors


@pytest.mark.gpu
def test_constant_values_stay_constant_in_bf16_on_a_gpu():
    out, wanted = constant_outputs(random_case(300, 6000), torch.bfloat16, "cuda", attend=edge_attention)
    assert torch.equal(out, wanted)
