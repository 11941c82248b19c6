"""`graphpilot cluster`: clusters by name, of this host, and of files that describe a host."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from executor.cli_errors import require_writable
from executor.cli_output import Output
from simulator.errors import SpecError
from simulator.readers.topology_files import FoundCluster, cluster_from_files
from simulator.readers.topology_rates import GPU_MODELS
from simulator.specs.cluster import BUILT_IN_CLUSTERS, ClusterSpec
from simulator.specs.convert import nearest, to_plain
from simulator.specs.files import cluster_toml, write_text_atomic
from simulator.specs.toml import LOCAL

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of TOML.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", help="Print nothing but errors.")]
OutOption = Annotated[Path | None, typer.Option(help="Write it to this TOML file, to be edited.")]
HostsOption = Annotated[int | None, typer.Option(help="Hosts of the cluster.", min=1)]


class _ByName(TyperGroup):
    """Takes what is no subcommand for the name of a cluster."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `show` before a name."""
        is_name = bool(args) and args[0] not in self.commands and args[0] != "--help"
        parsed: list[str] = super().parse_args(ctx, ["show", *args] if is_name else args)
        return parsed


cluster_app = typer.Typer(
    cls=_ByName,
    no_args_is_help=True,
    help="Print a cluster as TOML, which a run.toml can name as its cluster's file once edited: one by name (show, "
    "which need not be written), this host (from-host), or one that files describe (from-files). All of them take "
    f"--out, --hosts, --json and --quiet.\n\nNames: {LOCAL}, {', '.join(BUILT_IN_CLUSTERS)}.\n\n"
    "Example: graphpilot cluster h100x8-ndr --hosts 16 --out my-cluster.toml",
)


@cluster_app.command()
def show(
    name: Annotated[str, typer.Argument(help="local, h200x8, h100x8-ndr or another; see graphpilot cluster --help.")],
    hosts: HostsOption = None,
    out: OutOption = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Print a cluster by name.

    Example: graphpilot cluster a100x8-hdr --hosts 4
    """
    if name != LOCAL and name not in BUILT_IN_CLUSTERS:
        close = nearest(name, BUILT_IN_CLUSTERS)
        raise SpecError(f"name must be one of {LOCAL}, {', '.join(BUILT_IN_CLUSTERS)}, got {name!r}{close}")
    cluster = _local() if name == LOCAL else BUILT_IN_CLUSTERS[name]
    if hosts is not None:
        cluster = replace(cluster, num_hosts=hosts)
    _print(FoundCluster(cluster=cluster, notes=()), out, Output(json, quiet))


@cluster_app.command(name="from-host")
def from_host(
    hosts: HostsOption = None,
    out: OutOption = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Print the cluster of hosts like this one: devices, NVLinks, PCIe and network cards.

    Set NCCL_TOPO_DUMP_FILE to the path of what NCCL found here, if at hand: it knows the rates of PCIe and cards.

    Example: graphpilot cluster from-host --hosts 2 --out cluster.toml
    """
    from executor.host_topology import cluster_from_host

    _print(cluster_from_host(num_hosts=hosts or 1), out, Output(json, quiet))


@cluster_app.command(name="from-files")
def from_files(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Of one host: what nvidia-smi topo -m and topo -p2p r print, NCCL_TOPO_DUMP_FILE, "
            "NCCL_GRAPH_DUMP_FILE, a provider's NCCL_TOPO_FILE."
        ),
    ],
    device: Annotated[
        str | None, typer.Option(help=f"Kind of GPU, where the files do not say it: {', '.join(GPU_MODELS)}.")
    ] = None,
    hosts: HostsOption = None,
    out: OutOption = None,
    json: JsonFlag = False,
    quiet: QuietFlag = False,
) -> None:
    """Print the cluster of hosts that files describe; comments say where each number comes from.

    Example: graphpilot cluster from-files topo.txt nccl_topo.xml --device h100 --out cluster.toml
    """
    _print(cluster_from_files(files, model=device, num_hosts=hosts or 1), out, Output(json, quiet))


def _print(found: FoundCluster, out: Path | None, output: Output) -> None:
    """Print a cluster, and write it to a file if one is named."""
    comments = "".join(f"# {note}.\n" for note in found.notes)
    text = f"{comments}\n{cluster_toml(found.cluster)}" if comments else cluster_toml(found.cluster)
    if out is not None:
        require_writable(out)
        write_text_atomic(out, text)
    content = dict(to_plain(found.cluster))
    if found.notes:
        content["notes"] = list(found.notes)
    output.result(content, text.rstrip())


def _local() -> ClusterSpec:
    from executor.environment import local_cluster

    return local_cluster()
