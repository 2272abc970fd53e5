"""The dense CPU kernel against the float64 reference, and its exactness properties."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import kernel_cases
from oracles import mask_of, random_case, reference, relative_error
from subquad.kernels.attention.cpu import TEMPLATE
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.templates.parameters import TileParameters

RunKernel = Callable[..., NDArray[np.float32]]

PLAIN = AttentionVariant(2, 2, 64, 64, 0.125)
CAUSAL = AttentionVariant(4, 2, 64, 64, 0.125, window_right=0)
MASKED = AttentionVariant(4, 2, 24, 20, 0.2, has_key_mask=True)
CAUSAL_MASKED = AttentionVariant(6, 2, 5, 7, 0.4, window_right=0, has_key_mask=True)
WINDOW = AttentionVariant(2, 1, 80, 80, 0.1, window_left=40, window_right=0, has_key_mask=True)
BAND = AttentionVariant(3, 3, 16, 33, 0.25, softcap=5.0, window_left=9, window_right=70)
LEFT_ONLY = AttentionVariant(2, 2, 8, 8, 0.3, window_left=10, has_key_mask=True)
VARIANTS = [PLAIN, CAUSAL, MASKED, CAUSAL_MASKED, WINDOW, BAND, LEFT_ONLY]

# float32 sums of <= 200 terms, softmax weights to 2e-7 each
TOLERANCE = 1e-6


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.overload)
def test_kernel_equals_reference(run_kernel: RunKernel, variant: AttentionVariant) -> None:
    rng = np.random.default_rng(0)
    kinds = ("none", "left", "right", "holes", "empty_row")
    for sizes, case in kernel_cases.cases(rng, variant, kinds=kinds):
        got, want = run_kernel(variant, case), reference(variant, case)
        assert relative_error(got, want) < TOLERANCE, sizes
        assert not got[want == 0.0].any(), "rows that see no key must be exact zeros"


def test_error_is_that_of_float32_attention(run_kernel: RunKernel) -> None:
    rng = np.random.default_rng(1)
    for length in (65, 1000):
        case = random_case(rng, PLAIN, batch=1, query_len=length)
        want = reference(PLAIN, case)
        q, k, v = (torch.from_numpy(x) for x in (case.query, case.key, case.value))
        other = torch.nn.functional.scaled_dot_product_attention(q, k, v).numpy()
        assert relative_error(run_kernel(PLAIN, case), want) < 2 * relative_error(other, want)


@pytest.mark.parametrize("variant", [PLAIN, CAUSAL_MASKED], ids=lambda v: v.overload)
def test_large_scores(run_kernel: RunKernel, variant: AttentionVariant) -> None:
    """Scores up to about +-100 and more; the error is that of float32 scores, 100 * 2^-24."""
    rng = np.random.default_rng(2)
    gain = math.sqrt(30.0 / (variant.scale * math.sqrt(variant.head_dim)))
    case = random_case(rng, variant, query_len=150, gain=gain)
    assert relative_error(run_kernel(variant, case), reference(variant, case)) < 2e-5


@pytest.mark.parametrize("variant", [CAUSAL, CAUSAL_MASKED, WINDOW, BAND], ids=lambda v: v.overload)
def test_hidden_keys_never_matter(run_kernel: RunKernel, variant: AttentionVariant) -> None:
    """To the bit: a query's output does not move when a key it may not see changes."""
    rng = np.random.default_rng(3)
    length = 130
    case = random_case(rng, variant, query_len=length, mask=mask_of("holes", 2, length, rng))
    before = run_kernel(variant, case)
    for slot in (0, 15, 16, 63, 64, 100, 129):

        def disturb(array: NDArray[Any], slot: int = slot) -> None:
            array[:, :, slot] = 1e3

        after = run_kernel(variant, case.edited("key", disturb).edited("value", disturb))
        distance = case.query_positions - case.key_positions[:, slot : slot + 1]
        seen = np.ones(distance.shape, dtype=np.bool_)
        if variant.window_left >= 0:
            seen &= distance <= variant.window_left
        if variant.window_right >= 0:
            seen &= -distance <= variant.window_right
        if variant.has_key_mask:
            seen &= case.key_mask[:, slot : slot + 1]
        hidden = np.broadcast_to(~seen[:, None, :, None], before.shape)
        assert np.array_equal(before[hidden], after[hidden])


def test_padding_may_hold_anything(run_kernel: RunKernel) -> None:
    """Padded keys are never read, not even multiplied by zero."""
    rng = np.random.default_rng(4)
    case = random_case(rng, CAUSAL_MASKED, query_len=90, mask=mask_of("holes", 2, 90, rng))

    def poison(array: NDArray[Any]) -> None:
        array[~np.broadcast_to(case.key_mask[:, None], array.shape[:3])] = np.nan

    poisoned = case.edited("key", poison).edited("value", poison)
    assert np.array_equal(run_kernel(CAUSAL_MASKED, case), run_kernel(CAUSAL_MASKED, poisoned))


def test_batch_rows_and_heads_are_independent(run_kernel: RunKernel) -> None:
    rng = np.random.default_rng(5)
    case = random_case(rng, CAUSAL_MASKED, batch=3, query_len=70)
    whole = run_kernel(CAUSAL_MASKED, case)
    names = ("query", "key", "value", "key_mask", "query_positions", "key_positions")
    alone = case.with_(**{name: getattr(case, name)[1:2] for name in names})
    assert np.array_equal(run_kernel(CAUSAL_MASKED, alone)[0], whole[1])


@pytest.mark.parametrize(
    "params",
    [
        {"vectors": 3, "rows": 4, "keys": 64, "panels": 1},
        {"lanes": 16, "vectors": 1, "rows": 5, "keys": 7, "unroll": 3},
    ],
    ids=str,
)
def test_any_parameters_give_the_same(run_kernel: RunKernel, params: dict[str, int]) -> None:
    rng = np.random.default_rng(6)
    for kind in ("holes", "left"):
        case = random_case(rng, WINDOW, query_len=150, mask=mask_of(kind, 2, 150, rng))
        got = run_kernel(WINDOW, case, params)
        assert relative_error(got, reference(WINDOW, case)) < TOLERANCE


def test_unknown_or_absurd_parameters_are_errors() -> None:
    with pytest.raises(ValueError, match="unknown kernel parameter 'row'; known: lanes"):
        TileParameters().override({"row": 4})
    with pytest.raises(ValueError, match="keys must be an integer from 1"):
        TileParameters().override({"keys": 0})
    with pytest.raises(ValueError, match="spilled"):
        TileParameters().override({"rows": 128})


def test_other_operators_are_rejected_with_a_reason() -> None:
    rejection = TEMPLATE.supports(HybridVariant(2, 2, 8, 8, 0.3, feature_map="elu"))
    assert rejection is not None and "HybridAttention" in rejection.reason
