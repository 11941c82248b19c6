"""Which numbers of each parameter a rank holds. Simulator and executor both ask here."""

from collections.abc import Iterable

from simulator.specs.plan import Plan

Shapes = tuple[tuple[str, tuple[int, ...]], ...]

# By name within a layer, the dimension along which ranks of a tensor-parallel group share a parameter out; all others
# are the same on all of them. Rows of "query_key_value.weight" are those of queries, of keys and of values, and a rank
# has a run of each, those of its heads.
_TENSOR_DIMS = {
    "edge_bias": 1,
    "query_key_value.weight": 0,
    "attention_output.weight": 1,
    "feed_forward_up.weight": 0,
    "feed_forward_up.bias": 0,
    "feed_forward_down.weight": 1,
}


def tensor_dim(name: str) -> int | None:
    """Return the dimension of a parameter that tensor parallelism splits; None for none.

    Args:
        name: such as "layer0.query_key_value.weight".
    """
    module, _, rest = name.partition(".")
    return _TENSOR_DIMS.get(rest) if module.startswith("layer") else None


def tensor_shapes(plan: Plan, parameters: Iterable[tuple[str, tuple[int, ...]]]) -> Shapes:
    """Return name and shape of what one rank of a tensor-parallel group holds of each parameter.

    Args:
        parameters: names and whole shapes.
    """
    found = []
    for name, shape in parameters:
        sizes = list(shape)
        if (dim := tensor_dim(name)) is not None:
            sizes[dim] //= plan.tensor_parallel_degree
        found.append((name, tuple(sizes)))
    return tuple(found)
