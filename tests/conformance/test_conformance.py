"""What is lowered is what runs: tasks, shapes and bytes of one executed step, for plans of every kind."""

import dataclasses

import pytest

from executor.model import GraphTransformer
from executor.record import Recorder
from simulator.specs.program import Phase, Task, TaskKind
from simulator.workload import parameter_shapes
from tests.conformance.cases import CASES, EVERYTHING, MODEL
from tests.conformance.check import check_conformance, check_named_time, lowered_as_seen
from tests.conformance.observe import Event, ObservedStep, ObservedTask, observed_step
from tests.made import equal_parts, graph_of

pytestmark = [pytest.mark.dist, pytest.mark.alone]


@pytest.mark.parametrize("name", CASES)
def test_conformance_of_program_and_execution(observed, name):
    prepared, steps = observed[name]
    for rank, (tasks, step) in enumerate(zip(lowered_as_seen(prepared, steps), steps, strict=True)):
        assert check_conformance(tasks, step) == [], f"rank {rank}"
    assert check_named_time(steps) == []


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("model", [MODEL, EVERYTHING])
def test_conformance_of_parameters(model, is_sparse):
    # Their order decides which gradients share a bucket.
    graph = graph_of(equal_parts(1, num_nodes=10, num_edges=20), num_feature_entries=40 * is_sparse)
    parameters = GraphTransformer(graph, model, Recorder()).named_parameters()
    assert tuple((name, tuple(parameter.shape)) for name, parameter in parameters) == parameter_shapes(graph, model)


# --- A program that is wrong in any count is noticed.


def is_seen(task: Task, position: int) -> bool:
    """Return whether operators show this count of a task."""
    if task.kind is TaskKind.CLIP:
        return position == 0  # the norm is that of one buffer, however many tensors lie in it
    if task.kind is TaskKind.PAD_ROWS and task.phase is Phase.BACKWARD:
        return task.shape[0] < task.shape[1]  # on the largest rank the way back is no operator
    if task.kind is TaskKind.ATTENTION and position == 2 and task.shape[2] == 0:
        return False  # one edge could be the only row pointer of no rows
    if task.kind is TaskKind.ATTENTION and position == 5 and task.shape[5] == 1:
        return False  # two heads could be keys and values of one
    if task.kind is TaskKind.ATTENTION and task.phase is Phase.BACKWARD:
        return position not in (3, 4)  # which rows are long is seen at the call forward
    return True


def alone(step: ObservedStep, task: ObservedTask) -> ObservedStep:
    """Return a step that consists of one of its tasks."""
    num_calls = len(task.calls)
    return dataclasses.replace(step, tasks=(task,), num_calls=num_calls, num_collective_operators=num_calls)


@pytest.mark.parametrize("change", [1, -1])
# A rank without a batch has no edges, and one edge more could be any tensor of one element.
@pytest.mark.parametrize("name", [name for name in CASES if name != "clusters on two, one without a batch"])
def test_conformance_check_sees_every_count_of_every_task(observed, name, change):
    prepared, steps = observed[name]
    unnoticed = []
    for tasks, step in zip(lowered_as_seen(prepared, steps), steps, strict=True):
        by_name = {task.name: task for task in step.tasks}
        for task in tasks:
            for position in range(len(task.shape)):
                shape = list(task.shape)
                shape[position] += change
                wrong = dataclasses.replace(task, shape=tuple(shape))
                if is_seen(task, position) and not check_conformance((wrong,), alone(step, by_name[task.name])):
                    unnoticed.append((task.name, position))
    assert unnoticed == []


# --- The reading of a profile.


def event(name: str, start: float, duration: float, *, category: str = "user_annotation", thread: int = 1) -> Event:
    """Return an event of a Chrome trace."""
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "tid": thread, "args": {}}


def names(step: ObservedStep) -> list[tuple[str, list[str]]]:
    """Return the tasks of a step with their operators."""
    return [(task.name, [operator.name for operator in task.operators]) for task in step.tasks]


def test_conformance_counts_a_task_that_was_interrupted_by_a_recomputation_once():
    events = [
        event("task/down.backward", 0, 10),
        event("aten::first", 1, 2, category="cpu_op"),
        event("task/up.recompute", 11, 10),
        event("task/down.recompute", 22, 10),
        event("task/down.backward", 33, 10),
        event("aten::second", 34, 2, category="cpu_op"),
    ]
    assert names(observed_step(events, [], on_gpu=False)) == [
        ("down.backward", ["aten::first", "aten::second"]),
        ("up.recompute", []),
        ("down.recompute", []),
    ]


def test_conformance_counts_a_task_that_ran_twice_twice():
    events = [event("task/up", 0, 10), event("task/up", 11, 10)]
    assert names(observed_step(events, [], on_gpu=False)) == [("up", []), ("up", [])]


def test_conformance_counts_a_task_that_a_reduction_interrupted_twice_once():
    events = [
        event("task/up.backward", 0, 10),
        event("task/up.recompute", 11, 10),
        event("task/up.backward", 22, 10),
        event("task/gradients.bucket0", 33, 10),
        event("aten::first", 34, 2, category="cpu_op"),
        event("task/up.backward", 44, 10),
        event("aten::second", 45, 2, category="cpu_op"),
        event("task/up.backward", 55, 10),
    ]
    assert names(observed_step(events, [], on_gpu=False)) == [
        ("up.backward", ["aten::second"]),
        ("up.recompute", []),
        ("gradients.bucket0", ["aten::first"]),
        ("up.backward", []),
    ]


def test_conformance_takes_the_time_of_the_innermost_operators():
    events = [
        event("task/up", 0, 100),
        event("aten::linear", 10, 50, category="cpu_op"),
        event("aten::addmm", 20, 30, category="cpu_op"),
        # A thread without tasks works for the task of the time.
        event("aten::copy_", 80, 10, category="cpu_op", thread=2),
        event("aten::clone", 110, 10, category="cpu_op"),
    ]
    step = observed_step(events, [], on_gpu=False)
    assert (step.busy_seconds, step.named_seconds) == pytest.approx((50e-6, 40e-6))
