"""The engine by hand, against one simpy process for each host thread and stream, and by its invariants."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any, Never

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from simulator.engine import run_program, step_seconds
from simulator.errors import PlanError
from simulator.network import Network
from simulator.specs.cost import CollectiveCost, Flow, Port, TaskCost
from simulator.specs.program import Phase, Program, Stream, Task, TaskKind
from simulator.specs.trace import Span
from simulator.specs.units import Dtype

UNCAPPED = 1e15
FREE = (0.0, 0.0, ())  # host, latency and flows of a collective that costs nothing


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A program and the prices of all its tasks: of compute tasks by rank and name, of collectives by name."""

    program: Program
    computes: Mapping[tuple[int, str], TaskCost]
    collectives: Mapping[str, CollectiveCost]
    capacities: Mapping[Port, float]

    def run(self) -> Sequence[Span]:
        return run_program(
            self.program,
            compute_cost=lambda rank, task: self.computes[rank, task.name],
            collective_cost=lambda tasks: self.collectives[tasks[0].name],
            port_capacities=self.capacities,
        )

    def cost(self, rank: int, task: Task) -> TaskCost | CollectiveCost:
        return self.collectives[task.name] if task.group else self.computes[rank, task.name]


def compute(name: str, **fields) -> Task:
    return Task(name=name, kind=TaskKind.GELU, phase=Phase.FORWARD, shape=(2, 3), dtype=Dtype.FLOAT32, **fields)


def collective(name: str, group: Sequence[int], *, kind=TaskKind.ALL_REDUCE, **fields) -> Task:
    fields = {"stream": Stream.COMMUNICATION, **fields}
    return Task(
        name=name, kind=kind, phase=Phase.FORWARD, shape=(8,), dtype=Dtype.FLOAT32, group=tuple(group), **fields
    )


def priced(*ranks: Sequence[Task], costs: Mapping[str, Any], capacities: Mapping[Port, float] | None = None, **rest):
    """Price tasks by name: (host, device) seconds of a compute task, (host, latency, flows) of a collective.

    A name such as "1:work" prices the task on rank 1 only.
    """
    computes, collectives = {}, {}
    for rank, tasks in enumerate(ranks):
        for task in tasks:
            cost = costs.get(f"{rank}:{task.name}", costs.get(task.name))
            if task.group:
                host, latency, flows = cost
                collectives[task.name] = CollectiveCost(host_seconds=host, latency_seconds=latency, flows=flows)
            else:
                computes[rank, task.name] = TaskCost(host_seconds=cost[0], device_seconds=cost[1])
    program = Program(tasks=tuple(tuple(tasks) for tasks in ranks))
    return Priced(program=program, computes=computes, collectives=collectives, capacities=capacities or {}, **rest)


def flow(num_bytes: float, *ports: Port, cap: float = UNCAPPED) -> Flow:
    return Flow(num_bytes=num_bytes, ports=ports, max_bytes_per_second=cap)


def times(spans: Sequence[Span]) -> list[tuple[int, str, float, float]]:
    """Return rank, name, start and end of each span."""
    return [(span.rank, span.name, span.start_seconds, span.end_seconds) for span in spans]


def test_a_chain_bound_by_its_host_takes_as_long_as_the_host():
    tasks = [compute(name) for name in "abc"]
    spans = priced(tasks, costs=dict.fromkeys("abc", (4.0, 1.0))).run()
    assert times(spans) == [(0, "a", 4.0, 5.0), (0, "b", 8.0, 9.0), (0, "c", 12.0, 13.0)]
    assert [span.host_seconds for span in spans] == [4.0] * 3


def test_a_chain_bound_by_its_device_takes_as_long_as_the_device_after_the_first_issue():
    tasks = [compute(name) for name in "abc"]
    spans = priced(tasks, costs=dict.fromkeys("abc", (1.0, 4.0))).run()
    assert times(spans) == [(0, "a", 1.0, 5.0), (0, "b", 5.0, 9.0), (0, "c", 9.0, 13.0)]


