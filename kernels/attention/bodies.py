"""Function bodies of exact attention, one per kind of mask.

| mask | body | extra memory |
|---|---|---|
| none, or key mask only | com.microsoft MultiHeadAttention, tiled | linear |
| causal, queries and keys aligned | com.microsoft GroupQueryAttention, tiled | linear |
| both sides limited | gathered band (``kernels/band.py``) | linear x window |
| causal decoding, softcap, one-sided bands | standard ops | query_len x kv_len |
| score bias, ALiBi, outputs about rows | standard ops | query_len x kv_len |
| sigmoid scores | loop over blocks of queries (``sigmoid.py``) | block x kv_len |

A key mask reaches the tiled kernels, which take none, as one more column: 1 in every query, 0 or
``MASKED`` in every key. It is added to the score inside the product and vanishes in the softmax
exactly; their own mask inputs either switch to the quadratic path or add only -10000. A key bias
travels the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from subquad.kernels.attention.sigmoid import sigmoid_body
from subquad.kernels.band import MASKED, Band, VirtualKey, banded_attention
from subquad.kernels.body import MICROSOFT, Body
from subquad.kernels.inputs import Heads, Inputs, offset
from subquad.kernels.operator import HIDING_BIAS, UNLIMITED

if TYPE_CHECKING:
    from subquad.kernels.attention.semantics import AttentionVariant

GQA_ALIGNMENT = 8
"""GroupQueryAttention on CPU wants head sizes that are multiples of this."""

LARGEST_GATHERED_WINDOW = 1024
"""Above it, an aligned causal window uses the tiled kernel, which does more arithmetic but stores
no scores (the band stores ``query_len x (block + window)`` of them)."""


def attention_body(body: Body, variant: AttentionVariant, inputs: Inputs) -> Sequence[ir.Value]:
    """Choose the body; its outputs are the variant's."""
    if variant.is_sigmoid:
        return [sigmoid_body(body, variant, inputs)]
    if "key_bias" in inputs.extra:
        inputs = _hide_by_bias(body, inputs)
    left, right = variant.window_left, variant.window_right
    banded = left != UNLIMITED and right != UNLIMITED
    if (
        variant.is_biased
        or variant.has_lse
        or variant.has_entropy
        or (variant.softcap and (variant.has_key_bias or variant.has_sink_logits))
        or (variant.has_sink_logits and not banded)
    ):
        return _standard(body, variant, variant.heads, inputs, variant.scale)
    heads, scale = variant.heads, variant.scale
    if variant.has_key_bias:
        heads, inputs, scale = _with_bias_column(body, heads, inputs, scale)
    return [_plain_body(body, variant, heads, inputs, scale)]


def _plain_body(
    body: Body, variant: AttentionVariant, heads: Heads, inputs: Inputs, scale: float
) -> ir.Value:
    """Without score bias, and one output."""
    softcap, left, right = variant.softcap, variant.window_left, variant.window_right
    if left == UNLIMITED and right == UNLIMITED:
        if softcap:
            return _standard(body, variant, heads, inputs, scale)[0]
        return _multi_head(body, heads, inputs, scale)

    def general(inner: Body) -> ir.Value:
        if left != UNLIMITED and right != UNLIMITED:
            virtual = None
            if variant.has_sink_logits:
                virtual = VirtualKey(_per_row(inner, inputs, inputs.extra["sink_logits"]), None)
            band = Band(left, right)
            return banded_attention(inner, band, heads, inputs, scale, softcap, virtual)
        return _standard(inner, variant, heads, inputs, scale)[0]

    small_window = UNLIMITED < left <= LARGEST_GATHERED_WINDOW
    if right != 0 or softcap or small_window or variant.has_sink_logits:
        return general(body)

    def tiled(inner: Body) -> ir.Value:
        if inputs.key_mask is None:
            return _group_query(inner, heads, inputs, scale, left, masked=False)
        return inner.branch(
            inner.all_true(inputs.key_mask),
            lambda nested: _group_query(nested, heads, inputs, scale, left, masked=False),
            lambda nested: _group_query(nested, heads, inputs, scale, left, masked=True),
        )

    query_positions, key_positions = inputs.positions
    aligned = body(
        "And",
        body("Equal", offset(body, inputs), 0),
        body("Equal", body.dim(query_positions, 1), body.dim(key_positions, 1)),
    )
    return body.branch(body("Squeeze", aligned, 0), tiled, general)


