"""What methods with a linear part have in common: the sites they decline, and how maps begin."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.operator import UNLIMITED
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection


def linear_rejection(site: AttentionSite) -> Rejection | None:
    """Why a site's keys cannot be summed up by features; ``None`` if they can."""
    if site.softcap:
        return Rejection(
            f"softcap {site.softcap:g}: linear attention forms no scores to cap",
            where=site.name,
        )
    if site.mask.window_left != UNLIMITED or site.mask.window_right > 0:
        return Rejection(
            f"mask is {site.mask.describe()}: a sum over past keys cannot forget them by "
            "distance, and a finite band is already linear in the length",
            where=site.name,
        )
    return None


def identity_maps(
    site: AttentionSite, map_dim: int, factor: float
) -> dict[str, NDArray[np.generic]]:
    """``query_map`` and ``key_map`` that copy the dims, times ``factor``, without bias.

    Outputs past ``head_dim`` copy the first dims again. Before calibration this keeps the order of
    a head's strongest keys: feature i of a query is large where dim i is.
    """
    weights = np.zeros((site.head_dim + 1, map_dim), dtype=np.float32)
    outputs = np.arange(map_dim)
    weights[outputs % site.head_dim, outputs] = factor
    return {
        "query_map": np.tile(weights, (site.num_heads, 1, 1)),
        "key_map": np.tile(weights, (site.num_kv_heads, 1, 1)),
    }