def test_the_host_waits_for_a_task_that_blocks_it():
    tasks = [compute("a"), compute("b", blocks_host=True), compute("c")]
    spans = priced(tasks, costs=dict.fromkeys("abc", (1.0, 4.0))).run()
    # b is issued at 2 and runs from 5 to 9; only then is c issued, at 10.
    assert times(spans) == [(0, "a", 1.0, 5.0), (0, "b", 5.0, 9.0), (0, "c", 10.0, 14.0)]


def test_a_task_waits_for_tasks_on_other_streams():
    tasks = [
        compute("a"),
        compute("copy", stream=Stream.HOST_TO_DEVICE),
        compute("b"),
        compute("c", waits_for=(1,)),
        compute("out", stream=Stream.DEVICE_TO_HOST, waits_for=(0, 3)),
    ]
    spans = priced(tasks, costs={**dict.fromkeys("abc", (0.0, 1.0)), "copy": (0.0, 5.0), "out": (0.0, 1.0)}).run()
    assert times(spans) == [
        (0, "a", 0.0, 1.0),
        (0, "copy", 0.0, 5.0),
        (0, "b", 1.0, 2.0),
        (0, "c", 5.0, 6.0),
        (0, "out", 6.0, 7.0),
    ]


def test_a_reduction_goes_on_beside_tasks_and_exchanges_and_shares_their_ports():
    tasks = [
        compute("a"),
        collective("reduction", (0, 1), stream=Stream.GRADIENTS, waits_for=(0,)),
        compute("b"),
        collective("exchange", (0, 1), waits_for=(2,)),
        compute("c", waits_for=(3,)),
        compute("update", waits_for=(1,)),
    ]
    flows = {rank: flow(12.0, ("out", rank)) for rank in (0, 1)}
    costs = {
        **dict.fromkeys(("a", "b", "c", "update"), (0.0, 2.0)),
        "reduction": (0.0, 0.0, tuple(flows.values())),
        "exchange": (0.0, 0.0, (flow(6.0, ("out", 0)), flow(6.0, ("out", 1)))),
    }
    spans = priced(tasks, tasks, costs=costs, capacities={("out", 0): 2.0, ("out", 1): 2.0}).run()
    # The reduction has moved 4 of its 12 bytes when the exchange begins at 4. Both then move 1 a second until the
    # exchange ends at 10, and the reduction's last 2 bytes take until 11. Task c has run beside it, from 10 to 12.
    assert [found for found in times(spans) if found[0] == 0] == [
        (0, "a", 0.0, 2.0),
        (0, "reduction", 2.0, 11.0),
        (0, "b", 2.0, 4.0),
        (0, "exchange", 4.0, 10.0),
        (0, "c", 10.0, 12.0),
        (0, "update", 12.0, 14.0),
    ]


def test_an_early_rank_waits_in_a_collective_for_a_late_one():
    tasks = [compute("work"), collective("sum", (0, 1), stream=Stream.COMPUTE), compute("after")]
    costs = {
        "0:work": (0.0, 2.0),
        "1:work": (0.0, 5.0),
        "sum": (0.5, 1.0, (flow(6.0, ("out", 0)), flow(8.0, ("out", 1)))),
        "after": (0.0, 1.0),
    }
    spans = priced(tasks, tasks, costs=costs, capacities={("out", 0): 2.0, ("out", 1): 2.0}).run()
    # Begins at 5; 1 s of latency; 8 bytes at 2/s end at 10.
    assert times(spans) == [
        (0, "work", 0.0, 2.0),
        (0, "sum", 2.0, 10.0),
        (0, "after", 10.0, 11.0),
        (1, "work", 0.0, 5.0),
        (1, "sum", 5.0, 10.0),
        (1, "after", 10.0, 11.0),
    ]
    assert [span.waiting_seconds for span in spans] == [0.0, 3.0, 0.0, 0.0, 0.0, 0.0]
    assert [span.host_seconds for span in spans if span.name == "sum"] == [0.5, 0.5]


def test_a_rank_arrives_late_by_the_time_its_host_takes_to_issue():
    # Rank 1 runs nothing before, but its host issues "sum" only after 3 s.
    costs = {"work": (3.0, 0.0), "sum": (0.5, 0.0, (flow(4.0, cap=1.0),))}
    spans = priced([collective("sum", (0, 1))], [compute("work"), collective("sum", (0, 1))], costs=costs).run()
    assert times(spans) == [(0, "sum", 0.5, 7.5), (1, "work", 3.0, 3.0), (1, "sum", 3.5, 7.5)]
    assert [span.waiting_seconds for span in spans] == [3.0, 0.0, 0.0]


