"""Peak bytes of each rank, and where they go."""

from collections.abc import Sequence
from dataclasses import replace

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
from simulator.sharding import REST, share_elements, units_of
from simulator.specs.cluster import ClusterSpec, DeviceKind
from simulator.specs.graph import GraphSpec
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import (
    HALO_EXCHANGES,
    ROW_EXCHANGES,
    Exchange,
    ExchangePayload,
    ParameterSharding,
    Plan,
    Recompute,
)
from simulator.specs.units import Dimension, format_quantity
from simulator.workload import (
    RankWork,
    num_input_columns,
    num_updated,
    rank_parameter_shapes,
    rank_work,
    works_of_rank,
)

INDEX_BYTES = 8  # torch's indices are int64
SCORE_BYTES = 4  # softmax is fp32
SOURCE_BYTES = 4  # of an edge by target, int32
EDGE_BYTES = 3 * 4  # source of an edge by target, and in the transpose its target and its place by target, int32
# Beside torch's allocator: CUDA context and NCCL buffers hold 2.5 GB on an H200 with torch 2.11 (DESIGN.md section 7);
# a process with torch, PyG and SciPy imported holds about 0.5 GB on a CPU (resident size before the first tensor).
CONTEXT_BYTES = {DeviceKind.CUDA: 2_500_000_000, DeviceKind.CPU: 500_000_000}

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
    layers = [layer for stage in stages for layer in plan.layers_of_stage(stage)]
    kind = cluster.device.kind
    again = [layer for layer in layers if plan.recompute[layer] is Recompute.LAYER]

    def kept_bytes_of(stage: int, micro_batch: int) -> int:
        return _stage_bytes(plan, graph, model, works[micro_batch], stage, kind)

    activations = most_kept(rank_actions(plan, plan.pipeline_rank(rank)), kept_bytes_of)
    workspace = messages = 0
    for work in works:
        # While a layer is computed again, all that it saves is there once more.
        more = max((_layer_bytes(plan, model, work, layer, plan.exchange[layer], kind) for layer in again), default=0)
        largest = max(_workspace_bytes(plan, model, work, layer, plan.exchange[layer]) for layer in layers)
        workspace = max(workspace, more + largest)
        messages = max(messages, *(_message_bytes(plan, model, work, plan.exchange[layer]) for layer in layers))
    messages += _stage_message_bytes(plan, model, works, stages)
    exchange = Exchange.HALO if plan.num_row_ranks > 1 else Exchange.NONE
    # An evaluation of the whole graph overlaps nothing.
    alone = replace(plan, overlap_exchange=False)
    evaluation = 0 if plan.is_full_graph else _layer_bytes(alone, model, whole, 0, exchange, kind)
    step = activations + workspace + messages
    compression = _compression_bytes(plan, graph, model, rank, other_bytes=max(step, evaluation))
    return (
        ("parameters", updated + whole_parameters),
        ("gradients", updated + whole_gradients),
        ("optimizer", 2 * updated),
        ("inputs", _resident_input_bytes(plan, graph, model, works, whole, has_features=0 in stages)),
        ("activations", activations),
        ("workspace", workspace),
        ("messages", messages),
        ("evaluation", max(evaluation - step, 0)),
        *((("gradient compression", compression),) if compression else ()),
        ("context", CONTEXT_BYTES[cluster.device.kind]),
    )


def _stage_bytes(plan: Plan, graph: GraphSpec, model: ModelSpec, work: RankWork, stage: int, kind: DeviceKind) -> int:
    """Return what a stage's pass over a micro-batch keeps for its backward pass."""
    found = 0
    for layer in plan.layers_of_stage(stage):
        if plan.recompute[layer] is Recompute.LAYER:
            found += work.num_input_rows(layer) * model.width * _size(plan)
        else:
            found += _layer_bytes(plan, model, work, layer, plan.exchange[layer], kind)
    if stage == 0:
        found += work.num_rows * model.width * (model.dropout_ratio > 0)  # mask of the input's dropout
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


