"""Plans of every kind train as one process in fp64 does: losses, gradients and accuracies."""

import functools
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from simulator.constraints import violations
from simulator.specs.cluster import BUILT_IN_CLUSTERS, DeviceKind
from simulator.specs.plan import ROW_EXCHANGES, ExchangePayload
from tests.executor.dense_reference import (
    Parameters,
    ReferenceRun,
    SampledStep,
    Step,
    accuracy_ratios,
    train_reference,
)
from tests.executor.parity_cases import (
    CASES,
    EXACT_CASES,
    LOSSY_CASES,
    NUM_STEPS,
    ROUNDED_CASES,
    ParityCase,
)
from tests.executor.parity_ranks import (
    ParityRuns,
    RankResult,
    cases_of_devices,
    launches_of,
    result_of,
    run_parity_cases,
)

pytestmark = pytest.mark.dist
EXACT, ROUNDED = 1e-5, 2e-2


@pytest.fixture(scope="session")
def result(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], RankResult]:
    """Return what a rank saw of a case, by name; cases run in launches of some, when one of them is asked for.

    A launch has to be over within the time that a test may take, also on a machine that has other things to do.
    """
    launches = {name: names for names in launches_of(CASES) for name in names}

    @functools.cache
    def folder_of(names: tuple[str, ...]) -> Path:
        folder: Path = tmp_path_factory.mktemp("parity")
        run_parity_cases(ParityRuns(kind=DeviceKind.CPU, names=names, folder=folder))
        return folder

    return lambda name, rank: result_of(folder_of(launches[name]), name, rank)


