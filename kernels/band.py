"""Exact attention over a sliding window and a few sinks, in time linear in the length.

Queries are cut into blocks; every block meets only the keys its window can reach, gathered into a
contiguous tile. Block borders are an implementation matter: the band itself is tested per element,
so no result depends on them (but for rounding).

One optional extra column, the *virtual key*, carries a whole second attention (the linear part)
into the same softmax: its score is the logarithm of that part's normaliser, its value that part's
output. This is the log-sum-exp merge of two partial attentions, done by the softmax itself.

Everything that depends on positions and mask only is computed from these alone, never from query
or key, so the runtime shares it between the layers of a model.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from subquad.kernels.body import Body
from subquad.kernels.inputs import Heads, Inputs, offset
from subquad.kernels.operator import UNLIMITED

MASKED = -1e30
"""Added to the scores of invisible keys: absorbs any score below 1e22, and stays finite, so that a
row without a visible key yields numbers (which are then set to zero) instead of NaN."""


_END = np.iinfo(np.int64).max


@dataclass(frozen=True)
class Band:
    """Static description of the exact key set.

    Attributes:
        left, right: the window; both -1 when there is none.
        sinks: number of leading real positions always in the set.
        allowed_left, allowed_right: what the site allows; sinks are kept inside it.
    """

    left: int
    right: int
    sinks: int = 0
    allowed_left: int = UNLIMITED
    allowed_right: int = UNLIMITED

    @property
    def block(self) -> int:
        """Queries per block: wide windows share their tile among more queries.

        A tile holds ``block + left + right`` keys, gathered once per block.
        """
        return 64 if self.left + self.right <= 256 else 128

    @property
    def has_window(self) -> bool:
        return self.left != UNLIMITED


@dataclass(frozen=True)
class _Tiles:
    """Which key slots each query block meets.

    Attributes:
        block: queries per block, ``[1]``.
        blocks: number of blocks, ``[1]``.
        columns: rows of the extended key, ``[blocks, tile]``; ``None``: all of them, in order.
        first, end: range of key slots the extended key begins with; ``None`` as for columns.
        bias: 0 where visible, ``MASKED`` elsewhere, ``[batch or 1, 1, blocks, 1, block, tile]``.
        any_visible: 1 where a query sees any exact key, ``[batch or 1, 1, blocks, 1, block, 1]``.
    """

    block: ir.Value
    blocks: ir.Value
    columns: ir.Value | None
    first: ir.Value | None
    end: ir.Value | None
    bias: ir.Value
    any_visible: ir.Value


@dataclass(frozen=True)
class VirtualKey:
    """The linear part seen as one more key.

    Attributes:
        score: ``[batch, num_heads, query_len, 1]``, finite.
        value: ``[batch, num_heads, query_len, value_dim]``; ``None``: zeros.
        from_maximum: the score counts from the maximum of the row's exact scores (from 0 where
            there are none).
    """

    score: ir.Value
    value: ir.Value | None
    from_maximum: bool = False


def banded_attention(
    body: Body,
    band: Band,
    heads: Heads,
    inputs: Inputs,
    scale: float,
    softcap: float = 0.0,
    virtual: VirtualKey | None = None,
) -> ir.Value:
    """Softmax attention over window, sinks and virtual key: ``[B, H, query_len, value_dim]``.

    A virtual key excludes a softcap.
    """
    assert not (virtual and softcap)
    sink_slots, sinks_visible = _sinks(body, band, inputs)
    tiles = _tiles(body, band, inputs, sink_slots, sinks_visible, virtual is not None)

    query = body("Mul", inputs.query, scale)
    if virtual is not None:
        query = body("Concat", query, virtual.score, axis=-1)
    key, value = _extended_rows(body, inputs, tiles, sink_slots, heads, virtual)
    if tiles.columns is None:
        key, value = body.unsqueeze(key, 2), body.unsqueeze(value, 2)
    else:
        key = body("Gather", key, tiles.columns, axis=2)
        value = body("Gather", value, tiles.columns, axis=2)

    query_tiles = split_queries(body, query, heads, tiles.blocks, tiles.block)
    scores = body.matmul_transposed(query_tiles, key, rank=5)
    if softcap:
        scores = body("Mul", body("Tanh", body("Mul", scores, 1.0 / softcap)), softcap)
    grouped = heads.group > 1
    unfolded = body.shape(0, 0, 0, heads.group, tiles.block, -1)
    if grouped:
        scores = body("Reshape", scores, unfolded)
        scores = body("Add", scores, tiles.bias)
    else:
        scores = body("Add", scores, body("Squeeze", tiles.bias, 3))
    if virtual is not None and virtual.from_maximum:
        exact, score = body.slice(scores, 0, -1, -1), body.slice(scores, -1, _END, -1)
        maximum = body("ReduceMax", exact, [-1], keepdims=1)
        # Rows without exact keys have a maximum near MASKED.
        seen = body("Where", body("Greater", maximum, MASKED / 2), maximum, 0.0)
        scores = body("Concat", exact, body("Add", score, seen), axis=-1)
    weights = body("Softmax", scores, axis=-1)
    folded = weights
    if grouped:
        folded = body.reshape(weights, 0, 0, 0, -1, body.dim(weights, 5))
    output = body("Reshape", body("MatMul", folded, value), unfolded)
    output = body("Mul", output, tiles.any_visible)
    query_len = body.dim(inputs.positions[0], 1)
    merged = merge_queries(body, output, heads, query_len)
    if virtual is None or virtual.value is None:
        return merged
    share = body.slice(weights, -1, _END, -1)
    share = merge_queries(body, body("Reshape", share, unfolded), heads, query_len)
    return body("Add", merged, body("Mul", share, virtual.value))


def split_queries(
    body: Body, query: ir.Value, heads: Heads, blocks: ir.Value, block: ir.Value | int
) -> ir.Value:
    """``[B, H, N, D]`` to ``[B, Hkv, blocks, group * block, D]``, zero padded at the end.

    Query heads of one key/value head share its tile, so keys and values are never repeated.
    """
    length = body("Mul", blocks, block)
    missing = body("Sub", length, body.dim(query, 2))
    padded = body.pad(query, 2, 4, after=missing)
    if heads.group == 1:
        return body.reshape(padded, 0, heads.num_kv_heads, blocks, block, -1)
    split = body.reshape(padded, 0, heads.num_kv_heads, heads.group, blocks, block, -1)
    split = body.transpose(split, 0, 1, 3, 2, 4, 5)
    rows = body("Mul", body.value(heads.group), block)
    return body.reshape(split, 0, 0, 0, rows, body.dim(query, 3))


def merge_queries(body: Body, tiles: ir.Value, heads: Heads, query_len: ir.Value) -> ir.Value:
    """``[B, Hkv, blocks, group, block, D]`` back to ``[B, H, query_len, D]``."""
    if heads.group > 1:
        tiles = body.transpose(tiles, 0, 1, 3, 2, 4, 5)
    rows = body("Mul", body.dim(tiles, 2), body.dim(tiles, 4))
    if heads.group > 1:
        rows = body("Mul", body.dim(tiles, 3), body.dim(tiles, 4))
    merged = body.reshape(tiles, 0, heads.num_heads, rows, body.dim(tiles, 5))
    return body.slice(merged, 0, query_len, 2)


def sink_key_slots(body: Body, sinks: int, inputs: Inputs) -> tuple[ir.Value, ir.Value]:
    """Slots of positions ``0 .. sinks-1``, ``[batch, sinks]``, clipped; and whether each is real.

    A hole of the mask among the first positions makes one sink fewer, not another token a sink.
    """
    _, key_positions = inputs.positions
    first = body("Neg", body.slice(key_positions, 0, 1, 1))
    slots = body("Add", first, body.unsqueeze(body.arange(sinks), 0))
    last = body("Sub", body.dim(key_positions, 1), 1)
    real = body.between(slots, 0, last)
    clipped = body("Max", body("Min", slots, last), 0)
    if inputs.key_mask is not None:
        real = body("And", real, body("GatherElements", inputs.key_mask, clipped, axis=1))
    return clipped, real


def _sinks(body: Body, band: Band, inputs: Inputs) -> tuple[ir.Value | None, ir.Value | None]:
    if not band.sinks:
        return None, None
    return sink_key_slots(body, band.sinks, inputs)


def _extended_rows(
    body: Body,
    inputs: Inputs,
    tiles: _Tiles,
    sink_slots: ir.Value | None,
    heads: Heads,
    virtual: VirtualKey | None,
) -> tuple[ir.Value, ir.Value]:
    """Keys and values in reach of the windows, then the sinks, then the virtual key.

    Decoding reaches few of the keys, so they are cut out before anything is appended.
    """
    keys: list[ir.Value] = []
    values: list[ir.Value] = []
    if tiles.columns is not None:
        for rows, source in ((keys, inputs.key), (values, inputs.value)):
            rows.append(body.slice(source, tiles.first, tiles.end, 2))
    if sink_slots is not None:
        index = body.unsqueeze(sink_slots, 1, 3)
        for rows, source in ((keys, inputs.key), (values, inputs.value)):
            shape = body.shape(1, heads.num_kv_heads, 1, body.dim(source, 3))
            rows.append(body("GatherElements", source, body("Expand", index, shape), axis=2))
    if virtual is not None:
        keys = [body.pad(rows, 3, 4, after=1) for rows in keys]
        unit = np.zeros((1, 1, 1, heads.head_dim + 1), dtype=np.float32)
        unit[..., -1] = 1.0
        nothing = np.zeros((1, 1, 1, heads.value_dim), dtype=np.float32)
        shape = body.shape(body.dim(inputs.key, 0), heads.num_kv_heads, 1, 1)
        keys.append(body("Expand", unit, shape))
        values.append(body("Expand", nothing, shape))
    return _concat(body, keys, axis=2), _concat(body, values, axis=2)


def _tiles(
    body: Body,
    band: Band,
    inputs: Inputs,
    sink_slots: ir.Value | None,
    sinks_real: ir.Value | None,
    has_virtual: bool,
) -> _Tiles:
    query_positions, key_positions = inputs.positions
    query_len, kv_len = body.dim(query_positions, 1), body.dim(key_positions, 1)
    shift = offset(body, inputs)
    block = body("Min", query_len, band.block) if band.has_window else query_len
    blocks = body.ceil_div(query_len, block)
    # First query slot of each block, in key slots: [blocks].
    starts = body("Add", body("Mul", body.arange(blocks), block), shift)

    columns: list[ir.Value] = []
    visible: list[ir.Value] = []
    first: ir.Value | None = None
    end: ir.Value | None = None
    if band.has_window:
        slots, lead = _window_slots(body, band, starts, shift, query_len, kv_len, block, blocks)
        last = body("Sub", kv_len, 1)
        inside = body.unsqueeze(body.between(slots, 0, last), 0)
        slots = body("Max", body("Min", slots, last), 0)
        if inputs.key_mask is not None:
            inside = body("And", inside, body("Gather", inputs.key_mask, slots, axis=1))
        first = body.reshape(body("ReduceMin", slots, keepdims=0), 1)
        end = body("Add", body.reshape(body("ReduceMax", slots, keepdims=0), 1), 1)
        columns.append(body("Sub", slots, first))
        tile = body.dim(slots, 1)
        distance = body(
            "Sub", body.unsqueeze(body.arange(block), 1), body.unsqueeze(body.arange(tile), 0)
        )
        in_window = body.between(body("Add", distance, lead), -band.right, band.left)
        visible.append(body("And", body.unsqueeze(inside, 2), in_window))
    if sink_slots is not None:
        assert sinks_real is not None
        visible.append(_sinks_visible(body, band, starts, block, sink_slots, sinks_real))
    exact = _broadcast_concat(body, visible)
    bias = body("Where", exact, 0.0, MASKED)
    best = body("ReduceMax", bias, [-1], keepdims=1)
    any_visible = body.as_float(body("Greater", best, MASKED / 2))
    extra = band.sinks + has_virtual
    if first is not None and end is not None and extra:
        after = body("Add", body("Sub", end, first), body.arange(extra))
        shape = body("Concat", blocks, 1, axis=0)
        columns.append(body("Expand", body.unsqueeze(after, 0), shape))
    if has_virtual:
        bias = body.pad(bias, 3, 4, after=1)
    return _Tiles(
        block=block,
        blocks=blocks,
        columns=_concat(body, columns, axis=1) if columns else None,
        first=first,
        end=end,
        bias=body.unsqueeze(bias, 1, 3),
        any_visible=body.unsqueeze(any_visible, 1, 3),
    )


def _concat(body: Body, parts: list[ir.Value], axis: int) -> ir.Value:
    return parts[0] if len(parts) == 1 else body("Concat", *parts, axis=axis)


def _window_slots(
    body: Body,
    band: Band,
    starts: ir.Value,
    shift: ir.Value,
    query_len: ir.Value,
    kv_len: ir.Value,
    block: ir.Value,
    blocks: ir.Value,
) -> tuple[ir.Value, ir.Value]:
    """Key slots each block can reach, ``[blocks, tile]``, possibly out of range, and their lead.

    The lead is how many slots before the block's first query the tile begins. A short sequence
    makes one block, whose tile is then cut to the keys that exist.
    """
    left = body("Max", body("Min", body("Sub", body("Add", shift, query_len), 1), band.left), 0)
    right = body("Max", body("Min", body("Sub", kv_len, shift), band.right), 0)
    single = body("Equal", blocks, 1)
    left = body("Where", single, body("Min", left, body("Max", shift, 0)), left)
    ahead = body("Add", block, right)
    beyond = body("Sub", kv_len, shift)
    ahead = body("Where", single, body("Min", ahead, beyond), ahead)
    tile = body("Max", body("Add", left, ahead), 1)
    first = body.unsqueeze(body("Sub", starts, left), 1)
    return body("Add", first, body.unsqueeze(body.arange(tile), 0)), left


def _sinks_visible(
    body: Body,
    band: Band,
    starts: ir.Value,
    block: ir.Value,
    sink_slots: ir.Value,
    sinks_real: ir.Value,
) -> ir.Value:
    """Sinks allowed and not already in the window: ``[batch, blocks, block, sinks]``."""
    queries = body("Add", body.unsqueeze(starts, 1), body.unsqueeze(body.arange(block), 0))
    distance = body("Sub", body.unsqueeze(queries, 0, 3), body.unsqueeze(sink_slots, 1, 2))
    visible = body.unsqueeze(sinks_real, 1, 2)
    if band.allowed_left != UNLIMITED:
        visible = body("And", visible, body("LessOrEqual", distance, band.allowed_left))
    if band.allowed_right != UNLIMITED:
        visible = body("And", visible, body("GreaterOrEqual", distance, -band.allowed_right))
    if band.has_window:
        in_window = body.between(distance, -band.right, band.left)
        visible = body("And", visible, body("Not", in_window))
    return body("Expand", visible, body("Shape", distance))


def _broadcast_concat(body: Body, parts: list[ir.Value]) -> ir.Value:
    """Concatenate along the last axis masks whose batch axis may be 1."""
    if len(parts) == 1:
        return parts[0]
    batch = body("Max", *(body.dim(part, 0) for part in parts))
    shape = body("Concat", batch, [1, 1, 1], axis=0)
    return body("Concat", *(body("Expand", part, shape) for part in parts), axis=-1)
