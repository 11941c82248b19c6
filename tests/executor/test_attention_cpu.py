"""What attention on CPUs adds: pieces of rows, threads, memory that is not copied, kernels without a cache on disk."""

import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from executor.attention import cpu, cpu_layout, cpu_pieces
from executor.attention.cpu_pieces import Pieces, cut_rows
from tests.executor.attention_reference import HEADS, Case, cases, relative_errors, run_attention


@pytest.fixture
def num_threads() -> Iterator[None]:
    """Give torch its number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# --- Pieces.


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 20))
def test_pieces_hold_every_edge_of_every_row_once_and_in_order(degrees, piece_edges):
    indptr = np.concatenate([[0], np.cumsum(degrees, dtype=np.int64)])
    pieces = cut_rows(indptr, piece_edges)
    found: list[tuple[int, int]] = []
    rows: list[int] = []
    for first_row, last_row, first_edge, last_edge, partial in pieces.table.tolist():
        for row in range(first_row, last_row):
            begin, end = max(indptr[row], first_edge), min(indptr[row + 1], last_edge)
            found += [(row, edge) for edge in range(begin, end)]
        rows += range(first_row, last_row)
        # A row that was cut has a piece of its own, which is not longer than asked for.
        assert partial < 0 or (last_row == first_row + 1 and 0 < last_edge - first_edge <= piece_edges)
    assert found == [(row, edge) for row in range(len(degrees)) for edge in range(indptr[row], indptr[row + 1])]
    assert sorted(set(rows)) == list(range(len(degrees)))


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(1, 20))
def test_partial_results_of_a_row_are_joined_in_order(degrees, piece_edges):
    pieces = cut_rows(np.concatenate([[0], np.cumsum(degrees, dtype=np.int64)]), piece_edges)
    cut = [row for row, degree in enumerate(degrees) if degree > piece_edges]
    assert pieces.split_rows[:, 0].tolist() == cut
    partials = [partial for partial in pieces.table[:, 4].tolist() if partial >= 0]
    assert partials == list(range(pieces.num_partials))
    row_of_partial = {int(partial): int(row) for row, _, _, _, partial in pieces.table if partial >= 0}
    for row, first, last in pieces.split_rows.tolist():
        assert {row_of_partial[partial] for partial in range(first, last)} == {row}
    assert pieces.split_rows[:, 2].tolist() == list(itertools.accumulate(np.diff(pieces.split_rows[:, 1:]).ravel()))


def test_pieces_have_about_as_many_edges_and_empty_rows_count_too():
    degrees = np.random.default_rng(0).integers(0, 60, 5000)
    pieces = cut_rows(np.concatenate([[0], np.cumsum(degrees)]), 1000)
    edges = pieces.table[:-1, 3] - pieces.table[:-1, 2]
    assert edges.max() < 1100
    assert edges.min() > 700
    empty = cut_rows(np.zeros(10_001, np.int64), 1000)
    assert len(empty.table) == pytest.approx(40, abs=1)


@given(case=cases(HEADS[:2]), piece_edges=st.integers(1, 5))
@settings(max_examples=40)
def test_cut_rows_give_what_whole_rows_do(case, piece_edges):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "pieces_of", lambda graph: _pieces_of(graph, piece_edges))
        errors = relative_errors(case)
    assert max(errors.values()) <= 1e-5, errors


def _pieces_of(graph: object, piece_edges: int) -> Pieces:
    indptr = getattr(graph, "indptr_N1", None)
    return cut_rows((graph.indptr_M1 if indptr is None else indptr).numpy(), piece_edges)  # type: ignore[attr-defined]


def test_pieces_are_made_once_for_a_graph_and_go_with_it():
    graph = some_case().graph()
    assert cpu_pieces.pieces_of(graph) is cpu_pieces.pieces_of(graph)
    num_kept = len(cpu_pieces._PIECES)
    del graph
    assert len(cpu_pieces._PIECES) == num_kept - 1


# --- Threads.


def some_case() -> Case:
    """Return rows of very different degree, among them two that are cut, in dozens of pieces."""
    generator = torch.Generator().manual_seed(0)
    degrees = torch.cat([torch.randint(0, 40, (1500,), generator=generator), torch.tensor([9000, 0, 5000])])
    source_E = torch.randint(0, 1000, (int(degrees.sum()),), generator=generator)
    source_E[::3] = 5  # a source with many edges
    target_E = torch.arange(len(degrees)).repeat_interleave(degrees)
    return Case(
        source_E=source_E,
        target_E=target_E,
        num_targets=len(degrees),
        num_sources=1000,
        num_heads=8,
        num_kv_heads=8,
        has_bias=True,
        dropout=0.2,
    )


@pytest.mark.usefixtures("num_threads")
def test_results_are_the_same_bits_in_every_run_and_on_any_number_of_threads():
    case = some_case()
    assert len(cpu_pieces.pieces_of(case.graph()).table) > 20
    found = []
    for count in (1, 1, 2, 2, 5):
        torch.set_num_threads(count)
        found.append(run_attention(case, torch.float32))
    for other in found[1:]:
        assert all(torch.equal(other[name], found[0][name]) for name in found[0])


def test_threads_run_at_once_and_never_take_ctrl_c():
    cpu._threads.cache_clear()
    meeting, masks = threading.Barrier(2, timeout=20), {}

    def work() -> None:
        meeting.wait()
        masks[threading.current_thread().name] = signal.pthread_sigmask(signal.SIG_BLOCK, [])

    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    cpu.run_in_threads(work, 2)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    other = next(name for name in masks if name.startswith("attention"))
    assert len(masks) == 2
    assert signal.SIGINT in masks[other]


def test_an_error_in_another_thread_is_raised_here():
    meeting = threading.Barrier(2, timeout=20)

    def work() -> None:
        meeting.wait()
        if threading.current_thread() is not threading.main_thread():
            raise ZeroDivisionError("there")

    with pytest.raises(ZeroDivisionError, match="there"):
        cpu.run_in_threads(work, 2)


# The parent's threads have run before the fork. Torch's own threads do not survive one, so the child runs no other
# operator that would want them.
FORKED = """
import os, torch
from executor.attention import cpu
from tests.executor.test_attention_cpu import some_case
torch.set_num_threads(2)
case = some_case()
graph, inputs = case.graph(), case.inputs()
arguments = (inputs["q"], inputs["k"], inputs["v"], inputs["bias"], None, None, graph, 0.25, 0.0)
here, _ = cpu.forward(*arguments)
if os.fork() == 0:
    os._exit(0 if (cpu.forward(*arguments)[0].numpy() == here.numpy()).all() else 3)
