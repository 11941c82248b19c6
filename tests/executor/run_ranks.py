"""Ranks that run plans as `executor/run.py` does, of which one is held up or has other files."""

import time
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from executor.record import Recorder
from executor.run import PlanRun, _work

HELD_RANK, HELD_STEP, HELD_TASK = 1, "step 4", "layer1.attention"


def run_and_hold_one_rank(run: PlanRun, store: Store, rank: int) -> None:
    """Train, and never come out of a task on one rank."""
    run_operation = Recorder.run

    def held(recorder: Recorder, name: str, *arguments: Any) -> Any:
        recorder.position.task = name
        if rank == HELD_RANK and name == HELD_TASK and recorder.position.moment == HELD_STEP:
            time.sleep(60)
        return run_operation(recorder, name, *arguments)

    Recorder.run = held  # type: ignore[method-assign,assignment]
    _work([run], store, rank)


def run_each_its_own(runs: list[PlanRun], store: Store, rank: int) -> None:
    """Train as the plan of this rank says."""
    _work([runs[rank]], store, rank)
