"""Where weighted values add up: the second product of exact attention.

Weights come as ``[keys, lanes]``, a query row in every lane. ``RowSums`` puts value dims into the
lanes, so values enter and outputs leave in the order of memory and nothing is transposed.
``LaneSums`` keeps rows in the lanes, as a linear part does that is to be added.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tvm.script.ir_builder import tirx as T

from subquad.kernels.templates.products import Panel, RegisterTile, cut, for_row_groups
from subquad.kernels.templates.rows import HeadRows, KeyList
from subquad.kernels.templates.vectors import (
    Expr,
    blocks_of,
    broadcast,
    index,
    load,
    settle,
    store,
)

SUM_ROWS = 4
"""Query rows in a register tile whose lanes are value dims."""


@dataclass(frozen=True)
class WeightedKeys:
    """A run of keys whose values are to be added.

    Attributes:
        keys: of the task.
        start, count: of the run.
        weights: ``[count, lanes]``.
    """

    keys: KeyList
    start: Expr
    count: Expr
    weights: Expr


class ValueSums(Protocol):
    """Sums of weighted values for the panels of one task."""

    def clear(self, p: Expr) -> None:
        """No keys so far."""

    def add(
        self, panel: Panel, rows: int, p: Expr, run: WeightedKeys, rescale: list[Expr] | None
    ) -> None:
        """Multiply the sums of panel ``p`` by ``rescale``, then add the weighted values of a run.

        Args:
            panel: its lanes that have rows.
            rows: of a register tile as wide as ``panel``.
            p: number of the panel.
            run: keys and weights.
            rescale: per lane; ``None``: 1.
        """

    def write(self, first_row: Expr, p: Expr, factors: Expr | None) -> None:
        """The output of panel ``p``, times ``factors[p, lane]``."""


class LaneSums:
    """``buffer[panel, value dim, lane]``: values enter as broadcast scalars."""

    def __init__(self, panel: Panel, panels: int, heads: HeadRows) -> None:
        self.panel, self.heads = panel, heads
        self.buffer = T.alloc_buffer((panels, heads.value_dim, panel.width), "float32")

    def clear(self, p: Expr) -> None:
        """See ``ValueSums``."""
        with T.serial(index(self.heads.value_dim)) as e:
            self.panel.store(self.buffer, self.panel.fill(0.0), p, e)

    def add(
        self, panel: Panel, rows: int, p: Expr, run: WeightedKeys, rescale: list[Expr] | None
    ) -> None:
        """See ``ValueSums``."""

        def value_dims(first: Expr, rows: int) -> None:
            products = RegisterTile.allocate(panel, rows)
            products.clear()
            with T.serial(run.count) as j:
                slot = run.keys.slot(run.start + j)
                scalars = [self.heads.value(slot, first + row) for row in range(rows)]
                products.multiply_add(scalars, panel.load(run.weights, j))
            for row in range(rows):
                merge(panel, self.buffer, products.get(row), rescale, p, first + row)

        for_row_groups(self.heads.value_dim, rows, value_dims)

    def write(self, first_row: Expr, p: Expr, factors: Expr | None) -> None:
        """See ``ValueSums``."""
        row = first_row + p * self.panel.width
        self.heads.write_output(self.buffer, p, row, self.panel, factors)


class RowSums:
    """``buffer[panel, row, value dim]``: weights enter as broadcast scalars.

    Args:
        used: rows of the task; ``None``: as many as its panels hold.
    """

    def __init__(self, panel: Panel, panels: int, heads: HeadRows, used: Expr | None) -> None:
        self.panel, self.heads, self.used = panel, heads, used
        # The last group of rows is computed whole.
        assert panel.width % SUM_ROWS == 0
        self.buffer = T.alloc_buffer((panels, panel.width, heads.value_dim), "float32")
        self.factors = T.alloc_buffer((panel.width,), "float32")

    def clear(self, p: Expr) -> None:
        """See ``ValueSums``."""
        with T.serial(blocks_of(self._rows(p), SUM_ROWS) * SUM_ROWS) as row:
            for piece, e in self._pieces(self.panel.lanes, 1):
                piece.store(self.buffer, piece.fill(0.0), p, row, start=e)

    def add(
        self, panel: Panel, rows: int, p: Expr, run: WeightedKeys, rescale: list[Expr] | None
    ) -> None:
        """See ``ValueSums``."""
        if rescale is not None:
            panel.store(self.factors, rescale)
        groups = blocks_of(T.min(self._rows(p), index(panel.width)), SUM_ROWS)
        # As many accumulators as a tile of the first product has.
        vectors = max(1, rows * panel.vectors // SUM_ROWS)
        for piece, e in self._pieces(panel.lanes, vectors):
            with T.serial(groups) as group:
                first = settle(group * SUM_ROWS)
                self._add(piece, e, first, p, run, rescale is not None)

    def _add(
        self,
        piece: Panel,
        e: Expr,
        first: Expr,
        p: Expr,
        run: WeightedKeys,
        rescaled: bool,
    ) -> None:
        """Some dims of some rows."""
        heads = self.heads
        products = RegisterTile.allocate(piece, SUM_ROWS)
        products.clear()
        with T.serial(run.count) as j:
            place = (heads.batch, heads.kv_head, run.keys.slot(run.start + j))
            values = piece.load(heads.buffers.value, *place, start=e)
            products.multiply_add([run.weights[j, first + i] for i in range(SUM_ROWS)], values)
        for i in range(SUM_ROWS):
            factor = [broadcast(self.factors[first + i], piece.lanes)] * piece.vectors
            at = (p, first + i)
            merge(piece, self.buffer, products.get(i), factor if rescaled else None, *at, start=e)

    def write(self, first_row: Expr, p: Expr, factors: Expr | None) -> None:
        """See ``ValueSums``."""
        heads, output = self.heads, self.heads.buffers.output
        with T.serial(self._rows(p)) as lane:
            row = settle(first_row + p * self.panel.width + lane)
            head, query = settle(heads.head_of(row)), settle(heads.query_of(row))
            with T.If(query < heads.query_len):
                with T.Then():
                    for piece, e in self._pieces(self.panel.lanes, 1):
                        number = load(self.buffer, p, lane, e, lanes=piece.lanes)
                        if factors is not None:
                            number = number * broadcast(factors[p, lane], piece.lanes)
                        where = (heads.batch, head, query, e)
                        store(output, number, *where, lanes=piece.lanes)

    def _rows(self, p: Expr) -> Expr:
        """Rows of a panel that are there."""
        width = index(self.panel.width)
        if self.used is None:
            return width
        return settle(T.max(T.min(self.used - p * width, width), index(0)))

    def _pieces(self, lanes: int, vectors: int) -> list[tuple[Panel, Expr]]:
        """The value dims, in pieces of at most so many vectors of equal numbers, and a rest."""
        dims, done = self.heads.value_dim, 0
        pieces: list[tuple[Panel, Expr]] = []
        while lanes >= 1:
            whole = (dims - done) // lanes
            if whole:
                count = -(-whole // vectors)
                for _, size in cut(whole, -(-whole // count)):
                    pieces.append((Panel(lanes, size), index(done)))
                    done += size * lanes
            lanes //= 2
        return pieces


def merge(
    panel: Panel,
    buffer: Expr,
    new: list[Expr],
    rescale: list[Expr] | None,
    *at: Expr,
    start: Expr = 0,
) -> None:
    """Add to a run of ``buffer``, which is multiplied by ``rescale`` first."""
    old = panel.load(buffer, *at, start=start)
    if rescale is not None:
        old = [a * b for a, b in zip(old, rescale, strict=True)]
    merged = [a + b for a, b in zip(old, new, strict=True)]
    panel.store(buffer, merged, *at, start=start)
