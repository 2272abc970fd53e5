"""GPU kernel of ``ai.subquad::Attention``: a block of threads per tile of query rows.

The sibling of ``cpu.py``; see ``kernels/templates/gpu_exact.py`` for the tile loop. Memory is
linear in the lengths, work proportional to the keys that a tile sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.gpu import GpuTarget
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.gpu_parameters import default_parameters, refuse_sizes
from subquad.runtime.errors import Rejection


@dataclass(frozen=True)
class AttentionGpuTemplate:
    """The GPU side of ``KernelTemplate``."""

    def supports(self, variant: OperatorVariant) -> Rejection | None:
        if not isinstance(variant, AttentionVariant):
            return Rejection(f"not exact attention: {variant.op_type}")
        missing = [
            name
            for name, present in (
                ("key bias", variant.has_key_bias),
                ("score bias", bool(variant.score_bias)),
                ("alibi", variant.alibi != "none"),
                ("sink logits", variant.has_sink_logits),
                ("row outputs", len(variant.outputs) > 1),
                ("sigmoid scores", variant.is_sigmoid),
            )
            if present
        ]
        if missing:
            return Rejection(f"the GPU kernel has no {', '.join(missing)}")
        return refuse_sizes(variant.heads)

    def build(self, variant: OperatorVariant, target: GpuTarget, params: Mapping[str, int]) -> Any:
        from subquad.kernels.templates.dense import Band, ExactSet
        from subquad.kernels.templates.function import attention_function
        from subquad.kernels.templates.gpu_exact import emit_exact
        from subquad.kernels.templates.rows import Buffers

        assert isinstance(variant, AttentionVariant)
        heads = variant.heads
        parameters = default_parameters(heads).override(params)
        parameters.check_registers(heads)
        band = Band(variant.window_left, variant.window_right)

        def body(buffers: Buffers) -> None:
            emit_exact(
                buffers,
                heads,
                parameters,
                target.shared_scope,
                ExactSet(window=band, sinks=0, allowed=band),
                variant.scale,
                variant.softcap,
            )

        return attention_function(variant, body)


TEMPLATE = AttentionGpuTemplate()
