"""Runs parity cases on ranks, some in one launch, and reads back what each rank saw."""

import pickle
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in __all__

from executor.launch import launch, meet
from executor.mesh import Place, joined_mesh, mesh_choices
from executor.record import Recorder
from executor.train import Trainer
from simulator.specs.cluster import DeviceKind
from tests.executor.parity_cases import CASES, MOST_RANKS, NUM_STEPS, ParityCase

Parameters = dict[str, Tensor]
CASES_PER_LAUNCH = 40  # half a minute to a minute on two cores


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """What one rank saw of a case.

    Attributes:
        drawn: parameters as the trainer drew them, before the case's own were loaded.
        losses: of every step.
        first_gradient: of the first step, over all ranks, before it is clipped.
        first_accuracies, last_accuracies: train, val and test, before and after training.
        trained: parameters in the end.
    """

    drawn: Parameters
    losses: list[float]
    first_gradient: Parameters
    first_accuracies: tuple[float, ...]
    last_accuracies: tuple[float, ...]
    trained: Parameters


@dataclass(frozen=True, kw_only=True)
class ParityRuns:
    """Cases to run, and where.

    Attributes:
        kind: of the ranks' devices: cores with gloo, or GPUs with NCCL.
        names: of the cases.
        folder: for the results.
    """

    kind: DeviceKind
    names: tuple[str, ...]
    folder: Path


def cases_of_devices(kind: DeviceKind) -> tuple[str, ...]:
    """Return the names of the cases that this host has devices for."""
    most = MOST_RANKS if kind is DeviceKind.CPU else torch.cuda.device_count()
    return tuple(name for name, case in CASES.items() if case.num_ranks <= most)


def launches_of(cases: Mapping[str, ParityCase]) -> list[tuple[str, ...]]:
    """Return cases in runs that are launched together: of as many ranks, and no more than some."""
    by_ranks: dict[int, list[str]] = defaultdict(list)
    for name, case in cases.items():
        by_ranks[case.num_ranks].append(name)
    return [
        tuple(names[first : first + CASES_PER_LAUNCH])
        for names in by_ranks.values()
        for first in range(0, len(names), CASES_PER_LAUNCH)
    ]


def run_parity_cases(runs: ParityRuns) -> None:
    """Run cases; their results go to the folder."""
    launch(run_as_one_rank, runs, num_ranks=max(CASES[name].num_ranks for name in runs.names), folder=runs.folder)


def result_of(folder: Path, name: str, rank: int) -> RankResult:
    """Return what one rank saw of a case."""
    found = pickle.loads(_path(folder, name, rank).read_bytes())
    assert isinstance(found, RankResult)
    return found


def run_as_one_rank(runs: ParityRuns, store: Store, rank: int) -> None:
    """Take part in every case as one rank of the launch; ranks that a case does not need wait for the next one."""
    for name in runs.names:
        case = CASES[name]
        case_store = PrefixStore(name, store)
        takes_part = rank < case.num_ranks
        if takes_part:
            try:
                result = _run_case(case, runs.kind, case_store, rank)
            except Exception as error:
                error.add_note(f"in the parity case {name!r}")
                raise
            _path(runs.folder, name, rank).write_bytes(pickle.dumps(result))
        meet(case_store, "done", case.num_ranks, arrive=takes_part)


def _run_case(case: ParityCase, kind: DeviceKind, store: Store, rank: int) -> RankResult:
    with joined_mesh(
        kind,
        store,
        rank=rank,
        local_rank=rank,
        **mesh_choices(case.plan),
    ) as place:
        return _train(case, place)


def _train(case: ParityCase, place: Place) -> RankResult:
    recorder = Recorder(precision=case.precision)
    trainer = Trainer(case.plan, case.graph_spec, case.model, case.train, case.inputs, place, recorder)
    drawn = trainer.whole_weights()
    trainer.parameters.load(case.initial)
    if trainer.host_optimizer is not None:
        trainer.host_optimizer.load_parameters()
    first_accuracies = astuple(trainer.evaluate())
    gradients = _gradients_before_updates(trainer)
    losses = [float(trainer.step(step, *trainer.micro_batches(step))) for step in range(NUM_STEPS)]
    trainer.close()
    return RankResult(
        drawn=drawn,
        losses=losses,
        first_gradient=gradients[0],
        first_accuracies=first_accuracies,
        last_accuracies=astuple(trainer.evaluate()),
        trained=trainer.whole_weights(),
    )


def _gradients_before_updates(trainer: Trainer) -> list[Parameters]:
    """Return a list to which each step adds its reduced gradients, before they are clipped and forgotten."""
    seen: list[Parameters] = []
    update = trainer.update

    def look_and_update() -> None:
        parameters = trainer.parameters
        gradients = {name: own.grad for name, own in parameters.own.items() if own.grad is not None}
        seen.append({name: value.cpu().clone() for name, value in parameters.gathered(gradients).items()})
        update()

    trainer.update = look_and_update  # type: ignore[method-assign]
    return seen


def _path(folder: Path, name: str, rank: int) -> Path:
    return folder / f"{name}.rank{rank}.pickle"
