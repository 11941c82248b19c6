"""Ranks of one run side by side: one clock, and the collectives that they take part in together.

A collective ends on all its ranks at about the same instant, which brings clocks together; it begins when the last rank
arrives, so what the last one took is its cost, and what the others took beyond that is waiting.
"""

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from simulator.replay.links import RankPieces
from simulator.replay.nodes import Piece
from simulator.replay.steps import Window
from simulator.specs.recording import DeviceOperation, Message, Recording

# Messages between two ranks, of which a trace does not say which two.
PAIRWISE = frozenset({"send_recv", "send", "recv"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A collective of several recorded ranks.

    Attributes:
        members: place of the rank among the recordings, and index of its piece.
        cost_seconds: what it took once all had arrived.
    """

    message: Message
    members: tuple[tuple[int, int], ...]
    cost_seconds: float


def clock_shifts(recordings: Sequence[Recording], windows: Sequence[Window]) -> tuple[list[float], float]:
    """Return what to add to each recording's instants so that the earliest window begins at 0, and the clocks' spread.

    The spread is how far ends of collectives, which should be one instant, still lie apart in the median.
    """
    origin = min(recording.origin_nanoseconds for recording in recordings)
    shifts = [(recording.origin_nanoseconds - origin) / 1e9 for recording in recordings]
    apart: list[float] = []
    ends = [
        {key: operation.end_seconds for key, (_, operation) in _keyed(_in_window(recording, window)).items()}
        for recording, window in zip(recordings, windows, strict=True)
    ]
    for place in range(1, len(recordings)):
        common = ends[0].keys() & ends[place].keys()
        if common:
            differences = [ends[0][key] + shifts[0] - ends[place][key] for key in common]
            shifts[place] = statistics.median(differences)
            apart += [abs(difference - shifts[place]) for difference in differences]
    begin = min(window.boundaries[0] + shift for window, shift in zip(windows, shifts, strict=True))
    return [shift - begin for shift in shifts], statistics.median(apart) if apart else 0.0


def _in_window(recording: Recording, window: Window) -> list[tuple[int, DeviceOperation]]:
    begin, end = window.boundaries[0], window.boundaries[-1]
    return [(i, one) for i, one in enumerate(recording.operations) if begin <= one.start_seconds < end]


_Key = tuple[str, str, int]  # operation, group, and which of these on its rank


def _keyed(operations: Sequence[tuple[int, DeviceOperation]]) -> dict[_Key, tuple[int, DeviceOperation]]:
    """Return collectives by what tells them apart on every rank of their group."""
    counts: Counter[tuple[str, str]] = Counter()
    found = {}
    for index, operation in operations:
        message = operation.message
        if message is not None and message.operation not in PAIRWISE and message.num_ranks != 1:
            name = (message.operation, message.group_name or str(message.group))
            found[(*name, counts[name])] = (index, operation)
            counts[name] += 1
    return found


def met(ranks: Sequence[RankPieces], num_ranks: int | None) -> tuple[list[RankPieces], list[Meeting], list[str]]:
    """Return ranks whose collectives know their meeting, the meetings, and in sentences what could not be matched.

    Args:
        num_ranks: of the run; None where unknown.
    """
    found: dict[_Key, dict[int, tuple[int, DeviceOperation]]] = defaultdict(dict)
    for place, rank in enumerate(ranks):
        device = [(index, piece.operation) for index, piece in enumerate(rank.pieces) if piece.operation is not None]
        device.sort(key=lambda item: rank.pieces[item[0]].order)
        for key, member in _keyed(device).items():
            found[key][place] = member
    place_of = {rank.rank: place for place, rank in enumerate(ranks)}
    meetings: list[Meeting] = []
    alone: Counter[str] = Counter()
    for key, members in sorted(found.items(), key=lambda item: min(index for index, _ in item[1].values())):
        group = next((one.message.group for _, one in members.values() if one.message and one.message.group), ())
        wanted = set(group) if group else set(range(num_ranks if num_ranks is not None else len(ranks)))
        if len(wanted) < 2 or not wanted <= place_of.keys() or {place_of[rank] for rank in wanted} != members.keys():
            alone[key[0]] += len(members)
            continue
        meetings.append(_meeting(ranks, {place: index for place, (index, _) in sorted(members.items())}))
    notes = [
        f"{count:,} times {operation} of ranks that were not all recorded, or not as often: kept as it was recorded, "
        "the wait for other ranks included"
        for operation, count in sorted(alone.items())
    ]
    return _with_meetings(ranks, meetings), meetings, notes


def _meeting(ranks: Sequence[RankPieces], index_of: Mapping[int, int]) -> Meeting:
    members = tuple(index_of.items())
    pieces = [ranks[place].pieces[index] for place, index in members]
    begin = max(piece.recorded_start_seconds for piece in pieces)
    end = statistics.median(piece.recorded_end_seconds for piece in pieces)
    last_arrival = min(pieces, key=lambda piece: piece.duration_seconds)
    operation = last_arrival.operation
    assert operation is not None
    assert operation.message is not None
    # The shortest is the last to arrive; clocks apart may say otherwise, and then the shortest is nearer.
    cost = min(last_arrival.duration_seconds, max(end - begin, 0.5 * last_arrival.duration_seconds))
    sizes = [one.operation.message.num_bytes or 0 for one in pieces if one.operation and one.operation.message]
    message = replace(operation.message, num_bytes=max(sizes) or None, num_ranks=len(members))
    return Meeting(message=message, members=members, cost_seconds=cost)


def _with_meetings(ranks: Sequence[RankPieces], meetings: Sequence[Meeting]) -> list[RankPieces]:
    pieces: list[list[Piece]] = [list(rank.pieces) for rank in ranks]
    for number, meeting in enumerate(meetings):
        for place, index in meeting.members:
            piece = pieces[place][index]
            waited = max(piece.duration_seconds - meeting.cost_seconds, 0.0)
            pieces[place][index] = replace(piece, meeting=number, recorded_wait_seconds=waited)
    return [replace(rank, pieces=tuple(found)) for rank, found in zip(ranks, pieces, strict=True)]


def with_likely_waits(rank: RankPieces) -> RankPieces:
    """Return a rank whose collectives that met nobody know how long they likely waited: longer than the fastest alike.

    The fastest of the same operation, bytes and group stands for its cost, as nobody waited less.
    """
    alike: dict[Message, list[float]] = defaultdict(list)
    for piece in rank.pieces:
        if piece.operation is not None and piece.operation.message is not None and piece.meeting is None:
            alike[piece.operation.message].append(piece.duration_seconds)
    found = []
    for piece in rank.pieces:
        operation = piece.operation
        if operation is not None and operation.message is not None and piece.meeting is None:
            waited = operation.waiting_seconds
            if not waited and operation.message.num_bytes is not None:
                waited = piece.duration_seconds - min(alike[operation.message])
            piece = replace(piece, recorded_wait_seconds=waited)
        found.append(piece)
    return replace(rank, pieces=tuple(found))
