"""A Hypothesis strategy for each spec; every drawn value is valid, and small enough to run."""

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from simulator.specs.calibration import Calibration, CollectiveSample, ComputeSample
from simulator.specs.checkpoint import CheckpointFile, CheckpointManifest, EvaluatedStep
from simulator.specs.cluster import ClusterSpec, DeviceKind, DeviceSpec, LinkSpec
from simulator.specs.decision import PlanFile, Prediction, RankedPlan
from simulator.specs.fanout import FAN_OUT_KINDS, FanoutComparison, FanoutRow, FanoutSpec
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.graph import (
    DEGREE_QUANTILES,
    CommunityGraph,
    FeatureNorm,
    GraphFile,
    GraphSpec,
    RmatGraph,
)
from simulator.specs.hosts import HostRows
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.order import NodeOrder, OrderSpec, RankedOrder
from simulator.specs.plan import (
    Exchange,
    ExchangePayload,
    PartitionMethod,
    PartitionSpec,
    PartSpec,
    Plan,
    Recompute,
    SampledBatches,
    SampledLayer,
    StepMode,
)
from simulator.specs.program import (
    COLLECTIVES,
    GROUP_COLLECTIVES,
    SHAPE_FIELDS,
    Phase,
    Program,
    Stream,
    Task,
    TaskKind,
    stream_of,
    task_name,
)
from simulator.specs.run import RunSpec
from simulator.specs.sampling import NeighbourKind, NeighbourSpec
from simulator.specs.search import BatchKind, SearchSpec
from simulator.specs.shares import PartShares
from simulator.specs.topology import HostLink, HostTopology, LinkFault, LinkKind, NetworkSpec, Straggler
from simulator.specs.trace import Span, Trace, TraceOrigin
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype

# Texts of any characters but surrogates, which no file in UTF-8 can hold.
texts = st.text(st.characters(codec="utf-8"), max_size=12)
sha256s = st.text("0123456789abcdef", min_size=64, max_size=64)
seeds = st.integers(0, 2**31 - 1)
pairs = st.lists(st.tuples(texts, texts), max_size=3).map(tuple)
seconds = st.floats(0, 10)
positive_seconds = st.floats(1e-9, 10)
positive_rates = st.floats(1e6, 1e16)
compute_kinds = st.sampled_from([kind for kind in TaskKind if kind not in COLLECTIVES])
collective_kinds = st.sampled_from(sorted(GROUP_COLLECTIVES))


# --- Machines.

devices = st.builds(
    DeviceSpec,
    kind=st.sampled_from(DeviceKind),
    name=texts,
    memory_bytes=st.integers(1, 2**53),
    memory_bandwidth_bytes_per_second=positive_rates,
    fp32_flops_per_second=positive_rates,
    bf16_flops_per_second=positive_rates,
    cache_bytes=st.integers(0, 2**40),
)
links = st.builds(LinkSpec, latency_seconds=st.floats(0, 1e-2), bandwidth_bytes_per_second=st.floats(1e6, 1e13))
port_rates = st.floats(1e6, 1e13)


@st.composite
def host_topologies(draw: st.DrawFn, num_devices: int, *, num_nics: int | None = None) -> HostTopology:
    """Return a host of PCIe switches on sockets, with NVLink to a switch, from device to device, or without it."""
    num_nics = draw(st.integers(0, 3)) if num_nics is None else num_nics
    num_switches, num_sockets = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    switches = st.integers(0, num_switches - 1).map(lambda number: f"pcie{number}")
    joins = [(f"device{number}", draw(switches), LinkKind.PCIE) for number in range(num_devices)]
    joins += [(f"nic{number}", draw(switches), LinkKind.PCIE) for number in range(num_nics)]
    joins += [
        (f"pcie{number}", f"socket{number % num_sockets}", LinkKind.HOST_BRIDGE) for number in range(num_switches)
    ]
    if num_sockets == 2:
        joins.append(("socket0", "socket1", LinkKind.SOCKET))
    nvlink = draw(st.sampled_from(["none", "switch", "mesh"]))
    if nvlink == "switch":
        joins += [(f"device{number}", "nvswitch", LinkKind.NVLINK) for number in range(num_devices)]
    if nvlink == "mesh" and num_devices > 1:
        pairs = [(a, b) for a in range(num_devices) for b in range(a)]
        chosen = draw(st.lists(st.sampled_from(pairs), unique=True))
        joins += [(f"device{a}", f"device{b}", LinkKind.NVLINK) for a, b in chosen]
    return HostTopology(
        links=tuple(
            HostLink(ends=(a, b), kind=kind, bandwidth_bytes_per_second=draw(port_rates)) for a, b, kind in joins
        ),
        gpu_direct=draw(st.booleans()) if num_nics else True,
        peer_access=draw(st.booleans()),
    )