raise SystemExit(os.waitstatus_to_exitcode(os.wait()[1]))
"""


@pytest.mark.dist
def test_a_forked_process_goes_on():
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# --- Memory and kernels.


def test_keys_and_values_in_one_buffer_are_read_where_they_lie():
    buffer = torch.randn(6, 2, 4, 8)
    for part in buffer.unbind(1):
        rows = cpu._rows(part)
        assert rows.flat.ctypes.data == part.data_ptr()
        assert (rows.stride, rows.width, rows.flat.size) == (64, 32, 5 * 64 + 32)
    scattered = torch.randn(4, 6, 8).transpose(0, 1)
    assert cpu._rows(scattered).flat.reshape(6, 4, 8).tolist() == scattered.tolist()


def test_without_a_folder_to_write_to_kernels_are_compiled_all_the_same(monkeypatch):
    asked = []

    def refusing(*, cache: bool = False, **options: Any) -> Any:
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(cpu_layout, "njit", refusing)

    def double(numbers: np.ndarray[Any, Any]) -> None:
        for index in range(len(numbers)):
            numbers[index] *= 2

    numbers = np.arange(3)
    cpu_layout.Kernel(double).of_kind("int64")(numbers)
    assert numbers.tolist() == [0, 2, 4]
    assert asked == [True, False]


def test_each_kind_of_arguments_has_a_cache_of_its_own_that_goes_with_the_sources():
    kernel = cpu_layout.Kernel(doubled)
    kinds = [kernel.of_kind(kind) for kind in ("int64", "float32", "int64")]
    assert kinds[0] is kinds[2]
    names = {found.__qualname__ for found in kinds}
    assert names == {f"doubled_{kind}_{cpu_layout._SOURCES_HASH}" for kind in ("int64", "float32")}


def doubled(numbers: np.ndarray[Any, Any]) -> None:
    numbers *= 2
