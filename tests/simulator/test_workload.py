import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simulator.constraints import has_ranks_without_heads, tensor_degree_fits
from simulator.costs import task_flops
from simulator.gradients import gradient_buckets
from simulator.meetings import find_meetings
from simulator.specs.cluster import DeviceKind
from simulator.specs.gradients import GradientCompression
from simulator.specs.graph import GraphSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import (
    Exchange,
    ExchangePayload,
    ParameterSharding,
    Plan,
    Recompute,
    batch_parts,
    seed_ranges,
)
from simulator.specs.program import SHAPE_FIELDS, Phase, Program, Stream, Task, TaskKind, task_name
from simulator.specs.units import Dtype
from simulator.workload import (
    lower,
    num_input_columns,
    num_parameters,
    parameter_shapes,
    rank_work,
)
from tests.made import (
    equal_parts,
    graph_of,
    made_cluster,
    made_model,
    made_part,
    made_partition,
    made_plan,
    made_sampled,
    made_sampled_plan,
    merged,
)
from tests.strategies import models, partitions, plans, sampled_plans

CPU, GPU = (made_cluster(num_hosts=8, devices_per_host=8, kind=kind) for kind in DeviceKind)


def tasks_of(
    plan: Plan, model: ModelSpec, graph: GraphSpec | None = None, *, step: int = 0, seed: int = 0
) -> Sequence[tuple[Task, ...]]:
    return lower(plan, graph or graph_of(plan.partition), model, CPU, step=step, seed=seed).tasks


def flops_of(tasks: Iterable[Task]) -> float:
    return sum(task_flops(task.kind, task.phase, task.shape) for task in tasks if not task.kind.is_collective)


def flatten(tasks: Sequence[tuple[Task, ...]]) -> list[Task]:
    return [task for rank in tasks for task in rank]


@st.composite
def plans_and_models(draw: st.DrawFn) -> tuple[Plan, ModelSpec]:
    """Draw a plan and a model of as many layers."""
    plan = draw(plans)
    return plan, dataclasses.replace(draw(models), num_layers=len(plan.exchange))


@st.composite
def shared_plans_and_models(draw: st.DrawFn) -> tuple[Plan, ModelSpec]:
    """Draw a plan and a model whose heads ranks may share, and parameters too."""
    plan, model = draw(plans_and_models())
    degrees = [degree for degree in (1, 2, 3) if tensor_degree_fits(degree, model)]
    if Exchange.HIERARCHICAL_HALO not in plan.exchange:
        plan = dataclasses.replace(plan, tensor_parallel_degree=draw(st.sampled_from(degrees)))
    if plan.num_row_ranks > 1 and not plan.overlap_gradients:
        plan = dataclasses.replace(plan, shard_parameters=draw(st.sampled_from(ParameterSharding)))
    return plan, model


@st.composite
def full_graph_plans(draw: st.DrawFn) -> tuple[Plan, ModelSpec]:
    """Draw a plan whose ranks share the whole graph, and a model."""
    partition = draw(partitions())
    model = draw(models)
    exchange = st.sampled_from([Exchange.HALO, Exchange.ALL_GATHER])
    alone = partition.num_parts == 1
    layers = model.num_layers
    return made_plan(
        partition,
        exchange=tuple(Exchange.NONE if alone else draw(exchange) for _ in range(layers)),
        recompute=tuple(draw(st.sampled_from(Recompute)) for _ in range(layers)),
        precision=draw(st.sampled_from(Dtype)),
    ), model


# --- Replicas.


@given(shared_plans_and_models(), st.integers(0, 3))
def test_ranks_that_hold_the_same_share_the_tasks_that_each_would_have_alone(drawn, step):
    plan, model = drawn
    works = rank_work(plan, step=step, seed=0)
    made = rank_work(plan, step=step + plan.prefetch_batches, seed=0)
    assert works == tuple(dataclasses.replace(work) for work in works)
    shared = lower(plan, graph_of(plan.partition), model, CPU, step=step)
    assert len(shared.shared.lists) <= plan.num_ranks
    if made == works:
        # Copies are equal and not the same, so that nothing is shared.
        copies = [dataclasses.replace(work) for work in works]
        alone = lower(plan, graph_of(plan.partition), model, CPU, step=step, works=copies)
        assert len(alone.shared.lists) == plan.num_ranks
        assert alone == shared


def test_replicas_of_the_full_graph_hold_one_list_a_part():
    plan = made_plan(equal_parts(3, num_nodes=90, num_edges=900, halo_rows=5), data_parallel_degree=4)
    program = lower(plan, graph_of(plan.partition), made_model(), CPU)
    assert (len(program.shared.lists), program.num_ranks) == (3, 12)
    exchange = [next(task for task in tasks if task.kind is TaskKind.ALL_TO_ALL) for tasks in program.tasks]
    assert [task.group for task in exchange] == [
        tuple(range(first, first + 3)) for first in (0, 3, 6, 9) for _ in range(3)
    ]
    reductions = {task.group for tasks in program.tasks for task in tasks if task.kind is TaskKind.ALL_REDUCE}
    assert reductions == {tuple(range(12))}


# --- Work.


