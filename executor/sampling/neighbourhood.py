"""Neighbourhoods of seeds: what each layer of a model attends to so that the last one returns the seeds' rows.

From the last layer to the first, targets draw their neighbours, and what was drawn joins them as sources, the targets
in front; these sources are the targets of the layer before. Draws are those of `NeighbourSampler` on the whole graph
under the key of the step and layer: what a node attends to depends on no seed and no rank.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from executor.attention.graph import EdgeGraph
from executor.sampling.candidates import prepare_candidates
from executor.sampling.draws import MAX_DRAWN_PLACES, sample_rows
from executor.sampling.sampler import NeighbourSampler, SamplerInputs
from simulator.readers.graphs import Graph
from simulator.specs.plan import SampledLayer
from simulator.specs.program import MAX_SHORT_EDGES
from simulator.specs.sampling import NeighbourKind, NeighbourSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerSample:
    """What the targets of one layer attend to.

    Attributes:
        indptr_N1: int64, edges by target; the targets are the first of the sources.
        source_E: int32, rows.
        position_E: int64, positions in the whole graph.
    """

    indptr_N1: NDArray[np.int64]
    source_E: NDArray[np.int32]
    position_E: NDArray[np.int64]
    num_sources: int

    def counts(self) -> SampledLayer:
        """Return the layer in numbers."""
        rows = (np.diff(self.indptr_N1), np.bincount(self.source_E, minlength=self.num_sources))
        of_targets, of_sources = (int(degree[degree > MAX_SHORT_EDGES].sum()) for degree in rows)
        return SampledLayer(
            num_sources=self.num_sources,
            num_targets=len(self.indptr_N1) - 1,
            num_edges=len(self.source_E),
            num_edges_of_long_targets=of_targets,
            num_edges_of_long_sources=of_sources,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbourhood:
    """Seeds with what each layer attends to.

    Attributes:
        node_N: global ids of the first layer's sources, int64; those of each layer are the first of them.
        layers: in the model's order; the last one's targets are the seeds.
    """

    node_N: NDArray[np.int64]
    layers: tuple[LayerSample, ...]


class NeighbourhoodSampler:
    """Samples neighbourhoods from a graph on the host; not to be shared between threads.

    Args:
        fan_outs: neighbours of a target at most, of each layer.
        place_N: place of each node in the order in which rows are to lie; None for that of their ids.
    """

    def __init__(
        self, graph: Graph, fan_outs: tuple[int, ...], *, seed: int, place_N: NDArray[np.integer] | None = None
    ) -> None:
        self._graph, self._fan_outs, self._seed, self._place_N = graph, fan_outs, seed, place_N
        self._row_of_node_N = np.full(graph.num_nodes, -1, dtype=np.int32)

    def sample(self, seeds: NDArray[np.int64], step: int) -> Neighbourhood:
        """Return the neighbourhoods of different nodes in a step."""
        node_N = self._in_order(seeds)
        self._row_of_node_N[node_N] = np.arange(len(node_N), dtype=np.int32)
        layers = []
        for index in reversed(range(len(self._fan_outs))):
            key = layer_key(self._seed, step, index, num_layers=len(self._fan_outs))
            indptr_N1, position_E = self._drawn(node_N, self._fan_outs[index], key)
            node_E = self._graph.source_E[position_E]
            new = self._in_order(self._without_rows(node_E))
            self._row_of_node_N[new] = np.arange(len(node_N), len(node_N) + len(new), dtype=np.int32)
            node_N = np.concatenate([node_N, new])
            layers.append(
                LayerSample(
                    indptr_N1=indptr_N1,
                    source_E=self._row_of_node_N[node_E],
                    position_E=position_E,
                    num_sources=len(node_N),
                )
            )
        self._row_of_node_N[node_N] = -1
        return Neighbourhood(node_N=node_N, layers=tuple(reversed(layers)))

    def _in_order(self, nodes: NDArray[np.integer]) -> NDArray[np.int64]:
        keys = nodes if self._place_N is None else self._place_N[nodes]
        return nodes[np.argsort(keys)].astype(np.int64)

    def _without_rows(self, node_E: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the distinct nodes that have no row yet."""
        new_E = node_E[self._row_of_node_N[node_E] < 0]
        # Each writes its place over those of its likes; the last one's stays. Faster than sorting them all.
        place_E = np.arange(len(new_E), dtype=np.int32)
        self._row_of_node_N[new_E] = place_E
        is_last_E: NDArray[np.bool_] = self._row_of_node_N[new_E] == place_E
        return np.compress(is_last_E, new_E)

    def _drawn(
        self, node_N: NDArray[np.int64], fan_out: int, key: torch.Tensor
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return row pointers and positions of the edges that nodes draw."""
        first_N = self._graph.indptr_N[node_N]
        degree_N = self._graph.indptr_N[node_N + 1] - first_N
        if fan_out <= MAX_DRAWN_PLACES:
            found = sample_rows(torch.from_numpy(first_N), torch.from_numpy(degree_N), fan_out, key)
            return found[0].numpy(), found[1].numpy()
        graph = self._graph_of_rows(first_N, degree_N)
        spec = NeighbourSpec(kind=NeighbourKind.UNIFORM, fan_out=fan_out)
        inputs = SamplerInputs(seed=self._seed, num_nodes=self._graph.num_nodes)
        drawn = NeighbourSampler([spec], prepare_candidates(graph), inputs).sample(key)
        return drawn.graph.indptr_N1.numpy(), drawn.edge_id_E.numpy()

    def _graph_of_rows(self, first_N: NDArray[np.int64], degree_N: NDArray[np.int64]) -> EdgeGraph:
        """Return all edges of some rows, under their ids in the whole graph."""
        indptr_N1 = np.concatenate([[0], np.cumsum(degree_N)])
        position_E = np.repeat(first_N - indptr_N1[:-1], degree_N) + np.arange(indptr_N1[-1])
        return EdgeGraph(
            indptr_N1=torch.from_numpy(indptr_N1),
            source_E=torch.from_numpy(self._graph.source_E[position_E]),
            num_sources=self._graph.num_nodes,
            edge_id_E=torch.from_numpy(position_E),
        )


def layer_key(seed: int, step: int, layer: int, *, num_layers: int) -> torch.Tensor:
    """Return the key of a layer's draws in a step, int64 [2]: each layer of each step has a number of its own."""
    return torch.tensor([seed, step * num_layers + layer])
