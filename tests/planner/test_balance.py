import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.balance import balanced_stages, stages_by_cost
from simulator.simulation import pricing
from tests.made import equal_parts, graph_of, made_calibration, made_cluster, made_model, made_plan

costs = st.lists(st.integers(0, 20).map(float), min_size=1, max_size=8)


def slowest(stages, layers, first, last) -> float:
    """Return the cost of the most costly stage."""
    bounds = list(itertools.accumulate(stages, initial=0))
    totals = [sum(layers[begin:end]) for begin, end in itertools.pairwise(bounds)]
    totals[0] += first
    totals[-1] += last
    return float(max(totals))


@given(layers=costs, ends=st.tuples(st.integers(0, 20), st.integers(0, 20)), data=st.data())
def test_balanced_stages_are_as_good_as_the_best_of_all_cuts(layers, ends, data):
    num_stages = data.draw(st.integers(1, len(layers)))
    first, last = map(float, ends)
    found = balanced_stages(layers, num_stages, first=first, last=last)
    assert sum(found) == len(layers)
    assert min(found) >= 1
    cuts = itertools.combinations(range(1, len(layers)), num_stages - 1)
    every = [[end - begin for begin, end in itertools.pairwise((0, *cut, len(layers)))] for cut in cuts]
    assert slowest(found, layers, first, last) == min(slowest(stages, layers, first, last) for stages in every)


@pytest.mark.parametrize(
    ("first", "last", "stages"), [(0.0, 0.0, (2, 2)), (3.0, 0.0, (1, 3)), (0.0, 3.0, (3, 1)), (1.0, 1.0, (2, 2))]
)
def test_stages_with_input_or_head_get_fewer_layers_by_hand(first, last, stages):
    assert balanced_stages([1.5] * 4, 2, first=first, last=last) == stages


def test_stages_by_cost_give_the_last_one_fewer_layers_where_there_are_many_classes():
    partition = equal_parts(4, num_nodes=400, num_edges=800)
    model = made_model(num_layers=6)
    plan = made_plan(partition, num_layers=6, graph_parallel_degree=1, num_micro_batches=2)
    cluster, calibration = made_cluster(), made_calibration()
    found = [
        stages_by_cost(pricing(cluster, calibration), plan, graph_of(partition, num_classes=classes), model, 2)
        for classes in (2, 100_000)
    ]
    assert found == [(3, 3), (5, 1)]