@given(full_graph_plans())
def test_flops_of_all_ranks_are_those_of_one_device_and_what_is_recomputed(drawn):
    plan, model = drawn
    graph = graph_of(plan.partition)
    alone = made_plan(merged(plan.partition), num_layers=model.num_layers)
    shared, whole = flatten(tasks_of(plan, model, graph)), flatten(tasks_of(alone, model, graph))
    # What one device computes forward in the layers that are recomputed; parts of a layer run again for parts of it.
    layers = {f"layer{index}" for index, kind in enumerate(plan.recompute) if kind is Recompute.LAYER}
    recomputed = [task for task in whole if task.phase is Phase.FORWARD and task.name.split(".")[0] in layers]
    of_parts = [task for task in shared if task.phase is Phase.RECOMPUTE and task.name.split(".")[0] not in layers]
    assert flops_of(shared) - flops_of(of_parts) == pytest.approx(flops_of(whole) + flops_of(recomputed), rel=1e-12)


@given(full_graph_plans())
def test_rows_and_edges_of_all_ranks_are_those_of_one_device(drawn):
    plan, model = drawn
    # Where queries are computed again alone, their product has another name.
    plan = dataclasses.replace(plan, recompute=(Recompute.NONE,) * model.num_layers)
    graph = graph_of(plan.partition)
    alone = made_plan(merged(plan.partition), num_layers=model.num_layers)
    (whole,) = tasks_of(alone, model, graph)
    shared: dict[str, list[Task]] = {}
    for task in flatten(tasks_of(plan, model, graph)):
        shared.setdefault(task.name, []).append(task)
    for task in whole:
        if task.kind in (TaskKind.CLIP, TaskKind.OPTIMIZER):
            assert {other.shape for other in shared[task.name]} == {task.shape}  # every rank updates everything
            continue
        fields = SHAPE_FIELDS[task.kind]
        for position, field in enumerate(fields):
            counts = [other.shape[position] for other in shared[task.name]]
            if field in ("rows", "rows_labelled", "entries", "edges", "edges_of_long_targets", "targets"):
                assert sum(counts) == task.shape[position], (task.name, field)
            elif field not in ("sources", "edges_of_long_sources"):
                assert set(counts) == {task.shape[position]}, (task.name, field)


@given(plans_and_models(), st.integers(0, 20), st.integers(0, 5))
def test_what_ranks_send_in_a_halo_is_what_others_receive(drawn, step, seed):
    plan, _ = drawn
    works = rank_work(plan, step=step, seed=seed)
    for rank in range(plan.num_ranks):
        group = plan.graph_group(rank)
        for index, other in enumerate(group):
            assert works[rank].rows_to[index] == works[other].rows_from[rank - group[0]]
        assert works[rank].rows_to[rank - group[0]] == 0


@given(plans_and_models(), st.integers(0, 20))
def test_an_exchange_sends_back_the_gradients_of_what_it_brought(drawn, step):
    plan, model = drawn
    tasks = tasks_of(plan, model, step=step)
    by_name = [{task.name: task for task in rank} for rank in tasks]
    for rank in range(plan.num_ranks):
        group = plan.graph_group(rank)
        for layer in range(model.num_layers):
            name = f"layer{layer}.exchange"
            if plan.exchange[layer] is Exchange.HALO:
                for index, other in enumerate(group):
                    back = by_name[other][f"{name}.backward"].shape[rank - group[0]]
                    assert by_name[rank][name].shape[index] == back
            elif plan.exchange[layer] is Exchange.ALL_GATHER:
                given_bytes = by_name[rank][name].shape[0]
                assert by_name[rank][f"{name}.backward"].shape == (given_bytes * len(group),)
                assert {by_name[other][name].shape[0] for other in group} == {given_bytes}
            elif plan.exchange[layer] is Exchange.HEAD_ALL_TO_ALL:
                for way in (name, f"{name}_back"):
                    for index, other in enumerate(group):
                        back = by_name[other][f"{way}.backward"].shape[rank - group[0]]
                        assert by_name[rank][way].shape[index] == back


@given(plans_and_models(), st.integers(0, 20), st.integers(0, 3))
def test_each_node_of_a_steps_batches_is_worked_on_once(drawn, step, seed):
    plan, _ = drawn
    works = rank_work(plan, step=step, seed=seed)
    parts = plan.partition.parts
    batches = batch_parts(plan, step=step, seed=seed)
    for replica, batch in enumerate(batches):
        first = replica * plan.graph_parallel_degree
        mine = works[first : first + plan.graph_parallel_degree]
        # A graph group has a rank for each part; a rank beyond the batch's parts has nothing to do.
        assume(plan.graph_parallel_degree == 1 or len(batch) <= plan.graph_parallel_degree)
        assert sum(work.num_rows for work in mine) == sum(parts[part].num_nodes for part in batch)
        assert sum(work.num_train_rows for work in mine) == sum(parts[part].num_train_nodes for part in batch)
        assert sum(work.num_edges for work in mine) == sum(
            parts[target].edges_from[source] for target in batch for source in batch
        )


