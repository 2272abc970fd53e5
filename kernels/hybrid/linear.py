"""The linear part: sums over features of older (or later) keys, by chunks.

Queries and keys are brought to a common index first: row ``i`` of the shifted keys is the newest
key that query ``i`` may count, so that "all keys older than the window" becomes ordinary causal
attention. Keys before the first such row form chunks of their own, whose sums only feed the state.
Sums are only ever added up, never subtracted: "total minus window" would cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.band import merge_queries, split_queries
from subquad.kernels.body import Body
from subquad.kernels.inputs import Heads, Inputs, offset

CHUNK = 64
"""Measured best of 32, 64, 128 and 256 for head dims 64 and 128 on ONNX Runtime."""


FEW_QUERIES = 16
"""Up to so many queries (decoding) meet every key directly: cheaper than building a state."""


@dataclass(frozen=True)
class Side:
    """One direction of the linear part.

    Attributes:
        direction: ``past`` counts keys at distance >= gap before the query, ``future`` after it.
        gap: 0 counts the query's own token.
    """

    direction: Literal["past", "future"]
    gap: int


def linear_sums(
    body: Body,
    sides: tuple[Side, ...],
    heads: Heads,
    inputs: Inputs,
    query_features: ir.Value,
    key_features: ir.Value,
    log_decay: ir.Value | None = None,
) -> tuple[ir.Value, ir.Value]:
    """Numerator ``[B, H, query_len, value_dim]`` and denominator ``[B, H, query_len, 1]``.

    No sides: every key counts, and nothing decays. ``key_features`` are zero for keys that never
    count. ``log_decay``: ``[Hkv]``, per position of distance.
    """
    ones = body.reshape(
        body("ConstantOfShape", body.shape(body.dim(inputs.value, 2)), value=_one()), 1, 1, -1, 1
    )
    shape = body.shape(body.dim(inputs.value, 0), heads.num_kv_heads, 1, 1)
    values = body("Concat", inputs.value, body("Expand", ones, shape), axis=-1)
    if not sides:
        assert log_decay is None
        sums = _all_keys(body, heads, query_features, key_features, values)
    else:
        few = body("LessOrEqual", body.dim(inputs.positions[0], 1), FEW_QUERIES)
        sums = body.branch(
            body("Squeeze", few, 0),
            lambda inner: _directly(
                inner, sides, heads, inputs, query_features, key_features, values, log_decay
            ),
            lambda inner: _by_chunks(
                inner, sides, heads, inputs, query_features, key_features, values, log_decay
            ),
        )
    numerator, denominator = body.multi("Split", sums, [heads.value_dim, 1], num_outputs=2, axis=-1)
    return numerator, denominator


def _one() -> ir.Attr:
    return ir.AttrTensor("value", ir.tensor(np.ones(1, dtype=np.float32)))


def _all_keys(
    body: Body, heads: Heads, query_features: ir.Value, key_features: ir.Value, values: ir.Value
) -> ir.Value:
    state = body("MatMul", body.transpose(key_features, 0, 1, 3, 2), values)
    if heads.group == 1:
        return body("MatMul", query_features, state)
    # [B, Hkv, group * N, F]: all query heads of a key/value head at once.
    features = body.dim(query_features, 3)
    folded = body.reshape(query_features, 0, heads.num_kv_heads, -1, features)
    sums = body("MatMul", folded, state)
    query_len = body.dim(query_features, 2)
    return body.reshape(sums, 0, heads.num_heads, query_len, heads.value_dim + 1)


def _directly(
    body: Body,
    sides: tuple[Side, ...],
    heads: Heads,
    inputs: Inputs,
    query_features: ir.Value,
    key_features: ir.Value,
    values: ir.Value,
    log_decay: ir.Value | None,
) -> ir.Value:
    query_positions, key_positions = inputs.positions
    query_len, kv_len = body.dim(query_positions, 1), body.dim(key_positions, 1)
    queries = body("Add", body.arange(query_len), offset(body, inputs))
    distance = body("Sub", body.unsqueeze(queries, 1), body.unsqueeze(body.arange(kv_len), 0))
    counted = [
        body("GreaterOrEqual", distance, side.gap)
        if side.direction == "past"
        else body("LessOrEqual", distance, -side.gap)
        for side in sides
    ]
    mask = counted[0] if len(counted) == 1 else body("Or", *counted)
    features = body.dim(query_features, 3)
    folded = body.reshape(query_features, 0, heads.num_kv_heads, -1, features)
    similarity = body.matmul_transposed(folded, key_features, rank=4)
    similarity = body.reshape(similarity, 0, heads.num_heads, query_len, kv_len)
    if log_decay is None:
        similarity = body("Mul", similarity, body.as_float(mask))
    else:
        rate = log_decay
        if heads.group > 1:
            each = np.repeat(np.arange(heads.num_kv_heads, dtype=np.int64), heads.group)
            rate = body("Gather", log_decay, each, axis=0)
        weight = decayed(body, body.unsqueeze(rate, 1, 2), body("Abs", distance))
        weight = body("Where", mask, weight, 0.0)
        similarity = body("Mul", similarity, weight)
    similarity = body.reshape(similarity, 0, heads.num_kv_heads, -1, kv_len)
    sums = body("MatMul", similarity, values)
    return body.reshape(sums, 0, heads.num_heads, query_len, heads.value_dim + 1)


def _by_chunks(
    body: Body,
    sides: tuple[Side, ...],
    heads: Heads,
    inputs: Inputs,
    query_features: ir.Value,
    key_features: ir.Value,
    values: ir.Value,
    log_decay: ir.Value | None,
) -> ir.Value:
    parts = [
        _one_side(body, side, heads, inputs, query_features, key_features, values, log_decay)
        for side in sides
    ]
    return parts[0] if len(parts) == 1 else body("Add", *parts)


def _one_side(
    body: Body,
    side: Side,
    heads: Heads,
    inputs: Inputs,
    query_features: ir.Value,
    key_features: ir.Value,
    values: ir.Value,
    log_decay: ir.Value | None,
) -> ir.Value:
    query_positions, key_positions = inputs.positions
    query_len, kv_len = body.dim(query_positions, 1), body.dim(key_positions, 1)
    past = side.direction == "past"
    chunks = body.ceil_div(query_len, CHUNK)
    shift = offset(body, inputs)
    # Slot of the key that shares row 0 with query 0.
    base = body("Sub", shift, side.gap) if past else body("Add", shift, side.gap)
    if past:
        others = body.ceil_div(body("Max", base, 0), CHUNK)
        first = body("Sub", base, body("Mul", others, CHUNK))
    else:
        end = body("Add", base, body("Mul", chunks, CHUNK))
        others = body.ceil_div(body("Max", body("Sub", kv_len, end), 0), CHUNK)
        first = base
    total = body("Add", chunks, others)
    slots = body("Add", body.arange(body("Mul", total, CHUNK)), first)
    last = body("Sub", kv_len, 1)
    inside = body.as_float(body.between(slots, 0, last))
    slots = body("Max", body("Min", slots, last), 0)

    keys = body("Gather", key_features, slots, axis=2)
    keys = body("Mul", keys, body.unsqueeze(inside, 1))
    features = body.dim(key_features, 3)
    keys = body.reshape(keys, 0, 0, total, CHUNK, features)
    width = heads.value_dim + 1
    values = body.reshape(body("Gather", values, slots, axis=2), 0, 0, total, CHUNK, width)

    start, end = (others, total) if past else (body.value(0), chunks)
    near_keys = body.slice(keys, start, end, 2)
    near_values = body.slice(values, start, end, 2)
    queries = split_queries(body, query_features, heads, chunks, CHUNK)
    similarity = body.matmul_transposed(queries, near_keys, rank=5)
    decay = _Decay(body, log_decay, side, heads.group)
    similarity = body("Mul", similarity, decay.of_near_keys())
    near = body("MatMul", similarity, near_values)
    products = body("MatMul", body.transpose(decay.to_chunk_end(keys), 0, 1, 2, 4, 3), values)
    states = body.slice(decay.states(products, total), start, end, 2)
    far = body("MatMul", decay.from_chunk_end(queries), states)
    sums = body.reshape(body("Add", near, far), 0, 0, 0, heads.group, CHUNK, width)
    return merge_queries(body, sums, heads, query_len)


@dataclass(frozen=True)
class _Decay:
    """Weights of keys by their distance, in terms of row ``i`` and key ``t`` of a chunk.

    A state holds the keys beyond a chunk, each decayed to the chunk's border. Every exponent is
    ``log_decay`` times something that is not negative, so nothing overflows. Without decay there
    is only the triangle of keys that count.
    """

    body: Body
    log_decay: ir.Value | None
    side: Side
    group: int

    @property
    def _past(self) -> bool:
        return self.side.direction == "past"

    def _powers(self, exponents: NDArray[np.int64], axes: int) -> ir.Value:
        """``exp(log_decay * exponents)`` with ``axes`` axes after the one of heads."""
        assert self.log_decay is not None
        rate = self.body.unsqueeze(self.log_decay, *range(1, axes + 1))
        return decayed(self.body, rate, self.body.value(exponents))

    def of_near_keys(self) -> ir.Value:
        """``[Hkv, 1, group * CHUNK, CHUNK]``, or the last two axes."""
        ones = np.ones((CHUNK, CHUNK), dtype=np.float32)
        triangle = np.tile(np.tril(ones) if self._past else np.triu(ones), (self.group, 1))
        if self.log_decay is None:
            return self.body.value(triangle)
        rows = np.arange(CHUNK, dtype=np.int64)
        distance = np.abs(rows[:, None] - rows) + self.side.gap
        powers = self._powers(np.tile(distance, (self.group, 1))[None], 3)
        return self.body("Mul", powers, triangle)

    def to_chunk_end(self, keys: ir.Value) -> ir.Value:
        """Keys ``[B, Hkv, chunks, CHUNK, F]`` decayed to the border of the chunks after them."""
        if self.log_decay is None:
            return keys
        rows = np.arange(CHUNK, dtype=np.int64)
        steps = CHUNK - rows if self._past else rows
        return self.body("Mul", keys, self._powers(steps[None, :, None], 3))

    def from_chunk_end(self, queries: ir.Value) -> ir.Value:
        """Queries decayed by their distance from the border where the state stands."""
        if self.log_decay is None:
            return queries
        rows = np.arange(CHUNK, dtype=np.int64)
        steps = self.side.gap + (rows if self._past else CHUNK - rows)
        return self.body("Mul", queries, self._powers(np.tile(steps, self.group)[None, :, None], 3))

    def states(self, products: ir.Value, chunks: ir.Value) -> ir.Value:
        """Sums of the chunks before (after) each, ``[B, Hkv, chunks, F, width]``."""
        body = self.body
        if self.log_decay is None:
            axis = body.scalar(2, np.int64)
            return body("CumSum", products, axis, exclusive=1, reverse=0 if self._past else 1)
        # A recurrence, written as a triangular matrix: chunks^2 is small beside length^2.
        number = body.arange(chunks)
        apart = body("Sub", body.unsqueeze(number, 1), body.unsqueeze(number, 0))
        if not self._past:
            apart = body("Neg", apart)
        steps = body("Mul", body("Max", body("Sub", apart, 1), 0), CHUNK)
        matrix = decayed(body, body.unsqueeze(self.log_decay, 1, 2), steps)
        matrix = body("Where", body("Greater", apart, 0), matrix, 0.0)
        flat = body.reshape(products, 0, 0, chunks, -1)
        return body("Reshape", body("MatMul", matrix, flat), body("Shape", products))


def decayed(body: Body, rate: ir.Value, distance: ir.Value) -> ir.Value:
    """``exp(rate * distance)`` of an integer distance."""
    return body("Exp", body("Mul", rate, body.as_float(distance)))
