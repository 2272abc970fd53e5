"""The GPU kernels against the float64 references, and their exactness properties, on PoCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oracles import mask_of, random_case, reference, relative_error
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.hybrid.semantics import HybridVariant

pytestmark = pytest.mark.gpu_schedules

RunKernel = Callable[..., NDArray[np.float32]]

PLAIN = AttentionVariant(2, 2, 64, 64, 0.125)
CAUSAL = AttentionVariant(4, 2, 64, 64, 0.125, window_right=0)
MASKED = AttentionVariant(4, 2, 24, 20, 0.2, has_key_mask=True)
CAUSAL_MASKED = AttentionVariant(6, 2, 5, 7, 0.4, window_right=0, has_key_mask=True)
WINDOW = AttentionVariant(2, 1, 80, 80, 0.1, window_left=40, window_right=0, has_key_mask=True)
BAND = AttentionVariant(3, 3, 16, 33, 0.25, softcap=5.0, window_left=9, window_right=70)
WIDE = AttentionVariant(2, 1, 256, 256, 0.0625, window_right=0)

LINEAR = HybridVariant(2, 1, 64, 64, 0.125, allowed_right=0, feature_map="elu")
HYBRID = HybridVariant(
    4, 2, 24, 20, 0.3, 40, 0, sinks=4, allowed_right=0, feature_map="elu", has_key_mask=True
)
SINKS_AND_LINEAR = HybridVariant(2, 2, 8, 8, 0.3, sinks=3, allowed_right=0, feature_map="elu")
ALL_KEYS = HybridVariant(4, 2, 72, 20, 0.3, feature_map="elu", has_key_mask=True)
EXACT_BAND = HybridVariant(
    2, 2, 8, 8, 0.3, 3, 2, sinks=9, allowed_left=50, allowed_right=6, has_key_mask=True
)
ONLY_SINKS = HybridVariant(2, 2, 8, 8, 0.3, sinks=4, allowed_right=0, has_key_mask=True)
VARIANTS = [
    PLAIN,
    CAUSAL,
    MASKED,
    CAUSAL_MASKED,
    WINDOW,
    BAND,
    WIDE,
    LINEAR,
    HYBRID,
    SINKS_AND_LINEAR,
    ALL_KEYS,
    EXACT_BAND,
    ONLY_SINKS,
]
LENGTHS = [1, 7, 63, 64, 65, 200, 300]

# float32 sums of <= 300 terms, exp2 of the C library
TOLERANCE = 1e-6


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: f"{v.op_type}-{v.overload}")
def test_kernel_equals_reference(run_kernel: RunKernel, variant: Any) -> None:
    rng = np.random.default_rng(0)
    kinds = ("none", "left", "right", "holes", "empty_row") if variant.has_key_mask else ("none",)
    for length in LENGTHS:
        for kind in kinds:
            for query_len in {length, -(-length // 3)}:
                mask = mask_of(kind, 2, length, rng)
                case = random_case(rng, variant, query_len=query_len, kv_len=length, mask=mask)
                got, want = run_kernel(variant, case), reference(variant, case)
                assert relative_error(got, want) < TOLERANCE, (query_len, length, kind)
                assert not got[want == 0.0].any(), "rows that see no key must be exact zeros"


@pytest.mark.parametrize("variant", [CAUSAL_MASKED, HYBRID], ids=lambda v: v.op_type)
def test_large_scores(run_kernel: RunKernel, variant: Any) -> None:
    """Scores of up to about +-100; float32 scores of that size are off by 100 * 2^-24."""
    rng = np.random.default_rng(2)
    gain = float(np.sqrt(30.0 / (variant.scale * np.sqrt(variant.head_dim))))
    case = random_case(rng, variant, query_len=150, gain=gain)
    assert relative_error(run_kernel(variant, case), reference(variant, case)) < 2e-5


@pytest.mark.parametrize("variant", [WINDOW, HYBRID, EXACT_BAND], ids=lambda v: v.overload)
def test_hidden_keys_never_matter(run_kernel: RunKernel, variant: Any) -> None:
    """To the bit: a query's output does not move when a key it may not see changes."""
    rng = np.random.default_rng(3)
    length = 170
    case = random_case(rng, variant, query_len=length, mask=mask_of("holes", 2, length, rng))
    before = run_kernel(variant, case)
    if isinstance(variant, AttentionVariant):
        left, right = variant.window_left, variant.window_right
    else:
        left, right = variant.allowed_left, variant.allowed_right
    for slot in (0, 31, 63, 64, 100, 169):

        def disturb(array: NDArray[Any], slot: int = slot) -> None:
            array[:, :, slot] = 1e2

        after = run_kernel(variant, case.edited("key", disturb).edited("value", disturb))
        distance = case.query_positions - case.key_positions[:, slot : slot + 1]
        seen = (-distance <= right) & case.key_mask[:, slot : slot + 1]
        if left >= 0:
            seen &= distance <= left
        hidden = np.broadcast_to(~seen[:, None, :, None], before.shape)
        assert np.array_equal(before[hidden], after[hidden])


@pytest.mark.parametrize("variant", [CAUSAL_MASKED, HYBRID, ALL_KEYS], ids=lambda v: v.overload)
def test_padding_may_hold_anything(run_kernel: RunKernel, variant: Any) -> None:
    """Padded keys are never read, not even multiplied by zero."""
    rng = np.random.default_rng(4)
    case = random_case(rng, variant, query_len=150, mask=mask_of("holes", 2, 150, rng))

    def poison(array: NDArray[Any]) -> None:
        array[~np.broadcast_to(case.key_mask[:, None], array.shape[:3])] = np.nan

    poisoned = case.edited("key", poison).edited("value", poison)
    assert np.array_equal(run_kernel(variant, case), run_kernel(variant, poisoned))


@pytest.mark.parametrize(
    "params",
    [{"rows": 8, "keys": 4}, {"threads_x": 8, "threads_y": 16, "rows": 2, "keys": 4}],
    ids=str,
)
@pytest.mark.parametrize("variant", [WINDOW, HYBRID], ids=lambda v: v.op_type)
def test_any_parameters_give_the_same(
    run_kernel: RunKernel, variant: Any, params: dict[str, int]
) -> None:
    rng = np.random.default_rng(6)
    for kind in ("holes", "left"):
        for query_len in (300, 90, 1):
            mask = mask_of(kind, 2, 300, rng)
            case = random_case(rng, variant, query_len=query_len, kv_len=300, mask=mask)
            got = run_kernel(variant, case, params)
            assert relative_error(got, reference(variant, case)) < TOLERANCE
