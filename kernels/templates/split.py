"""Exact attention of few queries over many keys (decoding): tasks are parts of the keys.

Tasks of ``dense.py`` are blocks of query rows; with one query per head there may be fewer of them
than cores. Here each block's keys are cut into parts with an online softmax each, and the parts of
a row merge by their maxima and sums: attention over disjoint keys merges exactly.
"""

from __future__ import annotations

from dataclasses import replace

from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import Heads
from subquad.kernels.templates.dense import ExactSet, ExactSpans, live_panels
from subquad.kernels.templates.exact import ExactPanels, ExactTile, SharedPanels
from subquad.kernels.templates.products import Panel, RegisterTile, padded
from subquad.kernels.templates.rows import Buffers, HeadRows, KeyList
from subquad.kernels.templates.terms import Terms
from subquad.kernels.templates.vectors import (
    Expr,
    bind,
    blocks_of,
    index,
    load,
    quotient,
    remainder,
    settle,
    store_scalar,
)

FEW_ROWS = 8
"""Up to so many query rows per key/value head take this way; from 16 on tiles are faster."""

MIN_TASKS = 16
"""Keys are cut until there are so many tasks, enough for any cores to even out."""

MIN_KEYS = 256
"""Fewer keys per part are not worth a merge."""

KEYS_AT_ONCE = 4
"""Keys whose scores with one row are summed side by side."""

BLOCK = 128
"""Least number of keys per block: with few rows, nothing is kept in cache for the next one."""


