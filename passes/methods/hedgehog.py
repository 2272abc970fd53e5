"""Linear attention with Hedgehog's learned feature map.

    out_i = sum_j phi_q(q_i) . phi_k(k_j) v_j / sum_j phi_q(q_i) . phi_k(k_j)
    phi(x) = softmax([u, -u]),    u = x W + b

over the keys i may see; one map per query head and one per key/value head, on unscaled queries and
keys. Zhang et al., 2024, "The Hedgehog & the Porcupine" (https://arxiv.org/abs/2402.04347), eq. 6;
the normalisation and the start at W = 2 I, b = 0 are those of flash-linear-attention. The maps are
the initializers ``<site>.query_map`` and ``<site>.key_map``, ``[heads, head_dim + 1, dims]`` with b
in the last row. They are fitted by ``passes/calibrate/feature_fit.py``: as they start, they spread
weight far more than softmax does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from subquad.kernels.hybrid.feature_maps import HEDGEHOG
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.passes.calibrate.feature_fit import fit_feature_maps
from subquad.passes.calibrate.fitted import Fitted, Sample
from subquad.passes.calibrate.statistics import SiteStatistics
from subquad.passes.methods.base import OneNode, Parameters, Wanted, parameter
from subquad.passes.methods.hybrid_site import (
    hybrid_variant,
    identity_maps,
    linear_rejection,
)
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection

START = 2.0


@dataclass(frozen=True)
class HedgehogParameters(Parameters):
    """There are two features per output of the projection."""

    dims: int = parameter("outputs of the projection; 0: head dims", minimum=0, default=0)


@dataclass(frozen=True)
class HedgehogMethod(OneNode):
    """Replaces softmax weights by products of learned features."""

    name: str = "hedgehog"
    paper: str = "Zhang et al., 2024, https://arxiv.org/abs/2402.04347"
    parameters: type[HedgehogParameters] = HedgehogParameters
    learns: bool = True

    def supports(self, site: AttentionSite, params: HedgehogParameters) -> Rejection | None:
        return linear_rejection(site)

    def lower(self, site: AttentionSite, params: HedgehogParameters) -> HybridVariant:
        return hybrid_variant(site, feature_map=HEDGEHOG.name, map_dim=params.dims or site.head_dim)

    def tensors(
        self, site: AttentionSite, params: HedgehogParameters
    ) -> Mapping[str, NDArray[np.generic]]:
        return identity_maps(site, params.dims or site.head_dim, START)

    def calibrate(
        self, site: AttentionSite, params: HedgehogParameters, samples: Sequence[Sample]
    ) -> Fitted:
        variant = self.lower(site, params)
        return fit_feature_maps(site, variant, self.tensors(site, params), samples)

    def candidates(
        self, site: AttentionSite, statistics: SiteStatistics, wanted: Wanted
    ) -> Sequence[HedgehogParameters] | Rejection:
        return [HedgehogParameters()]


METHOD = HedgehogMethod()
