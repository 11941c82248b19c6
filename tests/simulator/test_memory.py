import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import simulator.memory as memory_module
from simulator.memory import RankMemory, misfit, peak_memory, total_bytes
from simulator.specs.cluster import DeviceKind
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Exchange, ExchangePayload, ParameterSharding, PartitionSpec, Plan, Recompute
from simulator.specs.units import GIB, Dtype
from simulator.workload import num_parameters, rank_work
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
    three_parts_on_two_hosts,
)
from tests.strategies import models, plans

CPU, GPU = (made_cluster(kind=kind) for kind in DeviceKind)


def memory_of(plan: Plan, model: ModelSpec | None = None, **graph: Any) -> tuple[dict[str, int], ...]:
    """Return bytes by category of each rank at the first step."""
    found = peak_memory(plan, graph_of(plan.partition, **graph), model or made_model(), CPU)
    return tuple(dict(rank) for rank in found)


def total_of(plan: Plan, model: ModelSpec | None = None, **graph: Any) -> int:
    """Return the bytes of the fullest rank."""
    return max(sum(rank.values()) for rank in memory_of(plan, model, **graph))


def one_part(num_nodes: int = 1000, num_edges: int = 8000, **fields: Any) -> PartitionSpec:
    return made_partition([made_part(num_nodes, [num_edges], [0], **fields)])


# --- What there is.


def test_categories_of_every_rank_add_up():
    plan = made_plan(equal_parts(4, num_nodes=4000, num_edges=16_000, halo_rows=50))
    found = peak_memory(plan, graph_of(plan.partition), made_model(), CPU)
    assert [[name for name, _ in rank] for rank in found] == [
        [
            "parameters",
            "gradients",
            "optimizer",
            "inputs",
            "activations",
            "workspace",
            "messages",
            "evaluation",
            "context",
        ]
    ] * 4
    assert [total_bytes(rank) for rank in found] == [sum(num_bytes for _, num_bytes in rank) for rank in found]
    # A full graph is evaluated in less memory than it is trained in.
    maybe = {"evaluation", "workspace"}  # what a step takes beyond the rest, here less than the messages
    assert all(num_bytes > 0 for rank in found for name, num_bytes in rank if name not in maybe)
    assert {dict(rank)["evaluation"] for rank in found} == {0}


@pytest.mark.parametrize("parts_per_batch", [3, 1])
def test_ranks_that_hold_the_same_are_looked_at_once_and_nothing_else_changes(monkeypatch, parts_per_batch):
    parts = [made_part(100 * (1 + i), [60 * (1 + i)] * 3, [7 * (i != j) for j in range(3)]) for i in range(3)]
    fields = {"graph_parallel_degree": parts_per_batch, "parts_per_batch": parts_per_batch}
    plan = made_plan(made_partition(parts), data_parallel_degree=5, **fields)
    shared = memory_of(plan)
    # Copies are equal and not the same, so that each rank is looked at.
    monkeypatch.setattr(
        memory_module,
        "rank_work",
        lambda *args, **rest: [dataclasses.replace(work) for work in rank_work(*args, **rest)],
    )
    assert memory_of(plan) == shared
    assert len({tuple(each.values()) for each in shared}) >= 3


def test_parameters_gradients_and_optimizer_by_hand():
    # 3 features to 4 columns; one layer of width 4 with 8 hidden columns; a head to 5 classes; norms and biases.
    model = made_model(width=4, num_heads=2, num_layers=1, feed_forward_width=8)
    input_parameters = 3 * 4 + 4
    layer = (4 + 4) + 4 * 12 + (4 * 4 + 4) + (4 + 4) + (4 * 8 + 8) + (8 * 4 + 4)
    head = (4 + 4) + (4 * 5 + 5)
    plan = made_plan(one_part(), num_layers=1)
    (memory,) = memory_of(plan, model, num_features=3)
    elements = input_parameters + layer + head
    # fp32 parameters and gradients, and two moments.
    assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == (
        4 * elements,
        4 * elements,
        8 * elements,
    )
    assert num_parameters(graph_of(plan.partition, num_features=3), model) == elements


