"""FanoutSpec and what it finds: how few neighbours a model may attend to before its results suffer."""

from dataclasses import dataclass

from simulator.specs.checks import require, require_at_least, require_positive, require_ratio
from simulator.specs.sampling import NeighbourKind, NeighbourSpec

# Kinds that keep a number of a node's neighbours on any graph.
FAN_OUT_KINDS = (
    NeighbourKind.UNIFORM,
    NeighbourKind.DEGREE,
    NeighbourKind.RANDOM_WALK,
    NeighbourKind.PROJECTION_TOP_K,
    NeighbourKind.PROJECTION_DRAWN,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FanoutSpec:
    """What `graphpilot fanout` compares with full attention, or with all edges.

    Attributes:
        fan_outs: neighbours of a node.
        samplers: how they are chosen, of `FAN_OUT_KINDS`.
        tolerance_ratio: validation accuracy that a fan-out may lose against the reference; 0.01 is one node in 100.
        num_steps: updates of each training run, in place of the run's own number.
        num_seeds: training runs of each choice, whose accuracies are averaged; seeds count up from the run's own.
        subgraph_nodes: nodes, at most, of the connected region on which outputs are compared.
        max_full_nodes: up to so many nodes of the whole graph the model is also trained with full attention; the
            reference is the better of that and of all edges, above it is all edges.
        degree_exponent: of kind degree.
        walk_length: hops of a walk of kind random_walk.
        visits_per_neighbour: visits of a node's walks for each neighbour that is kept.
        projection_width: of the projected kinds.
        structure_weight: weight of a loss term that ties each layer's attention to the graph's edges, uniformly
            (`executor/attention/structure.py`); 0 for none.
    """

    fan_outs: tuple[int, ...] = (4, 8, 16, 32)
    samplers: tuple[NeighbourKind, ...] = (
        NeighbourKind.UNIFORM,
        NeighbourKind.DEGREE,
        NeighbourKind.RANDOM_WALK,
        NeighbourKind.PROJECTION_TOP_K,
    )
    tolerance_ratio: float = 0.01
    num_steps: int = 100
    num_seeds: int = 1
    subgraph_nodes: int = 2000
    max_full_nodes: int = 4000
    degree_exponent: float = 0.5
    walk_length: int = 2
    visits_per_neighbour: int = 4
    projection_width: int = 8
    structure_weight: float = 0.0

    def __post_init__(self) -> None:
        require(len(self.fan_outs) > 0, "fan_outs", "must hold at least one number", self.fan_outs)
        require(len(self.samplers) > 0, "samplers", "must name at least one", self.samplers)
        for fan_out in self.fan_outs:
            require(fan_out >= 1, "fan_outs", "must hold numbers >= 1", fan_out)
        for sampler in self.samplers:
            rule = f"must name some of {', '.join(FAN_OUT_KINDS)}"
            require(sampler in FAN_OUT_KINDS, "samplers", rule, str(sampler))
        for field in ("fan_outs", "samplers"):
            values = getattr(self, field)
            require(len(set(values)) == len(values), field, "must hold each once", [*map(str, values)])
        require_ratio(tolerance_ratio=self.tolerance_ratio)
        require_positive(num_steps=self.num_steps, num_seeds=self.num_seeds, subgraph_nodes=self.subgraph_nodes)
        require_positive(walk_length=self.walk_length, visits_per_neighbour=self.visits_per_neighbour)
        require_positive(projection_width=self.projection_width)
        require_at_least(0, max_full_nodes=self.max_full_nodes, structure_weight=self.structure_weight)
        rule = "must be finite and not 0, which is sampler uniform"
        require(0 < abs(self.degree_exponent) < float("inf"), "degree_exponent", rule, self.degree_exponent)
        if NeighbourKind.RANDOM_WALK in self.samplers:
            self.neighbours(NeighbourKind.RANDOM_WALK, max(self.fan_outs))  # visits may be too many

    def choices(self) -> tuple[NeighbourSpec, ...]:
        """Return every sampler with every fan-out, the smallest fan-out of a sampler first."""
        return tuple(self.neighbours(kind, fan_out) for kind in self.samplers for fan_out in sorted(self.fan_outs))

    def neighbours(self, kind: NeighbourKind, fan_out: int) -> NeighbourSpec:
        """Return the neighbours of one sampler and fan-out."""
        match kind:
            case NeighbourKind.DEGREE:
                return NeighbourSpec(kind=kind, fan_out=fan_out, degree_exponent=self.degree_exponent)
            case NeighbourKind.RANDOM_WALK:
                num_walks = -(-fan_out * self.visits_per_neighbour // self.walk_length)
                return NeighbourSpec(kind=kind, fan_out=fan_out, num_walks=num_walks, walk_length=self.walk_length)
            case NeighbourKind.PROJECTION_TOP_K | NeighbourKind.PROJECTION_DRAWN:
                return NeighbourSpec(kind=kind, fan_out=fan_out, projection_width=self.projection_width)
            case _:
                return NeighbourSpec(kind=kind, fan_out=fan_out)


@dataclass(frozen=True, slots=True, kw_only=True)
class FanoutRow:
    """What one choice of neighbours came to.

    Attributes:
        neighbours: what nodes attend to; None for all nodes, full attention.
        full_error_ratio: norm of the difference of an attention layer's output from that of full attention on the
            region, over the norm of the latter; the mean over layers. May exceed one.
        edges_error_ratio: the same against attention over all edges of the region.
        val_accuracy_ratio: of training and validating with these neighbours, the best evaluation; the mean over seeds.
        val_accuracy_range_ratio: largest less smallest of the seeds' accuracies.
        num_edges_per_step: pairs attended to in the forward pass of a training step, all layers together; the mean over
            steps and seeds.
    """

    neighbours: NeighbourSpec | None
    full_error_ratio: float
    edges_error_ratio: float
    val_accuracy_ratio: float
    val_accuracy_range_ratio: float
    num_edges_per_step: float

    @property
    def fan_out(self) -> int:
        """Neighbours of a node; 0 for full attention and all edges."""
        return 0 if self.neighbours is None else self.neighbours.fan_out


@dataclass(frozen=True, slots=True, kw_only=True)
class FanoutComparison:
    """What a comparison came to.

    Attributes:
        rows: full attention if it was trained, all edges, then the choices.
        region_nodes, region_edges: of the region on which outputs were compared.
    """

    spec: FanoutSpec
    rows: tuple[FanoutRow, ...]
    region_nodes: int
    region_edges: int

    @property
    def reference(self) -> FanoutRow:
        """What the others are compared with: full attention or all edges, whichever is more accurate."""
        return max((row for row in self.rows if not row.fan_out), key=lambda row: row.val_accuracy_ratio)

    @property
    def smallest(self) -> FanoutRow | None:
        """The smallest fan-out that loses no more than the tolerance; of several samplers the one that loses least."""
        floor = self.reference.val_accuracy_ratio - self.spec.tolerance_ratio - 1e-9  # accuracies are sums of shares
        kept = [row for row in self.rows if row.fan_out and row.val_accuracy_ratio >= floor]
        return min(kept, key=lambda row: (row.fan_out, -row.val_accuracy_ratio), default=None)


def neighbours_text(neighbours: NeighbourSpec | None) -> str:
    """Return a row's choice of neighbours in words."""
    if neighbours is None:
        return "all nodes"
    return "all edges" if neighbours.kind is NeighbourKind.ALL else f"{neighbours.kind} {neighbours.fan_out}"
