"""Ports and loads of clusters with a topology: by hand, and as properties of any cluster."""

import dataclasses
import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simulator.collectives import CollectiveCosts
from simulator.errors import PlanError, SpecError
from simulator.fabric import Fabric, Traffic, fabric_of
from simulator.specs.cluster import BUILT_IN_CLUSTERS, ClusterSpec, LinkSpec
from simulator.specs.cost import Flow
from simulator.specs.program import GROUP_COLLECTIVES, Task, TaskKind
from simulator.specs.topology import HostLink, HostTopology, LinkFault, LinkKind, NetworkSpec
from simulator.specs.units import GB
from tests.made import made_cluster, made_collective
from tests.strategies import clusters

# Two sockets with a PCIe switch each, on each two devices and a network card; GB/s: 10 below switches, 5 above, 2
# across.
BOX = HostTopology(
    links=tuple(
        HostLink(ends=ends, kind=kind, bandwidth_bytes_per_second=rate * GB)
        for ends, kind, rate in (
            (("device[0-1]", "pcie0"), LinkKind.PCIE, 10),
            (("device[2-3]", "pcie1"), LinkKind.PCIE, 10),
            (("nic[0-1]", "pcie[0-1]"), LinkKind.PCIE, 10),
            (("pcie[0-1]", "socket[0-1]"), LinkKind.HOST_BRIDGE, 5),
            (("socket0", "socket1"), LinkKind.SOCKET, 2),
        )
    )
)


def box_cluster(**changes: object) -> ClusterSpec:
    """Return four hosts like BOX, two to a leaf, whose two cards carry 0.2 GB/s each."""
    cluster = made_cluster(num_hosts=4, devices_per_host=4)
    return replace(cluster, **{"host": BOX, "network": NetworkSpec(hosts_per_leaf=2), **changes})  # type: ignore[arg-type]


def mesh(*links: tuple[int, int, float]) -> ClusterSpec:
    """Return a host whose devices are joined by NVLinks of so many GB/s."""
    num_devices = 1 + max(max(a, b) for a, b, _ in links)
    host = HostTopology(
        links=tuple(
            HostLink(ends=(f"device{a}", f"device{b}"), kind=LinkKind.NVLINK, bandwidth_bytes_per_second=rate * GB)
            for a, b, rate in links
        )
    )
    return replace(made_cluster(devices_per_host=num_devices), host=host)


def port_loads(flows: list[Flow]) -> dict[tuple[str, int], float]:
    loads: dict[tuple[str, int], float] = {}
    for flow in flows:
        for port in flow.ports:
            loads[port] = loads.get(port, 0.0) + flow.num_bytes
    return loads


def seconds_of(fabric: Fabric, flows: list[Flow]) -> float:
    """Return when the busiest port is done."""
    return max((load / fabric.capacities[port] for port, load in port_loads(flows).items()), default=0.0)


def all_flows(fabric: Fabric, traffic: Traffic, num_hosts: int = 2) -> list[Flow]:
    outside = fabric.host_flows(traffic) if num_hosts > 1 else []
    return [*fabric.device_flows(traffic.group, 1e-3), *fabric.link_flows(traffic), *outside]


def traffics(num_ranks: int) -> list[Traffic]:
    """Return a ring of a gigabyte, all pairs alike, and one that differs from pair to pair."""
    group = tuple(range(num_ranks))
    apart = 1 - np.eye(num_ranks)
    uneven = apart * (1 + np.arange(num_ranks**2).reshape(num_ranks, num_ranks) ** 2 % 7)
    return [
        Traffic(group=group, ring_bytes=1e9),
        Traffic(group=group, pair_bytes=apart * 1e8),
        Traffic(group=group, pair_bytes=uneven * 1e8),
    ]


# --- By hand.