def _hide_by_bias(body: Body, inputs: Inputs) -> Inputs:
    """A key bias that hides its key becomes part of the key mask, and 0."""
    bias = inputs.extra["key_bias"]
    seen = body("Greater", bias, HIDING_BIAS)
    mask = body.all_of(inputs.key_mask, seen)
    finite = body("Where", seen, bias, 0.0)
    return replace(inputs, key_mask=mask, extra={**inputs.extra, "key_bias": finite})


def _with_bias_column(
    body: Body, heads: Heads, inputs: Inputs, scale: float
) -> tuple[Heads, Inputs, float]:
    """The key bias as one more dimension of queries and keys, which are then scaled."""
    query = body("Mul", inputs.query, scale)
    query = body("Concat", query, _ones_column(body, query), axis=-1)
    bias = body(
        "Expand", body.unsqueeze(inputs.extra["key_bias"], 1, 3), [1, heads.num_kv_heads, 1, 1]
    )
    key = body("Concat", inputs.key, bias, axis=-1)
    extra = {name: value for name, value in inputs.extra.items() if name != "key_bias"}
    wider = replace(heads, head_dim=heads.head_dim + 1)
    return wider, replace(inputs, query=query, key=key, extra=extra), 1.0


def _per_row(body: Body, inputs: Inputs, per_head: ir.Value) -> ir.Value:
    """``[num_heads]`` as ``[batch, num_heads, query_len, 1]``."""
    shape = body.shape(body.dim(inputs.query, 0), 1, body.dim(inputs.query, 2), 1)
    return body("Expand", body.unsqueeze(per_head, 0, 2, 3), shape)


def _sees_any_key(body: Body, key_mask: ir.Value) -> ir.Value:
    """1 where the row has a real key, ``[batch, 1, 1, 1]``."""
    return body.unsqueeze(body("ReduceMax", body.as_float(key_mask), [1], keepdims=1), 1, 3)


def _sees_past_key(body: Body, key_mask: ir.Value, left: int) -> ir.Value:
    """1 where an aligned causal query sees a real key, ``[batch, 1, query_len, 1]``."""
    seen = body("CumSum", body("Cast", key_mask, to=7), body.scalar(1, np.int64))
    if left != UNLIMITED:
        older = body.pad(seen, 1, 2, before=left + 1)
        seen = body("Sub", seen, body.slice(older, 0, body.dim(key_mask, 1), 1))
    return body.unsqueeze(body.as_float(body("Greater", seen, 0)), 1, 3)


def _pack(body: Body, value: ir.Value, width: int) -> ir.Value:
    """``[B, H, N, D]`` to the ``[B, N, H * D]`` that com.microsoft kernels read."""
    return body.reshape(body.transpose(value, 0, 2, 1, 3), 0, 0, width)


def _unpack(body: Body, packed: ir.Value, num_heads: int, width: int, keep: int) -> ir.Value:
    split = body.reshape(packed, 0, 0, num_heads, width)
    if keep != width:
        split = body.slice(split, 0, keep, 3)
    return body.transpose(split, 0, 2, 1, 3)


def _mask_column(body: Body, inputs: Inputs, num_heads: int) -> ir.Value:
    """0 for real keys, ``MASKED`` for padding: ``[batch, num_heads, kv_len, 1]``."""
    assert inputs.key_mask is not None
    bias = body("Where", body.unsqueeze(inputs.key_mask, 1, 3), 0.0, MASKED)
    return body("Expand", bias, [1, num_heads, 1, 1])


def _ones_column(body: Body, query: ir.Value) -> ir.Value:
    shape = body("Concat", body("Shape", query, start=0, end=3), 1, axis=0)
    one = ir.AttrTensor("value", ir.tensor(np.ones(1, dtype=np.float32)))
    return body("ConstantOfShape", shape, value=one)


def _pad_to(body: Body, value: ir.Value, width: int, have: int) -> ir.Value:
    return value if have == width else body.pad(value, 3, 4, after=width - have)


