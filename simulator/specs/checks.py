"""Checks that the specs share; each names the field, the rule and the value."""

from collections.abc import Sequence

from simulator.errors import SpecError


def require(holds: bool, field: str, rule: str, value: object) -> None:
    """Raise `SpecError` with one sentence unless the rule holds."""
    if not holds:
        raise SpecError(f"{field} {rule}, got {value!r}")


def require_at_least(low: float, **fields: float) -> None:
    """Require each named field to be finite and at least `low`."""
    for field, value in fields.items():
        require(low <= value < float("inf"), field, f"must be finite and >= {low}", value)


def require_positive(**fields: float) -> None:
    """Require each named field to be finite and above zero."""
    for field, value in fields.items():
        require(0 < value < float("inf"), field, "must be finite and > 0", value)


def require_ratio(**fields: float) -> None:
    """Require each named field to lie in [0, 1)."""
    for field, value in fields.items():
        require(0 <= value < 1, field, "must be >= 0 and < 1", value)


def require_share(**fields: float | None) -> None:
    """Require each named field that is there to lie in [0, 1]."""
    for field, value in fields.items():
        require(value is None or 0 <= value <= 1, field, "must be within [0, 1]", value)


def require_length(length: int, **fields: Sequence[object]) -> None:
    """Require each named field to have `length` entries."""
    for field, value in fields.items():
        require(len(value) == length, field, f"must have {length} entries", len(value))
