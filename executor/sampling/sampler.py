"""NeighbourSampler: does what `NeighbourSpec`s say, step after step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from executor.sampling.candidates import Candidates
from executor.sampling.draws import sample_by_degree, sample_uniform
from executor.sampling.join import join_neighbours
from executor.sampling.neighbours import Neighbours
from executor.sampling.projection import random_projection, sample_by_projection
from executor.sampling.stored import edges_of_ids
from executor.sampling.structures import expander_neighbours, with_virtual_nodes
from executor.sampling.walks import sample_by_walks
from simulator.specs.sampling import NeighbourKind, NeighbourSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class SamplerInputs:
    """What some kinds of neighbours need beside the candidates.

    Attributes:
        seed: of the expander.
        num_nodes: of the whole graph, for the expander.
        source_degree_M: degree of each source in the whole graph, for `degree`.
        stored_id_K: ids of stored edges (`read_edge_ids`), for `stored`.
        projection_DR: a learned projection, for the projected kinds; None for a random one, drawn anew in each step.
    """

    seed: int
    num_nodes: int
    source_degree_M: Tensor | None = None
    stored_id_K: Tensor | None = None
    projection_DR: Tensor | None = None


class NeighbourSampler:
    """Draws what targets attend to: the union of the kinds that the specs name.

    Kinds that are the same in every step are made once. Repeats between kinds stay, unless `drop_repeats`, which makes
    the host wait for the device once a step. Virtual nodes come last and once: a spec of them adds rows.
    """

    def __init__(
        self,
        specs: Sequence[NeighbourSpec],
        candidates: Candidates,
        inputs: SamplerInputs,
        *,
        drop_repeats: bool = False,
    ) -> None:
        self._candidates = candidates
        self._inputs = inputs
        self._drop_repeats = drop_repeats
        self._num_virtual = sum(spec.num_virtual_nodes for spec in specs)
        no_key = torch.zeros(2, dtype=torch.int64, device=candidates.graph.device)
        self._drawn = [spec for spec in specs if not spec.is_static]
        self._static = [self._neighbours(spec, no_key) for spec in specs if spec.is_static]
        self._same_each_step = None if self._drawn else self._completed(self._static)

    def sample(self, key: Tensor, q_NHK: Tensor | None = None, k_MHK: Tensor | None = None) -> Neighbours:
        """Return the neighbours of one step.

        Args:
            key: int64 [2] on the candidates' device, seed and step.
            q_NHK, k_MHK: queries of the targets and keys of the sources, for the projected kinds.
        """
        if self._same_each_step is not None:
            return self._same_each_step
        drawn = [self._neighbours(spec, key, q_NHK, k_MHK) for spec in self._drawn]
        return self._completed([*self._static, *drawn])

    def _completed(self, parts: list[Neighbours]) -> Neighbours:
        """Return the union, with virtual nodes if there are any."""
        joined = join_neighbours(parts, drop_repeats=self._drop_repeats)
        return with_virtual_nodes(joined, self._candidates, self._num_virtual) if self._num_virtual else joined

    def _neighbours(
        self, spec: NeighbourSpec, key: Tensor, q_NHK: Tensor | None = None, k_MHK: Tensor | None = None
    ) -> Neighbours:
        """Return the neighbours of one kind; of virtual nodes none yet."""
        candidates, inputs = self._candidates, self._inputs
        match spec.kind:
            case NeighbourKind.ALL:
                positions_E = torch.arange(candidates.graph.num_edges, device=key.device)
                return Neighbours(graph=candidates.graph, position_E=candidates.given_positions(positions_E))
            case NeighbourKind.VIRTUAL:
                no_edges_N1 = torch.zeros_like(candidates.graph.indptr_N1)
                return candidates.neighbours(no_edges_N1, no_edges_N1[:0])
            case NeighbourKind.STORED:
                assert inputs.stored_id_K is not None, "stored neighbours need their edge ids"
                return edges_of_ids(candidates, inputs.stored_id_K)
            case NeighbourKind.EXPANDER:
                return expander_neighbours(candidates, spec.fan_out, num_nodes=inputs.num_nodes, seed=inputs.seed)
            case NeighbourKind.UNIFORM:
                return sample_uniform(candidates, spec.fan_out, key)
            case NeighbourKind.DEGREE:
                assert inputs.source_degree_M is not None, "neighbours by degree need the sources' degrees"
                return sample_by_degree(candidates, spec.fan_out, spec.degree_exponent, inputs.source_degree_M, key)
            case NeighbourKind.RANDOM_WALK:
                return sample_by_walks(
                    candidates,
                    fan_out=spec.fan_out,
                    num_walks=spec.num_walks,
                    walk_length=spec.walk_length,
                    key=key,
                )
            case NeighbourKind.PROJECTION_TOP_K | NeighbourKind.PROJECTION_DRAWN:
                assert q_NHK is not None, "projected neighbours need queries"
                assert k_MHK is not None, "projected neighbours need keys"
                projection_DR = inputs.projection_DR
                if projection_DR is None:
                    projection_DR = random_projection(math.prod(k_MHK.shape[1:]), spec.projection_width, key)
                drawing_key = key if spec.kind == NeighbourKind.PROJECTION_DRAWN else None
                return sample_by_projection(candidates, spec.fan_out, q_NHK, k_MHK, projection_DR, key=drawing_key)
            case _:
                assert_never(spec.kind)
