"""Function bodies of ``HybridDecode`` and ``HybridState`` in standard ops.

New tokens stand behind the window's slots: with ``L`` of these, query ``t`` is number ``L + t`` of
the row. It attends exactly to numbers ``t .. L + t`` and to sinks further back; by features to the
state and to numbers before ``t``, which leave its window during this call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from subquad.kernels.band import MASKED
from subquad.kernels.body import Body
from subquad.kernels.hybrid.feature_maps import get_feature_map
from subquad.kernels.operator import UNLIMITED

if TYPE_CHECKING:
    from subquad.kernels.hybrid_decode.semantics import HybridDecodeVariant, StateVariant

Values = dict[str, ir.Value]

TINY = 1e-30
"""Least denominator; reached only where nothing is visible."""

LAST = np.iinfo(np.int64).max


@dataclass(frozen=True)
class _Row:
    """The window's slots and the new tokens behind them.

    Attributes:
        length: number of new tokens, ``[1]``.
        keys, values: ``[batch, num_kv_heads, L + length, dim]``.
        real: bool ``[batch, L + length]``: a token stands there and counts.
        positions: int64, same shape.
        first: position of the first new token, ``[batch, 1]``.
    """

    length: ir.Value
    keys: ir.Value
    values: ir.Value
    real: ir.Value
    positions: ir.Value
    first: ir.Value


def decode_body(
    body: Body, variant: HybridDecodeVariant, given: Mapping[str, ir.Value]
) -> tuple[ir.Value, Values]:
    """Output and new state."""
    row = _row(body, variant, given)
    sinks = _sinks(body, variant, given, row)
    linear = None
    state: Values = {}
    if variant.feature_dim:
        linear, state = _linear(body, variant, given, row)
    state |= _window_and_sinks(body, variant, row, sinks)
    exact = variant.window_left != UNLIMITED or variant.sinks > 0
    if not exact:
        assert linear is not None
        return body("Div", linear[0], body("Max", linear[1], TINY)), state
    return _attend(body, variant, given, row, sinks, linear), state


def state_body(body: Body, variant: StateVariant, given: Mapping[str, ir.Value]) -> Values:
    """The state after a first piece: the same, from nothing."""
    row = _row(body, variant, given)
    state = _window_and_sinks(body, variant, row, _sinks(body, variant, given, row))
    if variant.feature_dim:
        keys, values, counted = _leaving(body, variant, row)
        feature_map = get_feature_map(variant.feature_map)
        assert feature_map is not None
        features = body(
            "Mul",
            feature_map.build(body, keys, given.get("key_map")),
            body.unsqueeze(counted, 1, 3),
        )
        sums, normaliser = _sums(body, features, values)
        state |= {"linear_state": sums, "linear_normaliser": normaliser}
    return state


def _row(body: Body, variant: StateVariant, given: Mapping[str, ir.Value]) -> _Row:
    slots, length = variant.window_len, body.dim(given["positions"], 1)
    first = body.slice(given["positions"], 0, 1, 1)
    mask = given.get("key_mask")
    if not slots:
        real = body("GreaterOrEqual", given["positions"], 0)
        real = real if mask is None else mask
        return _Row(length, given["key"], given["value"], real, given["positions"], first)
    before = body("Add", first, np.arange(-slots, 0, dtype=np.int64))
    positions = body("Concat", before, given["positions"], axis=1)
    real = body("GreaterOrEqual", positions, 0)
    past = {part: given.get(f"past_window_{part}") for part in ("keys", "values", "mask")}
    if past["keys"] is None:
        # A first piece: nothing stands in the window.
        rows = {name: body.pad(given[name], 2, 4, before=slots) for name in ("key", "value")}
        behind = body("GreaterOrEqual", body.arange(body("Add", length, slots)), slots)
        real = body("And", real, behind)
        if mask is not None:
            padded = body.pad(body("Cast", mask, to=6), 1, 2, before=slots)
            real = body("And", real, body("Cast", padded, to=9))
        return _Row(length, rows["key"], rows["value"], real, positions, first)
    assert past["values"] is not None
    keys = body("Concat", past["keys"], given["key"], axis=2)
    values = body("Concat", past["values"], given["value"], axis=2)
    if mask is not None:
        assert past["mask"] is not None
        both = body("Concat", past["mask"], body.as_float(mask), axis=1)
        real = body("And", real, body("Greater", both, 0.0))
    return _Row(length, keys, values, real, positions, first)


def _sinks(body: Body, variant: StateVariant, given: Mapping[str, ir.Value], row: _Row) -> Values:
    """``sink_keys``, ``sink_values`` and, with a key mask, ``sink_mask`` after the new tokens."""
    if not variant.sinks:
        return {}
    numbers = np.arange(variant.sinks, dtype=np.int64)
    slots = body("Sub", body.unsqueeze(body.value(numbers), 0), row.first)
    last = body("Sub", row.length, 1)
    new = body.between(slots, 0, last)
    slots = body("Max", body("Min", slots, last), 0)
    index, is_new = body.unsqueeze(slots, 1, 3), body.unsqueeze(new, 1, 3)
    found: Values = {}
    for part, name in (("keys", "key"), ("values", "value")):
        shape = body.shape(1, variant.num_kv_heads, 1, body.dim(given[name], 3))
        rows = body("GatherElements", given[name], body("Expand", index, shape), axis=2)
        old = given.get(f"past_sink_{part}")
        found[f"sink_{part}"] = body("Where", is_new, rows, 0.0 if old is None else old)
    if variant.has_key_mask:
        real = body("GatherElements", body.as_float(given["key_mask"]), slots, axis=1)
        old = given.get("past_sink_mask")
        found["sink_mask"] = body("Where", new, real, 0.0 if old is None else old)
    return found


def _window_and_sinks(body: Body, variant: StateVariant, row: _Row, sinks: Values) -> Values:
    state = dict(sinks)
    slots = variant.window_len
    if slots:
        state["window_keys"] = body.slice(row.keys, -slots, LAST, 2)
        state["window_values"] = body.slice(row.values, -slots, LAST, 2)
        if variant.has_key_mask:
            state["window_mask"] = body.as_float(body.slice(row.real, -slots, LAST, 1))
    return state


def _leaving(body: Body, variant: StateVariant, row: _Row) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Keys, values and whether each counts (float), of the slots that the window loses."""
    counted = row.real
    if variant.sinks:
        later = body("GreaterOrEqual", row.positions, variant.sinks)
        counted = body("And", counted, later)
    keys, values = (body.slice(x, 0, row.length, 2) for x in (row.keys, row.values))
    return keys, values, body.as_float(body.slice(counted, 0, row.length, 1))


