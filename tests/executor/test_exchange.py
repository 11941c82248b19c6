"""Exchanges among three ranks: which rows arrive, where their gradients go, what is marked."""

from collections.abc import Callable

import pytest
import torch

from simulator.specs.plan import Exchange
from simulator.specs.program import Phase, TaskKind
from tests.executor.exchange_ranks import DTYPES, NUM_RANKS, SCENARIOS, RankRows, Results, run_exchanges

RANKS = range(NUM_RANKS)
ROUNDING = {"fp32": 0.0, "bf16": 2**-7}


def every_scenario(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in each scenario and precision."""
    each_precision = pytest.mark.parametrize("precision", DTYPES)(test)
    marked: Callable[..., None] = pytest.mark.dist(pytest.mark.parametrize("scenario", SCENARIOS)(each_precision))
    return marked


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    return run_exchanges(tmp_path_factory.mktemp("exchange"))


def rows_after_halo(rank: RankRows) -> list[int]:
    """Return the nodes that a rank holds after a halo exchange."""
    return [*rank.nodes, *rank.halo]


def rows_after_all_gather(ranks: tuple[RankRows, ...]) -> list[int | None]:
    """Return the nodes of all ranks, each padded to the largest."""
    most = max(len(rank.nodes) for rank in ranks)
    return [node for rank in ranks for node in [*rank.nodes, *[None] * (most - len(rank.nodes))]]


def gradients_by_node(held: list[list[int | None]]) -> dict[int, float]:
    """Return the sum over ranks of the gradients 100 (r + 1) + p of each node, from the nodes that ranks hold."""
    sums: dict[int, float] = {}
    for rank, nodes in enumerate(held):
        for position, node in enumerate(nodes):
            if node is not None:
                sums[node] = sums.get(node, 0.0) + 100 * (rank + 1) + position
    return sums


@every_scenario
def test_a_halo_exchange_puts_the_rows_of_others_behind_the_own_ones(scenario, precision, results):
    for rank, rows in enumerate(SCENARIOS[scenario]):
        found = results[rank][scenario, Exchange.HALO, precision].rows
        assert found.dtype == DTYPES[precision]
        assert found.tolist() == [[node, 10 * node] for node in rows_after_halo(rows)]


@every_scenario
def test_an_all_gather_gives_every_rank_all_rows_and_zeros_behind_those_of_smaller_ranks(scenario, precision, results):
    expected = [[node or 0, 10 * (node or 0)] for node in rows_after_all_gather(SCENARIOS[scenario])]
    for rank in RANKS:
        assert results[rank][scenario, Exchange.ALL_GATHER, precision].rows.tolist() == expected


@every_scenario
def test_the_owner_of_a_row_gets_the_sum_of_the_gradients_of_all_who_hold_it(scenario, precision, results):
    ranks = SCENARIOS[scenario]
    held: dict[Exchange, list[list[int | None]]] = {
        Exchange.HALO: [[*rows_after_halo(rows)] for rows in ranks],
        Exchange.ALL_GATHER: [rows_after_all_gather(ranks)] * NUM_RANKS,
    }
    for exchange, nodes_by_rank in held.items():
        sums = gradients_by_node(nodes_by_rank)
        for rank, rows in enumerate(ranks):
            found = results[rank][scenario, exchange, precision].gradient
            expected = torch.tensor([[sums[node]] * 2 for node in rows.nodes]).view(-1, 2)
            torch.testing.assert_close(found.float(), expected, rtol=ROUNDING[precision], atol=0)


@pytest.mark.dist
def test_tasks_of_a_halo_exchange_count_rows_and_bytes(results):
    # Rank 1 has three rows of two columns; it sends rows 3 and 4 to rank 0, row 4 to rank 2, and gets one of rank 0.
    group = (0, 1, 2)
    assert results[1]["all ranks have rows", Exchange.HALO, "fp32"].tasks == [
        (TaskKind.HALO_PACK, Phase.FORWARD, (3, 3, 2), ()),
        (TaskKind.ALL_TO_ALL, Phase.FORWARD, (2 * 8, 0, 1 * 8), group),
        (TaskKind.ALL_TO_ALL, Phase.BACKWARD, (1 * 8, 0, 0), group),
        (TaskKind.HALO_PACK, Phase.BACKWARD, (0, 3, 2), ()),
    ]
    forward = results[1]["all ranks have rows", Exchange.HALO, "bf16"].tasks[1]
    assert forward == (TaskKind.ALL_TO_ALL, Phase.FORWARD, (2 * 4, 0, 1 * 4), group)


@pytest.mark.dist
def test_tasks_of_an_all_gather_count_rows_and_bytes(results):
    # The largest rank has three rows of two columns, 24 bytes; rank 2 has one row.
    group = (0, 1, 2)
    assert results[2]["all ranks have rows", Exchange.ALL_GATHER, "fp32"].tasks == [
        (TaskKind.PAD_ROWS, Phase.FORWARD, (1, 3, 2), ()),
        (TaskKind.ALL_GATHER, Phase.FORWARD, (24,), group),
        (TaskKind.REDUCE_SCATTER, Phase.BACKWARD, (3 * 24,), group),
        (TaskKind.PAD_ROWS, Phase.BACKWARD, (1, 3, 2), ()),
    ]
