"""Vector values in TIR: loads, stores, portable ``exp2`` and ``tanh``.

Everything is spelled with arithmetic that any LLVM target vectorises; no math library is called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm.script.ir_builder import tirx as T

Expr = Any
"""A TVM expression. TVM ships no types for them."""

LOG2_E = math.log2(math.e)

# 2^r on [-1/2, 1/2], minimax for the relative error (9.2e-8) with 2^0 exactly 1.
_EXP2_COEFFICIENTS = (
    0.6931470036506653,
    0.24022242426872253,
    0.05550733581185341,
    0.009671512991189957,
    0.001326472731307149,
)
_ROUND_TO_INTEGER = 12582912.0
"""1.5 * 2^23: adding it leaves the nearest integer in the low bits of the mantissa."""

EXP2_UNDERFLOW = -126.0
"""Below it ``exp2`` is exactly 0: results would be subnormal."""

_BITS_OF_ROOT_HALF = 0x3F3504F3
"""sqrt(1/2) as float32."""

# tanh(x) = x + x^3 p(x^2) for |x| < 0.625, from the public Cephes library.
_TANH_COEFFICIENTS = (
    -0.333332819422,
    0.133314422036,
    -0.0537397155531,
    0.0206390887954,
    -0.00570498872745,
)
_TANH_POLYNOMIAL_BELOW = 0.625


def bind(value: Expr) -> Expr:
    """Give an expression a name, so that it is computed once."""
    return T.Bind(value)


def settle(value: Expr) -> Expr:
    """Like ``bind`` for an int64 that is computed once and used as it is.

    It passes through a local buffer (a register once compiled), which hides its definition: TVM's
    simplifier follows bound names, and nested minima, maxima and quotients take it minutes.
    """
    cell = T.alloc_buffer((1,), "int64", scope="local")
    T.buffer_store(cell, _as_index(value), [index(0)])
    return T.Bind(cell[index(0)])


def index(value: int) -> Expr:
    return T.int64(value)


def constant(value: float, lanes: int) -> Expr:
    return broadcast(T.float32(value), lanes)


def integers(value: int, lanes: int) -> Expr:
    return broadcast(T.int32(value), lanes)


def broadcast(value: Expr, lanes: int) -> Expr:
    return T.Broadcast(value, lanes) if lanes > 1 else value


def vector_type(scalar: str, lanes: int) -> str:
    return f"{scalar}x{lanes}" if lanes > 1 else scalar


def load(buffer: Expr, *indices: Expr, lanes: int) -> Expr:
    """``lanes`` consecutive elements of the last axis from the last index on."""
    *outer, last = indices
    return buffer[(*outer, T.Ramp(_as_index(last), index(1), lanes))]


def store(buffer: Expr, value: Expr, *indices: Expr, lanes: int) -> None:
    *outer, last = indices
    T.buffer_store(buffer, value, [*outer, T.Ramp(_as_index(last), index(1), lanes)])


def store_scalar(buffer: Expr, value: Expr, *indices: Expr) -> None:
    T.buffer_store(buffer, value, list(indices))


def _as_index(value: Expr) -> Expr:
    return index(value) if isinstance(value, int) else value


def exp2(x: Expr, lanes: int) -> Expr:
    """``2^x`` with relative error below 2e-7; exactly 0 below ``EXP2_UNDERFLOW``, also at -inf.

    x must not exceed 127. 2^n is added to the exponent bits of the polynomial in x - n.
    """
    x = bind(x)
    as_float, as_integer = vector_type("float32", lanes), vector_type("int32", lanes)
    # As bits, since TVM simplifies (x + c) - c to x, in floating point too.
    shifted = bind(T.reinterpret(as_integer, x + constant(_ROUND_TO_INTEGER, lanes)))
    nearest = T.reinterpret(as_float, shifted) - constant(_ROUND_TO_INTEGER, lanes)
    value = polynomial(bind(x - nearest), (1.0, *_EXP2_COEFFICIENTS), lanes)
    exponent = T.shift_left(shifted, integers(23, lanes))
    scaled = T.reinterpret(as_float, T.reinterpret(as_integer, bind(value)) + exponent)
    return bind(T.Select(x < constant(EXP2_UNDERFLOW, lanes), constant(0.0, lanes), scaled))


def log2(x: Expr, lanes: int) -> Expr:
    """``log2(x)`` of positive normal numbers, with absolute error below 2e-7 + 1 ulp.

    The exponent, and the series of ``atanh((m - 1) / (m + 1))`` for m from 1/sqrt(2) to sqrt(2).
    """
    as_float, as_integer = vector_type("float32", lanes), vector_type("int32", lanes)
    bits = bind(T.reinterpret(as_integer, x))
    # Adding this carries into the exponent where the mantissa is sqrt(2) or more.
    rounded = bits + integers(0x3F800000 - _BITS_OF_ROOT_HALF, lanes)
    exponent = bind(T.shift_right(bind(rounded), integers(23, lanes)) - integers(127, lanes))
    mantissa = T.reinterpret(as_float, bits - T.shift_left(exponent, integers(23, lanes)))
    mantissa = bind(mantissa)
    ratio = bind((mantissa - constant(1.0, lanes)) / (mantissa + constant(1.0, lanes)))
    series = polynomial(bind(ratio * ratio), [1.0, 1 / 3, 1 / 5, 1 / 7, 1 / 9], lanes)
    return bind(T.cast(exponent, as_float) + ratio * series * constant(2.0 * LOG2_E, lanes))


def tanh(x: Expr, lanes: int) -> Expr:
    """``tanh`` with relative error below 3e-7, by a polynomial near 0 and ``exp2`` elsewhere."""
    x = bind(x)
    size = bind(T.max(x, constant(0.0, lanes) - x))
    # tanh is 1 in float32 from 9.1 on.
    power = exp2(T.min(size, constant(10.0, lanes)) * constant(2.0 * LOG2_E, lanes), lanes)
    one = constant(1.0, lanes)
    far = bind(one - constant(2.0, lanes) / (power + one))
    signed = T.Select(x < constant(0.0, lanes), constant(0.0, lanes) - far, far)
    square = bind(x * x)
    near = x + x * square * polynomial(square, _TANH_COEFFICIENTS, lanes)
    return bind(T.Select(size < constant(_TANH_POLYNOMIAL_BELOW, lanes), near, signed))


def polynomial(x: Expr, coefficients: Sequence[float], lanes: int) -> Expr:
    """Horner's scheme; coefficients from the constant term up."""
    value = constant(coefficients[-1], lanes)
    for coefficient in reversed(coefficients[:-1]):
        value = value * x + constant(coefficient, lanes)
    return value


def clamp(x: Expr, low: Expr, high: Expr) -> Expr:
    return settle(T.max(T.min(x, high), low))


def quotient(x: Expr, y: Expr) -> Expr:
    """``x // y`` of numbers that are not negative, without proving that they are not."""
    return settle(T.truncdiv(_as_index(x), _as_index(y)))


def remainder(x: Expr, y: Expr) -> Expr:
    """``x % y`` of numbers that are not negative."""
    return settle(T.truncmod(_as_index(x), _as_index(y)))


def blocks_of(x: Expr, size: Expr) -> Expr:
    """``ceil(x / size)``; 0 where x is negative or 0."""
    return quotient(T.max(x, index(0)) + (size - 1), size)
