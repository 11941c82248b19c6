"""Machines, calibrations, graphs and plans that were made up, from laws simple enough to follow by hand."""

import dataclasses
from collections.abc import Callable, Sequence
from math import prod

from simulator.specs.calibration import Calibration, CollectiveSample, ComputeSample
from simulator.specs.cluster import ClusterSpec, DeviceKind, DeviceSpec, LinkSpec
from simulator.specs.graph import GraphFile, GraphSpec
from simulator.specs.hosts import HostRows
from simulator.specs.model import ModelSpec
from simulator.specs.plan import (
    Exchange,
    PartitionMethod,
    PartitionSpec,
    PartSpec,
    Plan,
    Recompute,
    SampledBatches,
    SampledLayer,
)
from simulator.specs.program import (
    BATCH_KINDS,
    GROUP_COLLECTIVES,
    HOST_COPIES,
    UPDATES,
    Phase,
    Task,
    TaskKind,
    stream_of,
)
from simulator.specs.shares import PartShares
from simulator.specs.units import GB, GIB, TERA, Dtype

DEVICE_NAME = "made device"
COMPUTE_LATENCY_SECONDS, SECONDS_PER_ITEM = 10e-6, 1e-9
COLLECTIVE_LATENCY_SECONDS, SECONDS_PER_BYTE = 30e-6, 1e-9

