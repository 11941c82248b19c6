"""Programs and executions that were made wrong on purpose fail the check."""

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from simulator.specs.gradients import GradientCompression
from simulator.specs.plan import Recompute
from simulator.specs.program import Task, TaskKind
from simulator.specs.units import Dtype
from simulator.workload import lower
from tests.conformance.cases import POWER_SGD, TOP_K, TRAIN, Prepared, cluster_of
from tests.conformance.check import check_conformance, check_named_time
from tests.conformance.observe import Operator

pytestmark = [pytest.mark.dist, pytest.mark.alone]

Tasks: TypeAlias = tuple[Task, ...]


def lowered_with(
    prepared: Prepared, *, step: int | None = None, model: dict[str, Any] | None = None, **plan: Any
) -> Tasks:
    """Return the first rank's tasks of a case whose plan, model or step was changed."""
    return lower(
        dataclasses.replace(prepared.plan, **plan),
        prepared.spec,
        dataclasses.replace(prepared.case.model, **model or {}),
        cluster_of(prepared.kind),
        step=prepared.case.step if step is None else step,
        seed=TRAIN.seed,
    ).tasks[0]


def without(name: str) -> Callable[[Prepared], Tasks]:
    def mutate(prepared: Prepared) -> Tasks:
        return tuple(task for task in prepared.lowered()[0] if task.name != name)

    return mutate


def with_changed(changed: str, /, **fields: Any) -> Callable[[Prepared], Tasks]:
    def mutate(prepared: Prepared) -> Tasks:
        tasks = prepared.lowered()[0]
        return tuple(dataclasses.replace(task, **fields) if task.name == changed else task for task in tasks)

    return mutate


def with_swapped(first: str, second: str) -> Callable[[Prepared], Tasks]:
    def mutate(prepared: Prepared) -> Tasks:
        tasks = list(prepared.lowered()[0])
        index, other = ([task.name for task in tasks].index(name) for name in (first, second))
        tasks[index], tasks[other] = tasks[other], tasks[index]
        return tuple(tasks)

    return mutate


def with_one_row_more_sent(prepared: Prepared) -> Tasks:
    """Lower a plan in which the second part needs one row more of the first."""
    parts = list(prepared.plan.partition.parts)
    from_first, *others = parts[1].halo_rows_from
    parts[1] = dataclasses.replace(parts[1], halo_rows_from=(from_first + 1, *others))
    return lowered_with(prepared, partition=dataclasses.replace(prepared.plan.partition, parts=tuple(parts)))


def twice(name: str) -> Callable[[Prepared], Tasks]:
    def mutate(prepared: Prepared) -> Tasks:
        return tuple(task for task in prepared.lowered()[0] for _ in range(1 + (task.name == name)))

    return mutate


