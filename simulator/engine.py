"""Plays out a priced program: when each task of each rank starts, waits and ends; knows no model and no cluster.

A rank has one host thread, which issues its tasks in program order, and streams, which run what was issued to them in
order. All that happens between two collectives follows by arithmetic, so only collectives and their flows are events
of simpy; `tests/simulator/test_engine.py` proves this equal to a process for each host thread and each stream.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

import simpy

from simulator.errors import PlanError
from simulator.network import Network
from simulator.specs.cost import CollectiveCost, Port, TaskCost
from simulator.specs.program import COLLECTIVES, Program, Stream, Task, TaskKind
from simulator.specs.trace import Span


def run_program(
    program: Program,
    *,
    compute_cost: Callable[[int, Task], TaskCost],
    collective_cost: Callable[[tuple[Task, ...]], CollectiveCost],
    port_capacities: Mapping[Port, float],
) -> tuple[Span, ...]:
    """Return what each rank does in one step, sorted by rank, start and order of issue.

    A task starts once it is issued and the task before it on its stream and those in `waits_for` have ended. A
    collective holds each member's stream from that member's start, begins when the last member has started, and
    ends for all of them when its flows have.

    Args:
        program: tasks of every rank.
        compute_cost: price of a task on a rank.
        collective_cost: price of a collective, from the tasks of its group's members in the group's order.
        port_capacities: bytes per second of every port that a flow names.

    Raises:
        PlanError: if a collective waits for a rank that never comes.
    """
    meetings = _meetings(program, collective_cost)
    meeting_of = {member: meeting for meeting in meetings for member in meeting.members}
    ranks = []
    for rank, tasks in enumerate(program.tasks):
        meeting_of_task = [meeting_of.get((rank, index)) for index in range(len(tasks))]
        costs = [
            compute_cost(rank, task) if meeting is None else meeting.cost
            for task, meeting in zip(tasks, meeting_of_task, strict=True)
        ]
        ranks.append(_Rank(rank, tasks, costs, meeting_of_task))
    env = simpy.Environment()
    network = Network(env, port_capacities)
    _advance(ranks, ranks, env, network)
    env.run()
    _raise_if_stuck(meetings)
    return tuple(span for rank in ranks for span in rank.spans())


def step_seconds(spans: Iterable[Span]) -> float:
    """Return when the last of these spans ends; 0 if there is none."""
    return max((span.end_seconds for span in spans), default=0.0)


@dataclass(slots=True, eq=False)
class _Meeting:
    """A collective of this step, and which of its members have arrived.

    Attributes:
        members: rank and index of the task, in the group's order.
        begin_seconds: latest arrival so far.
    """

    task: Task
    members: tuple[tuple[int, int], ...]
    cost: CollectiveCost
    arrived: set[int] = field(default_factory=set)
    begin_seconds: float = 0.0
    has_ended: bool = False

    def arrive(self, rank: int, at_seconds: float) -> bool:
        """Take note of when a member arrives; return whether all have."""
        self.arrived.add(rank)
        self.begin_seconds = max(self.begin_seconds, at_seconds)
        return len(self.arrived) == len(self.members)


class _Rank:
    """What is known of a rank's step; an instant stays inf until all collectives that it follows have ended."""

    def __init__(
        self,
        rank: int,
        tasks: tuple[Task, ...],
        costs: Sequence[TaskCost | CollectiveCost],
        meetings: Sequence[_Meeting | None],
    ) -> None:
        self.rank = rank
        self._tasks, self._costs, self._meetings = tasks, costs, meetings
        self._issue_seconds = [inf] * len(tasks)
        self._start_seconds = [inf] * len(tasks)
        self._end_seconds = [inf] * len(tasks)
        self._num_issued = 0
        self._host_free_seconds = 0.0
        self._host_waits_for: int | None = None
        streams = dict.fromkeys(task.stream for task in tasks)  # those of a recorded run have names of their own
        self._stream_free_seconds = dict.fromkeys(streams, 0.0)
        self._queues: dict[Stream, deque[int]] = {stream: deque() for stream in streams}

    def advance(self) -> list[_Meeting]:
        """Work out every instant that follows from what is known; return the collectives that this completes."""
        completed: list[_Meeting] = []
        moved = True
        while moved:
            self._issue(completed)
            moved = False
            for queue in self._queues.values():
                while queue and self._start(queue[0], completed):
                    queue.popleft()
                    moved = True
        return completed

    def end_collective(self, index: int, end_seconds: float) -> None:
        """Take note that a collective has ended."""
        self._end_seconds[index] = self._stream_free_seconds[self._tasks[index].stream] = end_seconds

    def _issue(self, completed: list[_Meeting]) -> None:
        """Issue tasks until the host thread waits for one whose end is unknown."""
        for index in range(self._num_issued, len(self._tasks)):
            if self._host_waits_for is not None:
                if self._end_seconds[self._host_waits_for] == inf:
                    return
                self._host_free_seconds = self._end_seconds[self._host_waits_for]
                self._host_waits_for = None
            task = self._tasks[index]
            host_seconds = self._costs[index].host_seconds
            assert 0 <= host_seconds < inf, f"host_seconds of {task.name} must be >= 0 and finite, got {host_seconds}"
            self._host_free_seconds += host_seconds
            self._issue_seconds[index] = self._host_free_seconds
            self._num_issued += 1
            queue = self._queues[task.stream]
            if queue or not self._start(index, completed):
                queue.append(index)
            if task.blocks_host:
                self._host_waits_for = index

    def _start(self, index: int, completed: list[_Meeting]) -> bool:
        """Start the next task of a stream, unless what it waits for has no known end; return whether it started."""
        task = self._tasks[index]
        start_seconds = max(self._issue_seconds[index], self._stream_free_seconds[task.stream])
        for earlier in task.waits_for:
            assert 0 <= earlier < index, (
                f"rank {self.rank} waits in {task.name} for task {earlier}, which is not earlier"
            )
            start_seconds = max(start_seconds, self._end_seconds[earlier])
        if start_seconds == inf:
            return False
        self._start_seconds[index] = start_seconds
        cost = self._costs[index]
        meeting = self._meetings[index]
        if isinstance(cost, TaskCost):
            assert 0 <= cost.device_seconds < inf, f"device_seconds of {task.name} must be >= 0 and finite, got {cost}"
            self._end_seconds[index] = self._stream_free_seconds[task.stream] = start_seconds + cost.device_seconds
        else:
            assert meeting is not None
            self._stream_free_seconds[task.stream] = inf
            if meeting.arrive(self.rank, start_seconds):
                completed.append(meeting)
        return True

    def spans(self) -> list[Span]:
        """Return all tasks of a finished step, by start; ties by order of issue."""
        return [self._span(index) for index in sorted(range(len(self._tasks)), key=self._start_seconds.__getitem__)]

    def _span(self, index: int) -> Span:
        task, meeting = self._tasks[index], self._meetings[index]
        start_seconds = self._start_seconds[index]
        return Span(
            rank=self.rank,
            step=0,
            stream=task.stream,
            name=task.name,
            kind=task.kind,
            phase=task.phase,
            shape=task.shape,
            start_seconds=start_seconds,
            duration_seconds=self._end_seconds[index] - start_seconds,
            waiting_seconds=meeting.begin_seconds - start_seconds if meeting else 0.0,
            host_seconds=self._costs[index].host_seconds,
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
    assert 0 <= meeting.cost.latency_seconds < inf, f"latency of {meeting.task.name} must be >= 0 and finite"
    flows_seconds = meeting.begin_seconds + meeting.cost.latency_seconds
    yield env.timeout(flows_seconds - env.now)  # not in the past: the last arrival follows from an end at this instant
    if meeting.cost.flows:
        yield network.transfer(meeting.cost.flows)
    end_seconds = max(flows_seconds, env.now)  # the clock may have stopped one rounding short
    meeting.has_ended = True
    for rank, index in meeting.members:
        ranks[rank].end_collective(index, end_seconds)
    _advance([ranks[rank] for rank, _ in meeting.members], ranks, env, network)


_Key = tuple[str, TaskKind, tuple[int, ...]]  # name, kind and group, which make a collective one


def _meetings(program: Program, collective_cost: Callable[[tuple[Task, ...]], CollectiveCost]) -> list[_Meeting]:
    """Return the collectives of a program, priced, in order of their first rank's tasks.

    Raises:
        PlanError: if a rank of a collective's group does not issue it, or a rank outside of its group does.
    """
    found: dict[_Key, dict[int, int]] = {}
    for rank, tasks in enumerate(program.tasks):
        for index, task in enumerate(tasks):
            if task.kind in COLLECTIVES:
                index_of = found.setdefault((task.name, task.kind, task.group), {})
                assert rank not in index_of, f"rank {rank} issues {task.name} twice in a step"
                index_of[rank] = index
            else:
                assert not task.group, f"only a collective has a group, got {task}"
    meetings = []
    for key, index_of in found.items():
        group = key[2]
        assert len(set(group)) == len(group), f"a group must name each rank once, got {group} for {key[0]}"
        if index_of.keys() != set(group):
            raise PlanError(_mismatch(key, set(index_of), found))
        members = tuple((rank, index_of[rank]) for rank in group)
        tasks = tuple(program.tasks[rank][index] for rank, index in members)
        meetings.append(_Meeting(tasks[0], members, collective_cost(tasks)))
    return meetings


def _mismatch(key: _Key, waiting: set[int], found: Mapping[_Key, Mapping[int, int]]) -> str:
    """Say which ranks issue a collective, which of its group do not, and what these issue under its name."""
    name, _, group = key
    if strangers := waiting - set(group):
        found_on = _ranks_text(sorted(strangers))
        return f"collective {_key_text(key)} must be issued by ranks of its group only, got {found_on}"
    missing = set(group) - waiting
    others = [
        f"{_ranks_text(sorted(missing & index_of.keys()))} with {_key_text(other)}"
        for other, index_of in found.items()
        if other[0] == name and missing & index_of.keys()
    ]
    return (
        f"{_never_begins(key, waiting, missing)}: every rank of its group must issue it with the same kind and group"
        f"{', but found ' if others else ''}{', '.join(others)}"
    )


def _raise_if_stuck(meetings: Sequence[_Meeting]) -> None:
    """Raise PlanError if a collective has not ended though nothing is left to happen."""
    stuck = [meeting for meeting in meetings if meeting.arrived and not meeting.has_ended]
    if not stuck:
        assert all(meeting.has_ended for meeting in meetings), "a rank stopped though it waits in no collective"
        return
    waiting = stuck[0].arrived
    missing = set(stuck[0].task.group) - waiting
    others = [
        f"{_ranks_text(sorted(missing & other.arrived))} in {_key_text(_key(other.task))}"
        for other in stuck
        if missing & other.arrived
    ]
    raise PlanError(
        f"{_never_begins(_key(stuck[0].task), waiting, missing)}: all ranks must issue collectives in one order, "
        f"but found {', '.join(others)}"
    )


def _key(task: Task) -> _Key:
    return task.name, task.kind, task.group


def _key_text(key: _Key) -> str:
    name, kind, group = key
    return f'"{name}" ({kind} of {_ranks_text(group)})'


def _never_begins(key: _Key, waiting: set[int], missing: set[int]) -> str:
    return (
        f"collective {_key_text(key)} never begins (waiting: {_ranks_text(sorted(waiting))}; "
        f"missing: {_ranks_text(sorted(missing))})"
    )


def _ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in their order, rising runs shortened, such as "ranks 0-3, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(texts) or 'of an empty group'}"
