"""The linear part on a GPU: parallel over chunks, so that few heads fill it too.

Keys are cut into chunks such that the boundaries are those at which the tiles of queries start to
count: a tile's state is the sum of whole chunks before it, and its own keys are one chunk. Three
launches (plus the key lists):

1. a block per (batch, key/value head, chunk, slice of features): ``sum_j phi(k_j) [v_j, 1]``,
   the last column being the normaliser;
2. a thread per number: exclusive sums over the chunks, the total behind the last one;
3. a block per (batch, query head, tile of queries): state before the tile, near keys with a
   triangular mask, and the exact keys on top of both.

Pass 3 starts the online softmax of the exact keys from the linear sums, as if they were one key
that came first: its score is the binary exponent of the denominator, so nothing overflows and no
logarithm is needed.

Chunks as in Yang et al., 2024, "Gated Linear Attention", https://arxiv.org/abs/2312.06635, section
4; the mix as in ``kernels/hybrid/semantics.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    padded_dims,
    small,
)
from subquad.kernels.templates.gpu_exact import ExactBlock, RowBlock, Tiles, padded_columns
from subquad.kernels.templates.gpu_parameters import GpuParameters
from subquad.kernels.templates.gpu_rows import list_keys
from subquad.kernels.templates.rows import Buffers, HeadRows, KeyList
from subquad.kernels.templates.vectors import (
    LOG2_E,
    Expr,
    clamp,
    index,
    quotient,
    remainder,
    settle,
    store_scalar,
)

SCAN_THREADS = 256
SCAN_STEPS = 8
"""Chunks whose numbers a thread of pass 2 reads before it uses the first."""


def _elu_plus_one(x: Expr) -> Expr:
    zero = T.float32(0.0)
    return T.max(x, zero) + T.exp2(T.min(x, zero) * T.float32(LOG2_E))


FEATURES: Mapping[str, Callable[[Expr], Expr]] = {"elu": _elu_plus_one}
"""Feature maps that work element by element; their names are ``GPU_FEATURE_MAPS``."""


@dataclass(frozen=True)
class LinearPart:
    """The linear remainder of a variant.

    Attributes:
        gap: a query counts keys at least this far back; ``None``: all keys, before and after.
        skipped_sinks: positions ``0 .. skipped_sinks - 1`` are not counted.
    """

    feature: Callable[[Expr], Expr]
    gap: int | None
    skipped_sinks: int


class _Chunks:
    """How the keys are cut. Chunk ``m`` is the slots from ``offset + (m - 1) * size`` on."""

    def __init__(self, buffers: Buffers, heads: Heads, part: LinearPart, size: int) -> None:
        self.part, self.size, self.heads = part, size, heads
        batch, self.kv_len = buffers.key.shape[0], buffers.key.shape[2]
        # One more than the keys fill, since the first boundary may be anywhere in a chunk.
        self.count = ceil_div(self.kv_len, size) + 1
        pairs = batch * heads.num_kv_heads
        shape = (pairs, self.count + 1, heads.head_dim, heads.value_dim + 1)
        self.states = T.alloc_buffer(shape, "float32")

    def shift(self, alignment: Expr) -> tuple[Expr, Expr]:
        """Chunk in which the first tile's keys start, and slot at which chunk 1 starts."""
        if self.part.gap is None:
            return index(1), index(0)
        first = alignment - self.part.gap
        # Floor division; the queries of a batch row may start before its keys.
        chunks = settle(T.floordiv(first, index(self.size)))
        return settle(chunks + 1), settle(first - chunks * self.size)

    def start(self, chunk: Expr, offset: Expr) -> Expr:
        return clamp(offset + (chunk - 1) * self.size, index(0), self.kv_len)