def narrow_tile(tile: ExactTile) -> ExactTile:
    """The tile of ``FewRowPanels``."""
    lanes = tile.panel.lanes
    keys = max(BLOCK, padded(tile.keys, KEYS_AT_ONCE))
    panels = -(-FEW_ROWS // lanes)
    return replace(tile, panel=Panel(lanes, 1), panels=panels, rows=KEYS_AT_ONCE, keys=keys)


class FewRowPanels(ExactPanels):
    """The online softmax of few rows: products along the dims, which lie in the lanes.

    A tile of scores has a row per lane and would leave most of them empty, at the price of a
    broadcast per key and dim. Here a key is a few vector loads, in the order of memory, and a score
    a horizontal sum. What stands between the products is that of ``ExactPanels``.
    """

    def __init__(
        self,
        tile: ExactTile,
        heads: HeadRows,
        scale: float,
        softcap: float,
        terms: Terms,
        row_count: Expr,
    ) -> None:
        super().__init__(tile, heads, scale, softcap, terms, live_panels(tile, row_count, index(0)))
        self.row_count = row_count
        width, panels = tile.panel.width, tile.panels
        self.rows = T.alloc_buffer((panels, width, heads.head_dim), "float32")
        self.factors = T.alloc_buffer((width,), "float32")
        self.sums = T.alloc_buffer((heads.value_dim,), "float32")

    def start(self, first_row: Expr) -> None:
        """Pack the queries, clear the state."""
        super().start(first_row)
        panel = self.tile.panel
        with T.serial(self.panels) as p:
            with T.serial(self._rows_of(p)) as row:
                with T.serial(index(self.heads.head_dim)) as d:
                    store_scalar(self.rows, self.queries[p, d, row], p, row, d)
        # Lanes without a row are never written: their numbers must only be finite.
        with T.serial(index(self.scores.shape[0])) as j:
            panel.store(self.scores, panel.fill(0.0), j)

    def _rows_of(self, p: Expr) -> Expr:
        width = self.tile.panel.width
        return settle(T.min(self.row_count - p * width, index(width)))

    def _score(self, keys: KeyList, p: Expr, start: Expr, count: Expr) -> None:
        lanes, dims = self.tile.panel.lanes, self.heads.head_dim
        heads = self.heads
        whole = dims // lanes
        with T.serial(blocks_of(count, KEYS_AT_ONCE)) as group:
            # The last group reads its last key again; its surplus scores are never used.
            slots = [
                keys.slot(start + T.min(group * KEYS_AT_ONCE + k, count - 1))
                for k in range(KEYS_AT_ONCE)
            ]
            with T.serial(self._rows_of(p)) as row:
                products = RegisterTile.allocate(Panel(lanes, 1), KEYS_AT_ONCE)
                products.clear()
                if whole:
                    with T.serial(index(whole)) as step:
                        at = bind(step * lanes)
                        query = bind(load(self.rows, p, row, at, lanes=lanes))
                        for k, slot in enumerate(slots):
                            place = (heads.batch, heads.kv_head, slot, at)
                            vector = load(heads.buffers.key, *place, lanes=lanes)
                            products.set(k, [products.get(k)[0] + query * vector])
                for k, slot in enumerate(slots):
                    score = _sum([products.buffer[index(k), index(lane)] for lane in range(lanes)])
                    for d in range(whole * lanes, dims):
                        score = score + self.rows[p, row, index(d)] * heads.key(slot, index(d))
                    store_scalar(self.scores, bind(score), group * KEYS_AT_ONCE + k, row)

    def _accumulate(
        self, keys: KeyList, p: Expr, start: Expr, count: Expr, rescale: list[Expr]
    ) -> None:
        lanes, dims = self.tile.panel.lanes, self.heads.value_dim
        self.tile.panel.store(self.factors, rescale)
        with T.serial(self._rows_of(p)) as row:
            for first, vectors in _cut(dims // lanes, VALUE_VECTORS):
                self._sum_values(keys, row, start, count, first * lanes, Panel(lanes, vectors))
            for e in range(dims // lanes * lanes, dims):
                self._sum_values(keys, row, start, count, e, Panel(1, 1))
            with T.serial(index(dims)) as e:
                old = self.output[p, e, row] * self.factors[row]
                store_scalar(self.output, old + self.sums[e], p, e, row)

    def _sum_values(
        self, keys: KeyList, row: Expr, start: Expr, count: Expr, first: int, panel: Panel
    ) -> None:
        """Weighted values of one row, ``panel.width`` dims from ``first`` on."""
        heads = self.heads
        if panel.width == 1:
            cell = T.alloc_buffer((1,), "float32", scope="local")
            store_scalar(cell, T.float32(0.0), index(0))
            with T.serial(count) as j:
                value = heads.value(keys.slot(start + j), index(first))
                store_scalar(cell, cell[index(0)] + self.scores[j, row] * value, index(0))
            store_scalar(self.sums, cell[index(0)], index(first))
            return
        products = RegisterTile.allocate(panel, 1)
        products.clear()
        with T.serial(count) as j:
            place = (heads.batch, heads.kv_head, keys.slot(start + j))
            values = panel.load(heads.buffers.value, *place, start=index(first))
            products.multiply_add([self.scores[j, row]], values)
        panel.store(self.sums, products.get(0), start=index(first))


VALUE_VECTORS = 8
"""Vectors of value dims that are summed side by side."""


def _cut(total: int, size: int) -> list[tuple[int, int]]:
    """``(first, count)`` of runs of at most ``size``."""
    return [(first, min(size, total - first)) for first in range(0, total, size)]


def _sum(numbers: list[Expr]) -> Expr:
    """By halves, as a horizontal sum of a vector."""
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [a + b for a, b in zip(numbers[:half], numbers[half:], strict=True)]
    return numbers[0]


def emit_split(
    buffers: Buffers,
    key_list: tuple[Expr, Expr] | None,
    heads: Heads,
    tile: ExactTile,
    exact_set: ExactSet,
    scale: float,
    softcap: float,
    terms: Terms,
) -> None:
    """Parallel over (batch, key/value head, part of the keys), then merged.

    Args:
        tile: from ``narrow_tile``.
        exact_set: without sinks.
    """
    batch, row_count = buffers.query.shape[0], buffers.query.shape[2] * heads.group
    pairs = settle(batch * heads.num_kv_heads)
    wanted, useful = blocks_of(index(MIN_TASKS), pairs), blocks_of(buffers.key.shape[2], MIN_KEYS)
    parts = settle(T.min(wanted, useful))
    # At least pairs * parts, in terms of shapes alone: TVM moves allocations up.
    total = batch * heads.num_kv_heads + MIN_TASKS
    shared = SharedPanels.allocate(tile, heads.value_dim, total, entropy=terms.entropy)
    first_row = index(0)
    with T.parallel(pairs * parts) as task:
        part = remainder(task, parts)
        rows = HeadRows.of(buffers, heads, quotient(task, parts))
        keys = KeyList.of(rows.batch, key_list)
        exact = FewRowPanels(tile, rows, scale, softcap, terms, settle(row_count))
        spans = ExactSpans(tile, rows, keys, exact_set, *rows.alignment(), exact.panels)
        exact.start(first_row)
        if terms.sinks:
            with T.If(part > 0):
                with T.Then():
                    exact.leave_out_sinks()
        spans.find(first_row)
        spans.attend(exact, (part, parts))
        with T.If(parts == 1):
            with T.Then():
                exact.finish(first_row)
            with T.Else():
                exact.save(shared, task)
    # The sinks are in the parts.
    merge_terms = Terms(lse=terms.lse, entropy=terms.entropy)
    with T.If(parts > 1):
        with T.Then():
            with T.parallel(pairs) as pair:
                rows = HeadRows.of(buffers, heads, pair)
                live = live_panels(tile, row_count, first_row)
                merged = ExactPanels(tile, rows, scale, softcap, merge_terms, live)
                merged.clear(first_row)
                with T.serial(parts) as number:
                    merged.merge(shared, settle(pair * parts + number))
                merged.finish(first_row)
