"""CheckpointManifest: what a checkpoint holds, of which training it is, and how far that had come."""

from dataclasses import dataclass

from simulator.specs.checks import require_at_least, require_positive
from simulator.specs.decision import PlanFile


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFile:
    """A file of a checkpoint.

    Attributes:
        name: in the checkpoint's folder.
        sha256: of its bytes.
    """

    name: str
    num_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        require_at_least(0, num_bytes=self.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedStep:
    """Shares of labelled nodes that were classified right after a step, counted from 0."""

    step: int
    train_accuracy_ratio: float
    val_accuracy_ratio: float
    test_accuracy_ratio: float

    def __post_init__(self) -> None:
        require_at_least(0, step=self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """What lies beside the tensors of a checkpoint.

    The learning rate, dropout and batches of every step follow from its number and `plan_file.train`.

    Attributes:
        num_steps_done: updates behind it; training goes on with the step of this number, counted from 0.
        plan_file: the plan that was run with all its inputs: graph with the hash of its arrays, model, training, and
            the hash of the calibration.
        evaluations: all so far, in order of steps; the best one's weights are in the checkpoint.
        environment: versions, device, date, as pairs.
        files: all others of the folder.
    """

    num_steps_done: int
    plan_file: PlanFile
    evaluations: tuple[EvaluatedStep, ...]
    environment: tuple[tuple[str, str], ...]
    files: tuple[CheckpointFile, ...]

    def __post_init__(self) -> None:
        require_positive(num_steps_done=self.num_steps_done)