def _layer_bytes(plan: Plan, model: ModelSpec, work: RankWork, layer: int, exchange: Exchange, kind: DeviceKind) -> int:
    """Return what autograd saves of one layer.

    Of rows times width: two layer inputs, two norm outputs, and two dropout masks of a byte. Of rows times the columns
    of own heads, the attention's output; times own feed-forward columns, the activation's input and output. Attention
    keeps queries, keys and values of rows and a number of each row and head; of an output of 16 bits, on GPUs also what
    rounding took from it, and on CPUs, where it overlaps with an exchange, the unrounded output. Where batches are
    sampled, all rows that the layer gets have the first input, norm and queries, and its targets the rest.
    """
    rows, input_rows = work.num_target_rows(layer), work.num_input_rows(layer)
    width, size = model.width, _size(plan)
    masks = 2 * rows * width * (model.dropout_ratio > 0)
    own_columns, wide_columns = rank_columns(plan, model), model.feed_forward_width // plan.tensor_parallel_degree
    dense = (2 * input_rows * width + rows * (2 * width + own_columns + 2 * wide_columns)) * size + masks
    targets, sources, heads = _attended(plan, model, work, layer, exchange)
    columns = heads * model.head_size
    rest = 0
    if size < SCORE_BYTES and kind is DeviceKind.CUDA:
        rest = targets * columns  # a byte a number
    elif size < SCORE_BYTES and plan.overlap_exchange and exchange in ROW_EXCHANGES:
        rest = targets * columns * SCORE_BYTES
    queries = targets - rows + input_rows  # where batches are sampled, those of rows that are no targets are kept too
    found = dense + (queries + 2 * sources) * columns * size + targets * heads * SCORE_BYTES + rest
    if exchange is Exchange.HEAD_ALL_TO_ALL:
        found += targets * columns * size  # outputs of the own heads, beside those of the own rows
    if plan.exchange_payload is ExchangePayload.ROWS and exchange in ROW_EXCHANGES:
        # What the keys and values were computed from; where a halo overlaps, own rows stay where the norm wrote them.
        own_rows = rows if plan.overlap_exchange and exchange in HALO_EXCHANGES else 0
        found += (sources - own_rows) * width * size
    elif exchange in ROW_EXCHANGES and not plan.overlap_exchange:
        found += 2 * rows * own_columns * size  # own keys and values once more: in memory that queries keep
    return found


def _attended(plan: Plan, model: ModelSpec, work: RankWork, layer: int, exchange: Exchange) -> tuple[int, int, int]:
    """Return targets, sources and heads of a layer's attention."""
    group = work.group
    if exchange is Exchange.HEAD_ALL_TO_ALL:
        heads = head_counts(rank_heads(plan, model), len(group.rows_by_rank))[group.graph_rank]
        return group.num_group_rows, group.num_group_rows, heads
    if work.sampled:
        return work.num_target_rows(layer), work.num_input_rows(layer), rank_heads(plan, model)
    return work.num_rows, work.num_source_rows(exchange), rank_heads(plan, model)


def _workspace_bytes(plan: Plan, model: ModelSpec, work: RankWork, layer: int, exchange: Exchange) -> int:
    """Return what the largest task holds beside what is saved: the backward pass of attention.

    Gradients of queries, keys and values of rows, and two numbers of each row and head.
    """
    targets, sources, heads = _attended(plan, model, work, layer, exchange)
    return (targets + 2 * sources) * heads * model.head_size * _size(plan) + 2 * targets * heads * SCORE_BYTES


def _message_bytes(plan: Plan, model: ModelSpec, work: RankWork, exchange: Exchange) -> int:
    """Return the buffers of one layer's exchange beside the rows that attention reads.

    They are what is sent, one message at a time or all while they are in flight, and what arrives in another number
    format or, of heads, in another layout.
    """
    group, wire = work.group, wire_dtype(plan).num_bytes
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


def _head_bytes(plan: Plan, graph: GraphSpec, model: ModelSpec, work: RankWork) -> int:
    rows, classes = work.num_output_rows, graph.num_classes
    return rows * (2 * model.width + classes) * _size(plan) + 3 * work.num_train_rows * classes * SCORE_BYTES
