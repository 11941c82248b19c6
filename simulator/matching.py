"""Says which collectives of a program could not take place on real ranks; nothing where sends and receives all match.

What a backend needs, and no rank can see alone: every rank of a group issues every collective of the group, ranks agree
on its kind, number format, stream and sizes, what one sends to another is what that one makes room for, and there is
one order of all collectives that no rank departs from, whatever their groups, streams and communicators. Since host
threads issue collectives one after another, such an order means that none waits for ever: of those that are not over
yet, the first in that order is the next one on all of its ranks.

A message from one rank to another is sent by the one and received by the other. Both go on: the sender for good, the
receiver up to the first task that waits for it. On each way from a rank to another, of activations or of gradients,
messages arrive as they were sent.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np

from simulator.meetings import ranks_text
from simulator.specs.program import MESSAGES, Phase, Program, SharedTasks, Task, TaskKind, shifted_group

# What ranks must agree on beside sizes; a stream stands for a communicator.
_AGREED = ("kind", "dtype", "stream")
_Place = tuple[int, int]  # list of tasks, and shift of its groups


@dataclass(eq=False)
class _Meeting:
    """A collective of a step, as far as ranks issue it.

    Attributes:
        group: ranks that should take part, in order.
        tasks: of the ranks that issue it, as their lists hold them.
    """

    name: str
    group: tuple[int, ...]
    tasks: dict[int, Task]

    @cached_property
    def is_complete(self) -> bool:
        """Whether all ranks of the group issue it, and no others."""
        return self.tasks.keys() == set(self.group)

    @property
    def way(self) -> Phase | None:
        """Of a message, whether it brings activations or gradients, which go their own ways; else None."""
        first = next(iter(self.tasks.values()))
        return first.phase if first.kind in MESSAGES else None

    @property
    def text(self) -> str:
        """What it is called in sentences."""
        kind = next(iter(self.tasks.values())).kind
        return f'"{self.name}" ({kind} of {ranks_text(self.group)})'


class _Issued:
    """Who issues what, and in which order.

    Attributes:
        meetings: in order of their first ranks' tasks.
        sequence_of: meetings of each place, in the order of its tasks.
        waits: of each list of tasks, for each of its collectives the ones that are over before it is issued.
        rank_of: a rank of each place.
        faults: what is wrong with single ranks, in sentences.
    """

    def __init__(self, shared: SharedTasks) -> None:
        self.meetings: list[_Meeting] = []
        self.sequence_of: dict[_Place, list[_Meeting]] = {}
        self.rank_of: dict[_Place, int] = {}
        self.faults: list[str] = []
        self._shared = shared
        self._groups: dict[tuple[int, int], tuple[int, ...]] = {}  # by identity and shift: large ones take long to hash
        self._known: dict[tuple[int, ...], tuple[int, ...]] = {}
        by_key: dict[tuple[str, int], _Meeting] = {}
        collectives = [[task for task in tasks if task.kind.is_collective] for tasks in shared.lists]
        self.waits = [_waits(tasks) for tasks in shared.lists]
        for rank, place in enumerate(zip(shared.list_of_rank, shared.shift_of_rank, strict=True)):
            if place not in self.sequence_of:
                self.rank_of[place] = rank
                self.sequence_of[place] = [self._meeting(task, place[1], by_key) for task in collectives[place[0]]]
            for task, meeting in zip(collectives[place[0]], self.sequence_of[place], strict=True):
                self._add(rank, task, meeting)

    def _add(self, rank: int, task: Task, meeting: _Meeting) -> None:
        if rank in meeting.tasks:
            self.faults.append(
                f"rank {rank} issues {meeting.text} twice in a step: give each of them a name of its own"
            )
        meeting.tasks[rank] = task

    def _meeting(self, task: Task, shift: int, by_key: dict[tuple[str, int], _Meeting]) -> _Meeting:
        group = self._group(task.group, shift)
        key = (task.name, id(group))
        if key not in by_key:
            by_key[key] = _Meeting(task.name, group, {})
            self.meetings.append(by_key[key])
        return by_key[key]

    def _group(self, group: tuple[int, ...], shift: int) -> tuple[int, ...]:
        """Return a group as its rank has it; equal ones are one tuple."""
        key = (id(group), shift)
        if key not in self._groups:
            moved = shifted_group(group, shift, len(self._shared))
            self._groups[key] = self._known.setdefault(moved, moved)
        return self._groups[key]


def _waits(tasks: Sequence[Task]) -> list[list[int]]:
    """Return for each collective of a rank, by number, the collectives that the rank has waited for just before.

    It waits in the midst of a group's collective, and for what it receives before the first task that needs it. What
    it has waited for earlier, those that it waited for since have followed.
    """
    number_of = {index: number for number, index in enumerate(i for i, t in enumerate(tasks) if t.kind.is_collective)}
    received = {index for index in number_of if tasks[index].kind is TaskKind.RECEIVE}
    found: list[list[int]] = []
    waited: list[int] = []
    for index, task in enumerate(tasks):
        needed = received.intersection(task.waits_for)
        received -= needed
        waited = [*waited, *(number_of[earlier] for earlier in sorted(needed))]
        if index in number_of:
            found.append(waited)
            if task.kind not in MESSAGES:
                waited = [number_of[index]]
    return found


def mismatches(program: Program) -> list[str]:
    """Say which collectives of a step do not match, one sentence each with the ranks, the task and what they differ in.

    Replicas that are alike are told once. A program without a sentence runs on any backend without a rank that waits
    for ever, and each message finds as much room as it needs.
    """
    shared = program.shared
    issued = _Issued(shared)
    found = [*issued.faults, *_strangers(issued, len(shared)), *_missing(issued, shared)]
    complete = [meeting for meeting in issued.meetings if meeting.is_complete]
    found += _disagreements(complete, shared)
    wrong_order = list(_orders_of_groups(issued))
    # A cycle of several groups is told where no two ranks differ in what they do together.
    found += wrong_order or issued.faults or _circle(issued)
    return list(dict.fromkeys(found))


def _strangers(issued: _Issued, num_ranks: int) -> Iterator[str]:
    """Yield who issues a collective of a group that it does not belong to, and groups that cannot be."""
    for meeting in issued.meetings:
        members = set(meeting.group)
        if len(members) < len(meeting.group) or min(members, default=-1) < 0 or max(members) >= num_ranks:
            yield f'"{meeting.name}" must be of distinct ranks below {num_ranks}, got {ranks_text(meeting.group)}'
        elif outside := sorted(meeting.tasks.keys() - members):
            yield f"rank {outside[0]} issues {meeting.text}, to whose group it does not belong"


def _missing(issued: _Issued, shared: SharedTasks) -> Iterator[str]:
    """Yield which ranks of a group do not issue one of its collectives."""
    told = set()
    by_name: dict[str, list[_Meeting]] = {}
    for meeting in issued.meetings:
        by_name.setdefault(meeting.name, []).append(meeting)
    for meeting in issued.meetings:
        absent = [rank for rank in meeting.group if rank not in meeting.tasks]
        there = next((rank for rank in meeting.group if rank in meeting.tasks), None)
        if not absent or there is None:
            continue
        key = (meeting.name, tuple(shared.list_of_rank[rank] for rank in (*absent, there) if rank < len(shared)))
        if key in told:
            continue
        told.add(key)
        other = next((each for each in by_name[meeting.name] if each is not meeting and absent[0] in each.tasks), None)
        instead = "" if other is None else f", but {other.text}"
        yield (
            f"rank {there} issues {meeting.text}, which rank {absent[0]} does not{instead}; missing are "
            f"{ranks_text(absent)}"
        )


def _disagreements(meetings: Sequence[_Meeting], shared: SharedTasks) -> Iterator[str]:
    """Yield in what the ranks of a collective differ; replicas with the same lists of tasks are looked at once."""
    seen = set()
    lists = np.array(shared.list_of_rank)
    for meeting in meetings:
        key = (meeting.name, lists[list(meeting.group)].tobytes())
        if key not in seen:
            seen.add(key)
            yield from _disagreement(meeting, [meeting.tasks[rank] for rank in meeting.group])


def _disagreement(meeting: _Meeting, tasks: Sequence[Task]) -> Iterator[str]:
    first, ranks = tasks[0], meeting.group
    if any(task.kind in MESSAGES for task in tasks):
        yield from _lost(meeting, tasks)
        return
    for field in _AGREED:
        values = [getattr(task, field) for task in tasks]
        other = next((index for index, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            yield (
                f"rank {ranks[0]} issues {meeting.text} with {field} {values[0]}, but rank {ranks[other]} with "
                f"{values[other]}"
            )
            return
    if first.kind is TaskKind.ALL_TO_ALL:
        yield from _misdirected(meeting, tasks)
        return
    other = next((index for index, task in enumerate(tasks) if task.shape != first.shape), None)
    if other is not None:
        yield (
            f"rank {ranks[0]} gives {_bytes(first.shape)} to {meeting.text}, but rank {ranks[other]} "
            f"{_bytes(tasks[other].shape)}"
        )
    elif first.kind is TaskKind.REDUCE_SCATTER and sum(first.shape) % len(ranks):
        yield (
            f"{_bytes(first.shape)} of {meeting.text} do not divide by its {len(ranks)} ranks, as rank {ranks[0]} and "
            f"rank {ranks[-1]} would get shares of different size"
        )


def _lost(meeting: _Meeting, tasks: Sequence[Task]) -> Iterator[str]:
    """Yield what is wrong with a message, whose group is its source and its target."""
    ranks, kinds = meeting.group, tuple(task.kind for task in tasks)
    if kinds != (TaskKind.SEND, TaskKind.RECEIVE):
        told = ", ".join(f"{kind} by rank {rank}" for kind, rank in zip(kinds, ranks, strict=True))
        yield f"{meeting.text} must be sent by its first rank and received by its second one, got {told}"
        return
    sent, received = tasks
    for what, there, here in (("bytes", sent.num_bytes, received.num_bytes), ("dtype", sent.dtype, received.dtype)):
        if there != here:
            yield f"rank {ranks[0]} sends {meeting.text} with {what} {there}, but rank {ranks[1]} expects {here}"


def _misdirected(meeting: _Meeting, tasks: Sequence[Task]) -> Iterator[str]:
    """Yield the first pair of ranks of an all-to-all of which one expects other bytes than the other sends."""
    ranks = meeting.group
    for name, splits in (("sends", [task.shape for task in tasks]), ("receives", [task.receives for task in tasks])):
        other = next((index for index, split in enumerate(splits) if len(split) != len(ranks)), None)
        if other is not None:
            peer = ranks[other - 1] if len(ranks) > 1 else ranks[other]
            yield (
                f"rank {ranks[other]} must say in {meeting.text} what it {name} for each of {len(ranks)} ranks, rank "
                f"{peer} among them, got {splits[other]}"
            )
            return
    sent, received = np.array([task.shape for task in tasks]), np.array([task.receives for task in tasks])
    wrong = np.argwhere(sent != received.T)
    if len(wrong):
        source, target = (int(index) for index in wrong[0])
        more = f"; {len(wrong) - 1} other pairs do not match either" if len(wrong) > 1 else ""
        yield (
            f"rank {ranks[source]} sends {sent[source, target]} bytes to rank {ranks[target]} in {meeting.text}, but "
            f"that expects {received[target, source]}{more}"
        )


def _bytes(shape: Sequence[int]) -> str:
    return f"{sum(shape)} bytes"


def _orders_of_groups(issued: _Issued) -> Iterator[str]:
    """Yield which two ranks issue the collectives that they have in common in different orders; once for two lists."""
    by_group: dict[tuple[int, Phase | None], list[tuple[_Place, list[_Meeting]]]] = {}
    for place, sequence in issued.sequence_of.items():
        of_group: dict[tuple[int, Phase | None], list[_Meeting]] = {}
        for meeting in sequence:
            if meeting.is_complete:
                of_group.setdefault((id(meeting.group), meeting.way), []).append(meeting)
        for group, meetings in of_group.items():
            by_group.setdefault(group, []).append((place, meetings))
    told = set()
    for sequences in by_group.values():
        first_place, first = sequences[0]
        for place, sequence in sequences[1:]:
            key = (first_place[0], place[0])
            here = next((pair for pair in zip(first, sequence, strict=False) if pair[0] is not pair[1]), None)
            if here is not None and key not in told:
                told.add(key)
                ranks = (issued.rank_of[first_place], issued.rank_of[place])
                yield f"rank {ranks[0]} issues {here[0].text} where rank {ranks[1]} issues {here[1].text}"


def _circle(issued: _Issued) -> list[str]:
    """Return which collectives wait for one another in a circle, though any two ranks agree on what they share."""
    rank_of_step: dict[tuple[int, int], int] = {}  # which rank issues one meeting directly before another one
    before: dict[int, set[int]] = {}
    for place, sequence in issued.sequence_of.items():
        for later, waited in zip(sequence, issued.waits[place[0]], strict=True):
            for earlier in (sequence[number] for number in waited):
                rank_of_step.setdefault((id(earlier), id(later)), issued.rank_of[place])
                before.setdefault(id(later), set()).add(id(earlier))
    try:
        TopologicalSorter(before).prepare()
    except CycleError as error:
        steps = [(rank_of_step[step], *step) for step in pairwise(error.args[1])]
        return [_circle_text(steps, {id(meeting): meeting for meeting in issued.meetings})]
    return []


def _circle_text(steps: Sequence[tuple[int, int, int]], meetings: Mapping[int, _Meeting]) -> str:
    """Return in a sentence how ranks issue collectives in a circle.

    Args:
        steps: a rank, and by identity two collectives that it issues one after the other; each begins where the one
            before it ends.
    """
    # Steps of one rank in a row are one; a circle may be read from any of its steps.
    start = next((index for index in range(len(steps)) if steps[index][0] != steps[index - 1][0]), 0)
    told = []
    for rank, run in groupby([*steps[start:], *steps[:start]], key=itemgetter(0)):
        both = list(run)
        told.append(f"rank {rank} issues {meetings[both[0][1]].text} before {meetings[both[-1][2]].text}")
    return f"the collectives have no one order: {', '.join(told)}"