def test_a_collective_on_its_own_stream_hides_behind_compute():
    tasks = [
        compute("a"),
        collective("sum", (0, 1), waits_for=(0,)),
        compute("b"),
        compute("c", waits_for=(1,)),
    ]
    costs = {"a": (0.0, 1.0), "sum": (0.0, 0.0, (flow(4.0, cap=1.0),)), "b": (0.0, 3.0), "c": (0.0, 1.0)}
    spans = priced(tasks, tasks, costs=costs).run()
    one_rank = [("a", 0.0, 1.0), ("sum", 1.0, 5.0), ("b", 1.0, 4.0), ("c", 5.0, 6.0)]
    assert times(spans) == [(rank, *rest) for rank in (0, 1) for rest in one_rank]


def test_collectives_that_share_a_port_slow_each_other():
    # Pairs 0, 1 and 2, 3 send 4 and 2 bytes through one port of 2/s: 1/s each until 2 s, then 2/s for the 2 bytes left.
    core = ("core", 0)
    pairs = [(0, 1), (0, 1), (2, 3), (2, 3)]
    ranks = [[collective(f"sum{pair}", pair)] for pair in pairs]
    costs = {"sum(0, 1)": (0.0, 0.0, (flow(4.0, core),)), "sum(2, 3)": (0.0, 0.0, (flow(2.0, core),))}
    spans = priced(*ranks, costs=costs, capacities={core: 2.0}).run()
    assert [span.end_seconds for span in spans] == [3.0, 3.0, 2.0, 2.0]


def test_a_second_collective_that_begins_midway_shares_from_then_on():
    # 8 bytes at 2/s; from 1 s on shared with 3 bytes: these end at 4 s, and the 3 left of the first at 5.5 s.
    core = ("core", 0)
    ranks = [[collective("x", (0,))], [collective("y", (1,))]]
    costs = {"x": (0.0, 0.0, (flow(8.0, core),)), "y": (0.0, 1.0, (flow(3.0, core),))}
    spans = priced(*ranks, costs=costs, capacities={core: 2.0}).run()
    assert [span.end_seconds for span in spans] == [5.5, 4.0]


def test_a_blocking_collective_holds_the_hosts_of_its_ranks():
    tasks = [collective("norm", (0, 1), blocks_host=True), compute("step")]
    costs = {"norm": (1.0, 2.0, ()), "step": (1.0, 1.0)}
    spans = priced(tasks, tasks, costs=costs).run()
    one_rank = [("norm", 1.0, 3.0), ("step", 4.0, 5.0)]
    assert times(spans) == [(rank, *rest) for rank in (0, 1) for rest in one_rank]


def test_tasks_without_cost_are_legal_and_keep_their_order():
    tasks = [compute("a"), collective("sum", (0,)), compute("b", waits_for=(1,), blocks_host=True), compute("c")]
    spans = priced(tasks, costs={**dict.fromkeys("abc", (0.0, 0.0)), "sum": FREE}).run()
    assert times(spans) == [(0, name, 0.0, 0.0) for name in ("a", "sum", "b", "c")]


def test_rounding_of_the_clock_ends_no_collective_before_it_begins():
    # "y" waits for its issue, which is known once "x" has ended; from there the clock can only hit 1.75.
    first_seconds, second_seconds = 0.5 + 2**-53, 1.75 + 2**-52
    assert first_seconds + (second_seconds - first_seconds) < second_seconds
    tasks = [collective("x", (0,)), collective("y", (0,)), collective("z", (0,))]
    costs = {"x": (0.0, first_seconds, ()), "y": (second_seconds, 0.0, ()), "z": FREE}
    spans = priced(tasks, costs=costs).run()
    assert times(spans)[1:] == [(0, "y", second_seconds, second_seconds), (0, "z", second_seconds, second_seconds)]


