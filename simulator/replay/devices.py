"""Devices that traces name, and the peaks by which a kernel's time is carried from one to another."""

import re
from collections.abc import Iterable

from simulator.errors import SpecError
from simulator.specs.cluster import BUILT_IN_CLUSTERS, ClusterSpec, DeviceSpec
from simulator.specs.machines import A100_40GB, RTX_2080_TI, V100

# Engineering names of the same devices, as drivers print them.
_ALIASES = {"NVIDIA A100-PG509-200": A100_40GB.name}


def known_devices() -> dict[str, DeviceSpec]:
    """Return the devices with known peaks, by name."""
    found = [A100_40GB, V100, RTX_2080_TI, *(cluster.device for cluster in BUILT_IN_CLUSTERS.values())]
    return {device.name: device for device in found}


def device_called(name: str) -> DeviceSpec | None:
    """Return the device of a name as a driver prints it, or as people shorten it ("H100", "A100-SXM4-80GB").

    A short name that fits several is the one with the most memory.
    """
    devices = known_devices()
    name = _ALIASES.get(name, name)
    if name in devices:
        return devices[name]
    wanted = _words(name)
    fitting = [device for device in devices.values() if wanted and wanted <= _words(device.name)]
    return max(fitting, key=lambda device: device.memory_bytes, default=None)


def require_device(name: str, *, what: str) -> DeviceSpec:
    """Return the device of a name.

    Raises:
        SpecError: if its peaks are not known.
    """
    found = device_called(name)
    if found is None:
        listed = ", ".join(known_devices())
        raise SpecError(f'{what} must be one of {listed}, got "{name}"; or name a cluster file, whose device is taken')
    return found


def cluster_of(device_name: str, clusters: Iterable[ClusterSpec]) -> ClusterSpec | None:
    """Return the first cluster of a device; None if there is none."""
    device = device_called(device_name)
    return next((cluster for cluster in clusters if device is not None and cluster.device.name == device.name), None)


def _words(name: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", name.lower()))
