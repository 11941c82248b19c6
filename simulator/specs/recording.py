"""Recording: what a profiler saw of one rank of any PyTorch run, in one vocabulary for all vendors and versions.

Instants are seconds since `Recording.origin_nanoseconds`, durations seconds. A reader keeps or counts every event of
its file: `read_counts` less `dropped` is what the tuples hold.
"""

from dataclasses import dataclass
from enum import StrEnum


class KernelKind(StrEnum):
    """What a piece of device work does, told by its name."""

    MATRIX_PRODUCT = "matrix_product"
    CONVOLUTION = "convolution"
    ATTENTION = "attention"
    GATHER_SCATTER = "gather_scatter"
    NORMALISATION = "normalisation"
    SOFTMAX = "softmax"
    REDUCTION = "reduction"
    OPTIMIZER = "optimizer"
    ELEMENTWISE = "elementwise"
    COLLECTIVE = "collective"
    COPY = "copy"
    FILL = "fill"
    OTHER = "other"


class CallKind(StrEnum):
    """What a call of the host into the device's runtime does to the order of things."""

    LAUNCH = "launch"
    STREAM_SYNC = "stream_sync"
    EVENT_SYNC = "event_sync"
    DEVICE_SYNC = "device_sync"
    RECORD_EVENT = "record_event"
    WAIT_EVENT = "wait_event"
    OTHER = "other"

    @property
    def blocks_host(self) -> bool:
        """Whether the host waits in it for the device."""
        return self in (CallKind.STREAM_SYNC, CallKind.EVENT_SYNC, CallKind.DEVICE_SYNC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A collective, or a message between ranks.

    Attributes:
        operation: such as "all_reduce"; "send_recv" where the file does not say which it is.
        num_bytes: that this rank gives to the call; None where the file has no sizes.
        num_ranks: of its group; None where unknown.
        group: its ranks; empty where unknown.
        group_name: tells groups apart; empty where unknown.
    """

    operation: str
    num_bytes: int | None = None
    num_ranks: int | None = None
    group: tuple[int, ...] = ()
    group_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A call that PyTorch ran on the host, or a range that the user named.

    Attributes:
        shapes: of its tensors; those of a list of tensors one after another.
        dtypes: of its inputs, as PyTorch spells them.
        is_annotation: a named range rather than an operator.
        record_id: number that host traces (Chakra) know it by, if any.
    """

    name: str
    thread: str
    start_seconds: float
    duration_seconds: float
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    is_annotation: bool = False
    record_id: int | None = None

    @property
    def end_seconds(self) -> float:
        """Instant at which it returned."""
        return self.start_seconds + self.duration_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCall:
    """A call into CUDA's or HIP's runtime or driver.

    Attributes:
        correlation: number that it shares with what it launched.
        stream: that it synchronises or makes wait; None where the file does not say.
        awaits_stream, awaits_record: of a wait for an event, whose event it is, and the correlation of the call that
            recorded it; None where the file does not say.
    """

    name: str
    kind: CallKind
    thread: str
    start_seconds: float
    duration_seconds: float
    correlation: int | None = None
    stream: str | None = None
    awaits_stream: str | None = None
    awaits_record: int | None = None

    @property
    def end_seconds(self) -> float:
        """Instant at which it returned."""
        return self.start_seconds + self.duration_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOperation:
    """A kernel, copy or fill on a stream; of runs on CPUs, a collective on the thread that runs it.

    Attributes:
        correlation: of the call that launched it; None where unknown.
        operator: index of the innermost operator that launched it; None where unknown.
        is_pageable_copy: to or from memory of the host that is not pinned: the host waits for it.
        message: of a collective.
        waiting_seconds: of a collective, the part of its duration known to be a wait for other ranks.
    """

    name: str
    kind: KernelKind
    stream: str
    start_seconds: float
    duration_seconds: float
    correlation: int | None = None
    operator: int | None = None
    num_bytes: int | None = None
    is_pageable_copy: bool = False
    message: Message | None = None
    waiting_seconds: float = 0.0

    @property
    def end_seconds(self) -> float:
        """Instant at which it ended."""
        return self.start_seconds + self.duration_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """All that a file says of one rank.

    Attributes:
        name: of the file.
        rank: None where nothing says it.
        num_ranks: of the run; None where nothing says it.
        device_name: as the driver spells it; empty where unknown, or on CPUs.
        origin_nanoseconds: instant 0 by the clock of the rank's host.
        read_counts: complete events in the file, by category.
        dropped: events not kept, by category and reason.
        notes: what was assumed, in sentences.
    """

    name: str
    rank: int | None
    num_ranks: int | None
    device_name: str
    origin_nanoseconds: int
    operations: tuple[DeviceOperation, ...]
    calls: tuple[HostCall, ...]
    operators: tuple[Operator, ...]
    read_counts: tuple[tuple[str, int], ...] = ()
    dropped: tuple[tuple[str, str, int], ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def num_kept(self) -> int:
        """Complete events that the tuples hold."""
        return len(self.operations) + len(self.calls) + len(self.operators)

    @property
    def num_dropped(self) -> int:
        """Complete events that they do not hold."""
        return sum(count for _, _, count in self.dropped)