def test_a_span_carries_what_its_task_says():
    (span,) = priced([compute("a", stream=Stream.HOST_TO_DEVICE)], costs={"a": (1.0, 2.0)}).run()
    assert span == Span(
        rank=0,
        step=0,
        stream=Stream.HOST_TO_DEVICE,
        name="a",
        kind=TaskKind.GELU,
        phase=Phase.FORWARD,
        shape=(2, 3),
        start_seconds=1.0,
        duration_seconds=2.0,
        waiting_seconds=0.0,
        host_seconds=1.0,
    )


def never(*arguments) -> Never:
    raise AssertionError(f"must not be priced: {arguments}")


def test_a_collective_is_priced_once_from_its_tasks_in_the_order_of_its_group():
    calls = []

    def collective_cost(tasks):
        calls.append([task.shape for task in tasks])
        return CollectiveCost(host_seconds=0.0, latency_seconds=0.0, flows=())

    task = collective("x", (2, 0, 1))
    program = Program(tasks=tuple((replace(task, shape=(rank,)),) for rank in range(3)))
    run_program(program, compute_cost=never, collective_cost=collective_cost, port_capacities={})
    assert calls == [[(2,), (0,), (1,)]]


def test_no_spans_take_no_time():
    assert priced([], [], costs={}).run() == ()
    assert step_seconds(()) == 0.0


def test_a_collective_that_a_rank_never_issues_is_named_with_its_ranks():
    ranks = [[collective("sum", range(4))]] * 2 + [[compute("a")], [collective("sum", range(4))]]
    case = priced(*ranks, costs={"sum": FREE, "a": (0.0, 0.0)})
    message = r'collective "sum" \(all_reduce of ranks 0-3\) never begins \(waiting: ranks 0-1, 3; missing: rank 2\)'
    with pytest.raises(PlanError, match=message):
        case.run()


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (collective("sum", (0, 1), kind=TaskKind.ALL_GATHER), r'rank 1 with "sum" \(all_gather of ranks 0-1\)'),
        (collective("sum", (1, 0)), r'rank 1 with "sum" \(all_reduce of ranks 1, 0\)'),
        (collective("sum", (0, 1, 2)), r'rank 1 with "sum" \(all_reduce of ranks 0-2\)'),
    ],
)
def test_a_collective_of_another_kind_or_group_is_a_mismatch(other, found):
    with pytest.raises(PlanError, match=rf"waiting: rank 0; missing: rank 1\).*but found {found}$"):
        priced([collective("sum", (0, 1))], [other], costs={"sum": FREE}).run()


@pytest.mark.parametrize("group", [(1, 2), ()])
def test_a_rank_outside_of_a_group_must_not_issue_its_collective(group):
    program = Program(tasks=((collective("sum", group),), (), ()))
    with pytest.raises(PlanError, match=r'"sum" .* ranks of its group only, got rank 0$'):
        run_program(program, compute_cost=never, collective_cost=never, port_capacities={})


def test_collectives_issued_in_another_order_are_named_with_the_ranks_that_wait_in_each():
    x, y = collective("x", (0, 1)), collective("y", (0, 1))
    message = (
        r'collective "x" \(all_reduce of ranks 0-1\) never begins \(waiting: rank 0; missing: rank 1\): '
        r'.* in one order, but found rank 1 in "y" \(all_reduce of ranks 0-1\)$'
    )
    with pytest.raises(PlanError, match=message):
        priced([x, y], [y, x], costs={"x": FREE, "y": FREE}).run()


def test_hosts_that_block_in_different_collectives_are_a_mismatch_too():
    ring = [[collective(name, group, blocks_host=True, stream=stream) for name, group, stream in rank] for rank in (
        [("x", (0, 1), Stream.COMPUTE), ("z", (0, 2), Stream.COMMUNICATION)],
        [("y", (1, 2), Stream.COMPUTE), ("x", (0, 1), Stream.COMMUNICATION)],
        [("z", (0, 2), Stream.COMPUTE), ("y", (1, 2), Stream.COMMUNICATION)],
    )]  # fmt: skip
    with pytest.raises(PlanError, match=r'"x" .*waiting: rank 0; missing: rank 1\).*rank 1 in "y" .*ranks 1-2\)$'):
        priced(*ring, costs={"x": FREE, "y": FREE, "z": FREE}).run()


