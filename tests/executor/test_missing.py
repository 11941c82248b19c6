"""Who is missing, judged by hand from what ranks last said."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.layer_attention import note_without_peers
from executor.missing import Beat, Seen, beat_from_json, lost_sentence, verdict
from executor.position import Position

LIMIT_SECONDS = 10.0


def seen(num_reached: int, place: str, still_seconds: float, *, silent_seconds: float = 0.0, **fields) -> Seen:
    known = {"number": 5, "is_waiting": "exchange" in place, "is_in_call": "exchange" in place}
    beat = Beat(num_reached=num_reached, place=place, still_seconds=still_seconds, **(known | fields))
    return Seen(beat=beat, silent_seconds=silent_seconds)


WAITING = seen(8, "layer1.exchange of step 7", 11.0)


def test_a_rank_that_never_comes_to_a_collective_is_named_with_its_task():
    ranks = [WAITING, WAITING, seen(7, "layer0.attention of step 7", 31.0)]
    assert verdict(ranks, 0, LIMIT_SECONDS) == (
        "rank 2 has not come to layer1.exchange of step 7 within 10 s; it was last seen in layer0.attention of step 7, "
        "31 s ago, and is still there; if it is only slow, raise train.collective_timeout_seconds"
    )


def test_a_rank_that_was_stopped_is_named_wherever_it_was():
    stopped = seen(8, "layer1.exchange of step 7", 0.2, silent_seconds=11.0)
    assert verdict([WAITING, stopped, WAITING], 0, LIMIT_SECONDS) == (
        "rank 1 has not got through layer1.exchange of step 7 within 10 s; it was last seen in layer1.exchange of step "
        "7, 11 s ago, and gives no sign of life"
    )


def test_several_missing_ranks_are_named_together():
    late = seen(7, "layer0.attention of step 7", 12.0)
    assert verdict([late, WAITING, late, late], 1, LIMIT_SECONDS).startswith(
        "ranks 0, 2 and 3 have not come to layer1.exchange of step 7 within 10 s; rank 0 was last seen in "
    )


def test_the_place_is_where_the_missing_rank_is_awaited_not_where_others_are_held_up_by_that():
    ahead = seen(12, "gradients.exchange of step 7", 11.0)
    late = seen(7, "layer0.attention of step 7", 12.0)
    assert verdict([ahead, WAITING, late], 0, LIMIT_SECONDS).startswith("rank 2 has not come to layer1.exchange")


@pytest.mark.parametrize(
    "ranks",
    [
        # Rank 0 has not waited for long.
        [seen(8, "layer1.exchange of step 7", 9.0), seen(7, "layer0.attention of step 7", 31.0)],
        # The other is slow, but got on 3 s ago.
        [WAITING, seen(7, "layer0.attention of step 7", 3.0)],
        # Rank 0 itself is the one behind.
        [seen(7, "layer0.attention of step 7", 31.0), WAITING],
        # All are at the same long work, and none waits.
        [seen(7, "the batch of step 7", 31.0), seen(7, "the batch of step 7", 31.0)],
        # The other one needs nobody any more, and rank 0 waits for nobody.
        [seen(9, "the end of the run", 31.0), seen(9, "the end of the run", 0.0, silent_seconds=31.0, has_ended=True)],
    ],
)
def test_nobody_is_missing_while_there_is_hope(ranks):
    assert verdict(ranks, 0, LIMIT_SECONDS) == ""


def test_a_rank_held_up_inside_the_task_of_a_collective_but_not_in_its_call_is_named():
    late = seen(8, "layer1.exchange of step 7", 14.0, is_in_call=False)
    found = verdict([replace(WAITING, silent_seconds=3.0), late], 0, LIMIT_SECONDS)
    assert found.startswith("rank 1 has not got through layer1.exchange of step 7 within 10 s; it was last seen in")


def test_a_collective_that_all_came_to_and_none_leaves_is_the_networks_fault():
    here = seen(8, "layer1.exchange of step 7", 13.5)
    sentence = verdict([here, here], 0, LIMIT_SECONDS)
    assert sentence.startswith("all ranks came to layer1.exchange of step 7, but it did not end within 10 s")


def test_a_rank_that_has_ended_while_another_waits_is_missing():
    ended = seen(8, "the end of the run", 0.0, silent_seconds=11.0, has_ended=True)
    sentence = verdict([WAITING, ended], 0, LIMIT_SECONDS)
    assert sentence.startswith("rank 1 has not come to layer1.exchange of step 7 within 10 s; it was last seen in the")


def test_a_rank_that_has_gone_is_named_once_it_is_silent():
    gone = seen(8, "layer1.exchange of step 7", 0.5, silent_seconds=3.0)
    assert lost_sentence([WAITING, replace(gone, silent_seconds=2.0)], 0) == ""
    assert lost_sentence([WAITING, gone], 0) == (
        "rank 1 has gone; it was last seen in layer1.exchange of step 7, 4 s ago, and gives no sign of life"
    )


beats = st.builds(
    Beat,
    number=st.integers(0, 9),
    num_reached=st.integers(-1, 5),
    is_waiting=st.booleans(),
    place=st.text(max_size=9),
    still_seconds=st.floats(0, 30),
    is_in_call=st.booleans(),
    has_ended=st.booleans(),
    host=st.text(max_size=9),
)


@given(beat=beats)
def test_a_beat_survives_the_store(beat):
    assert beat_from_json(beat.to_json()) == beat


@given(beats=st.lists(beats, min_size=2, max_size=4), silences=st.lists(st.floats(0, 30), min_size=4, max_size=4))
def test_a_rank_that_gets_further_is_never_missing_and_none_judges_itself(beats, silences):
    ranks = [Seen(beat=beat, silent_seconds=silent) for beat, silent in zip(beats, silences, strict=False)]
    ranks[0] = replace(ranks[0], silent_seconds=0.0)
    sentence = verdict(ranks, 0, LIMIT_SECONDS)
    moving = [rank for rank, found in enumerate(ranks) if found.still_seconds <= LIMIT_SECONDS]
    head = sentence.partition(" within ")[0]
    if head.startswith("rank"):
        assert all(str(rank) not in head.split(" ha")[0] for rank in moving if not ranks[rank].beat.has_ended)
        assert "0" not in head.split(" ha")[0] or not beats[0].is_in_call
    if 0 in moving:
        assert sentence == ""


def test_a_rank_alone_on_its_host_notes_the_exchanges_inside_other_hosts_forward_and_back():
    position, x = Position(), torch.ones(2, requires_grad=True)
    doubled = 2 * x
    note_without_peers(doubled, position, "layer0.host_exchange")
    assert (position.num_reached, position.is_waiting) == (1, False)
    doubled.sum().backward()
    assert (position.num_reached, position.is_waiting) == (2, False)
    with torch.no_grad():
        note_without_peers(x.detach(), position, "layer0.host_exchange")
    assert position.num_reached == 3
