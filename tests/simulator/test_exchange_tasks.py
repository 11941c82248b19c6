"""How a layer's exchange is lowered: names, bytes, order and what waits for what."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.exchanges import first_head, head_counts, num_messages, rows_in_message, rows_per_message
from simulator.simulation import simulate
from simulator.specs.cluster import LinkSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, ExchangePayload, Plan
from simulator.specs.program import ATTENTION_PASSES, Phase, Stream, Task, TaskKind
from simulator.specs.units import Dtype
from simulator.workload import lower
from tests.made import (
    graph_of,
    made_calibration,
    made_cluster,
    made_model,
    made_part,
    made_partition,
    made_plan,
    three_parts_on_two_hosts,
    two_parts_on_three_ranks,
)
from tests.strategies import models, partitions, served_plans

CPU = made_cluster()
HALO, GATHER, HEADS = Exchange.HALO, Exchange.ALL_GATHER, Exchange.HEAD_ALL_TO_ALL
ROWS = ExchangePayload.ROWS
# Rank 0 owns 10 nodes and sends 4 of them to rank 1, which owns 20 and sends 3; 6 and 9 of them need rows of the other.
TWO = made_partition(
    [
        made_part(
            10,
            [5, 7],
            [0, 3],
            edges_of_long_targets_from=[3, 5],
            edges_of_long_sources_from=[2, 4],
            inner_edges_of_long_targets=1,
            outer_edges_of_long_targets=6,
            edges_out_of_long_sources=8,
            boundary_nodes_from=[0, 6],
        ),
        made_part(20, [9, 2], [4, 0], edges_out_of_long_sources=3, boundary_nodes_from=[9, 0]),
    ]
)


def tasks_of(plan: Plan, model: ModelSpec | None = None, *, rank: int = 0) -> tuple[Task, ...]:
    model = model or made_model(width=8, num_heads=2, num_layers=1)
    return lower(plan, graph_of(plan.partition), model, CPU).tasks[rank]


def attention_of(
    plan: Plan, model: ModelSpec | None = None, *, rank: int = 0
) -> list[tuple[str, Any, tuple[int, ...]]]:
    """Return the tasks between the first norm and the attention's output, forward and back."""
    found = []
    is_inside = False
    for task in tasks_of(plan, model, rank=rank):
        name = task.name.removeprefix("layer0.")
        if name in ("attention_output", "attention_norm.backward"):
            is_inside = False
        if is_inside:
            found.append((name, task.kind, task.shape))
        if name in ("attention_norm", "attention_output.backward"):
            is_inside = True
    return found


def plan_of(exchange: Exchange, **fields: Any) -> Plan:
    return made_plan(TWO, num_layers=1, exchange=(exchange,), **fields)


# --- By hand.


def test_an_overlapped_halo_by_hand():
    # Backward, the gradients of the halo travel while the pass over targets runs; both passes go over all 12 edges.
    whole = (10, 13, 12, 8, 6, 2, 4)
    # Keys and values come first, so that they can travel while queries are made.
    assert attention_of(plan_of(HALO, overlap_exchange=True)) == [
        ("key_value", TaskKind.PROJECTION, (10, 8, 16)),
        ("pack", TaskKind.HALO_PACK, (0, 4, 16)),
        ("exchange", TaskKind.ALL_TO_ALL, (0, 4 * 16 * 4)),
        ("query", TaskKind.PROJECTION, (10, 8, 8)),
        ("attention_interior", TaskKind.ATTENTION, (10, 10, 5, 1, 2, 2, 4)),
        ("attention_halo", TaskKind.ATTENTION, (6, 3, 7, 6, 4, 2, 4)),
        ("merge", TaskKind.MERGE, (10, 6, 2, 4)),
        ("attention_sources.backward", TaskKind.ATTENTION_SOURCES, whole),
        ("exchange.backward", TaskKind.ALL_TO_ALL, (0, 3 * 16 * 4)),
        ("attention_targets.backward", TaskKind.ATTENTION_TARGETS, whole),
        ("query.backward", TaskKind.PROJECTION, (10, 8, 8)),
        ("pack.backward", TaskKind.HALO_PACK, (0, 4, 16)),
        ("key_value.backward", TaskKind.PROJECTION, (10, 8, 16)),
    ]


