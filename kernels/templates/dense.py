"""Exact attention under a band and a key mask: the task loop around ``ExactPanels``."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.templates.exact import ExactPanels, ExactTile, Visible
from subquad.kernels.templates.rows import Buffers, HeadRows, KeyList
from subquad.kernels.templates.vectors import Expr, bind, clamp, index, store_scalar

UNLIMITED = -1


@dataclass(frozen=True)
class Band:
    """``-right <= query position - key position <= left``; -1 puts no limit on a side."""

    left: int
    right: int

    @property
    def is_unlimited(self) -> bool:
        return self.left == UNLIMITED and self.right == UNLIMITED


class BandedPanels:
    """The ranges of keys that the panels of one task see, and the loop over them.

    Args:
        alignment: key slot of query slot 0; ``None`` for an unlimited band.
    """

    def __init__(
        self, tile: ExactTile, heads: HeadRows, keys: KeyList, band: Band, alignment: Expr | None
    ) -> None:
        self.tile, self.heads, self.keys, self.band = tile, heads, keys, band
        self.alignment = alignment
        panels, width = tile.panels, tile.panel.width
        self.begin = T.alloc_buffer((panels,), "int64", scope="local")
        self.end = T.alloc_buffer((panels,), "int64", scope="local")
        self.visible: Visible | None = None
        if not band.is_unlimited:
            # Slots that all rows of a panel see: no tile inside them needs masking.
            self.all_from = T.alloc_buffer((panels,), "int64", scope="local")
            self.all_to = T.alloc_buffer((panels,), "int64", scope="local")
            self.visible = Visible(
                T.alloc_buffer((panels, width), "int32"), T.alloc_buffer((panels, width), "int32")
            )

    def _first(self, query: Expr) -> Expr:
        """First slot a query sees, 0 .. kv_len."""
        if self.band.left == UNLIMITED:
            return index(0)
        return clamp(query + self.alignment - self.band.left, index(0), self.heads.kv_len)

    def _last(self, query: Expr) -> Expr:
        """Last slot a query sees, -1 .. kv_len - 1."""
        if self.band.right == UNLIMITED:
            return self.heads.kv_len - 1
        return clamp(query + self.alignment + self.band.right, index(-1), self.heads.kv_len - 1)

    def find(self, first_row: Expr) -> None:
        """Compute the ranges of the panels that start at ``first_row``."""
        heads, width = self.heads, self.tile.panel.width
        with T.serial(index(self.tile.panels)) as p:
            row = bind(first_row + p * width)
            head_query = bind(heads.query_of(row))
            tail_query = bind(heads.query_of(T.min(row + width, heads.row_count) - 1))
            with T.If(row < heads.row_count):
                with T.Then():
                    store_scalar(self.begin, self.keys.rank(self._first(head_query)), p)
                    store_scalar(self.end, self.keys.rank(self._last(tail_query) + 1), p)
                with T.Else():
                    store_scalar(self.begin, index(0), p)
                    store_scalar(self.end, index(0), p)
            if self.visible is not None:
                store_scalar(self.all_from, self._first(tail_query), p)
                store_scalar(self.all_to, self._last(head_query), p)
                with T.serial(index(width)) as lane:
                    query = bind(heads.query_of(row + lane))
                    store_scalar(self.visible.first, T.cast(self._first(query), "int32"), p, lane)
                    store_scalar(self.visible.last, T.cast(self._last(query), "int32"), p, lane)

    def attend(self, exact: ExactPanels) -> None:
        """Every block of keys for every panel that sees some of it."""
        tile = self.tile
        # Later rows see later keys; only panels past the last row are empty.
        begin = T.alloc_buffer((1,), "int64", scope="local")
        end = T.alloc_buffer((1,), "int64", scope="local")
        store_scalar(begin, self.begin[index(0)], index(0))
        store_scalar(end, self.end[index(0)], index(0))
        with T.serial(index(tile.panels)) as p:
            store_scalar(end, T.max(end[index(0)], self.end[p]), index(0))
        origin = bind(begin[index(0)])
        blocks = (T.max(end[index(0)] - origin, index(0)) + (tile.keys - 1)) // tile.keys
        with T.serial(blocks) as block:
            with T.serial(index(tile.panels)) as p:
                start = bind(T.max(origin + block * tile.keys, self.begin[p]))
                stop = bind(T.min(origin + (block + 1) * tile.keys, self.end[p]))
                with T.If(start < stop):
                    with T.Then():
                        is_partial = None
                        if self.visible is not None:
                            is_partial = T.Or(
                                self.keys.slot(start) < self.all_from[p],
                                self.keys.slot(stop - 1) > self.all_to[p],
                            )
                        exact.attend(self.keys, p, start, stop - start, self.visible, is_partial)


def emit_dense(
    buffers: Buffers,
    keys_of: tuple[Expr, Expr] | None,
    tile: ExactTile,
    sizes: tuple[int, int, int, int],
    band: Band,
    scale: float,
    softcap: float,
) -> None:
    """The parallel loop over (batch, key/value head, block of query rows).

    Args:
        keys_of: ``list_real_keys``; ``None`` without a key mask.
        sizes: num_kv_heads, group, head_dim, value_dim.
    """
    num_kv_heads, group, head_dim, value_dim = sizes
    batch, query_len = buffers.query.shape[0], buffers.query.shape[2]
    blocks = bind((query_len * group + (tile.queries - 1)) // tile.queries)
    with T.parallel(batch * num_kv_heads * blocks) as task:
        head_index = bind(task // blocks)
        # Causal work grows with the row: pairing first and last blocks keeps any run of tasks even.
        order = bind(task % blocks)
        block = bind(T.if_then_else(order % 2 == 0, order // 2, blocks - 1 - order // 2))
        b = bind(head_index // num_kv_heads)
        heads = HeadRows(buffers, b, bind(head_index % num_kv_heads), group, head_dim, value_dim)
        keys = KeyList(b, *(keys_of or (None, None)))
        alignment = None if band.is_unlimited else heads.alignment()
        first_row = bind(block * tile.queries)
        exact = ExactPanels(tile, heads, scale, softcap)
        panels = BandedPanels(tile, heads, keys, band, alignment)
        exact.start(first_row)
        panels.find(first_row)
        panels.attend(exact)
        exact.finish(first_row)
