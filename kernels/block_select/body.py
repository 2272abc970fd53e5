"""Function body of block selection, in standard ops; linear in the length but for block pairs."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from subquad.kernels.band import MASKED
from subquad.kernels.block_select.estimators import Estimator, build_mean_of_real
from subquad.kernels.block_sparse.body import (
    PositionRows,
    first_position,
    leading,
    rows_of,
)
from subquad.kernels.body import Body
from subquad.kernels.inputs import Heads
from subquad.kernels.operator import UNLIMITED

INT32, INT64 = 6, 7


def select_body(
    body: Body,
    heads: Heads,
    query: ir.Value,
    key: ir.Value,
    key_mask: ir.Value | None,
    positions: tuple[ir.Value, ir.Value],
    thresholds: ir.Value,
    *,
    estimator: Estimator,
    block: int,
    sinks: int,
    scale: float,
    softcap: float,
    left: int,
    right: int,
) -> tuple[ir.Value, ir.Value]:
    """``block_counts`` and ``block_indices``."""
    query_len, kv_len = body.dim(positions[0], 1), body.dim(positions[1], 1)
    size = body.value(block)
    keys = rows_of(
        body,
        body("Neg", first_position(body, positions[1])),
        kv_len,
        body.ceil_div(kv_len, block),
        size,
    )
    queries = rows_of(
        body, leading(body, positions[0]), query_len, body.ceil_div(query_len, block), size
    )
    key_real, query_real = keys.exists, queries.exists
    if key_mask is not None:
        key_real = body("And", key_real, body("GatherElements", key_mask, keys.slots, axis=1))
        query_real = body("And", query_real, _own_key_real(body, queries, key_mask, positions))
    key_real = body.reshape(key_real, 0, 1, -1, block)
    query_real = body.reshape(query_real, 0, 1, -1, block)

    query_blocks = body.reshape(
        queries.take(body, query, heads.num_heads), 0, 0, -1, block, heads.head_dim
    )
    key_blocks = body.reshape(
        keys.take(body, key, heads.num_kv_heads), 0, 0, -1, block, heads.head_dim
    )
    standing = estimator.build(body, query_blocks, query_real)
    pooled = build_mean_of_real(body, key_blocks, key_real)
    if heads.group > 1:
        standing = body.reshape(standing, 0, heads.num_kv_heads, -1, heads.head_dim)
    scores = body.matmul_transposed(body("Mul", standing, scale), pooled, rank=4)
    if heads.group > 1:
        scores = body.reshape(scores, 0, heads.num_heads, -1, keys.count)
    if softcap:
        scores = body("Mul", body("Tanh", body("Mul", scores, 1.0 / softcap)), softcap)

    there = body(
        "And",
        body.unsqueeze(_any(body, query_real), 3),
        body.unsqueeze(_any(body, key_real), 2),
    )
    start = body("Max", first_position(body, positions[0]), 0)
    candidate, always = _ranked_and_kept(
        body, there, start, (queries.count, keys.count), estimator, block, sinks, left, right
    )
    number = body("ReduceSum", body.as_float(key_real), [-1], keepdims=0)
    weight = body.unsqueeze(body("Log", body("Max", number, 1.0)), 2)
    bias = body("Where", candidate, weight, MASKED)
    mass = body("Softmax", body("Add", scores, bias), axis=-1)

    ranked, order = body.multi("TopK", mass, keys.count, num_outputs=2, axis=-1)
    before = body("CumSum", ranked, body.scalar(3, np.int64), exclusive=1)
    limit = body.reshape(thresholds, 1, -1, 1, 1)
    enough = body("Or", body("Less", before, limit), body("GreaterOrEqual", limit, 1.0))
    chosen = body("And", _at(body, candidate, order), enough)
    keep = body("Or", chosen, _at(body, always, order))
    counts = body("ReduceSum", body("Cast", keep, to=INT32), [-1], keepdims=0)
    # Kept numbers in front, rising; the others are all the number of blocks.
    numbered = body("Where", keep, order, keys.count)
    listed = body.multi("TopK", numbered, keys.count, num_outputs=2, axis=-1, largest=0)[0]
    listed = body("Where", body("Less", listed, keys.count), listed, 0)
    return counts, body("Cast", listed, to=INT32)


def _own_key_real(
    body: Body, queries: PositionRows, key_mask: ir.Value, positions: tuple[ir.Value, ir.Value]
) -> ir.Value:
    """Whether the key at the position of each query is real."""
    shift = body("Sub", *(first_position(body, each) for each in positions))
    slots = body("Add", queries.slots, shift)
    last = body("Sub", body.dim(key_mask, 1), 1)
    inside = body.between(slots, 0, last)
    slots = body("Max", body("Min", slots, last), 0)
    return body("And", inside, body("GatherElements", key_mask, slots, axis=1))


def _ranked_and_kept(
    body: Body,
    there: ir.Value,
    start: ir.Value,
    counts: tuple[ir.Value, ir.Value],
    estimator: Estimator,
    block: int,
    sinks: int,
    left: int,
    right: int,
) -> tuple[ir.Value, ir.Value]:
    """Blocks that are ranked and blocks always kept, ``[batch, 1, query_blocks, key_blocks]``.

    Args:
        there: blocks of real queries and of real keys, same shape.
        start: position of the first query in a block, ``[batch, 1]``.
        counts: of query blocks and key blocks.
    """
    each = body("Mul", body.unsqueeze(body.arange(counts[0]), 0), block)
    first_query = body.unsqueeze(body("Add", start, each), 1, 3)
    numbers = body.arange(counts[1])
    first_key = body("Mul", numbers, block)
    # Distance of the first query from the first key; the last ones are block - 1 further.
    distance = body("Sub", first_query, first_key)
    reach = block - 1
    partly: list[ir.Value | None] = []
    wholly: list[ir.Value | None] = []
    if left != UNLIMITED:
        partly.append(body("LessOrEqual", distance, left + reach))
        wholly.append(body("LessOrEqual", distance, left - reach))
    if right != UNLIMITED:
        partly.append(body("GreaterOrEqual", distance, -right - reach))
        wholly.append(body("GreaterOrEqual", distance, reach - right))
    seen = body.all_of(there, *partly)
    whole = body.all_of(*wholly)
    assert seen is not None
    guard = body.between(distance, -reach - block, reach + block)
    if sinks:
        guard = body("Or", guard, body("Less", numbers, sinks))
    if whole is None:
        return seen, body("And", seen, guard)
    always = body("And", seen, body("Or", guard, body("Not", whole)))
    ranked = body("And", there, whole)
    if estimator.reads_later_queries:
        own = body.between(distance, -reach, reach)
        ranked = body("Or", ranked, body("And", seen, own))
    return ranked, always


def _any(body: Body, real: ir.Value) -> ir.Value:
    """``[..., block]`` bool to ``[...]``."""
    most = body("ReduceMax", body("Cast", real, to=INT32), [-1], keepdims=0)
    return body("Cast", most, to=9)


def _at(body: Body, blocks: ir.Value, order: ir.Value) -> ir.Value:
    """``blocks[b, 0, r, order[b, h, r, i]]``."""
    return body("GatherElements", body("Expand", blocks, body("Shape", order)), order, axis=3)
