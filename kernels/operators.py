"""Every operator of ``ai.subquad`` and the class of its variants."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from subquad.kernels.attention.semantics import AttentionVariant
from subquad.kernels.block_select.semantics import BlockSelectVariant
from subquad.kernels.block_sparse.semantics import BlockSparseVariant
from subquad.kernels.hybrid.semantics import HybridVariant

OPERATORS: Mapping[str, type[Any]] = {
    "Attention": AttentionVariant,
    "BlockSelect": BlockSelectVariant,
    "BlockSparseAttention": BlockSparseVariant,
    "HybridAttention": HybridVariant,
}
