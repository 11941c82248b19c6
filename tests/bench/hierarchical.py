"""Bytes between two hosts and step times, with flat and hierarchical halo exchanges.

    python -m tests.bench.hierarchical --json figures.json     # as root, nothing beside it; about a quarter of an hour

Two network namespaces are the hosts, joined by a veth pair whose ends `tc` limits to 100 Mbit/s; gloo and the store use
that link alone. Each plan is trained by `graphpilot train` under a torchrun a host, once for a few steps and once for
more: the difference is what steps send, without meeting, evaluation and end. The graph is an R-MAT graph of the size of
arXiv's, cut by METIS.
"""

import argparse
import statistics
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from executor.environment import environment, local_cluster
from planner.hosts import host_rows
from simulator.readers.generators import materialise
from simulator.readers.graphs import Graph, read_graph
from simulator.readers.partitions import read_partition
from simulator.specs.cluster import ClusterSpec, DeviceKind, LinkSpec
from simulator.specs.files import read_trace
from simulator.specs.graph import GraphSpec, RmatGraph
from simulator.specs.model import ModelSpec
from simulator.specs.plan import Exchange, Plan
from simulator.specs.program import TaskKind
from simulator.specs.train import TrainSpec
from simulator.workload import lower
from tests.bench.namespaces import TwoHosts, missing_means, two_hosts
from tests.bench.result import Better, Figure, print_figures, write_figures
from tests.plans import Choices, plan_file_of, plan_of

BITS_PER_SECOND = 100_000_000
GRAPH = RmatGraph(num_nodes=169_343, num_edges=1_166_243, num_classes=40, num_features=16)
MODEL = ModelSpec(width=64, num_heads=4, num_layers=2, feed_forward_width=64)
# Of 15 steps, the first 5 are left out of the times.
FEW_STEPS, STEPS = 2, 15
RANKS_PER_HOST = (2, 4)
FLAT, HIERARCHICAL = Exchange.HALO, Exchange.HIERARCHICAL_HALO
# The share of the flat exchange's bytes that is to be expected on this graph, by ranks of a host.
MOST_SHARE = {2: 0.63, 4: 0.42}
# Headers of TCP and IP, acknowledgements, heartbeats and the store come on top of rows and gradients.
MOST_OVERHEAD = 0.03
# Of the time that the saved bytes take on the link, at least so much is saved: packing runs twice.
LEAST_SAVED = 0.8


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What one plan came to.

    Attributes:
        rows: distinct rows that ranks, or hosts, need of the other host.
        expected_bytes: of rows and their gradients, and the reduction of gradients, over the link in a step, both ways.
        sent_bytes: over the link in a step, both ways, as the namespaces counted.
        busiest_bytes: of that, of the host that sends more.
        step_seconds: of the steps after the first five.
    """

    rows: int
    expected_bytes: float
    sent_bytes: float
    busiest_bytes: float
    step_seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        """Median of the steps."""
        return statistics.median(self.step_seconds)


def cluster_of(ranks_per_host: int) -> ClusterSpec:
    """Return the two namespaces as a cluster."""
    link = LinkSpec(latency_seconds=1e-4, bandwidth_bytes_per_second=BITS_PER_SECOND / 8 / ranks_per_host)
    local = local_cluster(DeviceKind.CPU)
    return replace(local, name="two namespaces", num_hosts=2, devices_per_host=ranks_per_host, host_link=link)


def rows_between_hosts(graph: Graph, part_N: NDArray[np.int32], exchange: Exchange, ranks_per_host: int) -> int:
    """Return how many rows cross the link in one exchange, from the edges: distinct ones of each rank, or of a host."""
    target_N, source_N = part_N[graph.target_E], part_N[graph.source_E]
    crosses_E = target_N // ranks_per_host != source_N // ranks_per_host
    receiver_E = target_N // ranks_per_host if exchange is HIERARCHICAL else target_N
    return len(np.unique(receiver_E[crosses_E].astype(np.int64) * graph.num_nodes + graph.source_E[crosses_E]))


def reduced_bytes_between_hosts(plan: Plan, spec: GraphSpec, cluster: ClusterSpec) -> float:
    """Return what the reduction of gradients sends over the link, both ways: gloo's ring leaves each host once."""
    tasks = lower(plan, spec, MODEL, cluster).tasks[0]
    each = sum(task.num_bytes for task in tasks if task.kind is TaskKind.ALL_REDUCE)
    return 2 * each * 2 * (plan.num_ranks - 1) / plan.num_ranks


