"""One rank's rows in an exchange through which each row of another host enters a host once.

Two halo exchanges, one behind the other: from the owners, and then, inside each host, from the ranks that took rows for
all of it. Backward the second one sums the gradients of a row inside the host, and the first takes that to the owner.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from executor.exchange import ExchangeLayout
from simulator.hosts import host_needs, takers


@dataclass(frozen=True, kw_only=True)
class HostHalo:
    """One rank's side of both exchanges, in NumPy.

    Attributes:
        halo_M: global ids of the halo in order of arrival: what the first exchange brings, by sender, then in the
            plan's order; then what the second one brings, by sender, and within it as that rank got it.
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
    needed, size = list(needed_by_rank), ranks_per_host
    needs_by_host = [
        host_needs(needed, owner_N, host=host, ranks_per_host=size) for host in range(-(-len(needed) // size))
    ]
    taker_by_host = [takers(needs_RN, owner_N) for needs_RN in needs_by_host]
    needs_RN, taker_N, me = needs_by_host[rank // size], taker_by_host[rank // size], rank % size

    def given(owner: int, receiver: int) -> np.ndarray:
        """Return what an owner sends to a receiver."""
        if owner // size == receiver // size:
            found = needed[receiver][owner_N[needed[receiver]] == owner]
        else:
            found = np.flatnonzero((taker_by_host[receiver // size] == receiver % size) & (owner_N == owner))
        ordered: np.ndarray = found[np.argsort(place_N[found])]
        return ordered

    def passed(passer: int, receiver: int) -> np.ndarray:
        """Return what one rank of the own host passes on to another one, as the first one got it."""
        found = np.flatnonzero(needs_RN[receiver] & (taker_N == passer) & (passer != receiver))
        return found[np.lexsort((place_N[found], owner_N[found]))]

    own = np.flatnonzero(owner_N == rank)
    own = own[np.argsort(place_N[own])]
    sent = [given(rank, other) for other in range(len(needed))]
    got = [given(other, rank) for other in range(len(needed))]
    passed_to = [passed(me, mate) for mate in range(len(needs_RN))]
    passed_from = [passed(mate, me) for mate in range(len(needs_RN))]
    got_M = np.concatenate(got)
    row_N = np.zeros(len(owner_N), np.int64)
    row_N[got_M] = np.arange(len(got_M))
    return HostHalo(
        halo_M=np.concatenate([got_M, *passed_from]),
        send_row_S=np.searchsorted(place_N[own], place_N[np.concatenate(sent)]),
        rows_to=tuple(map(len, sent)),
        rows_from=tuple(map(len, got)),
        passed_row_S=row_N[np.concatenate(passed_to)],
        passed_to=tuple(map(len, passed_to)),
        passed_from=tuple(map(len, passed_from)),
    )


@dataclass(frozen=True, kw_only=True)
class HostLayouts:
    """Both exchanges of a rank.

    Attributes:
        between: of the whole group, which brings no row to a host twice.
        inside: of the host's ranks, which pass rows on.
    """

    between: ExchangeLayout
    inside: ExchangeLayout


def host_layouts(
    halo: HostHalo,
    *,
    first_row: int,
    max_rows: int,
    group: dist.ProcessGroup | None,
    host_group: dist.ProcessGroup | None,
    device: torch.device,
) -> HostLayouts:
    """Return the layouts of both exchanges on a device.

    Args:
        first_row: place of the first row of others in the tensor from which rows are passed on.
        max_rows: own rows of the largest rank.
    """
    return HostLayouts(
        between=ExchangeLayout(
            send_row_S=torch.from_numpy(halo.send_row_S).to(device),
            rows_to=halo.rows_to,
            rows_from=halo.rows_from,
            max_rows=max_rows,
            group=group,
        ),
        inside=ExchangeLayout(
            send_row_S=torch.from_numpy(halo.passed_row_S + first_row).to(device),
            rows_to=halo.passed_to,
            rows_from=halo.passed_from,
            max_rows=max_rows,
            group=host_group,
        ),
    )