@pytest.mark.parametrize("waits_for", [(1,), (0,), (-1,)])
def test_waiting_for_a_task_that_is_not_earlier_is_our_own_mistake(waits_for):
    with pytest.raises(AssertionError, match="not earlier"):
        priced([compute("a", waits_for=waits_for), compute("b")], costs=dict.fromkeys("ab", (0.0, 0.0))).run()


@pytest.mark.parametrize("cost", [(-1.0, 0.0), (0.0, -1.0), (float("inf"), 0.0), (0.0, float("nan"))])
def test_a_cost_below_zero_or_not_finite_is_our_own_mistake(cost):
    with pytest.raises(AssertionError, match="seconds of a must be"):
        priced([compute("a")], costs={"a": cost}).run()


seconds = st.sampled_from([0.0, 0.0, 1.0, 2.0]) | st.floats(0.0, 5.0)
ports = st.sampled_from([("port", index) for index in range(3)])


@st.composite
def priced_programs(draw, max_ranks=4, max_tasks=24, share_ports=True) -> Priced:
    """Programs whose collectives have one order on all ranks; their flows share ports, or only caps limit them."""
    num_ranks = draw(st.integers(1, max_ranks))
    ranks: list[list[Task]] = [[] for _ in range(num_ranks)]
    flows = st.builds(
        Flow,
        num_bytes=st.sampled_from([0.0, 1.0, 4.0]) | st.floats(0.0, 10.0),
        ports=st.lists(ports, unique=True, max_size=2).map(tuple) if share_ports else st.just(()),
        max_bytes_per_second=st.sampled_from([1.0, 2.0]) | st.floats(0.5, 10.0),
    )
    computes, collectives = {}, {}
    for number in range(draw(st.integers(0, max_tasks))):
        members = draw(st.lists(st.integers(0, num_ranks - 1), unique=True, min_size=1))
        is_collective = draw(st.booleans())
        for rank in members:
            fields = {
                "name": f"task{number}",
                "stream": draw(st.sampled_from(Stream)),
                "blocks_host": draw(st.integers(0, 5)) == 0,
                "waits_for": tuple(draw(st.lists(st.integers(0, len(ranks[rank]) - 1), max_size=2, unique=True)))
                if ranks[rank]
                else (),
            }
            if is_collective:
                ranks[rank].append(collective(group=members, **fields))
            else:
                ranks[rank].append(compute(**fields))
                computes[rank, f"task{number}"] = TaskCost(host_seconds=draw(seconds), device_seconds=draw(seconds))
        if is_collective:
            collectives[f"task{number}"] = CollectiveCost(
                host_seconds=draw(seconds),
                latency_seconds=draw(seconds),
                flows=tuple(draw(st.lists(flows, max_size=3))),
            )
    return Priced(
        program=Program(tasks=tuple(map(tuple, ranks))),
        computes=computes,
        collectives=collectives,
        capacities={("port", index): draw(st.sampled_from([1.0, 3.0])) for index in range(3)},
    )


def played_by_processes(case: Priced) -> dict[tuple[int, str], tuple[float, float, float]]:
    """Return start, begin and end of each task, from a simpy process for each host thread, stream and collective."""
    env = simpy.Environment()
    net = Network(env, case.capacities)
    ended = {(rank, task.name): env.event() for rank, tasks in enumerate(case.program.tasks) for task in tasks}
    arrived = {key: env.event() for key in ended}
    found: dict[tuple[int, str], tuple[float, float, float]] = {}
    starts: dict[tuple[int, str], float] = {}
    begins: dict[str, float] = {}

    def host(rank, queues):
        for task in case.program.tasks[rank]:
            yield env.timeout(case.cost(rank, task).host_seconds)
            queues[task.stream].put(task)
            if task.blocks_host:
                yield ended[rank, task.name]

    def stream(rank, queue):
        while True:
            task = yield queue.get()
            yield env.all_of([ended[rank, case.program.tasks[rank][earlier].name] for earlier in task.waits_for])
            key = (rank, task.name)
            starts[key] = env.now
            if task.group:
                arrived[key].succeed()
                yield ended[key]
            else:
                yield env.timeout(case.computes[key].device_seconds)
                ended[key].succeed()
            found[key] = (starts[key], begins.get(task.name, starts[key]), env.now)

    def meet(task):
        yield env.all_of([arrived[rank, task.name] for rank in task.group])
        begins[task.name] = env.now
        yield env.timeout(case.collectives[task.name].latency_seconds)
        yield net.transfer(case.collectives[task.name].flows)
        for rank in task.group:
            ended[rank, task.name].succeed()

    for task in {task.name: task for tasks in case.program.tasks for task in tasks if task.group}.values():
        env.process(meet(task))
    for rank in range(case.program.num_ranks):
        queues = {each: simpy.Store(env) for each in Stream}
        env.process(host(rank, queues))
        for queue in queues.values():
            env.process(stream(rank, queue))
    env.run()
    assert found.keys() == ended.keys()
    return found


