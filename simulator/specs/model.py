"""ModelSpec: the graph transformer, as one device would run it."""

from dataclasses import dataclass
from enum import StrEnum

from simulator.specs.checks import require, require_at_least, require_positive, require_ratio

# Source degrees fall into buckets [2^k, 2^(k+1)); the last takes all that is larger.
NUM_DEGREE_BUCKETS = 16


class EdgeBias(StrEnum):
    """What is added to the attention score of an edge, per head."""

    NONE = "none"
    DEGREE = "degree"  # a learned number by the degree of the edge's source, in buckets of powers of two


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Pre-norm layers of multi-head attention over edges and a feed-forward network.

    Attributes:
        width: columns of the residual stream.
        num_heads: attention heads; must divide `width`.
        num_layers: attention and feed-forward pairs.
        feed_forward_width: hidden columns of the feed-forward network.
        dropout_ratio: share of entries dropped after the input projection and in each residual branch.
        edge_bias: what is added to attention scores.
        laplacian_encodings: eigenvectors of the normalised Laplacian added to the input.
        random_walk_encodings: return probabilities of 1 to this many steps added to the input.
    """

    width: int
    num_heads: int
    num_layers: int
    feed_forward_width: int
    dropout_ratio: float = 0.0
    edge_bias: EdgeBias = EdgeBias.NONE
    laplacian_encodings: int = 0
    random_walk_encodings: int = 0

    def __post_init__(self) -> None:
        require_positive(width=self.width, num_heads=self.num_heads, num_layers=self.num_layers)
        require_positive(feed_forward_width=self.feed_forward_width)
        require_ratio(dropout_ratio=self.dropout_ratio)
        require_at_least(0, laplacian_encodings=self.laplacian_encodings)
        require_at_least(0, random_walk_encodings=self.random_walk_encodings)
        divisors = [heads for heads in range(1, min(self.width, 256) + 1) if self.width % heads == 0]
        rule = f"must divide width = {self.width} (one of {', '.join(map(str, divisors))})"
        require(self.width % self.num_heads == 0, "num_heads", rule, self.num_heads)

    @property
    def head_size(self) -> int:
        """Columns of one head."""
        return self.width // self.num_heads

    @property
    def num_encodings(self) -> int:
        """Columns of positional encodings."""
        return self.laplacian_encodings + self.random_walk_encodings