def _repeat_heads(body: Body, value: ir.Value, heads: Heads, width: int) -> ir.Value:
    if heads.group == 1:
        return value
    wide = body("Expand", body.unsqueeze(value, 2), [1, 1, heads.group, 1, 1])
    length = body.dim(value, 2)
    return body.reshape(wide, 0, heads.num_heads, length, width)


def _multi_head(body: Body, heads: Heads, inputs: Inputs, scale: float) -> ir.Value:
    query, key = body("Mul", inputs.query, scale), inputs.key
    width = heads.head_dim
    if inputs.key_mask is not None:
        query = body("Concat", query, _ones_column(body, query), axis=-1)
        key = body("Concat", key, _mask_column(body, inputs, heads.num_kv_heads), axis=-1)
        width += 1
    key = _repeat_heads(body, key, heads, width)
    value = _repeat_heads(body, inputs.value, heads, heads.value_dim)
    packed = body(
        "MultiHeadAttention",
        _pack(body, query, heads.num_heads * width),
        _pack(body, key, heads.num_heads * width),
        _pack(body, value, heads.num_heads * heads.value_dim),
        domain=MICROSOFT,
        num_heads=heads.num_heads,
        scale=1.0,
    )
    output = _unpack(body, packed, heads.num_heads, heads.value_dim, heads.value_dim)
    if inputs.key_mask is None:
        return output
    return body("Mul", output, _sees_any_key(body, inputs.key_mask))


