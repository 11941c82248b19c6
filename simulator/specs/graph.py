"""GraphSpec: what the planner and the simulator know of a graph, and where its arrays lie."""

from dataclasses import dataclass
from enum import StrEnum

from simulator.specs.checks import require, require_at_least, require_length, require_positive

DEGREE_QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


class FeatureNorm(StrEnum):
    """How node features are scaled when a graph is read."""

    NONE = "none"
    ROW = "row"  # each row sums to one; rows of zeros stay
    STANDARD = "standard"  # each column has mean 0 and deviation 1; dense features only


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphFile:
    """A graph store to read and how to prepare it, as people write it in `[graph]`.

    Attributes:
        path: an `.npz` or a folder of arrays (`simulator/readers/graphs.py` gives the layout).
        split: which column of the masks to use, where a store holds several splits.
        normalize_features: how features are scaled.
        add_self_loops: let each node attend to itself; existing self loops are kept single.
        symmetrise: add the reverse of each edge, duplicates removed; without it edges stay as stored.
    """

    path: str
    split: int = 0
    normalize_features: FeatureNorm = FeatureNorm.NONE
    add_self_loops: bool = True
    symmetrise: bool = False

    def __post_init__(self) -> None:
        require_at_least(0, split=self.split)


@dataclass(frozen=True, slots=True, kw_only=True)
class RmatGraph:
    """A recursive-matrix graph (Chakrabarti et al., SDM 2004): skewed degrees, no locality.

    Attributes:
        num_nodes: nodes; indices are drawn in the next power of two and folded back.
        num_edges: edges drawn, before `symmetrise` and the removal of duplicates and self loops.
        a, b, c: probabilities of three quadrants; the fourth has the rest. Graph500's are the defaults.
    """

    num_nodes: int
    num_edges: int
    num_features: int = 32
    num_classes: int = 8
    a: float = 0.57
    b: float = 0.19
    c: float = 0.19
    seed: int = 0
    add_self_loops: bool = True

    def __post_init__(self) -> None:
        require_positive(num_nodes=self.num_nodes, num_classes=self.num_classes, num_features=self.num_features)
        require_at_least(0, num_edges=self.num_edges, a=self.a, b=self.b, c=self.c, seed=self.seed)
        require(self.a + self.b + self.c <= 1, "a + b + c", "must not exceed 1", self.a + self.b + self.c)


@dataclass(frozen=True, slots=True, kw_only=True)
class CommunityGraph:
    """A degree-corrected block graph (Karrer and Newman, PRE 83, 2011) whose labels can be learned.

    A node's label is its block. Edges fall inside a block with probability `within_ratio`; features are
    the block's centre plus noise, weak enough that neighbours help.

    Attributes:
        num_nodes, num_edges: nodes, and undirected edges drawn before duplicates are removed.
        num_classes: blocks.
        degree_exponent: exponent of the power law of expected degrees, above 1.
        feature_noise: deviation of a feature around its block's centre, whose entries have deviation 1.
    """

    num_nodes: int
    num_edges: int
    num_classes: int = 16
    num_features: int = 64
    within_ratio: float = 0.8
    degree_exponent: float = 2.5
    feature_noise: float = 4.0
    seed: int = 0
    add_self_loops: bool = True

    def __post_init__(self) -> None:
        require_positive(num_nodes=self.num_nodes, num_classes=self.num_classes, num_features=self.num_features)
        require_at_least(0, num_edges=self.num_edges, feature_noise=self.feature_noise, seed=self.seed)
        require(0 <= self.within_ratio <= 1, "within_ratio", "must be within [0, 1]", self.within_ratio)
        require(self.degree_exponent > 1, "degree_exponent", "must be > 1", self.degree_exponent)


GraphSource = GraphFile | RmatGraph | CommunityGraph


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSpec:
    """A prepared graph in numbers; edges run source to target, and a node attends along incoming edges.

    Attributes:
        source: the store and its preparation; with `sha256` it determines every array.
        sha256: hash of the store's arrays as they lie on disk, the same for a folder and an `.npz`.
        num_nodes, num_edges: after preparation.
        num_features: width of a node's features.
        num_feature_entries: stored entries of sparse features; 0 when features are dense.
        num_classes: labels run from 0 to `num_classes - 1`.
        num_train_nodes, num_val_nodes, num_test_nodes: labelled nodes of the split.
        in_degree_quantiles: of incoming edges, at `DEGREE_QUANTILES`.
    """

    source: GraphFile
    sha256: str
    num_nodes: int
    num_edges: int
    num_features: int
    num_feature_entries: int
    num_classes: int
    num_train_nodes: int
    num_val_nodes: int
    num_test_nodes: int
    in_degree_quantiles: tuple[float, ...]

    def __post_init__(self) -> None:
        require_positive(num_nodes=self.num_nodes, num_features=self.num_features, num_classes=self.num_classes)
        require_at_least(0, num_edges=self.num_edges, num_feature_entries=self.num_feature_entries)
        require_at_least(0, num_train_nodes=self.num_train_nodes, num_val_nodes=self.num_val_nodes)
        require_at_least(0, num_test_nodes=self.num_test_nodes)
        require_length(len(DEGREE_QUANTILES), in_degree_quantiles=self.in_degree_quantiles)

    @property
    def has_sparse_features(self) -> bool:
        """Whether features are stored by entry instead of by row."""
        return self.num_feature_entries > 0
