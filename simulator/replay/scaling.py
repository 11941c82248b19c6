"""How long a kernel would take with other shapes, in another number format or on another device.

Its measured time stands for how well it uses the device; flops and bytes of the operator that launched it, and the
peaks of devices, say by what factor that changes. A product takes the time of its products and that of its bytes, one
after the other: a tile is read before it is multiplied and written after. Norms, softmaxes and sums take the time of
their bytes; what is left of theirs goes by rows, each a chain of dependent steps, however wide it is. All others go by
their bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from simulator.readers.kineto_names import element_bytes
from simulator.specs.cluster import DeviceSpec
from simulator.specs.recording import DeviceOperation, KernelKind, Operator
from simulator.specs.units import Dtype

# Of a kernel that does nothing: start, one wave of blocks, end. Shortest kernels in ../shared/measured/h200x2/
# kineto_ddp_rank0.json.gz take 0.8 to 1.5 us.
FLOOR_SECONDS = 1.5e-6
# Number formats that a change of precision concerns.
_FLOATS = ("float", "half", "bfloat16")
# Words in names of kernels that multiply in tensor cores in 16 bits or TF32.
_TENSOR_CORES = ("bf16", "fp16", "f16", "h884", "16816", "s1688", "hmma", "tf32", "fp8", "tensorop")
_PRODUCTS = frozenset({KernelKind.MATRIX_PRODUCT, KernelKind.CONVOLUTION})
# Kernels that give each row, or each part of a column, to threads that then depend on one another.
_BY_ROWS = frozenset({KernelKind.NORMALISATION, KernelKind.SOFTMAX, KernelKind.REDUCTION})
# Words in names of kernels that add up the parts of a product: the more tiles it has, the fewer parts, so that the
# number of all partial sums stays.
_SPLIT_SUMS = ("splitk", "reduce")
# Softmaxes, losses and norms of gradients are computed in fp32 whatever the format of the others (torch's list for
# autocast), as the optimizer's step is.
_KEEPS_FP32 = frozenset({KernelKind.OPTIMIZER, KernelKind.SOFTMAX})
_KEEPS_FP32_OPERATORS = ("loss", "vector_norm")
_GATHERS = frozenset({KernelKind.ATTENTION, KernelKind.GATHER_SCATTER})


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What an operator asks of a device.

    Attributes:
        flops: floating-point operations.
        num_bytes: read and written.
        num_rows: of its largest input.
    """

    flops: float
    num_bytes: float
    num_rows: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a kernel's time is carried from, or to.

    Attributes:
        device: None where unknown.
        sizes: lengths of dimensions that become others.
        num_edges: that attention is over; None for the longest list of numbers among its inputs.
        dtype: of floating-point tensors; None for as recorded.
        memory_ratio: share of the data sheet's memory rate that kernels attain (`attained.py`).
    """

    device: DeviceSpec | None = None
    sizes: tuple[tuple[int, int], ...] = ()
    num_edges: int | None = None
    dtype: Dtype | None = None
    memory_ratio: float = 1.0

    @property
    def memory_bytes_per_second(self) -> float | None:
        """Attained rate of the device's memory; None where the device is unknown."""
        return None if self.device is None else self.memory_ratio * self.device.memory_bandwidth_bytes_per_second


def scaled_seconds(
    operation: DeviceOperation, operator: Operator | None, seconds: float, *, old: Setting, new: Setting
) -> float | None:
    """Return a kernel's seconds in another setting; None where shapes are needed and the recording has none."""
    needs_shapes = bool(new.sizes) or (operation.kind is KernelKind.ATTENTION and new.num_edges != old.num_edges)
    before = work_of(operation.kind, operator, old)
    after = work_of(operation.kind, operator, new)
    if before is None or after is None:
        if needs_shapes:
            return None
        ratio = _ratio_without_shapes(operation, operator, old, new)
    elif is_split_sum(operation.name):
        ratio = _memory_ratio(old, new)
    elif operation.kind in _BY_ROWS and old.device is not None:
        return _by_rows_seconds(seconds, before, after, old, new)
    else:
        ratio = _roofline(operation, operator, after, new) / _roofline(operation, operator, before, old)
    floor = min(FLOOR_SECONDS, seconds)
    return floor + (seconds - floor) * ratio


def _by_rows_seconds(seconds: float, before: Work, after: Work, old: Setting, new: Setting) -> float:
    """Return what bytes take, and the rest by rows; on another device the rest follows the memory too."""
    old_rate, new_rate = old.memory_bytes_per_second, new.memory_bytes_per_second
    assert old_rate is not None
    assert new_rate is not None
    moving = min(before.num_bytes / old_rate, seconds)
    rest = (seconds - moving) * after.num_rows / before.num_rows
    return moving * (after.num_bytes / new_rate) / (before.num_bytes / old_rate) + rest * _memory_ratio(old, new)


def _memory_ratio(old: Setting, new: Setting) -> float:
    """Return how much longer the new device's memory takes."""
    old_rate, new_rate = old.memory_bytes_per_second, new.memory_bytes_per_second
    return 1.0 if old_rate is None or new_rate is None else old_rate / new_rate


def is_split_sum(name: str) -> bool:
    """Return whether a kernel adds up the parts of a product that was split along its inner dimension."""
    return all(word in name.lower() for word in _SPLIT_SUMS)


