"""Bodies that mix an exact and a linear part, also those no method lowers to yet."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from oracles import Case, mask_of, prefix, random_case, reference, relative_error, run
from subquad.kernels.hybrid.semantics import HeadPart, HybridVariant
from subquad.kernels.visibility import in_band

SIZES = (4, 2, 7, 5, 0.3)
CAUSAL = [
    HybridVariant(*SIZES, 0, 0, 1, -1, 0, "elu", has_key_mask=True),
    HybridVariant(*SIZES, 5, 0, 0, -1, 0, "elu", has_key_mask=True),
    HybridVariant(*SIZES, 5, 0, 4, -1, 0, "elu", has_key_mask=True),
    HybridVariant(*SIZES, 64, 0, 2, -1, 0, "elu", has_key_mask=True),
    HybridVariant(*SIZES, -1, -1, 3, -1, 0, "elu", has_key_mask=True),
    HybridVariant(*SIZES, -1, -1, 0, -1, 0, "elu", has_key_mask=True),
    HybridVariant(*SIZES, -1, -1, 3, -1, 0, has_key_mask=True),
    HybridVariant(*SIZES, 5, 0, 3, 30, 0, has_key_mask=True),
    HybridVariant(*SIZES, -1, -1, 0, -1, 0, "hedgehog", has_key_mask=True, map_dim=6),
    HybridVariant(*SIZES, 5, 0, 2, -1, 0, "hedgehog", has_key_mask=True, map_dim=6, has_decay=True),
    HybridVariant(*SIZES, 64, 0, 0, -1, 0, "softmax_pair", "shared", True, map_dim=3),
    HybridVariant(
        *SIZES,
        allowed_right=0,
        feature_map="hedgehog",
        mix="shared",
        has_key_mask=True,
        map_dim=6,
        has_decay=True,
        head_parts=((5, 0, 0, 1), (-1, -1, 0, 0), (5, 0, 2, 0), (-1, -1, 0, 1)),
    ),
]
FULL = [
    HybridVariant(*SIZES, 0, 0, 0, -1, -1, "elu", has_key_mask=True),
    HybridVariant(*SIZES, 5, 5, 3, -1, -1, "elu", has_key_mask=True),
    HybridVariant(*SIZES, 64, 3, 0, -1, -1, "elu", has_key_mask=True),
    HybridVariant(*SIZES, -1, -1, 3, -1, -1, "elu", has_key_mask=True),
    HybridVariant(*SIZES, -1, -1, 3, -1, -1, has_key_mask=True),
    HybridVariant(*SIZES, 5, 5, 3, 30, 30, has_key_mask=True),
    HybridVariant(*SIZES, feature_map="hedgehog", has_key_mask=True, map_dim=6, has_decay=True),
    HybridVariant(*SIZES, 5, 2, 2, feature_map="elu", has_key_mask=True, has_decay=True),
    HybridVariant(*SIZES, 5, 2, 2, -1, -1, "softmax_pair", "shared", True, map_dim=6),
    HybridVariant(
        *SIZES,
        feature_map="elu",
        has_key_mask=True,
        head_parts=((5, 2, 0, 1), (5, 2, 0, 1), (-1, -1, 0, 0), (3, 0, 2, 0)),
    ),
]
every_variant = pytest.mark.parametrize("variant", CAUSAL + FULL, ids=lambda v: v.overload)
causal_variants = pytest.mark.parametrize("variant", CAUSAL, ids=lambda v: v.overload)

# float32 against float64; seen 7e-7.
TOLERANCE = 2e-6


def seen_keys(variant: HybridVariant, part: HeadPart, case: Case) -> NDArray[np.bool_]:
    """Keys that move a head's output, ``[batch, query_len, kv_len]``."""
    positions = (case.query_positions, case.key_positions)
    seen = in_band(*positions, variant.allowed_left, variant.allowed_right)
    if not part.linear and not part.is_dense:
        near = in_band(*positions, part.window_left, part.window_right) & part.has_window
        sinks = (case.key_positions >= 0) & (case.key_positions < part.sinks)
        seen &= near | sinks[:, None]
    return seen & case.key_mask[:, None]


@every_variant
@pytest.mark.parametrize(
    ("query_len", "kv_len"), [(1, 1), (7, 7), (64, 64), (65, 65), (200, 200), (1, 90), (70, 200)]
)
@pytest.mark.parametrize("kind", ["none", "left", "holes", "empty_row"])
def test_matches_reference(variant: HybridVariant, query_len: int, kv_len: int, kind: str) -> None:
    rng = np.random.default_rng(3)
    mask = mask_of(kind, 2, kv_len, rng)
    case = random_case(rng, variant, query_len=query_len, kv_len=kv_len, mask=mask)
    got, want = run(variant, case), reference(variant, case)
    assert relative_error(got, want) < TOLERANCE
    assert not got[want == 0.0].any()


@every_variant
def test_each_row_matches_where_the_parts_differ_in_size(variant: HybridVariant) -> None:
    """Row by row, with scores of +-100: the exact part outweighs the linear one or vanishes."""
    rng = np.random.default_rng(4)
    case = random_case(rng, variant, query_len=150)
    case = case.with_(query=case.query * np.float32(25.0))
    got, want = run(variant, case), reference(variant, case)
    worst = np.abs(got - want).max(axis=-1) / np.maximum(np.abs(want).max(axis=-1), 1e-3)
    # A score near 100 carries a float32 error near 1e-5; sums of one row average nothing out.
    assert np.quantile(worst, 0.99) < 5e-5


@every_variant
def test_an_unseen_token_moves_no_bit(variant: HybridVariant) -> None:
    rng = np.random.default_rng(5)
    case = random_case(rng, variant, query_len=140, mask=mask_of("holes", 2, 140, rng))
    seen = np.stack([seen_keys(variant, part, case) for part in variant.parts], axis=1)
    before = run(variant, case)
    for j in (0, 1, 2, 50, 63, 64, 65, 128, 139):
        changed = case.edited("key", lambda x, j=j: x[:, :, j].fill(3.7))  # type: ignore[misc]
        changed = changed.edited("value", lambda x, j=j: x[:, :, j].fill(-91.0))  # type: ignore[misc]
        moved = (run(variant, changed) != before).any(axis=3)
        assert np.array_equal(moved, seen[:, :, :, j])


@causal_variants
def test_prefill_equals_decoding(variant: HybridVariant) -> None:
    rng = np.random.default_rng(6)
    case = random_case(rng, variant, query_len=150, mask=mask_of("left", 2, 150, rng))
    cuts = [0, 1, 2, 13, 77, 78, 141, 149, 150]
    pieces = [
        run(variant, prefix(case, start, end)) for start, end in zip(cuts, cuts[1:], strict=False)
    ]
    assert relative_error(np.concatenate(pieces, axis=2), run(variant, case)) < TOLERANCE