def test_a_rank_that_serves_a_part_with_another_by_hand():
    # It has 10 of 20 rows and 1 of 2 heads. Own rows have 20 heads in all; 1 row goes to rank 0 with both heads. Of
    # keys and values a head of a row is 32 bytes, of queries and outputs 16. It attends to 10 own rows, 4 of rank 0 and
    # 10 of rank 2.
    plan = made_plan(two_parts_on_three_ranks(), num_layers=1)
    attention = (20, 24, 11, 0, 0, 1, 4)
    assert attention_of(plan, rank=1) == [
        ("query_key_value", TaskKind.PROJECTION, (10, 8, 24)),
        ("query_pack", TaskKind.COPY_ROWS, (10, 8)),
        ("query_exchange", TaskKind.ALL_TO_ALL, (0, 160)),
        ("pack", TaskKind.HALO_PACK, (20, 2, 8)),
        ("exchange", TaskKind.ALL_TO_ALL, (64, 0, 320)),
        ("attention", TaskKind.ATTENTION, attention),
        ("exchange_back", TaskKind.ALL_TO_ALL, (0, 160)),
        ("unpack", TaskKind.COPY_ROWS, (10, 8)),
        ("unpack.backward", TaskKind.COPY_ROWS, (10, 8)),
        ("exchange_back.backward", TaskKind.ALL_TO_ALL, (0, 160)),
        ("attention.backward", TaskKind.ATTENTION, attention),
        ("exchange.backward", TaskKind.ALL_TO_ALL, (128, 0, 320)),
        ("pack.backward", TaskKind.HALO_PACK, (20, 2, 8)),
        ("query_exchange.backward", TaskKind.ALL_TO_ALL, (0, 160)),
        ("query_pack.backward", TaskKind.COPY_ROWS, (10, 8)),
        ("query_key_value.backward", TaskKind.PROJECTION, (10, 8, 24)),
    ]
    groups = {task.name: task.group for task in tasks_of(plan, rank=1) if task.kind is TaskKind.ALL_TO_ALL}
    assert groups["layer0.query_exchange"] == groups["layer0.exchange_back.backward"] == (1, 2)
    assert groups["layer0.exchange"] == (0, 1, 2)


def test_beside_it_a_rank_that_serves_its_part_alone_has_a_halo_exchange_by_hand():
    # 4 rows go to either rank of the other part with a head each, 8 heads of rows; gradients of own rows stay.
    plan = made_plan(two_parts_on_three_ranks(), num_layers=1)
    attention = (10, 13, 12, 8, 6, 2, 4)
    assert attention_of(plan, rank=0) == [
        ("query_key_value", TaskKind.PROJECTION, (10, 8, 24)),
        ("pack", TaskKind.HALO_PACK, (20, 8, 8)),
        ("exchange", TaskKind.ALL_TO_ALL, (0, 128, 128)),
        ("attention", TaskKind.ATTENTION, attention),
        ("attention.backward", TaskKind.ATTENTION, attention),
        ("exchange.backward", TaskKind.ALL_TO_ALL, (0, 64, 128)),
        ("pack.backward", TaskKind.HALO_PACK, (0, 8, 8)),
        ("query_key_value.backward", TaskKind.PROJECTION, (10, 8, 24)),
    ]


@given(plan=served_plans(1), num_heads=st.integers(3, 6))
def test_ranks_of_a_part_attend_with_every_head_over_all_its_edges(plan, num_heads):
    model = made_model(width=4 * num_heads, num_heads=num_heads, num_layers=1)
    shares = plan.partition.shares
    shapes = [
        next(task.shape for task in tasks if task.kind is TaskKind.ATTENTION)
        for tasks in lower(plan, graph_of(plan.partition), model, CPU).tasks
    ]
    for index, part in enumerate(plan.partition.parts):
        mine = [shapes[rank] for rank in shares.ranks_of(index)]
        assert sum(shape[5] for shape in mine) == num_heads
        assert {(shape[0], shape[1], shape[2]) for shape in mine} == {
            (part.num_nodes, part.num_nodes + part.num_halo_rows, part.num_edges)
        }


