"""Neighbours chosen once from scores, such as a trained model's attention, and kept in a file beside the graph.

A file is an `.npz` of `edge_id` int64 [kept], ascending ids of edges in the whole prepared graph; `fan_out`, a number;
`num_edges` of that graph; and `edges_sha256`, its hash (`edges_sha256`), a text.
"""

import os
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from executor.sampling.candidates import Candidates
from executor.sampling.neighbours import Neighbours, pick, row_pointers
from executor.sampling.ranking import keep_smallest
from simulator.readers.stores import Numbers, Store, arrays_sha256, load_store


@torch.no_grad()
def top_edges(candidates: Candidates, fan_out: int, score_E: Tensor) -> Neighbours:
    """Return the `fan_out` edges of each row of the largest scores, ties by the smaller edge id.

    Args:
        score_E: a number for each edge of the graph that was prepared, in its order.
    """
    assert score_E.shape == (candidates.graph.num_edges,), score_E.shape

    def lowest_first(_: Tensor, position: Tensor) -> Tensor:
        return -pick(score_E, candidates.given_positions(position)).double()

    plan, position_K, _ = keep_smallest(candidates, fan_out, lowest_first)
    return candidates.neighbours(plan.indptr_N1, position_K)


@torch.no_grad()
def edges_of_ids(candidates: Candidates, edge_id_K: Tensor) -> Neighbours:
    """Return the edges whose ids are among some; it depends on no step, so once is enough.

    Args:
        edge_id_K: int64, ascending, of the whole graph; those of other parts' edges are passed over.
    """
    if len(edge_id_K) == 0:
        return candidates.neighbours(torch.zeros_like(candidates.graph.indptr_N1), edge_id_K)
    position_E = torch.arange(candidates.graph.num_edges, device=candidates.graph.device)
    id_E = candidates.edge_ids(position_E)
    place_E = torch.searchsorted(edge_id_K, id_E).clamp(max=len(edge_id_K) - 1)
    is_kept_E = edge_id_K[place_E] == id_E
    indptr_N1 = row_pointers(is_kept_E)[candidates.graph.indptr_N1]
    return candidates.neighbours(indptr_N1, position_E[is_kept_E])


def edges_sha256(indptr_N: NDArray[np.int64], source_E: NDArray[np.int32]) -> str:
    """Return the hash of the edges of a prepared graph, whose order gives them their ids."""
    return arrays_sha256({"indptr_N": indptr_N, "source_E": source_E})


def save_edge_ids(path: Path, edge_id_K: Tensor, *, fan_out: int, num_edges: int, edges_sha256: str) -> None:
    """Write ids of edges to an `.npz` file that appears, or replaces an older one, whole or not at all."""
    staging = path.with_name(f".{path.stem}.{uuid.uuid4().hex}.npz")
    try:
        np.savez(
            staging,
            edge_id=np.sort(edge_id_K.cpu().numpy()),
            fan_out=np.int64(fan_out),
            num_edges=np.int64(num_edges),
            edges_sha256=np.array(edges_sha256),
        )
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)


def read_edge_ids(path: Path, *, fan_out: int, num_edges: int, edges_sha256: str) -> Tensor:
    """Return the ids of edges that `save_edge_ids` wrote, int64 ascending.

    Args:
        fan_out, num_edges, edges_sha256: what the file must have been written for.

    Raises:
        SpecError: if the file is missing or damaged, or was written for another graph or fan-out.
    """
    store = load_store(path)
    fix = "choose neighbours again for this graph"
    found_sha256 = _text(store, "edges_sha256")
    if found_sha256 != edges_sha256:
        raise store.error("edges_sha256", f"must be {edges_sha256} as the graph's", found_sha256, fix)
    for name, wanted in (("num_edges", num_edges), ("fan_out", fan_out)):
        found = int(store.array(name, Numbers.INTEGERS, ()))
        if found != wanted:
            raise store.error(name, f"must be {wanted}", found, fix)
    edge_id_K = store.array("edge_id", Numbers.INTEGERS, ("kept",)).astype(np.int64)
    store.require_within("edge_id", edge_id_K, 0, num_edges - 1, fix)
    if (np.diff(edge_id_K) <= 0).any():
        place = int(np.argmax(np.diff(edge_id_K) <= 0)) + 1
        raise store.error(f"edge_id[{place}]", "must exceed the one before it", edge_id_K[place], fix)
    return torch.from_numpy(edge_id_K)


def _text(store: Store, name: str) -> str:
    """Return a text of a store."""
    array: NDArray[Any] | None = store.arrays.get(name)
    if array is None or array.dtype.kind != "U" or array.shape != ():
        raise store.error(name, "must be a text in the file", "none", "choose neighbours again for this graph")
    return str(array)
