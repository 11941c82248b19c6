"""Every exception that this project raises on purpose, each with the exit status that `graphpilot` gives it."""


class SpecError(ValueError):
    """A description is wrong: of a graph, a model, a cluster, a plan, or a file that holds one."""

    exit_status = 2


class PlanError(ValueError):
    """A well-formed plan cannot run here."""

    exit_status = 2


class NoFeasiblePlanError(RuntimeError):
    """A search found no plan that fits; the message holds the commonest reasons."""

    exit_status = 3


class CalibrationError(RuntimeError):
    """Costs are missing, or were measured on other hardware or software."""

    exit_status = 4


class RunError(RuntimeError):
    """A run failed: a rank was lost, memory ran out, a loss was not finite, or time ran out."""

    exit_status = 5
