"""Lowers graph, model and plan to a Program.

What is lowered here is what `executor/` runs: same names, shapes and bytes, which `tests/conformance` checks.
"""

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from simulator.exchange_tasks import AttentionLowering, EdgeCounts, GroupWork, HostWork, Operation, ServedPart, same
from simulator.exchanges import rank_columns
from simulator.gradients import LOSS_TASK, PARAMETER_BYTES, ReductionSchedule, ReductionTask, reduction_schedule
from simulator.likeness import replicas_that_stand_for_others
from simulator.pipeline import LOSS_SUM, Action, output_name, rank_actions
from simulator.recompute import WHOLE_ATTENTION, made_again
from simulator.saved import offloaded_bytes
from simulator.sharding import REST, Shapes, share_elements, stage_shapes, tensor_shapes, units_of
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.graph import GraphSpec
from simulator.specs.model import NUM_DEGREE_BUCKETS, EdgeBias, ModelSpec
from simulator.specs.plan import (
    Exchange,
    ParameterSharding,
    Plan,
    Recompute,
    SampledBatches,
    SampledLayer,
    batch_parts,
    seed_ranges,
)
from simulator.specs.program import (
    ATTENTIONS,
    Phase,
    Program,
    SharedTasks,
    Stream,
    Task,
    TaskKind,
    stream_of,
    task_name,
)
from simulator.specs.shares import PartShares
from simulator.specs.units import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class RankWork:
    """How much of the graph one rank holds in one step.

    Attributes:
        num_rows: nodes that it owns.
        num_edges: edges into them from nodes of its batch.
        num_edges_of_long_targets: of these edges, those of targets with more than `MAX_SHORT_EDGES` of them.
        num_edges_of_long_sources: those of sources with more than so many.
        num_feature_entries: stored entries of their sparse features.
        num_train_rows: of its nodes, those that the loss uses.
        rows_to: rows that it sends to each rank of its graph group in a halo exchange.
        rows_from: rows that it receives from each.
        max_rows: owned nodes of the largest rank of its group.
        group: the same and more, as exchanges need it.
        sampled: of a batch of sampled neighbourhoods, the counts of each layer; `num_rows` are the first one's sources.
    """

    num_rows: int
    num_edges: int
    num_edges_of_long_targets: int
    num_edges_of_long_sources: int
    num_feature_entries: int
    num_train_rows: int
    rows_to: tuple[int, ...]
    rows_from: tuple[int, ...]
    max_rows: int
    group: GroupWork = field(default_factory=GroupWork)
    sampled: tuple[SampledLayer, ...] = ()

    @property
    def num_output_rows(self) -> int:
        """Rows that the last layer returns."""
        return self.sampled[-1].num_targets if self.sampled else self.num_rows

    def num_input_rows(self, layer: int) -> int:
        """Return how many rows a layer gets."""
        return self.sampled[layer].num_sources if self.sampled else self.num_rows

    def num_target_rows(self, layer: int) -> int:
        """Return how many rows a layer returns."""
        return self.sampled[layer].num_targets if self.sampled else self.num_rows

    def group_of(self, layer: int) -> GroupWork:
        """Return what a layer's exchange and attention need."""
        if not self.sampled:
            return self.group
        counts = self.sampled[layer]
        edges = EdgeCounts(
            num_edges=counts.num_edges,
            num_of_long_targets=counts.num_edges_of_long_targets,
            num_of_long_sources=counts.num_edges_of_long_sources,
        )
        return GroupWork(rows_by_rank=(counts.num_sources,), edges=edges, num_sampled_targets=counts.num_targets)

    def num_source_rows(self, exchange: Exchange) -> int:
        """Return how many rows of keys and values the rank attends to under an exchange."""
        match exchange:
            case Exchange.NONE:
                return self.num_rows
            case Exchange.HALO | Exchange.HIERARCHICAL_HALO:
                return self.num_rows + sum(self.rows_from)
            case Exchange.ALL_GATHER:
                return self.max_rows * len(self.rows_to)
            case Exchange.HEAD_ALL_TO_ALL:
                return self.group.num_group_rows


def rank_work(plan: Plan, *, step: int, seed: int) -> tuple[RankWork, ...]:
    """Return what each rank holds in a training step; of sampled batches, what is to be expected.

    Ranks that hold the same have one and the same object. Where a step has several micro-batches, what ranks hold of
    the first one is followed by what they hold of the next.
    """
    return tuple(
        work
        for micro_batch in range(plan.num_micro_batches)
        for work in _works_of_micro_batch(plan, micro_batch, step=step, seed=seed)
    )


def works_of_rank(plan: Plan, works: Sequence[RankWork], rank: int) -> tuple[RankWork, ...]:
    """Return what a rank holds of each micro-batch, from what `rank_work` says of all ranks."""
    return tuple(works[rank :: plan.num_ranks])


def _works_of_micro_batch(plan: Plan, micro_batch: int, *, step: int, seed: int) -> tuple[RankWork, ...]:
    if plan.sampled is not None:
        seeds = [end - first for first, end in seed_ranges(plan, step=step, micro_batch=micro_batch)]
        by_seeds = {count: _sampled_work(plan.sampled, count) for count in set(seeds)}
        return of_all_ranks(plan, [by_seeds[count] for count in seeds])
    batches = batch_parts(plan, step=step, seed=seed, micro_batch=micro_batch)
    by_batch = {batch: _works_of_batch(plan, batch) for batch in set(batches)}
    return of_all_ranks(plan, [work for batch in batches for work in by_batch[batch]])


def of_all_ranks(plan: Plan, works: Sequence[RankWork]) -> tuple[RankWork, ...]:
    """Return what each rank holds, from what each of those with rows of their own holds."""
    if plan.num_ranks == plan.num_row_ranks:
        return tuple(works)
    return tuple(works[plan.row_rank(rank)] for rank in range(plan.num_ranks))


