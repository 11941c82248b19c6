"""The number to minimise, from predicted steps."""

import statistics
from collections.abc import Sequence

from simulator.specs.plan import Plan


def epoch_seconds(plan: Plan, step_seconds: Sequence[float]) -> float:
    """Return seconds in which every node is trained on once.

    Args:
        step_seconds: of one or more steps of an epoch, at their medians; the mean stands for those left out.
    """
    return statistics.mean(step_seconds) * plan.steps_per_epoch
