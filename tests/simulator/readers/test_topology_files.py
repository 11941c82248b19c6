"""Every file of the samples is read, or refused with a sentence; and what some of them say, by eye."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from simulator.collectives import CollectiveCosts
from simulator.errors import SpecError
from simulator.fabric import fabric_of
from simulator.readers.topology_files import cluster_from_files, read_description
from simulator.readers.topology_found import FoundHost
from simulator.readers.topology_smi import PeerMatrix
from simulator.readers.topology_xml import GraphDump
from simulator.specs.cluster import ClusterSpec
from simulator.specs.files import cluster_toml, read_cluster
from simulator.specs.program import TaskKind
from simulator.specs.units import GB
from tests.conftest import SHARED
from tests.made import made_collective

XML, SMI, H200X2 = (SHARED / folder for folder in ("samples/nccl_topo", "samples/nvidia_smi_topo", "measured/h200x2"))

# GPUs, network ports kept, and the device that is meant or must be given.
TOPOLOGIES = {
    XML / "aws_p4d_a100.xml": (8, 4, None),
    XML / "azure_ncv4_a100_pcie.xml": (4, 1, None),
    XML / "azure_ndv2_v100.xml": (8, 1, "v100"),
    XML / "azure_ndv5_h100.xml": (8, 8, "h100"),
    XML / "oci_bm_a100_flattened.xml": (8, 8, "a100-40"),
    XML / "oci_bm_h100_8.xml": (8, 16, None),
    XML / "rccl_4gpu_3link.xml": (4, 2, None),
    XML / "rccl_mi250_8gcd_xgmi.xml": (8, 1, None),
    XML / "rccl_mi50_8gpu_pcie.xml": (8, 1, None),
    SMI / "a100_8gpu_nvswitch_no_nic.txt": (8, 0, None),
    SMI / "dgx_h100_8gpu_12nic.txt": (8, 12, None),
    SMI / "h100_8gpu_ht_affinity.txt": (8, 0, None),
    SMI / "h100_8gpu_nvswitch_no_nic.txt": (8, 0, None),
    SMI / "p100_or_v100_2gpu_nv1.txt": (2, 1, "p100"),
    SMI / "pcie_8gpu_two_sockets_no_nvlink.txt": (8, 0, "l40s"),
    SMI / "v100_4gpu_nv1_nv2_hybrid.txt": (4, 1, "v100"),
    H200X2 / "nccl_topo.xml": (2, 1, None),
    H200X2 / "topo.txt": (2, 0, "h200"),
}
PEERS = {
    SMI / "h100_8gpu_p2p_r.txt": PeerMatrix(num_devices=8, refused=()),
    SMI / "l4_2gpu_p2p_r.txt": PeerMatrix(num_devices=2, refused=((0, 1, "CNS"),)),
    H200X2 / "topo_p2p_r.txt": PeerMatrix(num_devices=2, refused=()),
}
GRAPHS = {
    XML / "azure_ncv4_a100_pcie.graph.xml": GraphDump(num_channels=2, ring_bytes_per_second=24 * GB, worst_link="SYS"),
    H200X2 / "nccl_graph.xml": GraphDump(num_channels=12, ring_bytes_per_second=360 * GB, worst_link="NVL"),
}
REFUSED = {
    XML / "aws_g5_48xl_a10g.xml": "pci 0000:00:16.0 must say its class, without which GPUs cannot be told",
    H200X2 / "comm.csv": "got neither a header that begins with GPU0 nor XML",
    H200X2 / "kernels.csv": "got neither a header that begins with GPU0 nor XML",
    H200X2 / "kineto_ddp_rank0.json.gz": "unpack it if it is compressed",
    H200X2 / "nccl_info_rank0.log.gz": "unpack it if it is compressed",
}


def names(files) -> list[str]:
    return [path.name for path in files]


def existing(path: Path) -> Path:
    if not path.exists():
        pytest.skip(f"{path} is not on this machine")
    return path


@pytest.mark.skipif(not SHARED.is_dir(), reason="the team's folder is not on this machine")
def test_no_file_of_the_samples_is_ignored():
    found = {path for folder in (XML, SMI, H200X2) for path in folder.iterdir()}
    assert found == {*TOPOLOGIES, *PEERS, *GRAPHS, *REFUSED}


@pytest.mark.parametrize(("path", "expected"), TOPOLOGIES.items(), ids=names(TOPOLOGIES))
def test_a_topology_becomes_a_cluster_that_can_be_priced(path, expected, tmp_path):
    num_devices, num_nics, model = expected
    found = cluster_from_files([existing(path)], model=model)
    cluster = replace(found.cluster, num_hosts=2)
    assert cluster.host is not None
    assert (cluster.devices_per_host, cluster.host.num_nics) == (num_devices, num_nics)
    assert found.notes
    (tmp_path / "cluster.toml").write_text(cluster_toml(cluster))
    assert read_cluster(tmp_path / "cluster.toml") == cluster
    for num_ranks in (num_devices, 2 * num_devices):
        for kind in (TaskKind.ALL_REDUCE, TaskKind.ALL_TO_ALL):
            cost = CollectiveCosts(cluster, None).price(made_collective(kind, 10**8, num_ranks))
            assert all(flow.max_bytes_per_second > 0 for flow in cost.flows)


@pytest.mark.parametrize(
    "path",
    [path for path, (*_, model) in TOPOLOGIES.items() if model and "h200x2" not in str(path)],
    ids=lambda path: path.name,
)
def test_a_file_that_does_not_name_the_gpu_asks_for_it(path):
    with pytest.raises(SpecError, match=r"the kind of GPU must be one of p100, v100.*; give --device"):
        cluster_from_files([existing(path)])


@pytest.mark.parametrize(("path", "expected"), [*PEERS.items(), *GRAPHS.items()], ids=names([*PEERS, *GRAPHS]))
def test_a_file_without_links_is_read_but_makes_no_cluster_alone(path, expected):
    assert read_description(existing(path)) == expected
    with pytest.raises(SpecError, match="must come with the links of the host"):
        cluster_from_files([path])


@pytest.mark.parametrize(("path", "sentence"), REFUSED.items(), ids=names(REFUSED))
def test_other_files_are_refused_with_a_sentence(path, sentence):
    with pytest.raises(SpecError) as caught:
        read_description(existing(path))
    assert sentence in str(caught.value)
    assert str(caught.value).startswith(str(path))


# --- What some files say.


def cluster_of(path: Path, model: str | None = None) -> ClusterSpec:
    return cluster_from_files([existing(path)], model=model).cluster


def routes_of(cluster: ClusterSpec, a: int, b: int) -> set[str]:
    """Return the links between two devices."""
    routes = fabric_of(cluster).hosts[0].routes
    assert routes is not None
    return set(routes.between_devices(a, b) or ())


def nics_of(cluster: ClusterSpec) -> list[tuple[int, ...]]:
    """Return the network cards of each device of a host."""
    host = fabric_of(cluster).hosts[0]
    return [host.nics_of(device, frozenset(range(cluster.num_nics))) for device in range(cluster.devices_per_host)]


def test_the_dgx_h100_has_a_card_beside_each_gpu():
    # By its matrix: PXB between GPU0 and NIC0, GPU1 and NIC3, GPU2 and NIC4, ... GPU7 and NIC11.
    cluster = cluster_of(SMI / "dgx_h100_8gpu_12nic.txt")
    assert nics_of(cluster) == [(0,), (3,), (4,), (5,), (6,), (9,), (10,), (11,)]
    assert routes_of(cluster, 0, 7) == {"device0>nvswitch", "nvswitch>device7"}
    assert cluster.device_link.bandwidth_bytes_per_second == pytest.approx(18 * 20.6 * GB)


def test_the_oci_h100_has_two_ports_beside_each_gpu():
    cluster = cluster_of(XML / "oci_bm_h100_8.xml")
    assert nics_of(cluster) == [(2 * number, 2 * number + 1) for number in range(8)]
    # 180,000 Mbit/s a port, 16 of them for 8 GPUs, 12 GB/s for 100 Gb/s.
    assert cluster.nic_bytes_per_second == pytest.approx(21.6 * GB)
    assert cluster.host is not None
    assert cluster.host.gpu_direct


def test_the_hybrid_has_the_links_of_its_matrix():
    cluster = cluster_of(SMI / "v100_4gpu_nv1_nv2_hybrid.txt", "v100")
    assert cluster.host is not None
    nvlinks = {
        link.ends: link.bandwidth_bytes_per_second / (20 * GB) for link in cluster.host.links if link.kind == "nvlink"
    }
    assert nvlinks == {
        ("device0", "device1"): 1,
        ("device0", "device2"): 1,
        ("device0", "device3"): 2,
        ("device1", "device2"): 2,
        ("device1", "device3"): 1,
        ("device2", "device3"): 2,
    }


def test_two_sockets_without_nvlink_are_told_apart():
    # GPUs 6 and 7 are of the other socket.
    cluster = cluster_of(SMI / "pcie_8gpu_two_sockets_no_nvlink.txt", "l40s")
    assert "socket0>socket1" not in routes_of(cluster, 0, 5)
    assert "socket0>socket1" in routes_of(cluster, 0, 6)


def test_below_one_switch_traffic_stays_there():
    cluster = cluster_of(XML / "aws_p4d_a100.xml")
    # NVLink comes first; the card is below the switch of its two GPUs.
    assert nics_of(cluster) == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]
    assert set(fabric_of(cluster).hosts[0].to_nic(0, 0)) == {"device0>pcie0", "pcie0>nic0"}


def test_xgmi_rings_of_rccl_are_found():
    cluster = cluster_of(XML / "rccl_mi250_8gcd_xgmi.xml")
    assert routes_of(cluster, 0, 1) == {"device0>device1"}
    assert cluster.device.name == "AMD Instinct MI250"
    # Each of 8 devices has three links of 36 GB/s.
    assert cluster.device_link.bandwidth_bytes_per_second == pytest.approx(108 * GB)


def test_links_that_lead_to_the_gpu_itself_are_left_out_and_said():
    found = cluster_from_files([existing(XML / "azure_ncv4_a100_pcie.xml")])
    assert any("48 NVLinks lead to no other GPU" in note for note in found.notes)
    assert all(link.kind != "nvlink" for link in found.cluster.host.links)  # type: ignore[union-attr]


def test_files_of_one_host_are_put_together():
    files = ["nccl_topo.xml", "topo.txt", "nccl_graph.xml", "topo_p2p_r.txt"]
    found = cluster_from_files([existing(H200X2 / name) for name in files])
    assert found.cluster.device.name == "NVIDIA H200"  # by the device id in the XML
    assert found.cluster.device_link.bandwidth_bytes_per_second == 360 * GB
    assert found.cluster.host is not None
    assert not found.cluster.host.gpu_direct  # gdr="0" of eth0
    assert found.cluster.host.peer_access


def test_peers_that_may_not_read_each_other_go_through_memory(tmp_path):
    (tmp_path / "topo.txt").write_text(
        "\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tPHB\t0-7\t0\nGPU1\tPHB\t X \t0-7\t0\n"
    )
    paths = [tmp_path / "topo.txt", existing(SMI / "l4_2gpu_p2p_r.txt")]
    found = cluster_from_files(paths, model="l4")
    assert found.cluster.host is not None
    assert not found.cluster.host.peer_access
    assert any("devices 0 and 1 may not read each other (CNS)" in note for note in found.notes)


def test_a_matrix_and_a_tree_of_different_hosts_are_refused():
    paths = [existing(SMI / "dgx_h100_8gpu_12nic.txt"), existing(H200X2 / "nccl_topo.xml")]
    with pytest.raises(SpecError, match="must be of one host, got 8 and 2 GPUs"):
        cluster_from_files(paths)


# --- Spellings, and files that are cut short.

ROWS = ["GPU0 X NV2 PIX 0-7 0 N/A", "GPU1 NV2 X SYS 8-15 1 N/A", "mlx5_0 PIX SYS X"]
HEADER = "GPU0 GPU1 mlx5_0 CPU Affinity NUMA Affinity GPU NUMA ID"


def matrix(header: str = HEADER, rows: list[str] = ROWS, separator: str = "\t") -> str:
    lines = [header.replace(" ", separator).replace(f"CPU{separator}", "CPU ").replace(f"NUMA{separator}", "NUMA ")]
    return "\n".join([f"{separator}{lines[0]}", *(row.replace(" ", separator) for row in rows)]) + "\n"


@pytest.mark.parametrize(
    "text",
    [
        matrix(separator="\t"),
        matrix(separator="    "),
        matrix(header=f"\x1b[4m{HEADER}\x1b[0m"),
        "$ nvidia-smi topo -m\n" + matrix(),
        matrix() + "\nLegend:\n\n  X    = Self\n  PIX  = Connection\n\nNIC Legend:\n\n  NIC0: mlx5_0\n",
        matrix().replace("\n", "\r\n"),
    ],
    ids=["tabs", "spaces", "escapes", "prompt", "legends", "line ends"],
)
def test_all_spellings_of_a_matrix_are_read_alike(text, tmp_path):
    (tmp_path / "plain.txt").write_text(matrix())
    (tmp_path / "other.txt").write_bytes(text.encode())
    plain, other = (read_description(tmp_path / name) for name in ("plain.txt", "other.txt"))
    assert isinstance(other, FoundHost)
    assert other == plain
    assert other.nvlinks == (("device0", "device1", 2),)
    assert [join.ends for join in other.joins] == [
        ("device0", "pcie0"),
        ("nic0", "pcie0"),
        ("pcie0", "socket0"),
        ("device1", "socket1"),
        ("socket0", "socket1"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (matrix(rows=ROWS[:1]), "must have a row for GPU1"),
        (matrix(rows=["GPU0 X"]), "row GPU0 must have 3 cells, got 1"),
        (matrix(rows=[ROWS[0].replace("NV2", "NVX"), *ROWS[1:]]), "row GPU0, column GPU1: is no known link: 'NVX'"),
        ("<system version='1'><cpu numaid='0'></cpu></system>", "must hold GPUs"),
        ("<system version='1'></system>", "must hold <cpu> elements"),
        ("<system version='1'><cpu numaid='0'>", "is not XML"),
        ("<!DOCTYPE a [<!ENTITY b 'c'>]><system/>", "must not define entities"),
        ("<html/>", "must be a topology"),
        ("<graphs version='1'/>", "must hold a graph of rings"),
        (
            "<system><cpu><pci busid='0' class='0x030200' link_width='wide'/></cpu></system>",
            "holds a number that is none",
        ),
        ("", "got neither a header"),
    ],
)
def test_a_broken_file_is_refused_with_a_sentence(text, message, tmp_path):
    path = tmp_path / "broken"
    path.write_text(text)
    with pytest.raises(SpecError) as caught:
        read_description(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(SpecError, match=r"nothing\.txt: cannot be read: No such file"):
        read_description(tmp_path / os.sep / tmp_path / "nothing.txt")
