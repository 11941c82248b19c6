"""Takes replicas for alike that hold about as much, so that a step of many different parts is played by a few.

Every count of a replica that stands for others (rows, edges, rows to each rank) is off by the given share at most. So
is a cost that grows no faster than its counts, and so are a step's tasks where flows share nothing: they follow from
costs by sums and maxima, which grow by no more than what they are made of.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass


def replicas_that_stand_for_others(held: Sequence[Sequence[object]], ratio: float) -> list[int]:
    """Return for each replica the first one that holds as much but for a share of each count.

    Args:
        held: of each replica what its ranks hold: counts, or tuples and dataclasses of them.
        ratio: by which counts may differ, such as 0.01; 0 for none.
    """
    if ratio == 0:
        return list(range(len(held)))
    firsts: dict[tuple[int | None, ...], int] = {}
    step = math.log1p(ratio)
    found = []
    for replica, ranks in enumerate(held):
        key = tuple(_cell(count, step) for count in _counts(ranks))
        found.append(firsts.setdefault(key, replica))
    return found


def _cell(count: int | None, step: float) -> int | None:
    """Return a number that only counts share whose logarithms differ by less than a step; many of these do."""
    return -1 if count == 0 else None if count is None else math.floor(math.log(count) / step)


def _counts(held: object) -> Iterator[int | None]:
    """Yield the counts of what a rank holds, in order."""
    if held is None or isinstance(held, int):
        yield held
    elif is_dataclass(held):
        for each in fields(held):
            yield from _counts(getattr(held, each.name))
    else:
        assert isinstance(held, Sequence), held
        yield None  # lists of different lengths are not alike
        for item in held:
            yield from _counts(item)
