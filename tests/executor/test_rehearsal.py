"""A rank's step without numbers does what its program says, for plans of every kind; and what does not is found."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import executor.attention.fakes  # noqa: F401  # shapes without numbers
from executor import operations
from executor.attention import parts
from executor.attention.graph import EdgeGraph
from executor.batches import sampled_works
from executor.rehearsal import Rehearsal, rehearse
from simulator.matching import mismatches
from simulator.specs.cluster import DeviceKind
from simulator.specs.decision import PlanFile
from simulator.specs.program import Program, Task, TaskKind
from simulator.workload import RankWork, lower, rank_work, works_of_rank
from tests.conformance.cases import CASES, TRAIN, Prepared, cluster_of, prepare
from tests.executor import parity_cases
from tests.plans import plan_file_of


@dataclass(frozen=True, kw_only=True)
class Rank:
    """A rank of a case in the first step: its tasks as the plan counts them, and as they are in the graph."""

    prepared: Prepared
    file: PlanFile
    rank: int
    works: Sequence[RankWork]
    counted: tuple[Task, ...]
    exact: tuple[Task, ...]

    def rehearsed(self, tasks=None, *, from_graph: bool = True) -> Rehearsal:
        """Return what comes of the rank's step, held against some tasks or its own."""
        prepared = self.prepared
        known = self.exact if from_graph else self.counted
        inputs = prepared.inputs if from_graph else None
        return rehearse(self.file, self.rank, known if tasks is None else tasks, works=self.works, inputs=inputs)


@pytest.fixture(scope="module")
def all_ranks(tmp_path_factory) -> dict[str, list[Rank]]:
    """The ranks of every case by its name."""
    cases = prepare(tmp_path_factory.mktemp("cases"), DeviceKind.CPU)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    return {prepared.name: _ranks(prepared, path) for prepared in cases}


