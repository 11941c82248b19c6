"""what_if(): what each of several changes is worth; and where the time of the recorded step went."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.replay.apply import apply_change, straggler
from simulator.replay.changes import Change, Overlap, parse_change
from simulator.replay.nodes import PieceKind
from simulator.replay.run import Replayed, Run, errors_as_recorded, replay
from simulator.specs.cluster import ClusterSpec
from simulator.specs.recording import KernelKind

# A kind of kernel below this share of the device's time is not worth a line of its own.
_MIN_SHARE_RATIO = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a change is worth.

    Attributes:
        step_seconds: of the replay with it.
        saved_seconds: of each step; negative if it costs time.
        notes: what the change could not reach.
    """

    change: str
    step_seconds: float
    saved_seconds: float
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Where a rank's time went, in seconds of a step.

    Attributes:
        kernels: busy time of each kind of device work, collectives left out.
        communicating_seconds: cost of its collectives, without waiting.
        waiting_seconds: for other ranks in collectives.
        exposed_seconds: in which collectives ran, or waited, and nothing else of the rank's device did.
        device_idle_seconds: in which its device did nothing.
        unexplained_seconds: latencies on streams that nothing in the recording explains.
    """

    rank: int
    kernels: tuple[tuple[KernelKind, float], ...]
    communicating_seconds: float
    waiting_seconds: float
    exposed_seconds: float
    device_idle_seconds: float
    unexplained_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A replay as recorded, and with changes.

    Attributes:
        recorded_step_seconds: as the profiler saw it.
        replayed_step_seconds: as recorded, by the engine.
        step_error_ratio: of the latter against the former.
        mean_error_ratio: mean absolute error over single steps and ranks.
        straggler_rank: for which the others waited longest; None where one rank alone was recorded.
    """

    recorded_step_seconds: float
    replayed_step_seconds: float
    step_error_ratio: float
    mean_error_ratio: float
    num_steps: int
    num_ranks_recorded: int
    num_ranks: int | None
    device_name: str
    straggler_rank: int | None
    shares: tuple[Shares, ...]
    outcomes: tuple[Outcome, ...]
    num_pieces: int
    num_inferred: int
    clock_spread_seconds: float
    left_out: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]


def what_if(run: Run, changes: Sequence[Change], recorded_on: ClusterSpec | None = None) -> WhatIf:
    """Return what changes to a run are worth; without any, those of `usual_changes`.

    Args:
        recorded_on: cluster on which it was recorded; None for the built-in one of its device.

    Raises:
        SpecError: if a change needs something that neither the recording nor `recorded_on` tells.
    """
    plain = replay(run)
    outcomes = []
    for change in changes or usual_changes(run):
        changed = apply_change(run, change, recorded_on)
        seconds = replay(changed.run).step_seconds
        outcomes.append(
            Outcome(
                change=change.text,
                step_seconds=seconds,
                saved_seconds=plain.step_seconds - seconds,
                notes=changed.notes,
            )
        )
    step_error, mean_error = errors_as_recorded(run, plain)
    place = straggler(run.ranks, run.meetings)
    return WhatIf(
        recorded_step_seconds=run.recorded_step_seconds,
        replayed_step_seconds=plain.step_seconds,
        step_error_ratio=step_error,
        mean_error_ratio=mean_error,
        num_steps=run.num_steps,
        num_ranks_recorded=len(run.ranks),
        num_ranks=run.num_ranks,
        device_name=run.device_name,
        straggler_rank=None if place is None else run.ranks[place].rank,
        shares=tuple(shares_of(run, plain, place) for place in range(len(run.ranks))),
        outcomes=tuple(outcomes),
        num_pieces=sum(len(rank.pieces) for rank in run.ranks),
        num_inferred=sum(rank.num_inferred for rank in run.ranks),
        clock_spread_seconds=run.clock_spread_seconds,
        left_out=_left_out(run),
        notes=run.notes,
    )


def usual_changes(run: Run) -> list[Change]:
    """Return the changes that are asked for most: each large kind of kernel twice as fast, and so on."""
    seconds: dict[KernelKind, float] = defaultdict(float)
    for rank in run.ranks:
        for piece in rank.pieces:
            if piece.operation is not None:
                seconds[piece.operation.kind] += piece.duration_seconds
    total = sum(seconds.values())
    texts = [
        f"kernel:{kind}=2x"
        for kind, spent in sorted(seconds.items(), key=lambda item: -item[1])
        if spent > _MIN_SHARE_RATIO * total
    ]
    texts.append("host=2x")
    if KernelKind.COLLECTIVE in seconds:
        texts += [f"overlap={Overlap.ON}", f"overlap={Overlap.OFF}", "straggler=none"]
    return [parse_change(text) for text in texts]


def shares_of(run: Run, replayed: Replayed, place: int) -> Shares:
    """Return where the time of one rank went in a replay."""
    rank = run.ranks[place]
    kernels: dict[KernelKind, float] = defaultdict(float)
    communicating = waiting = 0.0
    busy: list[tuple[float, float]] = []
    messages: list[tuple[float, float]] = []
    for index, piece in enumerate(rank.pieces):
        if piece.kind is not PieceKind.DEVICE or piece.operation is None:
            continue
        interval = (replayed.start_seconds[place][index], replayed.end_seconds[place][index])
        length = interval[1] - interval[0]
        if piece.operation.message is None:
            kernels[piece.operation.kind] += length
            busy.append(interval)
            continue
        waited = piece.recorded_wait_seconds
        if piece.meeting is not None:
            waited = max(length - run.meetings[piece.meeting].cost_seconds, 0.0)
        communicating += length - waited
        waiting += waited
        messages.append(interval)
    working, any_work = _covered(busy), _covered([*busy, *messages])
    steps = run.num_steps
    return Shares(
        rank=rank.rank,
        kernels=tuple((kind, spent / steps) for kind, spent in sorted(kernels.items(), key=lambda item: -item[1])),
        communicating_seconds=communicating / steps,
        waiting_seconds=waiting / steps,
        exposed_seconds=(any_work - working) / steps,
        device_idle_seconds=max(replayed.step_seconds - any_work / steps, 0.0),
        unexplained_seconds=rank.unexplained_seconds / steps,
    )


def _covered(intervals: Sequence[tuple[float, float]]) -> float:
    """Return the seconds that lie in at least one interval."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(end - max(start, until), 0.0)
        until = max(until, end)
    return covered


def _left_out(run: Run) -> tuple[tuple[str, int], ...]:
    found: dict[str, int] = defaultdict(int)
    for rank in run.ranks:
        for reason, count in rank.left_out:
            found[reason] += count
    return tuple(sorted(found.items()))
