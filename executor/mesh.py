"""Plan to process groups: who this rank is, and with whom it talks."""

import datetime
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # exported at run time where built with gloo
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from executor.affinity import cores_of_rank, pinned
from executor.compat import set_timeout
from simulator.errors import RunError
from simulator.specs.cluster import DeviceKind
from simulator.specs.mesh import AXES, ROW_AXES, MeshShape
from simulator.specs.plan import Plan
from simulator.specs.program import Phase

# After which torch gives a collective up, where no heartbeat ends the ranks earlier, as in a calibration: its
# collectives take milliseconds, and a rank is late by what it measures alone.
COLLECTIVE_TIMEOUT_SECONDS = 300.0
# Before they meet, ranks read graphs and may compute eigenvectors; torch's own default.
MEETING_TIMEOUT_SECONDS = 1800.0


@dataclass(frozen=True, kw_only=True)
class Place:
    """This process in the mesh of a plan.

    Attributes:
        replica: position on the axis "dp".
        graph_rank: position on the axis "gp".
        graph_group: process group of the ranks that share a batch; None when that is this rank alone.
        world: process group of all ranks of the plan; None when that is this rank alone.
        cores: on which this rank runs; None where it may run on any.
        host_group: process group of the ranks of this host, for hierarchical exchanges; None where none was asked for.
        part_group: process group of the ranks that serve this rank's part with it; None when that is this rank alone.
        tensor_rank: position on the axis "tp".
        tensor_group: process group of the ranks with the same rows and other heads and columns; None when that is this
            rank alone.
        row_rank: which of the ranks with rows of their own this is, by replica and position on the axis "gp".
        gradient_group: process group of these ranks, over which gradients are summed; None when that is this rank
            alone.
        tensor_mesh: the axis "tp"; None when that is this rank alone.
        row_mesh: one axis of the ranks over which gradients are summed; None where nothing needs it.
        pipeline_rank: position on the axis "pp".
        pipeline_group: process group of the ranks that share the layers of a replica, for the same rows, heads and
            columns; None when that is this rank alone.
        channels: process groups of these same ranks for messages between stages, by phase, and whether they go to a
            rank behind or ahead: those of one way do not wait for those of another. Empty without stages.
        model_group: process group of the ranks that hold one whole model together; None when that is this rank alone.
    """

    rank: int
    num_ranks: int
    replica: int
    graph_rank: int
    graph_group: dist.ProcessGroup | None
    world: dist.ProcessGroup | None
    device: torch.device
    cores: Sequence[int] | None = None
    host_group: dist.ProcessGroup | None = None
    part_group: dist.ProcessGroup | None = None
    tensor_rank: int = 0
    tensor_group: dist.ProcessGroup | None = None
    row_rank: int = 0
    gradient_group: dist.ProcessGroup | None = None
    tensor_mesh: DeviceMesh | None = None
    row_mesh: DeviceMesh | None = None
    pipeline_rank: int = 0
    pipeline_group: dist.ProcessGroup | None = None
    channels: Mapping[tuple[Phase, bool], dist.ProcessGroup] = field(default_factory=dict)
    model_group: dist.ProcessGroup | None = None


