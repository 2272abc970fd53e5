"""Exact attention of one GPU block: online softmax over tiles of keys, as FlashAttention.

The block holds a tile of query rows. For each tile of keys: scores in registers, their row maxima
through shared memory, weights into shared memory, then weights times values on top of the rescaled
output in registers. Tiles that no row sees are never entered, since the loop runs over the spans of
``KeySpans``; the rest is masked number by number. Scores are in base 2.

Dao, 2023, "FlashAttention-2", https://arxiv.org/abs/2307.08691, algorithm 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import Heads
from subquad.kernels.templates.dense import ExactSet
from subquad.kernels.templates.exact import NO_MAXIMUM
from subquad.kernels.templates.gpu_block import (
    VECTOR,
    Block,
    SharedTile,
    Threads,
    ThreadTile,
    ceil_div,
    grid,
    keep,
    load_rows,
    load_transposed,
    padded_dims,
    small,
)
from subquad.kernels.templates.gpu_parameters import GpuParameters
from subquad.kernels.templates.gpu_rows import KeySpans, VisibleRows, list_keys, row_count
from subquad.kernels.templates.rows import Buffers, HeadRows, KeyList
from subquad.kernels.templates.vectors import (
    LOG2_E,
    Expr,
    index,
    quotient,
    remainder,
    settle,
    store_scalar,
)


@dataclass(frozen=True)
class Tiles:
    """Shared memory of a block that works on query rows and key tiles.

    Attributes:
        keys: ``[head_dim, keys]``, a tile of keys, or of their features.
        values: ``[keys, value dims]``.
        weights: ``[keys, rows]``.
        partial: ``[threads_x, rows]``, a number per row and thread column, to be reduced.
        factor: ``[rows]``, what a row's output and sum are multiplied by.
        slots: ``[keys]`` int32, the key slots of the tile; ``None``: they follow one another.
    """

    keys: SharedTile
    values: SharedTile
    weights: SharedTile
    partial: SharedTile
    factor: Expr
    slots: Expr | None

    @staticmethod
    def allocate(
        block: Block, parameters: GpuParameters, key_dim: int, value_dim: int, listed: bool
    ) -> Tiles:
        rows, keys = parameters.block_rows, parameters.block_keys
        columns = padded_columns(value_dim, parameters)
        return Tiles(
            keys=block.shared_tile(padded_dims(key_dim), keys + VECTOR),
            values=block.shared_tile(keys, columns),
            weights=block.shared_tile(keys, rows + VECTOR),
            partial=block.shared_tile(parameters.threads_x, rows),
            factor=block.shared(rows),
            slots=block.shared(keys, "int32") if listed else None,
        )


def padded_columns(dims: int, parameters: GpuParameters) -> int:
    """Columns of a tile with a place for every thread's columns."""
    return -(-dims // parameters.threads_x) * parameters.threads_x


class RowBlock:
    """A tile of query rows: their output, and the running sums of their weights."""

    def __init__(
        self, block: Block, heads: HeadRows, parameters: GpuParameters, tiles: Tiles
    ) -> None:
        self.block, self.heads, self.parameters, self.tiles = block, heads, parameters, tiles
        rows, threads_x = parameters.rows, parameters.threads_x
        self.output = ThreadTile.allocate(block, rows, -(-heads.value_dim // threads_x))
        # Of a row's weights this thread's part: its keys.
        self.sums = ThreadTile.allocate(block, rows, 1)
        self.scores = ThreadTile.allocate(block, rows, parameters.keys)
        self.maximum = block.shared(parameters.block_rows)

    def clear(self) -> None:
        """No keys so far."""
        self.output.clear()
        self.sums.clear()
        with self.block.each(self.parameters.block_rows) as row:
            store_scalar(self.maximum, T.float32(NO_MAXIMUM), row)

    def load_queries(
        self, target: SharedTile, first_row: Expr, transform: Callable[[Expr], Expr]
    ) -> None:
        """``target[dim, row] = transform(query)``; rows past the last one are zeros."""
        heads = self.heads

        def element(row: Expr, dim: Expr) -> Expr:
            # The last row again instead of one past the end, whose result is never written.
            number = settle(T.min(first_row + T.cast(row, "int64"), row_count(heads) - 1))
            query, head = heads.query_of(number), heads.head_of(number)
            return transform(heads.buffers.query[heads.batch, head, query, T.cast(dim, "int64")])

        load_transposed(self.block, target, heads.head_dim, self.parameters.block_rows, element)

    def load_slots(self, keys: KeyList, start: Expr, count: Expr) -> None:
        """Slots of the ``count`` (int32) keys from ``start`` of the list on."""
        slots = keys.slots
        if slots is None:
            return
        assert self.tiles.slots is not None
        with self.block.each(self.parameters.block_keys) as key:
            last = start + T.cast(T.min(key, count - 1), "int64")
            store_scalar(self.tiles.slots, slots[keys.batch, last], key)
        self.block.sync()

    def slot(self, keys: KeyList, start: Expr, key: Expr) -> Expr:
        """Slot (int32) of a key of the tile."""
        if keys.slots is None:
            return T.cast(start, "int32") + key
        assert self.tiles.slots is not None
        return self.tiles.slots[key]

    def load_keys(
        self,
        keys: KeyList,
        start: Expr,
        count: Expr,
        transform: Callable[[Expr], Expr] = lambda x: x,
    ) -> None:
        """``tiles.keys`` transposed and ``tiles.values``; zeros past the last key."""
        heads = self.heads

        def at(key: Expr, element: Callable[[Expr], Expr]) -> Expr:
            slot = T.cast(self.slot(keys, start, key), "int64")
            return T.if_then_else(key < count, element(slot), T.float32(0.0))

        def key_element(key: Expr, dim: Expr) -> Expr:
            d = T.cast(dim, "int64")
            return at(key, lambda slot: transform(heads.key(slot, d)))

        def value_element(key: Expr, dim: Expr) -> Expr:
            d = T.cast(dim, "int64")
            return at(key, lambda slot: heads.value(slot, d))

        size = self.parameters.block_keys
        load_transposed(self.block, self.tiles.keys, heads.head_dim, size, key_element)
        load_rows(self.block, self.tiles.values, size, heads.value_dim, value_element)

    def store_weights(self) -> None:
        """Scores, by now weights, to shared memory; their sums are added up."""
        tile = self.scores
        tile.store_transposed(self.tiles.weights)
        with tile.elements() as (i, j):
            total = self.sums.buffer[i, small(0)] + tile.buffer[i, j]
            store_scalar(self.sums.buffer, total, i, small(0))

    def add_values(self) -> None:
        """Add weights times values."""
        self.output.add_product(self.tiles.weights, self.tiles.values, self.parameters.block_keys)

    def reduce(self, start: Expr, combine: Callable[[Expr, Expr], Expr], row: Expr) -> Expr:
        """``tiles.partial`` of a row combined over the thread columns, onto ``start``."""
        total = T.alloc_buffer((small(1),), "float32", scope="local")
        store_scalar(total, start, small(0))
        with T.serial(small(self.parameters.threads_x)) as x:
            number = combine(total[small(0)], self.tiles.partial[x, row])
            store_scalar(total, number, small(0))
        return T.Bind(total[small(0)])

    def own_row(self) -> Expr:
        """A row of the tile for each thread; threads beyond the rows repeat them."""
        return T.truncmod(self.block.thread, self.parameters.block_rows)

    @property
    def owns_row(self) -> Expr:
        return self.block.thread < self.parameters.block_rows

    def rescale(self) -> None:
        """Multiply output and sums by ``tiles.factor``."""
        factor = self.tiles.factor
        self.output.update(lambda old, i, j: old * factor[self.output.row(i)])
        self.sums.update(lambda old, i, j: old * factor[self.sums.row(i)])

    def store_partial(self, element: Callable[[Expr], Expr]) -> None:
        """``tiles.partial[x, row] = element(i)`` for the rows of this thread."""
        with T.unroll(small(self.parameters.rows)) as i:
            self.tiles.partial.store(element(i), self.block.x, self.sums.row(i))

    def finish(self, first_row: Expr) -> None:
        """Divide by the sums and write; rows that saw no key become zeros."""
        self.block.sync()
        self.store_partial(lambda i: self.sums.buffer[i, small(0)])
        self.block.sync()
        row = self.own_row()
        total = self.reduce(T.float32(0.0), lambda a, b: a + b, row)
        # Where the sum is 0 so is the output.
        inverse = T.float32(1.0) / T.max(total, T.float32(1e-37))
        with T.If(self.owns_row):
            with T.Then():
                store_scalar(self.tiles.factor, inverse, row)
        self.block.sync()
        heads, tile = self.heads, self.output
        with T.unroll(small(tile.rows)) as i:
            number = settle(first_row + T.cast(tile.row(i), "int64"))
            query, head = heads.query_of(number), heads.head_of(number)
            with T.unroll(small(tile.columns)) as j:
                column = tile.column(j)
                inside = number < row_count(heads)
                if heads.value_dim % self.parameters.threads_x:
                    inside = T.And(inside, column < heads.value_dim)
                with T.If(inside):
                    with T.Then():
                        store_scalar(
                            heads.buffers.output,
                            tile.buffer[i, j] * self.tiles.factor[tile.row(i)],
                            heads.batch,
                            head,
                            query,
                            T.cast(column, "int64"),
                        )


class ExactBlock:
    """The exact keys of a row block, on top of what it has summed already.

    Args:
        queries: shared memory for them, ``[head_dim, rows]``; ``None``: of its own.
    """

    def __init__(
        self,
        rows: RowBlock,
        keys: KeyList,
        exact_set: ExactSet,
        scale: float,
        softcap: float,
        queries: SharedTile | None = None,
    ) -> None:
        self.rows, self.keys, self.exact_set, self.softcap = rows, keys, exact_set, softcap
        self.query_factor = scale / softcap if softcap else scale * LOG2_E
        block, parameters = rows.block, rows.parameters
        pitch = parameters.block_rows + VECTOR
        dims = padded_dims(rows.heads.head_dim)
        self.queries = queries or block.shared_tile(dims, pitch)
        self.visible: VisibleRows | None = None
        if exact_set.needs_masking:
            self.visible = VisibleRows(block, rows.heads, exact_set, parameters.block_rows)

    def load(self, first_row: Expr) -> None:
        """Queries, and what they see."""
        factor = T.float32(self.query_factor)
        self.rows.load_queries(self.queries, first_row, lambda x: x * factor)
        if self.visible is not None:
            self.visible.find(self.rows.parameters.block_rows, first_row)

    def attend(self, first_row: Expr) -> None:
        """All key tiles that some row sees."""
        heads, parameters = self.rows.heads, self.rows.parameters
        last_row = settle(T.min(first_row + parameters.block_rows, row_count(heads)) - 1)
        spans = KeySpans.find(
            heads, self.keys, self.exact_set, heads.query_of(first_row), heads.query_of(last_row)
        )
        tiles = spans.tiles(parameters.block_keys)
        # One loop over the tiles of all spans: their code is long.
        before = [index(0)]
        for number in tiles:
            before.append(settle(before[-1] + number))
        with T.serial(before[-1]) as tile:
            begin, count = spans.begins[0], spans.counts[0]
            own = tile
            for span in range(1, len(tiles)):
                reached = tile >= before[span]
                begin = T.if_then_else(reached, spans.begins[span], begin)
                count = T.if_then_else(reached, spans.counts[span], count)
                own = T.if_then_else(reached, tile - before[span], own)
            done = settle(own * parameters.block_keys)
            start = settle(begin + done)
            left = T.min(count - done, index(parameters.block_keys))
            self._attend_tile(start, keep(T.cast(left, "int32"), "int32"))

    def _attend_tile(self, start: Expr, count: Expr) -> None:
        rows = self.rows
        block, tiles = rows.block, rows.tiles
        block.sync()
        rows.load_slots(self.keys, start, count)
        rows.load_keys(self.keys, start, count)
        block.sync()
        scores = rows.scores
        scores.clear()
        scores.add_product(self.queries, tiles.keys, rows.heads.head_dim)
        self._mask(start, count)
        rows.store_partial(self._row_maximum)
        block.sync()
        row = rows.own_row()
        old = keep(rows.maximum[row], "float32")
        new = rows.reduce(old, T.max, row)
        block.sync()
        with T.If(rows.owns_row):
            with T.Then():
                store_scalar(tiles.factor, T.exp2(old - new), row)
                store_scalar(rows.maximum, new, row)
        block.sync()
        scores.update(lambda old, i, j: T.exp2(old - rows.maximum[scores.row(i)]))
        rows.rescale()
        rows.store_weights()
        block.sync()
        rows.add_values()

    def _mask(self, start: Expr, count: Expr) -> None:
        scores = self.rows.scores
        hidden = T.float32(-math.inf)

        def masked(score: Expr, i: Expr, j: Expr) -> Expr:
            key = scores.column(j)
            if self.softcap:
                score = T.tanh(score) * T.float32(self.softcap * LOG2_E)
            seen = key < count
            if self.visible is not None:
                slot = self.rows.slot(self.keys, start, key)
                seen = T.And(seen, self.visible.seen(scores.row(i), slot))
            return T.Select(seen, score, hidden)

        scores.update(masked)

    def _row_maximum(self, i: Expr) -> Expr:
        """Of a thread's keys."""
        scores = self.rows.scores
        maximum = scores.buffer[i, small(0)]
        for j in range(1, scores.columns):
            maximum = T.max(maximum, scores.buffer[i, small(j)])
        return maximum


def emit_exact(
    buffers: Buffers,
    heads: Heads,
    parameters: GpuParameters,
    scope: str,
    exact_set: ExactSet,
    scale: float,
    softcap: float = 0.0,
) -> None:
    """The launches: the key list if there is a mask, then a block per (batch, head, row tile)."""
    key_list = list_keys(buffers, scope)
    batch, query_len = buffers.query.shape[0], buffers.query.shape[2]
    row_tiles = ceil_div(query_len * heads.group, parameters.block_rows)
    threads = Threads(parameters.threads_x, parameters.threads_y, scope)
    with grid(batch * heads.num_kv_heads * row_tiles, threads) as block:
        number = T.cast(block.number, "int64")
        # Late rows see most keys: their blocks start first.
        row_tile = row_tiles - 1 - remainder(number, row_tiles)
        first_row = settle(row_tile * parameters.block_rows)
        head_rows = HeadRows.of(buffers, heads, quotient(number, row_tiles))
        keys = KeyList.of(head_rows.batch, key_list)
        tiles = Tiles.allocate(
            block, parameters, heads.head_dim, heads.value_dim, key_list is not None
        )
        rows = RowBlock(block, head_rows, parameters, tiles)
        exact = ExactBlock(rows, keys, exact_set, scale, softcap)
        rows.clear()
        exact.load(first_row)
        exact.attend(first_row)
        rows.finish(first_row)
