"""Which numbers of each parameter a rank holds. Simulator and executor both ask here."""

import math
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


def stage_shapes(plan: Plan, parameters: Iterable[tuple[str, tuple[int, ...]]], pipeline_rank: int) -> Shapes:
    """Return name and shape of the parameters of a rank's stages.

    Args:
        pipeline_rank: place of the rank in its pipeline.
    """
    stages = plan.stages_of(pipeline_rank)
    return tuple((name, shape) for name, shape in parameters if plan.stage_of(name) in stages)


# --- Parameters that ranks with the same heads and columns share out.

# Input and head, which are gathered together.
REST = "rest"
# Of these the second dimension is shared out: tensor parallelism may split the first one.
_SHARED_BY_COLUMNS = ("query_key_value.weight", "feed_forward_up.weight")


def row_dim(name: str) -> int:
    """Return the dimension of a parameter that ranks with other rows share out.

    Args:
        name: with or without its layer's.
    """
    return int(name.endswith(_SHARED_BY_COLUMNS))


def share_of(shape: tuple[int, ...], dim: int, num_ranks: int, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's share; the last ranks may have less than others, or nothing."""
    each = -(-shape[dim] // num_ranks)
    length = min(max(shape[dim] - rank * each, 0), each)
    return (*shape[:dim], length, *shape[dim + 1 :])


def share_elements(shapes: Iterable[tuple[str, tuple[int, ...]]], num_ranks: int, rank: int = 0) -> int:
    """Return the numbers that a rank has of some parameters; those of rank 0 are as many as each rank sends."""
    return sum(math.prod(share_of(shape, row_dim(name), num_ranks, rank)) for name, shape in shapes)


def units_of(shapes: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, Shapes]:
    """Return the parameters that are gathered together, by layer, and those of input and head."""
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for name, shape in shapes:
        module = name.partition(".")[0]
        found.setdefault(module if module.startswith("layer") else REST, []).append((name, shape))
    return {unit: tuple(parameters) for unit, parameters in found.items()}
