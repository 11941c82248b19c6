"""Units: constants, number formats of tensors, and text such as "450 GB/s" to base units and back."""

import math
import re
from enum import StrEnum

from simulator.errors import SpecError

KILO, MEGA, GIGA, TERA = 10**3, 10**6, 10**9, 10**12
MB, GB = MEGA, GIGA
KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
MICROSECOND = 1e-6


class Dtype(StrEnum):
    """Number format in which activations are held and multiplied."""

    FLOAT32 = "fp32"
    BFLOAT16 = "bf16"

    @property
    def num_bytes(self) -> int:
        """Bytes of one number."""
        return {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2}[self]


class Dimension(StrEnum):
    """What a quantity measures; its base unit is the last word of the field's name."""

    BYTES = "bytes"
    BYTES_PER_SECOND = "bytes_per_second"
    SECONDS = "seconds"
    FLOPS_PER_SECOND = "flops_per_second"


_BYTES = {
    "B": 1,
    "kB": KILO,
    "MB": MEGA,
    "GB": GIGA,
    "TB": TERA,
    "KiB": KIB,
    "MiB": MIB,
    "GiB": GIB,
    "TiB": TIB,
}
_UNITS: dict[Dimension, dict[str, float]] = {
    Dimension.BYTES: {unit: float(size) for unit, size in _BYTES.items()},
    Dimension.BYTES_PER_SECOND: {f"{unit}/s": float(size) for unit, size in _BYTES.items()}
    | {"kb/s": KILO / 8, "Mb/s": MEGA / 8, "Gb/s": GIGA / 8, "Tb/s": TERA / 8},
    Dimension.SECONDS: {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0},
    Dimension.FLOPS_PER_SECOND: {"FLOP/s": 1.0, "MFLOP/s": 1e6, "GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15},
}
# What `format_quantity` prints: the units that people read most easily, largest first.
_PRINTED_UNITS = {
    Dimension.BYTES: ("TiB", "GiB", "MiB", "KiB", "B"),
    Dimension.BYTES_PER_SECOND: ("TB/s", "GB/s", "MB/s", "kB/s", "B/s"),
    Dimension.SECONDS: ("s", "ms", "us", "ns"),
    Dimension.FLOPS_PER_SECOND: ("PFLOP/s", "TFLOP/s", "GFLOP/s", "MFLOP/s", "FLOP/s"),
}
_QUANTITY = re.compile(r"\s*([-+]?[0-9]+(?:_[0-9]+)*(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?)\s*([A-Za-z/]+)\s*")


def dimension_of(field_name: str) -> Dimension | None:
    """Return what a field measures, by the end of its name; None for a count, a ratio or a text."""
    longest_first = sorted(Dimension, key=len, reverse=True)
    return next((dim for dim in longest_first if field_name.endswith(f"_{dim}") or field_name == dim), None)


def parse_quantity(text: str, dimension: Dimension) -> float:
    """Return the number of base units in a text such as "450 GB/s" or "1.9 us".

    Raises:
        SpecError: if the text is not a number and a unit of this dimension.
    """
    units = _UNITS[dimension]
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units:
        raise SpecError(f'must be a number and one of {", ".join(units)}, as in "2 {next(iter(units))}", got "{text}"')
    value = float(match[1]) * units[match[2]]
    if not math.isfinite(value):
        raise SpecError(f'must be a finite number, got "{text}"')
    return value


def format_quantity(value: float, dimension: Dimension) -> str:
    """Return a text with four digits and the unit that suits the size, such as "1.235 ms"."""
    units = _UNITS[dimension]
    printed = _PRINTED_UNITS[dimension]
    unit = next((unit for unit in printed if abs(value) >= units[unit]), printed[-1])
    return f"{value / units[unit]:.4g} {unit}"


def exact_quantity(value: float, dimension: Dimension) -> str:
    """Return a text that `parse_quantity` turns into exactly `float(value)`, as short as a unit allows."""
    units = _UNITS[dimension]
    candidates = [f"{repr(value / units[unit]).removesuffix('.0')} {unit}" for unit in _PRINTED_UNITS[dimension]]
    # Never empty: with the unit of one, the digits are the value's own.
    return min((text for text in candidates if parse_quantity(text, dimension) == float(value)), key=len)
