"""Biases, sink logits and row outputs of exact attention: function bodies and their definition."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from oracles import mask_of, random_case, reference, reference_all, relative_error, run, run_all
from subquad.kernels.attention.semantics import AttentionVariant

SIZES = (4, 2, 7, 5, 0.3)
VARIANTS = [
    AttentionVariant(*SIZES, has_key_bias=True),
    AttentionVariant(*SIZES, has_key_bias=True, window_right=0, has_key_mask=True),
    AttentionVariant(*SIZES, has_key_bias=True, softcap=3.0, has_sink_logits=True),
    AttentionVariant(*SIZES, has_key_bias=True, window_left=30, window_right=4, has_key_mask=True),
    AttentionVariant(*SIZES, score_bias="hqk", has_key_mask=True),
    AttentionVariant(*SIZES, score_bias="bhqk", window_right=0),
    AttentionVariant(*SIZES, score_bias="bk", softcap=3.0),
    AttentionVariant(*SIZES, score_bias="hk", window_left=30, window_right=0, has_key_mask=True),
    AttentionVariant(*SIZES, score_bias="bhq", has_sink_logits=True),
    AttentionVariant(*SIZES, alibi="signed", window_right=0, has_key_mask=True),
    AttentionVariant(*SIZES, alibi="absolute", has_key_mask=True),
    AttentionVariant(*SIZES, has_sink_logits=True, window_right=0, has_key_mask=True),
    AttentionVariant(*SIZES, has_sink_logits=True, window_left=20, window_right=0),
    AttentionVariant(
        *SIZES, 3.0, -1, 0, True, True, "hqk", "signed", has_sink_logits=True, has_lse=True
    ),
    AttentionVariant(*SIZES, has_lse=True, has_entropy=True),
    AttentionVariant(*SIZES, window_right=0, has_key_mask=True, has_lse=True, has_entropy=True),
    AttentionVariant(*SIZES, has_key_mask=True, has_entropy=True, score_bias="hqk"),
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.overload)

# float32 sums of <= 130 terms; biases are of the size of scores
TOLERANCE = 2e-6


def assert_rows_close(got: NDArray[np.float32], want: NDArray[np.float64]) -> None:
    """``lse`` and ``entropy``: -inf in the same places, the rest to float32 rounding."""
    assert np.array_equal(np.isneginf(got), np.isneginf(want))
    # Numbers of size 10 from sums of <= 130 terms.
    np.testing.assert_allclose(got, want, rtol=2e-6, atol=4e-6)


@every_variant
@pytest.mark.parametrize(("query_len", "kv_len"), [(1, 1), (65, 65), (1, 90), (40, 130)])
@pytest.mark.parametrize("kind", ["none", "left", "holes", "empty_row"])
def test_matches_reference(
    variant: AttentionVariant, query_len: int, kv_len: int, kind: str
) -> None:
    if kind != "none" and not variant.has_key_mask:
        kind = "none"
    rng = np.random.default_rng(3)
    mask = mask_of(kind, 2, kv_len, rng)
    case = random_case(rng, variant, query_len=query_len, kv_len=kv_len, mask=mask)
    got, want = run_all(variant, case), reference_all(variant, case)
    assert len(got) == len(want) == 1 + variant.has_lse + variant.has_entropy
    assert relative_error(got[0], want[0]) < TOLERANCE
    assert not got[0][want[0] == 0.0].any(), "rows that see no key must be exact zeros"
    for rows, wanted in zip(got[1:], want[1:], strict=True):
        assert_rows_close(rows, wanted)


def test_a_row_that_sees_nothing() -> None:
    variant = AttentionVariant(*SIZES, has_key_mask=True, has_lse=True, has_entropy=True)
    sink = replace(variant, has_sink_logits=True)
    rng = np.random.default_rng(4)
    mask = np.zeros((2, 6), dtype=np.bool_)
    case = random_case(rng, sink, query_len=6, mask=mask)
    for results in (run_all(variant, case), reference_all(variant, case)):
        output, lse, entropy = results
        assert not output.any() and np.isneginf(lse).all() and not entropy.any()
    for results in (run_all(sink, case), reference_all(sink, case)):
        output, lse, entropy = results
        assert not output.any() and not entropy.any()
        np.testing.assert_allclose(
            lse, np.broadcast_to(case.extra["sink_logits"][None, :, None], lse.shape), rtol=1e-6
        )


@pytest.mark.parametrize("hiding", [-np.inf, float(np.finfo(np.float32).min), -1e30])
def test_a_hiding_bias_is_a_mask(hiding: float) -> None:
    """Whatever constant the source used, and also where a row has nothing else."""
    masked = AttentionVariant(*SIZES, window_right=0, has_key_mask=True)
    by_key = AttentionVariant(*SIZES, window_right=0, has_key_bias=True)
    by_score = AttentionVariant(*SIZES, window_right=0, score_bias="bk")
    rng = np.random.default_rng(5)
    mask = rng.random((2, 50)) > 0.6
    mask[1, :20] = False
    case = random_case(rng, masked, query_len=50, mask=mask)
    bias = np.where(mask, 0.0, hiding).astype(np.float32)
    hidden = case.with_(extra={"key_bias": bias, "score_bias": bias[:, None, None]})
    want = reference(masked, case)
    assert not want[1, :, :20].any()
    for variant in (by_key, by_score):
        assert np.array_equal(reference(variant, hidden), want)
        got = run(variant, hidden)
        assert relative_error(got, want) < TOLERANCE
        assert not got[1, :, :20].any()


def test_alibi_is_the_bias_of_bloom_and_of_mpt() -> None:
    """``slope * key position``, from the first token or from the last: the same softmax."""
    variant = AttentionVariant(*SIZES, window_right=0, alibi="signed")
    table = AttentionVariant(*SIZES, window_right=0, score_bias="hk")
    rng = np.random.default_rng(6)
    case = random_case(rng, variant, query_len=40)
    slopes = case.extra["slopes"].astype(np.float64)[None, :, None, None]
    want = reference(variant, case)
    for first in (0, 1 - 40):
        bias = slopes * np.arange(first, first + 40)
        biased = case.with_(extra={"score_bias": bias})
        np.testing.assert_allclose(reference(table, biased), want, rtol=1e-11, atol=1e-12)


def test_parts_merge_by_lse() -> None:
    """Attention over two halves of the keys, merged, is attention over all of them."""
    whole = AttentionVariant(*SIZES, has_sink_logits=True, has_lse=True, score_bias="hk")
    rng = np.random.default_rng(7)
    case = random_case(rng, whole, query_len=9, kv_len=40)
    parts = []
    for start, end in ((0, 13), (13, 40)):
        extra = {**case.extra, "score_bias": case.extra["score_bias"][..., start:end]}
        part = case.with_(
            key=case.key[:, :, start:end], value=case.value[:, :, start:end], extra=extra
        )
        # The sink belongs to one part only.
        parts.append(run_all(replace(whole, has_sink_logits=start == 0), part))
    total = np.logaddexp(parts[0][1], parts[1][1])
    merged = np.sum([np.exp(lse - total)[..., None] * output for output, lse in parts], axis=0)
    want, lse = reference_all(whole, case)
    assert relative_error(merged, want) < TOLERANCE
    assert_rows_close(total, lse)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"score_bias": "kq"}, "'bhqk' in order"), ({"alibi": "both"}, "known: none, signed")],
)
def test_impossible_variants_are_refused(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AttentionVariant(*SIZES, **changes)  # type: ignore[arg-type]
