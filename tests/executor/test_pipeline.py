"""Passes of stages come in the order of torch's schedules; messages between them reach c10d as named tasks."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from executor.position import Position
from executor.record import Recorder
from simulator.pipeline import rank_actions
from simulator.specs.plan import PipelineSchedule
from simulator.specs.program import Phase, TaskKind
from tests.made import equal_parts, made_plan

LETTERS = {Phase.FORWARD: "F", Phase.BACKWARD: "B"}


def ours(schedule: PipelineSchedule, degree: int, num_stages: int, batches: int) -> list[list[str]]:
    """Return the passes of each rank as torch writes them, such as "0F1" for stage 0, forward, micro-batch 1."""
    plan = made_plan(
        equal_parts(64, num_nodes=128, num_edges=256),
        num_layers=num_stages,
        graph_parallel_degree=1,
        pipeline_parallel_degree=degree,
        stages=(1,) * num_stages,
        pipeline_schedule=schedule,
        num_micro_batches=batches,
    )
    return [
        [f"{action.stage}{LETTERS[action.phase]}{action.micro_batch}" for action in rank_actions(plan, rank)]
        for rank in range(degree)
    ]


def told(actions: Sequence[object]) -> list[str]:
    """Return torch's passes without idle turns and reductions.

    Its table of 1F1B, which only a drawing of schedules uses, counts the forward passes of the last rank from one.
    """
    found = [str(action) for action in actions if action is not None and "REDUCE" not in str(action)]
    stage, _, first = found[0].partition("F")
    if first == "0":
        return found
    return [f"{stage}F{int(text.partition('F')[2]) - 1}" if "F" in text else text for text in found]


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("extra", [0, 1, 5])
@pytest.mark.parametrize(
    ("schedule", "theirs"), [(PipelineSchedule.GPIPE, ScheduleGPipe), (PipelineSchedule.ONE_F_ONE_B, Schedule1F1B)]
)
def test_passes_of_one_stage_a_rank_come_in_the_order_of_torch(schedule, theirs, degree, extra):
    batches = degree + extra
    settings: Any = SimpleNamespace(_num_stages=degree, _n_microbatches=batches)
    expected = theirs._get_pipeline_order(settings)
    assert ours(schedule, degree, degree, batches) == [told(expected[rank]) for rank in range(degree)]


@pytest.mark.parametrize("degree", [2, 3, 4])
@pytest.mark.parametrize("turns", [1, 2, 3])
@pytest.mark.parametrize("stages_per_rank", [2, 3])
def test_passes_of_interleaved_stages_come_in_the_order_of_torch(degree, turns, stages_per_rank):
    batches = turns * degree
    settings: Any = SimpleNamespace(
        n_local_stages=stages_per_rank,
        microbatches_per_round=degree,
        pp_group_size=degree,
        _n_microbatches=batches,
    )
    expected = [
        told(ScheduleInterleaved1F1B._calculate_single_rank_operations(settings, rank)) for rank in range(degree)
    ]
    assert ours(PipelineSchedule.INTERLEAVED, degree, degree * stages_per_rank, batches) == expected


def test_all_ranks_of_a_pipeline_note_equally_many_passes_whatever_collectives_they_hold():
    found = []
    for num_collectives in (0, 3):
        position = Position()
        with position.passing():
            for _ in range(num_collectives):
                with position.waiting("exchange"):
                    pass
        found.append(position.num_reached)
        with position.waiting("clip.reduce"):
            pass
        assert position.num_reached == found[-1] + 1
    assert found[0] == found[1]


def test_tasks_of_a_pass_are_named_after_it_and_those_of_updates_are_not():
    recorder = Recorder()
    recorder.start()
    with recorder.inside("mb1."):
        for name, phase in (("layer0.norm", Phase.FORWARD), ("gradients.bucket0", Phase.UPDATE)):
            with recorder.task(name, TaskKind.LAYER_NORM, phase, ()):
                pass
    assert [mark.name for mark in recorder.stop()] == ["mb1.layer0.norm", "gradients.bucket0"]