def test_a_ring_crosses_each_link_of_a_tree_once_each_way():
    flows = fabric_of(box_cluster()).link_flows(Traffic(group=(0, 1, 2, 3), ring_bytes=100.0))
    loads = port_loads(flows)
    names = {"device0>pcie0", "pcie0>device0", "pcie0>socket0", "socket0>pcie0", "socket0>socket1", "socket1>socket0"}
    assert {name: loads[name, 0] for name in names} == pytest.approx(dict.fromkeys(names, 100.0))


def test_pairs_by_hand():
    # Device 0 sends 6 bytes to device 1, below the same switch, and 4 to device 2, on the other socket.
    pair_bytes = np.zeros((4, 4))
    pair_bytes[0, 1:3] = 6, 4
    loads = port_loads(fabric_of(box_cluster()).link_flows(Traffic(group=(0, 1, 2, 3), pair_bytes=pair_bytes)))
    assert loads == pytest.approx(
        {
            ("device0>pcie0", 0): 10,
            ("pcie0>device1", 0): 6,
            ("pcie0>socket0", 0): 4,
            ("socket0>socket1", 0): 4,
            ("socket1>pcie1", 0): 4,
            ("pcie1>device2", 0): 4,
        }
    )


def test_both_ways_round_a_triangle_are_used():
    # Links of 2, 1 and 1 GB/s each way: half of the bytes go round one way, half the other, each at 1 GB/s.
    fabric = fabric_of(mesh((0, 1, 2), (1, 2, 1), (0, 2, 1)))
    assert seconds_of(fabric, fabric.link_flows(Traffic(group=(0, 1, 2), ring_bytes=1e9))) == pytest.approx(0.5)


def test_rings_of_a_mesh_find_the_thick_links():
    # The V100 hybrid of ../shared/samples, v100_4gpu_nv1_nv2_hybrid.txt.
    cluster = mesh((0, 1, 1), (0, 2, 1), (0, 3, 2), (1, 2, 2), (1, 3, 1), (2, 3, 2))
    fabric = fabric_of(cluster)
    found = seconds_of(fabric, fabric.link_flows(Traffic(group=(0, 1, 2, 3), ring_bytes=1e9)))
    # Devices 0 and 1 have four links each, so that nothing passes faster than 4 GB/s.
    assert found == pytest.approx(least_seconds_by_brute_force(cluster, steps=4), rel=1e-6)
    assert found >= 1 / 4


def least_seconds_by_brute_force(cluster: ClusterSpec, *, steps: int) -> float:
    """Return the least time over mixes of all rings in shares of 1 / steps."""
    rates = {port: rate for (port, _), rate in fabric_of(cluster).capacities.items() if ">" in port}
    rings = [(0, *rest) for rest in itertools.permutations(range(1, cluster.devices_per_host))]
    best = float("inf")
    for mix in itertools.combinations_with_replacement(rings, steps):
        loads: dict[str, float] = {}
        for ring in mix:
            for here, there in zip(ring, ring[1:] + ring[:1], strict=True):
                port = f"device{here}>device{there}"
                loads[port] = loads.get(port, 0.0) + 1e9 / steps
        best = min(best, max(load / rates[port] for port, load in loads.items()))
    return best


def test_messages_pass_one_device_where_no_nvlink_joins_two():
    fabric = fabric_of(mesh((0, 1, 1), (1, 2, 1)))
    pair_bytes = np.zeros((3, 3))
    pair_bytes[0, 2] = 5
    loads = port_loads(fabric.link_flows(Traffic(group=(0, 1, 2), pair_bytes=pair_bytes)))
    assert loads == {("device0>device1", 0): 5, ("device1>device2", 0): 5}


def test_a_ring_between_hosts_leaves_through_the_cards_next_to_its_devices():
    fabric = fabric_of(box_cluster())
    loads = port_loads(fabric.host_flows(Traffic(group=(0, 1, 4, 5), ring_bytes=8.0)))
    # Devices 0 and 1 of hosts 0 and 1 have card 0; one leaf joins these hosts.
    assert loads == pytest.approx(
        {
            (port, host): 8.0
            for host in (0, 1)
            for port in ("nic0>network", "network>nic0", "device0>pcie0", "pcie0>nic0", "nic0>pcie0", "pcie0>device0")
        }
    )


