"""Starts of Triton kernels at little cost of host time.

Triton's own call looks at every argument again to find the compiled kernel. With 45 arguments that was most of the host
time of an attention on a machine with an H200 (traces/attention_h200x1_202611/notes.md, version 7).
"""

from collections.abc import Hashable
from typing import Any

from torch import Tensor

Compiled = dict[Hashable, Any]


def launch(
    compiled: Compiled,
    key: Hashable,
    kernel: Any,
    grid: tuple[int, int, int],
    arguments: tuple[Tensor | int | float, ...],
    constants: dict[str, Any],
    *,
    num_warps: int,
    num_stages: int = 3,
) -> None:
    """Start a kernel.

    Args:
        compiled: kernels that were started before, by key.
        key: tells apart all that Triton compiles for: the kernel, its device and constants, the arguments' formats,
            which tensors are aligned to 16 bytes, and the values of integers. `specialisation` makes that of arguments
            that vary.
        kernel: a function under `triton.jit`.
        arguments: those that are no constants, in order.
        constants: the others by name.
    """
    known = compiled.get((kernel, key))
    if known is not None:
        known[0][grid](*arguments, *known[1])
        return
    # The interpreter compiles nothing and returns nothing.
    found = kernel[grid](*arguments, **constants, num_warps=num_warps, num_stages=num_stages)
    if found is not None:
        compiled[kernel, key] = found, tuple(constants[name] for name in kernel.arg_names[len(arguments) :])


def specialisation(*tensors: Tensor | None) -> tuple[Hashable, ...]:
    """Return what Triton compiles for in tensors: device, formats, strides and alignment to 16 bytes."""
    return tuple(
        [None if x is None else (x.get_device(), x.dtype, x.stride(), x.data_ptr() % 16 == 0) for x in tensors]
    )
