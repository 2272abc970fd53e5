"""How query rows and key slots of one (batch, key/value head) are addressed.

Query rows of a key/value head are numbered chunk by chunk of queries, and head by head inside a
chunk. With a chunk of one query a panel takes neighbouring queries of all heads that share the
keys; with chunks of whole panels, each panel belongs to one head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import Heads
from subquad.kernels.operator import HIDING_BIAS
from subquad.kernels.templates.products import Panel
from subquad.kernels.templates.vectors import (
    Expr,
    bind,
    constant,
    index,
    load,
    quotient,
    remainder,
    settle,
    store,
    store_scalar,
    transposed,
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


def pick(values: Sequence[int], at: Expr) -> Expr:
    """``values[at]`` of a short static table."""
    step = values[1] - values[0] if len(values) > 1 else 0
    if list(values) == [values[0] + step * i for i in range(len(values))]:
        return settle(at * step + values[0])
    result = index(values[-1])
    for place in reversed(range(len(values) - 1)):
        if values[place] != values[place + 1]:
            result = T.if_then_else(at <= place, index(values[place]), result)
    return settle(result)


@dataclass(frozen=True)
class HeadSubset:
    """The heads that one parallel loop runs over, in parts of ``group`` query heads.

    Attributes:
        first_heads: the first query head of every part; the others follow it.
        kv_heads: the key/value head of every part.
    """

    first_heads: tuple[int, ...]
    kv_heads: tuple[int, ...]
    group: int

    @staticmethod
    def all(heads: Heads) -> HeadSubset:
        """Every key/value head with all query heads that share it."""
        kv_heads = tuple(range(heads.num_kv_heads))
        return HeadSubset(tuple(h * heads.group for h in kv_heads), kv_heads, heads.group)

    @staticmethod
    def singly(heads: Heads, chosen: Sequence[int]) -> HeadSubset:
        """Some query heads, each on its own."""
        return HeadSubset(tuple(chosen), tuple(head // heads.group for head in chosen), 1)

    @property
    def count(self) -> int:
        return len(self.kv_heads)


@dataclass(frozen=True)
class HeadRows:
    """The query heads of one key/value head, or one of them, of one batch row.

    Attributes:
        part: number in the ``HeadSubset``.
        group: query heads whose rows are counted.
        chunk: queries per chunk of the row numbers.
        query_end: queries from here on are not there; ``None``: all are.
    """

    buffers: Buffers
    batch: Expr
    part: Expr
    kv_head: Expr
    first_head: Expr
    group: int
    head_dim: int
    value_dim: int
    chunk: int = 1
    query_end: Expr | None = None

    @staticmethod
    def of(
        buffers: Buffers,
        heads: Heads,
        number: Expr,
        chunk: int = 1,
        subset: HeadSubset | None = None,
    ) -> HeadRows:
        """Part ``number % subset.count`` of batch row ``number // subset.count``."""
        subset = subset or HeadSubset.all(heads)
        batch, part = quotient(number, subset.count), remainder(number, subset.count)
        kv_head, first = pick(subset.kv_heads, part), pick(subset.first_heads, part)
        sizes = subset.group, heads.head_dim, heads.value_dim
        return HeadRows(buffers, batch, part, kv_head, first, *sizes, chunk)

    @staticmethod
    def of_query_head(buffers: Buffers, heads: Heads, number: Expr) -> HeadRows:
        """Query head ``number % num_heads`` of batch row ``number // num_heads``."""
        batch = quotient(number, heads.num_heads)
        head = remainder(number, heads.num_heads)
        kv_head = quotient(head, heads.group)
        return HeadRows(buffers, batch, head, kv_head, head, 1, heads.head_dim, heads.value_dim)

    @property
    def query_len(self) -> Expr:
        return self.buffers.query.shape[2] if self.query_end is None else self.query_end

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
        """Query of a row; those past the last query come last in a chunk."""
        if self.group == 1:
            return row
        if self.chunk == 1:
            return quotient(row, self.group)
        first = quotient(row, self.group * self.chunk) * self.chunk
        return settle(first + remainder(row, self.chunk))

    def head_of(self, row: Expr) -> Expr:
        if self.group == 1:
            return self.first_head
        in_chunk = remainder(row, self.group * self.chunk)
        return self.first_head + quotient(in_chunk, self.chunk)

    def key(self, slot: Expr, dim: Expr) -> Expr:
        return self.buffers.key[self.batch, self.kv_head, slot, dim]

    def value(self, slot: Expr, dim: Expr) -> Expr:
        return self.buffers.value[self.batch, self.kv_head, slot, dim]

    def places(self, first_row: Expr, count: int) -> tuple[list[tuple[Expr, Expr]], Expr]:
        """Head and query of ``count`` rows from ``first_row`` on, and whether all are there.

        Rows past the last query are given as one that is there.
        """
        rows = [settle(first_row + i) for i in range(count)]
        queries = [settle(self.query_of(row)) for row in rows]
        last = settle(self.query_len - 1)
        places = [
            (settle(self.head_of(row)), settle(T.min(query, last)))
            for row, query in zip(rows, queries, strict=True)
        ]
        # Queries that are not there come last.
        return places, queries[-1] <= last

    def pack_queries(
        self,
        packed: Expr,
        p: Expr,
        first_row: Expr,
        panel: Panel,
        factor: float,
        width: Expr | None = None,
    ) -> None:
        """``packed[p, d, lane] = factor * query``; lanes past the last row hold another row.

        Args:
            width: lanes that are packed; ``None``: all.
        """
        query = self.buffers.query

        def vector(place: tuple[Expr, Expr], d: Expr, lanes: int) -> Expr:
            head, row = place
            return load(query, self.batch, head, row, d, lanes=lanes) * constant(factor, lanes)

        blocks = quotient(index(panel.width) if width is None else width, panel.square)
        with T.serial(blocks) as block:
            lane = settle(block * panel.square)
            places, _ = self.places(settle(first_row + lane), panel.square)
            transpose(panel.square, self.head_dim, places, vector, packed, (p,), lane)

    def write_output(
        self,
        packed: Expr,
        p: Expr,
        first_row: Expr,
        panel: Panel,
        factors: Expr | None = None,
    ) -> None:
        """``output = packed[p, e, lane]``, transposed back; times ``factors[p, lane]``."""
        square, output = panel.square, self.buffers.output
        with T.serial(index(panel.width // square)) as block:
            lane = settle(block * square)
            places, whole = self.places(settle(first_row + lane), square)
            with T.If(whole):
                with T.Then():
                    self._write_square(packed, p, lane, places, square, factors)
                with T.Else():
                    with T.serial(index(square)) as i:
                        row = settle(first_row + lane + i)
                        head, query = settle(self.head_of(row)), settle(self.query_of(row))
                        with T.If(query < self.query_len):
                            with T.Then():
                                with T.serial(index(self.value_dim)) as e:
                                    number = packed[p, e, lane + i]
                                    if factors is not None:
                                        number = number * factors[p, lane + i]
                                    store_scalar(output, number, self.batch, head, query, e)

    def _write_square(
        self,
        packed: Expr,
        p: Expr,
        lane: Expr,
        places: Sequence[tuple[Expr, Expr]],
        square: int,
        factors: Expr | None,
    ) -> None:
        """Rows that are all there, ``square`` dims of all of them at once."""
        output, whole = self.buffers.output, self.value_dim // square

        def column(e: Expr) -> Expr:
            numbers = load(packed, p, e, lane, lanes=square)
            if factors is not None:
                numbers = numbers * load(factors, p, lane, lanes=square)
            return bind(numbers)

        if whole:
            with T.serial(index(whole)) as step:
                e = bind(step * square)
                columns = [column(e + i) for i in range(square)]
                for (head, query), row in zip(places, transposed(columns), strict=True):
                    store(output, row, self.batch, head, query, e, lanes=square)
        for e in range(whole * square, self.value_dim):
            for i, (head, query) in enumerate(places):
                number = packed[p, index(e), lane + i]
                if factors is not None:
                    number = number * factors[p, lane + i]
                store_scalar(output, number, self.batch, head, query, index(e))


def transpose(
    square: int,
    dims: int,
    places: Sequence[Any],
    vector: Callable[[Any, Expr, int], Expr],
    packed: Expr,
    outer: tuple[Expr, ...],
    lane: Expr,
) -> None:
    """``packed[outer, d, lane + i] = vector(places[i], d, 1)`` for ``square`` rows ``i``.

    Args:
        vector: ``vector(place, d, lanes)`` is dims ``d .. d + lanes - 1`` of a row.
    """
    whole = dims // square
    if whole:
        with T.serial(index(whole)) as step:
            d = bind(step * square)
            rows = [bind(vector(place, d, square)) for place in places]
            for i, column in enumerate(transposed(rows)):
                store(packed, column, *outer, d + i, lane, lanes=square)
    for d in range(whole * square, dims):
        for i, place in enumerate(places):
            store_scalar(packed, vector(place, index(d), 1), *outer, index(d), lane + i)


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
