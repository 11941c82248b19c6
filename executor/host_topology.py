"""The cluster that this host is, as its drivers and NCCL describe it."""

import os
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

from executor.environment import local_cluster, local_kind
from simulator.errors import RunError
from simulator.readers.topology_files import FoundCluster, cluster_from_files
from simulator.readers.topology_rates import GPU_MODELS
from simulator.specs.cluster import DeviceKind, DeviceSpec

NAME = "this-host"
_TIMEOUT_SECONDS = 60
_COMMANDS = {"topo.txt": ("topo", "-m"), "peers.txt": ("topo", "-p2p", "r")}


def cluster_from_host(*, num_hosts: int = 1) -> FoundCluster:
    """Return hosts like this one: devices by torch, links by nvidia-smi and, where it is there, NCCL's dump.

    `NCCL_TOPO_DUMP_FILE` names the dump. Without GPUs it is the cluster named "local", under another name.

    Raises:
        RunError: if nvidia-smi is missing or fails.
        SpecError: if what it prints, or the dump, cannot be read.
    """
    if local_kind() is DeviceKind.CPU:
        cluster = replace(local_cluster(DeviceKind.CPU), name=NAME, num_hosts=num_hosts)
        return FoundCluster(cluster=cluster, notes=("this machine has no GPU that torch can use: a rank a core",))
    return cluster_from_outputs(local_cluster(DeviceKind.CUDA).device, num_hosts=num_hosts)


def cluster_from_outputs(device: DeviceSpec, *, num_hosts: int = 1) -> FoundCluster:
    """Return hosts like this one, whose devices are known.

    Args:
        device: as torch reports it; its rates are replaced by those of its data sheet where that is known.
    """
    model = next((key for key, model in GPU_MODELS.items() if model.device.name == device.name), None)
    if model is not None:
        sheet = GPU_MODELS[model].device
        device = replace(sheet, memory_bytes=device.memory_bytes, cache_bytes=device.cache_bytes)
    with tempfile.TemporaryDirectory() as folder:
        paths = [_written(Path(folder) / name, arguments) for name, arguments in _COMMANDS.items()]
        dump = os.environ.get("NCCL_TOPO_DUMP_FILE")
        if dump and Path(dump).is_file():
            paths.append(Path(dump))
        found = cluster_from_files(paths, model=model, device=device, num_hosts=num_hosts)
    notes = tuple(note.replace(f"{folder}/", "nvidia-smi's ") for note in found.notes)
    return FoundCluster(cluster=replace(found.cluster, name=NAME), notes=notes)


def _written(path: Path, arguments: tuple[str, ...]) -> Path:
    """Write what nvidia-smi prints to a file, and return it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        raise RunError(
            "nvidia-smi must be on the PATH to tell this host's links, got none; install it, or use from-files"
        )
    command = [program, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise RunError(
            f"nvidia-smi {' '.join(arguments)} failed: {error}; use from-files with what it prints"
        ) from error
    path.write_text(done.stdout)
    return path
