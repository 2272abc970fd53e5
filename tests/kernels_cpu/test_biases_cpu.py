"""Biases, sink logits and row outputs of the dense CPU kernel against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernel_cases
from oracles import random_case, reference_all, relative_error
from subquad.kernels.attention.semantics import AttentionVariant

RunKernelAll = Callable[..., list[NDArray[np.float32]]]

SOME = [
    AttentionVariant(4, 2, 7, 40, 0.3, window_right=0, score_bias="hqk", has_key_mask=True),
    AttentionVariant(
        *(4, 2, 8, 8, 0.3, 4.0, 50, 0),
        has_key_mask=True,
        has_key_bias=True,
        score_bias="bhqk",
        alibi="absolute",
        has_sink_logits=True,
        has_lse=True,
        has_entropy=True,
    ),
    AttentionVariant(2, 2, 64, 64, 0.125, window_right=0, has_lse=True, has_entropy=True),
]
OTHERS = [
    AttentionVariant(4, 2, 8, 5, 0.3, 3.0, has_key_bias=True, has_sink_logits=True),
    AttentionVariant(2, 2, 8, 8, 0.3, window_left=9, score_bias="bk", has_entropy=True),
    AttentionVariant(3, 1, 8, 8, 0.3, alibi="signed", window_right=0, has_key_mask=True),
    AttentionVariant(4, 2, 8, 8, 0.3, score_bias="bhq", has_sink_logits=True, has_lse=True),
]
every_variant = kernel_cases.every_variant(SOME, OTHERS)

# float32 sums of <= 200 terms, weights to 2e-7 each; biases as large as scores
TOLERANCE = 1.5e-6


@every_variant
def test_kernel_equals_reference(run_kernel_all: RunKernelAll, variant: AttentionVariant) -> None:
    rng = np.random.default_rng(0)
    for sizes, case in kernel_cases.cases(rng, variant, (1, 7, 65, 200)):
        got, want = run_kernel_all(variant, case), reference_all(variant, case)
        assert relative_error(got[0], want[0]) < TOLERANCE, sizes
        assert not got[0][want[0] == 0.0].any()
        for rows, wanted in zip(got[1:], want[1:], strict=True):
            assert np.array_equal(np.isneginf(rows), np.isneginf(wanted))
            # Numbers up to 10 from sums of <= 200 terms.
            np.testing.assert_allclose(rows, wanted, rtol=2e-6, atol=4e-6)


@every_variant
def test_few_queries_over_many_keys(
    run_kernel_all: RunKernelAll, variant: AttentionVariant
) -> None:
    """Decoding: the keys are cut into parts; some parts hold no key that a row sees."""
    rng = np.random.default_rng(3)
    for sizes, case in kernel_cases.decoding_cases(rng, variant):
        got, want = run_kernel_all(variant, case), reference_all(variant, case)
        assert relative_error(got[0], want[0]) < TOLERANCE, sizes
        for rows, wanted in zip(got[1:], want[1:], strict=True):
            assert np.array_equal(np.isneginf(rows), np.isneginf(wanted))
            np.testing.assert_allclose(rows, wanted, rtol=2e-6, atol=4e-6)


def test_row_outputs_of_large_scores(run_kernel_all: RunKernelAll) -> None:
    """Maxima that rise again and again, and weights that underflow."""
    rng = np.random.default_rng(1)
    variant = SOME[2]
    case = random_case(rng, variant, query_len=150, gain=6.0)
    output, lse, entropy = run_kernel_all(variant, case)
    want = reference_all(variant, case)
    # float32 scores of size 100 are off by 100 * 2^-24
    assert relative_error(output, want[0]) < 2e-5
    np.testing.assert_allclose(lse, want[1], rtol=2e-6, atol=3e-5)
    np.testing.assert_allclose(entropy, want[2], rtol=2e-5, atol=5e-5)


def test_keys_hidden_by_bias_may_hold_anything(run_kernel_all: RunKernelAll) -> None:
    """They are left out as masked ones are: not even multiplied by zero."""
    rng = np.random.default_rng(2)
    variant = SOME[1]
    case = random_case(rng, variant, query_len=90)
    hidden = case.extra["key_bias"] <= np.float32(-1e30)
    assert 0 < hidden.sum() < hidden.size

    def poison(array: NDArray[Any]) -> None:
        array[np.broadcast_to(hidden[:, None], array.shape[:3])] = np.nan

    poisoned = case.edited("key", poison).edited("value", poison)
    before, after = run_kernel_all(variant, case)[0], run_kernel_all(variant, poisoned)[0]
    assert np.array_equal(before, after)