def test_an_overlapped_all_gather_takes_own_rows_from_where_they_were_made_by_hand():
    # Of the 20 rows of the larger rank 10 are padding here; the gradients are a view of what was summed.
    found = attention_of(plan_of(GATHER, overlap_exchange=True))
    assert found[:4] == [
        ("key_value", TaskKind.PROJECTION, (10, 8, 16)),
        ("pack", TaskKind.PAD_ROWS, (0, 10, 16)),
        ("exchange", TaskKind.ALL_GATHER, (20 * 64,)),
        ("query", TaskKind.PROJECTION, (10, 8, 8)),
    ]
    assert found[-2:] == [
        ("pack.backward", TaskKind.PAD_ROWS, (10, 20, 16)),
        ("key_value.backward", TaskKind.PROJECTION, (10, 8, 16)),
    ]


def test_an_overlapped_all_gather_with_a_bias_by_hand():
    # Own rows come back too, so their gradients go out and come summed; in two messages they are copied out of these.
    model = made_model(width=8, num_heads=2, num_layers=1, edge_bias=EdgeBias.DEGREE)
    whole = (10, 40, 12, 8, 6, 2, 4)
    assert attention_of(plan_of(GATHER, overlap_exchange=True, exchange_chunk_bytes=11 * 64), model) == [
        ("key_value", TaskKind.PROJECTION, (10, 8, 16)),
        ("pack_chunk0", TaskKind.PAD_ROWS, (10, 11, 16)),
        ("exchange_chunk0", TaskKind.ALL_GATHER, (11 * 64,)),
        ("pack_chunk1", TaskKind.PAD_ROWS, (0, 9, 16)),
        ("exchange_chunk1", TaskKind.ALL_GATHER, (9 * 64,)),
        ("query", TaskKind.PROJECTION, (10, 8, 8)),
        ("edge_bias_interior", TaskKind.EDGE_BIAS, (5, 2)),
        ("attention_interior", TaskKind.ATTENTION, (10, 10, 5, 1, 2, 2, 4)),
        ("edge_bias", TaskKind.EDGE_BIAS, (12, 2)),
        ("edge_bias_halo", TaskKind.EDGE_BIAS, (7, 2)),
        ("attention_halo", TaskKind.ATTENTION, (6, 40, 7, 6, 4, 2, 4)),
        ("merge", TaskKind.MERGE, (10, 6, 2, 4)),
        ("attention_sources.backward", TaskKind.ATTENTION_SOURCES, whole),
        ("exchange_chunk1.backward", TaskKind.REDUCE_SCATTER, (2 * 9 * 64,)),
        ("exchange_chunk0.backward", TaskKind.REDUCE_SCATTER, (2 * 11 * 64,)),
        ("attention_targets.backward", TaskKind.ATTENTION_TARGETS, whole),
        ("edge_bias.backward", TaskKind.EDGE_BIAS, (12, 2)),
        ("query.backward", TaskKind.PROJECTION, (10, 8, 8)),
        ("pack_chunk1.backward", TaskKind.COPY_ROWS, (0, 16)),
        ("pack_chunk0.backward", TaskKind.COPY_ROWS, (10, 16)),
        ("key_value.backward", TaskKind.PROJECTION, (10, 8, 16)),
    ]