@st.composite
def _clusters(draw: st.DrawFn) -> ClusterSpec:
    num_hosts, devices_per_host = draw(st.integers(1, 4)), draw(st.integers(1, 8))
    host = draw(st.none() | host_topologies(devices_per_host))
    has_nics = host is not None and host.num_nics > 0
    hosts_per_leaf = draw(st.none() | st.integers(1, 4))
    rails = draw(st.booleans())
    network = NetworkSpec(
        hosts_per_leaf=hosts_per_leaf,
        oversubscription=draw(st.floats(1, 8)) if rails or hosts_per_leaf else 1.0,
        rails=rails,
        nics_per_host=None if has_nics else draw(st.none() | st.integers(1, 4)),
    )
    slow = draw(st.lists(st.integers(0, num_hosts * devices_per_host - 1), max_size=2, unique=True))
    fault = LinkFault(ends=("device0", "host"), host=0, bandwidth_bytes_per_second=draw(port_rates))
    other = LinkFault(ends=("nic0", "network"), bandwidth_ratio=draw(st.floats(0.1, 1)))
    return ClusterSpec(
        name=draw(texts),
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        device=draw(devices),
        device_link=draw(links),
        host_link=draw(links),
        host=host,
        network=draw(st.sampled_from([None, network])),
        stragglers=tuple(Straggler(device=device, slowdown=draw(st.floats(1, 3))) for device in slow),
        link_faults=draw(st.sampled_from([(), (fault,), (fault, other)])),
        jitter=draw(st.sampled_from([0.0, 0.1])),
    )


clusters = _clusters()


# --- Graphs.

graph_files = st.builds(
    GraphFile,
    path=texts,
    split=st.integers(0, 9),
    normalize_features=st.sampled_from(FeatureNorm),
    add_self_loops=st.booleans(),
    symmetrise=st.booleans(),
)
rmat_graphs = st.builds(
    RmatGraph,
    num_nodes=st.integers(1, 200),
    num_edges=st.integers(0, 1000),
    num_features=st.integers(1, 16),
    num_classes=st.integers(1, 5),
    a=st.floats(0, 0.5),
    b=st.floats(0, 0.25),
    c=st.floats(0, 0.25),
    seed=seeds,
    add_self_loops=st.booleans(),
)
community_graphs = st.builds(
    CommunityGraph,
    num_nodes=st.integers(1, 200),
    num_edges=st.integers(0, 1000),
    num_classes=st.integers(1, 5),
    num_features=st.integers(1, 16),
    within_ratio=st.floats(0, 1),
    degree_exponent=st.floats(1.5, 4),
    feature_noise=st.floats(0, 8),
    seed=seeds,
    add_self_loops=st.booleans(),
)
graph_sources = graph_files | rmat_graphs | community_graphs


@st.composite
def _graphs(draw: st.DrawFn) -> GraphSpec:
    num_nodes = draw(st.integers(1, 10**6))
    num_edges = draw(st.integers(0, 10**7))
    num_features = draw(st.integers(1, 2000))
    degrees = [float(draw(st.integers(0, num_edges))) for _ in DEGREE_QUANTILES]
    num_train_nodes = draw(st.integers(0, num_nodes))
    num_val_nodes = draw(st.integers(0, num_nodes - num_train_nodes))
    return GraphSpec(
        source=draw(graph_files),
        sha256=draw(sha256s),
        num_nodes=num_nodes,
        num_edges=num_edges,
        num_features=num_features,
        num_feature_entries=draw(st.just(0) | st.integers(0, num_nodes * num_features)),
        num_classes=draw(st.integers(1, 100)),
        num_train_nodes=num_train_nodes,
        num_val_nodes=num_val_nodes,
        num_test_nodes=draw(st.integers(0, num_nodes - num_train_nodes - num_val_nodes)),
        in_degree_quantiles=tuple(sorted(degrees)),
    )


graphs = _graphs()


# --- Models, training, search.


