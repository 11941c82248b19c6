"""FanoutSpec: what is refused; which fan-out a comparison names."""

import pytest

from simulator.errors import SpecError
from simulator.specs.fanout import FanoutComparison, FanoutRow, FanoutSpec, neighbours_text
from simulator.specs.sampling import NeighbourKind, NeighbourSpec

UNIFORM, WALK = NeighbourKind.UNIFORM, NeighbourKind.RANDOM_WALK


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"fan_outs": ()}, "fan_outs must hold at least one number, got ()"),
        ({"fan_outs": (4, 0)}, "fan_outs must hold numbers >= 1, got 0"),
        ({"fan_outs": (4, 4)}, "fan_outs must hold each once, got ['4', '4']"),
        ({"samplers": ()}, "samplers must name at least one, got ()"),
        ({"samplers": (NeighbourKind.EXPANDER,)}, "samplers must name some of uniform, degree, random_walk, "),
        ({"tolerance_ratio": 1.0}, "tolerance_ratio must be >= 0 and < 1, got 1.0"),
        ({"num_steps": 0}, "num_steps must be finite and > 0, got 0"),
        ({"subgraph_nodes": 0}, "subgraph_nodes must be finite and > 0, got 0"),
        ({"structure_weight": -1.0}, "structure_weight must be finite and >= 0, got -1.0"),
        ({"degree_exponent": 0.0}, "degree_exponent must be finite and not 0, which is sampler uniform, got 0.0"),
        ({"fan_outs": (40_000,)}, "num_walks times walk_length = 2 must not exceed 65535, got 80000"),
    ],
)
def test_fields_that_break_a_rule_are_refused(fields, message):
    with pytest.raises(SpecError) as caught:
        FanoutSpec(**fields)
    assert str(caught.value).startswith(message)


def test_choices_are_every_sampler_with_every_fan_out_and_walks_visit_enough():
    spec = FanoutSpec(samplers=(UNIFORM, WALK), fan_outs=(8, 3), walk_length=5, visits_per_neighbour=4)
    first, second, third, fourth = spec.choices()
    assert [first, second] == [NeighbourSpec(kind=UNIFORM, fan_out=fan_out) for fan_out in (3, 8)]
    # 12 and 32 visits in walks of 5 hops.
    assert [(walk.fan_out, walk.num_walks) for walk in (third, fourth)] == [(3, 3), (8, 7)]


def row(accuracy: float, neighbours: NeighbourSpec | None = None, fan_out: int = 0, kind=UNIFORM) -> FanoutRow:
    return FanoutRow(
        neighbours=NeighbourSpec(kind=kind, fan_out=fan_out) if fan_out else neighbours,
        full_error_ratio=0.0,
        edges_error_ratio=0.0,
        val_accuracy_ratio=accuracy,
        val_accuracy_range_ratio=0.0,
        num_edges_per_step=1.0,
    )


EDGES = NeighbourSpec(kind=NeighbourKind.ALL)


def named(rows: list[FanoutRow], tolerance_ratio: float = 0.02) -> str | None:
    """Return the fan-out that a comparison names."""
    spec = FanoutSpec(tolerance_ratio=tolerance_ratio)
    smallest = FanoutComparison(spec=spec, rows=tuple(rows), region_nodes=1, region_edges=1).smallest
    return None if smallest is None else neighbours_text(smallest.neighbours)


def test_the_smallest_fan_out_within_the_tolerance_is_named_and_of_equals_the_most_accurate():
    rows = [row(0.90, EDGES), row(0.87, fan_out=2), row(0.885, fan_out=4), row(0.91, fan_out=8)]
    assert named(rows) == "uniform 4"
    better = row(0.889, NeighbourSpec(kind=NeighbourKind.PROJECTION_TOP_K, fan_out=4, projection_width=2))
    assert named([*rows, better]) == "projection_top_k 4"


def test_a_loss_of_just_the_tolerance_is_within_it():
    assert named([row(0.79, EDGES), row(0.78, fan_out=2)], tolerance_ratio=0.01) == "uniform 2"


def test_without_a_fan_out_within_the_tolerance_none_is_named():
    assert named([row(0.90, EDGES), row(0.5, fan_out=2)]) is None


def test_the_reference_is_the_better_of_all_nodes_and_all_edges():
    rows = [row(0.3), row(0.8, EDGES), row(0.5, fan_out=2), row(0.79, fan_out=4)]
    assert named(rows) == "uniform 4"
    assert named([row(0.8), row(0.3, EDGES), *rows[2:]]) == "uniform 4"
