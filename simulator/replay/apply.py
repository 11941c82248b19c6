"""apply_change(): a run as it would be with something changed."""

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from simulator.errors import SpecError
from simulator.replay.all_reduces import with_all_reduces
from simulator.replay.attained import MeasuredShapes, attained_memory_ratio
from simulator.replay.casts import gradients, with_precision
from simulator.replay.changes import Change, Overlap
from simulator.replay.devices import cluster_of, device_called
from simulator.replay.links import RankPieces
from simulator.replay.messages import message_seconds, rescaled_seconds
from simulator.replay.nodes import Piece, PieceKind
from simulator.replay.order import reordered
from simulator.replay.ranks import Meeting
from simulator.replay.run import Run
from simulator.replay.scaling import Setting, scaled_seconds
from simulator.specs.cluster import BUILT_IN_CLUSTERS, ClusterSpec
from simulator.specs.recording import DeviceOperation, KernelKind, Message
from simulator.specs.units import Dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A changed run, and in sentences what the change could not reach."""

    run: Run
    notes: tuple[str, ...]


def apply_change(run: Run, change: Change, recorded_on: ClusterSpec | None = None) -> Changed:
    """Return a run as it would be with a change.

    Args:
        recorded_on: where it was recorded; None for the built-in cluster of the device that the recording names.

    Raises:
        SpecError: if the change needs to know the cluster, the device or shapes, and nothing tells them.
    """
    applying = _Applying(run, change, recorded_on)
    ranks, meetings = list(run.ranks), list(run.meetings)
    if change.without_straggler:
        ranks = _without_straggler(ranks, meetings)
    ranks = [applying.rank(rank) for rank in ranks]
    ranks, meetings = applying.in_precision(ranks, meetings)
    meetings = [replace(one, cost_seconds=applying.message(one.message, one.cost_seconds)) for one in meetings]
    if change.all_reduce_bytes:
        ranks, meetings = with_all_reduces(ranks, meetings, applying.all_reduce())
    if change.overlap is not None:
        ranks, meetings = _overlapped(ranks, meetings, change.overlap)
    return Changed(run=replace(run, ranks=tuple(ranks), meetings=tuple(meetings)), notes=tuple(applying.notes()))


@dataclass(slots=True)
class _Applying:
    run: Run
    change: Change
    recorded_on: ClusterSpec | None
    unscaled: int = 0
    num_kernels: int = 0
    unsized: int = 0
    old: Setting = field(init=False)
    new: Setting = field(init=False)

    def __post_init__(self) -> None:
        change, name = self.change, self.run.device_name
        device = device_called(name) if self.recorded_on is None else self.recorded_on.device
        if change.device is not None and device is None:
            raise SpecError(
                f'device={change.device.name} needs the peaks of the device recorded, "{name or "unknown"}", which are '
                "not known: name its cluster with --cluster"
            )
        edges = change.edges or (None, None)
        attained = attained_memory_ratio(self.run.ranks, device)
        self.old = Setting(device=device, num_edges=edges[0], memory_ratio=attained)
        self.new = replace(
            self.old,
            device=change.device or device,
            sizes=change.sizes,
            num_edges=edges[1],
            dtype=change.dtype,
        )

    def rank(self, rank: RankPieces) -> RankPieces:
        """Return a rank's pieces with their seconds after the change."""
        measured = MeasuredShapes(rank) if self.new == replace(self.old, sizes=self.new.sizes) else None
        return replace(
            rank, pieces=tuple(replace(p, duration_seconds=self._seconds(p, rank, measured)) for p in rank.pieces)
        )

    def _seconds(self, piece: Piece, rank: RankPieces, measured: MeasuredShapes | None) -> float:
        seconds, operation = piece.duration_seconds, piece.operation
        if piece.kind is PieceKind.HOST:
            return seconds / self.change.host_factor
        if piece.kind is not PieceKind.DEVICE or operation is None:
            return seconds
        if operation.message is not None:
            waited = min(piece.recorded_wait_seconds, seconds)
            cost = self.message(operation.message, seconds - waited) if piece.meeting is None else seconds - waited
            return cost + (0.0 if self.change.without_straggler else waited)
        factor = dict(self.change.kernel_factors).get(operation.kind, 1.0)
        if self.old != self.new and operation.kind is not KernelKind.COPY:
            self.num_kernels += 1
            operator = None if operation.operator is None else rank.operators[operation.operator]
            ratio = None
            if measured is not None and operator is not None:
                ratio = measured.ratio(piece, operator.shapes, dict(self.new.sizes))
            if ratio is not None:
                return seconds * ratio / factor
            scaled = scaled_seconds(operation, operator, seconds, old=self.old, new=self.new)
            self.unscaled += scaled is None
            seconds = seconds if scaled is None else scaled
        return seconds / factor

    def in_precision(
        self, ranks: Sequence[RankPieces], meetings: Sequence[Meeting]
    ) -> tuple[list[RankPieces], list[Meeting]]:
        """Return ranks with the casts that come, or without the time of those that go, with another number format."""
        found = [with_precision(rank, self.new) for rank in ranks]
        new_index = [index for _, index in found]
        return [rank for rank, _ in found], [_renumbered(meeting, new_index) for meeting in meetings]

    def message(self, message: Message, cost_seconds: float) -> float:
        """Return a collective's seconds after the change, without waiting."""
        cost_seconds /= dict(self.change.kernel_factors).get(KernelKind.COLLECTIVE, 1.0)
        if not self.change.concerns_network:
            return cost_seconds
        self.unsized += message.num_bytes is None
        return rescaled_seconds(
            message,
            cost_seconds,
            old=self._recorded_network(),
            new=self._new_network(),
            num_ranks=self.change.num_ranks,
        )

    def all_reduce(self) -> DeviceOperation:
        """Return the all-reduce that is put before the optimizer."""
        num_ranks = self.change.num_ranks
        assert num_ranks is not None
        message = Message(operation="all_reduce", num_bytes=self.change.all_reduce_bytes, num_ranks=num_ranks)
        return DeviceOperation(
            name="all_reduce of gradients",
            kind=KernelKind.COLLECTIVE,
            stream="all_reduce of gradients",
            start_seconds=0.0,
            duration_seconds=message_seconds(message, self._new_network(), num_ranks),
            message=message,
        )

    def _new_network(self) -> ClusterSpec:
        change = self.change
        new = change.network or self._recorded_network()
        if change.device_link_rate is not None:
            new = replace(new, device_link=replace(new.device_link, bandwidth_bytes_per_second=change.device_link_rate))
        if change.host_link_rate is not None:
            new = replace(new, host_link=replace(new.host_link, bandwidth_bytes_per_second=change.host_link_rate))
        return new

    def _recorded_network(self) -> ClusterSpec:
        found = self.recorded_on or cluster_of(self.run.device_name, BUILT_IN_CLUSTERS.values())
        if found is None:
            raise SpecError(
                f'"{self.change.text}" needs the network on which the run was recorded, and no built-in cluster has '
                f'its device, "{self.run.device_name or "unknown"}": name it with --cluster'
            )
        return found

    def notes(self) -> list[str]:
        """Return what the change did not reach."""
        found = []
        if self.unscaled:
            found.append(
                f"{self.unscaled:,} of {self.num_kernels:,} kernels have no shapes and stay as they were; record with "
                "record_shapes=True"
            )
        if self.new.dtype not in (None, Dtype.FLOAT32) and not any(gradients(one.operators) for one in self.run.ranks):
            found.append("no gradient that autograd accumulates is recorded: casts of parameters are left out")
        if self.unsized:
            found.append(f"{self.unsized:,} collectives have no sizes: they follow the rates of links alone")
        return found