def _group_query(
    body: Body, heads: Heads, inputs: Inputs, scale: float, left: int, *, masked: bool
) -> ir.Value:
    query, key = body("Mul", inputs.query, scale), inputs.key
    used = heads.head_dim
    if masked:
        query = body("Concat", query, _ones_column(body, query), axis=-1)
        key = body("Concat", key, _mask_column(body, inputs, heads.num_kv_heads), axis=-1)
        used += 1
    width = -(-max(used, heads.value_dim) // GQA_ALIGNMENT) * GQA_ALIGNMENT
    query, key = _pad_to(body, query, width, used), _pad_to(body, key, width, used)
    value = _pad_to(body, inputs.value, width, heads.value_dim)
    length = body("Cast", body.dim(inputs.query, 2), to=6)
    last = body("Sub", length, np.ones(1, dtype=np.int32))
    window = {} if left == UNLIMITED else {"local_window_size": left + 1}
    packed = body.multi(
        "GroupQueryAttention",
        _pack(body, query, heads.num_heads * width),
        _pack(body, key, heads.num_kv_heads * width),
        _pack(body, value, heads.num_kv_heads * width),
        None,
        None,
        body("Expand", last, body.dim(inputs.query, 0)),
        body("Squeeze", length, 0),
        domain=MICROSOFT,
        num_outputs=3,
        num_heads=heads.num_heads,
        kv_num_heads=heads.num_kv_heads,
        scale=1.0,
        **window,
    )[0]
    output = _unpack(body, packed, heads.num_heads, width, heads.value_dim)
    if not masked:
        return output
    assert inputs.key_mask is not None
    return body("Mul", output, _sees_past_key(body, inputs.key_mask, left))


def _standard(
    body: Body, variant: AttentionVariant, heads: Heads, inputs: Inputs, scale: float
) -> list[ir.Value]:
    """Scores in full; the query heads of one key/value head share its keys."""
    query = body("Mul", inputs.query, scale)
    query_len, kv_len = body.dim(inputs.query, 2), body.dim(inputs.key, 2)
    grouped = heads.group > 1
    if grouped:
        query = body.reshape(query, 0, heads.num_kv_heads, -1, heads.head_dim)
    scores = body.matmul_transposed(query, inputs.key, rank=4)
    if variant.softcap:
        cap = variant.softcap
        scores = body("Mul", body("Tanh", body("Mul", scores, 1.0 / cap)), cap)
    bias = _bias(body, variant, inputs)
    sinks = inputs.extra.get("sink_logits")
    per_query_head = bias is not None or sinks is not None
    if grouped and (per_query_head or variant.has_lse or variant.has_entropy):
        scores = body.reshape(scores, 0, heads.num_heads, query_len, kv_len)
    if bias is not None:
        scores = body("Add", scores, bias)
    if sinks is not None:
        scores = body("Concat", scores, _per_row(body, inputs, sinks), axis=-1)
    rows: list[ir.Value] = []
    if variant.has_lse or variant.has_entropy:
        weights, rows = _weights_and_rows(body, variant, scores, bias)
    else:
        weights = body("Softmax", scores, axis=-1)
    if sinks is not None:
        weights = body.slice(weights, 0, kv_len, 3)
    if grouped:
        weights = body.reshape(weights, 0, heads.num_kv_heads, -1, kv_len)
    output = body("MatMul", weights, inputs.value)
    if grouped:
        output = body.reshape(output, 0, heads.num_heads, query_len, heads.value_dim)
    if bias is not None:
        output = body("Mul", output, body.as_float(_sees_something(body, bias)))
    return [output, *rows]


def _sees_something(body: Body, bias: ir.Value) -> ir.Value:
    """Whether a row sees a key, ``[batch or 1, num_heads or 1, query_len or 1, 1]``."""
    return body("Greater", body("ReduceMax", bias, [-1], keepdims=1), MASKED / 2)


def _weights_and_rows(
    body: Body, variant: AttentionVariant, scores: ir.Value, bias: ir.Value | None
) -> tuple[ir.Value, list[ir.Value]]:
    """Softmax spelled out, with the logarithm of its denominator and its entropy per row."""
    highest = body("ReduceMax", scores, [-1], keepdims=1)
    relative = body("Sub", scores, highest)
    powers = body("Exp", relative)
    total = body("ReduceSum", powers, [-1], keepdims=1)
    weights = body("Div", powers, total)
    log_total = body("Log", total)
    seen = None
    if bias is not None and not variant.has_sink_logits:
        seen = _sees_something(body, bias)
    rows = []
    if variant.has_lse:
        lse = body("Add", log_total, highest)
        rows.append(lse if seen is None else body("Where", seen, lse, -np.inf))
    if variant.has_entropy:
        expected = body("ReduceSum", body("Mul", weights, relative), [-1], keepdims=1)
        entropy = body("Sub", log_total, expected)
        rows.append(entropy if seen is None else body("Where", seen, entropy, 0.0))
    return weights, [body("Squeeze", row, [3]) for row in rows]


def _bias(body: Body, variant: AttentionVariant, inputs: Inputs) -> ir.Value | None:
    """All that is added to the scores, ``MASKED`` where a key is hidden; ``None``: nothing.

    Rank 4, any of its axes may be 1 but the last.
    """
    terms: list[ir.Value] = []
    conditions: list[ir.Value | None] = []
    left, right = variant.window_left, variant.window_right
    if variant.has_positions:
        query_positions, key_positions = inputs.positions
        queries = body("Add", body.arange(body.dim(query_positions, 1)), offset(body, inputs))
        keys = body.arange(body.dim(key_positions, 1))
        distance = body("Sub", body.unsqueeze(queries, 1), body.unsqueeze(keys, 0))
        if left != UNLIMITED:
            conditions.append(body("LessOrEqual", distance, left))
        if right != UNLIMITED:
            conditions.append(body("GreaterOrEqual", distance, -right))
        if "slopes" in inputs.extra:
            if variant.alibi == "absolute":
                distance = body("Abs", distance)
            slopes = body.unsqueeze(body("Neg", inputs.extra["slopes"]), 0, 2, 3)
            terms.append(body("Mul", slopes, body.as_float(distance)))
    if inputs.key_mask is not None:
        conditions.append(body.unsqueeze(inputs.key_mask, 1, 2))
    if "key_bias" in inputs.extra:
        terms.append(body.unsqueeze(inputs.extra["key_bias"], 1, 2))
    if "score_bias" in inputs.extra:
        bias = inputs.extra["score_bias"]
        conditions.append(body("Greater", bias, HIDING_BIAS))
        terms.append(bias)
    visible = body.all_of(*conditions)
    if not terms:
        return None if visible is None else body("Where", visible, 0.0, MASKED)
    total = terms[0]
    for term in terms[1:]:
        total = body("Add", total, term)
    return total if visible is None else body("Where", visible, total, MASKED)