def _sums(body: Body, features: ir.Value, values: ir.Value) -> tuple[ir.Value, ir.Value]:
    sums = body("MatMul", body.transpose(features, 0, 1, 3, 2), values)
    return sums, body("ReduceSum", features, [2], keepdims=0)


def _linear(
    body: Body, variant: HybridDecodeVariant, given: Mapping[str, ir.Value], row: _Row
) -> tuple[tuple[ir.Value, ir.Value], Values]:
    """Numerators and denominators ``[batch, num_heads, length, value_dim or 1]``; new state."""
    feature_map = get_feature_map(variant.feature_map)
    assert feature_map is not None
    keys, values, counted = _leaving(body, variant, row)
    features = body(
        "Mul",
        feature_map.build(body, keys, given.get("key_map")),
        body.unsqueeze(counted, 1, 3),
    )
    queries = feature_map.build(body, given["query"], given.get("query_map"))
    kv_heads, width = variant.num_kv_heads, variant.feature_dim
    folded = body.reshape(queries, 0, kv_heads, -1, width)
    # A column of ones gives the denominators.
    ones = body.as_float(body("GreaterOrEqual", body.slice(row.positions, 0, row.length, 1), -LAST))
    ones = body("Expand", body.unsqueeze(ones, 1, 3), [1, kv_heads, 1, 1])
    extended = body("Concat", values, ones, axis=-1)
    normaliser = body.unsqueeze(given["past_linear_normaliser"], 3)
    past = body("Concat", given["past_linear_state"], normaliser, axis=-1)
    similarity = body.matmul_transposed(folded, features, rank=4)
    similarity = body.reshape(similarity, 0, variant.num_heads, row.length, row.length)
    steps = body.arange(row.length)
    distance = body("Sub", body.unsqueeze(steps, 1), body.unsqueeze(steps, 0))
    gap = 0 if variant.window_left == UNLIMITED else 1
    counts = body.as_float(body("GreaterOrEqual", distance, gap))
    similarity = body.reshape(body("Mul", similarity, counts), 0, kv_heads, -1, row.length)
    sums = body("Add", body("MatMul", folded, past), body("MatMul", similarity, extended))
    sums = body.reshape(sums, 0, variant.num_heads, row.length, variant.value_dim + 1)
    numerator, denominator = body.multi(
        "Split", sums, [variant.value_dim, 1], num_outputs=2, axis=-1
    )
    new_sums, new_normaliser = _sums(body, features, values)
    state = {
        "linear_state": body("Add", given["past_linear_state"], new_sums),
        "linear_normaliser": body("Add", given["past_linear_normaliser"], new_normaliser),
    }
    return (numerator, denominator), state


