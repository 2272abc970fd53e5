"""Find attention-like subgraphs and read their parts; nothing is proved here.

Three spellings are read: the standard ``Attention`` operator, com.microsoft
``MultiHeadAttention``, and softmax between two matrix products. A candidate only says where query,
key, value, masks, scale and softcap are; ``mask`` and ``probe`` prove what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import onnx_ir as ir

from subquad.kernels.body import MICROSOFT
from subquad.kernels.operator import DOMAIN
from subquad.passes.recognise.affine import ONE, Affine, OpaqueError
from subquad.passes.recognise.bias import Bias, uniform
from subquad.passes.recognise.layout import (
    Operand,
    as_key,
    as_query,
    as_value,
    before_repetition,
)
from subquad.passes.recognise.mask import HIDDEN_BELOW, Mask, ScoreShape
from subquad.passes.recognise.site import Form
from subquad.passes.recognise.symbolic import Interpreter
from subquad.runtime.errors import Rejection


@dataclass(frozen=True)
class Sizes:
    """The static sizes of an attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int


@dataclass(frozen=True)
class Candidate:
    """An attention-like subgraph, as read.

    Attributes:
        form: the spelling.
        anchor: the Attention or Softmax node.
        query, key, value: operands; ``key`` and ``value`` before any repetition for GQA.
        masks: values and how they act: ``visible`` / ``hidden`` (boolean) or ``additive``.
        mask_axes: axes of the scores, to which masks are broadcast.
        scale, softcap: as in ``AttentionSite``.
        is_causal: the operator itself is causal.
        sizes: static sizes, checked to be consistent.
        output: the value to replace; packed ``[batch, length, heads * dim]`` if ``query.heads``.
        biases: terms of the masks that turned out to be none.
    """

    form: Form
    anchor: ir.Node
    query: Operand
    key: Operand
    value: Operand
    masks: tuple[Mask, ...]
    mask_axes: int
    scale: float
    softcap: float
    is_causal: bool
    sizes: Sizes
    output: ir.Value
    biases: tuple[Bias, ...] = ()

    def score_shape(self, interpreter: Interpreter) -> ScoreShape:
        query, key = self.query.shape(interpreter), self.key.shape(interpreter)
        heads = query[1] if self.mask_axes == 4 else None
        return ScoreShape(query[0], heads, query[2], key[2])


def find_candidates(model: ir.Model, interpreter: Interpreter) -> list[Candidate | Rejection]:
    """Every ``Attention`` and every ``Softmax`` of the model, read or rejected, in order."""
    found: list[Candidate | Rejection] = []
    for node in model.graph:
        if not _is_anchor(node):
            continue
        if node.domain == MICROSOFT:
            read = _read_multi_head
        else:
            read = _read_attention if node.op_type == "Attention" else _read_softmax
        try:
            candidate = read(node, interpreter)
            _check(candidate, interpreter)
            found.append(candidate)
        except OpaqueError as error:
            found.append(Rejection(str(error), where=node_label(node)))
    return [*found, *_hidden_anchors(model)]


def node_label(node: ir.Node) -> str:
    """How reports call a node of the source."""
    return node.name or str(node.outputs[0].name)


def _is_anchor(node: ir.Node) -> bool:
    if node.domain == MICROSOFT:
        return node.op_type.endswith("Attention")
    return node.domain in ("", "ai.onnx") and node.op_type in ("Attention", "Softmax")


def _hidden_anchors(model: ir.Model) -> Iterator[Rejection]:
    """Attention inside branches, loops and functions is found, and left alone."""
    for node in model.graph.all_nodes():
        if _is_anchor(node) and node.graph is not model.graph:
            yield Rejection(
                f"{node.op_type} inside a subgraph (If, Loop or Scan) is not raised: only the "
                "main graph is searched",
                where=node_label(node),
            )
    for function in model.functions.values():
        if function.domain == DOMAIN:
            continue
        for node in function.all_nodes():
            if _is_anchor(node):
                yield Rejection(
                    f"{node.op_type} inside function {function.domain}::{function.name} is not "
                    "raised: inline the functions of the model first",
                    where=node_label(node),
                )


