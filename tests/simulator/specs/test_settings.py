"""The short specs of settings and samples: what they refuse."""

from dataclasses import replace

import pytest
from hypothesis import given

from simulator.errors import SpecError
from simulator.specs.graph import GraphFile
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange
from simulator.specs.program import TaskKind
from simulator.specs.run import RunSpec
from simulator.specs.search import BatchKind, SearchSpec
from simulator.specs.train import TrainSpec
from tests.strategies import collective_samples, compute_samples, plan_files, predictions

TRAIN = TrainSpec(num_steps=10, learning_rate=0.01)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("num_steps", 0, "must be finite and > 0, got 0"),
        ("learning_rate", float("nan"), "must be finite and > 0, got nan"),
        ("weight_decay", -0.1, "must be finite and >= 0, got -0.1"),
        ("warmup_steps", 11, "must not exceed num_steps = 10, got 11"),
        ("trace_steps", -1, "must be finite and >= 0, got -1"),
        ("collective_timeout_seconds", float("inf"), "must be finite and >= 0, got inf"),
        ("checkpoint_every_steps", -1, "must be finite and >= 0, got -1"),
        ("num_checkpoints_kept", 0, "must be finite and > 0, got 0"),
    ],
)
def test_training_out_of_range_is_refused(field, value, rule):
    with pytest.raises(SpecError, match=f"{field} {rule}"):
        replace(TRAIN, **{field: value})


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("exchanges", (), r"must name at least one choice, got \(\)"),
        ("exchanges", (Exchange.NONE,), "must not hold none: a single rank has nothing to exchange"),
        ("num_ranks", (2, 0), "must hold numbers >= 1, got 0"),
        ("parts_per_replica", 0, "must be finite and > 0, got 0"),
    ],
)
def test_a_search_that_cannot_find_anything_is_refused(field, value, rule):
    with pytest.raises(SpecError, match=f"{field} {rule}"):
        replace(SearchSpec(), **{field: value})


@given(compute=compute_samples, collective=collective_samples)
def test_samples_of_tasks_and_of_collectives_are_kept_apart(compute, collective):
    with pytest.raises(SpecError, match="kind must be a compute task, got 'all_reduce'"):
        replace(compute, kind=TaskKind.ALL_REDUCE)
    with pytest.raises(SpecError, match="kind must be a collective, got 'linear'"):
        replace(collective, kind=TaskKind.LINEAR)
    with pytest.raises(SpecError, match="num_ranks must be finite and >= 2, got 1"):
        replace(collective, num_ranks=1)


@given(prediction=predictions())
def test_deciles_of_a_prediction_are_in_order(prediction):
    with pytest.raises(SpecError, match="p50_step_seconds must be >= p10_step_seconds = "):
        replace(prediction, p50_step_seconds=prediction.p10_step_seconds / 2)
    with pytest.raises(SpecError, match=r"p90_step_seconds must be >= p50_step_seconds = .* got inf"):
        replace(prediction, p90_step_seconds=float("inf"))


@given(prediction=predictions())
def test_the_largest_peak_is_that_of_the_fullest_rank(prediction):
    peaks = ((("parameters", 3), ("activations", 4)), (("parameters", 3), ("activations", 5)))
    assert replace(prediction, peak_memory_bytes=peaks).largest_peak_memory_bytes == 8


@given(plan_file=plan_files)
def test_a_prediction_for_other_ranks_than_the_plan_has_is_refused(plan_file):
    more = (*plan_file.prediction.peak_memory_bytes, ())
    rule = f"prediction must hold peak_memory_bytes of all {plan_file.plan.num_ranks} ranks, got {len(more)}"
    with pytest.raises(SpecError, match=rule):
        replace(plan_file, prediction=replace(plan_file.prediction, peak_memory_bytes=more))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parts_per_batch": 5}, "parts_per_batch must be within 1 and parts_per_replica = 4, got 5"),
        (
            {"batches": (BatchKind.ISOLATED_CLUSTERS,)},
            "parts_per_batch must be >= 2 for isolated_clusters: no edges join the parts of a batch that has one, "
            "got 1",
        ),
        (
            {"batches": (BatchKind.SAMPLED,), "seeds_per_batch": 8},
            "fan_outs must hold one for each layer for sampled batches, got ()",
        ),
        (
            {"batches": (BatchKind.SAMPLED,), "fan_outs": (3,)},
            "seeds_per_batch must be >= 1 for sampled batches, got 0",
        ),
        (
            {"batches": (BatchKind.SAMPLED,), "fan_outs": (3, 0), "seeds_per_batch": 8},
            "fan_outs must hold numbers >= 1, got 0",
        ),
        ({"fan_outs": (3,)}, "fan_outs must be left out unless batches names sampled, got (3,)"),
        ({"seeds_per_batch": 8}, "seeds_per_batch must be left out unless batches names sampled, got 8"),
    ],
)
def test_settings_of_batches_go_with_their_kind(fields, message):
    with pytest.raises(SpecError) as caught:
        SearchSpec(**fields)
    assert str(caught.value) == message


def test_a_run_has_a_fan_out_for_each_layer():
    search = SearchSpec(batches=(BatchKind.SAMPLED,), fan_outs=(3, 2), seeds_per_batch=8)
    fields = {"graph": GraphFile(path="g"), "cluster": None, "train": TrainSpec(num_steps=1, learning_rate=1.0)}
    model = ModelSpec(width=4, num_heads=1, num_layers=2, feed_forward_width=4)
    assert RunSpec(model=model, search=search, **fields).search == search  # type: ignore[arg-type]
    with pytest.raises(
        SpecError, match=r"fan_outs, which must hold one for each of model.num_layers = 3, got \[3, 2\]"
    ):
        RunSpec(model=replace(model, num_layers=3), search=search, **fields)  # type: ignore[arg-type]