def _works_of_batch(plan: Plan, batch: tuple[int, ...]) -> tuple[RankWork, ...]:
    """Return what each rank of a graph group holds of a batch."""
    if plan.partition.shares is not None:
        return tuple(_work_of_share(plan, plan.partition.shares, rank) for rank in range(plan.graph_parallel_degree))
    works = [_work_of_rank(plan, batch, rank) for rank in range(plan.graph_parallel_degree)]
    group = _group_of_batch(plan, batch, works)
    return tuple(replace(work, group=_group_work(plan, batch, rank, group, work)) for rank, work in enumerate(works))


def _sampled_work(sampled: SampledBatches, num_seeds: int) -> RankWork:
    """Return what a rank with so many seeds is expected to hold."""
    if num_seeds == 0:
        nothing = SampledLayer(
            num_sources=0, num_targets=0, num_edges=0, num_edges_of_long_targets=0, num_edges_of_long_sources=0
        )
        return work_of_sample((nothing,) * len(sampled.layers), num_feature_entries=0)
    last = replace(sampled.layers[-1], num_targets=num_seeds)
    return work_of_sample((*sampled.layers[:-1], last), num_feature_entries=sampled.num_feature_entries)


def work_of_sample(layers: tuple[SampledLayer, ...], *, num_feature_entries: int) -> RankWork:
    """Return what a rank holds whose batch has these layers; every seed is a node to train on."""
    return RankWork(
        num_rows=layers[0].num_sources,
        num_edges=sum(layer.num_edges for layer in layers),
        num_edges_of_long_targets=sum(layer.num_edges_of_long_targets for layer in layers),
        num_edges_of_long_sources=sum(layer.num_edges_of_long_sources for layer in layers),
        num_feature_entries=num_feature_entries,
        num_train_rows=layers[-1].num_targets,
        rows_to=(0,),
        rows_from=(0,),
        max_rows=layers[0].num_sources,
        sampled=layers,
    )


def owned_parts(plan: Plan, batch: tuple[int, ...], graph_rank: int) -> tuple[int, ...]:
    """Return the parts of a batch that one rank of a graph group owns; none at the end of an epoch."""
    if plan.graph_parallel_degree == 1:
        return batch
    return batch[graph_rank : graph_rank + 1]


def _work_of_rank(plan: Plan, batch: tuple[int, ...], graph_rank: int) -> RankWork:
    parts = plan.partition.parts
    mine = owned_parts(plan, batch, graph_rank)
    others = [owned_parts(plan, batch, other) for other in range(plan.graph_parallel_degree)]
    pairs = _joined(plan, mine, batch)
    return RankWork(
        num_rows=sum(parts[part].num_nodes for part in mine),
        num_edges=sum(parts[part].edges_from[source] for part, source in pairs),
        num_edges_of_long_targets=_edges_of_long_targets(plan, batch, mine),
        # Too few where edges join the parts of one rank: a source's edges into each of them count apart.
        num_edges_of_long_sources=sum(parts[part].edges_of_long_sources_from[source] for part, source in pairs),
        num_feature_entries=sum(parts[part].num_feature_entries for part in mine),
        num_train_rows=sum(parts[part].num_train_nodes for part in mine),
        # A graph group has one part a rank, so the halo of a pair of ranks is that of a pair of parts.
        rows_to=tuple(_halo_rows(plan, source=mine, target=other) for other in others),
        rows_from=tuple(_halo_rows(plan, source=other, target=mine) for other in others),
        max_rows=max(sum(parts[part].num_nodes for part in other) for other in others),
    )


def _group_of_batch(plan: Plan, batch: tuple[int, ...], works: Sequence[RankWork]) -> GroupWork:
    """Return what all ranks of a graph group have in common; the rest is that of no rank yet."""
    parts = plan.partition.parts
    owned = [owned_parts(plan, batch, rank) for rank in range(plan.graph_parallel_degree)]
    everything = _joined(plan, batch, batch)
    edges = _edge_counts(plan, everything, sum(_edges_of_long_targets(plan, batch, own) for own in owned))
    if plan.is_full_graph:
        edges = replace(edges, num_of_long_sources=sum(part.edges_out_of_long_sources for part in parts))
    return GroupWork(
        rows_by_rank=tuple(work.num_rows for work in works),
        max_pair_rows=max(max(work.rows_from) for work in works),
        group_edges=edges,
    )


def _group_work(plan: Plan, batch: tuple[int, ...], graph_rank: int, group: GroupWork, work: RankWork) -> GroupWork:
    """Return what a rank's exchanges move and what its attention then looks at.

    Args:
        group: of the batch.
        work: of the rank, the rest of which this is.
    """
    parts = plan.partition.parts
    mine = owned_parts(plan, batch, graph_rank)
    pairs = _joined(plan, mine, batch)
    outside = [(part, source) for part, source in pairs if source not in mine]
    outer_targets = sum(parts[part].edges_of_long_targets_from[source] for part, source in outside)
    inside = [(part, source) for part, source in pairs if source in mine]
    boundary_rows = sum(
        min(
            parts[part].num_boundary_nodes,
            sum(parts[part].boundary_nodes_from[source] for target, source in outside if target == part),
        )
        for part in mine
    )
    if plan.is_full_graph:
        outer_targets = sum(parts[part].outer_edges_of_long_targets for part in mine)
        boundary_rows = sum(parts[part].num_boundary_nodes for part in mine)
    return replace(
        group,
        graph_rank=graph_rank,
        rows_to=work.rows_to,
        rows_from=work.rows_from,
        num_boundary_rows=boundary_rows,
        edges=_edge_counts(plan, inside + outside, _edges_of_long_targets(plan, batch, mine)),
        inner_edges=_edge_counts(plan, inside, sum(parts[part].inner_edges_of_long_targets for part in mine)),
        outer_edges=_edge_counts(plan, outside, outer_targets),
        host=_host_work(plan, graph_rank),
    )


