"""Terms of the mask language: affine index expressions, comparisons, input entries, functions.

A mask element is a term over the output indices. Affine integer terms carry positions and
lengths; a comparison of two becomes an atom ``affine >= 0``; an element of a graph input is an
atom; everything else applies a function to such terms. Because every term is a function of its
atoms alone, trying all values of the atoms decides what a mask means for *all* lengths and
paddings.

Terms are simplified where they are made (``apply``, ``compare``, ``where``): comparisons that hold
for every position are decided, so what is left is what a reader wants to see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import ml_dtypes
import numpy as np

from subquad.passes.recognise.affine import (
    ONE,
    ZERO,
    Affine,
    Number,
    OpaqueError,
    Symbol,
    constant,
    divided,
    minimum,
    product,
)


@dataclass(frozen=True)
class AtLeastZero:
    """Atom: the integer expression is ``>= 0``. Made by ``at_least_zero`` only."""

    affine: Affine

    def __str__(self) -> str:
        left = [(s, c) for s, c in self.affine.terms if c > 0]
        right = [(s, -c) for s, c in self.affine.terms if c < 0]
        number = self.affine.constant
        return (
            f"{Affine(tuple(left), max(number, 0))} >= {Affine(tuple(right), -min(number, 0))}"
            if left
            else f"{Affine(tuple(right), -min(number, 0))} <= {Affine((), max(number, 0))}"
        )


@dataclass(frozen=True)
class Entry:
    """Atom: one element of a graph input, of unknown value."""

    source: str
    index: tuple[Affine, ...]
    dtype: str = "int64"

    def __str__(self) -> str:
        return f"{self.source}[{', '.join(map(str, self.index))}]"


@dataclass(frozen=True, eq=False)
class Apply:
    """A function of other terms, by ONNX operator name; equal only to itself (terms are shared).

    Attributes:
        op, args: the function and what it is applied to.
        dtype: its value is rounded to this type, as the graph does.
        choices: for ``Where``, the positions among the values it selects from, with repetition.
    """

    op: str
    args: tuple[Term, ...]
    dtype: str
    choices: int = 0

    def __str__(self) -> str:
        return f"{self.op}(…)"


Term: TypeAlias = Affine | AtLeastZero | Entry | Apply
Atom: TypeAlias = AtLeastZero | Entry


# --- comparisons ---------------------------------------------------------------------------


def at_least_zero(affine: Affine) -> Term:
    """``affine >= 0`` for whole coefficients: decided if it always or never holds, else an atom."""
    if affine.is_constant:
        return constant(affine.constant >= 0)
    divisor = math.gcd(*(int(c) for _, c in affine.terms))
    terms = tuple((s, int(c) // divisor) for s, c in affine.terms)
    whole = Affine(terms, math.floor(affine.constant / divisor))
    low = minimum(whole)
    if low is not None and low >= 0:
        return ONE
    low = minimum(whole.scaled(-1))
    if low is not None and low > 0:
        return ZERO
    return AtLeastZero(whole)


def negate(term: Term) -> Term:
    """Logical not, kept as an atom where possible (integers: not x >= 0 is -x - 1 >= 0)."""
    if isinstance(term, AtLeastZero):
        return at_least_zero(term.affine.scaled(-1) - ONE)
    if isinstance(term, Affine) and term.is_constant:
        return constant(term.constant == 0)
    if isinstance(term, Apply) and term.op == "Not":
        return truth(term.args[0])
    return Apply("Not", (term,), "bool")


def truth(term: Term) -> Term:
    """``term != 0``."""
    if isinstance(term, Affine) and term.is_constant:
        return constant(term.constant != 0)
    if isinstance(term, AtLeastZero | Entry):
        return term if isinstance(term, AtLeastZero) else Apply("Bool", (term,), "bool")
    if isinstance(term, Apply) and term.dtype == "bool":
        return term
    return Apply("Bool", (term,), "bool")


def _whole(affine: Affine) -> bool:
    """Whether the coefficients are whole numbers that float32 positions keep exact."""
    return all(float(c).is_integer() and abs(c) <= 1 << 16 for _, c in affine.terms)


def compare(op: str, left: Term, right: Term) -> Term:
    """Comparison of two terms; affine integers give atoms."""
    if isinstance(left, Affine) and isinstance(right, Affine):
        if left.is_constant and right.is_constant:
            return constant(_COMPARE[op](left.constant, right.constant))
        difference = left - right
        if _whole(difference) and math.isfinite(difference.constant):
            return _compare_whole(op, difference)
        # An infinite constant decides; NaN makes every comparison false.
        if _whole(difference):
            return constant(_COMPARE[op](difference.constant, 0))
    return Apply(op, (left, right), "bool")


def _compare_whole(op: str, difference: Affine) -> Term:
    """``sum(whole) + c`` against zero, where ``c`` may be a fraction."""
    whole, rest = Affine(difference.terms), difference.constant
    at_least = whole + constant(math.floor(rest))  # x + c >= 0
    above = whole + constant(math.ceil(rest) - 1)  # x + c > 0
    if op == "GreaterOrEqual":
        return at_least_zero(at_least)
    if op == "Greater":
        return at_least_zero(above)
    if op == "LessOrEqual":
        return negate(at_least_zero(above))
    if op == "Less":
        return negate(at_least_zero(at_least))
    if not float(rest).is_integer():
        return ZERO
    return both(at_least_zero(at_least), negate(at_least_zero(above)))


def both(left: Term, right: Term) -> Term:
    """Logical and."""
    left, right = truth(left), truth(right)
    if ZERO in (left, right):
        return ZERO
    if left == ONE or left == right:
        return right
    return left if right == ONE else Apply("And", (left, right), "bool")


def either(left: Term, right: Term) -> Term:
    """Logical or."""
    left, right = truth(left), truth(right)
    if ONE in (left, right):
        return ONE
    if left == ZERO or left == right:
        return right
    return left if right == ZERO else Apply("Or", (left, right), "bool")


def where(condition: Term, chosen: Callable[[], Term], other: Callable[[], Term]) -> Term:
    """Selection; a branch that is never taken is never made (it may lie outside the language)."""
    condition = truth(condition)
    if isinstance(condition, Affine):
        return chosen() if condition.constant else other()
    left, right = chosen(), other()
    if left == right:
        return left
    choices = _choices(left) + _choices(right)
    return Apply("Where", (condition, left, right), _dtype_of(left, right), choices)


def _choices(term: Term) -> int:
    if isinstance(term, Apply):
        return term.choices
    return int(isinstance(term, Affine) and not term.is_constant)


def _dtype_of(*terms: Term) -> str:
    """A type that holds the values of these terms; only ``Apply`` and ``Entry`` know theirs."""
    for term in terms:
        if isinstance(term, Apply | Entry):
            return term.dtype
    return "bool" if all(isinstance(t, AtLeastZero) or t in (ZERO, ONE) for t in terms) else "any"


# --- functions -----------------------------------------------------------------------------

_COMPARE: dict[str, Callable[[Number, Number], bool]] = {
    "GreaterOrEqual": lambda a, b: a >= b,
    "Greater": lambda a, b: a > b,
    "LessOrEqual": lambda a, b: a <= b,
    "Less": lambda a, b: a < b,
    "Equal": lambda a, b: a == b,
}


def _divide(a: Number, b: Number) -> Number:
    if isinstance(a, int) and isinstance(b, int):
        if b == 0:
            raise OpaqueError("an integer division by zero")
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return np.float64(a) / np.float64(b)


def _modulo(a: Number, b: Number) -> Number:
    if b == 0:
        raise OpaqueError("a remainder by zero")
    return a % b


_FUNCTIONS: dict[str, Callable[..., Number]] = {
    **_COMPARE,
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": _divide,
    "Mod": _modulo,
    "Fmod": lambda a, b: math.fmod(a, b) if b else math.nan,
    # NaN passes through ONNX Min and Max.
    "Min": lambda a, b: a if a != a or a < b else b,
    "Max": lambda a, b: a if a != a or a > b else b,
    "Neg": lambda a: -a,
    "Abs": abs,
    "Sign": lambda a: (a > 0) - (a < 0),
    "Floor": lambda a: np.floor(np.float64(a)),
    "Ceil": lambda a: np.ceil(np.float64(a)),
    "Round": lambda a: np.round(np.float64(a)),
    "And": lambda a, b: bool(a) and bool(b),
    "Or": lambda a, b: bool(a) or bool(b),
    "Xor": lambda a, b: bool(a) != bool(b),
    "Not": lambda a: not a,
    "Bool": bool,
    "Cast": lambda a: a,
    "IsNaN": lambda a: a != a,
    "IsInf": lambda a: abs(a) == np.inf,
    "Sqrt": lambda a: np.sqrt(np.float64(a)),
    "Exp": lambda a: np.exp(np.float64(a)),
    "Log": lambda a: np.log(np.float64(a)),
    "Pow": lambda a, b: a**b if isinstance(a, int) and b >= 0 else np.float64(a) ** np.float64(b),
    "Reciprocal": lambda a: np.float64(1) / np.float64(a),
}

FUNCTIONS = frozenset(_FUNCTIONS)

_FLOATS: dict[str, type[np.generic]] = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "float64": np.float64,
}
_MAX_CHOICES = 64
# Types in which positions and small multiples of them are exact.
EXACT_POSITIONS = ("int32", "int64", "float32", "float64", "any")


def rounded(value: Number, dtype: str) -> Number:
    """``value`` as a tensor of this type holds it; integers must fit."""
    if dtype == "any":
        return value
    if dtype == "bool":
        return int(bool(value))
    if dtype in _FLOATS:
        with np.errstate(all="ignore"):
            return float(_FLOATS[dtype](value))
    if not math.isfinite(value):
        raise OpaqueError(f"{value} converted to {dtype}")
    limits = np.iinfo(np.dtype(dtype))
    if not limits.min <= int(value) <= limits.max:
        raise OpaqueError(f"{value} does not fit {dtype}")
    return int(value)


def compute(op: str, values: list[Number], dtype: str) -> Number:
    """One operator on numbers, rounded to its type as the graph rounds it."""
    if dtype in _FLOATS:
        # Twice the precision, then rounded: the correctly rounded result of one operation.
        values = [np.float64(v) for v in values]
    with np.errstate(all="ignore"):
        return rounded(_FUNCTIONS[op](*values), dtype)


def apply(op: str, args: tuple[Term, ...], dtype: str) -> Term:
    """A function of terms of the operator's output type, simplified.

    Raises:
        OpaqueError: the operator takes positions out of the language.
    """
    if op not in FUNCTIONS:
        raise OpaqueError(f"operator {op} is outside the mask language")
    if all(isinstance(a, Affine) and a.is_constant for a in args):
        return constant(compute(op, [a.constant for a in args if isinstance(a, Affine)], dtype))
    if op == "Not":
        return negate(args[0])
    if op == "Bool":
        return truth(args[0])
    if op == "And":
        return both(*args)
    if op == "Or":
        return either(*args)
    for choice in args:
        if isinstance(choice, Apply) and choice.choices:
            return _lifted(op, args, dtype, choice)
    if any(isinstance(a, Affine) and not a.is_constant for a in args):
        result = _of_positions(op, args, dtype)
        if result is not None:
            return result
    return compare(op, *args) if op in _COMPARE else Apply(op, args, dtype)


def _lifted(op: str, args: tuple[Term, ...], dtype: str, choice: Apply) -> Term:
    """``f(where(c, a, b), x)`` as ``where(c, f(a, x), f(b, x))``."""
    if choice.choices > _MAX_CHOICES:
        raise OpaqueError(f"a selection between more than {_MAX_CHOICES} positions")
    condition, chosen, other = choice.args

    def branch(taken: Term) -> Term:
        return apply(op, tuple(taken if a is choice else a for a in args), dtype)

    return where(condition, lambda: branch(chosen), lambda: branch(other))


def _of_positions(op: str, args: tuple[Term, ...], dtype: str) -> Term | None:
    """Arithmetic that keeps positions affine; None where it only names a function of them."""
    if op not in _COMPARE and op not in ("Cast", "IsNaN", "IsInf") and dtype not in EXACT_POSITIONS:
        raise OpaqueError(f"positions computed in {dtype}")
    if not all(isinstance(a, Affine) for a in args):
        return None
    first = args[0]
    second = args[1] if len(args) > 1 else first
    assert isinstance(first, Affine) and isinstance(second, Affine)
    if op == "Add":
        return first + second
    if op == "Sub":
        return first - second
    if op == "Neg":
        return first.scaled(-1)
    if op == "Mul":
        finite = math.isfinite(first.constant) and math.isfinite(second.constant)
        return product(first, second) if finite else None
    if op == "Abs":
        return where(at_least_zero(first), lambda: first, lambda: first.scaled(-1))
    if op in ("Min", "Max") and _whole(first - second):
        smaller = compare("LessOrEqual", first, second)
        low, high = (first, second) if op == "Min" else (second, first)
        return where(smaller, lambda: low, lambda: high)
    if op in ("Floor", "Ceil", "Round") and _whole(first) and float(first.constant).is_integer():
        return first
    if op in ("IsNaN", "IsInf"):
        return ZERO
    if op == "Cast":
        return _cast_position(first, dtype)
    if op == "Div":
        return _divided(first, second, dtype)
    if op in ("Mod", "Fmod"):
        raise OpaqueError(f"positions modulo {second}: a strided or block pattern, not a band")
    return None


def _cast_position(affine: Affine, dtype: str) -> Affine | None:
    if dtype not in EXACT_POSITIONS:
        raise OpaqueError(f"position {affine} converted to {dtype}")
    if dtype.startswith("int") and not (_whole(affine) and float(affine.constant).is_integer()):
        raise OpaqueError(f"position {affine} rounded to an integer: blocks, not a band")
    return affine


def _divided(affine: Affine, by: Affine, dtype: str) -> Affine | None:
    if not by.is_constant:
        return _divided_by_dimension(affine, by) if dtype.startswith("int") else None
    if by.constant == 0:
        return None
    numbers = [c for _, c in affine.terms] + [affine.constant]
    if dtype.startswith("int"):
        if any(n % by.constant for n in numbers):
            raise OpaqueError(f"positions divided by {by}: blocks, not a band")
        return Affine(
            tuple((s, int(c) // int(by.constant)) for s, c in affine.terms),
            int(affine.constant) // int(by.constant),
        )
    return affine.scaled(1 / by.constant) if math.isfinite(by.constant) else None


def _divided_by_dimension(affine: Affine, by: Affine) -> Affine | None:
    """``batch * length / batch``: every term holds the divisor."""
    if len(by.terms) != 1 or by.constant or affine.constant:
        return None
    result = divided(affine, by)
    return result[0] if result is not None and result[1] == ZERO else None


# --- reading terms -------------------------------------------------------------------------


def atoms(term: Term) -> list[Atom]:
    """Distinct atoms in order of appearance."""
    found: dict[Atom, None] = {}
    seen: set[Apply] = set()
    stack = [term]
    while stack:
        current = stack.pop()
        if isinstance(current, AtLeastZero | Entry):
            found.setdefault(current, None)
        elif isinstance(current, Apply) and current not in seen:
            seen.add(current)
            stack.extend(reversed(current.args))
    return list(found)


def count_functions(term: Term) -> int:
    """The number of distinct function applications in a term."""
    seen: set[Apply] = set()
    stack = [term]
    while stack:
        current = stack.pop()
        if isinstance(current, Apply) and current not in seen:
            seen.add(current)
            stack.extend(current.args)
    return len(seen)


def constants(term: Term) -> set[Number]:
    """The numbers a term is made with."""
    seen: set[Apply] = set()
    found: set[Number] = set()
    stack = [term]
    while stack:
        current = stack.pop()
        if isinstance(current, Affine):
            found.add(current.constant)
        elif isinstance(current, Apply) and current not in seen:
            seen.add(current)
            stack.extend(current.args)
    return found


def evaluate(
    term: Term, values: Mapping[Atom, Number], sizes: Mapping[Symbol, int] | None = None
) -> Number:
    """Value of a term when its atoms have these values, in the precision of the graph.

    Args:
        term: the term.
        values: of all its atoms (comparisons: 0 or 1); with ``sizes``, of entries only.
        sizes: numbers for all symbols, to evaluate at one concrete position.

    Raises:
        OpaqueError: the value depends on a position itself, not only on comparisons.
    """
    known: dict[Apply, Number] = {}

    def visit(current: Term) -> Number:
        if isinstance(current, Affine):
            if current.is_constant:
                return current.constant
            if sizes is None:
                raise OpaqueError(
                    f"values depend on positions themselves ({current}), as a bias does"
                )
            return current.value(sizes)
        if isinstance(current, AtLeastZero) and sizes is not None:
            return int(current.affine.value(sizes) >= 0)
        if isinstance(current, AtLeastZero | Entry):
            return values[current]
        if current not in known:
            if current.op == "Where":  # the branch not taken may be undefined
                taken = current.args[1 if visit(current.args[0]) else 2]
                known[current] = visit(taken)
            else:
                known[current] = compute(
                    current.op, [visit(a) for a in current.args], current.dtype
                )
        return known[current]

    return visit(term)
