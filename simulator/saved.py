"""Tensors that one layer keeps for its backward pass, one by one, as autograd saves them.

`memory.py` adds them up, and those that go to the host's memory are the bytes of its copies: `tests/conformance` holds
their sum against what was copied, so this list is exact.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from simulator.exchange_tasks import GroupWork
from simulator.exchanges import head_counts, rank_columns, rank_heads
from simulator.recompute import is_made_again
from simulator.specs.cluster import DeviceKind
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import HALO_EXCHANGES, ROW_EXCHANGES, Exchange, ExchangePayload, Plan, Recompute, SampledLayer
from simulator.specs.units import Dtype

SCORE_BYTES = 4  # softmax, its sums and edge biases are fp32
INPUT, BROUGHT, WEIGHTS = "input", "exchange", "weights"  # what is no operation's of the layer, or shared by several


class LayerRows(Protocol):
    """Of what a rank holds (`RankWork` of `workload.py`, which asks here for bytes), rows and edges of its layers."""

    @property
    def num_rows(self) -> int:
        """Nodes that it owns."""
        ...

    @property
    def group(self) -> GroupWork:
        """The same and more, as exchanges need it."""
        ...

    @property
    def sampled(self) -> tuple[SampledLayer, ...]:
        """Counts of each layer of a sampled batch."""
        ...

    def num_input_rows(self, layer: int) -> int:
        """Return how many rows a layer gets."""
        ...

    def num_target_rows(self, layer: int) -> int:
        """Return how many rows a layer returns."""
        ...

    def num_source_rows(self, exchange: Exchange) -> int:
        """Return how many rows of keys and values the rank attends to under an exchange."""
        ...

    def group_of(self, layer: int) -> GroupWork:
        """Return what a layer's exchange and attention need."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """Memory that is kept until the backward pass of a layer.

    Attributes:
        operation: that made it, by its name within the layer; `INPUT` for the layer's input, `BROUGHT` for what an
            exchange brought, `WEIGHTS` for weights in another number format than the parameters.
        is_late: used by what follows attention alone, which the backward pass reaches first.
    """

    operation: str
    num_bytes: int
    is_late: bool = False


def attended(plan: Plan, model: ModelSpec, work: LayerRows, layer: int, exchange: Exchange) -> tuple[int, int, int]:
    """Return targets, sources and heads of a layer's attention."""
    group = work.group
    if exchange is Exchange.HEAD_ALL_TO_ALL:
        heads = head_counts(rank_heads(plan, model), len(group.rows_by_rank))[group.graph_rank]
        return group.num_group_rows, group.num_group_rows, heads
    if work.sampled:
        return work.num_target_rows(layer), work.num_input_rows(layer), rank_heads(plan, model)
    return work.num_rows, work.num_source_rows(exchange), rank_heads(plan, model)


def saved_tensors(
    plan: Plan, model: ModelSpec, work: LayerRows, layer: int, exchange: Exchange, kind: DeviceKind
) -> list[SavedTensor]:
    """Return what autograd saves of one layer of which nothing is computed again."""
    rows, inputs, size = work.num_target_rows(layer), work.num_input_rows(layer), plan.precision.num_bytes
    width, hidden = model.width, model.feed_forward_width // plan.tensor_parallel_degree
    # Means and inverse deviations are of the kind that norms compute in: CPUs leave that of their input.
    statistics = size if kind is DeviceKind.CPU else SCORE_BYTES
    mask = 1 if model.dropout_ratio > 0 else 0
    found = [
        (INPUT, inputs * width * size, False),
        *[("attention_norm", inputs * statistics, False)] * 2,
        ("attention_norm", inputs * width * size, False),
        *((*each, False) for each in _of_attention(plan, model, work, layer, exchange, kind)),
        (WEIGHTS, _weight_bytes(plan, model, exchange), False),
        ("attention_dropout", mask * rows * width, True),
        ("attention_residual", rows * width * size, True),
        *[("feed_forward_norm", rows * statistics, True)] * 2,
        ("feed_forward_norm", rows * width * size, True),
        ("feed_forward_up", rows * hidden * size, True),
        ("feed_forward_activation", rows * hidden * size, True),
        ("feed_forward_dropout", mask * rows * width, True),
    ]
    return [
        SavedTensor(operation=name, num_bytes=num_bytes, is_late=is_late)
        for name, num_bytes, is_late in found
        if num_bytes
    ]


