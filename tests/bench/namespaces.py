"""Two network namespaces as hosts on one machine, joined by a link of a limited rate."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29511
INTERFACE = "link0"


def missing_means() -> str:
    """Return what this machine lacks to make namespaces; empty if nothing."""
    tools = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if tools:
        return f"needs the commands {' and '.join(tools)}: install iproute2"
    return "" if os.geteuid() == 0 else "must run as root to make network namespaces"


@dataclass(kw_only=True)
class TwoHosts:
    """Two namespaces; what was started in them ends with them."""

    names: tuple[str, str]
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)

    def sent_bytes(self) -> tuple[int, int]:
        """Return the bytes that each host has sent over the link so far, with the headers of its packets."""
        return self._sent_by(0), self._sent_by(1)

    def torchrun(self, arguments: Sequence[str], *, ranks_per_host: int, num_threads: int, logs: Path) -> None:
        """Run a module under torchrun on both hosts, and return when it has ended.

        Args:
            arguments: the module, and what it gets.
            logs: gets what each host prints.
        """
        for host, name in enumerate(self.names):
            options = ["--nnodes", "2", "--node-rank", str(host), "--nproc-per-node", str(ranks_per_host)]
            meeting = ["--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
            command = [sys.executable, "-m", "torch.distributed.run", *options, *meeting, "-m", *arguments]
            with (logs / f"host{host}.txt").open("wb") as log:
                process = subprocess.Popen(
                    ["ip", "netns", "exec", name, *command],
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": str(num_threads)},
                    start_new_session=True,
                )
            self.processes.append(process)
        statuses = [process.wait() for process in self.processes]
        self.processes.clear()
        if statuses != [0, 0]:
            raise RuntimeError(f"a host ended with {statuses}: {(logs / 'host0.txt').read_text()[-2000:]}")

    def _sent_by(self, host: int) -> int:
        text = _run("ip", "netns", "exec", self.names[host], "cat", "/proc/net/dev")
        (line,) = (line for line in text.splitlines() if line.strip().startswith(f"{INTERFACE}:"))
        return int(line.split(":")[1].split()[8])


@contextlib.contextmanager
def two_hosts(*, bits_per_second: int) -> Iterator[TwoHosts]:
    """Make two hosts with a link of so many bits per second each way; whatever ends the block removes them."""
    names = (f"graphpilot{os.getpid()}-0", f"graphpilot{os.getpid()}-1")
    hosts = TwoHosts(names=names)
    handlers = {number: signal.signal(number, _end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        _make(names, bits_per_second)
        yield hosts
    finally:
        for process in hosts.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        for process in hosts.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
        for name in names:  # the link goes with them
            left = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
            for pid in left.stdout.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    """End as Ctrl-C does, so that namespaces are removed."""
    raise SystemExit(128 + number)


def _make(names: tuple[str, str], bits_per_second: int) -> None:
    for name in names:
        _run("ip", "netns", "add", name)
    inside = [("netns", name) for name in names]
    _run("ip", "link", "add", INTERFACE, *inside[0], "type", "veth", "peer", "name", INTERFACE, *inside[1])
    for name, address in zip(names, ADDRESSES, strict=True):
        enter = ("ip", "netns", "exec", name)
        _run(*enter, "ip", "addr", "add", f"{address}/24", "dev", INTERFACE)
        _run(*enter, "ip", "link", "set", INTERFACE, "up")
        _run(*enter, "ip", "link", "set", "lo", "up")
        # A token bucket: the rate, bursts of 10 ms, and room for what waits for its turn.
        burst = str(bits_per_second // 8 // 100)
        limit = ("rate", f"{bits_per_second}bit", "burst", burst, "latency", "100ms")
        _run(*enter, "tc", "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout
