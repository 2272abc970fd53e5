"""What is certain about values of a row of scores that sees a key: ranges, by interval arithmetic.

Guards against rows that see no key reduce the scores, the weights or a mask over the keys, compare,
and replace. Whether such a guard spares every row that sees a key is decided here: each value is
followed with two ranges, one for its entry at a key that the row sees and one for its entry at any
key, from what it means to be seen (a mask is true there, or adds no hiding value).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from subquad.kernels.operator import HIDING_BIAS
from subquad.passes.recognise.affine import ONE, OpaqueError
from subquad.passes.recognise.bias import summands, uniform
from subquad.passes.recognise.mask import Mask
from subquad.passes.recognise.symbolic import Interpreter

_LARGEST = float(np.finfo(np.float32).max)
_MAX_DEPTH = 24


@dataclass(frozen=True)
class Span:
    """The values a number may have: ``low <= x <= high``, and NaN if ``nan``."""

    low: float
    high: float
    nan: bool = False

    def is_exactly(self, number: float) -> bool:
        return not self.nan and self.low == self.high == number

    @property
    def is_finite(self) -> bool:
        return not self.nan and math.isfinite(self.low) and math.isfinite(self.high)

    def hull(self, other: Span) -> Span:
        return Span(min(self.low, other.low), max(self.high, other.high), self.nan or other.nan)


_UNKNOWN = Span(-math.inf, math.inf, nan=True)
_FALSE, _TRUE, _EITHER = Span(0, 0), Span(1, 1), Span(0, 1)


@dataclass(frozen=True)
class Fact:
    """About a tensor whose last axis is the keys, or has one entry for the row.

    Attributes:
        seen: its entry at some key that the row sees.
        every: its entry at any key.
    """

    seen: Span
    every: Span


_NOTHING = Fact(_UNKNOWN, _UNKNOWN)


class Facts:
    """Facts about values around one softmax, in rows that see a key.

    Args:
        interpreter: has read the graph.
        masks: what acts on the scores.
    """

    def __init__(self, interpreter: Interpreter, masks: Iterable[Mask]) -> None:
        self._interpreter = interpreter
        self._known: dict[ir.Value, Fact] = {}
        for mask in masks:
            for value, kind in (mask, *summands(mask, interpreter)):
                if uniform(value, interpreter) is not None:
                    continue
                if kind == "additive":
                    # Larger than what hides a key.
                    seen = Span(HIDING_BIAS, _LARGEST)
                    self._known[value] = Fact(seen, Span(-math.inf, _LARGEST))
                else:
                    self._known[value] = Fact(_TRUE if kind == "visible" else _FALSE, _EITHER)

    def scores(self, value: ir.Value) -> None:
        """``value`` is what the softmax reads."""
        self._known[value] = Fact(Span(HIDING_BIAS, _LARGEST), Span(-math.inf, _LARGEST))

    def weights(self, value: ir.Value) -> None:
        """``value`` is what a softmax gives, or the same with some entries set to zero."""
        self._known[value] = Fact(_EITHER, _EITHER)

    def of(self, value: ir.Value, depth: int = 0) -> Fact:
        if value not in self._known:
            self._known[value] = self._read(value, depth)
        return self._known[value]

    def _read(self, value: ir.Value, depth: int) -> Fact:
        number = uniform(value, self._interpreter)
        if number is not None:
            span = _UNKNOWN if number != number else Span(number, number)
            return Fact(span, span)
        node = value.producer()
        if node is None or depth > _MAX_DEPTH or node.domain not in ("", "ai.onnx"):
            return _NOTHING
        inputs = [v for v in node.inputs if v is not None]
        if node.op_type in _REDUCTIONS:
            return self._reduced(node, inputs, depth)
        if node.op_type in ("Identity", "Expand", "Unsqueeze"):
            same = self._last_axis_stays(node, inputs[0], value)
            return self.of(inputs[0], depth + 1) if same else _NOTHING
        if node.op_type in ("Cast", "CastLike"):
            dtype = self._interpreter.tensor(value).dtype or value.dtype
            fact = self.of(inputs[0], depth + 1)
            return Fact(_cast(fact.seen, dtype), _cast(fact.every, dtype))
        function = _ELEMENTWISE.get(node.op_type)
        if function is None or len(inputs) != len(node.inputs):
            return _NOTHING
        facts = [self.of(v, depth + 1) for v in inputs]
        return Fact(function(*(f.seen for f in facts)), function(*(f.every for f in facts)))

    def _last_axis_stays(self, node: ir.Node, source: ir.Value, value: ir.Value) -> bool:
        try:
            before = self._interpreter.tensor(source).shape
            after = self._interpreter.tensor(value).shape
        except OpaqueError:
            return False
        if not before or len(after) < len(before):
            return False
        if node.op_type == "Unsqueeze":
            axes = _constant_axes(node)
            return axes is not None and not {-1, len(after) - 1} & set(axes)
        return before[-1] in (after[-1], ONE)

    def _reduced(self, node: ir.Node, inputs: list[ir.Value], depth: int) -> Fact:
        """A reduction of the last axis that keeps it: one entry for each row."""
        keep = node.attributes.get("keepdims")
        axes = _constant_axes(node)
        rank = len(self._interpreter.tensor(inputs[0]).shape)
        if axes is None or len(axes) != 1 or axes[0] not in (-1, rank - 1):
            return _NOTHING
        if keep is not None and not keep.as_int():
            return _NOTHING
        fact = self.of(inputs[0], depth + 1)
        span = _REDUCTIONS[node.op_type](fact)
        return Fact(span, span)


def reduces_last_axis(node: ir.Node, rank: int) -> bool:
    """Whether a reduction goes over the last axis and keeps it."""
    keep, axes = node.attributes.get("keepdims"), _constant_axes(node)
    return (keep is None or bool(keep.as_int())) and axes in ([-1], [rank - 1])


def _constant_axes(node: ir.Node) -> list[int] | None:
    axes = node.inputs[1] if len(node.inputs) > 1 else None
    tensor = None if axes is None else ir.convenience.get_const_tensor(axes)
    return None if tensor is None else [int(axis) for axis in tensor.numpy().reshape(-1)]


# --- reductions ----------------------------------------------------------------------------


def _largest(fact: Fact) -> Span:
    low = max(fact.seen.low, fact.every.low)
    return Span(low, fact.every.high, fact.every.nan)


def _smallest(fact: Fact) -> Span:
    high = min(fact.seen.high, fact.every.high)
    return Span(fact.every.low, high, fact.every.nan)


def _sum(fact: Fact) -> Span:
    if fact.every.nan or fact.every.low < 0:
        return _UNKNOWN
    return Span(max(fact.seen.low, fact.every.low), math.inf)


_REDUCTIONS: dict[str, Callable[[Fact], Span]] = {
    "ReduceMax": _largest,
    "ReduceMin": _smallest,
    "ReduceSum": _sum,
}


# --- operators on single entries -----------------------------------------------------------


def _cast(span: Span, dtype: ir.DataType | None) -> Span:
    if dtype == ir.DataType.BOOL:
        if span.is_exactly(0):
            return _FALSE
        without_zero = span.low > 0 or span.high < 0
        return _TRUE if without_zero else _EITHER
    if dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE):
        return span
    if dtype in (ir.DataType.INT32, ir.DataType.INT64):
        small = span.is_finite and max(abs(span.low), abs(span.high)) < 1 << 30
        return Span(math.trunc(span.low), math.trunc(span.high)) if small else _UNKNOWN
    return _UNKNOWN


def _not(span: Span) -> Span:
    return Span(1 - span.high, 1 - span.low)


def _less(left: Span, right: Span) -> Span:
    if left.low >= right.high:
        return _FALSE
    sure = left.high < right.low and not (left.nan or right.nan)
    return _TRUE if sure else _EITHER


def _at_most(left: Span, right: Span) -> Span:
    if left.low > right.high:
        return _FALSE
    sure = left.high <= right.low and not (left.nan or right.nan)
    return _TRUE if sure else _EITHER


def _equal(left: Span, right: Span) -> Span:
    if left.high < right.low or right.high < left.low:
        return _FALSE
    same = left.low == left.high == right.low == right.high and not (left.nan or right.nan)
    return _TRUE if same else _EITHER


def _add(left: Span, right: Span) -> Span:
    if not (left.is_finite and right.is_finite):
        return _UNKNOWN
    return Span(left.low + right.low, left.high + right.high)


def _negative(span: Span) -> Span:
    return Span(-span.high, -span.low, span.nan)


def _times(left: Span, right: Span) -> Span:
    if not (left.is_finite and right.is_finite):
        return _UNKNOWN
    corners = [a * b for a in (left.low, left.high) for b in (right.low, right.high)]
    return Span(min(corners), max(corners))


def _where(condition: Span, chosen: Span, other: Span) -> Span:
    if condition.is_exactly(1):
        return chosen
    return other if condition.is_exactly(0) else chosen.hull(other)


_ELEMENTWISE: dict[str, Callable[..., Span]] = {
    "Not": _not,
    "And": lambda a, b: Span(min(a.low, b.low), min(a.high, b.high)),
    "Or": lambda a, b: Span(max(a.low, b.low), max(a.high, b.high)),
    "Less": _less,
    "LessOrEqual": _at_most,
    "Greater": lambda a, b: _less(b, a),
    "GreaterOrEqual": lambda a, b: _at_most(b, a),
    "Equal": _equal,
    "IsNaN": lambda a: _EITHER if a.nan else _FALSE,
    "IsInf": lambda a: _FALSE if math.isfinite(a.low) and math.isfinite(a.high) else _EITHER,
    "Add": _add,
    "Sub": lambda a, b: _add(a, _negative(b)),
    "Mul": _times,
    "Neg": _negative,
    "Where": _where,
}
