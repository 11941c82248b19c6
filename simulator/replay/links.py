"""Tasks, streams and dependencies of one rank's recording.

What waits for what is known from launches (correlation ids), from the order of streams and threads, and from waits for
events where the trace names them. Where it does not, a dependency is taken that the recorded times allow: a wait for an
event concerns the next launch of its thread and the latest work of other streams launched before it; a blocking call
waits for the work that ended last before it returned; work that starts late, where another stream has just ended some
that was launched earlier, waited for that.
"""

import bisect
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from simulator.readers.kineto_names import operator_kind
from simulator.replay.host import Threads, calls_in, handovers, top_level
from simulator.replay.latencies import await_close_ends, with_latencies
from simulator.replay.launched import Launched
from simulator.replay.nodes import Node, Piece, PieceKind, in_order
from simulator.replay.steps import Window
from simulator.specs.recording import CallKind, DeviceOperation, HostCall, KernelKind, Operator, Recording

# Clocks of host and device, and traces in whole microseconds, disagree by up to this.
SKEW_SECONDS = 2e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPieces:
    """What one rank did in the window.

    Attributes:
        boundaries: for each boundary between steps, the piece whose end is it.
        recorded_boundaries: their instants.
        num_inferred: dependencies that times alone told.
        unexplained_seconds: latencies that no dependency explains.
        left_out: device work outside the window, and why, with its number.
        operators: of the recording, which device work names by index.
    """

    rank: int
    pieces: tuple[Piece, ...]
    boundaries: tuple[int, ...]
    recorded_boundaries: tuple[float, ...]
    num_inferred: int
    unexplained_seconds: float
    left_out: tuple[tuple[str, int], ...]
    operators: tuple[Operator, ...]


def linked(recording: Recording, window: Window, *, shift_seconds: float) -> RankPieces:
    """Return the pieces of a recording's window.

    Args:
        shift_seconds: added to its instants, to bring the clocks of all ranks together.
    """
    return _Linking(recording, window, shift_seconds).pieces()


