"""Whether a kernel computes the right numbers: what it must pass before it is timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.tuning.workload import Feeds, Workload

RunFeeds = Callable[[Feeds], Sequence[NDArray[Any]]]

CHECKS: tuple[tuple[Workload, int], ...] = (
    (Workload(1, 1, 1), 0),
    (Workload(2, 37, 37), 5),
    (Workload(2, 65, 3), 0),
    (Workload(1, 233, 233), 0),
)
"""Workloads with the padding of their second row: one key, less than a tile, few queries at the
end, several tiles and chunks with a rest."""

TOLERANCE = 1e-5
"""Relative L2 error against float64: sums of a few hundred products of float32 stay below 2e-6."""


def check_kernel(variant: Any, run: RunFeeds, seed: int) -> str:
    """Compare a kernel with the float64 reference; returns what is wrong, "" if nothing."""
    for workload, padding in CHECKS:
        feeds = workload.feeds(variant, seed, padding=padding)
        wanted = variant.reference(**feeds)
        wanted = wanted if isinstance(wanted, tuple) else (wanted,)
        for spec, got, want in zip(variant.outputs, run(feeds), wanted, strict=True):
            error = relative_error(got, want)
            if not error < TOLERANCE:
                sizes = f"batch {workload.batch}, {workload.query_len} x {workload.kv_len}"
                return f"{spec.name} at {sizes}: relative error {error:.3g}, at most {TOLERANCE:g}"
    return ""


def compare(variant: Any, got: Sequence[NDArray[Any]], want: Sequence[NDArray[Any]]) -> str:
    """What differs between two kernels that both passed ``check_kernel``; "" if nothing."""
    for spec, mine, other in zip(variant.outputs, got, want, strict=True):
        error = relative_error(mine, other)
        # Both are within the tolerance of the same numbers.
        if not error < 2 * TOLERANCE:
            return f"{spec.name} at full size: relative error {error:.3g} against the defaults"
    return ""


def relative_error(got: NDArray[Any], want: NDArray[Any]) -> float:
    """Relative L2 error over the whole array; infinite entries must agree. NaN where they do not
    or something is NaN."""
    if got.shape != want.shape:
        return float("nan")
    infinite = np.isinf(want)
    if not np.array_equal(got[infinite], want[infinite]):
        return float("nan")
    finite = ~infinite
    difference = np.asarray(got, np.float64)[finite] - np.asarray(want, np.float64)[finite]
    scale = float(np.linalg.norm(np.asarray(want, np.float64)[finite]))
    return float(np.linalg.norm(difference)) / (scale or 1.0)