@st.composite
def _models(draw: st.DrawFn) -> ModelSpec:
    num_heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    return ModelSpec(
        width=num_heads * draw(st.integers(1, 16)),
        num_heads=num_heads,
        num_layers=draw(st.integers(1, 4)),
        feed_forward_width=draw(st.integers(1, 256)),
        dropout_ratio=draw(st.floats(0, 0.9)),
        edge_bias=draw(st.sampled_from(EdgeBias)),
        laplacian_encodings=draw(st.integers(0, 8)),
        random_walk_encodings=draw(st.integers(0, 8)),
    )


models = _models()

_fan_outs = st.integers(1, 64)
_NEIGHBOURS: dict[NeighbourKind, dict[str, st.SearchStrategy[Any]]] = {
    NeighbourKind.ALL: {},
    NeighbourKind.UNIFORM: {"fan_out": _fan_outs},
    NeighbourKind.DEGREE: {"fan_out": _fan_outs, "degree_exponent": st.floats(0.1, 2) | st.floats(-2, -0.1)},
    NeighbourKind.RANDOM_WALK: {
        "fan_out": _fan_outs,
        "num_walks": st.integers(1, 100),
        "walk_length": st.integers(1, 10),
    },
    NeighbourKind.PROJECTION_TOP_K: {"fan_out": _fan_outs, "projection_width": st.integers(1, 16)},
    NeighbourKind.PROJECTION_DRAWN: {"fan_out": _fan_outs, "projection_width": st.integers(1, 16)},
    NeighbourKind.STORED: {"fan_out": _fan_outs, "path": texts.filter(bool)},
    NeighbourKind.EXPANDER: {"fan_out": st.sampled_from([2, 4, 6, 8])},
    NeighbourKind.VIRTUAL: {"num_virtual_nodes": st.integers(1, 4)},
}
neighbours = st.one_of([st.builds(NeighbourSpec, kind=st.just(kind), **fields) for kind, fields in _NEIGHBOURS.items()])


@st.composite
def _trains(draw: st.DrawFn) -> TrainSpec:
    num_steps = draw(st.integers(1, 1000))
    return TrainSpec(
        num_steps=num_steps,
        learning_rate=draw(st.floats(1e-6, 1)),
        weight_decay=draw(st.floats(0, 1)),
        warmup_steps=draw(st.integers(0, num_steps)),
        max_gradient_norm=draw(st.floats(1e-3, 100)),
        evaluate_every_steps=draw(st.integers(1, 100)),
        trace_steps=draw(st.integers(0, 10)),
        seed=draw(seeds),
        compile_dense=draw(st.booleans()),
        collective_timeout_seconds=draw(st.just(0.0) | positive_seconds),
        cpu_affinity=draw(st.booleans()),
        checkpoint_every_steps=draw(st.integers(0, 100)),
        num_checkpoints_kept=draw(st.integers(1, 9)),
        asynchronous_checkpoints=draw(st.booleans()),
    )


trains = _trains()


def _choices(
    choices: list[Exchange] | type[BatchKind] | type[Recompute] | type[Dtype] | type[NodeOrder],
) -> st.SearchStrategy:
    """Draw tuples of distinct choices, at least one."""
    return st.lists(st.sampled_from(list(choices)), min_size=1, unique=True).map(tuple)


compressions = (
    st.sampled_from([CompressionKind.NONE, CompressionKind.BF16]).map(lambda kind: GradientCompression(kind=kind))
    | st.builds(GradientCompression, kind=st.just(CompressionKind.TOP_K), kept_ratio=st.floats(0.001, 1))
    | st.builds(GradientCompression, kind=st.just(CompressionKind.POWER_SGD), matrix_rank=st.integers(1, 4))
)


@st.composite
def searches_for(draw: st.DrawFn, num_layers: int = 2) -> SearchSpec:
    """Draw bounds of a search; fan-outs, one a layer, and seeds go with sampled batches alone."""
    batches = draw(_choices(BatchKind))
    least_parts = 2 if BatchKind.ISOLATED_CLUSTERS in batches else 1
    parts_per_batch = draw(st.integers(least_parts, 4))
    is_sampled = BatchKind.SAMPLED in batches
    exchanges = draw(_choices([exchange for exchange in Exchange if exchange != Exchange.NONE]))
    may_share = BatchKind.FULL_GRAPH in batches and Exchange.HALO in exchanges
    return SearchSpec(
        num_ranks=draw(st.lists(st.integers(1, 32), unique=True, max_size=4).map(tuple)),
        batches=batches,
        exchanges=exchanges,
        recomputes=draw(_choices(Recompute)),
        precisions=draw(_choices(Dtype)),
        gradient_bucket_bytes=draw(st.lists(st.integers(4, 2**30), min_size=1, max_size=3, unique=True).map(tuple)),
        overlap_gradients=draw(st.lists(st.booleans(), unique=True).map(tuple)),
        gradient_compressions=draw(st.lists(compressions, min_size=1, max_size=3).map(tuple)),
        shared_part_counts=draw(st.lists(st.integers(2, 8), max_size=2).map(tuple)) if may_share else (),
        parts_per_replica=draw(st.integers(parts_per_batch, 8)),
        parts_per_batch=parts_per_batch,
        fan_outs=draw(st.tuples(*[_fan_outs] * num_layers)) if is_sampled else (),
        seeds_per_batch=draw(st.integers(1, 10**4)) if is_sampled else 0,
        orders=draw(_choices(NodeOrder)),
        seed=draw(seeds),
    )


