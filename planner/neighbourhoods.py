"""What batches of sampled neighbourhoods are expected to hold: the mean of a few that are drawn from the graph.

The law is that of `executor/sampling/neighbourhood.py`, the draws are others: which nodes a step will meet is known on
its ranks alone, but their numbers vary little from batch to batch. Degrees alone would not tell them: neighbours attend
to one another, so much of what a node samples is there already; taking edges as independent gave 10 to 24 % too many
rows. `tests/planner/test_neighbourhoods.py` holds the counts against samples of the executor.
"""

from dataclasses import astuple

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from simulator.readers.graphs import Graph
from simulator.specs.plan import SampledBatches, SampledLayer
from simulator.specs.program import MAX_SHORT_EDGES

DRAWN_BATCHES = 8


def expected_batches(
    graph: Graph, fan_outs: tuple[int, ...], *, seeds_per_batch: int, data_parallel_degree: int, seed: int = 0
) -> SampledBatches:
    """Return sampled batches with the counts that are to be expected of them.

    The batches of an epoch have equal numbers of seeds, so fewer than `seeds_per_batch` unless these divide the nodes
    to train on.

    Args:
        fan_outs: of each layer, the last layer's last.
        seed: of the draws.
    """
    nodes = np.flatnonzero(graph.train_mask_N)
    num_steps = max(-(-len(nodes) // (seeds_per_batch * data_parallel_degree)), 1)
    num_seeds = -(-len(nodes) // (num_steps * data_parallel_degree))
    entries_N = np.diff(graph.features.indptr) if isinstance(graph.features, scipy.sparse.csr_array) else None
    generator = np.random.default_rng(seed)
    counts, entries = [], []
    for _ in range(DRAWN_BATCHES):
        seeds = generator.choice(nodes, num_seeds, replace=False)
        rows, layers = _drawn(graph, fan_outs, seeds, generator)
        counts.append([astuple(layer) for layer in layers])
        entries.append(0 if entries_N is None else int(entries_N[rows].sum()))
    means = np.rint(np.mean(counts, axis=0)).astype(int).tolist()
    return SampledBatches(
        fan_outs=fan_outs,
        seeds_per_batch=seeds_per_batch,
        layers=tuple(_layer(*layer) for layer in means),
        num_feature_entries=round(float(np.mean(entries))),
    )


def _layer(sources: int, targets: int, edges: int, of_long_targets: int, of_long_sources: int) -> SampledLayer:
    return SampledLayer(
        num_sources=sources,
        num_targets=targets,
        num_edges=edges,
        num_edges_of_long_targets=of_long_targets,
        num_edges_of_long_sources=of_long_sources,
    )


def _drawn(
    graph: Graph, fan_outs: tuple[int, ...], seeds: NDArray[np.int64], generator: np.random.Generator
) -> tuple[NDArray[np.int64], list[SampledLayer]]:
    """Return the rows of a batch that is drawn, and its layers."""
    rows, layers = seeds, []
    for fan_out in reversed(fan_outs):
        degree_R = graph.indptr_N[rows + 1] - graph.indptr_N[rows]
        kept_R = np.minimum(degree_R, fan_out)
        source_E = graph.source_E[_drawn_positions(graph, rows, degree_R, fan_out, generator)]
        _, edges_of_source = np.unique(source_E, return_counts=True)
        num_targets = len(rows)
        rows = np.union1d(rows, source_E)
        layers.append(
            _layer(
                len(rows), num_targets, len(source_E), *(_edges_of_long_rows(row) for row in (kept_R, edges_of_source))
            )
        )
    return rows, layers[::-1]


def _drawn_positions(
    graph: Graph,
    rows: NDArray[np.int64],
    degree_R: NDArray[np.int64],
    fan_out: int,
    generator: np.random.Generator,
) -> NDArray[np.int64]:
    """Return positions of the edges that rows draw without replacement; rows with few edges keep all.

    Source: Bentley and Floyd, "A sample of brilliance", CACM 30(9), 1987.
    """
    first_R, is_short_R = graph.indptr_N[rows], degree_R <= fan_out
    short_first_R, short_degree_R = first_R[is_short_R], degree_R[is_short_R]
    starts_R = np.cumsum(short_degree_R) - short_degree_R
    kept_all = np.repeat(short_first_R - starts_R, short_degree_R) + np.arange(short_degree_R.sum())
    long_degree_R = degree_R[~is_short_R]
    place_FR = np.empty((fan_out, len(long_degree_R)), dtype=np.int64)
    for number in range(fan_out):
        last_R = long_degree_R - fan_out + number
        place_R = generator.integers(0, last_R + 1)
        is_taken_R = (place_FR[:number] == place_R).any(axis=0)
        place_FR[number] = np.where(is_taken_R, last_R, place_R)
    return np.concatenate([kept_all, (place_FR + first_R[~is_short_R]).ravel()])


def _edges_of_long_rows(edges_of_row: NDArray[np.int64]) -> int:
    return int(edges_of_row[edges_of_row > MAX_SHORT_EDGES].sum())
