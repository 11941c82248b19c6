"""What a run has come to so far: losses, evaluations, the best weights; a checkpoint keeps it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from executor.train import Evaluation, require_finite
from simulator.specs.checkpoint import EvaluatedStep


class History:
    """The losses and evaluations of all steps so far, also of those before a resume, and the best weights.

    Args:
        has_val_nodes: whether evaluations can tell which weights are better.
    """

    def __init__(self, *, has_val_nodes: bool) -> None:
        self._has_val_nodes = has_val_nodes
        self._unread: list[Tensor] = []  # losses on the device
        self.losses: list[float] = []
        self.evaluations: list[tuple[int, Evaluation]] = []
        self.best: tuple[int, Evaluation] | None = None
        self.best_weights: dict[str, Tensor] = {}

    def add_loss(self, loss: Tensor) -> None:
        """Note the loss of the next step, without waiting for the device."""
        self._unread.append(loss)

    def read_losses(self) -> None:
        """Bring the losses so far from the device.

        Raises:
            RunError: if one is infinite or not a number.
        """
        if not self._unread:
            return
        first = len(self.losses)
        self.losses += torch.stack(self._unread).tolist()
        self._unread.clear()
        for step in range(first, len(self.losses)):
            require_finite(self.losses[step], step)

    def add_evaluation(self, step: int, evaluation: Evaluation, weights: Callable[[], dict[str, Tensor]]) -> None:
        """Note how the model did after a step; its weights are asked for if they are the best so far.

        Args:
            weights: gives copies of the whole parameters, on all ranks together.
        """
        self.evaluations.append((step, evaluation))
        if self._is_better(evaluation):
            self.best = (step, evaluation)
            self.best_weights = weights()

    def evaluated_steps(self) -> tuple[EvaluatedStep, ...]:
        """Return the evaluations as a checkpoint keeps them."""
        return tuple(EvaluatedStep(step=step, **asdict(evaluation)) for step, evaluation in self.evaluations)

    def restore(
        self, losses: Sequence[float], evaluations: Sequence[EvaluatedStep], best_weights: dict[str, Tensor]
    ) -> None:
        """Go on from what a checkpoint kept."""
        self.losses, self.best_weights = list(losses), best_weights
        for kept in evaluations:
            fields = asdict(kept)
            evaluation = (fields.pop("step"), Evaluation(**fields))
            self.evaluations.append(evaluation)
            if self._is_better(evaluation[1]):
                self.best = evaluation

    def _is_better(self, evaluation: Evaluation) -> bool:
        best = None if self.best is None else self.best[1]
        return is_better(evaluation, best, has_val_nodes=self._has_val_nodes)


def is_better(evaluation: Evaluation, best: Evaluation | None, *, has_val_nodes: bool) -> bool:
    """Return whether an evaluation's weights are to be kept instead of the best ones so far.

    The first of equals is kept; without nodes to validate on, the last.
    """
    return best is None or not has_val_nodes or evaluation.val_accuracy_ratio > best.val_accuracy_ratio
