"""What the recording itself tells of the device, and of kernels in other shapes."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from simulator.replay.links import RankPieces
from simulator.replay.nodes import Piece
from simulator.replay.scaling import Setting, is_split_sum, work_of
from simulator.specs.cluster import DeviceSpec
from simulator.specs.recording import KernelKind, Operator

# A kernel that moves so many times what the cache holds finds hardly anything in it.
_CACHES = 2.0
# Times of kernels of one operator in one shape that lie further apart than this have another reason than the shape,
# such as another dimension that is summed over.
_ALIKE_RATIO = 1.25

_Key = tuple[str, KernelKind, bool, int, tuple[str, ...]]
Shapes = tuple[tuple[int, ...], ...]


def attained_memory_ratio(ranks: Sequence[RankPieces], device: DeviceSpec | None) -> float:
    """Return the largest share of the memory's rate that kernels of elements attain; 1 if none tells.

    The rate is the data sheet's. These kernels read each number once and write each once, so what they move is known.
    """
    if device is None:
        return 1.0
    found = []
    for rank in ranks:
        for piece, operator in _with_operators(rank):
            assert piece.operation is not None
            work = work_of(KernelKind.ELEMENTWISE, operator, Setting())
            is_large = work is not None and work.num_bytes > _CACHES * device.cache_bytes
            if piece.operation.kind is KernelKind.ELEMENTWISE and is_large and piece.duration_seconds > 0:
                assert work is not None
                found.append(work.num_bytes / piece.duration_seconds / device.memory_bandwidth_bytes_per_second)
    return min(max(found, default=1.0), 1.0)


class MeasuredShapes:
    """Times of one rank's kernels in every shape in which the recording has them.

    A kernel that is to have shapes in which its operator ran elsewhere in the step takes what it took there.
    """

    def __init__(self, rank: RankPieces) -> None:
        found: dict[_Key, dict[Shapes, list[float]]] = defaultdict(lambda: defaultdict(list))
        self._key_of: dict[int, _Key] = {}
        for piece, operator, key in _keyed(rank):
            found[key][operator.shapes].append(piece.duration_seconds)
            self._key_of[id(piece)] = key
        self._medians = {key: _medians(by_shapes) for key, by_shapes in found.items()}

    def ratio(self, piece: Piece, shapes: Shapes, sizes: Mapping[int, int]) -> float | None:
        """Return the measured ratio of times in shapes with other lengths and in these; None without both."""
        new_shapes = tuple(tuple(sizes.get(length, length) for length in shape) for shape in shapes)
        medians = self._medians.get(self._key_of.get(id(piece), ("", KernelKind.OTHER, False, 0, ())), {})
        if new_shapes == shapes or shapes not in medians or new_shapes not in medians:
            return None
        return medians[new_shapes] / medians[shapes]


def _medians(by_shapes: Mapping[Shapes, Sequence[float]]) -> dict[Shapes, float]:
    return {
        shapes: statistics.median(seconds)
        for shapes, seconds in by_shapes.items()
        if 0 < max(seconds) <= _ALIKE_RATIO * min(seconds)
    }


def _with_operators(rank: RankPieces) -> Iterator[tuple[Piece, Operator]]:
    for piece in rank.pieces:
        if piece.operation is not None and piece.operation.operator is not None and piece.operation.message is None:
            yield piece, rank.operators[piece.operation.operator]


def _keyed(rank: RankPieces) -> Iterator[tuple[Piece, Operator, _Key]]:
    """Yield kernels with what they have in common in other shapes: operator, kind, place in the operator, formats."""
    places: Counter[tuple[int, KernelKind, bool]] = Counter()
    for piece, operator in sorted(_with_operators(rank), key=lambda item: item[0].order):
        assert piece.operation is not None
        assert piece.operation.operator is not None
        kind, is_sum = piece.operation.kind, is_split_sum(piece.name)
        place = (piece.operation.operator, kind, is_sum)
        if any(operator.shapes):
            yield piece, operator, (operator.name, kind, is_sum, places[place], operator.dtypes)
        places[place] += 1