def _attend(
    body: Body,
    variant: HybridDecodeVariant,
    given: Mapping[str, ir.Value],
    row: _Row,
    sinks: Values,
    linear: tuple[ir.Value, ir.Value] | None,
) -> ir.Value:
    """Softmax over window, sinks and, as one more key, the linear part."""
    keys, values, visible = [], [], []
    if variant.window_left != UNLIMITED:
        keys.append(row.keys)
        values.append(row.values)
        total = body.dim(row.positions, 1)
        queries = body("Add", body.arange(row.length), variant.window_len)
        distance = body("Sub", body.unsqueeze(queries, 1), body.unsqueeze(body.arange(total), 0))
        in_window = body.between(distance, 0, variant.window_left)
        visible.append(body("And", in_window, body.unsqueeze(row.real, 1)))
    if variant.sinks:
        keys.append(sinks["sink_keys"])
        values.append(sinks["sink_values"])
        numbers = np.arange(variant.sinks, dtype=np.int64)
        distance = body("Sub", body.unsqueeze(given["positions"], 2), numbers)
        beyond = body("Greater", distance, variant.window_left)
        if variant.allowed_left != UNLIMITED:
            beyond = body("And", beyond, body("LessOrEqual", distance, variant.allowed_left))
        if variant.has_key_mask:
            real = body("Greater", sinks["sink_mask"], 0.0)
            beyond = body("And", beyond, body.unsqueeze(real, 1))
        visible.append(beyond)
    seen = _concat(body, visible, axis=2)
    query = body("Mul", given["query"], variant.scale)
    folded = body.reshape(query, 0, variant.num_kv_heads, -1, variant.head_dim)
    scores = body.matmul_transposed(folded, _concat(body, keys, axis=2), rank=4)
    count = body.dim(seen, 2)
    scores = body.reshape(scores, 0, variant.num_heads, row.length, count)
    bias = body("Where", body.unsqueeze(seen, 1), 0.0, MASKED)
    scores = body("Add", scores, bias)
    if linear is not None:
        safe = body("Max", linear[1], TINY)
        score = body("Where", body("Greater", linear[1], 0.0), body("Log", safe), MASKED)
        scores = body("Concat", scores, score, axis=-1)
    weights = body("Softmax", scores, axis=-1)
    exact = body.reshape(body.slice(weights, 0, count, 3), 0, variant.num_kv_heads, -1, count)
    output = body("MatMul", exact, _concat(body, values, axis=2))
    output = body.reshape(output, 0, variant.num_heads, row.length, variant.value_dim)
    sees = body("Greater", body("ReduceMax", bias, [-1], keepdims=1), MASKED / 2)
    output = body("Mul", output, body.as_float(sees))
    if linear is None:
        return output
    share = body.slice(weights, -1, LAST, 3)
    return body("Add", output, body("Mul", share, body("Div", linear[0], safe)))


def _concat(body: Body, parts: list[ir.Value], axis: int) -> ir.Value:
    return parts[0] if len(parts) == 1 else body("Concat", *parts, axis=axis)
