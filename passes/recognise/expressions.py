"""Terms of the mask language: affine index expressions, comparisons, input entries, functions.

A mask element is a term over the output indices. Affine integer terms carry positions and
lengths; a comparison of two becomes an atom ``affine >= 0``; an element of a graph input is an
atom with value 0 or 1; everything else applies a function to such terms. Because every term is a
function of its atoms alone, trying all truth assignments decides what a mask means for *all*
lengths and paddings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Number: TypeAlias = int | float


class OpaqueError(Exception):
    """The subgraph leaves the mask language; the message is the reason shown to the user."""


@dataclass(frozen=True)
class Affine:
    """``sum(coefficient * symbol) + constant``; symbols are indices or dimension names."""

    terms: tuple[tuple[str, Number], ...] = ()
    constant: Number = 0

    @staticmethod
    def symbol(name: str) -> Affine:
        return Affine(((name, 1),))

    @property
    def is_constant(self) -> bool:
        return not self.terms

    def __add__(self, other: Affine) -> Affine:
        merged = dict(self.terms)
        for name, coefficient in other.terms:
            merged[name] = merged.get(name, 0) + coefficient
        return Affine(
            tuple(sorted((n, c) for n, c in merged.items() if c != 0)),
            self.constant + other.constant,
        )

    def scaled(self, factor: Number) -> Affine:
        if factor == 0:
            return Affine()
        return Affine(tuple((n, c * factor) for n, c in self.terms), self.constant * factor)

    def __sub__(self, other: Affine) -> Affine:
        return self + other.scaled(-1)

    def coefficient(self, name: str) -> Number:
        return dict(self.terms).get(name, 0)

    def without(self, *names: str) -> Affine:
        return Affine(tuple((n, c) for n, c in self.terms if n not in names), self.constant)

    def __str__(self) -> str:
        parts = [n if c == 1 else f"-{n}" if c == -1 else f"{c}*{n}" for n, c in self.terms]
        if self.constant or not parts:
            parts.append(str(self.constant))
        return " + ".join(parts).replace("+ -", "- ")


@dataclass(frozen=True)
class AtLeastZero:
    """Atom: the integer expression is ``>= 0``."""

    affine: Affine

    def __str__(self) -> str:
        return f"({self.affine} >= 0)"


@dataclass(frozen=True)
class Entry:
    """Atom: one element of a graph input whose values are unknown (taken as 0 or 1)."""

    source: str
    index: tuple[Affine, ...]

    def __str__(self) -> str:
        return f"{self.source}[{', '.join(map(str, self.index))}]"


@dataclass(frozen=True)
class Apply:
    """A function of other terms, by ONNX operator name."""

    op: str
    args: tuple[Term, ...]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})"


Term: TypeAlias = Affine | AtLeastZero | Entry | Apply
Atom: TypeAlias = AtLeastZero | Entry


def constant(value: Number | bool) -> Affine:
    return Affine((), int(value) if isinstance(value, bool | np.bool_) else value)


def negate(term: Term) -> Term:
    """Logical not, kept as an atom where possible (integers: not x >= 0 is -x - 1 >= 0)."""
    if isinstance(term, AtLeastZero):
        return AtLeastZero(term.affine.scaled(-1) - constant(1))
    if isinstance(term, Affine) and term.is_constant:
        return constant(int(term.constant == 0))
    return Apply("Not", (term,))


def compare(op: str, left: Term, right: Term) -> Term:
    """Comparison of two terms; affine integers give atoms."""
    if isinstance(left, Affine) and isinstance(right, Affine):
        if left.is_constant and right.is_constant:
            return constant(int(_COMPARE[op](left.constant, right.constant)))
        difference = left - right
        numbers = [c for _, c in difference.terms] + [difference.constant]
        if all(float(n).is_integer() for n in numbers):
            one = constant(1)
            if op == "GreaterOrEqual":
                return AtLeastZero(difference)
            if op == "Greater":
                return AtLeastZero(difference - one)
            if op == "LessOrEqual":
                return AtLeastZero(difference.scaled(-1))
            if op == "Less":
                return AtLeastZero(difference.scaled(-1) - one)
            if op == "Equal":
                both = (AtLeastZero(difference), AtLeastZero(difference.scaled(-1)))
                return Apply("And", both)
    return Apply(op, (left, right))


_COMPARE = {
    "GreaterOrEqual": lambda a, b: a >= b,
    "Greater": lambda a, b: a > b,
    "LessOrEqual": lambda a, b: a <= b,
    "Less": lambda a, b: a < b,
    "Equal": lambda a, b: a == b,
}

_FUNCTIONS = {
    **_COMPARE,
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a / b,
    "Min": min,
    "Max": max,
    "Neg": lambda a: -a,
    "And": lambda a, b: bool(a) and bool(b),
    "Or": lambda a, b: bool(a) or bool(b),
    "Xor": lambda a, b: bool(a) != bool(b),
    "Not": lambda a: not a,
    "Where": lambda c, a, b: a if c else b,
    "Bool": bool,
    "IsNaN": lambda a: a != a,
    "IsInf": lambda a: abs(a) == np.inf,
    "Sqrt": lambda a: a**0.5,
    "Pow": lambda a, b: a**b,
    "Reciprocal": lambda a: 1 / a,
}


def atoms(term: Term) -> list[Atom]:
    """Distinct atoms in order of appearance."""
    found: dict[Atom, None] = {}

    def visit(t: Term) -> None:
        if isinstance(t, AtLeastZero | Entry):
            found.setdefault(t, None)
        elif isinstance(t, Apply):
            for argument in t.args:
                visit(argument)

    visit(term)
    return list(found)


def evaluate(term: Term, truth: Mapping[Atom, bool]) -> float:
    """Value of a term under a truth assignment of its atoms, in float32 steps like the graph.

    Raises:
        OpaqueError: the value depends on a position itself, not only on comparisons.
    """
    if isinstance(term, Affine):
        if not term.is_constant:
            raise OpaqueError(f"values depend on positions themselves ({term}), as a bias does")
        return float(term.constant)
    if isinstance(term, AtLeastZero | Entry):
        return float(truth[term])
    if term.op == "Where":  # lazily: the branch not taken may be undefined
        chosen = term.args[1] if evaluate(term.args[0], truth) else term.args[2]
        return evaluate(chosen, truth)
    values = [np.float32(evaluate(a, truth)) for a in term.args]
    with np.errstate(all="ignore"):
        return float(np.float32(_FUNCTIONS[term.op](*values)))


def apply(op: str, *args: Term) -> Term:
    """Function application with the simplifications that keep affine terms affine."""
    if op == "Add" and all(isinstance(a, Affine) for a in args):
        left, right = args
        assert isinstance(left, Affine) and isinstance(right, Affine)
        return left + right
    if op == "Sub" and all(isinstance(a, Affine) for a in args):
        left, right = args
        assert isinstance(left, Affine) and isinstance(right, Affine)
        return left - right
    if op == "Mul" and all(isinstance(a, Affine) for a in args):
        left, right = args
        assert isinstance(left, Affine) and isinstance(right, Affine)
        if left.is_constant or right.is_constant:
            factor, other = (left, right) if left.is_constant else (right, left)
            return other.scaled(factor.constant)
    if op == "Neg" and isinstance(args[0], Affine):
        return args[0].scaled(-1)
    if op == "Not":
        return negate(args[0])
    if op in _COMPARE:
        return compare(op, *args)
    if op not in _FUNCTIONS:
        raise OpaqueError(f"operator {op} is outside the mask language")
    if all(isinstance(a, Affine) and a.is_constant for a in args):
        return constant(evaluate(Apply(op, tuple(args)), {}))
    if op == "Where" and isinstance(args[0], Affine) and args[0].is_constant:
        return args[1] if args[0].constant else args[2]
    return Apply(op, tuple(args))


def minimum(affine: Affine, bounds: Mapping[str, tuple[Affine, Affine | None]]) -> Number | None:
    """A proved lower bound of an affine term, or None.

    Args:
        affine: the term.
        bounds: for each index symbol, its smallest and largest value (affine in dimensions).
            Every other symbol is a dimension, hence >= 1.
    """
    total = constant(affine.constant)
    for name, coefficient in affine.terms:
        if name not in bounds:
            total = total + Affine(((name, coefficient),))
            continue
        low, high = bounds[name]
        end = low if coefficient > 0 else high
        if end is None:
            return None
        total = total + end.scaled(coefficient)
    if any(coefficient < 0 for _, coefficient in total.terms):
        return None
    return total.constant + sum(coefficient for _, coefficient in total.terms)
