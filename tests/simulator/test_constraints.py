import dataclasses
from typing import Any

import pytest

from simulator.constraints import step_mode_of, training_violations, violations
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
    StepMode,
)
from simulator.specs.shares import PartShares
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from tests.made import (
    equal_parts,
    graph_of,
    made_cluster,
    made_model,
    made_plan,
    made_sampled,
    made_sampled_plan,
    three_parts_on_two_hosts,
    two_parts_on_three_ranks,
)

FOUR = equal_parts(4, num_nodes=400, num_edges=1600, halo_rows=10)
GRAPH = graph_of(FOUR)
MODEL = made_model()
CLUSTER = made_cluster(devices_per_host=4)
NONE = (Exchange.NONE,) * 2
SAMPLED = made_sampled((90, 60, 120), (60, 40, 80))


def reasons(plan: Plan, **fields: object) -> list[str]:
    """Return why a plan cannot run, on the made graph and cluster unless fields name others."""
    found = {"graph": GRAPH, "model": MODEL, "cluster": CLUSTER} | fields
    return violations(plan, **found)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "plan",
    [
        made_plan(FOUR),
        made_plan(FOUR, exchange=(Exchange.ALL_GATHER, Exchange.HALO), recompute=(Recompute.LAYER, Recompute.NONE)),
        made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=4),
        made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=1),
        made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=3),
        made_plan(FOUR, data_parallel_degree=4, graph_parallel_degree=1),
        made_plan(FOUR, data_parallel_degree=2, graph_parallel_degree=2),
        made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=2, between_edges=False, prefetch_batches=2),
        made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=4, between_edges=False),
        made_plan(FOUR, data_parallel_degree=2, graph_parallel_degree=1, keep_batches=True),
        made_sampled_plan(FOUR, SAMPLED),
        made_sampled_plan(FOUR, SAMPLED, data_parallel_degree=4, prefetch_batches=1),
    ],
)
def test_a_plan_that_can_run_has_no_violations(plan):
    assert reasons(plan) == []


def test_a_plan_has_no_more_ranks_than_the_cluster_has_devices():
    assert reasons(made_plan(FOUR), cluster=made_cluster(devices_per_host=3)) == [
        "plan.num_ranks=4 must not exceed cluster.num_devices=3: lower data_parallel_degree, "
        "graph_parallel_degree, tensor_parallel_degree or pipeline_parallel_degree"
    ]
    assert reasons(made_plan(FOUR), cluster=made_cluster(num_hosts=2, devices_per_host=2)) == []


def test_parts_are_of_this_graph():
    graph = dataclasses.replace(GRAPH, num_nodes=401, num_edges=1599)
    assert reasons(made_plan(FOUR), graph=graph) == [
        "the parts of the plan own 400 nodes, but graph.num_nodes=401: partition this graph again",
        "the parts of the plan hold 1600 edges, but graph.num_edges=1599: partition this graph again",
    ]


@pytest.mark.parametrize("parts_per_batch", [1, 3, 4])
def test_each_rank_of_a_graph_group_trains_on_one_part(parts_per_batch):
    plan = made_plan(FOUR, graph_parallel_degree=2, parts_per_batch=parts_per_batch)
    assert reasons(plan) == [
        f"plan.parts_per_batch={parts_per_batch} must equal plan.graph_parallel_degree=2: each rank of a graph group "
        "trains on one part"
    ]


def test_replicas_do_not_repeat_the_full_graph():
    plan = made_plan(FOUR, data_parallel_degree=2, graph_parallel_degree=1, parts_per_batch=4)
    assert reasons(plan)[0] == (
        "plan.data_parallel_degree=2 must be 1 when parts_per_batch takes all 4 parts: replicas would repeat the same "
        "work; use graph_parallel_degree or more parts"
    )


def test_a_step_has_no_more_parts_than_there_are():
    plan = made_plan(FOUR, data_parallel_degree=2, graph_parallel_degree=1, parts_per_batch=3)
    assert reasons(plan) == [
        "data_parallel_degree * parts_per_batch = 6 must not exceed plan.partition.num_parts=4: cut the graph into "
        "more parts"
    ]


