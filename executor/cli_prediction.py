"""A predicted step as JSON and in words: where its time goes, who is idle, and how fast it was simulated."""

from collections import defaultdict
from dataclasses import asdict, dataclass

from executor.cli_output import seconds_text
from planner.explain import Breakdown, breakdown
from simulator.collectives import CollectiveCosts, extrapolations
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec
from simulator.specs.decision import PlanFile
from simulator.specs.plan import Plan
from simulator.specs.trace import Trace, counted_ranks, counted_spans
from simulator.workload import lower


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A predicted step in numbers.

    Attributes:
        num_rank_classes: ranks that differ from one another; the others do what one of these does.
        num_idle_devices: devices of the cluster that the plan gives no rank.
        busiest_rank, least_busy_rank: by seconds of compute, the first of equal ones.
        mean_rank: where the step's time goes on the mean rank.
        simulation_seconds: that all trials took.
        tasks_per_second: tasks of all ranks and trials over them.
    """

    num_spans: int
    num_ranks: int
    num_rank_classes: int
    num_trials: int
    num_idle_devices: int
    busiest_rank: int
    busiest_rank_compute_seconds: float
    least_busy_rank: int
    least_busy_rank_compute_seconds: float
    mean_rank: Breakdown
    simulation_seconds: float
    tasks_per_second: float

    def as_json(self) -> dict[str, object]:
        """Return all of it as JSON values."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return it in words."""
        mean = self.mean_rank
        parts = {
            "compute": mean.compute_seconds,
            "communication": mean.communication_seconds,
            "waiting for others": mean.waiting_seconds,
            "making batches": mean.batch_seconds,
            "idle": mean.idle_seconds,
        }
        told = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in parts.items() if seconds > 0)
        alike = f", {self.num_rank_classes:,} of which differ" if self.num_rank_classes < self.num_ranks else ""
        idle = f"; {self.num_idle_devices:,} devices of the cluster are idle" if self.num_idle_devices else ""
        return [
            f"mean rank: {told}",
            f"compute from {seconds_text(self.least_busy_rank_compute_seconds)} (rank {self.least_busy_rank}) to "
            f"{seconds_text(self.busiest_rank_compute_seconds)} (rank {self.busiest_rank}){idle}",
            f"{self.num_spans:,} tasks of {self.num_ranks:,} ranks{alike} x {self.num_trials} trials in "
            f"{seconds_text(self.simulation_seconds)}: {self.tasks_per_second:,.0f} tasks per second",
        ]


def summary_of(plan: Plan, cluster: ClusterSpec, trace: Trace, *, simulation_seconds: float) -> Summary:
    """Return a predicted step in numbers; ranks that are alike are looked at once."""
    compute_seconds: dict[int, float] = defaultdict(float)
    for span, _ in counted_spans(trace.spans):
        compute_seconds[span.rank] += 0.0 if span.kind.is_collective else span.busy_seconds
    busiest = max(compute_seconds, key=lambda rank: (compute_seconds[rank], -rank))
    least_busy = min(compute_seconds, key=lambda rank: (compute_seconds[rank], rank))
    of_epoch = breakdown(plan, trace)
    num_trials = len(trace.step_seconds)
    return Summary(
        num_spans=len(trace.spans),
        num_ranks=trace.num_ranks,
        num_rank_classes=len(counted_ranks(trace)),
        num_trials=num_trials,
        num_idle_devices=cluster.num_devices - trace.num_ranks,
        busiest_rank=busiest,
        busiest_rank_compute_seconds=compute_seconds[busiest],
        least_busy_rank=least_busy,
        least_busy_rank_compute_seconds=compute_seconds[least_busy],
        mean_rank=Breakdown(**{name: value / plan.steps_per_epoch for name, value in asdict(of_epoch).items()}),
        simulation_seconds=simulation_seconds,
        tasks_per_second=len(trace.spans) * num_trials / simulation_seconds,
    )


def extrapolated_prices(
    file: PlanFile, calibration: Calibration, *, step: int = 0, alike_ratio: float = 0.0
) -> tuple[str, ...]:
    """Return which collectives of a plan's step are priced beyond what was measured, a sentence each."""
    specs = file.plan, file.graph, file.model, file.cluster
    program = lower(*specs, step=step, seed=file.train.seed, alike_ratio=alike_ratio)
    return extrapolations(CollectiveCosts(file.cluster, calibration), program)
