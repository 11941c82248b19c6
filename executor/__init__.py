"""Runs plans with PyTorch; the only package that imports torch.

Importing it asks torch for huge pages on CPUs: a tensor above 2 MiB is then mapped in a few page faults. In
attention over tolokers' million edges, 64 wide, that takes forward and backward from 1.8 s to 0.5 s on one core.
"""

import os

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # read by torch's CPU allocator once, at its first allocation
