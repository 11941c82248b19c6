"""Yields candidate plans."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import assert_never

from simulator.constraints import step_mode_of
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, PartitionSpec, Plan, SampledBatches
from simulator.specs.search import BatchKind, SearchSpec

# Made ahead: one waits while the next is being made, so that a batch that takes longer than others delays no step.
PREFETCHED_BATCHES = 2


def rank_counts(cluster: ClusterSpec, search: SearchSpec) -> tuple[int, ...]:
    """Return the numbers of ranks to try: those that were asked for, else powers of two and all devices."""
    if search.num_ranks:
        return tuple(sorted(set(search.num_ranks)))
    devices = cluster.num_devices
    return tuple(sorted({2**power for power in range(devices.bit_length()) if 2**power <= devices} | {devices}))


def candidates(
    model: ModelSpec,
    cluster: ClusterSpec,
    search: SearchSpec,
    partition: Callable[[int], PartitionSpec],
    sampled: Callable[[int], SampledBatches] | None = None,
) -> Iterator[Plan]:
    """Yield every plan of the search space, legal or not, those on fewer ranks first.

    Layers are alike: each plan has one exchange and one recompute choice for all of them.

    Args:
        partition: gives the cut into so many parts; it is asked only for cuts that some candidate needs.
        sampled: gives the sampled batches of so many replicas; needed where the search names them.
    """
    for num_ranks in rank_counts(cluster, search):
        for batches in _batches(num_ranks, search, cluster):
            cut = partition(batches.num_parts)
            exchanges = search.exchanges if batches.graph_parallel_degree > 1 else (Exchange.NONE,)
            is_full_graph = batches.kind is BatchKind.FULL_GRAPH
            step_mode = step_mode_of(num_ranks=num_ranks, is_full_graph=is_full_graph, cluster=cluster)
            replicas = num_ranks // batches.graph_parallel_degree
            for exchange in exchanges:
                for recompute in search.recomputes:
                    for precision in search.precisions:
                        yield Plan(
                            data_parallel_degree=replicas,
                            graph_parallel_degree=batches.graph_parallel_degree,
                            partition=cut,
                            parts_per_batch=batches.parts_per_batch,
                            exchange=(exchange,) * model.num_layers,
                            recompute=(recompute,) * model.num_layers,
                            precision=precision,
                            step_mode=step_mode,
                            between_edges=batches.kind is not BatchKind.ISOLATED_CLUSTERS,
                            sampled=sampled(replicas) if sampled and batches.kind is BatchKind.SAMPLED else None,
                            keep_batches=batches.are_kept,
                            prefetch_batches=batches.num_prefetched,
                        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batches:
    """What candidates train on in a step.

    Attributes:
        num_parts: of the graph.
        are_kept, num_prefetched: as in `Plan`.
    """

    kind: BatchKind
    graph_parallel_degree: int
    num_parts: int
    parts_per_batch: int
    are_kept: bool = False
    num_prefetched: int = 0


def _batches(num_ranks: int, search: SearchSpec, cluster: ClusterSpec) -> Iterator[_Batches]:
    """Yield the batches that so many ranks may train on."""
    # A core that makes a batch does nothing else meanwhile.
    num_prefetched = PREFETCHED_BATCHES if cluster.device.kind is DeviceKind.CUDA else 0
    for kind in BatchKind:
        if kind not in search.batches:
            continue
        match kind:
            case BatchKind.FULL_GRAPH:
                yield _Batches(
                    kind=kind, graph_parallel_degree=num_ranks, num_parts=num_ranks, parts_per_batch=num_ranks
                )
            case BatchKind.SAMPLED:
                yield _Batches(
                    kind=kind,
                    graph_parallel_degree=1,
                    num_parts=num_ranks,
                    parts_per_batch=num_ranks,
                    num_prefetched=num_prefetched,
                )
            case BatchKind.CLUSTERS | BatchKind.ISOLATED_CLUSTERS:
                yield from _cluster_batches(kind, num_ranks, search, num_prefetched)
            case _:
                assert_never(kind)


def _cluster_batches(kind: BatchKind, num_ranks: int, search: SearchSpec, num_prefetched: int) -> Iterator[_Batches]:
    """Yield cluster batches; those that can be kept on the device are, and then are not, in case they do not fit."""
    num_parts = num_ranks * search.parts_per_replica
    degrees = range(1, num_ranks + 1) if kind is BatchKind.CLUSTERS else (1,)
    for degree in degrees:
        parts_per_batch = degree if degree > 1 else search.parts_per_batch
        is_whole = num_parts == parts_per_batch and kind is BatchKind.CLUSTERS
        if num_ranks % degree or is_whole:
            continue
        for are_kept in (True, False) if parts_per_batch == 1 else (False,):
            yield _Batches(
                kind=kind,
                graph_parallel_degree=degree,
                num_parts=num_parts,
                parts_per_batch=parts_per_batch,
                are_kept=are_kept,
                num_prefetched=0 if are_kept else num_prefetched,
            )
