"""How query rows and key slots of one (batch, key/value head) are addressed.

Query rows of a key/value head are numbered ``query * group + head in group``, so a panel takes
neighbouring queries of all heads that share the keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import Heads
from subquad.kernels.operator import HIDING_BIAS
from subquad.kernels.templates.products import Panel
from subquad.kernels.templates.vectors import (
    Expr,
    bind,
    index,
    quotient,
    remainder,
    settle,
    store_scalar,
)


@dataclass(frozen=True)
class Buffers:
    """The arguments of a kernel; optional ones ``None`` where the variant has none."""

    query: Expr
    key: Expr
    value: Expr
    key_mask: Expr | None
    query_positions: Expr | None
    key_positions: Expr | None
    output: Expr
    extra: Mapping[str, Expr] = field(default_factory=dict)
    """Further inputs and outputs of one operator, by name."""


@dataclass(frozen=True)
class HeadRows:
    """Query rows of one key/value head of one batch row, or of one of its query heads alone.

    Attributes:
        group: query heads whose rows are counted.
        query_head: the one head; ``None``: all that share the keys.
        row_end: rows from here on are not there; ``None``: all are.
    """

    buffers: Buffers
    batch: Expr
    kv_head: Expr
    group: int
    head_dim: int
    value_dim: int
    query_head: Expr | None = None
    row_end: Expr | None = None

    @staticmethod
    def of(buffers: Buffers, heads: Heads, number: Expr) -> HeadRows:
        """Key/value head ``number % num_kv_heads`` of batch row ``number // num_kv_heads``."""
        batch, kv_head = (
            quotient(number, heads.num_kv_heads),
            remainder(number, heads.num_kv_heads),
        )
        return HeadRows(buffers, batch, kv_head, heads.group, heads.head_dim, heads.value_dim)

    @staticmethod
    def of_query_head(buffers: Buffers, heads: Heads, number: Expr) -> HeadRows:
        """Query head ``number % num_heads`` of batch row ``number // num_heads``."""
        batch = quotient(number, heads.num_heads)
        head = remainder(number, heads.num_heads)
        kv_head = quotient(head, heads.group)
        return HeadRows(buffers, batch, kv_head, 1, heads.head_dim, heads.value_dim, head)

    @property
    def row_count(self) -> Expr:
        if self.row_end is not None:
            return self.row_end
        return self.buffers.query.shape[2] * self.group

    @property
    def kv_len(self) -> Expr:
        return self.buffers.key.shape[2]

    def alignment(self) -> tuple[Expr, Expr]:
        """Key slots of query slot 0 and of position 0; zeros for a variant without positions.

        Positions rise by one per slot, so these two say all.
        """
        query_positions, key_positions = self.buffers.query_positions, self.buffers.key_positions
        if query_positions is None or key_positions is None:
            return index(0), index(0)
        first_key = key_positions[self.batch, index(0)]
        return settle(query_positions[self.batch, index(0)] - first_key), settle(
            index(0) - first_key
        )

    def query_of(self, row: Expr) -> Expr:
        return quotient(row, self.group) if self.group > 1 else row

    def head_of(self, row: Expr) -> Expr:
        if self.query_head is not None:
            return self.query_head
        if self.group == 1:
            return self.kv_head
        return self.kv_head * self.group + remainder(row, self.group)

    def key(self, slot: Expr, dim: Expr) -> Expr:
        return self.buffers.key[self.batch, self.kv_head, slot, dim]

    def value(self, slot: Expr, dim: Expr) -> Expr:
        return self.buffers.value[self.batch, self.kv_head, slot, dim]

    def pack_queries(
        self, packed: Expr, p: Expr, first_row: Expr, panel: Panel, factor: float
    ) -> None:
        """``packed[p, d, lane] = factor * query``; lanes past the last row are zeros."""
        with T.serial(index(panel.width)) as lane:
            row = settle(first_row + lane)
            head, query = settle(self.head_of(row)), settle(self.query_of(row))
            with T.If(row < self.row_count):
                with T.Then():
                    with T.serial(index(self.head_dim)) as d:
                        number = self.buffers.query[self.batch, head, query, d]
                        store_scalar(packed, number * T.float32(factor), p, d, lane)
                with T.Else():
                    with T.serial(index(self.head_dim)) as d:
                        store_scalar(packed, T.float32(0.0), p, d, lane)

    def write_output(self, packed: Expr, p: Expr, first_row: Expr, panel: Panel) -> None:
        """``output = packed[p, e, lane]``, transposed back."""
        with T.serial(index(panel.width)) as lane:
            row = settle(first_row + lane)
            with T.If(row < self.row_count):
                with T.Then():
                    head, query = settle(self.head_of(row)), settle(self.query_of(row))
                    with T.serial(index(self.value_dim)) as e:
                        number = packed[p, e, lane]
                        store_scalar(self.buffers.output, number, self.batch, head, query, e)


@dataclass(frozen=True)
class KeyList:
    """The keys of a batch row that count, in order: all slots, or a list of them.

    Attributes:
        slots: ``[batch, kv_len]`` int32, the i-th of them; ``None``: every slot.
        ranks: ``[batch, kv_len + 1]`` int32, listed keys before a slot.
    """

    batch: Expr
    slots: Expr | None
    ranks: Expr | None

    @staticmethod
    def of(batch: Expr, listed: tuple[Expr, Expr] | None) -> KeyList:
        return KeyList(batch, None, None) if listed is None else KeyList(batch, *listed)

    def slot(self, position: Expr) -> Expr:
        if self.slots is None:
            return bind(position)
        return bind(T.cast(self.slots[self.batch, position], "int64"))

    def rank(self, slot: Expr) -> Expr:
        """Index of the first listed key at or after ``slot`` (0 .. kv_len)."""
        if self.ranks is None:
            return bind(slot)
        return bind(T.cast(self.ranks[self.batch, slot], "int64"))


def list_keys(buffers: Buffers, skipped_sinks: int = 0) -> tuple[Expr, Expr] | None:
    """``slots`` and ``ranks`` of ``KeyList`` for every batch row; ``None``: all keys count.

    Args:
        skipped_sinks: positions ``0 .. skipped_sinks - 1`` are left out.
    """
    key_mask, key_positions = buffers.key_mask, buffers.key_positions
    key_bias = buffers.extra.get("key_bias")
    if key_mask is None and key_bias is None and not skipped_sinks:
        return None
    batch, kv_len = buffers.key.shape[0], buffers.key.shape[2]
    slots = T.alloc_buffer((batch, kv_len), "int32")
    ranks = T.alloc_buffer((batch, kv_len + 1), "int32")
    with T.parallel(batch) as b:
        store_scalar(ranks, T.int32(0), b, index(0))
        with T.serial(kv_len) as slot:
            counts = []
            if key_mask is not None:
                counts.append(T.cast(key_mask[b, slot], "int32"))
            if key_bias is not None:
                counts.append(T.cast(key_bias[b, slot] > T.float32(HIDING_BIAS), "int32"))
            if skipped_sinks:
                assert key_positions is not None
                position = settle(key_positions[b, index(0)] + slot)
                counts.append(T.cast(T.Or(position < 0, position >= skipped_sinks), "int32"))
            # The slot is written always and counted only if it is in: no branch.
            rank = bind(ranks[b, slot])
            store_scalar(slots, T.cast(slot, "int32"), b, T.cast(rank, "int64"))
            store_scalar(ranks, rank + math.prod(counts), b, slot + 1)
    return slots, ranks
