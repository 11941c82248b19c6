"""The benchmark of two ranks against one: what hides, the cut, and the figures, by hand."""

import dataclasses

import numpy as np
import pytest

from simulator.specs.program import Phase, Stream, TaskKind
from simulator.specs.trace import Span, Trace, TraceOrigin
from tests.bench.scaling import Found, Problem, exchange_seconds, figures_of, striped
from tests.executor.made_graphs import awkward_graph, spec_of


def span(kind: TaskKind, name: str, start: float, duration: float, *, rank: int = 0, waiting: float = 0.0) -> Span:
    is_collective = kind.is_collective
    return Span(
        rank=rank,
        step=0,
        stream=Stream.COMMUNICATION if is_collective else Stream.COMPUTE,
        name=name,
        kind=kind,
        phase=Phase.FORWARD,
        shape=(8, 8) if is_collective else (1, 1),
        start_seconds=start,
        duration_seconds=duration,
        waiting_seconds=waiting,
        group=(0, 1) if is_collective else (),
    )


def test_what_hides_is_the_exchange_beside_compute_of_the_same_rank_without_waiting():
    spans = (
        span(TaskKind.ALL_TO_ALL, "layer0.exchange", 1.0, 4.0, waiting=1.0),  # moves from 2 to 5
        span(TaskKind.GELU, "layer0.gelu", 0.0, 3.0),  # hides 2 to 3
        span(TaskKind.GELU, "layer1.gelu", 4.0, 9.0),  # hides 4 to 5
        span(TaskKind.GELU, "layer1.gelu", 0.0, 9.0, rank=1),
        span(TaskKind.ALL_REDUCE, "gradients.bucket0", 2.0, 1.0),  # no exchange of a layer
    )
    trace = Trace(
        origin=TraceOrigin.MEASURED,
        num_ranks=2,
        spans=spans,
        step_seconds=(13.0,),
        traced_step_seconds=(13.0,),
        peak_memory_bytes=(0, 0),
        environment=(),
    )
    assert exchange_seconds(trace) == pytest.approx((2.0, 3.0))


def test_stripes_are_runs_of_nodes_of_equal_weight(tmp_path):
    graph = awkward_graph()
    cut = striped(graph, 2, tmp_path, row_weight=10)
    part_N = np.load(tmp_path / cut.path)
    assert (np.diff(part_N) >= 0).all()
    weights = [part.num_edges + 10 * part.num_nodes for part in cut.parts]
    largest = int(np.diff(graph.indptr_N).max()) + 10
    assert abs(weights[0] - weights[1]) <= 2 * largest
    assert sum(part.num_edges for part in cut.parts) == graph.num_edges


def test_the_speed_up_is_of_the_fastest_plan_on_two_and_only_communities_must_hide(tmp_path):
    graph = awkward_graph()
    problem = Problem(name="g", folder=tmp_path, spec=spec_of(graph), graph=graph, has_communities=True)
    on_two = {
        "halo, overlapped": Found(seconds=0.6, last_loss=2.0, hidden_ratio=0.9, exchange_seconds=0.1),
        "heads": Found(seconds=0.5, last_loss=2.02, hidden_ratio=0.0, exchange_seconds=0.2),
    }
    found = {"one rank": Found(seconds=1.0, last_loss=2.0, hidden_ratio=0.0, exchange_seconds=0.0), **on_two}
    figures = {figure.name: figure for figure in figures_of(problem, 256, found)}
    assert figures["g, 256 wide: one rank over two, heads"].value == pytest.approx(2.0)
    assert figures["g, 256 wide: last losses differ by"].value == pytest.approx(0.01)
    hides = "g, 256 wide, halo, overlapped: share of the exchange that hides"
    assert figures[hides].bar == 0.8
    skewed = dataclasses.replace(problem, has_communities=False)
    assert {figure.name: figure for figure in figures_of(skewed, 256, found)}[hides].bar is None
