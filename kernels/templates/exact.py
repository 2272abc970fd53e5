"""Exact attention over a range of keys: online softmax (or sigmoids) on transposed tiles.

A *panel* is a few vectors wide and holds query rows in its lanes. Scores are computed transposed,
``[keys, lanes]``: keys enter as broadcast scalars straight from the caller's buffer, never packed,
so GQA repeats nothing and any list of key slots works; maximum and sum are vertical, without a
horizontal reduction. Weighted values add up with value dims in the lanes (``value_sums.py``).

Scores are in base 2 (``log2(e)`` is folded into the packed queries), as in FlashAttention. Weights
that are sigmoids of scores need neither maximum nor sum: blocks of keys just add up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm.script.ir_builder import tirx as T

from subquad.kernels.templates.parameters import TileParameters
from subquad.kernels.templates.products import Panel, RegisterTile, unrolled
from subquad.kernels.templates.rows import HeadRows, KeyList
from subquad.kernels.templates.terms import RowTerms, Terms
from subquad.kernels.templates.value_sums import (
    LaneSums,
    RowSums,
    ValueSums,
    WeightedKeys,
    merge,
)
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
    quotient,
    settle,
    sigmoid,
    tanh,
)

NO_MAXIMUM = -1e30
"""Running maximum before any key: finite, so that masked scores (-inf) minus it stay -inf."""

NO_TERMS = Terms()

NARROW_ROWS = 12
"""Rows of a register tile that is one vector wide: enough to hide the latency of additions."""

TAIL = 4
"""Keys in a register tile where fewer are left than fill one of the usual size."""

CHAIN = 64
"""Most products that are added one after the other: longer chains lose digits."""


def chains(head_dim: int) -> int:
    """Into how many sums of equal length a dot product is cut; 1 where its size has no divisor."""
    wanted = -(-head_dim // CHAIN)
    return next((count for count in range(wanted, 2 * wanted) if head_dim % count == 0), 1)


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

    @property
    def narrow(self) -> ExactTile:
        """For a panel whose rows fit into its first vector: the same work on that alone."""
        return replace(self, panel=Panel(self.panel.lanes, 1), rows=NARROW_ROWS)


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
    """State of the online softmax for the query rows of one task.

    Args:
        used: rows that the task has; ``None``: as many as its panels hold. A panel that has no
            more of them than one vector holds is computed on that vector alone.
        sums_in_lanes: whether outputs add up with rows in the lanes, as linear parts do.
    """

    def __init__(
        self,
        tile: ExactTile,
        heads: HeadRows,
        scale: float,
        softcap: float,
        terms: Terms = NO_TERMS,
        used: Expr | None = None,
        sums_in_lanes: bool = False,
    ) -> None:
        self.tile, self.heads, self.softcap, self.used = tile, heads, softcap, used
        # Panels that hold rows: short sequences do not fill a task.
        self.panels = index(tile.panels) if used is None else live_panels(tile, used)
        self.query_factor = scale / softcap if softcap else scale * LOG2_E
        width, panels = tile.panel.width, tile.panels
        # The last tail may reach past the last key.
        key_rows = tile.keys + TAIL
        self.queries = T.alloc_buffer((panels, heads.head_dim, width), "float32")
        self.maximum = T.alloc_buffer((panels, width), "float32")
        self.total = T.alloc_buffer((panels, width), "float32")
        self.scores = T.alloc_buffer((key_rows, width), "float32")
        self.sums: ValueSums
        if sums_in_lanes:
            self.sums = LaneSums(tile.panel, panels, heads)
        else:
            self.sums = RowSums(tile.panel, panels, heads, used)
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
            width = index(panel.width)
            if self.used is not None and panel.vectors > 1:
                width = settle(T.if_then_else(self._is_narrow(p), index(panel.lanes), width))
            self.heads.pack_queries(self.queries, p, row, panel, self.query_factor, width)

    def _is_narrow(self, p: Expr) -> Expr:
        panel = self.tile.panel
        return self.used - p * panel.width <= panel.lanes

    def clear(self, first_row: Expr) -> None:
        """The state before any key; sinks are in it."""
        tile = self.tile
        panel = tile.panel
        with T.serial(self.panels) as p:
            panel.store(self.maximum, panel.fill(NO_MAXIMUM), p)
            panel.store(self.total, panel.fill(0.0), p)
            if self.expected is not None:
                panel.store(self.expected, panel.fill(0.0), p)
            self.sums.clear(p)
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

        def on(tile: ExactTile) -> None:
            panel = tile.panel
            self._score(tile, keys, p, start, count)
            if self.softcap:
                self._cap(panel, count)
            self.terms.add(panel, self.scores, keys, p, start, count)
            if visible is not None:
                with T.If(is_partial):
                    with T.Then():
                        self._mask(panel, keys, p, start, count, visible)
            rescale = None
            if self.terms.terms.sigmoid:
                self._squash(panel, count)
            else:
                rescale = self._weigh(panel, p, count)
            run = WeightedKeys(keys, start, count, self.scores)
            self.sums.add(panel, tile.rows, p, run, rescale)

        if self.used is None or self.tile.panel.vectors == 1:
            on(self.tile)
            return
        with T.If(self._is_narrow(p)):
            with T.Then():
                on(self.tile.narrow)
            with T.Else():
                on(self.tile)

    def _score(self, tile: ExactTile, keys: KeyList, p: Expr, start: Expr, count: Expr) -> None:
        rows, tail = tile.rows, min(tile.rows, TAIL)
        whole = quotient(count, rows)
        with T.serial(whole) as group:
            first = settle(group * rows)
            slots = [keys.slot(start + first + row) for row in range(rows)]
            self._score_rows(tile, slots, p, first)
        done = settle(whole * rows)
        with T.serial(blocks_of(count - done, tail)) as group:
            first = settle(done + group * tail)
            # The last group reads its last key again; its surplus scores are never used.
            slots = [keys.slot(start + T.min(first + row, count - 1)) for row in range(tail)]
            self._score_rows(tile, slots, p, first)

    def _score_rows(self, tile: ExactTile, slots: list[Expr], p: Expr, first: Expr) -> None:
        """Scores of some keys, stored from ``first`` on."""
        panel, rows = tile.panel, len(slots)
        count = chains(self.heads.head_dim)
        length = self.heads.head_dim // count

        def products(chain: Expr | int) -> RegisterTile:
            sums = RegisterTile.allocate(panel, rows)
            sums.clear()
            with unrolled(length, tile.unroll) as dims:
                for dim in dims:
                    d = dim + chain * length
                    vectors = panel.load(self.queries, p, d)
                    sums.multiply_add([self.heads.key(slot, d) for slot in slots], vectors)
            return sums

        if count == 1:
            sums = products(0)
            for row in range(rows):
                panel.store(self.scores, sums.get(row), first + row)
            return
        for row in range(rows):
            panel.store(self.scores, panel.fill(0.0), first + row)
        with T.serial(index(count)) as chain:
            sums = products(chain)
            for row in range(rows):
                old = panel.load(self.scores, first + row)
                new = [a + b for a, b in zip(old, sums.get(row), strict=True)]
                panel.store(self.scores, new, first + row)

    def _cap(self, panel: Panel, count: Expr) -> None:
        with T.serial(count) as j:
            factor = constant(self.softcap * LOG2_E, panel.lanes)
            capped = [tanh(score, panel.lanes) * factor for score in panel.load(self.scores, j)]
            panel.store(self.scores, capped, j)

    def _mask(
        self, panel: Panel, keys: KeyList, p: Expr, start: Expr, count: Expr, visible: Visible
    ) -> None:
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

    def _squash(self, panel: Panel, count: Expr) -> None:
        """Scores to weights, each by itself; a hidden key, at -inf, gets exactly 0."""
        offset = constant(self.terms.terms.offset * LOG2_E, panel.lanes)
        with T.serial(count) as j:
            weights = [sigmoid(score + offset, panel.lanes) for score in panel.load(self.scores, j)]
            panel.store(self.scores, weights, j)

    def _weigh(self, panel: Panel, p: Expr, count: Expr) -> list[Expr]:
        """Scores to weights; returns what the accumulated output must be multiplied by."""
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
            self._shift_expected(panel, p, old, new, moments.get(0), rescale)
        merge(panel, self.total, sums.get(0), rescale, p)
        return rescale

    def _expect(
        self, moments: RegisterTile, scores: list[Expr], weights: list[Expr], new: list[Expr]
    ) -> None:
        """Add weight times (score - maximum); a hidden key, at -inf, adds nothing."""
        least = constant(EXP2_UNDERFLOW, moments.panel.lanes)
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
        self,
        panel: Panel,
        p: Expr,
        old: list[Expr],
        new: list[Expr],
        moments: list[Expr],
        rescale: list[Expr],
    ) -> None:
        """Move the sums so far to the new maximum: each score is now that much lower."""
        assert self.expected is not None
        parts = (panel.load(self.expected, p), panel.load(self.total, p))
        shifted = [
            (expected + total * (before - after)) * factor + moment
            for expected, total, before, after, factor, moment in zip(
                *parts, old, new, rescale, moments, strict=True
            )
        ]
        panel.store(self.expected, shifted, p)

    def finish(self, first_row: Expr) -> None:
        """Divide by the sums and write; rows that saw no key become zeros."""
        panel = self.tile.panel
        self.terms.write(first_row, self.maximum, self.total, self.expected)
        with T.serial(self.panels) as p:
            factors = None
            if not self.terms.terms.sigmoid:
                inverse = []
                for total in panel.load(self.total, p):
                    safe = T.max(total, constant(1e-37, panel.lanes))
                    inverse.append(bind(constant(1.0, panel.lanes) / safe))
                panel.store(self.total, inverse, p)
                factors = self.total
            self.sums.write(first_row, p, factors)


def live_panels(tile: ExactTile, used: Expr) -> Expr:
    """How many panels of a task hold some of its ``used`` rows."""
    return settle(T.min(blocks_of(used, tile.panel.width), index(tile.panels)))


def exact_tile(parameters: TileParameters) -> ExactTile:
    return ExactTile(
        Panel(parameters.lanes, parameters.vectors),
        parameters.panels,
        parameters.rows,
        parameters.keys,
        parameters.unroll,
    )
