"""The float64 references against an attention written one query at a time, in Python floats.

The two share no code: this one looks every key up by its definition in ``kernels/operator.py``.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from oracles import Case, random_case, reference, reference_all
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.hybrid.semantics import HybridVariant


def elu_plus_one(x: NDArray[np.float32]) -> list[float]:
    return [float(e) + 1 if e > 0 else math.exp(float(e)) for e in x]


def within(distance: int, left: int, right: int) -> bool:
    return (left == -1 or distance <= left) and (right == -1 or -distance <= right)


def features(name: str, x: NDArray[np.float32], weights: NDArray[np.float32]) -> list[float]:
    """By the formulas of the papers; ``weights`` of one head, the bias in its last row."""
    if name == "elu":
        return elu_plus_one(x)
    rows = [*(float(e) for e in x), 1.0]
    u = [sum(a * float(w) for a, w in zip(rows, column, strict=True)) for column in weights.T]
    plus, minus = [math.exp(e) for e in u], [math.exp(-e) for e in u]
    if name == "hedgehog":
        total = sum(plus) + sum(minus)
        return [e / total for e in plus + minus]
    assert name == "softmax_pair"
    return [max(e / sum(half), 1e-12) for half in (plus, minus) for e in half]


def weights_of(
    variant: AttentionVariant | HybridVariant, case: Case, b: int, h: int, i: int
) -> list[float]:
    """Of every key, with no shift but the shared mix's own; then that of the sink if any."""
    keys = range(case.key.shape[2])
    if isinstance(variant, HybridVariant):
        return hybrid_weights(variant, case, b, h, i)
    weights = [weigh(variant, case, b, h, i, j) for j in keys]
    if "sink_logits" in case.extra:
        weights.append(math.exp(case.extra["sink_logits"][h]))
    return weights


def hybrid_weights(variant: HybridVariant, case: Case, b: int, h: int, i: int) -> list[float]:
    keys = range(case.key.shape[2])
    kinds = [kind_of(variant, case, b, h, i, j) for j in keys]
    scores = [score_of(variant, case, b, h, i, j) for j in keys]
    shift, gain = 0.0, 1.0
    if variant.mix == "shared" and variant.parts[h].linear:
        exact = [s for s, kind in zip(scores, kinds, strict=True) if kind == "exact"]
        shift, gain = max(exact, default=0.0), float(case.extra["window_gain"][h])
    weights = []
    for j, kind in enumerate(kinds):
        if kind == "exact":
            weights.append(gain * math.exp(scores[j] - shift))
        else:
            weights.append(similarity(variant, case, b, h, i, j) if kind == "linear" else 0.0)
    return weights


