"""Positional encodings by PyG's transforms, cached by the hash of the graph; PyG graphs to stores."""

import hashlib
import inspect
import logging
import os
import time
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
from simulator.specs.document import content_sha256
from simulator.specs.graph import GraphSpec
from simulator.specs.model import ModelSpec

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Return where generated graphs and encodings are kept: `$GRAPHPILOT_CACHE`, else in the user's cache."""
    return Path(os.environ.get("GRAPHPILOT_CACHE", Path.home() / ".cache" / "graphpilot"))


def positional_encodings(graph: Graph, spec: GraphSpec, model: ModelSpec, cache: Path) -> np.ndarray | None:
    """Return Laplacian, then random-walk encodings of all nodes, fp32 [N, columns]; None when none are asked for.

    They depend on the prepared graph alone, so a file in `cache` serves every run on it. Eigenvectors are scaled to
    unit deviation, since those of a large graph have entries near zero.
    """
    if model.num_encodings == 0:
        return None
    kinds = f"{model.laplacian_encodings}-{model.random_walk_encodings}"
    key = hashlib.sha256(f"{spec.sha256}/{content_sha256(spec.source)}/{kinds}".encode()).hexdigest()
    path = cache / "encodings" / f"{key}.npy"
    if path.exists():
        return np.asarray(np.load(path, allow_pickle=False))
    started = time.perf_counter()
    encodings = _encode(graph, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    with partial.open("wb") as file:
        np.save(file, encodings)
    partial.replace(path)
    logger.info("encoded %d nodes in %.1f s", graph.num_nodes, time.perf_counter() - started)
    return encodings


def _encode(graph: Graph, model: ModelSpec) -> np.ndarray:
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
