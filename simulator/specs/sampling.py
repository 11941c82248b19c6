"""NeighbourSpec: which neighbours a node attends to."""

from dataclasses import dataclass
from enum import StrEnum

from simulator.specs.checks import require, require_positive

# Visits of one node's walks are counted in 16 bits (`executor/sampling/walks.py`).
MAX_VISITS = 2**16 - 1


class NeighbourKind(StrEnum):
    """How neighbours are chosen; those that a graph has are its edges' sources, others are invented."""

    ALL = "all"  # every edge
    UNIFORM = "uniform"  # edges drawn alike, without replacement, anew in each step
    DEGREE = "degree"  # edges drawn by a power of their source's degree, without replacement, anew in each step
    RANDOM_WALK = "random_walk"  # the nodes that walks from the target visit most, anew in each step
    PROJECTION_TOP_K = "projection_top_k"  # edges of the largest products of projected queries and keys
    PROJECTION_DRAWN = "projection_drawn"  # edges drawn by the softmax of these products, without replacement
    STORED = "stored"  # edges chosen once and read from a file
    EXPANDER = "expander"  # a random regular graph over all nodes, invented
    VIRTUAL = "virtual"  # extra nodes that attend to every node and that every node attends to, invented


# Fields that a kind reads besides `kind`; the others must be left out.
_FIELDS: dict[NeighbourKind, tuple[str, ...]] = {
    NeighbourKind.ALL: (),
    NeighbourKind.UNIFORM: ("fan_out",),
    NeighbourKind.DEGREE: ("fan_out", "degree_exponent"),
    NeighbourKind.RANDOM_WALK: ("fan_out", "num_walks", "walk_length"),
    NeighbourKind.PROJECTION_TOP_K: ("fan_out", "projection_width"),
    NeighbourKind.PROJECTION_DRAWN: ("fan_out", "projection_width"),
    NeighbourKind.STORED: ("fan_out", "path"),
    NeighbourKind.EXPANDER: ("fan_out",),
    NeighbourKind.VIRTUAL: ("num_virtual_nodes",),
}
_ALL_FIELDS = tuple(dict.fromkeys(field for fields in _FIELDS.values() for field in fields))
_STATIC = (NeighbourKind.ALL, NeighbourKind.STORED, NeighbourKind.EXPANDER, NeighbourKind.VIRTUAL)
_SCORED = (NeighbourKind.PROJECTION_TOP_K, NeighbourKind.PROJECTION_DRAWN)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeighbourSpec:
    """One way to choose neighbours; a node may attend to the union of several.

    Attributes:
        fan_out: neighbours of a node; rows that have fewer keep all. Of an expander the degree, an even number.
        degree_exponent: power of a source's degree that its edges are drawn by; negative prefers small degrees.
        num_walks: walks from each node.
        walk_length: hops of a walk.
        projection_width: columns that queries and keys are projected to.
        path: file of the stored choice (`executor/sampling/stored.py`).
        num_virtual_nodes: extra nodes.
    """

    kind: NeighbourKind
    fan_out: int = 0
    degree_exponent: float = 0.0
    num_walks: int = 0
    walk_length: int = 0
    projection_width: int = 0
    path: str = ""
    num_virtual_nodes: int = 0

    def __post_init__(self) -> None:
        for field in _ALL_FIELDS:
            value = getattr(self, field)
            if field not in _FIELDS[self.kind]:
                rule = f"must be left out for kind {self.kind}, which does not read it"
                require(not value, field, rule, value)
            elif field == "degree_exponent":
                rule = "must be finite and not 0, which is kind uniform"
                require(0 < abs(value) < float("inf"), field, rule, value)
            elif field == "path":
                require(bool(value), field, "must name the file of the stored choice", value)
            else:
                require_positive(**{field: value})
        if self.kind == NeighbourKind.EXPANDER:
            require(self.fan_out % 2 == 0, "fan_out", "must be even for an expander", self.fan_out)
        if self.kind == NeighbourKind.RANDOM_WALK:
            rule = f"times walk_length = {self.walk_length} must not exceed {MAX_VISITS}"
            require(self.num_visits <= MAX_VISITS, "num_walks", rule, self.num_walks)

    @property
    def num_visits(self) -> int:
        """Nodes that all walks of a node visit, repeats counted."""
        return self.num_walks * self.walk_length

    @property
    def is_static(self) -> bool:
        """Whether the neighbours are the same in every step."""
        return self.kind in _STATIC

    @property
    def needs_scores(self) -> bool:
        """Whether the neighbours depend on queries and keys, hence on the layer."""
        return self.kind in _SCORED
