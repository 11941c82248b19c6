"""The host's side of a recording: what each thread did between launches, and what it waited for.

A thread is a row of nodes that end at marks: launches, ends of waits, hand-overs to and from other threads, and
boundaries of steps. Between two marks it works; what it waited for at a mark is found by `links.py`.
"""

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence

from simulator.readers.kineto_names import operator_kind
from simulator.replay.nodes import Node, PieceKind
from simulator.specs.recording import HostCall, KernelKind, Operator, Recording

# A thread that does nothing for so long may be waiting for another one.
IDLE_SECONDS = 50e-6
# A thread goes on so soon after the one that it waited for went idle, or within a tenth of its wait.
HANDOVER_SECONDS = 100e-6


class Threads:
    """Marks of all threads of a rank, which become their nodes."""

    def __init__(self, begin_seconds: float) -> None:
        self._begin_seconds = begin_seconds
        self._nodes: dict[str, list[Node]] = defaultdict(list)
        self._num_marks = 0

    def mark(self, thread: str, name: str, at_seconds: float, *, waits: bool = False) -> Node:
        """Let a thread's work, or its wait, end at an instant."""
        self._num_marks += 1
        node = Node(
            name=name,
            kind=PieceKind.WAIT if waits else PieceKind.HOST,
            stream=thread,
            start_seconds=at_seconds,
            end_seconds=at_seconds,
            tie=self._num_marks,
        )
        self._nodes[thread].append(node)
        return node

    def rows(self) -> list[list[Node]]:
        """Return each thread's nodes in order of time, one after another without gaps."""
        for nodes in self._nodes.values():
            nodes.sort(key=lambda node: (node.end_seconds, node.tie))
            previous_seconds = self._begin_seconds
            for node in nodes:
                node.start_seconds = previous_seconds
                previous_seconds = node.end_seconds
        return [nodes for _, nodes in sorted(self._nodes.items())]


def handovers(recording: Recording, begin: float, end: float) -> list[tuple[str, float, str, float]]:
    """Return who goes on after whom: thread and instant of one that went idle, then of the one that goes on.

    Seen where a thread is idle, outside of runtime calls, and goes on right after another one went idle: autograd's
    thread after the one that called backward, and back.
    """
    instants = _instants(recording, begin, end)
    calls = {(call.thread, call.start_seconds) for call in recording.calls}
    found = []
    for thread, own in instants.items():
        for idle_from, goes_on in zip([begin, *own], own, strict=False):
            if goes_on - idle_from < IDLE_SECONDS or (thread, idle_from) in calls:
                continue
            giver = _giver(instants, thread, idle_from, goes_on)
            if giver is not None:
                found.append((*giver, thread, goes_on))
    return found


def _giver(
    instants: Mapping[str, Sequence[float]], thread: str, idle_from: float, goes_on: float
) -> tuple[str, float] | None:
    """Return the thread that went idle last before another one goes on, and when; None if none did so then.

    Right before, or longer before if it goes on itself right after the other one: it called that one and waited.
    """
    best: tuple[str, float] | None = None
    for other, theirs in instants.items():
        place = bisect.bisect_right(theirs, goes_on) - 1
        if other == thread or place < 0 or not idle_from < theirs[place] < goes_on:
            continue
        stays_idle = place + 1 == len(theirs) or theirs[place + 1] - theirs[place] >= IDLE_SECONDS
        if stays_idle and (best is None or theirs[place] > best[1]):
            best = (other, theirs[place])
    if best is None or _is_soon(best[1], goes_on, since=idle_from):
        return best
    theirs, own = instants[best[0]], instants[thread]
    place = bisect.bisect_right(theirs, best[1])
    if place == len(theirs):
        return None
    ended = own[bisect.bisect_left(own, theirs[place]) - 1]
    return best if goes_on < ended and _is_soon(ended, theirs[place], since=best[1]) else None


def _is_soon(ended_seconds: float, goes_on_seconds: float, *, since: float) -> bool:
    """Return whether a thread that was idle since an instant goes on soon after something ended."""
    return goes_on_seconds - ended_seconds <= max(HANDOVER_SECONDS, 0.1 * (goes_on_seconds - since))


def _instants(recording: Recording, begin: float, end: float) -> dict[str, list[float]]:
    """Return the instants at which each thread is known to do something."""
    found: dict[str, set[float]] = defaultdict(set)
    seen: list[Operator | HostCall] = [*recording.operators, *recording.calls]
    for one in seen:
        for instant in (one.start_seconds, one.end_seconds):
            if begin <= instant <= end:
                found[one.thread].add(instant)
    return {thread: sorted(instants) for thread, instants in sorted(found.items())}


def top_level(recording: Recording, begin: float, end: float) -> list[tuple[Operator, int]]:
    """Return each operator that lies in no other, and the index of the one inside that tells best what it does.

    That is the longest of it and those inside that has shapes and a name that says its kind.
    """
    found: list[list[int]] = []
    open_until: dict[str, tuple[float, int]] = {}
    for index, operator in enumerate(recording.operators):
        if operator.is_annotation or not begin <= operator.start_seconds < end:
            continue
        until, place = open_until.get(operator.thread, (begin, -1))
        if operator.start_seconds >= until:
            open_until[operator.thread] = (operator.end_seconds, len(found))
            found.append([index])
        else:
            found[place].append(index)
    return [(recording.operators[inside[0]], _teller(recording.operators, inside)) for inside in found]


def _teller(operators: Sequence[Operator], inside: Sequence[int]) -> int:
    telling = [
        index
        for index in inside
        if any(operators[index].shapes) and operator_kind(operators[index].name) is not KernelKind.OTHER
    ]
    return max(telling or inside[:1], key=lambda index: operators[index].duration_seconds)


def calls_in(recording: Recording, begin: float, end: float) -> list[HostCall]:
    """Return the calls that begin in a window."""
    return [call for call in recording.calls if begin <= call.start_seconds < end]
