"""``HybridAttention`` as standard ONNX operators."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from subquad.kernels.attention.bodies import attention_body
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.band import MASKED, Band, VirtualKey, banded_attention
from subquad.kernels.body import Body
from subquad.kernels.hybrid.feature_maps import NONE
from subquad.kernels.hybrid.linear import Side, linear_sums
from subquad.kernels.inputs import Inputs

if TYPE_CHECKING:
    from subquad.kernels.hybrid.semantics import HeadPart, HybridVariant

TINY = 1e-30
"""Least denominator of a purely linear row; reached only where nothing is visible."""


def hybrid_body(body: Body, variant: HybridVariant, inputs: Inputs) -> ir.Value:
    """All heads alike: ``[batch, num_heads, query_len, value_dim]``."""
    linear = None if variant.feature_map == NONE else _linear_part(body, variant, inputs)
    if not variant.has_window and not variant.sinks:
        assert linear is not None
        numerator, denominator = linear
        if variant.normaliser == "none":
            return body("Mul", numerator, variant.scale)
        if variant.epsilon:
            denominator = body("Add", denominator, variant.epsilon)
        return body("Div", numerator, body("Max", denominator, max(variant.least, TINY)))
    band = Band(
        variant.window_left,
        variant.window_right,
        variant.sinks,
        variant.allowed_left,
        variant.allowed_right,
    )
    virtual = None
    if linear is not None:
        virtual = _as_virtual_key(body, *linear, inputs.extra.get("window_gain"))
    return banded_attention(body, band, variant.heads, inputs, variant.scale, virtual=virtual)


def mixed_body(body: Body, variant: HybridVariant, inputs: Inputs) -> ir.Value:
    """Heads that do the same are cut out, computed together, and put back in order."""
    groups: dict[HeadPart, list[int]] = {}
    for head, part in enumerate(variant.parts):
        groups.setdefault(part, []).append(head)
    outputs: list[ir.Value] = []
    for part, members in groups.items():
        alike = _alike(variant, part, members)
        chosen = _choose(body, variant, alike, members, inputs)
        if part.is_dense:
            outputs += attention_body(body, _as_dense(alike), chosen)
        else:
            outputs.append(hybrid_body(body, alike, chosen))
    order = [head for members in groups.values() for head in members]
    places = np.argsort(order).astype(np.int64)
    return body("Gather", _concat(body, outputs, axis=1), places, axis=1)


def _alike(variant: HybridVariant, part: HeadPart, members: list[int]) -> HybridVariant:
    """The variant of a node of those heads alone.

    Key/value heads are kept where all their query heads are members, and repeated otherwise.
    """
    linear = bool(part.linear)
    if part.is_dense:
        # Never built: stands for the sizes. A window of 0 is a valid exact set.
        part = part._replace(window_left=0, window_right=0)
    kv_heads = len(_kv_heads(variant, members))
    return replace(
        variant,
        num_heads=len(members),
        num_kv_heads=kv_heads,
        window_left=part.window_left,
        window_right=part.window_right,
        sinks=part.sinks,
        feature_map=variant.feature_map if linear else NONE,
        mix=variant.mix if linear and (part.has_window or part.sinks) else "lse",
        map_dim=variant.map_dim if linear else 0,
        has_decay=variant.has_decay and linear,
        head_parts=(),
    )


def _as_dense(alike: HybridVariant) -> AttentionVariant:
    return AttentionVariant(
        alike.num_heads,
        alike.num_kv_heads,
        alike.head_dim,
        alike.value_dim,
        alike.scale,
        window_left=alike.allowed_left,
        window_right=alike.allowed_right,
        has_key_mask=alike.has_key_mask,
    )


def _kv_heads(variant: HybridVariant, members: list[int]) -> list[int]:
    group = variant.heads.group
    whole = all(
        (head // group) * group + other in members for head in members for other in range(group)
    )
    return sorted({head // group for head in members}) if whole else [h // group for h in members]


def _choose(
    body: Body, variant: HybridVariant, alike: HybridVariant, members: list[int], inputs: Inputs
) -> Inputs:
    kv_heads = _kv_heads(variant, members)

    def take(value: ir.Value, heads: list[int], axis: int) -> ir.Value:
        return body("Gather", value, np.array(heads, dtype=np.int64), axis=axis)

    needed = {spec.name for spec in alike.inputs if spec is not None}
    extra = {
        name: take(value, members if name in ("query_map", "window_gain") else kv_heads, 0)
        for name, value in inputs.extra.items()
        if name in needed
    }
    return replace(
        inputs,
        query=take(inputs.query, members, 1),
        key=take(inputs.key, kv_heads, 1),
        value=take(inputs.value, kv_heads, 1),
        extra=extra,
    )


def _concat(body: Body, parts: list[ir.Value], axis: int) -> ir.Value:
    return parts[0] if len(parts) == 1 else body("Concat", *parts, axis=axis)


def _linear_part(body: Body, variant: HybridVariant, inputs: Inputs) -> tuple[ir.Value, ir.Value]:
    feature_map = variant.map
    assert feature_map is not None
    weights = inputs.extra
    query_features = feature_map.build(body, inputs.query, weights.get("query_map"))
    key_features = feature_map.build(body, inputs.key, weights.get("key_map"))
    counted = _counted_keys(body, variant, inputs)
    if counted is not None:
        key_features = body("Mul", key_features, counted)
    return linear_sums(
        body,
        _sides(variant),
        variant.heads,
        inputs,
        query_features,
        key_features,
        weights.get("log_decay"),
    )


def _sides(variant: HybridVariant) -> tuple[Side, ...]:
    past = Side("past", variant.window_left + 1)
    if variant.is_causal:
        return (past,)
    if variant.has_window:
        return (past, Side("future", variant.window_right + 1))
    # Without decay all keys count alike, and one sum serves all queries.
    return (Side("past", 0), Side("future", 1)) if variant.has_decay else ()


def _counted_keys(body: Body, variant: HybridVariant, inputs: Inputs) -> ir.Value | None:
    """1 for real keys that are no sinks, ``[batch, 1, kv_len, 1]``; ``None``: all."""
    counted = inputs.key_mask
    if variant.sinks:
        _, key_positions = inputs.positions
        no_sink = body("Not", body.between(key_positions, 0, variant.sinks - 1))
        counted = no_sink if counted is None else body("And", counted, no_sink)
    return None if counted is None else body.unsqueeze(body.as_float(counted), 1, 3)


def _as_virtual_key(
    body: Body, numerator: ir.Value, denominator: ir.Value, window_gain: ir.Value | None
) -> VirtualKey:
    """Normalised linear part and the logarithm of its normaliser.

    In the shared mix the score counts from the maximum of the exact scores, less ``log(gain)``.
    """
    safe = body("Max", denominator, TINY)
    logarithm = body("Log", safe)
    if window_gain is not None:
        logarithm = body("Sub", logarithm, body("Log", body.unsqueeze(window_gain, 1, 2)))
    score = body("Where", body("Greater", denominator, 0.0), logarithm, MASKED)
    return VirtualKey(score, body("Div", numerator, safe), from_maximum=window_gain is not None)
