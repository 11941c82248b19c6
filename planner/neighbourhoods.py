"""What batches of sampled neighbourhoods are expected to hold, from the graph's edges and without drawing any.

A batch begins with its seeds, and from the last layer to the first the rows of a layer are those of its targets and of
the sources that these sample. With `p(u)` the probability that node u is a target, an edge into u is drawn with
`p(u) * min(1, fan_out / degree(u))`, and v is no source if it is no target and none of the edges from it is drawn.
Edges count as drawn independently of one another, which they nearly are in graphs much larger than a batch:
`tests/planner/test_neighbourhoods.py` holds the counts against samples that were drawn.
"""

from typing import Any

import numpy as np
import scipy.sparse
import scipy.special
from numpy.typing import NDArray

from simulator.readers.graphs import Graph
from simulator.specs.plan import SampledBatches, SampledLayer
from simulator.specs.program import MAX_SHORT_EDGES


def expected_batches(
    graph: Graph, fan_outs: tuple[int, ...], *, seeds_per_batch: int, data_parallel_degree: int
) -> SampledBatches:
    """Return sampled batches with the counts that are to be expected of them.

    The batches of an epoch have equal numbers of seeds, so fewer than `seeds_per_batch` unless these divide the nodes
    to train on.

    Args:
        fan_outs: of each layer, the last layer's last.
    """
    num_train_nodes = int(graph.train_mask_N.sum())
    num_batches = max(-(-num_train_nodes // (seeds_per_batch * data_parallel_degree)), 1) * data_parallel_degree
    degree_N = graph.in_degree_N
    target_N = graph.train_mask_N / num_batches
    layers = []
    for fan_out in reversed(fan_outs):
        kept_ratio_N = np.minimum(1.0, fan_out / np.maximum(degree_N, 1))
        drawn_E = np.repeat(target_N * kept_ratio_N, degree_N)
        # Edges of a source that are drawn, and the logarithm of the probability that none is.
        edges_N = np.bincount(graph.source_E, weights=drawn_E, minlength=graph.num_nodes)
        none_N = np.bincount(graph.source_E, weights=_log_complement(drawn_E), minlength=graph.num_nodes)
        source_N = 1 - (1 - target_N) * np.exp(none_N)
        kept_N = np.minimum(degree_N, fan_out)
        layers.append(
            SampledLayer(
                num_sources=round(source_N.sum()),
                num_targets=round(target_N.sum()),
                num_edges=round(drawn_E.sum()),
                num_edges_of_long_targets=round((target_N * kept_N)[kept_N > MAX_SHORT_EDGES].sum()),
                num_edges_of_long_sources=round(_edges_of_long_rows(edges_N)),
            )
        )
        target_N = source_N
    entries_N = np.diff(graph.features.indptr) if isinstance(graph.features, scipy.sparse.csr_array) else None
    return SampledBatches(
        fan_outs=fan_outs,
        seeds_per_batch=seeds_per_batch,
        layers=tuple(reversed(layers)),
        num_feature_entries=0 if entries_N is None else round(float(target_N @ entries_N)),
    )


def _log_complement(ratio: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the logarithm of one less each ratio, finite also where that is zero."""
    return np.log1p(-np.minimum(ratio, 1 - 1e-16))


def _edges_of_long_rows(mean_N: NDArray[Any]) -> float:
    """Return the expected edges of rows with more than `MAX_SHORT_EDGES` of them, each row's number Poisson's."""
    # E[X; X > k] = mean * P(X >= k) for a Poisson X, and P(X >= k) is a regularised gamma function.
    return float((mean_N * scipy.special.gammainc(MAX_SHORT_EDGES, mean_N)).sum())
