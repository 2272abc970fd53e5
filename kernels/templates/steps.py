"""Hybrid attention token by token: one (batch, key/value head) per task.

A step touches the window, the sinks and the state once; nothing in it depends on how many tokens
came before.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script.ir_builder import tirx as T

from subquad.kernels.hybrid_decode.semantics import StateVariant
from subquad.kernels.operator import UNLIMITED
from subquad.kernels.templates.exact import NO_MAXIMUM
from subquad.kernels.templates.hybrid_state import LinearState, Sinks, parts_of
from subquad.kernels.templates.lines import Line, Row, local_line, split_task
from subquad.kernels.templates.products import Panel, padded
from subquad.kernels.templates.rows import Buffers
from subquad.kernels.templates.vectors import (
    LOG2_E,
    Expr,
    bind,
    broadcast,
    constant,
    exp2,
    index,
    settle,
    store_scalar,
)


def emit_decode(buffers: Buffers, variant: StateVariant, panel: Panel) -> None:
    """``HybridDecode``: parallel over (batch, key/value head)."""
    batch, length = buffers.key.shape[0], buffers.key.shape[2]
    with T.parallel(batch * variant.num_kv_heads) as task:
        row = Row(buffers, variant, panel, *split_task(task, variant))
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
                        for name, part, dim in parts_of(row.variant):
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
        return self.row.exponentials(self.line, self.size)

    def accumulate(self, place: Expr, value: Line, target: Line) -> None:
        """Add a weighted value; one of weight 0 is not read."""
        weight = bind(self.line.at(place))
        with T.If(weight > T.float32(0.0)):
            with T.Then():
                self.row.add_multiple(weight, value, target, self.row.variant.value_dim)


def _common_shift(maximum: Expr, denominator: Expr) -> tuple[Expr, Expr]:
    """Factors of the exact and the linear part, as ``LinearPanels.merge_into`` has them."""
    bits = T.reinterpret("int32", denominator)
    exponent = T.cast(T.shift_right(bits, T.int32(23)) - T.int32(127), "float32")
    counted = T.Select(denominator > T.float32(0.0), exponent, T.float32(NO_MAXIMUM))
    shift = bind(T.max(maximum, counted))
    # A shift below -126 leaves a denominator of 0: the factor must only stay finite.
    bounded = T.min(T.float32(0.0) - shift, T.float32(126.0))
    return exp2(maximum - shift, 1), exp2(bounded, 1)
