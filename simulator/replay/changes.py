"""Change: what is to be otherwise in a replay, and how people write it.

    kernel:matrix_product=2x       kernels of a kind so many times faster
    host=2x                        the host's threads so many times faster
    device=H100                    kernels as on another device (a name, or a cluster file whose device is taken)
    network=h100x8-ndr             collectives as on another cluster (a name or a file)
    device_link=900 GB/s           rate of the links inside a host; host_link=25 GB/s: of those between hosts
    ranks=16                       collectives among so many ranks
    all_reduce=25 MiB, ranks=2     one more all-reduce in each step, of gradients, before the optimizer
    overlap=on, overlap=off        nothing waits for collectives; or all that follows does
    straggler=none                 no rank waits for a slow one
    size:128=256                   dimensions of that length have another one
    edges:1000000=2000000          attention over so many edges instead, where operators do not show them as a dimension
    precision=bf16                 floating-point tensors in another format

Changes joined by commas are made together.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from simulator.errors import SpecError
from simulator.replay.devices import require_device
from simulator.specs.cluster import BUILT_IN_CLUSTERS, ClusterSpec, DeviceSpec
from simulator.specs.convert import nearest
from simulator.specs.files import read_cluster
from simulator.specs.recording import KernelKind
from simulator.specs.units import Dimension, Dtype, parse_quantity

E = TypeVar("E", bound=StrEnum)

_KEYS = (
    "kernel:KIND",
    "host",
    "device",
    "network",
    "device_link",
    "host_link",
    "ranks",
    "all_reduce",
    "overlap",
    "straggler",
    "size:OLD",
    "edges:OLD",
    "precision",
)


class Overlap(StrEnum):
    """Whether work goes on beside collectives."""

    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What is otherwise; the defaults change nothing.

    Attributes:
        text: as people wrote it.
        kernel_factors: how many times faster each kind of kernel is.
        host_factor: how many times faster the host's threads are.
        device_link_rate, host_link_rate: bytes per second; None for as recorded.
        num_ranks: of every collective.
        all_reduce_bytes: of an all-reduce that is put before the optimizer in each step; 0 for none.
        sizes: lengths of dimensions that become others.
        edges: of attention, as recorded and as they would be; None for as recorded.
    """

    text: str
    kernel_factors: tuple[tuple[KernelKind, float], ...] = ()
    host_factor: float = 1.0
    device: DeviceSpec | None = None
    network: ClusterSpec | None = None
    device_link_rate: float | None = None
    host_link_rate: float | None = None
    num_ranks: int | None = None
    all_reduce_bytes: int = 0
    overlap: Overlap | None = None
    without_straggler: bool = False
    sizes: tuple[tuple[int, int], ...] = ()
    edges: tuple[int, int] | None = None
    dtype: Dtype | None = None

    @property
    def concerns_network(self) -> bool:
        """Whether collectives are to be priced anew."""
        return any(
            value is not None for value in (self.network, self.device_link_rate, self.host_link_rate, self.num_ranks)
        )


def parse_change(text: str) -> Change:
    """Return the change that a text such as "kernel:attention=2x, host_link=50 GB/s" asks for.

    Raises:
        SpecError: if a key or a value is none, or a key is given twice.
    """
    change = Change(text=text.strip())
    seen: set[str] = set()
    for part in text.split(","):
        key, sign, value = (word.strip() for word in part.partition("="))
        if not sign or not value:
            raise SpecError(f'--change must be KEY=VALUE with one of {", ".join(_KEYS)}, got "{part.strip()}"')
        if key in seen:
            raise SpecError(f'--change "{text}": {key} must be given once')
        seen.add(key)
        change = _with(change, key, value)
    if change.all_reduce_bytes and (change.num_ranks or 1) < 2:
        raise SpecError(f'--change "{text}": all_reduce must say among how many ranks; add ", ranks=2"')
    return change


def _with(change: Change, key: str, value: str) -> Change:
    if key.startswith("kernel:"):
        kind = _choice(KernelKind, key.removeprefix("kernel:"), what="kernel:KIND")
        return replace(change, kernel_factors=(*change.kernel_factors, (kind, _factor(value, key))))
    if key.startswith("size:"):
        old = _count(key.removeprefix("size:"), "size:OLD")
        return replace(change, sizes=(*change.sizes, (old, _count(value, key))))
    if key.startswith("edges:"):
        return replace(change, edges=(_count(key.removeprefix("edges:"), "edges:OLD"), _count(value, key)))
    if key not in _SETTERS:
        raise SpecError(f'--change: key must be one of {", ".join(_KEYS)}, got "{key}"{nearest(key, _SETTERS)}')
    return _SETTERS[key](change, value)


def cluster_called(value: str) -> ClusterSpec:
    """Return a cluster by name, or from a file.

    Raises:
        SpecError: if there is no such cluster.
    """
    if value in BUILT_IN_CLUSTERS:
        return BUILT_IN_CLUSTERS[value]
    if not value.endswith(".toml"):
        raise SpecError(
            f'a cluster must be one of {", ".join(BUILT_IN_CLUSTERS)}, or a file that ends in .toml, got "{value}"'
        )
    return read_cluster(Path(value))


def _device(value: str) -> DeviceSpec:
    if value.endswith(".toml"):
        return read_cluster(Path(value)).device
    return require_device(value, what="device")


def _quantity(value: str, key: str, dimension: Dimension) -> float:
    try:
        found = parse_quantity(value, dimension)
    except SpecError as error:
        raise SpecError(f"--change: {key} {error}") from None
    if found <= 0:
        raise SpecError(f'--change: {key} must be above 0, got "{value}"')
    return found


def _rate(value: str, key: str) -> float:
    return _quantity(value, key, Dimension.BYTES_PER_SECOND)


def _factor(value: str, key: str) -> float:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*x", value)
    if match is None or float(match[1]) <= 0:
        raise SpecError(f'--change: {key} must be a factor above 0 such as 2x, got "{value}"')
    return float(match[1])


def _count(value: str, key: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise SpecError(f'--change: {key} must be a whole number >= 1, got "{value}"')
    return int(value)


def _choice(kind: type[E], value: str, *, what: str) -> E:
    try:
        return kind(value)
    except ValueError:
        listed = ", ".join(kind)
        raise SpecError(f'--change: {what} must be one of {listed}, got "{value}"{nearest(value, kind)}') from None


def _none(value: str) -> bool:
    if value != "none":
        raise SpecError(f'--change: straggler must be none, got "{value}"')
    return True


_SETTERS: dict[str, Callable[[Change, str], Change]] = {
    "host": lambda change, value: replace(change, host_factor=_factor(value, "host")),
    "device": lambda change, value: replace(change, device=_device(value)),
    "network": lambda change, value: replace(change, network=cluster_called(value)),
    "device_link": lambda change, value: replace(change, device_link_rate=_rate(value, "device_link")),
    "host_link": lambda change, value: replace(change, host_link_rate=_rate(value, "host_link")),
    "ranks": lambda change, value: replace(change, num_ranks=_count(value, "ranks")),
    "all_reduce": lambda change, value: replace(
        change, all_reduce_bytes=round(_quantity(value, "all_reduce", Dimension.BYTES))
    ),
    "overlap": lambda change, value: replace(change, overlap=_choice(Overlap, value, what="overlap")),
    "straggler": lambda change, value: replace(change, without_straggler=_none(value)),
    "precision": lambda change, value: replace(change, dtype=_choice(Dtype, value, what="precision")),
}
