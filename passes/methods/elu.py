"""Linear attention with the feature map elu + 1.

    out_i = sum_j phi(q_i) . phi(k_j) v_j / sum_j phi(q_i) . phi(k_j),    phi(x) = elu(x) + 1

over the keys i may see; phi is applied to unscaled queries and keys. Katharopoulos et al., 2020,
"Transformers are RNNs", eq. 7 (https://arxiv.org/abs/2006.16236). It has nothing to calibrate and
its weights do not follow softmax's: on a trained model it needs fine-tuning, and serves as the
smoke test of the linear path and as a baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from subquad.kernels.hybrid.feature_maps import ELU
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.passes.calibrate.statistics import SiteStatistics
from subquad.passes.methods.base import OneNode, Parameters, Wanted
from subquad.passes.methods.hybrid_site import hybrid_variant, linear_rejection
from subquad.passes.recognise.site import AttentionSite
from subquad.runtime.errors import Rejection


@dataclass(frozen=True)
class EluParameters(Parameters):
    """None."""


@dataclass(frozen=True)
class EluMethod(OneNode):
    """Replaces softmax weights by products of elu + 1 features."""

    name: str = "elu"
    paper: str = "Katharopoulos et al., 2020, https://arxiv.org/abs/2006.16236"
    parameters: type[EluParameters] = EluParameters

    def supports(self, site: AttentionSite, params: EluParameters) -> Rejection | None:
        return linear_rejection(site)

    def lower(self, site: AttentionSite, params: EluParameters) -> HybridVariant:
        return hybrid_variant(site, feature_map=ELU.name)

    def candidates(
        self, site: AttentionSite, statistics: SiteStatistics, wanted: Wanted
    ) -> Sequence[EluParameters] | Rejection:
        return Rejection("its weights do not follow softmax's; it needs fine-tuning (use --force)")


METHOD = EluMethod()
