"""Plain values to specs and back: what is refused, and in which words."""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import SpecError
from simulator.specs.cluster import H200, DeviceSpec, LinkSpec
from simulator.specs.convert import from_plain, to_plain
from simulator.specs.graph import CommunityGraph, GraphFile, GraphSource, RmatGraph
from simulator.specs.units import Dtype
from tests import strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    count: int
    share: float = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    flag: bool
    dtype: Dtype
    counts: tuple[int, ...]
    pair: tuple[str, float]
    inners: tuple[Inner, ...]
    graph: GraphSource
    link: LinkSpec | None = None


OUTER = Outer(
    name="a",
    flag=True,
    dtype=Dtype.BFLOAT16,
    counts=(1, 2),
    pair=("x", 0.25),
    inners=(Inner(count=3), Inner(count=4, share=1)),
    graph=RmatGraph(num_nodes=8, num_edges=16),
)
PLAIN: dict[str, Any] = {
    "name": "a",
    "flag": True,
    "dtype": "bf16",
    "counts": [1, 2],
    "pair": ["x", 0.25],
    "inners": [{"count": 3, "share": 0.5}, {"count": 4, "share": 1.0}],
    "graph": {"generator": "rmat", "num_nodes": 8, "num_edges": 16},
}


def refusal(changes, *, units=False):
    with pytest.raises(SpecError) as caught:
        from_plain(Outer, {**PLAIN, **changes}, where="f.json", units=units)
    return str(caught.value)


def test_a_table_becomes_the_spec_that_it_describes():
    assert from_plain(Outer, PLAIN, where="f.json") == OUTER


def test_a_spec_becomes_a_table_of_plain_values():
    plain = to_plain(OUTER)
    rmat = {"num_features": 32, "num_classes": 8, "a": 0.57, "b": 0.19, "c": 0.19, "seed": 0, "add_self_loops": True}
    assert plain == {**PLAIN, "graph": {**PLAIN["graph"], **rmat}, "link": None}
    assert [type(value) for value in (plain["dtype"], plain["counts"], plain["pair"])] == [str, list, list]


def test_equal_specs_become_equal_texts_even_if_a_float_field_holds_a_whole_number():
    assert str(to_plain(Inner(count=1, share=1))) == str(to_plain(Inner(count=1, share=1.0)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": 3}, "name must be a text in quotes, got 3"),
        ({"flag": 1}, "flag must be true or false, got 1"),
        ({"flag": "true"}, 'flag must be true or false, got "true"'),
        ({"dtype": "bf61"}, 'dtype must be one of fp32, bf16, got "bf61"; did you mean bf16?'),
        ({"dtype": 16}, "dtype must be one of fp32, bf16, got 16"),
        ({"dtype": ["bf16"]}, "dtype must be one of fp32, bf16, got a list"),
        ({"counts": 3}, "counts must be a list, got 3"),
        ({"counts": [1, True]}, "counts[1] must be a whole number, got true"),
        ({"counts": [1, 2.0]}, "counts[1] must be a whole number, got 2.0"),
        ({"counts": ["2 GB"]}, 'counts[0] must be a whole number without quotes or unit, got "2 GB"'),
        ({"pair": ["x"]}, "pair must be a list of 2 entries, got 1"),
        ({"pair": ["x", "1"]}, 'pair[1] must be a number without quotes or unit, got "1"'),
        ({"pair": ["x", float("nan")]}, "pair[1] must be a finite number, got nan"),
        ({"pair": ["x", 10**400]}, "pair[1] must be a finite number, got 1000000"),
        ({"inners": [{"count": 1}, {}]}, "inners[1].count is missing"),
        ({"inners": [{"count": 1, "shares": 1}]}, "inners[0].shares is unknown; did you mean share?"),
        ({"inners": [{"count": 1, "size": 1}]}, "inners[0].size is unknown; known here: count, share"),
        ({"inners": [7]}, "inners[0] must be a table, got 7"),
        (
            {"graph": {"generator": "rmatt"}},
            'graph.generator must be one of rmat, community, got "rmatt"; did you mean',
        ),
        ({"graph": {"generator": 5}}, "graph.generator must be one of rmat, community, got 5"),
        ({"graph": {"num_nodes": 5}}, 'graph must hold path = "..." or generator = one of rmat, community'),
        ({"graph": {"generator": "rmat", "path": "x"}}, "graph.path is unknown; known here: num_nodes, num_edges"),
        ({"graph": {"generator": "rmat", "num_nodes": 0, "num_edges": 1}}, "graph.num_nodes must be finite and > 0"),
        ({"graph": {"path": "x", "split": -1}}, "graph.split must be finite and >= 0, got -1"),
        ({"link": {"latency_seconds": 1}}, "link.bandwidth_bytes_per_second is missing"),
        ({"link": "fast"}, 'link must be a table, got "fast"'),
    ],
)
def test_a_wrong_value_is_named_by_file_and_key(changes, message):
    found = refusal(changes)
    assert found.startswith(f"f.json: {message}")
    assert len(found) < 200


