"""CPU kernel of ``ai.subquad::HybridAttention``.

Without a linear part it is the exact tile loop over window and sinks. With one, chunks of queries
run in order beside a state; see ``kernels/templates/linear.py`` and ``hybrid.py``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from subquad.kernels.hybrid.feature_maps import NONE
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.kernel import CpuTarget
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.parameters import (
    CPU_FEATURE_MAPS,
    HybridParameters,
    TileParameters,
)
from subquad.kernels.templates.space import Space
from subquad.runtime.errors import Rejection

if TYPE_CHECKING:
    from subquad.kernels.templates.dense import ExactSet
    from subquad.kernels.templates.hybrid import LinearPart
    from subquad.kernels.templates.rows import Buffers


@dataclass(frozen=True)
class HybridCpuTemplate:
    """See ``TunableTemplate``."""

    def supports(self, variant: OperatorVariant) -> Rejection | None:
        if not isinstance(variant, HybridVariant):
            return Rejection(f"not hybrid attention: {variant.op_type}")
        if variant.feature_map == NONE:
            return None
        if variant.feature_map not in CPU_FEATURE_MAPS:
            known = ", ".join(CPU_FEATURE_MAPS)
            return Rejection(
                f"the CPU kernel has no feature map {variant.feature_map!r}; it has: {known}"
            )
        if variant.has_window and not variant.is_causal:
            return Rejection(
                "the CPU kernel has no linear part on both sides of a window; "
                "it needs allowed_right = 0 or no window"
            )
        return None

    def space(self, variant: OperatorVariant, target: CpuTarget) -> Space:
        assert isinstance(variant, HybridVariant)
        names = set(HybridParameters.CHOICES)
        if variant.feature_map == NONE:
            names = set(TileParameters.CHOICES)
        else:
            # Panels follow from the chunk; without exact keys there are no blocks of them.
            names.discard("panels")
            if not variant.has_window and not variant.sinks:
                names.discard("keys")
        ordered = [name for name in HybridParameters.CHOICES if name in names]
        return HybridParameters.space(target, ordered)

    def build(self, variant: OperatorVariant, target: CpuTarget, params: Mapping[str, int]) -> Any:
        from subquad.kernels.templates.dense import emit_exact
        from subquad.kernels.templates.exact import exact_tile
        from subquad.kernels.templates.function import attention_function
        from subquad.kernels.templates.hybrid import emit_hybrid
        from subquad.kernels.templates.rows import list_keys

        assert isinstance(variant, HybridVariant)
        heads = variant.heads
        parameters = HybridParameters().override(params)
        exact_set = _exact_set(variant)

        def body(buffers: Buffers) -> None:
            if variant.feature_map == NONE:
                assert exact_set is not None
                keys, tile = list_keys(buffers), exact_tile(parameters)
                emit_exact(buffers, keys, heads, tile, exact_set, variant.scale)
                return
            part = _linear_part(variant, parameters)
            exact = None
            if exact_set is not None:
                exact = replace(exact_tile(parameters), panels=part.tile.panels), exact_set
            emit_hybrid(buffers, heads, part, exact, variant.scale)

        return attention_function(variant, body)


def _exact_set(variant: HybridVariant) -> ExactSet | None:
    from subquad.kernels.templates.dense import Band, ExactSet

    if not variant.has_window and not variant.sinks:
        return None
    window = Band(variant.window_left, variant.window_right) if variant.has_window else None
    allowed = Band(variant.allowed_left, variant.allowed_right)
    return ExactSet(window, variant.sinks, allowed)


def _linear_part(variant: HybridVariant, parameters: HybridParameters) -> LinearPart:
    from subquad.kernels.templates.hybrid import LinearPart
    from subquad.kernels.templates.linear import FEATURE_KERNELS, LinearTile
    from subquad.kernels.templates.products import Panel

    panel = Panel(parameters.lanes, parameters.vectors)
    group = variant.heads.group
    # Chunks are whole panels for all query heads of a key/value head together.
    step = panel.width // math.gcd(panel.width, group)
    queries = -(-parameters.chunk // step) * step
    tile = LinearTile(
        panel=panel,
        panels=queries * group // panel.width,
        queries=queries,
        rows=parameters.rows,
        state=Panel(parameters.lanes, parameters.state_vectors),
        state_rows=parameters.state_rows,
        unroll=parameters.unroll,
    )
    return LinearPart(
        tile=tile,
        feature=FEATURE_KERNELS[variant.feature_map],
        # Without a window, window_left is -1: the query's own token is counted.
        gap=variant.window_left + 1 if variant.is_causal else None,
        skipped_sinks=variant.sinks,
        min_tasks=parameters.min_tasks,
    )


TEMPLATE = HybridCpuTemplate()
