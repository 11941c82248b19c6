from dataclasses import replace

import pytest
from hypothesis import given

from simulator.errors import SpecError
from simulator.specs.model import ModelSpec
from tests.strategies import models

MODEL = ModelSpec(width=12, num_heads=4, num_layers=2, feed_forward_width=24)


@given(model=models)
def test_heads_share_the_width(model):
    assert model.head_size * model.num_heads == model.width


def test_heads_that_do_not_divide_the_width_are_refused_with_those_that_do():
    rule = r"num_heads must divide width = 12 \(one of 1, 2, 3, 4, 6, 12\), got 5"
    with pytest.raises(SpecError, match=rule):
        replace(MODEL, num_heads=5)


def test_a_width_that_nobody_needs_is_judged_at_once():
    assert replace(MODEL, width=10**15).head_size == 250_000_000_000_000


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_layers", 0, "must be finite and > 0, got 0"),
        ("dropout_ratio", 1.0, "must be >= 0 and < 1, got 1.0"),
        ("laplacian_encodings", -1, "must be finite and >= 0, got -1"),
    ],
)
def test_a_model_out_of_range_is_refused(field, value, rule):
    with pytest.raises(SpecError, match=f"{field} {rule}"):
        replace(MODEL, **{field: value})


def test_both_kinds_of_encodings_count():
    assert replace(MODEL, laplacian_encodings=3, random_walk_encodings=4).num_encodings == 7
