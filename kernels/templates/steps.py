"""Hybrid attention token by token: one (batch, key/value head) per task, dims in the lanes.

A step touches the window, the sinks and the state once; nothing in it depends on how many tokens
came before. Rows of dims are contiguous, so unlike in the tiles of ``exact.py`` a vector holds
neighbouring dims of one token, and a score is a horizontal sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.hybrid.feature_maps import LEAST_FEATURE
from subquad.kernels.hybrid_decode.semantics import StateVariant
from subquad.kernels.operator import UNLIMITED
from subquad.kernels.templates.exact import NO_MAXIMUM
from subquad.kernels.templates.products import Panel, RegisterTile, cut, padded
from subquad.kernels.templates.rows import Buffers
from subquad.kernels.templates.vectors import (
    LOG2_E,
    Expr,
    bind,
    broadcast,
    constant,
    exp2,
    index,
    load,
    quotient,
    remainder,
    settle,
    store,
    store_scalar,
)


@dataclass(frozen=True)
class Line:
    """A row of consecutive numbers: ``buffer[*outer, 0 ...]``."""

    buffer: Expr
    outer: tuple[Expr, ...] = ()

    def load(self, at: Expr, lanes: int) -> Expr:
        if lanes == 1:
            return self.at(at)
        return load(self.buffer, *self.outer, at, lanes=lanes)

    def store(self, value: Expr, at: Expr, lanes: int) -> None:
        if lanes == 1:
            store_scalar(self.buffer, value, *self.outer, at)
        else:
            store(self.buffer, value, *self.outer, at, lanes=lanes)

    def at(self, place: Expr) -> Expr:
        return self.buffer[(*self.outer, place)]


def local_line(size: int) -> Line:
    return Line(T.alloc_buffer((size,), "float32"))


@dataclass(frozen=True)
class Row:
    """One key/value head of one batch row, and the arithmetic on its lines."""

    buffers: Buffers
    variant: StateVariant
    panel: Panel
    batch: Expr
    kv_head: Expr

    @property
    def lanes(self) -> int:
        return self.panel.lanes

    def each(self, size: int, body: Callable[[Expr, int], None]) -> None:
        """``body(first, lanes)`` over ``size`` numbers, whole vectors first."""
        whole = size // self.lanes
        if whole:
            with T.serial(index(whole)) as v:
                body(bind(v * self.lanes), self.lanes)
        for at in range(whole * self.lanes, size):
            body(index(at), 1)

    def copy(self, source: Line, target: Line, size: int) -> None:
        self.each(size, lambda at, lanes: target.store(source.load(at, lanes), at, lanes))

    def clear(self, target: Line, size: int) -> None:
        self.each(size, lambda at, lanes: target.store(constant(0.0, lanes), at, lanes))

    def add_multiple(self, factor: Expr, source: Line, target: Line, size: int) -> None:
        """``target += factor * source``."""
        factor = bind(factor)

        def add(at: Expr, lanes: int) -> None:
            product = broadcast(factor, lanes) * source.load(at, lanes)
            target.store(target.load(at, lanes) + product, at, lanes)

        self.each(size, add)

    def add_products(
        self,
        target: Line,
        size: int,
        count: Expr,
        term: Callable[[Expr], tuple[Expr, Line]],
    ) -> None:
        """``target += sum of factor * line``; ``(factor, line) = term(i)`` for i below count."""
        lanes = self.lanes
        whole = size // lanes
        for first, vectors in cut(whole, self.panel.vectors):
            panel = Panel(lanes, vectors)
            self._add_pieces(panel, first * lanes, target, count, term)
        for at in range(whole * lanes, size):
            self._add_pieces(Panel(1, 1), at, target, count, term)

    def _add_pieces(
        self,
        panel: Panel,
        first: int,
        target: Line,
        count: Expr,
        term: Callable[[Expr], tuple[Expr, Line]],
    ) -> None:
        """Dims ``first .. first + panel.width - 1``, whose sums stay in registers."""
        products = RegisterTile.allocate(panel, 1)
        products.set(0, panel.load(target.buffer, *target.outer, start=index(first)))
        with T.serial(count) as i:
            factor, line = term(i)
            vectors = panel.load(line.buffer, *line.outer, start=index(first))
            products.multiply_add([bind(factor)], vectors)
        panel.store(target.buffer, products.get(0), *target.outer, start=index(first))

    def dot(self, one: Line, other: Line, size: int) -> Expr:
        sums = T.alloc_buffer((self.lanes,), "float32", scope="local")
        line = Line(sums)
        line.store(constant(0.0, self.lanes), index(0), self.lanes)

        def add(at: Expr, lanes: int) -> None:
            product = one.load(at, lanes) * other.load(at, lanes)
            line.store(line.load(index(0), lanes) + product, index(0), lanes)

        self.each(size, add)
        halves = [sums[index(lane)] for lane in range(self.lanes)]
        while len(halves) > 1:
            half = len(halves) // 2
            halves = [a + b for a, b in zip(halves[:half], halves[half:], strict=True)]
        return bind(halves[0])

    # --- what the inputs hold ---

    def new(self, name: str, slot: Expr) -> Line:
        """Key or value of a new token."""
        buffer = getattr(self.buffers, name)
        return Line(buffer, (self.batch, self.kv_head, slot))

    def state(self, name: str, *at: Expr) -> Line:
        return Line(self.buffers.extra[name], (self.batch, self.kv_head, *at))

    def position(self, slot: Expr) -> Expr:
        positions = self.buffers.query_positions
        if positions is None:
            positions = self.buffers.key_positions
        assert positions is not None
        return positions[self.batch, slot]

    def is_real(self, slot: Expr) -> Expr:
        """Whether a new token counts."""
        if self.buffers.key_mask is None:
            return self.position(slot) >= 0
        return T.cast(self.buffers.key_mask[self.batch, slot], "int32") == 1

    def past_is_real(self, slot: Expr) -> Expr:
        """Whether a slot of the past window holds a token that counts."""
        stands = self.position(index(0)) - self.variant.window_len + slot >= 0
        if self.buffers.key_mask is None:
            return stands
        mask = self.buffers.extra["past_window_mask"][self.batch, slot]
        return T.And(stands, mask > T.float32(0.0))

    def write_once(self, name: str, value: Expr, *at: Expr) -> None:
        """A number of the batch row: the task of its first head writes it."""
        with T.If(self.kv_head == 0):
            with T.Then():
                store_scalar(self.buffers.extra[name], value, self.batch, *at)


def _elu(row: Row, u: Line, dims: int, features: Line) -> None:
    def apply(at: Expr, lanes: int) -> None:
        x, zero = bind(u.load(at, lanes)), constant(0.0, lanes)
        value = T.max(x, zero) + exp2(T.min(x, zero) * constant(LOG2_E, lanes), lanes)
        features.store(value, at, lanes)

    row.each(dims, apply)


def _signed(row: Row, u: Line, dims: int, features: Line) -> None:
    """``u``, then ``-u``, in units of base 2."""
    for first, factor in ((0, LOG2_E), (dims, -LOG2_E)):
        row.each(
            dims,
            lambda at, lanes, first=first, factor=factor: features.store(  # type: ignore[misc]
                u.load(at, lanes) * constant(factor, lanes), at + first, lanes
            ),
        )


def _softmax(row: Row, line: Line, first: int, size: int, least: float = 0.0) -> None:
    """Softmax of ``line[first : first + size]`` in base 2, in place."""
    lanes = row.lanes
    cells = T.alloc_buffer((2, lanes), "float32", scope="local")
    highest, total = Line(cells, (index(0),)), Line(cells, (index(1),))
    highest.store(constant(NO_MAXIMUM, lanes), index(0), lanes)
    total.store(constant(0.0, lanes), index(0), lanes)

    def raise_(at: Expr, n: int) -> None:
        highest.store(T.max(highest.load(index(0), n), line.load(at + first, n)), index(0), n)

    row.each(size, raise_)
    maximum = bind(_fold_lanes(highest, lanes, T.max))

    def power(at: Expr, n: int) -> None:
        value = exp2(line.load(at + first, n) - broadcast(maximum, n), n)
        line.store(value, at + first, n)
        total.store(total.load(index(0), n) + value, index(0), n)

    row.each(size, power)
    inverse = bind(T.float32(1.0) / _fold_lanes(total, lanes, lambda a, b: a + b))

    def scale(at: Expr, n: int) -> None:
        value = line.load(at + first, n) * broadcast(inverse, n)
        line.store(T.max(value, constant(least, n)), at + first, n)

    row.each(size, scale)


def _hedgehog(row: Row, u: Line, dims: int, features: Line) -> None:
    _signed(row, u, dims, features)
    _softmax(row, features, 0, 2 * dims)


def _softmax_pair(row: Row, u: Line, dims: int, features: Line) -> None:
    _signed(row, u, dims, features)
    _softmax(row, features, 0, dims, LEAST_FEATURE)
    _softmax(row, features, dims, dims, LEAST_FEATURE)


STEP_FEATURES: Mapping[str, Callable[[Row, Line, int, Line], None]] = {
    "elu": _elu,
    "hedgehog": _hedgehog,
    "softmax_pair": _softmax_pair,
}
"""Feature maps of one row, from ``u`` (or from the row itself where a map has no weights)."""


class LinearState:
    """The sums of one head, in the outputs ``linear_state`` and ``linear_normaliser``."""

    def __init__(self, row: Row) -> None:
        self.row = row
        self.features = row.variant.feature_dim
        self.value_dim = row.variant.value_dim
        self.map = STEP_FEATURES[row.variant.feature_map]
        self.line = local_line(self.features)
        self.projected = local_line(max(row.variant.map_dim, 1))

    def start(self, past: bool) -> None:
        row = self.row
        with T.serial(index(self.features)) as f:
            target = row.state("linear_state", f)
            if past:
                row.copy(row.state("past_linear_state", f), target, self.value_dim)
            else:
                row.clear(target, self.value_dim)
        normaliser = row.state("linear_normaliser")
        if past:
            row.copy(row.state("past_linear_normaliser"), normaliser, self.features)
        else:
            row.clear(normaliser, self.features)

    def _map(self, source: Line, weights: str, head: Expr) -> Line:
        row, dims = self.row, self.row.variant.map_dim
        u = source
        if dims:
            u = self.projected
            matrix = row.buffers.extra[weights]
            row.copy(Line(matrix, (head, index(row.variant.head_dim))), u, dims)
            row.add_products(
                u,
                dims,
                index(row.variant.head_dim),
                lambda d: (source.at(d), Line(matrix, (head, d))),
            )
        self.map(row, u, dims or row.variant.head_dim, self.line)
        return self.line

    def fold(self, key: Line, value: Line) -> None:
        """Add one token."""
        row = self.row
        features = self._map(key, "key_map", row.kv_head)
        with T.serial(index(self.features)) as f:
            row.add_multiple(features.at(f), value, row.state("linear_state", f), self.value_dim)
        one = T.float32(1.0)
        row.add_multiple(one, features, row.state("linear_normaliser"), self.features)

    def sums(self, query: Line, head: Expr, numerator: Line) -> Expr:
        """The numerator, and the denominator returned."""
        row = self.row
        features = self._map(query, "query_map", head)
        row.clear(numerator, self.value_dim)
        row.add_products(
            numerator,
            self.value_dim,
            index(self.features),
            lambda f: (features.at(f), row.state("linear_state", f)),
        )
        return row.dot(features, row.state("linear_normaliser"), self.features)


def emit_state(buffers: Buffers, variant: StateVariant, panel: Panel) -> None:
    """``HybridState``: parallel over (batch, key/value head)."""
    batch, length = buffers.key.shape[0], buffers.key.shape[2]
    slots = variant.window_len
    with T.parallel(batch * variant.num_kv_heads) as task:
        row = Row(buffers, variant, panel, *_split(task, variant))
        if slots:
            with T.serial(index(slots)) as slot:
                source = settle(length - slots + slot)
                with T.If(source >= 0):
                    with T.Then():
                        for name, part, dim in _parts(variant):
                            row.copy(row.new(name, source), row.state(f"window_{part}", slot), dim)
                        if buffers.key_mask is not None:
                            real = T.cast(buffers.key_mask[row.batch, source], "float32")
                            row.write_once("window_mask", real, slot)
                    with T.Else():
                        for _, part, dim in _parts(variant):
                            row.clear(row.state(f"window_{part}", slot), dim)
                        if variant.has_key_mask:
                            row.write_once("window_mask", T.float32(0.0), slot)
        if variant.sinks:
            sinks = Sinks(row)
            sinks.start(past=False)
            with T.serial(T.min(length, _sink_end(row, length))) as slot:
                sinks.take(slot)
        if variant.feature_dim:
            linear = LinearState(row)
            linear.start(past=False)
            with T.serial(T.max(length - slots, index(0))) as slot:
                with T.If(T.And(row.is_real(slot), row.position(slot) >= variant.sinks)):
                    with T.Then():
                        linear.fold(row.new("key", slot), row.new("value", slot))


def _sink_end(row: Row, length: Expr) -> Expr:
    """Slots from here on hold no sinks."""
    return settle(T.max(T.min(row.variant.sinks - row.position(index(0)), length), index(0)))


def _split(task: Expr, variant: StateVariant) -> tuple[Expr, Expr]:
    return quotient(task, variant.num_kv_heads), remainder(task, variant.num_kv_heads)


def _parts(variant: StateVariant) -> tuple[tuple[str, str, int], tuple[str, str, int]]:
    """New tokens' name, name in the state, and dims, of keys and values."""
    return ("key", "keys", variant.head_dim), ("value", "values", variant.value_dim)


