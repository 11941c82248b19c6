"""Edges that the graph does not have: random regular expanders and virtual nodes."""

import torch
from torch import Tensor

from executor.attention.graph import EdgeGraph
from executor.keyed import Stream, numbered_bits, stream_bits
from executor.sampling.candidates import Candidates
from executor.sampling.join import fan_out_graph, join_neighbours
from executor.sampling.neighbours import Invented, Neighbours, invented_ids, invented_neighbours
from simulator.errors import PlanError


def expander_sources(num_nodes: int, degree: int, *, seed: int, device: torch.device) -> Tensor:
    """Return `degree` neighbours of each node, int64 [N, degree]: those beside it on each of degree / 2 random cycles.

    Each cycle goes through all nodes, in the order of keyed hashes; so each node has `degree` neighbours and is one of
    `degree` nodes, all nodes are connected, and none is its own neighbour. Two cycles may hold the same pair: it is
    then in two columns of both nodes (of about degree^2 / 2 pairs in all, whatever the number of nodes), and stays
    there, which keeps the graph regular; `join_neighbours` drops such repeats when asked to. Of two nodes each has the
    other in all columns; a lone node has no neighbours, [1, 0].

    Args:
        degree: even.
        seed: with it the graph is the same in every step, on every device and number of ranks.

    Source: Friedman, "A proof of Alon's second eigenvalue conjecture", Memoirs of the AMS 910, 2008, for the second
        eigenvalue 2 sqrt(degree - 1) + o(1) of such graphs (his model H); Shirzad et al., "Exphormer", ICML 2023.
    """
    assert degree > 0, degree
    assert degree % 2 == 0, degree
    node_N = torch.arange(num_nodes, device=device)
    if num_nodes < 2:
        return node_N.new_zeros(num_nodes, 0)
    key = torch.tensor([seed, 0], device=device)
    bits_N = stream_bits(node_N, key, Stream.EXPANDER)
    source_ND = torch.empty(num_nodes, degree, dtype=torch.int64, device=device)
    for cycle in range(degree // 2):
        hash_N = numbered_bits(bits_N, torch.tensor(cycle, device=device)).long()
        order_N = torch.sort((hash_N << 31) | node_N).indices
        source_ND[order_N, 2 * cycle] = order_N.roll(1)
        source_ND[order_N, 2 * cycle + 1] = order_N.roll(-1)
    return source_ND


def expander_neighbours(candidates: Candidates, degree: int, *, num_nodes: int, seed: int) -> Neighbours:
    """Return the targets' edges of the expander over the whole graph, invented, the same in every step.

    Args:
        degree: even.
        num_nodes: of the whole graph.

    Raises:
        PlanError: if a neighbour is not among the sources, as in a part whose halo was not made for the expander.
    """
    device = candidates.graph.device
    row_of_node = torch.full((num_nodes,), -1, dtype=torch.int64, device=device)
    row_of_node[candidates.source_id_M] = torch.arange(candidates.graph.num_sources, device=device)
    source_ND = expander_sources(num_nodes, degree, seed=seed, device=device)[candidates.target_id_N]
    row_ND = row_of_node[source_ND]
    num_missing = int((row_ND < 0).sum())
    if num_missing:
        raise PlanError(
            f"{num_missing} of {row_ND.numel()} sources of the expander must be rows of this part; add its edges "
            f"(expander_sources) to the graph before it is cut"
        )
    column_D = torch.arange(row_ND.shape[1], device=device)
    id_ND = invented_ids(Invented.EXPANDER, candidates.target_id_N.unsqueeze(1), column_D, degree)
    graph = fan_out_graph(row_ND, num_sources=candidates.graph.num_sources, edge_id_ND=id_ND)
    return invented_neighbours(graph)


def with_virtual_nodes(neighbours: Neighbours, candidates: Candidates, num_virtual: int) -> Neighbours:
    """Return the neighbours over `num_virtual` rows more, which attend to all targets and which all targets attend to.

    The rows of the virtual nodes come last, both among the targets and among the sources: `append_rows` puts what is
    known of them behind the queries, and behind the keys and values. They do not attend to each other. In a part a
    virtual node attends to the part's own nodes, so its results are merged over the parts (`merge_attention`).

    Args:
        neighbours: the other edges of the candidates' targets.
        num_virtual: extra nodes, V; each edge set grows by 2 x N x V edges.
    """
    device = candidates.graph.device
    num_targets, num_sources = candidates.graph.num_targets, candidates.graph.num_sources
    indptr_N1 = neighbours.graph.indptr_N1
    padded = EdgeGraph(
        indptr_N1=torch.cat([indptr_N1, indptr_N1[-1:].expand(num_virtual)]),
        source_E=neighbours.graph.source_E,
        num_sources=num_sources + num_virtual,
        edge_id_E=neighbours.graph.edge_id_E,
        is_sampled=True,
    )
    assert bool((candidates.source_row_N >= 0).all()), "virtual nodes attend to targets, which must be sources too"
    own = Neighbours(graph=padded, position_E=neighbours.position_E, log_weight_E=neighbours.log_weight_E)
    number_V = torch.arange(num_virtual, device=device)
    id_NV = invented_ids(Invented.VIRTUAL, candidates.target_id_N.unsqueeze(1), number_V, 2 * num_virtual)
    to_virtual_NV = (num_sources + number_V).expand(num_targets, -1)
    from_virtual_VN = candidates.source_row_N.expand(num_virtual, -1)
    starts = torch.arange(num_targets + 1, device=device) * num_virtual
    ends = num_targets * num_virtual + (number_V + 1) * num_targets
    virtual = EdgeGraph(
        indptr_N1=torch.cat([starts, ends]),
        source_E=torch.cat([to_virtual_NV.flatten(), from_virtual_VN.flatten()]).to(torch.int32),
        num_sources=num_sources + num_virtual,
        edge_id_E=torch.cat([id_NV.flatten(), (id_NV.T + num_virtual).flatten()]),
        is_sampled=True,
    )
    return join_neighbours([own, invented_neighbours(virtual)])


def append_rows(rows: Tensor, virtual: Tensor) -> Tensor:
    """Return rows of nodes (queries, keys, values or features) with those of the virtual nodes behind them.

    Args:
        rows: [N, ...] of targets or [M, ...] of sources.
        virtual: [V, ...], such as learned parameters, or what a layer returned in its last V rows.
    """
    return torch.cat([rows, virtual.to(rows.dtype)])