def _work_of_share(plan: Plan, shares: PartShares, rank: int) -> RankWork:
    """Return what a rank of the full graph holds that may serve a part with others: its rows, and the part's edges."""
    part_index = shares.part_by_rank[rank]
    part, mates = plan.partition.parts[part_index], shares.ranks_of(part_index)
    ranks = range(shares.num_ranks)
    edges = EdgeCounts(
        num_edges=part.num_edges,
        num_of_long_targets=sum(part.edges_of_long_targets_from),
        num_of_long_sources=sum(part.edges_of_long_sources_from),
    )
    group = GroupWork(
        graph_rank=rank,
        rows_by_rank=shares.num_nodes,
        rows_to=tuple(shares.rows_between(rank, other) for other in ranks),
        rows_from=tuple(shares.rows_between(other, rank) for other in ranks),
        edges=edges,
        served=ServedPart(ranks=mates, part_ranks=shares.part_ranks, num_rows=part.num_nodes),
    )
    return RankWork(
        num_rows=shares.num_nodes[rank],
        num_edges=edges.num_edges,
        num_edges_of_long_targets=edges.num_of_long_targets,
        num_edges_of_long_sources=edges.num_of_long_sources,
        num_feature_entries=shares.num_feature_entries[rank],
        num_train_rows=shares.num_train_nodes[rank],
        rows_to=group.rows_to,
        rows_from=group.rows_from,
        max_rows=max(shares.num_nodes),
        group=group,
    )


def _host_work(plan: Plan, rank: int) -> HostWork | None:
    """Return what a rank moves in a hierarchical exchange, which only full graphs have; None without one."""
    if plan.ranks_per_host is None or not plan.is_full_graph:
        return None
    hosts = plan.partition.hosts
    assert hosts is not None
    ranks = hosts.ranks_of_host(rank)
    return HostWork(
        ranks=ranks,
        rows_to=tuple(rows[rank] for rows in hosts.rows_from),
        rows_from=hosts.rows_from[rank],
        passed_to=tuple(hosts.passed_rows_from[other][rank] for other in ranks),
        passed_from=tuple(hosts.passed_rows_from[rank][other] for other in ranks),
    )


def _joined(plan: Plan, targets: Sequence[int], batch: Sequence[int]) -> list[tuple[int, int]]:
    """Return the pairs of a target's and a source's part between which a batch keeps the edges."""
    return [(part, source) for part in targets for source in (batch if plan.between_edges else (part,))]


def _edge_counts(plan: Plan, pairs: Sequence[tuple[int, int]], num_of_long_targets: int) -> EdgeCounts:
    """Return the edges of pairs of a target's and a source's part; long sources are so in a target's part alone."""
    parts = plan.partition.parts
    return EdgeCounts(
        num_edges=sum(parts[target].edges_from[source] for target, source in pairs),
        num_of_long_targets=num_of_long_targets,
        num_of_long_sources=sum(parts[target].edges_of_long_sources_from[source] for target, source in pairs),
    )


def _edges_of_long_targets(plan: Plan, batch: tuple[int, ...], mine: tuple[int, ...]) -> int:
    """Return the edges of long targets, exact in the full graph and where no edges join the parts of a batch.

    In other batches a target counts as long that is so in the whole graph, which gives a few too many.
    """
    parts = plan.partition.parts
    if len(batch) == 1 or not plan.between_edges:
        return sum(parts[part].inner_edges_of_long_targets for part in mine)
    return sum(parts[part].edges_of_long_targets_from[source] for part in mine for source in batch)


def beyond_cache_ratio_of(plan: Plan, shape: tuple[int, ...], cluster: ClusterSpec) -> float:
    """Return which share of the rows that an attention of a shape gathers comes from beyond the device's cache.

    Where the plan does not say, it is what edges with sources at random would have; all if the cache is not known.
    """
    if plan.beyond_cache_ratio is not None:
        return plan.beyond_cache_ratio
    _, sources, edges, _, _, heads, head_size = shape
    cache_rows = cluster.device.cache_bytes / (2 * heads * head_size * plan.precision.num_bytes)
    if cache_rows == 0 or edges == 0:
        return 1.0
    # Each row that is read at all comes from beyond the cache once.
    rows_read = sources * -math.expm1(-edges / sources)
    return min(max(1 - cache_rows / sources, rows_read / edges), 1.0)


def _halo_rows(plan: Plan, *, source: tuple[int, ...], target: tuple[int, ...]) -> int:
    if source == target:
        return 0
    return sum(plan.partition.parts[part].halo_rows_from[other] for part in target for other in source)


def num_input_columns(graph: GraphSpec, model: ModelSpec) -> int:
    """Return the columns of the dense input; encodings join the features unless those are sparse."""
    return model.num_encodings if graph.has_sparse_features else graph.num_features + model.num_encodings


