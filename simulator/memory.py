"""Peak bytes of each rank, and where they go."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.exchange_tasks import GroupWork, ServedPart
from simulator.exchanges import (
    head_counts,
    num_messages,
    payload_columns,
    rank_columns,
    rank_heads,
    rows_in_message,
    rows_per_message,
    wire_dtype,
)
from simulator.gradients import PARAMETER_BYTES, buckets_of, kept_bytes, passing_bytes
from simulator.pipeline import most_kept, rank_actions
from simulator.saved import (
    SCORE_BYTES,
    SavedTensor,
    attended,
    kept_tensors,
    offloaded_bytes,
    saved_tensors,
)
from simulator.sharding import REST, share_elements, units_of
from simulator.shares import heads_by_rank
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.graph import GraphSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import ROW_EXCHANGES, Exchange, ExchangePayload, ParameterSharding, Plan, Recompute
from simulator.specs.units import MIB, Dimension, format_quantity
from simulator.workload import (
    RankWork,
    num_input_columns,
    num_updated,
    rank_parameter_shapes,
    rank_work,
    works_of_rank,
)

INDEX_BYTES = 8  # torch's indices are int64
SOURCE_BYTES = 4  # of an edge by target, int32
EDGE_BYTES = 3 * 4  # source of an edge by target, and in the transpose its target and its place by target, int32
# Beside torch's allocator: CUDA context and NCCL buffers hold 2.5 GB on an H200 with torch 2.11 (DESIGN.md section 7);
# a process with torch, PyG and SciPy imported holds about 0.5 GB on a CPU (resident size before the first tensor).
CONTEXT_BYTES = {DeviceKind.CUDA: 2_500_000_000, DeviceKind.CPU: 500_000_000}

_PIECE_BYTES = 2 * MIB

RankMemory = tuple[tuple[str, int], ...]  # category and bytes


def peak_memory(
    plan: Plan, graph: GraphSpec, model: ModelSpec, cluster: ClusterSpec, *, steps: Sequence[int] = (0,), seed: int = 0
) -> tuple[RankMemory, ...]:
    """Return where each rank's bytes go at its peak, over the given steps and the evaluation between them.

    Args:
        steps: training steps to look at; cluster batches differ.
        seed: `TrainSpec.seed`, which orders the cluster batches.
    """
    by_step = [rank_work(plan, step=step, seed=seed) for step in steps]
    # By identity of what ranks hold, parts that they evaluate, and stages.
    known: dict[tuple[int, ...], RankMemory] = {}
    found = []
    for rank in range(plan.num_ranks):
        # Only the ranks that evaluate a part differ in the parts that they evaluate.
        evaluates = -1 if plan.is_full_graph else min(plan.row_rank(rank), plan.partition.num_parts)
        held = [works_of_rank(plan, works, rank) for works in by_step]
        key = (evaluates, plan.pipeline_rank(rank), *(id(work) for works in held for work in works))
        if key not in known:
            whole = _evaluation_work(plan, plan.row_rank(rank))
            candidates = [_rank_memory(plan, graph, model, cluster, works, whole, rank) for works in held]
            known[key] = max(candidates, key=total_bytes)
        found.append(known[key])
    return tuple(found)


def total_bytes(memory: RankMemory) -> int:
    """Return the sum over categories."""
    return sum(num_bytes for _, num_bytes in memory)


def allocated_bytes(memory: RankMemory) -> int:
    """Return what torch's allocator holds at the peak: all but the context beside it."""
    return sum(num_bytes for category, num_bytes in memory if category != "context")


