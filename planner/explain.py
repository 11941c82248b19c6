"""Plans in words, and why one lost to another."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from simulator.specs.decision import PlanFile
from simulator.specs.gradients import CompressionKind
from simulator.specs.order import NodeOrder
from simulator.specs.plan import Exchange, ExchangePayload, Offload, Plan, Recompute
from simulator.specs.program import BATCH_KINDS
from simulator.specs.trace import Span, Trace, counted_spans
from simulator.specs.units import Dimension, format_quantity

# How most reasons end; a table of many may say it once.
PER_EPOCH = " on the mean rank in an epoch"
ORDER_WORDS = {
    NodeOrder.NATURAL: "natural",
    NodeOrder.DEGREE: "by degree",
    NodeOrder.REVERSE_CUTHILL_MCKEE: "Cuthill-McKee",
    NodeOrder.METIS: "METIS",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """Where an epoch's time goes on the mean rank, in seconds.

    Attributes:
        communication_seconds: with a collective under way and nothing computed beside it.
        waiting_seconds: in which a collective waits for other ranks, and nothing else is done beside it.
        idle_seconds: with no task under way: a device waits for its host to launch the next.
        batch_seconds: in which batches are made and the device runs nothing.
    """

    compute_seconds: float
    communication_seconds: float
    waiting_seconds: float
    idle_seconds: float
    batch_seconds: float = 0.0


def description(plan: Plan) -> str:
    """Return the choices of a plan in words, such as "4 ranks: full graph on 4 (halo), fp32"."""
    ranks = f"{plan.num_ranks} rank{'s' if plan.num_ranks > 1 else ''}"
    group = f" on {plan.graph_parallel_degree} ({exchange_words(plan)})" if plan.graph_parallel_degree > 1 else ""
    if plan.is_full_graph:
        batch = f"full graph{group}"
    elif plan.sampled is not None:
        fan_outs = "-".join(map(str, plan.sampled.fan_outs))
        batch = f"{plan.data_parallel_degree} x {plan.sampled.seeds_per_batch:,} nodes with {fan_outs} neighbours"
    else:
        isolated = "" if plan.between_edges else "isolated "
        batch = f"{plan.data_parallel_degree} x {plan.parts_per_batch} of {plan.partition.num_parts} {isolated}clusters"
        batch += group + (", kept on the device" if plan.keep_batches else "")
    spread = f"{_tensor_text(plan)}{_pipeline_text(plan)}"
    return f"{ranks}: {batch}{spread}, {plan.precision.value}{_memory_text(plan)}{_gradients_text(plan)}"


def _memory_text(plan: Plan) -> str:
    """Return what is computed again and what lies on the host, and a comma before it."""
    choices, num_layers = [], len(plan.recompute)
    for kind, count in Counter(plan.recompute).items():
        if kind is Recompute.LAYER:
            choices.append(f"{count} of {num_layers} layers recomputed")
        elif kind is not Recompute.NONE:
            choices.append(f"{kind} recompute in {count} of {num_layers} layers")
    if away := plan.offload.count(Offload.ACTIVATIONS):
        choices.append(f"activations of {away} of {num_layers} layers on the host")
    if plan.offload_optimizer:
        choices.append("optimizer on the host")
    return "".join(f", {choice}" for choice in choices)


def _tensor_text(plan: Plan) -> str:
    """Return how many ranks share heads, where several do, and a comma before it."""
    degree = plan.tensor_parallel_degree
    return f", heads on {degree} ranks each" if degree > 1 else ""


def _pipeline_text(plan: Plan) -> str:
    """Return into how many stages and micro-batches a step is cut, where it is, and a comma before it."""
    stages = ""
    if plan.pipeline_parallel_degree > 1:
        stages = f", {plan.num_stages} stages on {plan.pipeline_parallel_degree} ranks ({plan.pipeline_schedule})"
    return stages + (f", {plan.num_micro_batches} micro-batches" if plan.num_micro_batches > 1 else "")


def _gradients_text(plan: Plan) -> str:
    """Return how gradients are reduced where that is not behind the backward pass in fp32, and a comma before it."""
    choices = []
    if plan.gradient_compression.kind is not CompressionKind.NONE:
        choices.append(f"gradients by {plan.gradient_compression}")
    if plan.overlap_gradients:
        size = format_quantity(plan.gradient_bucket_bytes, Dimension.BYTES)
        choices.append(f"buckets of {size} reduced beside the backward pass")
    if plan.shares_out:
        choices.append(f"parameters shared out ({plan.shard_parameters})")
    return "".join(f", {choice}" for choice in choices)


def exchange_words(plan: Plan) -> str:
    """Return how the ranks of a graph group exchange, such as "halo of rows, overlapped, in bf16"."""
    words = "/".join(Counter(exchange.value for exchange in plan.exchange if exchange is not Exchange.NONE))
    if plan.exchange_payload is ExchangePayload.ROWS:
        words += " of rows"
    if plan.overlap_exchange:
        words += ", overlapped"
    if plan.exchange_precision is not None:
        words += f", in {plan.exchange_precision}"
    if plan.exchange_chunk_bytes is not None:
        words += f", at most {format_quantity(plan.exchange_chunk_bytes, Dimension.BYTES)} a message"
    if plan.partition.shares is not None:
        words += f", parts on {'+'.join(map(str, plan.part_ranks))} ranks"
    return words


def breakdown(plan: Plan, trace: Trace) -> Breakdown:
    """Return where the time of an epoch goes, if all its steps were like the trace's."""
    scale = plan.steps_per_epoch / trace.num_ranks
    compute_seconds = busy_seconds = covered_seconds = 0.0
    spans_of_rank: dict[int, list[Span]] = defaultdict(list)
    counted = list(counted_spans(trace.spans))
    for span, _ in counted:
        if span.kind not in BATCH_KINDS:
            spans_of_rank[span.rank].append(span)
    batch_seconds = scale * sum(
        num_alike * _alone_seconds(span, spans_of_rank[span.rank])
        for span, num_alike in counted
        if span.kind in BATCH_KINDS
    )
    num_alike_of = {span.rank: num_alike for span, num_alike in counted}
    for rank, spans in spans_of_rank.items():
        by = scale * num_alike_of[rank]
        compute = [(span.start_seconds, span.end_seconds) for span in spans if not span.kind.is_collective]
        moving = [(s.start_seconds + s.waiting_seconds, s.end_seconds) for s in spans if s.kind.is_collective]
        waiting = [(s.start_seconds, s.start_seconds + s.waiting_seconds) for s in spans if s.kind.is_collective]
        compute_seconds += by * _covered_seconds(compute)
        busy_seconds += by * _covered_seconds(compute + moving)
        covered_seconds += by * _covered_seconds(compute + moving + waiting)
    whole_seconds = plan.steps_per_epoch * trace.median_step_seconds
    return Breakdown(
        batch_seconds=batch_seconds,
        compute_seconds=compute_seconds,
        communication_seconds=busy_seconds - compute_seconds,
        waiting_seconds=covered_seconds - busy_seconds,
        idle_seconds=max(whole_seconds - batch_seconds - covered_seconds, 0.0),
    )


