"""Specs to plain values and back, as their type hints say: what TOML and JSON have in common.

A plain value is a table (dict), a list, a text, a number or a truth value. A spec is a table whose keys are its
fields. A class of a union is told by its tag (`GENERATORS`). With `units=True`, for files that people write, a
field whose name ends in a unit is a text such as "450 GB/s" instead of a number.
"""

import dataclasses
import difflib
import math
import operator
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from enum import StrEnum
from functools import cache, partial
from typing import Any, TypeVar

from simulator.errors import SpecError
from simulator.specs.graph import CommunityGraph, RmatGraph
from simulator.specs.units import Dimension, dimension_of, exact_quantity, parse_quantity

T = TypeVar("T")
Convert = Callable[[Any], Any]

# Values of the key `generator` in a graph's table; without that key the table is a graph store.
GENERATORS: dict[str, type] = {"rmat": RmatGraph, "community": CommunityGraph}
TAG = "generator"

_EXAMPLES = {
    Dimension.BYTES: "141 GiB",
    Dimension.BYTES_PER_SECOND: "450 GB/s",
    Dimension.SECONDS: "1.9 us",
    Dimension.FLOPS_PER_SECOND: "989 TFLOP/s",
}


def to_plain(spec: Any, *, units: bool = False) -> dict[str, Any]:
    """Return a spec as a table of plain values."""
    kind: Any = type(spec)
    table: dict[str, Any] = _writer(kind, units)(spec)
    return table


def from_plain(kind: type[T], plain: object, *, where: str, units: bool = False) -> T:
    """Return the spec that a table describes.

    Args:
        kind: dataclass to build.
        where: the file, and the place in it; put before every complaint.

    Raises:
        SpecError: if a key is unknown or missing, or a value has the wrong type or breaks a rule of the spec.
    """
    hint: Any = kind
    try:
        spec: T = _reader(hint, units)(plain)
    except _MisfitError as misfit:
        raise SpecError(f"{where}: {misfit}") from None
    return spec


def shown(value: object) -> str:
    """Return a value as a message shows it: short, texts in double quotes."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else repr(value)
    return text if len(text) <= 80 else f"{text[:76]} ..."


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most like another, as the end of a message; empty if none is."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


class _MisfitError(Exception):
    """A plain value does not fit; it becomes a `SpecError` once all keys around the value are known."""

    def __init__(self, rule: str, *keys: str | int) -> None:
        super().__init__(rule)
        self.rule = rule
        self.keys = list(keys)

    def __str__(self) -> str:
        dotted = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.keys)
        return f"{dotted.removeprefix('.')} {self.rule}".lstrip()


# --- Reading: one function for each type, made once.


@cache
def _reader(hint: Any, units: bool) -> Convert:
    """Return the function that turns a plain value into a value of the hinted type."""
    if dataclasses.is_dataclass(hint):
        return _table_reader(hint, units)
    if hint in _SCALAR_READERS:
        return _SCALAR_READERS[hint]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return partial(_read_choice, hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Sequence or (origin is tuple and arguments[-1] is Ellipsis):
        return partial(_read_list, _reader(arguments[0], units))
    if origin is tuple:
        return partial(_read_entries, [_reader(argument, units) for argument in arguments])
    assert origin in (types.UnionType, typing.Union), hint
    if (single := _single_value(arguments)) is not None:
        return partial(_optional, _reader(single, units))
    return partial(_read_union, arguments, units)


def _single_value(arguments: tuple[Any, ...]) -> Any:
    """Return what a union of one plain value and nothing may hold; None for unions of tables."""
    kinds = [kind for kind in arguments if kind is not types.NoneType]
    is_plain = len(kinds) == 1 and (kinds[0] in _SCALAR_READERS or issubclass(kinds[0], StrEnum))
    return kinds[0] if is_plain else None


def _table_reader(kind: Any, units: bool) -> Convert:
    """Return the function that turns a table into a dataclass."""
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)
    readers = {field.name: _field_reader(field.name, hints[field.name], units) for field in fields}
    defaults = (field for field in fields if field.default is field.default_factory is dataclasses.MISSING)
    required = [field.name for field in defaults]

    def read(plain: object) -> Any:
        values = {}
        for key, value in _table(plain).items():
            if key not in readers:
                raise _MisfitError(_unknown(key, readers), key)
            try:
                values[key] = readers[key](value)
            except _MisfitError as misfit:
                misfit.keys.insert(0, key)
                raise
        for key in required:
            if key not in values:
                raise _MisfitError("is missing", key)
        try:
            return kind(**values)
        except SpecError as error:
            raise _broken_rule(str(error), readers) from None

    return read


def _broken_rule(message: str, fields: Collection[str]) -> _MisfitError:
    """Return the misfit for what a spec itself refused; its message mostly starts with the field's name."""
    field, _, rule = message.partition(" ")
    return _MisfitError(rule, field) if field in fields else _MisfitError(f"is refused: {message}")


