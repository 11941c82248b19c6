"""Graphs for tests of sampling, whole, shuffled and cut in two; keyed bits computed plainly, one number at a time."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph
from executor.sampling.candidates import Candidates, prepare_candidates
from executor.sampling.draws import sample_by_degree, sample_uniform
from executor.sampling.neighbours import Neighbours
from executor.sampling.projection import random_projection, sample_by_projection
from executor.sampling.walks import sample_by_walks
from tests.small_graphs import Edges

KEY = torch.tensor([3, 5])
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 4, 2, 3


@dataclass(frozen=True)
class Case:
    """A graph or a part of one, prepared; features of all nodes of the whole graph are by global id."""

    candidates: Candidates
    degree: Tensor
    q: Tensor
    k: Tensor


def sorted_edges(edges: Edges) -> Edges:
    """Return the edges by target; an edge's place here is its global id."""
    return sorted(edges, key=lambda edge: edge[1])


def int64s(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def case_of(edges: Edges, num_nodes: int, *, targets: list[int] | None = None, shuffle_seed: int | None = None) -> Case:
    """Return the rows of some targets with their sources: own rows first, then the halo.

    Args:
        edges: by target.
        targets: global ids in the order of the rows; by default all.
        shuffle_seed: to shuffle the edges of each row in memory.
    """
    targets = list(range(num_nodes)) if targets is None else targets
    own = set(targets)
    halo = sorted({source for source, target in edges if target in own} - own)
    sources = [*targets, *halo]
    row_of = {node: row for row, node in enumerate(sources)}
    rng = np.random.default_rng(shuffle_seed)
    order: list[int] = []
    indptr = [0]
    for node in targets:
        row = [edge_id for edge_id, edge in enumerate(edges) if edge[1] == node]
        order += rng.permutation(row).astype(int).tolist() if shuffle_seed is not None else row
        indptr.append(len(order))
    graph = EdgeGraph(
        indptr_N1=torch.tensor(indptr),
        source_E=torch.tensor([row_of[edges[edge_id][0]] for edge_id in order], dtype=torch.int32),
        num_sources=len(sources),
        edge_id_E=int64s(order),
    )
    # Whole numbers: their products and sums are exact in any order.
    numbers = np.random.default_rng(num_nodes)
    return Case(
        candidates=prepare_candidates(graph, target_id_N=int64s(targets), source_id_M=int64s(sources)),
        degree=torch.from_numpy(np.bincount([edge[1] for edge in edges], minlength=num_nodes)[sources]),
        q=torch.from_numpy(numbers.integers(-3, 4, (num_nodes, NUM_HEADS, HEAD_SIZE))).float()[targets],
        k=torch.from_numpy(numbers.integers(-3, 4, (num_nodes, NUM_KV_HEADS, HEAD_SIZE))).float()[sources],
    )


def _projected(case: Case, fan_out: int, key: Tensor, *, is_drawn: bool) -> Neighbours:
    projection = random_projection(NUM_KV_HEADS * HEAD_SIZE, 2, key)
    drawing_key = key if is_drawn else None
    return sample_by_projection(case.candidates, fan_out, case.q, case.k, projection, key=drawing_key)


def walked(case: Case, *, fan_out: int, num_walks: int, walk_length: int, row_T: Tensor | None = None) -> Neighbours:
    """Return the nodes that walks visit most under the key of all tests."""
    return sample_by_walks(
        case.candidates, fan_out=fan_out, num_walks=num_walks, walk_length=walk_length, key=KEY, row_T=row_T
    )


DRAWS: dict[str, Callable[[Case, int, Tensor], Neighbours]] = {
    "uniform": lambda case, fan_out, key: sample_uniform(case.candidates, fan_out, key),
    "degree": lambda case, fan_out, key: sample_by_degree(case.candidates, fan_out, 0.5, case.degree, key),
    "projection_top_k": lambda case, fan_out, key: _projected(case, fan_out, key, is_drawn=False),
    "projection_drawn": lambda case, fan_out, key: _projected(case, fan_out, key, is_drawn=True),
}


def id_rows(neighbours: Neighbours) -> list[list[int]]:
    """Return the edge ids of each row."""
    return [ids.tolist() for ids in neighbours.edge_id_E.split(neighbours.graph.indptr_N1.diff().tolist())]


def log_weights(neighbours: Neighbours) -> list[float]:
    """Return the log weight of each edge."""
    assert neighbours.log_weight_E is not None
    return neighbours.log_weight_E.tolist()


def source_rows(neighbours: Neighbours) -> list[list[int]]:
    """Return the sources of each row."""
    return [rows.tolist() for rows in neighbours.graph.source_E.split(neighbours.graph.indptr_N1.diff().tolist())]


def alike_rows(num_rows: int, num_columns: int) -> Candidates:
    """Return rows that all have the same sources: what one draw does to each is as many independent draws."""
    graph = EdgeGraph(
        indptr_N1=torch.arange(num_rows + 1) * num_columns,
        source_E=torch.arange(num_columns, dtype=torch.int32).repeat(num_rows),
        num_sources=max(num_rows, num_columns),
    )
    return prepare_candidates(graph)


# --- Keyed bits in whole numbers below 2^32.

_WORD = 2**32
_GOLDEN = 0x9E3779B1


def plain_mix(bits: int) -> int:
    bits = bits * 0x85EBCA6B % _WORD
    bits ^= bits >> 13
    bits = bits * 0xC2B2AE35 % _WORD
    return bits ^ (bits >> 16)


def plain_bits(node: int, key: Tensor, stream: int) -> int:
    """Return the bits of a node or an edge for one use."""
    seed, step = key.tolist()
    word = plain_mix(plain_mix(plain_mix(seed % _WORD ^ _GOLDEN) ^ step % _WORD) ^ stream * _GOLDEN % _WORD)
    return plain_mix(plain_mix(node % _WORD ^ word) ^ (node >> 32) % _WORD)


def plain_numbered(bits: int, number: int) -> int:
    return plain_mix(bits ^ (number + 1) * _GOLDEN % _WORD)
