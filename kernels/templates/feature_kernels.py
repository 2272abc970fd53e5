"""Feature maps on panels: rows (queries or keys) in the lanes, dims and features down the buffer.

A softmax over features is then vertical, without a horizontal reduction.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.hybrid.feature_maps import LEAST_FEATURE
from subquad.kernels.templates.products import Panel, RegisterTile, for_row_groups, unrolled
from subquad.kernels.templates.vectors import LOG2_E, Expr, bind, broadcast, constant, exp2, index


@dataclass(frozen=True)
class Columns:
    """``buffer[*outer, d, start : start + width]``: number ``d`` of every row of a panel."""

    panel: Panel
    buffer: Expr
    outer: tuple[Expr, ...] = ()
    start: Expr = 0

    def load(self, d: Expr) -> list[Expr]:
        return self.panel.load(self.buffer, *self.outer, d, start=self.start)

    def store(self, d: Expr, values: list[Expr]) -> None:
        self.panel.store(self.buffer, values, *self.outer, d, start=self.start)


@dataclass(frozen=True)
class FeatureKernel:
    """The code of one feature map of ``kernels/hybrid/feature_maps.py``.

    Attributes:
        emit: from ``u``, the number of its dims, and where the features go; the two may be one.
    """

    emit: Callable[[Columns, int, Columns], None]


def project(
    weights: Expr, head: Expr, dims: tuple[int, int], rows: int, unroll: int, x: Columns, u: Columns
) -> None:
    """``u = x W + b`` with ``weights[head]``, ``[dims[0] + 1, dims[1]]``, ``b`` in its last row."""
    head_dim, map_dim = dims
    panel = x.panel

    def outputs(first: Expr, count: int) -> None:
        products = RegisterTile.allocate(panel, count)
        for row in range(count):
            bias = bind(broadcast(weights[head, head_dim, first + row], panel.lanes))
            products.set(row, [bias] * panel.vectors)
        with unrolled(head_dim, unroll) as steps:
            for d in steps:
                scalars = [weights[head, d, first + row] for row in range(count)]
                products.multiply_add(scalars, x.load(d))
        for row in range(count):
            u.store(first + row, products.get(row))

    for_row_groups(map_dim, rows, outputs)


def _elu(u: Columns, dims: int, out: Columns) -> None:
    lanes = u.panel.lanes
    zero = constant(0.0, lanes)
    with T.serial(index(dims)) as d:
        features = [
            T.max(x, zero) + exp2(T.min(x, zero) * constant(LOG2_E, lanes), lanes)
            for x in u.load(d)
        ]
        out.store(d, features)


def _relu(u: Columns, dims: int, out: Columns) -> None:
    zero = constant(0.0, u.panel.lanes)
    with T.serial(index(dims)) as d:
        out.store(d, [T.max(x, zero) for x in u.load(d)])


def _identity(u: Columns, dims: int, out: Columns) -> None:
    with T.serial(index(dims)) as d:
        out.store(d, u.load(d))


def _softmax(
    u: Columns, dims: int, out: Columns, signs: tuple[float, ...], first: int, least: float
) -> None:
    """Softmax over the numbers ``sign * u``, to features ``first ...``."""
    panel = u.panel
    lanes = panel.lanes

    def signed(x: Expr, sign: float) -> Expr:
        return x if sign > 0 else constant(0.0, lanes) - x

    largest = RegisterTile.allocate(panel, 1)
    largest.set(0, panel.fill(-3.0e38))
    with T.serial(index(dims)) as d:
        for sign in signs:
            pairs = zip(largest.get(0), u.load(d), strict=True)
            largest.set(0, [T.max(a, signed(x, sign)) for a, x in pairs])
    shift = largest.get(0)
    total = RegisterTile.allocate(panel, 1)
    total.clear()
    log2_e = constant(LOG2_E, lanes)
    with T.serial(index(dims)) as d:
        for number, sign in enumerate(signs):
            powers = [
                exp2((signed(x, sign) - m) * log2_e, lanes)
                for x, m in zip(u.load(d), shift, strict=True)
            ]
            out.store(first + number * dims + d, powers)
            total.set(0, [a + b for a, b in zip(total.get(0), powers, strict=True)])
    inverse = [bind(constant(1.0, lanes) / x) for x in total.get(0)]
    floor = constant(least, lanes)
    with T.serial(index(len(signs) * dims)) as f:
        scaled = [a * b for a, b in zip(out.load(first + f), inverse, strict=True)]
        out.store(first + f, [T.max(x, floor) for x in scaled] if least else scaled)


def _hedgehog(u: Columns, dims: int, out: Columns) -> None:
    _softmax(u, dims, out, (1.0, -1.0), 0, 0.0)


def _softmax_pair(u: Columns, dims: int, out: Columns) -> None:
    _softmax(u, dims, out, (1.0,), 0, LEAST_FEATURE)
    _softmax(u, dims, out, (-1.0,), dims, LEAST_FEATURE)


FEATURE_KERNELS: dict[str, FeatureKernel] = {
    "elu": FeatureKernel(_elu),
    "hedgehog": FeatureKernel(_hedgehog),
    "softmax_pair": FeatureKernel(_softmax_pair),
    "relu": FeatureKernel(_relu),
    "identity": FeatureKernel(_identity),
}
