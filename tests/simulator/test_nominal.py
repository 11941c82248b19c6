"""What topology, faults and over-subscription add to what curves say: by hand, and as laws of any cluster."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.collectives import CollectiveCosts
from simulator.fabric import Traffic
from simulator.group_flows import WireSeconds
from simulator.nominal import FULL_REACH, NominalFabric, Reach, reach
from simulator.simulation import simulate
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import BUILT_IN_CLUSTERS, ClusterSpec, DeviceKind
from simulator.specs.program import GROUP_COLLECTIVES, Task, TaskKind
from simulator.specs.topology import LinkFault, NetworkSpec
from simulator.specs.units import GB, MIB
from tests.made import (
    DEVICE_NAME,
    equal_parts,
    graph_of,
    made_calibration,
    made_cluster,
    made_collective,
    made_collective_sample,
    made_model,
    made_plan,
    made_task,
)
from tests.simulator.test_collectives import on_hosts, seconds_of

H100 = BUILT_IN_CLUSTERS["h100x8-ndr"]
WITH_NVLINK = ("a100x8-hdr", "h100x8-ndr", "h200x8-roce", "b200x8-ndr")
kinds = st.sampled_from(sorted(GROUP_COLLECTIVES))
LARGE = 256 * MIB


def price(cluster: ClusterSpec, tasks: tuple[Task, ...], calibration: Calibration | None = None) -> float:
    return seconds_of(CollectiveCosts(cluster, calibration).price(tasks), cluster)


def with_faults(cluster: ClusterSpec, *faults: LinkFault) -> ClusterSpec:
    return replace(cluster, link_faults=faults)


def hosts_of_eight(kind: TaskKind, num_bytes: int, *hosts: int) -> tuple[Task, ...]:
    """Return a collective of whole hosts; of an all-to-all each rank sends as much to every other."""
    group = tuple(8 * host + device for host in hosts for device in range(8))
    if kind is not TaskKind.ALL_TO_ALL:
        return on_hosts(kind, num_bytes, group)
    each = num_bytes // (len(group) - 1)
    rows = [tuple(each * (other != rank) for other in group) for rank in group]
    return tuple(made_task(kind, row, group=group) for row in rows)


# --- Nominal ports, by hand.


def test_bytes_on_nominal_ports_by_hand():
    # Two hosts of two devices: 1 GB/s each, and two cards of 0.1 GB/s a host.
    nominal = NominalFabric(made_cluster(num_hosts=2, devices_per_host=2))
    ring = nominal.wire_seconds(Traffic(group=(0, 1, 2, 3), ring_bytes=1e9))
    assert (ring.of_links, ring.of_cards) == pytest.approx((1.0, 5.0))
    pair_bytes = np.zeros((4, 4))
    pair_bytes[0, 1], pair_bytes[0, 2] = 3e9, 1e9
    pairs = nominal.wire_seconds(Traffic(group=(0, 1, 2, 3), pair_bytes=pair_bytes))
    assert (pairs.of_links, pairs.of_cards) == pytest.approx((4.0, 10.0))  # through the card of rank 0
    inside = nominal.wire_seconds(Traffic(group=(0, 1), ring_bytes=1e9))
    assert (inside.of_links, inside.of_cards) == pytest.approx((1.0, 0.0))


def test_what_is_left_of_rates_by_hand():
    assert reach(WireSeconds(1.0, 2.0), WireSeconds(4.0, 2.0)) == Reach(0.25, 1.0)
    assert reach(WireSeconds(1.0, 2.0), WireSeconds(0.5, 2.0 + 1e-12)) == FULL_REACH
    assert reach(WireSeconds(0.0, 0.0), WireSeconds(0.0, 0.0)) == FULL_REACH


def test_a_rank_alone_on_its_host_has_the_only_card_to_itself():
    shared = replace(made_cluster(num_hosts=2, devices_per_host=4), network=NetworkSpec(nics_per_host=1))
    nominal = NominalFabric(shared)
    # One card is four devices' share.
    assert nominal.shape((0, 4)).cards_per_host == 4
    assert nominal.shape(tuple(range(8))).cards_per_host == 4
    own = NominalFabric(made_cluster(num_hosts=2, devices_per_host=4))
    assert (own.shape((0, 4)).cards_per_host, own.shape((0, 1, 4, 5)).cards_per_host) == (1, 2)


# --- Healthy topologies.


@pytest.mark.parametrize("name", WITH_NVLINK)
@given(kind=kinds, num_bytes=st.integers(1, 10**9), num_hosts=st.sampled_from([1, 2, 4]))
def test_hosts_with_nvlink_and_a_card_a_device_cost_what_curves_say(name, kind, num_bytes, num_hosts):
    cluster = BUILT_IN_CLUSTERS[name]
    plain = replace(cluster, host=None, network=None)
    tasks = made_collective(kind, num_bytes, 8 * num_hosts)
    assert price(cluster, tasks) == pytest.approx(price(plain, tasks), rel=1e-6)


def test_oversubscription_lengthens_what_crosses_leaves_and_nothing_else():
    fair = replace(H100, network=NetworkSpec(hosts_per_leaf=2))
    narrow = replace(H100, network=NetworkSpec(hosts_per_leaf=2, oversubscription=8))
    below = hosts_of_eight(TaskKind.ALL_TO_ALL, LARGE, 0, 1)
    across = hosts_of_eight(TaskKind.ALL_TO_ALL, LARGE, 0, 2)
    assert price(narrow, below) == pytest.approx(price(fair, below))
    # Each leaf sends a host's bytes over two hosts' cards / 8: four times as long.
    assert price(narrow, across) > 2.5 * price(fair, across)


def test_case_p1_the_length_of_a_step_follows_from_the_topology():
    plan = made_plan(equal_parts(16, num_nodes=4000, num_edges=32_000, halo_rows=500))
    fabrics = {
        "rails": H100,
        "one leaf a host": replace(H100, network=NetworkSpec(hosts_per_leaf=1)),
        "over-subscribed": replace(H100, network=NetworkSpec(hosts_per_leaf=1, oversubscription=8)),
        "a slow card": with_faults(H100, LinkFault(ends=("nic0", "network"), bandwidth_ratio=0.02)),
        "ethernet": BUILT_IN_CLUSTERS["h100x8-ethernet"],
    }
    calibration = made_calibration(num_ranks=(8,), collective_seconds=lambda *_: 1e-5)
    calibration = replace(calibration, device_name=H100.device.name, collectives=())
    seconds = {
        name: simulate(plan, graph_of(plan.partition), made_model(), cluster, calibration).median_step_seconds
        for name, cluster in fabrics.items()
    }
    assert seconds["one leaf a host"] == pytest.approx(seconds["rails"])  # nothing is over-subscribed
    assert len({seconds[name] for name in fabrics}) >= 4
    assert all(seconds[name] > seconds["rails"] for name in ("over-subscribed", "a slow card", "ethernet"))


# --- Faults.


@pytest.mark.parametrize("kind", sorted(GROUP_COLLECTIVES))
def test_a_slow_card_lengthens_what_crosses_hosts_by_about_its_factor(kind):
    slow = with_faults(H100, LinkFault(ends=("nic3", "network"), host=1, bandwidth_ratio=0.25))
    across, inside = hosts_of_eight(kind, LARGE, 0, 1), hosts_of_eight(kind, LARGE, 1)
    assert price(slow, inside) == pytest.approx(price(H100, inside))
    # In-switch reduction sends half of a ring's bytes over cards, which then are not all of its time.
    assert 2.2 < price(slow, across) / price(H100, across) < 4.2
    elsewhere = hosts_of_eight(kind, LARGE, 0, 2)
    assert price(slow, elsewhere) == pytest.approx(price(H100, elsewhere))


@pytest.mark.parametrize("kind", sorted(GROUP_COLLECTIVES))
def test_a_slow_nvlink_lengthens_what_it_carries(kind):
    slow = with_faults(H100, LinkFault(ends=("device3", "nvswitch"), host=0, bandwidth_ratio=0.25))
    inside = hosts_of_eight(kind, LARGE, 0)
    # A quarter of 450 GB/s where collectives sustain 330.
    assert 2 < price(slow, inside) / price(H100, inside) < 3.1
    assert price(slow, hosts_of_eight(kind, LARGE, 1)) == pytest.approx(price(H100, hosts_of_eight(kind, LARGE, 1)))


def test_a_link_that_is_still_faster_than_needed_changes_nothing():
    hardly = with_faults(H100, LinkFault(ends=("device3", "nvswitch"), bandwidth_ratio=0.9))
    tasks = hosts_of_eight(TaskKind.ALL_REDUCE, LARGE, 0)
    assert price(hardly, tasks) == pytest.approx(price(H100, tasks))


@pytest.mark.parametrize("kind", sorted(GROUP_COLLECTIVES))
def test_a_lost_card_lengthens_what_crosses_hosts(kind):
    lost = with_faults(H100, LinkFault(ends=("nic0", "network"), host=0, bandwidth_ratio=0.0))
    tasks = hosts_of_eight(kind, LARGE, 0, 1)
    assert price(lost, tasks) > 1.05 * price(H100, tasks)


@given(kind=kinds, num_bytes=st.integers(10**6, 10**9), ratio=st.floats(0.01, 1), less=st.floats(0.1, 1))
def test_the_slower_a_link_the_longer_a_collective(kind, num_bytes, ratio, less):
    tasks = hosts_of_eight(kind, num_bytes, 0, 1)
    for ends in (("nic0", "network"), ("device0", "host"), ("device0", "nvswitch"), ("nic5", "pcie5")):
        seconds = [
            price(with_faults(H100, LinkFault(ends=ends, bandwidth_ratio=each)), tasks)
            for each in (1.0, ratio, ratio * less)
        ]
        assert seconds[0] <= (1 + 1e-9) * seconds[1] <= (1 + 1e-9) ** 2 * seconds[2]


def test_a_message_over_a_slow_card_takes_longer():
    slow = with_faults(H100, LinkFault(ends=("nic0", "network"), host=0, bandwidth_ratio=0.1))
    near, far, elsewhere = (
        [
            seconds_of(CollectiveCosts(cluster, None).message(LARGE, source=source, target=target), cluster)
            for cluster in (H100, slow)
        ]
        for source, target in ((0, 1), (0, 8), (1, 9))
    )
    assert near[0] == near[1]
    assert elsewhere[0] == elsewhere[1]
    assert far[1] == pytest.approx(10 * far[0], rel=0.1)


# --- What was measured here knows this topology, and not what has become of it since.


def measured(cluster: ClusterSpec, num_ranks: int, num_hosts: int, seconds: float) -> Calibration:
    samples = tuple(
        replace(made_collective_sample(kind, num_ranks, size, seconds * size / MIB), num_hosts=num_hosts)
        for kind in GROUP_COLLECTIVES
        for size in (1, MIB, 1024 * MIB)
    )
    return Calibration(device_name=cluster.device.name, environment=(), computes=(), collectives=samples)


@pytest.mark.parametrize("kind", sorted(GROUP_COLLECTIVES))
@pytest.mark.parametrize("name", ["a100pciex8-hdr", "h100x8-ethernet"])
def test_a_measured_collective_pays_its_topology_once(kind, name):
    cluster = BUILT_IN_CLUSTERS[name]
    calibration = measured(cluster, 16, 2, 1e-2)
    tasks = hosts_of_eight(kind, LARGE, 0, 1)
    assert price(cluster, tasks, calibration) == pytest.approx(2.56, rel=0.01)
    slow = with_faults(cluster, LinkFault(ends=("nic0", "network"), host=0, bandwidth_ratio=0.05))
    assert price(slow, tasks, calibration) > 2 * price(cluster, tasks, calibration)


def test_a_collective_of_cores_that_was_measured_takes_longer_over_a_slow_port():
    cluster = made_cluster(devices_per_host=4, kind=DeviceKind.CPU)
    assert cluster.device.name == DEVICE_NAME
    calibration = measured(cluster, 4, 1, 1e-2)
    tasks = made_collective(TaskKind.ALL_REDUCE, 4 * MIB, 4)
    slow = with_faults(cluster, LinkFault(ends=("device1", "host"), bandwidth_bytes_per_second=0.25 * GB))
    assert price(cluster, tasks, calibration) == pytest.approx(4e-2)
    assert price(slow, tasks, calibration) == pytest.approx(16e-2, rel=0.01)
