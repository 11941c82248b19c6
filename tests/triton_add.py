"""A Triton kernel that adds, for `tests.smoke_gpu`; the CPU build of torch lacks Triton."""

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _add(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask) + tl.load(y_ptr + offsets, mask), mask)


def triton_adds() -> bool:
    """Return whether the kernel compiles, runs and gives torch's sum."""
    x, y = torch.randn(1000, device="cuda"), torch.randn(1000, device="cuda")
    out = torch.empty_like(x)
    _add[(4,)](x, y, out, 1000, BLOCK=256)
    return torch.equal(out, x + y)
