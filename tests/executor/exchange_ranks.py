"""Exchanges rows among three gloo ranks with layouts written by hand, and keeps what each rank got."""

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # not in __all__

from executor.exchange import ExchangeLayout, RowExchange, exchange_rows
from executor.launch import launch
from executor.mesh import Place, joined_mesh
from executor.record import Recorder
from simulator.specs.cluster import DeviceKind
from simulator.specs.plan import Exchange
from simulator.specs.program import Phase, TaskKind

NUM_RANKS = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EXCHANGES = (Exchange.HALO, Exchange.ALL_GATHER)


@dataclass(frozen=True, kw_only=True)
class RankRows:
    """One rank's side of a layout, by hand.

    Attributes:
        nodes: global ids of the own rows; a row is (id, 10 * id).
        halo: global ids of the rows that it needs, by owner.
        send_rows: positions of own rows to send, by receiver.
        rows_to, rows_from: of them, and of the halo, how many to and from each rank.
    """

    nodes: tuple[int, ...]
    halo: tuple[int, ...]
    send_rows: tuple[int, ...]
    rows_to: tuple[int, ...]
    rows_from: tuple[int, ...]


SCENARIOS: dict[str, tuple[RankRows, ...]] = {
    "all ranks have rows": (
        RankRows(nodes=(0, 1), halo=(3, 4, 5), send_rows=(0, 0), rows_to=(0, 1, 1), rows_from=(0, 2, 1)),
        RankRows(nodes=(2, 3, 4), halo=(0,), send_rows=(1, 2, 2), rows_to=(2, 0, 1), rows_from=(1, 0, 0)),
        RankRows(nodes=(5,), halo=(0, 4), send_rows=(0,), rows_to=(1, 0, 0), rows_from=(1, 1, 0)),
    ),
    "a rank has no rows": (
        RankRows(nodes=(0, 1), halo=(2,), send_rows=(0,), rows_to=(0, 0, 1), rows_from=(0, 0, 1)),
        RankRows(nodes=(), halo=(), send_rows=(), rows_to=(0, 0, 0), rows_from=(0, 0, 0)),
        RankRows(nodes=(2,), halo=(0,), send_rows=(0,), rows_to=(1, 0, 0), rows_from=(1, 0, 0)),
    ),
    "nothing travels": (
        RankRows(nodes=(0,), halo=(), send_rows=(), rows_to=(0, 0, 0), rows_from=(0, 0, 0)),
        RankRows(nodes=(1, 2), halo=(), send_rows=(), rows_to=(0, 0, 0), rows_from=(0, 0, 0)),
        RankRows(nodes=(3,), halo=(), send_rows=(), rows_to=(0, 0, 0), rows_from=(0, 0, 0)),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Exchanged:
    """What one rank got.

    Attributes:
        rows: result of the exchange.
        gradient: of the own rows, where row p of the result of rank r had a gradient of 100 (r + 1) + p.
        tasks: kind, phase, shape and group of each task that was marked.
    """

    rows: Tensor
    gradient: Tensor
    tasks: list[tuple[TaskKind, Phase, tuple[int, ...], tuple[int, ...]]]


Results = dict[tuple[str, Exchange, str], Exchanged]


def run_exchanges(folder: Path) -> list[Results]:
    """Return for each rank what it got in each scenario, under each exchange, in each precision."""
    launch(exchange_as_one_rank, folder, num_ranks=NUM_RANKS, folder=folder)
    return [pickle.loads((folder / f"rank{rank}.pickle").read_bytes()) for rank in range(NUM_RANKS)]


def exchange_as_one_rank(folder: Path, store: Store, rank: int) -> None:
    """Take part in every exchange as one rank of the launch."""
    with joined_mesh(DeviceKind.CPU, store, rank=rank, local_rank=rank, graph_parallel_degree=NUM_RANKS) as place:
        results = {
            (scenario, exchange, precision): _exchange(SCENARIOS[scenario], exchange, dtype, place)
            for scenario in SCENARIOS
            for exchange in EXCHANGES
            for precision, dtype in DTYPES.items()
        }
        dist.barrier(place.world)
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(results))


def _exchange(ranks: tuple[RankRows, ...], exchange: Exchange, dtype: torch.dtype, place: Place) -> Exchanged:
    mine = ranks[place.rank]
    layout = ExchangeLayout(
        send_row_S=torch.tensor(mine.send_rows, dtype=torch.int64),
        rows_to=mine.rows_to,
        rows_from=mine.rows_from,
        max_rows=max(len(rank.nodes) for rank in ranks),
        group=place.graph_group,
    )
    nodes = torch.tensor(mine.nodes, dtype=dtype).unsqueeze(1)
    own = torch.cat([nodes, 10 * nodes], dim=1).requires_grad_()
    recorder = Recorder()
    recorder.start()
    rows = exchange_rows(
        own,
        RowExchange(exchange=exchange, layout=layout, recorder=recorder, layer="layer0", dtype=dtype, wire=dtype),
    )
    weights = 100 * (place.rank + 1) + torch.arange(len(rows)).unsqueeze(1)
    (rows * weights.to(dtype)).sum().backward()
    assert own.grad is not None
    marks = [(mark.kind, mark.phase, mark.shape, mark.group) for mark in recorder.stop()]
    return Exchanged(rows=rows.detach(), gradient=own.grad, tasks=marks)
