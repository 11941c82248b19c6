"""What no rank can see alone: programs match as they are lowered, and whatever is changed in one is found."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.constraints import has_ranks_without_heads
from simulator.exchanges import num_messages, rows_per_message
from simulator.matching import mismatches
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, Plan
from simulator.specs.program import Program, Stream, Task, TaskKind
from simulator.specs.units import Dtype
from simulator.workload import lower, rank_work
from tests.made import equal_parts, graph_of, made_cluster, made_model, made_plan, made_task, three_parts_on_two_hosts
from tests.strategies import plans_for, sampled_plans, served_plans

MODEL = made_model(width=24, num_heads=3)
# About this many messages carry the rows of the largest pair of ranks.
MOST_MESSAGES = 4


def lowered(plan: Plan, model: ModelSpec = MODEL, *, step: int = 0) -> Program:
    """Return a step on hosts of as many devices as the plan counts on."""
    per_host = plan.ranks_per_host or plan.num_ranks
    cluster = made_cluster(num_hosts=-(-plan.num_ranks // per_host), devices_per_host=per_host)
    return lower(plan, graph_of(plan.partition), model, cluster, step=step)


@st.composite
def chosen_plans(draw) -> Plan:
    """Draw a plan that ranks could run, its messages cut into chunks at times."""
    plan: Plan = draw(plans_for(MODEL.num_layers) | sampled_plans() | served_plans(MODEL.num_layers))
    has_chunks = Exchange.HIERARCHICAL_HALO not in plan.exchange and plan.partition.shares is None
    if draw(st.booleans()) and has_chunks:
        most_rows = max(max(work.group.max_pair_rows, max(work.group.rows_by_rank)) for work in works_of(plan))
        rows = -(-max(most_rows, 1) // draw(st.integers(1, MOST_MESSAGES)))
        row_bytes = 3 * MODEL.width * 4 * max(plan.graph_parallel_degree - 1, 1)
        plan = replace(plan, exchange_chunk_bytes=rows * row_bytes)
        each = rows_per_message(plan, MODEL, Exchange.HALO)
        assert num_messages(most_rows, each) <= MOST_MESSAGES
    if has_ranks_without_heads(plan, MODEL):
        plan = replace(plan, overlap_gradients=False)
    return plan


def sends_rows(plan: Plan) -> bool:
    """Return whether some layer has an all-to-all."""
    return bool(set(plan.exchange) - {Exchange.NONE, Exchange.ALL_GATHER})


def works_of(plan: Plan):
    """Return what each rank holds in the first step."""
    return rank_work(plan, step=0, seed=0)


@given(chosen_plans(), st.integers(0, 3))
def test_every_lowered_program_matches(plan, step):
    assert mismatches(lowered(plan, step=step)) == []


@settings(max_examples=10)
@given(chosen_plans(), st.integers(0, 3))
def test_a_program_whose_ranks_share_no_lists_matches_too(plan, step):
    assert mismatches(Program(tasks=tuple(lowered(plan, step=step).tasks))) == []


def test_hierarchical_exchanges_match():
    partition = three_parts_on_two_hosts()
    plan = made_plan(partition, exchange=(Exchange.HIERARCHICAL_HALO, Exchange.HALO))
    program = lowered(plan)
    assert any(task.group == (0, 1) for task in program.tasks[0])
    assert mismatches(program) == []


def test_ranks_without_heads_would_begin_buckets_elsewhere_which_is_found():
    # The reason why constraints refuse it: a rank without heads has no attention whose backward pass ends a bucket.
    plan = made_plan(
        equal_parts(2, num_nodes=40, num_edges=80, halo_rows=3),
        exchange=(Exchange.HEAD_ALL_TO_ALL,) * 2,
        overlap_gradients=True,
        gradient_bucket_bytes=4,
    )
    model = made_model(num_heads=1, edge_bias=EdgeBias.DEGREE)
    assert has_ranks_without_heads(plan, model)
    found = mismatches(lowered(plan, model))
    assert any("rank 0 issues" in sentence and "where rank 1 issues" in sentence for sentence in found), found


# --- Whatever is changed on one rank is found.


def with_tasks(program: Program, rank: int, tasks: Sequence[Task]) -> Program:
    """Return a program with other tasks of one rank; what they wait for is not looked at here."""
    return Program(tasks=(*program.tasks[:rank], tuple(tasks), *program.tasks[rank + 1 :]))


def drop(tasks, index, draw):
    return [*tasks[:index], *tasks[index + 1 :]]


def change_sent(tasks, index, draw):
    return _with_sizes(tasks, index, draw, "shape")


def change_received(tasks, index, draw):
    return _with_sizes(tasks, index, draw, "receives")


def _with_sizes(tasks, index, draw, field):
    sizes = list(getattr(tasks[index], field))
    place = draw(st.integers(0, len(sizes) - 1))
    sizes[place] += draw(st.sampled_from([4, -4, 1000]))
    return _with(tasks, index, **{field: tuple(sizes)})


def leave_group(tasks, index, draw):
    left = draw(st.sampled_from(tasks[index].group))
    return _with(tasks, index, group=tuple(rank for rank in tasks[index].group if rank != left))


def turn_group(tasks, index, draw):
    return _with(tasks, index, group=tasks[index].group[::-1])


def change_kind(tasks, index, draw):
    kind = TaskKind.ALL_REDUCE if tasks[index].kind is not TaskKind.ALL_REDUCE else TaskKind.ALL_GATHER
    return _with(tasks, index, kind=kind)


def change_format(tasks, index, draw):
    other = Dtype.FLOAT32 if tasks[index].dtype is Dtype.BFLOAT16 else Dtype.BFLOAT16
    return _with(tasks, index, dtype=other)


def change_stream(tasks, index, draw):
    return _with(tasks, index, stream=Stream.COMPUTE)


def rename(tasks, index, draw):
    return _with(tasks, index, name="another")


def issue_twice(tasks, index, draw):
    return [*tasks, tasks[index]]


def swap(tasks, index, draw):
    other = draw(st.sampled_from([other for other in indices_of(tasks) if other != index]))
    found = list(tasks)
    found[index], found[other] = found[other], found[index]
    return found


def _with(tasks, index, **fields):
    return [*tasks[:index], replace(tasks[index], **fields), *tasks[index + 1 :]]


CHANGES = (
    drop,
    change_sent,
    change_received,
    leave_group,
    turn_group,
    change_kind,
    change_format,
    change_stream,
    rename,
    issue_twice,
    swap,
)


def indices_of(tasks: Sequence[Task]) -> list[int]:
    """Return where the collectives of several ranks are."""
    return [index for index, task in enumerate(tasks) if len(task.group) > 1]


@pytest.mark.parametrize("change", CHANGES)
@settings(max_examples=8)
@given(plan=chosen_plans().filter(sends_rows), data=st.data())
def test_whatever_one_rank_does_otherwise_is_found(change, plan, data):
    program = lowered(plan)
    rank = data.draw(st.integers(0, program.num_ranks - 1))
    tasks = program.tasks[rank]
    indices = [index for index in indices_of(tasks) if change is not change_received or tasks[index].receives]
    changed = change(tasks, data.draw(st.sampled_from(indices)), data.draw)
    assert mismatches(with_tasks(program, rank, changed)) != []


# --- What is said, by hand.

PAIR = (0, 1)


def program_of(*ranks: Sequence[Task]) -> Program:
    """Return a program of these ranks."""
    return Program(tasks=tuple(map(tuple, ranks)))


def reduce(name: str, group: tuple[int, ...], num_bytes: int = 8) -> Task:
    return made_task(TaskKind.ALL_REDUCE, (num_bytes,), group=group, name=name)


def exchange(name: str, sends: tuple[int, ...], receives: tuple[int, ...], group: tuple[int, ...] = PAIR) -> Task:
    return replace(made_task(TaskKind.ALL_TO_ALL, sends, group=group, name=name), receives=receives)


def test_a_pair_that_sends_other_bytes_than_it_expects_is_named_with_both_numbers():
    program = program_of([exchange("rows", (0, 8), (0, 12))], [exchange("rows", (12, 0), (4, 0))])
    assert mismatches(program) == [
        'rank 0 sends 8 bytes to rank 1 in "rows" (all_to_all of ranks 0-1), but that expects 4'
    ]


def test_several_wrong_pairs_of_one_exchange_are_one_sentence():
    program = program_of([exchange("rows", (0, 8), (0, 12))], [exchange("rows", (16, 0), (4, 0))])
    (sentence,) = mismatches(program)
    assert sentence.endswith("but that expects 4; 1 other pairs do not match either")


def test_an_exchange_that_does_not_say_what_it_receives_is_told():
    program = program_of([exchange("rows", (0, 8), (0, 0))], [exchange("rows", (0, 0), ())])
    (sentence,) = mismatches(program)
    assert "rank 1 must say" in sentence
    assert "what it receives for each of 2 ranks, rank 0 among them, got ()" in sentence


def test_a_message_is_an_exchange_of_two_ranks_in_which_one_sends_nothing():
    # Two micro-batches through two stages, one forward and one backward in turn.
    first = [("f0", 0, 6), ("f1", 0, 6), ("b0", 1, 5), ("b1", 1, 5)]
    by_rank = [
        [
            exchange(name, *(((0, size), (0, 0)) if rank == source == 0 else ((size, 0), (0, 0))))
            if rank == source
            else exchange(name, (0, 0), (size, 0) if source == 0 else (0, size))
            for name, source, size in first
        ]
        for rank in PAIR
    ]
    assert mismatches(program_of(*by_rank)) == []
    # A stage that waits for gradients before it has sent the second activation.
    by_rank[0][1], by_rank[0][2] = by_rank[0][2], by_rank[0][1]
    assert mismatches(program_of(*by_rank)) == [
        'rank 0 issues "b0" (all_to_all of ranks 0-1) where rank 1 issues "f1" (all_to_all of ranks 0-1)'
    ]


def test_a_rank_that_lacks_a_collective_is_named_with_one_that_waits_for_it():
    program = program_of([reduce("sum", (0, 1, 2))], [reduce("sum", (0, 1, 2))], [])
    assert mismatches(program) == [
        'rank 0 issues "sum" (all_reduce of ranks 0-2), which rank 2 does not; missing are rank 2'
    ]


def test_a_rank_that_names_another_group_is_told_so():
    program = program_of([reduce("sum", (0, 1, 2))], [reduce("sum", (0, 1, 2))], [reduce("sum", (1, 2))])
    found = mismatches(program)
    assert found[0] == (
        'rank 0 issues "sum" (all_reduce of ranks 0-2), which rank 2 does not, but "sum" (all_reduce of ranks 1-2); '
        "missing are rank 2"
    )


def test_a_stranger_to_a_group_is_named():
    found = mismatches(program_of([reduce("sum", (0, 1))], [reduce("sum", (0, 1))], [reduce("sum", (0, 1))]))
    assert found == ['rank 2 issues "sum" (all_reduce of ranks 0-1), to whose group it does not belong']


def test_a_group_of_ranks_that_there_are_not_is_told():
    found = mismatches(program_of([reduce("sum", (0, 5))]))
    assert found[0] == '"sum" must be of distinct ranks below 1, got ranks 0, 5'


def test_ranks_that_give_different_bytes_are_named_with_both():
    found = mismatches(program_of([reduce("sum", PAIR)], [reduce("sum", PAIR, 12)]))
    assert found == ['rank 0 gives 8 bytes to "sum" (all_reduce of ranks 0-1), but rank 1 12 bytes']


def test_shares_of_a_reduce_scatter_must_be_whole():
    scattered = made_task(TaskKind.REDUCE_SCATTER, (9,), group=PAIR, name="shares")
    (sentence,) = mismatches(program_of([scattered], [scattered]))
    assert sentence.startswith('9 bytes of "shares" (reduce_scatter of ranks 0-1) do not divide by its 2 ranks')


def test_another_number_format_is_named_with_both_ranks():
    half = replace(reduce("sum", PAIR), dtype=Dtype.BFLOAT16)
    assert mismatches(program_of([reduce("sum", PAIR)], [half])) == [
        'rank 0 issues "sum" (all_reduce of ranks 0-1) with dtype fp32, but rank 1 with bf16'
    ]


def test_three_groups_may_have_no_one_order_though_each_two_ranks_agree():
    # Rank 0 waits in a for rank 1, which waits in b for rank 2, which waits in c for rank 0.
    a, b, c = reduce("a", (0, 1)), reduce("b", (1, 2)), reduce("c", (0, 2))
    (sentence,) = mismatches(program_of([a, c], [b, a], [c, b]))
    assert sentence.startswith("the collectives have no one order: rank ")
    for rank, first, second in ((0, a, c), (1, b, a), (2, c, b)):
        texts = [
            f'"{task.name}" (all_reduce of ranks {str(task.group)[1:-1].replace(", ", "-")})'
            for task in (first, second)
        ]
        texts = [text.replace("ranks 0-2", "ranks 0, 2") for text in texts]
        assert f"rank {rank} issues {texts[0]} before {texts[1]}" in sentence
    assert mismatches(program_of([a, c], [a, b], [b, c])) == []


def test_two_communicators_of_the_same_ranks_need_one_order_too():
    # Gradients go on beside the backward pass; NCCL would run either first, but not each rank another one.
    beside = replace(reduce("bucket", PAIR), stream=Stream.GRADIENTS)
    rows = exchange("rows", (0, 8), (0, 8)), exchange("rows", (8, 0), (8, 0))
    assert mismatches(program_of([beside, rows[0]], [beside, rows[1]])) == []
    assert mismatches(program_of([beside, rows[0]], [rows[1], beside])) != []


@pytest.mark.parametrize("num_replicas", [2, 40])
def test_replicas_that_are_alike_are_told_once(num_replicas):
    plan = made_plan(
        equal_parts(2, num_nodes=40, num_edges=80, halo_rows=3),
        data_parallel_degree=num_replicas,
        gradient_compression=GradientCompression(kind=CompressionKind.BF16),
    )
    program = lowered(plan)
    index = next(index for index, task in enumerate(program.tasks[1]) if task.name == "layer1.exchange")
    shared = program.shared
    lists = [*shared.lists]
    lists[1] = tuple(_with(lists[1], index, shape=(999, 0)))
    assert mismatches(Program(tasks=replace(shared, lists=tuple(lists)))) == [
        'rank 1 sends 999 bytes to rank 0 in "layer1.exchange" (all_to_all of ranks 0-1), but that expects 576'
    ]
