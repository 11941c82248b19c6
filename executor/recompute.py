"""Results of a layer's operations that are made again in the backward pass instead of kept.

While a layer runs forward, `Recomputation` sees each operation and what autograd saves. What an operation made that is
to be computed again is not saved, but how to make it: from tensors that are kept, or from others that are made again.
The backward pass makes it once, where it is first needed, marked as `simulator/recompute.py` says, and lets it go after
its last use. `torch.utils.checkpoint` does this for whole regions; here what attention and exchanges made in the midst
of a layer is kept.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from executor.operations import Operation
from executor.record import Recorder
from simulator.specs.program import TaskKind

# They save what is none of their results: statistics, masks, sums.
_WITH_INTERNALS = frozenset({TaskKind.LAYER_NORM, TaskKind.DROPOUT, TaskKind.ATTENTION})
_PRODUCTS = frozenset({TaskKind.LINEAR, TaskKind.PROJECTION})


class Kept(Protocol):
    """A tensor that is to be there again in the backward pass."""

    def hold(self) -> None:
        """Say that `take` will be called once more."""
        ...

    def take(self) -> Tensor:
        """Return it; after the last call it may be gone."""
        ...


@dataclass(frozen=True, slots=True)
class Here:
    """A tensor that stays where it is."""

    tensor: Tensor

    def hold(self) -> None:
        """Do nothing."""

    def take(self) -> Tensor:
        """Return it."""
        return self.tensor


Keep = Callable[[Tensor], Kept]


def storage_key(tensor: Tensor) -> int:
    """Return what tells a tensor's memory from that of all others that live."""
    key: int = tensor.untyped_storage()._cdata
    return key


@dataclass(frozen=True, slots=True)
class Made:
    """What an operation makes again.

    Attributes:
        results: of the operation.
        internals: what it saved for its backward pass beside arguments.
    """

    results: Sequence[Tensor]
    internals: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class _Argument:
    """A tensor that an operation takes when it runs again."""

    kept: Kept
    needs_gradient: bool

    def value(self) -> Tensor:
        return self.kept.take().detach().requires_grad_(self.needs_gradient)


@dataclass(eq=False, kw_only=True)
class _Source:
    """An operation that can run again.

    Attributes:
        run: makes it again from its arguments.
        num_uses: of what it makes that are still to come.
        num_internals: tensors that it saved for itself.
    """

    run: Callable[[list[Any]], Made]
    arguments: list[Any]
    num_uses: int = 0
    num_internals: int = 0
    made: Made | None = None

    def hold(self) -> None:
        """Say that what it makes is used once more; only then does it use its arguments."""
        self.num_uses += 1
        if self.num_uses == 1:
            for each in self.arguments:
                if isinstance(each, _Argument):
                    each.kept.hold()

    def take(self) -> Made:
        """Return what the operation makes, running it the first time, and let it go after the last."""
        if self.made is None:
            self.made = self.run([each.value() if isinstance(each, _Argument) else each for each in self.arguments])
        made = self.made
        self.num_uses -= 1
        if self.num_uses == 0:
            self.made = None
        return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Again:
    """A tensor in the memory of what an operation makes again.

    Attributes:
        is_internal, index: which of the tensors that the operation makes has that memory.
    """

    source: _Source
    is_internal: bool
    index: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def hold(self) -> None:
        """Say that it is taken once more."""
        self.source.hold()

    def take(self) -> Tensor:
        """Return it."""
        made = self.source.take()
        found = (made.internals if self.is_internal else made.results)[self.index]
        return found.as_strided(self.size, self.stride, self.offset)