def parameter_shapes(graph: GraphSpec, model: ModelSpec) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return name and shape of every parameter, in the order in which the executor registers them."""
    width = model.width
    shapes: list[tuple[str, tuple[int, ...]]] = []

    def linear(name: str, columns_in: int, columns_out: int) -> None:
        shapes.extend([(f"{name}.weight", (columns_out, columns_in)), (f"{name}.bias", (columns_out,))])

    def norm(name: str) -> None:
        shapes.extend([(f"{name}.weight", (width,)), (f"{name}.bias", (width,))])

    if graph.has_sparse_features:
        shapes.append(("input.features", (graph.num_features, width)))
    if num_input_columns(graph, model):
        linear("input.linear", num_input_columns(graph, model), width)
    for index in range(model.num_layers):
        layer = f"layer{index}"
        if model.edge_bias is EdgeBias.DEGREE:
            shapes.append((f"{layer}.edge_bias", (NUM_DEGREE_BUCKETS, model.num_heads)))
        norm(f"{layer}.attention_norm")
        shapes.append((f"{layer}.query_key_value.weight", (3 * width, width)))
        linear(f"{layer}.attention_output", width, width)
        norm(f"{layer}.feed_forward_norm")
        linear(f"{layer}.feed_forward_up", width, model.feed_forward_width)
        linear(f"{layer}.feed_forward_down", model.feed_forward_width, width)
    norm("head.norm")
    linear("head.linear", width, graph.num_classes)
    return tuple(shapes)


def rank_parameter_shapes(plan: Plan, graph: GraphSpec, model: ModelSpec, rank: int = 0) -> Shapes:
    """Return name and shape of what a rank computes with of every parameter of its stages."""
    shapes = parameter_shapes(graph, model)
    return tensor_shapes(plan, stage_shapes(plan, shapes, plan.pipeline_rank(rank)))


def num_updated(plan: Plan, graph: GraphSpec, model: ModelSpec, rank: int) -> int:
    """Return the numbers of parameters that a rank updates: all that it computes with, or its share of them."""
    shapes = rank_parameter_shapes(plan, graph, model, rank)
    if plan.shares_out:
        return share_elements(shapes, plan.num_row_ranks, plan.row_rank(rank))
    return sum(math.prod(shape) for _, shape in shapes)


def num_parameters(graph: GraphSpec, model: ModelSpec) -> int:
    """Return the numbers that the optimizer updates, of all ranks together."""
    return sum(math.prod(shape) for _, shape in parameter_shapes(graph, model))


def gradient_reductions(
    plan: Plan, graph: GraphSpec, model: ModelSpec, operations: Collection[str], rank: int = 0
) -> ReductionSchedule:
    """Return in which order a rank whose step has these operations issues the reductions of its gradients."""
    return reduction_schedule(
        rank_parameter_shapes(plan, graph, model, rank),
        operations,
        bucket_bytes=plan.gradient_bucket_bytes,
        compression=plan.gradient_compression,
        overlaps=plan.overlap_gradients,
        num_ranks=1 if plan.shares_out else plan.num_row_ranks,
    )


def lower(
    plan: Plan,
    graph: GraphSpec,
    model: ModelSpec,
    cluster: ClusterSpec,
    *,
    step: int = 0,
    seed: int = 0,
    works: Sequence[RankWork] | None = None,
    alike_ratio: float = 0.0,
) -> Program:
    """Return the tasks of every rank in one training step; replicas that hold the same share them.

    Args:
        step: which step; batches differ from step to step.
        seed: `TrainSpec.seed`, which orders the batches.
        works: what each rank holds, in the order of `rank_work`, where that is known better than by it: of samples that
            were drawn. Then the batch that is made in the step is of the same size.
        alike_ratio: replicas whose counts differ by no more than this share run the tasks of the first of them.
    """
    is_other = works is None and plan.loads_batches and plan.prefetch_batches > 0
    works = works or rank_work(plan, step=step, seed=seed)
    made = rank_work(plan, step=step + plan.prefetch_batches, seed=seed) if is_other else works
    held, made_by_rank = ([works_of_rank(plan, each, rank) for rank in range(plan.num_ranks)] for each in (works, made))
    held, made_by_rank = _of_replicas_alike(held, made_by_rank, plan.num_replica_ranks, alike_ratio)
    number_of: dict[tuple[tuple[int, ...], int, int], int] = {}  # by identity of what is held, place in replica, share
    first_ranks: list[int] = []
    list_of_rank: list[int] = []
    for rank, all_works in enumerate(zip(held, made_by_rank, strict=True)):
        share = num_updated(plan, graph, model, rank) if plan.shares_out else 0
        identity = tuple(id(work) for each in all_works for work in each)
        key = (identity, rank % plan.num_replica_ranks, share)
        if key not in number_of:
            number_of[key] = len(first_ranks)
            first_ranks.append(rank)
        list_of_rank.append(number_of[key])
    schedules: dict[tuple[str, ...], ReductionSchedule] = {}
    lists = tuple(
        _RankLowering(
            plan=plan,
            graph=graph,
            model=model,
            cluster=cluster,
            works=held[rank],
            made_works=made_by_rank[rank],
            rank=rank,
            schedules=schedules,
            blocks_host=cluster.device.kind is DeviceKind.CPU,
        ).tasks_of_step()
        for rank in first_ranks
    )
    shifts = tuple(rank - first_ranks[number] for rank, number in enumerate(list_of_rank))
    return Program(tasks=SharedTasks(lists=lists, list_of_rank=tuple(list_of_rank), shift_of_rank=shifts))


def _of_replicas_alike(
    works: list[tuple[RankWork, ...]], made: list[tuple[RankWork, ...]], degree: int, ratio: float
) -> tuple[list[tuple[RankWork, ...]], list[tuple[RankWork, ...]]]:
    """Return what each rank holds and makes, in replicas that are like another what that one's do."""
    first_ranks = range(0, len(works), degree)
    held = [(works[first : first + degree], made[first : first + degree]) for first in first_ranks]
    firsts = replicas_that_stand_for_others(held, ratio)
    ranks = [degree * first + rank for first in firsts for rank in range(degree)]
    return [works[rank] for rank in ranks], [made[rank] for rank in ranks]


def batch_task_shape(
    plan: Plan, graph: GraphSpec, model: ModelSpec, work: RankWork, *, has_features: bool = True
) -> tuple[int, ...]:
    """Return the shape of the task that makes a rank's batch.

    Args:
        has_features: whether the rank has the first stage, which alone needs features.
    """
    num_features = (work.num_rows * num_input_columns(graph, model) + work.num_feature_entries) * has_features
    first = graph.num_nodes if plan.sampled is None else work.num_output_rows
    exchanges = set(plan.exchange)
    num_edges = work.num_edges * bool(exchanges - {Exchange.HEAD_ALL_TO_ALL})
    num_edges += work.group.group_edges.num_edges * (Exchange.HEAD_ALL_TO_ALL in exchanges)
    return first, work.num_rows, num_edges, num_features


# The host reads what was copied to it, and computes; on GPUs it launches all else ahead.
_HOST_WAITS_FOR = frozenset({TaskKind.COPY_TO_HOST, TaskKind.HOST_OPTIMIZER})


def _whole_attention(operations: Sequence[Operation], name: str) -> Operation | None:
    """Return attention over all edges of an overlapped layer, as it runs again; None where that is not asked for."""
    passes = [operation for operation in operations if operation.backward_kind is TaskKind.ATTENTION_SOURCES]
    if name != "attention" or not passes:
        return None
    layer = passes[0].name.removesuffix(".attention_sources")
    return same(f"{layer}.{WHOLE_ATTENTION}", TaskKind.ATTENTION, passes[0].backward_shape)


