"""HostRows: how many rows travel when each row of another host enters a host once."""

from dataclasses import dataclass

from simulator.specs.checks import require, require_length, require_positive


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRows:
    """Rows between the ranks of a full graph, whose part r belongs to rank r.

    A row goes from its owner to every rank of the owner's host that needs it, and to one rank of each other host that
    needs it; that rank needs the row itself and passes it on to the others of its host.

    Attributes:
        ranks_per_host: rank r sits on host `r // ranks_per_host`; the last host may have fewer.
        rows_from: of each part, rows that its rank gets from each part's owner.
        passed_rows_from: of each part, rows of other hosts that its rank then gets from each part's rank of its host.
    """

    ranks_per_host: int
    rows_from: tuple[tuple[int, ...], ...]
    passed_rows_from: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        require_positive(ranks_per_host=self.ranks_per_host)
        require_length(self.num_ranks, passed_rows_from=self.passed_rows_from)
        for rank in range(self.num_ranks):
            rows, passed = self.rows_from[rank], self.passed_rows_from[rank]
            require_length(self.num_ranks, rows_from=rows, passed_rows_from=passed)
            members = self.ranks_of_host(rank)
            strangers = sum(count for other, count in enumerate(passed) if other not in members or other == rank)
            require(strangers == 0, "passed_rows_from", f"must be 0 from all but the other ranks {members}", passed)

    @property
    def num_ranks(self) -> int:
        """Ranks of all hosts."""
        return len(self.rows_from)

    @property
    def num_rows_between_hosts(self) -> int:
        """Distinct rows that hosts need of other hosts, summed over hosts."""
        return sum(
            count
            for rank, rows in enumerate(self.rows_from)
            for other, count in enumerate(rows)
            if other not in self.ranks_of_host(rank)
        )

    def ranks_of_host(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share a host with `rank`, which is one of them."""
        first = rank - rank % self.ranks_per_host
        return tuple(range(first, min(first + self.ranks_per_host, self.num_ranks)))
