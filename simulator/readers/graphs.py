"""Graphs in: a graph store to checked arrays, prepared as a `GraphFile` says, and their profile as a `GraphSpec`.

A store (an `.npz` or a folder of `.npy` files) holds, by name:

- edges: `edge_index` [2, E], sources then targets, of any integer type in any order; or, as `write_store` writes them,
  `indptr` [N + 1] and `source` [E] by target;
- `num_nodes`, a number; without it N follows from `indptr`, the features or the labels;
- features: `x` [N, F], or sparse `x_indptr` [N + 1], `x_indices`, `x_data` (a single number when all entries are equal)
  and `x_shape` (N, F); without them the only feature of a node is log(1 + its incoming edges);
- `y` [N], integers from 0, -1 where unlabelled; `class_names` [C] bounds them;
- `train_mask`, `val_mask`, `test_mask`, bool [N] or [splits, N].

Labels and masks may be absent: such a graph can be inspected and partitioned, but not trained on. Multi-edges, self
loops, isolated nodes and graphs without edges are legal. Other arrays only enter the hash.
"""

import dataclasses
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from simulator.readers.features import Features, csr_index_dtype, read_features, read_indptr
from simulator.readers.stores import Numbers, Store, load_store, save_store
from simulator.specs.graph import DEGREE_QUANTILES, GraphFile, GraphSpec

# Nodes are counted in int32, and an edge's key (`_edge_keys`) holds two of them.
MAX_NODES = 2**31 - 1
MAX_CLASSES = 2**31 - 1
MASKS = ("train_mask", "val_mask", "test_mask")
_LOW_HALF = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Graph:
    """A prepared graph in arrays; some may be read-only.

    Attributes:
        indptr_N: int64 [N + 1]; the edges into node n are `indptr_N[n]` to `indptr_N[n + 1]`.
        source_E: int32 [E], sources by target, sorted for each target; multi-edges repeat them.
        features: float32 [N, F], dense or sparse.
        labels_N: int64 [N], -1 where unlabelled.
        train_mask_N, val_mask_N, test_mask_N: bool [N], disjoint, on labelled nodes only.
    """

    indptr_N: NDArray[np.int64]
    source_E: NDArray[np.int32]
    features: Features
    labels_N: NDArray[np.int64]
    train_mask_N: NDArray[np.bool_]
    val_mask_N: NDArray[np.bool_]
    test_mask_N: NDArray[np.bool_]

    @property
    def num_nodes(self) -> int:
        """Nodes, N."""
        return len(self.indptr_N) - 1

    @property
    def num_edges(self) -> int:
        """Edges, E."""
        return len(self.source_E)

    @property
    def in_degree_N(self) -> NDArray[np.int64]:
        """Edges into each node, multi-edges and self loops included; computed anew on each use."""
        return np.diff(self.indptr_N)

    @property
    def target_E(self) -> NDArray[np.int32]:
        """Target of each edge; computed anew on each use."""
        return np.repeat(np.arange(self.num_nodes, dtype=np.int32), self.in_degree_N)


def read_graph(source: GraphFile, *, base: Path) -> tuple[GraphSpec, Graph]:
    """Return the profile and the arrays of a graph store, prepared as `source` says.

    The spec holds the store's path made absolute, so that a plan can be moved to another folder; to move the
    store, correct that path: `open_graph` checks the contents by their hash.

    Args:
        source: the store and its preparation.
        base: folder from which a relative path starts.

    Raises:
        SpecError: if the store cannot be read, or an array breaks a rule.
    """
    path = _absolute(source.path, base=base)
    store = load_store(path)
    graph = _prepared(store, source)
    spec = GraphSpec(
        source=dataclasses.replace(source, path=str(path)),
        sha256=store.sha256(),
        num_nodes=graph.num_nodes,
        num_edges=graph.num_edges,
        num_features=graph.features.shape[1],
        num_feature_entries=graph.features.nnz if isinstance(graph.features, scipy.sparse.csr_array) else 0,
        num_classes=_num_classes(store, graph),
        num_train_nodes=int(graph.train_mask_N.sum()),
        num_val_nodes=int(graph.val_mask_N.sum()),
        num_test_nodes=int(graph.test_mask_N.sum()),
        in_degree_quantiles=tuple(np.quantile(graph.in_degree_N, DEGREE_QUANTILES).tolist()),
    )
    return spec, graph


def open_graph(spec: GraphSpec, *, base: Path) -> Graph:
    """Return the arrays that a spec describes.

    Args:
        spec: from `read_graph`.
        base: folder from which the store's path starts, if it is relative.

    Raises:
        SpecError: if the store cannot be read, or holds other arrays than those that the spec describes.
    """
    store = load_store(_absolute(spec.source.path, base=base))
    sha256 = store.sha256()
    if sha256 != spec.sha256:
        fix = "name the store that the plan was made for, or plan again"
        raise store.error("sha256", f"must be {spec.sha256} as in the plan", sha256, fix)
    return _prepared(store, spec.source)


