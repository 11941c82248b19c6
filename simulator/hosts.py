"""Which rank of a host takes a row of another host for all of them. Planner and executor both ask here."""

import numpy as np
from numpy.typing import NDArray


def takers(needs_RN: NDArray[np.bool_], owner_N: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return for each node which rank of a host takes its row from the owner; -1 where none needs it.

    The rows of an owner, by ascending global id, go in turn to those who need them, so their shares are about even.

    Args:
        needs_RN: whether each rank of the host needs the row of each node, all false for nodes of the host itself.
        owner_N: rank that owns each node.
    """
    node = np.flatnonzero(needs_RN.any(axis=0))
    node = node[np.argsort(owner_N[node], kind="stable")]
    owner = owner_N[node]
    turn = np.arange(len(node)) - np.searchsorted(owner, owner)
    needs = needs_RN[:, node]
    place_N = np.full(len(owner_N), -1, np.int64)
    # The first rank up to which as many need the row as this turn's number among them.
    place_N[node] = (np.cumsum(needs, axis=0) == turn % needs.sum(axis=0) + 1).argmax(axis=0)
    return place_N


def host_needs(
    needed_by_rank: list[NDArray[np.int64]],
    owner_N: NDArray[np.integer],
    *,
    host: int,
    ranks_per_host: int,
) -> NDArray[np.bool_]:
    """Return which nodes of other hosts each rank of a host needs, [ranks of the host, N].

    Args:
        needed_by_rank: nodes of others that each rank needs.
        owner_N: rank that owns each node.
    """
    members = needed_by_rank[host * ranks_per_host : (host + 1) * ranks_per_host]
    needs_RN = np.zeros((len(members), len(owner_N)), dtype=np.bool_)
    for place, needed in enumerate(members):
        needs_RN[place, needed[owner_N[needed] // ranks_per_host != host]] = True
    return needs_RN
