"""Marks of a step against the program that the simulator lowers; kernels and waiting by hand."""

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from executor import record
from executor.mesh import Place
from executor.record import Mark, Recorder, StepTracer, kernel_times, spans_of_kernels, with_waiting
from executor.train import Inputs, Trainer
from simulator.readers.traces import read_recordings
from simulator.replay.run import rebuild, replay
from simulator.specs.cluster import BUILT_IN_CLUSTERS
from simulator.specs.model import EdgeBias, ModelSpec
from simulator.specs.plan import Plan, Recompute
from simulator.specs.program import Phase, Stream, TaskKind
from simulator.specs.trace import Span
from simulator.specs.train import TrainSpec
from simulator.specs.units import Dtype
from simulator.workload import lower
from tests.executor.made_graphs import GRAPHS, plan_of, spec_of, uneven_parts

PLACE = Place(rank=0, num_ranks=1, replica=0, graph_rank=0, graph_group=None, world=None, device=torch.device("cpu"))
PLAIN = ModelSpec(width=8, num_heads=2, num_layers=2, feed_forward_width=12)
FULL = ModelSpec(
    width=8,
    num_heads=2,
    num_layers=2,
    feed_forward_width=12,
    dropout_ratio=0.2,
    edge_bias=EdgeBias.DEGREE,
    laplacian_encodings=2,
)
KEEP, AGAIN = Recompute.NONE, Recompute.LAYER


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan of one rank on a graph."""

    graph_name: str
    model: ModelSpec
    recompute: tuple[Recompute, Recompute]
    num_parts: int = 1

    @property
    def plan(self) -> Plan:
        graph = GRAPHS[self.graph_name]()
        return plan_of(graph, uneven_parts(graph, self.num_parts), self.num_parts, recompute=self.recompute)

    def trainer(self) -> Trainer:
        graph = GRAPHS[self.graph_name]()
        shape = (graph.num_nodes, self.model.num_encodings)
        inputs = Inputs(
            graph=graph,
            part_N=uneven_parts(graph, self.num_parts),
            encodings=np.ones(shape, np.float32) if self.model.num_encodings else None,
        )
        train = TrainSpec(num_steps=5, learning_rate=0.01)
        return Trainer(self.plan, spec_of(graph), self.model, train, inputs, PLACE, Recorder())


CASES = {
    f"{graph_name}, {model_name}, {first} and {second}": Case(
        graph_name=graph_name, model=model, recompute=(first, second), num_parts=num_parts
    )
    for graph_name, num_parts, (model_name, model), (first, second) in [
        *itertools.product(
            ["awkward", "sparse"],
            [1],
            [("plain", PLAIN), ("full", FULL)],
            [(KEEP, KEEP), (AGAIN, AGAIN), (KEEP, AGAIN)],
        ),
        ("edgeless", 3, ("clusters", FULL), (AGAIN, KEEP)),
    ]
}


def marks_of_step(case: Case, *, step: int = 0) -> list[Mark]:
    trainer = case.trainer()
    trainer.recorder.start()
    trainer.step(step, trainer.batch(step))
    return trainer.recorder.stop()


@pytest.mark.parametrize("name", CASES)
def test_the_tasks_of_each_phase_are_those_of_the_program_in_its_order(name):
    case = CASES[name]
    marks = marks_of_step(case)
    graph = spec_of(GRAPHS[case.graph_name]())
    (tasks,) = lower(case.plan, graph, case.model, BUILT_IN_CLUSTERS["h200x8"]).tasks
    for phase in Phase:
        found = [(mark.name, mark.kind, mark.shape, mark.dtype) for mark in marks if mark.phase is phase]
        expected = [(task.name, task.kind, task.shape, task.dtype) for task in tasks if task.phase is phase]
        assert found == expected
    assert len({mark.name for mark in marks}) == len(marks)


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the recorder's clock advance by one at each look."""
    monkeypatch.setattr(record, "time", SimpleNamespace(perf_counter=itertools.count(1).__next__))


