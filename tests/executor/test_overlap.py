"""The merge of attention over two sets of edges, and the order in which an overlapped exchange runs."""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from executor.attention.edges import edge_attention, merge_attention
from executor.attention.graph import EdgeGraph
from executor.exchange import ExchangeLayout, RowExchange
from executor.overlap import await_exchange, boundary_queries, merge_last_rows, start_exchange
from executor.record import Recorder
from simulator.specs.plan import Exchange

NUM_ROWS, NUM_LAST, NUM_REMOTE, HEADS, HEAD_SIZE = 7, 4, 5, 2, 3


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def graph_of(degrees: list[int], num_sources: int) -> EdgeGraph:
    """Return a graph whose targets have so many edges from sources in turn."""
    indptr = torch.tensor([0, *degrees]).cumsum(0)
    source_E = torch.arange(int(indptr[-1]), dtype=torch.int32) % num_sources
    return EdgeGraph(indptr_N1=indptr, source_E=source_E, num_sources=num_sources)


# Rows without inner edges, without outer ones though they are among the last, and without any.
INNER, OUTER = graph_of([2, 0, 3, 1, 0, 2, 0], NUM_ROWS), graph_of([2, 1, 3, 0], NUM_REMOTE)


def both_parts(q: Tensor, own: Tensor, remote: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return attention over inner edges of all rows and over outer edges of the last ones."""
    inner = edge_attention(q, own[:, 0], own[:, 1], INNER, return_lse=True)
    outer = edge_attention(q[NUM_ROWS - NUM_LAST :], remote[:, 0], remote[:, 1], OUTER, return_lse=True)
    return inner, outer


def merged_by_the_library(q: Tensor, own: Tensor, remote: Tensor) -> Tensor:
    """Return the same by `merge_attention` over all rows, of which the first have no outer edges."""
    first = NUM_ROWS - NUM_LAST
    inner, (out, lse) = both_parts(q, own, remote)
    padded_out = torch.cat([out.new_zeros(first, HEADS, HEAD_SIZE), out])
    padded_lse = torch.cat([lse.new_full((first, HEADS), -torch.inf), lse])
    return merge_attention([inner, (padded_out, padded_lse)])[0]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_the_merge_of_the_last_rows_is_that_of_all_rows_forward_and_back(dtype, tolerance):
    found: list[Tensor] = []
    expected: list[Tensor] = []
    functions: list[tuple[list[Tensor], Callable[..., Tensor]]] = [
        (found, lambda q, own, remote: merge_last_rows(*both_parts(q, own, remote))),
        (expected, merged_by_the_library),
    ]
    for results, function in functions:
        inputs = [
            random(NUM_ROWS, HEADS, HEAD_SIZE, dtype=dtype, seed=1),
            random(NUM_ROWS, 2, HEADS, HEAD_SIZE, dtype=dtype, seed=2),
            random(NUM_REMOTE, 2, HEADS, HEAD_SIZE, dtype=dtype, seed=3),
        ]
        out = function(*inputs)
        out.backward(random(*out.shape, seed=4).detach().to(dtype))
        results += [out.detach(), *(x.grad for x in inputs if x.grad is not None)]
    assert len(found) == 4
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    # Case R14: a row without any edge gets zeros.
    assert torch.equal(found[0][NUM_ROWS - 1], torch.zeros(HEADS, HEAD_SIZE, dtype=dtype))


def test_the_gradients_of_boundary_queries_are_summed():
    q = random(5, 3)
    recorder = Recorder()
    all_rows, last = boundary_queries(q, 2, recorder, "layer0")
    (all_rows.sum() + 10 * last.sum()).backward()
    assert q.grad is not None
    assert q.grad.tolist() == [[1.0] * 3] * 3 + [[11.0] * 3] * 2


class FakeWork:
    """A collective that writes its result when it is waited for, not before."""

    def __init__(self, events: list[str], name: str, finish: Callable[[], None]) -> None:
        self._events, self._name, self._finish = events, name, finish

    def wait(self) -> None:
        self._events.append(f"waited for {self._name}")
        self._finish()

    def get_future(self) -> None:
        raise NotImplementedError("none")


def test_an_exchange_is_started_before_and_awaited_after_what_is_made_in_between_forward_and_back(monkeypatch):
    # Case R19. This rank's rows 0 and 2 come back to itself, as those of another would.
    events: list[str] = []

    def all_to_all(received, sent, *_: object, group=None, async_op=False):
        name = "forward" if not events else "backward"
        events.append(f"sent {name}")
        received.fill_(float("nan"))
        kept = sent  # alive until it is waited for
        assert async_op
        return FakeWork(events, name, lambda: received.copy_(kept))

    class Noted(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            events.append(name)
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            events.append(f"{ctx.name} back")
            return grad * 2, None

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    layout = ExchangeLayout(
        send_row_S=torch.tensor([0, 2]), rows_to=(2,), rows_from=(2,), max_rows=3, group=None, max_pair_rows=2
    )
    exchange = RowExchange(
        exchange=Exchange.HALO,
        layout=layout,
        recorder=Recorder(),
        layer="layer0",
        dtype=torch.float32,
        wire=torch.float32,
    )
    rows = torch.tensor([[1.0], [2.0], [3.0]], requires_grad=True)
    own, received, flight = start_exchange(rows, exchange)
    inner = Noted.apply(own, "inner")
    arrived = await_exchange(received, flight)
    outer = Noted.apply(arrived, "outer")
    (inner.sum() + (outer * torch.tensor([[10.0], [100.0]])).sum()).backward()
    assert arrived.tolist() == [[1.0], [3.0]]
    assert rows.grad is not None
    assert rows.grad.tolist() == [[2 + 20.0], [2.0], [2 + 200.0]]
    assert events == [
        "sent forward",
        "inner",
        "waited for forward",
        "outer",
        "outer back",
        "sent backward",
        "inner back",
        "waited for backward",
    ]
