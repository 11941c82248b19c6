"""Yields candidate plans."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from simulator.constraints import step_mode_of
from simulator.gradients import gradient_buckets
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.gradients import GradientCompression
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, PartitionSpec, Plan
from simulator.specs.search import BatchKind, SearchSpec
from simulator.workload import parameter_shapes


def rank_counts(cluster: ClusterSpec, search: SearchSpec) -> tuple[int, ...]:
    """Return the numbers of ranks to try: those that were asked for, else powers of two and all devices."""
    if search.num_ranks:
        return tuple(sorted(set(search.num_ranks)))
    devices = cluster.num_devices
    return tuple(sorted({2**power for power in range(devices.bit_length()) if 2**power <= devices} | {devices}))


def candidates(
    graph: GraphSpec,
    model: ModelSpec,
    cluster: ClusterSpec,
    search: SearchSpec,
    partition: Callable[[int], PartitionSpec],
) -> Iterator[Plan]:
    """Yield every plan of the search space, legal or not, those on fewer ranks first.

    Layers are alike: each plan has one exchange and one recompute choice for all of them.

    Args:
        partition: gives the cut into so many parts; it is asked only for cuts that some candidate needs.
    """
    for num_ranks in rank_counts(cluster, search):
        reductions = list(_reductions(graph, model, cluster, search, num_ranks))
        for data_parallel_degree, graph_parallel_degree, num_parts in _meshes(num_ranks, search):
            cut = partition(num_parts)
            exchanges = search.exchanges if graph_parallel_degree > 1 else (Exchange.NONE,)
            is_full_graph = num_parts == graph_parallel_degree
            step_mode = step_mode_of(num_ranks=num_ranks, is_full_graph=is_full_graph, cluster=cluster)
            for exchange, recompute, precision, reduction in itertools.product(
                exchanges, search.recomputes, search.precisions, reductions
            ):
                yield Plan(
                    data_parallel_degree=data_parallel_degree,
                    graph_parallel_degree=graph_parallel_degree,
                    partition=cut,
                    parts_per_batch=graph_parallel_degree,
                    exchange=(exchange,) * model.num_layers,
                    recompute=(recompute,) * model.num_layers,
                    precision=precision,
                    gradient_bucket_bytes=reduction.bucket_bytes,
                    overlap_gradients=reduction.overlaps,
                    gradient_compression=reduction.compression,
                    step_mode=step_mode,
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduction:
    """How a candidate reduces its gradients."""

    bucket_bytes: int
    overlaps: bool = False
    compression: GradientCompression = field(default_factory=GradientCompression)


def _reductions(
    graph: GraphSpec, model: ModelSpec, cluster: ClusterSpec, search: SearchSpec, num_ranks: int
) -> Iterator[_Reduction]:
    """Yield the ways to reduce gradients, those that begin no sooner or send no other buckets than another left out."""
    sizes = sorted(search.gradient_bucket_bytes, reverse=True)
    if num_ranks == 1:
        yield _Reduction(bucket_bytes=sizes[0])
        return
    elements = [math.prod(shape) for _, shape in reversed(parameter_shapes(graph, model))]
    distinct = {gradient_buckets(elements, size): size for size in reversed(sizes)}
    on_gpus = cluster.device.kind is DeviceKind.CUDA
    overlaps = search.overlap_gradients or ((False, True) if on_gpus else (False,))
    for compression in search.gradient_compressions:
        if False in overlaps:
            yield _Reduction(bucket_bytes=sizes[0], compression=compression)
        if True in overlaps:
            for counts, size in sorted(distinct.items(), key=lambda pair: -pair[1]):
                # The only bucket begins where it would behind the backward pass.
                if len(counts) > 1 or False not in overlaps:
                    yield _Reduction(bucket_bytes=size, overlaps=True, compression=compression)


def _meshes(num_ranks: int, search: SearchSpec) -> Iterator[tuple[int, int, int]]:
    """Yield replicas, ranks a graph group, and parts of the graph."""
    if BatchKind.FULL_GRAPH in search.batches:
        yield 1, num_ranks, num_ranks
    if BatchKind.CLUSTERS in search.batches:
        for graph_parallel_degree in range(1, num_ranks + 1):
            if num_ranks % graph_parallel_degree == 0:
                replicas = num_ranks // graph_parallel_degree
                num_parts = num_ranks * search.parts_per_replica
                if num_parts > graph_parallel_degree:
                    yield replicas, graph_parallel_degree, num_parts