def test_every_layer_has_its_exchange():
    plan = made_plan(FOUR, num_layers=3)
    assert reasons(plan) == ["exchange has 3 entries, but model.num_layers=2: give one for each layer"]


def test_several_ranks_exchange_and_one_does_not():
    assert reasons(made_plan(FOUR, exchange=(Exchange.HALO, Exchange.NONE))) == [
        "exchange[1] must not be none when plan.graph_parallel_degree=4: use halo, all_gather or head_all_to_all"
    ]
    alone = made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=4, exchange=(Exchange.ALL_GATHER, Exchange.NONE))
    assert reasons(alone) == ["exchange[0] must be none when plan.graph_parallel_degree=1, got all_gather"]


def test_only_full_graph_steps_of_gpus_are_replayed():
    gpus = made_cluster(devices_per_host=4, kind=DeviceKind.CUDA)
    whole = made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=4, step_mode=StepMode.CUDA_GRAPH)
    assert reasons(whole, cluster=gpus) == []
    assert reasons(whole) == ["step_mode must be eager on devices of kind cpu, got cuda_graph"]
    assert reasons(made_plan(FOUR, step_mode=StepMode.CUDA_GRAPH), cluster=gpus) == []
    assert reasons(dataclasses.replace(whole, parts_per_batch=3), cluster=gpus) == [
        "step_mode must be eager when plan.parts_per_batch=3 of plan.partition.num_parts=4, got cuda_graph: the shapes "
        "of batches differ"
    ]


@pytest.mark.parametrize("kind", DeviceKind)
@pytest.mark.parametrize("num_ranks", [1, 4])
@pytest.mark.parametrize("is_full_graph", [True, False])
def test_a_search_replays_full_graph_steps_of_one_gpu(kind, num_ranks, is_full_graph):
    mode = step_mode_of(num_ranks=num_ranks, is_full_graph=is_full_graph, cluster=made_cluster(kind=kind))
    assert (mode is StepMode.CUDA_GRAPH) == (kind is DeviceKind.CUDA and num_ranks == 1 and is_full_graph)


TOP_K = GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=0.1)


def test_a_single_rank_has_no_gradients_to_reduce():
    alone = made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=4)
    assert reasons(dataclasses.replace(alone, overlap_gradients=True)) == [
        "overlap_gradients must be false when data_parallel_degree and graph_parallel_degree are 1: nothing is reduced"
    ]
    assert reasons(dataclasses.replace(alone, gradient_compression=TOP_K)) == [
        "gradient_compression must be none when data_parallel_degree and graph_parallel_degree are 1, got top-k of "
        "10 %: nothing is sent"
    ]
    assert reasons(made_plan(FOUR, overlap_gradients=True, gradient_compression=TOP_K)) == []


def test_ranks_without_heads_begin_buckets_behind_the_backward_pass():
    heads = (Exchange.HEAD_ALL_TO_ALL,) * 2
    plan = made_plan(FOUR, exchange=heads, overlap_gradients=True)
    model = dataclasses.replace(made_model(), num_heads=1)
    sentences = violations(plan, graph_of(FOUR), model, made_cluster(devices_per_host=4))
    assert [sentence for sentence in sentences if sentence.startswith("overlap_gradients")] == [
        "overlap_gradients must be false when head_all_to_all leaves ranks without heads (graph_parallel_degree = 4, "
        "num_heads = 1): they have fewer tasks, and would begin buckets in another place"
    ]


def test_replayed_steps_have_no_overlap_since_their_weights_are_cast_at_once():
    gpus = made_cluster(devices_per_host=4, kind=DeviceKind.CUDA)
    plan = made_plan(FOUR, step_mode=StepMode.CUDA_GRAPH, overlap_gradients=True)
    assert reasons(plan, cluster=gpus)[-1] == (
        "overlap_gradients must be false when step_mode is cuda_graph: there all weights are cast at once, so that all "
        "their gradients come at once"
    )


def test_factors_must_make_a_parameter_smaller():
    # The largest matrices are 48 x 16 and 32 x 16: factors of 11 columns have 704 numbers, of 12 columns 768.
    narrow, wide = (GradientCompression(kind=CompressionKind.POWER_SGD, matrix_rank=rank) for rank in (11, 12))
    assert reasons(made_plan(FOUR, gradient_compression=narrow)) == []
    (reason,) = reasons(made_plan(FOUR, gradient_compression=wide))
    assert reason.startswith("gradient_compression.matrix_rank must make the factors of some parameter smaller")
    assert "got 12: lower it" in reason