def test_a_ring_between_leaves_crosses_each_once_each_way():
    fabric = fabric_of(box_cluster())
    loads = port_loads(fabric.host_flows(Traffic(group=(0, 4, 8, 12), ring_bytes=8.0)))
    leaves = {port: load for port, load in loads.items() if port[0].startswith("leaf")}
    assert leaves == pytest.approx({(way, leaf): 8.0 for way in ("leaf_up", "leaf_down") for leaf in (0, 1)})
    # Two hosts of two cards of 0.2 GB/s below each leaf.
    assert fabric.capacities["leaf_up", 0] == pytest.approx(0.8 * GB)


def test_without_gpu_direct_traffic_goes_through_the_memory_of_a_socket():
    host = replace(BOX, gpu_direct=False)
    fabric = fabric_of(box_cluster(host=host))
    loads = port_loads(fabric.host_flows(Traffic(group=(0, 4), ring_bytes=8.0)))
    assert loads["pcie0>socket0", 0] == loads["socket0>pcie0", 0] == 16  # out and back
    assert ("device0>pcie0", 0) in loads


def test_without_peer_access_traffic_goes_through_the_memory_of_a_socket():
    fabric = fabric_of(box_cluster(host=replace(BOX, peer_access=False)))
    pair_bytes = np.array([[0.0, 8.0], [0.0, 0.0]])
    loads = port_loads(fabric.link_flows(Traffic(group=(0, 1), pair_bytes=pair_bytes)))
    assert loads == {(port, 0): 8 for port in ("device0>pcie0", "pcie0>socket0", "socket0>pcie0", "pcie0>device1")}


def rails_cluster(nvlink: bool) -> ClusterSpec:
    """Return two hosts of two devices with a card each, on rails."""
    joins = [("device[0-1]", "pcie[0-1]"), ("nic[0-1]", "pcie[0-1]"), ("pcie[0-1]", "socket0")]
    links = [HostLink(ends=ends, kind=LinkKind.PCIE, bandwidth_bytes_per_second=GB) for ends in joins]
    if nvlink:
        switch = ("device[0-1]", "nvswitch")
        links.append(HostLink(ends=switch, kind=LinkKind.NVLINK, bandwidth_bytes_per_second=GB))
    cluster = made_cluster(num_hosts=2, devices_per_host=2)
    return replace(cluster, host=HostTopology(links=tuple(links)), network=NetworkSpec(rails=True))


def test_messages_to_another_rail_cross_a_spine_or_nvlink():
    # Rank 0 on card 0 sends to rank 3 on card 1.
    pair_bytes = np.zeros((4, 4))
    pair_bytes[0, 3] = 8
    traffic = Traffic(group=(0, 1, 2, 3), pair_bytes=pair_bytes)
    with_nvlink = port_loads(fabric_of(rails_cluster(nvlink=True)).host_flows(traffic))
    assert with_nvlink["nic1>network", 0] == with_nvlink["network>nic1", 1] == 8
    assert not any(kind.startswith("leaf") for kind, _ in with_nvlink)
    without = port_loads(fabric_of(rails_cluster(nvlink=False)).host_flows(traffic))
    assert without["nic0>network", 0] == without["network>nic1", 1] == 8
    assert (without["leaf_up", 0], without["leaf_down", 1]) == (8, 8)


# --- Faults.