@pytest.fixture(scope="session")
def gpu_parity_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on GPUs with NCCL, of the cases that this host has GPUs for."""
    folder: Path = tmp_path_factory.mktemp("gpu_parity")
    run_parity_cases(ParityRuns(kind=DeviceKind.CUDA, names=cases_of_devices(DeviceKind.CUDA), folder=folder))
    return folder


def reference_of(case: ParityCase) -> ReferenceRun:
    """Return how one process trains; cases that differ in how the work is spread share it."""
    steps = tuple(_as_bytes(case.step(step)) for step in range(NUM_STEPS))
    key = (case.graph_name, case.extras, case.num_heads, case.model.num_layers, steps)
    if key not in _REFERENCES:
        _REFERENCES[key] = train_reference(case.problem, case.initial, [case.step(step) for step in range(NUM_STEPS)])
    return _REFERENCES[key]


_REFERENCES: dict[tuple[str, bool, int, int, tuple[bytes, ...]], ReferenceRun] = {}


def _as_bytes(step: Step) -> bytes:
    if isinstance(step, SampledStep):
        return pickle.dumps((step.edges_by_layer, step.seeds))
    return step.tobytes()


def flat(parameters: Parameters) -> Tensor:
    """Return all numbers in one row, in fp64."""
    return torch.cat([parameters[name].double().flatten() for name in sorted(parameters)])


def gradient_error(found: RankResult, expected: ReferenceRun) -> float:
    """Return the largest error over the largest absolute value of the whole gradient."""
    assert found.first_gradient.keys() == expected.first_gradient.keys()
    right = flat(expected.first_gradient)
    return float((flat(found.first_gradient) - right).abs().max() / right.abs().max())


@pytest.mark.parametrize("name", EXACT_CASES)
def test_parity(name, result):
    case = EXACT_CASES[name]
    found, expected = result(name, 0), reference_of(case)
    assert found.losses == pytest.approx(expected.losses, rel=EXACT)
    assert gradient_error(found, expected) < EXACT


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*EXACT_CASES, *ROUNDED_CASES])
def test_parity_on_gpus(name, gpu_parity_folder):
    case = CASES[name]
    if case.num_ranks > torch.cuda.device_count():
        pytest.skip(f"takes {case.num_ranks} GPUs, and this machine has {torch.cuda.device_count()}")
    found, expected = result_of(gpu_parity_folder, name, 0), reference_of(case)
    num_steps, tolerance = (3, ROUNDED) if name in ROUNDED_CASES else (NUM_STEPS, EXACT)
    assert found.losses[:num_steps] == pytest.approx(expected.losses[:num_steps], rel=tolerance)
    assert gradient_error(found, expected) < tolerance
    for rank in range(1, case.num_ranks):
        assert result_of(gpu_parity_folder, name, rank).losses == found.losses


TWINS = [
    (name, other)
    for name, case in EXACT_CASES.items()
    for other, plain in EXACT_CASES.items()
    if case.overlaps and plain == replace(case, overlaps=False)
]


@pytest.mark.parametrize(("name", "plain"), TWINS)
def test_parity_of_overlap_on_and_off(name, plain, result):
    # Case R19.
    found, expected = (result(each, 0) for each in (name, plain))
    assert found.losses == pytest.approx(expected.losses, rel=EXACT)
    right = flat(expected.first_gradient)
    assert float((flat(found.first_gradient) - right).abs().max()) < EXACT * float(right.abs().max())


def test_overlap_has_twins_of_every_exchange_and_payload():
    assert {(CASES[name].exchange[0], CASES[name].payload) for name, _ in TWINS} == {
        (exchange, payload) for exchange in ROW_EXCHANGES for payload in ExchangePayload
    }


@pytest.mark.parametrize("name", ROUNDED_CASES)
def test_parity_in_bf16(name, result):
    found, expected = result(name, 0), reference_of(ROUNDED_CASES[name])
    assert found.losses[:3] == pytest.approx(expected.losses[:3], rel=ROUNDED)
    assert gradient_error(found, expected) < ROUNDED


@pytest.mark.parametrize("name", LOSSY_CASES)
def test_plans_with_compressed_gradients_begin_alike_and_learn(name, result):
    found, expected = result(name, 0), reference_of(LOSSY_CASES[name])
    assert found.losses[0] == pytest.approx(expected.losses[0], rel=EXACT)
    assert found.losses[1:] != pytest.approx(expected.losses[1:], rel=EXACT)
    # Of what the loss falls in as many steps, at least two thirds.
    assert np.mean(found.losses[-4:]) < np.mean(expected.losses[:4]) - 0.66 * (
        np.mean(expected.losses[:4]) - np.mean(expected.losses[-4:])
    )


@pytest.mark.parametrize("name", EXACT_CASES)
def test_ranks_count_right_predictions_as_one_process(name, result):
    case = EXACT_CASES[name]
    found = result(name, 0)
    assert found.first_accuracies == pytest.approx(accuracy_ratios(case.problem, case.initial), abs=1e-6)
    assert found.last_accuracies == pytest.approx(accuracy_ratios(case.problem, found.trained), abs=1e-6)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.num_ranks > 1])
def test_ranks_agree_to_the_last_bit(name, result):
    results = [result(name, rank) for rank in range(CASES[name].num_ranks)]
    for other in results[1:]:
        assert other.losses == results[0].losses
        assert other.last_accuracies == results[0].last_accuracies
        assert torch.equal(flat(other.drawn), flat(results[0].drawn))
        assert torch.equal(flat(other.trained), flat(results[0].trained))


def test_a_hierarchical_exchange_trains_to_the_same_bits_again(result):
    name = "2 hosts of 2 ranks, hierarchical, overlapped"
    first, again = (result(each, 0) for each in (name, f"{name}, again"))
    assert first.losses == again.losses
    assert torch.equal(flat(first.trained), flat(again.trained))


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_a_plan_that_can_run(name):
    case = CASES[name]
    per_host = case.ranks_per_host or case.num_ranks
    num_hosts = -(-case.num_ranks // per_host)
    cluster = replace(BUILT_IN_CLUSTERS["h200x8"], num_hosts=num_hosts, devices_per_host=per_host)
    assert violations(case.plan, case.graph_spec, case.model, cluster) == []
