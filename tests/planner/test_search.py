import dataclasses
import itertools
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner.search
from planner import find_plan
from planner.explain import description
from planner.neighbourhoods import expected_batches
from planner.objective import epoch_seconds
from planner.partition import partition_graph
from simulator.constraints import violations
from simulator.errors import CalibrationError, NoFeasiblePlanError
from simulator.memory import misfit, peak_memory, total_bytes
from simulator.readers.graphs import Graph
from simulator.readers.orders import read_order
from simulator.readers.partitions import read_partition
from simulator.simulation import simulate
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec, DeviceKind, LinkSpec
from simulator.specs.decision import PlanFile
from simulator.specs.document import content_sha256
from simulator.specs.graph import GraphFile, GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.order import NodeOrder, OrderSpec
from simulator.specs.plan import Exchange, ExchangePayload, Offload, Plan, Recompute
from simulator.specs.program import TaskKind
from simulator.specs.search import BatchKind, SearchSpec
from simulator.specs.topology import LinkFault, Straggler
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from tests.made import (
    equal_parts,
    made_calibration,
    made_cluster,
    made_collective_seconds,
    made_model,
    made_plan,
    made_seconds,
)
from tests.small_graphs import Edges, graph_of

NUM_NODES = 400
TRAIN = TrainSpec(num_steps=10, learning_rate=0.01, seed=3)
MODEL = made_model()
FAST_TALK = made_calibration(
    # So much work that two ranks are faster than one, four than two.
    compute_seconds=lambda *law: 1000 * made_seconds(*law),
)
SLOW_TALK = made_calibration(collective_seconds=lambda *law: 1000 * made_collective_seconds(*law))
PLAIN: dict[str, Any] = {
    "exchanges": (Exchange.HALO, Exchange.ALL_GATHER),
    "exchange_overlaps": (False,),
    "exchange_payloads": (ExchangePayload.KEYS_AND_VALUES,),
}
# Layers kept or computed again as a whole.
KEPT_OR_NOT: dict[str, Any] = {**PLAIN, "recomputes": (Recompute.NONE, Recompute.LAYER)}
ALL_CHOICES = SearchSpec(
    batches=tuple(BatchKind),
    recomputes=tuple(Recompute),
    precisions=tuple(Dtype),
    parts_per_replica=2,
    parts_per_batch=2,
    fan_outs=(2, 3),
    seeds_per_batch=30,
    **PLAIN,
)


def made_graph(num_chords: int = 800) -> tuple[GraphSpec, Graph]:
    """Return a ring of nodes with chords, a third of which are trained on."""
    rng = np.random.default_rng(0)
    ring: Edges = [(node, (node + 1) % NUM_NODES) for node in range(NUM_NODES)]
    chords: Edges = [(int(a), int(b)) for a, b in rng.integers(0, NUM_NODES, (num_chords, 2))]
    edges = [*ring, *chords]
    both = [*edges, *((target, source) for source, target in edges)]
    train_mask_N = np.arange(NUM_NODES) % 3 == 0
    graph = graph_of(
        both,
        NUM_NODES,
        features=np.ones((NUM_NODES, 12), dtype=np.float32),
        labels_N=np.arange(NUM_NODES) % 5,
        train_mask_N=train_mask_N,
    )
    spec = GraphSpec(
        source=GraphFile(path="made.npz"),
        sha256="0" * 64,
        num_nodes=NUM_NODES,
        num_edges=graph.num_edges,
        num_features=12,
        num_feature_entries=0,
        num_classes=5,
        num_train_nodes=int(train_mask_N.sum()),
        num_val_nodes=0,
        num_test_nodes=0,
        in_degree_quantiles=(0.0,) * 7,
    )
    return spec, graph