def _check(candidate: Candidate, interpreter: Interpreter) -> None:
    """What replacing needs to know: element types, and batch rows that correspond."""
    operands = (candidate.query, candidate.key, candidate.value)
    shapes = [operand.shape(interpreter) for operand in operands]
    for what, operand, shape in zip(("query", "key", "value"), operands, shapes, strict=True):
        dtype = interpreter.tensor(operand.value).dtype
        if dtype is None:
            raise OpaqueError(
                f"{what} {operand.value.name!r} has no known type: infer shapes first"
            )
        if dtype != ir.DataType.FLOAT:
            raise OpaqueError(f"{what} is {dtype.name}: only float32 attention is raised")
        mismatch = shape[0] - shapes[0][0]
        one = shape[0] == ONE or shapes[0][0] == ONE
        if mismatch != Affine() and (mismatch.is_constant or one):
            raise OpaqueError(
                f"{what} has batch size {shape[0]}, query {shapes[0][0]}: one is broadcast"
            )
    lengths = shapes[1][2] - shapes[2][2]
    if lengths.is_constant and lengths != Affine():
        raise OpaqueError(f"key has length {shapes[1][2]}, value {shapes[2][2]}")


# --- the Attention operator ----------------------------------------------------------------


def _read_attention(node: ir.Node, interpreter: Interpreter) -> Candidate:
    inputs = list(node.inputs) + [None] * (7 - len(node.inputs))
    query, key, value, mask, past_key, past_value, nonpad = inputs[:7]
    if query is None or key is None or value is None:
        raise OpaqueError("Attention without query, key or value")
    if past_key is not None or past_value is not None:
        raise OpaqueError("Attention with past key/value inputs: cached decoding is not raised yet")
    if nonpad is not None:
        raise OpaqueError("Attention with nonpad_kv_seqlen is not raised yet")
    used = [o.name for o in node.outputs[1:] if o.uses() or o.is_graph_output()]
    if used:
        raise OpaqueError(f"further outputs of Attention are used: {', '.join(map(str, used))}")
    packed = len(interpreter.tensor(query).shape) == 3
    heads, kv_heads = _int(node, "q_num_heads"), _int(node, "kv_num_heads")
    if packed and not (heads and kv_heads):
        raise OpaqueError("Attention of three axes without q_num_heads and kv_num_heads")
    query_operand = Operand(query, heads=heads if packed else 0)
    key_operand = before_repetition(Operand(key, heads=kv_heads if packed else 0), interpreter)
    value_operand = before_repetition(Operand(value, heads=kv_heads if packed else 0), interpreter)
    scale = node.attributes.get("scale")
    head_dim = query_operand.shape(interpreter)[3]
    if scale is None and not head_dim.is_constant:
        raise OpaqueError(f"head_dim must be a fixed integer, got {head_dim}")
    softcap = node.attributes.get("softcap")
    masks: tuple[Mask, ...] = ()
    if mask is not None:
        is_bool = interpreter.tensor(mask).dtype == ir.DataType.BOOL
        masks = ((mask, "visible" if is_bool else "additive"),)
    return Candidate(
        form="Attention",
        anchor=node,
        query=query_operand,
        key=key_operand,
        value=value_operand,
        masks=masks,
        mask_axes=4,
        scale=float(head_dim.constant) ** -0.5 if scale is None else scale.as_float(),
        softcap=0.0 if softcap is None else softcap.as_float(),
        is_causal=bool(_int(node, "is_causal")),
        sizes=_sizes(query_operand, key_operand, value_operand, interpreter),
        output=node.outputs[0],
    )


def _read_multi_head(node: ir.Node, interpreter: Interpreter) -> Candidate:
    """com.microsoft MultiHeadAttention of separate packed operands; its relatives are declined."""
    if node.op_type != "MultiHeadAttention":
        raise OpaqueError(f"com.microsoft {node.op_type} is not read yet")
    names = ("query", "key", "value", "bias", "key_padding_mask", "attention_bias")
    inputs = dict(zip(names, node.inputs, strict=False))
    query, key, value = (inputs.get(name) for name in names[:3])
    if query is None or key is None or value is None:
        raise OpaqueError("MultiHeadAttention of packed query, key and value is not read yet")
    more = [name for name in ("bias", "key_padding_mask") if inputs.get(name) is not None]
    if more or any(v is not None for v in node.inputs[6:]):
        raise OpaqueError(
            f"MultiHeadAttention with {' and '.join(more) or 'a cache'} is not read yet"
        )
    used = [o.name for o in node.outputs[1:] if o.uses() or o.is_graph_output()]
    if used:
        raise OpaqueError(f"further outputs of MultiHeadAttention are used: {used[0]}")
    heads = _int(node, "num_heads")
    query_operand, key_operand, value_operand = (
        Operand(v, heads=heads) for v in (query, key, value)
    )
    head_dim = query_operand.shape(interpreter)[3]
    scale = node.attributes.get("scale")
    given = 0.0 if scale is None else scale.as_float()
    bias = inputs.get("attention_bias")
    return Candidate(
        form="MultiHeadAttention",
        anchor=node,
        query=query_operand,
        key=key_operand,
        value=value_operand,
        masks=() if bias is None else ((bias, "additive"),),
        mask_axes=4,
        scale=given or float(head_dim.constant) ** -0.5,
        softcap=0.0,
        is_causal=bool(_int(node, "unidirectional")),
        sizes=_sizes(query_operand, key_operand, value_operand, interpreter),
        output=node.outputs[0],
    )


