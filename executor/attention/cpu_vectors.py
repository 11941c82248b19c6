"""Vectors of 8 or 16 fp32 lanes for Numba, written in LLVM's own terms: how they are loaded and stored.

Numba's loops leave vectorising to chance, since LLVM cannot know that two arrays do not overlap: attention written with
plain loops took 4 to 10 times as long. Where a processor's vectors are narrower LLVM splits these.

Numbers lie behind pointers to fp32, to fp16 seen as int16, or to bf16 seen as uint16. How many lanes are meant is said
by `count`, whose type Numba knows when it compiles: `LANES8`, `LANES16`, or how many lanes of 8 are in use. Known gap:
fp16 needs a processor that converts it, as those for x86 do since 2012.
"""

# mypy: ignore-errors

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

LANES8, LANES16 = ((),), ((), ())  # types that differ, of no size

_INT16, INT32, FLOAT, _HALF = ir.IntType(16), ir.IntType(32), ir.FloatType(), ir.HalfType()
_STORED = {types.float32: FLOAT, types.int16: _HALF, types.uint16: _INT16}
_BYTES = {FLOAT: 4, _HALF: 2, _INT16: 2}
_NAMES = {FLOAT: "f32", _HALF: "f16", _INT16: "i16"}


class _Floats(types.Type):
    """Type of a vector of floats."""

    def __init__(self, num_lanes):
        self.num_lanes = num_lanes
        super().__init__(f"floats{num_lanes}")


@register_model(_Floats)
class _FloatsModel(models.PrimitiveModel):
    def __init__(self, manager, type_):
        super().__init__(manager, type_, ir.VectorType(FLOAT, type_.num_lanes))


def _counted(count):
    """Return the type of vector that a count means, and the type as which the count is passed."""
    if isinstance(count, types.BaseTuple):
        return _Floats(8 * count.count), count
    return _Floats(8), types.intp


def like(vector, element):
    """Return the type with as many lanes as a vector and another element."""
    return ir.VectorType(element, vector.type.count)


def all_lanes(vector_type, number):
    """Return a constant in every lane."""
    return ir.Constant(vector_type, [number] * vector_type.count)


def call(builder, name, result, *values, fastmath=()):
    """Return the result of an intrinsic of LLVM."""
    function_type = ir.FunctionType(result, [value.type for value in values])
    function = cgutils.get_or_insert_function(builder.module, function_type, name)
    return builder.call(function, values, fastmath=fastmath)


def splat_lanes(builder, scalar, num_lanes):
    """Return a vector with a number in every lane."""
    vector = ir.VectorType(scalar.type, num_lanes)
    one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(INT32, 0))
    return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), all_lanes(ir.VectorType(INT32, num_lanes), 0))


def _widened(builder, value):
    """Return stored numbers as fp32; bf16 is its upper half."""
    element = value.type.element
    if element == _HALF:
        return builder.fpext(value, like(value, FLOAT))
    if element == _INT16:
        words = like(value, INT32)
        return builder.bitcast(builder.shl(builder.zext(value, words), all_lanes(words, 16)), like(value, FLOAT))
    return value


def _narrowed(builder, value, element):
    """Return fp32 numbers as they are stored, rounded to nearest, ties to even."""
    if element == _HALF:
        return builder.fptrunc(value, like(value, _HALF))
    if element == _INT16:
        words = like(value, INT32)
        bits = builder.bitcast(value, words)
        is_odd = builder.and_(builder.lshr(bits, all_lanes(words, 16)), all_lanes(words, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(is_odd, all_lanes(words, 0x7FFF))), all_lanes(words, 16))
        is_nan = builder.fcmp_unordered("uno", value, value)
        return builder.trunc(builder.select(is_nan, all_lanes(words, 0x7FC0), rounded), like(value, _INT16))
    return value


def _cast(builder, pointer_type, pointer, index, num_lanes):
    """Return the address of the vector that begins with an element, and the type of the element."""
    element = _STORED[pointer_type.dtype]
    return builder.bitcast(builder.gep(pointer, [index]), ir.VectorType(element, num_lanes).as_pointer()), element


