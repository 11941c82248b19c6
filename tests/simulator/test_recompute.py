"""Which tasks run again, and what copies a step has, by hand."""

import dataclasses

import pytest

from simulator.constraints import violations
from simulator.costs import ComputeCosts
from simulator.errors import CalibrationError
from simulator.saved import kept_tensors, offloaded_bytes, saved_tensors
from simulator.specs.cluster import BUILT_IN_CLUSTERS, DeviceKind, host_bytes_per_second
from simulator.specs.model import EdgeBias
from simulator.specs.plan import Exchange, Offload, Plan, Recompute
from simulator.specs.program import Phase, Stream, Task, TaskKind
from simulator.specs.units import GB, Dtype
from simulator.workload import lower, rank_work
from tests.made import equal_parts, graph_of, made_calibration, made_cluster, made_model, made_plan

CPU, GPU = (made_cluster(kind=kind) for kind in DeviceKind)
AWAY, STAYS = Offload.ACTIVATIONS, Offload.NONE


def tasks_of(plan: Plan, *, cluster=GPU, **model) -> tuple[Task, ...]:
    return lower(plan, graph_of(plan.partition), made_model(num_layers=len(plan.exchange), **model), cluster).tasks[0]


def again(exchange: Exchange, kind: Recompute, *, overlaps: bool = False) -> list[str]:
    count = 1 if exchange is Exchange.NONE else 2
    cut = equal_parts(count, num_nodes=100, num_edges=400, halo_rows=10 * (count - 1))
    plan = made_plan(cut, num_layers=1, exchange=(exchange,), recompute=(kind,), overlap_exchange=overlaps)
    tasks = tasks_of(plan, dropout_ratio=0.5, edge_bias=EdgeBias.DEGREE)
    names = [task.name for task in tasks if task.phase is Phase.RECOMPUTE]
    return [name.removeprefix("layer0.").removesuffix(".recompute") for name in names]


FEED = ["feed_forward_dropout", "feed_forward_norm", "feed_forward_up", "feed_forward_activation", "attention_dropout"]


@pytest.mark.parametrize(
    ("exchange", "kind", "overlaps", "expected"),
    [
        (
            Exchange.NONE,
            Recompute.SELECTIVE,
            False,
            [
                *("feed_forward_dropout", "feed_forward_activation", "feed_forward_norm", "attention_dropout"),
                *("edge_bias", "attention_norm"),
            ],
        ),
        (Exchange.NONE, Recompute.DENSE, False, [*FEED, "attention_norm", "query_key_value", "edge_bias"]),
        (
            Exchange.NONE,
            Recompute.ATTENTION,
            False,
            [*FEED, "attention_norm", "query_key_value", "edge_bias", "attention"],
        ),
        # Keys and values stay as they came.
        (Exchange.HALO, Recompute.DENSE, False, [*FEED, "attention_norm", "query", "edge_bias"]),
        (
            Exchange.HALO,
            Recompute.ATTENTION,
            True,
            # Projections are one node of autograd with attention, which is asked for when its result is.
            [*FEED, "edge_bias", "attention_whole", "attention_norm"],
        ),
        # Heads came by an exchange, and so did what attention made of rows.
        (Exchange.HEAD_ALL_TO_ALL, Recompute.ATTENTION, False, [*FEED, "edge_bias", "attention", "attention_norm"]),
    ],
)
def test_what_runs_again_by_hand(exchange, kind, overlaps, expected):
    assert again(exchange, kind, overlaps=overlaps) == expected


def test_nothing_travels_again_unless_the_whole_layer_runs_again():
    for kind in Recompute:
        cut = equal_parts(2, num_nodes=100, num_edges=400, halo_rows=10)
        tasks = tasks_of(made_plan(cut, exchange=(Exchange.HALO,) * 2, recompute=(kind,) * 2))
        travels = [task for task in tasks if task.kind.is_collective and task.phase is Phase.RECOMPUTE]
        assert bool(travels) == (kind is Recompute.LAYER)


def test_each_kind_keeps_less_than_the_one_before_by_hand():
    # Width 16 and twice that in the feed-forward part: numbers a row, and four fp32 numbers of norms where they stay.
    model, rows = made_model(width=16, num_heads=4, feed_forward_width=32, num_layers=1), 100
    kept = []
    for kind in Recompute:
        plan = made_plan(equal_parts(1, num_nodes=rows, num_edges=400), num_layers=1, recompute=(kind,))
        (work,) = rank_work(plan, step=0, seed=0)
        kept.append(sum(each.num_bytes for each in kept_tensors(plan, model, work, 0, DeviceKind.CPU)))
    scores, norms = rows * 4 * 4, rows * 4 * 4
    assert kept == [
        rows * 16 * 12 * 4 + scores + norms,
        rows * 16 * 8 * 4 + scores,
        rows * 16 * 3 * 4 + scores,
        rows * 16 * 2 * 4,
        rows * 16 * 4,
    ]