def _int(node: ir.Node, name: str, default: int = 0) -> int:
    attribute = node.attributes.get(name)
    return default if attribute is None else attribute.as_int()


# --- softmax between two products ----------------------------------------------------------

# Operators that may stand between the score product and the softmax.
_TRANSPARENT = ("Cast", "Identity", "Add", "Where", "Mul", "Div", "Tanh")
_FLOATS = (ir.DataType.FLOAT, ir.DataType.DOUBLE)


def _read_softmax(node: ir.Node, interpreter: Interpreter) -> Candidate:
    output = _output_product(node, interpreter)
    scores = _input(node, 0)
    rank = len(interpreter.tensor(scores).shape)
    axis = _int(node, "axis", -1)
    if axis not in (-1, rank - 1):
        raise OpaqueError(f"softmax over axis {axis}, not over keys")
    masks, value = _peel_masks(scores, interpreter)
    scale, value = _peel_scale(value, interpreter)
    softcap = Fraction(0)
    tanh = value.producer()
    if tanh is not None and tanh.op_type == "Tanh":
        # c * tanh(f * x) is the softcap c of the scores (f * c) * x.
        inner, value = _peel_scale(_input(tanh, 0), interpreter)
        softcap, scale = abs(scale), scale * inner
    _require_only_use(value)
    product = value.producer()
    if product is None or product.op_type != "MatMul":
        what = "a graph input or constant" if product is None else f"operator {product.op_type}"
        raise OpaqueError(f"expected query x key before scale, softcap and masks, found {what}")
    query_scale, query = _peel_scale(_input(product, 0), interpreter)
    key_scale, key = _peel_scale(_input(product, 1), interpreter)
    query_operand = as_query(query, interpreter)
    key_operand = as_key(key, interpreter)
    value_operand = as_value(_input(output, 1), interpreter)
    if key_operand.shape(interpreter)[1] != value_operand.shape(interpreter)[1]:
        # Only one of them could be read before its repetition: neither is.
        key_operand = as_key(key, interpreter, grouped=False)
        value_operand = as_value(_input(output, 1), interpreter, grouped=False)
    return Candidate(
        form="decomposed",
        anchor=node,
        query=query_operand,
        key=key_operand,
        value=value_operand,
        masks=tuple(masks),
        mask_axes=rank,
        scale=float(scale * query_scale * key_scale),
        softcap=float(softcap),
        is_causal=False,
        sizes=_sizes(query_operand, key_operand, value_operand, interpreter),
        output=output.outputs[0],
    )


def _input(node: ir.Node, number: int) -> ir.Value:
    value = node.inputs[number]
    if value is None:
        raise OpaqueError(f"input {number} of {node.op_type} {node_label(node)!r} is absent")
    return value


def _require_only_use(value: ir.Value) -> None:
    # Its shape may be asked for: nothing of the value itself is.
    users = [use.node for use in value.uses() if use.node.op_type != "Shape"]
    if len(users) != 1 or value.is_graph_output():
        raise OpaqueError(f"the intermediate value {value.name!r} is used elsewhere too")


def _through_casts(value: ir.Value, interpreter: Interpreter) -> ir.Value:
    """Skip casts that keep float32, and those to a wider type and back."""
    while True:
        node = value.producer()
        if node is None or node.op_type not in ("Cast", "Identity"):
            return value
        source = _input(node, 0)
        if interpreter.tensor(source).dtype not in _FLOATS:
            return value
        value = source


def _carries_scores(value: ir.Value) -> bool:
    """Whether ``value`` comes from a matrix product through operators that scores pass."""
    stack, seen = [value], set()
    while stack:
        current = stack.pop()
        node = current.producer()
        if node is None or current in seen:
            continue
        seen.add(current)
        if node.op_type == "MatMul":
            return True
        if node.op_type in _TRANSPARENT:
            stack.extend(v for v in node.inputs if v is not None)
    return False


