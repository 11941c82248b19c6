"""What differs between versions of torch, and what it says that is of no use to people who train."""

import contextlib
import datetime
import warnings
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed import distributed_c10d

# torch 2.13 renamed two collectives that 2.11 knows by their old names.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# torch's process group of one process that passes for any rank of any number of ranks, and brings nothing.
FAKE_BACKEND = "fake"


def set_timeout(group: dist.ProcessGroup, timeout: datetime.timedelta) -> None:
    """Set the time-out of a group's collectives; `ProcessGroup.set_timeout` came after 2.11."""
    if dist.get_backend(group) != FAKE_BACKEND:  # its collectives are over at once
        distributed_c10d._set_pg_timeout(timeout, group)


@contextlib.contextmanager
def making_sparse_csr() -> Iterator[None]:
    """Make CSR tensors inside without two warnings that torch gives once in a process.

    One says that CSR tensors are in beta: we use their product with a dense matrix alone, which the tests compare with
    the dense one. The other says that their invariants go unchecked: the matrices come from scipy or from a coalesced
    tensor, which hold them.
    """
    with warnings.catch_warnings():
        for message in (
            "Sparse CSR tensor support is in beta state",
            "Sparse invariant checks are implicitly disabled",
        ):
            warnings.filterwarnings("ignore", message=message, category=UserWarning)
        yield


def ignore_lone_process_warnings() -> None:
    """Keep torch from warning that a checkpoint is of one process alone, as it is where a rank trains or reads alone.

    The warning comes from a thread too, so a filter for a part of the code would not do.
    """
    message = "torch.distributed is disabled, unavailable or uninitialized"
    warnings.filterwarnings("ignore", message=message, category=UserWarning)
