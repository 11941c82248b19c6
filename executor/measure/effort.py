"""How much a calibration measures: the shapes of tasks, the sizes of collectives, the time for each."""

from collections.abc import Iterator
from dataclasses import dataclass

from simulator.specs.program import TaskKind
from simulator.specs.units import KIB, MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much a calibration measures.

    Attributes:
        rows: row counts of dense tasks.
        widths: columns of the residual stream.
        edges: edge counts of attention.
        mean_degrees: edges per target.
        attention_widths: columns of the residual stream in attention, in 8 heads.
        max_attention_elements: edges times width of the largest attention.
        collective_bytes: sizes of collectives.
        case_seconds: time to spend on a task of one shape, at least `repetitions`.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    edges: tuple[int, ...]
    mean_degrees: tuple[int, ...]
    attention_widths: tuple[int, ...]
    max_attention_elements: int
    collective_bytes: tuple[int, ...]
    case_seconds: float
    repetitions: int


QUICK_CPU = Effort(
    rows=(512, 4096, 16384),
    widths=(32, 128),
    edges=(8192, 65536, 196608),
    mean_degrees=(4, 24),
    attention_widths=(32, 64, 128),
    max_attention_elements=2**24,
    collective_bytes=(4 * KIB, 64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB),
    case_seconds=0.06,
    repetitions=5,
)
FULL_CPU = Effort(
    rows=(256, 1024, 4096, 16384, 65536),
    widths=(32, 64, 128, 256),
    edges=(4096, 16384, 65536, 262144, 1048576),
    mean_degrees=(3, 12, 60),
    attention_widths=(32, 64, 128, 256),
    max_attention_elements=2**28,
    collective_bytes=tuple(KIB * 4**power for power in range(8)),
    case_seconds=0.25,
    repetitions=9,
)
QUICK_CUDA = Effort(
    rows=(2048, 32768, 262144),
    widths=(64, 256),
    edges=(65536, 1048576, 4194304),
    mean_degrees=(8, 48),
    attention_widths=(64, 256),
    max_attention_elements=2**40,
    collective_bytes=tuple(4 * KIB * 8**power for power in range(6)),
    case_seconds=0.02,
    repetitions=5,
)
FULL_CUDA = Effort(
    rows=(1024, 8192, 65536, 262144, 1048576),
    widths=(64, 128, 256),
    edges=(16384, 131072, 1048576, 4194304, 16777216),
    mean_degrees=(4, 16, 64),
    attention_widths=(64, 128, 256),
    max_attention_elements=2**40,
    collective_bytes=tuple(4 * KIB * 4**power for power in range(9)),
    case_seconds=0.05,
    repetitions=9,
)


def case_shapes(effort: Effort) -> Iterator[tuple[TaskKind, tuple[int, ...]]]:
    """Yield kind and shape of every compute task that a calibration measures."""
    for width in effort.widths:
        for rows in effort.rows:
            yield TaskKind.LINEAR, (rows, width, width)
            yield TaskKind.LINEAR, (rows, width, 2 * width)
            yield TaskKind.LINEAR, (rows, 2 * width, width)
            yield TaskKind.PROJECTION, (rows, width, 3 * width)
            yield TaskKind.INPUT_LINEAR, (rows, width, width)
            yield TaskKind.SPARSE_LINEAR, (rows, 16 * rows, 2048, width)
            for kind in (TaskKind.LAYER_NORM, TaskKind.DROPOUT, TaskKind.RESIDUAL):
                yield kind, (rows, width)
            yield TaskKind.GELU, (rows, 2 * width)
            yield TaskKind.HALO_PACK, (rows, rows // 4, 2 * width)
            yield TaskKind.PAD_ROWS, (rows, rows + rows // 16, 2 * width)
    for rows in effort.rows:
        yield TaskKind.LINEAR, (rows, effort.widths[-1], 10)
        yield TaskKind.LOSS, (rows, rows // 2, 10)
    for edges in effort.edges:
        yield TaskKind.EDGE_BIAS, (edges, 8)
        for degree in effort.mean_degrees:
            targets = max(edges // degree, 1)
            for width in effort.attention_widths:
                if edges * width > effort.max_attention_elements:
                    continue
                yield TaskKind.ATTENTION, (targets, targets + targets // 4, edges, 8, width // 8)
    for elements in (20_000, 200_000, 2_000_000):
        yield TaskKind.CLIP, (elements, 40)
        yield TaskKind.OPTIMIZER, (elements, 40)
