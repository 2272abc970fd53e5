"""Block selection: pooled keys, then each query block's masses and what is kept of them.

A block is kept by its mass iff the mass ranked before it stays below the threshold. Summing that
for every block takes no sorting, vectorises, and is cheap: there are few blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

from tvm.script.ir_builder import tirx as T

from subquad.kernels.inputs import Heads
from subquad.kernels.operator import UNLIMITED
from subquad.kernels.templates.products import Panel, RegisterTile
from subquad.kernels.templates.rows import Buffers
from subquad.kernels.templates.vectors import (
    LOG2_E,
    Expr,
    bind,
    broadcast,
    clamp,
    constant,
    exp2,
    index,
    integers,
    load,
    quotient,
    remainder,
    settle,
    store,
    store_scalar,
    tanh,
)


@dataclass(frozen=True)
class Selection:
    """The static choices of a selector; see ``kernels/block_select/semantics.py``.

    Attributes:
        takes_previous: a block of queries is represented by the mean of the block before it, not by
            its own.
        ranks_own: the block's own keys are ranked as well, though not every query sees them all.
        panel: blocks whose sums are computed side by side.
    """

    block: int
    sinks: int
    scale: float
    softcap: float
    left: int
    right: int
    takes_previous: bool
    ranks_own: bool
    panel: Panel

    @property
    def lanes(self) -> int:
        return self.panel.lanes


def emit_select(buffers: Buffers, heads: Heads, selection: Selection) -> None:
    """Both parallel loops: over key blocks, over query blocks."""
    counts, indices = buffers.extra["block_counts"], buffers.extra["block_indices"]
    width = selection.panel.width
    batch, key_blocks = buffers.query.shape[0], indices.shape[3]
    # An expression of arguments alone: buffers are allocated before anything is computed.
    groups = T.truncdiv(key_blocks + (width - 1), index(width))
    wide = groups * width
    # Transposed, so that lanes are blocks; blocks past the last have no keys.
    pooled = T.alloc_buffer((batch, heads.num_kv_heads, heads.head_dim, wide), "float32")
    numbers = T.alloc_buffer((batch, wide), "float32")
    with T.parallel(batch * heads.num_kv_heads * wide) as task:
        _pool_keys(buffers, heads, selection, task, wide, pooled, numbers)
    with T.parallel(batch * heads.num_heads * counts.shape[2]) as task:
        _QueryBlock(buffers, heads, selection, task, wide, groups, pooled, numbers).select()


def _pool_keys(
    buffers: Buffers,
    heads: Heads,
    selection: Selection,
    task: Expr,
    wide: Expr,
    pooled: Expr,
    numbers: Expr,
) -> None:
    """Mean and number of the real keys of one block."""
    block = remainder(task, wide)
    head = remainder(quotient(task, wide), heads.num_kv_heads)
    row = quotient(quotient(task, wide), heads.num_kv_heads)
    kv_len = buffers.key.shape[2]
    assert buffers.key_positions is not None
    start = settle(block * selection.block - buffers.key_positions[row, index(0)])
    begin = clamp(start, index(0), kv_len)
    end = clamp(start + selection.block, index(0), kv_len)
    mean = _Mean(heads.head_dim)
    with T.serial(end - begin) as step:
        slot = settle(begin + step)

        def add() -> None:
            mean.add(lambda d: buffers.key[row, head, slot, d])

        if buffers.key_mask is None:
            add()
        else:
            with T.If(buffers.key_mask[row, slot]):
                with T.Then():
                    add()
    inverse = mean.inverse()
    with T.serial(index(heads.head_dim)) as d:
        store_scalar(pooled, mean.total[d] * inverse, row, head, d, block)
    with T.If(head == 0):
        with T.Then():
            store_scalar(numbers, mean.count[index(0)], row, block)


class _Mean:
    """Sum and number of vectors."""

    def __init__(self, dim: int) -> None:
        self.dim = dim
        self.total = T.alloc_buffer((dim,), "float32")
        self.count = T.alloc_buffer((1,), "float32", scope="local")
        store_scalar(self.count, T.float32(0.0), index(0))
        with T.serial(index(dim)) as d:
            store_scalar(self.total, T.float32(0.0), d)

    def add(self, vector: Expr) -> None:
        with T.serial(index(self.dim)) as d:
            store_scalar(self.total, self.total[d] + vector(d), d)
        store_scalar(self.count, self.count[index(0)] + T.float32(1.0), index(0))

    def inverse(self) -> Expr:
        return bind(T.float32(1.0) / T.max(self.count[index(0)], T.float32(1.0)))


class _QueryBlock:
    """The selection of one query block of one head."""

    def __init__(
        self,
        buffers: Buffers,
        heads: Heads,
        selection: Selection,
        task: Expr,
        wide: Expr,
        groups: Expr,
        pooled: Expr,
        numbers: Expr,
    ) -> None:
        self.buffers, self.selection = buffers, selection
        self.pooled, self.numbers, self.groups = pooled, numbers, groups
        self.counts = buffers.extra["block_counts"]
        self.indices = buffers.extra["block_indices"]
        query_blocks = self.counts.shape[2]
        self.row_block = remainder(task, query_blocks)
        number = quotient(task, query_blocks)
        self.batch = quotient(number, heads.num_heads)
        self.head = remainder(number, heads.num_heads)
        self.kv_head = quotient(self.head, heads.group)
        self.dim = heads.head_dim
        assert buffers.query_positions is not None and buffers.key_positions is not None
        start = settle(buffers.query_positions[self.batch, index(0)])
        step = settle(self.row_block * selection.block)
        self.position = settle(T.max(start, index(0)) + step)
        self.first_slot = settle(T.max(index(0) - start, index(0)) + step)
        self.shift = settle(start - buffers.key_positions[self.batch, index(0)])
        self.mass = T.alloc_buffer((wide,), "float32")
        self.kept = T.alloc_buffer((wide,), "int32")

    def select(self) -> None:
        """Write this block's list."""
        length = T.alloc_buffer((1,), "int64", scope="local")
        key_blocks = self.indices.shape[3]
        at = (self.batch, self.head, self.row_block)
        store_scalar(length, index(0), index(0))
        mean, present = self._represent()
        with T.If(present > T.float32(0.0)):
            with T.Then():
                with T.serial(index(self.dim)) as d:
                    scaled = mean.total[d] * mean.inverse() * T.float32(self.selection.scale)
                    store_scalar(mean.total, scaled, d)
                self._estimate(mean)
                self._rank(key_blocks)
                with T.serial(key_blocks) as block:
                    # Written always, counted only if it is kept: no branch.
                    end = bind(length[index(0)])
                    store_scalar(self.indices, T.cast(block, "int32"), *at, end)
                    more = T.cast(self.kept[block], "int64")
                    store_scalar(length, end + more, index(0))
        store_scalar(self.counts, T.cast(length[index(0)], "int32"), *at)
        with T.serial(key_blocks - length[index(0)]) as rest:
            store_scalar(self.indices, T.int32(0), *at, length[index(0)] + rest)

    def _represent(self) -> tuple[_Mean, Expr]:
        """Sum and number of the queries that stand for the block, and of its own."""
        own = _Mean(self.dim)
        self._add(own, self.first_slot)
        if not self.selection.takes_previous:
            return own, own.count[index(0)]
        mean = _Mean(self.dim)
        with T.If(self.row_block > 0):
            with T.Then():
                self._add(mean, settle(self.first_slot - self.selection.block))
        with T.If(mean.count[index(0)] == T.float32(0.0)):
            with T.Then():
                self._add(mean, self.first_slot, only_first=True)
        return mean, own.count[index(0)]

    def _add(self, mean: _Mean, first_slot: Expr, only_first: bool = False) -> None:
        """Add the real queries of the block that starts at a slot."""
        buffers = self.buffers
        query_len, kv_len = buffers.query.shape[2], buffers.key.shape[2]
        begin = settle(T.min(first_slot, query_len))
        end = settle(T.min(first_slot + self.selection.block, query_len))
        with T.serial(end - begin) as step:
            slot = settle(begin + step)
            conditions = []
            if only_first:
                conditions.append(mean.count[index(0)] == T.float32(0.0))
            if buffers.key_mask is not None:
                key = settle(slot + self.shift)
                conditions += [key >= 0, key < kv_len]
                near = clamp(key, index(0), kv_len - 1)
                conditions.append(buffers.key_mask[self.batch, near])

            def add() -> None:
                mean.add(lambda d: buffers.query[self.batch, self.head, slot, d])

            if not conditions:
                add()
            else:
                with T.If(reduce(T.And, conditions)):
                    with T.Then():
                        add()

    def _geometry(self, at: Expr) -> tuple[Expr, Expr]:
        """Blocks from ``at`` on that are ranked, blocks always kept: vectors of truth values."""
        selection, lanes = self.selection, self.selection.lanes
        size, reach = selection.block, selection.block - 1
        first = T.cast(at, "int32")
        number = bind(T.Ramp(first, T.int32(1), lanes))
        distance = bind(
            broadcast(T.cast(self.position, "int32"), lanes) - number * integers(size, lanes)
        )
        number_of_keys = load(self.numbers, self.batch, at, lanes=lanes)
        partly = number_of_keys > constant(0.0, lanes)
        wholly = partly
        guard = T.And(
            distance >= integers(-reach - size, lanes), distance <= integers(reach + size, lanes)
        )
        if selection.sinks:
            guard = T.Or(guard, number < integers(selection.sinks, lanes))
        for limit, sign in ((selection.left, 1), (selection.right, -1)):
            if limit == UNLIMITED:
                continue
            far = distance if sign > 0 else integers(0, lanes) - distance
            partly = T.And(partly, far <= integers(limit + reach, lanes))
            wholly = T.And(wholly, far <= integers(limit - reach, lanes))
        always = T.And(partly, T.Or(guard, T.Not(wholly)))
        if not selection.ranks_own:
            return wholly, always
        own = T.And(distance >= integers(-reach, lanes), distance <= integers(reach, lanes))
        return T.Or(wholly, T.And(partly, own)), always

    def _estimate(self, mean: _Mean) -> None:
        """Masses of all blocks; 0 where a block is not ranked."""
        selection, lanes = self.selection, self.selection.lanes
        peak = T.alloc_buffer((1,), "float32", scope="local")
        store_scalar(peak, T.float32(-1e30), index(0))
        panel = selection.panel
        with T.serial(self.groups) as group:
            start = bind(group * panel.width)
            products = RegisterTile.allocate(panel, 1)
            products.clear()
            with T.serial(index(self.dim)) as d:
                keys = panel.load(self.pooled, self.batch, self.kv_head, d, start=start)
                products.multiply_add([mean.total[d]], keys)
            for v, score in enumerate(products.get(0)):
                at = bind(start + v * lanes)
                if selection.softcap:
                    inner = bind(score * constant(1.0 / selection.softcap, lanes))
                    score = bind(tanh(inner, lanes) * constant(selection.softcap, lanes))
                ranked, _ = self._geometry(at)
                shown = T.Select(ranked, score, constant(float("-inf"), lanes))
                store(self.mass, shown, at, lanes=lanes)
            with T.serial(index(panel.width)) as lane:
                larger = T.max(peak[index(0)], self.mass[start + lane])
                store_scalar(peak, larger, index(0))
        total = T.alloc_buffer((1,), "float32", scope="local")
        store_scalar(total, T.float32(0.0), index(0))
        blocks = self.groups * panel.vectors
        with T.serial(blocks) as block:
            at = bind(block * lanes)
            shifted = load(self.mass, at, lanes=lanes) - broadcast(peak[index(0)], lanes)
            weight = exp2(shifted * constant(LOG2_E, lanes), lanes)
            weight = weight * load(self.numbers, self.batch, at, lanes=lanes)
            store(self.mass, weight, at, lanes=lanes)
            with T.serial(index(lanes)) as lane:
                more = total[index(0)] + self.mass[at + lane]
                store_scalar(total, more, index(0))
        inverse = bind(T.float32(1.0) / T.max(total[index(0)], T.float32(1e-30)))
        with T.serial(blocks) as block:
            at = bind(block * lanes)
            share = load(self.mass, at, lanes=lanes) * broadcast(inverse, lanes)
            store(self.mass, share, at, lanes=lanes)

    def _rank(self, key_blocks: Expr) -> None:
        panel, lanes = self.selection.panel, self.selection.lanes
        limit = bind(self.buffers.extra["thresholds"][self.head])
        with T.serial(self.groups) as group:
            start = bind(group * panel.width)
            own = panel.load(self.mass, start=start)
            places = [bind(start + v * lanes) for v in range(panel.vectors)]
            numbers = [bind(T.Ramp(T.cast(place, "int32"), T.int32(1), lanes)) for place in places]
            before = RegisterTile.allocate(panel, 1)
            before.clear()
            with T.serial(key_blocks) as other:
                mass = bind(broadcast(self.mass[other], lanes))
                block = bind(broadcast(T.cast(other, "int32"), lanes))
                more = []
                for mine, number, total in zip(own, numbers, before.get(0), strict=True):
                    ahead = T.Or(mass > mine, T.And(mass == mine, block < number))
                    more.append(total + T.Select(ahead, mass, constant(0.0, lanes)))
                before.set(0, more)
            threshold = broadcast(limit, lanes)
            for place, total in zip(places, before.get(0), strict=True):
                enough = T.Or(total < threshold, threshold >= constant(1.0, lanes))
                ranked, always = self._geometry(place)
                keep = T.Or(T.And(ranked, enough), always)
                kept = T.Select(keep, integers(1, lanes), integers(0, lanes))
                store(self.kept, kept, place, lanes=lanes)
