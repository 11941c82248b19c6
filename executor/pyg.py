"""What PyTorch Geometric does for us: positional encodings; and its graphs to stores."""

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import eigs
from torch_geometric.data import Data
from torch_geometric.transforms import AddLaplacianEigenvectorPE, AddRandomWalkPE
from torch_geometric.utils import coalesce

from executor.compat import making_sparse_csr
from simulator.errors import SpecError
from simulator.readers.graphs import Graph
from simulator.readers.stores import save_store
from simulator.specs.model import ModelSpec


def write_pyg_graph(data: Data, folder: Path) -> None:
    """Write a PyG graph as a new graph store, for `[graph] path = ...`.

    `edge_index` is needed; `x` (dense, or sparse CSR), `y` and the masks are taken where they are there. The arrays are
    checked when the store is read.

    Raises:
        SpecError: if there is no `edge_index`, or the folder exists and is not empty.
    """
    if data.edge_index is None:
        raise SpecError("the PyG graph has no edge_index: give its edges as a [2, E] tensor")
    arrays: dict[str, Any] = {
        "edge_index": data.edge_index.cpu().numpy(),
        "num_nodes": np.array(data.num_nodes),
    }
    if data.x is not None and data.x.layout == torch.sparse_csr:
        arrays["x_indptr"], arrays["x_indices"] = data.x.crow_indices().numpy(), data.x.col_indices().numpy()
        arrays["x_data"], arrays["x_shape"] = data.x.values().float().numpy(), np.array(data.x.shape)
    elif data.x is not None:
        arrays["x"] = data.x.cpu().float().numpy()
    if data.y is not None:
        arrays["y"] = data.y.cpu().numpy()
    for name in ("train_mask", "val_mask", "test_mask"):
        if data.get(name) is not None:
            # PyG keeps several splits as columns, a store as rows.
            arrays[name] = np.ascontiguousarray(data[name].cpu().numpy().T)
    save_store(arrays, folder)


def encode(graph: Graph, model: ModelSpec) -> np.ndarray:
    """Return the encodings, the same on every call and so on every rank."""
    target_E = np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr_N))
    edge_index = torch.from_numpy(np.stack([np.asarray(graph.source_E, dtype=np.int64), target_E]))
    # Each edge once: PyG's random walk sums equal edges above 2,000 nodes and loses them below.
    data = Data(edge_index=coalesce(edge_index), num_nodes=graph.num_nodes)
    columns = []
    if model.laplacian_encodings:
        columns.append(_eigenvectors(data, model.laplacian_encodings))
    if model.random_walk_encodings:
        with making_sparse_csr():
            columns.append(AddRandomWalkPE(model.random_walk_encodings)(data.clone()).random_walk_pe.numpy())
    return np.concatenate(columns, axis=1).astype(np.float32)


def _eigenvectors(data: Data, count: int) -> np.ndarray:
    """Return eigenvectors of the normalised Laplacian, each of unit deviation."""
    if data.num_nodes <= count + 1:
        raise SpecError(f"model.laplacian_encodings must be below num_nodes - 1 = {data.num_nodes - 1}, got {count}")
    # Not a vector of ones: on regular graphs that is an eigenvector, and ARPACK cannot go on from it.
    fixed: dict[str, Any] = {"v0": np.random.default_rng(0).standard_normal(data.num_nodes)}
    if "rng" in inspect.signature(eigs).parameters:  # SciPy 1.17 seeds ARPACK's restarts anew on every call
        fixed["rng"] = np.random.default_rng(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # PyG draws the signs
        transform = AddLaplacianEigenvectorPE(count, **fixed)
        eigenvectors = transform(data.clone()).laplacian_eigenvector_pe.numpy()
    return eigenvectors / np.maximum(eigenvectors.std(0), 1e-12)  # type: ignore[no-any-return]