def test_indices_of_top_k_fit_into_32_bits():
    huge = made_model(width=2**16, num_heads=4, feed_forward_width=2**16)
    (reason,) = reasons(made_plan(FOUR, gradient_compression=TOP_K), model=huge)
    assert reason.startswith("gradient_bucket_bytes must give buckets of at most 2147483647 numbers with top_k")


def test_dense_parts_are_compiled_for_full_graphs_on_gpus():
    gpus = made_cluster(devices_per_host=4, kind=DeviceKind.CUDA)
    train = TrainSpec(num_steps=10, learning_rate=0.1, compile_dense=True)
    whole = made_plan(FOUR)
    clusters = made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=1)
    assert training_violations(whole, train, gpus) == []
    assert training_violations(clusters, dataclasses.replace(train, compile_dense=False), CLUSTER) == []
    assert training_violations(whole, train, CLUSTER) == [
        "train.compile_dense must be false on devices of kind cpu: it is for cuda"
    ]
    assert training_violations(clusters, train, gpus) == [
        "train.compile_dense must be false when batches are clusters or sampled: their shapes differ, and each would "
        "be compiled for itself"
    ]


def test_all_reasons_are_told():
    plan = made_plan(FOUR, data_parallel_degree=3, graph_parallel_degree=2, parts_per_batch=1, exchange=NONE)
    found = reasons(plan)
    assert len(found) == 4
    assert "plan.num_ranks=6" in found[0]
    assert "plan.parts_per_batch=1" in found[1]
    assert found[2].startswith("exchange[0]")
    assert found[3].startswith("exchange[1]")


# --- Batches.


def test_edges_between_parts_are_dropped_only_where_there_are_any_and_nobody_exchanges_them():
    alone = made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=1, between_edges=False)
    assert reasons(alone) == [
        "between_edges must be true when plan.parts_per_batch=1: no edges join the parts of such batches"
    ]
    shared = made_plan(FOUR, data_parallel_degree=2, graph_parallel_degree=2, between_edges=False)
    assert reasons(shared) == [
        "between_edges must be true when plan.graph_parallel_degree=2: without them the ranks of a graph group have "
        "nothing to exchange; use data_parallel_degree"
    ]


def test_sampled_batches_are_for_lone_ranks_and_of_all_parts():
    plan = made_sampled_plan(FOUR, SAMPLED)
    assert reasons(dataclasses.replace(plan, graph_parallel_degree=4, exchange=(Exchange.HALO,) * 2)) == [
        "plan.graph_parallel_degree=4 must be 1 when batches are sampled: a rank samples its neighbourhoods from the "
        "whole graph and trains on them alone; use data_parallel_degree"
    ]
    assert reasons(dataclasses.replace(plan, parts_per_batch=3)) == [
        "plan.parts_per_batch=3 must equal plan.partition.num_parts=4 when batches are sampled: their nodes are of all "
        "parts"
    ]
    assert reasons(dataclasses.replace(plan, between_edges=False)) == [
        "between_edges must be true when batches are sampled, got false: their nodes are of all parts"
    ]
    three = dataclasses.replace(plan, sampled=made_sampled((9, 9, 9), (9, 9, 9), (9, 9, 9)))
    assert reasons(three) == ["sampled.fan_outs has 3 entries, but model.num_layers=2: give one for each layer"]


def test_batches_are_kept_or_made_ahead_only_where_that_has_an_effect():
    kept = [
        "keep_batches must be false unless batches are clusters of one part: others do not come again, and the full "
        "graph is kept anyway"
    ]
    assert reasons(made_plan(FOUR, keep_batches=True)) == kept
    assert reasons(made_sampled_plan(FOUR, SAMPLED, keep_batches=True)) == kept
    assert reasons(made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=2, keep_batches=True)) == kept
    ahead = ["plan.prefetch_batches=2 must be 0 when batches are kept: none is made in a step"]
    assert reasons(made_plan(FOUR, prefetch_batches=2)) == ahead
    assert reasons(made_plan(FOUR, graph_parallel_degree=1, keep_batches=True, prefetch_batches=2)) == ahead