class Sinks:
    """The sinks of one head, in the outputs; ``real`` says which have arrived and count."""

    def __init__(self, row: Row) -> None:
        self.row, self.count = row, row.variant.sinks
        self.real = T.alloc_buffer((self.count,), "int32")

    def start(self, past: bool) -> None:
        row = self.row
        with T.serial(index(self.count)) as s:
            for _, part, dim in _parts(row.variant):
                target = row.state(f"sink_{part}", s)
                if past:
                    row.copy(row.state(f"past_sink_{part}", s), target, dim)
                else:
                    row.clear(target, dim)
            mask: Expr = T.float32(0.0)
            if past and row.variant.has_key_mask:
                mask = bind(row.buffers.extra["past_sink_mask"][row.batch, s])
            elif past:
                mask = T.cast(s < row.position(index(0)), "float32")
            store_scalar(self.real, T.cast(mask > T.float32(0.0), "int32"), s)
            if row.variant.has_key_mask:
                row.write_once("sink_mask", mask, s)

    def take(self, slot: Expr) -> None:
        """A new token, if it is a sink."""
        row = self.row
        position = settle(row.position(slot))
        with T.If(T.And(position >= 0, position < self.count)):
            with T.Then():
                for name, part, dim in _parts(row.variant):
                    row.copy(row.new(name, slot), row.state(f"sink_{part}", position), dim)
                real = bind(T.cast(row.is_real(slot), "int32"))
                store_scalar(self.real, real, position)
                if row.variant.has_key_mask:
                    row.write_once("sink_mask", T.cast(real, "float32"), position)


