"""Graphs to time attention on, made on the device in a moment: they differ in what decides its time.

Rows of the sources lie beyond the cache or in it, and edges are of short rows or of long ones.
"""

import numpy as np
import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph
from executor.measure.effort import AttentionCase, GraphKind
from simulator.readers.graphs import Graph
from simulator.readers.locality import beyond_cache_ratio

# Share of R-MAT's quadrants of the lower half, of targets and of sources (Graph500: a = 0.57, b = c = 0.19).
_LOWER_RATIO = 0.57 + 0.19
# Rows of a community, and share of the edges that stay in it: 4 MB of keys and values of 128 columns in fp32.
_COMMUNITY_ROWS = 4096
_INSIDE_RATIO = 0.8
# Edges that are looked at to tell how many rows come from beyond the cache.
_MAX_EDGES_LOOKED_AT = 500_000


def attention_graph(case: AttentionCase, generator: torch.Generator) -> EdgeGraph:
    """Return the edges of a case, on the generator's device; those of a target by ascending source, as in stores."""
    targets, sources, edges = case.targets, case.sources, case.edges
    match case.graph:
        case GraphKind.UNIFORM:
            target_E = _uniform(targets, edges, generator)
            source_E = _uniform(sources, edges, generator)
        case GraphKind.SKEWED:
            target_E = _skewed(targets, edges, generator)
            source_E = _skewed(sources, edges, generator)
        case GraphKind.LOCAL:
            target_E = _uniform(targets, edges, generator)
            source_E = _near(target_E, case, generator)
    key_E = torch.sort(target_E * sources + source_E).values
    indptr_N1 = torch.zeros(targets + 1, dtype=torch.int64, device=generator.device)
    torch.cumsum(torch.bincount(target_E, minlength=targets), 0, out=indptr_N1[1:])
    return EdgeGraph(indptr_N1=indptr_N1, source_E=(key_E % sources).to(torch.int32), num_sources=sources)


def _uniform(num_rows: int, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, num_rows, (count,), device=generator.device, generator=generator)


def _skewed(num_rows: int, count: int, generator: torch.Generator) -> Tensor:
    """Return rows whose numbers of edges are as skewed as R-MAT's, and whose places say nothing."""
    place = torch.zeros(count, dtype=torch.float64, device=generator.device)
    levels = max((num_rows - 1).bit_length(), 1)
    for _ in range(levels):
        place = place * 2 + (torch.rand(count, device=generator.device, generator=generator) >= _LOWER_RATIO)
    row = (place * (num_rows / 2**levels)).long()
    return torch.randperm(num_rows, device=generator.device, generator=generator)[row]


def _near(target_E: Tensor, case: AttentionCase, generator: torch.Generator) -> Tensor:
    """Return sources that are mostly of the target's community, a run of rows."""
    rows = min(_COMMUNITY_ROWS, case.sources)
    start_E = (target_E * case.sources // case.targets // rows * rows).clamp(max=case.sources - rows)
    near_E = start_E + _uniform(rows, len(target_E), generator)
    is_inside_E = torch.rand(len(target_E), device=generator.device, generator=generator) < _INSIDE_RATIO
    return torch.where(is_inside_E, near_E, _uniform(case.sources, len(target_E), generator))


def beyond_cache_ratio_of_edges(graph: EdgeGraph, *, row_bytes: int, cache_bytes: int) -> float:
    """Return the share of gathered rows that come from beyond a cache; 1 where the cache is not known.

    Args:
        row_bytes: of a source's keys and values.
    """
    if cache_bytes == 0:
        return 1.0
    # The measure knows square graphs: targets without edges, or sources that none reads, change nothing.
    num_nodes = max(graph.num_targets, graph.num_sources)
    indptr_N = np.full(num_nodes + 1, graph.num_edges, dtype=np.int64)
    indptr_N[: graph.num_targets + 1] = graph.indptr_N1.cpu().numpy()
    nothing = np.zeros(0, dtype=np.bool_)
    arrays = Graph(
        indptr_N=indptr_N,
        source_E=graph.source_E.cpu().numpy(),
        features=np.zeros((num_nodes, 0), dtype=np.float32),
        labels_N=np.zeros(0, dtype=np.int64),
        train_mask_N=nothing,
        val_mask_N=nothing,
        test_mask_N=nothing,
    )
    cache_rows = cache_bytes // row_bytes
    return beyond_cache_ratio(arrays, np.arange(num_nodes), cache_rows=cache_rows, max_edges=_MAX_EDGES_LOOKED_AT)