def test_a_slow_link_slows_a_ring_down_by_its_factor():
    fault = LinkFault(ends=("socket1", "socket0"), host=0, bandwidth_ratio=0.25)
    traffic = Traffic(group=(0, 1, 2, 3), ring_bytes=1e9)
    healthy, slow = fabric_of(box_cluster()), fabric_of(box_cluster(link_faults=(fault,)))
    assert seconds_of(healthy, healthy.link_flows(traffic)) == pytest.approx(0.5)  # 1 GB at 2 GB/s
    assert seconds_of(slow, slow.link_flows(traffic)) == pytest.approx(2.0)
    elsewhere = Traffic(group=(4, 5, 6, 7), ring_bytes=1e9)
    assert seconds_of(slow, slow.link_flows(elsewhere)) == pytest.approx(0.5)


def test_a_lost_nvlink_leaves_the_others():
    cluster = mesh((0, 1, 1), (1, 2, 1), (0, 2, 1))
    fault = LinkFault(ends=("device0", "device1"), bandwidth_ratio=0)
    fabric = fabric_of(replace(cluster, link_faults=(fault,)))
    pair_bytes = np.zeros((3, 3))
    pair_bytes[0, 1] = 5
    loads = port_loads(fabric.link_flows(Traffic(group=(0, 1, 2), pair_bytes=pair_bytes)))
    assert loads == {("device0>device2", 0): 5, ("device2>device1", 0): 5}


def test_a_lost_card_leaves_its_traffic_to_the_others():
    fault = LinkFault(ends=("nic0", "network"), host=0, bandwidth_ratio=0)
    for cluster in (box_cluster(), made_cluster(num_hosts=2, devices_per_host=2)):
        group = tuple(range(2 * cluster.devices_per_host))
        traffic = Traffic(group=group, ring_bytes=1e9)
        healthy = fabric_of(replace(cluster, link_faults=(replace(fault, bandwidth_ratio=1.0),)))
        lost = fabric_of(replace(cluster, link_faults=(fault,)))
        loads = port_loads(lost.host_flows(traffic))
        assert ("nic0>network", 0) not in loads
        assert loads["nic1>network", 0] == 1e9  # both cards' halves
        times = [seconds_of(fabric, fabric.host_flows(traffic)) for fabric in (healthy, lost)]
        assert times[1] == pytest.approx(2 * times[0])


def test_a_pair_without_any_link_left_is_named():
    cluster = box_cluster(link_faults=(LinkFault(ends=("device3", "pcie1"), host=1, bandwidth_ratio=0),))
    assert fabric_of(cluster).missing_pair((0, 1, 2, 3)) is None
    assert fabric_of(cluster).missing_pair(tuple(range(8))) == (4, 7)
    cards = tuple(LinkFault(ends=(f"nic{nic}", "network"), host=2, bandwidth_ratio=0) for nic in (0, 1))
    cluster = box_cluster(link_faults=cards)
    assert fabric_of(cluster).missing_pair(tuple(range(8))) is None
    assert fabric_of(cluster).missing_pair((0, 1, 8, 9)) == (8, 0)
    leaf = box_cluster(link_faults=(LinkFault(ends=("leaf1", "spine"), bandwidth_ratio=0),))
    assert fabric_of(leaf).missing_pair((8, 12)) is None
    assert fabric_of(leaf).missing_pair((0, 8)) == (8, 0)


def test_a_collective_over_a_lost_link_is_refused_with_a_sentence():
    cluster = replace(made_cluster(), link_faults=(LinkFault(ends=("device1", "host"), bandwidth_ratio=0),))
    with pytest.raises(PlanError, match="link_faults leave nothing of device_out 1"):
        CollectiveCosts(cluster, None).price(made_collective(TaskKind.ALL_REDUCE, 1000, 2))


# --- Case P1: every field has an effect.

MANY = 0.01  # of its rate: what becomes the narrowest of all