class Scores:
    """Exact scores of one query in base 2, then their weights; -inf and 0 where hidden."""

    def __init__(self, row: Row) -> None:
        self.row = row
        variant = row.variant
        self.window = variant.window_left + 1
        self.size = padded(max(self.window + variant.sinks, 1), row.lanes)
        self.line = local_line(self.size)
        self.query = local_line(variant.head_dim)

    def start(self, query: Line) -> None:
        row = self.row
        factor = row.variant.scale * LOG2_E

        def scale(at: Expr, lanes: int) -> None:
            self.query.store(query.load(at, lanes) * constant(factor, lanes), at, lanes)

        row.each(row.variant.head_dim, scale)
        hidden = float("-inf")
        row.each(self.size, lambda at, n: self.line.store(constant(hidden, n), at, n))

    def score(self, place: Expr, key: Line) -> None:
        number = self.row.dot(self.query, key, self.row.variant.head_dim)
        store_scalar(self.line.buffer, number, place)

    def weigh(self) -> tuple[Expr, Expr]:
        """Maximum and sum of the weights."""
        lanes = self.row.lanes
        lane_values = T.alloc_buffer((2, lanes), "float32", scope="local")
        highest, total = Line(lane_values, (index(0),)), Line(lane_values, (index(1),))
        highest.store(constant(NO_MAXIMUM, lanes), index(0), lanes)
        total.store(constant(0.0, lanes), index(0), lanes)

        def raise_(at: Expr, n: int) -> None:
            highest.store(T.max(highest.load(index(0), n), self.line.load(at, n)), index(0), n)

        self.row.each(self.size, raise_)
        maximum = bind(_fold_lanes(highest, lanes, T.max))

        def weigh(at: Expr, n: int) -> None:
            weight = exp2(self.line.load(at, n) - broadcast(maximum, n), n)
            self.line.store(weight, at, n)
            total.store(total.load(index(0), n) + weight, index(0), n)

        self.row.each(self.size, weigh)
        return maximum, bind(_fold_lanes(total, lanes, lambda a, b: a + b))

    def accumulate(self, place: Expr, value: Line, target: Line) -> None:
        """Add a weighted value; one of weight 0 is not read."""
        weight = bind(self.line.at(place))
        with T.If(weight > T.float32(0.0)):
            with T.Then():
                self.row.add_multiple(weight, value, target, self.row.variant.value_dim)


