"""Node, Piece: what the replay plays, while it is being linked and once it is in order."""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from simulator.specs.recording import DeviceOperation


class PieceKind(StrEnum):
    """What a piece of a replay is."""

    HOST = "host"  # a thread at work
    WAIT = "wait"  # a thread after the end of what it waited for
    LATENCY = "latency"  # between a launch, or the end of what was waited for, and the start on the device
    DEVICE = "device"  # a kernel, copy, fill or collective


@dataclass(slots=True, eq=False)
class Node:
    """A piece under construction; instants as recorded, seconds since the window began on the earliest rank.

    Attributes:
        after: what must have ended before it starts, beside the node before it on its stream.
        order: of launch.
        tie: a second order, among nodes that start at one instant.
    """

    name: str
    kind: PieceKind
    stream: str
    start_seconds: float
    end_seconds: float
    after: list["Node"] = field(default_factory=list)
    operation: DeviceOperation | None = None
    order: float = 0.0
    tie: int = 0
    thread: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Something that one stream or thread of one rank does, in the order of `RankPieces.pieces`.

    Attributes:
        duration_seconds: of its own, after all that it waits for.
        recorded_start_seconds, recorded_end_seconds: when it was seen.
        waits_for: indices of earlier pieces.
        order: of launch, of device work.
        thread: that launched device work; empty where unknown.
        meeting: index of the collective of several ranks that it takes part in.
        recorded_wait_seconds: of a collective, the part of its recorded time spent waiting for other ranks.
    """

    name: str
    kind: PieceKind
    stream: str
    duration_seconds: float
    recorded_start_seconds: float
    recorded_end_seconds: float
    waits_for: tuple[int, ...] = ()
    operation: DeviceOperation | None = None
    order: float = 0.0
    thread: str = ""
    meeting: int | None = None
    recorded_wait_seconds: float = 0.0


def in_order(streams: Iterable[Sequence[Node]], *, zero_seconds: float) -> list[tuple[Node, float, list[int]]]:
    """Return nodes so that each comes after all that it waits for, with its own seconds and the indices of these.

    Args:
        streams: nodes of each stream, in its order.
        zero_seconds: instant at which all streams begin.
    """
    before: dict[Node, Node] = {}
    nodes: list[Node] = []
    for stream in streams:
        nodes += stream
        before |= {late: early for early, late in itertools.pairwise(stream)}
    followers: dict[Node, list[Node]] = defaultdict(list)
    missing: dict[Node, int] = {}
    for node in nodes:
        needed = {id(one): one for one in node.after}
        if node in before:
            needed[id(before[node])] = before[node]
        missing[node] = len(needed)
        for one in needed.values():
            followers[one].append(node)
    ready = [(node.start_seconds, node.tie, number, node) for number, node in enumerate(nodes) if not missing[node]]
    heapq.heapify(ready)
    number_of = {node: number for number, node in enumerate(nodes)}
    index_of: dict[Node, int] = {}
    found: list[tuple[Node, float, list[int]]] = []
    while ready:
        node = heapq.heappop(ready)[-1]
        index_of[node] = len(found)
        bounds = [one.end_seconds for one in node.after]
        if node in before:
            bounds.append(before[node].end_seconds)
        seconds = node.end_seconds - max([zero_seconds, *bounds])
        if node.kind is PieceKind.DEVICE:
            seconds = node.end_seconds - node.start_seconds
        found.append((node, max(seconds, 0.0), sorted({index_of[one] for one in node.after})))
        for follower in followers[node]:
            missing[follower] -= 1
            if not missing[follower]:
                heapq.heappush(ready, (follower.start_seconds, follower.tie, number_of[follower], follower))
    assert len(found) == len(nodes), f"{len(nodes) - len(found)} pieces wait for one another"
    return found
