"""NodeOrder, OrderSpec, RankedOrder: in which order ranks hold their rows, and what that spares."""

from dataclasses import dataclass
from enum import StrEnum

from simulator.specs.checks import require, require_at_least, require_positive


class NodeOrder(StrEnum):
    """Which nodes' rows lie side by side on a rank."""

    NATURAL = "natural"  # as in the graph store
    DEGREE = "degree"  # the most incoming edges first
    REVERSE_CUTHILL_MCKEE = "reverse_cuthill_mckee"  # breadth first from a node at the rim, backwards
    METIS = "metis"  # cells that METIS cut, reverse Cuthill-McKee in each


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderSpec:
    """The order of a rank's rows; the array itself, all nodes in that order, lies in a file.

    Attributes:
        path: the order file, relative to the plan's folder; empty for the natural order, which needs none.
        sha256: hash of the array; empty for the natural order.
    """

    kind: NodeOrder = NodeOrder.NATURAL
    path: str = ""
    sha256: str = ""

    def __post_init__(self) -> None:
        for field, value in (("path", self.path), ("sha256", self.sha256)):
            is_natural = self.kind is NodeOrder.NATURAL
            rule = "must be empty for the natural order" if is_natural else "must name the order's array"
            require((value == "") == is_natural, field, rule, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedOrder:
    """What an order was found to spare the gathers of attention, which read a row of keys and values an edge.

    Attributes:
        row_bytes: of a node's keys and values together.
        window_16_reuse, window_64_reuse: edges over distinct pairs of a source and a window of so many targets.
        beyond_cache_ratio: share of gathered rows that the device's cache no longer holds.
        relative_seconds: predicted time of the gathers, over that in the natural order.
    """

    kind: NodeOrder
    row_bytes: int
    window_16_reuse: float
    window_64_reuse: float
    beyond_cache_ratio: float
    relative_seconds: float

    def __post_init__(self) -> None:
        require_positive(row_bytes=self.row_bytes, relative_seconds=self.relative_seconds)
        require_at_least(1, window_16_reuse=self.window_16_reuse, window_64_reuse=self.window_64_reuse)
        require(
            0 <= self.beyond_cache_ratio <= 1, "beyond_cache_ratio", "must be within [0, 1]", self.beyond_cache_ratio
        )

    @property
    def beyond_cache_bytes(self) -> float:
        """Bytes of an edge's row that come from beyond the cache, on average."""
        return self.row_bytes * self.beyond_cache_ratio
