"""How query rows and key slots of one (batch, key/value head) are addressed.

Query rows of a key/value head are numbered ``query * group + head in group``, so a panel takes
neighbouring queries of all heads that share the keys.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script.ir_builder import tirx as T

from subquad.kernels.templates.products import Panel
from subquad.kernels.templates.vectors import Expr, bind, index, store_scalar


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


@dataclass(frozen=True)
class HeadRows:
    """One key/value head of one batch row."""

    buffers: Buffers
    batch: Expr
    kv_head: Expr
    group: int
    head_dim: int
    value_dim: int

    @property
    def row_count(self) -> Expr:
        return self.buffers.query.shape[2] * self.group

    @property
    def kv_len(self) -> Expr:
        return self.buffers.key.shape[2]

    def alignment(self) -> Expr:
        """Key slot of query slot 0; positions rise by one per slot."""
        query_positions, key_positions = self.buffers.query_positions, self.buffers.key_positions
        assert query_positions is not None and key_positions is not None
        return bind(query_positions[self.batch, index(0)] - key_positions[self.batch, index(0)])

    def query_of(self, row: Expr) -> Expr:
        return row // self.group if self.group > 1 else row

    def head_of(self, row: Expr) -> Expr:
        return self.kv_head * self.group + row % self.group if self.group > 1 else self.kv_head

    def key(self, slot: Expr, dim: Expr) -> Expr:
        return self.buffers.key[self.batch, self.kv_head, slot, dim]

    def value(self, slot: Expr, dim: Expr) -> Expr:
        return self.buffers.value[self.batch, self.kv_head, slot, dim]

    def pack_queries(
        self, packed: Expr, p: Expr, first_row: Expr, panel: Panel, factor: float
    ) -> None:
        """``packed[p, d, lane] = factor * query``; lanes past the last row are zeros."""
        with T.serial(index(panel.width)) as lane:
            row = bind(first_row + lane)
            head, query = bind(self.head_of(row)), bind(self.query_of(row))
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
            row = bind(first_row + lane)
            with T.If(row < self.row_count):
                with T.Then():
                    head, query = bind(self.head_of(row)), bind(self.query_of(row))
                    with T.serial(index(self.value_dim)) as e:
                        number = packed[p, e, lane]
                        store_scalar(self.buffers.output, number, self.batch, head, query, e)


@dataclass(frozen=True)
class KeyList:
    """The real keys of a batch row, in order: all slots, or a list of them.

    Attributes:
        slots: ``[batch, kv_len]`` int32, the i-th real slot; ``None``: every slot is real.
        ranks: ``[batch, kv_len + 1]`` int32, real keys before a slot.
    """

    batch: Expr
    slots: Expr | None
    ranks: Expr | None

    def slot(self, position: Expr) -> Expr:
        if self.slots is None:
            return bind(position)
        return bind(T.cast(self.slots[self.batch, position], "int64"))

    def rank(self, slot: Expr) -> Expr:
        """Index of the first listed key at or after ``slot`` (0 .. kv_len)."""
        if self.ranks is None:
            return bind(slot)
        return bind(T.cast(self.ranks[self.batch, slot], "int64"))


def list_real_keys(key_mask: Expr) -> tuple[Expr, Expr]:
    """``slots`` and ``ranks`` of ``KeyList`` for every batch row."""
    batch, kv_len = key_mask.shape
    slots = T.alloc_buffer((batch, kv_len), "int32")
    ranks = T.alloc_buffer((batch, kv_len + 1), "int32")
    with T.parallel(batch) as b:
        store_scalar(ranks, T.int32(0), b, index(0))
        with T.serial(kv_len) as slot:
            # Written always and counted only if real: no branch.
            count = bind(ranks[b, slot])
            store_scalar(slots, T.cast(slot, "int32"), b, T.cast(count, "int64"))
            store_scalar(ranks, count + T.cast(key_mask[b, slot], "int32"), b, slot + 1)
    return slots, ranks
