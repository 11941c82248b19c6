"""Graphs made up: R-MAT and community graphs, written as graph stores and kept for the next time.

Both are undirected: a store holds each edge in both directions, once, and no self loops. Nodes are numbered at random,
so that their numbers say nothing. A random 60 % of nodes are for training, 20 % for validation and 20 % for tests.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from simulator.errors import SpecError
from simulator.readers.graphs import MAX_NODES, Graph, rows_by_target, simple_adjacency, write_store
from simulator.specs.graph import CommunityGraph, GraphFile, RmatGraph

TRAIN_RATIO, VAL_RATIO = 0.6, 0.2
# Enters the name of a store: to be raised when the same fields give other arrays.
_VERSION = 1
# Edges drawn at a time, which bounds the memory for random numbers; another value gives other graphs.
_CHUNK_EDGES = 1 << 20

# Sources and targets.
Edges = tuple[NDArray[np.int32], NDArray[np.int32]]


def materialise(source: RmatGraph | CommunityGraph, cache: Path) -> GraphFile:
    """Return how to read a generated graph, which is written to a store unless it is there already.

    The same fields give the same bytes. The spec of the graph counts the classes up to the largest label drawn: where
    nodes are few that may be less than `source.num_classes`.

    Args:
        source: the graph to make.
        cache: folder of generated stores, each named by a hash of its fields.

    Raises:
        SpecError: if the graph has more nodes than an index can hold.
    """
    if source.num_nodes > MAX_NODES:
        raise SpecError(f"num_nodes must not exceed {MAX_NODES}, got {source.num_nodes}")
    folder = Path(cache).absolute() / _store_name(source)
    if not folder.is_dir():
        graph = _rmat(source) if isinstance(source, RmatGraph) else _community(source)
        try:
            write_store(graph, folder)
        except SpecError:
            # Another process may have been faster, and wrote the same bytes.
            if not folder.is_dir():
                raise
    return GraphFile(path=str(folder), add_self_loops=source.add_self_loops)


def _store_name(source: RmatGraph | CommunityGraph) -> str:
    """Return a name that depends on every field that shapes the arrays."""
    fields = dataclasses.asdict(source)
    del fields["add_self_loops"]
    kind = "rmat" if isinstance(source, RmatGraph) else "community"
    text = json.dumps([_VERSION, kind, fields], sort_keys=True)
    return f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _rmat(source: RmatGraph) -> Graph:
    """Return a recursive-matrix graph with labels to be learned from a node and its neighbours.

    Features are standard normal. The label is the largest of `num_classes` random projections of the mean of the
    features of the node and its neighbours: one layer of attention that weighs neighbours alike tells it exactly, a
    network that sees only the node itself does not.
    """
    edge_rng, feature_rng, mask_rng = np.random.default_rng(source.seed).spawn(3)
    num_nodes = source.num_nodes
    name_N = edge_rng.permutation(num_nodes).astype(np.int32)
    chunks = [_rmat_edges(source, count, name_N, edge_rng) for count in _chunk_sizes(source.num_edges)]
    x_NF = feature_rng.standard_normal((num_nodes, source.num_features), dtype=np.float32)
    graph = _undirected_graph(chunks, x_NF, np.zeros(num_nodes, dtype=np.int64), mask_rng)
    sum_NF = x_NF + simple_adjacency(graph).astype(np.float32) @ x_NF
    projection_FC = feature_rng.standard_normal((source.num_features, source.num_classes), dtype=np.float32)
    # The mean has its largest projection where the sum has it.
    return dataclasses.replace(graph, labels_N=np.argmax(sum_NF @ projection_FC, axis=1).astype(np.int64))


def _rmat_edges(source: RmatGraph, count: int, name_N: NDArray[np.int32], rng: np.random.Generator) -> Edges:
    """Draw edges bit by bit: each bit of source and target follows from the quadrant that a random number falls in."""
    source_E, target_E = np.zeros(count, dtype=np.int64), np.zeros(count, dtype=np.int64)
    upper = source.a + source.b
    for _ in range((source.num_nodes - 1).bit_length()):
        draw_E = rng.random(count, dtype=np.float32)
        lower_E = draw_E >= upper
        right_E = ((draw_E >= source.a) & ~lower_E) | (draw_E >= upper + source.c)
        source_E = (source_E << 1) | lower_E
        target_E = (target_E << 1) | right_E
    return name_N[source_E % source.num_nodes], name_N[target_E % source.num_nodes]


def _community(source: CommunityGraph) -> Graph:
    """Return a degree-corrected block graph; nodes are dealt to blocks of equal size.

    A node's expected degree follows a power law and is at most `num_nodes` times the least.
    """
    edge_rng, feature_rng, mask_rng = np.random.default_rng(source.seed).spawn(3)
    num_nodes, num_blocks = source.num_nodes, source.num_classes
    # The logarithm of a Pareto variable is exponential.
    log_weight_N = edge_rng.standard_exponential(num_nodes) / (source.degree_exponent - 1)
    weight_N = np.exp(np.minimum(log_weight_N, np.log(num_nodes)))
    block_N = np.arange(num_nodes, dtype=np.int64) * num_blocks // num_nodes
    name_N = edge_rng.permutation(num_nodes).astype(np.int32)
    chunks = []
    for count in _chunk_sizes(source.num_edges):
        source_E, target_E = _community_edges(source, count, weight_N, block_N, edge_rng)
        chunks.append((name_N[source_E], name_N[target_E]))
    labels_N = np.empty(num_nodes, dtype=np.int64)
    labels_N[name_N] = block_N
    centre_CF = feature_rng.standard_normal((num_blocks, source.num_features), dtype=np.float32)
    x_NF = feature_rng.standard_normal((num_nodes, source.num_features), dtype=np.float32)
    x_NF *= np.float32(source.feature_noise)
    x_NF += centre_CF[labels_N]
    return _undirected_graph(chunks, x_NF, labels_N, mask_rng)


def _community_edges(
    source: CommunityGraph,
    count: int,
    weight_N: NDArray[np.float64],
    block_N: NDArray[np.int64],
    rng: np.random.Generator,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draw one end of each edge by weight, then the other by weight inside or outside of its block.

    Nodes lie side by side on a line, each as long as its weight; `block_N` is sorted, so a block is an interval.
    """
    line_N = np.cumsum(weight_N)
    block_edges = np.searchsorted(block_N, np.arange(source.num_classes + 1))
    line_edges = np.concatenate(([0.0], line_N))[block_edges]
    source_E = _nodes_at(rng.random(count) * line_N[-1], line_N)
    start_E, end_E = line_edges[block_N[source_E]], line_edges[block_N[source_E] + 1]
    length_E = end_E - start_E
    within_E = (rng.random(count) < source.within_ratio) | (length_E >= line_N[-1])
    draw_E = rng.random(count)
    outside_E = draw_E * (line_N[-1] - length_E)
    outside_E += np.where(outside_E >= start_E, length_E, 0)
    target_E = _nodes_at(np.where(within_E, start_E + draw_E * length_E, outside_E), line_N)
    return source_E, target_E