def offloading(offload: tuple[Offload, ...], **fields) -> Plan:
    cut = equal_parts(1, num_nodes=100, num_edges=400)
    fields = {"offload_min_bytes": 1} | fields
    return dataclasses.replace(made_plan(cut, num_layers=len(offload)), offload=offload, **fields)


def test_a_layer_goes_out_beside_the_next_one_and_comes_back_beside_it():
    tasks = tasks_of(offloading((AWAY, STAYS, AWAY)))
    place = {task.name: index for index, task in enumerate(tasks)}

    def waited_for(name: str) -> list[str]:
        return [tasks[index].name for index in tasks[place[name]].waits_for]

    assert waited_for("layer0.copy_out") == ["layer0.feed_forward_residual"]
    assert place["layer0.copy_out"] == place["layer1.attention_norm"] - 1
    assert waited_for("layer2.attention_norm") == ["layer0.copy_out"]  # then its memory is free
    assert waited_for("layer2.copy_in.backward") == ["loss.backward"]
    assert waited_for("layer2.feed_forward_down.backward") == ["layer2.copy_in.backward"]
    assert waited_for("layer0.copy_in.backward") == ["layer2.attention_norm.backward"]
    assert waited_for("layer0.feed_forward_down.backward") == ["layer0.copy_in.backward"]
    assert "layer1.copy_out" not in place
    assert not any(tasks[place[name]].blocks_host for name in ("layer0.copy_out", "layer0.copy_in.backward"))
    assert {tasks[place[f"layer0.{name}"]].stream for name in ("copy_out", "copy_in.backward")} == {
        Stream.DEVICE_TO_HOST,
        Stream.HOST_TO_DEVICE,
    }


def test_small_tensors_are_not_copied():
    plan, model = offloading((AWAY,), offload_min_bytes=100 * 16 * 4), made_model(num_layers=1)
    (work,) = rank_work(plan, step=0, seed=0)
    saved = saved_tensors(plan, model, work, 0, Exchange.NONE, DeviceKind.CPU)
    large = [each.num_bytes for each in saved if each.num_bytes >= 100 * 16 * 4]
    assert 0 < len(large) < len(saved)
    assert offloaded_bytes(plan, model, work, 0, DeviceKind.CPU) == sum(large)
    nothing = dataclasses.replace(plan, offload_min_bytes=10**9)
    assert not any(task.kind is TaskKind.COPY_TO_HOST for task in tasks_of(nothing))


def test_an_optimizer_on_the_host_takes_gradients_there_and_brings_parameters_back():
    tasks = tasks_of(offloading((STAYS,), offload_optimizer=True))
    last = tasks[-4:]
    elements, tensors = last[2].shape
    assert [(task.name, task.kind, task.shape) for task in last] == [
        ("clip", TaskKind.CLIP, (elements, tensors)),
        ("optimizer.copy_out", TaskKind.COPY_TO_HOST, (4 * elements,)),
        ("optimizer", TaskKind.HOST_OPTIMIZER, (elements, tensors)),
        ("optimizer.copy_in", TaskKind.COPY_FROM_HOST, (4 * elements,)),
    ]
    assert [task.blocks_host for task in last] == [False, True, True, False]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            dataclasses.replace(offloading((AWAY,)), recompute=(Recompute.LAYER,)),
            "offload[0] must be none when recompute[0] is layer",
        ),
    ],
)
def test_what_cannot_lie_on_the_host_is_refused(plan, words):
    found = violations(plan, graph_of(plan.partition), made_model(num_layers=1), CPU)
    assert any(words in sentence for sentence in found)


def test_copies_without_samples_cost_what_the_narrowest_pcie_link_takes():
    rate = host_bytes_per_second(BUILT_IN_CLUSTERS["h100x8-ndr"])
    assert rate == 57.6 * GB  # PCIe 5, 16 lanes, as NCCL counts them
    calibration = dataclasses.replace(made_calibration(), computes=())
    copy = Task(name="c", kind=TaskKind.COPY_TO_HOST, phase=Phase.FORWARD, shape=(10**9,), dtype=Dtype.FLOAT32)
    costs = ComputeCosts(calibration, busy_devices=1, host_bytes_per_second=rate)
    assert costs.price(copy).device_seconds == pytest.approx(1e9 / (57.6 * GB))
    with pytest.raises(CalibrationError, match="copy_to_host"):
        ComputeCosts(calibration, busy_devices=1).price(copy)