def measure(
    hosts: TwoHosts, exchange: Exchange, ranks_per_host: int, spec: GraphSpec, graph: Graph, folder: Path
) -> Measured:
    """Train one plan on both hosts, for a few steps and for more."""
    cluster, num_ranks = cluster_of(ranks_per_host), 2 * ranks_per_host
    plan = plan_of(Choices(graph_parallel_degree=num_ranks, exchange=exchange), graph, MODEL, folder)
    part_N = read_partition(plan.partition, folder=folder, num_nodes=graph.num_nodes)
    if exchange is HIERARCHICAL:
        counted = host_rows(graph, part_N, num_ranks, ranks_per_host=ranks_per_host)
        plan = replace(plan, partition=replace(plan.partition, hosts=counted))
    sent = {}
    for num_steps in (FEW_STEPS, STEPS):
        name = f"{exchange}-{ranks_per_host}-{num_steps}"
        train = TrainSpec(num_steps=num_steps, learning_rate=0.001, evaluate_every_steps=1000, cpu_affinity=False)
        plan_file_of(plan, spec, MODEL, cluster, train, folder / f"{name}.json")
        (out := folder / name).mkdir()
        before = hosts.sent_bytes()
        arguments = ["executor", "train", str(folder / f"{name}.json"), "--out", str(out)]
        hosts.torchrun(arguments, ranks_per_host=ranks_per_host, num_threads=1, logs=out)
        sent[num_steps] = [after - earlier for earlier, after in zip(before, hosts.sent_bytes(), strict=True)]
    each = [(many - few) / (STEPS - FEW_STEPS) for few, many in zip(sent[FEW_STEPS], sent[STEPS], strict=True)]
    # Keys and values in fp32, in each layer forward and their gradients back.
    rows = rows_between_hosts(graph, part_N, exchange, ranks_per_host)
    rows_bytes = rows * 2 * MODEL.width * 4 * 2 * MODEL.num_layers
    return Measured(
        rows=rows,
        expected_bytes=rows_bytes + reduced_bytes_between_hosts(plan, spec, cluster),
        sent_bytes=sum(each),
        busiest_bytes=max(each),
        step_seconds=read_trace(out / "measured.json").step_seconds,
    )


def figures_of(ranks_per_host: int, flat: Measured, hierarchical: Measured) -> list[Figure]:
    """Return the figures of one layout."""
    title = f"2 x {ranks_per_host}"
    found = []
    for name, measured in (("flat", flat), ("hierarchical", hierarchical)):
        quartiles = statistics.quantiles(measured.step_seconds, n=4)
        found += [
            _told(f"{title}, {name}: rows between hosts in an exchange", measured.rows, ""),
            _told(f"{title}, {name}: bytes over the link in a step", measured.sent_bytes / 1e6, "MB"),
            Figure(
                name=f"{title}, {name}: of them, beside rows and gradients of parameters",
                value=measured.sent_bytes / measured.expected_bytes - 1,
                unit="",
                bar=MOST_OVERHEAD,
                better=Better.LOWER,
            ),
            _told(f"{title}, {name}: seconds of a step", measured.median_seconds, "s"),
            _told(f"{title}, {name}: of them, between quartiles", quartiles[2] - quartiles[0], "s"),
        ]
    saved_seconds = flat.median_seconds - hierarchical.median_seconds
    on_link = 8 * (flat.busiest_bytes - hierarchical.busiest_bytes) / BITS_PER_SECOND
    return [
        *found,
        Figure(
            name=f"{title}: bytes over the link, hierarchical over flat",
            value=hierarchical.sent_bytes / flat.sent_bytes,
            unit="",
            bar=MOST_SHARE[ranks_per_host],
            better=Better.LOWER,
        ),
        _told(f"{title}: seconds of a step, hierarchical over flat", hierarchical.median_seconds / flat.median_seconds),
        Figure(
            name=f"{title}: saved seconds over those of the saved bytes on the link",
            value=saved_seconds / on_link,
            unit="",
            bar=LEAST_SAVED,
            better=Better.HIGHER,
        ),
    ]


def _told(name: str, value: float, unit: str = "") -> Figure:
    return Figure(name=name, value=value, unit=unit, bar=None, better=Better.LOWER)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here")
    chosen = parser.parse_args()
    if missing := missing_means():
        parser.error(missing)
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory(prefix="graphpilot-") as name, two_hosts(bits_per_second=BITS_PER_SECOND) as hosts:
        folder = Path(name)
        spec, graph = read_graph(materialise(GRAPH, folder), base=folder)
        for ranks_per_host in RANKS_PER_HOST:
            flat, hierarchical = (
                measure(hosts, exchange, ranks_per_host, spec, graph, folder) for exchange in (FLAT, HIERARCHICAL)
            )
            figures += figures_of(ranks_per_host, flat, hierarchical)
    print_figures(figures, title="flat and hierarchical exchanges between two namespaces")
    if chosen.json:
        write_figures(chosen.json, figures, dict(environment(DeviceKind.CPU)))


if __name__ == "__main__":
    main()