@pytest.mark.parametrize("precision", Dtype)
def test_a_gpu_holds_what_a_cpu_does_and_its_context_and_what_rounding_took_from_outputs(precision):
    plan = dataclasses.replace(made_plan(one_part()), precision=precision)
    graph = graph_of(plan.partition)
    on_gpu, on_cpu = (dict(peak_memory(plan, graph, made_model(), cluster)[0]) for cluster in (GPU, CPU))
    assert on_gpu.pop("context") > on_cpu.pop("context") > 0
    # A byte for each number of 1000 rows and 16 columns, and fp32 instead of bf16 for a mean and a deviation of two
    # norms, in two layers.
    rest = 2 * (1000 * 16 + 1000 * 2 * 2 * 2) if precision is Dtype.BFLOAT16 else 0
    assert on_gpu.pop("activations") - on_cpu.pop("activations") == rest
    assert on_gpu == on_cpu


def test_compressed_gradients_take_what_they_keep_and_what_passes_beside_the_backward_pass():
    plan = made_plan(equal_parts(4, num_nodes=4000, num_edges=16_000, halo_rows=50), overlap_gradients=True)
    assert "gradient compression" not in memory_of(plan)[0]
    elements = num_parameters(graph_of(plan.partition), made_model())
    half = dataclasses.replace(plan, gradient_compression=GradientCompression(kind=CompressionKind.BF16))
    assert memory_of(half)[0]["gradient compression"] == 2 * elements
    # Behind the backward pass its activations are free again, and there are more of them.
    assert "gradient compression" not in memory_of(dataclasses.replace(half, overlap_gradients=False))[0]
    how = GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=0.1)
    top_k = dataclasses.replace(plan, gradient_compression=how, overlap_gradients=False)
    assert memory_of(top_k)[0]["gradient compression"] == 4 * elements


def test_a_step_an_evaluation_and_messages_behind_the_backward_pass_take_the_same_memory_in_turn():
    how = GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=1.0)
    partition = equal_parts(8, num_nodes=320, num_edges=1280, halo_rows=5)
    plan = made_plan(partition, data_parallel_degree=2, graph_parallel_degree=1, gradient_compression=how)
    memory = memory_of(plan)[0]
    elements = num_parameters(graph_of(partition), made_model())
    # Entries of both ranks and own ones of 8 bytes, 8 more of each while they are chosen, 4 of its magnitude.
    passing = elements * (3 * 8 + 8 + 4)
    others = sum(memory[name] for name in ("activations", "workspace", "messages", "evaluation"))
    assert memory["evaluation"] > 0
    assert passing > others
    assert memory["gradient compression"] == 4 * elements + passing - others


def test_attention_keeps_nothing_of_edges_times_width():
    # Ten times the edges cost only their indices: source, target and place in int32.
    few, many = (made_plan(one_part(1000, num_edges)) for num_edges in (8000, 80_000))
    (of_few,), (of_many,) = (memory_of(plan, made_model()) for plan in (few, many))
    assert of_many.pop("inputs") - of_few.pop("inputs") == 72_000 * 12
    assert of_many == of_few


def test_an_evaluation_of_the_whole_graph_counts_with_cluster_batches():
    # Case R22: one small part a step, but all 16 of them in an evaluation.
    plan = made_plan(equal_parts(16, num_nodes=16_000, num_edges=160_000, halo_rows=50), graph_parallel_degree=1)
    (memory,) = memory_of(plan, made_model())
    assert memory["evaluation"] > 0
    whole = made_plan(one_part(16_000, 160_000))
    assert memory["inputs"] > memory_of(whole, made_model())[0]["inputs"]


