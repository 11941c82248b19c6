"""The frame of every JSON file of ours: a format, a schema version, and the content's hash."""

import hashlib
import json
from typing import Any

from simulator.errors import SpecError
from simulator.specs.convert import shown, to_plain

# What each JSON file is called, the version of its layout, and the command that writes it.
SCHEMA_VERSIONS = {"plan": 4, "calibration": 4, "trace": 4, "fanout": 1, "checkpoint": 1, "collective log": 1}
_COMMANDS = {
    "plan": "graphpilot plan",
    "calibration": "graphpilot calibrate",
    "trace": "graphpilot simulate or train",
    "fanout": "graphpilot fanout",
    "checkpoint": "graphpilot train",
    "collective log": "python -m executor.measure.fabric",
}
_LINE_LENGTH = 120


def content_sha256(spec: object) -> str:
    """Return the hash of a spec's values; a file that holds the spec has the same in it."""
    return _plain_sha256(to_plain(spec))


def document_head(kind: str) -> dict[str, Any]:
    """Return what says of a file which kind it is of, and which version of the kind."""
    return {"format": f"graphpilot {kind}", "schema_version": SCHEMA_VERSIONS[kind]}


def check_head(head: object, kind: str, *, where: str) -> dict[str, Any]:
    """Return the table that `head` is.

    Raises:
        SpecError: if it is of another kind, or of another version of this kind.
    """
    found = head.get("format") if isinstance(head, dict) else None
    if not isinstance(head, dict) or found != f"graphpilot {kind}":
        raise SpecError(f'{where}: format must be "graphpilot {kind}", got {shown(found)}; {_fix(kind)}')
    version, known = head.get("schema_version"), SCHEMA_VERSIONS[kind]
    if version != known or isinstance(version, bool):
        newer = isinstance(version, int) and version > known
        fix = "update graphpilot, which is older than the file" if newer else _fix(kind)
        raise SpecError(f"{where}: schema_version must be {known}, got {shown(version)}; {fix}")
    return head


def document_text(kind: str, content: dict[str, Any]) -> str:
    """Return the JSON text of a file of some kind."""
    document = {**document_head(kind), "content_sha256": _plain_sha256(content), "content": content}
    return json_text(document) + "\n"


def document_content(text: str, kind: str, *, where: str) -> object:
    """Return the content of a JSON text.

    Raises:
        SpecError: if the text is not JSON, of another kind or version, or was changed since it was written.
    """
    document = check_head(parse_json(text, where=where), kind, where=where)
    content, written_sha256 = document.get("content"), document.get("content_sha256")
    sha256 = _plain_sha256(content)
    if sha256 != written_sha256:
        rule = f"content_sha256 must be that of the content, {sha256}, got {shown(written_sha256)}"
        raise SpecError(f"{where}: {rule}: the file was changed after it was written; {_fix(kind)}")
    return content


def parse_json(text: str, *, where: str) -> object:
    """Return the value of a JSON text.

    Raises:
        SpecError: if the text is not JSON, or holds a number that is not finite.
    """

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    try:
        value: object = json.loads(text, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where}: is not JSON: {error}; the file was cut short, or is none of ours") from None
    return value


def json_text(value: object, indent: str = "") -> str:
    """Return JSON with an entry a line, except that lists of plain values and all that fits a line are kept whole."""
    if isinstance(value, dict) and value:
        opening, closing = "{}"
        items = [f"{json.dumps(key)}: {json_text(item, indent + '  ')}" for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        opening, closing = "[]"
        items = [json_text(item, indent + "  ") for item in value]
    else:
        return json.dumps(value)
    whole = f"{opening}{', '.join(items)}{closing}"
    if len(indent) + len(whole) <= _LINE_LENGTH and "\n" not in whole:
        return whole
    inner = f",\n{indent}  ".join(items)
    return f"{opening}\n{indent}  {inner}\n{indent}{closing}"


def _fix(kind: str) -> str:
    return f"write it again with {_COMMANDS[kind]}"


def _plain_sha256(plain: object) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
