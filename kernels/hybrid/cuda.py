"""GPU kernel of ``ai.subquad::HybridAttention``.

The sibling of ``cpu.py``. Without a linear part it is the exact tile loop over window and sinks;
with one, three launches over chunks, see ``kernels/templates/gpu_linear.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from subquad.kernels.gpu import GpuTarget
from subquad.kernels.hybrid.feature_maps import NONE
from subquad.kernels.hybrid.semantics import HybridVariant
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.gpu_parameters import (
    GPU_FEATURE_MAPS,
    default_parameters,
    refuse_sizes,
)
from subquad.runtime.errors import Rejection

if TYPE_CHECKING:
    from subquad.kernels.templates.dense import ExactSet
    from subquad.kernels.templates.rows import Buffers

_KNOWN = (
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "value_dim",
    "scale",
    "window_left",
    "window_right",
    "sinks",
    "allowed_left",
    "allowed_right",
    "feature_map",
    "has_key_mask",
)
"""What the kernel knows of; any other choice must have its default."""


@dataclass(frozen=True)
class HybridGpuTemplate:
    """The GPU side of ``KernelTemplate``."""

    def supports(self, variant: OperatorVariant) -> Rejection | None:
        if not isinstance(variant, HybridVariant):
            return Rejection(f"not hybrid attention: {variant.op_type}")
        unknown = [
            field.name
            for field in fields(variant)
            if field.name not in _KNOWN and getattr(variant, field.name) != field.default
        ]
        if unknown:
            return Rejection(f"the GPU kernel does not know {', '.join(unknown)}")
        if variant.feature_map not in (NONE, *GPU_FEATURE_MAPS):
            known = ", ".join(GPU_FEATURE_MAPS)
            return Rejection(
                f"the GPU kernel has no feature map {variant.feature_map!r}; it has: {known}"
            )
        if variant.feature_map != NONE and variant.has_window and not variant.is_causal:
            return Rejection(
                "the GPU kernel has no linear part on both sides of a window; "
                "it needs allowed_right = 0 or no window"
            )
        return refuse_sizes(variant.heads)

    def build(self, variant: OperatorVariant, target: GpuTarget, params: Mapping[str, int]) -> Any:
        from subquad.kernels.templates.function import attention_function
        from subquad.kernels.templates.gpu_exact import emit_exact
        from subquad.kernels.templates.gpu_linear import FEATURES, LinearPart, emit_hybrid

        assert isinstance(variant, HybridVariant)
        heads, scope = variant.heads, target.shared_scope
        parameters = default_parameters(heads).override(params)
        parameters.check_registers(heads)
        exact_set = _exact_set(variant)

        def body(buffers: Buffers) -> None:
            if variant.feature_map == NONE:
                assert exact_set is not None
                emit_exact(buffers, heads, parameters, scope, exact_set, variant.scale)
                return
            part = LinearPart(
                feature=FEATURES[variant.feature_map],
                # Without a window, window_left is -1: the query's own token is counted.
                gap=variant.window_left + 1 if variant.is_causal else None,
                skipped_sinks=variant.sinks,
            )
            emit_hybrid(buffers, heads, part, parameters, scope, exact_set, variant.scale)

        return attention_function(variant, body)


def _exact_set(variant: HybridVariant) -> ExactSet | None:
    from subquad.kernels.templates.dense import Band, ExactSet

    if not variant.has_window and not variant.sinks:
        return None
    window = Band(variant.window_left, variant.window_right) if variant.has_window else None
    return ExactSet(window, variant.sinks, Band(variant.allowed_left, variant.allowed_right))


TEMPLATE = HybridGpuTemplate()
