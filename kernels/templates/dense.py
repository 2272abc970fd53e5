"""Exact attention under a band, sinks and a key mask: what a task sees, and the task loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import Heads
from subquad.kernels.operator import UNLIMITED
from subquad.kernels.templates.exact import NO_TERMS, ExactPanels, ExactTile, Visible
from subquad.kernels.templates.few_rows import FewRows
from subquad.kernels.templates.rows import Buffers, HeadRows, HeadSubset, KeyList, pick
from subquad.kernels.templates.terms import Terms
from subquad.kernels.templates.vectors import (
    Expr,
    blocks_of,
    clamp,
    index,
    quotient,
    remainder,
    settle,
    store_scalar,
)


@dataclass(frozen=True)
class Band:
    """``-right <= query position - key position <= left``; -1 puts no limit on a side."""

    left: int
    right: int

    @property
    def is_unlimited(self) -> bool:
        return self.left == UNLIMITED and self.right == UNLIMITED

    def first(self, query: Expr, heads: HeadRows, alignment: Expr) -> Expr:
        """First slot a query sees, 0 .. kv_len."""
        if self.left == UNLIMITED:
            return index(0)
        return clamp(query + alignment - self.left, index(0), heads.kv_len)

    def last(self, query: Expr, heads: HeadRows, alignment: Expr) -> Expr:
        """Last slot a query sees, -1 .. kv_len - 1."""
        if self.right == UNLIMITED:
            return heads.kv_len - 1
        return clamp(query + alignment + self.right, index(-1), heads.kv_len - 1)


@dataclass(frozen=True)
class HeadBand:
    """The band of the heads of one task, where heads differ: limits known at run time."""

    left: Expr
    right: Expr

    @property
    def is_unlimited(self) -> bool:
        return False

    def first(self, query: Expr, heads: HeadRows, alignment: Expr) -> Expr:
        return clamp(query + alignment - self.left, index(0), heads.kv_len)

    def last(self, query: Expr, heads: HeadRows, alignment: Expr) -> Expr:
        return clamp(query + alignment + self.right, index(-1), heads.kv_len - 1)


@dataclass(frozen=True)
class ExactSet:
    """The keys a query attends to exactly.

    Attributes:
        window: its band; ``None``: sinks only.
        sinks: positions ``0 .. sinks - 1`` count too, where ``allowed`` holds.
        allowed: contains the window.
    """

    window: Band | HeadBand | None
    sinks: Expr
    allowed: Band

    @property
    def has_sinks(self) -> bool:
        return not isinstance(self.sinks, int) or self.sinks > 0

    @property
    def needs_masking(self) -> bool:
        return self.window is None or self.has_sinks or not self.window.is_unlimited


FAR = 2**31 - 1
"""More positions than there are."""


def exact_set_of(sets: Sequence[ExactSet], rows: HeadRows) -> ExactSet:
    """The exact set of a task's heads: one for all, or one for each part of the subset."""
    if all(each == sets[0] for each in sets):
        return sets[0]
    bands = [(-FAR, -FAR) if each.window is None else _limits_of(each.window) for each in sets]
    window = HeadBand(
        pick([left for left, _ in bands], rows.part), pick([right for _, right in bands], rows.part)
    )
    sinks: Expr = 0
    if any(each.has_sinks for each in sets):
        sinks = pick([each.sinks for each in sets], rows.part)
    return ExactSet(window, sinks, sets[0].allowed)


def _limits_of(band: Band | HeadBand) -> tuple[int, int]:
    left, right = (FAR if limit == UNLIMITED else limit for limit in (band.left, band.right))
    return left, right


