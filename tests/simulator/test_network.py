"""Max-min shares by hand and against their definition; ends of flows against a plain simulation of fluids."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from simulator import network
from simulator.network import Network, max_min_rates
from simulator.specs.cost import Flow, Port
from simulator.specs.units import GB

A, B, C = ("link", 0), ("link", 1), ("link", 2)
UNCAPPED = 1e15


def flow(*ports: Port, num_bytes: float = 1.0, cap: float = UNCAPPED) -> Flow:
    return Flow(num_bytes=num_bytes, ports=ports, max_bytes_per_second=cap)


@st.composite
def flows_and_capacities(draw, max_flows=6, num_ports=4) -> tuple[list[Flow], dict[Port, float]]:
    """Flows over a few ports, with ties in caps and capacities and flows that no port carries."""
    ports: list[Port] = [("port", index) for index in range(num_ports)]
    rates = st.sampled_from([1.0, 2.0, 3.0]) | st.floats(0.01, 100.0)
    capacities = {port: draw(rates) for port in ports}
    flows = draw(
        st.lists(
            st.builds(
                Flow,
                num_bytes=st.sampled_from([0.0, 1.0, 6.0]) | st.floats(0.0, 100.0),
                ports=st.lists(st.sampled_from(ports), unique=True, max_size=3).map(tuple),
                max_bytes_per_second=rates,
            ),
            max_size=max_flows,
        )
    )
    return flows, capacities


def test_flows_on_one_port_share_it_equally():
    assert max_min_rates([flow(A), flow(A), flow(A)], {A: 6.0}) == [2.0, 2.0, 2.0]


def test_a_capped_flow_leaves_the_rest_of_the_port_to_the_others():
    assert max_min_rates([flow(A, cap=1.0), flow(A), flow(A)], {A: 9.0}) == [1.0, 4.0, 4.0]


def test_a_flow_alone_gets_the_least_of_its_cap_and_its_ports():
    assert max_min_rates([flow(A, B)], {A: 5.0, B: 3.0}) == [3.0]
    assert max_min_rates([flow(A, B, cap=2.0)], {A: 5.0, B: 3.0}) == [2.0]
    assert max_min_rates([flow(cap=7.0)], {}) == [7.0]
    assert max_min_rates([], {A: 5.0}) == []


def test_shares_over_three_links_by_hand():
    # A = 1 carries the first and second flow: 1/2 each. B = 1 carries the first and third: 1/2 is left, C allows it.
    # C = 2 carries the third and fourth: 2 - 1/2.
    rates = max_min_rates([flow(A, B), flow(A), flow(B, C), flow(C)], {A: 1.0, B: 1.0, C: 2.0})
    assert rates == [0.5, 0.5, 0.5, 1.5]


def test_the_narrowest_port_is_filled_first_by_hand():
    # A = 2 is full at 1 each; then B = 10 has 9 left for one flow, of which C = 4 lets 4 pass.
    rates = max_min_rates([flow(A), flow(A, B), flow(B, C)], {A: 2.0, B: 10.0, C: 4.0})
    assert rates == [1.0, 1.0, 4.0]


def brute_force_rates(flows: Sequence[Flow], capacities: Mapping[Port, float]) -> list[float]:
    """Return max-min fair rates by raising all flows that still rise, step by step, to the next limit of any."""
    rates, rising = [0.0] * len(flows), set(range(len(flows)))
    while rising:
        rooms = [flows[index].max_bytes_per_second - rates[index] for index in rising]
        tight: dict[Port, float] = {}
        for port, capacity in capacities.items():
            used = sum(load_on(each, port) * rate for each, rate in zip(flows, rates, strict=True))
            if load := sum(load_on(flows[index], port) for index in rising):
                tight[port] = (capacity - used) / load
        step = min([*rooms, *tight.values()])
        full = {port for port, room in tight.items() if room <= step * (1 + 1e-12)}
        for index in sorted(rising):
            rates[index] += step
            if full.intersection(flows[index].ports) or flows[index].max_bytes_per_second <= rates[index] * (1 + 1e-12):
                rising.remove(index)
    return rates


def load_on(each: Flow, port: Port) -> int:
    return dict(zip(each.ports, each.loads, strict=True)).get(port, 0)


@given(flows_and_capacities(max_flows=20), st.lists(st.integers(1, 4), min_size=20, max_size=20))
def test_rates_equal_those_of_a_brute_force_solver(case, alike):
    plain, capacities = case
    flows = [replace(each, alike=(n,) * len(each.ports)) for each, n in zip(plain, alike, strict=False)]
    for found in (plain, flows):
        expected = brute_force_rates(found, capacities)
        assert max_min_rates(found, capacities) == pytest.approx(expected, rel=1e-9)


@given(flows_and_capacities(max_flows=6), st.lists(st.integers(1, 3), min_size=6, max_size=6))
def test_a_flow_that_stands_for_some_gets_what_each_of_them_would(case, alike):
    plain, capacities = case
    folded = [replace(each, alike=(n,) * len(each.ports)) for each, n in zip(plain, alike, strict=False)]
    rates = max_min_rates(folded, capacities)
    each_of_all = [(each, rate) for each, rate, n in zip(plain, rates, alike, strict=False) for _ in range(n)]
    expected = max_min_rates([each for each, _ in each_of_all], capacities)
    assert [rate for _, rate in each_of_all] == pytest.approx(expected, rel=1e-9)


@given(flows_and_capacities(max_flows=20))
def test_no_port_and_no_flow_exceeds_its_limit(case):
    flows, capacities = case
    rates = max_min_rates(flows, capacities)
    for port, capacity in capacities.items():
        load = sum(rate for each, rate in zip(flows, rates, strict=True) if port in each.ports)
        assert load <= capacity * (1 + 1e-12)
    assert all(0 < rate <= each.max_bytes_per_second for each, rate in zip(flows, rates, strict=True))


@given(flows_and_capacities(max_flows=20))
def test_each_flow_is_at_its_cap_or_among_the_fastest_of_a_full_port(case):
    flows, capacities = case
    rates = max_min_rates(flows, capacities)
    for each, rate in zip(flows, rates, strict=True):
        full = False
        for port in each.ports:
            on_port = [other for f, other in zip(flows, rates, strict=True) if port in f.ports]
            full |= sum(on_port) >= capacities[port] * (1 - 1e-12) and max(on_port) <= rate * (1 + 1e-12)
        assert full or rate == each.max_bytes_per_second


@given(flows_and_capacities())
def test_no_rate_can_rise_without_lowering_one_that_is_not_larger(case):
    flows, capacities = case
    rates = max_min_rates(flows, capacities)
    loads = np.array([[port in each.ports for each in flows] for port in capacities], dtype=float)
    limits = np.array(list(capacities.values()))
    for index, rate in enumerate(rates):
        # The most that this flow can get if all that is not larger keeps what it has.
        bounds = [
            (other * (1 - 1e-9) if other <= rate * (1 + 1e-9) else 0.0, each.max_bytes_per_second)
            for each, other in zip(flows, rates, strict=True)
        ]
        result = linprog(-np.eye(len(flows))[index], A_ub=loads, b_ub=limits, bounds=bounds)
        assert result.status == 0
        assert result.fun is not None
        assert -result.fun <= rate * (1 + 1e-6) + 1e-6  # the solver's tolerance


@given(flows_and_capacities(max_flows=12), st.randoms(use_true_random=False))
def test_rates_do_not_depend_on_the_order_of_flows(case, random):
    flows, capacities = case
    order = list(range(len(flows)))
    random.shuffle(order)
    shuffled = max_min_rates([flows[index] for index in order], capacities)
    rates = max_min_rates(flows, capacities)
    assert shuffled == pytest.approx([rates[index] for index in order], rel=1e-12)
    assert max_min_rates(flows, capacities) == rates


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (flow(B), "no capacity is stated"),
        (flow(A, A), "each port once"),
        (flow(A, cap=0.0), "max_bytes_per_second"),
        (flow(cap=float("inf")), "nothing limits"),
        (flow(A, num_bytes=-1.0), "num_bytes"),
        (replace(flow(A), alike=(1, 1)), "alike must say"),
        (replace(flow(A), alike=(0,)), "must carry it"),
    ],
)
def test_a_flow_that_cannot_be_is_our_own_mistake(wrong, message):
    with pytest.raises(AssertionError, match=message):
        max_min_rates([wrong], {A: 1.0})
    with pytest.raises(AssertionError, match=message):
        Network(simpy.Environment(), {A: 1.0}).transfer([wrong])


def test_a_port_without_capacity_is_our_own_mistake():
    with pytest.raises(AssertionError, match="above 0"):
        max_min_rates([flow(A)], {A: 0.0})


def ends(transfers: Sequence[tuple[float, Sequence[Flow]]], capacities: Mapping[Port, float]) -> list[float]:
    """Return when each transfer ends that starts at the given instant."""
    env = simpy.Environment()
    net = Network(env, capacities)
    found = [-1.0] * len(transfers)

    def play(index, start_seconds, flows):
        yield env.timeout(start_seconds)
        yield net.transfer(flows)
        found[index] = env.now

    for index, (start_seconds, flows) in enumerate(transfers):
        env.process(play(index, start_seconds, flows))
    env.run()
    return found


def fluid_ends(transfers: Sequence[tuple[float, Sequence[Flow]]], capacities: Mapping[Port, float]) -> list[float]:
    """Return what `ends` should, by brute force for all flows at every start and end, in steps of the clock."""
    waiting = sorted((start, index) for index, (start, _) in enumerate(transfers))
    left: list[list[Any]] = []  # bytes, flow, transfer
    found = [start for start, _ in transfers]
    now = 0.0
    while waiting or left:
        rates = brute_force_rates([each for _, each, _ in left], capacities)
        until_end = [entry[0] / rate for entry, rate in zip(left, rates, strict=True)]
        step = min([*until_end, *(start - now for start, _ in waiting[:1])])
        now += step
        for entry, rate, seconds in zip(left, rates, until_end, strict=True):
            entry[0] = 0.0 if seconds <= step else entry[0] - rate * step
            found[entry[2]] = now
        left = [entry for entry in left if entry[0] > 0]
        while waiting and waiting[0][0] <= now + 1e-12:
            _, index = waiting.pop(0)
            left += [[each.num_bytes, each, index] for each in transfers[index][1] if each.num_bytes > 0]
    return found


def test_a_flow_alone_ends_after_its_bytes_over_its_rate():
    assert ends([(0.0, [flow(A, num_bytes=7.0)])], {A: 3.0}) == [7.0 / 3.0]


def test_a_second_flow_halves_the_rate_from_its_start_on():
    # 10 bytes at 2/s; at 1 s, 8 are left and 1/s remains each: the second flow's 2 bytes end at 3 s, when 6 of the
    # first are left, which end at 6 s.
    transfers = [(0.0, [flow(A, num_bytes=10.0)]), (1.0, [flow(A, num_bytes=2.0)])]
    assert ends(transfers, {A: 2.0}) == [6.0, 3.0]


def test_a_transfer_ends_with_the_last_of_its_flows():
    # A: 4 and 2 bytes at 1/s each until 2 s, then 2 bytes at 2/s. B: 9 bytes at 1/s.
    flows = [flow(A, num_bytes=4.0), flow(A, num_bytes=2.0)]
    assert ends([(0.0, flows)], {A: 2.0}) == [3.0]
    assert ends([(0.0, [*flows, flow(B, num_bytes=9.0)])], {A: 2.0, B: 1.0}) == [9.0]


def test_no_bytes_end_at_once():
    transfers = [(2.0, []), (3.0, [flow(A, num_bytes=0.0)]), (0.0, [flow(A, num_bytes=8.0)])]
    assert ends(transfers, {A: 1.0}) == [2.0, 3.0, 8.0]


def test_other_flows_do_not_shift_the_end_of_a_flow_that_keeps_its_rate():
    # The first flow is capped and shares port A with many that come and go, but never for want of room.
    num_bytes, cap = 1e9 / 7, 1.1e8 / 3
    others = [(1.2345e-3 * index, [flow(A, B, num_bytes=1e5 / (index + 1), cap=1e6)]) for index in range(3000)]
    found = ends([(0.0, [flow(A, num_bytes=num_bytes, cap=cap)]), *others], {A: 1e9, B: 2e6})
    assert found[0] == pytest.approx(num_bytes / cap, rel=3e-16, abs=0.0)  # the clock's last digit


@given(
    flows_and_capacities(max_flows=8),
    st.lists(st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0.0, 20.0), min_size=8, max_size=8),
)
def test_ends_equal_those_of_a_plain_simulation(case, starts):
    flows, capacities = case
    transfers = [(start, [each]) for start, each in zip(starts, flows, strict=False)]
    assert ends(transfers, capacities) == pytest.approx(fluid_ends(transfers, capacities), rel=1e-9, abs=1e-9)


@given(flows_and_capacities(max_flows=12))
def test_no_port_carries_more_than_its_capacity_allows_until_the_end(case):
    flows, capacities = case
    (end_seconds,) = ends([(0.0, flows)], capacities)
    for port, capacity in capacities.items():
        num_bytes = sum(each.num_bytes for each in flows if port in each.ports)
        assert end_seconds >= num_bytes / capacity * (1 - 1e-9)
    assert all(end_seconds >= each.num_bytes / each.max_bytes_per_second * (1 - 1e-9) for each in flows)


@pytest.fixture
def num_flows_solved(monkeypatch) -> list[int]:
    """Number of flows of each solve, as they happen."""
    solved = []
    fill = network._fill

    def counting_fill(flows, capacities):
        solved.append(len(flows))
        return fill(flows, capacities)

    monkeypatch.setattr(network, "_fill", counting_fill)
    return solved


def test_what_starts_or_ends_at_one_instant_is_solved_once(num_flows_solved):
    # 4 + 4 flows of 1 byte start together at 1/8 each and end together at 8 s, when 3 more start.
    transfers = [(0.0, [flow(A)] * 4), (0.0, [flow(A)] * 4), (8.0, [flow(A)] * 3)]
    assert ends(transfers, {A: 1.0}) == [8.0, 8.0, 11.0]
    assert num_flows_solved == [8, 3]


def test_flows_that_share_nothing_with_a_change_are_not_solved_again(num_flows_solved):
    transfers = [(0.0, [flow(A, num_bytes=9.0), flow(A, num_bytes=9.0)]), (1.0, [flow(B)]), (2.0, [flow(B, C)])]
    ends(transfers, {A: 1.0, B: 1.0, C: 1.0})
    assert num_flows_solved == [2, 1, 1]


def test_flows_slower_than_all_that_changes_are_not_solved_again(num_flows_solved):
    # A is full at 0.5 each. On B a flow comes, and an equal share of 3 a second is more than the second flow of A has;
    # when it ends, so is its rate.
    slow = [flow(A, num_bytes=50.0), flow(A, B, num_bytes=50.0)]
    transfers = [(0.0, [*slow, flow(B, num_bytes=500.0)]), (1.0, [flow(B, num_bytes=8.5)])]
    assert ends(transfers, {A: 1.0, B: 9.0}) == pytest.approx([100.0, 3.0])
    # Nobody is solved again when the third flow ends after 1 s at 8.5, 2 s at 4.25 and 56.8 s at 8.5.
    assert num_flows_solved == [3, 2, 1, 0]


def test_flows_of_64_ranks_with_distinct_sizes_are_solved_once_for_each_end(num_flows_solved):
    core = ("core", 0)
    capacities: dict[Port, float] = {("out", rank): 1.0 * GB for rank in range(64)} | {core: 30.0 * GB}
    flows = [flow(("out", rank), core, num_bytes=1e6 * (rank + 1)) for rank in range(64)]
    ends([(0.0, flows)], capacities)
    assert num_flows_solved == list(range(64, 0, -1))


@pytest.mark.bench
def test_flows_of_64_ranks_with_distinct_sizes_take_well_under_100_ms():
    core = ("core", 0)
    capacities: dict[Port, float] = {("out", rank): 1.0 * GB for rank in range(64)} | {core: 30.0 * GB}
    flows = [flow(("out", rank), core, num_bytes=1e6 * (rank + 1)) for rank in range(64)]
    began = time.perf_counter()
    ends([(0.0, flows)], capacities)
    assert time.perf_counter() - began < 0.05
