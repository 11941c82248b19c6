"""The ranks of a plan as a mesh of named axes: who sits where, and who shares an axis with whom."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

from simulator.specs.checks import require_positive


class Coordinates(NamedTuple):
    """Where a rank sits: its replica, its stage of layers, its part of the batch, its heads and columns."""

    dp: int
    pp: int
    gp: int
    tp: int


# Outermost first: ranks that differ on the last axis alone are neighbours.
AXES = Coordinates._fields
# Axes whose ranks have other rows and the same numbers of a parameter, so that gradients are summed over them.
ROW_AXES = ("dp", "gp")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Sizes of the axes; rank `((d * pp + p) * gp + g) * tp + t` sits at (d, p, g, t).

    Attributes:
        dp: replicas, each with a batch of its own.
        pp: stages of layers.
        gp: ranks that share a batch.
        tp: ranks that share heads and feed-forward columns.
    """

    dp: int = 1
    pp: int = 1
    gp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        require_positive(dp=self.dp, pp=self.pp, gp=self.gp, tp=self.tp)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of all axes, in the order of `AXES`."""
        return tuple(getattr(self, axis) for axis in AXES)

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh."""
        return math.prod(self.sizes)

    def size(self, axes: Collection[str]) -> int:
        """Return the ranks of a group along some axes."""
        return math.prod(getattr(self, axis) for axis in axes)

    def coordinates(self, rank: int) -> Coordinates:
        """Return where a rank sits."""
        found = []
        for size in reversed(self.sizes):
            rank, place = divmod(rank, size)
            found.append(place)
        return Coordinates(*reversed(found))

    def place_in(self, axes: Collection[str], rank: int) -> int:
        """Return the place of a rank in its group along some axes."""
        place = 0
        for axis, size, coordinate in zip(AXES, self.sizes, self.coordinates(rank), strict=True):
            if axis in axes:
                place = place * size + coordinate
        return place

    def group(self, axes: Collection[str], rank: int) -> tuple[int, ...]:
        """Return the ranks that differ from one on some axes alone, ascending, with itself."""
        found, stride = [rank], 1
        axes_inwards = list(zip(AXES, self.sizes, self.coordinates(rank), strict=True))
        for axis, size, coordinate in reversed(axes_inwards):
            if axis in axes:
                found = [other + (place - coordinate) * stride for place in range(size) for other in found]
            stride *= size
        return tuple(found)
