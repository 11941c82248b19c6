"""Who of a host takes a row of another host for all of them."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from simulator.hosts import host_needs, takers


def test_rows_of_an_owner_go_in_turn_to_those_who_need_them():
    # Both ranks need nodes 0 to 3 of owner 5 and 5 of owner 6; only the second one needs node 4 of owner 5.
    needs_RN = np.array([[1, 1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1, 0]], dtype=bool)
    assert takers(needs_RN, np.array([5, 5, 5, 5, 5, 6, 6])).tolist() == [0, 1, 0, 1, 1, 0, -1]


@given(data=st.data(), num_ranks=st.integers(1, 5), num_nodes=st.integers(0, 40))
def test_who_takes_a_row_needs_it_and_shares_of_common_rows_are_even(data, num_ranks, num_nodes):
    needs_RN = data.draw(hnp.arrays(bool, (num_ranks, num_nodes)))
    owner_N = data.draw(hnp.arrays(np.int64, num_nodes, elements=st.integers(0, 3)))
    found = takers(needs_RN, owner_N)
    for node in range(num_nodes):
        assert needs_RN[found[node], node] if needs_RN[:, node].any() else found[node] == -1
    all_need = takers(np.ones_like(needs_RN), owner_N)
    for owner in range(4):
        shares = np.bincount(all_need[owner_N == owner], minlength=num_ranks)
        assert shares.max() - shares.min() <= 1


def test_a_host_needs_nothing_of_its_own():
    owner_N = np.array([0, 1, 2, 3, 4])
    needed = [np.array([1, 2]), np.array([0, 3]), np.array([4]), np.array([0, 2]), np.array([3])]
    assert host_needs(needed, owner_N, host=0, ranks_per_host=2).astype(int).tolist() == [
        [0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0],
    ]
    # The last host has one rank.
    assert host_needs(needed, owner_N, host=2, ranks_per_host=2).astype(int).tolist() == [[0, 0, 0, 1, 0]]