def _alone_seconds(batch: Span, on_device: list[Span]) -> float:
    """Return the seconds of a batch's making before the first task of its rank and step, and after the last."""
    mine = [span for span in on_device if span.step == batch.step]
    begin = min((span.start_seconds for span in mine), default=batch.end_seconds)
    end = max((span.end_seconds for span in mine), default=batch.end_seconds)
    before = max(min(begin, batch.end_seconds) - batch.start_seconds, 0.0)
    return before + max(batch.end_seconds - max(end, batch.start_seconds), 0.0)


def _covered_seconds(intervals: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that lie in at least one interval."""
    covered_seconds, until_seconds = 0.0, float("-inf")
    for start_seconds, end_seconds in sorted(intervals):
        covered_seconds += max(end_seconds - max(start_seconds, until_seconds), 0.0)
        until_seconds = max(until_seconds, end_seconds)
    return covered_seconds


def reason_lost(best: Breakdown, other: Breakdown) -> str:
    """Return in a clause what another plan spends more of than the best one, each epoch and rank."""
    more = {
        "making batches": other.batch_seconds - best.batch_seconds,
        "computing": other.compute_seconds - best.compute_seconds,
        "communicating": other.communication_seconds - best.communication_seconds,
        "waiting for other ranks": other.waiting_seconds - best.waiting_seconds,
        "idle while the host launches": other.idle_seconds - best.idle_seconds,
    }
    activity, seconds = max(more.items(), key=lambda item: item[1])
    if seconds <= 0:
        return "no slower on the mean rank, but its slowest rank is"
    return f"{format_quantity(seconds, Dimension.SECONDS)} more {activity}{PER_EPOCH}"


def order_reason(file: PlanFile) -> str:
    """Return in a clause why a plan has its order of nodes."""
    if file.plan.sampled is not None and not file.orders and file.plan.order.kind is NodeOrder.NATURAL:
        return "what samples gather is not known beforehand"
    tried = {found.kind: found for found in file.orders}
    chosen, natural = tried.get(file.plan.order.kind), tried.get(NodeOrder.NATURAL)
    others = [found for found in file.orders if found.kind is not NodeOrder.NATURAL]
    if chosen is None or natural is None:
        return "the only one that [search] allows"
    if chosen is not natural:
        change = 100 * (chosen.relative_seconds - 1)
        missed, missed_naturally = chosen.beyond_cache_bytes, natural.beyond_cache_bytes
        return f"gathers {change:+.0f} %; {missed:.0f} B an edge miss the cache, not {missed_naturally:.0f} B"
    if file.cluster.device.cache_bytes == 0:
        return "cache_bytes of the device is unknown"
    if not others:
        return "no other could shorten the gathers enough"
    best = min(others, key=lambda found: found.relative_seconds)
    change = 100 * (best.relative_seconds - 1)
    return f"the best other, {ORDER_WORDS[best.kind]}, changes gathers by {change:+.1f} %"