def test_edges_that_leave_a_batch_are_left_out():
    # Part 0 has 5 edges of its own, 7 from part 1 and 11 from part 2.
    parts = [
        made_part(10, [5, 7, 11], [0, 3, 4]),
        made_part(20, [1, 1, 1], [1, 0, 1]),
        made_part(30, [2] * 3, [1, 1, 0]),
    ]
    plan = made_plan(made_partition(parts), graph_parallel_degree=1, parts_per_batch=2)
    by_batch = {}
    for seed in range(20):
        (batch,) = batch_parts(plan, step=0, seed=seed)
        by_batch[frozenset(batch)] = rank_work(plan, step=0, seed=seed)[0]
    assert {batch: (work.num_rows, work.num_edges) for batch, work in by_batch.items()} == {
        frozenset({0, 1}): (30, 5 + 7 + 1 + 1),
        frozenset({0, 2}): (40, 5 + 11 + 2 + 2),
        frozenset({1, 2}): (50, 1 + 1 + 2 + 2),
    }
    # One rank holds all rows of its batch and exchanges none.
    assert all(work.rows_to == work.rows_from == (0,) for work in by_batch.values())


@pytest.mark.parametrize(
    ("exchange", "rows"),
    [
        (Exchange.NONE, 10),
        (Exchange.HALO, 10 + 3 + 4),
        (Exchange.ALL_GATHER, 3 * 30),
        (Exchange.HEAD_ALL_TO_ALL, 10 + 20 + 30),
    ],
)
def test_rows_that_a_rank_attends_to_by_hand(exchange, rows):
    parts = [
        made_part(10, [5, 7, 11], [0, 3, 4]),
        made_part(20, [1, 1, 1], [1, 0, 1]),
        made_part(30, [2] * 3, [1, 1, 0]),
    ]
    work = rank_work(made_plan(made_partition(parts)), step=0, seed=0)[0]
    assert work.num_source_rows(exchange) == rows


def test_edges_of_long_rows_by_hand():
    many: dict[str, Any] = {"edges_of_long_targets_from": [70, 40], "edges_of_long_sources_from": [60, 33]}
    few: dict[str, Any] = {"edges_of_long_targets_from": [0, 35], "edges_of_long_sources_from": [34, 0]}
    parts = [
        made_part(10, [90, 50], [0, 5], inner_edges_of_long_targets=66, **many),
        made_part(20, [40, 50], [5, 0], inner_edges_of_long_targets=0, **few),
    ]

    def counts(**fields):
        plan = made_plan(made_partition(parts), num_layers=1, **fields)
        batches = batch_parts(plan, step=0, seed=0)
        return {
            batch: (work.num_edges_of_long_targets, work.num_edges_of_long_sources)
            for batch, work in zip(batches, rank_work(plan, step=0, seed=0), strict=False)
        }

    # In batches of one part only the edges inside it are there.
    alone = counts(graph_parallel_degree=1, parts_per_batch=1, data_parallel_degree=2)
    assert alone == {(0,): (66, 60), (1,): (0, 0)}
    # One rank with both parts has all edges; sources that only both parts together make long are not known.
    assert counts(graph_parallel_degree=1, parts_per_batch=2) == {(0, 1): (110 + 35, 93 + 34)}
    shared = rank_work(made_plan(made_partition(parts)), step=0, seed=0)
    assert [work.num_edges_of_long_targets for work in shared] == [110, 35]
    assert [work.num_edges_of_long_sources for work in shared] == [93, 34]


@pytest.mark.parametrize(
    ("told", "cache_bytes", "edges", "expected"),
    [
        (0.25, 0, 800, 0.25),  # as the plan says
        (None, 0, 800, 1.0),  # no cache is known
        # Keys and values of 100 sources take 2 x 4 x 4 x 4 bytes each, of which the cache holds 40.
        (None, 40 * 128, 10**9, 0.6),
        # Those of all fit, and each of the 100 (1 - 1/e) rows that are read is read for a first time.
        (None, 10**9, 100, 0.6321206),
        (None, 10**9, 0, 1.0),
    ],
)
def test_rows_from_beyond_the_cache_by_hand(told, cache_bytes, edges, expected):
    cluster = dataclasses.replace(CPU, device=dataclasses.replace(CPU.device, cache_bytes=cache_bytes))
    plan = made_plan(made_partition([made_part(100, [edges], [0])]), num_layers=1, beyond_cache_ratio=told)
    model = made_model(width=16, num_heads=4, num_layers=1)
    tasks = lower(plan, graph_of(plan.partition), model, cluster).tasks[0]
    found = {task.beyond_cache_ratio for task in tasks if task.kind is TaskKind.ATTENTION}
    assert list(found) == [pytest.approx(expected)]
    assert {task.beyond_cache_ratio for task in tasks if task.kind is not TaskKind.ATTENTION} == {None}


# --- Programs.


