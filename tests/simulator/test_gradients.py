"""Reductions of gradients by hand: buckets, tasks with their bytes, the order with and without overlap, memory."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.gradients import (
    ReductionTask,
    bucket_tasks,
    buckets_of,
    gradient_operations,
    is_factorised,
    kept_bytes,
    num_kept,
    passing_bytes,
    reduction_schedule,
)
from simulator.specs.gradients import CompressionKind, GradientCompression
from simulator.specs.program import TaskKind
from simulator.specs.units import Dtype
from tests.strategies import compressions

NONE = GradientCompression()
BF16 = GradientCompression(kind=CompressionKind.BF16)
TOP_K = GradientCompression(kind=CompressionKind.TOP_K, kept_ratio=0.1)
POWER_SGD = GradientCompression(kind=CompressionKind.POWER_SGD, matrix_rank=2)
# Registered in this order: 200 + 10, 300 + 15 and 30 + 2 numbers. Factors of rank 2 are smaller but for the last.
PARAMETERS = (
    ("first.weight", (10, 20)),
    ("first.bias", (10,)),
    ("second.weight", (15, 20)),
    ("second.bias", (15,)),
    ("third.weight", (2, 15)),
    ("third.bias", (2,)),
)


def schedule_of(how: GradientCompression = NONE, *, overlaps: bool, bucket_bytes: int = 4 * 320, num_ranks: int = 4):
    operations = ("first", "second", "third", "loss")
    return reduction_schedule(
        PARAMETERS, operations, bucket_bytes=bucket_bytes, compression=how, overlaps=overlaps, num_ranks=num_ranks
    )


def names(tasks: list[ReductionTask]) -> list[str]:
    return [task.name.removeprefix("gradients.") for task in tasks]


def test_buckets_take_the_last_parameters_first():
    buckets = buckets_of(PARAMETERS, 4 * 320)
    # 2 + 30 + 15 fit into 320 numbers, 300 more do not; 300 and 10 do, 200 more do not.
    assert [[name for name, _ in bucket.parameters] for bucket in buckets] == [
        ["third.bias", "third.weight", "second.bias"],
        ["second.weight", "first.bias"],
        ["first.weight"],
    ]
    assert [bucket.num_elements for bucket in buckets] == [47, 310, 200]
    assert [bucket.is_last for bucket in buckets] == [False, False, True]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (NONE, [[("", TaskKind.ALL_REDUCE, (4 * 310,))], [("", TaskKind.ALL_REDUCE, (4 * 201,))]]),
        (
            BF16,
            [
                [
                    (".compress", TaskKind.GRADIENT_CAST, (elements,)),
                    ("", TaskKind.ALL_REDUCE, (2 * elements,)),
                    (".decompress", TaskKind.GRADIENT_CAST, (elements,)),
                ]
                for elements in (310, 200)
            ],
        ),
        (
            # A tenth of the entries, each a value and an index of 4 bytes; the loss is 4 bytes behind the last ones.
            TOP_K,
            [
                [
                    (".compress", TaskKind.TOP_K_SELECT, (elements, kept)),
                    ("", TaskKind.ALL_GATHER, (num_bytes,)),
                    (".decompress", TaskKind.TOP_K_SUM, (elements, kept, 4)),
                ]
                for elements, kept, num_bytes in ((310, 31, 8 * 31), (200, 20, 8 * 20 + 4))
            ],
        ),
        (
            # Left factors of 15 and 10 rows, with a bias of 10 or the loss; right factors of 20 rows.
            POWER_SGD,
            [
                [
                    (".compress", TaskKind.LOW_RANK_PROJECT, (elements, 1, 2)),
                    ("", TaskKind.ALL_REDUCE, (4 * (2 * rows + more),)),
                    (".orthogonalise", TaskKind.LOW_RANK_ORTHOGONALISE, (elements, 1, 2)),
                    (".right", TaskKind.ALL_REDUCE, (4 * 2 * 20,)),
                    (".decompress", TaskKind.LOW_RANK_RESTORE, (elements, 1, 2)),
                ]
                for elements, rows, more in ((300, 15, 10), (200, 10, 1))
            ],
        ),
    ],
    ids=["none", "bf16", "top-k", "PowerSGD"],
)
def test_tasks_of_a_bucket_by_hand(how, expected):
    for bucket, tasks in zip(buckets_of(PARAMETERS, 4 * 320)[1:], expected, strict=True):
        found = bucket_tasks(bucket, how, num_ranks=4)
        assert [(task.name, task.kind, task.shape) for task in found] == [
            (bucket.name + end, kind, shape) for end, kind, shape in tasks
        ]
        half = how is BF16
        assert {task.dtype for task in found if task.kind.is_collective} == {Dtype.BFLOAT16 if half else Dtype.FLOAT32}


def test_a_bucket_without_a_matrix_that_factors_make_smaller_travels_as_it_is():
    bucket = buckets_of(PARAMETERS, 4 * 320)[0]
    (task,) = bucket_tasks(bucket, POWER_SGD, num_ranks=4)
    assert (task.kind, task.shape) == (TaskKind.ALL_REDUCE, (4 * 47,))


@pytest.mark.parametrize(
    ("shape", "matrix_rank", "smaller"),
    [((10, 20), 6, True), ((10, 20), 7, False), ((10,), 1, False), ((1, 9), 1, False), ((4, 4), 2, False)],
)
def test_factors_are_sent_where_they_are_smaller(shape, matrix_rank, smaller):
    assert is_factorised(shape, matrix_rank) == smaller


@pytest.mark.parametrize(("elements", "ratio", "kept"), [(100, 0.1, 10), (101, 0.1, 11), (3, 0.001, 1), (7, 1.0, 7)])
def test_entries_kept_by_hand(elements, ratio, kept):
    assert num_kept(elements, ratio) == kept


def test_without_overlap_all_buckets_come_behind_the_backward_pass():
    schedule = schedule_of(overlaps=False)
    assert (
        schedule.before_backward() == schedule.after_backward_of("third") == schedule.after_backward_of("first") == []
    )
    assert names(schedule.rest()) == ["bucket0", "bucket1", "bucket2"]


def test_with_overlap_a_bucket_begins_once_its_last_gradient_is_there():
    schedule = schedule_of(overlaps=True)
    assert schedule.before_backward() == []
    assert schedule.after_backward_of("third") == []  # its bucket has the bias of the second operation too
    assert names(schedule.after_backward_of("second")) == ["bucket0"]  # the second bucket waits for a bias of the first
    assert names(schedule.after_backward_of("first")) == ["bucket1", "bucket2"]
    assert schedule.rest() == []


def test_a_bucket_that_is_complete_waits_for_those_before_it():
    schedule = schedule_of(overlaps=True)
    assert schedule.after_backward_of("first") == []
    assert schedule.after_backward_of("second") == []
    assert names(schedule.after_backward_of("third")) == ["bucket0", "bucket1", "bucket2"]


def test_buckets_whose_gradients_never_come_are_reduced_behind_the_backward_pass():
    schedule = schedule_of(overlaps=True)
    schedule.after_backward_of("second")
    assert names(schedule.rest()) == ["bucket0", "bucket1", "bucket2"]


@pytest.mark.parametrize(
    ("parameter", "operations"),
    [
        ("layer1.attention_output.bias", {"layer1.attention_output"}),
        ("layer1.query_key_value.weight", {"layer1.query", "layer1.key_value", "layer1.key_value_halo"}),
        ("layer1.edge_bias", {"layer1.edge_bias"}),
        ("layer2.edge_bias", set()),
        ("head.norm.weight", {"head.norm"}),
    ],
)
def test_a_gradient_is_there_when_all_operations_with_the_parameter_have_run_backward(parameter, operations):
    step = ["layer1.query", "layer1.key_value", "layer1.key_value_halo", "layer1.edge_bias", "layer1.exchange"]
    assert gradient_operations(parameter, [*step, "layer1.attention_output", "head.norm", "loss"]) == operations


def test_a_bucket_with_a_parameter_that_no_operation_uses_begins_behind_the_backward_pass():
    schedule = reduction_schedule(
        PARAMETERS, ["first", "third"], bucket_bytes=4 * 320, compression=NONE, overlaps=True, num_ranks=2
    )
    assert schedule.after_backward_of("third") == schedule.after_backward_of("first") == []
    assert names(schedule.rest()) == ["bucket0", "bucket1", "bucket2"]


def test_what_follows_the_last_collective_of_a_bucket_waits_for_the_end_of_the_backward_pass():
    schedule = schedule_of(BF16, overlaps=True)
    # In bf16 the loss would be rounded, so it travels for itself, before all else.
    assert names(schedule.before_backward()) == ["loss"]
    schedule.after_backward_of("third")
    assert names(schedule.after_backward_of("second")) == ["bucket0.compress", "bucket0"]
    schedule.after_backward_of("first")
    assert names(schedule.rest()) == ["bucket0.decompress", "bucket1.decompress", "bucket2.decompress"]
    behind = schedule_of(BF16, overlaps=False)
    assert names(behind.rest())[:4] == ["loss", "bucket0.compress", "bucket0", "bucket0.decompress"]


def test_the_second_collective_of_a_bucket_begins_when_the_next_bucket_does():
    schedule = schedule_of(POWER_SGD, overlaps=True)
    schedule.after_backward_of("third")
    schedule.after_backward_of("second")
    found = schedule.after_backward_of("first")
    assert names(found) == [
        *("bucket1.compress", "bucket1"),
        *("bucket1.orthogonalise", "bucket1.right", "bucket2.compress", "bucket2"),
    ]
    assert {task.name: task.waits_for for task in found if task.waits_for} == {
        "gradients.bucket1.orthogonalise": "gradients.bucket1"
    }
    assert names(schedule.rest()) == [
        *("bucket2.orthogonalise", "bucket2.right"),
        *("bucket1.decompress", "bucket2.decompress"),
    ]


def test_a_single_rank_reduces_nothing():
    for overlaps in (False, True):
        schedule = schedule_of(BF16, overlaps=overlaps, num_ranks=1)
        assert schedule.before_backward() == schedule.after_backward_of("first") == schedule.rest() == []


@given(
    how=compressions,
    bucket_bytes=st.integers(4, 3000),
    order=st.permutations(["first", "second", "third"]),
    number=st.integers(0, 3),
)
def test_overlap_changes_when_tasks_are_issued_but_not_which_nor_the_order_in_a_bucket(
    how, bucket_bytes, order, number
):
    behind = schedule_of(how, overlaps=False, bucket_bytes=bucket_bytes).rest()
    schedule = schedule_of(how, overlaps=True, bucket_bytes=bucket_bytes)
    beside = schedule.before_backward()
    for operation in order[:number]:
        beside += schedule.after_backward_of(operation)
    beside += schedule.rest()
    assert sorted(names(beside)) == sorted(names(behind))
    for bucket in range(len(behind)):
        mine = [
            [name for name in names(tasks) if name.split(".")[0] == f"bucket{bucket}"] for tasks in (beside, behind)
        ]
        assert mine[0] == mine[1]
    # Whatever came, ranks issue collectives in one order.
    collectives = [task.name for task in beside if task.kind.is_collective]
    complete = schedule_of(how, overlaps=True, bucket_bytes=bucket_bytes)
    found = complete.before_backward()
    for operation in ("third", "second", "first"):
        found += complete.after_backward_of(operation)
    assert collectives == [task.name for task in found + complete.rest() if task.kind.is_collective]


def test_memory_of_compressions_by_hand():
    buckets = buckets_of(PARAMETERS, 4 * 320)
    assert [kept_bytes(buckets, how) for how in (NONE, BF16)] == [0, 0]
    assert kept_bytes(buckets, TOP_K) == 4 * 557
    # What was not sent of all, and two columns of 20 rows for two matrices.
    assert kept_bytes(buckets, POWER_SGD) == 4 * (557 + 2 * 2 * 20)

    def passing(how: GradientCompression) -> list[int]:
        return [passing_bytes(buckets, how, num_ranks=4, overlaps=overlaps) for overlaps in (False, True)]

    assert passing(NONE) == [0, 0]
    assert passing(BF16) == [2 * 310, 2 * 557]
    # 8 bytes an entry for each of four ranks and the own message, 8 for its index; magnitudes of the largest bucket.
    assert passing(TOP_K) == [48 * 31 + 4 * 310, 48 * (5 + 31 + 20) + 4 * 310]
    # Left factors of 15 and 10 rows twice, and a bias.
    assert passing(POWER_SGD) == [4 * (2 * 2 * 15 + 10), 4 * (2 * 2 * 25 + 10)]


@given(how=compressions, bucket_bytes=st.integers(4, 3000), num_ranks=st.integers(2, 8))
def test_overlap_never_needs_less_memory(how, bucket_bytes, num_ranks):
    buckets = buckets_of(PARAMETERS, bucket_bytes)
    behind, beside = (passing_bytes(buckets, how, num_ranks=num_ranks, overlaps=overlaps) for overlaps in (False, True))
    assert 0 <= behind <= beside


@given(how=compressions)
def test_what_travels_is_never_nothing_and_factors_are_smaller(how):
    for bucket in buckets_of(PARAMETERS, 4 * 320):
        sent = [task for task in bucket_tasks(bucket, how, num_ranks=2) if task.kind.is_collective]
        num_bytes = sum(math.prod(task.shape) for task in sent)
        assert num_bytes > 0
        if how.kind is CompressionKind.POWER_SGD:
            assert num_bytes <= 4 * (bucket.num_elements + bucket.is_last)


def test_a_bias_behind_a_sum_has_its_gradient_from_an_operation_of_its_own():
    operations = {"layer0.attention_output", "layer0.attention_output_bias"}
    assert gradient_operations("layer0.attention_output.bias", operations) == {"layer0.attention_output_bias"}
    assert gradient_operations("layer0.attention_output.weight", operations) == {"layer0.attention_output"}
