"""The nodes that keyed random walks from a node visit most.

Source: Ying et al., "Graph convolutional neural networks for web-scale recommender systems" (PinSage), KDD 2018.
"""

import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph
from executor.keyed import Stream, low_word, mix, numbered_bits, numbers_below, stream_bits
from executor.sampling.candidates import Candidates
from executor.sampling.neighbours import Invented, Neighbours, invented_ids, pick, row_pointers

# Entries of a block of visits, which bounds the memory of a step: a few times 16 MB of int64.
_BLOCK_ENTRIES = 2**21
# A rank holds 16 bits of missing visits, 31 of a hash and 16 of a place: visits are at most 2^16 - 1 (`NeighbourSpec`).
_PLACE_BITS, _HASH_BITS = 16, 31
_NO_RANK = 2**63 - 1


@torch.no_grad()
def sample_by_walks(
    candidates: Candidates,
    *,
    fan_out: int,
    num_walks: int,
    walk_length: int,
    key: Tensor,
    row_T: Tensor | None = None,
) -> Neighbours:
    """Return the `fan_out` nodes that walks from each target visit most, the most visited first.

    A hop goes to the source of an edge into the node, all edges alike. A walk on a node without edges goes on from its
    start; one that starts there visits nothing. Returns to the start count as visits. Ties are settled by a keyed hash.
    A row in which fewer nodes were visited keeps all.

    An edge that the graph has keeps its id (the smallest of a multi-edge); the others are invented. The log weight is
    the log of the visits, with which attention weighs nodes as importance pooling does. How many edges there are is
    only known afterwards, so the host waits for the device once.

    In a part of a graph walks end in the halo, whose edges are elsewhere. For the same choice on any number of ranks
    take the walks on the whole graph, from the part's nodes.

    Args:
        num_walks: from each target; times `walk_length` below 2^16.
        walk_length: hops of a walk.
        key: int64 [2] on the candidates' device, seed and step.
        row_T: rows of the targets, which become the rows of the result; by default all.
    """
    graph = candidates.graph
    if row_T is None:
        row_T = torch.arange(graph.num_targets, device=graph.device)
    if graph.num_edges == 0:
        return candidates.neighbours(
            row_pointers(torch.zeros_like(row_T)), row_T[:0], torch.zeros(0, device=graph.device)
        )
    num_slots = min(fan_out, num_walks * walk_length)
    source_TF = torch.empty(len(row_T), num_slots, dtype=torch.int32, device=graph.device)
    visits_TF = torch.empty_like(source_TF)
    block_rows = max(1, _BLOCK_ENTRIES // (num_walks * walk_length))
    for first in range(0, len(row_T), block_rows):
        block = slice(first, first + block_rows)
        source_BV = _visited(candidates, row_T[block], num_walks, walk_length, key)
        source_TF[block], visits_TF[block] = _most_visited(candidates, row_T[block], source_BV, num_slots, key)
    is_kept_TF = visits_TF > 0
    edge_id_TF, position_TF = _identities(candidates, row_T, source_TF)
    return Neighbours(
        graph=EdgeGraph(
            indptr_N1=row_pointers(is_kept_TF.sum(1)),
            source_E=source_TF[is_kept_TF],
            num_sources=graph.num_sources,
            edge_id_E=edge_id_TF[is_kept_TF],
            is_sampled=True,
        ),
        position_E=position_TF[is_kept_TF],
        log_weight_E=visits_TF[is_kept_TF].double().log().float(),
    )


def _visited(candidates: Candidates, row_T: Tensor, num_walks: int, walk_length: int, key: Tensor) -> Tensor:
    """Return the sources that the walks from each target visit, [T, walks x hops]; one beyond the last for none."""
    graph = candidates.graph
    bits_T1 = stream_bits(candidates.target_id_N[row_T], key, Stream.WALK).unsqueeze(1)
    walk_W = torch.arange(num_walks, device=row_T.device)
    start_TW = row_T.unsqueeze(1).expand(-1, num_walks)
    row_TW, hops = start_TW, []
    for hop in range(walk_length):
        bits_TW = numbered_bits(bits_T1, hop * num_walks + walk_W)
        place_TW = numbers_below(bits_TW, pick(candidates.degree_N, row_TW))
        position_TW = pick(graph.indptr_N1, row_TW) + place_TW
        # A start without edges may point beyond the last edge; what it finds is replaced below.
        source_TW = pick(graph.source_E, position_TW.clamp(max=graph.num_edges - 1))
        hops.append(source_TW)
        next_TW = pick(candidates.walk_row_M, source_TW)
        row_TW = torch.where(next_TW < 0, start_TW, next_TW)
    has_no_edges_T1 = (candidates.degree_N[row_T] == 0).unsqueeze(1)
    return torch.cat(hops, dim=1).masked_fill(has_no_edges_T1, graph.num_sources)


def _most_visited(
    candidates: Candidates, row_T: Tensor, source_TV: Tensor, num_slots: int, key: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the sources that each row holds most often, [T, slots], the most first, and how often; 0 for none."""
    num_visits = source_TV.shape[1]
    place_V = torch.arange(num_visits, device=source_TV.device)
    source_TV = source_TV.sort(dim=1).values
    # Where a run of equal sources ends, less where it begins.
    visits_TV = torch.searchsorted(source_TV, source_TV, right=True) - place_V
    is_counted_TV = source_TV < candidates.graph.num_sources
    is_counted_TV[:, 1:] &= source_TV[:, 1:] != source_TV[:, :-1]
    source_id_TV = pick(candidates.source_id_M, source_TV.clamp(max=candidates.graph.num_sources - 1))
    bits_T1 = stream_bits(candidates.target_id_N[row_T], key, Stream.VISIT).unsqueeze(1)
    hash_TV = mix(bits_T1 ^ mix(low_word(source_id_TV))).to(torch.int64) & (2**_HASH_BITS - 1)
    rank_TV = ((num_visits - visits_TV) << (_HASH_BITS + _PLACE_BITS)) | (hash_TV << _PLACE_BITS) | place_V
    rank_TF = torch.topk(rank_TV.masked_fill(~is_counted_TV, _NO_RANK), num_slots, dim=1, largest=False).values
    place_TF = (rank_TF & (2**_PLACE_BITS - 1)).clamp(max=num_visits - 1)
    visits_TF = (num_visits - (rank_TF >> (_HASH_BITS + _PLACE_BITS))).clamp(min=0)
    return source_TV.gather(1, place_TF), visits_TF


def _identities(candidates: Candidates, row_T: Tensor, source_TF: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids of the edges from sources to targets, and their places in the graph that was prepared."""
    pair_E, position_E = candidates.pairs
    pair_TF = (row_T.unsqueeze(1) << 32) | source_TF
    place_TF = torch.searchsorted(pair_E, pair_TF).clamp(max=len(pair_E) - 1)
    is_edge_TF = pick(pair_E, place_TF) == pair_TF
    position_TF = pick(position_E, place_TF)
    slot_F = torch.arange(source_TF.shape[1], device=row_T.device)
    target_id_T1 = candidates.target_id_N[row_T].unsqueeze(1)
    invented_TF = invented_ids(Invented.WALK, target_id_T1, slot_F, len(slot_F))
    edge_id_TF = torch.where(is_edge_TF, candidates.edge_ids(position_TF), invented_TF)
    given_TF = candidates.given_positions(position_TF)
    return edge_id_TF, given_TF.masked_fill(~is_edge_TF, -1)
