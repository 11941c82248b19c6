"""The tables of `run.toml` and `cluster.toml`: TOML text to tables and back, and clusters by name."""

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from typing import Any

from simulator.errors import SpecError
from simulator.specs.cluster import BUILT_IN_CLUSTERS, ClusterSpec
from simulator.specs.convert import nearest, shown, to_plain

LOCAL = "local"  # name of the machine at hand


def parse_toml(text: str, *, where: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises:
        SpecError: with line and column, if the text is not TOML.
    """
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise SpecError(f"{where}: is not TOML: {error}") from None


def toml_text(table: Mapping[str, Any], prefix: str = "") -> str:
    """Return a table as TOML: plain keys first, then each inner table under a header; keys without value are left out.

    Args:
        prefix: dotted header of the table itself, with a dot at its end; empty for the whole file.
    """
    inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
    plain = {key: value for key, value in table.items() if key not in inner and value is not None}
    lines = [f"{key} = {_toml_value(value)}\n" for key, value in plain.items()]
    parts = [f"[{prefix}{key}]\n{toml_text(value, f'{prefix}{key}.')}" for key, value in inner.items()]
    return "\n".join(["".join(lines)] * bool(lines) + parts)


def full_cluster(table: Mapping[str, Any], *, where: str, key: str = "") -> dict[str, Any] | None:
    """Return all fields of the cluster that a table names, with the table's other keys in place of its own.

    A table that describes a cluster in full is returned as it is; None stands for the machine at hand.

    Args:
        where: the file, put before every complaint.
        key: dotted key of the table, with a dot at its end.

    Raises:
        SpecError: if the name is not known and the description not complete.
    """
    name = table.get("name")
    if isinstance(name, str) and name in BUILT_IN_CLUSTERS:
        return merged(to_plain(BUILT_IN_CLUSTERS[name], units=True), table)
    if table == {"name": LOCAL}:
        return None
    required = [field.name for field in dataclasses.fields(ClusterSpec) if field.default is dataclasses.MISSING]
    missing = [name for name in required if name not in table]
    if not missing:
        return dict(table)
    if name == LOCAL:
        others = ", ".join(other for other in table if other != "name")
        rule = f'{key}name = "{LOCAL}" is the machine as it is and takes no other keys, got {others}'
        raise SpecError(f"{where}: {rule}; name another cluster, or describe one in full")
    known = [*sorted(BUILT_IN_CLUSTERS), LOCAL]
    close = nearest(name, known) if isinstance(name, str) else ""
    got = f"got {shown(name)}" if "name" in table else "it is missing"
    rule = f"{key}name must be one of {', '.join(known)}, {got}{close}"
    raise SpecError(f"{where}: {rule} (a cluster of your own lacks {', '.join(missing)})")


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with some keys changed, those of inner tables one by one."""
    result = dict(base)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), Mapping)
        result[key] = merged(base[key], value) if both else value
    return result


def _toml_value(value: object) -> str:
    """Return a value in TOML, which shares JSON's notation but for tables, one control character and texts in UTF-8."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False).replace("\x7f", "\\u007f")
