import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.errors import SpecError
from simulator.specs.mesh import AXES, MeshShape

sizes = st.integers(1, 4)
shapes = st.builds(MeshShape, dp=sizes, pp=sizes, gp=sizes, tp=sizes)


@given(shapes, st.sets(st.sampled_from(AXES)))
def test_ranks_are_numbered_as_numpy_numbers_an_array_with_the_last_axis_innermost(shape, axes):
    ranks = np.arange(shape.num_ranks).reshape(shape.sizes)
    for place in np.ndindex(*shape.sizes):
        rank = int(ranks[place])
        assert tuple(shape.coordinates(rank)) == place
        along = tuple(slice(None) if axis in axes else index for axis, index in zip(AXES, place, strict=True))
        expected = tuple(np.atleast_1d(ranks[along]).flatten().tolist())
        assert shape.group(axes, rank) == expected
        assert shape.place_in(axes, rank) == expected.index(rank)
    assert shape.size(axes) == len(shape.group(axes, 0))


def test_the_ranks_of_two_replicas_of_two_graph_ranks_of_two_tensor_ranks_by_hand():
    shape = MeshShape(dp=2, gp=2, tp=2)
    assert [shape.group(("tp",), rank) for rank in (0, 5)] == [(0, 1), (4, 5)]
    assert [shape.group(("gp",), rank) for rank in (0, 5)] == [(0, 2), (5, 7)]
    assert [shape.group(("dp", "gp"), rank) for rank in (0, 5)] == [(0, 2, 4, 6), (1, 3, 5, 7)]


def test_an_axis_without_ranks_is_refused():
    with pytest.raises(SpecError, match="tp must be finite and > 0, got 0"):
        MeshShape(tp=0)