@pytest.mark.usefixtures("ticks")
@pytest.mark.parametrize("name", CASES)
def test_the_tasks_of_a_step_tile_it_and_do_not_overlap(name):
    marks = marks_of_step(CASES[name])
    for before, after in itertools.pairwise(marks):
        # One look at the clock begins a task. One more began the backward task that a recomputation put off.
        assert before.start_seconds < before.end_seconds < after.start_seconds <= before.end_seconds + 2


def test_a_layer_is_computed_again_before_most_of_its_backward_pass():
    names = [mark.name for mark in marks_of_step(CASES["awkward, plain, none and layer"])]
    again = [name for name in names if name.endswith(".recompute")]
    assert again[0] == "layer1.attention_norm.recompute"
    assert again[-1] == "layer1.feed_forward_residual.recompute"
    first = names.index(again[0])
    assert names[first : first + len(again)] == again
    assert names[first + len(again)] == "layer1.feed_forward_down.backward"
    assert not [name for name in names if name.startswith("layer0") and name.endswith(".recompute")]


def test_nothing_is_marked_before_the_start_and_after_the_stop():
    trainer = CASES["awkward, plain, none and none"].trainer()
    data = trainer.batch(0)
    trainer.step(0, data)
    trainer.recorder.start()
    loss = trainer.model.loss(trainer.model(data, trainer.settings), data)
    marks = trainer.recorder.stop()
    assert marks[-1].name == "loss"
    loss.backward()  # begun while recording, run while not
    trainer.step(1, data)
    assert marks[-1].name == "loss"


def test_each_start_forgets_the_marks_before_it():
    recorder = Recorder()
    for name in ("first", "second"):
        recorder.start("prefix.")
        with recorder.task(name, TaskKind.CLIP, Phase.UPDATE, (3, 1)):
            pass
        assert [mark.name for mark in recorder.stop()] == [f"prefix.{name}"]


def test_a_task_that_was_interrupted_goes_on_and_lasts_as_long_as_without_the_interruption(monkeypatch):
    instants = iter([0.0, 10.0, 11.0, 13.0, 14.0, 20.0])
    monkeypatch.setattr("executor.record.time.perf_counter", lambda: next(instants))
    recorder = Recorder()
    recorder.start()
    # The long one begins at 0, is interrupted from 10 to 14 by a task from 11 to 13, and ends at 20.
    with (
        recorder.task("long", TaskKind.GELU, Phase.FORWARD, (1, 1)),
        recorder.interrupting(),
        recorder.task("short", TaskKind.CLIP, Phase.UPDATE, (1, 1)),
    ):
        pass
    marks = {mark.name: (mark.start_seconds, mark.end_seconds) for mark in recorder.stop()}
    assert marks == {"short": (11.0, 13.0), "long": (0.0, 16.0)}


def test_recording_does_not_change_the_numbers():
    def losses(is_on: bool) -> list[float]:
        trainer = CASES["awkward, full, layer and layer"].trainer()
        found = []
        for step in range(3):
            if is_on:
                trainer.recorder.start()
            found.append(float(trainer.step(step, trainer.batch(step))))
            trainer.recorder.stop()
        return found

    assert losses(True) == losses(False)


def test_tasks_of_the_update_are_fp32_whatever_the_precision():
    recorder = Recorder(precision=Dtype.BFLOAT16)
    recorder.start()
    with recorder.task("x", TaskKind.GELU, Phase.FORWARD, (1, 1)):
        pass
    with recorder.task("clip", TaskKind.CLIP, Phase.UPDATE, (1, 1)):
        pass
    assert [mark.dtype for mark in recorder.stop()] == [Dtype.BFLOAT16, Dtype.FLOAT32]


