"""What `nvidia-smi topo -m` and `nvidia-smi topo -p2p r` print."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from simulator.errors import SpecError
from simulator.readers.topology_found import NVSWITCH, FoundHost, Join
from simulator.readers.topology_rates import GPU_MODELS, MODEL_OF_NVLINKS
from simulator.specs.topology import LinkKind

_ESCAPE = re.compile(r"\x1b?\[\d*(?:;\d+)*m")
_DEVICE = re.compile(r"GPU(\d+)")
_NVLINK = re.compile(r"NV(\d+)")
# Of the legend that nvidia-smi prints; SOC is SYS of old drivers.
_BELOW_SWITCH, _BELOW_SOCKET, _ACROSS = ("PIX", "PXB"), ("PHB", "NODE"), ("SYS", "SOC")
_PEER_STATES = ("OK", "CNS", "GNS", "TNS", "NS", "DR", "U")
_MOST_NVLINKS = max(model.nvlinks for model in GPU_MODELS.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMatrix:
    """Which devices may read each other's memory.

    Attributes:
        refused: pairs of devices that may not, with the reason that nvidia-smi gives.
    """

    num_devices: int
    refused: tuple[tuple[int, int, str], ...]


def is_matrix(text: str) -> bool:
    """Return whether a text is one that nvidia-smi topo prints."""
    return next(_headers(text), None) is not None


def is_peer_matrix(text: str) -> bool:
    """Return whether a text is that of `nvidia-smi topo -p2p r`."""
    cells = [cell for _, row, _ in _rows(text) for cell in row if cell != "X"]
    return bool(cells) and all(cell in _PEER_STATES for cell in cells)


def read_peer_matrix(text: str, *, where: str) -> PeerMatrix:
    """Return what `nvidia-smi topo -p2p r` printed.

    Raises:
        SpecError: if a row or a cell is missing or unknown.
    """
    cells, columns, _ = _cells(text, where, known=lambda cell: cell in _PEER_STATES)
    numbers = {name: int(match[1]) for name in columns if (match := _DEVICE.fullmatch(name))}
    refused = [
        (numbers[row], numbers[column], cell)
        for (row, column), cell in cells.items()
        if row in numbers and column in numbers and numbers[row] < numbers[column] and cell != "OK"
    ]
    return PeerMatrix(num_devices=len(numbers), refused=tuple(sorted(refused)))


def read_link_matrix(text: str, *, where: str) -> FoundHost:
    """Return what `nvidia-smi topo -m` printed.

    Raises:
        SpecError: if a row or a cell is missing or unknown.
    """
    cells, columns, numa = _cells(text, where, known=_is_link_class)
    devices = [name for name in columns if _DEVICE.fullmatch(name)]
    nics = [name for name in columns if name not in devices]
    part = {name: f"device{number}" for number, name in enumerate(devices)}
    part |= {name: f"nic{number}" for number, name in enumerate(nics)}
    joins = _pcie_joins(cells, part, numa)
    nvlinks, nvlink_notes = _nvlinks(cells, devices)
    counts = {count for _, _, count in nvlinks}
    model = MODEL_OF_NVLINKS.get(max(counts, default=0))
    return FoundHost(
        num_devices=len(devices),
        joins=joins,
        nvlinks=nvlinks,
        nic_gigabits=(None,) * len(nics),
        model=model,
        model_note=None if model is None else f"{max(counts)} NVLinks between devices",
        notes=tuple(nvlink_notes),
    )


def _is_link_class(cell: str) -> bool:
    return cell in (*_BELOW_SWITCH, *_BELOW_SOCKET, *_ACROSS) or _NVLINK.fullmatch(cell) is not None


def _headers(text: str) -> Iterator[list[str]]:
    """Yield the names of the columns of lines that are a header."""
    for line in _ESCAPE.sub("", text).splitlines():
        words = line.split()
        if len(words) > 0 and words[0] == "GPU0" and not set(words[1:]) & {"X", "OK"}:
            yield words[: words.index("CPU")] if "CPU" in words else words


def _rows(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield each row's name, its cells, and the words after them."""
    columns = next(_headers(text), [])
    lines = iter(_ESCAPE.sub("", text).splitlines())
    is_below = False
    for line in lines:
        words = line.split()
        if not words:
            continue
        if words[0] == "GPU0" and "X" not in words:
            is_below = True
        elif is_below and words[0] in columns:
            yield words[0], words[1 : 1 + len(columns)], words[1 + len(columns) :]
        elif is_below and words[0].endswith(":"):
            return  # a legend