def fingerprint(cluster: ClusterSpec) -> list[object]:
    """Return the price of some collectives, and what they load."""
    fabric = fabric_of(cluster)
    found: list[object] = []
    for num_ranks in (1, 2, 3):
        group = tuple(range(num_ranks * cluster.devices_per_host))
        for traffic in [Traffic(group=(0, group[-1]), ring_bytes=1e9), *traffics(len(group))]:
            flows = all_flows(fabric, traffic, num_ranks)
            found += [round(seconds_of(fabric, flows), 9), sorted(port_loads(flows).items())]
        costs = CollectiveCosts(cluster, None)
        found += [costs.price(made_collective(kind, 10**8, len(group))) for kind in GROUP_COLLECTIVES]
    return found


def changed_links(host: HostTopology) -> list[HostTopology]:
    """Return the host with each link in turn a hundred times narrower."""
    return [
        replace(
            host,
            links=tuple(
                replace(link, bandwidth_bytes_per_second=link.bandwidth_bytes_per_second * (MANY if i == n else 1))
                for i, link in enumerate(host.links)
            ),
        )
        for n in range(len(host.links))
    ]


def perturbed() -> dict[str, tuple[ClusterSpec, ClusterSpec]]:
    """Return pairs of clusters that differ in one field of the topology."""
    base = box_cluster()
    network = NetworkSpec(hosts_per_leaf=2)
    simple = made_cluster(num_hosts=4, devices_per_host=4)
    h100 = BUILT_IN_CLUSTERS["h100x8-ndr"]
    assert h100.host is not None
    no_nvlink = replace(h100, host=replace(h100.host, links=h100.host.links[1:]))
    pairs = {
        "gpu_direct": (base, box_cluster(host=replace(BOX, gpu_direct=False))),
        "peer_access": (base, box_cluster(host=replace(BOX, peer_access=False))),
        "kind": (
            h100,
            replace(
                h100,
                host=replace(
                    h100.host, links=(replace(h100.host.links[0], kind=LinkKind.SOCKET), *h100.host.links[1:])
                ),
            ),
        ),
        "ends": (h100, no_nvlink),
        "hosts_per_leaf": (base, replace(base, network=replace(network, hosts_per_leaf=1))),
        "oversubscription": (
            replace(base, network=NetworkSpec(hosts_per_leaf=1)),
            replace(base, network=NetworkSpec(hosts_per_leaf=1, oversubscription=4)),
        ),
        "rails": (base, replace(base, network=replace(network, rails=True))),
        "nics_per_host": (
            replace(simple, network=NetworkSpec()),
            replace(simple, network=NetworkSpec(nics_per_host=2)),
        ),
        "network": (simple, replace(simple, network=NetworkSpec(hosts_per_leaf=1, oversubscription=3))),
        "host": (simple, replace(simple, host=BOX)),
        "link_faults.bandwidth_ratio": (
            replace(base, link_faults=(LinkFault(ends=("nic0", "network"), bandwidth_ratio=0.5),)),
            replace(base, link_faults=(LinkFault(ends=("nic0", "network"), bandwidth_ratio=0.1),)),
        ),
        "link_faults.bandwidth_bytes_per_second": (
            base,
            replace(base, link_faults=(LinkFault(ends=("nic0", "network"), bandwidth_bytes_per_second=1e6),)),
        ),
        "link_faults.host": (
            replace(base, link_faults=(LinkFault(ends=("nic0", "network"), host=0, bandwidth_ratio=0.1),)),
            replace(base, link_faults=(LinkFault(ends=("nic0", "network"), host=3, bandwidth_ratio=0.1),)),
        ),
        "link_faults.ends": (
            replace(base, link_faults=(LinkFault(ends=("device0", "host"), bandwidth_ratio=0.1),)),
            replace(base, link_faults=(LinkFault(ends=("leaf0", "spine"), bandwidth_ratio=0.1),)),
        ),
        "device_link": (
            simple,
            replace(simple, device_link=replace(simple.device_link, bandwidth_bytes_per_second=1e6)),
        ),
        "host_link": (base, replace(base, host_link=replace(base.host_link, bandwidth_bytes_per_second=1e6))),
        "num_hosts": (simple, replace(simple, num_hosts=3)),
    }
    narrower = {f"links[{n}]": (base, box_cluster(host=host)) for n, host in enumerate(changed_links(BOX))}
    wired = {f"h100 links[{n}]": (h100, replace(h100, host=host)) for n, host in enumerate(changed_links(h100.host))}
    # Nothing crosses the sockets of a host whose devices have NVLink and a card each.
    unused = {name for name in wired if name.endswith(("[3]", "[4]", "[5]"))}
    return pairs | narrower | {name: pair for name, pair in wired.items() if name not in unused}


