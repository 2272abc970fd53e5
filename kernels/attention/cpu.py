"""CPU kernel of ``ai.subquad::Attention``: tiled, online softmax or sigmoids, for real keys only.

Tasks are blocks of query rows of one key/value head; see ``kernels/templates/exact.py`` for the
tile loop and ``kernels/templates/dense.py`` for what is skipped. Memory is linear in the lengths.
Few queries (decoding) are cut along the keys instead: ``kernels/templates/split.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.kernel import CpuTarget
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.parameters import TileParameters
from subquad.kernels.templates.space import Space
from subquad.runtime.errors import Rejection


@dataclass(frozen=True)
class AttentionCpuTemplate:
    """See ``TunableTemplate``."""

    def supports(self, variant: OperatorVariant) -> Rejection | None:
        if not isinstance(variant, AttentionVariant):
            return Rejection(f"not exact attention: {variant.op_type}")
        return None

    def space(self, variant: OperatorVariant, target: CpuTarget) -> Space:
        assert isinstance(variant, AttentionVariant)
        return TileParameters.space(target, usual=_defaults(variant, target))

    def build(self, variant: OperatorVariant, target: CpuTarget, params: Mapping[str, int]) -> Any:
        from tvm.script.ir_builder import tirx as T

        from subquad.kernels.templates.dense import Band, ExactSet, emit_exact
        from subquad.kernels.templates.exact import exact_tile
        from subquad.kernels.templates.few_rows import FEW_ROWS
        from subquad.kernels.templates.function import attention_function
        from subquad.kernels.templates.rows import Buffers, list_keys
        from subquad.kernels.templates.split import emit_split
        from subquad.kernels.templates.terms import Terms

        assert isinstance(variant, AttentionVariant)
        heads = variant.heads
        tile = exact_tile(_defaults(variant, target).override(params))
        terms = Terms(
            variant.has_key_bias,
            variant.score_bias,
            variant.alibi,
            variant.has_sink_logits,
            variant.has_lse,
            variant.has_entropy,
            variant.is_sigmoid,
            variant.score_offset,
        )
        band = Band(variant.window_left, variant.window_right)

        exact_set = ExactSet(window=band, sinks=0, allowed=band)

        def body(buffers: Buffers) -> None:
            shared = (variant.scale, variant.softcap, terms)
            keys = list_keys(buffers)
            with T.If(buffers.query.shape[2] * heads.group <= FEW_ROWS):
                with T.Then():
                    emit_split(buffers, keys, heads, tile, exact_set, *shared)
                with T.Else():
                    emit_exact(buffers, keys, heads, tile, [exact_set], *shared)

        return attention_function(variant, body)


def _defaults(variant: AttentionVariant, target: CpuTarget) -> TileParameters:
    return TileParameters.of_exact(target, variant.head_dim, variant.value_dim)


TEMPLATE = AttentionCpuTemplate()
