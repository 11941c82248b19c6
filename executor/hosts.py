"""One rank's rows in an exchange through which each row of another host enters a host once.

Two halo exchanges, one behind the other: from the owners, and then, inside each host, from the ranks that took rows for
all of it. Backward the second one sums the gradients of a row inside the host, and the first takes that to the owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.hosts import host_needs, takers


@dataclass(frozen=True, kw_only=True)
class HostHalo:
    """One rank's side of both exchanges, in NumPy.

    Attributes:
        halo_M: global ids of the halo in order of arrival: what the first exchange brings, by sender, then in the
            plan's order; then what the second one brings, by sender, and within it as that one got it.
        send_row_S: own rows to send in the first exchange, by receiver, then ascending.
        rows_to, rows_from: rows to and from each rank in the first exchange.
        passed_row_S: positions of the rows to pass on among those that the first exchange brings, by receiver, then
            ascending.
        passed_to, passed_from: rows to and from each rank of the host in the second exchange.
    """

    halo_M: np.ndarray
    send_row_S: np.ndarray
    rows_to: tuple[int, ...]
    rows_from: tuple[int, ...]
    passed_row_S: np.ndarray
    passed_to: tuple[int, ...]
    passed_from: tuple[int, ...]


def host_halo(
    needed_by_rank: Sequence[np.ndarray],
    owner_N: np.ndarray,
    place_N: np.ndarray,
    *,
    rank: int,
    ranks_per_host: int,
) -> HostHalo:
    """Return what one rank of a full graph sends and receives.

    Args:
        needed_by_rank: nodes of others that each rank needs.
        owner_N: rank that owns each node.
        place_N: place of each node in the plan's order.
    """
    needed = list(needed_by_rank)
    num_ranks, host = len(needed), rank // ranks_per_host
    first = host * ranks_per_host

    def given(owner: int, receiver: int, taker_N: np.ndarray) -> np.ndarray:
        """Return what an owner sends to a receiver, whose host has these takers, in the plan's order."""
        if owner // ranks_per_host == receiver // ranks_per_host:
            found = needed[receiver][owner_N[needed[receiver]] == owner]
        else:
            found = np.flatnonzero((taker_N == receiver % ranks_per_host) & (owner_N == owner))
        ordered: np.ndarray = found[np.argsort(place_N[found])]
        return ordered

    takers_of_host = []
    for other in range(-(-num_ranks // ranks_per_host)):
        needs_RN = host_needs(needed, owner_N, host=other, ranks_per_host=ranks_per_host)
        takers_of_host.append(takers(needs_RN, owner_N))
        if other == host:
            own_needs_RN = needs_RN
    taker_N = takers_of_host[host]
    own = np.flatnonzero(owner_N == rank)
    own = own[np.argsort(place_N[own])]
    sent = [given(rank, other, takers_of_host[other // ranks_per_host]) for other in range(num_ranks)]
    got = [given(other, rank, taker_N) for other in range(num_ranks)]
    got_M = np.concatenate(got)
    members = range(len(own_needs_RN))
    passed = [
        np.flatnonzero(own_needs_RN[place, got_M]) if first + place != rank else np.zeros(0, np.int64)
        for place in members
    ]
    passed_on = [_passed(own_needs_RN[rank - first] & (taker_N == place), owner_N, place_N) for place in members]
    passed_on[rank - first] = np.zeros(0, np.int64)  # what this rank took is there
    return HostHalo(
        halo_M=np.concatenate([got_M, *passed_on]),
        send_row_S=np.searchsorted(place_N[own], place_N[np.concatenate(sent)]),
        rows_to=tuple(len(rows) for rows in sent),
        rows_from=tuple(len(rows) for rows in got),
        passed_row_S=np.concatenate(passed),
        passed_to=tuple(len(rows) for rows in passed),
        passed_from=tuple(len(rows) for rows in passed_on),
    )


def _passed(is_passed_N: np.ndarray, owner_N: np.ndarray, place_N: np.ndarray) -> np.ndarray:
    """Return the nodes that one rank passes on to another one as the first one got them."""
    nodes = np.flatnonzero(is_passed_N)
    return nodes[np.lexsort((place_N[nodes], owner_N[nodes]))]
