"""Tensors that go to the host and come back."""

import pytest
import torch

from executor.offload import HostMemory, LayerOffload
from executor.record import Recorder
from simulator.specs.program import Stream, TaskKind, stream_of

CPU = torch.device("cpu")


def offload(memory: HostMemory | None = None, recorder: Recorder | None = None, *, min_bytes: int = 1) -> LayerOffload:
    return LayerOffload(memory or HostMemory(CPU), recorder or Recorder(), "layer0", min_bytes=min_bytes)


def test_views_of_one_memory_are_copied_once_and_come_back_as_they_were():
    recorder = Recorder()
    away, x = offload(recorder=recorder), torch.randn(6, 4)
    views = [x, x[1:3], x.t(), x.view(-1)[5:]]
    kept = [away.keep(view) for view in views]
    for each in kept:
        each.hold()
    right = [view.clone() for view in views]
    recorder.start()
    away.copy_out()
    away.settle()
    x.zero_()
    away.copy_in()
    assert all(torch.equal(each.take(), other) for each, other in zip(kept, right, strict=True))
    marks = recorder.stop()
    assert [(mark.name, mark.kind, mark.shape) for mark in marks] == [
        ("layer0.copy_out", TaskKind.COPY_TO_HOST, (6 * 4 * 4,)),
        ("layer0.copy_in.backward", TaskKind.COPY_FROM_HOST, (6 * 4 * 4,)),
    ]


def test_small_tensors_stay_where_they_are():
    away = offload(min_bytes=65)
    small, large = torch.randn(16), torch.randn(17)
    assert away.keep(small).take() is small
    kept = away.keep(large)
    kept.hold()
    away.copy_out()
    away.settle()
    away.copy_in()
    assert kept.take() is not large


def test_what_nobody_takes_is_not_copied():
    recorder = Recorder()
    away = offload(recorder=recorder)
    away.keep(torch.randn(8))
    recorder.start()
    away.copy_out()
    away.copy_in()
    assert recorder.stop() == []


def test_memory_on_the_device_is_freed_once_the_next_layer_has_run_and_after_the_last_use():
    away, x = offload(), torch.randn(64)
    kept = away.keep(x)
    kept.hold()
    kept.hold()
    weak = torch.multiprocessing.reductions.StorageWeakRef(x.untyped_storage())
    away.copy_out()
    del x
    assert not weak.expired()
    away.settle()
    assert weak.expired()
    away.copy_in()
    back = torch.multiprocessing.reductions.StorageWeakRef(kept.take().untyped_storage())
    assert not back.expired()
    kept.take()
    assert back.expired()


def test_buffers_are_used_again_and_grow():
    memory = HostMemory(CPU)
    first = memory.buffer("layer0", 100)
    assert memory.buffer("layer0", 60).data_ptr() == first.data_ptr()
    assert memory.buffer("layer1", 60).data_ptr() != first.data_ptr()
    assert memory.buffer("layer0", 101).numel() == 101


def test_a_layer_that_did_not_ask_for_its_tensors_is_told():
    away = offload()
    kept = away.keep(torch.randn(4))
    kept.hold()
    away.copy_out()
    with pytest.raises(AssertionError, match="layer0 were not asked back"):
        kept.take()


def test_copies_have_streams_of_their_own():
    assert stream_of(TaskKind.COPY_TO_HOST) is Stream.DEVICE_TO_HOST
    assert stream_of(TaskKind.COPY_FROM_HOST) is Stream.HOST_TO_DEVICE
