"""Neighbours: the edges of one step; rows of edges, and ids of edges that the graph does not have."""

from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph

# Ids of invented edges begin here; those of a graph's own edges are below. Each kind has 2^59 of them, all below 2^62.
INVENTED_BASE = 2**61
_IDS_OF_A_KIND = 2**59


class Invented(IntEnum):
    """Edges that the graph does not have, in the order of their ids."""

    WALK = 0
    EXPANDER = 1
    VIRTUAL = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbours:
    """What targets attend to in one step.

    Attributes:
        graph: the edges; `edge_id_E` holds the ids of the graph's own edges and, from `INVENTED_BASE` on, of others.
        position_E: int64 [num_edges], place of each edge in the graph that was prepared, which picks its bias and
            features; -1 for invented edges.
        log_weight_E: fp32 [num_edges] to be added to the scores of all heads (`edge_bias`), so that the sums in the
            softmax stand for all edges that could have been drawn; None where it is zero.
    """

    graph: EdgeGraph
    position_E: Tensor
    log_weight_E: Tensor | None = None

    @property
    def edge_id_E(self) -> Tensor:
        """Ids of the edges, int64."""
        own_E = self.graph.edge_id_E
        return torch.arange(self.graph.num_edges, device=self.graph.device) if own_E is None else own_E


def invented_ids(kind: Invented, node_id: Tensor, number: Tensor, num_numbers: int) -> Tensor:
    """Return ids of edges that belong to nodes and are numbered for each of them; shapes are broadcast.

    Args:
        node_id: int64, global ids.
        number: int64, from 0 to below `num_numbers`; nodes times `num_numbers` must not exceed 2^59.
    """
    return INVENTED_BASE + kind * _IDS_OF_A_KIND + node_id * num_numbers + number


def invented_neighbours(graph: EdgeGraph) -> Neighbours:
    """Return a graph of invented edges only."""
    return Neighbours(graph=graph, position_E=torch.full_like(graph.source_E, -1, dtype=torch.int64))


def row_pointers(count_N: Tensor) -> Tensor:
    """Return where rows of so many entries begin, and the last ends, int64 [N + 1]."""
    indptr_N1 = torch.zeros(len(count_N) + 1, dtype=torch.int64, device=count_N.device)
    torch.cumsum(count_N, 0, out=indptr_N1[1:])
    return indptr_N1


def pick(values_M: Tensor, index: Tensor) -> Tensor:
    """Return values at int32 or int64 indices of any shape: on CPUs several times faster than `values[index]`."""
    return values_M.index_select(0, index.flatten()).view(index.shape)
