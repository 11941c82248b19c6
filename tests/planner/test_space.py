import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.space import candidates, rank_counts
from simulator.constraints import violations
from simulator.specs.cluster import DeviceKind
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.plan import (
    Exchange,
    ExchangePayload,
    ParameterSharding,
    PartitionSpec,
    PipelineSchedule,
    Plan,
    Recompute,
    SampledBatches,
    SampledLayer,
)
from simulator.specs.search import BatchKind, SearchSpec
from simulator.specs.shares import PartShares
from simulator.specs.units import MIB, Dtype
from tests.made import equal_parts, graph_of, made_cluster, made_model, three_parts_on_two_hosts

CLUSTER = made_cluster(devices_per_host=4)
FULL, CLUSTERS, ISOLATED, SAMPLED = BatchKind
ONE_WAY: dict[str, Any] = {"exchange_overlaps": (False,), "exchange_payloads": (ExchangePayload.KEYS_AND_VALUES,)}
ONE_CHOICE: dict[str, Any] = {
    "exchanges": (Exchange.HALO,),
    "recomputes": (Recompute.NONE,),
    "tensor_parallel_degrees": (1,),
    **ONE_WAY,
}


def cut(num_parts: int) -> PartitionSpec:
    return equal_parts(num_parts, num_nodes=5040, num_edges=5040**2)


def sampled(data_parallel_degree: int) -> SampledBatches:
    """Return sampled batches that tell for how many replicas they were asked."""
    layer = SampledLayer(
        num_sources=100 * data_parallel_degree,
        num_targets=100,
        num_edges=200,
        num_edges_of_long_targets=0,
        num_edges_of_long_sources=0,
    )
    return SampledBatches(fan_outs=(3, 2), seeds_per_batch=100, layers=(layer, layer), num_feature_entries=0)


def plans_of(devices: int = 4, *, kind: DeviceKind = DeviceKind.CPU, **fields: Any) -> list[Plan]:
    """Return the candidates on so many devices."""
    cluster = made_cluster(devices_per_host=devices, kind=kind)
    return list(candidates(graph_of(cut(1)), made_model(), cluster, SearchSpec(**fields), cut, sampled))


def meshes(plans: list[Plan]) -> list[tuple[int, int, int]]:
    """Return replicas, ranks of a graph group and parts of each plan."""
    return [(plan.data_parallel_degree, plan.graph_parallel_degree, plan.partition.num_parts) for plan in plans]


# --- Numbers of ranks.


@pytest.mark.parametrize(
    ("hosts", "devices", "asked", "expected"),
    [
        (1, 1, (), (1,)),
        (1, 4, (), (1, 2, 4)),
        (1, 6, (), (1, 2, 4, 6)),
        (3, 4, (), (1, 2, 4, 8, 12)),
        (1, 4, (3,), (3,)),
        (1, 4, (4, 1, 4), (1, 4)),
        # More than there are is a candidate that will be rejected with its reason.
        (1, 4, (2, 64), (2, 64)),
    ],
)
def test_numbers_of_ranks_by_hand(hosts, devices, asked, expected):
    cluster = made_cluster(num_hosts=hosts, devices_per_host=devices)
    assert rank_counts(cluster, SearchSpec(num_ranks=asked)) == expected


# --- Candidates.


def test_full_graph_candidates_by_hand():
    assert meshes(plans_of(devices=6, **ONE_CHOICE)) == [(1, 1, 1), (1, 2, 2), (1, 4, 4), (1, 6, 6)]


def test_cluster_candidates_by_hand():
    # Three parts for each rank, whether it is a replica or shares one; a batch never takes all parts. Batches of one
    # part are kept on the device, or not in case they do not fit.
    plans = plans_of(batches=(CLUSTERS,), parts_per_replica=3, **ONE_CHOICE)
    assert meshes(plans) == [
        *[(1, 1, 3)] * 2,
        *[(2, 1, 6)] * 2,
        (1, 2, 6),
        *[(4, 1, 12)] * 2,
        (2, 2, 12),
        (1, 4, 12),
    ]
    assert [plan.keep_batches for plan in plans] == [True, False, True, False, False, True, False, False, False]
    # With one part for each rank, one group of all ranks would train on the full graph.
    assert meshes(plans_of(batches=(CLUSTERS,), parts_per_replica=1, **ONE_CHOICE)) == [
        *[(2, 1, 2)] * 2,
        *[(4, 1, 4)] * 2,
        (2, 2, 4),
    ]


