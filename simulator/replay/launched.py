"""Device work by the order in which it was launched: what a wait or a blocking call can concern."""

import bisect
from collections import defaultdict
from collections.abc import Iterable

from simulator.replay.nodes import Node


class Launched:
    """Answers which device work was launched before an instant."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._on_stream: dict[str, list[Node]] = defaultdict(list)
        for node in sorted(nodes, key=_order):
            assert node.operation is not None
            self._on_stream[node.operation.stream].append(node)
        self._by_end = sorted((node for found in self._on_stream.values() for node in found), key=_end)

    def last_before(
        self, at_seconds: float, *, until_seconds: float, stream: str | None = None, not_stream: str | None = None
    ) -> list[Node]:
        """Return the last work launched before an instant on each stream, where it ended in time.

        Args:
            until_seconds: when it must have ended, by the recording.
            stream: this one alone.
            not_stream: all but this one.
        """
        found = []
        for name, nodes in self._on_stream.items():
            if name == not_stream or (stream is not None and name != stream):
                continue
            place = bisect.bisect_left(nodes, at_seconds, key=_order) - 1
            if place >= 0 and nodes[place].end_seconds <= until_seconds:
                found.append(nodes[place])
        return found

    def latest_end(self, at_seconds: float, *, until_seconds: float) -> Node | None:
        """Return the work launched before an instant that ended last before another one."""
        place = bisect.bisect_right(self._by_end, until_seconds, key=_end) - 1
        while place >= 0 and self._by_end[place].order >= at_seconds:
            place -= 1
        return self._by_end[place] if place >= 0 else None


def _order(node: Node) -> float:
    return node.order


def _end(node: Node) -> float:
    return node.end_seconds
