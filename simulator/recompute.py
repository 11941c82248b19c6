"""Which operations of a layer are computed again in its backward pass, and when.

What is computed again is what saves most memory for its time. Of a layer that is 1 wide and 2 in its feed-forward part,
in numbers a row: 12 are kept for the backward pass; norms, activation and dropout masks are 4 of them (and edge biases
E x H in fp32) for some elementwise passes; queries, keys, values and the way up are 5 for products, which a GPU does at
its full rate; attention's output is 1 for the longest task of a layer. So each choice of `Recompute` holds the one
before it, in this order. `executor/recompute.py` computes again under the same names.
"""

from collections.abc import Collection, Iterator

from simulator.specs.plan import ROW_EXCHANGES, Exchange, ExchangePayload, Plan, Recompute

_SELECTIVE = frozenset(
    {
        "attention_norm",
        "feed_forward_norm",
        "feed_forward_activation",
        "attention_dropout",
        "feed_forward_dropout",
        "edge_bias",
    }
)
_DENSE = _SELECTIVE | {"query_key_value", "query", "key_value", "feed_forward_up"}
RECOMPUTED: dict[Recompute, frozenset[str]] = {
    Recompute.NONE: frozenset(),
    Recompute.SELECTIVE: _SELECTIVE,
    Recompute.DENSE: _DENSE,
    Recompute.ATTENTION: _DENSE | {"attention"},
}
# Attention over all edges, whose exchange overlapped with two runs over some of them, computed again in one.
WHOLE_ATTENTION = "attention_whole"


def is_made_again(plan: Plan, layer: int, operation: str) -> bool:
    """Return whether what an operation made is computed again; a layer that is so as a whole is another matter.

    Args:
        operation: name within the layer, such as "feed_forward_up".
    """
    if operation not in RECOMPUTED.get(plan.recompute[layer], ()):
        return False
    # Projections beside which an exchange is under way are one node of autograd with attention.
    return not (plan.overlaps(layer) and operation in ("query", "key_value"))


def made_again(plan: Plan, layer: int, operation: str, done: Collection[str]) -> Iterator[str]:
    """Yield the operations of a layer that run again for the backward pass of one of them, in order.

    Args:
        operation: name within the layer, also of those that only run backward.
        done: what was computed again before, in this backward pass.
    """
    made = set(done)

    def make(name: str) -> Iterator[str]:
        if name in made or not is_made_again(plan, layer, name):
            return
        made.add(name)
        for source in _sources(plan, layer, name):
            yield from make(source)
        yield name

    for name in _taken(plan, layer, operation):
        yield from make(name)


def _taken(plan: Plan, layer: int, operation: str) -> tuple[str, ...]:
    """Return the operations whose results the backward pass of one of them takes, in the order in which it does."""
    match operation:
        case "feed_forward_down":
            return ("feed_forward_activation",)
        case "attention_output":
            # An exchange brought the outputs of other ranks' heads.
            return () if plan.exchange[layer] is Exchange.HEAD_ALL_TO_ALL else ("attention",)
        case "attention":
            return (*_attention_inputs(plan, layer), "attention")
        case "attention_sources":
            return ("attention_norm", *_attention_inputs(plan, layer), "attention")
        case "feed_forward_activation" | "feed_forward_up" | "query_key_value" | "query" | "key_value":
            return _sources(plan, layer, operation)
        case "attention_dropout" | "feed_forward_dropout" | "attention_norm" | "feed_forward_norm":
            return (operation,)
        case _:
            return ()


def _sources(plan: Plan, layer: int, operation: str) -> tuple[str, ...]:
    """Return the operations from whose results one of them is computed again."""
    sends_rows = plan.exchange_payload is ExchangePayload.ROWS and plan.exchange[layer] in ROW_EXCHANGES
    match operation:
        case "feed_forward_activation":
            return ("feed_forward_up",)
        case "feed_forward_up":
            return ("feed_forward_norm",)
        case "query_key_value" | "query":
            return ("attention_norm",)
        case "key_value":
            return () if sends_rows else ("attention_norm",)  # rows came by an exchange
        case "attention":
            return _attention_inputs(plan, layer)
        case _:
            return ()


def _attention_inputs(plan: Plan, layer: int) -> tuple[str, ...]:
    """Return the operations that make what attention reads, but for what exchanges brought."""
    exchange = plan.exchange[layer]
    if exchange is Exchange.NONE:
        return ("query_key_value", "edge_bias")
    if exchange is Exchange.HEAD_ALL_TO_ALL:
        return ("edge_bias",)
    if plan.exchange_payload is ExchangePayload.ROWS:
        return ("query", "key_value", "edge_bias")
    return ("query", "edge_bias")
