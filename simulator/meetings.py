"""Finds which tasks of which ranks are one collective, and says why one of them could never begin."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from simulator.errors import PlanError
from simulator.specs.program import MESSAGES, SharedTasks, Task, TaskKind, shifted_group

_Key = tuple[str, TaskKind, int]  # name, kind and number of the group, which make a collective one


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """A collective of a step.

    Attributes:
        ranks: that take part, in the group's order.
        indices: of its task in each rank's list.
    """

    name: str
    kind: TaskKind
    ranks: tuple[int, ...]
    indices: tuple[int, ...]

    def tasks(self, shared: SharedTasks) -> tuple[Task, ...]:
        """Return the tasks of its ranks, in the group's order."""
        lists, list_of_rank, group = shared.lists, shared.list_of_rank, self.ranks
        found = [lists[list_of_rank[rank]][index] for rank, index in zip(group, self.indices, strict=True)]
        # Tasks of a list share their groups, which it takes long to compare if they are of many ranks.
        groups = {id(task.group): task.group for task in found}
        moved = {key for key, other in groups.items() if other != group}
        return tuple(replace(task, group=group) if id(task.group) in moved else task for task in found)

    @property
    def text(self) -> str:
        """What it is called in messages."""
        return f'"{self.name}" ({self.kind} of {ranks_text(self.ranks)})'


class _Groups:
    """Groups by number; equal ones have one number, also where lists hold them as those of another rank."""

    def __init__(self, num_ranks: int) -> None:
        self.ranks: list[tuple[int, ...]] = []
        self._num_ranks = num_ranks
        self._number_of: dict[tuple[int, ...], int] = {}
        self._known: dict[tuple[int, int], int] = {}

    def number(self, group: tuple[int, ...], shift: int) -> int:
        """Return the number of a group that is moved by a shift."""
        shift = 0 if len(group) == self._num_ranks else shift
        key = (id(group), shift)  # a group of many ranks is one tuple in many tasks, which it takes long to compare
        if key not in self._known:
            moved = shifted_group(group, shift, self._num_ranks)
            if moved not in self._number_of:
                self._number_of[moved] = len(self.ranks)
                self.ranks.append(moved)
            self._known[key] = self._number_of[moved]
        return self._known[key]


def find_meetings(shared: SharedTasks) -> list[Meeting]:
    """Return the collectives of a step, in order of their first rank's tasks.

    Raises:
        PlanError: if a rank of a collective's group does not issue it, or a rank outside of its group does.
    """
    for task in (task for tasks in shared.lists for task in tasks):
        assert task.kind.is_collective or not task.group, f"only a collective has a group, got {task}"
    collectives = [
        [(index, task) for index, task in enumerate(tasks) if task.kind.is_collective] for tasks in shared.lists
    ]
    own_groups = [list({id(task.group): task.group for _, task in own}.values()) for own in collectives]
    groups = _Groups(len(shared))
    found: dict[_Key, dict[int, int]] = {}
    places: dict[tuple[int, int], list[tuple[int, dict[int, int]]]] = {}
    for rank, place in enumerate(zip(shared.list_of_rank, shared.shift_of_rank, strict=True)):
        if place not in places:
            number, shift = place
            group_of = {id(group): groups.number(group, shift) for group in own_groups[number]}
            places[place] = [
                (index, found.setdefault((task.name, _kind_of(task), group_of[id(task.group)]), {}))
                for index, task in collectives[number]
            ]
        for index, index_of in places[place]:
            assert rank not in index_of, f"rank {rank} issues {shared[rank][index].name} twice in a step"
            index_of[rank] = index
    members = [frozenset(ranks) for ranks in groups.ranks]
    for ranks, distinct in zip(groups.ranks, members, strict=True):
        assert len(distinct) == len(ranks), f"a group must name each rank once, got {ranks}"
    meetings = []
    for (name, kind, group), index_of in found.items():
        ranks = groups.ranks[group]
        if index_of.keys() != members[group]:
            raise PlanError(_mismatch((name, kind, group), index_of.keys(), found, groups.ranks))
        indices = tuple(map(index_of.__getitem__, ranks))
        meetings.append(Meeting(name=name, kind=kind, ranks=ranks, indices=indices))
    return meetings


def _kind_of(task: Task) -> TaskKind:
    """Return the kind by which the ends of a collective find one another."""
    return TaskKind.SEND if task.kind in MESSAGES else task.kind


def _mismatch(
    key: _Key, waiting: Set[int], found: Mapping[_Key, Mapping[int, int]], groups: Sequence[tuple[int, ...]]
) -> str:
    """Say which ranks issue a collective, which of its group do not, and what these issue under its name."""
    group, text = set(groups[key[2]]), _text(key, groups)
    if strangers := waiting - group:
        return f"collective {text} must be issued by ranks of its group only, got {ranks_text(sorted(strangers))}"
    missing = group - waiting
    others = [
        f"{ranks_text(sorted(missing & index_of.keys()))} with {_text(other, groups)}"
        for other, index_of in found.items()
        if other[0] == key[0] and missing & index_of.keys()
    ]
    return (
        f"{never_begins(text, waiting, missing)}: every rank of its group must issue it with the same kind and group"
        f"{', but found ' if others else ''}{', '.join(others)}"
    )


def _text(key: _Key, groups: Sequence[tuple[int, ...]]) -> str:
    name, kind, group = key
    return f'"{name}" ({kind} of {ranks_text(groups[group])})'


def never_begins(text: str, waiting: Set[int], missing: Set[int]) -> str:
    """Return in a clause that a collective does not begin, who waits for it and who is missing."""
    return (
        f"collective {text} never begins (waiting: {ranks_text(sorted(waiting))}; "
        f"missing: {ranks_text(sorted(missing))})"
    )


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ranks in their order, rising runs shortened, such as "ranks 0-3, 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(texts) or 'of an empty group'}"
