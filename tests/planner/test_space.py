import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.space import candidates, rank_counts
from simulator.constraints import violations
from simulator.specs.cluster import DeviceKind
from simulator.specs.plan import Exchange, PartitionSpec, Plan, Recompute, SampledBatches, SampledLayer
from simulator.specs.search import BatchKind, SearchSpec
from simulator.specs.units import Dtype
from tests.made import equal_parts, graph_of, made_cluster, made_model

FULL, CLUSTERS, ISOLATED, SAMPLED = BatchKind
ONE_CHOICE: dict[str, Any] = {"exchanges": (Exchange.HALO,), "recomputes": (Recompute.NONE,)}


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


def plans_of(devices: int = 4, **fields: Any) -> list[Plan]:
    """Return the candidates on so many devices."""
    return list(candidates(made_model(), made_cluster(devices_per_host=devices), SearchSpec(**fields), cut, sampled))


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
    gpus = made_cluster(kind=DeviceKind.CUDA)
    search = SearchSpec(batches=(SAMPLED, CLUSTERS), **fields)
    on_gpus = list(candidates(made_model(), gpus, search, cut, sampled))
    assert {plan.prefetch_batches for plan in on_gpus if plan.loads_batches} == {2}
    assert {plan.prefetch_batches for plan in on_gpus if plan.keep_batches} == {0}


def test_every_combination_of_choices_is_there_once():
    exchanges, recomputes = (Exchange.HALO, Exchange.ALL_GATHER), tuple(Recompute)
    plans = plans_of(
        num_ranks=(2,), exchanges=exchanges, recomputes=recomputes, precisions=tuple(Dtype), batches=(FULL,)
    )
    # Layers are alike.
    found = [(plan.exchange, plan.recompute, plan.precision) for plan in plans]
    assert sorted(found) == sorted(
        ((exchange,) * 2, (recompute,) * 2, precision)
        for exchange, recompute, precision in itertools.product(exchanges, recomputes, Dtype)
    )


def test_one_rank_exchanges_nothing_whatever_exchanges_are_allowed():
    plans = plans_of(num_ranks=(1,), batches=(FULL, CLUSTERS), recomputes=(Recompute.NONE,))
    assert [plan.exchange for plan in plans] == [(Exchange.NONE,) * 2] * 3


def test_candidates_on_fewer_ranks_come_first():
    ranks = [plan.num_ranks for plan in plans_of(devices=8, batches=(FULL, CLUSTERS))]
    assert ranks == sorted(ranks)


def test_only_cuts_that_are_needed_are_made():
    asked = []

    def noted_cut(num_parts: int) -> PartitionSpec:
        asked.append(num_parts)
        return cut(num_parts)

    search = SearchSpec(num_ranks=(2, 4), batches=(FULL, CLUSTERS), parts_per_replica=2)
    found = candidates(made_model(), made_cluster(), search, noted_cut)
    next(found)
    assert asked == [2]
    list(found)
    assert set(asked) == {2, 4, 8}


searches = st.builds(
    SearchSpec,
    batches=st.sampled_from([(FULL,), (CLUSTERS,), (FULL, CLUSTERS)]),
    parts_per_replica=st.integers(1, 4),
) | st.builds(
    SearchSpec,
    batches=st.sampled_from([(SAMPLED,), (SAMPLED, ISOLATED), tuple(BatchKind)]),
    parts_per_replica=st.integers(2, 4),
    parts_per_batch=st.just(2),
    fan_outs=st.just((3, 2)),
    seeds_per_batch=st.just(100),
)


@given(search=searches, devices=st.integers(1, 8))
def test_every_candidate_that_fits_the_cluster_is_legal(search, devices):
    cluster, model = made_cluster(devices_per_host=devices), made_model()
    for plan in candidates(model, cluster, search, cut, sampled):
        assert violations(plan, graph_of(plan.partition), model, cluster) == []


# --- Case P1: every field of a search has an effect (its seed on the cut, in test_search.py).


@pytest.mark.parametrize(
    "fields",
    [
        {"num_ranks": (2,)},
        {"batches": (CLUSTERS,)},
        {"exchanges": (Exchange.HALO,)},
        {"recomputes": (Recompute.LAYER,)},
        {"precisions": (Dtype.BFLOAT16,)},
        {"batches": (CLUSTERS,), "parts_per_replica": 5},
        {"batches": (CLUSTERS,), "parts_per_batch": 2},
        {"batches": (SAMPLED,), "fan_outs": (3, 2), "seeds_per_batch": 100},
    ],
    ids=str,
)
def test_every_field_of_a_search_changes_the_candidates(fields):
    # What sampled batches need has no default; their effect is on the counts that `sampled` makes up here.
    without = {"batches": fields["batches"]} if len(fields) == 2 else {}
    assert plans_of(**fields) != plans_of(**without)