def _peel_masks(value: ir.Value, interpreter: Interpreter) -> tuple[list[Mask], ir.Value]:
    """Masks added to, or selecting, the scores; nearest the softmax first."""
    masks: list[Mask] = []
    while True:
        value = _through_casts(value, interpreter)
        node = value.producer()
        if node is None or node.op_type not in ("Add", "Where"):
            return masks, value
        if node.op_type == "Add":
            left, right = _input(node, 0), _input(node, 1)
            carrying = [_carries_scores(left), _carries_scores(right)]
            if carrying == [True, True]:
                raise OpaqueError("two computed terms are added: a score bias, not a mask")
            if carrying == [False, False]:
                raise OpaqueError("no matrix product before the softmax: not an attention")
            value, mask = (left, right) if carrying[0] else (right, left)
            masks.append((mask, "additive"))
            continue
        condition, chosen, other = (_input(node, i) for i in range(3))
        value, fill = (chosen, other) if _carries_scores(chosen) else (other, chosen)
        filled = uniform(fill, interpreter)
        if filled is None or not filled <= HIDDEN_BELOW:
            what = "values that vary" if filled is None else f"{filled:g}"
            raise OpaqueError(f"masked scores are set to {what}, not to a large negative value")
        masks.append((condition, "visible" if value is chosen else "hidden"))


def _peel_scale(value: ir.Value, interpreter: Interpreter) -> tuple[Fraction, ir.Value]:
    """Factors and divisors that are the same everywhere -> their exact product and the rest."""
    scale = Fraction(1)
    while True:
        value = _through_casts(value, interpreter)
        node = value.producer()
        if node is None or node.op_type not in ("Mul", "Div"):
            return scale, value
        left, right = _input(node, 0), _input(node, 1)
        factor = _factor(right, interpreter)
        if factor is not None:
            scale, value = (scale / factor if node.op_type == "Div" else scale * factor), left
            continue
        factor = _factor(left, interpreter) if node.op_type == "Mul" else None
        if factor is None:
            return scale, value
        scale, value = scale * factor, right


def _factor(value: ir.Value, interpreter: Interpreter) -> Fraction | None:
    """A finite constant other than zero."""
    number = uniform(value, interpreter)
    if number is None or number == 0 or not math.isfinite(number):
        return None
    return Fraction(number)


def _output_product(softmax: ir.Node, interpreter: Interpreter) -> ir.Node:
    """The product of attention weights and values; only casts and NaN guards may stand between."""
    weights = softmax.outputs[0]
    while True:
        # Its shape may be asked for: nothing of the weights themselves is.
        users = list(dict.fromkeys(u.node for u in weights.uses() if u.node.op_type != "Shape"))
        if weights.is_graph_output() or not users:
            raise OpaqueError("the softmax is an output of the graph, or unused")
        guarded = _after_nan_guard(weights, users, interpreter)
        if guarded is not None:
            weights = guarded
            continue
        if len(users) != 1:
            raise OpaqueError("the softmax is used in several places: its weights are needed")
        node = users[0]
        if node.op_type in ("Cast", "Identity", "Dropout"):
            weights = node.outputs[0]
            continue
        if node.op_type == "MatMul" and node.inputs[0] is weights:
            if node.inputs[1] is weights or node.graph is not softmax.graph:
                raise OpaqueError("the softmax is multiplied by itself, or inside a subgraph")
            return node
        raise OpaqueError(
            f"the softmax goes into {node.op_type}, not into a product with values: no attention"
        )


def _after_nan_guard(
    weights: ir.Value, users: list[ir.Node], interpreter: Interpreter
) -> ir.Value | None:
    """``where(isnan(w), 0, w)``: rows that see no key become zeros, as raised nodes have them."""
    guard = next((n for n in users if n.op_type == "Where"), None)
    if guard is None or len(users) != 2 or guard.inputs[2] is not weights:
        return None
    condition = _input(guard, 0).producer()
    if condition is None or condition not in users or condition.op_type != "IsNaN":
        return None
    fill = uniform(_input(guard, 1), interpreter)
    if fill != 0.0:
        raise OpaqueError(f"weights that are NaN are set to {fill}, not to zero")
    return guard.outputs[0]


# --- sizes ---------------------------------------------------------------------------------


def _sizes(query: Operand, key: Operand, value: Operand, interpreter: Interpreter) -> Sizes:
    shapes = [operand.shape(interpreter) for operand in (query, key, value)]
    for what, shape in zip(("query", "key", "value"), shapes, strict=True):
        for axis, dim in ((1, shape[1]), (3, shape[3])):
            if not dim.is_constant:
                name = "head count" if axis == 1 else "head dimension"
                raise OpaqueError(
                    f"{what}: the {name} must be a fixed integer, got {dim}; "
                    "re-export with a static head count and dimension"
                )
    (heads, head_dim), (kv_heads, key_dim), (value_heads, value_dim) = (
        (int(shape[1].constant), int(shape[3].constant)) for shape in shapes
    )
    if key_dim != head_dim or value_heads != kv_heads or heads % max(kv_heads, 1):
        raise OpaqueError(
            f"query has {heads} heads of {head_dim}, key {kv_heads} of {key_dim}, "
            f"value {value_heads}: not an attention"
        )
    return Sizes(heads, kv_heads, head_dim, value_dim)
