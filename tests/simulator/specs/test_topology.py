"""HostTopology and NetworkSpec: shorthands, and what is refused."""

from dataclasses import replace

import pytest
from hypothesis import given

from simulator.errors import SpecError
from simulator.specs.cluster import BUILT_IN_CLUSTERS, ClusterSpec
from simulator.specs.topology import HostLink, HostTopology, LinkFault, LinkKind, NetworkSpec
from tests.strategies import clusters


def link(*ends: str, kind: LinkKind = LinkKind.PCIE, rate: float = 1e9) -> HostLink:
    return HostLink(ends=ends, kind=kind, bandwidth_bytes_per_second=rate)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ends", "pairs"),
    [
        (("device0", "nvswitch"), [("device0", "nvswitch")]),
        (("device[0-2]", "nvswitch"), [("device0", "nvswitch"), ("device1", "nvswitch"), ("device2", "nvswitch")]),
        (("socket0", "nic[1-2]"), [("socket0", "nic1"), ("socket0", "nic2")]),
        (("device[4-5]", "pcie[0-1]"), [("device4", "pcie0"), ("device5", "pcie1")]),
    ],
)
def test_a_range_of_names_stands_for_a_link_each(ends, pairs):
    assert list(link(*ends).pairs()) == pairs


@given(cluster=clusters)
def test_every_device_and_card_is_counted_once(cluster):
    if cluster.host is not None:
        assert cluster.host.num_devices == cluster.devices_per_host
        assert cluster.num_nics == (cluster.host.num_nics or cluster.num_nics)
        assert cluster.num_nics > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: link("GPU0", "nvswitch"), 'ends must be names such as "device0"'),
        (lambda: link("device[3-1]", "nvswitch"), "ends must be a range that goes up"),
        (lambda: link("device[0-1]", "pcie[0-2]"), "ends must be ranges of one length"),
        (lambda: link("pcie0", "pcie0"), "ends must be two parts of the host"),
        (lambda: link("device0", "pcie0", rate=0), "bandwidth_bytes_per_second must be finite and > 0"),
        (lambda: HostTopology(links=(link("nic0", "pcie0"),)), "links must lead to device0"),
        (lambda: HostTopology(links=(link("device1", "pcie0"),)), "links must number each device from 0 without gaps"),
        (
            lambda: HostTopology(links=(link("device0", "pcie0"), link("pcie0", "device0"))),
            "links must name each pair of ends once",
        ),
        (
            lambda: HostTopology(links=(link("device0", "pcie0"), link("device1", "pcie1"))),
            "links must join all parts of the host",
        ),
        (
            lambda: HostTopology(links=(link("device[0-1]", "pcie0"),), peer_access=False),
            "peer_access must be true unless links lead to socket0",
        ),
        (
            lambda: HostTopology(links=(link("device0", "socket0"),), gpu_direct=False),
            "gpu_direct must be true unless links lead to nic0",
        ),
        (lambda: NetworkSpec(oversubscription=0.5), "oversubscription must be finite and >= 1"),
        (lambda: NetworkSpec(oversubscription=2), "oversubscription must be 1 unless hosts_per_leaf or rails"),
        (lambda: NetworkSpec(hosts_per_leaf=0), "hosts_per_leaf must be finite and > 0"),
        (lambda: NetworkSpec(nics_per_host=0), "nics_per_host must be finite and > 0"),
    ],
)
def test_a_topology_that_cannot_be_is_refused_with_a_sentence(make, message):
    with pytest.raises(SpecError) as caught:
        make()
    assert str(caught.value).startswith(message)


NDR = BUILT_IN_CLUSTERS["h100x8-ndr"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"devices_per_host": 4}, r"host.links must lead to devices_per_host = 4 devices, got 8"),
        ({"network": NetworkSpec(nics_per_host=8)}, "network.nics_per_host must be left out, as host.links lead to 8"),
        (
            {"link_faults": (LinkFault(ends=("leaf99", "spine"), bandwidth_ratio=0.5),)},
            "link_faults.ends must be the ends of a link",
        ),
    ],
)
def test_a_cluster_whose_parts_do_not_fit_is_refused(changes, message):
    with pytest.raises(SpecError, match=message):
        replace(NDR, **changes)


def test_cards_and_leaves_are_counted():
    assert (NDR.num_nics, NDR.num_leaves) == (8, 8)  # on rails, 4 hosts of at most 32 a leaf
    assert replace(NDR, num_hosts=33).num_leaves == 16
    plain = BUILT_IN_CLUSTERS["h200x8"]
    assert (plain.num_nics, plain.num_leaves) == (8, 0)
    two: ClusterSpec = replace(plain, num_hosts=6, network=NetworkSpec(hosts_per_leaf=4, nics_per_host=2))
    assert (two.num_nics, two.num_leaves, two.nic_bytes_per_second) == (2, 2, 4 * 49e9)
