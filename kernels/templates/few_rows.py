"""Exact attention of few query rows: dims, then keys, lie in the lanes, and nothing is transposed.

A tile of ``exact.py`` has a query row in every lane, so few rows would leave most of them empty.
Here a key is a few vector loads in the order of memory and its score a horizontal sum; the scores
of a row lie side by side for the softmax, and so do the dims of its output.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.templates.exact import NO_MAXIMUM, Visible
from subquad.kernels.templates.products import Panel, RegisterTile, cut
from subquad.kernels.templates.rows import HeadRows, KeyList
from subquad.kernels.templates.terms import Terms, in_base_2
from subquad.kernels.templates.vectors import (
    EXP2_UNDERFLOW,
    LOG2_E,
    Expr,
    bind,
    blocks_of,
    broadcast,
    constant,
    exp2,
    fold_lanes,
    index,
    load,
    log2,
    settle,
    sigmoid,
    store,
    store_scalar,
    sum_four,
    sum_lanes,
    tanh,
)

FEW_ROWS = 8
"""Query rows per key/value head that a task can hold; with more, tiles are faster."""

KEYS_AT_ONCE = 4
"""Keys whose scores with one row are summed side by side."""

VALUE_VECTORS = 8
"""Vectors of value dims that are summed side by side."""


@dataclass(frozen=True)
class SharedRows:
    """States of the online softmax of several tasks, by number.

    Attributes:
        maximum, total, expected: ``[number, row]``; expected ``None`` without entropy.
        sums: ``[number, row, value_dim]``.
    """

    maximum: Expr
    total: Expr
    expected: Expr | None
    sums: Expr

    @staticmethod
    def allocate(value_dim: int, count: Expr, *, entropy: bool) -> SharedRows:
        rows = (count, FEW_ROWS)
        return SharedRows(
            T.alloc_buffer(rows, "float32"),
            T.alloc_buffer(rows, "float32"),
            T.alloc_buffer(rows, "float32") if entropy else None,
            T.alloc_buffer((count, FEW_ROWS, value_dim), "float32"),
        )


class FewRows:
    """State of the online softmax for the rows of one task.

    Args:
        lanes: floats per vector.
        keys: most keys of one call of ``attend``, a multiple of lanes.
        row_count: at most ``FEW_ROWS``.
    """

    def __init__(
        self,
        lanes: int,
        keys: int,
        heads: HeadRows,
        scale: float,
        softcap: float,
        terms: Terms,
        row_count: Expr,
    ) -> None:
        self.lanes, self.heads, self.softcap, self.terms = lanes, heads, softcap, terms
        self.row_count = row_count
        self.query_factor = scale / softcap if softcap else scale * LOG2_E
        self.queries = T.alloc_buffer((FEW_ROWS, heads.head_dim), "float32")
        # A vector of hidden keys follows the last one.
        self.scores = T.alloc_buffer((FEW_ROWS, keys + lanes), "float32")
        self.state = SharedRows.allocate(heads.value_dim, index(1), entropy=terms.entropy)
        self.alignment: Expr = index(0)
        if terms.alibi != "none":
            self.alignment, _ = heads.alignment()

    def start(self, counts_sinks: Expr) -> None:
        """Scale the queries, clear the state.

        Args:
            counts_sinks: whether the sinks' terms are among the keys of this task.
        """
        heads = self.heads
        query = heads.buffers.query
        with T.serial(self.row_count) as row:
            head, place = settle(heads.head_of(row)), settle(heads.query_of(row))
            for lanes, at in self._each(heads.head_dim):
                vector = load(query, heads.batch, head, place, at, lanes=lanes)
                scaled = vector * constant(self.query_factor, lanes)
                store(self.queries, scaled, row, at, lanes=lanes)
        self.clear()
        if self.terms.sinks:
            logits = heads.buffers.extra["sink_logits"]
            with T.If(counts_sinks):
                with T.Then():
                    with T.serial(self.row_count) as row:
                        logit = logits[settle(heads.head_of(row))] * T.float32(LOG2_E)
                        store_scalar(self.state.maximum, logit, index(0), row)
                        store_scalar(self.state.total, T.float32(1.0), index(0), row)

    def clear(self) -> None:
        """The state before any key."""
        state = self.state
        with T.serial(self.row_count) as row:
            store_scalar(state.maximum, T.float32(NO_MAXIMUM), index(0), row)
            store_scalar(state.total, T.float32(0.0), index(0), row)
            if state.expected is not None:
                store_scalar(state.expected, T.float32(0.0), index(0), row)
            for lanes, at in self._each(self.heads.value_dim):
                store(state.sums, constant(0.0, lanes), index(0), row, at, lanes=lanes)

    def attend(
        self,
        keys: KeyList,
        p: Expr,
        start: Expr,
        count: Expr,
        visible: Visible | None,
        is_partial: Expr | None,
    ) -> None:
        """Add the keys ``start .. start + count - 1`` of the list; see ``ExactPanels.attend``."""
        self._score(keys, start, count)
        with T.serial(self.row_count) as row:
            hidden = constant(float("-inf"), self.lanes)
            store(self.scores, hidden, row, count, lanes=self.lanes)
            if self.softcap:
                self._cap(row, count)
            if self.terms.has_bias:
                self._add_biases(keys, row, start, count)
            if visible is not None:
                with T.If(is_partial):
                    with T.Then():
                        self._hide(keys, row, start, count, visible)
            rescale = None
            if self.terms.sigmoid:
                self._squash(row, count)
            else:
                rescale = self._weigh(row, count)
            for first, vectors in cut(self.heads.value_dim // self.lanes, VALUE_VECTORS):
                panel = Panel(self.lanes, vectors)
                self._add_values(keys, row, start, count, first * self.lanes, panel, rescale)
            for e in range(self._whole(self.heads.value_dim), self.heads.value_dim):
                self._add_values(keys, row, start, count, e, Panel(1, 1), rescale)

    def _whole(self, dims: int) -> int:
        return dims // self.lanes * self.lanes

    def _each(self, dims: int) -> list[tuple[int, Expr]]:
        """``(lanes, first)`` of the pieces of a row of ``dims``."""
        whole = self._whole(dims)
        pieces = [(self.lanes, index(at)) for at in range(0, whole, self.lanes)]
        return pieces + [(1, index(at)) for at in range(whole, dims)]

    def _score(self, keys: KeyList, start: Expr, count: Expr) -> None:
        lanes, heads = self.lanes, self.heads
        dims, whole = heads.head_dim, self._whole(heads.head_dim)
        with T.serial(blocks_of(count, KEYS_AT_ONCE)) as group:
            # The last group reads its last key again; its surplus scores are never used.
            slots = [
                keys.slot(start + T.min(group * KEYS_AT_ONCE + k, count - 1))
                for k in range(KEYS_AT_ONCE)
            ]
            with T.serial(self.row_count) as row:
                products = RegisterTile.allocate(Panel(lanes, 1), KEYS_AT_ONCE)
                products.clear()
                if whole:
                    with T.serial(index(whole // lanes)) as step:
                        at = bind(step * lanes)
                        query = bind(load(self.queries, row, at, lanes=lanes))
                        for k, slot in enumerate(slots):
                            place = (heads.batch, heads.kv_head, slot, at)
                            vector = load(heads.buffers.key, *place, lanes=lanes)
                            products.set(k, [products.get(k)[0] + query * vector])
                sums = sum_four([products.get(k)[0] for k in range(KEYS_AT_ONCE)], lanes)
                first = bind(group * KEYS_AT_ONCE)
                store(self.scores, sums, row, first, lanes=KEYS_AT_ONCE)
                for k, slot in enumerate(slots):
                    for d in range(whole, dims):
                        product = self.queries[row, index(d)] * heads.key(slot, index(d))
                        score = self.scores[row, first + k] + product
                        store_scalar(self.scores, score, row, first + k)

    def _cap(self, row: Expr, count: Expr) -> None:
        lanes = self.lanes
        with T.serial(blocks_of(count, lanes)) as block:
            at = bind(block * lanes)
            score = bind(load(self.scores, row, at, lanes=lanes))
            capped = tanh(score, lanes) * constant(self.softcap * LOG2_E, lanes)
            # Keys past the last one stay hidden.
            hidden = score < constant(NO_MAXIMUM, lanes)
            store(self.scores, T.Select(hidden, score, capped), row, at, lanes=lanes)

    def _add_biases(self, keys: KeyList, row: Expr, start: Expr, count: Expr) -> None:
        terms, heads = self.terms, self.heads
        extra = heads.buffers.extra
        head, query = settle(heads.head_of(row)), settle(heads.query_of(row))
        with T.serial(count) as j:
            slot = keys.slot(start + j)
            score = self.scores[row, j]
            if terms.key_bias:
                score = score + in_base_2(extra["key_bias"][heads.batch, slot], 1)
            if terms.score_bias:
                axes = (("b", heads.batch), ("h", head), ("q", query), ("k", slot))
                at = [place if axis in terms.score_bias else index(0) for axis, place in axes]
                score = score + in_base_2(extra["score_bias"][tuple(at)], 1)
            if terms.alibi != "none":
                distance = bind(T.cast(query + self.alignment - slot, "float32"))
                if terms.alibi == "absolute":
                    distance = T.max(distance, T.float32(0.0) - distance)
                score = score - extra["slopes"][head] * T.float32(LOG2_E) * distance
            store_scalar(self.scores, score, row, j)

    def _hide(self, keys: KeyList, row: Expr, start: Expr, count: Expr, visible: Visible) -> None:
        assert visible.sinks is None, "decided by emit_split"
        first, last = (
            settle(T.cast(limit[index(0), index(0), row], "int64"))
            for limit in (visible.first, visible.last)
        )
        with T.serial(count) as j:
            slot = keys.slot(start + j)
            seen = T.And(slot >= first, slot <= last)
            score = T.Select(seen, self.scores[row, j], T.float32(float("-inf")))
            store_scalar(self.scores, score, row, j)

    def _squash(self, row: Expr, count: Expr) -> None:
        """Scores to weights, each by itself."""
        lanes = self.lanes
        offset = constant(self.terms.offset * LOG2_E, lanes)
        with T.serial(blocks_of(count, lanes)) as block:
            at = bind(block * lanes)
            score = load(self.scores, row, at, lanes=lanes)
            store(self.scores, sigmoid(score + offset, lanes), row, at, lanes=lanes)

    def _weigh(self, row: Expr, count: Expr) -> Expr:
        """Scores to weights; returns what the sums so far must be multiplied by."""
        lanes, state = self.lanes, self.state
        vector = Panel(lanes, 1)
        running = RegisterTile.allocate(vector, 1)
        running.set(0, vector.fill(NO_MAXIMUM))
        with T.serial(blocks_of(count, lanes)) as block:
            scores = vector.load(self.scores, row, start=block * lanes)
            running.set(0, [T.max(running.get(0)[0], scores[0])])
        old = bind(state.maximum[index(0), row])
        new = bind(T.max(old, fold_lanes(running.get(0)[0], lanes, T.max)))
        rescale = exp2(old - new, 1)
        store_scalar(state.maximum, new, index(0), row)
        sums, moments = RegisterTile.allocate(vector, 1), RegisterTile.allocate(vector, 1)
        sums.clear()
        if state.expected is not None:
            moments.clear()
        with T.serial(blocks_of(count, lanes)) as block:
            at = bind(block * lanes)
            below = bind(load(self.scores, row, at, lanes=lanes) - broadcast(new, lanes))
            weight = exp2(below, lanes)
            store(self.scores, weight, row, at, lanes=lanes)
            sums.set(0, [sums.get(0)[0] + weight])
            if state.expected is not None:
                # A hidden key, at -inf, adds nothing.
                finite = T.max(below, constant(EXP2_UNDERFLOW, lanes))
                moments.set(0, [moments.get(0)[0] + weight * finite])
        total = bind(state.total[index(0), row])
        if state.expected is not None:
            # Each score so far is that much lower above the new maximum.
            shifted = state.expected[index(0), row] + total * (old - new)
            moment = sum_lanes(moments.get(0)[0], lanes)
            store_scalar(state.expected, shifted * rescale + moment, index(0), row)
        more = sum_lanes(sums.get(0)[0], lanes)
        store_scalar(state.total, total * rescale + more, index(0), row)
        return rescale

    def _add_values(
        self,
        keys: KeyList,
        row: Expr,
        start: Expr,
        count: Expr,
        first: int,
        panel: Panel,
        rescale: Expr | None,
    ) -> None:
        """Weighted values of one row, ``panel.width`` dims from ``first`` on."""
        heads = self.heads
        products = RegisterTile.allocate(panel, 1)
        products.clear()
        with T.serial(count) as j:
            place = (heads.batch, heads.kv_head, keys.slot(start + j))
            values = panel.load(heads.buffers.value, *place, start=index(first))
            products.multiply_add([self.scores[row, j]], values)
        old = panel.load(self.state.sums, index(0), row, start=index(first))
        if rescale is not None:
            factor = broadcast(rescale, panel.lanes)
            old = [a * factor for a in old]
        new = [a + b for a, b in zip(old, products.get(0), strict=True)]
        panel.store(self.state.sums, new, index(0), row, start=index(first))

    def save(self, shared: SharedRows, at: Expr) -> None:
        """Leave the state as number ``at``."""
        state = self.state
        with T.serial(self.row_count) as row:
            pairs = [(state.maximum, shared.maximum), (state.total, shared.total)]
            if state.expected is not None:
                pairs.append((state.expected, shared.expected))
            for own, target in pairs:
                store_scalar(target, own[index(0), row], at, row)
            for lanes, e in self._each(self.heads.value_dim):
                vector = load(state.sums, index(0), row, e, lanes=lanes)
                store(shared.sums, vector, at, row, e, lanes=lanes)

    def merge(self, shared: SharedRows, at: Expr) -> None:
        """Add the state of other keys, number ``at``."""
        if self.terms.sigmoid:
            self._merge_sums(shared, at)
            return
        state = self.state
        with T.serial(self.row_count) as row:
            here, there = (index(0), row), (at, row)
            old, other = bind(state.maximum[here]), bind(shared.maximum[there])
            new = bind(T.max(old, other))
            ours, theirs = exp2(old - new, 1), exp2(other - new, 1)
            if state.expected is not None:
                assert shared.expected is not None
                mine = state.expected[here] + state.total[here] * (old - new)
                more = shared.expected[there] + shared.total[there] * (other - new)
                store_scalar(state.expected, mine * ours + more * theirs, *here)
            total = state.total[here] * ours + shared.total[there] * theirs
            store_scalar(state.total, total, *here)
            store_scalar(state.maximum, new, *here)
            for lanes, e in self._each(self.heads.value_dim):
                mine = load(state.sums, *here, e, lanes=lanes) * broadcast(ours, lanes)
                more = load(shared.sums, *there, e, lanes=lanes) * broadcast(theirs, lanes)
                store(state.sums, mine + more, *here, e, lanes=lanes)

    def _merge_sums(self, shared: SharedRows, at: Expr) -> None:
        """Without a common denominator, parts just add up."""
        own = self.state.sums
        with T.serial(self.row_count) as row:
            for lanes, e in self._each(self.heads.value_dim):
                mine = load(own, index(0), row, e, lanes=lanes)
                more = load(shared.sums, at, row, e, lanes=lanes)
                store(own, mine + more, index(0), row, e, lanes=lanes)

    def finish(self) -> None:
        """Divide by the sums and write; rows that saw no key become zeros."""
        state, heads = self.state, self.heads
        with T.serial(self.row_count) as row:
            head, query = settle(heads.head_of(row)), settle(heads.query_of(row))
            where = (heads.batch, head, query)
            total = bind(state.total[index(0), row])
            safe = bind(T.max(total, T.float32(1e-37)))
            inverse = bind(T.float32(1.0) / safe)
            if self.terms.sigmoid:
                inverse = T.float32(1.0)
            for lanes, e in self._each(heads.value_dim):
                sums = load(state.sums, index(0), row, e, lanes=lanes)
                scaled = sums * broadcast(inverse, lanes)
                store(heads.buffers.output, scaled, *where, e, lanes=lanes)
            self._write_terms(row, where, total, safe)

    def _write_terms(
        self, row: Expr, where: tuple[Expr, Expr, Expr], total: Expr, safe: Expr
    ) -> None:
        state, extra = self.state, self.heads.buffers.extra
        if not (self.terms.lse or self.terms.entropy):
            return
        natural = T.float32(1.0 / LOG2_E)
        log_total, seen = log2(safe, 1), total > T.float32(0.0)
        if self.terms.lse:
            lse = bind((log_total + state.maximum[index(0), row]) * natural)
            lse = T.Select(seen, lse, T.float32(float("-inf")))
            store_scalar(extra["lse"], lse, *where)
        if state.expected is not None:
            entropy = bind((log_total - state.expected[index(0), row] / safe) * natural)
            entropy = T.Select(seen, entropy, T.float32(0.0))
            store_scalar(extra["entropy"], entropy, *where)