SPEC, GRAPH = made_graph()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of plans, where each cut is made once."""
    return tmp_path_factory.mktemp("plans")


def found(
    folder: Path,
    *,
    cluster: ClusterSpec | None = None,
    model: ModelSpec = MODEL,
    search: SearchSpec | None = None,
    calibration: Calibration = FAST_TALK,
    data: tuple[GraphSpec, Graph] = (SPEC, GRAPH),
) -> PlanFile:
    return find_plan(
        *data,
        model,
        cluster or made_cluster(),
        TRAIN,
        search or SearchSpec(),
        calibration,
        folder=folder,
        on_progress=lambda _: None,
    )


# --- Against brute force.


def all_plans(cluster: ClusterSpec, search: SearchSpec, folder: Path, num_layers: int) -> list[Plan]:
    """Return every plan that a search may propose, counted out from what its fields mean."""
    plans = []
    for num_ranks in (1, 2, 4):
        whole = {"parts_per_batch": num_ranks}
        shapes: list[tuple[int, int, int, dict[str, Any]]] = []
        if BatchKind.FULL_GRAPH in search.batches:
            shapes.append((1, num_ranks, num_ranks, whole))
        num_parts = num_ranks * search.parts_per_replica
        for group in (1, 2, 4):
            several = {"parts_per_batch": group if group > 1 else search.parts_per_batch}
            # A batch of all parts would be the full graph.
            is_whole = several["parts_per_batch"] == num_parts
            if BatchKind.CLUSTERS in search.batches and num_ranks % group == 0 and not is_whole:
                shapes.append((num_ranks // group, group, num_parts, several))
                if several["parts_per_batch"] == 1:
                    shapes.append((num_ranks, 1, num_parts, several | {"keep_batches": True}))
            if BatchKind.ISOLATED_CLUSTERS in search.batches and group == 1:
                shapes.append((num_ranks, 1, num_parts, several | {"between_edges": False}))
        if BatchKind.SAMPLED in search.batches:
            sampled = expected_batches(
                GRAPH, search.fan_outs, seeds_per_batch=search.seeds_per_batch, data_parallel_degree=num_ranks
            )
            shapes.append((num_ranks, 1, num_ranks, whole | {"sampled": sampled}))
        for (replicas, group, num_parts, fields), recompute, precision in itertools.product(
            shapes, search.recomputes, search.precisions
        ):
            plain = ExchangePayload.KEYS_AND_VALUES
            ways = itertools.product(search.exchanges, search.exchange_overlaps, search.exchange_payloads)
            for exchange, overlaps, payload in ways if group > 1 else [(Exchange.NONE, False, plain)]:
                if exchange is Exchange.HEAD_ALL_TO_ALL and (overlaps or payload is not plain):
                    continue
                if exchange is Exchange.HIERARCHICAL_HALO and cluster.num_hosts == 1:
                    continue
                plans.append(
                    Plan(
                        data_parallel_degree=replicas,
                        graph_parallel_degree=group,
                        partition=partition_graph(GRAPH, num_parts, seed=search.seed, folder=folder),
                        exchange=(exchange,) * num_layers,
                        recompute=(recompute,) * num_layers,
                        precision=precision,
                        overlap_exchange=overlaps,
                        exchange_payload=payload,
                        **fields,
                    )
                )
    return [plan for plan in plans if plan.num_ranks <= cluster.num_devices]


def epoch_of(plan: Plan, model: ModelSpec, cluster: ClusterSpec, calibration: Calibration) -> float:
    """Return the seconds of one epoch, each of its steps simulated."""
    return sum(
        simulate(plan, SPEC, model, cluster, calibration, step=step, seed=TRAIN.seed).median_step_seconds
        for step in range(plan.steps_per_epoch)
    )


@pytest.mark.parametrize(
    ("calibration", "devices", "memory_bytes", "search", "num_ranks"),
    [
        # Where talking is slow one rank is best; where it is fast, all are.
        (SLOW_TALK, 4, 2**40, ALL_CHOICES, 1),
        (FAST_TALK, 4, 2**40, ALL_CHOICES, 4),
        (FAST_TALK, 2, 2**40, ALL_CHOICES, 2),
        (FAST_TALK, 4, 2**40, SearchSpec(batches=(BatchKind.FULL_GRAPH,)), 4),
        # Memory for a third of what the full graph needs on one rank beside the process itself: layers recomputed on 4.
        (SLOW_TALK, 4, 500_330_000, SearchSpec(), 4),
    ],
)
def test_the_result_is_the_best_of_all_plans(folder, calibration, devices, memory_bytes, search, num_ranks):
    cluster = made_cluster(devices_per_host=devices, memory_bytes=memory_bytes)
    file = found(folder, cluster=cluster, search=search, calibration=calibration)
    epochs: dict[Plan, float] = {}
    for plan in all_plans(cluster, search, folder, MODEL.num_layers):
        steps = range(plan.steps_per_epoch)
        memory = peak_memory(plan, SPEC, MODEL, cluster, steps=steps, seed=TRAIN.seed)
        kept = dataclasses.replace(plan, recompute=(Recompute.NONE,) * MODEL.num_layers)
        if plan.recompute[0] not in (Recompute.NONE, Recompute.LAYER) and kept in epochs:
            assert epoch_of(plan, MODEL, cluster, calibration) >= epochs[kept]
            continue  # such a plan need not be tried
        if not violations(plan, SPEC, MODEL, cluster) and not misfit(memory, cluster):
            epochs[plan] = epoch_of(plan, MODEL, cluster, calibration)
    assert file.plan in epochs
    assert file.prediction.epoch_seconds == pytest.approx(min(epochs.values()))
    assert epochs[file.plan] == pytest.approx(min(epochs.values()))
    assert file.plan.num_ranks == num_ranks
    # Runners-up are the next best ones, in order.
    others = sorted(epochs.values())[1 : 1 + len(file.ranking)]
    assert [other.epoch_seconds for other in file.ranking] == pytest.approx(others)


def test_parts_of_layers_are_computed_again_where_memory_binds(folder):
    plain = SearchSpec(num_ranks=(1,), batches=(BatchKind.FULL_GRAPH,))
    whole = found(folder, search=plain)
    assert whole.plan.recompute == (Recompute.NONE,) * 2

    def needs(recompute: Recompute) -> int:
        plan = dataclasses.replace(whole.plan, recompute=(recompute,) * 2)
        return max(map(total_bytes, peak_memory(plan, SPEC, MODEL, whole.cluster)))

    for kind in (Recompute.SELECTIVE, Recompute.DENSE):
        file = found(folder, search=plain, cluster=made_cluster(devices_per_host=4, memory_bytes=needs(kind)))
        assert file.plan.recompute == (kind,) * 2
        assert f"{kind} recompute in 2 of 2 layers" in description(file.plan)


def test_activations_and_the_optimizer_go_to_the_host_where_a_search_says_so_and_memory_binds(folder):
    search = SearchSpec(
        num_ranks=(1,),
        batches=(BatchKind.FULL_GRAPH,),
        recomputes=(Recompute.NONE,),
        offloads=tuple(Offload),
        offload_optimizers=(False, True),
    )
    roomy = found(folder, search=search)
    assert (roomy.plan.offload, roomy.plan.offload_optimizer) == ((), False)
    gpu = made_cluster(kind=DeviceKind.CUDA)
    optimizer = dict(peak_memory(roomy.plan, SPEC, MODEL, gpu)[0])["optimizer"]
    need = max(map(total_bytes, peak_memory(roomy.plan, SPEC, MODEL, gpu)))
    tight = made_cluster(kind=DeviceKind.CUDA, memory_bytes=need - optimizer // 2)
    file = found(folder, search=search, cluster=tight, calibration=FAST_TALK)
    assert file.plan.offload_optimizer
    assert "optimizer on the host" in description(file.plan)


def test_the_result_is_legal_and_fits(folder):
    file = found(folder, search=ALL_CHOICES)
    assert violations(file.plan, SPEC, MODEL, file.cluster) == []
    assert misfit(file.prediction.peak_memory_bytes, file.cluster) == ""
    # Its partition can be read again.
    part_N = read_partition(file.plan.partition, folder=folder, num_nodes=NUM_NODES)
    assert np.bincount(part_N).tolist() == [part.num_nodes for part in file.plan.partition.parts]


def test_the_exchange_follows_the_halo(folder):
    # Case R12: each of four ranks needs the keys and values of its halo, H rows of two widths; an exchange of heads
    # sends queries, keys, values and outputs, 4 N / p rows of a width, whatever the graph.
    by_bytes = made_calibration(
        compute_seconds=lambda *_: 1e-9, collective_seconds=lambda kind, ranks, num_bytes: 1e-9 + 1e-6 * num_bytes
    )
    search = SearchSpec(num_ranks=(4,), exchange_payloads=(ExchangePayload.KEYS_AND_VALUES,))
    for num_chords, expected in ((0, Exchange.HALO), (8000, Exchange.HEAD_ALL_TO_ALL)):
        file = found(folder, search=search, calibration=by_bytes, data=made_graph(num_chords))
        halo_rows = max(part.num_halo_rows for part in file.plan.partition.parts)
        assert file.plan.exchange == (expected,) * 2
        assert (2 * halo_rows > 4 * NUM_NODES / 4) == (expected is Exchange.HEAD_ALL_TO_ALL)


def test_rows_cross_between_hosts_once_where_their_link_is_slow(folder):
    slow = LinkSpec(latency_seconds=1e-6, bandwidth_bytes_per_second=1e4)
    cluster = made_cluster(num_hosts=2, devices_per_host=2, host_link=slow)
    search = SearchSpec(
        num_ranks=(4,),
        exchanges=(Exchange.HALO, Exchange.HIERARCHICAL_HALO),
        exchange_payloads=(ExchangePayload.KEYS_AND_VALUES,),
    )
    file = found(folder, search=search, cluster=cluster)
    assert file.plan.exchange == (Exchange.HIERARCHICAL_HALO,) * 2
    hosts = file.plan.partition.hosts
    assert hosts is not None
    assert hosts.ranks_per_host == 2
    # On one host, and where only flat exchanges are asked for, nobody counts.
    assert found(folder, search=search).plan.partition.hosts is None
    flat = dataclasses.replace(search, exchanges=(Exchange.HALO,))
    assert found(folder, search=flat, cluster=cluster).plan.partition.hosts is None


def test_parts_with_most_work_get_several_ranks_where_that_was_asked_for(folder):
    search = SearchSpec(
        num_ranks=(4,),
        exchanges=(Exchange.HALO,),
        exchange_overlaps=(False,),
        exchange_payloads=(ExchangePayload.KEYS_AND_VALUES,),
        recomputes=(Recompute.NONE,),
        shared_part_counts=(2, 3),
    )
    file = found(folder, search=search, cluster=made_cluster(devices_per_host=4))
    told = [description(file.plan), *(other.description for other in file.ranking)]
    assert {text.partition("(")[2].partition(")")[0] for text in told} == {
        "halo",
        "halo, parts on 2+1+1 ranks",
        "halo, parts on 2+2 ranks",
    }


# --- What else the file says.


def test_a_straggler_or_a_lost_link_leaves_the_work_to_fewer_ranks(folder):
    cluster = made_cluster(devices_per_host=4)
    search = SearchSpec(batches=(BatchKind.FULL_GRAPH,))
    assert found(folder, cluster=cluster, search=search, calibration=FAST_TALK).plan.num_ranks == 4
    slow = dataclasses.replace(cluster, stragglers=(Straggler(device=3, slowdown=50),))
    assert found(folder, cluster=slow, search=search, calibration=FAST_TALK).plan.num_ranks < 4
    fault = LinkFault(ends=("device3", "host"), bandwidth_ratio=0)
    file = found(
        folder, cluster=dataclasses.replace(cluster, link_faults=(fault,)), search=search, calibration=FAST_TALK
    )
    assert file.plan.num_ranks < 4
    assert any("link_faults leave no way from rank 0 to rank 3" in reason for reason, _ in file.rejected)


def test_the_file_holds_all_inputs_and_an_interval(folder):
    cluster = made_cluster(devices_per_host=2)
    file = found(folder, cluster=cluster)
    assert (file.graph, file.model, file.cluster, file.train) == (SPEC, MODEL, cluster, TRAIN)
    assert file.calibration_sha256 == content_sha256(FAST_TALK)
    prediction = file.prediction
    assert 0 < prediction.p10_step_seconds < prediction.p50_step_seconds < prediction.p90_step_seconds
    # The full graph is one step an epoch.
    step = simulate(file.plan, SPEC, MODEL, cluster, FAST_TALK, seed=TRAIN.seed)
    assert prediction.epoch_seconds == pytest.approx(step.median_step_seconds)
    assert len(prediction.peak_memory_bytes) == file.plan.num_ranks


def test_runners_up_are_described_and_told_why_they_lost(folder):
    file = found(folder, search=SearchSpec(num_ranks=(1, 2), **PLAIN))
    told = {other.description for other in file.ranking}
    assert description(file.plan) == "2 ranks: full graph on 2 (halo), fp32"
    assert told == {
        "1 rank: full graph, fp32",
        "1 rank: full graph, fp32, 2 of 2 layers recomputed",
        "2 ranks: full graph on 2 (halo), fp32, 2 of 2 layers recomputed",
        "2 ranks: full graph on 2 (all_gather), fp32",
        "2 ranks: full graph on 2 (all_gather), fp32, 2 of 2 layers recomputed",
    }
    alone = next(other for other in file.ranking if other.description == "1 rank: full graph, fp32")
    assert alone.reason.endswith("more computing on the mean rank in an epoch")
    assert all(other.epoch_seconds >= file.prediction.epoch_seconds for other in file.ranking)


def test_a_search_is_repeatable(folder):
    assert found(folder, search=ALL_CHOICES) == found(folder, search=ALL_CHOICES)


def test_equal_predictions_go_to_the_plan_on_fewer_ranks(folder, monkeypatch):
    monkeypatch.setattr(planner.search, "epoch_seconds", lambda *_: 1.0)
    file = found(folder, search=SearchSpec(batches=(BatchKind.CLUSTERS, BatchKind.FULL_GRAPH)))
    assert file.plan.num_ranks == 1
    assert file.ranking[0].epoch_seconds == 1.0


# --- The order of the nodes.


def test_the_order_is_chosen_for_the_best_plan_and_the_device_and_changes_the_prediction(folder):
    cluster = made_cluster(devices_per_host=1)
    # Keys and values of 20 of the 400 nodes fit, which the ring of nodes uses best as it is.
    small = dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, cache_bytes=20 * 2 * 16 * 4))
    # Attention whose rows all come out of the cache takes half the time.
    near = tuple(
        dataclasses.replace(
            sample, seconds=sample.seconds / 2, low_seconds=sample.low_seconds / 2, beyond_cache_ratio=0.0
        )
        for sample in FAST_TALK.computes
        if sample.kind is TaskKind.ATTENTION
    )
    calibration = dataclasses.replace(FAST_TALK, computes=(*FAST_TALK.computes, *near))
    unknown, natural = (found(folder, cluster=each, calibration=calibration) for each in (cluster, small))
    assert unknown.plan.beyond_cache_ratio is None
    assert natural.plan.beyond_cache_ratio == natural.orders[0].beyond_cache_ratio < 1
    assert natural.prediction.epoch_seconds < unknown.prediction.epoch_seconds
    assert [tried.kind for tried in unknown.orders] == [NodeOrder.NATURAL]
    assert [tried.kind for tried in natural.orders] == list(NodeOrder)
    assert unknown.plan.order == natural.plan.order == OrderSpec()
    others = (NodeOrder.DEGREE, NodeOrder.REVERSE_CUTHILL_MCKEE)
    file = found(folder, cluster=small, search=SearchSpec(orders=others), calibration=calibration)
    assert file.orders == natural.orders[:3]
    chosen = min(file.orders[1:], key=lambda tried: tried.relative_seconds)
    assert file.plan == dataclasses.replace(
        natural.plan, order=file.plan.order, beyond_cache_ratio=chosen.beyond_cache_ratio
    )
    assert file.plan.order.kind is chosen.kind
    assert natural.plan.beyond_cache_ratio < chosen.beyond_cache_ratio
    assert natural.prediction.p50_step_seconds < file.prediction.p50_step_seconds
    order_N = read_order(file.plan.order, folder=folder, num_nodes=NUM_NODES)
    assert order_N is not None
    assert sorted(order_N.tolist()) == [*range(NUM_NODES)]


# --- What was rejected.


def test_candidates_that_are_illegal_are_counted_by_reason(folder):
    file = found(folder, cluster=made_cluster(devices_per_host=2), search=SearchSpec(num_ranks=(1, 4), **KEPT_OR_NOT))
    # Two exchanges and two choices of recomputation on four ranks.
    reason = (
        "plan.num_ranks=4 must not exceed cluster.num_devices=2: lower data_parallel_degree, graph_parallel_degree, "
        "tensor_parallel_degree or pipeline_parallel_degree"
    )
    assert file.rejected == ((reason, 4),)


def test_candidates_that_do_not_fit_are_counted_by_reason(folder):
    cluster = made_cluster(devices_per_host=4, memory_bytes=500_330_000)
    file = found(folder, cluster=cluster, search=SearchSpec(num_ranks=(1, 4), **KEPT_OR_NOT), calibration=SLOW_TALK)
    assert file.plan.num_ranks == 4
    # The full graph on one rank, its layers kept or recomputed, and on four with either exchange and layers kept.
    reason = "does not fit into a device's memory, most of which context would take"
    assert file.rejected == ((reason, 4),)


def test_candidates_that_cannot_win_are_not_simulated(folder):
    told: list[str] = []
    file = find_plan(
        SPEC,
        GRAPH,
        MODEL,
        made_cluster(devices_per_host=2),
        TRAIN,
        SearchSpec(**PLAIN),
        # Latencies of a second: no plan on two ranks comes near the one on one.
        made_calibration(collective_seconds=lambda *_: 1.0),
        folder=folder,
        on_progress=told.append,
    )
    reason = "cannot come within twice the best epoch: its busiest rank alone computes longer"
    assert file.rejected == ((reason, 4),)
    assert [line for line in told if line.startswith("simulating")] == [
        "simulating 1 rank: full graph, fp32",
        "simulating 1 rank: full graph, fp32, 2 of 2 layers recomputed",
    ]


def test_no_plan_fits_into_next_to_no_memory(folder):
    cluster = made_cluster(devices_per_host=2, memory_bytes=10_000)
    with pytest.raises(NoFeasiblePlanError) as error:
        found(folder, cluster=cluster, search=SearchSpec(num_ranks=(1, 2, 64), **KEPT_OR_NOT))
    told = str(error.value)
    assert told.startswith("no plan is legal and fits on made cluster: ")
    # The commonest reasons first, three of them at most.
    reasons = told.removeprefix("no plan is legal and fits on made cluster: ").split("; ")
    assert reasons[0] == "does not fit into a device's memory, most of which context would take (6)"
    assert reasons[1].startswith("plan.num_ranks=64 must not exceed cluster.num_devices=2")
    assert told.split("the nearest to fitting: ")[1].startswith(
        "rank 0 needs 477.2 MiB of 9.766 KiB, most of it context"
    )


def test_a_calibration_of_another_device_is_refused(folder):
    calibration = dataclasses.replace(FAST_TALK, device_name="other")
    with pytest.raises(CalibrationError, match='the calibration is of "other"'):
        found(folder, calibration=calibration)


# --- Case P1: every field of a search has an effect on its result.


@pytest.mark.parametrize(
    ("fields", "effect"),
    [
        ({"num_ranks": (2,)}, lambda plan: plan.num_ranks == 2),
        ({"batches": (BatchKind.CLUSTERS,)}, lambda plan: not plan.is_full_graph),
        ({"exchanges": (Exchange.ALL_GATHER,)}, lambda plan: plan.exchange == (Exchange.ALL_GATHER,) * 2),
        ({"recomputes": (Recompute.LAYER,)}, lambda plan: plan.recompute == (Recompute.LAYER,) * 2),
        ({"precisions": (Dtype.BFLOAT16,)}, lambda plan: plan.precision is Dtype.BFLOAT16),
        (
            {"batches": (BatchKind.CLUSTERS,), "parts_per_replica": 3},
            lambda plan: plan.partition.num_parts == 3 * plan.num_ranks,
        ),
        (
            {"batches": (BatchKind.ISOLATED_CLUSTERS,), "parts_per_batch": 2},
            lambda plan: (plan.between_edges, plan.parts_per_batch) == (False, 2),
        ),
        (
            {"batches": (BatchKind.SAMPLED,), "fan_outs": (4, 3), "seeds_per_batch": 20},
            lambda plan: plan.sampled and (plan.sampled.fan_outs, plan.sampled.seeds_per_batch) == ((4, 3), 20),
        ),
        ({"orders": (NodeOrder.DEGREE,)}, lambda plan: plan.order.kind is NodeOrder.DEGREE),
        ({"seed": 7}, lambda plan: plan.partition.seed == 7),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "effect",
)
def test_every_field_of_a_search_has_an_effect(folder, fields: dict[str, Any], effect):
    assert not effect(found(folder).plan)
    assert effect(found(folder, search=SearchSpec(**fields)).plan)


@pytest.mark.parametrize(
    ("orders", "kind"),
    [
        (tuple(NodeOrder), NodeOrder.NATURAL),
        ((NodeOrder.METIS, NodeOrder.DEGREE), NodeOrder.METIS),
        ((NodeOrder.DEGREE,), NodeOrder.DEGREE),
    ],
)
def test_plans_of_sampled_batches_take_an_order_that_is_allowed_without_a_comparison(folder, orders, kind):
    search = SearchSpec(batches=(BatchKind.SAMPLED,), fan_outs=(4, 3), seeds_per_batch=20, orders=orders)
    file = found(folder, search=search)
    assert (file.plan.order.kind, file.orders) == (kind, ())


# --- The number to minimise.


@pytest.mark.parametrize(
    ("num_parts", "replicas", "steps", "expected"),
    [
        (1, 1, (2.0,), 2.0),
        # 6 parts, two a step: three steps, of which two are known to take 1 and 3 s.
        (6, 2, (1.0, 3.0), 6.0),
        # The last step of seven parts is a short one.
        (7, 2, (1.0, 1.0, 1.0, 0.5), 3.5),
    ],
)
def test_an_epoch_is_its_steps(num_parts, replicas, steps, expected):
    partition = equal_parts(num_parts, num_nodes=4200, num_edges=176_400)
    plan = made_plan(partition, data_parallel_degree=replicas, graph_parallel_degree=1)
    assert epoch_seconds(plan, steps) == pytest.approx(expected)
    assert epoch_seconds(plan, steps) / plan.steps_per_epoch == pytest.approx(statistics.mean(steps))