def longest_paths(case: Priced) -> dict[tuple[int, str], float]:
    """Return the earliest end of each task if no flow shares a port, along what it follows."""
    everything = case.program.tasks

    @cache
    def issue(rank: int, index: int) -> float:
        before = 0.0 if index == 0 else issue(rank, index - 1)
        if index > 0 and everything[rank][index - 1].blocks_host:
            before = max(before, end(rank, index - 1))
        return before + case.cost(rank, everything[rank][index]).host_seconds

    @cache
    def start(rank: int, index: int) -> float:
        tasks = everything[rank]
        before = [other for other in range(index) if tasks[other].stream == tasks[index].stream]
        follows = [*before[-1:], *tasks[index].waits_for]
        return max([issue(rank, index), *(end(rank, other) for other in follows)])

    @cache
    def end(rank: int, index: int) -> float:
        task = everything[rank][index]
        if not task.group:
            return start(rank, index) + case.computes[rank, task.name].device_seconds
        cost = case.collectives[task.name]
        members = [(other, [each.name for each in everything[other]].index(task.name)) for other in task.group]
        alone = [
            each.num_bytes / min([each.max_bytes_per_second, *(case.capacities[port] for port in each.ports)])
            for each in cost.flows
        ]
        return max(start(*member) for member in members) + cost.latency_seconds + max(alone, default=0.0)

    return {
        (rank, task.name): end(rank, index) for rank, tasks in enumerate(everything) for index, task in enumerate(tasks)
    }


@given(priced_programs())
def test_the_engine_equals_a_process_for_each_host_and_stream(case):
    expected = played_by_processes(case)
    spans = case.run()
    assert {(span.rank, span.name) for span in spans} == expected.keys()
    for span in spans:
        begin_seconds = span.start_seconds + span.waiting_seconds
        found = (span.start_seconds, begin_seconds, span.end_seconds)
        assert found == pytest.approx(expected[span.rank, span.name], rel=1e-9, abs=1e-9)


@given(priced_programs(share_ports=False))
def test_without_shared_ports_every_task_ends_after_its_longest_path(case):
    ends = {(span.rank, span.name): span.end_seconds for span in case.run()}
    assert ends == pytest.approx(longest_paths(case), rel=1e-9, abs=1e-9)


@given(priced_programs())
def test_no_task_ends_before_its_longest_path(case):
    paths = longest_paths(case)
    for span in case.run():
        assert span.end_seconds >= paths[span.rank, span.name] * (1 - 1e-9)


@given(priced_programs())
def test_a_step_takes_no_less_than_its_busiest_stream_and_its_hosts(case):
    spans = case.run()
    for rank, tasks in enumerate(case.program.tasks):
        host_seconds = sum(case.cost(rank, task).host_seconds for task in tasks)
        assert not tasks or step_seconds(spans) >= host_seconds * (1 - 1e-9)
        for stream in Stream:
            busy = sum(span.duration_seconds for span in spans if (span.rank, span.stream) == (rank, stream))
            assert step_seconds(spans) >= busy * (1 - 1e-9)


@given(priced_programs())
def test_tasks_of_a_stream_run_one_by_one_in_order_of_issue(case):
    spans = case.run()
    for rank, tasks in enumerate(case.program.tasks):
        for stream in Stream:
            on_stream = [span for span in spans if (span.rank, span.stream) == (rank, stream)]
            assert [span.name for span in on_stream] == [task.name for task in tasks if task.stream == stream]
            for before, after in pairwise(on_stream):
                assert after.start_seconds >= before.end_seconds - 1e-9