def score_of(
    variant: AttentionVariant | HybridVariant, case: Case, b: int, h: int, i: int, j: int
) -> float:
    key = case.key[b, h // (variant.num_heads // variant.num_kv_heads), j]
    pairs = zip(case.query[b, h, i], key, strict=True)
    return variant.scale * sum(float(x) * float(y) for x, y in pairs)


def similarity(variant: HybridVariant, case: Case, b: int, h: int, i: int, j: int) -> float:
    kv_head = h // (variant.num_heads // variant.num_kv_heads)
    none = np.zeros((variant.num_heads, 0, 0), np.float32)
    query_map, key_map = (case.extra.get(name, none) for name in ("query_map", "key_map"))
    query = features(variant.feature_map, case.query[b, h, i], query_map[h])
    key = features(variant.feature_map, case.key[b, kv_head, j], key_map[kv_head])
    product = sum(x * y for x, y in zip(query, key, strict=True))
    if variant.has_decay:
        distance = abs(int(case.query_positions[b, i]) - int(case.key_positions[b, j]))
        product *= math.exp(float(case.extra["log_decay"][kv_head])) ** distance
    return product


def kind_of(variant: HybridVariant, case: Case, b: int, h: int, i: int, j: int) -> str:
    """Whether a key counts exactly, linearly or not at all."""
    if variant.has_key_mask and not case.key_mask[b, j]:
        return "hidden"
    distance = int(case.query_positions[b, i]) - int(case.key_positions[b, j])
    if not within(distance, variant.allowed_left, variant.allowed_right):
        return "hidden"
    part = variant.parts[h]
    in_window = part.has_window and within(distance, part.window_left, part.window_right)
    if in_window or 0 <= case.key_positions[b, j] < part.sinks or part.is_dense:
        return "exact"
    return "linear" if part.linear else "hidden"


def attend_one(
    variant: AttentionVariant | HybridVariant, case: Case, b: int, h: int, i: int
) -> list[float]:
    """Output of one query: sums of weights over keys."""
    kv_head = h // (variant.num_heads // variant.num_kv_heads)
    weights = weights_of(variant, case, b, h, i)
    sums = [0.0] * variant.value_dim
    for weight, value in zip(weights, case.value[b, kv_head], strict=False):
        sums = [s + weight * float(v) for s, v in zip(sums, value, strict=True)]
    total = sum(weights)
    return [s / total if total else 0.0 for s in sums]


def bias_of(variant: AttentionVariant, case: Case, b: int, h: int, i: int, j: int) -> float:
    biases = [0.0]
    if variant.has_key_bias:
        biases.append(float(case.extra["key_bias"][b, j]))
    if variant.score_bias:
        array = case.extra["score_bias"]
        at = [
            place if axis in variant.score_bias else 0
            for axis, place in zip("bhqk", (b, h, i, j), strict=True)
        ]
        biases.append(float(array[tuple(at)]))
    if variant.alibi != "none":
        distance = int(case.query_positions[b, i]) - int(case.key_positions[b, j])
        if variant.alibi == "absolute":
            distance = abs(distance)
        biases.append(-float(case.extra["slopes"][h]) * distance)
    return sum(biases) if min(biases) > float(np.float32(-1e30)) else -math.inf


def weigh(variant: AttentionVariant, case: Case, b: int, h: int, i: int, j: int) -> float:
    if variant.has_key_mask and not case.key_mask[b, j]:
        return 0.0
    distance = int(case.query_positions[b, i]) - int(case.key_positions[b, j])
    if not within(distance, variant.window_left, variant.window_right):
        return 0.0
    score = score_of(variant, case, b, h, i, j)
    if variant.softcap:
        score = variant.softcap * math.tanh(score / variant.softcap)
    return math.exp(score + bias_of(variant, case, b, h, i, j))


BIASED = [
    AttentionVariant(2, 1, 4, 4, 0.5, 1.5, has_key_mask=True, has_key_bias=True),
    AttentionVariant(2, 2, 4, 4, 0.5, window_right=0, score_bias="hqk", has_sink_logits=True),
    AttentionVariant(2, 1, 4, 4, 0.5, window_right=0, alibi="signed", has_key_mask=True),
    AttentionVariant(2, 2, 4, 4, 0.5, alibi="absolute", score_bias="bk", has_key_mask=True),
    AttentionVariant(4, 2, 4, 3, 0.5, window_left=4, window_right=0, has_sink_logits=True),
    AttentionVariant(2, 2, 4, 4, 0.5, score_bias="bhqk", has_key_bias=True),
]
BIASED += [replace(variant, has_lse=True, has_entropy=True) for variant in BIASED]

VARIANTS: list[AttentionVariant | HybridVariant] = [
    AttentionVariant(2, 2, 4, 4, 0.5, has_key_mask=True),
    AttentionVariant(4, 2, 5, 3, 0.5, softcap=1.5),
    AttentionVariant(2, 1, 4, 4, 0.5, window_right=0, has_key_mask=True),
    AttentionVariant(2, 2, 4, 4, 0.5, window_left=3, window_right=1, has_key_mask=True),
    *BIASED,
    HybridVariant(4, 2, 5, 3, 0.5, 2, 0, 2, -1, 0, has_key_mask=True),
    HybridVariant(2, 2, 4, 4, 0.5, 2, 0, 2, 6, 0, has_key_mask=True),
    HybridVariant(2, 2, 4, 4, 0.5, 2, 0, 2, -1, 0, "elu", has_key_mask=True),
    HybridVariant(4, 2, 5, 3, 0.5, 2, 2, 1, -1, -1, "elu", has_key_mask=True),
    HybridVariant(2, 2, 4, 4, 0.5, allowed_right=0, feature_map="elu", has_key_mask=True),
    HybridVariant(2, 2, 4, 4, 0.5, feature_map="elu"),
    HybridVariant(4, 2, 5, 3, 0.5, 2, 0, 1, -1, 0, "hedgehog", map_dim=4, has_decay=True),
    HybridVariant(4, 2, 5, 3, 0.5, 2, 1, 1, -1, -1, "softmax_pair", "shared", True, 6),
    HybridVariant(
        4,
        2,
        5,
        3,
        0.5,
        allowed_right=0,
        feature_map="hedgehog",
        mix="shared",
        has_key_mask=True,
        map_dim=4,
        head_parts=((2, 0, 0, 1), (-1, -1, 0, 0), (3, 0, 2, 0), (-1, -1, 0, 1)),
    ),
]


def spread_of(weights: list[float]) -> tuple[float, float]:
    """Logarithm of the sum, and entropy of the shares."""
    total = sum(weights)
    shares = [weight / total for weight in weights if weight]
    return math.log(total) if total else -math.inf, -sum(p * math.log(p) for p in shares)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.op_type + "_" + v.overload)
