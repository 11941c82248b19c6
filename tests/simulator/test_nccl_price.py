"""Collectives of GPUs, priced by the constants that come with the project: invariants, choices, extrapolation."""

import dataclasses
import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.collectives import CollectiveCosts, extrapolations, port_capacities
from simulator.group_shape import GroupShape, even_shape, group_shape
from simulator.nccl_price import published_price
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import BUILT_IN_CLUSTERS, ClusterSpec
from simulator.specs.communication import Algorithm, Operation, Protocol, bus_factor
from simulator.specs.cost import CollectiveCost
from simulator.specs.program import GROUP_COLLECTIVES, Program, Task, TaskKind
from simulator.specs.units import GB, MIB
from tests.made import made_collective, made_collective_sample, made_task

H100 = dataclasses.replace(BUILT_IN_CLUSTERS["h100x8-ndr"], num_hosts=16)
A100 = dataclasses.replace(H100, device=dataclasses.replace(H100.device, name="NVIDIA A100-SXM4-80GB"))
UNKNOWN = dataclasses.replace(H100, device=dataclasses.replace(H100.device, name="GPU of tomorrow"))
CLUSTERS = [H100, A100, UNKNOWN]
clusters = st.sampled_from(CLUSTERS)
kinds = st.sampled_from(sorted(GROUP_COLLECTIVES))
operations = st.sampled_from(
    [Operation.ALL_REDUCE, Operation.ALL_GATHER, Operation.REDUCE_SCATTER, Operation.ALL_TO_ALL]
)
sizes = st.integers(0, 2 * 10**9)
# NVLink 4 carries 450 GB/s each way by NVIDIA's data sheet of the H100, and `NVLINK4` states 330 as sustained.
LINE_OVER_SUSTAINED = 450 / 330


def seconds_of(cost: CollectiveCost, cluster: ClusterSpec = H100) -> float:
    """Return what a collective takes when nothing else uses its ports."""
    capacities = port_capacities(cluster)
    loads: dict[tuple[str, int], float] = {}
    for flow in cost.flows:
        for port in flow.ports:
            loads[port] = loads.get(port, 0.0) + flow.num_bytes
    slowest = max((flow.num_bytes / flow.max_bytes_per_second for flow in cost.flows), default=0.0)
    return cost.latency_seconds + max([slowest, *(load / capacities[port] for port, load in loads.items())])


def collective(kind: TaskKind, num_bytes: int, group: tuple[int, ...]) -> tuple[Task, ...]:
    return tuple(dataclasses.replace(task, group=group) for task in made_collective(kind, num_bytes, len(group)))


def even_all_to_all(num_bytes: int, group: tuple[int, ...]) -> tuple[Task, ...]:
    each = num_bytes // (len(group) - 1)
    rows = [tuple(each * (other != rank) for other in group) for rank in group]
    return tuple(made_task(TaskKind.ALL_TO_ALL, row, group=group) for row in rows)


def price(operation: Operation, ranks: int, hosts: int, num_bytes: float, cluster: ClusterSpec = H100) -> float:
    return published_price(operation, even_shape(ranks, hosts), num_bytes, cluster).seconds


# --- Invariants (P10).


@given(cluster=clusters, operation=operations, ranks=st.integers(2, 8), num_bytes=sizes, more=sizes)
def test_cost_grows_with_bytes(cluster, operation, ranks, num_bytes, more):
    for hosts in (1, 2, 4, 16):
        less = price(operation, ranks * hosts, hosts, num_bytes, cluster)
        assert price(operation, ranks * hosts, hosts, num_bytes + more, cluster) >= (1 - 1e-9) * less