def _ranks(prepared: Prepared, path: Path) -> list[Rank]:
    plan, model = prepared.plan, prepared.case.model
    works = rank_work(plan, step=0, seed=TRAIN.seed)
    counted = lower(plan, prepared.spec, model, cluster_of(DeviceKind.CPU), seed=TRAIN.seed)
    exact = counted
    if plan.sampled is not None:
        drawn = sampled_works(plan, model, prepared.inputs, step=0, seed=TRAIN.seed)
        exact = lower(plan, prepared.spec, model, cluster_of(DeviceKind.CPU), seed=TRAIN.seed, works=drawn)
    file = plan_file_of(plan, prepared.spec, model, cluster_of(DeviceKind.CPU), TRAIN, path)
    return [
        Rank(
            prepared=prepared,
            file=file,
            rank=rank,
            works=works_of_rank(plan, works, rank),
            counted=counted.tasks[rank],
            exact=exact.tasks[rank],
        )
        for rank in range(plan.num_ranks)
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_step_on_the_graph_does_what_was_lowered(all_ranks, name):
    # Ranks of other hosts or parts of several ranks, and those without nodes, do other things than their peers.
    case = CASES[name]
    is_uneven = case.ranks_per_host is not None or case.has_empty_part or bool(case.part_ranks)
    for rank in all_ranks[name] if is_uneven else all_ranks[name][:1]:
        assert rank.rehearsed() == Rehearsal(rank=rank.rank, findings=(), unchecked=())


@pytest.mark.parametrize("name", CASES)
def test_a_step_on_counts_alone_does_what_was_lowered(all_ranks, name):
    rank = all_ranks[name][-1]
    assert rank.rehearsed(from_graph=False) == Rehearsal(rank=rank.rank, findings=(), unchecked=())


@pytest.mark.parametrize("name", CASES)
def test_sends_and_receives_of_every_case_match(all_ranks, name):
    ranks = all_ranks[name]
    assert mismatches(Program(tasks=tuple(rank.counted for rank in ranks))) == []
    assert mismatches(Program(tasks=tuple(rank.exact for rank in ranks))) == []


@pytest.mark.parametrize("name", parity_cases.CASES)
def test_sends_and_receives_of_every_case_of_parity_match(name):
    case = parity_cases.CASES[name]
    for step in range(parity_cases.NUM_STEPS):
        program = lower(case.plan, case.graph_spec, case.model, cluster_of(DeviceKind.CPU), step=step)
        assert mismatches(program) == []


def test_no_process_group_is_left(all_ranks):
    all_ranks["halo"][0].rehearsed()
    assert not dist.is_initialized()


# --- What is wrong is named.


def changed(tasks, name: str, **fields):
    """Return tasks of which one was changed."""
    assert sum(task.name == name for task in tasks) == 1
    return [replace(task, **fields) if task.name == name else task for task in tasks]


def swapped(tasks, first: str, second: str):
    found = list(tasks)
    places = [[task.name for task in tasks].index(name) for name in (first, second)]
    found[places[0]], found[places[1]] = found[places[1]], found[places[0]]
    return found


WRONG = {
    "a task that is left out": (
        lambda tasks: [task for task in tasks if task.name != "head.norm"],
        "head.norm: lowered 0 times, but ran 1 times",
    ),
    "a task too many": (lambda tasks: [*tasks, replace(tasks[-1], name="more")], "more: lowered 1 times, but ran 0"),
    "another width": (
        lambda tasks: changed(tasks, "layer0.feed_forward_up", shape=(1, 2, 3)),
        "layer0.feed_forward_up: shape must be (1, 2, 3) as lowered, got (",
    ),
    "another kind": (
        lambda tasks: changed(tasks, "layer0.attention_norm", kind=TaskKind.GELU),
        "layer0.attention_norm: kind must be gelu as lowered, got layer_norm",
    ),
    "another group": (
        lambda tasks: changed(tasks, "layer0.exchange", group=(0, 1, 2)),
        "layer0.exchange, collective 1 of the step: group must be (0, 1, 2), got (0, 1)",
    ),
    "other bytes to receive": (
        lambda tasks: changed(tasks, "layer1.exchange", receives=(0, 4)),
        "layer1.exchange, collective 2 of the step: bytes received must be (0, 4), got (0, ",
    ),
    "collectives in another order": (
        lambda tasks: swapped(tasks, "layer0.exchange", "layer1.exchange"),
        "order of tasks: layer1.exchange is lowered where layer0.exchange ran",
    ),
    "one that is not called": (
        lambda tasks: [*tasks, replace(tasks[-1], name="sum", kind=TaskKind.ALL_REDUCE)],
        "sum: lowered 1 times, but ran 0 times",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_program_that_is_wrong_is_named_with_task_and_values(all_ranks, wrong):
    change, sentence = WRONG[wrong]
    rank = all_ranks["halo"][0]
    found = rank.rehearsed(change(rank.exact)).findings
    assert any(sentence in each for each in found), found


def test_every_rank_that_holds_something_else_than_counted_is_named(all_ranks):
    first, second = all_ranks["halo"]
    found = replace(first, rank=1).rehearsed().findings
    assert any(each.startswith("layer0.exchange: shape must be (") for each in found), found
    assert second.rehearsed().findings == ()


def test_shapes_that_do_not_fit_are_told_with_the_task(all_ranks):
    rank = all_ranks["halo"][0]
    (work,) = rank.works
    fewer = replace(work, rows_from=(0, work.rows_from[1] - 1))
    (sentence,) = replace(rank, works=(fewer,)).rehearsed(from_graph=False).findings
    assert sentence.startswith("layer0.attention of step 1: ")
    assert "must have the shape" in sentence


def test_what_cannot_run_without_numbers_is_told_and_not_passed_over(all_ranks, monkeypatch):
    def by_value(x_ND: torch.Tensor) -> torch.Tensor:
        return x_ND * float(x_ND.max())

    monkeypatch.setattr(operations, "GELU", replace(operations.GELU, function=by_value))
    found = all_ranks["halo"][0].rehearsed()
    assert found.findings == ()
    (sentence,) = found.unchecked
    assert sentence.startswith("layer0.feed_forward_activation of step 1: aten._local_scalar_dense")


# --- Attention in parts: what it gives on fake tensors is what it gives.


def shapes_of(*tensors):
    return [None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in tensors]


@pytest.mark.parametrize(("dtype", "has_bias"), [(torch.float32, False), (torch.bfloat16, True)])
def test_attention_in_parts_has_the_shapes_on_fake_tensors_that_it_has(dtype, has_bias):
    graph = EdgeGraph(
        indptr_N1=torch.tensor([0, 2, 2, 5]), source_E=torch.tensor([0, 3, 1, 2, 3], dtype=torch.int32), num_sources=4
    )

    def through():
        q, k, v = (torch.ones(rows, 2, 6, dtype=dtype) for rows in (3, 4, 4))
        bias = torch.ones(5, 2) if has_bias else None
        whole = parts.attend_part(q, k, v, bias, graph)
        parts.merge_into(whole, parts.attend_part(q, k, v, bias, graph), 0)
        stats = parts.row_stats(q, whole)
        of_sources = parts.backward_sources(q, stats, whole, q, k, v, bias, graph, bias_gradient=has_bias)
        of_targets = parts.backward_targets(q, stats, whole, q, k, v, bias, graph, bias_gradient=has_bias)
        rows = torch.zeros(3, 6, dtype=dtype)
        parts.add_rows_(rows, torch.tensor([0, 2]), torch.ones(2, 6, dtype=dtype), (1, 1))
        return shapes_of(whole.out, whole.lse, whole.rest, stats, *of_sources, *of_targets, rows)

    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        without_numbers = through()
    assert without_numbers == through()
