"""Which operators of the host lie around a call, by nesting on its thread."""

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence

from simulator.specs.recording import HostCall, Operator


class Nesting:
    """Finds the operators around a call.

    Args:
        operators: sorted by start, outer ones first.
        calls: of the same rank.
    """

    def __init__(self, operators: Sequence[Operator], calls: Sequence[HostCall]) -> None:
        self._operators = operators
        self._call_of = {call.correlation: call for call in calls if call.correlation is not None}
        self._on_thread: dict[str, list[int]] = defaultdict(list)
        for index, operator in enumerate(operators):
            self._on_thread[operator.thread].append(index)
        self._starts = {
            thread: [operators[index].start_seconds for index in found] for thread, found in self._on_thread.items()
        }
        self._parents = _parents(operators, self._on_thread)

    def enclosing(self, correlation: int | None) -> list[Operator]:
        """Return the operators and ranges around a call, innermost first."""
        call = self._call_of.get(correlation) if correlation is not None else None
        if call is None or call.thread not in self._starts:
            return []
        place = bisect.bisect_right(self._starts[call.thread], call.start_seconds) - 1
        index = self._on_thread[call.thread][place] if place >= 0 else None
        found = []
        while index is not None:
            operator = self._operators[index]
            if operator.end_seconds >= call.start_seconds:
                found.append(operator)
            index = self._parents[index]
        return found

    def operator_of(self, correlation: int | None) -> int | None:
        """Return the index of the innermost operator, not range, that has shapes around a call; else the innermost."""
        around = [operator for operator in self.enclosing(correlation) if not operator.is_annotation]
        if not around:
            return None
        chosen = next((operator for operator in around if any(operator.shapes)), around[0])
        return self._index(chosen)

    def name_of(self, index: int) -> str:
        """Return the name of an operator."""
        return self._operators[index].name

    def _index(self, operator: Operator) -> int:
        place = bisect.bisect_left(self._starts[operator.thread], operator.start_seconds)
        indices = self._on_thread[operator.thread]
        while self._operators[indices[place]] is not operator:
            place += 1
        return indices[place]


def _parents(operators: Sequence[Operator], on_thread: Mapping[str, Sequence[int]]) -> list[int | None]:
    """Return the index of the operator around each; operators are sorted by start, outer ones first."""
    parents: list[int | None] = [None] * len(operators)
    for indices in on_thread.values():
        open_ones: list[int] = []
        for index in indices:
            while open_ones and operators[open_ones[-1]].end_seconds <= operators[index].start_seconds:
                open_ones.pop()
            parents[index] = open_ones[-1] if open_ones else None
            open_ones.append(index)
    return parents
