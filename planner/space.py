"""Yields candidate plans."""

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, assert_never

from planner.balance import balanced_stages
from planner.shares import part_loads, ranks_by_load
from simulator.constraints import step_mode_of, tensor_degree_fits
from simulator.gradients import gradient_buckets
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.gradients import GradientCompression
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec
from simulator.specs.plan import (
    ROW_EXCHANGES,
    Exchange,
    ExchangePayload,
    Offload,
    ParameterSharding,
    PartitionSpec,
    PipelineSchedule,
    Plan,
    Recompute,
    SampledBatches,
    StepMode,
)
from simulator.specs.search import BatchKind, SearchSpec
from simulator.specs.shares import PartShares
from simulator.specs.units import Dtype
from simulator.workload import parameter_shapes

_PLAIN_EXCHANGE: dict[str, Any] = {"exchange_precision": None}
# Made ahead: one waits while the next is being made, so that a batch that takes longer than others delays no step.
PREFETCHED_BATCHES = 2


def rank_counts(cluster: ClusterSpec, search: SearchSpec) -> tuple[int, ...]:
    """Return the numbers of ranks to try: those that were asked for, else powers of two and all devices."""
    if search.num_ranks:
        return tuple(sorted(set(search.num_ranks)))
    devices = cluster.num_devices
    return tuple(sorted({2**power for power in range(devices.bit_length()) if 2**power <= devices} | {devices}))


def tensor_degrees(num_ranks: int, model: ModelSpec, cluster: ClusterSpec, search: SearchSpec) -> tuple[int, ...]:
    """Return by how many of some ranks heads and feed-forward columns may be shared, each an even share."""
    most = cluster.devices_per_host if cluster.device.kind is DeviceKind.CUDA else 1
    asked = search.tensor_parallel_degrees or tuple(2**power for power in range(most.bit_length()))
    return tuple(
        degree for degree in sorted(set(asked)) if num_ranks % degree == 0 and tensor_degree_fits(degree, model)
    )


