"""Linear attention that stands alone: no normaliser, an epsilon, and its feature maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from oracles import Case, mask_of, prefix, random_case, reference, relative_error, run
from subquad.kernels.hybrid.semantics import HybridVariant

HEADS = (4, 2, 7, 5)
VARIANTS = [
    HybridVariant(
        *HEADS, 0.3, allowed_right=0, feature_map="identity", normaliser="none", has_key_mask=True
    ),
    HybridVariant(*HEADS, 1.0, feature_map="identity", normaliser="none", has_key_mask=True),
    HybridVariant(
        *HEADS,
        0.3,
        allowed_right=0,
        feature_map="identity",
        normaliser="none",
        has_decay=True,
        has_key_mask=True,
    ),
    HybridVariant(*HEADS, 0.5, feature_map="relu", normaliser="none"),
    HybridVariant(*HEADS, 1.0, allowed_right=0, feature_map="relu", epsilon=1e-6),
    HybridVariant(*HEADS, 1.0, feature_map="elu", epsilon=0.25, has_key_mask=True),
    HybridVariant(*HEADS, 1.0, allowed_right=0, feature_map="elu", epsilon=1e-6, has_key_mask=True),
    HybridVariant(*HEADS, 1.0, allowed_right=0, feature_map="relu", least=2.0, has_key_mask=True),
    HybridVariant(*HEADS, 1.0, feature_map="elu", epsilon=0.25, least=40.0),
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.overload)

# float32 sums of <= 1000 terms
TOLERANCE = 2e-6


def by_formula(variant: HybridVariant, case: Case) -> NDArray[np.float64]:
    """One query after the other, in float64."""
    maps: dict[str, Any] = {
        "identity": lambda x: x,
        "relu": lambda x: np.where(x > 0, x, 0.0),
        "elu": lambda x: np.where(x > 0, x + 1, np.exp(np.minimum(x, 0))),
    }
    feature_map = maps[variant.feature_map]
    batch, heads, query_len, _ = case.query.shape
    output = np.zeros((batch, heads, query_len, variant.value_dim))
    for b, h, i in np.ndindex(batch, heads, query_len):
        group = h // (heads // variant.num_kv_heads)
        total, sums = 0.0, np.zeros(variant.value_dim)
        for j in range(case.key.shape[2]):
            distance = int(case.query_positions[b, i] - case.key_positions[b, j])
            hidden = variant.has_key_mask and not case.key_mask[b, j]
            if hidden or (variant.allowed_right == 0 and distance < 0):
                continue
            q, k = (x.astype(np.float64) for x in (case.query[b, h, i], case.key[b, group, j]))
            weight = float(feature_map(q) @ feature_map(k))
            if variant.has_decay:
                weight *= float(np.exp(np.float64(case.extra["log_decay"][group]) * abs(distance)))
            total += weight
            sums += weight * case.value[b, group, j].astype(np.float64)
        if variant.normaliser == "none":
            output[b, h, i] = variant.scale * sums
        elif max(total + variant.epsilon, variant.least) > 0:
            output[b, h, i] = sums / max(total + variant.epsilon, variant.least)
    return output


@every_variant
@pytest.mark.parametrize("kind", ["none", "left", "holes", "empty_row"])
def test_reference_is_the_formula(variant: HybridVariant, kind: str) -> None:
    rng = np.random.default_rng(1)
    mask = mask_of(kind if variant.has_key_mask else "none", 2, 12, rng)
    case = random_case(rng, variant, query_len=9, kv_len=12, mask=mask)
    np.testing.assert_allclose(reference(variant, case), by_formula(variant, case), atol=1e-12)


@every_variant
@pytest.mark.parametrize(
    ("query_len", "kv_len"), [(1, 1), (7, 7), (63, 63), (64, 64), (65, 65), (5, 300), (1000, 1000)]
)
def test_body_is_the_reference(variant: HybridVariant, query_len: int, kv_len: int) -> None:
    rng = np.random.default_rng(3)
    for kind in ("none", "left", "holes", "empty_row") if variant.has_key_mask else ("none",):
        mask = mask_of(kind, 2, kv_len, rng)
        case = random_case(rng, variant, query_len=query_len, kv_len=kv_len, mask=mask)
        got, want = run(variant, case), reference(variant, case)
        assert relative_error(got, want) < TOLERANCE, kind
        hidden = ~np.broadcast_to(np.asarray(mask.any(axis=1))[:, None, None], got.shape[:3])
        assert not got[hidden].any(), "rows that see no key must be exact zeros"


def test_pieces_are_the_whole() -> None:
    variant = VARIANTS[0]
    rng = np.random.default_rng(6)
    case = random_case(rng, variant, query_len=150, mask=mask_of("left", 2, 150, rng))
    whole = run(variant, case)
    pieces = [run(variant, prefix(case, 0, 60)), run(variant, prefix(case, 60, 150))]
    assert relative_error(np.concatenate(pieces, axis=2), whole) < TOLERANCE


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feature_map": "identity"}, "may be negative is no normaliser"),
        ({"feature_map": "elu", "normaliser": "mean"}, "known: sum, none"),
        ({"feature_map": "elu", "normaliser": "none", "epsilon": 1e-6}, "belong to a sum"),
        ({"feature_map": "elu", "normaliser": "none", "least": 1e-6}, "belong to a sum"),
        ({"feature_map": "elu", "least": -1.0}, "must be 0 or more"),
        (
            {"feature_map": "elu", "epsilon": 1e-6, "window_left": 3, "window_right": 0},
            "stands alone",
        ),
    ],
)
def test_impossible_variants_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HybridVariant(*HEADS, 1.0, allowed_right=0, **changes)
