"""``ai.subquad::Attention``: exact softmax or sigmoid attention under a proved mask.

``f(cap(scale * q k^T) + bias) v`` over the keys a query may see, ``f`` the softmax over these keys
or the sigmoid of each score; see ``kernels/operator.py`` for the first six inputs and visibility.
What a variant may have on top, all float32:

| # | name | shape | |
|---|---|---|---|
| 6 | key_bias | ``[batch, kv_len]`` | added to the scores of a key |
| 7 | score_bias | ``[batch, num_heads, query_len, kv_len]``, any of them 1 | added to the scores |
| 8 | slopes | ``[num_heads]`` | ALiBi: adds ``-slope * (query position - key position)`` |
| 9 | sink_logits | ``[num_heads]`` | one more term ``exp(logit)`` in the denominator |

A bias of ``HIDING_BIAS`` or less hides its key like the mask: -inf and the least floats that serve
as masks all mean "never", and never a mean over hidden keys. Larger ones, such as -1e4, are added.

Outputs: the attention; if asked for, ``lse``, the logarithm of the denominator (the sink's term
included), and ``entropy``, that of the weights in nats (the sink counts as one more key), both
``[batch, num_heads, query_len]``. Attention over disjoint sets of keys merges exactly from outputs
and ``lse`` (the sink in one of them). A row that sees no key has output 0; without a sink its
``lse`` is -inf, its entropy 0.

Sources: ALiBi: Press et al., 2022, https://arxiv.org/abs/2108.12409. A row's constant cancels in
the softmax, so ``slope * key position`` (BLOOM) and ``slope * (key position - last position)``
(MPT) are the same bias; ``absolute`` is that of encoders, ``-slope * |distance|``. BLOOM numbers
the real tokens, so with holes in its mask it is a ``score_bias`` instead. Sink logits: GPT-OSS,
https://arxiv.org/abs/2508.10925. Sigmoid attention: Ramapuram et al., 2024,
https://arxiv.org/abs/2409.04431; its bias, such as ``-log n``, is ``score_offset`` where it is one
number and a ``score_bias`` where it is computed. It has no denominator, hence no sinks, ``lse`` or
entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from subquad.kernels.attention.bodies import attention_body
from subquad.kernels.attention.reference import attend, attend_by_sigmoid
from subquad.kernels.body import Body
from subquad.kernels.inputs import (
    Heads,
    declare_inputs,
    input_specs,
    limit_label,
    number_label,
    output_spec,
)
from subquad.kernels.operator import UNLIMITED, Dim, TensorSpec, node_attributes
from subquad.kernels.visibility import allowed_keys

ScoreFunction: TypeAlias = Literal["softmax", "sigmoid"]

SCALAR = "1"
"""Value of ``score_bias`` for an input of one number."""


@dataclass(frozen=True)
class AttentionVariant:
    """Exact attention with all static choices fixed.

    Attributes:
        scale: multiplies query . key.
        softcap: ``softcap * tanh(scores / softcap)``; 0 = none.
        window_left, window_right: the visible band; -1 = unlimited.
        has_key_mask: whether input 3 is present.
        has_key_bias: whether input 6 is present.
        score_bias: axes along which input 7 varies, of ``"bhqk"`` in this order; the others are 1.
            "1": all are. "" = absent.
        alibi: how input 8 is used; "none": it is absent.
        has_sink_logits: whether input 9 is present.
        has_lse, has_entropy: the outputs after the first.
        score_function: what makes weights of scores.
        score_offset: added to all scores; 0 unless they go through a sigmoid, since a softmax does
            not see it.
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
    has_key_bias: bool = False
    score_bias: str = ""
    alibi: Literal["none", "signed", "absolute"] = "none"
    has_sink_logits: bool = False
    has_lse: bool = False
    has_entropy: bool = False
    score_function: ScoreFunction = "softmax"
    score_offset: float = 0.0

    def __post_init__(self) -> None:
        if min(self.window_left, self.window_right) < UNLIMITED:
            raise ValueError(f"window limits must be -1 or more, got {self}")
        if self.softcap < 0:
            raise ValueError(f"softcap must be 0 or more, got {self.softcap}")
        in_order = "".join(axis for axis in "bhqk" if axis in self.score_bias)
        if self.score_bias not in (in_order, SCALAR):
            raise ValueError(
                f"score_bias must name axes of 'bhqk' in order, got {self.score_bias!r}"
            )
        if self.alibi not in ("none", "signed", "absolute"):
            raise ValueError(f"unknown alibi {self.alibi!r}; known: none, signed, absolute")
        self._check_score_function()
        _ = self.heads

    def _check_score_function(self) -> None:
        if self.score_function not in ("softmax", "sigmoid"):
            raise ValueError(
                f"unknown score function {self.score_function!r}; known: softmax, sigmoid"
            )
        if self.is_sigmoid and (self.has_sink_logits or self.has_lse or self.has_entropy):
            raise ValueError(f"sinks, lse and entropy belong to a softmax, got {self}")
        if self.score_offset and not self.is_sigmoid:
            raise ValueError(f"an offset of all scores cancels in a softmax, got {self}")

    @property
    def is_sigmoid(self) -> bool:
        return self.score_function == "sigmoid"

    @property
    def heads(self) -> Heads:
        return Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)

    @property
    def has_positions(self) -> bool:
        banded = self.window_left != UNLIMITED or self.window_right != UNLIMITED
        return banded or self.alibi != "none"

    @property
    def is_biased(self) -> bool:
        """Whether scores get more than a constant per key added."""
        return bool(self.score_bias) or self.alibi != "none"

    @property
    def op_type(self) -> str:
        return "Attention"

    @property
    def overload(self) -> str:
        parts = [self.heads.label, f"s{number_label(self.scale)}"]
        if self.is_sigmoid:
            parts.append("sigmoid")
        if self.score_offset:
            parts.append(f"offset{number_label(self.score_offset)}")
        if self.softcap:
            parts.append(f"cap{number_label(self.softcap)}")
        if self.window_left != UNLIMITED or self.window_right != UNLIMITED:
            parts.append(f"l{limit_label(self.window_left)}r{limit_label(self.window_right)}")
        if self.has_key_mask:
            parts.append("mask")
        if self.has_key_bias:
            parts.append("keybias")
        if self.score_bias:
            parts.append(f"bias_{self.score_bias}")
        if self.alibi != "none":
            parts.append("alibi" if self.alibi == "signed" else "alibi_abs")
        if self.has_sink_logits:
            parts.append("sink")
        if self.has_lse:
            parts.append("lse")
        if self.has_entropy:
            parts.append("entropy")
        return "_".join(parts)

    @property
    def inputs(self) -> tuple[TensorSpec | None, ...]:
        sizes: tuple[tuple[str, Dim], ...] = (
            ("b", "batch"),
            ("h", self.num_heads),
            ("q", "query_len"),
            ("k", "kv_len"),
        )
        dims = tuple(size if axis in self.score_bias else 1 for axis, size in sizes)
        extra = (
            TensorSpec("key_bias", "float32", ("batch", "kv_len")) if self.has_key_bias else None,
            TensorSpec("score_bias", "float32", dims) if self.score_bias else None,
            TensorSpec("slopes", "float32", (self.num_heads,)) if self.alibi != "none" else None,
            TensorSpec("sink_logits", "float32", (self.num_heads,))
            if self.has_sink_logits
            else None,
        )
        return input_specs(
            self.heads, key_mask=self.has_key_mask, positions=self.has_positions, extra=extra
        )

    @property
    def outputs(self) -> tuple[TensorSpec, ...]:
        rows: tuple[Dim, ...] = ("batch", self.num_heads, "query_len")
        specs = [output_spec(self.heads)]
        if self.has_lse:
            specs.append(TensorSpec("lse", "float32", rows))
        if self.has_entropy:
            specs.append(TensorSpec("entropy", "float32", rows))
        return tuple(specs)

    def attributes(self) -> Mapping[str, ir.Attr]:
        return node_attributes(
            self,
            "num_heads",
            "num_kv_heads",
            "scale",
            "softcap",
            "window_left",
            "window_right",
            "alibi",
            *(("score_function", "score_offset") if self.is_sigmoid else ()),
        )

    def build_function(self) -> ir.Function:
        body = Body()
        formal, inputs = declare_inputs(self.inputs)
        outputs = attention_body(body, self, inputs)
        return body.function(self.op_type, self.overload, formal, outputs, self.attributes())

    def reference(
        self,
        query: NDArray[np.floating],
        key: NDArray[np.floating],
        value: NDArray[np.floating],
        key_mask: NDArray[np.bool_] | None = None,
        query_positions: NDArray[np.int64] | None = None,
        key_positions: NDArray[np.int64] | None = None,
        key_bias: NDArray[np.floating] | None = None,
        score_bias: NDArray[np.floating] | None = None,
        slopes: NDArray[np.floating] | None = None,
        sink_logits: NDArray[np.floating] | None = None,
    ) -> NDArray[np.float64] | tuple[NDArray[np.float64], ...]:
        visible = allowed_keys(
            (query.shape[0], query.shape[2], key.shape[2]),
            self.window_left,
            self.window_right,
            key_mask,
            query_positions,
            key_positions,
        )
        biases: list[NDArray[np.float64]] = []
        if key_bias is not None:
            biases.append(np.asarray(key_bias, np.float64)[:, None, None])
        if score_bias is not None:
            biases.append(np.asarray(score_bias, np.float64))
        if slopes is not None:
            assert query_positions is not None and key_positions is not None
            distance = query_positions[:, None, :, None] - key_positions[:, None, None, :]
            if self.alibi == "absolute":
                distance = np.abs(distance)
            biases.append(-np.asarray(slopes, np.float64)[None, :, None, None] * distance)
        operands = (
            np.asarray(query, dtype=np.float64),
            np.asarray(key, dtype=np.float64),
            np.asarray(value, dtype=np.float64),
        )
        if self.is_sigmoid:
            biases.append(np.float64(self.score_offset).reshape(1, 1, 1, 1))
            return attend_by_sigmoid(*operands, visible, self.scale, self.softcap, biases)
        result = attend(
            *operands,
            visible,
            self.scale,
            self.softcap,
            biases,
            None if sink_logits is None else np.asarray(sink_logits, np.float64),
        )
        outputs = [result.output]
        if self.has_lse:
            outputs.append(result.lse)
        if self.has_entropy:
            outputs.append(result.entropy)
        return result.output if len(outputs) == 1 else tuple(outputs)