# --- Case P14: units are in the values, bare numbers are refused.


@pytest.mark.parametrize(("value", "rate"), [("400 Gb/s", 50e9), ("50 GB/s", 50e9), ("400 GB/s", 400e9)])
def test_case_p14_gigabits_beside_gigabytes_are_told_apart(value, rate):
    table = {"latency_seconds": "1 us", "bandwidth_bytes_per_second": value}
    assert from_plain(LinkSpec, table, where="f.toml", units=True).bandwidth_bytes_per_second == rate


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (450e9, 'must be a text with a unit, such as "450 GB/s", got 450000000000.0; if it counts bytes per second, '),
        (True, 'must be a text with a unit, such as "450 GB/s", got true'),
        ("450 GB", "must be a number and one of B/s, kB/s"),
        ("-1 GB/s", "must be finite and > 0, got -1000000000.0"),
    ],
)
def test_a_quantity_without_its_unit_is_refused(value, message):
    found = refusal({"link": {"latency_seconds": "1 us", "bandwidth_bytes_per_second": value}}, units=True)
    assert found.startswith(f"f.json: link.bandwidth_bytes_per_second {message}")


def test_a_bare_number_is_refused_with_the_text_to_write_instead():
    found = refusal({"link": {"latency_seconds": 2e-6, "bandwidth_bytes_per_second": "1 GB/s"}}, units=True)
    assert found.endswith('got 2e-06; if it counts seconds, write "2 us"')


def test_a_fraction_of_a_byte_is_refused():
    device = to_plain(H200, units=True)
    with pytest.raises(SpecError, match=r'^f: memory_bytes must be a whole number of bytes, got "1.5 B" = 1.5$'):
        from_plain(DeviceSpec, {**device, "memory_bytes": "1.5 B"}, where="f", units=True)


def test_what_is_not_a_table_is_refused_without_a_key():
    with pytest.raises(SpecError, match=r"^f\.json: must be a table, got a list$"):
        from_plain(Inner, [], where="f.json")


def test_a_rule_of_a_spec_that_names_no_field_is_passed_on():
    plain = to_plain(RmatGraph(num_nodes=4, num_edges=4))
    with pytest.raises(SpecError, match=r"^f: a \+ b \+ c must not exceed 1, got 1\.\d+$"):
        from_plain(RmatGraph, {**plain, "a": 0.9}, where="f")


def test_a_whole_number_does_for_a_float():
    inner = from_plain(Inner, {"count": 1, "share": 1}, where="f")
    assert isinstance(inner.share, float)
    assert inner == Inner(count=1, share=1.0)


def test_an_infinite_number_cannot_be_written():
    with pytest.raises(SpecError, match="must be finite to be written to a file, got inf"):
        to_plain(Inner(count=1, share=float("inf")))


EVERY_SPEC = {
    "devices": strategies.devices,
    "links": strategies.links,
    "clusters": strategies.clusters,
    "graphs": strategies.graphs,
    "models": strategies.models,
    "neighbours": strategies.neighbours,
    "trains": strategies.trains,
    "searches": strategies.searches,
    "partitions": strategies.partitions(),
    "plans": strategies.plans,
    "sampled_plans": strategies.sampled_plans(),
    "tasks": strategies.tasks,
    "programs": strategies.programs,
    "spans": strategies.spans,
    "traces": strategies.traces,
    "calibrations": strategies.calibrations,
    "predictions": strategies.predictions(),
}


@pytest.mark.parametrize("name", EVERY_SPEC)
@given(data=st.data(), units=st.booleans())
def test_every_spec_comes_back_equal(name, data, units):
    spec = data.draw(EVERY_SPEC[name])
    assert from_plain(type(spec), to_plain(spec, units=units), where="f", units=units) == spec


@given(graph=strategies.graph_sources)
def test_a_graph_comes_back_as_the_same_kind_of_source(graph):
    outer = Outer(name="", flag=False, dtype=Dtype.FLOAT32, counts=(), pair=("", 0.0), inners=(), graph=graph)
    back = from_plain(Outer, to_plain(outer), where="f").graph
    assert back == graph
    assert type(back) is type(graph) in (GraphFile, RmatGraph, CommunityGraph)