def test_cluster_candidates_of_several_parts_a_batch_by_hand():
    fields: dict[str, Any] = {"num_ranks": (2,), "parts_per_replica": 2, "parts_per_batch": 2, **ONE_CHOICE}
    plans = plans_of(batches=(CLUSTERS, ISOLATED), **fields)
    # Ranks that share a batch have a part each, and then edges between the parts are what they exchange.
    assert [(*mesh, plan.parts_per_batch) for mesh, plan in zip(meshes(plans), plans, strict=True)] == [
        (2, 1, 4, 2),
        (1, 2, 4, 2),
        (2, 1, 4, 2),
    ]
    assert [plan.between_edges for plan in plans] == [True, True, False]
    # A batch of all parts without the edges between them is not the full graph; with them it is.
    whole = {**fields, "num_ranks": (1,)}
    assert plans_of(batches=(CLUSTERS,), **whole) == []
    (isolated,) = plans_of(batches=(ISOLATED,), **whole)
    assert not isolated.is_full_graph


def test_sampled_candidates_by_hand():
    fields: dict[str, Any] = {"fan_outs": (3, 2), "seeds_per_batch": 100, **ONE_CHOICE}
    plans = plans_of(batches=(SAMPLED,), **fields)
    # Replicas alone; the graph is cut for evaluations, a part a rank.
    assert meshes(plans) == [(1, 1, 1), (2, 1, 2), (4, 1, 4)]
    assert [plan.sampled for plan in plans] == [sampled(replicas) for replicas in (1, 2, 4)]
    # A core that made batches ahead would do nothing else meanwhile.
    assert {plan.prefetch_batches for plan in plans} == {0}
    on_gpus = plans_of(kind=DeviceKind.CUDA, batches=(SAMPLED, CLUSTERS), **fields)
    assert {plan.prefetch_batches for plan in on_gpus if plan.loads_batches} == {2}
    assert {plan.prefetch_batches for plan in on_gpus if plan.keep_batches} == {0}


def test_every_combination_of_choices_is_there_once():
    exchanges, recomputes = (Exchange.HALO, Exchange.ALL_GATHER), tuple(Recompute)
    plans = plans_of(
        num_ranks=(2,), exchanges=exchanges, recomputes=recomputes, precisions=tuple(Dtype), batches=(FULL,), **ONE_WAY
    )
    # Layers are alike.
    found = [(plan.exchange, plan.recompute, plan.precision) for plan in plans]
    assert sorted(found) == sorted(
        ((exchange,) * 2, (recompute,) * 2, precision)
        for exchange, recompute, precision in itertools.product(exchanges, recomputes, Dtype)
    )


def test_every_way_in_which_rows_travel_is_there_once_plain_ones_first():
    plans = plans_of(
        num_ranks=(2,),
        recomputes=(Recompute.NONE,),
        precisions=tuple(Dtype),
        exchange_precisions=(Dtype.BFLOAT16,),
        exchange_chunk_bytes=2**20,
    )
    found = [
        (
            plan.exchange[0],
            plan.overlap_exchange,
            plan.exchange_payload,
            plan.precision,
            plan.exchange_precision,
            plan.exchange_chunk_bytes,
        )
        for plan in plans
    ]
    kv, half = ExchangePayload.KEYS_AND_VALUES, Dtype.BFLOAT16
    # An exchange of heads waits for all rows and sends what attention takes; a plan in bf16 sends nothing shorter.
    ways = [
        *itertools.product((Exchange.HALO, Exchange.ALL_GATHER), (False, True), ExchangePayload),
        (Exchange.HEAD_ALL_TO_ALL, False, kv),
    ]
    formats = [(Dtype.FLOAT32, None), (Dtype.FLOAT32, half), (half, None)]
    assert len(set(found)) == len(found)
    assert set(found) == {(*way, *numbers, chunk) for way in ways for numbers in formats for chunk in (None, 2**20)}
    assert found[0] == (Exchange.HALO, False, kv, Dtype.FLOAT32, None, None)


