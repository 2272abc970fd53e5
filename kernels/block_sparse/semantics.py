"""``ai.subquad::BlockSparseAttention``: exact softmax attention over listed blocks of keys.

Blocks are cut on positions of real tokens:

* key block ``c`` holds the keys at positions ``c * block .. (c + 1) * block - 1``;
* query block ``r`` holds the queries at ``p + r * block .. p + (r + 1) * block - 1``, where ``p``
  is the first query position that is not negative. Queries at negative positions are padding in
  front; they are in no block and yield zeros.

So left padding moves nothing, and a prefill in pieces that start at multiples of ``block`` has the
query blocks of the whole.

Two inputs follow the common six: which key blocks the queries of a block attend to, each head its
own. They are compressed rows (CSR) of one fixed width, so that a selector's outputs have shapes
known before it runs:

| # | name | shape, dtype | |
|---|---|---|---|
| 6 | block_counts | ``[batch, num_heads, query_blocks]`` int32 | length of each list |
| 7 | block_indices | ``[batch, num_heads, query_blocks, width]`` int32 | the lists, from the left |

``query_blocks = ceil(query_len / block)``. A list holds distinct numbers of key blocks in any
order; numbers that no key has, and what stands behind its end, mean nothing. The site's own mask
holds inside listed blocks: a list can only take keys away. A query whose list has no key it may see
yields exact zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.attention.reference import attention
from subquad.kernels.block_sparse.body import block_sparse_body
from subquad.kernels.block_sparse.reference import listed_pairs
from subquad.kernels.body import Body
from subquad.kernels.inputs import (
    Heads,
    declare_inputs,
    input_specs,
    limit_label,
    number_label,
    output_spec,
)
from subquad.kernels.operator import UNLIMITED, Blocks, TensorSpec, node_attributes
from subquad.kernels.visibility import allowed_keys


def list_specs(num_heads: int, block: int, width: str | Blocks) -> tuple[TensorSpec, TensorSpec]:
    """``block_counts`` and ``block_indices``: inputs of the attention, outputs of selectors."""
    rows = ("batch", num_heads, Blocks("query_len", block))
    return (
        TensorSpec("block_counts", "int32", rows),
        TensorSpec("block_indices", "int32", (*rows, width)),
    )


@dataclass(frozen=True)
class BlockSparseVariant:
    """Block-sparse attention with all static choices fixed.

    Attributes:
        block: positions per block, of queries and of keys.
        scale: multiplies query . key.
        softcap: ``softcap * tanh(scores / softcap)``; 0 = none.
        window_left, window_right: the site's own band; -1 = unlimited.
        has_key_mask: whether input 3 is present.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    block: int
    softcap: float = 0.0
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    has_key_mask: bool = False

    def __post_init__(self) -> None:
        if self.block < 1:
            raise ValueError(f"block must be positive, got {self}")
        if min(self.window_left, self.window_right) < UNLIMITED:
            raise ValueError(f"window limits must be -1 or more, got {self}")
        if self.softcap < 0:
            raise ValueError(f"softcap must be 0 or more, got {self.softcap}")
        _ = self.heads

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)

    @property
    def has_positions(self) -> bool:
        return True

    @property
    def op_type(self) -> str:
        return "BlockSparseAttention"

    @property
    def overload(self) -> str:
        parts = [self.heads.label, f"s{number_label(self.scale)}", f"block{self.block}"]
        if self.softcap:
            parts.append(f"cap{number_label(self.softcap)}")
        if self.window_left != UNLIMITED or self.window_right != UNLIMITED:
            parts.append(f"l{limit_label(self.window_left)}r{limit_label(self.window_right)}")
        if self.has_key_mask:
            parts.append("mask")
        return "_".join(parts)

    @property
    def inputs(self) -> tuple[TensorSpec | None, ...]:
        lists = list_specs(self.num_heads, self.block, "width")
        return input_specs(self.heads, key_mask=self.has_key_mask, positions=True, extra=lists)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (output_spec(self.heads),)

    def attributes(self) -> Mapping[str, ir.Attr]:
        return node_attributes(
            self,
            "num_heads",
            "num_kv_heads",
            "scale",
            "softcap",
            "block",
            "window_left",
            "window_right",
        )

    def build_function(self) -> ir.Function:
        body = Body()
        formal, inputs = declare_inputs(self.inputs)
        output = block_sparse_body(
            body,
            self.heads,
            inputs,
            self.block,
            self.scale,
            self.softcap,
            self.window_left,
            self.window_right,
        )
        return body.function(self.op_type, self.overload, formal, [output], self.attributes())

    def reference(
        self,
        query: NDArray[np.floating],
        key: NDArray[np.floating],
        value: NDArray[np.floating],
        key_mask: NDArray[np.bool_] | None = None,
        *,
        query_positions: NDArray[np.int64],
        key_positions: NDArray[np.int64],
        block_counts: NDArray[np.integer],
        block_indices: NDArray[np.integer],
    ) -> NDArray[np.float64]:
        allowed = allowed_keys(
            (query.shape[0], query.shape[2], key.shape[2]),
            self.window_left,
            self.window_right,
            key_mask,
            query_positions,
            key_positions,
        )
        listed = listed_pairs(
            block_counts, block_indices, query_positions, key_positions, self.block
        )
        return attention(
            np.asarray(query, dtype=np.float64),
            np.asarray(key, dtype=np.float64),
            np.asarray(value, dtype=np.float64),
            allowed[:, None] & listed,
            self.scale,
            self.softcap,
        )