searches = searches_for()
_fan_out_numbers = st.lists(_fan_outs, min_size=1, max_size=4, unique=True).map(tuple)
fanouts = st.builds(
    FanoutSpec,
    fan_outs=_fan_out_numbers,
    samplers=st.lists(st.sampled_from(FAN_OUT_KINDS), min_size=1, unique=True).map(tuple),
    tolerance_ratio=st.floats(0, 0.5),
    num_steps=st.integers(1, 1000),
    num_seeds=st.integers(1, 5),
    subgraph_nodes=st.integers(1, 5000),
    max_full_nodes=st.integers(0, 5000),
    degree_exponent=st.floats(0.1, 2) | st.floats(-2, -0.1),
    walk_length=st.integers(1, 5),
    visits_per_neighbour=st.integers(1, 8),
    projection_width=st.integers(1, 16),
    structure_weight=st.floats(0, 10),
)
runs = models.flatmap(
    lambda model: st.builds(
        RunSpec,
        graph=graph_sources,
        model=st.just(model),
        cluster=st.none() | clusters,
        train=trains,
        search=searches_for(model.num_layers),
        fanout=fanouts,
    )
)


@st.composite
def _fanout_comparisons(draw: st.DrawFn) -> FanoutComparison:
    ratios = st.floats(0, 1)
    rows = st.builds(
        FanoutRow,
        neighbours=st.none() | neighbours,
        full_error_ratio=st.floats(0, 10),
        edges_error_ratio=st.floats(0, 10),
        val_accuracy_ratio=ratios,
        val_accuracy_range_ratio=ratios,
        num_edges_per_step=st.floats(0, 1e12),
    )
    return FanoutComparison(
        spec=draw(fanouts),
        rows=draw(st.lists(rows, max_size=4).map(tuple)),
        region_nodes=draw(st.integers(1, 5000)),
        region_edges=draw(st.integers(0, 10**6)),
    )


fanout_comparisons = _fanout_comparisons()


# --- Plans.

cache_ratios = st.none() | st.floats(0, 1)


@st.composite
def parts(draw: st.DrawFn, num_parts: int, index: int, min_nodes: int = 0) -> PartSpec:
    """Draw part `index` of a cut: halo rows are no more than the edges that need them, and none come from itself."""
    num_nodes = draw(st.integers(min_nodes, 1000))
    edges_from = draw(st.tuples(*[st.integers(0, 5000)] * num_parts))
    halo_rows_from = [0 if part == index else draw(st.integers(0, edges)) for part, edges in enumerate(edges_from)]
    of_long_targets_from = draw(st.tuples(*[st.integers(0, edges) for edges in edges_from]))
    outer = [0 if part == index else edges for part, edges in enumerate(edges_from)]
    boundary_from = tuple(draw(st.integers(0, min(num_nodes, edges))) for edges in outer)
    return PartSpec(
        num_nodes=num_nodes,
        num_train_nodes=draw(st.integers(0, num_nodes)),
        num_feature_entries=draw(st.integers(0, 10**5)),
        edges_from=edges_from,
        halo_rows_from=tuple(halo_rows_from),
        edges_of_long_targets_from=of_long_targets_from,
        edges_of_long_sources_from=draw(st.tuples(*[st.integers(0, edges) for edges in edges_from])),
        inner_edges_of_long_targets=draw(st.integers(0, edges_from[index]))
        if num_parts > 1
        else of_long_targets_from[0],
        outer_edges_of_long_targets=draw(st.integers(0, sum(outer))),
        edges_out_of_long_sources=draw(st.integers(0, 10**5)),
        num_boundary_nodes=draw(st.integers(max(boundary_from), min(num_nodes, sum(boundary_from)))),
        boundary_nodes_from=boundary_from,
    )


