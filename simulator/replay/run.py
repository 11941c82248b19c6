"""rebuild(), replay(): recordings to a run of tasks, streams and dependencies, and that run through the engine."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from simulator.engine import run_program
from simulator.errors import SpecError
from simulator.replay.links import RankPieces, linked
from simulator.replay.nodes import PieceKind
from simulator.replay.ranks import Meeting, clock_shifts, met, with_likely_waits
from simulator.replay.steps import window_of
from simulator.specs.cost import CollectiveCost, TaskCost
from simulator.specs.program import Phase, Program, Stream, Task, TaskKind
from simulator.specs.recording import Recording
from simulator.specs.units import Dtype

# The engine asks of a kind only whether it is that of a collective.
_PIECE, _MEETING = TaskKind.COPY_ROWS, TaskKind.ALL_REDUCE


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A recorded run, ready to be replayed.

    Attributes:
        ranks: recorded ranks.
        meetings: collectives that several of them take part in.
        num_steps: in the window of each.
        num_ranks: of the run, recorded or not; None where unknown.
        device_name: empty where unknown, or on CPUs.
        notes: what was assumed or left out, in sentences.
        clock_spread_seconds: how far ends of collectives lie apart after clocks were brought together.
    """

    ranks: tuple[RankPieces, ...]
    meetings: tuple[Meeting, ...]
    num_steps: int
    num_ranks: int | None
    device_name: str
    notes: tuple[str, ...]
    clock_spread_seconds: float

    @property
    def recorded_step_seconds(self) -> float:
        """Seconds of a step: from the begin of the first to the end of all work of the last, over their number."""
        return (
            max(piece.recorded_end_seconds for rank in self.ranks for piece in rank.pieces if _counts(piece.kind))
            / self.num_steps
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """When each piece of a run ran in a replay.

    Attributes:
        start_seconds, end_seconds: of each rank's pieces, by index.
        step_seconds: as `Run.recorded_step_seconds`.
        boundary_seconds: of each rank, the instants between its steps.
    """

    start_seconds: tuple[tuple[float, ...], ...]
    end_seconds: tuple[tuple[float, ...], ...]
    step_seconds: float
    boundary_seconds: tuple[tuple[float, ...], ...]


def rebuild(recordings: Sequence[Recording]) -> Run:
    """Return the run that recordings of its ranks, or of some of them, describe.

    Raises:
        SpecError: if ranks hold different numbers of steps, or nothing to replay.
    """
    windows = [window_of(recording) for recording in recordings]
    counts = {window.num_steps for window in windows}
    if len(counts) > 1:
        listed = ", ".join(f"{one.name} {w.num_steps}" for one, w in zip(recordings, windows, strict=True))
        raise SpecError(f"all files must hold the same number of steps, got {listed}; record the same steps")
    shifts, spread = clock_shifts(recordings, windows)
    ranks = [
        linked(recording, window, shift_seconds=shift)
        for recording, window, shift in zip(recordings, windows, shifts, strict=True)
    ]
    num_ranks = max((one.num_ranks for one in recordings if one.num_ranks is not None), default=None)
    matched, meetings, notes = met(ranks, num_ranks)
    run = Run(
        ranks=tuple(with_likely_waits(rank) for rank in matched),
        meetings=tuple(meetings),
        num_steps=counts.pop(),
        num_ranks=num_ranks,
        device_name=next((one.device_name for one in recordings if one.device_name), ""),
        notes=(f"steps are told by {windows[0].told_by}", *_notes(recordings), *notes),
        clock_spread_seconds=spread,
    )
    if run.recorded_step_seconds <= 0:
        raise SpecError(f"{recordings[0].name}: must hold work that takes time, got none; record whole steps")
    return run


def _notes(recordings: Sequence[Recording]) -> list[str]:
    found = list(dict.fromkeys(note for recording in recordings for note in recording.notes))
    return found[:8] + ([f"and {len(found) - 8} more such notes"] if len(found) > 8 else [])


def program_of(run: Run) -> Program:
    """Return a run as a program of the engine: every thread and every stream of a rank is a stream.

    All is issued at once: the host's time is that of the pieces of its threads.
    """
    groups = [tuple(place for place, _ in meeting.members) for meeting in run.meetings]
    return Program(
        tasks=tuple(
            tuple(
                Task(
                    name=f"piece {index}" if piece.meeting is None else f"meeting {piece.meeting}",
                    kind=_PIECE if piece.meeting is None else _MEETING,
                    phase=Phase.FORWARD,
                    shape=(index,),
                    dtype=Dtype.FLOAT32,
                    stream=cast(Stream, piece.stream),  # the engine only tells streams apart
                    waits_for=piece.waits_for,
                    group=() if piece.meeting is None else groups[piece.meeting],
                )
                for index, piece in enumerate(rank.pieces)
            )
            for rank in run.ranks
        )
    )


def replay(run: Run) -> Replayed:
    """Return what the engine makes of a run.

    Raises:
        PlanError: if a collective waits for a rank that never comes.
    """

    def compute_cost(place: int, task: Task) -> TaskCost:
        return TaskCost(host_seconds=0.0, device_seconds=run.ranks[place].pieces[task.shape[0]].duration_seconds)

    def collective_cost(tasks: tuple[Task, ...]) -> CollectiveCost:
        number = run.ranks[tasks[0].group[0]].pieces[tasks[0].shape[0]].meeting
        assert number is not None
        return CollectiveCost(host_seconds=0.0, latency_seconds=run.meetings[number].cost_seconds, flows=())

    spans = run_program(program_of(run), compute_cost=compute_cost, collective_cost=collective_cost, port_capacities={})
    starts = [[0.0] * len(rank.pieces) for rank in run.ranks]
    ends = [[0.0] * len(rank.pieces) for rank in run.ranks]
    for span in spans:
        starts[span.rank][span.shape[0]] = span.start_seconds
        ends[span.rank][span.shape[0]] = span.end_seconds
    last = max(
        ends[place][index]
        for place, rank in enumerate(run.ranks)
        for index, piece in enumerate(rank.pieces)
        if _counts(piece.kind)
    )
    return Replayed(
        start_seconds=tuple(map(tuple, starts)),
        end_seconds=tuple(map(tuple, ends)),
        step_seconds=last / run.num_steps,
        boundary_seconds=tuple(
            tuple(ends[place][index] for index in rank.boundaries) for place, rank in enumerate(run.ranks)
        ),
    )


def _counts(kind: PieceKind) -> bool:
    return kind is not PieceKind.LATENCY


def errors_as_recorded(run: Run, replayed: Replayed) -> tuple[float, float]:
    """Return the error of the mean step, and the mean absolute error over steps and ranks, as ratios."""
    whole = round(replayed.step_seconds / run.recorded_step_seconds - 1, 9) + 0.0  # not -0
    single = []
    for rank, boundaries in zip(run.ranks, replayed.boundary_seconds, strict=True):
        for index in range(run.num_steps):
            recorded = rank.recorded_boundaries[index + 1] - rank.recorded_boundaries[index]
            if recorded > 0:
                single.append(abs((boundaries[index + 1] - boundaries[index]) / recorded - 1))
    return whole, statistics.mean(single) if single else 0.0
