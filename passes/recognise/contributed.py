"""Shapes of com.microsoft operators between attentions, as ONNX Runtime's optimizer writes them.

ONNX's own shape inference stops at them; their elements are never asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import onnx_ir as ir

from subquad.passes.recognise.affine import Affine, OpaqueError, constant, product
from subquad.passes.recognise.arithmetic import Inputs, int_attribute, need, optional
from subquad.passes.recognise.tensors import SymbolicTensor, as_int, broadcast_shape, opaque

Handler: TypeAlias = Callable[[ir.Node, Inputs, int], SymbolicTensor]
CONTRIBUTED: dict[str, Handler] = {}


def _handles(*op_types: str) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        for op_type in op_types:
            CONTRIBUTED[op_type] = function
        return function

    return register


def _shaped(node: ir.Node, shape: Sequence[Affine], dtype: ir.DataType | None) -> SymbolicTensor:
    return SymbolicTensor(tuple(shape), opaque(f"operator {node.op_type}"), dtype)


@_handles("SkipLayerNormalization", "SkipSimplifiedLayerNormalization", "RotaryEmbedding")
@_handles("BiasGelu", "FastGelu", "QuickGelu", "Gelu", "BiasAdd", "BiasDropout")
def _like_input(node: ir.Node, inputs: Inputs, number: int) -> SymbolicTensor:
    data = need(inputs, 0)
    # Of the normalisations, the last output is the sum that was normalised.
    if number not in (0, 3):
        raise OpaqueError(f"output {number} of {node.op_type}")
    return _shaped(node, data.shape, data.dtype)


@_handles("EmbedLayerNormalization")
def _embedding(node: ir.Node, inputs: Inputs, number: int) -> SymbolicTensor:
    tokens, words = need(inputs, 0), need(inputs, 2)
    if number == 1:  # the number of real tokens of each row
        return _shaped(node, tokens.shape[:1], ir.DataType.INT32)
    return _shaped(node, (*tokens.shape, words.shape[-1]), words.dtype)


@_handles("Attention")
def _packed_attention(node: ir.Node, inputs: Inputs, number: int) -> SymbolicTensor:
    data, weights = need(inputs, 0), need(inputs, 1)
    if number:
        raise OpaqueError("the cache of com.microsoft Attention")
    sizes = node.attributes.get("qkv_hidden_sizes")
    if sizes is not None:
        width = sizes.as_ints()[2]
    else:
        width = as_int(weights.shape[-1]) // 3
    return _shaped(node, (*data.shape[:2], constant(width)), data.dtype)


@_handles("MultiHeadAttention")
def _multi_head(node: ir.Node, inputs: Inputs, number: int) -> SymbolicTensor:
    query, value = need(inputs, 0), optional(inputs, 2)
    if number:
        raise OpaqueError("the cache of MultiHeadAttention")
    heads = constant(int_attribute(node, "num_heads", 1))
    if value is not None:
        shape = value.shape
        width = product(heads, shape[3]) if len(shape) == 4 else shape[2]
    else:
        width = product(heads, need(inputs, 0 if len(query.shape) == 5 else 1).shape[4])
    if width is None:
        raise OpaqueError("a width that is not fixed")
    return _shaped(node, (*query.shape[:2], width), query.dtype)


@_handles("GroupQueryAttention")
def _group_query(node: ir.Node, inputs: Inputs, number: int) -> SymbolicTensor:
    query = need(inputs, 0)
    if number:
        raise OpaqueError("the cache of GroupQueryAttention")
    if optional(inputs, 1) is not None:
        return _shaped(node, query.shape, query.dtype)
    heads, kv_heads = (int_attribute(node, name, 1) for name in ("num_heads", "kv_num_heads"))
    dim = as_int(query.shape[2]) // (heads + 2 * kv_heads)
    return _shaped(node, (*query.shape[:2], constant(heads * dim)), query.dtype)


@_handles("LinearAttention")
def _linear_attention(node: ir.Node, inputs: Inputs, number: int) -> SymbolicTensor:
    query, value = need(inputs, 0), need(inputs, 2)
    if number:
        raise OpaqueError("the state of LinearAttention")
    heads, kv_heads = (int_attribute(node, name, 1) for name in ("q_num_heads", "kv_num_heads"))
    width = constant(heads * (as_int(value.shape[2]) // kv_heads))
    return _shaped(node, (*query.shape[:2], width), query.dtype)


@_handles("CausalConvWithState")
def _short_convolution(node: ir.Node, inputs: Inputs, number: int) -> SymbolicTensor:
    data = need(inputs, 0)
    if number or set(node.attributes) - {"activation"}:
        raise OpaqueError("CausalConvWithState with a state, or over more than channels and length")
    return _shaped(node, data.shape, data.dtype)


@_handles("FusedMatMul")
def _fused_matmul(node: ir.Node, inputs: Inputs, number: int) -> SymbolicTensor:
    a, b = need(inputs, 0), need(inputs, 1)
    if int_attribute(node, "transBatchA", 0) or int_attribute(node, "transBatchB", 0):
        raise OpaqueError("FusedMatMul that moves the batch")
    left, right = list(a.shape), list(b.shape)
    if int_attribute(node, "transA", 0):
        left[-2:] = left[:-3:-1]
    if int_attribute(node, "transB", 0):
        right[-2:] = right[:-3:-1]
    batch = broadcast_shape([tuple(left[:-2]), tuple(right[:-2])])
    return _shaped(node, (*batch, left[-2], right[-1]), a.dtype)
