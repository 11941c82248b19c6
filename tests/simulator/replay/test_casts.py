"""Casts of mixed precision, by hand."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.replay.apply import apply_change
from simulator.replay.changes import parse_change
from simulator.replay.nodes import Piece, PieceKind
from simulator.replay.order import Addition, with_added
from simulator.replay.run import replay
from tests.made_kineto import AUTOGRAD, MadeTrace
from tests.simulator.replay.test_run import US, run_of

ROWS = 1_000_000


def training() -> MadeTrace:
    """A linear layer with its activation, and the gradient of its weight."""
    trace = MadeTrace()
    trace.step(0, 0, 500)
    trace.operator("aten::addmm", 10, 20, **dims([128], [ROWS, 64], [64, 128]))
    trace.kernel("gemm", launch=20, ts=30, dur=100)
    trace.operator("aten::gelu", 32, 15, **dims([ROWS, 128]))
    trace.kernel("activation", launch=40, ts=131, dur=10)
    trace.operator("aten::mm", 150, 20, AUTOGRAD, **dims([128, ROWS], [ROWS, 64]))
    trace.kernel("gemm", launch=160, ts=170, dur=100, tid=AUTOGRAD)
    trace.operator("torch::autograd::AccumulateGrad", 200, 30, AUTOGRAD, **dims([128, 64]))
    trace.operator("aten::add_", 205, 20, AUTOGRAD, **dims([128, 64], [128, 64]))
    trace.kernel("elementwise_kernel", launch=210, ts=271, dur=2, tid=AUTOGRAD)
    return trace


def dims(*shapes: list[int], formats: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"Input Dims": list(shapes), "Input type": list(formats or ("float",) * len(shapes))}


def names(pieces: tuple[Piece, ...], stream_of: str) -> list[str]:
    stream = next(piece.stream for piece in pieces if piece.name == stream_of)
    return [piece.name for piece in pieces if piece.stream == stream and piece.kind is not PieceKind.LATENCY]


def test_a_parameter_is_cast_where_it_is_used_and_its_gradient_cast_back(tmp_path):
    run = run_of(tmp_path, training())
    changed = apply_change(run, parse_change("precision=bf16")).run
    pieces = changed.ranks[0].pieces
    # The weight before the layer's kernel, its gradient before it is added to what there is; the bias has no gradient.
    assert names(pieces, "gemm") == ["cast", "gemm", "activation", "gemm", "cast", "elementwise_kernel"]
    launches = [piece for piece in pieces if piece.name == "launch of a cast"]
    assert len({piece.stream for piece in launches}) == 2
    for piece in pieces:
        if piece.name == "cast":
            assert any(pieces[one].name == "launch of a cast" for one in piece.waits_for)
            # 8,192 numbers, 4 bytes read and 2 written of each, at 4.8 TB/s, above the time of any kernel.
            assert piece.duration_seconds == pytest.approx(1.5 * US + 8192 * 6 / 4.8e12)
    assert replay(changed).step_seconds > 0


def launch_seconds(run) -> dict[str, float]:
    pieces = apply_change(run, parse_change("precision=bf16")).run.ranks[0].pieces
    return {piece.stream: piece.duration_seconds for piece in pieces if piece.name == "launch of a cast"}


def test_a_cast_takes_the_host_as_long_as_four_operators(tmp_path):
    # 20 us from 25, where a launch returns, to 45, with one operator begun; 50 us on autograd's thread, with two.
    found = sorted(launch_seconds(run_of(tmp_path, training())).values())
    assert found == pytest.approx([4 * 20 * US, 4 * 25 * US])


def test_other_work_of_the_host_is_no_part_of_a_cast(tmp_path):
    trace = training()
    for number, launch in enumerate((60, 5000)):  # 20 us after the last launch, as usual; then much later
        trace.operator("aten::gelu", launch - 8, 15, **dims([ROWS, 128]))
        trace.kernel("activation", launch=launch, ts=launch + 300, dur=10, stream=8 + number)
    trace.events[0]["dur"] = 6000
    found = sorted(launch_seconds(run_of(tmp_path, trace)).values())
    assert found == pytest.approx([4 * 20 * US, 4 * 25 * US])


def test_casts_that_are_there_are_not_made_twice_and_go_with_full_precision(tmp_path):
    trace = training()
    trace.operator("aten::copy_", 1, 5, **dims([128, 64], [128, 64], formats=("c10::BFloat16", "float")))
    trace.kernel("elementwise_kernel_of_cast", launch=2, ts=9, dur=3)
    run = run_of(tmp_path, trace)
    again = apply_change(run, parse_change("precision=bf16")).run.ranks[0].pieces
    assert Counter(piece.name for piece in again)["cast"] == 0
    full = apply_change(run, parse_change("precision=fp32")).run.ranks[0].pieces
    (cast,) = (piece for piece in full if piece.name == "elementwise_kernel_of_cast")
    assert cast.duration_seconds == 0
    assert sum(piece.duration_seconds for piece in full) < sum(one.duration_seconds for one in run.ranks[0].pieces)


def test_without_gradients_nothing_is_cast(tmp_path):
    trace = training()
    trace.events = [event for event in trace.events if "AccumulateGrad" not in event["name"]]
    run = run_of(tmp_path, trace)
    changed = apply_change(run, parse_change("precision=bf16"))
    assert [one.name for one in changed.run.ranks[0].pieces] == [one.name for one in run.ranks[0].pieces]
    assert changed.notes == ("no gradient that autograd accumulates is recorded: casts of parameters are left out",)


@given(
    waits=st.lists(st.sets(st.integers(0, 9), max_size=3), min_size=1, max_size=10),
    places=st.lists(st.integers(0, 9), max_size=6),
)
def test_added_pieces_come_before_theirs_and_dependencies_stay(waits, places):
    def piece(name: str, waits_for: tuple[int, ...] = ()) -> Piece:
        return Piece(
            name=name,
            kind=PieceKind.HOST,
            stream="s",
            duration_seconds=1,
            recorded_start_seconds=0,
            recorded_end_seconds=1,
            waits_for=waits_for,
        )

    pieces = [piece(str(i), tuple(sorted(one for one in found if one < i))) for i, found in enumerate(waits)]
    places = [place % len(pieces) for place in places]
    additions = [
        Addition(at=place, piece=piece(f"new {n}"), after=(n - 1,) if n and places[n - 1] <= place else ())
        for n, place in enumerate(places)
    ]
    found, new_index = with_added(pieces, additions)
    assert [one.name for one in found if not one.name.startswith("new")] == [one.name for one in pieces]
    for old, one in enumerate(pieces):
        assert found[new_index[old]].name == one.name
        assert {found[index].name for index in found[new_index[old]].waits_for} == {str(i) for i in one.waits_for}
    for n, addition in enumerate(additions):
        at = next(index for index, one in enumerate(found) if one.name == f"new {n}")
        assert at < new_index[addition.at]
        assert {found[index].name for index in found[at].waits_for} == {f"new {one}" for one in addition.after}
        assert all(index < at for index in found[at].waits_for)


def test_collectives_still_meet_between_the_casts(tmp_path):
    ranks = []
    for rank in range(2):
        trace = training()
        trace.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
        trace.collective(launch=300, ts=310 + 40 * rank, dur=90 - 40 * rank)
        ranks.append(trace)
    run = run_of(tmp_path, *ranks)
    changed = apply_change(run, parse_change("precision=bf16")).run
    ((place, index), (other, other_index)) = changed.meetings[0].members
    for one, at in ((place, index), (other, other_index)):
        assert changed.ranks[one].pieces[at].meeting == 0
    assert replay(changed).step_seconds > 0
