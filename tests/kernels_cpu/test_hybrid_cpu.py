"""The hybrid CPU kernel against the float64 reference, and its exactness properties."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import kernel_cases
from oracles import mask_of, prefix, random_case, reference, relative_error
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.hybrid.cpu import TEMPLATE
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.templates.parameters import CPU_FEATURE_MAPS

RunKernel = Callable[..., NDArray[np.float32]]

LINEAR = HybridVariant(2, 1, 64, 64, 0.125, allowed_right=0, feature_map="elu")
HYBRID = HybridVariant(
    4, 2, 24, 20, 0.3, 40, 0, sinks=4, allowed_right=0, feature_map="elu", has_key_mask=True
)
ODD_HYBRID = HybridVariant(3, 3, 5, 7, 0.4, 9, 0, allowed_right=0, feature_map="elu")
SINKS_AND_LINEAR = HybridVariant(
    2, 2, 8, 8, 0.3, sinks=3, allowed_right=0, feature_map="elu", has_key_mask=True
)
ALL_KEYS = HybridVariant(4, 2, 24, 20, 0.3, feature_map="elu", has_key_mask=True)
EXACT = HybridVariant(6, 2, 16, 16, 0.25, 30, 0, sinks=4, allowed_right=0, has_key_mask=True)
EXACT_BAND = HybridVariant(
    2, 2, 8, 8, 0.3, 3, 2, sinks=9, allowed_left=50, allowed_right=6, has_key_mask=True
)
ONLY_SINKS = HybridVariant(2, 2, 8, 8, 0.3, sinks=4, allowed_right=0, has_key_mask=True)
HEDGEHOG = HybridVariant(
    6, 2, 24, 20, 0.3, 40, 0, 4, -1, 0, "hedgehog", "shared", has_key_mask=True, map_dim=20
)
HEDGEHOG_ONLY = HybridVariant(
    2, 2, 32, 32, 0.2, allowed_right=0, feature_map="hedgehog", map_dim=24, has_decay=True
)
TWO_SIDES = HybridVariant(
    2, 1, 9, 20, 0.3, 10, 7, 4, -1, -1, "softmax_pair", "lse", True, map_dim=5, has_decay=True
)
BOTH_WAYS = HybridVariant(2, 2, 8, 8, 0.3, feature_map="elu", has_key_mask=True, has_decay=True)
MIXED = HybridVariant(
    4,
    2,
    9,
    20,
    0.3,
    allowed_right=0,
    feature_map="hedgehog",
    mix="shared",
    has_key_mask=True,
    map_dim=5,
    head_parts=((20, 0, 3, 1), (-1, -1, 0, 0), (9, 0, 2, 0), (-1, -1, 3, 1)),
)
VARIANTS = [
    LINEAR,
    HYBRID,
    ODD_HYBRID,
    SINKS_AND_LINEAR,
    ALL_KEYS,
    EXACT,
    EXACT_BAND,
    ONLY_SINKS,
    HEDGEHOG,
    HEDGEHOG_ONLY,
    BOTH_WAYS,
    # These compile for 15 seconds each.
    pytest.param(TWO_SIDES, marks=pytest.mark.slow),
    pytest.param(MIXED, marks=pytest.mark.slow),
]
LENGTHS = [1, 7, 63, 64, 65, 200, 300]

# float32 sums of <= 300 terms, weights to 2e-7 each
TOLERANCE = 1e-6


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.overload)
def test_kernel_equals_reference(run_kernel: RunKernel, variant: HybridVariant) -> None:
    rng = np.random.default_rng(0)
    kinds = ("none", "left", "right", "holes", "empty_row")
    for sizes, case in kernel_cases.cases(rng, variant, LENGTHS, kinds):
        got, want = run_kernel(variant, case), reference(variant, case)
        assert relative_error(got, want) < TOLERANCE, sizes
        assert not got[want == 0.0].any(), "rows that see no key must be exact zeros"


@pytest.mark.parametrize("gain", [6.0, 20.0])
def test_parts_of_very_different_size(run_kernel: RunKernel, gain: float) -> None:
    """Exact scores to +-100 and beyond beside a linear part, one of them often negligible."""
    rng = np.random.default_rng(2)
    case = random_case(rng, ODD_HYBRID, query_len=150, gain=gain)
    # float32 scores of size 100 are off by 100 * 2^-24
    assert relative_error(run_kernel(ODD_HYBRID, case), reference(ODD_HYBRID, case)) < 2e-5


@pytest.mark.parametrize(
    "variant", [LINEAR, HYBRID, EXACT_BAND, HEDGEHOG], ids=lambda v: v.overload
)
def test_hidden_keys_never_matter(run_kernel: RunKernel, variant: HybridVariant) -> None:
    """To the bit: a query's output does not move when a key it may not see changes."""
    rng = np.random.default_rng(3)
    length = 170
    case = random_case(rng, variant, query_len=length, mask=mask_of("holes", 2, length, rng))
    before = run_kernel(variant, case)
    for slot in (0, 15, 16, 31, 32, 100, 143, 169):

        def disturb(array: NDArray[Any], slot: int = slot) -> None:
            array[:, :, slot] = 1e2

        after = run_kernel(variant, case.edited("key", disturb).edited("value", disturb))
        distance = case.query_positions - case.key_positions[:, slot : slot + 1]
        seen = -distance <= variant.allowed_right
        if variant.allowed_left >= 0:
            seen &= distance <= variant.allowed_left
        if variant.feature_map == "none":
            position = case.key_positions[:, slot : slot + 1]
            in_window = (distance <= variant.window_left) & (-distance <= variant.window_right)
            seen &= in_window | ((position >= 0) & (position < variant.sinks))
        if variant.has_key_mask:
            seen &= case.key_mask[:, slot : slot + 1]
        hidden = np.broadcast_to(~seen[:, None, :, None], before.shape)
        assert np.array_equal(before[hidden], after[hidden])