def _nodes_at(place_E: NDArray[np.float64], line_N: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the node that covers each place of a line, where node n ends at `line_N[n]`."""
    return np.minimum(np.searchsorted(line_N, place_E, side="right"), len(line_N) - 1)


def _undirected_graph(
    chunks: list[Edges], x_NF: NDArray[np.float32], labels_N: NDArray[np.int64], rng: np.random.Generator
) -> Graph:
    """Return a graph with both directions of each edge once, without self loops, with random masks."""
    num_nodes = len(labels_N)
    ends = np.concatenate([np.stack(chunk)[:, chunk[0] != chunk[1]] for chunk in chunks], axis=1)
    indptr_N, source_E = rows_by_target(ends[0], ends[1], num_nodes=num_nodes, symmetrise=True)
    shuffled_N = rng.permutation(num_nodes)
    masks = np.zeros((3, num_nodes), dtype=np.bool_)
    borders = [round(num_nodes * TRAIN_RATIO), round(num_nodes * (TRAIN_RATIO + VAL_RATIO))]
    for mask_N, nodes in zip(masks, np.split(shuffled_N, borders), strict=True):
        mask_N[nodes] = True
    return Graph(
        indptr_N=indptr_N,
        source_E=source_E,
        features=x_NF,
        labels_N=labels_N,
        train_mask_N=masks[0],
        val_mask_N=masks[1],
        test_mask_N=masks[2],
    )


def _chunk_sizes(num_edges: int) -> list[int]:
    """Return the edges to draw at a time; at least one chunk."""
    return [min(_CHUNK_EDGES, num_edges - start) for start in range(0, max(num_edges, 1), _CHUNK_EDGES)]
