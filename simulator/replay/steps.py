"""Which part of a recording is replayed: its whole steps, where it says where they begin."""

from collections import defaultdict
from dataclasses import dataclass

from simulator.specs.recording import DeviceOperation, HostCall, Operator, Recording


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The part of a recording that is replayed.

    Attributes:
        boundaries: instants between steps, the first and the last included.
        thread: whose ranges told them; empty where none did.
        told_by: what told them, for people.
    """

    boundaries: tuple[float, ...]
    thread: str
    told_by: str

    @property
    def num_steps(self) -> int:
        """Steps in the window."""
        return len(self.boundaries) - 1


def window_of(recording: Recording) -> Window:
    """Return the steps of a recording.

    They are those of the profiler (ProfilerStep#...), else from one end of the optimizer's step to the next, else from
    one start of DistributedDataParallel's forward to the next and the recording's end, else all of it is one step.
    """
    ranges = [operator for operator in recording.operators if operator.is_annotation]
    marked = sorted((one for one in ranges if one.name.startswith("ProfilerStep")), key=_start)
    if marked:
        thread = marked[0].thread
        found = [one for one in marked if one.thread == thread]
        # Steps follow one another; what lies between two of them belongs to the earlier one.
        instants = (*(one.start_seconds for one in found), found[-1].end_seconds)
        return Window(boundaries=instants, thread=thread, told_by="ranges of the profiler's steps")
    for prefix, at_end in (("Optimizer.step", True), ("DistributedDataParallel.forward", False)):
        if (window := _by_range(recording, ranges, prefix, at_end=at_end)) is not None:
            return window
    return Window(boundaries=(0.0, _end(recording)), thread="", told_by="no range: all of the recording is one step")


def _by_range(recording: Recording, ranges: list[Operator], prefix: str, *, at_end: bool) -> Window | None:
    """Return steps from one end, or start, of a repeated range to the next; None if it is not repeated."""
    of_name: dict[tuple[str, str], list[Operator]] = defaultdict(list)
    for one in ranges:
        if one.name.startswith(prefix):
            of_name[one.name, one.thread].append(one)
    if not of_name:
        return None
    (name, thread), found = max(of_name.items(), key=lambda item: len(item[1]))
    instants = sorted(one.end_seconds if at_end else one.start_seconds for one in found)
    if not at_end:
        instants.append(_end(recording))
    if len(instants) < 2:
        return None
    return Window(boundaries=tuple(instants), thread=thread, told_by=f"{'ends' if at_end else 'starts'} of {name}")


def _end(recording: Recording) -> float:
    found: list[DeviceOperation | HostCall | Operator] = [
        *recording.operations,
        *recording.calls,
        *recording.operators,
    ]
    return max(one.end_seconds for one in found)


def _start(operator: Operator) -> float:
    return operator.start_seconds
