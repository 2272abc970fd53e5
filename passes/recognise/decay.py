"""Decay: a factor on weights that falls with the distance of query and key, as RetNet has it.

    D[i, j] = gamma ** (i - j)  where j <= i,  0 elsewhere

Each element is read as zero or as the exponential of an affine term in the positions; that must be
a multiple of the distance, for every query, key and length. A table must be such powers throughout.

Sun et al., 2023, https://arxiv.org/abs/2307.08621, eq. 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from subquad.passes.recognise.affine import ZERO, Affine, Number, OpaqueError, constant
from subquad.passes.recognise.expressions import (
    Apply,
    AtLeastZero,
    Atom,
    Entry,
    Term,
    at_least_zero,
    evaluate,
    where,
)

_ROUNDING = 1e-6


class NoDecayError(OpaqueError):
    """It falls with the position, but is none that an operator has."""


def exponent(term: Term, values: Mapping[Atom, Number]) -> Affine | None:
    """``e`` of an element that is ``exp(e)`` when its atoms have these values; ``None``: it is 0.

    Raises:
        OpaqueError: it is something else.
    """
    if isinstance(term, AtLeastZero | Entry):
        return _logarithm(values[term])
    if isinstance(term, Affine):
        if not term.is_constant:
            raise OpaqueError(f"multiplies weights by {term}")
        return _logarithm(term.constant)
    if term.op == "Where":
        return exponent(term.args[1 if evaluate(term.args[0], values) else 2], values)
    if term.op in ("Cast", "Identity"):
        return exponent(term.args[0], values)
    if term.op in ("Mul", "Div"):
        first, second = (exponent(arg, values) for arg in term.args)
        if term.op == "Div" and second is None:
            raise OpaqueError("divides weights by zero")
        if first is None or second is None:
            return None
        return first + second if term.op == "Mul" else first - second
    if term.op == "Exp":
        power = _linear(term.args[0], values)
        return None if power.is_constant and power.constant == -math.inf else power
    if term.op == "Pow":
        base = exponent(term.args[0], values)
        if base is None or not base.is_constant:
            raise OpaqueError("multiplies weights by a power of positions")
        return _linear(term.args[1], values).scaled(base.constant)
    return _logarithm(evaluate(term, values))


def _logarithm(number: Number) -> Affine | None:
    if number < 0 or math.isnan(number):
        raise OpaqueError(f"multiplies weights by {number:g}")
    return None if number == 0 else constant(math.log(number))


def _linear(term: Term, values: Mapping[Atom, Number]) -> Affine:
    """A term that is affine in the positions when its atoms have these values."""
    if isinstance(term, Affine):
        return term
    if isinstance(term, AtLeastZero | Entry):
        return constant(values[term])
    if term.op == "Where":
        return _linear(term.args[1 if evaluate(term.args[0], values) else 2], values)
    if term.op in ("Cast", "Identity"):
        return _linear(term.args[0], values)
    if term.op == "Neg":
        return _linear(term.args[0], values).scaled(-1)
    if term.op in ("Add", "Sub", "Mul"):
        first, second = (_linear(arg, values) for arg in term.args)
        if term.op != "Mul":
            return first + second if term.op == "Add" else first - second
        if first.is_constant or second.is_constant:
            number, other = (first, second) if first.is_constant else (second, first)
            return other.scaled(number.constant)
        raise OpaqueError("multiplies weights by a power of a product of positions")
    return constant(evaluate(term, values))


def rate_of(power: Affine, distance: Affine) -> float:
    """``r`` of a power that is ``r * distance``.

    Raises:
        NoDecayError: it is something else, or grows.
    """
    lead = next((symbol for symbol, _ in distance.terms), None)
    if lead is None:
        raise NoDecayError("a decay over one position")
    rate = float(power.coefficient(lead)) / float(distance.coefficient(lead))
    rest = power - distance.scaled(rate)
    if any(abs(c) > _ROUNDING * abs(rate) for _, c in rest.terms) or abs(rest.constant) > _ROUNDING:
        raise NoDecayError(
            f"weights are multiplied by exp({power}), which is no decay by the distance"
        )
    if rate > 0:
        raise NoDecayError("weights grow with the distance: no operator of ours does that")
    return rate


def term_of_table(entry: Entry, table: NDArray[np.generic], query: Affine, key: Affine) -> Term:
    """The element of a table of powers, for every place in it.

    Raises:
        OpaqueError: it is read in another way, or holds something else.
    """
    places = [place for place in entry.index if not place.is_constant]
    if places != [query, key]:
        raise OpaqueError(f"{entry.source} is not read at query and key")
    picked = tuple(
        int(place.constant) if place.is_constant else slice(None) for place in entry.index
    )
    matrix = table[picked].astype(np.float64)
    size = min(matrix.shape)
    if size < 2 or matrix[1, 0] <= 0 or matrix[0, 0] != 1:
        raise OpaqueError(f"{entry.source} is no table of powers")
    base = float(matrix[size - 1, 0]) ** (1 / (size - 1)) if matrix[size - 1, 0] > 0 else 0.0
    base = base or float(matrix[1, 0])
    apart = np.arange(matrix.shape[0])[:, None] - np.arange(matrix.shape[1])
    want = np.where(apart >= 0, base ** np.maximum(apart, 0), 0.0)
    if not np.allclose(matrix, want, rtol=1e-5, atol=1e-30):
        raise OpaqueError(f"{entry.source} is no table of powers of the distance")
    difference = query - key
    return where(
        at_least_zero(difference),
        lambda: Apply("Pow", (constant(base), difference), "float32"),
        lambda: ZERO,
    )
