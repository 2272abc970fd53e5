"""Function body of block-sparse attention: a loop over query blocks in standard ops.

Keys and values are brought to blocks of positions once. Each step of the loop gathers, for one
query block, the listed key blocks of every head, as many as the longest list has, and attends to
them. Work follows that longest list; a step stores ``block * longest * block`` scores per head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from subquad.kernels.band import MASKED
from subquad.kernels.body import Body
from subquad.kernels.inputs import Heads, Inputs
from subquad.kernels.operator import UNLIMITED

INT32 = 6


@dataclass(frozen=True)
class PositionRows:
    """Slots in order of position, cut into blocks.

    Attributes:
        count: number of blocks, ``[1]``.
        size: slots per block, ``[1]``.
        slots: slot at each place, ``[batch, count * size]``, inside the sequence.
        exists: whether there is a slot at that place, same shape.
    """

    count: ir.Value
    size: ir.Value
    slots: ir.Value
    exists: ir.Value

    def take(self, body: Body, source: ir.Value, num_heads: int) -> ir.Value:
        """``[batch, num_heads, length, dim]`` in order: ``[.., count * size, dim]``."""
        return _take(body, source, self.slots, num_heads)


def _take(body: Body, source: ir.Value, slots: ir.Value, num_heads: int) -> ir.Value:
    shape = body.shape(1, num_heads, 1, 1)
    index = body("Expand", body.unsqueeze(slots, 1, 3), shape)
    return body("GatherND", source, index, batch_dims=2)


def rows_of(
    body: Body, first_slot: ir.Value, length: ir.Value, count: ir.Value, size: ir.Value
) -> PositionRows:
    """``count`` blocks of ``size`` slots from ``first_slot`` ``[batch, 1]`` on."""
    slots = body("Add", first_slot, body.unsqueeze(body.arange(body("Mul", count, size)), 0))
    last = body("Sub", length, 1)
    exists = body.between(slots, 0, last)
    return PositionRows(count, size, body("Max", body("Min", slots, last), 0), exists)


def first_position(body: Body, positions: ir.Value) -> ir.Value:
    """Position of slot 0, ``[batch, 1]``."""
    return body.slice(positions, 0, 1, 1)


def key_rows(body: Body, inputs: Inputs, block: int) -> PositionRows:
    """Keys by position from 0 on; ``exists`` counts real ones only."""
    positions = inputs.positions[1]
    length = body.dim(positions, 1)
    first_slot = body("Neg", first_position(body, positions))
    rows = rows_of(body, first_slot, length, body.ceil_div(length, block), body.value(block))
    if inputs.key_mask is None:
        return rows
    real = body("GatherElements", inputs.key_mask, rows.slots, axis=1)
    return PositionRows(rows.count, rows.size, rows.slots, body("And", rows.exists, real))


def query_rows(body: Body, inputs: Inputs, block: int) -> PositionRows:
    """Queries by position from the first that is not negative; a short sequence is one block."""
    positions = inputs.positions[0]
    length = body.dim(positions, 1)
    count, size = body.ceil_div(length, block), body("Min", length, block)
    return rows_of(body, leading(body, positions), length, count, size)


def leading(body: Body, query_positions: ir.Value) -> ir.Value:
    """Queries at negative positions, ``[batch, 1]``."""
    return body("Max", body("Neg", first_position(body, query_positions)), 0)


def block_sparse_body(
    body: Body,
    heads: Heads,
    inputs: Inputs,
    block: int,
    scale: float,
    softcap: float,
    left: int,
    right: int,
) -> ir.Value:
    """``[batch, num_heads, query_len, value_dim]``."""
    queries, keys = query_rows(body, inputs, block), key_rows(body, inputs, block)
    query = body("Mul", queries.take(body, inputs.query, heads.num_heads), scale)
    query = body.reshape(query, 0, 0, queries.count, queries.size, heads.head_dim)
    tiles = _Tiles(body, heads, inputs, keys, block)
    first = body("Max", first_position(body, inputs.positions[0]), 0)

    def attend(inner: Body, row: ir.Value) -> ir.Value:
        step = inner.reshape(row, 1)
        near = inner.slice(query, step, inner("Add", step, 1), 2)
        near = inner("Squeeze", near, 2)
        listed = tiles.listed(inner, step)
        visible = tiles.exist(inner, listed)
        if left != UNLIMITED or right != UNLIMITED:
            start = inner("Add", first, inner("Mul", step, block))
            position = inner("Add", start, inner.unsqueeze(inner.arange(queries.size), 0))
            distance = inner(
                "Sub",
                inner.unsqueeze(inner("Cast", position, to=INT32), 1, 3),
                inner.unsqueeze(tiles.positions(inner, listed), 2),
            )
            inside = [visible]
            if left != UNLIMITED:
                inside.append(inner("LessOrEqual", distance, np.array([left], np.int32)))
            if right != UNLIMITED:
                inside.append(inner("GreaterOrEqual", distance, np.array([-right], np.int32)))
            both = inner.all_of(*inside)
            assert both is not None
            visible = both
        scores = inner.matmul_transposed(near, tiles.gather(inner, tiles.key, listed), rank=4)
        if softcap:
            scores = inner("Mul", inner("Tanh", inner("Mul", scores, 1.0 / softcap)), softcap)
        bias = inner("Where", visible, 0.0, MASKED)
        weights = inner("Softmax", inner("Add", scores, bias), axis=-1)
        output = inner("MatMul", weights, tiles.gather(inner, tiles.value, listed))
        best = inner("ReduceMax", bias, [-1], keepdims=1)
        return inner("Mul", output, inner.as_float(inner("Greater", best, MASKED / 2)))

    stacked = body.stack(queries.count, attend)
    by_head = body.transpose(stacked, 1, 2, 0, 3, 4)
    ordered = body.reshape(by_head, 0, 0, -1, heads.value_dim)
    length = body.dim(inputs.query, 2)
    lead = leading(body, inputs.positions[0])
    places = body("Sub", body.unsqueeze(body.arange(length), 0), lead)
    output = _take(body, ordered, body("Max", places, 0), heads.num_heads)
    in_block = body.as_float(body("GreaterOrEqual", places, 0))
    return body("Mul", output, body.unsqueeze(in_block, 1, 3))


@dataclass(frozen=True)
class _Listed:
    """The lists of one query block, cut to the longest.

    Attributes:
        indices: ``[batch, num_heads, width]`` int64.
        valid: whether an entry counts, same shape.
        width: ``[1]``, at least 1.
    """

    indices: ir.Value
    valid: ir.Value
    width: ir.Value


class _Tiles:
    """Keys and values in blocks, and the gathering of some."""

    def __init__(
        self, body: Body, heads: Heads, inputs: Inputs, rows: PositionRows, block: int
    ) -> None:
        self.heads, self.block = heads, block
        self.counts = inputs.extra["block_counts"]
        self.indices = inputs.extra["block_indices"]
        self.last = body("Sub", rows.count, 1)
        self.exists = body.reshape(rows.exists, 0, -1, block)
        self.key = self._blocks(body, rows, inputs.key, heads.head_dim)
        self.value = self._blocks(body, rows, inputs.value, heads.value_dim)

    def _blocks(self, body: Body, rows: PositionRows, source: ir.Value, dim: int) -> ir.Value:
        ordered = rows.take(body, source, self.heads.num_kv_heads)
        return body.reshape(ordered, 0, 0, -1, self.block * dim)

    def listed(self, body: Body, step: ir.Value) -> _Listed:
        after = body("Add", step, 1)
        counts = body.slice(self.counts, step, after, 2)
        longest = body("Cast", body("ReduceMax", counts, keepdims=0), to=7)
        width = body("Max", body.reshape(longest, 1), 1)
        indices = body("Squeeze", body.slice(self.indices, step, after, 2), 2)
        indices = body("Cast", body.slice(indices, 0, width, 2), to=7)
        order = body("Cast", body.arange(width), to=INT32)
        known = body("And", body.between(indices, 0, self.last), body("Less", order, counts))
        return _Listed(body("Max", body("Min", indices, self.last), 0), known, width)

    def gather(self, body: Body, blocks: ir.Value, listed: _Listed) -> ir.Value:
        """``[batch, num_heads, width * block, dim]``."""
        heads = self.heads
        index = body.reshape(listed.indices, 0, heads.num_kv_heads, -1, 1)
        tiles = body("GatherND", blocks, index, batch_dims=2)
        places = body("Mul", listed.width, self.block)
        return body.reshape(tiles, 0, heads.num_heads, places, -1)

    def exist(self, body: Body, listed: _Listed) -> ir.Value:
        """Listed and real, ``[batch, num_heads, 1, width * block]``."""
        index = body.reshape(listed.indices, 0, -1, 1)
        real = body("GatherND", self.exists, index, batch_dims=1)
        real = body.reshape(real, 0, self.heads.num_heads, -1, self.block)
        both = body("And", real, body.unsqueeze(listed.valid, 3))
        places = body("Mul", listed.width, self.block)
        return body.reshape(both, 0, 0, 1, places)

    def positions(self, body: Body, listed: _Listed) -> ir.Value:
        """``[batch, num_heads, width * block]`` int32."""
        start = body("Mul", listed.indices, self.block)
        each = body("Add", body.unsqueeze(start, 3), body.arange(self.block))
        places = body("Mul", listed.width, self.block)
        return body("Cast", body.reshape(each, 0, 0, places), to=INT32)
