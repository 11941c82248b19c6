"""Plays out a priced program: when each task of each rank starts, waits and ends; knows no model and no cluster.

A rank has one host thread, which issues its tasks in program order, and streams, which run what was issued to them in
order. All that happens between two collectives follows by arithmetic, so only collectives and their flows are events
of simpy; `tests/simulator/test_engine.py` proves this equal to a process for each host thread and each stream. What is
alike is played once (`folding.py`).
"""

from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

import simpy

from simulator.errors import PlanError
from simulator.folding import FoldedProgram, MeetingClass, RankClass, fold
from simulator.meetings import Meeting, never_begins, ranks_text
from simulator.network import Network
from simulator.specs.cost import CollectiveCost, Flow, Port, TaskCost
from simulator.specs.program import Program, Task, shifted_group
from simulator.specs.trace import SharedSpans, Span


def run_program(
    program: Program,
    *,
    compute_cost: Callable[[int, Task], TaskCost],
    collective_cost: Callable[[tuple[Task, ...]], CollectiveCost],
    port_capacities: Mapping[Port, float],
    kind_of_rank: Sequence[Hashable] | None = None,
) -> Sequence[Span]:
    """Return what each rank does in one step, sorted by rank, start and order of issue.

    A task starts once it is issued and the task before it on its stream and those in `waits_for` have ended. A
    collective holds each member's stream from that member's start, begins when the last member has started, and
    ends for all of them when its flows have.

    Args:
        program: tasks of every rank.
        compute_cost: price of a task on a rank.
        collective_cost: price of a collective, from the tasks of its group's members in the group's order.
        port_capacities: bytes per second of every port that a flow names.
        kind_of_rank: ranks of one kind have equal costs for equal tasks; None where each may have its own.

    Raises:
        PlanError: if a collective waits for a rank that never comes.
    """
    folded = fold(
        program,
        compute_cost=compute_cost,
        collective_cost=collective_cost,
        port_capacities=port_capacities,
        kind_of_rank=kind_of_rank,
    )
    return play(folded).spans()


def step_seconds(spans: Iterable[Span]) -> float:
    """Return when the last of these spans ends; 0 if there is none."""
    return max((span.end_seconds for span in spans), default=0.0)


def play(folded: FoldedProgram, *, num_steps: int = 1, factor: Callable[[Task], float] = lambda _: 1.0) -> "Played":
    """Return the course of some steps, one right after another.

    Args:
        folded: a priced program, as `fold` returns it.
        num_steps: a host begins to issue a step as soon as it has issued the one before.
        factor: by which a task takes longer on its device than its cost says, and a collective in latency and bytes.

    Raises:
        PlanError: if a collective waits for a rank that never comes.
    """
    prices = [_scaled(each, folded, factor) for each in folded.meetings]
    meetings = [[_Meeting(*price, step) for price in prices] for step in range(num_steps)]
    ranks = [_Rank(number, each, meetings, factor) for number, each in enumerate(folded.ranks)]
    env = simpy.Environment()
    network = Network(env, folded.capacities)
    _advance(ranks, ranks, env, network)
    env.run()
    _raise_if_stuck([meeting for of_step in meetings for meeting in of_step], folded)
    return Played(folded, ranks)


class Played:
    """What the ranks of a program have done.

    Args:
        ranks: one of each class, whose steps are over.
    """

    def __init__(self, folded: FoldedProgram, ranks: Sequence["_Rank"]) -> None:
        self._folded, self._ranks = folded, ranks

    def end_seconds(self, step: int = 0) -> float:
        """Return when the last task of a step ends; 0 if there is none."""
        return max((rank.end_seconds(step) for rank in self._ranks), default=0.0)

    def spans(self, step: int = 0, *, origin_seconds: float = 0.0) -> Sequence[Span]:
        """Return what each rank did in a step, sorted by rank, start and order of issue.

        Args:
            origin_seconds: from which instants are told.
        """
        lists = tuple(tuple(rank.spans(step, origin_seconds)) for rank in self._ranks)
        folded = self._folded
        if len(lists) == len(folded.class_of_rank):
            return tuple(span for spans in lists for span in spans)
        return SharedSpans(lists=lists, list_of_rank=folded.class_of_rank, shift_of_rank=folded.shift_of_rank)

    def start_seconds(self, step: int = 0) -> float:
        """Return when the first task of a step starts; 0 if there is none."""
        return min((rank.start_seconds(step) for rank in self._ranks if rank.num_tasks), default=0.0)


@dataclass(slots=True, eq=False)
class _Meeting:
    """A class of collectives in one step, and which of its members have arrived.

    Attributes:
        arrived: members, by class of ranks and index of the task.
        begin_seconds: latest arrival so far.
    """

    of: MeetingClass
    latency_seconds: float
    flows: tuple[Flow, ...]
    step: int
    arrived: set[tuple[int, int]] = field(default_factory=set)
    begin_seconds: float = 0.0
    has_ended: bool = False

    def arrive(self, rank_class: int, index: int, at_seconds: float) -> bool:
        """Take note of when the members of a class arrive; return whether all have."""
        self.arrived.add((rank_class, index))
        self.begin_seconds = max(self.begin_seconds, at_seconds)
        return len(self.arrived) == len(self.of.members)