EVERYTHING = "mixed exchanges, everything"
OVERLAPPED = "overlapped"
BESIDE = "buckets beside the backward pass, everything"
MUTATIONS: dict[str, tuple[str, Callable[[Prepared], Tasks], str]] = {
    "a dropped collective": (
        EVERYTHING,
        without("layer1.exchange"),
        "layer1.exchange: lowered 0 times, but ran 1 times",
    ),
    "a dropped collective of the backward pass": (
        EVERYTHING,
        without("layer0.exchange.backward"),
        "layer0.exchange.backward: lowered 0 times, but ran 1 times",
    ),
    "a dropped collective of a recomputation": (
        EVERYTHING,
        without("layer0.exchange.recompute"),
        "layer0.exchange.recompute: lowered 0 times, but ran 1 times",
    ),
    "a dropped backward task": (
        "full graph",
        without("layer1.feed_forward_up.backward"),
        "layer1.feed_forward_up.backward: lowered 0 times, but ran 1 times",
    ),
    "a task too many": (
        "full graph",
        twice("layer0.attention"),
        "layer0.attention: lowered 2 times, but ran 1 times",
    ),
    "a task that never runs": (
        "full graph",
        with_changed("head.norm", name="head.normalisation"),
        "head.normalisation: lowered 1 times, but ran 0 times",
    ),
    "a changed width": (
        "halo",
        lambda prepared: lowered_with(prepared, model={"width": 27}),
        "layer0.attention_norm",
    ),
    "a changed feed-forward width": (
        "full graph",
        lambda prepared: lowered_with(prepared, model={"feed_forward_width": 48}),
        "layer1.feed_forward_down.backward",
    ),
    "other heads": (
        "full graph",
        lambda prepared: lowered_with(prepared, model={"num_heads": 4}),
        "layer0.attention.backward",
    ),
    "one row more that is sent": ("halo", with_one_row_more_sent, "layer1.exchange (0, "),
    "one row more that is packed": ("halo", with_one_row_more_sent, "layer0.pack ("),
    "another size of buckets": (
        "clusters on two",
        lambda prepared: lowered_with(prepared, gradient_bucket_bytes=5 * 1024),
        "gradients.bucket",
    ),
    "buckets of another size in the same number": (
        "clusters on two",
        with_changed("gradients.bucket1", shape=(4004,)),
        "gradients.bucket1 (4004,): should have sent (4004,) bytes, but sent (4000,)",
    ),
    "a pass over sources of fewer edges": (
        OVERLAPPED,
        with_changed("layer0.attention_sources.backward", shape=(1, 2, 3, 0, 0, 1, 4)),
        "layer0.attention_sources.backward (1, 2, 3, 0, 0, 1, 4): should have had",
    ),
    "a pass over targets that is left out": (
        OVERLAPPED,
        without("layer0.attention_targets.backward"),
        "layer0.attention_targets.backward: lowered 0 times, but ran 1 times",
    ),
    "gradients that travel behind the pass over targets": (
        OVERLAPPED,
        with_swapped("layer0.exchange.backward", "layer0.attention_targets.backward"),
        "layer0.attention_targets.backward is lowered where layer0.exchange.backward ran",
    ),
    "a merge of other rows": (
        OVERLAPPED,
        with_changed("layer1.merge", shape=(5, 4, 3, 2)),
        "layer1.merge (5, 4, 3, 2): should have had",
    ),
    "gradients that are added to a copy of own rows": (
        OVERLAPPED,
        with_changed("layer0.pack.backward", shape=(7, 5, 3)),
        "layer0.pack.backward (7, 5, 3): should have had",
    ),
    "collectives in another order": (
        EVERYTHING,
        with_swapped("gradients.bucket0", "gradients.bucket1"),
        "order of collectives: gradients.bucket1 is lowered where gradients.bucket0 ran",
    ),
    "a bucket that begins too late": (
        BESIDE,
        with_swapped("gradients.bucket2", "layer2.attention_output.backward"),
        "layer2.attention_output.backward is lowered where gradients.bucket2 ran",
    ),
    "buckets that begin behind the backward pass": (
        BESIDE,
        lambda prepared: lowered_with(prepared, overlap_gradients=False),
        "order of",
    ),
    "gradients that travel as they are": (
        "gradients in bf16",
        lambda prepared: lowered_with(prepared, gradient_compression=GradientCompression()),
        "gradients.bucket0.compress: lowered 0 times, but ran 1 times",
    ),
    "a loss that is rounded": (
        "gradients in bf16",
        without("gradients.loss"),
        "gradients.loss: lowered 0 times, but ran 1 times",
    ),
    "more entries of top-k": (
        "top-k",
        lambda prepared: lowered_with(prepared, gradient_compression=replace(TOP_K, kept_ratio=0.2)),
        "bytes, but sent",
    ),
    "another number of ranks whose entries are added": (
        "top-k",
        with_changed("gradients.bucket0.decompress", shape=(1, 2, 3)),
        "gradients.bucket0.decompress (1, 2, 3): should have had",
    ),
    "thinner factors": (
        "PowerSGD",
        lambda prepared: lowered_with(prepared, gradient_compression=replace(POWER_SGD, matrix_rank=1)),
        "gradients.bucket0.compress (",
    ),
    "a second collective of a bucket behind the next bucket's first": (
        "PowerSGD beside the backward pass",
        with_swapped("gradients.bucket0.right", "gradients.bucket1"),
        "order of",
    ),
    "tasks in another order": (
        "full graph",
        with_swapped("layer0.feed_forward_norm", "layer0.feed_forward_up"),
        "order of tasks that are not recomputed: layer0.feed_forward_up is lowered where layer0.feed_forward_norm ran",
    ),
    "a collective of another kind": (
        "all-gather",
        with_changed("layer0.exchange.backward", kind=TaskKind.ALL_REDUCE),
        "should have called all_reduce, but called reduce_scatter",
    ),
    "another group": (
        "all-gather",
        with_changed("layer0.exchange", group=(0,)),
        "should have been among ranks (0,), but was among (0, 1)",
    ),
    "another number format": (
        "halo, bf16, recomputed",
        lambda prepared: lowered_with(prepared, precision=Dtype.FLOAT32),
        "layer0.query_key_value",
    ),
    "a layer too few recomputed": (
        "recomputed",
        lambda prepared: lowered_with(prepared, recompute=(Recompute.NONE, Recompute.LAYER)),
        "layer0.attention.recompute: lowered 0 times, but ran 1 times",
    ),
    "no dropout": (
        "halo",
        lambda prepared: lowered_with(prepared, model={"dropout_ratio": 0.0}),
        "input.dropout: lowered 0 times, but ran 1 times",
    ),
    "the batch of another step": (
        "cluster batches",
        lambda prepared: lowered_with(prepared, step=1),
        "layer0.attention (",
    ),
    "edges between the parts of a batch": (
        "isolated clusters",
        lambda prepared: lowered_with(prepared, between_edges=True),
        "batch (700, ",
    ),
    "batches that are kept": (
        "clusters on two",
        lambda prepared: lowered_with(prepared, keep_batches=True),
        "batch: lowered 0 times, but ran 1 times",
    ),
    "expected samples in place of those that were drawn": ("sampled", lowered_with, "layer0.targets ("),
    "a sample of another step": (
        "sampled",
        lambda prepared: dataclasses.replace(prepared, case=dataclasses.replace(prepared.case, step=2)).lowered()[0],
        "layer1.attention (",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_conformance_fails_on_purpose(observed, mutation):
    name, mutate, reason = MUTATIONS[mutation]
    prepared, steps = observed[name]
    found = check_conformance(mutate(prepared), steps[0])
    assert any(reason in sentence for sentence in found), found


# --- Executions that do more than their program says.


def test_conformance_fails_when_a_task_runs_another_product(observed):
    prepared, (step,) = observed["full graph"]
    product = Operator(name="aten::mm", dims=((5, 6), (6, 7)), types=("float", "float"), numbers=())
    tasks = tuple(
        dataclasses.replace(task, operators=(*task.operators, product)) if task.name == "head.norm" else task
        for task in step.tasks
    )
    shape = prepared.lowered()[0][[task.name for task in step.tasks].index("head.norm")].shape
    found = check_conformance(prepared.lowered()[0], dataclasses.replace(step, tasks=tasks))
    assert found == [f"head.norm {shape}: also ran aten::mm (5, 6) x (6, 7)"]


def test_conformance_fails_when_a_collective_runs_outside_of_tasks(observed):
    prepared, steps = observed["halo"]
    step = dataclasses.replace(
        steps[0], num_calls=steps[0].num_calls + 1, num_collective_operators=steps[0].num_calls + 1
    )
    assert check_conformance(prepared.lowered()[0], step) == [
        f"1 of {step.num_calls} collectives ran outside of all tasks"
    ]


def test_conformance_fails_when_a_collective_was_not_seen_at_the_call(observed):
    prepared, steps = observed["halo"]
    step = dataclasses.replace(steps[0], num_collective_operators=steps[0].num_calls + 1)
    assert check_conformance(prepared.lowered()[0], step) == [
        f"{step.num_calls + 1} collectives reached the library, but only {step.num_calls} were seen at the call"
    ]


def test_conformance_fails_when_time_passes_outside_of_tasks(observed):
    _, steps = observed["halo"]
    steps = [dataclasses.replace(step, named_seconds=0.949 * step.busy_seconds) for step in steps]
    assert check_named_time(steps) == ["only 94.9 % of the time lies inside tasks, less than 95 %"]
