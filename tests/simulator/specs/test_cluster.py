from dataclasses import FrozenInstanceError, replace

import pytest
from hypothesis import given

from simulator.errors import SpecError
from simulator.specs.cluster import BUILT_IN_CLUSTERS, H200, NVLINK4, DeviceKind
from simulator.specs.units import Dtype
from tests.strategies import clusters


@given(cluster=clusters)
def test_ranks_fill_one_host_after_another(cluster):
    hosts = [cluster.host_of(rank) for rank in range(cluster.num_devices)]
    assert hosts == sorted(hosts)
    assert [hosts.count(host) for host in range(cluster.num_hosts)] == [cluster.devices_per_host] * cluster.num_hosts


def test_built_in_clusters_are_known_by_their_own_names():
    assert [cluster.name for cluster in BUILT_IN_CLUSTERS.values()] == list(BUILT_IN_CLUSTERS)
    assert {name: BUILT_IN_CLUSTERS[name].num_devices for name in ("h200x8", "h100x8-ndr")} == {
        "h200x8": 8,
        "h100x8-ndr": 32,
    }


@pytest.mark.parametrize("device", ["a100", "h100", "h200", "b200", "a100pcie", "l40s"])
def test_hosts_of_eight_of_each_device_are_built_in_alone_and_joined(device):
    alone = BUILT_IN_CLUSTERS[f"{device}x8"]
    joined = [cluster for name, cluster in BUILT_IN_CLUSTERS.items() if name.startswith(f"{device}x8-")]
    assert (alone.num_hosts, alone.devices_per_host) == (1, 8)
    assert {cluster.device for cluster in joined} == {alone.device}
    assert any(cluster.name.endswith(("-hdr", "-ndr", "-roce")) for cluster in joined)
    assert f"{device}x8-ethernet" in BUILT_IN_CLUSTERS


def test_rates_are_by_number_format():
    assert H200.flops_per_second(Dtype.FLOAT32) == 67e12
    assert H200.flops_per_second(Dtype.BFLOAT16) == 989e12


def test_each_kind_of_device_has_its_communication_library():
    assert {kind.value: kind.backend for kind in DeviceKind} == {"cpu": "gloo", "cuda": "nccl"}


@pytest.mark.parametrize("field", ["memory_bytes", "memory_bandwidth_bytes_per_second", "fp32_flops_per_second"])
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_a_device_without_memory_or_speed_is_refused(field, value):
    with pytest.raises(SpecError, match=f"{field} must be finite and > 0, got {value}"):
        replace(H200, **{field: value})


def test_a_device_with_a_cache_of_less_than_nothing_is_refused():
    with pytest.raises(SpecError, match="cache_bytes must be finite and >= 0, got -1"):
        replace(H200, cache_bytes=-1)


def test_a_link_with_negative_latency_is_refused():
    with pytest.raises(SpecError, match=r"latency_seconds must be finite and >= 0, got -1e-06"):
        replace(NVLINK4, latency_seconds=-1e-6)


def test_a_cluster_without_hosts_is_refused():
    with pytest.raises(SpecError, match="num_hosts must be finite and > 0, got 0"):
        replace(BUILT_IN_CLUSTERS["h200x8"], num_hosts=0)


def test_a_spec_cannot_be_changed_in_place():
    with pytest.raises(FrozenInstanceError):
        H200.memory_bytes = 1  # type: ignore[misc]