def _scaled(
    found: MeetingClass, folded: FoldedProgram, factor: Callable[[Task], float]
) -> tuple[MeetingClass, float, tuple[Flow, ...]]:
    """Return a class of collectives with its latency in seconds and its flows, both times a factor."""
    rank_class, index = found.members[0]
    by = factor(folded.ranks[rank_class].tasks[index])
    latency_seconds = by * found.cost.latency_seconds
    assert 0 <= latency_seconds < inf, f"latency of {found.first.name} must be >= 0 and finite"
    flows = found.flows if by == 1 else tuple(replace(flow, num_bytes=by * flow.num_bytes) for flow in found.flows)
    return found, latency_seconds, flows


class _Rank:
    """What is known of the steps of a class of ranks; an instant stays inf until all that it follows has ended.

    Args:
        number: of the class.
        meetings: of each step, by number of their class.
    """

    def __init__(
        self, number: int, of: RankClass, meetings: Sequence[Sequence[_Meeting]], factor: Callable[[Task], float]
    ) -> None:
        self.num_tasks = len(of.tasks)
        self._number, self._of, self._num_steps = number, of, len(meetings)
        self._host_seconds = [
            meetings[0][meeting].of.cost.host_seconds if cost is None else cost.host_seconds
            for cost, meeting in zip(of.costs, of.meetings, strict=True)
        ] * self._num_steps
        self._device_seconds = [
            0.0 if cost is None else cost.device_seconds * factor(task)
            for cost, task in zip(of.costs, of.tasks, strict=True)
        ] * self._num_steps
        self._require_costs()
        self._meetings = [None if meeting < 0 else of_step[meeting] for of_step in meetings for meeting in of.meetings]
        self._waits_for = [
            tuple(step * self.num_tasks + earlier for earlier in task.waits_for)
            for step in range(self._num_steps)
            for task in of.tasks
        ]
        # Those of a recorded run have names of their own.
        numbers = {stream: number for number, stream in enumerate(dict.fromkeys(task.stream for task in of.tasks))}
        self._streams = [numbers[task.stream] for task in of.tasks] * self._num_steps
        self._blocks_host = [task.blocks_host for task in of.tasks] * self._num_steps
        num_tasks = len(self._streams)
        self._start_seconds, self._end_seconds = [inf] * num_tasks, [inf] * num_tasks
        self._issue_seconds = [inf] * num_tasks
        self._num_issued = 0
        self._host_free_seconds = 0.0
        self._host_waits_for = -1
        self._stream_free_seconds = [0.0] * len(numbers)
        self._queues: list[deque[int]] = [deque() for _ in numbers]

    def _require_costs(self) -> None:
        for index, task in enumerate(self._of.tasks):
            host_seconds, device_seconds = self._host_seconds[index], self._device_seconds[index]
            assert 0 <= host_seconds < inf, f"host_seconds of {task.name} must be >= 0 and finite, got {host_seconds}"
            assert 0 <= device_seconds < inf, (
                f"device_seconds of {task.name} must be >= 0 and finite, got {device_seconds}"
            )
            for earlier in task.waits_for:
                assert 0 <= earlier < index, (
                    f"rank {self._of.ranks[0]} waits in {task.name} for task {earlier}, which is not earlier"
                )

    def advance(self) -> list[_Meeting]:
        """Work out every instant that follows from what is known; return the collectives that this completes."""
        completed: list[_Meeting] = []
        moved = True
        while moved:
            self._issue(completed)
            moved = False
            for queue in self._queues:
                while queue and self._start(queue[0], completed):
                    queue.popleft()
                    moved = True
        return completed

    def end_collective(self, step: int, index: int, end_seconds: float) -> None:
        """Take note that a collective has ended."""
        place = step * self.num_tasks + index
        self._end_seconds[place] = self._stream_free_seconds[self._streams[place]] = end_seconds

    def _issue(self, completed: list[_Meeting]) -> None:
        """Issue tasks until the host thread waits for one whose end is unknown."""
        ends, queues = self._end_seconds, self._queues
        for index in range(self._num_issued, len(ends)):
            if self._host_waits_for >= 0:
                if ends[self._host_waits_for] == inf:
                    return
                self._host_free_seconds = ends[self._host_waits_for]
                self._host_waits_for = -1
            self._host_free_seconds += self._host_seconds[index]
            self._issue_seconds[index] = self._host_free_seconds
            self._num_issued += 1
            queue = queues[self._streams[index]]
            if queue or not self._start(index, completed):
                queue.append(index)
            if self._blocks_host[index]:
                self._host_waits_for = index

    def _start(self, index: int, completed: list[_Meeting]) -> bool:
        """Start the next task of a stream, unless what it waits for has no known end; return whether it started."""
        stream, ends = self._streams[index], self._end_seconds
        start_seconds = max(self._issue_seconds[index], self._stream_free_seconds[stream])
        for earlier in self._waits_for[index]:
            if ends[earlier] > start_seconds:
                start_seconds = ends[earlier]
        if start_seconds == inf:
            return False
        self._start_seconds[index] = start_seconds
        meeting = self._meetings[index]
        if meeting is None:
            ends[index] = self._stream_free_seconds[stream] = start_seconds + self._device_seconds[index]
        else:
            self._stream_free_seconds[stream] = inf
            if meeting.arrive(self._number, index % self.num_tasks, start_seconds):
                completed.append(meeting)
        return True

    def _places(self, step: int) -> range:
        return range(step * self.num_tasks, (step + 1) * self.num_tasks)

    def start_seconds(self, step: int) -> float:
        """Return when the first task of a step starts; inf if there is none."""
        return min((self._start_seconds[place] for place in self._places(step)), default=inf)

    def end_seconds(self, step: int) -> float:
        """Return when the last task of a step ends; 0 if there is none."""
        return max((self._end_seconds[place] for place in self._places(step)), default=0.0)

    def spans(self, step: int, origin_seconds: float) -> list[Span]:
        """Return all tasks of a finished step, by start; ties by order of issue."""
        ordered = sorted(self._places(step), key=self._start_seconds.__getitem__)
        return [self._span(place, origin_seconds) for place in ordered]

    def _span(self, place: int, origin_seconds: float) -> Span:
        task, meeting = self._of.tasks[place % self.num_tasks], self._meetings[place]
        start_seconds = self._start_seconds[place]
        return Span(
            rank=self._of.ranks[0],
            step=0,
            stream=task.stream,
            name=task.name,
            kind=task.kind,
            phase=task.phase,
            shape=task.shape,
            start_seconds=start_seconds - origin_seconds,
            duration_seconds=self._end_seconds[place] - start_seconds,
            waiting_seconds=meeting.begin_seconds - start_seconds if meeting else 0.0,
            host_seconds=self._host_seconds[place],
            dtype=task.dtype,
            group=task.group,
            beyond_cache_ratio=task.beyond_cache_ratio,
        )


