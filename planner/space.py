"""Yields candidate plans."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from simulator.constraints import step_mode_of
from simulator.gradients import gradient_buckets
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.gradients import GradientCompression
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import ROW_EXCHANGES, Exchange, ExchangePayload, PartitionSpec, Plan
from simulator.specs.search import BatchKind, SearchSpec
from simulator.specs.units import Dtype
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

    Layers are alike: each plan has one exchange and one recompute choice for all of them. Choices of how rows travel
    that an exchange does not have are not tried with it, nor a hierarchical exchange where no host's rows are counted.

    Args:
        partition: gives the cut into so many parts; it is asked only for cuts that some candidate needs.
    """
    for num_ranks in rank_counts(cluster, search):
        reductions = list(_reductions(graph, model, cluster, search, num_ranks))
        for data_parallel_degree, graph_parallel_degree, num_parts in _meshes(num_ranks, search):
            cut = partition(num_parts)
            is_full_graph = num_parts == graph_parallel_degree
            step_mode = step_mode_of(num_ranks=num_ranks, is_full_graph=is_full_graph, cluster=cluster)
            crosses_hosts = is_full_graph and cut.hosts is not None
            exchanges = list(_exchanges(graph_parallel_degree, search, crosses_hosts=crosses_hosts))
            plain_cut = replace(cut, hosts=None)
            for (exchange, choices), recompute, precision, reduction in itertools.product(
                exchanges, search.recomputes, search.precisions, reductions
            ):
                if not _shortens(choices["exchange_precision"], precision):
                    continue
                yield Plan(
                    data_parallel_degree=data_parallel_degree,
                    graph_parallel_degree=graph_parallel_degree,
                    partition=cut if exchange is Exchange.HIERARCHICAL_HALO else plain_cut,
                    parts_per_batch=graph_parallel_degree,
                    exchange=(exchange,) * model.num_layers,
                    recompute=(recompute,) * model.num_layers,
                    precision=precision,
                    gradient_bucket_bytes=reduction.bucket_bytes,
                    overlap_gradients=reduction.overlaps,
                    gradient_compression=reduction.compression,
                    step_mode=step_mode,
                    **choices,
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


def _exchanges(
    graph_parallel_degree: int, search: SearchSpec, *, crosses_hosts: bool
) -> Iterator[tuple[Exchange, dict[str, Any]]]:
    """Yield an exchange, and how what travels does; plain choices come first, so that equal predictions go to them.

    Args:
        crosses_hosts: whether what hosts need of each other was counted, so that it may cross between them once.
    """
    plain: dict[str, Any] = {"exchange_precision": None}
    if graph_parallel_degree == 1:
        yield Exchange.NONE, plain
        return
    for exchange in search.exchanges:
        is_hierarchical = exchange is Exchange.HIERARCHICAL_HALO
        if is_hierarchical and not crosses_hosts:
            continue
        of_rows = exchange in ROW_EXCHANGES
        chunks = (None, search.exchange_chunk_bytes) if search.exchange_chunk_bytes and not is_hierarchical else (None,)
        payloads = search.exchange_payloads if of_rows else (ExchangePayload.KEYS_AND_VALUES,)
        for overlap in search.exchange_overlaps if of_rows else (False,):
            for payload in payloads:
                for precision in (None, *search.exchange_precisions):
                    for chunk_bytes in chunks:
                        yield (
                            exchange,
                            {
                                "overlap_exchange": overlap,
                                "exchange_payload": payload,
                                "exchange_precision": precision,
                                "exchange_chunk_bytes": chunk_bytes,
                            },
                        )


def _shortens(exchange_precision: Dtype | None, precision: Dtype) -> bool:
    """Return whether what travels may have a number format in a plan of another one."""
    return exchange_precision is None or exchange_precision.num_bytes < precision.num_bytes


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
