"""Affine terms over positions and sizes: ``sum(coefficient * symbol) + constant``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Number: TypeAlias = int | float


class OpaqueError(Exception):
    """The subgraph leaves the mask language; the message is the reason shown to the user."""


@dataclass(frozen=True)
class Symbol:
    """An index in ``[0, extent)`` or, without an extent, the size of a dimension (``>= 1``).

    ``factors`` are the names of the dimensions of which this one is the product, if it is.
    """

    name: str
    extent: Affine | None = None
    factors: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name

    @property
    def order(self) -> tuple[str, bool, str]:
        return self.name, self.extent is None, str(self.extent)

    @property
    def names(self) -> tuple[str, ...]:
        return self.factors or (self.name,)

    def size(self, sizes: Mapping[Symbol, int]) -> int:
        """The number it stands for, given those of dimensions and indices."""
        if self.factors:
            return math.prod(sizes[Symbol(name)] for name in self.factors)
        return sizes[self]


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
        return tuple(
            part
            for symbol, _ in self.terms
            for part in (map(Symbol, symbol.factors) if symbol.factors else (symbol,))
        )

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
    """The product of two dimensions as a dimension of its own; None for anything else."""
    if left.is_constant or right.is_constant:
        factor, other = (left, right) if left.is_constant else (right, left)
        return other.scaled(factor.constant)
    if any(len(a.terms) != 1 or a.constant or a.terms[0][0].extent for a in (left, right)):
        return None
    (a, by), (b, times) = left.terms[0], right.terms[0]
    return monomial((*a.names, *b.names), by * times)


def monomial(names: Sequence[str], coefficient: Number) -> Affine:
    if not names:
        return constant(coefficient)
    names = tuple(sorted(names))
    symbol = Symbol("*".join(names), factors=names if len(names) > 1 else ())
    return Affine(((symbol, coefficient),))


def position(name: str, extent: Affine) -> Affine:
    """An index along an axis of this size as a term; 0 where there is only one."""
    return ZERO if extent == ONE else Affine(((Symbol(name, extent), 1),))


def minimum(affine: Affine) -> Number | None:
    """A proved lower bound of an affine term, or None."""
    total = constant(affine.constant)
    for symbol, coefficient in affine.terms:
        if symbol.extent is None:
            total = total + Affine(((symbol, coefficient),))
        elif coefficient < 0:
            total = total + (symbol.extent - ONE).scaled(coefficient)
    if any(coefficient < 0 for _, coefficient in total.terms):
        return None
    # Dimensions are 1 at least.
    return total.constant + sum(coefficient for _, coefficient in total.terms)
