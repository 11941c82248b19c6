"""Constants of `nccl.py`: what they mean, what is known of them before any log is read, and where fitted ones are."""

import json
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

from simulator.errors import SpecError
from simulator.specs.checks import require_positive
from simulator.specs.communication import Protocol

FITTED = Path(__file__).parent / "nccl_fitted.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolConstants:
    """Of a ring or a tree under one protocol.

    Attributes:
        start_us: before the first hop, in microseconds.
        hop_us: of a hop inside a host.
        crossing_us: of a hop from host to host.
        link_ratio, tree_link_ratio: of `device_link`'s rate that a ring reaches, and a tree.
        card_ratio: of the cards' rate that is reached.
    """

    start_us: float
    hop_us: float
    crossing_us: float
    link_ratio: float
    tree_link_ratio: float
    card_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclConstants:
    """Of all algorithms; "ratio" is of `device_link`'s rate unless it says otherwise.

    Attributes:
        reference_link_rate: of the links whose ramps the constants state, in bytes per second.
        older_start_ratio, older_hop_ratio: of devices before Hopper over Hopper's.
        tree_hop_ratio: of a tree's hop over a ring's.
        copy_ratio, fast_copy_ratio: at which a rank copies its own share, under Simple and under LL and LL128.
        add_ratio: at which a rank of an all-reduce adds its own share.
        ring_ramp_us, ring_ramp_across_us: height of the ramp at 1 MB under Simple, and what hosts add to it.
        scatter_ramp_ratio: of a reduce-scatter's ramp over that.
        ramp_exponent: of bytes in a ramp.
        nvls_*: of NVLink SHARP inside a host.
        nvls_tree_*: of NVLS trees; a level doubles the hosts, `ramp_host_us` is what two more hosts add to the ramp.
        pair_*: of pairwise messages; `across` is what the network adds to the start, `across_rank` for each rank, and
            `card_loss` over the number of hosts is what the cards lose.
        roce_card_ratio: of a card's rate on Ethernet (RoCE) over InfiniBand's; for logs alone, as clusters state rates.
    """

    ll: ProtocolConstants
    ll128: ProtocolConstants
    simple: ProtocolConstants
    reference_link_rate: float
    older_start_ratio: float
    older_hop_ratio: float
    tree_hop_ratio: float
    copy_ratio: float
    fast_copy_ratio: float
    add_ratio: float
    ring_ramp_us: float
    ring_ramp_across_us: float
    scatter_ramp_ratio: float
    ramp_exponent: float
    nvls_start_us: float
    nvls_ratio: float
    nvls_ramp_us: float
    nvls_tree_start_us: float
    nvls_tree_level_us: float
    nvls_tree_ratio: float
    nvls_tree_ramp_us: float
    nvls_tree_ramp_host_us: float
    nvls_tree_ramp_exponent: float
    pair_start_us: float
    pair_hop_us: float
    pair_link_ratio: float
    pair_copy_ratio: float
    pair_ramp_us: float
    pair_across_us: float
    pair_across_rank_us: float
    pair_card_loss: float
    roce_card_ratio: float

    def __post_init__(self) -> None:
        require_positive(**flat(self))

    def protocols(self) -> dict[Protocol, ProtocolConstants]:
        """Return the constants of each protocol."""
        return {Protocol.LL: self.ll, Protocol.LL128: self.ll128, Protocol.SIMPLE: self.simple}


def flat(constants: NcclConstants) -> dict[str, float]:
    """Return all constants by name; those of protocols with a dot, such as "ll.hop_us"."""
    found: dict[str, float] = {}
    for name in (field.name for field in fields(constants)):
        value = getattr(constants, name)
        if isinstance(value, ProtocolConstants):
            found |= {f"{name}.{key}": number for key, number in asdict(value).items()}
        else:
            found[name] = value
    return found


def unflat(numbers: dict[str, float]) -> NcclConstants:
    """Return the constants of which `flat` gave the numbers."""
    tables: dict[str, dict[str, float]] = {}
    plain: dict[str, float] = {}
    for name, number in numbers.items():
        first, _, second = name.partition(".")
        if second:
            tables.setdefault(first, {})[second] = number
        else:
            plain[first] = number
    return NcclConstants(**{name: ProtocolConstants(**table) for name, table in tables.items()}, **plain)  # type: ignore[arg-type]


# What is known before any log is read; fits stay near it where logs say nothing. Starts and hops: the tables of NCCL's
# src/graph/tuning.cc (base latencies of rings; NVLink's and the network's of rings, LL's network one for trees), tree
# rates as high as a ring's; pairwise messages across hosts: the comments of
# h100_400g_nccl_tuning_model_autoparallel.txt (37 us on 2 hosts to 98 on 16; 1 - 0.44 / hosts of the cards' rate).
# Ratios are of NVLINK4's 330 GB/s, whose line rate is 1.36 of it. All others are starting points.
PRIOR = NcclConstants(
    ll=ProtocolConstants(
        start_us=6.6, hop_us=0.6, crossing_us=5.0, link_ratio=0.35, tree_link_ratio=0.56, card_ratio=0.1
    ),
    ll128=ProtocolConstants(
        start_us=14.0, hop_us=1.9, crossing_us=8.5, link_ratio=0.84, tree_link_ratio=0.8, card_ratio=0.85
    ),
    simple=ProtocolConstants(
        start_us=8.4, hop_us=3.4, crossing_us=14.0, link_ratio=1.12, tree_link_ratio=1.07, card_ratio=0.97
    ),
    reference_link_rate=330e9,
    older_start_ratio=1.8,
    older_hop_ratio=1.3,
    tree_hop_ratio=0.8,
    copy_ratio=2.7,
    fast_copy_ratio=2.7,
    add_ratio=4.5,
    ring_ramp_us=6.3,
    ring_ramp_across_us=3.2,
    scatter_ramp_ratio=0.8,
    ramp_exponent=0.35,
    nvls_start_us=20.0,
    nvls_ratio=0.82,
    nvls_ramp_us=25.0,
    nvls_tree_start_us=30.0,
    nvls_tree_level_us=14.0,
    nvls_tree_ratio=0.76,
    nvls_tree_ramp_us=50.0,
    nvls_tree_ramp_host_us=31.0,
    nvls_tree_ramp_exponent=0.3,
    pair_start_us=7.0,
    pair_hop_us=0.3,
    pair_link_ratio=1.01,
    pair_copy_ratio=3.4,
    pair_ramp_us=12.5,
    pair_across_us=25.0,
    pair_across_rank_us=0.5,
    pair_card_loss=0.44,
    roce_card_ratio=0.85,
)


@cache
def fitted_constants() -> NcclConstants:
    """Return the constants that come with the project, fitted to the logs that the file names."""
    try:
        return unflat(json.loads(FITTED.read_text())["constants"])
    except (OSError, KeyError, TypeError, ValueError) as error:
        message = f"{FITTED}: must hold fitted constants, got {error!r}; write it by python -m tests.bench.collectives"
        raise SpecError(f"{message} --refit") from error
