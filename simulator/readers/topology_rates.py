"""What files of topologies do not say: rates of links and kinds of GPUs, each with its source."""

from dataclasses import dataclass, replace

from simulator.specs.device import DeviceKind, DeviceSpec
from simulator.specs.machines import A100, A100_PCIE, B200, H100, H200, L40S
from simulator.specs.units import GB, GIB, MIB, TERA

# NCCL's own rate of one NVLink, each way, by compute capability: src/graph/topo.h of NVIDIA/nccl 5067397.
NVLINK_BYTES_PER_SECOND = {60: 18 * GB, 70: 20 * GB, 80: 20 * GB, 86: 12 * GB, 90: 20.6 * GB, 100: 40.1 * GB}
# RCCL's of one xGMI link, by architecture: VEGA_XGMI_WIDTH and MI200_XGMI_WIDTH, src/graph/topo.h of ROCm/rccl.
XGMI_BYTES_PER_SECOND = {906: 24 * GB, 908: 24 * GB, 910: 36 * GB}
# NCCL's of a PCIe lane, by transfers a second (kvDictPciGen, src/graph/topo.cc): 12 GB/s for 16 lanes of 8 GT/s.
LANE_BYTES_PER_GIGATRANSFER = 12 * GB / 16 / 8
# An empty link_speed is 8 GT/s to NCCL, and a width of 0 is 16.
DEFAULT_GIGATRANSFERS, DEFAULT_LANES = 8.0, 16
# NCCL's between sockets: SKL, SRP and ERP for Intel's family 6, by model (85 Skylake, 143 and 207 Sapphire and Emerald
# Rapids); AMD; else BDW.
INTEL_SOCKET_BYTES_PER_SECOND: dict[int, float] = {85: 10 * GB, 143: 22 * GB, 207: 40 * GB}
AMD_SOCKET_BYTES_PER_SECOND = 16 * GB
OTHER_SOCKET_BYTES_PER_SECOND = 6.0 * GB
# NCCL's NET_BW: 12 GB/s for 100 Gb/s.
NET_BYTES_PER_GIGABIT = 12 * GB / 100
NCCL_SOURCE = "NCCL's table (src/graph/topo.h, NVIDIA/nccl 5067397)"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """A kind of GPU that files may mean.

    Attributes:
        architecture: compute capability times ten, or AMD's gfx number.
        nvlinks: of one device; 0 without.
        gigatransfers: of a lane of its PCIe.
        card_gigabits: of the network cards that hosts of its time have.
        pci_ids: device ids (pci-ids.ucw.cz).
        is_on_board: whether eight of them sit on a board with NVSwitch.
    """

    device: DeviceSpec
    architecture: int
    nvlinks: int
    gigatransfers: float
    card_gigabits: float
    pci_ids: tuple[str, ...] = ()
    is_on_board: bool = False

    @property
    def nvlink_bytes_per_second(self) -> float:
        """Rate of one NVLink or xGMI link, each way."""
        return (NVLINK_BYTES_PER_SECOND | XGMI_BYTES_PER_SECOND)[self.architecture]

    @property
    def pcie_bytes_per_second(self) -> float:
        """Rate of its slot."""
        return pcie_rate(self.gigatransfers, DEFAULT_LANES)


def pcie_rate(gigatransfers: float, lanes: int) -> float:
    """Return NCCL's rate of a PCIe link, in bytes per second."""
    return LANE_BYTES_PER_GIGATRANSFER * (gigatransfers or DEFAULT_GIGATRANSFERS) * (lanes or DEFAULT_LANES)


def socket_rate(vendor: str, family: int, model: int) -> float:
    """Return NCCL's rate between two sockets, in bytes per second."""
    if vendor == "AuthenticAMD":
        return AMD_SOCKET_BYTES_PER_SECOND
    known = INTEL_SOCKET_BYTES_PER_SECOND if vendor == "GenuineIntel" and family == 6 else {}
    return known.get(model, OTHER_SOCKET_BYTES_PER_SECOND)


def _gpu(name: str, memory: float, bandwidth: float, fp32: float, bf16: float, cache: float) -> DeviceSpec:
    return DeviceSpec(
        kind=DeviceKind.CUDA,
        name=name,
        memory_bytes=round(memory * GIB),
        memory_bandwidth_bytes_per_second=bandwidth * GB,
        fp32_flops_per_second=fp32 * TERA,
        bf16_flops_per_second=bf16 * TERA,
        cache_bytes=round(cache * MIB),
    )


