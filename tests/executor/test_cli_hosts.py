"""The command with hierarchical exchanges under torchrun, on hosts as the plan counts on them and on others."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from planner.hosts import host_rows
from simulator.readers.graphs import read_graph
from simulator.readers.partitions import read_partition
from simulator.specs.graph import GraphFile
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange
from simulator.specs.train import TrainSpec
from tests.executor.commands import Done, ended, write_graph
from tests.made import made_cluster
from tests.plans import Choices, plan_file_of, plan_of

pytestmark = pytest.mark.dist


def planned(folder: Path, exchange: Exchange, *, num_ranks: int) -> Path:
    """Write a plan for hosts of two ranks."""
    write_graph(folder)
    spec, graph = read_graph(GraphFile(path="graph.npz"), base=folder)
    model = ModelSpec(width=16, num_heads=4, num_layers=2, feed_forward_width=32)
    plan = plan_of(Choices(graph_parallel_degree=num_ranks, exchange=exchange), graph, model, folder)
    if exchange is Exchange.HIERARCHICAL_HALO:
        part_N = read_partition(plan.partition, folder=folder, num_nodes=graph.num_nodes)
        hosts = host_rows(graph, part_N, num_ranks, ranks_per_host=2)
        plan = replace(plan, partition=replace(plan.partition, hosts=hosts))
    path = folder / f"{exchange}.json"
    train = TrainSpec(num_steps=4, learning_rate=0.01, seed=1)
    plan_file_of(plan, spec, model, made_cluster(num_hosts=2, devices_per_host=2), train, path)
    return path


def torchrun(folder: Path, plan: Path, out: str, *options: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "torch.distributed.run", *options, "-m", "executor", "train", str(plan)]
    return subprocess.Popen(
        [*command, "--out", out],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "80"},
        start_new_session=True,
    )


def on_two_hosts(folder: Path, plan: Path, out: str) -> list[Done]:
    """Run a plan on two agents of torchrun with two ranks each, as on two hosts."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    options = ["--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "localhost", "--master-port", str(port)]
    agents = [torchrun(folder, plan, out, *options, "--node-rank", str(host)) for host in range(2)]
    return [ended(agent, timeout_seconds=120) for agent in agents]


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_two_hosts_train_alike_with_hierarchical_and_flat_exchanges(tmp_path, num_ranks):
    losses = []
    for exchange in (Exchange.HIERARCHICAL_HALO, Exchange.HALO):
        done = on_two_hosts(tmp_path, planned(tmp_path, exchange, num_ranks=num_ranks), exchange)
        assert [agent.status for agent in done] == [0, 0], done
        losses.append(json.loads((tmp_path / exchange / "result.json").read_text())["losses"])
    assert len(losses[0]) == 4
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_ranks_on_another_host_than_the_plan_has_them_are_refused(tmp_path):
    plan = planned(tmp_path, Exchange.HIERARCHICAL_HALO, num_ranks=4)
    done = ended(torchrun(tmp_path, plan, "run", "--nproc-per-node", "4"), timeout_seconds=120)
    # torchrun ends ranks that have not ended by themselves when it sees the first one.
    assert "2" in (codes := set(re.findall(r"exitcode\s*: (-?\d+)", done.err)))
    assert codes <= {"2", "-15"}
    (sentence,) = [line for line in done.err.splitlines() if line.startswith("graphpilot: ")]
    assert sentence == (
        "graphpilot: rank 2 was started on host 0, but the plan's hierarchical exchange has it on host 1: start 2 "
        "ranks a host, or plan for these hosts"
    )
