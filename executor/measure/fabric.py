"""Measures collectives inside hosts and between them, for `graphpilot calibrate --from nccl-tests:FILE`.

    torchrun --nnodes 2 --nproc-per-node 8 ... -m executor.measure.fabric --out fabric.json
    torchrun --nnodes 2 --nproc-per-node 8 ... -m executor.measure.fabric --out fabric.json --gpudirect off

Groups: 2, 4 ... and all ranks of the first host; one rank of each of 2, 4 ... hosts; all ranks of these hosts; and,
rail by rail, the ranks of all hosts with the same place in their host, whose cards are on one rail. Each size is
repeated and timed from the last arrival: the least over ranks, since a call's duration holds the wait for the slowest.
NCCL reads whether to use GPUDirect RDMA once a process, so that needs a second start, whose rows are added to those of
the first.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from executor.compat import all_gather_single, reduce_scatter_single
from executor.environment import device_name, environment, local_kind
from executor.launch import is_under_torchrun, run_as_rank
from executor.measure.cards import Cards, network_cards
from executor.measure.collectives import time_on_gpu
from executor.measure.computes import synchronize
from executor.mesh import Place, joined_mesh
from simulator.errors import RunError, SpecError
from simulator.fabric_check import GPUDIRECT_OFF, RAIL, UNEVEN, check_fabric, is_degraded
from simulator.group_shape import GroupShape, even_shape
from simulator.readers.collective_log import CollectiveLog, LogRow
from simulator.readers.log_meta import algorithm_of, device_of, protocol_of
from simulator.readers.nccl_tests import read_collective_log
from simulator.readers.own_logs import log_text
from simulator.specs.cluster import DeviceKind
from simulator.specs.communication import Operation
from simulator.specs.files import write_text_atomic
from simulator.specs.units import GIB, KIB, MIB

_OPERATIONS = tuple(Operation)
_RAIL_OPERATIONS = (Operation.ALL_REDUCE, Operation.SEND_RECEIVE)
_SIZES = {
    DeviceKind.CUDA: tuple(KIB * 4**power for power in range(11)),
    DeviceKind.CPU: tuple(KIB * 8**power for power in range(5)),
}
_QUICK_SIZES = {DeviceKind.CUDA: (16 * KIB, MIB, 64 * MIB, GIB), DeviceKind.CPU: (KIB, 64 * KIB)}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What to measure.

    Attributes:
        out: gets the log, on the first host.
        uses_gpudirect: False adds rows with GPUDirect RDMA off to the log at `out`.
    """

    out: Path
    kind: DeviceKind
    sizes: tuple[int, ...]
    repetitions: int
    uses_gpudirect: bool = True


@dataclass(frozen=True, kw_only=True)
class Group:
    """Ranks that are measured together.

    Attributes:
        variant: of a rail; empty otherwise.
    """

    ranks: tuple[int, ...]
    shape: GroupShape
    variant: str
    operations: tuple[Operation, ...]


