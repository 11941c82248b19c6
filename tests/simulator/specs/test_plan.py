from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import SpecError
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.plan import (
    Exchange,
    PartitionMethod,
    PartitionSpec,
    Plan,
    Recompute,
    SampledBatches,
    SampledLayer,
    batch_parts,
    seed_ranges,
)
from simulator.specs.units import Dtype
from tests.made import made_part
from tests.strategies import partitions, plans, sampled_plans, seeds

# Two parts: 3 nodes with 4 own edges and 2 from the other, whose 1 source they share; 1 node with 1 and 5 edges.
PARTITION = PartitionSpec(
    method=PartitionMethod.METIS,
    seed=0,
    path="parts.npy",
    sha256="0" * 64,
    parts=(
        made_part(3, [4, 2], [0, 1]),
        made_part(1, [5, 1], [3, 0]),
    ),
)
PLAN = Plan(
    data_parallel_degree=1,
    graph_parallel_degree=2,
    partition=PARTITION,
    parts_per_batch=2,
    exchange=(Exchange.HALO,),
    recompute=(Recompute.NONE,),
    precision=Dtype.FLOAT32,
)


def test_measures_of_a_cut_by_hand():
    assert PARTITION.num_cut_edges == 2 + 5
    assert PARTITION.halo_ratio == (1 + 3) / 4
    assert PARTITION.edge_imbalance == 6 / 6
    assert PARTITION.node_imbalance == 3 / 2
    assert PARTITION.row_imbalance == 1.0  # 3 + 1 and 1 + 3 rows


def test_a_graph_without_edges_is_balanced_or_has_no_edges_to_balance():
    parts = tuple(replace(part, edges_from=(0, 0), halo_rows_from=(0, 0)) for part in PARTITION.parts)
    assert replace(PARTITION, parts=parts).edge_imbalance == 0


@given(partition=partitions())
def test_no_cut_is_better_than_balanced(partition):
    assert partition.node_imbalance >= 1
    assert partition.row_imbalance >= 1
    assert partition.halo_ratio >= 0
    assert 0 <= partition.num_cut_edges <= sum(part.num_edges for part in partition.parts)


@given(plan=plans)
def test_ranks_of_a_graph_group_name_the_same_group(plan):
    for rank in range(plan.num_ranks):
        group = plan.graph_group(rank)
        assert rank in group
        assert len(group) == plan.graph_parallel_degree
        assert {plan.graph_group(other) for other in group} == {group}


@given(plan=plans, seed=seeds, epoch=st.integers(0, 3))
def test_an_epoch_trains_on_every_part_once(plan, seed, epoch):
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    batches = [batch_parts(plan, step=step, seed=seed) for step in steps]
    assert all(len(replicas) == plan.data_parallel_degree for replicas in batches)
    trained = sorted(part for replicas in batches for batch in replicas for part in batch)
    replicas_of_a_part = plan.data_parallel_degree if plan.is_full_graph else 1
    assert trained == sorted([*range(plan.partition.num_parts)] * replicas_of_a_part)


@given(plan=plans, seed=seeds, step=st.integers(0, 20))
def test_batches_depend_on_seed_and_step_alone(plan, seed, step):
    assert batch_parts(plan, step=step, seed=seed) == batch_parts(replace(plan), step=step, seed=seed)


def test_epochs_differ_in_their_order():
    parts = tuple(made_part(1, [0] * 8, [0] * 8) for _ in range(8))
    plan = replace(PLAN, partition=replace(PARTITION, parts=parts), graph_parallel_degree=1, parts_per_batch=1)
    epochs = [[batch_parts(plan, step=8 * epoch + step, seed=0) for step in range(8)] for epoch in range(4)]
    assert len({str(epoch) for epoch in epochs}) > 1


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("data_parallel_degree", 0, "must be finite and > 0, got 0"),
        ("parts_per_batch", 3, "must be within 1 and num_parts = 2, got 3"),
        ("recompute", (), "must have 1 entries, got 0"),
        ("gradient_bucket_bytes", 3, "must be finite and >= 4, got 3"),
    ],
)
def test_a_plan_out_of_range_is_refused(field, value, rule):
    with pytest.raises(SpecError, match=f"{field} {rule}"):
        replace(PLAN, **{field: value})


def test_a_part_that_counts_other_numbers_of_parts_is_refused():
    with pytest.raises(SpecError, match="edges_from must have 1 entries, got 2"):
        replace(PARTITION, parts=PARTITION.parts[:1])


# --- Sampled batches.


@given(plan=sampled_plans(), epoch=st.integers(0, 2))
def test_an_epoch_deals_out_every_seed_once_in_batches_of_equal_size(plan, epoch):
    steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
    ranges = [replica for step in steps for replica in seed_ranges(plan, step=step)]
    assert len(ranges) == plan.steps_per_epoch * plan.data_parallel_degree
    assert [seed for first, end in ranges for seed in range(first, end)] == [*range(plan.num_train_nodes)]
    sizes = [end - first for first, end in ranges]
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= plan.sampled.seeds_per_batch
    assert not plan.is_full_graph
    assert plan.loads_batches


@pytest.mark.parametrize(
    ("fields", "is_full_graph"),
    [({}, True), ({"between_edges": False}, False), ({"parts_per_batch": 1}, False)],
)
def test_a_batch_of_all_parts_is_the_full_graph_unless_edges_between_them_are_dropped(fields, is_full_graph):
    assert replace(PLAN, **fields).is_full_graph == is_full_graph
    assert replace(PLAN, **fields).loads_batches != is_full_graph


def test_sampled_batches_out_of_range_are_refused():
    layer = SampledLayer(
        num_sources=3, num_targets=1, num_edges=2, num_edges_of_long_targets=0, num_edges_of_long_sources=0
    )
    sampled = SampledBatches(fan_outs=(2,), seeds_per_batch=1, layers=(layer,), num_feature_entries=0)
    for field, value, rule in (
        ("fan_outs", (0,), "must hold numbers >= 1, got 0"),
        ("seeds_per_batch", 0, "must be finite and > 0, got 0"),
        ("layers", (layer, layer), "must have 1 entries, got 2"),
    ):
        with pytest.raises(SpecError, match=f"{field} {rule}"):
            replace(sampled, **{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": CompressionKind.TOP_K}, "kept_ratio must be > 0 and <= 1 for top_k, got 0.0"),
        ({"kind": CompressionKind.TOP_K, "kept_ratio": 1.5}, "kept_ratio must be > 0 and <= 1 for top_k, got 1.5"),
        ({"kind": CompressionKind.BF16, "kept_ratio": 0.1}, "kept_ratio must be 0 for bf16: it is for top_k, got 0.1"),
        ({"kind": CompressionKind.POWER_SGD}, "matrix_rank must be >= 1 for power_sgd, got 0"),
        ({"matrix_rank": 2}, "matrix_rank must be 0 for none: it is for power_sgd, got 2"),
    ],
)
def test_a_compression_with_a_setting_of_another_kind_or_without_its_own_is_refused(fields, message):
    with pytest.raises(SpecError) as caught:
        GradientCompression(**fields)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (GradientCompression(), "none"),
        (GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=0.01), "top-k of 1 %"),
        (GradientCompression(kind=CompressionKind.POWER_SGD, matrix_rank=4), "PowerSGD of rank 4"),
    ],
)
def test_a_compression_in_words(how, words):
    assert str(how) == words