def test_steps_on_samples_are_not_replayed():
    gpus = made_cluster(devices_per_host=4, kind=DeviceKind.CUDA)
    plan = made_sampled_plan(FOUR, SAMPLED, step_mode=StepMode.CUDA_GRAPH)
    assert reasons(plan, cluster=gpus) == [
        "step_mode must be eager when batches are sampled, got cuda_graph: their shapes differ"
    ]


# --- How rows travel.


def test_choices_of_how_rows_travel_need_an_exchange_that_has_them():
    # Case R23: no option without effect.
    heads = (Exchange.HEAD_ALL_TO_ALL,) * 2
    where = "when no layer exchanges by all_gather or halo or hierarchical_halo"
    assert reasons(made_plan(FOUR, exchange=heads, overlap_exchange=True)) == [
        f"overlap_exchange must be false {where}: attention by heads needs all rows before it begins"
    ]
    assert reasons(made_plan(FOUR, exchange=heads, exchange_payload=ExchangePayload.ROWS)) == [
        f"exchange_payload must be keys_and_values {where}, got rows"
    ]
    mixed = (Exchange.HEAD_ALL_TO_ALL, Exchange.HALO)
    assert reasons(made_plan(FOUR, exchange=mixed, overlap_exchange=True, exchange_payload=ExchangePayload.ROWS)) == []


def test_a_lone_rank_has_no_number_format_and_no_bound_of_messages():
    alone = made_plan(
        FOUR,
        graph_parallel_degree=1,
        parts_per_batch=4,
        exchange_precision=Dtype.BFLOAT16,
        exchange_chunk_bytes=1000,
    )
    assert reasons(alone) == [
        "exchange_precision must be left out when no layer exchanges, got bf16",
        "exchange_chunk_bytes must be left out when no layer exchanges, got 1000",
    ]


@pytest.mark.parametrize("precision", Dtype)
def test_what_travels_has_a_shorter_format_or_none_of_its_own(precision):
    plan = made_plan(FOUR, precision=Dtype.BFLOAT16, exchange_precision=precision)
    assert reasons(plan) == [
        f"exchange_precision must be shorter than plan.precision=bf16 or left out, got {precision}"
    ]
    assert reasons(made_plan(FOUR, exchange_precision=Dtype.BFLOAT16)) == []


def test_a_message_holds_a_row_for_each_other_rank():
    # Keys and values of 16 columns in fp32, for three others: 384 bytes.
    assert reasons(made_plan(FOUR, exchange_chunk_bytes=384)) == []
    assert reasons(made_plan(FOUR, exchange_chunk_bytes=383)) == [
        "exchange_chunk_bytes must hold a row for each other rank in halo, got 383: raise it or leave it out"
    ]


def test_heads_need_not_divide_by_ranks():
    # Case R23: five ranks share four heads, so one has none.
    partition = equal_parts(5, num_nodes=1000, num_edges=5000)
    plan = made_plan(partition, exchange=(Exchange.HEAD_ALL_TO_ALL,) * 2)
    cluster = made_cluster(devices_per_host=5)
    assert violations(plan, graph_of(partition), made_model(num_heads=4), cluster) == []


# --- Parts on several ranks.

SERVED = two_parts_on_three_ranks()
WHERE = "when partition.shares gives parts (1, 2) ranks"


def reasons_of_served(partition: PartitionSpec = SERVED, *, num_heads: int = 2, **fields: Any) -> list[str]:
    model = made_model(num_heads=num_heads, width=8)
    return violations(made_plan(partition, **fields), graph_of(partition), model, CLUSTER)


