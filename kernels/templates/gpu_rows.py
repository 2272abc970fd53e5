"""Query rows and key slots on a GPU: addresses, the list of keys that count, visible spans.

As on the CPU (``rows.py``, ``dense.py``): query rows of a key/value head are numbered
``query * group + head in group``, and a key mask becomes a list of key slots, so hidden keys cost
nothing, wherever they lie.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.templates.dense import ExactSet
from subquad.kernels.templates.gpu_block import Block, Threads, grid, small
from subquad.kernels.templates.rows import Buffers, HeadRows, KeyList
from subquad.kernels.templates.vectors import (
    Expr,
    blocks_of,
    clamp,
    index,
    settle,
    store_scalar,
)

LIST_THREADS = 256


def list_keys(buffers: Buffers, scope: str, skipped_sinks: int = 0) -> tuple[Expr, Expr] | None:
    """A launch that fills ``slots`` and ``ranks`` of ``KeyList``; ``None``: all keys count.

    One block per batch row; a thread counts a stretch of slots, then numbers them.

    Args:
        skipped_sinks: positions ``0 .. skipped_sinks - 1`` are left out.
    """
    key_mask, key_positions = buffers.key_mask, buffers.key_positions
    if key_mask is None and not skipped_sinks:
        return None
    batch, kv_len = buffers.key.shape[0], buffers.key.shape[2]
    slots = T.alloc_buffer((batch, kv_len), "int32")
    ranks = T.alloc_buffer((batch, kv_len + 1), "int32")
    with grid(batch, Threads(LIST_THREADS, 1, scope)) as block:
        b = T.cast(block.number, "int64")

        def counted(slot: Expr) -> Expr:
            counts = []
            if key_mask is not None:
                counts.append(T.cast(key_mask[b, slot], "int32"))
            if skipped_sinks:
                assert key_positions is not None
                position = key_positions[b, index(0)] + slot
                counts.append(T.cast(T.Or(position < 0, position >= skipped_sinks), "int32"))
            return counts[0] if len(counts) == 1 else counts[0] * counts[1]

        counts = block.shared(LIST_THREADS, "int32")
        count = T.alloc_buffer((1,), "int32", scope="local")
        stretch = blocks_of(kv_len, LIST_THREADS)
        first = settle(T.min(T.cast(block.thread, "int64") * stretch, kv_len))
        length = settle(T.min(stretch, kv_len - first))
        store_scalar(count, small(0), small(0))
        with T.serial(length) as step:
            store_scalar(count, count[small(0)] + counted(first + step), small(0))
        store_scalar(counts, count[small(0)], block.thread)
        block.sync()
        store_scalar(count, small(0), small(0))
        with T.serial(block.thread) as before:
            store_scalar(count, count[small(0)] + counts[before], small(0))
        with T.serial(length) as step:
            slot = first + step
            rank = T.Bind(count[small(0)])
            store_scalar(ranks, rank, b, slot)
            is_counted = T.Bind(counted(slot))
            with T.If(is_counted != 0):
                with T.Then():
                    store_scalar(slots, T.cast(slot, "int32"), b, T.cast(rank, "int64"))
            store_scalar(count, rank + is_counted, small(0))
        with T.If(block.thread == LIST_THREADS - 1):
            with T.Then():
                store_scalar(ranks, count[small(0)], b, kv_len)
    return slots, ranks


def row_count(heads: HeadRows) -> Expr:
    """Rows of all its heads together."""
    return heads.query_len * heads.group


@dataclass(frozen=True)
class KeySpans:
    """The keys that some row of a block sees, as up to three ranges of the key list.

    Without sinks there is one range, the window. With sinks there are three: sinks before the
    window, the window, sinks after it. Equal in all threads.
    """

    begins: tuple[Expr, ...]
    counts: tuple[Expr, ...]

    @staticmethod
    def find(
        heads: HeadRows, keys: KeyList, exact_set: ExactSet, head_query: Expr, tail_query: Expr
    ) -> KeySpans:
        """Ranges for the queries ``head_query .. tail_query``."""
        alignment, first_sink = heads.alignment()
        at = (heads, alignment)
        if exact_set.window is None:
            # All sinks lie before an empty window at the end.
            window_begin = window_end = heads.kv_len
        else:
            window_begin = settle(exact_set.window.first(head_query, *at))
            window_end = settle(T.max(exact_set.window.last(tail_query, *at) + 1, window_begin))
        spans = [(window_begin, window_end)]
        if exact_set.sinks:
            allowed_begin = settle(exact_set.allowed.first(head_query, *at))
            allowed_end = settle(exact_set.allowed.last(tail_query, *at) + 1)
            sink_begin, sink_end = sink_slots(heads, exact_set.sinks, first_sink)
            begin = settle(T.max(sink_begin, allowed_begin))
            end = settle(T.min(sink_end, allowed_end))
            before = (begin, T.min(end, window_begin))
            after = (T.max(begin, window_end), end)
            spans = [before, spans[0], after]
        begins, counts = [], []
        for begin, end in spans:
            begin = settle(begin)
            begins.append(settle(keys.rank(begin)))
            counts.append(settle(keys.rank(settle(T.max(begin, end))) - begins[-1]))
        return KeySpans(tuple(begins), tuple(counts))

    def tiles(self, size: int) -> tuple[Expr, ...]:
        """Tiles of ``size`` keys per range."""
        return tuple(blocks_of(count, size) for count in self.counts)


def sink_slots(heads: HeadRows, sinks: int, first_sink: Expr) -> tuple[Expr, Expr]:
    """Slot of the first sink, and the slot after the last one."""
    begin = clamp(first_sink, index(0), heads.kv_len)
    return begin, clamp(first_sink + sinks, index(0), heads.kv_len)


class VisibleRows:
    """Which key slots each row of a block may see, in shared memory.

    The definition, as it stands: a key is seen iff it is in the row's window, or it is a sink and
    in what the row's site allows.
    """

    def __init__(self, block: Block, heads: HeadRows, exact_set: ExactSet, rows: int) -> None:
        self.heads, self.exact_set, self.block = heads, exact_set, block
        self.alignment, first_sink = heads.alignment()
        self.bands = [exact_set.window] if exact_set.window is not None else []
        self.sinks: tuple[Expr, Expr] | None = None
        if exact_set.sinks:
            self.bands.append(exact_set.allowed)
            begin, end = sink_slots(heads, exact_set.sinks, first_sink)
            self.sinks = T.cast(begin, "int32"), T.cast(end, "int32")
        self.first = [block.shared(rows, "int32") for _ in self.bands]
        self.last = [block.shared(rows, "int32") for _ in self.bands]

    def find(self, rows: int, first_row: Expr) -> None:
        """For the rows from ``first_row`` on."""
        with self.block.each(rows) as row:
            query = settle(self.heads.query_of(first_row + T.cast(row, "int64")))
            at = (query, self.heads, self.alignment)
            for band, first, last in zip(self.bands, self.first, self.last, strict=True):
                store_scalar(first, T.cast(band.first(*at), "int32"), row)
                store_scalar(last, T.cast(band.last(*at), "int32"), row)

    def seen(self, row: Expr, slot: Expr) -> Expr:
        """Whether ``row`` of the block sees the key in ``slot`` (int32)."""
        inside = [
            T.And(slot >= first[row], slot <= last[row])
            for first, last in zip(self.first, self.last, strict=True)
        ]
        if self.sinks is None:
            return inside[0]
        is_sink = T.And(slot >= self.sinks[0], slot < self.sinks[1])
        inside[-1] = T.And(is_sink, inside[-1])
        return inside[0] if len(inside) == 1 else T.Or(*inside)