def test_overlapped_rows_in_the_place_of_keys_and_values_by_hand():
    # Half the bytes, and the projection of the 3 rows that came; that of own rows overlaps, forward and back.
    whole = (10, 13, 12, 8, 6, 2, 4)
    assert attention_of(plan_of(HALO, overlap_exchange=True, exchange_payload=ROWS)) == [
        ("pack", TaskKind.HALO_PACK, (0, 4, 8)),
        ("exchange", TaskKind.ALL_TO_ALL, (0, 4 * 8 * 4)),
        ("key_value", TaskKind.PROJECTION, (10, 8, 16)),
        ("query", TaskKind.PROJECTION, (10, 8, 8)),
        ("attention_interior", TaskKind.ATTENTION, (10, 10, 5, 1, 2, 2, 4)),
        ("key_value_halo", TaskKind.PROJECTION, (3, 8, 16)),
        ("attention_halo", TaskKind.ATTENTION, (6, 3, 7, 6, 4, 2, 4)),
        ("merge", TaskKind.MERGE, (10, 6, 2, 4)),
        ("attention_sources.backward", TaskKind.ATTENTION_SOURCES, whole),
        ("key_value_halo.backward", TaskKind.PROJECTION, (3, 8, 16)),
        ("exchange.backward", TaskKind.ALL_TO_ALL, (0, 3 * 8 * 4)),
        ("attention_targets.backward", TaskKind.ATTENTION_TARGETS, whole),
        ("query.backward", TaskKind.PROJECTION, (10, 8, 8)),
        ("key_value.backward", TaskKind.PROJECTION, (10, 8, 16)),
        ("pack.backward", TaskKind.HALO_PACK, (0, 4, 8)),
    ]
    # In bf16 of an fp32 run: an all-gather brings own rows rounded, so the exact ones are put in their place; their
    # keys and values get all gradients from what was gathered.
    gathered = plan_of(GATHER, overlap_exchange=True, exchange_payload=ROWS, exchange_precision=Dtype.BFLOAT16)
    found = attention_of(gathered)
    assert found[6:10] == [
        ("widen", TaskKind.COPY_ROWS, (40, 8)),
        ("own_rows", TaskKind.COPY_ROWS, (10, 8)),
        ("key_value_halo", TaskKind.PROJECTION, (40, 8, 16)),
        ("attention_halo", TaskKind.ATTENTION, (6, 40, 7, 6, 4, 2, 4)),
    ]
    assert found[12:] == [
        ("key_value_halo.backward", TaskKind.PROJECTION, (40, 8, 16)),
        ("widen.backward", TaskKind.COPY_ROWS, (40, 8)),
        ("exchange.backward", TaskKind.REDUCE_SCATTER, (40 * 8 * 2,)),
        ("attention_targets.backward", TaskKind.ATTENTION_TARGETS, (10, 40, 12, 8, 6, 2, 4)),
        ("query.backward", TaskKind.PROJECTION, (10, 8, 8)),
        ("narrow.backward", TaskKind.COPY_ROWS, (20, 8)),
        ("pack.backward", TaskKind.COPY_ROWS, (10, 8)),
    ]


def test_rows_in_the_place_of_keys_and_values_by_hand():
    assert attention_of(plan_of(GATHER, exchange_payload=ROWS))[:5] == [
        ("pack", TaskKind.PAD_ROWS, (10, 20, 8)),
        ("exchange", TaskKind.ALL_GATHER, (20 * 8 * 4,)),
        ("query", TaskKind.PROJECTION, (10, 8, 8)),
        ("key_value", TaskKind.PROJECTION, (40, 8, 16)),
        ("attention", TaskKind.ATTENTION, (10, 40, 12, 8, 6, 2, 4)),
    ]


def test_an_exchange_of_heads_by_hand():
    # Three heads of 4 numbers: two on rank 0, one on rank 1. Rank 0 has 10 rows of the 30.
    model = made_model(width=12, num_heads=3, num_layers=1)
    assert attention_of(plan_of(HEADS), model) == [
        ("query_key_value", TaskKind.PROJECTION, (10, 12, 36)),
        ("pack", TaskKind.COPY_ROWS, (10, 36)),
        ("exchange", TaskKind.ALL_TO_ALL, (10 * 3 * 2 * 4 * 4, 10 * 3 * 1 * 4 * 4)),
        ("attention", TaskKind.ATTENTION, (30, 30, 23, 8, 11, 2, 4)),
        ("exchange_back", TaskKind.ALL_TO_ALL, (10 * 2 * 4 * 4, 20 * 2 * 4 * 4)),
        ("unpack", TaskKind.COPY_ROWS, (10, 12)),
        ("unpack.backward", TaskKind.COPY_ROWS, (10, 12)),
        ("exchange_back.backward", TaskKind.ALL_TO_ALL, (10 * 2 * 4 * 4, 10 * 1 * 4 * 4)),
        ("attention.backward", TaskKind.ATTENTION, (30, 30, 23, 8, 11, 2, 4)),
        ("heads.backward", TaskKind.COPY_ROWS, (30, 24)),
        ("exchange.backward", TaskKind.ALL_TO_ALL, (10 * 3 * 2 * 4 * 4, 20 * 3 * 2 * 4 * 4)),
        ("pack.backward", TaskKind.COPY_ROWS, (10, 36)),
        ("query_key_value.backward", TaskKind.PROJECTION, (10, 12, 36)),
    ]


