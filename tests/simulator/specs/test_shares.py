import dataclasses
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import SpecError
from simulator.specs.shares import PartShares
from tests.made import equal_parts
from tests.strategies import partitions

# Part 0 has 5 rows on one rank, part 1 has 7 rows on two. Part 1 attends to 3 rows of part 0, part 0 to 4 of part 1.
SHARES = PartShares(
    part_ranks=(1, 2),
    num_nodes=(5, 4, 3),
    num_train_nodes=(5, 1, 0),
    num_feature_entries=(0, 0, 0),
    rows_to_parts=((0, 3), (1, 0), (3, 0)),
)


def test_ranks_follow_one_another_by_part():
    assert SHARES.num_ranks == 3
    assert SHARES.part_by_rank == (0, 1, 1)
    assert [SHARES.ranks_of(part) for part in (0, 1)] == [(0,), (1, 2)]


def test_a_row_goes_to_all_ranks_of_a_part_that_attends_to_it_and_to_all_others_of_its_own():
    assert [[SHARES.rows_between(source, target) for target in range(3)] for source in range(3)] == [
        [0, 3, 3],
        [1, 0, 4],
        [3, 3, 0],
    ]


@given(cut=partitions(with_shares=True))
def test_what_ranks_send_to_a_part_is_its_halo(cut):
    shares = cut.shares
    for index, part in enumerate(cut.parts):
        target, mates = shares.ranks_of(index)[0], shares.ranks_of(index)
        sent = sum(shares.rows_between(rank, target) for rank in range(shares.num_ranks) if rank not in mates)
        assert sent == part.num_halo_rows
        assert sum(shares.rows_between(rank, target) for rank in mates) == part.num_nodes - shares.num_nodes[target]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"part_ranks": (0, 3)}, "part_ranks must hold numbers >= 1, got 0"),
        ({"num_nodes": (5, 7)}, "num_nodes must have 3 entries, got 2"),
        ({"rows_to_parts": ((0, 3), (1, 0), (3, 0, 0))}, "rows_to_parts must have 2 entries, got 3"),
        (
            {"rows_to_parts": ((0, 3), (1, 0), (3, 2))},
            "rows_to_parts must be 0 from rank 2 to the part that it serves, got 2",
        ),
    ],
)
def test_counts_that_do_not_fit_each_other_are_refused(fields, sentence):
    with pytest.raises(SpecError, match=re.escape(sentence)):
        dataclasses.replace(SHARES, **fields)


@given(cut=partitions(2, with_shares=True), data=st.data())
def test_counts_that_do_not_fit_the_parts_are_refused(cut, data):
    rank = data.draw(st.integers(0, cut.shares.num_ranks - 1))
    more = tuple(count + (other == rank) for other, count in enumerate(cut.shares.num_nodes))
    part = cut.shares.part_by_rank[rank]
    with pytest.raises(SpecError, match=f"shares must hold the {cut.parts[part].num_nodes} nodes of part {part}"):
        dataclasses.replace(cut, shares=dataclasses.replace(cut.shares, num_nodes=more))
    rows = [list(row) for row in cut.shares.rows_to_parts]
    rows[rank][1 - part] += 1
    with pytest.raises(SpecError, match=f"shares must send part {1 - part} the"):
        dataclasses.replace(
            cut, shares=dataclasses.replace(cut.shares, rows_to_parts=tuple(tuple(row) for row in rows))
        )


def test_shares_of_another_number_of_parts_are_refused():
    with pytest.raises(SpecError, match="part_ranks must have 3 entries, got 2"):
        dataclasses.replace(equal_parts(3, num_nodes=12, num_edges=12), shares=SHARES)
