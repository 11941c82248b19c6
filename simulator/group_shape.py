"""GroupShape: how the ranks of a collective lie on hosts, which decides its algorithm and its time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from simulator.specs.checks import require, require_positive
from simulator.specs.cluster import ClusterSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """Ranks of a group, counted; which hosts they are on makes no difference.

    Attributes:
        num_ranks: of the group.
        num_hosts: on which they lie.
        ranks_per_host: the most on one host.
        cards_per_host: network cards that the ranks of a host may use, the fewest on one; 0 inside one host. Hosts may
            have more or fewer cards than devices, so it counts a device's share of them.
    """

    num_ranks: int
    num_hosts: int
    ranks_per_host: int
    cards_per_host: float

    def __post_init__(self) -> None:
        require_positive(num_ranks=self.num_ranks, num_hosts=self.num_hosts, ranks_per_host=self.ranks_per_host)
        require(
            self.num_hosts <= self.num_ranks,
            "num_hosts",
            f"must not exceed num_ranks, {self.num_ranks}",
            self.num_hosts,
        )

    @property
    def spans_hosts(self) -> bool:
        """Whether its messages cross the network."""
        return self.num_hosts > 1

    def __str__(self) -> str:
        hosts = f" on {self.num_hosts} hosts" if self.spans_hosts else ""
        return f"{self.num_ranks} ranks{hosts}"


def group_shape(group: Sequence[int], cluster: ClusterSpec) -> GroupShape:
    """Return the shape of a group of ranks; each rank brings its own network card."""
    members = Counter(cluster.host_of(rank) for rank in group)
    return GroupShape(
        num_ranks=len(group),
        num_hosts=len(members),
        ranks_per_host=max(members.values()),
        cards_per_host=min(members.values()) if len(members) > 1 else 0,
    )


def even_shape(num_ranks: int, num_hosts: int, *, cards_per_host: int | None = None) -> GroupShape:
    """Return the shape of ranks that lie evenly on hosts, each with a card of its own unless told otherwise."""
    ranks_per_host = -(-num_ranks // num_hosts)
    cards = ranks_per_host if cards_per_host is None else cards_per_host
    return GroupShape(
        num_ranks=num_ranks,
        num_hosts=num_hosts,
        ranks_per_host=ranks_per_host,
        cards_per_host=cards if num_hosts > 1 else 0,
    )