def _fold_lanes(line: Line, lanes: int, join: Callable[[Expr, Expr], Expr]) -> Expr:
    numbers = [line.at(index(lane)) for lane in range(lanes)]
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [bind(join(a, b)) for a, b in zip(numbers[:half], numbers[half:], strict=True)]
    return numbers[0]


def emit_decode(buffers: Buffers, variant: StateVariant, panel: Panel) -> None:
    """``HybridDecode``: parallel over (batch, key/value head)."""
    batch, length = buffers.key.shape[0], buffers.key.shape[2]
    with T.parallel(batch * variant.num_kv_heads) as task:
        row = Row(buffers, variant, panel, *_split(task, variant))
        _Steps(row, length).emit()


class _Steps:
    """All new tokens of one task, in order."""

    def __init__(self, row: Row, length: Expr) -> None:
        self.row, self.length = row, length
        variant = row.variant
        self.slots = variant.window_len
        self.has_window = variant.window_left != UNLIMITED
        self.sinks = Sinks(row) if variant.sinks else None
        self.linear = LinearState(row) if variant.feature_dim else None
        self.scores = Scores(row)
        self.output = local_line(variant.value_dim)
        self.numerator = local_line(variant.value_dim)

    def emit(self) -> None:
        row = self.row
        self._move_window()
        if self.sinks is not None:
            self.sinks.start(past=True)
        if self.linear is not None:
            self.linear.start(past=True)
        group = row.variant.heads.group
        with T.serial(self.length) as t:
            if self.sinks is not None:
                self.sinks.take(t)
            if not self.has_window:
                self._fold(t)
            with T.serial(index(group)) as member:
                self._attend(t, settle(row.kv_head * group + member))
            if self.has_window:
                self._fold(t)

    def _move_window(self) -> None:
        """Slot ``i`` of the new window is number ``length + i`` of past window and new tokens."""
        row, slots = self.row, self.slots
        if not slots:
            return
        with T.serial(index(slots)) as slot:
            number = settle(self.length + slot)
            for from_past in (True, False):
                source = number if from_past else settle(number - slots)
                with T.If(number < slots if from_past else number >= slots):
                    with T.Then():
                        for name, part, dim in _parts(row.variant):
                            line = row.new(name, source)
                            if from_past:
                                line = row.state(f"past_window_{part}", source)
                            row.copy(line, row.state(f"window_{part}", slot), dim)
                        if row.variant.has_key_mask:
                            real = row.past_is_real(source) if from_past else row.is_real(source)
                            row.write_once("window_mask", T.cast(real, "float32"), slot)

    def _fold(self, t: Expr) -> None:
        """The token that leaves the window after query ``t`` joins the state."""
        if self.linear is None:
            return
        row, slots = self.row, self.slots
        position = settle(row.position(index(0)) - slots + t)
        is_linear = position >= row.variant.sinks
        if slots:
            with T.If(t < slots):
                with T.Then():
                    with T.If(T.And(row.past_is_real(t), is_linear)):
                        with T.Then():
                            at = [row.state(f"past_window_{x}", t) for x in ("keys", "values")]
                            self.linear.fold(*at)
        slot = settle(t - slots)
        with T.If(slot >= 0):
            with T.Then():
                with T.If(T.And(row.is_real(slot), is_linear)):
                    with T.Then():
                        self.linear.fold(row.new("key", slot), row.new("value", slot))

    def _each_exact(
        self, t: Expr, body: Callable[[Expr, Line, Line], None], *, only_real: bool
    ) -> None:
        """``body(place, key, value)`` for the exact keys of query ``t``."""
        row, slots = self.row, self.slots

        def visit(is_real: Expr, place: Expr, key: Line, value: Line) -> None:
            if not only_real:
                body(place, key, value)
                return
            with T.If(is_real):
                with T.Then():
                    body(place, key, value)

        if self.has_window:
            if slots:
                with T.serial(T.max(slots - t, index(0))) as place:
                    slot = settle(t + place)
                    at = [row.state(f"past_window_{part}", slot) for part in ("keys", "values")]
                    visit(row.past_is_real(slot), place, *at)
            first = settle(T.max(t - slots, index(0)))
            with T.serial(t + 1 - first) as step:
                slot = settle(first + step)
                place = settle(slot + slots - t)
                visit(row.is_real(slot), place, row.new("key", slot), row.new("value", slot))
        if self.sinks is not None:
            variant = row.variant
            with T.serial(index(self.sinks.count)) as s:
                distance = settle(row.position(t) - s)
                seen = T.And(self.sinks.real[s] == 1, distance > variant.window_left)
                if variant.allowed_left != UNLIMITED:
                    seen = T.And(seen, distance <= variant.allowed_left)
                at = [row.state(f"sink_{part}", s) for part in ("keys", "values")]
                visit(seen, settle(s + self.scores.window), *at)

    def _attend(self, t: Expr, head: Expr) -> None:
        row, scores = self.row, self.scores
        dims = row.variant.value_dim
        query = Line(row.buffers.query, (row.batch, head, t))
        scores.start(query)
        self._each_exact(t, lambda place, key, _: scores.score(place, key), only_real=True)
        maximum, total = scores.weigh()
        row.clear(self.output, dims)
        self._each_exact(
            t,
            lambda place, _, value: scores.accumulate(place, value, self.output),
            only_real=False,
        )
        exact_factor: Expr = T.float32(1.0)
        linear_factor: Expr | None = None
        if self.linear is not None:
            denominator = self.linear.sums(query, head, self.numerator)
            exact_factor, linear_factor = _common_shift(maximum, denominator)
            total = bind(total * exact_factor + denominator * linear_factor)
        inverse = bind(T.float32(1.0) / T.max(total, T.float32(1e-37)))
        target = Line(row.buffers.output, (row.batch, head, t))

        def write(at: Expr, lanes: int) -> None:
            value = self.output.load(at, lanes) * broadcast(exact_factor, lanes)
            if linear_factor is not None:
                value = value + self.numerator.load(at, lanes) * broadcast(linear_factor, lanes)
            target.store(value * broadcast(inverse, lanes), at, lanes)

        row.each(dims, write)


def _common_shift(maximum: Expr, denominator: Expr) -> tuple[Expr, Expr]:
    """Factors of the exact and the linear part, as ``LinearPanels.merge_into`` has them."""
    bits = T.reinterpret("int32", denominator)
    exponent = T.cast(T.shift_right(bits, T.int32(23)) - T.int32(127), "float32")
    counted = T.Select(denominator > T.float32(0.0), exponent, T.float32(NO_MAXIMUM))
    shift = bind(T.max(maximum, counted))
    # A shift below -126 leaves a denominator of 0: the factor must only stay finite.
    bounded = T.min(T.float32(0.0) - shift, T.float32(126.0))
    return exp2(maximum - shift, 1), exp2(bounded, 1)
