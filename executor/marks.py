"""Holds what a rank's recorder marked in a step against the program that was lowered for it."""

from collections import Counter
from collections.abc import Sequence

from executor.record import Mark
from simulator.specs.program import ATTENTIONS, Phase, Task

# Of the shape of attention, edges of long targets and of long sources.
_LONG = slice(3, 5)


def mark_discrepancies(tasks: Sequence[Task], marks: Sequence[Mark], *, counts_long_rows: bool) -> list[str]:
    """Say where a rank ran other tasks than lowered, in another order, or of other shapes; empty if it did not.

    Args:
        tasks: as lowered.
        marks: of the step.
        counts_long_rows: whether the program's counts of edges of long rows are exact.
    """
    ran = sorted(marks, key=lambda mark: mark.start_seconds)
    counts, counts_run = Counter(task.name for task in tasks), Counter(mark.name for mark in ran)
    found = [
        f"{name}: lowered {counts[name]} times, but ran {counts_run[name]} times"
        for name in dict.fromkeys([*counts, *counts_run])
        if counts[name] != counts_run[name]
    ]
    if found:
        return found
    by_name = {mark.name: mark for mark in ran}
    for task in tasks:
        found += _differences(task, by_name[task.name], counts_long_rows=counts_long_rows)
    return found + _order_discrepancies(tasks, ran)


def _differences(task: Task, mark: Mark, *, counts_long_rows: bool) -> list[str]:
    lowered, ran = task.shape, mark.shape
    if task.kind in ATTENTIONS and not counts_long_rows:
        lowered, ran = ((*shape[: _LONG.start], *shape[_LONG.stop :]) for shape in (lowered, ran))
    pairs = {
        "kind": (task.kind, mark.kind),
        "shape": (lowered, ran),
        "dtype": (task.dtype, mark.dtype),
        "group": (task.group, mark.group),
    }
    return [
        f"{task.name}: {what} must be {must} as lowered, got {got}"
        for what, (must, got) in pairs.items()
        if must != got
    ]


def _order_discrepancies(tasks: Sequence[Task], ran: Sequence[Mark]) -> list[str]:
    """Compare orders; a layer's recomputation lies inside a backward task, wherever it is needed."""
    found = []
    for title, again in (("tasks", False), ("recomputed tasks", True)):
        pairs = zip(
            [task.name for task in tasks if (task.phase is Phase.RECOMPUTE) is again],
            [mark.name for mark in ran if (mark.phase is Phase.RECOMPUTE) is again],
            strict=True,
        )
        wrong = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if wrong is not None:
            found.append(f"order of {title}: {wrong[0]} is lowered where {wrong[1]} ran")
    return found