def _unknown(key: str, known: Collection[str]) -> str:
    """Return the complaint about a key that a table cannot have."""
    return "is unknown" + (nearest(key, known) or f"; known here: {', '.join(known)}")


def _text_dimension(field: str, hint: Any, units: bool) -> Dimension | None:
    """Return what a field measures if its value is a text with a unit, or a list of such texts, else None."""
    return dimension_of(field) if units and _number_of(hint) in (int, float) else None


def _number_of(hint: Any) -> Any:
    """Return the type of the items of a tuple of any length, or of what may be left out; any other type as it is."""
    arguments = typing.get_args(hint)
    if _is_optional(hint):
        return _single_value(arguments)
    is_list = typing.get_origin(hint) is tuple and arguments[-1] is Ellipsis
    return arguments[0] if is_list else hint


def _is_optional(hint: Any) -> bool:
    """Return whether a hint is that of one plain value or nothing."""
    is_union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    return is_union and _single_value(typing.get_args(hint)) is not None


def _field_reader(name: str, hint: Any, units: bool) -> Convert:
    dimension = _text_dimension(name, hint, units)
    if dimension is None:
        return _reader(hint, units)
    read = partial(_read_quantity, dimension, _number_of(hint))
    if _is_optional(hint):
        return partial(_optional, read)
    return read if hint in (int, float) else partial(_read_list, read)


def _read_quantity(dimension: Dimension, hint: type, plain: object) -> float:
    if not isinstance(plain, str):
        rule = f'must be a text with a unit, such as "{_EXAMPLES[dimension]}", got {shown(plain)}'
        raise _MisfitError(rule + _unit_fix(dimension, plain))
    try:
        value = parse_quantity(plain, dimension)
    except SpecError as error:
        raise _MisfitError(str(error)) from None
    if hint is float:
        return value
    if value != int(value):
        raise _MisfitError(f'must be a whole number of {dimension}, got "{plain}" = {value!r}')
    return int(value)


def _unit_fix(dimension: Dimension, plain: object) -> str:
    """Return how a bare number is written with its unit, as the end of a message."""
    if isinstance(plain, bool) or not isinstance(plain, int | float) or not abs(plain) < 1e18:
        return ""
    return f'; if it counts {dimension.replace("_", " ")}, write "{exact_quantity(plain, dimension)}"'


def _read_int(plain: object) -> int:
    if isinstance(plain, int) and not isinstance(plain, bool):
        return plain
    raise _MisfitError(f"must be a whole number{_without_quotes(plain)}, got {shown(plain)}")


def _read_float(plain: object) -> float:
    if isinstance(plain, int | float) and not isinstance(plain, bool):
        try:
            if math.isfinite(plain):
                return float(plain)
        except OverflowError:
            pass
        raise _MisfitError(f"must be a finite number, got {shown(plain)}")
    raise _MisfitError(f"must be a number{_without_quotes(plain)}, got {shown(plain)}")


def _without_quotes(plain: object) -> str:
    return " without quotes or unit" if isinstance(plain, str) else ""


def _read_bool(plain: object) -> bool:
    if isinstance(plain, bool):
        return plain
    raise _MisfitError(f"must be true or false, got {shown(plain)}")


def _read_str(plain: object) -> str:
    if isinstance(plain, str):
        return plain
    raise _MisfitError(f"must be a text in quotes, got {shown(plain)}")


_SCALAR_READERS: dict[Any, Convert] = {int: _read_int, float: _read_float, bool: _read_bool, str: _read_str}


def _read_choice(kind: type[StrEnum], plain: object) -> StrEnum:
    try:
        return kind(plain)  # type: ignore[arg-type]
    except ValueError:
        close = nearest(plain, kind) if isinstance(plain, str) else ""
        raise _MisfitError(f"must be one of {', '.join(kind)}, got {shown(plain)}{close}") from None


