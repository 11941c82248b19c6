"""Kineto traces made by hand, in microseconds, to be replayed."""

import gzip
import json
from pathlib import Path
from typing import Any

MAIN, AUTOGRAD, DEVICE = 100, 200, 0


class MadeTrace:
    """A trace of one rank, written event by event; instants and durations in microseconds."""

    def __init__(self, rank: int | None = 0, num_ranks: int = 1, device: str = "NVIDIA H200") -> None:
        self.events: list[dict[str, Any]] = []
        self.header: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": device}]}
        if rank is not None:
            self.header["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": num_ranks}
        self._correlation = 0

    def event(self, category: str, name: str, tid: int, ts: float, dur: float, pid: int = 1, **args: Any) -> None:
        """Add a complete event."""
        self.events.append(
            {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, "args": args}
        )

    def step(self, number: int, ts: float, dur: float, tid: int = MAIN) -> None:
        """Add the range of a step."""
        self.event("user_annotation", f"ProfilerStep#{number}", tid, ts, dur)

    def operator(self, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> None:
        """Add an operator of the host."""
        self.event("cpu_op", name, tid, ts, dur, **args)

    def call(self, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> int:
        """Add a call that launches nothing; return its correlation."""
        self._correlation += 1
        self.event("cuda_runtime", name, tid, ts, dur, correlation=self._correlation, **args)
        return self._correlation

    def kernel(
        self,
        name: str,
        *,
        launch: float,
        ts: float,
        dur: float,
        stream: int = 7,
        tid: int = MAIN,
        category: str = "kernel",
        launch_dur: float = 5,
        launch_name: str = "cudaLaunchKernel",
        **args: Any,
    ) -> None:
        """Add a kernel and the call that launched it."""
        correlation = self.call(launch_name, launch, launch_dur, tid)
        self.event(
            category, name, stream, ts, dur, pid=DEVICE, device=0, stream=stream, correlation=correlation, **args
        )

    def collective(self, *, launch: float, ts: float, dur: float, num_elements: int = 1_000_000, size: int = 2) -> None:
        """Add an all-reduce of fp32 on a stream of its own."""
        self.kernel(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
            launch=launch,
            ts=ts,
            dur=dur,
            stream=20,
        )
        self.events[-1]["args"] |= {
            "Collective name": "allreduce",
            "In msg nelems": num_elements,
            "dtype": "Float",
            "Group size": size,
            "Process Group Name": "0",
            "Process Group Ranks": str(list(range(size))),
        }

    def document(self) -> dict[str, Any]:
        """Return the trace as its file holds it."""
        return {**self.header, "traceEvents": self.events}

    def write(self, path: Path) -> Path:
        """Write the trace, gzipped if its name says so."""
        text = json.dumps(self.document()).encode()
        path.write_bytes(gzip.compress(text) if path.name.endswith(".gz") else text)
        return path