@given(priced_programs())
def test_members_end_a_collective_together_and_one_of_them_does_not_wait(case):
    spans = case.run()
    for name in case.collectives:
        members = [span for span in spans if span.name == name]
        assert [span.end_seconds for span in members] == pytest.approx([members[0].end_seconds] * len(members))
        assert min(span.waiting_seconds for span in members) == 0.0
        begins = [span.start_seconds + span.waiting_seconds for span in members]
        assert begins == pytest.approx([max(span.start_seconds for span in members)] * len(members))
    assert all(0 <= span.waiting_seconds <= span.duration_seconds for span in spans)


@given(priced_programs())
def test_spans_are_sorted_by_rank_start_and_order_of_issue_and_repeat(case):
    spans = case.run()
    positions = [{task.name: index for index, task in enumerate(tasks)} for tasks in case.program.tasks]
    assert list(spans) == sorted(
        spans, key=lambda span: (span.rank, span.start_seconds, positions[span.rank][span.name])
    )
    assert case.run() == spans


@given(priced_programs(), st.randoms(use_true_random=False))
def test_the_numbering_of_ranks_does_not_matter(case, random):
    number = list(range(case.program.num_ranks))
    random.shuffle(number)
    tasks: list[tuple[Task, ...]] = [()] * len(number)
    for rank, own in enumerate(case.program.tasks):
        tasks[number[rank]] = tuple(replace(task, group=tuple(number[other] for other in task.group)) for task in own)
    computes = {(number[rank], name): cost for (rank, name), cost in case.computes.items()}
    renumbered = replace(case, program=Program(tasks=tuple(tasks)), computes=computes).run()
    ends = {(span.rank, span.name): span.end_seconds for span in renumbered}
    assert ends == pytest.approx({(number[span.rank], span.name): span.end_seconds for span in case.run()}, rel=1e-9)


@given(priced_programs(), st.sampled_from([0.25, 3.0, 1e6]))
def test_costs_times_c_make_a_step_times_c(case, c):
    computes = {
        key: TaskCost(host_seconds=c * cost.host_seconds, device_seconds=c * cost.device_seconds)
        for key, cost in case.computes.items()
    }
    collectives = {
        name: CollectiveCost(
            host_seconds=c * cost.host_seconds,
            latency_seconds=c * cost.latency_seconds,
            flows=tuple(replace(each, num_bytes=c * each.num_bytes) for each in cost.flows),
        )
        for name, cost in case.collectives.items()
    }
    scaled = replace(case, computes=computes, collectives=collectives)
    assert step_seconds(scaled.run()) == pytest.approx(c * step_seconds(case.run()), rel=1e-9)


def layers(num_ranks: int, num_tasks: int) -> Priced:
    """Return ranks that compute unevenly and meet every tenth task."""
    group = tuple(range(num_ranks))
    tasks = [
        collective(f"task{index}", group, waits_for=(index - 1,)) if index % 10 == 9 else compute(f"task{index}")
        for index in range(num_tasks)
    ]
    computes = {
        (rank, task.name): TaskCost(host_seconds=5e-6, device_seconds=1e-5 * (1 + rank * 7919 % 13))
        for rank in group
        for task in tasks
    }
    cost = CollectiveCost(
        host_seconds=5e-6,
        latency_seconds=1e-5,
        flows=tuple(flow(1e6 * (rank + 1), ("out", rank), cap=4e10) for rank in group),
    )
    return Priced(
        program=Program(tasks=(tuple(tasks),) * num_ranks),
        computes=computes,
        collectives={task.name: cost for task in tasks if task.group},
        capacities={("out", rank): 1e11 for rank in group},
    )


@pytest.mark.bench
@pytest.mark.parametrize(("num_ranks", "num_tasks", "limit_seconds"), [(8, 300, 0.05), (64, 720, 1.0)])
def test_a_step_is_played_in_the_time_a_search_can_spend(num_ranks, num_tasks, limit_seconds):
    case = layers(num_ranks, num_tasks)
    began = time.perf_counter()
    case.run()
    assert time.perf_counter() - began < limit_seconds
