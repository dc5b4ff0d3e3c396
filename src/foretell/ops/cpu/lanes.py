"""Memory and numbers as the kernels see them: raw addresses, bfloat16 and float32 elements, an exponential.

A kernel is written once with `load` and `store`; `compiled.Kernel` puts those of the element type in their place.
Indices count elements and are never checked. Arithmetic is in float32; a store rounds to nearest, ties to even.
"""

from __future__ import annotations

from typing import Any, NoReturn, no_type_check

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

WIDTH = 16  # numbers in a vector
ZERO, ONE, HALF = np.float32(0), np.float32(1), np.float32(0.5)

_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_I32X16, _F32X16 = ir.VectorType(_I32, WIDTH), ir.VectorType(_F32, WIDTH)
_COEFFICIENTS = (
    1.9875691500e-4,
    1.3981999507e-3,
    8.3334519073e-3,
    4.1665795894e-2,
    1.6666665459e-1,
    5.0000001201e-1,
    1.0,
    1.0,
)


def load(address: int, index: int) -> float:
    """The element at an index, as float32."""
    _only_compiled()


def store(address: int, index: int, value: Any) -> None:
    """Round a float32 into the element at an index."""
    _only_compiled()


def _only_compiled() -> NoReturn:
    raise AssertionError("kernels run compiled")


@no_type_check
def _place(builder, address, index, kind):
    return builder.gep(builder.inttoptr(address, kind.as_pointer()), [index])


@intrinsic
@no_type_check
def load_bfloat16(typing, address, index):
    """A bfloat16 is the upper half of a float32."""

    def emit(context, builder, signature, args):
        bits = builder.zext(builder.load(_place(builder, args[0], args[1], _I16)), _I32)
        return builder.bitcast(builder.shl(bits, _I32(16)), _F32)

    return types.float32(types.int64, types.int64), emit


@intrinsic
@no_type_check
def store_bfloat16(typing, address, index, value):
    """Adding half of the last kept bit, less one where that bit is even, rounds to nearest even; NaN stays NaN."""

    def emit(context, builder, signature, args):
        value = args[2]
        bits = builder.bitcast(value, _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        rounded = builder.add(builder.add(bits, _I32(0x7FFF)), odd)
        upper = builder.lshr(rounded, _I32(16))
        upper = builder.select(builder.fcmp_unordered("uno", value, value), _I32(0x7FC0), upper)
        builder.store(builder.trunc(upper, _I16), _place(builder, args[0], args[1], _I16))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.float32), emit


@intrinsic
@no_type_check
def load_float32(typing, address, index):
    """A float32 element; also of scratch memory, whatever the element type."""

    def emit(context, builder, signature, args):
        return builder.load(_place(builder, args[0], args[1], _F32))

    return types.float32(types.int64, types.int64), emit


@intrinsic
@no_type_check
def store_float32(typing, address, index, value):
    """Into a float32 element; also of scratch memory."""

    def emit(context, builder, signature, args):
        builder.store(args[2], _place(builder, args[0], args[1], _F32))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.float32), emit


@intrinsic
@no_type_check
def load_int32(typing, address, index):
    """An int32, widened."""

    def emit(context, builder, signature, args):
        return builder.sext(builder.load(_place(builder, args[0], args[1], _I32)), _I64)

    return types.int64(types.int64, types.int64), emit


@intrinsic
@no_type_check
def load_int64(typing, address, index):
    """An int64."""

    def emit(context, builder, signature, args):
        return builder.load(_place(builder, args[0], args[1], _I64))

    return types.int64(types.int64, types.int64), emit


@intrinsic
@no_type_check
def store_int64(typing, address, index, value):
    """Into an int64."""

    def emit(context, builder, signature, args):
        builder.store(args[2], _place(builder, args[0], args[1], _I64))
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), emit


@intrinsic
@no_type_check
def order(typing, value):
    """An int32 that is ordered as the floats are; -0 counts as 0, NaNs lie beyond the infinities."""

    def emit(context, builder, signature, args):
        bits = builder.bitcast(args[0], _I32)
        flip = builder.and_(builder.ashr(bits, _I32(31)), _I32(0x7FFFFFFF))
        key = builder.xor(bits, flip)
        return builder.select(builder.icmp_signed("==", key, _I32(-1)), _I32(0), key)

    return types.int32(types.float32), emit


@intrinsic
@no_type_check
def ordered(typing, key):
    """The float32 whose `order` this is."""

    def emit(context, builder, signature, args):
        flip = builder.and_(builder.ashr(args[0], _I32(31)), _I32(0x7FFFFFFF))
        return builder.bitcast(builder.xor(args[0], flip), _F32)

    return types.float32(types.int32), emit