def test_a_rank_without_heads_attends_to_nothing_but_takes_part_in_every_collective():
    # Case R23: heads need not divide by ranks.
    model = made_model(width=4, num_heads=1, num_layers=1)
    first, second = (attention_of(plan_of(HEADS), model, rank=rank) for rank in range(2))
    assert ("exchange", TaskKind.ALL_TO_ALL, (20 * 3 * 4 * 4, 0)) in second
    assert ("exchange_back", TaskKind.ALL_TO_ALL, (0, 0)) in second
    collectives = [[name for name, kind, _ in found if kind.is_collective] for found in (first, second)]
    assert collectives[0] == collectives[1]
    assert "attention" in {name for name, _, _ in first}
    assert "attention" not in {name for name, _, _ in second}


def test_messages_of_a_bound_by_hand():
    # Keys and values of a row are 64 bytes: one row to the other rank in each of as many messages as the 4 rows that
    # rank 0 sends need, although rank 1 sends 3.
    first, second = (attention_of(plan_of(HALO, exchange_chunk_bytes=127), rank=rank) for rank in range(2))
    assert [shape for name, _, shape in first if name.startswith("exchange_chunk") and "back" not in name] == [
        (0, 64)
    ] * 4
    assert [shape for name, _, shape in second if name.startswith("exchange_chunk") and "back" not in name] == [
        *[(64, 0)] * 3,
        (0, 0),
    ]
    packs = [(name, shape) for name, kind, shape in first if kind is TaskKind.HALO_PACK]
    # Own rows are copied with the first message; the gradients of the last one are added first, all in place.
    assert packs == [
        ("pack_chunk0", (10, 1, 16)),
        *[(f"pack_chunk{index}", (0, 1, 16)) for index in (1, 2, 3)],
        *[(f"pack_chunk{index}.backward", (0, 1, 16)) for index in (3, 2, 1, 0)],
    ]


def test_an_exchange_in_bf16_by_hand():
    plan = plan_of(HALO, exchange_precision=Dtype.BFLOAT16)
    assert attention_of(plan)[1:6] == [
        ("pack", TaskKind.HALO_PACK, (10, 4, 16)),
        ("narrow", TaskKind.COPY_ROWS, (4, 16)),
        ("exchange", TaskKind.ALL_TO_ALL, (0, 4 * 16 * 2)),
        ("widen", TaskKind.COPY_ROWS, (3, 16)),
        ("attention", TaskKind.ATTENTION, (10, 13, 12, 8, 6, 2, 4)),
    ]
    dtypes = {task.name: task.dtype for task in tasks_of(plan)}
    assert (dtypes["layer0.exchange"], dtypes["layer0.widen"]) == (Dtype.BFLOAT16, Dtype.FLOAT32)


# --- What waits for what.


@pytest.mark.parametrize("exchange", [HALO, GATHER])
@pytest.mark.parametrize("payload", ExchangePayload)
@pytest.mark.parametrize("chunk_bytes", [None, 200])
def test_what_overlaps_waits_for_no_exchange_and_what_needs_it_does(exchange, payload, chunk_bytes):
    # Case R19: nothing reads rows before they are there.
    tasks = tasks_of(
        plan_of(exchange, overlap_exchange=True, exchange_payload=payload, exchange_chunk_bytes=chunk_bytes)
    )
    names = [task.name.removeprefix("layer0.") for task in tasks]
    needs = "attention_halo" if payload is ExchangePayload.KEYS_AND_VALUES else "key_value_halo"
    takes_back = next(name for name in names if name.startswith("pack") and name.endswith(".backward"))
    for phase, first_user, meanwhile in (
        (Phase.FORWARD, needs, "attention_interior"),
        (Phase.BACKWARD, takes_back, "attention_targets.backward"),
    ):
        under_way = {i for i, task in enumerate(tasks) if task.kind.is_collective and task.phase is phase}
        assert under_way
        assert under_way <= set(tasks[names.index(first_user)].waits_for)
        assert max(under_way) < names.index(meanwhile) < names.index(first_user)
        assert not under_way & set(tasks[names.index(meanwhile)].waits_for)
        assert not any(tasks[i].blocks_host for i in under_way)
        assert {tasks[i].stream for i in under_way} == {Stream.COMMUNICATION}


