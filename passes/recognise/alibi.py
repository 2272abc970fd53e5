"""ALiBi: a bias that is proved to be linear in the distance of query and key.

    slope * (key position - query position)         -slope * |query position - key position|

What is constant along the keys of a row cancels in the softmax, so ``slope * key position`` (BLOOM)
and ``slope * (key position - last position)`` (MPT) are the first form; not so beside a sink, whose
logit has no such constant. A bias that is computed is read symbolically; one that is looked up in a
table must be linear over the whole table.

Press et al., 2022, https://arxiv.org/abs/2108.12409.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.passes.recognise.affine import (
    ONE,
    ZERO,
    Affine,
    Number,
    OpaqueError,
    Symbol,
    constant,
    position,
)
from subquad.passes.recognise.expressions import Apply, AtLeastZero, Entry, Term
from subquad.passes.recognise.mask import ScoreShape
from subquad.passes.recognise.site import MaskPredicate
from subquad.passes.recognise.symbolic import Interpreter, TableInterpreter

AlibiKind: TypeAlias = Literal["signed", "absolute"]
# Products of a slope and a position, rounded to float32, relative to the largest of them.
_ROUNDING = 2.0**-22


@dataclass(frozen=True)
class Alibi:
    """The bias of one attention.

    Attributes:
        value: the source's tensor.
        kind: as in ``AttentionVariant``.
        slopes: for each head.
    """

    value: ir.Value
    kind: AlibiKind
    slopes: tuple[float, ...]


def read_alibi(
    value: ir.Value,
    shape: ScoreShape,
    predicate: MaskPredicate,
    interpreter: TableInterpreter,
    *,
    beside_sinks: bool,
) -> Alibi:
    """What ``value``, which is added to the scores, is as ALiBi.

    Args:
        value: broadcast to the scores.
        shape: of the scores.
        predicate: which pairs count: a query that sees no later key has no use for its bias there.
        interpreter: reads tables as entries.
        beside_sinks: what is constant along a row counts.

    Raises:
        OpaqueError: it is something else.
    """
    heads = shape.heads or ONE
    if not heads.is_constant:
        raise OpaqueError(f"a bias of {heads} heads")
    query, key = position("i", shape.query_len), position("j", shape.kv_len)
    if not key.terms:
        raise OpaqueError("a bias over one key")
    offset = shape.kv_len - shape.query_len if predicate.alignment == "end" else ZERO
    distance = query + offset - key
    kinds: set[AlibiKind] = set()
    slopes: list[float] = []
    for head in range(int(heads.constant)):
        term = _element(value, head, shape, interpreter)
        kind, slope, rest = _read(term, distance, key.terms[0][0], predicate, interpreter)
        if beside_sinks and rest != ZERO:
            raise OpaqueError(f"beside a sink, {rest} does not cancel")
        kinds |= {kind} if slope else set()
        slopes.append(slope)
    if len(kinds) != 1:
        raise OpaqueError("heads differ in how distances count" if kinds else "all slopes are 0")
    return Alibi(value, kinds.pop(), tuple(slopes))


def _element(value: ir.Value, head: int, shape: ScoreShape, interpreter: Interpreter) -> Term:
    """The bias of one head at query ``i`` and key ``j`` of batch row ``b``."""
    dims, axes = interpreter.tensor(value).shape, shape.axes
    index: list[Term] = []
    for (name, size), dim in zip(axes[len(axes) - len(dims) :], dims, strict=True):
        if dim == ONE:
            index.append(ZERO)
        else:
            index.append(constant(head) if name == "h" else position(name, size))
    return interpreter.element(value, tuple(index))


def _read(
    term: Term,
    distance: Affine,
    key: Symbol,
    predicate: MaskPredicate,
    interpreter: TableInterpreter,
) -> tuple[AlibiKind, float, Affine | None]:
    """Kind and slope of one head, and what is left of the bias; None: not known."""
    if isinstance(term, Affine):
        slope = _slope(term, key)
        return "signed", slope, term + distance.scaled(slope)
    if isinstance(term, Entry):
        return _from_table(term, key, interpreter)
    if isinstance(term, Apply) and term.op == "Where":
        return _absolute(term, distance, key, predicate)
    raise OpaqueError(f"the bias is {term}, not a multiple of a distance")


def _slope(term: Affine, key: Symbol) -> float:
    """How it grows with the key; no other part of it may depend on the key."""
    if any(key in symbol.parts for symbol, _ in term.terms if symbol != key):
        raise OpaqueError(f"the bias {term} grows with the length too")
    return float(term.coefficient(key))


def _absolute(
    term: Apply, distance: Affine, key: Symbol, predicate: MaskPredicate
) -> tuple[AlibiKind, float, Affine | None]:
    """``where(distance >= 0, c - s * distance, c + s * distance)``, either way round."""
    condition, before, after = term.args
    if not (
        isinstance(condition, AtLeastZero)
        and isinstance(before, Affine)
        and isinstance(after, Affine)
    ):
        raise OpaqueError("the bias is selected by more than a distance")
    if condition.affine.coefficient(key) > 0:  # it holds for later keys
        before, after = after, before
        tested = condition.affine.scaled(-1) - ONE
    else:
        tested = condition.affine
    gap = tested - distance
    if not gap.is_constant or gap.constant not in (-1, 0):
        raise OpaqueError(f"the bias changes at {condition}, not at the query's own position")
    slope = _slope(before, key)
    left, right = before + distance.scaled(slope), after - distance.scaled(slope)
    if predicate.is_causal:
        return "signed", slope, left  # later keys are hidden
    if left != right or any(key in symbol.parts for symbol, _ in left.terms):
        raise OpaqueError("the bias is not the same on both sides of the query")
    return "absolute", slope, left


# --- tables --------------------------------------------------------------------------------


def _from_table(
    entry: Entry, key: Symbol, interpreter: TableInterpreter
) -> tuple[AlibiKind, float, Affine | None]:
    """A table read at places that move with the key must be linear along them."""
    table = interpreter.tables.get(entry.source)
    if table is None:
        raise OpaqueError(f"the bias is read from {entry.source!r}, whose values are not known")
    axis: int | None = None
    step: Number = 0
    picked: list[int | slice] = []
    for place in entry.index:
        if place.is_constant:
            picked.append(int(place.constant))
            continue
        picked.append(slice(None))
        if place.coefficient(key):
            if axis is not None:
                raise OpaqueError("a table is read along its diagonal")
            axis, step = sum(isinstance(p, slice) for p in picked) - 1, place.coefficient(key)
        elif any(key in symbol.parts for symbol in place.symbols):
            raise OpaqueError(f"a table is read at {place}")
    if axis is None:
        return "signed", 0.0, None
    return "signed", _linear(np.moveaxis(table[tuple(picked)], axis, -1)) * float(step), None


def _linear(table: NDArray[np.generic]) -> float:
    """The slope of every row of a table along its last axis."""
    rows = table.astype(np.float64).reshape(-1, table.shape[-1])
    length = rows.shape[1]
    if length < 2 or not bool(np.isfinite(rows).all()):
        raise OpaqueError("a table of one entry, or of infinite ones")
    slope = float(rows[0, -1] - rows[0, 0]) / (length - 1)
    expected = rows[:, :1] + slope * np.arange(length)
    if np.abs(rows - expected).max() > _ROUNDING * np.abs(rows).max():
        raise OpaqueError("a table that is not linear in the key's position")
    return slope