# Data sheets of NVIDIA: P100 (2016), V100 (2020), A10G as of the A10 (2021; clocks of AWS's variant are not published),
# L4 (2023), H100 PCIe (2023), and of AMD: MI50 (2018), MI100 (2020), MI250 (2021), a half of which is a device. P100,
# V100 and MI50 have no units for bf16: as fp32.
GPU_MODELS = {
    "p100": GpuModel(
        device=_gpu("Tesla P100-SXM2-16GB", 16, 732, 10.6, 10.6, 4),
        architecture=60,
        nvlinks=4,
        gigatransfers=8,
        card_gigabits=100,
        pci_ids=("0x15f9",),
    ),
    "v100": GpuModel(
        device=_gpu("Tesla V100-SXM2-32GB", 32, 900, 15.7, 15.7, 6),
        architecture=70,
        nvlinks=6,
        gigatransfers=8,
        card_gigabits=100,
        pci_ids=("0x1db5", "0x1db1"),
    ),
    "a10g": GpuModel(
        device=_gpu("NVIDIA A10G", 24, 600, 31.2, 125, 6),
        architecture=86,
        nvlinks=0,
        gigatransfers=16,
        card_gigabits=100,
        pci_ids=("0x2237",),
    ),
    "a100-40": GpuModel(
        device=replace(
            A100,
            name="NVIDIA A100-SXM4-40GB",
            memory_bytes=40 * GIB,
            memory_bandwidth_bytes_per_second=1555 * GB,
        ),
        architecture=80,
        nvlinks=12,
        gigatransfers=16,
        card_gigabits=200,
        pci_ids=("0x20b0",),
        is_on_board=True,
    ),
    "a100": GpuModel(
        device=A100,
        architecture=80,
        nvlinks=12,
        gigatransfers=16,
        card_gigabits=200,
        pci_ids=("0x20b2",),
        is_on_board=True,
    ),
    "a100-pcie": GpuModel(
        device=A100_PCIE, architecture=80, nvlinks=12, gigatransfers=16, card_gigabits=200, pci_ids=("0x20b5",)
    ),
    "l4": GpuModel(
        device=_gpu("NVIDIA L4", 24, 300, 30.3, 121, 48),
        architecture=86,
        nvlinks=0,
        gigatransfers=16,
        card_gigabits=100,
        pci_ids=("0x27b8",),
    ),
    "l40s": GpuModel(device=L40S, architecture=86, nvlinks=0, gigatransfers=16, card_gigabits=200, pci_ids=("0x26b9",)),
    "h100": GpuModel(
        device=H100,
        architecture=90,
        nvlinks=18,
        gigatransfers=32,
        card_gigabits=400,
        pci_ids=("0x2330",),
        is_on_board=True,
    ),
    "h100-pcie": GpuModel(
        device=_gpu("NVIDIA H100 PCIe", 80, 2000, 51, 756, 50),
        architecture=90,
        nvlinks=12,
        gigatransfers=32,
        card_gigabits=400,
        pci_ids=("0x2331",),
    ),
    "h200": GpuModel(
        device=H200,
        architecture=90,
        nvlinks=18,
        gigatransfers=32,
        card_gigabits=400,
        pci_ids=("0x2335",),
        is_on_board=True,
    ),
    "b200": GpuModel(
        device=B200,
        architecture=100,
        nvlinks=18,
        gigatransfers=32,
        card_gigabits=400,
        pci_ids=("0x2901",),
        is_on_board=True,
    ),
    "mi50": GpuModel(
        device=_gpu("AMD Instinct MI50", 16, 1024, 13.3, 13.3, 4),
        architecture=906,
        nvlinks=2,
        gigatransfers=16,
        card_gigabits=100,
    ),
    "mi100": GpuModel(
        device=_gpu("AMD Instinct MI100", 32, 1229, 23.1, 92.3, 8),
        architecture=908,
        nvlinks=3,
        gigatransfers=16,
        card_gigabits=100,
    ),
    "mi250": GpuModel(
        device=_gpu("AMD Instinct MI250", 64, 1638, 45.3, 181, 8),
        architecture=910,
        nvlinks=8,
        gigatransfers=16,
        card_gigabits=200,
    ),
}
# What a file means that names an architecture, or the NVLinks between two devices, and nothing else.
MODEL_OF_ARCHITECTURE = {
    60: "p100",
    70: "v100",
    80: "a100",
    90: "h100",
    100: "b200",
    906: "mi50",
    908: "mi100",
    910: "mi250",
}
MODEL_OF_NVLINKS = {12: "a100", 18: "h100"}