@given(cluster=clusters, operation=operations, num_bytes=sizes, data=st.data())
def test_cost_grows_with_ranks_of_a_host_and_with_hosts_of_eight(cluster, operation, num_bytes, data):
    steps = [(2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (16, 2), (24, 3), (32, 4), (64, 8), (128, 16)]
    fewer, more = sorted(data.draw(st.lists(st.sampled_from(steps), min_size=2, max_size=2, unique=True)))
    less, seconds = (price(operation, ranks, hosts, num_bytes, cluster) for ranks, hosts in (fewer, more))
    assert seconds >= (1 - 1e-9) * less


@given(cluster=clusters, operation=operations, num_bytes=sizes)
def test_the_same_ranks_cost_more_on_more_hosts(cluster, operation, num_bytes):
    seconds = [price(operation, 8, hosts, num_bytes, cluster) for hosts in (1, 2, 4, 8)]
    assert seconds == sorted(seconds)


@given(cluster=clusters, ranks=st.integers(2, 8), hosts=st.sampled_from([1, 2, 3, 8, 16]), num_bytes=sizes)
def test_p10_no_operation_is_cheaper_than_one_that_it_contains(cluster, ranks, hosts, num_bytes):
    ranks *= hosts
    all_reduce = price(Operation.ALL_REDUCE, ranks, hosts, num_bytes, cluster)
    assert all_reduce >= price(Operation.REDUCE_SCATTER, ranks, hosts, num_bytes, cluster)
    assert all_reduce >= price(Operation.ALL_GATHER, ranks, hosts, num_bytes, cluster)
    # Each rank of an all-to-all sends a message of its share to one other.
    shape = even_shape(2, 2 if hosts > 1 else 1)
    message = published_price(Operation.SEND_RECEIVE, shape, num_bytes / ranks, cluster).seconds
    assert price(Operation.ALL_TO_ALL, ranks, hosts, max(num_bytes, ranks), cluster) >= (1 - 1e-9) * message


def test_p10_an_all_to_all_is_not_priced_as_an_all_gather():
    given_bytes, group = 8 * MIB, tuple(range(8))
    costs = CollectiveCosts(H100, None)
    exchange = seconds_of(costs.price(even_all_to_all(given_bytes, group)))
    gather = seconds_of(costs.price(collective(TaskKind.ALL_GATHER, given_bytes, group)))
    # The gather brings seven times as many bytes to each rank.
    assert 3 * exchange < gather


@given(kind=kinds, hosts=st.sampled_from([1, 2, 4]), num_bytes=st.integers(10**3, 10**9))
def test_wires_are_respected(kind, hosts, num_bytes):
    ranks = 8 * hosts
    tasks = collective(kind, num_bytes, tuple(range(ranks)))
    seconds = seconds_of(CollectiveCosts(H100, None).price(tasks))
    link = LINE_OVER_SUSTAINED * H100.device_link.bandwidth_bytes_per_second
    # In-switch reduction spares an all-reduce half of the ring's bytes: each rank sends its own once.
    sent = {
        TaskKind.ALL_REDUCE: num_bytes,
        TaskKind.ALL_GATHER: num_bytes * (ranks - 1),
        TaskKind.ALL_TO_ALL: num_bytes,
    }
    assert seconds >= sent.get(kind, num_bytes * (ranks - 1) / ranks) / link
    if hosts > 1 and kind is not TaskKind.ALL_TO_ALL:
        # What a host has and others lack, through its eight cards.
        leaving = {TaskKind.ALL_REDUCE: num_bytes, TaskKind.ALL_GATHER: 8 * num_bytes * (hosts - 1)}
        cards = 8 * H100.host_link.bandwidth_bytes_per_second
        assert seconds >= (1 - 1e-9) * leaving.get(kind, num_bytes * (hosts - 1) / hosts) / cards


@given(kind=kinds, num_bytes=st.integers(1, 10**9), seed=st.integers(0, 100), count=st.sampled_from([2, 3, 4]))
def test_which_hosts_they_are_changes_nothing(kind, num_bytes, seed, count):
    hosts = random.Random(seed).sample(range(16), count)
    here = tuple(8 * host + device for host in range(count) for device in range(8))
    there = tuple(8 * host + device for host in hosts for device in range(8))
    costs = CollectiveCosts(H100, None)
    first = costs.price(collective(kind, num_bytes, here))
    second = costs.price(collective(kind, num_bytes, there))
    assert seconds_of(first) == pytest.approx(seconds_of(second))
    assert first.latency_seconds == second.latency_seconds


# --- All-to-alls of uneven sizes, hierarchical ones, messages.


def test_an_uneven_all_to_all_takes_what_its_busiest_card_carries():
    group = tuple(range(16))
    costs = CollectiveCosts(H100, None)
    even = even_all_to_all(150 * MIB, group)
    # The same bytes of rank 0, but all of them to one rank of the other host, whose card carries them alone.
    rows = [tuple(150 * MIB * (rank == 0 and other == 8) for other in group) for rank in group]
    uneven = tuple(made_task(TaskKind.ALL_TO_ALL, row, group=group) for row in rows)
    # By hand: 157.3 MB through one card of 49 GB/s, of which an exchange between two hosts reaches 78 %.
    expected = 150 * MIB / (49 * GB * 0.78)
    cost = costs.price(uneven)
    assert seconds_of(cost) - cost.latency_seconds == pytest.approx(expected, rel=0.05)
    assert seconds_of(cost) > 1.5 * seconds_of(costs.price(even))


def test_an_all_to_all_that_stays_in_its_hosts_pays_no_card():
    group = tuple(range(16))
    costs = CollectiveCosts(H100, None)
    rows = [tuple(150 * MIB * (other == rank ^ 1) for other in group) for rank in group]
    inside = costs.price(tuple(made_task(TaskKind.ALL_TO_ALL, row, group=group) for row in rows))
    assert seconds_of(inside) < 0.5 * seconds_of(costs.price(even_all_to_all(150 * MIB, group)))
    assert not any("nic" in port for flow in inside.flows for port, _ in flow.ports)


def test_p4_thousands_of_prices_take_seconds():
    costs = CollectiveCosts(H100, None)
    groups = [tuple(range(8)), tuple(range(16))]
    sizes = [2**power for power in range(10, 30)]
    tasks = [collective(TaskKind.ALL_REDUCE, size, group) for group in groups for size in sizes]
    started = time.perf_counter()
    for _ in range(60):
        for each in tasks:
            costs.price(each)
    assert time.perf_counter() - started < 10  # 0.1 ms each where a shape and a size come again


def test_a_hierarchical_exchange_pays_the_network_only_between_hosts():
    costs = CollectiveCosts(H100, None)
    group = tuple(range(16))
    all_pairs = seconds_of(costs.price(even_all_to_all(150 * MIB, group)))
    # Half of the rows cross once, to one rank of the other host; then they are passed on within each host.
    rows = [tuple(40 * MIB * (other == (rank + 8) % 16) for other in group) for rank in group]
    between = seconds_of(costs.price(tuple(made_task(TaskKind.ALL_TO_ALL, row, group=group) for row in rows)))
    inside = seconds_of(costs.price(even_all_to_all(80 * MIB, tuple(range(8)))))
    assert between > inside
    assert between + inside < all_pairs


def test_a_message_between_hosts_takes_its_card_and_one_inside_does_not():
    costs = CollectiveCosts(H100, None)
    near = costs.message(512 * MIB, source=0, target=1)
    far = costs.message(512 * MIB, source=0, target=8)
    own = {(f"device_{way}", device) for way in ("out", "in") for device in (0, 1)}
    assert {port for flow in near.flows for port in flow.ports} == own | {
        ("device0>nvswitch", 0),
        ("nvswitch>device1", 0),
    }
    assert {("nic0>network", 0), ("network>nic0", 1)} <= {port for flow in far.flows for port in flow.ports}
    # H200s of comm.csv moved 512 MiB one way in 1.46 ms; NDR carries 49 GB/s.
    assert seconds_of(near) == pytest.approx(1.46e-3, rel=0.25)
    assert seconds_of(far) >= 512 * MIB / (49 * GB)
    assert costs.message(0, source=0, target=8).flows == ()


# --- NCCL_ALGO, NCCL_PROTO.


@pytest.mark.parametrize(
    ("algorithm", "protocol", "num_bytes"),
    [
        (Algorithm.RING, None, 16 * MIB),
        (Algorithm.TREE, None, 256 * MIB),
        (None, Protocol.LL, 256 * MIB),
        (None, Protocol.LL128, 256 * MIB),
        (None, Protocol.SIMPLE, 1024),
        (Algorithm.RING, Protocol.SIMPLE, 1024),
    ],
)
def test_what_nccl_is_told_to_take_has_an_effect(algorithm, protocol, num_bytes):
    told = dataclasses.replace(H100, nccl_algorithm=algorithm, nccl_protocol=protocol)
    assert price(Operation.ALL_REDUCE, 16, 2, num_bytes, told) > 1.05 * price(Operation.ALL_REDUCE, 16, 2, num_bytes)


def test_an_algorithm_that_does_not_exist_leaves_the_choice_to_nccl():
    told = dataclasses.replace(A100, nccl_algorithm=Algorithm.NVLS)
    assert price(Operation.ALL_REDUCE, 8, 1, MIB, told) == price(Operation.ALL_REDUCE, 8, 1, MIB, A100)


def test_a_curve_of_one_algorithm_does_not_serve_another():
    ring = dataclasses.replace(made_collective_sample(TaskKind.ALL_REDUCE, 8, MIB, 1.0), algorithm=Algorithm.RING)
    calibration = Calibration(device_name=H100.device.name, environment=(), computes=(), collectives=(ring,))
    tasks = collective(TaskKind.ALL_REDUCE, MIB, tuple(range(8)))
    told = dataclasses.replace(H100, nccl_algorithm=Algorithm.RING)
    assert seconds_of(CollectiveCosts(told, calibration).price(tasks)) == pytest.approx(1.0)
    assert seconds_of(CollectiveCosts(H100, calibration).price(tasks)) < 1e-3


# --- Measurements first; extrapolation is marked and widens the interval.


def calibrated(num_ranks: int, num_hosts: int, seconds: float, *, spread: float = 1.0) -> CollectiveCosts:
    samples = tuple(
        dataclasses.replace(
            made_collective_sample(TaskKind.ALL_REDUCE, num_ranks, size, seconds * size / MIB, spread=spread),
            num_hosts=num_hosts,
        )
        for size in (MIB, 16 * MIB)
    )
    return CollectiveCosts(
        H100, Calibration(device_name=H100.device.name, environment=(), computes=(), collectives=samples)
    )


def test_what_was_measured_across_hosts_comes_first():
    costs = calibrated(16, 2, 1e-3)
    cost = costs.price(collective(TaskKind.ALL_REDUCE, 4 * MIB, tuple(range(16))))
    assert seconds_of(cost) == pytest.approx(4e-3)
    assert cost.extrapolated == ()


def test_beyond_the_measured_hosts_the_ratio_of_the_constants_tells():
    costs = calibrated(16, 2, 1e-3)
    cost = costs.price(collective(TaskKind.ALL_REDUCE, 4 * MIB, tuple(range(64))))
    ratio = price(Operation.ALL_REDUCE, 64, 8, 4 * MIB) / price(Operation.ALL_REDUCE, 16, 2, 4 * MIB)
    assert seconds_of(cost) == pytest.approx(4e-3 * ratio)
    assert cost.extrapolated == ("64 ranks on 8 hosts, measured on 16 ranks on 2 hosts",)


@pytest.mark.parametrize(
    ("kind", "num_bytes", "ranks", "told"),
    [
        (TaskKind.ALL_REDUCE, 2**36, 16, "bytes, measured up to"),
        (TaskKind.ALL_REDUCE, MIB, 128, "16 hosts, measured up to 8"),
        (TaskKind.ALL_TO_ALL, MIB, 16, "2 hosts, measured up to 1"),
    ],
)
def test_extrapolation_of_the_constants_is_marked_and_widens_the_interval(kind, num_bytes, ranks, told):
    costs = CollectiveCosts(H100, None)
    tasks = collective(kind, num_bytes, tuple(range(ranks)))
    assert any(told in text for text in costs.price(tasks).extrapolated)
    within = collective(TaskKind.ALL_REDUCE, num_bytes if num_bytes < 2**34 else 2**30, tuple(range(8)))
    assert costs.price(within).extrapolated == ()
    assert costs.log_spread(tasks[0]) > costs.log_spread(within[0])


def test_the_farther_beyond_the_measurements_the_wider_the_interval():
    costs = calibrated(16, 2, 1e-3, spread=1.05)
    spreads = [
        costs.log_spread(collective(TaskKind.ALL_REDUCE, MIB, tuple(range(8 * hosts)))[0]) for hosts in (2, 4, 8, 16)
    ]
    assert spreads == sorted(set(spreads))
    sizes = [costs.log_spread(collective(TaskKind.ALL_REDUCE, size, tuple(range(16)))[0]) for size in (MIB, 2**28)]
    assert sizes[0] < sizes[1]


def test_an_unknown_device_is_marked():
    cost = CollectiveCosts(UNKNOWN, None).price(collective(TaskKind.ALL_REDUCE, MIB, tuple(range(8))))
    assert cost.extrapolated == ("GPU of tomorrow, measured on A100, H100, H200",)


def test_p13_a_size_with_unstable_times_has_a_wide_interval_of_its_own():
    stable = made_collective_sample(TaskKind.ALL_REDUCE, 8, MIB, 1e-3, spread=1.02)
    unstable = made_collective_sample(TaskKind.ALL_REDUCE, 8, 4 * MIB, 2e-3, spread=2.0)
    large = made_collective_sample(TaskKind.ALL_REDUCE, 8, 64 * MIB, 9e-3, spread=1.02)
    larger = made_collective_sample(TaskKind.ALL_REDUCE, 8, 256 * MIB, 36e-3, spread=1.02)
    samples = (stable, unstable, large, larger)
    calibration = Calibration(device_name=H100.device.name, environment=(), computes=(), collectives=samples)
    costs = CollectiveCosts(H100, calibration)

    def spread(num_bytes: int) -> float:
        return costs.log_spread(collective(TaskKind.ALL_REDUCE, num_bytes, tuple(range(8)))[0])

    assert spread(4 * MIB) == pytest.approx(0.693, abs=1e-3)
    assert spread(128 * MIB) == pytest.approx(0.0198, abs=1e-3)


def test_p13_congestion_is_modelled_two_collectives_share_the_cards():
    costs = CollectiveCosts(H100, None)
    cost = costs.price(collective(TaskKind.ALL_REDUCE, 2**30, tuple(range(32))))
    host_flows = [flow for flow in cost.flows if ("nic0>network", flow.ports[0][1]) in flow.ports]
    moving = seconds_of(cost) - cost.latency_seconds
    # Alone the cards are used but in part of it; two at once need more than the cards carry in that time.
    capacity = port_capacities(H100)["nic0>network", 0]
    assert len(host_flows) == 4
    assert 0.5 * capacity * moving < host_flows[0].num_bytes <= (1 + 1e-9) * capacity * moving


def test_extrapolations_of_a_program_are_told_once():
    group = tuple(range(128))
    tasks = collective(TaskKind.ALL_REDUCE, MIB, group)
    program = Program(tasks=tuple((task, dataclasses.replace(task, name="again")) for task in tasks))
    assert extrapolations(CollectiveCosts(H100, None), program) == (
        "all_reduce on 128 ranks: 16 hosts, measured up to 8",
    )


# --- Shapes.


def test_the_shape_of_a_group_counts_hosts_and_cards():
    assert group_shape((0, 1, 8), H100) == GroupShape(num_ranks=3, num_hosts=2, ranks_per_host=2, cards_per_host=1)
    assert group_shape((3, 5), H100) == GroupShape(num_ranks=2, num_hosts=1, ranks_per_host=2, cards_per_host=0)
    assert str(even_shape(16, 2)) == "16 ranks on 2 hosts"


@pytest.mark.parametrize(("operation", "factor"), [(Operation.ALL_REDUCE, 1.5), (Operation.ALL_TO_ALL, 0.75)])
def test_bus_factors_by_hand(operation, factor):
    assert bus_factor(operation, 4) == factor
