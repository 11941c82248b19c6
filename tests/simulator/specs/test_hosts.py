"""Rows between hosts: what a description must hold."""

from dataclasses import replace

import pytest

from simulator.errors import SpecError
from simulator.specs.hosts import HostRows

# Ranks 0 and 1 share a host, rank 2 has one of its own. Rank 0 takes 2 rows of rank 2 and passes 1 of them on; rank 1
# takes 2 and passes both on. Rank 2 takes 2 rows of each.
HOSTS = HostRows(
    ranks_per_host=2,
    rows_from=((0, 2, 2), (1, 0, 2), (2, 2, 0)),
    passed_rows_from=((0, 2, 0), (1, 0, 0), (0, 0, 0)),
)


def test_rows_between_hosts_are_those_from_owners_elsewhere():
    assert HOSTS.num_rows_between_hosts == 2 + 2 + 2 + 2
    assert [HOSTS.ranks_of_host(rank) for rank in range(3)] == [(0, 1), (0, 1), (2,)]


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"ranks_per_host": 0}, "ranks_per_host must be finite and > 0, got 0"),
        ({"passed_rows_from": ()}, "passed_rows_from must have 3 entries, got 0"),
        ({"rows_from": ((0, 2), (1, 0, 2), (2, 2, 0))}, "rows_from must have 3 entries, got 2"),
        (
            {"passed_rows_from": ((0, 2, 1), (1, 0, 0), (0, 0, 0))},
            r"passed_rows_from must be 0 from all but the other ranks (0, 1), got (0, 2, 1)",
        ),
        (
            {"passed_rows_from": ((3, 2, 0), (1, 0, 0), (0, 0, 0))},
            r"passed_rows_from must be 0 from all but the other ranks (0, 1), got (3, 2, 0)",
        ),
    ],
)
def test_rows_of_hosts_that_cannot_be_are_refused(fields, sentence):
    with pytest.raises(SpecError) as error:
        replace(HOSTS, **fields)
    assert str(error.value) == sentence
