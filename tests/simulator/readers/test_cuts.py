"""Counts of a cut against those that the planner made, and against a cut of other nodes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.partition import part_specs
from simulator.readers.cuts import cut_mismatches
from simulator.specs.plan import PartitionSpec
from tests.executor.made_graphs import awkward_graph, sparse_graph
from tests.made import made_partition
from tests.small_graphs import graph_of, multigraphs


def cut_of(graph, part_N, num_parts: int) -> PartitionSpec:
    return made_partition(part_specs(graph, part_N, num_parts))


@given(multigraphs(), st.data())
def test_a_cut_is_counted_as_the_planner_counts_it(drawn, data):
    edges, num_nodes = drawn
    graph = graph_of(edges, num_nodes)
    num_parts = data.draw(st.integers(1, 4))
    part_N = np.array(
        data.draw(st.lists(st.integers(0, num_parts - 1), min_size=num_nodes, max_size=num_nodes)), np.int32
    )
    assert cut_mismatches(cut_of(graph, part_N, num_parts), part_N, graph) == []


@pytest.mark.parametrize("graph", [awkward_graph(), sparse_graph()])
def test_counts_of_another_cut_are_named_with_both_numbers(graph):
    part_N = (np.arange(graph.num_nodes) % 3).astype(np.int32)
    cut = cut_of(graph, part_N, 3)
    other_N = part_N.copy()
    other_N[np.flatnonzero(part_N == 0)[0]] = 1
    found = cut_mismatches(cut, other_N, graph)
    num_nodes = int((part_N == 0).sum())
    assert found[0] == (
        f"part 0 must own {num_nodes} nodes as in the plan, got {num_nodes - 1} and 1 other counts of them differ"
    )
    assert {sentence.split(" as in the plan")[0].split()[-1] for sentence in found} >= {"nodes"}
    assert cut_mismatches(cut, other_N) == found[:1]


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("halo_rows_from", "halo rows from part 1"),
        ("edges_from", "edges from part 1"),
        ("num_train_nodes", "to train on"),
    ],
)
def test_any_count_that_was_changed_is_named(field, told):
    graph = awkward_graph()
    part_N = (np.arange(graph.num_nodes) % 2).astype(np.int32)
    cut = cut_of(graph, part_N, 2)
    value: Any = getattr(cut.parts[0], field)
    wrong: Any = value + 1 if isinstance(value, int) else (value[0], value[1] + 1)
    parts = (replace(cut.parts[0], **{field: wrong}), cut.parts[1])
    (sentence,) = cut_mismatches(replace(cut, parts=parts), part_N, graph)
    assert told in sentence
    assert sentence.startswith("part 0 must ")
