"""Sigmoid attention: function body and reference against the formula, query by query."""

from __future__ import annotations

import math
import resource
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oracles import Case, mask_of, prefix, random_case, reference, relative_error, run
from subquad.kernels.attention.semantics import AttentionVariant

SIZES = (4, 2, 7, 5, 0.9)
VARIANTS = [
    AttentionVariant(*SIZES, score_function="sigmoid", score_offset=-3.5),
    AttentionVariant(*SIZES, score_function="sigmoid", window_right=0, has_key_mask=True),
    AttentionVariant(
        *SIZES,
        softcap=2.0,
        window_left=20,
        window_right=3,
        has_key_mask=True,
        score_function="sigmoid",
        score_offset=-0.5,
    ),
    AttentionVariant(*SIZES, score_bias="1", score_function="sigmoid"),
    AttentionVariant(
        *SIZES, window_left=140, score_bias="bq", has_key_mask=True, score_function="sigmoid"
    ),
    AttentionVariant(
        *SIZES,
        window_right=0,
        has_key_mask=True,
        has_key_bias=True,
        score_bias="bhqk",
        alibi="signed",
        score_function="sigmoid",
    ),
    AttentionVariant(*SIZES, alibi="absolute", score_bias="hk", score_function="sigmoid"),
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.overload)

# float32 sums of <= 1000 terms
TOLERANCE = 2e-6


def by_formula(variant: AttentionVariant, case: Case) -> NDArray[np.float64]:
    """``sum_j sigmoid(s_ij) v_j``, one pair after the other in plain Python."""
    batch, heads, query_len, _ = case.query.shape
    output = np.zeros((batch, heads, query_len, variant.value_dim))
    extra = {name: array.astype(np.float64) for name, array in case.extra.items()}
    for b, h, i, j in np.ndindex(batch, heads, query_len, case.key.shape[2]):
        distance = int(case.query_positions[b, i] - case.key_positions[b, j])
        if variant.window_left >= 0 and distance > variant.window_left:
            continue
        if variant.window_right >= 0 and -distance > variant.window_right:
            continue
        if variant.has_key_mask and not case.key_mask[b, j]:
            continue
        group = h // (heads // variant.num_kv_heads)
        score = variant.scale * float(
            case.query[b, h, i].astype(np.float64) @ case.key[b, group, j].astype(np.float64)
        )
        if variant.softcap:
            score = variant.softcap * math.tanh(score / variant.softcap)
        biases = [variant.score_offset]
        if variant.has_key_bias:
            biases.append(float(extra["key_bias"][b, j]))
        if variant.score_bias:
            table = extra["score_bias"]
            at = tuple(min(x, size - 1) for x, size in zip((b, h, i, j), table.shape, strict=True))
            biases.append(float(table[at]))
        if variant.alibi != "none":
            away = abs(distance) if variant.alibi == "absolute" else distance
            biases.append(-float(extra["slopes"][h]) * away)
        if min(biases) <= -1e30:
            continue
        weight = 1.0 / (1.0 + math.exp(-(score + sum(biases))))
        output[b, h, i] += weight * case.value[b, group, j].astype(np.float64)
    return output


@every_variant
@pytest.mark.parametrize("kind", ["none", "left", "holes", "empty_row"])
def test_reference_is_the_formula(variant: AttentionVariant, kind: str) -> None:
    if kind != "none" and not variant.has_key_mask:
        kind = "none"
    rng = np.random.default_rng(1)
    mask = mask_of(kind, 2, 12, rng)
    case = random_case(rng, variant, query_len=9, kv_len=12, mask=mask)
    np.testing.assert_allclose(reference(variant, case), by_formula(variant, case), atol=1e-13)


@every_variant
@pytest.mark.parametrize(
    ("query_len", "kv_len"),
    [(1, 1), (7, 7), (63, 63), (64, 64), (65, 65), (1, 300), (130, 300), (1000, 1000)],
)
def test_body_is_the_reference(variant: AttentionVariant, query_len: int, kv_len: int) -> None:
    rng = np.random.default_rng(3)
    kinds = ("none", "left", "holes", "empty_row") if variant.has_key_mask else ("none",)
    for kind in kinds if kv_len < 1000 else kinds[:1]:
        mask = mask_of(kind, 2, kv_len, rng)
        case = random_case(rng, variant, query_len=query_len, kv_len=kv_len, mask=mask)
        got, want = run(variant, case), reference(variant, case)
        assert relative_error(got, want) < TOLERANCE, kind
        assert not got[want == 0.0].any(), "rows that see no key must be exact zeros"


@pytest.mark.parametrize("offset", [-12.0, -80.0])
def test_small_weights_keep_their_digits(offset: float) -> None:
    """ONNX Runtime's own Sigmoid is off by 1e-7, whatever the weight."""
    variant = AttentionVariant(*SIZES, score_function="sigmoid", score_offset=offset)
    case = random_case(np.random.default_rng(4), variant, query_len=40)
    # exp(-80) of a float32 sum of size 80 is off by 80 * 2^-24
    assert relative_error(run(variant, case), reference(variant, case)) < 1e-5


def test_hidden_tokens_move_no_bit() -> None:
    variant = VARIANTS[1]
    rng = np.random.default_rng(5)
    mask = mask_of("holes", 2, 150, rng)
    mask[0, :4] = False
    case = random_case(rng, variant, query_len=150, mask=mask)
    before = run(variant, case)
    for name in ("key", "value"):

        def overwrite(array: NDArray[Any]) -> None:
            array[np.broadcast_to(~mask[:, None], array.shape[:3])] = 1e6
            array[:, :, 100:] = -1e6

        case = case.edited(name, overwrite)
    after = run(variant, case)
    assert np.array_equal(before[:, :, :100], after[:, :, :100])


@pytest.mark.parametrize("cut", [1, 60, 149])
def test_pieces_are_the_whole(cut: int) -> None:
    variant = VARIANTS[1]
    rng = np.random.default_rng(6)
    case = random_case(rng, variant, query_len=150, mask=mask_of("left", 2, 150, rng))
    whole = run(variant, case)
    pieces = [run(variant, prefix(case, 0, cut)), run(variant, prefix(case, cut, 150))]
    assert relative_error(np.concatenate(pieces, axis=2), whole) < TOLERANCE


def test_a_long_sequence_stores_no_square() -> None:
    """The scores of 6000 x 6000 tokens in 4 heads would be 576 MB."""
    variant = VARIANTS[1]
    case = random_case(np.random.default_rng(7), variant, batch=1, query_len=6000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert np.isfinite(run(variant, case)).all()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10  # in KiB; the scores of a block are 12 MB


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score_function": "relu"}, "known: softmax, sigmoid"),
        ({"score_function": "sigmoid", "has_sink_logits": True}, "belong to a softmax"),
        ({"score_function": "sigmoid", "has_lse": True}, "belong to a softmax"),
        ({"score_offset": 1.0}, "cancels in a softmax"),
    ],
)
def test_impossible_variants_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionVariant(*SIZES, **changes)