def device_of(kind: DeviceKind, local_rank: int) -> torch.device:
    """Return the device of a process, made current.

    Raises:
        RunError: if this host has no such device.
    """
    if kind is DeviceKind.CPU:
        torch.set_num_threads(1)  # a device is one core
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise RunError(
            f"local rank {local_rank} needs a GPU, but this host has {torch.cuda.device_count()}: start fewer ranks a "
            "host or plan for this cluster"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def mesh_choices(plan: Plan) -> dict[str, Any]:
    """Return the arguments of `joined_mesh` that a plan decides."""
    return {
        "data_parallel_degree": plan.data_parallel_degree,
        "graph_parallel_degree": plan.graph_parallel_degree,
        "tensor_parallel_degree": plan.tensor_parallel_degree,
        "pipeline_parallel_degree": plan.pipeline_parallel_degree,
        "shards_parameters": plan.shares_out,
        "ranks_per_host": plan.ranks_per_host,
        "part_groups": plan.part_groups,
    }


@contextmanager
def joined_mesh(
    kind: DeviceKind,
    store: Store,
    *,
    rank: int,
    local_rank: int,
    data_parallel_degree: int = 1,
    graph_parallel_degree: int = 1,
    tensor_parallel_degree: int = 1,
    pipeline_parallel_degree: int = 1,
    shards_parameters: bool = False,
    timeout_seconds: float = COLLECTIVE_TIMEOUT_SECONDS,
    cpu_affinity: bool = True,
    ranks_per_host: int | None = None,
    backend: str | None = None,
    part_groups: Sequence[tuple[int, ...]] = (),
) -> Iterator[Place]:
    """Make the process groups of a mesh, and end them afterwards; several may follow in one process.

    Args:
        store: through which the ranks of the mesh meet.
        timeout_seconds: after which torch gives a collective up, without naming the rank that is missing.
        cpu_affinity: keep this rank to its share of the host's cores meanwhile.
        ranks_per_host: make a group of the ranks of each host too, rank r on host `r // ranks_per_host`; None for none.
        backend: of the process groups; None for that of the devices.
        shards_parameters: make the mesh over which parameters are shared out.
        part_groups: ranks that serve a part together; a group of each is made.
    """
    device = device_of(kind, local_rank)
    shape = MeshShape(
        dp=data_parallel_degree, pp=pipeline_parallel_degree, gp=graph_parallel_degree, tp=tensor_parallel_degree
    )
    num_ranks = shape.num_ranks
    num_local_ranks = min(num_ranks, int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks)))
    cores = cores_of_rank(device.type, local_rank, num_local_ranks) if cpu_affinity else None
    with pinned(cores):
        if num_ranks == 1:
            yield Place(
                rank=0,
                num_ranks=1,
                replica=0,
                graph_rank=0,
                graph_group=None,
                world=None,
                device=device,
                cores=cores,
            )
            return
        with _process_groups(backend or kind.backend, store, rank, num_ranks) as world:
            # An axis of one rank would have a group for each rank of the mesh, made one after another.
            axes = [axis for axis in AXES if shape.size((axis,)) > 1]
            sizes = tuple(shape.size((axis,)) for axis in axes)
            mesh, at = init_device_mesh(device.type, sizes, mesh_dim_names=tuple(axes)), shape.coordinates(rank)
            shares_model = shape.tp * shape.pp > 1
            row_mesh = _row_mesh(mesh, shape) if shares_model or shards_parameters else None
            gradient_group = world if not shares_model else None if row_mesh is None else row_mesh.get_group()
            pipeline_group = mesh.get_group("pp") if shape.pp > 1 else None
            channels = _channels(shape, rank)
            model_group = _model_group(mesh, shape, rank)
            host_group = _host_group(rank, num_ranks, ranks_per_host)
            part_group = _part_group(rank, part_groups)
            place = Place(
                rank=rank,
                num_ranks=num_ranks,
                replica=at.dp,
                graph_rank=at.gp,
                graph_group=_graph_group(mesh, shape, rank),
                world=world,
                device=device,
                cores=cores,
                host_group=host_group,
                part_group=part_group,
                tensor_rank=at.tp,
                tensor_group=mesh.get_group("tp") if shape.tp > 1 else None,
                row_rank=shape.place_in(ROW_AXES, rank),
                gradient_group=gradient_group,
                tensor_mesh=mesh["tp"] if shape.tp > 1 else None,
                row_mesh=row_mesh,
                pipeline_rank=at.pp,
                pipeline_group=pipeline_group,
                channels=channels,
                model_group=model_group,
            )
            own_groups = (place.graph_group, gradient_group, host_group, part_group, model_group, *channels.values())
            for group in (world, *mesh.get_all_groups(), *own_groups):
                if group is not None:
                    set_timeout(group, datetime.timedelta(seconds=timeout_seconds))
            yield place


