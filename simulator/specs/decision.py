"""PlanFile, Prediction, RankedPlan: what a search decided, on which grounds, and all that is needed to run it."""

from dataclasses import dataclass

from simulator.specs.checks import require, require_at_least, require_positive
from simulator.specs.cluster import ClusterSpec
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.order import RankedOrder
from simulator.specs.plan import Plan
from simulator.specs.train import TrainSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan is expected to take.

    Attributes:
        p10_step_seconds, p50_step_seconds, p90_step_seconds: deciles and median of a step over seeded trials.
        epoch_seconds: median step times the steps of an epoch.
        peak_memory_bytes: a tuple for each rank, of pairs of a category and its bytes at the peak.
        longest_collective_seconds: of the collectives of a step and of an evaluation, each alone on the network; None
            where nobody predicted it.
    """

    p10_step_seconds: float
    p50_step_seconds: float
    p90_step_seconds: float
    epoch_seconds: float
    peak_memory_bytes: tuple[tuple[tuple[str, int], ...], ...]
    longest_collective_seconds: float | None = None

    def __post_init__(self) -> None:
        require_positive(p10_step_seconds=self.p10_step_seconds, epoch_seconds=self.epoch_seconds)
        require_at_least(0, longest_collective_seconds=self.longest_collective_seconds or 0)
        for low, high in (("p10_step_seconds", "p50_step_seconds"), ("p50_step_seconds", "p90_step_seconds")):
            low_seconds, high_seconds = getattr(self, low), getattr(self, high)
            require(low_seconds <= high_seconds < float("inf"), high, f"must be >= {low} = {low_seconds}", high_seconds)

    @property
    def largest_peak_memory_bytes(self) -> int:
        """Peak of the rank that needs the most memory."""
        return max((sum(num_bytes for _, num_bytes in rank) for rank in self.peak_memory_bytes), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedPlan:
    """A runner-up.

    Attributes:
        description: the choices in which it differs, in words.
        p50_step_seconds, epoch_seconds: predicted, as in `Prediction`.
        peak_memory_bytes: of the rank that needs the most.
        reason: why it lost.
    """

    description: str
    p50_step_seconds: float
    epoch_seconds: float
    peak_memory_bytes: int
    reason: str

    def __post_init__(self) -> None:
        require_positive(p50_step_seconds=self.p50_step_seconds, epoch_seconds=self.epoch_seconds)
        require_at_least(0, peak_memory_bytes=self.peak_memory_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFile:
    """A plan with its inputs: with the partition file and the graph store it reproduces a run.

    Attributes:
        prediction: of this plan, with the calibration of `calibration_sha256`.
        ranking: runners-up, the best first.
        rejected: reasons why candidates were illegal or could not win, each with the number of candidates.
        calibration_sha256: `content_sha256` of the calibration that priced the plan.
        orders: what the natural order and the others that were tried spare; empty where an order was given.
    """

    graph: GraphSpec
    model: ModelSpec
    cluster: ClusterSpec
    train: TrainSpec
    plan: Plan
    prediction: Prediction
    ranking: tuple[RankedPlan, ...]
    rejected: tuple[tuple[str, int], ...]
    calibration_sha256: str
    orders: tuple[RankedOrder, ...] = ()

    def __post_init__(self) -> None:
        num_ranks = len(self.prediction.peak_memory_bytes)
        rule = f"must hold peak_memory_bytes of all {self.plan.num_ranks} ranks"
        require(num_ranks == self.plan.num_ranks, "prediction", rule, num_ranks)
