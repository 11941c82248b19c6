import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import SpecError
from simulator.specs.cluster import BUILT_IN_CLUSTERS
from simulator.specs.convert import to_plain
from simulator.specs.toml import full_cluster, merged, parse_toml, toml_text
from tests.strategies import texts

# tomllib is the other side: what it reads from our text must be what the text was made of.
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | texts
keys = st.from_regex(r"[A-Za-z0-9_]+", fullmatch=True)
tables = st.recursive(
    st.dictionaries(keys, scalars | st.lists(scalars, max_size=3), max_size=3),
    lambda inner: st.dictionaries(keys, scalars | inner, max_size=3),
    max_leaves=6,
)

NAMES = ", ".join([*sorted(BUILT_IN_CLUSTERS), "local"])


@given(table=tables)
def test_tables_printed_as_toml_are_read_back_by_pythons_reader(table):
    assert tomllib.loads(toml_text(table)) == table


def test_toml_by_hand():
    table = {"name": 'a "b"\n', "device": {"kind": "cpu", "link": {"fast": True}}, "counts": [1, 2]}
    assert toml_text(table) == (
        'name = "a \\"b\\"\\n"\ncounts = [1, 2]\n\n[device]\nkind = "cpu"\n\n[device.link]\nfast = true\n'
    )


def test_a_syntax_error_is_named_by_its_line():
    with pytest.raises(SpecError, match=r"^run\.toml: is not TOML: Invalid value \(at line 3, column 9\)$"):
        parse_toml("[model]\nwidth = 64\nheads = \n", where="run.toml")


def test_a_table_written_twice_is_refused():
    with pytest.raises(SpecError, match=r"run\.toml: is not TOML: Cannot declare \('model',\) twice \(at line 3"):
        parse_toml("[model]\nwidth = 1\n[model]\n", where="run.toml")


def test_inner_tables_are_changed_key_by_key():
    base = {"name": "a", "link": {"slow": 1, "fast": 2}, "count": 3}
    changes = {"link": {"fast": 5}, "count": {"new": 1}}
    assert merged(base, changes) == {"name": "a", "link": {"slow": 1, "fast": 5}, "count": {"new": 1}}
    assert base["link"] == {"slow": 1, "fast": 2}


def test_the_machine_at_hand_has_no_description():
    assert full_cluster({"name": "local"}, where="f") is None


def test_a_full_description_may_bear_any_name():
    table = {**to_plain(BUILT_IN_CLUSTERS["h200x8"], units=True), "name": "local"}
    assert full_cluster(table, where="f") == table


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            {"name": "h200x9"},
            f'f: cluster.name must be one of {NAMES}, got "h200x9"; did you mean h200x8? '
            "(a cluster of your own lacks num_hosts, devices_per_host, device, device_link, host_link)",
        ),
        ({"num_hosts": 2}, f"f: cluster.name must be one of {NAMES}, it is missing (a cluster"),
        ({"name": 3}, f"f: cluster.name must be one of {NAMES}, got 3 (a cluster"),
        (
            {"name": "local", "num_hosts": 2},
            'f: cluster.name = "local" is the machine as it is and takes no other keys, got num_hosts; name',
        ),
    ],
)
def test_a_cluster_that_nobody_knows_is_refused(table, message):
    with pytest.raises(SpecError) as caught:
        full_cluster(table, where="f", key="cluster.")
    assert str(caught.value).startswith(message)