@intrinsic
@no_type_check
def exp(typing, x):
    """e^x to two units in the last place, without a branch, so that loops with it become vector code.

    Flat below -87.3, where float32 has no more exponents, infinite from 88.4 on; NaN stays NaN. 2^n of the nearest
    n, and a polynomial for the rest (the coefficients of the Cephes library's expf).
    """

    def emit(context, builder, signature, args):
        def at_most(bound, x, sign):
            return builder.select(builder.fcmp_ordered(sign, x, bound), bound, x)

        x = at_most(_F32(89.0), at_most(_F32(-87.3), args[0], "<"), ">")
        rint = builder.module.declare_intrinsic("llvm.rint", [_F32])
        n = builder.call(rint, [builder.fmul(x, _F32(1.4426950408889634))])
        rest = builder.fsub(x, builder.fmul(n, _F32(0.693359375)))
        rest = builder.fsub(rest, builder.fmul(n, _F32(-2.12194440e-4)))
        value = _F32(_COEFFICIENTS[0])
        for coefficient in _COEFFICIENTS[1:]:
            value = builder.fadd(builder.fmul(value, rest), _F32(coefficient))
        # n + 1.5 * 2^23 has n in its low bits, which become the exponent.
        shifted = builder.bitcast(builder.fadd(n, _F32(12582912.0)), _I32)
        power = builder.add(builder.shl(shifted, _I32(23)), _I32(0x3F800000))
        return builder.fmul(value, builder.bitcast(power, _F32))

    return types.float32(types.float32), emit


class _Vector(types.Type):  # type: ignore[misc]
    """Sixteen float32 in a register."""

    def __init__(self) -> None:
        super().__init__(name="float32x16")


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _F32X16)


VECTOR = _Vector()


def load_vector(address: int, index: int) -> Any:
    """The elements index .. index + 15, as float32."""
    _only_compiled()


@no_type_check
def _vector_at(builder, address, index, kind):
    place = builder.bitcast(
        _place(builder, address, index, kind), ir.VectorType(kind, WIDTH).as_pointer()
    )
    return builder.load(place, align=kind.width // 8 if kind is _I16 else 4)


@intrinsic
@no_type_check
def load_vector_bfloat16(typing, address, index):
    """Sixteen elements."""

    def emit(context, builder, signature, args):
        bits = builder.zext(_vector_at(builder, args[0], args[1], _I16), _I32X16)
        shifted = builder.shl(bits, ir.Constant(_I32X16, [16] * WIDTH))
        return builder.bitcast(shifted, _F32X16)

    return VECTOR(types.int64, types.int64), emit


@intrinsic
@no_type_check
def load_vector_float32(typing, address, index):
    """Sixteen elements."""

    def emit(context, builder, signature, args):
        return _vector_at(builder, args[0], args[1], _F32)

    return VECTOR(types.int64, types.int64), emit


@intrinsic
@no_type_check
def store_vector(typing, address, index, value):
    """Into sixteen float32 elements."""

    def emit(context, builder, signature, args):
        place = _place(builder, args[0], args[1], _F32)
        builder.store(args[2], builder.bitcast(place, _F32X16.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, VECTOR), emit


@intrinsic
@no_type_check
def spread(typing, value):
    """A vector of one number."""

    def emit(context, builder, signature, args):
        one = builder.insert_element(ir.Constant(_F32X16, ir.Undefined), args[0], _I32(0))
        return builder.shuffle_vector(one, one, ir.Constant(_I32X16, [0] * WIDTH))

    return VECTOR(types.float32), emit


@intrinsic
@no_type_check
def multiply_add(typing, a, b, c):
    """a * b + c, of vectors; contracted to one operation where the CPU has it."""

    def emit(context, builder, signature, args):
        return builder.fadd(builder.fmul(args[0], args[1]), args[2])

    return VECTOR(VECTOR, VECTOR, VECTOR), emit


@intrinsic
@no_type_check
def total_of(typing, vector):
    """The sum of a vector's numbers, halves first."""

    def emit(context, builder, signature, args):
        vector, width = args[0], WIDTH
        while width > 1:
            width //= 2
            low, high = (
                builder.shuffle_vector(
                    vector, vector, ir.Constant(ir.VectorType(_I32, width), places)
                )
                for places in (list(range(width)), list(range(width, 2 * width)))
            )
            vector = builder.fadd(low, high)
        return builder.extract_element(vector, _I32(0))

    return types.float32(VECTOR), emit