def _first_lanes(builder, count, num_lanes):
    """Return the mask of the first lanes."""
    numbers = ir.Constant(ir.VectorType(INT32, num_lanes), list(range(num_lanes)))
    return builder.icmp_signed("<", numbers, splat_lanes(builder, builder.trunc(count, INT32), num_lanes))


@intrinsic
def address(typing_context, array):
    """Return the pointer to the first element of an array, which the caller keeps."""

    def codegen(context, builder, signature, arguments):
        return context.make_array(array)(context, builder, arguments[0]).data

    return types.CPointer(array.dtype)(array), codegen


@intrinsic
def shifted(typing_context, pointer, index):
    """Return the pointer to the element at an index."""
    return pointer(pointer, types.intp), lambda context, builder, signature, arguments: builder.gep(
        arguments[0], [arguments[1]]
    )


@intrinsic
def num_lanes(typing_context, lanes):
    """Return how many lanes a tuple means, or None, which means 8 under a mask."""
    number = 8 if lanes == types.none else 8 * lanes.count
    return types.intp(lanes), lambda context, builder, signature, arguments: context.get_constant(types.intp, number)


@intrinsic
def count_of(typing_context, lanes, left):
    """Return the count of a vector: the tuple, or in place of None the lanes in use."""
    kept = 1 if lanes == types.none else 0
    signature = (types.intp if kept else lanes)(lanes, types.intp)
    return signature, lambda context, builder, signature, arguments: arguments[kept]


@intrinsic
def load(typing_context, pointer, index, count):
    """Return the vector at an index; lanes that are not in use are zero, and not read."""
    floats, count_type = _counted(count)

    def codegen(context, builder, signature, arguments):
        num_lanes = floats.num_lanes
        address, element = _cast(builder, signature.args[0], *arguments[:2], num_lanes)
        if count_type is not types.intp:
            return _widened(builder, builder.load(address, align=_BYTES[element]))
        vector, align = ir.VectorType(element, num_lanes), ir.Constant(INT32, _BYTES[element])
        mask, name = _first_lanes(builder, arguments[2], num_lanes), f"llvm.masked.load.v8{_NAMES[element]}.p0"
        return _widened(builder, call(builder, name, vector, address, align, mask, ir.Constant(vector, None)))

    return floats(pointer, types.intp, count_type), codegen


@intrinsic
def store(typing_context, pointer, index, vector, count):
    """Store the lanes that are in use at an index."""
    floats, count_type = _counted(count)

    def codegen(context, builder, signature, arguments):
        num_lanes = floats.num_lanes
        address, element = _cast(builder, signature.args[0], *arguments[:2], num_lanes)
        value = _narrowed(builder, arguments[2], element)
        if count_type is not types.intp:
            builder.store(value, address, align=_BYTES[element])
        else:
            mask, name = _first_lanes(builder, arguments[3], num_lanes), f"llvm.masked.store.v8{_NAMES[element]}.p0"
            call(builder, name, ir.VoidType(), value, address, ir.Constant(INT32, _BYTES[element]), mask)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, floats, count_type), codegen


@intrinsic
def prefetch(typing_context, pointer, index):
    """Ask for the cache line of an element, which may lie outside of the array."""

    def codegen(context, builder, signature, arguments):
        address = builder.gep(arguments[0], [arguments[1]])
        is_read, keep, is_data = (ir.Constant(INT32, number) for number in (0, 3, 1))
        call(builder, "llvm.prefetch.p0", ir.VoidType(), address, is_read, keep, is_data)
        return context.get_dummy_value()

    return types.void(pointer, types.intp), codegen


@intrinsic
def splat(typing_context, number, count):
    """Return a number in all lanes."""
    floats, count_type = _counted(count)

    def codegen(context, builder, signature, arguments):
        return splat_lanes(builder, arguments[0], floats.num_lanes)

    return floats(types.float32, count_type), codegen
