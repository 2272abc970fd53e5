"""Exact attention: the site as it is.

    out_i = sum_j softmax_j(cap(scale * q_i . k_j)) v_j     over the keys i may see

Vaswani et al., 2017, https://arxiv.org/abs/1706.03762; a site of sigmoids keeps its sigmoids,
and a linear one stays linear.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from subquad.passes.calibrate.statistics import SiteStatistics
from subquad.passes.methods.base import OneNode, Parameters, Wanted
from subquad.passes.recognise.site import AttentionSite
from subquad.passes.site_variant import ExactVariant, exact_variant
from subquad.runtime.errors import Rejection


@dataclass(frozen=True)
class DenseParameters(Parameters):
    """None."""


@dataclass(frozen=True)
class DenseMethod(OneNode):
    """Keeps the attention exact; lowers to the best exact body for its mask."""

    name: str = "dense"
    paper: str = "Vaswani et al., 2017, https://arxiv.org/abs/1706.03762"
    parameters: type[DenseParameters] = DenseParameters

    def supports(self, site: AttentionSite, params: DenseParameters) -> Rejection | None:
        return None

    def lower(self, site: AttentionSite, params: DenseParameters) -> ExactVariant:
        return exact_variant(site)

    def candidates(
        self, site: AttentionSite, statistics: SiteStatistics, wanted: Wanted
    ) -> Sequence[DenseParameters] | Rejection:
        return Rejection("it is the exact attention")


METHOD = DenseMethod()