@pytest.mark.parametrize(
    ("fields", "num_batches"), [({}, 1), ({"prefetch_batches": 3}, 4), ({"keep_batches": True}, 16)]
)
def test_batches_that_are_kept_or_made_ahead_count(fields, num_batches):
    partition = equal_parts(16, num_nodes=16_000, num_edges=160_000)
    plan = made_plan(partition, graph_parallel_degree=1, **fields)
    # Of a part: 12 features of 1,000 nodes in fp32, four ids of a node, and 625 edges of three ids.
    of_batch = 1000 * (12 * 4 + 4 * 8) + 625 * 12
    of_graph = 16 * of_batch + (160_000 - 16 * 625) * 12
    assert memory_of(plan)[0]["inputs"] == num_batches * of_batch + of_graph


def test_a_sampled_batch_by_hand():
    partition = equal_parts(2, num_nodes=1000, num_edges=4000)
    model = made_model(width=4, num_heads=2, num_layers=2, feed_forward_width=8)
    plan = made_sampled_plan(
        partition, made_sampled((90, 40, 100), (40, 10, 30), seeds_per_batch=10), prefetch_batches=1
    )
    (memory,) = memory_of(plan, model)
    # Of each layer: input, norm and queries of its rows, keys and values of the same; of its targets the second input,
    # norm and output, two rows of the feed-forward, and a number a head.
    layers = [(2 * rows + 3 * targets) * 4 + targets * 2 * 8 + 3 * rows * 4 for rows, targets in ((90, 40), (40, 10))]
    heads = (40 + 10) * 2
    # The head: two rows of the width, logits, and three times the logits of 10 seeds of 5 classes.
    head = 10 * (2 * 4 + 5) + 3 * 10 * 5
    # Means and deviations of both norms.
    norms = 2 * (90 + 40) + 2 * (40 + 10)
    assert memory["activations"] == 4 * (sum(layers) + heads + head + norms)
    # Two batches: features and four ids of a row; three ids of an edge; row pointers of both layers.
    of_batch = 90 * (12 * 4 + 4 * 8) + 130 * 12 + (90 + 40 + 40 + 10) * 8
    of_graph = 1000 * (12 * 4 + 4 * 8) + 4000 * 12
    assert memory["inputs"] == 2 * of_batch + of_graph


def test_an_evaluation_takes_no_memory_for_overlap_which_it_has_not():
    plan = made_plan(equal_parts(16, num_nodes=16_000, num_edges=160_000, halo_rows=50), graph_parallel_degree=2)
    plan = dataclasses.replace(plan, exchange=(Exchange.HALO,) * 2)
    without, with_overlap = (
        memory_of(dataclasses.replace(plan, overlap_exchange=overlaps), made_model())[0] for overlaps in (False, True)
    )
    step = ("activations", "workspace", "messages", "evaluation")
    assert sum(without[name] for name in step) == sum(with_overlap[name] for name in step)


# --- What makes it larger.


@given(plan=plans, model=models, data=st.data())
def test_memory_grows_with_the_nodes_and_edges_of_a_part(plan, model, data):
    model = dataclasses.replace(model, num_layers=len(plan.exchange))
    index = data.draw(st.integers(0, plan.partition.num_parts - 1))
    part = plan.partition.parts[index]
    source = data.draw(st.integers(0, plan.partition.num_parts - 1))
    edges = list(part.edges_from)
    edges[source] += data.draw(st.integers(0, 1000))
    larger_part = dataclasses.replace(
        part, num_nodes=part.num_nodes + data.draw(st.integers(0, 1000)), edges_from=tuple(edges)
    )
    parts = [larger_part if part is other else other for other in plan.partition.parts]
    larger = dataclasses.replace(plan, partition=dataclasses.replace(plan.partition, parts=tuple(parts)))
    for less, more in zip(memory_of(plan, model), memory_of(larger, model), strict=True):
        # These count by what they take beyond the rest, which grows.
        beyond = {"evaluation", "gradient compression", "workspace"}
        assert all(more[name] >= less[name] for name in less if name not in beyond)
        assert sum(more.values()) >= sum(less.values())