@pytest.mark.parametrize(("query_len", "kv_len"), [(12, 12), (3, 11)])
def test_reference_equals_one_query_at_a_time(
    variant: AttentionVariant | HybridVariant, query_len: int, kv_len: int
) -> None:
    rng = np.random.default_rng(5)
    mask = rng.random((3, kv_len)) > 0.3
    mask[0, :4] = False
    mask[2] = False
    case = random_case(rng, variant, batch=3, query_len=query_len, kv_len=kv_len, mask=mask)
    want = np.array(
        [
            [
                [attend_one(variant, case, b, h, i) for i in range(query_len)]
                for h in range(variant.num_heads)
            ]
            for b in range(3)
        ]
    )
    # Both in float64.
    np.testing.assert_allclose(reference(variant, case), want, rtol=1e-12, atol=1e-14)
    if isinstance(variant, AttentionVariant) and variant.has_lse and variant.has_entropy:
        rows = np.array(
            [
                [
                    [spread_of(weights_of(variant, case, b, h, i)) for i in range(query_len)]
                    for h in range(variant.num_heads)
                ]
                for b in range(3)
            ]
        )
        _, lse, entropy = reference_all(variant, case)
        np.testing.assert_allclose(lse, rows[..., 0], rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(entropy, rows[..., 1], rtol=1e-12, atol=1e-13)


def test_hybrid_is_softmax_where_the_features_are_exponentials() -> None:
    """Log-sum-exp consistency: with phi(q).phi(k) = e^s the split into two parts is invisible."""
    from subquad.kernels.hybrid.reference import LinearWeights, hybrid_attention

    rng = np.random.default_rng(6)
    query, key, value = rng.standard_normal((3, 1, 1, 6, 1))
    # One key per query is far enough: rank-one scores make exp(s) a product of features.
    query[:] = 1.0
    visible = np.tril(np.ones((1, 6, 6), dtype=np.bool_))
    exact = visible & ~np.tri(6, 6, -3, dtype=np.bool_)
    weights = LinearWeights(np.ones_like(query), np.exp(key))
    mixed = hybrid_attention(query, key, value, weights, exact, visible & ~exact, 1.0)
    nothing = np.zeros_like(visible)
    softmax = hybrid_attention(query, key, value, weights, visible, nothing, 1.0)
    np.testing.assert_allclose(mixed, softmax, rtol=1e-13)