def test_no_field_of_a_topology_is_left_out_below():
    specs = (HostTopology, HostLink, NetworkSpec, LinkFault)
    fields = {field.name for spec in specs for field in dataclasses.fields(spec)}
    assert fields <= {name.split("[")[0].split(".")[-1] for name in perturbed()}


@pytest.mark.parametrize(("before", "after"), perturbed().values(), ids=perturbed())
def test_every_field_of_a_topology_has_an_effect(before, after):
    if before.num_hosts != after.num_hosts:
        assert len(fabric_of(before).capacities) != len(fabric_of(after).capacities)
        return
    assert fingerprint(before) != fingerprint(after)


# --- Properties.


@given(cluster=clusters, data=st.data())
def test_the_order_of_hosts_in_a_group_changes_nothing(cluster, data):
    order = data.draw(st.permutations(range(cluster.num_hosts)))
    per_host = cluster.devices_per_host
    places = [host * per_host + device for host in order for device in range(per_host)]
    fabric = fabric_of(cluster)
    for traffic in traffics(cluster.num_devices):
        pair_bytes = None if traffic.pair_bytes is None else traffic.pair_bytes[np.ix_(places, places)]
        moved = Traffic(group=tuple(places), ring_bytes=traffic.ring_bytes, pair_bytes=pair_bytes)
        loads, others = (port_loads(all_flows(fabric, each, cluster.num_hosts)) for each in (traffic, moved))
        assert others == pytest.approx(loads)


@given(cluster=clusters, data=st.data())
def test_which_hosts_below_a_leaf_are_used_changes_nothing(cluster, data):
    cluster = replace(cluster, link_faults=(), network=None if cluster.network is None else NetworkSpec())
    count = data.draw(st.integers(1, cluster.num_hosts))
    hosts = data.draw(st.permutations(range(cluster.num_hosts)))[:count]
    fabric = fabric_of(cluster)
    traffic = traffics(count * cluster.devices_per_host)[2]
    group = tuple(
        host * cluster.devices_per_host + device for host in hosts for device in range(cluster.devices_per_host)
    )
    moved = Traffic(group=group, pair_bytes=traffic.pair_bytes)
    seconds = [seconds_of(fabric, all_flows(fabric, each, count)) for each in (traffic, moved)]
    assert seconds[1] == pytest.approx(seconds[0])


@given(cluster=clusters, data=st.data(), factor=st.floats(1, 100))
def test_a_wider_link_is_never_slower(cluster, data, factor):
    assume(cluster.host is not None)
    number = data.draw(st.integers(0, len(cluster.host.links) - 1))
    links = list(cluster.host.links)
    rate = links[number].bandwidth_bytes_per_second
    links[number] = replace(links[number], bandwidth_bytes_per_second=rate * factor)
    wider = replace(cluster, host=replace(cluster.host, links=tuple(links)))
    for traffic in traffics(cluster.num_devices):
        before, after = (
            seconds_of(fabric_of(each), all_flows(fabric_of(each), traffic, each.num_hosts))
            for each in (cluster, wider)
        )
        assert after <= (1 + 1e-6) * before


