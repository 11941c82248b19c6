"""Calls of collectives as torch.distributed gets them, on a fake process group of four ranks."""

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.collective_calls import CollectiveCall, CollectiveCalls, call_discrepancies
from executor.compat import FAKE_BACKEND, all_gather_single, reduce_scatter_single
from simulator.specs.program import TaskKind
from tests.made import made_task

ALL, PAIR = (0, 1, 2, 3), (1, 3)


@pytest.fixture
def pair():
    """The group of ranks 1 and 3, of which this process passes for rank 1."""
    dist.init_process_group(FAKE_BACKEND, store=FakeStore(), rank=1, world_size=4)
    yield dist.new_group(list(PAIR))
    dist.destroy_process_group()


def called(kind, sends, group, receives=()) -> CollectiveCall:
    return CollectiveCall(kind=kind, sends=sends, receives=receives, group=group)


def test_every_collective_is_noted_with_its_bytes_and_ranks(pair):
    with CollectiveCalls() as seen:
        dist.all_reduce(torch.ones(3))
        dist.all_to_all_single(torch.ones(5, 2), torch.ones(3, 2, dtype=torch.float32), [4, 1], [1, 2], group=pair)
        dist.all_to_all_single(torch.ones(4), torch.ones(4), group=pair)
        all_gather_single(torch.ones(8), torch.ones(4), group=pair)
        reduce_scatter_single(torch.ones(2, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16), group=pair)
    assert seen.calls == [
        called("all_reduce", (12,), ALL),
        called("all_to_all", (8, 16), PAIR, (32, 8)),
        called("all_to_all", (8, 8), PAIR, (8, 8)),
        called("all_gather", (16,), PAIR),
        called("reduce_scatter", (8,), PAIR),
    ]


def test_collectives_of_tensor_parallelism_are_noted_too(pair):
    with CollectiveCalls() as seen:
        wait, name = torch.ops._c10d_functional.wait_tensor, pair.group_name
        wait(torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", name))
        wait(torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(2), 2, name))
    assert seen.calls == [called("all_reduce", (12,), PAIR), called("all_gather", (8,), PAIR)]


def test_another_collective_is_told_by_its_own_name(pair):
    with CollectiveCalls() as seen:
        dist.broadcast(torch.ones(3), src=1, group=pair)
    assert seen.calls == [called("broadcast_", (12,), PAIR)]
    task = made_task(TaskKind.ALL_REDUCE, (12,), group=PAIR, name="sum")
    assert call_discrepancies([task], seen.calls) == [
        "sum, collective 1 of the step: kind must be all_reduce, got broadcast_"
    ]


def test_a_collective_that_was_not_called_is_counted():
    task = made_task(TaskKind.ALL_REDUCE, (12,), group=PAIR, name="sum")
    assert call_discrepancies([task, task], [called("all_reduce", (12,), PAIR)]) == [
        "2 collectives are lowered, but 1 were called"
    ]