def work_of(kind: KernelKind, operator: Operator | None, setting: Setting) -> Work | None:
    """Return the work of an operator under a setting; None if it has no shapes."""
    if operator is None or not any(operator.shapes):
        return None
    sizes: Mapping[int, int] = dict(setting.sizes)
    shapes = [tuple(sizes.get(length, length) for length in shape) for shape in operator.shapes]
    changed = None if _keeps_fp32(kind, operator.name) else setting.dtype
    widths = [_width(dtype, changed) for dtype in _spread(operator.dtypes, len(shapes))]
    tensors = [(shape, width) for shape, width in zip(shapes, widths, strict=True) if shape]
    num_bytes = float(sum(prod(shape) * width for shape, width in tensors))
    if kind in _PRODUCTS and (product := _product(operator.name, [shape for shape, _ in tensors])) is not None:
        flops, outputs = product
        return Work(flops=flops, num_bytes=num_bytes + outputs * max(width for _, width in tensors))
    largest = max(tensors, key=lambda item: prod(item[0]) * item[1])
    num_rows = float(max(prod(largest[0][:-1]), 1))
    num_bytes += prod(largest[0]) * largest[1]  # written: as much as the largest tensor read
    if kind in _GATHERS:
        num_bytes += _gathered_bytes(tensors, setting.num_edges if kind is KernelKind.ATTENTION else None)
    return Work(flops=0.0, num_bytes=max(num_bytes, 1.0), num_rows=num_rows)


def _product(name: str, shapes: Sequence[tuple[int, ...]]) -> tuple[float, float] | None:
    """Return flops and numbers written of a matrix product; None for another operator."""
    matrices = [shape for shape in shapes if len(shape) >= 2]
    if len(matrices) < 2:
        return None
    left, right = matrices[-2:] if "addmm" in name or "baddbmm" in name else matrices[:2]
    if left[-1] == right[-2]:
        columns = right[-1]
    elif left[-1] == right[-1]:  # as a linear layer's weight stands
        columns = right[-2]
    else:
        return None
    outputs = float(prod(left[:-1]) * columns)
    return 2.0 * outputs * left[-1], outputs


def _gathered_bytes(tensors: Sequence[tuple[tuple[int, ...], float]], num_edges: int | None) -> float:
    """Return the bytes of rows that lists of indices, or edges, fetch: the longest list times the widest rows.

    Attention fetches keys and values.
    """
    widest = max((prod(shape[1:]) * width for shape, width in tensors if len(shape) >= 2), default=0.0)
    if num_edges is not None:
        return 2 * num_edges * widest
    longest = max((shape[0] for shape, _ in tensors if len(shape) == 1), default=0)
    return float(longest * widest)


def _roofline(operation: DeviceOperation, operator: Operator | None, work: Work, setting: Setting) -> float:
    device = setting.device
    if device is None:  # whichever the kind is bound by
        return max(work.flops, 1.0) if operation.kind in _PRODUCTS and work.flops else max(work.num_bytes, 1.0)
    rate = device.flops_per_second(_rate_dtype(operation, operator, setting))
    moving_rate = setting.memory_ratio * device.memory_bandwidth_bytes_per_second
    return max(work.flops / rate + work.num_bytes / moving_rate, 1e-12)


def _ratio_without_shapes(operation: DeviceOperation, operator: Operator | None, old: Setting, new: Setting) -> float:
    """Return the factor of a kernel whose shapes are unknown: by its kind alone."""
    if new.dtype is not None and _keeps_fp32(operation.kind, "" if operator is None else operator.name):
        new = replace(new, dtype=None)
    bytes_ratio = new.dtype.num_bytes / 4 if new.dtype is not None else 1.0
    if old.device is None or new.device is None:
        return bytes_ratio
    if operation.kind in _PRODUCTS:
        before = old.device.flops_per_second(_rate_dtype(operation, operator, old))
        return before / new.device.flops_per_second(_rate_dtype(operation, operator, new))
    return bytes_ratio * old.device.memory_bandwidth_bytes_per_second / new.device.memory_bandwidth_bytes_per_second


def _rate_dtype(operation: DeviceOperation, operator: Operator | None, setting: Setting) -> Dtype:
    if setting.dtype is not None:
        return setting.dtype
    in_16_bits = operator is not None and any("half" in d.lower() or "bfloat16" in d.lower() for d in operator.dtypes)
    uses_cores = any(word in operation.name.lower() for word in _TENSOR_CORES)
    return Dtype.BFLOAT16 if in_16_bits or uses_cores else Dtype.FLOAT32


def _keeps_fp32(kind: KernelKind, operator_name: str) -> bool:
    return kind in _KEEPS_FP32 or any(word in operator_name for word in _KEEPS_FP32_OPERATORS)


def _width(dtype: str, changed: Dtype | None) -> float:
    """Return the bytes of a number of an input."""
    bare = dtype.lower().removeprefix("c10::").removeprefix("tensor(").removesuffix(")")
    if changed is not None and bare in _FLOATS:
        return float(changed.num_bytes)
    return float(element_bytes(dtype) or 4)


def _spread(dtypes: Sequence[str], num_shapes: int) -> list[str]:
    """Return a format for each shape; a list of tensors, whose formats the profiler leaves out, is fp32."""
    return list(dtypes) if len(dtypes) == num_shapes else ["float"] * num_shapes