@st.composite
def partitions(draw: st.DrawFn, num_parts: int | None = None, *, with_shares: bool = False) -> PartitionSpec:
    """Draw a cut into `num_parts` parts, or into any small number of them."""
    if num_parts is None:
        num_parts = draw(st.integers(1, 6))
    filled = draw(st.integers(0, num_parts - 1))  # any part may be empty, but not all
    methods = [method for method in PartitionMethod if (method == PartitionMethod.SINGLE) == (num_parts == 1)]
    drawn = tuple(draw(parts(num_parts, index, int(index == filled))) for index in range(num_parts))
    return PartitionSpec(
        method=draw(st.sampled_from(methods)),
        seed=draw(seeds),
        path="" if num_parts == 1 else draw(texts),
        sha256=draw(sha256s),
        parts=drawn,
        hosts=draw(st.none() | host_rows_of(drawn)),
        shares=draw(shares_of(drawn)) if with_shares else None,
    )


@st.composite
def shares_of(draw: st.DrawFn, cut: tuple[PartSpec, ...]) -> PartShares:
    """Draw how many ranks serve each part, and which of its rows each owns and sends to the other parts."""
    part_ranks = draw(st.tuples(*[st.integers(1, 3)] * len(cut)).filter(lambda counts: max(counts) > 1))

    def split(total: int, count: int) -> list[int]:
        cuts = sorted(draw(st.lists(st.integers(0, total), min_size=count - 1, max_size=count - 1)))
        return [end - first for first, end in itertools.pairwise([0, *cuts, total])]

    nodes, trained, entries, rows_to = [], [], [], []
    for index, (part, count) in enumerate(zip(cut, part_ranks, strict=True)):
        nodes += split(part.num_nodes, count)
        trained += split(part.num_train_nodes, count)
        entries += split(part.num_feature_entries, count)
        sent = [split(other.halo_rows_from[index], count) for other in cut]
        rows_to += [tuple(rows[place] for rows in sent) for place in range(count)]
    return PartShares(
        part_ranks=part_ranks,
        num_nodes=tuple(nodes),
        num_train_nodes=tuple(trained),
        num_feature_entries=tuple(entries),
        rows_to_parts=tuple(rows_to),
    )


@st.composite
def host_rows_of(draw: st.DrawFn, cut: tuple[PartSpec, ...]) -> HostRows:
    """Draw which of the halo rows of parts come from their owners, and which from ranks of the own host."""
    ranks_per_host = draw(st.integers(1, len(cut)))
    rows_from, passed_from = [], []
    for rank, part in enumerate(cut):
        first = rank - rank % ranks_per_host
        mates = [other for other in range(first, min(first + ranks_per_host, len(cut))) if other != rank]
        taken, passed = list(part.halo_rows_from), [0] * len(cut)
        for owner, rows in enumerate(part.halo_rows_from):
            if mates and owner != rank and owner not in mates:
                taken[owner] = draw(st.integers(0, rows))
                passed[draw(st.sampled_from(mates))] += rows - taken[owner]
        rows_from.append(tuple(taken))
        passed_from.append(tuple(passed))
    return HostRows(ranks_per_host=ranks_per_host, rows_from=tuple(rows_from), passed_rows_from=tuple(passed_from))


file_orders = st.builds(
    OrderSpec,
    kind=st.sampled_from([kind for kind in NodeOrder if kind != NodeOrder.NATURAL]),
    path=texts.filter(bool),
    sha256=sha256s,
)
orders = st.just(OrderSpec()) | file_orders
ranked_orders = st.builds(
    RankedOrder,
    kind=st.sampled_from(NodeOrder),
    row_bytes=st.integers(1, 2**20),
    window_16_reuse=st.floats(1, 16),
    window_64_reuse=st.floats(1, 64),
    beyond_cache_ratio=st.floats(0, 1),
    relative_seconds=st.floats(0.01, 10),
)


