"""CPU kernels of ``ai.subquad::HybridState`` and ``HybridDecode``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from subquad.kernels.hybrid.feature_maps import NONE
from subquad.kernels.hybrid_decode.semantics import (
    HybridDecodeVariant,
    HybridStateVariant,
    StateVariant,
)
from subquad.kernels.kernel import CpuTarget
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.parameters import VectorParameters
from subquad.kernels.templates.space import Space
from subquad.runtime.errors import Rejection

FEATURE_MAPS = ("elu", "hedgehog", "softmax_pair")
"""Those of ``kernels/templates/line_features.py``."""


@dataclass(frozen=True)
class DecodeCpuTemplate:
    """See ``TunableTemplate``; serves both operators."""

    def supports(self, variant: OperatorVariant) -> Rejection | None:
        if not isinstance(variant, StateVariant):
            return Rejection(f"not a hybrid decode step: {variant.op_type}")
        if variant.feature_map not in (NONE, *FEATURE_MAPS):
            known = ", ".join(FEATURE_MAPS)
            return Rejection(
                f"the decode kernel has no feature map {variant.feature_map!r}; it has: {known}"
            )
        return None

    def space(self, variant: OperatorVariant, target: CpuTarget) -> Space:
        return VectorParameters.space(target)

    def build(self, variant: OperatorVariant, target: CpuTarget, params: Mapping[str, int]) -> Any:
        from subquad.kernels.templates.function import attention_function
        from subquad.kernels.templates.hybrid_state import emit_state
        from subquad.kernels.templates.products import Panel
        from subquad.kernels.templates.rows import Buffers
        from subquad.kernels.templates.steps import emit_decode

        assert isinstance(variant, (HybridStateVariant, HybridDecodeVariant))
        sizes = VectorParameters.defaults(target).override(params)
        panel = Panel(sizes.lanes, sizes.vectors)
        emit = emit_decode if isinstance(variant, HybridDecodeVariant) else emit_state

        def body(buffers: Buffers) -> None:
            emit(buffers, variant, panel)

        return attention_function(variant, body)


TEMPLATE = DecodeCpuTemplate()
