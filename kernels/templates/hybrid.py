"""Exact keys plus a linear remainder: the passes over the sequence around both parts."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import Heads
from subquad.kernels.templates.dense import ExactSet, ExactSpans
from subquad.kernels.templates.exact import ExactPanels, ExactTile
from subquad.kernels.templates.linear import FeatureKernel, LinearPanels, LinearTile
from subquad.kernels.templates.products import padded
from subquad.kernels.templates.rows import Buffers, HeadRows, KeyList, list_keys
from subquad.kernels.templates.vectors import (
    Expr,
    blocks_of,
    clamp,
    index,
    load,
    quotient,
    remainder,
    settle,
    store,
    store_scalar,
)


@dataclass(frozen=True)
class LinearPart:
    """The linear remainder of a variant.

    Attributes:
        gap: a query counts keys at least this far back; ``None``: all keys, before and after.
        skipped_sinks: positions ``0 .. skipped_sinks - 1`` are not counted.
        min_tasks: with fewer (batch, head) pairs the sequence is cut into segments.
    """

    tile: LinearTile
    feature: FeatureKernel
    gap: int | None
    skipped_sinks: int
    min_tasks: int


class _Segments:
    """How the sequence is cut, and the shared states of the cuts."""

    def __init__(self, buffers: Buffers, heads: Heads, part: LinearPart) -> None:
        self.part = part
        batch, query_len = buffers.query.shape[0], buffers.query.shape[2]
        self.kv_len = buffers.key.shape[2]
        chunk = part.tile.queries
        chunks = blocks_of(query_len, chunk)
        self.head_count = settle(batch * heads.num_kv_heads)
        wanted = T.min(blocks_of(index(part.min_tasks), self.head_count), chunks)
        self.chunks = blocks_of(chunks, settle(wanted))
        self.count = blocks_of(chunks, self.chunks)
        self.all_chunks = chunks
        width = padded(heads.head_dim, part.tile.state.width)
        # At least head_count * count, in terms of shapes alone: TVM moves allocations up.
        total = batch * heads.num_kv_heads + part.min_tasks
        self.states = T.alloc_buffer((total, heads.value_dim, width), "float32")
        self.normalisers = T.alloc_buffer((total, width), "float32")

    def interval(self, segment: Expr, alignment: Expr) -> tuple[Expr, Expr]:
        """Key slots that pass 1 sums for a segment: together all that come before the last one."""
        if self.part.gap is None:
            length = blocks_of(self.kv_len, self.count)
            begin = T.min(segment * length, self.kv_len)
            return settle(begin), settle(T.min((segment + 1) * length, self.kv_len))
        begin = T.if_then_else(segment == 0, index(0), self.first_slot(segment - 1, alignment))
        return settle(begin), self.first_slot(segment, alignment)

    def first_slot(self, segment: Expr, alignment: Expr) -> Expr:
        """First key slot of a segment's first chunk."""
        return self.chunk_slot(segment * (self.chunks * self.part.tile.queries), alignment)

    def chunk_slot(self, first_query: Expr, alignment: Expr) -> Expr:
        return clamp(first_query + alignment - (self.part.gap or 0), index(0), self.kv_len)


def emit_hybrid(
    buffers: Buffers,
    heads: Heads,
    part: LinearPart,
    exact: tuple[ExactTile, ExactSet] | None,
    scale: float,
) -> None:
    """All passes.

    Args:
        exact: tile and exact keys; its panels are those of the linear chunks. ``None``: no exact
            keys.
    """
    real_keys = list_keys(buffers) if exact is not None or not part.skipped_sinks else None
    linear_keys = list_keys(buffers, part.skipped_sinks) if part.skipped_sinks else real_keys
    segments = _Segments(buffers, heads, part)
    _sum_segments(buffers, heads, part, segments, linear_keys)
    _add_up(segments, heads)
    with T.parallel(segments.head_count * segments.count) as task:
        segment = remainder(task, segments.count)
        rows = HeadRows.of(buffers, heads, quotient(task, segments.count))
        linear = LinearPanels(part.tile, rows, KeyList.of(rows.batch, linear_keys), part.feature)
        linear.allocate_queries()
        at = task
        if part.gap is None:
            at = task - segment + segments.count - 1
        linear.copy_state(segments.states, segments.normalisers, at, out=False)
        chunks = _Chunks(linear, segments, exact, KeyList.of(rows.batch, real_keys), scale)
        first_chunk = settle(segment * segments.chunks)
        last_chunk = T.min(first_chunk + segments.chunks, segments.all_chunks)
        with T.serial(last_chunk - first_chunk) as step:
            chunks.emit(settle((first_chunk + step) * part.tile.queries))