def test_a_part_may_have_as_many_ranks_as_there_are_heads():
    assert reasons_of_served() == []
    assert reasons_of_served(recompute=(Recompute.LAYER,) * 2, overlap_gradients=True, precision=Dtype.BFLOAT16) == []
    assert reasons_of_served(num_heads=1) == [
        "part 1 has 2 ranks, which must not exceed model.num_heads=1: each attends with heads of its own"
    ]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"graph_parallel_degree": 2},
            f"plan.graph_parallel_degree=2 must be 3 {WHERE}: give each part its ranks, or plan again",
        ),
        (
            {"parts_per_batch": 1},
            f"plan.parts_per_batch=1 must be all 2 parts {WHERE}, and batches must not be sampled: which part of a "
            "batch has most work differs from step to step",
        ),
        (
            {"exchange": (Exchange.HALO, Exchange.ALL_GATHER)},
            f"exchange[1] must be halo {WHERE}, got all_gather",
        ),
        (
            {"recompute": (Recompute.LAYER, Recompute.DENSE)},
            f"recompute must be none or layer {WHERE}, got dense",
        ),
        (
            {"overlap_exchange": True},
            f"overlap_exchange must be false {WHERE}: attention begins once rows of all its ranks came",
        ),
        (
            {"exchange_payload": ExchangePayload.ROWS},
            f"exchange_payload must be keys_and_values {WHERE}, got rows: rows would travel with all heads",
        ),
        (
            {"exchange_precision": Dtype.BFLOAT16},
            f"exchange_precision must be left out {WHERE}, got bf16: keys and values travel at once, as they are",
        ),
        (
            {"exchange_chunk_bytes": 2**20},
            f"exchange_chunk_bytes must be left out {WHERE}, got 1048576: keys and values travel at once, as they are",
        ),
    ],
)
def test_a_part_on_several_ranks_has_a_plain_halo_of_the_full_graph(fields, sentence):
    assert reasons_of_served(**fields) == [sentence]


def test_heads_are_shared_out_by_all_ranks_or_part_by_part():
    assert violations(
        made_plan(SERVED, tensor_parallel_degree=2),
        graph_of(SERVED),
        made_model(width=8),
        made_cluster(devices_per_host=6),
    ) == [f"plan.tensor_parallel_degree=2 must be 1 {WHERE}: heads are shared out part by part; use one of both"]


def test_ranks_of_a_part_hold_all_layers():
    assert violations(
        made_plan(SERVED, pipeline_parallel_degree=2, stages=(1, 1)),
        graph_of(SERVED),
        made_model(width=8),
        made_cluster(devices_per_host=6),
    ) == [f"plan.pipeline_parallel_degree=2 must be 1 {WHERE}: the ranks of a part hold all layers; use one of both"]


def test_shares_of_one_rank_a_part_have_no_effect():
    shares = PartShares(
        part_ranks=(1, 1),
        num_nodes=(10, 20),
        num_train_nodes=(0, 0),
        num_feature_entries=(0, 0),
        rows_to_parts=((0, 4), (3, 0)),
    )
    assert reasons_of_served(dataclasses.replace(SERVED, shares=shares)) == [
        "partition.shares must be left out when partition.shares gives parts (1, 1) ranks: no part has several"
    ]


# --- Hosts.

HOSTS = three_parts_on_two_hosts()


def reasons_on_hosts(*, num_hosts: int = 2, devices_per_host: int = 2, **fields: object) -> list[str]:
    choices: dict[str, Any] = {"exchange": (Exchange.HIERARCHICAL_HALO, Exchange.HALO), "partition": HOSTS, **fields}
    plan = made_plan(choices.pop("partition"), **choices)
    cluster = made_cluster(num_hosts=num_hosts, devices_per_host=devices_per_host)
    return violations(plan, graph_of(HOSTS), made_model(), cluster)


def test_a_hierarchical_exchange_counts_on_the_hosts_of_the_cluster():
    assert reasons_on_hosts() == []
    assert reasons_on_hosts(num_hosts=3, devices_per_host=1) == [
        "partition.hosts.ranks_per_host must equal devices_per_host = 1 of the cluster, got 2: plan again for this "
        "cluster"
    ]
    assert reasons_on_hosts(num_hosts=1, devices_per_host=4) == [
        "exchange must not be hierarchical_halo when all 3 ranks sit on one host of 4 devices: use halo",
        "partition.hosts.ranks_per_host must equal devices_per_host = 4 of the cluster, got 2: plan again for this "
        "cluster",
    ]
    assert reasons_on_hosts(partition=dataclasses.replace(HOSTS, hosts=None)) == [
        "partition.hosts must count the rows of hosts with hierarchical_halo, got none: plan again"
    ]


