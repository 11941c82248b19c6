"""PartShares: what each rank owns where a part of the graph is served by several ranks."""

from dataclasses import dataclass
from functools import cached_property

from simulator.specs.checks import require, require_length, require_positive


@dataclass(frozen=True, kw_only=True)
class PartShares:
    """The ranks of a full graph, of which some serve a part together.

    They follow one another by part. Those of a part own about equal shares of its rows, and attend to all of its edges,
    each with its own heads.

    Attributes:
        part_ranks: ranks that serve each part.
        num_nodes, num_train_nodes, num_feature_entries: of each rank's rows, as in `PartSpec`.
        rows_to_parts: of each rank, its rows that each part attends to; 0 for the part that it serves.
    """

    part_ranks: tuple[int, ...]
    num_nodes: tuple[int, ...]
    num_train_nodes: tuple[int, ...]
    num_feature_entries: tuple[int, ...]
    rows_to_parts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        require_positive(num_parts=len(self.part_ranks))
        for count in self.part_ranks:
            require(count >= 1, "part_ranks", "must hold numbers >= 1", count)
        require_length(
            self.num_ranks,
            num_nodes=self.num_nodes,
            num_train_nodes=self.num_train_nodes,
            num_feature_entries=self.num_feature_entries,
            rows_to_parts=self.rows_to_parts,
        )
        for rank, rows in enumerate(self.rows_to_parts):
            require_length(len(self.part_ranks), rows_to_parts=rows)
            own = rows[self.part_by_rank[rank]]
            require(own == 0, "rows_to_parts", f"must be 0 from rank {rank} to the part that it serves", own)

    @property
    def num_ranks(self) -> int:
        """Ranks of all parts."""
        return sum(self.part_ranks)

    @cached_property
    def part_by_rank(self) -> tuple[int, ...]:
        """Part that each rank serves."""
        return tuple(part for part, count in enumerate(self.part_ranks) for _ in range(count))

    def ranks_of(self, part: int) -> tuple[int, ...]:
        """Return the ranks that serve a part, in order."""
        first = sum(self.part_ranks[:part])
        return tuple(range(first, first + self.part_ranks[part]))

    def rows_between(self, source: int, target: int) -> int:
        """Return the rows that one rank sends to another one, each with the heads of the latter.

        Those of the same part get all rows, others what their part attends to.
        """
        part = self.part_by_rank[target]
        if self.part_by_rank[source] == part:
            return 0 if source == target else self.num_nodes[source]
        return self.rows_to_parts[source][part]
