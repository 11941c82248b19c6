"""Arithmetic of vectors for Numba: sums and products, sums over lanes, exponentials, dropout."""

# mypy: ignore-errors

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from executor.attention.cpu_vectors import FLOAT, INT32, all_lanes, call, like, splat_lanes

# exp(x) = 2^n exp(r) with n = round(x / log 2), r = x - n log 2 and log 2 in two parts, so that r is exact; exp(r) by
# the polynomial of Cephes' expf (Moshier 1992), to 1e-7.
_LOG2_HIGH, _LOG2_LOW = 0.693359375, -2.12194440e-4
_EXP_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LOWEST_EXPONENT = -87.3  # below it exp is no normal number, and zero here
_GOLDEN = 0x9E3779B1  # as in executor/keyed.py


def _multiply_add(builder, a, b, c):
    return call(builder, f"llvm.fmuladd.v{a.type.count}f32", a.type, a, b, c)


@intrinsic
def add(typing_context, a, b):
    """Return a + b."""
    return a(a, a), lambda context, builder, signature, arguments: builder.fadd(*arguments)


@intrinsic
def subtract(typing_context, a, b):
    """Return a - b."""
    return a(a, a), lambda context, builder, signature, arguments: builder.fsub(*arguments)


@intrinsic
def multiply(typing_context, a, b):
    """Return a b."""
    return a(a, a), lambda context, builder, signature, arguments: builder.fmul(*arguments)


@intrinsic
def multiply_add(typing_context, a, b, c):
    """Return a b + c, rounded once where the processor can."""
    return a(a, a, a), lambda context, builder, signature, arguments: _multiply_add(builder, *arguments)


@intrinsic
def larger(typing_context, a, b):
    """Return the larger of both, b where a is a NaN."""

    def codegen(context, builder, signature, arguments):
        return builder.select(builder.fcmp_ordered(">", *arguments), *arguments)

    return a(a, a), codegen


@intrinsic
def zero_if_infinite(typing_context, vector):
    """Return a vector with zeros in place of minus infinity."""

    def codegen(context, builder, signature, arguments):
        floats = arguments[0].type
        is_infinite = builder.fcmp_ordered("==", arguments[0], all_lanes(floats, float("-inf")))
        return builder.select(is_infinite, all_lanes(floats, 0.0), arguments[0])

    return vector(vector), codegen


@intrinsic
def total(typing_context, vector):
    """Return the sum over lanes, halves first."""

    def codegen(context, builder, signature, arguments):
        name, zero = f"llvm.vector.reduce.fadd.v{vector.num_lanes}f32", ir.Constant(FLOAT, -0.0)
        return call(builder, name, FLOAT, zero, arguments[0], fastmath=("reassoc",))

    return types.float32(vector), codegen


def _picked(builder, a, b, lanes):
    """Return some lanes of two vectors."""
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(INT32, len(lanes)), lanes))


def _halves_added(builder, vector):
    """Return the sum of the lower and the upper half of a vector."""
    half = vector.type.count // 2
    lower = _picked(builder, vector, vector, list(range(half)))
    return builder.fadd(lower, _picked(builder, vector, vector, list(range(half, 2 * half))))


def _pairs_added(builder, a, b):
    """Return sums of neighbouring lanes of two vectors of 8, in halves as processors shuffle them."""
    even = _picked(builder, a, b, [0, 2, 8, 10, 4, 6, 12, 14])
    return builder.fadd(even, _picked(builder, a, b, [1, 3, 9, 11, 5, 7, 13, 15]))


@intrinsic
def store_totals(typing_context, pointer, index, factor, a, b, c, d):
    """Store the sums over lanes of four vectors, times a factor; half the work of four times `total`."""

    def codegen(context, builder, signature, arguments):
        to, at, factor, *vectors = arguments
        a, b, c, d = (_halves_added(builder, vector) if vector.type.count == 16 else vector for vector in vectors)
        sums = _pairs_added(builder, _pairs_added(builder, a, b), _pairs_added(builder, c, d))
        value = builder.fmul(_halves_added(builder, sums), splat_lanes(builder, factor, 4))
        builder.store(value, builder.bitcast(builder.gep(to, [at]), value.type.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(pointer, types.intp, types.float32, a, a, a, a), codegen


@intrinsic
def exp(typing_context, vector):
    """Return the exponential of each lane, to 1e-7 up to 88; zero below -87.3."""

    def codegen(context, builder, signature, arguments):
        (x,) = arguments
        floats, words = x.type, like(x, INT32)
        is_low = builder.fcmp_ordered("<", x, all_lanes(floats, _LOWEST_EXPONENT))
        x = builder.select(is_low, all_lanes(floats, _LOWEST_EXPONENT), x)
        n = builder.fmul(x, all_lanes(floats, 1.4426950408889634))
        n = call(builder, f"llvm.rint.v{floats.count}f32", floats, n)
        r = _multiply_add(builder, n, all_lanes(floats, -_LOG2_HIGH), x)
        r = _multiply_add(builder, n, all_lanes(floats, -_LOG2_LOW), r)
        y = _polynomial(builder, r, _EXP_COEFFICIENTS)
        y = builder.fadd(_multiply_add(builder, builder.fmul(y, r), r, r), all_lanes(floats, 1.0))
        exponent = builder.shl(builder.add(builder.fptosi(n, words), all_lanes(words, 127)), all_lanes(words, 23))
        return builder.select(is_low, all_lanes(floats, 0.0), builder.fmul(y, builder.bitcast(exponent, floats)))

    return vector(vector), codegen


def _polynomial(builder, x, coefficients):
    """Return a polynomial, its highest coefficient first."""
    y = all_lanes(x.type, coefficients[0])
    for coefficient in coefficients[1:]:
        y = _multiply_add(builder, y, x, all_lanes(x.type, coefficient))
    return y


@intrinsic
def drop(typing_context, weights, word, head, lowest_kept, factor):
    """Return the weights of an edge that dropout keeps, times a factor, and zeros: by `executor.keyed.edge_head_bits`.

    Args:
        word: bits of the edge.
        head: that of the first lane.
    """

    def codegen(context, builder, signature, arguments):
        weights, word, head, lowest_kept, factor = arguments
        words, count = like(weights, INT32), weights.type.count
        first = splat_lanes(builder, builder.trunc(head, INT32), count)
        numbers = builder.add(first, ir.Constant(words, list(range(1, count + 1))))
        bits = builder.xor(splat_lanes(builder, word, count), builder.mul(numbers, all_lanes(words, _GOLDEN)))
        for multiplier, shift in ((0x85EBCA6B, 13), (0xC2B2AE35, 16)):
            bits = builder.mul(bits, all_lanes(words, multiplier))
            bits = builder.xor(bits, builder.lshr(bits, all_lanes(words, shift)))
        is_kept = builder.icmp_signed(">=", bits, splat_lanes(builder, builder.trunc(lowest_kept, INT32), count))
        scaled = builder.fmul(weights, splat_lanes(builder, factor, count))
        return builder.select(is_kept, scaled, all_lanes(weights.type, 0.0))

    return weights(weights, types.uint32, types.intp, types.intp, types.float32), codegen