def _cells(text: str, where: str, *, known: object) -> tuple[dict[tuple[str, str], str], list[str], dict[str, str]]:
    """Return the cells by the names of row and column, the columns, and the NUMA affinity of rows that have one."""
    columns = next(_headers(text), None)
    if columns is None:
        raise SpecError(f"{where}: must have a header that begins with GPU0; give what nvidia-smi topo printed, whole")
    cells: dict[tuple[str, str], str] = {}
    numa: dict[str, str] = {}
    for name, row, rest in _rows(text):
        if len(row) < len(columns):
            raise SpecError(f"{where}: row {name} must have {len(columns)} cells, got {len(row)}; give the whole text")
        for column, cell in zip(columns, row, strict=True):
            if column != name and not known(cell):  # type: ignore[operator]
                raise SpecError(f"{where}: row {name}, column {column}: is no known link: {cell!r}")
            if column != name:
                cells[name, column] = cells[column, name] = cell
        if len(rest) >= 2 and rest[1] != "N/A":
            numa[name] = rest[1]
    rows = {name for name, *_ in _rows(text)}
    missing = [name for name in columns if _DEVICE.fullmatch(name) and name not in rows]
    if missing:
        raise SpecError(f"{where}: must have a row for {missing[0]}; give the whole text")
    return cells, columns, numa


def _nvlinks(
    cells: Mapping[tuple[str, str], str], devices: list[str]
) -> tuple[tuple[tuple[str, str, int], ...], list[str]]:
    """Return the NVLinks, and what was concluded about a switch."""
    counts = {
        (a, b): int(match[1])
        for a, first in enumerate(devices)
        for b, second in enumerate(devices)
        if a < b and (match := _NVLINK.fullmatch(cells[first, second]))
    }
    num_pairs = len(devices) * (len(devices) - 1) // 2
    same = set(counts.values())
    # Each of several pairs has all the links of a device: they lead to a switch.
    if len(counts) == num_pairs > 1 and len(same) == 1 and min(same) * (len(devices) - 1) > _MOST_NVLINKS:
        (count,) = same
        links = tuple((f"device{number}", NVSWITCH, count) for number in range(len(devices)))
        return links, [f"all devices see {count} NVLinks to each other, more than one has: they lead to a switch"]
    return tuple((f"device{a}", f"device{b}", count) for (a, b), count in counts.items()), []


def _pcie_joins(
    cells: Mapping[tuple[str, str], str], part: Mapping[str, str], numa: Mapping[str, str]
) -> tuple[Join, ...]:
    """Return a tree of PCIe switches and sockets in which each pair is as far apart as the matrix says.

    PXB is taken for one switch, and PHB and NODE both for the way by the processor.
    """
    by_switch = _classes(part, (pair for pair, cell in cells.items() if cell in _BELOW_SWITCH))
    same_node = [(a, b) for a in numa for b in numa if numa[a] == numa[b]]
    near = [pair for pair, cell in cells.items() if cell in (*_BELOW_SWITCH, *_BELOW_SOCKET)]
    by_socket = _classes(part, [*near, *same_node])
    joins = []
    for number, names in enumerate(group for group in by_switch if len(group) > 1):
        joins += [Join(ends=(part[name], f"pcie{number}"), kind=LinkKind.PCIE) for name in names]
        socket = next(index for index, group in enumerate(by_socket) if names[0] in group)
        joins.append(Join(ends=(f"pcie{number}", f"socket{socket}"), kind=LinkKind.HOST_BRIDGE))
    for group in by_switch:
        if len(group) == 1:
            socket = next(index for index, names in enumerate(by_socket) if group[0] in names)
            joins.append(Join(ends=(part[group[0]], f"socket{socket}"), kind=LinkKind.HOST_BRIDGE))
    sockets = range(len(by_socket))
    joins += [Join(ends=(f"socket{a}", f"socket{b}"), kind=LinkKind.SOCKET) for a in sockets for b in sockets if a < b]
    return tuple(joins)


def _classes(names: Iterable[str], pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Return the names in groups that pairs join, in order of first names."""
    group_of = {name: [name] for name in names}
    for a, b in pairs:
        if group_of[a] is not group_of[b]:
            first, second = group_of[a], group_of[b]
            first += second
            group_of.update(dict.fromkeys(second, first))
    order = list(group_of)
    return [sorted(group, key=order.index) for name, group in group_of.items() if min(group, key=order.index) == name]