class Recomputation:
    """What one layer makes again in one step.

    Args:
        layer: name of the layer, such as "layer0".
        names: of the operations within the layer whose results are not kept.
        keep: keeps the others, but for weights and what edges are numbered by.
        weights: of the layer.
    """

    def __init__(
        self,
        recorder: Recorder,
        layer: str,
        names: Collection[str],
        keep: Keep = Here,
        *,
        weights: Iterable[Tensor] = (),
    ) -> None:
        self._recorder, self._layer, self._names, self._keep = recorder, layer, names, keep
        self._weights = frozenset(map(storage_key, weights))
        self._operation: tuple[TaskKind, int] | None = None  # under way, and the memory of its first argument
        self._sources: dict[int, tuple[StorageWeakRef, _Source, int]] = {}  # by memory of a result
        self._running: tuple[_Source, frozenset[int]] | None = None  # and the memory of its arguments

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        """Watch what the layer runs inside, forward."""
        recorder = self._recorder
        before = recorder.compute, recorder.remember
        recorder.compute, recorder.remember = self._compute, self._remember
        try:
            with saved_tensors_hooks(self._save, lambda kept: kept.take()):
                yield
        finally:
            recorder.compute, recorder.remember = before
            self._sources.clear()

    def _remember(
        self,
        name: str,
        run: Callable[..., Sequence[Tensor]],
        arguments: Sequence[Any],
        results: Sequence[Tensor],
    ) -> None:
        """Let results be made again by a function of the arguments, if that is asked for of the operation."""
        if name.removeprefix(f"{self._layer}.") in self._names:
            source = _Source(
                run=lambda values: Made(results=self._again(lambda: run(*values)), internals=()),
                arguments=[self._argument(each) for each in arguments],
            )
            self._register(source, results)

    def _compute(self, name: str, operation: Operation, arguments: tuple[Any, ...]) -> Any:
        """Return what an operation makes."""
        assert isinstance(arguments[0], Tensor), f"{name}: the first argument of a layer's operation is its rows"
        self._operation = operation.kind, storage_key(arguments[0])
        try:
            return self._remembered(name, operation, arguments)
        finally:
            self._operation = None

    def _remembered(self, name: str, operation: Operation, arguments: tuple[Any, ...]) -> Any:
        """Return what an operation makes, and remember how to make it again if it is not kept."""
        if name.removeprefix(f"{self._layer}.") not in self._names:
            return operation.function(*arguments)
        given = list(arguments)
        if operation.kind is TaskKind.DROPOUT:
            # Of its first argument only the shape counts for the mask, which is all that it saves.
            given[0] = arguments[0].new_zeros(()).expand(arguments[0].shape).requires_grad_()
        source = _Source(
            run=lambda values: self._run_again(name, operation, values),
            arguments=[self._argument(each) for each in given],
        )
        if operation.kind in _WITH_INTERNALS:
            self._running = source, _memory_of(arguments)
        result = operation.function(*arguments)
        self._running = None
        self._register(source, result if isinstance(result, tuple) else (result,))
        return result

    def _register(self, source: _Source, results: Sequence[Tensor]) -> None:
        for index, result in enumerate(results):
            self._sources[storage_key(result)] = StorageWeakRef(result.untyped_storage()), source, index

    def _argument(self, argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        found = self._again_of(argument)
        return _Argument(found or self._kept(argument.detach()), argument.requires_grad)

    def _again_of(self, tensor: Tensor) -> _Again | None:
        """Return how to make a tensor again; None if it is kept."""
        found = self._sources.get(storage_key(tensor))
        if found is None:
            return None
        _, source, index = found
        return _again(tensor, source, is_internal=False, index=index)

    def _save(self, tensor: Tensor) -> Kept:
        """Return what autograd saves in the place of a tensor."""
        kept: Kept | None = self._again_of(tensor)
        if kept is None and self._running is not None and storage_key(tensor) not in self._running[1]:
            source = self._running[0]
            kept = _again(tensor, source, is_internal=True, index=source.num_internals)
            source.num_internals += 1
        kept = kept or self._kept(tensor.detach())  # an output that it holds would hold it
        kept.hold()
        return kept

    def _kept(self, tensor: Tensor) -> Kept:
        """Return a tensor that is not made again as it is kept."""
        key = storage_key(tensor)
        if key in self._weights:
            return Here(tensor)
        if self._operation is not None:
            kind, first = self._operation
            # Weights in another number format; nodes and buckets of edges.
            is_weight = (kind in _PRODUCTS and key != first) or (kind is TaskKind.LAYER_NORM and tensor.ndim == 1)
            is_input = kind is TaskKind.EDGE_BIAS or (kind is TaskKind.DROPOUT and tensor.dtype != torch.bool)
            if is_weight or is_input:
                return Here(tensor)
        return self._keep(tensor)

    def _run_again(self, name: str, operation: Operation, arguments: list[Any]) -> Made:
        """Return what an operation makes and saves."""
        internals: list[Tensor] = []
        own = _memory_of(arguments)

        def save(tensor: Tensor) -> None:
            # Nothing goes backward here: autograd keeps nothing, of outputs least of all, which would keep themselves.
            if operation.kind in _WITH_INTERNALS and storage_key(tensor) not in own:
                internals.append(tensor.detach())

        def run() -> Sequence[Tensor]:
            with torch.enable_grad(), saved_tensors_hooks(save, lambda nothing: nothing):
                result = self._recorder.run(name, operation, *arguments)
            return result if isinstance(result, tuple) else (result,)

        return Made(results=self._again(run), internals=internals)

    def _again(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        with self._recorder.recomputing():
            return [result.detach() for result in run()]


def _again(tensor: Tensor, source: _Source, *, is_internal: bool, index: int) -> _Again:
    return _Again(
        source=source,
        is_internal=is_internal,
        index=index,
        size=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
    )


def _memory_of(arguments: Sequence[Any]) -> frozenset[int]:
    return frozenset(storage_key(each) for each in arguments if isinstance(each, Tensor))