def _table(plain: object) -> dict[str, Any]:
    if isinstance(plain, dict):
        return plain
    raise _MisfitError(f"must be a table, got {shown(plain)}")


def _list(plain: object) -> list[Any]:
    if isinstance(plain, list):
        return plain
    raise _MisfitError(f"must be a list, got {shown(plain)}")


def _read_list(read: Convert, plain: object) -> tuple[Any, ...]:
    return tuple(_read_item(read, index, item) for index, item in enumerate(_list(plain)))


def _read_entries(readers: list[Convert], plain: object) -> tuple[Any, ...]:
    items = _list(plain)
    if len(items) != len(readers):
        raise _MisfitError(f"must be a list of {len(readers)} entries, got {len(items)}")
    return tuple(_read_item(read, index, item) for index, (read, item) in enumerate(zip(readers, items, strict=True)))


def _read_item(read: Convert, index: int, item: object) -> Any:
    try:
        return read(item)
    except _MisfitError as misfit:
        misfit.keys.insert(0, index)
        raise


def _optional(convert: Convert, value: Any) -> Any:
    """Convert a value, or leave nothing as it is."""
    return None if value is None else convert(value)


def _read_union(members: tuple[Any, ...], units: bool, plain: object) -> Any:
    """Read the class that the tag names, the one without a tag where there is none, or nothing."""
    if plain is None and types.NoneType in members:
        return None
    tags = {tag: kind for tag, kind in GENERATORS.items() if kind in members}
    untagged = next(kind for kind in members if kind not in tags.values() and kind is not types.NoneType)
    table = _table(plain)
    if TAG not in table:
        if tags and "path" not in table:
            raise _MisfitError(f'must hold path = "..." or {TAG} = one of {", ".join(tags)}')
        return _reader(untagged, units)(table)
    tag = table[TAG]
    if not isinstance(tag, str) or tag not in tags:
        close = nearest(tag, tags) if isinstance(tag, str) else ""
        raise _MisfitError(f"must be one of {', '.join(tags)}, got {shown(tag)}{close}", TAG)
    return _reader(tags[tag], units)({key: value for key, value in table.items() if key != TAG})


# --- Writing: the way back.


@cache
def _writer(hint: Any, units: bool) -> Convert:
    """Return the function that turns a value of the hinted type into a plain value."""
    if dataclasses.is_dataclass(hint):
        return _table_writer(hint, units)
    if hint in _SCALAR_WRITERS:
        return _SCALAR_WRITERS[hint]
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return str
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Sequence or (origin is tuple and arguments[-1] is Ellipsis):
        write = _writer(arguments[0], units)
        return lambda items: [write(item) for item in items]
    if origin is tuple:
        writers = [_writer(argument, units) for argument in arguments]
        return lambda items: [write(item) for write, item in zip(writers, items, strict=True)]
    assert origin in (types.UnionType, typing.Union), hint
    if (single := _single_value(arguments)) is not None:
        return partial(_optional, _writer(single, units))
    return partial(_write_union, units)


def _write_float(value: float) -> float:
    if not math.isfinite(value):
        raise SpecError(f"a number must be finite to be written to a file, got {value}")
    return float(value)


# A float field may hold an int, and either a NumPy scalar: equal values must give equal texts, hence equal hashes.
_SCALAR_WRITERS: dict[Any, Convert] = {int: operator.index, float: _write_float, bool: bool, str: str}


def _table_writer(kind: Any, units: bool) -> Convert:
    """Return the function that turns a dataclass into a table."""
    hints = typing.get_type_hints(kind)
    writers = {name: _field_writer(name, hints[name], units) for name in hints}
    return lambda spec: {name: write(getattr(spec, name)) for name, write in writers.items()}


def _field_writer(name: str, hint: Any, units: bool) -> Convert:
    dimension = _text_dimension(name, hint, units)
    if dimension is None:
        return _writer(hint, units)
    write = partial(exact_quantity, dimension=dimension)
    if _is_optional(hint):
        return partial(_optional, write)
    return write if hint in (int, float) else lambda items: [write(item) for item in items]


def _write_union(units: bool, value: Any) -> Any:
    if value is None:
        return None
    table = to_plain(value, units=units)
    tag = next((tag for tag, kind in GENERATORS.items() if kind is type(value)), None)
    return table if tag is None else {TAG: tag, **table}