def _without_straggler(ranks: Sequence[RankPieces], meetings: Sequence[Meeting]) -> list[RankPieces]:
    """Return ranks of which none is slower between two collectives than the median rank.

    The straggler is the rank for which the others waited longest; its work in each stretch between collectives is
    shortened to what the median rank took for it.
    """
    place = straggler(ranks, meetings)
    if place is None:
        return list(ranks)
    stretches = [_stretches(rank) for rank in ranks]
    own = stretches[place]
    factors = []
    for number in range(len(own)):
        lengths = [found[number] for found in stretches if number < len(found)]
        typical = statistics.median(lengths)
        factors.append(min(1.0, typical / own[number]) if own[number] > 0 else 1.0)
    ends = _meeting_ends(ranks[place])
    pieces = []
    for piece in ranks[place].pieces:
        number = sum(end <= piece.recorded_start_seconds for end in ends)
        is_work = piece.meeting is None and piece.kind is not PieceKind.WAIT
        factor = factors[min(number, len(factors) - 1)] if is_work else 1.0
        pieces.append(replace(piece, duration_seconds=piece.duration_seconds * factor))
    return [*ranks[:place], replace(ranks[place], pieces=tuple(pieces)), *ranks[place + 1 :]]


def straggler(ranks: Sequence[RankPieces], meetings: Sequence[Meeting]) -> int | None:
    """Return the place of the rank for which the others waited longest; None without collectives of several."""
    caused: dict[int, float] = defaultdict(float)
    for meeting in meetings:
        waits = {place: ranks[place].pieces[index].recorded_wait_seconds for place, index in meeting.members}
        caused[min(waits, key=lambda place: waits[place])] += sum(waits.values())
    return max(caused, key=lambda place: caused[place], default=None)