def _row_mesh(mesh: DeviceMesh, shape: MeshShape) -> DeviceMesh | None:
    """Return the ranks over which gradients are summed, as one axis."""
    axes = [axis for axis in ROW_AXES if shape.size((axis,)) > 1]
    if not axes:
        return None
    return mesh[axes[0]] if len(axes) == 1 else mesh[tuple(axes)]._flatten("rows")


def _graph_group(mesh: DeviceMesh, shape: MeshShape, rank: int) -> dist.ProcessGroup | None:
    """Return the group of the ranks that share a batch; never the one of gradients, behind which it would wait."""
    if shape.gp == 1:
        return None
    if shape.gp < shape.size(ROW_AXES):
        return mesh.get_group("gp")
    return _new_group(shape, ("gp",), rank)


def _channels(shape: MeshShape, rank: int) -> dict[tuple[Phase, bool], dist.ProcessGroup]:
    """Return the groups for messages between stages.

    NCCL runs messages of a group between two ranks in the order of their calls, whichever way they go: in one group for
    all, both ranks might send first and wait for the other to receive.
    """
    if shape.pp == 1:
        return {}
    ways = [(phase, is_ahead) for phase in (Phase.FORWARD, Phase.BACKWARD) for is_ahead in (True, False)]
    return {way: _new_group(shape, ("pp",), rank) for way in ways}


def _model_group(mesh: DeviceMesh, shape: MeshShape, rank: int) -> dist.ProcessGroup | None:
    """Return the group of the ranks that hold one whole model together."""
    if shape.pp > 1 and shape.tp > 1:
        return _new_group(shape, ("pp", "tp"), rank)
    axis = "pp" if shape.pp > 1 else "tp"
    return mesh.get_group(axis) if shape.size((axis,)) > 1 else None


def _new_group(shape: MeshShape, axes: Collection[str], rank: int) -> dist.ProcessGroup:
    """Return a group of its own along some axes; every rank makes the groups of all."""
    members = sorted({shape.group(axes, other) for other in range(shape.num_ranks)})
    groups: list[dist.ProcessGroup] = [dist.new_group(list(ranks)) for ranks in members]
    return next(group for group, ranks in zip(groups, members, strict=True) if rank in ranks)


def _host_group(rank: int, num_ranks: int, ranks_per_host: int | None) -> dist.ProcessGroup | None:
    """Return the group of a rank's host; every rank makes the groups of all hosts."""
    if ranks_per_host is None:
        return None
    members = [range(num_ranks)[first : first + ranks_per_host] for first in range(0, num_ranks, ranks_per_host)]
    groups: list[dist.ProcessGroup] = [dist.new_group(list(ranks)) for ranks in members]
    return groups[rank // ranks_per_host]


def _part_group(rank: int, part_groups: Sequence[tuple[int, ...]]) -> dist.ProcessGroup | None:
    """Return the group of the ranks that serve a rank's part; every rank makes the groups of all parts."""
    groups: list[dist.ProcessGroup] = [dist.new_group(list(ranks)) for ranks in part_groups]
    return next((group for group, ranks in zip(groups, part_groups, strict=True) if rank in ranks), None)


@contextmanager
def _process_groups(backend: str, store: Store, rank: int, num_ranks: int) -> Iterator[dist.ProcessGroup]:
    """Make the process group of all ranks, and end all groups afterwards."""
    if _is_single_host():
        # gloo picks its interface by the host's name, which need not resolve on a machine without a network. On GPUs
        # checkpoints use it.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # A collective beside a kernel gets the next multiprocessors that are free, not those that are left at the end: an
    # exchange that was to overlap with attention began when it was over (traces/scaling_h200x2_202611).
    os.environ.setdefault("TORCH_NCCL_HIGH_PRIORITY", "1")
    # Without device_id: with it, DeviceMesh splits the world's communicator, a crash in torch 2.11 with NCCL 2.28.
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=num_ranks,
        timeout=datetime.timedelta(seconds=MEETING_TIMEOUT_SECONDS),
    )
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _is_single_host() -> bool:
    return os.environ.get("WORLD_SIZE") == os.environ.get("LOCAL_WORLD_SIZE")