@pytest.mark.parametrize("exchange", [HALO, GATHER])
def test_an_exchange_that_overlaps_is_hidden_behind_attention_over_own_rows(exchange):
    partition = made_partition([made_part(1000, [40_000, 10], [0, 5]), made_part(1000, [10, 40_000], [5, 0])])
    plan = made_plan(partition, num_layers=1, exchange=(exchange,), overlap_exchange=True)
    model, cluster = made_model(num_layers=1), made_cluster(devices_per_host=2)
    trace = simulate(plan, graph_of(partition), model, cluster, made_calibration())
    spans = {span.name.removeprefix("layer0."): span for span in trace.spans if span.rank == 0}
    for sent, meanwhile, last_meanwhile, first_user in (
        ("exchange", "query", "attention_interior", "attention_halo"),
        ("exchange.backward", "attention_targets.backward", "query.backward", "pack.backward"),
    ):
        assert spans[meanwhile].start_seconds < spans[sent].end_seconds < spans[last_meanwhile].end_seconds
        assert spans[first_user].start_seconds >= spans[sent].end_seconds


def test_gradients_of_an_overlapped_attention_are_reduced_when_all_of_it_has_run_backward():
    # One node of autograd gives all of them, so that of the weight is not there before those of rows have come back.
    fields: dict[str, Any] = {"overlap_gradients": True, "gradient_bucket_bytes": 4}
    plan = plan_of(HALO, overlap_exchange=True, exchange_payload=ROWS, **fields)
    names = [task.name.removeprefix("layer0.") for task in tasks_of(plan)]
    start, end = names.index("attention_sources.backward"), names.index("pack.backward")
    assert not any(name.startswith("gradients") for name in names[start:end])
    assert names[end + 1].startswith("gradients.bucket")
    assert names[end + 2] == "attention_norm.backward"


# --- Invariants.


@given(num_heads=st.integers(1, 64), num_ranks=st.integers(1, 64))
def test_heads_are_dealt_out_as_evenly_as_can_be(num_heads, num_ranks):
    counts = head_counts(num_heads, num_ranks)
    assert (sum(counts), len(counts)) == (num_heads, num_ranks)
    assert max(counts) - min(counts) <= 1
    assert [first_head(num_heads, num_ranks, rank) for rank in range(num_ranks)] == [
        sum(counts[:rank]) for rank in range(num_ranks)
    ]


@given(rows=st.lists(st.integers(0, 1000), min_size=1, max_size=5), each=st.none() | st.integers(1, 300))
def test_messages_carry_every_row_once_and_none_more_than_its_bound(rows, each):
    count = num_messages(max(rows), each)
    carried = [[rows_in_message(of_rank, index, each) for index in range(count)] for of_rank in rows]
    assert [sum(messages) for messages in carried] == rows
    assert all(0 <= number <= (each or 1000) for messages in carried for number in messages)
    assert count >= 1


@st.composite
def exchanging_plans(draw: st.DrawFn) -> tuple[Plan, ModelSpec]:
    """Draw a full-graph plan of several ranks, with any way in which rows travel, and a model."""
    partition, model = draw(partitions(draw(st.integers(2, 5)))), draw(models)
    exchange = tuple(draw(st.sampled_from([HALO, GATHER, HEADS])) for _ in range(model.num_layers))
    fields: dict[str, Any] = {
        "overlap_exchange": draw(st.booleans()),
        "exchange_payload": draw(st.sampled_from(ExchangePayload)),
        "exchange_precision": draw(st.sampled_from([None, Dtype.BFLOAT16])),
    }
    plan = made_plan(partition, num_layers=model.num_layers, exchange=exchange, **fields)
    if draw(st.booleans()):
        row_bytes = (partition.num_parts - 1) * 3 * model.width * 4
        plan = dataclasses.replace(plan, exchange_chunk_bytes=draw(st.integers(row_bytes * 20, row_bytes * 200)))
    return plan, model