@pytest.mark.parametrize("variant", [HYBRID, ALL_KEYS, EXACT, BOTH_WAYS], ids=lambda v: v.overload)
def test_padding_may_hold_anything(run_kernel: RunKernel, variant: HybridVariant) -> None:
    """Padded keys are never read, not even multiplied by zero."""
    rng = np.random.default_rng(4)
    case = random_case(rng, variant, query_len=150, mask=mask_of("holes", 2, 150, rng))

    def poison(array: NDArray[Any]) -> None:
        array[~np.broadcast_to(case.key_mask[:, None], array.shape[:3])] = np.nan

    poisoned = case.edited("key", poison).edited("value", poison)
    assert np.array_equal(run_kernel(variant, case), run_kernel(variant, poisoned))


@pytest.mark.parametrize(
    "params",
    [
        {"min_tasks": 1, "chunk": 24},
        {"min_tasks": 64, "chunk": 10, "vectors": 3, "rows": 4, "state_vectors": 1},
    ],
    ids=str,
)
def test_any_cut_of_the_sequence_gives_the_same(
    run_kernel: RunKernel, params: dict[str, int]
) -> None:
    rng = np.random.default_rng(6)
    for kind in ("holes", "left"):
        for query_len, kv_len in ((300, 300), (90, 300), (1, 300)):
            mask = mask_of(kind, 2, kv_len, rng)
            case = random_case(rng, HYBRID, query_len=query_len, kv_len=kv_len, mask=mask)
            got = run_kernel(HYBRID, case, params)
            assert relative_error(got, reference(HYBRID, case)) < TOLERANCE


@pytest.mark.parametrize("variant", [HEDGEHOG, HEDGEHOG_ONLY], ids=lambda v: v.overload)
def test_prefill_equals_prefill_in_pieces(run_kernel: RunKernel, variant: HybridVariant) -> None:
    rng = np.random.default_rng(7)
    case = random_case(rng, variant, query_len=150, mask=mask_of("left", 2, 150, rng))
    cuts = [0, 1, 2, 35, 140, 150]
    pieces = [
        run_kernel(variant, prefix(case, start, end))
        for start, end in zip(cuts, cuts[1:], strict=False)
    ]
    together = np.concatenate(pieces, axis=2)
    assert relative_error(together, run_kernel(variant, case)) < TOLERANCE


def test_error_is_that_of_float32_attention(run_kernel: RunKernel) -> None:
    """Against torch's own float32 on the same formula: features, prefix sums, quotient."""
    rng = np.random.default_rng(8)
    variant = HybridVariant(
        2, 2, 64, 64, 0.125, allowed_right=0, feature_map="hedgehog", map_dim=64
    )
    case = random_case(rng, variant, batch=1, query_len=1000)
    q, k, v = (torch.from_numpy(x) for x in (case.query, case.key, case.value))
    features = []
    for x, name in ((q, "query_map"), (k, "key_map")):
        weights = torch.from_numpy(case.extra[name])
        u = x @ weights[:, :-1] + weights[:, -1:]
        features.append(torch.cat([u, -u], dim=-1).softmax(dim=-1))
    similarity = (features[0] @ features[1].mT).tril()
    other = ((similarity @ v) / similarity.sum(dim=-1, keepdim=True)).numpy()
    want = reference(variant, case)
    assert relative_error(run_kernel(variant, case), want) < 2 * relative_error(other, want)


def test_what_is_missing_is_rejected_with_a_reason() -> None:
    rejection = TEMPLATE.supports(AttentionVariant(2, 2, 8, 8, 0.3))
    assert rejection is not None and "Attention" in rejection.reason


def test_feature_maps_are_those_with_code() -> None:
    pytest.importorskip("tvm", reason="apache-tvm is not installed")
    from subquad.kernels.templates.feature_kernels import FEATURE_KERNELS

    assert tuple(FEATURE_KERNELS) == CPU_FEATURE_MAPS
