"""Vector values in TIR: loads, stores, portable ``exp2`` and ``tanh``.

Everything is spelled with arithmetic that any LLVM target vectorises; no math library is called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
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

    It passes through a buffer of one number (a register once compiled), which hides its definition:
    TVM's simplifier follows bound names, and nested minima, maxima and quotients take it minutes.
    Its scope is that of ``cells_in``.
    """
    return _through_memory(_as_index(value), "int64")


def settle_float(value: Expr) -> Expr:
    """Like ``settle`` for a float32."""
    return _through_memory(value, "float32")


_CELL_SCOPE = ContextVar("scope of buffers of one number", default="global")


@contextmanager
def cells_in(scope: str) -> Iterator[None]:
    """Where ``settle`` keeps numbers.

    For CPUs, TVM puts small global buffers on the stack and local ones on the heap; a GPU has no
    global ones, and local ones are registers.
    """
    before = _CELL_SCOPE.set(scope)
    try:
        yield
    finally:
        _CELL_SCOPE.reset(before)


def _through_memory(value: Expr, dtype: str) -> Expr:
    cell = T.alloc_buffer((1,), dtype, scope=_CELL_SCOPE.get())
    T.buffer_store(cell, value, [index(0)])
    return bind(cell[index(0)])


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
    return buffer[(*outer, _run(last, lanes))]


def store(buffer: Expr, value: Expr, *indices: Expr, lanes: int) -> None:
    *outer, last = indices
    T.buffer_store(buffer, value, [*outer, _run(last, lanes)])


def _run(first: Expr, lanes: int) -> Expr:
    first = _as_index(first)
    return T.Ramp(first, index(1), lanes) if lanes > 1 else first


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


def sigmoid(x: Expr, lanes: int) -> Expr:
    """``1 / (1 + 2^-x)`` with relative error below 5e-7; exactly 0 at -inf."""
    x = bind(x)
    zero, one = constant(0.0, lanes), constant(1.0, lanes)
    power = bind(exp2(zero - T.max(x, zero - x), lanes))
    return bind(T.Select(x < zero, power, one) / (one + power))


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


def shuffle(vectors: Sequence[Expr], lanes: Sequence[int]) -> Expr:
    """A vector of the numbered elements of ``vectors``, which are numbered one after the other."""
    return bind(T.Shuffle(list(vectors), [T.int32(lane) for lane in lanes]))


def transposed(rows: Sequence[Expr]) -> list[Expr]:
    """The columns of a square of 4 or 8 bound vectors.

    In steps that stay within halves of four elements, which processors shuffle fastest.
    """
    size = len(rows)
    halves = range(0, size, 4)

    def zipped(a: Expr, b: Expr, pattern: tuple[int, int, int, int]) -> Expr:
        """Elements 0-3 of the pattern are those of ``a`` in each half, 4-7 those of ``b``."""
        places = [half + i if i < 4 else size + half + i - 4 for half in halves for i in pattern]
        return shuffle((a, b), places)

    low, high = (0, 4, 1, 5), (2, 6, 3, 7)
    columns: list[list[Expr]] = []
    for at in halves:
        a, b, c, d = rows[at : at + 4]
        pairs = [(zipped(a, b, part), zipped(c, d, part)) for part in (low, high)]
        columns.append(
            [zipped(x, y, part) for x, y in pairs for part in ((0, 1, 4, 5), (2, 3, 6, 7))]
        )
    if size == 4:
        return columns[0]
    whole = [range(0, 4), range(4, 8)]
    return [
        shuffle((first, last), [*half, *(size + i for i in half)])
        for half in whole
        for first, last in zip(*columns, strict=True)
    ]


def sum_four(vectors: Sequence[Expr], lanes: int) -> Expr:
    """A vector of the sums of the elements of four bound vectors."""

    def pairwise(a: Expr, b: Expr) -> Expr:
        """Sums of neighbours: in each half of four elements two of ``a``, then two of ``b``."""
        even = [at + i for at in range(0, lanes, 4) for i in (0, 2, lanes, lanes + 2)]
        return bind(shuffle((a, b), even) + shuffle((a, b), [place + 1 for place in even]))

    a, b, c, d = vectors
    sums = pairwise(pairwise(a, b), pairwise(c, d))
    while lanes > 4:
        lanes //= 2
        sums = bind(shuffle((sums,), range(lanes)) + shuffle((sums,), range(lanes, 2 * lanes)))
    return sums


def sum_lanes(vector: Expr, lanes: int) -> Expr:
    """The sum of a bound vector's elements."""
    return fold_lanes(vector, lanes, lambda a, b: a + b)


def fold_lanes(vector: Expr, lanes: int, join: Callable[[Expr, Expr], Expr]) -> Expr:
    """All elements of a bound vector joined, by halves."""
    while lanes > 1:
        lanes //= 2
        low, high = shuffle((vector,), range(lanes)), shuffle((vector,), range(lanes, 2 * lanes))
        vector = bind(join(low, high))
    return vector
