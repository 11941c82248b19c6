"""Exchanges whose start and end are apart: what arrives where, in which number format, and what is noted."""

import pytest
import torch
from torch import Tensor

import executor.exchange
from executor.apart import ApartExchange
from executor.exchange import ExchangeLayout, RowExchange
from executor.record import Recorder
from simulator.specs.plan import Exchange

# Rank 1 of two, with two of at most three rows; two rows of each rank travel in a message.
LAYOUT = ExchangeLayout(
    send_row_S=torch.zeros(0, dtype=torch.int64),
    rows_to=(0, 0),
    rows_from=(0, 0),
    max_rows=3,
    group=None,
    rows_per_message=2,
    rows_by_rank=(3, 2),
)
OTHERS = torch.tensor([[1.0], [2.0], [3.0]]) / 3


class DoneWork:
    """A collective that is done, whose end nobody is told."""

    def wait(self) -> None:
        """Return at once."""

    def get_future(self) -> None:
        raise RuntimeError("none")


def apart(*, wire: torch.dtype = torch.float32, is_alone: bool = False) -> ApartExchange:
    exchange = RowExchange(
        exchange=Exchange.ALL_GATHER,
        layout=LAYOUT,
        recorder=Recorder(),
        layer="layer0",
        dtype=torch.float32,
        wire=wire,
    )
    return ApartExchange(exchange=exchange, inside=None, is_alone=is_alone, graph_rank=1)


@pytest.fixture
def gathered(monkeypatch) -> list[Tensor]:
    """Messages that were sent, beside which those of the other rank arrive."""
    sent: list[Tensor] = []

    def all_gather(output, message, *, group, async_op):
        assert async_op
        first = sum(map(len, sent))
        output.copy_(torch.cat([OTHERS[first : first + len(message)].to(message.dtype), message]))
        sent.append(message)
        return DoneWork()

    monkeypatch.setattr(executor.exchange, "all_gather_single", all_gather)
    return sent


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
def test_an_all_gather_brings_all_rows_and_own_ones_with_all_digits(gathered, wire):
    own = torch.tensor([[7.0], [8.0]]) / 7
    exchange = apart(wire=wire)
    rows, arrival = exchange.new_sources(own, 1, own=True)
    assert rows.shape == arrival.shape == (6, 1)
    exchange.finish(exchange.start(own, arrival, are_placed=False), own, arrival)
    others = OTHERS.to(wire).float()
    # Message by message, and rank by rank; the place of a third own row is zero.
    expected = [*others[:2].flatten(), *own.flatten(), *others[2:].flatten(), torch.tensor(0.0)]
    assert rows.flatten().tolist() == [float(value) for value in expected]
    assert [len(message) for message in gathered] == [2, 1]
    assert {message.dtype for message in gathered} == {wire}


def test_a_rank_alone_on_its_host_notes_the_exchange_that_the_others_have_there(gathered, monkeypatch):
    own = torch.ones(2, 1)
    monkeypatch.setattr(executor.exchange, "reduce_scatter_single", lambda *_, **__: DoneWork())
    reached = []
    for is_alone in (False, True):
        exchange = apart(is_alone=is_alone)
        _, arrival = exchange.new_sources(own, 1, own=True)
        gathered.clear()
        exchange.finish(exchange.start(own, arrival, are_placed=False), own, arrival)
        forward = exchange.recorder.position.num_reached
        exchange.finish_back(exchange.start_back(torch.ones(6, 1)), None, 2)
        reached.append((forward, exchange.recorder.position.num_reached - forward))
    assert [after - before for before, after in zip(*reached, strict=True)] == [1, 1]
