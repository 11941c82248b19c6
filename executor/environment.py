"""What this machine and its software are: for calibrations, traces and the cluster named "local"."""

import datetime
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import scipy
import torch

from executor.affinity import cores_text
from simulator.errors import RunError
from simulator.specs.cluster import H200, NVLINK4, ClusterSpec, DeviceKind, DeviceSpec, LinkSpec
from simulator.specs.units import GB, GIGA, KIB, MICROSECOND

# Entries that may differ between a calibration and the run that it is used for.
_INFORMATIVE = frozenset({"date", "host", "cores"})


def environment(kind: DeviceKind, *, cores: Sequence[Sequence[int] | None] = ()) -> tuple[tuple[str, str], ...]:
    """Return what measured numbers depend on, as pairs: device, versions, date.

    Args:
        cores: to which each rank kept; None for any.
    """
    entries = {
        "device": device_name(kind),
        "device_kind": kind.value,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "host": platform.node(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    if cores:
        entries["cores"] = " | ".join("any" if found is None else cores_text(found) for found in cores)
    if kind is DeviceKind.CUDA:
        entries["cuda"] = str(torch.version.cuda)
        entries["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return tuple(sorted(entries.items()))


def environment_differences(calibrated: tuple[tuple[str, str], ...], here: tuple[tuple[str, str], ...]) -> list[str]:
    """Say in what a calibration's environment differs from this one, one sentence an entry."""
    there, now = dict(calibrated), dict(here)
    return [
        f"{name} was {there.get(name, 'absent')} and is {now.get(name, 'absent')}"
        for name in sorted(there.keys() | now.keys())
        if name not in _INFORMATIVE and there.get(name) != now.get(name)
    ]


def device_name(kind: DeviceKind) -> str:
    """Return the device's name as the system reports it."""
    if kind is DeviceKind.CUDA:
        return torch.cuda.get_device_name(0)
    for line in _read_lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def num_devices(kind: DeviceKind) -> int:
    """Return how many ranks this host can give a device each."""
    if kind is DeviceKind.CUDA:
        return torch.cuda.device_count()
    return (
        len(psutil.Process().cpu_affinity() or [0]) if hasattr(psutil.Process, "cpu_affinity") else psutil.cpu_count()
    )


def local_kind() -> DeviceKind:
    """Return GPUs where this host has them, else its cores."""
    return DeviceKind.CUDA if torch.cuda.is_available() else DeviceKind.CPU


def local_cluster(kind: DeviceKind | None = None) -> ClusterSpec:
    """Return the cluster named "local": this host, a rank a GPU or, without GPUs, a rank a core.

    Rates that no calibration has measured yet are round figures: for cores 32 fp32 flops a cycle at 2 GHz (two
    AVX2 multiply-adds), 10 GB/s of memory bandwidth and loopback at 1 GB/s; for GPUs those of the H200.
    """
    kind = local_kind() if kind is None else kind
    count = num_devices(kind)
    if count == 0:
        raise RunError(f"this host has no {kind} device")
    if kind is DeviceKind.CUDA:
        properties = torch.cuda.get_device_properties(0)
        device = DeviceSpec(
            kind=kind,
            name=device_name(kind),
            memory_bytes=properties.total_memory,
            memory_bandwidth_bytes_per_second=H200.memory_bandwidth_bytes_per_second,
            fp32_flops_per_second=H200.fp32_flops_per_second,
            bf16_flops_per_second=H200.bf16_flops_per_second,
            cache_bytes=properties.L2_cache_size,
        )
        link = NVLINK4
    else:
        device = DeviceSpec(
            kind=kind,
            name=device_name(kind),
            memory_bytes=psutil.virtual_memory().total // count,
            memory_bandwidth_bytes_per_second=10 * GB,
            fp32_flops_per_second=64 * GIGA,
            bf16_flops_per_second=64 * GIGA,
            cache_bytes=core_cache_bytes(),
        )
        link = LinkSpec(latency_seconds=100 * MICROSECOND, bandwidth_bytes_per_second=1 * GB)
    return ClusterSpec(
        name="local", num_hosts=1, devices_per_host=count, device=device, device_link=link, host_link=link
    )


def core_cache_bytes(cache: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return a core's share of the last cache before the memory; 0 where the system does not say."""
    shares = {0: 0}
    for index in cache.glob("index*"):
        level, kind, size, sharers = (_read_lines(index / name) for name in ("level", "type", "size", "shared_cpu_map"))
        if not (level and kind and size and sharers) or kind[0] == "Instruction":
            continue
        kilobytes = size[0].removesuffix("K")
        if kilobytes.isdecimal():
            num_cores = int(sharers[0].replace(",", ""), 16).bit_count()
            shares[int(level[0])] = int(kilobytes) * KIB // max(num_cores, 1)
    return shares[max(shares)]


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
