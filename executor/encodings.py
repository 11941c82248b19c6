"""Positional encodings, cached by the hash of the graph."""

import hashlib
import logging
import os
import time
from pathlib import Path

import numpy as np

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
    # Here, not above: importing PyG takes 1.9 s, on every rank of every run, and most runs have no encodings.
    from executor.pyg import encode

    started = time.perf_counter()
    encodings = encode(graph, model)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    with partial.open("wb") as file:
        np.save(file, encodings)
    partial.replace(path)
    logger.info("encoded %d nodes in %.1f s", graph.num_nodes, time.perf_counter() - started)
    return encodings
