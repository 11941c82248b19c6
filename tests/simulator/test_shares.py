import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simulator.shares import first_heads, heads_by_rank, mates_of, rank_of_nodes

part_ranks_lists = st.lists(st.integers(1, 4), min_size=1, max_size=5).map(tuple)


def test_nodes_of_a_part_go_to_its_ranks_in_runs():
    part_N = np.array([1, 0, 1, 1, 0, 1, 1])
    assert rank_of_nodes(part_N, (1, 2)).tolist() == [1, 0, 1, 1, 0, 2, 2]
    assert rank_of_nodes(part_N, (1, 1)).tolist() == part_N.tolist()


@given(part_ranks=part_ranks_lists, data=st.data())
def test_every_node_is_owned_by_a_rank_of_its_part_and_shares_differ_by_one_row_at_most(part_ranks, data):
    nodes = data.draw(st.lists(st.integers(0, len(part_ranks) - 1), max_size=40))
    part_N = np.array(nodes, dtype=np.int32)
    rank_N = rank_of_nodes(part_N, part_ranks)
    first = 0
    for part, count in enumerate(part_ranks):
        owners = rank_N[part_N == part]
        sizes = [int((owners == rank).sum()) for rank in range(first, first + count)]
        assert sum(sizes) == len(owners)
        assert max(sizes) - min(sizes) <= 1
        assert owners.tolist() == sorted(owners.tolist())
        first += count


def test_heads_that_do_not_divide_by_hand():
    assert heads_by_rank(7, (1, 3, 2)) == (7, 3, 2, 2, 4, 3)
    assert first_heads(7, (1, 3, 2)) == (0, 0, 3, 5, 0, 4)


@given(part_ranks=part_ranks_lists, num_heads=st.integers(4, 16))
def test_the_ranks_of_a_part_have_every_head_once(part_ranks, num_heads):
    counts, firsts = heads_by_rank(num_heads, part_ranks), first_heads(num_heads, part_ranks)
    for rank in range(sum(part_ranks)):
        heads = [
            head for mate in mates_of(part_ranks, rank) for head in range(firsts[mate], firsts[mate] + counts[mate])
        ]
        assert heads == list(range(num_heads))


def test_mates_by_hand():
    assert [mates_of((1, 2, 1), rank) for rank in range(4)] == [(0,), (1, 2), (1, 2), (3,)]
