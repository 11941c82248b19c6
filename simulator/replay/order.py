"""Pieces of a rank in another order, when what they wait for changes."""

import bisect
import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from simulator.replay.nodes import Piece


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """A new piece right before an old one.

    Attributes:
        at: index of the old piece.
        piece: what comes there; it waits for old pieces by their old indices.
        after: numbers of other additions that it waits for too.
    """

    at: int
    piece: Piece
    after: tuple[int, ...] = ()


def with_added(pieces: Sequence[Piece], additions: Sequence[Addition]) -> tuple[tuple[Piece, ...], list[int]]:
    """Return pieces with new ones among them, and the new index of each old piece.

    Those at one place keep their order.
    """
    in_order = sorted(range(len(additions)), key=lambda number: (additions[number].at, number))
    starts = [additions[number].at for number in in_order]
    index_of = {number: additions[number].at + rank for rank, number in enumerate(in_order)}
    new_index = [index + bisect.bisect_right(starts, index) for index in range(len(pieces))]
    found = [
        (new_index[index], replace(piece, waits_for=tuple(new_index[one] for one in piece.waits_for)))
        for index, piece in enumerate(pieces)
    ]
    for number, addition in enumerate(additions):
        waits = [new_index[one] for one in addition.piece.waits_for] + [index_of[one] for one in addition.after]
        found.append((index_of[number], replace(addition.piece, waits_for=tuple(sorted(waits)))))
    return tuple(piece for _, piece in sorted(found, key=lambda item: item[0])), new_index


def reordered(
    pieces: Sequence[Piece], needed: Sequence[set[int]], wished: Mapping[int, set[int]]
) -> tuple[tuple[Piece, ...], list[int]]:
    """Return pieces so that each comes after all that it waits for, and the new index of each old one.

    Args:
        needed: of each piece, indices of those that must end first; the order of its stream comes on top.
        wished: further ones; those that would make pieces wait for one another are left out.
    """
    missing, followers, held = _edges(pieces, needed, wished)
    ready = [index for index, count in enumerate(missing) if not count]
    heapq.heapify(ready)
    placed: list[int] = []
    new_index = [-1] * len(pieces)
    waits: list[set[int]] = [set(found) for found in needed]
    while len(placed) < len(pieces):
        if not ready:
            _give_up_a_wish(new_index, missing, held, followers, ready)
            continue
        index = heapq.heappop(ready)
        new_index[index] = len(placed)
        placed.append(index)
        for follower in followers[index]:
            if index in held.get(follower, ()):
                waits[follower].add(index)
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, follower)
    found = tuple(
        replace(pieces[index], waits_for=tuple(sorted(new_index[one] for one in waits[index]))) for index in placed
    )
    return found, new_index


def _edges(
    pieces: Sequence[Piece], needed: Sequence[set[int]], wished: Mapping[int, set[int]]
) -> tuple[list[int], dict[int, list[int]], dict[int, set[int]]]:
    """Return how many pieces each one waits for, who follows each, and the wishes that nothing else asks for."""
    last_on: dict[str, int] = {}
    missing = [0] * len(pieces)
    followers: dict[int, list[int]] = defaultdict(list)
    held: dict[int, set[int]] = {}
    for index, piece in enumerate(pieces):
        before = set(needed[index])
        if piece.stream in last_on:
            before.add(last_on[piece.stream])
        last_on[piece.stream] = index
        held[index] = set(wished.get(index, ())) - before - {index}
        for one in before | held[index]:
            missing[index] += 1
            followers[one].append(index)
    return missing, followers, held


def _give_up_a_wish(
    new_index: Sequence[int],
    missing: list[int],
    held: dict[int, set[int]],
    followers: dict[int, list[int]],
    ready: list[int],
) -> None:
    """Free the first piece that only wishes hold back."""
    for index, placed_at in enumerate(new_index):
        wishes = {one for one in held.get(index, ()) if new_index[one] < 0}
        if placed_at < 0 and wishes and len(wishes) == missing[index]:
            for one in wishes:
                followers[one].remove(index)
            held[index] -= wishes
            missing[index] = 0
            heapq.heappush(ready, index)
            return
    raise AssertionError("pieces wait for one another without any wish")


def inserted(pieces: Sequence[Piece], at: int, new: Piece) -> tuple[Piece, ...]:
    """Return pieces with a new one put before another, which then waits for it."""

    def moved(index: int) -> int:
        return index + 1 if index >= at else index

    found = [replace(piece, waits_for=tuple(map(moved, piece.waits_for))) for piece in pieces]
    found[at] = replace(found[at], waits_for=tuple(sorted((*found[at].waits_for, at))))
    return (*found[:at], new, *found[at:])