@st.composite
def plans_for(draw: st.DrawFn, num_layers: int | None = None) -> Plan:
    """Draw a plan: each rank of a graph group has one part of the batch, and a lone rank exchanges nothing."""
    if num_layers is None:
        num_layers = draw(st.integers(1, 4))
    graph_parallel_degree = draw(st.integers(1, 4))
    num_batches = draw(st.integers(1, 3))
    replicas = draw(st.integers(1, 3))
    partition = draw(partitions(graph_parallel_degree * num_batches))
    exchanges = [exchange for exchange in Exchange if (exchange == Exchange.NONE) == (graph_parallel_degree == 1)]
    is_kept = draw(st.booleans()) if graph_parallel_degree == 1 and num_batches > 1 else False
    if Exchange.HIERARCHICAL_HALO in exchanges and (partition.hosts is None or num_batches > 1 or replicas > 1):
        exchanges.remove(Exchange.HIERARCHICAL_HALO)
    return Plan(
        data_parallel_degree=replicas,
        graph_parallel_degree=graph_parallel_degree,
        partition=partition,
        parts_per_batch=graph_parallel_degree,
        exchange=draw(st.tuples(*[st.sampled_from(exchanges)] * num_layers)),
        recompute=draw(st.tuples(*[st.sampled_from(Recompute)] * num_layers)),
        precision=draw(st.sampled_from(Dtype)),
        gradient_bucket_bytes=draw(st.integers(4, 2**30)),
        overlap_gradients=draw(st.booleans()),
        gradient_compression=draw(compressions),
        order=draw(orders),
        step_mode=draw(st.sampled_from(StepMode)),
        beyond_cache_ratio=draw(cache_ratios),
        keep_batches=is_kept,
        prefetch_batches=draw(st.integers(0, 2)) if num_batches > 1 and not is_kept else 0,
        overlap_exchange=draw(st.booleans()),
        exchange_payload=draw(st.sampled_from(ExchangePayload)),
        exchange_precision=draw(st.none() | st.sampled_from(Dtype)),
        exchange_chunk_bytes=draw(st.none() | st.integers(2**40, 2**41)),
    )


plans = plans_for()


@st.composite
def served_plans(draw: st.DrawFn, num_layers: int = 2) -> Plan:
    """Draw a full graph some of whose parts may have several ranks."""
    partition = draw(partitions(with_shares=True))
    assert partition.shares is not None
    return Plan(
        data_parallel_degree=1,
        graph_parallel_degree=partition.shares.num_ranks,
        partition=partition,
        parts_per_batch=partition.num_parts,
        exchange=(Exchange.HALO,) * num_layers,
        recompute=draw(st.tuples(*[st.sampled_from(Recompute)] * num_layers)),
        precision=draw(st.sampled_from(Dtype)),
        gradient_bucket_bytes=draw(st.integers(4, 2**30)),
        overlap_gradients=draw(st.booleans()),
        gradient_compression=draw(compressions),
    )


@st.composite
def _sampled_layers(draw: st.DrawFn, num_layers: int) -> tuple[SampledLayer, ...]:
    """Draw layers, the rows of each among those of the one before it."""
    rows = sorted(draw(st.lists(st.integers(1, 1000), min_size=num_layers + 1, max_size=num_layers + 1)), reverse=True)
    found = []
    for num_sources, num_targets in itertools.pairwise(rows):
        edges = draw(st.integers(0, 5000))
        found.append(
            SampledLayer(
                num_sources=num_sources,
                num_targets=num_targets,
                num_edges=edges,
                num_edges_of_long_targets=draw(st.integers(0, edges)),
                num_edges_of_long_sources=draw(st.integers(0, edges)),
            )
        )
    return tuple(found)


@st.composite
def sampled_plans(draw: st.DrawFn, num_layers: int = 2) -> Plan:
    """Draw a plan of sampled batches."""
    partition = draw(partitions())
    return Plan(
        data_parallel_degree=draw(st.integers(1, 4)),
        graph_parallel_degree=1,
        partition=partition,
        parts_per_batch=partition.num_parts,
        exchange=(Exchange.NONE,) * num_layers,
        recompute=draw(st.tuples(*[st.sampled_from(Recompute)] * num_layers)),
        precision=draw(st.sampled_from(Dtype)),
        sampled=SampledBatches(
            fan_outs=draw(st.tuples(*[_fan_outs] * num_layers)),
            seeds_per_batch=draw(st.integers(1, 300)),
            layers=draw(_sampled_layers(num_layers)),
            num_feature_entries=draw(st.integers(0, 10**5)),
        ),
        prefetch_batches=draw(st.integers(0, 2)),
    )


# --- Programs.


def _compute_task(draw: st.DrawFn, name: str, phase: Phase, earlier: list[Task]) -> Task:
    kind = draw(compute_kinds)
    stream = draw(st.sampled_from([Stream.COMPUTE, Stream.COMPUTE, Stream.HOST_TO_DEVICE, Stream.DEVICE_TO_HOST]))
    return Task(
        name=name,
        kind=kind,
        phase=phase,
        shape=draw(st.tuples(*[st.integers(0, 1000)] * len(SHAPE_FIELDS[kind]))),
        dtype=draw(st.sampled_from(Dtype)),
        stream=stream,
        waits_for=_waits(draw, stream, earlier),
        blocks_host=draw(st.booleans()),
        beyond_cache_ratio=draw(cache_ratios),
    )


