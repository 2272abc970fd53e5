"""Sliding window with attention sinks: exact softmax over fewer keys.

    out_i = sum_{j in E_i} softmax_{j in E_i}(scale * q_i . k_j) v_j
    E_i   = (keys within the window of i, or among the first ``sinks`` tokens) that i may see

Beltagy et al., 2020, "Longformer" (https://arxiv.org/abs/2004.05150) for the window; Xiao et al.,
2023, "Efficient Streaming Language Models with Attention Sinks"
(https://arxiv.org/abs/2309.17453) for keeping the first tokens, with which trained models park
weight they do not need. Rotary phases stay those of the original positions (the paper renumbers
positions inside its cache), since the model around the site is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.passes.calibrate.statistics import SiteStatistics
from subquad.passes.methods.base import OneNode, Parameters, Wanted, parameter
from subquad.passes.methods.hybrid_site import hybrid_variant, window_limits, window_rejection
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection

SMALLEST_WINDOW = 64
"""Smaller ones save little more: blocks of keys are at least this large."""

LEAST_MASS = 0.6
"""Mean over heads of the mass in window and sinks below which a window is not worth measuring."""


@dataclass(frozen=True)
class WindowParameters(Parameters):
    """``size`` counts the query itself on causal sites; else it is the reach to each side."""

    size: int = parameter(
        "visible positions including the query; on bidirectional sites, positions to each side",
        minimum=1,
    )
    sinks: int = parameter("first tokens that stay visible", minimum=0, default=4)


@dataclass(frozen=True)
class WindowMethod(OneNode):
    """Drops keys outside a sliding window and the sinks."""

    name: str = "window"
    paper: str = "Xiao et al., 2023, https://arxiv.org/abs/2309.17453"
    parameters: type[WindowParameters] = WindowParameters

    def supports(self, site: AttentionSite, params: WindowParameters) -> Rejection | None:
        meaningless = window_rejection(site)
        if meaningless is not None:
            return meaningless
        if site.softcap:
            return Rejection(
                f"softcap {site.softcap:g}: the hybrid operator has no softcap", where=site.name
            )
        left, right = window_limits(site, params.size)
        if (left, right) == (site.mask.window_left, site.mask.window_right):
            return Rejection(
                f"window {params.size} changes nothing: the site's mask is already "
                f"{site.mask.describe()}",
                where=site.name,
            )
        return None

    def lower(self, site: AttentionSite, params: WindowParameters) -> HybridVariant:
        left, right = window_limits(site, params.size)
        return hybrid_variant(site, window_left=left, window_right=right, sinks=params.sinks)

    def candidates(
        self, site: AttentionSite, statistics: SiteStatistics, wanted: Wanted
    ) -> Sequence[WindowParameters] | Rejection:
        """Powers of two of which some head keeps most of its mass."""
        found = []
        for size, mass in statistics.window_mass.items():
            kept = np.minimum(np.add(mass, statistics.sink_mass), 1.0)
            if SMALLEST_WINDOW <= size < max(wanted.lengths) and kept.mean() >= LEAST_MASS:
                found.append(WindowParameters(size=size))
        if not found:
            return Rejection(
                f"no window of up to {max(statistics.window_mass)} tokens below the length keeps "
                f"{LEAST_MASS:.0%} of the attention's mass"
            )
        return found


METHOD = WindowMethod()
