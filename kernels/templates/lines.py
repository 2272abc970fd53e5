"""Lines of consecutive numbers, and one key/value head that computes with them.

Rows of dims are contiguous, so unlike in the tiles of ``exact.py`` a vector holds neighbouring dims
of one token, and a score is a horizontal sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.hybrid_decode.semantics import StateVariant
from subquad.kernels.templates.exact import NO_MAXIMUM
from subquad.kernels.templates.products import Panel, RegisterTile, cut
from subquad.kernels.templates.rows import Buffers
from subquad.kernels.templates.vectors import (
    Expr,
    bind,
    broadcast,
    constant,
    exp2,
    index,
    load,
    quotient,
    remainder,
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

    def exponentials(self, line: Line, size: int, first: int = 0) -> tuple[Expr, Expr]:
        """``exp2(number - maximum)`` of ``line[first : first + size]``, in place.

        Returns:
            The maximum, and the sum of the exponentials.
        """
        lanes = self.lanes
        cells = T.alloc_buffer((2, lanes), "float32", scope="local")
        highest, total = Line(cells, (index(0),)), Line(cells, (index(1),))
        highest.store(constant(NO_MAXIMUM, lanes), index(0), lanes)
        total.store(constant(0.0, lanes), index(0), lanes)

        def raise_(at: Expr, n: int) -> None:
            highest.store(T.max(highest.load(index(0), n), line.load(at + first, n)), index(0), n)

        self.each(size, raise_)
        maximum = bind(_fold_lanes(highest, lanes, T.max))

        def power(at: Expr, n: int) -> None:
            value = exp2(line.load(at + first, n) - broadcast(maximum, n), n)
            line.store(value, at + first, n)
            total.store(total.load(index(0), n) + value, index(0), n)

        self.each(size, power)
        return maximum, bind(_fold_lanes(total, lanes, lambda a, b: a + b))

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


def _fold_lanes(line: Line, lanes: int, join: Callable[[Expr, Expr], Expr]) -> Expr:
    numbers = [line.at(index(lane)) for lane in range(lanes)]
    while len(numbers) > 1:
        half = len(numbers) // 2
        numbers = [bind(join(a, b)) for a, b in zip(numbers[:half], numbers[half:], strict=True)]
    return numbers[0]


def split_task(task: Expr, variant: StateVariant) -> tuple[Expr, Expr]:
    return quotient(task, variant.num_kv_heads), remainder(task, variant.num_kv_heads)