def test_a_program_by_hand():
    # Two ranks; rank 0 owns 10 nodes and sends 4 of them to rank 1, which owns 20 and sends 3.
    long_rows: dict[str, Any] = {"edges_of_long_targets_from": [3, 5], "edges_of_long_sources_from": [2, 4]}
    partition = made_partition([made_part(10, [5, 7], [0, 3], **long_rows), made_part(20, [9, 2], [4, 0])])
    model = made_model(width=8, num_heads=2, num_layers=1, feed_forward_width=12)
    plan = made_plan(partition, num_layers=1, precision=Dtype.BFLOAT16)
    graph = graph_of(partition, num_features=6, num_classes=5)
    first, _ = lower(plan, graph, model, CPU).tasks
    norm = 8 + 8
    layer = norm + 24 * 8 + (8 * 8 + 8) + norm + (12 * 8 + 12) + (8 * 12 + 8)
    parameters = (6 * 8 + 8) + layer + norm + (8 * 5 + 5)
    forward = [
        ("input.linear", TaskKind.INPUT_LINEAR, (10, 6, 8)),
        ("layer0.attention_norm", TaskKind.LAYER_NORM, (10, 8)),
        ("layer0.query_key_value", TaskKind.PROJECTION, (10, 8, 24)),
        ("layer0.pack", TaskKind.HALO_PACK, (10, 4, 16)),
        ("layer0.exchange", TaskKind.ALL_TO_ALL, (0, 4 * 16 * 2)),
        ("layer0.attention", TaskKind.ATTENTION, (10, 13, 12, 8, 6, 2, 4)),
        ("layer0.attention_output", TaskKind.LINEAR, (10, 8, 8)),
        ("layer0.attention_residual", TaskKind.RESIDUAL, (10, 8)),
        ("layer0.feed_forward_norm", TaskKind.LAYER_NORM, (10, 8)),
        ("layer0.feed_forward_up", TaskKind.LINEAR, (10, 8, 12)),
        ("layer0.feed_forward_activation", TaskKind.GELU, (10, 12)),
        ("layer0.feed_forward_down", TaskKind.LINEAR, (10, 12, 8)),
        ("layer0.feed_forward_residual", TaskKind.RESIDUAL, (10, 8)),
        ("head.norm", TaskKind.LAYER_NORM, (10, 8)),
        ("head.linear", TaskKind.LINEAR, (10, 8, 5)),
        ("loss", TaskKind.LOSS, (10, 5, 5)),
    ]
    # Backward, three halo rows' gradients go back to rank 1, and four come, which are added in place.
    others = {"layer0.exchange": (0, 3 * 16 * 2), "layer0.pack": (0, 4, 16)}
    backward = [(f"{name}.backward", kind, others.get(name, shape)) for name, kind, shape in reversed(forward)]
    # Gradients of all parameters in fp32, and the loss.
    update = [
        ("gradients.bucket0", TaskKind.ALL_REDUCE, (4 * (parameters + 1),)),
        ("clip", TaskKind.CLIP, (parameters, 17)),
        ("optimizer", TaskKind.OPTIMIZER, (parameters, 17)),
    ]
    assert [(task.name, task.kind, task.shape) for task in first] == forward + backward + update
    assert {task.dtype for task in first[:-3]} == {Dtype.BFLOAT16}
    assert {task.dtype for task in first[-3:]} == {Dtype.FLOAT32}


@given(plans_and_models(), st.sampled_from([CPU, GPU]))
def test_every_program_is_well_formed(drawn, cluster):
    plan, model = drawn
    for rank, tasks in enumerate(lower(plan, graph_of(plan.partition), model, cluster).tasks):
        assert max(Counter(task.name for task in tasks).values()) == 1
        for index, task in enumerate(tasks):
            assert all(count >= 0 for count in task.shape)
            if task.kind is not TaskKind.ALL_TO_ALL:
                assert len(task.shape) == len(SHAPE_FIELDS[task.kind])
            assert (rank in task.group) == task.kind.is_collective
            if task.name == "batch":
                assert (index, task.stream, task.waits_for) == (0, Stream.LOADER, ())
                assert task.blocks_host == (plan.prefetch_batches == 0)
                continue
            is_beside = plan.overlap_gradients and task.kind.is_collective and task.phase is Phase.UPDATE
            # Each change of stream waits for the task before it, so that tasks run in the order of the program; but no
            # task waits for what goes on beside it, unless it takes the result, and none for a batch: the host waits
            # for it, or it is of a later step. test_exchange_tasks.py has collectives that overlap with attention.
            beside = (Stream.GRADIENTS, Stream.LOADER)
            in_turn = [earlier for earlier in range(index) if tasks[earlier].stream not in beside]
            waited = [earlier for earlier in task.waits_for if tasks[earlier].stream is not Stream.GRADIENTS]
            if not plan.overlap_exchange:
                assert waited == [earlier for earlier in in_turn[-1:] if tasks[earlier].stream is not task.stream]
            in_order = Stream.COMMUNICATION if task.kind.is_collective else Stream.COMPUTE
            assert task.stream is (Stream.GRADIENTS if is_beside else in_order)
            # CPUs run a task while the host thread waits, but for what goes on beside it.
            if not (plan.overlap_exchange and task.kind.is_collective):
                assert task.blocks_host == (cluster is CPU and not is_beside)
        assert (tasks[0].name == "batch") == (not plan.is_full_graph and not plan.keep_batches)


