"""Exact keys plus a linear remainder: the passes over the sequence around both parts.

Parallel over (batch, key/value head) and, where those are few, over segments of the sequence.
Pass 1 sums, per side, the keys between the borders of segments, pass 2 adds these up in order,
pass 3 runs the segments: first the future side, whose sums wait in a buffer, then the past side
and the exact part. Pass 1 repeats the state updates of pass 3, hence only with few heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import Heads
from subquad.kernels.templates.dense import ExactSet, ExactSpans, exact_set_of
from subquad.kernels.templates.exact import ExactPanels, ExactTile
from subquad.kernels.templates.feature_kernels import Columns
from subquad.kernels.templates.linear import (
    Features,
    LinearPanels,
    LinearTile,
    Near,
    Side,
    state_width,
)
from subquad.kernels.templates.rows import Buffers, HeadRows, HeadSubset, KeyList, list_keys
from subquad.kernels.templates.vectors import (
    LOG2_E,
    Expr,
    blocks_of,
    broadcast,
    clamp,
    exp2,
    index,
    load,
    quotient,
    remainder,
    settle,
    settle_float,
    store,
)


@dataclass(frozen=True)
class LinearPart:
    """The linear remainder of a variant.

    Attributes:
        sides: a past one, or one of each; none: every query counts every key.
        skipped_sinks: positions ``0 .. skipped_sinks - 1`` are not counted.
        min_tasks: with fewer (batch, head) pairs the sequence is cut into segments.
        shared: the ``shared`` mix.
        epsilon, least, factor: of a part that stands alone, see ``LinearPanels.normalise``.
    """

    tile: LinearTile
    features: Features
    sides: tuple[Side, ...]
    skipped_sinks: int
    min_tasks: int
    shared: bool = False
    epsilon: float = 0.0
    least: float = 0.0
    factor: float | None = None


class _Segments:
    """How the sequence is cut."""

    def __init__(
        self, buffers: Buffers, heads: Heads, subset: HeadSubset, part: LinearPart
    ) -> None:
        self.part, self.heads, self.subset, self.buffers = part, heads, subset, buffers
        batch, query_len = buffers.query.shape[0], buffers.query.shape[2]
        self.kv_len = buffers.key.shape[2]
        self.chunk = part.tile.queries
        self.all_chunks = blocks_of(query_len, self.chunk)
        self.head_count = settle(batch * subset.count)
        wanted = T.min(blocks_of(index(part.min_tasks), self.head_count), self.all_chunks)
        self.chunks = blocks_of(self.all_chunks, settle(wanted))
        self.count = blocks_of(self.all_chunks, self.chunks)
        # At least head_count * count, in terms of shapes alone: TVM moves allocations up.
        self.most_tasks = batch * subset.count + part.min_tasks

    def rows(self, head: Expr) -> HeadRows:
        return HeadRows.of(self.buffers, self.heads, head, self.chunk, self.subset)

    def slot(self, base: Expr) -> Expr:
        return clamp(base, index(0), self.kv_len)

    def first_query(self, segment: Expr) -> Expr:
        return settle(segment * (self.chunks * self.chunk))


class _States:
    """The states at which segments begin, for one side (``None``: the sum of all keys)."""

    def __init__(self, segments: _Segments, side: Side | None, value_dim: int) -> None:
        self.segments, self.side = segments, side
        part = segments.part
        width = state_width(part.tile, value_dim)
        shape = (segments.most_tasks, part.features.count, width)
        self.buffer = T.alloc_buffer(shape, "float32")

    def at(self, task: Expr) -> Expr:
        """Row of the state a segment begins with."""
        if self.side is not None:
            return task
        return settle(quotient(task, self.segments.count) * self.segments.count)

    def sum_segments(self, keys: tuple[Expr, Expr] | None) -> None:
        """Pass 1."""
        segments, part = self.segments, self.segments.part
        with T.parallel(segments.head_count * segments.count) as task:
            rows = segments.rows(quotient(task, segments.count))
            listed = KeyList.of(rows.batch, keys)
            linear = LinearPanels(part.tile, rows, listed, part.features)
            linear.clear()
            segment = remainder(task, segments.count)
            alignment, _ = rows.alignment()
            side = None if self.side is None else self.side.of(rows)
            begin, end = self._interval(side, segment, alignment)
            if side is None or linear.decay is None:
                self._sum(linear, begin, end)
            else:
                number = segment if side.is_past else segment + 1
                border = side.base(segments.first_query(number), alignment)
                self._sum_decaying(linear, side, border, begin, end)
            linear.copy_state(self.buffer, task, out=True)

    def _interval(self, side: Side | None, segment: Expr, alignment: Expr) -> tuple[Expr, Expr]:
        """Slots that count at this segment's border, and at no border further out."""
        segments = self.segments
        if side is None:
            length = blocks_of(segments.kv_len, segments.count)
            begin = settle(T.min(segment * length, segments.kv_len))
            return begin, settle(T.min(begin + length, segments.kv_len))

        def border(number: Expr) -> Expr:
            return segments.slot(side.base(segments.first_query(number), alignment))

        if side.is_past:
            outer = T.if_then_else(segment == 0, index(0), border(segment - 1))
            return settle(outer), border(segment)
        last = segment == segments.count - 1
        outer = T.if_then_else(last, segments.kv_len, border(segment + 2))
        return border(segment + 1), settle(outer)

    def _sum(self, linear: LinearPanels, begin: Expr, end: Expr) -> None:
        keys, step = linear.keys, self.segments.chunk
        start, stop = keys.rank(begin), keys.rank(end)
        with T.serial(blocks_of(stop - start, step)) as block:
            at = settle(start + block * step)
            count = settle(T.min(stop - at, index(step)))
            linear.pack_keys(at, count)
            linear.update(None, at, count, index(0))

    def _sum_decaying(
        self, linear: LinearPanels, side: Side, border: Expr, begin: Expr, end: Expr
    ) -> None:
        """In steps of slots that end at the border, from the far end on."""
        step = self.segments.chunk
        reach = border - begin if side.is_past else end - border
        steps = blocks_of(reach, step)
        with T.serial(steps) as done:
            left = steps - 1 - done
            base = settle(border - (left + 1) * step if side.is_past else border + left * step)
            first = clamp(base, begin, end)
            start = linear.keys.rank(first)
            count = settle(linear.keys.rank(clamp(base + step, first, end)) - start)
            linear.pack_keys(start, count)
            linear.update(side, start, count, base)

    def add_up(self) -> None:
        """Pass 2: inclusive sums over the segments of each head, from the far end on."""
        segments, buffer = self.segments, self.buffer
        lanes = segments.part.tile.state.lanes
        backward = self.side is None or not self.side.is_past
        with T.parallel(segments.head_count) as head:
            factor: Expr | None = None
            decays = segments.buffers.extra.get("log_decay")
            if decays is not None:
                # A segment ends whole chunks after it begins. exp2 takes exponents down to -inf.
                rate = decays[segments.rows(head).kv_head]
                slots = T.cast(segments.chunks * segments.chunk, "float32")
                power = exp2(rate * T.float32(LOG2_E) * slots, 1)
                factor = broadcast(settle_float(power), lanes)
            with T.serial(segments.count - 1) as step:
                number = segments.count - 2 - step if backward else step + 1
                task = settle(head * segments.count + number)
                before = settle(task + 1 if backward else task - 1)
                with T.serial(index(segments.part.features.count)) as f:
                    with T.serial(index(int(buffer.shape[2]) // lanes)) as v:
                        at = settle(v * lanes)
                        old = load(buffer, before, f, at, lanes=lanes)
                        if factor is not None:
                            old = old * factor
                        new = load(buffer, task, f, at, lanes=lanes) + old
                        store(buffer, new, task, f, at, lanes=lanes)


def emit_hybrid(
    buffers: Buffers,
    heads: Heads,
    part: LinearPart,
    exact: tuple[ExactTile, Sequence[ExactSet]] | None,
    scale: float,
    subset: HeadSubset | None = None,
) -> None:
    """All passes.

    Args:
        exact: tile and exact keys, one set per part of the subset or one for all; its panels are
            those of the linear chunks. ``None``: no exact keys.
        subset: the heads; ``None``: all.
    """
    real_keys = list_keys(buffers) if exact is not None or not part.skipped_sinks else None
    linear_keys = list_keys(buffers, part.skipped_sinks) if part.skipped_sinks else real_keys
    tile = part.tile
    segments = _Segments(buffers, heads, subset or HeadSubset.all(heads), part)
    states = [_States(segments, side, heads.value_dim) for side in part.sides or (None,)]
    for each in states:
        each.sum_segments(linear_keys)
    for each in states:
        each.add_up()
    with T.parallel(segments.head_count * segments.count) as task:
        head = quotient(task, segments.count)
        rows = segments.rows(head)
        sides: list[Side | None] = [side.of(rows) for side in part.sides] or [None]
        keys = KeyList.of(rows.batch, linear_keys)
        linear = LinearPanels(tile, rows, keys, part.features)
        linear.allocate_queries()
        if linear.decay is not None:
            linear.decay.tables([side for side in sides if side is not None])
        chunks = _Chunks(linear, segments, exact, KeyList.of(rows.batch, real_keys), scale)
        first = settle(remainder(task, segments.count) * segments.chunks)
        count = settle(T.min(segments.chunks, segments.all_chunks - first))
        waiting: _Waiting | None = None
        if len(part.sides) > 1:
            waiting = _Waiting(tile, heads.value_dim, segments.chunks, first)
        for each, side in zip(states[1:], sides[1:], strict=True):
            linear.copy_state(each.buffer, each.at(task), out=False)
            with T.serial(count) as step:
                chunks.later(settle(first + (count - 1 - step)), side, waiting)
        linear.copy_state(states[0].buffer, states[0].at(task), out=False)
        with T.serial(count) as step:
            chunks.emit(settle(first + step), sides[0], waiting)


class _Waiting:
    """Sums of the future side for the chunks of one segment."""

    def __init__(self, tile: LinearTile, value_dim: int, chunks: Expr, first_chunk: Expr) -> None:
        self.tile, self.first_chunk = tile, first_chunk
        shape = (chunks * tile.panels, value_dim + 1, tile.panel.width)
        self.buffer = T.alloc_buffer(shape, "float32")

    def columns(self, chunk: Expr, p: Expr) -> Columns:
        row = settle((chunk - self.first_chunk) * self.tile.panels + p)
        return Columns(self.tile.panel, self.buffer, (row,))


class _Chunks:
    """Pass 3: one chunk of queries after another."""

    def __init__(
        self,
        linear: LinearPanels,
        segments: _Segments,
        exact: tuple[ExactTile, Sequence[ExactSet]] | None,
        real_keys: KeyList,
        scale: float,
    ) -> None:
        self.linear, self.segments = linear, segments
        self.rows = linear.heads
        self.alignment, first_sink = self.rows.alignment()
        self.exact: ExactPanels | None = None
        if exact is not None:
            exact_tile, exact_sets = exact
            exact_set = exact_set_of(exact_sets, self.rows)
            self.exact = ExactPanels(exact_tile, self.rows, scale, 0.0, sums_in_lanes=True)
            self.spans = ExactSpans(
                exact_tile, self.rows, real_keys, exact_set, self.alignment, first_sink
            )

    def later(self, chunk: Expr, side: Side | None, waiting: _Waiting | None) -> None:
        """The sums of the future side, into ``waiting``."""
        linear, tile = self.linear, self.linear.tile
        assert side is not None and waiting is not None
        first_query = settle(chunk * tile.queries)
        linear.pack_queries(settle(first_query * self.rows.group))
        base, start, count = self._pack_keys(first_query, side)
        with T.serial(index(tile.panels)) as p:
            with T.If(self._query(first_query, p) < self.rows.query_len):
                with T.Then():
                    near = self._near(p, side, base, start, count)
                    linear.sums(p, side, near, None, waiting.columns(chunk, p))
        linear.update(side, start, count, base)

    def emit(self, chunk: Expr, side: Side | None, waiting: _Waiting | None) -> None:
        """The past side, or all keys, and the exact part; writes the output."""
        linear, rows = self.linear, self.rows
        tile = linear.tile
        panel = tile.panel
        first_query = settle(chunk * tile.queries)
        first_row = settle(first_query * rows.group)
        linear.pack_queries(first_row)
        base = start = count = index(0)
        if side is not None:
            base, start, count = self._pack_keys(first_query, side)
        if self.exact is not None:
            self.exact.start(first_row)
            self.spans.find(first_row)
            self.spans.attend(self.exact)
        with T.serial(index(tile.panels)) as p:
            with T.If(self._query(first_query, p) < rows.query_len):
                with T.Then():
                    near = None if side is None else self._near(p, side, base, start, count)
                    add = None if waiting is None else waiting.columns(chunk, p)
                    out = Columns(panel, linear.sums_buffer, (p,))
                    linear.sums(p, side, near, add, out)
                    row = settle(first_row + p * panel.width)
                    if self.exact is not None:
                        linear.merge_into(self.exact, p, self._gain(row))
                    else:
                        part = self.segments.part
                        linear.normalise(p, part.epsilon, part.least, part.factor)
                        rows.write_output(linear.sums_buffer, p, row, panel)
        if self.exact is not None:
            self.exact.finish(first_row)
        if side is not None:
            linear.update(side, start, count, base)

    def _gain(self, row: Expr) -> Expr | None:
        if not self.segments.part.shared:
            return None
        return settle_float(self.rows.buffers.extra["window_gain"][settle(self.rows.head_of(row))])

    def _query(self, first_query: Expr, p: Expr) -> Expr:
        """The first query of a panel."""
        return settle(first_query + self.linear.first_query(p))

    def _pack_keys(self, first_query: Expr, side: Side) -> tuple[Expr, Expr, Expr]:
        """Base, place in the list and number of the keys of a chunk."""
        rank, slot = self.linear.keys.rank, self.segments.slot
        base = side.base(first_query, self.alignment)
        start = settle(rank(slot(base)))
        count = settle(rank(slot(base + self.segments.chunk)) - start)
        self.linear.pack_keys(start, count)
        return base, start, count

    def _near(self, p: Expr, side: Side, base: Expr, start: Expr, count: Expr) -> Near:
        width = self.linear.tile.panel.width
        query = self.linear.first_query(p)
        rank, slot = self.linear.keys.rank, self.segments.slot

        def keys_before(lane: int) -> Expr:
            """Keys of the chunk in slots before the one of a lane."""
            return settle(rank(slot(base + query + lane)) - start)

        if side.is_past:
            every, some = keys_before(1), keys_before(width)
            return Near(base, start, index(0), some, every, some)
        none, some = keys_before(0), keys_before(width - 1)
        return Near(base, start, none, count, none, some)
