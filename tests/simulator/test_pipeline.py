import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.costs import task_flops
from simulator.engine import run_program, step_seconds
from simulator.matching import mismatches
from simulator.memory import peak_memory
from simulator.pipeline import Action, most_kept, rank_actions
from simulator.specs.cluster import BUILT_IN_CLUSTERS
from simulator.specs.cost import CollectiveCost, TaskCost
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, PipelineSchedule, Plan, batch_parts, seed_ranges
from simulator.specs.program import MESSAGES, Phase, Program, Stream, TaskKind
from simulator.workload import lower, num_updated, parameter_shapes, rank_parameter_shapes
from tests.made import equal_parts, graph_of, made_plan, made_sampled, made_sampled_plan

GPIPE, ONE_F_ONE_B, INTERLEAVED = PipelineSchedule
PARTS = equal_parts(48, num_nodes=480, num_edges=4800)
GRAPH, CLUSTER = graph_of(PARTS), BUILT_IN_CLUSTERS["h200x8"]
MODEL = ModelSpec(width=24, num_heads=3, num_layers=8, feed_forward_width=40)


def staged(schedule: PipelineSchedule, degree: int, num_micro_batches: int, **fields: object) -> Plan:
    """Return a plan of eight layers in equal stages, two for each rank where they are interleaved."""
    num_stages = degree * (2 if schedule is INTERLEAVED else 1)
    defaults: dict[str, object] = {"graph_parallel_degree": 1, "stages": (8 // num_stages,) * num_stages}
    return made_plan(
        PARTS,
        num_layers=8,
        pipeline_parallel_degree=degree,
        pipeline_schedule=schedule,
        num_micro_batches=num_micro_batches,
        **(defaults | fields),
    )


@st.composite
def staged_plans(draw) -> Plan:
    """Plans of stages, with other axes."""
    schedule, degree = draw(st.sampled_from(PipelineSchedule)), draw(st.sampled_from([2, 4]))
    turns = draw(st.integers(1, 3))
    batches = turns * degree if schedule is INTERLEAVED else draw(st.integers(1, 6))
    graph_degree = draw(st.sampled_from([1, 2]))
    return staged(
        schedule,
        degree,
        batches,
        data_parallel_degree=draw(st.sampled_from([1, 2])),
        graph_parallel_degree=graph_degree,
        parts_per_batch=graph_degree,
    )


@given(plan=staged_plans())
def test_each_stage_takes_each_micro_batch_forward_and_then_back(plan):
    seen: Counter[Action] = Counter()
    for rank in range(plan.pipeline_parallel_degree):
        actions = rank_actions(plan, rank)
        seen.update(actions)
        for action in actions:
            if action.phase is Phase.BACKWARD:
                forward = dataclasses.replace(action, phase=Phase.FORWARD)
                assert actions.index(forward) < actions.index(action)
    assert len(seen) == 2 * plan.num_stages * plan.num_micro_batches
    assert set(seen.values()) == {1}


@given(rank=st.integers(0, 3), batches=st.integers(1, 9))
def test_1f1b_keeps_no_more_micro_batches_than_there_are_stages_ahead(rank, batches):
    kept = {
        schedule: most_kept(rank_actions(staged(schedule, 4, batches), rank), lambda stage, batch: 1)
        for schedule in (GPIPE, ONE_F_ONE_B)
    }
    assert kept == {GPIPE: batches, ONE_F_ONE_B: min(4 - rank, batches)}


@given(plan=staged_plans())
def test_programs_of_stages_match(plan):
    assert mismatches(lower(plan, GRAPH, MODEL, CLUSTER)) == []


@given(plan=staged_plans())
def test_ranks_of_stages_do_what_one_device_would(plan):
    whole = dataclasses.replace(plan, pipeline_parallel_degree=1, stages=(), pipeline_schedule=ONE_F_ONE_B)

    def flops(program: Program) -> float:
        return sum(
            task_flops(task.kind, task.phase, task.shape)
            for tasks in program.tasks
            for task in tasks
            if not task.kind.is_collective
        )

    assert flops(lower(plan, GRAPH, MODEL, CLUSTER)) == pytest.approx(flops(lower(whole, GRAPH, MODEL, CLUSTER)))


@given(plan=staged_plans())
def test_messages_go_to_the_same_place_in_the_next_stage(plan):
    for rank, tasks in enumerate(lower(plan, GRAPH, MODEL, CLUSTER).tasks):
        mine = plan.mesh.coordinates(rank)
        for task in tasks:
            if task.kind in MESSAGES:
                assert task.group.index(rank) == (task.kind is TaskKind.RECEIVE)
                for other in map(plan.mesh.coordinates, task.group):
                    assert (other.dp, other.gp, other.tp) == (mine.dp, mine.gp, mine.tp)


def test_a_message_has_the_rows_of_its_micro_batch_by_hand():
    # Parts of 10 nodes, three a batch, 24 columns of four bytes.
    program = lower(staged(ONE_F_ONE_B, 2, 2, parts_per_batch=3), GRAPH, MODEL, CLUSTER)
    first, second = ([task for task in tasks if task.kind in MESSAGES] for tasks in program.tasks)
    assert [(task.name, task.kind, task.shape, task.group) for task in first] == [
        ("mb0.stage0.output", TaskKind.SEND, (2880,), (0, 1)),
        ("mb0.stage0.output.backward", TaskKind.RECEIVE, (2880,), (1, 0)),
        ("mb1.stage0.output", TaskKind.SEND, (2880,), (0, 1)),
        ("mb1.stage0.output.backward", TaskKind.RECEIVE, (2880,), (1, 0)),
    ]
    assert [(task.name, task.kind, task.stream) for task in second] == [
        ("mb0.stage0.output", TaskKind.RECEIVE, Stream.RECEIVED),
        ("mb1.stage0.output", TaskKind.RECEIVE, Stream.RECEIVED),
        ("mb0.stage0.output.backward", TaskKind.SEND, Stream.SENT_GRADIENTS),
        ("mb1.stage0.output.backward", TaskKind.SEND, Stream.SENT_GRADIENTS),
    ]


def seconds_of(plan: Plan, *, message_seconds: float = 0.0) -> float:
    """Return the step time if a layer takes a second forward and two back, and nothing else takes any time."""

    def compute_cost(rank, task):
        of_layer = task.kind is TaskKind.ATTENTION
        return TaskCost(host_seconds=0.0, device_seconds=of_layer * (2.0 if task.phase is Phase.BACKWARD else 1.0))

    def collective_cost(tasks):
        latency = message_seconds if tasks[0].kind in MESSAGES else 0.0
        return CollectiveCost(host_seconds=0.0, latency_seconds=latency, flows=())

    program = lower(plan, GRAPH, MODEL, CLUSTER)
    return step_seconds(
        run_program(program, compute_cost=compute_cost, collective_cost=collective_cost, port_capacities={})
    )


@pytest.mark.parametrize(
    ("plan", "seconds"),
    [
        # Eight layers take 24 s a micro-batch on one device.
        (staged(ONE_F_ONE_B, 1, 4, stages=()), 4 * 24),
        # A stage of a half or a quarter of them; each rank is idle for as many of its passes as there are others.
        (staged(GPIPE, 2, 4), (4 + 1) * 12),
        (staged(ONE_F_ONE_B, 2, 4), (4 + 1) * 12),
        (staged(GPIPE, 4, 8), (8 + 3) * 6),
        (staged(ONE_F_ONE_B, 4, 8), (8 + 3) * 6),
        # Interleaved, passes are half as long, and so is the idle time.
        (staged(INTERLEAVED, 2, 4), 4 * 12 + 6),
        (staged(INTERLEAVED, 4, 8), 8 * 6 + 3 * 3),
        (staged(GPIPE, 4, 1), 24),
    ],
)
def test_idle_time_of_each_schedule_by_hand(plan, seconds):
    assert seconds_of(plan) == pytest.approx(seconds)


def test_gpipe_waits_for_one_message_after_the_other_but_sends_beside_its_passes():
    # Forward and back, the first and the last micro-batch cross three borders.
    assert seconds_of(staged(GPIPE, 4, 8), message_seconds=0.25) == pytest.approx((8 + 3) * 6 + 6 * 0.25)


def test_memory_of_stages_by_hand():
    def memory(schedule: PipelineSchedule, batches: int) -> list[dict[str, int]]:
        plan = staged(schedule, 2, batches, keep_batches=True)
        return [dict(found) for found in peak_memory(plan, GRAPH, MODEL, CLUSTER)]

    (once, _), (gpipe, _), (one_f_one_b, last) = memory(GPIPE, 1), memory(GPIPE, 6), memory(ONE_F_ONE_B, 6)
    assert gpipe["activations"] == 6 * once["activations"]
    assert one_f_one_b["activations"] == 2 * once["activations"]
    plan = staged(ONE_F_ONE_B, 2, 6)
    assert [4 * num_updated(plan, GRAPH, MODEL, rank) for rank in (0, 1)] == [
        one_f_one_b["parameters"],
        last["parameters"],
    ]


@given(plan=staged_plans())
def test_each_parameter_is_on_the_ranks_of_one_stage(plan):
    found = [
        name for rank in plan.mesh.group(("pp",), 0) for name, _ in rank_parameter_shapes(plan, GRAPH, MODEL, rank)
    ]
    assert sorted(found) == sorted(name for name, _ in parameter_shapes(GRAPH, MODEL))


@given(batches=st.integers(1, 5), replicas=st.integers(1, 3), seed=st.integers(0, 5))
def test_the_micro_batches_of_an_epoch_have_each_part_once(batches, replicas, seed):
    plan = staged(ONE_F_ONE_B, 1, batches, stages=(), data_parallel_degree=replicas, parts_per_batch=2)
    found = [
        part
        for step in range(plan.steps_per_epoch)
        for micro_batch in range(batches)
        for parts in batch_parts(plan, step=step, seed=seed, micro_batch=micro_batch)
        for part in parts
    ]
    assert sorted(found) == list(range(48))


@given(batches=st.integers(1, 5), replicas=st.integers(1, 3))
def test_the_micro_batches_of_an_epoch_have_each_seed_once(batches, replicas):
    sampled = made_sampled((50, 20, 90), (20, 7, 40), seeds_per_batch=7)
    plan = made_sampled_plan(PARTS, sampled, data_parallel_degree=replicas, num_micro_batches=batches)
    ranges = [
        found
        for step in range(plan.steps_per_epoch)
        for micro_batch in range(batches)
        for found in seed_ranges(plan, step=step, micro_batch=micro_batch)
    ]
    assert [seed for first, end in ranges for seed in range(first, end)] == list(range(plan.num_train_nodes))
    assert max(end - first for first, end in ranges) <= 7


# --- Programs that do not match.


def changed(program: Program, rank: int, name: str, **fields: Any) -> Program:
    """Return a program in which one task of a rank is another."""
    tasks = [list(of_rank) for of_rank in program.tasks]
    index = next(index for index, task in enumerate(tasks[rank]) if task.name == name)
    tasks[rank][index] = dataclasses.replace(tasks[rank][index], **fields)
    return Program(tasks=tuple(map(tuple, tasks)))


def test_a_message_of_other_bytes_than_expected_is_found():
    program = lower(staged(ONE_F_ONE_B, 2, 2), GRAPH, MODEL, CLUSTER)
    (sentence,) = mismatches(changed(program, 1, "mb1.stage0.output", shape=(4,)))
    assert sentence == 'rank 0 sends "mb1.stage0.output" (send of ranks 0-1) with bytes 960, but rank 1 expects 4'


def test_a_message_that_both_send_is_found():
    program = lower(staged(ONE_F_ONE_B, 2, 2), GRAPH, MODEL, CLUSTER)
    found = mismatches(changed(program, 1, "mb1.stage0.output", kind=TaskKind.SEND))
    assert any("must be sent by its first rank and received by its second one" in sentence for sentence in found)


def test_messages_that_arrive_in_another_order_are_found():
    program = lower(staged(GPIPE, 2, 2), GRAPH, MODEL, CLUSTER)
    names = {"mb0.stage0.output": "mb1.stage0.output", "mb1.stage0.output": "mb0.stage0.output"}
    swapped = tuple(dataclasses.replace(task, name=names.get(task.name, task.name)) for task in program.tasks[1])
    (sentence,) = mismatches(Program(tasks=(program.tasks[0], swapped)))
    assert sentence == (
        'rank 0 issues "mb0.stage0.output" (send of ranks 0-1) where rank 1 issues "mb1.stage0.output" (send of '
        "ranks 0-1)"
    )


def test_ranks_that_wait_for_each_others_messages_are_found():
    program = lower(staged(ONE_F_ONE_B, 2, 1), GRAPH, MODEL, CLUSTER)
    # The first rank waits for a gradient before it sends the rows from which it is made.
    first = list(program.tasks[0])
    received = next(index for index, task in enumerate(first) if task.kind is TaskKind.RECEIVE)
    arrival = dataclasses.replace(first.pop(received), waits_for=())
    compute = [dataclasses.replace(task, waits_for=(0,)) for task in first]
    (sentence,) = mismatches(Program(tasks=((arrival, *compute), program.tasks[1])))
    assert sentence.startswith("the collectives have no one order: ")


def test_one_replica_stands_for_all_and_its_messages_for_theirs():
    plan = staged(ONE_F_ONE_B, 2, 1, data_parallel_degree=3, exchange=(Exchange.NONE,) * 8)
    program = lower(plan, GRAPH, MODEL, CLUSTER)
    assert [task.group for task in program.tasks[4] if task.kind is TaskKind.SEND] == [(4, 5)]