def groups_of(num_hosts: int, ranks_per_host: int, cards_per_host: int) -> list[Group]:
    """Return the groups to measure, each once."""
    found: dict[tuple[tuple[int, ...], str], Group] = {}

    def add(ranks: Sequence[int], hosts: int, variant: str, operations: tuple[Operation, ...]) -> None:
        each = len(ranks) // hosts
        share = max(each, cards_per_host * each // ranks_per_host) if cards_per_host else each
        shape = even_shape(len(ranks), hosts, cards_per_host=min(share, cards_per_host or share))
        key = (tuple(ranks), variant)
        found.setdefault(key, Group(ranks=key[0], shape=shape, variant=variant, operations=operations))

    for count in _doublings(ranks_per_host):
        add(range(count), 1, "", _OPERATIONS)
    for hosts in _doublings(num_hosts):
        add(range(0, hosts * ranks_per_host, ranks_per_host), hosts, "", _OPERATIONS)
        add(range(hosts * ranks_per_host), hosts, "", _OPERATIONS)
    if num_hosts > 1 and ranks_per_host > 1:
        for rail in range(ranks_per_host):
            ranks = range(rail, num_hosts * ranks_per_host, ranks_per_host)
            add(ranks, num_hosts, f"{RAIL} {rail}", _RAIL_OPERATIONS)
    return list(found.values())


def _doublings(most: int) -> list[int]:
    """Return 2, 4 ... and `most`; nothing if that is 1."""
    return sorted(
        {2**power for power in range(1, most.bit_length()) if 2**power <= most} | ({most} if most > 1 else set())
    )


def measure(settings: Settings, store: Store, rank: int) -> None:
    """Measure as one rank of torchrun's; the first one writes the log."""
    num_ranks, per_host = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if num_ranks < 2 or num_ranks % per_host:
        raise RunError(f"hosts must have equally many ranks, at least two in all, got {num_ranks} of {per_host} a host")
    before = _before(settings) if rank == 0 else ()
    if not settings.uses_gpudirect:
        os.environ["NCCL_NET_GDR_LEVEL"] = "LOC"
    cards = network_cards()
    rows: list[LogRow] = []
    mesh = joined_mesh(
        settings.kind,
        store,
        rank=rank,
        local_rank=int(os.environ["LOCAL_RANK"]),
        graph_parallel_degree=num_ranks,
    )
    with mesh as place:
        for group in groups_of(num_ranks // per_host, per_host, cards.count):
            # Every rank makes every group, and waits for those that measure.
            process_group = dist.new_group(list(group.ranks))
            if rank in group.ranks:
                inside = replace(
                    place,
                    rank=group.ranks.index(rank),
                    num_ranks=len(group.ranks),
                    world=process_group,
                    graph_group=None,
                )
                rows.extend(_rows(settings, group, inside))
            dist.barrier(place.world)
        rows = _gathered(rows, place)
    if rank == 0:
        _write(settings, (*before, *rows), cards)


def _gathered(rows: list[LogRow], place: Place) -> list[LogRow]:
    """Return the rows of all groups on rank 0: each group's first rank has them."""
    found: list[list[LogRow] | None] = [None] * place.num_ranks
    dist.all_gather_object(found, rows, group=place.world)
    return [row for of_rank in found for row in of_rank or []]


def _rows(settings: Settings, group: Group, place: Place) -> Iterator[LogRow]:
    """Yield what the group's first rank has measured; nothing on others, which measure too."""
    variants = [""] if settings.uses_gpudirect else [GPUDIRECT_OFF]
    for operation in group.operations:
        has_uneven = operation is Operation.ALL_TO_ALL and len(group.ranks) > 2 and settings.uses_gpudirect
        for variant in [*variants, UNEVEN] if has_uneven else variants:
            for num_bytes in settings.sizes:
                call, size = _call(operation, num_bytes, place, is_uneven=variant == UNEVEN)
                seconds = sorted(_seconds(call, settings.repetitions, place))
                if place.rank == 0:
                    yield LogRow(
                        operation=operation,
                        shape=group.shape,
                        num_bytes=size,
                        seconds=statistics.median(seconds),
                        low_seconds=seconds[0],
                        high_seconds=seconds[-1],
                        algorithm=algorithm_of(os.environ.get("NCCL_ALGO", "")),
                        protocol=protocol_of(os.environ.get("NCCL_PROTO", "")),
                        variant=" ".join(filter(None, (group.variant, variant))),
                    )


def _call(operation: Operation, num_bytes: int, place: Place, *, is_uneven: bool) -> tuple[Callable[[], object], int]:
    """Return a call over a buffer of about `num_bytes`, and its bytes exactly."""
    p, group, rank = place.num_ranks, place.world, place.rank
    each = max(num_bytes // 4 // p, 1)
    whole = torch.zeros(each * p, device=place.device)
    size = 4 * each * p
    match operation:
        case Operation.ALL_REDUCE:
            return lambda: dist.all_reduce(whole, group=group), size
        case Operation.ALL_GATHER:
            own = whole.new_zeros(each)
            return lambda: all_gather_single(whole, own, group=group), size
        case Operation.REDUCE_SCATTER:
            own = whole.new_zeros(each)
            return lambda: reduce_scatter_single(own, whole, group=group), size
        case Operation.ALL_TO_ALL:
            splits = _splits(each, p, is_uneven=is_uneven)
            sent, received = splits[rank], [row[rank] for row in splits]
            given, got = whole.new_zeros(sum(sent)), whole.new_zeros(sum(received))
            busiest = max(*(sum(row) for row in splits), *(sum(column) for column in zip(*splits, strict=True)))
            # A rank's own share is left out of calls, and counted in the size.
            full = round(4 * busiest * p / (p - 1))
            return lambda: dist.all_to_all_single(got, given, received, sent, group=group), full
        case Operation.BROADCAST:
            root = dist.get_global_rank(group, 0) if group is not None else 0
            return lambda: dist.broadcast(whole, root, group=group), size
        case Operation.SEND_RECEIVE:
            return _shift(whole, place), size
    raise AssertionError(operation)


def _splits(each: int, num_ranks: int, *, is_uneven: bool) -> list[list[int]]:
    """Return [source][target] elements; uneven ones fall from twice the mean to nothing along the ring."""
    if not is_uneven:
        return [[0 if to == at else each for to in range(num_ranks)] for at in range(num_ranks)]
    steps = max(num_ranks - 2, 1)
    return [
        [0 if to == at else 2 * each * (num_ranks - 1 - (to - at) % num_ranks) // steps for to in range(num_ranks)]
        for at in range(num_ranks)
    ]


def _shift(sent: torch.Tensor, place: Place) -> Callable[[], object]:
    """Return a call in which each rank sends to the next one and receives from the one before."""
    assert place.world is not None
    received = torch.empty_like(sent)
    after = dist.get_global_rank(place.world, (place.rank + 1) % place.num_ranks)
    before = dist.get_global_rank(place.world, (place.rank - 1) % place.num_ranks)

    def call() -> None:
        operations = [
            dist.P2POp(dist.isend, sent, after, group=place.world),
            dist.P2POp(dist.irecv, received, before, group=place.world),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return call


def _seconds(call: Callable[[], object], repetitions: int, place: Place) -> list[float]:
    """Return the seconds of each repetition, the least over the group's ranks."""
    for _ in range(3):
        call()
    synchronize(place.device)
    if place.device.type == "cuda":
        return time_on_gpu(call, repetitions, place)[0]
    seconds = []
    for _ in range(repetitions):
        dist.barrier(place.world)
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    least = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(least, dist.ReduceOp.MIN, group=place.world)
    return least.clamp(min=1e-7).tolist()


def _write(settings: Settings, rows: Sequence[LogRow], cards: Cards) -> None:
    log = CollectiveLog(
        name=settings.out.name,
        source="python -m executor.measure.fabric",
        device=device_of(device_name(settings.kind)),
        cards_per_host=cards.count,
        card_bytes_per_second=cards.bytes_per_second,
        fabric=cards.fabric,
        is_degraded=False,
        environment=environment(settings.kind),
        cautions=(),
        rows=tuple(rows),
    )
    settings.out.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(settings.out, log_text(log))
    print(f"{len(rows)} rows written to {settings.out}")
    if settings.kind is DeviceKind.CUDA:
        findings = check_fabric(log)
        print(f"the fabric is {'degraded' if is_degraded(findings) else 'healthy'}")
        for finding in findings:
            print(f"  {finding.text}")


def _before(settings: Settings) -> tuple[LogRow, ...]:
    """Return the rows of a first start, to which those without GPUDirect are added."""
    if settings.uses_gpudirect:
        return ()
    if not settings.out.exists():
        raise SpecError(
            f"{settings.out}: must hold a log with GPUDirect on first; start without --gpudirect off before"
        )
    return tuple(row for row in read_collective_log(settings.out).rows if row.variant != GPUDIRECT_OFF)


def main() -> None:
    """Parse, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("fabric.json"), help="where the log goes")
    parser.add_argument("--gpudirect", choices=("on", "off"), default="on", help="off adds rows to the log")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions")
    arguments = parser.parse_args()
    if not is_under_torchrun():
        sys.exit("start it under torchrun: torchrun --nproc-per-node 8 -m executor.measure.fabric --out fabric.json")
    kind = local_kind()
    settings = Settings(
        out=arguments.out,
        kind=kind,
        sizes=(_QUICK_SIZES if arguments.quick else _SIZES)[kind],
        repetitions=9 if arguments.quick else 21,
        uses_gpudirect=arguments.gpudirect == "on",
    )
    run_as_rank(measure, settings)


if __name__ == "__main__":
    main()
