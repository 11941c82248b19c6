"""Conformance on real devices: `python -m tests.conformance cuda` runs every case that the host's GPUs can hold.

python -m tests.conformance cuda heads "halo, bf16, recomputed"     # these cases
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from simulator.specs.cluster import DeviceKind
from tests.conformance.cases import CASES, prepare, run_cases
from tests.conformance.check import check_conformance, check_named_time, lowered_as_seen


def main(kind: DeviceKind, names: Sequence[str]) -> int:
    """Print what ran otherwise than lowered; return the exit status."""
    num_devices = torch.cuda.device_count() if kind is DeviceKind.CUDA else 2
    failures = 0
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        cases = [prepared for prepared in prepare(folder, kind, names) if prepared.plan.num_ranks <= num_devices]
        for name, (prepared, steps) in run_cases(cases, folder).items():
            found = check_named_time(steps)
            for rank, (tasks, step) in enumerate(zip(lowered_as_seen(prepared, steps), steps, strict=True)):
                found += [f"rank {rank}: {sentence}" for sentence in check_conformance(tasks, step)]
            seconds = sum(step.named_seconds for step in steps), sum(step.busy_seconds for step in steps)
            print(f"{name:40} {len(steps[0].tasks):4} tasks, {100 * seconds[0] / seconds[1]:.1f} % of the time named")
            print(*(f"    {sentence}" for sentence in found), sep="\n", end="\n" * bool(found))
            failures += len(found)
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main(DeviceKind(sys.argv[1] if len(sys.argv) > 1 else "cuda"), sys.argv[2:] or tuple(CASES)))