@given(shared_plans_and_models(), st.integers(0, 20))
def test_all_ranks_meet_in_the_same_collectives_in_one_order(drawn, step):
    # Also ranks without nodes, and replicas without a batch.
    plan, model = drawn
    assume(not (plan.overlap_gradients and has_ranks_without_heads(plan, model)))  # such a plan is refused
    tasks = tasks_of(plan, model, step=step)
    names = [[(task.name, task.kind, task.group) for task in rank if task.kind.is_collective] for rank in tasks]

    def met_by(rank: int, other: int) -> list[tuple[str, TaskKind, tuple[int, ...]]]:
        return [found for found in names[rank] if other in found[2]]

    for rank in range(plan.num_ranks):
        same_group = plan.graph_group(rank)[0]
        assert met_by(rank, same_group) == met_by(same_group, rank)
        # A rank alone on its host passes no rows on within it.
        of_all, of_first = ([name for name, _, _ in names[each] if ".host_" not in name] for each in (rank, 0))
        assert of_all == of_first
    assert sum(len(meeting.ranks) for meeting in find_meetings(Program(tasks=tasks).shared)) == sum(map(len, names))


def test_the_seed_orders_the_batches_of_an_epoch():
    parts = [made_part(nodes, [1] * 3, [0] * 3) for nodes in (10, 20, 30)]
    plan = made_plan(made_partition(parts), graph_parallel_degree=1)
    model = made_model()
    orders = {
        tuple(tasks_of(plan, model, step=step, seed=seed)[0][1].shape[0] for step in range(3)) for seed in range(40)
    }
    # Every epoch has each part once, in any of the six orders.
    assert {tuple(sorted(order)) for order in orders} == {(10, 20, 30)}
    assert len(orders) == 6


@pytest.mark.parametrize(
    ("fields", "graph_fields", "names"),
    [
        ({}, {}, {"input.linear"}),
        ({}, {"num_feature_entries": 40}, {"input.features"}),
        ({"laplacian_encodings": 2}, {"num_feature_entries": 40}, {"input.linear", "input.features", "input.sum"}),
        ({"dropout_ratio": 0.5}, {}, {"input.linear", "input.dropout"}),
    ],
)
def test_how_the_input_is_read_depends_on_features_and_encodings(fields, graph_fields, names):
    partition = equal_parts(1, num_nodes=10, num_edges=20, num_feature_entries=40)
    plan = made_plan(partition)
    (tasks,) = tasks_of(plan, made_model(**fields), graph_of(partition, **({"num_feature_entries": 0} | graph_fields)))
    assert {task.name for task in tasks if task.name.startswith("input.") and task.phase is Phase.FORWARD} == names
    assert {task.name for task in tasks if task.name.startswith("input.") and task.phase is Phase.BACKWARD} == {
        f"{name}.backward" for name in names
    }


@pytest.mark.parametrize(("entries", "columns"), [(0, 12 + 5), (40, 5)])
def test_encodings_join_dense_features_and_stand_alone_beside_sparse_ones(entries, columns):
    graph = graph_of(equal_parts(1, num_nodes=10, num_edges=20), num_feature_entries=entries)
    assert num_input_columns(graph, made_model(laplacian_encodings=2, random_walk_encodings=3)) == columns


@pytest.mark.parametrize(("field", "tasks"), [({"dropout_ratio": 0.5}, 1 + 2 * 2), ({"edge_bias": EdgeBias.DEGREE}, 2)])
def test_dropout_and_edge_bias_add_their_tasks_forward_and_backward(field, tasks):
    plan = made_plan(equal_parts(1, num_nodes=10, num_edges=20))
    plain, more = (len(tasks_of(plan, model)[0]) for model in (made_model(), made_model(**field)))
    assert more - plain == 2 * tasks


# --- Batches that are made for a step.


def test_a_program_on_sampled_neighbourhoods_by_hand():
    # 10 rows, of which 6 are the first layer's targets, of which 2 are the seeds.
    partition = equal_parts(1, num_nodes=40, num_edges=200)
    model = made_model(width=8, num_heads=2, num_layers=2, feed_forward_width=12, dropout_ratio=0.5)
    plan = made_sampled_plan(partition, made_sampled((10, 6, 13), (6, 2, 5), seeds_per_batch=2))
    (tasks,) = lower(plan, graph_of(partition, num_features=3), model, CPU).tasks
    layers = []
    for index, (rows, targets, edges) in enumerate(((10, 6, 13), (6, 2, 5))):
        layers += [
            (f"layer{index}.attention_norm", (rows, 8)),
            (f"layer{index}.query_key_value", (rows, 8, 24)),
            (f"layer{index}.targets", (rows, targets, 8)),
            (f"layer{index}.attention", (targets, rows, edges, 0, 0, 2, 4)),
            (f"layer{index}.attention_output", (targets, 8, 8)),
            (f"layer{index}.attention_dropout", (targets, 8)),
            (f"layer{index}.attention_residual", (targets, 8)),
            (f"layer{index}.feed_forward_norm", (targets, 8)),
            (f"layer{index}.feed_forward_up", (targets, 8, 12)),
            (f"layer{index}.feed_forward_activation", (targets, 12)),
            (f"layer{index}.feed_forward_down", (targets, 12, 8)),
            (f"layer{index}.feed_forward_dropout", (targets, 8)),
            (f"layer{index}.feed_forward_residual", (targets, 8)),
        ]
    forward = [
        ("input.linear", (10, 3, 8)),
        ("input.dropout", (10, 8)),
        *layers,
        ("head.norm", (2, 8)),
        ("head.linear", (2, 8, 5)),
        ("loss", (2, 2, 5)),
    ]
    backward = [(f"{name}.backward", shape) for name, shape in reversed(forward)]
    found = [(task.name, task.shape) for task in tasks]
    assert found[:-2] == [("batch", (2, 10, 18, 30)), *forward, *backward]
    assert tasks[0].kind is TaskKind.SAMPLED_BATCH


