"""How much a calibration measures: the shapes of tasks, the sizes of collectives, the time for each."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from simulator.specs.program import TaskKind
from simulator.specs.units import KIB, MIB

# The largest sizes of dense tasks would be batches whose features take many gigabytes.
MAX_BATCH_SIZES = 4


class GraphKind(StrEnum):
    """What a graph to time attention on is like."""

    UNIFORM = "uniform"  # edges at random
    SKEWED = "skewed"  # numbers of edges of targets and of sources follow a power law
    LOCAL = "local"  # most edges stay in a community, a run of rows


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """An attention to time.

    Attributes:
        edges: into all targets.
        degree: mean edges of a target.
        heads, head_size: of queries, keys and values.
    """

    graph: GraphKind
    edges: int
    degree: int
    heads: int
    head_size: int

    @property
    def targets(self) -> int:
        """Rows of the queries."""
        return max(self.edges // self.degree, 1)

    @property
    def sources(self) -> int:
        """Rows of the keys and values: those of the targets, and a halo of a quarter as many."""
        return self.targets + self.targets // 4


def attention_cases(
    edges: tuple[int, ...], graphs: tuple[tuple[GraphKind, int], ...], heads: tuple[tuple[int, int], ...]
) -> tuple[AttentionCase, ...]:
    """Return cases with every number of edges on every kind of graph, where heads take turns.

    Args:
        graphs: kinds, each with the mean edges of a target.
        heads: numbers of heads, each with their size.
    """
    cases = []
    for round_of_edges, count in enumerate(edges):
        for index, (graph, degree) in enumerate(graphs):
            number, size = heads[(index + 4 * round_of_edges) % len(heads)]
            cases.append(AttentionCase(graph=graph, edges=count, degree=degree, heads=number, head_size=size))
    return tuple(cases)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much a calibration measures.

    Attributes:
        rows: row counts of dense tasks.
        widths: columns of the residual stream.
        edges: edge counts of biases.
        attention: graphs and heads of attention.
        collective_bytes: sizes of collectives.
        case_seconds: time to spend on a task of one shape, at least `repetitions`.
    """

    rows: tuple[int, ...]
    widths: tuple[int, ...]
    edges: tuple[int, ...]
    attention: tuple[AttentionCase, ...]
    collective_bytes: tuple[int, ...]
    case_seconds: float
    repetitions: int


_UNIFORM, _SKEWED, _LOCAL = GraphKind.UNIFORM, GraphKind.SKEWED, GraphKind.LOCAL
_QUICK_GRAPHS = ((_UNIFORM, 4), (_SKEWED, 16), (_UNIFORM, 96), (_LOCAL, 16), (_UNIFORM, 24), (_SKEWED, 6))
_FULL_GRAPHS = (
    *_QUICK_GRAPHS,
    *((_UNIFORM, 12), (_SKEWED, 48), (_LOCAL, 64), (_SKEWED, 3), (_UNIFORM, 48), (_LOCAL, 6)),
)
# On GPUs, so many edges that keys and values lie beyond a cache of 60 MB.
_LARGE_GRAPHS = ((_UNIFORM, 8), (_SKEWED, 16), (_LOCAL, 12), (_UNIFORM, 48), (_SKEWED, 48), (_LOCAL, 64))
_CPU_HEADS = ((8, 4), (8, 16), (4, 8), (8, 8), (4, 32), (8, 32), (2, 64))
# Each takes seconds to compile there.
_CUDA_HEADS = ((8, 8), (8, 16), (8, 32), (4, 16), (4, 32))

