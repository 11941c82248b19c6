"""Counts a cut of a graph anew and says where a plan counts otherwise."""

import numpy as np
import scipy.sparse
from numpy.typing import NDArray

from simulator.readers.graphs import Graph
from simulator.specs.plan import PartitionSpec

# A number for each pair of parts is held: 128 MiB.
MAX_PARTS = 4096


def cut_mismatches(spec: PartitionSpec, part_N: NDArray[np.int32], graph: Graph | None = None) -> list[str]:
    """Say which counts of a plan's parts are not those of its node-to-part array, a sentence each.

    Args:
        part_N: part of each node.
        graph: the plan's; None compares nodes alone, as more than `MAX_PARTS` parts do for edges and halo rows.
    """
    num_parts, parts = spec.num_parts, spec.parts
    found = _differences("own", "nodes", [part.num_nodes for part in parts], _counts(part_N, num_parts))
    if graph is None:
        return found
    trained = part_N[graph.train_mask_N]
    found += _differences(
        "own", "nodes to train on", [part.num_train_nodes for part in parts], _counts(trained, num_parts)
    )
    if isinstance(graph.features, scipy.sparse.csr_array):
        entries = np.bincount(part_N, weights=np.diff(graph.features.indptr), minlength=num_parts).astype(np.int64)
        found += _differences("hold", "feature entries", [part.num_feature_entries for part in parts], entries)
    if num_parts > MAX_PARTS:
        return found
    target_part_E, source_part_E = part_N[graph.target_E].astype(np.int64), part_N[graph.source_E].astype(np.int64)
    edges = _pairs(target_part_E, source_part_E, num_parts)
    found += _differences("have", "edges", [part.edges_from for part in parts], edges)
    is_cut_E = target_part_E != source_part_E
    needed = np.unique(target_part_E[is_cut_E] * graph.num_nodes + graph.source_E[is_cut_E])
    target_part, source = np.divmod(needed, max(graph.num_nodes, 1))
    halo = _pairs(target_part, part_N[source].astype(np.int64), num_parts)
    return found + _differences("need", "halo rows", [part.halo_rows_from for part in parts], halo)


def _counts(part_N: NDArray[np.int32], num_parts: int) -> NDArray[np.int64]:
    return np.bincount(part_N, minlength=num_parts)


def _pairs(target_part: NDArray[np.int64], source_part: NDArray[np.int64], num_parts: int) -> NDArray[np.int64]:
    """Return how often each pair of parts comes, [target's, source's]."""
    return np.bincount(target_part * num_parts + source_part, minlength=num_parts**2).reshape(num_parts, num_parts)


def _differences(verb: str, what: str, planned: object, counted: NDArray[np.int64]) -> list[str]:
    """Return the first part of which the plan counts otherwise, in a sentence, and how many others there are."""
    expected = np.array(planned)
    wrong = np.argwhere(expected != counted)
    if not len(wrong):
        return []
    place = tuple(wrong[0].tolist())
    origin = f" from part {place[1]}" if len(place) > 1 else ""
    more = f" and {len(wrong) - 1} other counts of them differ" if len(wrong) > 1 else ""
    return [f"part {place[0]} must {verb} {expected[place]} {what}{origin} as in the plan, got {counted[place]}{more}"]