def test_a_hierarchical_exchange_has_the_full_graph_and_no_chunks():
    assert reasons_on_hosts(exchange_chunk_bytes=1000) == [
        "exchange_chunk_bytes must be left out with hierarchical_halo, got 1000: it sends no chunks; use halo where "
        "buffers would not fit"
    ]
    assert reasons_on_hosts(graph_parallel_degree=2, parts_per_batch=2, devices_per_host=1)[0] == (
        "plan.parts_per_batch=2 must be all 3 parts with hierarchical_halo: what a host needs depends on the parts "
        "that meet there; use halo"
    )


# --- Ranks that share heads and columns, and parameters.


def test_a_number_of_tensor_ranks_that_shares_heads_unevenly_is_refused_with_those_that_work():
    model = dataclasses.replace(made_model(), num_heads=8, width=16, feed_forward_width=36)
    plan = made_plan(FOUR, tensor_parallel_degree=3)
    cluster = made_cluster(devices_per_host=12)
    assert violations(plan, graph_of(FOUR), model, cluster) == [
        "tensor_parallel_degree = 3 must divide num_heads = 8, which the ranks share evenly: use 1, 2 or 4"
    ]
    eight = dataclasses.replace(plan, tensor_parallel_degree=8)
    assert violations(eight, graph_of(FOUR), model, made_cluster(devices_per_host=32)) == [
        "tensor_parallel_degree = 8 must divide feed_forward_width = 36, which the ranks share evenly: use 1, 2 or 4"
    ]
    assert violations(dataclasses.replace(plan, tensor_parallel_degree=2), graph_of(FOUR), model, cluster) == []


def test_heads_that_travel_are_those_of_a_tensor_rank():
    heads = (Exchange.HEAD_ALL_TO_ALL,) * 2
    plan = made_plan(FOUR, exchange=heads, overlap_gradients=True)
    model = dataclasses.replace(made_model(), num_heads=4)
    cluster = made_cluster(devices_per_host=8)
    assert violations(plan, graph_of(FOUR), model, cluster) == []
    (sentence,) = violations(dataclasses.replace(plan, tensor_parallel_degree=2), graph_of(FOUR), model, cluster)
    assert "leaves ranks without heads (graph_parallel_degree = 4, num_heads = 2)" in sentence


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"overlap_gradients": True},
            "overlap_gradients must be false when shard_parameters is zero3: gradients are summed layer by "
            "layer anyway",
        ),
        (
            {"gradient_compression": TOP_K},
            "gradient_compression must be none when shard_parameters is zero3, got top-k of 10 %: each rank gets "
            "the sum of its share",
        ),
    ],
)
def test_what_has_no_effect_on_parameters_that_are_shared_out_is_refused(fields, sentence):
    assert reasons(made_plan(FOUR, shard_parameters=ParameterSharding.ZERO3, **fields)) == [sentence]
    assert reasons(made_plan(FOUR, shard_parameters=ParameterSharding.ZERO3)) == []


def test_a_rank_alone_shares_no_parameters_out():
    alone = made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=4, shard_parameters=ParameterSharding.ZERO2)
    assert reasons(alone) == [
        "shard_parameters must be none when data_parallel_degree and graph_parallel_degree are 1, got zero2: there "
        "is no rank to share with"
    ]


def test_ranks_that_share_parameters_out_divide_the_width():
    plan = made_plan(FOUR, shard_parameters=ParameterSharding.ZERO2)
    model = dataclasses.replace(made_model(), width=18, num_heads=2)
    assert violations(plan, graph_of(FOUR), model, made_cluster(devices_per_host=4)) == [
        "data_parallel_degree * graph_parallel_degree = 4 must divide model.width=18 when shard_parameters is zero2: "
        "ranks share columns evenly; use another number of ranks, or none"
    ]


# --- Stages and micro-batches.


