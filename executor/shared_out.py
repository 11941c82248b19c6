"""Parameters shared out by `fully_shard`: whole while a layer is under way, else a share on each rank.

What `fully_shard` sends are named tasks: "parameters.layer0" gathers a layer, "gradients.layer0" sums its gradients and
leaves each rank its share; "rest" are input and head, which stay whole for the whole step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard

from executor.compat import all_gather_single, reduce_scatter_single
from executor.record import Recorder
from executor.shards import RankParameters
from simulator.gradients import LOSS_TASK
from simulator.sharding import REST, row_dim
from simulator.specs.plan import ParameterSharding
from simulator.specs.program import Phase, Stream, TaskKind
from simulator.specs.units import Dtype


def share_out(model: nn.Module, mesh: DeviceMesh, how: ParameterSharding, recorder: Recorder) -> None:
    """Share parameters out over the ranks of a mesh, a layer at a time.

    Args:
        mesh: the ranks over which gradients are summed, one axis.
    """
    name_of = {parameter: name for name, parameter in model.named_parameters()}

    def placement(parameter: nn.Parameter) -> Shard:
        return Shard(row_dim(name_of[parameter]))

    units = [(name, child) for name, child in model.named_children() if name.startswith("layer")]
    for name, unit in [*units, (REST, model)]:
        keeps = unit is model or how is ParameterSharding.ZERO2
        gather = _Gather(recorder=recorder, name=f"parameters.{name}")
        if not keeps:
            unit.register_forward_hook(gather.watch)  # before the hooks of `fully_shard`
        fully_shard(unit, mesh=mesh, reshard_after_forward=not keeps, shard_placement_fn=placement)
        assert isinstance(unit, FSDPModule)
        # A step's loss is over the rows of all ranks, so gradients are summed as they are.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_custom_all_gather(gather)  # type: ignore[arg-type]
        unit.set_custom_reduce_scatter(_Scatter(recorder=recorder, name=f"gradients.{name}"))  # type: ignore[arg-type]


def give_up_whole(model: nn.Module) -> None:
    """Keep of all parameters this rank's share alone, as the next step expects it."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@dataclass(kw_only=True)
class _Gather:
    """What `fully_shard` calls to gather a layer: first for memory, then for the collective.

    In the forward pass what was gathered is unpacked at once. Backward a layer is gathered while a later one is
    under way, and unpacked when its own begins.
    """

    recorder: Recorder
    name: str
    _unpacked_shape: tuple[int, int] = (0, 0)

    def watch(self, _: nn.Module, arguments: Any, output: Tensor) -> None:
        """Take note of a layer's output, whose gradient begins the layer's backward pass."""
        if output.requires_grad:
            output.register_hook(self._begin_backward)

    def _begin_backward(self, _: Tensor) -> None:
        self.recorder.open(f"{self.name}.unpack", TaskKind.SHARD_COPY, Phase.BACKWARD, self._unpacked_shape)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for all shares, into which the own one is copied next."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self.recorder.open(f"{self.name}.pack", TaskKind.SHARD_COPY, _phase(), (1, 0))
        return buffer

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Gather the shares of all ranks."""
        self.recorder.shaped((1, input_tensor.numel()))
        phase, ranks = _phase(), tuple(dist.get_process_group_ranks(group))
        with self.recorder.task(
            self.name, TaskKind.ALL_GATHER, phase, (input_tensor.nbytes,), ranks, Dtype.FLOAT32
        ) as mark:
            work: dist.Work | None = all_gather_single(output_tensor, input_tensor, group=group, async_op=async_op)
        if mark is not None:
            mark.stream = Stream.GRADIENTS
        self._unpacked_shape = len(ranks), input_tensor.numel()
        if phase is Phase.FORWARD:
            self.recorder.open(f"{self.name}.unpack", TaskKind.SHARD_COPY, phase, self._unpacked_shape)
        else:
            self.recorder.pause()
        return work


@dataclass(frozen=True, kw_only=True)
class _Scatter:
    """What `fully_shard` calls to sum a layer's gradients: for memory of both kinds, then for the collective."""

    recorder: Recorder
    name: str

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for gradients to send, which are copied there next, or for those that come."""
        buffer = torch.empty(*size, dtype=dtype, device=device)
        self.recorder.open(f"{self.name}.pack", TaskKind.SHARD_COPY, Phase.UPDATE, (1, 0), again=False)
        return buffer

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum gradients, each rank those of its share."""
        ranks = tuple(dist.get_process_group_ranks(group))
        self.recorder.shaped((len(ranks), output_tensor.numel()))
        with self.recorder.task(
            self.name, TaskKind.REDUCE_SCATTER, Phase.UPDATE, (input_tensor.nbytes,), ranks, Dtype.FLOAT32
        ) as mark:
            work: dist.Work | None = reduce_scatter_single(
                output_tensor, input_tensor, op=op, group=group, async_op=async_op
            )
        if mark is not None:
            mark.stream = Stream.GRADIENTS
        return work


def _phase() -> Phase:
    return Phase.FORWARD if torch._C._current_graph_task_id() == -1 else Phase.BACKWARD


class SharedOutGradients:
    """The gradients of parameters that are shared out, as `fully_shard` sums them, and the loss of all ranks.

    Args:
        model: whose parameters are shared out.
        parameters: the shares of this rank.
        group: ranks to sum over.
    """

    def __init__(
        self, model: nn.Module, parameters: RankParameters, recorder: Recorder, group: dist.ProcessGroup
    ) -> None:
        self._models, self._own = dict(model.named_parameters()), parameters.own
        self._recorder, self._group = recorder, group
        self._ranks = tuple(dist.get_process_group_ranks(group))
        self._loss: Tensor | None = None

    def begin(self, loss: Tensor) -> None:
        """Get ready for the backward pass of a loss, this rank's share."""
        self._loss = loss.detach().clone()

    def reduce(self) -> Tensor:
        """Sum the loss over the ranks; return it. Gradients were summed in the backward pass."""
        assert self._loss is not None, "begin was not called"
        loss, self._loss = self._loss, None
        name, shape = LOSS_TASK, (loss.nbytes,)
        with self._recorder.task(name, TaskKind.ALL_REDUCE, Phase.UPDATE, shape, self._ranks, Dtype.FLOAT32):
            dist.all_reduce(loss, group=self._group)
        for name, own in self._own.items():
            gradient = self._models[name].grad
            assert isinstance(gradient, DTensor), f"{name} has no gradient"
            with torch.no_grad():
                own.grad = gradient.to_local()
        return loss

    def zero(self) -> None:
        """Forget the gradients."""
        for name, own in self._own.items():
            self._models[name].grad = own.grad = None

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors that a later step depends on: none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from a state, of which there is none."""
        assert not state, state
