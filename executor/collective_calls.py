"""Which collectives reach torch.distributed, whoever asks for them: our exchanges, DTensor, FSDP or pipelines."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode

from simulator.specs.program import MESSAGES, Task, TaskKind

# By names of operators in the namespaces of torch.distributed; what is not listed is told by its own name.
_KINDS = {
    "alltoall_base_": TaskKind.ALL_TO_ALL,
    "all_to_all_single": TaskKind.ALL_TO_ALL,
    "allreduce_": TaskKind.ALL_REDUCE,
    "all_reduce": TaskKind.ALL_REDUCE,
    "all_reduce_": TaskKind.ALL_REDUCE,
    "_allgather_base_": TaskKind.ALL_GATHER,
    "all_gather_into_tensor": TaskKind.ALL_GATHER,
    "all_gather_into_tensor_out": TaskKind.ALL_GATHER,
    "_reduce_scatter_base_": TaskKind.REDUCE_SCATTER,
    "reduce_scatter_tensor": TaskKind.REDUCE_SCATTER,
    "reduce_scatter_tensor_out": TaskKind.REDUCE_SCATTER,
    "send": TaskKind.SEND,
    "recv_": TaskKind.RECEIVE,
}
_NAMESPACES = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
_INPUTS = ("input", "inputs", "tensors", "input_tensor", "input_tensors", "tensor", "self")
_GROUPS = ("process_group", "group_name")
_NO_COLLECTIVE = ("barrier", "monitored_barrier_")  # they bring nothing


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """A call of a collective on this rank.

    Attributes:
        kind: a `TaskKind`, or the name of another operator.
        sends: bytes, of an all-to-all to each rank; of a message, also where it is received.
        receives: of an all-to-all, bytes from each rank; else empty.
        group: ranks, in order.
    """

    kind: str
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    group: tuple[int, ...]


class CollectiveCalls(TorchDispatchMode):
    """Notes the collectives that are called inside.

    Attributes:
        calls: in order.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[CollectiveCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Note a collective, and let everything run."""
        if func.namespace in _NAMESPACES:
            name, arguments = func._schema.name.partition("::")[2], _named(func, args, kwargs or {})
            if name not in _NO_COLLECTIVE and any(key in arguments for key in _GROUPS):
                self.calls.append(_call(name, arguments))
        return func(*args, **(kwargs or {}))


def _named(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _call(name: str, arguments: dict[str, Any]) -> CollectiveCall:
    group = _ranks(arguments)
    kind = _KINDS.get(name)
    if kind in MESSAGES:
        return _message(kind, arguments, group)
    given = next((arguments[key] for key in _INPUTS if key in arguments), None)
    tensors = [given] if isinstance(given, Tensor) else list(given or [])
    sends: tuple[int, ...] = (sum(tensor.nbytes for tensor in tensors),)
    receives: tuple[int, ...] = ()
    if kind is TaskKind.ALL_TO_ALL:
        sends = _split_bytes(tensors[0], arguments["input_split_sizes"], len(group))
        output = arguments.get("output", tensors[0])
        receives = _split_bytes(output, arguments["output_split_sizes"], len(group))
    return CollectiveCall(kind=str(kind or name), sends=sends, receives=receives, group=group)


def _message(kind: TaskKind, arguments: dict[str, Any], group: tuple[int, ...]) -> CollectiveCall:
    """Return the call of one end of a message; its group is then its source and its target."""
    me, peer = dist.get_rank(), group[arguments["dst" if kind is TaskKind.SEND else "src"]]
    ends = (me, peer) if kind is TaskKind.SEND else (peer, me)
    num_bytes = sum(tensor.nbytes for tensor in arguments["tensors"])
    return CollectiveCall(kind=str(kind), sends=(num_bytes,), receives=(), group=ends)


def _ranks(arguments: dict[str, Any]) -> tuple[int, ...]:
    """Return the ranks of the group of a call, which is an object or a name."""
    found: Any = next(arguments[key] for key in _GROUPS if key in arguments)
    if isinstance(found, str):
        found = distributed_c10d._resolve_process_group(found)  # type: ignore[attr-defined,arg-type]
    group = found if isinstance(found, dist.ProcessGroup) else dist.ProcessGroup.unbox(found)
    return tuple(dist.get_process_group_ranks(group))


def _split_bytes(tensor: Tensor, rows: Sequence[int], num_ranks: int) -> tuple[int, ...]:
    """Return the bytes of each rank's rows; no sizes stand for equal ones."""
    row_bytes = tensor.element_size() * math.prod(tensor.shape[1:])
    sizes = list(rows) or [len(tensor) // num_ranks] * num_ranks
    return tuple(int(count) * row_bytes for count in sizes)


def call_discrepancies(tasks: Sequence[Task], calls: Sequence[CollectiveCall]) -> list[str]:
    """Say where the collectives that a rank called are not those of its program, in order and size.

    Args:
        tasks: of the rank.
    """
    collectives = [task for task in tasks if task.kind.is_collective]
    found = []
    for index, (task, call) in enumerate(zip(collectives, calls, strict=False)):
        for what, lowered, called in (
            ("kind", task.kind.value, call.kind),
            ("group", task.group, call.group),
            ("bytes sent", task.shape, call.sends),
            ("bytes received", task.receives, call.receives),
        ):
            if lowered != called:
                found.append(f"{task.name}, collective {index + 1} of the step: {what} must be {lowered}, got {called}")
                break
    if len(collectives) != len(calls):
        found.append(f"{len(collectives)} collectives are lowered, but {len(calls)} were called")
    return found
