"""The schedule, clipping and the guard by hand; batches and the weights of their losses over whole epochs."""

import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from executor.clipping import clip_flat_gradient_
from executor.mesh import Place
from executor.record import Recorder
from executor.train import (
    Inputs,
    StepClock,
    Trainer,
    learning_rate_schedule,
    require_finite,
)
from simulator.errors import RunError
from simulator.readers.graphs import Graph
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, Plan
from simulator.specs.train import TrainSpec
from tests.executor.made_graphs import labelled_graph, plan_of, spec_of

MODEL = ModelSpec(width=4, num_heads=1, num_layers=1, feed_forward_width=4)
TRAIN = TrainSpec(num_steps=30, learning_rate=0.1, seed=3)


# --- The schedule, clipping, the guard.


def test_the_learning_rate_rises_over_the_warm_up_and_falls_along_a_cosine():
    factor = learning_rate_schedule(TrainSpec(num_steps=12, learning_rate=1.0, warmup_steps=4))
    assert [factor(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]
    # Eight steps from 1 to 0: at a quarter, half and three quarters of pi.
    falling = [factor(step) for step in (4, 6, 8, 10, 12)]
    assert falling == pytest.approx([1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2, 0.0])
    assert factor(100) == pytest.approx(0.0)


def test_without_a_warm_up_the_learning_rate_starts_at_its_peak():
    assert learning_rate_schedule(TrainSpec(num_steps=3, learning_rate=1.0))(0) == 1.0


def test_a_run_that_is_all_warm_up_ends_at_the_peak():
    factor = learning_rate_schedule(TrainSpec(num_steps=2, learning_rate=1.0, warmup_steps=2))
    assert [factor(0), factor(1)] == [0.5, 1.0]


def test_a_gradient_above_the_norm_is_scaled_down_to_it():
    gradient = torch.tensor([3.0, -4.0])
    clip_flat_gradient_(gradient, 2.0)
    torch.testing.assert_close(gradient, torch.tensor([1.2, -1.6]))


@pytest.mark.parametrize("values", [[3.0, -4.0], [0.0, 0.0], [5.0, 0.0]])
def test_a_gradient_within_the_norm_stays(values):
    gradient = torch.tensor(values)
    clip_flat_gradient_(gradient, 5.0)
    assert gradient.tolist() == values


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_stops_the_run(loss):
    with pytest.raises(RunError, match=r"loss of step \d+ is .*learning_rate"):
        require_finite(loss, 7)


def test_a_finite_loss_passes():
    require_finite(1e30, 0)


def test_the_clock_gives_the_seconds_of_each_step():
    clock = StepClock(torch.device("cpu"))
    for seconds in (0.02, 0.0):
        clock.start()
        time.sleep(seconds)
        clock.stop()
    first, second = clock.seconds()
    assert 0.02 <= first < 1
    assert 0 <= second < first


# --- Batches.


def trainers_of(plan: Plan, graph: Graph, part_N: np.ndarray, *, order_N: np.ndarray | None = None) -> list[Trainer]:
    """Return the trainer of each rank, without process groups: batches need none."""
    found = []
    for rank in range(plan.num_ranks):
        replica, graph_rank = divmod(rank, plan.graph_parallel_degree)
        place = Place(
            rank=rank,
            num_ranks=plan.num_ranks,
            replica=replica,
            row_rank=rank,
            graph_rank=graph_rank,
            graph_group=None,
            world=None,
            device=torch.device("cpu"),
        )
        inputs = Inputs(graph=graph, part_N=part_N, encodings=None, order_N=order_N)
        found.append(Trainer(plan, spec_of(graph), MODEL, TRAIN, inputs, place, Recorder()))
    return found


GRAPH = labelled_graph([(node, (node * 7 + 1) % 29) for node in range(29)], 29)


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, np.ndarray]:
    """Draw a plan with any number of parts from one batch a replica on, and the part of each node."""
    replicas = draw(st.integers(1, 3))
    ranks = draw(st.integers(1, 2))
    parts = ranks if ranks > 1 else draw(st.integers(1, 3))
    num_parts = draw(st.integers(max(replicas * parts, 2), 12))
    part_N = np.array(draw(st.lists(st.integers(0, num_parts - 1), min_size=29, max_size=29)))
    plan = plan_of(
        GRAPH,
        part_N,
        num_parts,
        data_parallel_degree=replicas,
        graph_parallel_degree=ranks,
        parts_per_batch=parts,
    )
    return plan, part_N


@given(plans())
def test_every_node_is_trained_on_once_an_epoch_whatever_the_number_of_parts(case):
    plan, part_N = case
    trainers = trainers_of(plan, GRAPH, part_N)
    for epoch in range(2):
        steps = range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch)
        nodes = [node for step in steps for trainer in trainers for node in trainer.batch(step).node_N.tolist()]
        assert sorted(nodes) == [*range(GRAPH.num_nodes)]


@given(plans())
def test_every_labelled_node_of_a_step_has_the_same_weight_on_all_ranks_and_weights_sum_to_one(case):
    plan, part_N = case
    trainers = trainers_of(plan, GRAPH, part_N)
    for step in range(3 * plan.steps_per_epoch):  # batches come again from the second epoch on
        batches = [trainer.batch(step) for trainer in trainers]
        labelled = sum(len(data.train_row_T) for data in batches)
        assert {data.num_train_rows_of_step for data in batches} == {max(labelled, 1)}
        for data in batches:
            nodes = data.node_N[data.train_row_T]
            assert nodes.tolist() == [node for node in data.node_N.tolist() if GRAPH.train_mask_N[node]]


