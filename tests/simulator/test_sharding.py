import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from simulator.sharding import REST, row_dim, share_elements, share_of, tensor_dim, tensor_shapes, units_of
from simulator.workload import parameter_shapes
from tests.made import equal_parts, graph_of, made_model, made_plan

PARTITION = equal_parts(2, num_nodes=20, num_edges=60, halo_rows=2)
MODEL = made_model(width=12, num_heads=3, num_layers=2, feed_forward_width=9)
SHAPES = parameter_shapes(graph_of(PARTITION), MODEL)


def test_three_ranks_hold_a_third_of_heads_and_columns_and_all_of_the_rest():
    plan = made_plan(PARTITION, tensor_parallel_degree=3)
    own = dict(tensor_shapes(plan, SHAPES))
    assert own["layer0.query_key_value.weight"] == (12, 12)  # of 36 rows, four of queries, of keys and of values
    assert own["layer1.attention_output.weight"] == (12, 4)
    assert own["layer1.feed_forward_up.weight"] == (3, 12)
    assert own["layer1.feed_forward_up.bias"] == (3,)
    assert own["layer1.feed_forward_down.weight"] == (12, 3)
    whole = {name: shape for name, shape in SHAPES if tensor_dim(name) is None}
    assert {name: own[name] for name in whole} == whole
    assert "head.linear.weight" in whole


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple),
    st.integers(1, 5),
    st.data(),
)
def test_shares_are_those_of_torch_chunk(shape, num_ranks, data):
    dim = data.draw(st.integers(0, len(shape) - 1))
    chunks = torch.empty(shape).chunk(num_ranks, dim)
    shares = [share_of(shape, dim, num_ranks, rank) for rank in range(num_ranks)]
    assert shares[: len(chunks)] == [tuple(chunk.shape) for chunk in chunks]
    assert all(math.prod(share) == 0 for share in shares[len(chunks) :])


@given(st.integers(1, 7))
def test_shares_of_all_ranks_are_all_numbers_and_the_first_is_the_largest(num_ranks):
    elements = [share_elements(SHAPES, num_ranks, rank) for rank in range(num_ranks)]
    assert sum(elements) == sum(math.prod(shape) for _, shape in SHAPES)
    assert max(elements) == elements[0]


def test_layers_are_gathered_one_by_one_and_input_and_head_together():
    units = units_of(SHAPES)
    assert sorted(units) == ["layer0", "layer1", REST]
    assert sum(len(shapes) for shapes in units.values()) == len(SHAPES)
    assert {name.split(".")[0] for name, _ in units[REST]} == {"input", "head"}


def test_no_dimension_is_split_by_both():
    both = [name for name, shape in SHAPES if len(shape) > 1 and tensor_dim(name) == row_dim(name)]
    assert both == []