_ROWS, _WIDTHS = (64, 1024, 16384), (16, 64)
_SHAPES: dict[TaskKind, tuple[tuple[int, ...], ...]] = {
    TaskKind.CLUSTER_BATCH: tuple((4 * rows, rows, 8 * rows, width * rows) for rows in _ROWS for width in _WIDTHS),
    TaskKind.SAMPLED_BATCH: tuple((rows // 8, rows, 2 * rows, width * rows) for rows in _ROWS for width in _WIDTHS),
    TaskKind.TARGET_ROWS: tuple((rows, rows // 4, width) for rows in _ROWS for width in _WIDTHS),
    **{
        kind: tuple((rows, width, wide * width) for rows in _ROWS for width in _WIDTHS for wide in (1, 2))
        for kind in (TaskKind.LINEAR, TaskKind.INPUT_LINEAR, TaskKind.PROJECTION)
    },
    TaskKind.SPARSE_LINEAR: tuple((rows, 8 * rows, 500, width) for rows in _ROWS for width in _WIDTHS),
    **{
        kind: tuple((rows, width) for rows in _ROWS for width in _WIDTHS)
        for kind in (
            *(TaskKind.LAYER_NORM, TaskKind.GELU, TaskKind.DROPOUT, TaskKind.RESIDUAL, TaskKind.COPY_ROWS),
            TaskKind.BIAS,
        )
    },
    **{
        kind: tuple((rows, rows // 2, 2 * width) for rows in _ROWS for width in _WIDTHS)
        for kind in (TaskKind.HALO_PACK, TaskKind.PAD_ROWS)
    },
    TaskKind.EDGE_BIAS: tuple((8 * rows, 4) for rows in _ROWS),
    TaskKind.ATTENTION: tuple(
        (rows, rows, degree * rows, 0, 0, 4, width // 4) for rows in _ROWS for width in _WIDTHS for degree in (8, 24)
    ),
    TaskKind.MERGE: tuple((rows, rows // 2, 4, width // 4) for rows in _ROWS for width in _WIDTHS),
    TaskKind.LOSS: tuple((rows, rows // 2, 8) for rows in _ROWS),
    TaskKind.SHARD_COPY: ((2, 5_000), (2, 500_000)),
    TaskKind.CLIP: ((10_000, 20), (1_000_000, 20)),
    TaskKind.GRADIENT_NORM: ((10_000, 20), (1_000_000, 20)),
    TaskKind.GRADIENT_SCALE: ((10_000, 20), (1_000_000, 20)),
    TaskKind.OPTIMIZER: ((10_000, 20), (1_000_000, 20)),
    TaskKind.HOST_OPTIMIZER: ((10_000, 20), (1_000_000, 20)),
    TaskKind.COPY_TO_HOST: ((10_000,), (10_000_000,)),
    TaskKind.COPY_FROM_HOST: ((10_000,), (10_000_000,)),
    TaskKind.GRADIENT_CAST: ((10_000,), (1_000_000,)),
    TaskKind.TOP_K_SELECT: ((10_000, 100), (1_000_000, 10_000)),
    TaskKind.TOP_K_SUM: ((10_000, 100, 2), (1_000_000, 10_000, 2)),
    **{
        kind: tuple((elements, 4, matrix_rank) for elements in (10_000, 1_000_000) for matrix_rank in (1, 4, 16))
        for kind in (TaskKind.LOW_RANK_PROJECT, TaskKind.LOW_RANK_ORTHOGONALISE, TaskKind.LOW_RANK_RESTORE)
    },
}
_SIZES = (1024, 32 * 1024, 1024 * 1024, 32 * 1024 * 1024)


def made_items(kind: TaskKind, shape: tuple[int, ...]) -> int:
    """Return the amount of work that the law of a kind follows."""
    match kind:
        case TaskKind.SPARSE_LINEAR:
            return shape[1] * shape[3]
        case TaskKind.ATTENTION:
            _, _, edges, _, _, heads, head_size = shape
            return edges * heads * head_size
        case TaskKind.LOSS:
            return shape[1] * shape[2]
        case TaskKind.HALO_PACK | TaskKind.PAD_ROWS | TaskKind.TARGET_ROWS:
            return (shape[0] + shape[1]) * shape[2]
        case TaskKind.MERGE:
            _, merged, heads, head_size = shape
            return 3 * merged * heads * head_size
        case TaskKind.TOP_K_SUM:
            return shape[0] + 3 * shape[1] * shape[2]
        case _ if kind in UPDATES and kind is not TaskKind.SHARD_COPY:
            return shape[0]
        case TaskKind.CLUSTER_BATCH | TaskKind.SAMPLED_BATCH:
            first, rows, edges, features = shape
            return first + 4 * rows + 10 * edges + features
        case _:
            return prod(shape)


def made_seconds(kind: TaskKind, phase: Phase, shape: tuple[int, ...]) -> float:
    """Return the law of compute tasks: a latency and a nanosecond an item, two in the backward pass."""
    return COMPUTE_LATENCY_SECONDS + SECONDS_PER_ITEM * made_items(kind, shape) * (1 + (phase is Phase.BACKWARD))


def made_collective_seconds(kind: TaskKind, num_ranks: int, num_bytes: int) -> float:
    """Return the law of collectives: a latency and a nanosecond for each byte through a rank's port."""
    p = num_ranks
    ratio = {TaskKind.ALL_REDUCE: 2 * (p - 1) / p, TaskKind.ALL_GATHER: p - 1, TaskKind.REDUCE_SCATTER: (p - 1) / p}
    return COLLECTIVE_LATENCY_SECONDS + SECONDS_PER_BYTE * num_bytes * ratio.get(kind, 1)


def phases_of(kind: TaskKind) -> tuple[Phase, ...]:
    """Return the phases in which a kind of compute task is measured."""
    if kind in BATCH_KINDS | HOST_COPIES or kind is TaskKind.MERGE:
        return (Phase.FORWARD,)
    return (Phase.UPDATE,) if kind in UPDATES else (Phase.FORWARD, Phase.BACKWARD)


def made_sample(
    kind: TaskKind, phase: Phase, shape: tuple[int, ...], seconds: float, *, spread: float = 1.0, **fields: object
) -> ComputeSample:
    """Return a sample whose deciles are `seconds` over and times `spread`."""
    defaults = {"dtype": Dtype.FLOAT32, "busy_devices": 1, "host_seconds": 0.0, "origin": "made"}
    return ComputeSample(
        kind=kind,
        phase=phase,
        shape=shape,
        seconds=seconds,
        low_seconds=seconds / spread,
        high_seconds=seconds * spread,
        **(defaults | fields),  # type: ignore[arg-type]
    )


def made_collective_sample(
    kind: TaskKind, num_ranks: int, num_bytes: int, seconds: float, *, spread: float = 1.0, host_seconds: float = 0.0
) -> CollectiveSample:
    """Return a sample whose deciles are `seconds` over and times `spread`."""
    return CollectiveSample(
        kind=kind,
        num_ranks=num_ranks,
        num_bytes=num_bytes,
        seconds=seconds,
        low_seconds=seconds / spread,
        high_seconds=seconds * spread,
        host_seconds=host_seconds,
        origin="made",
    )


def made_calibration(
    *,
    compute_seconds: Callable[[TaskKind, Phase, tuple[int, ...]], float] = made_seconds,
    collective_seconds: Callable[[TaskKind, int, int], float] = made_collective_seconds,
    precisions: Sequence[Dtype] = tuple(Dtype),
    num_ranks: Sequence[int] = (2, 4),
    busy_devices: int = 1,
    spread: float = 1.1,
    host_seconds: float = 0.0,
    task_overhead_seconds: float = 0.0,
) -> Calibration:
    """Return samples of every kind from laws.

    Args:
        compute_seconds: of a kind, a phase and a shape.
        collective_seconds: of a kind, a number of ranks and the bytes that each gives.
        num_ranks: of the collectives.
        spread: of deciles around medians.
        host_seconds: of every task and collective.
    """
    return Calibration(
        device_name=DEVICE_NAME,
        environment=(("made", "up"),),
        computes=tuple(
            made_sample(
                kind,
                phase,
                shape,
                compute_seconds(kind, phase, shape),
                spread=spread,
                dtype=dtype,
                busy_devices=busy_devices,
                host_seconds=host_seconds,
            )
            for kind, shapes in _SHAPES.items()
            for phase in phases_of(kind)
            for dtype in precisions
            if phase is not Phase.UPDATE or dtype is Dtype.FLOAT32
            for shape in shapes
        ),
        collectives=tuple(
            made_collective_sample(
                kind,
                count,
                num_bytes,
                collective_seconds(kind, count, num_bytes),
                spread=spread,
                host_seconds=host_seconds,
            )
            for kind in sorted(GROUP_COLLECTIVES)
            for count in num_ranks
            for num_bytes in _SIZES
        ),
        task_overhead_seconds=task_overhead_seconds,
    )


def made_cluster(
    *,
    num_hosts: int = 1,
    devices_per_host: int = 4,
    kind: DeviceKind = DeviceKind.CPU,
    memory_bytes: int = 64 * GIB,
    device_link: LinkSpec | None = None,
    host_link: LinkSpec | None = None,
) -> ClusterSpec:
    """Return a cluster whose links, if none are given, carry a byte in a nanosecond, and in ten between hosts."""
    return ClusterSpec(
        name="made cluster",
        num_hosts=num_hosts,
        devices_per_host=devices_per_host,
        device=DeviceSpec(
            kind=kind,
            name=DEVICE_NAME,
            memory_bytes=memory_bytes,
            memory_bandwidth_bytes_per_second=10 * GB,
            fp32_flops_per_second=TERA,
            bf16_flops_per_second=TERA,
        ),
        device_link=device_link or LinkSpec(latency_seconds=5e-6, bandwidth_bytes_per_second=1 * GB),
        host_link=host_link or LinkSpec(latency_seconds=50e-6, bandwidth_bytes_per_second=0.1 * GB),
    )


def made_task(
    kind: TaskKind,
    shape: tuple[int, ...],
    *,
    phase: Phase = Phase.FORWARD,
    dtype: Dtype = Dtype.FLOAT32,
    group: tuple[int, ...] = (),
    name: str = "task",
) -> Task:
    """Return a task."""
    return Task(name=name, kind=kind, phase=phase, shape=shape, dtype=dtype, stream=stream_of(kind), group=group)


def made_collective(kind: TaskKind, num_bytes: Sequence[int] | int, num_ranks: int) -> tuple[Task, ...]:
    """Return the tasks of a collective of the first ranks, each of which gives so many bytes.

    Of an all-to-all each rank's bytes go to the next one.
    """
    group = tuple(range(num_ranks))
    given = [num_bytes] * num_ranks if isinstance(num_bytes, int) else list(num_bytes)
    if kind is not TaskKind.ALL_TO_ALL:
        return tuple(made_task(kind, (given[rank],), group=group) for rank in group)
    return tuple(
        made_task(kind, tuple(given[rank] if other == (rank + 1) % num_ranks else 0 for other in group), group=group)
        for rank in group
    )


def made_model(**fields: object) -> ModelSpec:
    """Return a small model."""
    defaults = {"width": 16, "num_heads": 4, "num_layers": 2, "feed_forward_width": 32}
    return ModelSpec(**(defaults | fields))  # type: ignore[arg-type]


def made_part(
    num_nodes: int,
    edges_from: Sequence[int],
    halo_rows_from: Sequence[int],
    *,
    num_feature_entries: int = 0,
    edges_of_long_targets_from: Sequence[int] = (),
    edges_of_long_sources_from: Sequence[int] = (),
    inner_edges_of_long_targets: int = 0,
    outer_edges_of_long_targets: int = 0,
    edges_out_of_long_sources: int = 0,
    boundary_nodes_from: Sequence[int] = (),
    num_boundary_nodes: int = 0,
) -> PartSpec:
    """Return a part, half of whose nodes are trained on; its rows are short unless fields say otherwise."""
    none = (0,) * len(edges_from)
    return PartSpec(
        num_nodes=num_nodes,
        num_train_nodes=num_nodes // 2,
        num_feature_entries=num_feature_entries,
        edges_from=tuple(edges_from),
        halo_rows_from=tuple(halo_rows_from),
        edges_of_long_targets_from=tuple(edges_of_long_targets_from) or none,
        edges_of_long_sources_from=tuple(edges_of_long_sources_from) or none,
        inner_edges_of_long_targets=inner_edges_of_long_targets,
        outer_edges_of_long_targets=outer_edges_of_long_targets,
        edges_out_of_long_sources=edges_out_of_long_sources,
        boundary_nodes_from=tuple(boundary_nodes_from) or none,
        num_boundary_nodes=num_boundary_nodes or max(boundary_nodes_from, default=0),
    )


def made_partition(parts: Sequence[PartSpec]) -> PartitionSpec:
    """Return a cut into these parts."""
    method = PartitionMethod.METIS if len(parts) > 1 else PartitionMethod.SINGLE
    return PartitionSpec(method=method, seed=0, path="", sha256="0" * 64, parts=tuple(parts))


def equal_parts(
    num_parts: int, *, num_nodes: int, num_edges: int, halo_rows: int = 0, num_feature_entries: int = 0
) -> PartitionSpec:
    """Return a cut into equal parts.

    Args:
        num_nodes, num_edges, num_feature_entries: of the graph, to be divided by `num_parts`; edges by its square.
        halo_rows: that each part needs of each other one.
    """
    return made_partition(
        [
            made_part(
                num_nodes // num_parts,
                [num_edges // num_parts**2] * num_parts,
                [halo_rows * (other != part) for other in range(num_parts)],
                num_feature_entries=num_feature_entries // num_parts,
            )
            for part in range(num_parts)
        ]
    )


def three_parts_on_two_hosts() -> PartitionSpec:
    """Return parts of 10, 20 and 30 nodes of ranks 0 and 1, which share a host, and 2, which has one of its own.

    Rank 0 needs 4 rows of rank 2, of which it takes 2 and passes one on; rank 1 needs 3, takes 2 and passes both on.
    """
    cut = made_partition(
        [
            made_part(10, [5, 7, 9], [0, 2, 4], boundary_nodes_from=[0, 3, 6]),
            made_part(20, [8, 4, 6], [1, 0, 3], boundary_nodes_from=[2, 0, 5]),
            made_part(30, [7, 3, 2], [2, 2, 0], boundary_nodes_from=[4, 3, 0]),
        ]
    )
    hosts = HostRows(
        ranks_per_host=2,
        rows_from=((0, 2, 2), (1, 0, 2), (2, 2, 0)),
        passed_rows_from=((0, 2, 0), (1, 0, 0), (0, 0, 0)),
    )
    return dataclasses.replace(cut, hosts=hosts)


def two_parts_on_three_ranks() -> PartitionSpec:
    """Return parts of 10 nodes, on rank 0, and of 20, on ranks 1 and 2 with 10 each.

    Rank 0 sends 4 rows to the second part; ranks 1 and 2 send 1 and 2 to the first.
    """
    cut = made_partition(
        [
            made_part(10, [5, 7], [0, 3], edges_of_long_targets_from=[3, 5], edges_of_long_sources_from=[2, 4]),
            made_part(20, [9, 2], [4, 0]),
        ]
    )
    trained = [part.num_train_nodes for part in cut.parts]
    shares = PartShares(
        part_ranks=(1, 2),
        num_nodes=(10, 10, 10),
        num_train_nodes=(trained[0], trained[1], 0),
        num_feature_entries=(0, 0, 0),
        rows_to_parts=((0, 4), (1, 0), (2, 0)),
    )
    return dataclasses.replace(cut, shares=shares)


def made_plan(partition: PartitionSpec, *, num_layers: int = 2, **fields: object) -> Plan:
    """Return a plan in fp32 with one rank for each part of a batch and a halo exchange, unless fields say otherwise."""
    ranks = partition.num_parts if partition.shares is None else partition.shares.num_ranks
    degree = fields.get("graph_parallel_degree", ranks)
    exchange = Exchange.HALO if degree != 1 else Exchange.NONE
    defaults: dict[str, object] = {
        "data_parallel_degree": 1,
        "graph_parallel_degree": degree,
        "partition": partition,
        "parts_per_batch": degree if partition.shares is None else partition.num_parts,
        "exchange": (exchange,) * num_layers,
        "recompute": (Recompute.NONE,) * num_layers,
        "precision": Dtype.FLOAT32,
    }
    return Plan(**(defaults | fields))  # type: ignore[arg-type]


def made_sampled(*layers: tuple[int, int, int], seeds_per_batch: int = 50) -> SampledBatches:
    """Return sampled batches of layers with so many sources, targets and edges, all of short rows."""
    return SampledBatches(
        fan_outs=(4,) * len(layers),
        seeds_per_batch=seeds_per_batch,
        layers=tuple(
            SampledLayer(
                num_sources=sources,
                num_targets=targets,
                num_edges=edges,
                num_edges_of_long_targets=0,
                num_edges_of_long_sources=0,
            )
            for sources, targets, edges in layers
        ),
        num_feature_entries=0,
    )


def made_sampled_plan(partition: PartitionSpec, sampled: SampledBatches, **fields: object) -> Plan:
    """Return a plan of sampled batches in fp32 on one rank, unless fields say otherwise."""
    defaults: dict[str, object] = {"graph_parallel_degree": 1, "parts_per_batch": partition.num_parts}
    return made_plan(partition, num_layers=len(sampled.layers), sampled=sampled, **(defaults | fields))


def graph_of(partition: PartitionSpec, **fields: object) -> GraphSpec:
    """Return the numbers of the graph that was cut."""
    parts = partition.parts
    defaults: dict[str, object] = {
        "source": GraphFile(path="made.npz"),
        "sha256": "0" * 64,
        "num_nodes": sum(part.num_nodes for part in parts),
        "num_edges": sum(part.num_edges for part in parts),
        "num_features": 12,
        "num_feature_entries": sum(part.num_feature_entries for part in parts),
        "num_classes": 5,
        "num_train_nodes": sum(part.num_train_nodes for part in parts),
        "num_val_nodes": 0,
        "num_test_nodes": 0,
        "in_degree_quantiles": (0.0,) * 7,
    }
    return GraphSpec(**(defaults | fields))  # type: ignore[arg-type]


def merged(partition: PartitionSpec) -> PartitionSpec:
    """Return the same graph as one part; how many of its edges are of long sources, its parts do not tell."""
    parts = partition.parts
    whole = dataclasses.replace(
        made_part(sum(part.num_nodes for part in parts), [sum(part.num_edges for part in parts)], [0]),
        inner_edges_of_long_targets=sum(sum(part.edges_of_long_targets_from) for part in parts),
        num_train_nodes=sum(part.num_train_nodes for part in parts),
        num_feature_entries=sum(part.num_feature_entries for part in parts),
    )
    return made_partition([whole])