@given(
    field=st.sampled_from(
        ["width", "num_layers", "feed_forward_width", "laplacian_encodings", "random_walk_encodings"]
    ),
    size=st.integers(1, 8),
)
def test_memory_grows_with_the_model(field, size):
    unit = 4 if field == "width" else 1  # heads divide the width
    small, large = (made_model(**{field: unit * (size + more)}) for more in (0, 1))
    small_total, large_total = (
        total_of(made_plan(one_part(), num_layers=model.num_layers), model) for model in (small, large)
    )
    assert large_total > small_total


@pytest.mark.parametrize(
    ("less", "more"),
    [
        ({"num_features": 10}, {"num_features": 11}),
        ({"num_classes": 5}, {"num_classes": 6}),
    ],
)
def test_memory_grows_with_the_graphs_columns(less, more):
    plan = made_plan(one_part())
    assert total_of(plan, **more) > total_of(plan, **less)


def test_memory_grows_with_sparse_entries_and_training_nodes():
    parts = [one_part(num_feature_entries=entries) for entries in (5000, 5001)]
    assert total_of(made_plan(parts[1])) > total_of(made_plan(parts[0]))
    trained = dataclasses.replace(parts[0].parts[0], num_train_nodes=999)
    assert total_of(made_plan(made_partition([trained]))) > total_of(made_plan(parts[0]))


def test_dropout_keeps_masks_and_an_edge_bias_keeps_buckets():
    plan = made_plan(one_part())
    plain, dropped, biased = (
        memory_of(plan, made_model(**fields))[0]
        for fields in ({}, {"dropout_ratio": 0.5}, {"edge_bias": EdgeBias.DEGREE})
    )
    # A byte for each of 1000 rows and 16 columns, twice in each of two layers and once after the input.
    assert dropped["activations"] - plain["activations"] == (2 * 2 + 1) * 1000 * 16
    assert biased["inputs"] > plain["inputs"]


@given(rows=st.integers(1, 10**5), times=st.integers(2, 5))
def test_activations_are_linear_in_the_graph(rows, times):
    # Case R16: no term grows with the square of the nodes.
    once, often = (
        memory_of(made_plan(one_part(count * rows, count * 8 * rows)))[0]["activations"] for count in (1, times)
    )
    # Half of the nodes are trained on, rounded down.
    assert often == pytest.approx(times * once, rel=1e-2, abs=100 * times)


# --- What makes it smaller.


@given(recomputed=st.lists(st.booleans(), min_size=4, max_size=4))
def test_recomputing_lowers_activations_layer_by_layer(recomputed):
    model = made_model(num_layers=4)
    keep = made_plan(one_part(), num_layers=4)
    recompute = tuple(Recompute.LAYER if again else Recompute.NONE for again in recomputed)
    again = dataclasses.replace(keep, recompute=recompute)
    kept, less = memory_of(keep, model)[0], memory_of(again, model)[0]
    saved = kept["activations"] - less["activations"]
    assert saved == sum(recomputed) * (kept["activations"] - memory_of(one_recomputed(keep), model)[0]["activations"])
    # One layer's activations come back while it is computed again, so the total falls from the second layer on.
    total_saved = sum(kept.values()) - sum(less.values())
    assert total_saved > 0 or sum(recomputed) < 2


def one_recomputed(plan: Plan) -> Plan:
    none = (Recompute.NONE,) * (len(plan.exchange) - 1)
    return dataclasses.replace(plan, recompute=(Recompute.LAYER, *none))


def test_bf16_lowers_activations_but_no_parameters():
    plan = made_plan(one_part())
    fp32, bf16 = memory_of(plan)[0], memory_of(dataclasses.replace(plan, precision=Dtype.BFLOAT16))[0]
    assert bf16["activations"] < fp32["activations"]
    assert bf16["inputs"] < fp32["inputs"]
    assert bf16["parameters"] == fp32["parameters"]


