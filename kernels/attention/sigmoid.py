"""Function body of sigmoid attention: a loop over blocks of queries.

A weight depends on its own score alone, so nothing is carried from block to block, and a block
reads only the keys that its band reaches. The scores of one block are all that is stored, so memory
is linear in the lengths.

The sigmoid is spelled ``1 / (1 + exp(-x))``: ONNX Runtime's own operator is right to 1e-7 in
absolute terms, which at a bias of -log n is a thousandth of a weight.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import onnx_ir as ir

from subquad.kernels.body import Body
from subquad.kernels.inputs import Inputs, offset
from subquad.kernels.operator import HIDING_BIAS, UNLIMITED

if TYPE_CHECKING:
    from subquad.kernels.attention.semantics import AttentionVariant

BLOCK = 128
"""Queries per step: scores are ``BLOCK x kv_len``, or ``BLOCK x (BLOCK + window)``."""


def sigmoid_body(body: Body, variant: AttentionVariant, inputs: Inputs) -> ir.Value:
    """``[batch, num_heads, query_len, value_dim]``."""
    length = body.dim(inputs.query, 2)
    size, count = body("Min", length, BLOCK), body.ceil_div(length, BLOCK)
    surplus = body("Sub", body("Mul", count, size), length)
    query = body.pad(body("Mul", inputs.query, variant.scale), 2, 4, after=surplus)
    blocks = _Blocks(body, variant, inputs, query, size, surplus)
    stacked = body.stack(count, blocks.attend)
    by_head = body.transpose(stacked, 1, 2, 0, 3, 4)
    ordered = body.reshape(by_head, 0, 0, -1, variant.value_dim)
    return body.slice(ordered, 0, length, 2)


class _Blocks:
    """What all steps read."""

    def __init__(
        self,
        body: Body,
        variant: AttentionVariant,
        inputs: Inputs,
        query: ir.Value,
        size: ir.Value,
        surplus: ir.Value,
    ) -> None:
        self.variant, self.inputs, self.query, self.size = variant, inputs, query, size
        self.kv_len = body.dim(inputs.key, 2)
        self.offset = offset(body, inputs) if variant.has_positions else body.value(0)
        self.score_bias = inputs.extra.get("score_bias")
        if self.score_bias is not None and "q" in variant.score_bias:
            self.score_bias = body.pad(self.score_bias, 2, 4, after=surplus)

    def attend(self, body: Body, step: ir.Value) -> ir.Value:
        """Block ``step``: ``[batch, num_heads, size, value_dim]``."""
        variant, heads = self.variant, self.variant.heads
        first = body("Mul", body.reshape(step, 1), self.size)
        start, end = self._reach(body, first)
        near = body.slice(self.query, first, body("Add", first, self.size), 2)
        if heads.group > 1:
            near = body.reshape(near, 0, heads.num_kv_heads, -1, heads.head_dim)
        key = body.slice(self.inputs.key, start, end, 2)
        value = body.slice(self.inputs.value, start, end, 2)
        scores = body.matmul_transposed(near, key, rank=4)
        if variant.softcap:
            cap = variant.softcap
            scores = body("Mul", body("Tanh", body("Mul", scores, 1.0 / cap)), cap)
        count = body("Sub", end, start)
        if heads.group > 1:
            scores = body.reshape(scores, 0, heads.num_heads, self.size, count)
        scores, visible = self._biased(body, scores, first, start, end)
        power = body("Exp", body("Neg", scores))
        weights = body("Div", 1.0, body("Add", power, 1.0))
        if visible is not None:
            weights = body("Where", visible, weights, 0.0)
        if heads.group > 1:
            weights = body.reshape(weights, 0, heads.num_kv_heads, -1, count)
        output = body("MatMul", weights, value)
        return body.reshape(output, 0, heads.num_heads, self.size, heads.value_dim)

    def _reach(self, body: Body, first: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Slots of the keys that some query of the block may see; at least one, seen or not."""
        left, right = self.variant.window_left, self.variant.window_right
        start, end = body.value(0), self.kv_len
        slot = body("Add", first, self.offset)
        if left != UNLIMITED:
            reached = body("Max", body("Sub", slot, left), 0)
            start = body("Min", reached, body("Sub", self.kv_len, 1))
        if right != UNLIMITED:
            reached = body("Add", body("Add", slot, self.size), right)
            end = body("Min", body("Max", reached, body("Add", start, 1)), self.kv_len)
        return start, end

    def _biased(
        self, body: Body, scores: ir.Value, first: ir.Value, start: ir.Value, end: ir.Value
    ) -> tuple[ir.Value, ir.Value | None]:
        """Scores with all that is added to them, and which of them count; ``None``: all."""
        variant, inputs = self.variant, self.inputs
        conditions: list[ir.Value | None] = []
        left, right = variant.window_left, variant.window_right
        if variant.score_offset:
            scores = body("Add", scores, variant.score_offset)
        if variant.has_positions:
            slot = body("Add", first, self.offset)
            queries = body("Add", body.arange(self.size), slot)
            keys = body("Add", body.arange(body("Sub", end, start)), start)
            distance = body("Sub", body.unsqueeze(queries, 1), body.unsqueeze(keys, 0))
            if left != UNLIMITED:
                conditions.append(body("LessOrEqual", distance, left))
            if right != UNLIMITED:
                conditions.append(body("GreaterOrEqual", distance, -right))
            if variant.alibi != "none":
                if variant.alibi == "absolute":
                    distance = body("Abs", distance)
                slopes = body.unsqueeze(inputs.extra["slopes"], 0, 2, 3)
                scores = body("Sub", scores, body("Mul", slopes, body.as_float(distance)))
        if inputs.key_mask is not None:
            conditions.append(body.unsqueeze(body.slice(inputs.key_mask, start, end, 1), 1, 2))
        biases = []
        if "key_bias" in inputs.extra:
            bias = body.slice(inputs.extra["key_bias"], start, end, 1)
            biases.append(body.unsqueeze(bias, 1, 2))
        if self.score_bias is not None:
            bias = self.score_bias
            if "q" in variant.score_bias:
                bias = body.slice(bias, first, body("Add", first, self.size), 2)
            if "k" in variant.score_bias:
                bias = body.slice(bias, start, end, 3)
            biases.append(bias)
        for bias in biases:
            conditions.append(body("Greater", bias, HIDING_BIAS))
            scores = body("Add", scores, bias)
        return scores, body.all_of(*conditions)
