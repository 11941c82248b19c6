import re
from dataclasses import replace

import pytest
from hypothesis import given

from simulator.errors import SpecError
from simulator.specs.order import NodeOrder, OrderSpec, RankedOrder
from tests.strategies import file_orders, ranked_orders

RANKED = RankedOrder(
    kind=NodeOrder.METIS,
    row_bytes=512,
    window_16_reuse=1.5,
    window_64_reuse=2.5,
    beyond_cache_ratio=0.25,
    relative_seconds=0.8,
)


def test_the_natural_order_is_the_one_without_a_file():
    assert OrderSpec() == OrderSpec(kind=NodeOrder.NATURAL, path="", sha256="")


@given(order=file_orders)
def test_only_the_natural_order_lies_in_no_file(order):
    for named in ({"path": order.path}, {"sha256": order.sha256}):
        field, value = next(iter(named.items()))
        with pytest.raises(
            SpecError, match=f"{field} must be empty for the natural order, got {re.escape(repr(value))}"
        ):
            replace(OrderSpec(), **named)
        with pytest.raises(SpecError, match=f"{field} must name the order's array, got ''"):
            replace(order, **{field: type(value)()})


def test_bytes_from_beyond_the_cache_by_hand():
    assert RANKED.beyond_cache_bytes == 128


@given(ranked=ranked_orders)
def test_no_more_than_the_row_comes_from_beyond_the_cache(ranked):
    assert 0 <= ranked.beyond_cache_bytes <= ranked.row_bytes


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("row_bytes", 0, "must be finite and > 0, got 0"),
        ("window_16_reuse", 0.99, "must be finite and >= 1, got 0.99"),
        ("window_64_reuse", float("nan"), "must be finite and >= 1, got nan"),
        ("beyond_cache_ratio", 1.01, r"must be within \[0, 1\], got 1.01"),
        ("relative_seconds", 0.0, "must be finite and > 0, got 0.0"),
    ],
)
def test_what_no_order_can_spare_is_refused(field, value, rule):
    with pytest.raises(SpecError, match=f"{field} {rule}"):
        replace(RANKED, **{field: value})