def _sum_segments(
    buffers: Buffers,
    heads: Heads,
    part: LinearPart,
    segments: _Segments,
    linear_keys: tuple[Expr, Expr] | None,
) -> None:
    """Pass 1."""
    with T.parallel(segments.head_count * segments.count) as task:
        rows = HeadRows.of(buffers, heads, quotient(task, segments.count))
        keys = KeyList.of(rows.batch, linear_keys)
        linear = LinearPanels(part.tile, rows, keys, part.feature)
        linear.clear()
        alignment, _ = rows.alignment()
        begin, end = segments.interval(remainder(task, segments.count), alignment)
        start, stop = keys.rank(begin), keys.rank(end)
        step = part.tile.queries
        with T.serial(blocks_of(stop - start, step)) as block:
            at = settle(start + block * step)
            count = settle(T.min(stop - at, index(step)))
            linear.pack_keys(at, count)
            linear.update(at, count)
        linear.copy_state(segments.states, segments.normalisers, task, out=True)


def _add_up(segments: _Segments, heads: Heads) -> None:
    """Pass 2: inclusive sums over the segments of each head."""
    lanes = segments.part.tile.state.lanes

    def add(buffer: Expr, task: Expr, *outer: Expr) -> None:
        with T.serial(quotient(buffer.shape[-1], lanes)) as v:
            at = settle(v * lanes)
            before = load(buffer, task - 1, *outer, at, lanes=lanes)
            new = load(buffer, task, *outer, at, lanes=lanes) + before
            store(buffer, new, task, *outer, at, lanes=lanes)

    with T.parallel(segments.head_count) as head:
        with T.serial(segments.count - 1) as step:
            task = settle(head * segments.count + step + 1)
            with T.serial(index(heads.value_dim)) as e:
                add(segments.states, task, e)
            add(segments.normalisers, task)


class _Chunks:
    """Pass 3: one chunk of queries after another."""

    def __init__(
        self,
        linear: LinearPanels,
        segments: _Segments,
        exact: tuple[ExactTile, ExactSet] | None,
        real_keys: KeyList,
        scale: float,
    ) -> None:
        self.linear, self.segments = linear, segments
        self.rows = linear.heads
        self.alignment, first_sink = self.rows.alignment()
        tile = linear.tile
        self.limits = T.alloc_buffer((tile.panels, tile.panel.width), "int32")
        self.exact: ExactPanels | None = None
        if exact is not None:
            exact_tile, exact_set = exact
            self.exact = ExactPanels(exact_tile, self.rows, scale, 0.0)
            self.spans = ExactSpans(
                exact_tile, self.rows, real_keys, exact_set, self.alignment, first_sink
            )

    def emit(self, first_query: Expr) -> None:
        linear, rows = self.linear, self.rows
        tile, keys = linear.tile, linear.keys
        panel = tile.panel
        first_row = settle(first_query * rows.group)
        linear.pack_queries(first_row)
        causal = self.segments.part.gap is not None
        start = stop = index(0)
        if causal:
            start = keys.rank(self.segments.chunk_slot(first_query, self.alignment))
            stop = keys.rank(self.segments.chunk_slot(first_query + tile.queries, self.alignment))
            linear.pack_keys(start, stop - start)
        if self.exact is not None:
            self.exact.start(first_row)
            self.spans.find(first_row)
            self.spans.attend(self.exact)
        with T.serial(index(tile.panels)) as p:
            row = settle(first_row + p * panel.width)
            near = counted = index(0)
            if causal:
                near, counted = self._near_keys(p, row, start)
            linear.sums(p, start, near, counted, self.limits)
            if self.exact is not None:
                linear.merge_into(self.exact, p)
            else:
                linear.normalise(p)
                rows.write_output(linear.numerator, p, row, panel)
        if self.exact is not None:
            self.exact.finish(first_row)
        if causal:
            linear.update(start, stop - start)

    def _near_keys(self, p: Expr, row: Expr, start: Expr) -> tuple[Expr, Expr]:
        """How many of the chunk's keys some lane counts, and how many every lane counts."""
        panel = self.linear.tile.panel

        def slots_counted(query: Expr) -> Expr:
            return self.segments.chunk_slot(query + 1, self.alignment)

        with T.serial(index(panel.width)) as lane:
            limit = slots_counted(self.rows.query_of(row + lane)) - 1
            store_scalar(self.limits, T.cast(limit, "int32"), p, lane)
        some = slots_counted(self.rows.query_of(row + (panel.width - 1)))
        every = slots_counted(self.rows.query_of(row))
        rank = self.linear.keys.rank
        return settle(rank(some) - start), settle(rank(every) - start)
