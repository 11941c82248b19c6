"""Edge sets over the same rows joined, and edge sets from arrays of neighbours."""

from collections.abc import Sequence

import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph
from executor.sampling.neighbours import INVENTED_BASE, Neighbours, row_pointers


def fan_out_graph(
    neighbour_ND: Tensor, mask_ND: Tensor | None = None, *, num_sources: int, edge_id_ND: Tensor | None = None
) -> EdgeGraph:
    """Return the edges from up to D neighbours to each of N targets, in the order of the columns.

    Args:
        neighbour_ND: integers, rows of the sources; what the mask excludes may be anything, such as -1.
        mask_ND: True where there is a neighbour (`neighbour_ND >= 0`). None promises that all are there: then nothing
            is sorted, and the host does not wait for the device to count them.
        num_sources: rows of the keys and values.
        edge_id_ND: int64, ids of the edges; by default their positions.
    """
    num_targets, num_columns = neighbour_ND.shape
    row_degree = num_columns if mask_ND is None else None
    if mask_ND is None:
        indptr_N1 = torch.arange(num_targets + 1, device=neighbour_ND.device) * num_columns
        source_E, edge_id_E = neighbour_ND.flatten(), None if edge_id_ND is None else edge_id_ND.flatten()
    else:
        indptr_N1 = row_pointers(mask_ND.sum(1))
        source_E, edge_id_E = neighbour_ND[mask_ND], None if edge_id_ND is None else edge_id_ND[mask_ND]
    return EdgeGraph(
        indptr_N1=indptr_N1,
        source_E=source_E.to(torch.int32),
        num_sources=num_sources,
        edge_id_E=edge_id_E,
        row_degree=row_degree,
        is_sampled=True,
    )


def join_neighbours(parts: Sequence[Neighbours], *, drop_repeats: bool = False) -> Neighbours:
    """Return the edges of several sets over the same rows, each row's in the order of the sets.

    Args:
        parts: at least one.
        drop_repeats: drop an edge that has the id of an earlier one, and an invented edge if another edge joins the
            same nodes: one of the graph, or an earlier invented one. The graph's own multi-edges stay. The host waits
            for the device to count the rest. Without it all edges stay, so attention weighs a neighbour that is in
            two sets twice.
    """
    rows = {(part.graph.num_targets, part.graph.num_sources) for part in parts}
    assert len(rows) == 1, f"sets must have the same targets and sources, got {rows}"
    joined = parts[0] if len(parts) == 1 else _joined(parts)
    return _without_repeats(joined) if drop_repeats else joined


def _joined(parts: Sequence[Neighbours]) -> Neighbours:
    """Return all edges: each goes to its place among those of its own set, shifted by what other sets put before."""
    starts_PN1 = torch.stack([part.graph.indptr_N1 for part in parts])
    places = []
    for index, part in enumerate(parts):
        shift_N = starts_PN1[:index, 1:].sum(0) + starts_PN1[index + 1 :, :-1].sum(0)
        own_E = torch.arange(part.graph.num_edges, device=part.graph.device)
        places.append(own_E + shift_N.index_select(0, part.graph.target_E))
    place_E = torch.cat(places)
    graph = EdgeGraph(
        indptr_N1=starts_PN1.sum(0),
        source_E=_placed([part.graph.source_E for part in parts], place_E),
        num_sources=parts[0].graph.num_sources,
        edge_id_E=_placed([part.edge_id_E for part in parts], place_E),
        is_sampled=True,
    )
    has_weights = any(part.log_weight_E is not None for part in parts)
    return Neighbours(
        graph=graph,
        position_E=_placed([part.position_E for part in parts], place_E),
        log_weight_E=_placed([_log_weights(part) for part in parts], place_E) if has_weights else None,
    )


def _log_weights(part: Neighbours) -> Tensor:
    zeros_E = torch.zeros(part.graph.num_edges, device=part.graph.device)
    return zeros_E if part.log_weight_E is None else part.log_weight_E


def _placed(columns: list[Tensor], place_E: Tensor) -> Tensor:
    column_E = torch.cat(columns)
    return torch.empty_like(column_E).index_copy_(0, place_E, column_E)


def _without_repeats(joined: Neighbours) -> Neighbours:
    graph = joined.graph
    id_E = joined.edge_id_E
    is_invented_E = id_E >= INVENTED_BASE
    # Of the edges between two nodes the graph's own come first, then the invented in their order.
    pair_E = (((graph.target_E.long() << 31) | graph.source_E) << 1) | is_invented_E
    is_kept_E = ~_repeats(id_E, 0) & ~(is_invented_E & _repeats(pair_E, 1))
    kept_K = is_kept_E.nonzero().squeeze(1)
    kept_before_E1 = row_pointers(is_kept_E)
    return Neighbours(
        graph=EdgeGraph(
            indptr_N1=kept_before_E1[graph.indptr_N1],
            source_E=graph.source_E[kept_K],
            num_sources=graph.num_sources,
            edge_id_E=id_E[kept_K],
            is_sampled=True,
        ),
        position_E=joined.position_E[kept_K],
        log_weight_E=None if joined.log_weight_E is None else joined.log_weight_E[kept_K],
    )


def _repeats(key_E: Tensor, ignored_bits: int) -> Tensor:
    """Return which entries are not the first of those whose keys, without the last bits, are equal."""
    sorted_E, order_E = torch.sort(key_E, stable=True)
    sorted_E = sorted_E >> ignored_bits
    is_repeat_E = torch.zeros_like(key_E, dtype=torch.bool)
    is_repeat_E[order_E[1:]] = sorted_E[1:] == sorted_E[:-1]
    return is_repeat_E