@dataclass(slots=True, kw_only=True)
class _RankLowering:
    """Collects the tasks of one rank in program order."""

    plan: Plan
    graph: GraphSpec
    model: ModelSpec
    cluster: ClusterSpec
    works: tuple[RankWork, ...]  # of each micro-batch
    made_works: tuple[RankWork, ...]
    rank: int
    schedules: dict[tuple[str, ...], ReductionSchedule]  # of all ranks so far, by operations
    blocks_host: bool
    tasks: list[Task] = field(default_factory=list)
    work: RankWork = field(init=False)  # of the micro-batch under way
    _scope: str = ""  # what the names of its tasks begin with
    _reductions: ReductionSchedule = field(init=False)
    _previous: int | None = None  # the latest task that is no reduction beside the others
    _beside: dict[str, int] = field(default_factory=dict)  # those reductions, by name
    _awaited: set[int] = field(default_factory=set)  # copies and messages that the next task waits for
    _arrivals: dict[int, list[int]] = field(default_factory=dict)  # copies back, by layer
    _in_flight: list[int] = field(default_factory=list)  # collectives that no later task has waited for yet
    _messages: dict[Action, tuple[int, ...]] = field(default_factory=dict)  # with which passes begin
    _sent: dict[Stream, int] = field(default_factory=dict)  # the latest message to another stage on each stream
    _graph_group: tuple[int, ...] = field(init=False)
    _tensor_group: tuple[int, ...] = field(init=False)
    _gradient_group: tuple[int, ...] = field(init=False)
    _units: dict[str, int] = field(default_factory=dict)  # of parameters that are shared out, the size of a share
    _of_unit: dict[str, int] = field(default_factory=dict)  # the latest gather, unpacking or sum of each, by name

    def __post_init__(self) -> None:
        self._graph_group = self.plan.graph_group(self.rank)
        self._tensor_group = self.plan.tensor_group(self.rank)
        self._gradient_group = self.plan.gradient_group(self.rank)
        if self.plan.shares_out:
            units = units_of(rank_parameter_shapes(self.plan, self.graph, self.model))
            self._units = {name: share_elements(shapes, self.plan.num_row_ranks) for name, shapes in units.items()}

    def tasks_of_step(self) -> tuple[Task, ...]:
        """Return batch, forward, backward and update of this rank."""
        self._add_batch()
        actions = rank_actions(self.plan, self.plan.pipeline_rank(self.rank))
        self._begin(actions[0])
        stages = self.plan.stages_of(self.plan.pipeline_rank(self.rank))
        operations = [operation for stage in stages for group in self._stage(stage) for operation in group]
        names = [operation.name for operation in operations if operation.backward_kind is not None]
        self._reductions = self._schedule(tuple(names))
        self._add_gather(REST, Phase.FORWARD)
        self._add_unpacking(REST, Phase.FORWARD)
        self._add_arrival(actions[0])
        for action, following in itertools.zip_longest(actions, actions[1:]):
            if following is not None:
                self._add_arrival(following)  # its message is on its way while this pass runs
            self._begin(action)
            self._awaited.update(self._messages.pop(action, ()))
            if action.phase is Phase.FORWARD:
                self._add_forward_pass(action.stage)
            else:
                self._add_backward_pass(action.stage)
        self._scope = ""
        self._add_scatter(REST)
        self._add_update()
        return tuple(self.tasks)

    def _begin(self, action: Action) -> None:
        """Turn to the micro-batch of a pass."""
        self.work = self.works[action.micro_batch]
        self._scope = action.scope if self.plan.cuts_steps else ""

    def _stage(self, stage: int) -> list[list[Operation]]:
        """Return what a stage runs: input if it is the first, each layer, head if it is the last."""
        layers = [self._layer(index) for index in self.plan.layers_of_stage(stage)]
        first = [self._input()] if stage == 0 else []
        return [*first, *layers, *([self._head()] if stage == self.plan.num_stages - 1 else [])]

    def _add_forward_pass(self, stage: int) -> None:
        layers = self.plan.layers_of_stage(stage)
        for operation in self._input() if stage == 0 else ():
            self._add_forward(operation, Phase.FORWARD)
        copied: list[int] = []  # of the layer before, whose memory is free once the next one has run
        for index in layers:
            self._add_gather(f"layer{index}", Phase.FORWARD, behind=f"unpack{index - 2}")
            self._add_unpacking(f"layer{index}", Phase.FORWARD)
            for operation in self._layer(index):
                self._add_forward(operation, Phase.FORWARD)
            self._awaited.update(copied)
            copied = self._add_copy(f"layer{index}.copy_out", TaskKind.COPY_TO_HOST, Phase.FORWARD, self._away(index))
        if stage == self.plan.num_stages - 1:
            for operation in self._head():
                if operation.name == "loss":
                    self._awaited.update(copied)
                self._add_forward(operation, Phase.FORWARD)
        else:
            self._add_sending(stage, stage + 1, Phase.FORWARD)

    def _add_backward_pass(self, stage: int) -> None:
        if stage == self.plan.num_stages - 1:
            self._add_reductions(self._reductions.before_backward())
            for operation in reversed(self._head()):
                self._add_backward(operation)
                if operation.kind is TaskKind.LOSS:
                    self._add_copy_in(self.model.num_layers - 1)
                    self._add_gather_ahead(self.model.num_layers - 1)
        for index in reversed(self.plan.layers_of_stage(stage)):
            if self.plan.shard_parameters is ParameterSharding.ZERO3:
                self._add_unpacking(f"layer{index}", Phase.BACKWARD)
                self._add_gather_ahead(index - 1)
            if index > 0:
                self._add_copy_in(index - 1)
            self._add_backward_of_layer(index, self._layer(index))
            self._add_scatter(f"layer{index}")
        if stage > 0:
            self._add_sending(stage, stage - 1, Phase.BACKWARD)
            return
        for operation in reversed(self._input()):
            self._add_backward(operation)

    def _away(self, layer: int) -> int:
        return offloaded_bytes(self.plan, self.model, self.work, layer, self.cluster.device.kind)

    def _add_copy_in(self, layer: int) -> None:
        """Add the copies back of what a layer keeps on the host, while the one behind it runs backward."""
        name = f"layer{layer}.copy_in"
        self._arrivals[layer] = self._add_copy(name, TaskKind.COPY_FROM_HOST, Phase.BACKWARD, self._away(layer))

    def _add_copy(self, base: str, kind: TaskKind, phase: Phase, num_bytes: int) -> list[int]:
        """Add copies that go on beside later tasks, if there is anything to copy; return where they are."""
        if num_bytes == 0:
            return []
        previous = () if self._previous is None else (self._previous,)
        task = Task(
            name=task_name(base, phase),
            kind=kind,
            phase=phase,
            shape=(num_bytes,),
            dtype=Dtype.FLOAT32,
            stream=stream_of(kind),
            waits_for=tuple(index for index in previous if self.tasks[index].stream is not stream_of(kind)),
            blocks_host=self.blocks_host,
        )
        self.tasks.append(task)
        return [len(self.tasks) - 1]

    def _add_backward_of_layer(self, index: int, operations: list[Operation]) -> None:
        """Add a layer's backward pass with what is computed again in it, where it is first needed."""
        backward, done = list(reversed(operations)), set[str]()
        # The last task, a sum, saved nothing; the one before it asks for what it saved.
        self._add_backward(backward.pop(0))
        while backward[0].kind in (TaskKind.BIAS, TaskKind.ALL_REDUCE):  # nor did these
            self._add_backward(backward.pop(0))
        self._awaited.update(self._arrivals.get(index, ()))
        if self.plan.recompute[index] is Recompute.LAYER:
            for operation in operations:
                self._add_forward(operation, Phase.RECOMPUTE)
        forward = {operation.name: operation for operation in operations if operation.kind is not None}
        for operation in backward:
            if operation.backward_kind is None:
                continue
            for name in made_again(self.plan, index, operation.name.removeprefix(f"layer{index}."), done):
                done.add(name)
                again = forward.get(f"layer{index}.{name}") or _whole_attention(operations, name)
                if again is not None:  # a rank may have no heads, and a model no biases
                    self._add_forward(again, Phase.RECOMPUTE)
            self._add_backward(operation)

    def _add_arrival(self, action: Action) -> None:
        """Add the message with which a pass begins, if there is one; others run while it is on its way."""
        source = action.source(self.plan.num_stages)
        if source is not None:
            self._begin(action)
            waits_for = () if self._previous is None else (self._previous,)
            self._messages[action] = (len(self.tasks),)
            self._add_message(TaskKind.RECEIVE, (source, action.stage), action.phase, Stream.RECEIVED, waits_for)

    def _add_sending(self, source: int, target: int, phase: Phase) -> None:
        """Add what one stage sends to another: forward the rows between them, backward their gradients."""
        stream = Stream.SENT_ACTIVATIONS if phase is Phase.FORWARD else Stream.SENT_GRADIENTS
        assert self._previous is not None, "a stage computes what it sends"
        self._sent[stream] = len(self.tasks)
        self._add_message(TaskKind.SEND, (source, target), phase, stream, (self._previous,))

    def _add_message(
        self, kind: TaskKind, stages: tuple[int, int], phase: Phase, stream: Stream, waits_for: tuple[int, ...]
    ) -> None:
        earlier = min(stages)
        rows = self.work.num_input_rows(self.plan.layers_of_stage(earlier + 1)[0])
        self.tasks.append(
            Task(
                name=self._scope + task_name(output_name(earlier), phase),
                kind=kind,
                phase=phase,
                shape=(rows * self.model.width * self.plan.precision.num_bytes,),
                dtype=self.plan.precision,
                stream=stream,
                waits_for=waits_for,
                group=self.plan.stage_group(self.rank, *stages),
            )
        )

    def _schedule(self, operations: tuple[str, ...]) -> ReductionSchedule:
        """Return a fresh schedule of reductions; ranks with the same operations have the same."""
        if operations not in self.schedules:
            found = gradient_reductions(self.plan, self.graph, self.model, operations, self.rank)
            self.schedules[operations] = found
        return replace(self.schedules[operations])

    def _add_batch(self) -> None:
        """Add the task that makes a batch: of this step, or of a later one, which nothing here waits for."""
        plan = self.plan
        if not plan.loads_batches:
            return
        kind = TaskKind.CLUSTER_BATCH if plan.sampled is None else TaskKind.SAMPLED_BATCH
        has_features = plan.pipeline_rank(self.rank) == 0
        shapes = [
            batch_task_shape(plan, self.graph, self.model, work, has_features=has_features) for work in self.made_works
        ]
        shape = tuple(map(sum, zip(*shapes, strict=True)))
        task = Task(
            name="batch",
            kind=kind,
            phase=Phase.FORWARD,
            shape=shape,
            dtype=plan.precision,
            stream=stream_of(kind),
            blocks_host=plan.prefetch_batches == 0,
        )
        self.tasks.append(task)  # no task waits for it: the host does, or it is of a later step

    def _input(self) -> list[Operation]:
        rows, width = self.work.num_rows, self.model.width
        found = []
        if columns := num_input_columns(self.graph, self.model):
            found.append(same("input.linear", TaskKind.INPUT_LINEAR, (rows, columns, width)))
        if self.graph.has_sparse_features:
            shape = (rows, self.work.num_feature_entries, self.graph.num_features, width)
            found.append(same("input.features", TaskKind.SPARSE_LINEAR, shape))
            if num_input_columns(self.graph, self.model):
                found.append(same("input.sum", TaskKind.RESIDUAL, (rows, width)))
        return [*found, *self._dropout("input.dropout", rows)]

    def _layer(self, index: int) -> list[Operation]:
        work, model, layer = self.work, self.model, f"layer{index}"
        input_rows, rows, width = work.num_input_rows(index), work.num_target_rows(index), model.width
        columns = model.feed_forward_width // self.plan.tensor_parallel_degree
        attention = AttentionLowering(
            plan=self.plan, model=model, work=work.group_of(index), layer=layer, exchange=self.plan.exchange[index]
        )
        return [
            same(f"{layer}.attention_norm", TaskKind.LAYER_NORM, (input_rows, width)),
            *self._before_columns(f"{layer}.query_key_value", input_rows),
            *attention.operations(),
            *self._from_columns(f"{layer}.attention_output", rows, rank_columns(self.plan, model)),
            *self._dropout(f"{layer}.attention_dropout", rows),
            same(f"{layer}.attention_residual", TaskKind.RESIDUAL, (rows, width)),
            same(f"{layer}.feed_forward_norm", TaskKind.LAYER_NORM, (rows, width)),
            *self._before_columns(f"{layer}.feed_forward_up", rows),
            same(f"{layer}.feed_forward_up", TaskKind.LINEAR, (rows, width, columns)),
            same(f"{layer}.feed_forward_activation", TaskKind.GELU, (rows, columns)),
            *self._from_columns(f"{layer}.feed_forward_down", rows, columns),
            *self._dropout(f"{layer}.feed_forward_dropout", rows),
            same(f"{layer}.feed_forward_residual", TaskKind.RESIDUAL, (rows, width)),
        ]

    def _before_columns(self, name: str, rows: int) -> list[Operation]:
        """Return what comes before a product that gives a rank's own columns: backward, gradients are summed."""
        return [] if len(self._tensor_group) == 1 else [self._reduce(name, rows, is_forward=False)]

    def _from_columns(self, name: str, rows: int, columns: int) -> list[Operation]:
        """Return a product that takes a rank's own columns; forward, what the ranks of them make is summed."""
        width = self.model.width
        if len(self._tensor_group) == 1:
            return [same(name, TaskKind.LINEAR, (rows, columns, width))]
        return [
            same(name, TaskKind.PROJECTION, (rows, columns, width)),
            self._reduce(name, rows, is_forward=True),
            same(f"{name}_bias", TaskKind.BIAS, (rows, width)),
        ]

    def _reduce(self, name: str, rows: int, *, is_forward: bool) -> Operation:
        """Return the sum of rows over the ranks that hold them, forward or backward."""
        shape = (rows * self.model.width * self.plan.precision.num_bytes,)
        return Operation(
            name=f"{name}.reduce",
            kind=TaskKind.ALL_REDUCE if is_forward else None,
            shape=shape if is_forward else (),
            backward_kind=None if is_forward else TaskKind.ALL_REDUCE,
            backward_shape=() if is_forward else shape,
            ranks=self._tensor_group,
        )

    def _head(self) -> list[Operation]:
        rows, classes = self.work.num_output_rows, self.graph.num_classes
        return [
            same("head.norm", TaskKind.LAYER_NORM, (rows, self.model.width)),
            same("head.linear", TaskKind.LINEAR, (rows, self.model.width, classes)),
            same("loss", TaskKind.LOSS, (rows, self.work.num_train_rows, classes)),
        ]

    def _dropout(self, name: str, rows: int) -> list[Operation]:
        if self.model.dropout_ratio == 0:
            return []
        return [same(name, TaskKind.DROPOUT, (rows, self.model.width))]

    def _add_update(self) -> None:
        num_tensors = len(rank_parameter_shapes(self.plan, self.graph, self.model, self.rank))
        self._add_reductions(self._reductions.rest())
        if self.plan.shares_out:
            self._add(LOSS_TASK, TaskKind.ALL_REDUCE, Phase.UPDATE, (PARAMETER_BYTES,), Dtype.FLOAT32)
        if self.plan.pipeline_parallel_degree > 1:
            ranks, shape = self.plan.mesh.group(("pp",), self.rank), (PARAMETER_BYTES,)
            behind = self._sent.values()
            self._add(LOSS_SUM, TaskKind.ALL_REDUCE, Phase.UPDATE, shape, Dtype.FLOAT32, ranks=ranks, behind=behind)
        update_shape = (num_updated(self.plan, self.graph, self.model, self.rank), num_tensors)
        # What goes on beside the others ends in order, so its last task stands for all.
        last = next(reversed(self._beside), "")
        self._add_clip(update_shape, last)
        if not self.plan.offload_optimizer:
            self._add("optimizer", TaskKind.OPTIMIZER, Phase.UPDATE, update_shape, Dtype.FLOAT32)
            return
        copied = (update_shape[0] * PARAMETER_BYTES,)
        self._add("optimizer.copy_out", TaskKind.COPY_TO_HOST, Phase.UPDATE, copied, Dtype.FLOAT32)
        self._add("optimizer", TaskKind.HOST_OPTIMIZER, Phase.UPDATE, update_shape, Dtype.FLOAT32)
        self._add("optimizer.copy_in", TaskKind.COPY_FROM_HOST, Phase.UPDATE, copied, Dtype.FLOAT32)

    def _add_clip(self, shape: tuple[int, ...], last: str) -> None:
        """Add the clipping of gradients; where ranks hold other numbers of them, they sum the squares of the norm.

        Args:
            last: name of the last reduction beside the others.
        """
        ranks = tuple(range(self.plan.num_ranks)) if self.plan.shares_out else self.plan.model_group(self.rank)
        if len(ranks) == 1:
            self._add("clip", TaskKind.CLIP, Phase.UPDATE, shape, Dtype.FLOAT32, result_of=last)
            return
        sums = [index for name, index in self._of_unit.items() if name.startswith("sum")]
        self._add("clip.norm", TaskKind.GRADIENT_NORM, Phase.UPDATE, shape, Dtype.FLOAT32, result_of=last, behind=sums)
        self._add("clip.reduce", TaskKind.ALL_REDUCE, Phase.UPDATE, (PARAMETER_BYTES,), Dtype.FLOAT32, ranks=ranks)
        self._add("clip", TaskKind.GRADIENT_SCALE, Phase.UPDATE, shape, Dtype.FLOAT32)

    # --- Parameters that are shared out. Packing a share and gathering go on beside other tasks, as does summing.

    def _add_gather(self, unit: str, phase: Phase, *, behind: str = "") -> None:
        """Add the gathering of a layer's parameters, or of those of input and head.

        Args:
            behind: name of what has to be done before, in `_of_unit`: memory of the layer before last is given up.
        """
        if unit not in self._units:
            return
        share, waits_for = self._units[unit], {self._of_unit[behind]} if behind in self._of_unit else set()
        index = self._add_apart(f"parameters.{unit}.pack", TaskKind.SHARD_COPY, phase, (1, share), waits_for)
        bytes_sent = (share * PARAMETER_BYTES,)
        self._of_unit[f"gather {unit}"] = self._add_apart(
            f"parameters.{unit}", TaskKind.ALL_GATHER, phase, bytes_sent, {index}
        )

    def _add_gather_ahead(self, index: int) -> None:
        """Add the gathering of a layer for its backward pass, if there is one, while a later layer's goes on."""
        if index >= 0 and self.plan.shard_parameters is ParameterSharding.ZERO3:
            self._add_gather(f"layer{index}", Phase.BACKWARD, behind=f"unpack{index + 1}")

    def _add_unpacking(self, unit: str, phase: Phase) -> None:
        """Add the copying of gathered parameters to where they are used."""
        if unit in self._units:
            self._of_unit[f"unpack{unit.removeprefix('layer')}"] = len(self.tasks)
            shape = (self.plan.num_row_ranks, self._units[unit])
            gathered = [self._of_unit[f"gather {unit}"]]
            self._add(f"parameters.{unit}.unpack", TaskKind.SHARD_COPY, phase, shape, Dtype.FLOAT32, behind=gathered)

    def _add_scatter(self, unit: str) -> None:
        """Add the sum of gradients of which each rank gets those of its share; one is on its way at a time."""
        if unit not in self._units:
            return
        ranks, share = self.plan.num_row_ranks, self._units[unit]
        before = [index for name, index in self._of_unit.items() if name.startswith("sum")]
        packed = len(self.tasks)
        pack_shape = (ranks, share)
        self._add(
            f"gradients.{unit}.pack",
            TaskKind.SHARD_COPY,
            Phase.UPDATE,
            pack_shape,
            Dtype.FLOAT32,
            behind=before[-1:],
        )
        bytes_sent = (ranks * share * PARAMETER_BYTES,)
        self._of_unit[f"sum {unit}"] = self._add_apart(
            f"gradients.{unit}", TaskKind.REDUCE_SCATTER, Phase.UPDATE, bytes_sent, {packed}
        )

    def _add_apart(
        self, base: str, kind: TaskKind, phase: Phase, shape: tuple[int, ...], waits_for: Collection[int]
    ) -> int:
        """Add a task on the stream of gradients that no later task waits for unless it says so; return its index."""
        waits_for = {index for index in waits_for if self.tasks[index].stream is not Stream.GRADIENTS}
        self.tasks.append(
            Task(
                name=task_name(base, phase),
                kind=kind,
                phase=phase,
                shape=shape,
                dtype=Dtype.FLOAT32,
                stream=Stream.GRADIENTS,
                waits_for=tuple(sorted(waits_for)),
                group=self._gradient_group if kind.is_collective else (),
                blocks_host=self.blocks_host,
            )
        )
        return len(self.tasks) - 1

    def _add_forward(self, operation: Operation, phase: Phase) -> None:
        if operation.kind is not None:
            self._add(
                operation.name,
                operation.kind,
                phase,
                operation.shape,
                operation.dtype or self.plan.precision,
                is_in_flight=operation.is_in_flight,
                joins=operation.joins,
                ranks=operation.ranks,
                receives=operation.receives,
            )

    def _add_backward(self, operation: Operation) -> None:
        if operation.backward_kind is not None:
            self._add(
                operation.name,
                operation.backward_kind,
                Phase.BACKWARD,
                operation.backward_shape,
                operation.dtype or self.plan.precision,
                is_in_flight=operation.backward_is_in_flight,
                joins=operation.backward_joins,
                ranks=operation.ranks,
                receives=operation.backward_receives,
            )
            for name in (operation.name,) if operation.gradients_of is None else operation.gradients_of:
                self._add_reductions(self._reductions.after_backward_of(name))

    def _add_reductions(self, reductions: Sequence[ReductionTask]) -> None:
        for task in reductions:
            self._add(task.name, task.kind, Phase.UPDATE, task.shape, task.dtype, result_of=task.waits_for)

    def _add(
        self,
        base: str,
        kind: TaskKind,
        phase: Phase,
        shape: tuple[int, ...],
        dtype: Dtype,
        *,
        result_of: str = "",
        is_in_flight: bool = False,
        joins: bool = False,
        ranks: tuple[int, ...] = (),
        receives: tuple[int, ...] = (),
        behind: Collection[int] = (),
    ) -> None:
        """Add a task behind the one before it, which none waits for that goes on beside the others.

        Args:
            result_of: name of a reduction beside the others that the task waits for.
            is_in_flight, joins, ranks, receives: as of an `Operation`.
            behind: indices of tasks that it waits for.
        """
        stream = stream_of(kind)
        is_of_gradients = kind.is_collective and phase is Phase.UPDATE and not ranks
        is_beside = is_of_gradients and self.plan.overlap_gradients
        stream = Stream.GRADIENTS if is_beside else stream
        waits_for = {index for index in behind if self.tasks[index].stream is not stream}
        if result_of in self._beside:
            waits_for.add(self._beside[result_of])
        previous = self._previous
        if previous is not None and self.tasks[previous].stream is not stream and previous not in self._in_flight:
            waits_for.add(previous)
        waits_for.update(self._awaited)
        self._awaited.clear()
        if joins:
            waits_for.update(self._in_flight)
            self._in_flight.clear()
        if is_in_flight:
            self._in_flight.append(len(self.tasks))
        if is_beside:
            self._beside[base] = len(self.tasks)
        else:
            self._previous = len(self.tasks)
        group: tuple[int, ...] = ()
        if kind.is_collective:
            group = ranks or (self._gradient_group if is_of_gradients else self._graph_group)
        beyond_cache_ratio = None
        if kind in ATTENTIONS:
            beyond_cache_ratio = beyond_cache_ratio_of(self.plan, shape, self.cluster)
        self.tasks.append(
            Task(
                name=("" if phase is Phase.UPDATE else self._scope) + task_name(base, phase),
                kind=kind,
                phase=phase,
                shape=shape,
                dtype=dtype,
                stream=stream,
                waits_for=tuple(sorted(waits_for)),
                group=group,
                receives=receives,
                blocks_host=(self.blocks_host and not is_beside and not is_in_flight) or kind in _HOST_WAITS_FOR,
                beyond_cache_ratio=beyond_cache_ratio,
            )
        )
