"""``ai.subquad::Attention``: exact softmax attention under a proved mask.

``softmax(cap(scale * q k^T))  v`` over the keys a query may see; see ``kernels/operator.py`` for
inputs and visibility.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.attention.bodies import attention_body
from subquad.kernels.attention.reference import attention
from subquad.kernels.body import Body
from subquad.kernels.inputs import (
    Heads,
    declare_inputs,
    input_specs,
    limit_label,
    number_label,
    output_spec,
)
from subquad.kernels.operator import UNLIMITED, TensorSpec
from subquad.kernels.visibility import allowed_keys


@dataclass(frozen=True)
class AttentionVariant:
    """Exact attention with all static choices fixed.

    Attributes:
        scale: multiplies query . key.
        softcap: ``softcap * tanh(scores / softcap)``; 0 = none.
        window_left, window_right: the visible band; -1 = unlimited.
        has_key_mask: whether input 3 is present.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    softcap: float = 0.0
    window_left: int = UNLIMITED
    window_right: int = UNLIMITED
    has_key_mask: bool = False

    def __post_init__(self) -> None:
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
        return self.window_left != UNLIMITED or self.window_right != UNLIMITED

    @property
    def op_type(self) -> str:
        return "Attention"

    @property
    def overload(self) -> str:
        parts = [self.heads.label, f"s{number_label(self.scale)}"]
        if self.softcap:
            parts.append(f"cap{number_label(self.softcap)}")
        if self.has_positions:
            parts.append(f"l{limit_label(self.window_left)}r{limit_label(self.window_right)}")
        if self.has_key_mask:
            parts.append("mask")
        return "_".join(parts)

    @property
    def inputs(self) -> tuple[TensorSpec | None, ...]:
        return input_specs(self.heads, key_mask=self.has_key_mask, positions=self.has_positions)

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        return (output_spec(self.heads),)

    def attributes(self) -> Mapping[str, ir.Attr]:
        attributes = [
            ir.AttrString("variant", self.overload),
            ir.AttrInt64("num_heads", self.num_heads),
            ir.AttrInt64("num_kv_heads", self.num_kv_heads),
            ir.AttrFloat32("scale", self.scale),
            ir.AttrFloat32("softcap", self.softcap),
            ir.AttrInt64("window_left", self.window_left),
            ir.AttrInt64("window_right", self.window_right),
        ]
        return {attribute.name: attribute for attribute in attributes}

    def build_function(self) -> ir.Function:
        body = Body()
        formal, inputs = declare_inputs(self.inputs)
        output = attention_body(
            body,
            self.heads,
            inputs,
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
        query_positions: NDArray[np.int64] | None = None,
        key_positions: NDArray[np.int64] | None = None,
    ) -> NDArray[np.float64]:
        visible = allowed_keys(
            (query.shape[0], query.shape[2], key.shape[2]),
            self.window_left,
            self.window_right,
            key_mask,
            query_positions,
            key_positions,
        )
        return attention(
            np.asarray(query, dtype=np.float64),
            np.asarray(key, dtype=np.float64),
            np.asarray(value, dtype=np.float64),
            visible,
            self.scale,
            self.softcap,
        )
