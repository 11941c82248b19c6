"""Folds a priced program: what is alike, and stays alike for as long as the program runs, is one class and played once.

Ranks, collectives, flows and ports form classes such that equal members see equal things: the ranks of a class have
equal tasks and costs, and at each collective task one of the same class; the collectives of a class have equal costs,
and members and flows of the same classes; the flows of a class have equal bytes and limits, and cross ports of the same
classes; the ports of a class are equally fast and carry equally many flows of each class. Then a course of events in
which all members of a class do the same obeys every rule of the engine, and since there is but one such course, it is
the one that playing all of them would give. No symmetry has to be known beforehand: classes begin coarse (equal lists,
costs, bytes, rates) and are split by what their members see until nothing splits any more.

Source: colour refinement, B. Weisfeiler and A. Leman, 1968; its result is the coarsest equitable partition.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from simulator.meetings import Meeting, find_meetings
from simulator.specs.cost import CollectiveCost, Flow, Port, TaskCost
from simulator.specs.program import Program, Task

_Colours = NDArray[np.uint64]
_Indices = NDArray[np.int64]
_STEP = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankClass:
    """Ranks that do the same at the same time.

    Attributes:
        ranks: in order; the first stands for all.
        tasks: of the first.
        costs: of its tasks; None for collectives.
        meetings: number of the class of each collective task; -1 for other tasks.
    """

    ranks: tuple[int, ...]
    tasks: tuple[Task, ...]
    costs: tuple[TaskCost | None, ...]
    meetings: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeetingClass:
    """Collectives that go on at the same time in the same way.

    Attributes:
        first: that stands for all, and its price.
        members: number of the class and index of the task, once for each class of ranks that takes part.
        flows: one of each class, with how many of it each port carries.
    """

    first: Meeting
    cost: CollectiveCost
    members: tuple[tuple[int, int], ...]
    flows: tuple[Flow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedProgram:
    """A priced program of which each class is held once.

    Attributes:
        ranks, meetings: the classes, in order of their first members.
        class_of_rank: number of each rank's class.
        shift_of_rank: by which its groups lie behind those of its class's first rank.
        capacities: bytes per second of the ports.
    """

    ranks: tuple[RankClass, ...]
    meetings: tuple[MeetingClass, ...]
    class_of_rank: tuple[int, ...]
    shift_of_rank: tuple[int, ...]
    capacities: Mapping[Port, float]

    @property
    def num_tasks(self) -> int:
        """Tasks of all ranks in a step."""
        return sum(len(each.ranks) * len(each.tasks) for each in self.ranks)


def fold(
    program: Program,
    *,
    compute_cost: Callable[[int, Task], TaskCost],
    collective_cost: Callable[[tuple[Task, ...]], CollectiveCost],
    port_capacities: Mapping[Port, float],
    kind_of_rank: Sequence[Hashable] | None = None,
) -> FoldedProgram:
    """Return a program with its prices, each class held once.

    Args:
        program: whose lists of tasks are told apart by identity; ranks of different lists are of different classes.
        compute_cost: price of a task on a rank.
        collective_cost: price of a collective, from the tasks of its group's members in the group's order.
        port_capacities: bytes per second of every port that a flow names.
        kind_of_rank: ranks of one kind have equal costs for equal tasks; None where each may have its own.

    Raises:
        PlanError: if a rank of a collective's group does not issue it, or a rank outside of its group does.
    """
    shared = program.shared
    meetings = find_meetings(shared)
    costs, cost_of_rank = _costs_of_ranks(program, compute_cost, kind_of_rank)
    prices = [collective_cost(meeting.tasks(shared)) for meeting in meetings]
    links = _Links(meetings, prices, cost_of_rank, port_capacities)
    classes = links.classes()
    firsts = _firsts(classes.rank)
    members: list[list[int]] = [[] for _ in firsts]
    for rank, number in enumerate(classes.rank.tolist()):
        members[number].append(rank)
    shifts = [shared.shift_of_rank[rank] for rank in firsts.tolist()]
    return FoldedProgram(
        ranks=tuple(
            RankClass(
                ranks=tuple(ranks),
                tasks=shared[ranks[0]],
                costs=costs[cost_of_rank[ranks[0]]],
                meetings=links.meetings_of(ranks[0], len(shared.lists[shared.list_of_rank[ranks[0]]]), classes),
            )
            for ranks in members
        ),
        meetings=links.meeting_classes(classes),
        class_of_rank=tuple(classes.rank.tolist()),
        shift_of_rank=tuple(
            shift - shifts[number] for shift, number in zip(shared.shift_of_rank, classes.rank.tolist(), strict=True)
        ),
        capacities=port_capacities,
    )


def _costs_of_ranks(
    program: Program, compute_cost: Callable[[int, Task], TaskCost], kind_of_rank: Sequence[Hashable] | None
) -> tuple[list[tuple[TaskCost | None, ...]], list[int]]:
    """Return the different costs of the tasks of whole lists, and for each rank which of them it has."""
    shared = program.shared
    costs: list[tuple[TaskCost | None, ...]] = []
    by_kind: dict[tuple[int, Hashable], int] = {}
    by_costs: dict[tuple[int, tuple[TaskCost | None, ...]], int] = {}
    cost_of_rank = []
    for rank, number in enumerate(shared.list_of_rank):
        kind = (number, rank if kind_of_rank is None else kind_of_rank[rank])
        if kind not in by_kind:
            found = tuple(
                None if task.kind.is_collective else compute_cost(rank, task) for task in shared.lists[number]
            )
            if (number, found) not in by_costs:
                by_costs[number, found] = len(costs)
                costs.append(found)
            by_kind[kind] = by_costs[number, found]
        cost_of_rank.append(by_kind[kind])
    return costs, cost_of_rank


@dataclass(frozen=True, slots=True)
class _Classes:
    """Number of the class of each rank, collective, flow and port, in order of first members."""

    rank: _Indices
    meeting: _Indices
    flow: _Indices
    port: _Indices


@dataclass(frozen=True, slots=True)
class _Bonds:
    """Pairs of things that see each other, a row each, with a label of what they are to each other."""

    left: _Indices
    right: _Indices
    label: _Indices

    def seen_from_left(self, right: _Colours, num_left: int) -> _Colours:
        """Return for each thing on the left a number of the colours and labels that it sees, in no order."""
        return _summed(_mixed(right[self.right], self.label), self.left, num_left)

    def seen_from_right(self, left: _Colours, num_right: int) -> _Colours:
        """Return the same for each thing on the right."""
        return _summed(_mixed(left[self.left], self.label), self.right, num_right)


class _Links:
    """Who sees whom in a priced program.

    Args:
        labels: ranks with different ones are of different classes.
    """

    def __init__(
        self,
        meetings: Sequence[Meeting],
        prices: Sequence[CollectiveCost],
        labels: Sequence[int],
        capacities: Mapping[Port, float],
    ) -> None:
        self._meetings, self._prices, self._labels = meetings, prices, labels
        self._flows = [flow for price in prices for flow in price.flows]
        numbers: dict[Port, int] = {}
        ports = [numbers.setdefault(port, len(numbers)) for flow in self._flows for port in flow.ports]
        self._ports = list(numbers)
        self._capacities = [capacities.get(port, 0.0) for port in self._ports]  # one without is told when it is used
        # Ranks with their collectives, by index of the task; flows with their ports, by how many flows are alike.
        self._members = _Bonds(
            _joined(meeting.ranks for meeting in meetings),
            np.repeat(np.arange(len(meetings)), [len(meeting.ranks) for meeting in meetings]),
            _joined(meeting.indices for meeting in meetings),
        )
        self._uses = _Bonds(
            np.repeat(np.arange(len(self._flows)), [len(flow.ports) for flow in self._flows]),
            np.array(ports, dtype=np.int64),
            _joined(flow.loads for flow in self._flows),
        )
        self._flow_meeting = np.repeat(np.arange(len(meetings)), [len(price.flows) for price in prices])

    def classes(self) -> _Classes:
        """Return the coarsest classes whose members see equal things."""
        ranks = _mixed(np.array(self._labels, dtype=np.uint64))
        meetings = _mixed(_numbered([(price.latency_seconds, price.host_seconds) for price in self._prices]))
        flows = _mixed(_numbered([(flow.num_bytes, flow.max_bytes_per_second) for flow in self._flows]))
        ports = _mixed(_numbered(self._capacities))
        seen, num_classes = (ranks, meetings, flows, ports), 0
        while (found := sum(len(np.unique(colours)) for colours in seen)) > num_classes:
            num_classes = found
            rank, meeting, flow, port = seen
            flows_of_meeting = _summed(_mixed(flow), self._flow_meeting, len(meeting))
            seen = (
                _mixed(ranks, self._members.seen_from_left(meeting, len(rank))),
                _mixed(meetings, self._members.seen_from_right(rank, len(meeting)), flows_of_meeting),
                _mixed(flows, meeting[self._flow_meeting], self._uses.seen_from_left(port, len(flow))),
                _mixed(ports, self._uses.seen_from_right(flow, len(port))),
            )
        return _Classes(*map(_by_first, seen))

    def meetings_of(self, rank: int, num_tasks: int, classes: _Classes) -> tuple[int, ...]:
        """Return the class of the collective that each task of a rank is; -1 for others."""
        rows = np.flatnonzero(self._members.left == rank)
        found = np.full(num_tasks, -1)
        found[self._members.label[rows]] = classes.meeting[self._members.right[rows]]
        return tuple(found.tolist())

    def meeting_classes(self, classes: _Classes) -> tuple[MeetingClass, ...]:
        """Return the classes of collectives with the classes of their flows."""
        flows = self._flow_classes(classes)
        first_flows = np.cumsum([0, *(len(price.flows) for price in self._prices)])
        found = []
        for first in _firsts(classes.meeting).tolist():
            meeting = self._meetings[first]
            members = zip(classes.rank[list(meeting.ranks)].tolist(), meeting.indices, strict=True)
            own = classes.flow[first_flows[first] : first_flows[first + 1]].tolist()
            found.append(
                MeetingClass(
                    first=meeting,
                    cost=self._prices[first],
                    members=tuple(dict.fromkeys(members)),
                    flows=tuple(flows[number] for number in dict.fromkeys(own)),
                )
            )
        return tuple(found)

    def _flow_classes(self, classes: _Classes) -> list[Flow]:
        """Return one flow of each class: over the first port of each class of ports, which carries so many of it."""
        uses, first_ports = self._uses, _firsts(classes.port)
        rows = np.flatnonzero(first_ports[classes.port[uses.right]] == uses.right)
        num_alike: dict[tuple[int, int], int] = defaultdict(int)
        kinds = zip(classes.flow[uses.left[rows]].tolist(), uses.right[rows].tolist(), strict=True)
        for kind, load in zip(kinds, uses.label[rows].tolist(), strict=True):
            num_alike[kind] += load
        begins = np.cumsum([0, *(len(flow.ports) for flow in self._flows)])
        found = []
        for number, first in enumerate(_firsts(classes.flow).tolist()):
            crossed = first_ports[classes.port[uses.right[begins[first] : begins[first + 1]]]].tolist()
            ports = tuple(dict.fromkeys(crossed))
            found.append(
                replace(
                    self._flows[first],
                    ports=tuple(self._ports[port] for port in ports),
                    alike=tuple(num_alike[number, port] for port in ports),
                )
            )
        return found


def _joined(rows: Iterable[Sequence[int]]) -> _Indices:
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64)


def _numbered(values: Sequence[Hashable]) -> _Colours:
    """Return a number for each value, the same for equal ones."""
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(value, len(numbers)) for value in values], dtype=np.uint64)


def _firsts(classes: _Indices) -> _Indices:
    """Return the first member of each class; classes are numbered in order of these."""
    return np.unique(classes, return_index=True)[1]


def _by_first(colours: _Colours) -> _Indices:
    """Return classes numbered in order of their first members."""
    _, first, inverse = np.unique(colours, return_index=True, return_inverse=True)
    number = np.empty(len(first), dtype=np.int64)
    number[np.argsort(first)] = np.arange(len(first))
    return number[inverse]


def _summed(values: _Colours, place: _Indices, num_places: int) -> _Colours:
    """Return the sums of the values of each place, modulo 2^64."""
    found = np.zeros(num_places, dtype=np.uint64)
    np.add.at(found, place, values)
    return found


def _mixed(*values: _Colours | _Indices) -> _Colours:
    """Return numbers of 64 bits that depend on all values and on their order.

    Different values get one number by chance alone, once in 2^64 pairs: a million things do once in 10^7 programs.

    Source: the finaliser of SplitMix64, G. L. Steele, D. Lea and C. H. Flood, OOPSLA 2014.
    """
    found = np.zeros_like(values[0], dtype=np.uint64)
    for each in values:
        found = found * _STEP + each.astype(np.uint64) + _STEP
        found = (found ^ (found >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        found = (found ^ (found >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        found ^= found >> np.uint64(31)
    return found
