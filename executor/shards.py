"""What this rank holds of each parameter, and how it fits into the whole.

`parallelize_module` splits heads and feed-forward columns over the axis "tp", `fully_shard` shares each layer out over
the ranks over which gradients are summed. Both leave DTensors in the model. A step works on the local tensors behind
them, by name: neither kernels of our own nor fused optimizers take DTensors of several meshes. Checkpoints hold
DTensors again, so that they are read on any number of ranks.
"""

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from simulator.sharding import row_dim, share_of, tensor_dim

_COLUMNS_AND_ROWS: dict[str, Callable[[], ParallelStyle]] = {
    "query_key_value": ColwiseParallel,
    "attention_output": RowwiseParallel,
    "feed_forward_up": ColwiseParallel,
    "feed_forward_down": RowwiseParallel,
}


def split_tensors(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split heads and feed-forward columns of all layers over the ranks of a mesh; no collective is called.

    Every rank holds the same whole model before. Rows of queries, keys and values are first put in an order in which
    those of a rank's heads follow one another: its queries, then its keys, then its values.
    """
    for name, layer in model.named_children():
        if not name.startswith("layer"):
            continue
        weight = layer.get_parameter("query_key_value.weight")
        with torch.no_grad():
            by_rank = weight.unflatten(0, (3, mesh.size(), -1)).transpose(0, 1)
            weight.copy_(by_rank.reshape(weight.shape).clone())
        styles = {module: style() for module, style in _COLUMNS_AND_ROWS.items()}
        parallelize_module(layer, mesh, styles, src_data_rank=None)
        if (table := dict(layer.named_parameters(recurse=False)).get("edge_bias")) is not None:
            split = distribute_tensor(table.detach(), mesh, [Shard(1)], src_data_rank=None)
            layer.register_parameter("edge_bias", nn.Parameter(split))


class RankParameters:
    """The parameters of a model as one rank holds them.

    Attributes:
        own: by name, leaves of autograd that share memory with the model's parameters; where these are no DTensors, the
            parameters themselves. Of shared-out parameters, this rank's share.
        shapes: by name, of the whole parameters, those of other stages too.

    Args:
        model: whose parameters were split and shared out, if they are to be; without those of other stages.
        shapes: as the attribute.
        tensor_mesh: the axis "tp"; None for one rank.
        row_mesh: the ranks among which parameters are shared out; None where they are not.
        pipeline_group: ranks that hold the other stages; None where there is one stage.
        rank_of: gives the place in that group of the rank that holds a parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        shapes: Mapping[str, tuple[int, ...]],
        tensor_mesh: DeviceMesh | None,
        row_mesh: DeviceMesh | None = None,
        pipeline_group: dist.ProcessGroup | None = None,
        rank_of: Callable[[str], int] = lambda _: 0,
    ) -> None:
        self.shapes = dict(shapes)
        self._tensor_mesh, self._row_mesh = tensor_mesh, row_mesh
        self._models = dict(model.named_parameters())
        self._pipeline_group, self._rank_of = pipeline_group, rank_of
        mine = [name for name in self.shapes if pipeline_group is None or rank_of(name) == pipeline_group.rank()]
        assert list(self._models) == mine, (list(self._models), mine)
        self.own = {name: _leaf(parameter) for name, parameter in self._models.items()}

    @property
    def tensor_degree(self) -> int:
        """Ranks that share heads and columns."""
        return 1 if self._tensor_mesh is None else self._tensor_mesh.size()

    def stored(self, name: str, tensor: Tensor) -> Tensor:
        """Return what a checkpoint holds of a parameter, or of a tensor of its form such as a moment; memory is shared.

        The rows of queries, of keys and of values have a dimension of their own there, so that any split of heads is a
        split of one dimension. What is no share of something is given as it is.
        """
        parameter, view = self._models[name], tensor
        if tensor.shape != self.own[name].shape:
            return tensor  # such as the optimizer's count of steps
        is_triple = _runs(name) > 1
        if is_triple:
            view = tensor.unflatten(0, (3, -1))
        if not isinstance(parameter, DTensor):
            return view
        placements = list(parameter.placements)
        if is_triple:
            placements = [Shard(place.dim + 1) if isinstance(place, Shard) else place for place in placements]
        shape = torch.Size((3, self.shapes[name][0] // 3, *self.shapes[name][1:]) if is_triple else self.shapes[name])
        return DTensor.from_local(
            view, parameter.device_mesh, placements, run_check=False, shape=shape, stride=_strides(shape)
        )

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole of what a rank has a share of; all ranks call it in one order."""
        dim, found, shape = tensor_dim(name), tensor, self.shapes[name]
        split = dim is not None and self._tensor_mesh is not None
        if self._row_mesh is not None:
            own = list(shape)
            if dim is not None:
                own[dim] //= self.tensor_degree
            found = _gathered(found, self._row_mesh, row_dim(name), tuple(own))
        if split:
            assert dim is not None
            assert self._tensor_mesh is not None
            runs = _runs(name)
            by_run = found.unflatten(dim, (runs, -1))
            whole = (*shape[:dim], runs, shape[dim] // runs, *shape[dim + 1 :])
            found = _gathered(by_run, self._tensor_mesh, dim + 1, whole).flatten(dim, dim + 1)
        return found

    def gathered(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return whole what ranks have of their parameters, by name, or of tensors like them; all ranks call it."""
        if self._pipeline_group is None:
            return {name: self.whole(name, tensors[name]) for name in self.shapes if name in tensors}
        # Ranks of a stage gather together, so each stage is done before any is told.
        mine = {name: self.whole(name, tensor) for name, tensor in tensors.items()}
        like, found = next(iter(tensors.values())), {}
        for name, shape in self.shapes.items():
            whole = (
                mine[name].contiguous() if name in mine else torch.empty(shape, dtype=like.dtype, device=like.device)
            )
            dist.broadcast(whole, group=self._pipeline_group, group_src=self._rank_of(name))
            found[name] = whole
        return found

    def share(self, name: str, whole: Tensor) -> Tensor:
        """Return this rank's share of a whole parameter."""
        found = whole
        if (dim := tensor_dim(name)) is not None and self._tensor_mesh is not None:
            pieces = found.unflatten(dim, (_runs(name), self.tensor_degree, -1))
            found = pieces.select(dim + 1, self._tensor_mesh.get_local_rank()).flatten(dim, dim + 1)
        if self._row_mesh is not None:
            dim, size, rank = row_dim(name), self._row_mesh.size(), self._row_mesh.get_local_rank()
            length = share_of(tuple(found.shape), dim, size, rank)[dim]
            first = min(rank * -(-found.shape[dim] // size), found.shape[dim])
            found = found.narrow(dim, first, length)
        return found

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Take over whole parameters by name; each rank takes its share."""
        for name, own in self.own.items():
            own.copy_(self.share(name, weights[name]))

    def is_split(self, name: str) -> bool:
        """Return whether ranks of the axis "tp" hold other numbers of a parameter."""
        return self._tensor_mesh is not None and tensor_dim(name) is not None


def _runs(name: str) -> int:
    """Return how many runs a rank has of the dimension that tensor parallelism splits: of queries, keys and values."""
    return 3 if name.endswith("query_key_value.weight") else 1


def _gathered(tensor: Tensor, mesh: DeviceMesh, dim: int, shape: tuple[int, ...]) -> Tensor:
    """Return the whole of what the ranks of a mesh have shares of."""
    size = torch.Size(shape)
    shares = DTensor.from_local(tensor, mesh, [Shard(dim)], run_check=False, shape=size, stride=_strides(size))
    return shares.full_tensor()


def _leaf(parameter: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return parameter
    with torch.no_grad():
        return nn.Parameter(parameter.to_local().detach())


def _strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
