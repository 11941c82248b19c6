"""Who is missing: a judgement from what every rank last said of itself."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

# Ranks beat four times a second. One that has not for so long is stopped, dead or cut off, and not on a busy host.
SILENT_SECONDS = 3.0
# What the reader is told of a rank changes sooner.
_QUIET_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a rank says of itself.

    Attributes:
        number: of its beats so far.
        num_reached, is_waiting: as in `Position`.
        place: where it is, in words.
        still_seconds: since when it has been there.
        is_in_call: its main thread is inside torch.distributed; known of ranks that get no further.
        has_ended: it needs no other rank any more.
        host, pid, created_seconds: its process; the last is since the epoch.
    """

    number: int
    num_reached: int
    is_waiting: bool
    place: str
    still_seconds: float
    is_in_call: bool = False
    has_ended: bool = False
    host: str = ""
    pid: int = 0
    created_seconds: float = 0.0

    def to_json(self) -> str:
        """Return the beat as text."""
        return json.dumps(asdict(self))


def beat_from_json(text: str | bytes) -> Beat:
    """Return the beat that a text holds."""
    return Beat(**json.loads(text))


# Of a rank that has not begun to beat.
NO_BEAT = Beat(number=0, num_reached=-1, is_waiting=False, place="the start of the run", still_seconds=0.0)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A rank's last beat, and for how long no new one has come."""

    beat: Beat
    silent_seconds: float

    @property
    def still_seconds(self) -> float:
        """Seconds in which the rank got no further, as far as anyone knows."""
        return self.beat.still_seconds + self.silent_seconds

    @property
    def is_silent(self) -> bool:
        """Whether the rank is stopped, dead or cut off."""
        return self.silent_seconds >= SILENT_SECONDS


def verdict(ranks: Sequence[Seen], me: int, limit_seconds: float) -> str:
    """Return who keeps a rank waiting for longer than the limit, in a sentence; empty while there is hope.

    A rank that gets further, however slowly, is never missing: a slow rank is no lost one.

    Args:
        ranks: what each rank said last.
        me: the rank that judges.
    """
    mine = ranks[me]
    if mine.still_seconds <= limit_seconds:
        return ""
    stuck = {rank: seen for rank, seen in enumerate(ranks) if rank != me and seen.still_seconds > limit_seconds}
    if missing := _missing(ranks, stuck, mine):
        return _sentence(ranks, missing, _awaited(ranks, missing, me), limit_seconds)
    all_here = len(stuck) == len(ranks) - 1 and all(
        seen.beat.is_waiting and seen.beat.num_reached == mine.beat.num_reached for seen in ranks
    )
    # Somebody may have fallen silent in there, which is known a little later.
    if not all_here or mine.still_seconds <= limit_seconds + SILENT_SECONDS:
        return ""
    outside = [rank for rank, seen in enumerate(ranks) if not seen.beat.is_in_call]
    if len(outside) < len(ranks) and outside:
        return _sentence(ranks, outside, mine.beat.place, limit_seconds)
    return (
        f"all ranks came to {mine.beat.place}, but it did not end within {limit_seconds:g} s: look at the network "
        "between the hosts and at the devices"
    )


def lost_sentence(ranks: Sequence[Seen], me: int) -> str:
    """Return which rank has fallen silent, in a sentence; empty if none has."""
    silent = [rank for rank, seen in enumerate(ranks) if rank != me and seen.is_silent and not seen.beat.has_ended]
    if not silent:
        return ""
    return f"{_names(silent)} has gone; {_last_seen(ranks, silent)}"


def _missing(ranks: Sequence[Seen], stuck: Mapping[int, Seen], mine: Seen) -> list[int]:
    """Return the ranks that the others wait for, of those that get no further."""
    silent = [rank for rank, seen in stuck.items() if seen.is_silent and not seen.beat.has_ended]
    if silent:
        return silent
    fewest = min((seen.beat.num_reached for seen in ranks if not seen.beat.has_ended), default=0)
    if mine.beat.num_reached > fewest:
        behind = [rank for rank, seen in enumerate(ranks) if seen.beat.num_reached == fewest]
        return [rank for rank in behind if rank in stuck]
    if mine.beat.is_waiting:
        return [rank for rank, seen in enumerate(ranks) if seen.beat.has_ended]
    return []


def _awaited(ranks: Sequence[Seen], missing: Sequence[int], me: int) -> str:
    """Return the place at which the missing ranks are awaited: the first that other ranks are stuck at."""
    reached = min(ranks[rank].beat.num_reached for rank in missing)
    here = [seen.beat for rank, seen in enumerate(ranks) if rank not in missing and not seen.beat.has_ended]
    ahead = [beat for beat in here if beat.num_reached >= reached and beat.is_waiting]
    return min(ahead, key=lambda beat: beat.num_reached, default=ranks[me].beat).place


def _sentence(ranks: Sequence[Seen], missing: Sequence[int], awaited: str, limit_seconds: float) -> str:
    seen = [ranks[rank] for rank in missing]
    if any(rank.beat.place != awaited for rank in seen):
        opening = f"{_names(missing)} {_have(missing)} not come to {awaited}"
    else:
        opening = f"{_names(missing)} {_have(missing)} not got through {awaited}"
    fix = (
        ""
        if all(rank.silent_seconds >= _QUIET_SECONDS for rank in seen)
        else "; if it is only slow, raise train.collective_timeout_seconds"
    )
    return f"{opening} within {limit_seconds:g} s; {_last_seen(ranks, missing)}{fix}"


def _last_seen(ranks: Sequence[Seen], missing: Sequence[int]) -> str:
    seen = ranks[missing[0]]
    ago = f", {seen.still_seconds:.0f} s ago"
    state = ", and gives no sign of life" if seen.silent_seconds >= _QUIET_SECONDS else ", and is still there"
    who = "it was" if len(missing) == 1 else f"rank {missing[0]} was"
    return f"{who} last seen in {seen.beat.place}{ago}{state}"


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"
