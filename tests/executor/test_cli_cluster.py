"""graphpilot cluster: by name, of this host, of files."""

import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from executor.host_topology import cluster_from_outputs
from simulator.errors import RunError
from simulator.specs.cluster import BUILT_IN_CLUSTERS, H200, ClusterSpec
from simulator.specs.convert import from_plain
from simulator.specs.files import read_cluster
from tests.executor.commands import run_here


@pytest.fixture
def command(monkeypatch, capfd, tmp_path):
    """Runs commands in a fresh folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: run_here(monkeypatch, capfd, *arguments)


TOPO = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-7\nGPU1\tNV18\t X \t0-7\n"
PEERS = " \tGPU0\tGPU1\n GPU0\tX\tOK\n GPU1\tOK\tX\n"
DUMP = """<system version="1"><cpu numaid="0" vendor="GenuineIntel" familyid="6" modelid="143">
<pci busid="0000:00:06.0" class="0x030200" device="0x2335" link_speed="32.0 GT/s PCIe" link_width="16">
<gpu dev="0" sm="90" rank="0" gdr="1"/></pci>
<pci busid="0000:00:07.0" class="0x030200" device="0x2335" link_speed="32.0 GT/s PCIe" link_width="8">
<gpu dev="1" sm="90" rank="1" gdr="1"/></pci></cpu></system>"""


def test_hosts_of_a_cluster_by_name_can_be_chosen(command):
    done = command("cluster", "a100x8-hdr", "--hosts", "7", "--out", "mine.toml")
    assert done.status == 0
    assert read_cluster(Path("mine.toml")) == replace(BUILT_IN_CLUSTERS["a100x8-hdr"], num_hosts=7)


def test_a_cluster_is_printed_as_json(command):
    done = command("cluster", "h100x8-ndr", "--json")
    assert from_plain(ClusterSpec, json.loads(done.out), where="out") == BUILT_IN_CLUSTERS["h100x8-ndr"]


def test_quiet_prints_nothing(command):
    assert command("cluster", "h200x8", "--quiet").out == ""


@pytest.mark.parametrize("name", ["", "show", "from-host", "from-files"])
def test_every_way_has_help_with_an_example(command, name):
    done = command("cluster", *name.split(), "--help")
    assert done.status == 0
    assert "Example: graphpilot cluster" in done.out


def test_a_close_name_is_suggested(command):
    done = command("cluster", "h100x8-nrd")
    assert done.status == 2
    assert "did you mean h100x8-ndr?" in done.err


def test_a_host_without_gpus_is_a_rank_a_core(command, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = command("cluster", "from-host", "--out", "here.toml")
    assert done.status == 0
    assert "# this machine has no GPU that torch can use" in done.out
    assert read_cluster(Path("here.toml")).device.kind == "cpu"


def test_files_become_a_cluster_whose_comments_name_the_sources(command):
    Path("topo.txt").write_text(TOPO)
    done = command("cluster", "from-files", "topo.txt", "--device", "h200", "--hosts", "2", "--out", "c.toml")
    assert done.status == 0
    assert "# device: given as h200.\n" in Path("c.toml").read_text()
    assert "20.6 GB/s each way for one, NCCL's table" in Path("c.toml").read_text()
    cluster = read_cluster(Path("c.toml"))
    assert (cluster.num_hosts, cluster.devices_per_host, cluster.device) == (2, 2, H200)
    notes = json.loads(command("cluster", "from-files", "topo.txt", "--json").out)["notes"]
    assert notes[0] == ("device: the files do not name it; 18 NVLinks between devices, so NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["topo.txt", "--device", "h300"], "the kind of GPU must be one of p100, v100, a10g, a100-40, a100,"),
        (["nothing.txt"], "nothing.txt: cannot be read: No such file or directory"),
        (["topo.txt", "topo2.txt"], "got two topologies of one kind"),
        (["peers.txt"], "peers.txt: must come with the links of the host"),
    ],
)
def test_files_that_do_not_do_are_refused_with_a_sentence(command, arguments, message):
    for name, text in (("topo.txt", TOPO), ("topo2.txt", TOPO), ("peers.txt", PEERS)):
        Path(name).write_text(text)
    done = command("cluster", "from-files", *arguments)
    assert done.status == 2
    assert message in done.err
    assert done.err.startswith("graphpilot: ")
    assert done.err.count("\n") == 1


def fake_nvidia_smi(folder: Path, script: str) -> None:
    """Put a program of this name into a folder."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


def test_a_host_is_described_by_its_driver_and_by_nccl(tmp_path, monkeypatch):
    (tmp_path / "topo").write_text(TOPO)
    (tmp_path / "peers").write_text(PEERS)
    (tmp_path / "dump.xml").write_text(DUMP)
    fake_nvidia_smi(tmp_path, f'if [ "$2" = "-m" ]; then cat {tmp_path}/topo; else cat {tmp_path}/peers; fi')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    here = replace(H200, memory_bytes=10**11, bf16_flops_per_second=1.0)
    alone = cluster_from_outputs(here).cluster
    assert alone.name == "this-host"
    assert alone.device == replace(H200, memory_bytes=10**11)  # rates are of the data sheet
    monkeypatch.setenv("NCCL_TOPO_DUMP_FILE", str(tmp_path / "dump.xml"))
    with_dump = cluster_from_outputs(here, num_hosts=3).cluster
    assert with_dump.num_hosts == 3
    assert with_dump.host is not None
    rates = {link.ends: link.bandwidth_bytes_per_second for link in with_dump.host.links}
    assert rates["device0", "socket0"] == 2 * rates["device1", "socket0"]  # 16 lanes and 8
    assert ("device0", "device1") in rates  # NVLinks of nvidia-smi


def test_a_host_without_a_working_driver_is_refused_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RunError, match="nvidia-smi must be on the PATH"):
        cluster_from_outputs(H200)
    fake_nvidia_smi(tmp_path, "exit 9")
    with pytest.raises(RunError, match=r"nvidia-smi topo -m failed: .*exit status 9"):
        cluster_from_outputs(H200)