def candidates(
    graph: GraphSpec,
    model: ModelSpec,
    cluster: ClusterSpec,
    search: SearchSpec,
    partition: Callable[[int], PartitionSpec],
    sampled: Callable[[int], SampledBatches] | None = None,
    shared: Callable[[PartitionSpec, tuple[int, ...]], PartShares] | None = None,
    balance: Callable[[Plan, int], tuple[int, ...]] | None = None,
) -> Iterator[Plan]:
    """Yield every plan of the search space, legal or not, those on fewer ranks first.

    Layers are alike: each plan has one exchange and one recompute choice for all of them. Choices of how rows travel
    that an exchange does not have are not tried with it, nor a hierarchical exchange where no host's rows are counted.

    Args:
        partition: gives the cut into so many parts; it is asked only for cuts that some candidate needs.
        sampled: gives the sampled batches of so many batches a step; needed where the search names them.
        shared: gives what ranks own of a cut of which each part has so many; needed where the search names numbers of
            parts.
        balance: gives the layers of so many stages of a plan that has none; None for layers that cost the same.
    """
    meshes = (
        (num_ranks, degree, pipeline)
        for num_ranks in rank_counts(cluster, search)
        for degree in tensor_degrees(num_ranks, model, cluster, search)
        for pipeline in _pipelines(num_ranks // degree, model, search)
    )
    for num_ranks, tensor_degree, pipeline in meshes:
        num_row_ranks = num_ranks // (tensor_degree * pipeline.degree)
        reductions = list(_reductions(graph, model, cluster, search, num_row_ranks))
        for batches in _batches(num_row_ranks, search, cluster, shares_heads=tensor_degree > 1):
            replicas = num_row_ranks // batches.graph_parallel_degree
            cut = partition(batches.num_parts)
            is_full_graph = batches.kind is BatchKind.FULL_GRAPH
            step_mode = step_mode_of(num_ranks=num_ranks, is_full_graph=is_full_graph, cluster=cluster)
            if is_full_graph and pipeline.num_micro_batches > 1:
                continue
            has_shares = is_full_graph and batches.num_parts < num_row_ranks
            if has_shares:
                if pipeline.degree > 1:
                    continue
                assert shared is not None, "what ranks of shared parts own is counted in the graph"
                cut = replace(cut, shares=shared(cut, ranks_by_load(part_loads(cut.parts), num_row_ranks)))
            if pipeline.degree > 1 or pipeline.num_micro_batches > 1:
                step_mode = StepMode.EAGER
            is_plain = tensor_degree * pipeline.degree == 1 and not has_shares
            crosses_hosts = is_full_graph and cut.hosts is not None and is_plain
            exchanges = list(_exchanges(batches.graph_parallel_degree, search, crosses_hosts=crosses_hosts))
            if has_shares:
                exchanges = [(Exchange.HALO, dict(_PLAIN_EXCHANGE))]
            plain_cut = replace(cut, hosts=None)
            for (exchange, choices), memory, precision, reduction in itertools.product(
                exchanges, list(_memory_choices(search, model)), search.precisions, reductions
            ):
                if not _shortens(choices["exchange_precision"], precision):
                    continue
                if pipeline.cuts_steps and (reduction.overlaps or reduction.sharding is not ParameterSharding.NONE):
                    continue
                plan = Plan(
                    data_parallel_degree=replicas,
                    graph_parallel_degree=batches.graph_parallel_degree,
                    tensor_parallel_degree=tensor_degree,
                    shard_parameters=reduction.sharding,
                    partition=cut if exchange is Exchange.HIERARCHICAL_HALO else plain_cut,
                    parts_per_batch=batches.parts_per_batch,
                    exchange=(exchange,) * model.num_layers,
                    precision=precision,
                    gradient_bucket_bytes=reduction.bucket_bytes,
                    overlap_gradients=reduction.overlaps,
                    gradient_compression=reduction.compression,
                    **({"step_mode": step_mode} | memory),
                    between_edges=batches.kind is not BatchKind.ISOLATED_CLUSTERS,
                    num_micro_batches=pipeline.num_micro_batches,
                    sampled=sampled(replicas * pipeline.num_micro_batches)
                    if sampled and batches.kind is BatchKind.SAMPLED
                    else None,
                    keep_batches=batches.are_kept,
                    prefetch_batches=batches.num_prefetched,
                    **choices,
                )
                yield _in_stages(plan, pipeline, balance or _evenly)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pipeline:
    """How a candidate cuts layers and batches.

    Attributes:
        degree, schedule, num_micro_batches: as in `Plan`.
        stages_per_rank: more than one where they are interleaved.
    """

    degree: int = 1
    schedule: PipelineSchedule = PipelineSchedule.ONE_F_ONE_B
    stages_per_rank: int = 1
    num_micro_batches: int = 1

    @property
    def cuts_steps(self) -> bool:
        """Whether a step is several passes."""
        return self.degree > 1 or self.num_micro_batches > 1


def _pipelines(num_ranks: int, model: ModelSpec, search: SearchSpec) -> Iterator[_Pipeline]:
    """Yield the pipelines that so many ranks with the same heads may form, without stages first."""
    for degree, num_batches in itertools.product(
        sorted(set(search.pipeline_parallel_degrees)), sorted(set(search.num_micro_batches))
    ):
        if num_ranks % degree or degree > model.num_layers:
            continue
        if degree == 1:
            yield _Pipeline(num_micro_batches=num_batches)
            continue
        for schedule in search.pipeline_schedules:
            if schedule is not PipelineSchedule.INTERLEAVED:
                yield _Pipeline(degree=degree, schedule=schedule, num_micro_batches=num_batches)
                continue
            chunks = 2
            while chunks * degree <= model.num_layers and num_batches % degree == 0:
                yield _Pipeline(degree=degree, schedule=schedule, stages_per_rank=chunks, num_micro_batches=num_batches)
                chunks *= 2


def _in_stages(plan: Plan, pipeline: _Pipeline, balance: Callable[[Plan, int], tuple[int, ...]]) -> Plan:
    """Return a plan with the stages of a pipeline."""
    if pipeline.degree == 1:
        return plan
    return replace(
        plan,
        pipeline_parallel_degree=pipeline.degree,
        pipeline_schedule=pipeline.schedule,
        stages=balance(plan, pipeline.degree * pipeline.stages_per_rank),
    )


def _evenly(plan: Plan, num_stages: int) -> tuple[int, ...]:
    return balanced_stages([1.0] * len(plan.exchange), num_stages)


def _memory_choices(search: SearchSpec, model: ModelSpec) -> Iterator[dict[str, Any]]:
    """Yield what layers keep and where, in the order of the search's choices; only what is kept can lie on the host."""
    for on_host, offload, recompute in itertools.product(search.offload_optimizers, search.offloads, search.recomputes):
        is_away = offload is Offload.ACTIVATIONS
        if is_away and recompute is Recompute.LAYER:
            continue
        yield {
            "recompute": (recompute,) * model.num_layers,
            "offload": (offload,) * model.num_layers if is_away else (),
            "offload_optimizer": on_host,
            # Steps that go to the host are not replayed.
            **({"step_mode": StepMode.EAGER} if is_away or on_host else {}),
        }


def keeping_all(plan: Plan) -> Plan | None:
    """Return the plan that keeps all on the device, if this one is worth a try only where that one does not fit.

    A layer that is computed again as a whole is tried beside it: it is what a person would ask about.
    """
    plain = replace(plan, recompute=(Recompute.NONE,) * len(plan.recompute), offload=(), offload_optimizer=False)
    goes_away = bool(plan.offload) or plan.offload_optimizer
    is_between = any(kind not in (Recompute.NONE, Recompute.LAYER) for kind in plan.recompute)
    return replace(plain, step_mode=StepMode.EAGER) if goes_away or is_between else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reduction:
    """How a candidate reduces its gradients, and whether ranks share out what they update."""

    bucket_bytes: int
    overlaps: bool = False
    compression: GradientCompression = field(default_factory=GradientCompression)
    sharding: ParameterSharding = ParameterSharding.NONE


def _reductions(
    graph: GraphSpec, model: ModelSpec, cluster: ClusterSpec, search: SearchSpec, num_ranks: int
) -> Iterator[_Reduction]:
    """Yield the ways to reduce gradients, those that begin no sooner or send no other buckets than another left out.

    Args:
        num_ranks: over which they are summed.
    """
    sizes = sorted(search.gradient_bucket_bytes, reverse=True)
    if num_ranks == 1:
        yield _Reduction(bucket_bytes=sizes[0])
        return
    if ParameterSharding.NONE in search.parameter_shardings:
        yield from _bucket_reductions(graph, model, cluster, search)
    for sharding in search.parameter_shardings:
        if sharding is not ParameterSharding.NONE:
            yield _Reduction(bucket_bytes=sizes[0], sharding=sharding)


def _bucket_reductions(
    graph: GraphSpec, model: ModelSpec, cluster: ClusterSpec, search: SearchSpec
) -> Iterator[_Reduction]:
    """Yield the ways to reduce gradients in buckets."""
    sizes = sorted(search.gradient_bucket_bytes, reverse=True)
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
    if graph_parallel_degree == 1:
        yield Exchange.NONE, dict(_PLAIN_EXCHANGE)
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


def _batches(num_ranks: int, search: SearchSpec, cluster: ClusterSpec, *, shares_heads: bool) -> Iterator[_Batches]:
    """Yield the batches that so many ranks may train on.

    Args:
        shares_heads: other ranks hold the same rows with other heads, so that no part has ranks of its own for that.
    """
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
                for count in sorted(set(search.shared_part_counts), reverse=True):
                    if count < num_ranks and not shares_heads:
                        yield _Batches(
                            kind=kind, graph_parallel_degree=num_ranks, num_parts=count, parts_per_batch=count
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
