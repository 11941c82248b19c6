"""Which weights a run keeps; what a run writes is tested by the commands and by the conformance tests."""

import pytest

from executor.run import is_better, warmup_steps_of
from executor.train import Evaluation


def evaluation(val_accuracy_ratio: float) -> Evaluation:
    return Evaluation(train_accuracy_ratio=0.9, val_accuracy_ratio=val_accuracy_ratio, test_accuracy_ratio=0.1)


@pytest.mark.parametrize(
    ("val", "best", "has_val_nodes", "kept"),
    [
        (0.5, None, True, True),
        (0.6, 0.5, True, True),
        (0.5, 0.5, True, False),  # the first of equals
        (0.4, 0.5, True, False),
        (0.0, 0.0, False, True),  # nothing to judge by: the last
    ],
)
def test_the_weights_of_the_best_validation_are_kept(val, best, has_val_nodes, kept):
    found = is_better(evaluation(val), None if best is None else evaluation(best), has_val_nodes=has_val_nodes)
    assert found is kept


def test_a_short_run_leaves_steps_to_be_timed():
    assert [warmup_steps_of(steps) for steps in (1, 3, 6, 15, 1000)] == [0, 1, 2, 5, 5]