def write_store(graph: Graph, folder: Path) -> None:
    """Write a graph to a new store; read without preparation it gives equal arrays.

    Raises:
        SpecError: if the folder exists and is not empty.
    """
    arrays: dict[str, NDArray[Any]] = {
        "indptr": graph.indptr_N,
        "source": graph.source_E,
        "y": graph.labels_N,
        "train_mask": graph.train_mask_N,
        "val_mask": graph.val_mask_N,
        "test_mask": graph.test_mask_N,
    }
    if isinstance(graph.features, scipy.sparse.csr_array):
        arrays["x_indptr"], arrays["x_indices"] = graph.features.indptr, graph.features.indices
        arrays["x_data"], arrays["x_shape"] = graph.features.data, np.array(graph.features.shape)
    else:
        arrays["x"] = graph.features
    save_store(arrays, folder)


def sources_into(graph: Graph, nodes: NDArray[np.integer]) -> NDArray[np.int32]:
    """Return the sources of all edges into some nodes, node after node."""
    degrees = graph.indptr_N[nodes + 1] - graph.indptr_N[nodes]
    ends = np.cumsum(degrees)
    # Position of each edge in the graph: where its row starts, plus its place in the row.
    row_offsets = graph.indptr_N[nodes] - (ends - degrees)
    position_E = np.repeat(row_offsets, degrees) + np.arange(degrees.sum())
    return graph.source_E.take(position_E)


def simple_adjacency(graph: Graph) -> scipy.sparse.csr_array:
    """Return a bool matrix [target, source] of the edges, without self loops and multi-edges."""
    target_E = graph.target_E
    kept_E = graph.source_E != target_E
    kept_E[1:] &= (graph.source_E[1:] != graph.source_E[:-1]) | (target_E[1:] != target_E[:-1])
    indptr = np.concatenate(([0], np.cumsum(kept_E)))[graph.indptr_N]
    index_dtype = csr_index_dtype(max(int(indptr[-1]), graph.num_nodes))
    ones = np.ones(indptr[-1], dtype=np.bool_)
    rows = (ones, graph.source_E[kept_E].astype(index_dtype, copy=False), indptr.astype(index_dtype))
    return scipy.sparse.csr_array(rows, shape=(graph.num_nodes, graph.num_nodes))


def undirected_adjacency(graph: Graph) -> scipy.sparse.csr_array:
    """Return a symmetric bool matrix of the pairs of distinct nodes that share an edge."""
    adjacency = simple_adjacency(graph)
    return scipy.sparse.csr_array(adjacency + adjacency.T.tocsr())


