import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.collectives import CollectiveCosts, port_capacities
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import ClusterSpec, LinkSpec
from simulator.specs.cost import CollectiveCost
from simulator.specs.program import GROUP_COLLECTIVES, Task, TaskKind
from simulator.specs.units import GB
from tests.made import (
    DEVICE_NAME,
    made_calibration,
    made_cluster,
    made_collective,
    made_collective_sample,
    made_collective_seconds,
    made_task,
)
from tests.strategies import links

KINDS = sorted(GROUP_COLLECTIVES)
kinds = st.sampled_from(KINDS)
sizes = st.integers(0, 10**9)
CLUSTER = made_cluster(num_hosts=4, devices_per_host=8)
FORMULAS = CollectiveCosts(CLUSTER, None)
MEASURED = CollectiveCosts(CLUSTER, made_calibration())
priced = st.sampled_from([FORMULAS, MEASURED])


def seconds_of(cost: CollectiveCost, cluster: ClusterSpec = CLUSTER) -> float:
    """Return what a collective takes when nothing else uses its ports: each port carries its flows one by one."""
    capacities = port_capacities(cluster)
    loads: dict[tuple[str, int], float] = {}
    for flow in cost.flows:
        for port in flow.ports:
            loads[port] = loads.get(port, 0.0) + flow.num_bytes
    slowest = max((flow.num_bytes / flow.max_bytes_per_second for flow in cost.flows), default=0.0)
    return cost.latency_seconds + max([slowest, *(load / capacities[port] for port, load in loads.items())])


def wire_bytes(kind: TaskKind, num_ranks: int, num_bytes: int) -> float:
    """Return the least bytes that each rank must send, by what the collective means.

    An all-reduce is a reduce-scatter and an all-gather of a share of the buffer.
    """
    share = num_bytes / num_ranks
    match kind:
        case TaskKind.ALL_GATHER:
            return (num_ranks - 1) * num_bytes
        case TaskKind.REDUCE_SCATTER:
            return (num_ranks - 1) * share
        case TaskKind.ALL_REDUCE:
            return 2 * (num_ranks - 1) * share
        case _:
            return num_bytes


def on_hosts(kind: TaskKind, num_bytes: int, group: tuple[int, ...]) -> tuple[Task, ...]:
    """Return a collective of any ranks."""
    return tuple(
        dataclasses.replace(task, group=group) for task in made_collective(kind, num_bytes, num_ranks=len(group))
    )


# --- Invariants.


@given(costs=priced, kind=kinds, num_ranks=st.integers(2, 32), num_bytes=sizes, more=sizes)
def test_collectives_grow_with_bytes(costs, kind, num_ranks, num_bytes, more):
    less_seconds = seconds_of(costs.price(made_collective(kind, num_bytes, num_ranks)))
    seconds = seconds_of(costs.price(made_collective(kind, num_bytes + more, num_ranks)))
    assert seconds >= (1 - 1e-9) * less_seconds


@given(costs=priced, kind=kinds, num_bytes=sizes)
def test_one_rank_is_free(costs, kind, num_bytes):
    tasks = (made_task(kind, (num_bytes,), group=(3,)),)
    cost = costs.price(tasks)
    assert (cost.host_seconds, cost.latency_seconds, cost.flows) == (0, 0, ())


@given(kind=kinds, num_ranks=st.integers(2, 32), num_bytes=sizes, device_link=links, host_link=links)
def test_collectives_by_formula_are_no_faster_than_the_wire(kind, num_ranks, num_bytes, device_link, host_link):
    cluster = made_cluster(num_hosts=4, devices_per_host=8, device_link=device_link, host_link=host_link)
    seconds = seconds_of(CollectiveCosts(cluster, None).price(made_collective(kind, num_bytes, num_ranks)), cluster)
    sent_bytes = wire_bytes(kind, num_ranks, num_bytes)
    assert seconds >= (1 - 1e-9) * (device_link.latency_seconds + sent_bytes / device_link.bandwidth_bytes_per_second)
    if num_ranks > 8:
        # What leaves the first host leaves through its eight cards.
        host_rate = 8 * host_link.bandwidth_bytes_per_second
        leaving_bytes = num_bytes if kind is TaskKind.ALL_TO_ALL else sent_bytes
        assert seconds >= (1 - 1e-9) * (host_link.latency_seconds + leaving_bytes / host_rate)


