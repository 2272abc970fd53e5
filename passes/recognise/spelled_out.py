"""Attention operators, written beside themselves in standard operators.

ONNX Runtime's transformer optimizer and model builder write com.microsoft ``Attention``
(projections included), ``MultiHeadAttention`` and ``GroupQueryAttention``; the standard
``Attention`` has caches and windows inside. Each gets a *twin*: projections, rotation, caches,
masks, softmax and products as standard operators, which are then read and proved like any other
attention. A twin is used only if ONNX Runtime computes the same from it as from the operator, on
random inputs whose scores are spread wide. What is not raised keeps its operator.

Left alone, with the reason: buffers that hold past and present in one, Megatron's masks, packed
batches, quantised caches, scores that are an output. GroupQueryAttention gives no meaning to query
rows behind ``seqlens_k``; they are not compared.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from subquad.kernels.body import MICROSOFT
from subquad.passes.recognise.affine import OpaqueError
from subquad.passes.recognise.candidates import check_further_outputs, check_type, int_attribute
from subquad.passes.recognise.real_tokens import counts_real, counts_slots
from subquad.passes.recognise.site import Form
from subquad.passes.recognise.speller import Inputs, Outputs, Rules, Speller, Twin
from subquad.passes.recognise.symbolic import Interpreter

_INT64 = ir.DataType.INT64
_BOOL = ir.DataType.BOOL


def twin_of(node: ir.Node, interpreter: Interpreter, opset: int) -> Twin:
    """The twin of an attention operator, in ``opset``; its nodes are in no graph yet.

    Raises:
        OpaqueError: it is another operator, or does more than attention.
    """
    domain = "" if node.domain == "ai.onnx" else node.domain
    reader = _READERS.get((domain, node.op_type))
    if reader is None:
        raise OpaqueError(f"com.microsoft {node.op_type} is not read yet")
    form, read = reader
    if node.inputs[0] is not None:
        check_type("query", node.inputs[0], interpreter)
    speller = Speller(node, interpreter, opset)
    outputs = read(speller)
    used = [o for o in node.outputs if o.uses() or o.is_graph_output()]
    check_further_outputs(node, outputs)
    assert speller.softmax is not None and speller.scores is not None
    return Twin(
        fused=node,
        form=form,
        softmax=speller.softmax,
        scores=speller.scores,
        outputs={o: outputs[o] for o in used},
        roles=speller.roles,
        last=speller.last,
        real=speller.real,
        nodes=list(speller.nodes),
    )


def needs_twin(node: ir.Node) -> bool:
    """Whether an attention operator does more than ``candidates`` and ``linear`` read."""
    if node.op_type == "LinearAttention":
        return False
    given = {place for place, value in enumerate(node.inputs) if value is not None}
    if node.domain == MICROSOFT:
        plain = node.op_type == "MultiHeadAttention" and given in ({0, 1, 2}, {0, 1, 2, 5})
        return not plain
    windows = (int_attribute(node, name, -1) for name in ("left_window_size", "right_window_size"))
    return node.op_type == "Attention" and (bool(given - {0, 1, 2, 3}) or max(windows) >= 0)


# --- the standard operator -------------------------------------------------------------------


def _read_standard(s: Speller) -> Outputs:
    """Windows, and caches: inside as past and present, or outside with a number of real keys."""
    names = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
    inputs = Inputs(s.node, names)
    given = [inputs.needed(name) for name in names[:3]]
    mask, past_key, past_value, nonpad = (inputs(name) for name in names[3:])
    inputs.check_all_read()
    s.hold(activation=given, past=[past_key, past_value], nonpad=[nonpad])
    packed = s.rank(given[0]) == 3
    heads, kv_heads = (int_attribute(s.node, name) for name in ("q_num_heads", "kv_num_heads"))
    if packed and not (heads and kv_heads):
        raise OpaqueError("Attention of three axes without q_num_heads and kv_num_heads")
    if not packed:
        heads, kv_heads = (s.width(value, 1) for value in given[:2])
    counts = (heads, kv_heads, kv_heads) if packed else (0, 0, 0)
    query, key, value = (
        s.split_heads(operand, count) if count else operand
        for operand, count in zip(given, counts, strict=True)
    )
    if past_key is not None and past_value is not None:
        key, value = s.extended(past_key, key), s.extended(past_value, value)
    terms = []
    if mask is not None:
        terms.append(s.mask_term(mask, key))
    first = None if past_key is None else s.size(past_key, 2)
    if nonpad is not None:
        column = s.op("Reshape", nonpad, s.ints([-1, 1, 1, 1]), dtype=_INT64)
        first = s.op("Sub", column, s.size(query, 2), dtype=_INT64)
        terms.append(s.hiding(s.op("Less", s.slots(key, 2), column, dtype=_BOOL)))
    is_causal = bool(int_attribute(s.node, "is_causal"))
    left, right = (
        int_attribute(s.node, name, -1) for name in ("left_window_size", "right_window_size")
    )
    rules = Rules(
        s.number("scale"),
        terms,
        left=left,
        right=0 if is_causal else right,
        first=first,
        softcap=s.number("softcap"),
    )
    wide_key, wide_value = (s.repeated(operand, heads, kv_heads) for operand in (key, value))
    output = s.attend(query, wide_key, wide_value, heads, rules)
    outputs = {s.node.outputs[0]: s.packed(output) if packed else output}
    if past_key is not None:
        outputs |= dict(zip(s.node.outputs[1:3], (key, value), strict=False))
    return outputs


# --- com.microsoft ---------------------------------------------------------------------------


def _read_attention(s: Speller) -> Outputs:
    """Input and packed weights of all three projections; keys and values of a cache in one."""
    names = ("input", "weights", "bias", "mask_index", "past", "attention_bias")
    inputs = Inputs(s.node, (*names, "past_sequence_length"))
    x, weights, bias = inputs.needed("input"), inputs.needed("weights"), inputs("bias")
    mask, past, extra = inputs("mask_index"), inputs("past"), inputs("attention_bias")
    inputs.check_all_read()
    if int_attribute(s.node, "do_rotary"):
        raise OpaqueError("com.microsoft Attention with do_rotary is not read yet")
    heads = int_attribute(s.node, "num_heads")
    given = s.node.attributes.get("qkv_hidden_sizes")
    sizes = list(given.as_ints()) if given is not None else [s.width(weights) // 3] * 3
    projected = s.op("MatMul", x, weights)
    if bias is not None:
        projected = s.op("Add", projected, bias)
    starts = (0, sizes[0], sizes[0] + sizes[1])
    query, key, value = (
        s.split_heads(s.slice(projected, start, start + size, 2), heads)
        for start, size in zip(starts, sizes, strict=True)
    )
    s.hold(activation=[x], table=[weights, bias], bias=[extra], past=[past])
    first: ir.Value | None = None
    if past is not None:  # [2, batch, heads, past, dim]
        first = s.size(past, 3)
        key, value = (
            s.extended(s.op("Gather", past, s.ints(number), axis=0), new)
            for number, new in enumerate((key, value))
        )
    terms = [] if extra is None else [extra]
    if mask is not None:
        terms.append(s.padding(mask, s.number("mask_filter_value", -10000.0), key))
    is_causal = bool(int_attribute(s.node, "unidirectional"))
    rules = Rules(s.number("scale"), terms, right=0 if is_causal else -1, first=first)
    outputs = {s.node.outputs[0]: s.packed(s.attend(query, key, value, heads, rules))}
    both = [s.op("Unsqueeze", whole, s.ints([0])) for whole in (key, value)]
    return outputs | dict.fromkeys(s.node.outputs[1:2], s.op("Concat", *both, axis=0))


def _read_multi_head(s: Speller) -> Outputs:
    """Separate projections, with a bias of all three, padding, a cache, and a score bias."""
    names = ("query", "key", "value", "bias", "key_padding_mask", "attention_bias", "past_key")
    inputs = Inputs(s.node, (*names, "past_value", "past_sequence_length", "cache_indirection"))
    query, key, value = inputs.needed("query"), inputs("key"), inputs("value")
    bias, mask, extra, past_key = (inputs(name) for name in names[3:])
    past_value = inputs("past_value")
    inputs.check_all_read()
    s.hold(activation=[query, key, value], table=[bias], bias=[extra], past=[past_key, past_value])
    if key is None or value is None:
        raise OpaqueError("MultiHeadAttention of packed operands is run on GPUs only")
    heads = int_attribute(s.node, "num_heads")
    parts, start = [query, key, value], 0
    if bias is not None:
        for number, part in enumerate(parts):
            if s.rank(part) != 3:
                raise OpaqueError("MultiHeadAttention with a bias on keys of four axes")
            width = s.width(part)
            parts[number] = s.op("Add", part, s.slice(bias, start, start + width, 0))
            start += width
    q, k, v = (part if s.rank(part) == 4 else s.split_heads(part, heads) for part in parts)
    first: ir.Value | None = None
    if past_key is not None and past_value is not None:
        first = s.size(past_key, 2)
        k, v = s.extended(past_key, k), s.extended(past_value, v)
    terms = [] if extra is None else [extra]
    if mask is not None:
        terms.append(s.padding(mask, s.number("mask_filter_value", -10000.0), k))
    is_causal = bool(int_attribute(s.node, "unidirectional"))
    if is_causal and s.length(query) != s.length(key):
        raise OpaqueError("MultiHeadAttention that is causal over keys of another length")
    rules = Rules(s.number("scale"), terms, right=0 if is_causal else -1, first=first)
    outputs = {s.node.outputs[0]: s.packed(s.attend(q, k, v, heads, rules))}
    return outputs | dict(zip(s.node.outputs[1:3], (k, v), strict=False))


def _read_group_query(s: Speller) -> Outputs:
    """Causal, fewer key heads, rotation inside, with a cache or without."""
    names = ("query", "key", "value", "past_key", "past_value", "seqlens_k")
    more = ("total_sequence_length", "cos_cache", "sin_cache", "position_ids", "attention_bias")
    inputs = Inputs(s.node, (*names, *more, "head_sink", "k_scale", "v_scale"))
    query, key, value = inputs.needed("query"), inputs("key"), inputs("value")
    past_key, past_value, last = (inputs(name) for name in names[3:])
    total, cos, sin, positions, extra = (inputs(name) for name in more)
    sinks: ir.Value | float | None = inputs("head_sink")
    inputs.check_all_read()
    heads, kv_heads = (int_attribute(s.node, name) for name in ("num_heads", "kv_num_heads"))
    window = int_attribute(s.node, "local_window_size", -1)
    s.hold(
        activation=[query, key, value],
        table=[cos, sin, inputs("head_sink")],
        past=[past_key, past_value],
        positions=[positions],
        bias=[extra],
    )
    if past_key is None:
        s.hold(last=[last], total=[total])
        s.last = last
    else:
        s.real = _real_tokens(s, last, total)
        if extra is not None or window > 0:
            what = "attention_bias" if window <= 0 else "local_window_size"
            raise OpaqueError(
                f"GroupQueryAttention with a cache and {what}: it counts real tokens where rows "
                "are padded behind their prompt, and no slots"
            )
    if key is None or value is None:
        dim = s.width(query) // (heads + 2 * kv_heads)
        ends = (heads * dim, (heads + kv_heads) * dim, (heads + 2 * kv_heads) * dim)
        whole = query
        query, key, value = (
            s.slice(whole, start, end, 2) for start, end in zip((0, *ends), ends, strict=False)
        )
    q = s.split_heads(query, heads)
    k, v = s.split_heads(key, kv_heads), s.split_heads(value, kv_heads)
    if int_attribute(s.node, "do_rotary"):
        if cos is None or sin is None:
            raise OpaqueError("GroupQueryAttention with do_rotary and without its tables")
        places = _positions(s, q) if positions is None else positions
        q, k = (s.rotated(operand, cos, sin, places) for operand in (q, k))
    first: ir.Value | None = None
    terms = [] if extra is None else [extra]
    if past_key is not None and past_value is not None:
        first = s.size(past_key, 2)
        k, v = s.extended(past_key, k), s.extended(past_value, v)
        assert s.real is not None
        terms.append(s.padding(s.real, float("-inf"), k))
        s.hold(real=[s.real])
    if int_attribute(s.node, "smooth_softmax") and sinks is None:
        sinks = 0.0
    rules = Rules(
        s.number("scale"),
        terms,
        left=window - 1 if window > 0 else -1,
        right=0 if int_attribute(s.node, "causal", 1) else -1,
        first=first,
        softcap=s.number("softcap"),
        sinks=sinks,
    )
    wide_key, wide_value = (s.repeated(operand, heads, kv_heads) for operand in (k, v))
    outputs = {s.node.outputs[0]: s.packed(s.attend(q, wide_key, wide_value, heads, rules))}
    return outputs | dict(zip(s.node.outputs[1:3], (k, v), strict=False))


def _real_tokens(s: Speller, last: ir.Value | None, total: ir.Value | None) -> ir.Value:
    """The 0/1 input whose real tokens, past and new, ``seqlens_k`` counts."""
    real = None if last is None else counts_real(last, s.interpreter)
    if real is None:
        raise OpaqueError(
            "GroupQueryAttention with a cache: seqlens_k is not the number of real tokens of an "
            "input [batch, past + length], less one, so the slots of its keys are not known"
        )
    if total is None or not counts_slots(total, real, s.interpreter):
        raise OpaqueError(
            f"GroupQueryAttention with a cache: total_sequence_length is not the length of "
            f"{real.name!r}"
        )
    return real


def _positions(s: Speller, query: ir.Value) -> ir.Value:
    """``[batch, length]``: 0, 1, 2, ...; behind a cache the number of real tokens before."""
    if s.real is not None:
        real = s.op("Cast", s.real, dtype=_INT64, to=int(_INT64))
        count = s.op("CumSum", real, s.ints(1), dtype=_INT64)
        place = s.op("Sub", count, s.ints(1), dtype=_INT64)
        # A padded first token is at no position: row 0 of the tables does.
        place = s.op("Max", place, s.ints(0), dtype=_INT64)
        start = s.op("Neg", s.op("Shape", query, dtype=_INT64, start=2, end=3), dtype=_INT64)
        end = s.ints([1 << 62])
        return s.op("Slice", place, start, end, s.ints([1]), dtype=_INT64)
    row = s.op("Unsqueeze", s.slots(query, 2), s.ints([0]), dtype=_INT64)
    batch = s.op("Shape", query, dtype=_INT64, start=0, end=1)
    shape = s.op("Concat", batch, s.ints([1]), dtype=_INT64, axis=0)
    return s.op("Expand", row, shape, dtype=_INT64)


_READERS: dict[tuple[str, str], tuple[Form, Callable[[Speller], Outputs]]] = {
    ("", "Attention"): ("Attention", _read_standard),
    (MICROSOFT, "Attention"): ("com.microsoft Attention", _read_attention),
    (MICROSOFT, "MultiHeadAttention"): ("MultiHeadAttention", _read_multi_head),
    (MICROSOFT, "GroupQueryAttention"): ("GroupQueryAttention", _read_group_query),
}
