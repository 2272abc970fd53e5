"""CPU kernel of ``ai.subquad::BlockSparseAttention``: work for listed real keys only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from subquad.kernels.block_sparse.semantics import BlockSparseVariant
from subquad.kernels.kernel import CpuTarget
from subquad.kernels.operator import OperatorVariant
from subquad.kernels.templates.parameters import TileParameters
from subquad.kernels.templates.space import Space
from subquad.runtime.errors import Rejection


@dataclass(frozen=True)
class BlockSparseCpuTemplate:
    """See ``TunableTemplate``. The block, not a parameter, sets the panels of a task."""

    def supports(self, variant: OperatorVariant) -> Rejection | None:
        if not isinstance(variant, BlockSparseVariant):
            return Rejection(f"not block-sparse attention: {variant.op_type}")
        return None

    def space(self, variant: OperatorVariant, target: CpuTarget) -> Space:
        assert isinstance(variant, BlockSparseVariant)
        names = [name for name in TileParameters.CHOICES if name != "panels"]
        return TileParameters.space(target, names, _defaults(variant, target))

    def build(self, variant: OperatorVariant, target: CpuTarget, params: Mapping[str, int]) -> Any:
        from subquad.kernels.templates.block_sparse import emit_block_sparse
        from subquad.kernels.templates.dense import Band
        from subquad.kernels.templates.exact import exact_tile
        from subquad.kernels.templates.function import attention_function
        from subquad.kernels.templates.rows import Buffers, list_keys

        assert isinstance(variant, BlockSparseVariant)
        tile = exact_tile(_defaults(variant, target).override(params))
        tile = replace(tile, panels=-(-variant.block // tile.panel.width))

        def body(buffers: Buffers) -> None:
            emit_block_sparse(
                buffers,
                list_keys(buffers),
                variant.heads,
                tile,
                variant.block,
                Band(variant.window_left, variant.window_right),
                variant.scale,
                variant.softcap,
            )

        return attention_function(variant, body)


def _defaults(variant: BlockSparseVariant, target: CpuTarget) -> TileParameters:
    return TileParameters.of_exact(target, variant.head_dim, variant.value_dim)


TEMPLATE = BlockSparseCpuTemplate()
