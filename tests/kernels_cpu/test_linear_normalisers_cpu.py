"""Linear attention that stands alone: the CPU kernel against the float64 reference."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

import kernel_cases
from oracles import reference, relative_error
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


@kernel_cases.every_variant(SOME, OTHERS)
def test_kernel_equals_reference(run_kernel: RunKernel, variant: HybridVariant) -> None:
    rng = np.random.default_rng(0)
    for sizes, case in kernel_cases.cases(rng, variant):
        got, want = run_kernel(variant, case), reference(variant, case)
        # float32 sums of <= 200 terms
        assert relative_error(got, want) < 2e-6, sizes
        sees_any = np.asarray(case.key_mask.any(axis=1))[:, None, None]
        assert not got[np.broadcast_to(~sees_any, got.shape[:3])].any()
