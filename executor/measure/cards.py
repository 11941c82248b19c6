"""Which network cards a host has, as Linux says."""

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Cards:
    """The RDMA cards of a host whose ports are up.

    Attributes:
        count: of them; 0 without any.
        bytes_per_second: line rate of the slowest.
        fabric: "IB", "RoCE", or empty.
    """

    count: int
    bytes_per_second: float
    fabric: str


def network_cards(folder: Path = Path("/sys/class/infiniband")) -> Cards:
    """Return the RDMA cards that a folder of Linux lists, a port each."""
    rates, layers = [], set()
    for port in sorted(folder.glob("*/ports/*")):
        state, rate, layer = (_text(port / name) for name in ("state", "rate", "link_layer"))
        found = re.match(r"([\d.]+) Gb/sec", rate)
        if "ACTIVE" in state and found:
            rates.append(float(found[1]) * 1e9 / 8)
            layers.add(layer)
    fabric = "" if not rates else "RoCE" if "Ethernet" in layers else "IB"
    return Cards(count=len(rates), bytes_per_second=min(rates, default=0.0), fabric=fabric)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
