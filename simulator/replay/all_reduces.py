"""with_all_reduces(): one more all-reduce in each step, of gradients."""

import bisect
from collections.abc import Sequence
from dataclasses import replace

from simulator.errors import SpecError
from simulator.replay.links import RankPieces
from simulator.replay.nodes import Piece, PieceKind
from simulator.replay.order import inserted
from simulator.replay.ranks import Meeting
from simulator.specs.recording import DeviceOperation, KernelKind


def with_all_reduces(
    ranks: Sequence[RankPieces], meetings: Sequence[Meeting], operation: DeviceOperation
) -> tuple[list[RankPieces], list[Meeting]]:
    """Return ranks with one more all-reduce in each step, between the backward pass and the optimizer.

    It waits for the work before the optimizer's first kernel of the step on its stream, and that kernel waits for it.
    """
    found, meetings = [], list(meetings)
    for place, rank in enumerate(ranks):
        firsts = _first_updates(rank)
        if not firsts:
            raise SpecError(
                f"all_reduce needs kernels of an optimizer, and rank {rank.rank} has none: record whole steps"
            )
        pieces, boundaries = rank.pieces, list(rank.boundaries)
        for at in reversed(firsts):
            update = pieces[at]
            before = [i for i in range(at) if pieces[i].stream == update.stream and pieces[i].operation is not None]
            new = Piece(
                name=operation.name,
                kind=PieceKind.DEVICE,
                stream=operation.stream,
                duration_seconds=operation.duration_seconds,
                recorded_start_seconds=update.recorded_start_seconds,
                recorded_end_seconds=update.recorded_start_seconds,
                waits_for=tuple(before[-1:]),
                operation=operation,
                order=update.order,
            )
            pieces = inserted(pieces, at, new)
            boundaries = [index + (index >= at) for index in boundaries]
            meetings = [_moved(meeting, place, at) for meeting in meetings]
        found.append(replace(rank, pieces=pieces, boundaries=tuple(boundaries)))
    return found, meetings


def _first_updates(rank: RankPieces) -> list[int]:
    """Return the first kernel of the optimizer of each step, by when it was launched."""
    found: dict[int, int] = {}
    inner = rank.recorded_boundaries[1:-1]
    updates = [i for i, one in enumerate(rank.pieces) if one.operation and one.operation.kind is KernelKind.OPTIMIZER]
    for index in updates:
        found.setdefault(bisect.bisect_right(inner, rank.pieces[index].order), index)
    return sorted(found.values())


def _moved(meeting: Meeting, place: int, at: int) -> Meeting:
    members = tuple((one, index + (one == place and index >= at)) for one, index in meeting.members)
    return replace(meeting, members=members)
