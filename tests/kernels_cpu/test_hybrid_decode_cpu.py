"""The CPU kernels of the decode step against their references, and against prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from decoding import HYBRIDS, decode, operators_of, past, piece
from oracles import mask_of, random_case, reference, relative_error
from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.hybrid_decode.cpu import FEATURE_MAPS, TEMPLATE

RunFeeds = Callable[..., list[NDArray[Any]]]

REAL_SIZES = HybridVariant(3, 1, 64, 80, 0.125, 63, 0, 4, -1, 0, "elu", has_key_mask=True)

# float32 sums of <= 130 terms
TOLERANCE = 1e-6


FAST = (HYBRIDS[0], HYBRIDS[8], REAL_SIZES)
"""Compiling a kernel takes seconds; the others are slow tests."""


@pytest.mark.parametrize(
    "variant",
    [*FAST, *(pytest.param(x, marks=pytest.mark.slow) for x in HYBRIDS if x not in FAST)],
    ids=lambda v: v.overload,
)
def test_kernels_equal_the_reference(run_kernel_feeds: RunFeeds, variant: HybridVariant) -> None:
    rng = np.random.default_rng(2)
    first, step = operators_of(variant)
    kinds = ("none", "left", "holes", "empty_row") if variant.has_key_mask else ("none",)
    for kind in kinds:
        case = random_case(rng, variant, query_len=130, mask=mask_of(kind, 2, 130, rng))
        for cut, length in ((1, 1), (3, 80), (110, 20)):
            feeds = piece(case, first, 0, cut)
            state = list(first.reference(**feeds))
            for spec, have, want in zip(
                first.state, run_kernel_feeds(first, feeds), state, strict=True
            ):
                assert relative_error(have, want) < TOLERANCE, (spec.name, kind, cut)
            state = [array.astype(np.float32) for array in state]
            feeds = piece(case, step, cut, cut + length) | past(step, state)
            got, wanted = run_kernel_feeds(step, feeds), step.reference(**feeds)
            for spec, have, want in zip(step.outputs, got, wanted, strict=True):
                assert relative_error(have, want) < TOLERANCE, (spec.name, kind, cut, length)
            assert not got[0][wanted[0] == 0.0].any(), "rows that see no key must be exact zeros"


@pytest.mark.parametrize("variant", FAST[:2], ids=lambda v: v.overload)
def test_prefill_equals_decoding(run_kernel_feeds: RunFeeds, variant: HybridVariant) -> None:
    rng = np.random.default_rng(3)
    mask = mask_of("left" if variant.has_key_mask else "none", 2, 150, rng)
    case = random_case(rng, variant, query_len=150, mask=mask)
    whole = reference(variant, case)
    cuts = [60, 61, 62, 70, *range(120, 151)]
    got, _ = decode(variant, case, cuts, run_kernel_feeds)
    assert relative_error(got, whole[:, :, 60:]) < TOLERANCE


@pytest.mark.parametrize("gain", [6.0, 20.0])
def test_parts_of_very_different_size(run_kernel_feeds: RunFeeds, gain: float) -> None:
    """Exact scores to +-100 and beyond beside a linear part, one of them often negligible."""
    rng = np.random.default_rng(4)
    variant = HYBRIDS[0]
    case = random_case(rng, variant, query_len=120, gain=gain)
    got, _ = decode(variant, case, [50, 120], run_kernel_feeds)
    # float32 scores of size 100 are off by 100 * 2^-24
    assert relative_error(got, reference(variant, case)[:, :, 50:]) < 2e-5


def test_padding_may_hold_anything(run_kernel_feeds: RunFeeds) -> None:
    """Padded keys are never read, nor are slots of the window that hold them."""
    rng = np.random.default_rng(5)
    variant = HYBRIDS[0]
    case = random_case(rng, variant, query_len=90, mask=mask_of("holes", 2, 90, rng))

    def poison(array: NDArray[Any]) -> None:
        array[~np.broadcast_to(case.key_mask[:, None], array.shape[:3])] = np.nan

    poisoned = case.edited("key", poison).edited("value", poison)
    cuts = [30, 31, 50, 90]
    clean, _ = decode(variant, case, cuts, run_kernel_feeds)
    dirty, state = decode(variant, poisoned, cuts, run_kernel_feeds)
    assert np.array_equal(clean, dirty)
    named = dict(zip((spec.name for spec in operators_of(variant)[1].state), state, strict=True))
    assert np.isfinite(named["linear_state"]).all()


def test_other_operators_are_rejected_with_a_reason() -> None:
    rejection = TEMPLATE.supports(AttentionVariant(2, 2, 8, 8, 0.3))
    assert rejection is not None and "Attention" in rejection.reason


def test_feature_maps_are_those_with_code() -> None:
    pytest.importorskip("tvm", reason="apache-tvm is not installed")
    from subquad.kernels.templates.line_features import STEP_FEATURES

    assert tuple(STEP_FEATURES) == FEATURE_MAPS
