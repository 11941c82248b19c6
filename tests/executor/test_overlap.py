"""Attention that overlaps with an exchange, against attention over all edges, and the order in which it runs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import executor.overlap
from executor.apart import ApartExchange
from executor.attention.edges import edge_attention
from executor.attention.graph import EdgeGraph
from executor.exchange import ExchangeLayout, RowExchange
from executor.operations import side_by_side
from executor.overlap import Overlap, attend_overlapped
from executor.record import Recorder
from executor.topology import EdgeHalves
from simulator.specs.plan import Exchange

HEADS, WIDTH, NUM_BUCKETS = 2, 6, 3
# This rank's rows 0 and 2 come back to itself, as those of another would: they are rows 0 and 1 of what arrives.
SENT = (0, 2)
# Sources of each row's edges, among own rows and among those that arrive. The last two rows have edges of both sets, of
# one set, and row 2 has none; row 0 is no row with edges from others.
INNER, OUTER = [[0, 1, 1], [2], [], [0]], [[], [], [], [0, 1, 0]]


def graph_of(sources: list[list[int]], num_sources: int) -> EdgeGraph:
    """Return a graph with these sources of each target's edges."""
    indptr = torch.tensor([0, *map(len, sources)]).cumsum(0)
    source_E = torch.tensor([source for row in sources for source in row], dtype=torch.int32)
    return EdgeGraph(indptr_N1=indptr, source_E=source_E, num_sources=num_sources)


NUM_ROWS = len(INNER)
WHOLE = graph_of(
    [inner + [NUM_ROWS + source for source in outer] for inner, outer in zip(INNER, OUTER, strict=True)],
    NUM_ROWS + len(SENT),
)
BUCKETS = {
    "whole": torch.arange(WHOLE.num_edges) % NUM_BUCKETS,
    "inner": torch.tensor([0, 1, 2, 0, 1]),
    "outer": torch.tensor([2, 0, 1]),
}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def overlap_of(
    recorder: Recorder,
    *,
    sends_rows: bool = False,
    dtype: torch.dtype = torch.float32,
    rows_per_message: int | None = None,
) -> Overlap:
    layout = ExchangeLayout(
        send_row_S=torch.tensor(SENT),
        rows_to=(len(SENT),),
        rows_from=(len(SENT),),
        max_rows=NUM_ROWS,
        group=None,
        max_pair_rows=len(SENT),
        rows_per_message=rows_per_message,
    )
    return Overlap(
        exchange=ApartExchange(
            exchange=RowExchange(
                exchange=Exchange.HALO, layout=layout, recorder=recorder, layer="layer0", dtype=dtype, wire=dtype
            ),
            inside=None,
            is_alone=False,
            graph_rank=0,
        ),
        edges=WHOLE,
        bucket_E=BUCKETS["whole"],
        halves=EdgeHalves(
            inner=graph_of(INNER, NUM_ROWS),
            outer=graph_of(OUTER[-1:], len(SENT)),
            inner_bucket_E=BUCKETS["inner"],
            outer_bucket_E=BUCKETS["outer"],
        ),
        sends_rows=sends_rows,
        recorder=recorder,
        layer="layer0",
        num_heads=HEADS,
        keeps=True,
    )


class FakeWork:
    """A collective that writes its result when it is waited for, not before."""

    def __init__(self, events: list[str], name: str, finish: Callable[[], None]) -> None:
        self._events, self._name, self._finish = events, name, finish

    def wait(self) -> None:
        self._events.append(f"waited for {self._name}")
        self._finish()

    def get_future(self) -> None:
        raise NotImplementedError("none")


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """What runs, in order: messages, which arrive when they are waited for, and attention."""
    found: list[str] = []
    num_sent = 0

    def all_to_all(received, sent, *_: object, group=None, async_op=False):
        nonlocal num_sent
        name, num_sent = f"message {num_sent}", num_sent + 1
        found.append(f"sent {name}")
        received.fill_(float("nan"))
        kept = sent  # alive until it is waited for
        assert async_op
        return FakeWork(found, name, lambda: received.copy_(kept))

    def noted(name: str) -> Callable[..., Any]:
        function = getattr(executor.overlap, name)

        def call(*arguments: Any, **named: Any) -> Any:
            found.append(name)
            return function(*arguments, **named)

        return call

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all)
    for name in ("attend_part", "merge_into", "backward_sources", "backward_targets"):
        monkeypatch.setattr(executor.overlap, name, noted(name))
    return found


def over_all_edges(x_ND: Tensor, weight: Tensor, table_BH: Tensor | None) -> Tensor:
    """Return attention over all edges at once, where rows that arrive are copies."""
    q_ND, kv_N2D = F.linear(x_ND, weight.to(x_ND.dtype)).split([WIDTH, 2 * WIDTH], dim=1)
    kv_M2D = torch.cat([kv_N2D, kv_N2D[list(SENT)]])
    k_MHK, v_MHK = kv_M2D.unflatten(1, (2, HEADS, -1)).unbind(1)
    bias_EH = None if table_BH is None else table_BH[BUCKETS["whole"]]
    out_NHK: Tensor = edge_attention(q_ND.unflatten(1, (HEADS, -1)), k_MHK, v_MHK, WHOLE, edge_bias=bias_EH)
    return out_NHK.flatten(1)


