"""What methods that lower to ``HybridAttention`` have in common.

The variant of a site, the sites that a window or a linear part cannot serve, and how maps begin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.operator import UNLIMITED
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection


def hybrid_variant(site: AttentionSite, **fields: Any) -> HybridVariant:
    """Hybrid attention of the sizes, scale and mask of ``site``, with ``fields`` set."""
    return HybridVariant(
        num_heads=site.num_heads,
        num_kv_heads=site.num_kv_heads,
        head_dim=site.head_dim,
        value_dim=site.value_dim,
        scale=site.scale,
        allowed_left=site.mask.window_left,
        allowed_right=site.mask.window_right,
        has_key_mask=site.mask.key_padding,
        **fields,
    )


def window_limits(site: AttentionSite, size: int) -> tuple[int, int]:
    """Exact window of ``size``, which counts the query itself on causal sites and else is the
    reach to each side; never beyond the site's own band."""
    reach = size - 1 if site.mask.is_causal else size
    left, right = site.mask.window_left, site.mask.window_right
    return (
        reach if left == UNLIMITED else min(reach, left),
        reach if right == UNLIMITED else min(reach, right),
    )


def window_rejection(site: AttentionSite) -> Rejection | None:
    """Why a window has no meaning at a site; ``None`` if it has one."""
    if site.is_self:
        return None
    return Rejection(
        "cross-attention: query and key positions belong to different sequences, so a window has "
        "no meaning",
        where=site.name,
    )


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
