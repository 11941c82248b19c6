import pytest
from hypothesis import given

from simulator.specs.program import COLLECTIVES, GROUP_COLLECTIVES, MESSAGES, SHAPE_FIELDS, Phase, TaskKind, task_name
from tests.strategies import programs


def test_every_kind_of_task_says_what_its_shape_counts():
    assert set(SHAPE_FIELDS) == set(TaskKind)


def test_collectives_are_those_that_ranks_do_together():
    assert {kind for kind in TaskKind if kind.is_collective} == {
        TaskKind.ALL_TO_ALL,
        TaskKind.ALL_GATHER,
        TaskKind.REDUCE_SCATTER,
        TaskKind.ALL_REDUCE,
        TaskKind.SEND,
        TaskKind.RECEIVE,
    }
    assert COLLECTIVES == GROUP_COLLECTIVES | MESSAGES
    assert not GROUP_COLLECTIVES & MESSAGES


@pytest.mark.parametrize(
    ("phase", "name"),
    [
        (Phase.FORWARD, "layer0.attention"),
        (Phase.UPDATE, "layer0.attention"),
        (Phase.RECOMPUTE, "layer0.attention.recompute"),
        (Phase.BACKWARD, "layer0.attention.backward"),
    ],
)
def test_a_task_is_named_by_its_phase(phase, name):
    assert task_name("layer0.attention", phase) == name


@given(program=programs)
def test_drawn_programs_can_run(program):
    for rank, tasks in enumerate(program.tasks):
        assert len({task.name for task in tasks}) == len(tasks)
        for index, task in enumerate(tasks):
            assert all(wait < index and tasks[wait].stream != task.stream for wait in task.waits_for)
            assert (rank in task.group) == task.kind.is_collective
            if task.kind.is_collective:
                assert task.num_bytes == sum(task.shape) >= 0
    for group in {task.group for tasks in program.tasks for task in tasks if task.group}:
        orders = [[task.name for task in program.tasks[rank] if task.group == group] for rank in group]
        assert all(order == orders[0] for order in orders)
