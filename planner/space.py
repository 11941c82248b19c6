"""Yields candidate plans."""

from collections.abc import Callable, Iterator

from simulator.constraints import step_mode_of
from simulator.specs.cluster import ClusterSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, PartitionSpec, Plan
from simulator.specs.search import BatchKind, SearchSpec


def rank_counts(cluster: ClusterSpec, search: SearchSpec) -> tuple[int, ...]:
    """Return the numbers of ranks to try: those that were asked for, else powers of two and all devices."""
    if search.num_ranks:
        return tuple(sorted(set(search.num_ranks)))
    devices = cluster.num_devices
    return tuple(sorted({2**power for power in range(devices.bit_length()) if 2**power <= devices} | {devices}))


def candidates(
    model: ModelSpec, cluster: ClusterSpec, search: SearchSpec, partition: Callable[[int], PartitionSpec]
) -> Iterator[Plan]:
    """Yield every plan of the search space, legal or not, those on fewer ranks first.

    Layers are alike: each plan has one exchange and one recompute choice for all of them.

    Args:
        partition: gives the cut into so many parts; it is asked only for cuts that some candidate needs.
    """
    for num_ranks in rank_counts(cluster, search):
        for data_parallel_degree, graph_parallel_degree, num_parts in _meshes(num_ranks, search):
            cut = partition(num_parts)
            exchanges = search.exchanges if graph_parallel_degree > 1 else (Exchange.NONE,)
            is_full_graph = num_parts == graph_parallel_degree
            step_mode = step_mode_of(num_ranks=num_ranks, is_full_graph=is_full_graph, cluster=cluster)
            for exchange in exchanges:
                for recompute in search.recomputes:
                    for precision in search.precisions:
                        yield Plan(
                            data_parallel_degree=data_parallel_degree,
                            graph_parallel_degree=graph_parallel_degree,
                            partition=cut,
                            parts_per_batch=graph_parallel_degree,
                            exchange=(exchange,) * model.num_layers,
                            recompute=(recompute,) * model.num_layers,
                            precision=precision,
                            step_mode=step_mode,
                        )


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
