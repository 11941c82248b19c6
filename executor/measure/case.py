"""Case: a task to time."""

from collections.abc import Callable
from dataclasses import dataclass

from executor.record import Recorder
from simulator.specs.program import TaskKind
from simulator.specs.units import Dtype

TASK_NAME = "measured"  # of the task under test; "before" is the one whose result it takes


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task to time.

    Attributes:
        kind, shape: of the task.
        backward_shape: of its backward pass, where that is another one.
        run: does forward and backward once through a recorder, the task under the name `TASK_NAME`.
        beyond_cache_ratio: of attention, as in `Task`.
    """

    kind: TaskKind
    dtype: Dtype
    shape: tuple[int, ...]
    run: Callable[[Recorder], None]
    beyond_cache_ratio: float | None = None
    backward_shape: tuple[int, ...] | None = None
