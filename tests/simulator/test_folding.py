"""Programs whose replicas are alike, played folded, and rank by rank, and by a process for each host and stream."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.aggregation import aggregated
from simulator.engine import play, run_program, step_seconds
from simulator.errors import PlanError
from simulator.folding import FoldedProgram, fold
from simulator.specs.cost import CollectiveCost, Flow, Port, TaskCost
from simulator.specs.program import Program, SharedTasks, Stream, Task
from simulator.specs.trace import SharedSpans, Span, Trace, TraceOrigin, counted_ranks, counted_spans
from tests.simulator.test_engine import Priced, collective, compute, flow, played_by_processes, priced_programs

SPINE: Port = ("spine", 0)


@dataclass(frozen=True, kw_only=True)
class Replicas:
    """A program with its prices, run by several replicas that also meet all together.

    Attributes:
        one: what a replica does; its groups are those of the first.
        shared_ports: of `one`, those that all replicas use; of the others each has its own.
        of_all: price of each collective that all ranks of all replicas take part in, by name.
        late_seconds: more that each task takes on its device, by rank.
    """

    one: Priced
    count: int
    shared_ports: frozenset[Port] = frozenset()
    of_all: Mapping[str, CollectiveCost]
    late_seconds: Mapping[int, float]

    @property
    def ranks_of_one(self) -> int:
        return self.one.program.num_ranks

    @property
    def program(self) -> Program:
        num_ranks = self.ranks_of_one * self.count
        return Program(
            tasks=SharedTasks(
                lists=self.one.program.shared.lists,
                list_of_rank=self.one.program.shared.list_of_rank * self.count,
                shift_of_rank=tuple(rank - rank % self.ranks_of_one for rank in range(num_ranks)),
            )
        )

    @property
    def unfolded(self) -> Program:
        return Program(tasks=tuple(self.program.tasks))

    def port(self, port: Port, replica: int) -> Port:
        return port if port in self.shared_ports else (f"{port[0]} of {replica}", port[1])

    def compute_cost(self, rank: int, task: Task) -> TaskCost:
        cost = self.one.computes[rank % self.ranks_of_one, task.name]
        return replace(cost, device_seconds=cost.device_seconds + self.late_seconds.get(rank, 0.0))

    def collective_cost(self, tasks: tuple[Task, ...]) -> CollectiveCost:
        if tasks[0].name in self.of_all:
            return self.of_all[tasks[0].name]
        cost, replica = self.one.collectives[tasks[0].name], tasks[0].group[0] // self.ranks_of_one
        flows = [replace(each, ports=tuple(self.port(port, replica) for port in each.ports)) for each in cost.flows]
        return replace(cost, flows=tuple(flows))

    @property
    def capacities(self) -> dict[Port, float]:
        own = {
            self.port(port, replica): rate
            for replica in range(self.count)
            for port, rate in self.one.capacities.items()
        }
        return own | {("rank", rank): 2.0 for rank in range(self.ranks_of_one * self.count)}

    def folded(self, *, told_kinds: bool = False) -> FoldedProgram:
        num_ranks = self.ranks_of_one * self.count
        kinds = [(rank % self.ranks_of_one, self.late_seconds.get(rank)) for rank in range(num_ranks)]
        return fold(
            self.program,
            compute_cost=self.compute_cost,
            collective_cost=self.collective_cost,
            port_capacities=self.capacities,
            kind_of_rank=kinds if told_kinds else None,
        )

    def spans_of(self, program: Program) -> Sequence[Span]:
        return run_program(
            program,
            compute_cost=self.compute_cost,
            collective_cost=self.collective_cost,
            port_capacities=self.capacities,
        )

    def by_processes(self) -> dict[tuple[int, str], tuple[float, float, float]]:
        """Return start, begin and end of every task of every rank; each collective has a name of its own there."""

        def renamed(task: Task, rank: int) -> Task:
            return replace(task, name=f"{task.name} of {task.group}") if task.group else task

        tasks = tuple(tuple(renamed(task, rank) for task in own) for rank, own in enumerate(self.unfolded.tasks))
        meetings: dict[str, list[Task]] = {}
        for own, plain in zip(tasks, self.unfolded.tasks, strict=True):
            for task, original in zip(own, plain, strict=True):
                if task.group:
                    meetings.setdefault(task.name, []).append(original)
        found = played_by_processes(
            Priced(
                program=Program(tasks=tasks),
                computes={
                    (rank, task.name): self.compute_cost(rank, task)
                    for rank, own in enumerate(tasks)
                    for task in own
                    if not task.group
                },
                collectives={name: self.collective_cost(tuple(members)) for name, members in meetings.items()},
                capacities=self.capacities,
            )
        )
        return {(rank, name.split(" of (")[0]): times for (rank, name), times in found.items()}


@st.composite
def replicas(draw, late: bool = True) -> Replicas:
    """Replicas that share some ports, meet in collectives with equal or uneven flows, and may have late ranks."""
    one = draw(priced_programs(max_ranks=3, max_tasks=10))
    count = draw(st.integers(1, 4))
    num_ranks = one.program.num_ranks * count
    lists = [list(tasks) for tasks in one.program.tasks]
    of_all: dict[str, CollectiveCost] = {}
    for number in range(draw(st.integers(0, 2))):
        uneven, cap = draw(st.booleans()), draw(st.sampled_from([1.5, 8.0]))
        of_all[f"all{number}"] = CollectiveCost(
            host_seconds=draw(st.sampled_from([0.0, 1.0])),
            latency_seconds=draw(st.sampled_from([0.0, 0.5])),
            flows=tuple(flow(2.0 + (rank if uneven else 0), ("rank", rank), cap=cap) for rank in range(num_ranks)),
        )
        for tasks in lists:
            tasks.append(collective(f"all{number}", range(num_ranks)))
    late_seconds = draw(st.dictionaries(st.integers(0, num_ranks - 1), st.sampled_from([0.5, 2.0]))) if late else {}
    return Replicas(
        one=replace(one, program=Program(tasks=tuple(map(tuple, lists)))),
        count=count,
        shared_ports=frozenset(draw(st.sets(st.sampled_from(sorted(one.capacities))))),
        of_all=of_all,
        late_seconds=late_seconds,
    )


def times(spans: Sequence[Span]) -> list[tuple[float, float, float]]:
    return [(span.start_seconds, span.waiting_seconds, span.end_seconds) for span in spans]


@given(replicas())
@settings(max_examples=60)
def test_a_folded_program_does_what_all_its_ranks_do(case):
    folded, unfolded = case.spans_of(case.program), case.spans_of(case.unfolded)
    assert [(s.rank, s.name, s.group) for s in folded] == [(s.rank, s.name, s.group) for s in unfolded]
    for mine, other in zip(times(folded), times(unfolded), strict=True):
        assert mine == pytest.approx(other, rel=1e-9, abs=1e-9)


@given(replicas())
@settings(max_examples=40)
def test_a_folded_program_equals_a_process_for_each_host_and_stream(case):
    expected = case.by_processes()
    spans = case.spans_of(case.program)
    assert len(spans) == len(expected)
    for span in spans:
        found = (span.start_seconds, span.start_seconds + span.waiting_seconds, span.end_seconds)
        assert found == pytest.approx(expected[span.rank, span.name], rel=1e-9, abs=1e-9)


@given(replicas(late=False))
@settings(max_examples=30)
def test_replicas_that_nothing_tells_apart_are_of_one_class(case):
    is_even = all(len({each.num_bytes for each in cost.flows}) <= 1 for cost in case.of_all.values())
    folded = case.folded()
    if is_even:
        classes = folded.class_of_rank
        assert all(number == classes[rank % case.ranks_of_one] for rank, number in enumerate(classes))
    assert sorted(rank for each in folded.ranks for rank in each.ranks) == list(range(case.program.num_ranks))
    assert case.folded(told_kinds=True) == folded


@given(replicas(), st.sampled_from([0.5, 3.0]))
@settings(max_examples=20)
def test_a_factor_scales_what_devices_and_links_do(case, by):
    scaled = replace(
        case,
        one=replace(
            case.one,
            computes={k: replace(c, device_seconds=by * c.device_seconds) for k, c in case.one.computes.items()},
            collectives={name: times_factor(cost, by) for name, cost in case.one.collectives.items()},
        ),
        of_all={name: times_factor(cost, by) for name, cost in case.of_all.items()},
        late_seconds={rank: by * seconds for rank, seconds in case.late_seconds.items()},
    )
    expected = times(play(scaled.folded()).spans())
    for found, other in zip(times(play(case.folded(), factor=lambda _: by).spans()), expected, strict=True):
        assert found == pytest.approx(other, rel=1e-9, abs=1e-9)


def times_factor(cost: CollectiveCost, by: float) -> CollectiveCost:
    flows = tuple(replace(each, num_bytes=by * each.num_bytes) for each in cost.flows)
    return replace(cost, latency_seconds=by * cost.latency_seconds, flows=flows)


@given(replicas())
@settings(max_examples=30)
def test_steps_one_after_another_equal_one_program_of_them(case):
    tasks = [
        tuple(
            replace(
                task,
                name=f"{task.name}#{step}",
                waits_for=tuple(step * len(own) + earlier for earlier in task.waits_for),
            )
            for step in range(2)
            for task in own
        )
        for own in case.unfolded.tasks
    ]
    spans = run_program(
        Program(tasks=tuple(tasks)),
        compute_cost=lambda rank, task: case.compute_cost(rank, replace(task, name=task.name[:-2])),
        collective_cost=lambda members: case.collective_cost(
            tuple(replace(task, name=task.name[:-2]) for task in members)
        ),
        port_capacities=case.capacities,
    )
    played = play(case.folded(), num_steps=2)
    for step in range(2):
        expected = {(s.rank, s.name[:-2]): s.end_seconds for s in spans if s.name.endswith(f"#{step}")}
        found = {(s.rank, s.name): s.end_seconds for s in played.spans(step)}
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)
        assert played.end_seconds(step) == pytest.approx(max(expected.values(), default=0.0), rel=1e-9, abs=1e-9)


# --- By hand.


def two_replicas(**fields) -> Replicas:
    """Two replicas of two ranks, the first of which works longer; both replicas send through one spine."""
    tasks = [compute("work"), collective("exchange", (0, 1), waits_for=(0,)), compute("after", waits_for=(1,))]
    one = Priced(
        program=Program(tasks=(tuple(tasks), tuple(tasks[:2]))),
        computes={
            (0, "work"): TaskCost(host_seconds=0.0, device_seconds=3.0),
            (1, "work"): TaskCost(host_seconds=0.0, device_seconds=1.0),
            (0, "after"): TaskCost(host_seconds=0.0, device_seconds=1.0),
        },
        collectives={"exchange": CollectiveCost(host_seconds=0.0, latency_seconds=0.0, flows=(flow(4.0, SPINE),))},
        capacities={SPINE: 2.0},
    )
    return Replicas(
        **{"one": one, "count": 2, "shared_ports": frozenset({SPINE}), "of_all": {}, "late_seconds": {}, **fields}
    )


def test_replicas_share_what_lies_between_them_by_hand():
    case = two_replicas()
    (found,) = case.folded().meetings
    assert found.flows == (replace(flow(4.0, SPINE), alike=(2,)),)
    spans = case.spans_of(case.program)
    # Both replicas exchange from 3 s on, and each gets half of the spine: 4 bytes at 1 a second.
    ends = {(span.rank, span.name): span.end_seconds for span in spans}
    assert ends == {
        **dict.fromkeys([(0, "exchange"), (1, "exchange"), (2, "exchange"), (3, "exchange")], 7.0),
        **dict.fromkeys([(0, "work"), (2, "work")], 3.0),
        **dict.fromkeys([(1, "work"), (3, "work")], 1.0),
        **dict.fromkeys([(0, "after"), (2, "after")], 8.0),
    }


def test_a_late_rank_makes_others_wait_and_costs_none_of_them_more():
    """Waiting is not cost: lateness is in `waiting_seconds` of those who wait, and never in what a collective costs."""
    case = two_replicas(shared_ports=frozenset())
    late = replace(case, late_seconds={3: 10.0})
    usual, delayed = ({(span.rank, span.name): span for span in each.spans_of(each.program)} for each in (case, late))
    assert [usual[rank, "exchange"].waiting_seconds for rank in range(4)] == [0.0, 2.0, 0.0, 2.0]
    # Rank 3 comes at 11 s instead of 1 s: its partner waits 8 s, it does not wait, and the other replica is as it was.
    assert [delayed[rank, "exchange"].waiting_seconds for rank in range(4)] == [0.0, 2.0, 8.0, 0.0]
    assert [delayed[rank, "exchange"].busy_seconds for rank in range(4)] == [2.0] * 4
    assert [usual[rank, "exchange"].busy_seconds for rank in range(4)] == [2.0] * 4
    assert delayed[2, "after"].end_seconds == usual[2, "after"].end_seconds + 8.0


@given(replicas(late=False), st.data(), st.sampled_from([0.5, 7.0]))
@settings(max_examples=40)
def test_with_ports_of_its_own_a_collective_costs_the_same_however_late_its_ranks_are(case, data, late_seconds):
    ranks = st.integers(0, case.program.num_ranks - 1)
    slow = replace(case, late_seconds={data.draw(ranks): late_seconds})
    # Without ports flows share nothing, so that a collective's cost is its own.
    cases = [
        replace(
            each,
            one=replace(each.one, collectives={n: without_ports(c) for n, c in each.one.collectives.items()}),
            of_all={name: without_ports(cost) for name, cost in each.of_all.items()},
        )
        for each in (case, slow)
    ]
    usual, delayed = ([s for s in each.spans_of(each.program) if s.group] for each in cases)
    cost_of = {(s.rank, s.name): s.busy_seconds for s in usual}
    for span in delayed:
        assert span.busy_seconds == pytest.approx(cost_of[span.rank, span.name], rel=1e-9, abs=1e-9)


def without_ports(cost: CollectiveCost) -> CollectiveCost:
    return replace(cost, flows=tuple(replace(each, ports=()) for each in cost.flows))


def test_a_late_rank_is_a_class_of_its_own_and_so_are_those_who_wait_for_it():
    case = two_replicas()
    assert [each.ranks for each in case.folded().ranks] == [(0, 2), (1, 3)]
    assert [each.ranks for each in replace(case, late_seconds={3: 1.0}).folded().ranks] == [(0,), (1,), (2,), (3,)]


def test_ranks_that_meet_in_a_ring_may_take_part_in_one_collective_at_different_tasks():
    # Each of four equal ranks sends to the next: its first collective is the second one of the rank behind it.
    ring = Program(
        tasks=tuple(
            (
                collective("pass", (rank, (rank + 1) % 4), stream=Stream.COMMUNICATION),
                collective("pass", ((rank - 1) % 4, rank), stream=Stream.GRADIENTS),
            )
            for rank in range(4)
        )
    )
    cost = CollectiveCost(host_seconds=0.5, latency_seconds=1.0, flows=())
    spans = run_program(ring, compute_cost=never, collective_cost=lambda _: cost, port_capacities={})
    # They are issued at 0.5 s and 1 s, and each begins with the member for which it is the second.
    assert {span.end_seconds for span in spans} == {2.0}


def never(*arguments):
    raise AssertionError(f"must not be priced: {arguments}")


def test_a_stuck_replica_is_named_with_its_ranks():
    x, y = collective("x", (0, 1)), collective("y", (0, 1))
    shared = SharedTasks(lists=((x, y), (y, x)), list_of_rank=(0, 1, 0, 1), shift_of_rank=(0, 0, 2, 2))
    free = CollectiveCost(host_seconds=0.0, latency_seconds=0.0, flows=())
    with pytest.raises(PlanError, match=r'"x" .*ranks 0-1\) never begins \(waiting: rank 0; missing: rank 1\).*"y"'):
        run_program(Program(tasks=shared), compute_cost=never, collective_cost=lambda _: free, port_capacities={})


# --- Tasks and spans of ranks that are alike.


@given(replicas())
@settings(max_examples=30)
def test_shared_tasks_are_those_of_each_rank(case):
    shared = case.program.tasks
    assert isinstance(shared, SharedTasks)
    expanded = tuple(shared[rank] for rank in range(len(shared)))
    assert shared == expanded
    assert hash(shared) == hash(expanded)
    assert (shared[1:], shared[-1]) == (expanded[1:], expanded[-1])
    assert shared.num_tasks == case.program.num_tasks == sum(map(len, expanded))
    degree = case.ranks_of_one
    for rank, tasks in enumerate(expanded):
        for task, first in zip(tasks, case.one.program.tasks[rank % degree], strict=True):
            shift = 0 if len(first.group) == len(shared) else rank - rank % degree
            assert task == replace(first, group=tuple(other + shift for other in first.group))


@given(replicas())
@settings(max_examples=30)
def test_shared_spans_are_those_of_each_rank_and_are_counted_without_expanding_them(case):
    spans = case.spans_of(case.program)
    expanded = tuple(spans)
    assert spans == expanded
    assert hash(spans) == hash(expanded)
    assert len(spans) == len(expanded)
    assert [spans[index] for index in range(len(spans))] == list(expanded)
    assert spans[1:3] == expanded[1:3]
    if expanded:
        assert spans[-1] == expanded[-1]
    with pytest.raises(IndexError):
        spans[len(spans)]
    counted = [(span.name, seconds) for span, count in counted_spans(spans) for seconds in [span.end_seconds] * count]
    assert sorted(counted) == sorted((span.name, span.end_seconds) for span in expanded)


def test_the_ranks_that_are_counted_stand_for_all():
    case = two_replicas()
    spans = case.spans_of(case.program)
    assert isinstance(spans, SharedSpans)
    assert [span.rank for span in spans.of_rank(2)] == [2, 2, 2]
    assert [span.group for span in spans.of_rank(3)] == [(), (2, 3)]
    trace = Trace(
        origin=TraceOrigin.SIMULATED,
        num_ranks=4,
        spans=spans,
        step_seconds=(8.0,),
        traced_step_seconds=(8.0,),
        peak_memory_bytes=(),
    )
    assert counted_ranks(trace) == [(0, 2), (1, 2)]
    assert counted_ranks(replace(trace, spans=tuple(spans))) == [(rank, 1) for rank in range(4)]


# --- Flows of pairs.


def pairs(matrix: Sequence[Sequence[float]], *, first: int = 0, cap: float = 1e15) -> tuple[Flow, ...]:
    """Return a flow for each pair of ranks that sends, from a port out of one to a port into the other."""
    return tuple(
        flow(num_bytes, ("out", first + source), ("in", first + target), cap=cap)
        for source, row in enumerate(matrix)
        for target, num_bytes in enumerate(row)
        if source != target
    )


def end_of(*collectives: Sequence[Flow], capacities: Mapping[Port, float]) -> float:
    """Return when all of some collectives have ended that begin together."""
    program = Program(tasks=tuple((collective(f"c{rank}", (rank,)),) for rank in range(len(collectives))))
    spans = run_program(
        program,
        compute_cost=never,
        collective_cost=lambda tasks: CollectiveCost(
            host_seconds=0.0, latency_seconds=0.0, flows=tuple(collectives[tasks[0].group[0]])
        ),
        port_capacities=capacities,
    )
    return step_seconds(spans)


def ports_of(num_ranks: int, *rates: float) -> dict[Port, float]:
    return {(way, rank): rates[rank % len(rates)] for way in ("out", "in") for rank in range(num_ranks)}


matrices = st.integers(4, 6).flatmap(
    lambda n: st.lists(
        st.lists(st.sampled_from([0.0, 1.0, 5.0]) | st.floats(0.0, 50.0), min_size=n, max_size=n),
        min_size=n,
        max_size=n,
    )
)
rates = st.lists(st.sampled_from([1.0, 2.0]) | st.floats(0.5, 8.0), min_size=1, max_size=6)


@given(matrices, rates)
def test_pairs_take_no_less_than_their_ports_and_at_most_twice_as_long(matrix, each):
    flows, capacities = pairs(matrix), ports_of(len(matrix), *each)
    by_pair, by_port = (end_of(found, capacities=capacities) for found in (flows, aggregated(flows)))
    assert by_port <= by_pair * (1 + 1e-9)
    assert by_pair <= 2 * by_port * (1 + 1e-9)


@given(matrices, rates, st.floats(0.1, 4.0))
def test_with_caps_pairs_take_at_most_three_times_as_long(matrix, each, cap):
    flows, capacities = pairs(matrix, cap=cap), ports_of(len(matrix), *each)
    by_pair, by_port = (end_of(found, capacities=capacities) for found in (flows, aggregated(flows)))
    assert by_port <= by_pair * (1 + 1e-9)
    assert by_pair <= 3 * by_port * (1 + 1e-9)


@given(matrices, matrices, rates)
@settings(max_examples=50)
def test_beside_others_too_the_last_pair_ends_within_twice_the_time(first, second, each):
    both = [pairs(first), pairs(second)]
    capacities = ports_of(6, *each)
    by_pair = end_of(*both, capacities=capacities)
    by_port = end_of(*map(aggregated, both), capacities=capacities)
    assert by_pair <= 2 * by_port * (1 + 1e-9)
    assert by_port <= 2 * by_pair * (1 + 1e-9)


@given(st.integers(4, 7), st.floats(0.1, 50.0), st.floats(0.1, 5.0))
def test_equal_pairs_end_when_their_ports_do(num_ranks, num_bytes, rate):
    flows, capacities = pairs([[num_bytes] * num_ranks] * num_ranks), ports_of(num_ranks, rate)
    expected = (num_ranks - 1) * num_bytes / rate
    assert end_of(flows, capacities=capacities) == pytest.approx(expected, rel=1e-9)
    assert end_of(aggregated(flows), capacities=capacities) == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.floats(0.1, 50.0), min_size=5, max_size=9), st.floats(0.1, 5.0))
def test_what_one_port_that_is_no_faster_than_others_carries_ends_when_it_does(sizes, rate):
    capacities: dict[Port, float] = {("core", 0): rate} | {("in", rank % 3): rate for rank in range(3)}
    flows = [flow(num_bytes, ("core", 0), ("in", rank % 3)) for rank, num_bytes in enumerate(sizes)]
    found = aggregated(flows)
    assert len(found) == 5  # of the core, three ports, and the longest alone
    expected = sum(sizes) / rate
    assert end_of(flows, capacities=capacities) == pytest.approx(expected, rel=1e-9)
    assert end_of(found, capacities=capacities) == pytest.approx(expected, rel=1e-9)


def test_flows_that_are_no_more_than_their_ports_stay_as_they_are():
    flows = pairs([[0, 1, 2], [3, 0, 4], [5, 6, 0]])
    assert aggregated(flows) == flows
    assert aggregated([flow(1.0, cap=2.0), flow(3.0, cap=2.0)]) == (flow(1.0, cap=2.0), flow(3.0, cap=2.0))
    assert aggregated([]) == ()


def uneven(num_ranks: int) -> list[list[float]]:
    return [
        [float((7919 * source + 104729 * target) % 10_007) for target in range(num_ranks)]
        for source in range(num_ranks)
    ]


def test_uneven_exchanges_of_64_ranks_in_16_replicas_have_a_flow_a_port_and_are_solved_a_few_times():
    flows = [aggregated(pairs(uneven(64), first=64 * replica, cap=float("inf"))) for replica in range(16)]
    assert [len(each) for each in flows] == [128] * 16
    began = time.perf_counter()
    found = end_of(*flows, capacities=ports_of(1024, 1e6))
    seconds = time.perf_counter() - began
    sent, received = (max(map(sum, each)) for each in (uneven_without_self(), zip(*uneven_without_self(), strict=True)))
    assert found == pytest.approx(max(sent, received) / 1e6)
    assert seconds < 0.5  # flows of pairs are solved again at the end of each, which takes minutes


def uneven_without_self() -> list[list[float]]:
    return [[0.0 if s == t else value for t, value in enumerate(row)] for s, row in enumerate(uneven(64))]
