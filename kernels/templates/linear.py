"""The linear part: running sums over features of older keys, chunk by chunk, state transposed.

Query row ``i`` of a chunk counts the keys up to slot ``i + alignment - gap`` (``gap`` 0 includes
the query's own token; a window before the query makes it larger). So the keys of a chunk are as
many slots, shifted by the same amount: their products with the chunk's queries form a triangle,
and all keys before them have been added up in the state ``[value_dim, features]``.

Parallel over (batch, key/value head) and, where those are few, over segments of the sequence:
pass 1 sums the keys before and between segments, pass 2 adds these up in order, pass 3 runs the
segments. Pass 1 repeats the state updates of pass 3, about a quarter of the work, hence only with
few heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.templates.exact import NO_MAXIMUM, ExactPanels
from subquad.kernels.templates.products import (
    Panel,
    RegisterTile,
    for_row_groups,
    padded,
    unrolled,
)
from subquad.kernels.templates.rows import HeadRows, KeyList
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
    store,
    store_scalar,
    vector_type,
)


@dataclass(frozen=True)
class FeatureKernel:
    """A feature map that works element by element: as many features as dims.

    TODO: maps across dims (softmax, learned projections) with the first one that has weights; the
    packed queries ``[dim, lanes]`` suit both, keys are packed by rows.
    """

    apply: Callable[[Expr, int], Expr]


def _elu_plus_one(x: Expr, lanes: int) -> Expr:
    zero = constant(0.0, lanes)
    return T.max(x, zero) + exp2(T.min(x, zero) * constant(LOG2_E, lanes), lanes)


FEATURE_KERNELS: dict[str, FeatureKernel] = {"elu": FeatureKernel(_elu_plus_one)}


@dataclass(frozen=True)
class LinearTile:
    """Sizes of the linear part.

    Attributes:
        panel: query rows in one tile, as in the exact part.
        panels: panels per chunk.
        queries: query slots per chunk, ``panels * panel.width / group``.
        rows: broadcast scalars per register tile.
        state: panel of features in the state update.
        state_rows: value dims per register tile of the state update.
        unroll: steps of a product's inner loop per iteration.
    """

    panel: Panel
    panels: int
    queries: int
    rows: int
    state: Panel
    state_rows: int
    unroll: int


class LinearPanels:
    """State and scratch of the linear part for one (batch, key/value head) and segment."""

    def __init__(self, tile: LinearTile, heads: HeadRows, keys: KeyList, feature: FeatureKernel):
        self.tile, self.heads, self.keys, self.feature = tile, heads, keys, feature
        # Features are padded to whole panels of the state; the padding stays zero.
        self.width = padded(heads.head_dim, tile.state.width)
        key_rows = -(-tile.queries // tile.rows) * tile.rows
        self.state = T.alloc_buffer((heads.value_dim, self.width), "float32")
        self.normaliser = T.alloc_buffer((self.width,), "float32")
        self.key_features = T.alloc_buffer((key_rows, self.width), "float32")

    def allocate_queries(self) -> None:
        """Scratch that only the pass over queries needs."""
        tile, heads = self.tile, self.heads
        width, panels = tile.panel.width, tile.panels
        self.queries = T.alloc_buffer((panels, heads.head_dim, width), "float32")
        self.similarity = T.alloc_buffer((self.key_features.shape[0], width), "float32")
        self.numerator = T.alloc_buffer((panels, heads.value_dim, width), "float32")
        self.denominator = T.alloc_buffer((panels, width), "float32")

    def clear(self) -> None:
        self._each_state_vector(lambda e, f: self._set_state(e, f, constant(0.0, self._lanes)))
        self._each_normaliser_vector(
            lambda f: store(self.normaliser, constant(0.0, self._lanes), f, lanes=self._lanes)
        )

    def copy_state(self, states: Expr, normalisers: Expr, at: Expr, *, out: bool) -> None:
        """Between the local state and row ``at`` of the shared ones."""
        lanes = self._lanes

        def move(local: Expr, shared: Expr, *where: Expr) -> None:
            source, target = ((local, where), (shared, (at, *where)))[:: 1 if out else -1]
            store(target[0], load(source[0], *source[1], lanes=lanes), *target[1], lanes=lanes)

        self._each_state_vector(lambda e, f: move(self.state, states, e, f))
        self._each_normaliser_vector(lambda f: move(self.normaliser, normalisers, f))

    @property
    def _lanes(self) -> int:
        return self.tile.state.lanes

    def _set_state(self, e: Expr, f: Expr, value: Expr) -> None:
        store(self.state, value, e, f, lanes=self._lanes)

    def _each_state_vector(self, body: Callable[[Expr, Expr], None]) -> None:
        with T.serial(index(self.heads.value_dim)) as e:
            with T.serial(index(self.width // self._lanes)) as f:
                body(e, f * self._lanes)

    def _each_normaliser_vector(self, body: Callable[[Expr], None]) -> None:
        with T.serial(index(self.width // self._lanes)) as f:
            body(f * self._lanes)

    def pack_keys(self, start: Expr, count: Expr) -> None:
        """Features of the listed keys ``start .. start + count - 1``, row by row."""
        lanes, dims = self._lanes, self.heads.head_dim
        whole = dims // lanes
        with T.serial(count) as j:
            slot = self.keys.slot(start + j)
            with T.serial(index(whole)) as v:
                at = bind(v * lanes)
                row = (self.heads.batch, self.heads.kv_head, slot)
                vector = load(self.heads.buffers.key, *row, at, lanes=lanes)
                store(self.key_features, self.feature.apply(vector, lanes), j, at, lanes=lanes)
            for d in range(whole * lanes, dims):
                number = self.heads.key(slot, index(d))
                store_scalar(self.key_features, self.feature.apply(number, 1), j, index(d))
            for d in range(dims, self.width):
                store_scalar(self.key_features, T.float32(0.0), j, index(d))

    def pack_queries(self, first_row: Expr) -> None:
        """Features of the chunk's queries, transposed."""
        tile = self.tile
        panel = tile.panel
        with T.serial(index(tile.panels)) as p:
            self.heads.pack_queries(self.queries, p, first_row + p * panel.width, panel, 1.0)
            with T.serial(index(self.heads.head_dim)) as d:
                vectors = panel.load(self.queries, p, d)
                panel.store(
                    self.queries, [self.feature.apply(x, panel.lanes) for x in vectors], p, d
                )

    def update(self, start: Expr, count: Expr) -> None:
        """Add the packed keys, which are ``start .. start + count - 1`` of the list."""
        panel = self.tile.state

        def value_dims(first: Expr, rows: int) -> None:
            with T.serial(index(self.width // panel.width)) as block:
                at = bind(block * panel.width)
                products = RegisterTile.allocate(panel, rows)
                products.clear()
                with T.serial(count) as j:
                    slot = self.keys.slot(start + j)
                    scalars = [self.heads.value(slot, first + row) for row in range(rows)]
                    products.multiply_add(scalars, panel.load(self.key_features, j, start=at))
                for row in range(rows):
                    old = panel.load(self.state, first + row, start=at)
                    new = [a + b for a, b in zip(old, products.get(row), strict=True)]
                    panel.store(self.state, new, first + row, start=at)

        for_row_groups(self.heads.value_dim, self.tile.state_rows, value_dims)
        lanes = self._lanes
        total = RegisterTile.allocate(Panel(lanes, 1), 1)

        def normaliser(f: Expr) -> None:
            total.clear()
            with T.serial(count) as j:
                total.set(0, [total.get(0)[0] + load(self.key_features, j, f, lanes=lanes)])
            new = load(self.normaliser, f, lanes=lanes) + total.get(0)[0]
            store(self.normaliser, new, f, lanes=lanes)

        self._each_normaliser_vector(normaliser)

    def sums(self, p: Expr, start: Expr, near: Expr, counted: Expr, limits: Expr) -> None:
        """Numerators and denominators of panel ``p``: near keys and the state.

        Args:
            start, near: packed keys ``0 .. near - 1`` are ``start ...`` of the list.
            counted: how many of them every lane counts.
            limits: ``[panels, lanes]`` int32, the last slot that a lane counts.
        """
        self._similarities(p, near)
        self._hide(p, start, near, counted, limits)
        self._sum_denominators(p, near)
        self._sum_numerators(p, start, near)

    def _similarities(self, p: Expr, near: Expr) -> None:
        tile = self.tile
        with T.serial(blocks_of(near, tile.rows)) as group:
            products = RegisterTile.allocate(tile.panel, tile.rows)
            products.clear()
            keys = [group * tile.rows + row for row in range(tile.rows)]
            with unrolled(self.heads.head_dim, tile.unroll) as dims:
                for d in dims:
                    scalars = [self.key_features[key, d] for key in keys]
                    products.multiply_add(scalars, tile.panel.load(self.queries, p, d))
            for row, key in enumerate(keys):
                tile.panel.store(self.similarity, products.get(row), key)

    def _hide(self, p: Expr, start: Expr, near: Expr, counted: Expr, limits: Expr) -> None:
        panel = self.tile.panel
        lanes = panel.lanes
        with T.serial(near - counted) as surplus:
            j = bind(counted + surplus)
            slot = broadcast(T.cast(self.keys.slot(start + j), "int32"), lanes)
            kept = [
                T.Select(slot <= limit, similarity, constant(0.0, lanes))
                for limit, similarity in zip(
                    panel.load(limits, p), panel.load(self.similarity, j), strict=True
                )
            ]
            panel.store(self.similarity, kept, j)

    def _sum_denominators(self, p: Expr, near: Expr) -> None:
        panel = self.tile.panel
        total = RegisterTile.allocate(panel, 1)
        total.clear()
        with T.serial(near) as j:
            row = panel.load(self.similarity, j)
            total.set(0, [a + b for a, b in zip(total.get(0), row, strict=True)])
        with T.serial(index(self.heads.head_dim)) as f:
            total.multiply_add([self.normaliser[f]], panel.load(self.queries, p, f))
        panel.store(self.denominator, total.get(0), p)

    def _sum_numerators(self, p: Expr, start: Expr, near: Expr) -> None:
        tile = self.tile
        panel = tile.panel

        def value_dims(first: Expr, rows: int) -> None:
            products = RegisterTile.allocate(panel, rows)
            products.clear()
            with T.serial(near) as j:
                slot = self.keys.slot(start + j)
                scalars = [self.heads.value(slot, first + row) for row in range(rows)]
                products.multiply_add(scalars, panel.load(self.similarity, j))
            with unrolled(self.heads.head_dim, tile.unroll) as features:
                for f in features:
                    scalars = [self.state[first + row, f] for row in range(rows)]
                    products.multiply_add(scalars, panel.load(self.queries, p, f))
            for row in range(rows):
                panel.store(self.numerator, products.get(row), p, first + row)

        for_row_groups(self.heads.value_dim, tile.rows, value_dims)

    def normalise(self, p: Expr) -> None:
        """Numerators divided by denominators, in place; zeros where nothing was counted."""
        panel = self.tile.panel
        inverse = [
            bind(constant(1.0, panel.lanes) / T.max(total, constant(1e-30, panel.lanes)))
            for total in panel.load(self.denominator, p)
        ]
        with T.serial(index(self.heads.value_dim)) as e:
            old = panel.load(self.numerator, p, e)
            panel.store(self.numerator, [a * b for a, b in zip(old, inverse, strict=True)], p, e)

    def merge_into(self, exact: ExactPanels, p: Expr) -> None:
        """Add numerators and denominators to the exact part, under one shift.

        The shift is the larger of the running maximum and the denominator's binary exponent, so
        neither part overflows and no logarithm is needed.
        """
        panel = self.tile.panel
        lanes = panel.lanes
        none = constant(NO_MAXIMUM, lanes)
        exact_factors, linear_factors, totals = [], [], []
        parts = (exact.maximum, exact.total, self.denominator)
        for maximum, total, denominator in zip(*(panel.load(x, p) for x in parts), strict=True):
            bits = T.reinterpret(vector_type("int32", lanes), denominator)
            exponent = T.shift_right(bits, integers(23, lanes)) - integers(127, lanes)
            exponent = T.cast(exponent, vector_type("float32", lanes))
            counted = T.Select(denominator > constant(0.0, lanes), exponent, none)
            shift = bind(T.max(maximum, counted))
            exact_factors.append(exp2(maximum - shift, lanes))
            # A shift below -126 leaves a denominator of 0: the factor must only stay finite.
            bounded = T.min(constant(0.0, lanes) - shift, constant(126.0, lanes))
            linear_factors.append(exp2(bounded, lanes))
            totals.append(bind(total * exact_factors[-1] + denominator * linear_factors[-1]))
        panel.store(exact.total, totals, p)
        with T.serial(index(self.heads.value_dim)) as e:
            pairs = zip(
                panel.load(exact.output, p, e),
                exact_factors,
                panel.load(self.numerator, p, e),
                linear_factors,
                strict=True,
            )
            panel.store(exact.output, [bind(a * b + c * d) for a, b, c, d in pairs], p, e)
