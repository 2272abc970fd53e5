"""The linear part: sums over features of the keys beyond each query's own, chunk by chunk.

A *side* counts keys at a distance of ``gap`` or more before a query (past), or after it (future).
Query ``i`` of a chunk counts the keys up to slot ``base + i`` (from it on), so the keys of a chunk
are as many slots: their products with the chunk's queries form a triangle, and all keys beyond
have been added up in the state, ``[features, value_dim]``. Its column ``value_dim`` holds the
normaliser, so a numerator and its denominator are one product.

Queries lie in the lanes of panels, each of one head; keys do too while their features are computed,
``[features, keys]``. Then every product reads one operand as vectors and the other as broadcast
scalars, and nothing is transposed but queries, keys and output themselves.

With decay every weight is multiplied by ``exp(log_decay * distance)``: the state stands for the
border between it and the chunk, and what is near comes from a table by the difference of slots, so
no exponent is ever positive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tvm.script.ir_builder import tirx as T

from subquad.kernels.templates.exact import NO_MAXIMUM, ExactPanels
from subquad.kernels.templates.feature_kernels import Columns, FeatureKernel, project
from subquad.kernels.templates.products import (
    Panel,
    RegisterTile,
    for_row_groups,
    padded,
    unrolled,
)
from subquad.kernels.templates.rows import HeadRows, KeyList, pick, transpose
from subquad.kernels.templates.value_sums import LaneSums
from subquad.kernels.templates.vectors import (
    LOG2_E,
    Expr,
    bind,
    blocks_of,
    broadcast,
    constant,
    exp2,
    index,
    integers,
    load,
    settle,
    settle_float,
    store,
    store_scalar,
    vector_type,
)


@dataclass(frozen=True)
class Side:
    """Which keys count; see the module docstring.

    Attributes:
        gaps: one for all, or one for each part of the ``HeadSubset``.
        gap: the gap of a task's heads.
    """

    direction: Literal["past", "future"]
    gaps: tuple[int, ...]
    gap: Expr = None

    @property
    def is_past(self) -> bool:
        return self.direction == "past"

    def of(self, rows: HeadRows) -> Side:
        """The side for one task."""
        gap: Expr = self.gaps[0]
        if any(each != gap for each in self.gaps):
            gap = pick(self.gaps, rows.part)
        return replace(self, gap=gap)

    def base(self, first_query: Expr, alignment: Expr) -> Expr:
        """Slot that shares row 0 of a chunk with its first query; may lie outside the keys."""
        shift = first_query + alignment
        return settle(shift - self.gap if self.is_past else shift + self.gap)


@dataclass(frozen=True)
class LinearTile:
    """Sizes of the linear part.

    Attributes:
        panel: query rows in one tile, as in the exact part.
        queries: query slots per chunk, a multiple of ``panel.width``.
        group: query heads per key/value head.
        rows: broadcast scalars per register tile.
        state: panel of value dims in the state update.
        state_rows: features per register tile of the state update.
        unroll: steps of a product's inner loop per iteration.
    """

    panel: Panel
    queries: int
    group: int
    rows: int
    state: Panel
    state_rows: int
    unroll: int

    @property
    def panels_per_head(self) -> int:
        return self.queries // self.panel.width

    @property
    def panels(self) -> int:
        """Panels per chunk."""
        return self.panels_per_head * self.group


@dataclass(frozen=True)
class Features:
    """The feature map of a variant.

    Attributes:
        map_dim: outputs of the projection; 0: the map has no weights.
        count: features per row.
    """

    kernel: FeatureKernel
    map_dim: int
    count: int


@dataclass(frozen=True)
class Near:
    """Which of a chunk's listed keys a panel meets directly.

    Attributes:
        base: see ``Side.base``.
        start: place of the chunk's first key in the list.
        first, last: keys ``first .. last - 1`` of the chunk count for some lane.
        partial_first, partial_last: those of them that some lane does not count.
    """

    base: Expr
    start: Expr
    first: Expr
    last: Expr
    partial_first: Expr
    partial_last: Expr


class LinearPanels:
    """State and scratch of the linear part for one (batch, key/value head) and segment."""

    def __init__(self, tile: LinearTile, rows: HeadRows, keys: KeyList, features: Features):
        self.tile, self.heads, self.keys, self.features = tile, rows, keys, features
        panel = tile.panel
        self.state_width = state_width(tile, rows.value_dim)
        columns = padded(tile.queries, panel.width) + tile.rows
        self.state = T.alloc_buffer((features.count, self.state_width), "float32")
        self.key_features = T.alloc_buffer((features.count, columns), "float32")
        self.values = T.alloc_buffer((tile.queries, self.state_width), "float32")
        self.packed = T.alloc_buffer((1, rows.head_dim, panel.width), "float32")
        self.projected: Expr | None = None
        if features.map_dim:
            self.projected = T.alloc_buffer((features.map_dim, panel.width), "float32")
        self.decay: Decay | None = None
        if "log_decay" in rows.buffers.extra:
            self.decay = Decay(tile, rows)

    def allocate_queries(self) -> None:
        """Scratch that only the passes over queries need."""
        tile, heads = self.tile, self.heads
        width = tile.panel.width
        self.queries = T.alloc_buffer((tile.panels, self.features.count, width), "float32")
        self.similarity = T.alloc_buffer((tile.queries + tile.rows, width), "float32")
        self.sums_buffer = T.alloc_buffer((tile.panels, heads.value_dim + 1, width), "float32")

    def clear(self) -> None:
        self._each_state_vector(
            lambda f, e: store(self.state, constant(0.0, self._lanes), f, e, lanes=self._lanes)
        )

    def copy_state(self, states: Expr, at: Expr, *, out: bool) -> None:
        """Between the local state and row ``at`` of the shared ones."""
        lanes = self._lanes

        def move(f: Expr, e: Expr) -> None:
            if out:
                store(states, load(self.state, f, e, lanes=lanes), at, f, e, lanes=lanes)
            else:
                store(self.state, load(states, at, f, e, lanes=lanes), f, e, lanes=lanes)

        self._each_state_vector(move)

    @property
    def _lanes(self) -> int:
        return self.tile.state.lanes

    def _each_state_vector(self, body: Callable[[Expr, Expr], None]) -> None:
        with T.serial(index(self.features.count)) as f:
            with T.serial(index(self.state_width // self._lanes)) as e:
                body(f, e * self._lanes)

    def pack_keys(self, start: Expr, count: Expr) -> None:
        """Features and values of the listed keys ``start .. start + count - 1``."""
        panel = self.tile.panel
        with T.serial(blocks_of(count, panel.width)) as block:
            at = settle(block * panel.width)
            with T.serial(index(panel.width // panel.square)) as part:
                lane = settle(part * panel.square)
                # Lanes past the last key hold it once more; their features become zeros.
                slots = [
                    settle(self.keys.slot(start + T.min(at + lane + i, count - 1)))
                    for i in range(panel.square)
                ]
                dims = self.heads.head_dim
                transpose(panel.square, dims, slots, self._key, self.packed, (index(0),), lane)
            out = Columns(panel, self.key_features, start=at)
            self._map("key_map", self.heads.kv_head, out)
            with T.serial(T.max(at + panel.width - count, index(0))) as surplus:
                with T.serial(index(self.features.count)) as f:
                    store_scalar(self.key_features, T.float32(0.0), f, count + surplus)
        self._pack_values(start, count)

    def _key(self, slot: Expr, d: Expr, lanes: int) -> Expr:
        heads = self.heads
        return load(heads.buffers.key, heads.batch, heads.kv_head, slot, d, lanes=lanes)

    def _pack_values(self, start: Expr, count: Expr) -> None:
        """Rows of values; a one after each sums up its weights."""
        lanes, dims = self._lanes, self.heads.value_dim
        whole = dims // lanes
        with T.serial(count) as j:
            slot = self.keys.slot(start + j)
            row = (self.heads.batch, self.heads.kv_head, slot)
            with T.serial(index(whole)) as v:
                at = bind(v * lanes)
                vector = load(self.heads.buffers.value, *row, at, lanes=lanes)
                store(self.values, vector, j, at, lanes=lanes)
            for d in range(whole * lanes, self.state_width):
                number = self.heads.value(slot, index(d)) if d < dims else T.float32(d == dims)
                store_scalar(self.values, number, j, index(d))

    def pack_queries(self, first_row: Expr) -> None:
        """Features of the chunk's queries."""
        tile = self.tile
        with T.serial(index(tile.panels)) as p:
            row = settle(first_row + p * tile.panel.width)
            self.heads.pack_queries(self.packed, index(0), row, tile.panel, 1.0)
            out = Columns(tile.panel, self.queries, (p,))
            self._map("query_map", settle(self.heads.head_of(row)), out)

    def _map(self, weights: str, head: Expr, out: Columns) -> None:
        tile, heads = self.tile, self.heads
        x = Columns(tile.panel, self.packed, (index(0),))
        if self.projected is None:
            self.features.kernel.emit(x, heads.head_dim, out)
            return
        u = Columns(tile.panel, self.projected)
        dims = heads.head_dim, self.features.map_dim
        project(heads.buffers.extra[weights], head, dims, tile.rows, tile.unroll, x, u)
        self.features.kernel.emit(u, self.features.map_dim, out)

    def update(self, side: Side | None, start: Expr, count: Expr, base: Expr) -> None:
        """Add the packed keys, which are ``start .. start + count - 1`` of the list.

        With decay the state moves on by one chunk, from one border of slots ``base ...`` to the
        other, and the packed keys are spent.
        """
        factor: Expr | None = None
        if self.decay is not None:
            assert side is not None
            self._decay_keys(side, start, count, base)
            factor = self.decay.of_chunk
        panel = self.tile.state

        def features(first: Expr, rows: int) -> None:
            with T.serial(index(padded(self.heads.value_dim, panel.width) // panel.width)) as block:
                at = bind(block * panel.width)
                products = RegisterTile.allocate(panel, rows)
                products.clear()
                with T.serial(count) as j:
                    scalars = [self.key_features[first + row, j] for row in range(rows)]
                    products.multiply_add(scalars, panel.load(self.values, j, start=at))
                for row in range(rows):
                    old = panel.load(self.state, first + row, start=at)
                    if factor is not None:
                        old = [x * broadcast(factor, panel.lanes) for x in old]
                    new = [a + b for a, b in zip(old, products.get(row), strict=True)]
                    panel.store(self.state, new, first + row, start=at)

        for_row_groups(self.features.count, self.tile.state_rows, features)
        if self.heads.value_dim % panel.width == 0:
            self._update_normaliser(count, factor)

    def _update_normaliser(self, count: Expr, factor: Expr | None) -> None:
        """Where no block of the state holds the column of ones: sums over lanes."""
        lanes = self.tile.panel.lanes
        column = index(self.heads.value_dim)
        total = RegisterTile.allocate(Panel(lanes, 1), 1)
        sums = T.alloc_buffer((lanes,), "float32")
        with T.serial(index(self.features.count)) as f:
            total.clear()
            with T.serial(blocks_of(count, lanes)) as v:
                row = load(self.key_features, f, v * lanes, lanes=lanes)
                total.set(0, [total.get(0)[0] + row])
            # TVM cannot read single elements of a buffer that it keeps as vectors.
            store(sums, total.get(0)[0], index(0), lanes=lanes)
            parts = [sums[index(lane)] for lane in range(lanes)]
            while len(parts) > 1:
                parts = [a + b for a, b in zip(parts[::2], parts[1::2], strict=True)]
            old = self.state[f, column]
            new = parts[0] + (old if factor is None else old * factor)
            store_scalar(self.state, new, f, column)

    def _decay_keys(self, side: Side, start: Expr, count: Expr, base: Expr) -> None:
        """Weights of the packed keys at the border the state moves to."""
        assert self.decay is not None
        lanes, size = self.tile.panel.lanes, self.tile.queries
        weights = T.alloc_buffer((padded(size, lanes),), "float32")
        with T.serial(count) as j:
            t = settle(self.keys.slot(start + j) - base)
            steps = index(size) - t if side.is_past else t
            store_scalar(weights, self.decay.powers[steps], j)
        # Features past the last key are zeros, whatever they are multiplied by; it must be finite.
        with T.serial(blocks_of(count, lanes) * lanes - count) as surplus:
            store_scalar(weights, T.float32(0.0), count + surplus)
        with T.serial(index(self.features.count)) as f:
            with T.serial(blocks_of(count, lanes)) as v:
                at = settle(v * lanes)
                new = load(self.key_features, f, at, lanes=lanes) * load(weights, at, lanes=lanes)
                store(self.key_features, new, f, at, lanes=lanes)

    def sums(
        self, p: Expr, side: Side | None, near: Near | None, add: Columns | None, out: Columns
    ) -> None:
        """Numerators of panel ``p`` and, in row ``value_dim``, denominators.

        Args:
            near: keys outside the state; ``None``: there are none.
            add: sums to begin with.
        """
        if near is not None:
            assert side is not None
            self._similarities(p, near)
            self._hide(p, side, near)
        tile = self.tile
        panel = tile.panel

        def value_dims(first: Expr, rows: int) -> None:
            products = RegisterTile.allocate(panel, rows)
            products.clear()
            with unrolled(self.features.count, tile.unroll) as features:
                for f in features:
                    scalars = [self.state[f, first + row] for row in range(rows)]
                    products.multiply_add(scalars, panel.load(self.queries, p, f))
            if self.decay is not None:
                assert side is not None
                far = self.decay.of_far_keys(side, self.first_query(p))
                for row in range(rows):
                    scaled = [a * b for a, b in zip(products.get(row), far, strict=True)]
                    products.set(row, scaled)
            if near is not None:
                with T.serial(near.last - near.first) as place:
                    j = bind(near.first + place)
                    scalars = [self.values[j, first + row] for row in range(rows)]
                    products.multiply_add(scalars, panel.load(self.similarity, j))
            for row in range(rows):
                new = products.get(row)
                if add is not None:
                    new = [a + b for a, b in zip(new, add.load(first + row), strict=True)]
                out.store(first + row, new)

        for_row_groups(self.heads.value_dim + 1, tile.rows, value_dims)

    def first_query(self, p: Expr) -> Expr:
        """Number in the chunk of the query in a panel's first lane."""
        return settle(T.truncmod(p, index(self.tile.panels_per_head)) * self.tile.panel.width)

    def _similarities(self, p: Expr, near: Near) -> None:
        tile = self.tile
        with T.serial(blocks_of(near.last - near.first, tile.rows)) as group:
            products = RegisterTile.allocate(tile.panel, tile.rows)
            products.clear()
            first = bind(near.first + group * tile.rows)
            with unrolled(self.features.count, tile.unroll) as features:
                for f in features:
                    scalars = [self.key_features[f, first + row] for row in range(tile.rows)]
                    products.multiply_add(scalars, tile.panel.load(self.queries, p, f))
            for row in range(tile.rows):
                tile.panel.store(self.similarity, products.get(row), first + row)

    def _hide(self, p: Expr, side: Side, near: Near) -> None:
        """Zero what a lane does not count, and let the rest decay."""
        panel = self.tile.panel
        lanes, size = panel.lanes, self.tile.queries
        first, last = near.partial_first, near.partial_last
        if self.decay is not None:
            first, last = near.first, near.last
        query = self.first_query(p)
        numbers = T.Ramp(T.int32(0), T.int32(1), lanes)
        with T.serial(last - first) as place:
            j = bind(first + place)
            t = settle(self.keys.slot(near.start + j) - near.base)
            kept = []
            for v, similarity in enumerate(panel.load(self.similarity, j)):
                apart = settle(query + v * lanes - t)
                distance = broadcast(T.cast(apart, "int32"), lanes) + numbers
                zero = integers(0, lanes)
                counted = distance >= zero if side.is_past else distance <= zero
                if self.decay is not None:
                    table = self.decay.near[side.direction]
                    similarity = similarity * load(table, apart + size, lanes=lanes)
                kept.append(T.Select(counted, similarity, constant(0.0, lanes)))
            panel.store(self.similarity, kept, j)

    def normalise(self, p: Expr, epsilon: float, least: float, factor: float | None) -> None:
        """Numerators divided by denominators, in place; zeros where nothing was counted.

        Args:
            epsilon: added to the denominators.
            least: what they are at least.
            factor: multiplies the numerators instead; ``None``: does not.
        """
        panel = self.tile.panel
        dims = self.heads.value_dim
        if factor is not None:
            inverse = panel.fill(factor)
        else:
            floor, more = (constant(x, panel.lanes) for x in (max(least, 1e-30), epsilon))
            inverse = [
                bind(constant(1.0, panel.lanes) / T.max(total + more, floor))
                for total in panel.load(self.sums_buffer, p, index(dims))
            ]
        with T.serial(index(dims)) as e:
            old = panel.load(self.sums_buffer, p, e)
            panel.store(self.sums_buffer, [a * b for a, b in zip(old, inverse, strict=True)], p, e)

    def merge_into(self, exact: ExactPanels, p: Expr, gain: Expr | None) -> None:
        """Add numerators and denominators to the exact part.

        Args:
            gain: of the exact part in the ``shared`` mix, whose shift is the exact maximum;
                ``None``: one shift for both. That is the larger of the running maximum and the
                denominator's binary exponent, so neither part overflows and no logarithm is
                needed.
        """
        panel = self.tile.panel
        lanes = panel.lanes
        dims = self.heads.value_dim
        exact_factors, linear_factors, totals = [], [], []
        denominators = panel.load(self.sums_buffer, p, index(dims))
        parts = (panel.load(exact.maximum, p), panel.load(exact.total, p), denominators)
        for maximum, total, denominator in zip(*parts, strict=True):
            if gain is not None:
                exact_factors.append(broadcast(gain, lanes))
                linear_factors.append(constant(1.0, lanes))
            else:
                of_exact, of_linear = _common_shift(maximum, denominator, lanes)
                exact_factors.append(of_exact)
                linear_factors.append(of_linear)
            totals.append(bind(total * exact_factors[-1] + denominator * linear_factors[-1]))
        panel.store(exact.total, totals, p)
        assert isinstance(exact.sums, LaneSums), "decided by emit_hybrid"
        buffer = exact.sums.buffer
        with T.serial(index(dims)) as e:
            pairs = zip(
                panel.load(buffer, p, e),
                exact_factors,
                panel.load(self.sums_buffer, p, e),
                linear_factors,
                strict=True,
            )
            panel.store(buffer, [bind(a * b + c * d) for a, b, c, d in pairs], p, e)


def state_width(tile: LinearTile, value_dim: int) -> int:
    """Columns of a state: value dims in whole panels, and the normaliser."""
    return padded(max(padded(value_dim, tile.state.width), value_dim + 1), tile.state.lanes)


def _common_shift(maximum: Expr, denominator: Expr, lanes: int) -> tuple[Expr, Expr]:
    """Factors of the exact and the linear part."""
    bits = T.reinterpret(vector_type("int32", lanes), denominator)
    exponent = T.shift_right(bits, integers(23, lanes)) - integers(127, lanes)
    exponent = T.cast(exponent, vector_type("float32", lanes))
    none = constant(NO_MAXIMUM, lanes)
    counted = T.Select(denominator > constant(0.0, lanes), exponent, none)
    shift = bind(T.max(maximum, counted))
    # A shift below -126 leaves a denominator of 0: the factor must only stay finite.
    bounded = T.min(constant(0.0, lanes) - shift, constant(126.0, lanes))
    return exp2(maximum - shift, lanes), exp2(bounded, lanes)


class Decay:
    """Powers of ``exp(log_decay)`` for the key/value head of a task.

    Attributes:
        powers: ``powers[n]``, the n-th power, for n up to the chunk.
        of_chunk: the power of a whole chunk.
        near: per direction, at ``queries + i - t``, the weight of a near key ``t`` for query ``i``;
            garbage where it does not count.
        of_far: ``[2, queries]``, per side: the weight at query ``i`` of what stands in the state.
    """

    def __init__(self, tile: LinearTile, rows: HeadRows) -> None:
        self.tile = tile
        lanes = tile.panel.lanes
        self.log2 = settle_float(rows.buffers.extra["log_decay"][rows.kv_head] * T.float32(LOG2_E))
        # TVM's analyser does not take a Ramp as floats.
        self.numbers = T.alloc_buffer((lanes,), "float32")
        for lane in range(lanes):
            store_scalar(self.numbers, T.float32(lane), index(lane))
        self.powers = T.alloc_buffer((padded(tile.queries + 1, lanes),), "float32")
        self._fill(self.powers, lambda n: n, padded(tile.queries + 1, lanes))
        self.of_chunk = settle_float(self.powers[index(tile.queries)])

    def tables(self, sides: Sequence[Side]) -> None:
        """What the passes over queries need."""
        lanes, size = self.tile.panel.lanes, self.tile.queries
        self.of_far = T.alloc_buffer((2, size), "float32")
        self.near: dict[str, Expr] = {}
        for side in sides:
            near = T.alloc_buffer((2 * size,), "float32")
            self.near[side.direction] = near
            sign = 1.0 if side.is_past else -1.0
            number = index(side.gap) if isinstance(side.gap, int) else side.gap
            gap = broadcast(settle_float(T.cast(number, "float32")), lanes)

            def near_steps(n: Expr, sign: float = sign, gap: Expr = gap) -> Expr:
                apart = (n - constant(float(size), lanes)) * constant(sign, lanes)
                return T.max(apart, constant(0.0, lanes)) + gap

            self._fill(near, near_steps, 2 * size)

            def far_steps(n: Expr, side: Side = side, gap: Expr = gap) -> Expr:
                steps = n if side.is_past else constant(float(size), lanes) - n
                return steps + gap

            self._fill(self.of_far, far_steps, size, index(0 if side.is_past else 1))

    def _fill(self, table: Expr, steps: Callable[[Expr], Expr], size: int, *outer: Expr) -> None:
        """``table[n] = exp(log_decay * steps(n))``."""
        lanes = self.tile.panel.lanes
        rate = broadcast(self.log2, lanes)
        with T.serial(index(size // lanes)) as v:
            first = broadcast(settle_float(T.cast(v * lanes, "float32")), lanes)
            number = bind(first + load(self.numbers, index(0), lanes=lanes))
            power = exp2(rate * steps(number), lanes)
            store(table, power, *outer, v * lanes, lanes=lanes)

    def of_far_keys(self, side: Side, query: Expr) -> list[Expr]:
        return self.tile.panel.load(self.of_far, index(0 if side.is_past else 1), start=query)
