"""Feature maps of one token, on lines: dims and features in the lanes.

The same maps as in ``feature_kernels.py``, where rows lie in the lanes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tvm.script.ir_builder import tirx as T

from subquad.kernels.hybrid.feature_maps import LEAST_FEATURE
from subquad.kernels.templates.lines import Line, Row
from subquad.kernels.templates.vectors import (
    LOG2_E,
    Expr,
    bind,
    broadcast,
    constant,
    exp2,
)


def _elu(row: Row, u: Line, dims: int, features: Line) -> None:
    def apply(at: Expr, lanes: int) -> None:
        x, zero = bind(u.load(at, lanes)), constant(0.0, lanes)
        value = T.max(x, zero) + exp2(T.min(x, zero) * constant(LOG2_E, lanes), lanes)
        features.store(value, at, lanes)

    row.each(dims, apply)


def _signed(row: Row, u: Line, dims: int, features: Line) -> None:
    """``u``, then ``-u``, in units of base 2."""
    for first, factor in ((0, LOG2_E), (dims, -LOG2_E)):
        row.each(
            dims,
            lambda at, lanes, first=first, factor=factor: features.store(  # type: ignore[misc]
                u.load(at, lanes) * constant(factor, lanes), at + first, lanes
            ),
        )


def _softmax(row: Row, line: Line, first: int, size: int, least: float = 0.0) -> None:
    """Softmax of ``line[first : first + size]`` in base 2, in place."""
    _, total = row.exponentials(line, size, first)
    inverse = bind(T.float32(1.0) / total)

    def scale(at: Expr, n: int) -> None:
        value = line.load(at + first, n) * broadcast(inverse, n)
        line.store(T.max(value, constant(least, n)), at + first, n)

    row.each(size, scale)


def _hedgehog(row: Row, u: Line, dims: int, features: Line) -> None:
    _signed(row, u, dims, features)
    _softmax(row, features, 0, 2 * dims)


def _softmax_pair(row: Row, u: Line, dims: int, features: Line) -> None:
    _signed(row, u, dims, features)
    _softmax(row, features, 0, dims, LEAST_FEATURE)
    _softmax(row, features, dims, dims, LEAST_FEATURE)


STEP_FEATURES: Mapping[str, Callable[[Row, Line, int, Line], None]] = {
    "elu": _elu,
    "hedgehog": _hedgehog,
    "softmax_pair": _softmax_pair,
}
"""Feature maps of one row, from ``u`` (or from the row itself where a map has no weights)."""