def _waits(draw: st.DrawFn, stream: Stream, earlier: list[Task]) -> tuple[int, ...]:
    """Draw indices of earlier tasks on other streams."""
    others = [index for index, task in enumerate(earlier) if task.stream != stream]
    return tuple(index for index in others if draw(st.booleans()))


def _collective_shapes(draw: st.DrawFn, kind: TaskKind, num_ranks: int) -> list[tuple[int, ...]]:
    """Draw the shape of a collective on each rank: what the ranks must agree on is equal."""
    sizes = st.integers(0, 10**6)
    if kind == TaskKind.ALL_TO_ALL:
        return [draw(st.tuples(*[sizes] * num_ranks)) for _ in range(num_ranks)]
    return [(draw(sizes) * num_ranks,)] * num_ranks


def _collective_tasks(
    draw: st.DrawFn, name: str, phase: Phase, group: tuple[int, ...], tasks: list[list[Task]]
) -> list[Task]:
    """Draw the tasks of one collective, one for each rank of its group."""
    kind = draw(collective_kinds)
    shapes = _collective_shapes(draw, kind, len(group))
    dtype, blocks_host = draw(st.sampled_from(Dtype)), draw(st.booleans())
    return [
        Task(
            name=name,
            kind=kind,
            phase=phase,
            shape=shape,
            dtype=dtype,
            stream=Stream.COMMUNICATION,
            waits_for=_waits(draw, Stream.COMMUNICATION, tasks[rank]),
            group=group,
            blocks_host=blocks_host,
        )
        for rank, shape in zip(group, shapes, strict=True)
    ]