def inputs_of(dtype: torch.dtype, *, has_bias: bool) -> list[Tensor | None]:
    table = random(NUM_BUCKETS, HEADS, seed=3) if has_bias else None
    # As layers are drawn, so that no softmax is so sharp that rounding alone makes gradients.
    weight = (random(3 * WIDTH, WIDTH, seed=2) * WIDTH**-0.5).detach().requires_grad_()
    return [random(NUM_ROWS, WIDTH, dtype=dtype, seed=1), weight, table]


def run_with_gradients(function: Callable[..., Tensor], inputs: list[Tensor | None], *rest: Any) -> list[Tensor]:
    """Return the output, and the gradient of each input, of one gradient of the output."""
    out = function(*inputs, *rest)
    out.backward(random(*out.shape, seed=4).detach().to(out.dtype))
    return [out.detach(), *(x.grad for x in inputs if x is not None and x.grad is not None)]


@pytest.mark.parametrize("sends_rows", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows_per_message", [None, 1])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-2)])
def test_overlapped_attention_is_that_over_all_edges_forward_and_back(
    events, sends_rows, has_bias, rows_per_message, dtype, tolerance
):
    # Case R19.
    overlap = overlap_of(Recorder(), sends_rows=sends_rows, dtype=dtype, rows_per_message=rows_per_message)
    found = run_with_gradients(attend_overlapped, inputs_of(dtype, has_bias=has_bias), overlap)
    expected = run_with_gradients(over_all_edges, inputs_of(dtype, has_bias=has_bias))
    assert len(found) == 3 + has_bias
    for one, other in zip(found, expected, strict=True):
        assert torch.isfinite(one).all()
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    # Case R14: a row without any edge gets zeros.
    assert torch.equal(found[0][2], torch.zeros(WIDTH, dtype=dtype))


@pytest.mark.parametrize("sends_rows", [False, True])
def test_attention_runs_between_the_start_of_an_exchange_and_its_end_forward_and_back(events, sends_rows):
    # Case R19.
    overlap = overlap_of(Recorder(), sends_rows=sends_rows)
    run_with_gradients(attend_overlapped, inputs_of(torch.float32, has_bias=True), overlap)
    assert events == [
        "sent message 0",
        "attend_part",
        "waited for message 0",
        "attend_part",
        "merge_into",
        "backward_sources",
        "sent message 1",
        "backward_targets",
        "waited for message 1",
    ]


@pytest.mark.parametrize("sends_rows", [False, True])
def test_an_attention_that_is_computed_again_gives_the_same_gradients(events, sends_rows):
    def again(*arguments: Any) -> Tensor:
        out: Tensor = checkpoint(
            attend_overlapped, *arguments, use_reentrant=False, preserve_rng_state=False, early_stop=False
        )
        return out

    once, twice = (
        run_with_gradients(each, inputs_of(torch.float32, has_bias=True), overlap_of(Recorder(), sends_rows=sends_rows))
        for each in (attend_overlapped, again)
    )
    assert len(once) == 4
    for one, other in zip(once, twice, strict=True):
        assert torch.equal(one, other)
    assert events.count("sent message 2") == 1
    # Once, then forward, forward again and back.
    assert sum(event.startswith("sent") for event in events) == 2 + 3


def test_without_a_backward_pass_no_bias_of_all_edges_is_looked_up(events):
    recorder = Recorder()
    overlap = dataclasses.replace(overlap_of(recorder), keeps=False)
    recorder.start()
    with torch.no_grad():
        attended: Callable[..., Tensor] = attend_overlapped
        attended(*inputs_of(torch.float32, has_bias=True), overlap)
    names = [mark.name for mark in recorder.stop()]
    assert [name for name in names if "bias" in name] == ["layer0.edge_bias_interior", "layer0.edge_bias_halo"]


def test_gradients_of_keys_and_values_that_lie_side_by_side_are_not_copied():
    both = torch.arange(2 * 2 * 2 * 3.0).view(2, 2, 2, 3)
    joined = side_by_side(both[:, 0], both[:, 1])
    assert joined.data_ptr() == both.data_ptr()
    apart = side_by_side(both[:, 0].contiguous(), both[:, 1].contiguous())
    assert apart.data_ptr() != both.data_ptr()
    assert torch.equal(joined, both.view(2, 12))
    assert torch.equal(apart, both.view(2, 12))
    # Values before keys lie otherwise, and of no rows there is nothing to see.
    assert torch.equal(side_by_side(both[:, 1], both[:, 0]), both.flip(1).reshape(2, 12))
    assert side_by_side(both[:0, 0], both[:0, 1]).shape == (0, 12)