def test_ranks_share_a_graph_and_replicas_share_its_batches():
    whole, shared = (memory_of(made_plan(equal_parts(count, num_nodes=4000, num_edges=16_000)))[0] for count in (1, 4))
    assert shared["activations"] < 0.3 * whole["activations"]
    batches = made_plan(
        equal_parts(8, num_nodes=4000, num_edges=16_000), data_parallel_degree=2, graph_parallel_degree=1
    )
    assert memory_of(batches)[0]["activations"] < shared["activations"]


@given(plan=plans, model=models)
def test_gathering_all_rows_needs_no_less_than_the_halo(plan, model):
    model = dataclasses.replace(model, num_layers=len(plan.exchange))
    halo, gathered = (
        dataclasses.replace(plan, exchange=(exchange,) * len(plan.exchange))
        for exchange in (Exchange.HALO, Exchange.ALL_GATHER)
    )
    for less, more, part in zip(memory_of(halo, model), memory_of(gathered, model), range(plan.num_ranks), strict=True):
        # The halo is no larger than the other parts, as in any real cut.
        if all(
            rows <= owner.num_nodes
            for other in plan.partition.parts
            for rows, owner in zip(other.halo_rows_from, plan.partition.parts, strict=True)
        ):
            assert sum(more.values()) >= sum(less.values()), part


# --- Steps and the verdict.


def test_the_peak_is_that_of_the_largest_batch_among_the_steps():
    parts = [made_part(nodes, [10] * 3, [0] * 3) for nodes in (100, 5000, 200)]
    plan = made_plan(made_partition(parts), graph_parallel_degree=1)
    graph, model = graph_of(plan.partition), made_model()
    by_step = [total_bytes(peak_memory(plan, graph, model, CPU, steps=(step,))[0]) for step in range(3)]
    assert len(set(by_step)) == 3
    assert total_bytes(peak_memory(plan, graph, model, CPU, steps=range(3))[0]) == max(by_step)


def test_the_seed_decides_which_batch_comes_first():
    parts = [made_part(nodes, [10] * 3, [0] * 3) for nodes in (100, 5000, 200)]
    plan = made_plan(made_partition(parts), graph_parallel_degree=1)
    totals = {peak_memory(plan, graph_of(plan.partition), made_model(), CPU, seed=seed) for seed in range(20)}
    assert len(totals) == 3


@pytest.mark.parametrize(
    ("have_gib", "reason"),
    [
        (8, ""),
        (7, ""),
        (6, "rank 1 needs 7 GiB of 6 GiB, most of it activations 4 GiB and workspace 2 GiB"),
    ],
)
def test_a_plan_that_does_not_fit_is_told_in_a_sentence(have_gib, reason):
    small: RankMemory = (("parameters", GIB), ("activations", GIB))
    large: RankMemory = (("parameters", GIB), ("activations", 4 * GIB), ("workspace", 2 * GIB))
    assert misfit((small, large), made_cluster(memory_bytes=have_gib * GIB)) == reason


# --- What exchanges hold.


@pytest.mark.parametrize(
    ("fields", "messages"),
    [
        # Each of two parts sends 40 rows of keys and values, 2 x 16 columns in fp32.
        ({}, 40 * 32 * 4),
        ({"exchange_payload": ExchangePayload.ROWS}, 40 * 16 * 4),
        # Ten rows at a time; all of them while they are on their way beside attention.
        ({"exchange_chunk_bytes": 10 * 32 * 4}, 10 * 32 * 4),
        ({"exchange_chunk_bytes": 10 * 32 * 4, "overlap_exchange": True}, 40 * 32 * 4),
        # The rows before they are narrowed, and 40 that came in bf16.
        ({"exchange_precision": Dtype.BFLOAT16}, 40 * 32 * 4 + 40 * 32 * 2),
        # All rows of the larger part, padded; queries, keys and values of own rows.
        ({"exchange": (Exchange.ALL_GATHER,) * 2}, 500 * 32 * 4),
        ({"exchange": (Exchange.HEAD_ALL_TO_ALL,) * 2}, 500 * 48 * 4),
    ],
    ids=str,
)
def test_messages_by_hand(fields, messages):
    plan = made_plan(equal_parts(2, num_nodes=1000, num_edges=8000, halo_rows=40), **fields)
    assert {memory["messages"] for memory in memory_of(plan)} == {messages}