def _meeting_ends(rank: RankPieces) -> list[float]:
    return sorted(piece.recorded_end_seconds for piece in rank.pieces if piece.meeting is not None)


def _stretches(rank: RankPieces) -> list[float]:
    """Return the seconds from the end of each collective, and from the begin, to the arrival at the next."""
    found, previous = [], 0.0
    met = sorted((p for p in rank.pieces if p.meeting is not None), key=lambda piece: piece.recorded_start_seconds)
    for piece in met:
        found.append(max(piece.recorded_start_seconds - previous, 0.0))
        previous = piece.recorded_end_seconds
    last = max(piece.recorded_end_seconds for piece in rank.pieces)
    return [*found, max(last - previous, 0.0)]


def _overlapped(
    ranks: Sequence[RankPieces], meetings: Sequence[Meeting], overlap: Overlap
) -> tuple[list[RankPieces], list[Meeting]]:
    """Return ranks where nothing waits for collectives, or all that was launched after one does."""
    found, index_of = [], []
    for rank in ranks:
        needed = [set(piece.waits_for) for piece in rank.pieces]
        messages = {i for i, piece in enumerate(rank.pieces) if piece.operation and piece.operation.message}
        wished: Mapping[int, set[int]] = {}
        if overlap is Overlap.ON:
            needed = [waits if index in messages else waits - messages for index, waits in enumerate(needed)]
        else:
            wished = _one_after_another(rank.pieces, messages)
        pieces, new_index = reordered(rank.pieces, needed, wished)
        index_of.append(new_index)
        found.append(replace(rank, pieces=pieces, boundaries=tuple(new_index[index] for index in rank.boundaries)))
    return found, [_renumbered(meeting, index_of) for meeting in meetings]


def _renumbered(meeting: Meeting, new_index: Sequence[Sequence[int]]) -> Meeting:
    """Return a meeting whose members have other indices, by rank."""
    return replace(meeting, members=tuple((place, new_index[place][index]) for place, index in meeting.members))


def _one_after_another(pieces: Sequence[Piece], messages: set[int]) -> dict[int, set[int]]:
    """Return, by order of launch, what each collective and the work after it on other streams would wait for."""
    device = [i for i, piece in enumerate(pieces) if piece.kind is PieceKind.DEVICE]
    device.sort(key=lambda index: (pieces[index].order, index))
    wished: dict[int, set[int]] = defaultdict(set)
    last_on: dict[str, int] = {}
    last_message: int | None = None
    for index in device:
        stream = pieces[index].stream
        if index in messages:
            wished[index] |= {last for other, last in last_on.items() if other != stream}
            last_message = index
        elif last_message is not None and pieces[last_message].stream != stream:
            wished[index].add(last_message)
        last_on[stream] = index
    return wished
