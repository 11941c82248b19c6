"""How a layer's exchange is cut: rows into messages, heads among ranks. Simulator and executor both ask here."""

from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, ExchangePayload, Plan
from simulator.specs.units import Dtype


def head_counts(num_heads: int, num_ranks: int) -> tuple[int, ...]:
    """Return the heads of each rank of a group, as equal as can be; ranks beyond the number of heads have none."""
    share, rest = divmod(num_heads, num_ranks)
    return tuple(share + (rank < rest) for rank in range(num_ranks))


def first_head(num_heads: int, num_ranks: int, rank: int) -> int:
    """Return the first head of a rank of a group."""
    return sum(head_counts(num_heads, num_ranks)[:rank])


def rank_heads(plan: Plan, model: ModelSpec) -> int:
    """Return the heads that a rank, or its graph group where heads travel, attends with."""
    return model.num_heads // plan.tensor_parallel_degree


def rank_columns(plan: Plan, model: ModelSpec) -> int:
    """Return the numbers of a row's queries in these heads; keys and values have as many."""
    return rank_heads(plan, model) * model.head_size


def payload_columns(plan: Plan, model: ModelSpec) -> int:
    """Return the numbers of a row that travels in a halo exchange or an all-gather."""
    is_row = plan.exchange_payload is ExchangePayload.ROWS
    return model.width if is_row else 2 * rank_columns(plan, model)


def wire_dtype(plan: Plan) -> Dtype:
    """Return the number format of what travels."""
    return plan.exchange_precision or plan.precision


def rows_per_message(plan: Plan, model: ModelSpec, exchange: Exchange, *, num_ranks: int = 0) -> int | None:
    """Return how many rows a rank sends to another one in one collective at most; None for all that there are.

    A rank then sends to the others, and receives from them, at most `plan.exchange_chunk_bytes`; 0 if these do not
    hold a row for each.

    Args:
        num_ranks: of the group; 0 for the plan's.
    """
    if plan.exchange_chunk_bytes is None:
        return None
    num_ranks = num_ranks or plan.graph_parallel_degree
    columns = payload_columns(plan, model)
    if exchange is Exchange.HEAD_ALL_TO_ALL:
        columns = 3 * max(head_counts(rank_heads(plan, model), num_ranks)) * model.head_size
    return plan.exchange_chunk_bytes // (columns * wire_dtype(plan).num_bytes * max(num_ranks - 1, 1))


def num_messages(most_rows: int, rows_each: int | None) -> int:
    """Return how many collectives carry up to `most_rows` rows to each rank; one even without rows."""
    return 1 if rows_each is None else max(-(-most_rows // rows_each), 1)


def rows_in_message(rows: int, index: int, rows_each: int | None) -> int:
    """Return how many of some rows the message at an index carries."""
    return rows if rows_each is None else min(max(rows - index * rows_each, 0), rows_each)


def message_name(base: str, index: int, count: int) -> str:
    """Return the name of a task that is done for each message, such as "layer0.exchange_chunk1"."""
    return base if count == 1 else f"{base}_chunk{index}"
