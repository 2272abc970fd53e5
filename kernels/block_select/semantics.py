"""``ai.subquad::BlockSelect``: lists of key blocks for ``BlockSparseAttention``.

For self-attention. Blocks are those of ``BlockSparseAttention``. A query is real if the key at its
position is. Of the key blocks with a real key that a query block may see at all,

1. those near (within one block of the query block), the first ``sinks`` blocks, and those that some
   of its queries may not see wholly are always kept;
2. of the others, those with the largest estimated mass (``estimators.py``), until the mass before
   the next reaches the head's threshold; at a threshold of 1 or more all are kept.

Ties go to the earlier block. Ranked are blocks that every query of the block may see wholly; with
an estimator that reads all queries of the block, its own keys as well. So a list depends on nothing
but keys that its queries may see and, with such an estimator, tokens of their own block. A query
block without a real query gets an empty list.

| # | name | shape, dtype | |
|---|---|---|---|
| 0 | query | ``[batch, num_heads, query_len, head_dim]`` float32 | |
| 1 | key | ``[batch, num_kv_heads, kv_len, head_dim]`` float32 | |
| 2 | key_mask | ``[batch, kv_len]`` bool | optional |
| 3 | query_positions | ``[batch, query_len]`` int64 | |
| 4 | key_positions | ``[batch, kv_len]`` int64 | |
| 5 | thresholds | ``[num_heads]`` float32 | |

Outputs ``block_counts`` and ``block_indices``: rising numbers, ``width = ceil(kv_len / block)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.block_select.body import select_body
from subquad.kernels.block_select.estimators import get_estimator
from subquad.kernels.block_select.reference import (
    BlockMasses,
    block_lists,
    block_masses,
    kept_blocks,
)
from subquad.kernels.block_sparse.semantics import list_specs
from subquad.kernels.body import Body
from subquad.kernels.inputs import Heads, limit_label, number_label
from subquad.kernels.operator import UNLIMITED, Blocks, TensorSpec, node_attributes


@dataclass(frozen=True)
class BlockSelectVariant:
    """Block selection with all static choices fixed.

    Attributes:
        block: positions per block.
        sinks: leading key blocks that are always kept.
        estimator: how the mass of a block is estimated.
        scale, softcap, window_left, window_right: those of the attention it serves.
        has_key_mask: whether input 2 is present.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    block: int
    sinks: int = 1
    estimator: str = "pooled"
    softcap: float = 0.0
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    has_key_mask: bool = False

    def __post_init__(self) -> None:
        if self.block < 1 or self.sinks < 0:
            raise ValueError(f"block must be positive and sinks 0 or more, got {self}")
        if min(self.window_left, self.window_right) < UNLIMITED:
            raise ValueError(f"window limits must be -1 or more, got {self}")
        if self.softcap < 0:
            raise ValueError(f"softcap must be 0 or more, got {self.softcap}")
        get_estimator(self.estimator)
        _ = self.heads

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.head_dim)

    @property
    def op_type(self) -> str:
        return "BlockSelect"

    @property
    def overload(self) -> str:
        parts = [
            self.estimator,
            f"h{self.num_heads}kv{self.num_kv_heads}d{self.head_dim}",
            f"s{number_label(self.scale)}",
            f"block{self.block}",
            f"sinks{self.sinks}",
        ]
        if self.softcap:
            parts.append(f"cap{number_label(self.softcap)}")
        if self.window_left != UNLIMITED or self.window_right != UNLIMITED:
            parts.append(f"l{limit_label(self.window_left)}r{limit_label(self.window_right)}")
        if self.has_key_mask:
            parts.append("mask")
        return "_".join(parts)

    @property
    def inputs(self) -> tuple[TensorSpec | None, ...]:
        rows = ("batch", self.num_heads, "query_len", self.head_dim)
        columns = ("batch", self.num_kv_heads, "kv_len", self.head_dim)
        mask = TensorSpec("key_mask", "bool", ("batch", "kv_len"))
        return (
            TensorSpec("query", "float32", rows),
            TensorSpec("key", "float32", columns),
            mask if self.has_key_mask else None,
            TensorSpec("query_positions", "int64", ("batch", "query_len")),
            TensorSpec("key_positions", "int64", ("batch", "kv_len")),
            TensorSpec("thresholds", "float32", (self.num_heads,)),
        )

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return list_specs(self.num_heads, self.block, Blocks("kv_len", self.block))

    def attributes(self) -> Mapping[str, ir.Attr]:
        return node_attributes(
            self,
            "estimator",
            "num_heads",
            "num_kv_heads",
            "scale",
            "softcap",
            "block",
            "sinks",
            "window_left",
            "window_right",
        )

    def build_function(self) -> ir.Function:
        body = Body()
        formal = [
            ir.Value(name=spec.name if spec is not None else f"absent_{place}")
            for place, spec in enumerate(self.inputs)
        ]
        query, key, key_mask, query_positions, key_positions, thresholds = formal
        outputs = select_body(
            body,
            self.heads,
            query,
            key,
            key_mask if self.has_key_mask else None,
            (query_positions, key_positions),
            thresholds,
            estimator=get_estimator(self.estimator),
            block=self.block,
            sinks=self.sinks,
            scale=self.scale,
            softcap=self.softcap,
            left=self.window_left,
            right=self.window_right,
        )
        return body.function(self.op_type, self.overload, formal, outputs, self.attributes())

    def masses(
        self,
        query: NDArray[np.floating],
        key: NDArray[np.floating],
        key_mask: NDArray[np.bool_] | None = None,
        *,
        query_positions: NDArray[np.int64],
        key_positions: NDArray[np.int64],
    ) -> BlockMasses:
        """What the selection decides by, in float64."""
        return block_masses(
            query,
            key,
            key_mask,
            query_positions,
            key_positions,
            estimator=get_estimator(self.estimator),
            block=self.block,
            sinks=self.sinks,
            scale=self.scale,
            softcap=self.softcap,
            left=self.window_left,
            right=self.window_right,
        )

    def reference(
        self,
        query: NDArray[np.floating],
        key: NDArray[np.floating],
        key_mask: NDArray[np.bool_] | None = None,
        *,
        query_positions: NDArray[np.int64],
        key_positions: NDArray[np.int64],
        thresholds: NDArray[np.floating],
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        masses = self.masses(
            query,
            key,
            key_mask,
            query_positions=query_positions,
            key_positions=key_positions,
        )
        return block_lists(kept_blocks(masses, thresholds)[0])
