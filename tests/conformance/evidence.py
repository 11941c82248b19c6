"""What a task of each kind does, as the profiler shows it: the operators that must have run, with their operands."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from simulator.specs.model import NUM_DEGREE_BUCKETS
from simulator.specs.program import BATCH_KINDS, HOST_COPIES, Phase, Task, TaskKind
from simulator.specs.units import Dtype
from tests.conformance.observe import Dims, ObservedTask, Operands, Operator

_COMPRESSING = {
    TaskKind.TOP_K_SELECT: "select_entries",
    TaskKind.TOP_K_SUM: "sum_entries",
    TaskKind.LOW_RANK_PROJECT: "project",
    TaskKind.LOW_RANK_ORTHOGONALISE: "orthogonalise",
    TaskKind.LOW_RANK_RESTORE: "restore",
}
# Functions that take a list of gradients, in which the profiler shows no sizes.
_OF_ALL_GRADIENTS = {TaskKind.GRADIENT_NORM: "sum_of_squares", TaskKind.GRADIENT_SCALE: "scale_"}
TYPES = {Dtype.FLOAT32: "float", Dtype.BFLOAT16: "c10::BFloat16"}
_BYTES_OF_TYPE = {"unsigned char": 1, "float": 4}
# Operators that cost much: a task runs no other of them than it must.
GOVERNED = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "addmm", "addmm_", "bmm", "native_layer_norm", "native_layer_norm_backward", "gelu", "gelu_backward"),
        *("_log_softmax", "_log_softmax_backward_data", "linalg_vector_norm", "_fused_adamw_"),
    )
)


ANY = -10  # a size


@dataclass(frozen=True, kw_only=True)
class Expected:
    """An operator that must have run in a task.

    Attributes:
        names: any of these.
        dims: sizes of its first arguments; `ANY` for one that the task does not count.
        type: number format of its first argument; any if empty.
        numbers: arguments that are no tensors, by position, as text.
        or_else: another operator that does; None for no other.
    """

    names: tuple[str, ...]
    dims: Dims
    type: str = ""
    numbers: tuple[tuple[int, str], ...] = ()
    or_else: "Expected | None" = None

    def is_met_by(self, operator: Operator) -> bool:
        """Return whether this is the operator."""
        if self.or_else is not None and self.or_else.is_met_by(operator):
            return True
        return (
            operator.name in self.names
            and len(operator.dims) >= len(self.dims)
            and all(map(_fits, self.dims, operator.dims))
            and (not self.type or operator.types[:1] == (self.type,))
            and all(operator.numbers[position : position + 1] == (text,) for position, text in self.numbers)
        )

    def __str__(self) -> str:
        numbers = "".join(f", argument {position} = {text}" for position, text in self.numbers)
        return f"{' or '.join(self.names)} {_dims_text(self.dims)} {self.type}{numbers}".strip()


@dataclass(frozen=True, kw_only=True)
class ExpectedOperand:
    """A tensor that some operator of a task must have taken, whichever operators there are.

    Attributes:
        sizes: any of these.
    """

    sizes: tuple[tuple[int, ...], ...]

    def is_met_by(self, operator: Operator) -> bool:
        """Return whether the operator takes such a tensor."""
        return any(dims in self.sizes for dims in operator.dims)

    def __str__(self) -> str:
        return f"a tensor {' or '.join(map(str, self.sizes))}"


def _fits(expected: Dims, found: Dims) -> bool:
    """Return whether the sizes of an argument are those expected."""
    return len(expected) == len(found) and all(
        size in (ANY, other) for size, other in zip(expected, found, strict=True)
    )


def missing_evidence(task: Task, observed: ObservedTask) -> list[str]:
    """Return what a task should have done and did not, and what it did and should not have."""
    found = []
    met: set[int] = set()
    is_by_head = _is_by_head(task, observed)
    for expected in [] if is_by_head else _expected_operators(task):
        position = next(
            (
                index
                for index, operator in enumerate(observed.operators)
                if index not in met and expected.is_met_by(operator)
            ),
            None,
        )
        if position is None:
            ran = "; ".join(_similar(observed.operators, expected)) or "nothing like it"
            found.append(f"should have run {expected}, but ran {ran}")
        elif isinstance(expected, Expected):
            met.add(position)
    for index, operator in enumerate(observed.operators):
        is_part = task.kind is TaskKind.GRADIENT_NORM and operator.name == "aten::linalg_vector_norm"
        if operator.name in GOVERNED and index not in met and not is_part:
            found.append(f"also ran {operator.name} {_dims_text(operator.dims)}")
    if task.kind in HOST_COPIES and (copied := _copied_bytes(observed.operators)) != task.shape[0]:
        found.append(f"should have copied {task.shape[0]} bytes, but copied {copied}")
    expected_operands = _packed_heads(task) if is_by_head else _expected_operands(task)
    if _whole_batches(observed.operands) != expected_operands:
        found.append(f"should have had {expected_operands} as operands, but had {observed.operands}")
    return found


def _copied_bytes(operators: Sequence[Operator]) -> int:
    """Return the bytes of the tensors that were copied."""
    copies = [operator for operator in operators if operator.name == "aten::copy_"]
    return sum(math.prod(copy.dims[0]) * _BYTES_OF_TYPE[copy.types[0]] for copy in copies)


def _similar(operators: Iterable[Operator], expected: Expected | ExpectedOperand) -> list[str]:
    """Return the operators of the expected name, in words."""
    return [
        f"{operator.name} {_dims_text(operator.dims)} {operator.types[0] if operator.types else ''}".strip()
        for operator in operators
        if isinstance(expected, Expected) and operator.name in expected.names
    ]


def _dims_text(dims: Dims) -> str:
    return " x ".join(str(sizes) for sizes in dims if sizes)


def _whole_batches(operands: Sequence[Operands]) -> tuple[Operands, ...]:
    """Return operands with those of the micro-batches that one task makes added up."""
    batches = [each.counts for each in operands if each.function == "batch"]
    if len(batches) < 2:
        return tuple(operands)
    return (Operands(function="batch", counts=tuple(map(sum, zip(*batches, strict=True)))),)


def _expected_operands(task: Task) -> tuple[Operands, ...]:
    if task.kind is TaskKind.SPARSE_LINEAR:
        return (Operands(function="mm", counts=(task.shape[1],)),)
    if task.kind in _OF_ALL_GRADIENTS:
        return (Operands(function=_OF_ALL_GRADIENTS[task.kind], counts=task.shape),)
    if task.kind in (TaskKind.OPTIMIZER, TaskKind.HOST_OPTIMIZER):
        return (Operands(function="_fused_adamw_", counts=task.shape),)
    if task.kind in BATCH_KINDS:
        return (Operands(function="batch", counts=task.shape),)
    if task.kind in _COMPRESSING:
        return (Operands(function=_COMPRESSING[task.kind], counts=task.shape),)
    if task.kind is TaskKind.HALO_PACK and task.phase is Phase.BACKWARD:
        return (Operands(function="add_rows_", counts=task.shape),)
    if task.kind is TaskKind.MERGE:
        return (Operands(function="merge_into", counts=task.shape),)
    if _is_part(task):
        return (Operands(function="attend_part", counts=task.shape),)
    if task.kind is TaskKind.ATTENTION_SOURCES:
        stats = Operands(function="row_stats", counts=(task.shape[0], *task.shape[5:]))
        return (stats, Operands(function="backward_sources", counts=task.shape))
    if task.kind is TaskKind.ATTENTION_TARGETS:
        return (Operands(function="backward_targets", counts=task.shape),)
    if task.kind is TaskKind.ATTENTION:
        if task.phase is Phase.BACKWARD:
            return (Operands(function="attention_backward", counts=task.shape[:3]),)
        forward = Operands(function="attention_forward", counts=task.shape[:3])
        return (Operands(function="edge_attention", counts=task.shape[3:5]), forward)
    return ()


def _is_by_head(task: Task, observed: ObservedTask) -> bool:
    """Return whether a task packs, or unpacks, keys and values by the heads of receivers; all its counts are seen."""
    functions = {operands.function for operands in observed.operands}
    return task.kind is TaskKind.HALO_PACK and not functions.isdisjoint({"pack_heads", "unpack_heads_"})


def _packed_heads(task: Task) -> tuple[Operands, ...]:
    function = "unpack_heads_" if task.phase is Phase.BACKWARD else "pack_heads"
    return (Operands(function=function, counts=task.shape),)


def _is_part(task: Task) -> bool:
    """Return whether a task is attention over one of two sets of edges."""
    return task.kind is TaskKind.ATTENTION and task.name.removesuffix(".recompute").endswith(
        ("_interior", "_halo", "_whole")
    )


def _expected_operators(task: Task) -> Sequence[Expected | ExpectedOperand]:
    backward = task.phase is Phase.BACKWARD
    match task.kind:
        case TaskKind.LINEAR | TaskKind.INPUT_LINEAR | TaskKind.PROJECTION | TaskKind.SPARSE_LINEAR:
            return _products(task)
        case TaskKind.ATTENTION:
            return [] if _is_part(task) else _attention(task)
        case TaskKind.HALO_PACK | TaskKind.PAD_ROWS:
            return _packing(task)
        case TaskKind.TARGET_ROWS:
            return _target_rows(task)
        case TaskKind.COPY_ROWS:
            return [_copied_rows(*task.shape)]
        case TaskKind.LAYER_NORM:
            return [
                _aten("native_layer_norm_backward" if backward else "native_layer_norm", task.shape, dtype=task.dtype)
            ]
        case TaskKind.GELU:
            return [_aten("gelu_backward" if backward else "gelu", task.shape, dtype=task.dtype)]
        case TaskKind.DROPOUT:
            return [_aten("mul", task.shape, task.shape, dtype=task.dtype)]
        case TaskKind.RESIDUAL:
            if backward:
                return [Expected(names=("AddBackward0",), dims=(task.shape,), type=TYPES[task.dtype])]
            return [_aten("add", task.shape, task.shape, dtype=task.dtype)]
        case TaskKind.EDGE_BIAS:
            edges, heads = task.shape
            if backward:
                return [_aten("index_select_backward", (edges, heads), (), (), (edges,))]
            return [_aten("index_select", (NUM_DEGREE_BUCKETS, heads), (), (edges,))]
        case TaskKind.LOSS:
            rows, labelled, columns = task.shape
            if backward:
                return [
                    _aten("_log_softmax_backward_data", (labelled, columns), dtype=Dtype.FLOAT32),
                    _aten("index_add_", (rows, columns), (), (labelled,), (labelled, columns), dtype=task.dtype),
                ]
            return [
                _aten("index_select", (rows, columns), (), (labelled,), dtype=task.dtype),
                _aten("_log_softmax", (labelled, columns), dtype=Dtype.FLOAT32),
            ]
        case TaskKind.BIAS:
            if backward:
                return [_aten("sum", task.shape, dtype=task.dtype)]
            return [_aten("add", task.shape, task.shape[1:], dtype=task.dtype)]
        case TaskKind.CLIP:
            elements = task.shape[:1]
            return [_aten("linalg_vector_norm", elements, dtype=task.dtype), _aten("mul_", elements, dtype=task.dtype)]
        case TaskKind.GRADIENT_CAST:
            return [_aten("copy_", task.shape, task.shape)]
        case TaskKind.TOP_K_SELECT:
            num_elements, kept = task.shape
            return [Expected(names=("aten::topk",), dims=((num_elements,),), type="float", numbers=((1, str(kept)),))]
        case TaskKind.LOW_RANK_ORTHOGONALISE:
            return [_aten(name) for name in ("linalg_qr", "mm", "addmm") for _ in range(task.shape[1])]
        case TaskKind.LOW_RANK_PROJECT | TaskKind.LOW_RANK_RESTORE:
            return [_aten("mm") for _ in range(task.shape[1])]
        case TaskKind.OPTIMIZER | TaskKind.HOST_OPTIMIZER:
            return [_aten("_fused_adamw_")]
        case TaskKind.SHARD_COPY:
            return [_shard_copy(task)]
        case _:
            return []


def _products(task: Task) -> list[Expected]:
    backward, dtype = task.phase is Phase.BACKWARD, task.dtype
    if task.kind is TaskKind.SPARSE_LINEAR:
        rows, _, columns_in, columns_out = task.shape
        if backward:
            return [_aten("mm", (columns_in, rows), (rows, columns_out), dtype=Dtype.FLOAT32)]
        return [_aten("mm", (rows, columns_in), (columns_in, columns_out), dtype=Dtype.FLOAT32)]
    rows, columns_in, columns_out = task.shape
    if not backward:
        operands = ((rows, columns_in), (columns_in, columns_out))
        if task.kind is TaskKind.PROJECTION:
            return [_aten("mm", *operands, dtype=dtype)]
        return [_aten("addmm", (columns_out,), *operands, dtype=dtype)]
    found = [_aten("mm", (columns_out, rows), (rows, columns_in), dtype=dtype)]
    if task.kind is not TaskKind.INPUT_LINEAR:
        product = ((rows, columns_out), (columns_out, columns_in))
        # Where queries, keys and values have projections of their own, one's gradient may be added to another's.
        added = _aten("addmm_", (rows, columns_in), *product, dtype=dtype)
        or_else = added if task.kind is TaskKind.PROJECTION else None
        found.append(dataclasses.replace(_aten("mm", *product, dtype=dtype), or_else=or_else))
    if task.kind is not TaskKind.PROJECTION:
        found.append(_aten("sum", (rows, columns_out), dtype=dtype))
    return found


def _attention(task: Task) -> list[ExpectedOperand]:
    """Return the operands of attention, which more than one implementation offers."""
    targets, sources, _, _, _, heads, head_size = task.shape
    return [
        ExpectedOperand(sizes=((targets, heads, head_size),)),
        ExpectedOperand(sizes=((sources, 2, heads, head_size), (sources, heads, head_size))),
    ]


def _target_rows(task: Task) -> list[Expected]:
    rows, kept, columns = task.shape
    if task.phase is Phase.BACKWARD:
        numbers = ((1, f"[0, 0, 0, {rows - kept}]"),)
        # Queries have fewer columns where ranks share heads.
        pads = [_aten("constant_pad_nd", (kept, count), dtype=task.dtype) for count in (columns, ANY)]
        return [dataclasses.replace(pad, numbers=numbers) for pad in pads]
    # Views of the first rows, which are no operators at all where they are all there are.
    taken = [
        Expected(names=("aten::slice",), dims=((rows, count),), numbers=((3, str(kept)),)) for count in (columns, ANY)
    ]
    return taken if rows > kept else []


def _packing(task: Task) -> list[Expected]:
    rows, others, columns = task.shape
    if task.kind is TaskKind.HALO_PACK:
        if task.phase is Phase.BACKWARD:
            return []  # seen at the call
        # Own rows that stay where they are have no count.
        own = (rows or ANY, columns)
        selected = _aten("index_select", own, (), (others,), dtype=task.dtype)
        return [selected, _aten("copy_", own, own, dtype=task.dtype)] if rows else [selected]
    if task.phase is not Phase.BACKWARD:
        # Own rows that lie where they are sent from are padded alone.
        copied = [_aten("copy_", (rows, columns), (rows, columns), dtype=task.dtype)] if rows else []
        return [*copied, _aten("fill_", (others - rows, columns), dtype=task.dtype)]
    # A view of the first rows, which is no operator at all where they are all there are.
    taken = Expected(names=("aten::slice",), dims=((others, columns),), numbers=((3, str(rows)),))
    return [taken] if others > rows else []


def _shard_copy(task: Task) -> Expected | ExpectedOperand:
    """Return what copies parameters or gradients between tensors and a message."""
    shares, elements = task.shape
    if task.phase is Phase.UPDATE:
        return ExpectedOperand(sizes=((shares, elements),))
    if shares == 1:
        return Expected(names=("fsdp::all_gather_copy_in",), dims=(), numbers=((3, str(elements)),))
    return Expected(names=("fsdp::split_with_sizes_copy",), dims=((shares, elements),))


def _copied_rows(rows: int, columns: int) -> ExpectedOperand:
    """Return the operand of a copy; queries apart from keys and values have a third of the columns."""
    thirds = ((rows, columns // 3),) if columns % 3 == 0 else ()
    return ExpectedOperand(sizes=((rows, columns), *thirds))


def _aten(name: str, *dims: tuple[int, ...], dtype: Dtype | None = None) -> Expected:
    return Expected(names=(f"aten::{name}",), dims=dims, type=TYPES[dtype] if dtype else "")