class ExactSpans:
    """The spans of keys that the panels of one task see, and the loop over them.

    Without sinks there is one span, the window. With sinks there are three: sinks before the
    window, the window, sinks after it.

    Args:
        alignment: key slot of query slot 0; used by limited bands only.
        first_sink: key slot of position 0; used with sinks only.
        live: number of panels that hold rows; ``None``: it is not known.
    """

    def __init__(
        self,
        tile: ExactTile,
        heads: HeadRows,
        keys: KeyList,
        exact_set: ExactSet,
        alignment: Expr,
        first_sink: Expr,
        live: Expr | None = None,
    ) -> None:
        self.tile, self.heads, self.keys, self.exact_set = tile, heads, keys, exact_set
        self.panels = index(tile.panels) if live is None else live
        self.alignment = alignment
        self.sinks: tuple[Expr, Expr] | None = None
        if exact_set.has_sinks:
            begin = clamp(first_sink, index(0), heads.kv_len)
            end = clamp(first_sink + exact_set.sinks, index(0), heads.kv_len)
            self.sinks = begin, end
        self.count = 3 if exact_set.has_sinks else 1
        panels, width = tile.panels, tile.panel.width

        def numbers() -> Expr:
            return T.alloc_buffer((self.count, panels), "int64", scope="local")

        self.begin, self.end = numbers(), numbers()
        self.visible: Visible | None = None
        if exact_set.needs_masking:
            # Slots that all rows of a panel see: no tile inside them needs masking.
            self.all_from, self.all_to = numbers(), numbers()
            shape = (2 if exact_set.has_sinks else 1, panels, width)
            self.visible = Visible(
                T.alloc_buffer(shape, "int32"), T.alloc_buffer(shape, "int32"), self.sinks
            )

    def _limits(self, kind: int, query: Expr) -> tuple[Expr, Expr]:
        """First and last slot of a kind (0: window, 1: sinks) for a query; maybe an empty range."""
        band = self.exact_set.allowed if kind else self.exact_set.window
        if band is None:
            return self.heads.kv_len, index(-1)
        at = (query, self.heads, self.alignment)
        return settle(band.first(*at)), settle(band.last(*at))

    def find(self, first_row: Expr) -> None:
        """Compute the spans of the panels that start at ``first_row``."""
        heads, width = self.heads, self.tile.panel.width
        with T.serial(self.panels) as p:
            row = settle(first_row + p * width)
            head_query = settle(heads.query_of(row))
            tail_row = settle(heads.query_of(row + (width - 1)))
            tail_query = settle(T.min(tail_row, heads.query_len - 1))
            with T.If(head_query < heads.query_len):
                with T.Then():
                    self._find_spans(p, head_query, tail_query)
                with T.Else():
                    for span in range(self.count):
                        store_scalar(self.begin, index(0), index(span), p)
                        store_scalar(self.end, index(0), index(span), p)
            if self.visible is not None:
                for span in range(self.count):
                    kind = int(self.count == 3 and span != 1)
                    store_scalar(self.all_from, self._limits(kind, tail_query)[0], index(span), p)
                    store_scalar(self.all_to, self._limits(kind, head_query)[1], index(span), p)
                with T.serial(index(width)) as lane:
                    query = settle(heads.query_of(row + lane))
                    for kind in range(2 if self.sinks else 1):
                        first, last = self._limits(kind, query)
                        at = (index(kind), p, lane)
                        store_scalar(self.visible.first, T.cast(first, "int32"), *at)
                        store_scalar(self.visible.last, T.cast(last, "int32"), *at)

    def _find_spans(self, p: Expr, head_query: Expr, tail_query: Expr) -> None:
        if self.exact_set.window is None:
            # All sinks lie before an empty window at the end.
            window_begin = window_end = self.heads.kv_len
        else:
            window_begin = self._limits(0, head_query)[0]
            window_end = settle(T.max(self._limits(0, tail_query)[1] + 1, window_begin))
        spans = [(window_begin, window_end)]
        if self.sinks is not None:
            allowed_begin = self._limits(1, head_query)[0]
            allowed_end = self._limits(1, tail_query)[1] + 1
            begin = settle(T.max(self.sinks[0], allowed_begin))
            end = settle(T.min(self.sinks[1], allowed_end))
            before = (begin, T.min(end, window_begin))
            after = (T.max(begin, window_end), end)
            spans = [before, spans[0], after]
        for span, (begin, end) in enumerate(spans):
            begin = settle(begin)
            store_scalar(self.begin, self.keys.rank(begin), index(span), p)
            store_scalar(self.end, self.keys.rank(T.max(begin, end)), index(span), p)

    def attend(self, exact: ExactPanels | FewRows, part: tuple[Expr, Expr] | None = None) -> None:
        """Every block of keys for every panel that sees some of it.

        Args:
            part: number and count of equal parts of each span; ``None``: all of it.
        """
        limits = T.alloc_buffer((2,), "int64", scope="local")
        low, high = index(0), index(1)
        with T.serial(index(self.count)) as span:
            store_scalar(limits, self.heads.kv_len, low)
            store_scalar(limits, index(0), high)
            with T.serial(self.panels) as p:
                with T.If(self.begin[span, p] < self.end[span, p]):
                    with T.Then():
                        store_scalar(limits, T.min(limits[low], self.begin[span, p]), low)
                        store_scalar(limits, T.max(limits[high], self.end[span, p]), high)
            origin, end = settle(limits[low]), settle(limits[high])
            if part is not None:
                number, count = part
                length = blocks_of(end - origin, count)
                origin = settle(T.min(origin + number * length, end))
                end = settle(T.min(origin + length, end))
            self.attend_range(exact, span, origin, end)

    def attend_range(
        self, exact: ExactPanels | FewRows, span: Expr, origin: Expr, end: Expr
    ) -> None:
        """The keys ``origin .. end - 1`` of the list, as far as a panel sees them in ``span``."""
        tile = self.tile
        with T.serial(blocks_of(end - origin, tile.keys)) as block:
            with T.serial(self.panels) as p:
                at = settle(origin + block * tile.keys)
                until = T.min(at + tile.keys, end)
                start = settle(T.max(at, self.begin[span, p]))
                stop = settle(T.min(until, self.end[span, p]))
                with T.If(start < stop):
                    with T.Then():
                        is_partial = None
                        if self.visible is not None:
                            is_partial = T.Or(
                                self.keys.slot(start) < self.all_from[span, p],
                                self.keys.slot(stop - 1) > self.all_to[span, p],
                            )
                        exact.attend(self.keys, p, start, stop - start, self.visible, is_partial)


