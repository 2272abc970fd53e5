"""Linear attention that stands alone: the CPU kernel against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from oracles import mask_of, random_case, reference, relative_error
from subquad.kernels.hybrid.semantics import HybridVariant

RunKernel = Callable[..., NDArray[np.float32]]

HEADS = (4, 2, 7, 5)
SOME = [
    HybridVariant(
        *HEADS, 0.3, allowed_right=0, feature_map="identity", normaliser="none", has_key_mask=True
    ),
    HybridVariant(*HEADS, 1.0, feature_map="relu", epsilon=0.25, least=2.0, has_key_mask=True),
]
OTHERS = [
    HybridVariant(
        *HEADS, 0.3, allowed_right=0, feature_map="identity", normaliser="none", has_decay=True
    ),
    HybridVariant(2, 2, 64, 64, 1.0, allowed_right=0, feature_map="elu", epsilon=1e-6),
]


# Compiling a kernel takes seconds.
@pytest.mark.parametrize(
    "variant",
    [*SOME, *(pytest.param(variant, marks=pytest.mark.slow) for variant in OTHERS)],
    ids=lambda v: v.overload,
)
def test_kernel_equals_reference(run_kernel: RunKernel, variant: HybridVariant) -> None:
    rng = np.random.default_rng(0)
    kinds = ("none", "left", "holes", "empty_row") if variant.has_key_mask else ("none",)
    for length in (1, 7, 63, 64, 65, 200):
        for kind in kinds:
            for query_len in {length, -(-length // 3)}:
                mask = mask_of(kind, 2, length, rng)
                case = random_case(rng, variant, query_len=query_len, kv_len=length, mask=mask)
                got, want = run_kernel(variant, case), reference(variant, case)
                # float32 sums of <= 200 terms
                assert relative_error(got, want) < 2e-6, (query_len, length, kind)
                hidden = ~np.broadcast_to(
                    np.asarray(mask.any(axis=1))[:, None, None], got.shape[:3]
                )
                assert not got[hidden].any()