def collectives_of(tasks: Sequence[Task]) -> list[Task]:
    return [task for task in tasks if task.kind.is_collective]


@given(exchanging_plans())
def test_ranks_issue_the_same_collectives_in_one_order_however_rows_travel(drawn):
    plan, model = drawn
    ranks = lower(plan, graph_of(plan.partition), model, CPU).tasks
    names = [[(task.name, task.kind, task.group) for task in collectives_of(tasks)] for tasks in ranks]
    assert all(found == names[0] for found in names)


@given(exchanging_plans())
def test_no_message_is_larger_than_its_bound(drawn):
    plan, model = drawn
    if plan.exchange_chunk_bytes is None:
        return
    for rank, tasks in enumerate(lower(plan, graph_of(plan.partition), model, CPU).tasks):
        for task in collectives_of(tasks):
            if task.kind is TaskKind.ALL_TO_ALL:
                sent_to_others = task.num_bytes - task.shape[rank]
                assert sent_to_others <= plan.exchange_chunk_bytes
            elif task.kind is TaskKind.ALL_GATHER:
                assert task.num_bytes * (plan.num_ranks - 1) <= plan.exchange_chunk_bytes


@given(exchanging_plans())
def test_messages_together_carry_what_one_would(drawn):
    plan, model = drawn

    def sent(plan: Plan) -> list[int]:
        return [
            sum(task.num_bytes for task in collectives_of(tasks) if task.kind is TaskKind.ALL_TO_ALL)
            for tasks in lower(plan, graph_of(plan.partition), model, CPU).tasks
        ]

    assert sent(plan) == sent(dataclasses.replace(plan, exchange_chunk_bytes=None))


@given(exchanging_plans())
def test_the_two_parts_of_attention_have_all_its_edges_and_so_has_each_pass_back(drawn):
    plan, model = drawn
    whole = lower(dataclasses.replace(plan, overlap_exchange=False), graph_of(plan.partition), model, CPU).tasks
    parts = lower(dataclasses.replace(plan, overlap_exchange=True), graph_of(plan.partition), model, CPU).tasks

    def edges(tasks: Sequence[Task], phase: Phase, *kinds: TaskKind) -> int:
        return sum(task.shape[2] for task in tasks if task.kind in kinds and task.phase is phase)

    for before, after in zip(whole, parts, strict=True):
        of_phase = [edges(before, phase, TaskKind.ATTENTION) for phase in (Phase.FORWARD, Phase.BACKWARD)]
        assert edges(after, Phase.FORWARD, TaskKind.ATTENTION) == of_phase[0]
        for kind in ATTENTION_PASSES:
            assert edges(after, Phase.BACKWARD, TaskKind.ATTENTION, kind) == of_phase[1]


@given(exchanging_plans())
def test_a_plan_without_room_for_a_row_has_no_messages(drawn):
    plan, model = drawn
    tiny = dataclasses.replace(plan, exchange_chunk_bytes=1)
    assert {rows_per_message(tiny, model, exchange) for exchange in plan.exchange} == {0}


# --- Hosts.

HOSTS = three_parts_on_two_hosts()
TWO_HOSTS = made_cluster(num_hosts=2, devices_per_host=2)


def hierarchical_tasks(*, rank: int, **fields: Any) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """Return name, shape and group of what moves rows in a layer."""
    plan = made_plan(HOSTS, num_layers=1, exchange=(Exchange.HIERARCHICAL_HALO,), **fields)
    tasks = lower(
        plan, graph_of(HOSTS), made_model(width=8, num_heads=2, num_layers=1, edge_bias=EdgeBias.NONE), TWO_HOSTS
    )
    moving = (TaskKind.HALO_PACK, TaskKind.ALL_TO_ALL, TaskKind.COPY_ROWS)
    return [
        (task.name.removeprefix("layer0."), task.shape, task.group) for task in tasks.tasks[rank] if task.kind in moving
    ]