@st.composite
def _programs(draw: st.DrawFn) -> Program:
    """Draw a program that can run: collectives come in one order on all ranks, and no task waits for a later one."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 4]))
    groups = [tuple(range(num_ranks))] + [(0, 1), (2, 3)] * (num_ranks == 4)
    tasks: list[list[Task]] = [[] for _ in range(num_ranks)]
    for index in range(draw(st.integers(1, 8))):
        phase = draw(st.sampled_from(Phase))
        name = task_name(f"task{index}", phase)
        if num_ranks > 1 and draw(st.booleans()):
            group = draw(st.sampled_from(groups))
            for rank, task in zip(group, _collective_tasks(draw, name, phase, group, tasks), strict=True):
                tasks[rank].append(task)
        else:
            for earlier in tasks:
                earlier.append(_compute_task(draw, name, phase, earlier))
    return Program(tasks=tuple(map(tuple, tasks)))


programs = _programs()
tasks = programs.filter(lambda program: program.tasks[0]).flatmap(lambda program: st.sampled_from(program.tasks[0]))


# --- Traces.


@st.composite
def _spans(draw: st.DrawFn, rank: int = 0, step: int = 0, start_seconds: float = 0.0) -> Span:
    kind = draw(st.sampled_from(TaskKind))
    duration_seconds = draw(seconds)
    return Span(
        rank=rank,
        step=step,
        stream=stream_of(kind),
        name=draw(texts),
        kind=kind,
        phase=draw(st.sampled_from(Phase)),
        shape=draw(st.lists(st.integers(0, 2**40), max_size=5).map(tuple)),
        start_seconds=start_seconds,
        duration_seconds=duration_seconds,
        waiting_seconds=draw(st.floats(0, duration_seconds)) if kind.is_collective else 0.0,
        host_seconds=draw(seconds),
        dtype=draw(st.sampled_from(Dtype)),
        group=draw(st.sampled_from([(0, 1), (0, 1, 2, 3)])) if kind.is_collective else (),
        beyond_cache_ratio=draw(cache_ratios),
    )


spans = _spans()


@st.composite
def _traces(draw: st.DrawFn) -> Trace:
    """Draw a trace whose spans follow one another on each stream of each rank."""
    num_ranks, first_step, num_steps = draw(st.integers(1, 4)), draw(st.integers(0, 100)), draw(st.integers(0, 3))
    drawn = []
    for step in range(first_step, first_step + num_steps):
        free_seconds = {(rank, stream): 0.0 for rank in range(num_ranks) for stream in Stream}
        for rank in draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=6)):
            span = draw(_spans(rank=rank, step=step, start_seconds=draw(seconds)))
            if span.start_seconds < free_seconds[rank, span.stream]:
                continue
            free_seconds[rank, span.stream] = span.end_seconds
            drawn.append(span)
    return Trace(
        origin=draw(st.sampled_from(TraceOrigin)),
        num_ranks=num_ranks,
        spans=tuple(drawn),
        step_seconds=draw(st.lists(positive_seconds, min_size=1, max_size=5).map(tuple)),
        traced_step_seconds=draw(st.tuples(*[positive_seconds] * num_steps)),
        peak_memory_bytes=draw(st.tuples(*[st.integers(0, 2**40)] * num_ranks)),
        environment=draw(pairs),
    )


traces = _traces()


# --- Calibrations and decisions.


@st.composite
def _samples(draw: st.DrawFn, /, build: Callable[..., object], **fields: st.SearchStrategy) -> Any:
    """Build samples whose low, median and high seconds are in order."""
    low, middle, high = sorted(draw(st.tuples(*[positive_seconds] * 3)))
    times = {"low_seconds": low, "seconds": middle, "high_seconds": high, "host_seconds": draw(seconds)}
    return build(origin=draw(texts), **times, **draw(st.fixed_dictionaries(fields)))


compute_samples = compute_kinds.flatmap(
    lambda kind: _samples(
        ComputeSample,
        kind=st.just(kind),
        phase=st.sampled_from(Phase),
        dtype=st.sampled_from(Dtype),
        shape=st.tuples(*[st.integers(0, 10**9)] * len(SHAPE_FIELDS[kind])),
        busy_devices=st.integers(1, 8),
        beyond_cache_ratio=cache_ratios,
    )
)
collective_samples = _samples(
    CollectiveSample,
    kind=collective_kinds,
    num_ranks=st.integers(2, 64),
    num_bytes=st.integers(0, 2**40),
)
calibrations = st.builds(
    Calibration,
    device_name=texts,
    environment=pairs,
    computes=st.lists(compute_samples, max_size=3).map(tuple),
    collectives=st.lists(collective_samples, max_size=3).map(tuple),
    task_overhead_seconds=seconds,
)


@st.composite
def predictions(draw: st.DrawFn, num_ranks: int = 2) -> Prediction:
    """Draw a prediction for a plan of `num_ranks` ranks."""
    low, middle, high = sorted(draw(st.tuples(*[positive_seconds] * 3)))
    categories = st.lists(st.tuples(texts, st.integers(0, 2**40)), max_size=3).map(tuple)
    return Prediction(
        p10_step_seconds=low,
        p50_step_seconds=middle,
        p90_step_seconds=high,
        epoch_seconds=draw(positive_seconds),
        peak_memory_bytes=draw(st.tuples(*[categories] * num_ranks)),
        longest_collective_seconds=draw(st.none() | positive_seconds),
    )


ranked_plans = st.builds(
    RankedPlan,
    description=texts,
    p50_step_seconds=positive_seconds,
    epoch_seconds=positive_seconds,
    peak_memory_bytes=st.integers(0, 2**40),
    reason=texts,
)


@st.composite
def _plan_files(draw: st.DrawFn) -> PlanFile:
    model = draw(models)
    plan = draw(plans_for(model.num_layers))
    return PlanFile(
        graph=draw(graphs),
        model=model,
        cluster=draw(clusters),
        train=draw(trains),
        plan=plan,
        prediction=draw(predictions(plan.num_ranks)),
        ranking=draw(st.lists(ranked_plans, max_size=2).map(tuple)),
        rejected=draw(st.lists(st.tuples(texts, st.integers(1, 10**6)), max_size=2).map(tuple)),
        calibration_sha256=draw(sha256s),
        orders=draw(st.lists(ranked_orders, max_size=2).map(tuple)),
    )


plan_files = _plan_files()

checkpoint_manifests = st.builds(
    CheckpointManifest,
    num_steps_done=st.integers(1, 10**9),
    plan_file=plan_files,
    evaluations=st.lists(
        st.builds(
            EvaluatedStep,
            step=st.integers(0, 10**9),
            train_accuracy_ratio=st.floats(0, 1),
            val_accuracy_ratio=st.floats(0, 1),
            test_accuracy_ratio=st.floats(0, 1),
        ),
        max_size=3,
    ).map(tuple),
    environment=pairs,
    files=st.lists(
        st.builds(CheckpointFile, name=texts, num_bytes=st.integers(0, 2**50), sha256=sha256s), max_size=3
    ).map(tuple),
)
