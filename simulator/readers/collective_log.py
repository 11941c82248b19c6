"""CollectiveLog: what a log of collective times says, whatever wrote it."""

from dataclasses import dataclass

from simulator.group_shape import GroupShape
from simulator.specs.checks import require, require_at_least, require_positive
from simulator.specs.communication import Algorithm, Operation, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRow:
    """One size of one operation.

    Attributes:
        num_bytes: of the full buffer, as nccl-tests counts.
        seconds: the faster of out-of-place and in-place, the median where repetitions are known.
        low_seconds, high_seconds: the least and the most that the log holds for it.
        algorithm, protocol: that were forced; None for the library's own choice.
        variant: settings of which a log holds several; empty otherwise.
    """

    operation: Operation
    shape: GroupShape
    num_bytes: int
    seconds: float
    low_seconds: float
    high_seconds: float
    algorithm: Algorithm | None = None
    protocol: Protocol | None = None
    variant: str = ""

    def __post_init__(self) -> None:
        require_at_least(0, num_bytes=self.num_bytes)
        require_positive(seconds=self.seconds, low_seconds=self.low_seconds)
        require(self.low_seconds <= self.seconds <= self.high_seconds, "seconds", "must lie within low and high", self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What NCCL itself believes of an algorithm and a protocol.

    Attributes:
        bytes_per_second: of the full buffer, once it moves.
    """

    operations: tuple[Operation, ...]
    shape: GroupShape
    algorithm: Algorithm
    protocol: Protocol
    latency_seconds: float
    bytes_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLog:
    """A log in full.

    Attributes:
        name: of the file.
        source: who measured what, as the file says.
        device: "A100", "H100", "H200", "B200", another name as the file has it, or empty.
        cards_per_host: network cards of a host; 0 where unknown or inside one host.
        card_bytes_per_second: line rate of each; 0 where unknown.
        fabric: of the network or of the links inside a host.
        is_degraded: whether the file itself says that the fabric was faulty.
        environment: settings and versions.
        cautions: what is uncertain, and what was left out, a sentence each.
        rows: measurements.
        estimates: of NCCL's own model; no measurements.
    """

    name: str
    source: str
    device: str
    cards_per_host: int
    card_bytes_per_second: float
    fabric: str
    is_degraded: bool
    environment: tuple[tuple[str, str], ...]
    cautions: tuple[str, ...]
    rows: tuple[LogRow, ...]
    estimates: tuple[Estimate, ...] = ()

    @property
    def is_roce(self) -> bool:
        """Whether the network is Ethernet."""
        return "roce" in self.fabric.lower()

    @property
    def has_nvls(self) -> bool:
        """Whether switches inside hosts reduce: from Hopper on, unless the measurement had that off."""
        return self.device in ("H100", "H200", "B200") and ("NVLS", "off") not in self.environment
