"""Exact attention over a range of keys: online softmax (or sigmoids) on transposed tiles.

A *panel* is a few vectors wide and holds query rows in its lanes. Scores are computed transposed,
``[keys, lanes]``: keys and values enter as broadcast scalars straight from the caller's buffers,
never packed, so GQA repeats nothing and any list of key slots works; maximum, sum and rescaling
are vertical, without a horizontal reduction; the output accumulates as ``[value_dim, lanes]``.

Scores are in base 2 (``log2(e)`` is folded into the packed queries), as in FlashAttention. Weights
that are sigmoids of scores need neither maximum nor sum: blocks of keys just add up.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.templates.parameters import TileParameters
from subquad.kernels.templates.products import Panel, RegisterTile, for_row_groups, unrolled
from subquad.kernels.templates.rows import HeadRows, KeyList
from subquad.kernels.templates.terms import RowTerms, Terms
from subquad.kernels.templates.vectors import (
    EXP2_UNDERFLOW,
    LOG2_E,
    Expr,
    bind,
    blocks_of,
    broadcast,
    constant,
    exp2,
    index,
    load,
    sigmoid,
    tanh,
)

NO_MAXIMUM = -1e30
"""Running maximum before any key: finite, so that masked scores (-inf) minus it stay -inf."""

NO_TERMS = Terms()


@dataclass(frozen=True)
class ExactTile:
    """Sizes of the tile loop.

    Attributes:
        panel: query rows in one tile.
        panels: panels per task; each block of keys is read once for all of them.
        rows: keys (then value dims) in one register tile.
        keys: keys per block.
        unroll: steps of a product's inner loop per iteration.
    """

    panel: Panel
    panels: int
    rows: int
    keys: int
    unroll: int

    @property
    def queries(self) -> int:
        """Query rows per task."""
        return self.panel.width * self.panels


@dataclass(frozen=True)
class Visible:
    """Which key slots each query row may see: ``first[kind, p, lane] <= slot <= last[...]``, int32.

    Attributes:
        sinks: slots of the first sink and after the last one, which are keys of kind 1; all others
            are of kind 0. ``None``: no sinks, one kind.
    """

    first: Expr
    last: Expr
    sinks: tuple[Expr, Expr] | None = None

    def seen(self, slot: Expr, p: Expr, lane: int, lanes: int) -> Expr:
        """A vector of truth values for ``lanes`` query rows from ``lane`` on."""
        kind = index(0)
        if self.sinks is not None:
            begin, end = self.sinks
            is_sink = T.And(slot >= begin, slot < end)
            kind = bind(T.if_then_else(is_sink, index(1), index(0)))
        number = broadcast(T.cast(slot, "int32"), lanes)
        return T.And(
            number >= load(self.first, kind, p, index(lane), lanes=lanes),
            number <= load(self.last, kind, p, index(lane), lanes=lanes),
        )


class ExactPanels:
    """State of the online softmax for the query rows of one task."""

    def __init__(
        self,
        tile: ExactTile,
        heads: HeadRows,
        scale: float,
        softcap: float,
        terms: Terms = NO_TERMS,
        live: Expr | None = None,
    ) -> None:
        self.tile, self.heads, self.softcap = tile, heads, softcap
        # Panels that hold rows: short sequences do not fill a task.
        self.panels = index(tile.panels) if live is None else live
        self.query_factor = scale / softcap if softcap else scale * LOG2_E
        width, panels = tile.panel.width, tile.panels
        key_rows = -(-tile.keys // tile.rows) * tile.rows
        self.queries = T.alloc_buffer((panels, heads.head_dim, width), "float32")
        self.output = T.alloc_buffer((panels, heads.value_dim, width), "float32")
        self.maximum = T.alloc_buffer((panels, width), "float32")
        self.total = T.alloc_buffer((panels, width), "float32")
        self.scores = T.alloc_buffer((key_rows, width), "float32")
        self.terms = RowTerms(terms, tile.panel, panels, key_rows, heads, self.panels)
        # Sums of weight times (score - maximum).
        self.expected: Expr | None = None
        if terms.entropy:
            self.expected = T.alloc_buffer((panels, width), "float32")

    def start(self, first_row: Expr) -> None:
        """Pack the queries, clear the state."""
        panel = self.tile.panel
        self.clear(first_row)
        with T.serial(self.panels) as p:
            row = first_row + p * panel.width
            self.heads.pack_queries(self.queries, p, row, panel, self.query_factor)

    def clear(self, first_row: Expr) -> None:
        """The state before any key; sinks are in it."""
        tile = self.tile
        panel = tile.panel
        with T.serial(self.panels) as p:
            panel.store(self.maximum, panel.fill(NO_MAXIMUM), p)
            panel.store(self.total, panel.fill(0.0), p)
            if self.expected is not None:
                panel.store(self.expected, panel.fill(0.0), p)
            with T.serial(index(self.heads.value_dim)) as e:
                panel.store(self.output, panel.fill(0.0), p, e)
        self.terms.start(first_row, self.maximum, self.total)

    def attend(
        self,
        keys: KeyList,
        p: Expr,
        start: Expr,
        count: Expr,
        visible: Visible | None,
        is_partial: Expr | None,
    ) -> None:
        """Add the keys ``start .. start + count - 1`` of the list to panel ``p``.

        Args:
            visible: what to hide where ``is_partial`` holds; ``None``: nothing.
        """
        self._score(keys, p, start, count)
        if self.softcap:
            self._cap(count)
        self.terms.add(self.scores, keys, p, start, count)
        if visible is not None:
            with T.If(is_partial):
                with T.Then():
                    self._mask(keys, p, start, count, visible)
        rescale = None
        if self.terms.terms.sigmoid:
            self._squash(count)
        else:
            rescale = self._weigh(p, count)
        self._accumulate(keys, p, start, count, rescale)

    def _score(self, keys: KeyList, p: Expr, start: Expr, count: Expr) -> None:
        tile = self.tile
        rows = tile.rows
        with T.serial(blocks_of(count, rows)) as group:
            # The last group reads its last key again; its surplus scores are never used.
            slots = [keys.slot(start + T.min(group * rows + row, count - 1)) for row in range(rows)]
            products = RegisterTile.allocate(tile.panel, rows)
            products.clear()
            with unrolled(self.heads.head_dim, tile.unroll) as dims:
                for d in dims:
                    vectors = tile.panel.load(self.queries, p, d)
                    products.multiply_add([self.heads.key(slot, d) for slot in slots], vectors)
            for row in range(rows):
                tile.panel.store(self.scores, products.get(row), group * rows + row)

    def _cap(self, count: Expr) -> None:
        panel = self.tile.panel
        with T.serial(count) as j:
            factor = constant(self.softcap * LOG2_E, panel.lanes)
            capped = [tanh(score, panel.lanes) * factor for score in panel.load(self.scores, j)]
            panel.store(self.scores, capped, j)

    def _mask(self, keys: KeyList, p: Expr, start: Expr, count: Expr, visible: Visible) -> None:
        panel = self.tile.panel
        lanes = panel.lanes
        hidden = constant(float("-inf"), lanes)
        with T.serial(count) as j:
            slot = keys.slot(start + j)
            scores = panel.load(self.scores, j)
            masked = [
                T.Select(visible.seen(slot, p, v * lanes, lanes), score, hidden)
                for v, score in enumerate(scores)
            ]
            panel.store(self.scores, masked, j)

    def _squash(self, count: Expr) -> None:
        """Scores to weights, each by itself; a hidden key, at -inf, gets exactly 0."""
        panel = self.tile.panel
        offset = constant(self.terms.terms.offset * LOG2_E, panel.lanes)
        with T.serial(count) as j:
            weights = [sigmoid(score + offset, panel.lanes) for score in panel.load(self.scores, j)]
            panel.store(self.scores, weights, j)

    def _weigh(self, p: Expr, count: Expr) -> list[Expr]:
        """Scores to weights; returns what the accumulated output must be multiplied by."""
        panel = self.tile.panel
        lanes = panel.lanes
        old = panel.load(self.maximum, p)
        running = RegisterTile.allocate(panel, 1)
        running.set(0, old)
        with T.serial(count) as j:
            scores = panel.load(self.scores, j)
            running.set(0, [T.max(a, b) for a, b in zip(running.get(0), scores, strict=True)])
        new = running.get(0)
        rescale = [exp2(a - b, lanes) for a, b in zip(old, new, strict=True)]
        panel.store(self.maximum, new, p)
        if self.expected is not None:
            moments = RegisterTile.allocate(panel, 1)
            moments.clear()
        # A block is summed from zero: one long chain of additions would lose digits.
        sums = RegisterTile.allocate(panel, 1)
        sums.clear()
        with T.serial(count) as j:
            scores = panel.load(self.scores, j)
            weights = [exp2(a - b, lanes) for a, b in zip(scores, new, strict=True)]
            panel.store(self.scores, weights, j)
            sums.set(0, [a + b for a, b in zip(sums.get(0), weights, strict=True)])
            if self.expected is not None:
                self._expect(moments, scores, weights, new)
        if self.expected is not None:
            self._shift_expected(p, old, new, moments.get(0), rescale)
        self._merge(self.total, sums.get(0), rescale, p)
        return rescale

    def _expect(
        self, moments: RegisterTile, scores: list[Expr], weights: list[Expr], new: list[Expr]
    ) -> None:
        """Add weight times (score - maximum); a hidden key, at -inf, adds nothing."""
        least = constant(EXP2_UNDERFLOW, self.tile.panel.lanes)
        moments.set(
            0,
            [
                a + weight * T.max(score - maximum, least)
                for a, score, weight, maximum in zip(
                    moments.get(0), scores, weights, new, strict=True
                )
            ],
        )

    def _shift_expected(
        self, p: Expr, old: list[Expr], new: list[Expr], moments: list[Expr], rescale: list[Expr]
    ) -> None:
        """Move the sums so far to the new maximum: each score is now that much lower."""
        assert self.expected is not None
        panel = self.tile.panel
        parts = (panel.load(self.expected, p), panel.load(self.total, p))
        shifted = [
            (expected + total * (before - after)) * factor + moment
            for expected, total, before, after, factor, moment in zip(
                *parts, old, new, rescale, moments, strict=True
            )
        ]
        panel.store(self.expected, shifted, p)

    def _merge(self, buffer: Expr, new: list[Expr], rescale: list[Expr] | None, *at: Expr) -> None:
        panel = self.tile.panel
        old = panel.load(buffer, *at)
        if rescale is not None:
            old = [a * b for a, b in zip(old, rescale, strict=True)]
        merged = [a + b for a, b in zip(old, new, strict=True)]
        panel.store(buffer, merged, *at)

    def _accumulate(
        self, keys: KeyList, p: Expr, start: Expr, count: Expr, rescale: list[Expr] | None
    ) -> None:
        panel = self.tile.panel

        def value_dims(first: Expr, rows: int) -> None:
            products = RegisterTile.allocate(panel, rows)
            products.clear()
            with T.serial(count) as j:
                slot = keys.slot(start + j)
                scalars = [self.heads.value(slot, first + row) for row in range(rows)]
                products.multiply_add(scalars, panel.load(self.scores, j))
            for row in range(rows):
                self._merge(self.output, products.get(row), rescale, p, first + row)

        for_row_groups(self.heads.value_dim, self.tile.rows, value_dims)

    def finish(self, first_row: Expr) -> None:
        """Divide by the sums and write; rows that saw no key become zeros."""
        tile, heads = self.tile, self.heads
        panel = tile.panel
        self.terms.write(first_row, self.maximum, self.total, self.expected)
        with T.serial(self.panels) as p:
            if not self.terms.terms.sigmoid:
                self._divide(p)
            heads.write_output(self.output, p, first_row + p * panel.width, panel)

    def _divide(self, p: Expr) -> None:
        panel = self.tile.panel
        inverse = []
        for total in panel.load(self.total, p):
            safe = T.max(total, constant(1e-37, panel.lanes))
            inverse.append(bind(constant(1.0, panel.lanes) / safe))
        with T.serial(index(self.heads.value_dim)) as e:
            old = panel.load(self.output, p, e)
            scaled = [a * b for a, b in zip(old, inverse, strict=True)]
            panel.store(self.output, scaled, p, e)


def exact_tile(parameters: TileParameters) -> ExactTile:
    return ExactTile(
        Panel(parameters.lanes, parameters.vectors),
        parameters.panels,
        parameters.rows,
        parameters.keys,
        parameters.unroll,
    )
