"""Time that passes on a device between all that work waits for and its start."""

import itertools
from collections.abc import Iterable, Mapping, Sequence

from simulator.replay.launched import Launched
from simulator.replay.nodes import Node, PieceKind

# A launch, or a stream between two kernels, takes at most this without anything to wait for (6 us a launch on an
# H200: ../shared/DESIGN.md section 7). What is longer has a cause that the recording does not show.
UNEXPLAINED_SECONDS = 20e-6


def await_close_ends(lanes: Iterable[Sequence[Node]], device: Iterable[Node], *, begin_seconds: float) -> int:
    """Let work that starts late wait for work of another stream, launched earlier, that ended just before.

    Returns:
        How many such dependencies were found.
    """
    launched, num_found = Launched(device), 0
    for lane in lanes:
        for early, node in itertools.pairwise([None, *lane]):
            assert node is not None
            bounds = [one.end_seconds for one in node.after]
            bounds.append(begin_seconds if early is None else early.end_seconds)
            if node.start_seconds - max(bounds) <= UNEXPLAINED_SECONDS:
                continue
            cause = launched.latest_end(node.order, until_seconds=node.start_seconds)
            if cause is not None and node.start_seconds - cause.end_seconds < UNEXPLAINED_SECONDS:
                node.after.append(cause)
                num_found += 1
    return num_found


def with_latencies(
    lanes: Mapping[str, Sequence[Node]], *, begin_seconds: float
) -> tuple[list[list[Node]], list[list[Node]], float]:
    """Return lanes with latencies in them, rows of latencies of launches, and seconds that nothing explains.

    What passes after a launch runs beside earlier work of the stream; what passes after the end of such work is put
    into the stream, before the work that starts late.
    """
    filled_lanes, rows, unexplained = [], [], 0.0
    for name, lane in lanes.items():
        row: list[Node] = []
        filled: list[Node] = []
        for node in lane:
            launch = max((one for one in node.after if one.kind is not PieceKind.DEVICE), key=_end, default=None)
            launched_seconds = begin_seconds if launch is None else launch.end_seconds
            others = [one.end_seconds for one in node.after if one.kind is PieceKind.DEVICE]
            free_seconds = max([begin_seconds, *(one.end_seconds for one in filled[-1:]), *others])
            late_seconds = node.start_seconds - max(launched_seconds, free_seconds)
            if late_seconds > 0:
                unexplained += late_seconds if late_seconds > UNEXPLAINED_SECONDS else 0.0
                latency = _latency(node, name, late_seconds)
                if launch is not None and launched_seconds >= free_seconds:
                    latency.stream = f"launches to {name}"
                    latency.after = [launch]
                    node.after[node.after.index(launch)] = latency
                    row.append(latency)
                else:
                    latency.after = [one for one in node.after if one.kind is PieceKind.DEVICE]
                    filled.append(latency)
            filled.append(node)
        filled_lanes.append(filled)
        rows.append(row)
    return filled_lanes, rows, unexplained


def _latency(node: Node, stream: str, seconds: float) -> Node:
    return Node(
        name=f"before {node.name}",
        kind=PieceKind.LATENCY,
        stream=stream,
        start_seconds=node.start_seconds - seconds,
        end_seconds=node.start_seconds,
    )


def _end(node: Node) -> float:
    return node.end_seconds
