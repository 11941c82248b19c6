"""FoundHost: what files say of a host, whatever their format."""

from dataclasses import dataclass

from simulator.specs.topology import LinkKind

NVSWITCH = "nvswitch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A link of a host that is no NVLink.

    Attributes:
        bytes_per_second: None where the file does not say.
    """

    ends: tuple[str, str]
    kind: LinkKind
    bytes_per_second: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundHost:
    """What one file says.

    Attributes:
        joins: PCIe and sockets.
        nvlinks: two ends, `deviceN` or `nvswitch`, and the number of links between them.
        nic_gigabits: line rate of each network card; None where the file does not say.
        model: key of `GPU_MODELS`; None where the file does not say.
        model_note: from what that was concluded, where the file does not name the device.
        gpu_direct: None where the file does not say.
        notes: what a reader of the result should know, in sentences.
    """

    num_devices: int
    joins: tuple[Join, ...]
    nvlinks: tuple[tuple[str, str, int], ...]
    nic_gigabits: tuple[float | None, ...]
    model: str | None = None
    model_note: str | None = None
    gpu_direct: bool | None = None
    notes: tuple[str, ...] = ()
