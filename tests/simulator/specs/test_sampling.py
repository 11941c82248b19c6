"""NeighbourSpec: which fields belong to which kind, and what is refused."""

import pytest

from simulator.errors import SpecError
from simulator.specs.sampling import NeighbourKind, NeighbourSpec


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "uniform"}, "fan_out must be finite and > 0, got 0"),
        ({"kind": "uniform", "fan_out": -3}, "fan_out must be finite and > 0, got -3"),
        ({"kind": "all", "fan_out": 4}, "fan_out must be left out for kind all, which does not read it, got 4"),
        ({"kind": "uniform", "fan_out": 4, "path": "x"}, "path must be left out for kind uniform, which does not read"),
        ({"kind": "degree", "fan_out": 4}, "degree_exponent must be finite and not 0, which is kind uniform, got 0.0"),
        (
            {"kind": "degree", "fan_out": 4, "degree_exponent": float("nan")},
            "degree_exponent must be finite and not 0, which is kind uniform, got nan",
        ),
        ({"kind": "random_walk", "fan_out": 4, "num_walks": 3}, "walk_length must be finite and > 0, got 0"),
        (
            {"kind": "random_walk", "fan_out": 4, "num_walks": 1000, "walk_length": 66},
            "num_walks times walk_length = 66 must not exceed 65535, got 1000",
        ),
        ({"kind": "projection_top_k", "fan_out": 4}, "projection_width must be finite and > 0, got 0"),
        ({"kind": "stored", "fan_out": 4}, "path must name the file of the stored choice, got ''"),
        ({"kind": "expander", "fan_out": 3}, "fan_out must be even for an expander, got 3"),
        ({"kind": "virtual"}, "num_virtual_nodes must be finite and > 0, got 0"),
        ({"kind": "virtual", "num_virtual_nodes": 1, "fan_out": 2}, "fan_out must be left out for kind virtual"),
    ],
)
def test_fields_that_do_not_fit_the_kind_are_refused(fields, message):
    with pytest.raises(SpecError) as caught:
        NeighbourSpec(**{**fields, "kind": NeighbourKind(fields["kind"])})
    assert str(caught.value).startswith(message)


def test_kinds_that_draw_or_look_at_queries_are_told_apart():
    uniform = NeighbourSpec(kind=NeighbourKind.UNIFORM, fan_out=4)
    projected = NeighbourSpec(kind=NeighbourKind.PROJECTION_DRAWN, fan_out=4, projection_width=8)
    expander = NeighbourSpec(kind=NeighbourKind.EXPANDER, fan_out=4)
    assert [spec.is_static for spec in (uniform, projected, expander)] == [False, False, True]
    assert [spec.needs_scores for spec in (uniform, projected, expander)] == [False, True, False]


def test_visits_are_walks_times_hops():
    spec = NeighbourSpec(kind=NeighbourKind.RANDOM_WALK, fan_out=4, num_walks=7, walk_length=3)
    assert spec.num_visits == 21
