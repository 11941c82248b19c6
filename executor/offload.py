"""What layers keep for their backward pass, in the host's memory meanwhile.

A layer's tensors are copied once it has run forward, beside the next one, and their memory on the device is free once
that has run too. They come back while the layer behind it runs backward. On GPUs each way has a stream of its own, and
the host's memory is pinned and used again in every step, since pinning is slow; on CPUs the same copies are made on the
spot.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from executor.recompute import Here, Kept, storage_key
from executor.record import Recorder
from simulator.specs.program import Phase, TaskKind

_ALIGNMENT = 256  # bytes, of what lies behind one another in a buffer


class HostMemory:
    """Buffers in the host's memory, and the streams that fill and read them.

    Args:
        device: whose tensors are copied.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}
        self._streams: dict[TaskKind, torch.cuda.Stream] = {}
        if device.type == "cuda":
            kinds = (TaskKind.COPY_TO_HOST, TaskKind.COPY_FROM_HOST)
            self._streams = {kind: torch.cuda.Stream(device) for kind in kinds}

    def buffer(self, name: str, num_bytes: int) -> Tensor:
        """Return a buffer of bytes, [num_bytes]: the same for the same name, as long as it is large enough."""
        found = self._buffers.get(name)
        if found is None or found.numel() < num_bytes:
            found = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
            self._buffers[name] = found
        return found[:num_bytes]

    def room(self, num_bytes: int) -> Tensor:
        """Return room on the device, [num_bytes]."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    @contextlib.contextmanager
    def copying(self, kind: TaskKind) -> Iterator[None]:
        """Let copies inside run beside later work, behind all earlier work."""
        if kind not in self._streams:
            yield
            return
        stream = self._streams[kind]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            yield

    def event(self, kind: TaskKind) -> torch.cuda.Event | None:
        """Return what tells that the copies so far are done; None where they are."""
        return self._streams[kind].record_event() if kind in self._streams else None

    def synchronize(self) -> None:
        """Let the host wait for the device's work so far."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def wait(self, event: torch.cuda.Event | None) -> None:
        """Let later work of the device wait for an event."""
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


@dataclass(frozen=True, slots=True)
class _Away:
    """A tensor in memory that is copied to the host and back."""

    offload: "LayerOffload"
    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def hold(self) -> None:
        """Say that it is taken once more."""
        self.offload.hold(self.key)

    def take(self) -> Tensor:
        """Return it, on the device."""
        bytes_B = self.offload.take(self.key)
        empty = torch.empty(0, dtype=self.dtype, device=bytes_B.device)
        return empty.set_(bytes_B.untyped_storage(), self.offset, self.size, self.stride)


class LayerOffload:
    """The tensors of one layer in one step.

    Args:
        layer: name of the layer, such as "layer0".
        min_bytes: smaller tensors stay on the device.
    """

    def __init__(self, memory: HostMemory, recorder: Recorder, layer: str, *, min_bytes: int) -> None:
        self._memory, self._recorder, self._layer, self._min_bytes = memory, recorder, layer, min_bytes
        self._num_uses: dict[int, int] = {}  # still to come, by memory
        self._on_device: dict[int, Tensor] = {}  # bytes of a whole tensor's memory
        self._on_host: dict[int, Tensor] = {}
        self._copied: torch.cuda.Event | None = None
        self._arrived: torch.cuda.Event | None = None
        self._is_back = False

    def keep(self, tensor: Tensor) -> Kept:
        """Keep a tensor: on the host, unless it is small. Tensors that share memory are copied once."""
        storage = tensor.untyped_storage()
        if storage.nbytes() < max(self._min_bytes, 1):
            return Here(tensor)
        key = storage_key(tensor)
        if key not in self._on_device:
            bytes_B = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            self._on_device[key] = bytes_B.set_(storage, 0, (storage.nbytes(),), (1,))
            self._num_uses[key] = 0
        offset = int(tensor.storage_offset())
        return _Away(self, key, tensor.dtype, tuple(tensor.shape), tensor.stride(), offset)

    def hold(self, key: int) -> None:
        """Say that a tensor's memory is used once more."""
        self._num_uses[key] += 1

    def copy_out(self) -> None:
        """Start the copies to the host, once the layer has run forward."""
        # What was looked at as an argument only, and is never used, stays away.
        self._on_device = {key: found for key, found in self._on_device.items() if self._num_uses[key] > 0}
        if not self._on_device:
            return
        buffer = self._memory.buffer(self._layer, sum(map(_aligned, self._on_device.values())))
        first = 0
        for key, found in self._on_device.items():
            self._on_host[key] = buffer[first : first + found.numel()]
            first += _aligned(found)
        with self._recorder.task(f"{self._layer}.copy_out", TaskKind.COPY_TO_HOST, Phase.FORWARD, self._shape):
            with self._memory.copying(TaskKind.COPY_TO_HOST):
                for key, found in self._on_device.items():
                    self._on_host[key].copy_(found, non_blocking=True)
            self._copied = self._memory.event(TaskKind.COPY_TO_HOST)

    def settle(self) -> None:
        """Free the memory on the device, once the layer behind has run forward."""
        self._memory.wait(self._copied)
        self._on_device.clear()

    def copy_in(self, _: object = None) -> None:
        """Start the copies back, before the layer behind runs backward."""
        self._is_back = True
        if not self._on_host:
            return
        with (
            self._recorder.interrupting(),
            self._recorder.task(f"{self._layer}.copy_in", TaskKind.COPY_FROM_HOST, Phase.BACKWARD, self._shape),
        ):
            # Allocated for the stream that uses and frees them.
            self._on_device = {key: self._memory.room(found.numel()) for key, found in self._on_host.items()}
            with self._memory.copying(TaskKind.COPY_FROM_HOST):
                for key, found in self._on_host.items():
                    self._on_device[key].copy_(found, non_blocking=True)
            self._arrived = self._memory.event(TaskKind.COPY_FROM_HOST)

    def take(self, key: int) -> Tensor:
        """Return the bytes of a tensor's memory, on the device; the last use lets them go."""
        assert self._is_back, f"the tensors of {self._layer} were not asked back before they are needed"
        self._memory.wait(self._arrived)
        self._arrived = None
        found = self._on_device[key]
        self._num_uses[key] -= 1
        if self._num_uses[key] == 0:
            del self._on_device[key]
        return found

    @property
    def _shape(self) -> tuple[int, ...]:
        return (sum(found.numel() for found in self._on_host.values()),)


def _aligned(bytes_B: Tensor) -> int:
    return -(-bytes_B.numel() // _ALIGNMENT) * _ALIGNMENT
