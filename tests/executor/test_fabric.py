"""The microbenchmark of fabrics: groups, rails, GPUDirect on and off, uneven all-to-alls; on gloo here."""

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # not in __all__

from executor.measure.cards import Cards, network_cards
from executor.measure.fabric import Settings, groups_of, measure
from executor.nccl_settings import nccl_settings, told_nccl
from simulator.errors import RunError, SpecError
from simulator.fabric_check import GPUDIRECT_OFF, RAIL, UNEVEN
from simulator.group_shape import even_shape
from simulator.log_samples import with_logs
from simulator.readers.nccl_tests import read_collective_log
from simulator.specs.calibration import Calibration
from simulator.specs.cluster import BUILT_IN_CLUSTERS, DeviceKind
from simulator.specs.communication import Algorithm, Operation, Protocol
from tests.executor.commands import Done, ended


def started(folder: Path, *options: str, more: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "executor.measure.fabric"]
    return subprocess.Popen(
        [*command, "--quick", "--out", "fabric.json", *more],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
    )


def on_two_hosts(folder: Path, *more: str) -> list[Done]:
    """Measure on two agents of torchrun with two ranks each, as on two hosts."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "localhost", "--master-port", str(port)]
    agents = [started(folder, *options, "--node-rank", str(host), more=more) for host in range(2)]
    return [ended(agent, timeout_seconds=120) for agent in agents]


@pytest.mark.slow
@pytest.mark.dist
def test_two_hosts_measure_all_operations_in_all_groups_and_a_calibration_takes_them(tmp_path):
    done = on_two_hosts(tmp_path)
    assert [agent.status for agent in done] == [0, 0], done
    log = read_collective_log(tmp_path / "fabric.json")
    plain = {(row.operation, row.shape) for row in log.rows if not row.variant}
    shapes = (even_shape(2, 1), even_shape(2, 2), even_shape(4, 2))
    assert plain == {(operation, shape) for operation in Operation for shape in shapes}
    assert {row.variant for row in log.rows} == {"", f"{RAIL} 0", f"{RAIL} 1", UNEVEN}
    assert all(row.operation is Operation.ALL_TO_ALL for row in log.rows if row.variant == UNEVEN)
    # Then once more with GPUDirect off, whose rows are added: gloo has none, but its rows are told apart.
    again = on_two_hosts(tmp_path, "--gpudirect", "off")
    assert [agent.status for agent in again] == [0, 0], again
    both = read_collective_log(tmp_path / "fabric.json")
    assert both.rows[: len(log.rows)] == log.rows
    assert {row.variant for row in both.rows[len(log.rows) :]} == {
        GPUDIRECT_OFF,
        *(f"{RAIL} {rail} {GPUDIRECT_OFF}" for rail in range(2)),
    }
    empty = Calibration(device_name=log.device, environment=(), computes=(), collectives=())
    calibration, added = with_logs(empty, [tmp_path / "fabric.json"])
    # Four kinds of plans, three shapes, two sizes.
    assert added[0].num_samples == len(calibration.collectives) == 4 * 3 * 2
    assert {(s.num_ranks, s.num_hosts) for s in calibration.collectives} == {(2, 1), (2, 2), (4, 2)}


@pytest.mark.dist
def test_three_ranks_of_one_host_measure_two_and_all(tmp_path):
    done = ended(started(tmp_path, "--nproc-per-node", "3"), timeout_seconds=120)
    assert done.status == 0, done
    rows = read_collective_log(tmp_path / "fabric.json").rows
    assert {row.shape for row in rows} == {even_shape(2, 1), even_shape(3, 1)}
    gathers = [row.num_bytes for row in rows if row.operation is Operation.ALL_GATHER and row.shape.num_ranks == 3]
    # Whole buffers of three equal shares of floats, of about 1 KiB and 64 KiB.
    assert gathers == [1020, 65532]


def test_rows_without_gpudirect_need_a_log_with_it_first(monkeypatch, tmp_path):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    out = tmp_path / "fabric.json"
    settings = Settings(out=out, kind=DeviceKind.CPU, sizes=(1024,), repetitions=1, uses_gpudirect=False)
    with pytest.raises(SpecError, match="must hold a log with GPUDirect on first"):
        measure(settings, HashStore(), 0)


def test_without_torchrun_it_says_how_to_start_it(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "TORCHELASTIC_RUN_ID"}
    command = [sys.executable, "-m", "executor.measure.fabric"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "start it under torchrun" in done.stderr


def test_groups_of_two_hosts_of_eight_with_eight_cards():
    groups = groups_of(2, 8, 8)
    shapes = [str(group.shape) for group in groups if not group.variant]
    assert shapes == ["2 ranks", "4 ranks", "8 ranks", "2 ranks on 2 hosts", "16 ranks on 2 hosts"]
    rails = [group for group in groups if group.variant]
    assert [group.ranks for group in rails[:2]] == [(0, 8), (1, 9)]
    assert len(rails) == 8
    assert [group.shape.cards_per_host for group in (groups[3], groups[4], rails[0])] == [1, 8, 1]


def test_cards_are_counted_as_linux_lists_them(tmp_path):
    for card, rate, state in (("mlx5_0", "400 Gb/sec (4X NDR)", "4: ACTIVE"), ("mlx5_1", "200 Gb/sec", "1: DOWN")):
        port = tmp_path / card / "ports/1"
        port.mkdir(parents=True)
        for name, text in (("rate", rate), ("state", state), ("link_layer", "InfiniBand")):
            (port / name).write_text(text + "\n")
    assert network_cards(tmp_path) == Cards(count=1, bytes_per_second=50e9, fabric="IB")
    (tmp_path / "mlx5_0/ports/1/link_layer").write_text("Ethernet\n")
    assert network_cards(tmp_path).fabric == "RoCE"
    assert network_cards(tmp_path / "nowhere") == Cards(count=0, bytes_per_second=0.0, fabric="")


# --- What a cluster asks of NCCL.

CLUSTER = BUILT_IN_CLUSTERS["h100x8-ndr"]


@pytest.mark.parametrize(
    ("algorithm", "protocol", "expected"),
    [
        (None, None, {}),
        (Algorithm.RING, None, {"NCCL_ALGO": "Ring"}),
        (Algorithm.TREE, Protocol.LL128, {"NCCL_ALGO": "Ring;allreduce:Tree", "NCCL_PROTO": "LL128"}),
    ],
)
def test_nccl_is_told_while_communicators_are_made(monkeypatch, algorithm, protocol, expected):
    for name in ("NCCL_ALGO", "NCCL_PROTO"):
        monkeypatch.delenv(name, raising=False)
    told = replace(CLUSTER, nccl_algorithm=algorithm, nccl_protocol=protocol)
    assert nccl_settings(told) == expected
    with told_nccl(told):
        assert {name: value for name, value in os.environ.items() if name in ("NCCL_ALGO", "NCCL_PROTO")} == expected
    assert "NCCL_ALGO" not in os.environ


def test_an_environment_that_asks_for_something_else_is_refused(monkeypatch):
    monkeypatch.setenv("NCCL_PROTO", "LL")
    told = told_nccl(replace(CLUSTER, nccl_protocol=Protocol.SIMPLE))
    with pytest.raises(RunError, match="NCCL_PROTO must be what the plan's cluster asks for, 'Simple', got 'LL'"):
        told.__enter__()
