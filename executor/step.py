"""A function that is launched as one CUDA graph, and all parameters of a model cast at once.

Starting an operation costs the host 6 to 50 us, inside a CUDA graph 1 us; a step has some hundred operations
(../shared/measured/h200_attention).
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Operations take these in fp32 whatever the precision of the run is: `operations.SPARSE_LINEAR` and `EDGE_BIAS`.
_NEVER_CAST = ("input.features", "edge_bias")


@dataclass(frozen=True, kw_only=True)
class Captured:
    """A captured function.

    Attributes:
        replay: runs what was captured.
        output: what each replay writes.
    """

    replay: Callable[[], None]
    output: Tensor


class Capturing(Protocol):
    """What captures functions."""

    def warm_up(self, function: Callable[[], Tensor]) -> Tensor:
        """Return what a function gives that runs as a capture would."""
        ...

    def capture(self, function: Callable[[], Tensor]) -> Captured:
        """Return a function captured; nothing of it runs."""
        ...


class CudaGraphs:
    """Captures functions as CUDA graphs that share memory, so no two of them may run at a time."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], Tensor]) -> Tensor:
        """Return what a function gives that runs on the stream of captures, in turn with the current one."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            output = function()
        current.wait_stream(self._stream)
        output.record_stream(current)
        return output

    def capture(self, function: Callable[[], Tensor]) -> Captured:
        """Return a function captured; nothing of it runs."""
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            output = function()
        return Captured(replay=graph.replay, output=output)


class CapturedFunction:
    """A function that runs as it is a few times, and from then on as a CUDA graph.

    It reads and writes tensors that stay where they are, makes no decision by their values, and gives one tensor. Its
    first calls compile kernels and fill caches, which must not happen in a capture. A capture runs nothing, so no call
    is lost or done twice. Where it fails the function goes on as it is, which is logged once.

    Args:
        name: what the log calls it.
        num_warm_ups: calls before the capture, at least one.
    """

    def __init__(self, name: str, function: Callable[[], Tensor], capturing: Capturing, *, num_warm_ups: int) -> None:
        assert num_warm_ups >= 1, num_warm_ups
        self._name, self._function, self._capturing = name, function, capturing
        self._warm_ups_left = num_warm_ups
        self._captured: Captured | None = None
        self._has_failed = False

    @property
    def is_captured(self) -> bool:
        """Whether calls replay a CUDA graph."""
        return self._captured is not None

    def __call__(self) -> Tensor:
        """Return what the function gives; later calls leave it alone."""
        if self._warm_ups_left > 0:
            self._warm_ups_left -= 1
            return self._capturing.warm_up(self._function)
        if self._captured is None and not self._has_failed:
            self._try_to_capture()
        if self._captured is None:
            return self._function()
        self._captured.replay()
        return self._captured.output.clone()

    def _try_to_capture(self) -> None:
        try:
            self._captured = self._capturing.capture(self._function)
        except RuntimeError as error:
            self._has_failed = True
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            logger.warning(
                "%s is launched task by task, since no CUDA graph could be made of it: %s", self._name, reason
            )


def cast_weights(parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the parameters of a model by name in the precision of a run, cast by one kernel.

    The backward pass writes the gradients over what `grad` of the parameters holds, by one kernel too, where casts at
    each use need two or three for each parameter. So it adds nothing up: one backward pass a step.
    """
    names = [name for name in parameters if not name.endswith(_NEVER_CAST)]
    if dtype == torch.float32:
        return dict(parameters)
    copies = _Cast.apply(dtype, *(parameters[name] for name in names))  # type: ignore[no-untyped-call]
    return {**parameters, **dict(zip(names, copies, strict=True))}


class _Cast(torch.autograd.Function):
    """Parameters in another format; their gradients are written into `grad`."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.gradients = [parameter.grad for parameter in parameters]
        # Each is allocated for itself, so that all begin at multiples of 512 bytes, as fast matrix products want.
        copies = [torch.empty_like(parameter, dtype=dtype) for parameter in parameters]
        torch._foreach_copy_(copies, list(parameters))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        pairs = [(kept, found) for kept, found in zip(ctx.gradients, gradients, strict=True) if found is not None]
        torch._foreach_copy_([kept for kept, _ in pairs], [found for _, found in pairs])
        return (None,) * (len(gradients) + 1)