def kept_tensors(plan: Plan, model: ModelSpec, work: LayerRows, layer: int, kind: DeviceKind) -> list[SavedTensor]:
    """Return what a layer keeps between its forward and its backward pass: what it does not compute again."""
    saved = saved_tensors(plan, model, work, layer, plan.exchange[layer], kind)
    if plan.recompute[layer] is Recompute.LAYER:
        return [each for each in saved if each.operation == INPUT]
    return [each for each in saved if not is_made_again(plan, layer, each.operation)]


def offloaded_bytes(plan: Plan, model: ModelSpec, work: LayerRows, layer: int, kind: DeviceKind) -> int:
    """Return the bytes of what a layer keeps that go to the host's memory meanwhile."""
    if not plan.offloads(layer):
        return 0
    kept = kept_tensors(plan, model, work, layer, kind)
    return sum(
        each.num_bytes for each in kept if each.operation != WEIGHTS and each.num_bytes >= plan.offload_min_bytes
    )


def _of_attention(
    plan: Plan, model: ModelSpec, work: LayerRows, layer: int, exchange: Exchange, kind: DeviceKind
) -> Iterator[tuple[str, int]]:
    """Yield what attention and its exchange save: operation and bytes."""
    rows, inputs, size = work.num_target_rows(layer), work.num_input_rows(layer), plan.precision.num_bytes
    own = rank_columns(plan, model)
    targets, sources, heads = attended(plan, model, work, layer, exchange)
    columns, overlaps = heads * model.head_size, _overlaps(plan, exchange)
    if exchange is Exchange.NONE:
        yield "query_key_value", inputs * 3 * own * size
    elif exchange is Exchange.HEAD_ALL_TO_ALL:
        yield BROUGHT, sources * 3 * columns * size
        yield BROUGHT, rows * own * size
    elif plan.exchange_payload is ExchangePayload.ROWS:
        # Where a halo overlaps, own rows stay where the norm wrote them.
        yield BROUGHT, (sources - (rows if overlaps and exchange in HALO_EXCHANGES else 0)) * model.width * size
        yield "query", rows * own * size
        yield "key_value", sources * 2 * own * size
    else:
        # Queries made together with own keys and values keep the memory of these too, though the exchange copied them;
        # where it overlaps, own keys and values were made in the memory of all.
        is_apart = overlaps or plan.splits_projection(layer)
        yield ("query", rows * own * size) if is_apart else ("query_key_value", rows * 3 * own * size)
        yield BROUGHT, sources * 2 * own * size
    if heads == 0:
        return
    if model.edge_bias is not EdgeBias.NONE:
        group = work.group_of(layer)
        edges = group.group_edges if exchange is Exchange.HEAD_ALL_TO_ALL else group.edges
        yield "edge_bias", edges.num_edges * heads * SCORE_BYTES
    yield "attention", targets * columns * size
    yield "attention", targets * heads * SCORE_BYTES
    if size < SCORE_BYTES and kind is DeviceKind.CUDA:
        yield "attention", targets * columns  # what rounding took, a byte a number
    elif size < SCORE_BYTES and overlaps:
        yield "attention", targets * columns * SCORE_BYTES  # the unrounded output


def _overlaps(plan: Plan, exchange: Exchange) -> bool:
    return plan.overlap_exchange and exchange in ROW_EXCHANGES


def _weight_bytes(plan: Plan, model: ModelSpec, exchange: Exchange) -> int:
    """Return the bytes of a layer's weights in the number format of a plan, where parameters have another one.

    Overlapped attention makes those of queries, keys and values anew in each pass.
    """
    if plan.precision is Dtype.FLOAT32:
        return 0
    attention_columns = 1 if _overlaps(plan, exchange) else 4
    columns = attention_columns * model.width + 2 * model.feed_forward_width
    return columns // plan.tensor_parallel_degree * model.width * plan.precision.num_bytes