def test_the_nodes_of_a_batch_come_in_the_order_of_the_plan():
    order_N = np.random.default_rng(0).permutation(29)
    part_N = np.arange(29) % 3
    plan = plan_of(GRAPH, part_N, 3)
    (trainer,) = trainers_of(plan, GRAPH, part_N, order_N=order_N)
    for step in range(3):
        nodes = trainer.batch(step).node_N.tolist()
        assert nodes == [node for node in order_N.tolist() if part_N[node] == part_N[nodes[0]]]


def test_the_order_of_parts_differs_between_epochs_and_seeds():
    part_N = np.arange(29) % 8
    plan = plan_of(GRAPH, part_N, 8)
    (trainer,) = trainers_of(plan, GRAPH, part_N)
    orders = [[int(part_N[trainer.batch(8 * epoch + step).node_N[0]]) for step in range(8)] for epoch in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == [*range(8)]
    assert orders[0] != orders[1]


def test_edges_between_the_parts_of_a_batch_are_kept_and_those_that_leave_it_are_not():
    part_N = np.arange(29) % 3
    plan = plan_of(GRAPH, part_N, 3, parts_per_batch=2)
    (trainer,) = trainers_of(plan, GRAPH, part_N)
    data = trainer.batch(0)
    inside = set(data.node_N.tolist())
    assert len({int(part_N[node]) for node in inside}) == 2
    edges = data.edges[Exchange.NONE]
    found = sorted(zip(data.node_N[edges.source_E].tolist(), data.node_N[edges.target_E].tolist(), strict=True))
    pairs = zip(GRAPH.source_E.tolist(), GRAPH.target_E.tolist(), strict=True)
    assert found == sorted((s, t) for s, t in pairs if s in inside and t in inside)


def test_every_node_is_evaluated_by_one_rank_whatever_the_plan_trains_on():
    part_N = np.arange(29) % 7
    for replicas, ranks in ((1, 1), (3, 1), (1, 2), (2, 2)):
        plan = plan_of(
            GRAPH, part_N, 7, data_parallel_degree=replicas, graph_parallel_degree=ranks, parts_per_batch=ranks
        )
        trainers = trainers_of(plan, GRAPH, part_N)
        for name, mask_N in (("train", GRAPH.train_mask_N), ("val", GRAPH.val_mask_N), ("test", GRAPH.test_mask_N)):
            shares = [trainer.batches.whole_graph() for trainer in trainers]
            nodes = [node for data in shares for node in data.node_N[data.mask_rows[name]].tolist()]
            assert sorted(nodes) == np.flatnonzero(mask_N).tolist()


# --- Steps.


def one_rank_trainer(train: TrainSpec = TRAIN) -> Trainer:
    part_N = np.zeros(29, np.int64)
    plan = plan_of(GRAPH, part_N, 1)
    place = Place(
        rank=0,
        num_ranks=1,
        replica=0,
        graph_rank=0,
        graph_group=None,
        world=None,
        device=torch.device("cpu"),
    )
    inputs = Inputs(graph=GRAPH, part_N=part_N, encodings=None)
    return Trainer(plan, spec_of(GRAPH), MODEL, train, inputs, place, Recorder())


def test_a_full_graph_is_built_once():
    trainer = one_rank_trainer()
    assert trainer.batch(0) is trainer.batch(7)


def test_the_same_seed_trains_to_the_same_bits_and_another_one_does_not():
    def losses(seed: int) -> list[float]:
        trainer = one_rank_trainer(TrainSpec(num_steps=5, learning_rate=0.01, seed=seed))
        return [float(trainer.step(step, trainer.batch(step))) for step in range(5)]

    assert losses(1) == losses(1)
    assert losses(1) != losses(2)


def test_training_lowers_the_loss_and_evaluating_changes_nothing():
    trainer = one_rank_trainer(TrainSpec(num_steps=40, learning_rate=0.02))
    losses = [float(trainer.step(step, trainer.batch(step))) for step in range(40)]
    assert losses[-1] < losses[0] / 2
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    found = trainer.evaluate()
    assert found == trainer.evaluate()
    assert found.train_accuracy_ratio > 0.5
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())


def test_each_step_has_its_learning_rate_whatever_steps_came_before():
    trainer = one_rank_trainer(TrainSpec(num_steps=12, learning_rate=0.5, warmup_steps=4))
    rates = []
    for step in (0, 1, 8, 3):
        trainer.step(step, trainer.batch(step))
        rates.append(float(trainer.learning_rate))
    # By hand: quarters of the peak in the warm-up, half of it halfway down.
    assert rates == pytest.approx([0.125, 0.25, 0.25, 0.5])
    assert trainer.optimizer.param_groups[0]["lr"] is trainer.learning_rate


def test_gradients_are_forgotten_after_a_step():
    trainer = one_rank_trainer()
    trainer.step(0, trainer.batch(0))
    assert all(value.grad is not None and not value.grad.any() for value in trainer.parameters.own.values())