def rows_by_target(
    source_E: NDArray[Any],
    target_E: NDArray[Any],
    *,
    num_nodes: int,
    symmetrise: bool = False,
    add_self_loops: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return `indptr_N` [N + 1] and `source_E` of a `Graph` with these edges.

    Args:
        source_E, target_E: ends of the edges in any order, within 0 and `num_nodes - 1`.
        num_nodes: N, at most `MAX_NODES`.
        symmetrise: add the reverse of each edge, then keep one of equal edges.
        add_self_loops: leave each node one self loop.
    """
    key_E = _edge_keys(source_E, target_E)
    if symmetrise:
        key_E = np.concatenate([key_E, _edge_keys(target_E, source_E)])
    if add_self_loops:
        key_E = key_E[key_E >> 32 != key_E & _LOW_HALF]
        key_E = np.concatenate([key_E, np.arange(num_nodes, dtype=np.int64) * (2**32 + 1)])
    key_E.sort()
    if symmetrise:
        key_E = key_E[np.diff(key_E, prepend=-1) != 0]
    indptr_N = np.zeros(num_nodes + 1, dtype=np.int64)
    np.cumsum(np.bincount(key_E >> 32, minlength=num_nodes), out=indptr_N[1:])
    return indptr_N, (key_E & _LOW_HALF).astype(np.int32)


def _edge_keys(source_E: NDArray[Any], target_E: NDArray[Any]) -> NDArray[np.int64]:
    """Return one number for each edge that sorts by target, then source: the target in the upper half."""
    key_E = target_E.astype(np.int64)
    key_E <<= 32
    key_E |= source_E.astype(np.int64, copy=False)
    return key_E


def _absolute(path: str, *, base: Path) -> Path:
    """Return a store's path without a relative part or a leading "~"."""
    return Path(os.path.abspath(base / os.path.expanduser(path)))


def _prepared(store: Store, source: GraphFile) -> Graph:
    """Return the arrays of a store, checked and prepared."""
    num_nodes = _num_nodes(store)
    source_E, target_E = _stored_edges(store, num_nodes)
    indptr_N, source_E = rows_by_target(
        source_E,
        target_E,
        num_nodes=num_nodes,
        symmetrise=source.symmetrise,
        add_self_loops=source.add_self_loops,
    )
    features = read_features(store, in_degree_N=np.diff(indptr_N), norm=source.normalize_features)
    labels_N = _labels(store, num_nodes)
    train_mask_N, val_mask_N, test_mask_N = _masks(store, labels_N, source.split)
    return Graph(
        indptr_N=indptr_N,
        source_E=source_E,
        features=features,
        labels_N=labels_N,
        train_mask_N=train_mask_N,
        val_mask_N=val_mask_N,
        test_mask_N=test_mask_N,
    )


def _num_nodes(store: Store) -> int:
    """Return N, from the first array that tells it."""
    if "num_nodes" in store.arrays:
        num_nodes = int(store.array("num_nodes", Numbers.INTEGERS, ()))
    else:
        lengths = {
            name: len(store.arrays[name]) - (1 if name.endswith("indptr") else 0)
            for name in ("indptr", "x", "x_indptr", "y")
            if name in store.arrays and store.arrays[name].ndim > 0
        }
        if not lengths:
            raise store.error(
                "num_nodes", "must be in a store without x and y", ", ".join(store.arrays) or "nothing", "save it"
            )
        num_nodes = next(iter(lengths.values()))
    if not 1 <= num_nodes <= MAX_NODES:
        raise store.error("num_nodes", f"must be within 1 and {MAX_NODES}", num_nodes, "a graph has at least one node")
    return num_nodes


def _stored_edges(store: Store, num_nodes: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return sources and targets of the edges as they lie in the store."""
    if "edge_index" in store.arrays:
        edge_index = store.array("edge_index", Numbers.INTEGERS, (2, "E"))
        store.require_within("edge_index", edge_index, 0, num_nodes - 1, "correct it or num_nodes")
        return edge_index[0], edge_index[1]
    if "source" not in store.arrays:
        raise store.error(
            "edge_index", "must be in the store", f"only {', '.join(store.arrays) or 'nothing'}", "save it"
        )
    source_E = store.array("source", Numbers.INTEGERS, ("E",))
    store.require_within("source", source_E, 0, num_nodes - 1, "correct it or indptr")
    indptr_N = read_indptr(store, "indptr", num_rows=num_nodes, num_entries=len(source_E))
    return source_E, np.repeat(np.arange(num_nodes, dtype=np.int32), np.diff(indptr_N))


def _labels(store: Store, num_nodes: int) -> NDArray[np.int64]:
    """Return the label of each node, -1 where unlabelled."""
    if "y" not in store.arrays:
        return np.full(num_nodes, -1, dtype=np.int64)
    labels_N = store.array("y", Numbers.INTEGERS, (num_nodes,))
    store.require_within("y", labels_N, -1, _max_classes(store) - 1, "use -1 for nodes without a label")
    return labels_N.astype(np.int64)


def _max_classes(store: Store) -> int:
    """Return the number of class names, or the largest number of classes where there are none."""
    return store.arrays["class_names"].size if "class_names" in store.arrays else MAX_CLASSES


def _num_classes(store: Store, graph: Graph) -> int:
    """Return the number of classes: as named, else up to the largest label; one without labels."""
    if "class_names" in store.arrays:
        return _max_classes(store)
    return max(int(graph.labels_N.max()) + 1, 1)


def _masks(store: Store, labels_N: NDArray[np.int64], split: int) -> list[NDArray[np.bool_]]:
    """Return the train, val and test masks of a split; absent ones hold no node."""
    names = [name for name in MASKS if name in store.arrays]
    if not names and split > 0:
        raise store.error("split", "must be 0 for a store without masks", split, "leave it out")
    masks = {name: _mask(store, name, len(labels_N), split) for name in names}
    for name, mask_N in masks.items():
        if (mask_N & (labels_N < 0)).any():
            node = int(np.argmax(mask_N & (labels_N < 0)))
            raise store.error(
                name, "must hold labelled nodes only", f"node {node}", "label it or take it out of the mask"
            )
    for first, second in itertools.combinations(names, 2):
        both_N = masks[first] & masks[second]
        if both_N.any():
            value = f"node {int(np.argmax(both_N))} in both"
            raise store.error(first, f"must not overlap {second}", value, "take it out of one of them")
    return [masks.get(name, np.zeros(len(labels_N), dtype=np.bool_)) for name in MASKS]


def _mask(store: Store, name: str, num_nodes: int, split: int) -> NDArray[np.bool_]:
    """Return a mask's column for a split."""
    if name in store.arrays and store.arrays[name].ndim == 1:
        masks_SN = store.array(name, Numbers.BOOLEANS, (num_nodes,))[None]
    else:
        masks_SN = store.array(name, Numbers.BOOLEANS, ("splits", num_nodes))
    if split >= len(masks_SN):
        raise store.error("split", f"must be below the {len(masks_SN)} splits of {name}", split, "choose one of them")
    mask_N: NDArray[np.bool_] = masks_SN[split].copy()
    return mask_N