@given(num_ranks=st.integers(2, 32), num_bytes=sizes)
def test_by_formula_no_collective_is_cheaper_than_one_that_it_contains(num_ranks, num_bytes):
    num_bytes -= num_bytes % num_ranks
    all_reduce, reduce_scatter, all_gather = (
        seconds_of(FORMULAS.price(made_collective(kind, given_bytes, num_ranks)))
        for kind, given_bytes in (
            (TaskKind.ALL_REDUCE, num_bytes),
            (TaskKind.REDUCE_SCATTER, num_bytes),
            (TaskKind.ALL_GATHER, num_bytes // num_ranks),
        )
    )
    assert all_reduce >= (1 - 1e-9) * max(reduce_scatter, all_gather)


@given(costs=priced, kind=kinds, data=st.data(), num_bytes=sizes)
def test_collectives_grow_with_ranks(costs, kind, data, num_bytes):
    # Of hosts of eight; a host with fewer ranks has fewer network cards to offer.
    steps = [2, 3, 4, 5, 6, 7, 8, 16, 24, 32]
    fewer, more = sorted(data.draw(st.lists(st.sampled_from(steps), min_size=2, max_size=2, unique=True)))
    fewer_seconds = seconds_of(costs.price(made_collective(kind, num_bytes, fewer)))
    seconds = seconds_of(costs.price(made_collective(kind, num_bytes, more)))
    assert seconds >= (1 - 1e-9) * fewer_seconds


@given(costs=priced, kind=kinds, num_ranks=st.integers(2, 8), num_bytes=sizes)
def test_the_same_ranks_take_longer_on_several_hosts(costs, kind, num_ranks, num_bytes):
    together = on_hosts(kind, num_bytes, tuple(range(num_ranks)))
    apart = on_hosts(kind, num_bytes, (*range(num_ranks - 1), 8))
    assert seconds_of(costs.price(apart)) > seconds_of(costs.price(together))


def test_a_slow_measured_collective_is_no_faster_across_hosts():
    # Measured in a host: ten times what the link's numbers say.
    calibration = made_calibration(collective_seconds=lambda *law: 10 * made_collective_seconds(*law))
    fast_hosts = made_cluster(
        num_hosts=2, devices_per_host=2, host_link=LinkSpec(latency_seconds=0, bandwidth_bytes_per_second=100 * GB)
    )
    costs = CollectiveCosts(fast_hosts, calibration)
    for kind in KINDS:
        together = seconds_of(costs.price(on_hosts(kind, 10**6, (0, 1))), fast_hosts)
        apart = seconds_of(costs.price(on_hosts(kind, 10**6, (0, 2))), fast_hosts)
        assert apart >= (1 - 1e-9) * together


@given(kind=kinds, num_ranks=st.integers(2, 8), num_bytes=st.integers(10**6, 10**8))
def test_twice_the_bandwidth_takes_less_time(kind, num_ranks, num_bytes):
    slow, fast = (
        made_cluster(
            devices_per_host=8, device_link=LinkSpec(latency_seconds=1e-6, bandwidth_bytes_per_second=rate * GB)
        )
        for rate in (1, 2)
    )
    tasks = made_collective(kind, num_bytes, num_ranks)
    slow_seconds, fast_seconds = (
        seconds_of(CollectiveCosts(cluster, None).price(tasks), cluster) for cluster in (slow, fast)
    )
    assert fast_seconds - 1e-6 == pytest.approx((slow_seconds - 1e-6) / 2)


# --- Measured curves.


@pytest.mark.parametrize("sample", made_calibration(spread=1.0).collectives, ids=lambda s: f"{s.kind}-{s.num_ranks}")
def test_a_measured_size_takes_what_was_measured(sample):
    tasks = made_collective(sample.kind, sample.num_bytes, sample.num_ranks)
    cost = CollectiveCosts(CLUSTER, made_calibration(host_seconds=3e-6)).price(tasks)
    assert seconds_of(cost) == pytest.approx(sample.seconds)
    assert cost.host_seconds == pytest.approx(3e-6)


def curve_costs(points: dict[int, float], kind: TaskKind = TaskKind.ALL_REDUCE, num_ranks: int = 2) -> CollectiveCosts:
    """Return costs from one measured curve of sizes to seconds."""
    samples = tuple(made_collective_sample(kind, num_ranks, size, seconds) for size, seconds in points.items())
    return CollectiveCosts(
        CLUSTER, Calibration(device_name=DEVICE_NAME, environment=(), computes=(), collectives=samples)
    )


@pytest.mark.parametrize(
    ("num_bytes", "seconds"),
    [
        # Measured 1 ms at 100 bytes and 4 ms at 10,000: half-way by logarithms is 2 ms at 1000 bytes.
        (100, 1e-3),
        (1000, 2e-3),
        (10_000, 4e-3),
        # Below the least size a message costs as much as the least; above the largest, time follows bytes.
        (1, 1e-3),
        (0, 1e-3),
        (30_000, 12e-3),
    ],
)
def test_between_measured_sizes_time_is_interpolated_by_logarithms(num_bytes, seconds):
    costs = curve_costs({100: 1e-3, 10_000: 4e-3})
    assert seconds_of(costs.price(made_collective(TaskKind.ALL_REDUCE, num_bytes, 2))) == pytest.approx(seconds)


def test_a_measured_size_of_no_bytes_is_the_cost_of_no_bytes():
    costs = curve_costs({0: 1e-3, 1000: 2e-3})
    seconds = [seconds_of(costs.price(made_collective(TaskKind.ALL_REDUCE, size, 2))) for size in (0, 500, 1000)]
    assert seconds[0] == pytest.approx(1e-3)
    assert 1e-3 <= seconds[1] <= 2e-3
    assert seconds[2] == pytest.approx(2e-3)


def test_noise_in_a_curve_does_not_make_larger_messages_cheaper():
    costs = curve_costs({100: 3e-3, 1000: 1e-3, 10_000: 5e-3})
    assert seconds_of(costs.price(made_collective(TaskKind.ALL_REDUCE, 1000, 2))) == pytest.approx(3e-3)


def test_a_curve_of_other_ranks_serves_for_the_bytes_that_a_port_carries():
    # Measured on 2 ranks, where an all-reduce of n bytes sends n; on 4 ranks it sends 1.5 n.
    costs = curve_costs({1000: 1e-3, 100_000: 10e-3})
    seconds = seconds_of(costs.price(made_collective(TaskKind.ALL_REDUCE, 20_000, 4)))
    on_two = seconds_of(costs.price(made_collective(TaskKind.ALL_REDUCE, 30_000, 2)))
    assert seconds == pytest.approx(on_two, rel=1e-3)  # bytes of samples are whole


def test_an_all_to_all_is_priced_by_its_busiest_rank_whether_it_sends_or_receives():
    costs = curve_costs({1000: 1e-3, 2000: 2e-3, 3000: 3e-3}, TaskKind.ALL_TO_ALL, num_ranks=3)

    def seconds(*rows: tuple[int, int, int]) -> float:
        tasks = tuple(made_task(TaskKind.ALL_TO_ALL, row, group=(0, 1, 2)) for row in rows)
        return seconds_of(costs.price(tasks))

    assert seconds((0, 1000, 2000), (0, 0, 0), (0, 0, 0)) == pytest.approx(3e-3)
    assert seconds((0, 0, 1000), (0, 0, 1000), (0, 0, 0)) == pytest.approx(2e-3)
    assert seconds((0, 1000, 0), (0, 0, 1000), (1000, 0, 0)) == pytest.approx(1e-3)


def test_the_spread_is_that_of_the_nearest_curve():
    costs = CollectiveCosts(CLUSTER, made_calibration(spread=1.5))
    task = made_collective(TaskKind.ALL_REDUCE, 1000, 2)[0]
    assert costs.log_spread(task) == pytest.approx(0.405465, rel=1e-5)
    assert FORMULAS.log_spread(task) == 0


# --- Flows.


def test_an_all_reduce_by_hand():
    # 4 ranks of a host, 4 MB, 1 GB/s, 5 us: each port carries 6 MB in 6 ms.
    cost = FORMULAS.price(made_collective(TaskKind.ALL_REDUCE, 4_000_000, 4))
    assert cost.latency_seconds == 5e-6
    assert [flow.num_bytes for flow in cost.flows] == pytest.approx([6e6] * 4)
    assert [flow.ports for flow in cost.flows] == [(("device_out", rank), ("device_in", rank)) for rank in range(4)]
    assert seconds_of(cost) == pytest.approx(6.005e-3)


def test_an_all_to_all_across_hosts_by_hand():
    # Two hosts of two devices. Ranks 0 and 1 send 1 MB each to ranks 2 and 3, nothing comes back.
    cluster = made_cluster(num_hosts=2, devices_per_host=2)
    group = (0, 1, 2, 3)
    shapes = ((0, 0, 10**6, 0), (0, 0, 0, 10**6), (0,) * 4, (0,) * 4)
    tasks = tuple(made_task(TaskKind.ALL_TO_ALL, shape, group=group) for shape in shapes)
    cost = CollectiveCosts(cluster, None).price(tasks)
    # 2 MB leave host 0 through two cards of 0.1 GB/s: 10 ms, after the 50 us of the network.
    assert seconds_of(cost, cluster) == pytest.approx(10.05e-3)
    ports = {flow.ports for flow in cost.flows}
    assert {(("host_out", host), ("host_in", host)) for host in (0, 1)} <= ports


def test_ports_by_hand():
    # Two hosts of two devices: 1 GB/s each, and two cards of 0.1 GB/s a host.
    capacities = port_capacities(made_cluster(num_hosts=2, devices_per_host=2))
    expected = {(port, device): 1e9 for port in ("device_out", "device_in") for device in range(4)}
    expected |= {(port, host): 0.2e9 for port in ("host_out", "host_in") for host in range(2)}
    assert capacities == pytest.approx(expected)