def test_a_hierarchical_exchange_is_tried_on_full_graphs_whose_hosts_were_counted():
    counted = three_parts_on_two_hosts()
    plans = list(
        candidates(
            graph_of(counted),
            made_model(),
            made_cluster(num_hosts=2, devices_per_host=2),
            SearchSpec(num_ranks=(3,), recomputes=(Recompute.NONE,), exchange_chunk_bytes=2**20, batches=(FULL,)),
            lambda _: counted,
        )
    )
    hierarchical = [plan for plan in plans if plan.exchange[0] is Exchange.HIERARCHICAL_HALO]
    # Beside or not, of keys and values or of rows, but never in chunks; other plans need no counts of hosts.
    assert {(plan.overlap_exchange, plan.exchange_payload) for plan in hierarchical} == set(
        itertools.product((False, True), ExchangePayload)
    )
    assert all(plan.exchange_chunk_bytes is None and plan.partition == counted for plan in hierarchical)
    assert all(plan.partition.hosts is None for plan in plans if plan not in hierarchical)
    assert {plan.exchange[0] for plan in plans_of(num_ranks=(2, 4))} == set(Exchange) - {
        Exchange.NONE,
        Exchange.HIERARCHICAL_HALO,
    }


def test_fewer_parts_than_ranks_are_tried_where_they_were_asked_for():
    asked = []

    def shared(spec: PartitionSpec, part_ranks: tuple[int, ...]) -> PartShares:
        asked.append((spec.num_parts, part_ranks))
        count = sum(part_ranks)
        parts = [part for part, ranks in enumerate(part_ranks) for _ in range(ranks)]
        nodes = [spec.parts[part].num_nodes // part_ranks[part] for part in parts]
        return PartShares(
            part_ranks=part_ranks,
            num_nodes=tuple(nodes),
            num_train_nodes=(0,) * count,
            num_feature_entries=(0,) * count,
            rows_to_parts=((0,) * len(part_ranks),) * count,
        )

    def plans(**fields: Any) -> list[Plan]:
        search = SearchSpec(num_ranks=(2, 4), **{"recomputes": (Recompute.NONE,), **fields})
        return list(candidates(graph_of(cut(1)), made_model(num_heads=2), CLUSTER, search, cut, None, shared))

    plain = plans()
    assert asked == []
    found = plans(shared_part_counts=(2, 3))
    assert asked == [(3, (2, 1, 1)), (2, (2, 2))]
    served = [plan for plan in found if plan.partition.shares is not None]
    assert [plan for plan in found if plan.partition.shares is None] == plain
    assert [(plan.num_ranks, plan.part_ranks) for plan in served] == [(4, (2, 1, 1)), (4, (2, 2))]
    assert all(violations(plan, graph_of(cut(1)), made_model(num_heads=2), CLUSTER) == [] for plan in served)


def test_one_rank_exchanges_nothing_whatever_exchanges_are_allowed():
    plans = plans_of(num_ranks=(1,), batches=(FULL, CLUSTERS), recomputes=(Recompute.NONE,))
    assert [plan.exchange for plan in plans] == [(Exchange.NONE,) * 2] * 3


def reductions(plans: list[Plan]) -> list[tuple[int, bool, GradientCompression]]:
    """Return size of the buckets, overlap and compression of each plan."""
    return [(plan.gradient_bucket_bytes, plan.overlap_gradients, plan.gradient_compression) for plan in plans]


def test_buckets_and_overlap_on_gpus_by_hand():
    # From 1 MiB on all gradients lie in one bucket, which gains nothing by overlap; of equal cuts one is tried.
    none, fields = GradientCompression(), {"num_ranks": (2,), **ONE_CHOICE}
    kind = DeviceKind.CUDA
    assert reductions(plans_of(kind=kind, **fields)) == [(25 * MIB, False, none)]
    sizes = (2048, 8192, 1 * MIB, 5 * MIB)
    assert reductions(plans_of(kind=kind, gradient_bucket_bytes=sizes, **fields)) == [
        (5 * MIB, False, none),
        (8192, True, none),
        (2048, True, none),
    ]
    # Cores would have to move the bytes themselves; who wants it may ask.
    assert reductions(plans_of(gradient_bucket_bytes=sizes, **fields)) == [(5 * MIB, False, none)]
    asked = plans_of(gradient_bucket_bytes=sizes, overlap_gradients=(True,), **fields)
    assert reductions(asked) == [(5 * MIB, True, none), (8192, True, none), (2048, True, none)]


def test_compressions_that_were_asked_for_are_tried_where_there_are_several_ranks():
    none, half = GradientCompression(), GradientCompression(kind=CompressionKind.BF16)
    plans = plans_of(devices=2, gradient_compressions=(none, half), **ONE_CHOICE)
    assert [(plan.num_ranks, plan.gradient_compression) for plan in plans] == [(1, none), (2, none), (2, half)]


def test_candidates_on_fewer_ranks_come_first():
    ranks = [plan.num_ranks for plan in plans_of(devices=8, batches=(FULL, CLUSTERS))]
    assert ranks == sorted(ranks)


def test_only_cuts_that_are_needed_are_made():
    asked = []

    def noted_cut(num_parts: int) -> PartitionSpec:
        asked.append(num_parts)
        return cut(num_parts)

    search = SearchSpec(num_ranks=(2, 4), batches=(FULL, CLUSTERS), parts_per_replica=2)
    found = candidates(graph_of(cut(1)), made_model(), made_cluster(), search, noted_cut)
    next(found)
    assert asked == [2]
    list(found)
    assert set(asked) == {2, 4, 8}


searches = st.builds(
    SearchSpec,
    batches=st.sampled_from([(FULL,), (CLUSTERS,), (FULL, CLUSTERS)]),
    parts_per_replica=st.integers(1, 4),
    exchange_precisions=st.sampled_from([(), (Dtype.BFLOAT16,)]),
    exchange_chunk_bytes=st.sampled_from([0, 10_000]),
) | st.builds(
    SearchSpec,
    batches=st.sampled_from([(SAMPLED,), (SAMPLED, ISOLATED), tuple(BatchKind)]),
    parts_per_replica=st.integers(2, 4),
    parts_per_batch=st.just(2),
    fan_outs=st.just((3, 2)),
    seeds_per_batch=st.just(100),
    exchange_precisions=st.sampled_from([(), (Dtype.BFLOAT16,)]),
)


@given(search=searches, devices=st.integers(1, 8))
def test_every_candidate_that_fits_the_cluster_is_legal(search, devices):
    cluster, model = made_cluster(devices_per_host=devices), made_model()
    for plan in candidates(graph_of(cut(1)), model, cluster, search, cut, sampled):
        assert violations(plan, graph_of(plan.partition), model, cluster) == []


# --- Case P1: every field of a search has an effect (its seed on the cut, in test_search.py).


@pytest.mark.parametrize(
    "fields",
    [
        {"num_ranks": (2,)},
        {"batches": (CLUSTERS,)},
        {"exchanges": (Exchange.HALO,)},
        {"exchange_overlaps": (True,)},
        {"exchange_payloads": (ExchangePayload.ROWS,)},
        {"exchange_precisions": (Dtype.BFLOAT16,)},
        {"exchange_chunk_bytes": 2**20},
        {"recomputes": (Recompute.LAYER,)},
        {"precisions": (Dtype.BFLOAT16,)},
        {"batches": (CLUSTERS,), "parts_per_replica": 5},
        {"batches": (CLUSTERS,), "parts_per_batch": 2},
        {"batches": (SAMPLED,), "fan_outs": (3, 2), "seeds_per_batch": 100},
        {"gradient_bucket_bytes": (MIB,)},
        {"overlap_gradients": (True,)},
        {"gradient_compressions": (GradientCompression(kind=CompressionKind.BF16),)},
    ],
    ids=str,
)
def test_every_field_of_a_search_changes_the_candidates(fields):
    # What sampled batches need has no default; their effect is on the counts that `sampled` makes up here.
    without = {"batches": fields["batches"]} if len(fields) == 2 else {}
    assert plans_of(**fields) != plans_of(**without)


# --- Ranks that share heads and columns, and parameters.


def test_heads_are_shared_by_ranks_of_a_host_that_divide_them_on_gpus_alone():
    # Four heads; on a host of eight GPUs, two, four or none of the ranks share them.
    fields = {key: value for key, value in ONE_CHOICE.items() if key != "tensor_parallel_degrees"}
    on_gpus = plans_of(devices=8, kind=DeviceKind.CUDA, num_ranks=(8,), **fields)
    assert {(plan.tensor_parallel_degree, plan.graph_parallel_degree) for plan in on_gpus} == {(1, 8), (2, 4), (4, 2)}
    assert {plan.num_ranks for plan in on_gpus} == {8}
    assert {plan.tensor_parallel_degree for plan in plans_of(devices=8, num_ranks=(8,), **fields)} == {1}
    asked = plans_of(devices=8, num_ranks=(8, 3), **{**fields, "tensor_parallel_degrees": (2, 3)})
    assert {(plan.num_ranks, plan.tensor_parallel_degree) for plan in asked} == {(8, 2)}


def test_parameters_are_shared_out_where_it_is_asked_for_and_several_ranks_hold_other_rows():
    kinds = tuple(ParameterSharding)
    plans = plans_of(num_ranks=(1, 2), **ONE_CHOICE, parameter_shardings=kinds)
    assert [(plan.num_ranks, plan.shard_parameters) for plan in plans] == [
        (1, ParameterSharding.NONE),
        *((2, kind) for kind in kinds),
    ]
    only = plans_of(num_ranks=(2,), **ONE_CHOICE, parameter_shardings=(ParameterSharding.ZERO3,))
    assert [plan.shard_parameters for plan in only] == [ParameterSharding.ZERO3]


def test_candidates_of_stages_and_micro_batches_by_hand():
    fields: dict[str, Any] = {**ONE_CHOICE, "pipeline_parallel_degrees": (1, 2), "num_micro_batches": (1, 2)}
    found = plans_of(devices=2, num_ranks=(2,), batches=(CLUSTERS,), **fields)
    # Two layers are a stage each, so none are interleaved; ranks of a pipeline are no replicas.
    assert [
        (plan.pipeline_parallel_degree, plan.stages, plan.num_micro_batches, plan.data_parallel_degree)
        for plan in found
        if plan.keep_batches
    ] == [(1, (), 1, 2), (1, (), 2, 2), (2, (1, 1), 1, 1), (2, (1, 1), 2, 1)]
    cluster = made_cluster(devices_per_host=2)
    assert all(violations(plan, graph_of(cut(1)), made_model(), cluster) == [] for plan in found)
    whole = plans_of(devices=2, num_ranks=(2,), **fields)
    assert [(plan.pipeline_parallel_degree, plan.num_micro_batches) for plan in whole] == [(1, 1), (2, 1)]


def test_interleaved_candidates_have_two_stages_a_rank_then_four():
    model, cluster = made_model(num_layers=8), made_cluster(devices_per_host=2)
    search = SearchSpec(
        batches=(CLUSTERS,),
        num_ranks=(2,),
        pipeline_parallel_degrees=(2,),
        num_micro_batches=(2,),
        pipeline_schedules=(PipelineSchedule.INTERLEAVED,),
        **ONE_CHOICE,
    )
    found = candidates(
        graph_of(cut(1)), model, cluster, search, cut, sampled, balance=lambda plan, count: (8 // count,) * count
    )
    assert {plan.stages for plan in found} == {(2,) * 4, (1,) * 8}