def test_heads_hold_the_edges_of_the_whole_batch_and_attention_of_their_own():
    cut = equal_parts(2, num_nodes=1000, num_edges=8000, halo_rows=40)
    halo, heads = (
        memory_of(made_plan(cut, exchange=(exchange,) * 2))[0] for exchange in (Exchange.HALO, Exchange.HEAD_ALL_TO_ALL)
    )
    # 4000 edges more, of three numbers in int32.
    assert heads["inputs"] - halo["inputs"] == 4000 * 12
    # Of 1000 rows instead of 500 and 540, half the columns: queries, keys, values, outputs and log-sum-exps.
    # A halo also keeps own keys and values beside the queries.
    per_layer = 1000 * 3 * 8 * 4 + 1000 * 2 * 4 + 1000 * 8 * 4 - ((500 + 2 * 540 + 2 * 500) * 16 * 4 + 500 * 4 * 4)
    assert heads["activations"] - halo["activations"] == 2 * per_layer


def test_an_overlapped_exchange_keeps_own_keys_and_values_once_and_its_edges_in_two_sets_too():
    plan = made_plan(equal_parts(2, num_nodes=1000, num_edges=8000, halo_rows=40))
    (before, _), (after, _) = (
        memory_of(dataclasses.replace(plan, overlap_exchange=overlaps)) for overlaps in (False, True)
    )
    # 4000 edges, each in one of two sets: its source in int32.
    assert after.pop("inputs") - before.pop("inputs") == 4000 * 4
    # Of two layers: keys and values of 500 rows are not kept beside queries too.
    assert before.pop("activations") - after.pop("activations") == 2 * 2 * 500 * 16 * 4
    assert after == before


def test_an_overlapped_exchange_of_16_bits_keeps_the_unrounded_output_on_cpus_and_bytes_on_gpus():
    plan = made_plan(equal_parts(2, num_nodes=1000, num_edges=8000, halo_rows=40), precision=Dtype.BFLOAT16)
    for kind, more in ((DeviceKind.CPU, 4), (DeviceKind.CUDA, 0)):
        before, after = (
            dict(
                peak_memory(
                    dataclasses.replace(plan, overlap_exchange=overlaps),
                    graph_of(plan.partition),
                    made_model(),
                    made_cluster(kind=kind),
                )[0]
            )
            for overlaps in (False, True)
        )
        # Of two layers; what one in turn keeps of own keys and values beside queries is gone, and weights in 16 bits.
        assert after["activations"] - before["activations"] == 2 * (500 * 16 * (more - 2 * 2) - 3 * 16 * 16 * 2)


def test_an_overlapped_exchange_of_rows_keeps_own_rows_where_the_norm_wrote_them():
    plan = made_plan(
        equal_parts(2, num_nodes=1000, num_edges=8000, halo_rows=40), exchange_payload=ExchangePayload.ROWS
    )
    (before, _), (after, _) = (
        memory_of(dataclasses.replace(plan, overlap_exchange=overlaps)) for overlaps in (False, True)
    )
    # Of 500 own and 40 other rows of 16 numbers on two layers, the others alone.
    assert before["activations"] - after["activations"] == 2 * 500 * 16 * 4
    gathered = dataclasses.replace(plan, exchange=(Exchange.ALL_GATHER,) * 2)
    (before, _), (after, _) = (
        memory_of(dataclasses.replace(gathered, overlap_exchange=overlaps)) for overlaps in (False, True)
    )
    assert before["activations"] == after["activations"]