def test_annotations_give_the_names_of_tasks_to_a_profiler():
    trainer = CASES["awkward, plain, none and layer"].trainer()
    trainer.recorder.annotate = True
    data = trainer.batch(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        trainer.recorder.start()
        trainer.step(0, data)
        marks = trainer.recorder.stop()
    ranges = [event["name"] for event in record.profiled_events(profiler) if event.get("cat") == "user_annotation"]
    assert {mark.name for mark in marks} <= set(ranges)


def test_a_tracer_makes_a_span_of_each_task_of_each_step():
    trainer = CASES["awkward, plain, none and none"].trainer()
    tracer = StepTracer(trainer.recorder, PLACE)
    for step in (3, 4):
        data = trainer.batch(step)
        with tracer.step(step):
            trainer.step(step, data)
    spans = tracer.spans()
    names = [[span.name for span in spans if span.step == step] for step in (3, 4)]
    assert names[0] == names[1]
    assert names[0][-2:] == ["clip", "optimizer"]
    assert {span.rank for span in spans} == {0}
    assert {span.stream for span in spans} == {Stream.COMPUTE}
    assert all(span.duration_seconds > 0 for span in spans)
    for before, after in itertools.pairwise(spans):
        assert before.end_seconds <= after.start_seconds + 1e-9


def test_the_profilers_file_of_a_step_is_kept_on_request_and_can_be_replayed(tmp_path):
    trainer = CASES["awkward, plain, none and none"].trainer()
    trainer.recorder.kineto, trainer.recorder.annotate = tmp_path, True
    tracer = StepTracer(trainer.recorder, PLACE)
    data = trainer.batch(5)
    with tracer.step(5):
        trainer.step(5, data)
    (recording,) = read_recordings([tmp_path / "step5"])
    ranges = {operator.name for operator in recording.operators if operator.is_annotation}
    assert {span.name for span in tracer.spans()} | {"ProfilerStep#5"} <= ranges
    run = rebuild([recording])
    assert run.num_steps == 1
    assert replay(run).step_seconds == pytest.approx(run.recorded_step_seconds)


# --- Kernels.


def annotation(name: str, start: float, end: float, *, thread: int = 1) -> dict[str, Any]:
    return {"cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "tid": thread}


def launch(correlation: int, instant: float, *, thread: int = 1, category: str = "cuda_runtime") -> dict[str, Any]:
    return {
        "cat": category,
        "name": "launch",
        "ts": instant,
        "dur": 1,
        "tid": thread,
        "args": {"correlation": correlation},
    }


def kernel(correlation: int, start: float, duration: float, *, category: str = "kernel") -> dict[str, Any]:
    return {"cat": category, "ts": start, "dur": duration, "tid": 7, "args": {"correlation": correlation}}


EVENTS = [
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    annotation("ProfilerStep#3", 0, 100),
    annotation("a", 10, 20),
    annotation("b", 20, 40),
    annotation("a", 50, 60),  # goes on after an interruption
    annotation("a.backward", 12, 30, thread=2),
    annotation("exchange", 60, 80),
    annotation("nccl:all_reduce", 65, 75),
    launch(1, 15),
    kernel(1, 1000, 7),
    launch(2, 25, category="cuda_driver"),
    kernel(2, 1100, 10),
    launch(3, 30),
    kernel(3, 1090, 2, category="gpu_memcpy"),
    launch(4, 55),
    kernel(4, 1200, 3),
    launch(5, 15, thread=2),
    kernel(5, 1010, 20),
    launch(6, 70),
    kernel(6, 1300, 50),
    launch(7, 45),  # in no task's range
    kernel(7, 1150, 4),
    kernel(99, 1160, 8, category="gpu_memset"),  # launched before the profile began
    {"cat": "cuda_runtime", "name": "cudaDeviceSynchronize", "ts": 16, "dur": 1, "tid": 1, "args": {}},
    {"cat": "gpu_user_annotation", "name": "b", "ts": 1000, "dur": 500, "tid": 7},
]


def test_kernels_belong_to_the_range_that_was_open_on_the_thread_that_launched_them():
    times, unnamed_seconds = kernel_times(EVENTS)
    expected = {
        "a": (1000e-6, 10e-6),
        "b": (1090e-6, 12e-6),
        "a.backward": (1010e-6, 20e-6),
        "exchange": (1300e-6, 50e-6),
    }
    found = {name: (time.start_seconds, time.busy_seconds) for name, time in times.items()}
    assert found.keys() == expected.keys()
    for name, pair in expected.items():
        assert found[name] == pytest.approx(pair), name
    assert unnamed_seconds == pytest.approx(12e-6)


def test_a_profile_without_kernels_has_no_times():
    assert kernel_times([]) == ({}, 0)
    assert kernel_times([annotation("a", 0, 1)]) == ({}, 0)


def mark(name: str, host_seconds: float, kind: TaskKind = TaskKind.GELU) -> Mark:
    return Mark(
        name=name,
        kind=kind,
        phase=Phase.FORWARD,
        shape=(1, 2),
        dtype=Dtype.BFLOAT16,
        start_seconds=5.0,
        end_seconds=5.0 + host_seconds,
    )


def test_a_span_has_the_time_of_its_kernels_and_of_its_host_thread():
    a, exchange, missing = spans_of_kernels(
        EVENTS, [mark("a", 0.25), mark("exchange", 0.5, TaskKind.ALL_TO_ALL), mark("empty", 0.125)], step=3, rank=2
    )
    assert (a.start_seconds, a.duration_seconds) == pytest.approx((1000e-6, 10e-6))
    assert (a.host_seconds, a.step, a.rank, a.stream) == (0.25, 3, 2, Stream.COMPUTE)
    assert (a.shape, a.dtype) == ((1, 2), Dtype.BFLOAT16)
    assert (exchange.stream, exchange.host_seconds) == (Stream.COMMUNICATION, 0.5)
    # A task without kernels takes no time, after what came before it.
    assert missing.start_seconds == pytest.approx(exchange.end_seconds)
    assert (missing.duration_seconds, missing.host_seconds) == (0.0, 0.125)


# --- Waiting.


def span_maker(name: str, kind: TaskKind, group: tuple[int, ...]) -> Callable[..., Span]:
    def make(*, rank: int, start: float, duration: float, step: int = 0) -> Span:
        return Span(
            rank=rank,
            step=step,
            stream=Stream.COMMUNICATION if group else Stream.COMPUTE,
            name=name,
            kind=kind,
            phase=Phase.FORWARD,
            shape=(),
            start_seconds=start,
            duration_seconds=duration,
            group=group,
        )

    return make


compute = span_maker("compute", TaskKind.GELU, ())
reduce = span_maker("reduce", TaskKind.ALL_REDUCE, (0, 1))
exchange_01 = span_maker("exchange", TaskKind.ALL_TO_ALL, (0, 1))
exchange_23 = span_maker("exchange", TaskKind.ALL_TO_ALL, (2, 3))


def rounded(spans: tuple[Span, ...]) -> list[tuple[int, int, str, float, float, float]]:
    return [
        (s.step, s.rank, s.name, round(s.start_seconds, 9), round(s.duration_seconds, 9), round(s.waiting_seconds, 9))
        for s in spans
    ]


def test_a_rank_waits_from_its_own_arrival_to_the_last_ones():
    # Rank 0 comes at 12 and rank 1 at 15; both leave at 16. Steps begin at 10.
    spans = with_waiting(
        [
            reduce(rank=1, start=15.0, duration=1.0),
            compute(rank=1, start=10.5, duration=4.5),
            compute(rank=0, start=10.0, duration=2.0),
            reduce(rank=0, start=12.0, duration=4.0),
        ]
    )
    assert rounded(spans) == [
        (0, 0, "compute", 0.0, 2.0, 0.0),
        (0, 0, "reduce", 2.0, 4.0, 3.0),
        (0, 1, "compute", 0.5, 4.5, 0.0),
        (0, 1, "reduce", 5.0, 1.0, 0.0),
    ]
    assert [span.busy_seconds for span in spans if span.group] == [1.0, 1.0]


def test_groups_wait_for_their_own_members_alone():
    spans = with_waiting(
        [
            exchange_01(rank=0, start=1.0, duration=1.0),
            exchange_01(rank=1, start=1.5, duration=0.5),
            exchange_23(rank=2, start=1.0, duration=8.0),
            exchange_23(rank=3, start=7.0, duration=2.0),
        ]
    )
    assert [span.waiting_seconds for span in spans] == [0.5, 0.0, 6.0, 0.0]


def test_every_step_has_its_own_beginning_and_waits():
    spans = with_waiting(
        [
            reduce(rank=rank, start=start, duration=2.0, step=step)
            for step, rank, start in [(0, 0, 100.0), (0, 1, 101.0), (1, 0, 200.5), (1, 1, 200.0)]
        ]
    )
    assert [(span.step, span.rank, span.start_seconds, span.waiting_seconds) for span in spans] == [
        (0, 0, 0.0, 1.0),
        (0, 1, 1.0, 0.0),
        (1, 0, 0.5, 0.0),
        (1, 1, 0.0, 0.5),
    ]


def test_waiting_is_never_longer_than_the_span():
    # A rank that leaves before the last has come: its clock or its kernel was early.
    spans = with_waiting([reduce(rank=0, start=0.0, duration=1.0), reduce(rank=1, start=3.0, duration=1.0)])
    assert [span.waiting_seconds for span in spans] == [1.0, 0.0]


# --- Collectives that go on after their call.


class FakeWork:
    """Work that tells its end, or does not, as gloo's reduce-scatter."""

    def __init__(self, *, tells: bool) -> None:
        self.tells = tells
        self.note: Any = None

    def get_future(self) -> "FakeWork":
        if not self.tells:
            raise RuntimeError("Work::getFuture not implemented.")
        return self

    def then(self, note: Any) -> None:
        self.note = note


@pytest.mark.parametrize("tells", [True, False])
def test_a_collective_that_goes_on_lasts_until_its_work_is_done(tells):
    recorder = Recorder()
    recorder.start()
    work: Any = FakeWork(tells=tells)
    with recorder.task("sent", TaskKind.ALL_TO_ALL, Phase.FORWARD, (8,), (0, 1)) as mark:
        pass
    recorder.follow(mark, work)
    with recorder.task("meanwhile", TaskKind.GELU, Phase.FORWARD, (1, 1)):
        time.sleep(0.002)
        if tells:
            work.note(None)
        told = time.perf_counter()
        time.sleep(0.002)
    recorder.waited(mark)
    sent, meanwhile = recorder.stop()
    assert meanwhile.start_seconds < sent.end_seconds
    # Where nothing is told, the end is that of the waiting.
    assert (sent.end_seconds <= told) == tells
    assert (sent.end_seconds >= meanwhile.end_seconds) == (not tells)


def test_what_follows_a_pause_has_no_name():
    recorder = Recorder()
    recorder.start()
    with recorder.task("sent", TaskKind.ALL_TO_ALL, Phase.BACKWARD, (8,), (0, 1)):
        pass
    recorder.pause()
    paused = time.perf_counter()
    time.sleep(0.001)
    (mark,) = recorder.stop()
    assert mark.end_seconds <= paused


def test_nothing_is_followed_while_nothing_is_marked():
    recorder = Recorder()
    with recorder.task("sent", TaskKind.ALL_TO_ALL, Phase.FORWARD, (8,), (0, 1)) as mark:
        assert mark is None
    recorder.pause()
    recorder.follow(mark, FakeWork(tells=True))  # type: ignore[arg-type]
    recorder.waited(mark)
