"""What a log says of itself beside its numbers: operation, devices, ranks, hosts, cards."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulator.group_shape import GroupShape
from simulator.specs.communication import Algorithm, Operation, Protocol

OPERATIONS = {
    "all_reduce": Operation.ALL_REDUCE,
    "allreduce": Operation.ALL_REDUCE,
    "all_gather": Operation.ALL_GATHER,
    "allgather": Operation.ALL_GATHER,
    "reduce_scatter": Operation.REDUCE_SCATTER,
    "reducescatter": Operation.REDUCE_SCATTER,
    "alltoall": Operation.ALL_TO_ALL,
    "all_to_all": Operation.ALL_TO_ALL,
    "broadcast": Operation.BROADCAST,
    "sendrecv": Operation.SEND_RECEIVE,
    "send_recv": Operation.SEND_RECEIVE,
    "send_receive": Operation.SEND_RECEIVE,
}
DEVICES = ("A100", "H100", "H200", "B200")
# Hosts of published logs have eight devices; ranks of fewer use the cards nearest to them.
_DEVICES_OF_HOST = 8
_RANK_LINE = re.compile(r"#\s+Rank\s+\d+\s+(?:Group\s+\d+\s+)?Pid\s+\d+ on\s+(\S+) device\s+\d+ \[\S+\] (.+)$")
_PROGRAM = re.compile(r"(all_reduce|all_gather|reduce_scatter|alltoall|broadcast|sendrecv)_perf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meta:
    """Of a log; what is unknown is None, zero or empty.

    Attributes:
        cards_per_host: as stated, of the whole host.
        card_bytes_per_second: line rate of each.
        uncertain: keys whose values the log doubts.
    """

    operation: Operation | None = None
    device: str = ""
    num_ranks: int = 0
    num_hosts: int = 0
    cards_per_host: int = 0
    card_bytes_per_second: float = 0.0
    fabric: str = ""
    algorithm: Algorithm | None = None
    protocol: Protocol | None = None
    is_degraded: bool = False
    num_bytes: int = 0
    kind: str = ""
    source: str = ""
    environment: tuple[tuple[str, str], ...] = ()
    uncertain: tuple[str, ...] = ()

    @property
    def shape(self) -> GroupShape:
        """How the ranks lie."""
        return self.shape_of(self.num_ranks)

    def shape_of(self, num_ranks: int) -> GroupShape:
        """Return how so many ranks lie on the log's hosts."""
        hosts = max(self.num_hosts, 1)
        ranks_per_host = -(-num_ranks // hosts)
        stated = self.cards_per_host or _DEVICES_OF_HOST
        near = max(ranks_per_host, stated * ranks_per_host // _DEVICES_OF_HOST)
        return GroupShape(
            num_ranks=num_ranks,
            num_hosts=hosts,
            ranks_per_host=ranks_per_host,
            cards_per_host=min(stated, near) if hosts > 1 else 0,
        )


def meta_of(lines: Sequence[str]) -> Meta:
    """Return what the comments of a text log say: `# SOURCE`, `# META`, and nccl-tests' own lines."""
    meta = Meta()
    hosts: list[str] = []
    for line in lines:
        if line.startswith("# SOURCE:"):
            meta = replace(meta, source=line.removeprefix("# SOURCE:").strip())
        elif line.startswith("# META "):
            meta = _with_pairs(meta, line.removeprefix("# META "))
        elif found := _RANK_LINE.match(line):
            hosts.append(found[1])
            meta = replace(meta, device=device_of(found[2]))
        elif meta.operation is None and line.startswith("#") and (named := _PROGRAM.search(line)):
            meta = replace(meta, operation=OPERATIONS[named[1]])
    if hosts and not meta.num_ranks:
        meta = replace(meta, num_ranks=len(hosts), num_hosts=len(set(hosts)))
    return meta


def device_of(text: str) -> str:
    """Return the device that a name holds, else the name."""
    return next((device for device in DEVICES if device in text), text.strip())


def algorithm_of(text: str) -> Algorithm | None:
    """Return the algorithm that a text names; None for a library's own choice."""
    return next((found for found in Algorithm if found.value.lower() == text.lower().replace("_", "")), None)


def protocol_of(text: str) -> Protocol | None:
    """Return the protocol that a text names; None for a library's own choice."""
    return next((found for found in Protocol if found.value.lower() == text.lower()), None)


def _with_pairs(meta: Meta, text: str) -> Meta:
    pairs = dict(pair.split("=", 1) for pair in text.split() if "=" in pair)
    doubted = tuple(key for key, value in pairs.items() if re.search(r"\?|~|\.\.|unknown|_or_", value))
    environment = [(key, value) for key, value in pairs.items() if key in ("nccl", "dtype")]
    environment += [tuple(item.split("=", 1)) for item in pairs.get("env", "").split(",") if "=" in item]  # type: ignore[misc]
    return replace(
        meta,
        operation=OPERATIONS.get(pairs.get("op", "").lower(), meta.operation),
        device=device_of(pairs.get("gpu", meta.device)),
        num_ranks=_number(pairs.get("ngpus")) or meta.num_ranks,
        num_hosts=_number(pairs.get("nnodes")) or meta.num_hosts,
        cards_per_host=_number(pairs.get("nics_per_node")) or meta.cards_per_host,
        card_bytes_per_second=(_number(pairs.get("nic_gbps")) or 0) * 1e9 / 8,
        fabric=pairs.get("fabric", meta.fabric),
        algorithm=algorithm_of(pairs.get("algo", "")),
        protocol=protocol_of(pairs.get("proto", "")),
        is_degraded=pairs.get("quality") == "degraded",
        num_bytes=_number(pairs.get("size")) or 0,
        kind=pairs.get("kind", ""),
        environment=tuple(environment),
        uncertain=doubted,
    )


def _number(text: str | None) -> int | None:
    """Return the last number of a text, so that "64..96" is 96; None without any."""
    found = re.findall(r"\d+", text or "")
    return int(found[-1]) if found else None