def reserved_bytes(memory: RankMemory) -> int:
    """Return what torch's allocator holds of the device at the peak, in use or not.

    It takes memory in pieces of 2 MiB (`kLargeBuffer` and `kRoundLarge` of torch's CUDACachingAllocator); that pieces
    are cut up and lie idle is left out.
    """
    return -(-allocated_bytes(memory) // _PIECE_BYTES) * _PIECE_BYTES


def largest_category(plan_memory: Sequence[RankMemory]) -> str:
    """Return the category that takes most of the fullest rank."""
    fullest = max(plan_memory, key=total_bytes)
    return max(fullest, key=lambda pair: pair[1])[0]


def misfit(plan_memory: Sequence[RankMemory], cluster: ClusterSpec) -> str:
    """Return in a sentence why the fullest rank does not fit its device; empty if all fit."""
    rank = max(range(len(plan_memory)), key=lambda index: total_bytes(plan_memory[index]))
    need, have = total_bytes(plan_memory[rank]), cluster.device.memory_bytes
    if need <= have:
        return ""
    largest = sorted(plan_memory[rank], key=lambda pair: -pair[1])[:2]
    parts = " and ".join(f"{name} {format_quantity(num_bytes, Dimension.BYTES)}" for name, num_bytes in largest)
    need_text, have_text = (format_quantity(num_bytes, Dimension.BYTES) for num_bytes in (need, have))
    return f"rank {rank} needs {need_text} of {have_text}, most of it {parts}"


def _rank_memory(
    plan: Plan,
    graph: GraphSpec,
    model: ModelSpec,
    cluster: ClusterSpec,
    works: Sequence[RankWork],
    whole: RankWork,
    rank: int,
) -> RankMemory:
    """Return where a rank's bytes go.

    Args:
        works: of each micro-batch of a training step.
        whole: of an evaluation, which always runs on the whole graph.
    """
    stages = plan.stages_of(plan.pipeline_rank(rank))
    first_of_stages = plan.mesh.group(("pp",), 0)[plan.pipeline_rank(rank)]
    updated = num_updated(plan, graph, model, first_of_stages) * PARAMETER_BYTES
    whole_parameters, whole_gradients = _whole_bytes(plan, graph, model)
    kind = cluster.device.kind
    own_layers = [layer for stage in stages for layer in plan.layers_of_stage(stage)]
    by_work = [{layer: _LayerMemory.of(plan, model, work, layer, kind) for layer in own_layers} for work in works]

    def kept_bytes_of(stage: int, micro_batch: int) -> int:
        resident = sum(by_work[micro_batch][layer].resident for layer in plan.layers_of_stage(stage))
        return resident + _ends_bytes(plan, graph, model, works[micro_batch], stage)

    activations = most_kept(rank_actions(plan, plan.pipeline_rank(rank)), kept_bytes_of)
    exchanged = max(_message_bytes(plan, model, work, plan.exchange[layer]) for work in works for layer in own_layers)
    messages, workspace = _stage_message_bytes(plan, model, works, stages) + exchanged, 0
    for stage, (number, of_work) in itertools.product(stages, enumerate(by_work)):
        # A pass runs backward beside what the others keep; its head is done when its layers begin.
        layers = [of_work[layer] for layer in plan.layers_of_stage(stage)]
        most = max(layers[-1].away, _backward_peak(layers) - kept_bytes_of(stage, number))
        workspace = max(workspace, most - exchanged)  # messages of exchanges are part of the most
    exchange = Exchange.HALO if plan.num_row_ranks > 1 else Exchange.NONE
    # An evaluation of the whole graph overlaps nothing.
    alone = replace(plan, overlap_exchange=False)
    evaluation = 0 if plan.is_full_graph else _evaluation_bytes(alone, model, whole, exchange, kind)
    step = activations + workspace + messages
    compression = _compression_bytes(plan, graph, model, rank, other_bytes=max(step, evaluation))
    on_host = _host_bytes(plan, updated, [*by_work[0].values()]) if kind is DeviceKind.CPU else 0
    return (
        ("parameters", updated + whole_parameters),
        ("gradients", updated + whole_gradients),
        ("optimizer", 0 if plan.offload_optimizer else 2 * updated),
        ("inputs", _resident_input_bytes(plan, graph, model, works, whole, has_features=0 in stages)),
        ("activations", activations),
        ("workspace", workspace),
        ("messages", messages),
        ("evaluation", max(evaluation - step, 0)),
        *((("gradient compression", compression),) if compression else ()),
        *((("host copies", on_host),) if on_host else ()),
        ("context", CONTEXT_BYTES[cluster.device.kind]),
    )


def _ends_bytes(plan: Plan, graph: GraphSpec, model: ModelSpec, work: RankWork, stage: int) -> int:
    """Return what a stage's pass over a micro-batch keeps beside its layers."""
    # The mask of the input's dropout.
    found = work.num_rows * model.width * (model.dropout_ratio > 0) if stage == 0 else 0
    if stage == plan.num_stages - 1:
        return found + _head_bytes(plan, graph, model, work)
    return found + _output_bytes(plan, model, work, stage)


def _output_bytes(plan: Plan, model: ModelSpec, work: RankWork, stage: int) -> int:
    """Return the bytes that a stage sends to the next one for a micro-batch, or gets back."""
    return work.num_target_rows(plan.layers_of_stage(stage)[-1]) * model.width * _size(plan)


def _stage_message_bytes(plan: Plan, model: ModelSpec, works: Sequence[RankWork], stages: Sequence[int]) -> int:
    """Return what messages between stages take beside outputs.

    Gradients of what stages got are kept until the step ends, and one message comes while another is in use.
    """
    last = plan.num_stages - 1
    forward = [_output_bytes(plan, model, work, stage - 1) for work in works for stage in stages if stage > 0]
    backward = [_output_bytes(plan, model, work, stage) for work in works for stage in stages if stage < last]
    return sum(forward) + 2 * max([*forward, *backward], default=0)


def _whole_bytes(plan: Plan, graph: GraphSpec, model: ModelSpec) -> tuple[int, int]:
    """Return what whole parameters and gradients take beside shares, where these are all that stays.

    Those of input and head are there throughout. Of layers, either all parameters are kept for the backward pass, or
    those of the one under way are there with the message that brings the next one's; gradients of the one under way,
    and the message that takes those of the one before.
    """
    if not plan.shares_out:
        return 0, 0
    units = units_of(rank_parameter_shapes(plan, graph, model))
    sizes = {
        unit: plan.num_row_ranks * share_elements(shapes, plan.num_row_ranks) * PARAMETER_BYTES
        for unit, shapes in units.items()
    }
    rest = sizes.pop(REST)
    most = max(sizes.values())
    kept = sum(sizes.values()) if plan.shard_parameters is ParameterSharding.ZERO2 else 2 * most
    return rest + kept, rest + 2 * most


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerMemory:
    """What one layer takes on its device.

    Attributes:
        resident: kept from its forward to its backward pass.
        away: kept on the host meanwhile; on the device while the layer runs, and the ones beside it.
        late: of both, what the backward pass has freed when it reaches attention.
        ahead: beside what is kept, while the part behind attention runs backward: what is computed again, gradients.
        around: the same while attention runs backward, with the messages of its exchange.
    """

    resident: int
    away: int
    late: int
    ahead: int
    around: int

    @classmethod
    def of(cls, plan: Plan, model: ModelSpec, work: RankWork, layer: int, kind: DeviceKind) -> "_LayerMemory":
        """Return what a layer takes in a training step."""
        saved = saved_tensors(plan, model, work, layer, plan.exchange[layer], kind)
        kept = kept_tensors(plan, model, work, layer, kind)
        away = offloaded_bytes(plan, model, work, layer, kind)
        again = [each for each in saved if each not in kept]
        rows, size = work.num_target_rows(layer), _size(plan)
        hidden = model.feed_forward_width // plan.tensor_parallel_degree
        drops, is_whole = model.dropout_ratio > 0, plan.recompute[layer] is Recompute.LAYER
        # Random bits and what they are mixed from are int32: three of them at a time, beside what dropout returns; and
        # what the layer will not keep is still there: the activation, or when all of it runs again a gradient.
        beside = 0 if not again else model.width if is_whole else hidden
        dropout = drops * rows * (model.width * (3 * 4 + size) + beside * size)
        # Of the layer's output, through dropout, and of the activation.
        gradients = rows * ((1 + drops) * model.width + hidden) * size
        late = _made_together(plan, layer, [each for each in again if each.is_late], "feed_forward_up")
        early_again = [each for each in again if not each.is_late]
        early = _made_together(plan, layer, early_again, "query", "query_key_value")
        if plan.overlaps(layer):  # one node of autograd, whose tensors are all there at once
            early = sum(each.num_bytes for each in early_again)
        messages = _message_bytes(plan, model, work, plan.exchange[layer])
        return cls(
            resident=sum(each.num_bytes for each in kept) - away,
            away=away,
            late=sum(each.num_bytes for each in kept if each.is_late),
            ahead=max(late + is_whole * early + gradients, is_whole * (late + early) + dropout),
            around=early + rows * model.width * size + _workspace_bytes(plan, model, work, layer) + messages,
        )


def _made_together(plan: Plan, layer: int, again: Sequence[SavedTensor], *products: str) -> int:
    """Return the bytes of tensors that are computed again and there at a time.

    Where products are among them, or the whole layer, each is made from another, so all are; else what follows from
    what is kept comes and goes one by one.
    """
    sizes = [each.num_bytes for each in again]
    if plan.recompute[layer] is Recompute.LAYER or any(each.operation in products for each in again):
        return sum(sizes)
    return max(sizes, default=0)


def _backward_peak(layers: Sequence[_LayerMemory]) -> int:
    """Return the most that layers take while they run backward, the last one first."""
    peak = before = 0
    for index, layer in enumerate(layers):
        # What the layer before keeps on the host is on its way back.
        coming = layers[index - 1].away if index > 0 else 0
        here = before + coming + layer.resident + layer.away
        peak = max(peak, here + layer.ahead, here - layer.late + layer.around)
        before += layer.resident
    return peak


def _evaluation_bytes(plan: Plan, model: ModelSpec, whole: RankWork, exchange: Exchange, kind: DeviceKind) -> int:
    """Return what a layer of an evaluation of the whole graph takes: as much as it would keep to train."""
    return sum(each.num_bytes for each in saved_tensors(plan, model, whole, 0, exchange, kind))


def _host_bytes(plan: Plan, parameters: int, layers: Sequence[_LayerMemory]) -> int:
    """Return what copies on the host take, where that is the memory of the device too."""
    # Parameters, gradients and two moments.
    return sum(layer.away for layer in layers) + 4 * parameters * plan.offload_optimizer


def _compression_bytes(plan: Plan, graph: GraphSpec, model: ModelSpec, rank: int, *, other_bytes: int) -> int:
    """Return what compressing gradients takes beside the rest.

    Args:
        other_bytes: of the backward pass or of an evaluation, free again when gradients are reduced behind it.
    """
    reduces = plan.num_row_ranks > 1 and not plan.shares_out
    parameters = rank_parameter_shapes(plan, graph, model, rank) if reduces else ()
    buckets = buckets_of(parameters, plan.gradient_bucket_bytes)
    compression, overlaps = plan.gradient_compression, plan.overlap_gradients
    passing = passing_bytes(buckets, compression, num_ranks=plan.num_row_ranks, overlaps=overlaps)
    return kept_bytes(buckets, compression) + (passing if overlaps else max(passing - other_bytes, 0))


def _evaluation_work(plan: Plan, rank: int) -> RankWork:
    """Return what a rank holds when the whole graph is evaluated, part after part dealt out to the ranks.

    Halo rows that several of its parts need are counted for each of them.

    Args:
        rank: which of the ranks with rows of their own.
    """
    num_ranks = plan.num_row_ranks
    mine = range(rank, plan.partition.num_parts, num_ranks)
    parts = [plan.partition.parts[part] for part in mine]
    halo_rows = sum(
        rows for part in parts for other, rows in enumerate(part.halo_rows_from) if other % num_ranks != rank
    )
    return RankWork(
        num_rows=sum(part.num_nodes for part in parts),
        num_edges=sum(part.num_edges for part in parts),
        num_edges_of_long_targets=sum(sum(part.edges_of_long_targets_from) for part in parts),
        num_edges_of_long_sources=sum(sum(part.edges_of_long_sources_from) for part in parts),
        num_feature_entries=sum(part.num_feature_entries for part in parts),
        num_train_rows=sum(part.num_train_nodes for part in parts),
        rows_to=(),
        rows_from=(halo_rows,),
        max_rows=0,
    )


def _resident_input_bytes(
    plan: Plan,
    graph: GraphSpec,
    model: ModelSpec,
    works: Sequence[RankWork],
    whole: RankWork,
    *,
    has_features: bool,
) -> int:
    """Return the bytes of inputs on the device: of batches, and of the whole graph for evaluations.

    There are all batches where they are kept, else those that are trained on and those that were made ahead.

    Args:
        has_features: whether the rank has the first stage, which alone needs features.
    """
    of_works = [_input_bytes(plan, graph, model, work, has_features=has_features) for work in works]
    if plan.is_full_graph:
        return of_works[0]
    of_batches = plan.partition.num_parts * max(of_works) if plan.keep_batches else sum(of_works)
    of_batches *= 1 if plan.keep_batches else 1 + plan.prefetch_batches
    return of_batches + _input_bytes(plan, graph, model, whole, has_features=has_features)


def _size(plan: Plan) -> int:
    return plan.precision.num_bytes


def _input_bytes(plan: Plan, graph: GraphSpec, model: ModelSpec, work: RankWork, *, has_features: bool) -> int:
    dense = work.num_rows * num_input_columns(graph, model) * _size(plan) * has_features
    # CSR and its transpose: an index and a number an entry, twice.
    sparse = 2 * work.num_feature_entries * (INDEX_BYTES + 4) * has_features
    edge_bytes = EDGE_BYTES + INDEX_BYTES * (model.edge_bias is not EdgeBias.NONE)
    exchanges = set(plan.exchange)
    edges = work.num_edges * edge_bytes * len(exchanges - {Exchange.HEAD_ALL_TO_ALL})
    if Exchange.HEAD_ALL_TO_ALL in exchanges:
        edges += work.group.group_edges.num_edges * edge_bytes
    if plan.overlap_exchange:
        # Attention runs forward over two sets of these edges, by target.
        edges += work.num_edges * (edge_bytes - EDGE_BYTES + SOURCE_BYTES) * len(exchanges & ROW_EXCHANGES)
    # Where batches are sampled, each layer's edges have rows of their own, by target and by source.
    edges += sum((layer.num_targets + layer.num_sources) * INDEX_BYTES for layer in work.sampled)
    return dense + sparse + edges + 4 * work.num_rows * INDEX_BYTES


def _workspace_bytes(plan: Plan, model: ModelSpec, work: RankWork, layer: int) -> int:
    """Return what the backward pass of a layer's attention makes.

    Gradients of its output, of queries, keys and values of rows, two numbers of each row and head, and the gradients
    of edge biases. Where an exchange overlaps, also those of normed rows, own ones and any that travelled.
    """
    exchange = plan.exchange[layer]
    targets, sources, heads = attended(plan, model, work, layer, exchange)
    group = work.group_of(layer)
    edges = group.group_edges if exchange is Exchange.HEAD_ALL_TO_ALL else group.edges
    biases = edges.num_edges * heads * SCORE_BYTES * (model.edge_bias is not EdgeBias.NONE)
    columns = heads * model.head_size
    normed_rows = 0
    if plan.overlaps(layer):
        sends_rows = plan.exchange_payload is ExchangePayload.ROWS
        normed_rows = targets + sends_rows * group.num_remote_rows(exchange)
    gradients = ((2 * targets + 2 * sources) * columns + normed_rows * model.width) * _size(plan)
    return gradients + 2 * targets * heads * SCORE_BYTES + biases


def _message_bytes(plan: Plan, model: ModelSpec, work: RankWork, exchange: Exchange) -> int:
    """Return the buffers of one layer's exchange beside the rows that attention reads.

    They are what is sent, one message at a time or all while they are in flight, and what arrives in another number
    format or, of heads, in another layout.
    """
    group, wire = work.group, wire_dtype(plan).num_bytes
    if group.served is not None:
        return _served_message_bytes(model, group, group.served, wire)
    each = None if exchange is Exchange.NONE else rows_per_message(plan, model, exchange)
    has_format = wire != _size(plan)
    match exchange:
        case Exchange.NONE:
            return 0
        case Exchange.HEAD_ALL_TO_ALL:
            heads = head_counts(rank_heads(plan, model), len(group.rows_by_rank))[group.graph_rank]
            sent = rows_in_message(work.num_rows, 0, each) * 3 * rank_columns(plan, model) * wire
            received = group.num_group_rows * 3 * heads * model.head_size * wire
            return sent + received * has_format
        case Exchange.HALO:
            rows_sent = sum(rows_in_message(rows, 0, each) for rows in group.rows_to)
            if plan.overlap_exchange:
                rows_sent = sum(group.rows_to)
        case Exchange.HIERARCHICAL_HALO:
            assert group.host is not None, "such a plan's partition counts the rows of hosts"
            # Where nothing overlaps, what came first stays until it was copied before what is passed on.
            held = 0 if plan.overlap_exchange else sum(group.host.rows_from) + work.num_rows
            passing = sum(group.host.passed_to) + held if len(group.host.ranks) > 1 else 0
            rows_sent = max(sum(group.host.rows_to), passing)
        case Exchange.ALL_GATHER:
            most_rows = max(group.rows_by_rank)
            rows_sent = rows_in_message(most_rows, 0, each)
            if plan.overlap_exchange:
                rows_sent = num_messages(most_rows, each) * rows_sent
    columns = payload_columns(plan, model)
    packed = rows_sent * columns * (wire if not has_format else max(wire, _size(plan)))
    return packed + group.num_remote_rows(exchange) * columns * wire * has_format


def _served_message_bytes(model: ModelSpec, group: GroupWork, served: ServedPart, size: int) -> int:
    """Return the larger of the message of keys and values, and that of queries, which are there one after the other."""
    heads = heads_by_rank(model.num_heads, served.part_ranks)
    sent = sum(rows * 2 * other for rows, other in zip(group.rows_to, heads, strict=True))
    queries = group.num_rows * (model.num_heads - heads[group.graph_rank])
    return max(sent, queries) * model.head_size * size


def _head_bytes(plan: Plan, graph: GraphSpec, model: ModelSpec, work: RankWork) -> int:
    rows, classes = work.num_output_rows, graph.num_classes
    return rows * (2 * model.width + classes) * _size(plan) + 3 * work.num_train_rows * classes * SCORE_BYTES