def test_a_hierarchical_halo_by_hand():
    # Rows of keys and values, 16 numbers in fp32. Rank 0 sends 1 row to rank 1 and 2 to rank 2, and gets 2 of each. It
    # then passes 1 row on and gets 2. Its 10 own rows lie before those that came.
    row, group, host = 16 * 4, (0, 1, 2), (0, 1)
    assert hierarchical_tasks(rank=0) == [
        ("pack", (10, 3, 16), ()),
        ("exchange", (0, 1 * row, 2 * row), group),
        ("host_pack", (10 + 4, 1, 16), ()),
        ("host_exchange", (0, 1 * row), host),
        ("host_exchange.backward", (0, 2 * row), host),
        ("host_pack.backward", (0, 1, 16), ()),
        ("exchange.backward", (0, 2 * row, 2 * row), group),
        ("pack.backward", (0, 3, 16), ()),
    ]
    # Rank 2 has nobody to pass rows on to.
    assert hierarchical_tasks(rank=2) == [
        ("pack", (30, 4, 16), ()),
        ("exchange", (2 * row, 2 * row, 0), group),
        ("exchange.backward", (2 * row, 2 * row, 0), group),
        ("pack.backward", (0, 4, 16), ()),
    ]


def test_an_overlapped_hierarchical_halo_in_another_format_by_hand():
    row, group, host = 8 * 2, (0, 1, 2), (0, 1)
    found = hierarchical_tasks(rank=1, overlap_exchange=True, exchange_payload=ROWS, exchange_precision=Dtype.BFLOAT16)
    assert found == [
        ("pack", (0, 4, 8), ()),
        ("narrow", (4, 8), ()),
        ("exchange", (2 * row, 0, 2 * row), group),
        ("widen", (3, 8), ()),
        ("host_pack", (0, 2, 8), ()),
        ("host_narrow", (2, 8), ()),
        ("host_exchange", (2 * row, 0), host),
        ("host_widen", (1, 8), ()),
        # The gradients of a row are summed inside the host before they leave it.
        ("host_widen.backward", (1, 8), ()),
        ("host_exchange.backward", (1 * row, 0), host),
        ("host_narrow.backward", (2, 8), ()),
        ("host_pack.backward", (0, 2, 8), ()),
        ("widen.backward", (3, 8), ()),
        ("exchange.backward", (1 * row, 0, 2 * row), group),
        ("narrow.backward", (4, 8), ()),
        ("pack.backward", (0, 4, 8), ()),
    ]


def test_only_the_exchange_between_hosts_is_in_flight():
    plan = made_plan(HOSTS, num_layers=1, exchange=(Exchange.HIERARCHICAL_HALO,), overlap_exchange=True)
    tasks = lower(plan, graph_of(HOSTS), made_model(num_layers=1), TWO_HOSTS).tasks[0]
    is_blocking = {task.name: task.blocks_host for task in tasks if task.kind is TaskKind.ALL_TO_ALL}
    assert is_blocking == {
        "layer0.exchange": False,
        "layer0.host_exchange": True,
        "layer0.host_exchange.backward": True,
        "layer0.exchange.backward": False,
    }
    by_name = {task.name: index for index, task in enumerate(tasks)}
    assert by_name["layer0.exchange"] in tasks[by_name["layer0.host_pack"]].waits_for


def test_rows_that_cross_to_another_host_once_take_less_time_where_its_link_is_slow():
    slow = made_cluster(
        num_hosts=2, devices_per_host=2, host_link=LinkSpec(latency_seconds=1e-6, bandwidth_bytes_per_second=1e4)
    )
    seconds = [
        simulate(
            made_plan(HOSTS, exchange=(exchange,) * 2), graph_of(HOSTS), made_model(), slow, made_calibration()
        ).median_step_seconds
        for exchange in (HALO, Exchange.HIERARCHICAL_HALO)
    ]
    # Out of rank 2's card go 7 rows of 32 numbers, or the 4 that are distinct, in four exchanges.
    assert seconds[0] - seconds[1] == pytest.approx(4 * (7 - 4) * 32 * 4 / 1e4, rel=0.01)
