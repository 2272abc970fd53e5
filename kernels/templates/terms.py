"""What exact attention adds to its scores and tells about its rows, on transposed tiles.

All of it happens on a block of scores ``[keys, lanes]`` between the two matrix products; a variant
without biases and row outputs emits none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.operator import HIDING_BIAS
from subquad.kernels.templates.products import Panel
from subquad.kernels.templates.rows import HeadRows, KeyList
from subquad.kernels.templates.vectors import (
    LOG2_E,
    Expr,
    bind,
    broadcast,
    constant,
    index,
    load,
    log2,
    settle,
    store_scalar,
)


@dataclass(frozen=True)
class Terms:
    """The static choices; see ``attention/semantics.py`` for the inputs they name.

    Attributes:
        score_bias: axes of ``"bhqk"`` along which ``score_bias`` varies; "" = none, "1" = one
            number.
        alibi: ``"none"``, ``"signed"`` or ``"absolute"``.
        sinks: whether there are ``sink_logits``.
        lse, entropy: whether these outputs exist.
        sigmoid: weights are the sigmoids of scores; there is no denominator.
        offset: added to all scores before it.
    """

    key_bias: bool = False
    score_bias: str = ""
    alibi: str = "none"
    sinks: bool = False
    lse: bool = False
    entropy: bool = False
    sigmoid: bool = False
    offset: float = 0.0

    @property
    def has_bias(self) -> bool:
        return self.key_bias or bool(self.score_bias) or self.alibi != "none"


class RowTerms:
    """The terms for the query rows of one task."""

    def __init__(
        self, terms: Terms, panel: Panel, panels: int, key_rows: int, rows: HeadRows, live: Expr
    ) -> None:
        self.terms, self.panel, self.live, self.rows = terms, panel, live, rows
        if terms.alibi != "none":
            self.slopes = T.alloc_buffer((panels, panel.width), "float32")
            self.places = T.alloc_buffer((panels, panel.width), "float32")
            self.alignment, _ = rows.alignment()
        if terms.score_bias:
            # Where a row's biases begin in the flat buffer; rows of a panel may share one.
            self.bias_rows = T.alloc_buffer((panels, panel.width, 3), "int64", scope="local")
            self.biases = T.alloc_buffer((key_rows, panel.width), "float32")

    def _per_row(self, first_row: Expr, store: Callable[[Expr, Expr, Expr, Expr], None]) -> None:
        """``store(p, lane, head, query)`` for every lane; those past the last row repeat it."""
        width = self.panel.width
        last = settle(self.rows.buffers.query.shape[2] - 1)
        with T.serial(self.live) as p:
            with T.serial(index(width)) as lane:
                row = settle(first_row + p * width + lane)
                query = settle(T.min(self.rows.query_of(row), last))
                store(p, lane, settle(self.rows.head_of(row)), query)

    def start(self, first_row: Expr, maximum: Expr, total: Expr) -> None:
        """Prepare what depends on rows only; with sinks, begin maxima and sums with them."""
        extra = self.rows.buffers.extra

        def store(p: Expr, lane: Expr, head: Expr, query: Expr) -> None:
            if self.terms.alibi != "none":
                slope = extra["slopes"][head] * T.float32(LOG2_E)
                store_scalar(self.slopes, slope, p, lane)
                place = T.cast(query + self.alignment, "float32")
                store_scalar(self.places, place, p, lane)
            if self.terms.score_bias:
                axes = (("b", self.rows.batch), ("h", head), ("q", query))
                for place_in, (axis, value) in enumerate(axes):
                    at = value if axis in self.terms.score_bias else index(0)
                    store_scalar(self.bias_rows, at, p, lane, index(place_in))
            if self.terms.sinks:
                store_scalar(maximum, extra["sink_logits"][head] * T.float32(LOG2_E), p, lane)
                store_scalar(total, T.float32(1.0), p, lane)

        if self.terms.alibi != "none" or self.terms.score_bias or self.terms.sinks:
            self._per_row(first_row, store)

    def add(
        self, panel: Panel, scores: Expr, keys: KeyList, p: Expr, start: Expr, count: Expr
    ) -> None:
        """Add the biases of keys ``start .. start + count - 1`` to their base-2 scores.

        Args:
            panel: the lanes that have rows.
        """
        terms = self.terms
        lanes = panel.lanes
        if not terms.has_bias:
            return
        if terms.score_bias:
            self._pack_biases(panel, keys, p, start, count)
        with T.serial(count) as j:
            slot = keys.slot(start + j)
            vectors = panel.load(scores, j)
            if terms.key_bias:
                number = self.rows.buffers.extra["key_bias"][self.rows.batch, slot]
                bias = broadcast(bind(in_base_2(number, 1)), lanes)
                vectors = [vector + bias for vector in vectors]
            if terms.score_bias:
                biases = panel.load(self.biases, j)
                vectors = [a + in_base_2(b, lanes) for a, b in zip(vectors, biases, strict=True)]
            if terms.alibi != "none":
                at = broadcast(bind(T.cast(slot, "float32")), lanes)
                slopes, places = panel.load(self.slopes, p), panel.load(self.places, p)
                vectors = [
                    a - slope * self._distance(place - at)
                    for a, slope, place in zip(vectors, slopes, places, strict=True)
                ]
            panel.store(scores, [bind(vector) for vector in vectors], j)

    def _distance(self, difference: Expr) -> Expr:
        if self.terms.alibi == "signed":
            return difference
        difference = bind(difference)
        return T.max(difference, constant(0.0, self.panel.lanes) - difference)

    def _pack_biases(self, panel: Panel, keys: KeyList, p: Expr, start: Expr, count: Expr) -> None:
        """Transpose: rows of the bias run along the keys, tiles have rows in their lanes."""
        source = self.rows.buffers.extra["score_bias"]
        varies = "k" in self.terms.score_bias
        with T.serial(index(panel.width)) as lane:
            row = [settle(self.bias_rows[p, lane, index(axis)]) for axis in range(3)]
            with T.serial(count) as j:
                at = keys.slot(start + j) if varies else index(0)
                store_scalar(self.biases, source[(*row, at)], j, lane)

    def write(self, first_row: Expr, maximum: Expr, total: Expr, expected: Expr | None) -> None:
        """The outputs about rows.

        Args:
            maximum, total: of the online softmax, in base 2.
            expected: sums of weight times (score - maximum), in base 2.
        """
        terms = self.terms
        if not (terms.lse or terms.entropy):
            return
        panel, lanes = self.panel, self.panel.lanes
        zero, natural = constant(0.0, lanes), constant(1.0 / LOG2_E, lanes)
        rows = T.alloc_buffer((2, panel.width), "float32")
        with T.serial(self.live) as p:
            for v in range(panel.vectors):
                at = index(v * lanes)
                sums = bind(load(total, p, at, lanes=lanes))
                seen = sums > zero
                log_total = log2(T.max(sums, constant(1e-37, lanes)), lanes)
                if terms.lse:
                    lse = (log_total + load(maximum, p, at, lanes=lanes)) * natural
                    lse = T.Select(seen, lse, constant(float("-inf"), lanes))
                    _store_lanes(rows, lse, index(0), at, lanes)
                if expected is not None:
                    mean = load(expected, p, at, lanes=lanes) / T.max(sums, constant(1e-37, lanes))
                    entropy = T.Select(seen, (log_total - mean) * natural, zero)
                    _store_lanes(rows, entropy, index(1), at, lanes)
            with T.serial(index(panel.width)) as lane:
                row = settle(first_row + p * panel.width + lane)
                head, query = settle(self.rows.head_of(row)), settle(self.rows.query_of(row))
                buffers = self.rows.buffers
                with T.If(query < buffers.query.shape[2]):
                    with T.Then():
                        where = (self.rows.batch, head, query)
                        if terms.lse:
                            store_scalar(buffers.extra["lse"], rows[index(0), lane], *where)
                        if terms.entropy:
                            store_scalar(buffers.extra["entropy"], rows[index(1), lane], *where)


def _store_lanes(buffer: Expr, value: Expr, row: Expr, at: Expr, lanes: int) -> None:
    T.buffer_store(buffer, value, [row, T.Ramp(at, index(1), lanes)])


def in_base_2(bias: Expr, lanes: int) -> Expr:
    """Times ``log2(e)``; -inf where the bias hides its key."""
    bias = bind(bias)
    hides = bias <= constant(HIDING_BIAS, lanes)
    scaled = bias * constant(LOG2_E, lanes)
    return T.Select(hides, constant(float("-inf"), lanes), scaled)
