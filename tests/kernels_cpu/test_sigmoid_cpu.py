"""Sigmoid attention of the dense CPU kernel against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

import kernel_cases
from oracles import mask_of, random_case, reference, relative_error
from subquad.kernels.attention.semantics import AttentionVariant

RunKernel = Callable[..., NDArray[np.float32]]

SOME = [
    AttentionVariant(
        *(4, 2, 7, 40, 0.6),
        window_right=0,
        has_key_mask=True,
        score_function="sigmoid",
        score_offset=-3.5,
    ),
    AttentionVariant(
        *(4, 2, 8, 8, 0.6, 2.0, 50, 3),
        has_key_mask=True,
        has_key_bias=True,
        score_bias="bhqk",
        alibi="absolute",
        score_function="sigmoid",
    ),
]
OTHERS = [
    AttentionVariant(2, 2, 64, 64, 0.125, score_function="sigmoid", score_offset=-6.9),
    AttentionVariant(3, 1, 8, 5, 0.6, score_bias="1", score_function="sigmoid"),
    AttentionVariant(4, 2, 8, 8, 0.6, window_left=9, score_bias="bq", score_function="sigmoid"),
]
every_variant = kernel_cases.every_variant(SOME, OTHERS)

# float32 sums of <= 1000 terms, weights to 5e-7 each
TOLERANCE = 1.5e-6


@every_variant
def test_kernel_equals_reference(run_kernel: RunKernel, variant: AttentionVariant) -> None:
    rng = np.random.default_rng(0)
    for sizes, case in kernel_cases.cases(rng, variant):
        got, want = run_kernel(variant, case), reference(variant, case)
        assert relative_error(got, want) < TOLERANCE, sizes
        assert not got[want == 0.0].any()


@every_variant
def test_few_queries_over_many_keys(run_kernel: RunKernel, variant: AttentionVariant) -> None:
    """Decoding: the keys are cut into parts, which add up."""
    rng = np.random.default_rng(3)
    for sizes, case in kernel_cases.decoding_cases(rng, variant):
        got, want = run_kernel(variant, case), reference(variant, case)
        assert relative_error(got, want) < TOLERANCE, sizes


def test_extreme_scores(run_kernel: RunKernel) -> None:
    """Weights of 0 and 1, and any between."""
    rng = np.random.default_rng(1)
    variant = SOME[0]
    case = random_case(rng, variant, query_len=150, gain=8.0)
    got, want = run_kernel(variant, case), reference(variant, case)
    # float32 scores of size 100 are off by 100 * 2^-24
    assert relative_error(got, want) < 1e-5


def test_hidden_keys_may_hold_anything(run_kernel: RunKernel) -> None:
    """They are left out: not even multiplied by zero."""
    rng = np.random.default_rng(2)
    variant = SOME[0]
    mask = mask_of("holes", 2, 90, rng)
    case = random_case(rng, variant, query_len=90, mask=mask)

    def poison(array: NDArray[Any]) -> None:
        array[np.broadcast_to(~mask[:, None], array.shape[:3])] = np.nan

    poisoned = case.edited("key", poison).edited("value", poison)
    assert np.array_equal(run_kernel(variant, case), run_kernel(variant, poisoned))