def emit_exact(
    buffers: Buffers,
    key_list: tuple[Expr, Expr] | None,
    heads: Heads,
    tile: ExactTile,
    exact_sets: Sequence[ExactSet],
    scale: float,
    softcap: float = 0.0,
    terms: Terms = NO_TERMS,
    subset: HeadSubset | None = None,
) -> None:
    """The parallel loop over (batch, key/value head, block of query rows).

    Args:
        key_list: from ``list_keys``; ``None`` without a key mask.
        exact_sets: one per part of the subset, or one for all.
        subset: the heads; ``None``: all.
    """
    subset = subset or HeadSubset.all(heads)
    batch, query_len = buffers.query.shape[0], buffers.query.shape[2]
    blocks = blocks_of(query_len * subset.group, tile.queries)
    with T.parallel(batch * subset.count * blocks) as task:
        # Causal work grows with the row: pairing first and last blocks keeps any run of tasks even.
        order = remainder(task, blocks)
        half = quotient(order, 2)
        block = settle(T.if_then_else(half * 2 == order, half, blocks - 1 - half))
        rows = HeadRows.of(buffers, heads, quotient(task, blocks), subset=subset)
        keys = KeyList.of(rows.batch, key_list)
        exact_set = exact_set_of(exact_sets, rows)
        first_row = settle(block * tile.queries)
        used = settle(query_len * subset.group - first_row)
        exact = ExactPanels(tile, rows, scale, softcap, terms, used)
        spans = ExactSpans(tile, rows, keys, exact_set, *rows.alignment(), exact.panels)
        exact.start(first_row)
        spans.find(first_row)
        spans.attend(exact)
        exact.finish(first_row)
