"""CPU kernel of ``ai.subquad::BlockSelect``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from subquad.kernels.block_select.estimators import CAUSAL, POOLED, get_estimator
from subquad.kernels.block_select.semantics import BlockSelectVariant
from subquad.kernels.kernel import CpuTarget
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.parameters import VectorParameters
from subquad.kernels.templates.space import Space
from subquad.runtime.errors import Rejection

KERNEL_ESTIMATORS = (POOLED.name, CAUSAL.name)


@dataclass(frozen=True)
class BlockSelectCpuTemplate:
    """See ``TunableTemplate``."""

    def supports(self, variant: OperatorVariant) -> Rejection | None:
        if not isinstance(variant, BlockSelectVariant):
            return Rejection(f"not block selection: {variant.op_type}")
        if variant.estimator not in KERNEL_ESTIMATORS:
            known = ", ".join(KERNEL_ESTIMATORS)
            return Rejection(
                f"the CPU kernel has no estimator {variant.estimator!r}; it has: {known}"
            )
        return None

    def space(self, variant: OperatorVariant, target: CpuTarget) -> Space:
        return VectorParameters.space(target)

    def build(self, variant: OperatorVariant, target: CpuTarget, params: Mapping[str, int]) -> Any:
        from subquad.kernels.templates.block_select import Selection, emit_select
        from subquad.kernels.templates.function import attention_function
        from subquad.kernels.templates.products import Panel

        assert isinstance(variant, BlockSelectVariant)
        sizes = VectorParameters.defaults(target).override(params)
        selection = Selection(
            block=variant.block,
            sinks=variant.sinks,
            scale=variant.scale,
            softcap=variant.softcap,
            left=variant.window_left,
            right=variant.window_right,
            takes_previous=variant.estimator == CAUSAL.name,
            ranks_own=get_estimator(variant.estimator).reads_later_queries,
            panel=Panel(sizes.lanes, sizes.vectors),
        )
        return attention_function(
            variant, lambda buffers: emit_select(buffers, variant.heads, selection)
        )


TEMPLATE = BlockSelectCpuTemplate()
