"""NCCL's and RCCL's topology XML: dumps of running machines, providers' files without GPUs' links, dumps of graphs."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, field

from simulator.errors import SpecError
from simulator.readers.topology_found import NVSWITCH, FoundHost, Join
from simulator.readers.topology_rates import GPU_MODELS, MODEL_OF_ARCHITECTURE, pcie_rate, socket_rate
from simulator.specs.topology import LinkKind
from simulator.specs.units import GB

# PCI class codes, by their first two bytes (pci-ids.ucw.cz); AMD's accelerators call themselves display controllers.
_SWITCH_CLASSES, _GPU_CLASSES, _NIC_CLASSES = (
    ("0x0604",),
    ("0x0300", "0x0302", "0x0380", "0x1200"),
    ("0x0200", "0x0207"),
)
_NVSWITCH_CLASS = "0x0680"
_NUMBER = re.compile(r"\d+(?:\.\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphDump:
    """What NCCL's search found, from `NCCL_GRAPH_DUMP_FILE`.

    Attributes:
        num_channels: rings side by side.
        ring_bytes_per_second: of all of them together, inside the host.
        worst_link: path type between devices, such as NVL, PIX or SYS.
    """

    num_channels: int
    ring_bytes_per_second: float
    worst_link: str


def parse_xml(text: str, *, where: str) -> ElementTree.Element:
    """Return the root of a topology or graph dump.

    Raises:
        SpecError: if the text is not XML, or its root is neither `system` nor `graphs`.
    """
    if "<!ENTITY" in text:
        raise SpecError(f"{where}: must not define entities; NCCL writes none")
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise SpecError(f"{where}: is not XML: {error}; give the whole file") from None
    if root.tag not in ("system", "graphs"):
        raise SpecError(f"{where}: must be a topology (<system>) or graphs (<graphs>) of NCCL, got <{root.tag}>")
    return root


def read_graph_dump(root: ElementTree.Element, *, where: str) -> GraphDump:
    """Return the rings of a graph dump.

    Raises:
        SpecError: if it holds none.
    """
    for graph in root.iter("graph"):
        channels = int(graph.get("nchannels", "0"), 0)
        if graph.get("pattern") == "4" and channels > 0:  # NCCL_TOPO_PATTERN_RING, src/include/graph.h
            speed = float(graph.get("speedintra", "0"))
            return GraphDump(
                num_channels=channels,
                ring_bytes_per_second=channels * speed * GB,
                worst_link=graph.get("typeintra", "unknown"),
            )
    raise SpecError(
        f"{where}: must hold a graph of rings (pattern 4) with channels; dump it again with NCCL_GRAPH_DUMP_FILE"
    )


def read_topology(root: ElementTree.Element, *, where: str) -> FoundHost:
    """Return what a topology says.

    Raises:
        SpecError: if its GPUs cannot be told, or a number is none.
    """
    try:
        return _Topology(root, where).found()
    except ValueError as error:
        if isinstance(error, SpecError):
            raise
        raise SpecError(
            f"{where}: holds a number that is none: {error}; dump it again with NCCL_TOPO_DUMP_FILE"
        ) from None


@dataclass(slots=True)
class _Node:
    """A PCI device and what holds it."""

    element: ElementTree.Element
    parent: str
    kind: LinkKind


@dataclass(slots=True)
class _Topology:
    """A topology while it is read."""

    root: ElementTree.Element
    where: str
    joins: list[Join] = field(default_factory=list)
    gpus: list[_Node] = field(default_factory=list)
    nics: list[_Node] = field(default_factory=list)
    num_switches: int = 0
    num_slots: int = 0
    notes: list[str] = field(default_factory=list)

    def found(self) -> FoundHost:
        """Return what the file says."""
        cpus = list(self.root.iter("cpu"))
        if not cpus:
            raise SpecError(f"{self.where}: must hold <cpu> elements, got none; dump it again with NCCL_TOPO_DUMP_FILE")
        for number, cpu in enumerate(cpus):
            self._walk(cpu, f"socket{number}", LinkKind.HOST_BRIDGE)
        self._sort_gpus()
        for number, gpu in enumerate(self.gpus):
            self._join(f"device{number}", gpu)
        nvlinks = self._nvlinks()
        nic_gigabits, directs = self._join_nics()
        model, model_note = self._model()
        for number, other in ((a, b) for a in range(len(cpus)) for b in range(len(cpus)) if a < b):
            rate = socket_rate(
                cpus[number].get("vendor", ""), *(_int(cpus[number], key) for key in ("familyid", "modelid"))
            )
            ends = (f"socket{number}", f"socket{other}")
            self.joins.append(Join(ends=ends, kind=LinkKind.SOCKET, bytes_per_second=rate))
        return FoundHost(
            num_devices=len(self.gpus),
            joins=tuple(self.joins),
            nvlinks=nvlinks,
            nic_gigabits=nic_gigabits,
            model=model,
            model_note=model_note,
            gpu_direct=self._gpu_direct(directs),
            notes=tuple(self.notes),
        )

    def _walk(self, holder: ElementTree.Element, parent: str, kind: LinkKind) -> None:
        """Collect the switches, GPUs and network cards below a processor or a switch."""
        self.nics += [_Node(nic, parent, kind) for nic in holder.findall("nic")]
        for pci in holder.findall("pci"):
            code = pci.get("class", "")[:6]
            if pci.find("gpu") is not None or code in _GPU_CLASSES:
                self.gpus.append(_Node(pci, parent, kind))
            elif pci.find("nic") is not None or code in _NIC_CLASSES:
                self.nics.append(_Node(pci, parent, kind))
            elif pci.find("pci") is not None or code in _SWITCH_CLASSES:
                name, self.num_switches = f"pcie{self.num_switches}", self.num_switches + 1
                self._join(name, _Node(pci, parent, kind))
                self._walk(pci, name, LinkKind.PCIE)
            elif not code:
                raise SpecError(
                    f"{self.where}: pci {pci.get('busid')} must say its class, without which GPUs cannot be told from "
                    "network cards: run NCCL with it and give what NCCL_TOPO_DUMP_FILE then holds"
                )

    def _join(self, name: str, node: _Node) -> None:
        rate = pcie_rate(_gigatransfers(node.element), _int(node.element, "link_width"))
        self.joins.append(Join(ends=(name, node.parent), kind=node.kind, bytes_per_second=rate))

    def _sort_gpus(self) -> None:
        """Put GPUs into the order of their numbers or, without them, of their bus ids, as CUDA does."""
        if not self.gpus:
            raise SpecError(f"{self.where}: must hold GPUs (<gpu>, or <pci> of class 0x0302), got none")
        numbered = [gpu.element.find("gpu") for gpu in self.gpus]
        if all(gpu is not None for gpu in numbered):
            order = {
                id(node): int(gpu.get("dev", "0"), 0)
                for node, gpu in zip(self.gpus, numbered, strict=True)
                if gpu is not None
            }
            self.gpus.sort(key=lambda node: order[id(node)])
        else:
            self.gpus.sort(key=lambda node: node.element.get("busid", ""))

    def _nvlinks(self) -> tuple[tuple[str, str, int], ...]:
        """Return NVLinks and xGMI links between GPUs, and to switches of them."""
        number_of = {gpu.element.get("busid", ""): number for number, gpu in enumerate(self.gpus)}
        counts: dict[tuple[str, str], int] = {}
        unknown = 0
        for number, gpu in enumerate(self.gpus):
            for link in _links(gpu.element):
                count, target = _int(link, "count"), link.get("target", "")
                if link.get("tclass", "").startswith(_NVSWITCH_CLASS):
                    ends = (f"device{number}", NVSWITCH)
                    counts[ends] = counts.get(ends, 0) + count
                elif target in number_of and number_of[target] != number:
                    a, b = sorted((number, number_of[target]))
                    counts[f"device{a}", f"device{b}"] = max(count, counts.get((f"device{a}", f"device{b}"), 0))
                else:
                    unknown += count
        if unknown:
            self.notes.append(
                f"{unknown} NVLinks lead to no other GPU of the file, as in some virtual machines: they are left out; "
                "give nvidia-smi topo -m beside it"
            )
        return tuple((a, b, count) for (a, b), count in counts.items())

    def _join_nics(self) -> tuple[tuple[float | None, ...], list[str | None]]:
        """Join the fastest network ports; return their line rates and what they say of GPUDirect."""
        ports = [(node, net) for node in self.nics for net in _nets(node.element)]
        speeds = [None if net is None or net.get("speed") is None else _int(net, "speed") for _, net in ports]
        fastest = max((speed for speed in speeds if speed is not None), default=None)
        kept = [(*port, speed) for port, speed in zip(ports, speeds, strict=True) if speed == fastest]
        if len(kept) < len(ports):
            slow = [
                net.get("name", "?")
                for (_, net), speed in zip(ports, speeds, strict=True)
                if net is not None and speed != fastest
            ]
            self.notes.append(f"left out, as NCCL does: network ports that are slower than others ({', '.join(slow)})")
        holders: dict[int, str] = {}
        for number, (node, _, _) in enumerate(kept):
            self._join_nic(number, node, holders)
        gigabits = tuple(None if speed is None else speed / 1000 for _, _, speed in kept)
        return gigabits, [None if net is None else net.get("gdr") for _, net, _ in kept]

    def _join_nic(self, number: int, node: _Node, holders: dict[int, str]) -> None:
        """Join a network port to where its card sits; the ports of a card share its slot."""
        if node.element.tag == "nic":  # of no PCI device
            rate = pcie_rate(0, 0)
            self.joins.append(Join(ends=(f"nic{number}", node.parent), kind=node.kind, bytes_per_second=rate))
            return
        if len(list(_nets(node.element))) == 1:
            self._join(f"nic{number}", node)
            return
        if id(node) not in holders:
            holders[id(node)], self.num_slots = f"slot{self.num_slots}", self.num_slots + 1
            self._join(holders[id(node)], node)
        self._join(f"nic{number}", _Node(node.element, holders[id(node)], LinkKind.PCIE))

    def _model(self) -> tuple[str | None, str | None]:
        """Return the kind of the GPUs, by device id or architecture, and a note where it is by architecture."""
        first = self.gpus[0].element
        for name, model in GPU_MODELS.items():
            if first.get("device") in model.pci_ids:
                return name, None
        gpu = first.find("gpu")
        architecture = 0 if gpu is None else _int(gpu, "gcn") or _int(gpu, "sm")
        return MODEL_OF_ARCHITECTURE.get(architecture), f"architecture {architecture}"

    def _gpu_direct(self, directs: list[str | None]) -> bool | None:
        gpus = [gpu.element.find("gpu") for gpu in self.gpus]
        said = [gpu.get("gdr") for gpu in gpus if gpu is not None] + directs
        if not directs or None in said or None in directs:
            return None
        return all(each == "1" for each in said)


def _nets(element: ElementTree.Element) -> Iterator[ElementTree.Element | None]:
    """Yield the ports of a network card; one without description where the file has none."""
    nets: list[ElementTree.Element | None] = list(element.iter("net"))
    yield from nets or [None]


def _links(pci: ElementTree.Element) -> Iterator[ElementTree.Element]:
    for name in ("nvlink", "xgmi"):
        yield from pci.iter(name)


def _gigatransfers(pci: ElementTree.Element) -> float:
    """Return the transfers a second of a link_speed such as "16 GT/s", "32.0 GT/s PCIe" or "" (0)."""
    match = _NUMBER.match(pci.get("link_speed", "").strip())
    return float(match[0]) if match else 0.0


def _int(element: ElementTree.Element, key: str) -> int:
    text = element.get(key, "0")
    return int(text, 0) if text else 0