@given(sampled_plans(), st.integers(0, 20))
def test_all_replicas_meet_in_the_same_collectives_whatever_they_sampled(plan, step):
    model = made_model(dropout_ratio=0.1)
    tasks = tasks_of(plan, model, step=step)
    names = [[task.name for task in rank] for rank in tasks]
    assert all(found == names[0] for found in names)
    assert [rank[0].name for rank in tasks] == ["batch"] * plan.num_ranks
    labelled = [next(task.shape[1] for task in rank if task.name == "loss") for rank in tasks]
    assert labelled == [end - first for first, end in seed_ranges(plan, step=step)]


def test_a_batch_that_is_made_ahead_is_that_of_a_later_step():
    parts = [made_part(nodes, [1] * 3, [0] * 3) for nodes in (10, 20, 30)]
    plan = made_plan(made_partition(parts), graph_parallel_degree=1)
    ahead = dataclasses.replace(plan, prefetch_batches=2)
    for step in range(5):
        now, later = (tasks_of(found, made_model(), step=step)[0][0] for found in (plan, ahead))
        assert now.shape == (60, *tasks_of(plan, made_model(), step=step)[0][0].shape[1:])
        assert later.shape == tasks_of(plan, made_model(), step=step + 2)[0][0].shape
        assert (now.blocks_host, later.blocks_host) == (True, False)


def test_without_the_edges_between_its_parts_a_batch_has_those_inside_alone():
    # Part 0 has 5 edges of its own, 4 of long targets and 3 of long sources, and 7 from part 1.
    parts = [
        made_part(10, [5, 7], [0, 3], inner_edges_of_long_targets=4, edges_of_long_sources_from=[3, 9]),
        made_part(20, [8, 2], [1, 0], inner_edges_of_long_targets=1, edges_of_long_sources_from=[6, 2]),
    ]
    plan = made_plan(made_partition(parts), graph_parallel_degree=1, parts_per_batch=2, between_edges=False)
    (work,) = rank_work(plan, step=0, seed=0)
    assert (work.num_rows, work.num_edges) == (30, 5 + 2)
    assert (work.num_edges_of_long_targets, work.num_edges_of_long_sources) == (4 + 1, 3 + 2)


# --- Recomputation.


@given(plans_and_models())
def test_a_recomputed_layer_does_its_forward_tasks_again(drawn):
    plan, model = drawn
    for rank in tasks_of(plan, model):
        forward = [task for task in rank if task.phase is Phase.FORWARD]
        whole = {f"layer{index}" for index, kind in enumerate(plan.recompute) if kind is Recompute.LAYER}
        again = [task for task in rank if task.phase is Phase.RECOMPUTE and task.name.split(".")[0] in whole]
        expected = [
            dataclasses.replace(task, name=task_name(task.name, Phase.RECOMPUTE), phase=Phase.RECOMPUTE, waits_for=())
            for layer in reversed(range(model.num_layers))
            if plan.recompute[layer] is Recompute.LAYER
            for task in forward
            if task.name.startswith(f"layer{layer}.")
        ]
        # Exchanges too: only the layer's input is kept.
        assert [dataclasses.replace(task, waits_for=()) for task in again] == expected


@given(plans_and_models())
def test_the_backward_pass_is_the_forward_pass_reversed(drawn):
    plan, model = drawn
    for rank in tasks_of(plan, model):
        forward = [task.name for task in rank if task.phase is Phase.FORWARD and task.name != "batch"]
        backward = [task.name for task in rank if task.phase is Phase.BACKWARD]
        both = {name for name in forward if f"{name}.backward" in backward}
        # What is a view forward has a task backward alone; nothing has a forward task alone, but for attention that
        # overlaps: forward over two sets of edges, backward in two passes over all.
        only_forward = {name.split(".")[1] for name in forward if name not in both}
        only_backward = {name.split(".")[1] for name in backward if name.removesuffix(".backward") not in both}
        if plan.overlap_exchange:
            parts = {f"{task}{part}" for task in ("attention", "edge_bias") for part in ("_interior", "_halo")}
            assert only_forward <= parts | {"merge", "key_value", "own_rows"}
            assert only_backward <= {"heads", "attention_sources", "attention_targets"}
        else:
            assert (only_forward, only_backward - {"heads"}) == (set(), set())
            found = [name for name in backward if name.removesuffix(".backward") in both]
            assert found == [f"{name}.backward" for name in reversed(forward)]


