import hashlib
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import SpecError
from simulator.specs.cluster import NVLINK4, LinkSpec
from simulator.specs.document import content_sha256, document_content, document_text, json_text, parse_json
from tests.strategies import texts

CONTENT = {"count": 3, "names": ["a", "b"]}
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def refusal(text, kind="plan"):
    with pytest.raises(SpecError) as caught:
        document_content(text, kind, where="plan.json")
    return str(caught.value)


def test_a_document_by_hand():
    digest = hashlib.sha256(b'{"count":3,"names":["a","b"]}').hexdigest()
    assert document_text("plan", CONTENT) == (
        '{\n  "format": "graphpilot plan",\n  "schema_version": 4,\n'
        f'  "content_sha256": "{digest}",\n'
        '  "content": {"count": 3, "names": ["a", "b"]}\n}\n'
    )


def test_a_document_holds_its_content():
    assert document_content(document_text("plan", CONTENT), "plan", where="plan.json") == CONTENT


def test_other_white_space_and_order_are_no_change():
    document = json.loads(document_text("plan", CONTENT))
    document["content"] = dict(reversed(document["content"].items()))
    assert document_content(json.dumps(document, indent=7), "plan", where="plan.json") == CONTENT


@given(value=values, indent=st.sampled_from(["", "  "]))
def test_json_is_read_back_by_pythons_reader(value, indent):
    assert json.loads(json_text(value, indent)) == value


@given(value=values)
def test_lines_of_json_are_short_unless_a_plain_value_is_long(value):
    for line in json_text(value).splitlines():
        longest = max((len(json.dumps(item)) for item in plain_items(value)), default=0)
        assert len(line) <= max(120, longest + 120)


def plain_items(value):
    """Yield everything that is written on one line whatever its length: plain values and lists of them."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from plain_items(item)
    elif isinstance(value, list) and any(isinstance(item, list | dict) for item in value):
        for item in value:
            yield from plain_items(item)
    else:
        yield value


def test_a_changed_file_is_refused():
    found = refusal(document_text("plan", CONTENT).replace('"count": 3', '"count": 4'))
    assert found.startswith("plan.json: content_sha256 must be that of the content, ")
    assert found.endswith("the file was changed after it was written; write it again with graphpilot plan")


def test_a_file_without_hash_is_refused():
    document = json.loads(document_text("plan", CONTENT))
    del document["content_sha256"]
    assert "content_sha256 must be that of the content" in refusal(json.dumps(document))


@pytest.mark.parametrize("length", [0, 1, 40, 100])
def test_a_file_cut_short_is_refused(length):
    found = refusal(document_text("plan", CONTENT)[:length])
    assert found.startswith("plan.json: is not JSON: ")
    assert found.endswith("; the file was cut short, or is none of ours")


def test_a_file_of_another_kind_is_refused():
    found = refusal(document_text("calibration", CONTENT))
    assert found == (
        'plan.json: format must be "graphpilot plan", got "graphpilot calibration"; write it again with graphpilot plan'
    )


@pytest.mark.parametrize("text", ["[]", "3", "{}", '{"format": null}', '{"format": ["graphpilot plan"]}'])
def test_a_file_of_no_kind_is_refused(text):
    assert refusal(text).startswith('plan.json: format must be "graphpilot plan", got ')


@pytest.mark.parametrize(
    ("version", "end"),
    [
        (5, "schema_version must be 4, got 5; update graphpilot, which is older than the file"),
        (0, "schema_version must be 4, got 0; write it again with graphpilot plan"),
        (True, "schema_version must be 4, got true; write it again with graphpilot plan"),
        ("1", 'schema_version must be 4, got "1"; write it again with graphpilot plan'),
        (None, "schema_version must be 4, got None; write it again with graphpilot plan"),
    ],
)
def test_a_file_of_another_version_is_refused(version, end):
    document = json.loads(document_text("plan", CONTENT))
    document["schema_version"] = version
    assert refusal(json.dumps(document)) == f"plan.json: {end}"


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_are_not_finite_are_refused(constant):
    with pytest.raises(SpecError, match=f"f: is not JSON: {constant} is not a number"):
        parse_json(f'{{"a": {constant}}}', where="f")


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000], ids=["too deep", "too many digits"])
def test_what_python_cannot_hold_is_refused(text):
    with pytest.raises(SpecError, match="f: is not JSON"):
        parse_json(text, where="f")


def test_equal_specs_have_equal_hashes_and_others_do_not():
    same = LinkSpec(latency_seconds=NVLINK4.latency_seconds, bandwidth_bytes_per_second=330_000_000_000)
    assert content_sha256(same) == content_sha256(replace(same, bandwidth_bytes_per_second=330e9))
    assert content_sha256(same) != content_sha256(replace(same, latency_seconds=0.0))
