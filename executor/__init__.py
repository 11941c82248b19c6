"""Runs plans with PyTorch; the only package that imports torch.

Importing it asks torch for huge pages on CPUs: a tensor above 2 MiB is then mapped in a few page faults.
Otherwise they are much of the time of an operation that writes a new large tensor.
"""

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch's CPU allocator once, at its first allocation