def test_a_layer_is_recomputed_before_the_products_of_its_backward_pass_need_it():
    plan = made_plan(equal_parts(1, num_nodes=10, num_edges=20), recompute=(Recompute.NONE, Recompute.LAYER))
    names = [task.name for task in tasks_of(plan, made_model())[0]]
    last_recomputed = names.index("layer1.feed_forward_residual.recompute")
    assert names.index("head.norm.backward") < names.index("layer1.attention_norm.recompute") < last_recomputed
    assert last_recomputed < names.index("layer1.feed_forward_down.backward")
    assert not any(name.startswith("layer0") and name.endswith("recompute") for name in names)


# --- Gradients.


@pytest.mark.parametrize(
    ("sizes", "bucket_bytes", "counts"),
    [
        # 10 numbers are 40 bytes.
        ([10, 10, 10], 120, (3,)),
        ([10, 10, 10], 119, (2, 1)),
        ([10, 10, 10], 40, (1, 1, 1)),
        ([10, 10, 10], 4, (1, 1, 1)),
        # A parameter larger than a bucket has one of its own, and the next one does not join it.
        ([1, 100, 1], 40, (1, 1, 1)),
        ([5, 5, 3, 8, 1], 40, (2, 1, 2)),
        ([7], 25 * 2**20, (1,)),
    ],
)
def test_gradient_buckets_by_hand(sizes, bucket_bytes, counts):
    assert gradient_buckets(sizes, bucket_bytes) == counts


@given(st.lists(st.integers(1, 10**6), min_size=1), st.integers(4, 10**7))
def test_gradient_buckets_take_every_parameter_once_and_as_many_as_fit(sizes, bucket_bytes):
    counts = gradient_buckets(sizes, bucket_bytes)
    assert sum(counts) == len(sizes)
    assert min(counts) >= 1
    first = 0
    for count in counts:
        bucket = 4 * sum(sizes[first : first + count])
        assert bucket <= bucket_bytes or count == 1
        first += count
        if first < len(sizes):
            assert bucket + 4 * sizes[first] > bucket_bytes


@given(plans_and_models())
def test_all_reduces_carry_every_parameter_and_the_loss(drawn):
    plan, model = drawn
    plan = dataclasses.replace(plan, gradient_compression=GradientCompression())
    graph = graph_of(plan.partition)
    for rank in tasks_of(plan, model, graph):
        reduced = [task for task in rank if task.kind is TaskKind.ALL_REDUCE]
        assert bool(reduced) == (plan.num_ranks > 1)
        if reduced:
            assert sum(task.shape[0] for task in reduced) == 4 * (num_parameters(graph, model) + 1)
            assert {task.group for task in reduced} == {tuple(range(plan.num_ranks))}


@given(models, st.booleans())
def test_parameters_have_names_of_their_own_and_add_up(model, is_sparse):
    graph = graph_of(equal_parts(1, num_nodes=10, num_edges=20), num_feature_entries=40 * is_sparse)
    shapes = parameter_shapes(graph, model)
    assert len(dict(shapes)) == len(shapes)
    assert sum(math.prod(shape) for _, shape in shapes) == num_parameters(graph, model)


# --- Ranks that share heads and columns, and parameters.


def test_a_program_of_ranks_that_share_heads_and_columns_by_hand():
    # Two graph ranks of two tensor ranks, numbered (0, 1) and (2, 3); each has one head of 4 and 6 hidden columns.
    partition = made_partition([made_part(10, [5, 7], [0, 3]), made_part(20, [9, 2], [4, 0])])
    model = made_model(width=8, num_heads=2, num_layers=1, feed_forward_width=12)
    plan = made_plan(partition, num_layers=1, tensor_parallel_degree=2)
    tasks = lower(plan, graph_of(partition, num_features=6, num_classes=5), model, CPU).tasks[2]
    rows_bytes = 20 * 8 * 4
    layer = [
        ("layer0.attention_norm", TaskKind.LAYER_NORM, (20, 8)),
        ("layer0.query_key_value", TaskKind.PROJECTION, (20, 8, 12)),
        ("layer0.pack", TaskKind.HALO_PACK, (20, 3, 8)),
        ("layer0.exchange", TaskKind.ALL_TO_ALL, (3 * 8 * 4, 0)),
        ("layer0.attention", TaskKind.ATTENTION, (20, 24, 11, 0, 0, 1, 4)),
        ("layer0.attention_output", TaskKind.PROJECTION, (20, 4, 8)),
        ("layer0.attention_output.reduce", TaskKind.ALL_REDUCE, (rows_bytes,)),
        ("layer0.attention_output_bias", TaskKind.BIAS, (20, 8)),
        ("layer0.attention_residual", TaskKind.RESIDUAL, (20, 8)),
        ("layer0.feed_forward_norm", TaskKind.LAYER_NORM, (20, 8)),
        ("layer0.feed_forward_up", TaskKind.LINEAR, (20, 8, 6)),
        ("layer0.feed_forward_activation", TaskKind.GELU, (20, 6)),
        ("layer0.feed_forward_down", TaskKind.PROJECTION, (20, 6, 8)),
        ("layer0.feed_forward_down.reduce", TaskKind.ALL_REDUCE, (rows_bytes,)),
        ("layer0.feed_forward_down_bias", TaskKind.BIAS, (20, 8)),
        ("layer0.feed_forward_residual", TaskKind.RESIDUAL, (20, 8)),
    ]
    of_layer = [task for task in tasks if task.name.startswith("layer0")]
    forward = [task for task in of_layer if task.phase is Phase.FORWARD]
    assert [(task.name, task.kind, task.shape) for task in forward] == layer
    groups = {task.name: task.group for task in tasks if task.kind.is_collective}
    assert groups == {
        "layer0.exchange": (0, 2),
        "layer0.attention_output.reduce": (2, 3),
        "layer0.feed_forward_down.reduce": (2, 3),
        "layer0.feed_forward_up.reduce.backward": (2, 3),
        "layer0.query_key_value.reduce.backward": (2, 3),
        "layer0.exchange.backward": (0, 2),
        "gradients.bucket0": (0, 2),
        "clip.reduce": (2, 3),
    }
    backward = [task.name for task in of_layer if task.phase is Phase.BACKWARD]
    assert backward[-3:] == [
        "layer0.query_key_value.backward",
        "layer0.query_key_value.reduce.backward",
        "layer0.attention_norm.backward",
    ]