STAGES: dict[str, Any] = {"pipeline_parallel_degree": 2, "stages": (1, 1), "graph_parallel_degree": 1}


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"pipeline_parallel_degree": 3},
            "plan.pipeline_parallel_degree=3 must not exceed model.num_layers=2: a stage has a layer at least; use "
            "graph_parallel_degree or data_parallel_degree",
        ),
        ({"stages": (2, 1)}, "stages must add up to model.num_layers=2, got 3 layers in (2, 1)"),
        (
            {"stages": (2,)},
            "stages must hold as many numbers for each of plan.pipeline_parallel_degree=2, got 1: give the layers of "
            "2 stages, or of several times as many",
        ),
        (
            {"pipeline_schedule": PipelineSchedule.INTERLEAVED},
            "pipeline_schedule must be interleaved_1f1b just where ranks have several stages, got interleaved_1f1b "
            "with 2 stages on 2 ranks",
        ),
        (
            {"pipeline_parallel_degree": 1},
            "stages must be left out when plan.pipeline_parallel_degree=1, got (1, 1): all layers are one",
        ),
        (
            {"pipeline_parallel_degree": 1, "stages": (), "pipeline_schedule": PipelineSchedule.GPIPE},
            "pipeline_schedule must be left out when plan.pipeline_parallel_degree=1, got gpipe: there is one stage",
        ),
        (
            {"num_micro_batches": 2, "parts_per_batch": 2, "data_parallel_degree": 2},
            "data_parallel_degree * parts_per_batch * num_micro_batches = 8 must not exceed "
            "plan.partition.num_parts=4: cut the graph into more parts",
        ),
        (
            {"num_micro_batches": 2, "data_parallel_degree": 2, "overlap_gradients": True},
            "overlap_gradients must be false with pipeline_parallel_degree = 2 and num_micro_batches = 2: gradients of "
            "all micro-batches are added up before they are reduced",
        ),
        (
            {"data_parallel_degree": 2, "shard_parameters": ParameterSharding.ZERO3},
            "shard_parameters must be none with pipeline_parallel_degree = 2 and num_micro_batches = 1, got zero3: a "
            "layer would be gathered for each micro-batch; a pipeline shares layers out already",
        ),
    ],
)
def test_stages_and_micro_batches_that_cannot_be_are_refused(fields, sentence):
    plan = made_plan(FOUR, **{**STAGES, **fields})
    assert violations(plan, graph_of(FOUR), made_model(), made_cluster(devices_per_host=8)) == [sentence]
    whole = made_plan(FOUR, **STAGES)
    assert violations(whole, graph_of(FOUR), made_model(), made_cluster(devices_per_host=8)) == []


def test_micro_batches_of_the_full_graph_are_refused():
    plan = made_plan(FOUR, graph_parallel_degree=1, parts_per_batch=4, num_micro_batches=2)
    assert reasons(plan)[0] == (
        "plan.num_micro_batches=2 must be 1 when parts_per_batch takes all 4 parts: each micro-batch would repeat the "
        "same work; cut the graph into more parts"
    )


def test_interleaved_stages_take_turns_of_as_many_micro_batches_as_ranks():
    eight = equal_parts(8, num_nodes=80, num_edges=800)
    plan = made_plan(
        eight,
        num_layers=4,
        graph_parallel_degree=1,
        pipeline_parallel_degree=2,
        stages=(1, 1, 1, 1),
        pipeline_schedule=PipelineSchedule.INTERLEAVED,
        num_micro_batches=3,
    )
    model = dataclasses.replace(made_model(), num_layers=4)
    assert violations(plan, graph_of(eight), model, made_cluster(devices_per_host=8)) == [
        "plan.num_micro_batches=3 must be a multiple of plan.pipeline_parallel_degree=2 with interleaved_1f1b, whose "
        "stages take turns of as many: use 4 or 1f1b"
    ]


def test_dense_parts_are_not_compiled_where_ranks_share_them():
    train = TrainSpec(num_steps=1, learning_rate=0.1, compile_dense=True)
    cluster = made_cluster(kind=DeviceKind.CUDA)
    for fields, name in (
        ({"tensor_parallel_degree": 2}, "plan.tensor_parallel_degree=2"),
        ({"shard_parameters": ParameterSharding.ZERO3}, "shard_parameters is zero3"),
    ):
        (sentence,) = training_violations(made_plan(FOUR, **fields), train, cluster)
        assert sentence.startswith(f"train.compile_dense must be false when {name}")
