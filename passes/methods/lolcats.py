"""Sliding window of exact softmax, learned linear attention for everything older (LoLCATs).

    out_i = (g sum_E e^(s_ij - m_i) v_j + sum_R phi_q(q_i) . phi_k(k_j) v_j)
          / (g sum_E e^(s_ij - m_i)     + sum_R phi_q(q_i) . phi_k(k_j)),    m_i = max_E s_ij
    phi(x) = [softmax(u), softmax(-u)],    u = x W + b

with E the window (and sinks, which the paper does not have) and R all other keys that i may see.
Zhang et al., 2024, "LoLCATs" (https://arxiv.org/abs/2410.10254), its sliding form; the start at
g = sigmoid(-2.197) = 0.1 is that of the public code. ``mix=lse`` shares the normaliser in
log-sum-exp instead, without g: then the balance of the two parts does not move with the window's
maximum, and the result is softmax if phi_q . phi_k = e^s.

``g`` is the initializer ``<site>.window_gain``, the maps are ``<site>.query_map`` and
``<site>.key_map``, ``[heads, head_dim + 1, dims]`` with b in the last row (the paper has none; it
starts at 0, as does W at the identity). They are fitted by ``passes/calibrate/feature_fit.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.hybrid.feature_maps import SOFTMAX_PAIR
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.passes.calibrate.feature_fit import fit_feature_maps
from subquad.passes.calibrate.fitted import Fitted, Sample
from subquad.passes.calibrate.statistics import SiteStatistics
from subquad.passes.methods.base import OneNode, Parameters, Wanted, choice, parameter
from subquad.passes.methods.hybrid_site import (
    hybrid_variant,
    identity_maps,
    linear_rejection,
    window_limits,
    window_rejection,
)
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection

START_GAIN = 0.1
START = 1.0

SIZES = (64, 256)
"""Windows that the planner tries; with sinks, since features cannot follow the mass on them."""
SINKS = 4


@dataclass(frozen=True)
class LolcatsParameters(Parameters):
    """``size`` counts the query itself on causal sites; else it is the reach to each side."""

    size: int = parameter(
        "exact positions including the query; on bidirectional sites, positions to each side",
        minimum=1,
        default=64,
    )
    sinks: int = parameter("first tokens that stay exact", minimum=0, default=0)
    dims: int = parameter("outputs of the projection; 0: head dims", minimum=0, default=0)
    mix: str = choice("how the parts share a normaliser", "shared", "lse", default="shared")


@dataclass(frozen=True)
class LolcatsMethod(OneNode):
    """Keeps a window exact and sums up the rest by features."""

    name: str = "lolcats"
    paper: str = "Zhang et al., 2024, https://arxiv.org/abs/2410.10254"
    parameters: type[LolcatsParameters] = LolcatsParameters
    learns: bool = True

    def supports(self, site: AttentionSite, params: LolcatsParameters) -> Rejection | None:
        return window_rejection(site) or linear_rejection(site)

    def lower(self, site: AttentionSite, params: LolcatsParameters) -> HybridVariant:
        left, right = window_limits(site, params.size)
        return hybrid_variant(
            site,
            window_left=left,
            window_right=right,
            sinks=params.sinks,
            feature_map=SOFTMAX_PAIR.name,
            mix=params.mix,
            map_dim=params.dims or site.head_dim,
        )

    def tensors(
        self, site: AttentionSite, params: LolcatsParameters
    ) -> Mapping[str, NDArray[np.generic]]:
        tensors = identity_maps(site, params.dims or site.head_dim, START)
        if params.mix == "shared":
            tensors["window_gain"] = np.full(site.num_heads, START_GAIN, dtype=np.float32)
        return tensors

    def calibrate(
        self, site: AttentionSite, params: LolcatsParameters, samples: Sequence[Sample]
    ) -> Fitted:
        variant = self.lower(site, params)
        return fit_feature_maps(site, variant, self.tensors(site, params), samples)

    def candidates(
        self, site: AttentionSite, statistics: SiteStatistics, wanted: Wanted
    ) -> Sequence[LolcatsParameters] | Rejection:
        found = [LolcatsParameters(size, SINKS) for size in SIZES if size < max(wanted.lengths)]
        return found or Rejection(f"these lengths lie within a window of {SIZES[0]} tokens")


METHOD = LolcatsMethod()