@dataclass(slots=True)
class _Linking:
    recording: Recording
    window: Window
    shift_seconds: float
    threads: Threads = field(init=False)
    node_of: dict[int, Node] = field(default_factory=dict)  # of operations, by index
    lanes: dict[str, list[Node]] = field(default_factory=lambda: defaultdict(list))
    launch_of: dict[int, HostCall] = field(default_factory=dict)
    num_inferred: int = 0
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def begin(self) -> float:
        """First instant of the window."""
        return self.window.boundaries[0]

    @property
    def end(self) -> float:
        """Last boundary of a step."""
        return self.window.boundaries[-1]

    def pieces(self) -> RankPieces:
        """Return all pieces in order."""
        self.threads = Threads(self.begin)
        self._device_nodes()
        self._launches()
        self._event_waits()
        self._blocking_calls()
        self._handovers()
        if not self.recording.calls:
            self._without_calls()
        self.num_inferred += await_close_ends(self.lanes.values(), self.node_of.values(), begin_seconds=self.begin)
        marks = self._boundaries()
        lanes, launches, unexplained = with_latencies(self.lanes, begin_seconds=self.begin)
        rows = [*self.threads.rows(), *lanes, *launches]
        return self._finish(in_order(rows, zero_seconds=-self.shift_seconds), marks, unexplained)

    # --- Device

    def _device_nodes(self) -> None:
        """Make a node of all device work that belongs to the window, on lanes: streams of which nothing overlaps."""
        calls = {call.correlation: call for call in self.recording.calls if call.correlation is not None}
        for index, operation in enumerate(self.recording.operations):
            launch = None if operation.correlation is None else calls.get(operation.correlation)
            if (reason := self._outside(operation, launch)) is not None:
                self.left_out[reason] = self.left_out.get(reason, 0) + 1
                continue
            if launch is not None and launch.start_seconds >= self.begin:
                self.launch_of[index] = launch
            self.node_of[index] = self._device_node(index, operation)
            self._to_lane(self.node_of[index], operation.stream)

    def _outside(self, operation: DeviceOperation, launch: HostCall | None) -> str | None:
        if launch is not None and launch.start_seconds >= self.end:
            return "launched after the last step"
        if launch is not None and launch.start_seconds >= self.begin:
            return None
        if operation.end_seconds <= self.begin:
            return "before the first step"
        return "after the last step" if launch is None and operation.start_seconds >= self.end else None

    def _device_node(self, index: int, operation: DeviceOperation) -> Node:
        launch = self.launch_of.get(index)
        start = max(operation.start_seconds, self.begin)
        return Node(
            name=operation.name,
            kind=PieceKind.DEVICE,
            stream=operation.stream,
            start_seconds=start,
            end_seconds=max(operation.end_seconds, start),
            operation=operation,
            order=self._order(operation, start) if launch is None else launch.start_seconds,
            thread="" if launch is None else launch.thread,
        )

    def _order(self, operation: DeviceOperation, start_seconds: float) -> float:
        """Return when work of unknown launch was launched at the latest, as its stream keeps the order of launches."""
        lane = self.lanes[operation.stream]
        return min(lane[-1].order, start_seconds) if lane else start_seconds

    def _to_lane(self, node: Node, stream: str) -> None:
        """Put a node on the first lane of its stream that is free; ends are trimmed to what clocks can tell."""
        number = 0
        while True:
            name = stream if number == 0 else f"{stream} #{number + 1}"
            lane = self.lanes[name]
            if not lane or lane[-1].end_seconds <= node.start_seconds + SKEW_SECONDS:
                break
            number += 1
        if lane and lane[-1].end_seconds > node.start_seconds:
            lane[-1].end_seconds = max(node.start_seconds, lane[-1].start_seconds)
        if number:  # work that overlaps on one stream still follows what ended there before it
            node.after += [other for other in self._last_ended(node.start_seconds, stream) if other is not node]
        node.stream = name
        lane.append(node)

    def _last_ended(self, at_seconds: float, stream: str) -> list[Node]:
        found = []
        for name, lane in self.lanes.items():
            if name == stream or name.startswith(f"{stream} #"):
                place = bisect.bisect_right(lane, at_seconds, key=_end) - 1
                found += [lane[place]] if place >= 0 else []
        return found

    # --- Host

    def _launches(self) -> None:
        """Let device work follow the call that launched it."""
        launched: dict[int, list[Node]] = defaultdict(list)
        for index, call in self.launch_of.items():
            assert call.correlation is not None
            launched[call.correlation].append(self.node_of[index])
        for call in calls_in(self.recording, self.begin, self.end):
            nodes = launched.get(call.correlation) if call.correlation is not None else None
            if not nodes:
                continue
            blocks = any(_blocks(node, call) for node in nodes)
            # A call that waits for its copy queues it when it begins; another has launched when it returns, or before.
            given_seconds = call.start_seconds if blocks else call.end_seconds
            at_seconds = max(min(given_seconds, *(node.start_seconds for node in nodes)), self.begin)
            mark = self.threads.mark(call.thread, call.name, at_seconds)
            for node in nodes:
                node.after.append(mark)
            if blocks:
                ends = max(node.end_seconds for node in nodes)
                wait = self.threads.mark(call.thread, call.name, max(call.end_seconds, ends), waits=True)
                wait.after += nodes

    def _event_waits(self) -> None:
        """Let device work wait for events of other streams: a wait concerns the next launch on its stream or thread."""
        records = {call.correlation: call for call in self.recording.calls if call.kind is CallKind.RECORD_EVENT}
        launched = Launched(self.node_of.values())
        pending: dict[str, list[HostCall]] = defaultdict(list)  # by stream where that is known, else by thread
        nodes_of: dict[int, list[Node]] = defaultdict(list)
        for index, call in self.launch_of.items():
            nodes_of[id(call)].append(self.node_of[index])
        for call in calls_in(self.recording, self.begin, self.end):
            if call.kind is CallKind.WAIT_EVENT:
                pending[call.thread if call.stream is None else call.stream].append(call)
                continue
            waiting = nodes_of.get(id(call), ())
            for node in waiting:
                assert node.operation is not None
                for wait in (*pending[node.operation.stream], *pending[call.thread]):
                    node.after += self._event(wait, records, launched, node, node.operation.stream)
            for node in waiting:
                assert node.operation is not None
                pending[node.operation.stream].clear()
                pending[call.thread].clear()

    def _event(
        self,
        wait: HostCall,
        records: Mapping[int | None, HostCall],
        launched: Launched,
        node: Node,
        stream: str,
    ) -> list[Node]:
        """Return the device work that a wait for an event is about."""
        until = node.start_seconds
        if wait.awaits_stream is not None:
            record = records.get(wait.awaits_record)
            if record is None:
                return []  # recorded before the trace began
            return launched.last_before(record.start_seconds, until_seconds=until, stream=wait.awaits_stream)
        found = launched.last_before(wait.start_seconds, until_seconds=until, not_stream=stream)
        self.num_inferred += len(found)
        return found

    def _blocking_calls(self) -> None:
        """Let threads wait in blocking calls."""
        launched = Launched(self.node_of.values())
        for call in calls_in(self.recording, self.begin, self.end):
            if not call.kind.blocks_host:
                continue
            self.threads.mark(call.thread, call.name, call.start_seconds)
            found = self._awaited(call, launched)
            end = max([call.end_seconds, *(node.end_seconds for node in found)])
            self.threads.mark(call.thread, call.name, end, waits=True).after += found

    def _awaited(self, call: HostCall, launched: Launched) -> list[Node]:
        """Return the device work that a blocking call waits for."""
        until = call.end_seconds + SKEW_SECONDS
        if call.kind is CallKind.STREAM_SYNC and call.stream is not None:
            return launched.last_before(call.start_seconds, stream=call.stream, until_seconds=until)
        found = launched.last_before(call.start_seconds, until_seconds=until)
        if call.kind is CallKind.DEVICE_SYNC or not found:
            return found
        self.num_inferred += 1
        if call.kind is CallKind.EVENT_SYNC:
            latest = launched.latest_end(call.start_seconds, until_seconds=until)
            return [latest] if latest is not None else []
        blocking = max(found, key=_end)
        if blocking.end_seconds > call.start_seconds:
            return [blocking]
        own = [node for node in found if node.thread == call.thread]
        return [max(own or found, key=lambda node: node.order)]

    def _handovers(self) -> None:
        """Let threads go on after one another; without calls or kernels, let marks divide their work too."""
        for giver, gave, taker, took in handovers(self.recording, self.begin, self.end):
            source = self.threads.mark(giver, "hands over", gave)
            self.threads.mark(taker, "goes on", took, waits=True).after.append(source)
            self.num_inferred += 1

    def _without_calls(self) -> None:
        """Without calls, let device work follow what ended on other streams before it; on CPUs, operators are work."""
        for node in self.node_of.values():
            for lane in self.lanes.values():
                place = bisect.bisect_right(lane, node.start_seconds, key=_end) - 1
                while place >= 0 and lane[place] is node:
                    place -= 1
                if place >= 0 and lane[place].stream != node.stream and lane[place].start_seconds < node.start_seconds:
                    node.after.append(lane[place])
                    self.num_inferred += 1
        if all(node.operation is not None and node.operation.message is not None for node in self.node_of.values()):
            self._operators_as_work()

    def _operators_as_work(self) -> None:
        """On CPUs, let operators be the device's work, and what lies between them the host's."""
        for operator, index in top_level(self.recording, self.begin, self.end):
            self.threads.mark(operator.thread, "between operators", operator.start_seconds)
            node = self.threads.mark(operator.thread, operator.name, max(operator.end_seconds, operator.start_seconds))
            node.kind = PieceKind.DEVICE
            node.order = operator.start_seconds
            node.thread = operator.thread
            node.operation = DeviceOperation(
                name=operator.name,
                kind=operator_kind(self.recording.operators[index].name),
                stream=operator.thread,
                start_seconds=operator.start_seconds,
                duration_seconds=operator.duration_seconds,
                operator=index,
            )

    def _boundaries(self) -> list[Node]:
        thread = self.window.thread or next((call.thread for call in self.recording.calls), "host")
        marks = [self.threads.mark(thread, "step", at_seconds) for at_seconds in self.window.boundaries]
        has_host = self.recording.calls or any(not one.is_annotation for one in self.recording.operators)
        if not has_host:
            self._steps_by_device(marks)
        return marks

    def _steps_by_device(self, marks: Sequence[Node]) -> None:
        """Where nothing of the host is recorded, let a step end after the device's work in it, and the next begin."""
        for early, late in itertools.pairwise(marks):
            late.kind = PieceKind.WAIT
            for node in self.node_of.values():
                if early.end_seconds <= node.start_seconds < late.end_seconds:
                    node.after.append(early)
                    if node.end_seconds <= late.end_seconds:
                        late.after.append(node)

    def _finish(
        self, ordered: Sequence[tuple[Node, float, list[int]]], marks: Sequence[Node], unexplained: float
    ) -> RankPieces:
        index_of = {id(node): index for index, (node, _, _) in enumerate(ordered)}
        pieces = tuple(
            Piece(
                name=node.name,
                kind=node.kind,
                stream=node.stream,
                duration_seconds=seconds,
                recorded_start_seconds=node.start_seconds + self.shift_seconds,
                recorded_end_seconds=node.end_seconds + self.shift_seconds,
                waits_for=tuple(waits_for),
                operation=node.operation,
                order=node.order + self.shift_seconds,
                thread=node.thread,
            )
            for node, seconds, waits_for in ordered
        )
        assert self.recording.rank is not None
        return RankPieces(
            rank=self.recording.rank,
            pieces=pieces,
            boundaries=tuple(index_of[id(mark)] for mark in marks),
            recorded_boundaries=tuple(mark.end_seconds + self.shift_seconds for mark in marks),
            num_inferred=self.num_inferred,
            unexplained_seconds=unexplained,
            left_out=tuple(sorted(self.left_out.items())),
            operators=self.recording.operators,
        )


def _blocks(node: Node, call: HostCall) -> bool:
    """Return whether a call returned only once the copy that it launched had ended."""
    assert node.operation is not None
    is_copy = node.operation.kind is KernelKind.COPY
    may_block = node.operation.is_pageable_copy or not call.name.endswith("Async")
    return is_copy and may_block and call.end_seconds >= node.end_seconds - SKEW_SECONDS


def _end(node: Node) -> float:
    return node.end_seconds
