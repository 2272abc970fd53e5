"""Affine terms over positions and sizes: ``sum(coefficient * symbol) + constant``."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Number: TypeAlias = int | float
_MAX_TERMS = 64
_MAY_BE_EMPTY = "past"
"""How names of dimensions begin that may be 0: tokens of earlier calls. All others are 1 at least.
Nothing else follows from a name, and nothing is proved that fails at 0."""


class OpaqueError(Exception):
    """The subgraph leaves the mask language; the message is the reason shown to the user."""


@dataclass(frozen=True)
class Symbol:
    """An index in ``[0, extent)`` or, without an extent, the size of a dimension (``>= least``).

    ``factors`` are the symbols of which this one is the product, if it is: dimensions, and at most
    one index.
    """

    name: str
    extent: Affine | None = None
    factors: tuple[Symbol, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def order(self) -> tuple[str, bool, str]:
        return self.name, self.extent is None, str(self.extent)

    @property
    def parts(self) -> tuple[Symbol, ...]:
        return self.factors or (self,)

    @property
    def least(self) -> int:
        """Of a dimension or a product of dimensions: the smallest size there is."""
        return int(not any(part.name.startswith(_MAY_BE_EMPTY) for part in self.parts))

    @property
    def is_index(self) -> bool:
        return any(part.extent is not None for part in self.parts)

    def size(self, sizes: Mapping[Symbol, int]) -> int:
        """The number it stands for, given those of dimensions and indices."""
        return math.prod(sizes[part] for part in self.parts)


@dataclass(frozen=True)
class Affine:
    """``sum(coefficient * symbol) + constant``."""

    terms: tuple[tuple[Symbol, Number], ...] = ()
    constant: Number = 0

    @property
    def is_constant(self) -> bool:
        return not self.terms

    def __add__(self, other: Affine) -> Affine:
        if not other.terms:
            return Affine(self.terms, self.constant + other.constant)
        merged = dict(self.terms)
        for symbol, coefficient in other.terms:
            merged[symbol] = merged.get(symbol, 0) + coefficient
        kept = sorted(((s, c) for s, c in merged.items() if c != 0), key=lambda t: t[0].order)
        return Affine(tuple(kept), self.constant + other.constant)

    def scaled(self, factor: Number) -> Affine:
        if factor == 0:
            return Affine()
        return Affine(tuple((s, c * factor) for s, c in self.terms), self.constant * factor)

    def __sub__(self, other: Affine) -> Affine:
        return self + other.scaled(-1)

    def coefficient(self, symbol: Symbol) -> Number:
        return next((c for s, c in self.terms if s == symbol), 0)

    def without(self, *symbols: Symbol) -> Affine:
        return Affine(tuple((s, c) for s, c in self.terms if s not in symbols), self.constant)

    @property
    def symbols(self) -> tuple[Symbol, ...]:
        """Indices and dimensions it is made of; products are taken apart."""
        return tuple(part for symbol, _ in self.terms for part in symbol.parts)

    def value(self, sizes: Mapping[Symbol, int]) -> Number:
        """The number it stands for under sizes (and indices) of all its symbols."""
        return self.constant + sum(c * s.size(sizes) for s, c in self.terms)

    def __str__(self) -> str:
        parts = [str(s) if c == 1 else f"-{s}" if c == -1 else f"{c}*{s}" for s, c in self.terms]
        if self.constant or not parts:
            parts.append(f"{self.constant:g}")
        return " + ".join(parts).replace("+ -", "- ")


def constant(value: Number | bool) -> Affine:
    return Affine((), int(value) if isinstance(value, bool | np.bool_) else value)


ZERO = constant(0)
ONE = constant(1)


def dimension(name: str) -> Affine:
    """The size of a dimension as a term."""
    return Affine(((Symbol(name), 1),))


def product(left: Affine, right: Affine) -> Affine | None:
    """The product of two terms; None where two indices meet, or the product is too large."""
    if left.is_constant or right.is_constant:
        factor, other = (left, right) if left.is_constant else (right, left)
        return other.scaled(factor.constant)
    if len(left.terms) * len(right.terms) > _MAX_TERMS:
        return None
    total = left.scaled(right.constant) + right.scaled(left.constant)
    total = total - constant(left.constant * right.constant)
    for a, by in left.terms:
        for b, times in right.terms:
            if a.is_index and b.is_index:
                return None
            total = total + monomial((*a.parts, *b.parts), by * times)
    return total


def monomial(parts: Sequence[Symbol], coefficient: Number) -> Affine:
    """A multiple of the product of dimensions and at most one index."""
    if not parts:
        return constant(coefficient)
    if len(parts) == 1:
        return Affine(((parts[0], coefficient),))
    parts = tuple(sorted(parts, key=lambda symbol: symbol.order))
    name = "*".join(part.name for part in parts)
    return Affine(((Symbol(name, factors=parts), coefficient),))


def divided(flat: Affine, size: Affine) -> tuple[Affine, Affine] | None:
    """Quotient and remainder by a positive size, where both stay affine for every index."""
    if len(size.terms) > 1 and not size.constant:
        return _divided_by_sum(flat, size)
    if size.terms and size.constant:
        return None
    (divisor, number), *_ = size.terms or ((Symbol(""), size.constant),)
    divisor_parts = Counter(divisor.parts if size.terms else ())
    whole, rest = ZERO, constant(flat.constant)
    if size.is_constant:
        quotient, remainder = divmod(int(flat.constant), int(number))
        whole, rest = constant(quotient), constant(remainder)
    for symbol, coefficient in flat.terms:
        left = Counter(symbol.parts)
        left.subtract(divisor_parts)
        if min(left.values()) < 0 or coefficient % number:
            rest = rest + Affine(((symbol, coefficient),))
        else:
            whole = whole + monomial(tuple(left.elements()), int(coefficient) // int(number))
    return (whole, rest) if _is_remainder(rest, size) else None


def _divided_by_sum(flat: Affine, size: Affine) -> tuple[Affine, Affine] | None:
    """By ``past + length``: every multiple of its first symbol must belong to one of the sum."""
    lead, number = size.terms[0]
    whole, rest = ZERO, flat
    for symbol, coefficient in flat.terms:
        left = Counter(symbol.parts)
        left.subtract(lead.parts)
        if min(left.values()) < 0 or coefficient % number:
            continue
        part = monomial(tuple(left.elements()), int(coefficient) // int(number))
        times = product(part, size)
        if times is None:
            return None
        whole, rest = whole + part, rest - times
    return (whole, rest) if _is_remainder(rest, size) else None


def _is_remainder(rest: Affine, size: Affine) -> bool:
    low, room = minimum(rest), minimum(size - ONE - rest)
    return low is not None and low >= 0 and room is not None and room >= 0


def position(name: str, extent: Affine) -> Affine:
    """An index along an axis of this size as a term; 0 where there is only one."""
    return ZERO if extent == ONE else Affine(((Symbol(name, extent), 1),))


def minimum(affine: Affine) -> Number | None:
    """A proved lower bound of an affine term, or None."""
    total = constant(affine.constant)
    for symbol, coefficient in affine.terms:
        if not symbol.is_index:
            total = total + Affine(((symbol, coefficient),))
        elif coefficient < 0:
            largest = _largest(symbol)
            if largest is None:
                return None
            total = total + largest.scaled(coefficient)
    if any(coefficient < 0 for _, coefficient in total.terms):
        return None
    return total.constant + sum(coefficient * symbol.least for symbol, coefficient in total.terms)


def _largest(symbol: Symbol) -> Affine | None:
    """The largest value of an index, or of its product with dimensions."""
    result: Affine | None = ONE
    for part in symbol.parts:
        factor = Affine(((part, 1),)) if part.extent is None else part.extent - ONE
        result = None if result is None else product(result, factor)
    return result