@given(cluster=clusters)
def test_what_leaves_a_host_enters_others(cluster):
    for traffic in traffics(cluster.num_devices):
        loads = port_loads(fabric_of(cluster).host_flows(traffic))
        out = sum(load for (kind, _), load in loads.items() if kind.endswith(">network"))
        back = sum(load for (kind, _), load in loads.items() if kind.startswith("network>"))
        assert out == pytest.approx(back)


@given(cluster=clusters)
def test_without_lost_links_every_rank_reaches_every_other(cluster):
    fabric = fabric_of(cluster)
    assert fabric.missing_pair(tuple(range(cluster.num_devices))) is None
    for traffic in traffics(cluster.num_devices):
        for flow in all_flows(fabric, traffic, cluster.num_hosts):
            assert all(fabric.capacities[port] >= flow.max_bytes_per_second for port in flow.ports)


# --- What is refused.


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (LinkFault(ends=("device9", "host"), bandwidth_ratio=0.5), "link_faults.ends must be the ends of a link"),
        (LinkFault(ends=("device0", "nvswitch"), bandwidth_ratio=0.5), "link_faults.ends must be the ends of a link"),
        (LinkFault(ends=("nic0", "network"), host=4, bandwidth_ratio=0.5), "link_faults.host must be below"),
    ],
)
def test_a_fault_of_a_link_that_is_not_there_is_refused(fault, message):
    with pytest.raises(SpecError, match=message):
        box_cluster(link_faults=(fault,))


def test_an_all_to_all_of_a_thousand_ranks_is_a_few_flows_a_host():
    cluster = replace(BUILT_IN_CLUSTERS["h100x8-ndr"], num_hosts=128)
    traffic = Traffic(group=tuple(range(1024)), pair_bytes=(1 - np.eye(1024)) * 1e4)
    flows = all_flows(fabric_of(cluster), traffic, 128)
    # Ports of a host that carry the same are one flow, beside one a device.
    assert len(flows) < 1024 + 128 * 8 + 2 * cluster.num_leaves


@pytest.mark.parametrize("name", ["a100x8-hdr", "h100x8-ndr", "h200x8-roce", "b200x8-ndr"])
@pytest.mark.parametrize("traffic", range(2), ids=["ring", "pairs"])
def test_between_whole_hosts_nvswitch_and_rails_cost_what_their_cards_do(name, traffic):
    # With a card a device, NVLink and nothing over-subscribed, a topology adds nothing to what devices and cards carry.
    cluster = BUILT_IN_CLUSTERS[name]
    plain = replace(cluster, host=None, network=None)
    found = traffics(16)[traffic]
    with_topology, without = (
        seconds_of(fabric_of(each), fabric_of(each).host_flows(found)) for each in (cluster, plain)
    )
    assert with_topology == pytest.approx(without)


@given(cluster=clusters, factor=st.floats(1, 100))
def test_wider_ports_and_more_spines_are_never_slower(cluster, factor):
    def times(link: LinkSpec) -> LinkSpec:
        return replace(link, bandwidth_bytes_per_second=factor * link.bandwidth_bytes_per_second)

    wider = [
        replace(cluster, device_link=times(cluster.device_link)),
        replace(cluster, host_link=times(cluster.host_link)),
    ]
    if cluster.network is not None:
        ratio = 1 + (cluster.network.oversubscription - 1) / factor
        wider.append(replace(cluster, network=replace(cluster.network, oversubscription=ratio)))
    for kind in GROUP_COLLECTIVES:
        tasks = made_collective(kind, 10**7, cluster.num_devices)
        before, *after = (seconds_of_price(each, tasks) for each in (cluster, *wider))
        assert max(after) <= (1 + 1e-6) * before


def seconds_of_price(cluster: ClusterSpec, tasks: tuple[Task, ...]) -> float:
    cost = CollectiveCosts(cluster, None).price(tasks)
    own = max((flow.num_bytes / flow.max_bytes_per_second for flow in cost.flows), default=0.0)
    return cost.latency_seconds + max(own, seconds_of(fabric_of(cluster), list(cost.flows)))