def _advance(moving: Iterable[_Rank], ranks: Sequence[_Rank], env: simpy.Environment, network: Network) -> None:
    """Let these ranks go on as far as they can, and start the collectives whose last member arrives."""
    for rank in moving:
        for meeting in rank.advance():
            env.process(_hold(meeting, ranks, env, network))


def _hold(
    meeting: _Meeting, ranks: Sequence[_Rank], env: simpy.Environment, network: Network
) -> Generator[simpy.Event, None, None]:
    """Run a collective whose arrivals are known, then let its members go on."""
    flows_seconds = meeting.begin_seconds + meeting.latency_seconds
    yield env.timeout(flows_seconds - env.now)  # not in the past: the last arrival follows from an end at this instant
    if meeting.flows:
        yield network.transfer(meeting.flows)
    end_seconds = max(flows_seconds, env.now)  # the clock may have stopped one rounding short
    meeting.has_ended = True
    for number, index in meeting.of.members:
        ranks[number].end_collective(meeting.step, index, end_seconds)
    moving = dict.fromkeys(number for number, _ in meeting.of.members)
    _advance([ranks[number] for number in moving], ranks, env, network)


def _raise_if_stuck(meetings: Sequence[_Meeting], folded: FoldedProgram) -> None:
    """Raise PlanError if a collective has not ended though nothing is left to happen."""
    stuck = [meeting for meeting in meetings if meeting.arrived and not meeting.has_ended]
    if not stuck:
        assert all(meeting.has_ended for meeting in meetings), "a rank stopped though it waits in no collective"
        return
    first, classes = stuck[0].of.first, folded.class_of_rank
    members = zip(first.ranks, first.indices, strict=True)
    waiting = {rank for rank, index in members if (classes[rank], index) in stuck[0].arrived}
    missing = set(first.ranks) - waiting
    found: dict[str, list[int]] = {}
    for other in stuck:
        for rank in sorted(missing):
            for _, index in (member for member in other.arrived if member[0] == classes[rank]):
                found.setdefault(_text_of(rank, index, folded), []).append(rank)
    others = [f"{ranks_text(ranks)} in {text}" for text, ranks in found.items()]
    raise PlanError(
        f"{never_begins(first.text, waiting, missing)}: all ranks must issue collectives in one order, "
        f"but found {', '.join(others)}"
    )


def _text_of(rank: int, index: int, folded: FoldedProgram) -> str:
    """Return what a rank's collective is called in messages."""
    task = folded.ranks[folded.class_of_rank[rank]].tasks[index]
    group = shifted_group(task.group, folded.shift_of_rank[rank], len(folded.class_of_rank))
    return Meeting(name=task.name, kind=task.kind, ranks=group, indices=()).text