def emit_hybrid(
    buffers: Buffers,
    heads: Heads,
    part: LinearPart,
    parameters: GpuParameters,
    scope: str,
    exact_set: ExactSet | None,
    scale: float,
) -> None:
    """All launches. ``exact_set``: ``None`` without exact keys."""
    real_keys = None
    if exact_set is not None or not part.skipped_sinks:
        real_keys = list_keys(buffers, scope)
    linear_keys = real_keys
    if part.skipped_sinks:
        linear_keys = list_keys(buffers, scope, part.skipped_sinks)
    # A tile holds query rows of one head: with all heads of a group its keys were as many chunks.
    chunks = _Chunks(buffers, heads, part, parameters.block_rows)
    _sum_chunks(buffers, chunks, parameters, scope, linear_keys)
    _scan(chunks, buffers, scope)
    query_len = buffers.query.shape[2]
    tile_count = ceil_div(query_len, parameters.block_rows)
    threads = Threads(parameters.threads_x, parameters.threads_y, scope)
    with grid(buffers.query.shape[0] * heads.num_heads * tile_count, threads) as block:
        number = T.cast(block.number, "int64")
        tile = remainder(number, tile_count)
        row_head = quotient(number, tile_count)
        rows = HeadRows.of_query_head(buffers, heads, row_head)
        listed = linear_keys is not None
        shared = Tiles.allocate(block, parameters, heads.head_dim, heads.value_dim, listed)
        row_block = RowBlock(block, rows, parameters, shared)
        linear = _LinearBlock(row_block, chunks, KeyList.of(rows.batch, linear_keys))
        exact = None
        if exact_set is not None:
            real = KeyList.of(rows.batch, real_keys)
            exact = ExactBlock(row_block, real, exact_set, scale, 0.0, linear.queries)
        first_row = settle(tile * parameters.block_rows)
        row_block.clear()
        linear.add(tile, first_row)
        if exact is not None:
            linear.as_first_key()
            exact.load(first_row)
            exact.attend(first_row)
        row_block.finish(first_row)