@given(plans_and_models(), st.sampled_from([2, 3]))
def test_ranks_that_share_heads_and_columns_share_the_work_of_layers(drawn, degree):
    plan, model = drawn
    assume(Exchange.HIERARCHICAL_HALO not in plan.exchange)
    more = {name: degree * getattr(model, name) for name in ("width", "num_heads", "feed_forward_width")}
    model = dataclasses.replace(model, **more)
    plan = dataclasses.replace(plan, exchange_payload=ExchangePayload.KEYS_AND_VALUES)
    alone, shared = (dataclasses.replace(plan, tensor_parallel_degree=count) for count in (1, degree))

    def flops(plan: Plan) -> float:
        tasks = flatten(tasks_of(plan, model))
        return flops_of(task for task in tasks if task.name.startswith("layer"))

    assert flops(shared) == pytest.approx(flops(alone), rel=1e-12)


def test_a_program_of_parameters_that_are_shared_out_by_hand():
    plan = made_plan(
        equal_parts(2, num_nodes=40, num_edges=100, halo_rows=5),
        num_layers=2,
        shard_parameters=ParameterSharding.ZERO3,
    )
    model = made_model(width=8, num_heads=2, num_layers=2, feed_forward_width=12)
    graph = graph_of(plan.partition, num_features=6, num_classes=5)
    tasks = lower(plan, graph, model, GPU).tasks[1]
    names = [task.name for task in tasks if task.name.startswith(("parameters", "gradients", "clip", "optimizer"))]
    assert names == [
        *(f"parameters.{unit}{end}" for unit in ("rest", "layer0", "layer1") for end in (".pack", "", ".unpack")),
        *("parameters.layer1.pack.backward", "parameters.layer1.backward", "parameters.layer1.unpack.backward"),
        *("parameters.layer0.pack.backward", "parameters.layer0.backward"),
        *("gradients.layer1.pack", "gradients.layer1"),
        "parameters.layer0.unpack.backward",
        *("gradients.layer0.pack", "gradients.layer0", "gradients.rest.pack", "gradients.rest", "gradients.loss"),
        *("clip.norm", "clip.reduce", "clip", "optimizer"),
    ]
    # All sizes but that of the head's five classes are even; of five rows and numbers rank 0 has three, rank 1 two.
    layer = 2 * (8 + 8) + 24 * 8 + (8 * 8 + 8) + (12 * 8 + 12) + (8 * 12 + 8)
    shape = {task.name: task.shape for task in tasks}
    assert shape["parameters.layer0"] == (4 * layer // 2,)
    assert shape["gradients.layer0"] == (4 * layer,)
    sent = (6 * 8 + 8) // 2 + (8 + 8) // 2 + 3 * 8 + 3
    assert shape["parameters.rest.unpack"] == (2, sent)
    assert shape["optimizer"] == (layer + sent - 8 - 1, len(parameter_shapes(graph, model)))
    by_name = {task.name: index for index, task in enumerate(tasks)}
    # A layer is gathered while the one before it computes: it waits for no task of it.
    assert tasks[by_name["parameters.layer1.pack"]].waits_for == ()
    assert by_name["parameters.layer1"] in tasks[by_name["parameters.layer1.unpack"]].waits_for
    assert by_name["gradients.rest"] in tasks[by_name["clip.norm"]].waits_for


def test_parameters_that_are_kept_for_the_backward_pass_are_gathered_once():
    partition = equal_parts(2, num_nodes=40, num_edges=100, halo_rows=5)
    plan = made_plan(partition, num_layers=3, shard_parameters=ParameterSharding.ZERO2)
    tasks = tasks_of(plan, made_model(num_layers=3))[0]
    gathers = [task for task in tasks if task.kind is TaskKind.ALL_GATHER and task.name.startswith("parameters")]
    assert [task.phase for task in gathers] == [Phase.FORWARD] * 4
