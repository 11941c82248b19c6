"""Which cores a rank runs on: its share of its host's, on GPU hosts of those near its GPU."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import pynvml
import torch

_SYSTEM = Path("/sys/devices/system")
_MASK_BITS = 64


@contextlib.contextmanager
def pinned(cores: Sequence[int] | None) -> Iterator[None]:
    """Keep all threads of this process, and those that they start, to some cores; afterwards to those of before.

    torch then works in no more threads than there are cores: threads that wait for one another on too few of them cost
    whole slices of the scheduler's time (the likely cause of 7 to 22 ms for copies of 0.4 MB and more in
    traces/replay_h200x2_202611).

    Args:
        cores: None changes nothing.
    """
    before, num_threads = os.sched_getaffinity(0), torch.get_num_threads()
    if cores is not None and set(cores) != before:
        _set_affinity(cores)
        torch.set_num_threads(min(num_threads, len(cores)))
    try:
        yield
    finally:
        if cores is not None and set(cores) != before:
            _set_affinity(before)
            torch.set_num_threads(num_threads)


def cores_of_rank(device_type: str, local_rank: int, num_local_ranks: int) -> tuple[int, ...]:
    """Return the cores that a rank of this host may run on: its share, whole cores and one NUMA node where it can be.

    Args:
        device_type: "cuda" for a rank on the GPU of its local rank, "cpu" for one on a core.
        num_local_ranks: ranks of the plan on this host.
    """
    allowed = frozenset(os.sched_getaffinity(0))
    near = [allowed] * num_local_ranks
    if device_type == "cuda":
        near = [(cores_near_gpu(index) & allowed) or allowed for index in range(num_local_ranks)]
    return share_of_cores(near, local_rank, neighbourhood(allowed))


def share_of_cores(near: Sequence[frozenset[int]], rank: int, order: Sequence[int]) -> tuple[int, ...]:
    """Return a rank's share of its cores, which it divides with the ranks that have the same.

    Args:
        near: cores that suit each rank of the host. Where they are fewer than the ranks that they suit, nobody is kept
            from any of them.
        order: cores that share caches follow one another.
    """
    mine = [core for core in order if core in near[rank]]
    sharers = [other for other, cores in enumerate(near) if cores == near[rank]]
    if len(mine) < len(sharers):
        return tuple(sorted(mine))
    place, count = sharers.index(rank), len(sharers)
    return tuple(sorted(mine[place * len(mine) // count : (place + 1) * len(mine) // count]))


def neighbourhood(cores: frozenset[int], system: Path = _SYSTEM) -> list[int]:
    """Return cores by NUMA node, the threads of one core side by side; by number where the system does not say."""
    node_of = {core: node for node, members in enumerate(_numa_nodes(system)) for core in members}

    def key(core: int) -> tuple[int, int, int]:
        siblings = _core_list(system / f"cpu/cpu{core}/topology/thread_siblings_list")
        return node_of.get(core, 0), min(siblings, default=core), core

    return sorted(cores, key=key)


def cores_text(cores: Sequence[int]) -> str:
    """Return cores as the system writes them, such as "0-3,8"."""
    runs = [[core for _, core in run] for _, run in groupby(enumerate(sorted(cores)), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def cores_near_gpu(index: int) -> frozenset[int]:
    """Return the cores near a GPU of torch's numbering, by NVML, else by the PCI topology; none if neither says."""
    properties = torch.cuda.get_device_properties(index)
    return _by_nvml(f"GPU-{getattr(properties, 'uuid', '')}") or _by_pci(properties)


def _by_nvml(uuid: str) -> frozenset[int]:
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            masks = pynvml.nvmlDeviceGetCpuAffinity(handle, -(-(os.cpu_count() or 1) // _MASK_BITS))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return frozenset()
    return cores_of_masks(masks)


def cores_of_masks(masks: Sequence[int]) -> frozenset[int]:
    """Return the cores whose bits are set in words of 64 bits, as NVML gives them."""
    return frozenset(
        _MASK_BITS * word + bit for word, mask in enumerate(masks) for bit in range(_MASK_BITS) if mask >> bit & 1
    )


def _by_pci(properties: object) -> frozenset[int]:
    domain, bus, device = (getattr(properties, f"pci_{name}_id", -1) for name in ("domain", "bus", "device"))
    if min(domain, bus, device) < 0:
        return frozenset()
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    return frozenset(_core_list(Path(f"/sys/bus/pci/devices/{address}/local_cpulist")))


def _numa_nodes(system: Path) -> list[list[int]]:
    folders = sorted((system / "node").glob("node[0-9]*"), key=lambda folder: int(folder.name.removeprefix("node")))
    return [_core_list(folder / "cpulist") for folder in folders]


def _core_list(path: Path) -> list[int]:
    """Return the cores that a file of the system lists, such as "0-3,8"; none where it is absent."""
    try:
        text = path.read_text().strip()
    except OSError:
        return []
    cores: list[int] = []
    for run in filter(None, text.split(",")):
        first, _, last = run.partition("-")
        cores.extend(range(int(first), int(last or first) + 1))
    return cores


def _set_affinity(cores: Sequence[int] | set[int]) -> None:
    """Keep every thread of this process to some cores; a thread that has just ended is no fault."""
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread.name), cores)
