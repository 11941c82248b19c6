"""Which numbers of a parameter a rank takes; `test_parity.py` and `test_checkpoint.py` put them together again."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from executor.model import GraphTransformer
from executor.record import Recorder
from executor.shards import RankParameters
from simulator.workload import parameter_shapes
from tests.made import equal_parts, graph_of, made_model

MODEL = made_model(width=12, num_heads=3, num_layers=1, feed_forward_width=9)
GRAPH = graph_of(equal_parts(1, num_nodes=10, num_edges=20))
SHAPES = dict(parameter_shapes(GRAPH, MODEL))


def mesh(size: int, rank: int) -> Any:
    return SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank)


def share(name: str, *, tensor: tuple[int, int] | None = None, rows: tuple[int, int] | None = None) -> torch.Tensor:
    """Return what a rank, given as size and place on both axes, takes of a parameter whose numbers count up."""
    model = GraphTransformer(GRAPH, MODEL, Recorder())
    parameters = RankParameters(model, SHAPES, tensor and mesh(*tensor), rows and mesh(*rows))
    size = torch.Size(SHAPES[name])
    return parameters.share(name, torch.arange(size.numel()).view(size))


def test_a_rank_takes_queries_keys_and_values_of_its_heads_in_this_order():
    found = share("layer0.query_key_value.weight", tensor=(3, 1))
    # Heads of 4 numbers; of 12 rows each of queries, keys and values, those of the second head.
    rows = [*range(4, 8), *range(12 + 4, 12 + 8), *range(24 + 4, 24 + 8)]
    assert (found[:, 0] // 12).tolist() == rows


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("layer0.attention_output.weight", 1),
        ("layer0.feed_forward_up.weight", 0),
        ("layer0.feed_forward_up.bias", 0),
        ("layer0.feed_forward_down.weight", 1),
    ],
)
def test_other_weights_are_cut_into_runs(name, dim):
    whole = torch.arange(torch.Size(SHAPES[name]).numel()).view(SHAPES[name])
    assert torch.equal(torch.cat([share(name, tensor=(3, rank)) for rank in range(3)], dim), whole)


@pytest.mark.parametrize(
    "name", ["layer0.feed_forward_norm.weight", "head.linear.weight", "layer0.feed_forward_down.bias"]
)
def test_what_is_no_ones_heads_or_columns_is_whole_on_all(name):
    assert share(name, tensor=(3, 2)).shape == SHAPES[name]


def test_parameters_that_are_shared_out_too_are_cut_as_torch_chunks_them():
    # Five classes on four ranks: two rows on two ranks, one on the third, none on the last.
    assert [len(share("head.linear.weight", rows=(4, rank))) for rank in range(4)] == [2, 2, 1, 0]
    of_both = share("layer0.query_key_value.weight", tensor=(3, 0), rows=(4, 1))
    assert of_both.shape == (12, 3)
    assert of_both[0].tolist() == [3, 4, 5]


def test_a_lone_rank_works_on_the_parameters_of_the_model():
    model = GraphTransformer(GRAPH, MODEL, Recorder())
    parameters = RankParameters(model, SHAPES, None)
    assert all(parameters.own[name] is value for name, value in model.named_parameters())
    stored = parameters.stored("layer0.query_key_value.weight", parameters.own["layer0.query_key_value.weight"])
    assert stored.shape == (3, 12, 12)
    assert stored.data_ptr() == model.get_parameter("layer0.query_key_value.weight").data_ptr()