def _sum_chunks(
    buffers: Buffers,
    chunks: _Chunks,
    parameters: GpuParameters,
    scope: str,
    key_list: tuple[Expr, Expr] | None,
) -> None:
    """Pass 1; rows of a block's result are features, columns value dims."""
    heads, features = chunks.heads, parameters.block_rows
    slices = -(-heads.head_dim // features)
    threads = Threads(parameters.threads_x, parameters.threads_y, scope)
    pairs = buffers.key.shape[0] * heads.num_kv_heads
    with grid(pairs * chunks.count * slices, threads) as block:
        number = T.cast(block.number, "int64")
        first_feature = settle(remainder(number, slices) * features)
        chunk = remainder(quotient(number, slices), chunks.count)
        pair = quotient(number, chunks.count * slices)
        rows = HeadRows.of(buffers, heads, pair)
        keys = KeyList.of(rows.batch, key_list)
        # Numbers past the last feature stay what shared memory held, and are not written.
        key_tile = block.shared_tile(parameters.block_keys, features + VECTOR)
        columns = padded_columns(heads.value_dim, parameters)
        value_tile = block.shared_tile(parameters.block_keys, columns)
        sums = ThreadTile.allocate(block, parameters.rows, columns // parameters.threads_x)
        total = T.alloc_buffer((small(1),), "float32", scope="local")
        sums.clear()
        store_scalar(total, T.float32(0.0), small(0))
        own = T.truncmod(block.thread, features)
        _, offset = chunks.shift(rows.alignment()[0])
        begin = settle(keys.rank(chunks.start(chunk, offset)))
        end = settle(keys.rank(chunks.start(chunk + 1, offset)))
        left = settle(end - begin)
        with T.serial(ceil_div_settled(left, parameters.block_keys)) as step:
            start = settle(begin + step * parameters.block_keys)
            count = keep(T.cast(T.min(end - start, index(parameters.block_keys)), "int32"), "int32")
            block.sync()
            _load_features(block, rows, keys, chunks, key_tile, first_feature, start, count)
            _load_values(block, rows, keys, value_tile, parameters, start, count)
            block.sync()
            sums.add_product(key_tile, value_tile, parameters.block_keys)
            with T.serial(small(parameters.block_keys)) as key:
                store_scalar(total, total[small(0)] + key_tile[key, own], small(0))
        with T.unroll(small(sums.rows)) as i:
            feature = settle(first_feature + T.cast(sums.row(i), "int64"))
            with T.unroll(small(sums.columns)) as j:
                column = sums.column(j)
                with T.If(T.And(feature < heads.head_dim, column < heads.value_dim)):
                    with T.Then():
                        at = (pair, chunk, feature, T.cast(column, "int64"))
                        store_scalar(chunks.states, sums.buffer[i, j], *at)
        feature = first_feature + T.cast(own, "int64")
        with T.If(T.And(block.thread < features, feature < heads.head_dim)):
            with T.Then():
                at = (pair, chunk, feature, index(heads.value_dim))
                store_scalar(chunks.states, total[small(0)], *at)


def ceil_div_settled(x: Expr, size: int) -> Expr:
    """Tiles of ``size`` in ``x``, which may be 0."""
    return settle(ceil_div(x, size))


def _listed_slot(keys: KeyList, start: Expr, key: Expr, count: Expr) -> Expr:
    """Slot of a key of a tile; that of the last one for those past it."""
    return keys.slot(start + T.cast(T.min(key, count - 1), "int64"))


def _load_features(
    block: Block,
    rows: HeadRows,
    keys: KeyList,
    chunks: _Chunks,
    target: SharedTile,
    first: Expr,
    start: Expr,
    count: Expr,
) -> None:
    """``target[key, feature]``: features of keys, 0 past the last key or feature."""

    def element(key: Expr, feature: Expr) -> Expr:
        at = settle(T.min(first + T.cast(feature, "int64"), index(rows.head_dim - 1)))
        number = chunks.part.feature(rows.key(_listed_slot(keys, start, key, count), at))
        inside = T.And(key < count, first + T.cast(feature, "int64") < rows.head_dim)
        return T.Select(inside, number, T.float32(0.0))

    load_rows(block, target, target.rows, target.pitch - VECTOR, element)


def _load_values(
    block: Block,
    rows: HeadRows,
    keys: KeyList,
    target: SharedTile,
    parameters: GpuParameters,
    start: Expr,
    count: Expr,
) -> None:
    def element(key: Expr, dim: Expr) -> Expr:
        number = rows.value(_listed_slot(keys, start, key, count), T.cast(dim, "int64"))
        return T.Select(key < count, number, T.float32(0.0))

    load_rows(block, target, parameters.block_keys, rows.value_dim, element)


def _scan(chunks: _Chunks, buffers: Buffers, scope: str) -> None:
    """Pass 2."""
    heads = chunks.heads
    numbers = heads.head_dim * (heads.value_dim + 1)
    per_pair = -(-numbers // SCAN_THREADS)
    pairs = buffers.key.shape[0] * heads.num_kv_heads
    with grid(pairs * per_pair, Threads(SCAN_THREADS, 1, scope)) as block:
        number = T.cast(block.number, "int64")
        pair = quotient(number, per_pair)
        element = settle(remainder(number, per_pair) * SCAN_THREADS + T.cast(block.x, "int64"))
        feature = quotient(element, heads.value_dim + 1)
        column = remainder(element, heads.value_dim + 1)
        running = T.alloc_buffer((small(1),), "float32", scope="local")
        ahead = T.alloc_buffer((small(SCAN_STEPS),), "float32", scope="local")
        store_scalar(running, T.float32(0.0), small(0))
        with T.If(element < numbers):
            with T.Then():
                with T.serial(ceil_div(chunks.count + 1, SCAN_STEPS)) as group:
                    first = settle(group * SCAN_STEPS)
                    with T.unroll(small(SCAN_STEPS)) as step:
                        chunk = T.min(first + T.cast(step, "int64"), chunks.count - 1)
                        store_scalar(ahead, chunks.states[pair, chunk, feature, column], step)
                    with T.unroll(small(SCAN_STEPS)) as step:
                        chunk = first + T.cast(step, "int64")
                        with T.If(chunk <= chunks.count):
                            with T.Then():
                                at = (pair, chunk, feature, column)
                                store_scalar(chunks.states, running[small(0)], *at)
                                store_scalar(running, running[small(0)] + ahead[step], small(0))


class _LinearBlock:
    """The linear sums of a tile of query rows."""

    def __init__(self, rows: RowBlock, chunks: _Chunks, keys: KeyList) -> None:
        self.rows, self.chunks, self.keys = rows, chunks, keys
        pitch = rows.parameters.block_rows + VECTOR
        self.queries = rows.block.shared_tile(padded_dims(rows.heads.head_dim), pitch)
        self.pair = settle(rows.heads.batch * chunks.heads.num_kv_heads + rows.heads.kv_head)

    def add(self, tile: Expr, first_row: Expr) -> None:
        """Numerators into the output, denominators into the sums."""
        chunks = self.chunks
        self.rows.load_queries(self.queries, first_row, chunks.part.feature)
        alignment, _ = self.rows.heads.alignment()
        before, offset = chunks.shift(alignment)
        if chunks.part.gap is None:
            self._add_state(chunks.count)
            return
        own = settle(tile + before)
        # Chunks before the first hold nothing, those past the last the total.
        self._add_state(clamp(own, index(0), chunks.count))
        begin = settle(self.keys.rank(chunks.start(own, offset)))
        end = settle(self.keys.rank(chunks.start(own + 1, offset)))
        last_counted = settle(first_row + alignment - chunks.part.gap)
        keys_per_tile = self.rows.parameters.block_keys
        with T.serial(ceil_div_settled(end - begin, keys_per_tile)) as step:
            start = settle(begin + step * keys_per_tile)
            left = T.min(end - start, index(keys_per_tile))
            self._add_near_keys(start, keep(T.cast(left, "int32"), "int32"), last_counted)

    def _add_state(self, chunk: Expr) -> None:
        """``phi(q)`` times the sums before ``chunk``."""
        rows, heads = self.rows, self.rows.heads
        states, size = self.chunks.states, rows.parameters.block_keys
        with T.serial(small(-(-heads.head_dim // size))) as part:
            first = part * size

            def element(row: Expr, column: Expr, first: Expr = first) -> Expr:
                feature = T.min(first + row, small(heads.head_dim - 1))
                at = (self.pair, chunk, T.cast(feature, "int64"), T.cast(column, "int64"))
                return T.Select(first + row < heads.head_dim, states[at], T.float32(0.0))

            rows.block.sync()
            load_rows(rows.block, rows.tiles.values, size, heads.value_dim, element)
            rows.block.sync()
            if heads.head_dim % size == 0 or heads.head_dim < size:
                count = min(size, heads.head_dim)
                rows.output.add_product(self.queries, rows.tiles.values, count, first)
            else:
                self._add_clipped(first, size)
        threads_x = rows.parameters.threads_x
        sums = rows.sums
        with T.serial(small(-(-heads.head_dim // threads_x))) as step:
            feature = step * threads_x + rows.block.x
            inside = T.min(feature, small(heads.head_dim - 1))
            at = (self.pair, chunk, T.cast(inside, "int64"), index(heads.value_dim))
            normaliser = keep(
                T.Select(feature < heads.head_dim, states[at], T.float32(0.0)), "float32"
            )
            sums.update(lambda old, i, j: old + normaliser * self.queries[inside, sums.row(i)])

    def _add_clipped(self, first: Expr, size: int) -> None:
        """A slice of features that the last one does not fill: one feature after another."""
        rows = self.rows
        output = rows.output
        count = T.min(small(rows.heads.head_dim) - first, small(size))
        with T.serial(keep(count, "int32")) as k:
            output.update(
                lambda old, i, j: (
                    old
                    + self.queries[first + k, output.row(i)]
                    * rows.tiles.values[k, output.column(j)]
                )
            )

    def _add_near_keys(self, start: Expr, count: Expr, last_counted: Expr) -> None:
        """A tile of the block's own chunk; row ``r`` counts slots up to ``last_counted + r``."""
        rows = self.rows
        scores = rows.scores
        rows.block.sync()
        rows.load_slots(self.keys, start, count)
        rows.load_keys(self.keys, start, count, self.chunks.part.feature)
        rows.block.sync()
        scores.clear()
        scores.add_product(self.queries, rows.tiles.keys, rows.heads.head_dim)

        def counted(similarity: Expr, i: Expr, j: Expr) -> Expr:
            key = scores.column(j)
            slot = T.cast(rows.slot(self.keys, start, key), "int64")
            seen = T.And(key < count, slot <= last_counted + T.cast(scores.row(i), "int64"))
            return T.Select(seen, similarity, T.float32(0.0))

        scores.update(counted)
        rows.store_weights()
        rows.block.sync()
        rows.add_values()

    def as_first_key(self) -> None:
        """Scale what was summed by ``2^-e``, ``e`` the exponent of the denominator.

        A running maximum of ``e`` makes it one key of that score; ``-inf`` where nothing counts.
        """
        rows = self.rows
        tiles = rows.tiles
        rows.block.sync()
        rows.store_partial(lambda i: rows.sums.buffer[i, small(0)])
        rows.block.sync()
        row = rows.own_row()
        total = rows.reduce(T.float32(0.0), lambda a, b: a + b, row)
        bits = T.reinterpret("int32", total)
        exponent = keep(T.shift_right(bits, small(23)) - small(127), "int32")
        # 2^-e by its bits; for a subnormal sum (e = -127) 2^126, which keeps it finite.
        biased = T.max(T.min(small(127) - exponent, small(253)), small(1))
        power = T.shift_left(biased, small(23))
        factor = T.reinterpret("float32", keep(power, "int32"))
        shift = T.Select(total > T.float32(0.0), T.cast(exponent, "float32"), T.float32(NO_MAXIMUM))
        with T.If(rows.owns_row):
            with T.Then():
                store_scalar(tiles.factor, factor, row)
                store_scalar(rows.maximum, shift, row)
        rows.block.sync()
        rows.rescale()
