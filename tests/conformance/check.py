"""Holds what ran against what was lowered."""

import dataclasses
from collections import Counter
from collections.abc import Sequence

from simulator.specs.plan import Exchange
from simulator.specs.program import ATTENTIONS, Task
from tests.conformance.cases import Prepared
from tests.conformance.evidence import missing_evidence
from tests.conformance.observe import ObservedStep, ObservedTask

# Of the time of operators or kernels, this much must lie inside tasks.
MIN_NAMED_RATIO = 0.95
_RECOMPUTED = ".recompute"


def check_conformance(program_tasks_of_rank: Sequence[Task], observed_step: ObservedStep) -> list[str]:
    """Return in sentences what a rank did otherwise than its program says; empty if nothing.

    Args:
        program_tasks_of_rank: of the step that was observed, as lowered.
        observed_step: what the rank did.
    """
    found = _name_discrepancies(program_tasks_of_rank, observed_step.tasks)
    observed = {task.name: task for task in observed_step.tasks}
    for task in program_tasks_of_rank:
        if task.name in observed:
            check = _call_discrepancies if task.kind.is_collective else missing_evidence
            found += [f"{task.name} {task.shape}: {reason}" for reason in check(task, observed[task.name])]
    return found + _discrepancies_outside_tasks(program_tasks_of_rank, observed_step)


def lowered_as_seen(prepared: Prepared, steps: Sequence[ObservedStep]) -> list[tuple[Task, ...]]:
    """Return the tasks of each rank; in batches of several parts that edges join, with the long rows that were seen.

    The plan counts too many edges of long targets there, and too few of long sources where one rank owns them all. What
    is made ahead, in a thread that no profile shows, is compared here.
    """
    plan, programs = prepared.plan, list(prepared.lowered())
    if plan.prefetch_batches > 0:
        ahead = [tasks[0] for tasks in programs]
        assert [(task.name, task.blocks_host) for task in ahead] == [("batch", False)] * plan.num_ranks
        assert [task.shape for task in ahead] == [step.made_ahead for step in steps]
        programs = [tasks[1:] for tasks in programs]
    if plan.parts_per_batch in (1, plan.partition.num_parts) or not plan.between_edges:
        return programs
    found = []
    for tasks, step in zip(programs, steps, strict=True):
        seen = {
            task.name: operands.counts if operands.function == "edge_attention" else operands.counts[3:5]
            for task in step.tasks
            for operands in task.operands
            if operands.function in ("edge_attention", "attend_part", "backward_sources", "backward_targets")
        }
        for task in tasks:
            if task.kind in ATTENTIONS and task.name in seen:
                of_targets, of_sources = seen[task.name]
                assert task.shape[3] >= of_targets
                is_exact = plan.graph_parallel_degree > 1 and Exchange.HEAD_ALL_TO_ALL not in plan.exchange
                assert task.shape[4] == of_sources if is_exact else task.shape[4] <= of_sources
        found.append(
            tuple(
                dataclasses.replace(task, shape=(*task.shape[:3], *seen[task.name], *task.shape[5:]))
                if task.kind in ATTENTIONS and task.name in seen
                else task
                for task in tasks
            )
        )
    return found


def check_named_time(observed_steps: Sequence[ObservedStep]) -> list[str]:
    """Return in a sentence that too much time passed outside of tasks; empty if not.

    Args:
        observed_steps: of all ranks, since one without nodes has little to do but what every step needs.
    """
    ratio = sum(step.named_seconds for step in observed_steps) / sum(step.busy_seconds for step in observed_steps)
    if ratio >= MIN_NAMED_RATIO:
        return []
    return [f"only {100 * ratio:.1f} % of the time lies inside tasks, less than {100 * MIN_NAMED_RATIO:.0f} %"]


def _name_discrepancies(lowered: Sequence[Task], observed: Sequence[ObservedTask]) -> list[str]:
    """Compare names, counts and order; a layer's recomputation lies inside a backward task, wherever it is needed."""
    lowered_names, observed_names = [task.name for task in lowered], [task.name for task in observed]
    counts, observed_counts = Counter(lowered_names), Counter(observed_names)
    found = [
        f"{name}: lowered {counts[name]} times, but ran {observed_counts[name]} times"
        for name in dict.fromkeys([*lowered_names, *observed_names])
        if counts[name] != observed_counts[name]
    ]
    if found:
        return found
    collectives = {task.name for task in lowered if task.kind.is_collective}
    for title, names in (
        ("tasks that are not recomputed", {name for name in lowered_names if not name.endswith(_RECOMPUTED)}),
        ("recomputed tasks", {name for name in lowered_names if name.endswith(_RECOMPUTED)}),
        ("collectives", collectives),
    ):
        pairs = zip(
            [name for name in lowered_names if name in names],
            [name for name in observed_names if name in names],
            strict=True,
        )
        wrong = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if wrong:
            found.append(f"order of {title}: {wrong[0]} is lowered where {wrong[1]} ran")
    return found


def _call_discrepancies(task: Task, observed: ObservedTask) -> list[str]:
    """Compare a collective with the calls inside its range."""
    if len(observed.calls) != 1:
        return [f"should have made one call, but made {len(observed.calls)}"]
    call = observed.calls[0]
    found = []
    if call.function != task.kind.value:
        found.append(f"should have called {task.kind}, but called {call.function}")
    if call.sent_bytes != task.shape:
        found.append(f"should have sent {task.shape} bytes, but sent {call.sent_bytes}")
    if call.ranks != task.group:
        found.append(f"should have been among ranks {task.group}, but was among {call.ranks}")
    return found


def _discrepancies_outside_tasks(lowered: Sequence[Task], observed: ObservedStep) -> list[str]:
    found = []
    num_calls = sum(len(task.calls) for task in observed.tasks)
    if num_calls != observed.num_calls:
        found.append(f"{observed.num_calls - num_calls} of {observed.num_calls} collectives ran outside of all tasks")
    if observed.num_collective_operators != observed.num_calls:
        found.append(
            f"{observed.num_collective_operators} collectives reached the library, but only {observed.num_calls} were "
            "seen at the call"
        )
    names = {task.name for task in lowered}
    for task in observed.tasks:
        if task.calls and task.name in names and not _is_collective(task.name, lowered):
            found.append(f"{task.name}: a collective ran inside of a compute task")
    return found


def _is_collective(name: str, lowered: Sequence[Task]) -> bool:
    return any(task.name == name and task.kind.is_collective for task in lowered)