def test_queries_keep_own_keys_and_values_beside_those_that_attention_reads():
    # One product makes all three side by side. Where rows travel keys and values have a product of their own.
    cut = equal_parts(2, num_nodes=1000, num_edges=8000, halo_rows=40)
    keys, rows = (memory_of(made_plan(cut, exchange_payload=payload))[0] for payload in ExchangePayload)
    per_layer = 500 * 2 * 16 * 4 - (500 + 40) * 16 * 4
    assert keys["activations"] - rows["activations"] == 2 * per_layer


def test_a_hierarchical_exchange_keeps_what_came_first_until_it_was_passed_on():
    # Rank 0 sends 3 rows; then 1 is passed on, beside the 4 that came and its 10 own rows, unless these overlap: then
    # what comes stays where it is. Rank 2 has no ranks beside it: it sends 4.
    cut, row_bytes = three_parts_on_two_hosts(), 32 * 4
    plan = made_plan(cut, exchange=(Exchange.HIERARCHICAL_HALO,) * 2)
    assert [memory["messages"] for memory in memory_of(plan)] == [15 * row_bytes, 25 * row_bytes, 4 * row_bytes]
    beside = dataclasses.replace(plan, overlap_exchange=True)
    assert [memory["messages"] for memory in memory_of(beside)] == [3 * row_bytes, 4 * row_bytes, 4 * row_bytes]
    flat = dataclasses.replace(plan, exchange=(Exchange.HALO,) * 2)
    for name in ("activations", "workspace"):
        assert [memory[name] for memory in memory_of(plan)] == [memory[name] for memory in memory_of(flat)]


def test_ranks_that_share_heads_and_columns_hold_their_share_of_parameters_and_activations():
    model = made_model(width=4, num_heads=2, num_layers=1, feed_forward_width=8)
    plan, shared = (made_plan(one_part(), num_layers=1, tensor_parallel_degree=degree) for degree in (1, 2))
    (alone,), (first, second) = (memory_of(each, model, num_features=3) for each in (plan, shared))
    assert first == second
    # Of three weights and a bias half, of the fourth weight, whose bias is whole, too.
    split = 4 * 12 + 4 * 4 + (4 * 8 + 8) + 8 * 4
    assert alone["parameters"] - first["parameters"] == 4 * split // 2
    assert alone["optimizer"] - first["optimizer"] == 8 * split // 2
    # Of 1000 rows in fp32: half of the output of attention, of queries, keys and values, of the feed-forward layer's
    # 8 columns before and behind its activation; and of a number for each of both heads.
    assert alone["activations"] - first["activations"] == 1000 * 4 * (2 + 3 * 2 + 2 * 4 + 1)


def test_shared_out_parameters_take_a_share_and_what_is_whole_for_a_while_by_hand():
    model = made_model(width=4, num_heads=2, num_layers=3, feed_forward_width=8)
    graph_rows = equal_parts(2, num_nodes=2000, num_edges=8000, halo_rows=20)
    kinds = (ParameterSharding.NONE, ParameterSharding.ZERO2, ParameterSharding.ZERO3)
    none, zero2, zero3 = (
        memory_of(made_plan(graph_rows, num_layers=3, shard_parameters=kind), model, num_features=3)[0]
        for kind in kinds
    )
    layer = (4 + 4) + 4 * 12 + (4 * 4 + 4) + (4 + 4) + (4 * 8 + 8) + (8 * 4 + 4)
    # Five classes are six when each of two ranks sends as much.
    rest, padded_rest = (3 * 4 + 4) + (4 + 4) + (4 * 5 + 5), (4 * 4) + (4 + 4) + (4 * 6 + 6)
    assert none["parameters"] == 4 * (3 * layer + rest)
    share = 3 * layer // 2 + padded_rest // 2
    assert zero2["optimizer"] == zero3["optimizer"] == 8 * share
    assert zero2["parameters"] == 4 * (share + padded_rest + 3 * layer)
    assert zero3["parameters"] == 4 * (share + padded_rest + 2 * layer)
    assert zero2["gradients"] == zero3["gradients"] == 4 * (share + padded_rest + 2 * layer)
