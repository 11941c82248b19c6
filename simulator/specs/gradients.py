"""GradientCompression: what travels between ranks in place of their gradients."""

from dataclasses import dataclass
from enum import StrEnum

from simulator.specs.checks import require


class CompressionKind(StrEnum):
    """How a gradient is made smaller before it travels; all but none change what is learned."""

    NONE = "none"  # fp32, summed by all-reduces
    BF16 = "bf16"  # summed in bf16
    TOP_K = "top_k"  # the largest entries of each bucket, by all-gathers; a rank keeps the rest for the next step
    POWER_SGD = "power_sgd"  # matrices as products of two thin ones; a rank keeps the rest for the next step


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientCompression:
    """A kind of compression with its setting.

    Attributes:
        kind: of all buckets.
        kept_ratio: share of the entries of a bucket that top-k sends; 0 for other kinds.
        matrix_rank: columns of the thin matrices of PowerSGD; 0 for other kinds.
    """

    kind: CompressionKind = CompressionKind.NONE
    kept_ratio: float = 0.0
    matrix_rank: int = 0

    def __post_init__(self) -> None:
        if self.kind is CompressionKind.TOP_K:
            require(0 < self.kept_ratio <= 1, "kept_ratio", "must be > 0 and <= 1 for top_k", self.kept_ratio)
        else:
            require(self.kept_ratio == 0, "kept_ratio", f"must be 0 for {self.kind}: it is for top_k", self.kept_ratio)
        if self.kind is CompressionKind.POWER_SGD:
            require(self.matrix_rank >= 1, "matrix_rank", "must be >= 1 for power_sgd", self.matrix_rank)
        else:
            rule = f"must be 0 for {self.kind}: it is for power_sgd"
            require(self.matrix_rank == 0, "matrix_rank", rule, self.matrix_rank)

    def __str__(self) -> str:
        """Return the kind with its setting, such as "top-k of 1 %"."""
        match self.kind:
            case CompressionKind.TOP_K:
                return f"top-k of {100 * self.kept_ratio:g} %"
            case CompressionKind.POWER_SGD:
                return f"PowerSGD of rank {self.matrix_rank}"
            case _:
                return self.kind.value