QUICK_CPU = Effort(
    rows=(512, 4096, 16384),
    widths=(32, 128),
    edges=(8192, 65536, 196608),
    attention=attention_cases((8192, 65536, 262_144), _QUICK_GRAPHS, _CPU_HEADS),
    collective_bytes=(4 * KIB, 64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB),
    case_seconds=0.05,
    repetitions=5,
)
FULL_CPU = Effort(
    rows=(256, 1024, 4096, 16384, 65536),
    widths=(32, 64, 128, 256),
    edges=(4096, 16384, 65536, 262144, 1048576),
    attention=attention_cases((4096, 16384, 65536, 262144, 1048576), _FULL_GRAPHS, _CPU_HEADS),
    collective_bytes=tuple(KIB * 4**power for power in range(8)),
    case_seconds=0.25,
    repetitions=9,
)
QUICK_CUDA = Effort(
    rows=(2048, 32768, 262144),
    widths=(64, 256),
    edges=(65536, 1048576, 4194304),
    attention=(
        attention_cases((65536, 1048576), _QUICK_GRAPHS, _CUDA_HEADS[:3])
        + attention_cases((8_388_608,), _LARGE_GRAPHS, _CUDA_HEADS[:3])
    ),
    collective_bytes=tuple(4 * KIB * 8**power for power in range(6)),
    case_seconds=0.02,
    repetitions=5,
)
FULL_CUDA = Effort(
    rows=(1024, 8192, 65536, 262144, 1048576),
    widths=(64, 128, 256),
    edges=(16384, 131072, 1048576, 4194304, 16777216),
    attention=(
        attention_cases((16384, 131072, 1048576, 4194304), _FULL_GRAPHS, _CUDA_HEADS)
        + attention_cases((33_554_432,), _LARGE_GRAPHS, _CUDA_HEADS)
    ),
    collective_bytes=tuple(4 * KIB * 4**power for power in range(9)),
    case_seconds=0.05,
    repetitions=9,
)


def case_shapes(effort: Effort) -> Iterator[tuple[TaskKind, tuple[int, ...]]]:
    """Yield kind and shape of every compute task that a calibration measures, but for attention's."""
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
        for rows in effort.rows[::2]:
            yield TaskKind.HALO_PACK, (rows, rows // 4, 2 * width)
            yield TaskKind.PAD_ROWS, (rows, rows + rows // 16, 2 * width)
    # Time of what copies follows the bytes, so few sizes do.
    for rows in effort.rows[::2]:
        yield TaskKind.TARGET_ROWS, (rows, rows // 4, effort.widths[-1])
        yield TaskKind.COPY_ROWS, (rows, effort.widths[-1])
        yield TaskKind.MERGE, (rows, rows // 2, 8, effort.widths[-1] // 8)
    for index, rows in enumerate(effort.rows[:MAX_BATCH_SIZES]):
        if index % 2 == 0:
            yield TaskKind.CLUSTER_BATCH, (4 * rows, rows, 8 * rows, effort.widths[-1] * rows)
        # In turn many draws of few nodes, and few draws of many.
        edges_per_row = 1 if index % 2 else 4
        yield TaskKind.SAMPLED_BATCH, (rows // 12, rows, edges_per_row * rows, effort.widths[-1] * rows)
    for index, rows in enumerate(effort.rows):
        yield TaskKind.LINEAR, (rows, effort.widths[-1], 10)
        if index % 2 == 0:
            yield TaskKind.LOSS, (rows, rows // 2, 10)
    for rows in (effort.rows[0], effort.rows[-1]):
        yield TaskKind.BIAS, (rows, effort.widths[-1])
    for edges in effort.edges[::2]:
        yield TaskKind.EDGE_BIAS, (edges, 8)
    for elements in (20_000, 200_000, 2_000_000):
        yield TaskKind.CLIP, (elements, 40)
        yield TaskKind.OPTIMIZER, (elements, 40)
    for elements in (20_000, 2_000_000):
        yield TaskKind.HOST_OPTIMIZER, (elements, 40)
    for num_bytes in (64 * KIB, 32 * MIB):
        yield TaskKind.COPY_TO_HOST, (num_bytes,)
        yield TaskKind.COPY_FROM_HOST, (num_bytes,)
    for elements in (20_000, 2_000_000):
        yield TaskKind.GRADIENT_NORM, (elements, 40)
        yield TaskKind.GRADIENT_SCALE, (elements, 40)
        yield TaskKind.SHARD_COPY, (2, elements // 2)
        yield TaskKind.GRADIENT_CAST, (elements,)
        yield TaskKind.TOP_K_SELECT, (elements, elements // 100)
        yield TaskKind.TOP_K_SUM, (elements, elements // 100, 2)
    for side in (48, 512):  # of square matrices
        for kind in (TaskKind.LOW_RANK_PROJECT, TaskKind.LOW_RANK_ORTHOGONALISE, TaskKind.LOW_RANK_RESTORE):
            yield kind, (8 * side * side, 8, 4)
