"""A cluster from files that describe a host: what nvidia-smi printed, and NCCL's topology and graphs, together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from xml.etree import ElementTree

from simulator.errors import SpecError
from simulator.readers.topology_found import NVSWITCH, FoundHost, Join
from simulator.readers.topology_rates import (
    GPU_MODELS,
    INTEL_SOCKET_BYTES_PER_SECOND,
    NCCL_SOURCE,
    NET_BYTES_PER_GIGABIT,
    GpuModel,
)
from simulator.readers.topology_smi import PeerMatrix, is_matrix, is_peer_matrix, read_link_matrix, read_peer_matrix
from simulator.readers.topology_xml import GraphDump, parse_xml, read_graph_dump, read_topology
from simulator.specs.cluster import ClusterSpec
from simulator.specs.device import DeviceSpec, LinkSpec
from simulator.specs.machines import FABRICS, NVLINK4
from simulator.specs.topology import DEVICE, HostLink, HostTopology, LinkKind
from simulator.specs.units import GB, Dimension, format_quantity

Described = FoundHost | PeerMatrix | GraphDump
_MAX_BYTES = 16 * 2**20  # dumps of hosts have tens of kB


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCluster:
    """A cluster, and what a reader should know of where its numbers come from, in sentences."""

    cluster: ClusterSpec
    notes: tuple[str, ...]


def read_description(path: Path) -> Described:
    """Return what one file says of a host.

    Raises:
        SpecError: if it is none of the formats, or is wrong.
    """
    where = str(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {error.strerror or error}; correct the path") from error
    formats = "what nvidia-smi topo -m or -p2p r prints, or an XML of NCCL_TOPO_DUMP_FILE or NCCL_GRAPH_DUMP_FILE"
    if len(data) > _MAX_BYTES or b"\0" in data or data.startswith(b"\x1f\x8b"):
        raise SpecError(f"{path}: must be {formats}, got no text of that kind; unpack it if it is compressed")
    text = data.decode("utf-8-sig", errors="replace")
    if text.lstrip().startswith("<"):
        root = parse_xml(text, where=where)
        return _of_xml(root, where)
    if is_matrix(text):
        is_peer = is_peer_matrix(text)
        return read_peer_matrix(text, where=where) if is_peer else read_link_matrix(text, where=where)
    raise SpecError(f"{path}: must be {formats}, got neither a header that begins with GPU0 nor XML")


def _of_xml(root: ElementTree.Element, where: str) -> Described:
    is_graph = root.tag == "graphs"
    return read_graph_dump(root, where=where) if is_graph else read_topology(root, where=where)


def cluster_from_files(
    paths: Sequence[Path], *, model: str | None = None, device: DeviceSpec | None = None, num_hosts: int = 1
) -> FoundCluster:
    """Return the cluster of hosts that files describe.

    Args:
        paths: of one host: a topology (of nvidia-smi, of NCCL, or both) and, if at hand, a matrix of peers and a graph
            dump.
        model: key of `GPU_MODELS`, where the files do not say which GPUs they are about, or say it wrongly.
        device: what the system says of its GPUs, where they are at hand.

    Raises:
        SpecError: if a file is of no known format, or they do not go together or do not say enough.
    """
    described = {str(path): read_description(path) for path in paths}
    hosts = {where: each for where, each in described.items() if isinstance(each, FoundHost)}
    peers = {where: each for where, each in described.items() if isinstance(each, PeerMatrix)}
    graphs = {where: each for where, each in described.items() if isinstance(each, GraphDump)}
    if not hosts:
        names = ", ".join(described) or "no file"
        rule = "must come with the links of the host: what nvidia-smi topo -m prints, or NCCL's topology (<system>)"
        raise SpecError(f"{names}: {rule}")
    for kind, found, most in (("topologies", hosts, 2), ("peer matrices", peers, 1), ("graph dumps", graphs, 1)):
        if len(found) > most:
            raise SpecError(f"{', '.join(found)}: must be of one host, got {len(found)} {kind}; give one of them")
    host = _together(hosts)
    gpu = _model_of(host, model, ", ".join(hosts))
    peer = next(iter(peers.values()), None)
    if peer is not None and peer.num_devices != host.num_devices:
        raise SpecError(
            f"{next(iter(peers))}: must be of {host.num_devices} GPUs as {next(iter(hosts))} is, got {peer.num_devices}"
        )
    spec = _cluster(
        _with_board(host, gpu),
        gpu,
        peer,
        next(iter(graphs.values()), None),
        name=Path(next(iter(hosts))).stem,
        num_hosts=num_hosts,
    )
    if device is not None:
        return replace(spec, cluster=replace(spec.cluster, device=device))
    note = f"device: the files do not name it; {host.model_note}, so {gpu.device.name}" if host.model_note else None
    if model is not None:
        note = f"device: given as {model}"
    return spec if note is None else replace(spec, notes=(note, *spec.notes))


def _together(hosts: Mapping[str, FoundHost]) -> FoundHost:
    """Return what a PCI tree and a matrix of links say together: the tree of the one with rates, NVLinks of either."""
    found = list(hosts.values())
    if len(found) == 1:
        return found[0]
    trees = [each for each in found if any(join.bytes_per_second is not None for join in each.joins)]
    if len(trees) != 1:
        raise SpecError(f"{', '.join(hosts)}: must be of one host, got two topologies of one kind; give one of them")
    (tree,) = trees
    (matrix,) = (each for each in found if each is not tree)
    if tree.num_devices != matrix.num_devices:
        counts = f"{found[0].num_devices} and {found[1].num_devices} GPUs"
        raise SpecError(f"{', '.join(hosts)}: must be of one host, got {counts}")
    return replace(
        tree,
        nvlinks=tree.nvlinks or matrix.nvlinks,
        model=tree.model or matrix.model,
        model_note=tree.model_note if tree.model else matrix.model_note,
        notes=(*tree.notes, *matrix.notes),
    )


def _model_of(host: FoundHost, given: str | None, where: str) -> GpuModel:
    name = given or host.model
    if name is None or name not in GPU_MODELS:
        got = "the file does not say it" if name is None else f'got "{name}"'
        raise SpecError(f"{where}: the kind of GPU must be one of {', '.join(GPU_MODELS)}, {got}; give --device")
    return GPU_MODELS[name]


def _cluster(
    host: FoundHost, gpu: GpuModel, peer: PeerMatrix | None, graph: GraphDump | None, *, name: str, num_hosts: int
) -> FoundCluster:
    notes = [*host.notes]
    links = [*_nvlink_links(host, gpu, notes), *(_host_link(join, gpu, notes) for join in host.joins)]
    peer_access = peer is None or not peer.refused
    if peer is not None and peer.refused:
        a, b, state = peer.refused[0]
        notes.append(f"devices {a} and {b} may not read each other ({state}): traffic goes through host memory")
    has_nics = bool(host.nic_gigabits)
    gpu_direct = host.gpu_direct is not False or not has_nics
    if has_nics and host.gpu_direct is None:
        notes.append("whether network cards read devices' memory (gpu_direct) is not in the file: taken for yes")
    topology = HostTopology(links=tuple(links), gpu_direct=gpu_direct, peer_access=peer_access)
    cluster = ClusterSpec(
        name=name,
        num_hosts=num_hosts,
        devices_per_host=host.num_devices,
        device=gpu.device,
        device_link=_device_link(host, gpu, graph, notes, peer_access=peer_access),
        host_link=_card_share(host, gpu, notes, gpu_direct=gpu_direct),
        host=topology,
    )
    return FoundCluster(cluster=cluster, notes=tuple(dict.fromkeys(notes)))


def _with_board(host: FoundHost, gpu: GpuModel) -> FoundHost:
    """Return a host with the NVLinks of its board, which files of providers leave out."""
    if host.nvlinks or not gpu.is_on_board or host.num_devices != 8:
        return host
    note = "NVLinks are not in the file, as in those of providers: those of a board of eight with NVSwitch are added"
    nvlinks = tuple((f"{DEVICE}{number}", NVSWITCH, gpu.nvlinks) for number in range(host.num_devices))
    return replace(host, nvlinks=nvlinks, notes=(*host.notes, note))


def _nvlink_links(host: FoundHost, gpu: GpuModel, notes: list[str]) -> list[HostLink]:
    if host.nvlinks:
        rate = _rate(gpu.nvlink_bytes_per_second)
        notes.append(f"links of kind nvlink: {rate} each way for one, {NCCL_SOURCE}")
    return [
        HostLink(ends=(a, b), kind=LinkKind.NVLINK, bandwidth_bytes_per_second=count * gpu.nvlink_bytes_per_second)
        for a, b, count in host.nvlinks
    ]


def _host_link(join: Join, gpu: GpuModel, notes: list[str]) -> HostLink:
    rate = join.bytes_per_second
    if rate is None and join.kind is LinkKind.SOCKET:
        rate = float(INTEL_SOCKET_BYTES_PER_SECOND[143 if gpu.gigatransfers >= 32 else 85])
        notes.append(
            f"links of kind socket: not in the file, {_rate(rate)} as of Intel's of the GPU's time, {NCCL_SOURCE}"
        )
    elif rate is None:
        rate = gpu.pcie_bytes_per_second
        notes.append(f"PCIe links: not in the file, {_rate(rate)} as of the GPU's slot, {NCCL_SOURCE}")
    else:
        notes.append(f"PCIe and sockets: transfers, lanes and processor of the file by {NCCL_SOURCE}")
    return HostLink(ends=join.ends, kind=join.kind, bandwidth_bytes_per_second=rate)


def _device_link(
    host: FoundHost, gpu: GpuModel, graph: GraphDump | None, notes: list[str], *, peer_access: bool
) -> LinkSpec:
    """Return what a device sends to the others at most: the rings that NCCL found, or all its NVLinks, or its slot."""
    latency = NVLINK4.latency_seconds
    notes.append("device_link.latency_seconds: all_reduce of 8 bytes on 8 H100s; calibrate where it matters")
    if graph is not None:
        rate = graph.ring_bytes_per_second
        each = _rate(rate / graph.num_channels)
        notes.append(f"device_link: {graph.num_channels} rings of {each} in the graph dump ({graph.worst_link})")
        return LinkSpec(latency_seconds=latency, bandwidth_bytes_per_second=rate)
    counts = [0] * host.num_devices
    for a, b, count in host.nvlinks:
        for end in (a, b):
            if end != NVSWITCH:
                counts[int(end.removeprefix(DEVICE))] += count
    uses_nvlink = peer_access and max(counts) > 0
    rate = max(counts) * gpu.nvlink_bytes_per_second if uses_nvlink else gpu.pcie_bytes_per_second
    return LinkSpec(latency_seconds=latency, bandwidth_bytes_per_second=rate)


def _card_share(host: FoundHost, gpu: GpuModel, notes: list[str], *, gpu_direct: bool) -> LinkSpec:
    """Return a device's share of the network cards."""
    fabric = FABRICS["ndr" if gpu_direct else "ethernet"]
    gigabits = host.nic_gigabits[0] if host.nic_gigabits else 100.0
    if not host.nic_gigabits:
        notes.append(
            "host_link: the file has no network card; as of one of 100 Gb/s for the host, if there are several"
        )
    elif gigabits is None:
        gigabits = gpu.card_gigabits
        notes.append(f"host_link: cards' rate is not in the file; {gigabits:g} Gb/s each, as usual with this device")
    else:
        notes.append(f"host_link: network ports of {gigabits:g} Gb/s, {len(host.nic_gigabits)} in all")
    assert gigabits is not None
    rate = gigabits * NET_BYTES_PER_GIGABIT * max(len(host.nic_gigabits), 1)
    notes.append(f"host_link.bandwidth_bytes_per_second: {_rate(12 * GB)} for 100 Gb/s, {NCCL_SOURCE}")
    return LinkSpec(latency_seconds=fabric.latency_seconds, bandwidth_bytes_per_second=rate / host.num_devices)


def _rate(bytes_per_second: float) -> str:
    return format_quantity(bytes_per_second, Dimension.BYTES_PER_SECOND)
