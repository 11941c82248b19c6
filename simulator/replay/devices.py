"""Devices that traces name, and the peaks by which a kernel's time is carried from one to another."""

import re
from collections.abc import Iterable

from simulator.errors import SpecError
from simulator.specs.cluster import BUILT_IN_CLUSTERS, ClusterSpec, DeviceKind, DeviceSpec
from simulator.specs.units import GB, GIB, MIB, TERA

# NVIDIA A100 data sheet (2021): 19.5 TFLOP/s fp32, 312 TFLOP/s bf16, 1,555 GB/s (40 GB); 40 MB of L2. V100 data sheet
# (2020): SXM2 32 GB, 900 GB/s, 15.7 TFLOP/s fp32, 125 TFLOP/s in tensor cores (fp16; it has no bf16); 6 MB of L2. RTX
# 2080 Ti: Turing architecture paper (2018), founders edition: 11 GB, 616 GB/s, 14.2 TFLOP/s fp32, 56.9 TFLOP/s in
# tensor cores with fp32 sums; 5.5 MB of L2.
_A100_40 = DeviceSpec(
    kind=DeviceKind.CUDA,
    name="NVIDIA A100-SXM4-40GB",
    memory_bytes=40 * GIB,
    memory_bandwidth_bytes_per_second=1555 * GB,
    fp32_flops_per_second=19.5 * TERA,
    bf16_flops_per_second=312 * TERA,
    cache_bytes=40 * MIB,
)
_V100 = DeviceSpec(
    kind=DeviceKind.CUDA,
    name="Tesla V100-SXM2-32GB",
    memory_bytes=32 * GIB,
    memory_bandwidth_bytes_per_second=900 * GB,
    fp32_flops_per_second=15.7 * TERA,
    bf16_flops_per_second=125 * TERA,
    cache_bytes=6 * MIB,
)
_RTX_2080_TI = DeviceSpec(
    kind=DeviceKind.CUDA,
    name="NVIDIA GeForce RTX 2080 Ti",
    memory_bytes=11 * GIB,
    memory_bandwidth_bytes_per_second=616 * GB,
    fp32_flops_per_second=14.2 * TERA,
    bf16_flops_per_second=56.9 * TERA,
    cache_bytes=5 * MIB,
)
# Engineering names of the same devices, as drivers print them.
_ALIASES = {"NVIDIA A100-PG509-200": _A100_40.name}


def known_devices() -> dict[str, DeviceSpec]:
    """Return the devices with known peaks, by name."""
    found = [_A100_40, _V100, _RTX_2080_TI, *(cluster.device for cluster in BUILT_IN_CLUSTERS.values())]
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
